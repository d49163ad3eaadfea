// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// A head as a library's GEMM, then the softmax of its result: brings the operands into the form that GEMMs
/// of the BLAS family take, cuts them into panels, and says which memory that needs.

#ifndef KOKKOSSOFTMAX_GEMMTHENROWS_HPP
#define KOKKOSSOFTMAX_GEMMTHENROWS_HPP

#include <impl/KokkosSoftmax_LinearProblem.hpp>
#include <impl/KokkosSoftmax_SoftmaxCandidates.hpp>
#include <impl/KokkosSoftmax_RunColumnStatistics.hpp>

#include <climits>
#include <string>
#include <string_view>

namespace KokkosSoftmax::impl {

/// A matrix as BLAS knows it: one dimension contiguous, the other with a stride that is no less than the
/// first's extent and fits an int.
template <class T>
struct BlasMatrix {
  T* data;
  index_type rows, columns;
  index_type leading;
  bool columns_contiguous;  ///< the elements of a row are neighbours

  BlasMatrix row_panel(index_type first, index_type count) const {
    return {data + first * (columns_contiguous ? leading : 1), count, columns, leading, columns_contiguous};
  }
  BlasMatrix column_panel(index_type first, index_type count) const {
    return {data + first * (columns_contiguous ? 1 : leading), rows, count, leading, columns_contiguous};
  }
};

/// BLAS takes extents and strides as int; more rows than this are cut into panels.
inline constexpr index_type most_blas_rows = index_type(1) << 30;

/// What a matrix looks like to BLAS; `leading` is 0 when BLAS cannot take it as it is.
template <class T>
BlasMatrix<T> as_blas_matrix(const Matrix<T>& m) {
  const bool one_row = m.rows <= 1, one_column = m.columns <= 1;
  const auto fits = [](index_type leading, index_type extent) {
    return leading >= extent && leading <= INT_MAX;
  };
  // The stride of a dimension of one element says nothing.
  const index_type across_rows = one_row ? std::max<index_type>(1, m.columns) : m.row_stride;
  if ((one_column || m.column_stride == 1) && fits(across_rows, std::max<index_type>(1, m.columns))) {
    return {m.data, m.rows, m.columns, across_rows, true};
  }
  const index_type across_columns = one_column ? std::max<index_type>(1, m.rows) : m.column_stride;
  if ((one_row || m.row_stride == 1) && fits(across_columns, std::max<index_type>(1, m.rows))) {
    return {m.data, m.rows, m.columns, across_columns, false};
  }
  return {m.data, m.rows, m.columns, 0, true};
}

/// Copies a matrix into contiguous memory, in the type of the GEMM.
template <class Exec, class From, class To>
struct Pack {
  static constexpr index_type width = runs_on_host_v<Exec> ? 1024 : 1;
  const From* from;
  To* to;
  index_type slow, fast, slow_stride, fast_stride;

  KOKKOS_FUNCTION void operator()(index_type item) const {
    const index_type pieces = ceil_div(fast, width);
    const index_type s = item / pieces, first = (item - s * pieces) * width;
    const index_type count = fast - first < width ? fast - first : width;
    const From* source = from + s * slow_stride + first * fast_stride;
    To* target = to + s * fast + first;
    if (fast_stride == 1) {
      for (index_type i = 0; i < count; ++i) target[i] = converted(source[i]);
    } else {
      for (index_type i = 0; i < count; ++i) target[i] = converted(source[i * fast_stride]);
    }
  }

  static KOKKOS_FORCEINLINE_FUNCTION To converted(const From& value) {
    if constexpr (std::is_same_v<From, To>) {
      return value;
    } else {
      return static_cast<To>(load_as<To>(value));
    }
  }
};

template <class Exec, class T>
struct FillZero {
  Matrix<T> matrix;
  KOKKOS_FUNCTION void operator()(index_type i) const {
    const index_type row = i / matrix.columns;
    matrix.data[row * matrix.row_stride + (i - row * matrix.columns) * matrix.column_stride] = T(0);
  }
};

/// Panels of rows have the transform's row index counted from the first row of all.
template <class Inner>
struct BoundRowShift {
  using Row = typename Inner::Row;
  Inner inner;
  index_type first_row;
  KOKKOS_FORCEINLINE_FUNCTION bool has_rows_alike() const { return rows_are_alike(inner); }
  KOKKOS_FORCEINLINE_FUNCTION Row at_row(index_type row) const { return inner.at_row(row + first_row); }
  KOKKOS_FORCEINLINE_FUNCTION Row row_of_all() const { return inner.at_row(0); }
};

template <class Transform>
auto shift_rows(const Transform& transform, index_type first_row) {
  if constexpr (std::is_same_v<Transform, BoundIdentity>) {
    return transform;
  } else if constexpr (requires { transform.with_rows_from(first_row); }) {
    return transform.with_rows_from(first_row);
  } else {
    return BoundRowShift<Transform>{transform, first_row};
  }
}

/// a, then b.
template <class A, class B>
auto chain_of(const A& a, const B& b) {
  if constexpr (requires { a.followed_by(b); }) {
    return a.followed_by(b);
  } else if constexpr (requires { b.preceded_by(a); }) {
    return b.preceded_by(a);
  } else {
    return BoundChain<A, B>{a, b};
  }
}

/// A head's transform with batch statistics, its BatchNorms as normalizers.
template <class Before, class Normalizer, class After>
struct PreparedStatistics {
  Before before;
  Normalizer normalizer;
  After after;
};

/// a b + c, rounded once; on hosts without such an instruction by way of double, which holds a float product.
template <class Acc>
KOKKOS_FORCEINLINE_FUNCTION Acc multiply_add(Acc a, Acc b, Acc c) {
#if !defined(FP_FAST_FMAF)
  KOKKOS_IF_ON_HOST((if constexpr (std::is_same_v<Acc, float>) {
    return static_cast<float>(static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c));
  }))
#endif
  return Kokkos::fma(a, b, c);
}

/// A BatchNorm as value * factor + shift, with shift = beta - mean * factor, and what is added to the value
/// before it taken off the mean: three numbers a column in place of up to five. The shift is in two parts and
/// the product is not rounded, so that nothing is lost where a column's values are large beside their spread.
template <class Acc>
struct BoundNormalizer {
  static constexpr int arrays = 3;
  const Acc* factor;
  index_type distance;  ///< the arrays lie one after the other, `distance` from each to the next
  KOKKOS_FORCEINLINE_FUNCTION const Acc* shift() const { return factor + distance; }
  KOKKOS_FORCEINLINE_FUNCTION const Acc* shift_rest() const { return factor + 2 * distance; }

  struct Row {
    BoundNormalizer all;
    KOKKOS_FORCEINLINE_FUNCTION Acc operator()(Acc value, index_type column) const {
      return multiply_add(value, all.factor[column], all.shift()[column]) + all.shift_rest()[column];
    }
    template <int width>
    KOKKOS_FORCEINLINE_FUNCTION static bool takes_neighbours(index_type first) {
      return first * static_cast<index_type>(sizeof(Acc)) % bytes_of_neighbours<width, Acc> == 0;
    }
    template <int width>
    KOKKOS_FORCEINLINE_FUNCTION void apply_to_neighbours(Acc (&value)[width], bool (&)[width],
                                                         index_type first) const {
      Acc factor[width], shift[width], rest[width];
      load_neighbours(all.factor + first, factor);
      load_neighbours(all.shift() + first, shift);
      load_neighbours(all.shift_rest() + first, rest);
      for (int i = 0; i < width; ++i) value[i] = multiply_add(value[i], factor[i], shift[i]) + rest[i];
    }
    template <class Ops>
    void on_vector(typename Ops::Vector& value, typename Ops::Mask&, index_type column) const {
      if constexpr (Ops::width == 1) {
        value = typename Ops::Vector((*this)(Acc(value[0]), column));
      } else {
        const auto load = [&](const Acc* array) {
          return ColumnOperand<Acc>{array, 1}.template vector<Ops>(column);
        };
        value = Ops::fma(value, load(all.factor), load(all.shift())) + load(all.shift_rest());
      }
    }
    template <class Ops, class Rows>
    static auto of_lanes(const Rows& rows) {
      const BoundNormalizer& all = rows.row(0).all;
      const auto of_columns = [&](const Acc* array) {
        return ColumnsOfLanes<Ops, ColumnOperand<Acc>>{{array, 1}, rows};
      };
      return Lanes<Ops>{of_columns(all.factor), of_columns(all.shift()), of_columns(all.shift_rest())};
    }
  };
  template <class Ops_>
  struct Lanes {
    ColumnsOfLanes<Ops_, ColumnOperand<Acc>> factor, shift, rest;
    template <class Ops>
    void on_vector(typename Ops::Vector& value, typename Ops::Mask&, index_type column) const {
      value = Ops::fma(value, factor.template vector<Ops>(column), shift.template vector<Ops>(column)) +
              rest.template vector<Ops>(column);
    }
  };
  KOKKOS_FORCEINLINE_FUNCTION bool has_rows_alike() const { return true; }
  KOKKOS_FORCEINLINE_FUNCTION Row at_row(index_type) const { return {*this}; }

  /// Arrays of whole vectors.
  static index_type distance_for(index_type columns) { return ceil_div(columns, 32) * 32; }
};

/// Where a normalizer's numbers are written.
template <class Acc>
struct NormalizerArrays {
  Acc* factor;
  index_type distance;

  /// (value - mean) * exact_factor + beta for every value.
  KOKKOS_FORCEINLINE_FUNCTION void store(index_type column, double exact_factor, SplitMean mean,
                                         double beta) const {
    factor[column] = static_cast<Acc>(exact_factor);
    const auto f = static_cast<double>(factor[column]);
    const double product = -mean.value * f;
    const double of_product = Kokkos::fma(-mean.value, f, -product) - mean.rest * f;
    const double sum = beta + product, of_beta = sum - product;  // D. Knuth's two-sum
    const double of_sum = (beta - of_beta) + (product - (sum - of_beta));
    const Acc shift = static_cast<Acc>(sum);
    factor[column + distance] = shift;
    factor[column + 2 * distance] =
        static_cast<Acc>((sum - static_cast<double>(shift)) + of_sum + of_product);
  }
};

/// A bias that a normalizer may have taken over: it has when it is the same for all rows.
template <class T>
struct BoundBiasBeforeNormalizer {
  BoundBias<T> bias;
  bool is_taken_over;

  explicit BoundBiasBeforeNormalizer(const BoundBias<T>& b) : bias(b), is_taken_over(b.has_rows_alike()) {}

  KOKKOS_FORCEINLINE_FUNCTION double taken_over(index_type column) const {
    return is_taken_over ? bias.at_row(0)(0.0, column) : 0.0;
  }
  KOKKOS_FORCEINLINE_FUNCTION bool has_rows_alike() const { return is_taken_over; }

  struct Row {
    typename BoundBias<T>::Row bias;
    bool is_taken_over;
    template <class Acc>
    KOKKOS_FORCEINLINE_FUNCTION Acc operator()(Acc value, index_type column) const {
      return is_taken_over ? value : bias(value, column);
    }
    template <int width>
    KOKKOS_FORCEINLINE_FUNCTION bool takes_neighbours(index_type first) const {
      return is_taken_over || bias.template takes_neighbours<width>(first);
    }
    template <int width, class Acc>
    KOKKOS_FORCEINLINE_FUNCTION void apply_to_neighbours(Acc (&value)[width], bool (&kept)[width],
                                                         index_type first) const {
      if (!is_taken_over) bias.template apply_to_neighbours<width>(value, kept, first);
    }
    template <class Ops>
    void on_vector(typename Ops::Vector& value, typename Ops::Mask& kept, index_type column) const {
      if (!is_taken_over) bias.template on_vector<Ops>(value, kept, column);
    }
    template <class Ops, class Rows>
    static auto of_lanes(const Rows& rows) {
      const auto bias = stage_of_lanes<Ops>(rows.of(&Row::bias));
      return Lanes<std::remove_const_t<decltype(bias)>>{bias, rows.row(0).is_taken_over};
    }
  };
  template <class BiasLanes>
  struct Lanes {
    BiasLanes bias;
    bool is_taken_over;
    template <class Ops>
    void on_vector(typename Ops::Vector& value, typename Ops::Mask& kept, index_type column) const {
      if (!is_taken_over) bias.template on_vector<Ops>(value, kept, column);
    }
  };
  KOKKOS_FORCEINLINE_FUNCTION Row at_row(index_type row) const { return {bias.at_row(row), is_taken_over}; }
};

/// A bound transform as it stands right before a normalizer, which takes over a bias at its end.
template <class T>
auto before_normalizer(const T& transform) {
  if constexpr (requires { transform.before_normalizer(); }) {
    return transform.before_normalizer();
  } else {
    return transform;
  }
}
template <class T>
auto before_normalizer(const BoundBias<T>& bias) {
  return BoundBiasBeforeNormalizer<T>(bias);
}
template <class A, class T>
auto before_normalizer(const BoundChain<A, BoundBias<T>>& chain) {
  return BoundChain<A, BoundBiasBeforeNormalizer<T>>{chain.a, BoundBiasBeforeNormalizer<T>(chain.b)};
}

/// What the normalizer after such a transform has to take off a column's mean.
template <class T>
KOKKOS_FORCEINLINE_FUNCTION double taken_over(const T& before, index_type column) {
  if constexpr (requires { before.taken_over(column); }) {
    return before.taken_over(column);
  } else {
    return 0;
  }
}
template <class A, class T>
KOKKOS_FORCEINLINE_FUNCTION double taken_over(const BoundChain<A, BoundBiasBeforeNormalizer<T>>& before,
                                              index_type column) {
  return before.b.taken_over(column);
}

/// From a column's moments to its normalizer; updates the running statistics. The moments are those with
/// everything before them, `before` among it.
template <class Acc, class Statistics, class Before>
struct MakeNormalizer {
  Statistics statistics;
  Before before;
  NormalizerArrays<Acc> normalizer;
  double rows;

  KOKKOS_FORCEINLINE_FUNCTION void operator()(index_type column, SplitMean column_mean,
                                              double squares) const {
    const double variance = squares / rows + statistics.eps;
    const double bias = taken_over(before, column);
    const double mean = column_mean.value - bias, of_bias = column_mean.value - mean;  // two-sum
    const double rest = (column_mean.value - (mean + of_bias)) + (of_bias - bias) + column_mean.rest;
    // A column without spread gives beta, also when eps is 0.
    normalizer.store(column,
                     variance == 0 ? 0 : load_as<double>(statistics.gamma(column)) / Kokkos::sqrt(variance),
                     {mean, rest}, load_as<double>(statistics.beta(column)));
    if (statistics.running_mean.data) blend(statistics.running_mean(column), column_mean.value);
    if (statistics.running_variance.data) blend(statistics.running_variance(column), squares / (rows - 1));
  }

 private:
  template <class T>
  KOKKOS_FORCEINLINE_FUNCTION void blend(T& running, double now) const {
    running = store_as<T>((1 - statistics.momentum) * load_as<double>(running) + statistics.momentum * now);
  }
};

/// A BatchNorm with given statistics as normalizer: one square root and one division a column instead of one
/// an element.
template <class Acc, class BatchNorm, class Before>
struct MakeGivenNormalizer {
  BatchNorm given;
  Before before;
  NormalizerArrays<Acc> normalizer;

  KOKKOS_FUNCTION void operator()(index_type column) const {
    const double given_mean = load_as<double>(given.mean(column)), bias = taken_over(before, column);
    const double mean = given_mean - bias, of_bias = given_mean - mean;  // two-sum
    normalizer.store(column,
                     load_as<double>(given.gamma(column)) /
                         Kokkos::sqrt(load_as<double>(given.variance(column)) + given.eps),
                     {mean, (given_mean - (mean + of_bias)) + (of_bias - bias)},
                     load_as<double>(given.beta(column)));
  }
};

/// Replaces the BatchNorms of a bound transform by normalizers in scratch memory.
template <class Exec, class Acc>
class PrepareBatchNorms {
 public:
  /// `normalizers` has room for the arrays of each BatchNorm. Without `fill` they are only named.
  PrepareBatchNorms(const Exec& exec, const std::string& label, Acc* normalizers, index_type columns,
                    bool fill)
      : exec_(exec), label_(label), next_(normalizers), columns_(columns), fill_(fill) {}

  template <class T>
  T operator()(const T& transform) {
    if constexpr (requires { transform.with_prepared_batch_norms(*this); }) {
      return transform.with_prepared_batch_norms(*this);
    } else {
      return transform;
    }
  }
  template <class M, class V, class G, class B>
  auto operator()(const BoundBatchNorm<M, V, G, B>& given) {
    return normalizer(given, BoundIdentity{});
  }
  template <class A, class B>
  auto operator()(const BoundChain<A, B>& chain) {
    const auto a = (*this)(chain.a);
    const auto b = (*this)(chain.b);
    return BoundChain<std::remove_const_t<decltype(a)>, std::remove_const_t<decltype(b)>>{a, b};
  }
  template <class T, class M, class V, class G, class B>
  auto operator()(const BoundChain<BoundBias<T>, BoundBatchNorm<M, V, G, B>>& chain) {
    return with_bias_taken_over(chain.a, chain.b);
  }
  template <class A, class T, class M, class V, class G, class B>
  auto operator()(const BoundChain<BoundChain<A, BoundBias<T>>, BoundBatchNorm<M, V, G, B>>& chain) {
    return with_bias_taken_over((*this)(chain.a), chain.b);
  }

  /// Of a BatchNorm with gamma, variance, beta and mean of a column, and eps, after what before_normalizer
  /// gave.
  template <class BatchNorm, class Before>
  BoundNormalizer<Acc> normalizer(const BatchNorm& given, const Before& before) {
    using Normalizer = BoundNormalizer<Acc>;
    const Normalizer result{next_, Normalizer::distance_for(columns_)};
    const MakeGivenNormalizer<Acc, BatchNorm, Before> make{given, before, {next_, result.distance}};
    next_ += Normalizer::arrays * result.distance;
    if (fill_) launch_range(exec_, label_ + "::batch_norm", columns_, make);
    return result;
  }

 private:
  const Exec& exec_;
  std::string label_;
  Acc* next_;
  index_type columns_;
  bool fill_;

  template <class A, class BatchNorm>
  auto with_bias_taken_over(const A& with_bias, const BatchNorm& given) {
    const auto before = before_normalizer(with_bias);
    const auto after = normalizer(given, before);
    return BoundChain<std::remove_const_t<decltype(before)>, std::remove_const_t<decltype(after)>>{before,
                                                                                                   after};
  }
};

struct LinearScratch;

/// What does the softmax of a head made from a GEMM: its own list, or any.
template <class Gemm>
struct RowsOf {
  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem, const char* operation) {
    run_rows(exec, problem, operation);
  }
  template <class Exec, class Problem>
  static void reserve(const Exec& exec, const Problem& problem, const char* operation) {
    reserve_rows(exec, problem, operation);
  }
};
template <class Gemm>
requires requires {
  typename Gemm::Rows;
}
struct RowsOf<Gemm> {
  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem, const char* operation) {
    run_rows_by<typename Gemm::Rows>(exec, problem, operation);
  }
  template <class Exec, class Problem>
  static void reserve(const Exec& exec, const Problem& problem, const char* operation) {
    reserve_rows_by<typename Gemm::Rows>(exec, problem, operation);
  }
};

/// Whether a GEMM takes X and W of any layout, and the panels of W are its own business.
template <class Gemm>
inline constexpr bool multiplies_problem_v = requires {
  Gemm::multiplies_problem;
};

/// Whether a transform is fast enough to be applied by a GEMM, whose threads have many logits each.
template <class Transform>
inline constexpr bool is_worth_fusing_v = true;

/// Whether a GEMM applies a transform to the logits before it writes them.
template <class Gemm, class Transform>
constexpr bool fuses() {
  if constexpr (multiplies_problem_v<Gemm> && is_worth_fusing_v<Transform>) {
    return Gemm::template fuses<Transform>;
  } else {
    return false;
  }
}

/// How a head is cut, and where its scratch lies. Depends on types, extents and layout alone, because it
/// decides the bits. What is needed beside the operands:
///   Y float or double (and no smaller than X and W), one of its strides 1: the logits are in Y, nothing;
///   Y of 16 bits, of float where X or W is double, or with two strides: the logits of a panel of rows, at
///     least 1024 rows of N accumulators and at most 64 MiB if that is more; with batch statistics of all
///     rows;
///   an operand that the GEMM cannot take (its scalar, or two strides): a packed panel of it, of X as many
///     rows as the panel, of W at most 16 MiB (host) or 1 GiB (device), and no less than 256 rows;
///   batch statistics: 16 bytes a column for each chunk of rows, and three accumulators a column; so has each
///     BatchNorm with given statistics.
template <class Exec, class Gemm, class Problem>
struct GemmPlan {
  using Acc = typename Problem::Acc;
  using XT = std::remove_const_t<typename Problem::X>;
  using WT = std::remove_const_t<typename Problem::W>;
  using Operand = typename Gemm::template Operand<XT, WT, Acc>;

  BlasMatrix<const Operand> x{}, w{};
  BlasMatrix<Acc> logits{};
  bool pack_x = false, pack_w = false, y_holds_logits = false;
  index_type panel_rows = 0, panel_columns = 0, logits_rows = 0;
  std::size_t x_at = 0, w_at = 0, logits_at = 0, moments_at = 0, normalizer_at = 0, bytes = 0;

  explicit GemmPlan(const Problem& p) {
    const index_type m = p.x.rows, n = p.w.rows, k = p.x.columns;
    if constexpr (!multiplies_problem_v<Gemm>) {
      pack_x = !take(p.x, x);
      pack_w = !take(p.w, w);
    }
    if constexpr (std::is_same_v<typename Problem::Y, Acc>) {
      logits = as_blas_matrix(p.y);
      y_holds_logits = logits.leading > 0;
    }
    if (!y_holds_logits) logits = {nullptr, m, n, std::max<index_type>(1, n), true};
    if constexpr (Gemm::template avoids_small_dot_products<Exec>) {
      // There the library sums with atomics, in any order: give the left operand another orientation.
      auto& left = logits.columns_contiguous ? w : x;
      const auto& right = logits.columns_contiguous ? x : w;
      if (m * n < 1600 && m < 1600 && n < 1600 && left.columns_contiguous && right.columns_contiguous) {
        (logits.columns_contiguous ? pack_w : pack_x) = true;
        left.columns_contiguous = false;
      }
    }

    panel_rows = std::min(m, most_blas_rows);
    const std::size_t row_bytes = (pack_x ? static_cast<std::size_t>(k) * sizeof(Operand) : 0) +
                                  (y_holds_logits ? 0 : static_cast<std::size_t>(n) * sizeof(Acc));
    if (row_bytes > 0) {
      panel_rows = std::min(panel_rows, std::max<index_type>(1024, (index_type(64) << 20) / row_bytes));
    }
    panel_columns = n;
    if (pack_w && k > 0) {
      // On the host the threads of OpenMP and those of the BLAS wait for the next panel beside each other's
      // work. (1024 x 8192 to 8192 bfloat16 on two cores of a Zen 4, panels of 16 and 64 MiB 705 and 600 ms,
      // with a GEMM in float of 560; where OpenMP's threads sleep at once 585 and 573.)
      const index_type budget = runs_on_host_v<Exec> ? index_type(64) << 20 : index_type(1) << 30;
      const index_type rows = budget / (k * static_cast<index_type>(sizeof(Operand)));
      panel_columns = std::min(n, std::max<index_type>(256, rows));
    }
    logits_rows = y_holds_logits ? 0 : Problem::Head::has_statistics ? m : panel_rows;

    x_at = take_bytes(pack_x ? panel_rows * k : 0, sizeof(Operand));
    w_at = take_bytes(pack_w ? panel_columns * k : 0, sizeof(Operand));
    logits_at = take_bytes(logits_rows * n, sizeof(Acc));
    if (Problem::Head::has_statistics) {
      moments_at = take_bytes(static_cast<index_type>(column_statistics_bytes<Exec>(m, n)), 1);
    }
    normalizer_at = take_bytes(
        BoundNormalizer<Acc>::arrays * BoundNormalizer<Acc>::distance_for(n) * Problem::Head::normalizers,
        sizeof(Acc));
  }

 private:
  template <class T>
  static bool take(const Matrix<const T>& matrix, BlasMatrix<const Operand>& as) {
    as.rows = matrix.rows;
    as.columns = matrix.columns;
    // A packed copy is in the order of the original.
    as.columns_contiguous = matrix.column_stride <= matrix.row_stride || matrix.rows <= 1;
    if constexpr (std::is_same_v<T, Operand>) {
      const auto direct = as_blas_matrix(matrix);
      if (direct.leading > 0) {
        as = direct;
        return true;
      }
    }
    return false;
  }

  std::size_t take_bytes(index_type count, std::size_t size) {
    const std::size_t at = bytes;
    bytes += (static_cast<std::size_t>(count) * size + 255) / 256 * 256;
    return at;
  }
};

/// A candidate made from a GEMM. `Gemm` has
///   static constexpr const char* name;
///   template <class Exec, class Problem> static constexpr bool supports;
///   template <class Exec, class Problem> static std::string_view refuse(const Exec&, const Problem&);
///   template <class X, class W, class Acc> using Operand       what X and W are to be brought to;
///   template <class Exec> static constexpr bool avoids_small_dot_products;
///   static void multiply(exec, precision, x, w, logits)         logits = x w^T on BlasMatrix, x with K > 0;
///   static void reserve(exec).
/// Or, in place of the last two, with `static constexpr bool multiplies_problem = true`:
///   static void multiply(exec, problem, first_row, logits, epilogue)      the logits of a panel of rows,
///   with
///                                                               a transform applied, or BoundIdentity;
///   template <class Transform> static constexpr bool fuses      whether it can do that, by type,
///   template <class Transform, class Problem> static bool has_epilogue(exec, problem)   and for this one;
///   static void reserve(exec, problem, rows)                    for panels of at most so many rows.
/// Either may have advise_against(exec, problem), see CandidateList, and a list `Rows` in place of
/// SoftmaxCandidates.
template <class Gemm>
struct GemmThenRows {
  static constexpr const char* name = Gemm::name;

  template <class Exec, class Problem>
  static constexpr bool supports = Gemm::template supports<Exec, Problem>;

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec& exec, const Problem& p) {
    if (p.x.columns > INT_MAX) return "BLAS counts K in an int, and it is larger";
    if (p.w.rows > INT_MAX) return "BLAS counts N in an int, and it is larger";
    return Gemm::refuse(exec, p);
  }

  template <class Exec, class Problem>
  static std::string_view advise_against(const Exec& exec, const Problem& p) {
    if constexpr (requires { Gemm::advise_against(exec, p); }) {
      return Gemm::advise_against(exec, p);
    } else {
      return {};
    }
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& p) {
    using Acc = typename Problem::Acc;
    const GemmPlan<Exec, Gemm, Problem> plan(p);
    char* scratch = plan.bytes ? static_cast<char*>(Pool<Exec>::get(exec, plan.bytes)) : nullptr;
    const index_type m = p.x.rows;
    BlasMatrix<Acc> logits = plan.logits;
    if (!plan.y_holds_logits) logits.data = reinterpret_cast<Acc*>(scratch + plan.logits_at);
    const bool softmax_by_panels = !plan.y_holds_logits && !Problem::Head::has_statistics;
    const auto use = [&](const auto& problem) { RowsOf<Gemm>::run(exec, problem, p.softmax_step()); };
    const auto transform = prepared(exec, p, plan, scratch, true);
    with_parts(exec, p, transform, [&](const auto& epilogue, const auto& before, const auto& rest) {
      for (index_type first = 0; first < m; first += plan.panel_rows) {
        const index_type rows = std::min(plan.panel_rows, m - first);
        const BlasMatrix<Acc> panel = logits.row_panel(softmax_by_panels ? 0 : first, rows);
        multiply(exec, p, plan, scratch, first, panel, epilogue);
        if (softmax_by_panels) {
          rows_of(p, as_matrix(panel), p.y.row_panel(first, rows), rest, first, use);
        }
      }
      if constexpr (Problem::Head::has_statistics) {
        statistics(exec, p, plan, scratch, as_matrix(logits), before);
      }
      if (!softmax_by_panels) rows_of(p, as_matrix(logits), p.y, rest, 0, use);
    });
    last_implementation_slot() = name;
  }

  /// Makes what run() needs.
  template <class Exec, class Problem>
  static void reserve(const Exec& exec, const Problem& p) {
    using Acc = typename Problem::Acc;
    const GemmPlan<Exec, Gemm, Problem> plan(p);
    if (plan.bytes) Pool<Exec>::reserve(exec, plan.bytes);
    if constexpr (multiplies_problem_v<Gemm>) {
      Gemm::reserve(exec, p, plan.panel_rows);
    } else {
      Gemm::reserve(exec);
    }
    const auto use = [&](const auto& problem) { RowsOf<Gemm>::reserve(exec, problem, p.softmax_step()); };
    BlasMatrix<Acc> logits = plan.logits;
    Matrix<typename Problem::Y> y = p.y;
    if (!plan.y_holds_logits) logits.rows = y.rows = plan.logits_rows;
    char* scratch = plan.bytes ? static_cast<char*>(Pool<Exec>::get(exec, plan.bytes)) : nullptr;
    if (!plan.y_holds_logits) logits.data = reinterpret_cast<Acc*>(scratch + plan.logits_at);
    with_parts(
        exec, p, prepared(exec, p, plan, scratch, false),
        [&](const auto&, const auto&, const auto& rest) { rows_of(p, as_matrix(logits), y, rest, 0, use); });
  }

 private:
  template <class Exec>
  using Pool = ScratchPool<typename Exec::memory_space, LinearScratch>;

  /// Calls `use` with what the GEMM does to the logits itself (nothing: BoundIdentity), what of a head with
  /// batch statistics is left to do before these, and what is left to the softmax.
  template <class Exec, class Problem, class Transform, class Use>
  static void with_parts(const Exec& exec, const Problem& p, const Transform& transform, const Use& use) {
    if constexpr (Problem::Head::has_statistics) {
      const auto rest = chain_of(transform.normalizer, transform.after);
      if (use_fused(exec, p, transform.before, rest, use)) return;
      use(BoundIdentity{}, p.head.before,
          chain_of(chain_of(before_normalizer(transform.before), transform.normalizer), transform.after));
    } else {
      if (!use_fused(exec, p, transform, BoundIdentity{}, use))
        use(BoundIdentity{}, BoundIdentity{}, transform);
    }
  }

  template <class Exec, class Problem, class Epilogue, class Rest, class Use>
  static bool use_fused(const Exec& exec, const Problem& p, const Epilogue& epilogue, const Rest& rest,
                        const Use& use) {
    if constexpr (fuses<Gemm, Epilogue>()) {
      if (p.x.columns == 0 || !Gemm::template has_epilogue<Epilogue>(exec, p)) return false;
      use(epilogue, BoundIdentity{}, rest);
      return true;
    } else {
      return false;
    }
  }

  template <class T>
  static Matrix<T> as_matrix(const BlasMatrix<T>& b) {
    return {b.data, b.rows, b.columns, b.columns_contiguous ? b.leading : 1,
            b.columns_contiguous ? 1 : b.leading};
  }

  template <class Exec, class From, class To>
  static BlasMatrix<const To> pack(const Exec& exec, const std::string& label, const Matrix<const From>& from,
                                   bool columns_contiguous, To* to) {
    using Copy = Pack<Exec, std::remove_const_t<From>, To>;
    const index_type slow = columns_contiguous ? from.rows : from.columns;
    const index_type fast = columns_contiguous ? from.columns : from.rows;
    const Copy copy{from.data,
                    to,
                    slow,
                    fast,
                    columns_contiguous ? from.row_stride : from.column_stride,
                    columns_contiguous ? from.column_stride : from.row_stride};
    launch_range(exec, label, slow * ceil_div(fast, Copy::width), copy);
    return {to, from.rows, from.columns, fast, columns_contiguous};
  }

  /// The logits of some rows, from panels of W.
  template <class Exec, class Problem, class Plan, class Acc, class Epilogue>
  static void multiply(const Exec& exec, const Problem& p, const Plan& plan, char* scratch, index_type first,
                       const BlasMatrix<Acc>& logits, [[maybe_unused]] const Epilogue& epilogue) {
    const std::string label = std::string("KokkosSoftmax::") + p.name();
    if (p.x.columns == 0) {
      launch_range(exec, label + "::zero", logits.rows * logits.columns,
                   FillZero<Exec, Acc>{as_matrix(logits)});
      return;
    }
    if constexpr (multiplies_problem_v<Gemm>) {
      Gemm::multiply(exec, p, first, logits, epilogue);
    } else {
      multiply_panels(exec, p, plan, scratch, label, first, logits);
    }
  }

  template <class Exec, class Problem, class Plan, class Acc>
  static void multiply_panels(const Exec& exec, const Problem& p, const Plan& plan, char* scratch,
                              const std::string& label, index_type first, const BlasMatrix<Acc>& logits) {
    using Operand = typename Plan::Operand;
    const BlasMatrix<const Operand> x =
        plan.pack_x ? pack(exec, label + "::pack_x", p.x.row_panel(first, logits.rows),
                           plan.x.columns_contiguous, reinterpret_cast<Operand*>(scratch + plan.x_at))
                    : plan.x.row_panel(first, logits.rows);
    for (index_type column = 0; column < p.w.rows; column += plan.panel_columns) {
      const index_type columns = std::min(plan.panel_columns, p.w.rows - column);
      const BlasMatrix<const Operand> w =
          plan.pack_w ? pack(exec, label + "::pack_w", p.w.row_panel(column, columns),
                             plan.w.columns_contiguous, reinterpret_cast<Operand*>(scratch + plan.w_at))
                      : plan.w.row_panel(column, columns);
      Gemm::multiply(exec, p.precision, x, w, logits.column_panel(column, columns));
    }
  }

  template <class Exec, class Problem, class Plan, class Acc, class Before>
  static void statistics(const Exec& exec, const Problem& p, const Plan& plan, char* scratch,
                         const Matrix<Acc>& logits, const Before& before) {
    const auto normalizer = normalizer_at(p, plan, scratch);
    const auto before_it = before_normalizer(before);
    const MakeNormalizer<Acc, typename Problem::Head::Statistics, std::remove_const_t<decltype(before_it)>>
        sink{p.head.statistics,
             before_it,
             {const_cast<Acc*>(normalizer.factor), normalizer.distance},
             static_cast<double>(logits.rows)};
    const ColumnsProblem<Acc, Acc, Before> columns{logits.data,       logits.rows,          logits.columns,
                                                   logits.row_stride, logits.column_stride, before};
    run_column_statistics(exec, std::string("KokkosSoftmax::") + p.name() + "::statistics", columns,
                          reinterpret_cast<Moments*>(scratch + plan.moments_at), sink);
  }

  template <class Problem, class Plan>
  static auto normalizer_at(const Problem& p, const Plan& plan, char* scratch) {
    using Acc = typename Problem::Acc;
    using Normalizer = BoundNormalizer<Acc>;
    return Normalizer{reinterpret_cast<const Acc*>(scratch + plan.normalizer_at),
                      Normalizer::distance_for(p.w.rows)};
  }

  /// The head's transform, its BatchNorms as normalizers; that of the batch's statistics is first in memory.
  template <class Exec, class Problem, class Plan>
  static auto prepared(const Exec& exec, const Problem& p, const Plan& plan, char* scratch, bool fill) {
    using Acc = typename Problem::Acc;
    Acc* normalizers = reinterpret_cast<Acc*>(scratch + plan.normalizer_at);
    const index_type n = p.w.rows;
    const std::string label = std::string("KokkosSoftmax::") + p.name();
    if constexpr (Problem::Head::has_statistics) {
      const auto normalizer = normalizer_at(p, plan, scratch);
      PrepareBatchNorms<Exec, Acc> prepare(
          exec, label, normalizers + BoundNormalizer<Acc>::arrays * normalizer.distance, n, fill);
      const auto before = prepare(p.head.before);
      const auto after = prepare(p.head.after);
      return PreparedStatistics<std::remove_const_t<decltype(before)>,
                                std::remove_const_t<decltype(normalizer)>,
                                std::remove_const_t<decltype(after)>>{before, normalizer, after};
    } else {
      PrepareBatchNorms<Exec, Acc> prepare(exec, label, normalizers, n, fill);
      return prepare(p.head.transform);
    }
  }

  /// Hands the softmax of the logits, in canonical form, to `use`.
  template <class Problem, class Acc, class Transform, class Use>
  static void rows_of(const Problem& p, const Matrix<Acc>& logits, const Matrix<typename Problem::Y>& y,
                      const Transform& transform, index_type first_row, const Use& use) {
    const Block x_block = logits.block(), y_block = y.block();
    LogitShape shape;
    shape.rank = 2;
    shape.axis = 1;
    shape.extent[0] = shape.rows = logits.rows;
    shape.extent[1] = shape.columns = logits.columns;
    const auto shifted = shift_rows(transform, first_row);
    use(RowsProblem<Acc, typename Problem::Y, std::remove_const_t<decltype(shifted)>>{
        logits.data, y.data, p.operation, axis_is_strided(shape, x_block),
        RowGeometry::of(shape, x_block, y_block), shifted});
  }
};

}  // namespace KokkosSoftmax::impl

#endif
