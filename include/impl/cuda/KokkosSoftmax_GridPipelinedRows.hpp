// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The CUDA kernel for long rows, at the speed of a copy (compute capability 9.0): blocks stay resident, one
/// on each multiprocessor; slices of rows are handed out in the order of memory by a ticket, so that a slower
/// multiprocessor takes fewer. In a block
///   a producer    takes a ticket when a slot of the ring in shared memory is free, and starts its bulk copy;
///   publishers    (8 warps, or 16 that take turns) reduce a slice to a (max, sum) for each of 8 shares, in
///                 two passes (a long transform of 16 bits, with all of a share in registers, in one);
///   an announcer  (1 warp) joins these, one word in global memory, and of long rows runs of slices, too;
///   a collector   (1 warp, of some rows of doubles 2 that take turns) waits for the words of a slot's
///                 row and joins them;
///   finishers     (8 warps) turn the slot's slice into exp(x - max) / sum, in place;
///   a storer      (1 thread) starts the bulk copy of the slot to y. When it is read, the slot is free.
/// Outputs larger than the inputs have no room in a slot: each finisher's warp stages its part of a slice in
/// a place of its own, and starts the bulk copy from there. None of them waits for a later one, so the way
/// through L2 and the reduction of one slice are hidden behind the copies of others. A row of so few slices
/// that a block holds two such rows has one ticket for all, and its slices never leave the block: the way
/// through L2 for each would take longer than its copy.
///
/// A slice of which a causal mask keeps nothing is not read, nor reduced. Its outputs wait for the row's
/// result like others: they are NaN where that is. Of one that it keeps a part of, that part is read and
/// reduced.
///
/// Rows that fill much of the shared memory of the whole grid: finishers take their part of a slice into
/// registers, which lets its slot go, and write it to y from there once the row's result is known (parked
/// slices; the results are those of the other way). There is no storer then.
///
/// Operands of a transform whose columns lie side by side are copied along, to slots of their own behind the
/// others. One that is the same for all rows is copied once: each block keeps to slices of the same columns,
/// whose tickets are rows; where there are too few of them for that, but few slices, it has all of it. A
/// float's transformed logit goes back to its slot, and so does what a mask leaves of 16 bits, alone or among
/// factors. What a transform makes of 16 bits has no room there: its exponential goes back instead, in 16
/// bits (PackedExponentials), or for log_softmax the difference from its share's maximum. All these need
/// their operands until a slice is reduced, others (of 16 bits that become floats, and rows that are read
/// twice) until it is finished.
///
/// What was measured, as fractions of a copy of 1 GiB on one H200. Float: warps that do all of it in turn
/// 0.8, since they wait for copies while results are there, or for results while copies are; slices that wait
/// for their row in registers 0.2 to 0.5, since then publishing waits for finishing; finishers that store to
/// global memory themselves 0.90 to 0.94, with the storer 0.93 to 0.97: their stores hold up the loads of the
/// publishers; a ticket drawn ahead of its slot 2 to 7 points less: the longer a ticket waits, the longer all
/// the others of its row; slices of the next tickets brought to L2 beforehand 0 to 6 points less; bulk copies
/// between different places of a line 3 to 4 points less. 16386 columns of float 0.69 before a block had rows
/// for itself, 0.96 since. Bfloat16: publishers who also join and announce, one of them for each slice in
/// turn, for which all others wait at the next, 0.87 with the loop over a slice unrolled to its end
/// (instructions are waited for), 0.80 not unrolled (each load is); with an announcer, and 16 KB at once,
/// 0.97. Operands that are read where they are, of a copy of all bytes: a mask 0.39 in float and 0.19 in
/// bfloat16, a bias 0.83 and 0.45; copied along 0.96 and 0.90, 0.97 and 0.73. Bfloat16 whose exponentials go
/// back to the slot, of which each was formed twice: with that bias 0.91 for 0.73, with a factor 0.91 for
/// 0.86; without two of 30 instructions for each logit, which did nothing, with that bias 0.93 and 0.95, with
/// a temperature 0.88 and 0.91, with GELU 0.73 and 0.78; with the maximum of logits and bias found in pairs,
/// such a bias 0.71 and 0.75, 2.2 M columns with one as large as x 0.80 and 0.86, half 0.60 and 0.63. Half
/// whose exponentials go back, too, GELU 0.57 and 0.71, a bias for all rows 0.82 and 0.91, of 50257 columns
/// 0.665 and 0.75; log_softmax, whose differences do, in bfloat16 0.81 and 0.94, 0.65 and 0.82, a bias as
/// large as x 0.84 and 0.96, half with GELU 0.61 and 0.85. Two groups of publishers that take halves of the
/// same shares, so that operands are free sooner: with a temperature 0.68 for 0.84, with a bias for all rows
/// no better. Nor do these come sooner where each group of publishers brings its own; a mask for all rows
/// that rows of a ticket share has 0.93 for 0.95. Exponentials below the maximum of a quarter of the logits,
/// and formed once more where that is too low: such a bias 0.75 for 0.73, GELU 0.76 for 0.79. Parked slices:
/// 3 M columns of float 0.92 for 0.87, 4 M 0.90 for 0.80, 5 M 0.89 for 0.78, but 393216 0.94 for 0.955; two
/// in place of three no better below 3.5 M and 0.02 less above; a parked slice that changes places with the
/// next one in its slot, from where a bulk copy takes it to y, 0.01 less; fewer looks for the words of a row
/// 0.91 to 0.94 for 2 M and up to 0.03 less for others.
///
/// Why it cannot hang. Publishers wait for nothing but copies, announcers for slices of earlier tickets
/// besides: whatever slice was handed out gets published. A row lacks slices that nobody took only while no
/// slot is free, and tickets are handed out in order (those that a block has without drawing them it takes at
/// once, into empty slots), so of all rows that some block waits for, the oldest could lack one only if it
/// filled all slots of the grid itself: ruled out, since of a row at most as many slices as the grid has
/// slots are held (where blocks keep to their columns, one slice by the blocks of each); those of a longer
/// one that are read twice come first, and hold no slot while they wait. Where slices are parked, registers
/// are slots like others in this: finishers wait for a row only when they have slices in all of theirs; and a
/// ticket drawn before its slot is free waits for the end of a slice whose row's result is there. Slices of
/// logsumexp, of which a ticket may have several, keep their slots until the collector has seen them; what it
/// waits for are slices of the same row, never of a later one, and those of each kind of ticket are handed
/// out in the order of rows, so the blocks of the oldest row go on. The slots counted so are those of blocks
/// that are resident together for sure: of all, by a cooperative launch, or of one block or two, if these
/// are enough; then no ticket that others wait for belongs to a block that may not be there yet. See
/// blocks_resident_together().

#ifndef KOKKOSSOFTMAX_GRIDPIPELINEDROWS_HPP
#define KOKKOSSOFTMAX_GRIDPIPELINEDROWS_HPP

#include <impl/cuda/KokkosSoftmax_GridPipelinedBlock.hpp>

#include <optional>
#include <string_view>

namespace KokkosSoftmax::impl {

/// Groups of publishers. Two for 16 bits, which come twice as many in the same time, and for float, of which
/// a few rows are done sooner so, but for those with operands: unless a mask is among factors. (One H200,
/// microseconds in a CUDA graph, one group and two: 32 x 128256 of float 11.5 and 10.5, 48 x 128256 15.1 and
/// 14.2, 64 x 128256 19.5 and 19.1; 1 GiB within 0.005 of a copy, but with a bias as large as x 1 M columns
/// 0.974 and 0.967, 1.9 M 0.868 and 0.849, with a mask 9217 columns 0.91 and 0.82, 10001 0.94 and 0.88, with
/// a factor, a bias, a mask and a causal mask 8191 0.87 and 0.82, 65536 0.51 and 0.46; with a temperature and
/// a mask 8191 0.84 and 0.95, 16381 0.88 and 0.98, 65536 0.90 both.)
template <class Problem, RingFor kind>
inline constexpr int groups_of_publishers = [] {
  using Transform = typename Problem::Transform;
  if (GridPipelinedBlock<Problem>::holds_shares) return 1;
  if (sizeof(typename Problem::In) == 2) return 2;
  const bool fits = sizeof(typename Problem::In) == 4 && kind != RingFor::parked_slices;
  return fits && (operands_of<Transform> == 0 || is_masked_product<Transform>) ? 2 : 1;
}();

template <class Problem, RingFor kind>
inline constexpr int threads_of = GridPipelinedShape::threads(groups_of_publishers<Problem, kind>,
                                                              GridPipelinedShape::most_collectors<Problem>);

/// setmaxnreg exists for compute capability 9.0a alone.
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
inline constexpr bool has_setmaxnreg = false;
#else
inline constexpr bool has_setmaxnreg = true;
#endif

template <RingFor kind, bool for_differences, class Problem>
__device__ __forceinline__ void run_grid_pipelined_block(const Problem& problem,
                                                         const GridPipelinedShape& shape,
                                                         const CudaWorkspace& workspace) {
  extern __shared__ __align__(128) char grid_pipelined_slots[];
  __shared__ std::uint32_t shared_epoch;
  using OfBlock = GridPipelinedBlock<Problem, kind, for_differences>;
  constexpr bool parks = OfBlock::parks, holds_shares = OfBlock::holds_shares && has_setmaxnreg;
  constexpr int warps_of_group = GridPipelinedShape::warps_of_group;
  auto* const ring = reinterpret_cast<GridPipelinedSlot<Problem>*>(
      grid_pipelined_slots + shape.bytes_of_slots() + shape.bytes_staged());
  const bool finishes = problem.operation != Operation::logsumexp;
  const int warp = threadIdx.x / 32;
  constexpr int groups = groups_of_publishers<Problem, kind>, publishers = groups * warps_of_group;
  const bool produces = threadIdx.x == (publishers + warps_of_group) * 32;
  OfBlock block{problem, shape, workspace, ring, grid_pipelined_slots, static_cast<int>(threadIdx.x % 32)};
  if constexpr (!parks) {
    if (produces) block.prefetch_first();
  }
  // (One thread of a warp: the fence takes a microsecond with several.)
  if (threadIdx.x % 32 == 0 && warp < OfBlock::turn_of(shape)) {
    GridPipelinedSlot<Problem>& slot = ring[warp];
    mbarrier_init(&slot.full, 1);
    mbarrier_init(&slot.reduced, warps_of_group);
    mbarrier_init(&slot.ready, 1);
    mbarrier_init(&slot.written, parks ? 2 * warps_of_group : warps_of_group);
    mbarrier_init(&slot.operands_used, shape.operands_stay ? 1 : warps_of_group);
    // The publishers (where slices are parked, the finishers), who announces, the collector, and who stores.
    mbarrier_init(&slot.empty,
                  warps_of_group + (shape.whole_rows ? 0 : 1) + 1 + (finishes && !parks ? 1 : 0));
    fence_mbarrier_init();
  }
  __syncthreads();
  grid_dependency_wait();
  // (The first copies are under way while others wait for the epoch.)
  if constexpr (!parks) {
    if (produces) block.begin();
  }
  if (threadIdx.x == 0) shared_epoch = workspace.epoch();
  __syncthreads();
  block.epoch = shared_epoch;
  block.tag = CudaWorkspace::tag_of_any_residency(block.epoch);
  // (Where nothing is to be finished, the finishers are publishers, too, by the same instructions: with a
  // copy of their own warps waited for these to be fetched. One H200, logsumexp as a fraction of a sum, so
  // and as now: bfloat16 24577 columns 0.64 and 0.75, 65537 0.78 and 0.87, 131073 0.84 and 0.89, 393217 0.92
  // and 0.95.)
  const bool all_publish = !parks && !OfBlock::holds_shares && !finishes;
  if (warp < publishers + (all_publish ? warps_of_group : 0)) {
    if constexpr (parks) setmaxnreg_dec<GridPipelinedShape::publisher_registers>();
    if constexpr (holds_shares) setmaxnreg_inc<GridPipelinedShape::holder_registers>();
    block.publish(warp / warps_of_group, shape.parties, warp % warps_of_group);
  } else if (warp < publishers + warps_of_group) {
    if constexpr (holds_shares) setmaxnreg_dec<GridPipelinedShape::finisher_registers_beside_holders>();
    if constexpr (parks) {
      setmaxnreg_inc<GridPipelinedShape::finisher_registers>();
      block.park_and_finish(warp - publishers);
    } else if (finishes) {
      block.finish(warp - publishers);
    }
  } else {
    if constexpr (parks) setmaxnreg_dec<GridPipelinedShape::other_registers>();
    if constexpr (holds_shares) setmaxnreg_dec<GridPipelinedShape::other_registers_beside_holders>();
    if (warp == publishers + warps_of_group) {
      if (produces) {
        if constexpr (parks) {
          block.produce_parked();
        } else if constexpr (OfBlock::keeps_columns) {
          block.produce_same_columns();
        } else {
          block.produce();
        }
      }
    } else if (const int collector = OfBlock::collector_of(warp - publishers - warps_of_group);
               collector >= 0) {
      if (collector < block.collectors()) block.collect(collector);
    } else if (warp == publishers + warps_of_group + 2) {
      block.announce();
    } else if (finishes && !parks && block.lane == 0) {
      block.store();
    }
  }
  workspace.clear_as_last_of_epochs(shared_epoch);
}

/// That of parked slices has no body where setmaxnreg is missing.
template <class Problem, RingFor kind, bool for_differences>
__global__ void __launch_bounds__(threads_of<Problem, kind>, 1)
    grid_pipelined_rows_kernel(const __grid_constant__ Problem problem,
                               const __grid_constant__ GridPipelinedShape shape,
                               const __grid_constant__ CudaWorkspace workspace) {
  if constexpr (kind != RingFor::parked_slices || has_setmaxnreg)
    run_grid_pipelined_block<kind, for_differences>(problem, shape, workspace);
}

/// What the program that finds the tuning, or a test, chooses for a call; the rest is as for any other.
struct GridPipelinedChoice {
  int slots = GridPipelinedShape::most_slots;  ///< at most
  /// Of the slots of the grid, those that a row which may be read twice holds at most; below 0 slices_held()
  /// decides, and slices may be parked.
  double part_held = -1;
  int most_copies = 0;  ///< 0: as for any other
  std::optional<bool> whole_rows{}, draws_early{}, collects_slice_each{};
  bool all_resident = false;  ///< whether the launch is cooperative in any case
};

struct GridPipelinedRows {
  static constexpr const char* name = "grid_pipelined_rows";

  template <class Exec, class Problem>
  static constexpr bool supports = sliced_rows_support<Exec, Problem>;

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec& exec, const Problem& problem) {
    const std::string_view layout = refuse_sliced_rows(problem);
    if (!layout.empty()) return layout;
    // Of all kernels at once: that loads them, which a capture could not do.
    if constexpr (parks_slices<Problem>) (void)limits<Problem, RingFor::parked_slices>(exec);
    if constexpr (may_keep_columns<Problem>) (void)limits<Problem, RingFor::rows_alike>(exec);
    if constexpr (GridPipelinedBlock<Problem>::parts_kernels) {
      (void)limits<Problem, RingFor::any_rows, true>(exec);
      if constexpr (may_keep_columns<Problem>) (void)limits<Problem, RingFor::rows_alike, true>(exec);
    }
    const char* refusal = limits<Problem>(exec).refusal;
    return refusal ? std::string_view(refusal) : std::string_view();
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    run_with(exec, problem, plan_of(problem));
  }

  /// What cannot be chosen is not: whole rows of which a ring has no two, early tickets of logsumexp, and
  /// slices for each lane of more than there are lanes.
  template <class Problem>
  static void run_with(const Kokkos::Cuda& exec, const Problem& problem, const ReductionPlan& plan,
                       const GridPipelinedChoice& choice = {}) {
    if constexpr (parks_slices<Problem>) {
      if (plan.reads_twice && choice.part_held < 0 && lie_alike(problem) && run_parking(exec, problem, plan))
        return;
    }
    using In = typename Problem::In;
    const CooperativeLimits& device = limits<Problem>(exec);
    const bool has_whole_lines = rows_begin_at<GridPipelinedShape::line>(problem);
    GridPipelinedShape shape = shape_of(problem, plan, has_whole_lines);
    constexpr int known_bytes = static_cast<int>(sizeof(GridPipelinedSlot<Problem>));
    // The finishers publish, too, where there is nothing to finish, unless they are without registers for it.
    shape.parties =
        groups_of_publishers<Problem, RingFor::any_rows> +
        (problem.operation == Operation::logsumexp && !GridPipelinedBlock<Problem>::holds_shares ? 1 : 0);
    shape.collectors = GridPipelinedShape::collectors_for<Problem>(plan.slices);
    const int slot_bytes = shape.slot_bytes + known_bytes;
    const int shared_bytes = device.shared_bytes - shape.bytes_staged();
    const bool is_paced =
        GridPipelinedShape::is_paced(problem, plan, exec.cuda_device(), device.multiprocessors);
    int slots = choice.slots;
    if (is_paced && slots == GridPipelinedShape::most_slots &&
        GridPipelinedShape::leaves_a_slot(problem, plan, has_whole_lines, device.multiprocessors))
      slots = GridPipelinedShape::slots_if_one_is_left;
    shape.slots = std::min({slots, shared_bytes / slot_bytes, GridPipelinedShape::most_slots});
    const auto capacity = [&] { return static_cast<index_type>(device.multiprocessors) * shape.slots; };
    const auto rereads = [&] {
      return problem.operation != Operation::logsumexp && (plan.reads_twice || plan.slices > capacity());
    };
    shape.rereads = rereads();
    if constexpr (GridPipelinedBlock<Problem>::may_drop_ends)
      shape.drops_ends = impl::drops_ends(problem.transform, problem.geometry.columns);
    if constexpr (may_keep_columns<Problem>) {
      if (keeps_columns(problem, shape, has_whole_lines, device.multiprocessors)) {
        const CooperativeLimits& kernel = limits<Problem, RingFor::rows_alike>(exec);
        shape.keeps_columns = !kernel.refusal && kernel.shared_bytes >= device.shared_bytes;
      }
    }
    stage_operands(problem, plan, shape, shared_bytes, slot_bytes);
    shape.rereads = rereads();
    constexpr bool has_transform = PartOfSlice<Problem>::has_transform;
    const bool is_held_row = (is_paced || sizeof(In) == 8 || (sizeof(In) == 2 && !has_transform)) &&
                             problem.operation != Operation::logsumexp &&
                             plan.slices > ReductionPlan::slices_at_once;
    int copies = is_held_row ? GridPipelinedShape::most_copies_of_held_rows
                             : GridPipelinedShape::most_copies_of_usual_slices;
    if (shape.rereads) {
      index_type held = GridPipelinedShape::slices_held<In>(plan.slices, capacity(), shape.operand_slots > 0);
      if (choice.part_held >= 0)
        held = std::min(plan.slices,
                        static_cast<index_type>(choice.part_held * static_cast<double>(capacity())));
      // Where these keep their operands until they are finished, there has to be room for all of them: a
      // slice that was handed out must not wait for another one of its row.
      if (shape.operand_slots > 0 && shape.operand_slots < shape.slots &&
          GridPipelinedBlock<Problem>::finishers_need_operands(problem.operation, shape))
        held = 0;
      if (held > 0) copies = GridPipelinedShape::most_copies_of_held_rows;
      shape.slices_reread = plan.slices - held;
      shape.slices_kept = GridPipelinedShape::most_bytes_kept / shape.slice_bytes<Problem>();
    }
    const bool ring_has_two = plan.slices <= shape.slots / 2;
    // So that a block has one of these rows in its ring while another one comes.
    shape.whole_rows = !shape.rereads && ring_has_two && !shape.keeps_columns &&
                       choice.whole_rows.value_or(!shape.deals_slices_of_short_rows(
                           problem, plan, has_whole_lines, is_paced, device.multiprocessors));
    copies = std::max(copies, copies * ReductionPlan::usual_slice_bytes / shape.slot_bytes);
    if (shape.whole_rows && is_paced && !shape.drops_ends) {
      const index_type bytes_a_slice =
          problem.geometry.columns * static_cast<index_type>(sizeof(In)) / plan.slices;
      copies = static_cast<int>(ceil_div(
          GridPipelinedShape::copied_bytes_of_whole_rows(has_larger_outputs<Problem>), bytes_a_slice));
    }
    if (choice.most_copies > 0) copies = choice.most_copies;
    shape.most_copies =
        std::max(1, std::min(copies, shape.slots - std::max(shape.parties, shape.collectors)));
    using Transform = typename Problem::Transform;
    shape.draws_early =
        problem.operation != Operation::logsumexp &&
        choice.draws_early.value_or(
            sizeof(In) > 2 || has_whole_lines || shape.operand_slots > 0 ||
            (shape.draws_early_anywhere<Problem>() && (is_paced || has_fast_memory(exec.cuda_device()))));
    constexpr bool only_copies =
        !has_transform || (PartOfSlice<Problem>::packed && !GridPipelinedBlock<Problem>::may_drop_ends);
    const bool is_quick =
        waits_by_warp<typename Problem::Acc> || !has_whole_lines || !only_copies ||
        (operands_of<Transform> == 0 && (sizeof(In) == 2 || plan.slices > 8 || ring_has_two));
    const bool collector_paces = is_paced && shape.collector_paces(problem, has_whole_lines);
    shape.collects_slice_each =
        plan.slices <= 32 && choice.collects_slice_each.value_or(is_quick && !collector_paces);
    shape.all_slices = problem.geometry.rows * plan.slices + (shape.rereads ? shape.slices_reread : 0);
    shape.slices_a_ticket = shape.whole_rows ? static_cast<int>(plan.slices) : 1;
    if (problem.operation == Operation::logsumexp)
      shape.slices_a_ticket = shape.slices_read_at_once<Problem>(has_whole_lines);
    const int resident = choice.all_resident
                             ? device.multiprocessors
                             : blocks_resident_together(problem, shape, device.multiprocessors);
    if (!shape.rereads) {
      const int slices = shape.operand_slots > 0 && !shape.operands_stay
                             ? std::min(shape.most_copies, shape.operand_slots)
                             : shape.most_copies;
      // (Whole ones: begin() counts on that.)
      const index_type tickets_a_block =
          shape.keeps_columns
              ? problem.geometry.rows / shape.slices_a_ticket / ceil_div(device.multiprocessors, plan.slices)
              : shape.all_slices / shape.slices_a_ticket / device.multiprocessors;
      if (shape.whole_rows || resident == device.multiprocessors)
        shape.own_tickets = static_cast<int>(
            std::min(static_cast<index_type>(slices / shape.slices_a_ticket), tickets_a_block));
      const RowGeometry& g = problem.geometry;
      shape.x_leaves_l2_first =
          problem.operation != Operation::logsumexp &&
          g.rows * g.columns * static_cast<index_type>(sizeof(In)) <= index_type(device.l2_bytes) / 4 * 3;
    }
    if constexpr (may_keep_columns<Problem>) {
      if (shape.keeps_columns) {
        launch<RingFor::rows_alike>(exec, limits<Problem, RingFor::rows_alike>(exec), problem, plan, shape,
                                    resident);
        return;
      }
    }
    launch<RingFor::any_rows>(exec, device, problem, plan, shape, resident);
  }

  template <class Exec, class Problem>
  static void reserve(const Exec& exec, const Problem& problem) {
    CudaWorkspace::reserve<typename Problem::Acc>(exec, words(problem, plan_of(problem)));
  }

 private:
  /// Where slices are parked, if all of a row's can be held so.
  template <class Problem>
  static bool run_parking(const Kokkos::Cuda& exec, const Problem& problem, const ReductionPlan& plan) {
    constexpr int parked = GridPipelinedShape::parked,
                  known_bytes = static_cast<int>(sizeof(GridPipelinedSlot<Problem>));
    const CooperativeLimits& device = limits<Problem, RingFor::parked_slices>(exec);
    // (Of a kernel without a body.)
    if (device.refusal || device.registers < GridPipelinedShape::publisher_registers) return false;
    GridPipelinedShape shape = shape_of(problem, plan, rows_begin_at<GridPipelinedShape::line>(problem));
    if (shape.slice_bytes<Problem>() > GridPipelinedShape::parked_vectors *
                                           GridPipelinedShape::finishing_threads *
                                           GridPipelinedShape::copy_alignment)
      return false;
    shape.slots = std::min((device.shared_bytes - parked * known_bytes) / (shape.slot_bytes + known_bytes),
                           GridPipelinedShape::most_slots);
    const index_type capacity = static_cast<index_type>(device.multiprocessors) * (shape.slots + parked);
    if (problem.operation == Operation::logsumexp ||
        plan.slices > GridPipelinedShape::most_slices_parked(capacity))
      return false;
    shape.parties = groups_of_publishers<Problem, RingFor::parked_slices>;
    shape.rereads = true;  // (none of its slices, as it turns out)
    shape.most_copies = GridPipelinedShape::most_copies_of_held_rows;
    shape.slices_a_ticket = 1;
    shape.all_slices = problem.geometry.rows * plan.slices;
    shape.store_cycles = GridPipelinedShape::store_cycles_of(plan.runs);
    shape.paced_tickets = shape.all_slices - capacity;
    launch<RingFor::parked_slices>(exec, device, problem, plan, shape, device.multiprocessors);
    return true;
  }

  /// How many blocks have to be resident together, so that a row is held: one where its ring has room for
  /// one, or where none is held, for then blocks wait for earlier tickets alone; two, as a cluster, where
  /// theirs have; else all, by a cooperative launch. That cannot be on its way while the kernel before it in
  /// the stream ends, as the others are. (One H200, fractions of a copy, cooperatively and so, though without
  /// own tickets of slices: bfloat16 512 x 32768 0.87 and 0.95, 2048 x 32768 0.905 and 0.93, 1024 x 65536
  /// 0.91 and 0.93, 524 x 128256 0.947 and 0.963, 450 x 151936 0.924 and 0.952, 334 x 50257 0.77 and 0.83,
  /// float 300 x 100000 0.953 and 0.968, 334 x 50257 0.926 and 0.958; of 1 GiB bfloat16 32768 columns 0.975
  /// and 0.98, 65536 0.967 and 0.974. Clusters of four, of which not all multiprocessors are: float 512 x
  /// 131072 0.949 and 0.955, 128 x 131072 0.894 and 0.906, but 2047 x 131073 0.983 and 0.975. A row each as
  /// own tickets of a block, bfloat16 1024 x 65536 0.908, or of a cluster, 450 x 151936 0.896.)
  template <class Problem>
  static int blocks_resident_together(const Problem& problem, const GridPipelinedShape& shape,
                                      int multiprocessors) {
    if (shape.keeps_columns || shape.rereads) return multiprocessors;
    if (shape.whole_rows || shape.slices <= shape.slots || problem.operation == Operation::logsumexp)
      return 1;
    return shape.slices <= 2 * shape.slots && multiprocessors % 2 == 0 ? 2 : multiprocessors;
  }

  /// What a row and its slices decide.
  template <class Problem>
  static GridPipelinedShape shape_of(const Problem& problem, const ReductionPlan& plan,
                                     bool has_whole_lines) {
    GridPipelinedShape shape{};
    shape.slices = plan.slices;
    // (Who announces runs takes as long for a slice of doubles as memory does where none is written. One
    // H200, a fraction of half a copy, logsumexp of 2 M columns with runs and without: 0.46 and 0.60.)
    const bool is_slow = waits_by_warp<typename Problem::Acc> && problem.operation == Operation::logsumexp;
    shape.runs = is_slow ? 0 : plan.runs;
    shape.slice_columns = plan.slice_columns;
    if (has_larger_outputs<Problem> && problem.operation != Operation::logsumexp) {
      constexpr int bytes_of_round =
          GridPipelinedShape::finishing_threads * GridPipelinedShape::copy_alignment;
      shape.staged_vectors = GridPipelinedShape::staged_vectors_for(
          ceil_div(plan.slice_columns * static_cast<int>(sizeof(typename Problem::Out)), bytes_of_round));
    }
    // A slice that starts within a line ends within one more.
    shape.slot_bytes = shape.slice_bytes<Problem>() + (has_whole_lines ? 0 : GridPipelinedShape::line);
    shape.x_end = problem.x + problem.geometry.last_x_offset() + problem.geometry.columns;
    return shape;
  }

  template <RingFor kind, class Problem>
  static void launch(const Kokkos::Cuda& exec, const CooperativeLimits& device, const Problem& problem,
                     const ReductionPlan& plan, GridPipelinedShape& shape, int resident) {
    shape.rows_a_slice = 1.0 / static_cast<double>(shape.slices);
    shape.tickets = ceil_div(kind == RingFor::rows_alike ? problem.geometry.rows : shape.all_slices,
                             shape.slices_a_ticket);
    const int known_bytes = GridPipelinedBlock<Problem, kind>::turn_of(shape) *
                            static_cast<int>(sizeof(GridPipelinedSlot<Problem>));
    auto* kernel = &grid_pipelined_rows_kernel<Problem, kind, false>;
    using OfBlock = GridPipelinedBlock<Problem>;
    if constexpr (OfBlock::parts_kernels) {
      if (OfBlock::keeps_differences(problem.operation, shape))
        kernel = &grid_pipelined_rows_kernel<Problem, kind, true>;
    }
    const auto shared_bytes =
        static_cast<std::size_t>(shape.bytes_of_slots() + shape.bytes_staged() + known_bytes);
    launch_labelled(exec, kernel_label(problem.operation, name), [&] {
      const auto workspace = CudaWorkspace::get<typename Problem::Acc>(exec, words(problem, plan));
      const int blocks = device.multiprocessors;
      constexpr int threads = threads_of<Problem, kind>;
      if (resident == blocks) {
        launch_cooperatively(exec, kernel, blocks, threads, shared_bytes, problem, shape, workspace);
      } else {
        launch_clusters(exec, kernel, true, static_cast<unsigned>(resident), static_cast<unsigned>(blocks),
                        threads, shared_bytes, problem, shape, workspace);
      }
    });
  }

  /// Finds out whether the operands can be staged, and where: not where they leave so few slots that copies
  /// would wait for them. (One H200, 65536 columns, fractions of a copy, staged and read where they are, one
  /// for all rows, which stays in L2: float a mask 0.95 and 0.87, a bias 0.87 and 0.82; bfloat16 0.85 and
  /// 0.83, 0.75 and 0.74.)
  template <class Problem>
  static void stage_operands(const Problem& problem, const ReductionPlan& plan, GridPipelinedShape& shape,
                             int shared_bytes, int slot_bytes) {
    if constexpr (stages_operands<Problem>) {
      int count = 0, bytes = 0;
      bool side_by_side = true, same_for_all = problem.geometry.rows > 1;
      problem.transform.visit_operands([&]<class T>(const LogitOperand<T>& operand) {
        constexpr int line = GridPipelinedShape::line;
        side_by_side = side_by_side && operand.column_stride == 1 && line % sizeof(T) == 0;
        same_for_all = same_for_all && operand.row_offset.is_none();
        if (count < most_staged_operands)
          shape.operand[count] = {operand.end(problem.geometry.columns), bytes};
        ++count;
        bytes += (shape.slice_columns * static_cast<int>(sizeof(T)) + line - 1) / line * line + line;
      });
      const bool may_stage = side_by_side && count > 0 && count <= most_staged_operands;
      shape.keeps_columns = shape.keeps_columns && may_stage && same_for_all;
      if (!may_stage) return;
      shape.operand_slot_bytes = bytes;
      const auto let_stay = [&](int operand_slots, int fewest_slots) {
        const int slots = std::min(shape.slots, (shared_bytes - operand_slots * bytes) / slot_bytes);
        if (slots <= shape.parties || slots < fewest_slots) return false;
        shape.slots = slots;
        shape.operand_slots = operand_slots;
        shape.operands_stay = true;
        return true;
      };
      // Masks may leave room for two whole rows, of which none but their block hears. (One H200, fractions of
      // a copy, so and by blocks that keep to their columns: 40001 columns of 16 bits 0.84 and 0.80.)
      constexpr bool is_mask = only_drops<typename Problem::Transform>;
      const int all = static_cast<int>(plan.slices);
      if (same_for_all && plan.slices <= GridPipelinedShape::most_slices_with_operands &&
          (is_mask || !shape.keeps_columns) && let_stay(all, shape.keeps_columns ? 2 * all : all)) {
        shape.keeps_columns = false;
        return;
      }
      shape.keeps_columns = shape.keeps_columns && let_stay(1, 1);
      if (shape.keeps_columns) return;
      if (GridPipelinedBlock<Problem>::finishers_need_operands(problem.operation, shape)) {
        // The finishers need them, too: they stay as long as their slices.
        const int slots = std::min(shape.slots, shared_bytes / (slot_bytes + bytes));
        if (slots > shape.parties) shape.operand_slots = shape.slots = slots;
      } else {
        // (One H200, fractions of a copy with two and three of these, float: a bias of 65536 columns 1.01 and
        // 0.97, of 393216 0.99 and 0.91; a mask 0.89 and 0.96, 0.89 and 0.92.)
        for (int n = 2 * bytes > slot_bytes ? 2 : 3; n > 0 && shape.operand_slots == 0; --n) {
          const int slots = std::min(shape.slots, (shared_bytes - n * bytes) / slot_bytes);
          if (slots > std::max(shape.parties, n)) {
            shape.operand_slots = n;
            shape.slots = slots;
          }
        }
      }
    }
  }

  /// Whether there is a kernel for rows that have the same operands, whose blocks keep to their columns: with
  /// one operand, on floats not with a mask, which takes them no time.
  template <class Problem>
  static constexpr bool may_keep_columns = [] {
    using Transform = typename Problem::Transform;
    constexpr std::size_t bytes = sizeof(typename Problem::In);
    return stages_operands<Problem> && !shows_operands_at_run_time<Transform> &&
           operands_of<Transform> == 1 && (bytes == 2 || (bytes == 4 && PartsOfChain<Transform>::masks == 0));
  }();

  /// Whether blocks are to keep to their columns if all rows have the same operands: where there is enough
  /// for each of them, and of such lengths that not too many do less than others. How many may depends on how
  /// long operands take otherwise. (One H200, fractions of a copy, else and so, with the part of the blocks
  /// that are as busy as any: a bias for all rows, float 393216 columns, 0.73, 0.85 and 0.82, 278528, 0.77,
  /// 0.86 and 0.87; bfloat16 786432, 0.73, 0.73 and 0.75, half 0.56 and 0.68; a mask for all rows, bfloat16
  /// 311296, 0.86, 0.85 and 0.81, 393216, 0.91, 0.855 and 0.815, 524288, 0.97, 0.81 and 0.89. Of
  /// two slices, which have a place each in every block else, a bias for all rows: float 16388 0.92 and
  /// 0.925, 18000 0.955 and 0.93, but logsumexp 0.81 and 0.93 of half a copy; bfloat16 20480 0.835 and 0.79,
  /// 24576 0.87 and 0.89, half 20001 0.565 and 0.515.)
  template <class Problem>
  static bool keeps_columns(const Problem& problem, const GridPipelinedShape& shape, bool has_whole_lines,
                            int multiprocessors) {
    constexpr bool is_float = sizeof(typename Problem::In) == 4;
    const index_type slices = shape.slices, blocks = multiprocessors;
    const int fewest = is_float && problem.operation == Operation::logsumexp ? 2 : 3;
    if (slices < fewest || slices > blocks || slices > GridPipelinedShape::most_slices_of_blocks)
      return false;
    const bool is_quick_mask = only_drops<typename Problem::Transform> && has_whole_lines;
    const int least_percent = is_quick_mask ? 92 : is_float ? 75 : 65;
    return blocks / slices * slices * 100 >= blocks * least_percent && !shape.rereads && !shape.drops_ends &&
           shape.runs == 0 && problem.geometry.rows * slices >= 8 * blocks;
  }

  /// Whether each row of x and y begins at the same place between two boundaries of bulk copies.
  template <class Problem>
  static bool lie_alike(const Problem& problem) {
    constexpr index_type alignment = GridPipelinedShape::copy_alignment;
    const RowGeometry& g = problem.geometry;
    const auto place = [&](const void* data) { return reinterpret_cast<std::uintptr_t>(data) % alignment; };
    bool all = place(problem.x) == place(problem.y);
    for (int d = 0; d < g.rank; ++d) {
      if (g.extent[d] > 1)
        all = all &&
              (g.x_stride[d] - g.y_stride[d]) * static_cast<index_type>(sizeof(*problem.x)) % alignment == 0;
    }
    return all;
  }

  template <class Problem>
  static index_type words(const Problem& problem, const ReductionPlan& plan) {
    return problem.geometry.rows * (plan.slices + plan.runs);
  }

  template <class Problem, RingFor kind = RingFor::any_rows, bool for_differences = false>
  static const CooperativeLimits& limits(const Kokkos::Cuda& exec) {
    return cooperative_limits(&grid_pipelined_rows_kernel<Problem, kind, for_differences>, exec.cuda_device(),
                              threads_of<Problem, kind>, CooperativeLimits::all_shared);
  }
};

}  // namespace KokkosSoftmax::impl

#endif
