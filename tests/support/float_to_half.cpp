// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "float_to_half.hpp"

namespace KokkosSoftmax::impl {

#define KOKKOSSOFTMAX_TESTS_DEFINE(EXEC) KOKKOSSOFTMAX_TESTS_FLOAT_TO_HALF(template, EXEC)
KOKKOSSOFTMAX_FOR_EACH_BACKEND(KOKKOSSOFTMAX_TESTS_DEFINE)

}  // namespace KokkosSoftmax::impl
