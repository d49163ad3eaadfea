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
    constexpr int half = (count + 1) / 2;
#pragma unroll
    for (int i = 0; i < count / 2; ++i) a[i] = operation(a[i], a[i + half]);
    return fold_accumulators<half>(a, operation);
  }
}

/// Folds all that a thread holds, `vectors` of so many elements, but for steps that it skips.
template <int vectors, class T, int count, class Operation, class Skips>
__device__ __forceinline__ T fold_held(const T (&held)[count], const Operation& operation,
                                       const Skips& skips) {
  constexpr int width = count / vectors;
  T of_vectors[width];
#pragma unroll
  for (int i = 0; i < width; ++i) of_vectors[i] = held[i];
#pragma unroll
  for (int k = 1; k < vectors; ++k) {
    if (skips(k)) break;
#pragma unroll
    for (int i = 0; i < width; ++i) of_vectors[i] = operation(of_vectors[i], held[k * width + i]);
  }
  return fold_accumulators<width>(of_vectors, operation);
}

/// Whether rows may be held by address: 16 bits are content with sums in coarse units.
template <class Problem>
inline constexpr bool may_be_by_address =
    is_16_bit_v<typename Problem::In>&& is_16_bit_v<typename Problem::Out>;

/// Whether they stay as they are in memory.
template <class Problem>
inline constexpr bool is_packed = may_be_by_address<Problem>&& keeps_rows_packed<typename Problem::Transform>;

/// Values of 16 bits that are logits.
template <class In>
struct LogitsOf16Bits {
  __device__ float minus(float max, float value) const { return value - max; }
  __device__ auto exponential_below(float max) const { return ExponentialOf16Bits<In>(max); }
};

/// Logits in registers, where they become exponentials, and where the maximum is subtracted from them if the
/// exponential asks for that: as TransformedLogits to the same bits.
struct HeldLogits {
  struct Exponential {
    ExponentialBelow<float> below;
    /// Of what is an exponential already.
    __device__ float operator()(float value) const { return value; }
    __device__ float correction(float) const { return below.correction; }
  };
  bool max_is_subtracted;
  __device__ float minus(float max, float value) const { return max_is_subtracted ? value : value - max; }
  __device__ Exponential exponential_below(float max) const { return {ExponentialBelow<float>(max)}; }
};

/// Logits that a transform makes of values of 16 bits whenever they are used. `in_order`: they have the order
/// of the values, -inf among them, and what is subtracted from them is small (ExponentialBelow); so they are
/// if `is_in_order`, one of a warp's rows beside others that are not. To the same bits either way.
template <class TransformRow, bool in_order>
struct TransformedLogits {
  const TransformRow& transform;
  bool is_in_order;

  /// Whether the transform has a way with fewer instructions that is good enough for outputs of 16 bits
  /// where logits are small: a unit in the last place of 2^9 is 2^-14.
  static constexpr bool may_be_coarse = requires(const TransformRow& t) { t.coarse(0.0f); };
  static constexpr float most_coarse = 0x1p9f;

  /// The maximum of logits from that of the values, if it is in order.
  __device__ static bool finds_maximum(const TransformRow& transform, float& max) {
    // Asked first of another maximum: this one need not be finite.
    float of_values = max, any = 1;
    if (!transform.finds_maximum(any, 0, 0)) return false;
    if (!(fabsf(max) <= largest_v<float>)) return true;
    if (!transform.finds_maximum(max, 0, 0) || ExponentialBelow<float>(max).subtracts_first()) return false;
    if constexpr (may_be_coarse) {
      if (fabsf(max) >= most_coarse) return false;
      max = transform.coarse(of_values);
    }
    return true;
  }

  __device__ float operator()(float value) const {
    if constexpr (may_be_coarse) {
      if (in_order || is_in_order) return transform.coarse(value);
    }
    float logit = value;
    bool kept = true;
    apply_stage(transform, logit, kept, index_type(0));  // (that of any column; what is dropped is -inf)
    return in_order || value != -infinity_v<float> ? logit : value;
  }
  struct Exponential {
    TransformedLogits logits;
    ExponentialBelow<float> below;
    __device__ float operator()(float value) const {
      return in_order ? below(logits(value)) : below.uncorrected(logits(value));
    }
    __device__ float correction(float) const { return below.correction; }
  };
  __device__ float minus(float max, float value) const { return (*this)(value)-max; }
  __device__ Exponential exponential_below(float max) const { return {*this, ExponentialBelow<float>(max)}; }
};

/// Whether a block may have rows one after the other, each read while the one before it is computed, in a
/// kernel for whole rows alone: logits of float with a transform that has operands, which may be the same for
/// all rows. (A factor alone and GELU are as fast or faster with a block for each row.)
template <class Problem>
inline constexpr bool may_have_rows_in_turn = [] {
  using Transform = typename Problem::Transform;
  return std::is_same_v<typename Problem::In, float> && operands_of<Transform> != 0 &&
         !is_known_at_run_time<Transform> && requires(const Transform& t) {
    t.has_rows_alike();
  };
}();

/// How a problem's rows are held. `irregular`: interleaved, or, by address, anywhere.
template <class Problem, int vectors, bool irregular>
using RegistersOf = std::conditional_t<
    is_packed<Problem>,
    PackedRow<typename Problem::In, vectors, irregular, knows_end_of_kept<typename Problem::Transform::Row>>,
    std::conditional_t<
        may_be_by_address<Problem> && irregular,
        LogitsByAddress<typename Problem::In, vectors, knows_end_of_kept<typename Problem::Transform::Row>,
                        !only_drops<typename Problem::Transform>>,
        RowRegisters<typename Problem::In, typename Problem::Out, vectors, irregular>>>;

template <class Acc>
struct ReduceWarps;

/// Whether a row's vectors are added up exactly, each by itself, so that its bits do not say how many threads
/// it was dealt to: rows of a block, of floats that are whole vectors.
template <class Registers, class Reduce>
inline constexpr bool adds_vectors_exactly = false;
template <int vectors>
inline constexpr bool adds_vectors_exactly<RowRegisters<float, float, vectors, false>, ReduceWarps<float>> =
    true;

/// Whether exponentials are CUDA's own. (Rows of a block, of doubles that are no whole vectors, on one H200,
/// fraction of a copy with those and without their branch: 1001 columns 0.98 and 0.94, 4097 0.97 and 0.90,
/// though logsumexp has 0.62 and 0.64; ncu shows as many bytes, fewer instructions and longer waits for
/// loads. With five vectors a thread, and more threads, 0.86 and 0.77.)
template <class Registers, class Reduce>
inline constexpr bool exponentials_branch = false;
template <class Out, int vectors>
inline constexpr bool exponentials_branch<RowRegisters<double, Out, vectors, true>, ReduceWarps<double>> =
    true;

/// From the logits in the registers of a row's threads to its outputs. `load` brings them there, see
/// RowRegisters. `Reduce` gives every thread of the row the maximum and the sum over its threads, in an order
/// that depends on the length alone; `store` is given what makes an output of what the registers hold then.
/// `is_softmax`: the operation, or, a constant, what alone the kernel is for.
template <class Problem, class Registers, class Threads, class Reduce, class Load, class Store>
__device__ __forceinline__ void softmax_in_registers(Registers& row, const Threads& threads,
                                                     const Problem& problem, typename Problem::Out* lse,
                                                     bool writes_lse, const Reduce& reduce, const Load& load,
                                                     const Store& store, bool is_softmax) {
  using Acc = typename Problem::Acc;
  using Out = typename Problem::Out;
  constexpr int vectors = Registers::vectors, width = Registers::width;
  const Operation operation = is_softmax ? Operation::softmax : problem.operation;
  const auto columns = static_cast<int>(problem.geometry.columns);
  const auto larger = [](Acc a, Acc b) { return maximum_or_nan(a, b); };
  Acc max_of_row;
#pragma unroll 1
  for (bool looks = false;; looks = true) {
    const bool looked = load(looks);
    max_of_row = reduce.max(
        fold_held<vectors>(row.held, larger, [&](int k) { return Registers::skips(k, columns, threads); }));
    if (looked || __all_sync(0xffffffffu, max_of_row == max_of_row)) break;
    threads.synchronize();
  }
  const Acc max = finite_maximum(max_of_row);
  // Summed vector by vector, so that one warp's vectors can be in several warps (ReduceVectors).
  const auto add = [](Acc a, Acc b) { return a + b; };
  const std::conditional_t<exponentials_branch<Registers, Reduce>, BranchingExponentialBelow,
                           ExponentialBelow<Acc>>
      exponential(max);
  if (exponential.subtracts_first()) {
#pragma unroll
    for (auto& value : row.held) value -= max;
  }
  const bool keeps_exponentials = is_softmax;
  Acc of_vector[vectors];
#pragma unroll
  for (int k = 0; k < vectors; ++k) of_vector[k] = 0;
  const auto exponentiate = [&](auto keeps) {
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      if (Registers::skips(k, columns, threads)) break;
      Acc terms[width];
#pragma unroll
      for (int i = 0; i < width; ++i) {
        terms[i] = exponential(row.held[k * width + i]);
        if constexpr (decltype(keeps)::value) row.held[k * width + i] = terms[i];
      }
      of_vector[k] = fold_accumulators<width>(terms, add);
    }
  };
  if (keeps_exponentials) {
    exponentiate(std::true_type{});
  } else {
    exponentiate(std::false_type{});
  }
  const Acc uncorrected_sum = [&] {
    if constexpr (adds_vectors_exactly<Registers, Reduce>) {
      return reduce.sum_of(of_vector);
    } else {
      return reduce.sum(fold_accumulators<vectors>(of_vector, add));
    }
  }();
  const Acc sum = sum_or_special(
      max_of_row, keeps_exponentials ? uncorrected_sum : uncorrected_sum * exponential.correction);
  const RowResult<Acc> result(operation, MaxSum<Acc>{max, sum});
  if (operation == Operation::logsumexp) {
    if (writes_lse) *lse = store_as<Out>(result.logsumexp());
  } else if (!is_softmax) {
    const Acc left = exponential.subtracts_first() ? Acc(0) : max;
    store([&](Acc value) { return (value - left) - result.log_sum; });
  } else {
    store([&](Acc exponential_of_value) { return exponential_of_value * result.factor; });
  }
}
template <class Problem, class Registers, class Threads, class Reduce, class Load, class Store>
__device__ __forceinline__ void softmax_in_registers(Registers& row, const Threads& threads,
                                                     const Problem& problem, typename Problem::Out* lse,
                                                     bool writes_lse, const Reduce& reduce, const Load& load,
                                                     const Store& store) {
  softmax_in_registers(row, threads, problem, lse, writes_lse, reduce, load, store,
                       problem.operation == Operation::softmax);
}

/// Of rows by address. Below no logit at all any number is as good, but not one whose product with log2(e) is
/// infinite.
__device__ inline float subtracted_maximum(float max_of_row) {
  return max_of_row == -infinity_v<float> ? 0.0f : finite_maximum(max_of_row);
}

/// A pair of outputs of two values, or of their exponentials.
template <class Out, class Exponential>
struct SoftmaxOfPair {
  const Exponential& exponential;
  float factor;
  __device__ unsigned operator()(float first, float second) const {
    return of_exponentials(exponential(first), exponential(second));
  }
  __device__ unsigned of_exponentials(float first, float second) const {
    return rounded_pair<Out>(first * factor, second * factor);
  }
};

/// From the maximum of a row of 16 bits by address to its outputs. `logits`: what its values are, or what is
/// made of them. `sum_of_exponentials(exponential, exact)`: FixedPointUnits of all, `exact` as a type.
/// `store` is given what makes a pair of outputs of two values (SoftmaxOfPair also of their exponentials),
/// `store_logsumexp` the logsumexp.
template <class Problem, class Logits, class Sum, class Store, class StoreLogsumexp>
__device__ __forceinline__ void addressed_row_result(Operation operation, int columns, float max_of_row,
                                                     const Logits& logits, const Sum& sum_of_exponentials,
                                                     const Store& store,
                                                     const StoreLogsumexp& store_logsumexp) {
  using Out = typename Problem::Out;
  const float max = subtracted_maximum(max_of_row);
  const auto exponential = logits.exponential_below(max);
  const auto result_of = [&](float sum_of_row) {
    return RowResult<float>(operation, MaxSum<float>{max, sum_of_row * exponential.correction(max)});
  };
  bool exact = operation == Operation::log_softmax;
  float finite_sum = 0;
  if (!exact) {
    finite_sum = sum_of_exponentials(exponential, std::false_type{});
    // Coarse units lose what many small terms come to: where that is more than a quarter of a unit in the
    // last place of the largest output, or of the logsumexp, they are not enough.
    constexpr float quarter = std::is_same_v<Out, bhalf_t> ? 0x1p-10f : 0x1p-13f;
    const float error = static_cast<float>(columns) * FixedPointUnits::largest_error_of_whole;
    const float result = operation == Operation::softmax ? 1.0f : fabsf(result_of(finite_sum).logsumexp());
    exact = error > quarter * result * finite_sum;
  }
  // (All lanes take part in a row's sum.)
  if (__any_sync(0xffffffffu, exact)) {
    const float exact_sum = sum_of_exponentials(exponential, std::true_type{});
    if (exact) finite_sum = exact_sum;
  }
  const float sum = sum_or_special(max_of_row, finite_sum);
  if (operation == Operation::softmax) {
    const float factor = sum == 0.0f ? 0.0f : sum < infinity_v<float> ? __fdividef(1.0f, sum) : nan_v<float>;
    store(SoftmaxOfPair<Out, std::remove_cvref_t<decltype(exponential)>>{exponential, factor});
  } else {
    const RowResult<float> result = result_of(sum);
    if (operation == Operation::logsumexp) {
      store_logsumexp(result.logsumexp());
    } else {
      store([&](float first, float second) {
        return rounded_pair<Out>(logits.minus(max, first) - result.log_sum,
                                 logits.minus(max, second) - result.log_sum);
      });
    }
  }
}

/// Calls `finish` with what a transform of packed rows makes of their values, `max_of_row` being the maximum
/// of these and, then, of the logits. `find_maximum`(logits): that where the transform changes the order. By
/// all lanes of a warp, which may have several rows, with a prepared transform.
template <class T, class TransformRow, class FindMaximum, class Finish>
__device__ __forceinline__ void with_logits_of_packed(const TransformRow& transform, float& max_of_row,
                                                      const FindMaximum& find_maximum, const Finish& finish) {
  if constexpr (std::is_same_v<TransformRow, BoundIdentity::Row>) {
    finish(LogitsOf16Bits<T>{});
  } else {
    using InOrder = TransformedLogits<TransformRow, true>;
    const bool is_in_order = InOrder::finds_maximum(transform, max_of_row);
    if (__all_sync(0xffffffffu, is_in_order)) {
      finish(InOrder{transform, true});
      return;
    }
    const TransformedLogits<TransformRow, false> logits{transform, is_in_order};
    max_of_row = find_maximum(logits);
    finish(logits);
  }
}

/// softmax_in_registers of rows by address. `load` gives the transform of the row.
template <class Problem, class T, int vectors, bool anywhere, bool may_drop_end, class Threads, class Reduce,
          class Load, class Store>
__device__ __forceinline__ void softmax_in_registers(PackedRow<T, vectors, anywhere, may_drop_end>& row,
                                                     const Threads& threads, const Problem& problem,
                                                     typename Problem::Out* lse, bool writes_lse,
                                                     const Reduce& reduce, const Load& load,
                                                     const Store& store) {
  const auto transform = load(true);
  using Pair = PackedPair<T>;
  constexpr int pairs = PackedRow<T, vectors, anywhere>::pairs;
  const auto larger = [](unsigned a, unsigned b) { return Pair::maximum_or_nan(a, b); };
  const unsigned pair_of_maxima =
      fold_held<vectors>(row.held, larger, [&](int k) { return row.skips(k, threads); });
  float max_of_row = reduce.max(maximum_or_nan(Pair::low(pair_of_maxima), Pair::high(pair_of_maxima)));
  // What is formed once needs no second exponential for the output, but as many registers again as packing
  // spares: there are some where a thread has few vectors. (Fraction of a copy of 1 GiB, bfloat16 on one
  // H200, formed twice and once: 64 columns 0.98 and 1.00, 128 0.98 and 1.00, 256 0.97 and 1.00, 512 0.98
  // and 1.00; of four vectors 1024 columns 0.99 both. With a factor or a temperature they are spilled.)
  constexpr bool holds_exponentials =
      vectors <= 2 && std::is_same_v<std::remove_const_t<decltype(transform)>, BoundIdentity::Row>;
  [[maybe_unused]] float held_exponential[holds_exponentials ? vectors * pairs : 1][2];
  const auto sum_of_exponentials = [&](const auto& exponential, auto of_logarithm) {
    constexpr bool exact = decltype(of_logarithm)::value;
    FixedPointUnits units{0, 0};
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      if (row.skips(k, threads)) break;
#pragma unroll
      for (int i = 0; i < pairs; ++i) {
        const unsigned pair = row.held[k * pairs + i];
        const float first = exponential(Pair::low(pair)), second = exponential(Pair::high(pair));
        units.template add<exact>(first, second);
        if constexpr (holds_exponentials && !exact) {
          held_exponential[k * pairs + i][0] = first;
          held_exponential[k * pairs + i][1] = second;
        }
      }
    }
    const float sum = reduce.template sum_of_units<exact>(units);
    // Keeps the compiler from remembering what it made of the pairs: that would take the registers that
    // packing spares.
#pragma unroll
    for (auto& pair : row.held) asm volatile("" : "+r"(pair));
    return sum;
  };
  const auto finish = [&](const auto& logits) {
    addressed_row_result<Problem>(
        problem.operation, row.columns, max_of_row, logits, sum_of_exponentials,
        [&](const auto& output) {
          store([&](int k, int i) {
            if constexpr (holds_exponentials && requires { output.of_exponentials(0.0f, 0.0f); }) {
              const auto& held = held_exponential[k * pairs + i];
              return output.of_exponentials(held[0], held[1]);
            } else {
              const unsigned pair = row.held[k * pairs + i];
              return output(Pair::low(pair), Pair::high(pair));
            }
          });
        },
        [&](float logsumexp) {
          if (writes_lse) *lse = store_as<typename Problem::Out>(logsumexp);
        });
  };
  with_logits_of_packed<T>(
      transform, max_of_row,
      [&](const auto& logits) {
        float max = -infinity_v<float>;
#pragma unroll
        for (int k = 0; k < vectors; ++k) {
          if (row.skips(k, threads)) break;
#pragma unroll
          for (int i = 0; i < pairs; ++i) {
            const unsigned pair = row.held[k * pairs + i];
            max = maximum_or_nan(max, maximum_or_nan(logits(Pair::low(pair)), logits(Pair::high(pair))));
          }
        }
        threads.synchronize();
        return reduce.max(max);
      },
      finish);
}

/// Rows of logits whose sums are exact.
template <class Row>
concept holds_exact_logits = requires {
  Row::first_units;
};

/// Likewise of these, which `load` brings.
template <class Problem, holds_exact_logits Row, class Threads, class Reduce, class Load, class Store>
__device__ __forceinline__ void softmax_in_registers(Row& row, const Threads& threads, const Problem& problem,
                                                     typename Problem::Out* lse, bool writes_lse,
                                                     const Reduce& reduce, const Load& load,
                                                     const Store& store) {
  constexpr int vectors = Row::vectors, width = Row::width;
  const auto larger = [](float a, float b) { return maximum_or_nan(a, b); };
  float max_of_row;
#pragma unroll 1
  for (bool looks = false;; looks = true) {
    const bool looked = load(looks);
    max_of_row =
        reduce.max(fold_held<vectors>(row.held, larger, [&](int k) { return row.skips(k, threads); }));
    if (looked || __all_sync(0xffffffffu, max_of_row == max_of_row)) break;
    threads.synchronize();
  }
  const ExponentialBelow<float> below(subtracted_maximum(max_of_row));
  const HeldLogits logits{below.subtracts_first()};
  if (logits.max_is_subtracted) {
#pragma unroll
    for (auto& value : row.held) value -= below.subtracted;
  }
  const bool are_needed = problem.operation == Operation::log_softmax;
  const auto sum = [&](auto of_logarithm, const auto& term) {
    FixedPointUnits units{Row::first_units, 0};
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      if (row.skips(k, threads)) break;
#pragma unroll
      for (int i = k * width; i < (k + 1) * width; i += 2)
        units.template add<decltype(of_logarithm)::value>(term(row.held[i]), term(row.held[i + 1]));
    }
    return reduce.template sum_of_units<decltype(of_logarithm)::value>(units);
  };
  addressed_row_result<Problem>(
      problem.operation, static_cast<int>(problem.geometry.columns), max_of_row, logits,
      [&](const HeldLogits::Exponential& of_exponential, auto of_logarithm) {
        if constexpr (decltype(of_logarithm)::value) {
          if (are_needed) return sum(of_logarithm, [&](float value) { return below(value); });
          return sum(of_logarithm, of_exponential);
        } else {
          return sum(of_logarithm, [&](float& value) { return value = below(value); });
        }
      },
      [&](const auto& output) {
        store([&](int k, int i) {
          return output(row.held[k * width + 2 * i], row.held[k * width + 2 * i + 1]);
        });
      },
      [&](float logsumexp) {
        if (writes_lse) *lse = store_as<typename Problem::Out>(logsumexp);
      });
}

/// Across the lanes of a row. Maxima may be NaN.
template <class Acc, int group>
struct ReduceGroup {
  __device__ Acc max(Acc value) const {
    if constexpr (std::is_same_v<Acc, float> && group == 32) {
      return from_integer_order(redux_max(in_integer_order(value)));
    } else {
#pragma unroll
      for (int mask = 1; mask < group; mask *= 2)
        value = maximum_or_nan(value, __shfl_xor_sync(0xffffffffu, value, mask));
      return value;
    }
  }
  __device__ static unsigned add(unsigned value) {
    if constexpr (group == 32) {
      return redux_add(value);
    } else {
#pragma unroll
      for (int mask = 1; mask < group; mask *= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
      return value;
    }
  }
  /// What can be added in any order, and what that is in the end.
  __device__ auto partial_sum(Acc value) const {
    if constexpr (std::is_same_v<Acc, float>) {
      return FixedPointSum::of(value);
    } else {
      return ExactSum<Acc>::of(value);
    }
  }
  __device__ FixedPointSum joined(const FixedPointSum& sum) const {
    return {add(sum.high), add(sum.low)};
  }
  __device__ ExactSum<double> joined(ExactSum<double> sum) const {
#pragma unroll
    for (int mask = 1; mask < group; mask *= 2) sum.join(sum.from_lane_xor(mask));
    return sum;
  }
  __device__ Acc sum(Acc value) const {
    return joined(partial_sum(value)).rounded();
  }

  /// Fewer lanes than a warp have rows of less than 2^10.
  template <bool exact>
  __device__ float sum_of_units(const FixedPointUnits& units) const {
    const unsigned rest = exact ? add(units.rest) : 0;
    if constexpr (group < 32) {
      return FixedPointUnits::rounded<exact>(add(units.whole), rest);
    } else {
      const unsigned long long high = add(units.whole >> 11);
      return FixedPointUnits::rounded<exact>((high << 11) + add(units.whole & 0x7ffu), rest);
    }
  }
};

/// Across the warps of a block. A warp joins its lanes, then all join the warps.
template <class Acc>
struct ReduceWarps {
  using Warp = ReduceGroup<Acc, 32>;
  using Threads = BlockOfRow;
  using Sum = std::conditional_t<std::is_same_v<Acc, float>, FixedPointSum, ExactSum<double>>;
  struct Shared {
    Acc maxima[32];
    Sum sums[2][32];  ///< the second one after an exact sum of units
    unsigned rests[32];
  };
  Shared& shared;
  Warp warp;

  __device__ Acc max(Acc value) const {
    value = warp.max(value);
    const int lane = threadIdx.x % 32;
    if (lane == 0) shared.maxima[threadIdx.x / 32] = value;
    __syncthreads();
    return warp.max(lane < blockDim.x / 32 ? shared.maxima[lane] : -infinity_v<Acc>);
  }
  template <bool second = false>
  __device__ Sum joined(const Sum& of_thread) const {
    return joined_warps<second>(warp.joined(of_thread));
  }
  template <bool second>
  __device__ Sum joined_warps(const Sum& of_warp) const {
    const int lane = threadIdx.x % 32;
    if (lane == 0) shared.sums[second][threadIdx.x / 32] = of_warp;
    __syncthreads();
    return warp.joined(lane < blockDim.x / 32 ? shared.sums[second][lane] : Sum{0, 0});
  }
  __device__ Acc sum(Acc value) const { return joined(warp.partial_sum(value)).rounded(); }
  /// The sum of all of these, whoever has which. (As floats would not be, to the last bit.)
  template <int count>
  __device__ float sum_of(const float (&value)[count]) const {
    static_assert(count * 32 <= FixedPointSum::most_terms);
    FixedPointSum sum = FixedPointSum::of(value[0]);
#pragma unroll
    for (int i = 1; i < count; ++i) sum.join(FixedPointSum::of(value[i]));
    return joined_warps<false>(warp.joined(sum).carried()).rounded();
  }
  template <bool exact>
  __device__ float sum_of_units(const FixedPointUnits& units) const {
    const int lane = threadIdx.x % 32;
    if constexpr (exact) {
      const unsigned rest_of_warp = warp.add(units.rest);
      if (lane == 0) shared.rests[threadIdx.x / 32] = rest_of_warp;
    }
    const FixedPointSum sum = joined<exact>(FixedPointSum{units.whole >> 11, units.whole & 0x7ffu});
    const unsigned rest = exact ? warp.add(lane < blockDim.x / 32 ? shared.rests[lane] : 0) : 0;
    return FixedPointUnits::rounded<exact>((static_cast<unsigned long long>(sum.high) << 11) + sum.low, rest);
  }
};

/// Across warps that have one vector a lane of what a single warp would have `vectors` of: to the same bits
/// as that one.
template <class Acc, int vectors>
struct ReduceVectors {
  using Threads = WarpsOfRow;
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
    return fold_accumulators<vectors>(of, [](Acc a, Acc b) { return maximum_or_nan(a, b); });
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
template <class Problem, class Registers, bool irregular>
inline constexpr int least_blocks_of_warps = [] {
  const std::size_t bytes = sizeof(Registers::held);
  if (Registers::by_address && !is_packed<Problem>) return bytes <= 96 ? 8 : bytes <= 128 ? 7 : 6;
  const int spare =
      is_packed<Problem> ? (irregular || bytes > 80 ? 2 : 1) : (irregular || bytes <= 80 ? 0 : 1);
  return bytes <= 32    ? 12 - 2 * spare
         : bytes <= 80  ? 9 - spare
         : bytes <= 144 ? (sizeof(typename Problem::Acc) == 8 ? 6 : 8 - spare)
                        : 3;
}();

/// The elements between rows of y, where y's sectors do not come to L2 with x.
template <class Problem>
__device__ __forceinline__ int gap_to_read(const Problem& problem) {
  const RowGeometry& g = problem.geometry;
  const bool reads = problem.operation != Operation::logsumexp && g.rank > 0 &&
                     static_cast<const void*>(problem.x) != problem.y;
  return reads ? static_cast<int>(min(g.y_stride[g.rank - 1] - g.columns, index_type(32))) : 0;
}

/// Whether x is more than stays in L2 from one call to the next.
template <class Problem>
bool comes_from_memory(const Problem& problem) {
  constexpr index_type most_bytes_near_l2 = index_type(128) << 20;
  const RowGeometry& g = problem.geometry;
  return g.rows * g.columns * static_cast<index_type>(sizeof(*problem.x)) > most_bytes_near_l2;
}

/// Reads the row at `where` of those of the problem: what softmax_in_registers asks for.
template <class Problem, class Registers, class Threads>
__device__ __forceinline__ auto load_row(const Problem& problem, const RowGeometry::Row& where,
                                         Registers& row, const Threads& threads, bool looks) {
  using In = typename Problem::In;
  const RowGeometry& g = problem.geometry;
  if constexpr (is_packed<Problem>) {
    const auto transform = problem.transform.at_row(where.index);
    using Transform = typename Problem::Transform;
    const In* const x = problem.x + where.x_offset;
    const index_type behind = g.last_x_offset() - where.x_offset;
    const auto columns = static_cast<int>(g.columns);
    const auto kept = static_cast<int>(end_of_kept(transform, g.columns));
    if constexpr (has_packed_mask<Transform>) {
      row.load_masked(x, behind, columns, kept, threads, mask_of_row<Transform>(transform).mask,
                      PartsOfChain<Transform>::mask(problem.transform).end(columns));
    } else {
      row.load(x, behind, columns, kept, threads);
    }
    return prepared_stage<typename Problem::Acc>(without_mask<Transform>(transform), 0);
  } else if constexpr (Registers::by_address) {
    const auto transform = problem.transform.at_row(where.index);
    row.load(problem.x + where.x_offset, g.last_x_offset() - where.x_offset, static_cast<int>(g.columns),
             static_cast<int>(end_of_kept(transform, g.columns)), threads,
             prepared_stage<typename Problem::Acc>(transform, 0));
    return true;
  } else {
    return row.load(problem.x + where.x_offset, static_cast<int>(g.columns), threads,
                    problem.transform.at_row(where.index), looks);
  }
}
template <class Problem, class Registers, class Threads, class Output>
__device__ __forceinline__ void store_row(const Problem& problem, const RowGeometry::Row& where,
                                          index_type position, const Registers& row, const Threads& threads,
                                          const Output& output) {
  const RowGeometry& g = problem.geometry;
  const bool exists = position < g.rows;
  if constexpr (Registers::by_address) {
    const bool dense = g.rank == 1 && g.y_stride[0] == g.columns;
    row.store(problem.y + where.y_offset, exists, position + 1 < g.rows, dense, threads, output);
  } else {
    row.store(problem.y + where.y_offset, static_cast<int>(problem.geometry.columns), exists, threads,
              output);
  }
}

template <int vectors, bool irregular, int group, class Problem>
__global__ void __launch_bounds__(
    128, least_blocks_of_warps<Problem, RegistersOf<Problem, vectors, irregular>, irregular>)
    warp_per_row_kernel(const __grid_constant__ Problem problem) {
  using Registers = RegistersOf<Problem, vectors, irregular>;
  const index_type position = static_cast<index_type>(blockIdx.x) * (128 / group) + threadIdx.x / group;
  const bool exists = position < problem.geometry.rows;
  grid_dependency_wait();
  if (problem.geometry.rows == 0) return;
  // Lanes past the last row go along with that one: the warp's shuffles want them.
  const RowGeometry::Row where = problem.geometry.row(exists ? position : problem.geometry.rows - 1);
  extern __shared__ __align__(16) char images_of_rows[];
  const LanesOfRow<group> threads{static_cast<int>(threadIdx.x % group),
                                  images_of_rows + threadIdx.x / group * Registers::image_bytes(group)};
  // (Not where a block has a row: longer rows gain little, and those of bfloat16 with a transform lost 3 in
  // 100.)
  if (const int gap = gap_to_read(problem); gap > 0)
    read_ends_of_row(problem.y + where.y_offset, static_cast<int>(problem.geometry.columns), gap,
                     threads.rank() == 0, threads.rank() == 1);
  Registers row;
  softmax_in_registers(
      row, threads, problem, problem.y + where.y_offset, exists && threads.index == 0,
      ReduceGroup<typename Problem::Acc, group>{},
      [&](bool looks) { return load_row(problem, where, row, threads, looks); },
      [&](const auto& output) { store_row(problem, where, position, row, threads, output); });
}

/// `least_blocks` on a multiprocessor. `Reduce`: ReduceWarps, or ReduceVectors, which has a row of a warp in
/// more warps.
template <int vectors, bool irregular, int most_threads, int least_blocks, class Reduce, class Problem>
__global__ void __launch_bounds__(most_threads, least_blocks)
    block_per_row_kernel(const __grid_constant__ Problem problem) {
  using Registers = RegistersOf<Problem, vectors, irregular>;
  using Threads = typename Reduce::Threads;
  extern __shared__ __align__(16) char images_of_rows[];
  __shared__ typename Reduce::Shared shared;
  grid_dependency_wait();
  if (problem.geometry.rows == 0) return;
  const RowGeometry::Row where = problem.geometry.row(blockIdx.x);
  const Threads threads = [&] {
    if constexpr (std::is_same_v<Threads, BlockOfRow>) {
      return BlockOfRow{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), images_of_rows};
    } else {
      return WarpsOfRow{static_cast<int>(threadIdx.x % 32), images_of_rows};
    }
  }();
  Registers row;
  softmax_in_registers(
      row, threads, problem, problem.y + where.y_offset, threadIdx.x == 0, Reduce{shared, {}},
      [&](bool looks) { return load_row(problem, where, row, threads, looks); },
      [&](const auto& output) { store_row(problem, where, blockIdx.x, row, threads, output); });
}

/// The same to the same bits, for rows of one dimension that fill their threads' vectors (BlockOfFilledRow).
/// `is_softmax`, or another operation. `from_memory`: see load_of_row.
template <bool is_softmax, bool from_memory, int vectors, int most_threads, int least_blocks, class Problem>
__global__ void __launch_bounds__(most_threads, least_blocks)
    block_per_filled_row_kernel(const __grid_constant__ Problem problem) {
  using Registers = RegistersOf<Problem, vectors, false>;
  using Reduce = ReduceWarps<typename Problem::Acc>;
  __shared__ typename Reduce::Shared shared;
  const BlockOfFilledRow<!from_memory> threads{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)};
  grid_dependency_wait();
  if (problem.geometry.rows == 0) return;
  const RowGeometry::Row where = problem.geometry.row_of_one_dimension(blockIdx.x);
  Registers row;
  softmax_in_registers(
      row, threads, problem, problem.y + where.y_offset, threadIdx.x == 0, Reduce{shared, {}},
      [&](bool looks) { return load_row(problem, where, row, threads, looks); },
      [&](const auto& output) { store_row(problem, where, blockIdx.x, row, threads, output); }, is_softmax);
}

/// The same to the same bits, see may_have_rows_in_turn: half as many blocks on a multiprocessor, and each
/// with two rows under way.
template <bool is_softmax, int vectors, int most_threads, int least_blocks, class Problem>
__global__ void __launch_bounds__(most_threads, least_blocks)
    rows_in_turn_kernel(const __grid_constant__ Problem problem) {
  using Registers = RegistersOf<Problem, vectors, false>;
  using Reduce = ReduceWarps<typename Problem::Acc>;
  __shared__ typename Reduce::Shared shared;
  const RowGeometry& g = problem.geometry;
  const BlockOfWholeRow threads{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)};
  const auto columns = static_cast<int>(g.columns);
  index_type position = blockIdx.x;
  typename Registers::InVector raw[vectors];
  const auto fetch = [&] {
    if (position < g.rows)
      Registers::fetch_vectors(problem.x + position * g.x_stride[0], columns, threads, raw);
  };
  grid_dependency_wait();
  fetch();
#pragma unroll 1
  while (position < g.rows) {
    Registers row;
    row.take_vectors(raw, columns, threads, row_of_all(problem.transform));
    auto* const y = problem.y + position * g.y_stride[0];
    position += gridDim.x;
    fetch();
    softmax_in_registers(
        row, threads, problem, y, threads.index == 0, Reduce{shared, {}}, [](bool) { return true; },
        [&](const auto& output) { row.store(y, columns, true, threads, output); }, is_softmax);
  }
}

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

/// How rows are spread over registers; by length and type alone, where that decides the bits.
template <class Problem>
struct RowInRegistersPlan {
  using In = typename Problem::In;
  static constexpr int width = 16 / sizeof(In);
  /// 16-byte vectors a thread in rows that fill them: 32 values of float or of 16 bits, 16 of double. (Longer
  /// rows of 16 bits by address have 8 of them: 16384 columns of bfloat16 on one H200 0.98 of a copy, 0.92 by
  /// grid_pipelined_rows.)
  static constexpr int most_vectors = sizeof(In) == 2 && !is_packed<Problem> ? 4 : 8;
  /// Of rows that are no whole vectors: a few more than a power of two, for rows a little longer than one.
  static constexpr int interleaved_vectors = 9, interleaved_width = 16 / sizeof(typename Problem::Acc);
  static constexpr int interleaved_elements = interleaved_vectors * interleaved_width;

  static constexpr index_type longest_of_warp =
      is_packed<Problem> ? 32 * most_vectors * width - (width - 1) : 32 * most_vectors * width;
  static constexpr index_type longest = sizeof(In) == 2 ? 256 * 8 * width : 512 * most_vectors * width;

  static constexpr bool interleaves(index_type columns) {
    return !is_packed<Problem> && columns % width != 0;
  }
  static constexpr bool may_stage = operands_of<typename Problem::Transform> != 0;

  /// Whether so few vectors a thread are filled well by rows of so many. Else threads have up to 8: five of
  /// them at least, so that few threads hold nothing. (65 columns of float on one H200: 0.34 of a copy with
  /// 17 of 32 vectors filled.)
  static bool fills(index_type vectors_of_row, int vectors, int lanes) {
    return vectors_of_row <= vectors * lanes && 8 * vectors_of_row > 7 * vectors * lanes;
  }

  static int threads_of_block(index_type columns, index_type columns_of_thread) {
    const index_type threads = (columns + columns_of_thread - 1) / columns_of_thread;
    return static_cast<int>((threads + 31) / 32 * 32);
  }

  /// Vectors that the block of a row of so many has registers for, with `vectors` a thread.
  static int room(index_type vectors_of_row, int vectors) {
    return vectors * threads_of_block(vectors_of_row, vectors);
  }

  /// Whether rows of so many vectors are faster with five a thread than with eight: where fewer registers
  /// stay empty, and beyond four warps with eight, as long as five fit.
  static bool five_fit_better(index_type vectors_of_row) {
    return vectors_of_row <= 1024 ? 8 * room(vectors_of_row, 5) <= 7 * room(vectors_of_row, 8)
                                  : vectors_of_row <= 256 * 5;
  }
};

/// Bytes to which all rows are aligned alike, at most 16: of x, of y, and of both to each other.
struct RowAlignment {
  std::uintptr_t x, y, difference;

  template <class Problem>
  static RowAlignment of(const Problem& problem) {
    const RowGeometry& g = problem.geometry;
    const auto bytes = [](index_type elements, std::size_t size) {
      return static_cast<std::uintptr_t>(elements) * size;
    };
    RowAlignment all{
        reinterpret_cast<std::uintptr_t>(problem.x), reinterpret_cast<std::uintptr_t>(problem.y),
        reinterpret_cast<std::uintptr_t>(problem.y) - reinterpret_cast<std::uintptr_t>(problem.x)};
    for (int d = 0; d < g.rank; ++d) {
      const std::uintptr_t x = bytes(g.x_stride[d], sizeof(*problem.x));
      const std::uintptr_t y = bytes(g.y_stride[d], sizeof(*problem.y));
      all.x |= x;
      all.y |= y;
      all.difference |= y - x;
    }
    return all;
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

/// Whether rows by address have vectors that they do not fill, or have to be shifted on the way to y.
template <class Problem>
bool lies_anywhere(const Problem& problem) {
  const RowAlignment alignment = RowAlignment::of(problem);
  const bool writes_rows = problem.operation != Operation::logsumexp;
  return alignment.x % 16 != 0 || problem.geometry.columns % 8 != 0 ||
         (writes_rows && alignment.difference % 16 != 0);
}

/// Launches one of these kernels with `image_bytes` of shared memory where rows have to be shifted.
template <auto kernel, class Registers, class Problem>
void launch_rows_kernel(const Kokkos::Cuda& exec, const char* name, index_type blocks, int threads,
                        int image_bytes, const Problem& problem) {
  const RowAlignment alignment = RowAlignment::of(problem);
  const bool writes_rows = problem.operation != Operation::logsumexp;
  const bool has_image = Registers::by_address ? writes_rows && alignment.difference % 16 != 0
                                               : writes_rows && alignment.y % Registers::store_bytes != 0;
  launch_with_shared<kernel>(exec, kernel_label(problem.operation, name), blocks, threads,
                             has_image ? image_bytes : 0, problem);
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

/// Whether rows are of double, without a transform.
template <class Problem>
inline constexpr bool has_plain_doubles = std::is_same_v<std::remove_const_t<typename Problem::In>, double>&&
    std::is_same_v<typename Problem::Transform, BoundIdentity>;

struct WarpPerRow {
  static constexpr const char* name = "warp_per_row";

  template <class Exec, class Problem>
  static constexpr bool supports = row_in_registers_supports<Exec, Problem>;

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec&, const Problem& problem) {
    return refuse_row_in_registers(problem, 1, RowInRegistersPlan<Problem>::longest_of_warp, "",
                                   "a row does not fit the registers of a warp");
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    using Plan = RowInRegistersPlan<Problem>;
    const index_type columns = problem.geometry.columns;
    if constexpr (is_packed<Problem>) {
      // `reserve` launches over no rows: that loads the kernel for other addresses, too, which a capture
      // could not do.
      const bool both = problem.geometry.rows == 0 && columns % Plan::width == 0;
      if (both || !lies_anywhere(problem)) run_vectors(exec, problem, columns / Plan::width);
      if (both || lies_anywhere(problem))
        run_anywhere(exec, problem, RegistersOf<Problem, 1, true>::vectors_of_row(columns));
    } else if (!Plan::interleaves(columns)) {
      if constexpr (has_plain_doubles<Problem>) {
        run_doubles(exec, problem, columns / Plan::width);
      } else if constexpr (may_be_by_address<Problem>) {
        run_logits_of_vectors(exec, problem, columns / Plan::width);
      } else {
        run_vectors(exec, problem, columns / Plan::width);
      }
    } else if constexpr (may_be_by_address<Problem>) {
      run_logits(exec, problem, RegistersOf<Problem, 1, true>::vectors_of_row(columns));
    } else if constexpr (has_plain_doubles<Problem>) {
      with_share<Share<3, 8>, Share<4, 8>, Share<5, 8>, Share<3, 16>, Share<4, 16>, Share<5, 16>,
                 Share<3, 32>, Share<4, 32>, Share<5, 32>, Share<6, 32>, Share<9, 32>>(
          ceil_div(columns, Plan::interleaved_width),
          [&]<class S>(S) { launch_share<S, true>(exec, problem); });
    } else {
      constexpr int vectors = Plan::interleaved_vectors, elements = Plan::interleaved_elements;
      if (columns <= 8 * elements / 3) {
        launch<vectors / 3, true, 8>(exec, problem);
      } else if (columns <= 16 * elements / 3) {
        launch<vectors / 3, true, 16>(exec, problem);
      } else if (columns <= 16 * elements / 2) {
        launch<vectors, true, 16>(exec, problem);
      } else {
        if constexpr (Plan::may_stage) {
          using Reduce = ReduceGroup<typename Problem::Acc, 32>;
          // `reserve` launches over no rows: that loads the other kernels, too, which a capture could not do.
          const index_type rows = problem.geometry.rows;
          if ((rows == 0 || rows > most_rows_in_warps) &&
              launch_staged<&staged_row_kernel<vectors, 128, 3, Reduce, Problem>>(
                  exec, name, 128, 4, bytes_of_staged<typename Problem::Out>(columns), problem) &&
              rows > 0)
            return;
        }
        launch_warp_or_warps<vectors, true>(exec, problem);
      }
    }
  }

  template <class Exec, class Problem>
  static void reserve(const Exec&, const Problem&) {}

 private:
  /// Rows that are faster, each in as many warps as a lane would have vectors, than each in a warp.
  /// (1000 columns of float in a CUDA graph on one H200: 1 row 1.6 and 2.2 us, 512 rows 2.98 and 3.02, 1024
  /// rows 5.2 and 3.6.)
  static constexpr index_type most_rows_in_warps = 512;

  template <class Problem>
  static void run_vectors(const Kokkos::Cuda& exec, const Problem& problem, index_type vectors) {
    using Plan = RowInRegistersPlan<Problem>;
    // Of rows that are only read a lane has more: blocks would come to an end faster than others begin. (One
    // H200, GB/s of logsumexp of float, where each lane has two vectors and so: 64 columns 3870 and 4270, 128
    // 3780 and 4280, 256 4000 and 4370; bfloat16 the same within 1 %.)
    constexpr bool may_have_more =
        !is_packed<Problem> && std::is_same_v<typename Problem::Transform, BoundIdentity>;
    const bool has_more = may_have_more && problem.operation == Operation::logsumexp && vectors > 2 * 4;
    if constexpr (may_have_more) {
      if (has_more && vectors <= 4 * 4) {
        launch<4, false, 4>(exec, problem);
        return;
      }
    }
    const auto fills = [&](int of_lane, int lanes) {
      return !has_more && Plan::fills(vectors, of_lane, lanes);
    };
    if constexpr (is_packed<Problem>) {
      // What a thread does once for a row is shared by four vectors, unless two hold exponentials. (Fraction
      // of a copy of 512 MB and 1 GiB of bfloat16 on one H200, two and four: 128 columns with a factor 0.94
      // and 0.99, log_softmax 0.92 and 0.99, 256 with a causal mask 0.90 and 0.98, with a temperature 0.88
      // and 0.94, log_softmax 0.92 and 0.99, 512 with a temperature 0.86 and 0.93; but 64, two lanes a row,
      // with a factor 0.945 and 0.88.)
      if (!only_masks<typename Problem::Transform> || problem.operation != Operation::softmax) {
        if (fills(4, 4)) return launch<4, false, 4>(exec, problem);
        if (fills(4, 8)) return launch<4, false, 8>(exec, problem);
        if (fills(4, 16)) return launch<4, false, 16>(exec, problem);
      }
    }
    if (vectors <= 2 * 4) {
      launch<2, false, 4>(exec, problem);
    } else if (fills(2, 8)) {
      launch<2, false, 8>(exec, problem);
    } else if (fills(2, 16)) {
      launch<2, false, 16>(exec, problem);
    } else if (fills(2, 32)) {
      launch<2, false, 32>(exec, problem);
    } else if (fills(4, 32)) {
      launch_warp_or_warps<4, false>(exec, problem);
    } else if (vectors <= 8 * 4) {
      launch<8, false, 4>(exec, problem);
    } else if (vectors <= 8 * 8) {
      launch<8, false, 8>(exec, problem);
    } else if (vectors <= 8 * 16 - (is_packed<Problem> ? 2 : 0)) {  // see ReduceGroup::sum_of_units
      launch<8, false, 16>(exec, problem);
    } else {
      launch_warp_or_warps<8, false>(exec, problem);
    }
  }

  /// `vectors` each of so many lanes.
  template <int vectors_, int lanes_>
  struct Share {
    static constexpr int vectors = vectors_, lanes = lanes_;
    static constexpr index_type longest =
        vectors * lanes - (lanes == 16 && vectors == 8 ? 2 : 0);  // see ReduceGroup::sum_of_units
  };
  /// Calls `launch` with the first of these, in rising order, that takes a row of so many vectors.
  template <class First, class... Others, class Launch>
  static void with_share(index_type vectors_of_row, const Launch& launch) {
    if constexpr (sizeof...(Others) != 0) {
      if (vectors_of_row > First::longest) {
        with_share<Others...>(vectors_of_row, launch);
        return;
      }
    }
    launch(First());
  }

  /// Logits of 16-bit rows of whole vectors: two to four a lane, which share what is done once, and leave few
  /// registers empty. (512 MB of bfloat16 on one H200, fraction of a copy, two and four: a bias for all rows
  /// 128 columns 0.85 and 0.94, 256 0.84 and 0.96, 512 0.86 and 0.97, GELU 0.72 and 0.80, a factor, a bias, a
  /// mask and a causal mask, which spill, 1.02 and 1.00; but 64, two lanes a row, 0.88 and 0.82, 0.73 and
  /// 0.83, 1.00 and 0.85. 256 MB with a bias as large as x, of lengths that had up to eight, most of them
  /// empty, and so: 32 columns 0.75 and 1.04, 96 0.67 and 1.02, 320 0.93 and 1.03.)
  template <class Problem>
  static void run_logits_of_vectors(const Kokkos::Cuda& exec, const Problem& problem, index_type vectors) {
    with_share<Share<2, 1>, Share<2, 2>, Share<3, 2>, Share<2, 4>, Share<3, 4>, Share<4, 4>, Share<3, 8>,
               Share<4, 8>, Share<3, 16>, Share<4, 16>, Share<3, 32>, Share<4, 32>>(
        vectors, [&]<class S>(S) { launch_share<S, false>(exec, problem); });
  }

  /// Doubles in whole vectors: what is done once for a row by each lane takes long, which is why a lane of a
  /// row that is only read has up to eight, and else three to five, of which few stay empty.
  template <class Problem>
  static void run_doubles(const Kokkos::Cuda& exec, const Problem& problem, index_type vectors) {
    const auto launch = [&]<class S>(S) { launch_share<S, false>(exec, problem); };
    if (problem.operation == Operation::logsumexp) {
      with_share<Share<3, 4>, Share<4, 4>, Share<8, 4>, Share<8, 8>, Share<8, 16>, Share<6, 32>,
                 Share<8, 32>>(vectors, launch);
    } else {
      with_share<Share<2, 4>, Share<3, 4>, Share<4, 4>, Share<5, 4>, Share<3, 8>, Share<4, 8>, Share<5, 8>,
                 Share<3, 16>, Share<4, 16>, Share<5, 16>, Share<3, 32>, Share<4, 32>, Share<5, 32>,
                 Share<6, 32>, Share<8, 32>>(vectors, launch);
    }
  }

  template <class Problem>
  static void run_anywhere(const Kokkos::Cuda& exec, const Problem& problem, index_type vectors) {
    with_share<Share<5, 4>, Share<8, 4>, Share<5, 8>, Share<8, 8>, Share<5, 16>, Share<8, 16>, Share<5, 32>,
               Share<6, 32>, Share<7, 32>, Share<8, 32>>(
        vectors, [&]<class S>(S) { launch_share<S, true>(exec, problem); });
  }
  template <class S, bool irregular, class Problem>
  static void launch_share(const Kokkos::Cuda& exec, const Problem& problem) {
    if constexpr (S::lanes == 32) {
      launch_warp_or_warps<S::vectors, irregular>(exec, problem);
    } else {
      launch<S::vectors, irregular, S::lanes>(exec, problem);
    }
  }

  template <class Problem>
  static void run_logits(const Kokkos::Cuda& exec, const Problem& problem, index_type vectors) {
    with_share<Share<3, 4>, Share<5, 4>, Share<3, 8>, Share<5, 8>, Share<3, 16>, Share<5, 16>, Share<3, 32>,
               Share<4, 32>, Share<5, 32>>(vectors, [&]<class S>(S) { launch_logits<S>(exec, problem); });
  }

  /// Operands of a few rows, and those that do not lie side by side, are read element by element.
  template <class S, class Problem>
  static void launch_logits(const Kokkos::Cuda& exec, const Problem& problem) {
    if constexpr (!RowInRegistersPlan<Problem>::may_stage) {
      launch_share<S, true>(exec, problem);
    } else {
      using Registers = RegistersOf<Problem, S::vectors, true>;
      constexpr int least_blocks = least_blocks_of_warps<Problem, Registers, true>;
      const index_type rows = problem.geometry.rows;
      // `reserve` launches over no rows: that loads the other kernel, too, which a capture could not do.
      if ((rows == 0 || rows > most_rows_in_warps) &&
          launch_staged<&staged_logits_kernel<S::vectors, S::lanes, 128, least_blocks, false, Problem>,
                        &staged_logits_kernel<S::vectors, S::lanes, 128, least_blocks, true, Problem>>(
              exec, name, 128, 128 / S::lanes, Registers::image_bytes(S::lanes), problem) &&
          rows > 0)
        return;
      constexpr int threads = 160;
      using OfOneVector = RegistersOf<Problem, 1, true>;
      launch_rows_kernel<
          &block_per_row_kernel<1, true, threads, 4, ReduceWarps<typename Problem::Acc>, Problem>,
          OfOneVector>(exec, name, rows, (S::vectors * S::lanes + 31) / 32 * 32,
                       OfOneVector::image_bytes(threads), problem);
    }
  }

  template <int vectors, bool irregular, class Problem>
  static void launch_warp_or_warps(const Kokkos::Cuda& exec, const Problem& problem) {
    if (problem.geometry.rows > most_rows_in_warps) {
      launch<vectors, irregular, 32>(exec, problem);
      return;
    }
    // `reserve` launches over no rows: that loads the other kernel, too, which a capture could not do.
    if (problem.geometry.rows == 0)
      (void)has_grid_dependency_wait(&warp_per_row_kernel<vectors, irregular, 32, Problem>);
    using Registers = RegistersOf<Problem, 1, irregular>;
    using Acc = typename Problem::Acc;
    using Reduce = std::conditional_t<Registers::by_address, ReduceWarps<Acc>, ReduceVectors<Acc, vectors>>;
    constexpr int threads = vectors * 32, most_threads = Registers::by_address ? 256 : threads;
    launch_rows_kernel<&block_per_row_kernel<1, irregular, most_threads, 4, Reduce, Problem>, Registers>(
        exec, name, problem.geometry.rows, threads, Registers::image_bytes(threads), problem);
  }
  template <int vectors, bool irregular, int group, class Problem>
  static void launch(const Kokkos::Cuda& exec, const Problem& problem) {
    using Registers = RegistersOf<Problem, vectors, irregular>;
    constexpr int rows_of_block = 128 / group;
    launch_rows_kernel<&warp_per_row_kernel<vectors, irregular, group, Problem>, Registers>(
        exec, name, (problem.geometry.rows + rows_of_block - 1) / rows_of_block, 128,
        rows_of_block * Registers::image_bytes(group), problem);
  }
};

struct BlockPerRow {
  static constexpr const char* name = "block_per_row";

  template <class Exec, class Problem>
  static constexpr bool supports = row_in_registers_supports<Exec, Problem>;

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec&, const Problem& problem) {
    using Plan = RowInRegistersPlan<Problem>;
    return refuse_row_in_registers(problem, Plan::longest_of_warp + 1, Plan::longest,
                                   "shorter rows have a warp or a part of one",
                                   "a row does not fit the registers of a block");
  }

  /// Which transform it is may not decide, since what is known at run time alone has its bits. (One H200,
  /// this kernel and grid_pipelined_rows, fraction of a copy of 1 GiB: 8193 columns 0.97 both, 10001 0.91 and
  /// 0.97, 16383 0.90 and 0.96; this and split_rows, microseconds in a CUDA graph: 1 row of 12289 columns 3.2
  /// and 2.4, 128 rows 5.1 and 5.4. With transforms, 512 MB of 10001, 12290 and 14001 columns: a temperature
  /// 0.81 and 0.96, 0.84 and 0.97, 0.81 and 0.97, a mask 0.92 and 0.94, 0.93 and 0.98, 0.91 and 0.98, a bias
  /// for all rows 0.82 and 0.91, 0.84 and 0.94, 0.81 and 0.96, GELU 0.93 and 0.90, 0.91 and 0.94, 0.91 and
  /// 0.97, a temperature and a mask 0.84 and 0.79, 0.80 and 0.86, 0.80 and 0.92, but a factor, a bias, a mask
  /// and a causal mask 0.80 and 0.70, 0.78 and 0.67, 0.48 and 0.67; with a bias 1 row of 14001 columns 6.0
  /// and 3.0, 128 rows 8.3 and 7.1, but of 8191 columns 6.1 and 8.7.)
  template <class Exec, class Problem>
  static std::string_view advise_against(const Exec& exec, const Problem& problem) {
    using Plan = RowInRegistersPlan<Problem>;
    constexpr bool is_float =
        std::is_same_v<typename Problem::In, float> && std::is_same_v<typename Problem::Out, float>;
    constexpr index_type longest_here =
        std::is_same_v<typename Problem::Transform, BoundIdentity> ? 256 * Plan::interleaved_elements : 12288;
    const index_type columns = problem.geometry.columns;
    if (is_float && Plan::interleaves(columns) && columns > longest_here &&
        exec.cuda_device_prop().major >= 9)
      return "long rows that are no whole vectors are faster in slices";
    return {};
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    using Plan = RowInRegistersPlan<Problem>;
    const index_type columns = problem.geometry.columns;
    if constexpr (is_packed<Problem>) {
      const bool both = problem.geometry.rows == 0 && columns % Plan::width == 0;  // as in WarpPerRow
      if (both || !lies_anywhere(problem)) {
        const index_type vectors = columns / Plan::width;
        // (Fraction of a copy with four, five and eight, bfloat16 on one H200, mean of softmax, log_softmax,
        // and softmax with a factor, with a causal mask that keeps all besides, and with a temperature: 2056
        // columns 0.86, 0.975, 0.90, 2568 0.93, 0.93, 0.96, 3072 0.99, 0.99, 1.00, 4096 0.99, 1.00, 0.99,
        // 4104 0.885, 0.99, 0.97, 5128 0.90, 0.945, 1.00, 6400 0.90, 0.995, 1.00, 7168 0.935, 0.99, 0.99,
        // 7936 0.97, 0.95, 0.99, 8192 0.97, 0.96, 0.98, but softmax alone 1.00, 0.98, 0.98; 8200 five and
        // eight 0.95, 0.935, 9216 0.99, 0.96.)
        // With a mask, which four vectors have room for: 512 MB with a full one and one for all rows, eight
        // and four, 8192 columns 0.92, 0.92 and 0.93, 0.94, 16384 0.91, 0.92 and 0.94, 0.91.
        using Transform = typename Problem::Transform;
        constexpr bool is_identity = std::is_same_v<Transform, BoundIdentity>,
                       masks = has_packed_mask<Transform>;
        const bool is_power_of_two = (vectors & (vectors - 1)) == 0;
        if (masks && vectors == 2048) {
          launch<4, false, 512, 2>(exec, problem, vectors, 4);
        } else if (is_power_of_two && vectors <= (is_identity || masks ? 1024 : 512)) {
          launch<4, false, 256, 4>(exec, problem, vectors, 4);
        } else if (Plan::five_fit_better(vectors)) {
          launch<5, false, 256, 4>(exec, problem, vectors, 5);
        } else {
          launch<8, false, 256, 3>(exec, problem, vectors, 8);
        }
      }
      if (both || lies_anywhere(problem))
        run_anywhere(exec, problem, RegistersOf<Problem, 1, true>::vectors_of_row(columns));
    } else if (Plan::interleaves(columns)) {
      run_other_lengths(exec, problem);
    } else if constexpr (sizeof(typename Problem::In) == 2) {
      // (Fraction of a copy with four, five and eight vectors a thread, bfloat16 with a mask on one H200:
      // 1032 columns 0.72, 0.95, 0.78, 1536 0.89, 0.83, 0.95, 2048 0.93, 0.95, 0.97, 2056 0.86, 0.95, 0.78,
      // 2560 0.92, 0.97, 0.90, 4096 0.91, 0.94, 0.94, 4104 0.89, 0.95, 0.86, 6144 0.91, 0.93, 0.95, 8192
      // 0.90, 0.92, 0.93, five and eight 9216 0.95, 0.91. Four spill where four blocks have 256 threads
      // each; a bias for all rows and GELU are faster with them where rows are powers of two, 2048 columns
      // 0.98 and 0.96, 0.82 and 0.78, but the transform may not decide: what is known at run time alone has
      // its bits.)
      if (Plan::five_fit_better(columns / Plan::width)) {
        launch<5, false, 256, 3>(exec, problem, columns, 5 * Plan::width);
      } else {
        launch<8, false, 256, 2>(exec, problem, columns, 8 * Plan::width);
      }
    } else if (columns <= 256 * 8 * Plan::width) {
      if constexpr (may_have_rows_in_turn<Problem>) {
        // `reserve` launches over no rows: that loads both kernels, which a capture could not do.
        const bool in_turn = has_rows_in_turn(problem);
        if (in_turn || problem.geometry.rows == 0) launch_in_turn<8>(exec, problem);
        if (in_turn) return;
      }
      if constexpr (has_plain_floats<Problem>) {
        const RowAlignment alignment = RowAlignment::of(problem);
        const bool pays = columns <= 6144 && problem.operation != Operation::logsumexp &&
                          comes_from_memory(problem) && (alignment.x | alignment.y) % 16 == 0;
        // `reserve` launches over no rows: that loads these kernels, too.
        if (pays || (problem.geometry.rows == 0 && columns <= 6144)) {
          const bool fills_warps_of_two = columns <= 4096 && columns % (32 * 2 * Plan::width) == 0;
          if (fills_warps_of_two) {
            launch<2, false, 512, 4>(exec, problem, columns, 2 * Plan::width);
          } else {
            launch<4, false, 512, 2>(exec, problem, columns, 4 * Plan::width);
          }
        }
        if (pays) return;
      }
      if (launch_filled_rows(exec, problem)) return;
      launch_256<8, false>(exec, problem, 8 * Plan::width);
    } else {
      if (launch_filled_rows(exec, problem)) return;
      launch<8, false, 512, 2>(exec, problem, columns, 8 * Plan::width);
    }
  }

  template <class Exec, class Problem>
  static void reserve(const Exec&, const Problem&) {}

 private:
  /// Packed rows that begin anywhere. Seven vectors a thread are as many as four blocks of 256 threads have
  /// registers for, and what is under way at once is what counts; but five or six where these leave fewer of
  /// the registers empty. (Fraction of a copy with five, six and seven, bfloat16 with a factor on one H200:
  /// 2801 columns 0.89, 0.97, 0.95, 3201 0.91, 0.90, 0.98, 3801 0.98, 0.96, 0.96, 4301 0.94, 0.98, 0.98.)
  template <class Problem>
  static void run_anywhere(const Kokkos::Cuda& exec, const Problem& problem, index_type vectors) {
    const auto room = [&](int n) { return RowInRegistersPlan<Problem>::room(vectors, n); };
    if (8 * room(5) <= 7 * room(7) && room(5) <= room(6)) {
      launch<5, true, 192, 5>(exec, problem, vectors, 5);
    } else if (8 * room(6) <= 7 * room(7)) {
      launch<6, true, 192, 5>(exec, problem, vectors, 6);
    } else {
      launch<7, true, 320, 3>(exec, problem, vectors, 7);
    }
  }

  /// Rows that are no whole vectors.
  template <class Problem>
  static void run_other_lengths(const Kokkos::Cuda& exec, const Problem& problem) {
    using Plan = RowInRegistersPlan<Problem>;
    const index_type columns = problem.geometry.columns;
    if constexpr (may_be_by_address<Problem>) {
      const index_type vectors = RegistersOf<Problem, 1, true>::vectors_of_row(columns);
      // (Fraction of a copy with five, six and eight vectors a thread, bfloat16 with a mask on one H200: 2047
      // columns 0.88, 0.84 and 0.79, 4097 0.90, 0.95 and 0.86, 8191 0.85, 0.94 and 0.92, 16381 with six and
      // eight 0.875 and 0.82; with four or three less.)
      if (Plan::threads_of_block(vectors, 6) < Plan::threads_of_block(vectors, 5)) {
        launch_logits<6, 352, 2>(exec, problem, vectors);
      } else {
        launch_logits<5, 192, 4>(exec, problem, vectors);
      }
    } else {
      constexpr int vectors = Plan::interleaved_vectors, elements = Plan::interleaved_elements;
      if constexpr (Plan::may_stage) {
        using Reduce = ReduceWarps<typename Problem::Acc>;
        const int threads = Plan::threads_of_block(columns, elements);
        const index_type image_bytes = bytes_of_staged<typename Problem::Out>(columns);
        if (columns <= 256 * elements ? launch_staged<&staged_row_kernel<vectors, 256, 3, Reduce, Problem>>(
                                            exec, name, threads, 1, image_bytes, problem)
                                      : launch_staged<&staged_row_kernel<vectors, 512, 2, Reduce, Problem>>(
                                            exec, name, threads, 1, image_bytes, problem))
          return;
      }
      if (columns <= 256 * elements) {
        launch_256<vectors, true>(exec, problem, elements);
      } else {
        launch<vectors, true, 512, 2>(exec, problem, columns, elements);
      }
    }
  }

  template <int vectors, int most_threads, int least_blocks, class Problem>
  static void launch_logits(const Kokkos::Cuda& exec, const Problem& problem, index_type vectors_of_row) {
    if constexpr (RowInRegistersPlan<Problem>::may_stage) {
      using Registers = RegistersOf<Problem, vectors, true>;
      const int threads = RowInRegistersPlan<Problem>::threads_of_block(vectors_of_row, vectors);
      if (launch_staged<&staged_logits_kernel<vectors, 0, most_threads, least_blocks, false, Problem>,
                        &staged_logits_kernel<vectors, 0, most_threads, least_blocks, true, Problem>>(
              exec, name, threads, 1, Registers::image_bytes(threads), problem))
        return;
    }
    launch<vectors, true, most_threads, least_blocks>(exec, problem, vectors_of_row, vectors);
  }

  template <class Problem>
  static bool has_rows_in_turn(const Problem& problem) {
    using Registers = RegistersOf<Problem, 8, false>;
    const RowGeometry& g = problem.geometry;
    const RowAlignment alignment = RowAlignment::of(problem);
    return g.rows > 0 && g.rank == 1 && g.columns % (32 * Registers::count) == 0 && alignment.x % 16 == 0 &&
           (problem.operation == Operation::logsumexp || alignment.y % Registers::store_bytes == 0) &&
           !comes_from_memory(problem) && problem.transform.has_rows_alike() &&
           stage_takes_neighbours<Registers::width>(problem.transform.at_row(0));
  }

  /// (1024 rows of 8192 columns of float in L2 on one H200, microseconds by this kernel and by
  /// block_per_row_kernel: bias and GELU 18.6 and 20.4, a normalizer and a scale 17.4 and 21.9; 32768 rows,
  /// from memory: 590 and 542, 592 and 594.)
  template <int vectors, class Problem>
  static void launch_in_turn(const Kokkos::Cuda& exec, const Problem& problem) {
    using Registers = RegistersOf<Problem, vectors, false>;
    const auto threads = static_cast<int>(problem.geometry.columns / Registers::count);
    const index_type at_once =
        static_cast<index_type>(exec.cuda_device_prop().multiProcessorCount) * 512 / std::max(32, threads);
    for_operation(problem, [&](auto is_softmax) {
      launch_rows_kernel<&rows_in_turn_kernel<decltype(is_softmax)::value, vectors, 256, 2, Problem>,
                         Registers>(exec, name, std::min(problem.geometry.rows, at_once),
                                    std::max(32, threads), 0, problem);
    });
  }

  /// Floats without a transform may have two vectors a thread, or four, in as few registers as many blocks
  /// have: what comes from memory wants 64 KB under way on a multiprocessor, in as many rows as are that.
  /// (One H200, softmax and log_softmax, fraction of a copy of 1 GiB, with eight, four and two vectors: 1536
  /// columns 0.981 and 0.981, 0.984 and 0.983, 0.987 and 0.989, 2048 0.966 and 0.969, 0.967 and 0.968, 0.968
  /// twice, 2572 0.975 and 0.973, 0.993 and 0.998, 0.972 and 0.944, 3072 0.977 and 0.973, 0.983 and 0.979,
  /// 0.990 and 0.994, 4096 0.963 and 0.965, 0.974 and 0.976, 0.981 and 0.987, 5120 0.963 and 0.967, 0.982 and
  /// 0.981, 0.973 and 0.955, 6144 0.961 and 0.962, 0.967 and 0.969, 0.861 and 0.827, 8192 0.964 and 0.977,
  /// 0.966 twice, 0.936 and 0.900; 12288 0.959 and 0.973, with four 0.747 twice. logsumexp, on one H100, 4096
  /// with eight and two 1.023 and 1.014, 6144 1.027 and 0.837.)
  template <class Problem>
  static constexpr bool has_plain_floats =
      adds_vectors_exactly<RegistersOf<Problem, 8, false>, ReduceWarps<typename Problem::Acc>>&&
          std::is_same_v<typename Problem::Transform, BoundIdentity>;

  /// Floats, for others were not measured. Not with a causal mask, which has less to read; nor with what is
  /// known at run time alone, for the compiler's time.
  template <class Problem>
  static constexpr bool may_fill_vectors =
      std::is_same_v<typename Problem::In, float>&& std::is_same_v<typename Problem::Out, float> &&
      !is_known_at_run_time<typename Problem::Transform> &&
      !knows_end_of_kept<typename Problem::Transform::Row>;

  /// Launches block_per_filled_row_kernel where that is faster; whether. (Fraction of a copy, softmax and
  /// log_softmax of floats on one H200, by block_per_row_kernel and so. 1 GiB, in blocks of up to 768
  /// threads: 7168 columns 0.978 and 0.985, 0.980 and 0.985, 8192 0.967 and 0.973, 0.970 and 0.974, 9216
  /// 0.958 and 0.990, 0.968 and 0.991, 10000 0.950 and 0.978, 0.957 and 0.980, 12288 0.956 and 0.973, 0.962
  /// and 0.973, in which of 1024 8192 have 0.969 and 0.971, 10000 0.967 twice; in blocks of 1024 16384 0.956
  /// and 0.976, 0.962 and 0.976. 32 MB, in blocks of 1024: 4096 1.058 and 1.083, 1.047 and 1.084, 8192 1.025
  /// and 1.048, 1.022 and 1.049, 12288 0.952 and 1.004, 0.961 and 1.014, 16384 0.935 and 0.968, 0.951 and
  /// 0.966. With a transform, softmax of 1 GiB: a factor, a bias and a mask 10000 0.905 and 1.015, 12288
  /// 0.859 and 1.023, a bias for all rows 0.953 and 0.968. Of 32 MB, 16384 columns: a bias 0.937 and 0.967,
  /// but a factor 0.957 and 0.930, GELU 0.903 and 0.850.)
  template <class Problem>
  static bool launch_filled_rows(const Kokkos::Cuda& exec, const Problem& problem) {
    if constexpr (!may_fill_vectors<Problem>) {
      return false;
    } else if constexpr (has_plain_floats<Problem>) {
      const bool writes_rows = problem.operation != Operation::logsumexp;
      return launch_filled<true, 4, 768>(exec, problem, writes_rows) ||
             launch_filled<true, 4, 1024>(exec, problem, true) ||
             launch_filled<false, 4, 1024>(exec, problem, true);
    } else {
      constexpr bool has_operands = operands_of<typename Problem::Transform> != 0;
      return launch_filled<true, 8, 512>(exec, problem, true) ||
             launch_filled<false, 8, 512>(exec, problem, has_operands || problem.geometry.columns <= 12288);
    }
  }
  template <bool from_memory, int vectors, int most_threads, class Problem>
  static bool launch_filled(const Kokkos::Cuda& exec, const Problem& problem, bool pays) {
    using Registers = RegistersOf<Problem, vectors, false>;
    const RowGeometry& g = problem.geometry;
    const int threads = RowInRegistersPlan<Problem>::threads_of_block(g.columns, Registers::count);
    if (threads > most_threads) return false;
    const RowAlignment alignment = RowAlignment::of(problem);
    const bool fills =
        g.rank <= 1 && g.columns > (vectors - 1) * Registers::width * threads && alignment.x % 16 == 0 &&
        (problem.operation == Operation::logsumexp || alignment.y % Registers::store_bytes == 0);
    // `reserve` launches over no rows: that loads the kernel, which a capture could not do.
    if (g.rows > 0 && !(fills && pays && comes_from_memory(problem) == from_memory)) return false;
    for_operation(problem, [&](auto is_softmax) {
      launch_rows_kernel<&block_per_filled_row_kernel<decltype(is_softmax)::value, from_memory, vectors,
                                                      most_threads, 2, Problem>,
                         Registers>(exec, name, g.rows, threads, 0, problem);
    });
    return g.rows > 0;
  }

  /// use(whether it is softmax, as a type).
  template <class Problem, class Use>
  static void for_operation(const Problem& problem, const Use& use) {
    if (problem.operation == Operation::softmax) {
      use(std::true_type{});
    } else {
      use(std::false_type{});
    }
  }

  /// Blocks of at most 256 threads: four on a multiprocessor where rows come from L2, three where they come
  /// from memory and more would be in each other's way. (Fraction of a copy with three and four, float on one
  /// H200: 64 MB of 4096 columns 0.947 and 0.959, 256 MB 0.959 and 0.961; 1 GiB of 8192 columns 0.973 and
  /// 0.963, of 8193 0.959 and 0.935.)
  template <int vectors, bool irregular, class Problem>
  static void launch_256(const Kokkos::Cuda& exec, const Problem& problem, index_type columns_of_thread) {
    const RowGeometry& g = problem.geometry;
    const bool from_memory = comes_from_memory(problem);
    // `reserve` launches over no rows: that loads the other kernel, too, which a capture could not do.
    if (g.rows == 0 || from_memory)
      launch<vectors, irregular, 256, 3>(exec, problem, g.columns, columns_of_thread);
    if (g.rows == 0 || !from_memory)
      launch<vectors, irregular, 512, 2>(exec, problem, g.columns, columns_of_thread);  // four of 256 threads
  }

  template <int vectors, bool irregular, int most_threads, int least_blocks, class Problem>
  static void launch(const Kokkos::Cuda& exec, const Problem& problem, index_type columns,
                     index_type columns_of_thread) {
    using Registers = RegistersOf<Problem, vectors, irregular>;
    using Reduce = ReduceWarps<typename Problem::Acc>;
    const int threads = RowInRegistersPlan<Problem>::threads_of_block(columns, columns_of_thread);
    launch_rows_kernel<&block_per_row_kernel<vectors, irregular, most_threads, least_blocks, Reduce, Problem>,
                       Registers>(exec, name, problem.geometry.rows, threads, Registers::image_bytes(threads),
                                  problem);
  }
};

}  // namespace KokkosSoftmax::impl

#endif
