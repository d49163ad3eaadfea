// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The (max, sum) pair of a row: what a softmax has to know of it, mergeable in any order.

#ifndef KOKKOSSOFTMAX_ONLINE_HPP
#define KOKKOSSOFTMAX_ONLINE_HPP

#include <impl/KokkosSoftmax_Exp.hpp>

#include <string>

namespace KokkosSoftmax {

/// max = the largest logit (kept finite: the most negative finite number while nothing was seen, the largest
/// finite number in place of +inf), sum = the sum of exp(logit - max): 0 when every logit was -inf, NaN after
/// a NaN, +inf after a +inf and no NaN. Two pairs merge with join(); logsumexp = max + log(sum). (M. Milakov
/// and N. Gimelshein, "Online normalizer calculation for softmax", 2018.)
template <class Acc>
struct MaxSum {
  Acc max = -impl::largest_v<Acc>;
  Acc sum = 0;
};

template <class Acc>
KOKKOS_FORCEINLINE_FUNCTION MaxSum<Acc> join(const MaxSum<Acc>& a, const MaxSum<Acc>& b) {
  const Acc max = a.max > b.max ? a.max : b.max;
  return {max, a.sum * impl::exp_of_difference(a.max - max) + b.sum * impl::exp_of_difference(b.max - max)};
}

namespace impl {

/// A MaxSum that also keeps what rounding took from its sum, so that the sum of a row of any length is as
/// good as the sum of a short one: added one after the other, a million equal terms in float would lose three
/// digits.
template <class Acc>
struct CompensatedMaxSum {
  Acc max = -largest_v<Acc>;
  Acc sum = 0;
  Acc low = 0;

  /// Adds to the sum (D. Knuth's two-sum, which needs no order of magnitudes).
  KOKKOS_FORCEINLINE_FUNCTION void add(Acc term) {
    const Acc total = sum + term;
    const Acc part = total - sum;
    low += (sum - (total - part)) + (term - part);
    sum = total;
  }

  KOKKOS_FORCEINLINE_FUNCTION void raise_max(Acc new_max) {
    if (new_max > max) {
      const Acc factor = exp_of_difference(max - new_max);
      sum *= factor;
      low *= factor;
      max = new_max;
    }
  }

  KOKKOS_FORCEINLINE_FUNCTION void join(const CompensatedMaxSum& other) {
    const bool raises = other.max > max;
    const CompensatedMaxSum smaller = raises ? *this : other;
    if (raises) *this = other;
    const Acc factor = exp_of_difference(smaller.max - max);
    add(smaller.sum * factor);
    low += smaller.low * factor;
  }

  KOKKOS_FORCEINLINE_FUNCTION MaxSum<Acc> rounded() const {
    // An infinite or NaN sum makes `low` NaN: such a sum speaks for itself.
    return {max, low == low ? sum + low : sum};
  }
};

/// The Kokkos reducer of CompensatedMaxSum, for nested parallel_reduce.
template <class Acc>
class OnlineReducer {
 public:
  using reducer = OnlineReducer;
  using value_type = CompensatedMaxSum<Acc>;
  using result_view_type =
      Kokkos::View<value_type, Kokkos::AnonymousSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;

  KOKKOS_FORCEINLINE_FUNCTION explicit OnlineReducer(value_type& result) : result_(&result) {}
  KOKKOS_FORCEINLINE_FUNCTION void join(value_type& into, const value_type& from) const { into.join(from); }
  KOKKOS_FORCEINLINE_FUNCTION void init(value_type& value) const { value = value_type{}; }
  KOKKOS_FORCEINLINE_FUNCTION value_type& reference() const { return *result_; }
  KOKKOS_FORCEINLINE_FUNCTION result_view_type view() const { return result_view_type(result_); }
  KOKKOS_FORCEINLINE_FUNCTION bool references_scalar() const { return true; }

 private:
  value_type* result_;
};

/// What is done with a row once its (max, sum) is known.
enum class Operation : int { softmax, log_softmax, logsumexp };

inline const char* operation_name(Operation operation) {
  switch (operation) {
    case Operation::softmax:
      return "softmax";
    case Operation::log_softmax:
      return "log_softmax";
    case Operation::logsumexp:
      return "logsumexp";
  }
  return "";
}

/// What Kokkos Tools see of a launch.
inline std::string kernel_label(Operation operation, const char* implementation) {
  return std::string("KokkosSoftmax::") + operation_name(operation) + "::" + implementation;
}

/// The last formula: from a row's (max, sum) to its outputs, special rows included. A row of -inf alone gives
/// 0 (log_softmax, logsumexp: -inf); NaN or +inf in a row gives NaN (logsumexp: +inf for +inf without NaN).
template <class Acc>
struct RowResult {
  Acc max;
  Acc factor;  ///< softmax: 1 / sum
  Acc log_sum;
  Operation operation;

  RowResult() = default;
  KOKKOS_FORCEINLINE_FUNCTION RowResult(Operation operation_, const MaxSum<Acc>& total)
      : max(total.max), factor(0), log_sum(0), operation(operation_) {
    const bool infinite = total.sum == infinity_v<Acc>;
    if (operation == Operation::softmax) {
      factor = total.sum == Acc(0) ? Acc(0) : infinite ? nan_v<Acc> : Acc(1) / total.sum;
    } else if (operation == Operation::log_softmax) {
      log_sum = total.sum == Acc(0) ? Acc(0) : infinite ? nan_v<Acc> : Kokkos::log(total.sum);
    } else {
      log_sum = total.sum == Acc(0) ? -infinity_v<Acc> : Kokkos::log(total.sum);
    }
  }

  KOKKOS_FORCEINLINE_FUNCTION Acc softmax_of_exponential(Acc exponential) const {
    return exponential * factor;
  }
  KOKKOS_FORCEINLINE_FUNCTION Acc softmax(Acc logit) const {
    return softmax_of_exponential(exp_of_difference(logit - max));
  }
  KOKKOS_FORCEINLINE_FUNCTION Acc log_softmax(Acc logit) const { return (logit - max) - log_sum; }
  KOKKOS_FORCEINLINE_FUNCTION Acc logsumexp() const { return max + log_sum; }
  KOKKOS_FORCEINLINE_FUNCTION Acc operator()(Acc logit) const {
    return operation == Operation::softmax ? softmax(logit) : log_softmax(logit);
  }
};

}  // namespace impl
}  // namespace KokkosSoftmax

#endif
