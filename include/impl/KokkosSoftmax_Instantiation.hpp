// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Compiles the kernels of one backend and one pair of scalars into the library. The build defines the three
/// macros.

#ifndef KOKKOSSOFTMAX_INSTANTIATION_HPP
#define KOKKOSSOFTMAX_INSTANTIATION_HPP

#include <impl/KokkosSoftmax_SoftmaxCandidates.hpp>

#if defined(KOKKOSSOFTMAX_INSTANTIATE_BACKEND)
namespace KokkosSoftmax::impl {

using InstantiatedRows =
    RowsProblem<KOKKOSSOFTMAX_INSTANTIATE_IN, KOKKOSSOFTMAX_INSTANTIATE_OUT, BoundIdentity>;
template void run_rows(const KOKKOSSOFTMAX_INSTANTIATE_BACKEND&, const InstantiatedRows&, const char*);
template void reserve_rows(const KOKKOSSOFTMAX_INSTANTIATE_BACKEND&, const InstantiatedRows&, const char*);
KOKKOSSOFTMAX_TRANSFORMED_ROWS(template, KOKKOSSOFTMAX_INSTANTIATE_BACKEND, KOKKOSSOFTMAX_INSTANTIATE_IN,
                               KOKKOSSOFTMAX_INSTANTIATE_OUT)

}  // namespace KokkosSoftmax::impl
#endif

#endif
