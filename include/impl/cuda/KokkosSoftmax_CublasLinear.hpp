// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Heads through cuBLAS itself: every type without copies, TF32, graph captures, and a handle with a
/// workspace for each execution space instance.

#ifndef KOKKOSSOFTMAX_CUBLASLINEAR_HPP
#define KOKKOSSOFTMAX_CUBLASLINEAR_HPP

#include <impl/cuda/KokkosSoftmax_CudaRuntime.hpp>
#include <impl/portable/KokkosSoftmax_GemmThenRows.hpp>

#include <cublas_v2.h>

#include <map>
#include <mutex>
#include <type_traits>

namespace KokkosSoftmax::impl {

inline void check_cublas(cublasStatus_t status, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw std::runtime_error(std::string("KokkosSoftmax: ") + call + ": " + cublasGetStatusString(status));
  }
}

/// One handle for each execution space instance, destroyed at Kokkos::finalize.
class CublasHandles {
 public:
  /// Calls `use(handle)` with the handle set to the instance's stream and a workspace of the instance.
  template <class Use>
  static void with(const Kokkos::Cuda& exec, Use&& use) {
    // In a capture the workspace becomes the graph's, so that replays and other launches do not meet in it.
    void* workspace = Pool::get(exec, workspace_bytes);
    CublasHandles& all = instance();
    const std::lock_guard lock(all.mutex_);
    const cublasHandle_t handle = all.find(exec);
    check_cublas(cublasSetStream(handle, exec.cuda_stream()), "cublasSetStream");
    // cublasSetStream goes back to a workspace that all streams share.
    check_cublas(cublasSetWorkspace(handle, workspace, workspace_bytes), "cublasSetWorkspace");
    use(handle);
  }

  static void reserve(const Kokkos::Cuda& exec) {
    Pool::reserve(exec, workspace_bytes);
    CublasHandles& all = instance();
    const std::lock_guard lock(all.mutex_);
    all.find(exec);
  }

 private:
  struct CublasWorkspace;
  using Pool = ScratchPool<Kokkos::Cuda::memory_space, CublasWorkspace>;
  /// What NVIDIA recommends for Hopper.
  static constexpr std::size_t workspace_bytes = std::size_t(32) << 20;

  static CublasHandles& instance() {
    static auto* handles = new CublasHandles;
    return *handles;
  }

  cublasHandle_t find(const Kokkos::Cuda& exec) {
    cublasHandle_t& handle = handles_[Kokkos::Tools::Experimental::device_id(exec)];
    if (handle) return handle;
    if (Capture<Kokkos::Cuda>::id(exec) != 0) {
      throw std::runtime_error(
          "KokkosSoftmax: the execution space instance has no cuBLAS handle, which cannot be made in a graph "
          "capture; call KokkosSoftmax::reserve with these operands before the capture");
    }
    if (!hooked_) Kokkos::push_finalize_hook([] { instance().clear(); });
    hooked_ = true;
    check_cuda(cudaSetDevice(exec.cuda_device()), "cudaSetDevice");
    check_cublas(cublasCreate(&handle), "cublasCreate");
    return handle;
  }

  void clear() {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, handle] : handles_) {
      if (handle) cublasDestroy(handle);
    }
    handles_.clear();
    hooked_ = false;
  }

  std::mutex mutex_;
  std::map<std::uint32_t, cublasHandle_t> handles_;
  bool hooked_ = false;
};

struct CublasGemm {
  static constexpr const char* name = "cublas_linear";

  template <class Exec, class Problem>
  static constexpr bool supports = std::is_same_v<Exec, Kokkos::Cuda>;

  /// cuBLAS multiplies two operands of one type, and sums 16-bit ones in float.
  template <class X, class W, class Acc>
  using Operand =
      std::conditional_t<std::is_same_v<X, W> && is_16_bit_v<X> && std::is_same_v<Acc, float>, X, Acc>;

  template <class Exec>
  static constexpr bool avoids_small_dot_products = false;

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec&, const Problem&) {
    return {};
  }

  template <class T, class Acc>
  static void multiply(const Kokkos::Cuda& exec, Precision precision, const BlasMatrix<const T>& x,
                       const BlasMatrix<const T>& w, const BlasMatrix<Acc>& logits) {
    // cuBLAS fills columns that are contiguous: the logits, or, when their rows are, their transpose W X^T.
    const BlasMatrix<const T>& left = logits.columns_contiguous ? w : x;
    const BlasMatrix<const T>& right = logits.columns_contiguous ? x : w;
    const Acc one = 1, zero = 0;
    CublasHandles::with(exec, [&](cublasHandle_t handle) {
      check_cublas(
          cublasGemmEx(handle, left.columns_contiguous ? CUBLAS_OP_T : CUBLAS_OP_N,
                       right.columns_contiguous ? CUBLAS_OP_N : CUBLAS_OP_T, static_cast<int>(left.rows),
                       static_cast<int>(right.rows), static_cast<int>(left.columns), &one, left.data, type<T>,
                       static_cast<int>(left.leading), right.data, type<T>, static_cast<int>(right.leading),
                       &zero, logits.data, type<Acc>, static_cast<int>(logits.leading),
                       compute_type<T>(precision), CUBLAS_GEMM_DEFAULT),
          "cublasGemmEx");
    });
  }

  static void reserve(const Kokkos::Cuda& exec) { CublasHandles::reserve(exec); }

 private:
  template <class T>
  static constexpr cudaDataType_t type = std::is_same_v<T, double>    ? CUDA_R_64F
                                         : std::is_same_v<T, half_t>  ? CUDA_R_16F
                                         : std::is_same_v<T, bhalf_t> ? CUDA_R_16BF
                                                                      : CUDA_R_32F;
  template <class T>
  static cublasComputeType_t compute_type(Precision precision) {
    if (std::is_same_v<T, double>) return CUBLAS_COMPUTE_64F;
    return std::is_same_v<T, float> && precision == Precision::tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                                    : CUBLAS_COMPUTE_32F;
  }
};

using CublasLinear = GemmThenRows<CublasGemm>;

}  // namespace KokkosSoftmax::impl

#endif
