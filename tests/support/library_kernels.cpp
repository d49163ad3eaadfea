// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include "shared_kernels.hpp"

namespace KokkosSoftmax::impl {
KOKKOSSOFTMAX_TESTS_FOR_EACH_LIBRARY_KERNEL(KOKKOSSOFTMAX_TESTS_KERNELS, )
}
