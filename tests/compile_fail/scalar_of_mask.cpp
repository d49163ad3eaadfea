// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include <KokkosSoftmax.hpp>

struct NoBool {
  double value[2];
};

void call(const Kokkos::DefaultExecutionSpace& exec) {
  Kokkos::View<float**> x;
#ifdef KOKKOSSOFTMAX_EXPECT_ERROR
  Kokkos::View<NoBool**> keep;
#else
  Kokkos::View<bool**> keep;
#endif
  KokkosSoftmax::softmax(exec, x, x, KokkosSoftmax::mask(keep));
}
