// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The CUDA kernel for the logsumexp of many long rows: a block has a row, and reads its slices one after the
/// other, each share in the registers of one warp. A slice that is reduced is done with: it waits for no
/// result of its row, so nothing has to be told to other blocks. The slices are those of grid_pipelined_rows
/// and split_rows (ReductionPlan), and so are the bits.

#ifndef KOKKOSSOFTMAX_BLOCKPERSLICEDROW_HPP
#define KOKKOSSOFTMAX_BLOCKPERSLICEDROW_HPP

#include <impl/cuda/KokkosSoftmax_SlicedRows.hpp>

#include <string_view>
#include <type_traits>

namespace KokkosSoftmax::impl {

/// A warp's share of a slice, which has at most so many parts, of logits as they are in memory.
template <class Problem, int parts>
struct ShareOfSlice {
  using In = typename Problem::In;
  using Acc = typename Problem::Acc;
  using Part = PartOfSlice<Problem>;
  static constexpr bool in_pairs = Part::packed;

  Part part[parts];
  int columns;  ///< of the slice

  /// `left_of_row`: from the slice's first column to the end of its row.
  __device__ __forceinline__ void load(const In* slice, int slice_columns, int left_of_row, int share,
                                       int lane) {
    columns = min(slice_columns, left_of_row);
    const int of_lane = Part::first_column(share, lane);
    if (!in_pairs || Part::takes_units(slice, BoundIdentity::Row{}, 0)) {
      load_parts<true>(slice + of_lane, columns - of_lane, left_of_row);
    } else if constexpr (in_pairs) {
      load_parts<false>(slice + of_lane, columns - of_lane, left_of_row);
    }
  }

  __device__ __forceinline__ PartialSoftmax<Acc> reduce() const {
    auto maximum = Part::Maximum::none();
#pragma unroll
    for (int i = 0; i < parts; ++i) {
      if (is_there(i)) maximum.join(part[i]);
    }
    const Acc max = maximum.of_warp();
    const auto exponential = Part::exponential_below(max);
    auto sum = ShareSum<Acc>::none();
#pragma unroll
    for (int i = 0; i < parts; ++i) {
      if (is_there(i)) part[i].add_to(sum, exponential, [](int, Acc) {});
    }
    return Part::share(max, sum.of_warp());
  }

 private:
  __device__ bool is_there(int i) const {
    return i * Part::columns < columns;
  }

  /// Part by part, and not under predicates where a part is whole: for a pair they are as many instructions
  /// as it takes otherwise. (One H200, bfloat16 16384 columns, fraction of reading at a copy's speed: 0.76
  /// and 1.05.) `in_units`: whether the columns lie so. Where pairs lie across words, a part is taken for
  /// whole if the row goes on behind it, for the half of a word behind its last pair is read, too.
  template <bool in_units>
  __device__ __forceinline__ void load_parts(const In* from, int left, int left_of_row) {
    constexpr int apart = in_units ? 0 : 1;
    const auto is_whole = [&](int i) {
      const int end = (i + 1) * Part::columns;
      return end <= columns && (in_units || end + apart <= left_of_row);
    };
#pragma unroll
    for (int i = 0; i < parts; ++i) {
      const int begin = i * Part::columns;
      if (is_whole(i)) {
        if constexpr (in_units) {
          part[i].template load<false, true, false>(from + begin, 0, BoundIdentity::Row{}, 0);
        } else {
          load_words(part[i].held, from + begin - apart);
        }
      } else if (is_there(i)) {
        part[i].template load<!in_units, false, false>(from + begin, left - begin, BoundIdentity::Row{}, 0);
      } else {
        part[i] = none();
      }
    }
    if constexpr (!in_units) {
      // The words behind them come by way of L1. (With all of them asked for at once, scalar by scalar, there
      // would not be the registers: likewise, 16385 columns 0.78 and 1.00.)
#pragma unroll
      for (int i = 0; i < parts; ++i) {
        if (!is_whole(i)) break;
        unsigned behind[Part::steps];
        load_words(behind, from + i * Part::columns + apart);
#pragma unroll
        for (int k = 0; k < Part::steps; ++k)
          part[i].held[k] = __byte_perm(part[i].held[k], behind[k], 0x5432);
      }
    }
  }
  template <class Held>
  __device__ static void load_words(Held (&to)[Part::steps], const In* from) {
    static_assert(in_pairs);
#pragma unroll
    for (int k = 0; k < Part::steps; ++k) to[k] = *reinterpret_cast<const unsigned*>(from + k * Part::stride);
  }
  __device__ static Part none() {
    Part none;
#pragma unroll
    for (auto& held : none.held) {
      if constexpr (in_pairs) {
        held = PackedPair<In>::minus_infinities;
      } else {
        held = -infinity_v<Acc>;
      }
    }
    return none;
  }
};

inline constexpr int most_slices_of_read_row = 32;
/// At least, on a multiprocessor: 128 KB are under way then.
inline constexpr int blocks_of_read_rows = 4;

template <int parts, class Problem>
__global__ void __launch_bounds__(ReductionPlan::threads, blocks_of_read_rows)
    block_per_sliced_row_kernel(const __grid_constant__ FewRowsCall<Problem> call,
                                const __grid_constant__ Problem problem) {
  using In = typename Problem::In;
  using Acc = typename Problem::Acc;
  __shared__ PartialSoftmax<Acc> of_share[most_slices_of_read_row][ReductionPlan::shares];
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  grid_dependency_wait();
  if (call.slices == 0) return;
  const RowGeometry::Row where = call.row(problem.geometry, blockIdx.x);
  const In* const x = call.x + where.x_offset;
  const auto columns = static_cast<int>(call.columns);
  // In step, for what one warp reads of the next one's lines is in L1 only so long. (One H200, fractions of
  // reading at a copy's speed, each warp for itself and so: float 50257 columns 0.99 and 1.055, 98303 0.93
  // and 1.01, 131072 1.04 and 1.07; bfloat16 98303 0.97 and 0.99, but 65537, four slices, 1.00 and 0.98.)
  const bool in_step = sizeof(In) > 2 || call.slices > 4;
#pragma unroll 1
  for (int slice = 0; slice < call.slices; ++slice) {
    if (in_step && slice > 0) __syncthreads();
    const int first = slice * call.slice_columns;
    ShareOfSlice<Problem, parts> share;
    share.load(x + first, call.slice_columns, columns - first, warp, lane);
    const PartialSoftmax<Acc> partial = share.reduce();
    if (lane == 0) of_share[slice][warp] = partial;
  }
  __syncthreads();
  if (warp > 0) return;
  const PartialSoftmax<Acc> total = join_slices<Acc>(call.slices, lane, [&](index_type slice, bool) {
    return join_shares<Acc>([&](int share) { return of_share[slice][share]; });
  });
  if (lane == 0) {
    const SlicedRowResult<Problem> result(Operation::logsumexp, total);
    call.y[where.y_offset] = store_as<typename Problem::Out>(result.logsumexp());
  }
}

struct BlockPerSlicedRow {
  static constexpr const char* name = "block_per_sliced_row";
  static constexpr Operation only_for = Operation::logsumexp;

  /// (Double, exponentials of which take longer than memory: one H200, by grid_pipelined_rows and so, 0.74
  /// and 0.65 at 65536 columns.)
  template <class Exec, class Problem>
  static constexpr bool supports =
      sliced_rows_support<Exec, Problem> &&
      sizeof(typename Problem::Acc) == 4 && std::is_same_v<typename Problem::Transform, BoundIdentity>;

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec& exec, const Problem& problem) {
    if (problem.operation != only_for) return "it writes no rows: for logsumexp alone";
    const std::string_view layout = refuse_sliced_rows(problem);
    if (!layout.empty()) return layout;
    const ReductionPlan plan = plan_of(problem);
    if (plan.slices > most_slices_of_read_row) return "a row has too many slices";
    // Where split_rows and grid_pipelined_rows could not take a few of the rows, these have other bits.
    const char* refusal = nullptr;
    with_kernel<Problem>(plan, [&](auto kernel) {
      refusal = cooperative_limits(kernel.value, exec.cuda_device(), ReductionPlan::threads, 0).refusal;
    });
    return refusal ? refusal : "";
  }

  /// (One H200, logsumexp as a fraction of reading at a copy's speed, by grid_pipelined_rows or split_rows
  /// and so: float 140 x 65536 0.61 and 0.66, 200 x 32000 0.49 and 0.71, 140 x 131072 0.68 and 0.57, 264 x
  /// 131072 0.79 and 0.85; bfloat16 140 x 65536 0.36 and 0.42, 264 x 65536 0.59 and 0.74, 140 x 131072 0.60
  /// and 0.54, 264 x 131072 0.625 and 0.65, 600 x 131073, a little more than one for each block, 0.79 and
  /// 0.69; 1 GiB of bfloat16 in rows of 151643 columns, nine slices, 1.00 and 0.97.)
  template <class Exec, class Problem>
  static std::string_view advise_against(const Exec& exec, const Problem& problem) {
    const ReductionPlan plan = plan_of(problem);
    const index_type rows = problem.geometry.rows;
    const index_type multiprocessors = exec.cuda_device_prop().multiProcessorCount;
    const bool is_short = plan.slices <= 4;
    // (One H100, whose memory is slower: float 14336 to 131073 columns by that kernel 0.99 to 1.02 of a sum,
    // by this one 0.97 to 1.02, bfloat16 0.98 to 1.01 and 0.91 to 1.03.)
    if (!has_fast_memory(exec.cuda_device())) return "grid_pipelined_rows keeps up with the device's memory";
    if (sizeof(typename Problem::In) == 2 && plan.slices > 8)
      return "grid_pipelined_rows reads such long rows sooner";
    if (rows < (is_short ? 1 : 2) * multiprocessors) return "few rows are read sooner by several blocks each";
    const index_type at_once = blocks_of_read_rows * multiprocessors;
    if (!is_short && rows > at_once && rows * 3 < at_once * 5)
      return "a last few rows would be read by few blocks";
    return {};
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    const ReductionPlan plan = plan_of(problem);
    // Fewer rows are for others: a capture may have those after this call.
    CudaWorkspace workspace{};
    if (Capture<Exec>::id(exec) == 0) workspace = CudaWorkspace::get<typename Problem::Acc>(exec, 0);
    with_kernel<Problem>(plan, [&](auto kernel) {
      launch_with_shared<decltype(kernel)::value>(exec, kernel_label(problem.operation, name),
                                                  problem.geometry.rows, ReductionPlan::threads, 0,
                                                  FewRowsCall<Problem>(problem, plan, workspace), problem);
    });
  }

  /// For those, too, and for shorter rows, whose kernels a capture could not load.
  template <class Exec, class Problem>
  static void reserve(const Exec& exec, const Problem&) {
    CudaWorkspace::reserve<typename Problem::Acc>(exec, 0);
    for (const int parts : {few_parts, usual_parts, ReductionPlan::most_parts}) {
      ReductionPlan plan{};
      plan.slice_columns = parts * PartOfSlice<Problem>::columns;
      with_kernel<Problem>(plan, [](auto kernel) { (void)has_grid_dependency_wait(kernel.value); });
    }
  }

 private:
  /// Parts of a slice that there is a kernel for. (Likewise, bfloat16 10000 columns, five parts, with nine,
  /// eight and six: 0.87, 0.90 and 1.02, 24576 1.02, 1.03 and 1.04, 32000, eight parts, 1.045 and 1.05.)
  static constexpr int few_parts = 6,
                       usual_parts = ReductionPlan::usual_slice_bytes / ReductionPlan::part_bytes;

  /// use(kernel, as a constant).
  template <class Problem, class Use>
  static void with_kernel(const ReductionPlan& plan, const Use& use) {
    const auto with = [&]<int parts>(std::integral_constant<int, parts>) {
      constexpr auto kernel = &block_per_sliced_row_kernel<parts, Problem>;
      use(std::integral_constant<decltype(kernel), kernel>{});
    };
    constexpr int columns = PartOfSlice<Problem>::columns;
    if (plan.slice_columns <= few_parts * columns) {
      with(std::integral_constant<int, few_parts>{});
    } else if (plan.slice_columns <= usual_parts * columns) {
      with(std::integral_constant<int, usual_parts>{});
    } else {
      with(std::integral_constant<int, ReductionPlan::most_parts>{});
    }
  }
};

}  // namespace KokkosSoftmax::impl

#endif
