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
  {
    typename Mine::Raw raw[columns_of_thread];
    Mine::load(problem, place, raw);
    mine.take(raw);
  }
  mine.transform(problem, place);
  const bool softmax = problem.operation == Operation::softmax;
  Acc max[rows_of_lane];
  Result result[rows_of_lane];
  if (slots == 1) {
    Mine::maxima(mine.top(), max);
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

/// The same for 16 bits and a transform: two rows of a lane, in pairs where they lie so, one after the other,
/// because what a transform makes of them needs registers. Each thread subtracts the maximum of its own
/// columns.
template <int columns, class Problem>
__global__ void __launch_bounds__(512, 2)
    block_per_transformed_tile_kernel(const __grid_constant__ Problem problem, bool pairs) {
  using Mine = PartOfTile<columns, 1, Problem>;
  using Place = typename Mine::Place;
  using Result = typename Mine::Result;
  using Acc = typename Problem::Acc;
  using Raw = typename Mine::Raw;
  using In = typename Problem::In;
  using Out = typename Problem::Out;
  static_assert(sizeof(Raw) == 2);
  constexpr int rows_of_lane = 2;
  // What is put into y takes the place of what x had, if it is as large.
  constexpr bool puts_pairs = sizeof(Out) == 2;
  constexpr bool keeps_exponentials = Result::keeps_packed_exponentials;
  extern __shared__ uint4 shared_of_tile[];
  grid_dependency_wait();
  if (problem.geometry.rows == 0) return;
  const int lane = static_cast<int>(threadIdx.x), lanes = static_cast<int>(blockDim.x),
            slot = static_cast<int>(threadIdx.y), slots = static_cast<int>(blockDim.y),
            rows = lanes * rows_of_lane, thread = slot * lanes + lane, threads = slots * lanes;
  auto* const sums = reinterpret_cast<ShareSum<Acc>*>(shared_of_tile);
  auto* const maxima = reinterpret_cast<Acc*>(sums + slots * rows);
  auto* const results = reinterpret_cast<Result*>(maxima + slots * rows);
  const index_type first_row = static_cast<index_type>(blockIdx.x) * rows,
                   first_column = static_cast<index_type>(slot) * columns;
  const auto row = [&](int v) { return puts_pairs ? lane * rows_of_lane + v : v * lanes + lane; };
  const auto place = [&](int v) { return Place(problem.geometry, first_row + row(v), first_column); };

  // A row's bits in each half; -inf, where there is no column.
  unsigned word[columns];
  if (puts_pairs && pairs) {
#pragma unroll
    for (int k = 0; k < columns; ++k) word[k] = PackedPair<In>::minus_infinities;
    const char* from = reinterpret_cast<const char*>(Mine::first_of_x(problem, place(0)));
    for_columns<columns>(place(0).count, [&](int k) {
      word[k] = *reinterpret_cast<const unsigned*>(from);
      from += Mine::x_distance(problem);
    });
  } else {
    Raw low[columns], high[columns];
    Mine::load(problem, place(0), low);
    Mine::load(problem, place(1), high);
#pragma unroll
    for (int k = 0; k < columns; ++k) word[k] = __byte_perm(low[k], high[k], 0x5410);
  }
  const auto half = [&](int k, int v) { return word[k] >> 16 * v; };
  const auto put_half = [&](int k, int v, unsigned bits) {
    word[k] = __byte_perm(word[k], bits, v == 0 ? 0x3254 : 0x5410);
  };
  const auto make = [&](int v, const Place& at, Mine& mine) {
    const unsigned selectors = v == 0 ? 0x1044 : 0x3244;
#pragma unroll
    for (int k = 0; k < columns; ++k) {
      if constexpr (PackedPair<In>::is_bfloat16 && std::is_same_v<Acc, float>) {
        mine.held[k] = bits_as<float>(__byte_perm(word[k], 0, selectors));
      } else {
        mine.held[k] = load_as<Acc>(bits_as<In>(static_cast<Raw>(half(k, v))));
      }
    }
    mine.transform(problem, at);
  };

  const bool softmax = problem.operation == Operation::softmax;
#pragma unroll 1
  for (int v = 0; v < rows_of_lane; ++v) {
    Mine mine;
    make(v, place(v), mine);
    Acc max[1];
    Mine::maxima(mine.top(), max);
    maxima[slot * rows + row(v)] = max[0];
    sums[slot * rows + row(v)] = mine.sum(max[0], 0, softmax);
    if constexpr (keeps_exponentials) {
      if (softmax) {
#pragma unroll
        for (int k = 0; k < columns; ++k)
          word[k] =
              __byte_perm(word[k], PackedExponentials::in_high_half(mine.held[k]), v == 0 ? 0x3276 : 0x7610);
      }
    }
  }
  __syncthreads();
  for (int r = thread; r < rows; r += threads) {
    auto all = PartialSoftmax<Acc>::none();
#pragma unroll 4
    for (int t = 0; t < slots; ++t) all.max = Kokkos::fmax(all.max, finite_maximum(maxima[t * rows + r]));
#pragma unroll 4
    for (int t = 0; t < slots; ++t) {
      auto share = Mine::Part::share(maxima[t * rows + r], sums[t * rows + r]);
      share.sum.scale(exp_of_difference(share.max - all.max));
      all.sum.join(share.sum);
    }
    results[r] = Result(problem.operation, all);
  }
  __syncthreads();
#pragma unroll 1
  for (int v = 0; v < rows_of_lane; ++v) {
    const Result result[1] = {results[row(v)]};
    const Place at = place(v);
    if (problem.operation == Operation::logsumexp) {
      if (slot == 0) write_logsumexp(problem, at, result);
      continue;
    }
    Mine mine;
    if (keeps_exponentials && softmax) {
#pragma unroll
      for (int k = 0; k < columns; ++k) mine.held[k] = PackedExponentials::low(half(k, v));
    } else {
      make(v, at, mine);
    }
    const Acc max[1] = {maxima[slot * rows + row(v)]};
    if constexpr (puts_pairs) {
      mine.for_outputs(problem.operation, max, result, columns,
                       [&](int k, int, const Out& output) { put_half(k, v, bits_as<Raw>(output)); });
      if (v == 0 && pairs) continue;
      const Place from = place(pairs ? 0 : v);
      const RowGeometry& g = problem.geometry;
      char* to = reinterpret_cast<char*>(problem.y + from.row(g).y_offset + first_column * g.y_column_stride);
      const index_type distance = g.y_column_stride * static_cast<index_type>(sizeof(Out));
      for_columns<columns>(from.count, [&](int k) {
        if (pairs) {
          *reinterpret_cast<unsigned*>(to) = word[k];
        } else {
          *reinterpret_cast<Raw*>(to) = static_cast<Raw>(half(k, v));
        }
        to += distance;
      });
    } else {
      mine.write(problem, at, max, result);
    }
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
    const bool no_rows = problem.geometry.rows == 0, pairs = rows_come_in_pairs(problem);
    if constexpr (transforms_pairs<Problem>) {
      launch_by<usual_columns, 2>(exec, problem);
    } else {
      if constexpr (takes_pairs<Problem>) {
        if (pairs || no_rows) launch<2>(exec, problem);
      }
      if (!pairs || no_rows) launch<1>(exec, problem);
    }
  }

  template <class Exec, class Problem>
  static void reserve(const Exec&, const Problem&) {}

  /// Columns of a thread; of the shortest rows. (One H100, fraction of a copy with 16 and 32: float 16
  /// columns 0.948 and 0.934, 64 0.91 both, 256 0.900 and 0.891, bfloat16 16 0.93 and 0.88, 100 0.83 and
  /// 0.77, 200 0.78 and 0.71, 256 0.87 and 0.88.)
  static constexpr int usual_columns = 16, fewest_columns = 8;

  /// Of a block, where there are many rows of so many columns.
  static int threads(index_type columns) {
    const int slots = slots_of<usual_columns>(columns);
    return slots * lanes_of(slots, most_threads * many_blocks);
  }

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
    const int rows_of_tile = lanes * rows_of_lane;
    constexpr bool transforms = transforms_pairs<Problem>;
    using Acc = typename Problem::Acc;
    std::size_t shared_bytes = 0;
    if constexpr (transforms) {
      shared_bytes = static_cast<std::size_t>(slots * rows_of_tile) * (sizeof(ShareSum<Acc>) + sizeof(Acc));
    } else if (slots > 1) {
      shared_bytes = static_cast<std::size_t>(SharedTile<rows_of_lane, Problem>::bytes(lanes, slots));
    }
    if (shared_bytes > 0)
      shared_bytes += static_cast<std::size_t>(rows_of_tile) * sizeof(ResultOfWholeRow<Problem>);
    const auto launch_with = [&](auto kernel, const auto&... arguments) {
      static const bool early = has_grid_dependency_wait(kernel);
      launch_labelled(exec, kernel_label(problem.operation, name), [&] {
        launch_kernel(
            exec, kernel, early,
            static_cast<unsigned>(std::max<index_type>(1, ceil_div(problem.geometry.rows, rows_of_tile))),
            dim3(static_cast<unsigned>(lanes), static_cast<unsigned>(slots)), shared_bytes, arguments...);
      });
    };
    if constexpr (transforms) {
      launch_with(&block_per_transformed_tile_kernel<columns, Problem>, problem, rows_come_in_pairs(problem));
    } else {
      launch_with(&block_per_tile_kernel<columns, rows_of_lane, Problem>, problem);
    }
  }
};

}  // namespace KokkosSoftmax::impl

#endif
