// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The calls of the C interface once their structs are read: what the sources that hold kernels define, each
/// for its backend and scalars, and the source that reads structs chooses from.

#ifndef KOKKOSSOFTMAX_CCALLS_HPP
#define KOKKOSSOFTMAX_CCALLS_HPP

#include "KokkosSoftmax_CArray.hpp"

#include <KokkosSoftmax_config.hpp>
#include <impl/KokkosSoftmax_Online.hpp>

#include <memory>
#include <stdexcept>
#include <string>

namespace KokkosSoftmax::c {

/// An error that is not one of std::invalid_argument.
class Failure : public std::runtime_error {
 public:
  Failure(kokkossoftmax_status status, const std::string& what) : std::runtime_error(what), status_(status) {}
  kokkossoftmax_status status() const { return status_; }

 private:
  kokkossoftmax_status status_;
};

[[noreturn]] inline void unsupported(const std::string& function, const std::string& what) {
  throw Failure(KOKKOSSOFTMAX_UNSUPPORTED, "KokkosSoftmax::" + function + ": " + what);
}

inline constexpr int max_steps = KOKKOSSOFTMAX_MAX_TRANSFORMS;

/// A transform whose struct and operands' descriptors are in order; whether it fits the call is seen later.
struct Step {
  std::int32_t kind = 0;
  bool is_checked = false;
  double number = 0, momentum = 0;
  index_type offset = 0;
  Array operand[4];
  bool has_operand[4] = {};
};

struct Steps {
  int count = 0;
  Step step[max_steps];
};

struct RowsCall {
  impl::Operation operation = impl::Operation::softmax;
  bool reserve = false;
  Array x, y;
  int axis = -1;
  Steps steps;

  const char* function() const { return reserve ? "reserve" : impl::operation_name(operation); }
};

template <class Exec, class In, class Out>
void call_rows(const Exec& exec, const RowsCall& call);

struct HeadCall {
  impl::Operation operation = impl::Operation::softmax;
  bool reserve = false;
  bool tf32 = false;
  Array x, w, y;
  const void* packed = nullptr;  ///< in place of w: PackedWeights<Exec, scalar of x>
  Steps steps;

  const char* function() const {
    return reserve                                 ? "reserve_linear"
           : operation == impl::Operation::softmax ? "linear_softmax"
                                                   : "linear_log_softmax";
  }
};

/// X and W of the same scalar.
template <class Exec, class In, class Out>
void call_head(const Exec& exec, const HeadCall& call);

/// The chains that have kernels of their own. Whether it was one, and is done.
template <class Exec>
bool call_named_head(const Exec& exec, const HeadCall& call);

template <class Exec, class T>
std::shared_ptr<void> pack_weights(const Exec& exec, const Array& w);

}  // namespace KokkosSoftmax::c

#endif
