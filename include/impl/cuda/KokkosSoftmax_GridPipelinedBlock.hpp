// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// What the warps of a block of grid_pipelined_rows do: its producer, publishers, announcer, collector,
/// finishers and storer. KokkosSoftmax_GridPipelinedRows.hpp says how they play together.

#ifndef KOKKOSSOFTMAX_GRIDPIPELINEDBLOCK_HPP
#define KOKKOSSOFTMAX_GRIDPIPELINEDBLOCK_HPP

#include <impl/cuda/KokkosSoftmax_SliceWriter.hpp>

namespace KokkosSoftmax::impl {

/// What is known of a slot and its slice. It lies in shared memory behind the slots. Where slices are parked
/// there are as many more of it, each for a slice until that is finished.
template <class Problem>
struct GridPipelinedSlot {
  using Acc = typename Problem::Acc;

  // Each has one phase a turn of the ring.
  Mbarrier full;     ///< the slice has arrived
  Mbarrier reduced;  ///< the publishers are done with it
  Mbarrier ready;    ///< the row's result is there, or none is needed
  Mbarrier written;  ///< the finishers are done with it; where slices are parked, publishers, too
  Mbarrier empty;    ///< all are done with it
  /// Of the slot of operands with this number: nobody needs them any more. Where they stay, of the first:
  /// they are there.
  Mbarrier operands_used;
  SliceInSlot<Problem> slice;
  PartialSoftmax<Acc> of_warp[GridPipelinedShape::warps_of_group];
  SlicedRowResult<Problem> of_row;
};

/// A kernel of its own for each, for what its one producer's thread does not do it need not ask.
enum class RingFor : int {
  any_rows,
  parked_slices,  ///< that wait in the finishers' registers
  rows_alike  ///< that have the same operands: each block has slices of the same columns, whose operands stay
};

/// What a block does. Publishers and finishers are in line, lambdas too where many kernels share a
/// translation unit: behind a call the compiler no longer knows that a slot is shared memory. (One H200,
/// 65536 columns of bfloat16 with one bias for all rows: 0.46 of a copy of all bytes for 0.65.)
template <class Problem, RingFor kind = RingFor::any_rows, bool for_differences = false>
struct GridPipelinedBlock {
  static constexpr bool parks = kind == RingFor::parked_slices, keeps_columns = kind == RingFor::rows_alike;
  using In = typename Problem::In;
  using Out = typename Problem::Out;
  using Acc = typename Problem::Acc;
  using Part = PartOfSlice<Problem>;
  using Transform = typename Problem::Transform;
  using Result = SlicedRowResult<Problem>;
  /// Whether rows may have an end of which nothing is kept: it is not read.
  static constexpr bool may_drop_ends = knows_end_of_kept<typename Problem::Transform::Row>;
  /// The transformed logits go back to the slot where they fit, so that a transform and its operands are used
  /// once.
  static constexpr bool has_logits = Part::has_transform && (std::is_same_v<In, Acc> || Part::packed);
  /// Of pairs of 16 bits that become floats, a mask among factors, temperatures and ends: what it drops
  /// becomes -inf in the slot while its logits are still pairs, and stays that, whatever is done to it.
  static constexpr bool masks_in_slot = Part::unpacked && is_masked_product<Transform>;
  static constexpr int warps_of_group = GridPipelinedShape::warps_of_group;
  /// Whether a publisher has all logits of its share in registers, so that a transform that is long is gone
  /// through once.
  static constexpr bool holds_shares = Part::unpacked && transforms_held_logits<typename Transform::Row>;
  /// Whether there are kernels for log_softmax alone where it keeps differences: `for_differences`. (One
  /// H200, a bias for all rows, fractions of a copy, all by the same kernel and so: softmax of bfloat16 65536
  /// columns 0.93 and 0.94, 50257 0.755 and 0.79, half 0.89 and 0.91, 0.72 and 0.75, log_softmax of bfloat16
  /// 0.92 and 0.935, 0.79 and 0.82.)
  static constexpr bool parts_kernels = Result::keeps_packed_differences && !holds_shares;
  static_assert(parts_kernels || !for_differences);
  /// So do the exponentials, so that a finisher only scales them.
  static constexpr bool has_exponentials = Result::keeps_exponentials && !for_differences;
  /// And, of log_softmax, the differences from the maximum of their share, to which it only adds.
  static constexpr bool has_differences =
      Result::keeps_packed_differences && (for_differences || !parts_kernels);

  const Problem& problem;
  const GridPipelinedShape& shape;
  const CudaWorkspace& workspace;
  GridPipelinedSlot<Problem>* ring;
  char* slots;
  int lane;
  std::uint32_t epoch = 0, tag = 0;  ///< of the launch, of its words

  /// Whether publishers write to the slot what outputs are made of.
  __host__ __device__ static bool writes_back(Operation operation, const GridPipelinedShape& shape) {
    return has_logits || keeps_exponentials(operation, shape) || keeps_differences(operation, shape);
  }
  /// (Slices of a row all get to their outputs in the same way, so not where some are read twice.)
  __host__ __device__ static bool keeps_exponentials(Operation operation, const GridPipelinedShape& shape) {
    return Result::keeps_exponentials && operation == Operation::softmax && !shape.rereads;
  }
  __host__ __device__ static bool keeps_differences(Operation operation, const GridPipelinedShape& shape) {
    return Result::keeps_packed_differences && operation == Operation::log_softmax && !shape.rereads;
  }
  /// Whether the finishers need a transform's operands.
  __host__ __device__ static bool finishers_need_operands(Operation operation,
                                                          const GridPipelinedShape& shape) {
    return operation != Operation::logsumexp && !masks_in_slot && !writes_back(operation, shape);
  }
  __device__ bool writes_rows() const { return problem.operation != Operation::logsumexp; }
  __device__ char* slot(int s) const { return slots + s * shape.slot_bytes; }
  /// Of the slice that is known there.
  __device__ char* slot_of(const RingCursor& at) const {
    return slot(parks ? ring[at.slot].slice.place : at.slot);
  }
  /// Of the ring.
  __device__ int turn() const { return turn_of(shape); }
  __host__ __device__ static int turn_of(const GridPipelinedShape& shape) {
    return parks ? shape.slots + GridPipelinedShape::parked : shape.slots;
  }
  static constexpr int most_collectors = GridPipelinedShape::most_collectors<Problem>;
  /// Which collector this is of the warps behind publishers and finishers: the second is the first one, those
  /// behind the fourth are the others; below 0 for the rest.
  __device__ static int collector_of(int warp) {
    return warp == 1 ? 0 : most_collectors > 1 && warp > 3 ? warp - 3 : -1;
  }
  __device__ int collectors() const {
    if constexpr (most_collectors > 1) return shape.collectors;
    return 1;
  }
  __device__ bool operands_stay() const {
    if constexpr (keeps_columns) return true;
    if constexpr (stages_operands<Problem>) return shape.operands_stay;
    return false;
  }
  __device__ bool operands_take_turns() const { return shape.operand_slots > 0 && !operands_stay(); }
  __device__ StagedOutputs staged_outputs(int warp) const {
    return {slots + shape.bytes_of_slots() + warp * shape.bytes_staged_of_warp(), shape.staged_vectors,
            shape.rereads};
  }
  __device__ char* operand_slot(int s) const {
    return slots + shape.slots * shape.slot_bytes + s * shape.operand_slot_bytes;
  }
  __device__ PartialWords<Acc>* words_of(index_type position) const {
    return workspace.partials<Acc>() + position * shape.slices;
  }
  /// Behind those of all slices.
  __device__ PartialWords<Acc>* run_words_of(index_type position) const {
    return words_of(problem.geometry.rows) + position * shape.runs;
  }

  __device__ SliceUse usual_use() const { return writes_rows() ? SliceUse::hold : SliceUse::publish; }

  /// The first slice of a ticket, and how many it has.
  __device__ int begin_ticket(index_type ticket, index_type& position, index_type& slice) const {
    const index_type first = ticket * shape.slices_a_ticket;
    shape.find(first, position, slice);
    return static_cast<int>(min(static_cast<index_type>(shape.slices_a_ticket), shape.all_slices - first));
  }
  __device__ void next_slice(index_type& position, index_type& slice) const {
    if (++slice == shape.slices) {
      slice = 0;
      ++position;
    }
  }

  /// Blocks that have slices of the same columns as this one, and which of them this one is.
  struct SameColumns {
    int slice, blocks, number;
  };
  __device__ SameColumns same_columns() const {
    const int slices = static_cast<int>(shape.slices), block = static_cast<int>(blockIdx.x);
    const int slice = block % slices;
    return {slice, (static_cast<int>(gridDim.x) - 1 - slice) / slices + 1, block / slices};
  }

  /// The thread that produces, ahead of all: brings the first slices to L2, whichever block is going to draw
  /// them. (Of rows whose ends a transform drops, what is read is not known here. Not tried: where operands
  /// stay.)
  __device__ void prefetch_first() const {
    if (shape.rereads || shape.drops_ends || operands_stay()) return;
    const RowGeometry& g = problem.geometry;
    for (int i = 0; i < GridPipelinedShape::slices_prefetched; ++i) {
      const index_type slice = blockIdx.x + static_cast<index_type>(i) * gridDim.x;
      if (slice >= shape.all_slices) return;
      const index_type position = slice / shape.slices,
                       first = (slice - position * shape.slices) * shape.slice_columns;
      const In* const x = problem.x + g.row(position).x_offset + first;
      BulkCopy<In>(x, x + min(static_cast<index_type>(shape.slice_columns), g.columns - first), shape.x_end,
                   nullptr)
          .prefetch();
    }
  }
  /// The thread that produces, ahead of that: fills the first slots with its own tickets.
  __device__ void begin() const {
    if (operands_stay()) copy_operands_that_stay();
    RingCursor at{0, 1};
    if constexpr (keeps_columns) {
      const SameColumns mine = same_columns();
      for (int i = 0; i < shape.own_tickets; ++i) {
        const index_type ticket = mine.number + static_cast<index_type>(i) * mine.blocks;
        for (int k = 0; k < shape.slices_a_ticket; ++k) {
          const index_type position = ticket * shape.slices_a_ticket + k;
          fill(at, 0, position, mine.slice, usual_use(), columns_to_end(position, mine.slice), false);
          at.advance(turn());
        }
      }
    } else {
      for (int i = 0; i < shape.own_tickets; ++i) {
        index_type position = 0, slice = 0;
        int left = begin_ticket(blockIdx.x + static_cast<index_type>(i) * gridDim.x, position, slice);
        for (; left > 0; --left) {
          const int operands = operands_stay() ? static_cast<int>(slice) : at.slot;
          fill(at, operands, position, slice, usual_use(), columns_to_end(position, slice),
               operands_take_turns());
          at.advance(turn());
          next_slice(position, slice);
        }
      }
    }
  }

  /// Of those that so many blocks draw.
  __device__ index_type draw_ticket(unsigned long long& next, unsigned blocks) const {
    return static_cast<index_type>(shape.own_tickets) * blocks +
           static_cast<index_type>(atomicAdd(&next, 1ull));
  }
  __device__ index_type draw_ticket() const { return draw_ticket(workspace.header->next_ticket, gridDim.x); }

  /// Until one more copy may be under way: `copied` is the slot of the oldest one.
  __device__ __forceinline__ void wait_for_copies(RingCursor& copied, int& copies) const {
    if (copies == shape.most_copies) {
      mbarrier_wait_parity(&ring[copied.slot].full, copied.parity);
      copied.advance(turn());
      --copies;
    }
  }

  /// One thread.
  __device__ void produce() const {
    const bool rereads = shape.rereads;
    RingCursor at{0, 1}, operands{0, 1}, copied;
    int copies = shape.own_tickets * shape.slices_a_ticket;  // under way
    at.advance(turn(), copies);
    if (shape.operand_slots > 0) operands.advance(shape.operand_slots, copies);
    index_type position = 0, slice = 0;
    int left = 0;  // slices of the ticket
    SliceUse use = usual_use();
    for (;;) {
      GridPipelinedSlot<Problem>& next = ring[at.slot];
      mbarrier_wait_parity(shape.draws_early ? &next.written : &next.empty, at.parity);
      wait_for_copies(copied, copies);
      if (left == 0) {
        const index_type ticket = draw_ticket();
        if (ticket >= shape.tickets) {
          end(ticket, at);
          return;
        }
        left = begin_ticket(ticket, position, slice);
        if (rereads) {
          use = SliceUse::hold;
          if (slice < shape.slices_reread) {
            use = SliceUse::publish;
            left = 2;
          }
        }
      }
      if (rereads) {
        // With a slice to publish comes one to finish, of the row before. The last of these are finished
        // first, since they are the ones still in L2.
        if (use == SliceUse::publish && left == 1) {
          use = SliceUse::finish;
          --position;
          slice = shape.slices_reread - 1 - slice;
        }
        if (position < 0 || position >= problem.geometry.rows) {
          --left;
          continue;
        }
      }
      const int to_end = columns_to_end(position, slice);
      mbarrier_wait_parity(&next.empty, at.parity);
      fence_proxy_async_shared();  // what was written to the slot comes before the next copy
      const bool brings_operands = operands_take_turns();
      if (brings_operands) mbarrier_wait_parity(&ring[operands.slot].operands_used, operands.parity);
      fill(at, operands_stay() ? static_cast<int>(slice) : operands.slot, position, slice, use, to_end,
           brings_operands);
      if (brings_operands) operands.advance(shape.operand_slots);
      ++copies;
      at.advance(turn());
      if (--left > 0 && !rereads) next_slice(position, slice);
    }
  }

  /// The same where slices are parked. What is known of a slice then has a place in the ring that it leaves
  /// when it is written to y, and the slot is free when it is parked. A ticket is drawn when the result is
  /// there that the slice waits for whose place it gets: the rest takes about as long. (One H200, fractions
  /// of a copy, drawn when the slot is free, when the place is, and so: 4194304 columns 0.957, 0.950, 0.960,
  /// 4194303 0.922, 0.924, 0.940, 2.5 M 0.946, 0.940, 0.942.)
  __device__ void produce_parked() const {
    RingCursor at{0, 1}, copied, last_in_slot;
    int copies = 0, slot_of_next = 0;
    bool all_slots_used = false;
    for (;;) {
      GridPipelinedSlot<Problem>& next = ring[at.slot];
      mbarrier_wait_parity(&next.ready, at.parity);
      wait_for_copies(copied, copies);
      const index_type ticket = draw_ticket();
      if (ticket >= shape.tickets) {
        end(ticket, at);
        return;
      }
      index_type position = 0, slice = 0;
      shape.find(ticket, position, slice);
      mbarrier_wait_parity(&next.empty, at.parity);
      if (all_slots_used) {
        mbarrier_wait_parity(&ring[last_in_slot.slot].written, last_in_slot.parity);
        last_in_slot.advance(turn());
      }
      next.slice.place = slot_of_next;
      next.slice.store_cycles = ticket < shape.paced_tickets ? shape.store_cycles : 0;
      if (++slot_of_next == shape.slots) {
        slot_of_next = 0;
        all_slots_used = true;
      }
      fill(at, 0, position, slice, SliceUse::hold, columns_to_end(position, slice), false);
      ++copies;
      at.advance(turn());
    }
  }

  /// The same where a block keeps to its columns: a ticket has rows, and blocks of other columns their own.
  /// (One H200, float 65536 columns with a bias for all rows: by produce(), where it asks for the kind of
  /// ticket, 0.917 of a copy, and 0.958 so.)
  __device__ void produce_same_columns() const {
    const SameColumns mine = same_columns();
    unsigned long long& next_ticket = workspace.header->next_ticket_of[mine.slice];
    RingCursor at{0, 1}, copied;
    int copies = shape.own_tickets * shape.slices_a_ticket;  // under way
    at.advance(turn(), copies);
    index_type position = 0, end_of_ticket = 0;
    for (;;) {
      GridPipelinedSlot<Problem>& next = ring[at.slot];
      mbarrier_wait_parity(shape.draws_early ? &next.written : &next.empty, at.parity);
      wait_for_copies(copied, copies);
      if (position == end_of_ticket) {
        const index_type ticket = draw_ticket(next_ticket, mine.blocks);
        if (ticket >= shape.tickets) {
          grid_launch_dependents();
          if (ticket == shape.tickets + mine.blocks - 1) {
            next_ticket = 0;
            workspace.end_part(epoch, static_cast<unsigned>(shape.slices));
          }
          end(at);
          return;
        }
        position = ticket * shape.slices_a_ticket;
        end_of_ticket = min(position + shape.slices_a_ticket, problem.geometry.rows);
      }
      const int to_end = columns_to_end(position, mine.slice);
      mbarrier_wait_parity(&next.empty, at.parity);
      fence_proxy_async_shared();  // what was written to the slot comes before the next copy
      fill(at, 0, position, mine.slice, usual_use(), to_end, false);
      ++copies;
      at.advance(turn());
      ++position;
    }
  }

  /// Every block draws one ticket that is none; who draws the last one leaves all ready for the next launch.
  /// That may be on its way meanwhile. (One H200, in a CUDA graph: 64 rows of 128256 floats in 22.2 us, and
  /// in 21.7 so, 32 in 13.0 and 12.2.)
  __device__ void end(index_type ticket, RingCursor at) const {
    grid_launch_dependents();
    if (ticket == shape.tickets + gridDim.x - 1) {
      workspace.header->next_ticket = 0;
      workspace.end_launch(epoch);
    }
    end(at);
  }
  /// Tells all warps that there are no more slices.
  __device__ void end(RingCursor at) const {
    for (int i = 0; i < max(shape.parties, collectors()); ++i) {
      mbarrier_wait_parity(&ring[at.slot].empty, at.parity);
      ring[at.slot].slice.use = SliceUse::end;
      mbarrier_arrive(&ring[at.slot].full);
      at.advance(turn());
    }
  }

  __device__ static int kept(const SliceInSlot<Problem>& in) { return may_drop_ends ? in.kept : in.columns; }
  /// Columns from a slice's first one up to the end of what its row keeps.
  __device__ int columns_to_end(index_type position, index_type slice) const {
    constexpr index_type most = 0x7fffffff;
    if (!may_drop_ends || !shape.drops_ends) return most;
    const RowGeometry& g = problem.geometry;
    const index_type end = end_of_kept(problem.transform.at_row(g.row(position).index), g.columns);
    return static_cast<int>(Kokkos::clamp<index_type>(end - slice * shape.slice_columns, 0, most));
  }

  /// The slice whose block collects a row of logsumexp. Where blocks keep to their columns they take turns.
  /// (One H200, float 98304 columns with a bias for all rows, by the last one's blocks alone 0.61 of half a
  /// copy, and 0.945 so.)
  __device__ index_type collecting_slice(index_type position) const {
    if constexpr (keeps_columns) {
      if (!writes_rows()) return static_cast<unsigned>(position) % static_cast<unsigned>(shape.slices);
    }
    return shape.slices - 1;
  }

  /// `to_end`: columns_to_end, which is found before the slot is waited for.
  __device__ void fill(const RingCursor& at, int operands, index_type position, index_type slice,
                       SliceUse use, int to_end, bool brings_operands) const {
    const RowGeometry& g = problem.geometry;
    const RowGeometry::Row where = g.row(position);
    SliceInSlot<Problem>& in = ring[at.slot].slice;
    const index_type first = slice * shape.slice_columns;
    const index_type columns = min(static_cast<index_type>(shape.slice_columns), g.columns - first);
    const In* x = problem.x + where.x_offset + first;
    in.y = problem.y + where.y_offset + (writes_rows() ? first : 0);
    in.row = where.index;
    in.position = position;
    in.first_column = first;
    in.index = slice;
    in.columns = static_cast<int>(columns);
    in.use = use;
    in.collects = slice == collecting_slice(position);
    in.operand_slot = operands;
    if constexpr (may_drop_ends) in.kept = min(in.columns, to_end);
    const BulkCopy<In> slice_copy(x, x + kept(in), shape.x_end, slot_of(at));
    in.shift = slice_copy.shift();
    const std::uint32_t bytes = slice_copy.bytes();
    slice_copy.load_rest();
    Mbarrier* const full = &ring[at.slot].full;
    std::uint32_t operand_bytes = 0;
    if (brings_operands) {
      with_copies(in.row, operands, first, kept(in), [&](const auto& copy) {
        operand_bytes += copy.bytes();
        copy.load_rest();
      });
    }
    mbarrier_arrive_expect_tx(full, bytes + operand_bytes);
    if constexpr (parks) {
      slice_copy.start(full, createpolicy_evict_first());
    } else if (!shape.rereads && !shape.x_leaves_l2_first) {
      slice_copy.start(full);
    } else {
      const bool keeps = use == SliceUse::publish && slice >= shape.slices_reread - shape.slices_kept;
      slice_copy.start(full, keeps ? createpolicy_evict_last() : createpolicy_evict_first());
    }
    if (brings_operands)
      with_copies(in.row, operands, first, kept(in), [&](const auto& copy) { copy.start(full); });
  }

  /// Calls use(copy) for the copy of each operand to its place in a slot of operands.
  template <class Use>
  __device__ void with_copies(index_type row, int operands, index_type first, index_type columns,
                              const Use& use) const {
    if constexpr (shows_operands_at_run_time<Transform>) {
      problem.transform.at_row(row).for_each_operand([&](int i, const char* data, int bytes) {
        const char* const begin = data + first * bytes;
        use(BulkCopy(begin, begin + columns * bytes, shape.operand[i].end,
                     operand_slot(operands) + shape.operand[i].at));
      });
    } else if constexpr (stages_operands<Problem>) {
      int i = 0;
      map_operands(problem.transform.at_row(row), [&](const auto& operand) {
        const auto* const begin = operand.data + first;
        use(BulkCopy(begin, begin + columns, shape.operand[i].end,
                     operand_slot(operands) + shape.operand[i].at));
        ++i;
        return operand;
      });
    }
  }
  __device__ void copy_operands_that_stay() const {
    const auto with_all_copies = [&](const auto& use) {
      for (int i = 0; i < shape.operand_slots; ++i) {
        const int slice = keeps_columns ? same_columns().slice : i;
        const index_type first = slice * static_cast<index_type>(shape.slice_columns);
        with_copies(0, i, first,
                    min(static_cast<index_type>(shape.slice_columns), problem.geometry.columns - first), use);
      }
    };
    std::uint32_t bytes = 0;
    with_all_copies([&](const auto& copy) {
      bytes += copy.bytes();
      copy.load_rest();
    });
    mbarrier_arrive_expect_tx(&ring[0].operands_used, bytes);
    with_all_copies([&](const auto& copy) { copy.start(&ring[0].operands_used); });
  }
  __device__ void wait_for_operands_that_stay() const {
    if (operands_stay()) mbarrier_wait_parity(&ring[0].operands_used, 0);
  }

  /// Calls use(transform of the slice's row), which has its operands where they are staged.
  template <class Use>
  __device__ __forceinline__ void with_transform(const SliceInSlot<Problem>& in, const Use& use) const {
    auto transform = prepared_stage<Acc>(problem.transform.at_row(in.row), in.first_column);
    if constexpr (shows_operands_at_run_time<Transform>) {
      if (shape.operand_slots > 0) {
        static_assert(most_staged_operands == 2);
        transform.has_copies(operand_slot(in.operand_slot), shape.operand[0].at, shape.operand[1].at,
                             in.first_column, GridPipelinedShape::line);
      }
    } else if constexpr (stages_operands<Problem>) {
      if (shape.operand_slots > 0) {
        int i = 0;
        use(map_operands(transform, [&]<class Operand>(const Operand& operand) {
          using T = std::remove_const_t<std::remove_pointer_t<decltype(operand.data)>>;
          const T* const first = operand.data + in.first_column;
          const char* const staged =
              operand_slot(in.operand_slot) + shape.operand[i].at + place_in_line(first);
          ++i;
          return StagedColumns<T>{reinterpret_cast<const T*>(staged) - in.first_column};
        }));
        return;
      }
    }
    use(transform);
  }

  /// A warp. What it takes for a slice, one way to the words and back through L2 and what has to be done
  /// then, is waited for by all, slice after slice: it paces the block, at about the speed of memory. (One
  /// H200, 65536 columns of float: a slice in 2.03 us, of which the collector 1.79, 0.969 of a copy; with a
  /// chain of instructions longer by four words that are not there 0.88. But two collectors that take turns
  /// made it 0.92, loads for the next slice under way before this one's are joined 0.957: reads that come as
  /// they can get in the way of each other and of the writes. Words that were asked for before they are there
  /// cost a way each: with 8 and 16 at once 4 M columns have 0.69 and 0.60 for 0.81, with one asked for as
  /// soon as one is used 0.63. No difference: a warp before all others in place of one behind them.)
  /// (Those who take turns each see slots that are as many apart.)
  __device__ void collect(int number) const {
    index_type have = -1;
    SlicedRowResult<Problem> result{};
    for (RingCursor at{number, 0};; at.advance(turn(), collectors())) {
      mbarrier_wait_parity(&ring[at.slot].full, at.parity);
      const SliceInSlot<Problem>& in = ring[at.slot].slice;
      const SliceUse use = in.use;
      if (use == SliceUse::end) {
        if (lane == 0) let_finish(ring[at.slot]);
        return;
      }
      if (shape.whole_rows) {
        collect_row_in_slots(at);
        at.advance(turn(), static_cast<int>(shape.slices) - 1);
        continue;
      }
      const index_type position = in.position;
      Out* const y = in.y;
      const bool collects = in.collects;
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&ring[at.slot].empty);
      if (use == SliceUse::publish && (!collects || writes_rows())) {
        if (lane == 0) let_finish(ring[at.slot]);
        continue;
      }
      if (position != have) {
        result = {problem.operation, collect_row_from_memory(position)};
        have = position;
      }
      if (lane == 0) {
        ring[at.slot].of_row = result;
        if (!writes_rows()) *y = store_as<Out>(result.logsumexp());
        let_finish(ring[at.slot]);
      }
    }
  }

  /// (Of logsumexp nobody waits for it.)
  __device__ void let_finish(GridPipelinedSlot<Problem>& held) const {
    if (writes_rows()) mbarrier_arrive(&held.ready);
  }

  __device__ __forceinline__ PartialSoftmax<Acc> collect_row_from_memory(index_type position) const {
    if (shape.collects_slice_each) return collect_slice_each(words_of(position), shape.slices, tag, lane);
    if (shape.runs > 0)
      return collect_slices<true>(words_of(position), shape.slices, tag, lane, run_words_of(position),
                                  shape.runs);
    return collect_slices<false>(words_of(position), shape.slices, tag, lane);
  }

  /// The result of a row that begins in a slot and has all its slices in this block.
  __device__ void collect_row_in_slots(const RingCursor& first) const {
    const int slices = static_cast<int>(shape.slices);
    RingCursor at = first, mine = first;
    for (int i = 0; i < slices; ++i) {
      mbarrier_wait_parity(&ring[at.slot].reduced, at.parity);
      at.advance(turn());
    }
    // Lane l has slice l, as with every other way to join them.
    const int slice = lane % lanes_of_slices(slices);
    mine.advance(turn(), min(slice, slices - 1));
    GridPipelinedSlot<Problem>& held = ring[mine.slot];
    auto total = PartialSoftmax<Acc>::none();
    if constexpr (sizeof(Acc) == 8) {
      total = join_shares_in_slots(first, slices, slice);
    } else if (slice < slices) {
      total = join_shares<Acc>([&](int share) { return held.of_warp[share]; });
    }
    const SlicedRowResult<Problem> result(problem.operation, join_lanes_of_slices(total, slices));
    if (lane >= slices) return;
    held.of_row = result;
    if (lane == 0 && !writes_rows()) *held.slice.y = store_as<Out>(result.logsumexp());
    mbarrier_arrive(&held.empty);
    let_finish(held);
  }

  /// The result of this lane's slice, of some that begin in a slot, from its shares, each joined by as many
  /// lanes as it has shares: one lane would be at eight exponentials of a double for long.
  __device__ PartialSoftmax<Acc> join_shares_in_slots(RingCursor first, int slices, int slice) const {
    constexpr int at_once = 32 / warps_of_group;
    auto of_slice = PartialSoftmax<Acc>::none();
    for (int begin = 0; begin < slices; begin += at_once) {
      RingCursor at = first;
      at.advance(turn(), min(lane / warps_of_group, slices - 1 - begin));
      const PartialSoftmax<Acc> joined =
          join_lanes<warps_of_group>(ring[at.slot].of_warp[lane % warps_of_group]);
      const int place = min(max(slice - begin, 0), at_once - 1);
      const PartialSoftmax<Acc> mine = joined.from_lane(place * warps_of_group);
      if (slice == begin + place && slice < slices) of_slice = mine;
      first.advance(turn(), at_once);
    }
    return of_slice;
  }

  /// A warp of a group of publishers.
  __device__ __forceinline__ void publish(int group, int groups, int warp) const {
    wait_for_operands_that_stay();
    RingCursor at{group, 0};
    for (;; at.advance(turn(), groups)) {
      mbarrier_wait_parity(&ring[at.slot].full, at.parity);
      const SliceUse use = ring[at.slot].slice.use;
      if (use == SliceUse::end) return;
      if (use == SliceUse::finish) {
        if (lane == 0) mbarrier_arrive(&ring[at.slot].reduced);
      } else {
        publish_slice(at, warp);
      }
      if constexpr (parks) {
        leave_slot(at);
      } else {
        release(at);
      }
    }
  }

  /// All lanes of a warp are done with a slot.
  __device__ void release(const RingCursor& at) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&ring[at.slot].empty);
  }

  /// All lanes of a warp are done with the slot alone, which another slice may take.
  __device__ void leave_slot(const RingCursor& at) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&ring[at.slot].written);
  }

  /// Writes what a lane has of a part to the slot, `left` columns before the slice's end: value_of(i) for
  /// each step, of 16 bits a pair. `single`: not in pairs, for these lie across words. `first`: of the
  /// lane's columns those before it are left alone.
  template <bool whole, class ValueOf>
  __device__ __forceinline__ static void write_part(In* part, int left, bool single, const ValueOf& value_of,
                                                    int first = 0) {
#pragma unroll
    for (int i = 0; i < Part::steps; ++i) {
      const int column = i * Part::stride;
      const auto is_written = [&](int c) { return c >= first && (whole || c < left); };
      if constexpr (Part::unit == 1) {
        if (is_written(column)) part[column] = value_of(i);
      } else if (!single && column >= first && (whole || column + 1 < left)) {
        *reinterpret_cast<unsigned*>(part + column) = value_of(i);
      } else {
        // (A half or bfloat16 would be taken apart into its bytes.)
        auto* const to = reinterpret_cast<unsigned short*>(part + column);
        const unsigned pair = value_of(i);
        if (is_written(column)) to[0] = static_cast<unsigned short>(pair);
        if (is_written(column + 1)) to[1] = static_cast<unsigned short>(pair >> 16);
      }
    }
  }

  /// Writes what a dropped logit, or its exponential, is to a warp's share of the slice behind the end of
  /// what its row keeps.
  __device__ __forceinline__ void write_dropped(const SliceInSlot<Problem>& in, In* slice, int warp,
                                                bool single, bool exponentials) const {
    const int lane_begin = Part::first_column(warp, lane);
#pragma unroll 1
    for (int part = kept(in) / Part::columns * Part::columns; part < in.columns; part += Part::columns) {
      const int begin = lane_begin + part;
      write_part<false>(
          slice + begin, in.columns - begin, single,
          [&](int) {
            if constexpr (Part::unit == 2) {
              return exponentials ? 0u : PackedPair<In>::minus_infinities;
            } else {
              return exponentials ? In(0) : -infinity_v<In>;
            }
          },
          kept(in) - begin);
    }
  }

  /// As log_softmax keeps them, of the logits that the exponentials are formed from.
  __device__ static unsigned pair_of_differences(const Part& part, int pair,
                                                 const typename Part::Exponential& exponential, Acc max) {
    const Acc subtracted = exponential.subtracts_first() ? Acc(0) : finite_maximum(max);
    return rounded_pair<In>(part.value(2 * pair) - subtracted, part.value(2 * pair + 1) - subtracted);
  }

  /// The (max, sum) of a warp's share. Two loops over the slot, not unrolled to its end: instructions that
  /// are not at hand are waited for. `transform`: but for what drops ends, for these are not looked at.
  /// `mask`: what is applied in the slot before that, or nothing.
  template <bool single, class TransformRow, class Mask>
  __device__ __forceinline__ PartialSoftmax<Acc> reduce_in_slot(const SliceInSlot<Problem>& in, In* slice,
                                                                int warp, const TransformRow& transform,
                                                                const Mask& mask) const {
    const int columns = kept(in);
    const index_type first_column = in.first_column;  // (the slot is written to)
    const int first = Part::first_column(warp, lane);
    const int left = columns - first;
    In* const from = slice + first;
    const auto write = [&](int begin, auto whole, const auto& value_of) {
      write_part<decltype(whole)::value>(from + begin, left - begin, single, value_of);
    };
    // use(part, first column, whether it is whole) for the parts of the slice, some at once: one alone would
    // be waited for. But of 16 bits with a transform two would be more instructions than are at hand, where
    // rows that begin at odd elements take loops of their own in turn with the others, and then the producer
    // and the collector, one warp each, wait for theirs. (One H200, fractions of a copy, two and one:
    // bfloat16 131073 columns with a factor 0.82 and 0.89, a temperature 0.60 and 0.72, a bias for all rows
    // 0.56 and 0.61, and, its slices whole parts, a mask 0.79 and 0.83, a mask for all rows 0.67 and 0.70;
    // 131072 columns 0.96, 0.89 and 0.90, 0.75, 0.95, 0.81 and 0.84. Of float four, and two with masks alone:
    // a mask 393216 columns 0.952 and 0.968, 131073 0.976 and 0.982, a mask for all rows 0.914 and 0.931,
    // 0.943 and 0.955; but a bias for all rows 0.849 and 0.841, GELU the same. Of bfloat16 that a temperature
    // divides coarsely four and one, 20001 columns 0.71 and 0.83, 131073 0.82 and 0.87, with a mask 0.57 and
    // 0.66, 0.70 and 0.76; two 0.63 and 0.73.)
    const auto in_parts_of = [&]<class SomePart>(std::type_identity<SomePart>, const auto& transform_row,
                                                 bool looks_for_minus_infinity, const auto& use) {
      constexpr bool is_identity = std::is_same_v<decltype(transform_row), const BoundIdentity::Row&>;
      constexpr bool is_mask = !is_identity && only_drops<typename Problem::Transform>;
      // (One that takes parts at once looks up what to do for all of them.)
      constexpr bool is_held = transforms_held_logits<std::remove_cvref_t<decltype(transform_row)>>;
      constexpr bool is_transformed_double = sizeof(Acc) == 8 && !is_identity;
      constexpr bool one_by_one = Part::unit == 2 && (!is_identity || divides_coarsely<Problem>);
      constexpr int at_once = one_by_one ? 1 : is_mask || is_transformed_double ? 2 : 4;
      const auto some = [&](int begin, auto count, auto whole, auto looks) {
        SomePart part[decltype(count)::value];
        if constexpr (is_held) {
          SomePart::template load_at_once<decltype(whole)::value, true>(
              part, from + begin, left - begin, single, transform_row, first_column + first + begin);
        } else {
#pragma unroll
          for (int i = 0; i < decltype(count)::value; ++i) {
            const int begin_of_part = begin + i * Part::columns;
            part[i].template load<single, decltype(whole)::value, true, decltype(looks)::value>(
                from + begin_of_part, left - begin_of_part, transform_row,
                first_column + first + begin_of_part);
          }
        }
#pragma unroll
        for (int i = 0; i < decltype(count)::value; ++i) use(part[i], begin + i * Part::columns, whole);
      };
      int begin = 0;
      const auto whole_parts = [&](auto looks) {
#pragma unroll 1
        for (; begin + at_once * Part::columns <= columns; begin += at_once * Part::columns)
          some(begin, std::integral_constant<int, at_once>{}, std::true_type{}, looks);
      };
      if constexpr (may_overlook_minus_infinity<TransformRow> && !is_identity) {
        if (!looks_for_minus_infinity) whole_parts(std::false_type{});
      }
      if (looks_for_minus_infinity) whole_parts(std::true_type{});
      const int to_end = columns - static_cast<int>(Part::columns_together) * warp;  // of this share
      constexpr int at_end = at_once > 1 && !is_held ? 2 : 1;
#pragma unroll 1
      for (; begin + (at_end - 1) * Part::columns < to_end; begin += at_end * Part::columns)
        some(begin, std::integral_constant<int, at_end>{}, std::false_type{}, std::true_type{});
      if (at_end > 1 && begin < to_end)
        some(begin, std::integral_constant<int, 1>{}, std::false_type{}, std::true_type{});
    };
    const auto in_parts = [&](const auto& transform_row, bool looks_for_minus_infinity, const auto& use) {
      in_parts_of(std::type_identity<Part>{}, transform_row, looks_for_minus_infinity, use);
    };
    bool looks_for_minus_infinity = true;
    if constexpr (may_overlook_minus_infinity<TransformRow>)
      looks_for_minus_infinity = !stage_keeps_minus_infinity(transform);
    [[maybe_unused]] bool is_coarse = false;
    [[maybe_unused]] Acc max_of_logits = 0;
    const auto maximum_of_results = [&] {
      auto maximum = Part::Maximum::none();
      in_parts(transform, looks_for_minus_infinity, [&](const Part& part, int begin, auto whole) {
        maximum.join(part);
        if constexpr (has_logits && !std::is_same_v<TransformRow, BoundIdentity::Row>)
          write(begin, whole, [&](int i) { return part.held[i]; });
      });
      return maximum.of_warp(!for_differences);
    };
    const auto find_maximum = [&] {
      if constexpr (Part::adds_pairs && !single && !for_differences) {
        using Logits = PartOfSlice<RowsProblem<In, Out, BoundIdentity>>;
        const In* const bias = transform.operand.data + (first_column + first);
        auto maximum = Logits::Maximum::none();
        in_parts_of(std::type_identity<Logits>{}, BoundIdentity::Row{}, true,
                    [&](const Logits& part, int begin, auto whole) {
                      Logits sum;
#pragma unroll
                      for (int i = 0; i < Part::steps; ++i) {
                        const int column = begin + i * Part::stride;
                        unsigned pair = 0;
                        if (decltype(whole)::value || column < left)
                          pair = *reinterpret_cast<const unsigned*>(bias + column);
                        sum.held[i] = PackedPair<In>::sum(part.held[i], pair);
                      }
                      maximum.join(sum);
                    });
        const Acc max = maximum.of_warp();
        if (Kokkos::fabs(max) < Part::most_rounded_maximum) return max;
      }
      const auto join_logits = [&]<class Logits>(std::type_identity<Logits> logits, const auto& row,
                                                 const auto& use) {
        auto maximum = Logits::Maximum::none();
        in_parts_of(logits, row, true, [&](const Logits& part, int begin, auto whole) {
          maximum.join(part);
          use(part, begin, whole);
        });
        max_of_logits = maximum.of_warp();
      };
      if constexpr (masks_in_slot) {
        using Logits = PartOfSlice<RowsProblem<In, Out, BoundMask<bool>>>;
        join_logits(std::type_identity<Logits>{}, mask, [&](const Logits& part, int begin, auto whole) {
          write(begin, whole, [&](int i) { return part.held[i]; });
        });
      }
      if constexpr (Part::unpacked && knows_maximum<TransformRow>) {
        // From the logits as they are, in pairs. Asked first of another maximum, so that no pass is in vain.
        const index_type end = in.first_column + columns;
        Acc max = 1;
        if (transform.finds_maximum(max, in.first_column, end)) {
          if constexpr (!masks_in_slot) {
            using Logits = PartOfSlice<RowsProblem<In, Out, BoundIdentity>>;
            join_logits(std::type_identity<Logits>{}, BoundIdentity::Row{}, [](const auto&...) {});
          }
          max = max_of_logits;
          if constexpr (divides_coarsely<Problem>) {
            if (maximum_of_quotients(transform, max, is_coarse)) return maximum_or_nan(max, -largest_v<Acc>);
          } else if (max > -largest_v<Acc> && max <= largest_v<Acc> &&
                     transform.finds_maximum(max, in.first_column, end)) {
            return maximum_or_nan(max, -largest_v<Acc>);
          }
        }
      }
      Acc max;
#pragma unroll 1
      for (;; looks_for_minus_infinity = true) {
        max = maximum_of_results();
        if (max == max || looks_for_minus_infinity) return max;
      }
    };
    const Acc max = find_maximum();
    const auto exponential = Part::exponential_below(max);
    [[maybe_unused]] Acc correction = Part::correction_below(max);
    [[maybe_unused]] const bool writes_exponentials =
        has_exponentials && in.use == SliceUse::hold && keeps_exponentials(problem.operation, shape);
    auto sum = ShareSum<Acc>::none();
    const auto add_with = [&](const auto& some_exponential, const auto& part, int begin, auto whole) {
      Acc e[Part::count];
      part.template add_to<Part::packed || Part::unpacked>(sum, some_exponential,
                                                           [&](int i, Acc value) { e[i] = value; });
      if constexpr (has_differences) {
        write(begin, whole, [&](int i) { return pair_of_differences(part, i, exponential, max); });
      } else if constexpr (has_exponentials) {
        if (!writes_exponentials) return;
        write(begin, whole, [&](int i) {
          if constexpr (Part::unpacked) {
            return PackedExponentials<In>::of(e[2 * i], e[2 * i + 1]);
          } else {
            return e[i];
          }
        });
      }
    };
    const auto add = [&](const Part& part, int begin, auto whole) {
      add_with(exponential, part, begin, whole);
    };
    const auto add_parts = [&](const auto& add_part) {
      if constexpr (has_logits) {
        in_parts(BoundIdentity::Row{}, true, add_part);
      } else {
        in_parts(transform, looks_for_minus_infinity, add_part);
      }
    };
    if constexpr (Part::unpacked) {
      const auto subtract_and_add = [&](Part& part, int begin, auto whole) {
        if (exponential.subtracts_first()) part.subtract(exponential.subtracted);
        add(part, begin, whole);
      };
      // A loop of its own for when nothing is subtracted: an instruction that is skipped takes as long as one
      // that is not.
      if constexpr (divides_coarsely<Problem>) {
        if (is_coarse) {
          using Logits = PartOfSlice<RowsProblem<In, Out, BoundIdentity>>;
          const auto of_logit = ExponentialOfCoarseQuotient::below(transform, max_of_logits);
          correction = of_logit.correction(max_of_logits);
          in_parts_of(
              std::type_identity<Logits>{}, BoundIdentity::Row{}, true,
              [&](const Logits& part, int begin, auto whole) { add_with(of_logit, part, begin, whole); });
        } else {
          add_parts(subtract_and_add);
        }
      } else if ((has_exponentials || has_differences) && !exponential.subtracts_first()) {
        add_parts(add);
      } else {
        add_parts(subtract_and_add);
      }
    } else {
      add_parts(add);
    }
    if constexpr (may_drop_ends && (has_logits || has_exponentials || has_differences)) {
      if (has_logits || has_differences || writes_exponentials)
        write_dropped(in, slice, warp, single, writes_exponentials);
    }
    if constexpr (divides_coarsely<Problem>) return Part::share(max, sum.of_warp(), correction);
    return Part::share(max, sum.of_warp());
  }

  /// What it leaves in the slot.
  enum class Kept : int { nothing, exponentials, differences };

  /// The same where a share is held. The ninth part of the largest slices is transformed twice.
  template <class TransformRow>
  __device__ __forceinline__ PartialSoftmax<Acc> reduce_in_registers(const SliceInSlot<Problem>& in,
                                                                     In* slice, int warp,
                                                                     const TransformRow& transform,
                                                                     bool single) const {
    constexpr int at_once = GridPipelinedShape::parts_at_once,
                  turns = GridPipelinedShape::parts_held / at_once;
    static_assert(at_once * turns + 1 >= ReductionPlan::most_parts);
    const int first = Part::first_column(warp, lane);
    const int left = in.columns - first;
    const int to_end = in.columns - static_cast<int>(Part::columns_together) * warp;  // of this share
    const index_type first_column = in.first_column + first;
    In* const from = slice + first;
    const auto load = [&]<bool whole, int parts>(std::bool_constant<whole>, Part(&part)[parts], int begin) {
      Part::template load_at_once<whole, true>(part, from + begin, left - begin, single, transform,
                                               first_column + begin);
    };

    // Whole parts of the slice, and the part behind these, if this share has columns there. Whole ones are
    // taken `at_once`, the last together with some before them that are taken once more, so that looking up
    // what to do is not for a few; in the place of the first of these is the part behind, if there is one.
    const int whole_parts = min(in.columns / Part::columns, at_once * turns);
    const int behind = whole_parts * Part::columns;
    const bool has_behind = behind < to_end, has_room = whole_parts < at_once * turns;
    const int first_of_last = (whole_parts - at_once) * Part::columns;  // if there are so many

    Part held[turns][at_once];
    static_assert(turns == 2);
    const auto drop = [](Part& part) {
#pragma unroll
      for (Acc& logit : part.held) logit = -infinity_v<Acc>;
    };
#pragma unroll
    for (Part& part : held[0]) drop(part);
    if (whole_parts >= at_once) {
#pragma unroll 1
      for (int begin = first_of_last;; begin = 0) {
        // Registers have no index: what comes makes room at the front.
#pragma unroll
        for (int k = 0; k < at_once; ++k) held[1][k] = held[0][k];
        load(std::true_type{}, held[0], begin);
        if (begin == 0) break;
      }
    } else {
#pragma unroll
      for (Part& part : held[1]) drop(part);
#pragma unroll 1
      for (int i = whole_parts - 1; i >= 0; --i) {
        Part part[1];
        load(std::true_type{}, part, i * Part::columns);
#pragma unroll
        for (int k = at_once - 1; k > 0; --k) held[0][k] = held[0][k - 1];
        held[0][0] = part[0];
      }
    }
    auto maximum = Part::Maximum::none();
    if (has_behind) {
      Part part[1];
      load(std::false_type{}, part, behind);
      maximum.join(part[0]);
      if (has_room) held[1][0] = part[0];
    }
#pragma unroll
    for (const auto& parts : held) {
#pragma unroll
      for (const Part& part : parts) maximum.join(part);
    }
    const Acc max = maximum.of_warp();

    const auto exponential = Part::exponential_below(max);
    if (exponential.subtracts_first()) {
#pragma unroll
      for (auto& parts : held) {
#pragma unroll
        for (Part& part : parts) part.subtract(exponential.subtracted);
      }
    }
    auto sum = ShareSum<Acc>::none();
    const auto add = [&]<Kept kept, bool whole>(std::integral_constant<Kept, kept>, std::bool_constant<whole>,
                                                const Part& part, int begin, bool one_by_one) {
      Acc e[Part::count];
      part.template add_to<true>(sum, exponential, [&](int i, Acc value) { e[i] = value; });
      if constexpr (kept == Kept::exponentials) {
        write_part<whole>(from + begin, left - begin, one_by_one,
                          [&](int i) { return PackedExponentials<In>::of(e[2 * i], e[2 * i + 1]); });
      } else if constexpr (kept == Kept::differences) {
        write_part<whole>(from + begin, left - begin, one_by_one,
                          [&](int i) { return pair_of_differences(part, i, exponential, max); });
      }
    };
    // Nothing parts them.
    const auto add_whole_parts = [&](auto kept, const Part(&parts)[at_once], int begin) {
      const auto add_all = [&](auto one_by_one) {
#pragma unroll
        for (int k = 0; k < at_once; ++k)
          add(kept, std::true_type{}, parts[k], begin + k * Part::columns, decltype(one_by_one)::value);
      };
      if (single) {
        add_all(std::true_type{});
      } else {
        add_all(std::false_type{});
      }
    };
    const auto add_held = [&](auto kept) {
      if (whole_parts >= at_once) {
        add_whole_parts(kept, held[0], 0);
      } else {
#pragma unroll
        for (int k = 0; k < at_once; ++k) {
          if (k < whole_parts) add(kept, std::true_type{}, held[0][k], k * Part::columns, single);
        }
      }
      if (!has_room) {
        add_whole_parts(kept, held[1], first_of_last);
        return;
      }
      if (has_behind) add(kept, std::false_type{}, held[1][0], behind, single);
#pragma unroll
      for (int k = 1; k < at_once; ++k) {
        const int begin = first_of_last + k * Part::columns;
        if (begin >= at_once * Part::columns) add(kept, std::true_type{}, held[1][k], begin, single);
      }
    };
    const auto with_kept = [&](const auto& use) {
      if (has_exponentials && keeps_exponentials(problem.operation, shape)) {
        use(std::integral_constant<Kept, Kept::exponentials>{});
      } else if (has_differences && keeps_differences(problem.operation, shape)) {
        use(std::integral_constant<Kept, Kept::differences>{});
      } else {
        use(std::integral_constant<Kept, Kept::nothing>{});
      }
    };
    with_kept(add_held);
    if (has_behind && !has_room) {
      Part part[1];
      load(std::false_type{}, part, behind);
      if (exponential.subtracts_first()) part[0].subtract(exponential.subtracted);
      with_kept([&](auto kept) { add(kept, std::false_type{}, part[0], behind, single); });
    }
    return Part::share(max, sum.of_warp());
  }

  /// Whether a transform of pairs can be applied without looking for logits of -inf, and once more with if
  /// the maximum is NaN then.
  template <class TransformRow>
  static constexpr bool may_overlook_minus_infinity = Part::unpacked&& may_keep_minus_infinity<TransformRow>;

  /// Reduces a slice to what each of its shares has.
  __device__ __forceinline__ void publish_slice(const RingCursor& at, int warp) const {
    const SliceInSlot<Problem>& in = ring[at.slot].slice;
    In* const slice = reinterpret_cast<In*>(slot_of(at) + in.shift);
    if (may_drop_ends && kept(in) == 0) {
      if (lane == 0) ring[at.slot].of_warp[warp] = PartialSoftmax<Acc>::none();
    } else {
      with_transform(
          in, [&](const auto& transform) __attribute__((always_inline)) {
            const auto reduce = [&](const auto& rest, const auto& mask) __attribute__((always_inline)) {
              const bool single = !Part::takes_units(slice, transform, in.first_column);
              PartialSoftmax<Acc> found;
              if constexpr (holds_shares) {
                found = reduce_in_registers(in, slice, warp, rest, single);
              } else {
                found = !single ? reduce_in_slot<false>(in, slice, warp, rest, mask)
                                : reduce_in_slot<true>(in, slice, warp, rest, mask);
              }
              if (lane == 0) ring[at.slot].of_warp[warp] = found;
            };
            if constexpr (masks_in_slot) {
              reduce(without_mask_and_ends<Transform>(transform), mask_of_row<Transform>(transform));
            } else if constexpr (holds_shares) {
              reduce(transform, BoundIdentity::Row{});
            } else {
              reduce(without_ends<Transform>(transform), BoundIdentity::Row{});
            }
          });
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&ring[at.slot].reduced);
    if (!finishes_from_inputs(in.use)) release_operands(in);
  }

  /// Whether the finishers need a slice's operands.
  __device__ bool finishes_from_inputs(SliceUse use) const {
    return use == SliceUse::finish ||
           (use == SliceUse::hold && finishers_need_operands(problem.operation, shape));
  }
  __device__ void release_operands(const SliceInSlot<Problem>& in) const {
    if constexpr (stages_operands<Problem>) {
      if (lane != 0 || operands_stay()) return;
      mbarrier_arrive(&ring[in.operand_slot].operands_used);
    }
  }

  /// One warp: joins what the publishers found, and tells the other blocks. (They themselves would be late
  /// for their next slice, one of them for each, and so would all that wait for it.)
  __device__ void announce() const {
    if (shape.whole_rows) return;
    for (RingCursor at;; at.advance(turn())) {
      GridPipelinedSlot<Problem>& held = ring[at.slot];
      mbarrier_wait_parity(&held.full, at.parity);
      const SliceUse use = held.slice.use;
      if (use == SliceUse::end) return;
      const index_type position = held.slice.position, slice = held.slice.index;
      mbarrier_wait_parity(&held.reduced, at.parity);
      if (use == SliceUse::finish) {
        release(at);
        continue;
      }
      const PartialSoftmax<Acc> of_slice = join_lanes<warps_of_group>(held.of_warp[lane % warps_of_group]);
      if (lane == 0) PartialWords<Acc>::publish(words_of(position) + slice, of_slice, tag);
      release(at);
      if (shape.runs > 0) announce_run(position, slice);
    }
  }

  /// Joins the run of slices that ended `slices_ahead` before this one, if there is one. What it may have to
  /// wait for are slices of earlier tickets, which wait for nothing but slices of still earlier ones. (Each
  /// run's end announced as soon as it is reduced, blocks would wait for each other in earnest.)
  __device__ void announce_run(index_type position, index_type slice) const {
    const index_type end = slice + 1 - ReductionPlan::slices_ahead;
    if (end <= 0 || end % ReductionPlan::slices_of_run != 0) return;
    const index_type run = end / ReductionPlan::slices_of_run - 1;
    if (run >= shape.runs) return;
    static_assert(ReductionPlan::slices_of_run == 32);
    const PartialSoftmax<Acc> of_run =
        join_lanes_of_slices(wait_for_each(words_of(position) + run * 32 + lane, tag, true), 32);
    if (lane == 0) PartialWords<Acc>::publish(run_words_of(position) + run, of_run, tag);
  }

  /// A warp of the finishers.
  __device__ __forceinline__ void finish(int warp) const {
    wait_for_operands_that_stay();
    for (RingCursor at;; at.advance(turn())) {
      GridPipelinedSlot<Problem>& held = ring[at.slot];
      mbarrier_wait_parity(&held.ready, at.parity);
      mbarrier_wait_parity(&held.full, at.parity);  // passed, but what the copy wrote is visible now
      const SliceUse use = held.slice.use;
      const auto done = [&] {
        fence_proxy_async_shared();  // what was written to the slot comes before the copy from it
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&held.written);
      };
      if (use == SliceUse::hold || use == SliceUse::finish) {
        finish_slice(at, warp, done);
      } else {
        done();
      }
      if (use == SliceUse::end) break;
    }
    if (has_larger_outputs<Problem> && lane == 0) cp_async_bulk_wait_group();
  }

  /// The same where slices are parked: each takes the place of the one that was parked so many before it.
  __device__ __forceinline__ void park_and_finish(int warp) const {
    constexpr int parked = GridPipelinedShape::parked;
    typename SliceWriter<Problem>::Parked slice[parked];
    bool is_there[parked];
#pragma unroll
    for (int i = 0; i < parked; ++i) is_there[i] = false;
    RingCursor at, oldest;
    int turns_left = parked;
    for (bool ended = false;;) {
#pragma unroll
      for (int i = 0; i < parked; ++i) {
        if (is_there[i]) {
          mbarrier_wait_parity(&ring[oldest.slot].ready, oldest.parity);
          const SlicedRowResult<Problem> result = ring[oldest.slot].of_row;
          const SliceWriter<Problem> writer{ring[oldest.slot].slice, nullptr, warp, lane, result, {}};
          writer.from_parked(slice[i], ring[oldest.slot].slice.store_cycles);
          release(oldest);
          oldest.advance(turn());
          is_there[i] = false;
        }
        if (ended) {
          if (--turns_left == 0) return;
          continue;
        }
        GridPipelinedSlot<Problem>& held = ring[at.slot];
        mbarrier_wait_parity(&held.full, at.parity);
        ended = held.slice.use == SliceUse::end;
        if (!ended) {
          if (held.slice.store_cycles > 0)
            wait_until_cycle(clock_cycles() + GridPipelinedShape::cycles_before_parking);
          const SlicedRowResult<Problem> unknown{};
          SliceWriter<Problem>{held.slice, slot_of(at), warp, lane, unknown, {}}.park(slice[i]);
          leave_slot(at);
          is_there[i] = true;
          at.advance(turn());
        }
      }
    }
  }

  template <class Done>
  __device__ __forceinline__ void finish_slice(const RingCursor& at, int warp, const Done& done) const {
    GridPipelinedSlot<Problem>& held = ring[at.slot];
    const SliceInSlot<Problem>& in = held.slice;
    const SlicedRowResult<Problem> result = held.of_row;
    // (The columns of all elements of a lane would be found before the loop over slices and spilled.)
    const SliceWriter<Problem> writer{in, slot(at.slot), warp, not_known(lane), result, staged_outputs(warp)};
    if constexpr (may_drop_ends) {
      if (kept(in) == 0) {
        if (finishes_from_inputs(in.use)) release_operands(in);
        writer.of_dropped(done);
        return;
      }
    }
    if constexpr (has_exponentials || has_differences || has_logits) {
      if (in.use == SliceUse::hold && writes_back(problem.operation, shape)) {
        mbarrier_wait_parity(&held.reduced, at.parity);
        if constexpr (has_differences) {
          if (keeps_differences(problem.operation, shape)) {
            writer.add_to_differences(held.of_warp, done);
            return;
          }
        }
        if (keeps_exponentials(problem.operation, shape)) {
          writer.scale_exponentials(held.of_warp, done);
        } else {
          writer.from_logits(done);
        }
        return;
      }
    }
    with_transform(in, [&](const auto& transform) {
      if constexpr (masks_in_slot) {
        if (in.use == SliceUse::hold) {
          mbarrier_wait_parity(&held.reduced, at.parity);
          writer.from_inputs(without_mask<Transform>(transform), done);
          return;
        }
      }
      writer.from_inputs(transform, [&] {
        if constexpr (stages_operands<Problem>) {
          __syncwarp();
          release_operands(in);
        }
        done();
      });
    });
  }

  /// One thread. A slot is free when its copy has been read, which is waited for as late as possible.
  __device__ void store() const {
    Mbarrier* read_next = nullptr;
    const auto free_last = [&](auto copies_after) {
      if (!read_next) return;
      cp_async_bulk_wait_group_read<decltype(copies_after)::value>();
      mbarrier_arrive(read_next);
      read_next = nullptr;
    };
    for (RingCursor at;; at.advance(turn())) {
      GridPipelinedSlot<Problem>& held = ring[at.slot];
      if (!mbarrier_test_parity(&held.written, at.parity)) {
        free_last(std::integral_constant<int, 0>{});
        mbarrier_wait_parity(&held.written, at.parity);
      }
      const SliceInSlot<Problem>& in = held.slice;
      if (in.use == SliceUse::end) break;
      const int before = in.bytes_before_boundary();
      const int bytes = (in.columns * static_cast<int>(sizeof(Out)) - before) /
                        GridPipelinedShape::copy_alignment * GridPipelinedShape::copy_alignment;
      if (!SliceWriter<Problem>::through_slot || in.use == SliceUse::publish || bytes <= 0) {
        mbarrier_arrive(&held.empty);
        continue;
      }
      char* const to = reinterpret_cast<char*>(in.y) + before;
      const char* const from = slot(at.slot) + in.bytes_before_outputs() + before;
      if (!shape.rereads) {
        cp_async_bulk_store(to, from, static_cast<std::uint32_t>(bytes));
      } else {
        cp_async_bulk_store(to, from, static_cast<std::uint32_t>(bytes), createpolicy_evict_first());
      }
      free_last(std::integral_constant<int, 1>{});
      read_next = &held.empty;
    }
    free_last(std::integral_constant<int, 0>{});
    cp_async_bulk_wait_group();
  }
};

}  // namespace KokkosSoftmax::impl

#endif
