// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// What the CUDA kernels for long rows have in common: how a warp reduces its share of a slice, and how the
/// results of a row's slices become the row's (ReductionPlan says which elements these are).

#ifndef KOKKOSSOFTMAX_SLICEDROWS_HPP
#define KOKKOSSOFTMAX_SLICEDROWS_HPP

#include <KokkosSoftmax_Transforms.hpp>
#include <impl/cuda/KokkosSoftmax_CudaTuning.hpp>
#include <impl/cuda/KokkosSoftmax_CudaWorkspace.hpp>

namespace KokkosSoftmax::impl {

/// A lane's part of a share, in registers. `quarters` says how many quarters of the largest slice the slice
/// reaches into (with_quarters), 4, or 3 and fewer.
template <class Problem, int quarters = 4>
struct SliceRegisters {
  using In = typename Problem::In;
  using Out = typename Problem::Out;
  using Acc = typename Problem::Acc;
  /// Scalars that a lane takes at once: of 16 bits two, so that a warp's access has 4 bytes a lane.
  static constexpr int unit = sizeof(In) == 2 ? 2 : 1;
  static constexpr int stride = ReductionPlan::threads * unit;
  static constexpr int steps_of_quarter =
      ReductionPlan::largest_slice_bytes / static_cast<int>(sizeof(In)) / stride / 4;
  static constexpr int steps = quarters * steps_of_quarter;
  static constexpr int count = steps * unit;
  /// Pairs of 16 bits without a transform stay as they are until they are used: half the registers.
  static constexpr bool packed =
      unit == 2 && std::is_same_v<Acc, float> && std::is_same_v<typename Problem::Transform, BoundIdentity>;

  std::conditional_t<packed, unsigned, Acc> held[packed ? steps : count];

  /// The first column of the slice that a lane of a share has in step i.
  __device__ static int column(int i, int share, int lane) { return i * stride + (share * 32 + lane) * unit; }
  /// Whether a step needs no look at the end of the slice.
  __device__ static constexpr bool is_whole(int i) { return quarters == 4 && i < 3 * steps_of_quarter; }
  /// The share that a column of the slice belongs to.
  __device__ static int share_of(int column) { return column / (32 * unit) % ReductionPlan::shares; }

  __device__ Acc value(int i) const {
    if constexpr (packed) {
      return i % 2 ? PackedPair<In>::high(held[i / 2]) : PackedPair<In>::low(held[i / 2]);
    } else {
      return held[i];
    }
  }

  /// Reads and transforms; past the end of the slice -inf. `slice` is at least as aligned as In.
  template <class TransformRow>
  __device__ void load(const In* slice, int columns, int share, int lane, const TransformRow& transform,
                       index_type first_column) {
    if (unit == 2 && reinterpret_cast<std::uintptr_t>(slice) % 4 != 0) {
      load_units<true>(slice, columns, share, lane, transform, first_column);
    } else {
      load_units<false>(slice, columns, share, lane, transform, first_column);
    }
  }

  /// The (max, sum) of the warp's share, the same in all lanes. `each(i, value, exponential)` sees every
  /// element, with exp(value - max), uncorrected (ExponentialBelow).
  template <class Each>
  __device__ PartialSoftmax<Acc> reduce(const Each& each) {
    Acc max = -largest_v<Acc>;
    if constexpr (packed) {
      using Pair = PackedPair<In>;
      unsigned a = held[0], b = held[1];  // two chains, for their latency
#pragma unroll
      for (int i = 2; i < steps; i += 2) {
        a = Pair::maximum_or_nan(a, held[i]);
        b = Pair::maximum_or_nan(b, held[i + 1]);
      }
      a = Pair::maximum_or_nan(a, b);
      max = maximum_or_nan(max, maximum_or_nan(Pair::low(a), Pair::high(a)));
    } else {
      Acc a = held[0], b = held[1];
#pragma unroll
      for (int i = 2; i < count; i += 2) {
        a = maximum_or_nan(a, held[i]);
        b = maximum_or_nan(b, held[i + 1]);
      }
      max = maximum_or_nan(max, maximum_or_nan(a, b));
    }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) {
      const Acc other = __shfl_xor_sync(0xffffffffu, max, mask);
      max = maximum_or_nan(max, other);
    }
    PartialSoftmax<Acc> result = PartialSoftmax<Acc>::none();
    result.max = max != max ? -largest_v<Acc> : max > largest_v<Acc> ? largest_v<Acc> : max;
    // A few in the accumulator's type, these in a better one: a lane whose own maximum weighs 1 would lose
    // what many small terms come to.
    constexpr int few = steps_of_quarter * unit < 4 ? steps_of_quarter * unit : 4;
    const ExponentialBelow<Acc> exponential(result.max);
    // 16 bits of output show none of that, and spare the conversions.
    [[maybe_unused]] Acc coarse = 0;
#pragma unroll
    for (int i = 0; i < count; i += few) {
      Acc e[few];
#pragma unroll
      for (int j = 0; j < few; ++j) {
        const Acc v = value(i + j);
        e[j] = exponential.uncorrected(v);
        each(i + j, v, e[j]);
      }
#pragma unroll
      for (int j = 0; j < few; j += 2) e[j] += e[j + 1];
      const Acc sum = few == 4 ? e[0] + e[few / 2] : e[0];
      if constexpr (is_16_bit_v<Out>) {
        coarse += sum;
      } else {
        result.sum.join(ExactSum<Acc>::of(sum));
      }
    }
    if constexpr (is_16_bit_v<Out>) result.sum = ExactSum<Acc>::of(coarse);
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) result.sum.join(result.sum.from_lane_xor(mask));
    result.sum.scale(exponential.correction);
    if (max != result.max) result.sum = ExactSum<Acc>::of(max != max ? nan_v<Acc> : infinity_v<Acc>);
    return result;
  }

 private:
  template <bool odd, class TransformRow>
  __device__ void load_units(const In* slice, int columns, int share, int lane, const TransformRow& transform,
                             index_type first_column) {
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      const int c = column(i, share, lane);
      const bool whole = is_whole(i);
      if constexpr (packed) {
        if (whole || c + 1 < columns) {
          held[i] = load_pair<odd>(slice + c);
        } else {
          held[i] = PackedPair<In>::minus_infinities;
          if (c < columns) held[i] = (held[i] & 0xffff0000u) | bits_as<std::uint16_t>(slice[c]);
        }
      } else {
        In scalar[unit]{};
        if (whole) load_unit<odd>(slice + c, scalar);
#pragma unroll
        for (int j = 0; j < unit; ++j) {
          if (whole) {
            held[i * unit + j] = transformed<Acc>(transform, load_as<Acc>(scalar[j]), first_column + c + j);
          } else {
            held[i * unit + j] = c + j < columns ? transformed<Acc>(transform, load_as<Acc>(slice[c + j]),
                                                                    first_column + c + j)
                                                 : -infinity_v<Acc>;
          }
        }
      }
    }
  }

  template <bool odd>
  __device__ static unsigned load_pair(const In* at) {
    if constexpr (!odd) return *reinterpret_cast<const unsigned*>(at);
    return bits_as<std::uint16_t>(at[0]) | static_cast<unsigned>(bits_as<std::uint16_t>(at[1])) << 16;
  }

  template <bool odd>
  __device__ static void load_unit(const In* at, In (&scalar)[unit]) {
    if constexpr (unit == 2) {
      const unsigned pair = load_pair<odd>(at);
      memcpy(scalar, &pair, sizeof(scalar));
    } else {
      scalar[0] = at[0];
    }
  }
};

/// From a row's (max, sum) to its outputs, as every kernel that follows the ReductionPlan writes them.
template <class Problem>
struct SlicedRowResult : RowResult<typename Problem::Acc> {
  using Acc = typename Problem::Acc;
  using Out = typename Problem::Out;
  /// Where a share's exponentials, exp(value - max of the share), can be kept until the row's result is
  /// known, they only have to be scaled then.
  static constexpr bool keeps_exponentials = std::is_same_v<typename Problem::In, Acc>;
  /// The sum goes into the exponent: 16 bits of result do not show its rounding.
  static constexpr bool sum_in_exponent =
      !keeps_exponentials && is_16_bit_v<Out> && std::is_same_v<Acc, float>;

  SlicedRowResult() = default;
  __device__ SlicedRowResult(Operation operation, const PartialSoftmax<Acc>& total)
      : RowResult<Acc>(operation, MaxSum<Acc>{total.max, total.sum.rounded()}) {
    if constexpr (sum_in_exponent) {
      if (operation == Operation::softmax) {
        const Acc sum = total.sum.rounded();
        this->log_sum = sum == Acc(0) ? Acc(0) : sum < infinity_v<Acc> ? log2f(sum) : nan_v<Acc>;
      }
    }
  }

  /// Calls use with the function from a logit to its output: what depends on the row alone is found once.
  template <class Use>
  __device__ void with_output(const Use& use) const {
    if (this->operation != Operation::softmax) {
      use([this](Acc value) { return this->log_softmax(value); });
    } else if constexpr (sum_in_exponent) {
      use([this](Acc value) {
        return ex2_approx_ftz(fmaf(value - this->max, 1.4426950408889634f, -this->log_sum));
      });
    } else {
      const ExponentialBelow<Acc> exponential(this->max);
      const Acc scale = exponential.correction * this->factor;
      use([&](Acc value) { return exponential.uncorrected(value) * scale; });
    }
  }

  /// What the exponentials of a share are multiplied by, uncorrected as they were kept.
  __device__ Acc factor_of_share(Acc max_of_share) const {
    return exp_of_difference(max_of_share - this->max) * this->factor *
           ExponentialBelow<Acc>(max_of_share).correction;
  }
};

/// Calls use with the number of quarters of the largest slice that `columns` reach into, as a constant. Rows
/// of more than one slice have slices of more than two quarters; shorter rows make do with three, which
/// spares the compiler two more kernels.
template <class In, class Use>
__device__ __forceinline__ void with_quarters(int columns, const Use& use) {
  constexpr int quarter = ReductionPlan::largest_slice_bytes / static_cast<int>(sizeof(In)) / 4;
  if (columns > 3 * quarter) {
    use(std::integral_constant<int, 4>{});
  } else {
    use(std::integral_constant<int, 3>{});
  }
}

/// Writes a lane's unit of a slice.
template <class Out, class Acc, int unit>
__device__ void store_unit(Out* slice, int column, int columns, const Acc (&value)[unit]) {
  if constexpr (unit == 2) {
    if (column + 1 < columns && reinterpret_cast<std::uintptr_t>(slice) % (2 * sizeof(Out)) == 0) {
      if constexpr (is_16_bit_v<Out> && std::is_same_v<Acc, float>) {
        *reinterpret_cast<unsigned*>(slice + column) = rounded_pair<Out>(value[0], value[1]);
        return;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < unit; ++j) {
    if (column + j < columns) slice[column + j] = store_as<Out>(value[j]);
  }
}

/// Joins what `lanes` neighbouring lanes have, a power of two; the result in all of them.
template <int lanes, class Acc>
__device__ PartialSoftmax<Acc> join_lanes(PartialSoftmax<Acc> partial) {
  Acc max = partial.max;
#pragma unroll
  for (int mask = 1; mask < lanes; mask *= 2) {
    const Acc other = __shfl_xor_sync(0xffffffffu, max, mask);
    max = Kokkos::fmax(max, other);
  }
  partial.sum.scale(exp_of_difference(partial.max - max));
  partial.max = max;
#pragma unroll
  for (int mask = 1; mask < lanes; mask *= 2) partial.sum.join(partial.sum.from_lane_xor(mask));
  return partial;
}

/// The result of a row from those of its slices, by one warp: lane l takes slices l, l + 32, ... `get(slice)`
/// gives a slice's.
template <class Acc, class Get>
__device__ PartialSoftmax<Acc> join_slices(index_type slices, int lane, const Get& get) {
  PartialSoftmax<Acc> total = PartialSoftmax<Acc>::none();
  for (index_type slice = lane; slice < slices; slice += 32) total.join(get(slice));
  return join_lanes<32>(total);
}

/// The same from words in memory, waiting for those that are not there yet.
template <class Acc>
__device__ PartialSoftmax<Acc> collect_slices(const PartialWords<Acc>* words, index_type slices,
                                              std::uint32_t epoch, int lane) {
  constexpr int at_once = 4;  // loads that a lane has under way
  PartialSoftmax<Acc> total = PartialSoftmax<Acc>::none();
  for (index_type first = lane; first < slices; first += 32 * at_once) {
    PartialWords<Acc> of[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      if (first + i * 32 < slices) of[i] = PartialWords<Acc>::load(words + first + i * 32);
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      if (first + i * 32 < slices) {
        while (!of[i].is_of(epoch)) of[i] = PartialWords<Acc>::load(words + first + i * 32);
        total.join(of[i].value());
      }
    }
  }
  return join_lanes<32>(total);
}

template <class Exec, class Problem>
inline constexpr bool sliced_rows_support =
    std::is_same_v<Exec, Kokkos::Cuda>&& std::is_trivially_copyable_v<Problem> &&
    sizeof(Problem) < 3600 && CUDART_VERSION >= 12030;

template <class Problem>
std::string_view refuse_sliced_rows(const Problem& problem) {
  const RowGeometry& g = problem.geometry;
  if (problem.axis_is_strided || g.x_column_stride != 1) return "the columns of x are not contiguous";
  if (problem.operation != Operation::logsumexp && g.y_column_stride != 1)
    return "the columns of y are not contiguous";
  return {};
}

}  // namespace KokkosSoftmax::impl

#endif
