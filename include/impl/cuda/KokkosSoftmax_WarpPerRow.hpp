// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The CUDA kernel for short rows: a part of a warp or a warp a row, several rows a block; of a few rows,
/// each in the warps of a block.

#ifndef KOKKOSSOFTMAX_WARPPERROW_HPP
#define KOKKOSSOFTMAX_WARPPERROW_HPP

#include <impl/cuda/KokkosSoftmax_StagedRows.hpp>

#include <string_view>

namespace KokkosSoftmax::impl {

template <int vectors, bool irregular, int group, class Problem>
__global__ void __launch_bounds__(
    128, least_blocks_of_warps<Problem, RegistersOf<Problem, vectors, irregular>, irregular, group>)
    warp_per_row_kernel(const __grid_constant__ Problem problem) {
  using Registers = RegistersOf<Problem, vectors, irregular>;
  constexpr bool may_be_longer =
      group == 32 || ((has_many_vectors_a_lane<Problem> || (widens_rows<Problem> && is_packed<Problem>)) &&
                      vectors * Registers::width * group >= 1024);
  const index_type position = static_cast<index_type>(blockIdx.x) * (128 / group) + threadIdx.x / group;
  const bool exists = position < problem.geometry.rows;
  grid_dependency_wait();
  if (problem.geometry.rows == 0) return;
  // Lanes past the last row go along with that one: the warp's shuffles want them.
  const RowGeometry::Row where = problem.geometry.row(exists ? position : problem.geometry.rows - 1);
  extern __shared__ __align__(16) char images_of_rows[];
  const LanesOfRow<group> threads{static_cast<int>(threadIdx.x % group),
                                  images_of_rows + threadIdx.x / group * Registers::image_bytes(group)};
  // (Not where a block has a row: longer rows gain little, and those of bfloat16 with a transform lost 3 in
  // 100. Nor where ends are dropped: 128 columns with a factor and a causal mask lost 2 to 6 in 100.)
  if constexpr (!is_packed_and_may_end<Problem>) {
    if (const int gap = gap_to_read(problem); gap > 0)
      read_ends_of_row(problem.y + where.y_offset, static_cast<int>(problem.geometry.columns), gap,
                       threads.rank() == 0, threads.rank() == 1);
  }
  Registers row;
  softmax_in_registers(
      row, threads, problem, problem.y + where.y_offset, exists && threads.index == 0,
      ReduceGroup<typename Problem::Acc, group, may_be_longer>{},
      [&](bool looks) { return load_row(problem, where, row, threads, looks); },
      [&](const auto& output) { store_row(problem, where, position, row, threads, output); });
}

/// Whether rows are of double, without a transform.
template <class Problem>
inline constexpr bool has_plain_doubles = std::is_same_v<std::remove_const_t<typename Problem::In>, double>&&
    std::is_same_v<typename Problem::Transform, BoundIdentity>;

struct WarpPerRow {
  static constexpr const char* name = "warp_per_row";

  template <class Exec, class Problem>
  static constexpr bool supports = row_in_registers_supports<Exec, Problem>;

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec&, const Problem& problem) {
    return refuse_row_in_registers(problem, 1, RowInRegistersPlan<Problem>::longest_of_warp, "",
                                   "a row does not fit the registers of a warp");
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    using Plan = RowInRegistersPlan<Problem>;
    const index_type columns = problem.geometry.columns;
    if constexpr (is_packed<Problem>) {
      // `reserve` launches over no rows: that loads the kernel for other addresses, too, which a capture
      // could not do.
      const bool both = problem.geometry.rows == 0 && columns % Plan::width == 0;
      if (both || !lies_anywhere(problem)) {
        const index_type vectors = columns / Plan::width;
        if constexpr (widens_rows<Problem>) {
          run_widened(exec, problem, vectors);
        } else if (!launch_few<false>(exec, problem, vectors)) {
          if constexpr (has_many_vectors_a_lane<Problem>) {
            run_many_vectors(exec, problem, vectors);
          } else {
            run_vectors(exec, problem, vectors);
          }
        }
      }
      if (both || lies_anywhere(problem)) {
        const index_type vectors = RegistersOf<Problem, 1, true>::vectors_of_row(columns);
        if (!launch_few<true>(exec, problem, vectors)) run_anywhere(exec, problem, vectors);
      }
    } else if (!Plan::interleaves(columns)) {
      if constexpr (has_plain_doubles<Problem>) {
        run_doubles(exec, problem, columns / Plan::width);
      } else if constexpr (may_be_by_address<Problem>) {
        run_logits_of_vectors(exec, problem, columns / Plan::width);
      } else {
        if constexpr (widens_rows<Problem>) {
          if (problem.operation != Operation::logsumexp)
            return run_widened(exec, problem, columns / Plan::width);
        }
        run_vectors(exec, problem, columns / Plan::width);
      }
    } else if constexpr (may_be_by_address<Problem>) {
      run_logits(exec, problem, RegistersOf<Problem, 1, true>::vectors_of_row(columns));
    } else if constexpr (has_plain_doubles<Problem>) {
      with_share<Share<3, 8>, Share<4, 8>, Share<5, 8>, Share<3, 16>, Share<4, 16>, Share<5, 16>,
                 Share<3, 32>, Share<4, 32>, Share<5, 32>, Share<6, 32>, Share<9, 32>>(
          ceil_div(columns, Plan::interleaved_width),
          [&]<class S>(S) { launch_share<S, true>(exec, problem); });
    } else {
      constexpr int vectors = Plan::interleaved_vectors, elements = Plan::interleaved_elements;
      // Of rows that are only read a lane has more. (One H200, logsumexp of float, as a fraction of reading
      // at a copy's speed, where they are dealt as others are and so: 129 columns 0.83 and 0.93, 161 0.92 and
      // 0.97, 193 0.855 and 1.00, 257 0.95 and 1.01, 289 0.74 and 0.98, 385 0.86 and 1.035, 513 0.98 and
      // 1.04.)
      if constexpr (std::is_same_v<typename Problem::In, float> &&
                    std::is_same_v<typename Problem::Transform, BoundIdentity>) {
        if (problem.operation == Operation::logsumexp && columns > 8 * elements / 3 &&
            columns <= 16 * elements) {
          return columns <= 8 * elements ? launch<vectors, true, 8>(exec, problem)
                                         : launch<vectors, true, 16>(exec, problem);
        }
      }
      if (columns <= 8 * elements / 3) {
        launch<vectors / 3, true, 8>(exec, problem);
      } else if (columns <= 16 * elements / 3) {
        launch<vectors / 3, true, 16>(exec, problem);
      } else if (columns <= 16 * elements / 2) {
        launch<vectors, true, 16>(exec, problem);
      } else {
        if constexpr (Plan::may_stage) {
          using Reduce = ReduceGroup<typename Problem::Acc, 32>;
          // `reserve` launches over no rows: that loads the other kernels, too, which a capture could not do.
          const index_type rows = problem.geometry.rows;
          if ((rows == 0 || rows > most_rows_in_warps) &&
              launch_staged<&staged_row_kernel<vectors, 128, 3, Reduce, Problem>>(
                  exec, name, 128, 4, bytes_of_staged<typename Problem::Out>(columns), problem) &&
              rows > 0)
            return;
        }
        launch_warp_or_warps<vectors, true>(exec, problem);
      }
    }
  }

  template <class Exec, class Problem>
  static void reserve(const Exec&, const Problem&) {}

 private:
  /// Rows that are faster, each in as many warps as a lane would have vectors, than each in a warp.
  /// (1000 columns of float in a CUDA graph on one H200: 1 row 1.6 and 2.2 us, 512 rows 2.98 and 3.02, 1024
  /// rows 5.2 and 3.6.)
  static constexpr index_type most_rows_in_warps = 512;

  /// Packed rows that are so few, with a thread for each vector, but short ones and those of which lanes have
  /// no more than two; whether they are. (In such a graph, microseconds, as many rows are dealt and so, 1, 32
  /// and 512 rows: bfloat16 96 columns 1.41 and 1.27, 1.60 and 1.43, 1.66 and 1.68, 129 2.27 and 1.62, 2.50
  /// and 1.78, 2.58 and 1.96, 768 1.87 and 1.29, 2.06 and 1.45, 2.14 and 1.79, 1001 2.93 and 1.63, 3.25
  /// and 1.71, 3.35 and 2.09, 33 1.86 and 1.67, 2.04 and 1.77, 2.11 and 1.95, but 64 1.16 and 1.27, 1.36
  /// and 1.44, 1.42 and 1.67; to float 257 3.04 and 1.56, 3.19 and 1.67, 3.29 and 1.99; with a factor
  /// 256 1.70 and 1.40, 1.87 and 1.56, 1.94 and 1.80; with a mask 257 3.28 and 2.04, 3.64 and 2.14, 3.81
  /// and 2.43.) Those that begin anywhere are so few for longer. (1056 x 257 2.70 and 2.37, 1056 x 1001 3.49
  /// and 2.71, but 2112 x 257 2.78 and 3.12.)
  template <bool irregular, class Problem>
  static bool launch_few(const Kokkos::Cuda& exec, const Problem& problem, index_type vectors) {
    using Plan = RowInRegistersPlan<Problem>;
    const bool has_short_lanes =
        vectors <= (irregular ? 4 : 8) ||
        (!irregular && only_masks<typename Problem::Transform> && problem.operation == Operation::softmax &&
         (Plan::fills(vectors, 2, 8) || Plan::fills(vectors, 2, 16) || Plan::fills(vectors, 2, 32)));
    if (has_short_lanes) return false;
    const index_type rows = problem.geometry.rows,
                     multiprocessors = exec.cuda_device_prop().multiProcessorCount;
    const int threads = Plan::threads_of_block(vectors, 1);
    const bool few = rows <= most_rows_in_warps ||
                     (irregular && rows <= 8 * multiprocessors && rows * threads <= 1024 * multiprocessors);
    // `reserve` launches over no rows: that loads this kernel, too.
    if (few) launch_warps<8, irregular>(exec, problem, threads);
    return rows > 0 && few;
  }

  template <class Problem>
  static void run_vectors(const Kokkos::Cuda& exec, const Problem& problem, index_type vectors) {
    using Plan = RowInRegistersPlan<Problem>;
    // Of rows that are only read a lane has more: blocks would come to an end faster than others begin. (One
    // H200, GB/s of logsumexp of float, where each lane has two vectors and so: 64 columns 3870 and 4270, 128
    // 3780 and 4280, 256 4000 and 4370; bfloat16 the same within 1 %.)
    constexpr bool may_have_more =
        !is_packed<Problem> && std::is_same_v<typename Problem::Transform, BoundIdentity>;
    const bool has_more = may_have_more && problem.operation == Operation::logsumexp && vectors > 2 * 4;
    if constexpr (may_have_more) {
      if (has_more && vectors <= 4 * 4) {
        launch<4, false, 4>(exec, problem);
        return;
      }
    }
    const auto fills = [&](int of_lane, int lanes) {
      return !has_more && Plan::fills(vectors, of_lane, lanes);
    };
    if constexpr (is_packed<Problem>) {
      // What a thread does once for a row is shared by four vectors, unless two hold exponentials. (Fraction
      // of a copy of 512 MB and 1 GiB of bfloat16 on one H200, two and four: 128 columns with a factor 0.94
      // and 0.99, log_softmax 0.92 and 0.99, 256 with a causal mask 0.90 and 0.98, with a temperature 0.88
      // and 0.94, log_softmax 0.92 and 0.99, 512 with a temperature 0.86 and 0.93; but 64, two lanes a row,
      // with a factor 0.945 and 0.88.)
      if (!only_masks<typename Problem::Transform> || problem.operation != Operation::softmax) {
        if (fills(4, 4)) return launch<4, false, 4>(exec, problem);
        if (fills(4, 8)) return launch<4, false, 8>(exec, problem);
        if (fills(4, 16)) return launch<4, false, 16>(exec, problem);
      }
    }
    if (vectors <= 2 * 4) {
      launch<2, false, 4>(exec, problem);
    } else if (fills(2, 8)) {
      launch<2, false, 8>(exec, problem);
    } else if (fills(2, 16)) {
      launch<2, false, 16>(exec, problem);
    } else if (fills(2, 32)) {
      launch<2, false, 32>(exec, problem);
    } else if (fills(4, 32)) {
      launch_warp_or_warps<4, false>(exec, problem);
    } else if (vectors <= 8 * 4) {
      launch<8, false, 4>(exec, problem);
    } else if (vectors <= 8 * 8) {
      launch<8, false, 8>(exec, problem);
    } else if (vectors <= 8 * 16 - (is_packed<Problem> ? 2 : 0)) {  // see ReduceGroup::sum_of_units
      launch<8, false, 16>(exec, problem);
    } else {
      launch_warp_or_warps<8, false>(exec, problem);
    }
  }

  /// `vectors` each of so many lanes.
  template <int vectors_, int lanes_, bool may_be_longer = false>
  struct Share {
    static constexpr int vectors = vectors_, lanes = lanes_;
    static constexpr index_type longest =
        vectors * lanes - (lanes == 16 && vectors == 8 && !may_be_longer ? 2 : 0);  // see ReduceGroup
  };
  /// Calls `launch` with the first of these, in rising order, that takes a row of so many vectors.
  template <class First, class... Others, class Launch>
  static void with_share(index_type vectors_of_row, const Launch& launch) {
    if constexpr (sizeof...(Others) != 0) {
      if (vectors_of_row > First::longest) {
        with_share<Others...>(vectors_of_row, launch);
        return;
      }
    }
    launch(First());
  }

  /// Rows that are written in more bytes than they have: few vectors a lane, which become twice as many; but
  /// four of what a causal mask drops parts of, and eight of rows that are only read. (512 MB of bfloat16 to
  /// float on one H200, fraction of a copy of softmax and log_softmax. Packed, with the lanes of run_vectors
  /// and so: 32 columns 0.80 and 0.77, 0.99 twice, 72 0.92 and 0.93, 0.98 twice, 160 0.93 twice, 0.97 twice,
  /// 448 0.93 and 0.94, 0.98 twice, 768 0.94 twice, 0.97 twice; longer ones with up to eight vectors a lane
  /// of a warp and with two in more warps 1024 0.96 and 0.97, 0.99 and 1.00, 2000 0.96 twice, 0.99 twice.
  /// Squares with a factor and a causal mask, with the lanes of others and with four vectors: 128 columns
  /// 0.80, 0.88, 256 0.81, 0.92, 512 0.83, 0.93, 1024 0.78, 0.94, 2000 0.74, 0.93. As logits, two factors,
  /// with one, two or four vectors a lane and with three, too: 96 columns 0.90 and 0.88, 0.99 and 0.98, 320
  /// 0.83 twice, 0.98 twice, 768 0.91 and 0.90, 0.99 twice.)
  template <class Problem>
  static void run_widened(const Kokkos::Cuda& exec, const Problem& problem, index_type vectors) {
    const auto launch_of = [&]<class S>(S) { launch_share<S, false>(exec, problem); };
    if constexpr (is_packed<Problem>) {
      if (problem.operation == Operation::logsumexp)
        return with_share<Share<4, 2>, Share<8, 2>, Share<8, 4>, Share<8, 8>, Share<8, 16, true>,
                          Share<5, 32>, Share<6, 32>, Share<8, 32>>(vectors, launch_of);
    }
    if constexpr (is_packed_and_may_end<Problem>) {
      with_share<Share<2, 2>, Share<3, 2>, Share<4, 4>, Share<4, 8>, Share<4, 16>, Share<4, 32>, Share<5, 32>,
                 Share<6, 32>, Share<8, 32>>(vectors, launch_of);
    } else {
      if constexpr (is_packed<Problem>) {
        if (vectors > 3 * 32) return run_widened_in_warps(exec, problem, vectors);
      }
      with_share<Share<2, 2>, Share<3, 2>, Share<2, 4>, Share<3, 4>, Share<2, 8>, Share<3, 8>, Share<2, 16>,
                 Share<3, 16>, Share<2, 32>, Share<3, 32>, Share<4, 32>>(vectors, launch_of);
    }
  }
  template <class Problem>
  static void run_widened_in_warps(const Kokkos::Cuda& exec, const Problem& problem, index_type vectors) {
    const index_type rows = problem.geometry.rows;
    const auto launch_of = [&]<int of_thread>(std::integral_constant<int, of_thread>) {
      launch_warps<8, false, of_thread>(exec, problem,
                                        RowInRegistersPlan<Problem>::threads_of_block(vectors, of_thread));
    };
    // `reserve` launches over no rows: that loads both kernels, which a capture could not do.
    if (rows <= most_rows_in_warps) launch_of(std::integral_constant<int, 1>());
    if (rows == 0 || rows > most_rows_in_warps) launch_of(std::integral_constant<int, 2>());
  }

  /// Packed rows, see has_many_vectors_a_lane. (1 GiB of bfloat16 on one H200, with the lanes of run_vectors
  /// and so. Squares with a factor and a causal mask, fraction of a copy of what is kept and all of y: 64
  /// columns 0.64 and 0.70, 96 0.64 and 0.75, 128 0.77 and 0.84, 256 0.785 and 0.91, 512 0.80 and 0.915, 768
  /// 0.85 and 0.92, 1000 0.79 and 0.89, 1024 0.81 and 0.94, 1536 0.82 and 0.92; with a mask besides 256 0.84
  /// and 0.89, 1024 0.85 and 0.92, 1536 0.815 and 0.92. Where all is kept 128 columns 0.905 and 0.96, 256
  /// 0.925 and 0.98, 512 0.94 and 0.98, 1024 0.87 and 0.97, 1536 0.91 and 0.98, but 64 0.82 and 0.79, for
  /// which there are tiles then. 512 MB with a temperature and a mask, softmax and log_softmax: 64 0.78 twice
  /// and 0.92, 128 0.91 twice and 0.97 and 0.945, 256 0.96 and 0.93, 0.98 and 0.97, 512 1.00 and 0.96, 1.00
  /// twice, 1024 1.01 and 0.97, 1.00 twice.)
  /// Rows that the device has threads for all at once want to be short of work, not of threads. (Squares with
  /// a factor and a causal mask in a CUDA graph on one H200, microseconds, a row in the lanes of many rows
  /// and so: 512 x 256 2.3, in four lanes of eight vectors, and 1.8, 1024 x 256 3.4 and 2.2, 4096 x 256 3.5
  /// and 2.7, 1024 x 512 3.4 and 2.2, 2048 x 512 3.5 and 2.7, 8192 x 512 4.9 and 5.0, 1024 x 1024 3.6
  /// and 2.55, 2048 x 1024 4.0 and 3.35, 4096 x 1024 5.3 and 4.9, 8192 x 1024 7.8 and 8.6; in a thread for
  /// each vector 2048 x 512 2.9, 4096 x 256 4.2.)
  template <class Problem>
  static void run_many_vectors(const Kokkos::Cuda& exec, const Problem& problem, index_type vectors) {
    const index_type rows = problem.geometry.rows,
                     threads_at_once =
                         1024 * static_cast<index_type>(exec.cuda_device_prop().multiProcessorCount);
    const int threads = RowInRegistersPlan<Problem>::threads_of_block(vectors, 1);
    const auto launch_of = [&]<class S>(S) { launch<S::vectors, false, S::lanes>(exec, problem); };
    // `reserve` launches over no rows: that loads all of these kernels, which a capture could not do.
    if (vectors > 16 && rows * threads <= threads_at_once / 2) {
      launch_warps<8, false>(exec, problem, threads);
      if (rows > 0) return;
    }
    if (rows * threads <= 2 * threads_at_once) {
      with_share<Share<2, 4>, Share<4, 4>, Share<4, 8>, Share<4, 16>, Share<4, 32>, Share<5, 32>,
                 Share<6, 32>, Share<8, 32>>(vectors, launch_of);
      if (rows > 0) return;
    }
    with_share<Share<4, 2>, Share<4, 4>, Share<8, 4>, Share<8, 8>, Share<8, 16, true>, Share<5, 32>,
               Share<6, 32>, Share<8, 32>>(vectors, launch_of);
  }

  /// Logits of 16-bit rows of whole vectors: two to four a lane, which share what is done once, and leave few
  /// registers empty. (512 MB of bfloat16 on one H200, fraction of a copy, two and four: a bias for all rows
  /// 128 columns 0.85 and 0.94, 256 0.84 and 0.96, 512 0.86 and 0.97, GELU 0.72 and 0.80, a factor, a bias, a
  /// mask and a causal mask, which spill, 1.02 and 1.00; but 64, two lanes a row, 0.88 and 0.82, 0.73 and
  /// 0.83, 1.00 and 0.85. 256 MB with a bias as large as x, of lengths that had up to eight, most of them
  /// empty, and so: 32 columns 0.75 and 1.04, 96 0.67 and 1.02, 320 0.93 and 1.03.)
  template <class Problem>
  static void run_logits_of_vectors(const Kokkos::Cuda& exec, const Problem& problem, index_type vectors) {
    with_share<Share<2, 1>, Share<2, 2>, Share<3, 2>, Share<2, 4>, Share<3, 4>, Share<4, 4>, Share<3, 8>,
               Share<4, 8>, Share<3, 16>, Share<4, 16>, Share<3, 32>, Share<4, 32>>(
        vectors, [&]<class S>(S) { launch_share<S, false>(exec, problem); });
  }

  /// Doubles in whole vectors: what is done once for a row by each lane takes long, which is why a lane of a
  /// row that is only read has up to eight, and else three to five, of which few stay empty.
  template <class Problem>
  static void run_doubles(const Kokkos::Cuda& exec, const Problem& problem, index_type vectors) {
    const auto launch = [&]<class S>(S) { launch_share<S, false>(exec, problem); };
    if (problem.operation == Operation::logsumexp) {
      with_share<Share<3, 4>, Share<4, 4>, Share<8, 4>, Share<8, 8>, Share<8, 16>, Share<6, 32>,
                 Share<8, 32>>(vectors, launch);
    } else {
      with_share<Share<2, 4>, Share<3, 4>, Share<4, 4>, Share<5, 4>, Share<3, 8>, Share<4, 8>, Share<5, 8>,
                 Share<3, 16>, Share<4, 16>, Share<5, 16>, Share<3, 32>, Share<4, 32>, Share<5, 32>,
                 Share<6, 32>, Share<8, 32>>(vectors, launch);
    }
  }

  /// (Bfloat16 to float, 512 MB on one H200, softmax, fraction of a copy, with the lanes of rows of 16 bits
  /// and so: 33 columns 0.55 and 0.83, 47 0.74 and 0.81, 81 0.90 and 0.92, 129 0.84 and 0.91, 201 0.92 and
  /// 0.97, 450 0.92 and 0.99, 1001 0.93 and 0.98; logsumexp, fraction of reading at a copy's speed, as logits
  /// and so 33 0.25 and 0.47, 97 0.35 and 0.69, 201 0.45 and 0.76, 401 0.47 and 0.77, 1001 0.78 and 0.85,
  /// 2001 0.63 and 0.84.)
  template <class Problem>
  static void run_anywhere(const Kokkos::Cuda& exec, const Problem& problem, index_type vectors) {
    const auto launch = [&]<class S>(S) { launch_share<S, true>(exec, problem); };
    if constexpr (widens_rows<Problem>) {
      if (problem.operation == Operation::logsumexp) {
        with_share<Share<4, 2>, Share<8, 2>, Share<5, 4>, Share<8, 4>, Share<5, 8>, Share<8, 8>, Share<5, 16>,
                   Share<8, 16>, Share<5, 32>, Share<6, 32>, Share<7, 32>, Share<8, 32>>(vectors, launch);
      } else {
        with_share<Share<3, 2>, Share<4, 2>, Share<4, 4>, Share<5, 4>, Share<3, 8>, Share<4, 8>, Share<5, 8>,
                   Share<4, 16>, Share<5, 16>, Share<5, 32>, Share<6, 32>, Share<7, 32>, Share<8, 32>>(
            vectors, launch);
      }
    } else {
      with_share<Share<5, 4>, Share<8, 4>, Share<5, 8>, Share<8, 8>, Share<5, 16>, Share<8, 16>, Share<5, 32>,
                 Share<6, 32>, Share<7, 32>, Share<8, 32>>(vectors, launch);
    }
  }
  template <class S, bool irregular, class Problem>
  static void launch_share(const Kokkos::Cuda& exec, const Problem& problem) {
    if constexpr (S::lanes == 32) {
      launch_warp_or_warps<S::vectors, irregular>(exec, problem);
    } else {
      launch<S::vectors, irregular, S::lanes>(exec, problem);
    }
  }

  template <class Problem>
  static void run_logits(const Kokkos::Cuda& exec, const Problem& problem, index_type vectors) {
    with_share<Share<3, 4>, Share<5, 4>, Share<3, 8>, Share<5, 8>, Share<3, 16>, Share<5, 16>, Share<3, 32>,
               Share<4, 32>, Share<5, 32>>(vectors, [&]<class S>(S) { launch_logits<S>(exec, problem); });
  }

  /// Operands of a few rows, and those that do not lie side by side, are read element by element.
  template <class S, class Problem>
  static void launch_logits(const Kokkos::Cuda& exec, const Problem& problem) {
    if constexpr (!RowInRegistersPlan<Problem>::may_stage) {
      launch_share<S, true>(exec, problem);
    } else {
      using Registers = RegistersOf<Problem, S::vectors, true>;
      constexpr int least_blocks = least_blocks_of_warps<Problem, Registers, true, S::lanes>;
      const index_type rows = problem.geometry.rows;
      // `reserve` launches over no rows: that loads the other kernel, too, which a capture could not do.
      if ((rows == 0 || rows > most_rows_in_warps) &&
          launch_staged<&staged_logits_kernel<S::vectors, S::lanes, 128, least_blocks, false, Problem>,
                        &staged_logits_kernel<S::vectors, S::lanes, 128, least_blocks, true, Problem>>(
              exec, name, 128, 128 / S::lanes, Registers::image_bytes(S::lanes), problem) &&
          rows > 0)
        return;
      constexpr int threads = 160;
      using OfOneVector = RegistersOf<Problem, 1, true>;
      launch_rows_kernel<
          &block_per_row_kernel<1, true, threads, 4, ReduceWarps<typename Problem::Acc>, Problem>,
          OfOneVector>(exec, name, rows, (S::vectors * S::lanes + 31) / 32 * 32,
                       OfOneVector::image_bytes(threads), problem);
    }
  }

  template <int vectors, bool irregular, class Problem>
  static void launch_warp_or_warps(const Kokkos::Cuda& exec, const Problem& problem) {
    if (problem.geometry.rows > most_rows_in_warps) {
      launch<vectors, irregular, 32>(exec, problem);
      return;
    }
    // `reserve` launches over no rows: that loads the other kernel, too, which a capture could not do.
    if (problem.geometry.rows == 0)
      (void)has_grid_dependency_wait(&warp_per_row_kernel<vectors, irregular, 32, Problem>);
    launch_warps<vectors, irregular>(exec, problem, vectors * 32);
  }
  /// Each thread has a vector, or more of packed rows, where a lane of a single warp would have `vectors`.
  template <int vectors, bool irregular, int of_thread = 1, class Problem>
  static void launch_warps(const Kokkos::Cuda& exec, const Problem& problem, int threads) {
    using Registers = RegistersOf<Problem, of_thread, irregular>;
    using Acc = typename Problem::Acc;
    using Reduce = std::conditional_t<Registers::by_address, ReduceWarps<Acc>, ReduceVectors<Acc, vectors>>;
    constexpr int most_threads = Registers::by_address ? 256 : vectors * 32;
    launch_rows_kernel<&block_per_row_kernel<of_thread, irregular, most_threads, 4, Reduce, Problem>,
                       Registers>(exec, name, problem.geometry.rows, threads, Registers::image_bytes(threads),
                                  problem);
  }
  template <int vectors, bool irregular, int group, class Problem>
  static void launch(const Kokkos::Cuda& exec, const Problem& problem) {
    using Registers = RegistersOf<Problem, vectors, irregular>;
    constexpr int rows_of_block = 128 / group;
    launch_rows_kernel<&warp_per_row_kernel<vectors, irregular, group, Problem>, Registers>(
        exec, name, (problem.geometry.rows + rows_of_block - 1) / rows_of_block, 128,
        rows_of_block * Registers::image_bytes(group), problem);
  }
};

}  // namespace KokkosSoftmax::impl

#endif
