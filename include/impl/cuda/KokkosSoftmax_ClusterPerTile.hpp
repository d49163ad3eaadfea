// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The CUDA kernel for many rows of 257 to 4096 columns that lie side by side (compute capability 9.0): tiles
/// (see KokkosSoftmax_RowTiles.hpp) in the slices of grid_pipelined_tiles, each in the registers of a block
/// as block_per_wide_tile has them, the blocks of a tile in a cluster. Each writes what it knows of the rows
/// to the shared memory of all. The bits are those of grid_pipelined_tiles, whose boxes are faster where
/// columns lie on their boundaries; here lanes write whole sectors of memory wherever columns begin.
///
/// (One H200, softmax, fraction of a copy, grid_pipelined_tiles and this kernel, columns that begin anywhere:
/// float 300 0.42 and 0.48, 512 0.45 and 0.65, 1000 0.46 and 0.61, 2048 0.45 and 0.59, 3000 0.46 and 0.48,
/// 4096 0.43 and 0.49; bfloat16 0.26 and 0.33, 0.33 and 0.47, 0.33 and 0.43, 0.32 and 0.43, 0.31 and 0.33,
/// 0.30 and 0.36. On the boundaries of boxes 1000 columns 0.80 and 0.72, 0.71 and 0.58. With partial results
/// that others read where they are, in place of writing them to all, 512 columns 0.55, 1000 0.53. Since, many
/// columns that begin anywhere, without operands and not in place, are boxes there: 1000 of float 0.73, of
/// bfloat16 0.58.)

#ifndef KOKKOSSOFTMAX_CLUSTERPERTILE_HPP
#define KOKKOSSOFTMAX_CLUSTERPERTILE_HPP

#include <impl/cuda/KokkosSoftmax_BlockPerWideTile.hpp>
#include <impl/cuda/KokkosSoftmax_GridPipelinedTiles.hpp>

#include <algorithm>
#include <string_view>

namespace KokkosSoftmax::impl {

/// What the threads of a block tell each other of the rows of a tile, and blocks of their slices of these:
/// each block has the partial results of all slices, [slice][row]. Tallies are [share][row]: what a transform
/// makes of logits is summed by shares, as grid_pipelined_tiles does it.
template <class Problem>
struct SharedClusterTile : TalliesOfRows {
  using Result = ResultOfTileRow<Problem>;
  static constexpr int shares = makes_logits<Problem> ? ReductionPlan::shares : 1;
  PartialSoftmax<float>* partials;
  Result* results;

  static constexpr int bytes(int rows, int slices) {
    return rows * static_cast<int>(slices * sizeof(PartialSoftmax<float>) + sizeof(Result)) +
           TalliesOfRows::bytes(rows * shares);
  }
  __device__ SharedClusterTile(void* memory, int rows, int slices)
      : TalliesOfRows(static_cast<PartialSoftmax<float>*>(memory) + rows * slices + rows, rows * shares),
        partials(static_cast<PartialSoftmax<float>*>(memory)),
        results(reinterpret_cast<Result*>(partials + rows * slices)) {
    static_assert(sizeof(Result) == sizeof(PartialSoftmax<float>));
  }
};

template <int together, class Problem>
__global__ void __launch_bounds__(512, 2) cluster_per_tile_kernel(const __grid_constant__ Problem problem,
                                                                  const __grid_constant__ WideTileRows lie) {
  using Tile = WideTile<Problem>;
  using Part = typename Tile::Part;
  using Shared = SharedClusterTile<Problem>;
  using Result = typename Shared::Result;
  constexpr int parts = Tile::parts, rows_of_part = Tile::rows_of_part;
  extern __shared__ uint4 shared_of_cluster_tile[];
  grid_dependency_wait();
  if (problem.geometry.rows == 0) return;
  cluster_arrive();  // this block is there
  const int slices = static_cast<int>(cluster_nctarank()), slice = static_cast<int>(cluster_ctarank());
  RowsOfThread<together, false, Problem> mine(problem, lie, blockIdx.x / slices,
                                              static_cast<index_type>(slice) * columns_of_tile<Problem>);
  mine.template load<false>();
  mine.transform();

  const int lane = mine.lane, lanes = static_cast<int>(blockDim.x), rows = lanes * Tile::rows_of_thread,
            thread = static_cast<int>(threadIdx.y) * lanes + lane,
            threads = lanes * static_cast<int>(blockDim.y);
  const Operation operation = problem.operation;
  const bool softmax = operation == Operation::softmax;
  static_assert(Tile::keeps_outputs);
  const Shared shared(shared_of_cluster_tile, rows, slices);
  // Of a part's row, and of this thread's share of it.
  const auto in_shared = [&](int p, int v) { return (p * rows_of_part + v) * lanes + lane; };
  const int share = static_cast<int>(threadIdx.y) * Shared::shares / static_cast<int>(blockDim.y);
  const auto in_share = [&](int p, int v) { return share * rows + in_shared(p, v); };
  for (int i = thread; i < rows * Shared::shares; i += threads) shared.clear(i);
  __syncthreads();
  mine.add_to(shared, in_share, softmax);
  // A row by several threads: of each share one, and to each block.
  constexpr bool has_shares = Shared::shares > 1;
  const int threads_of_row = threads / rows, row = has_shares ? thread / Shared::shares : thread % rows,
            of_row = has_shares ? thread % Shared::shares : thread / rows;
  const int of_share = (has_shares ? of_row * rows : 0) + row;
  PartialSoftmax<float> partial = Part::Part::share(shared.top(of_share), shared.sum(of_share));
  if constexpr (has_shares) partial = join_lanes<Shared::shares>(partial);
  cluster_wait();  // the others are there, too
  for (int to = of_row; to < slices; to += threads_of_row) {
    st_shared_cluster_b128(reinterpret_cast<Word16*>(&shared.partials[slice * rows + row]),
                           static_cast<unsigned>(to), bits_as<Word16>(partial));
  }
  cluster_arrive();
  cluster_wait();
  if (thread < rows) {
    auto have = PartialSoftmax<float>::none();
    for (int first = 0; first < slices; first += static_cast<int>(slices_joined_at_once)) {
      join_slices<slices_joined_at_once, 1>(have, [&](unsigned i) {
        const int of = first + static_cast<int>(i);
        return of < slices ? shared.partials[of * rows + thread] : PartialSoftmax<float>::none();
      });
    }
    shared.results[thread] = Result(operation, have);
  }
  __syncthreads();

  typename Tile::Sums sums;
#pragma unroll
  for (int p = 0; p < parts; ++p) {
    float max[rows_of_part];
    Result result[rows_of_part];
#pragma unroll
    for (int v = 0; v < rows_of_part; ++v) {
      result[v] = shared.results[in_shared(p, v)];
      max[v] = shared.top(in_share(p, v));
    }
    mine.finish(operation, p, max, result, sums);
  }
  mine.store(operation, sums, slice == 0 && threadIdx.y == 0);
}

struct ClusterPerTile {
  static constexpr const char* name = "cluster_per_tile";

  /// (Sums of double have an order. Where outputs do not take the place of logits, or a transform takes rows
  /// of 16 bits one by one, grid_pipelined_tiles is faster: bfloat16 to float 0.38 and 0.22, bfloat16 with a
  /// factor 0.30 and 0.27, with a temperature 0.28 and 0.22, of 1000 columns.)
  template <class Exec, class Problem>
  static constexpr bool supports = [] {
    if constexpr (sliced_rows_support<Exec, Problem>) {
      return std::is_same_v<typename Problem::Acc, float> &&
             sizeof(typename Problem::In) == sizeof(typename Problem::Out) &&
             !(has_transform_v<Problem> && sizeof(typename Problem::In) == 2) &&
             !is_known_at_run_time<typename Problem::Transform>;
    } else {
      return false;
    }
  }();

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec& exec, const Problem& problem) {
    const std::string_view by_slices = GridPipelinedTiles::refuse(exec, problem);
    if (!by_slices.empty()) return by_slices;
    const index_type slices = slices_of_tiles(problem);
    if (slices > most_slices) return "a row has too many slices for a cluster";
    if (!fits<Problem>(exec, static_cast<int>(slices))) return "the device has no room for such a cluster";
    return refuse_wide_tile(problem);
  }

  template <class Exec, class Problem>
  static std::string_view advise_against(const Exec& exec, const Problem& problem) {
    const RowGeometry& g = problem.geometry;
    constexpr bool is_16_bit = sizeof(typename Problem::In) == 2;
    // (One H100, of reading at a copy's speed, columns that begin anywhere: float 257 columns 0.47 and 0.52,
    // 512 0.80 and 0.77, 4096 0.56 and 0.85, bfloat16 0.31 and 0.39, 0.55 and 0.67, 0.42 and 0.80.)
    if (problem.operation == Operation::logsumexp) return "two_pass_tiles reads x once for sums";
    const index_type slices = slices_of_tiles(problem);
    // (Likewise, this kernel and block_per_sliced_tile: images of 14 x 14 float, 300 columns 0.72 and 0.90,
    // with GELU 0.58 and 0.80; bfloat16 257 columns that begin anywhere 0.39 and 0.51, 300 0.45 and 0.57, 400
    // 0.53 and 0.52. One H200, that begin anywhere: float 257 columns 0.42 and 0.61, 300 0.48 and 0.52, 330
    // 0.52 both, 360 0.55 and 0.51, with a factor 300 0.42 and 0.505, 360 0.48 both, a temperature 0.36 and
    // 0.52, 0.42 and 0.47, a mask as large as x 0.39 and 0.51, 0.45 and 0.52, a bias for all rows 0.37 and
    // 0.51, 0.43 and 0.465, GELU 0.38 and 0.54, 0.445 and 0.48.)
    constexpr index_type few_columns = is_16_bit || has_transform_v<Problem> ? 384 : 320;
    if (slices == least_slices && (g.rank > 1 || g.columns <= few_columns))
      return "a block can have all slices of a row";
    if (GridPipelinedTiles::come_as_boxes_anywhere(problem))
      return "boxes of columns in turn are copied faster";
    // (One H200, this kernel and two_pass_tiles, columns that begin anywhere: bfloat16 512 0.515 and 0.505,
    // 600 0.40 and 0.425, 1000 0.465 and 0.515, 2000 0.45 and 0.52; on boundaries of pairs 0.57 and 0.50,
    // 0.45 and 0.46, 0.50 and 0.52, 0.50 and 0.53.)
    if (is_16_bit && g.rank <= 1 && slices > least_slices) return "two_pass_tiles has pairs of rows";
    // (One H200, microseconds in a stream, grid_pipelined_tiles and this kernel, columns that begin anywhere:
    // float 1000 x 1025 8.9 and 8.7, 4096 x 65 8.8 and 11.2, 1000 x 8385 42 and 36; bfloat16 8.7 and 12.3, 24
    // and 26, 300 x 27905 34 and 31.)
    constexpr index_type blocks_of_multiprocessor = is_16_bit ? 8 : 2;
    if (tiles_of<Problem>(g.rows) * slices <
        blocks_of_multiprocessor * exec.cuda_device_prop().multiProcessorCount)
      return "there are too few rows for several in each thread";
    // (One H200, fraction of a copy of floats that lie on boundaries of 16 bytes, but not on those of
    // sectors, this kernel and wide boxes: 400 columns 0.685 and 0.72, 512 0.73 and 0.71, 600 0.65 and 0.715,
    // 1000 0.69 and 0.715, 2000 0.655 and 0.715; with a factor 512 0.68 and 0.72.)
    constexpr index_type nearly_two_slices = 448;
    const bool fills_two = slices == least_slices && g.columns >= nearly_two_slices;
    if ((has_transform_v<Problem> || !fills_two) && GridPipelinedTiles::come_as_wide_boxes(exec, problem))
      return "wide boxes of columns are copied faster";
    // (Fraction of a copy, likewise by boxes: float 1000 columns 0.55 and 0.68, 4000 0.60 and 0.55, bfloat16
    // 1000 0.57 and 0.56.)
    constexpr index_type few_slices = 8;
    const bool few = slices <= few_slices;
    // (Of several dimensions, where rows side by side are too few for boxes, threads copy there: one H100, 14
    // x 14 images of float, 300 columns 0.58 and 0.73, 1000 0.68 and 0.83, 4000 0.66 and 0.69, of 1000 with a
    // factor 0.78 and 0.91, GELU 0.63 and 0.74, a bias as large as x 0.66 and 0.72, one for all rows 0.63 and
    // 0.68, a mask 0.62 and 0.65, 4000 with a factor 0.77 and 0.72; 20 x 20 of bfloat16 0.60 and 0.68, 0.79
    // and 0.91, 0.71 and 0.72; but 28 x 28, which fill boxes, 1000 columns 0.93 and 0.88, 1.04 and 0.90.)
    if (BoxesOfTiles::come_as_boxes(problem, is_16_bit || has_transform_v<Problem> || !few ? 16 : 32))
      return "boxes of columns are copied faster";
    // (By grid_pipelined_tiles and this kernel float with a factor, a bias as large as x, one for all rows, a
    // mask, a temperature and GELU, 1000 columns 0.44 and 0.55, 0.48 and 0.56, 0.43 and 0.49, 0.44 and 0.50,
    // 0.44 and 0.48, 0.43 and 0.52. One H100, this kernel and two_pass_tiles: float with a factor 2000
    // columns 0.65 and 0.55, 4096 0.57 both, GELU 0.61 and 0.56, 0.55 and 0.58; bfloat16 2000 0.55 both, 4096
    // 0.50 and 0.58, on boundaries of pairs 0.61 and 0.55, 0.53 and 0.58.)
    if (!few && (has_transform_v<Problem> || is_16_bit))
      return "large clusters leave multiprocessors to no one";
    return {};
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    // `reserve` launches over no rows: that loads the kernel, which a capture could not do.
    const auto slices = static_cast<int>(slices_of_tiles(problem));
    auto* const launched = kernel<Problem>;
    static const bool early = has_grid_dependency_wait(launched);
    // (Large clusters are allowed for the kernel that is asked for, see cooperative_limits.)
    largest_cluster(launched, exec.cuda_device(), threads, shared_bytes<Problem>(most_slices));
    launch_labelled(exec, kernel_label(problem.operation, name), [&] {
      launch_clusters(exec, launched, early, static_cast<unsigned>(slices),
                      blocks_of<Problem>(problem.geometry.rows, slices), threads,
                      shared_bytes<Problem>(slices), problem, wide_tile_rows(problem));
    });
  }

  /// Fewer rows, and others that lie elsewhere, are for grid_pipelined_tiles.
  template <class Exec, class Problem>
  static void reserve(const Exec& exec, const Problem& problem) {
    GridPipelinedTiles::reserve_for_others(exec, problem);
  }
  /// And this kernel for some of those that are for that one.
  template <class Exec, class Problem>
  static void reserve_for_shorter_rows(const Exec& exec, const Problem& problem) {
    if (!problem.axis_is_strided || slices_of_tiles(problem) < least_slices ||
        !fits<Problem>(exec, least_slices))
      return;
    run(exec, no_rows_of(problem, least_slices * columns_of_tile<Problem>));
  }

 private:
  static constexpr int lanes = 16, least_slices = 2, most_slices = 16;
  static inline const dim3 threads{lanes, 32};

  template <class Problem>
  static constexpr auto* kernel = &cluster_per_tile_kernel<lanes, Problem>;
  template <class Problem>
  static constexpr int rows_of_tile = lanes* WideTile<Problem>::rows_of_thread;

  template <class Problem>
  static index_type tiles_of(index_type rows) {
    return ceil_div(rows, index_type(rows_of_tile<Problem>));
  }
  template <class Problem>
  static unsigned blocks_of(index_type rows, int slices) {
    return static_cast<unsigned>(std::max<index_type>(1, tiles_of<Problem>(rows)) * slices);
  }
  template <class Problem>
  static std::size_t shared_bytes(int slices) {
    return static_cast<std::size_t>(SharedClusterTile<Problem>::bytes(rows_of_tile<Problem>, slices));
  }

  /// Whether the device can have a cluster of so many blocks.
  template <class Problem>
  static bool fits(const Kokkos::Cuda& exec, int slices) {
    return slices <=
           largest_cluster(kernel<Problem>, exec.cuda_device(), threads, shared_bytes<Problem>(most_slices));
  }
};

}  // namespace KokkosSoftmax::impl

#endif
