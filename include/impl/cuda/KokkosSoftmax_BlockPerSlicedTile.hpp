// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The CUDA kernel for rows of two to four slices whose columns are not contiguous, wherever they lie: a
/// block has a tile of them (see KokkosSoftmax_RowTiles.hpp), each slice in the registers of eight of its
/// warps. x is read once, and no block waits for another. The slices are those of grid_pipelined_tiles, and
/// so are the bits.

#ifndef KOKKOSSOFTMAX_BLOCKPERSLICEDTILE_HPP
#define KOKKOSSOFTMAX_BLOCKPERSLICEDTILE_HPP

#include <impl/cuda/KokkosSoftmax_PackedMask.hpp>
#include <impl/cuda/KokkosSoftmax_TwoPassTiles.hpp>

#include <algorithm>
#include <string_view>

namespace KokkosSoftmax::impl {

/// A thread: lane threadIdx.x across rows, slot threadIdx.y along the columns of slice threadIdx.z.
/// (Of pairs of 16 bits it would have more in registers than there are.)
template <class Problem>
__global__ void __launch_bounds__(1024, 1)
    block_per_sliced_tile_kernel(const __grid_constant__ Problem problem) {
  using Readers = TileBlock<Problem>;
  using Mine = PartOfTile<Readers::columns_of_thread, 1, Problem>;
  using Result = typename Mine::Result;
  using Acc = typename Problem::Acc;
  constexpr int rows = Readers::lanes, most_slices = 1024 / Readers::threads;
  __shared__ PartialSoftmax<Acc> partials[most_slices][rows];
  __shared__ Result results[rows];
  grid_dependency_wait();
  if (problem.geometry.rows == 0) return;
  const int lane = static_cast<int>(threadIdx.x), slot = static_cast<int>(threadIdx.y),
            slice = static_cast<int>(threadIdx.z), slices = static_cast<int>(blockDim.z),
            thread = slot * Readers::lanes + lane;
  const typename Mine::Place place(
      problem.geometry, static_cast<index_type>(blockIdx.x) * rows + lane,
      static_cast<index_type>(slice) * columns_of_tile<Problem> + slot * Readers::columns_of_thread);
  Mine mine;
  mine.load_operands(problem, place);
  mine.read(problem, place);
  const bool softmax = problem.operation == Operation::softmax;
  Acc max[1];
  reduce_slice_of_tile<most_slices>(
      mine, problem, place, slice, lane, slot, softmax, max,
      [&](int row, const PartialSoftmax<Acc>& partial) { partials[slice][row] = partial.told(); });
  __syncthreads();
  if (slice == 0 && thread < rows) {
    auto have = PartialSoftmax<Acc>::none();
    static_assert(most_slices <= slices_joined_at_once);
    join_slices<slices_joined_at_once, 1>(have, [&](unsigned i) {
      return static_cast<int>(i) < slices ? partials[i][thread] : PartialSoftmax<Acc>::none();
    });
    results[thread] = Result(problem.operation, have.told());
  }
  __syncthreads();
  const Result result[1] = {results[lane]};
  if (problem.operation == Operation::logsumexp) {
    if (slice == 0 && slot == 0) write_logsumexp(problem, place, result);
    return;
  }
  if constexpr (makes_logits<Problem> && Result::keeps_packed_exponentials) {
    // (As other kernels leave them in the place of x.)
    if (softmax) {
#pragma unroll
      for (auto& exponential : mine.held) exponential = Result::kept(exponential);
    }
  }
  mine.write(problem, place, max, result);
}

struct BlockPerSlicedTile {
  static constexpr const char* name = "block_per_sliced_tile";

  template <class Exec, class Problem>
  static constexpr bool supports = sliced_rows_support<Exec, Problem>;

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec& exec, const Problem& problem) {
    const std::string_view by_slices = TwoPassTiles::refuse(exec, problem);
    if (!by_slices.empty()) return by_slices;
    if (slices_of_tiles(problem) > most_slices<Problem>) return "a row has too many slices for a block";
    return {};
  }

  /// (One H100, fraction of a copy.)
  template <class Exec, class Problem>
  static std::string_view advise_against(const Exec& exec, const Problem& problem) {
    // (Bfloat16 to float, two_pass_tiles and this kernel: 300 columns 0.49 and 0.31, 1000 0.60 and 0.28.)
    if constexpr (sizeof(typename Problem::In) != sizeof(typename Problem::Out))
      return "two_pass_tiles writes outputs that are larger than logits faster";
    // (Likewise, of reading at a copy's speed: double 300 columns 0.56 and 0.46, float 600 0.79 and 0.57, but
    // double 150 0.38 and 0.46, float 300 0.65 and 0.76.)
    if (problem.operation == Operation::logsumexp && slices_of_tiles(problem) > few_slices)
      return "two_pass_tiles reads x once for sums";
    if constexpr (GridPipelinedTiles::supports<Exec, Problem>) {
      if (GridPipelinedTiles::refuse(exec, problem).empty()) return advice_where_rows_can_wait(exec, problem);
    }
    return {};
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    launch_with_shared<&block_per_sliced_tile_kernel<Problem>>(
        exec, kernel_label(problem.operation, name),
        ceil_div(problem.geometry.rows, TileBlock<Problem>::lanes), threads(problem), 0, problem);
  }

  /// Others that lie elsewhere may be for two_pass_tiles or grid_pipelined_tiles.
  template <class Exec, class Problem>
  static void reserve(const Exec& exec, const Problem& problem) {
    TwoPassTiles::reserve(exec, problem);
  }
  /// And this kernel, for some of those that are for these.
  template <class Exec, class Problem>
  static void reserve_for_shorter_rows(const Exec& exec, const Problem& problem) {
    if (!TwoPassTiles::refuse(exec, problem).empty()) return;
    run(exec, no_rows_of(problem, columns_of_tile<Problem>));
  }

 private:
  static constexpr index_type few_slices = 2;
  template <class Problem>
  static constexpr index_type most_slices = 1024 / TileBlock<Problem>::threads;

  template <class Problem>
  static dim3 threads(const Problem& problem) {
    return {TileBlock<Problem>::lanes, TileBlock<Problem>::slots,
            static_cast<unsigned>(slices_of_tiles(problem))};
  }

  /// Whether a mask with a value for each logit is the only operand of that kind.
  template <class Transform>
  static bool only_reads_masks(const Transform& transform) {
    using Parts = PartsOfChain<Transform>;
    return Parts::masks == 1 && Parts::others == 0 && has_operands_of_single_rows(transform);
  }

  /// Of rows that grid_pipelined_tiles could have. (That kernel, or cluster_per_tile, and this one.)
  template <class Exec, class Problem>
  static std::string_view advice_where_rows_can_wait(const Exec& exec, const Problem& problem) {
    constexpr bool is_16_bit = sizeof(typename Problem::In) == 2,
                   keeps_exponentials = ResultOfTileRow<Problem>::keeps_exponentials;
    constexpr const char *boxes_are_faster = "boxes of columns are copied faster",
                         *several_are_faster = "slices that several blocks have are faster";
    const bool few = slices_of_tiles(problem) <= few_slices,
               by_boxes = BoxesOfTiles::come_as_boxes(problem, 16);
    if (GridPipelinedTiles::come_as_boxes_anywhere(problem)) return boxes_are_faster;
    if constexpr (sizeof(typename Problem::In) == 8) {
      // (One H200, double, grid_pipelined_tiles and this kernel: 300 columns 0.71 and 0.53, 512 0.76 and
      // 0.65, 200 0.74 and 0.715, 224 0.775 and 0.76, but 240 0.765 and 0.775, 256 0.775 and 0.805; that
      // begin anywhere 300 0.58 and 0.505, 512 0.66 and 0.59, but 256 0.695 and 0.71; with a factor 300 0.60
      // and 0.50, a bias as large as x 0.60 and 0.56, but GELU 0.32 and 0.33, a factor 144 0.46 and 0.49, 180
      // 0.56 twice, a bias as large as x 180 0.36 and 0.41, GELU 0.29 and 0.39.)
      constexpr index_type few_columns = 232;
      const bool by_whole_sectors =
          problem.geometry.rank <= 1 && BoxesOfTiles::come_as_boxes(problem, 32) &&
          (!few || (!has_transform_v<Problem> && problem.operation != Operation::logsumexp &&
                    problem.geometry.columns < few_columns));
      return by_whole_sectors ? boxes_are_faster : "";
    }
    // (Float 257 columns 0.74 and 0.85, 512 0.85 and 0.86, 600 0.85 and 0.69, 1000 0.86 both; images of 7 x 7
    // 300 0.54 and 0.62, 1000 0.55 both, of 14 x 14 0.72 and 0.90, 0.82 and 0.70. But 300 columns with a mask
    // as large as x 0.71 and 0.59, and a temperature 0.64 and 0.52, with a factor and a bias 0.60 and 0.63.)
    // (One H200, float in wide boxes and by this kernel: 512 columns 0.875 and 0.83; on boundaries of 16
    // bytes that are none of sectors 300 0.68 and 0.70, 400 0.72 and 0.60, 512 0.71 and 0.58.)
    if constexpr (!is_16_bit) {
      constexpr index_type few_columns = 320;
      if (problem.geometry.columns > few_columns && GridPipelinedTiles::come_as_wide_boxes(exec, problem))
        return boxes_are_faster;
      if (by_boxes && only_reads_masks(problem.transform)) return boxes_are_faster;
      return few ? "" : several_are_faster;
    }
    // (Of reading at a copy's speed bfloat16 300 columns 0.58 and 0.45.)
    if (problem.operation == Operation::logsumexp) return several_are_faster;
    // (GELU, bfloat16 300 columns 0.44 both, 1000 0.70 and 0.47, half 0.31 and 0.49, 0.52 and 0.51; that
    // begin anywhere bfloat16 0.28 and 0.42, 0.36 and 0.42.)
    if constexpr (makes_logits<Problem>)
      return by_boxes && (keeps_exponentials || !few) ? boxes_are_faster : "";
    // (Bfloat16 300 columns 0.73 and 0.50, that begin anywhere 0.45 and 0.57, 1000 0.57 and 0.46; images of
    // 13 x 13 300 0.35 and 0.56, 1000 0.47 and 0.54.)
    if (by_boxes) return boxes_are_faster;
    // (Bfloat16 that begins anywhere, two_pass_tiles and this kernel, one H200: a factor 400 columns 0.40 and
    // 0.49, 512 0.505 and 0.40, a temperature 0.34 and 0.435, 0.44 and 0.37, a mask 0.33 and 0.34, 0.43 and
    // 0.40.)
    constexpr index_type few_columns = 448;
    if (has_transform_v<Problem> && problem.geometry.rank <= 1 && problem.geometry.columns > few_columns)
      return several_are_faster;
    return few || problem.geometry.rank > 1 ? "" : several_are_faster;
  }
};

}  // namespace KokkosSoftmax::impl

#endif
