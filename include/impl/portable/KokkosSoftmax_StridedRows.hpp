// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Portable kernels for an axis that is not contiguous: memory is read in its own order, neighbouring rows to
/// neighbouring lanes, each lane with a row (on the host: vectors across rows).

#ifndef KOKKOSSOFTMAX_STRIDEDROWS_HPP
#define KOKKOSSOFTMAX_STRIDEDROWS_HPP

#include <impl/portable/KokkosSoftmax_TeamRows.hpp>

namespace KokkosSoftmax::impl {

/// How the rows are cut; by length alone.
template <class Exec>
struct StridedRowsPlan {
  static constexpr bool on_host = runs_on_host_v<Exec>;
  /// Rows of a tile: a warp's width on a device; on the host some vectors, a few cache lines of each column.
  static constexpr int tile = on_host ? 64 : 32;
  static constexpr index_type longest_of_one_team = 16384;
  static constexpr index_type chunk_columns = 4096;
  /// Consecutive columns that a lane takes at a time.
  static constexpr int depth = on_host ? 16 : 8;

  /// Threads of a team that share a row's columns.
  static int threads(index_type columns) {
    int n = 1;
    while (!on_host && n < 8 && n * depth * 2 <= columns) n *= 2;
    return n;
  }
  static index_type chunks(index_type columns) {
    return columns <= longest_of_one_team ? 1 : ceil_div(columns, chunk_columns);
  }
};

/// What a launch does: all of it for rows that one team reduces, else one of two halves.
enum class Phase { whole, reduce, write };

/// A tile of rows and a chunk of columns a team, on a device.
template <class Exec, class Problem, Phase phase>
struct StridedTile {
  using Acc = typename Problem::Acc;
  using Out = typename Problem::Out;
  using State = CompensatedMaxSum<Acc>;
  using Plan = StridedRowsPlan<Exec>;
  static constexpr int tile = Plan::tile;
  static constexpr int depth = Plan::depth;

  Problem problem;
  State* partials;  ///< [chunk][row], so that neighbouring lanes store neighbouring states
  index_type chunks;

  KOKKOS_FUNCTION static std::size_t team_scratch(int threads) {
    return sizeof(State) * tile * static_cast<std::size_t>(threads);
  }

  template <class Member>
  KOKKOS_FUNCTION void operator()(const Member& member) const {
    // Tiles that are neighbours at the same time: they share lines of memory. (One H100, fraction of a copy,
    // chunks of a tile one after the other, and so: float 4096 x 65536 0.60 and 0.62, 4095 0.32 and 0.36,
    // bfloat16 8192 x 65536 0.45 and 0.48, 8191 0.24 and 0.33.)
    const index_type rows = problem.geometry.rows;
    if (rows == 0) return;
    const index_type tiles = ceil_div(rows, tile), chunk = member.league_rank() / tiles;
    if (chunk >= chunks) return;
    const index_type first_row = (member.league_rank() - chunk * tiles) * tile;
    const index_type columns = problem.geometry.columns;
    const index_type begin = phase == Phase::whole ? 0 : chunk * Plan::chunk_columns;
    const index_type end =
        phase == Phase::whole ? columns : Kokkos::min(begin + Plan::chunk_columns, columns);
    const int threads = member.team_size();
    State* shared =
        static_cast<State*>(member.team_shmem().get_shmem_aligned(team_scratch(threads), alignof(State)));

    if constexpr (phase != Phase::write) {
      each_lane(member, [&](int thread, int lane) {
        State total;
        if (first_row + lane < rows) {
          const RowAccess<Problem> row(problem, first_row + lane);
          for (index_type block = begin + thread * depth; block < end; block += threads * depth) {
            reduce_lane_block<depth>(row, block, 1, end, total);
          }
        }
        shared[thread * tile + lane] = total;
      });
    } else {
      each_lane(member, [&](int thread, int lane) {
        State total;
        if (first_row + lane < rows) {
          for (index_type c = thread; c < chunks; c += threads)
            total.join(partials[c * rows + first_row + lane]);
        }
        shared[thread * tile + lane] = total;
      });
    }
    member.team_barrier();
    for (int distance = threads / 2; distance > 0; distance /= 2) {
      each_lane(member, [&](int thread, int lane) {
        if (thread < distance) shared[thread * tile + lane].join(shared[(thread + distance) * tile + lane]);
      });
      member.team_barrier();
    }
    each_lane(member, [&](int thread, int lane) {
      if (first_row + lane >= rows) return;
      if constexpr (phase == Phase::reduce) {
        if (thread == 0) partials[chunk * rows + first_row + lane] = shared[lane];
      } else {
        const RowAccess<Problem> row(problem, first_row + lane);
        const RowResult<Acc> result(problem.operation, shared[lane].rounded());
        if (problem.operation == Operation::logsumexp) {
          if (thread == 0 && chunk == 0) *row.y = store_as<Out>(result.logsumexp());
          return;
        }
        for (index_type block = begin + thread * depth; block < end; block += threads * depth) {
          write_lane_block<depth>(row, block, 1, end, result);
        }
      }
    });
  }

 private:
  template <class Member, class Body>
  KOKKOS_FORCEINLINE_FUNCTION static void each_lane(const Member& member, const Body& body) {
    Kokkos::parallel_for(Kokkos::TeamThreadRange(member, member.team_size()), [&](int thread) {
      Kokkos::parallel_for(Kokkos::ThreadVectorRange(member, tile), [&](int lane) { body(thread, lane); });
    });
  }
};

/// The same on the host: a tile's rows side by side in small arrays, in loops that the compiler vectorises.
template <class Exec, class Problem, Phase phase>
requires runs_on_host_v<Exec>
struct StridedTile<Exec, Problem, phase> {
  using Acc = typename Problem::Acc;
  using Out = typename Problem::Out;
  using In = typename Problem::In;
  using State = CompensatedMaxSum<Acc>;
  using Plan = StridedRowsPlan<Exec>;
  static constexpr int tile = Plan::tile;
  static constexpr int depth = Plan::depth;

  Problem problem;
  State* partials;
  index_type chunks;

  KOKKOS_FUNCTION static std::size_t team_scratch(int) { return 0; }

  template <class Member>
  KOKKOS_FUNCTION void operator()(const Member& member) const {
    const index_type first_row = member.league_rank() / chunks * tile;
    if (first_row >= problem.geometry.rows) return;
    const index_type chunk = member.league_rank() % chunks;
    const index_type columns = problem.geometry.columns;
    const index_type begin = phase == Phase::whole ? 0 : chunk * Plan::chunk_columns;
    const index_type end =
        phase == Phase::whole ? columns : Kokkos::min(begin + Plan::chunk_columns, columns);
    Tile rows(problem, first_row);
    alignas(64) Acc max[tile], sum[tile], low[tile];
    for (int l = 0; l < tile; ++l) {
      max[l] = -largest_v<Acc>;
      sum[l] = 0;
      low[l] = 0;
    }
    if constexpr (phase == Phase::write) {
      const index_type all = problem.geometry.rows;
      for (int l = 0; l < rows.count; ++l) {
        State total;
        for (index_type c = 0; c < chunks; ++c) total.join(partials[c * all + rows.first + l]);
        max[l] = total.max;
        sum[l] = total.sum;
        low[l] = total.low;
      }
    } else {
      for (index_type first = begin; first < end; first += depth) rows.reduce(first, end, max, sum, low);
    }
    if constexpr (phase == Phase::reduce) {
      for (int l = 0; l < rows.count; ++l) {
        partials[chunk * problem.geometry.rows + rows.first + l] = State{max[l], sum[l], low[l]};
      }
    } else {
      alignas(64) Acc factor[tile], log_sum[tile];
      for (int l = 0; l < tile; ++l) {
        const RowResult<Acc> result(problem.operation, State{max[l], sum[l], low[l]}.rounded());
        factor[l] = result.factor;
        log_sum[l] = result.log_sum;
        if (problem.operation == Operation::logsumexp && chunk == 0 && l < rows.count) {
          problem.y[rows.y_offset[l]] = store_as<Out>(result.logsumexp());
        }
      }
      if (problem.operation == Operation::logsumexp) return;
      for (index_type column = begin; column < end; ++column) rows.write(column, max, factor, log_sum);
    }
  }

 private:
  struct Tile {
    const Problem& problem;
    index_type first;
    int count;
    bool x_adjacent = true, y_adjacent = true;
    index_type x_offset[tile], y_offset[tile];
    typename Problem::Transform::Row transform[tile];

    KOKKOS_FUNCTION Tile(const Problem& p, index_type first_)
        : problem(p),
          first(first_),
          count(static_cast<int>(Kokkos::min<index_type>(tile, p.geometry.rows - first_))) {
      for (int l = 0; l < tile; ++l) {
        // A tile past the last row repeats it: whole vectors, and what is not stored does no harm.
        const RowGeometry::Row row = p.geometry.row(first + (l < count ? l : count - 1));
        x_offset[l] = row.x_offset;
        y_offset[l] = row.y_offset;
        transform[l] = p.transform.at_row(row.index);
        x_adjacent = x_adjacent && x_offset[l] == x_offset[0] + l;
        y_adjacent = y_adjacent && y_offset[l] == y_offset[0] + l;
      }
    }

    KOKKOS_FORCEINLINE_FUNCTION void load(index_type column, Acc* v) const {
      const In* x = problem.x + column * problem.geometry.x_column_stride;
      if (x_adjacent) {
        const In* start = x + x_offset[0];
        for (int l = 0; l < tile; ++l) v[l] = transformed<Acc>(transform[l], load_as<Acc>(start[l]), column);
      } else {
        for (int l = 0; l < tile; ++l)
          v[l] = transformed<Acc>(transform[l], load_as<Acc>(x[x_offset[l]]), column);
      }
    }

    KOKKOS_FUNCTION void reduce(index_type first_column, index_type end, Acc* max, Acc* sum, Acc* low) const {
      alignas(64) Acc v[depth][tile];
      alignas(64) Acc new_max[tile];
      const int columns = static_cast<int>(Kokkos::min<index_type>(depth, end - first_column));
      for (int l = 0; l < tile; ++l) new_max[l] = max[l];
      for (int i = 0; i < columns; ++i) {
        load(first_column + i, v[i]);
        for (int l = 0; l < tile; ++l) new_max[l] = v[i][l] > new_max[l] ? v[i][l] : new_max[l];
      }
      for (int l = 0; l < tile; ++l) {
        new_max[l] = new_max[l] > largest_v<Acc> ? largest_v<Acc> : new_max[l];
        const Acc rescale = exp_by_polynomial(max[l] - new_max[l]);
        sum[l] *= rescale;
        low[l] *= rescale;
        max[l] = new_max[l];
      }
      for (int i = 0; i < columns; ++i) {
        for (int l = 0; l < tile; ++l) {
          State state{max[l], sum[l], low[l]};
          state.add(exp_by_polynomial(v[i][l] - new_max[l]));
          sum[l] = state.sum;
          low[l] = state.low;
        }
      }
    }

    KOKKOS_FUNCTION void write(index_type column, const Acc* max, const Acc* factor,
                               const Acc* log_sum) const {
      alignas(64) Acc v[tile];
      load(column, v);
      if (problem.operation == Operation::softmax) {
        for (int l = 0; l < tile; ++l) v[l] = exp_by_polynomial(v[l] - max[l]) * factor[l];
      } else {
        for (int l = 0; l < tile; ++l) v[l] = (v[l] - max[l]) - log_sum[l];
      }
      Out* y = problem.y + column * problem.geometry.y_column_stride;
      if (y_adjacent && count == tile) {
        Out* start = y + y_offset[0];
        for (int l = 0; l < tile; ++l) start[l] = store_as<Out>(v[l]);
      } else {
        for (int l = 0; l < count; ++l) y[y_offset[l]] = store_as<Out>(v[l]);
      }
    }
  };
};

struct StridedRows {
  static constexpr const char* name = "strided_rows";

  template <class Exec, class Problem>
  static constexpr bool supports = true;

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec&, const Problem& problem) {
    return problem.axis_is_strided ? std::string_view()
                                   : std::string_view("the axis is the fastest dimension in memory");
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    using Plan = StridedRowsPlan<Exec>;
    using State = CompensatedMaxSum<typename Problem::Acc>;
    const RowGeometry& g = problem.geometry;
    const std::string label = kernel_label(problem.operation, name);
    const index_type chunks = Plan::chunks(g.columns), tiles = ceil_div(g.rows, Plan::tile);
    const int threads = Plan::threads(std::min(g.columns, Plan::chunk_columns));
    if (chunks == 1) {
      launch<Phase::whole>(exec, label, tiles, threads, problem, static_cast<State*>(nullptr), chunks);
      return;
    }
    auto* partials = static_cast<State*>(
        ScratchPool<typename Exec::memory_space>::get(exec, scratch_bytes<Exec>(problem)));
    launch<Phase::reduce>(exec, label + "::reduce", tiles * chunks, threads, problem, partials, chunks);
    launch<Phase::write>(exec, label + "::write", tiles * chunks, threads, problem, partials, chunks);
  }

  template <class Exec, class Problem>
  static void reserve(const Exec& exec, const Problem& problem) {
    if (StridedRowsPlan<Exec>::chunks(problem.geometry.columns) > 1) {
      ScratchPool<typename Exec::memory_space>::reserve(exec, scratch_bytes<Exec>(problem));
    }
  }

 private:
  template <class Exec, class Problem>
  static std::size_t scratch_bytes(const Problem& problem) {
    const RowGeometry& g = problem.geometry;
    return static_cast<std::size_t>(g.rows * StridedRowsPlan<Exec>::chunks(g.columns)) *
           sizeof(CompensatedMaxSum<typename Problem::Acc>);
  }

  template <Phase phase, class Exec, class Problem, class State>
  static void launch(const Exec& exec, const std::string& label, index_type league, int threads,
                     const Problem& problem, State* partials, index_type chunks) {
    using Tile = StridedTile<Exec, Problem, phase>;
    launch_teams(exec, label, league, threads, runs_on_host_v<Exec> ? 1 : Tile::tile,
                 Tile::team_scratch(threads), Tile{problem, partials, chunks});
  }
};

}  // namespace KokkosSoftmax::impl

#endif
