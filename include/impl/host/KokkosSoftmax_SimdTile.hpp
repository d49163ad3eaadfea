// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Rows side by side: the axis is not contiguous, a lane has a row, and a tile of neighbouring rows goes
/// through the columns together.

#ifndef KOKKOSSOFTMAX_SIMDTILE_HPP
#define KOKKOSSOFTMAX_SIMDTILE_HPP

#include <impl/host/KokkosSoftmax_SimdChunk.hpp>

namespace KokkosSoftmax::impl {

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

}  // namespace KokkosSoftmax::impl

#endif
