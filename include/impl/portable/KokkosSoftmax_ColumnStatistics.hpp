// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Mean and biased variance of each column of a matrix, in double: of differences from the column's first
/// value, summed from one of themselves over a few rows, then joined (T. Chan, G. Golub and R. LeVeque,
/// "Updating formulae and a pairwise algorithm for computing sample variances", 1979). No difference of large
/// squares is formed, and what all values of a column share is never rounded.

#ifndef KOKKOSSOFTMAX_IMPL_COLUMNSTATISTICS_HPP
#define KOKKOSSOFTMAX_IMPL_COLUMNSTATISTICS_HPP

#include <impl/portable/KokkosSoftmax_Launch.hpp>
#include <impl/portable/KokkosSoftmax_RowBlocks.hpp>

#include <algorithm>

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

/// The moments of `count` values from what they differ by from a value that is `shift` beside the column's
/// first.
KOKKOS_FORCEINLINE_FUNCTION Moments moments_of_differences(double shift, double sum, double squares,
                                                           double count) {
  const double mean = sum / count;
  const double rest = squares - sum * mean;
  return {shift + mean, rest < 0 ? 0 : rest};
}

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

/// The moments of a chunk of rows of a column, by a thread of a device.
template <class Exec, class Problem>
struct ChunkOfColumn {
  Problem problem;
  index_type chunk_rows;

  KOKKOS_FUNCTION Moments reduce(index_type chunk, index_type column) const {
    const index_type begin = chunk * chunk_rows;
    const index_type end = Kokkos::min(begin + chunk_rows, problem.rows);
    Moments total{};
    for (index_type r = begin; r < end; r += ColumnStatisticsPlan<Exec>::rows_of_shift) {
      const index_type stop = Kokkos::min(r + ColumnStatisticsPlan<Exec>::rows_of_shift, end);
      const Moments part = reduce_rows(r, stop, column);
      if (r == begin) {
        total = part;
      } else {
        total.join(static_cast<double>(r - begin), part, static_cast<double>(stop - r));
      }
    }
    return total;
  }

 private:
  /// Of rows that share the value from which differences are taken: that of the first of them.
  KOKKOS_FUNCTION Moments reduce_rows(index_type begin, index_type end, index_type column) const {
    double shift = 0, sum = 0, squares = 0;
    const auto add = [&](double value) {
      const double difference = value - shift;
      sum += difference;
      squares += difference * difference;
    };
    index_type i = begin;
    // A batch of loads is under way while the one before it is added.
    constexpr int batch = 16;
    if (end - begin >= batch && problem.transform_of_all_rows_is_one()) {
      const auto row = problem.transform.at_row(0);
      typename Problem::In raw[batch];
      const auto load = [&] {
        for (int k = 0; k < batch; ++k) raw[k] = problem.element(i + k, column);
      };
      load();
      shift = problem.transformed_element(row, raw[0], column);
      for (; i + batch <= end;) {
        typename Problem::In now[batch];
        for (int k = 0; k < batch; ++k) now[k] = raw[k];
        i += batch;
        if (i + batch <= end) load();
        for (int k = 0; k < batch; ++k) add(problem.transformed_element(row, now[k], column));
      }
    }
    if (i == begin) shift = problem.value(problem.transform.at_row(begin), begin, column);
    for (; i < end; ++i) add(problem.value(problem.transform.at_row(i), i, column));
    const double of_first_row = problem.value(problem.transform.at_row(0), 0, column);
    return moments_of_differences(shift - of_first_row, sum, squares, static_cast<double>(end - begin));
  }
};

/// A mean in two parts: rounded, and what the rounding took.
struct SplitMean {
  double value, rest;
};

/// Joins the chunks of a column and hands (column, mean, sum of squared differences) on.
template <class Problem, class Sink>
struct JoinChunks {
  Problem problem;
  index_type chunk_rows;
  Sink sink;

  /// `partials` are those of the first chunk, `distance` from each to the next.
  KOKKOS_FUNCTION void operator()(index_type column, const Moments* partials, index_type distance) const {
    const index_type chunks = ceil_div(problem.rows, chunk_rows);
    const double last = static_cast<double>(problem.rows - (chunks - 1) * chunk_rows);
    const auto count = [&](index_type chunk) {
      return chunk + 1 < chunks ? static_cast<double>(chunk_rows) : last;
    };
    double sum = 0;
    for (index_type c = 0; c < chunks; ++c) sum += count(c) * partials[c * distance].mean;
    Moments total{sum / static_cast<double>(problem.rows), 0};
    for (index_type c = 0; c < chunks; ++c) {
      const Moments part = partials[c * distance];
      const double difference = part.mean - total.mean;
      total.squares += part.squares + count(c) * (difference * difference);
    }
    const double base = problem.value(problem.transform.at_row(0), 0, column);
    const double value = base + total.mean;
    const double of_mean = value - base;  // D. Knuth's two-sum
    sink(column, SplitMean{value, (base - (value - of_mean)) + (total.mean - of_mean)}, total.squares);
  }
};

/// First of two launches.
template <class Exec, class Problem>
struct ReduceColumns {
  ChunkOfColumn<Exec, Problem> chunk_of;
  Moments* partials;  ///< chunks x columns

  KOKKOS_FUNCTION void operator()(index_type item) const {
    const index_type columns = chunk_of.problem.columns, chunk = item / columns;
    partials[item] = chunk_of.reduce(chunk, item - chunk * columns);
  }
};

/// Second launch.
template <class Problem, class Sink>
struct JoinColumns {
  JoinChunks<Problem, Sink> join;
  const Moments* partials;

  KOKKOS_FUNCTION void operator()(index_type column) const {
    join(column, partials + column, join.problem.columns);
  }
};

/// Both in one launch, for a device and few chunks: a team has some neighbouring columns, a lane each, and
/// its threads share their chunks. The same bits as in two launches.
template <class Exec, class Problem, class Sink>
struct ReduceAndJoinColumns {
  static constexpr int lanes = 32, most_threads = 8;
  using Bounds = Kokkos::LaunchBounds<lanes * most_threads, 2>;
  ChunkOfColumn<Exec, Problem> chunk_of;
  Sink sink;

  /// More chunks have too few threads in this form, unless many columns make up for it.
  static bool is_faster(index_type chunks, index_type columns) {
    return chunks <= (columns < 4096 ? 16 : 64);
  }
  static std::size_t team_scratch(index_type chunks) {
    return static_cast<std::size_t>(chunks) * lanes * sizeof(Moments) + alignof(Moments);
  }

  KOKKOS_FUNCTION void operator()(const typename Kokkos::TeamPolicy<Exec>::member_type& team) const {
    const Problem& problem = chunk_of.problem;
    const index_type first = static_cast<index_type>(team.league_rank()) * lanes;
    const int width = static_cast<int>(Kokkos::min<index_type>(lanes, problem.columns - first));
    const index_type chunks = ceil_div(problem.rows, chunk_of.chunk_rows);
    auto* partials = static_cast<Moments*>(team.team_scratch(0).get_shmem_aligned(
        static_cast<int>(chunks * lanes * sizeof(Moments)), alignof(Moments)));
    for (index_type chunk = team.team_rank(); chunk < chunks; chunk += team.team_size()) {
      Kokkos::parallel_for(Kokkos::ThreadVectorRange(team, width), [&](int lane) {
        partials[chunk * lanes + lane] = chunk_of.reduce(chunk, first + lane);
      });
    }
    team.team_barrier();
    if (team.team_rank() != 0) return;
    const JoinChunks<Problem, Sink> join{problem, chunk_of.chunk_rows, sink};
    Kokkos::parallel_for(Kokkos::ThreadVectorRange(team, width),
                         [&](int lane) { join(first + lane, partials + lane, lanes); });
  }
};

template <class Exec>
std::size_t column_statistics_bytes(index_type rows, index_type columns) {
  return static_cast<std::size_t>(ColumnStatisticsPlan<Exec>::chunks(rows) * columns) * sizeof(Moments);
}

}  // namespace KokkosSoftmax::impl

#endif
