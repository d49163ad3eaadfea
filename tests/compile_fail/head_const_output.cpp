// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include <KokkosSoftmax_Linear.hpp>

void call(const Kokkos::DefaultExecutionSpace& exec) {
  Kokkos::View<float**> x, w;
#ifdef KOKKOSSOFTMAX_EXPECT_ERROR
  Kokkos::View<const float**> y;
#else
  Kokkos::View<float**> y;
#endif
  KokkosSoftmax::linear_log_softmax(exec, x, w, y);
}
