# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

# Kokkos Kernels 4.5.1 looks for cuBLAS through CMake's FindCUDA, which newer CMakes do not have and which answers with
# absolute paths. This stand-in, seen by Kokkos Kernels alone, answers with the target of FindCUDAToolkit.
find_package(CUDAToolkit QUIET)
set(CUDA_FOUND ${CUDAToolkit_FOUND})
set(CUDA_CUBLAS_LIBRARIES CUDA::cublas)
