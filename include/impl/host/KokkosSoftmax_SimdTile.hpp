// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Rows side by side: the axis is not contiguous, a lane has a row, and a tile of neighbouring rows goes
/// through the columns together. (Many neighbours: KokkosSoftmax_SimdPipelinedTile.hpp; an array:
/// KokkosSoftmax_SimdPanel.hpp; few of them: KokkosSoftmax_SimdDense.hpp and KokkosSoftmax_SimdRuns.hpp.)

#ifndef KOKKOSSOFTMAX_SIMDTILE_HPP
#define KOKKOSSOFTMAX_SIMDTILE_HPP

#include <impl/host/KokkosSoftmax_SimdChunk.hpp>
#include <impl/host/KokkosSoftmax_SimdTransform.hpp>

#include <cstring>

namespace KokkosSoftmax::impl {

/// How an axis that is not contiguous is cut; what decides the bits depends on the length and the type alone.
template <class Acc>
struct SimdTilePlan {
  static constexpr int width = SimdOps<Acc>::width;
  /// Columns that have a maximum and a sum of their own.
  static constexpr int block = 32;
  /// Lanes that go through a block together: 16 KB, half of the smallest first-level cache.
  static constexpr int group = 512 / sizeof(Acc);
  static_assert(group % width == 0);
  /// A tile of exponentials waits in a cache: at least this many bytes of it, more where the threads share a
  /// large one, for memory gives and takes wide tiles faster.
  static constexpr std::size_t least_stage_bytes = std::size_t(512) << 10;
  /// 4 KB of a column, a page of memory.
  static constexpr int most_lanes = 4096 / sizeof(Acc);
  static constexpr int fewest_lanes = 128 / sizeof(Acc);
  /// Columns of which a tile of twice the fewest lanes fits; longer rows are read twice, in chunks.
  static constexpr index_type longest_staged =
      static_cast<index_type>(least_stage_bytes / (2 * fewest_lanes * sizeof(Acc)));
  static constexpr index_type chunk = 1024;
  static_assert(chunk % block == 0);

  /// Neighbours of which a run is an array of its own: of fewer even the pieces of two blocks would not fill
  /// a vector, of more a whole row's exponentials might not fit.
  static constexpr int fewest_of_dense = width >= 8 ? 2 : 3, most_of_dense = 2 * fewest_lanes - 1;

  static index_type chunks(index_type columns) {
    return columns <= longest_staged ? 1 : ceil_div(columns, chunk);
  }
  static index_type blocks(index_type columns) { return ceil_div(columns, block); }
  /// What a thread needs: the maximum and sum of each block; the exponentials, or those of one block. No less
  /// for longer rows.
  static constexpr index_type partials = 2 * (longest_staged / block) * most_lanes;
  static_assert(longest_staged >= chunk);
  static std::size_t scratch_bytes(index_type columns, std::size_t stage_bytes) {
    const auto whole =
        static_cast<std::size_t>(blocks(std::min(columns, longest_staged)) * block * (most_lanes + width));
    return partials * sizeof(Acc) + std::min(stage_bytes, whole * sizeof(Acc));
  }
  /// Longer rows, too, have all of `stage_bytes` up to here.
  static constexpr std::size_t room_of_long_rows =
      static_cast<std::size_t>(longest_staged * most_lanes) * sizeof(Acc);
};

/// Rows that a tile may have: what has room, their objects of the transform too.
template <class Problem>
index_type most_lanes_of(const Problem& problem) {
  constexpr int most = SimdTilePlan<typename Problem::Acc>::most_lanes;
  if constexpr (std::is_same_v<typename Problem::Transform, BoundIdentity>) {
    return most;
  } else {
    return std::min(most, problem.transform.most_rows());
  }
}

/// Rows that an array may have which is read and written as it lies there.
template <class Acc, bool identity>
inline constexpr int most_rows_of_panel = (identity ? 4 : 1) * SimdTilePlan<Acc>::most_lanes;

/// How the rows are grouped into tiles.
struct SimdTiles {
  bool wide;         ///< the rows of a tile are neighbours in x and y, and enough of them to fill vectors
  index_type inner;  ///< rows that are neighbours, or one
  int lanes;
  index_type of_inner;  ///< wide: tiles of neighbours
  int runs = 1;         ///< else: runs of neighbours in a tile
  index_type count;
  bool dense = false;  ///< a tile is a run of few neighbours whose columns continue each other in x and y

  /// wide: the first row of a tile.
  index_type first_row(index_type tile) const {
    const index_type run = tile / of_inner;
    return run * inner + (tile - run * of_inner) * lanes;
  }

  /// Runs of at least a vector of neighbours whose columns continue each other in x and y; none: no such.
  template <class Problem>
  static SimdTiles panels(const Problem& problem) {
    using Plan = SimdTilePlan<typename Problem::Acc>;
    const RowGeometry& g = problem.geometry;
    SimdTiles tiles{};
    const int fastest = g.rank - 1;
    if (fastest < 0 || g.x_stride[fastest] != 1 || g.y_stride[fastest] != 1) return tiles;
    tiles.inner = g.extent[fastest];
    if (g.x_column_stride != tiles.inner || g.y_column_stride != tiles.inner) return tiles;
    constexpr bool identity = std::is_same_v<typename Problem::Transform, BoundIdentity>;
    const index_type most = Plan::chunks(g.columns) == 1 && identity
                                ? index_type(most_rows_of_panel<typename Problem::Acc, true>)
                                : most_lanes_of(problem);
    if (tiles.inner < std::max(Plan::width, Plan::fewest_of_dense) || tiles.inner > most ||
        g.columns * tiles.inner < Plan::group * 4)
      return tiles;
    tiles.lanes = static_cast<int>(tiles.inner);
    tiles.count = g.rows / tiles.inner;
    return tiles;
  }

  template <class Problem>
  static SimdTiles of(const Problem& problem, int concurrency, std::size_t stage_bytes,
                      index_type most_lanes = SimdTilePlan<typename Problem::Acc>::most_lanes) {
    using Acc = typename Problem::Acc;
    using Plan = SimdTilePlan<Acc>;
    const RowGeometry& g = problem.geometry;
    SimdTiles tiles{};
    const int fastest = g.rank - 1;
    const bool adjacent = g.rank > 0 && g.x_stride[fastest] == 1 &&
                          (g.y_stride[fastest] == 1 || problem.operation == Operation::logsumexp);
    tiles.inner = adjacent ? g.extent[fastest] : 1;
    tiles.wide = tiles.inner >= Plan::fewest_lanes / 2;
    if (std::is_same_v<typename Problem::Transform, BoundIdentity> &&
        problem.operation != Operation::logsumexp && g.x_column_stride == tiles.inner &&
        g.y_column_stride == tiles.inner && tiles.inner >= Plan::fewest_of_dense &&
        tiles.inner <= Plan::most_of_dense && g.columns * tiles.inner >= Plan::group * 4 &&
        (g.rows / tiles.inner * Plan::chunks(g.columns) >= concurrency ||
         tiles.inner <= Plan::fewest_lanes)) {
      tiles.dense = true;
      tiles.lanes = static_cast<int>(tiles.inner);
      tiles.count = g.rows / tiles.inner;
      return tiles;
    }
    if (!tiles.wide) {
      const index_type all = g.rows / tiles.inner;
      // Long rows: what the states of chunks have room for.
      index_type runs = ceil_div(Plan::width, tiles.inner);
      if (Plan::chunks(g.columns) == 1) {
        const index_type lanes = 4 * Plan::group / tiles.inner;
        runs = std::min(lanes / Plan::blocks(g.columns), ceil_div(all, index_type(4) * concurrency));
      }
      runs = std::min(runs, most_lanes_of(problem) / tiles.inner);
      tiles.runs = static_cast<int>(std::clamp<index_type>(runs, 1, all));
      tiles.lanes = static_cast<int>(ceil_div(tiles.runs * tiles.inner, Plan::width) * Plan::width);
      tiles.count = ceil_div(all, tiles.runs);
      return tiles;
    }
    index_type most = std::min<index_type>(most_lanes, most_lanes_of(problem)), units = 1;
    if (Plan::chunks(g.columns) == 1) {
      most = std::min(
          most, static_cast<index_type>(stage_bytes / sizeof(Acc)) / (Plan::blocks(g.columns) * Plan::block) -
                    Plan::width);
    } else {
      units = Plan::chunks(g.columns);
    }
    constexpr int line = std::max(Plan::width, static_cast<int>(64 / sizeof(Acc)));
    most = most / Plan::fewest_lanes * Plan::fewest_lanes;
    // Enough of them for all threads, but no more than that where they are so narrow that threads get into
    // each other's way where their lines meet; of one size, so that none is left with a few rows.
    const index_type all = g.rows * units;
    const index_type enough =
        std::max(ceil_div(all, index_type(4) * concurrency),
                 std::min<index_type>(2 * Plan::fewest_lanes, ceil_div(all, index_type(concurrency))));
    const index_type least = ceil_div(tiles.inner, most), runs = g.rows / tiles.inner;
    index_type parts = std::max(least, tiles.inner / std::min(enough, most));
    // As many for each thread, where they are few.
    if (units == 1 && runs * parts < index_type(4) * concurrency)
      parts = std::max(least, std::max(runs * parts / concurrency, index_type(1)) * concurrency / runs);
    const index_type part = ceil_div(tiles.inner, parts);
    const int step = part >= Plan::group && most % Plan::group == 0 ? Plan::group : line;
    const index_type lanes = (part + (parts > 1 && step == Plan::group ? step / 2 : step - 1)) / step * step;
    tiles.lanes = static_cast<int>(lanes);
    tiles.of_inner = ceil_div(tiles.inner, lanes);
    tiles.count = tiles.of_inner * (g.rows / tiles.inner);
    return tiles;
  }
};

/// Columns to be fetched, so many bytes at a time, each column's lines one after the other: memory gives
/// those faster than lines of as many pages.
template <int bytes, bool for_writing>
struct ColumnsAhead {
  const char* p;
  index_type stride;  ///< bytes, as all
  int at = 0;
  KOKKOSSOFTMAX_HOST_FUNCTION void fetch(int of_column) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + at + i, for_writing, for_writing ? 3 : 2);
    at += bytes;
    if (at >= of_column) {
      p += stride;
      at = 0;
    }
  }
};

/// What lanes do with a block of columns, and with the sums of blocks.
template <class Problem, Operation operation>
class SimdLanes {
 protected:
  using Acc = typename Problem::Acc;
  using Ops = SimdOps<Acc>;
  using Vector = typename Ops::Vector;
  static constexpr int w = Ops::width;

  /// A vector of lanes in each of the columns of a block.
  struct ColumnsOfX {
    const typename Problem::In* x;
    index_type stride;
    KOKKOSSOFTMAX_HOST_FUNCTION Vector operator()(int c) const { return Ops::load(x + c * stride); }
  };
  struct ColumnsOfStage {
    const Acc* v;
    int stride;
    KOKKOSSOFTMAX_HOST_FUNCTION Vector operator()(int c) const { return Ops::load(v + c * stride); }
  };

  /// Exponentials and sums of a block of columns, for a vector of lanes.
  template <bool keep, class Source, class Next>
  KOKKOSSOFTMAX_HOST_FUNCTION static void add_block(const Source& source, Acc* v, int distance, int columns,
                                                    const Acc* max, Acc* sum_of_block, Next& next) {
    const Vector m = Ops::load(max);
    const auto one = [&](int c) __attribute__((always_inline)) {
      const Vector e = exp_of_vector_difference<Ops>(source(c) - m);
      if constexpr (keep) Ops::store(v + c * distance, e);
      next.fetch();
      return e;
    };
    Vector sum;
    int c = 0;
    if constexpr (operation == Operation::logsumexp) {
      CompensatedVector<Acc> total;
      for (; c + 2 <= columns; c += 2) total.add(one(c) + one(c + 1));
      if (c < columns) total.add(one(c));
      sum = total.sum + total.low;
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
      sum = (a0 + a1) + (a2 + a3);
    }
    Ops::store(sum_of_block, sum);
  }

  /// Maxima of so many vectors of lanes to `maxima`, as MaxSum keeps them; whether one was +inf.
  KOKKOSSOFTMAX_HOST_FUNCTION static bool keep_maxima(const Vector* m, int vectors, Acc* maxima) {
    Vector top(-infinity_v<Acc>);
    for (int k = 0; k < vectors; ++k) {
      top = Ops::larger(m[k], top);
      Ops::store(maxima + k * w, finite(m[k]));
    }
    return Ops::max(top) == infinity_v<Acc>;
  }

  /// A maximum as MaxSum keeps it.
  KOKKOSSOFTMAX_HOST_FUNCTION static Vector finite(const Vector& max) {
    return Ops::larger(Vector(-largest_v<Acc>), Ops::smaller(Vector(largest_v<Acc>), max));
  }

  /// [max of each lane, sum of each lane] to `state`.
  static void keep_state(Acc* state, const Acc* max, const Acc* sum, index_type lanes) {
    std::memcpy(state, max, static_cast<std::size_t>(lanes) * sizeof(Acc));
    std::memcpy(state + lanes, sum, static_cast<std::size_t>(lanes) * sizeof(Acc));
  }

  /// From the sums of so many lanes to what the last formula takes; logsumexp: to the result.
  static void finish_sums(const Acc* max, Acc* sum, int lanes) {
    for (int l = 0; l < lanes; l += w) {
      const Vector v = Ops::load(sum + l);
      if constexpr (operation == Operation::softmax) {
        Ops::store(sum + l, factor_of_vector_sum<Ops>(v));
      } else if constexpr (operation == Operation::log_softmax) {
        Ops::store(sum + l, log_of_vector_sum<Ops>(v, Acc(0), nan_v<Acc>));
      } else {
        Ops::store(sum + l,
                   Ops::load(max + l) + log_of_vector_sum<Ops>(v, -infinity_v<Acc>, infinity_v<Acc>));
      }
    }
  }

  /// Of an infinite sum the rounding errors are NaN: it speaks for itself.
  KOKKOSSOFTMAX_HOST_FUNCTION static Vector sum_without_nan(const CompensatedVector<Acc>& sum) {
    return sum.sum + Ops::select(sum.low == sum.low, sum.low, Vector(Acc(0)));
  }

  /// Of a row's sum. (Rounded, for whether the compiler would fuse the product with the addition depends on
  /// what is around it.)
  KOKKOSSOFTMAX_HOST_FUNCTION static Vector share_of_block(const Vector& sum, const Vector& factor) {
    return rounded_product_of_vectors<Ops>(sum, factor);
  }

  struct MaxAndSum {
    Vector max, sum;
  };
  /// Of a vector of lanes, [max, sum] over `count` of them, in order; a sum is `to_sum` behind its maximum.
  /// With `factors`, what a sum was multiplied by takes the place of its maximum.
  template <bool factors, class States>
  KOKKOSSOFTMAX_HOST_FUNCTION static MaxAndSum merge_vector(States* states, index_type to_sum,
                                                            index_type count, index_type distance) {
    Vector max = Ops::load(states);
    for (index_type i = 1; i < count; ++i) max = Ops::larger(Ops::load(states + i * distance), max);
    CompensatedVector<Acc> sum;
    for (index_type i = 0; i < count; ++i) {
      States* const state = states + i * distance;
      const Vector factor = exp_of_vector_difference<Ops>(Ops::load(state) - max);
      sum.add(share_of_block(Ops::load(state + to_sum), factor));
      if constexpr (factors) Ops::store(state, factor);
    }
    return {max, sum_without_nan(sum)};
  }
  /// [max, sum] of each lane over `count` of them, in order.
  template <bool factors = false, class States>
  static void merge(States* states, int lanes, index_type count, index_type distance, Acc* max_of_row,
                    Acc* sum_of_row) {
    for (int l = 0; l < lanes; l += w) {
      const MaxAndSum merged = merge_vector<factors>(states + l, lanes, count, distance);
      Ops::store(max_of_row + l, merged.max);
      Ops::store(sum_of_row + l, merged.sum);
    }
  }
};

/// Neighbouring rows side by side, a lane each. A block of columns is loaded, with its maximum in every lane;
/// while it is in the first-level cache its exponentials to that maximum and their sum are formed and the
/// next block is fetched; in the end an output is exponential * factor of its block.
template <class Problem, Operation operation>
class SimdTile : protected SimdLanes<Problem, operation> {
 protected:
  using Lanes = SimdLanes<Problem, operation>;
  using Lanes::w;
  using typename Lanes::ColumnsOfStage;
  using typename Lanes::ColumnsOfX;

 public:
  using Acc = typename Problem::Acc;
  using In = typename Problem::In;
  using Out = typename Problem::Out;
  using Ops = SimdOps<Acc>;
  using Vector = typename Ops::Vector;
  using Plan = SimdTilePlan<Acc>;
  static constexpr int most = Plan::most_lanes;
  static constexpr bool identity = std::is_same_v<typename Problem::Transform, BoundIdentity>;

  SimdTile(const Problem& problem, const SimdTiles& tiles, index_type tile, bool stream)
      : problem_(problem), stream_(stream) {
    const index_type first = tiles.first_row(tile);
    lanes_ = static_cast<int>(std::min<index_type>(tiles.lanes, tiles.inner - first % tiles.inner));
    padded_ = (lanes_ + w - 1) / w * w;
    group_ = std::min(padded_, Plan::group);
    groups_ = (padded_ + group_ - 1) / group_;
    pitch_ = groups_ > 1 ? padded_ + w : padded_;
    const RowGeometry::Row row = problem.geometry.row(first);
    x_offset_ = row.x_offset;
    y_offset_ = row.y_offset;
    if constexpr (!identity) {
      problem.transform.make_rows(row.index, problem.geometry.row_weight[problem.geometry.rank - 1], lanes_,
                                  row_objects_);
    }
  }

  /// Rows that wait in `scratch` as a whole.
  void whole(Acc* scratch) {
    const index_type columns = problem_.geometry.columns, blocks = Plan::blocks(columns);
    Acc *partials = scratch, *stage = scratch + Plan::partials;
    reduce(0, columns, stage, staged, partials);
    Lanes::template merge<operation == Operation::softmax>(partials, padded_, blocks, 2 * padded_, max_,
                                                           sum_);
    finish();
    if constexpr (staged) {
      write_staged(stage, partials);
    } else if constexpr (operation == Operation::log_softmax) {
      write_columns(0, columns, stage);
    }
  }

  /// [max of each lane, sum of each lane] of one chunk of long rows.
  void reduce_chunk(index_type chunk, Acc* scratch, Acc* state) {
    const index_type begin = chunk * Plan::chunk,
                     end = std::min(begin + Plan::chunk, problem_.geometry.columns);
    Acc* partials = scratch;
    reduce(begin, end, scratch + Plan::partials, false, partials);
    Lanes::merge(partials, padded_, Plan::blocks(end - begin), 2 * padded_, max_, sum_);
    Lanes::keep_state(state, max_, sum_, padded_);
  }

  void join(const Acc* states, index_type chunks, index_type distance) {
    Lanes::merge(states, padded_, chunks, distance, max_, sum_);
  }

  /// From the sums to what the last formula takes; writes logsumexp.
  void finish() {
    Lanes::finish_sums(max_, sum_, lanes_);
    if constexpr (operation == Operation::logsumexp) {
      const RowGeometry& g = problem_.geometry;
      const index_type distance = g.y_stride[g.rank - 1];
      for (int l = 0; l < lanes_; ++l)
        problem_.y[y_offset_ + l * distance] = Ops::template rounded<Out>(sum_[l]);
    }
  }

  void write_chunk(index_type chunk, Acc* scratch) {
    const index_type begin = chunk * Plan::chunk;
    write_columns(begin, std::min(begin + Plan::chunk, problem_.geometry.columns), scratch);
  }

 protected:
  const In* x_column(index_type c) const {
    return problem_.x + x_offset_ + c * problem_.geometry.x_column_stride;
  }

  /// What `whole` keeps to make outputs of: exponentials, or logits that were transformed.
  static constexpr bool staged =
      operation == Operation::softmax || (operation == Operation::log_softmax && !identity);

  /// Transformed logits of so many columns of a vector of lanes from l on, filled up with -inf, to `to`; the
  /// largest.
  Vector transformed(index_type begin, int columns, int l, Acc* to, index_type distance) const {
    return problem_.transform(row_objects_, l, begin, std::min(w, lanes_ - l), columns, x_column(begin) + l,
                              problem_.geometry.x_column_stride, to, distance);
  }

  struct PartOfX {
    const In* x;
    index_type stride;
    int count;
    KOKKOSSOFTMAX_HOST_FUNCTION Vector operator()(int c) const {
      return Ops::load_part(x + c * stride, count, -infinity_v<Acc>);
    }
  };
  /// A line of them, or less, with each vector.
  struct NextColumns {
    ColumnsAhead<std::min(64, static_cast<int>(sizeof(In)) * w), false> columns;
    int of_column;
    KOKKOSSOFTMAX_HOST_FUNCTION void fetch() { columns.fetch(of_column); }
  };

  /// The blocks of [begin, end): their [max, sum] of each lane in `partials`; exponentials, or the logits of
  /// log_softmax, in `stage`, of all blocks one after the other if `keep`.
  void reduce(index_type begin, index_type end, Acc* stage, bool keep, Acc* partials) {
    any_infinite_ = false;
    for (index_type b = begin; b < end; b += Plan::block, partials += 2 * padded_) {
      const int columns = static_cast<int>(std::min<index_type>(Plan::block, end - b));
      for (int g = 0; g < groups_; ++g) {
        const int first = g * group_, last = std::min(first + group_, lanes_);
        Acc* v = stage + (keep ? (b - begin) * pitch_ : 0) + first;
        load_block(b, columns, first, last, v, partials + first);
        // What comes next: the next lanes of these columns, or the next columns.
        NextColumns next{{reinterpret_cast<const char*>(problem_.x + x_offset_), 0}, 0};
        if (g + 1 < groups_ || b + 2 * Plan::block <= end) {
          const In* x = g + 1 < groups_ ? x_column(b) + first + group_ : x_column(b + Plan::block);
          next = NextColumns{{reinterpret_cast<const char*>(x),
                              problem_.geometry.x_column_stride * static_cast<index_type>(sizeof(In))},
                             std::min(group_, lanes_) * static_cast<int>(sizeof(In))};
        }
        for (int l = 0; l < last - first; l += w) {
          Acc* const max = partials + first + l;
          const auto add = [&](const auto& source) __attribute__((always_inline)) {
            if (keep && operation == Operation::softmax) {
              Lanes::template add_block<true>(source, v + l, pitch_, columns, max, max + padded_, next);
            } else {
              Lanes::template add_block<false>(source, v + l, pitch_, columns, max, max + padded_, next);
            }
          };
          if (identity && l + w <= last - first) {
            add(ColumnsOfX{x_column(b) + first + l, problem_.geometry.x_column_stride});
          } else if (identity) {
            add(PartOfX{x_column(b) + first + l, problem_.geometry.x_column_stride, last - first - l});
          } else {
            add(ColumnsOfStage{v + l, pitch_});
          }
        }
      }
    }
    if (any_infinite_) mark_infinite(begin, end, partials - 2 * Plan::blocks(end - begin) * padded_);
  }

  /// Logits of a group of lanes to `v`, and their maxima, finite as MaxSum keeps them.
  void load_block(index_type begin, int columns, int first, int last, Acc* v, Acc* maxima) {
    const int vectors = (last - first + w - 1) / w;
    constexpr int all = Plan::group / w;
    Vector m[all];
    if constexpr (identity) {
      for (int k = 0; k < all; ++k) m[k] = Vector(-infinity_v<Acc>);
      const In* x = x_column(begin) + first;
      const index_type stride = problem_.geometry.x_column_stride;
      if (last - first == Plan::group) {
        for (int c = 0; c < columns; ++c, x += stride) {
          for (int k = 0; k < all; ++k) m[k] = Ops::larger(Ops::load(x + k * w), m[k]);
        }
      } else {
        // Runs of half as many vectors, whose maxima stay in registers too, then single ones.
        constexpr int half = all / 2;
        const int whole = (last - first) / w, rest = (last - first) % w;
        int k = 0;
        if (whole >= half) {
          for (int c = 0; c < columns; ++c) {
            for (int i = 0; i < half; ++i) m[i] = Ops::larger(Ops::load(x + c * stride + i * w), m[i]);
          }
          k = half;
        }
        for (; k < whole; ++k) {
          Vector one(-infinity_v<Acc>);
          for (int c = 0; c < columns; ++c) one = Ops::larger(Ops::load(x + c * stride + k * w), one);
          m[k] = one;
        }
        for (int c = 0; rest > 0 && c < columns; ++c) {
          m[whole] =
              Ops::larger(Ops::load_part(x + c * stride + whole * w, rest, -infinity_v<Acc>), m[whole]);
        }
      }
    } else {
      for (int k = 0; k < vectors; ++k) m[k] = transformed(begin, columns, first + k * w, v + k * w, pitch_);
    }
    any_infinite_ = Lanes::keep_maxima(m, vectors, maxima) || any_infinite_;
  }

  /// exp of a vector makes NaN of +inf: where there was no NaN, the sum is +inf.
  [[gnu::noinline]] void mark_infinite(index_type begin, index_type end, Acc* partials) const {
    for (index_type b = begin; b < end; b += Plan::block, partials += 2 * padded_) {
      const int columns = static_cast<int>(std::min<index_type>(Plan::block, end - b));
      for (int first = 0; first < lanes_; first += w) {
        if (std::find(partials + first, partials + first + w, largest_v<Acc>) == partials + first + w)
          continue;
        bool nan[w] = {}, infinite[w] = {};
        alignas(64) Acc logits[Plan::block * w];
        if constexpr (identity) {
          for (int c = 0; c < columns; ++c)
            for (int l = 0; l < w; ++l)
              logits[c * w + l] = first + l < lanes_ ? load_as<Acc>(x_column(b + c)[first + l]) : Acc(0);
        } else {
          transformed(b, columns, first, logits, w);
        }
        for (int i = 0; i < columns * w; ++i) {
          nan[i % w] = nan[i % w] || logits[i] != logits[i];
          infinite[i % w] = infinite[i % w] || logits[i] == infinity_v<Acc>;
        }
        for (int l = 0; l < w; ++l) {
          if (infinite[l] && !nan[l]) partials[padded_ + first + l] = infinity_v<Acc>;
        }
      }
    }
  }

  /// Outputs of what is in `stage`; softmax: `partials` has the factors of blocks where their maxima were.
  void write_staged(Acc* stage, Acc* partials) {
    const index_type columns = problem_.geometry.columns, y_stride = problem_.geometry.y_column_stride;
    // Not where columns continue each other, nor where they share a few sets of the first-level cache, which
    // lines that wait there to be written would fill.
    const bool fetch =
        !stream_ && y_stride != lanes_ && y_stride * static_cast<index_type>(sizeof(Out)) % 2048 != 0;
    for (index_type b = 0; b < columns; b += Plan::block, partials += 2 * padded_) {
      const int of_block = static_cast<int>(std::min<index_type>(Plan::block, columns - b));
      for (int l = 0; operation == Operation::softmax && l < padded_; l += w) {
        Ops::store(partials + l, Ops::load(partials + l) * Ops::load(sum_ + l));
      }
      for (int c = 0; c < of_block; ++c, stage += pitch_) {
        if (fetch) fetch_for_writing(b + c + 8);
        store(
            StagedValues<Acc>{stage},
            b + c, [&](const Vector& v, index_type l) __attribute__((always_inline)) {
              if constexpr (operation == Operation::softmax) {
                return v * Ops::load(partials + l);
              } else {
                return (v - Ops::load(max_ + l)) - Ops::load(sum_ + l);
              }
            });
      }
    }
  }

  /// A page a column: what the processor fetches of itself ends at a page.
  KOKKOSSOFTMAX_HOST_FUNCTION void fetch_for_writing(index_type c) const {
    const Out* y = problem_.y + y_offset_ +
                   std::min(c, problem_.geometry.columns - 1) * problem_.geometry.y_column_stride;
    for (int l = 0; l < lanes_; l += static_cast<int>(64 / sizeof(Out))) __builtin_prefetch(y + l, 1, 3);
  }

  /// Outputs from the logits, read once more.
  void write_columns(index_type begin, index_type end, Acc* scratch) {
    const auto formula = [&](const Vector& v, index_type i) __attribute__((always_inline)) {
      const Vector difference = v - Ops::load(max_ + i);
      if constexpr (operation == Operation::softmax) {
        return exp_of_vector_difference<Ops>(difference) * Ops::load(sum_ + i);
      } else {
        return difference - Ops::load(sum_ + i);
      }
    };
    if constexpr (identity) {
      for (index_type c = begin; c < end; ++c) {
        // What the processor fetches of itself ends at a page: a column may lie in others than the one
        // before.
        const In* next = x_column(std::min(c + 1, end - 1));
        store(
            LogitsInMemory<Acc, In>{x_column(c)},
            c, [&](const Vector& v, index_type i) __attribute__((always_inline)) {
              __builtin_prefetch(next + i, 0, 2);
              return formula(v, i);
            });
      }
    } else {
      for (index_type b = begin; b < end; b += Plan::block) {
        const int columns = static_cast<int>(std::min<index_type>(Plan::block, end - b));
        for (int l = 0; l < lanes_; l += w) transformed(b, columns, l, scratch + l, pitch_);
        for (int c = 0; c < columns; ++c) store(StagedValues<Acc>{scratch + c * pitch_}, b + c, formula);
      }
    }
  }

  /// A column of outputs.
  template <class Source, class Formula>
  KOKKOSSOFTMAX_HOST_FUNCTION void store(const Source& source, index_type c, const Formula& formula) {
    Out* y = problem_.y + c * problem_.geometry.y_column_stride;
    chunk_write<Acc>(source, lanes_, y + y_offset_, stream_, formula);
  }

  const Problem& problem_;
  bool stream_, any_infinite_ = false;
  int lanes_, padded_;
  int group_, groups_;  ///< lanes of a group, groups of a tile
  int pitch_;  ///< from column to column in scratch: no power of two, which would fill sets of a cache
  index_type x_offset_, y_offset_;
  alignas(index_type) unsigned char row_objects_[identity ? 1 : bytes_of_row_objects];
  alignas(64) Acc max_[most + w], sum_[most + w];
};

}  // namespace KokkosSoftmax::impl

#endif
