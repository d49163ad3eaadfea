// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The same call in two sources of one program, translation_units.cpp and test_translation_units.cpp.
#ifndef KOKKOSSOFTMAX_TESTS_TRANSLATION_UNITS_HPP
#define KOKKOSSOFTMAX_TESTS_TRANSLATION_UNITS_HPP

#include <KokkosSoftmax.hpp>
#include <Kokkos_Core.hpp>

namespace tests {

template <class Exec>
using FloatMatrix = Kokkos::View<float**, Kokkos::LayoutRight, typename Exec::memory_space>;

// No instance of the library's own has this functor, so each source compiles the kernels with it.
struct TwiceLessColumn {
  KOKKOS_FUNCTION float operator()(float value, std::int64_t /*row*/, std::int64_t column) const {
    return 2 * value - static_cast<float>(column % 7);
  }
};

#define KOKKOSSOFTMAX_TESTS_DECLARE(Exec) \
  void softmax_elsewhere(const Exec& exec, const FloatMatrix<Exec>& x, const FloatMatrix<Exec>& y);
KOKKOSSOFTMAX_FOR_EACH_BACKEND(KOKKOSSOFTMAX_TESTS_DECLARE)
#undef KOKKOSSOFTMAX_TESTS_DECLARE

}  // namespace tests

#endif
