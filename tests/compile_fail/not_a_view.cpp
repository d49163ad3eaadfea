// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include <KokkosSoftmax.hpp>

void call(const Kokkos::DefaultExecutionSpace& exec) {
  Kokkos::View<float*> y;
#ifdef KOKKOSSOFTMAX_EXPECT_ERROR
  float* x = nullptr;
#else
  Kokkos::View<float*> x;
#endif
  KokkosSoftmax::softmax(exec, x, y);
}
