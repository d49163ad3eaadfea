// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include <KokkosSoftmax.hpp>

struct Transform {
#ifdef KOKKOSSOFTMAX_EXPECT_ERROR
  KOKKOS_FUNCTION float operator()(float value) const {
    return value;
  }
#else
  KOKKOS_FUNCTION float operator()(float value, std::int64_t, std::int64_t) const {
    return value;
  }
#endif
};

void call(const Kokkos::DefaultExecutionSpace& exec) {
  Kokkos::View<float**> x;
  KokkosSoftmax::softmax(exec, x, x, Transform{});
}
