// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Float heads at Precision::tf32 on the tensor cores of Hopper: X and W are rounded to the fraction that
/// TF32 has, as binary16 beside a power of two for each row, and multiplied so, in half the time that TF32
/// takes.

#ifndef KOKKOSSOFTMAX_ROUNDEDTENSORCORELINEAR_HPP
#define KOKKOSSOFTMAX_ROUNDEDTENSORCORELINEAR_HPP

#include <impl/cuda/KokkosSoftmax_TensorCoreLinear.hpp>

namespace KokkosSoftmax::impl {

struct RoundedTensorCoreGemm {
  static constexpr const char* name = "rounded_tensor_core_linear";

  /// Takes X and W in any layout, as they are.
  static constexpr bool multiplies_problem = true;

  template <class Exec, class Problem>
  static constexpr bool supports = TensorCoreGemm::supports<Exec, Problem>;

  template <class X, class W, class Acc>
  using Operand = float;

  template <class Exec>
  static constexpr bool avoids_small_dot_products = false;

  template <class Transform>
  static constexpr bool fuses = false;

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec& exec, const Problem& p) {
    if (p.precision != Precision::tf32) return "it rounds operands, and Precision::tf32 was not asked for";
    const std::string_view refusal = TensorCoreGemm::refuse(exec, p);
    if (!refusal.empty()) return refusal;
    return rounded_gemm_is_there(exec.cuda_device()) ? "" : "the device does not take its kernel";
  }

  /// What it can do and another does better.
  template <class Exec, class Problem>
  static std::string_view advise_against(const Exec& exec, const Problem& p) {
    const Cost cost(p.x.rows, p.w.rows, p.x.columns, exec.cuda_device_prop().multiProcessorCount);
    if constexpr (is_packed<Problem>) {
      if (cost.gemm > cost.split_gemm) return "few rows are multiplied as fast by both halves of W";
    } else if (cost.gemm + cost.rounding > cost.tf32) {
      return "TF32 takes less time than rounding W";
    }
    return {};
  }

  /// The logits of rows from `first` on.
  template <class Problem>
  static void multiply(const Kokkos::Cuda& exec, const Problem& p, index_type first,
                       const BlasMatrix<float>& logits, const BoundIdentity&) {
    const std::string label = std::string("KokkosSoftmax::") + p.name();
    check_cuda(cudaSetDevice(exec.cuda_device()), "cudaSetDevice");
    const cudaStream_t stream = exec.cuda_stream();
    const auto launch = [&](const char* step, const auto& body) {
      launch_labelled(exec, label + step, [&] { check_cuda(body(), step); });
    };
    const StridedFloats x = strided_floats(p.x.row_panel(first, logits.rows));
    const SplitScratch at(p, logits.rows, SplitMatrix::rounded);
    char* scratch = static_cast<char*>(SplitScratch::Pool::get(exec, at.bytes));
    auto* flags = reinterpret_cast<unsigned char*>(scratch + at.flags);
    const SplitMatrix rounded_x = SplitMatrix::of(x, scratch + at.x, SplitMatrix::rounded);
    launch("::round_x", [&] { return split_rows(rounded_x, flags, at.flag_count, stream); });
    const auto multiply_panel = [&](const SplitMatrix& rounded_w, const SplitMatrix& w, index_type column) {
      const StridedResult result = strided_result(logits, column);
      launch("::rounded_gemm", [&] { return rounded_gemm(rounded_x, rounded_w, result, flags, stream); });
      launch("::float_gemm", [&] { return float_gemm(x, w, result, flags, stream); });
    };
    if constexpr (is_packed<Problem>) {
      multiply_panel(p.w.data->rounded, p.w.data->matrix, 0);
    } else {
      for (index_type column = 0; column < p.w.rows; column += at.panel) {
        const index_type columns = std::min(at.panel, p.w.rows - column);
        const StridedFloats w = strided_floats(p.w.row_panel(column, columns));
        const SplitMatrix rounded_w = SplitMatrix::of(w, scratch + at.w, SplitMatrix::rounded);
        // One panel stays for all rows.
        if (first == 0 || at.panel < p.w.rows)
          launch("::round_w", [&] { return split_rows(rounded_w, flags, at.flag_count, stream); });
        multiply_panel(rounded_w, as_given(w), column);
      }
    }
  }

  /// For panels of at most `rows` rows.
  template <class Problem>
  static void reserve(const Kokkos::Cuda& exec, const Problem& p, index_type rows) {
    SplitScratch::Pool::reserve(exec, SplitScratch(p, rows, SplitMatrix::rounded).bytes);
  }

 private:
  template <class Problem>
  static constexpr bool is_packed = std::is_same_v<typename Problem::W, SplitWeights>;

  /// Estimated microseconds on an H200, good to about a fifth. (For seconds in a CUDA graph, cuBLAS's TF32
  /// alone and this with W's rounding, GELU and the softmax: 512 x 8192 -> 8192 201, 768 x 8192 -> 8192 327,
  /// 1024 x 8192 -> 8192 397 and 351, 4096 x 4096 -> 4096 398 and 327, 2048 x 2048 -> 8192 220 and 228, 1000
  /// x 4100 -> 8193, rows of the result off their boundaries, 525 and 229.)
  struct Cost {
    double gemm, rounding, tf32, split_gemm;

    Cost(index_type m_, index_type n_, index_type k_, int multiprocessors) {
      const auto m = static_cast<double>(m_), n = static_cast<double>(n_), k = static_cast<double>(k_);
      const auto rounds = static_cast<double>(rounded_gemm_rounds(m_, n_, multiprocessors));
      gemm = rounds * (k / 64 * 0.68 + 5);
      rounding = (m + n) * k * 1.5e-6 + 12;
      const double slower = n_ % 4 != 0 || k_ % 4 != 0 ? 2.5 : 1;
      tf32 = std::max(2 * m * n * k / 340e6, 4 * n * k / 4e6) * slower + 5;
      split_gemm = split_gemm_plan(m_, n_, multiprocessors).cost * k / 64 * 1.09;
    }
  };
};

using RoundedTensorCoreLinear = GemmThenRows<RoundedTensorCoreGemm>;

}  // namespace KokkosSoftmax::impl

#endif
