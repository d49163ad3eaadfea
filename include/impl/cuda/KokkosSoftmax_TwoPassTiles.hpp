// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The CUDA kernels for long rows whose columns are not contiguous that read x twice, on every GPU: tiles
/// (see KokkosSoftmax_RowTiles.hpp) in the slices of grid_pipelined_tiles, and with its bits. One kernel
/// reduces slices, one joins what it found of each row, one writes.
///
/// What writes has all that it needs of each row, so a warp writes columns from one boundary of sectors of
/// memory to another, of whichever rows lie there: a sector that two warps write a part of each is read
/// first. (4095 x 65536 floats on one H100, 32 rows by a warp each 1.59 ms, 4096 x 65536 0.78.)
///
/// Rows of 16 bits that lie side by side go in pairs, wherever columns begin, if they stay packed (see
/// KokkosSoftmax_PackedTiles.hpp).

#ifndef KOKKOSSOFTMAX_TWOPASSTILES_HPP
#define KOKKOSSOFTMAX_TWOPASSTILES_HPP

#include <impl/cuda/KokkosSoftmax_GridPipelinedTiles.hpp>

#include <algorithm>
#include <string_view>

namespace KokkosSoftmax::impl {

/// What the kernels tell each other.
template <class Problem>
struct TwoPassScratch {
  using Acc = typename Problem::Acc;
  using Result = ResultOfTileRow<Problem>;
  using Partial = PartialSoftmax<Acc>;
  /// Maxima of a slice that exponentials are below, where a softmax is made of these.
  static constexpr int shares = makes_logits<Problem> ? ReductionPlan::shares : 1;
  /// Those of slices are in their partial results.
  static constexpr bool has_maxima = Result::keeps_exponentials && shares > 1;

  Partial* partials;  ///< [slice][row]
  Result* results;    ///< of rows
  Acc* maxima;        ///< [slice][share][row]
  unsigned tiles, slices;
  bool pairs_begin_anywhere;  ///< of those that are reduced

  TwoPassScratch(void* memory, index_type rows, index_type slices_)
      : partials(static_cast<Partial*>(memory)),
        results(reinterpret_cast<Result*>(partials + rows * slices_)),
        maxima(reinterpret_cast<Acc*>(results + rows)),
        tiles(1),
        slices(static_cast<unsigned>(slices_)),
        pairs_begin_anywhere(false) {}
  static std::size_t bytes(index_type rows, index_type slices) {
    const std::size_t of_slice = sizeof(Partial) + (has_maxima ? shares * sizeof(Acc) : 0);
    return static_cast<std::size_t>(rows) * (static_cast<std::size_t>(slices) * of_slice + sizeof(Result));
  }

  /// Of a block: tiles that are neighbours are read and written at the same time.
  __device__ SliceOfTile slice() const { return {blockIdx.x % tiles, blockIdx.x / tiles}; }
};

/// Reduces a slice that the threads of a TileBlock have in registers, as grid_pipelined_tiles does it; `max`
/// becomes what their exponentials are below. tell(row, partial) by one thread for each row of the tile. By
/// all threads of a block, which has `most_groups` of such at most, each of which passes its number.
template <int most_groups, int rows_of_lane, int columns, class Problem, class Tell>
__device__ __forceinline__ void reduce_slice_of_tile(PartOfTile<columns, rows_of_lane, Problem>& mine,
                                                     const Problem& problem,
                                                     const PlaceInTile<columns, rows_of_lane>& place,
                                                     int group, int lane, int slot, bool softmax,
                                                     typename Problem::Acc (&max)[rows_of_lane],
                                                     const Tell& tell) {
  using Readers = TileBlock<Problem>;
  using Mine = PartOfTile<columns, rows_of_lane, Problem>;
  using Acc = typename Problem::Acc;
  mine.transform(problem, place);
  if constexpr (makes_logits<Problem>) {
    // By shares.
    static_assert(rows_of_lane == 1 && Readers::slots == ReductionPlan::shares);
    __shared__ Acc maxima[most_groups][Readers::slots][Readers::lanes];
    __shared__ ShareSum<Acc> sums[most_groups][Readers::slots][Readers::lanes];
    mine.maxima(mine.top(), max);
    maxima[group][slot][lane] = max[0];
    sums[group][slot][lane] = mine.sum(max[0], 0, softmax);
    __syncthreads();
    if (slot == 0) {
      tell(lane, join_shares<Acc>([&](int share) {
             return Mine::Part::share(maxima[group][share][lane], sums[group][share][lane]);
           }));
    }
  } else {
    using Shared = SharedTile<rows_of_lane, Problem>;
    __shared__ uint4 shared[most_groups][(Shared::bytes(Readers::lanes, Readers::slots) + 15) / 16];
    Shared(shared[group], Readers::lanes, Readers::slots)
        .reduce(
            mine, softmax, lane, Readers::lanes, slot, Readers::slots, max, [] { __syncthreads(); },
            [&](int row, Acc top, const ShareSum<Acc>& sum) { tell(row, Mine::Part::share(top, sum)); });
  }
}

/// Blocks that reduce on a multiprocessor, at least, where the compiler would find other registers; 0: it
/// finds them. (Pairs of bfloat16 4097 x 65535 on one H200, fraction of a copy: a factor without it 0.52,
/// four 0.53; a temperature 0.415, three 0.445, four 0.425; a mask two 0.41, three 0.44, four 0.41.)
template <int rows_of_lane, class Problem>
inline constexpr int blocks_that_reduce = [] {
  if (rows_of_lane == 1 || !has_transform_v<Problem>) return 0;
  return std::is_same_v<typename Problem::Transform, BoundScale> ? 4 : 3;
}();

template <int rows_of_lane, class Problem>
__global__ void __launch_bounds__(TileBlock<Problem>::threads, blocks_that_reduce<rows_of_lane, Problem>)
    two_pass_tiles_reduce_kernel(const __grid_constant__ Problem problem,
                                 const __grid_constant__ TwoPassScratch<Problem> scratch) {
  using Readers = TileBlock<Problem>;
  using Mine = PartOfTile<Readers::columns_of_thread, rows_of_lane, Problem>;
  using Acc = typename Problem::Acc;
  using Scratch = TwoPassScratch<Problem>;
  constexpr int rows = Readers::lanes * rows_of_lane;
  grid_dependency_wait();
  if (problem.geometry.rows == 0) return;
  const int lane = static_cast<int>(threadIdx.x), slot = static_cast<int>(threadIdx.y);
  const SliceOfTile slice = scratch.slice();
  const index_type all_rows = problem.geometry.rows, first_row = static_cast<index_type>(slice.tile) * rows;
  const typename Mine::Place place(
      problem.geometry, first_row + lane * rows_of_lane,
      static_cast<index_type>(slice.slice) * columns_of_tile<Problem> + slot * Readers::columns_of_thread);
  Mine mine;
  mine.load_operands(problem, place);
  if constexpr (rows_of_lane == 2) {
    if (scratch.pairs_begin_anywhere) {
      mine.read_anywhere(problem, place);
    } else {
      mine.read(problem, place);
    }
  } else {
    mine.read(problem, place);
  }
  Acc max[rows_of_lane];
  reduce_slice_of_tile<1>(mine, problem, place, 0, lane, slot, problem.operation == Operation::softmax, max,
                          [&](int row, const PartialSoftmax<Acc>& partial) {
                            if (first_row + row < all_rows)
                              scratch.partials[slice.slice * all_rows + first_row + row] = partial.told();
                          });
  if constexpr (Scratch::has_maxima) {
    if (first_row + lane < all_rows)
      scratch.maxima[(static_cast<index_type>(slice.slice) * Scratch::shares + slot) * all_rows + first_row +
                     lane] = max[0];
  }
}

/// A block's rows: lane threadIdx.x has one, which slots threadIdx.y share.
struct TwoPassJoin {
  static constexpr int rows = 32, slots = 16;
};

/// Joins the partial results of rows in the order of grid_pipelined_tiles.
template <class Problem>
__global__ void __launch_bounds__(TwoPassJoin::rows* TwoPassJoin::slots)
    two_pass_tiles_join_kernel(const __grid_constant__ Problem problem,
                               const __grid_constant__ TwoPassScratch<Problem> scratch) {
  using Acc = typename Problem::Acc;
  using Scratch = TwoPassScratch<Problem>;
  using Partial = typename Scratch::Partial;
  constexpr unsigned slots = TwoPassJoin::slots, at_once = slices_joined_at_once;
  __shared__ Partial groups[slots][TwoPassJoin::rows];
  grid_dependency_wait();
  const index_type rows = problem.geometry.rows,
                   row = static_cast<index_type>(blockIdx.x) * TwoPassJoin::rows + threadIdx.x;
  const unsigned slot = threadIdx.y,
                 all_groups = (scratch.slices + tile_slices_joined - 1) / tile_slices_joined;
  const bool exists = row < rows;
  auto total = Partial::none();
  for (unsigned first = 0; first < all_groups; first += slots) {
    auto of_group = Partial::none();
    const unsigned group = first + slot, first_slice = group * tile_slices_joined;
    if (exists && group < all_groups) {
      const unsigned end = min(first_slice + tile_slices_joined, scratch.slices);
      for (unsigned from = first_slice; from < end; from += at_once) {
        Partial some[at_once];
#pragma unroll
        for (unsigned i = 0; i < at_once; ++i)
          some[i] = from + i < end ? scratch.partials[(from + i) * rows + row] : Partial::none();
        join_slices<at_once, at_once>(of_group, [&](unsigned i) { return some[i]; });
      }
    }
    if (all_groups == 1) {
      total = of_group;
      break;
    }
    groups[slot][threadIdx.x] = of_group.told();
    __syncthreads();
    if (slot == 0) {
      for (unsigned from = 0; from < min(slots, all_groups - first); from += at_once) {
        join_slices<at_once, 1>(total, [&](unsigned i) {
          return first + from + i < all_groups ? groups[from + i][threadIdx.x] : Partial::none();
        });
      }
    }
    __syncthreads();
  }
  if (!exists || slot != 0) return;
  const typename Scratch::Result result(problem.operation, total.told());
  if (problem.operation == Operation::logsumexp) {
    problem.y[problem.geometry.row(row).y_offset] = store_as<typename Problem::Out>(result.logsumexp());
  } else {
    scratch.results[row] = result;
  }
}

/// A block that writes: lane threadIdx.x has one row of a slice, of outputs of 16 bits two; slot threadIdx.y,
/// a warp, columns that begin at the same place between two boundaries of sectors: every so many.
template <class Problem>
struct TwoPassWriters {
  using Out = typename Problem::Out;
  static constexpr int lanes = 32, rows_of_lane = is_16_bit_v<Out> ? 2 : 1, rows = lanes * rows_of_lane;
  static constexpr int sector = rows_of_sector<Problem>, slots = sector, threads = lanes * slots;
  static constexpr int columns = columns_of_tile<Problem> / slots;                            ///< of a thread
  static constexpr int blocks = (sizeof(typename Problem::Acc) == 8 ? 512 : 1024) / threads;  ///< at least

  /// Columns of a thread whose first one this is.
  __device__ static int count_from(index_type first_column, index_type all) {
    const index_type left = all - first_column;
    return left > (columns - 1) * slots ? columns : max((static_cast<int>(left) + slots - 1) / slots, 0);
  }
  /// Rows of a slot before those of its tile, so that it begins on a boundary of sectors of y. (Tiles begin
  /// at multiples of sectors from y's first row on, and slices at multiples of columns.)
  __device__ static int rows_before(const Problem& problem, int slot) {
    const unsigned place =
        static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(problem.y) / sizeof(Out)) +
        static_cast<unsigned>(slot) * static_cast<unsigned>(problem.geometry.y_column_stride);
    return static_cast<int>(place % sector);
  }
};

/// How rows lie.
struct TwoPassRows {
  bool side_by_side;    ///< all of them, in x and y
  bool begin_anywhere;  ///< then, columns of y do, between two boundaries of sectors
};

/// A thread of a block that writes.
template <class Problem>
struct TwoPassWriter {
  using In = typename Problem::In;
  using Out = typename Problem::Out;
  using Acc = typename Problem::Acc;
  using Scratch = TwoPassScratch<Problem>;
  using Result = typename Scratch::Result;
  using Writers = TwoPassWriters<Problem>;
  using Part = PartOfSlice<ReducedAs<Problem>>;
  using OneRow = PartOfTile<Writers::columns, 1, Problem>;
  static constexpr int columns = Writers::columns, rows_of_lane = Writers::rows_of_lane,
                       sector = Writers::sector, shares = Scratch::shares;

  /// Of the rows that a block may have, from a sector before its tile on.
  struct Shared {
    static constexpr int rows = Writers::rows + sector;
    Result results[rows];
    struct Share {
      Acc max, factor;
    } of_share[shares][rows];
  };

  const Problem& problem;
  const Scratch& scratch;
  const TwoPassRows& lie;
  Shared& shared;
  SliceOfTile slice;
  int lane, slot;
  index_type first_of_tile;
  int first;  ///< row of this thread, from the tile's first one on
  index_type first_column;
  int count;  ///< of columns
  bool exists[rows_of_lane];
  RowGeometry::Row row[rows_of_lane];
  OneRow part[rows_of_lane];

  __device__ TwoPassWriter(const Problem& problem_, const Scratch& scratch_, const TwoPassRows& lie_,
                           Shared& shared_)
      : problem(problem_),
        scratch(scratch_),
        lie(lie_),
        shared(shared_),
        slice(scratch.slice()),
        lane(static_cast<int>(threadIdx.x)),
        slot(static_cast<int>(threadIdx.y)),
        first_of_tile(static_cast<index_type>(slice.tile) * Writers::rows),
        first(lane * rows_of_lane),
        first_column(static_cast<index_type>(slice.slice) * columns_of_tile<Problem> + slot) {
    const RowGeometry& g = problem.geometry;
    count = Writers::count_from(first_column, g.columns);
    if (lie.begin_anywhere) first -= Writers::rows_before(problem, slot);
#pragma unroll
    for (int v = 0; v < rows_of_lane; ++v) {
      const index_type position = first_of_tile + first + v;
      exists[v] = position >= 0 && position < g.rows;
      row[v] = g.row(exists[v] ? position : 0);
    }
  }

  __device__ void load() {
#pragma unroll
    for (int v = 0; v < rows_of_lane; ++v) {
      if (exists[v] && count != 0)
        part[v].template load_operands<Writers::slots>(problem, row[v].index, first_column, count);
    }
    const index_type begin = first_column * problem.geometry.x_column_stride,
                     distance = problem.geometry.x_column_stride * Writers::slots;
#pragma unroll
    for (int v = 0; v < rows_of_lane; ++v) {
#pragma unroll
      for (int k = 0; k < columns; ++k) part[v].held[k] = -infinity_v<Acc>;
    }
    if constexpr (rows_of_lane == 2 && sizeof(In) == 2) {
      const In* at = problem.x + row[0].x_offset + begin;
      if (has_pair() && reinterpret_cast<std::uintptr_t>(at) % (2 * sizeof(In)) == 0) {
        for_columns<columns>(count, [&](int k) {
          const unsigned pair = *reinterpret_cast<const unsigned*>(at);
          part[0].held[k] = PackedPair<In>::low(pair);
          part[1].held[k] = PackedPair<In>::high(pair);
          at += distance;
        });
        return;
      }
    }
#pragma unroll
    for (int v = 0; v < rows_of_lane; ++v) {
      if (!exists[v]) continue;
      const In* at = problem.x + row[v].x_offset + begin;
      for_columns<columns>(count, [&](int k) {
        part[v].held[k] = load_as<Acc>(*at);
        at += distance;
      });
    }
  }

  /// What all threads of the block need to know of its rows.
  __device__ void find_results() const {
    constexpr int rows = Shared::rows;
    const index_type all = problem.geometry.rows, of_slice = static_cast<index_type>(slice.slice) * all;
    const bool has_exponentials = Result::keeps_exponentials && problem.operation == Operation::softmax;
    const int entries = has_exponentials ? shares * rows : rows;
#pragma unroll 1
    for (int i = slot * Writers::lanes + lane; i < entries; i += Writers::threads) {
      const int share = i / rows, in_shared = i - share * rows;
      const index_type of = first_of_tile - sector + in_shared;
      if (of < 0 || of >= all) continue;
      const Result result = scratch.results[of];
      if (share == 0) shared.results[in_shared] = result;
      if constexpr (Result::keeps_exponentials) {
        if (!has_exponentials) continue;
        Acc max;
        if constexpr (Scratch::has_maxima) {
          max = scratch.maxima[of_slice * shares + share * all + of];
        } else {
          max = scratch.partials[of_slice + of].max;
        }
        shared.of_share[share][in_shared] = {max, result.factor_of_share(finite_maximum(max))};
      }
    }
  }

  __device__ void transform() {
    if constexpr (has_transform_v<Problem>) {
      if (count == 0) return;
#pragma unroll
      for (int v = 0; v < rows_of_lane; ++v) {
        if (!exists[v]) continue;
        part[v].template transform<Writers::slots>(problem, row[v].index, first_column, count);
      }
    }
  }

  __device__ void form_outputs() {
#pragma unroll
    for (int v = 0; v < rows_of_lane; ++v) {
      const int of_row = first + v + sector;
      if constexpr (Result::keeps_exponentials) {
        if (problem.operation == Operation::softmax) {
          scale_exponentials(part[v].held, of_row);
          continue;
        }
      }
      part[v].with_output(0, shared.results[of_row], [&](const auto& output) {
#pragma unroll
        for (int k = 0; k < columns; ++k) part[v].held[k] = output(part[v].held[k]);
      });
    }
  }

  __device__ void store() const {
    const RowGeometry& g = problem.geometry;
    const index_type begin = first_column * g.y_column_stride, distance = g.y_column_stride * Writers::slots;
    if constexpr (rows_of_lane == 2) {
      Out* at = problem.y + row[0].y_offset + begin;
      if (has_pair() && reinterpret_cast<std::uintptr_t>(at) % (2 * sizeof(Out)) == 0) {
        for_columns<columns>(count, [&](int k) {
          *reinterpret_cast<unsigned*>(at) = rounded_pair<Out>(part[0].held[k], part[1].held[k]);
          at += distance;
        });
        return;
      }
    }
#pragma unroll
    for (int v = 0; v < rows_of_lane; ++v) {
      if (!exists[v]) continue;
      Out* at = problem.y + row[v].y_offset + begin;
      for_columns<columns>(count, [&](int k) {
        *at = store_as<Out>(part[v].held[k]);
        at += distance;
      });
    }
  }

 private:
  __device__ bool has_pair() const {
    return lie.side_by_side && exists[0] && exists[rows_of_lane - 1];
  }
  __device__ void scale_exponentials(Acc (&logits)[columns], int of_row) const {
    constexpr int of_share = columns / shares;
#pragma unroll
    for (int share = 0; share < shares; ++share) {
      const auto [max, factor] = shared.of_share[share][of_row];
      const auto exponential = Part::exponential_below(max);
#pragma unroll
      for (int k = share * of_share; k < (share + 1) * of_share; ++k) {
        const Acc e = exponential.uncorrected(logits[k]);
        logits[k] = (makes_logits<Problem> ? Result::kept(e) : e) * factor;
      }
    }
  }
};

template <class Problem>
__global__ void __launch_bounds__(TwoPassWriters<Problem>::threads, TwoPassWriters<Problem>::blocks)
    two_pass_tiles_write_kernel(const __grid_constant__ Problem problem,
                                const __grid_constant__ TwoPassScratch<Problem> scratch,
                                const __grid_constant__ TwoPassRows lie) {
  using Writer = TwoPassWriter<Problem>;
  __shared__ typename Writer::Shared shared;
  grid_dependency_wait();
  if (problem.geometry.rows == 0) return;
  Writer writer(problem, scratch, lie, shared);
  writer.load();
  writer.find_results();
  __syncthreads();
  writer.transform();
  writer.form_outputs();
  writer.store();
}

/// Whether rows side by side stay pairs of 16 bits until they are outputs: half the registers.
template <class Problem>
inline constexpr bool writes_pairs = takes_pairs<Problem>&& is_16_bit_v<typename Problem::Out>;

/// two_pass_tiles_write_kernel for these. (One H200, 1 GiB of bfloat16 whose columns begin anywhere,
/// fractions of a copy, reduced and written one by one and so: 1000 columns 0.45 and 0.51, 4097 0.45 and
/// 0.53, 16385 0.49 and 0.58, 65537 0.52 and 0.605, logsumexp of 4097, of half a copy, 0.61 and 0.70. With
/// three blocks a multiprocessor in place of two 1000 columns 0.50, with outputs of a pair formed together
/// 0.45, both 0.40. Floats with five or six in place of four 0.05 to 0.15 less, with the hint that x is not
/// needed again 0.03 to 0.06.)
template <class Problem>
__global__ void __launch_bounds__(TwoPassWriters<Problem>::threads, TwoPassWriters<Problem>::blocks)
    two_pass_tiles_write_pairs_kernel(const __grid_constant__ Problem problem,
                                      const __grid_constant__ TwoPassScratch<Problem> scratch,
                                      const __grid_constant__ TwoPassRows lie) {
  using Out = typename Problem::Out;
  using Writers = TwoPassWriters<Problem>;
  using Pairs = PartOfTile<Writers::columns, 2, Problem>;
  grid_dependency_wait();
  const RowGeometry& g = problem.geometry;
  if (g.rows == 0) return;
  const SliceOfTile slice = scratch.slice();
  const int slot = static_cast<int>(threadIdx.y);
  const index_type first_column = static_cast<index_type>(slice.slice) * columns_of_tile<Problem> + slot;
  const int count = Writers::count_from(first_column, g.columns);
  const index_type row = static_cast<index_type>(slice.tile) * Writers::rows +
                         static_cast<int>(threadIdx.x) * 2 -
                         (lie.begin_anywhere ? Writers::rows_before(problem, slot) : 0);
  const bool first = row >= 0 && row < g.rows, second = row >= -1 && row + 1 < g.rows;
  if (count == 0 || !(first || second)) return;
  Pairs pairs;
  // (Of a row that is not there the other one's operands.)
  const index_type first_there = first ? row : row + 1, last_there = second ? row + 1 : row;
  const typename Pairs::Numbers number(g, first_there, last_there);
  pairs.template load_operands<Writers::slots>(problem, number, first_column, count);
  const index_type distance_of_x = g.x_column_stride * Writers::slots,
                   distance_of_y = g.y_column_stride * Writers::slots;
  load_pairs_anywhere<Writers::columns>(problem.x + row + first_column * g.x_column_stride, distance_of_x,
                                        count, first, second, pairs.held);
  pairs.template transform<Writers::slots>(problem, number, first_column, count);
  typename Pairs::Result result[2];
  result[0] = scratch.results[first_there];
  result[1] = scratch.results[last_there];
  auto* const y = reinterpret_cast<unsigned short*>(problem.y + row + first_column * g.y_column_stride);
  auto* at = y;
  const bool at_once = first && second && reinterpret_cast<std::uintptr_t>(y) % 4 == 0;
  const float unused[2] = {0, 0};
  pairs.for_outputs(problem.operation, unused, result, count, [&](int k, int, unsigned pair) {
    if (k == 0) at = y;
    if (at_once) {
      *reinterpret_cast<unsigned*>(at) = pair;
    } else {
      if (first) at[0] = static_cast<unsigned short>(pair);
      if (second) at[1] = static_cast<unsigned short>(pair >> 16);
    }
    at += distance_of_y;
  });
}

struct TwoPassTiles {
  static constexpr const char* name = "two_pass_tiles";

  template <class Exec, class Problem>
  static constexpr bool supports = sliced_rows_support<Exec, Problem>;

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec&, const Problem& problem) {
    if (!problem.axis_is_strided) return "the axis is the fastest dimension in memory";
    if (slices_of_tiles(problem) == 1) return "rows are too short";
    return {};
  }

  template <class Exec, class Problem>
  static std::string_view advise_against(const Exec& exec, const Problem& problem) {
    if constexpr (GridPipelinedTiles::supports<Exec, Problem>) {
      if (GridPipelinedTiles::refuse(exec, problem).empty()) return advice_where_rows_can_wait(exec, problem);
    }
    return {};
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    // `reserve` launches over no rows: that loads all kernels, which a capture could not do.
    const bool no_rows = problem.geometry.rows == 0, on_boundaries = rows_come_in_pairs(problem),
               pairs = on_boundaries || come_in_pairs_anywhere(exec, problem);
    const RowGeometry& g = problem.geometry;
    TwoPassScratch<Problem> scratch(ScratchPool<Kokkos::Cuda::memory_space>::get(exec, bytes(problem)),
                                    g.rows, slices_of_tiles(problem));
    const std::string label = kernel_label(problem.operation, name);
    if constexpr (takes_pairs<Problem>) {
      scratch.pairs_begin_anywhere = !on_boundaries;
      if (pairs || no_rows) reduce<2>(exec, label, problem, scratch);
    }
    if (!takes_pairs<Problem> || !pairs || no_rows) reduce<1>(exec, label, problem, scratch);
    launch_with_shared<&two_pass_tiles_join_kernel<Problem>>(
        exec, label + "::join", ceil_div(g.rows, TwoPassJoin::rows),
        dim3(TwoPassJoin::rows, TwoPassJoin::slots), 0, problem, scratch);
    if (problem.operation != Operation::logsumexp) write(exec, label, problem, scratch);
  }

  template <class Exec, class Problem>
  static void reserve(const Exec& exec, const Problem& problem) {
    reserve_scratch(exec, problem);
    // Fewer rows, and others that lie elsewhere, may be for grid_pipelined_tiles.
    if constexpr (GridPipelinedTiles::supports<Exec, Problem>) {
      if (GridPipelinedTiles::refuse(exec, problem).empty())
        GridPipelinedTiles::reserve_for_others(exec, problem);
    }
  }
  /// And these kernels for some of those that are for that one.
  template <class Exec, class Problem>
  static void reserve_for_shorter_rows(const Exec& exec, const Problem& problem) {
    if (!refuse(exec, problem).empty()) return;
    reserve_scratch(exec, problem);
    run(exec, no_rows_of(problem, problem.geometry.columns));
  }

 private:
  template <class Problem>
  static std::size_t bytes(const Problem& problem) {
    return TwoPassScratch<Problem>::bytes(std::max<index_type>(problem.geometry.rows, 1),
                                          slices_of_tiles(problem));
  }
  template <class Exec, class Problem>
  static void reserve_scratch(const Exec& exec, const Problem& problem) {
    ScratchPool<Kokkos::Cuda::memory_space>::reserve(exec, bytes(problem));
  }

  /// Of rows that grid_pipelined_tiles has in shared memory until they are written. (What was measured: one
  /// H100, fraction of a copy, that kernel and these.)
  template <class Exec, class Problem>
  static std::string_view advice_where_rows_can_wait(const Exec& exec, const Problem& problem) {
    using In = typename Problem::In;
    using Out = typename Problem::Out;
    constexpr bool has_transform = makes_logits<Problem>, is_16_bit = sizeof(In) == 2,
                   keeps_exponentials = ResultOfTileRow<Problem>::keeps_exponentials;
    constexpr const char* boxes_are_faster = "boxes of columns, read once, are faster";
    const RowGeometry& g = problem.geometry;
    const index_type slices = slices_of_tiles(problem);
    if (GridPipelinedTiles::come_as_boxes_anywhere(problem)) return boxes_are_faster;
    if constexpr (sizeof(In) == 8) {
      // (One H200, fraction of a copy, double, grid_pipelined_tiles and this kernel: 1000 columns 0.75 and
      // 0.52, 4096 0.69 and 0.57, 8192 0.66 and 0.60, 12288 0.64 and 0.60, 16384 0.62 and 0.61, 24576 0.54
      // and 0.61, that begin anywhere 1000 0.63 and 0.52, 2048 0.60 and 0.54, 4096 0.54 and 0.56; with a
      // factor 1000 0.67 and 0.47, 16384 0.58 and 0.53, a bias as large as x 0.66 and 0.49, 0.59 and 0.55,
      // GELU 0.395 and 0.26, 0.40 and 0.28; logsumexp, of half a copy, 1000 0.53 and 0.68.)
      constexpr index_type many_slices_of_double = 128;
      return problem.operation != Operation::logsumexp && g.rank <= 1 && slices <= many_slices_of_double &&
                     BoxesOfTiles::come_as_boxes(problem, 32)
                 ? boxes_are_faster
                 : "";
    }
    // (Microseconds in a stream: float 1001 x 1000 13.7 and 15.2, 100 x 5000 13.5 and 15.1, 1001 x 5000 32.9
    // and 28.3.)
    if (ceil_div(g.rows, TileBlock<Problem>::lanes) * slices <
        2 * exec.cuda_device_prop().multiProcessorCount)
      return "there are too few rows for three kernels";
    const bool by_boxes = BoxesOfTiles::come_as_boxes(problem, 16);
    if (problem.operation == Operation::logsumexp) {
      // (Of reading at a copy's speed: float 512 columns 0.85 and 0.81, 2000 0.85 and 0.87, 65536 0.58 and
      // 0.94; that begin anywhere 512 0.59 and 0.77, 65536 0.48 and 0.89.)
      return by_boxes && slices < 8 ? boxes_are_faster : "";
    }
    // (Bfloat16 to float, whose outputs are stored by threads: 1000 columns 0.43 and 0.60, 65536 0.35 and
    // 0.70; with a factor 0.82 and 0.58, 0.61 and 0.68.)
    if constexpr (sizeof(In) != sizeof(Out) && !has_transform) return {};
    // (Images of 13 x 13 float 0.56 and 0.40, bfloat16 0.47 and 0.31.)
    if (g.rank > 1) return "rows of several dimensions are read twice at half the speed";
    // (Float 65536 columns 0.69 and 0.63; bfloat16 32768 0.68 and 0.63, 65536 0.59 and 0.64, with a factor
    // 0.65 and 0.47, 0.55 and 0.47, half 0.64 and 0.61, 0.55 and 0.61.)
    // (One H200, bfloat16 in pairs: 24576 columns 0.656 and 0.60, 32768 0.65 and 0.63, 49152 0.59 and 0.63,
    // with a factor 0.62 and 0.60, 0.61 and 0.63, 0.56 and 0.63; where they do not begin on boundaries of 32
    // bytes 2000 0.57 and 0.53, 4096 0.55 and 0.565, 8192 0.52 and 0.57.)
    // (One H200, float: 32768 columns 0.71 and 0.64, 49152 0.64 and 0.63, 65536 0.62 and 0.64, with a factor
    // 0.68 and 0.62, 0.615 twice, 0.585 and 0.63, GELU 65536 0.555 and 0.58, but a temperature 0.55 and 0.56,
    // a mask as large as x 0.52 and 0.51, a bias for all rows 0.53 twice.)
    constexpr bool reads_x_alone = operands_of<typename Problem::Transform> == 0;
    constexpr index_type many_slices = !writes_pairs<Problem> ? 192 : multiplies_packed<Problem> ? 96 : 128;
    if (by_boxes && columns_begin_at(problem, 32)) {
      // (The device is asked last: that takes a lock.)
      const bool read_twice =
          slices > many_slices &&
          (is_16_bit ? !keeps_exponentials : reads_x_alone && has_fast_memory(exec.cuda_device()));
      return read_twice ? "" : boxes_are_faster;
    }
    // (One H200, in wide boxes and by this kernel: float 8192 columns 0.68 and 0.58, 16384 0.64 and 0.60,
    // bfloat16 4000 0.60 and 0.555, 8192 0.55 and 0.575.)
    if (GridPipelinedTiles::come_as_wide_boxes(exec, problem)) return boxes_are_faster;
    // (Float 8192 columns 0.62 and 0.59, 32768 0.57 and 0.61, bfloat16 0.59 both, 0.50 and 0.62.)
    constexpr index_type many_slices_anywhere = writes_pairs<Problem> ? 12 : 32;
    if (by_boxes) return slices > many_slices_anywhere ? "" : boxes_are_faster;
    // (Bfloat16 whose exponentials are kept in pairs, with a factor: 300 columns 0.32 and 0.29, 1000 0.39 and
    // 0.43, 65536 0.25 and 0.47; on boundaries of pairs 1000 0.46 and 0.43, 8192 0.46 and 0.45, 32768 0.38
    // and 0.47. Half 300 0.32 and 0.38, 65536 0.25 and 0.61.)
    if constexpr (is_16_bit && keeps_exponentials) {
      if (slices <= (columns_begin_at(problem, 4) ? 64 : 3))
        return "what a transform makes of two logits at once waits in shared memory";
    }
    return {};
  }

  template <int rows_of_lane, class Problem>
  static void reduce(const Kokkos::Cuda& exec, const std::string& label, const Problem& problem,
                     TwoPassScratch<Problem> scratch) {
    using Readers = TileBlock<Problem>;
    const index_type tiles = ceil_div(problem.geometry.rows, Readers::lanes * rows_of_lane);
    scratch.tiles = static_cast<unsigned>(std::max<index_type>(tiles, 1));
    launch_with_shared<&two_pass_tiles_reduce_kernel<rows_of_lane, Problem>>(
        exec, label + "::reduce", tiles * scratch.slices, dim3(Readers::lanes, Readers::slots), 0, problem,
        scratch);
  }
  template <class Problem>
  static void write(const Kokkos::Cuda& exec, const std::string& label, const Problem& problem,
                    TwoPassScratch<Problem> scratch) {
    using Writers = TwoPassWriters<Problem>;
    const TwoPassRows lie = rows_lie(problem);
    const bool no_rows = problem.geometry.rows == 0, pairs = writes_pairs<Problem> && lie.side_by_side;
    const index_type rows = problem.geometry.rows + (lie.begin_anywhere ? Writers::sector - 1 : 0),
                     tiles = no_rows ? 0 : ceil_div(rows, Writers::rows);
    scratch.tiles = static_cast<unsigned>(std::max<index_type>(tiles, 1));
    const index_type blocks = tiles * scratch.slices;
    const dim3 threads(Writers::lanes, Writers::slots);
    if constexpr (writes_pairs<Problem>) {
      if (pairs || no_rows)
        launch_with_shared<&two_pass_tiles_write_pairs_kernel<Problem>>(exec, label + "::write", blocks,
                                                                        threads, 0, problem, scratch, lie);
    }
    if (!pairs || no_rows)
      launch_with_shared<&two_pass_tiles_write_kernel<Problem>>(exec, label + "::write", blocks, threads, 0,
                                                                problem, scratch, lie);
  }

  /// Whether rows are to be reduced in pairs where these do not begin on boundaries. (Microseconds of 2001 x
  /// 3001, 376 blocks, one by one and so: 17.3 and 19.5.)
  template <class Problem>
  static bool come_in_pairs_anywhere(const Kokkos::Cuda& exec, const Problem& problem) {
    constexpr index_type blocks_of_multiprocessor = 8;
    return takes_pairs<Problem> && rows_lie(problem).side_by_side &&
           ceil_div(problem.geometry.rows, 2 * TileBlock<Problem>::lanes) * slices_of_tiles(problem) >=
               blocks_of_multiprocessor * exec.cuda_device_prop().multiProcessorCount;
  }

  template <class Problem>
  static TwoPassRows rows_lie(const Problem& problem) {
    const RowGeometry& g = problem.geometry;
    TwoPassRows lie{};
    lie.side_by_side = g.rank == 0 || (g.rank == 1 && g.x_stride[0] == 1 && g.y_stride[0] == 1);
    constexpr std::size_t sector = 32;
    lie.begin_anywhere =
        lie.side_by_side &&
        (reinterpret_cast<std::uintptr_t>(problem.y) % sector != 0 ||
         g.y_column_stride % static_cast<index_type>(sector / sizeof(typename Problem::Out)) != 0);
    return lie;
  }
};

}  // namespace KokkosSoftmax::impl

#endif
