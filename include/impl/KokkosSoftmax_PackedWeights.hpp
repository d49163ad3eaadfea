// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The weights of a head in the form that its fastest implementation wants: what a backend specialises.

#ifndef KOKKOSSOFTMAX_PACKEDWEIGHTS_HPP
#define KOKKOSSOFTMAX_PACKEDWEIGHTS_HPP

#include <impl/KokkosSoftmax_LinearProblem.hpp>

#include <memory>

namespace KokkosSoftmax::impl {

/// No form other than the matrix itself. Where there is one:
///   using Weights     stands for W's scalar in a LinearProblem, whose Matrix points to the one object;
///   Weights weights;
///   static std::shared_ptr<WeightPacking> make(exec, w)     null: better left as it is.
template <class Exec, class T>
struct WeightPacking {
  static constexpr bool possible = false;
};

}  // namespace KokkosSoftmax::impl

#endif
