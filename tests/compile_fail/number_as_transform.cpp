// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include <KokkosSoftmax.hpp>

void call(const Kokkos::DefaultExecutionSpace& exec) {
  Kokkos::View<float**> x;
#ifdef KOKKOSSOFTMAX_EXPECT_ERROR
  KokkosSoftmax::softmax(exec, x, x, 2.0f);
#else
  KokkosSoftmax::softmax(exec, x, x, KokkosSoftmax::scale(2.0f));
#endif
}
