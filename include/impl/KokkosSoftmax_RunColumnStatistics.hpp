// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Which kernels form the moments of columns: the host's on vectors, or a device's.

#ifndef KOKKOSSOFTMAX_RUNCOLUMNSTATISTICS_HPP
#define KOKKOSSOFTMAX_RUNCOLUMNSTATISTICS_HPP

#include <impl/host/KokkosSoftmax_SimdColumns.hpp>
#include <impl/portable/KokkosSoftmax_ColumnStatistics.hpp>

#include <algorithm>
#include <string>

namespace KokkosSoftmax::impl {

/// `partials` has column_statistics_bytes(); rows > 0.
template <class Exec, class Problem, class Sink>
void run_column_statistics(const Exec& exec, const std::string& label, const Problem& problem,
                           Moments* partials, const Sink& sink) {
  using Plan = ColumnStatisticsPlan<Exec>;
  const index_type chunk_rows = Plan::chunk_rows(problem.rows), chunks = Plan::chunks(problem.rows);
  if constexpr (runs_on_host_v<Exec>) {
    using Reduce = SimdReduceColumns<Exec, Problem>;
    const index_type block = Reduce::block_for(problem, chunks, exec.concurrency());
    launch_range(exec, label + "::reduce", chunks * ceil_div(problem.columns, block),
                 Reduce{problem, chunk_rows, block, partials});
  } else {
    const ChunkOfColumn<Exec, Problem> chunk_of{problem, chunk_rows};
    using OneLaunch = ReduceAndJoinColumns<Exec, Problem, Sink>;
    if (OneLaunch::is_faster(chunks, problem.columns)) {
      launch_teams<typename OneLaunch::Bounds>(
          exec, label, ceil_div(problem.columns, OneLaunch::lanes),
          static_cast<int>(std::min<index_type>(chunks, OneLaunch::most_threads)), OneLaunch::lanes,
          OneLaunch::team_scratch(chunks), OneLaunch{chunk_of, sink});
      return;
    }
    launch_range(exec, label + "::reduce", chunks * problem.columns,
                 ReduceColumns<Exec, Problem>{chunk_of, partials});
  }
  launch_range(exec, label + "::join", problem.columns,
               JoinColumns<Problem, Sink>{{problem, chunk_rows, sink}, partials});
}

}  // namespace KokkosSoftmax::impl

#endif
