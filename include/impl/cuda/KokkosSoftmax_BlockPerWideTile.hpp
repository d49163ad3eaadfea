// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The CUDA kernel for many short rows that lie side by side: tiles (see KokkosSoftmax_RowTiles.hpp) of which
/// a thread has several rows, as many as 16 bytes hold, so that what a row or a column costs besides is paid
/// once for all of these. Sums are in fixed point: the bits are those of block_per_tile.
///
/// Where columns begin anywhere, lanes write whole sectors of memory, of what other lanes have. A sector that
/// two warps write a part of each is what makes such columns slow, wherever those begin that are read: 4096 x
/// 65537 floats, copied along the first axis by 32 lanes of a warp each, have 0.63 of a copy on one H200, and
/// 0.84 where these lanes write whole sectors. (Softmax of 64 x 4194305 floats 0.80 and 0.81, of 256 x
/// 1048577 0.58 and 0.65; of bfloat16 0.57 and 0.63, 0.38 and 0.59.)

#ifndef KOKKOSSOFTMAX_BLOCKPERWIDETILE_HPP
#define KOKKOSSOFTMAX_BLOCKPERWIDETILE_HPP

#include <impl/cuda/KokkosSoftmax_BlockPerTile.hpp>

#include <algorithm>
#include <string_view>

namespace KokkosSoftmax::impl {

template <class Problem>
struct WideTile {
  static constexpr int columns = 8;                                  ///< of a thread
  static constexpr int rows_of_part = takes_pairs<Problem> ? 2 : 1;  ///< what PartOfTile has
  static constexpr int parts = 4, rows_of_thread = parts * rows_of_part;
  using Part = PartOfTile<columns, rows_of_part, Problem>;
  using Result = ResultOfWholeRow<Problem>;
  /// Whether outputs of a column are as large as its logits, and take their place.
  static constexpr bool stores_vectors = sizeof(typename Problem::In) == sizeof(typename Problem::Out);
};

/// How a thread's rows lie.
struct WideTileRows {
  bool vectors;  ///< side by side, on boundaries of 16 bytes in x and y; else each part's beside other lanes'
  bool pairs;    ///< those of a part on boundaries of pairs
  bool vectors_of_sums;  ///< a logsumexp's, likewise
};

/// What the threads of a block tell each other of the rows of a tile, in whatever order they come.
template <class Problem>
struct SharedWideTile {
  using Tile = WideTile<Problem>;
  typename Tile::Result* results;
  int* tops;  ///< in_integer_order
  unsigned *high, *low;

  static constexpr int bytes(int rows) {
    return rows * static_cast<int>(sizeof(typename Tile::Result) + sizeof(int) + 2 * sizeof(unsigned));
  }
  __device__ SharedWideTile(void* memory, int rows)
      : results(static_cast<typename Tile::Result*>(memory)),
        tops(reinterpret_cast<int*>(results + rows)),
        high(reinterpret_cast<unsigned*>(tops + rows)),
        low(high + rows) {}
  __device__ void clear(int row) const {
    tops[row] = in_integer_order(-largest_v<float>);
    high[row] = low[row] = 0;
  }
};

/// A thread: lane threadIdx.x across rows, slot threadIdx.y along columns. `together`: lanes whose rows are
/// neighbours where they do not come in vectors.
template <int together, class Problem>
__global__ void __launch_bounds__(512, 2)
    block_per_wide_tile_kernel(const __grid_constant__ Problem problem,
                               const __grid_constant__ WideTileRows lie) {
  using Tile = WideTile<Problem>;
  using Part = typename Tile::Part;
  using Result = typename Tile::Result;
  using In = typename Problem::In;
  using Out = typename Problem::Out;
  constexpr int columns = Tile::columns, parts = Tile::parts, rows_of_part = Tile::rows_of_part;
  extern __shared__ uint4 shared_of_tile[];
  grid_dependency_wait();
  const RowGeometry& g = problem.geometry;
  if (g.rows == 0) return;
  const int lane = static_cast<int>(threadIdx.x), lanes = static_cast<int>(blockDim.x),
            slot = static_cast<int>(threadIdx.y), slots = static_cast<int>(blockDim.y),
            rows = lanes * Tile::rows_of_thread;
  const index_type first_row = static_cast<index_type>(blockIdx.x) * rows;
  // Within the tile: this thread's first row, and from part to part.
  const bool vectors = lie.vectors;
  const int row_of_thread =
      vectors ? lane * Tile::rows_of_thread
              : lane / together * (together * Tile::rows_of_thread) + lane % together * rows_of_part;
  const int step = vectors ? rows_of_part : together * rows_of_part;
  const auto left = static_cast<int>(min(g.rows - first_row, static_cast<index_type>(rows))) - row_of_thread;
  const index_type first_column = static_cast<index_type>(slot) * columns;
  const int count = static_cast<int>(max(min(g.columns - first_column, index_type(columns)), index_type(0)));

  Part part[parts];
  {
    typename Part::Raw raw[parts][columns];
#pragma unroll
    for (int p = 0; p < parts; ++p) {
#pragma unroll
      for (int k = 0; k < columns; ++k) raw[p][k] = Part::nothing();
    }
    const char* at = reinterpret_cast<const char*>(problem.x + first_row + row_of_thread +
                                                   first_column * g.x_column_stride);
    const index_type distance = g.x_column_stride * static_cast<index_type>(sizeof(In));
    if (vectors) {
      if (left > 0) {
        for_columns<columns>(count, [&](int k) {
          const uint4 four = load_streaming(reinterpret_cast<const uint4*>(at));
          raw[0][k] = bits_as<typename Part::Raw>(four.x);
          raw[1][k] = bits_as<typename Part::Raw>(four.y);
          raw[2][k] = bits_as<typename Part::Raw>(four.z);
          raw[3][k] = bits_as<typename Part::Raw>(four.w);
          at += distance;
        });
      }
    } else {
      // raw_of(at, left): what is there, of so many rows. (Which it is, is asked once: with a branch at each,
      // odd bfloat16 took twice as long on one H200.)
      using Raw = typename Part::Raw;
      const auto load = [&](const auto& raw_of) {
        for_columns<columns>(count, [&](int k) {
#pragma unroll
          for (int p = 0; p < parts; ++p) {
            const int row = p * together * rows_of_part;
            raw[p][k] = raw_of(reinterpret_cast<const In*>(at) + row, left - row);
          }
          at += distance;
        });
      };
      if (rows_of_part == 1 || lie.pairs) {
        load([](const In* at, int left) {
          return left > 0 ? *reinterpret_cast<const Raw*>(at) : Part::nothing();
        });
      } else if constexpr (rows_of_part == 2) {
        load([](const In* at, int left) {
          const auto* const bits = reinterpret_cast<const unsigned short*>(at);
          const unsigned low = left > 0 ? bits[0] : 0u, high = left > 1 ? bits[1] : 0u;
          return __byte_perm(low, high, 0x5410);
        });
      }
    }
#pragma unroll
    for (int p = 0; p < parts; ++p) part[p].take(raw[p]);
  }

  const SharedWideTile<Problem> shared(shared_of_tile, rows);
  const bool softmax = problem.operation == Operation::softmax;
  // Of a part's row.
  const auto in_shared = [&](int p, int v) { return (p * rows_of_part + v) * lanes + lane; };
  if (slots > 1) {
    for (int row = slot * lanes + lane; row < rows; row += slots * lanes) shared.clear(row);
    __syncthreads();
#pragma unroll
    for (int p = 0; p < parts; ++p) {
      float max[rows_of_part];
      Part::maxima(part[p].top(), max);
#pragma unroll
      for (int v = 0; v < rows_of_part; ++v)
        atomicMax(&shared.tops[in_shared(p, v)], in_integer_order(max[v]));
    }
    __syncthreads();
#pragma unroll
    for (int p = 0; p < parts; ++p) {
#pragma unroll
      for (int v = 0; v < rows_of_part; ++v) {
        const int row = in_shared(p, v);
        const ShareSum<float> sum = part[p].sum(from_integer_order(shared.tops[row]), v, softmax);
        atomicAdd(&shared.high[row], sum.sum.high);
        atomicAdd(&shared.low[row], sum.sum.low);
      }
    }
    __syncthreads();
    for (int row = slot * lanes + lane; row < rows; row += slots * lanes) {
      shared.results[row] = Result(problem.operation, from_integer_order(shared.tops[row]),
                                   ShareSum<float>{{shared.high[row], shared.low[row]}});
    }
    __syncthreads();
  }

  char* const y =
      reinterpret_cast<char*>(problem.y + first_row + row_of_thread + first_column * g.y_column_stride);
  const index_type distance = g.y_column_stride * static_cast<index_type>(sizeof(Out));
  struct alignas(16) Sums {
    Out of[Tile::rows_of_thread];
  } sums;
#pragma unroll
  for (int p = 0; p < parts; ++p) {
    float max[rows_of_part];
    Result result[rows_of_part];
    if (slots == 1) {
      Part::maxima(part[p].top(), max);
#pragma unroll
      for (int v = 0; v < rows_of_part; ++v)
        result[v] = Result(problem.operation, max[v], part[p].sum(max[v], v, softmax));
    } else {
#pragma unroll
      for (int v = 0; v < rows_of_part; ++v) {
        result[v] = shared.results[in_shared(p, v)];
        max[v] = from_integer_order(shared.tops[in_shared(p, v)]);
      }
    }
    const int row = p * step;
    if (problem.operation == Operation::logsumexp) {
#pragma unroll
      for (int v = 0; v < rows_of_part; ++v)
        sums.of[p * rows_of_part + v] = store_as<Out>(result[v].logsumexp());
    } else if (Tile::stores_vectors) {
      if constexpr (Tile::stores_vectors) {
        part[p].for_outputs(problem.operation, max, result, columns,
                            [&](int k, int, const typename Part::Put& output) {
                              part[p].held[k] = bits_as<typename Part::Held>(output);
                            });
      }
    } else {
      char* at = y;
      part[p].for_outputs(problem.operation, max, result, count,
                          [&](int k, int v, const typename Part::Put& output) {
                            if (k == 0) at = y;
                            if (row + v < left) reinterpret_cast<typename Part::Put*>(at)[row + v] = output;
                            at += distance;
                          });
    }
  }
  if (problem.operation == Operation::logsumexp) {
    if (slot != 0 || left <= 0) return;
    Out* const sum = problem.y + (first_row + row_of_thread) * g.y_stride[0];
    if (vectors && lie.vectors_of_sums) {
      *reinterpret_cast<Sums*>(sum) = sums;
      return;
    }
#pragma unroll
    for (int p = 0; p < parts; ++p) {
#pragma unroll
      for (int v = 0; v < rows_of_part; ++v) {
        if (p * step + v < left) sum[(p * step + v) * g.y_stride[0]] = sums.of[p * rows_of_part + v];
      }
    }
    return;
  }
  if constexpr (Tile::stores_vectors) {
    char* at = y;
    if (vectors) {
      if (left > 0) {
        for_columns<columns>(count, [&](int k) {
          const uint4 four =
              make_uint4(bits_as<unsigned>(part[0].held[k]), bits_as<unsigned>(part[1].held[k]),
                         bits_as<unsigned>(part[2].held[k]), bits_as<unsigned>(part[3].held[k]));
          store_streaming(reinterpret_cast<uint4*>(at), four);
          at += distance;
        });
      }
    } else {
      // Lanes store what others have, so that they write whole sectors of memory, but for the first and the
      // last rows that they have together.
      constexpr unsigned sector = 32, size = sizeof(Out);
      const int in_group = lane % together;
      const unsigned mask = together == 32
                                ? 0xffffffffu
                                : ((1u << together) - 1) << (slot * lanes + lane) % 32 / together * together;
      char* column = at - in_group * rows_of_part * static_cast<int>(size);  // of the first of these rows
      for_columns<columns>(count, [&](int k) {
        // Rows before the first whole sector.
        const auto before = static_cast<int>(
            (0u - static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(column))) % sector / size);
        const int odd = before % rows_of_part, from = in_group + before / rows_of_part;
        const auto rotated = [&](int from, unsigned(&words)[parts]) {
          const bool wraps = from >= together;
          unsigned of_lane[parts];
#pragma unroll
          for (int p = 0; p < parts; ++p)
            of_lane[p] = __shfl_sync(mask, bits_as<unsigned>(part[p].held[k]), from, together);
#pragma unroll
          for (int p = 0; p < parts; ++p) words[p] = wraps ? of_lane[(p + 1) % parts] : of_lane[p];
        };
        unsigned words[parts];
        rotated(from, words);
        if constexpr (rows_of_part == 2) {
          if (odd) {
            unsigned next[parts];
            rotated(from + 1, next);
#pragma unroll
            for (int p = 0; p < parts; ++p) words[p] = __byte_perm(words[p], next[p], 0x5432);
          }
        }
        // Of the words, relative to this thread's first row and to the group's.
        const int row = before, in_column = in_group * rows_of_part + before;
        Out* const element = reinterpret_cast<Out*>(column) + in_column;
        constexpr int of_part = together * rows_of_part, last = parts - 1;
#pragma unroll
        for (int p = 0; p < parts; ++p) {
          const int shift = p == last && from >= together ? -of_part : p * of_part;
          if constexpr (rows_of_part == 1) {
            if (row + shift < left) element[shift] = bits_as<Out>(words[p]);
          } else if (row + shift + 1 < left && (p < last || !odd || from != together - 1)) {
            *reinterpret_cast<unsigned*>(element + shift) = words[p];
          } else {
            // The last row there is, or that of the group and with it the first one.
            auto* const bits = reinterpret_cast<unsigned short*>(element + shift);
            if (row + shift < left) bits[0] = static_cast<unsigned short>(words[p]);
            if (p == last && odd && from == together - 1 && in_group * rows_of_part + left > 0)
              *reinterpret_cast<unsigned short*>(column) = static_cast<unsigned short>(words[p] >> 16);
          }
        }
        column += distance;
      });
    }
  }
}

/// Whether a block of so many threads, two of 512 on a multiprocessor, leaves little of it to no one.
constexpr bool fills_multiprocessor(int threads) {
  return 1024 / threads * threads * 16 >= 1024 * 15;
}

struct BlockPerWideTile {
  static constexpr const char* name = "block_per_wide_tile";

  /// (Sums of double have an order.)
  template <class Exec, class Problem>
  static constexpr bool supports = [] {
    if constexpr (sliced_rows_support<Exec, Problem>) {
      return std::is_same_v<typename Problem::Acc, float> && !has_transform_v<Problem>;
    } else {
      return false;
    }
  }();

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec& exec, const Problem& problem) {
    const std::string_view by_tiles = BlockPerTile::refuse(exec, problem);
    if (!by_tiles.empty()) return by_tiles;
    const RowGeometry& g = problem.geometry;
    const bool one = g.rank == 0, reduces = problem.operation == Operation::logsumexp;
    if (!one && (g.rank > 1 || g.x_stride[0] != 1 || (!reduces && g.y_stride[0] != 1)))
      return "the rows do not lie side by side";
    return {};
  }

  template <class Exec, class Problem>
  static std::string_view advise_against(const Exec& exec, const Problem& problem) {
    // (One H200, microseconds in a stream, block_per_tile and this kernel: float 16 x 131072 4.9 and 5.8, 100
    // x 83840 24.6 and 21.6, bfloat16 16 x 524288 8.5 and 13.1, 256 x 32768 11.9 and 13.5.)
    constexpr index_type blocks_of_multiprocessor = 8;
    const Plan<Problem> plan(problem);
    if (plan.blocks < blocks_of_multiprocessor * exec.cuda_device_prop().multiProcessorCount)
      return "there are too few rows for several in each thread";
    const index_type columns = problem.geometry.columns;
    // (256 MB to 1 GB on one H200, softmax, fraction of a copy, block_per_tile and this kernel: float 16
    // columns 0.92 and 0.93, 32 0.91 and 0.88, 48 0.89 and 0.86, 160 0.86 and 0.82, 256 0.84 and 0.81, but
    // 112 0.82 and 0.86, 192 0.77 and 0.83, 100 0.76 and 0.86, 17 0.73 and 0.91, 5 0.68 and 0.96; logsumexp
    // of 256, of what reading alone would reach at a copy's speed, 0.68 and 0.98. Bfloat16 16 columns 0.89
    // both, where they begin anywhere 0.71 and 0.65; 32 0.85 and 0.86, 256 0.72 and 0.82, 100 0.65 and 0.77.)
    if (WideTile<Problem>::rows_of_part == 2 && columns > WideTile<Problem>::columns &&
        columns <= BlockPerTile::usual_columns)
      return "a thread can have all columns of a row";
    if (WideTile<Problem>::rows_of_part == 1 && problem.operation != Operation::logsumexp &&
        columns % BlockPerTile::usual_columns == 0 && rows_of(problem).vectors &&
        fills_multiprocessor(BlockPerTile::threads(columns)))
      return "threads with a row each fill multiprocessors";
    return {};
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    const Plan<Problem> plan(problem);
    const WideTileRows lie = rows_of(problem);
    // `reserve` launches over no rows: that loads both kernels, which a capture could not do.
    const bool no_rows = problem.geometry.rows == 0;
    if (plan.lanes >= 32 || no_rows) launch<32>(exec, problem, plan, lie);
    if (plan.lanes < 32 || no_rows) launch<16>(exec, problem, plan, lie);
  }

  /// Fewer rows are for block_per_tile.
  template <class Exec, class Problem>
  static void reserve(const Exec& exec, const Problem& problem) {
    Problem no_rows = problem;
    no_rows.geometry.rows = 0;
    BlockPerTile::run(exec, no_rows);
  }

 private:
  template <class Problem>
  struct Plan {
    int slots, lanes = 16;
    index_type blocks;

    explicit Plan(const Problem& problem)
        : slots(static_cast<int>(ceil_div(problem.geometry.columns, WideTile<Problem>::columns))) {
      constexpr int most_threads = 512, usual_threads = 256;
      while (2 * lanes * slots <= (lanes < 32 ? most_threads : usual_threads)) lanes *= 2;
      blocks = ceil_div(problem.geometry.rows, rows());
    }
    int rows() const { return lanes * WideTile<Problem>::rows_of_thread; }
  };

  template <class Problem>
  static WideTileRows rows_of(const Problem& problem) {
    using Tile = WideTile<Problem>;
    using Out = typename Problem::Out;
    const RowGeometry& g = problem.geometry;
    const bool reduces = problem.operation == Operation::logsumexp;
    const auto begin_at = [&](int elements, const auto* data, index_type column_stride) {
      return reinterpret_cast<std::uintptr_t>(data) % (elements * sizeof(*data)) == 0 &&
             column_stride % elements == 0;
    };
    // All rows are there where one is.
    const auto come_in = [&](int rows) {
      return g.rows % rows == 0 && begin_at(rows, problem.x, g.x_column_stride) &&
             (reduces || begin_at(rows, problem.y, g.y_column_stride));
    };
    WideTileRows lie{};
    lie.vectors = (reduces || Tile::stores_vectors) && come_in(Tile::rows_of_thread);
    lie.pairs = come_in(2);
    lie.vectors_of_sums =
        g.y_stride[0] == 1 &&
        reinterpret_cast<std::uintptr_t>(problem.y) % (Tile::rows_of_thread * sizeof(Out)) == 0;
    return lie;
  }

  template <int together, class Problem>
  static void launch(const Kokkos::Cuda& exec, const Problem& problem, const Plan<Problem>& plan,
                     const WideTileRows& lie) {
    launch_with_shared<&block_per_wide_tile_kernel<together, Problem>>(
        exec, kernel_label(problem.operation, name), plan.blocks,
        dim3(static_cast<unsigned>(plan.lanes), static_cast<unsigned>(plan.slots)),
        plan.slots > 1 ? SharedWideTile<Problem>::bytes(plan.rows()) : 0, problem, lie);
  }
};

}  // namespace KokkosSoftmax::impl

#endif
