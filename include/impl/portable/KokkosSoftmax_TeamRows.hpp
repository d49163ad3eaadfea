// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Portable kernels for rows along any axis: TeamPolicy and nested parallel_reduce. Short rows share a team,
/// a lane group each; longer rows have a team; very long rows have several, in two launches.

#ifndef KOKKOSSOFTMAX_TEAMROWS_HPP
#define KOKKOSSOFTMAX_TEAMROWS_HPP

#include <impl/portable/KokkosSoftmax_Launch.hpp>
#include <impl/portable/KokkosSoftmax_RowBlocks.hpp>

#include <string>
#include <string_view>

namespace KokkosSoftmax::impl {

/// How a row is cut and how many lanes reduce it. Depends on the row's length alone, because it decides the
/// bits.
template <class Exec>
struct TeamRowsPlan {
  static constexpr bool on_host = runs_on_host_v<Exec>;
  /// Longer rows are reduced by several teams; a chunk is one team's share. On the host a row of this length
  /// still fits a core's cache beside its result.
  static constexpr index_type longest_of_one_team = 65536;
  static constexpr index_type chunk_columns = on_host ? 32768 : 16384;
  /// Longer rows have a team of their own on a device.
  static constexpr index_type longest_of_lane_group = 2048;

  /// Columns of a block: on a device as many as hide the cost of a block and still fit the registers; fewer
  /// for rows that do not fill such blocks.
  static constexpr int block = on_host ? 512 : 16;
  static constexpr int short_block = on_host ? 512 : 8;
  static constexpr index_type longest_of_short_blocks = 512;

  /// Lanes (a power of two, its exponent) that share a row of a team with many.
  static int lane_group_bits(index_type columns) {
    int bits = 0;
    while (!on_host && bits < 5 && (8 << bits) < columns) ++bits;
    return bits;
  }
  /// Threads of a team with a row of its own: 64 columns a lane, so that joining the lanes costs little
  /// beside them, and the rows under way in the whole device fit its cache, from which each is read the
  /// second time.
  static int threads(index_type columns) {
    int n = on_host ? 1 : 64;
    while (!on_host && n < 1024 && n * 64 < columns) n *= 2;
    return n;
  }
  static constexpr int threads_of_chunk = on_host ? 1 : 256;
  static constexpr int threads_of_lane_groups = on_host ? 1 : 256;
  /// Rows that a team takes when rows share a team; here the number of rows may matter, since it moves no
  /// bits.
  static index_type rows_of_team(index_type columns) {
    return on_host ? std::max<index_type>(1, 16384 / columns)
                   : threads_of_lane_groups >> lane_group_bits(columns);
  }
};

inline int bits_of_power_of_two(int n) {
  int bits = 0;
  while ((1 << bits) < n) ++bits;
  return bits;
}

/// Reduces and writes columns of one row with the lanes of a nested range.
template <class Exec, class Problem, int block = TeamRowsPlan<Exec>::block>
struct RowWork {
  using Acc = typename Problem::Acc;
  using Out = typename Problem::Out;
  using RowBlocks = Blocks<Exec, block>;
  using State = CompensatedMaxSum<Acc>;
  static constexpr bool on_host = RowBlocks::on_host;

  /// On the host the exponentials are left in the output where that loses nothing, and only scaled
  /// afterwards.
  static constexpr bool output_can_hold_exponentials = on_host && std::is_same_v<Acc, Out>;

  RowAccess<Problem> row;
  RowBlocks blocks;
  Operation operation;

  KOKKOS_FORCEINLINE_FUNCTION RowWork(const Problem& p, index_type position, index_type begin, index_type end,
                                      int lane_bits)
      : row(p, position), blocks{begin, end, lane_bits}, operation(p.operation) {}

  /// The (max, sum) of the columns; the same on every lane.
  template <class MakeRange>
  KOKKOS_FORCEINLINE_FUNCTION State reduce(const MakeRange& range, bool leave_exponentials) const {
    State total;
    if constexpr (on_host) {
      Acc max;
      Kokkos::parallel_reduce(
          range(blocks.count()),
          [&](index_type b, Acc& m) {
            HostBlock<Acc, RowBlocks::size> v;
            v.load(row, blocks.first(b), blocks.end);
            m = larger(v.max(), m);
          },
          Kokkos::Max<Acc>(max));
      max = finite_max(max);
      Kokkos::parallel_reduce(
          range(blocks.count()),
          [&](index_type b, State& state) {
            HostBlock<Acc, RowBlocks::size> v;
            v.load(row, blocks.first(b), blocks.end);
            state.max = max;
            v.exponentiate(state);
            if constexpr (output_can_hold_exponentials) {
              if (leave_exponentials) v.store(row.y + blocks.first(b) * row.y_stride, row.y_stride);
            }
          },
          OnlineReducer<Acc>(total));
    } else {
      Kokkos::parallel_reduce(
          range(blocks.count()),
          [&](index_type b, State& state) {
            reduce_lane_block<RowBlocks::size>(row, blocks.first(b), blocks.lanes(), blocks.end, state);
          },
          OnlineReducer<Acc>(total));
    }
    return total;
  }

  template <class MakeRange>
  KOKKOS_FORCEINLINE_FUNCTION void write(const MakeRange& range, const State& total,
                                         bool exponentials_left) const {
    const RowResult<Acc> result(operation, total.rounded());
    if (operation == Operation::logsumexp) {
      Kokkos::parallel_for(range(1), [&](index_type) { *row.y = store_as<Out>(result.logsumexp()); });
      return;
    }
    Kokkos::parallel_for(range(blocks.count()), [&](index_type b) {
      const index_type first = blocks.first(b);
      if constexpr (on_host) {
        if (exponentials_left) {
          scale_output(first, result.factor);
          return;
        }
        HostBlock<Acc, RowBlocks::size> v;
        v.load(row, first, blocks.end);
        if (operation == Operation::softmax) {
          v.exponentiate(result.max);
          v.multiply(result.factor);
        } else {
          v.subtract(result.max, result.log_sum);
        }
        v.store(row.y + first * row.y_stride, row.y_stride);
      } else {
        write_lane_block<RowBlocks::size>(row, first, blocks.lanes(), blocks.end, result);
      }
    });
  }

  template <class MakeRange>
  KOKKOS_FORCEINLINE_FUNCTION void whole(const MakeRange& range) const {
    const bool leave = output_can_hold_exponentials && operation == Operation::softmax;
    write(range, reduce(range, leave), leave);
  }

 private:
  KOKKOS_INLINE_FUNCTION void scale_output(index_type first, Acc factor) const {
    if constexpr (output_can_hold_exponentials) {
      const index_type left = blocks.end - first;
      const int count = static_cast<int>(left < RowBlocks::size ? left : RowBlocks::size);
      Out* y = row.y + first * row.y_stride;
      if (row.y_stride == 1) {
        for (int i = 0; i < count; ++i) y[i] *= factor;
      } else {
        for (int i = 0; i < count; ++i) y[i * row.y_stride] *= factor;
      }
    }
  }
};

/// Several rows a team: a row to each lane group.
template <class Exec, class Problem, int block>
struct RowPerLaneGroup {
  Problem problem;
  int lane_bits;
  int rows_of_team;

  template <class Member>
  KOKKOS_FUNCTION void operator()(const Member& member) const {
    Kokkos::parallel_for(Kokkos::TeamThreadRange(member, rows_of_team), [&](int i) {
      const index_type position = static_cast<index_type>(member.league_rank()) * rows_of_team + i;
      if (position >= problem.geometry.rows) return;
      const RowWork<Exec, Problem, block> work(problem, position, 0, problem.geometry.columns, lane_bits);
      work.whole([&](index_type count) { return Kokkos::ThreadVectorRange(member, count); });
    });
  }
};

/// A row a team.
template <class Exec, class Problem>
struct RowPerTeam {
  Problem problem;
  int lane_bits;

  template <class Member>
  KOKKOS_FUNCTION void operator()(const Member& member) const {
    if (member.league_rank() >= problem.geometry.rows) return;
    const RowWork<Exec, Problem> work(problem, member.league_rank(), 0, problem.geometry.columns, lane_bits);
    work.whole([&](index_type count) { return Kokkos::TeamVectorRange(member, count); });
  }
};

template <class Plan>
KOKKOS_FORCEINLINE_FUNCTION constexpr int chunk_lane_bits() {
  static_assert(Plan::threads_of_chunk == 256 || Plan::on_host);
  return Plan::on_host ? 0 : 8;
}

/// A chunk of a row a team, first launch: its (max, sum).
template <class Exec, class Problem>
struct ReduceChunks {
  using State = CompensatedMaxSum<typename Problem::Acc>;
  Problem problem;
  State* partials;
  index_type first_row;
  int rows, chunks;

  template <class Member>
  KOKKOS_FUNCTION void operator()(const Member& member) const {
    using Plan = TeamRowsPlan<Exec>;
    const int row = member.league_rank() / chunks;
    const int chunk = member.league_rank() % chunks;
    if (row >= rows) return;
    const index_type begin = chunk * Plan::chunk_columns;
    const index_type end = Kokkos::min(begin + Plan::chunk_columns, problem.geometry.columns);
    const RowWork<Exec, Problem> work(problem, first_row + row, begin, end, chunk_lane_bits<Plan>());
    const State total =
        work.reduce([&](index_type count) { return Kokkos::TeamVectorRange(member, count); }, false);
    Kokkos::single(Kokkos::PerTeam(member),
                   [&]() { partials[static_cast<index_type>(row) * chunks + chunk] = total; });
  }
};

/// Second launch: joins the row's chunks and writes one of them. Last rows first: they are the ones still in
/// a cache.
template <class Exec, class Problem>
struct WriteChunks {
  using State = CompensatedMaxSum<typename Problem::Acc>;
  Problem problem;
  const State* partials;
  index_type first_row;
  int rows, chunks;

  template <class Member>
  KOKKOS_FUNCTION void operator()(const Member& member) const {
    using Plan = TeamRowsPlan<Exec>;
    const bool one_value = problem.operation == Operation::logsumexp;
    const int task = rows * (one_value ? 1 : chunks) - 1 - member.league_rank();
    if (task < 0) return;
    const int row = one_value ? task : task / chunks;
    const int chunk = one_value ? 0 : task % chunks;
    const State* of_row = partials + static_cast<index_type>(row) * chunks;
    State total;
    Kokkos::parallel_reduce(
        Kokkos::TeamVectorRange(member, chunks), [&](index_type c, State& state) { state.join(of_row[c]); },
        OnlineReducer<typename Problem::Acc>(total));
    const index_type begin = chunk * Plan::chunk_columns;
    const index_type end = Kokkos::min(begin + Plan::chunk_columns, problem.geometry.columns);
    const RowWork<Exec, Problem> work(problem, first_row + row, begin, end, chunk_lane_bits<Plan>());
    work.write([&](index_type count) { return Kokkos::TeamVectorRange(member, count); }, total, false);
  }
};

/// Takes everything, rows of any length: a team (or less) a row.
struct TeamRows {
  static constexpr const char* name = "team_rows";

  template <class Exec, class Problem>
  static constexpr bool supports = true;

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec&, const Problem&) {
    return {};
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    using Plan = TeamRowsPlan<Exec>;
    const RowGeometry& g = problem.geometry;
    const std::string label = kernel_label(problem.operation, name);
    if (Plan::on_host || g.columns <= Plan::longest_of_lane_group) {
      const int bits = Plan::lane_group_bits(g.columns);
      const int rows = static_cast<int>(Plan::rows_of_team(g.columns));
      const auto launch = [&](const auto& functor) {
        launch_teams(exec, label, ceil_div(g.rows, rows), Plan::threads_of_lane_groups >> bits, 1 << bits, 0,
                     functor);
      };
      if (Plan::block == Plan::short_block || g.columns > Plan::longest_of_short_blocks) {
        launch(RowPerLaneGroup<Exec, Problem, Plan::block>{problem, bits, rows});
      } else {
        launch(RowPerLaneGroup<Exec, Problem, Plan::short_block>{problem, bits, rows});
      }
    } else if constexpr (!Plan::on_host) {
      const int threads = Plan::threads(g.columns);
      launch_teams(exec, label, g.rows, threads / 32, 32, 0,
                   RowPerTeam<Exec, Problem>{problem, bits_of_power_of_two(threads)});
    }
  }

  template <class Exec, class Problem>
  static void reserve(const Exec&, const Problem&) {}
};

/// Several teams a row, for rows too long for one.
struct SplitTeamRows {
  static constexpr const char* name = "split_team_rows";

  template <class Exec, class Problem>
  static constexpr bool supports = true;

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec&, const Problem& problem) {
    // By length alone: with the number of rows the bits would change.
    return problem.geometry.columns <= TeamRowsPlan<Exec>::longest_of_one_team
               ? std::string_view("rows of 65536 columns or fewer have a team of their own")
               : std::string_view();
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    using Plan = TeamRowsPlan<Exec>;
    using State = CompensatedMaxSum<typename Problem::Acc>;
    const RowGeometry& g = problem.geometry;
    const int chunks = static_cast<int>(ceil_div(g.columns, Plan::chunk_columns));
    const index_type group = rows_of_group<Exec, Problem>(g);
    auto* partials = static_cast<State*>(ScratchPool<typename Exec::memory_space>::get(
        exec, static_cast<std::size_t>(group * chunks) * sizeof(State)));
    const std::string label = kernel_label(problem.operation, name);
    const int lanes = Plan::on_host ? 1 : 32, threads = Plan::threads_of_chunk / lanes;
    index_type first = 0;
    do {
      const int rows = static_cast<int>(std::min(group, g.rows - first));
      launch_teams(exec, label + "::reduce", static_cast<index_type>(rows) * chunks, threads, lanes, 0,
                   ReduceChunks<Exec, Problem>{problem, partials, first, rows, chunks});
      launch_teams(exec, label + "::write", rows * (problem.operation == Operation::logsumexp ? 1 : chunks),
                   threads, lanes, 0, WriteChunks<Exec, Problem>{problem, partials, first, rows, chunks});
      first += group;
    } while (first < g.rows);
  }

  template <class Exec, class Problem>
  static void reserve(const Exec& exec, const Problem& problem) {
    const index_type chunks = ceil_div(problem.geometry.columns, TeamRowsPlan<Exec>::chunk_columns);
    ScratchPool<typename Exec::memory_space>::reserve(
        exec, static_cast<std::size_t>(rows_of_group<Exec, Problem>(problem.geometry) * chunks) *
                  sizeof(CompensatedMaxSum<typename Problem::Acc>));
  }

 private:
  /// On the host a few rows at a time, so that the second launch finds them in the cache; a device, whose
  /// launches cost more than that saves, takes as many as a launch can number.
  template <class Exec, class Problem>
  static index_type rows_of_group(const RowGeometry& g) {
    using Plan = TeamRowsPlan<Exec>;
    if constexpr (Plan::on_host) {
      constexpr index_type cache_bytes = index_type(4) << 20;
      const index_type row_bytes = g.columns * static_cast<index_type>(sizeof(typename Problem::In));
      return std::min(g.rows, std::max<index_type>(1, cache_bytes / row_bytes));
    } else {
      const index_type chunks = ceil_div(g.columns, Plan::chunk_columns);
      return std::min(g.rows, std::max<index_type>(1, (index_type(1) << 30) / chunks));
    }
  }
};

}  // namespace KokkosSoftmax::impl

#endif
