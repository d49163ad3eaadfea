// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The kernel of split_rows for as many slices as the device holds all at once (compute capability 9.0): all
/// are read, then all are written. A block has one slice in registers and, where there are more of them than
/// blocks, one in shared memory; each warp has the same share of both, and one warp for each collects what
/// the other slices of its row come to. All blocks are resident (the launch is cooperative).
///
/// Little else is done while memory is read, or written, so what is between counts: rows lie on boundaries of
/// 16 bytes, and a lane takes vectors, so dealt that it has what ReductionPlan has one lane of its share add
/// up; next to no registers are spilled. (Microseconds for 64 rows of 128256 floats on one H200, in forms
/// before this one: 22.4 with scalars and 20.6 with vectors; 19.3 with vectors of 16 bytes from shared
/// memory, too, and four words waited for at once, for which there are too few registers, and 16.8 with
/// shorter vectors and one word.)

#ifndef KOKKOSSOFTMAX_HELDSLICES_HPP
#define KOKKOSSOFTMAX_HELDSLICES_HPP

#include <impl/cuda/KokkosSoftmax_SlicedRows.hpp>

namespace KokkosSoftmax::impl {

struct HeldSlicesShape {
  static constexpr int threads = ReductionPlan::threads;
  static constexpr int blocks_a_multiprocessor = 4;
  static constexpr int slices = 2;                                      ///< of a block, at most
  static constexpr int slice_bytes = ReductionPlan::usual_slice_bytes;  ///< at most
  static constexpr int row_boundary_bytes = 16;                         ///< where rows have to begin
  /// Vectors of memory: each lane stores the outputs of one at once. (One H200, microseconds for 32, 40 and
  /// 64 rows of 128256 logits of bfloat16 that become floats, in a CUDA graph: vectors of 16 bytes, whose
  /// outputs take two stores to half of a sector each, 14.5, -, 22.4, so 9.9, 10.5, 15.9, by
  /// grid_pipelined_rows 12.4, 12.8, 17.5.)
  template <class Problem>
  static constexpr int vector_bytes = has_larger_outputs<Problem> ? 8 : 16;
  static constexpr int vector_bytes_in_slot = 8;  ///< for fewer registers are left

  /// For so many slices: one each, else two each for as few on each multiprocessor as can have them. (One
  /// H200, microseconds for 40, 44, 48 and 56 rows of 128256 floats in a CUDA graph: where as many blocks as
  /// are resident have one, and some of them two, 13.3, 13.3, 13.5 and 14.0, and so 11.3, 12.2, 12.7 and
  /// 14.2; 32 rows, one each, 8.7, by half the blocks 9.7.)
  static index_type blocks(index_type all_slices, const CooperativeLimits& device) {
    const index_type multiprocessors = device.multiprocessors;
    if (all_slices <= multiprocessors * device.blocks_a_multiprocessor) return all_slices;
    return ceil_div(all_slices, slices * multiprocessors) * multiprocessors;
  }

  /// Blocks on a multiprocessor that pay: what takes more instructions than a factor is done while nothing is
  /// read. (Microseconds for 28, 40, 48, 56 and 64 rows of 128256 floats in a CUDA graph, by
  /// grid_pipelined_rows and so: one H200, a factor 10.8 and 8.9, 13.2 and 12.6, 14.5 and 13.5, 17.2
  /// and 15.0, 18.9 and 16.8, a temperature 12.6 and 9.8, 14.7 and 15.0, 16.5 and 15.9, 18.1 and 18.9, 20.4
  /// twice; one H100, GELU 12.8 and 11.0, 16.0 and 15.0, 18.1 and 16.9, 20.9 and 21.1, 24.3 and 22.6.)
  template <class Transform>
  static constexpr int most_blocks =
      std::is_same_v<Transform, BoundIdentity> || std::is_same_v<Transform, BoundScale> ? 4 : 3;
};

/// Transforms that are one function of the logit for all of a row.
template <class Transform>
inline constexpr bool is_one_function_of_row = std::is_same_v<Transform, BoundIdentity>;
template <class F>
requires requires {
  F::is_same_for_all_rows;
}
inline constexpr bool is_one_function_of_row<BoundFunctor<F>> = true;
template <class T>
inline constexpr bool is_one_function_of_row<BoundTemperature<T>> = true;

/// Whether these kernels can have the slices of such rows: with a transform, those of floats, which take no
/// more room transformed.
template <class Problem>
inline constexpr bool slices_can_be_held =
    sizeof(typename Problem::Acc) == 4 && is_one_function_of_row<typename Problem::Transform> &&
    (!PartOfSlice<Problem>::has_transform || sizeof(typename Problem::In) == 4);

/// A lane's vectors of some parts of its warp's share of a slice: all steps of a part that ReductionPlan
/// gives to one lane in one lane here, too.
template <class Problem, int vector_bytes>
struct VectorsOfShare {
  using In = typename Problem::In;
  using Acc = typename Problem::Acc;
  using Out = typename Problem::Out;
  using Part = PartOfSlice<Problem>;
  static constexpr int words = vector_bytes / 4;
  static constexpr int width = vector_bytes / static_cast<int>(sizeof(In));
  static constexpr int unit = Part::unit, steps = Part::steps;
  static constexpr int lanes_of_part = static_cast<int>(Part::columns_together) / width;
  static constexpr int columns = 32 / lanes_of_part * Part::columns;  ///< of the slice: some parts
  static constexpr int rounds = HeldSlicesShape::slice_bytes / (columns * static_cast<int>(sizeof(In)));
  static_assert(unit * static_cast<int>(sizeof(In)) == 4 && slices_can_be_held<Problem>);

  struct alignas(vector_bytes) Vector {
    unsigned word[words];
  };
  Vector vector[steps];

  /// Of rounds behind the end of a slice nothing is loaded, used or stored where outputs are larger: those
  /// slices are shorter (ReductionPlan), which is worth a branch for each round.
  __device__ static bool reaches(int round, int columns_of_slice) {
    return !has_larger_outputs<Problem> || round * columns < columns_of_slice;
  }
  __device__ static int first_column(int share, int lane) {
    return lane / lanes_of_part * Part::columns + share * static_cast<int>(Part::columns_together) +
           lane % lanes_of_part * width;
  }

  /// From the lane's first column on, behind which there are `left`; past the end -inf.
  __device__ void load(const In* from, int left, bool whole) {
    if (whole) {
#pragma unroll
      for (int i = 0; i < steps; ++i) vector[i] = *reinterpret_cast<const Vector*>(from + i * Part::stride);
    } else {
#pragma unroll
      for (int i = 0; i < steps; ++i) {
#pragma unroll
        for (unsigned& word : vector[i].word) word = bits_as<unsigned>(Part::Maximum::none().a);
        if (i * Part::stride < left) vector[i] = *reinterpret_cast<const Vector*>(from + i * Part::stride);
      }
    }
  }
  /// Logits become what the transform makes of them; -inf stays.
  template <class TransformRow>
  __device__ void transform(const TransformRow& row) {
    if constexpr (Part::has_transform) {
#pragma unroll
      for (Vector& v : vector) {
#pragma unroll
        for (unsigned& word : v.word) word = bits_as<unsigned>(transformed<Acc>(row, bits_as<Acc>(word), 0));
      }
    }
  }
  /// Puts transformed logits back where they were loaded from.
  __device__ void put_back(In* to, int left, bool whole) const {
    if constexpr (Part::has_transform) {
#pragma unroll
      for (int i = 0; i < steps; ++i) {
        if (whole || i * Part::stride < left) *reinterpret_cast<Vector*>(to + i * Part::stride) = vector[i];
      }
    }
  }
  /// Each lane of a share adds up what these are, for one of the words of its vectors.
  __device__ Part part(int of_word) const {
    Part part;
#pragma unroll
    for (int i = 0; i < steps; ++i) part.held[i] = bits_as<typename Part::Held>(vector[i].word[of_word]);
    return part;
  }
  __device__ void join_maximum(typename Part::Maximum& maximum) const {
#pragma unroll
    for (int w = 0; w < words; ++w) maximum.join(part(w));
  }
  /// `keeps`: each logit's exponential takes its place.
  template <bool keeps>
  __device__ void add_to(ShareSum<Acc>& sum, const typename Part::Exponential& exponential) {
#pragma unroll
    for (int w = 0; w < words; ++w) {
      part(w).add_to(sum, exponential, [&]([[maybe_unused]] int i, [[maybe_unused]] Acc e) {
        if constexpr (keeps) vector[i].word[w] = bits_as<unsigned>(e);
      });
    }
  }

  /// The outputs, which leave L2 first, as do logits copied to shared memory. (One H200, microseconds for 64
  /// rows of 128256 floats in a CUDA graph, of a form before this one: both 22.4, without the one 26.3,
  /// without the other 26.0.)
  template <class Output>
  __device__ void store(Out* to, int left, bool whole, const Output& output) const {
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      Acc out[width];
#pragma unroll
      for (int w = 0; w < words; ++w) {
#pragma unroll
        for (int j = 0; j < unit; ++j) out[w * unit + j] = output(part(w).value(i * unit + j));
      }
      if (whole || i * Part::stride < left) store_vector(to + i * Part::stride, out);
    }
  }

 private:
  __device__ static void store_vector(Out* to, const Acc (&out)[width]) {
    constexpr int most = HeldSlicesShape::row_boundary_bytes / static_cast<int>(sizeof(Out));
    constexpr int each = width < most ? width : most;
    constexpr int words_at_once = each * static_cast<int>(sizeof(Out)) / 4;
#pragma unroll
    for (int begin = 0; begin < width; begin += each) {
      unsigned bits[words_at_once];
#pragma unroll
      for (int w = 0; w < words_at_once; ++w) {
        if constexpr (is_16_bit_v<Out>) {
          bits[w] = rounded_pair<Out>(out[begin + 2 * w], out[begin + 2 * w + 1]);
        } else {
          bits[w] = bits_as<unsigned>(out[begin + w]);
        }
      }
      if constexpr (words_at_once == 4) {
        __stcs(reinterpret_cast<uint4*>(to + begin), uint4{bits[0], bits[1], bits[2], bits[3]});
      } else {
        __stcs(reinterpret_cast<uint2*>(to + begin), uint2{bits[0], bits[1]});
      }
    }
  }
};

template <class Problem>
struct HeldSlicesCall : FewRowsCall<Problem> {
  int all_slices;  ///< of all rows
  int rows;
  /// A division by `slices` of numbers below that of all slices, without one: of 2^20 parts, rounded up.
  unsigned parts_a_slice;
  static constexpr unsigned parts_of_rows = 1u << 20;
  int words_of_row;

  HeldSlicesCall(const Problem& problem, const ReductionPlan& plan, int words_of_row_,
                 const CudaWorkspace& workspace_)
      : FewRowsCall<Problem>(problem, plan, workspace_),
        all_slices(static_cast<int>(problem.geometry.rows * plan.slices)),
        rows(static_cast<int>(problem.geometry.rows)),
        parts_a_slice((parts_of_rows - 1) / static_cast<unsigned>(plan.slices) + 1),
        words_of_row(words_of_row_) {}
};

/// A slice, by its number among those of all rows.
template <class Problem>
struct NumberedSlice {
  RowGeometry::Row where;
  int position;  ///< of the row
  int index;     ///< in the row
  index_type first_column;
  int columns;

  __device__ NumberedSlice(const HeldSlicesCall<Problem>& call, const RowGeometry& geometry, int number) {
    position = static_cast<int>(static_cast<unsigned>(number) * call.parts_a_slice / call.parts_of_rows);
    index = number - position * call.slices;
    where = call.row(geometry, position);
    first_column = static_cast<index_type>(index) * call.slice_columns;
    columns = static_cast<int>(min(static_cast<index_type>(call.slice_columns), call.columns - first_column));
  }
};

/// `keeps`: for softmax, exponentials wait in the registers that the logits were in.
template <bool keeps, class Problem>
__global__ void __launch_bounds__(HeldSlicesShape::threads, HeldSlicesShape::blocks_a_multiprocessor)
    held_slices_kernel(const __grid_constant__ HeldSlicesCall<Problem> call,
                       const __grid_constant__ Problem problem) {
  using In = typename Problem::In;
  using Acc = typename Problem::Acc;
  using Out = typename Problem::Out;
  using Part = PartOfSlice<Problem>;
  using Vectors = VectorsOfShare<Problem, HeldSlicesShape::vector_bytes<Problem>>;
  using SlotVectors = VectorsOfShare<Problem, HeldSlicesShape::vector_bytes_in_slot>;
  using Result = SlicedRowResult<Problem>;
  static_assert(!keeps || Result::keeps_exponentials);
  constexpr int shares = ReductionPlan::shares, most_columns = HeldSlicesShape::slice_bytes / int(sizeof(In));
  extern __shared__ uint4 held_slices_slot[];
  __shared__ Mbarrier came, known[HeldSlicesShape::slices];
  __shared__ PartialSoftmax<Acc> of_share[HeldSlicesShape::slices][shares];
  __shared__ std::uint32_t shared_epoch;
  __shared__ Result results[HeldSlicesShape::slices];
  const int share = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool has_second = static_cast<int>(blockIdx.x + gridDim.x) < call.all_slices;
  // (Found again whenever it is needed: registers are short.)
  const auto slice_of = [&](int i) {
    return NumberedSlice<Problem>(call, problem.geometry,
                                  static_cast<int>(not_known(blockIdx.x) + i * gridDim.x));
  };
  if (threadIdx.x == 0) {
    mbarrier_init(&came, 1);
    mbarrier_init(&known[0], 1);
    mbarrier_init(&known[1], 1);
    fence_mbarrier_init();
  }
  grid_dependency_wait();
  std::uint32_t epoch = 0;
  if (threadIdx.x == 0) {
    epoch = call.workspace.epoch();
    if (has_second) {
      const NumberedSlice<Problem> slice = slice_of(1);
      const auto bytes = static_cast<std::uint32_t>(slice.columns * sizeof(In));
      mbarrier_arrive_expect_tx(&came, bytes);
      cp_async_bulk(held_slices_slot, call.x + slice.where.x_offset + slice.first_column, bytes, &came,
                    createpolicy_evict_first());
    }
  }

  const auto words_of = [&](const NumberedSlice<Problem>& slice) {
    return call.workspace.template partials<Acc>() + slice.position * call.words_of_row;
  };
  const auto tag = [&] { return CudaWorkspace::tag_of(shared_epoch); };
  // By one warp.
  const auto publish = [&](int i) {
    const PartialSoftmax<Acc> total = join_lanes<shares>(of_share[i][lane % shares]);
    const NumberedSlice<Problem> slice = slice_of(i);
    if (lane == 0) PartialWords<Acc>::publish(words_of(slice) + slice.index, total, tag());
  };
  const bool writes_rows = keeps || call.operation != Operation::logsumexp;
  const auto collect = [&](int i) {
    const NumberedSlice<Problem> slice = slice_of(i);
    // (Of logsumexp the block with a row's first slice alone has something to write.)
    if (!writes_rows && slice.index != 0) return;
    const auto* const words = words_of(slice);
    const PartialSoftmax<Acc> total = join_slices<Acc>(
        call.slices, lane, [&](index_type other, bool) { return wait_for(words + other, tag()); });
    if (lane == 0) {
      results[i] = {call.operation, total};
      mbarrier_arrive(&known[i]);
    }
  };

  const auto transform_of = [&](const NumberedSlice<Problem>& slice) {
    return prepared_stage<Acc>(problem.transform.at_row(slice.where.index), 0);
  };
  // (Loops over it by number: of one `for (auto& vectors : mine)` nvcc 13.0 leaves a loop, and the slice in
  // local memory, with which 64 rows of 128256 floats take 27 us in place of 16 on one H200.)
  Vectors mine[Vectors::rounds];
  {
    const NumberedSlice<Problem> slice = slice_of(0);
    const int first_column = Vectors::first_column(share, lane), left = slice.columns - first_column;
    const bool whole = slice.columns == most_columns;
    const In* const x = call.x + slice.where.x_offset + slice.first_column + first_column;
    const auto transform = transform_of(slice);
#pragma unroll
    for (int r = 0; r < Vectors::rounds; ++r) {
      if (!Vectors::reaches(r, slice.columns)) break;
      mine[r].load(x + r * Vectors::columns, left - r * Vectors::columns, whole);
    }
    auto maximum = Part::Maximum::none();
#pragma unroll
    for (int r = 0; r < Vectors::rounds; ++r) {
      if (!Vectors::reaches(r, slice.columns)) break;
      mine[r].transform(transform);
      mine[r].join_maximum(maximum);
    }
    const Acc max = maximum.of_warp();
    auto sum = ShareSum<Acc>::none();
    const auto exponential = Part::exponential_below(max);
#pragma unroll
    for (int r = 0; r < Vectors::rounds; ++r) {
      if (!Vectors::reaches(r, slice.columns)) break;
      mine[r].template add_to<keeps>(sum, exponential);
    }
    sum = sum.of_warp();
    if (lane == 0) of_share[0][share] = Part::share(max, sum);
  }
  if (threadIdx.x == 0) shared_epoch = epoch;
  __syncthreads();
  call.workspace.clear_in_last_of_epochs(shared_epoch);
  if (share == 0) publish(0);

  In* const slot = reinterpret_cast<In*>(held_slices_slot) + SlotVectors::first_column(share, lane);
  if (has_second) {
    const NumberedSlice<Problem> slice = slice_of(1);
    const int left = slice.columns - SlotVectors::first_column(share, lane);
    const bool whole = slice.columns == most_columns;
    const auto transform = transform_of(slice);
    mbarrier_wait_parity(&came, 0);
    auto maximum = Part::Maximum::none();
    SlotVectors vectors;
#pragma unroll
    for (int r = 0; r < SlotVectors::rounds; ++r) {
      if (!SlotVectors::reaches(r, slice.columns)) break;
      vectors.load(slot + r * SlotVectors::columns, left - r * SlotVectors::columns, whole);
      vectors.transform(transform);
      vectors.put_back(slot + r * SlotVectors::columns, left - r * SlotVectors::columns, whole);
      vectors.join_maximum(maximum);
    }
    const Acc max = maximum.of_warp();
    const auto exponential = Part::exponential_below(max);
    auto sum = ShareSum<Acc>::none();
#pragma unroll
    for (int r = 0; r < SlotVectors::rounds; ++r) {
      if (!SlotVectors::reaches(r, slice.columns)) break;
      vectors.load(slot + r * SlotVectors::columns, left - r * SlotVectors::columns, whole);
      vectors.template add_to<false>(sum, exponential);
    }
    sum = sum.of_warp();
    if (lane == 0) of_share[1][share] = Part::share(max, sum);
    __syncthreads();
    if (share == 1) publish(1);
  }

  if (share == 0) collect(0);
  if (share == 1 && has_second) collect(1);
  // `write_exponentials` from what the share's exponentials are multiplied by, `write` from the row's result.
  const auto finish = [&](int i, const auto& write_exponentials, const auto& write) {
    const NumberedSlice<Problem> slice = slice_of(i);
    if (!writes_rows && slice.index != 0) return;
    mbarrier_wait_parity(&known[i], 0);
    // All blocks of the row have read the epoch.
    if (slice.index == 0 && threadIdx.x == 0)
      call.workspace.end_part(shared_epoch, static_cast<unsigned>(call.rows));
    const Result result = results[i];
    if (!writes_rows) {
      if (threadIdx.x == 0) call.y[slice.where.y_offset] = store_as<Out>(result.logsumexp());
      return;
    }
    Out* const y = call.y + slice.where.y_offset + slice.first_column;
    if constexpr (keeps) {
      write_exponentials(y, slice.columns, of_share[i][share].max,
                         result.factor_of_share(of_share[i][share].max));
    } else {
      result.with_output([&](const auto& output) { write(y, slice.columns, output); });
    }
  };
  const auto write_first = [&](Out* y, int columns, const auto& output) {
    const int first_column = Vectors::first_column(share, lane);
#pragma unroll
    for (int r = 0; r < Vectors::rounds; ++r) {
      if (!Vectors::reaches(r, columns)) break;
      const int begin = first_column + r * Vectors::columns;
      mine[r].store(y + begin, columns - begin, columns == most_columns, output);
    }
  };
  finish(
      0,
      [&](Out* y, int columns, Acc, Acc factor) {
        write_first(y, columns, [&](Acc exponential) { return exponential * factor; });
      },
      write_first);
  if (!has_second) return;
  const auto write_second = [&](Out* y, int columns, const auto& output) {
    const int first_column = SlotVectors::first_column(share, lane);
#pragma unroll
    for (int r = 0; r < SlotVectors::rounds; ++r) {
      if (!SlotVectors::reaches(r, columns)) break;
      const int begin = first_column + r * SlotVectors::columns;
      SlotVectors vectors;
      vectors.load(slot + r * SlotVectors::columns, columns - begin, columns == most_columns);
      vectors.store(y + begin, columns - begin, columns == most_columns, output);
    }
  };
  finish(
      1,
      [&](Out* y, int columns, Acc max_of_share, Acc factor) {
        if constexpr (keeps) {
          // To form these once more costs less than to have put them where the logits are.
          const auto exponential = Part::exponential_below(max_of_share);
          write_second(y, columns, [&](Acc value) { return exponential.uncorrected(value) * factor; });
        }
      },
      write_second);
}

}  // namespace KokkosSoftmax::impl

#endif
