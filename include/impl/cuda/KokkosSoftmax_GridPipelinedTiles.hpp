// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The CUDA kernel for long rows whose columns are not contiguous (compute capability 9.0): tiles of them
/// (see KokkosSoftmax_RowTiles.hpp) are cut in slices, by length and type alone. Resident blocks draw slices
/// in order, those of a tile one after the other, into a ring of slots in shared memory. A slice that has
/// come is reduced, and its rows' (max, sum) told to the other blocks through L2; the block that has a tile's
/// last slice joins them all and tells the result; a slice is written when that is known, and meanwhile the
/// next ones come. Eight warps reduce slices and form outputs; beside them one asks for results, one or two
/// join, and one has boxes come and go: ways to L2 and back that the eight would wait for. (4096 x 32768
/// floats on one H100, fraction of a copy, eight warps that do it all 0.75, with one beside them that does
/// the rest but copy 0.75, with boxes 0.86, with three 0.87, and of 16384 columns 0.58 and 0.75.) Where
/// columns begin anywhere, more warps store what no box could.
///
/// Blocks wait for each other: the launch is cooperative, so that all are there, and a block that cannot
/// write yet goes on with what it has to tell others, in whatever order that comes.

#ifndef KOKKOSSOFTMAX_GRIDPIPELINEDTILES_HPP
#define KOKKOSSOFTMAX_GRIDPIPELINEDTILES_HPP

#include <impl/cuda/KokkosSoftmax_HopperPtx.hpp>
#include <impl/cuda/KokkosSoftmax_RowTiles.hpp>
#include <impl/cuda/KokkosSoftmax_TensorMap.hpp>

#include <algorithm>
#include <string_view>

namespace KokkosSoftmax::impl {

/// Those who reduce a slice: lanes across rows, `slots` along its columns.
template <class Problem>
struct TileBlock {
  static constexpr int lanes = 32, slots = 8, threads = lanes * slots,
                       columns_of_thread = columns_of_tile<Problem> / slots;
};

/// How slices come and go. Boxes are twice as wide where a block has two sides, with half the rows each.
/// Columns that begin anywhere come as such boxes of every fourth column, of doubles of every other one, of
/// 16 bits of every eighth, for these are as far apart as the copy engine asks for, and are stored by
/// threads.
enum class TilesCome { by_threads, by_boxes, by_wide_boxes, by_boxes_anywhere };

/// A block. Memory that is written in pieces of 256 bytes on boundaries of as many takes more of them than in
/// pieces of 128; how wide they are that are read is all the same. (One H200, columns of 1024 x 262144 floats
/// that are only copied, fraction of a copy, boxes of 128 bytes by 256 columns both ways 0.75 to 0.80, of 256
/// bytes 0.915, read in such and written in the others 0.86, the other way round 0.915; softmax 0.81 and
/// 0.84.)
template <TilesCome come, class Problem>
struct SidesOfTileBlock {
  static constexpr bool boxes = come != TilesCome::by_threads,
                        anywhere = come == TilesCome::by_boxes_anywhere;
  static constexpr int sides = come == TilesCome::by_wide_boxes || anywhere ? 2 : 1;
  static constexpr int bytes_of_boundary = 16;  ///< of what the copy engine reads
  static constexpr int boxes_of_slice =
                           anywhere ? bytes_of_boundary / static_cast<int>(sizeof(typename Problem::In)) : 1,
                       columns_of_box = columns_of_tile<Problem> / boxes_of_slice;
  /// With those that ask and join, the one that copies, and those that store, half a box, one or two each.
  /// (Two that join cost no registers where there are boxes. One H200, fractions of a copy, one and two:
  /// double 3000 columns 0.63 and 0.70, 4096 0.60 and 0.69, 16384 0.53 and 0.62, bfloat16 3000 0.627 and
  /// 0.669, 8192 0.685 and 0.696, 16384 0.672 and 0.697; but float, each for half of a tile's 32 rows, 1000
  /// 0.866 and 0.855, 4096 0.814 and 0.806.)
  static constexpr int joining_warps = boxes && sizeof(typename Problem::In) != 4 ? 2 : 1,
                       warps_of_side = TileBlock<Problem>::threads / 32 + 1 + joining_warps,
                       storing_warps = anywhere ? 4 : 0,
                       warps = sides * warps_of_side + (boxes ? 1 : 0) + storing_warps, threads = warps * 32;
  static constexpr int blocks_a_multiprocessor = 2 / sides;

  /// Rows of a tile that the next one has, too, where columns begin anywhere: of each column as many less
  /// than a tile has are stored, from where a sector of memory begins in it, so that none is written in part.
  /// (One H200, 1000 columns of floats, fraction of a copy: 0.73, by cluster_per_tile, whose blocks write the
  /// first and the last sector of 64 rows in part, 0.605.)
  static constexpr int rows_again = anywhere ? rows_of_sector<Problem> : 0;
  /// Of a box, before the tile's: it begins on a boundary.
  static constexpr int rows_before = anywhere ? boxes_of_slice : 0;
};

struct SliceOfTile {
  unsigned tile, slice;
};

/// Slices whose results are joined first, by the block that has the last of them; where there are more, those
/// of all these then by the block that has the row's last one. (16384 columns on one H200, fraction of a
/// copy, all joined by one and so: float 0.69 and 0.75, bfloat16 0.49 and 0.64.)
inline constexpr unsigned tile_slices_joined = 16;

/// How the copy engine takes slices: as boxes of tensors of the rows that are neighbours, the columns, and
/// two more dimensions of rows.
template <TilesCome come>
struct TileBoxes {
  CUtensorMap x, y;
  /// Of the rows that are neighbours, those of which boxes have the outputs: where the copy engine would have
  /// a part of 16 bytes it writes all of them.
  index_type rows_stored;
  int rows_before;          ///< see rows_before_boundary: the first tile begins so many before the first row
  unsigned tiles_of_inner;  ///< of the rows that are neighbours
  unsigned extent;          ///< of the next dimension
};

/// The same of columns of x in turn, from each of the first ones on.
template <>
struct TileBoxes<TilesCome::by_boxes_anywhere> {
  static constexpr int most = 8;
  CUtensorMap in_turn[most];
  int first_row[most];  ///< behind the boundaries that these begin on
  unsigned tiles_of_inner, extent;
};

template <TilesCome come, class Problem>
struct TilesCall {
  Problem problem;
  CudaWorkspace workspace;
  unsigned tickets;  ///< slices of all tiles
  unsigned slices;   ///< of a tile
  unsigned tiles;
  TileBoxes<come> boxes;
  bool pairs;        ///< rows_come_in_pairs
  bool askers_join;  ///< see AskerOfTiles
  bool draws_early;  ///< tickets: once the results of a slot's rows are known, not once its outputs are there

  __device__ SliceOfTile slice(unsigned ticket) const {
    const unsigned tile = ticket / slices;
    return {tile, ticket - tile * slices};
  }
};

/// Shared memory of a side of a block, but for sums.
template <int rows_of_lane, class Problem>
struct SharedRing {
  static constexpr int rows = TileBlock<Problem>::lanes * rows_of_lane;
  static constexpr int slots = 3;  ///< as many as two sides have room for on a multiprocessor

  ResultOfTileRow<Problem> results[slots][rows];
  Mbarrier told[slots];   ///< a slice has been reduced
  Mbarrier known[slots];  ///< the results of its rows are there

  /// Temperatures of rows that stay packed, which whoever has a slice come brings along: those that reduce it
  /// and form its outputs would wait for them. (One H200, bfloat16 4096 x 65536, fraction of a copy: read by
  /// these 0.55, so 0.64.)
  static constexpr bool has_temperatures =
      stays_packed<Problem> && PartsOfChain<typename Problem::Transform>::temperatures != 0;
  float temperatures[slots][has_temperatures ? rows : 1];
};

/// Of a side.
template <int rows_of_lane, class Problem, bool transforms = makes_logits<Problem>>
struct SharedTiles : SharedRing<rows_of_lane, Problem> {
  using Ring = SharedRing<rows_of_lane, Problem>;
  using Acc = typename Problem::Acc;
  using Block = TileBlock<Problem>;
  static constexpr int columns = Block::columns_of_thread;
  using Mine = PartOfTile<columns, rows_of_lane, Problem>;
  using Held = typename Mine::Held;
  using Raw = typename Mine::Raw;
  /// Whether memory is copied to slots by itself: it comes as it is held, and no less than 4 bytes.
  static constexpr bool copies = sizeof(Raw) == sizeof(Held);
  /// What a slot has of a column.
  using OfColumn = Held[Block::lanes];

  ShareSum<Acc> sums[Block::slots][Ring::rows];
  Acc maxima_of_rows[Ring::rows];  ///< behind these sums, see SharedTile
  Held tops[Block::slots][Block::lanes];
  Acc maxima[Ring::slots][Ring::rows];  ///< of what is in the slots
};

/// Where there is a transform slots have rows, as x has them; what a transform makes of 16 bits does not fit,
/// unless it is a PackedExponential, and is made once more.
template <int rows_of_lane, class Problem>
struct SharedTiles<rows_of_lane, Problem, true> : SharedRing<rows_of_lane, Problem> {
  using Ring = SharedRing<rows_of_lane, Problem>;
  using Acc = typename Problem::Acc;
  using Block = TileBlock<Problem>;
  static constexpr int columns = Block::columns_of_thread;
  using Mine = PartOfTile<columns, 1, Problem>;
  using Raw = typename Mine::Raw;
  static constexpr bool copies = true;
  using OfColumn = Raw[Ring::rows];

  ShareSum<Acc> sums[Block::slots][Ring::rows];
  Acc maxima[Ring::slots][Block::slots][Ring::rows];  ///< of each thread's columns
};

/// Where a row of a tile of boxes lies: these do not go on in the next dimension.
struct RowOfBoxes {
  unsigned outer;    ///< in the other dimensions
  index_type inner;  ///< in the fastest one; negative in front of the first row
};

/// The slots hold slices while they are on their way and while they wait.
template <TilesCome come, int rows_of_lane, class Problem>
struct SharedTileBlock {
  using Side = SharedTiles<rows_of_lane, Problem>;
  using Sides = SidesOfTileBlock<come, Problem>;
  static constexpr int sides = Sides::sides, slots = Side::slots;
  static constexpr int rows_of_box = Sides::rows_before + sides * Side::rows;
  /// Of boxes of columns in turn, the boxes one behind the other.
  using Slot =
      std::conditional_t<Sides::anywhere,
                         typename Problem::In[Sides::boxes_of_slice][Sides::columns_of_box][rows_of_box],
                         typename Side::OfColumn[TileBlock<Problem>::slots][Side::columns][sides]>;

  alignas(128) Slot held[slots];
  static constexpr std::uint32_t slot_bytes = sizeof(held[0]);
  Side side[sides];
  Mbarrier full[slots];     ///< boxes: a slice has come
  Mbarrier written[slots];  ///< boxes: its outputs are there
  Mbarrier stored[slots];   ///< and, by threads, in y
  Mbarrier to_join[slots];  ///< slices up to the next one of these
  SliceOfTile slice[slots];
  RowOfBoxes first_row[slots];  ///< boxes: of these, so that not every thread divides to know it
  SliceOfTile to_join_to[slots];
  SliceOfTile next;
  unsigned next_ticket;
};

/// A thread of a side of a block.
template <TilesCome come, int rows_of_lane, class Problem>
struct TilesOfBlock {
  using SharedBlock = SharedTileBlock<come, rows_of_lane, Problem>;
  using Sides = typename SharedBlock::Sides;
  using Shared = typename SharedBlock::Side;
  using Mine = typename Shared::Mine;
  using Result = typename Mine::Result;
  using Acc = typename Problem::Acc;
  using Words = PartialWords<Acc>;
  /// Rows of a side, of a tile, and from tile to tile.
  static constexpr int sides = SharedBlock::sides, rows = Shared::rows, rows_of_tile = sides * rows,
                       rows_of_step = rows_of_tile - Sides::rows_again, slots = Shared::slots;
  static constexpr bool boxes = Sides::boxes, anywhere = Sides::anywhere;
  /// Whether outputs leave as boxes, too, where logits come so.
  static constexpr bool stores_boxes = sizeof(typename Problem::Out) == sizeof(typename Problem::In);

  const TilesCall<come, Problem>& call;
  SharedBlock& block;
  Shared& shared;  ///< of this side
  int side;
  std::uint32_t tag;
  bool reduces;

  __device__ TilesOfBlock(const TilesCall<come, Problem>& call_, SharedBlock& block_, int side_,
                          std::uint32_t tag_)
      : call(call_),
        block(block_),
        shared(block_.side[side_]),
        side(side_),
        tag(tag_),
        reduces(call_.problem.operation == Operation::logsumexp) {}

  /// Of a tile, for each row of this side: a word of each slice, one of each `tile_slices_joined` of them,
  /// and one of all.
  __device__ Words* words(unsigned tile, unsigned word) const {
    return call.workspace.template partials<Acc>() +
           ((static_cast<index_type>(tile) * sides + side) * (call.slices + joins() + 1) + word) * rows;
  }
  /// Lanes of a warp that join what is told of a row. (For all of a double's slices one would not have the
  /// registers.)
  static constexpr int lanes_of_row = sizeof(Acc) == 8 ? 2 : 1, rows_of_warp = 32 / lanes_of_row;
  /// Joins what slices of a tile have told of so many rows from `first_row` on, by a warp; `words` are the
  /// first slice's. Waits for them. use(row, result) by one of a row's lanes. (Of more rows than have lanes
  /// the caller does one after the other: by turns they would have to wait once for the last slices of both,
  /// but bfloat16 2048 columns have 0.70 of a copy for 0.73, double 4096 0.55 for 0.60; both at once take too
  /// many registers.)
  template <bool asks_for_all, class Use>
  __device__ __forceinline__ void join_rows(const Words* words, unsigned count, int first_row,
                                            const Use& use) const {
    constexpr unsigned of_lane = slices_joined_at_once / lanes_of_row;
    const int lane = static_cast<int>(threadIdx.x) % 32, which = lane / rows_of_warp,
              row = first_row + lane % rows_of_warp;
    auto have = PartialSoftmax<Acc>::none();
#pragma unroll 1
    for (unsigned first = 0; first < count; first += slices_joined_at_once) {
      const unsigned mine = first + which * of_lane, left = mine < count ? count - mine : 0;
      Words of[of_lane];
      wait_for_words<asks_for_all>(words + mine * rows + row, left, of);
      const auto partial = [&](unsigned i) { return i < left ? of[i].value() : PartialSoftmax<Acc>::none(); };
      if constexpr (lanes_of_row == 1) {
        join_slices<of_lane, of_lane>(have, partial);
      } else {
        join_in_turn<of_lane>(have, partial);
      }
    }
    if (which == 0) use(row, have);
  }
  /// Asks for some words of a lane until all of its warp's are there, for all of them or for those that are
  /// missing. (One H200, fractions of a copy, for all, for these by those who ask, and by those who join,
  /// too: float 1000 columns 0.860, 0.865 and 0.866, that begin anywhere 0.729, 0.735 and 0.747, 1500 0.856,
  /// 0.867 and 0.872, 4096 0.798, 0.810 and 0.800, bfloat16 1000 0.749 and 0.77, 4096 0.692, 0.702 and 0.687,
  /// 8192 0.667, 0.682 and 0.655.)
  template <bool for_all, unsigned most>
  __device__ __forceinline__ void wait_for_words(const Words* words, unsigned count,
                                                 Words (&of)[most]) const {
    bool missing[most], any = true;
#pragma unroll
    for (unsigned i = 0; i < most; ++i) missing[i] = i < count;
    while (__any_sync(0xffffffffu, any)) {
#pragma unroll
      for (unsigned i = 0; i < most; ++i) {
        if (for_all ? i < count : missing[i]) of[i] = Words::load(words + i * rows);
      }
      any = false;
#pragma unroll
      for (unsigned i = 0; i < most; ++i) {
        missing[i] = (for_all ? i < count : missing[i]) && !of[i].is_of(tag);
        any = any || missing[i];
      }
    }
  }
  /// As join_slices, of slices of which the two lanes of a row have the first and the last.
  template <unsigned of_lane, class PartialOf>
  __device__ __forceinline__ static void join_in_turn(PartialSoftmax<Acc>& have,
                                                      const PartialOf& partial_of) {
    PartialSoftmax<Acc> partial[of_lane];
    Acc max = have.max;
#pragma unroll
    for (unsigned i = 0; i < of_lane; ++i) {
      partial[i] = partial_of(i);
      max = Kokkos::fmax(max, partial[i].max);
    }
    max = Kokkos::fmax(max, __shfl_xor_sync(0xffffffffu, max, rows_of_warp));
    have.sum.scale(exp_between_maxima(have.max - max));
    have.max = max;
    Acc scale[of_lane];
#pragma unroll
    for (unsigned i = 0; i < of_lane; ++i) scale[i] = partial[i].max - max;
    ExponentialBelow<Acc>(0).replace(scale);
#pragma unroll
    for (unsigned i = 0; i < of_lane; ++i) partial[i].sum.scale(scale[i]);
#pragma unroll
    for (int turn = 0; turn < lanes_of_row; ++turn) {
      ExactSum<Acc> sum = have.sum;
#pragma unroll
      for (unsigned i = 0; i < of_lane; ++i) sum.join(partial[i].sum);
      have.sum = sum.from_lane(turn * rows_of_warp + static_cast<int>(threadIdx.x) % rows_of_warp);
    }
  }
  __device__ unsigned joins() const {
    return (call.slices + tile_slices_joined - 1) / tile_slices_joined;
  }
  __device__ Words* results_of(unsigned tile) const {
    return words(tile, call.slices + joins());
  }
  __device__ unsigned draw() const {
    return static_cast<unsigned>(atomicAdd(&call.workspace.header->next_ticket, 1ull));
  }
  __device__ int rows_before() const {
    if constexpr (come == TilesCome::by_wide_boxes) return call.boxes.rows_before;
    return 0;
  }
  __device__ RowOfBoxes first_row_of_boxes(unsigned tile) const requires(boxes) {
    const unsigned outer = tile / call.boxes.tiles_of_inner;
    return {outer,
            static_cast<index_type>(tile - outer * call.boxes.tiles_of_inner) * rows_of_step - rows_before()};
  }
  /// The number of a row of a tile, from the first one of a tile of boxes. Rows that are not there have
  /// numbers from that of all rows on.
  __device__ index_type row_of(const RowOfBoxes& first, int row) const {
    const RowGeometry& g = call.problem.geometry;
    const index_type in_inner = first.inner + row, inner = g.extent[g.rank - 1];
    return in_inner >= 0 && in_inner < inner ? first.outer * inner + in_inner : g.rows;
  }
  __device__ index_type row_of(const SliceOfTile& slice, int row) const {
    if constexpr (boxes) return row_of(first_row_of_boxes(slice.tile), row);
    return static_cast<index_type>(slice.tile) * rows_of_tile + row;
  }
  __device__ void bring_temperature(int slot, const SliceOfTile& slice, int row) const {
    if constexpr (Shared::has_temperatures) {
      static_assert(sides == 1);
      const RowGeometry& g = call.problem.geometry;
      const index_type position = row_of(slice, row);
      if (position < g.rows)
        shared.temperatures[slot][row] =
            Mine::Scale::number_of(call.problem.transform.at_row(g.row(position).index));
    }
  }
  /// By one thread: a slice that is on its way to a slot. Where it is the last of those that are joined, what
  /// others tell of these can be joined by now.
  __device__ void comes(int slot, const SliceOfTile& slice, RingCursor& to_join) const {
    block.slice[slot] = slice;
    if constexpr (boxes) block.first_row[slot] = first_row_of_boxes(slice.tile);
    if (call.askers_join) return;
    if (slice.slice == call.slices - 1 || (slice.slice + 1) % tile_slices_joined == 0)
      have_joined(to_join, slice);
  }
  __device__ void have_joined(RingCursor& to_join, const SliceOfTile& last) const {
    block.to_join_to[to_join.slot] = last;
    mbarrier_arrive(&block.to_join[to_join.slot]);
    to_join.advance(slots);
  }
  /// By the same one: none comes any more. Every block draws one ticket that is none; who draws the last one
  /// leaves all ready for the next launch.
  __device__ void end(int slot, unsigned ticket, RingCursor& to_join) const {
    block.slice[slot].tile = call.tiles;
    have_joined(to_join, {call.tiles, 0});
    if (ticket == call.tickets + gridDim.x - 1) {
      call.workspace.header->next_ticket = 0;
      call.workspace.end_launch(tag - 1);
    }
  }
};

/// A thread that reduces slices and forms outputs; if these do not come and go by boxes, it fetches and
/// writes its part as well.
template <TilesCome come, int rows_of_lane, class Problem>
struct MoverOfTiles : TilesOfBlock<come, rows_of_lane, Problem> {
  using Base = TilesOfBlock<come, rows_of_lane, Problem>;
  using Base::block;
  using Base::call;
  using Base::rows;
  using Block = TileBlock<Problem>;

  int thread, lane, slot_of_thread;
  bool softmax;

  __device__ explicit MoverOfTiles(const Base& base)
      : Base(base),
        thread(static_cast<int>(threadIdx.x) -
               Base::side * SidesOfTileBlock<come, Problem>::warps_of_side * 32),
        lane(thread % Block::lanes),
        slot_of_thread(thread / Block::lanes),
        softmax(call.problem.operation == Operation::softmax) {}

  __device__ void barrier() const { barrier_sync(1 + Base::side, Block::threads); }
  __device__ bool all(bool holds) const { return barrier_all(1 + Base::side, Block::threads, holds); }
  /// What a slot has of a column of this thread, at a place among its side's rows.
  __device__ auto& in_slot(int slot, int k, int at) const {
    if constexpr (Base::anywhere) {
      constexpr int boxes = Base::Sides::boxes_of_slice, of_box = Block::columns_of_thread / boxes;
      return block.held[slot][k % boxes][slot_of_thread * of_box + k / boxes]
                       [call.boxes.first_row[k % boxes] + Base::side * rows + at];
    } else {
      return block.held[slot][slot_of_thread][k][Base::side][at];
    }
  }
  /// This thread's first column in a slice.
  __device__ index_type first_column(const SliceOfTile& of) const {
    return static_cast<index_type>(of.slice) * columns_of_tile<Problem> +
           slot_of_thread * Block::columns_of_thread;
  }
  /// Of this thread's columns in a slice, from a row of its side on.
  template <class Place>
  __device__ Place place(const SliceOfTile& of, int row) const {
    return {call.problem.geometry, Base::row_of(of, Base::side * rows + row), first_column(of)};
  }
  /// The same of one that has come to a slot.
  template <class Place>
  __device__ Place place_in_slot(int slot, int row) const {
    const SliceOfTile& of = block.slice[slot];
    if constexpr (Base::boxes)
      return {call.problem.geometry, Base::row_of(block.first_row[slot], Base::side * rows + row),
              first_column(of)};
    return place<Place>(of, row);
  }
  /// How many columns this thread has of it. Of boxes, in rows that are not there, too: those hold zeros.
  template <class Place>
  __device__ int columns_in_slot(int slot, int row) const {
    if constexpr (Base::boxes) {
      const index_type left = call.problem.geometry.columns - first_column(block.slice[slot]);
      return static_cast<int>(max(index_type(0), min(left, index_type(Block::columns_of_thread))));
    }
    return place_in_slot<Place>(slot, row).count;
  }
  /// Stores this thread's outputs of rows that boxes leave out: the last ones (rows_stored), and those of a
  /// tile that begins before the first row, for the copy engine stores no such box. output(k) gives those of
  /// a column.
  template <class Place, class Output>
  __device__ void store_beside_boxes(int slot, int row, const Output& output) const {
    if constexpr (Base::boxes && Base::stores_boxes && !Base::anywhere) {
      const RowGeometry& g = call.problem.geometry;
      const index_type first = block.first_row[slot].inner;
      if (first >= 0 && first + Base::side * rows + row < call.boxes.rows_stored) return;
      const Place at = place_in_slot<Place>(slot, row);
      if (!at.exists(g)) return;
      auto* y = call.problem.y + at.row(g).y_offset + at.first_column * g.y_column_stride;
      using Bits = std::remove_cvref_t<decltype(output(0))>;
#pragma unroll 1
      for (int k = 0; k < at.count; ++k, y += g.y_column_stride) *reinterpret_cast<Bits*>(y) = output(k);
    }
  }
};

/// What it does to a slice.
template <TilesCome come, int rows_of_lane, class Problem>
struct WorkOnTiles : MoverOfTiles<come, rows_of_lane, Problem> {
  using Mover = MoverOfTiles<come, rows_of_lane, Problem>;
  using Mover::barrier;
  using Mover::block;
  using Mover::boxes;
  using Mover::call;
  using Mover::lane;
  using Mover::reduces;
  using Mover::rows;
  using Mover::shared;
  using Mover::slot_of_thread;
  using Mover::softmax;
  using Mover::tag;
  using Mover::thread;
  using typename Mover::Acc;
  using typename Mover::Block;
  using typename Mover::Mine;
  using typename Mover::Result;
  using typename Mover::Shared;
  using typename Mover::Words;
  using Place = typename Mine::Place;
  using Held = typename Shared::Held;
  using Raw = typename Shared::Raw;
  static constexpr int columns = Shared::columns;
  using Mover::Mover;

  __device__ Place place(const SliceOfTile& of) const {
    return Mover::template place<Place>(of, lane * rows_of_lane);
  }
  __device__ Place place_in_slot(int slot) const {
    return Mover::template place_in_slot<Place>(slot, lane * rows_of_lane);
  }
  /// Of a column of this thread.
  __device__ Held& held(int slot, int k) const { return this->in_slot(slot, k, lane); }

  __device__ void fetch(int slot, const SliceOfTile& slice, RingCursor& to_join) const {
    if (thread == 0) this->comes(slot, slice, to_join);
    if (thread < rows) this->bring_temperature(slot, slice, thread);
    const Place at = place(slice);
    if constexpr (Shared::copies) {
      const char* from = reinterpret_cast<const char*>(Mine::first_of_x(call.problem, at));
      const index_type distance = Mine::x_distance(call.problem);
      const std::uint32_t to = shared_address(&held(slot, 0));
      for_columns<columns>(at.count, [&](int k) {
        cp_async_by_l1<sizeof(Held)>(to + k * Block::lanes * static_cast<int>(sizeof(Held)), from);
        from += distance;
      });
    } else {
      Mine mine;
      mine.read(call.problem, at);
      put(slot, mine);
    }
    cp_async_commit_group();
  }
  /// Two rows of 16 bits that begin anywhere lie so in their slot.
  static constexpr bool parts_pairs = Mover::anywhere && rows_of_lane == 2;
  __device__ Held loaded(int slot, int k) const {
    if constexpr (parts_pairs) {
      return pair_within_words(&this->in_slot(slot, k, lane * rows_of_lane));
    } else {
      return held(slot, k);
    }
  }
  __device__ void store(int slot, int k, Held value) const {
    if constexpr (parts_pairs) {
      auto* const first = reinterpret_cast<unsigned short*>(&this->in_slot(slot, k, lane * rows_of_lane));
      first[0] = static_cast<unsigned short>(value);
      first[1] = static_cast<unsigned short>(value >> 16);
    } else {
      held(slot, k) = value;
    }
  }
  __device__ void put(int slot, const Mine& mine) const {
#pragma unroll
    for (int k = 0; k < columns; ++k) store(slot, k, mine.held[k]);
  }
  __device__ void get(int slot, Mine& mine) const {
#pragma unroll
    for (int k = 0; k < columns; ++k) mine.held[k] = loaded(slot, k);
  }
  /// What has come.
  __device__ void take(int slot, Mine& mine) const {
    if constexpr (Shared::copies) {
      Raw raw[columns];
#pragma unroll
      for (int k = 0; k < columns; ++k) raw[k] = bits_as<Raw>(loaded(slot, k));
      const int count = Mover::template columns_in_slot<Place>(slot, lane * rows_of_lane);
      if (count < columns) {
#pragma unroll
        for (int k = 0; k < columns; ++k) raw[k] = k < count ? raw[k] : Mine::nothing();
      }
      mine.take(raw);
    } else {
      get(slot, mine);
    }
  }

  __device__ void find_scale(int slot, Mine& mine) const {
    if constexpr (Shared::has_temperatures) {
#pragma unroll
      for (int v = 0; v < rows_of_lane; ++v)
        mine.scale[v] = typename Mine::Scale(shared.temperatures[slot][lane * rows_of_lane + v]);
    } else {
      mine.find_factor(call.problem);
    }
  }

  /// Reduces a slice and tells of it.
  __device__ void reduce(int slot) const {
    if constexpr (reduces_in_slot) {
      reduce_in_slot(slot);
      return;
    }
    const SliceOfTile slice = block.slice[slot];
    Mine mine;
    take(slot, mine);
    if constexpr (Mine::Dropped::any) mine.drop(call.problem, place_in_slot(slot));
    find_scale(slot, mine);
    if ((mine.turn() || Mine::Dropped::any) && !reduces) put(slot, mine);
    Acc max[rows_of_lane];
    const SharedTile<rows_of_lane, Problem> of_tile(shared.sums, Block::lanes, Block::slots);
    of_tile.reduce(
        mine, softmax, lane, Block::lanes, slot_of_thread, Block::slots, max, [&] { barrier(); },
        [&](int row, Acc top, const ShareSum<Acc>& sum) { tell(slot, slice, row, top, sum); });
    if (thread == 0) mbarrier_arrive(&shared.told[slot]);
    if constexpr (Mine::Result::keeps_exponentials) {
      if (softmax) put(slot, mine);
    }
  }
  __device__ void tell(int slot, const SliceOfTile& slice, int row, Acc top, const ShareSum<Acc>& sum) const {
    const PartialSoftmax<Acc> partial = Mine::Part::share(top, sum);
    Words::publish(this->words(slice.tile, slice.slice) + row, partial, tag);
    shared.maxima[slot][row] = partial.max;
  }

  /// Doubles stay in their slot, and leave registers to their exponentials. (One H200, 1000 columns, fraction
  /// of a copy: all of a thread's in registers 0.675, so, four exponentials at once, 0.715.)
  static constexpr bool reduces_in_slot = sizeof(Acc) == 8;
  __device__ void reduce_in_slot(int slot) const {
    static_assert(rows_of_lane == 1 && Mine::Result::keeps_exponentials);
    const SliceOfTile slice = block.slice[slot];
    for (int k = Mover::template columns_in_slot<Place>(slot, lane); k < columns; ++k)
      held(slot, k) = Mine::nothing();
    shared.tops[slot_of_thread][lane] = Mine::template largest<columns>([&](int k) { return held(slot, k); });
    barrier();
    const Acc max = maximum_or_nan(
        Mine::template largest<Block::slots>([&](int t) { return shared.tops[t][lane]; }), -largest_v<Acc>);
    if (slot_of_thread == 0) shared.maxima_of_rows[lane] = max;
    const auto exponential = Mine::Part::exponential_below(max);
    auto sum = ShareSum<Acc>::none();
    constexpr int few = 4;
#pragma unroll 2
    for (int k = 0; k < columns; k += few) {
      Acc e[few];
#pragma unroll
      for (int j = 0; j < few; ++j) e[j] = held(slot, k + j);
      exponential.replace(e);
      if (softmax) {
#pragma unroll
        for (int j = 0; j < few; ++j) held(slot, k + j) = e[j];
      }
      sum.join(ShareSum<Acc>::of((e[0] + e[1]) + (e[2] + e[3])));
    }
    shared.sums[slot_of_thread][lane] = sum;
    barrier();
    if (thread < rows) {
      ShareSum<Acc> of_row = shared.sums[0][thread];
#pragma unroll
      for (int t = 1; t < Block::slots; ++t) of_row.join(shared.sums[t][thread]);
      tell(slot, slice, thread, shared.maxima_of_rows[thread], of_row);
    }
    if (thread == 0) mbarrier_arrive(&shared.told[slot]);
  }

  /// Forms the outputs of a slice whose rows' results are known.
  __device__ void finish(int slot) const {
    Result result[rows_of_lane];
    Acc max[rows_of_lane];
#pragma unroll
    for (int v = 0; v < rows_of_lane; ++v) {
      result[v] = shared.results[slot][lane * rows_of_lane + v];
      max[v] = shared.maxima[slot][lane * rows_of_lane + v];
    }
    if (reduces) {
      if (slot_of_thread == 0 && block.slice[slot].slice == 0)
        write_logsumexp(call.problem, place_in_slot(slot), result);
    } else {
      Mine mine;
      get(slot, mine);
      find_scale(slot, mine);
      if constexpr (boxes && Mover::stores_boxes) {
        mine.for_outputs(
            call.problem.operation, max, result, columns,
            [&](int k, int, const typename Mine::Put& output) { store(slot, k, bits_as<Held>(output)); });
        Mover::template store_beside_boxes<Place>(slot, lane * rows_of_lane,
                                                  [&](int k) -> Held { return loaded(slot, k); });
      } else {
        mine.write(call.problem, place_in_slot(slot), max, result);
      }
    }
    if constexpr (boxes) {
      fence_proxy_async_shared();  // what was written to the slot comes before the next copy
      mbarrier_arrive(&block.written[slot]);
    }
  }
};

/// The same where there is a transform. Its rows of a lane, which are 32 apart, are taken one after the
/// other: what a transform makes of them needs registers. Each thread subtracts the maximum of its own
/// columns.
template <TilesCome come, int rows_of_lane, class Problem>
struct WorkOnTransformedTiles : MoverOfTiles<come, rows_of_lane, Problem> {
  using Mover = MoverOfTiles<come, rows_of_lane, Problem>;
  using Mover::barrier;
  using Mover::block;
  using Mover::boxes;
  using Mover::call;
  using Mover::lane;
  using Mover::reduces;
  using Mover::rows;
  using Mover::shared;
  using Mover::slot_of_thread;
  using Mover::softmax;
  using Mover::tag;
  using Mover::thread;
  using typename Mover::Acc;
  using typename Mover::Block;
  using typename Mover::Mine;
  using typename Mover::Result;
  using typename Mover::Shared;
  using typename Mover::Words;
  using Place = typename Mine::Place;
  using Raw = typename Shared::Raw;
  static constexpr int columns = Shared::columns;
  using Mover::Mover;

  /// What waits in a slot: what the transform made, or exponentials of it, if x has room for it.
  static constexpr bool has_room = std::is_same_v<typename Problem::In, Acc>;
  __device__ bool keeps_packed_exponentials() const { return Result::keeps_packed_exponentials && softmax; }

  __device__ int row(int v) const { return v * Block::lanes + lane; }
  __device__ Place place(const SliceOfTile& of, int v) const {
    return Mover::template place<Place>(of, row(v));
  }
  __device__ Place place_in_slot(int slot, int v) const {
    return Mover::template place_in_slot<Place>(slot, row(v));
  }
  __device__ Raw& held(int slot, int k, int v) const { return this->in_slot(slot, k, row(v)); }

  __device__ void fetch(int slot, const SliceOfTile& slice, RingCursor& to_join) const {
    if (thread == 0) this->comes(slot, slice, to_join);
    const index_type distance = Mine::x_distance(call.problem);
    const auto copy = [&]<int bytes>(std::integral_constant<int, bytes>, const Place& at, const Raw* to) {
      const char* from = reinterpret_cast<const char*>(Mine::first_of_x(call.problem, at));
      for_columns<columns>(at.count, [&](int k) {
        cp_async_by_l1<bytes>(shared_address(to) + k * rows * static_cast<int>(sizeof(Raw)), from);
        from += distance;
      });
    };
    if constexpr (sizeof(Raw) > 2) {
      static_assert(rows_of_lane == 1);
      copy(std::integral_constant<int, sizeof(Raw)>(), place(slice, 0), &held(slot, 0, 0));
    } else if (call.pairs) {
      copy(std::integral_constant<int, 4>(), Mover::template place<Place>(slice, 2 * lane),
           &this->in_slot(slot, 0, 2 * lane));
    } else {
#pragma unroll 1
      for (int v = 0; v < rows_of_lane; ++v) {
        Raw raw[columns];
        Mine::load(call.problem, place(slice, v), raw);
#pragma unroll
        for (int k = 0; k < columns; ++k) held(slot, k, v) = raw[k];
      }
    }
    cp_async_commit_group();
  }

  /// What the transform makes of what has come.
  __device__ void make(int slot, int v, const Place& at, Mine& mine) const {
    mine.take_from([&](int k) { return held(slot, k, v); }, at.count);
    mine.transform(call.problem, at);
  }

  __device__ void reduce(int slot) const {
    const SliceOfTile slice = block.slice[slot];
#pragma unroll 1
    for (int v = 0; v < rows_of_lane; ++v) {
      Mine mine;
      make(slot, v, place_in_slot(slot, v), mine);
      Acc max[1];
      mine.maxima(mine.top(), max);
      shared.maxima[slot][slot_of_thread][row(v)] = max[0];
      shared.sums[slot_of_thread][row(v)] = mine.sum(max[0], 0, softmax);
      if constexpr (has_room) {
        if (!reduces) {
#pragma unroll
          for (int k = 0; k < columns; ++k) held(slot, k, v) = bits_as<Raw>(mine.held[k]);
        }
      } else if constexpr (Result::keeps_packed_exponentials) {
        if (softmax) {
#pragma unroll
          for (int k = 0; k < columns; ++k)
            held(slot, k, v) = static_cast<Raw>(PackedExponentials<bhalf_t>::of(mine.held[k], mine.held[k]));
        }
      }
    }
    barrier();
    if (thread < rows) {
      static_assert(Block::slots == ReductionPlan::shares && rows <= Block::threads);
      Words::publish(this->words(slice.tile, slice.slice) + thread, join_shares<Acc>([&](int share) {
                       return Mine::Part::share(shared.maxima[slot][share][thread],
                                                shared.sums[share][thread]);
                     }),
                     tag);
    }
    barrier();  // the next slice's sums take the place of these
    if (thread == 0) mbarrier_arrive(&shared.told[slot]);
  }

  __device__ void finish(int slot) const {
#pragma unroll 1
    for (int v = 0; v < rows_of_lane; ++v) {
      const Result result[1] = {shared.results[slot][row(v)]};
      const auto at = [&] { return place_in_slot(slot, v); };
      if (reduces) {
        if (slot_of_thread == 0 && block.slice[slot].slice == 0) write_logsumexp(call.problem, at(), result);
        continue;
      }
      Mine mine;
      if constexpr (has_room) {
#pragma unroll
        for (int k = 0; k < columns; ++k) mine.held[k] = bits_as<Acc>(held(slot, k, v));
      } else if (keeps_packed_exponentials()) {
#pragma unroll
        for (int k = 0; k < columns; ++k) mine.held[k] = PackedExponentials<bhalf_t>::low(held(slot, k, v));
      } else {
        make(slot, v, at(), mine);
      }
      const Acc max[1] = {shared.maxima[slot][slot_of_thread][row(v)]};
      if constexpr (boxes && Mover::stores_boxes) {
        mine.for_outputs(
            call.problem.operation, max, result, columns,
            [&](int k, int, const typename Mine::Put& output) { held(slot, k, v) = bits_as<Raw>(output); });
        Mover::template store_beside_boxes<Place>(slot, row(v),
                                                  [&](int k) -> Raw { return held(slot, k, v); });
      } else {
        mine.write(call.problem, at(), max, result);
      }
    }
    if constexpr (boxes) {
      fence_proxy_async_shared();  // what was written to the slot comes before the next copy
      mbarrier_arrive(&block.written[slot]);
    }
  }
};

/// All slices that a block draws.
template <TilesCome come, int rows_of_lane, class Problem>
struct MoversOfTiles
    : std::conditional_t<makes_logits<Problem>, WorkOnTransformedTiles<come, rows_of_lane, Problem>,
                         WorkOnTiles<come, rows_of_lane, Problem>> {
  using Work = std::conditional_t<makes_logits<Problem>, WorkOnTransformedTiles<come, rows_of_lane, Problem>,
                                  WorkOnTiles<come, rows_of_lane, Problem>>;
  using Work::all;
  using Work::barrier;
  using Work::block;
  using Work::boxes;
  using Work::call;
  using Work::fetch;
  using Work::finish;
  using Work::reduce;
  using Work::shared;
  using Work::slots;
  using Work::thread;
  using Work::Work;

  /// Until the slice that is to come first, of so many, is there.
  __device__ static void wait_for_slice(int coming) {
    static_assert(slots == 3);
    switch (coming) {
      case 1:
        return cp_async_wait_group<0>();
      case 2:
        return cp_async_wait_group<1>();
      default:
        return cp_async_wait_group<2>();
    }
  }

  /// Nothing but memory is waited for: what else this block has to do may
  /// be what it would wait for.
  __device__ void run() const {
    if constexpr (boxes) {
      run_by_boxes();
    } else {
      run_by_itself();
    }
  }

 private:
  __device__ void run_by_boxes() const {
    RingCursor oldest, next;
    int pending = 0;
    bool ends = false;
    for (;;) {
      if (pending > 0 && all(mbarrier_test_parity(&shared.known[oldest.slot], oldest.parity))) {
        finish(oldest.slot);
        oldest.advance(slots);
        --pending;
      } else if (ends) {
        if (pending == 0) return;
      } else if (pending < slots) {
        if (pending == 0) {
          mbarrier_wait_parity(&block.full[next.slot], next.parity);
        } else if (!all(mbarrier_test_parity(&block.full[next.slot], next.parity))) {
          continue;
        }
        ends = block.slice[next.slot].tile == call.tiles;
        if (ends) {
          if (thread == 0) mbarrier_arrive(&shared.told[next.slot]);
          if constexpr (Work::anywhere) mbarrier_arrive(&block.written[next.slot]);
          continue;
        }
        reduce(next.slot);
        next.advance(slots);
        ++pending;
      }
    }
  }

  __device__ void run_by_itself() const {
    // Slots from `oldest` on: `pending` slices that wait for their rows, then `coming` ones.
    RingCursor oldest, to_join;
    int pending = 0, coming = 0;
    bool more = true;  // tickets
    const auto draw = [&] {
      if (!more || thread != 0) return;
      block.next_ticket = Work::draw();
      block.next = call.slice(block.next_ticket);
    };
    draw();
    unsigned ticket = 0;
    for (;;) {
      if (more && pending + coming < slots) {
        barrier();
        ticket = block.next_ticket;
        more = ticket < call.tickets;
        if (more) {
          fetch((oldest.slot + pending + coming) % slots, block.next, to_join);
          ++coming;
          if (pending + coming < slots) {
            barrier();
            draw();
          }
          continue;
        }
      }
      if (pending > 0 && all(mbarrier_test_parity(&shared.known[oldest.slot], oldest.parity))) {
        draw();
        finish(oldest.slot);
        oldest.advance(slots);
        --pending;
      } else if (coming > 0) {
        wait_for_slice(coming);
        barrier();  // (which slice that is)
        reduce((oldest.slot + pending) % slots);
        ++pending;
        --coming;
      } else if (pending == 0) {
        break;
      }
    }
    barrier();
    if (thread == 0) {
      this->end(oldest.slot, ticket, to_join);
      mbarrier_arrive(&shared.told[oldest.slot]);
    }
  }
};

/// The warp that copies slices by boxes. It draws them as slots become free, and says when there are no more.
template <TilesCome come, int rows_of_lane, class Problem>
struct CopierOfTiles : TilesOfBlock<come, rows_of_lane, Problem> {
  using Base = TilesOfBlock<come, rows_of_lane, Problem>;
  using Base::block;
  using Base::call;
  using Base::reduces;
  using Base::rows;
  using Base::rows_of_tile;
  using Base::slots;
  using typename Base::Shared;

  /// The other lanes are there for masks and temperatures.
  static constexpr bool has_operands = operands_of<typename Problem::Transform> != 0,
                        has_lanes = has_operands || Shared::has_temperatures;
  /// Of what has come to a slot.
  static constexpr int arrivals = Shared::has_temperatures ? 2 : 1;
  int lane;

  __device__ explicit CopierOfTiles(const Base& base)
      : Base(base), lane(static_cast<int>(threadIdx.x) % 32) {}

  /// Where a slice begins.
  struct Corner {
    int inner, column, next, last;
  };
  __device__ Corner corner(const SliceOfTile& slice) const {
    const RowOfBoxes first = this->first_row_of_boxes(slice.tile);
    const unsigned last = first.outer / call.boxes.extent;
    return {static_cast<int>(first.inner), static_cast<int>(slice.slice) * columns_of_tile<Problem>,
            static_cast<int>(first.outer - last * call.boxes.extent), static_cast<int>(last)};
  }
  __device__ void load(int slot, const SliceOfTile& slice, RingCursor& to_join) const {
    this->comes(slot, slice, to_join);
    mbarrier_arrive_expect_tx(&block.full[slot], Base::SharedBlock::slot_bytes);
    const Corner at = corner(slice);
    const std::uint32_t full = shared_address(&block.full[slot]);
    if constexpr (Base::anywhere) {
      constexpr int boxes = Base::Sides::boxes_of_slice;
#pragma unroll
      for (int i = 0; i < boxes; ++i)
        cp_async_bulk_tensor_4d(shared_address(block.held[slot][i]), &call.boxes.in_turn[i], at.inner,
                                at.column / boxes, at.next, at.last, full);
    } else {
      cp_async_bulk_tensor_4d(shared_address(block.held[slot]), &call.boxes.x, at.inner, at.column, at.next,
                              at.last, full);
    }
  }
  /// Until the outputs in a slot can be stored, or have been by others.
  __device__ void wait_for(const RingCursor& at) const {
    mbarrier_wait_parity(Base::anywhere ? &block.stored[at.slot] : &block.written[at.slot], at.parity);
  }
  /// Until the results of its rows are there, so that it will be written soon.
  __device__ void wait_for_results(const RingCursor& at) const {
    for (auto& side : block.side) mbarrier_wait_parity(&side.known[at.slot], at.parity);
  }
  __device__ void store(int slot) const {
    if constexpr (Base::stores_boxes && !Base::anywhere) {
      if (reduces) return;
      const Corner at = corner(block.slice[slot]);
      if (at.inner < 0) return;
      cp_async_bulk_tensor_4d_store(&call.boxes.y, at.inner, at.column, at.next, at.last,
                                    shared_address(block.held[slot]));
    }
  }

  /// Sees to it that masks are in L2 when they are asked for: those of the first and the last row of each
  /// column, which are neighbours. (4096 columns on one H100, fraction of a copy, with a mask as large as x
  /// 0.80 so and 0.75 without, bfloat16 0.63 and 0.60. But a bias of floats would have 0.78 and has 0.82, of
  /// bfloat16 0.55 and 0.58.)
  __device__ void prefetch_masks(const SliceOfTile& slice) const {
    if constexpr (has_operands) {
      const auto& problem = call.problem;
      const RowGeometry& g = problem.geometry;
      const RowOfBoxes first = this->first_row_of_boxes(slice.tile);
      const index_type inner = g.extent[g.rank - 1],
                       row = lane % 2 == 0 ? max(first.inner, index_type(0))
                                           : min(first.inner + rows_of_tile, inner) - 1,
                       first_column = static_cast<index_type>(slice.slice) * columns_of_tile<Problem>,
                       end = min(first_column + columns_of_tile<Problem>, g.columns);
      const auto stage = problem.transform.at_row(g.row(first.outer * inner + row).index);
      for (index_type column = first_column + lane / 2; column < end; column += 16) {
        map_operands(stage, [&](const auto& operand) {
          const auto* const from = &operand(column);
          if constexpr (sizeof(*from) == 1) prefetch_l2(from);
          return operand;
        });
      }
    }
  }
  __device__ unsigned draw() const {
    unsigned ticket = 0;
    if (lane == 0) ticket = Base::draw();
    if constexpr (has_lanes) ticket = __shfl_sync(0xffffffffu, ticket, 0);
    return ticket;
  }

  __device__ void bring_temperatures(int slot, const SliceOfTile& slice) const {
    if constexpr (Shared::has_temperatures) {
#pragma unroll
      for (int row = lane; row < rows; row += 32) this->bring_temperature(slot, slice, row);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&block.full[slot]);
    }
  }

  /// By one thread or, has_lanes, by all.
  __device__ void run() const {
    RingCursor at, to_join;
    int in_use = 0;
    const bool draws_early = call.draws_early;
    for (;;) {
      if (in_use == slots && draws_early) wait_for_results(at);
      unsigned ticket = 0;
      if (draws_early) ticket = draw();
      if (in_use == slots) {
        wait_for(at);
        if (lane == 0) store(at.slot);
      }
      if (!draws_early) ticket = draw();
      const bool more = ticket < call.tickets;
      if (in_use == slots) {
        if (lane == 0) cp_async_bulk_wait_group_read<0>();
        at.advance(slots);
        --in_use;
      }
      const int next = (at.slot + in_use) % slots;
      if (!more) {
        if (lane == 0) {
          this->end(next, ticket, to_join);
          for (int i = 0; i < arrivals; ++i) mbarrier_arrive(&block.full[next]);
        }
        break;
      }
      const SliceOfTile slice = call.slice(ticket);
      if (lane == 0) load(next, slice, to_join);
      bring_temperatures(next, slice);
      prefetch_masks(slice);
      ++in_use;
    }
    for (; in_use > 0; --in_use) {
      wait_for(at);
      if (lane == 0) store(at.slot);
      at.advance(slots);
    }
    cp_async_bulk_wait_group_read<0>();
  }
};

/// The warps that store outputs of columns that begin anywhere, each those of some boxes, or of some columns
/// of one: of each column rows_of_step rows, from where a sector of memory begins on; the first tile's what
/// is before, too.
template <TilesCome come, int rows_of_lane, class Problem>
struct StorerOfTiles : TilesOfBlock<come, rows_of_lane, Problem> {
  using Base = TilesOfBlock<come, rows_of_lane, Problem>;
  using Base::block;
  using Base::call;
  using Base::rows_of_step;
  using Base::rows_of_tile;
  using Base::slots;
  using typename Base::Sides;
  using Out = typename Problem::Out;
  static constexpr int boxes = Sides::boxes_of_slice, warps = Sides::storing_warps,
                       boxes_of_warp = boxes > warps ? boxes / warps : 1,
                       warps_of_box = boxes > warps ? 1 : warps / boxes,
                       columns_of_warp = Sides::columns_of_box / warps_of_box;
  static constexpr int rows_of_box = Base::SharedBlock::rows_of_box;
  /// What a lane stores at once: of 16 bits two rows.
  using Unit = std::conditional_t<sizeof(Out) == 2, unsigned, Out>;
  static constexpr int rows_of_unit = static_cast<int>(sizeof(Unit) / sizeof(Out)), lanes = 32,
                       rows_of_lanes = lanes * rows_of_unit,
                       second_lanes = rows_of_step / rows_of_unit - lanes;
  static_assert(second_lanes > 0 && second_lanes <= lanes && sizeof(typename Problem::In) == sizeof(Out));

  int lane, box, begin;  ///< its first box, and its first column of that

  __device__ StorerOfTiles(const Base& base, int warp)
      : Base(base),
        lane(static_cast<int>(threadIdx.x) % lanes),
        box(warp % boxes),
        begin(warp / boxes * columns_of_warp) {}

  /// Rows before the first sector that begins behind an address.
  __device__ static int rows_before(const Out* at) {
    const auto address = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(at));
    return static_cast<int>((0u - address) % bytes_of_sector / sizeof(Out));
  }
  __device__ static Unit unit_at(const Out* from) {
    if constexpr (rows_of_unit == 2) {
      return pair_within_words(from);
    } else {
      return *from;
    }
  }

  __device__ void store(int slot) const {
#pragma unroll 1
    for (int b = 0; b < boxes_of_warp; ++b) store_box(slot, box + b * warps);
  }
  __device__ void store_box(int slot, int which) const {
    const RowGeometry& g = call.problem.geometry;
    const index_type first = block.first_row[slot].inner,
                     first_column =
                         static_cast<index_type>(block.slice[slot].slice) * columns_of_tile<Problem>,
                     distance = boxes * g.y_column_stride;
    const auto rows = static_cast<int>(min(g.rows - first, index_type(rows_of_tile))),
               columns_of_slice =
                   static_cast<int>(min(g.columns - first_column, index_type(columns_of_tile<Problem>))),
               columns = min((columns_of_slice - which + boxes - 1) / boxes - begin, columns_of_warp);
    Out* const y = call.problem.y + first + (first_column + which) * g.y_column_stride + begin * distance;
    const Out* const outputs = block.held[slot][which][begin] + call.boxes.first_row[which];
    int column = 0;
    if (first > 0 && rows == rows_of_tile) column = store_whole(outputs, y, distance, columns);
    store_some(outputs, y, distance, column, columns, rows, first == 0);
  }
  /// Some columns at a time, all of whose rows are there. Returns how many. (With these asked for at each,
  /// 1000 columns have 0.62 of a copy for 0.71.)
  __device__ int store_whole(const Out* outputs, Out* y, index_type distance, int columns) const {
    // In every other column sectors begin at the same row.
    const int row[2] = {rows_before(y) + lane * rows_of_unit,
                        rows_before(y + distance) + lane * rows_of_unit};
    Out* at[2] = {y + row[0], y + distance + row[1]};
    const bool has_second = lane < second_lanes;
    constexpr int some = 8;
    int column = 0;
#pragma unroll 1
    for (; column + some <= columns; column += some) {
      Unit output[some][2];
#pragma unroll
      for (int k = 0; k < some; ++k) {
        const Out* const from = outputs + (column + k) * rows_of_box + row[k % 2];
        output[k][0] = unit_at(from);
        if (has_second) output[k][1] = unit_at(from + rows_of_lanes);
      }
#pragma unroll
      for (int k = 0; k < some; ++k) {
        store_past_l1(reinterpret_cast<Unit*>(at[k % 2]), output[k][0]);
        if (has_second) store_past_l1(reinterpret_cast<Unit*>(at[k % 2] + rows_of_lanes), output[k][1]);
        at[k % 2] += 2 * distance;
      }
    }
    return column;
  }
  /// From a column on.
  __device__ void store_some(const Out* outputs, Out* y, index_type distance, int column, int columns,
                             int rows, bool is_first) const {
    y += column * distance;
#pragma unroll 1
    for (; column < columns; ++column, y += distance) {
      const Out* const from = outputs + column * rows_of_box;
      const int before = rows_before(y), end = min(before + rows_of_step, rows);
      for (int row = before + lane; row < end; row += lanes) y[row] = from[row];
      if (is_first && lane < min(before, rows)) y[lane] = from[lane];
    }
  }

  __device__ void run() const {
    RingCursor at;
    for (;;) {
      mbarrier_wait_parity(&block.written[at.slot], at.parity);
      if (block.slice[at.slot].tile == call.tiles) return;
      store(at.slot);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&block.stored[at.slot]);
      at.advance(slots);
    }
  }
};

/// The warp that joins what the slices of a tile have told, in their order, where its block has the last of
/// them, and tells the result.
template <TilesCome come, int rows_of_lane, class Problem>
struct JoinerOfTiles : TilesOfBlock<come, rows_of_lane, Problem> {
  using Base = TilesOfBlock<come, rows_of_lane, Problem>;
  using Base::block;
  using Base::call;
  using Base::rows;
  using Base::slots;
  using Base::tag;
  using typename Base::Acc;
  using typename Base::Words;

  static constexpr int warps = Base::Sides::joining_warps;

  int warp;

  __device__ JoinerOfTiles(const Base& base, int warp_) : Base(base), warp(warp_) {}

  /// From so many words of each row on to one.
  __device__ void join(const Words* from, unsigned count, Words* to) const {
    if constexpr (sizeof(Acc) == 8) {
      join<false>(from, count, to);
    } else if (call.slices > slices_joined_at_once) {
      join<true>(from, count, to);
    } else {
      join<false>(from, count, to);
    }
  }
  template <bool asks_for_all>
  __device__ __forceinline__ void join(const Words* from, unsigned count, Words* to) const {
    constexpr int rows_of_this = rows / warps;
#pragma unroll 1
    for (int first_row = 0; first_row < rows_of_this; first_row += Base::rows_of_warp)
      this->template join_rows<asks_for_all>(
          from, count, warp * rows_of_this + first_row,
          [&](int row, const PartialSoftmax<Acc>& all) { Words::publish(to + row, all, tag); });
  }

  __device__ void run() const {
    RingCursor at;
    for (;;) {
      mbarrier_wait_parity(&block.to_join[at.slot], at.parity);
      const SliceOfTile last = block.to_join_to[at.slot];
      if (last.tile == call.tiles) return;
      const unsigned which = last.slice / tile_slices_joined, first = which * tile_slices_joined;
      const unsigned all = this->joins();
      join(this->words(last.tile, first), last.slice - first + 1,
           all == 1 ? this->results_of(last.tile) : this->words(last.tile, call.slices + which));
      if (all > 1 && last.slice == call.slices - 1)
        join(this->words(last.tile, call.slices), all, this->results_of(last.tile));
      at.advance(slots);
    }
  }
};

/// The warp that asks for the results of tiles, or, where they have few slices, for those of all of these,
/// and joins them; of doubles it and the joiner, which has nothing to do then, each for half of the rows.
template <TilesCome come, int rows_of_lane, class Problem>
struct AskerOfTiles : TilesOfBlock<come, rows_of_lane, Problem> {
  using Base = TilesOfBlock<come, rows_of_lane, Problem>;
  using Base::block;
  using Base::call;
  using Base::rows;
  using Base::shared;
  using Base::slots;
  using Base::tag;
  using typename Base::Acc;
  using typename Base::Result;
  using typename Base::Words;
  static constexpr int warps_that_join = sizeof(Acc) == 8 ? 2 : 1;

  int warp, lane;

  __device__ AskerOfTiles(const Base& base, int warp_)
      : Base(base), warp(warp_), lane(static_cast<int>(threadIdx.x) % 32) {}

  /// From what was told, as other kernels with these bits have it.
  __device__ void set(int slot, int row, const PartialSoftmax<Acc>& all) const {
    shared.results[slot][row] = Result(call.problem.operation, all.told());
  }
  __device__ void wait_for_results(int slot, unsigned tile) const {
    constexpr int of_lane = rows / 32;
    Words of[of_lane];
    bool known;
    do {
      known = true;
#pragma unroll
      for (int i = 0; i < of_lane; ++i) {
        of[i] = Words::load(this->results_of(tile) + lane + i * 32);
        known = known && of[i].is_of(tag);
      }
    } while (!__all_sync(0xffffffffu, known));
#pragma unroll
    for (int i = 0; i < of_lane; ++i) set(slot, lane + i * 32, of[i].value());
  }
  __device__ void join(int slot, unsigned tile) const {
    constexpr int rows_of_this = rows / warps_that_join;
#pragma unroll 1
    for (int first_row = 0; first_row < rows_of_this; first_row += Base::rows_of_warp)
      this->template join_rows<false>(this->words(tile, 0), call.slices, warp * rows_of_this + first_row,
                                      [&](int row, const PartialSoftmax<Acc>& all) { set(slot, row, all); });
  }

  __device__ void run() const {
    for (RingCursor at;; at.advance(slots)) {
      mbarrier_wait_parity(&shared.told[at.slot], at.parity);
      const unsigned tile = block.slice[at.slot].tile;
      if (tile == call.tiles) return;
      if (call.askers_join) {
        join(at.slot, tile);
      } else {
        wait_for_results(at.slot, tile);
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&shared.known[at.slot]);
    }
  }
};

template <TilesCome come, int rows_of_lane, class Problem>
__global__ void __launch_bounds__(SidesOfTileBlock<come, Problem>::threads,
                                  SidesOfTileBlock<come, Problem>::blocks_a_multiprocessor)
    grid_pipelined_tiles_kernel(const __grid_constant__ TilesCall<come, Problem> call) {
  using Sides = SidesOfTileBlock<come, Problem>;
  using Shared = SharedTileBlock<come, rows_of_lane, Problem>;
  using Asker = AskerOfTiles<come, rows_of_lane, Problem>;
  // (Boxes lie on boundaries of 128 bytes.)
  extern __shared__ __align__(128) unsigned char shared_of_tile_block[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_of_tile_block);
  grid_dependency_wait();
  const std::uint32_t epoch = call.workspace.epoch();
  call.workspace.clear_in_last_of_epochs(epoch);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < Shared::slots; ++slot) {
      mbarrier_init(&shared.full[slot], CopierOfTiles<come, rows_of_lane, Problem>::arrivals);
      mbarrier_init(&shared.written[slot], Sides::sides * TileBlock<Problem>::threads);
      if constexpr (Sides::anywhere) mbarrier_init(&shared.stored[slot], Sides::storing_warps);
      mbarrier_init(&shared.to_join[slot], 1);
      for (auto& side : shared.side) {
        mbarrier_init(&side.told[slot], 1);
        mbarrier_init(&side.known[slot], call.askers_join ? Asker::warps_that_join : 1);
      }
    }
    if constexpr (Sides::boxes) fence_mbarrier_init();
  }
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x / 32),
            side = Sides::sides == 1 ? 0 : warp / Sides::warps_of_side;
  const auto block = [&](int which) {
    return TilesOfBlock<come, rows_of_lane, Problem>(call, shared, which, CudaWorkspace::tag_of(epoch));
  };
  if constexpr (Sides::boxes) {
    constexpr int warp_of_copier = Sides::sides * Sides::warps_of_side;
    if constexpr (Sides::anywhere) {
      if (warp > warp_of_copier)
        return StorerOfTiles<come, rows_of_lane, Problem>(block(0), warp - warp_of_copier - 1).run();
    }
    if (warp == warp_of_copier) {
      using Copier = CopierOfTiles<come, rows_of_lane, Problem>;
      if (Copier::has_lanes || threadIdx.x % 32 == 0) Copier(block(0)).run();
      return;
    }
  }
  constexpr int warps_of_movers = TileBlock<Problem>::threads / 32;
  const int beyond = warp - side * Sides::warps_of_side - warps_of_movers;
  if (beyond < 0) return MoversOfTiles<come, rows_of_lane, Problem>(block(side)).run();
  if (beyond < (call.askers_join ? Asker::warps_that_join : 1)) return Asker(block(side), beyond).run();
  if (!call.askers_join) JoinerOfTiles<come, rows_of_lane, Problem>(block(side), beyond - 1).run();
}

struct GridPipelinedTiles {
  static constexpr const char* name = "grid_pipelined_tiles";

  template <class Exec, class Problem>
  static constexpr bool supports = [] {
    if constexpr (sliced_rows_support<Exec, Problem>) {
      return std::is_same_v<typename Problem::Acc, float> ||
             (std::is_same_v<typename Problem::In, double> && std::is_same_v<typename Problem::Out, double>);
    } else {
      return false;
    }
  }();

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec& exec, const Problem& problem) {
    if (!problem.axis_is_strided) return "the axis is the fastest dimension in memory";
    const index_type slices = slices_of_tiles(problem);
    if (slices == 1) return "rows are too short";
    if (slices > most_slices) return "a row has too many slices";
    const CooperativeLimits& device =
        limits<TilesCome::by_threads, most_rows_of_lane<Problem>, Problem>(exec);
    if (device.refusal) return device.refusal;
    if (slices > device.multiprocessors * device.blocks_a_multiprocessor)
      return "a row has more slices than blocks can be resident";
    return {};
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    // `reserve` launches over no rows: that loads all kernels, which a capture could not do.
    const bool no_rows = problem.geometry.rows == 0, pairs = rows_come_in_pairs(problem);
    if constexpr (makes_logits<Problem>) {
      launch_rows<most_rows_of_lane<Problem>>(exec, problem);
    } else {
      bool done = false;
      if constexpr (takes_pairs<Problem>) {
        if (pairs || no_rows) {
          launch_rows<2>(exec, problem);
          done = pairs;
        } else if constexpr (may_have_boxes_anywhere<Problem>) {
          done =
              come_as_boxes_anywhere(problem) && launch_boxes<TilesCome::by_boxes_anywhere, 2>(exec, problem);
        }
      }
      if (!done || no_rows) launch_rows<1>(exec, problem);
    }
  }

  template <class Exec, class Problem>
  static void reserve(const Exec& exec, const Problem& problem) {
    CudaWorkspace::reserve<typename Problem::Acc>(exec, words(problem));
  }
  /// For those that leave some rows of these extents to this kernel: what it needs, and the kernel itself.
  template <class Exec, class Problem>
  static void reserve_for_others(const Exec& exec, const Problem& problem) {
    reserve(exec, problem);
    run(exec, no_rows_of(problem, problem.geometry.columns));
  }
  /// Whether slices come as boxes, on boundaries of so many bytes (boxes have to be on those of 16).
  template <class Problem>
  static bool come_as_boxes(const Problem& problem, index_type bytes) {
    const RowGeometry& g = problem.geometry;
    const bool rows_fill_boxes =
        g.rank <= 1 || (g.rank <= 3 && rows_fill<TileBlock<Problem>::lanes * most_rows_of_lane<Problem>>(g));
    return rows_fill_boxes && columns_begin_at(problem, bytes);
  }
  /// Whether these are wide ones: of rows that are written, of which there are many. (One H200, fraction of a
  /// copy of 1 GiB. Float in memory that begins as Kokkos' does, columns a multiple of 256 bytes apart, boxes
  /// and wide ones: 512 columns 0.82 and 0.87, 1000 0.81 and 0.845, 1024 0.81 and 0.84, 2048 0.79 and 0.81,
  /// 4096 0.77 and 0.78, 8192 0.75 twice, 16384 0.76 and 0.745, where the last slice has fewer columns 600
  /// 0.79 and 0.78, 4000 0.79 and 0.78; columns 16 KB apart 1024 0.905 and 0.90, 64 KB 0.86 and 0.88; 64 MB
  /// of 1024 0.76 and 0.74, with a mask 1 GiB 0.74 and 0.71. That begin anywhere on boundaries of 16 bytes,
  /// where outputs share sectors: 512 columns 0.54 and 0.71, 1000 0.54 and 0.72, 4000 0.58 and 0.71, 8192
  /// 0.58 and 0.68, 16384 0.57 and 0.64, 64 MB of 1000 0.64 and 0.72, 16 MB 0.60 and 0.56, 1 GiB with a mask
  /// 0.58 and 0.63; bfloat16 300 0.58 and 0.56, 512 0.55 and 0.72, 1000 0.55 and 0.69, 4000 0.56 and 0.60,
  /// with a factor 1000 0.55 and 0.62, 4000 0.56 and 0.55; but on those of 128 bytes 1000 0.77 and 0.76, 4000
  /// 0.695 and 0.66: instructions are what 16 bits wait for.)
  template <class Problem>
  static bool come_as_wide_boxes(const Kokkos::Cuda& exec, const Problem& problem) {
    if constexpr (!may_have_wide_boxes<Problem>) {
      return false;
    } else {
      constexpr bool is_16_bit = sizeof(typename Problem::In) == 2;
      constexpr int rows =
          TilesOfBlock<TilesCome::by_wide_boxes, most_rows_of_lane<Problem>, Problem>::rows_of_tile;
      const RowGeometry& g = problem.geometry;
      const int inner = g.rank - 1;
      if (problem.operation == Operation::logsumexp || g.rank < 1 || g.rank > 3 || g.x_stride[inner] != 1 ||
          g.y_stride[inner] != 1 || !rows_fill<rows>(g) || !columns_begin_at(problem, 16) ||
          (is_16_bit && !rows_come_in_pairs(problem)))
        return false;
      const index_type slices = slices_of_tiles(problem);
      if (ceil_div(g.rows, rows) * slices < 4 * index_type(exec.cuda_device_prop().multiProcessorCount))
        return false;
      if (!columns_begin_at(problem, 32)) {
        constexpr index_type most_slices = !is_16_bit ? 64 : multiplies_packed<Problem> ? 8 : 16;
        return slices <= most_slices && (!is_16_bit || g.columns >= 384);
      }
      constexpr index_type most_slices = 16, fewest_bytes_apart = 32 * 1024, fewest_bytes = 128 << 20;
      constexpr auto size = static_cast<index_type>(sizeof(typename Problem::In));
      const index_type empty = slices * columns_of_tile<Problem> - g.columns;  // of the last slice
      return !is_16_bit && operands_of<typename Problem::Transform> == 0 && slices <= most_slices &&
             4 * empty <= columns_of_tile<Problem> && size * g.x_column_stride >= fewest_bytes_apart &&
             size * g.rows * g.columns > fewest_bytes;
    }
  }
  /// Whether these are of columns in turn: of columns that begin anywhere, from memory, but not in place,
  /// where a tile's first rows would be outputs of the tile before. (One H200, fraction of a copy of 1 GiB of
  /// floats, so and by the better one of the other kernels: 270 columns 0.53 and 0.56, 285 0.54 both, 300
  /// 0.575 and 0.53, 400 0.70 and 0.58, 512 0.745 and 0.65, 600 0.66 and 0.57, 1000 0.73 and 0.60, 2048 0.70
  /// and 0.59, 4096 0.67 and 0.56, 8191 0.66 and 0.58, 16385 0.62 and 0.59, 20481 0.605 and 0.595, 24577 0.59
  /// and 0.60; 20 MB of 1000 columns 0.505 and 0.64, 80 MB 0.62 and 0.61, 72 MB of 300 columns 0.53 and 0.61.
  /// With a factor 300 columns 0.54 and 0.50, 400 0.67 and 0.52, 1000 0.70 and 0.55, 4096 0.65 and 0.56, 8191
  /// 0.64 and 0.57, 16385 0.59 and 0.58, GELU 300 0.49 and 0.54, 400 0.60 and 0.485, 1000 0.63 and 0.52, 4096
  /// 0.58 and 0.545, 8191 0.57 and 0.545, 16385 0.53 and 0.55. Double 256 columns 0.695 and 0.71, 300 0.58
  /// and 0.505, 600 0.635 and 0.515, 2048 0.60 and 0.54, 4096 0.54 and 0.56, 107 MB of 1000 columns 0.58 and
  /// 0.52, 27 MB 0.47 and 0.54. Bfloat16 300 columns 0.39 and 0.38, 400 0.51 and 0.46, 512 0.61 and 0.50,
  /// 1000 0.58 and 0.50, 2000 0.54 and 0.51, 4097 0.51 and 0.53, 107 MB of 1000 columns 0.50 both.)
  template <class Problem>
  static bool come_as_boxes_anywhere([[maybe_unused]] const Problem& problem) {
    if constexpr (!may_have_boxes_anywhere<Problem>) {
      return false;
    } else {
      using In = typename Problem::In;
      constexpr bool has_transform = has_transform_v<Problem>, is_16_bit = sizeof(In) == 2,
                     is_double = sizeof(In) == 8;
      constexpr index_type fewest_columns = is_double       ? 257
                                            : is_16_bit     ? 385
                                            : has_transform ? 320
                                                            : 288,
                           most_slices = is_double       ? 20
                                         : is_16_bit     ? 10
                                         : has_transform ? 32
                                                         : 80,
                           fewest_bytes = is_double ? 48 << 20 : 128 << 20,
                           boundary = is_double ? bytes_of_sector : 16;
      const RowGeometry& g = problem.geometry;
      return problem.operation != Operation::logsumexp && g.rank == 1 && g.x_stride[0] == 1 &&
             g.y_stride[0] == 1 && !columns_begin_at(problem, boundary) && !is_in_place(problem) &&
             g.columns >= fewest_columns && slices_of_tiles(problem) <= most_slices &&
             g.rows * g.columns * index_type(sizeof(In)) > fewest_bytes;
    }
  }
  /// Longer rows are for others: these are warm for shorter ones, too.
  template <class Exec, class Problem>
  static void reserve_for_shorter_rows(const Exec& exec, const Problem& problem) {
    if (problem.axis_is_strided && slices_of_tiles(problem) > most_slices &&
        limits<TilesCome::by_threads, most_rows_of_lane<Problem>, Problem>(exec).refusal == nullptr) {
      reserve(exec, problem);
      run(exec, no_rows_of(problem, most_slices * columns_of_tile<Problem>));
    }
  }

 private:
  static constexpr index_type most_slices = 256;
  /// (Of doubles boxes are as wide anyway; what a transform makes of 16 bits takes longer than memory, and so
  /// do temperatures of theirs, which were not tried.)
  template <class Problem>
  static constexpr bool may_have_wide_boxes = [] {
    using In = typename Problem::In;
    if (sizeof(In) != sizeof(typename Problem::Out)) return false;
    if constexpr (takes_pairs<Problem>) {
      return PartsOfChain<typename Problem::Transform>::temperatures == 0;
    } else {
      return sizeof(In) == 4;
    }
  }();
  /// (Operands are read by threads: a temperature, a mask and a bias as large as x and one for all rows of
  /// 1000 columns that begin anywhere 0.55, 0.52, 0.55 and 0.53 so, 0.50, 0.505, 0.565 and 0.50 by others.
  /// Double with a factor 300 columns 0.43 so and 0.48, 1000 0.49 and 0.465, 2048 0.48 twice.)
  template <class Problem>
  static constexpr bool may_have_boxes_anywhere = [] {
    using In = typename Problem::In;
    using Transform = typename Problem::Transform;
    return (sizeof(In) == 4 || (sizeof(In) == 8 && !has_transform_v<Problem>) ||
            (takes_pairs<Problem> && PartsOfChain<Transform>::temperatures == 0)) &&
           sizeof(typename Problem::Out) == sizeof(In) && operands_of<Transform> == 0 &&
           !is_known_at_run_time<Transform> &&
           sizeof(TilesCall<TilesCome::by_boxes_anywhere, Problem>) <= 4096;  // what drivers before R530 take
  }();
  /// Of the kernel whose blocks need most.
  template <class Problem>
  static constexpr int most_rows_of_lane = takes_pairs<Problem> || transforms_pairs<Problem> ? 2 : 1;

  /// For tiles of one or two sides, with one or two rows a lane; by boxes there are at most an eighth more
  /// (find_boxes), anywhere a seventh (rows_again of what is from tile to tile), and one for
  /// rows_before_boundary.
  template <class Problem>
  static index_type words(const Problem& problem) {
    constexpr int rows = 4 * TileBlock<Problem>::lanes;
    const index_type tiles = ceil_div(problem.geometry.rows + problem.geometry.rows / 7, rows) + 1,
                     slices = std::min(slices_of_tiles(problem), most_slices);
    return tiles * rows * (slices + ceil_div(slices, tile_slices_joined) + 1);
  }

  /// Whether rows side by side, where they do not go on elsewhere, are enough for so many in a box.
  template <int rows>
  static bool rows_fill(const RowGeometry& g) {
    const index_type inner = g.extent[g.rank - 1];
    return g.rank == 1 || inner % rows == 0 || inner >= 8 * rows;
  }

  /// A tensor of rows, columns and two more dimensions for the copy engine, which takes boxes of so many rows
  /// and columns; false where strides, in bytes, are no multiples of 16, or something is too large.
  template <class T>
  static bool encode(CUtensorMap& map, const T* data, const cuuint64_t (&extents)[4],
                     const cuuint64_t (&strides)[3], int rows, int columns) {
    bool fits = tensor_map_encoder() != nullptr && reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
    for (const cuuint64_t stride : strides)
      fits = fits && stride != 0 && stride % 16 == 0 && stride < cuuint64_t(1) << 40;
    for (const cuuint64_t all : extents) fits = fits && all < cuuint64_t(1) << 31;
    if (!fits) return false;
    const cuuint32_t box[] = {static_cast<cuuint32_t>(rows), static_cast<cuuint32_t>(columns), 1, 1},
                     every[] = {1, 1, 1, 1};
    constexpr auto type = sizeof(T) == 2   ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                          : sizeof(T) == 4 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                           : CU_TENSOR_MAP_DATA_TYPE_FLOAT64;
    return tensor_map_encoder()(&map, type, 4, const_cast<T*>(data), extents, strides, box, every,
                                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  }

  /// Boxes of x and y, if the copy engine takes them: strides that are multiples of 16 bytes, and rows enough
  /// side by side.
  template <TilesCome come, int rows_of_lane, class Problem>
  static bool find_boxes(const Problem& problem, TileBoxes<come>& boxes) {
    using Tiles = TilesOfBlock<come, rows_of_lane, Problem>;
    const RowGeometry& g = problem.geometry;
    constexpr int rows = Tiles::rows_of_tile;
    const int inner = g.rank - 1;
    if (g.rank < 1 || g.rank > 3 || g.x_stride[inner] != 1) return false;
    if (!rows_fill<rows>(g)) return false;
    const auto find = [&](CUtensorMap& map, const auto* data, index_type inner_extent,
                          index_type column_stride, const index_type* row_strides) {
      constexpr auto size = static_cast<index_type>(sizeof(*data));
      const auto extent = [&](int d) { return d < 0 ? cuuint64_t(1) : static_cast<cuuint64_t>(g.extent[d]); };
      const auto stride = [&](int d) { return static_cast<cuuint64_t>(d < 0 ? 16 : row_strides[d] * size); };
      return encode(map, data,
                    {static_cast<cuuint64_t>(inner_extent), static_cast<cuuint64_t>(g.columns),
                     extent(inner - 1), extent(inner - 2)},
                    {static_cast<cuuint64_t>(column_stride * size), stride(inner - 1), stride(inner - 2)},
                    rows, columns_of_tile<Problem>);
    };
    boxes.rows_before = come == TilesCome::by_wide_boxes ? rows_before_boundary(problem) : 0;
    boxes.tiles_of_inner = static_cast<unsigned>(ceil_div(g.extent[inner] + boxes.rows_before, rows));
    boxes.extent = g.rank > 1 ? static_cast<unsigned>(g.extent[inner - 1]) : 1;
    if (!find(boxes.x, problem.x, g.extent[inner], g.x_column_stride, g.x_stride)) return false;
    if (problem.operation == Operation::logsumexp || !Tiles::stores_boxes) return true;
    constexpr auto unit = 16 / static_cast<index_type>(sizeof(typename Problem::Out));
    boxes.rows_stored = g.extent[inner] / unit * unit;
    return g.y_stride[inner] == 1 && boxes.rows_stored > 0 &&
           find(boxes.y, problem.y, boxes.rows_stored, g.y_column_stride, g.y_stride);
  }
  /// Of columns of x in turn, which are multiples of 16 bytes apart, from boundaries of as many on.
  template <TilesCome come, int rows_of_lane, class Problem>
  static bool find_boxes(const Problem& problem, TileBoxes<TilesCome::by_boxes_anywhere>& boxes) {
    using Tiles = TilesOfBlock<come, rows_of_lane, Problem>;
    using Sides = typename Tiles::Sides;
    using In = typename Problem::In;
    constexpr index_type size = sizeof(In), in_turn = Sides::boxes_of_slice,
                         boundary = Sides::bytes_of_boundary;
    static_assert(in_turn * size % boundary == 0 && in_turn <= TileBoxes<come>::most);
    const RowGeometry& g = problem.geometry;
    if (g.rank != 1) return false;
    boxes.tiles_of_inner = static_cast<unsigned>(ceil_div(g.rows, index_type(Tiles::rows_of_step)));
    boxes.extent = 1;
    bool found = true;
    for (int i = 0; i < in_turn; ++i) {
      const auto address = reinterpret_cast<std::uintptr_t>(problem.x + i * g.x_column_stride);
      boxes.first_row[i] = static_cast<int>(address % boundary / size);
      found =
          found && encode(boxes.in_turn[i], reinterpret_cast<const In*>(address / boundary * boundary),
                          {static_cast<cuuint64_t>(g.rows + boxes.first_row[i]),
                           static_cast<cuuint64_t>(ceil_div(g.columns - i, in_turn)), 1, 1},
                          {static_cast<cuuint64_t>(in_turn * g.x_column_stride * size), boundary, boundary},
                          Tiles::SharedBlock::rows_of_box, Sides::columns_of_box);
    }
    return found;
  }

  template <int rows_of_lane, class Problem>
  static void launch_rows(const Kokkos::Cuda& exec, const Problem& problem) {
    const bool no_rows = problem.geometry.rows == 0;
    if constexpr (SharedTiles<rows_of_lane, Problem>::copies) {
      if constexpr (may_have_boxes_anywhere<Problem> && rows_of_lane == most_rows_of_lane<Problem>) {
        if ((come_as_boxes_anywhere(problem) || no_rows) &&
            launch_boxes<TilesCome::by_boxes_anywhere, rows_of_lane>(exec, problem))
          return;
      }
      if constexpr (may_have_wide_boxes<Problem>) {
        if ((come_as_wide_boxes(exec, problem) || no_rows) &&
            launch_boxes<TilesCome::by_wide_boxes, rows_of_lane>(exec, problem))
          return;
      }
      if (launch_boxes<TilesCome::by_boxes, rows_of_lane>(exec, problem)) return;
    }
    launch<TilesCome::by_threads, rows_of_lane>(exec, problem, {});
  }

  /// Whether it does.
  template <TilesCome come, int rows_of_lane, class Problem>
  static bool launch_boxes(const Kokkos::Cuda& exec, const Problem& problem) {
    const CooperativeLimits& device = limits<come, rows_of_lane, Problem>(exec);
    if (device.refusal || slices_of_tiles(problem) > device.multiprocessors * device.blocks_a_multiprocessor)
      return false;
    TileBoxes<come> boxes{};
    const bool no_rows = problem.geometry.rows == 0, found = find_boxes<come, rows_of_lane>(problem, boxes);
    if (found || no_rows) launch<come, rows_of_lane>(exec, problem, boxes);
    return found && !no_rows;
  }

  template <TilesCome come, int rows_of_lane, class Problem>
  static void launch(const Kokkos::Cuda& exec, const Problem& problem, const TileBoxes<come>& boxes) {
    using Sides = SidesOfTileBlock<come, Problem>;
    const RowGeometry& g = problem.geometry;
    constexpr int rows = TilesOfBlock<come, rows_of_lane, Problem>::rows_of_tile;
    const index_type slices = slices_of_tiles(problem);
    index_type tiles = ceil_div(g.rows, rows);
    if (Sides::boxes && g.rows > 0) tiles = g.rows / g.extent[g.rank - 1] * boxes.tiles_of_inner;
    const index_type tickets = tiles * slices;
    const CooperativeLimits& device = limits<come, rows_of_lane, Problem>(exec);
    const index_type resident =
        static_cast<index_type>(device.multiprocessors) * device.blocks_a_multiprocessor;
    launch_labelled(exec, kernel_label(problem.operation, name), [&] {
      launch_cooperatively(
          exec, &grid_pipelined_tiles_kernel<come, rows_of_lane, Problem>,
          dim3(static_cast<unsigned>(std::clamp<index_type>(tickets, 1, resident))), Sides::threads,
          shared_bytes<come, rows_of_lane, Problem>,
          TilesCall<come, Problem>{problem, CudaWorkspace::get<typename Problem::Acc>(exec, words(problem)),
                                   static_cast<unsigned>(tickets), static_cast<unsigned>(slices),
                                   static_cast<unsigned>(tiles), boxes, rows_come_in_pairs(problem),
                                   askers_join<come>(problem), draws_early<come>(problem)});
    });
  }

  /// Whether those who ask for the results of a tile join its slices themselves, each for its block: the way
  /// through L2 is half as long. (One H200, fraction of a copy, by the block of the last slice and so:
  /// bfloat16 300 columns 0.58 and 0.595, 512 0.76 and 0.805, 1024 0.735 and 0.765, with a factor 512 0.75
  /// and 0.80, 1000 0.72 and 0.76; float 300 0.71 and 0.74, 512 0.81 and 0.82, in wide boxes 0.86 and 0.875,
  /// but 1024 0.81 and 0.80, in wide boxes 0.855 and 0.845, GELU 512 0.80 and 0.82, 1024 0.79 twice; a mask
  /// 512 0.71 and 0.705, 1024 0.74 and 0.72, GELU of bfloat16 512 0.51 twice, 1024 0.505 and 0.49. Since two
  /// warps join: bfloat16 2048 0.75 and 0.73, double 600 0.76 and 0.735, 1000 0.75 and 0.72, but that begin
  /// anywhere 0.57 and 0.63, 2048 0.54 and 0.60.)
  template <TilesCome come, class Problem>
  static bool askers_join(const Problem& problem) {
    constexpr bool is_float = sizeof(typename Problem::In) == 4,
                   never =
                       operands_of<typename Problem::Transform> != 0 || (makes_logits<Problem> && !is_float);
    constexpr unsigned most = never                                  ? 0
                              : is_float                             ? 2
                              : come == TilesCome::by_boxes_anywhere ? tile_slices_joined
                                                                     : 4;
    return slices_of_tiles(problem) <= most;
  }

  /// Whether tickets are drawn while the outputs that make room for their slices are formed. (One H200,
  /// fraction of a copy, then and so: double 300 columns 0.705 and 0.71, 1000 0.71 and 0.72, 4096 0.60 and
  /// 0.59, bfloat16 1000 0.768 and 0.772, 2048 0.732 and 0.737, 8192 0.66 and 0.65, logsumexp of 1000 0.696
  /// and 0.712, of float 0.85 and 0.86, but float 1000 that begin anywhere 0.747 and 0.74.)
  template <TilesCome come, class Problem>
  static bool draws_early(const Problem& problem) {
    return come != TilesCome::by_boxes_anywhere && slices_of_tiles(problem) <= tile_slices_joined;
  }

  template <TilesCome come, int rows_of_lane, class Problem>
  static constexpr int shared_bytes = sizeof(SharedTileBlock<come, rows_of_lane, Problem>);

  template <TilesCome come, int rows_of_lane, class Problem>
  static const CooperativeLimits& limits(const Kokkos::Cuda& exec) {
    return cooperative_limits(&grid_pipelined_tiles_kernel<come, rows_of_lane, Problem>, exec.cuda_device(),
                              SidesOfTileBlock<come, Problem>::threads,
                              shared_bytes<come, rows_of_lane, Problem>);
  }
};

}  // namespace KokkosSoftmax::impl

#endif
