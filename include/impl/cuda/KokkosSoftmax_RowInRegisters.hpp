// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// What the CUDA kernels have in common that hold a row in registers, read once and written once: from a
/// row's logits to its outputs, and how rows are spread over registers.

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

/// Whether rows may be held by address as logits: 16 bits are content with sums in coarse units.
template <class Problem>
inline constexpr bool may_be_by_address =
    is_16_bit_v<typename Problem::In>&& is_16_bit_v<typename Problem::Out>;

/// Whether rows of 16 bits become floats.
template <class Problem>
inline constexpr bool widens_rows =
    is_16_bit_v<typename Problem::In>&& std::is_same_v<typename Problem::Out, float>;

/// Whether rows of 16 bits stay as they are in memory.
template <class Problem>
inline constexpr bool is_packed = (may_be_by_address<Problem> ||
                                   widens_rows<Problem>)&&keeps_rows_packed<typename Problem::Transform>;

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
/// if `is_in_order`, one of a warp's rows beside others that are not. To the same bits either way. `Out`: of
/// the outputs.
template <class Out, class TransformRow, bool in_order>
struct TransformedLogits {
  const TransformRow& transform;
  bool is_in_order;

  static constexpr bool may_be_coarse = impl::may_be_coarse<Out, TransformRow>;

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

/// Whether rows may have an end of which nothing is kept.
template <class Problem>
inline constexpr bool may_drop_ends = knows_end_of_kept<typename Problem::Transform::Row>;

/// Whether rows that stay as they are in memory may. They have less to read, so that more of them have to be
/// under way.
template <class Problem>
inline constexpr bool is_packed_and_may_end = is_packed<Problem>&& may_drop_ends<Problem>;

/// Whether a lane has up to eight vectors of packed rows, so that a warp has more rows, and what is done once
/// for a row is shared by more of it: of rows that may end early, and those with a mask and a temperature.
template <class Problem>
inline constexpr bool has_many_vectors_a_lane =
    !widens_rows<Problem> &&
    (is_packed_and_may_end<Problem> || (is_packed<Problem> && has_packed_mask<typename Problem::Transform> &&
                                        PartsOfChain<typename Problem::Transform>::temperatures > 0));

/// How a problem's rows are held. `irregular`: interleaved, or, by address, anywhere.
template <class Problem, int vectors, bool irregular>
using RegistersOf = std::conditional_t<
    is_packed<Problem>,
    PackedRow<typename Problem::In, vectors, irregular, may_drop_ends<Problem>, typename Problem::Out>,
    std::conditional_t<may_be_by_address<Problem> && irregular,
                       LogitsByAddress<typename Problem::In, vectors, may_drop_ends<Problem>,
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

/// Two outputs that are neighbours, as they are written.
template <class Out>
__device__ auto pair_of_outputs(float first, float second) {
  if constexpr (is_16_bit_v<Out>) {
    return rounded_pair<Out>(first, second);
  } else {
    return float2{first, second};
  }
}

/// A pair of outputs of two values, or of their exponentials.
template <class Out, class Exponential>
struct SoftmaxOfPair {
  const Exponential& exponential;
  float factor;
  __device__ auto operator()(float first, float second) const {
    return of_exponentials(exponential(first), exponential(second));
  }
  __device__ auto of_exponentials(float first, float second) const {
    return pair_of_outputs<Out>(first * factor, second * factor);
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
  float finite_sum = 0;
  if constexpr (!is_16_bit_v<Out>) {
    finite_sum = sum_of_exponentials(exponential, std::true_type{});
  } else {
    bool exact = operation == Operation::log_softmax;
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
  }
  const float sum = sum_or_special(max_of_row, finite_sum);
  if (operation == Operation::softmax) {
    const float reciprocal = is_16_bit_v<Out> ? __fdividef(1.0f, sum) : 1.0f / sum;
    const float factor = sum == 0.0f ? 0.0f : sum < infinity_v<float> ? reciprocal : nan_v<float>;
    store(SoftmaxOfPair<Out, std::remove_cvref_t<decltype(exponential)>>{exponential, factor});
  } else {
    const RowResult<float> result = result_of(sum);
    if (operation == Operation::logsumexp) {
      store_logsumexp(result.logsumexp());
    } else {
      store([&](float first, float second) {
        return pair_of_outputs<Out>(logits.minus(max, first) - result.log_sum,
                                    logits.minus(max, second) - result.log_sum);
      });
    }
  }
}

/// Calls `finish` with what a transform of packed rows makes of their values, `max_of_row` being the maximum
/// of these and, then, of the logits. `find_maximum`(logits): that where the transform changes the order. By
/// all lanes of a warp, which may have several rows, with a prepared transform.
template <class T, class Out, class TransformRow, class FindMaximum, class Finish>
__device__ __forceinline__ void with_logits_of_packed(const TransformRow& transform, float& max_of_row,
                                                      const FindMaximum& find_maximum, const Finish& finish) {
  if constexpr (std::is_same_v<TransformRow, BoundIdentity::Row>) {
    finish(LogitsOf16Bits<T>{});
  } else {
    using InOrder = TransformedLogits<Out, TransformRow, true>;
    const bool is_in_order = InOrder::finds_maximum(transform, max_of_row);
    if (__all_sync(0xffffffffu, is_in_order)) {
      finish(InOrder{transform, true});
      return;
    }
    const TransformedLogits<Out, TransformRow, false> logits{transform, is_in_order};
    max_of_row = find_maximum(logits);
    finish(logits);
  }
}

/// softmax_in_registers of rows by address. `load` gives the transform of the row.
template <class Problem, class T, int vectors, bool anywhere, bool may_drop_end, class Out, class Threads,
          class Reduce, class Load, class Store>
__device__ __forceinline__ void softmax_in_registers(PackedRow<T, vectors, anywhere, may_drop_end, Out>& row,
                                                     const Threads& threads, const Problem& problem, Out* lse,
                                                     bool writes_lse, const Reduce& reduce, const Load& load,
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
      if (row.skips(k, threads) || row.drops_all(k, threads)) break;
#pragma unroll
      for (int i = 0; i < pairs; ++i) {
        const unsigned pair = row.held[k * pairs + i];
        const float first = exponential(Pair::low(pair)), second = exponential(Pair::high(pair));
        units.template add<exact>(first, second);
        if constexpr (holds_exponentials && exact == !is_16_bit_v<Out>) {
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
          std::remove_cvref_t<decltype(output(0.0f, 0.0f))> of_dropped{};
          if constexpr (may_drop_end) of_dropped = output(-infinity_v<float>, -infinity_v<float>);
          store([&](int k, int i) {
            if (row.drops_all(k, threads)) return of_dropped;
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
          if (writes_lse) *lse = store_as<Out>(logsumexp);
        });
  };
  with_logits_of_packed<T, Out>(
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
  const auto drops_all = [&](int k) {
    if constexpr (requires { row.drops_all(k, threads); }) {
      return row.drops_all(k, threads);
    } else {
      return false;
    }
  };
  const auto sum = [&](auto of_logarithm, const auto& term) {
    FixedPointUnits units{Row::first_units, 0};
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      if (row.skips(k, threads) || drops_all(k)) break;
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
        // (Of softmax, exponentials are held by now.)
        const float dropped = are_needed ? -infinity_v<float> : 0.0f;
        const unsigned of_dropped = output(dropped, dropped);
        store([&](int k, int i) {
          if (drops_all(k)) return of_dropped;
          return output(row.held[k * width + 2 * i], row.held[k * width + 2 * i + 1]);
        });
      },
      [&](float logsumexp) {
        if (writes_lse) *lse = store_as<typename Problem::Out>(logsumexp);
      });
}

/// Across the lanes of a row. Maxima may be NaN. Where fewer lanes than a warp have a row, it is one of less
/// than 2^10 unless it `may_be_longer`.
template <class Acc, int group, bool may_be_longer = (group == 32)>
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

  template <bool exact>
  __device__ float sum_of_units(const FixedPointUnits& units) const {
    const unsigned rest = exact ? add(units.rest) : 0;
    if constexpr (!may_be_longer) {
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
/// beside them; fewer than that where more rows have to be under way (squares with a factor and a causal
/// mask, bfloat16 on one H200, fraction of a copy of what is kept and all of y, in six and eight blocks: 768
/// columns 0.86 and 0.92, 1001 0.82 and 0.845, 2001 0.84 and 0.90, but 256 0.91 and 0.85, 512 0.915 and
/// 0.88).
template <class Problem, class Registers, bool irregular, int lanes>
inline constexpr int least_blocks_of_warps = [] {
  const std::size_t bytes = sizeof(Registers::held);
  if (has_many_vectors_a_lane<Problem> && !(irregular && has_packed_mask<typename Problem::Transform>)) {
    const bool many = irregular || (lanes == 16 && !has_packed_mask<typename Problem::Transform>);
    return many || bytes <= 64 ? 8 : bytes <= 80 ? 10 : bytes <= 96 ? 8 : 6;
  }
  if (Registers::by_address && !is_packed<Problem>) return bytes <= 96 ? 8 : bytes <= 128 ? 7 : 6;
  const int spare =
      is_packed<Problem> ? (irregular || bytes > 80 ? 2 : 1) : (irregular || bytes <= 80 ? 0 : 1);
  if (widens_rows<Problem>) {
    // (Bfloat16 to float on one H200, fraction of a copy of log_softmax of 128 columns in ten blocks and in
    // eight 0.95 and 0.99, of softmax of 150 columns in seven and eight 0.84 and 0.90, 401 0.94 and 0.97, 801
    // 0.95 and 1.00.)
    if (is_packed<Problem> && bytes <= 80) return 8;
    // (As logits, softmax of 1024 columns in eight, six and five blocks: 0.69, 0.87 and 0.95.)
    if (!is_packed<Problem> && !irregular && bytes == 96) return 6;
    if (!is_packed<Problem> && !irregular && bytes == 128 && lanes == 32) return 5;
  }
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
    // (Vectors are those of x, which y has too where neither has gaps.)
    const bool dense =
        g.rank == 1 && g.y_stride[0] == g.columns && (!widens_rows<Problem> || g.x_stride[0] == g.columns);
    row.store(problem.y + where.y_offset, exists, position + 1 < g.rows, dense, threads, output);
  } else {
    row.store(problem.y + where.y_offset, static_cast<int>(problem.geometry.columns), exists, threads,
              output);
  }
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

/// Bytes to which all rows are aligned alike, at most 16: of x, of y, and of both to each other, an element
/// of x counted as large as one of y where that is larger.
struct RowAlignment {
  std::uintptr_t x, y, difference;

  template <class Problem>
  static RowAlignment of(const Problem& problem) {
    const RowGeometry& g = problem.geometry;
    const auto bytes = [](index_type elements, std::size_t size) {
      return static_cast<std::uintptr_t>(elements) * size;
    };
    constexpr std::uintptr_t wider =
        sizeof(*problem.y) > sizeof(*problem.x) ? sizeof(*problem.y) / sizeof(*problem.x) : 1;
    const auto x_begin = reinterpret_cast<std::uintptr_t>(problem.x),
               y_begin = reinterpret_cast<std::uintptr_t>(problem.y);
    RowAlignment all{x_begin, y_begin, y_begin - wider * x_begin};
    for (int d = 0; d < g.rank; ++d) {
      const std::uintptr_t x = bytes(g.x_stride[d], sizeof(*problem.x));
      const std::uintptr_t y = bytes(g.y_stride[d], sizeof(*problem.y));
      all.x |= x;
      all.y |= y;
      all.difference |= y - wider * x;
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

}  // namespace KokkosSoftmax::impl

#endif
