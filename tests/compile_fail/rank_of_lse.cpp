// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include <KokkosSoftmax.hpp>

void call(const Kokkos::DefaultExecutionSpace& exec) {
  Kokkos::View<float**> x;
#ifdef KOKKOSSOFTMAX_EXPECT_ERROR
  Kokkos::View<float**> lse;
#else
  Kokkos::View<float*> lse;
#endif
  KokkosSoftmax::logsumexp(exec, x, lse);
}
