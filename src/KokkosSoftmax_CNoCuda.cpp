// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

// In place of KokkosSoftmax_CCuda.cpp where Kokkos was built without CUDA.

#include "KokkosSoftmax_CBackend.hpp"

namespace KokkosSoftmax::c {

Backend* cuda_backend() {
  return nullptr;
}

}  // namespace KokkosSoftmax::c
