// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include <KokkosSoftmax_Linear.hpp>

void call(const Kokkos::DefaultExecutionSpace& exec) {
  Kokkos::View<float**> x, y;
#ifdef KOKKOSSOFTMAX_EXPECT_ERROR
  Kokkos::View<float***> w;
#else
  Kokkos::View<float**> w;
#endif
  KokkosSoftmax::linear_softmax(exec, x, w, y);
}
