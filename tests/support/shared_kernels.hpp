// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Kernels that several test programs call: with KOKKOSSOFTMAX_TESTS_SHARE_KERNELS they are compiled once,
// in shared_kernels*.cpp, for those of one transform take a compiler five to ten seconds.
#ifndef KOKKOSSOFTMAX_TESTS_SHARED_KERNELS_HPP
#define KOKKOSSOFTMAX_TESTS_SHARED_KERNELS_HPP

#include <KokkosSoftmax.hpp>

// One declaration or definition for each backend.
#define KOKKOSSOFTMAX_TESTS_ROWS(EXEC, KEYWORD, ROWS)                           \
  KEYWORD template void run_rows(const EXEC&, const tests::ROWS&, const char*); \
  KEYWORD template void reserve_rows(const EXEC&, const tests::ROWS&, const char*);
#define KOKKOSSOFTMAX_TESTS_KERNELS(KEYWORD, ROWS) \
  KOKKOSSOFTMAX_FOR_EACH_BACKEND(KOKKOSSOFTMAX_TESTS_ROWS, KEYWORD, ROWS)

namespace tests {

template <class Out, class Transform>
using RowsOfFloat = KokkosSoftmax::impl::RowsProblem<float, Out, Transform>;

using RowsToHalf = RowsOfFloat<KokkosSoftmax::half_t, KokkosSoftmax::impl::BoundIdentity>;
using RowsWithScale =
    RowsOfFloat<float, KokkosSoftmax::impl::BoundFunctor<KokkosSoftmax::impl::ScaleFunction>>;
using RowsWithBias = RowsOfFloat<float, KokkosSoftmax::impl::BoundBias<float>>;
using RowsWithBatchNorm = RowsOfFloat<float, KokkosSoftmax::impl::BoundBatchNorm<float, float, float, float>>;
using RowsWithMask = RowsOfFloat<float, KokkosSoftmax::impl::BoundMask<bool>>;
using RowsWithMaskAndBias =
    RowsOfFloat<float, KokkosSoftmax::impl::BoundChain<KokkosSoftmax::impl::BoundMask<bool>,
                                                       KokkosSoftmax::impl::BoundBias<float>>>;
using RowsWithTemperature = RowsOfFloat<float, KokkosSoftmax::impl::BoundTemperature<float>>;
using CausalRows = RowsOfFloat<float, KokkosSoftmax::impl::BoundCausal>;

#if defined(KOKKOSSOFTMAX_ENABLE_LINEAR)
template <class Out, class Transform>
using HeadRows = RowsOfFloat<Out, KokkosSoftmax::impl::BoundRowShift<Transform>>;
template <class Before, class After>
using NormalizedHeadRows = HeadRows<
    float, KokkosSoftmax::impl::BoundChain<
               KokkosSoftmax::impl::BoundChain<Before, KokkosSoftmax::impl::BoundNormalizer<float>>, After>>;
using BiasGeluHeadRows = HeadRows<
    float,
    KokkosSoftmax::impl::BoundChain<KokkosSoftmax::impl::BoundBias<float>,
                                    KokkosSoftmax::impl::BoundFunctor<KokkosSoftmax::impl::GeluErfFunction>>>;
using BiasBatchNormScaleHeadRows =
    NormalizedHeadRows<KokkosSoftmax::impl::BoundBiasBeforeNormalizer<float>,
                       KokkosSoftmax::impl::BoundFunctor<KokkosSoftmax::impl::ScaleFunction>>;
#endif

}  // namespace tests

#define KOKKOSSOFTMAX_TESTS_FOR_EACH_SHARED_KERNEL(M, KEYWORD) \
  M(KEYWORD, RowsToHalf)                                       \
  M(KEYWORD, RowsWithScale)                                    \
  M(KEYWORD, RowsWithBias)                                     \
  M(KEYWORD, RowsWithBatchNorm)                                \
  M(KEYWORD, RowsWithMask)                                     \
  M(KEYWORD, RowsWithMaskAndBias)                              \
  M(KEYWORD, RowsWithTemperature)                              \
  M(KEYWORD, CausalRows)

// Of programs that compare with the C library bit for bit, compiled like the library, in library_kernels.cpp.
#if defined(KOKKOSSOFTMAX_ENABLE_LINEAR)
#define KOKKOSSOFTMAX_TESTS_FOR_EACH_LIBRARY_KERNEL(M, KEYWORD) \
  M(KEYWORD, RowsWithScale)                                     \
  M(KEYWORD, BiasGeluHeadRows)                                  \
  M(KEYWORD, BiasBatchNormScaleHeadRows)
#else
#define KOKKOSSOFTMAX_TESTS_FOR_EACH_LIBRARY_KERNEL(M, KEYWORD) M(KEYWORD, RowsWithScale)
#endif

namespace KokkosSoftmax::impl {
#if defined(KOKKOSSOFTMAX_TESTS_SHARE_KERNELS)
KOKKOSSOFTMAX_TESTS_FOR_EACH_SHARED_KERNEL(KOKKOSSOFTMAX_TESTS_KERNELS, extern)
#elif defined(KOKKOSSOFTMAX_TESTS_SHARE_LIBRARY_KERNELS)
KOKKOSSOFTMAX_TESTS_FOR_EACH_LIBRARY_KERNEL(KOKKOSSOFTMAX_TESTS_KERNELS, extern)
#endif
}  // namespace KokkosSoftmax::impl

#endif
