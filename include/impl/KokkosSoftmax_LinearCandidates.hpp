// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The ordered list of implementations of the heads, and what each backend adds.

#ifndef KOKKOSSOFTMAX_LINEARCANDIDATES_HPP
#define KOKKOSSOFTMAX_LINEARCANDIDATES_HPP

#include <impl/KokkosSoftmax_Dispatch.hpp>
#include <impl/KokkosSoftmax_PackedWeights.hpp>
#include <impl/portable/KokkosSoftmax_BlasLinear.hpp>
#if defined(KOKKOS_ENABLE_CUDA)
#include <impl/cuda/KokkosSoftmax_CublasLinear.hpp>
#include <impl/cuda/KokkosSoftmax_RoundedTensorCoreLinear.hpp>
#include <impl/cuda/KokkosSoftmax_TensorCoreLinear.hpp>
#endif

namespace KokkosSoftmax::impl {

/// A hand-tuned kernel goes in front; blas_linear takes what BLAS can count, on every backend.
template <class Exec>
struct LinearCandidatesOf {
  using type = CandidateList<BlasLinear>;
};
#if defined(KOKKOS_ENABLE_CUDA)
template <>
struct LinearCandidatesOf<Kokkos::Cuda> {
  using type = CandidateList<TensorCoreLinear, RoundedTensorCoreLinear, CublasLinear, BlasLinear>;
};
#endif
template <class Exec>
using LinearCandidates = typename LinearCandidatesOf<Exec>::type;

/// What takes weights in a backend's own form, from pack().
template <class Exec>
struct PackedLinearCandidatesOf {
  using type = CandidateList<>;
};
#if defined(KOKKOS_ENABLE_CUDA)
template <>
struct PackedLinearCandidatesOf<Kokkos::Cuda> {
  using type = CandidateList<RoundedTensorCoreLinear, TensorCoreLinear>;
};
#endif
template <class Exec>
using PackedLinearCandidates = typename PackedLinearCandidatesOf<Exec>::type;

}  // namespace KokkosSoftmax::impl

#endif
