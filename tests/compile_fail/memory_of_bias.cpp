// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include <KokkosSoftmax.hpp>

// On a backend that reaches the memory of the host there is nothing to refuse.
void call(const Kokkos::DefaultExecutionSpace& exec) {
  Kokkos::View<float**> x;
#ifdef KOKKOSSOFTMAX_EXPECT_ERROR
  Kokkos::View<float*, Kokkos::HostSpace> b;
#else
  Kokkos::View<float*> b;
#endif
  KokkosSoftmax::softmax(exec, x, x, KokkosSoftmax::bias(b) | KokkosSoftmax::gelu());
}
