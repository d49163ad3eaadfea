// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The ordered list of implementations of the softmax within a head: those of softmax, and in front what is
/// made for logits that a GEMM has just written.

#ifndef KOKKOSSOFTMAX_HEADROWSCANDIDATES_HPP
#define KOKKOSSOFTMAX_HEADROWSCANDIDATES_HPP

#include <impl/KokkosSoftmax_SoftmaxCandidates.hpp>
#if defined(KOKKOS_ENABLE_CUDA)
#include <impl/cuda/KokkosSoftmax_ResidentRows.hpp>
#endif

namespace KokkosSoftmax::impl {

template <class List, class... InFront>
struct WithInFront;
template <class... Implementations, class... InFront>
struct WithInFront<CandidateList<Implementations...>, InFront...> {
  using type = CandidateList<InFront..., Implementations...>;
};

/// resident_rows gives the bits of block_per_row, so that it may choose by alignment.
#if defined(KOKKOS_ENABLE_CUDA)
using HeadRowsCandidates = WithInFront<SoftmaxCandidates, ResidentRows>::type;
#else
using HeadRowsCandidates = SoftmaxCandidates;
#endif

}  // namespace KokkosSoftmax::impl

#endif
