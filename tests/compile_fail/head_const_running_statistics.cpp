// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include <KokkosSoftmax_Linear.hpp>

void call(const Kokkos::DefaultExecutionSpace& exec) {
  Kokkos::View<float**> x, w, y;
  Kokkos::View<float*> gamma, beta, mean;
#ifdef KOKKOSSOFTMAX_EXPECT_ERROR
  Kokkos::View<const float*> variance;
#else
  Kokkos::View<float*> variance;
#endif
  KokkosSoftmax::linear_softmax(exec, x, w, y,
                                KokkosSoftmax::batch_norm_training(gamma, beta, 1e-5, mean, variance, 0.1));
}
