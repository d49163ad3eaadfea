// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Softmax on the host's SIMD vectors, for OpenMP, Threads and Serial.
///
/// A row is cut into chunks by its length and type alone. A chunk gives its maximum, its exponentials to that
/// maximum and their sum; the row joins the chunks' sums in order, and an output is exponential * factor of
/// its chunk. Whether the exponentials of a chunk wait in a cache for that factor or are computed once more,
/// which thread has which chunk, and whether stores go past the caches is a matter of speed that moves no
/// bits. Where the axis is not contiguous, vectors run across neighbouring rows.

#ifndef KOKKOSSOFTMAX_SIMDROWS_HPP
#define KOKKOSSOFTMAX_SIMDROWS_HPP

#include <impl/host/KokkosSoftmax_Simd.hpp>
#include <impl/portable/KokkosSoftmax_StridedRows.hpp>

#include <impl/Kokkos_Profiling.hpp>

#if defined(__linux__)
#include <unistd.h>
#endif

namespace KokkosSoftmax::impl {

// ---------------------------------------------------------------------------------------------------------
// How work is cut.

/// What decides the bits: the type alone.
template <class Acc>
struct SimdRowsPlan {
  using Ops = SimdOps<Acc>;
  static constexpr int width = Ops::width;
  /// Vectors whose exponentials are added up plainly, in four accumulators; beyond, rounding errors are kept.
  static constexpr int block_vectors = 32;
  static constexpr int block = block_vectors * width;
  /// 16 KB of exponentials: with the logits they come from, what fits the smallest first-level cache.
  static constexpr index_type chunk = 16384 / sizeof(Acc);
  static_assert(chunk % block == 0);

  static index_type chunks(index_type columns) { return ceil_div(columns, chunk); }
};

/// What does not: sizes of caches. Bytes unless said.
struct HostCaches {
  /// Exponentials that a thread keeps in its share of the second level until the sum of the row is known.
  static constexpr std::size_t stage = std::size_t(256) << 10;
  /// Below this many elements a second thread costs more than it saves (a parallel region takes 1 to 3 us).
  static constexpr index_type elements_of_one_thread = 12288;

  /// The cache that all threads share.
  static std::size_t shared() {
    static const std::size_t bytes = [] {
      long size = 0;
#if defined(__linux__) && defined(_SC_LEVEL3_CACHE_SIZE)
      size = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
      return size > 0 ? static_cast<std::size_t>(size) : std::size_t(16) << 20;
    }();
    return bytes;
  }
};

// ---------------------------------------------------------------------------------------------------------
// A chunk of a row.

/// Logits as they lie in memory: contiguous, no transform.
template <class Acc, class In>
struct LogitsInMemory {
  using Ops = SimdOps<Acc>;
  const In* x;
  KOKKOSSOFTMAX_HOST_FUNCTION typename Ops::Vector operator()(index_type i) const { return Ops::load(x + i); }
  KOKKOSSOFTMAX_HOST_FUNCTION typename Ops::Vector part(index_type i, int count) const {
    return Ops::load_part(x + i, count, -infinity_v<Acc>);
  }
};

/// Logits or exponentials in a thread's scratch, filled up to whole vectors with -inf or 0.
template <class Acc>
struct StagedValues {
  using Ops = SimdOps<Acc>;
  const Acc* v;
  KOKKOSSOFTMAX_HOST_FUNCTION typename Ops::Vector operator()(index_type i) const { return Ops::load(v + i); }
  KOKKOSSOFTMAX_HOST_FUNCTION typename Ops::Vector part(index_type i, int) const { return Ops::load(v + i); }
};

/// The largest logit; NaN is passed over.
template <class Acc, class Source>
KOKKOSSOFTMAX_HOST_FUNCTION Acc chunk_max(const Source& source, index_type count) {
  using Ops = SimdOps<Acc>;
  using Vector = typename Ops::Vector;
  constexpr int w = Ops::width;
  Vector m0(-infinity_v<Acc>), m1 = m0, m2 = m0, m3 = m0;
  index_type i = 0;
  for (; i + 4 * w <= count; i += 4 * w) {
    m0 = Ops::larger(source(i), m0);
    m1 = Ops::larger(source(i + w), m1);
    m2 = Ops::larger(source(i + 2 * w), m2);
    m3 = Ops::larger(source(i + 3 * w), m3);
  }
  for (; i + w <= count; i += w) m0 = Ops::larger(source(i), m0);
  if (i < count) m1 = Ops::larger(source.part(i, static_cast<int>(count - i)), m1);
  return Ops::max(Ops::larger(Ops::larger(m0, m1), Ops::larger(m2, m3)));
}

/// A sum in every lane, and what rounding took from it (D. Knuth's two-sum).
template <class Acc>
struct CompensatedVector {
  using Vector = simd<Acc>;
  Vector sum = Vector(Acc(0)), low = Vector(Acc(0));

  KOKKOSSOFTMAX_HOST_FUNCTION void add(const Vector& term) {
    const Vector total = sum + term, part = total - sum;
    low = low + ((sum - (total - part)) + (term - part));
    sum = total;
  }
};

/// Where exponentials are left.
enum class Keep {
  none,    ///< they are computed once more
  staged,  ///< in scratch, in whole vectors
  exactly  ///< in the output: not a byte more
};

/// The same for logsumexp, of which 4 eps are asked: next to a term of 1 even a few small ones must not be
/// lost.
template <class Acc, class Source>
KOKKOSSOFTMAX_HOST_FUNCTION CompensatedMaxSum<Acc> chunk_accurate_sum(const Source& source, index_type count,
                                                                      Acc max, const char* next,
                                                                      int next_bytes_of_vector) {
  using Ops = SimdOps<Acc>;
  using Vector = typename Ops::Vector;
  constexpr int w = Ops::width;
  const Vector m(max);
  const auto one = [&](index_type at) __attribute__((always_inline)) {
    return exp_of_vector_difference<Ops>(source(at) - m);
  };
  CompensatedVector<Acc> a, b;
  index_type i = 0;
  for (; i + 4 * w <= count; i += 4 * w) {
    a.add(one(i) + one(i + w));
    b.add(one(i + 2 * w) + one(i + 3 * w));
    for (int p = 0; p < 4 * next_bytes_of_vector; p += 64) __builtin_prefetch(next + p);
    next += 4 * next_bytes_of_vector;
  }
  for (; i + w <= count; i += w) a.add(one(i));
  if (i < count) b.add(exp_of_vector_difference<Ops>(source.part(i, static_cast<int>(count - i)) - m));
  return Ops::template compensated_sum<CompensatedMaxSum<Acc>>(max, a.sum, b.sum, a.low + b.low);
}

/// The sum of exp(logit - max) over a chunk, and what rounding took from it; keeps the exponentials, and
/// fetches what will be read next while it computes.
template <Keep keep, class Acc, class Source>
KOKKOSSOFTMAX_HOST_FUNCTION CompensatedMaxSum<Acc> chunk_exponentials(const Source& source, index_type count,
                                                                      Acc max, Acc* kept, const char* next,
                                                                      int next_bytes_of_vector) {
  using Ops = SimdOps<Acc>;
  using Vector = typename Ops::Vector;
  using Plan = SimdRowsPlan<Acc>;
  constexpr int w = Ops::width;
  const Vector m(max);
  CompensatedVector<Acc> sum;
  index_type i = 0;
  const auto one = [&](index_type at) __attribute__((always_inline)) {
    const Vector e = exp_of_vector_difference<Ops>(source(at) - m);
    if constexpr (keep != Keep::none) Ops::store(kept + at, e);
    return e;
  };
  do {
    Vector a0(Acc(0)), a1 = a0, a2 = a0, a3 = a0;
    const index_type end = count - i < Plan::block ? count : i + Plan::block;
    for (; i + 4 * w <= end; i += 4 * w) {
      a0 = a0 + one(i);
      a1 = a1 + one(i + w);
      a2 = a2 + one(i + 2 * w);
      a3 = a3 + one(i + 3 * w);
      for (int b = 0; b < 4 * next_bytes_of_vector; b += 64) __builtin_prefetch(next + b);
      next += 4 * next_bytes_of_vector;
    }
    if (i + w <= end) a0 = a0 + one(i), i += w;
    if (i + w <= end) a1 = a1 + one(i), i += w;
    if (i + w <= end) a2 = a2 + one(i), i += w;
    if (i < end) {
      const int rest = static_cast<int>(end - i);
      const Vector e = exp_of_vector_difference<Ops>(source.part(i, rest) - m);
      if constexpr (keep == Keep::staged) Ops::store(kept + i, e);
      if constexpr (keep == Keep::exactly) Ops::store_part(kept + i, e, rest);
      a3 = a3 + e;
      i = end;
    }
    const Vector part = (a0 + a1) + (a2 + a3);
    if (count <= Plan::block) return {max, Ops::sum(part), Acc(0)};
    sum.add(part);
  } while (i < count);
  return {max, Ops::sum(sum.sum), Ops::sum(sum.low)};
}

/// y = formula(value, index) for `count` values; to be streamed past the caches or not.
template <class Acc, class Source, class Out, class Formula>
KOKKOSSOFTMAX_HOST_FUNCTION void chunk_write(const Source& source, index_type count, Out* y, bool stream,
                                             const Formula& formula) {
  using Ops = SimdOps<Acc>;
  constexpr int w = Ops::width;
  index_type i = 0;
  if (stream) {
    constexpr std::uintptr_t line = 64;
    const index_type ahead =
        static_cast<index_type>((line - reinterpret_cast<std::uintptr_t>(y) % line) % line / sizeof(Out));
    const index_type head = ahead < count ? ahead : count;
    for (; i + w <= head; i += w) Ops::store(y + i, formula(source(i), i));
    if (i < head) {
      // Reads a whole vector where there is one: what lies behind the head belongs to the row all the same.
      const int rest = static_cast<int>(head - i);
      const auto v = i + w <= count ? source(i) : source.part(i, static_cast<int>(count - i));
      Ops::store_part(y + i, formula(v, i), rest);
      i = head;
    }
    for (; i + 2 * w <= count; i += 2 * w) {
      Ops::stream(y + i, formula(source(i), i));
      Ops::stream(y + i + w, formula(source(i + w), i + w));
    }
    if (i + w <= count) Ops::stream(y + i, formula(source(i), i)), i += w;
  } else {
    for (; i + 4 * w <= count; i += 4 * w) {
      Ops::store(y + i, formula(source(i), i));
      Ops::store(y + i + w, formula(source(i + w), i + w));
      Ops::store(y + i + 2 * w, formula(source(i + 2 * w), i + 2 * w));
      Ops::store(y + i + 3 * w, formula(source(i + 3 * w), i + 3 * w));
    }
    for (; i + w <= count; i += w) Ops::store(y + i, formula(source(i), i));
  }
  if (i < count) {
    const int rest = static_cast<int>(count - i);
    Ops::store_part(y + i, formula(source.part(i, rest), i), rest);
  }
}

// ---------------------------------------------------------------------------------------------------------
// Rows whose axis is contiguous, or at least not slower than the other dimensions.

/// What one thread does with rows. `direct`: the logits are taken from x as they lie there, and y is
/// contiguous; else they come through scratch.
template <class Problem, Operation operation, bool direct>
class SimdRowWork {
 public:
  using Acc = typename Problem::Acc;
  using In = typename Problem::In;
  using Out = typename Problem::Out;
  using Ops = SimdOps<Acc>;
  using Vector = typename Ops::Vector;
  using Plan = SimdRowsPlan<Acc>;
  using State = CompensatedMaxSum<Acc>;
  using Row = RowAccess<Problem>;
  static constexpr int w = Ops::width;
  static constexpr bool y_can_keep_exponentials = direct && std::is_same_v<Acc, Out>;

  SimdRowWork(const Problem& problem, bool stream, bool fetch)
      : problem_(problem), columns_(problem.geometry.columns), stream_(stream), fetch_(fetch) {}

  /// Rows of one chunk, several at a time, so that neither the latency of a row's reductions nor that of its
  /// division is waited for.
  void short_rows(index_type begin, index_type end) const {
    constexpr int most = 32;
    alignas(64) Acc stage[Plan::chunk + w];
    const index_type padded = ceil_div(columns_, w) * w;
    const int batch =
        static_cast<int>(std::min<index_type>(most, std::max<index_type>(1, Plan::chunk / 2 / padded)));
    const In* x[most];
    Out* y[most];
    Acc max[most];
    State state[most];
    for (index_type first = begin; first < end; first += batch) {
      const int rows = static_cast<int>(std::min<index_type>(batch, end - first));
      for (int k = 0; k < rows; ++k) {
        const Row row(problem_, first + k);
        x[k] = row.x;
        y[k] = row.y;
        if constexpr (!direct) load_logits(row, 0, columns_, stage + k * padded);
        max[k] = raw_max(row.x, 0, columns_, stage + k * padded);
      }
      for (int k = 0; k < rows; ++k) {
        const In* next =
            fetch_ ? problem_.x + x_offset(std::min(first + batch + k, problem_.geometry.rows - 1)) : x[k];
        constexpr Keep keep = operation == Operation::softmax ? Keep::staged : Keep::none;
        state[k] = reduce<keep>(x[k], 0, columns_, max[k], stage + k * padded, stage + k * padded, next);
      }
      for (int k = 0; k < rows; ++k) {
        const RowResult<Acc> result(operation, state[k].rounded());
        if constexpr (operation == Operation::logsumexp) {
          *y[k] = store_as<Out>(result.logsumexp());
        } else {
          max[k] = result.max;
          state[k].sum = operation == Operation::softmax ? result.factor : result.log_sum;
        }
      }
      if constexpr (operation != Operation::logsumexp) {
        for (int k = 0; k < rows; ++k) {
          write(x[k], y[k], 0, columns_, max[k], state[k].sum, stage + k * padded, true);
        }
      }
    }
  }

  /// Rows of several chunks, one after the other. `stage` holds a row if `staged`, else a chunk; `states` one
  /// for each chunk.
  void long_rows(index_type begin, index_type end, Acc* stage, bool staged, State* states) const {
    const index_type chunks = Plan::chunks(columns_);
    for (index_type r = begin; r < end; ++r) {
      const Row row(problem_, r);
      const In* next_row = problem_.x + x_offset(std::min(r + 1, problem_.geometry.rows - 1));
      for (index_type c = 0; c < chunks; ++c) {
        const In* next = c + 1 < chunks ? row.x + (c + 1) * Plan::chunk * row.x_stride : next_row;
        states[c] = reduce_chunk(row, c, stage + (staged ? c * Plan::chunk : 0), staged, nullptr, next);
      }
      const RowResult<Acc> result = joined(states);
      if constexpr (operation == Operation::logsumexp) {
        *row.y = store_as<Out>(result.logsumexp());
      } else {
        for (index_type c = 0; c < chunks; ++c) {
          write_chunk(row, c, states[c], result, stage + (staged ? c * Plan::chunk : 0), staged, nullptr);
        }
      }
    }
  }

  /// The chunk's state. The exponentials are left in `stage` if `staged`, or in the output if that is
  /// `kept_in_y`.
  State reduce_chunk(const Row& row, index_type c, Acc* stage, bool staged, Acc* kept_in_y,
                     const In* next) const {
    const index_type begin = c * Plan::chunk, count = std::min(Plan::chunk, columns_ - begin);
    if constexpr (!direct) load_logits(row, begin, count, stage);
    const Acc max = raw_max(row.x, begin, count, stage);
    if constexpr (operation == Operation::softmax) {
      if (kept_in_y) return reduce<Keep::exactly>(row.x, begin, count, max, stage, kept_in_y + begin, next);
      if (staged) return reduce<Keep::staged>(row.x, begin, count, max, stage, stage, next);
    }
    return reduce<Keep::none>(row.x, begin, count, max, stage, stage, next);
  }

  void write_chunk(const Row& row, index_type c, const State& state, const RowResult<Acc>& result, Acc* stage,
                   bool staged, Acc* kept_in_y) const {
    const index_type begin = c * Plan::chunk, count = std::min(Plan::chunk, columns_ - begin);
    if constexpr (operation == Operation::softmax) {
      const Acc factor = exp_of_difference(state.max - result.max) * result.factor;
      if (kept_in_y) {
        const Vector f(factor);
        const StagedExactly source{kept_in_y + begin};
        if constexpr (y_can_keep_exponentials) {
          chunk_write<Acc>(
              source, count, row.y + begin,
              false, [&](const Vector& v, index_type) __attribute__((always_inline)) { return v * f; });
        }
        return;
      }
      if constexpr (!direct) {
        if (!staged) load_logits(row, begin, count, stage);
      }
      write(row.x, row.y, begin, count, state.max, factor, stage, staged);
    } else {
      if constexpr (!direct) {
        if (!staged) load_logits(row, begin, count, stage);
      }
      write(row.x, row.y, begin, count, result.max, result.log_sum, stage, staged);
    }
  }

  RowResult<Acc> joined(const State* states) const {
    const index_type chunks = Plan::chunks(columns_);
    State total = states[0];
    for (index_type c = 1; c < chunks; ++c) total.join(states[c]);
    return RowResult<Acc>(operation, total.rounded());
  }

 private:
  struct StagedExactly {
    const Acc* v;
    KOKKOSSOFTMAX_HOST_FUNCTION Vector operator()(index_type i) const { return Ops::load(v + i); }
    KOKKOSSOFTMAX_HOST_FUNCTION Vector part(index_type i, int count) const {
      return Ops::load_part(v + i, count, Acc(0));
    }
  };

  index_type x_offset(index_type position) const { return problem_.geometry.row(position).x_offset; }

  auto logits(const In* x, index_type begin, const Acc* stage) const {
    if constexpr (direct) {
      return LogitsInMemory<Acc, In>{x + begin};
    } else {
      return StagedValues<Acc>{stage};
    }
  }

  /// Logits of any stride, transformed, into scratch.
  void load_logits(const Row& row, index_type begin, index_type count, Acc* __restrict__ stage) const {
    const In* x = row.x + begin * row.x_stride;
    // A copy: loops vectorise where nothing that they read could be changed by what they write.
    const auto transform = row.transform;
    if (row.x_stride == 1) {
      for (index_type i = 0; i < count; ++i)
        stage[i] = transformed<Acc>(transform, load_as<Acc>(x[i]), begin + i);
    } else {
      for (index_type i = 0; i < count; ++i) {
        stage[i] = transformed<Acc>(transform, load_as<Acc>(x[i * row.x_stride]), begin + i);
      }
    }
    for (index_type i = count; i % w != 0; ++i) stage[i] = -infinity_v<Acc>;
  }

  Acc raw_max(const In* x, index_type begin, index_type count, const Acc* stage) const {
    return chunk_max<Acc>(logits(x, begin, stage), count);
  }

  template <Keep keep>
  State reduce(const In* x, index_type begin, index_type count, Acc max, const Acc* stage, Acc* kept,
               const In* next) const {
    const auto source = logits(x, begin, stage);
    if (max == infinity_v<Acc>) return of_infinite(source, count);
    const char* fetched = reinterpret_cast<const char*>(next);
    const int fetched_of_vector = fetch_ ? w * static_cast<int>(sizeof(In)) : 0;
    if constexpr (operation == Operation::logsumexp) {
      return chunk_accurate_sum<Acc>(source, count, finite_max(max), fetched, fetched_of_vector);
    } else {
      return chunk_exponentials<keep>(source, count, finite_max(max), kept, fetched, fetched_of_vector);
    }
  }

  /// With +inf among the logits the sum says whether there is NaN too; what the exponentials are is of no
  /// matter.
  template <class Source>
  [[gnu::noinline]] static State of_infinite(const Source& source, index_type count) {
    bool nan = false;
    for (index_type i = 0; i < count; ++i) {
      const Acc v = static_cast<Acc>(source.part(i, 1)[0]);
      nan = nan || v != v;
    }
    return {largest_v<Acc>, nan ? std::numeric_limits<Acc>::quiet_NaN() : infinity_v<Acc>, Acc(0)};
  }

  /// softmax: exponential * b, from `stage` or computed again as exp(logit - a); log_softmax: (logit - a) -
  /// b.
  void write(const In* x, Out* y, index_type begin, index_type count, Acc a, Acc b, Acc* stage,
             bool staged) const {
    const Vector va(a), vb(b);
    if constexpr (operation == Operation::softmax) {
      if (staged) {
        store_values(
            StagedValues<Acc>{stage}, y, begin, count,
            stage, [&](const Vector& v, index_type) __attribute__((always_inline)) { return v * vb; });
      } else {
        store_values(
            logits(x, begin, stage), y, begin, count,
            stage, [&](const Vector& v, index_type) __attribute__((always_inline)) {
              return exp_of_vector_difference<Ops>(v - va) * vb;
            });
      }
    } else {
      store_values(
          logits(x, begin, stage), y, begin, count,
          stage, [&](const Vector& v, index_type) __attribute__((always_inline)) { return (v - va) - vb; });
    }
  }

  template <class Source, class Formula>
  void store_values(const Source& source, Out* y, index_type begin, index_type count, Acc* stage,
                    const Formula& formula) const {
    const index_type stride = direct ? 1 : problem_.geometry.y_column_stride;
    Out* to = y + begin * stride;
    if (direct || stride == 1) {
      chunk_write<Acc>(source, count, to, stream_, formula);
    } else {
      for (index_type i = 0; i < count; i += w) Ops::store(stage + i, formula(source(i), i));
      for (index_type i = 0; i < count; ++i) to[i * stride] = store_as<Out>(stage[i]);
    }
  }

  const Problem& problem_;
  index_type columns_;
  bool stream_, fetch_;
};

// ---------------------------------------------------------------------------------------------------------
// Rows side by side: the axis is not contiguous, a lane has a row.

/// How an axis that is not contiguous is cut; what decides the bits depends on the length and the type alone.
template <class Acc>
struct SimdTilePlan {
  static constexpr int width = SimdOps<Acc>::width;
  /// A tile of exponentials waits in the second-level cache: this many bytes of it.
  static constexpr index_type stage_bytes = index_type(512) << 10;
  static constexpr int most_lanes = 512 / sizeof(Acc);
  static constexpr int fewest_lanes = 128 / sizeof(Acc);
  /// Columns of which a tile of the fewest lanes fits; longer rows are read twice, in chunks.
  static constexpr index_type longest_staged =
      stage_bytes / (fewest_lanes * static_cast<index_type>(sizeof(Acc)));
  static constexpr index_type chunk = 1024;
  static constexpr index_type block = 32;  ///< columns added up plainly, in four accumulators
  static_assert(chunk * most_lanes * static_cast<index_type>(sizeof(Acc)) <= stage_bytes);

  static index_type chunks(index_type columns) {
    return columns <= longest_staged ? 1 : ceil_div(columns, chunk);
  }
};

/// How the rows are grouped into tiles: of neighbours in memory where there are some.
struct SimdTiles {
  bool adjacent;     ///< the rows of a tile lie side by side in x and y
  index_type inner;  ///< rows that continue each other
  int lanes;
  index_type of_inner;
  index_type count;

  template <class Problem>
  static SimdTiles of(const Problem& problem, int concurrency) {
    using Acc = typename Problem::Acc;
    using Plan = SimdTilePlan<Acc>;
    const RowGeometry& g = problem.geometry;
    SimdTiles tiles{};
    const int fastest = g.rank - 1;
    tiles.adjacent = g.rank > 0 && g.x_stride[fastest] == 1 && g.extent[fastest] >= Plan::fewest_lanes / 2 &&
                     (g.y_stride[fastest] == 1 || problem.operation == Operation::logsumexp);
    tiles.inner = tiles.adjacent ? g.extent[fastest] : g.rows;
    index_type lanes = Plan::most_lanes;
    if (Plan::chunks(g.columns) == 1) {
      lanes = std::min(lanes, Plan::stage_bytes / static_cast<index_type>(sizeof(Acc)) / g.columns);
    }
    // Enough tiles for all threads.
    lanes = std::min(lanes, ceil_div(g.rows, index_type(4) * concurrency));
    lanes = std::min(lanes, tiles.inner + Plan::fewest_lanes - 1);
    lanes = std::max<index_type>(lanes / Plan::fewest_lanes, 1) * Plan::fewest_lanes;
    tiles.lanes = static_cast<int>(lanes);
    tiles.of_inner = ceil_div(tiles.inner, lanes);
    tiles.count = tiles.of_inner * (g.rows / tiles.inner);
    return tiles;
  }
};

template <class Problem, Operation operation>
class SimdTile {
 public:
  using Acc = typename Problem::Acc;
  using In = typename Problem::In;
  using Out = typename Problem::Out;
  using Ops = SimdOps<Acc>;
  using Vector = typename Ops::Vector;
  using Plan = SimdTilePlan<Acc>;
  static constexpr int w = Ops::width;
  static constexpr int most = Plan::most_lanes;
  static constexpr bool identity = std::is_same_v<typename Problem::Transform, BoundIdentity>;

  SimdTile(const Problem& problem, const SimdTiles& tiles, index_type tile, bool stream)
      : problem_(problem), adjacent_(tiles.adjacent), stream_(stream) {
    const index_type run = tile / tiles.of_inner, at = (tile - run * tiles.of_inner) * tiles.lanes;
    first_ = run * tiles.inner + at;
    lanes_ = static_cast<int>(std::min<index_type>(tiles.lanes, tiles.inner - at));
    padded_ = (lanes_ + w - 1) / w * w;
    for (int l = 0; l < lanes_; ++l) {
      const RowGeometry::Row row = problem.geometry.row(first_ + l);
      x_offset_[l] = row.x_offset;
      y_offset_[l] = row.y_offset;
      if constexpr (!identity) transform_[l] = problem.transform.at_row(row.index);
      if (identity && adjacent_ && operation != Operation::logsumexp) break;  // the first one says it all
    }
  }

  /// Rows that wait in `stage` as a whole.
  void whole(Acc* stage) {
    clear();
    const index_type columns = problem_.geometry.columns;
    reduce(0, columns, stage, operation == Operation::softmax);
    finish();
    if constexpr (operation != Operation::logsumexp) {
      for (index_type c = 0; c < columns; ++c) {
        const StagedValues<Acc> source{stage + c * padded_};
        if constexpr (operation == Operation::softmax) {
          store(
              source, c,
              stage + c * padded_, [&](const Vector& v, index_type i) __attribute__((always_inline)) {
                return v * Ops::load(sum_ + i);
              });
        } else {
          store(
              source, c,
              stage + c * padded_, [&](const Vector& v, index_type i) __attribute__((always_inline)) {
                return (v - Ops::load(max_ + i)) - Ops::load(sum_ + i);
              });
        }
      }
    }
  }

  /// The states of one chunk of long rows: [lane][max, sum, low].
  void reduce_chunk(index_type chunk, Acc* stage, Acc* states) {
    clear();
    const index_type begin = chunk * Plan::chunk;
    reduce(begin, std::min(begin + Plan::chunk, problem_.geometry.columns), stage, false);
    for (int l = 0; l < lanes_; ++l) {
      states[3 * l] = max_[l];
      states[3 * l + 1] = sum_[l];
      states[3 * l + 2] = low_[l];
    }
  }

  void join(const Acc* states, index_type chunks, index_type distance) {
    clear();
    for (index_type c = 0; c < chunks; ++c, states += distance) {
      for (int l = 0; l < lanes_; ++l) {
        CompensatedMaxSum<Acc> total{max_[l], sum_[l], low_[l]};
        total.join({states[3 * l], states[3 * l + 1], states[3 * l + 2]});
        max_[l] = total.max;
        sum_[l] = total.sum;
        low_[l] = total.low;
      }
    }
  }

  /// From the sums to what the last formula takes; writes logsumexp.
  void finish() {
    for (int l = 0; l < lanes_; ++l) {
      const RowResult<Acc> result(operation, CompensatedMaxSum<Acc>{max_[l], sum_[l], low_[l]}.rounded());
      if constexpr (operation == Operation::logsumexp) {
        problem_.y[y_offset_[l]] = store_as<Out>(result.logsumexp());
      }
      max_[l] = result.max;
      sum_[l] = operation == Operation::softmax ? result.factor : result.log_sum;
    }
  }

  void write_chunk(index_type chunk, Acc* stage) {
    const index_type begin = chunk * Plan::chunk,
                     end = std::min(begin + Plan::chunk, problem_.geometry.columns);
    for (index_type c = begin; c < end; ++c) {
      const auto formula = [&](const Vector& v, index_type i) __attribute__((always_inline)) {
        const Vector difference = v - Ops::load(max_ + i);
        if constexpr (operation == Operation::softmax) {
          return exp_of_vector_difference<Ops>(difference) * Ops::load(sum_ + i);
        } else {
          return difference - Ops::load(sum_ + i);
        }
      };
      if (identity && adjacent_) {
        store(LogitsInMemory<Acc, In>{x_column(c)}, c, stage, formula);
      } else {
        load(c, stage);
        store(StagedValues<Acc>{stage}, c, stage, formula);
      }
    }
  }

 private:
  void clear() {
    for (int l = 0; l < padded_ + w; ++l) {
      max_[l] = -largest_v<Acc>;
      sum_[l] = 0;
      low_[l] = 0;
    }
  }

  const In* x_column(index_type c) const {
    return problem_.x + x_offset_[0] + c * problem_.geometry.x_column_stride;
  }

  /// A column's logits, filled up to whole vectors.
  KOKKOSSOFTMAX_HOST_FUNCTION void load(index_type c, Acc* stage) const {
    if (identity && adjacent_) {
      const In* x = x_column(c);
      int l = 0;
      for (; l + w <= lanes_; l += w) Ops::store(stage + l, Ops::load(x + l));
      if (l < lanes_) Ops::store(stage + l, Ops::load_part(x + l, lanes_ - l, -infinity_v<Acc>));
      return;
    }
    if (adjacent_) {
      const In* x = x_column(c);
      for (int l = 0; l < lanes_; ++l) stage[l] = logit(x[l], l, c);
    } else {
      const In* x = problem_.x + c * problem_.geometry.x_column_stride;
      for (int l = 0; l < lanes_; ++l) stage[l] = logit(x[x_offset_[l]], l, c);
    }
    for (int l = lanes_; l < padded_; ++l) stage[l] = -infinity_v<Acc>;
  }

  KOKKOSSOFTMAX_HOST_FUNCTION Acc logit(const In& x, int l, index_type c) const {
    if constexpr (identity) {
      return load_as<Acc>(x);
    } else {
      return transformed<Acc>(transform_[l], load_as<Acc>(x), c);
    }
  }

  void reduce(index_type begin, index_type end, Acc* stage, bool keep) {
    for (index_type c = begin; c < end; ++c) {
      Acc* column = stage + (c - begin) * padded_;
      load(c, column);
      for (int l = 0; l < padded_; l += w)
        Ops::store(max_ + l, Ops::larger(Ops::load(column + l), Ops::load(max_ + l)));
    }
    bool infinite[most], any_infinite = false;
    for (int l = 0; l < lanes_; ++l) {
      infinite[l] = max_[l] == infinity_v<Acc>;
      any_infinite = any_infinite || infinite[l];
      max_[l] = finite_max(max_[l]);
    }
    for (index_type b = begin; b < end; b += Plan::block) {
      const int columns = static_cast<int>(std::min(Plan::block, end - b));
      Acc* block = stage + (b - begin) * padded_;
      for (int l = 0; l < padded_; l += w) {
        if (keep) {
          add_block<true>(block + l, l, columns);
        } else {
          add_block<false>(block + l, l, columns);
        }
      }
    }
    // exp of a vector makes NaN of +inf: where there was no NaN, the sum is +inf.
    for (int l = 0; any_infinite && l < lanes_; ++l) {
      if (infinite[l] && !holds_nan(begin, end, l)) sum_[l] = infinity_v<Acc>;
    }
  }

  [[gnu::noinline]] bool holds_nan(index_type begin, index_type end, int l) const {
    const In* x = problem_.x + (adjacent_ ? x_offset_[0] + l : x_offset_[l]);
    for (index_type c = begin; c < end; ++c) {
      const Acc v = logit(x[c * problem_.geometry.x_column_stride], l, c);
      if (v != v) return true;
    }
    return false;
  }

  /// Exponentials and sums of a block of columns, for a vector of lanes.
  template <bool keep>
  KOKKOSSOFTMAX_HOST_FUNCTION void add_block(Acc* v, int l, int columns) {
    const Vector m = Ops::load(max_ + l);
    const auto one = [&](int c) __attribute__((always_inline)) {
      const Vector e = exp_of_vector_difference<Ops>(Ops::load(v + c * padded_) - m);
      if constexpr (keep) Ops::store(v + c * padded_, e);
      return e;
    };
    CompensatedVector<Acc> sum{Ops::load(sum_ + l), Ops::load(low_ + l)};
    int c = 0;
    if constexpr (operation == Operation::logsumexp) {
      for (; c + 4 <= columns; c += 4) {
        sum.add(one(c) + one(c + 1));
        sum.add(one(c + 2) + one(c + 3));
      }
      for (; c < columns; ++c) sum.add(one(c));
    } else {
      Vector a0(Acc(0)), a1 = a0, a2 = a0, a3 = a0;
      for (; c + 4 <= columns; c += 4) {
        a0 = a0 + one(c);
        a1 = a1 + one(c + 1);
        a2 = a2 + one(c + 2);
        a3 = a3 + one(c + 3);
      }
      if (c < columns) a0 = a0 + one(c++);
      if (c < columns) a1 = a1 + one(c++);
      if (c < columns) a2 = a2 + one(c++);
      sum.add((a0 + a1) + (a2 + a3));
    }
    Ops::store(sum_ + l, sum.sum);
    Ops::store(low_ + l, sum.low);
  }

  template <class Source, class Formula>
  KOKKOSSOFTMAX_HOST_FUNCTION void store(const Source& source, index_type c, Acc* scratch,
                                         const Formula& formula) {
    Out* y = problem_.y + c * problem_.geometry.y_column_stride;
    if (adjacent_) {
      chunk_write<Acc>(source, lanes_, y + y_offset_[0], stream_, formula);
    } else {
      for (int l = 0; l < padded_; l += w) Ops::store(scratch + l, formula(source(l), l));
      for (int l = 0; l < lanes_; ++l) y[y_offset_[l]] = store_as<Out>(scratch[l]);
    }
  }

  const Problem& problem_;
  bool adjacent_, stream_;
  index_type first_;
  int lanes_, padded_;
  index_type x_offset_[most], y_offset_[most];
  std::conditional_t<identity, char, typename Problem::Transform::Row> transform_[identity ? 1 : most];
  alignas(64) Acc max_[most + w], sum_[most + w], low_[most + w];
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

/// Runs functor(task) for each task, a thread a task; a single one on the calling thread, which wakes no
/// other (launches on a host's instance have ended when they return, so the order on it is kept).
template <class Exec, class Functor>
void launch_tasks(const Exec& exec, const std::string& label, int tasks, const Functor& functor) {
  if (tasks > 1) {
    Kokkos::RangePolicy<Exec> policy(exec, 0, tasks);
    policy.set_chunk_size(1);
    Kokkos::parallel_for(label, policy, functor);
    return;
  }
  std::uint64_t id = 0;
  const bool watched = Kokkos::Profiling::profileLibraryLoaded();
  if (watched) Kokkos::Profiling::beginParallelFor(label, Kokkos::Tools::Experimental::device_id(exec), &id);
  functor(0);
  if (watched) Kokkos::Profiling::endParallelFor(id);
}

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
    switch (problem.operation) {
      case Operation::softmax:
        return run_operation<Operation::softmax>(exec, problem);
      case Operation::log_softmax:
        return run_operation<Operation::log_softmax>(exec, problem);
      case Operation::logsumexp:
        return run_operation<Operation::logsumexp>(exec, problem);
    }
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
        stage = SimdTilePlan<A>::stage_bytes + 256;
        const index_type chunks = SimdTilePlan<A>::chunks(g.columns);
        // A tile has places for fewer than twice its rows, but for the last one.
        if (chunks > 1) {
          states =
              static_cast<std::size_t>(chunks * (2 * g.rows + SimdTilePlan<A>::most_lanes)) * 3 * sizeof(A);
        }
      } else if (g.columns > SimdRowsPlan<A>::chunk) {
        stage = HostCaches::stage + 256;
        states = static_cast<std::size_t>(4 * threads * SimdRowsPlan<A>::chunks(g.columns)) *
                 sizeof(State<Problem>);
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

  template <Operation operation, class Exec, class Problem>
  static void run_operation(const Exec& exec, const Problem& problem) {
    if (problem.axis_is_strided) return run_tiles<operation>(exec, problem);
    if constexpr (std::is_same_v<typename Problem::Transform, BoundIdentity>) {
      if (is_direct(problem)) return run_rows<operation, true>(exec, problem);
    }
    run_rows<operation, false>(exec, problem);
  }

  template <class Problem>
  struct Call {
    Problem problem;
    std::string label;
    int threads;
    bool stream, fetch;
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
      stream = written > 0 && read + written > HostCaches::shared();
      fetch = read > HostCaches::stage;
      stages = static_cast<char*>(
          scratch.bytes > 0 ? ScratchPool<typename Exec::memory_space>::get(exec, scratch.bytes) : nullptr);
      states = reinterpret_cast<State<Problem>*>(stages + static_cast<std::size_t>(threads) * scratch.stage);
    }

    /// Threads that are worth waking for `units` independent pieces of work.
    int tasks(index_type units) const {
      const RowGeometry& g = problem.geometry;
      if (g.rows * g.columns <= HostCaches::elements_of_one_thread) return 1;
      return static_cast<int>(std::min<index_type>(threads, units));
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
      using A = Acc<Problem>;
      const SimdRowWork<Problem, operation, direct> work(call.problem, call.stream, call.fetch);
      const RowGeometry& g = call.problem.geometry;
      const index_type begin = share(g.rows, task, tasks), end = share(g.rows, task + 1, tasks);
      const index_type chunks = SimdRowsPlan<A>::chunks(g.columns);
      if (chunks == 1) {
        work.short_rows(begin, end);
      } else {
        const bool staged = static_cast<std::size_t>(g.columns) * sizeof(A) <= HostCaches::stage;
        work.long_rows(begin, end, call.stage(task), staged, call.states + task * chunks);
      }
      finish_streaming(call.stream);
    }
  };

  /// Chunks of a few rows, shared by all threads; each thread has the same ones in both launches.
  template <Operation operation, bool direct, class Problem>
  struct SharedRows {
    using A = typename Problem::Acc;
    using Work = SimdRowWork<Problem, operation, direct>;
    const Call<Problem>& call;
    int tasks;
    index_type first_row, rows;
    bool write, keep_in_y;

    void operator()(int task) const {
      const RowGeometry& g = call.problem.geometry;
      const Work work(call.problem, call.stream && !keep_in_y, false);
      const index_type chunks = SimdRowsPlan<A>::chunks(g.columns);
      const index_type begin = share(rows * chunks, task, tasks), end = share(rows * chunks, task + 1, tasks);
      for (index_type unit = begin; unit < end;) {
        const index_type r = unit / chunks;
        const RowAccess<Problem> row(call.problem, first_row + r);
        State<Problem>* states = call.states + r * chunks;
        A* kept = nullptr;
        if constexpr (Work::y_can_keep_exponentials) kept = keep_in_y ? row.y : nullptr;
        if (write) {
          const RowResult<A> result = work.joined(states);
          for (; unit < end && unit < (r + 1) * chunks; ++unit) {
            const index_type c = unit - r * chunks;
            work.write_chunk(row, c, states[c], result, call.stage(task), false, kept);
          }
        } else {
          for (; unit < end && unit < (r + 1) * chunks; ++unit) {
            const index_type c = unit - r * chunks;
            states[c] = work.reduce_chunk(row, c, call.stage(task), false, kept, row.x);
          }
        }
      }
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
      SharedRows<operation, direct, Problem> functor{call, tasks, first, rows, false, keep_in_y};
      launch_tasks(exec, call.label + "::reduce", tasks, functor);
      functor.write = true;
      if constexpr (operation == Operation::logsumexp) {
        launch_tasks(exec, call.label + "::write", 1, WriteLogsumexp<Problem>{call, first, rows});
      } else {
        launch_tasks(exec, call.label + "::write", tasks, functor);
      }
    }
  }

  template <class Problem>
  struct WriteLogsumexp {
    const Call<Problem>& call;
    index_type first_row, rows;
    void operator()(int) const {
      const SimdRowWork<Problem, Operation::logsumexp, false> work(call.problem, false, false);
      const index_type chunks = SimdRowsPlan<Acc<Problem>>::chunks(call.problem.geometry.columns);
      for (index_type r = 0; r < rows; ++r) {
        const RowAccess<Problem> row(call.problem, first_row + r);
        *row.y = store_as<typename Problem::Out>(work.joined(call.states + r * chunks).logsumexp());
      }
    }
  };

  template <Operation operation, class Problem>
  struct WholeTiles {
    const Call<Problem>& call;
    SimdTiles tiles;
    int tasks;
    void operator()(int task) const {
      for (index_type t = share(tiles.count, task, tasks); t < share(tiles.count, task + 1, tasks); ++t) {
        SimdTile<Problem, operation> tile(call.problem, tiles, t, call.stream);
        tile.whole(call.stage(task));
      }
      finish_streaming(call.stream);
    }
  };

  /// Chunks of the columns of tiles, in two launches.
  template <Operation operation, class Problem>
  struct SharedTiles {
    using A = typename Problem::Acc;
    const Call<Problem>& call;
    SimdTiles tiles;
    int tasks;
    bool write;
    void operator()(int task) const {
      const index_type chunks = SimdTilePlan<A>::chunks(call.problem.geometry.columns);
      // logsumexp has one value for all chunks of a tile.
      const index_type units_of_tile = write && operation == Operation::logsumexp ? 1 : chunks;
      const index_type units = tiles.count * units_of_tile, distance = index_type(3) * tiles.lanes;
      const index_type begin = share(units, task, tasks), end = share(units, task + 1, tasks);
      A* all_states = reinterpret_cast<A*>(call.states);
      for (index_type unit = begin; unit < end;) {
        const index_type t = unit / units_of_tile;
        SimdTile<Problem, operation> tile(call.problem, tiles, t, call.stream);
        A* states = all_states + t * chunks * distance;
        if (write) {
          tile.join(states, chunks, distance);
          tile.finish();
        }
        for (; unit < end && unit < (t + 1) * units_of_tile; ++unit) {
          const index_type c = unit - t * units_of_tile;
          if (!write) {
            tile.reduce_chunk(c, call.stage(task), states + c * distance);
          } else if constexpr (operation != Operation::logsumexp) {
            tile.write_chunk(c, call.stage(task));
          }
        }
      }
      finish_streaming(call.stream);
    }
  };

  template <Operation operation, class Exec, class Problem>
  static void run_tiles(const Exec& exec, const Problem& problem) {
    using A = Acc<Problem>;
    const Call<Problem> call(exec, problem);
    const SimdTiles tiles = SimdTiles::of(problem, call.threads);
    const index_type chunks = SimdTilePlan<A>::chunks(problem.geometry.columns);
    if (chunks == 1) {
      const int tasks = call.tasks(tiles.count);
      launch_tasks(exec, call.label, tasks, WholeTiles<operation, Problem>{call, tiles, tasks});
      return;
    }
    const int tasks = call.tasks(tiles.count * chunks);
    launch_tasks(exec, call.label + "::reduce", tasks,
                 SharedTiles<operation, Problem>{call, tiles, tasks, false});
    launch_tasks(exec, call.label + "::write", tasks,
                 SharedTiles<operation, Problem>{call, tiles, tasks, true});
  }
};

}  // namespace KokkosSoftmax::impl

#endif
