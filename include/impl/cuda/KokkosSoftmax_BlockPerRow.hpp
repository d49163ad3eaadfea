// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The CUDA kernels for rows that a block has in registers.

#ifndef KOKKOSSOFTMAX_BLOCKPERROW_HPP
#define KOKKOSSOFTMAX_BLOCKPERROW_HPP

#include <impl/cuda/KokkosSoftmax_StagedRows.hpp>

#include <algorithm>
#include <string_view>

namespace KokkosSoftmax::impl {

/// block_per_row_kernel to the same bits, for rows of one dimension that fill their threads' vectors
/// (BlockOfFilledRow). `is_softmax`, or another operation. `from_memory`: see load_of_row.
template <bool is_softmax, bool from_memory, int vectors, int most_threads, int least_blocks, class Problem>
__global__ void __launch_bounds__(most_threads, least_blocks)
    block_per_filled_row_kernel(const __grid_constant__ Problem problem) {
  using Registers = RegistersOf<Problem, vectors, false>;
  using Reduce = ReduceWarps<typename Problem::Acc>;
  __shared__ typename Reduce::Shared shared;
  const BlockOfFilledRow<!from_memory> threads{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)};
  grid_dependency_wait();
  if (problem.geometry.rows == 0) return;
  const RowGeometry::Row where = problem.geometry.row_of_one_dimension(blockIdx.x);
  Registers row;
  softmax_in_registers(
      row, threads, problem, problem.y + where.y_offset, threadIdx.x == 0, Reduce{shared, {}},
      [&](bool looks) { return load_row(problem, where, row, threads, looks); },
      [&](const auto& output) { store_row(problem, where, blockIdx.x, row, threads, output); }, is_softmax);
}

/// Likewise, see may_have_rows_in_turn: half as many blocks on a multiprocessor, and each with two rows under
/// way.
template <bool is_softmax, int vectors, int most_threads, int least_blocks, class Problem>
__global__ void __launch_bounds__(most_threads, least_blocks)
    rows_in_turn_kernel(const __grid_constant__ Problem problem) {
  using Registers = RegistersOf<Problem, vectors, false>;
  using Reduce = ReduceWarps<typename Problem::Acc>;
  __shared__ typename Reduce::Shared shared;
  const RowGeometry& g = problem.geometry;
  const BlockOfWholeRow threads{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)};
  const auto columns = static_cast<int>(g.columns);
  index_type position = blockIdx.x;
  typename Registers::InVector raw[vectors];
  const auto fetch = [&] {
    if (position < g.rows)
      Registers::fetch_vectors(problem.x + position * g.x_stride[0], columns, threads, raw);
  };
  grid_dependency_wait();
  fetch();
#pragma unroll 1
  while (position < g.rows) {
    Registers row;
    row.take_vectors(raw, columns, threads, row_of_all(problem.transform));
    auto* const y = problem.y + position * g.y_stride[0];
    position += gridDim.x;
    fetch();
    softmax_in_registers(
        row, threads, problem, y, threads.index == 0, Reduce{shared, {}}, [](bool) { return true; },
        [&](const auto& output) { row.store(y, columns, true, threads, output); }, is_softmax);
  }
}

struct BlockPerRow {
  static constexpr const char* name = "block_per_row";

  template <class Exec, class Problem>
  static constexpr bool supports = row_in_registers_supports<Exec, Problem>;

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec&, const Problem& problem) {
    using Plan = RowInRegistersPlan<Problem>;
    return refuse_row_in_registers(problem, Plan::longest_of_warp + 1, Plan::longest,
                                   "shorter rows have a warp or a part of one",
                                   "a row does not fit the registers of a block");
  }

  /// Which transform it is may not decide, since what is known at run time alone has its bits. (One H200,
  /// this kernel and grid_pipelined_rows, fraction of a copy of 1 GiB: 8193 columns 0.97 both, 10001 0.91 and
  /// 0.97, 16383 0.90 and 0.96; this and split_rows, microseconds in a CUDA graph: 1 row of 12289 columns 3.2
  /// and 2.4, 128 rows 5.1 and 5.4. With transforms, 512 MB of 10001, 12290 and 14001 columns: a temperature
  /// 0.81 and 0.96, 0.84 and 0.97, 0.81 and 0.97, a mask 0.92 and 0.94, 0.93 and 0.98, 0.91 and 0.98, a bias
  /// for all rows 0.82 and 0.91, 0.84 and 0.94, 0.81 and 0.96, GELU 0.93 and 0.90, 0.91 and 0.94, 0.91 and
  /// 0.97, a temperature and a mask 0.84 and 0.79, 0.80 and 0.86, 0.80 and 0.92, but a factor, a bias, a mask
  /// and a causal mask 0.80 and 0.70, 0.78 and 0.67, 0.48 and 0.67; with a bias 1 row of 14001 columns 6.0
  /// and 3.0, 128 rows 8.3 and 7.1, but of 8191 columns 6.1 and 8.7. Logsumexp of bfloat16, which is at the
  /// card's power limit, fraction of a sum by this kernel and block_per_sliced_row: 13321 columns 0.83 and
  /// 0.76, 14336 0.90 and 0.94, 16383 0.76 and 0.81, 16384 0.88 and 0.98.)
  template <class Exec, class Problem>
  static std::string_view advise_against(const Exec& exec, const Problem& problem) {
    using Plan = RowInRegistersPlan<Problem>;
    constexpr bool is_float =
        std::is_same_v<typename Problem::In, float> && std::is_same_v<typename Problem::Out, float>;
    constexpr index_type longest_here =
        std::is_same_v<typename Problem::Transform, BoundIdentity> ? 256 * Plan::interleaved_elements : 12288;
    const index_type columns = problem.geometry.columns;
    if (is_read_in_slices<Problem> && problem.operation == Operation::logsumexp && columns >= 14336 &&
        exec.cuda_device_prop().major >= 9)
      return "rows of 16 bits that are only read are faster in slices";
    if (is_float && Plan::interleaves(columns) && columns > longest_here &&
        exec.cuda_device_prop().major >= 9)
      return "long rows that are no whole vectors are faster in slices";
    return {};
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    using Plan = RowInRegistersPlan<Problem>;
    const index_type columns = problem.geometry.columns;
    if constexpr (is_packed<Problem>) {
      const bool both = problem.geometry.rows == 0 && columns % Plan::width == 0;  // as in WarpPerRow
      if (both || !lies_anywhere(problem)) {
        const index_type vectors = columns / Plan::width;
        if (!launch_few<false>(exec, problem, vectors)) run_vectors(exec, problem, vectors);
      }
      if (both || lies_anywhere(problem)) {
        const index_type vectors = RegistersOf<Problem, 1, true>::vectors_of_row(columns);
        if (!launch_few<true>(exec, problem, vectors)) run_anywhere(exec, problem, vectors);
      }
    } else if (Plan::interleaves(columns)) {
      run_other_lengths(exec, problem);
    } else if constexpr (sizeof(typename Problem::In) == 2) {
      if constexpr (widens_rows<Problem>) {
        if (problem.operation != Operation::logsumexp) return run_widened(exec, problem);
      }
      // (Fraction of a copy with four, five and eight vectors a thread, bfloat16 with a mask on one H200:
      // 1032 columns 0.72, 0.95, 0.78, 1536 0.89, 0.83, 0.95, 2048 0.93, 0.95, 0.97, 2056 0.86, 0.95, 0.78,
      // 2560 0.92, 0.97, 0.90, 4096 0.91, 0.94, 0.94, 4104 0.89, 0.95, 0.86, 6144 0.91, 0.93, 0.95, 8192
      // 0.90, 0.92, 0.93, five and eight 9216 0.95, 0.91. Four spill where four blocks have 256 threads
      // each; a bias for all rows and GELU are faster with them where rows are powers of two, 2048 columns
      // 0.98 and 0.96, 0.82 and 0.78, but the transform may not decide: what is known at run time alone has
      // its bits.)
      if (Plan::five_fit_better(columns / Plan::width)) {
        launch<5, false, 256, 3>(exec, problem, columns, 5 * Plan::width);
      } else {
        launch<8, false, 256, 2>(exec, problem, columns, 8 * Plan::width);
      }
    } else if (columns <= 256 * 8 * Plan::width) {
      if constexpr (may_have_rows_in_turn<Problem>) {
        // `reserve` launches over no rows: that loads both kernels, which a capture could not do.
        const bool in_turn = has_rows_in_turn(problem);
        if (in_turn || problem.geometry.rows == 0) launch_in_turn<8>(exec, problem);
        if (in_turn) return;
      }
      if constexpr (has_plain_floats<Problem>) {
        const RowAlignment alignment = RowAlignment::of(problem);
        const bool pays = columns <= 6144 && problem.operation != Operation::logsumexp &&
                          comes_from_memory(problem) && (alignment.x | alignment.y) % 16 == 0;
        // `reserve` launches over no rows: that loads these kernels, too.
        if (pays || (problem.geometry.rows == 0 && columns <= 6144)) {
          const bool fills_warps_of_two = columns <= 4096 && columns % (32 * 2 * Plan::width) == 0;
          if (fills_warps_of_two) {
            launch<2, false, 512, 4>(exec, problem, columns, 2 * Plan::width);
          } else {
            launch<4, false, 512, 2>(exec, problem, columns, 4 * Plan::width);
          }
        }
        if (pays) return;
      }
      if (launch_filled_rows(exec, problem)) return;
      launch_256<8, false>(exec, problem, 8 * Plan::width);
    } else {
      if (launch_filled_rows(exec, problem)) return;
      launch<8, false, 512, 2>(exec, problem, columns, 8 * Plan::width);
    }
  }

  template <class Exec, class Problem>
  static void reserve(const Exec&, const Problem&) {}

 private:
  /// Whether block_per_sliced_row takes such rows where they are long, if they are only read.
  template <class Problem>
  static constexpr bool is_read_in_slices =
      is_packed<Problem>&& std::is_same_v<typename Problem::Transform, BoundIdentity>;

  /// Rows that are written in more bytes than they have, in whole vectors. (Fraction of a copy, bfloat16 to
  /// float on one H200, softmax with two factors, with three vectors a thread, with eight and with four: 1536
  /// columns 0.99 all, 2000 0.98, 0.98, 0.97, 2560 0.99, 0.95, 0.98, 4096 0.96, 0.97, 0.96, 5000 0.95, 1.00,
  /// 0.98, 8192 with eight and four 0.98 and 0.96, 10000 0.99 and 0.98, 12288 0.88 and 0.91, 16384 0.98
  /// twice.)
  template <class Problem>
  static void run_widened(const Kokkos::Cuda& exec, const Problem& problem) {
    using Plan = RowInRegistersPlan<Problem>;
    const index_type columns = problem.geometry.columns;
    if (columns <= 3072) {
      launch<3, false, 256, 4>(exec, problem, columns, 3 * Plan::width);
    } else if (columns <= 5 * 256 * Plan::width) {
      launch<8, false, 256, 2>(exec, problem, columns, 8 * Plan::width);
    } else {
      launch<4, false, 512, 2>(exec, problem, columns, 4 * Plan::width);
    }
  }

  /// Packed rows of whole vectors that are written in more bytes than they have. (Fraction of a copy of what
  /// has to move, bfloat16 to float on one H200, with three, six and eight vectors a thread: 2048 columns
  /// 0.99, 0.98, 0.96, 4096 1.00, 0.97, 0.97, 5000 0.90, 0.98, 0.98, 8192 0.97 and 0.96 with the last two,
  /// 11000 0.97 twice, 12288 0.95 twice, 16384 0.97 with eight; squares with a factor and a causal mask 2048
  /// 0.90, 0.92, 0.94, 4096 0.83, 0.94, 0.93, 8192 0.95 and 0.94, 12288 0.95 twice.)
  template <class Problem>
  static void run_widened_vectors(const Kokkos::Cuda& exec, const Problem& problem, index_type vectors) {
    if constexpr (!may_drop_ends<Problem>) {
      if (vectors <= 512) return launch<3, false, 256, 4>(exec, problem, vectors, 3);
    }
    if (vectors <= 6 * 256) {
      launch<6, false, 256, 3>(exec, problem, vectors, 6);
    } else {
      launch<8, false, 256, 2>(exec, problem, vectors, 8);
    }
  }

  /// Packed rows of which the device has all at once, in threads with two vectors each, which take less time
  /// than those with more; whether they are. (Microseconds in a CUDA graph on one H200, as many rows are
  /// dealt and so, 1, 32, 132 and 264 rows: bfloat16 2048 columns 1.61 and 1.30, 1.77 and 1.45, 1.79
  /// and 1.52, 1.94 and 1.73, 6144 2.35 and 1.65, 2.47 and 1.83, 2.55 and 2.08, 3.19 and 2.55, 4097 2.66
  /// and 1.92, 2.73 and 2.08, 2.82 and 2.19, 3.23 and 2.61, 528 x 4096 3.18 and 2.74; to float 4097 3.13
  /// and 2.03, 264 rows 3.67 and 3.03, but 32 x 12288 3.09 and 3.25; with a factor 6144 2.54 and 1.95, 264
  /// rows 3.47 and 3.04, but 132 x 16384 3.84 and 4.19; with a mask 2048 3.39 and 1.55, 16384 3.76 and 3.21,
  /// with a factor and a causal mask 2048 3.63 and 1.68, 8192 3.63 and 2.39.)
  template <bool irregular, class Problem>
  static bool launch_few(const Kokkos::Cuda& exec, const Problem& problem, index_type vectors) {
    using Transform = typename Problem::Transform;
    constexpr int room = 1024;  // for threads, on each multiprocessor
    constexpr bool is_slow_otherwise = irregular || has_packed_mask<Transform> || may_drop_ends<Problem> ||
                                       std::is_same_v<Transform, BoundIdentity>;
    constexpr int most_threads = !irregular && widens_rows<Problem> ? 512 : is_slow_otherwise ? room : 768;
    const int threads = RowInRegistersPlan<Problem>::threads_of_block(vectors, 2);
    if (threads > most_threads) return false;
    const index_type rows = problem.geometry.rows,
                     at_once = static_cast<index_type>(exec.cuda_device_prop().multiProcessorCount) *
                               (room / threads);
    // `reserve` launches over no rows: that loads this kernel, too.
    if (rows <= at_once) launch<2, irregular, room, 1>(exec, problem, vectors, 2);
    return rows > 0 && rows <= at_once;
  }

  /// Packed rows of whole vectors.
  template <class Problem>
  static void run_vectors(const Kokkos::Cuda& exec, const Problem& problem, index_type vectors) {
    using Plan = RowInRegistersPlan<Problem>;
    using Transform = typename Problem::Transform;
    if constexpr (widens_rows<Problem>) {
      if (problem.operation != Operation::logsumexp) return run_widened_vectors(exec, problem, vectors);
    }
    if constexpr (is_packed_and_may_end<Problem>) {
      // Rows that end early want more blocks, though threads have to spill for them. (Squares with a factor
      // and a causal mask, fraction of a copy of what is kept and all of y, as others are dealt and so: 2048
      // columns 0.82 and 0.95, 2056 0.78 and 0.855, 2560 0.82 and 0.93, 3000 0.82 and 0.865, 4096 0.83 and
      // 0.93, 5120 0.88 and 0.90, 6400 0.83 and 0.905, 8192 0.90 and 0.93, 9216 0.82 and 0.90, 16384 0.895
      // and 0.93, log_softmax much the same; with a mask besides 2048 0.80 and 0.88, 4096 0.82 and 0.875,
      // 8192 0.815 and 0.89, 16384 0.77 and 0.92. Where all is kept 2048 0.93 and 0.99, 3000 0.92 and 0.985,
      // 4096 0.92 and 0.98, others within 0.01.)
      if (vectors <= 1024 && Plan::five_fit_better(vectors)) {
        launch<5, false, 256, 5>(exec, problem, vectors, 5);
      } else {
        launch<8, false, 256, 4>(exec, problem, vectors, 8);
      }
    } else {
      // (Fraction of a copy with four, five and eight, bfloat16 on one H200, mean of softmax, log_softmax,
      // and softmax with a factor, with a causal mask that keeps all besides, and with a temperature: 2056
      // columns 0.86, 0.975, 0.90, 2568 0.93, 0.93, 0.96, 3072 0.99, 0.99, 1.00, 4096 0.99, 1.00, 0.99,
      // 4104 0.885, 0.99, 0.97, 5128 0.90, 0.945, 1.00, 6400 0.90, 0.995, 1.00, 7168 0.935, 0.99, 0.99,
      // 7936 0.97, 0.95, 0.99, 8192 0.97, 0.96, 0.98, but softmax alone 1.00, 0.98, 0.98; 8200 five and
      // eight 0.95, 0.935, 9216 0.99, 0.96.)
      constexpr bool is_identity = std::is_same_v<Transform, BoundIdentity>,
                     masks = has_packed_mask<Transform>;
      const bool is_power_of_two = (vectors & (vectors - 1)) == 0;
      // Of rows that are only read nothing else has to be held. (Logsumexp of bfloat16, fraction of reading
      // at a copy's speed, with five or eight in three blocks and so: 10000 columns 0.84 and 0.995, 12288
      // 0.96 and 1.06.)
      if (is_read_in_slices<Problem> && problem.operation == Operation::logsumexp) {
        launch<8, false, 256, 4>(exec, problem, vectors, 8);
      } else if (is_power_of_two && !masks && vectors <= (is_identity ? 1024 : 512)) {
        launch<4, false, 256, 4>(exec, problem, vectors, 4);
      } else if (Plan::five_fit_better(vectors)) {
        launch<5, false, 256, 4>(exec, problem, vectors, 5);
      } else if (masks && vectors <= 512) {
        // (512 MB with a temperature and a mask, softmax and log_softmax, with four vectors and with eight in
        // three and in four blocks: 2048 columns 0.875 and 0.87, 0.94 twice, 0.99 twice, 4096 0.96 and 0.89,
        // 1.00 and 0.99, 1.00 twice, 8192 0.96 and 0.94, 1.01 and 1.00, 0.99 twice, 16384 0.86 and 0.89, 1.01
        // and 1.00, 0.99 twice; with a mask alone 1.00 to 1.07 all, but 16384 1.02 and 0.98, 1.00 twice, 0.99
        // twice.)
        launch<8, false, 256, 4>(exec, problem, vectors, 8);
      } else {
        const bool is_near_l2 = vectors > 1024 && !comes_from_memory(problem);
        if (is_near_l2) launch_long_near_l2(exec, problem, vectors);
        // `reserve` launches over no rows: that loads both kernels, which a capture could not do.
        if (!is_near_l2 || problem.geometry.rows == 0) launch<8, false, 256, 3>(exec, problem, vectors, 8);
      }
    }
  }

  /// Of a few waves of blocks more are to be there at once. (Fraction of a copy, one H200, with eight vectors
  /// a thread in three and in four blocks of 256 threads and with four in three blocks of 512: bfloat16 1024
  /// x 16384 0.966, 1.006 and 0.99, log_softmax 0.93, 0.99 and 0.96, 2048 x 16384 0.945, 0.976 and 0.966,
  /// 4096 x 16384 0.968, 0.972 twice, 1170 x 14336 0.915, 0.95 and 0.97, 1366 x 12288 0.95, 0.98 and 1.01;
  /// half 1024 x 16384 0.93, 1.00 and 0.975, 1366 x 12288 0.93, 0.97 and 1.01; with a temperature 1024 x
  /// 16384 0.92, 0.97 and 0.94, with a mask 0.90, 0.93 and 0.945; but 1 GiB of 16384 columns 0.978, 0.973 and
  /// 0.98. With a transform one more kernel would be compiled for each.)
  template <class Problem>
  static void launch_long_near_l2(const Kokkos::Cuda& exec, const Problem& problem, index_type vectors) {
    if constexpr (std::is_same_v<typename Problem::Transform, BoundIdentity>) {
      if (vectors < 2048) return launch<4, false, 512, 3>(exec, problem, vectors, 4);
    }
    launch<8, false, 256, 4>(exec, problem, vectors, 8);
  }

  /// Packed rows that begin anywhere. Seven vectors a thread are as many as four blocks of 256 threads have
  /// registers for, and what is under way at once is what counts; but five or six where these leave fewer of
  /// the registers empty. (Fraction of a copy with five, six and seven, bfloat16 with a factor on one H200:
  /// 2801 columns 0.89, 0.97, 0.95, 3201 0.91, 0.90, 0.98, 3801 0.98, 0.96, 0.96, 4301 0.94, 0.98, 0.98.)
  template <class Problem>
  static void run_anywhere(const Kokkos::Cuda& exec, const Problem& problem, index_type vectors) {
    const auto room = [&](int n) { return RowInRegistersPlan<Problem>::room(vectors, n); };
    if (8 * room(5) <= 7 * room(7) && room(5) <= room(6)) {
      launch<5, true, 192, 5>(exec, problem, vectors, 5);
    } else if (8 * room(6) <= 7 * room(7)) {
      launch<6, true, 192, 5>(exec, problem, vectors, 6);
    } else {
      launch<7, true, 320, 3>(exec, problem, vectors, 7);
    }
  }

  /// Rows that are no whole vectors.
  template <class Problem>
  static void run_other_lengths(const Kokkos::Cuda& exec, const Problem& problem) {
    using Plan = RowInRegistersPlan<Problem>;
    const index_type columns = problem.geometry.columns;
    if constexpr (may_be_by_address<Problem>) {
      const index_type vectors = RegistersOf<Problem, 1, true>::vectors_of_row(columns);
      // (Fraction of a copy with five, six and eight vectors a thread, bfloat16 with a mask on one H200: 2047
      // columns 0.88, 0.84 and 0.79, 4097 0.90, 0.95 and 0.86, 8191 0.85, 0.94 and 0.92, 16381 with six and
      // eight 0.875 and 0.82; with four or three less.)
      if (Plan::threads_of_block(vectors, 6) < Plan::threads_of_block(vectors, 5)) {
        launch_logits<6, 352, 2>(exec, problem, vectors);
      } else {
        launch_logits<5, 192, 4>(exec, problem, vectors);
      }
    } else {
      constexpr int vectors = Plan::interleaved_vectors, elements = Plan::interleaved_elements;
      if constexpr (Plan::may_stage) {
        using Reduce = ReduceWarps<typename Problem::Acc>;
        const int threads = Plan::threads_of_block(columns, elements);
        const index_type image_bytes = bytes_of_staged<typename Problem::Out>(columns);
        if (columns <= 256 * elements ? launch_staged<&staged_row_kernel<vectors, 256, 3, Reduce, Problem>>(
                                            exec, name, threads, 1, image_bytes, problem)
                                      : launch_staged<&staged_row_kernel<vectors, 512, 2, Reduce, Problem>>(
                                            exec, name, threads, 1, image_bytes, problem))
          return;
      }
      if (columns <= 256 * elements) {
        launch_256<vectors, true>(exec, problem, elements);
      } else {
        launch<vectors, true, 512, 2>(exec, problem, columns, elements);
      }
    }
  }

  template <int vectors, int most_threads, int least_blocks, class Problem>
  static void launch_logits(const Kokkos::Cuda& exec, const Problem& problem, index_type vectors_of_row) {
    if constexpr (RowInRegistersPlan<Problem>::may_stage) {
      using Registers = RegistersOf<Problem, vectors, true>;
      const int threads = RowInRegistersPlan<Problem>::threads_of_block(vectors_of_row, vectors);
      if (launch_staged<&staged_logits_kernel<vectors, 0, most_threads, least_blocks, false, Problem>,
                        &staged_logits_kernel<vectors, 0, most_threads, least_blocks, true, Problem>>(
              exec, name, threads, 1, Registers::image_bytes(threads), problem))
        return;
    }
    launch<vectors, true, most_threads, least_blocks>(exec, problem, vectors_of_row, vectors);
  }

  template <class Problem>
  static bool has_rows_in_turn(const Problem& problem) {
    using Registers = RegistersOf<Problem, 8, false>;
    const RowGeometry& g = problem.geometry;
    const RowAlignment alignment = RowAlignment::of(problem);
    return g.rows > 0 && g.rank == 1 && g.columns % (32 * Registers::count) == 0 && alignment.x % 16 == 0 &&
           (problem.operation == Operation::logsumexp || alignment.y % Registers::store_bytes == 0) &&
           !comes_from_memory(problem) && problem.transform.has_rows_alike() &&
           stage_takes_neighbours<Registers::width>(problem.transform.at_row(0));
  }

  /// (1024 rows of 8192 columns of float in L2 on one H200, microseconds by this kernel and by
  /// block_per_row_kernel: bias and GELU 18.6 and 20.4, a normalizer and a scale 17.4 and 21.9; 32768 rows,
  /// from memory: 590 and 542, 592 and 594.)
  template <int vectors, class Problem>
  static void launch_in_turn(const Kokkos::Cuda& exec, const Problem& problem) {
    using Registers = RegistersOf<Problem, vectors, false>;
    const auto threads = static_cast<int>(problem.geometry.columns / Registers::count);
    const index_type at_once =
        static_cast<index_type>(exec.cuda_device_prop().multiProcessorCount) * 512 / std::max(32, threads);
    for_operation(problem, [&](auto is_softmax) {
      launch_rows_kernel<&rows_in_turn_kernel<decltype(is_softmax)::value, vectors, 256, 2, Problem>,
                         Registers>(exec, name, std::min(problem.geometry.rows, at_once),
                                    std::max(32, threads), 0, problem);
    });
  }

  /// Floats without a transform may have two vectors a thread, or four, in as few registers as many blocks
  /// have: what comes from memory wants 64 KB under way on a multiprocessor, in as many rows as are that.
  /// (One H200, softmax and log_softmax, fraction of a copy of 1 GiB, with eight, four and two vectors: 1536
  /// columns 0.981 and 0.981, 0.984 and 0.983, 0.987 and 0.989, 2048 0.966 and 0.969, 0.967 and 0.968, 0.968
  /// twice, 2572 0.975 and 0.973, 0.993 and 0.998, 0.972 and 0.944, 3072 0.977 and 0.973, 0.983 and 0.979,
  /// 0.990 and 0.994, 4096 0.963 and 0.965, 0.974 and 0.976, 0.981 and 0.987, 5120 0.963 and 0.967, 0.982 and
  /// 0.981, 0.973 and 0.955, 6144 0.961 and 0.962, 0.967 and 0.969, 0.861 and 0.827, 8192 0.964 and 0.977,
  /// 0.966 twice, 0.936 and 0.900; 12288 0.959 and 0.973, with four 0.747 twice. logsumexp, on one H100, 4096
  /// with eight and two 1.023 and 1.014, 6144 1.027 and 0.837.)
  template <class Problem>
  static constexpr bool has_plain_floats =
      adds_vectors_exactly<RegistersOf<Problem, 8, false>, ReduceWarps<typename Problem::Acc>>&&
          std::is_same_v<typename Problem::Transform, BoundIdentity>;

  /// Floats, for others were not measured. Not with a causal mask, which has less to read; nor with what is
  /// known at run time alone, for the compiler's time.
  template <class Problem>
  static constexpr bool may_fill_vectors =
      std::is_same_v<typename Problem::In, float>&& std::is_same_v<typename Problem::Out, float> &&
      !is_known_at_run_time<typename Problem::Transform> && !may_drop_ends<Problem>;

  /// Launches block_per_filled_row_kernel where that is faster; whether. (Fraction of a copy, softmax and
  /// log_softmax of floats on one H200, by block_per_row_kernel and so. 1 GiB, in blocks of up to 768
  /// threads: 7168 columns 0.978 and 0.985, 0.980 and 0.985, 8192 0.967 and 0.973, 0.970 and 0.974, 9216
  /// 0.958 and 0.990, 0.968 and 0.991, 10000 0.950 and 0.978, 0.957 and 0.980, 12288 0.956 and 0.973, 0.962
  /// and 0.973, in which of 1024 8192 have 0.969 and 0.971, 10000 0.967 twice; in blocks of 1024 16384 0.956
  /// and 0.976, 0.962 and 0.976. 32 MB, in blocks of 1024: 4096 1.058 and 1.083, 1.047 and 1.084, 8192 1.025
  /// and 1.048, 1.022 and 1.049, 12288 0.952 and 1.004, 0.961 and 1.014, 16384 0.935 and 0.968, 0.951 and
  /// 0.966. With a transform, softmax of 1 GiB: a factor, a bias and a mask 10000 0.905 and 1.015, 12288
  /// 0.859 and 1.023, a bias for all rows 0.953 and 0.968. Of 32 MB, 16384 columns: a bias 0.937 and 0.967,
  /// but a factor 0.957 and 0.930, GELU 0.903 and 0.850.)
  template <class Problem>
  static bool launch_filled_rows(const Kokkos::Cuda& exec, const Problem& problem) {
    if constexpr (!may_fill_vectors<Problem>) {
      return false;
    } else if constexpr (has_plain_floats<Problem>) {
      const bool writes_rows = problem.operation != Operation::logsumexp;
      return launch_filled<true, 4, 768>(exec, problem, writes_rows) ||
             launch_filled<true, 4, 1024>(exec, problem, true) ||
             launch_filled<false, 4, 1024>(exec, problem, true);
    } else {
      constexpr bool has_operands = operands_of<typename Problem::Transform> != 0;
      return launch_filled<true, 8, 512>(exec, problem, true) ||
             launch_filled<false, 8, 512>(exec, problem, has_operands || problem.geometry.columns <= 12288);
    }
  }
  template <bool from_memory, int vectors, int most_threads, class Problem>
  static bool launch_filled(const Kokkos::Cuda& exec, const Problem& problem, bool pays) {
    using Registers = RegistersOf<Problem, vectors, false>;
    const RowGeometry& g = problem.geometry;
    const int threads = RowInRegistersPlan<Problem>::threads_of_block(g.columns, Registers::count);
    if (threads > most_threads) return false;
    const RowAlignment alignment = RowAlignment::of(problem);
    const bool fills =
        g.rank <= 1 && g.columns > (vectors - 1) * Registers::width * threads && alignment.x % 16 == 0 &&
        (problem.operation == Operation::logsumexp || alignment.y % Registers::store_bytes == 0);
    // `reserve` launches over no rows: that loads the kernel, which a capture could not do.
    if (g.rows > 0 && !(fills && pays && comes_from_memory(problem) == from_memory)) return false;
    for_operation(problem, [&](auto is_softmax) {
      launch_rows_kernel<&block_per_filled_row_kernel<decltype(is_softmax)::value, from_memory, vectors,
                                                      most_threads, 2, Problem>,
                         Registers>(exec, name, g.rows, threads, 0, problem);
    });
    return g.rows > 0;
  }

  /// use(whether it is softmax, as a type).
  template <class Problem, class Use>
  static void for_operation(const Problem& problem, const Use& use) {
    if (problem.operation == Operation::softmax) {
      use(std::true_type{});
    } else {
      use(std::false_type{});
    }
  }

  /// Blocks of at most 256 threads: four on a multiprocessor where rows come from L2, three where they come
  /// from memory and more would be in each other's way. (Fraction of a copy with three and four, float on one
  /// H200: 64 MB of 4096 columns 0.947 and 0.959, 256 MB 0.959 and 0.961; 1 GiB of 8192 columns 0.973 and
  /// 0.963, of 8193 0.959 and 0.935.) Four, too, where memory is fast, for softmax of rows that end early.
  /// (Squares with a factor and a causal mask, of a copy of what is kept and all of y: 2048 columns 0.916 and
  /// 0.925, 4096 0.905 and 0.917, 6144 0.88 and 0.91, 8192 0.885 and 0.927; log_softmax of 4096 0.91 and
  /// 0.89, 8192 0.90 twice; one H100 2048 0.974 and 0.953, 8192 0.967 and 0.958.)
  template <int vectors, bool irregular, class Problem>
  static void launch_256(const Kokkos::Cuda& exec, const Problem& problem, index_type columns_of_thread) {
    const RowGeometry& g = problem.geometry;
    const bool end_early = !irregular && std::is_same_v<typename Problem::In, float> &&
                           problem.operation == Operation::softmax &&
                           drops_ends(problem.transform, g.columns);
    const bool from_memory =
        comes_from_memory(problem) && !(end_early && has_fast_memory(exec.cuda_device()));
    // `reserve` launches over no rows: that loads the other kernel, too, which a capture could not do.
    if (g.rows == 0 || from_memory)
      launch<vectors, irregular, 256, 3>(exec, problem, g.columns, columns_of_thread);
    if (g.rows == 0 || !from_memory)
      launch<vectors, irregular, 512, 2>(exec, problem, g.columns, columns_of_thread);  // four of 256 threads
  }

  template <int vectors, bool irregular, int most_threads, int least_blocks, class Problem>
  static void launch(const Kokkos::Cuda& exec, const Problem& problem, index_type columns,
                     index_type columns_of_thread) {
    using Registers = RegistersOf<Problem, vectors, irregular>;
    using Reduce = ReduceWarps<typename Problem::Acc>;
    const int threads = RowInRegistersPlan<Problem>::threads_of_block(columns, columns_of_thread);
    launch_rows_kernel<&block_per_row_kernel<vectors, irregular, most_threads, least_blocks, Reduce, Problem>,
                       Registers>(exec, name, problem.geometry.rows, threads, Registers::image_bytes(threads),
                                  problem);
  }
};

}  // namespace KokkosSoftmax::impl

#endif
