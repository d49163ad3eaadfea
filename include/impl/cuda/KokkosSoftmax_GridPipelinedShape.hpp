// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// How grid_pipelined_rows cuts the shared memory of its blocks and deals slices to them, and how slices come
/// to their slots.

#ifndef KOKKOSSOFTMAX_GRIDPIPELINEDSHAPE_HPP
#define KOKKOSSOFTMAX_GRIDPIPELINEDSHAPE_HPP

#include <impl/cuda/KokkosSoftmax_CudaRuntime.hpp>
#include <impl/cuda/KokkosSoftmax_HopperPtx.hpp>
#include <impl/cuda/KokkosSoftmax_PackedMask.hpp>
#include <impl/cuda/KokkosSoftmax_SlicedRows.hpp>

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
  static constexpr int threads(int groups, int collectors = 1) {
    return ((groups + 1) * warps_of_group + 3 + collectors) * 32;
  }
  /// Warps that collect, at most, and of rows of so many slices. Of doubles what a lane has of several slices
  /// takes it longer than memory takes for a slice; longer rows have their slices in runs. (One H200,
  /// fractions of a copy, one and two: 131073 columns 0.69 and 0.82, 393216 0.69 and 0.855, 600000 0.64 and
  /// 0.83, 800000 0.745 and 0.81, but 1 M 0.79 and 0.76; of up to 32 slices 0.95 and 0.90.)
  template <class Problem>
  static constexpr int most_collectors = sizeof(typename Problem::Acc) == 8 ? 2 : 1;
  template <class Problem>
  static constexpr int collectors_for(index_type slices) {
    return slices > 32 && slices <= 7 * 32 ? most_collectors<Problem> : 1;
  }
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
  /// 0.912 and 0.922, 3.5 M 0.915 and 0.926, 4194304 0.912 and 0.922. Where is_paced, one H200: float 1.6 M
  /// 0.959 and 0.963, 1.9 M 0.948 and 0.962, with a temperature 0.935 and 0.945, 0.925 and 0.941, with a mask
  /// as large as x 1.6 M 0.934 and 0.949, with such a bias 0.924 and 0.930; bfloat16 with a temperature 3 M
  /// 0.888 and 0.896, 4194303 0.821 and 0.830, with a bias as large as x 0.721 and 0.734. Double 1048576
  /// 0.788 and 0.802, 2 M 0.590 and 0.600, 2.5 M 0.604 and 0.629, 4194304 0.623 and 0.627.)
  static constexpr int most_copies_of_held_rows = 2;
  /// Whether what paces the reads of a block counts, where memory is fast: of rows that no other kernel
  /// takes, if there are many of them. (One H200, float 8193 columns, two copies under way and three: 0.95
  /// and 0.965 of a copy. Microseconds in a stream, three and two: float 512, 2048 and 4096 rows of
  /// 16388 21.2 and 22.0, 73.0 and 71.7, 138.3 and 135.6, bfloat16 512, 1024 and 4096 rows of 32768 21.3
  /// and 21.7, 40.3 and 40.7, 137.8 and 136.4.)
  template <class Problem>
  static bool is_paced(const Problem& problem, const ReductionPlan& plan, int device, int multiprocessors) {
    constexpr index_type most_columns_of_others = 16384;
    constexpr int fewest_slices_a_multiprocessor = 24;
    return sizeof(typename Problem::In) <= 4 && problem.operation != Operation::logsumexp &&
           problem.geometry.columns > most_columns_of_others &&
           has_slices(problem, plan, fewest_slices_a_multiprocessor * multiprocessors) &&
           has_fast_memory(device);
  }
  template <class Problem>
  static bool has_slices(const Problem& problem, const ReductionPlan& plan, int fewest) {
    return problem.geometry.rows * plan.slices >= fewest;
  }

  /// Of whole rows of a block that is_paced, as few copies as together are so long: more would be of the next
  /// row while this one's are waited for. Outputs that are larger take their share of memory. (One H200,
  /// fractions of a copy of 1 GiB, two, three and four copies: bfloat16 18432 columns, slices of 36 KB, 0.98,
  /// 0.965 and 0.965, 20480, 20 KB, 0.90, 0.975 and 0.97, 24576, 24 KB, 0.95, 0.965 and 0.96, 25600, 25 KB,
  /// 0.96, 0.975 and 0.965, 27648, 27 KB, 0.98, 0.97 and 0.965, 32768, 32 KB, 0.975, 0.96 and 0.955,
  /// log_softmax 0.975, 0.95 and 0.95, with a temperature 0.97, 0.96 and 0.955; float 17001, 33 KB, with a
  /// mask 0.99, 0.985 and 0.98; bfloat16 to float 17001, 17 KB, 0.92, 0.93 and 0.93, 18001, 18 KB, 0.93,
  /// 0.925 and 0.92, 20001, 20 KB, 0.945, 0.915 and 0.915.)
  static constexpr int copied_bytes_of_whole_rows(bool widens) { return (widens ? 34 : 53) * 1024; }

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
  /// transformed once more then, 0.63, 0.92, 1.20, 1.30; with these registers 0.57, 0.81, 1.11, 1.28, and
  /// softmax 0.54, 0.65, 0.81, 0.99; with 136 and 72 0.57, 0.81, 1.11, 1.56, and 0.55, 0.66, 0.82, 1.00.)
  static constexpr int holder_registers = 144, finisher_registers_beside_holders = 64,
                       other_registers_beside_holders = 64;
  static constexpr int parts_held = 8, parts_at_once = 4;
  /// Cycles of a finisher's thread from a vector that it writes to y to the next one, and before it parks a
  /// slice: a row's result is there for all blocks at once, and where they write as fast as they can, copies
  /// to slots wait for that. What is too many differs from card to card. (One H200, fractions of a copy,
  /// without waiting and with 300 cycles: float 2.5 M columns 0.936 and 0.942, 3.5 M 0.931 and 0.942, 4194304
  /// 0.946 and 0.960, 4194303 0.923 and 0.940. Another one, without, with 100, 200, 300 and 400: 2 M 0.959,
  /// 0.957, 0.962, 0.910, 0.830, 3 M 0.956, 0.952, 0.953, 0.911, 0.826, 4194304 0.945, 0.949, 0.946, 0.911,
  /// 0.828; with 200 and 350 5 M, without runs, 0.949 and 0.881, but 6 M and 7 M, with runs, 0.876 and 0.892,
  /// 0.833 and 0.849. One H100: no difference, but 6 M 0.949 and 0.958.)
  static constexpr int store_cycles_of(index_type runs) { return runs > 0 ? 350 : 200; }
  static constexpr int cycles_before_parking = 400;
  /// Of such a row the slices: more would not leave enough for the next one to come meanwhile. (One H200,
  /// fractions of a copy, parked and else: of float 7 M columns 0.77 and 0.74, 8.4 M 0.75 and 0.72.)
  static constexpr index_type most_slices_parked(index_type capacity) { return capacity * 8 / 10; }

  /// Of those that are read twice, what is kept in L2 for the second time, from their end. (One H200, 4 M
  /// columns of float, all read twice: 0.76 of a copy, with nothing kept on purpose 0.70.)
  static constexpr int most_bytes_kept = 24 * 1024 * 1024;

  /// Of rows that are only read, the slices of a ticket: to draw it takes the producer half as long as memory
  /// takes for a slice, and memory is quicker with what lies side by side, in powers of two. (One H200, GB/s
  /// of logsumexp with one, two and three: float 65536 columns 4000, 4260, 4310, 393216 4040, 4300, 4345;
  /// bfloat16 16386 3730, 3910, 3945, 65536 3770, 4110, 4165, 393216 3840, 4270, 4325. Another one, fractions
  /// of half a copy of 1 GiB with three, four, six and eight: float 65536 1.036, 1.039, 1.018, 1.052, 131072
  /// 1.045, 1.046, 1.029, 1.057, 131073 1.042, 1.043, 1.008, 0.996; bfloat16 65536 1.010, 1.015, 0.957,
  /// 1.030, 65537 0.934, 0.992, 0.844, 1.005, 131073 0.949, 0.996, 0.878, 1.001, 4194303 0.981, 0.984, 0.938,
  /// 0.978; whole rows of two slices 20001 0.719, 0.788, 0.801, 0.810, 24576 0.841, 0.897, 0.912, 0.920, but
  /// 32768 1.059, 1.058, 1.055, 1.054, and 2048 of them 0.970, 0.941, 0.894, 0.957. Of six slices, of which
  /// tickets of eight have parts of two rows, bfloat16 98304 with eight 0.864 of a sum, where 98303 with four
  /// have 0.953. Where blocks keep to their columns, whose slices are not side by side, three, as on the
  /// first one.)
  template <class Problem>
  int slices_read_at_once(bool has_whole_lines) const {
    if (keeps_columns) return 3;
    const bool divide_eight = 8 % slices == 0 || slices % 8 == 0;
    if (!whole_rows) return has_whole_lines && divide_eight ? 8 : 4;
    const bool has_short_slices = slice_bytes<Problem>() < ReductionPlan::usual_slice_bytes;
    return static_cast<int>(slices) * (slices == 2 && has_short_slices ? 2 : 1);
  }

  /// Of larger outputs, of which a slice has so many vectors for each lane of the finishers, those that a
  /// warp stages at once: all of a short slice, for each waits until the one before has left; of a longer one
  /// fewer, which leave room for one more slot. (One H200, bfloat16 to float, fractions of a copy: 65536
  /// columns, slices of 16 KB, 0.965, half of a slice at once 0.94; 131072, 20 KB, 0.955 and 0.95; 1.9 M, 32
  /// KB, half and a third of it 0.89 and 0.92.)
  static constexpr int staged_vectors_for(int vectors) {
    return vectors <= 10 ? vectors : ceil_div(vectors, ceil_div(vectors, 6));
  }

  /// Of rows that have the same operands, the slices at most that each have theirs in a place of their own,
  /// if as many slots are left at least. (One H200, fractions of a copy, copied with each slice and so:
  /// float, a mask for all rows 8191 columns 0.90 and 0.97, 10001 0.82 and 0.91, 32768, four slices, 0.93 and
  /// 0.95, but 50257, seven, 0.90 and 0.84; a bias for all rows 8191 0.88 and 0.98, 14001 0.83 and 0.96, of
  /// three slices and three slots 24001 0.81 and 0.83, of four and two 32768 0.84 and 0.75; bfloat16, a mask
  /// 16386 0.89 and 0.94, 20001 0.61 and 0.76, 40001 0.77 and 0.82, 65536 0.81 and 0.88, a bias 0.77 and
  /// 0.93, 0.49 and 0.62, 0.60 and 0.67, but of four slices and three slots 65536 0.74 and 0.67.)
  static constexpr index_type most_slices_with_operands = 4;

  /// Slices of a row, of rows that have the same operand, that are each left to blocks of their own. (One
  /// H200, fractions of a copy of 1 GiB, the operand copied once for two rows, and so; a bias for all rows:
  /// float 24576 columns 0.85 and 0.96, 65536 0.90 and 0.96, 131072 0.89 and 0.95, 131073, of 17 slices, 0.88
  /// and 0.92, 360448, of 44, 0.855 and 0.94; bfloat16 49152 0.79 and 0.94, 65536 0.85 and 0.94, 131073 0.66
  /// and 0.77, 262144 0.81 and 0.90; half 65536 0.64 and 0.905, 131073 0.53 and 0.635; bfloat16 to float
  /// 131072 1.15 times as fast; log_softmax, bfloat16 65536 0.64 and 0.93; logsumexp, as fractions of half a
  /// copy, float 98304 0.685 and 0.945, bfloat16 0.56 and 0.84. A mask for all rows: bfloat16 131072 0.85 and
  /// 0.90, 131073 0.71 and 0.82; float 131072 0.94 and 0.95, 196608 0.955 and 0.925. Blocks whose numbers
  /// follow each other for the same columns, in place of such as are apart: float 32768 0.89 for 0.925.)
  static constexpr index_type most_slices_of_blocks = 64;
  static_assert(most_slices_of_blocks <= CudaWorkspaceHeader::most_counters);

  /// Whether pairs of 16 bits stay as they are in memory, and whether there is nothing else to read, either.
  template <class Problem>
  static constexpr bool leaves_pairs =
      !PartOfSlice<Problem>::has_transform || keeps_rows_packed<typename Problem::Transform>;
  template <class Problem>
  static constexpr bool leaves_rows_packed =
      leaves_pairs<Problem>&& operands_of<typename Problem::Transform> == 0;

  /// Of x.
  template <class Problem>
  int slice_bytes() const {
    return slice_columns * static_cast<int>(sizeof(typename Problem::In));
  }

  /// Whether the slices of rows of which a ring has two go to blocks one by one nevertheless: those of
  /// floats, of 16 bits of more than two slices in whole lines, and of what becomes wider in whole lines,
  /// where there are many of them. (Bfloat16 to float, one H200, fractions of a copy, whole rows to a block
  /// and so: 24576 columns 0.92 and 0.95, 32768 0.93 and 0.965, but 16387 0.94 and 0.91. Others, one H200,
  /// fractions of a copy of 1 GiB, whole rows to a block and so: float 20480 0.948 and 0.964, 24576 0.942 and
  /// 0.949, 28672 0.944 and 0.960, bfloat16 45056 0.946 and 0.973, 49152 0.933 and 0.953, 57344 0.939 and
  /// 0.961, but 32776 0.956 and 0.941, 40002 0.957 and 0.938; microseconds in a CUDA graph, float 512 x 16388
  /// 18.9 and 20.6, 1024 x 28672 63.4 and 61.9, 2048 x 16388 70.0 and 71.1.) `is_paced`: not those of
  /// two slices, of which a block then has two copies under way. (Likewise, float 16388 columns 0.98 and
  /// 0.97, 18432 0.975 and 0.965, 20480 0.97 and 0.98; before, with three copies, 16388 0.950 and 0.958.)
  /// Of 16 bits without operands so do those of three slices of the usual length and longer, where there are
  /// few: some blocks would have a row more than others. (Likewise, launched early, bfloat16 200, 400, 1000
  /// and 2000 rows of 49152 0.565 and 0.585, 0.79 and 0.835, 0.89 and 0.92, 0.92 and 0.94, 150, 334, 1336 and
  /// 2000 of 50257 0.625 and 0.715, 0.84 and 0.895, 0.92 and 0.94, 0.94 and 0.955, 1 GiB 0.962 and 0.961;
  /// with a temperature 0.53 and 0.66, 0.71 and 0.81, 0.86 and 0.88, 1 GiB 0.94 and 0.93; but of shorter
  /// slices 500, 1000 and 2000 rows of 40001 0.86 and 0.785, 0.925 and 0.80, 0.96 and 0.82.)
  template <class Problem>
  bool deals_slices_of_short_rows(const Problem& problem, const ReductionPlan& plan, bool has_whole_lines,
                                  bool is_paced, int multiprocessors) const {
    using In = typename Problem::In;
    constexpr int fewest_slices_a_multiprocessor = 64;
    constexpr bool is_plain =
        sizeof(In) <= sizeof(typename Problem::Out) && !PartOfSlice<Problem>::has_transform;
    const bool pays = has_larger_outputs<Problem> ? has_whole_lines
                      : sizeof(In) == 4           ? !is_paced || plan.slices > 2
                                                  : sizeof(In) == 2 && has_whole_lines && plan.slices > 2;
    constexpr bool may_be_few =
        sizeof(In) == 2 && !has_larger_outputs<Problem> && leaves_rows_packed<Problem>;
    const bool pays_of_few =
        may_be_few && plan.slices > 2 && slice_bytes<Problem>() >= ReductionPlan::usual_slice_bytes;
    const bool are_many = has_slices(problem, plan, fewest_slices_a_multiprocessor * multiprocessors);
    return problem.operation != Operation::logsumexp && (are_many ? is_plain && pays : pays_of_few);
  }

  /// Whether six slots are better than the seven that there is room for, of slices of the usual length, where
  /// that is_paced: without a transform, of some slices a row, and of 16 bits in whole lines, where there
  /// are many of them. (One H200, fractions of a copy of 1 GiB, seven and six: float 24576 columns 0.959 and
  /// 0.966, 65536 0.972 and 0.973, 98304 0.965 and 0.970, 196608 0.968 and 0.973, 245760 0.969 and 0.972, but
  /// 131072 0.965 and 0.961, 262144 0.968 and 0.965, 1 M 0.97 and 0.95; bfloat16 49152 0.958 and 0.962, 65536
  /// 0.964 and 0.969, 131072 0.966 and 0.970, 229376 0.965 and 0.968, but 262144 0.958 and 0.942; 80001 0.96
  /// and 0.93; half 65536 0.963 and 0.968, log_softmax 0.958 and 0.964. With a temperature float 65536 0.972
  /// and 0.966, bfloat16 0.96 and 0.94. Microseconds in a stream, bfloat16 2112 and 4096 rows of 65536 140.0
  /// and 140.7, 265.7 and 264.5.)
  template <class Problem>
  static bool leaves_a_slot(const Problem& problem, const ReductionPlan& plan, bool has_whole_lines,
                            int multiprocessors) {
    constexpr bool is_float = sizeof(typename Problem::In) == 4;
    constexpr bool is_plain = !has_larger_outputs<Problem> && !PartOfSlice<Problem>::has_transform;
    constexpr int fewest_slices_a_multiprocessor = 96;
    constexpr int usual_columns =
        ReductionPlan::usual_slice_bytes / static_cast<int>(sizeof(typename Problem::In));
    const index_type of_row = plan.slices;
    const bool has_some_slices = of_row >= 3 && (of_row <= 14 || (is_float && of_row > 16 && of_row <= 30));
    return is_plain && has_some_slices && plan.slice_columns == usual_columns &&
           (is_float || has_whole_lines) &&
           has_slices(problem, plan, fewest_slices_a_multiprocessor * multiprocessors);
  }
  static constexpr int slots_if_one_is_left = 6;

  /// Whether the collector is better slow (not collects_slice_each) where that is_paced: there is little to
  /// do for a slice but to copy it, it is long, and others are on their way meanwhile. (One H200, fractions
  /// of a copy of 1 GiB, quick and slow: float 24577 columns 0.97 and 0.98, 40001 0.966 and 0.976, 57345 0.97
  /// and 0.98, 98305 0.967 and 0.972, 130001 0.966 and 0.970, but 28001, of slices of 28 KB, 0.98 and 0.92,
  /// 131073, 17 slices, 0.98 and 0.93; with a mask as large as x 24577 0.963 and 0.985, 40001 0.985 and
  /// 0.992, 98305 0.97 and 0.985, but with one for all rows 24577 0.93 and 0.96, 40001 0.967 and 0.91;
  /// bfloat16 53248 0.956 and 0.966, 73728 0.955 and 0.968, but 147456, eight slices, 0.96 and 0.93. Of the
  /// usual length 262144 columns, 16 slices, 0.959 and 0.968, 524288, 32, 0.961 and 0.968, with a temperature
  /// 0.946 and 0.956, 0.944 and 0.955, half 524288 0.960 and 0.969, but 19 to 31 slices 0.97 and 0.93.)
  template <class Problem>
  bool collector_paces(const Problem& problem, bool has_whole_lines) const {
    using Transform = typename Problem::Transform;
    constexpr bool has_transform = PartOfSlice<Problem>::has_transform;
    constexpr int size = sizeof(typename Problem::In);
    const int bytes = slice_bytes<Problem>();
    if constexpr (size == 4 && (!has_transform || only_drops<Transform>)) {
      return !has_whole_lines && !drops_ends && slices <= 16 && bytes >= ReductionPlan::usual_slice_bytes &&
             !has_operands_of_all_rows(problem.transform);
    } else if constexpr (size == 2 && !has_larger_outputs<Problem> && leaves_rows_packed<Problem>) {
      constexpr int usual = ReductionPlan::usual_slice_bytes;
      const bool is_short_row = !has_transform && slices <= 4 && bytes > usual;
      return has_whole_lines && !drops_ends &&
             (is_short_row || (bytes == usual && (slices == 16 || slices == 32)));
    }
    return false;
  }

  /// Whether slices of 16 bits that begin anywhere, without operands, are better off with early tickets (see
  /// draws_early) where memory is fast: longer ones than the usual, and those of rows of many; those that
  /// stay as they are in memory but are not only copied, of any. (One H200, fractions of a copy of 1 GiB,
  /// without and with: bfloat16 65537 columns 0.933 and 0.955, 73000 0.955 and 0.959, 131073 0.93 and 0.955,
  /// 151643 0.94 and 0.96, 65544 0.95 and 0.97, half 131073 0.93 and 0.952, log_softmax 0.954 and 0.968, with
  /// a temperature 65537 0.905 and 0.93, 140001 0.945 and 0.96, though whole rows of 33001 0.963 and 0.959.
  /// Of the usual length 80001 0.962 and 0.961, 200001 0.958 and 0.955, but 393217 0.960 and 0.964, 1000003
  /// 0.955 and 0.963, 1.9 M 0.938 and 0.945, 3.5 M 0.920 and 0.939, 4194303 0.862 and 0.910, half 393217
  /// 0.963 and 0.969, 1.9 M 0.941 and 0.952, 4194303 0.858 and 0.912; with a temperature 80001 0.947 and
  /// 0.960, 200001 0.946 and 0.961, 1000003 0.935 and 0.957, 4194303 0.820 and 0.873; with GELU 80001 0.604
  /// and 0.596, 1000003 0.626 and 0.621, but 1.9 M 0.622 and 0.633, 4194303 0.618 and 0.634. Few rows of
  /// bfloat16, launched early: 150, 300 and 500 of 65537 0.612 and 0.619, 0.853 and 0.883, 0.876 and 0.899,
  /// 64, 150 and 300 of 131073 0.603 and 0.612, 0.832 and 0.874, 0.867 and 0.900, 334 of 50257 0.895 and
  /// 0.911.)
  template <class Problem>
  bool draws_early_anywhere() const {
    constexpr bool has_transform = PartOfSlice<Problem>::has_transform, is_packed = leaves_pairs<Problem>;
    constexpr int many_slices = is_packed ? 17 : 97;
    const bool is_long = slice_bytes<Problem>() > ReductionPlan::usual_slice_bytes;
    return !whole_rows && (slices >= many_slices || (is_packed && (has_transform || is_long)));
  }

  index_type slices;      ///< of a row
  index_type runs;        ///< of slices, see ReductionPlan
  int slices_a_ticket;    ///< neighbours, of one row or several; of the last ticket perhaps fewer
  bool whole_rows;        ///< whether a ticket has all slices of its rows: no block has to hear of another's
  index_type all_slices;  ///< of the tickets of a launch
  index_type tickets;     ///< of a launch
  double rows_a_slice;    ///< 1 / slices
  /// A block's first, which it does not draw: the way to the counter and back comes before anything else. As
  /// many as it may have under way at once; but none of slices that others wait for unless all blocks are
  /// resident. (One H200, microseconds in a CUDA graph without and with: float 64 x 128256 21.6 and 21.0, 48
  /// x 128256 16.7 and 15.7, 32 x 128256 12.0 and 11.4, 512 x 16385 21.4 and 20.6; with five and seven each
  /// 64 x 128256 21.8 and 22.7.)
  int own_tickets;
  /// Slices for each block that are brought to L2 before the kernel before this one in the stream has ended,
  /// which may still write them: L2 is where all see what was written. Not what may be read twice. (One H200,
  /// calls one after the other, fractions of a copy, 0, 1, 2, 3 and 6: bfloat16 512 x 32768
  /// 0.99, 1.03, 1.035, 1.01 and 0.945, 1024 x 32768 0.91, 0.94, 0.94, 0.955 and 0.92, 2048 x 32768 0.936,
  /// 0.952, 0.953, 0.953 and 0.93, 512 x 131072 0.927, 0.934, 0.941, 0.937 and 0.93, 300 x 200000 0.956,
  /// 0.964, 0.967, 0.96 and 0.95, 1 GiB of 65536 columns 0.98 all; float 256 x 32768 0.82, 0.84, 0.84, 0.84
  /// and 0.79, 512 x 131072 0.936, 0.942, 0.944, 0.940 and 0.927.)
  static constexpr int slices_prefetched = 2;
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
  int collectors;  ///< likewise
  /// Whether rows may be read twice.
  bool rereads;
  /// Whether a ticket is drawn while the slot's last results are still being copied from it, which takes
  /// about as long as the way to the counter and back. (One H200, fractions of a copy, without and with: of
  /// bfloat16 65536 columns 0.963 and 0.972, 393216 0.939 and 0.956, of float 1 M 0.955 and 0.963, 2 M 0.913
  /// and 0.941. Not for 16 bits without operands where slices begin anywhere: of bfloat16 50257 columns 0.958
  /// and 0.953, GELU of 131073 0.625 and 0.62; unless draws_early_anywhere().)
  bool draws_early;
  /// Whether the collector's lanes have a slice each, which takes it fewer instructions, and it paces a block
  /// that has more to do for a slice than to copy it. (One H200, fractions of a copy, without and with: float
  /// 131073 columns 0.945 and 0.973; bfloat16 65536 0.943 and 0.968, with a factor 0.941 and 0.959, with a
  /// temperature 0.846 and 0.882, half 0.896 and 0.935, bfloat16 131073 with a bias as large as x 0.72 and
  /// 0.76, with one for all rows 0.49 and 0.53, 393216 0.956 and 0.970. Not for what is little more than a
  /// copy: there float had 0.969 and 0.961, and bfloat16 with a mask 0.946 and 0.928; nor where
  /// collector_paces().)
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
  /// Whether a block has slices of the same columns alone, and one place for operands.
  bool keeps_columns;
  int operand_slot_bytes;
  struct StagedOperand {
    const void* end;  ///< behind it in memory
    int at;
  } operand[most_staged_operands];
  /// Vectors of a lane that larger outputs are staged in, behind all slots.
  int staged_vectors;

  KOKKOS_FORCEINLINE_FUNCTION int bytes_of_slots() const {
    return slots * slot_bytes + operand_slots * operand_slot_bytes;
  }
  KOKKOS_FORCEINLINE_FUNCTION int bytes_staged_of_warp() const {
    return staged_vectors > 0 ? staged_vectors * 32 * copy_alignment + line : 0;
  }
  KOKKOS_FORCEINLINE_FUNCTION int bytes_staged() const {
    return finishing_threads / 32 * bytes_staged_of_warp();
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
  SliceUse use;
  index_type index;  ///< of the slice in its row
  bool collects;     ///< of logsumexp: whether its block collects the row
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
  /// Sees to it that it will come from L2.
  __device__ void prefetch() const {
    if (bytes() > 0) cp_async_bulk_prefetch_l2(reinterpret_cast<const void*>(begin), bytes());
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

}  // namespace KokkosSoftmax::impl

#endif
