// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// PTX instructions, each under its own name. The manual: "Parallel Thread Execution ISA", the section in
/// each comment.

#ifndef KOKKOSSOFTMAX_PTX_HPP
#define KOKKOSSOFTMAX_PTX_HPP

namespace KokkosSoftmax::impl {

/// ex2.approx.ftz.f32 ("Floating Point Instructions: ex2"): 2^x to 2^-22 relative, subnormal results 0.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// griddepcontrol.wait ("Parallel Synchronization and Communication Instructions: griddepcontrol"): until the
/// kernels that this one was launched behind have ended and what they wrote can be read.
__device__ __forceinline__ void grid_dependency_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace KokkosSoftmax::impl

#endif
