// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Softmax on the host's SIMD vectors, for OpenMP, Threads and Serial.
///
/// A row is cut into chunks by its length and type alone. A chunk gives its maximum, its exponentials to that
/// maximum and their sum; the row joins the chunks' sums in order, and an output is exponential * factor of
/// its chunk. Whether the exponentials of a chunk wait in a cache for that factor or are computed once more,
/// which thread has which chunk, and whether stores go past the caches is a matter of speed that moves no
/// bits (KokkosSoftmax_SimdChunk.hpp, KokkosSoftmax_SimdRowWork.hpp). Where the axis is not contiguous,
/// vectors run across neighbouring rows (KokkosSoftmax_SimdTile.hpp; many of them:
/// KokkosSoftmax_SimdPipelinedTile.hpp), or along the array that they are
/// together (KokkosSoftmax_SimdPanel.hpp; few of them: KokkosSoftmax_SimdDense.hpp), or else across blocks of
/// few (KokkosSoftmax_SimdRuns.hpp); those kernels see all transforms as one type
/// (KokkosSoftmax_SimdTransform.hpp). This file decides who does what, and launches it.

#ifndef KOKKOSSOFTMAX_SIMDROWS_HPP
#define KOKKOSSOFTMAX_SIMDROWS_HPP

#include <impl/host/KokkosSoftmax_Cpu.hpp>
#include <impl/host/KokkosSoftmax_SharedSteps.hpp>
#include <impl/host/KokkosSoftmax_SimdDense.hpp>
#include <impl/host/KokkosSoftmax_SimdPanel.hpp>
#include <impl/host/KokkosSoftmax_SimdPipelinedTile.hpp>
#include <impl/host/KokkosSoftmax_SimdRowWork.hpp>
#include <impl/host/KokkosSoftmax_SimdRuns.hpp>
#include <impl/host/KokkosSoftmax_SimdShort.hpp>
#include <impl/host/KokkosSoftmax_SimdTransform.hpp>
#include <impl/host/KokkosSoftmax_SimdTranspose.hpp>
#include <impl/KokkosSoftmax_AnyFunctor.hpp>
#include <impl/KokkosSoftmax_Scratch.hpp>

#include <impl/Kokkos_Profiling.hpp>

#include <cstdio>
#include <optional>
#include <tuple>

#if defined(__linux__)
#include <unistd.h>
#endif

namespace KokkosSoftmax::impl {

/// What does not: sizes of caches. Bytes unless said.
struct HostCaches {
  /// Exponentials that a thread keeps in its share of the second level until the sum of the row is known;
  /// twice as much where one row's are written while the next one's are computed.
  static constexpr std::size_t stage = std::size_t(256) << 10;
  /// Those of longer rows wait in the thread's share of the cache that all threads share: to read them there
  /// costs less than to compute them once more.
  static std::size_t longest_stage(int threads) {
    return std::max(2 * stage, std::min(shared() / (4 * static_cast<std::size_t>(threads)), most_stage));
  }
  static constexpr std::size_t most_stage = std::size_t(8) << 20;
  /// Below this many elements a second thread costs more than it saves (a parallel region takes 1 to 3 us).
  static constexpr index_type elements_of_one_thread = 12288;

  /// The cache that all threads share.
  static std::size_t shared() { return sizes().shared; }

  /// Of what is read and written together: past it y goes to memory without a way through the caches.
  static std::size_t streams_beyond() { return sizes().streams_beyond; }

  struct Sizes {
    std::size_t shared, streams_beyond;
  };

  /// From what the system says. (`cores` is 0 where it says nothing.)
  static constexpr Sizes of_told(std::size_t told, std::size_t cores) {
    constexpr std::size_t mega = 1024 * 1024;
    // A virtual machine of some of a processor's cores is told the size of the whole, of which other machines
    // have their part: more than there is for one core, or for a group of AMD's.
    constexpr std::size_t most_of_core = 16 * mega, most_of_group = 96 * mega;
    if (cores == 0) return {told, told};
    const std::size_t shared = std::min(told, cores * most_of_core);
    // Processors that large have two to five megabytes for each core, the second level with it.
    constexpr std::size_t usual_of_core = 3 * mega;
    const bool is_of_whole = told > cores * most_of_core || told > most_of_group;
    return {shared, is_of_whole ? std::min(shared, cores * usual_of_core) : shared};
  }

 private:
  static const Sizes& sizes() {
    static const Sizes of_machine = [] {
      constexpr std::size_t mega = 1024 * 1024;
      long told = 0, cores = 0;
#if defined(__linux__) && defined(_SC_LEVEL3_CACHE_SIZE)
      told = sysconf(_SC_LEVEL3_CACHE_SIZE);
      // Some glibc (2.36 for one) add up all those of an AMD package; Linux says what this core shares.
      if (std::FILE* file = std::fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r")) {
        long kilobytes = 0;
        if (std::fscanf(file, "%ldK", &kilobytes) == 1 && kilobytes > 0 &&
            (told <= 0 || kilobytes < told / 1024))
          told = kilobytes * 1024;
        std::fclose(file);
      }
      cores = sysconf(_SC_NPROCESSORS_ONLN);
#endif
      return of_told(told > 0 ? static_cast<std::size_t>(told) : 16 * mega,
                     cores > 0 ? static_cast<std::size_t>(cores) : 0);
    }();
    return of_machine;
  }
};

// ---------------------------------------------------------------------------------------------------------
// Launches.

/// begin of a thread's share of `count` things.
inline index_type share(index_type count, int part, int parts) {
  return count / parts * part + std::min<index_type>(part, count % parts);
}

/// After streaming stores: other threads are to see them.
KOKKOSSOFTMAX_HOST_FUNCTION void finish_streaming(bool stream) {
#if defined(__AVX2__)
  if (stream) _mm_sfence();
#else
  (void)stream;
#endif
}

using AnyTasks = AnyFunctor<int>;

/// Runs functor(task) for each task, a thread a task; a single one on the calling thread, which wakes no
/// other (launches on a host's instance have ended when they return, so the order on it is kept).
template <class Exec>
void launch_any_tasks(const Exec& exec, const std::string& label, int tasks, const AnyTasks& functor) {
  if (tasks > 1) {
    Kokkos::RangePolicy<Exec> policy(exec, 0, tasks);
    policy.set_chunk_size(1);
    Kokkos::parallel_for(label, policy, functor);
    return;
  }
  std::uint64_t id = 0;
  const bool watched = Kokkos::Tools::profileLibraryLoaded();
  if (watched) Kokkos::Tools::beginParallelFor(label, Kokkos::Tools::Experimental::device_id(exec), &id);
  functor(0);
  if (watched) Kokkos::Tools::endParallelFor(id);
}
template <class Exec, class Functor>
void launch_tasks(const Exec& exec, const std::string& label, int tasks, const Functor& functor) {
  launch_any_tasks(exec, label, tasks, AnyTasks::of(functor));
}
/// The steps step(share), one after the other, each for as many shares as tasks.
template <class Exec, class... Step>
void launch_steps(const Exec& exec, const std::string& label, int tasks, const Step&... step) {
  SharedSteps<sizeof...(Step)> steps(tasks);
  launch_tasks(exec, label, tasks, [&](int task) { steps.run(task, step...); });
}

template <class Exec, class Problem>
void run_transformed_in_lanes(const Exec& exec, const Problem& problem);
template <class Exec, class Problem>
void run_transformed_along_rows(const Exec& exec, const Problem& problem);

struct SimdRows {
  static constexpr const char* name = "simd_rows";

  template <class Exec, class Problem>
  static constexpr bool supports = runs_on_host_v<Exec>;

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec&, const Problem&) {
    return {};
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    if (problem.geometry.rows == 0) return;
    const bool in_lanes = problem.axis_is_strided || ShortRows::has(problem);
    if constexpr (std::is_same_v<typename Problem::Transform, BoundIdentity>) {
      in_lanes ? run_in_lanes(exec, problem) : run_along_rows(exec, problem);
    } else {
      constexpr bool drops_ends = knows_end_of_kept<typename Problem::Transform::Row>;
      in_lanes ? run_transformed_in_lanes(exec, with_simd_transform<false>(problem))
               : run_transformed_along_rows(exec, with_simd_transform<drops_ends>(problem));
    }
  }

  /// Where lanes are rows.
  template <class Exec, class Problem>
  static void run_in_lanes(const Exec& exec, const Problem& problem) {
    for_operation(problem.operation,
                  [&](auto operation) { run_operation_in_lanes<operation()>(exec, problem); });
  }
  /// Where lanes are columns.
  template <class Exec, class Problem>
  static void run_along_rows(const Exec& exec, const Problem& problem) {
    for_operation(problem.operation,
                  [&](auto operation) { run_operation_along_rows<operation()>(exec, problem); });
  }

  template <class Exec, class Problem>
  static void reserve(const Exec& exec, const Problem& problem) {
    const std::size_t bytes = Scratch<Problem>(problem, exec.concurrency()).bytes;
    if (bytes > 0) ScratchPool<typename Exec::memory_space>::reserve(exec, bytes);
  }

 private:
  template <class Problem>
  using Acc = typename Problem::Acc;
  template <class Problem>
  using State = CompensatedMaxSum<typename Problem::Acc>;

  /// Maxima, and sums, of blocks of panels that are shared: of panels that fit the cache.
  template <class A>
  static index_type states_of_shared_panels() {
    return static_cast<index_type>(HostCaches::shared() / (SimdTilePlan<A>::block * sizeof(A)));
  }

  /// What a call needs: no less for longer rows or more of them.
  template <class Problem>
  struct Scratch {
    std::size_t stage = 0;   ///< bytes of a thread
    std::size_t states = 0;  ///< bytes, of all threads
    std::size_t bytes = 0;

    Scratch(const Problem& problem, int threads) {
      const RowGeometry& g = problem.geometry;
      using A = typename Problem::Acc;
      if (problem.axis_is_strided) {
        static_assert(HostCaches::most_stage <= SimdTilePlan<A>::room_of_long_rows,
                      "a tile of long rows fills what waits, and has to find as much");
        stage = SimdTilePlan<A>::scratch_bytes(g.columns, HostCaches::longest_stage(threads)) + 256;
        if (Transposed::columns(problem)) stage += bytes_of_transposed;
        const index_type chunks = SimdTilePlan<A>::chunks(g.columns);
        // [max, sum] of each lane; a tile has places for fewer than twice its rows, but for the last one.
        if (chunks > 1) {
          states =
              static_cast<std::size_t>(chunks * (2 * g.rows + SimdTilePlan<A>::most_lanes)) * 2 * sizeof(A);
        }
        const index_type of_panels =
            std::min(g.rows * (SimdTilePlan<A>::blocks(g.columns) + 1), states_of_shared_panels<A>()) +
            SimdTilePlan<A>::width;
        states = std::max(states, static_cast<std::size_t>(of_panels) * 2 * sizeof(A));
      } else if (g.columns > SimdRowsPlan<A>::chunk) {
        const std::size_t row = static_cast<std::size_t>(g.columns) * sizeof(A);
        stage = std::min(std::max(2 * HostCaches::stage, row), HostCaches::longest_stage(threads)) + 256;
        states = static_cast<std::size_t>(4 * threads * SimdRowsPlan<A>::chunks(g.columns)) *
                 sizeof(State<Problem>);
      }
      if (Transposed::may_be_rows(problem)) {
        stage = std::max(stage, bytes_of_transposed + 256);
        if (g.columns > SimdRowsPlan<A>::chunk) {
          // Of the rows of a group, or of a tile of whole lines.
          constexpr auto line = static_cast<std::size_t>(TransposedRows<Problem>::line);
          const std::size_t of_group =
              HostCaches::shared() / (SimdRowsPlan<A>::chunk * sizeof(typename Problem::In));
          const std::size_t of_tile = line * static_cast<std::size_t>(SimdRowsPlan<A>::chunks(g.columns));
          states = std::max(states, (of_group + of_tile) * sizeof(State<Problem>));
        }
      }
      bytes = static_cast<std::size_t>(threads) * stage + states;
    }
  };

  template <class Problem>
  static bool is_direct(const Problem& problem) {
    const RowGeometry& g = problem.geometry;
    return std::is_same_v<typename Problem::Transform, BoundIdentity> && g.x_column_stride == 1 &&
           (problem.operation == Operation::logsumexp || g.y_column_stride == 1);
  }

  template <class Run>
  static void for_operation(Operation operation, const Run& run) {
    switch (operation) {
      case Operation::softmax:
        return run(std::integral_constant<Operation, Operation::softmax>());
      case Operation::log_softmax:
        return run(std::integral_constant<Operation, Operation::log_softmax>());
      case Operation::logsumexp:
        return run(std::integral_constant<Operation, Operation::logsumexp>());
    }
  }

  template <Operation operation, class Exec, class Problem>
  static void run_operation_along_rows(const Exec& exec, const Problem& problem) {
    constexpr bool identity = std::is_same_v<typename Problem::Transform, BoundIdentity>;
    if constexpr (operation != Operation::logsumexp) {
      if (Transposed::rows(problem)) return run_transposed_rows<operation, identity>(exec, problem);
    }
    if constexpr (identity) {
      if (is_direct(problem)) return run_rows<operation, true>(exec, problem);
    }
    run_rows<operation, false>(exec, problem);
  }

  template <Operation operation, class Exec, class Problem>
  static void run_operation_in_lanes(const Exec& exec, const Problem& problem) {
    if (!ShortRows::has(problem)) return run_tiles<operation>(exec, problem);
    const Call<Problem> call(exec, problem);
    const int tasks = call.tasks(problem.geometry.rows);
    launch_tasks(exec, call.label, tasks, Short<operation, Problem>{call, tasks});
  }

  template <class Problem>
  struct Call {
    Problem problem;
    std::string label;
    int threads;
    std::size_t moved;  ///< bytes that are read and written
    bool stream, from_memory;
    Scratch<Problem> scratch;
    char* stages;
    State<Problem>* states;

    template <class Exec>
    Call(const Exec& exec, const Problem& p)
        : problem(p),
          label(kernel_label(p.operation, name)),
          threads(exec.concurrency()),
          scratch(p, threads) {
      const RowGeometry& g = p.geometry;
      const std::size_t elements = static_cast<std::size_t>(g.rows) * static_cast<std::size_t>(g.columns);
      const std::size_t read = elements * sizeof(typename Problem::In);
      const std::size_t written =
          p.operation == Operation::logsumexp ? 0 : elements * sizeof(typename Problem::Out);
      moved = read + written;
      from_memory = moved > HostCaches::streams_beyond();
      stream = written > 0 && from_memory;
      stages = static_cast<char*>(
          scratch.bytes > 0 ? ScratchPool<typename Exec::memory_space>::get(exec, scratch.bytes) : nullptr);
      states = reinterpret_cast<State<Problem>*>(stages + static_cast<std::size_t>(threads) * scratch.stage);
    }

    /// Threads that are worth waking for `units` independent pieces of work.
    int tasks(index_type units) const {
      const RowGeometry& g = problem.geometry;
      if (g.rows * g.columns <= HostCaches::elements_of_one_thread) return 1;
      return static_cast<int>(std::min<index_type>(std::min(threads, SharedSteps<1>::most_shares), units));
    }
    /// Whether so many exponentials of a thread can wait.
    bool can_stage(index_type values) const {
      return static_cast<std::size_t>(values) * sizeof(typename Problem::Acc) + 256 <= scratch.stage;
    }
    /// Scratch of a thread, aligned to cache lines.
    typename Problem::Acc* stage(int task) const {
      const auto address =
          reinterpret_cast<std::uintptr_t>(stages) + static_cast<std::size_t>(task) * scratch.stage;
      return reinterpret_cast<typename Problem::Acc*>((address + 63) / 64 * 64);
    }
  };

  // Functors hold what a launch shares by reference: on the host a launch has ended when it returns.

  template <Operation operation, bool direct, class Problem>
  struct WholeRows {
    const Call<Problem>& call;
    int tasks;
    void operator()(int task) const {
      using Work = SimdRowWork<Problem, operation, direct>;
      const Work work(call.problem, call.stream, call.from_memory);
      const index_type rows = call.problem.geometry.rows;
      // Where the rows that come later end later, too, a thread has as many of the first as of the last.
      const int turns = Work::rows_end_early
                            ? static_cast<int>(std::clamp<index_type>(rows / tasks, 1, turns_of_unlike_rows))
                            : 1;
      for (int turn = 0; turn < turns; ++turn) {
        const int part = turn * tasks + (turn % 2 == 0 ? task : tasks - 1 - task), parts = turns * tasks;
        run_rows(work, share(rows, part, parts), share(rows, part + 1, parts), task);
      }
      finish_streaming(call.stream);
    }

   private:
    /// Also for causal masks of a few matrices, or of more queries than columns.
    static constexpr int turns_of_unlike_rows = 8;

    template <class Work>
    void run_rows(const Work& work, index_type begin, index_type end, int task) const {
      using A = Acc<Problem>;
      const index_type columns = call.problem.geometry.columns, chunks = SimdRowsPlan<A>::chunks(columns);
      if (chunks == 1) {
        work.short_rows(begin, end);
      } else {
        constexpr auto half = static_cast<index_type>(HostCaches::stage / sizeof(A));
        A* stage = call.stage(task);
        A* other = !direct && columns <= half ? stage + half : stage;
        State<Problem>* states = call.states + 2 * task * chunks;
        work.long_rows(begin, end, {{stage, other}, {states, states + chunks}, call.can_stage(columns)});
      }
    }
  };

  /// Rows of a few columns.
  template <Operation operation, class Problem>
  struct Short {
    const Call<Problem>& call;
    int tasks;
    void operator()(int task) const {
      const index_type rows = call.problem.geometry.rows;
      SimdShort<Problem, operation>(call.problem, call.stream, call.from_memory)
          .rows(share(rows, task, tasks), share(rows, task + 1, tasks));
      finish_streaming(call.stream);
    }
  };

  /// Chunks of a few rows, shared by all threads; a share has the same ones in both steps.
  template <Operation operation, bool direct, class Problem>
  struct SharedRows {
    using A = typename Problem::Acc;
    using Work = SimdRowWork<Problem, operation, direct>;
    const Call<Problem>& call;
    int tasks;
    index_type first_row, rows;
    bool write, keep_in_y;
    bool may_stage = true;  ///< whether the second step takes exponentials from scratch

    void operator()(int task) const {
      const RowGeometry& g = call.problem.geometry;
      const Work work(call.problem, call.stream && !keep_in_y, call.from_memory);
      const index_type chunks = SimdRowsPlan<A>::chunks(g.columns);
      const index_type begin = share(rows * chunks, task, tasks), end = share(rows * chunks, task + 1, tasks);
      constexpr index_type chunk = SimdRowsPlan<A>::chunk;
      const bool staged = may_stage && !keep_in_y && call.can_stage((end - begin) * chunk);
      const auto stage_of = [&](index_type unit) {
        return call.stage(task) + (staged ? (unit - begin) * chunk : 0);
      };
      std::optional<typename Work::Lines> lines;
      for (index_type unit = begin; unit < end;) {
        const index_type r = unit / chunks;
        const SimdRowAccess<Problem> row(call.problem, first_row + r);
        State<Problem>* states = call.states + r * chunks;
        A* kept = nullptr;
        if constexpr (Work::y_can_keep_exponentials) kept = keep_in_y ? row.y : nullptr;
        if (write) {
          const RowResult<A> result = work.joined(states);
          for (; unit < end && unit < (r + 1) * chunks; ++unit) {
            const index_type c = unit - r * chunks;
            work.write_chunk(row, c, states[c], result, stage_of(unit), staged, kept, lines);
          }
        } else {
          const index_type last = std::min(end, (r + 1) * chunks);
          const auto stage_of_chunk = [&](index_type c) { return stage_of(r * chunks + c); };
          work.reduce_chunks(row, unit - r * chunks, last - r * chunks, stage_of_chunk, staged, kept, states);
          unit = last;
        }
      }
      if (lines) lines->finish();
      finish_streaming(call.stream);
    }
  };

  template <Operation operation, bool direct, class Exec, class Problem>
  static void run_rows(const Exec& exec, const Problem& problem) {
    using A = Acc<Problem>;
    const Call<Problem> call(exec, problem);
    const RowGeometry& g = problem.geometry;
    const index_type chunks = SimdRowsPlan<A>::chunks(g.columns);
    if (chunks == 1 || g.rows >= 4 * call.threads || call.threads == 1) {
      const int tasks = call.tasks(g.rows);
      launch_tasks(exec, call.label, tasks, WholeRows<operation, direct, Problem>{call, tasks});
      return;
    }
    const std::size_t row_bytes =
        static_cast<std::size_t>(g.columns) * (sizeof(typename Problem::In) + sizeof(typename Problem::Out));
    const bool in_cache = static_cast<std::size_t>(g.rows) * row_bytes <= HostCaches::shared() / 2;
    const bool keep_in_y = operation == Operation::softmax && in_cache &&
                           SimdRowWork<Problem, operation, direct>::y_can_keep_exponentials;
    // Of rows beyond the cache as many at a time as it holds.
    const index_type group =
        in_cache ? g.rows
                 : std::max<index_type>(1, static_cast<index_type>(HostCaches::shared() / 2 / row_bytes));
    for (index_type first = 0; first < g.rows; first += group) {
      const index_type rows = std::min(group, g.rows - first);
      const int tasks = call.tasks(rows * chunks);
      const SharedRows<operation, direct, Problem> reduce{call, tasks, first, rows, false, keep_in_y};
      if constexpr (operation == Operation::logsumexp) {
        launch_steps(exec, call.label, tasks, reduce, WriteLogsumexp<Problem>{call, tasks, first, rows});
      } else {
        auto write = reduce;
        write.write = true;
        launch_steps(exec, call.label, tasks, reduce, write);
      }
    }
  }

  /// Whole rows in tiles whose outputs wait to be transposed.
  template <Operation operation, bool direct, class Problem>
  struct WholeTransposedRows {
    const Call<Problem>& call;
    const TransposedRows<Problem>& rows;
    int tasks;
    void operator()(int task) const {
      auto* const waiting = reinterpret_cast<typename Problem::Out*>(call.stage(task));
      typename TransposedRows<Problem>::Staged staged(rows);
      for (index_type t = share(rows.count(), task, tasks); t < share(rows.count(), task + 1, tasks); ++t) {
        const auto tile = rows.tile(t);
        SimdRowWork<Problem, operation, direct>(staged.problem(tile, waiting), false, call.from_memory)
            .short_rows(tile.first, tile.first + tile.rows);
        rows.write(waiting, tile, call.stream);
      }
      finish_streaming(call.stream);
    }
  };

  /// Of rows of several chunks that were reduced: tiles from the logits, read once more.
  template <Operation operation, bool direct, class Problem>
  struct WriteTransposedRows {
    using A = typename Problem::Acc;
    using Ops = SimdOps<A>;
    using Vector = typename Ops::Vector;
    using Rows = TransposedRows<Problem>;
    const Call<Problem>& call;
    const Rows& rows;
    int tasks;
    index_type first_tile, tiles;

    void operator()(int task) const {
      constexpr index_type chunk = SimdRowsPlan<A>::chunk, most = Rows::most_of_long + Ops::width;
      const index_type columns = call.problem.geometry.columns, chunks = SimdRowsPlan<A>::chunks(columns);
      const index_type pieces = ceil_div(columns, Rows::piece), first_row = rows.tile(first_tile).first;
      const index_type begin = share(tiles * pieces, task, tasks),
                       end = share(tiles * pieces, task + 1, tasks);
      const SimdRowWork<Problem, operation, direct> work(call.problem, false, call.from_memory);
      RowResult<A> results[most];
      alignas(64) A max[most] = {}, factor[most] = {};
      const A* from[most];
      const auto formula = [&](const Vector& v, index_type r) __attribute__((always_inline)) {
        const Vector difference = v - Ops::load(max + r);
        if constexpr (operation == Operation::softmax) {
          return exp_of_vector_difference<Ops>(difference) * Ops::load(factor + r);
        } else {
          return difference - Ops::load(factor + r);
        }
      };
      for (index_type unit = begin; unit < end;) {
        const index_type t = unit / pieces;
        const auto tile = rows.tile(first_tile + t);
        const State<Problem>* const states = call.states + (tile.first - first_row) * chunks;
        for (index_type r = 0; r < tile.rows; ++r) results[r] = work.joined(states + r * chunks);
        if (tile.rows < Transposed::fewest_of_long) {
          for (; unit < end && unit < (t + 1) * pieces; ++unit)
            write_row_by_row(work, tile, states, results, (unit - t * pieces) * Rows::piece,
                             call.stage(task));
          continue;
        }
        for (index_type of_chunk = -1; unit < end && unit < (t + 1) * pieces; ++unit) {
          const index_type first = (unit - t * pieces) * Rows::piece, c = first / chunk;
          const index_type count = std::min(Rows::piece, columns - first);
          A* logits = call.stage(task);
          for (index_type r = 0; r < tile.rows; ++r) {
            if (c != of_chunk)
              std::tie(max[r], factor[r]) = work.numbers_of_chunk(states[r * chunks + c], results[r]);
            const SimdRowAccess<Problem> row(call.problem, tile.first + r);
            if constexpr (direct && std::is_same_v<typename Problem::In, A>) {
              from[r] = row.x + first;
            } else {
              logits += Rows::pitch_of_piece;
              work.load_logits(row, first, count, logits);
              from[r] = logits;
            }
          }
          of_chunk = c;
          for (index_type r = tile.rows; r % Ops::width != 0; ++r) from[r] = from[r - 1];
          const index_type distance = call.problem.geometry.y_column_stride;
          write_transposed_values(from, tile.rows, count, tile.y + first * distance, distance, call.stream,
                                  formula);
        }
      }
      finish_streaming(call.stream);
    }

   private:
    /// The piece from column `first` on.
    void write_row_by_row(const SimdRowWork<Problem, operation, direct>& work,
                          const typename Rows::Tile& tile, const State<Problem>* states,
                          const RowResult<A>* results, index_type first, A* scratch) const {
      const index_type columns = call.problem.geometry.columns, chunks = SimdRowsPlan<A>::chunks(columns);
      const index_type count = std::min(Rows::piece, columns - first);
      auto* const waiting = reinterpret_cast<typename Problem::Out*>(scratch + Rows::pitch_of_piece);
      for (index_type r = 0; r < tile.rows; ++r) {
        const auto [max, factor] =
            work.numbers_of_chunk(states[r * chunks + first / SimdRowsPlan<A>::chunk], results[r]);
        const Vector m(max), f(factor);
        const auto formula = [&](const Vector& v, index_type) __attribute__((always_inline)) {
          if constexpr (operation == Operation::softmax) {
            return exp_of_vector_difference<Ops>(v - m) * f;
          } else {
            return (v - m) - f;
          }
        };
        const SimdRowAccess<Problem> row(call.problem, tile.first + r);
        auto* const to = waiting + r * Rows::pitch_of_piece;
        if constexpr (direct) {
          chunk_write<A>(LogitsInMemory<A, typename Problem::In>{row.x + first}, count, to, false, formula);
        } else {
          work.load_logits(row, first, count, scratch);
          chunk_write<A>(StagedValues<A>{scratch}, count, to, false, formula);
        }
      }
      const index_type distance = call.problem.geometry.y_column_stride;
      write_transposed(waiting, Rows::pitch_of_piece, tile.rows, count, tile.y + first * distance, distance,
                       call.stream);
    }
  };

  template <Operation operation, bool direct, class Exec, class Problem>
  static void run_transposed_rows(const Exec& exec, const Problem& problem) {
    const TransposedRows<Problem> rows(problem, exec.concurrency(), HostCaches::shared() / 2);
    const Call<Problem> call(exec, rows.problem());
    const index_type chunks = SimdRowsPlan<Acc<Problem>>::chunks(problem.geometry.columns);
    if (chunks == 1) {
      const int tasks = call.tasks(rows.count());
      launch_tasks(exec, call.label, tasks,
                   WholeTransposedRows<operation, direct, Problem>{call, rows, tasks});
      return;
    }
    for (index_type first = 0; first < rows.count(); first += rows.of_group()) {
      const index_type tiles = std::min(rows.of_group(), rows.count() - first);
      const auto begin = rows.tile(first), last = rows.tile(first + tiles - 1);
      const index_type of_tiles = last.first + last.rows - begin.first;
      const int tasks = call.tasks(of_tiles * chunks);
      launch_steps(
          exec, call.label, tasks,
          SharedRows<operation, direct, Problem>{call, tasks, begin.first, of_tiles, false, false, false},
          WriteTransposedRows<operation, direct, Problem>{call, rows, tasks, first, tiles});
    }
  }

  template <class Problem>
  struct WriteLogsumexp {
    const Call<Problem>& call;
    int tasks;
    index_type first_row, rows;
    void operator()(int task) const {
      const SimdRowWork<Problem, Operation::logsumexp, false> work(call.problem, false, false);
      const index_type chunks = SimdRowsPlan<Acc<Problem>>::chunks(call.problem.geometry.columns);
      for (index_type r = share(rows, task, tasks); r < share(rows, task + 1, tasks); ++r) {
        const SimdRowAccess<Problem> row(call.problem, first_row + r);
        *row.y = SimdOps<typename Problem::Acc>::template rounded<typename Problem::Out>(
            work.joined(call.states + r * chunks).logsumexp());
      }
    }
  };

  /// What a thread's tiles share.
  template <class Tile>
  struct OfThread {};
  template <class Problem, Operation operation>
  struct OfThread<SimdPanel<Problem, operation>> {
    PanelLines<typename Problem::Acc, typename Problem::Out> lines;
  };
  template <class Tile, class Problem>
  static Tile& make_tile(std::optional<Tile>& place, OfThread<Tile>& of_thread, const Call<Problem>& call,
                         const SimdTiles& tiles, index_type t) {
    if constexpr (requires { of_thread.lines; }) {
      return place.emplace(call.problem, tiles, t, call.stream, of_thread.lines);
    } else {
      return place.emplace(call.problem, tiles, t, call.stream);
    }
  }
  template <class Tile>
  static void finish_tiles(OfThread<Tile>& of_thread) {
    if constexpr (requires { of_thread.lines; }) of_thread.lines.finish();
  }

  template <Operation operation, class Tile, class Problem>
  struct WholeTiles {
    const Call<Problem>& call;
    SimdTiles tiles;
    int tasks;
    void operator()(int task) const {
      for (index_type t = share(tiles.count, task, tasks); t < share(tiles.count, task + 1, tasks); ++t) {
        Tile tile(call.problem, tiles, t, call.stream);
        tile.whole(call.stage(task));
      }
      finish_streaming(call.stream);
    }
  };

  /// Tiles each of which is written while the next one is reduced.
  template <Operation operation, class Problem>
  struct PipelinedTiles {
    using A = typename Problem::Acc;
    using Tile = SimdPipelinedTile<Problem, operation>;
    const Call<Problem>& call;
    SimdTiles tiles;
    int tasks;
    void operator()(int task) const {
      const index_type begin = share(tiles.count, task, tasks), end = share(tiles.count, task + 1, tasks);
      const Problem& problem = call.problem;
      A *const scratch = call.stage(task), *const stage = scratch + SimdTilePlan<A>::partials;
      typename Tile::OfThread of_thread;
      std::optional<Tile> places[2];
      Tile* before = nullptr;
      for (index_type t = begin; t < end; ++t) {
        const int place = static_cast<int>((t - begin) % 2);
        Tile& tile = places[place].emplace(problem, tiles, t, call.stream);
        const index_type next = tiles.first_row(std::min(t + 1, end - 1));
        tile.reduce_and_write(before, stage, scratch + place * (SimdTilePlan<A>::partials / 2), of_thread,
                              problem.x + problem.geometry.row(next).x_offset);
        before = &tile;
      }
      if (before != nullptr) before->write(stage);
      finish_streaming(call.stream);
    }
  };

  /// Chunks of the columns of tiles, in two steps, or whole tiles in one.
  template <Operation operation, class Tile, class Problem>
  struct SharedTiles {
    using A = typename Problem::Acc;
    const Call<Problem>& call;
    SimdTiles tiles;
    int tasks;
    bool reduce, write;
    void operator()(int task) const {
      const index_type chunks = SimdTilePlan<A>::chunks(call.problem.geometry.columns);
      // logsumexp has one value for all chunks of a tile.
      const index_type units_of_tile = !reduce && operation == Operation::logsumexp ? 1 : chunks;
      const index_type distance = index_type(2) * tiles.lanes;
      const auto share_of_tiles = [&](int part) {
        return reduce && write ? share(tiles.count, part, tasks) * units_of_tile
                               : share(tiles.count * units_of_tile, part, tasks);
      };
      const index_type begin = share_of_tiles(task), end = share_of_tiles(task + 1);
      OfThread<Tile> of_thread;
      std::optional<Tile> place;
      A* all_states = reinterpret_cast<A*>(call.states);
      for (index_type unit = begin; unit < end;) {
        const index_type t = unit / units_of_tile, first = unit - t * units_of_tile,
                         last = std::min(end - t * units_of_tile, units_of_tile);
        Tile& tile = make_tile(place, of_thread, call, tiles, t);
        A* states = all_states + t * chunks * distance;
        if (reduce) {
          for (index_type c = first; c < last; ++c)
            tile.reduce_chunk(c, call.stage(task), states + c * distance);
        }
        if (write) {
          tile.join(states, chunks, distance);
          tile.finish();
          if constexpr (operation != Operation::logsumexp) {
            for (index_type c = first; c < last; ++c) tile.write_chunk(c, call.stage(task));
          }
        }
        unit += last - first;
      }
      finish_tiles(of_thread);
      finish_streaming(call.stream);
    }
  };

  /// Panels whose exponentials wait.
  template <Operation operation, class Problem>
  struct WholePanels {
    using A = typename Problem::Acc;
    using Plan = SimdTilePlan<A>;
    const Call<Problem>& call;
    SimdTiles tiles;
    int tasks;

    /// Room for what waits of a panel, before its partial results.
    index_type waiting() const {
      const bool waits = SimdPanel<Problem, operation>::needs_cache(call.problem, call.stream);
      return waits ? Plan::blocks(call.problem.geometry.columns) * Plan::block * tiles.inner : 0;
    }
    bool fits() const {
      const index_type blocks = Plan::blocks(call.problem.geometry.columns);
      return call.can_stage(waiting() + blocks * 2 * tiles.inner + 2 * Plan::width);
    }

    void operator()(int task) const {
      const index_type blocks = Plan::blocks(call.problem.geometry.columns), distance = 2 * tiles.inner;
      const index_type begin = share(tiles.count, task, tasks), end = share(tiles.count, task + 1, tasks);
      A *const stage = call.stage(task), *const partials = stage + waiting();
      PanelLines<A, typename Problem::Out> lines;
      for (index_type t = begin; t < end; ++t) {
        SimdPanel<Problem, operation> panel(call.problem, tiles, t, call.stream, lines);
        panel.reduce_blocks(0, blocks, stage, partials);
        panel.join(partials, blocks, distance);
        panel.finish();
        if (call.stream && t + 1 < end) panel.fetch_beside(tiles, t + 1);
        panel.write_blocks(0, blocks, stage, partials);
      }
      lines.finish();
      finish_streaming(call.stream);
    }
  };

  /// Blocks of the columns of panels: reduced, joined and written. A share has the same blocks when they are
  /// reduced and written, and joins them for some vectors of rows.
  enum class PanelStep { reduce, join, write };
  template <Operation operation, PanelStep step, class Problem>
  struct SharedPanels {
    using A = typename Problem::Acc;
    using Panel = SimdPanel<Problem, operation>;
    using Plan = SimdTilePlan<A>;
    const Call<Problem>& call;
    SimdTiles tiles;
    int tasks;

    void operator()(int task) const {
      const index_type columns = call.problem.geometry.columns, blocks = Plan::blocks(columns);
      A* const scratch = call.stage(task);
      A* const states = reinterpret_cast<A*>(call.states);
      const auto partials = [&](index_type t) { return states + t * blocks * 2 * tiles.inner; };
      const auto results = [&](index_type t) {
        return partials(tiles.count) + Plan::width + t * 2 * tiles.inner;
      };
      const int rows = static_cast<int>(tiles.inner);
      if constexpr (step == PanelStep::join) {
        for_each_panel(task, ceil_div(rows, Plan::width),
                       [&](index_type t, index_type first, index_type last) {
                         Panel::join_vectors(static_cast<int>(first), static_cast<int>(last), rows, columns,
                                             partials(t), scratch, results(t));
                       });
      } else {
        A* stage = scratch + Plan::partials;
        PanelLines<A, typename Problem::Out> lines;
        for_each_panel(task, blocks, [&](index_type t, index_type first, index_type last) {
          Panel panel(call.problem, tiles, t, call.stream, lines);
          if constexpr (step == PanelStep::write) {
            panel.take(results(t));
            panel.write_blocks(first, last, stage, partials(t));
          } else {
            panel.reduce_blocks(first, last, stage, partials(t));
          }
          if (Plan::chunks(columns) == 1) stage += (last - first) * Plan::block * rows;
        });
        lines.finish();
        finish_streaming(call.stream);
      }
    }

   private:
    /// use(panel, first unit, last) for what of all panels' units is a task's.
    template <class Use>
    void for_each_panel(int task, index_type units, const Use& use) const {
      const index_type end = share(tiles.count * units, task + 1, tasks);
      for (index_type unit = share(tiles.count * units, task, tasks); unit < end;) {
        const index_type t = unit / units, first = unit - t * units, last = std::min(units, end - t * units);
        use(t, first, last);
        unit += last - first;
      }
    }
  };

  /// Whether panels of rows that are one chunk have an advantage over tiles. Where columns share sets of the
  /// first-level cache, exponentials would not stay in it; to form them twice pays where more than two
  /// threads would wait for tiles. (Floats along the first axis, tiles and this, GB/s: two cores of Zen 5,
  /// 1024 x 1024 72 and 62, 2048 x 512 71 and 62; a Xeon, 4 threads 30 and 47, 23 and 46, 16 threads 73 to
  /// 102 and 121 to 128, 76 to 111 and 126 to 129; in place, 4 threads, 1000 x 1000 17 and 49, 500 x 500 14
  /// and 38.)
  template <Operation operation, class Problem>
  static bool panels_pay(const Call<Problem>& call, const SimdTiles& tiles, int tasks) {
    using Panel = SimdPanel<Problem, operation>;
    const bool share_sets = Panel::columns_share_sets(tiles.inner);
    if (tasks <= 2) {
      const bool forms_twice = operation == Operation::softmax &&
                               Panel::waiting(call.problem, call.stream) == Panel::Waiting::logits;
      if (forms_twice || share_sets) return false;
    }
    if (share_sets && !Panel::identity) return false;
    return !Panel::needs_cache(call.problem, call.stream) ||
           tiles.inner * static_cast<index_type>(sizeof(Acc<Problem>)) % 1024 != 0;
  }

  /// Whether threads better share such panels than take tiles. Room for all exponentials beside x and y does
  /// not pay where panels are wide, nor do their places in y where they are few or threads would wait for
  /// each other; but tiles would be written by threads that wait for each other's lines, if these belong to
  /// two of them and there is little between. (Measured with floats, two threads of Zen 5 and 2 to 16 of a
  /// Xeon.)
  template <Operation operation, class Problem>
  static bool sharing_pays(const Call<Problem>& call, const SimdTiles& tiles, int tasks) {
    using Panel = SimdPanel<Problem, operation>;
    const RowGeometry& g = call.problem.geometry;
    if (tiles.inner <= Panel::most_beside) return true;
    if (Panel::needs_cache(call.problem, call.stream)) return false;
    const index_type shares = tiles.count * SimdTilePlan<Acc<Problem>>::blocks(g.columns);
    const index_type threads = call.tasks(g.rows * g.columns);
    if (shares >= (threads <= 2 ? 16 : 8) && shares * 5 >= ceil_div(shares, threads) * threads * 4)
      return true;
    const index_type pitch = tiles.inner * static_cast<index_type>(sizeof(Acc<Problem>));
    return Panel::waiting(call.problem, call.stream) == Panel::Waiting::in_y && pitch % 64 != 0 &&
           pitch < index_type(1024) * tasks && shares * 2 >= tasks;
  }

  /// Whether there were panels.
  template <Operation operation, class Exec, class Problem>
  static bool run_panels(const Exec& exec, const Call<Problem>& call) {
    using A = Acc<Problem>;
    using Plan = SimdTilePlan<A>;
    using Panel = SimdPanel<Problem, operation>;
    const RowGeometry& g = call.problem.geometry;
    const SimdTiles tiles = SimdTiles::panels(call.problem);
    if (tiles.count == 0) return false;
    const index_type chunks = Plan::chunks(g.columns), blocks = Plan::blocks(g.columns);
    const index_type shares = tiles.count * blocks;
    const int tasks = call.tasks(shares);
    if (chunks == 1) {
      if (!panels_pay<operation>(call, tiles, tasks)) return false;
      const WholePanels<operation, Problem> whole{call, tiles, tasks};
      if ((tiles.count >= index_type(4) * tasks || tiles.count % tasks == 0) && whole.fits()) {
        launch_tasks(exec, call.label, tasks, whole);
        return true;
      }
      if (!sharing_pays<operation>(call, tiles, tasks)) return false;
    }
    // Chunks, where they go round.
    const index_type units = tiles.count * chunks;
    if (chunks > 1 && (units >= index_type(4) * call.threads || units % call.threads == 0)) {
      launch_long_tiles<operation, Panel>(exec, call, tiles);
      return true;
    }
    if (g.rows * (blocks + 1) <= states_of_shared_panels<A>() && chunks * 2 * Plan::width <= Plan::partials &&
        (!Panel::needs_cache(call.problem, call.stream) ||
         call.can_stage(Plan::partials + ceil_div(shares, index_type(tasks)) * Plan::block * tiles.inner +
                        Plan::width))) {
      launch_steps(exec, call.label, tasks,
                   SharedPanels<operation, PanelStep::reduce, Problem>{call, tiles, tasks},
                   SharedPanels<operation, PanelStep::join, Problem>{call, tiles, tasks},
                   SharedPanels<operation, PanelStep::write, Problem>{call, tiles, tasks});
      return true;
    }
    return false;
  }

  template <Operation operation, class Exec, class Problem>
  static void run_tiles(const Exec& exec, const Problem& problem) {
    Call<Problem> call(exec, problem);
    const std::size_t stage_bytes = HostCaches::longest_stage(call.threads);
    if constexpr (operation != Operation::logsumexp &&
                  panels_have_lines<Acc<Problem>, typename Problem::Out>) {
      using Panel = SimdPanel<Problem, operation>;
      const bool stream = call.stream;
      // Exponentials that can wait in y do so where it may be in the cache for that long. (Two cores of a
      // Xeon, floats along the first axis, GB/s where they do not and do: 2000 x 1000 15 and 20.)
      if (call.moved <= HostCaches::shared() && Panel::waiting(problem, false) == Panel::Waiting::in_y)
        call.stream = false;
      if (run_panels<operation>(exec, call)) return;
      call.stream = stream;
    }
    if constexpr (operation != Operation::logsumexp) {
      if (Transposed::columns(problem)) {
        using Wide = TransposedTile<Problem, SimdTile<Problem, operation>>;
        const SimdTiles tiles = Wide::tiles(problem, call.threads, stage_bytes);
        if constexpr (std::is_same_v<typename Problem::Transform, BoundIdentity>) {
          using Dense = TransposedTile<Problem, SimdDense<Problem, operation>>;
          if (tiles.dense) return launch_tiles<operation, Dense>(exec, call, tiles);
        }
        if (tiles.wide) return launch_tiles<operation, Wide>(exec, call, tiles);
        return launch_tiles<operation, TransposedTile<Problem, SimdRuns<Problem, operation>>>(exec, call,
                                                                                              tiles);
      }
    }
    if constexpr (operation != Operation::logsumexp) {
      using Tile = SimdPipelinedTile<Problem, operation>;
      const SimdTiles tiles = Tile::tiles(problem, call.threads, stage_bytes, call.stream);
      if (tiles.count > 0) {
        const int tasks = call.tasks(tiles.count);
        return launch_tasks(exec, call.label, tasks, PipelinedTiles<operation, Problem>{call, tiles, tasks});
      }
    }
    const SimdTiles tiles = SimdTiles::of(problem, call.threads, stage_bytes);
    if constexpr (std::is_same_v<typename Problem::Transform, BoundIdentity> &&
                  operation != Operation::logsumexp) {
      if (tiles.dense) return launch_tiles<operation, SimdDense<Problem, operation>>(exec, call, tiles);
    }
    if (tiles.wide) {
      launch_tiles<operation, SimdTile<Problem, operation>>(exec, call, tiles);
    } else {
      launch_tiles<operation, SimdRuns<Problem, operation>>(exec, call, tiles);
    }
  }

  template <Operation operation, class Tile, class Exec, class Problem>
  static void launch_tiles(const Exec& exec, const Call<Problem>& call, const SimdTiles& tiles) {
    const index_type chunks = SimdTilePlan<Acc<Problem>>::chunks(call.problem.geometry.columns);
    if (chunks == 1) {
      const int tasks = call.tasks(tiles.count);
      launch_tasks(exec, call.label, tasks, WholeTiles<operation, Tile, Problem>{call, tiles, tasks});
    } else {
      launch_long_tiles<operation, Tile>(exec, call, tiles);
    }
  }

  template <Operation operation, class Tile, class Exec, class Problem>
  static void launch_long_tiles(const Exec& exec, const Call<Problem>& call, const SimdTiles& tiles) {
    const RowGeometry& g = call.problem.geometry;
    const index_type chunks = SimdTilePlan<Acc<Problem>>::chunks(g.columns);
    // Of many tiles each is written while the thread's share of the cache has its logits.
    const auto bytes_of_tile =
        static_cast<std::size_t>(g.columns * std::min<index_type>(tiles.lanes, g.rows)) *
        sizeof(typename Problem::In);
    if (tiles.count >= index_type(4) * call.threads &&
        static_cast<std::size_t>(call.threads) * bytes_of_tile <= HostCaches::shared() / 4) {
      const int tasks = call.tasks(tiles.count);
      launch_tasks(exec, call.label, tasks,
                   SharedTiles<operation, Tile, Problem>{call, tiles, tasks, true, true});
      return;
    }
    const int tasks = call.tasks(tiles.count * chunks);
    using Chunks = SharedTiles<operation, Tile, Problem>;
    launch_steps(exec, call.label, tasks, Chunks{call, tiles, tasks, true, false},
                 Chunks{call, tiles, tasks, false, true});
  }
};

// The kernels for transforms, whatever these are: compiled into the library for its pairs of scalars, and
// from logits in the sums' scalar to outputs of 16 bits, as heads have them.

/// Stands for a problem where there is none: what is instantiated cannot depend on a condition.
template <class In, class Out, bool drops_ends>
struct NoRows {};
template <class Problem>
inline constexpr bool rows_exist_v = true;
template <class In, class Out, bool drops_ends>
inline constexpr bool rows_exist_v<NoRows<In, Out, drops_ends>> = false;

template <class Exec, class Problem>
void run_transformed_in_lanes(const Exec& exec, const Problem& problem) {
  if constexpr (runs_on_host_v<Exec> && rows_exist_v<Problem>) SimdRows::run_in_lanes(exec, problem);
}
template <class Exec, class Problem>
void run_transformed_along_rows(const Exec& exec, const Problem& problem) {
  if constexpr (runs_on_host_v<Exec> && rows_exist_v<Problem>) SimdRows::run_along_rows(exec, problem);
}

/// Logits of a head, which are in the sums' scalar, beside rows of In and Out: those of outputs of 16 bits.
template <class In, class Out, bool drops_ends>
using TransformedRowsOfLogits =
    std::conditional_t<std::is_same_v<In, Out> && !std::is_same_v<Out, accumulator_t<In, Out>>,
                       TransformedRows<accumulator_t<In, Out>, Out, drops_ends>, NoRows<In, Out, drops_ends>>;

#define KOKKOSSOFTMAX_TRANSFORMED_ROWS(KEYWORDS, EXEC, IN, OUT)                                          \
  KEYWORDS void run_transformed_in_lanes(const EXEC&, const TransformedRows<IN, OUT, false>&);           \
  KEYWORDS void run_transformed_along_rows(const EXEC&, const TransformedRows<IN, OUT, false>&);         \
  KEYWORDS void run_transformed_along_rows(const EXEC&, const TransformedRows<IN, OUT, true>&);          \
  KEYWORDS void run_transformed_in_lanes(const EXEC&, const TransformedRowsOfLogits<IN, OUT, false>&);   \
  KEYWORDS void run_transformed_along_rows(const EXEC&, const TransformedRowsOfLogits<IN, OUT, false>&); \
  KEYWORDS void run_transformed_along_rows(const EXEC&, const TransformedRowsOfLogits<IN, OUT, true>&);

}  // namespace KokkosSoftmax::impl

#endif
