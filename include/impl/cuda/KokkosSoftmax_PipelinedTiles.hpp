// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// What the CUDA kernels have in common that take tiles of rows whose columns are not contiguous (see
/// KokkosSoftmax_RowTiles.hpp) slice by slice through a ring of slots in shared memory (compute capability
/// 9.0), grid_pipelined_tiles and cluster_pipelined_tiles: slices, of so many columns by type alone, are
/// copied to slots, as boxes by the copy engine where it can; eight warps (for each side of a block) reduce
/// one that has come and form its outputs once its rows' results are known; one warp has boxes come and go;
/// where columns begin anywhere, more warps store what no box could.

#ifndef KOKKOSSOFTMAX_PIPELINEDTILES_HPP
#define KOKKOSSOFTMAX_PIPELINEDTILES_HPP

#include <impl/cuda/KokkosSoftmax_HopperPtx.hpp>
#include <impl/cuda/KokkosSoftmax_RowTiles.hpp>
#include <impl/cuda/KokkosSoftmax_TensorMap.hpp>

#include <algorithm>

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

/// Where blocks tell each other what they know of a tile's rows: all blocks of the grid in memory, or those
/// of a cluster in their shared memory.
enum class TilesMeet { in_memory, in_cluster };

/// A block. Memory that is written in pieces of 256 bytes on boundaries of as many takes more of them than in
/// pieces of 128; how wide they are that are read is all the same. (One H200, columns of 1024 x 262144 floats
/// that are only copied, fraction of a copy, boxes of 128 bytes by 256 columns both ways 0.75 to 0.80, of 256
/// bytes 0.915, read in such and written in the others 0.86, the other way round 0.915; softmax 0.81 and
/// 0.84.)
template <TilesMeet meet, TilesCome come, class Problem>
struct SidesOfTileBlock {
  static constexpr bool boxes = come != TilesCome::by_threads,
                        anywhere = come == TilesCome::by_boxes_anywhere;
  static constexpr int sides = come == TilesCome::by_wide_boxes || anywhere ? 2 : 1;
  static constexpr int bytes_of_boundary = 16;  ///< of what the copy engine reads
  static constexpr int in_turn =
                           anywhere ? bytes_of_boundary / static_cast<int>(sizeof(typename Problem::In)) : 1,
                       columns_in_turn = columns_of_tile<Problem> / in_turn;
  /// Whether a row's last slice may have slots that are half as large.
  static constexpr bool has_half_slots = meet == TilesMeet::in_cluster;
  /// With those that ask and join (in a cluster one, that does both), the one that copies, and those that
  /// store, half a box, one or two each. (Two that join cost no registers where there are boxes. One H200,
  /// fractions of a copy, one and two: double 3000 columns 0.63 and 0.70, 4096 0.60 and 0.69, 16384 0.53 and
  /// 0.62, bfloat16 3000 0.627 and 0.669, 8192 0.685 and 0.696, 16384 0.672 and 0.697; but float, each for
  /// half of a tile's 32 rows, 1000 0.866 and 0.855, 4096 0.814 and 0.806.)
  static constexpr int joining_warps = meet == TilesMeet::in_cluster                ? 0
                                       : boxes && sizeof(typename Problem::In) != 4 ? 2
                                                                                    : 1,
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
  static constexpr int rows_before = anywhere ? in_turn : 0;
};

struct SliceOfTile {
  unsigned tile, slice;
};

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
  unsigned slices;  ///< of a tile
  unsigned tiles;
  TileBoxes<come> boxes;
  bool pairs;  ///< rows_come_in_pairs
};

/// Shared memory of a side of a block, but for sums.
template <TilesMeet meet, int rows_of_lane, class Problem>
struct SharedRing {
  static constexpr int rows = TileBlock<Problem>::lanes * rows_of_lane;
  static constexpr int whole_slots = 3;  ///< as many as two sides have room for on a multiprocessor
  /// Of a cluster's, where every other slice may need half of one.
  static constexpr int slots = meet == TilesMeet::in_cluster ? 4 : whole_slots;
  /// Slices that have been reduced and wait for their rows' results. In a cluster, where these come soon, the
  /// next one waits until the first of two is written. (One H200, fractions of a copy, three and two: double
  /// 512 columns 0.836 and 0.841, 1024 0.802 and 0.811, that begin anywhere 512 0.716 and 0.733, 1024 0.675
  /// and 0.738, float 1024 0.738 and 0.747, others the same.)
  static constexpr int waiting = meet == TilesMeet::in_cluster ? 2 : whole_slots;

  alignas(sizeof(Word16)) ResultOfTileRow<Problem> results[waiting][rows];
  Mbarrier told[slots];     ///< a slice has been reduced
  Mbarrier known[waiting];  ///< the results of its rows are there

  /// Temperatures of rows that stay packed, which whoever has a slice come brings along: those that reduce it
  /// and form its outputs would wait for them. (One H200, bfloat16 4096 x 65536, fraction of a copy: read by
  /// these 0.55, so 0.64.)
  static constexpr bool has_temperatures =
      stays_packed<Problem> && PartsOfChain<typename Problem::Transform>::temperatures != 0;
  float temperatures[slots][has_temperatures ? rows : 1];
};

/// Of a side.
template <TilesMeet meet, int rows_of_lane, class Problem, bool transforms = makes_logits<Problem>>
struct SharedTiles : SharedRing<meet, rows_of_lane, Problem> {
  using Ring = SharedRing<meet, rows_of_lane, Problem>;
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
  Acc maxima[Ring::waiting][Ring::rows];  ///< of what waits
};

/// Where there is a transform slots have rows, as x has them; what a transform makes of 16 bits does not fit,
/// unless it is a PackedExponential, and is made once more.
template <TilesMeet meet, int rows_of_lane, class Problem>
struct SharedTiles<meet, rows_of_lane, Problem, true> : SharedRing<meet, rows_of_lane, Problem> {
  using Ring = SharedRing<meet, rows_of_lane, Problem>;
  using Acc = typename Problem::Acc;
  using Block = TileBlock<Problem>;
  static constexpr int columns = Block::columns_of_thread;
  using Mine = PartOfTile<columns, 1, Problem>;
  using Raw = typename Mine::Raw;
  static constexpr bool copies = true;
  using OfColumn = Raw[Ring::rows];

  ShareSum<Acc> sums[Block::slots][Ring::rows];
  Acc maxima[Ring::waiting][Block::slots][Ring::rows];  ///< of each thread's columns
};

/// Where a row of a tile of boxes lies: these do not go on in the next dimension.
struct RowOfBoxes {
  unsigned outer;    ///< in the other dimensions
  index_type inner;  ///< in the fastest one; negative in front of the first row
};

/// The slots hold slices while they are on their way and while they wait.
template <TilesMeet meet, TilesCome come, int rows_of_lane, class Problem>
struct SharedTileBlock {
  using Side = SharedTiles<meet, rows_of_lane, Problem>;
  using Sides = SidesOfTileBlock<meet, come, Problem>;
  static constexpr int sides = Sides::sides, slots = Side::slots;
  static constexpr int rows_of_box = Sides::rows_before + sides * Side::rows;
  static constexpr int arrivals = Side::has_temperatures ? 2 : 1;  ///< of what comes to a slot
  /// Of boxes of columns in turn, the boxes one behind the other.
  using Slot = std::conditional_t<Sides::anywhere,
                                  typename Problem::In[Sides::in_turn][Sides::columns_in_turn][rows_of_box],
                                  typename Side::OfColumn[TileBlock<Problem>::slots][Side::columns][sides]>;

  alignas(128) Slot held[Side::whole_slots];
  static constexpr std::uint32_t slot_bytes = sizeof(Slot);
  Side side[sides];
  Mbarrier full[slots];     ///< boxes: a slice has come
  Mbarrier written[slots];  ///< boxes: its outputs are there
  Mbarrier stored[slots];   ///< and, by threads, in y
  SliceOfTile slice[slots];
  RowOfBoxes first_row[slots];  ///< boxes: of these, so that not every thread divides to know it

  /// Before any thread uses them, by one.
  __device__ void init_barriers() {
    for (int slot = 0; slot < slots; ++slot) {
      mbarrier_init(&full[slot], arrivals);
      mbarrier_init(&written[slot], sides * TileBlock<Problem>::threads);
      if constexpr (Sides::anywhere) mbarrier_init(&stored[slot], Sides::storing_warps);
      for (Side& of : side) mbarrier_init(&of.told[slot], 1);
    }
  }
};

/// A thread of a side of a block. `Call` is a TilesCall, `SharedBlock` a SharedTileBlock, and more.
template <TilesCome come_, int rows_of_lane_, class Problem_, class Call_, class SharedBlock_>
struct TilesOfBlock {
  static constexpr TilesCome come = come_;
  static constexpr int rows_of_lane = rows_of_lane_;
  using Problem = Problem_;
  using Call = Call_;
  using SharedBlock = SharedBlock_;
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

  const Call& call;
  SharedBlock& block;
  Shared& shared;  ///< of this side
  int side;
  bool reduces;

  __device__ TilesOfBlock(const Call& call_, SharedBlock& block_, int side_)
      : call(call_),
        block(block_),
        shared(block_.side[side_]),
        side(side_),
        reduces(call_.problem.operation == Operation::logsumexp) {}

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
  /// By one thread: a slice that is on its way to a slot.
  __device__ void comes(int slot, const SliceOfTile& slice) const {
    block.slice[slot] = slice;
    if constexpr (boxes) block.first_row[slot] = first_row_of_boxes(slice.tile);
  }
};

/// A thread that reduces slices and forms outputs; if these do not come and go by boxes, it fetches and
/// writes its part as well.
template <class Tiles>
struct MoverOfTiles : Tiles {
  using Base = Tiles;
  using Base::block;
  using Base::call;
  using Base::rows;
  using typename Base::Problem;
  using Block = TileBlock<Problem>;

  int thread, lane, slot_of_thread;
  bool softmax;

  __device__ explicit MoverOfTiles(const Base& base)
      : Base(base),
        thread(static_cast<int>(threadIdx.x) - Base::side * Base::Sides::warps_of_side * 32),
        lane(thread % Block::lanes),
        slot_of_thread(thread / Block::lanes),
        softmax(call.problem.operation == Operation::softmax) {}

  __device__ void barrier() const { barrier_sync(1 + Base::side, Block::threads); }
  __device__ bool all(bool holds) const { return barrier_all(1 + Base::side, Block::threads, holds); }
  /// What a slot has of a column of this thread, at a place among its side's rows.
  __device__ auto& in_slot(int slot, int k, int at) const {
    if constexpr (Base::anywhere) {
      constexpr int in_turn = Base::Sides::in_turn, of_turn = Block::columns_of_thread / in_turn;
      return this->in_turn(slot, k % in_turn)[slot_of_thread * of_turn + k / in_turn]
                                             [call.boxes.first_row[k % in_turn] + Base::side * rows + at];
    } else {
      return this->in_ring(slot)[slot_of_thread][k][Base::side][at];
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
  /// Whether this thread may have columns of it: half a slot has no room for those that a slice lacks.
  __device__ bool has_columns([[maybe_unused]] int slot) const {
    if constexpr (!Base::Sides::has_half_slots) return true;
    return first_column(block.slice[slot]) < call.problem.geometry.columns;
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
template <class Tiles>
struct WorkOnTiles : MoverOfTiles<Tiles> {
  using Mover = MoverOfTiles<Tiles>;
  using Mover::barrier;
  using Mover::block;
  using Mover::boxes;
  using Mover::call;
  using Mover::lane;
  using Mover::reduces;
  using Mover::rows;
  using Mover::rows_of_lane;
  using Mover::shared;
  using Mover::slot_of_thread;
  using Mover::softmax;
  using Mover::thread;
  using typename Mover::Acc;
  using typename Mover::Block;
  using typename Mover::Mine;
  using typename Mover::Problem;
  using typename Mover::Result;
  using typename Mover::Shared;
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

  __device__ void fetch(int slot, const SliceOfTile& slice) const {
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
      const int count = Mover::template columns_in_slot<Place>(slot, lane * rows_of_lane);
      mine.take_from([&](int k) { return bits_as<Raw>(loaded(slot, k)); }, count);
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
    // Warps without columns leave the others the multiprocessor; but where registers are few a branch around
    // all this spills. (That begin anywhere 512 columns of floats 0.69 of a copy for 0.81.)
    const bool has_columns = this->has_columns(slot), works = has_columns || Mover::anywhere;
    Mine mine;
    find_scale(slot, mine);
    if (works) {
      take(slot, mine);
      if constexpr (Mine::Dropped::any) mine.drop(call.problem, place_in_slot(slot));
      if ((mine.turn() || Mine::Dropped::any) && !reduces && has_columns) put(slot, mine);
    }
    Acc max[rows_of_lane];
    const SharedTile<rows_of_lane, Problem> of_tile(shared.sums, Block::lanes, Block::slots);
    of_tile.reduce(
        mine, softmax, lane, Block::lanes, slot_of_thread, Block::slots, max, [&] { barrier(); },
        [&](int row, Acc top, const ShareSum<Acc>& sum) { tell(slot, slice, row, top, sum); }, works);
    if (thread == 0) this->has_told(slot);
    if constexpr (Mine::Result::keeps_exponentials) {
      if (softmax && has_columns) put(slot, mine);
    }
  }
  __device__ void tell(int slot, const SliceOfTile& slice, int row, Acc top, const ShareSum<Acc>& sum) const {
    const PartialSoftmax<Acc> partial = Mine::Part::share(top, sum);
    this->publish(slot, slice, row, partial);
    shared.maxima[this->waits_at(slot)][row] = partial.max;
  }

  /// Doubles stay in their slot, and leave registers to their exponentials. (One H200, 1000 columns, fraction
  /// of a copy: all of a thread's in registers 0.675, so, four exponentials at once, 0.715.)
  static constexpr bool reduces_in_slot = sizeof(Acc) == 8;
  __device__ void reduce_in_slot(int slot) const {
    static_assert(rows_of_lane == 1 && Mine::Result::keeps_exponentials);
    const SliceOfTile slice = block.slice[slot];
    const bool has_columns = this->has_columns(slot);
    if (has_columns) {
      for (int k = Mover::template columns_in_slot<Place>(slot, lane); k < columns; ++k)
        held(slot, k) = Mine::nothing();
      shared.tops[slot_of_thread][lane] =
          Mine::template largest<columns>([&](int k) { return held(slot, k); });
    } else {
      shared.tops[slot_of_thread][lane] = Mine::nothing();
    }
    barrier();
    const Acc max = maximum_or_nan(
        Mine::template largest<Block::slots>([&](int t) { return shared.tops[t][lane]; }), -largest_v<Acc>);
    if (slot_of_thread == 0) shared.maxima_of_rows[lane] = max;
    const auto exponential = Mine::Part::exponential_below(max);
    auto sum = ShareSum<Acc>::none();
    if (has_columns) {
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
    }
    shared.sums[slot_of_thread][lane] = sum;
    barrier();
    if (thread < rows) {
      ShareSum<Acc> of_row = shared.sums[0][thread];
#pragma unroll
      for (int t = 1; t < Block::slots; ++t) of_row.join(shared.sums[t][thread]);
      tell(slot, slice, thread, shared.maxima_of_rows[thread], of_row);
    }
    if (thread == 0) this->has_told(slot);
  }

  /// Forms the outputs of a slice whose rows' results are known.
  __device__ void write(int slot) const {
    Result result[rows_of_lane];
    Acc max[rows_of_lane];
#pragma unroll
    for (int v = 0; v < rows_of_lane; ++v) {
      result[v] = shared.results[this->waits_at(slot)][lane * rows_of_lane + v];
      max[v] = shared.maxima[this->waits_at(slot)][lane * rows_of_lane + v];
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
  }
};

/// The same where there is a transform. Its rows of a lane, which are 32 apart, are taken one after the
/// other: what a transform makes of them needs registers. Each thread subtracts the maximum of its own
/// columns.
template <class Tiles>
struct WorkOnTransformedTiles : MoverOfTiles<Tiles> {
  using Mover = MoverOfTiles<Tiles>;
  using Mover::barrier;
  using Mover::block;
  using Mover::boxes;
  using Mover::call;
  using Mover::lane;
  using Mover::reduces;
  using Mover::rows;
  using Mover::rows_of_lane;
  using Mover::shared;
  using Mover::slot_of_thread;
  using Mover::softmax;
  using Mover::thread;
  using typename Mover::Acc;
  using typename Mover::Block;
  using typename Mover::Mine;
  using typename Mover::Problem;
  using typename Mover::Result;
  using typename Mover::Shared;
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

  __device__ void fetch(int slot, const SliceOfTile& slice) const {
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
    auto& maxima = shared.maxima[this->waits_at(slot)];
#pragma unroll 1
    for (int v = 0; v < rows_of_lane; ++v) {
      if (!this->has_columns(slot)) {
        maxima[slot_of_thread][row(v)] = -largest_v<Acc>;
        shared.sums[slot_of_thread][row(v)] = ShareSum<Acc>::none();
        continue;
      }
      Mine mine;
      make(slot, v, place_in_slot(slot, v), mine);
      Acc max[1];
      mine.maxima(mine.top(), max);
      maxima[slot_of_thread][row(v)] = max[0];
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
      this->publish(slot, slice, thread, join_shares<Acc>([&](int share) {
                      return Mine::Part::share(maxima[share][thread], shared.sums[share][thread]);
                    }));
    }
    barrier();  // the next slice's sums take the place of these
    if (thread == 0) this->has_told(slot);
  }

  __device__ void write(int slot) const {
#pragma unroll 1
    for (int v = 0; v < rows_of_lane; ++v) {
      const Result result[1] = {shared.results[this->waits_at(slot)][row(v)]};
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
      const Acc max[1] = {shared.maxima[this->waits_at(slot)][slot_of_thread][row(v)]};
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
  }
};

template <class Tiles>
using WorkOfMovers = std::conditional_t<makes_logits<typename Tiles::Problem>, WorkOnTransformedTiles<Tiles>,
                                        WorkOnTiles<Tiles>>;

/// All slices that come as boxes.
template <class Tiles>
struct MoversOfBoxes : WorkOfMovers<Tiles> {
  using Work = WorkOfMovers<Tiles>;
  using Work::all;
  using Work::block;
  using Work::call;
  using Work::reduce;
  using Work::shared;
  using Work::thread;
  using Work::Work;

  __device__ void finish(int slot) const {
    if (this->has_columns(slot)) this->write(slot);
    fence_proxy_async_shared();  // what was written to the slot comes before the next copy
    mbarrier_arrive(&block.written[slot]);
  }

  /// Nothing but memory is waited for: what else this block has to do may be what it would wait for.
  __device__ void run() const {
    RingCursor oldest, next;
    int pending = 0;
    bool ends = false;
    for (;;) {
      if (pending > 0 && all(this->is_known(oldest))) {
        finish(oldest.slot);
        oldest.advance(this->slots_of_ring());
        --pending;
      } else if (ends) {
        if (pending == 0) return;
      } else if (pending < Work::Shared::waiting) {
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
        next.advance(this->slots_of_ring());
        ++pending;
      }
    }
  }
};

/// The warp that copies slices by boxes.
template <class Tiles>
struct CopierOfTiles : Tiles {
  using Base = Tiles;
  using Base::block;
  using Base::call;
  using Base::reduces;
  using Base::rows;
  using Base::rows_of_tile;
  using typename Base::Problem;
  using typename Base::Shared;
  using typename Base::Sides;

  /// The other lanes are there for masks and temperatures.
  static constexpr bool has_operands = operands_of<typename Problem::Transform> != 0,
                        has_lanes = has_operands || Shared::has_temperatures;
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
  __device__ void load(int slot, const SliceOfTile& slice) const {
    mbarrier_arrive_expect_tx(&block.full[slot], this->bytes_of_slot(slot));
    const Corner at = corner(slice);
    const std::uint32_t full = shared_address(&block.full[slot]);
    const auto& boxes = this->boxes_of(slice);
    if constexpr (Base::anywhere) {
#pragma unroll
      for (int i = 0; i < Sides::in_turn; ++i)
        cp_async_bulk_tensor_4d(shared_address(this->in_turn(slot, i)), &boxes.in_turn[i], at.inner,
                                at.column / Sides::in_turn, at.next, at.last, full);
    } else {
      cp_async_bulk_tensor_4d(shared_address(this->in_ring(slot)), &boxes.x, at.inner, at.column, at.next,
                              at.last, full);
    }
  }
  /// Until the outputs in a slot can be stored, or have been by others.
  __device__ void wait_for(const RingCursor& at) const {
    mbarrier_wait_parity(Base::anywhere ? &block.stored[at.slot] : &block.written[at.slot], at.parity);
  }
  __device__ void store(int slot) const {
    if constexpr (Base::stores_boxes && !Base::anywhere) {
      if (reduces) return;
      const Corner at = corner(block.slice[slot]);
      if (at.inner < 0) return;
      cp_async_bulk_tensor_4d_store(&this->boxes_of(block.slice[slot]).y, at.inner, at.column, at.next,
                                    at.last, shared_address(this->in_ring(slot)));
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
  __device__ void bring_temperatures(int slot, const SliceOfTile& slice) const {
    if constexpr (Shared::has_temperatures) {
#pragma unroll
      for (int row = lane; row < rows; row += 32) this->bring_temperature(slot, slice, row);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&block.full[slot]);
    }
  }
  /// Tells those who wait for a slot that nothing comes to it any more.
  __device__ void end_at(int slot) const {
    block.slice[slot].tile = call.tiles;
    for (int i = 0; i < Base::SharedBlock::arrivals; ++i) mbarrier_arrive(&block.full[slot]);
  }
  /// What is still to be stored from so many slots, the oldest one first.
  __device__ void store_rest(RingCursor at, int in_use) const {
    for (; in_use > 0; --in_use) {
      wait_for(at);
      if (lane == 0) store(at.slot);
      at.advance(this->slots_of_ring());
    }
    cp_async_bulk_wait_group_read<0>();
  }
};

/// The warps that store outputs of columns that begin anywhere, each those of some boxes, or of some columns
/// of one: of each column rows_of_step rows, from where a sector of memory begins on; the first tile's what
/// is before, too.
template <class Tiles>
struct StorerOfTiles : Tiles {
  using Base = Tiles;
  using Base::block;
  using Base::call;
  using Base::rows_of_step;
  using Base::rows_of_tile;
  using typename Base::Problem;
  using typename Base::Sides;
  using Out = typename Problem::Out;
  static constexpr int boxes = Sides::in_turn, warps = Sides::storing_warps,
                       boxes_of_warp = boxes > warps ? boxes / warps : 1,
                       warps_of_box = boxes > warps ? 1 : warps / boxes,
                       columns_of_warp = Sides::columns_in_turn / warps_of_box;
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
    for (int b = 0; b < boxes_of_warp; ++b) store_columns(slot, box + b * warps);
  }
  __device__ void store_columns(int slot, int which) const {
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
    const Out* const outputs =
        reinterpret_cast<const Out*>(this->in_turn(slot, which)[begin]) + call.boxes.first_row[which];
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
      at.advance(this->slots_of_ring());
    }
  }
};

/// A tensor of rows that are neighbours, columns and two more dimensions of rows, for the copy engine.
struct TensorOfRows {
  cuuint64_t extents[4], strides[3];  ///< strides in bytes

  /// Strides are to be multiples of 16 bytes, and nothing too large.
  template <class T>
  bool fits(const T* data) const {
    bool fits = tensor_map_encoder() != nullptr && reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
    for (const cuuint64_t stride : strides)
      fits = fits && stride != 0 && stride % 16 == 0 && stride < cuuint64_t(1) << 40;
    for (const cuuint64_t all : extents) fits = fits && all < cuuint64_t(1) << 31;
    return fits;
  }
  /// In boxes of so many rows and columns; false where it does not fit.
  template <class T>
  bool encode(CUtensorMap& map, const T* data, int rows, int columns) const {
    if (!fits(data)) return false;
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
};

/// The boxes of a call.
struct BoxesOfTiles {
  /// Of the kernel whose blocks need most.
  template <class Problem>
  static constexpr int most_rows_of_lane = takes_pairs<Problem> || transforms_pairs<Problem> ? 2 : 1;

  /// Whether there are wide ones. (Of doubles boxes are as wide anyway; what a transform makes of 16 bits
  /// takes longer than memory, and so do temperatures of theirs, which were not tried.)
  template <class Problem>
  static constexpr bool may_be_wide = [] {
    using In = typename Problem::In;
    if (sizeof(In) != sizeof(typename Problem::Out)) return false;
    if constexpr (takes_pairs<Problem>) {
      return PartsOfChain<typename Problem::Transform>::temperatures == 0;
    } else {
      return sizeof(In) == 4;
    }
  }();
  /// Whether there are such of columns in turn. (Operands are read by threads: a temperature, a mask and a
  /// bias as large as x and one for all rows of 1000 columns that begin anywhere 0.55, 0.52, 0.55 and 0.53
  /// so, 0.50, 0.505, 0.565 and 0.50 by others. Double with a factor 300 columns 0.43 so and 0.48, 1000 0.49
  /// and 0.465, 2048 0.48 twice.)
  template <class Problem>
  static constexpr bool may_be_anywhere = [] {
    using In = typename Problem::In;
    using Transform = typename Problem::Transform;
    constexpr std::size_t most_bytes = 4096;  // what drivers before R530 take as arguments
    return (sizeof(In) == 4 || (sizeof(In) == 8 && !has_transform_v<Problem>) ||
            (takes_pairs<Problem> && PartsOfChain<Transform>::temperatures == 0)) &&
           sizeof(typename Problem::Out) == sizeof(In) && operands_of<Transform> == 0 &&
           !is_known_at_run_time<Transform> &&
           // (A cluster's call has them twice.)
           sizeof(TilesCall<TilesCome::by_boxes_anywhere, Problem>) +
                   sizeof(TileBoxes<TilesCome::by_boxes_anywhere>) <
               most_bytes;
  }();

  /// Whether slices come as boxes, on boundaries of so many bytes (boxes have to be on those of 16).
  template <class Problem>
  static bool come_as_boxes(const Problem& problem, index_type bytes) {
    const RowGeometry& g = problem.geometry;
    const bool rows_fill_boxes =
        g.rank <= 1 || (g.rank <= 3 && rows_fill<TileBlock<Problem>::lanes * most_rows_of_lane<Problem>>(g));
    return rows_fill_boxes && columns_begin_at(problem, bytes);
  }
  /// Of a tile.
  template <class Problem>
  static constexpr int rows_of_wide = 2 * TileBlock<Problem>::lanes* most_rows_of_lane<Problem>;
  /// Whether rows and columns lie for wide ones.
  template <class Problem>
  static bool lie_for_wide(const Problem& problem) {
    const RowGeometry& g = problem.geometry;
    const int inner = g.rank - 1;
    return g.rank >= 1 && g.rank <= 3 && g.x_stride[inner] == 1 && g.y_stride[inner] == 1 &&
           rows_fill<rows_of_wide<Problem>>(g) && columns_begin_at(problem, 16) &&
           (sizeof(typename Problem::In) != 2 || rows_come_in_pairs(problem));
  }
  /// Whether columns can come in turn, and do not begin on boundaries of so many bytes. Not in place, where a
  /// tile's first rows would be outputs of the tile before.
  template <class Problem>
  static bool lie_for_anywhere(const Problem& problem, index_type boundary) {
    const RowGeometry& g = problem.geometry;
    return problem.operation != Operation::logsumexp && g.rank == 1 && g.x_stride[0] == 1 &&
           g.y_stride[0] == 1 && !columns_begin_at(problem, boundary) && !is_in_place(problem);
  }

  /// Whether the copy engine takes the boxes that `find` would find.
  template <class Tiles, class Problem>
  static bool exist(const Problem& problem) {
    if constexpr (Tiles::anywhere) {
      for (int i = 0; i < Tiles::Sides::in_turn; ++i) {
        const InTurn<Tiles> in_turn(problem, i);
        if (!in_turn.tensor.fits(in_turn.begin)) return false;
      }
      return problem.geometry.rank == 1;
    } else {
      return has_boxes_of_x<Tiles>(problem) && tensor_of_x(problem).fits(problem.x) &&
             (!has_boxes_of_y<Tiles>(problem) ||
              (rows_stored(problem) > 0 && problem.geometry.y_stride[problem.geometry.rank - 1] == 1 &&
               tensor_of_y(problem).fits(problem.y)));
    }
  }

  /// Boxes of so many columns of x and y, if the copy engine takes them: strides that are multiples of 16
  /// bytes, and rows enough side by side.
  template <class Tiles, class Problem, TilesCome come>
  static bool find(const Problem& problem, TileBoxes<come>& boxes, int columns = columns_of_tile<Problem>) {
    if (!has_boxes_of_x<Tiles>(problem)) return false;
    const RowGeometry& g = problem.geometry;
    constexpr int rows = Tiles::rows_of_tile;
    const int inner = g.rank - 1;
    boxes.rows_before = come == TilesCome::by_wide_boxes ? rows_before_boundary(problem) : 0;
    boxes.tiles_of_inner = static_cast<unsigned>(ceil_div(g.extent[inner] + boxes.rows_before, rows));
    boxes.extent = g.rank > 1 ? static_cast<unsigned>(g.extent[inner - 1]) : 1;
    if (!tensor_of_x(problem).encode(boxes.x, problem.x, rows, columns)) return false;
    if (!has_boxes_of_y<Tiles>(problem)) return true;
    boxes.rows_stored = rows_stored(problem);
    return g.y_stride[inner] == 1 && boxes.rows_stored > 0 &&
           tensor_of_y(problem).encode(boxes.y, problem.y, rows, columns);
  }
  /// Of columns of x in turn, which are multiples of 16 bytes apart, from boundaries of as many on.
  template <class Tiles, class Problem>
  static bool find(const Problem& problem, TileBoxes<TilesCome::by_boxes_anywhere>& boxes,
                   int columns = columns_of_tile<Problem>) {
    using Sides = typename Tiles::Sides;
    static_assert(Sides::in_turn <= TileBoxes<TilesCome::by_boxes_anywhere>::most);
    const RowGeometry& g = problem.geometry;
    if (g.rank != 1) return false;
    boxes.tiles_of_inner = static_cast<unsigned>(ceil_div(g.rows, index_type(Tiles::rows_of_step)));
    boxes.extent = 1;
    bool found = true;
    for (int i = 0; i < Sides::in_turn; ++i) {
      const InTurn<Tiles> in_turn(problem, i);
      boxes.first_row[i] = in_turn.first_row;
      found = found && in_turn.tensor.encode(boxes.in_turn[i], in_turn.begin, Tiles::SharedBlock::rows_of_box,
                                             columns / Sides::in_turn);
    }
    return found;
  }
  /// Tiles of a call with these boxes.
  template <class Problem, TilesCome come>
  static index_type tiles_of(const Problem& problem, const TileBoxes<come>& boxes) {
    const RowGeometry& g = problem.geometry;
    return g.rows > 0 ? g.rows / g.extent[g.rank - 1] * boxes.tiles_of_inner : 0;
  }

 private:
  /// Whether rows side by side, where they do not go on elsewhere, are enough for so many in a box.
  template <int rows>
  static bool rows_fill(const RowGeometry& g) {
    const index_type inner = g.extent[g.rank - 1];
    return g.rank == 1 || inner % rows == 0 || inner >= 8 * rows;
  }
  template <class Tiles, class Problem>
  static bool has_boxes_of_x(const Problem& problem) {
    const RowGeometry& g = problem.geometry;
    return g.rank >= 1 && g.rank <= 3 && g.x_stride[g.rank - 1] == 1 && rows_fill<Tiles::rows_of_tile>(g);
  }
  template <class Tiles, class Problem>
  static bool has_boxes_of_y(const Problem& problem) {
    return problem.operation != Operation::logsumexp && Tiles::stores_boxes;
  }
  /// Of the rows that are neighbours, see TileBoxes.
  template <class Problem>
  static index_type rows_stored(const Problem& problem) {
    constexpr auto unit = 16 / static_cast<index_type>(sizeof(typename Problem::Out));
    return problem.geometry.extent[problem.geometry.rank - 1] / unit * unit;
  }
  template <class Problem>
  static TensorOfRows tensor_of_x(const Problem& problem) {
    const RowGeometry& g = problem.geometry;
    return tensor_of(g, sizeof(*problem.x), g.extent[g.rank - 1], g.x_column_stride, g.x_stride);
  }
  template <class Problem>
  static TensorOfRows tensor_of_y(const Problem& problem) {
    const RowGeometry& g = problem.geometry;
    return tensor_of(g, sizeof(*problem.y), rows_stored(problem), g.y_column_stride, g.y_stride);
  }
  template <class Strides>
  static TensorOfRows tensor_of(const RowGeometry& g, std::size_t bytes, index_type inner_extent,
                                index_type column_stride, const Strides& row_strides) {
    const auto size = static_cast<index_type>(bytes);
    const int inner = g.rank - 1;
    const auto extent = [&](int d) { return d < 0 ? cuuint64_t(1) : static_cast<cuuint64_t>(g.extent[d]); };
    const auto stride = [&](int d) { return static_cast<cuuint64_t>(d < 0 ? 16 : row_strides[d] * size); };
    return {{static_cast<cuuint64_t>(inner_extent), static_cast<cuuint64_t>(g.columns), extent(inner - 1),
             extent(inner - 2)},
            {static_cast<cuuint64_t>(column_stride * size), stride(inner - 1), stride(inner - 2)}};
  }
  /// Of the columns in turn those from one on, from the boundary before its first row on.
  template <class Tiles>
  struct InTurn {
    using In = typename Tiles::Problem::In;
    const In* begin;
    int first_row;
    TensorOfRows tensor;

    InTurn(const typename Tiles::Problem& problem, int column) {
      constexpr index_type size = sizeof(In), columns_in_turn = Tiles::Sides::in_turn,
                           boundary = Tiles::Sides::bytes_of_boundary;
      static_assert(columns_in_turn * size % boundary == 0);
      const RowGeometry& g = problem.geometry;
      const auto address = reinterpret_cast<std::uintptr_t>(problem.x + column * g.x_column_stride);
      begin = reinterpret_cast<const In*>(address / boundary * boundary);
      first_row = static_cast<int>(address % boundary / size);
      tensor = {{static_cast<cuuint64_t>(g.rows + first_row),
                 static_cast<cuuint64_t>(ceil_div(g.columns - column, columns_in_turn)), 1, 1},
                {static_cast<cuuint64_t>(columns_in_turn * g.x_column_stride * size), boundary, boundary}};
    }
  };
};

}  // namespace KokkosSoftmax::impl

#endif
