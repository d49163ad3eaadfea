// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the C++ library gives, for the Fortran test to compare with. It finds the Kokkos that the module
// initialised.
#include <KokkosSoftmax.hpp>

namespace {

namespace ks = KokkosSoftmax;
using Exec = Kokkos::DefaultHostExecutionSpace;

template <class T>
using View =
    Kokkos::View<T****, Kokkos::LayoutStride, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;

// Extents and strides are Fortran's, in its order.
template <class T>
View<T> view_of(void* data, const std::int64_t* extents, const std::int64_t* strides) {
  Kokkos::LayoutStride layout;
  for (int d = 0; d < 4; ++d) {
    layout.dimension[3 - d] = static_cast<std::size_t>(extents[d]);
    layout.stride[3 - d] = static_cast<std::size_t>(strides[d]);
  }
  return View<T>(static_cast<T*>(data), layout);
}

template <class T>
void compute(bool log, void* x, void* y, const std::int64_t* extents, const std::int64_t* x_strides,
             const std::int64_t* y_strides, int dim, const double* scale) {
  const Exec exec;
  const auto from = view_of<T>(x, extents, x_strides), to = view_of<T>(y, extents, y_strides);
  const auto axis = ks::axis(4 - dim);
  const auto run = [&](const auto&... transform) {
    if (log) {
      ks::log_softmax(exec, from, to, axis, transform...);
    } else {
      ks::softmax(exec, from, to, axis, transform...);
    }
  };
  if (scale) {
    run(ks::scale(*scale));
  } else {
    run();
  }
  exec.fence();
}

}  // namespace

extern "C" void cpp_result(int log, int bytes, void* x, void* y, const std::int64_t* extents,
                           const std::int64_t* x_strides, const std::int64_t* y_strides, int dim,
                           const double* scale) {
  if (bytes == 4) {
    compute<float>(log != 0, x, y, extents, x_strides, y_strides, dim, scale);
  } else {
    compute<double>(log != 0, x, y, extents, x_strides, y_strides, dim, scale);
  }
}
