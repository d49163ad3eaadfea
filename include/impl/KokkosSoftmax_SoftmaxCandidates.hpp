// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The ordered list of softmax implementations, and what each backend adds. Beside the list of the heads, and
/// KokkosSoftmax_Launch.hpp for HPX, the only place that asks which backends are enabled.

#ifndef KOKKOSSOFTMAX_SOFTMAXCANDIDATES_HPP
#define KOKKOSSOFTMAX_SOFTMAXCANDIDATES_HPP

#include <impl/KokkosSoftmax_Dispatch.hpp>
#include <impl/host/KokkosSoftmax_SimdRows.hpp>
#include <impl/portable/KokkosSoftmax_StridedRows.hpp>
#include <impl/portable/KokkosSoftmax_TeamRows.hpp>
#if defined(KOKKOS_ENABLE_CUDA)
#include <impl/cuda/KokkosSoftmax_BlockPerRow.hpp>
#include <impl/cuda/KokkosSoftmax_BlockPerSlicedRow.hpp>
#include <impl/cuda/KokkosSoftmax_BlockPerSlicedTile.hpp>
#include <impl/cuda/KokkosSoftmax_BlockPerWideTile.hpp>
#include <impl/cuda/KokkosSoftmax_ClusterPerTile.hpp>
#include <impl/cuda/KokkosSoftmax_ClusterPipelinedTiles.hpp>
#include <impl/cuda/KokkosSoftmax_CudaRuntime.hpp>
#include <impl/cuda/KokkosSoftmax_GridPipelinedRows.hpp>
#include <impl/cuda/KokkosSoftmax_GridPipelinedTiles.hpp>
#include <impl/cuda/KokkosSoftmax_QuadPerRow.hpp>
#include <impl/cuda/KokkosSoftmax_SplitRows.hpp>
#include <impl/cuda/KokkosSoftmax_ThreadPerRow.hpp>
#include <impl/cuda/KokkosSoftmax_TiledLogits.hpp>
#include <impl/cuda/KokkosSoftmax_TiledRows.hpp>
#include <impl/cuda/KokkosSoftmax_TwoPassTiles.hpp>
#include <impl/cuda/KokkosSoftmax_WarpPerRow.hpp>
#endif

namespace KokkosSoftmax::impl {

/// Tuned first; the portable kernel that takes everything last. block_per_tile, two_pass_tiles, strided_rows
/// and split_team_rows accept by layout and length alone (see their files), because they do not give each
/// other's bits, nor those of team_rows. (block_per_wide_tile gives those of block_per_tile;
/// cluster_pipelined_tiles, cluster_per_tile, block_per_sliced_tile and grid_pipelined_tiles those of
/// two_pass_tiles.)
#if defined(KOKKOS_ENABLE_CUDA)
using SoftmaxCandidates =
    CandidateList<ThreadPerRow, QuadPerRow, TiledRows, TiledLogits, WarpPerRow, BlockPerRow,
                  BlockPerSlicedRow, SplitRows, GridPipelinedRows, BlockPerWideTile, BlockPerTile,
                  ClusterPipelinedTiles, ClusterPerTile, BlockPerSlicedTile, TwoPassTiles, GridPipelinedTiles,
                  SimdRows, StridedRows, SplitTeamRows, TeamRows>;
#elif defined(KOKKOS_ENABLE_HPX)
// SimdRows leans on launches that have ended when they return.
using SoftmaxCandidates = CandidateList<StridedRows, SplitTeamRows, TeamRows>;
#else
using SoftmaxCandidates = CandidateList<SimdRows, StridedRows, SplitTeamRows, TeamRows>;
#endif

/// Runs a call in canonical form, of an operation or of a step of one, by one of a list.
template <class Candidates, class Exec, class Problem>
void run_rows_by(const Exec& exec, const Problem& problem, const char* operation) {
  Candidates::choose(operation, exec, problem,
                     [&](auto implementation) { implementation.run(exec, problem); });
}

/// Makes all that run_rows_by would have to make: the scratch, also of those that take shorter rows, and, by
/// a launch over no rows, what a backend does at the first launch of a kernel.
template <class Candidates, class Exec, class Problem>
void reserve_rows_by(const Exec& exec, const Problem& problem, const char* operation) {
  Candidates::choose(operation, exec, problem, [&](auto implementation) {
    implementation.reserve(exec, problem);
    Problem no_rows = problem;
    no_rows.geometry.rows = 0;
    implementation.run(exec, no_rows);
  });
  Candidates::template for_each<Exec, Problem>([&](auto implementation) {
    if constexpr (requires { implementation.reserve_for_shorter_rows(exec, problem); })
      implementation.reserve_for_shorter_rows(exec, problem);
  });
}

/// By any of them. Compiled into the library for the pairs of scalars in KokkosSoftmax_Scalars.hpp and no
/// transform.
template <class Exec, class In, class Out, class Transform>
void run_rows(const Exec& exec, const RowsProblem<In, Out, Transform>& problem, const char* operation) {
  run_rows_by<SoftmaxCandidates>(exec, problem, operation);
}
template <class Exec, class In, class Out, class Transform>
void reserve_rows(const Exec& exec, const RowsProblem<In, Out, Transform>& problem, const char* operation) {
  reserve_rows_by<SoftmaxCandidates>(exec, problem, operation);
}

}  // namespace KokkosSoftmax::impl

#endif
