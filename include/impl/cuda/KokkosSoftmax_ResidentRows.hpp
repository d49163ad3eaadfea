// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The softmax of a head's logits on CUDA: block_per_row with as many blocks as stay resident, each of which
/// takes rows in turn and has the next one on its way while it works on one. What a GEMM left in the second
/// level of the cache comes so fast that a wave of blocks, all of which wait, then all compute, then all
/// write, spends most of its time on one of the three; from memory block_per_row is faster. The same bits as
/// block_per_row.

#ifndef KOKKOSSOFTMAX_RESIDENTROWS_HPP
#define KOKKOSSOFTMAX_RESIDENTROWS_HPP

#include <impl/cuda/KokkosSoftmax_RowInRegisters.hpp>

namespace KokkosSoftmax::impl {

template <int vectors, int most_threads, class Problem>
__global__ void __launch_bounds__(most_threads, 512 / most_threads)
    resident_rows_kernel(const __grid_constant__ Problem problem) {
  using Acc = typename Problem::Acc;
  using Registers = RowRegisters<typename Problem::In, typename Problem::Out, vectors>;
  extern __shared__ __align__(16) char resident_rows_staging[];
  __shared__ Acc maxima[32];
  __shared__ ExactSum<Acc> sums[32];
  grid_dependency_wait();
  const RowGeometry& geometry = problem.geometry;
  const int columns = static_cast<int>(geometry.columns);
  const RowThreads<32> threads{
      static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x),
      resident_rows_staging + threadIdx.x / 32 * 32 * Registers::staging_bytes_a_lane};
  index_type position = blockIdx.x;
  if (position >= geometry.rows) return;
  RowGeometry::Row where = geometry.row(position);
  typename Registers::Raw raw;
  Registers::fetch_aligned(problem.x + where.x_offset, columns, threads, raw);
  while (true) {
    Registers row;
    row.take(raw, columns, threads, problem.transform.at_row(where.index));
    typename Problem::Out* y = problem.y + where.y_offset;
    position += gridDim.x;
    const bool more = position < geometry.rows;
    if (more) {
      where = geometry.row(position);
      Registers::fetch_aligned(problem.x + where.x_offset, columns, threads, raw);
    }
    // The two barriers of a row also keep the next row's partial results apart from this one's.
    softmax_in_registers<Problem>(row, problem.operation, y, threadIdx.x == 0,
                                  ReduceBlock<Acc>{{}, maxima, sums});
    row.store(y, columns, threads);
    if (!more) return;
  }
}

struct ResidentRows {
  static constexpr const char* name = "resident_rows";

  template <class Exec, class Problem>
  static constexpr bool supports = row_in_registers_supports<Exec, Problem>;

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec& exec, const Problem& problem) {
    const std::string_view why = BlockPerRow::refuse(exec, problem);
    if (!why.empty()) return why;
    if (problem.operation == Operation::logsumexp) return "it writes rows";
    const auto aligned = [](std::intptr_t bytes) { return bytes % 16 == 0; };
    bool all_aligned = aligned(reinterpret_cast<std::intptr_t>(problem.x));
    for (int d = 0; d < problem.geometry.rank; ++d) {
      all_aligned = all_aligned && aligned(problem.geometry.x_stride[d] *
                                           static_cast<index_type>(sizeof(typename Problem::In)));
    }
    if (!all_aligned) return "the rows of x are not aligned to 16 bytes";
    return {};
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    const int threads = RowInRegistersPlan<typename Problem::In>::threads_of_block(problem.geometry.columns);
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
    using Registers = RowRegisters<typename Problem::In, typename Problem::Out, vectors>;
    const auto kernel = &resident_rows_kernel<vectors, most_threads, Problem>;
    static const bool early = has_grid_dependency_wait(kernel);
    const std::size_t staging = static_cast<std::size_t>(threads) * Registers::staging_bytes_a_lane;
    const index_type resident = static_cast<index_type>(exec.cuda_device_prop().multiProcessorCount) *
                                blocks_of_multiprocessor(kernel, threads, staging);
    const auto blocks = static_cast<unsigned>(std::clamp<index_type>(problem.geometry.rows, 1, resident));
    launch_labelled(exec, kernel_label(problem.operation, name),
                    [&] { launch_kernel(exec, kernel, early, blocks, threads, staging, problem); });
  }

  template <class Kernel>
  static int blocks_of_multiprocessor(Kernel* kernel, int threads, std::size_t staging) {
    int blocks = 0;
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, reinterpret_cast<const void*>(kernel),
                                                             threads, staging),
               "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    return std::max(1, blocks);
  }
};

}  // namespace KokkosSoftmax::impl

#endif
