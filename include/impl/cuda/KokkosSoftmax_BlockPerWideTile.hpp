// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The CUDA kernel for many short rows that lie side by side: tiles (see KokkosSoftmax_RowTiles.hpp) of which
/// a thread has four rows, or four pairs of them, so that what a row or a column costs besides is paid once
/// for all of these. Sums are in fixed point: the bits are those of block_per_tile.
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

/// What a thread has of a tile, by types alone. (Rows of a few columns have kernels whose threads have
/// fewer.)
template <class Problem, int columns_ = 8>
struct WideTile {
  using In = typename Problem::In;
  using Out = typename Problem::Out;
  static constexpr int columns = columns_;
  static constexpr int rows_of_part = takes_pairs<Problem> ? 2 : 1;  ///< what PartOfTile has
  static constexpr int parts = 4, rows_of_thread = parts * rows_of_part;
  using Part = PartOfTile<columns, rows_of_part, Problem>;
  using Result = ResultOfWholeRow<Problem>;
  /// Whether what becomes of a part's logits can take their place, as bits.
  static constexpr bool keeps_outputs = rows_of_part == 1 || sizeof(In) == sizeof(Out);

  /// What a thread has of a column of x and of y, and of logsumexps.
  template <class T>
  struct alignas(parts * sizeof(T)) Vector {
    T of[parts];
  };
  using Loaded = Vector<typename Part::Raw>;
  using Stored = Vector<typename Part::Put>;
  struct alignas(rows_of_thread * sizeof(Out)) Sums {
    Out of[rows_of_thread];
  };
};

/// How a thread's rows lie.
struct WideTileRows {
  bool vectors;  ///< side by side, on boundaries of as many in x and y; else each part's beside other lanes'
  bool pairs;    ///< those of a part on boundaries of pairs
  bool vectors_of_sums;  ///< a logsumexp's, likewise
  int rows_before;       ///< in vectors: the first tile begins so many before the first row
};

/// What the threads of a block tell each other of the rows of a tile.
template <class Problem>
struct SharedWideTile : TalliesOfRows {
  using Result = ResultOfWholeRow<Problem>;
  Result* results;

  static constexpr int bytes(int rows) {
    return rows * static_cast<int>(sizeof(Result)) + TalliesOfRows::bytes(rows);
  }
  __device__ SharedWideTile(void* memory, int rows)
      : TalliesOfRows(static_cast<Result*>(memory) + rows, rows), results(static_cast<Result*>(memory)) {}
};

/// What a thread has of a tile: lane threadIdx.x across rows, slot threadIdx.y along columns. `together`:
/// lanes whose rows are neighbours where they do not come in vectors: a group. `again`: as many as a sector
/// has of its last ones the next group has, too, so that no sector is written by two of them.
template <int together, bool again, class Problem, int columns_ = WideTile<Problem>::columns>
struct RowsOfThread {
  using Tile = WideTile<Problem, columns_>;
  using Part = typename Tile::Part;
  using Raw = typename Part::Raw;
  using Put = typename Part::Put;
  using In = typename Problem::In;
  using Out = typename Problem::Out;
  static constexpr int columns = Tile::columns, parts = Tile::parts, rows_of_part = Tile::rows_of_part;

  const Problem& problem;
  const WideTileRows& lie;
  int lane;
  index_type first;  ///< row of this thread
  int left;          ///< rows from that one on
  int step;          ///< rows from part to part
  index_type first_column;
  int count;  ///< of columns
  index_type x_offset, y_offset;
  Part part[parts];

  /// Of a tile, in a block that has its columns from one on.
  __device__ RowsOfThread(const Problem& problem_, const WideTileRows& lie_, unsigned tile,
                          index_type first_of_block)
      : problem(problem_), lie(lie_), lane(static_cast<int>(threadIdx.x)) {
    const RowGeometry& g = problem.geometry;
    int rows = static_cast<int>(blockDim.x) * Tile::rows_of_thread;
    index_type first_of_tile = static_cast<index_type>(tile) * rows - lie.rows_before;
    int in_tile = lie.vectors
                      ? lane * Tile::rows_of_thread
                      : lane / together * (together * Tile::rows_of_thread) + lane % together * rows_of_part;
    if constexpr (again) {  // of the group, likewise
      rows = together * Tile::rows_of_thread;
      first_of_tile =
          (static_cast<index_type>(tile) * (static_cast<int>(blockDim.x) / together) + lane / together) *
          (rows - rows_of_sector<Problem>);
      in_tile = lane % together * rows_of_part;
    }
    first = first_of_tile + in_tile;
    left = static_cast<int>(min(g.rows - first_of_tile, static_cast<index_type>(rows))) - in_tile;
    if (first < 0) left = 0;  // (None of its rows is there.)
    step = lie.vectors ? rows_of_part : together * rows_of_part;
    first_column = first_of_block + static_cast<index_type>(threadIdx.y) * columns;
    count = static_cast<int>(max(min(g.columns - first_column, index_type(columns)), index_type(0)));
    // (Lanes of no row may store what others have.)
    x_offset = y_offset = first;
    if (g.rank > 1 && left > 0) {
      const RowGeometry::Row row = g.row(first);
      x_offset = row.x_offset;
      y_offset = row.y_offset;
    }
  }

  /// `has_registers`: for a way to read pairs that begin anywhere which takes more of them.
  template <bool has_registers>
  __device__ void load() {
    Raw raw[parts][columns];
#pragma unroll
    for (int p = 0; p < parts; ++p) {
#pragma unroll
      for (int k = 0; k < columns; ++k) raw[p][k] = Part::nothing();
    }
    const RowGeometry& g = problem.geometry;
    const In* at = problem.x + x_offset + first_column * g.x_column_stride;
    // with(k, at) at each column's first logit of this thread.
    const auto each = [&](const auto& with) {
      for_columns<columns>(count, [&](int k) {
        with(k, at);
        at += g.x_column_stride;
      });
    };
    // (Which it is, is asked once: with a branch at each, odd bfloat16 took twice as long on one H200.)
    const auto each_part = [&](const auto& raw_of) {
      each([&](int k, const In* at) {
#pragma unroll
        for (int p = 0; p < parts; ++p) {
          constexpr int of_part = together * rows_of_part;
          raw[p][k] = raw_of(k, at + p * of_part, left - p * of_part);
        }
      });
    };
    const auto read_at_once = [](int, const In* at, int left) {
      return left > 0 ? *reinterpret_cast<const Raw*>(at) : Part::nothing();
    };
    if (lie.vectors) {
      if (left > 0) {
        each([&](int k, const In* at) {
          const auto vector = load_past_l1(reinterpret_cast<const typename Tile::Loaded*>(at));
#pragma unroll
          for (int p = 0; p < parts; ++p) raw[p][k] = vector.of[p];
        });
      }
    } else if (rows_of_part == 1 || lie.pairs) {
      each_part(read_at_once);
    } else if constexpr (rows_of_part == 2) {
      const auto read_one_by_one = [](int, const In* at, int left) {
        const auto* const bits = reinterpret_cast<const unsigned short*>(at);
        const unsigned low = left > 0 ? bits[0] : 0u, high = left > 1 ? bits[1] : 0u;
        return __byte_perm(low, high, 0x5410);
      };
      if (!has_registers || g.x_column_stride % 2 == 0 || problem.operation == Operation::logsumexp) {
        each_part(read_one_by_one);
      } else if constexpr (has_registers) {
        // Of two columns an odd distance apart one begins on a boundary of pairs. (One H200, fractions of a
        // copy, all one by one and so: bfloat16 5 columns 0.50 and 0.53, 33 0.52 and 0.55, 128 0.62 and 0.66,
        // 256 0.59 and 0.62; but logsumexp of 33 0.53 and 0.47, in clusters 512 0.51 and 0.43.)
        const auto every_other = [&](auto odd) {
          each_part([&](int k, const In* at, int left) {
            return k % 2 == odd.value && left > 1 ? read_at_once(k, at, left) : read_one_by_one(k, at, left);
          });
        };
        if (reinterpret_cast<std::uintptr_t>(at) % 4 == 0) {
          every_other(std::integral_constant<int, 0>{});
        } else {
          every_other(std::integral_constant<int, 1>{});
        }
      }
    }
#pragma unroll
    for (int p = 0; p < parts; ++p) part[p].take(raw[p]);
  }

  __device__ void transform() {
    for (Part& p : part) p.find_factor(problem);
    // (Operands loaded before would take registers that there are not.)
    for_each_part([&](Part& part, const auto& place) { part.template transform<false>(problem, place); });
  }

  /// Adds what this thread has of its rows to tallies that were cleared, place(p, v) those of a row; by all
  /// threads of a block, which then see what all have added.
  template <class Place>
  __device__ __forceinline__ void add_to(const TalliesOfRows& tallies, const Place& place, bool softmax) {
#pragma unroll
    for (int p = 0; p < parts; ++p) {
      float max[rows_of_part];
      part[p].maxima(part[p].top(), max);
#pragma unroll
      for (int v = 0; v < rows_of_part; ++v) tallies.raise_top(place(p, v), max[v]);
    }
    __syncthreads();
#pragma unroll
    for (int p = 0; p < parts; ++p) {
#pragma unroll
      for (int v = 0; v < rows_of_part; ++v) {
        const int row = place(p, v);
        tallies.add(row, part[p].sum(tallies.top(row), v, softmax));
      }
    }
    __syncthreads();
  }

  /// What becomes of a part: sums, or outputs.
  template <class Result>
  __device__ __forceinline__ void finish(Operation operation, int p, const float (&max)[rows_of_part],
                                         const Result (&result)[rows_of_part], typename Tile::Sums& sums) {
    if (operation == Operation::logsumexp) {
#pragma unroll
      for (int v = 0; v < rows_of_part; ++v)
        sums.of[p * rows_of_part + v] = store_as<Out>(result[v].logsumexp());
    } else {
      form_outputs(p, max, result);
    }
  }
  /// Writes it, sums by one slot of a row.
  __device__ __forceinline__ void store(Operation operation, const typename Tile::Sums& sums,
                                        bool has_sums) const {
    if (operation == Operation::logsumexp) {
      if (has_sums) store(sums);
    } else if constexpr (Tile::keeps_outputs) {
      store();
    }
  }

  /// Puts outputs of a part in the place of its logits or, where they are larger, into y.
  template <class Result>
  __device__ void form_outputs(int p, const float (&max)[rows_of_part],
                               const Result (&result)[rows_of_part]) {
    if constexpr (Tile::keeps_outputs) {
      part[p].for_outputs(problem.operation, max, result, columns, [&](int k, int, const Put& output) {
        part[p].held[k] = from_bits(bits_of(output));
      });
    } else {
      Out* const y = first_of_y() + p * step;
      Out* at = y;
      part[p].for_outputs(problem.operation, max, result, count, [&](int k, int v, const Out& output) {
        if (k == 0) at = y;
        if (p * step + v < left) at[v] = output;
        at += problem.geometry.y_column_stride;
      });
    }
  }

  /// Writes what has been put in the place of logits.
  __device__ void store() const {
    if (!lie.vectors) return store_sectors();
    if (left <= 0) return;
    Out* at = first_of_y();
    for_columns<columns>(count, [&](int k) {
      typename Tile::Stored vector;
#pragma unroll
      for (int p = 0; p < parts; ++p) vector.of[p] = bits_as<Put>(output_bits(p, k));
      store_past_l1(reinterpret_cast<typename Tile::Stored*>(at), vector);
      at += problem.geometry.y_column_stride;
    });
  }
  __device__ void store(const typename Tile::Sums& sums) const {
    if (left <= 0) return;
    const RowGeometry& g = problem.geometry;
    if (lie.vectors_of_sums) {
      *reinterpret_cast<typename Tile::Sums*>(problem.y + y_offset) = sums;
      return;
    }
#pragma unroll
    for (int p = 0; p < parts; ++p) {
#pragma unroll
      for (int v = 0; v < rows_of_part; ++v) {
        if (p * step + v < left)
          problem.y[g.row(first + p * step + v).y_offset] = sums.of[p * rows_of_part + v];
      }
    }
  }

 private:
  /// use(part, place) of those whose rows are there, if there is a transform.
  template <class Use>
  __device__ void for_each_part(const Use& use) {
    if constexpr (has_transform_v<Problem>) {
#pragma unroll
      for (int p = 0; p < parts; ++p) {
        if (p * step < left)
          use(part[p], typename Part::Place(problem.geometry, first + p * step, first_column));
      }
    }
  }

  using BitsOfPut = std::conditional_t<sizeof(Put) == 2, unsigned short, unsigned>;
  __device__ static unsigned bits_of(const Put& output) {
    return bits_as<BitsOfPut>(output);
  }
  __device__ static auto from_bits(unsigned bits) {
    return bits_as<typename Part::Held>(bits);
  }
  __device__ BitsOfPut output_bits(int p, int k) const {
    return static_cast<BitsOfPut>(bits_as<unsigned>(part[p].held[k]));
  }
  __device__ Out* first_of_y() const {
    return problem.y + y_offset + first_column * problem.geometry.y_column_stride;
  }

  /// Lanes write what others have, so that they write whole sectors of memory, but for the first and the last
  /// rows of their group; or, where the next group has some rows again, nothing else: of each column as many
  /// rows as the group has beside these, from the first whole sector on.
  __device__ void store_sectors() const {
    constexpr unsigned sector = bytes_of_sector, size = sizeof(Out);
    const auto lanes = static_cast<int>(blockDim.x);
    const int in_group = lane % together;
    const unsigned group =
        together == 32 ? 0xffffffffu
                       : ((1u << together % 32) - 1)
                             << (static_cast<int>(threadIdx.y) * lanes + lane) % 32 / together * together;
    Out* column = first_of_y() - in_group * rows_of_part;  // of the group's first row
    for_columns<columns>(count, [&](int k) {
      // Rows before the first whole sector.
      const auto address = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(column));
      const auto before = static_cast<int>((0u - address) % sector / size);
      const int from = in_group + before / rows_of_part;
      unsigned words[parts];
      from_lane(group, k, from, words);
      if constexpr (rows_of_part == 1) {
        put_words(column, before, from, words);
      } else {
        const bool odd = before % 2 != 0;
        if (odd) {
          unsigned next[parts];
          from_lane(group, k, from + 1, next);
#pragma unroll
          for (int p = 0; p < parts; ++p) words[p] = __byte_perm(words[p], next[p], 0x5432);
        }
        put_pairs(column, before, from, words, odd);
      }
      column += problem.geometry.y_column_stride;
    });
  }
  /// What a lane of the group has of a column, those behind its last one being the next part's first ones.
  __device__ void from_lane(unsigned group, int k, int from, unsigned (&words)[parts]) const {
    unsigned of_lane[parts];
#pragma unroll
    for (int p = 0; p < parts; ++p)
      of_lane[p] = __shfl_sync(group, static_cast<unsigned>(output_bits(p, k)), from, together);
#pragma unroll
    for (int p = 0; p < parts; ++p) words[p] = from >= together ? of_lane[(p + 1) % parts] : of_lane[p];
  }
  /// Where in a group's column these go, in rows from its first one: behind the last part, to the first.
  __device__ static int place(int p, int from) {
    constexpr int of_part = together * rows_of_part, last = parts - 1;
    return p == last && from >= together ? -of_part : p * of_part;
  }
  __device__ void put_words(Out* column, int before, int from, const unsigned (&words)[parts]) const {
    static_assert(rows_of_part == 1);
    // Of the last part not what the next group has again; what is before the first sector, the first group.
    const bool puts_last = !again || lane % together < together - rows_of_sector<Problem> ||
                           (from >= together && first == lane % together);
#pragma unroll
    for (int p = 0; p < parts; ++p) {
      const int shift = place(p, from);
      if ((p < parts - 1 || puts_last) && before + shift < left)
        column[from + shift] = bits_as<Out>(static_cast<BitsOfPut>(words[p]));
    }
  }
  __device__ void put_pairs(Out* column, int before, int from, const unsigned (&words)[parts],
                            bool odd) const {
    const int in_group = lane % together * rows_of_part;
    auto* const bits = reinterpret_cast<unsigned short*>(column);
    // Of an odd column the group's last row, and with it its first one.
    const bool has_ends = odd && from == together - 1;
#pragma unroll
    for (int p = 0; p < parts; ++p) {
      const int shift = place(p, from), row = before + shift;
      const bool is_last = p == parts - 1 && has_ends;
      auto* const at = bits + in_group + row;
      if (row + 1 < left && !is_last) {
        *reinterpret_cast<unsigned*>(at) = words[p];
      } else {
        if (row < left) at[0] = static_cast<unsigned short>(words[p]);
        if (is_last && in_group + left > 0) bits[0] = static_cast<unsigned short>(words[p] >> 16);
      }
    }
  }
};

template <int columns, int together, bool again, class Problem>
__global__ void __launch_bounds__(512, 2)
    block_per_wide_tile_kernel(const __grid_constant__ Problem problem,
                               const __grid_constant__ WideTileRows lie) {
  using Tile = WideTile<Problem, columns>;
  using Part = typename Tile::Part;
  constexpr int parts = Tile::parts, rows_of_part = Tile::rows_of_part;
  extern __shared__ uint4 shared_of_tile[];
  grid_dependency_wait();
  if (problem.geometry.rows == 0) return;
  RowsOfThread<together, again, Problem, columns> mine(problem, lie, blockIdx.x, 0);
  mine.template load<true>();
  mine.transform();

  const int lane = mine.lane, lanes = static_cast<int>(blockDim.x), slot = static_cast<int>(threadIdx.y),
            slots = static_cast<int>(blockDim.y), rows = lanes * Tile::rows_of_thread;
  const Operation operation = problem.operation;
  const bool softmax = operation == Operation::softmax;
  const SharedWideTile<Problem> shared(shared_of_tile, rows);
  // Of a part's row.
  const auto in_shared = [&](int p, int v) { return (p * rows_of_part + v) * lanes + lane; };
  if (slots > 1) {
    for (int row = slot * lanes + lane; row < rows; row += slots * lanes) shared.clear(row);
    __syncthreads();
    mine.add_to(shared, in_shared, softmax);
    for (int row = slot * lanes + lane; row < rows; row += slots * lanes)
      shared.results[row] = typename Tile::Result(operation, shared.top(row), shared.sum(row));
    __syncthreads();
  }

  typename Tile::Sums sums;
#pragma unroll
  for (int p = 0; p < parts; ++p) {
    float max[rows_of_part];
    typename Tile::Result result[rows_of_part];
    if (slots == 1) {
      mine.part[p].maxima(mine.part[p].top(), max);
#pragma unroll
      for (int v = 0; v < rows_of_part; ++v)
        result[v] = typename Tile::Result(operation, max[v], mine.part[p].sum(max[v], v, softmax));
    } else {
#pragma unroll
      for (int v = 0; v < rows_of_part; ++v) {
        result[v] = shared.results[in_shared(p, v)];
        max[v] = shared.top(in_shared(p, v));
      }
    }
    mine.finish(operation, p, max, result, sums);
  }
  mine.store(operation, sums, slot == 0);
}

/// How rows lie that such a kernel takes.
template <class Problem>
WideTileRows wide_tile_rows(const Problem& problem) {
  using Tile = WideTile<Problem>;
  const RowGeometry& g = problem.geometry;
  const bool reduces = problem.operation == Operation::logsumexp;
  const int inner = g.rank - 1;
  // So many rows from any multiple of these on: side by side, on boundaries of as many.
  const auto begin_at = [&](int rows, const auto* data, index_type column_stride, const index_type* strides) {
    bool all = reinterpret_cast<std::uintptr_t>(data) % (rows * sizeof(*data)) == 0;
    all = all && column_stride % rows == 0;
    for (int d = 0; d < inner; ++d) all = all && strides[d] % rows == 0;
    return all;
  };
  const auto come_in = [&](int rows) {
    return g.rank > 0 && g.extent[inner] % rows == 0 &&
           begin_at(rows, problem.x, g.x_column_stride, g.x_stride) &&
           (reduces || begin_at(rows, problem.y, g.y_column_stride, g.y_stride));
  };
  WideTileRows lie{};
  lie.vectors = (reduces || Tile::keeps_outputs) && come_in(Tile::rows_of_thread);
  lie.pairs = come_in(2);
  lie.vectors_of_sums =
      lie.vectors && g.y_stride[inner] == 1 && begin_at(Tile::rows_of_thread, problem.y, 0, g.y_stride);
  return lie;
}

/// Why it does not take them, if it does not.
template <class Problem>
std::string_view refuse_wide_tile(const Problem& problem) {
  const RowGeometry& g = problem.geometry;
  const int inner = g.rank - 1;
  if (g.rank > 0 &&
      (g.x_stride[inner] != 1 || (problem.operation != Operation::logsumexp && g.y_stride[inner] != 1)))
    return "the rows do not lie side by side";
  if (g.rank > 1 && !wide_tile_rows(problem).vectors) return "a thread's rows do not lie in vectors";
  return {};
}

struct BlockPerWideTile {
  static constexpr const char* name = "block_per_wide_tile";

  /// (Sums of double have an order.)
  template <class Exec, class Problem>
  static constexpr bool supports = [] {
    if constexpr (sliced_rows_support<Exec, Problem>) {
      return std::is_same_v<typename Problem::Acc, float> &&
             !is_known_at_run_time<typename Problem::Transform>;
    } else {
      return false;
    }
  }();

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec& exec, const Problem& problem) {
    const std::string_view by_tiles = BlockPerTile::refuse(exec, problem);
    if (!by_tiles.empty()) return by_tiles;
    return refuse_wide_tile(problem);
  }

  template <class Exec, class Problem>
  static std::string_view advise_against(const Exec& exec, const Problem& problem) {
    // (One H200, microseconds in a stream, block_per_tile and this kernel, 8, 16 and 32 MB of x: float 16
    // columns 4.6 and 6.2, 7.2 and 8.6, 19.3 and 19.9, 100 7.5 and 7.6, 11.3 and 11.1, 25.5 and 22.5, 256 6.0
    // and 6.7, 10.3 and 9.9, 23.3 and 21.1, bfloat16 100 9.6 and 11.0, 14.9 and 15.3, 31 and 27, 256 7.6 and
    // 9.2, 12.7 twice, 28.6 and 25.6.)
    constexpr index_type fewest_bytes_of_multiprocessor = 160 * 1024;
    const RowGeometry& g = problem.geometry;
    const index_type columns = g.columns,
                     bytes = g.rows * columns * static_cast<index_type>(sizeof(typename Problem::In));
    if (bytes < fewest_bytes_of_multiprocessor * exec.cuda_device_prop().multiProcessorCount)
      return "there are too few rows for several in each thread";
    // (1 GiB on one H200, softmax, fraction of a copy, block_per_tile and this kernel: float 5 columns 0.73
    // and 0.97, 16 0.94 and 0.965, 64 0.93 and 0.94, 100 0.80 and 0.925, 128 0.895 and 0.935, 256 0.84 and
    // 0.93, 256 MB of them 0.835 and 0.93, that begin anywhere 16 0.78 and 0.93, 100 0.71 and 0.835, 256 0.56
    // and 0.66; logsumexp of 256, of what reading alone would reach at a copy's speed, 0.68 and 0.98.
    // Bfloat16 12 columns 0.79 and 0.77, 16 0.93 both, 24 0.69 and 0.91, 64 0.86 and 0.92, 256 0.73 and 0.88,
    // that begin anywhere 16 0.74 and 0.65, 33 0.54 and 0.55, 100 0.44 and 0.57.)
    constexpr bool is_16_bit = sizeof(typename Problem::In) == 2;
    const bool vectors = wide_tile_rows(problem).vectors;
    if (is_16_bit && columns > WideTile<Problem>::columns && columns <= BlockPerTile::usual_columns)
      return "a thread can have all columns of a row";
    if constexpr (has_transform_v<Problem> && stays_packed<Problem>) {
      // (Bfloat16, likewise: a temperature 256 columns 0.66 and 0.57, 64 0.78 and 0.555, 33 0.57 and 0.44,
      // that begin anywhere 0.43 and 0.31, 0.535 and 0.32, 0.43 and 0.33; a mask 0.67 and 0.59, 0.76 and
      // 0.60, 0.59 and 0.48, but 5 columns 0.34 and 0.48; with both 0.27 and 0.26; but a factor 0.70 and
      // 0.80, 0.85 and 0.83, 0.64 and 0.66, that begin anywhere 0.46 and 0.56, 0.59 and 0.55, 0.47 and 0.45.)
      using Parts = PartsOfChain<typename Problem::Transform>;
      constexpr bool is_factor = std::is_same_v<typename Problem::Transform, BoundScale>,
                     has_both = Parts::temperatures != 0 && Parts::masks != 0;
      constexpr index_type some_columns = 64;
      if (has_both ||
          (columns > WideTile<Problem>::columns && !(is_factor && (vectors || columns > some_columns))))
        return "a pair in each thread leaves it registers";
    }
    if constexpr (WideTile<Problem>::rows_of_part == 1) {
      if (columns > WideTile<Problem>::columns && !takes_transform(problem, vectors))
        return "a row in each thread takes fewer instructions";
    }
    return {};
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    WideTileRows lie = wide_tile_rows(problem);
    // (These are whole vectors, for y begins on a boundary of one.)
    lie.rows_before = lie.vectors ? rows_before_boundary(problem) : 0;
    const Plan<Problem> plan(problem);
    const bool again = !lie.vectors && has_rows_again(problem);
    const bool few = with_few_columns(
        problem, [&]<int columns>() { launch<columns, 32, false>(exec, problem, plan, lie); });
    if (few) return;
    launch_for<32>(exec, problem, plan, lie, again);
    launch_for<16>(exec, problem, plan, lie, again);
  }

  /// Fewer rows are for block_per_tile, and some of what block_per_tile has, or a kernel for longer rows, for
  /// this one.
  template <class Exec, class Problem>
  static void reserve(const Exec&, const Problem&) {}
  template <class Exec, class Problem>
  static void reserve_for_shorter_rows(const Exec& exec, const Problem& problem) {
    if (problem.axis_is_strided) run(exec, no_rows_of(problem, columns_of_tile<Problem>));
  }

 private:
  /// Whether a group has some rows again: not in place, where its logits would be outputs of the group
  /// before. (One H200, fraction of a copy of 1 GiB of floats that begin anywhere, without and so: 9 columns
  /// 0.85 and 0.78, 12 0.93 and 0.91, 16 0.93 and 0.94, 33 0.87 and 0.90, 64 0.83 and 0.89, 100 0.84 and
  /// 0.88, 160 0.65 and 0.82, 224 0.67 and 0.84, 256 0.66 and 0.78; with a factor 33 0.865 and 0.855, 100
  /// 0.85 and 0.82, 160 0.66 and 0.83, 224 0.675 and 0.81, 256 0.67 and 0.75, GELU 160 0.67 and 0.76, 224
  /// 0.725 and 0.72, 256 0.71 and 0.69; but with a bias for all rows 33 0.62 and 0.59, 100 0.70 and 0.67, 256
  /// 0.65 and 0.63; bfloat16, whose instructions take longer than memory, 33 0.565 and 0.51, 256 0.61 and
  /// 0.59.)
  template <class Problem>
  static bool has_rows_again(const Problem& problem) {
    using Transform = typename Problem::Transform;
    constexpr bool has_transform = has_transform_v<Problem>,
                   is_short = !has_transform || std::is_same_v<Transform, BoundScale>;
    constexpr index_type fewest_columns = has_transform ? 129 : 16, most_columns = is_short ? 256 : 192;
    const index_type columns = problem.geometry.columns;
    return may_have_rows_again<16, Problem> && columns >= fewest_columns && columns <= most_columns &&
           problem.operation != Operation::logsumexp && !is_in_place(problem);
  }
  /// With a transform, where there are few lanes, for many columns.
  template <int together, class Problem>
  static constexpr bool may_have_rows_again =
      sizeof(typename Problem::In) == 4 &&
      sizeof(typename Problem::Out) == 4 && operands_of<typename Problem::Transform> == 0 &&
      (together == 16 || !has_transform_v<Problem>);

  /// Whether what a transform needs leaves this kernel faster, of a row in each part. (Likewise, float with a
  /// factor 16 columns 0.94 and 0.97, 256 0.83 and 0.92, GELU 0.93 and 0.96, 0.78 and 0.93, that begin
  /// anywhere 0.775 and 0.87, 0.56 and 0.71. With a temperature and with a bias for all rows 12 columns 0.805
  /// and 0.74, 0.78 and 0.74, 18 0.64 and 0.75, 0.65 and 0.74, 64 0.90 and 0.87, 0.92 and 0.88, 100 0.74 and
  /// 0.81, 0.79 and 0.83, 128 0.84 and 0.85, 0.87 twice, 160 0.83 and 0.865, 0.85 and 0.86, 256 0.80 and
  /// 0.87, 0.83 and 0.86, that begin anywhere 33 0.705 and 0.58, 0.74 and 0.62, 128 0.70 and 0.67, 0.72
  /// twice, 160 0.54 and 0.67 both, 224 0.58 and 0.65, 0.58 and 0.71; a mask for all rows as a bias. A mask
  /// as large as x 18 columns 0.70 and 0.74, 100 0.81 and 0.76, 224 0.83 and 0.77, 240 0.73 and 0.78, that
  /// begin anywhere 100 0.75 and 0.57, a bias as large as x 12 0.97 and 0.73, 256 0.90 and 0.76. Bfloat16
  /// with a bias for all rows 24 columns 0.40 and 0.52, 64 0.555 and 0.54, 100 0.41 and 0.45, 256 0.48 and
  /// 0.53, GELU 0.41 and 0.56, 0.525 and 0.60, 0.41 and 0.48, 0.47 and 0.55; that begin anywhere 33 0.39 and
  /// 0.325, 256 0.44 and 0.35, GELU 0.41 and 0.37, 0.42 and 0.37.)
  template <class Problem>
  static bool takes_transform(const Problem& problem, bool vectors) {
    using Transform = typename Problem::Transform;
    const Transform& transform = problem.transform;
    const index_type columns = problem.geometry.columns;
    if (sizeof(typename Problem::In) == 2) return vectors;
    constexpr bool has_operands = operands_of<Transform> != 0;
    if (!has_operands && rows_are_alike(transform)) return true;
    constexpr index_type nearly_a_slice = 224;
    if (has_operands_of_single_rows(transform)) {
      using Parts = PartsOfChain<Transform>;
      return Parts::masks == operands_of<Transform> && vectors && columns > nearly_a_slice;
    }
    constexpr index_type few_columns = 16, some_columns = 128;
    const bool fills_threads = columns % BlockPerTile::usual_columns == 0;
    return vectors ? columns > (fills_threads ? some_columns : few_columns) : columns > some_columns;
  }

  template <class Problem>
  struct Plan {
    int slots, lanes = 16;

    explicit Plan(const Problem& problem)
        : slots(static_cast<int>(ceil_div(problem.geometry.columns, WideTile<Problem>::columns))) {
      constexpr int most_threads = 512, usual_threads = 256;
      while (2 * lanes * slots <= (lanes < 32 ? most_threads : usual_threads)) lanes *= 2;
    }
    int rows() const { return lanes * WideTile<Problem>::rows_of_thread; }
  };

  /// Where the plan has groups of so many lanes. (`reserve` launches over no rows: that loads all kernels,
  /// which a capture could not do.)
  template <int together, class Problem>
  static void launch_for(const Kokkos::Cuda& exec, const Problem& problem, const Plan<Problem>& plan,
                         const WideTileRows& lie, bool again) {
    const index_type rows = problem.geometry.rows;
    if (rows > 0 && (plan.lanes >= 32) != (together == 32)) return;
    constexpr int columns = WideTile<Problem>::columns;
    if constexpr (may_have_rows_again<together, Problem>) {
      if (again || rows == 0) launch<columns, together, true>(exec, problem, plan, lie);
      if (again && rows > 0) return;
    }
    launch<columns, together, false>(exec, problem, plan, lie);
  }

  template <int columns, int together, bool again, class Problem>
  static void launch(const Kokkos::Cuda& exec, const Problem& problem, const Plan<Problem>& plan,
                     const WideTileRows& lie) {
    const index_type rows = problem.geometry.rows + (again ? 0 : lie.rows_before),
                     rows_of_step =
                         plan.rows() - (again ? plan.lanes / together * rows_of_sector<Problem> : 0),
                     blocks = ceil_div(rows, rows_of_step);
    launch_with_shared<&block_per_wide_tile_kernel<columns, together, again, Problem>>(
        exec, kernel_label(problem.operation, name), blocks,
        dim3(static_cast<unsigned>(plan.lanes), static_cast<unsigned>(plan.slots)),
        plan.slots > 1 ? SharedWideTile<Problem>::bytes(plan.rows()) : 0, problem, lie);
  }
};

}  // namespace KokkosSoftmax::impl

#endif
