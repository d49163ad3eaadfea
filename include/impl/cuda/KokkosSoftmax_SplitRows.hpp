// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The CUDA kernel for a few long rows, at the lowest latency (compute capability 9.0): all slices of all
/// rows at once, each in the registers of a block or of several small ones, which tell each other their (max,
/// sum) through L2. All blocks are resident (the launch is cooperative), so none waits for one that cannot
/// start.

#ifndef KOKKOSSOFTMAX_SPLITROWS_HPP
#define KOKKOSSOFTMAX_SPLITROWS_HPP

#include <impl/cuda/KokkosSoftmax_SlicedRows.hpp>

#include <string_view>

namespace KokkosSoftmax::impl {

template <int pieces>
struct SplitRowsShape {
  static constexpr int warps = ReductionPlan::shares / pieces;
  static constexpr int threads = warps * 32;
};

/// Slices of a row that small blocks can have: that many fit their shared memory, and polling a word for each
/// of 8 times as many warps pays no longer.
inline constexpr int most_slices_of_small_blocks = 64;

template <int pieces, class Problem>
__global__ void __launch_bounds__(SplitRowsShape<pieces>::threads)
    split_rows_kernel(const __grid_constant__ Problem problem, const __grid_constant__ ReductionPlan plan,
                      const __grid_constant__ CudaWorkspace workspace) {
  using Acc = typename Problem::Acc;
  using Out = typename Problem::Out;
  constexpr int warps = SplitRowsShape<pieces>::warps;
  __shared__ PartialSoftmax<Acc> of_part[pieces == 1 ? warps : most_slices_of_small_blocks];
  __shared__ std::uint32_t shared_epoch;
  __shared__ SlicedRowResult<Problem> shared_result;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    // One word for both, so that who counts the last block knows that all have read the epoch.
    const unsigned long long before = atomicAdd(&workspace.header->epoch_and_arrivals, 1ull);
    const auto epoch = static_cast<std::uint32_t>(before >> 32);
    if (static_cast<std::uint32_t>(before) == gridDim.x - 1) {
      workspace.header->epoch_and_arrivals =
          static_cast<unsigned long long>(CudaWorkspace::epoch_after(epoch)) << 32;
    }
    shared_epoch = epoch;
  }
  const bool exists = problem.geometry.rows > 0;
  const int piece = static_cast<int>(blockIdx.x % pieces);
  const index_type slice_of_all = blockIdx.x / pieces;
  const index_type position = slice_of_all / plan.slices;
  const index_type slice = slice_of_all - position * plan.slices;
  const RowGeometry::Row where = problem.geometry.row(exists ? position : 0);
  const index_type first = slice * plan.slice_columns;
  const int columns = exists ? static_cast<int>(min(static_cast<index_type>(plan.slice_columns),
                                                    problem.geometry.columns - first))
                             : 0;
  const int share = piece * warps + warp;
  with_quarters<typename Problem::In>(columns, [&](auto quarters) {
    using Registers = SliceRegisters<Problem, decltype(quarters)::value>;
    constexpr bool keeps_exponentials = SlicedRowResult<Problem>::keeps_exponentials;
    Registers mine;
    mine.load(problem.x + where.x_offset + first, columns, share, lane, problem.transform.at_row(where.index),
              first);
    [[maybe_unused]] const bool softmax = problem.operation == Operation::softmax;
    const PartialSoftmax<Acc> found =
        mine.reduce([&]([[maybe_unused]] int i, Acc, [[maybe_unused]] Acc exponential) {
          if constexpr (keeps_exponentials) {
            if (softmax) mine.held[i] = exponential;
          }
        });
    if (pieces == 1 && lane == 0) of_part[warp] = found;
    __syncthreads();
    workspace.clear_before_first_epoch(shared_epoch);
    const std::uint32_t tag = CudaWorkspace::tag_of(shared_epoch);
    if constexpr (pieces == 1) {
      if (warp == 0) {
        PartialSoftmax<Acc> total = join_lanes<warps>(of_part[lane % warps]);
        if (plan.slices > 1) {
          PartialWords<Acc>* words = workspace.partials<Acc>() + position * plan.slices;
          if (lane == 0 && exists) PartialWords<Acc>::publish(words + slice, total, tag);
          total = collect_slices(words, exists ? plan.slices : 0, tag, lane);
        }
        if (lane == 0) shared_result = {problem.operation, total};
      }
      __syncthreads();
    } else {
      // A word for each warp. Every block joins those of its row, 8 lanes a slice, then the slices.
      PartialWords<Acc>* words = workspace.partials<Acc>() + position * plan.slices * ReductionPlan::shares;
      if (lane == 0 && exists)
        PartialWords<Acc>::publish(words + slice * ReductionPlan::shares + share, found, tag);
      const int count = exists ? static_cast<int>(plan.slices) * ReductionPlan::shares : 0;
      for (int i = threadIdx.x; i < (count + 31) / 32 * 32; i += SplitRowsShape<pieces>::threads) {
        PartialSoftmax<Acc> part = PartialSoftmax<Acc>::none();
        if (i < count) {
          PartialWords<Acc> word = PartialWords<Acc>::load(words + i);
          while (!word.is_of(tag)) word = PartialWords<Acc>::load(words + i);
          part = word.value();
        }
        part = join_lanes<ReductionPlan::shares>(part);
        if (i < count && i % ReductionPlan::shares == 0) of_part[i / ReductionPlan::shares] = part;
      }
      __syncthreads();
      const PartialSoftmax<Acc> total =
          join_slices<Acc>(exists ? plan.slices : 0, lane, [&](index_type i) { return of_part[i]; });
      if (threadIdx.x == 0) shared_result = {problem.operation, total};
      __syncthreads();
    }
    const SlicedRowResult<Problem> result = shared_result;
    if (!exists) return;
    if (problem.operation == Operation::logsumexp) {
      if (slice == 0 && piece == 0 && threadIdx.x == 0)
        problem.y[where.y_offset] = store_as<Out>(result.logsumexp());
      return;
    }
    Out* const y = problem.y + where.y_offset + first;
    const auto write = [&](const auto& output) {
#pragma unroll
      for (int i = 0; i < Registers::steps; ++i) {
        Acc out[Registers::unit];
#pragma unroll
        for (int j = 0; j < Registers::unit; ++j) out[j] = output(mine.value(i * Registers::unit + j));
        store_unit(y, mine.column(i, share, lane), columns, out);
      }
    };
    if constexpr (keeps_exponentials) {
      if (softmax) {
        const Acc factor = result.factor_of_share(found.max);
        write([&](Acc exponential) { return exponential * factor; });
        return;
      }
    }
    result.with_output(write);
  });
}

struct SplitRows {
  static constexpr const char* name = "split_rows";

  template <class Exec, class Problem>
  static constexpr bool supports = sliced_rows_support<Exec, Problem>;

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec& exec, const Problem& problem) {
    const std::string_view layout = refuse_sliced_rows(problem);
    if (!layout.empty()) return layout;
    const ReductionPlan plan = ReductionPlan::of<typename Problem::In>(problem.geometry.columns);
    if (plan.slices > most_slices_of_small_blocks) return "a row has too many slices";
    const CooperativeLimits& device = limits<1>(exec, &split_rows_kernel<1, Problem>);
    if (device.refusal) return device.refusal;
    // What is not faster than by grid_pipelined_rows, or could not be resident.
    if (problem.geometry.rows * plan.slices > most_slices(device))
      return "too many rows for one slice a block";
    return {};
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    const ReductionPlan plan = ReductionPlan::of<typename Problem::In>(problem.geometry.columns);
    // Small blocks on more multiprocessors while these last; which blocks reduce a slice moves no bits.
    const index_type slices = problem.geometry.rows * plan.slices;
    const int multiprocessors = limits<1>(exec, &split_rows_kernel<1, Problem>).multiprocessors;
    if constexpr (sizeof(typename Problem::Acc) == 4) {
      if (plan.slices > 1 && slices * 4 <= most_small_blocks * multiprocessors) {
        launch<4>(exec, problem, plan);
        return;
      }
    }
    launch<1>(exec, problem, plan);
  }

  template <class Exec, class Problem>
  static void reserve(const Exec& exec, const Problem& problem) {
    CudaWorkspace::reserve<typename Problem::Acc>(
        exec, words(problem, ReductionPlan::of<typename Problem::In>(problem.geometry.columns)));
  }

 private:
  /// Blocks of a quarter of a slice on a multiprocessor, at most.
  static constexpr int most_small_blocks = 4;

  static index_type most_slices(const CooperativeLimits& device) {
    return static_cast<index_type>(device.multiprocessors) * device.blocks_a_multiprocessor;
  }

  template <class Problem>
  static index_type words(const Problem& problem, const ReductionPlan& plan) {
    return plan.slices > 1 ? problem.geometry.rows * plan.slices * ReductionPlan::shares : 0;
  }

  template <int pieces, class Kernel>
  static const CooperativeLimits& limits(const Kokkos::Cuda& exec, Kernel kernel) {
    return cooperative_limits(kernel, exec.cuda_device(), SplitRowsShape<pieces>::threads, false);
  }

  template <int pieces, class Problem>
  static void launch(const Kokkos::Cuda& exec, const Problem& problem, const ReductionPlan& plan) {
    const index_type blocks = std::max<index_type>(1, problem.geometry.rows * plan.slices * pieces);
    launch_labelled(exec, kernel_label(problem.operation, name), [&] {
      launch_cooperatively(exec, split_rows_kernel<pieces, Problem>, static_cast<int>(blocks),
                           SplitRowsShape<pieces>::threads, 0, problem, plan,
                           CudaWorkspace::get<typename Problem::Acc>(exec, words(problem, plan)));
    });
  }
};

}  // namespace KokkosSoftmax::impl

#endif
