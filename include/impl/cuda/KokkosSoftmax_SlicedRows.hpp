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
#include <impl/cuda/KokkosSoftmax_PackedMask.hpp>

namespace KokkosSoftmax::impl {

/// The maximum over a warp, in all of its lanes. NaN wins if it is the one that maximum_or_nan gives.
__device__ inline float maximum_of_warp(float value) {
  return from_integer_order(redux_max(in_integer_order(value)));
}
__device__ inline double maximum_of_warp(double value) {
  // As an integer of the same order, the higher word first. (By shuffles a lane would wait five times.)
  constexpr int lowest = -0x7fffffff - 1;
  if (value != value) value = nan_v<double>;  // above all else, the sign too
  const int sign = __double2hiint(value) >> 31;
  const int high = __double2hiint(value) ^ (sign & 0x7fffffff), low = __double2loint(value) ^ sign ^ lowest;
  const int max_high = redux_max(high);
  const int max_low = redux_max(high == max_high ? low : lowest);
  const int max_sign = max_high >> 31;
  return __hiloint2double(max_high ^ (max_sign & 0x7fffffff), max_low ^ lowest ^ max_sign);
}

/// The sum of a share's exponentials, each below 1.1. For float in fixed point: the same whoever adds what in
/// which order, so that one warp or several can reduce a share, and the lanes of a warp by two instructions.
template <class Acc>
struct ShareSum;

template <>
struct ShareSum<float> {
  FixedPointSum sum;

  __device__ static ShareSum none() { return {{0, 0}}; }
  __device__ static ShareSum of(float term) { return {FixedPointSum::of(term)}; }
  __device__ void join(const ShareSum& other) { sum.join(other.sum); }
  __device__ ShareSum of_warp() const { return {{redux_add(sum.high), redux_add(sum.low)}}; }
  __device__ ExactSum<float> exact() const { return {sum.exact()}; }
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

/// What a lane has of its warp's share in a part of a slice, in registers.
template <class Problem>
struct PartOfSlice {
  using In = typename Problem::In;
  using Out = typename Problem::Out;
  using Acc = typename Problem::Acc;
  /// Scalars that a lane takes at once: of 16 bits two, so that a warp's access has 4 bytes a lane.
  static constexpr int unit = sizeof(In) == 2 ? 2 : 1;
  static constexpr int stride = ReductionPlan::threads * unit;
  static constexpr int columns = ReductionPlan::part_bytes / static_cast<int>(sizeof(In));
  static constexpr int steps = columns / stride;
  static constexpr int count = steps * unit;
  static constexpr bool has_transform = !std::is_same_v<typename Problem::Transform, BoundIdentity>;
  /// Pairs of 16 bits that a transform leaves as they are, or drops, stay as they are until they are used:
  /// half the registers.
  static constexpr bool packed =
      unit == 2 && std::is_same_v<Acc, float> && (!has_transform || only_drops<typename Problem::Transform>);
  using Held = std::conditional_t<packed, unsigned, Acc>;
  using Exponential = std::conditional_t<packed, ExponentialOf16Bits<In>, ExponentialBelow<Acc>>;

  /// Pairs of 16 bits that a transform makes floats of.
  static constexpr bool unpacked = unit == 2 && std::is_same_v<Acc, float> && !packed;

  /// Whether it adds a bias of the logits' type and nothing else. Sums in pairs, two instructions for each
  /// two logits, are those of floats rounded (what a float cannot hold of a sum of 16 bits is far from where
  /// these part), and so is their maximum: where that is as good, it is what all kernels subtract, but not of
  /// what keeps differences from it.
  static constexpr bool adds_pairs =
      unpacked && std::is_same_v<typename Problem::Transform, BoundBias<std::remove_const_t<In>>>;
  /// Below this it is at most 1/16 from the maximum, and exponentials stay below 1.1.
  static constexpr Acc most_rounded_maximum = std::is_same_v<In, bhalf_t> ? 32 : 256;
  __device__ static Acc maximum_to_subtract(Acc max) {
    if constexpr (adds_pairs) {
      const Acc rounded = load_as<Acc>(store_as<In>(max));
      if (fabsf(rounded) < most_rounded_maximum) return rounded;
    }
    return max;
  }

  Held held[packed ? steps : count];

  /// The first column of a lane of a share.
  __device__ static int first_column(int share, int lane) { return (share * 32 + lane) * unit; }
  /// The share that a column of the slice belongs to.
  __device__ static int share_of(int column) {
    return static_cast<int>(static_cast<unsigned>(column) / columns_together % ReductionPlan::shares);
  }
  /// Of a share.
  static constexpr unsigned columns_together = 32 * unit;

  __device__ Acc value(int i) const {
    if constexpr (packed) {
      return i % 2 ? PackedPair<In>::high(held[i / 2]) : PackedPair<In>::low(held[i / 2]);
    } else {
      return held[i];
    }
  }

  /// Whether a lane's columns and their operands lie so that it can take them at once.
  template <class TransformRow>
  __device__ static bool takes_units(const In* from, const TransformRow& transform, index_type column) {
    return unit == 1 || (reinterpret_cast<std::uintptr_t>(from) % 4 == 0 &&
                         stage_takes_neighbours<unit>(transform, column));
  }

  /// Reads and transforms what begins at `from`, the lane's first column, and ends after `left` more; past
  /// the end -inf. `single`: not where a lane takes_units. `whole`: there is no end. `in_slot`: behind the
  /// end lies what can be read, too. `looks_for_minus_infinity`: see transform_neighbours.
  template <bool single, bool whole, bool in_slot, bool looks_for_minus_infinity = true, class TransformRow>
  __device__ void load(const In* from, int left, const TransformRow& transform, index_type column) {
    if constexpr (transforms_held_logits<TransformRow>) {
      PartOfSlice part[1];
      load_at_once<whole, in_slot>(part, from, left, single, transform, column);
      *this = part[0];
    } else {
      load_one_by_one<single, whole, in_slot, looks_for_minus_infinity>(from, left, transform, column);
    }
  }

  /// The same of some parts, one behind the other, with a transform that transforms_held_logits. `single` is
  /// known at run time: the transform is long.
  template <bool whole, bool in_slot, int parts, class TransformRow>
  __device__ static void load_at_once(PartOfSlice (&part)[parts], const In* from, int left, bool single,
                                      const TransformRow& transform, index_type column) {
    static_assert(!packed);
    Acc logit[parts * count];
    [[maybe_unused]] unsigned least = 0;  // of pairs, with -inf where there is any
    const auto load_units = [&](auto one_by_one) {
#pragma unroll
      for (int i = 0; i < parts * steps; ++i) {
        const int offset = Columns<whole>::offset_of_step(i);
        if constexpr (unit == 1) {
          logit[i] = whole || offset < left ? load_as<Acc>(from[offset]) : -infinity_v<Acc>;
        } else {
          const unsigned pair = pair_at<decltype(one_by_one)::value, in_slot>(
              from + offset, whole || offset < left, whole || offset + 1 < left);
          least = i == 0 ? pair : PackedPair<In>::minimum(least, pair);
          logit[i * unit] = PackedPair<In>::low(pair);
          logit[i * unit + 1] = PackedPair<In>::high(pair);
        }
      }
    };
    if (unit > 1 && single) {
      load_units(std::true_type{});
    } else {
      load_units(std::false_type{});
    }
    if constexpr (unit == 1) {
      transform.template transform_held<unit>(logit, Columns<whole>{column, left});
    } else {
      const bool any =
          PackedPair<In>::low(least) == -infinity_v<Acc> || PackedPair<In>::high(least) == -infinity_v<Acc>;
      transform.template transform_held<unit>(logit, ColumnsOfPairs<whole>{{column, left}, any});
    }
#pragma unroll
    for (int i = 0; i < parts * count; ++i) part[i / count].held[i % count] = logit[i];
  }

  /// The maximum of what lanes have; NaN where one is.
  struct Maximum {
    Held a, b;  ///< two chains, for their latency

    __device__ static Maximum none() {
      if constexpr (packed) {
        return {PackedPair<In>::minus_infinities, PackedPair<In>::minus_infinities};
      } else {
        return {-infinity_v<Acc>, -infinity_v<Acc>};
      }
    }
    __device__ void join(const PartOfSlice& part) {
#pragma unroll
      for (int i = 0; i < (packed ? steps : count); i += 2) {
        a = larger(a, part.held[i]);
        b = larger(b, part.held[i + 1]);
      }
    }
    /// At least -largest. `may_round`: see adds_pairs.
    __device__ Acc of_warp(bool may_round = true) const {
      Acc max;
      if constexpr (packed) {
        const unsigned pair = larger(a, b);
        max = maximum_or_nan(PackedPair<In>::low(pair), PackedPair<In>::high(pair));
      } else {
        max = larger(a, b);
      }
      max = maximum_of_warp(maximum_or_nan(max, -largest_v<Acc>));
      return may_round ? maximum_to_subtract(max) : max;
    }

   private:
    __device__ static Held larger(Held a, Held b) {
      if constexpr (packed) {
        return PackedPair<In>::maximum_or_nan(a, b);
      } else {
        return maximum_or_nan(a, b);
      }
    }
  };

  /// The exponentials of elements below the maximum of a share, uncorrected (ExponentialBelow).
  __device__ static Exponential exponential_below(Acc max) {
    return Exponential(base(max));
  }

  /// What sums of these have to be multiplied by.
  __device__ static Acc correction_below(Acc max) {
    const Exponential exponential = exponential_below(max);
    if constexpr (packed) {
      return exponential.correction(base(max));
    } else {
      return exponential.correction;
    }
  }

  /// Adds the exponentials, each of which each(i, exponential) sees. `subtracted`: see ExponentialBelow.
  template <bool subtracted = packed, class SomeExponential, class Each>
  __device__ void add_to(ShareSum<Acc>& sum, const SomeExponential& exponential, const Each& each) const {
    // A few in the accumulator's type, these in a better one: a lane whose own maximum weighs 1 would lose
    // what many small terms come to. 16 bits of output show less of that.
    constexpr int most = is_16_bit_v<Out> ? 8 : 4;
    constexpr int few = count < most ? count : most;
#pragma unroll
    for (int i = 0; i < count; i += few) {
      Acc e[few];
#pragma unroll
      for (int j = 0; j < few; ++j) {
        if constexpr (subtracted) {
          e[j] = exponential(value(i + j));
        } else {
          e[j] = exponential.uncorrected(value(i + j));
        }
        each(i + j, e[j]);
      }
#pragma unroll
      for (int distance = 1; distance < few; distance *= 2) {
#pragma unroll
        for (int j = 0; j < few; j += 2 * distance) e[j] += e[j + distance];
      }
      sum.join(ShareSum<Acc>::of(e[0]));
    }
  }

  __device__ void subtract(Acc value) {
#pragma unroll
    for (Held& h : held) h -= value;
  }

  /// The (max, sum) of a whole share. `correction`: what sums have to be multiplied by.
  __device__ static PartialSoftmax<Acc> share(Acc max, const ShareSum<Acc>& sum) {
    return share(max, sum, correction_below(max));
  }
  __device__ static PartialSoftmax<Acc> share(Acc max, const ShareSum<Acc>& sum, Acc correction) {
    PartialSoftmax<Acc> result{finite_maximum(max), sum.exact()};
    result.sum.scale(correction);
    if (max != result.max) result.sum = ExactSum<Acc>::of(max != max ? nan_v<Acc> : infinity_v<Acc>);
    return result;
  }

 private:
  /// Below no logit at all any number is as good, but not one whose product with log2(e) is infinite.
  __device__ static Acc base(Acc max) {
    if constexpr (packed) return max == -largest_v<Acc> ? Acc(0) : finite_maximum(max);
    return finite_maximum(max);
  }

  /// A lane's columns of some parts of a slice, from its first one on. Of those past the end, which hold -inf
  /// and keep it, the last one's operands: no branch parts the loads.
  template <bool whole>
  struct Columns {
    static constexpr bool vectors_are_whole = whole;
    index_type origin;
    int left;
    __device__ static constexpr int offset_of_step(int i) { return i / steps * columns + i % steps * stride; }
    __device__ static constexpr bool skips(int) { return false; }
    __device__ int offset(int v, int i) const {
      const int offset = offset_of_step(v) + i;
      return whole ? offset : min(offset, left - 1);
    }
    __device__ int offset(int v) const { return offset(v, 0); }
    __device__ Columns anew() const { return {origin, whole ? left : not_known(left)}; }
  };
  /// That know whether any of their logits is -inf: of pairs this takes half the instructions.
  template <bool whole>
  struct ColumnsOfPairs : Columns<whole> {
    bool has_minus_infinity;
  };

  /// Two of 16 bits, -inf where they are not there. Each access under a predicate of its own: with branches,
  /// each would be waited for before the next.
  template <bool single, bool in_slot>
  __device__ static unsigned pair_at(const In* at, bool first_exists, bool second_exists) {
    constexpr unsigned nothing = PackedPair<In>::minus_infinities;
    unsigned pair = nothing, low = nothing, high = nothing;
    if constexpr (single) {
      if (first_exists) low = bits_of_16(at);
      if (second_exists) high = bits_of_16(at + 1);
      return (low & 0xffffu) | high << 16;
    } else {
      if (in_slot ? first_exists : second_exists) pair = *reinterpret_cast<const unsigned*>(at);
      if (!in_slot && first_exists && !second_exists) low = bits_of_16(at);
      if (in_slot) low = pair;
      return second_exists ? pair : __byte_perm(low, nothing, 0x5410);
    }
  }

  template <bool single, bool whole, bool in_slot, bool looks_for_minus_infinity, class TransformRow>
  __device__ void load_one_by_one(const In* from, int left, const TransformRow& transform,
                                  index_type column) {
    constexpr bool is_identity = std::is_same_v<TransformRow, BoundIdentity::Row>;
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      const In* const at = from + i * stride;
      [[maybe_unused]] const auto exists = [&](int j) { return whole || i * stride + j < left; };
      // Of those past the end, which hold -inf and keep it, the last one's operands: no branch parts the
      // loads.
      [[maybe_unused]] const auto operand_column = [&](int j) {
        return column + (whole ? i * stride + j : min(i * stride + j, left - 1));
      };
      if constexpr (unit == 1) {
        held[i] = transformed<Acc, looks_for_minus_infinity>(
            transform, exists(0) ? load_as<Acc>(at[0]) : -infinity_v<Acc>, operand_column(0));
      } else {
        unsigned pair = pair_at<single, in_slot>(at, exists(0), exists(1));
        if constexpr (packed) {
          if constexpr (is_mask_of_bytes<TransformRow> && whole && !single) {
            pair = MaskBytes::applied_to_pair<std::remove_const_t<In>>(
                pair, transform.mask.data + operand_column(0));
          } else if constexpr (!is_identity) {
            Acc value[unit]{};
            bool kept[unit] = {true, true};
            if constexpr (whole && !single) {
              apply_stage_to_neighbours<unit>(transform, value, kept, operand_column(0));
            } else {
#pragma unroll
              for (int j = 0; j < unit; ++j) apply_stage(transform, value[j], kept[j], operand_column(j));
            }
            pair = PackedPair<In>::kept(pair, kept[0], kept[1]);
          }
          held[i] = pair;
        } else {
          Acc value[unit] = {PackedPair<In>::low(pair), PackedPair<In>::high(pair)};
          if constexpr (whole && !single) {
            transform_neighbours<unit, looks_for_minus_infinity>(transform, value, operand_column(0));
          } else {
#pragma unroll
            for (int j = 0; j < unit; ++j)
              value[j] = transformed<Acc, looks_for_minus_infinity>(transform, value[j], operand_column(j));
          }
#pragma unroll
          for (int j = 0; j < unit; ++j) held[i * unit + j] = value[j];
        }
      }
    }
  }

  /// (The compiler takes a half or bfloat16 apart into its bytes.)
  __device__ static unsigned bits_of_16(const In* at) {
    return *reinterpret_cast<const unsigned short*>(at);
  }
};

/// Whether rows of 16 bits are divided by a temperature, and perhaps masked, and nothing else. Quotients may
/// be coarse then: those of a share where its maximum is small, for outputs from logits where the row's is.
/// (One H200, by grid_pipelined_rows, fractions of a copy, with quotients to 0.51 units in the last place and
/// so: bfloat16 65536 columns 0.93 and 0.965, 131073 0.79 and 0.90, log_softmax 0.78 and 0.965, logsumexp, of
/// half a copy, 0.74 and 0.97, half 0.77 and 0.965; with a mask bfloat16 0.78 and 0.91, 131073 0.66 and 0.79,
/// half 0.70 and 0.90, with a mask for all rows bfloat16 0.74 and 0.89. Bfloat16 whose exponentials go back
/// to the slot, too, 0.90 with a mask, without one 131073 columns 0.88, 20001 0.82 for 0.92.)
template <class Problem>
inline constexpr bool divides_coarsely =
    PartOfSlice<Problem>::unpacked&& is_16_bit_v<typename Problem::Out>&& keeps_rows_packed<
        typename Problem::Transform>&& PartsOfChain<typename Problem::Transform>::temperatures == 1;

/// Whether the quotients that have this maximum are coarse: it is small, and their order is the logits'.
template <class Temperature>
__device__ __forceinline__ bool quotients_are_coarse(const Temperature& temperature, float max) {
  float any = 1;
  return temperature.finds_maximum(any, 0, 0) && fabsf(max) < most_coarse;
}

/// The maximum of a share's quotients from that of its logits, where the temperature keeps their order. False
/// if it is not finite: then it is any logit's.
template <class Temperature>
__device__ __forceinline__ bool maximum_of_quotients(const Temperature& temperature, float& max,
                                                     bool& is_coarse) {
  const float of_logits = max;
  is_coarse = false;
  if (!(of_logits > -largest_v<float> && of_logits <= largest_v<float>)) return false;
  max = temperature(of_logits, 0);
  is_coarse = quotients_are_coarse(temperature, max);
  if (is_coarse) max = temperature.coarse(of_logits);
  return true;
}

/// 2^(value scale - offset), in two instructions.
struct ExponentialOfProduct {
  float scale, offset;
  __device__ float operator()(float value) const { return ex2_approx_ftz(fmaf(value, scale, -offset)); }
};

/// The exponentials of coarse quotients below their maximum, of the logits themselves: ExponentialBelow whose
/// one product is with the reciprocal of the temperature, too, which is as coarse.
struct ExponentialOfCoarseQuotient : ExponentialOfProduct {
  /// Below that of the logits, uncorrected.
  template <class Temperature>
  __device__ static ExponentialOfCoarseQuotient below(const Temperature& temperature, float max_of_logits) {
    const float scale = temperature.coarse(ExponentialBelow<float>::log2e);
    return {{scale, rounded_product(max_of_logits, scale)}};
  }
  /// What sums of these have to be multiplied by, so that the largest is 1: the logarithm of a sum next to 1
  /// shows what is missing.
  __device__ float correction(float max_of_logits) const {
    return ex2_approx_ftz(-fmaf(max_of_logits, scale, -offset));
  }
  /// As outputs. `max`: of the quotients, `log_sum`: the binary logarithm of what they are divided by.
  template <class Temperature>
  __device__ static ExponentialOfCoarseQuotient divided(const Temperature& temperature, float max,
                                                        float log_sum) {
    return {{temperature.coarse(ExponentialBelow<float>::log2e),
             fmaf(max, ExponentialBelow<float>::log2e, log_sum)}};
  }
};

/// Some parts, one after the other; those that a slice does not reach into hold -inf. (A branch for each
/// would take longer.)
template <class Problem, int parts>
struct PartsOfSlice {
  using Part = PartOfSlice<Problem>;
  using In = typename Problem::In;
  using Acc = typename Problem::Acc;
  Part part[parts];

  /// `first` is at least as aligned as In.
  template <class TransformRow>
  __device__ void load(const In* first, int columns, int share, int lane, const TransformRow& transform,
                       index_type first_column) {
    const auto load_parts = [&](auto single) {
#pragma unroll
      for (int i = 0; i < parts; ++i) {
        const int begin = Part::first_column(share, lane) + i * Part::columns;
        part[i].template load<decltype(single)::value, false, false>(first + begin, columns - begin,
                                                                     transform, first_column + begin);
      }
    };
    if (Part::takes_units(first, transform, first_column)) {
      load_parts(std::false_type{});
    } else {
      load_parts(std::true_type{});
    }
  }
  __device__ Acc maximum(bool may_round) const {
    auto maximum = Part::Maximum::none();
#pragma unroll
    for (int i = 0; i < parts; ++i) maximum.join(part[i]);
    return maximum.of_warp(may_round);
  }
  /// each(part, i, exponential).
  template <class Exponential, class Each>
  __device__ ShareSum<Acc> sum(const Exponential& exponential, const Each& each) const {
    auto sum = ShareSum<Acc>::none();
#pragma unroll
    for (int i = 0; i < parts; ++i)
      part[i].add_to(sum, exponential, [&](int j, Acc exponential_of_j) { each(i, j, exponential_of_j); });
    return sum.of_warp();
  }
};

/// From a row's (max, sum) to its outputs, as every kernel that follows the ReductionPlan writes them.
/// `keeps_all`: not exponentials of bfloat16 alone; so contiguous rows.
template <class Problem, bool keeps_all = true>
struct SlicedRowResult : RowResult<typename Problem::Acc> {
  using Acc = typename Problem::Acc;
  using Out = typename Problem::Out;
  /// Where a share's exponentials, exp(value - max of the share), can be kept until the row's result is
  /// known, they only have to be scaled then.
  static constexpr bool keeps_packed_exponentials =
      std::is_same_v<typename Problem::In, Out> && is_16_bit_v<Out> &&
      (keeps_all || std::is_same_v<Out, bhalf_t>)&&PartOfSlice<Problem>::unpacked &&
      !divides_coarsely<Problem>;
  /// The same of log_softmax: value - max of the share, in the output's type, from which the output is as far
  /// again from 0, so that both roundings together are within one of its last place. (Where the share's
  /// maximum is one of its values.)
  static constexpr bool keeps_packed_differences = keeps_all && keeps_packed_exponentials;
  static constexpr bool keeps_exponentials =
      std::is_same_v<typename Problem::In, Acc> || keeps_packed_exponentials;
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
      ExponentialOfProduct output;
      if (takes_two_instructions(output)) {
        use(output);
        return;
      }
      use([this](Acc value) { return output_below(value); });
    } else {
      const ExponentialBelow<Acc> exponential(this->max);
      const Acc scale = exponential.correction * this->factor;
      use([&](Acc value) { return exponential.uncorrected(value) * scale; });
    }
  }

  /// Whether two instructions make an output of a logit, these: where the rounding of what all have in common
  /// does not show.
  __device__ bool takes_two_instructions(ExponentialOfProduct& output) const requires(sum_in_exponent) {
    constexpr float log2e = ExponentialBelow<float>::log2e;
    output = {log2e, fmaf(this->max, log2e, this->log_sum)};
    return this->operation == Operation::softmax && fabsf(output.offset) < 0x1p9f;
  }
  /// The same of its quotient, which is coarse.
  template <class Temperature>
  __device__ bool takes_two_instructions(const Temperature& temperature, ExponentialOfProduct& output) const
      requires(sum_in_exponent) {
    output = ExponentialOfCoarseQuotient::divided(temperature, this->max, this->log_sum);
    return this->operation == Operation::softmax;
  }

  /// As with_output, from a value to the output of what a function makes of it. (Whether fewer instructions
  /// would do is not asked.)
  template <class Function, class Use>
  __device__ void with_output_of(const Function& function, const Use& use) const {
    if (this->operation != Operation::softmax) {
      use([&](Acc value) { return this->log_softmax(function(value)); });
    } else {
      use([&](Acc value) { return output_below(function(value)); });
    }
  }
  __device__ Acc output_below(Acc value) const requires(sum_in_exponent) {
    return ex2_approx_ftz(fmaf(value - this->max, ExponentialBelow<Acc>::log2e, -this->log_sum));
  }

  /// As with_output, from a value to the output of its quotient, which is coarse.
  template <class Temperature, class Use>
  __device__ void with_output_of_quotients(const Temperature& temperature, const Use& use) const {
    if (this->operation != Operation::softmax) {
      use([&](Acc value) { return this->log_softmax(temperature.coarse(value)); });
    } else {
      static_assert(sum_in_exponent);
      use(ExponentialOfCoarseQuotient::divided(temperature, this->max, this->log_sum));
    }
  }

  /// An exponential as it is kept.
  __device__ static Acc kept(Acc exponential) {
    if constexpr (keeps_packed_exponentials) return PackedExponentials<Out>::kept(exponential);
    return exponential;
  }
  __device__ static Acc kept_difference(Acc difference) { return load_as<Acc>(store_as<Out>(difference)); }

  /// What the exponentials of a share are multiplied by, uncorrected as they were kept.
  __device__ Acc factor_of_share(Acc max_of_share) const {
    return exp_between_maxima(max_of_share - this->max) * this->factor *
           ExponentialBelow<Acc>(max_of_share).correction;
  }
  /// What is added to the differences of a share.
  __device__ Acc offset_of_share(Acc max_of_share) const { return this->log_softmax(max_of_share); }
};

// Out of the way of the instructions that every block takes.
__device__ __noinline__ inline RowGeometry::Row row_of_several_dimensions(const RowGeometry& geometry,
                                                                          index_type position) {
  return geometry.row(position);
}

/// What a block has to know first of a call with a few rows, side by side: each line of the parameters that
/// it reads costs it a way to L2.
template <class Problem>
struct FewRowsCall {
  const typename Problem::In* x;
  typename Problem::Out* y;
  index_type x_row_stride;  ///< of the one dimension of rows, where there is one
  index_type y_row_stride;
  index_type columns;
  int slices;  ///< of a row; 0 where there are no rows
  int slice_columns;
  int rank;
  Operation operation;
  CudaWorkspace workspace;

  FewRowsCall(const Problem& problem, const ReductionPlan& plan, const CudaWorkspace& workspace_)
      : x(problem.x),
        y(problem.y),
        x_row_stride(problem.geometry.rank == 1 ? problem.geometry.x_stride[0] : 0),
        y_row_stride(problem.geometry.rank == 1 ? problem.geometry.y_stride[0] : 0),
        columns(problem.geometry.columns),
        slices(problem.geometry.rows > 0 ? static_cast<int>(plan.slices) : 0),
        slice_columns(plan.slice_columns),
        rank(problem.geometry.rank),
        operation(problem.operation),
        workspace(workspace_) {}

  __device__ RowGeometry::Row row(const RowGeometry& geometry, index_type position) const {
    if (rank > 1) return row_of_several_dimensions(geometry, position);
    return {position * x_row_stride, position * y_row_stride, position};
  }
};

/// Writes a lane's unit of a slice.
template <class Out, class Acc, int unit>
__device__ void store_unit(Out* slice, int column, int columns, const Acc (&value)[unit]) {
  if constexpr (unit == 2) {
    if (column + 1 < columns && reinterpret_cast<std::uintptr_t>(slice) % (2 * sizeof(Out)) == 0) {
      if constexpr (is_16_bit_v<Out> && std::is_same_v<Acc, float>) {
        *reinterpret_cast<unsigned*>(slice + column) = rounded_pair<Out>(value[0], value[1]);
        return;
      } else if constexpr (std::is_same_v<Out, float>) {
        *reinterpret_cast<float2*>(slice + column) = float2{value[0], value[1]};
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
  partial.sum.scale(exp_between_maxima(partial.max - max));
  partial.max = max;
#pragma unroll
  for (int mask = 1; mask < lanes; mask *= 2) partial.sum.join(partial.sum.from_lane_xor(mask));
  return partial;
}

/// Joins what the lanes of a warp have of a row's slices; the result in all of them.
template <class Acc>
__device__ PartialSoftmax<Acc> join_lanes_of_slices(PartialSoftmax<Acc> partial, index_type slices) {
  const Acc max = maximum_of_warp(partial.max);
  partial.sum.scale(exp_between_maxima(partial.max - max));
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

/// Whether the lanes of a warp that wait for words in memory go on together when all have come, and join what
/// they have of a row's slices at once. Behind a loop that lanes leave one by one nvcc has another way to the
/// function's end, on which each shuffle takes some hundred cycles, and of double there are many. (One H200,
/// fractions of a copy, one by one and so: double 16384 columns 0.83 and 0.96, 50257 0.80 and 0.91, 98304
/// 0.77 and 0.96. But float 50257 columns 0.966 and 0.955, 1 M 0.963 and 0.930, 3 M 0.912 and 0.797, bfloat16
/// 3 M 0.938 and 0.892, whose words are then asked for before they are there.)
template <class Acc>
inline constexpr bool waits_by_warp = sizeof(Acc) == 8;

/// Waits, all lanes together, for what is `missing`: `load` asks for a lane's once more and says whether it
/// has come.
template <class Load>
__device__ __forceinline__ void wait_by_warp(bool missing, const Load& load) {
  while (__any_sync(0xffffffffu, missing)) {
    if (missing) missing = !load();
  }
}

/// Adds the partial results of `at_once` slices of a row, in their order; what has no slice is none().
template <unsigned at_once, int unrolled, class Acc, class PartialOf>
__device__ __forceinline__ void join_slices(PartialSoftmax<Acc>& have, const PartialOf& partial_of) {
  Acc max = have.max;
#pragma unroll unrolled
  for (unsigned i = 0; i < at_once; ++i) max = Kokkos::fmax(max, partial_of(i).max);
  have.sum.scale(exp_between_maxima(have.max - max));
  have.max = max;
#pragma unroll unrolled
  for (unsigned i = 0; i < at_once; ++i) {
    PartialSoftmax<Acc> partial = partial_of(i);
    partial.sum.scale(exp_between_maxima(partial.max - max));
    have.sum.join(partial.sum);
  }
}

/// Joins what a lane has of some slices. The exponentials do not wait for each other.
template <int count, class Acc>
__device__ PartialSoftmax<Acc> join_at_once(const PartialSoftmax<Acc> (&some)[count]) {
  PartialSoftmax<Acc> total = some[0];
  join_slices<count - 1, count - 1>(total, [&](unsigned i) { return some[i + 1]; });
  return total;
}

/// The result of a row from those of its slices, by one warp, in all lanes of it: lane l takes slices l, l +
/// 32, ... `get(slice, exists)` gives a slice's. Where lanes wait together it is called for slices that do
/// not exist, too, and there are at most so many.
template <class Acc, int most_slices = 32, class Get>
__device__ PartialSoftmax<Acc> join_slices(index_type slices, int lane, const Get& get) {
  const int lanes = lanes_of_slices(slices);
  index_type slice = lane % lanes;
  PartialSoftmax<Acc> total;
  if constexpr (waits_by_warp<Acc>) {
    PartialSoftmax<Acc> some[most_slices / 32];
#pragma unroll
    for (int i = 0; i < most_slices / 32; ++i) {
      some[i] = PartialSoftmax<Acc>::none();
      if (i * 32 < slices) some[i] = get(slice + i * 32, slice + i * 32 < slices);
    }
    total = join_at_once(some);
  } else {
    total = slice < slices ? get(slice, true) : PartialSoftmax<Acc>::none();
    for (slice += 32; slice < slices; slice += 32) total.join(get(slice, true));
  }
  return join_lanes_of_slices(total, slices);
}

/// What a word in memory holds, once it is there.
template <class Acc>
__device__ PartialSoftmax<Acc> wait_for(const PartialWords<Acc>* from, std::uint32_t tag) {
  PartialWords<Acc> word;
  do {
    word = PartialWords<Acc>::load(from);
  } while (!word.is_of(tag));
  return word.value();
}

/// The same of a word for each lane of a warp that has one.
template <class Acc>
__device__ PartialSoftmax<Acc> wait_for_each(const PartialWords<Acc>* from, std::uint32_t tag, bool has_one) {
  PartialSoftmax<Acc> mine = PartialSoftmax<Acc>::none();
  if constexpr (waits_by_warp<Acc>) {
    PartialWords<Acc> word;
    wait_by_warp(has_one, [&] {
      word = PartialWords<Acc>::load(from);
      return word.is_of(tag);
    });
    if (has_one) mine = word.value();
  } else if (has_one) {
    mine = wait_for(from, tag);
  }
  return mine;
}

/// As collect_slices, where lanes wait together. (Of two slices of a lane at once: four take more registers
/// than there are in a kernel's other warps. One H200, fractions of a copy, four and two: double 65536
/// columns 0.935 and 0.955, 393216 0.81 and 0.855.)
template <bool has_runs, class Acc>
__device__ PartialSoftmax<Acc> collect_slices_by_warp(const PartialWords<Acc>* words, index_type slices,
                                                      std::uint32_t tag, int lane,
                                                      const PartialWords<Acc>* run_words, index_type runs) {
  constexpr int at_once = 2;
  PartialSoftmax<Acc> have = PartialSoftmax<Acc>::none();
  if constexpr (has_runs) {
#pragma unroll 1
    for (index_type run = 0; run < runs; run += 32)
      have.join(wait_for_each(run_words + run + lane, tag, run + lane < runs));
  }
  const int slice = lane % lanes_of_slices(slices);
#pragma unroll 1
  for (index_type first = runs * ReductionPlan::slices_of_run; first < slices; first += 32 * at_once) {
    const index_type left = slices - first;
    PartialWords<Acc> of[at_once];
    bool missing[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) missing[i] = slice + i * 32 < left;
    // All that are missing at once: one after the other, each would take a way to L2 and back.
    wait_by_warp(missing[0], [&] {
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        if (missing[i]) of[i] = PartialWords<Acc>::load(words + first + slice + i * 32);
      }
      bool complete = true;
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        missing[i] = missing[i] && !of[i].is_of(tag);
        complete = complete && !missing[i];
      }
      return complete;
    });
    PartialSoftmax<Acc> some[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i)
      some[i] = slice + i * 32 < left ? of[i].value() : PartialSoftmax<Acc>::none();
    if (first == 0) {
      have = join_at_once(some);
    } else {
      have.join(join_at_once(some));
    }
  }
  return join_lanes_of_slices(have, slices);
}

/// The same from words in memory, waiting for those that are not there yet; where a row has runs of slices,
/// from theirs and those of the slices behind them.
template <bool has_runs, class Acc>
__device__ PartialSoftmax<Acc> collect_slices(const PartialWords<Acc>* words, index_type slices,
                                              std::uint32_t tag, int lane,
                                              const PartialWords<Acc>* run_words = nullptr,
                                              index_type runs = 0) {
  if constexpr (waits_by_warp<Acc>)
    return collect_slices_by_warp<has_runs>(words, slices, tag, lane, run_words, runs);
  constexpr int at_once = ReductionPlan::slices_at_once / 32;
  PartialSoftmax<Acc> have = PartialSoftmax<Acc>::none();
  index_type first = lane % lanes_of_slices(slices);
  if constexpr (has_runs) first += runs * ReductionPlan::slices_of_run;
  // One or two runs are asked for with the slices behind them: of a row that has no more these are there by
  // then, too. (One H200, fractions of a copy, these asked for first, and so: float 1.25 M columns 0.935 and
  // 0.95, bfloat16 2.2 M 0.90 and 0.925; but float of 19 runs, 6 M, 0.88 and 0.85.)
  [[maybe_unused]] bool asks_for_runs = has_runs && runs <= 2;
  [[maybe_unused]] PartialWords<Acc> of_run;
  if constexpr (has_runs) {
    if (!asks_for_runs) {
#pragma unroll 1
      for (index_type run = lane; run < runs; run += 32) have.join(wait_for(run_words + run, tag));
      __syncwarp();  // (each lane would go on alone, and ask for the words of its slices alone)
    } else if (lane < runs) {
      of_run = PartialWords<Acc>::load(run_words + lane);
    }
  }
  for (; first < slices; first += 32 * at_once) {
    PartialWords<Acc> of[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      if (first + i * 32 < slices) of[i] = PartialWords<Acc>::load(words + first + i * 32);
    }
    if constexpr (has_runs) {
      if (asks_for_runs) {
        if (lane < runs) {
          while (!of_run.is_of(tag)) of_run = PartialWords<Acc>::load(run_words + lane);
          have.join(of_run.value());
        }
        __syncwarp();
        asks_for_runs = false;
      }
    }
    // (One H200, all that are missing asked for together, fractions of a copy: bfloat16 4 M columns 0.93 for
    // 0.915, 1 M 0.97 for 0.965, but 3 M 0.91 for 0.93, 65536 0.89 for 0.965.)
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      if (first + i * 32 < slices) {
        while (!of[i].is_of(tag)) of[i] = PartialWords<Acc>::load(words + first + i * 32);
        have.join(of[i].value());
      }
    }
  }
  return join_lanes_of_slices(have, slices);
}

/// The same for at most 32 slices.
template <class Acc>
__device__ PartialSoftmax<Acc> collect_slice_each(const PartialWords<Acc>* words, index_type slices,
                                                  std::uint32_t tag, int lane) {
  const index_type slice = lane % lanes_of_slices(slices);
  return join_lanes_of_slices(wait_for_each(words + slice, tag, slice < slices), slices);
}

/// A slice from its shares in one lane, as join_lanes<shares> does it in several. `get(share)` gives a
/// share's.
template <class Acc, class Get>
__device__ PartialSoftmax<Acc> join_shares(const Get& get) {
  constexpr int shares = ReductionPlan::shares;
  PartialSoftmax<Acc> of[shares];
  Acc max = -largest_v<Acc>;
#pragma unroll
  for (int i = 0; i < shares; ++i) {
    of[i] = get(i);
    max = Kokkos::fmax(max, of[i].max);
  }
#pragma unroll
  for (int i = 0; i < shares; ++i) of[i].sum.scale(exp_between_maxima(of[i].max - max));
#pragma unroll
  for (int mask = 1; mask < shares; mask *= 2) {
#pragma unroll
    for (int i = 0; i < shares; i += 2 * mask) of[i].sum.join(of[i + mask].sum);
  }
  of[0].max = max;
  return of[0];
}

/// The same from words in memory, which are `stride` apart, waiting for those that are not there yet, where a
/// lane has some to ask for.
template <int stride, class Acc>
__device__ PartialSoftmax<Acc> collect_shares(const PartialWords<Acc>* words, std::uint32_t tag, bool exist) {
  constexpr int shares = ReductionPlan::shares;
  PartialWords<Acc> word[shares];
  const auto load = [&] {
    bool complete = true;
#pragma unroll
    for (int i = 0; i < shares; ++i) word[i] = PartialWords<Acc>::load(words + i * stride);
#pragma unroll
    for (int i = 0; i < shares; ++i) complete = complete && word[i].is_of(tag);
    return complete;
  };
  if constexpr (waits_by_warp<Acc>) {
    wait_by_warp(exist, load);
    if (!exist) return PartialSoftmax<Acc>::none();
  } else {
    while (!load()) {
    }
  }
  return join_shares<Acc>([&](int share) { return word[share].value(); });
}

/// A position in a ring of slots, and the parity of its turn.
struct RingCursor {
  int slot = 0;
  std::uint32_t parity = 0;
  __device__ void advance(int slots, int by = 1) {
    slot += by;
    if (slot >= slots) {
      slot -= slots;
      parity ^= 1;
    }
  }
};

/// Whether slices of rows that may be read twice can wait for their row in registers, besides shared memory.
/// (Not of 16 bits: their publishers take the registers. Not double: 1.1 M columns 0.53 of a copy for 0.61 on
/// one H200. Nor with a transform: the kernel that does it would be compiled once more for each.)
template <class Problem>
inline constexpr bool parks_slices =
    std::is_same_v<typename Problem::In, float>&& std::is_same_v<typename Problem::Out, float> &&
    !PartOfSlice<Problem>::has_transform;

/// Whether outputs are larger than inputs, so that a slice's place has no room for them.
template <class Problem>
inline constexpr bool has_larger_outputs = sizeof(typename Problem::Out) > sizeof(typename Problem::In);

template <class Problem>
ReductionPlan plan_of(const Problem& problem) {
  const bool widens = has_larger_outputs<Problem> && problem.operation != Operation::logsumexp;
  return ReductionPlan::of<typename Problem::In>(problem.geometry.columns, parks_slices<Problem>, widens);
}

/// Whether each row of x and, where rows are written, of y begins at a multiple of so many bytes.
template <index_type alignment, class Problem>
bool rows_begin_at(const Problem& problem) {
  const RowGeometry& g = problem.geometry;
  const auto all_begin_there = [&](const auto* data, const index_type* strides) {
    bool all = reinterpret_cast<std::uintptr_t>(data) % alignment == 0;
    for (int d = 0; d < g.rank; ++d) {
      if (g.extent[d] > 1) all = all && strides[d] * static_cast<index_type>(sizeof(*data)) % alignment == 0;
    }
    return all;
  };
  return all_begin_there(problem.x, g.x_stride) &&
         (problem.operation == Operation::logsumexp || all_begin_there(problem.y, g.y_stride));
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
