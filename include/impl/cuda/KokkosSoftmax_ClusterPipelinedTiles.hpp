// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The CUDA kernel for rows of a few slices whose columns are not contiguous (compute capability 9.0): as
/// grid_pipelined_tiles, to the same bits, but a tile's slices are those of the blocks of a cluster, one
/// each. What a block knows of a row it writes to the shared memory of the block that joins that row, and
/// this one writes the result to all: slots are free sooner than by way of L2. Clusters draw tiles by a
/// ticket of their first block, one ahead, and do not wait for each other.
///
/// The blocks of a cluster have a tile's slices in turn, for the last one may have few columns. Where rows
/// have two slices, and the second has half as many columns at most, it comes to slots half as large, so that
/// a ring has four in place of three.
///
/// Why it cannot hang: the blocks of a cluster take the same tiles in the same order, one slice of each; what
/// a block waits for is told by others of the oldest tile that it has, which all of them have in a slot, or
/// will before any later one. Why nothing is overwritten: what is told of two tiles has a place each, in
/// turn. A block tells of a tile when it has written the one two before, whose results had come from all that
/// join, which have read by then what they were told of it; and results come when all blocks have told of a
/// tile, which have written the one two before by then.
///
/// (One H200, fractions of a copy of 1 GiB, grid_pipelined_tiles and this kernel: float 512 columns 0.87 and
/// 0.92, 1000 0.86 and 0.91, 2048 0.84 and 0.86, that begin anywhere 512 0.76 and 0.80, 1000 0.74 and 0.79;
/// double 512 0.76 and 0.84, 1000 0.755 and 0.82, that begin anywhere 512 0.66 and 0.76; bfloat16 512 0.81
/// and 0.92, 1000 0.78 and 0.85, 2048 0.75 and 0.83. Two slices of a tile for each block, in clusters of half
/// as many: float 1024 0.895 for 0.92, bfloat16 0.78 for 0.85. Next tiles' boxes brought to L2 beforehand:
/// float 512 0.895 for 0.92, double 0.79 for 0.84. Slots half as large: float 300 0.81 and 0.91, bfloat16 352
/// 0.78 and 0.89, double 160 0.63 and 0.81, that begin anywhere float 352 0.73 and 0.82.)

#ifndef KOKKOSSOFTMAX_CLUSTERPIPELINEDTILES_HPP
#define KOKKOSSOFTMAX_CLUSTERPIPELINEDTILES_HPP

#include <impl/cuda/KokkosSoftmax_GridPipelinedTiles.hpp>

#include <algorithm>
#include <stdexcept>
#include <string_view>
#include <type_traits>

namespace KokkosSoftmax::impl {

/// Blocks of a cluster, as many as slices of a row, at most.
inline constexpr int most_blocks_of_tile = 16;

template <TilesCome come, class Problem>
struct ClusterTilesCall : TilesCall<come, Problem> {
  bool last_is_half;              ///< see last_slice_is_half
  TileBoxes<come> boxes_of_last;  ///< then
};

/// Whether rows have two slices, of which the second one needs half a slot.
template <class Problem>
bool last_slice_is_half(const Problem& problem) {
  constexpr index_type whole = columns_of_tile<Problem>;
  return problem.geometry.columns > whole && problem.geometry.columns <= whole + whole / 2;
}

/// Of a side of a block: what the blocks of its cluster tell it of the rows that it joins.
template <class Side, class Problem>
struct SharedOfCluster {
  using Words = PartialWords<typename Problem::Acc>;
  /// [slice][row]: of each slice an equal part of the rows, rounded up.
  static constexpr int most_words = Side::rows + most_blocks_of_tile - 1;
  Words words[Side::waiting][most_words];
  Mbarrier told[Side::waiting];
};

template <TilesCome come, int rows_of_lane, class Problem>
struct SharedClusterTileBlock : SharedTileBlock<TilesMeet::in_cluster, come, rows_of_lane, Problem> {
  using Base = SharedTileBlock<TilesMeet::in_cluster, come, rows_of_lane, Problem>;
  using OfCluster = SharedOfCluster<typename Base::Side, Problem>;
  /// The first block may be so many ahead: it draws a ticket when it has a slot for the one before.
  static constexpr int tickets = Base::slots + 2;

  OfCluster of_cluster[Base::sides];
  RingCursor waits_at[Base::slots];  ///< for the results of its rows
  Mbarrier drawn[tickets];
  unsigned ticket[tickets];
};

/// A thread of a side of a block of a cluster.
template <TilesCome come, int rows_of_lane, class Problem>
struct TilesOfCluster : TilesOfBlock<come, rows_of_lane, Problem, ClusterTilesCall<come, Problem>,
                                     SharedClusterTileBlock<come, rows_of_lane, Problem>> {
  using Base = TilesOfBlock<come, rows_of_lane, Problem, ClusterTilesCall<come, Problem>,
                            SharedClusterTileBlock<come, rows_of_lane, Problem>>;
  using Base::block;
  using Base::call;
  using Base::rows;
  using Base::shared;
  using Base::side;
  using typename Base::Acc;
  using typename Base::Result;
  using typename Base::SharedBlock;
  using typename Base::Words;

  /// Slots with even and with odd numbers: where a row has two slices, they come to these in turn. In units,
  /// so that it can be seen how memory is aligned: where it could not, floats were read by bytes.
  static constexpr std::uint32_t unit = 128;
  std::uint32_t units_of_even, units_of_odd;

  __device__ TilesOfCluster(const typename Base::Call& call_, SharedBlock& block_, int side_)
      : Base(call_, block_, side_),
        units_of_even(SharedBlock::slot_bytes / unit),
        units_of_odd(units_of_even) {
    static_assert(SharedBlock::slot_bytes % (2 * Base::Sides::in_turn * unit) == 0);
    if (call.last_is_half) (cluster_ctarank() == 0 ? units_of_odd : units_of_even) /= 2;
  }

  __device__ int slots_of_ring() const { return call.last_is_half ? Base::slots : Base::Shared::whole_slots; }
  __device__ std::uint32_t units_of_slot(int slot) const {
    return slot % 2 == 0 ? units_of_even : units_of_odd;
  }
  __device__ std::uint32_t bytes_of_slot(int slot) const { return units_of_slot(slot) * unit; }
  __device__ unsigned char* begin_of_slot(int slot) const {
    const auto at = static_cast<std::uint32_t>(slot);
    return reinterpret_cast<unsigned char*>(block.held) +
           (at / 2 * (units_of_even + units_of_odd) + at % 2 * units_of_even) * unit;
  }
  __device__ typename SharedBlock::Slot& in_ring(int slot) const {
    return *reinterpret_cast<typename SharedBlock::Slot*>(begin_of_slot(slot));
  }
  /// The columns in turn from the slice's first, second, ... on.
  __device__ auto& in_turn(int slot, int which) const requires(Base::anywhere) {
    using ColumnsInTurn = std::remove_extent_t<typename SharedBlock::Slot>;
    const std::uint32_t units = units_of_slot(slot) / Base::Sides::in_turn;
    return *reinterpret_cast<ColumnsInTurn*>(begin_of_slot(slot) +
                                             static_cast<std::uint32_t>(which) * units * unit);
  }
  __device__ const TileBoxes<come>& boxes_of(const SliceOfTile& slice) const {
    return call.last_is_half && slice.slice == 1 ? call.boxes_of_last : call.boxes;
  }
  /// Rows that a block joins; the last blocks have fewer.
  __device__ int rows_of_joiner() const {
    const int blocks = static_cast<int>(call.slices);
    return (rows + blocks - 1) / blocks;
  }
  /// Tells the block that joins a row what a slice has of it.
  __device__ void publish(int slot, const SliceOfTile& slice, int row,
                          const PartialSoftmax<Acc>& partial) const {
    const int of_joiner = rows_of_joiner(), joiner = row / of_joiner,
              word = static_cast<int>(slice.slice) * of_joiner + row - joiner * of_joiner,
              at = waits_at(slot);
    auto& cluster = block.of_cluster[side];
    send(&cluster.words[at][word], static_cast<unsigned>(joiner), Words::of(partial, 0), &cluster.told[at]);
  }
  /// What consists of words, to where another block has it, whose barrier counts it.
  template <class T>
  __device__ static void send(T* to, unsigned block, const T& value, Mbarrier* counter) {
    constexpr int count = static_cast<int>(sizeof(T) / sizeof(Word16));
    static_assert(sizeof(T) % sizeof(Word16) == 0);
    Word16 words[count];
    memcpy(words, &value, sizeof(T));
#pragma unroll
    for (int i = 0; i < count; ++i)
      st_async_b128(reinterpret_cast<Word16*>(to) + i, block, words[i], counter);
  }
  /// By one thread, when that is done for all rows of a slot.
  __device__ void has_told(int slot) const {
    mbarrier_arrive_expect_tx(&shared.known[waits_at(slot)], rows * static_cast<int>(sizeof(Result)));
    mbarrier_arrive(&shared.told[slot]);
  }
  /// Where the results of a slot's rows are to be.
  __device__ int waits_at(int slot) const {
    return block.waits_at[slot].slot;
  }
  __device__ bool is_known(const RingCursor& at) const {
    const RingCursor waits = block.waits_at[at.slot];
    return mbarrier_test_parity(&shared.known[waits.slot], waits.parity);
  }
};

/// The warp that copies slices by boxes.
template <class Tiles>
struct CopierOfCluster : CopierOfTiles<Tiles> {
  using Base = CopierOfTiles<Tiles>;
  using Base::Base;
  using Base::block;
  using Base::call;
  using Base::lane;
  using Base::shared;

  /// A tile for all blocks of the cluster.
  __device__ void draw(const RingCursor& at) const {
    const auto ticket = static_cast<unsigned>(atomicAdd(&call.workspace.header->next_ticket, 1ull));
    for (unsigned to = 0; to < call.slices; ++to)
      st_async_b32(&block.ticket[at.slot], to, ticket, &block.drawn[at.slot]);
    if (ticket == call.tiles + gridDim.x / call.slices - 1) call.workspace.header->next_ticket = 0;
  }

  /// By one thread or, has_lanes, by all.
  __device__ void run() const {
    constexpr int tickets = Base::SharedBlock::tickets;
    const int slots = this->slots_of_ring();
    RingCursor at, ticket_at, draws_at, waits_at;
    int in_use = 0;
    const unsigned rank = cluster_ctarank();
    const bool draws = rank == 0 && lane == 0;
    const auto draw_next = [&] {
      if (draws) draw(draws_at);
      draws_at.advance(tickets);
    };
    draw_next();
    // Blocks take turns at the slices of a tile: the last one may have few columns.
    for (unsigned slice_of_tile = rank;;
         slice_of_tile = slice_of_tile + 1 == call.slices ? 0 : slice_of_tile + 1) {
      if (lane == 0) mbarrier_arrive_expect_tx(&block.drawn[ticket_at.slot], sizeof(unsigned));
      mbarrier_wait_parity(&block.drawn[ticket_at.slot], ticket_at.parity);
      const unsigned tile = block.ticket[ticket_at.slot];
      ticket_at.advance(tickets);
      const bool more = tile < call.tiles;
      if (more) draw_next();
      if (in_use == slots) {
        this->wait_for(at);
        if (lane == 0) {
          this->store(at.slot);
          cp_async_bulk_wait_group_read<0>();
        }
        at.advance(slots);
        --in_use;
      }
      int next = at.slot + in_use;
      if (next >= slots) next -= slots;
      if (!more) {
        if (lane == 0) this->end_at(next);
        break;
      }
      const SliceOfTile slice{tile, slice_of_tile};
      if (lane == 0) {
        block.waits_at[next] = waits_at;
        this->comes(next, slice);
        this->load(next, slice);
      }
      this->bring_temperatures(next, slice);
      this->prefetch_masks(slice);
      waits_at.advance(Base::Shared::waiting);
      ++in_use;
    }
    this->store_rest(at, in_use);
  }
};

/// The warp that joins what the slices of a tile have told of this block's part of the rows, in their order,
/// and tells all blocks the results.
template <class Tiles>
struct JoinerOfCluster : Tiles {
  using Base = Tiles;
  using Base::block;
  using Base::call;
  using Base::rows;
  using Base::shared;
  using Base::side;
  using typename Base::Acc;
  using typename Base::Result;
  using typename Base::Words;

  __device__ explicit JoinerOfCluster(const Base& base) : Base(base) {}

  __device__ void run() const {
    auto& cluster = block.of_cluster[side];
    const int lane = static_cast<int>(threadIdx.x) % 32, slices = static_cast<int>(call.slices),
              of_joiner = this->rows_of_joiner(), first_row = static_cast<int>(cluster_ctarank()) * of_joiner,
              mine = max(0, min(of_joiner, rows - first_row));
    for (RingCursor at;; at.advance(this->slots_of_ring())) {
      mbarrier_wait_parity(&shared.told[at.slot], at.parity);
      if (block.slice[at.slot].tile == call.tiles) return;
      const RingCursor waits = block.waits_at[at.slot];
      if (lane == 0)
        mbarrier_arrive_expect_tx(&cluster.told[waits.slot], static_cast<std::uint32_t>(mine * slices) *
                                                                 static_cast<std::uint32_t>(sizeof(Words)));
      mbarrier_wait_parity(&cluster.told[waits.slot], waits.parity);
#pragma unroll 1
      for (int row = lane; row < mine; row += 32) {
        const Words* const words = &cluster.words[waits.slot][row];
        auto have = PartialSoftmax<Acc>::none();
#pragma unroll 1
        for (int first = 0; first < slices; first += static_cast<int>(slices_joined_at_once)) {
          join_slices<slices_joined_at_once, slices_joined_at_once>(have, [&](unsigned i) {
            const int slice = first + static_cast<int>(i);
            return slice < slices ? words[slice * of_joiner].value() : PartialSoftmax<Acc>::none();
          });
        }
        const Result result(call.problem.operation, have.told());
        for (int to = 0; to < slices; ++to)
          this->send(&shared.results[waits.slot][first_row + row], static_cast<unsigned>(to), result,
                     &shared.known[waits.slot]);
      }
      __syncwarp();
    }
  }
};

template <TilesCome come, class Problem>
using SidesOfClusterBlock = SidesOfTileBlock<TilesMeet::in_cluster, come, Problem>;

template <TilesCome come, int rows_of_lane, class Problem>
__global__ void __launch_bounds__(SidesOfClusterBlock<come, Problem>::threads,
                                  SidesOfClusterBlock<come, Problem>::blocks_a_multiprocessor)
    cluster_pipelined_tiles_kernel(const __grid_constant__ ClusterTilesCall<come, Problem> call) {
  using Sides = SidesOfClusterBlock<come, Problem>;
  using Tiles = TilesOfCluster<come, rows_of_lane, Problem>;
  using Shared = typename Tiles::SharedBlock;
  static_assert(Sides::boxes);
  // (Boxes lie on boundaries of 128 bytes.)
  extern __shared__ __align__(128) unsigned char shared_of_cluster_block[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_of_cluster_block);
  if (threadIdx.x == 0) {
    shared.init_barriers();
    for (int at = 0; at < Shared::Side::waiting; ++at) {
      for (auto& side : shared.side) mbarrier_init(&side.known[at], 1);
      for (auto& side : shared.of_cluster) mbarrier_init(&side.told[at], 1);
    }
    for (Mbarrier& drawn : shared.drawn) mbarrier_init(&drawn, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  cluster_arrive();
  grid_dependency_wait();
  cluster_wait();  // the barriers of the others can be counted on
  if (call.tiles == 0) return;
  const int warp = static_cast<int>(threadIdx.x / 32);
  const auto work = [&] {
    constexpr int warp_of_copier = Sides::sides * Sides::warps_of_side,
                  warps_of_movers = TileBlock<Problem>::threads / 32;
    if constexpr (Sides::anywhere) {
      if (warp > warp_of_copier)
        return StorerOfTiles<Tiles>(Tiles(call, shared, 0), warp - warp_of_copier - 1).run();
    }
    if (warp == warp_of_copier) {
      using Copier = CopierOfCluster<Tiles>;
      if (Copier::has_lanes || threadIdx.x % 32 == 0) Copier(Tiles(call, shared, 0)).run();
      return;
    }
    const int side = Sides::sides == 1 ? 0 : warp / Sides::warps_of_side;
    const Tiles tiles(call, shared, side);
    if (warp - side * Sides::warps_of_side < warps_of_movers) return MoversOfBoxes<Tiles>(tiles).run();
    JoinerOfCluster<Tiles>(tiles).run();
  };
  work();
  // Others may write to this block's shared memory until all are done.
  __syncwarp();
  cluster_arrive();
  cluster_wait();
}

struct ClusterPipelinedTiles {
  static constexpr const char* name = "cluster_pipelined_tiles";

  /// (Where outputs do not take the place of logits threads store them, which were not tried.)
  template <class Exec, class Problem>
  static constexpr bool supports = GridPipelinedTiles::supports<Exec, Problem> &&
                                   sizeof(typename Problem::In) == sizeof(typename Problem::Out);

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec& exec, const Problem& problem) {
    const std::string_view by_slices = GridPipelinedTiles::refuse(exec, problem);
    if (!by_slices.empty()) return by_slices;
    const index_type slices = slices_of_tiles(problem);
    if (slices > most_blocks_of_tile) return "a row has too many slices for a cluster";
    std::string_view refusal = "columns do not lie so that they could be copied as boxes";
    with_boxes(problem, [&](auto tiles) {
      refusal = has_room<typename decltype(tiles)::type>(exec, problem)
                    ? ""
                    : "the device has no room for such a cluster";
    });
    return refusal;
  }

  /// (What was measured: one H200, fractions of a copy, the better one of the other kernels and this one, of
  /// 1 GiB unless said.)
  template <class Exec, class Problem>
  static std::string_view advise_against(const Exec&, const Problem& problem) {
    using In = typename Problem::In;
    constexpr bool is_16_bit = sizeof(In) == 2, is_float = sizeof(In) == 4, is_double = sizeof(In) == 8;
    const RowGeometry& g = problem.geometry;
    const index_type slices = slices_of_tiles(problem);
    const bool anywhere = come_in_turn(problem), half = last_slice_is_half(problem);
    // (48 and 32 MB: float 512 columns 0.82 twice, 0.81 and 0.75, 1024 0.76 and 0.79, 0.72 twice; double 512
    // 0.64 and 0.73, 0.61 twice; bfloat16 0.67 and 0.72, 0.64 and 0.60. That begin anywhere 96 and 48 MB:
    // float 512 0.65 and 0.72, 0.67 and 0.66, double 256 0.70 and 0.73, 0.68 and 0.66, bfloat16 1024 0.52 and
    // 0.535, 0.54 and 0.50.)
    // (Float 300 columns by block_per_sliced_tile and so 24 MB 0.81 and 0.745, 48 MB 0.83 and 0.855, 1 GiB
    // 0.77 and 0.91, bfloat16 24 MB 0.57 and 0.61, that begin anywhere float 48 MB 0.64 and 0.60, 96 MB 0.59
    // and 0.66, bfloat16 48 MB 0.47 and 0.41, 96 MB 0.45 and 0.44, 256 MB 0.43 and 0.46.)
    const index_type fewest_bytes = !anywhere ? 40 << 20 : is_16_bit && half ? 128 << 20 : 64 << 20;
    if (g.rows * g.columns * index_type(sizeof(In)) < fewest_bytes)
      return "there are too few tiles for each cluster to have several";
    // (512 columns on boundaries of 16 bytes alone: float 0.73 and 0.70, bfloat16 0.73 and 0.705, but 300
    // 0.60 and 0.76, 384 0.68 and 0.73.)
    if (!anywhere && !half && !columns_begin_at(problem, bytes_of_sector))
      return "outputs that share sectors of memory are written later, and better, by grid_pipelined_tiles";
    if (problem.operation == Operation::logsumexp) {
      // (Of reading at a copy's speed: float 512 columns 0.85 and 0.94, 1024 0.79 and 0.86, 2048 0.90 and
      // 0.84; double 256 0.51 and 0.555, 512 0.61 and 0.55; bfloat16 512 0.76 and 0.79, 1024 0.72 and 0.71.)
      constexpr index_type most_slices_of_sum = is_float ? 4 : 2;
      return slices > most_slices_of_sum ? "two_pass_tiles reads x once for sums" : "";
    }
    // (A cluster's blocks are on neighbouring multiprocessors, 16 or 18, of which what is left over has
    // nothing to do: float 2048 columns 0.84 and 0.86, 2304 0.84 and 0.76, 3072 0.84 and 0.77, 3584 0.83 and
    // 0.85, 4096 0.81 and 0.84, that begin anywhere 1536 0.745 twice, 3584 0.71 and 0.70, 4096 0.70 and 0.72;
    // double 1152 0.745 and 0.70, 1920 0.74 and 0.72, 2048 0.72 and 0.74; bfloat16 3584 0.74 and 0.71, 3840
    // 0.74 and 0.78, that begin anywhere 1280 0.58 and 0.57, 1536 0.58 and 0.53, 1792 0.55 twice, 2048 0.54
    // and 0.60, 4096 0.555 and 0.55.)
    constexpr index_type few_slices = 8;
    const bool few = slices <= few_slices;
    const index_type many_slices = is_double ? 16 : !anywhere ? (is_16_bit ? 15 : 14) : is_16_bit ? 17 : 16;
    if ((!few && slices < many_slices) || (is_16_bit && anywhere && few && slices > 4 && slices < few_slices))
      return "such clusters leave multiprocessors to no one";
    // (GELU, bfloat16 512 columns 0.51 and 0.56, 768 0.505 and 0.50, 992 0.49 and 0.51, 2048 0.51 both.)
    if (is_16_bit && makes_logits<Problem> && operands_of<typename Problem::Transform> == 0 && slices > 4)
      return "what a transform makes of 16 bits takes longer than what blocks tell each other";
    // (Double by block_per_sliced_tile and so, GELU 144 columns 0.34 and 0.275, 180 0.39 and 0.33, a
    // temperature 0.42 and 0.38, 0.44 and 0.36, but a factor 0.49 and 0.58, 0.56 and 0.69.)
    using Transform = typename Problem::Transform;
    if (is_double && half && PartsOfChain<Transform>::others != 0 && operands_of<Transform> == 0)
      return "what a transform makes of doubles takes longer than what blocks tell each other";
    return {};
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    // `reserve` launches over no rows: that loads all kernels, which a capture could not do.
    if (problem.geometry.rows == 0) {
      for_each_kind<Problem>([&](auto tiles) {
        using Tiles = typename decltype(tiles)::type;
        if (has_room<Tiles>(exec, problem)) launch<Tiles>(exec, problem, {}, {});
      });
      return;
    }
    with_boxes(problem, [&](auto tiles) {
      using Tiles = typename decltype(tiles)::type;
      TileBoxes<Tiles::come> boxes{}, boxes_of_last{};
      // (refuse() asked all that the copy engine could object to.)
      if (!BoxesOfTiles::find<Tiles>(problem, boxes) ||
          (last_slice_is_half(problem) &&
           !BoxesOfTiles::find<Tiles>(problem, boxes_of_last, columns_of_tile<Problem> / 2)))
        throw std::runtime_error("KokkosSoftmax: cuTensorMapEncodeTiled failed");
      launch<Tiles>(exec, problem, boxes, boxes_of_last);
    });
  }

  /// Fewer rows, and others that lie elsewhere, are for grid_pipelined_tiles.
  template <class Exec, class Problem>
  static void reserve(const Exec& exec, const Problem& problem) {
    GridPipelinedTiles::reserve_for_others(exec, problem);
  }
  /// Longer rows, and others that lie elsewhere, are for others: this is warm, too.
  template <class Exec, class Problem>
  static void reserve_for_shorter_rows(const Exec& exec, const Problem& problem) {
    constexpr index_type fewest_columns = columns_of_tile<Problem> + 1;
    if (problem.axis_is_strided && problem.geometry.columns >= fewest_columns &&
        GridPipelinedTiles::refuse(exec, no_rows_of(problem, fewest_columns)).empty()) {
      CudaWorkspace::reserve<typename Problem::Acc>(exec, 0);
      run(exec, no_rows_of(problem, fewest_columns));
    }
  }

 private:
  template <TilesCome come, class Problem>
  using Tiles = TilesOfCluster<come, BoxesOfTiles::most_rows_of_lane<Problem>, Problem>;

  /// Those that there are. (Float boxes that are not wide were slower: 512 columns 0.83 for 0.92, 1000 0.82
  /// for 0.91.)
  template <class Problem, class Use>
  static void for_each_kind(const Use& use) {
    if constexpr (BoxesOfTiles::may_be_anywhere<Problem>)
      use(std::type_identity<Tiles<TilesCome::by_boxes_anywhere, Problem>>());
    if constexpr (BoxesOfTiles::may_be_wide<Problem>)
      use(std::type_identity<Tiles<TilesCome::by_wide_boxes, Problem>>());
    if constexpr (sizeof(typename Problem::In) != 4)
      use(std::type_identity<Tiles<TilesCome::by_boxes, Problem>>());
  }
  /// Calls use(std::type_identity<Tiles>()) for the tiles whose boxes a call has, if any.
  template <class Problem, class Use>
  static void with_boxes(const Problem& problem, const Use& use) {
    bool done = false;
    for_each_kind<Problem>([&](auto tiles) {
      using T = typename decltype(tiles)::type;
      if (done || !lie_for<T>(problem) || !BoxesOfTiles::exist<T>(problem)) return;
      done = true;
      use(tiles);
    });
  }
  template <class Tiles, class Problem>
  static bool lie_for(const Problem& problem) {
    if constexpr (Tiles::come == TilesCome::by_boxes_anywhere) {
      return come_in_turn(problem);
    } else if constexpr (Tiles::come == TilesCome::by_wide_boxes) {
      return BoxesOfTiles::lie_for_wide(problem) &&
             (sizeof(typename Problem::In) != 2 || fills_wide(problem));
    } else {
      return BoxesOfTiles::come_as_boxes(problem, 16) &&
             (sizeof(typename Problem::In) != 2 || makes_logits<Problem> || rows_come_in_pairs(problem));
    }
  }
  /// (Of 16 bits in turn where no other boxes would do: 512 columns on boundaries of 16 bytes 0.69 so, in
  /// wide boxes of grid_pipelined_tiles 0.73; float 0.80 and 0.73.)
  template <class Problem>
  static bool come_in_turn(const Problem& problem) {
    constexpr index_type boundary = sizeof(typename Problem::In) == 2 ? 16 : bytes_of_sector;
    return BoxesOfTiles::may_be_anywhere<Problem> && BoxesOfTiles::lie_for_anywhere(problem, boundary);
  }
  /// Whether wide ones of 16 bits are faster. (One H200, fraction of a copy of 1 GiB of bfloat16, boxes and
  /// wide ones: 300 columns 0.78 twice, 352 0.85 and 0.89, 416 0.82 and 0.85, 512 0.83 and 0.92, 600 0.80 and
  /// 0.75, 704 0.84 and 0.81, 768 0.83 and 0.85, 960 0.83 twice, 1024 0.82 and 0.855, 1536 0.83 and 0.755,
  /// 2048 0.78 and 0.825, 4096 0.76 twice, but with a mask 300 0.41 and 0.38, 352 0.465 and 0.44, and sums of
  /// 384 0.64 and 0.59.)
  template <class Problem>
  static bool fills_wide(const Problem& problem) {
    const index_type slices = slices_of_tiles(problem),
                     empty = slices * columns_of_tile<Problem> - problem.geometry.columns;
    const bool only_x_and_y_move =
        operands_of<typename Problem::Transform> == 0 && problem.operation != Operation::logsumexp;
    if (slices == 2) return only_x_and_y_move || 4 * empty <= columns_of_tile<Problem>;
    return (slices <= 4 || slices == 8) && 8 * empty <= columns_of_tile<Problem>;
  }

  template <class Tiles>
  static constexpr auto* kernel =
      &cluster_pipelined_tiles_kernel<Tiles::come, Tiles::rows_of_lane, typename Tiles::Problem>;
  template <class Tiles>
  static constexpr int shared_bytes = sizeof(typename Tiles::SharedBlock);
  /// How many clusters of as many blocks as a row has slices the device has at once.
  template <class Tiles>
  static index_type clusters(const Kokkos::Cuda& exec, const typename Tiles::Problem& problem) {
    return resident_clusters<most_blocks_of_tile>(kernel<Tiles>, exec.cuda_device(), Tiles::Sides::threads,
                                                  shared_bytes<Tiles>)
        .at(static_cast<std::size_t>(slices_of_tiles(problem)));
  }
  template <class Tiles>
  static bool has_room(const Kokkos::Cuda& exec, const typename Tiles::Problem& problem) {
    return clusters<Tiles>(exec, problem) > 0;
  }

  template <class Tiles>
  static void launch(const Kokkos::Cuda& exec, const typename Tiles::Problem& problem,
                     const TileBoxes<Tiles::come>& boxes, const TileBoxes<Tiles::come>& boxes_of_last) {
    const index_type slices = slices_of_tiles(problem), tiles = BoxesOfTiles::tiles_of(problem, boxes);
    launch_labelled(exec, kernel_label(problem.operation, name), [&] {
      launch_clusters(
          exec, kernel<Tiles>, true, static_cast<unsigned>(slices),
          static_cast<unsigned>(std::clamp<index_type>(tiles, 1, clusters<Tiles>(exec, problem)) * slices),
          Tiles::Sides::threads, shared_bytes<Tiles>,
          ClusterTilesCall<Tiles::come, typename Tiles::Problem>{
              {problem, CudaWorkspace::get<typename Tiles::Acc>(exec, 0), static_cast<unsigned>(slices),
               static_cast<unsigned>(tiles), boxes, rows_come_in_pairs(problem)},
              last_slice_is_half(problem),
              boxes_of_last});
    });
  }
};

}  // namespace KokkosSoftmax::impl

#endif
