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

/// The maximum over a warp, in all of its lanes. NaN wins if it is the one that maximum_or_nan gives.
__device__ inline float maximum_of_warp(float value) {
  return from_integer_order(redux_max(in_integer_order(value)));
}
__device__ inline double maximum_of_warp(double value) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {
    const double other = __shfl_xor_sync(0xffffffffu, value, mask);
    value = maximum_or_nan(value, other);
  }
  return value;
}

/// The sum of a share's exponentials, each below 1.1. For float in fixed point: the same whoever adds what in
/// which order, so that one warp or several can reduce a share, and the lanes of a warp by two instructions.
template <class Acc>
struct ShareSum;

template <>
struct ShareSum<float> {
  std::int64_t units;  ///< of 2^-40: a share's sum is 1 at least, and has 2048 terms at most

  __device__ static ShareSum none() { return {0}; }
  __device__ static ShareSum of(float term) {
    const double shifter = 0x1.8p12;  // has units in the last place
    return {bits_as<std::int64_t>(static_cast<double>(term) + shifter) - bits_as<std::int64_t>(shifter)};
  }
  __device__ void join(const ShareSum& other) { units += other.units; }
  __device__ ShareSum of_warp() const {
    constexpr int low_bits = 26;
    const auto low = static_cast<std::uint32_t>(units) & ((1u << low_bits) - 1);
    const auto high = static_cast<std::uint32_t>(units >> low_bits);
    return {(static_cast<std::int64_t>(redux_add(high)) << low_bits) + redux_add(low)};
  }
  __device__ ExactSum<float> exact() const { return {static_cast<double>(units) * 0x1p-40}; }
};

template <>
struct ShareSum<double> {
  ExactSum<double> sum;

  __device__ static ShareSum none() { return {ExactSum<double>::of(0)}; }
  __device__ static ShareSum of(double term) { return {ExactSum<double>::of(term)}; }
  __device__ void join(const ShareSum& other) { sum.join(other.sum); }
  __device__ ShareSum of_warp() const {
    ShareSum total = *this;
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) total.sum.join(total.sum.from_lane_xor(mask));
    return total;
  }
  __device__ ExactSum<double> exact() const {
    return sum;
  }
};

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
    const Acc max = maximum();
    const ExponentialBelow<Acc> exponential(finite(max));
    return share(max, exponential, sum(exponential, each));
  }

  // The same in steps, for several warps that have a part of a share each.

  /// The maximum of the warp's elements; -largest where these are -inf, NaN where one is.
  __device__ Acc maximum() const {
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
    return maximum_of_warp(max);
  }

  /// What exponentials are taken below.
  __device__ static Acc finite(Acc max) {
    return max != max ? -largest_v<Acc> : max > largest_v<Acc> ? largest_v<Acc> : max;
  }

  template <class Each>
  __device__ ShareSum<Acc> sum(const ExponentialBelow<Acc>& exponential, const Each& each) const {
    // A few in the accumulator's type, these in a better one: a lane whose own maximum weighs 1 would lose
    // what many small terms come to.
    constexpr int count_of_quarter = steps_of_quarter * unit;
    constexpr int few = count_of_quarter < 4 ? count_of_quarter : 4;
    ShareSum<Acc> total = ShareSum<Acc>::none();
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
        if ((i + few) % count_of_quarter == 0) {
          total.join(ShareSum<Acc>::of(coarse));
          coarse = 0;
        }
      } else {
        total.join(ShareSum<Acc>::of(sum));
      }
    }
    return total.of_warp();
  }

  /// From the maximum and the sum of a whole share.
  __device__ static PartialSoftmax<Acc> share(Acc max, const ExponentialBelow<Acc>& exponential,
                                              const ShareSum<Acc>& sum) {
    PartialSoftmax<Acc> result{finite(max), sum.exact()};
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

/// Joins what the lanes of a warp have of a row's slices; the result in all of them.
template <class Acc>
__device__ PartialSoftmax<Acc> join_lanes_of_slices(PartialSoftmax<Acc> partial, index_type slices) {
  const Acc max = maximum_of_warp(partial.max);
  partial.sum.scale(exp_of_difference(partial.max - max));
  partial.max = max;
#pragma unroll
  for (int mask = 1; mask < 16; mask *= 2) partial.sum.join(partial.sum.from_lane_xor(mask));
  if (slices > 16) partial.sum.join(partial.sum.from_lane_xor(16));
  return partial;
}

/// Lanes of a warp that slices are dealt to. Of fewer, the other half of the warp does the same once more.
__device__ inline int lanes_of_slices(index_type slices) {
  return slices <= 16 ? 16 : 32;
}

/// The result of a row from those of its slices, by one warp, in all lanes of it: lane l takes slices l, l +
/// 32, ... `get(slice)` gives a slice's.
template <class Acc, class Get>
__device__ PartialSoftmax<Acc> join_slices(index_type slices, int lane, const Get& get) {
  const int lanes = lanes_of_slices(slices);
  index_type slice = lane % lanes;
  PartialSoftmax<Acc> total = slice < slices ? get(slice) : PartialSoftmax<Acc>::none();
  for (slice += 32; slice < slices; slice += 32) total.join(get(slice));
  return join_lanes_of_slices(total, slices);
}

/// The same from words in memory, waiting for those that are not there yet.
template <class Acc>
__device__ PartialSoftmax<Acc> collect_slices(const PartialWords<Acc>* words, index_type slices,
                                              std::uint32_t epoch, int lane) {
  constexpr int at_once = 4;  // loads that a lane has under way
  PartialSoftmax<Acc> total = PartialSoftmax<Acc>::none();
  for (index_type first = lane % lanes_of_slices(slices); first < slices; first += 32 * at_once) {
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
  return join_lanes_of_slices(total, slices);
}

/// A slice from the words of its shares, which are `stride` apart, waiting for those that are not there yet.
template <int stride, class Acc>
__device__ PartialSoftmax<Acc> collect_shares(const PartialWords<Acc>* words, std::uint32_t tag) {
  constexpr int shares = ReductionPlan::shares;
  PartialWords<Acc> word[shares];
  bool complete;
  do {
    complete = true;
#pragma unroll
    for (int i = 0; i < shares; ++i) word[i] = PartialWords<Acc>::load(words + i * stride);
#pragma unroll
    for (int i = 0; i < shares; ++i) complete = complete && word[i].is_of(tag);
  } while (!complete);
  // As join_lanes<shares> does it.
  PartialSoftmax<Acc> of[shares];
  Acc max = -largest_v<Acc>;
#pragma unroll
  for (int i = 0; i < shares; ++i) {
    of[i] = word[i].value();
    max = Kokkos::fmax(max, of[i].max);
  }
#pragma unroll
  for (int i = 0; i < shares; ++i) of[i].sum.scale(exp_of_difference(of[i].max - max));
#pragma unroll
  for (int mask = 1; mask < shares; mask *= 2) {
#pragma unroll
    for (int i = 0; i < shares; i += 2 * mask) of[i].sum.join(of[i + mask].sum);
  }
  of[0].max = max;
  return of[0];
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
