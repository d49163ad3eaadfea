// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The driver's function that describes a tensor to the copy engine, asked for by name: the library links no
/// driver.

#ifndef KOKKOSSOFTMAX_TENSORMAP_HPP
#define KOKKOSSOFTMAX_TENSORMAP_HPP

#include <cuda_runtime_api.h>

#include <cudaTypedefs.h>

namespace KokkosSoftmax::impl {

/// Null in a driver that does not know it.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found);
#endif
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) entry = nullptr;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
  }();
  return encoder;
}

}  // namespace KokkosSoftmax::impl

#endif
