// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// CUDA kernels that hold a row in registers: read once, written once. warp_per_row: a part of a warp or a
/// warp a row, several rows a block; of a few rows, each in the warps of a block. block_per_row: a block a
/// row.

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
template <class Problem, class Registers, class Threads, class Reduce, class Store>
__device__ __forceinline__ void softmax_in_registers(Registers& row, const Threads& threads,
                                                     const Problem& problem, typename Problem::Out* lse,
                                                     bool writes_lse, const Reduce& reduce,
                                                     const Store& store) {
  using Acc = typename Problem::Acc;
  using Out = typename Problem::Out;
  constexpr int vectors = Registers::vectors, width = Registers::width;
  const Operation operation = problem.operation;
  const auto columns = static_cast<int>(problem.geometry.columns);
  Acc max;
  if constexpr (Registers::packed) {
    using Pair = PackedPair<typename Problem::In>;
    const auto larger = [](unsigned a, unsigned b) { return Pair::maximum(a, b); };
    constexpr int pairs = width / 2;
    unsigned m[pairs];
#pragma unroll
    for (int i = 0; i < pairs; ++i) m[i] = row.held[i];
#pragma unroll
    for (int k = 1; k < vectors; ++k) {
      if (Registers::skips(k, columns, threads)) break;
#pragma unroll
      for (int i = 0; i < pairs; ++i) m[i] = larger(m[i], row.held[k * pairs + i]);
    }
    const unsigned pair = fold_accumulators<pairs>(m, larger);
    max = Kokkos::fmax(Kokkos::fmax(Pair::low(pair), -largest_v<Acc>), Pair::high(pair));  // passes over NaN
  } else {
    Acc m[width];
#pragma unroll
    for (int i = 0; i < width; ++i) m[i] = Kokkos::fmax(row.held[i], -largest_v<Acc>);  // passes over NaN
#pragma unroll
    for (int k = 1; k < vectors; ++k) {
      if (Registers::skips(k, columns, threads)) break;
#pragma unroll
      for (int i = 0; i < width; ++i) m[i] = Kokkos::fmax(row.held[k * width + i], m[i]);
    }
    max = fold_accumulators<width>(m, [](Acc a, Acc b) { return Kokkos::fmax(a, b); });
  }
  max = reduce.max(max);
  max = max > largest_v<Acc> ? largest_v<Acc> : max;
  // Summed vector by vector, so that one warp's vectors can be in several warps (ReduceVectors).
  const auto add = [](Acc a, Acc b) { return a + b; };
  const RowExponential<Out, Acc> exponential(max);
  if constexpr (!Registers::packed) {
    if (exponential.subtracts_first()) {
#pragma unroll
      for (auto& value : row.held) value -= max;
    }
  }
  const bool keeps_exponentials = !Registers::packed && operation == Operation::softmax;
  Acc of_vector[vectors];
#pragma unroll
  for (int k = 0; k < vectors; ++k) of_vector[k] = 0;
#pragma unroll
  for (int k = 0; k < vectors; ++k) {
    if (Registers::skips(k, columns, threads)) break;
    Acc terms[width];
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const Acc value = row.value(k * width + i);
      terms[i] = exponential(value);
      if constexpr (!Registers::packed) row.held[k * width + i] = keeps_exponentials ? terms[i] : value;
    }
    of_vector[k] = fold_accumulators<width>(terms, add);
  }
  const Acc uncorrected_sum = reduce.sum(fold_accumulators<vectors>(of_vector, add));
  if constexpr (Registers::packed) row.hide_from_optimizer();
  const Acc sum = keeps_exponentials ? uncorrected_sum : uncorrected_sum * exponential.correction;
  const RowResult<Acc> result(operation, MaxSum<Acc>{max, sum});
  if (operation == Operation::logsumexp) {
    if (writes_lse) *lse = store_as<Out>(result.logsumexp());
  } else if (operation == Operation::log_softmax) {
    const Acc left = !Registers::packed && exponential.subtracts_first() ? Acc(0) : max;
    store([&](Acc value) { return (value - left) - result.log_sum; });
  } else if constexpr (Registers::packed) {
    // The sum goes into the exponent: 16 bits do not show its rounding.
    const float log2_of_sum = sum == 0.0f ? 0.0f : sum < infinity_v<float> ? log2f(sum) : nan_v<float>;
    store([&](Acc value) { return ex2_approx_ftz(fmaf(value - max, 1.4426950408889634f, -log2_of_sum)); });
  } else {
    store([&](Acc exponential_of_value) { return exponential_of_value * result.factor; });
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

/// Across the warps of a block. A warp joins its lanes, then all join the warps.
template <class Acc>
struct ReduceWarps {
  struct Shared {
    Acc maxima[32];
    ExactSum<Acc> sums[32];
  };
  Shared& shared;
  ReduceGroup<Acc, 32> warp;

  __device__ Acc max(Acc value) const {
    value = warp.max(value);
    const int lane = threadIdx.x % 32;
    if (lane == 0) shared.maxima[threadIdx.x / 32] = value;
    __syncthreads();
    return warp.max(lane < blockDim.x / 32 ? shared.maxima[lane] : -largest_v<Acc>);
  }
  __device__ Acc sum(Acc value) const {
    const ExactSum<Acc> of_warp = warp.exact_sum(value);
    const int lane = threadIdx.x % 32;
    if (lane == 0) shared.sums[threadIdx.x / 32] = of_warp;
    __syncthreads();
    ExactSum<Acc> all = lane < blockDim.x / 32 ? shared.sums[lane] : ExactSum<Acc>::of(Acc(0));
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) all.join(all.from_lane_xor(mask));
    return all.rounded();
  }
};

/// Across warps that have one vector a lane of what a single warp would have `vectors` of: to the same bits
/// as that one.
template <class Acc, int vectors>
struct ReduceVectors {
  struct Shared {
    Acc maxima[vectors];
    Acc sums[vectors][32];
  };
  Shared& shared;
  ReduceGroup<Acc, 32> warp;

  __device__ Acc max(Acc value) const {
    value = warp.max(value);
    if (threadIdx.x % 32 == 0) shared.maxima[threadIdx.x / 32] = value;
    __syncthreads();
    Acc of[vectors];
#pragma unroll
    for (int k = 0; k < vectors; ++k) of[k] = shared.maxima[k];
    return fold_accumulators<vectors>(of, [](Acc a, Acc b) { return Kokkos::fmax(a, b); });
  }
  __device__ Acc sum(Acc value) const {
    shared.sums[threadIdx.x / 32][threadIdx.x % 32] = value;
    __syncthreads();
    Acc of[vectors];
#pragma unroll
    for (int k = 0; k < vectors; ++k) of[k] = shared.sums[k][threadIdx.x % 32];
    return warp.sum(fold_accumulators<vectors>(of, [](Acc a, Acc b) { return a + b; }));
  }
};

/// Blocks of 128 threads that a multiprocessor shall have room for: as many registers as a row takes, and few
/// beside them.
template <class Registers>
inline constexpr int least_blocks_of_warps = sizeof(Registers) <= 32 && sizeof(typename Registers::Acc) == 4
                                                 ? 12
                                             : sizeof(Registers) <= 64  ? 8
                                             : sizeof(Registers) <= 128 ? 6
                                                                        : 3;

template <int vectors, int group, class Problem>
__global__ void __launch_bounds__(128, least_blocks_of_warps<RegistersOf<Problem, vectors>>)
    warp_per_row_kernel(const __grid_constant__ Problem problem) {
  using Registers = RegistersOf<Problem, vectors>;
  const index_type position = static_cast<index_type>(blockIdx.x) * (128 / group) + threadIdx.x / group;
  const bool exists = position < problem.geometry.rows;
  grid_dependency_wait();
  if (problem.geometry.rows == 0) return;
  // Lanes past the last row go along with that one: the warp's shuffles want them.
  const RowGeometry::Row where = problem.geometry.row(exists ? position : problem.geometry.rows - 1);
  const index_type columns = problem.geometry.columns;
  extern __shared__ __align__(16) char images_of_rows[];
  const LanesOfRow<group> threads{static_cast<int>(threadIdx.x % group),
                                  images_of_rows + threadIdx.x / group * Registers::image_bytes(group)};
  Registers row;
  row.load(problem.x + where.x_offset, columns, threads, problem.transform.at_row(where.index));
  softmax_in_registers(row, threads, problem, problem.y + where.y_offset, exists && threads.index == 0,
                       ReduceGroup<typename Problem::Acc, group>{}, [&](const auto& output) {
                         row.store(problem.y + where.y_offset, columns, exists, threads, output);
                       });
}

/// `least_blocks` on a multiprocessor. `Reduce`: ReduceWarps, or ReduceVectors, which has a row of a warp in
/// more warps.
template <int vectors, int most_threads, int least_blocks, class Reduce, class Problem>
__global__ void __launch_bounds__(most_threads, least_blocks)
    block_per_row_kernel(const __grid_constant__ Problem problem) {
  using Registers = RegistersOf<Problem, vectors>;
  extern __shared__ __align__(16) char images_of_rows[];
  __shared__ typename Reduce::Shared shared;
  grid_dependency_wait();
  if (problem.geometry.rows == 0) return;
  const RowGeometry::Row where = problem.geometry.row(blockIdx.x);
  const BlockOfRow threads{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), images_of_rows};
  Registers row;
  row.load(problem.x + where.x_offset, problem.geometry.columns, threads,
           problem.transform.at_row(where.index));
  softmax_in_registers(row, threads, problem, problem.y + where.y_offset, threadIdx.x == 0,
                       Reduce{shared, {}}, [&](const auto& output) {
                         row.store(problem.y + where.y_offset, problem.geometry.columns, true, threads,
                                   output);
                       });
}

/// How a row is spread over registers; by length and type alone, because that decides the bits.
template <class In>
struct RowInRegistersPlan {
  static constexpr int width = 16 / sizeof(In);
  /// 16-byte vectors a thread in rows that fill them: 32 values of float or of 16 bits, 16 of double. (Longer
  /// rows of 16 bits have 8 of them: 16384 columns of bfloat16 on one H200 0.98 of a copy, 0.92 by
  /// grid_pipelined_rows.)
  static constexpr int most_vectors = sizeof(In) == 2 ? 4 : 8;
  static constexpr index_type longest_of_warp = 32 * most_vectors * width;
  static constexpr index_type longest = sizeof(In) == 2 ? 256 * 8 * width : 512 * most_vectors * width;

  /// Whether so few vectors a thread are filled well by rows of so many. Else threads have up to 8: five of
  /// them at least, so that few threads hold nothing. (65 columns of float on one H200: 0.34 of a copy with
  /// 17 of 32 vectors filled.)
  static bool fills(index_type vectors_of_row, int vectors, int lanes) {
    return vectors_of_row <= vectors * lanes && 8 * vectors_of_row > 7 * vectors * lanes;
  }

  template <int vectors>
  static int threads_of_block(index_type columns) {
    const index_type threads = (columns + vectors * width - 1) / (vectors * width);
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

/// Launches one of these kernels. `image_bytes` of shared memory where rows of y are not aligned to
/// `store_bytes`.
template <auto kernel, class Problem>
void launch_rows_kernel(const Kokkos::Cuda& exec, const char* name, index_type blocks, int threads,
                        int store_bytes, int image_bytes, const Problem& problem) {
  const RowGeometry& g = problem.geometry;
  auto address = reinterpret_cast<std::uintptr_t>(problem.y);
  for (int d = 0; d < g.rank; ++d) address |= static_cast<std::uintptr_t>(g.y_stride[d]) * sizeof(*problem.y);
  const bool is_aligned = address % static_cast<std::uintptr_t>(store_bytes) == 0;
  const bool writes_rows = problem.operation != Operation::logsumexp;
  const int bytes = is_aligned || !writes_rows ? 0 : image_bytes;
  constexpr int always_allowed = 40 * 1024;  // beside what a kernel declares
  if (bytes > always_allowed) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "cudaFuncSetAttribute");
  }
  static const bool early = has_grid_dependency_wait(kernel);
  launch_labelled(exec, kernel_label(problem.operation, name), [&] {
    launch_kernel(exec, kernel, early, static_cast<unsigned>(std::max<index_type>(1, blocks)), threads,
                  static_cast<std::size_t>(bytes), problem);
  });
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
    } else if (Plan::fills(vectors, 2, 8)) {
      launch<2, 8>(exec, problem);
    } else if (Plan::fills(vectors, 2, 16)) {
      launch<2, 16>(exec, problem);
    } else if (Plan::fills(vectors, 2, 32)) {
      launch<2, 32>(exec, problem);
    } else if (Plan::fills(vectors, 4, 32)) {
      launch_warp_or_warps<4>(exec, problem);
    } else if (vectors <= 8 * 4) {
      launch<8, 4>(exec, problem);
    } else if (vectors <= 8 * 8) {
      launch<8, 8>(exec, problem);
    } else if (vectors <= 8 * 16) {
      launch<8, 16>(exec, problem);
    } else if constexpr (Plan::most_vectors > 4) {
      launch_warp_or_warps<8>(exec, problem);
    }
  }

  template <class Exec, class Problem>
  static void reserve(const Exec&, const Problem&) {}

 private:
  /// Rows that are faster, each in as many warps as a lane would have vectors, than each in a warp.
  /// (1000 columns of float in a CUDA graph on one H200: 1 row 1.6 and 2.2 us, 512 rows 2.98 and 3.02, 1024
  /// rows 5.2 and 3.6.)
  static constexpr index_type most_rows_in_warps = 512;

  template <int vectors, class Problem>
  static void launch_warp_or_warps(const Kokkos::Cuda& exec, const Problem& problem) {
    if (problem.geometry.rows > most_rows_in_warps) {
      launch<vectors, 32>(exec, problem);
      return;
    }
    // `reserve` launches over no rows: that loads the other kernel, too, which a capture could not do.
    if (problem.geometry.rows == 0)
      (void)has_grid_dependency_wait(&warp_per_row_kernel<vectors, 32, Problem>);
    using Registers = RegistersOf<Problem, 1>;
    using Reduce = ReduceVectors<typename Problem::Acc, vectors>;
    launch_rows_kernel<&block_per_row_kernel<1, vectors * 32, 4, Reduce, Problem>>(
        exec, name, problem.geometry.rows, vectors * 32, Registers::store_bytes,
        Registers::image_bytes(vectors * 32), problem);
  }
  template <int vectors, int group, class Problem>
  static void launch(const Kokkos::Cuda& exec, const Problem& problem) {
    using Registers = RegistersOf<Problem, vectors>;
    constexpr int rows_of_block = 128 / group;
    launch_rows_kernel<&warp_per_row_kernel<vectors, group, Problem>>(
        exec, name, (problem.geometry.rows + rows_of_block - 1) / rows_of_block, 128, Registers::store_bytes,
        rows_of_block * Registers::image_bytes(group), problem);
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
    using In = typename Problem::In;
    using Plan = RowInRegistersPlan<In>;
    constexpr int vectors = Plan::most_vectors;
    constexpr bool packed = RegistersOf<Problem, vectors>::packed;
    const index_type columns = problem.geometry.columns;
    if constexpr (sizeof(In) == 2) {
      const int threads = Plan::template threads_of_block<vectors>(columns);
      if (threads <= 256 && Plan::fills((columns + Plan::width - 1) / Plan::width, vectors, threads)) {
        launch<vectors, 256, 4>(exec, problem);
      } else {
        launch<8, 256, packed ? 3 : 2>(exec, problem);
      }
    } else if (columns <= 256 * vectors * Plan::width) {
      launch<vectors, 256, 3>(exec, problem);
    } else {
      launch<vectors, 512, 2>(exec, problem);
    }
  }

  template <class Exec, class Problem>
  static void reserve(const Exec&, const Problem&) {}

 private:
  template <int vectors, int most_threads, int least_blocks, class Problem>
  static void launch(const Kokkos::Cuda& exec, const Problem& problem) {
    using Registers = RegistersOf<Problem, vectors>;
    using Reduce = ReduceWarps<typename Problem::Acc>;
    const int threads = RowInRegistersPlan<typename Problem::In>::template threads_of_block<vectors>(
        problem.geometry.columns);
    launch_rows_kernel<&block_per_row_kernel<vectors, most_threads, least_blocks, Reduce, Problem>>(
        exec, name, problem.geometry.rows, threads, Registers::store_bytes, Registers::image_bytes(threads),
        problem);
  }
};

}  // namespace KokkosSoftmax::impl

#endif
