// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// What the C interface needs of a backend: where its calls run, and the kernels of each pair of scalars.

#ifndef KOKKOSSOFTMAX_CBACKEND_HPP
#define KOKKOSSOFTMAX_CBACKEND_HPP

#include "KokkosSoftmax_CCalls.hpp"

namespace KokkosSoftmax::c {

/// Device and stream, as the caller said them.
struct Place {
  int device = -1;
  void* stream = nullptr;
};

class Backend {
 public:
  virtual ~Backend() = default;

  /// Before Kokkos is initialised: throws where that would end the program.
  virtual void check_machine(Kokkos::InitializationSettings&, int /*device*/) const {}
  /// Why a pointer that is said to be the host's is not; null: it may be.
  virtual const char* refuse_as_host_memory(const void*) const { return nullptr; }

  virtual void rows(const Place&, const RowsCall&) = 0;
  virtual void head(const Place&, const HeadCall&) = 0;
  virtual std::shared_ptr<void> pack(const Place&, const Array& w) = 0;
  virtual void synchronize(const Place&) = 0;
  virtual void forget(const Place&) {}
  /// Before Kokkos is finalised.
  virtual void release() {}
};

/// The backend of the host.
Backend& host_backend();
/// Null where the library was built without CUDA.
Backend* cuda_backend();

// ---- Which kernels are compiled: each pair of scalars -----------------------------------------------------

template <class Exec>
void rows_of_scalars(const Exec& exec, const RowsCall& call) {
#define KOKKOSSOFTMAX_CALL(IN, OUT)                                            \
  if (call.x.scalar == scalar_code<IN> && call.y.scalar == scalar_code<OUT>) { \
    return call_rows<Exec, IN, OUT>(exec, call);                               \
  }
  KOKKOSSOFTMAX_FOR_EACH_SCALAR_PAIR(KOKKOSSOFTMAX_CALL)
#undef KOKKOSSOFTMAX_CALL
  unsupported(call.function(),
              "there is no kernel for this pair of scalars: the output has the scalar of x, "
              "or is FLOAT where x is HALF or BFLOAT16");
}

#if defined(KOKKOSSOFTMAX_ENABLE_LINEAR)
/// The chains with kernels of their own are compiled for devices.
template <class Exec>
bool run_named_head(const Exec& exec, const HeadCall& call) {
  if constexpr (std::is_same_v<Exec, Kokkos::DefaultHostExecutionSpace>) {
    return false;
  } else {
    return call_named_head(exec, call);
  }
}

template <class Exec>
void head_of_scalars(const Exec& exec, const HeadCall& call) {
  if (call.x.scalar == call.w.scalar) {
    if (call.x.scalar == KOKKOSSOFTMAX_FLOAT && call.y.scalar == KOKKOSSOFTMAX_FLOAT &&
        run_named_head(exec, call)) {
      return;
    }
#define KOKKOSSOFTMAX_CALL(IN, OUT)                                            \
  if (call.x.scalar == scalar_code<IN> && call.y.scalar == scalar_code<OUT>) { \
    return call_head<Exec, IN, OUT>(exec, call);                               \
  }
    KOKKOSSOFTMAX_FOR_EACH_SCALAR_PAIR(KOKKOSSOFTMAX_CALL)
#undef KOKKOSSOFTMAX_CALL
  }
  unsupported(call.function(),
              "there are no kernels for these scalars: x and w have the same one, and y has "
              "that too, or is FLOAT where they are HALF or BFLOAT16");
}

template <class Exec>
std::shared_ptr<void> pack_of_scalar(const Exec& exec, const Array& w) {
#define KOKKOSSOFTMAX_CALL(T, name) \
  if (w.scalar == scalar_code<T>) return pack_weights<Exec, T>(exec, w);
  KOKKOSSOFTMAX_FOR_EACH_SCALAR(KOKKOSSOFTMAX_CALL)
#undef KOKKOSSOFTMAX_CALL
  unsupported("pack", "weights are FLOAT, DOUBLE, HALF or BFLOAT16");
}
#else
// Their callers have refused already.
template <class Exec>
void head_of_scalars(const Exec&, const HeadCall&) {}
template <class Exec>
std::shared_ptr<void> pack_of_scalar(const Exec&, const Array&) {
  return nullptr;
}
#endif

}  // namespace KokkosSoftmax::c

#endif
