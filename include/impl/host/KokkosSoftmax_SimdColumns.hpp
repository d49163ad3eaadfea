// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The moments of columns (see impl/portable/KokkosSoftmax_ColumnStatistics.hpp) on the host: many columns
/// side by side, row by row, each row's logits through the transform on vectors.

#ifndef KOKKOSSOFTMAX_SIMDCOLUMNS_HPP
#define KOKKOSSOFTMAX_SIMDCOLUMNS_HPP

#include <impl/host/KokkosSoftmax_SimdTransform.hpp>
#include <impl/portable/KokkosSoftmax_ColumnStatistics.hpp>

#include <algorithm>
#include <type_traits>

namespace KokkosSoftmax::impl {

/// A work item has a chunk of rows of `block` neighbouring columns; as ReduceColumns else.
template <class Exec, class Problem>
struct SimdReduceColumns {
  using In = typename Problem::In;
  using Acc = typename Problem::Acc;
  using Plan = ColumnStatisticsPlan<Exec>;
  /// (1024 x 8192 floats with a bias on two cores of a Zen 4, in blocks of 256 and 512 columns 0.9 and 0.7
  /// ms; without fetching rows ahead 4.0 and 2.4.)
  static constexpr int most_columns = 512, least_columns = 64;

  Problem problem;
  index_type chunk_rows;
  index_type block;
  Moments* partials;  ///< chunks x columns

  /// Columns of a work item, several of which there shall be for each thread. Where columns are not
  /// neighbours, a line of each has to stay in the cache until all of its rows were read.
  static index_type block_for(const Problem& problem, index_type chunks, int threads) {
    if (problem.column_stride != 1) return least_columns;
    const index_type wanted = problem.columns * chunks / (2 * std::max(threads, 1));
    return std::clamp<index_type>(wanted / least_columns * least_columns, least_columns, most_columns);
  }

  void operator()(index_type item) const {
    const index_type blocks = ceil_div(problem.columns, block);
    const index_type chunk = item / blocks, first = (item - chunk * blocks) * block;
    const auto width = static_cast<int>(std::min(block, problem.columns - first));
    const index_type begin = chunk * chunk_rows, end = std::min(begin + chunk_rows, problem.rows);
    alignas(64) Acc stage[rows_together][most_columns];
    alignas(64) double of_first_row[most_columns], mean[most_columns], total[most_columns];
    const auto load = [&](index_type row, int to) {
      const In* from = &problem.element(row, first);
      In side_by_side[most_columns];
      if (problem.column_stride != 1) {
        for (int c = 0; c < width; ++c) side_by_side[c] = from[c * problem.column_stride];
        from = side_by_side;
      }
      load_transformed(problem.transform.at_row(row), from, 1, first, width, stage[to]);
    };
    load(0, 0);
    for_columns(width, [&](int c) { of_first_row[c] = static_cast<double>(stage[0][c]); });
    for (index_type r = begin; r < end; r += Plan::rows_of_shift) {
      const index_type stop = std::min(r + Plan::rows_of_shift, end);
      alignas(64) double shift[most_columns], sum[most_columns], squares[most_columns];
      load(r, 0);
      for_columns(width, [&](int c) {
        shift[c] = static_cast<double>(stage[0][c]);
        sum[c] = squares[c] = shift[c] - shift[c];  // what is not finite shows
      });
      index_type i = r + 1;
      const auto add = [&]<int rows>(std::integral_constant<int, rows>) __attribute__((always_inline)) {
        for (; i + rows <= stop; i += rows) {
          for (int k = 0; k < rows; ++k) {
            fetch(std::min(i + k + rows_ahead, end - 1), first, width);
            load(i + k, k);
          }
          for_columns(width, [&](int c) {
            double sum_of = sum[c], squares_of = squares[c];
            for (int k = 0; k < rows; ++k) {
              const double difference = static_cast<double>(stage[k][c]) - shift[c];
              sum_of += difference;
              squares_of += difference * difference;
            }
            sum[c] = sum_of;
            squares[c] = squares_of;
          });
        }
      };
      add(std::integral_constant<int, rows_together>());
      add(std::integral_constant<int, 1>());
      const auto count = static_cast<double>(stop - r), before = static_cast<double>(r - begin);
      for_columns(width, [&](int c) {
        const Moments part = moments_of_differences(shift[c] - of_first_row[c], sum[c], squares[c], count);
        Moments all = part;
        if (r != begin) {
          all = {mean[c], total[c]};
          all.join(before, part, count);
        }
        mean[c] = all.mean;
        total[c] = all.squares;
      });
    }
    for (int c = 0; c < width; ++c) partials[chunk * problem.columns + first + c] = {mean[c], total[c]};
  }

 private:
  /// Rows that are added in one turn, in their order.
  static constexpr int rows_together = 4;
  /// The next rows are elsewhere: the processor does not foresee them.
  static constexpr index_type rows_ahead = 4;
  KOKKOSSOFTMAX_HOST_FUNCTION void fetch(index_type row, index_type first, int width) const {
    if (problem.column_stride != 1) return;
    constexpr int line = 64 / static_cast<int>(sizeof(In));
    const In* const at = &problem.element(row, first);
    for (int c = 0; c < width; c += line) __builtin_prefetch(at + c, 0, 2);
  }

  /// In pieces whose length the compiler knows.
  template <class Body>
  KOKKOSSOFTMAX_HOST_FUNCTION static void for_columns(int width, const Body& body) {
    constexpr int piece = 16;
    int c = 0;
    for (; c + piece <= width; c += piece) {
      for (int k = 0; k < piece; ++k) body(c + k);
    }
    for (; c < width; ++c) body(c);
  }
};

}  // namespace KokkosSoftmax::impl

#endif
