// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// CUDA kernels that hold a row in registers: read once, written once. warp_per_row: a part of a warp or a
/// warp a row, several rows a block. block_per_row: a block a row.

#ifndef KOKKOSSOFTMAX_ROWINREGISTERS_HPP
#define KOKKOSSOFTMAX_ROWINREGISTERS_HPP

#include <impl/cuda/KokkosSoftmax_RowIO.hpp>

#include <string_view>
#include <type_traits>

namespace KokkosSoftmax::impl {

/// Folds an array into a few interleaved accumulators and these into one. Recursive at the end, not a loop,
/// so that everything stays in registers.
template <int count, class T, class Operation>
__device__ __forceinline__ T fold_accumulators(T* a, const Operation& operation) {
  if constexpr (count == 1) {
    return a[0];
  } else {
#pragma unroll
    for (int i = 0; i < count / 2; ++i) a[i] = operation(a[i], a[i + count / 2]);
    return fold_accumulators<count / 2>(a, operation);
  }
}

/// How a problem's rows are held.
template <class Problem, int vectors>
using RegistersOf = RowRegisters<typename Problem::In, typename Problem::Out, vectors,
                                 is_16_bit_v<typename Problem::In> && is_16_bit_v<typename Problem::Out> &&
                                     std::is_same_v<typename Problem::Transform, BoundIdentity>>;

/// From the logits in the registers of a row's threads to its outputs. `Reduce` gives every thread of the row
/// the maximum and the sum over its threads, in an order that depends on their number alone; `store` is given
/// what makes an output of what the registers hold then.
template <class Problem, class Registers, class Reduce, class Store>
__device__ __forceinline__ void softmax_in_registers(Registers& row, Operation operation,
                                                     typename Problem::Out* lse, bool writes_lse,
                                                     const Reduce& reduce, const Store& store) {
  using Acc = typename Problem::Acc;
  using Out = typename Problem::Out;
  constexpr int count = Registers::count;
  constexpr int chains = count < 8 ? count : 8;
  Acc m[chains];
  Acc max;
  if constexpr (Registers::packed) {
    using Pair = PackedPair<typename Problem::In>;
    constexpr int pair_chains = count / 2 < 4 ? count / 2 : 4;
    unsigned of_pairs[pair_chains];
#pragma unroll
    for (int i = 0; i < pair_chains; ++i) of_pairs[i] = row.held[i];
#pragma unroll
    for (int i = pair_chains; i < count / 2; ++i)
      of_pairs[i % pair_chains] = Pair::maximum(of_pairs[i % pair_chains], row.held[i]);
    const unsigned pair =
        fold_accumulators<pair_chains>(of_pairs, [](unsigned a, unsigned b) { return Pair::maximum(a, b); });
    max = Kokkos::fmax(Kokkos::fmax(Pair::low(pair), -largest_v<Acc>), Pair::high(pair));  // passes over NaN
  } else {
#pragma unroll
    for (int i = 0; i < chains; ++i) m[i] = Kokkos::fmax(row.held[i], -largest_v<Acc>);  // passes over NaN
#pragma unroll
    for (int i = chains; i < count; ++i) m[i % chains] = Kokkos::fmax(row.held[i], m[i % chains]);
    max = fold_accumulators<chains>(m, [](Acc a, Acc b) { return Kokkos::fmax(a, b); });
  }
  max = reduce.max(max);
  max = max > largest_v<Acc> ? largest_v<Acc> : max;
#pragma unroll
  for (int i = 0; i < chains; ++i) m[i] = 0;
  if (Registers::packed || operation == Operation::softmax) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const Acc exponential = exp_for_output<Out>(row.value(i) - max);
      m[i % chains] += exponential;
      if constexpr (!Registers::packed) row.held[i] = exponential;
    }
  } else if constexpr (!Registers::packed) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      row.held[i] -= max;
      m[i % chains] += exp_for_output<Out>(row.held[i]);
    }
  }
  const Acc sum = reduce.sum(fold_accumulators<chains>(m, [](Acc a, Acc b) { return a + b; }));
  const RowResult<Acc> result(operation, MaxSum<Acc>{max, sum});
  if (operation == Operation::logsumexp) {
    if (writes_lse) *lse = store_as<Out>(result.logsumexp());
  } else if constexpr (Registers::packed) {
    if (operation == Operation::softmax) {
      // The sum goes into the exponent: 16 bits do not show its rounding.
      const float log2_of_sum = sum == 0.0f ? 0.0f : sum < infinity_v<float> ? log2f(sum) : nan_v<float>;
      store([&](Acc value) { return ex2_approx_ftz(fmaf(value - max, 1.4426950408889634f, -log2_of_sum)); });
    } else {
      store([&](Acc value) { return result.log_softmax(value); });
    }
  } else {
    if (operation == Operation::softmax) {
#pragma unroll
      for (int i = 0; i < count; ++i) row.held[i] *= result.factor;
    } else {
#pragma unroll
      for (int i = 0; i < count; ++i) row.held[i] -= result.log_sum;
    }
    store([](Acc value) { return value; });
  }
}

template <class Acc, int group>
struct ReduceGroup {
  __device__ Acc max(Acc value) const {
#pragma unroll
    for (int mask = 1; mask < group; mask *= 2) {
      const Acc other = __shfl_xor_sync(0xffffffffu, value, mask);
      value = Kokkos::fmax(value, other);
    }
    return value;
  }
  __device__ ExactSum<Acc> exact_sum(Acc value) const {
    ExactSum<Acc> sum = ExactSum<Acc>::of(value);
#pragma unroll
    for (int mask = 1; mask < group; mask *= 2) sum.join(sum.from_lane_xor(mask));
    return sum;
  }
  __device__ Acc sum(Acc value) const {
    return exact_sum(value).rounded();
  }
};

template <class Acc>
struct ReduceBlock {
  ReduceGroup<Acc, 32> warp;
  Acc* maxima;          ///< [32] in shared memory
  ExactSum<Acc>* sums;  ///< [32]

  __device__ Acc max(Acc value) const {
    value = warp.max(value);
    const int lane = threadIdx.x % 32;
    if (lane == 0) maxima[threadIdx.x / 32] = value;
    __syncthreads();
    return warp.max(lane < blockDim.x / 32 ? maxima[lane] : -largest_v<Acc>);
  }
  __device__ Acc sum(Acc value) const {
    const ExactSum<Acc> of_warp = warp.exact_sum(value);
    const int lane = threadIdx.x % 32;
    if (lane == 0) sums[threadIdx.x / 32] = of_warp;
    __syncthreads();
    ExactSum<Acc> all = lane < blockDim.x / 32 ? sums[lane] : ExactSum<Acc>::of(Acc(0));
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) all.join(all.from_lane_xor(mask));
    return all.rounded();
  }
};

template <int vectors, int group, class Problem>
__global__ void __launch_bounds__(128) warp_per_row_kernel(const __grid_constant__ Problem problem) {
  using Registers = RegistersOf<Problem, vectors>;
  __shared__ __align__(16) char staging[128 * Registers::staging_bytes_a_lane];
  const int group_of_block = threadIdx.x / group;
  const index_type position = static_cast<index_type>(blockIdx.x) * (128 / group) + group_of_block;
  const bool exists = position < problem.geometry.rows;
  // Lanes past the last row go along, with no columns: the warp's shuffles want them.
  const RowGeometry::Row where = problem.geometry.row(exists ? position : 0);
  const index_type columns = exists ? problem.geometry.columns : 0;
  grid_dependency_wait();
  const RowThreads<group> threads{static_cast<int>(threadIdx.x % group), group,
                                  staging + group_of_block * group * Registers::staging_bytes_a_lane};
  Registers row;
  row.load(problem.x + where.x_offset, columns, threads, problem.transform.at_row(where.index));
  softmax_in_registers<Problem>(
      row, problem.operation, problem.y + where.y_offset, exists && threads.index == 0,
      ReduceGroup<typename Problem::Acc, group>{},
      [&](const auto& output) { row.store(problem.y + where.y_offset, columns, threads, output); });
}

template <int vectors, int most_threads, class Problem>
__global__ void __launch_bounds__(most_threads, most_threads == 256
                                                    ? (RegistersOf<Problem, vectors>::packed ? 5
                                                       : sizeof(typename Problem::In) == 2   ? 5
                                                                                             : 3)
                                                    : 2)
    block_per_row_kernel(const __grid_constant__ Problem problem) {
  using Acc = typename Problem::Acc;
  using Registers = RegistersOf<Problem, vectors>;
  extern __shared__ __align__(16) char block_per_row_staging[];
  __shared__ Acc maxima[32];
  __shared__ ExactSum<Acc> sums[32];
  grid_dependency_wait();
  if (problem.geometry.rows == 0) return;
  const RowGeometry::Row where = problem.geometry.row(blockIdx.x);
  const RowThreads<32> threads{
      static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x),
      block_per_row_staging + threadIdx.x / 32 * 32 * Registers::staging_bytes_a_lane};
  Registers row;
  row.load(problem.x + where.x_offset, problem.geometry.columns, threads,
           problem.transform.at_row(where.index));
  softmax_in_registers<Problem>(row, problem.operation, problem.y + where.y_offset, threadIdx.x == 0,
                                ReduceBlock<Acc>{{}, maxima, sums}, [&](const auto& output) {
                                  row.store(problem.y + where.y_offset, problem.geometry.columns, threads,
                                            output);
                                });
}

/// How a row is spread over registers; by length and type alone, because that decides the bits.
template <class In>
struct RowInRegistersPlan {
  static constexpr int width = 16 / sizeof(In);
  /// 16-byte vectors a thread: 32 values of float or of 16 bits, 16 of double.
  static constexpr int most_vectors = sizeof(In) == 2 ? 4 : 8;
  static constexpr index_type longest_of_warp = 32 * most_vectors * width;
  /// Longer rows of 16 bits are faster in slices (16384 columns of bfloat16 on one H200: 0.61 of a copy here,
  /// 0.93 by grid_pipelined_rows).
  static constexpr index_type longest = (sizeof(In) == 2 ? 256 : 512) * most_vectors * width;

  static int threads_of_block(index_type columns) {
    const index_type threads = (columns + most_vectors * width - 1) / (most_vectors * width);
    return static_cast<int>((threads + 31) / 32 * 32);
  }
};

template <class Exec, class Problem>
inline constexpr bool row_in_registers_supports =
    std::is_same_v<Exec, Kokkos::Cuda>&& std::is_trivially_copyable_v<Problem> && sizeof(Problem) < 3800;

template <class Problem>
std::string_view refuse_row_in_registers(const Problem& problem, index_type shortest, index_type longest,
                                         const char* too_short, const char* too_long) {
  const RowGeometry& g = problem.geometry;
  if (problem.axis_is_strided || g.x_column_stride != 1) return "the columns of x are not contiguous";
  if (problem.operation != Operation::logsumexp && g.y_column_stride != 1)
    return "the columns of y are not contiguous";
  if (g.columns < shortest) return too_short;
  if (g.columns > longest) return too_long;
  return {};
}

struct WarpPerRow {
  static constexpr const char* name = "warp_per_row";

  template <class Exec, class Problem>
  static constexpr bool supports = row_in_registers_supports<Exec, Problem>;

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec&, const Problem& problem) {
    return refuse_row_in_registers(problem, 1, RowInRegistersPlan<typename Problem::In>::longest_of_warp, "",
                                   "a row does not fit the registers of a warp");
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    using Plan = RowInRegistersPlan<typename Problem::In>;
    const index_type vectors = (problem.geometry.columns + Plan::width - 1) / Plan::width;
    if (vectors <= 2 * 4) {
      launch<2, 4>(exec, problem);
    } else if (vectors <= 2 * 8) {
      launch<2, 8>(exec, problem);
    } else if (vectors <= 2 * 16) {
      launch<2, 16>(exec, problem);
    } else if (vectors <= 2 * 32) {
      launch<2, 32>(exec, problem);
    } else if (vectors <= 4 * 32 || Plan::most_vectors == 4) {
      launch<4, 32>(exec, problem);
    } else if constexpr (Plan::most_vectors > 4) {
      launch<8, 32>(exec, problem);
    }
  }

  template <class Exec, class Problem>
  static void reserve(const Exec&, const Problem&) {}

 private:
  template <int vectors, int group, class Problem>
  static void launch(const Kokkos::Cuda& exec, const Problem& problem) {
    const index_type blocks =
        std::max<index_type>(1, (problem.geometry.rows + 128 / group - 1) / (128 / group));
    const auto kernel = &warp_per_row_kernel<vectors, group, Problem>;
    static const bool early = has_grid_dependency_wait(kernel);
    launch_labelled(exec, kernel_label(problem.operation, name), [&] {
      launch_kernel(exec, kernel, early, static_cast<unsigned>(blocks), 128, 0, problem);
    });
  }
};

struct BlockPerRow {
  static constexpr const char* name = "block_per_row";

  template <class Exec, class Problem>
  static constexpr bool supports = row_in_registers_supports<Exec, Problem>;

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec&, const Problem& problem) {
    using Plan = RowInRegistersPlan<typename Problem::In>;
    return refuse_row_in_registers(problem, Plan::longest_of_warp + 1, Plan::longest,
                                   "shorter rows have a warp or a part of one",
                                   "a row does not fit the registers of a block");
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    using Plan = RowInRegistersPlan<typename Problem::In>;
    const int threads = Plan::threads_of_block(problem.geometry.columns);
    if (threads <= 256) {
      launch<256>(exec, threads, problem);
    } else {
      launch<512>(exec, threads, problem);
    }
  }

  template <class Exec, class Problem>
  static void reserve(const Exec&, const Problem&) {}

 private:
  template <int most_threads, class Problem>
  static void launch(const Kokkos::Cuda& exec, int threads, const Problem& problem) {
    constexpr int vectors = RowInRegistersPlan<typename Problem::In>::most_vectors;
    using Registers = RegistersOf<Problem, vectors>;
    const auto kernel = &block_per_row_kernel<vectors, most_threads, Problem>;
    static const bool early = has_grid_dependency_wait(kernel);
    const auto blocks = static_cast<unsigned>(std::max<index_type>(1, problem.geometry.rows));
    const std::size_t staging = static_cast<std::size_t>(threads) * Registers::staging_bytes_a_lane;
    launch_labelled(exec, kernel_label(problem.operation, name),
                    [&] { launch_kernel(exec, kernel, early, blocks, threads, staging, problem); });
  }
};

}  // namespace KokkosSoftmax::impl

#endif
