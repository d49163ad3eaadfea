// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Float heads on the tensor cores of Hopper, and the weights that are split for them once.
///
/// Where there are few rows, the transform is applied as the product is written, by all multiprocessors at
/// once, where the softmax would have a few work on it. With many rows it costs more there than in the
/// softmax, which has other warps to run meanwhile (1024 x 8192 -> 8192 on an H200: GELU 50 us in the
/// product, 20 us in the softmax), so the product writes plain logits then, as it does where the kernel with
/// a user's transform was not compiled for 9.0a. The arithmetic is the same.

#ifndef KOKKOSSOFTMAX_TENSORCORELINEAR_HPP
#define KOKKOSSOFTMAX_TENSORCORELINEAR_HPP

#include <impl/KokkosSoftmax_PackedWeights.hpp>
#include <impl/cuda/KokkosSoftmax_RowIO.hpp>
#include <impl/cuda/KokkosSoftmax_SplitGemmKernels.hpp>
#include <impl/portable/KokkosSoftmax_GemmThenRows.hpp>

#include <memory>
#include <type_traits>
#include <vector>

namespace KokkosSoftmax::impl {

/// Stands for the values of a W that was split beforehand; a Matrix of them points to the one there is.
struct SplitWeights {
  SplitMatrix matrix;
  SplitMatrix rounded;  ///< its high halves, with what the guard has to know of these
  const void* address() const { return matrix.halves; }
};

inline StridedFloats strided_floats(const Matrix<const float>& m) {
  return {m.data, m.rows, m.columns, m.row_stride, m.column_stride};
}

/// A matrix that was not split, for the float kernel.
inline SplitMatrix as_given(const StridedFloats& m) {
  SplitMatrix matrix;
  matrix.given = m;
  matrix.rows = m.rows;
  matrix.columns = m.columns;
  return matrix;
}

/// Logits from a column on.
inline StridedResult strided_result(const BlasMatrix<float>& logits, index_type column) {
  return {logits.data + column * (logits.columns_contiguous ? 1 : logits.leading),
          logits.columns_contiguous ? logits.leading : 1, logits.columns_contiguous ? 1 : logits.leading};
}

/// Below this many columns the float kernel does all: each element has so few roundings that those of a split
/// count.
inline constexpr index_type shortest_split = 128;

/// A bound transform as the kernels take it; panels count from the first row and column of all.
template <class Transform>
struct TransformEpilogue {
  Transform transform;
  index_type first_row, first_column;
  struct Row {
    typename Transform::Row row;
    index_type first_column;
    __device__ __forceinline__ float operator()(float value, std::int64_t column) const {
      return transformed<float>(row, value, first_column + column);
    }
  };
  __device__ __forceinline__ Row at_row(std::int64_t row) const {
    return {transform.at_row(first_row + row), first_column};
  }
};

/// Scratch: W's halves, as large as W in float, or rounded half of that, in panels of at most 1 GiB; X's; the
/// flags.
struct SplitScratch {
  struct Tag;
  using Pool = ScratchPool<Kokkos::Cuda::memory_space, Tag>;

  index_type panel;
  std::size_t w = 0, x = 0, flags = 0, flag_count = 0, bytes = 0;

  template <class Problem>
  SplitScratch(const Problem& p, index_type rows, int parts) : panel(p.w.rows) {
    const index_type k = p.x.columns;
    if constexpr (!std::is_same_v<typename Problem::W, SplitWeights>) {
      const index_type fit = (index_type(1) << 30) / (2 * parts * SplitMatrix::leading(k) + 16) / 128 * 128;
      panel = std::min(panel, std::max<index_type>(128, fit));
      x = SplitMatrix::bytes(panel, k, parts);
    }
    flags = x + SplitMatrix::bytes(rows, k, parts);
    flag_count = split_gemm_flags(rows, panel);
    bytes = flags + flag_count;
  }
};

struct TensorCoreGemm {
  static constexpr const char* name = "tensor_core_linear";

  /// Takes X and W in any layout, as they are.
  static constexpr bool multiplies_problem = true;

  template <class Exec, class Problem>
  static constexpr bool supports =
      std::is_same_v<Exec, Kokkos::Cuda>&& std::is_same_v<typename Problem::X, float> &&
      (std::is_same_v<typename Problem::W, float> ||
       std::is_same_v<typename Problem::W, SplitWeights>)&&std::is_same_v<typename Problem::Acc, float>;

  template <class X, class W, class Acc>
  using Operand = float;

  template <class Exec>
  static constexpr bool avoids_small_dot_products = false;

  /// The arguments of a kernel are at most 4 KB.
  template <class Transform>
  static constexpr bool fuses = !std::is_same_v<Transform, BoundIdentity> && sizeof(Transform) < 3400;

  template <class Transform, class Problem>
  static bool has_epilogue(const Kokkos::Cuda& exec, const Problem& p) {
    // (2048 -> 8192 with GELU on one H200, packed: 8 rows 29.6 us and 32.3 where the softmax does it, 16
    // rows 32.2 and 32.2, 24 rows 40.4 and 32.9, 64 rows 60.0 and 36.5.)
    if (p.x.rows > 8) return false;
    check_cuda(cudaSetDevice(exec.cuda_device()), "cudaSetDevice");
    return epilogue_is_there<TransformEpilogue<Transform>>(exec.cuda_device());
  }

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec& exec, const Problem& p) {
    if (!is_there(exec))
      return "the device is not of compute capability 9.0, or the library lacks its code (9.0a)";
    if (p.x.rows > most_blas_rows) return "X has too many rows for the coordinates of the copy engine";
    return {};
  }

  /// What it can do and another does better.
  template <class Exec, class Problem>
  static std::string_view advise_against(const Exec& exec, const Problem& p) {
    if constexpr (!std::is_same_v<typename Problem::W, SplitWeights>) {
      if (p.precision != Precision::ieee) return "TF32 was asked for, and is faster";
      if (p.x.columns < shortest_split) return "K is too short for splitting to be exact enough";
      // There cuBLAS splits K, and so sums in a better order than we do.
      if (p.x.columns > 2048 && split_gemm_flags(p.x.rows, p.w.rows) < 32)
        return "few tiles and a long K: SGEMM is more accurate";
      const Cost cost(p.x.rows, p.w.rows, p.x.columns, multiprocessors(exec));
      if (cost.tensor_cores > cost.sgemm) return "SGEMM takes less time than splitting W (pack() it)";
    }
    return {};
  }

  /// The logits of rows from `first` on.
  template <class Problem, class Transform>
  static void multiply(const Kokkos::Cuda& exec, const Problem& p, index_type first,
                       const BlasMatrix<float>& logits, const Transform& transform) {
    constexpr bool plain = std::is_same_v<Transform, BoundIdentity>;
    const std::string label = std::string("KokkosSoftmax::") + p.name();
    check_cuda(cudaSetDevice(exec.cuda_device()), "cudaSetDevice");
    const cudaStream_t stream = exec.cuda_stream();
    const StridedFloats x = strided_floats(p.x.row_panel(first, logits.rows));
    const auto launch = [&](const char* step, const auto& body) {
      launch_labelled(exec, label + step, [&] { check_cuda(body(), step); });
    };
    const auto epilogue_from = [&](index_type column) {
      return TransformEpilogue<Transform>{transform, first, column};
    };
    const auto in_float = [&](const StridedFloats& rows, const SplitMatrix& w, const StridedResult& result,
                              const unsigned char* flags, index_type column) {
      if constexpr (plain) {
        return float_gemm(rows, w, result, flags, stream);
      } else {
        return launch_float_gemm(rows, w, result, flags, multiprocessors(exec), epilogue_from(column),
                                 stream);
      }
    };
    if constexpr (!std::is_same_v<typename Problem::W, SplitWeights>) {
      if (p.x.columns < shortest_split) {
        launch("::float_gemm", [&] {
          return in_float(x, as_given(strided_floats(p.w)), strided_result(logits, 0), nullptr, 0);
        });
        return;
      }
    }
    const SplitScratch at(p, logits.rows, SplitMatrix::split);
    char* scratch = static_cast<char*>(SplitScratch::Pool::get(exec, at.bytes));
    auto* flags = reinterpret_cast<unsigned char*>(scratch + at.flags);
    const SplitMatrix split_x = SplitMatrix::of(x, scratch + at.x);
    launch("::split_x", [&] { return split_rows(split_x, flags, at.flag_count, stream); });
    for (index_type column = 0; column < p.w.rows; column += at.panel) {
      const index_type columns = std::min(at.panel, p.w.rows - column);
      SplitMatrix split_w;
      if constexpr (std::is_same_v<typename Problem::W, SplitWeights>) {
        split_w = p.w.data->matrix;
      } else {
        split_w = SplitMatrix::of(strided_floats(p.w.row_panel(column, columns)), scratch + at.w);
        // One panel stays for all rows.
        if (first == 0 || at.panel < p.w.rows) {
          launch("::split_w", [&] { return split_rows(split_w, flags, at.flag_count, stream); });
        }
      }
      const SplitGemmPlan plan = split_gemm_plan(logits.rows, columns, multiprocessors(exec), !plain);
      const StridedResult result = strided_result(logits, column);
      launch("::split_gemm", [&] {
        if constexpr (plain) {
          return split_gemm(split_x, split_w, result, flags, plan, stream);
        } else {
          return launch_split_gemm(split_x, split_w, result, flags, plan, epilogue_from(column), stream);
        }
      });
      launch("::float_gemm", [&] { return in_float(x, split_w, result, flags, column); });
    }
  }

  /// For panels of at most `rows` rows.
  template <class Problem>
  static void reserve(const Kokkos::Cuda& exec, const Problem& p, index_type rows) {
    SplitScratch::Pool::reserve(exec, SplitScratch(p, rows, SplitMatrix::split).bytes);
  }

  static bool is_there(const Kokkos::Cuda& exec) { return split_gemm_is_there(exec.cuda_device()); }

 private:
  static int multiprocessors(const Kokkos::Cuda& exec) { return exec.cuda_device_prop().multiProcessorCount; }

  /// Estimated microseconds on an H200, good to about a fifth: K steps, the split's bytes at 4 TB/s,
  /// launches; and what SGEMM sustains.
  struct Cost {
    double tensor_cores, sgemm;

    Cost(index_type m_, index_type n_, index_type k_, int sms) {
      const auto m = static_cast<double>(m_), n = static_cast<double>(n_), k = static_cast<double>(k_);
      tensor_cores = split_gemm_plan(m_, n_, sms).cost * k / 64 * 1.09 + (m + n) * k * 2e-6 + 12;
      sgemm = std::max(2 * m * n * k / 50e6, 4 * n * k / 4e6);
    }
  };
};

using TensorCoreLinear = GemmThenRows<TensorCoreGemm>;

/// Copies some rows to where `place` says; -1: not.
struct GatherRows {
  Matrix<const float> from;
  const std::int32_t* place;
  float* to;
  KOKKOS_FUNCTION void operator()(index_type i) const {
    const index_type row = i / from.columns, column = i - row * from.columns;
    if (place[row] < 0) return;
    to[place[row] * from.columns + column] = from.data[row * from.row_stride + column * from.column_stride];
  }
};

/// Weights for the tensor cores: their halves, and the rows that halves do not hold in full.
template <>
struct WeightPacking<Kokkos::Cuda, float> {
  static constexpr bool possible = true;
  using Weights = SplitWeights;

  SplitWeights weights;

  /// Null where the weights are better left as they are.
  static std::shared_ptr<WeightPacking> make(const Kokkos::Cuda& exec, const Matrix<const float>& w) {
    if (w.rows == 0 || w.columns < shortest_split || !TensorCoreGemm::is_there(exec)) return nullptr;
    auto packing = std::make_shared<WeightPacking>();
    using Bytes = Kokkos::View<char*, Kokkos::Cuda::memory_space>;
    check_cuda(cudaSetDevice(exec.cuda_device()), "cudaSetDevice");
    packing->memory_ = Bytes(Kokkos::view_alloc(exec, Kokkos::WithoutInitializing, "KokkosSoftmax::pack"),
                             SplitMatrix::bytes(w.rows, w.columns) + SplitMatrix::row_bytes(w.rows));
    SplitMatrix& m = packing->weights.matrix;
    m = SplitMatrix::of(strided_floats(w), packing->memory_.data());
    SplitMatrix& rounded = packing->weights.rounded;
    rounded = m;
    rounded.row =
        reinterpret_cast<SplitRow*>(packing->memory_.data() + SplitMatrix::bytes(w.rows, w.columns));
    rounded.parts = SplitMatrix::rounded;
    launch_labelled(exec, "KokkosSoftmax::pack::split_w", [&] {
      check_cuda(split_rows(m, nullptr, 0, exec.cuda_stream()), "split_rows");
      // (Writes the same high halves once more.)
      check_cuda(split_rows(rounded, nullptr, 0, exec.cuda_stream()), "split_rows");
    });
    packing->keep_lossy_rows(exec, w);
    exec.fence("KokkosSoftmax::pack: the weights may be used on any stream");
    return packing;
  }

 private:
  Kokkos::View<char*, Kokkos::Cuda::memory_space> memory_;
  Kokkos::View<float**, Kokkos::LayoutRight, Kokkos::Cuda::memory_space> rows_;
  Kokkos::View<std::int32_t*, Kokkos::Cuda::memory_space> place_;

  void keep_lossy_rows(const Kokkos::Cuda& exec, const Matrix<const float>& w) {
    const auto count = static_cast<std::size_t>(w.rows);
    std::vector<SplitRow> row(count);
    using HostRows = Kokkos::View<char*, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
    const std::size_t bytes = count * sizeof(SplitRow);
    const auto* rows_begin = reinterpret_cast<char*>(weights.matrix.row);
    const std::size_t at = static_cast<std::size_t>(rows_begin - memory_.data());
    Kokkos::deep_copy(exec, HostRows(reinterpret_cast<char*>(row.data()), bytes),
                      Kokkos::subview(memory_, std::pair<std::size_t, std::size_t>(at, at + bytes)));
    exec.fence("KokkosSoftmax::pack: which rows are to be kept in float");
    std::vector<std::int32_t> place(count, -1);
    std::int32_t kept = 0;
    for (std::size_t i = 0; i < count; ++i) {
      if (row[i].lossy > 0) place[i] = kept++;
    }
    weights.matrix.given = {nullptr, kept, w.columns, w.columns, 1};
    if (kept == 0) return;
    rows_ = decltype(rows_)(Kokkos::view_alloc(exec, Kokkos::WithoutInitializing, "KokkosSoftmax::pack"),
                            static_cast<std::size_t>(kept), static_cast<std::size_t>(w.columns));
    place_ =
        decltype(place_)(Kokkos::view_alloc(exec, Kokkos::WithoutInitializing, "KokkosSoftmax::pack"), count);
    using HostPlaces =
        Kokkos::View<std::int32_t*, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
    Kokkos::deep_copy(exec, place_, HostPlaces(place.data(), count));
    launch_range(exec, "KokkosSoftmax::pack::lossy_rows", w.rows * w.columns,
                 GatherRows{w, place_.data(), rows_.data()});
    exec.fence("KokkosSoftmax::pack: host memory goes away");
    weights.matrix.given.data = rows_.data();
    weights.matrix.given_row = place_.data();
  }
};

}  // namespace KokkosSoftmax::impl

#endif
