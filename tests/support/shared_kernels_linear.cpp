// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include "linear_cases.hpp"

namespace KokkosSoftmax::impl {
KOKKOSSOFTMAX_TESTS_FOR_EACH_SHARED_LINEAR_KERNEL(KOKKOSSOFTMAX_TESTS_KERNELS, )
}
