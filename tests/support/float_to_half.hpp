// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The kernels of float to half_t are not in the library: every file that calls them compiles them. Tests that
// include this have them from float_to_half.cpp.
#ifndef KOKKOSSOFTMAX_TESTS_FLOAT_TO_HALF_HPP
#define KOKKOSSOFTMAX_TESTS_FLOAT_TO_HALF_HPP

#include <KokkosSoftmax.hpp>

namespace KokkosSoftmax::impl {

#define KOKKOSSOFTMAX_TESTS_FLOAT_TO_HALF(KEYWORDS, EXEC)                                             \
  KEYWORDS void run_rows(const EXEC&, const RowsProblem<float, half_t, BoundIdentity>&, const char*); \
  KEYWORDS void reserve_rows(const EXEC&, const RowsProblem<float, half_t, BoundIdentity>&, const char*);
#define KOKKOSSOFTMAX_TESTS_EXTERN(EXEC) KOKKOSSOFTMAX_TESTS_FLOAT_TO_HALF(extern template, EXEC)
KOKKOSSOFTMAX_FOR_EACH_BACKEND(KOKKOSSOFTMAX_TESTS_EXTERN)
#undef KOKKOSSOFTMAX_TESTS_EXTERN

}  // namespace KokkosSoftmax::impl

#endif
