// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include <KokkosSoftmax.hpp>

// On a backend that reaches the memory of the host there is nothing to refuse.
void call(const Kokkos::DefaultExecutionSpace& exec) {
#ifdef KOKKOSSOFTMAX_EXPECT_ERROR
  Kokkos::View<float**, Kokkos::HostSpace> x;
#else
  Kokkos::View<float**> x;
#endif
  Kokkos::View<float**> y;
  KokkosSoftmax::softmax(exec, x, y);
}
