// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Mean and biased variance of each column of a matrix, in double: of differences from the column's first
/// value, summed from one of themselves over a few rows, then joined (T. Chan, G. Golub and R. LeVeque,
/// "Updating formulae and a pairwise algorithm for computing sample variances", 1979). No difference of large
/// squares is formed, and what all values of a column share is never rounded.

#ifndef KOKKOSSOFTMAX_IMPL_COLUMNSTATISTICS_HPP
#define KOKKOSSOFTMAX_IMPL_COLUMNSTATISTICS_HPP

#include <impl/portable/KokkosSoftmax_RowBlocks.hpp>

#include <algorithm>
#include <string>

namespace KokkosSoftmax::impl {

/// The mean of some values of a column, counted from the column's first value, and the sum of their squared
/// differences from it.
struct Moments {
  double mean;
  double squares;

  /// Takes in the moments of `other_count` values beside the `count` that are in it.
  KOKKOS_FORCEINLINE_FUNCTION void join(double count, const Moments& other, double other_count) {
    const double difference = other.mean - mean;
    const double share = other_count / (count + other_count);
    mean += difference * share;
    squares += other.squares + difference * difference * count * share;
  }
};

/// A matrix whose columns are looked at through a transform.
template <class In_, class Acc_, class Transform_>
struct ColumnsProblem {
  using In = In_;
  using Acc = Acc_;
  using Transform = Transform_;

  const In* x;
  index_type rows, columns, row_stride, column_stride;
  Transform transform;

  KOKKOS_FORCEINLINE_FUNCTION bool transform_of_all_rows_is_one() const { return rows_are_alike(transform); }
  KOKKOS_FORCEINLINE_FUNCTION const In& element(index_type r, index_type column) const {
    return x[r * row_stride + column * column_stride];
  }
  KOKKOS_FORCEINLINE_FUNCTION static double transformed_element(const typename Transform::Row& row,
                                                                const In& element, index_type column) {
    return static_cast<double>(transformed<Acc>(row, load_as<Acc>(element), column));
  }
  KOKKOS_FORCEINLINE_FUNCTION double value(const typename Transform::Row& row, index_type r,
                                           index_type column) const {
    return transformed_element(row, element(r, column), column);
  }
};

/// How the rows are cut; depends on the extents alone, because it decides the bits.
template <class Exec>
struct ColumnStatisticsPlan {
  /// Columns of one work item: a thread of a device has one, neighbours beside it; a core of the host as many
  /// as make its loops vectorise.
  static constexpr int block = runs_on_host_v<Exec> ? 64 : 1;
  /// Rows that share the value from which differences are taken.
  static constexpr index_type rows_of_shift = 64;
  static constexpr index_type most_chunks = 256;

  /// Rows of one work item.
  static index_type chunk_rows(index_type rows) {
    const index_type least = runs_on_host_v<Exec> ? 4096 : rows_of_shift;
    return std::max(least, ceil_div(rows, most_chunks));
  }
  static index_type chunks(index_type rows) { return ceil_div(rows, chunk_rows(rows)); }
};

/// First launch: the moments of a chunk of rows, for each column.
template <class Exec, class Problem>
struct ReduceColumns {
  static constexpr int block = ColumnStatisticsPlan<Exec>::block;
  Problem problem;
  Moments* partials;  ///< chunks x columns
  index_type chunk_rows;

  KOKKOS_FUNCTION void operator()(index_type item) const {
    const index_type blocks = ceil_div(problem.columns, block);
    const index_type chunk = item / blocks, first = (item - chunk * blocks) * block;
    const int width = static_cast<int>(Kokkos::min<index_type>(block, problem.columns - first));
    const index_type begin = chunk * chunk_rows;
    const index_type end = Kokkos::min(begin + chunk_rows, problem.rows);
    Moments total[block];
    double base[block];
    {
      const auto row = problem.transform.at_row(0);
      for (int c = 0; c < width; ++c) base[c] = problem.value(row, 0, first + c);
    }
    for (index_type r = begin; r < end; r += ColumnStatisticsPlan<Exec>::rows_of_shift) {
      const index_type stop = Kokkos::min(r + ColumnStatisticsPlan<Exec>::rows_of_shift, end);
      double shift[block], sum[block] = {}, squares[block] = {};
      {
        const auto row = problem.transform.at_row(r);
        for (int c = 0; c < width; ++c) shift[c] = problem.value(row, r, first + c) - base[c];
      }
      const auto add = [&](int c, double value) {
        const double difference = (value - base[c]) - shift[c];
        sum[c] += difference;
        squares[c] += difference * difference;
      };
      index_type i = r;
      if constexpr (block == 1) {
        // All loads of a batch are under way before the first use.
        constexpr int batch = 16;
        if (problem.transform_of_all_rows_is_one()) {
          const auto row = problem.transform.at_row(0);
          for (; i + batch <= stop; i += batch) {
            typename Problem::In raw[batch];
            for (int k = 0; k < batch; ++k) raw[k] = problem.element(i + k, first);
            for (int k = 0; k < batch; ++k) add(0, problem.transformed_element(row, raw[k], first));
          }
        }
      }
      for (; i < stop; ++i) {
        const auto row = problem.transform.at_row(i);
        for (int c = 0; c < width; ++c) add(c, problem.value(row, i, first + c));
      }
      const double count = static_cast<double>(stop - r);
      for (int c = 0; c < width; ++c) {
        const double mean = sum[c] / count;
        const double rest = squares[c] - sum[c] * mean;
        const Moments part{shift[c] + mean, rest < 0 ? 0 : rest};
        if (r == begin) {
          total[c] = part;
        } else {
          total[c].join(static_cast<double>(r - begin), part, count);
        }
      }
    }
    for (int c = 0; c < width; ++c) partials[chunk * problem.columns + first + c] = total[c];
  }
};

/// A mean in two parts: rounded, and what the rounding took.
struct SplitMean {
  double value, rest;
};

/// Second launch: joins the chunks of a column and hands (column, mean, sum of squared differences) on.
template <class Problem, class Sink>
struct JoinColumns {
  Problem problem;
  const Moments* partials;
  index_type chunk_rows;
  Sink sink;

  KOKKOS_FUNCTION void operator()(index_type column) const {
    const index_type chunks = ceil_div(problem.rows, chunk_rows);
    const double last = static_cast<double>(problem.rows - (chunks - 1) * chunk_rows);
    const auto count = [&](index_type chunk) {
      return chunk + 1 < chunks ? static_cast<double>(chunk_rows) : last;
    };
    double sum = 0;
    for (index_type c = 0; c < chunks; ++c) sum += count(c) * partials[c * problem.columns + column].mean;
    Moments total{sum / static_cast<double>(problem.rows), 0};
    for (index_type c = 0; c < chunks; ++c) {
      const Moments part = partials[c * problem.columns + column];
      const double difference = part.mean - total.mean;
      total.squares += part.squares + count(c) * (difference * difference);
    }
    const double base = problem.value(problem.transform.at_row(0), 0, column);
    const double value = base + total.mean;
    const double of_mean = value - base;  // D. Knuth's two-sum
    sink(column, SplitMean{value, (base - (value - of_mean)) + (total.mean - of_mean)}, total.squares);
  }
};

/// Launches without the staging buffer that Kokkos has for large functors (see launch_teams).
template <class Exec, class Functor>
void launch_range(const Exec& exec, const std::string& label, index_type count, const Functor& functor) {
  static_assert(sizeof(Functor) < 3800,
                "KokkosSoftmax: the transform is too large for the arguments of a kernel");
  const Kokkos::RangePolicy<Exec, Kokkos::IndexType<index_type>> policy(exec, 0, count);
  Kokkos::parallel_for(
      label, Kokkos::Experimental::require(policy, Kokkos::Experimental::WorkItemProperty::HintLightWeight),
      functor);
}

template <class Exec>
std::size_t column_statistics_bytes(index_type rows, index_type columns) {
  return static_cast<std::size_t>(ColumnStatisticsPlan<Exec>::chunks(rows) * columns) * sizeof(Moments);
}

/// `partials` has column_statistics_bytes(); rows > 0.
template <class Exec, class Problem, class Sink>
void run_column_statistics(const Exec& exec, const std::string& label, const Problem& problem,
                           Moments* partials, const Sink& sink) {
  using Plan = ColumnStatisticsPlan<Exec>;
  const index_type chunk_rows = Plan::chunk_rows(problem.rows);
  launch_range(exec, label + "::reduce", Plan::chunks(problem.rows) * ceil_div(problem.columns, Plan::block),
               ReduceColumns<Exec, Problem>{problem, partials, chunk_rows});
  launch_range(exec, label + "::join", problem.columns,
               JoinColumns<Problem, Sink>{problem, partials, chunk_rows, sink});
}

}  // namespace KokkosSoftmax::impl

#endif
