// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

// The comparison's transforms of floats, with the kernels that other tests have, too.
#include <KokkosSoftmax_CompareTransforms.hpp>

#include "../support/shared_kernels.hpp"

namespace {
[[maybe_unused]] const bool added = compare::add_all_transform_kernels<float, float>();
}
