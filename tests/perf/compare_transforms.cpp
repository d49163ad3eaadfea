// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

// The comparison's transforms of floats.
#include <KokkosSoftmax_CompareTransforms.hpp>

namespace {
[[maybe_unused]] const bool added = compare::add_all_transform_kernels<float, float>();
}
