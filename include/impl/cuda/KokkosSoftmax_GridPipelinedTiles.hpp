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

#include <impl/cuda/KokkosSoftmax_PipelinedTiles.hpp>

#include <algorithm>
#include <string_view>

namespace KokkosSoftmax::impl {

/// Slices whose results are joined first, by the block that has the last of them; where there are more, those
/// of all these then by the block that has the row's last one. (16384 columns on one H200, fraction of a
/// copy, all joined by one and so: float 0.69 and 0.75, bfloat16 0.49 and 0.64.)
inline constexpr unsigned tile_slices_joined = 16;

/// Tickets are slices of all tiles.
template <TilesCome come, class Problem>
struct GridTilesCall : TilesCall<come, Problem> {
  unsigned tickets;
  bool askers_join;  ///< see AskerOfTiles
  bool draws_early;  ///< tickets: once the results of a slot's rows are known, not once its outputs are there

  __device__ SliceOfTile slice(unsigned ticket) const {
    const unsigned tile = ticket / this->slices;
    return {tile, ticket - tile * this->slices};
  }
};

template <TilesCome come, int rows_of_lane, class Problem>
struct SharedGridTileBlock : SharedTileBlock<TilesMeet::in_memory, come, rows_of_lane, Problem> {
  using Base = SharedTileBlock<TilesMeet::in_memory, come, rows_of_lane, Problem>;
  Mbarrier to_join[Base::slots];  ///< slices up to the next one of these
  SliceOfTile to_join_to[Base::slots];
  SliceOfTile next;
  unsigned next_ticket;
};

/// A thread of a side of a block.
template <TilesCome come, int rows_of_lane, class Problem>
struct TilesOfGrid : TilesOfBlock<come, rows_of_lane, Problem, GridTilesCall<come, Problem>,
                                  SharedGridTileBlock<come, rows_of_lane, Problem>> {
  using Base = TilesOfBlock<come, rows_of_lane, Problem, GridTilesCall<come, Problem>,
                            SharedGridTileBlock<come, rows_of_lane, Problem>>;
  using Base::block;
  using Base::call;
  using Base::rows;
  using Base::shared;
  using Base::side;
  using Base::sides;
  using Base::slots;
  using typename Base::Acc;
  using typename Base::Words;

  std::uint32_t tag;

  __device__ TilesOfGrid(const typename Base::Call& call_, typename Base::SharedBlock& block_, int side_,
                         std::uint32_t tag_)
      : Base(call_, block_, side_), tag(tag_) {}

  __device__ auto& in_ring(int slot) const { return block.held[slot]; }
  __device__ auto& in_turn(int slot, int which) const { return block.held[slot][which]; }
  __device__ static constexpr int slots_of_ring() { return slots; }
  __device__ static constexpr std::uint32_t bytes_of_slot(int) { return Base::SharedBlock::slot_bytes; }
  __device__ const TileBoxes<come>& boxes_of(const SliceOfTile&) const { return call.boxes; }
  /// Tells others what a slice has of a row.
  __device__ void publish(int, const SliceOfTile& slice, int row, const PartialSoftmax<Acc>& partial) const {
    Words::publish(words(slice.tile, slice.slice) + row, partial, tag);
  }
  /// By one thread, when that is done for all rows of a slot.
  __device__ void has_told(int slot) const { mbarrier_arrive(&shared.told[slot]); }
  /// Where the results of a slot's rows are to be.
  __device__ static int waits_at(int slot) { return slot; }
  __device__ bool is_known(const RingCursor& at) const {
    return mbarrier_test_parity(&shared.known[at.slot], at.parity);
  }

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
  /// By one thread: a slice that is on its way to a slot. Where it is the last of those that are joined, what
  /// others tell of these can be joined by now.
  __device__ void comes(int slot, const SliceOfTile& slice, RingCursor& to_join) const {
    Base::comes(slot, slice);
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
  __device__ void end(unsigned ticket, RingCursor& to_join) const {
    have_joined(to_join, {call.tiles, 0});
    if (ticket == call.tickets + gridDim.x - 1) {
      call.workspace.header->next_ticket = 0;
      call.workspace.end_launch(tag - 1);
    }
  }
};

/// All slices that a block draws, where its movers fetch them.
template <class Tiles>
struct MoversByThemselves : WorkOfMovers<Tiles> {
  using Work = WorkOfMovers<Tiles>;
  using Work::all;
  using Work::barrier;
  using Work::block;
  using Work::call;
  using Work::fetch;
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

  /// Nothing but memory is waited for, see MoversOfBoxes.
  __device__ void run() const {
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
          const int slot = (oldest.slot + pending + coming) % slots;
          if (thread == 0) this->comes(slot, block.next, to_join);
          fetch(slot, block.next);
          ++coming;
          if (pending + coming < slots) {
            barrier();
            draw();
          }
          continue;
        }
      }
      if (pending > 0 && all(this->is_known(oldest))) {
        draw();
        this->write(oldest.slot);
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
      block.slice[oldest.slot].tile = call.tiles;
      this->end(ticket, to_join);
      mbarrier_arrive(&shared.told[oldest.slot]);
    }
  }
};

/// The warp that copies slices by boxes. It draws them as slots become free, and says when there are no more.
template <class Tiles>
struct CopierOfGrid : CopierOfTiles<Tiles> {
  using Base = CopierOfTiles<Tiles>;
  using Base::Base;
  using Base::block;
  using Base::call;
  using Base::has_lanes;
  using Base::lane;
  using Base::slots;

  /// Until the results of its rows are there, so that it will be written soon.
  __device__ void wait_for_results(const RingCursor& at) const {
    for (auto& side : block.side) mbarrier_wait_parity(&side.known[at.slot], at.parity);
  }
  __device__ unsigned draw() const {
    unsigned ticket = 0;
    if (lane == 0) ticket = Tiles::draw();
    if constexpr (has_lanes) ticket = __shfl_sync(0xffffffffu, ticket, 0);
    return ticket;
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
        this->wait_for(at);
        if (lane == 0) this->store(at.slot);
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
          this->end(ticket, to_join);
          this->end_at(next);
        }
        break;
      }
      const SliceOfTile slice = call.slice(ticket);
      if (lane == 0) {
        this->comes(next, slice, to_join);
        this->load(next, slice);
      }
      this->bring_temperatures(next, slice);
      this->prefetch_masks(slice);
      ++in_use;
    }
    this->store_rest(at, in_use);
  }
};

/// The warp that joins what the slices of a tile have told, in their order, where its block has the last of
/// them, and tells the result.
template <class Tiles>
struct JoinerOfTiles : Tiles {
  using Base = Tiles;
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
template <class Tiles>
struct AskerOfTiles : Tiles {
  using Base = Tiles;
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

template <TilesCome come, class Problem>
using SidesOfGridBlock = SidesOfTileBlock<TilesMeet::in_memory, come, Problem>;

template <TilesCome come, int rows_of_lane, class Problem>
__global__ void __launch_bounds__(SidesOfGridBlock<come, Problem>::threads,
                                  SidesOfGridBlock<come, Problem>::blocks_a_multiprocessor)
    grid_pipelined_tiles_kernel(const __grid_constant__ GridTilesCall<come, Problem> call) {
  using Sides = SidesOfGridBlock<come, Problem>;
  using Tiles = TilesOfGrid<come, rows_of_lane, Problem>;
  using Shared = typename Tiles::SharedBlock;
  using Asker = AskerOfTiles<Tiles>;
  // (Boxes lie on boundaries of 128 bytes.)
  extern __shared__ __align__(128) unsigned char shared_of_tile_block[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_of_tile_block);
  grid_dependency_wait();
  const std::uint32_t epoch = call.workspace.epoch();
  call.workspace.clear_in_last_of_epochs(epoch);
  if (threadIdx.x == 0) {
    shared.init_barriers();
    for (int slot = 0; slot < Shared::slots; ++slot) {
      mbarrier_init(&shared.to_join[slot], 1);
      for (auto& side : shared.side)
        mbarrier_init(&side.known[slot], call.askers_join ? Asker::warps_that_join : 1);
    }
    if constexpr (Sides::boxes) fence_mbarrier_init();
  }
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x / 32),
            side = Sides::sides == 1 ? 0 : warp / Sides::warps_of_side;
  const auto block = [&](int which) { return Tiles(call, shared, which, CudaWorkspace::tag_of(epoch)); };
  if constexpr (Sides::boxes) {
    constexpr int warp_of_copier = Sides::sides * Sides::warps_of_side;
    if constexpr (Sides::anywhere) {
      if (warp > warp_of_copier) return StorerOfTiles<Tiles>(block(0), warp - warp_of_copier - 1).run();
    }
    if (warp == warp_of_copier) {
      using Copier = CopierOfGrid<Tiles>;
      if (Copier::has_lanes || threadIdx.x % 32 == 0) Copier(block(0)).run();
      return;
    }
  }
  constexpr int warps_of_movers = TileBlock<Problem>::threads / 32;
  const int beyond = warp - side * Sides::warps_of_side - warps_of_movers;
  using Movers = std::conditional_t<Sides::boxes, MoversOfBoxes<Tiles>, MoversByThemselves<Tiles>>;
  if (beyond < 0) return Movers(block(side)).run();
  if (beyond < (call.askers_join ? Asker::warps_that_join : 1)) return Asker(block(side), beyond).run();
  if (!call.askers_join) JoinerOfTiles<Tiles>(block(side), beyond - 1).run();
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
        } else if constexpr (BoxesOfTiles::may_be_anywhere<Problem>) {
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
    if constexpr (!BoxesOfTiles::may_be_wide<Problem>) {
      return false;
    } else {
      constexpr bool is_16_bit = sizeof(typename Problem::In) == 2;
      if (problem.operation == Operation::logsumexp || !BoxesOfTiles::lie_for_wide(problem)) return false;
      const RowGeometry& g = problem.geometry;
      const index_type slices = slices_of_tiles(problem);
      if (ceil_div(g.rows, BoxesOfTiles::rows_of_wide<Problem>) * slices <
          4 * index_type(exec.cuda_device_prop().multiProcessorCount))
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
  /// Whether these are of columns in turn: of columns that begin anywhere, from memory. (One H200, fraction
  /// of a copy of 1 GiB of floats, so and by the better one of the other kernels: 270 columns 0.53 and 0.56,
  /// 285 0.54 both, 300 0.575 and 0.53, 400 0.70 and 0.58, 512 0.745 and 0.65, 600 0.66 and 0.57, 1000 0.73
  /// and 0.60, 2048 0.70 and 0.59, 4096 0.67 and 0.56, 8191 0.66 and 0.58, 16385 0.62 and 0.59, 20481 0.605
  /// and 0.595, 24577 0.59 and 0.60; 20 MB of 1000 columns 0.505 and 0.64, 80 MB 0.62 and 0.61, 72 MB of 300
  /// columns 0.53 and 0.61. With a factor 300 columns 0.54 and 0.50, 400 0.67 and 0.52, 1000 0.70 and 0.55,
  /// 4096 0.65 and 0.56, 8191 0.64 and 0.57, 16385 0.59 and 0.58, GELU 300 0.49 and 0.54, 400 0.60 and 0.485,
  /// 1000 0.63 and 0.52, 4096 0.58 and 0.545, 8191 0.57 and 0.545, 16385 0.53 and 0.55. Double 256 columns
  /// 0.695 and 0.71, 300 0.58 and 0.505, 600 0.635 and 0.515, 2048 0.60 and 0.54, 4096 0.54 and 0.56, 107 MB
  /// of 1000 columns 0.58 and 0.52, 27 MB 0.47 and 0.54. Bfloat16 300 columns 0.39 and 0.38, 400 0.51 and
  /// 0.46, 512 0.61 and 0.50, 1000 0.58 and 0.50, 2000 0.54 and 0.51, 4097 0.51 and 0.53, 107 MB of 1000
  /// columns 0.50 both.)
  template <class Problem>
  static bool come_as_boxes_anywhere([[maybe_unused]] const Problem& problem) {
    if constexpr (!BoxesOfTiles::may_be_anywhere<Problem>) {
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
      return BoxesOfTiles::lie_for_anywhere(problem, boundary) && g.columns >= fewest_columns &&
             slices_of_tiles(problem) <= most_slices &&
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
  template <class Problem>
  static constexpr int most_rows_of_lane = BoxesOfTiles::most_rows_of_lane<Problem>;

  /// For tiles of one or two sides, with one or two rows a lane; by boxes there are at most an eighth more
  /// (BoxesOfTiles::find), anywhere a seventh (rows_again of what is from tile to tile), and one for
  /// rows_before_boundary.
  template <class Problem>
  static index_type words(const Problem& problem) {
    constexpr int rows = 4 * TileBlock<Problem>::lanes;
    const index_type tiles = ceil_div(problem.geometry.rows + problem.geometry.rows / 7, rows) + 1,
                     slices = std::min(slices_of_tiles(problem), most_slices);
    return tiles * rows * (slices + ceil_div(slices, tile_slices_joined) + 1);
  }

  template <int rows_of_lane, class Problem>
  static void launch_rows(const Kokkos::Cuda& exec, const Problem& problem) {
    const bool no_rows = problem.geometry.rows == 0;
    if constexpr (SharedTiles<TilesMeet::in_memory, rows_of_lane, Problem>::copies) {
      if constexpr (BoxesOfTiles::may_be_anywhere<Problem> && rows_of_lane == most_rows_of_lane<Problem>) {
        if ((come_as_boxes_anywhere(problem) || no_rows) &&
            launch_boxes<TilesCome::by_boxes_anywhere, rows_of_lane>(exec, problem))
          return;
      }
      if constexpr (BoxesOfTiles::may_be_wide<Problem>) {
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
    const bool no_rows = problem.geometry.rows == 0,
               found =
                   !no_rows && BoxesOfTiles::find<TilesOfGrid<come, rows_of_lane, Problem>>(problem, boxes);
    if (found || no_rows) launch<come, rows_of_lane>(exec, problem, boxes);
    return found;
  }

  template <TilesCome come, int rows_of_lane, class Problem>
  static void launch(const Kokkos::Cuda& exec, const Problem& problem, const TileBoxes<come>& boxes) {
    using Sides = SidesOfGridBlock<come, Problem>;
    const RowGeometry& g = problem.geometry;
    constexpr int rows = TilesOfGrid<come, rows_of_lane, Problem>::rows_of_tile;
    const index_type slices = slices_of_tiles(problem);
    index_type tiles = ceil_div(g.rows, rows);
    if constexpr (Sides::boxes) tiles = BoxesOfTiles::tiles_of(problem, boxes);
    const index_type tickets = tiles * slices;
    const CooperativeLimits& device = limits<come, rows_of_lane, Problem>(exec);
    const index_type resident =
        static_cast<index_type>(device.multiprocessors) * device.blocks_a_multiprocessor;
    launch_labelled(exec, kernel_label(problem.operation, name), [&] {
      launch_cooperatively(exec, &grid_pipelined_tiles_kernel<come, rows_of_lane, Problem>,
                           dim3(static_cast<unsigned>(std::clamp<index_type>(tickets, 1, resident))),
                           Sides::threads, shared_bytes<come, rows_of_lane, Problem>,
                           GridTilesCall<come, Problem>{
                               {problem, CudaWorkspace::get<typename Problem::Acc>(exec, words(problem)),
                                static_cast<unsigned>(slices), static_cast<unsigned>(tiles), boxes,
                                rows_come_in_pairs(problem)},
                               static_cast<unsigned>(tickets),
                               askers_join<come>(problem),
                               draws_early<come>(problem)});
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
  static constexpr int shared_bytes = sizeof(SharedGridTileBlock<come, rows_of_lane, Problem>);

  template <TilesCome come, int rows_of_lane, class Problem>
  static const CooperativeLimits& limits(const Kokkos::Cuda& exec) {
    return cooperative_limits(&grid_pipelined_tiles_kernel<come, rows_of_lane, Problem>, exec.cuda_device(),
                              SidesOfGridBlock<come, Problem>::threads,
                              shared_bytes<come, rows_of_lane, Problem>);
  }
};

}  // namespace KokkosSoftmax::impl

#endif
