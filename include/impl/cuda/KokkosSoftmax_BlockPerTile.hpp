// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The CUDA kernel for short rows whose columns are not contiguous: a block has a tile of them (see
/// KokkosSoftmax_RowTiles.hpp), all of their columns, in its registers. x is read once.

#ifndef KOKKOSSOFTMAX_BLOCKPERTILE_HPP
#define KOKKOSSOFTMAX_BLOCKPERTILE_HPP

#include <impl/cuda/KokkosSoftmax_RowTiles.hpp>

#include <algorithm>
#include <string_view>

namespace KokkosSoftmax::impl {

/// A thread: lane threadIdx.x across rows, slot threadIdx.y along columns.
template <int columns_of_thread, int rows_of_lane, class Problem>
__global__ void __launch_bounds__(512, 2) block_per_tile_kernel(const __grid_constant__ Problem problem) {
  using Mine = PartOfTile<columns_of_thread, rows_of_lane, Problem>;
  using Result = ResultOfWholeRow<Problem>;
  using Acc = typename Problem::Acc;
  extern __shared__ uint4 shared_of_tile[];
  grid_dependency_wait();
  if (problem.geometry.rows == 0) return;
  const int lane = static_cast<int>(threadIdx.x), lanes = static_cast<int>(blockDim.x),
            slot = static_cast<int>(threadIdx.y), slots = static_cast<int>(blockDim.y);
  const typename Mine::Place place(problem.geometry,
                                   (static_cast<index_type>(blockIdx.x) * lanes + lane) * rows_of_lane,
                                   static_cast<index_type>(slot) * columns_of_thread);
  Mine mine;
  mine.load_operands(problem, place);
  mine.read(problem, place);
  mine.transform(problem, place);
  const bool softmax = problem.operation == Operation::softmax;
  Acc max[rows_of_lane];
  Result result[rows_of_lane];
  if (slots == 1) {
    mine.maxima(mine.top(), max);
#pragma unroll
    for (int v = 0; v < rows_of_lane; ++v)
      result[v] = Result(problem.operation, max[v], mine.sum(max[v], v, softmax));
  } else {
    const SharedTile<rows_of_lane, Problem> shared(shared_of_tile, lanes, slots);
    auto* const results = reinterpret_cast<Result*>(shared.tops + slots * lanes);
    shared.reduce(
        mine, softmax, lane, lanes, slot, slots, max, [] { __syncthreads(); },
        [&](int row, Acc top, const ShareSum<Acc>& sum) {
          results[row] = Result(problem.operation, top, sum);
        });
    __syncthreads();
#pragma unroll
    for (int v = 0; v < rows_of_lane; ++v) result[v] = results[lane * rows_of_lane + v];
  }
  if (problem.operation == Operation::logsumexp) {
    if (slot == 0) write_logsumexp(problem, place, result);
  } else {
    mine.write(problem, place, max, result);
  }
}

/// Calls use<columns>() where rows have two columns, or up to four: kernels for these form no exponentials of
/// columns that are not there. For `reserve`, which has no rows, with both. True if rows are such. (With a
/// transform each would be compiled once more.)
template <class Problem, class Use>
bool with_few_columns(const Problem& problem, const Use& use) {
  if constexpr (has_transform_v<Problem>) {
    return false;
  } else {
    const index_type columns = problem.geometry.columns;
    const bool no_rows = problem.geometry.rows == 0;
    if (columns <= 2 || no_rows) use.template operator()<2>();
    if ((columns > 2 && columns <= 4) || no_rows) use.template operator()<4>();
    return columns <= 4 && !no_rows;
  }
}

struct BlockPerTile {
  static constexpr const char* name = "block_per_tile";

  template <class Exec, class Problem>
  static constexpr bool supports = sliced_rows_support<Exec, Problem>;

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec&, const Problem& problem) {
    if (!problem.axis_is_strided) return "the axis is the fastest dimension in memory";
    if (slices_of_tiles(problem) > 1) return "rows are too long";
    return {};
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    // `reserve` launches over no rows: that loads all kernels, which a capture could not do.
    const bool no_rows = problem.geometry.rows == 0,
               pairs = takes_pairs<Problem> && rows_come_in_pairs(problem);
    if constexpr (takes_pairs<Problem>) {
      if (pairs || no_rows) launch<2>(exec, problem);
    }
    if (!pairs || no_rows) launch<1>(exec, problem);
  }

  template <class Exec, class Problem>
  static void reserve(const Exec&, const Problem&) {}
  template <class Exec, class Problem>
  static void reserve_for_shorter_rows(const Exec& exec, const Problem& problem) {
    if (problem.axis_is_strided) run(exec, no_rows_of(problem, columns_of_tile<Problem>));
  }

  /// Columns of a thread; of the shortest rows. (One H100, fraction of a copy with 16 and 32: float 16
  /// columns 0.948 and 0.934, 64 0.91 both, 256 0.900 and 0.891, bfloat16 16 0.93 and 0.88, 100 0.83 and
  /// 0.77, 200 0.78 and 0.71, 256 0.87 and 0.88.)
  static constexpr int usual_columns = 16, fewest_columns = 8;

 private:
  static constexpr int fewest_lanes = 32, usual_threads = 256, most_threads = 512;
  /// Blocks below which they have no more lanes than they need.
  static constexpr index_type many_blocks = 1024;

  template <int columns_of_thread>
  static int slots_of(index_type columns) {
    return static_cast<int>(
        std::min<index_type>(ceil_div(columns, columns_of_thread), most_threads / fewest_lanes));
  }
  static int lanes_of(int slots, index_type all_lanes) {
    int lanes = 2 * fewest_lanes * slots <= most_threads ? 2 * fewest_lanes : fewest_lanes;
    while (2 * lanes * slots <= usual_threads && all_lanes >= 2 * lanes * many_blocks) lanes *= 2;
    while (lanes > 1 && lanes / 2 >= all_lanes) lanes /= 2;
    return lanes;
  }

  template <int rows_of_lane, class Problem>
  static void launch(const Kokkos::Cuda& exec, const Problem& problem) {
    const index_type columns = problem.geometry.columns;
    const bool no_rows = problem.geometry.rows == 0;
    // (With a transform one kernel serves: it would be compiled once more for each.)
    constexpr bool has_few = !has_transform_v<Problem>;
    // (Of others than doubles many rows are for block_per_wide_tile.)
    if constexpr (sizeof(typename Problem::Acc) == 8) {
      if (with_few_columns(problem, [&]<int few>() { launch_by<few, rows_of_lane>(exec, problem); })) return;
    }
    if constexpr (has_few) {
      if (columns <= fewest_columns || no_rows) launch_by<fewest_columns, rows_of_lane>(exec, problem);
    }
    if (!has_few || columns > fewest_columns || no_rows)
      launch_by<usual_columns, rows_of_lane>(exec, problem);
  }

  template <int columns, int rows_of_lane, class Problem>
  static void launch_by(const Kokkos::Cuda& exec, const Problem& problem) {
    const int slots = slots_of<columns>(problem.geometry.columns);
    const int lanes = lanes_of(slots, ceil_div(problem.geometry.rows, rows_of_lane));
    const int rows = lanes * rows_of_lane;
    int shared_bytes = 0;
    if (slots > 1) {
      shared_bytes = SharedTile<rows_of_lane, Problem>::bytes(lanes, slots) +
                     rows * static_cast<int>(sizeof(ResultOfWholeRow<Problem>));
    }
    launch_with_shared<&block_per_tile_kernel<columns, rows_of_lane, Problem>>(
        exec, kernel_label(problem.operation, name), ceil_div(problem.geometry.rows, rows),
        dim3(static_cast<unsigned>(lanes), static_cast<unsigned>(slots)), shared_bytes, problem);
  }
};

}  // namespace KokkosSoftmax::impl

#endif
