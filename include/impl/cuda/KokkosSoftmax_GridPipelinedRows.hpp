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
///   a collector   (1 warp) waits for the words of a slot's row and joins them;
///   finishers     (8 warps) turn the slot's slice into exp(x - max) / sum, in place;
///   a storer      (1 thread) starts the bulk copy of the slot to y. When it is read, the slot is free.
/// None of them waits for a later one, so the way through L2 and the reduction of one slice are hidden behind
/// the copies of others. A row of so few slices that a block holds two such rows has one ticket for all, and
/// its slices never leave the block: the way through L2 for each would take longer than its copy.
///
/// A slice of which a causal mask keeps nothing is not read, nor reduced. Its outputs wait for the row's
/// result like others: they are NaN where that is.
///
/// Rows that fill much of the shared memory of the whole grid: finishers take their part of a slice into
/// registers, which lets its slot go, and write it to y from there once the row's result is known (parked
/// slices; the results are those of the other way). There is no storer then.
///
/// Operands of a transform whose columns lie side by side are copied along, to slots of their own behind the
/// others; those that are the same for all rows once where there are few slices, else for two rows, whose
/// slices at the same columns are one ticket. A float's transformed logit goes back to its slot, and so do
/// what a mask leaves of 16 bits, alone or among factors, and the exponential of a bfloat16's transformed
/// logit (PackedExponentials): these need their operands until a slice is reduced, others (of half, and of
/// log_softmax of bfloat16) until it is finished.
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
/// such a bias 0.71 and 0.75, 2.2 M columns with one as large as x 0.80 and 0.86, half 0.60 and 0.63. Two
/// groups of publishers that take halves of the same shares, so that operands are free sooner: with a
/// temperature 0.68 for 0.84, with a bias for all rows no better. Nor do these come sooner where each group
/// of publishers brings its own; a mask for all rows that rows of a ticket share has 0.93 for 0.95.
/// Exponentials below the maximum of a quarter of the logits, and formed once more where that is too low:
/// such a bias 0.75 for 0.73, GELU 0.76 for 0.79. Parked slices: 3 M columns of float 0.92 for 0.87, 4 M 0.90
/// for 0.80, 5 M 0.89 for 0.78, but 393216 0.94 for 0.955; two in place of three no better below 3.5 M and
/// 0.02 less above; a parked slice that changes places with the next one in its slot, from where a bulk copy
/// takes it to y, 0.01 less; fewer looks for the words of a row 0.91 to 0.94 for 2 M and up to 0.03 less for
/// others.
///
/// Why it cannot hang. Publishers wait for nothing but copies, announcers for slices of earlier tickets
/// besides: whatever slice was handed out gets published. A row lacks slices that nobody took only while no
/// slot is free, and tickets are handed out in order (those that a block has without drawing them it takes at
/// once, into empty slots), so of all rows that some block waits for, the oldest could lack one only if it
/// filled all slots of the grid itself: ruled out, since of a row at most as many slices as the grid has
/// slots are held, of rows that share operands of two together; those of a longer one that are read twice
/// come first, and hold no slot while they wait. Where slices are parked, registers are slots like others in
/// this: finishers wait for a row only when they have slices in all of theirs; and a ticket drawn before its
/// slot is free waits for the end of a slice whose row's result is there. Slices of logsumexp, of which a
/// ticket may have several, keep their slots until the collector has seen them; what it waits for are slices
/// of the same row before the last, never of a later one, so the blocks of the oldest row go on. All blocks
/// are resident (the launch is cooperative).

#ifndef KOKKOSSOFTMAX_GRIDPIPELINEDROWS_HPP
#define KOKKOSSOFTMAX_GRIDPIPELINEDROWS_HPP

#include <impl/cuda/KokkosSoftmax_HopperPtx.hpp>
#include <impl/cuda/KokkosSoftmax_PackedMask.hpp>
#include <impl/cuda/KokkosSoftmax_SlicedRows.hpp>

#include <string_view>

namespace KokkosSoftmax::impl {

/// Operands of a transform that lie in the ring beside their slice, at most; with more of them they are read
/// where they are.
inline constexpr int most_staged_operands = 2;
template <class Problem>
inline constexpr bool stages_operands = shows_operands_at_run_time<typename Problem::Transform> ||
                                        (operands_of<typename Problem::Transform> > 0 &&
                                         operands_of<typename Problem::Transform> <= most_staged_operands);

struct GridPipelinedShape {
  static constexpr int most_slots = 12;
  static constexpr int warps_of_group = ReductionPlan::shares;
  static constexpr int finishing_threads = ReductionPlan::threads;
  static constexpr int threads(int groups) { return ((groups + 1) * warps_of_group + 4) * 32; }
  static constexpr int line = 128;  ///< bytes: what lies in a line of memory lies in a line of its slot
  static constexpr int copy_alignment = 16;

  /// Copies to slots under way at once, of slices of the usual length (of shorter ones more): others would
  /// only queue before memory, and the longer a copy takes, the longer wait the other slices of its row. (Two
  /// and three on one H200, fractions of a copy: 1 GiB of float, 32768 columns 0.945 and 0.950, 131072
  /// columns 0.954 and 0.959; of bfloat16 0.925 and 0.931, 0.932 both. Without a limit 0.952 and 0.936 for
  /// float.)
  static constexpr int most_copies_of_usual_slices = 3;
  /// The same for rows that fill much of the ring of the whole grid: a slot whose copy only queues is missing
  /// elsewhere. (2 M columns of float: with three 0.941, with two 0.948; 8 M: 0.69 and 0.72. Bfloat16 2.5 M
  /// 0.912 and 0.922, 3.5 M 0.915 and 0.926, 4194304 0.912 and 0.922.)
  static constexpr int most_copies_of_held_rows = 2;

  /// Of a row that may be read twice, the slices that are held all the same: all where they leave enough of
  /// the grid's slots for the next row to come meanwhile; of a much longer row, or where operands take room,
  /// the last, as many as do; else, and of 16 bits, none: those that are read twice wait behind those that
  /// are held. (One H200, fraction of a copy, none held and 0.7 of the slots: float 5 M columns 0.77 and
  /// 0.68, 8.4 M 0.72 and 0.70, 14 M 0.69 both, 40 M 0.64 and 0.66; with a bias as large as x 5 M 0.63 and
  /// 0.73, 20 M 0.63 and 0.64. bfloat16 16.8 M 0.70 and 0.67, with a bias 9.5 M 0.59 and 0.54.)
  template <class In>
  static index_type slices_held(index_type slices, index_type capacity, bool stages_operands) {
    if (slices * 10 <= capacity * 6) return slices;
    if (sizeof(In) == 2) return 0;
    return slices * 2 >= capacity * 3 || stages_operands ? std::min(slices, capacity * 7 / 10) : 0;
  }
  /// Slices that a block's finishers have in registers, where they park them.
  static constexpr int parked = 3;
  /// Vectors of such a slice in a lane of theirs.
  static constexpr int parked_vectors = ReductionPlan::usual_slice_bytes / copy_alignment / finishing_threads;
  /// A thread's registers then: in all as many as launch bounds give to these threads.
  static constexpr int publisher_registers = 64, finisher_registers = 136, other_registers = 80;
  /// The same where publishers hold their shares; and how many parts of a share these are, and how many of
  /// them go through the transform at once. (One H200, ms of 4096 x 65536 bfloat16 with a chain that is known
  /// at run time - a factor, GELU, a bias for all rows, that and GELU. In two passes over the slot by two
  /// groups of 72 registers, which is too few for it, 0.66, 0.99, 0.98, 1.33; a share held by two warps of 88
  /// registers 0.64, 0.76, 0.87, 0.99; by one of 152, with 56 for finishers, two parts at once 0.62, 0.71,
  /// 0.93, 1.13, four 0.54, 0.66, 0.76, 0.93, all eight 0.81, 1.00, 0.89, 1.09. log_softmax, whose finishers
  /// transform once more, 0.63, 0.92, 1.20, 1.30; with these registers 0.57, 0.81, 1.11, 1.28, and softmax
  /// 0.54, 0.65, 0.81, 0.99; with 136 and 72 0.57, 0.81, 1.11, 1.56, and 0.55, 0.66, 0.82, 1.00.)
  static constexpr int holder_registers = 144, finisher_registers_beside_holders = 64,
                       other_registers_beside_holders = 64;
  static constexpr int parts_held = 8, parts_at_once = 4;
  /// Cycles of a finisher's thread from a vector that it writes to y to the next one, and before it parks a
  /// slice: a row's result is there for all blocks at once, and where they write as fast as they can, copies
  /// to slots wait for that. Of a multiprocessor's slices one takes about 4000 cycles. (One H200, fractions
  /// of a copy, without waiting, with 300 cycles and 400, and with 350 and 400: float 2.2 M columns 0.927,
  /// 0.932, 0.932, 2.5 M 0.936, 0.942, 0.943, 3 M 0.935, 0.940, 0.933, 3.5 M 0.931, 0.942, 0.937, 4194304
  /// 0.946, 0.960, 0.950, 4194303 0.923, 0.940, 0.931, 5 M 0.928, 0.933, 0.929, but 6 M 0.862, 0.845, 0.869;
  /// with 350 and 800 0.86 to 0.89.)
  static constexpr int store_cycles_of(index_type runs) { return runs > 0 ? 350 : 300; }
  static constexpr int cycles_before_parking = 400;
  /// Of such a row the slices: more would not leave enough for the next one to come meanwhile. (One H200,
  /// fractions of a copy, parked and else: of float 7 M columns 0.77 and 0.74, 8.4 M 0.75 and 0.72.)
  static constexpr index_type most_slices_parked(index_type capacity) { return capacity * 8 / 10; }

  /// Of those that are read twice, what is kept in L2 for the second time, from their end. (One H200, 4 M
  /// columns of float, all read twice: 0.76 of a copy, with nothing kept on purpose 0.70.)
  static constexpr int most_bytes_kept = 24 * 1024 * 1024;

  /// Of rows that are only read, the slices of a ticket where it would have but one: to draw it takes the
  /// producer half as long as memory takes for a slice. (One H200, GB/s of logsumexp with one, two and
  /// three: float 65536 columns 4000, 4260, 4310, 393216 4040, 4300, 4345; bfloat16 16386 3730, 3910, 3945,
  /// 65536 3770, 4110, 4165, 393216 3840, 4270, 4325.)
  static constexpr int slices_read_at_once = 3;

  /// Of rows that have the same operands, the slices at most that each have theirs in a place of their own,
  /// if as many slots are left at least. (One H200, fractions of a copy, copied with each slice and so:
  /// float, a mask for all rows 8191 columns 0.90 and 0.97, 10001 0.82 and 0.91, 32768, four slices, 0.93 and
  /// 0.95, but 50257, seven, 0.90 and 0.84; a bias for all rows 8191 0.88 and 0.98, 14001 0.83 and 0.96, of
  /// three slices and three slots 24001 0.81 and 0.83, of four and two 32768 0.84 and 0.75; bfloat16, a mask
  /// 16386 0.89 and 0.94, 20001 0.61 and 0.76, 40001 0.77 and 0.82, 65536 0.81 and 0.88, a bias 0.77 and
  /// 0.93, 0.49 and 0.62, 0.60 and 0.67, but of four slices and three slots 65536 0.74 and 0.67.)
  static constexpr index_type most_slices_with_operands = 4;

  /// Of rows that have the same operands, those whose slices at the same columns a ticket has, so that the
  /// operands are copied once for them; and the slices that a row of floats has at most then, for the more of
  /// these wait for each other, the fewer slots are left beside theirs. (One H200, fractions of a copy, a
  /// bias for all rows, one row a ticket and two: float 65536 columns 0.87 and 0.90, 131073 0.855 and 0.875,
  /// 262144 0.86 and 0.85; bfloat16 65536 0.76 and 0.85, 131073 0.635 and 0.655, 393216 0.74 and 0.825; with
  /// GELU behind it 0.79 and 0.83, 0.75 and 0.78, 0.425 and 0.47, 0.39 both. In a kernel that had both ways,
  /// and so 0.02 less, two, four and eight rows: float 65536 0.885, 0.88, 0.88, 393216 0.80, 0.59, 0.73,
  /// bfloat16 65536 0.83, 0.83, 0.84, 393216 0.81, 0.80, 0.79; with one slot for operands in place of two
  /// float 65536 0.78, 0.85, 0.885, with three 0.83 of two rows.)
  static constexpr int rows_sharing_operands = 2, most_slices_of_floats_sharing = 24;

  /// Whether the slices of rows of which a ring has two go to blocks one by one nevertheless: those of
  /// floats, and of 16 bits of more than two slices in whole lines, where there are many of them. (One H200,
  /// fractions of a copy of 1 GiB, whole rows to a block and so: float 16388 columns 0.950 and 0.958, 20480
  /// 0.948 and 0.964, 24576 0.942 and 0.949, 28672 0.944 and 0.960, bfloat16 45056 0.946 and 0.973, 49152
  /// 0.933 and 0.953, 57344 0.939 and 0.961, but 32776 0.956 and 0.941, 40002 0.957 and 0.938; microseconds
  /// in a CUDA graph, float 512 x 16388 18.9 and 20.6, 1024 x 28672 63.4 and 61.9, 2048 x 16388 70.0
  /// and 71.1.)
  template <class Problem>
  static bool deals_slices_of_short_rows(const Problem& problem, const ReductionPlan& plan,
                                         bool has_whole_lines, int multiprocessors) {
    using In = typename Problem::In;
    constexpr int fewest_slices_a_multiprocessor = 64;
    constexpr bool is_plain =
        sizeof(In) == sizeof(typename Problem::Out) && !PartOfSlice<Problem>::has_transform;
    const bool pays = sizeof(In) == 4 || (sizeof(In) == 2 && has_whole_lines && plan.slices > 2);
    return is_plain && pays && problem.operation != Operation::logsumexp &&
           problem.geometry.rows * plan.slices >=
               index_type(fewest_slices_a_multiprocessor) * multiprocessors;
  }

  index_type slices;      ///< of a row
  index_type runs;        ///< of slices, see ReductionPlan
  int slices_a_ticket;    ///< neighbours, of one row or several; of the last ticket perhaps fewer
  bool whole_rows;        ///< whether a ticket has all slices of its rows: no block has to hear of another's
  index_type all_slices;  ///< of the tickets of a launch
  index_type tickets;     ///< of a launch
  double rows_a_slice;    ///< 1 / slices
  /// A block's first, which it does not draw: the way to the counter and back comes before anything else. As
  /// many as it may have under way at once. (One H200, microseconds in a CUDA graph without and with: float
  /// 64 x 128256 21.6 and 21.0, 48 x 128256 16.7 and 15.7, 32 x 128256 12.0 and 11.4, 512 x 16385 21.4 and
  /// 20.6; with five and seven each 64 x 128256 21.8 and 22.7.)
  int own_tickets;
  /// Whether what was read of x is the first to leave L2, so that y stays there for who reads it next: where
  /// x is at most three quarters of it. (One H200, as above, without and with: float 64 x 128256 21.1
  /// and 19.7, 128 x 65536 24.2 and 22.7, bfloat16 128 x 128256 26.0 and 24.7; but float 90 x 128256 28.4
  /// and 28.6, 110 x 128256 33.1 and 33.8, bfloat16 400 x 50257 30.6 and 31.1, and 1 GiB of float 0.96 and
  /// 0.92 of a copy.)
  bool x_leaves_l2_first;
  /// Whether the transform drops ends of rows, which are not read then. (Asked here, for it takes the
  /// producer's one thread long to find each row's: one H200, fractions of a copy, 65536 columns of bfloat16
  /// with a factor and a causal mask that keeps all 0.96 and 0.92.)
  bool drops_ends;
  int store_cycles;          ///< see store_cycles_of
  index_type paced_tickets;  ///< whose slices are written so: behind the others nothing is read
  int slice_columns;
  int slots;
  int slot_bytes;
  int most_copies;  ///< to slots under way at once
  /// Groups of publishers that slots are dealt to in turn. Each sees an end of its own, and never a barrier
  /// two phases behind: what it waits for begins when copies to the slots of the turn before have long
  /// arrived.
  int parties;
  /// Whether rows may be read twice.
  bool rereads;
  /// Whether a ticket is drawn while the slot's last results are still being copied from it, which takes
  /// about as long as the way to the counter and back. (One H200, fractions of a copy, without and with: of
  /// bfloat16 65536 columns 0.963 and 0.972, 393216 0.939 and 0.956, of float 1 M 0.955 and 0.963, 2 M 0.913
  /// and 0.941. Not for 16 bits without operands where slices begin anywhere: of bfloat16 131073 columns
  /// 0.922 and 0.909, with a factor 0.803 and 0.788, but with a mask 0.814 and 0.823.)
  bool draws_early;
  /// Whether the collector's lanes have a slice each, which takes it fewer instructions, and it paces a block
  /// that has more to do for a slice than to copy it. (One H200, fractions of a copy, without and with: float
  /// 131073 columns 0.945 and 0.973; bfloat16 65536 0.943 and 0.968, with a factor 0.941 and 0.959, with a
  /// temperature 0.846 and 0.882, half 0.896 and 0.935, bfloat16 131073 with a bias as large as x 0.72 and
  /// 0.76, with one for all rows 0.49 and 0.53, 393216 0.956 and 0.970. Not for what is little more than a
  /// copy: there float had 0.969 and 0.961, and bfloat16 with a mask 0.946 and 0.928.)
  bool collects_slice_each;
  /// Where rows may be read twice: the slices of a row, its first, that are (the others stay in their slots),
  /// and those of them, the last, that are to stay in L2 until then.
  index_type slices_reread, slices_kept;
  const void* x_end;  ///< behind the last row in memory
  /// Where a transform's operands have columns side by side: slots that they are copied to, behind the
  /// others, and where in such a slot each is. They are free sooner.
  int operand_slots;
  /// Whether each slice of a row has one of these for itself, which stays: the operands are the same for all
  /// rows.
  bool operands_stay;
  int operand_slot_bytes;
  struct StagedOperand {
    const void* end;  ///< behind it in memory
    int at;
  } operand[most_staged_operands];

  KOKKOS_FORCEINLINE_FUNCTION int bytes_of_slots() const {
    return slots * slot_bytes + operand_slots * operand_slot_bytes;
  }
  /// Where the slice with this number, of those of all tickets, lies. (A division of 64 bits would take the
  /// producer's one thread longer than all else that it does.)
  __device__ void find(index_type number, index_type& position, index_type& slice) const {
    position = __double2ll_rz(static_cast<double>(number) * rows_a_slice);
    slice = number - position * slices;
    if (slice < 0) {
      --position;
      slice += slices;
    } else if (slice >= slices) {
      ++position;
      slice -= slices;
    }
  }
};

/// Whether launch bounds give a block with one group of publishers registers for so many a thread.
constexpr bool registers_suffice(int publishers, int finishers, int others) {
  constexpr int threads = GridPipelinedShape::threads(1), each = 65536 / threads / 8 * 8;
  return (publishers + finishers) * GridPipelinedShape::finishing_threads + others * 4 * 32 <= each * threads;
}
static_assert(registers_suffice(GridPipelinedShape::publisher_registers,
                                GridPipelinedShape::finisher_registers, GridPipelinedShape::other_registers));
static_assert(registers_suffice(GridPipelinedShape::holder_registers,
                                GridPipelinedShape::finisher_registers_beside_holders,
                                GridPipelinedShape::other_registers_beside_holders));

enum class SliceUse : int {
  hold,     ///< publish, and finish from the same slot
  publish,  ///< and let the slot go
  finish,   ///< what another ticket published
  end,      ///< no more slices
};

/// What the producer says of a slot.
template <class Problem>
struct SliceInSlot {
  typename Problem::Out* y;  ///< first element of the slice (logsumexp: the row's output)
  index_type row;            ///< of the logits, for the transform
  index_type position;       ///< of the row among the rows
  index_type first_column;
  int columns;
  int shift;  ///< bytes of the slot before the slice
  int operand_slot;
  // Where rows share operands:
  std::uint32_t operand_parity;  ///< of what says that they came
  int operand_releases;          ///< of each warp that needed them
  SliceUse use;
  index_type index;  ///< of the slice in its row
  bool last_of_row;
  // Where rows may drop ends:
  int kept;  ///< of its columns; behind them all are dropped
  // Where slices are parked:
  int place;         ///< the slot that it lies in
  int store_cycles;  ///< see GridPipelinedShape; 0 where nothing is waited for

  /// Bytes of y before the first boundary that a bulk copy can start at.
  __device__ int bytes_before_boundary() const {
    constexpr auto alignment = static_cast<std::uintptr_t>(GridPipelinedShape::copy_alignment);
    return static_cast<int>(-reinterpret_cast<std::uintptr_t>(y) % alignment);
  }
  /// Bytes of the slot before the outputs: they stay where the inputs were if a bulk copy can start there.
  __device__ int bytes_before_outputs() const {
    const auto in_line = static_cast<int>(reinterpret_cast<std::uintptr_t>(y) % GridPipelinedShape::line);
    return (in_line - shift) % GridPipelinedShape::copy_alignment == 0 ? shift : in_line;
  }
};

/// Bytes before an address in its line.
__device__ inline int place_in_line(const void* address) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(address) % GridPipelinedShape::line);
}

/// What lies between two addresses, from the boundary of 16 bytes before it to the one after it, to the same
/// place of a line: copies whose lines lie across two are slower. What follows `readable_end` may not be
/// memory of anyone: there the copy ends at the boundary before, and ordinary loads bring the rest.
template <class T>
struct BulkCopy {
  static constexpr std::uintptr_t alignment = GridPipelinedShape::copy_alignment;
  const T *first, *last;
  std::uintptr_t begin, end;
  char* to;

  __device__ BulkCopy(const T* first_, const T* last_, const void* readable_end, char* slot)
      : first(first_), last(last_) {
    begin = reinterpret_cast<std::uintptr_t>(first) / alignment * alignment;
    end = (reinterpret_cast<std::uintptr_t>(last) + alignment - 1) / alignment * alignment;
    if (end > reinterpret_cast<std::uintptr_t>(readable_end))
      end = reinterpret_cast<std::uintptr_t>(last) / alignment * alignment;
    to = slot + place_in_line(reinterpret_cast<const void*>(begin));
  }
  /// Bytes of the slot before what was asked for.
  __device__ int shift() const { return place_in_line(first); }
  __device__ std::uint32_t bytes() const { return end > begin ? static_cast<std::uint32_t>(end - begin) : 0; }
  template <class... Policy>
  __device__ void start(Mbarrier* barrier, Policy... policy) const {
    if (bytes() > 0) cp_async_bulk(to, reinterpret_cast<const void*>(begin), bytes(), barrier, policy...);
  }
  /// Before the barrier of the copy is arrived at.
  __device__ void load_rest() const {
    const auto behind = reinterpret_cast<const T*>(end);
    for (const T* p = behind < first ? first : behind; p < last; ++p)
      *reinterpret_cast<T*>(to + (reinterpret_cast<std::uintptr_t>(p) - begin)) = *p;
  }
};

/// A row's operand in the ring, as LogitOperand::Row has it in memory.
template <class T>
struct StagedColumns {
  const T* data;
  __device__ const T& operator()(index_type column) const { return data[column]; }
  template <int width>
  __device__ bool has_neighbours(index_type first) const {
    return reinterpret_cast<std::uintptr_t>(data + first) % bytes_of_neighbours<width, T> == 0;
  }
};

/// Until clock_cycles() is there, or past it by less than 2^31.
__device__ __forceinline__ void wait_until_cycle(unsigned cycle) {
  while (static_cast<int>(clock_cycles() - cycle) < 0) {
  }
}

/// Turns a slice in its slot into its outputs. Which lane does what moves no bits. Outputs as large as the
/// inputs stay in the slot, but for the few before the first boundary of y and behind the last, which go to
/// y; others go to y all.
template <class Problem>
struct SliceWriter {
  using In = typename Problem::In;
  using Out = typename Problem::Out;
  using Acc = typename Problem::Acc;
  using Result = SlicedRowResult<Problem>;
  using Part = PartOfSlice<Problem>;
  static constexpr bool through_slot = sizeof(In) == sizeof(Out);
  static constexpr int threads = GridPipelinedShape::finishing_threads;
  static constexpr int larger_scalar = sizeof(In) > sizeof(Out) ? sizeof(In) : sizeof(Out);
  static constexpr int width = GridPipelinedShape::copy_alignment / larger_scalar;  ///< elements of a vector
  static constexpr int unit = Part::unit;
  /// (In words: the compiler gives each half or bfloat16 a register.)
  struct alignas(width * sizeof(In)) InVector {
    unsigned word[width * sizeof(In) / 4];
    template <class Pair>
    __device__ Acc element(int i) const {
      if constexpr (sizeof(In) == 2) {
        return i % 2 ? Pair::high(word[i / 2]) : Pair::low(word[i / 2]);
      } else {
        In e[width];
        memcpy(e, word, sizeof(e));
        return load_as<Acc>(e[i]);
      }
    }
  };
  struct alignas(width * sizeof(Out)) OutVector {
    Out e[width];
  };

  /// What a pair of 16 bits in the slot holds.
  using Logits = PackedPair<In>;
  using Exponentials =
      std::conditional_t<Result::keeps_packed_exponentials, PackedExponentials, PackedPair<In>>;

  const SliceInSlot<Problem>& slice;
  char* slot;
  int warp, lane;
  const Result& row;

  /// From the exponentials in the slot, or from the logits where these are not kept. `release` is called once
  /// this warp is done with the slot.
  template <class Release>
  __device__ void scale_exponentials(const PartialSoftmax<Acc>* of_share, const Release& release) const {
    // A lane's vectors lie at the same place of each round of the shares, in one share or across two.
    const int first = head() + thread() * width;
    const int of_first_share =
        static_cast<int>(Part::columns_together - static_cast<unsigned>(first) % Part::columns_together);
    const Acc first_factor = row.factor_of_share(of_share[Part::share_of(first)].max);
    Acc last_factor = first_factor;
    if (of_first_share < width)
      last_factor = row.factor_of_share(of_share[Part::share_of(first + width - 1)].max);
    Acc factor[width];
#pragma unroll
    for (int j = 0; j < width; ++j) factor[j] = j < of_first_share ? first_factor : last_factor;
    const auto scaled_by_share = [&](int column, Acc held) {
      return held * row.factor_of_share(of_share[Part::share_of(column)].max);
    };
    write<Exponentials>(
        [&](int, Acc(&value)[width]) {
#pragma unroll
          for (int j = 0; j < width; ++j) value[j] *= factor[j];
        },
        scaled_by_share,
        [&](int column) {
          // A unit that starts at an odd column may end in the next share.
          const Acc first_factor = row.factor_of_share(of_share[Part::share_of(column)].max);
          const Acc last_factor = row.factor_of_share(of_share[Part::share_of(column + unit - 1)].max);
          return
              [=](int c, Acc held) { return held * ((c - column) % unit == 0 ? first_factor : last_factor); };
        },
        release);
  }

  template <class TransformRow, class Release>
  __device__ void from_inputs(const TransformRow& transform, const Release& release) const {
    const index_type first_column = slice.first_column;  // the slot may have a new slice before the last use
    if constexpr (transforms_held_logits<TransformRow>) {
      // Once for all operations: it is long.
      const auto output = [&](int column, Acc held) {
        Acc value = transformed<Acc>(transform, held, first_column + column);
        row.with_output([&](const auto& output_of) { value = output_of(value); });
        return value;
      };
      write<Logits>(
          [&]<int count>(int column, Acc(&value)[count]) {
            transform.template transform_held<width>(value,
                                                     HeldNeighbours{first_column + column, threads * width});
            row.with_output([&](const auto& output_of) {
#pragma unroll
              for (Acc& v : value) v = output_of(v);
            });
          },
          output, [&](int) { return output; }, release);
    } else {
      row.with_output([&](const auto& output_of) {
        const auto output = [&](int column, Acc held) {
          return output_of(transformed<Acc>(transform, held, first_column + column));
        };
        const auto write_with = [&](const auto& transform_vector) {
          write<Logits>(
              [&](int column, Acc(&value)[width]) {
                transform_vector(value, first_column + column);
#pragma unroll
                for (int j = 0; j < width; ++j) value[j] = output_of(value[j]);
              },
              output, [&](int) { return output; }, release);
        };
        if (stage_takes_neighbours<width>(transform, first_column + head())) {
          write_with([&](Acc(&value)[width], index_type first) {
            transform_neighbours<width>(transform, value, first);
          });
        } else {
          write_with([&](Acc(&value)[width], index_type first) {
#pragma unroll
            for (int j = 0; j < width; ++j) value[j] = transformed<Acc>(transform, value[j], first + j);
          });
        }
      });
    }
  }

  /// What a lane keeps of a slice, as it is in the slot.
  struct Parked {
    InVector vector[GridPipelinedShape::parked_vectors];
    Acc end;
  };
  __device__ __forceinline__ void park(Parked& parked) const {
    const int first = head();
    const int vectors = (slice.columns - first) / width;
    const InVector* const from = reinterpret_cast<const InVector*>(x() + first) + thread();
#pragma unroll
    for (int i = 0; i < GridPipelinedShape::parked_vectors; ++i) {
      if (thread() + i * threads < vectors) parked.vector[i] = from[i * threads];
    }
    parked.end = end_of<Logits>(first, first + vectors * width, [](int, Acc held) { return held; }).value;
  }

  /// Writes a parked slice of x and y that lie alike, each thread a vector in so many cycles.
  __device__ __forceinline__ void from_parked(const Parked& parked, int store_cycles) const {
    unsigned next_store = clock_cycles();
    const int first = head();
    const int vectors = (slice.columns - first) / width;
    const End end = end_at(first, first + vectors * width);
    OutVector* const to = reinterpret_cast<OutVector*>(slice.y + first) + thread();
    const int left = vectors - thread();
    row.with_output([&](const auto& output_of) {
      if (end.exists) slice.y[end.column] = store_as<Out>(output_of(parked.end));
#pragma unroll
      for (int i = 0; i < GridPipelinedShape::parked_vectors; ++i) {
        Acc value[width];
#pragma unroll
        for (int j = 0; j < width; ++j) value[j] = output_of(parked.vector[i].template element<Logits>(j));
        if (i * threads < left) store_streaming(to + i * threads, rounded<OutVector>(value));
        next_store += static_cast<unsigned>(store_cycles);
        wait_until_cycle(next_store);
      }
    });
  }

  /// Of logits that are all dropped, whatever is in the slot.
  template <class Release>
  __device__ void of_dropped(const Release& release) const {
    Acc output = 0;
    row.with_output([&](const auto& output_of) { output = output_of(-infinity_v<Acc>); });
    constexpr int width = GridPipelinedShape::copy_alignment / static_cast<int>(sizeof(Out));
    struct alignas(GridPipelinedShape::copy_alignment) Vector {
      Out e[width];
    } vector;
#pragma unroll
    for (Out& e : vector.e) e = store_as<Out>(output);
    // As a bulk copy takes them; the others go to y.
    const int first =
        through_slot ? min(slice.bytes_before_boundary() / static_cast<int>(sizeof(Out)), slice.columns) : 0;
    const int vectors = through_slot ? (slice.columns - first) / width : 0;
    auto* const to = reinterpret_cast<Vector*>(slot + slice.bytes_before_outputs() +
                                               first * static_cast<int>(sizeof(Out)));
    for (int i = thread(); i < vectors; i += threads) to[i] = vector;
    for (int c = thread(); c < slice.columns - vectors * width; c += threads)
      slice.y[c < first ? c : c + vectors * width] = vector.e[0];
    release();
  }

  /// From transformed logits in the slot.
  template <class Release>
  __device__ void from_logits(const Release& release) const {
    from_inputs(BoundIdentity::Row{}, release);
  }

 private:
  __device__ int thread() const {
    return warp * 32 + lane;
  }
  __device__ int x_phase() const {
    return static_cast<int>(static_cast<unsigned>(slice.shift) / sizeof(In) % width);
  }
  __device__ int y_phase() const {
    return static_cast<int>(reinterpret_cast<std::uintptr_t>(slice.y) / sizeof(Out) % width);
  }
  __device__ int head() const {
    return min((width - x_phase()) % width, slice.columns);
  }
  __device__ In* x() const {
    return reinterpret_cast<In*>(slot + slice.shift);
  }

  template <class Pair>
  __device__ static Acc element_of(const In& held) {
    if constexpr (sizeof(In) == 2) return Pair::low(bits_as<unsigned short>(held));
    return load_as<Acc>(held);
  }

  /// The elements before `first` and those from `last` on, fewer than a vector each: lanes of the first warp
  /// have the one, of the second the other.
  struct End {
    bool exists;
    int column;
    Acc value;
  };
  __device__ End end_at(int first, int last) const {
    End end{false, warp == 0 ? lane : last + lane, 0};
    end.exists = warp == 0 ? lane < first : warp == 1 && end.column < slice.columns;
    return end;
  }
  template <class Pair, class ScalarOutput>
  __device__ End end_of(int first, int last, const ScalarOutput& scalar_output) const {
    End end = end_at(first, last);
    if (end.exists) end.value = scalar_output(end.column, element_of<Pair>(x()[end.column]));
    return end;
  }

  /// `output_of_unit(column)` gives the function for elements of the unit there and those a multiple of a
  /// round of the shares from it.
  template <class Pair, class VectorOutput, class ScalarOutput, class OutputOfUnit, class Release>
  __device__ void write(const VectorOutput& vector_output, const ScalarOutput& scalar_output,
                        const OutputOfUnit& output_of_unit, const Release& release) const {
    if (x_phase() == y_phase()) {
      write_vectors<Pair>(vector_output, scalar_output, release);
    } else {
      write_units<Pair>(output_of_unit, scalar_output, release);
    }
  }

  template <class Pair, class VectorOutput, class ScalarOutput, class Release>
  __device__ void write_vectors(const VectorOutput& vector_output, const ScalarOutput& scalar_output,
                                const Release& release) const {
    const int first = head();
    const int vectors = (slice.columns - first) / width;
    const End end = end_of<Pair>(first, first + vectors * width, scalar_output);
    if (end.exists) slice.y[end.column] = store_as<Out>(end.value);
    InVector* const from = reinterpret_cast<InVector*>(x() + first);
    OutVector* const to =
        through_slot ? reinterpret_cast<OutVector*>(from) : reinterpret_cast<OutVector*>(slice.y + first);
    // (What takes several vectors looks up what to do once for all of them.)
    const auto out_of = [&]<int count>(int at, const InVector(&held)[count]) {
      Acc value[count * width];
#pragma unroll
      for (int j = 0; j < count * width; ++j) value[j] = held[j / width].template element<Pair>(j % width);
      vector_output(first + at * width, value);
#pragma unroll
      for (int i = 0; i < count; ++i) {
        Acc of_vector[width];
#pragma unroll
        for (int j = 0; j < width; ++j) of_vector[j] = value[i * width + j];
        const OutVector out = rounded<OutVector>(of_vector);
        if constexpr (through_slot) {
          to[at + i * threads] = out;
        } else {
          store_streaming(to + at + i * threads, out);
        }
      }
    };
    constexpr int at_once = Part::unit == 2 && Part::has_transform ? 2 : 4;
    constexpr int together = std::is_invocable_v<VectorOutput, int, Acc(&)[at_once * width]> ? at_once : 1;
    int at = thread();
#pragma unroll 1
    for (; at + (at_once - 1) * threads < vectors; at += at_once * threads) {
      InVector held[at_once / together][together];
#pragma unroll
      for (int i = 0; i < at_once; ++i) held[i / together][i % together] = from[at + i * threads];
#pragma unroll
      for (int i = 0; i < at_once; i += together) out_of(at + i * threads, held[i / together]);
    }
    InVector held[at_once - 1][1];
#pragma unroll
    for (int i = 0; i < at_once - 1; ++i) {
      if (at + i * threads < vectors) held[i][0] = from[at + i * threads];
    }
#pragma unroll
    for (int i = 0; i < at_once - 1; ++i) {
      if (at + i * threads < vectors) out_of(at + i * threads, held[i]);
    }
    release();
  }

  /// Where x and y lie differently.
  template <class Pair, class OutputOfUnit, class ScalarOutput, class Release>
  __device__ void write_units(const OutputOfUnit& output_of_unit, const ScalarOutput& scalar_output,
                              const Release& release) const {
    if constexpr (!through_slot) {
      const auto& output = output_of_unit(thread());
      const In* const from = x();
#pragma unroll 4
      for (int c = thread(); c < slice.columns; c += threads)
        slice.y[c] = store_as<Out>(output(c, element_of<Pair>(from[c])));
    } else {
      const int first = min(slice.bytes_before_boundary() / static_cast<int>(sizeof(Out)), slice.columns);
      const int units = (slice.columns - first) / width * width / unit;
      const End end = end_of<Pair>(first, first + units * unit, scalar_output);
      if (end.exists) slice.y[end.column] = store_as<Out>(end.value);
      if (units > 0) move_units<Pair>(first, units, output_of_unit(first + thread() * unit));
    }
    release();
  }

  /// Writes what a bulk copy can take to y to its place in the slot. Some units of a thread at once are read
  /// before any of these is written, and in the order in which none is written to the place of one that is
  /// still to be read.
  template <class Pair, class Output>
  __device__ void move_units(int first, int units, const Output& output) const {
    constexpr int steps = 8;
    struct alignas(unit * sizeof(Out)) OutUnit {
      Out e[unit];
    };
    const int place = slice.bytes_before_outputs();
    const bool moves_up = place > slice.shift;
    const In* const from = x() + first;
    OutUnit* const to = reinterpret_cast<OutUnit*>(slot + place + first * static_cast<int>(sizeof(Out)));
    const int turns = (units + steps * threads - 1) / (steps * threads);
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      const int begin = (moves_up ? turns - 1 - turn : turn) * steps * threads + thread();
      In held[steps][unit];
#pragma unroll
      for (int i = 0; i < steps; ++i) {
#pragma unroll
        for (int j = 0; j < unit; ++j) held[i][j] = from[min(begin + i * threads, units - 1) * unit + j];
      }
      barrier_sync(1, threads);
#pragma unroll
      for (int i = 0; i < steps; ++i) {
        const int at = min(begin + i * threads, units - 1);
        Acc out[unit];
#pragma unroll
        for (int j = 0; j < unit; ++j) out[j] = output(first + at * unit + j, element_of<Pair>(held[i][j]));
        if (begin + i * threads < units) to[at] = rounded<OutUnit>(out);
      }
    }
  }

  template <class OutVectorOrUnit, int count>
  __device__ static OutVectorOrUnit rounded(const Acc (&value)[count]) {
    OutVectorOrUnit out;
    if constexpr (is_16_bit_v<Out> && std::is_same_v<Acc, float> && count % 2 == 0) {
      unsigned words[count / 2];
#pragma unroll
      for (int i = 0; i < count; i += 2) words[i / 2] = rounded_pair<Out>(value[i], value[i + 1]);
      memcpy(&out, words, sizeof(out));
    } else {
#pragma unroll
      for (int i = 0; i < count; ++i) out.e[i] = store_as<Out>(value[i]);
    }
    return out;
  }
};

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
  Mbarrier operands_came;  ///< to the slot of operands with this number, where rows share them
  SliceInSlot<Problem> slice;
  PartialSoftmax<Acc> of_warp[GridPipelinedShape::warps_of_group];
  SlicedRowResult<Problem> of_row;
};

/// A kernel of its own for each, for what its one producer's thread does not do it need not ask.
enum class RingFor : int {
  any_rows,
  parked_slices,   ///< that wait in the finishers' registers
  shared_operands  ///< two rows a ticket, which share operands
};

/// What a block does. Publishers and finishers are in line, lambdas too where many kernels share a
/// translation unit: behind a call the compiler no longer knows that a slot is shared memory. (One H200,
/// 65536 columns of bfloat16 with one bias for all rows: 0.46 of a copy of all bytes for 0.65.)
template <class Problem, RingFor kind = RingFor::any_rows>
struct GridPipelinedBlock {
  static constexpr bool parks = kind == RingFor::parked_slices, shares = kind == RingFor::shared_operands;
  using In = typename Problem::In;
  using Out = typename Problem::Out;
  using Acc = typename Problem::Acc;
  using Part = PartOfSlice<Problem>;
  using Transform = typename Problem::Transform;
  /// The exponentials go back to the slot where they fit, so that a finisher only scales them.
  static constexpr bool has_exponentials = SlicedRowResult<Problem>::keeps_exponentials;
  /// Whether rows may have an end of which nothing is kept: it is not read.
  static constexpr bool may_drop_ends = knows_end_of_kept<typename Problem::Transform::Row>;
  /// So do the transformed logits, so that a transform and its operands are used once.
  static constexpr bool has_logits = Part::has_transform && (std::is_same_v<In, Acc> || Part::packed);
  /// Of pairs of 16 bits that become floats, a mask among factors, temperatures and ends: what it drops
  /// becomes -inf in the slot while its logits are still pairs, and stays that, whatever is done to it.
  static constexpr bool masks_in_slot = Part::unpacked && is_masked_product<Transform>;
  static constexpr int warps_of_group = GridPipelinedShape::warps_of_group;
  /// Whether a publisher has all logits of its share in registers, so that a transform that is long is gone
  /// through once.
  static constexpr bool holds_shares = Part::unpacked && transforms_held_logits<typename Transform::Row>;

  const Problem& problem;
  const GridPipelinedShape& shape;
  const CudaWorkspace& workspace;
  GridPipelinedSlot<Problem>* ring;
  char* slots;
  std::uint32_t epoch;
  int lane;

  /// Whether publishers write to the slot what outputs are made of.
  __host__ __device__ static bool writes_back(Operation operation, const GridPipelinedShape& shape) {
    return has_logits || keeps_exponentials(operation, shape);
  }
  /// (Slices of a row all get to their outputs in the same way, so not where some are read twice.)
  __host__ __device__ static bool keeps_exponentials(Operation operation, const GridPipelinedShape& shape) {
    return has_exponentials && operation == Operation::softmax && !shape.rereads;
  }
  __device__ bool writes_rows() const { return problem.operation != Operation::logsumexp; }
  __device__ std::uint32_t tag() const { return CudaWorkspace::tag_of(epoch); }
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
  __device__ bool operands_stay() const {
    if constexpr (stages_operands<Problem> && !shares) return shape.operands_stay;
    return false;
  }
  __device__ bool operands_take_turns() const {
    return shares || (shape.operand_slots > 0 && !operands_stay());
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
    if constexpr (shares) {
      shape.find(ticket, position, slice);
      position *= GridPipelinedShape::rows_sharing_operands;
      return position + 1 < problem.geometry.rows ? GridPipelinedShape::rows_sharing_operands : 1;
    }
    const index_type first = ticket * shape.slices_a_ticket;
    shape.find(first, position, slice);
    return static_cast<int>(min(static_cast<index_type>(shape.slices_a_ticket), shape.all_slices - first));
  }
  __device__ void next_slice(index_type& position, index_type& slice) const {
    if constexpr (shares) {
      ++position;
    } else if (++slice == shape.slices) {
      slice = 0;
      ++position;
    }
  }

  /// The thread that produces, ahead of that: fills the first slots with its own tickets.
  __device__ void begin() const {
    if (operands_stay()) copy_operands_that_stay();
    RingCursor at{0, 1};
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

  __device__ index_type draw_ticket() const {
    return static_cast<index_type>(shape.own_tickets) * gridDim.x +
           static_cast<index_type>(atomicAdd(&workspace.header->next_ticket, 1ull));
  }

  /// One thread.
  __device__ void produce() const {
    const bool rereads = !shares && shape.rereads;
    RingCursor at{0, 1}, operands{0, 1}, copied;
    int copies = shape.own_tickets * shape.slices_a_ticket;  // under way
    at.advance(turn(), copies);
    if (shape.operand_slots > 0) operands.advance(shape.operand_slots, copies);
    index_type position = 0, slice = 0;
    int left = 0;  // slices of the ticket
    bool is_new_ticket = true;
    SliceUse use = usual_use();
    for (;;) {
      GridPipelinedSlot<Problem>& next = ring[at.slot];
      mbarrier_wait_parity(shape.draws_early ? &next.written : &next.empty, at.parity);
      if (copies == shape.most_copies) {
        mbarrier_wait_parity(&ring[copied.slot].full, copied.parity);
        copied.advance(turn());
        --copies;
      }
      if (left == 0) {
        const index_type ticket = draw_ticket();
        if (ticket >= shape.tickets) {
          end(ticket, at);
          return;
        }
        left = begin_ticket(ticket, position, slice);
        is_new_ticket = true;
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
      const bool brings_operands = operands_take_turns() && (!shares || is_new_ticket);
      if (brings_operands) mbarrier_wait_parity(&ring[operands.slot].operands_used, operands.parity);
      if constexpr (shares) {
        next.slice.operand_parity = operands.parity ^ 1;
        // (A last row that is alone releases its operands for the other one, too.)
        next.slice.operand_releases = is_new_ticket && left == 1 ? 2 : 1;
      }
      fill(at, operands_stay() ? static_cast<int>(slice) : operands.slot, position, slice, use, to_end,
           brings_operands);
      is_new_ticket = false;
      if (operands_take_turns() && (!shares || left == 1)) operands.advance(shape.operand_slots);
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
      if (copies == shape.most_copies) {
        mbarrier_wait_parity(&ring[copied.slot].full, copied.parity);
        copied.advance(turn());
        --copies;
      }
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

  /// Every block draws one ticket that is none; who draws the last one leaves all ready for the next launch.
  /// That may be on its way meanwhile. (One H200, in a CUDA graph: 64 rows of 128256 floats in 22.2 us, and
  /// in 21.7 so, 32 in 13.0 and 12.2.)
  __device__ void end(index_type ticket, RingCursor at) const {
    grid_launch_dependents();
    if (ticket == shape.tickets + gridDim.x - 1) {
      workspace.header->next_ticket = 0;
      workspace.end_launch(epoch);
    }
    for (int party = 0; party < shape.parties; ++party) {
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
    in.last_of_row = slice == shape.slices - 1;
    in.operand_slot = operands;
    if constexpr (may_drop_ends) in.kept = min(in.columns, to_end);
    const BulkCopy<In> slice_copy(x, x + kept(in), shape.x_end, slot_of(at));
    in.shift = slice_copy.shift();
    const std::uint32_t bytes = slice_copy.bytes();
    slice_copy.load_rest();
    Mbarrier* const full = &ring[at.slot].full;
    Mbarrier* const operands_came = shares ? &ring[operands].operands_came : full;
    std::uint32_t operand_bytes = 0;
    if (brings_operands) {
      with_copies(in.row, operands, first, kept(in), [&](const auto& copy) {
        operand_bytes += copy.bytes();
        copy.load_rest();
      });
      if constexpr (shares) mbarrier_arrive_expect_tx(operands_came, operand_bytes);
    }
    mbarrier_arrive_expect_tx(full, shares ? bytes : bytes + operand_bytes);
    if constexpr (parks) {
      slice_copy.start(full, createpolicy_evict_first());
    } else if (!shape.rereads && !shape.x_leaves_l2_first) {
      slice_copy.start(full);
    } else {
      const bool keeps = use == SliceUse::publish && slice >= shape.slices_reread - shape.slices_kept;
      slice_copy.start(full, keeps ? createpolicy_evict_last() : createpolicy_evict_first());
    }
    if (brings_operands)
      with_copies(in.row, operands, first, kept(in), [&](const auto& copy) { copy.start(operands_came); });
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
      for (int slice = 0; slice < shape.operand_slots; ++slice) {
        const index_type first = slice * static_cast<index_type>(shape.slice_columns);
        with_copies(0, slice, first,
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

  /// One warp. What it takes for a slice, one way to the words and back through L2 and what has to be done
  /// then, is waited for by all, slice after slice: it paces the block, at about the speed of memory. (One
  /// H200, 65536 columns of float: a slice in 2.03 us, of which the collector 1.79, 0.969 of a copy; with a
  /// chain of instructions longer by four words that are not there 0.88. But two collectors that take turns
  /// made it 0.92, loads for the next slice under way before this one's are joined 0.957: reads that come as
  /// they can get in the way of each other and of the writes. Words that were asked for before they are there
  /// cost a way each: with 8 and 16 at once 4 M columns have 0.69 and 0.60 for 0.81, with one asked for as
  /// soon as one is used 0.63. No difference: a warp before all others in place of one behind them.)
  __device__ void collect() const {
    index_type have = -1;
    SlicedRowResult<Problem> result{};
    for (RingCursor at;; at.advance(turn())) {
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
      const bool last = in.last_of_row;
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&ring[at.slot].empty);
      if (use == SliceUse::publish && (!last || writes_rows())) {
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
    if (shape.collects_slice_each) return collect_slice_each(words_of(position), shape.slices, tag(), lane);
    if (shape.runs > 0)
      return collect_slices<true>(words_of(position), shape.slices, tag(), lane, run_words_of(position),
                                  shape.runs);
    return collect_slices<false>(words_of(position), shape.slices, tag(), lane);
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
    if (slice < slices) total = join_shares<Acc>([&](int share) { return held.of_warp[share]; });
    const SlicedRowResult<Problem> result(problem.operation, join_lanes_of_slices(total, slices));
    if (lane >= slices) return;
    held.of_row = result;
    if (lane == 0 && !writes_rows()) *held.slice.y = store_as<Out>(result.logsumexp());
    mbarrier_arrive(&held.empty);
    let_finish(held);
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
  /// each step, of 16 bits a pair. `single`: not in pairs, for these lie across words.
  template <bool whole, class ValueOf>
  __device__ __forceinline__ static void write_part(In* part, int left, bool single,
                                                    const ValueOf& value_of) {
#pragma unroll
    for (int i = 0; i < Part::steps; ++i) {
      const int column = i * Part::stride;
      if constexpr (Part::unit == 1) {
        if (whole || column < left) part[column] = value_of(i);
      } else if (!single && (whole || column + 1 < left)) {
        *reinterpret_cast<unsigned*>(part + column) = value_of(i);
      } else {
        // (A half or bfloat16 would be taken apart into its bytes.)
        auto* const to = reinterpret_cast<unsigned short*>(part + column);
        const unsigned pair = value_of(i);
        if (whole || column < left) to[0] = static_cast<unsigned short>(pair);
        if (whole || column + 1 < left) to[1] = static_cast<unsigned short>(pair >> 16);
      }
    }
  }

  /// The (max, sum) of a warp's share. Two loops over the slot, not unrolled to its end: instructions that
  /// are not at hand are waited for. `mask`: what is applied in the slot before `transform`, or nothing.
  template <bool single, class TransformRow, class Mask>
  __device__ __forceinline__ PartialSoftmax<Acc> reduce_in_slot(const SliceInSlot<Problem>& in, In* slice,
                                                                int warp, const TransformRow& transform,
                                                                const Mask& mask) const {
    const int columns = in.columns;
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
    // 0.943 and 0.955; but a bias for all rows 0.849 and 0.841, GELU the same.)
    const auto in_parts_of = [&]<class SomePart>(std::type_identity<SomePart>, const auto& transform_row,
                                                 bool looks_for_minus_infinity, const auto& use) {
      constexpr bool is_identity = std::is_same_v<decltype(transform_row), const BoundIdentity::Row&>;
      constexpr bool is_mask = !is_identity && only_drops<typename Problem::Transform>;
      // (One that takes parts at once looks up what to do for all of them.)
      constexpr bool is_held = transforms_held_logits<std::remove_cvref_t<decltype(transform_row)>>;
      constexpr int at_once = sizeof(Acc) == 8 ? 2 : Part::unit == 2 && !is_identity ? 1 : is_mask ? 2 : 4;
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
    const auto maximum_of_results = [&] {
      auto maximum = Part::Maximum::none();
      in_parts(transform, looks_for_minus_infinity, [&](const Part& part, int begin, auto whole) {
        maximum.join(part);
        if constexpr (has_logits) write(begin, whole, [&](int i) { return part.held[i]; });
      });
      return maximum.of_warp();
    };
    const auto find_maximum = [&] {
      if constexpr (Part::adds_pairs && !single) {
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
      Acc max_of_logits = 0;
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
          if (max > -largest_v<Acc> && max <= largest_v<Acc> &&
              transform.finds_maximum(max, in.first_column, end))
            return maximum_or_nan(max, -largest_v<Acc>);
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
    [[maybe_unused]] const bool writes_exponentials =
        in.use == SliceUse::hold && keeps_exponentials(problem.operation, shape);
    auto sum = ShareSum<Acc>::none();
    const auto add = [&](const Part& part, int begin, auto whole) {
      Acc e[Part::count];
      part.template add_to<Part::packed || Part::unpacked>(sum, exponential,
                                                           [&](int i, Acc value) { e[i] = value; });
      if constexpr (has_exponentials) {
        if (!writes_exponentials) return;
        write(begin, whole, [&](int i) {
          if constexpr (Part::unpacked) {
            return PackedExponentials::of(e[2 * i], e[2 * i + 1]);
          } else {
            return e[i];
          }
        });
      }
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
      // that is not. (Not for half: one H200, 65536 columns with a temperature, 0.76 of a copy for 0.78.)
      if (has_exponentials && !exponential.subtracts_first()) {
        add_parts(add);
      } else {
        add_parts(subtract_and_add);
      }
    } else {
      add_parts(add);
    }
    return Part::share(max, sum.of_warp());
  }

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
    constexpr int columns_at_once = at_once * Part::columns, ninth = turns * columns_at_once;
    const auto load = [&]<bool whole, int parts>(std::bool_constant<whole>, Part(&part)[parts], int begin) {
      Part::template load_at_once<whole, true>(part, from + begin, left - begin, single, transform,
                                               first_column + begin);
    };

    auto maximum = Part::Maximum::none();
    if (to_end > ninth) {
      Part part[1];
      load(std::false_type{}, part, ninth);
      maximum.join(part[0]);
    }
    Part held[turns][at_once];
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      // Registers have no index: what came before makes room at the front.
#pragma unroll
      for (int i = turns - 1; i > 0; --i) {
#pragma unroll
        for (int k = 0; k < at_once; ++k) held[i][k] = held[i - 1][k];
      }
      const int begin = turn * columns_at_once;
      if (begin >= to_end) {
#pragma unroll
        for (Part& part : held[0]) {
#pragma unroll
          for (Acc& logit : part.held) logit = -infinity_v<Acc>;
        }
      } else if (begin + columns_at_once <= in.columns) {
        load(std::true_type{}, held[0], begin);
      } else {
        load(std::false_type{}, held[0], begin);
      }
#pragma unroll
      for (const Part& part : held[0]) maximum.join(part);
    }
    const Acc max = maximum.of_warp();

    const auto exponential = Part::exponential_below(max);
    const bool writes_exponentials =
        has_exponentials && in.use == SliceUse::hold && keeps_exponentials(problem.operation, shape);
    auto sum = ShareSum<Acc>::none();
    const auto add = [&](Part& part, int begin) {
      if (exponential.subtracts_first()) part.subtract(exponential.subtracted);
      Acc e[Part::count];
      part.template add_to<true>(sum, exponential, [&](int i, Acc value) { e[i] = value; });
      if constexpr (has_exponentials) {
        if (!writes_exponentials) return;
        write_part<false>(from + begin, left - begin, single,
                          [&](int i) { return PackedExponentials::of(e[2 * i], e[2 * i + 1]); });
      }
    };
#pragma unroll
    for (int turn = 0; turn < turns; ++turn) {
#pragma unroll
      for (int k = 0; k < at_once; ++k)
        add(held[turns - 1 - turn][k], turn * columns_at_once + k * Part::columns);
    }
    if (to_end > ninth) {
      Part part[1];
      load(std::false_type{}, part, ninth);
      add(part[0], ninth);
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
    if constexpr (shares) mbarrier_wait_parity(&ring[in.operand_slot].operands_came, in.operand_parity);
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
              reduce(without_mask<Transform>(transform), mask_of_row<Transform>(transform));
            } else {
              reduce(transform, BoundIdentity::Row{});
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
           (use == SliceUse::hold && !masks_in_slot && !writes_back(problem.operation, shape));
  }
  __device__ void release_operands(const SliceInSlot<Problem>& in) const {
    if constexpr (stages_operands<Problem>) {
      if (lane != 0 || operands_stay()) return;
      Mbarrier* const used = &ring[in.operand_slot].operands_used;
      if constexpr (shares) {
        mbarrier_arrive(used, in.operand_releases);
      } else {
        mbarrier_arrive(used);
      }
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
      if (lane == 0) PartialWords<Acc>::publish(words_of(position) + slice, of_slice, tag());
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
        join_lanes_of_slices(wait_for(words_of(position) + run * 32 + lane, tag()), 32);
    if (lane == 0) PartialWords<Acc>::publish(run_words_of(position) + run, of_run, tag());
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
      if (use == SliceUse::end) return;
    }
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
          const SliceWriter<Problem> writer{ring[oldest.slot].slice, nullptr, warp, lane, result};
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
          SliceWriter<Problem>{held.slice, slot_of(at), warp, lane, unknown}.park(slice[i]);
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
    const SliceWriter<Problem> writer{in, slot(at.slot), warp, not_known(lane), result};
    if constexpr (may_drop_ends) {
      if (kept(in) == 0) {
        if (finishes_from_inputs(in.use)) release_operands(in);
        writer.of_dropped(done);
        return;
      }
    }
    if constexpr (has_exponentials || has_logits) {
      if (in.use == SliceUse::hold && writes_back(problem.operation, shape)) {
        mbarrier_wait_parity(&held.reduced, at.parity);
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

/// setmaxnreg exists for compute capability 9.0a alone.
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
inline constexpr bool has_setmaxnreg = false;
#else
inline constexpr bool has_setmaxnreg = true;
#endif

template <RingFor kind, class Problem>
__device__ __forceinline__ void run_grid_pipelined_block(const Problem& problem,
                                                         const GridPipelinedShape& shape,
                                                         const CudaWorkspace& workspace) {
  extern __shared__ __align__(128) char grid_pipelined_slots[];
  __shared__ std::uint32_t shared_epoch;
  using OfBlock = GridPipelinedBlock<Problem, kind>;
  constexpr bool parks = OfBlock::parks, holds_shares = OfBlock::holds_shares && has_setmaxnreg;
  constexpr int warps_of_group = GridPipelinedShape::warps_of_group;
  auto* const ring =
      reinterpret_cast<GridPipelinedSlot<Problem>*>(grid_pipelined_slots + shape.bytes_of_slots());
  const bool finishes = problem.operation != Operation::logsumexp;
  const int warp = threadIdx.x / 32;
  // (One thread of a warp: the fence takes a microsecond with several.)
  if (threadIdx.x % 32 == 0 && warp < OfBlock::turn_of(shape)) {
    GridPipelinedSlot<Problem>& slot = ring[warp];
    mbarrier_init(&slot.full, 1);
    mbarrier_init(&slot.reduced, warps_of_group);
    mbarrier_init(&slot.ready, 1);
    mbarrier_init(&slot.written, parks ? 2 * warps_of_group : warps_of_group);
    if constexpr (OfBlock::shares) {
      mbarrier_init(&slot.operands_used, GridPipelinedShape::rows_sharing_operands * warps_of_group);
      mbarrier_init(&slot.operands_came, 1);
    } else {
      mbarrier_init(&slot.operands_used, shape.operands_stay ? 1 : warps_of_group);
    }
    // The publishers (where slices are parked, the finishers), who announces, the collector, and who stores.
    mbarrier_init(&slot.empty,
                  warps_of_group + (shape.whole_rows ? 0 : 1) + 1 + (finishes && !parks ? 1 : 0));
    fence_mbarrier_init();
  }
  __syncthreads();
  grid_dependency_wait();
  constexpr int groups = groups_of_publishers<Problem, kind>, publishers = groups * warps_of_group;
  const bool produces = threadIdx.x == (publishers + warps_of_group) * 32;
  OfBlock block{problem, shape, workspace, ring, grid_pipelined_slots, 0, static_cast<int>(threadIdx.x % 32)};
  // (The first copies are under way while others wait for the epoch.)
  if constexpr (!parks) {
    if (produces) block.begin();
  }
  if (threadIdx.x == 0) shared_epoch = workspace.epoch();
  __syncthreads();
  block.epoch = shared_epoch;
  workspace.clear_before_first_epoch(block.epoch);
  // (Where nothing is to be finished, the finishers are publishers, too, by the same instructions: with a
  // copy of their own warps waited for these to be fetched. One H200, logsumexp as a fraction of a sum, so
  // and as now: bfloat16 24577 columns 0.64 and 0.75, 65537 0.78 and 0.87, 131073 0.84 and 0.89, 393217 0.92
  // and 0.95.)
  const bool all_publish = !parks && !OfBlock::holds_shares && !finishes;
  if (warp < publishers + (all_publish ? warps_of_group : 0)) {
    if constexpr (parks) setmaxnreg_dec<GridPipelinedShape::publisher_registers>();
    if constexpr (holds_shares) setmaxnreg_inc<GridPipelinedShape::holder_registers>();
    block.publish(warp / warps_of_group, shape.parties, warp % warps_of_group);
    return;
  }
  if (warp < publishers + warps_of_group) {
    if constexpr (holds_shares) setmaxnreg_dec<GridPipelinedShape::finisher_registers_beside_holders>();
    if constexpr (parks) {
      setmaxnreg_inc<GridPipelinedShape::finisher_registers>();
      block.park_and_finish(warp - publishers);
    } else if (finishes) {
      block.finish(warp - publishers);
    }
    return;
  }
  if constexpr (parks) setmaxnreg_dec<GridPipelinedShape::other_registers>();
  if constexpr (holds_shares) setmaxnreg_dec<GridPipelinedShape::other_registers_beside_holders>();
  if (warp == publishers + warps_of_group) {
    if (produces) {
      if constexpr (parks) {
        block.produce_parked();
      } else {
        block.produce();
      }
    }
  } else if (warp == publishers + warps_of_group + 1) {
    block.collect();
  } else if (warp == publishers + warps_of_group + 2) {
    block.announce();
  } else if (finishes && !parks && block.lane == 0) {
    block.store();
  }
}

/// That of parked slices has no body where setmaxnreg is missing.
template <class Problem, RingFor kind>
__global__ void __launch_bounds__(GridPipelinedShape::threads(groups_of_publishers<Problem, kind>), 1)
    grid_pipelined_rows_kernel(const __grid_constant__ Problem problem,
                               const __grid_constant__ GridPipelinedShape shape,
                               const __grid_constant__ CudaWorkspace workspace) {
  if constexpr (kind != RingFor::parked_slices || has_setmaxnreg)
    run_grid_pipelined_block<kind>(problem, shape, workspace);
}

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
    if constexpr (may_share_operands<Problem>) (void)limits<Problem, RingFor::shared_operands>(exec);
    const char* refusal = limits<Problem>(exec).refusal;
    return refusal ? std::string_view(refusal) : std::string_view();
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    run_with(exec, problem, plan_of(problem));
  }

  /// With parameters of the caller's choice, for the program that finds the tuning. `part_held`: of the slots
  /// of the grid, those that a row which may be read twice holds at most; below 0 slices_held() decides, and
  /// slices may be parked.
  template <class Problem>
  static void run_with(const Kokkos::Cuda& exec, const Problem& problem, const ReductionPlan& plan,
                       int slots = GridPipelinedShape::most_slots, double part_held = -1) {
    if constexpr (parks_slices<Problem>) {
      if (plan.reads_twice && part_held < 0 && lie_alike(problem) && run_parking(exec, problem, plan)) return;
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
    const int slot_bytes = shape.slot_bytes + known_bytes;
    shape.slots = std::min({slots, device.shared_bytes / slot_bytes, GridPipelinedShape::most_slots});
    const auto capacity = [&] { return static_cast<index_type>(device.multiprocessors) * shape.slots; };
    const auto rereads = [&] {
      return problem.operation != Operation::logsumexp && (plan.reads_twice || plan.slices > capacity());
    };
    shape.rereads = rereads();
    stage_operands(problem, plan, shape, device.shared_bytes, slot_bytes);
    shape.rereads = rereads();
    constexpr bool has_transform = PartOfSlice<Problem>::has_transform;
    const bool is_held_row = sizeof(In) == 2 && !has_transform && problem.operation != Operation::logsumexp &&
                             plan.slices > ReductionPlan::slices_at_once;
    int copies = is_held_row ? GridPipelinedShape::most_copies_of_held_rows
                             : GridPipelinedShape::most_copies_of_usual_slices;
    if (shape.rereads) {
      index_type held = GridPipelinedShape::slices_held<In>(plan.slices, capacity(), shape.operand_slots > 0);
      if (part_held >= 0)
        held = std::min(plan.slices, static_cast<index_type>(part_held * static_cast<double>(capacity())));
      // Where these keep their operands until they are finished, there has to be room for all of them: a
      // slice that was handed out must not wait for another one of its row.
      if (shape.operand_slots > 0 && shape.operand_slots < shape.slots &&
          !GridPipelinedBlock<Problem>::writes_back(problem.operation, shape))
        held = 0;
      if (held > 0) copies = GridPipelinedShape::most_copies_of_held_rows;
      shape.slices_reread = plan.slices - held;
      shape.slices_kept =
          GridPipelinedShape::most_bytes_kept / (plan.slice_columns * static_cast<int>(sizeof(In)));
    }
    shape.most_copies =
        std::max(1, std::min(std::max(copies, copies * ReductionPlan::usual_slice_bytes / shape.slot_bytes),
                             shape.slots - shape.parties));
    if constexpr (GridPipelinedBlock<Problem>::may_drop_ends)
      shape.drops_ends = impl::drops_ends(problem.transform, problem.geometry.columns);
    shape.draws_early = problem.operation != Operation::logsumexp &&
                        (sizeof(In) > 2 || has_whole_lines || shape.operand_slots > 0);
    constexpr bool only_copies =
        !has_transform || (PartOfSlice<Problem>::packed && !GridPipelinedBlock<Problem>::may_drop_ends);
    const bool ring_has_two = plan.slices <= shape.slots / 2;
    shape.collects_slice_each = plan.slices <= 32 && (!has_whole_lines || !only_copies ||
                                                      (operands_of<typename Problem::Transform> == 0 &&
                                                       (sizeof(In) == 2 || plan.slices > 8 || ring_has_two)));
    shape.all_slices = problem.geometry.rows * plan.slices + (shape.rereads ? shape.slices_reread : 0);
    // So that a block has one of these rows in its ring while another one comes.
    shape.whole_rows = !shape.rereads && ring_has_two &&
                       !GridPipelinedShape::deals_slices_of_short_rows(problem, plan, has_whole_lines,
                                                                       device.multiprocessors);
    shape.slices_a_ticket = shape.whole_rows ? static_cast<int>(plan.slices) : 1;
    if (problem.operation == Operation::logsumexp && shape.slices_a_ticket == 1)
      shape.slices_a_ticket = GridPipelinedShape::slices_read_at_once;
    if (!shape.rereads) {
      const int slices = shape.operand_slots > 0 && !shape.operands_stay
                             ? std::min(shape.most_copies, shape.operand_slots)
                             : shape.most_copies;
      // (Whole ones: begin() counts on that.)
      const index_type tickets_a_block = shape.all_slices / shape.slices_a_ticket / device.multiprocessors;
      shape.own_tickets = static_cast<int>(
          std::min(static_cast<index_type>(slices / shape.slices_a_ticket), tickets_a_block));
      const RowGeometry& g = problem.geometry;
      shape.x_leaves_l2_first =
          problem.operation != Operation::logsumexp &&
          g.rows * g.columns * static_cast<index_type>(sizeof(In)) <= index_type(device.l2_bytes) / 4 * 3;
    }
    if constexpr (may_share_operands<Problem>) {
      if (rows_share_operands(problem, shape, device.multiprocessors)) {
        const CooperativeLimits& kernel = limits<Problem, RingFor::shared_operands>(exec);
        if (!kernel.refusal && kernel.shared_bytes >= device.shared_bytes) {
          constexpr int rows = GridPipelinedShape::rows_sharing_operands;
          shape.all_slices = ceil_div(problem.geometry.rows, rows) * plan.slices;
          shape.own_tickets = 0;
          launch<RingFor::shared_operands>(exec, kernel, problem, plan, shape);
          return;
        }
      }
    }
    launch<RingFor::any_rows>(exec, device, problem, plan, shape);
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
    if (shape.slice_columns * static_cast<int>(sizeof(typename Problem::In)) >
        GridPipelinedShape::parked_vectors * GridPipelinedShape::finishing_threads *
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
    launch<RingFor::parked_slices>(exec, device, problem, plan, shape);
    return true;
  }

  /// What a row and its slices decide.
  template <class Problem>
  static GridPipelinedShape shape_of(const Problem& problem, const ReductionPlan& plan,
                                     bool has_whole_lines) {
    GridPipelinedShape shape{};
    shape.slices = plan.slices;
    shape.runs = plan.runs;
    shape.slice_columns = plan.slice_columns;
    // A slice that starts within a line ends within one more.
    shape.slot_bytes = plan.slice_columns * static_cast<int>(sizeof(typename Problem::In)) +
                       (has_whole_lines ? 0 : GridPipelinedShape::line);
    shape.x_end = problem.x + problem.geometry.last_x_offset() + problem.geometry.columns;
    return shape;
  }

  template <RingFor kind, class Problem>
  static void launch(const Kokkos::Cuda& exec, const CooperativeLimits& device, const Problem& problem,
                     const ReductionPlan& plan, GridPipelinedShape& shape) {
    shape.rows_a_slice = 1.0 / static_cast<double>(shape.slices);
    shape.tickets = (shape.all_slices + shape.slices_a_ticket - 1) / shape.slices_a_ticket;
    const int known_bytes = GridPipelinedBlock<Problem, kind>::turn_of(shape) *
                            static_cast<int>(sizeof(GridPipelinedSlot<Problem>));
    launch_labelled(exec, kernel_label(problem.operation, name), [&] {
      launch_cooperatively(exec, &grid_pipelined_rows_kernel<Problem, kind>, device.multiprocessors,
                           GridPipelinedShape::threads(groups_of_publishers<Problem, kind>),
                           static_cast<std::size_t>(shape.bytes_of_slots() + known_bytes), problem, shape,
                           CudaWorkspace::get<typename Problem::Acc>(exec, words(problem, plan)));
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
      if (!side_by_side || count == 0 || count > most_staged_operands) return;
      shape.operand_slot_bytes = bytes;
      if (same_for_all && plan.slices <= GridPipelinedShape::most_slices_with_operands) {
        const int operand_slots = static_cast<int>(plan.slices);
        const int slots = std::min(shape.slots, (shared_bytes - operand_slots * bytes) / slot_bytes);
        if (slots > shape.parties && slots >= operand_slots) {
          shape.slots = slots;
          shape.operand_slots = operand_slots;
          shape.operands_stay = true;
          return;
        }
      }
      if (problem.operation != Operation::logsumexp &&
          !GridPipelinedBlock<Problem>::writes_back(problem.operation, shape)) {
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

  /// Whether there is a kernel for rows that share operands: of logits that publishers write back, and of one
  /// operand that is no mask. (Masks alone, one H200, fractions of a copy, else and so: float 65536 columns
  /// 0.95 and 0.93, bfloat16 131072 0.86 and 0.835. With a bias and a mask float 65536 0.77 and 0.80,
  /// bfloat16 0.525 and 0.57: not worth another minute of the compiler's for each of these chains. What is
  /// known at run time is bound by instructions.)
  template <class Problem>
  static constexpr bool may_share_operands = [] {
    using OfBlock = GridPipelinedBlock<Problem>;
    using Transform = typename Problem::Transform;
    return stages_operands<Problem> && (OfBlock::has_logits || OfBlock::has_exponentials) &&
           operands_of<Transform> == 1 && PartsOfChain<Transform>::masks == 0 &&
           sizeof(typename Problem::In) <= 4;
  }();

  /// Whether two rows share operands: these are the same for all rows, have slots that they take turns in,
  /// and nobody needs them behind the publishers.
  template <class Problem>
  static bool rows_share_operands(const Problem& problem, const GridPipelinedShape& shape,
                                  int multiprocessors) {
    constexpr int rows_of_ticket = GridPipelinedShape::rows_sharing_operands;
    constexpr bool is_16_bit = sizeof(typename Problem::In) == 2;
    const index_type slices = shape.slices;
    bool share = shape.operand_slots > 0 && !shape.operands_stay && !shape.rereads && shape.runs == 0 &&
                 problem.operation != Operation::logsumexp &&
                 GridPipelinedBlock<Problem>::writes_back(problem.operation, shape) && !shape.drops_ends;
    problem.transform.visit_operands(
        [&](const auto& operand) { share = share && operand.row_offset.is_none(); });
    // Not where a ticket has whole rows, nor where blocks would have few tickets, of which some have one less
    // than others. And there has to be room for all slices of two rows, see why it cannot hang.
    return share && slices > shape.slots / 2 &&
           slices * rows_of_ticket <= static_cast<index_type>(multiprocessors) * shape.slots &&
           (is_16_bit || slices <= GridPipelinedShape::most_slices_of_floats_sharing) &&
           problem.geometry.rows * slices >= 8 * rows_of_ticket * static_cast<index_type>(multiprocessors);
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
    return plan.slices > 1 ? problem.geometry.rows * (plan.slices + plan.runs) : 0;
  }

  template <class Problem, RingFor kind = RingFor::any_rows>
  static const CooperativeLimits& limits(const Kokkos::Cuda& exec) {
    return cooperative_limits(&grid_pipelined_rows_kernel<Problem, kind>, exec.cuda_device(),
                              GridPipelinedShape::threads(groups_of_publishers<Problem, kind>),
                              CooperativeLimits::all_shared);
  }
};

}  // namespace KokkosSoftmax::impl

#endif
