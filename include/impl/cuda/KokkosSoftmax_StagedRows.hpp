// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// CUDA kernels that hold a row in registers, and bring it and the operands of its transform by way of shared
/// memory: rows that are no whole vectors, a part of a warp, a warp or a block each.

#ifndef KOKKOSSOFTMAX_STAGEDROWS_HPP
#define KOKKOSSOFTMAX_STAGEDROWS_HPP

#include <impl/cuda/KokkosSoftmax_RowInRegisters.hpp>

namespace KokkosSoftmax::impl {

/// The shared memory of a row that is staged: x, but for rows by address, and its operands, then y's image in
/// their place, or behind them where they are there for the next row, too. 0 bytes where it is not staged.
struct StagedRowPlan {
  int bytes = 0;
  int image = 0;                 ///< where y's image begins
  unsigned operands_by_l1 = 0;   ///< bit i: operand i is the same for the next row
  unsigned operands_of_all = 0;  ///< likewise for all rows: staged once by those that have rows in turn
  int rows_in_turn = 1;
  static constexpr int most_operands = 6;
  const void* end_of_operand[most_operands] = {};  ///< behind its last element in memory

  /// Rows in turn are so many apart: of 16 bits and one behind the other, they begin alike, as far behind a
  /// boundary of 16 bytes.
  static constexpr int apart = 8;
  /// (Fraction of a copy with 1, 4, 16 and 64, bfloat16 with a bias for all rows on one H200: 65 columns
  /// 0.45, 0.53, 0.53, 0.49, 257 0.59, 0.68, 0.66, 0.65, 1001 0.67, 0.80, 0.78, 0.76, 4097 0.67, 0.74, 0.73,
  /// 0.72, 16381 0.56, 0.63, 0.63, 0.63. The next row's x and operands copied to shared memory meanwhile:
  /// less, 1001 columns 0.70, 4097 0.55; that takes registers that there are not.)
  static constexpr int most_rows_in_turn = 4;

  template <class Problem>
  static StagedRowPlan of(const Problem& problem, index_type image_bytes, index_type most_bytes,
                          int rows_in_turn_) {
    const index_type columns = problem.geometry.columns;
    constexpr bool by_address = may_be_by_address<Problem>;
    StagedRowPlan plan;
    index_type bytes = by_address ? 0 : bytes_of_staged<typename Problem::In>(columns);
    bool side_by_side = true;
    // What all rows have is in L1. (One H200, interleaved rows, fraction of a copy without and with this: a
    // bias of bfloat16 for all rows 1001 columns 0.72 and 0.68, 2047 0.57 and 0.64, 4097 0.54 and 0.60; a
    // mask of float with rows of its own 0.79 and 0.96, 0.72 and 0.96, 0.69 and 0.95.)
    bool is_faster = by_address || (sizeof(typename Problem::In) == 2 && columns > 1024);
    int i = 0;
    problem.transform.visit_operands([&]<class T>(const LogitOperand<T>& operand) {
      const auto& row_offset = operand.row_offset;
      bool of_all = true;
      for (int d = 0; d < row_offset.rank; ++d) of_all = of_all && row_offset.stride[d] == 0;
      const bool again = row_offset.rank == 0 || row_offset.stride[row_offset.rank - 1] == 0;
      if (by_address && of_all) {
        plan.operands_of_all |= 1u << i;
      } else if (again) {
        plan.operands_by_l1 |= 1u << i;
      }
      is_faster = is_faster || !again;
      side_by_side = side_by_side && operand.column_stride == 1;
      bytes += bytes_of_staged<T>(columns);
      if (by_address) bytes += 2 * NeighboursInRegisters<T, 8>::bytes_around;
      if (i < most_operands) plan.end_of_operand[i] = operand.end(columns);
      ++i;
    });
    if (plan.operands_of_all != 0 && rows_in_turn_ > 1) {
      plan.rows_in_turn = rows_in_turn_;
      plan.image = static_cast<int>(bytes);
      bytes += image_bytes;
    } else {
      plan.operands_by_l1 |= plan.operands_of_all;
      plan.operands_of_all = 0;
      bytes = std::max(bytes, image_bytes);
    }
    // Rows side by side in a warp do not fall on the same banks.
    if (by_address) bytes = bytes / 128 * 128 + 192;
    if (i <= most_operands && side_by_side && is_faster && bytes <= most_bytes)
      plan.bytes = static_cast<int>(bytes);
    return plan;
  }

  /// What takes rows in turn: as many as so many rows ask for.
  index_type places(index_type rows) const {
    const index_type together = static_cast<index_type>(rows_in_turn) * apart;
    return rows_in_turn == 1 ? rows : (rows + together - 1) / together * apart;
  }
  __device__ index_type first_row(index_type place) const {
    return place / apart * apart * rows_in_turn + place % apart;
  }
};

/// Logits by address by way of shared memory, `group` lanes a row, or, of 0, a block. `in_turn`: a row may be
/// one of several in turn.
template <int vectors, int group, int most_threads, int least_blocks, bool in_turn, class Problem>
__global__ void __launch_bounds__(most_threads, least_blocks)
    staged_logits_kernel(const __grid_constant__ Problem problem, const StagedRowPlan plan) {
  using In = typename Problem::In;
  using Registers = RegistersOf<Problem, vectors, true>;
  using Acc = typename Problem::Acc;
  extern __shared__ __align__(16) char shared_of_rows[];
  const RowGeometry& g = problem.geometry;
  grid_dependency_wait();
  if (g.rows == 0) return;
  const auto thread = static_cast<int>(threadIdx.x);
  constexpr int lanes = group == 0 ? 1 : group;
  const index_type place =
      group == 0 ? blockIdx.x : static_cast<index_type>(blockIdx.x) * (most_threads / lanes) + thread / lanes;
  char* const shared = shared_of_rows + (group == 0 ? 0 : thread / lanes * plan.bytes);
  const auto threads = [&] {
    if constexpr (group == 0) {
      return BlockOfRow{thread, static_cast<int>(blockDim.x), shared + plan.image};
    } else {
      return LanesOfRow<group>{thread % group, shared + plan.image};
    }
  }();
  const auto columns = static_cast<int>(g.columns);
  index_type position = in_turn ? plan.first_row(place) : place;
  const int turns = in_turn ? plan.rows_in_turn : 1;
  int before_staged = -1;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn, position += plan.apart) {
    const bool exists = position < g.rows;
    if (in_turn && !__any_sync(0xffffffffu, exists)) break;
    // Lanes past the last row go along with that one: the warp's shuffles want them.
    const RowGeometry::Row where = g.row(exists ? position : g.rows - 1);
    typename Problem::Out* const y = problem.y + where.y_offset;
    if constexpr (group != 0) {
      if (const int gap = gap_to_read(problem); gap > 0)
        read_ends_of_row(y, columns, gap, threads.rank() == 0, threads.rank() == 1);
    }
    const In* const x = problem.x + where.x_offset;
    const auto transform_of_row = problem.transform.at_row(where.index);
    const auto end = static_cast<int>(end_of_kept(transform_of_row, g.columns));
    const auto before = static_cast<int>(reinterpret_cast<std::uintptr_t>(x) % 16 / sizeof(In));
    const bool once = in_turn && __any_sync(0xffffffffu, before != before_staged);
    enum class Which { by_copies, by_l1, of_all };
    const auto stage = [&](const Which which) {
      char* to = shared;
      unsigned by_l1 = plan.operands_by_l1, of_all = plan.operands_of_all;
      const void* const* end_of_memory = plan.end_of_operand;
      return map_operands(transform_of_row, [&]<class Operand>(const Operand& operand) {
        using T = std::remove_cvref_t<decltype(*operand.data)>;
        constexpr int around = Registers::template NeighboursOf<Operand>::bytes_around;
        const Which its = in_turn && of_all & 1 ? Which::of_all : by_l1 & 1 ? Which::by_l1 : Which::by_copies;
        // Those of all rows begin where vectors of x do, the others as they do in global memory.
        const int behind = its == Which::of_all
                               ? before * static_cast<int>(sizeof(T))
                               : static_cast<int>(reinterpret_cast<std::uintptr_t>(operand.data) % 16);
        auto* const at = reinterpret_cast<T*>(to + around + behind);
        if (its == which) {
          if (which == Which::of_all) {
            stage_elements(operand.data, columns, at, threads);
          } else {
            stage_columns(operand.data, end, *end_of_memory, to + around, threads, which == Which::by_l1);
          }
        }
        ++end_of_memory;
        to += bytes_of_staged<T>(columns) + 2 * around;
        by_l1 /= 2;
        of_all /= 2;
        return ColumnsInShared<T>{at};
      });
    };
    // Copies to shared memory first: what x goes to are registers that the compiler may wait for.
    const auto staged = stage(Which::by_copies);
    Registers row;
    row.packed.read(x, g.last_x_offset() - where.x_offset, columns, end, threads);
    if (plan.operands_by_l1 != 0) stage(Which::by_l1);
    if (once) stage(Which::of_all);
    before_staged = before;
    const auto transform = prepared_stage<Acc>(staged, 0);
    cp_async_wait_all();
    threads.synchronize();
    const auto with = [&](const auto& reduce) {
      softmax_in_registers(
          row, threads, problem, y, exists && threads.rank() == 0, reduce,
          [&](bool) {
            row.transform_staged(end, threads, transform);
            return true;
          },
          [&](const auto& output) { store_row(problem, where, position, row, threads, output); });
    };
    if constexpr (group != 0) {
      with(ReduceGroup<Acc, lanes>{});
    } else {
      using Reduce = ReduceWarps<Acc>;
      __shared__ typename Reduce::Shared shared_of_reduction;
      with(Reduce{shared_of_reduction, {}});
    }
  }
}

/// Interleaved rows by way of shared memory, a block or, with ReduceGroup, a warp each; to the same bits.
template <int vectors, int most_threads, int least_blocks, class Reduce, class Problem>
__global__ void __launch_bounds__(most_threads, least_blocks)
    staged_row_kernel(const __grid_constant__ Problem problem, const StagedRowPlan plan) {
  using In = typename Problem::In;
  using Out = typename Problem::Out;
  using Registers = RegistersOf<Problem, vectors, true>;
  constexpr bool of_warp = std::is_same_v<Reduce, ReduceGroup<typename Problem::Acc, 32>>;
  extern __shared__ __align__(16) char shared_of_rows[];
  const RowGeometry& g = problem.geometry;
  grid_dependency_wait();
  const auto thread = static_cast<int>(threadIdx.x);
  const index_type position =
      of_warp ? static_cast<index_type>(blockIdx.x) * (most_threads / 32) + thread / 32 : blockIdx.x;
  if (position >= g.rows) return;
  char* const shared = of_warp ? shared_of_rows + thread / 32 * plan.bytes : shared_of_rows;
  const auto threads = [&] {
    if constexpr (of_warp) {
      return LanesOfRow<32>{thread % 32, shared};
    } else {
      return BlockOfRow{thread, static_cast<int>(blockDim.x), shared};
    }
  }();
  const auto columns = static_cast<int>(g.columns);
  const RowGeometry::Row where = g.row(position);
  Out* const y = problem.y + where.y_offset;
  if constexpr (of_warp) {
    if (const int gap = gap_to_read(problem); gap > 0)
      read_ends_of_row(y, columns, gap, threads.rank() == 0, threads.rank() == 1);
  }
  const auto transform_of_row = problem.transform.at_row(where.index);
  const int end = Registers::end_of_read(transform_of_row, columns);
  const auto x = stage_columns(problem.x + where.x_offset, end, problem.x + g.last_x_offset() + columns,
                               shared, threads, false);
  char* to = shared + bytes_of_staged<In>(columns);
  unsigned by_l1 = plan.operands_by_l1;
  const void* const* end_of_memory = plan.end_of_operand;
  const auto transform = map_operands(transform_of_row, [&](const auto& operand) {
    const auto staged = stage_columns(operand.data, end, *end_of_memory++, to, threads, by_l1 & 1);
    to += bytes_of_staged<std::remove_cvref_t<decltype(*operand.data)>>(columns);
    by_l1 /= 2;
    return staged;
  });
  cp_async_wait_all();
  threads.synchronize();
  Registers row;
  const auto with = [&](const Reduce& reduce) {
    softmax_in_registers(
        row, threads, problem, y, threads.rank() == 0, reduce,
        [&](bool) {
          row.take_staged(x, columns, end, threads, transform);
          return true;
        },
        [&](const auto& output) {
          if constexpr (sizeof(Out) == 2) {
            row.store_by_image(y, columns, threads, output);
          } else {
            row.store(y, columns, true, threads, output);
          }
        });
  };
  if constexpr (of_warp) {
    with(Reduce{});
  } else {
    __shared__ typename Reduce::Shared shared_of_reduction;
    with(Reduce{shared_of_reduction, {}});
  }
}

/// Launches a kernel of staged rows, whose images take so many bytes each, if they are to be staged; whether.
/// `kernel_of_turns`: that for rows in turn, if there may be such.
template <auto kernel, auto kernel_of_turns = kernel, class Problem>
bool launch_staged(const Kokkos::Cuda& exec, const char* name, int threads, int rows_of_block,
                   index_type image_bytes, const Problem& problem) {
  const cudaDeviceProp& device = exec.cuda_device_prop();
  const index_type most_bytes =
      static_cast<index_type>(device.sharedMemPerBlockOptin) - 4096;  // beside what the kernel declares
  const bool has_image =
      problem.operation != Operation::logsumexp && RowAlignment::of(problem).difference % 16 != 0;
  const index_type rows = problem.geometry.rows;
  const index_type rows_at_once =
      static_cast<index_type>(device.multiProcessorCount) * 1024 / threads * rows_of_block;
  const auto most_rows_in_turn = static_cast<int>(
      std::clamp<index_type>(rows / (2 * rows_at_once), 1, StagedRowPlan::most_rows_in_turn));
  const auto plan = StagedRowPlan::of(problem, has_image || !may_be_by_address<Problem> ? image_bytes : 0,
                                      most_bytes / rows_of_block, most_rows_in_turn);
  if (plan.bytes == 0) return false;
  const auto launch = [&](auto which) {
    launch_with_shared<decltype(which)::value>(exec, kernel_label(problem.operation, name),
                                               (plan.places(rows) + rows_of_block - 1) / rows_of_block,
                                               threads, rows_of_block * plan.bytes, problem, plan);
  };
  if constexpr (kernel_of_turns != kernel) {
    // `reserve` launches over no rows: that loads both kernels, which a capture could not do.
    if (plan.rows_in_turn > 1 || rows == 0)
      launch(std::integral_constant<decltype(kernel), kernel_of_turns>{});
    if (plan.rows_in_turn > 1) return true;
  }
  launch(std::integral_constant<decltype(kernel), kernel>{});
  return true;
}

}  // namespace KokkosSoftmax::impl

#endif
