// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// A head of the C interface with a chain of any type.

#ifndef KOKKOSSOFTMAX_CHEAD_HPP
#define KOKKOSSOFTMAX_CHEAD_HPP

#include "KokkosSoftmax_CChain.hpp"

#include <KokkosSoftmax_Linear.hpp>

namespace KokkosSoftmax::c {

template <class In, class Out, class Exec, class Head, class Candidates = impl::LinearCandidates<Exec>,
          class PackedCandidates = impl::PackedLinearCandidates<Exec>>
void run_head(const Exec& exec, const HeadCall& call, const Head& head, const Candidates& candidates = {},
              const PackedCandidates& packed_candidates = {}) {
  const ArrayView<const In, Exec> x(call.x);
  const ArrayView<Out, Exec> y(call.y);
  const Precision precision = call.tf32 ? Precision::tf32 : Precision::ieee;
  const char* function = call.function();
  // The operation's own name is what an implementation is forced by, also while it is reserved.
  const char* operation =
      call.operation == impl::Operation::softmax ? "linear_softmax" : "linear_log_softmax";
  const auto use = [&]<class List>(const List&, const auto& problem) {
    if (call.reserve) {
      List::choose(operation, exec, problem,
                   [&](auto implementation) { implementation.reserve(exec, problem); });
    } else {
      const Kokkos::Profiling::ScopedRegion region(std::string("KokkosSoftmax::") + function);
      List::choose(operation, exec, problem, [&](auto implementation) { implementation.run(exec, problem); });
    }
  };
  const auto with_matrix = [&](const auto& w) {
    impl::with_linear_problem(call.operation, function, exec, x, w, y, head, precision,
                              [&](const auto& problem) { use(candidates, problem); });
  };
  if (!call.packed) return with_matrix(ArrayView<const In, Exec>(call.w));
  if constexpr (std::is_same_v<accumulator_t<In, Out>, accumulator_t<In>>) {
    const auto& packed = *static_cast<const PackedWeights<Exec, In>*>(call.packed);
    impl::with_packed(call.operation, function, exec, x, packed, y, head, precision, with_matrix,
                      [&](const auto& problem) { use(packed_candidates, problem); });
  }
}

}  // namespace KokkosSoftmax::c

#endif
