// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The CUDA kernel for a few long rows, at the lowest latency (compute capability 9.0): all shares of all
/// slices of all rows at once, each in the registers of one warp or of several; warps tell the blocks of
/// their row their (max, sum) through L2. All blocks are resident (the launch is cooperative), so none waits
/// for one that cannot start.
///
/// Its time is that of the ways to L2 and back, some 600 cycles each, for the logits, for what the blocks
/// tell each other and for the results, and of what lies between. So loads that can be under way together
/// are, the epoch among them, and a launch begins while the one before it ends, or, of few rows, writes. (Its
/// blocks come as far as grid_dependency_wait(): behind that the epoch and the words are theirs alone.)

#ifndef KOKKOSSOFTMAX_SPLITROWS_HPP
#define KOKKOSSOFTMAX_SPLITROWS_HPP

#include <impl/cuda/KokkosSoftmax_HeldSlices.hpp>
#include <impl/cuda/KokkosSoftmax_SlicedRows.hpp>

#include <limits>
#include <string_view>
#include <tuple>

namespace KokkosSoftmax::impl {

/// A block: `shares` shares of a slice, `parts` warps for each. `resident_threads`: on a multiprocessor, at
/// least; `most_blocks`: there, for which it pays.
template <int parts_, int shares_, int resident_threads_, int most_blocks_ = std::numeric_limits<int>::max()>
struct SplitRowsShape {
  static constexpr int parts = parts_;
  static constexpr int shares = shares_;
  static constexpr int warps = parts * shares;
  static constexpr int threads = warps * 32;
  static constexpr int blocks_of_slice = ReductionPlan::shares / shares;
  static constexpr int resident_threads = resident_threads_;
  static constexpr int most_blocks = most_blocks_;
};

/// Blocks on a multiprocessor, at least.
template <class Shape, class Acc>
inline constexpr int resident_split_blocks = sizeof(Acc) == 8 ? 1 : Shape::resident_threads / Shape::threads;

/// Slices of a row, at most: beyond, polling a word for each of 8 times as many shares pays no longer.
inline constexpr int most_slices_of_split_row = 64;

/// Words of a row, one for each share of each slice: first those of the slices' first shares, so that lanes
/// that collect a slice each read neighbours. (As far apart as the longest row asks for: side by side they
/// cost 0.3 us more.)
inline constexpr int words_of_split_row = ReductionPlan::shares * most_slices_of_split_row;

template <class Problem>
struct SplitRowsCall : FewRowsCall<Problem> {
  int warp_columns;  ///< of a slice

  SplitRowsCall(const Problem& problem, const ReductionPlan& plan, int warps_of_share,
                const CudaWorkspace& workspace_)
      : FewRowsCall<Problem>(problem, plan, workspace_),
        warp_columns(columns_of_warp(plan.slice_columns, warps_of_share)) {}

 private:
  static int columns_of_warp(int slice_columns, int warps_of_share) {
    constexpr int columns = PartOfSlice<Problem>::columns;
    const int parts = (slice_columns + columns - 1) / columns;
    return (parts + warps_of_share - 1) / warps_of_share * columns;
  }
};

/// How a warp has a row's logits in registers: transformed, as they are read.
template <class Problem>
struct SplitRowLogits {
  using Acc = typename Problem::Acc;
  typename Problem::Transform::Row row;

  __device__ SplitRowLogits(const Problem& problem, index_type index, index_type)
      : row(problem.transform.at_row(index)) {}
  template <class Registers>
  __device__ void load(Registers& registers, const typename Problem::In* from, int columns, int share,
                       int lane, index_type first) const {
    registers.load(from, columns, share, lane, row, first);
  }
  /// Makes of the maximum of a share that of its logits, and gives the exponential of what is there.
  __device__ auto exponential_below(Acc& max) const { return PartOfSlice<Problem>::exponential_below(max); }
  /// The (max, sum) of a share whose exponentials these are.
  template <class Exponential>
  __device__ static PartialSoftmax<Acc> share(Acc max, const ShareSum<Acc>& sum, const Exponential&) {
    return PartOfSlice<Problem>::share(max, sum);
  }
  /// Calls use with the function from what is there to its output.
  template <class Use>
  __device__ void with_output(const SlicedRowResult<Problem>& row_result, const Use& use) const {
    row_result.with_output(use);
  }
};
/// But of those that a temperature divides coarsely, and leaves in their order, as they are: how they are
/// divided is known when their share's maximum is, and the row's.
template <class Problem>
requires(divides_coarsely<Problem>) struct SplitRowLogits<Problem> {
  using Acc = typename Problem::Acc;
  using Transform = typename Problem::Transform;
  typename Transform::Row row;
  typename BoundTemperature<Acc>::template PreparedRow<Acc> temperature;
  bool stay;

  struct Exponential {
    const SplitRowLogits& logits;
    bool is_coarse;
    ExponentialOfCoarseQuotient of_logit;
    Acc correction;
    ExponentialBelow<Acc> below;
    __device__ Acc uncorrected(Acc value) const {
      if (is_coarse) return of_logit(value);
      return below.uncorrected(logits.stay ? logits.temperature(value, 0) : value);
    }
  };

  __device__ SplitRowLogits(const Problem& problem, index_type index, index_type first)
      : row(problem.transform.at_row(index)),
        temperature(temperature_of_row<Transform>(prepared_stage<Acc>(row, first))) {
    Acc any = 1;
    stay = temperature.finds_maximum(any, 0, 0);
  }
  template <class Registers>
  __device__ void load(Registers& registers, const typename Problem::In* from, int columns, int share,
                       int lane, index_type first) const {
    if (!stay) {
      registers.load(from, columns, share, lane, row, first);
    } else if constexpr (PartsOfChain<Transform>::masks > 0) {
      registers.load(from, columns, share, lane, mask_of_row<Transform>(row), first);
    } else {
      registers.load(from, columns, share, lane, BoundIdentity::Row{}, first);
    }
  }
  __device__ Exponential exponential_below(Acc& max) const {
    using Part = PartOfSlice<Problem>;
    bool is_coarse = false;
    const Acc of_logits = max;
    if (stay) (void)maximum_of_quotients(temperature, max, is_coarse);
    const auto of_logit = ExponentialOfCoarseQuotient::below(temperature, of_logits);
    return {*this, is_coarse, of_logit,
            is_coarse ? of_logit.correction(of_logits) : Part::correction_below(max),
            Part::exponential_below(max)};
  }
  __device__ static PartialSoftmax<Acc> share(Acc max, const ShareSum<Acc>& sum,
                                              const Exponential& exponential) {
    return PartOfSlice<Problem>::share(max, sum, exponential.correction);
  }
  template <class Use>
  __device__ void with_output(const SlicedRowResult<Problem>& row_result, const Use& use) const {
    if (quotients_are_coarse(temperature, row_result.max)) {
      row_result.with_output_of_quotients(temperature, use);
    } else {
      row_result.with_output([&](const auto& output) {
        use([&](Acc value) { return output(stay ? temperature(value, 0) : value); });
      });
    }
  }
};

template <class Shape, class Problem>
__global__ void __launch_bounds__(Shape::threads, resident_split_blocks<Shape, typename Problem::Acc>)
    split_rows_kernel(const __grid_constant__ SplitRowsCall<Problem> call,
                      const __grid_constant__ Problem problem) {
  using In = typename Problem::In;
  using Acc = typename Problem::Acc;
  using Out = typename Problem::Out;
  constexpr int parts = Shape::parts, warps = Shape::warps;
  __shared__ Acc max_of_warp[warps];
  __shared__ ShareSum<Acc> sum_of_warp[warps];
  __shared__ std::uint32_t shared_epoch;
  __shared__ SlicedRowResult<Problem> shared_result;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % parts;
  const int slice = static_cast<int>(blockIdx.x / Shape::blocks_of_slice);
  const int share = static_cast<int>(blockIdx.x % Shape::blocks_of_slice) * Shape::shares + warp / parts;
  const index_type position = blockIdx.y;
  const RowGeometry::Row where = call.row(problem.geometry, position);
  const index_type first_of_slice = static_cast<index_type>(slice) * call.slice_columns;
  // Of this warp's part of the slice.
  const index_type first = first_of_slice + part * call.warp_columns;
  const int columns =
      min(static_cast<int>(min(static_cast<index_type>(call.slice_columns), call.columns - first_of_slice)) -
              part * call.warp_columns,
          call.warp_columns);
  grid_dependency_wait();
  if (call.slices == 0) return;
  std::uint32_t epoch = 0;
  if (threadIdx.x == 0) epoch = call.workspace.epoch();
  const auto reduce_and_write = [&](auto parts_of_warp) {
    using Registers = PartsOfSlice<Problem, decltype(parts_of_warp)::value>;
    using Part = typename Registers::Part;
    constexpr bool keeps_exponentials = SlicedRowResult<Problem>::keeps_exponentials;
    Registers mine;
    const SplitRowLogits<Problem> logits(problem, where.index, first);
    logits.load(mine, call.x + where.x_offset + first, columns, share, lane, first);
    Acc max = mine.maximum(call.operation != Operation::log_softmax);
    if (lane == 0) max_of_warp[warp] = max;
    if (threadIdx.x == 0) shared_epoch = epoch;
    __syncthreads();
    call.workspace.clear_in_last_of_epochs(shared_epoch);
    const std::uint32_t tag = CudaWorkspace::tag_of(shared_epoch);
    [[maybe_unused]] const int first_warp = warp - part;
    if constexpr (parts > 1) {
      max = max_of_warp[first_warp];
#pragma unroll
      for (int i = 1; i < parts; ++i) max = maximum_or_nan(max, max_of_warp[first_warp + i]);
    }
    [[maybe_unused]] const bool softmax = call.operation == Operation::softmax;
    const auto exponential_of = logits.exponential_below(max);
    ShareSum<Acc> sum = mine.sum(exponential_of, [&]([[maybe_unused]] int e, [[maybe_unused]] int i,
                                                     [[maybe_unused]] Acc exponential) {
      if constexpr (keeps_exponentials) {
        if (softmax) mine.part[e].held[i] = SlicedRowResult<Problem>::kept(exponential);
      }
    });
    if constexpr (parts > 1) {
      if (lane == 0) sum_of_warp[warp] = sum;
      __syncthreads();
      sum = sum_of_warp[first_warp];
#pragma unroll
      for (int i = 1; i < parts; ++i) sum.join(sum_of_warp[first_warp + i]);
    }
    PartialWords<Acc>* const words = call.workspace.template partials<Acc>() + position * words_of_split_row;
    if (part == 0 && lane == 0) {
      PartialWords<Acc>::publish(words + share * most_slices_of_split_row + slice,
                                 logits.share(max, sum, exponential_of), tag);
    }
    // One warp, which then passes it on: the more poll the same words, the longer it takes.
    if (warp == warps - 1) {
      const PartialSoftmax<Acc> total =
          join_slices<Acc, most_slices_of_split_row>(call.slices, lane, [&](index_type i, bool exists) {
            return collect_shares<most_slices_of_split_row>(words + i, tag, exists);
          });
      if (lane == 0) shared_result = {call.operation, total};
    }
    __syncthreads();
    // (1 row of 128256 floats on one H200 3.03 us in a graph, without it 3.22; but 8 rows 4.62 and 4.29.)
    if constexpr (parts > 1) grid_launch_dependents();
    const SlicedRowResult<Problem> result = shared_result;
    if (blockIdx.x == 0 && threadIdx.x == 0) call.workspace.end_part(shared_epoch, gridDim.y);
    if (call.operation == Operation::logsumexp) {
      if (blockIdx.x == 0 && threadIdx.x == 0) call.y[where.y_offset] = store_as<Out>(result.logsumexp());
      return;
    }
    Out* const y = call.y + where.y_offset + first;
    const auto write = [&](const auto& output) {
#pragma unroll
      for (int e = 0; e < decltype(parts_of_warp)::value; ++e) {
#pragma unroll
        for (int i = 0; i < Part::steps; ++i) {
          Acc out[Part::unit];
#pragma unroll
          for (int j = 0; j < Part::unit; ++j) out[j] = output(mine.part[e].value(i * Part::unit + j));
          store_unit(y, Part::first_column(share, lane) + e * Part::columns + i * Part::stride, columns, out);
        }
      }
    };
    if constexpr (keeps_exponentials) {
      if (softmax) {
        const Acc factor = result.factor_of_share(finite_maximum(max));
        write([&](Acc exponential_of_i) { return exponential_of_i * factor; });
        return;
      }
    }
    if constexpr (SlicedRowResult<Problem>::keeps_packed_differences) {
      // As who has to keep them in 16 bits.
      const Acc max_of_share = finite_maximum(max), offset = result.offset_of_share(max_of_share);
      write([&](Acc value) {
        return SlicedRowResult<Problem>::kept_difference(value - max_of_share) + offset;
      });
    } else {
      logits.with_output(result, write);
    }
  };
  constexpr int usual = ReductionPlan::usual_slice_bytes / ReductionPlan::part_bytes / parts;
  if (call.warp_columns <= usual * PartOfSlice<Problem>::columns) {
    reduce_and_write(std::integral_constant<int, usual>{});
  } else {
    reduce_and_write(std::integral_constant<int, usual + 1>{});
  }
}

struct SplitRows {
  static constexpr const char* name = "split_rows";

  template <class Exec, class Problem>
  static constexpr bool supports = sliced_rows_support<Exec, Problem>;

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec& exec, const Problem& problem) {
    const std::string_view layout = refuse_sliced_rows(problem);
    if (!layout.empty()) return layout;
    const ReductionPlan plan = plan_of(problem);
    if (plan.slices > most_slices_of_split_row) return "a row has too many slices";
    const char* const refusal = refusal_of_all<Problem>(exec);
    if (refusal) return refusal;
    bool all_resident = holds<MostSlices<Problem>>(exec, problem, plan);
    if constexpr (has_more_blocks<Problem>)
      all_resident = all_resident || holds<MoreBlocks>(exec, problem, plan);
    if constexpr (slices_can_be_held<Problem>)
      all_resident = all_resident || holds_slices(exec, problem, plan);
    if (!all_resident) return "too many slices to be resident at once";
    return {};
  }

  template <class Exec, class Problem>
  static std::string_view advise_against(const Exec& exec, const Problem& problem) {
    if (!CudaWorkspace::always_holds<typename Problem::Acc>(words(problem)))
      return "so many rows need more scratch than was reserved for more rows yet";
    // (One H200, microseconds of logsumexp, grid_pipelined_rows and held slices, two a block: bfloat16 400 x
    // 32768 9.9 and 12.6, 200 x 32000 6.9 and 8.9, 33 x 393216 10.9 and 11.4, float 64 x 128256 10.1
    // and 11.1, 200 x 32000 10.8 and 11.0; but one a block bfloat16 64 x 128256 10.9 and 9.1.)
    if constexpr (slices_can_be_held<Problem>) {
      const ReductionPlan plan = plan_of(problem);
      if (problem.operation == Operation::logsumexp && holds_slices(exec, problem, plan) &&
          !holds_slices(exec, problem, plan, 1))
        return "grid_pipelined_rows reads so many slices sooner";
    }
    return {};
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    const ReductionPlan plan = plan_of(problem);
    const bool launched = std::apply(
        [&](auto... shape) { return (launch_if_resident<decltype(shape)>(exec, problem, plan) || ...); },
        ShapesForFew<Problem>{});
    if (launched) return;
    if constexpr (slices_can_be_held<Problem>) {
      if ((held_sooner<Problem> || !holds<FewThreads>(exec, problem, plan)) &&
          holds_slices(exec, problem, plan)) {
        launch_held_slices(exec, problem, plan);
        return;
      }
    }
    if constexpr (has_more_blocks<Problem>) {
      if (!holds<FewThreads>(exec, problem, plan)) {
        launch<MoreBlocks>(exec, problem, plan);
        return;
      }
    }
    launch<MostSlices<Problem>>(exec, problem, plan);
  }

  template <class Exec, class Problem>
  static void reserve(const Exec& exec, const Problem& problem) {
    CudaWorkspace::reserve<typename Problem::Acc>(exec, words(problem));
  }

 private:
  // As many warps a share as fit. (One H200, microseconds in a CUDA graph with eight, four and two warps a
  // share, and by FewThreads: bfloat16 1, 4, 8, 16 and 32 rows of 128256 3.04, 3.49, 3.91 and 5.78; 3.60,
  // 3.64, 4.11 and 6.16; 4.13, 4.04, 4.42 and 6.13; -, 4.78, 5.10 and 6.06; -, -, 6.67 and 7.62; that become
  // floats, 16 rows -, -, 6.34 and 7.87; float 1, 4, 8 and 12 rows 3.01, 3.19, 3.19 and 4.01; 4.09, 3.78,
  // 3.78 and 4.14; -, 4.53, 4.42 and 4.36; -, -, 5.05 and 5.55, 24 rows of 50257 -, -, 4.75 and 5.99.) A
  // transform of 16 bits, which become floats in registers, asks for more of these. (bfloat16 with a bias for
  // all rows, 24 rows of 128256, 768 and 1024 threads 8.2 and 9.3.)
  template <class Problem>
  using TwoWarpsAShare = SplitRowsShape<2, 2,
                                        sizeof(typename Problem::In) != 2      ? 768
                                        : !PartOfSlice<Problem>::has_transform ? 1024
                                                                               : 896>;
  /// In the order in which they are tried. (Of double one warp has a share.)
  template <class Problem>
  using ShapesForFew =
      std::conditional_t<sizeof(typename Problem::Acc) == 8, std::tuple<>,
                         std::conditional_t<sizeof(typename Problem::In) == 2,
                                            std::tuple<SplitRowsShape<8, 1, 1024, 1>,
                                                       SplitRowsShape<4, 2, 1024>, TwoWarpsAShare<Problem>>,
                                            std::tuple<TwoWarpsAShare<Problem>>>>;
  using FewThreads = SplitRowsShape<1, ReductionPlan::shares, 768>;
  /// What holds the most slices. (Those of 16 bits with a transform are sooner by grid_pipelined_rows than by
  /// FewThreads: bfloat16 with a bias for all rows, 48 rows of 128256, 14.4 and 31.6, 96 of 50257 14.8 and
  /// 24.4, with a factor to floats 24 of 128256 10.8 and 11.7, but 96 of 32768 12.2 and 11.4.)
  template <class Problem>
  using MostSlices =
      std::conditional_t<sizeof(typename Problem::In) == 2 && PartOfSlice<Problem>::has_transform,
                         TwoWarpsAShare<Problem>, FewThreads>;
  /// For rows of float that fill more blocks than these, where they lie anywhere. (Microseconds again: 28 and
  /// 32 rows of 128256 in 8.2 and 9.0, by grid_pipelined_rows 10.4 and 10.5; but 16 and 24 rows 5.9 and 7.1
  /// for 5.7 and 6.9, since registers are short. Not with a transform: the kernel would be compiled once more
  /// for each.)
  using MoreBlocks = SplitRowsShape<1, ReductionPlan::shares, 1024>;
  template <class Problem>
  static constexpr bool has_more_blocks = sizeof(typename Problem::In) == 4 &&
                                          !PartOfSlice<Problem>::has_transform;

  template <class Shape, class Problem>
  static index_type blocks(const Problem& problem, const ReductionPlan& plan) {
    return problem.geometry.rows * plan.slices * Shape::blocks_of_slice;
  }

  template <class Shape, class Problem>
  static bool holds(const Kokkos::Cuda& exec, const Problem& problem, const ReductionPlan& plan) {
    const CooperativeLimits& device = limits<Shape, Problem>(exec);
    return blocks<Shape>(problem, plan) <= static_cast<index_type>(device.multiprocessors) *
                                               std::min(Shape::most_blocks, device.blocks_a_multiprocessor);
  }

  /// Of 16 bits, too, that FewThreads would hold. (One H200, microseconds in a CUDA graph, FewThreads and
  /// HeldSlices: float 16 and 24 rows of 128256 5.7 and 6.2, 6.8 and 7.3; but bfloat16 40 rows 9.3 and 8.8,
  /// that become floats 24 rows 9.8 and 8.6, 80 rows of 32768 9.4 and 7.5.)
  template <class Problem>
  static constexpr bool held_sooner = sizeof(typename Problem::In) == 2;

  /// Rows that lie on boundaries of 16 bytes, and fill more blocks than these: see HeldSlices. (One H200,
  /// microseconds in a CUDA graph, by grid_pipelined_rows and so: float 32 rows of 128256 11.1 and 8.7, 40
  /// 12.6 and 11.3, 48 14.4 and 12.7, 56 16.6 and 14.1, 64 18.8 and 16.3, 17 of 393216 16.9 and 14.6, 200 of
  /// 32768 17.6 and 14.6; bfloat16 64 of 128256 13.3 and 11.9, 128 21.1 and 18.8.)
  template <class Problem>
  static bool holds_slices(const Kokkos::Cuda& exec, const Problem& problem, const ReductionPlan& plan,
                           index_type slices_of_block = HeldSlicesShape::slices) {
    constexpr index_type size = sizeof(typename Problem::In);
    if (plan.slice_columns * size > HeldSlicesShape::slice_bytes ||
        problem.geometry.columns * size % HeldSlicesShape::row_boundary_bytes != 0 ||
        !rows_begin_at<HeldSlicesShape::row_boundary_bytes>(problem))
      return false;
    const CooperativeLimits& device = limits_of_held_slices(exec, problem);
    const int blocks_a_multiprocessor =
        std::min(device.blocks_a_multiprocessor, HeldSlicesShape::most_blocks<typename Problem::Transform>);
    return !device.refusal && problem.geometry.rows * plan.slices <=
                                  slices_of_block * device.multiprocessors * blocks_a_multiprocessor;
  }

  template <class Problem>
  static index_type words(const Problem& problem) {
    return problem.geometry.rows * words_of_split_row;
  }

  template <class Shape, class Problem>
  static bool launch_if_resident(const Kokkos::Cuda& exec, const Problem& problem,
                                 const ReductionPlan& plan) {
    const bool resident = holds<Shape>(exec, problem, plan);
    if (resident) launch<Shape>(exec, problem, plan);
    return resident;
  }

  template <class Shape, class Problem>
  static void launch(const Kokkos::Cuda& exec, const Problem& problem, const ReductionPlan& plan) {
    const dim3 grid(static_cast<unsigned>(plan.slices * Shape::blocks_of_slice),
                    static_cast<unsigned>(std::max<index_type>(1, problem.geometry.rows)));
    launch_labelled(exec, kernel_label(problem.operation, name), [&] {
      launch_cooperatively(
          exec, split_rows_kernel<Shape, Problem>, grid, Shape::threads, 0,
          SplitRowsCall<Problem>(problem, plan, Shape::parts,
                                 CudaWorkspace::get<typename Problem::Acc>(exec, words(problem))),
          problem);
    });
  }

  template <class Problem>
  static void launch_held_slices(const Kokkos::Cuda& exec, const Problem& problem,
                                 const ReductionPlan& plan) {
    const index_type slices = problem.geometry.rows * plan.slices;
    const index_type blocks = HeldSlicesShape::blocks(slices, limits_of_held_slices(exec, problem));
    const std::size_t shared_bytes = slices > blocks ? HeldSlicesShape::slice_bytes : 0;
    const HeldSlicesCall<Problem> call(problem, plan, words_of_split_row,
                                       CudaWorkspace::get<typename Problem::Acc>(exec, words(problem)));
    launch_labelled(exec, kernel_label(problem.operation, name), [&] {
      launch_cooperatively(exec, held_slices_kernel_for(problem), static_cast<unsigned>(blocks),
                           HeldSlicesShape::threads, shared_bytes, call, problem);
    });
  }

  template <class Problem>
  static auto held_slices_kernel_for(const Problem& problem) {
    if constexpr (SlicedRowResult<Problem>::keeps_exponentials) {
      if (problem.operation == Operation::softmax) return &held_slices_kernel<true, Problem>;
    }
    return &held_slices_kernel<false, Problem>;
  }
  template <class Problem>
  static const CooperativeLimits& limits_of_held_slices(const Kokkos::Cuda& exec, const Problem& problem) {
    return cooperative_limits(held_slices_kernel_for(problem), exec.cuda_device(), HeldSlicesShape::threads,
                              HeldSlicesShape::slice_bytes);
  }

  /// Why the device has none of these kernels, if so. Asked of all at once: that loads them, which a capture
  /// could not do.
  template <class Problem>
  static const char* refusal_of_all(const Kokkos::Cuda& exec) {
    using Most = MostSlices<Problem>;
    return asked_once(&split_rows_kernel<Most, Problem>, exec.cuda_device(), [&] {
      std::apply([&](auto... shape) { ((void)limits<decltype(shape), Problem>(exec), ...); },
                 ShapesForFew<Problem>{});
      return limits<Most, Problem>(exec).refusal;
    });
  }
  template <class Shape, class Problem>
  static const CooperativeLimits& limits(const Kokkos::Cuda& exec) {
    return cooperative_limits(&split_rows_kernel<Shape, Problem>, exec.cuda_device(), Shape::threads, 0);
  }
};

}  // namespace KokkosSoftmax::impl

#endif
