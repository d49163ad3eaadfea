// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The other source of test_translation_units.cpp.
#include "translation_units.hpp"

namespace tests {

#define KOKKOSSOFTMAX_TESTS_DEFINE(Exec)                                                             \
  void softmax_elsewhere(const Exec& exec, const FloatMatrix<Exec>& x, const FloatMatrix<Exec>& y) { \
    KokkosSoftmax::softmax(exec, x, y, TwiceLessColumn{});                                           \
  }
KOKKOSSOFTMAX_FOR_EACH_BACKEND(KOKKOSSOFTMAX_TESTS_DEFINE)

}  // namespace tests
