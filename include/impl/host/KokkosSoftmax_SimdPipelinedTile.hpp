// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Rows side by side, many of them: tiles one after the other, each reduced while the one before is written,
/// so that exponentials and memory do not wait for each other (1024 x 1024 floats in cache: 1.2 times
/// the speed of one after the other; 4096 x 16384: 1.2 to 1.7 times, and x is read from memory once). What
/// waits to be written lies in the order in which it is worked on, and each of it gives its place to one of
/// the next tile: one stream through the cache, wherever the columns lie. Logits are copied to the
/// first-level cache when their maxima are taken: where columns are a power of two apart they share a few
/// sets of the caches, which do not keep a block of them. The bits are those of a tile
/// (KokkosSoftmax_SimdTile.hpp).

#ifndef KOKKOSSOFTMAX_SIMDPIPELINEDTILE_HPP
#define KOKKOSSOFTMAX_SIMDPIPELINEDTILE_HPP

#include <impl/host/KokkosSoftmax_SimdTile.hpp>

#include <algorithm>

namespace KokkosSoftmax::impl {

template <class Problem, Operation operation>
class SimdPipelinedTile : SimdTile<Problem, operation> {
  using Tile = SimdTile<Problem, operation>;
  using Lanes = SimdLanes<Problem, operation>;
  using Lanes::w;
  using Tile::any_infinite_;
  using Tile::identity;
  using Tile::lanes_;
  using Tile::max_;
  using Tile::padded_;
  using Tile::problem_;
  using Tile::stream_;
  using Tile::sum_;
  using Tile::x_column;
  using Tile::x_offset_;
  using Tile::y_offset_;

 public:
  using typename Tile::Acc;
  using typename Tile::In;
  using typename Tile::Ops;
  using typename Tile::Out;
  using typename Tile::Plan;
  using typename Tile::Vector;

  /// What the tiles of a thread share.
  struct OfThread {
    alignas(64) Acc packed[Plan::block * Plan::group];  ///< logits of a block and a group of lanes
    alignas(64) Acc sums[4 * Plan::group];              ///< of a block that is not through
  };

  /// Tiles of at least a group of lanes whose values fit: of whole lines, and of one size but for the last.
  /// None: too few for the threads.
  static SimdTiles tiles(const Problem& problem, int concurrency, std::size_t stage_bytes, bool stream) {
    const RowGeometry& g = problem.geometry;
    SimdTiles tiles{};
    const int fastest = g.rank - 1;
    if (fastest < 0 || g.x_stride[fastest] != 1 || g.y_stride[fastest] != 1) return tiles;
    if (stream && !has_whole_lines(problem)) return tiles;
    tiles.wide = true;
    tiles.inner = g.extent[fastest];
    const index_type columns = Plan::blocks(g.columns) * Plan::block;
    const auto fit = [&](std::size_t bytes) {
      return static_cast<index_type>(bytes / sizeof(Acc)) / columns / Plan::group * Plan::group;
    };
    const index_type most = std::min({fit(stage_bytes), std::max<index_type>(fit(second_level), Plan::group),
                                      index_type(Plan::most_lanes)});
    if (most < Plan::group || tiles.inner < Plan::group) return tiles;
    const index_type enough = std::max<index_type>(g.rows / (index_type(fewest_tiles) * concurrency), 1);
    const index_type parts = ceil_div(tiles.inner, std::min(most, std::max<index_type>(enough, Plan::group)));
    const index_type lanes = ceil_div(ceil_div(tiles.inner, parts), index_type(Plan::group)) * Plan::group;
    tiles.lanes = static_cast<int>(lanes);
    tiles.of_inner = ceil_div(tiles.inner, lanes);
    tiles.count = tiles.of_inner * (g.rows / tiles.inner);
    if (tiles.count < index_type(2) * concurrency) tiles.count = 0;
    return tiles;
  }

  SimdPipelinedTile(const Problem& problem, const SimdTiles& tiles, index_type tile, bool stream)
      : Tile(problem, tiles, tile, stream),
        pitch_(tiles.lanes),
        chunks_(Plan::chunks(problem.geometry.columns)) {}

  /// Reduces this tile and writes the one `before`, if there is one, whose values are in `stage`, where this
  /// tile's take their place. `partials` of the two differ. `next` comes after this one.
  void reduce_and_write(const SimdPipelinedTile* before, Acc* stage, Acc* partials, OfThread& of_thread,
                        const In* next) {
    const index_type columns = problem_.geometry.columns;
    partials_ = partials;
    Acc* const states = partials + 2 * padded_ * Plan::blocks(chunks_ == 1 ? columns : Plan::chunk);
    for (index_type chunk = 0; chunk < chunks_; ++chunk) {
      const index_type begin = chunk * Plan::chunk,
                       end = chunks_ == 1 ? columns : std::min(begin + Plan::chunk, columns);
      any_infinite_ = false;
      Acc* of_block = partials;
      for (index_type b = begin; b < end; b += Plan::block, of_block += 2 * padded_) {
        const int of_columns = static_cast<int>(std::min<index_type>(Plan::block, end - b));
        for (int first = 0; first < pitch_; first += Plan::group) {
          Acc* const values = stage + b * pitch_ + first * Plan::block;
          if (first < lanes_) pack(b, of_columns, first, of_block + first, of_thread.packed);
          const AheadInX ahead = ahead_of(b, first, next);
          const Block block{b, of_columns, first, of_block + first, of_thread};
          const auto go = [&]<bool writes, bool keeps>() __attribute__((always_inline)) {
            if (writes && streams_lines && stream_) {
              exchange<writes, keeps, writes && streams_lines>(before, block, values, ahead);
            } else {
              exchange<writes, keeps, false>(before, block, values, ahead);
            }
          };
          if (keeps_exponentials()) {
            before != nullptr ? go.template operator()<true, true>() : go.template operator()<false, true>();
          } else {
            before != nullptr ? go.template operator()<true, false>()
                              : go.template operator()<false, false>();
          }
        }
      }
      if (any_infinite_) Tile::mark_infinite(begin, end, partials);
      const index_type blocks = Plan::blocks(end - begin);
      if (keeps_exponentials()) {
        Lanes::template merge<true>(partials, padded_, blocks, 2 * padded_, max_, sum_);
      } else {
        Lanes::merge(partials, padded_, blocks, 2 * padded_, max_, sum_);
      }
      if (chunks_ > 1) Lanes::keep_state(states + chunk * 2 * padded_, max_, sum_, padded_);
    }
    if (chunks_ > 1) Lanes::merge(states, padded_, chunks_, 2 * padded_, max_, sum_);
    Lanes::finish_sums(max_, sum_, lanes_);
    if (keeps_exponentials()) find_factors();
  }

  /// Writes this tile, the last one of a thread.
  void write(const Acc* stage) const {
    const index_type columns = problem_.geometry.columns;
    for (index_type b = 0; b < columns; b += Plan::block) {
      const int of_columns = static_cast<int>(std::min<index_type>(Plan::block, columns - b));
      for (int first = 0; first < lanes_; first += Plan::group) {
        const Acc* values = stage + b * pitch_ + first * Plan::block;
        const int vectors = vectors_of_group(first);
        for (int c = 0; c < of_columns; c += part, values += part * vectors * w) {
          const int count = std::min(part, of_columns - c);
          for (int l = 0; l < std::min(lanes_ - first, Plan::group); l += w) {
            if (keeps_exponentials()) {
              write_vector<true>(outputs_of<true>(b, first), c, count, l, lanes_ - first, values + l * part);
            } else {
              write_vector<false>(outputs_of<false>(b, first), c, count, l, lanes_ - first,
                                  values + l * part);
            }
          }
        }
      }
    }
  }

 private:
  /// Columns that a vector of lanes goes through before the next one does: as many lines of other pages are
  /// open at a time.
  static constexpr int part = 8;
  /// Values of a tile that stay in a thread's second-level cache (a probe, 1024 x 4096 floats: 128 lanes 69
  /// GB/s, 256 lanes 64, 512 lanes 54), unless a group needs more.
  static constexpr std::size_t second_level = std::size_t(512) << 10;
  /// Half of the scratch has room for [max, sum] of each block of the widest tile.
  static_assert(2 * std::max<index_type>(second_level / (sizeof(Acc) * Plan::block),
                                         Plan::group* Plan::longest_staged / Plan::block) <=
                Plan::partials / 2);
  /// Of a thread: the first is not written beside another one's exponentials, nor the last one reduced.
  static constexpr int fewest_tiles = 4;

  /// Vectors that are stored together: a line, if it is to go past the caches.
  static constexpr int vectors_of_line = std::max(1, static_cast<int>(64 / (w * sizeof(Out))));
  /// More than two, with the sums of each, would not stay in registers.
  static constexpr bool streams_lines = vectors_of_line <= 2;
  /// Whether a line of y belongs to one tile: to fill it in two goes past the caches would cost more than
  /// all that is gained here.
  static bool has_whole_lines(const Problem& problem) {
    const RowGeometry& g = problem.geometry;
    const auto whole = [](index_type stride) {
      return stride * static_cast<index_type>(sizeof(Out)) % 64 == 0;
    };
    bool all =
        streams_lines && reinterpret_cast<std::uintptr_t>(problem.y) % 64 == 0 && whole(g.y_column_stride);
    for (int d = 0; d + 1 < g.rank; ++d) all = all && whole(g.y_stride[d]);
    return all;
  }

  bool keeps_exponentials() const { return operation == Operation::softmax && chunks_ == 1; }

  /// Of the lanes that a tile has places for.
  KOKKOSSOFTMAX_HOST_FUNCTION int vectors_of_group(int first) const {
    return std::min(pitch_ - first, Plan::group) / w;
  }

  /// Columns and a group of lanes.
  struct Block {
    index_type begin;
    int columns, first;
    Acc* maxima;  ///< of the lanes; their sums are behind those of all lanes
    OfThread& of_thread;
  };
  /// Where the outputs of a group of lanes go, and what makes them of values.
  struct Outputs {
    Out* y;
    index_type distance;
    const Acc *max, *sum;
  };
  template <bool keeps>
  Outputs outputs_of(index_type begin, int first) const {
    return {problem_.y + y_offset_ + begin * problem_.geometry.y_column_stride + first,
            problem_.geometry.y_column_stride, max_ + first,
            keeps ? partials_ + begin / Plan::block * 2 * padded_ + first : sum_ + first};
  }
  /// Of a vector of lanes.
  template <bool keeps>
  struct OutputOfLanes {
    Vector max, sum;
    KOKKOSSOFTMAX_HOST_FUNCTION OutputOfLanes(const Outputs& outputs, int l)
        : max(Ops::load(outputs.max + l)), sum(Ops::load(outputs.sum + l)) {}
    KOKKOSSOFTMAX_HOST_FUNCTION Vector operator()(const Vector& v) const {
      if constexpr (keeps) {
        return v * sum;
      } else if constexpr (operation == Operation::softmax) {
        return exp_of_vector_difference<Ops>(v - max) * sum;
      } else {
        return (v - max) - sum;
      }
    }
  };
  /// Columns of a group of lanes that are to be fetched: with each vector of lanes `part` of its size.
  template <class T, bool for_writing>
  struct Ahead {
    static constexpr int size = static_cast<int>(sizeof(T));
    ColumnsAhead<std::max(size* w* part, 64), for_writing> columns;
    Ahead(const T* first, index_type distance)
        : columns{reinterpret_cast<const char*>(first), distance * size} {}
    KOKKOSSOFTMAX_HOST_FUNCTION void fetch() { columns.fetch(size * Plan::group); }
  };
  /// Logits: the next lanes of these columns, or the next columns, or the next tile.
  using AheadInX = Ahead<In, false>;
  AheadInX ahead_of(index_type b, int first, const In* next) const {
    const In* x = next;
    if (first + Plan::group < lanes_) {
      x = x_column(b) + first + Plan::group;
    } else if (b + Plan::block < problem_.geometry.columns) {
      x = x_column(b + Plan::block);
    }
    return {x, problem_.geometry.x_column_stride};
  }

  /// Logits of a block and a group of lanes to `to`, and their maxima, finite as MaxSum keeps them.
  void pack(index_type begin, int columns, int first, Acc* maxima, Acc* to) {
    const int last = std::min(first + Plan::group, lanes_);
    const index_type stride = problem_.geometry.x_column_stride;
    const In* const x = x_column(begin) + first;
    if constexpr (!identity) {
      Vector m[Plan::group / w];
      for (int l = first; l < last; l += w)
        m[(l - first) / w] = Tile::transformed(begin, columns, l, to + l - first, Plan::group);
      any_infinite_ = Lanes::keep_maxima(m, (last - first + w - 1) / w, maxima) || any_infinite_;
      return;
    }
    if (last - first == Plan::group) {
      return pack_vectors<Plan::group / w>(
          [&](int c, int k) __attribute__((always_inline)) { return Ops::load(x + c * stride + k * w); },
          columns, maxima, to);
    }
    for (int l = 0; l < last - first; l += w) {
      const int rest = last - first - l;
      pack_vectors<1>(
          [&](int c, int) __attribute__((always_inline)) {
            const In* const p = x + c * stride + l;
            return rest >= w ? Ops::load(p) : Ops::load_part(p, rest, -infinity_v<Acc>);
          },
          columns, maxima + l, to + l);
    }
  }
  template <int vectors, class Source>
  KOKKOSSOFTMAX_HOST_FUNCTION void pack_vectors(const Source& source, int columns, Acc* maxima, Acc* to) {
    Vector m[vectors];
    for (int k = 0; k < vectors; ++k) m[k] = Vector(-infinity_v<Acc>);
    for (int c = 0; c < columns; ++c, to += Plan::group) {
      for (int k = 0; k < vectors; ++k) {
        const Vector v = source(c, k);
        m[k] = Ops::larger(v, m[k]);
        Ops::store(to + k * w, v);
      }
    }
    any_infinite_ = Lanes::keep_maxima(m, vectors, maxima) || any_infinite_;
  }

  /// The packed logits of a block and a group of lanes to `values`, as exponentials if it `keeps` those, and
  /// their sums; what was there to y.
  template <bool writes, bool keeps, bool streams>
  void exchange(const SimdPipelinedTile* before, const Block& block, Acc* values, AheadInX next) {
    constexpr int together = streams ? vectors_of_line : 1;
    const int vectors = vectors_of_group(block.first), last = block.first + vectors * w;
    const bool whole = last <= lanes_ && (!writes || last <= before->lanes_) && vectors % together == 0;
    Outputs outputs{};
    if constexpr (writes) outputs = before->template outputs_of<keeps>(block.begin, block.first);
    // What is written next, too: a store to a line that no cache has holds up those behind it.
    Ahead<Out, true> in_y(outputs.y + part * outputs.distance, outputs.distance);
    for (int c = 0; c < block.columns; c += part, values += part * vectors * w) {
      const int count = std::min(part, block.columns - c);
      if (!whole || count < part) {
        exchange_parts<writes, keeps>(outputs, writes ? before->lanes_ - block.first : 0, block, c, count,
                                      values);
        continue;
      }
      for (int k = 0; k < vectors; k += together) {
        for (int i = 0; i < together; ++i) next.fetch();
        if constexpr (writes && !streams) in_y.fetch();
        add<writes, keeps, streams, true>(outputs, block, c, part, k, values + k * part * w);
      }
    }
  }
  /// The same where some vectors are not whole, or not all columns are there.
  template <bool writes, bool keeps>
  [[gnu::noinline]] void exchange_parts(const Outputs& outputs, int written, const Block& block, int c,
                                        int count, Acc* values) {
    for (int k = 0; k < vectors_of_group(block.first); ++k, values += part * w) {
      if (k * w < written) write_vector<keeps>(outputs, c, count, k * w, written, values);
      if (block.first + k * w < lanes_) add<false, keeps, false, false>(outputs, block, c, count, k, values);
    }
  }

  struct Sums {
    Vector a0 = Vector(Acc(0)), a1 = a0, a2 = a0, a3 = a0;
  };
  /// `count` columns, from column c of a block on, for a vector of lanes, or those of a line.
  template <bool writes, bool keeps, bool streams, bool all>
  KOKKOSSOFTMAX_HOST_FUNCTION void add(const Outputs& outputs, const Block& block, int c, int count, int k,
                                       Acc* values) {
    constexpr int together = streams ? vectors_of_line : 1;
    Acc* const max = block.maxima + k * w;
    Acc* const sums = block.of_thread.sums + 4 * k * w;
    const Acc* const packed = block.of_thread.packed + c * Plan::group + k * w;
    const index_type distance = outputs.distance;
    Out* const y = writes ? outputs.y + c * distance + k * w : nullptr;
    // In names of their own, not in arrays: those might not stay in registers.
    const auto of_vector = [&](int j) __attribute__((always_inline)) {
      Sums a;
      if (c > 0) {
        a = {Ops::load(sums + 4 * j * w), Ops::load(sums + (4 * j + 1) * w),
             Ops::load(sums + (4 * j + 2) * w), Ops::load(sums + (4 * j + 3) * w)};
      }
      return a;
    };
    const auto finish = [&](const Sums& a, int j) __attribute__((always_inline)) {
      if (c + count < block.columns) {
        Ops::store(sums + 4 * j * w, a.a0);
        Ops::store(sums + (4 * j + 1) * w, a.a1);
        Ops::store(sums + (4 * j + 2) * w, a.a2);
        Ops::store(sums + (4 * j + 3) * w, a.a3);
      } else {
        Ops::store(max + padded_ + j * w, (a.a0 + a.a1) + (a.a2 + a.a3));
      }
    };
    const auto output_of_vector = [&](int j) __attribute__((always_inline)) {
      if constexpr (writes) {
        return OutputOfLanes<keeps>(outputs, (k + j) * w);
      } else {
        return nullptr;
      }
    };
    const auto exchange_one = [&](int i, int j, const Vector& m, Vector& sum, const auto& output)
        __attribute__((always_inline)) {
      const Vector v = Ops::load(packed + i * Plan::group + j * w);
      Acc* const value = values + (j * part + i) * w;
      const Vector e = exp_of_vector_difference<Ops>(v - m);
      Vector o = v;
      if constexpr (writes) o = output(Ops::load(value));
      Ops::store(value, keeps ? e : v);
      sum = sum + e;
      return o;
    };
    const Vector m = Ops::load(max);
    const auto output = output_of_vector(0);
    Sums a = of_vector(0);
    if constexpr (together == 2) {
      const Vector m1 = Ops::load(max + w);
      const auto output1 = output_of_vector(1);
      Sums b = of_vector(1);
      const auto one = [&](int i, Vector& sum, Vector& sum1) __attribute__((always_inline)) {
        const Vector o = exchange_one(i, 0, m, sum, output);
        const Vector o1 = exchange_one(i, 1, m1, sum1, output1);
        Ops::stream(y + i * distance, o, o1);
      };
      for (int i = 0; i < part; i += 4) {
        one(i, a.a0, b.a0);
        one(i + 1, a.a1, b.a1);
        one(i + 2, a.a2, b.a2);
        one(i + 3, a.a3, b.a3);
      }
      finish(b, 1);
    } else {
      const auto one = [&](int i, Vector& sum) __attribute__((always_inline)) {
        const Vector o = exchange_one(i, 0, m, sum, output);
        if constexpr (writes && streams) {
          Ops::stream(y + i * distance, o);
        } else if constexpr (writes) {
          Ops::store(y + i * distance, o);
        }
      };
      int i = 0;
      for (; i + 4 <= (all ? part : count); i += 4) {
        one(i, a.a0);
        one(i + 1, a.a1);
        one(i + 2, a.a2);
        one(i + 3, a.a3);
      }
      if constexpr (!all) {
        if (i < count) one(i++, a.a0);
        if (i < count) one(i++, a.a1);
        if (i < count) one(i++, a.a2);
      }
    }
    finish(a, 0);
  }

  /// `count` columns of outputs of the lanes from l on: a vector of them, or as many as there are.
  template <bool keeps>
  static void write_vector(const Outputs& outputs, int c, int count, int l, int lanes, const Acc* values) {
    const OutputOfLanes<keeps> output(outputs, l);
    Out* y = outputs.y + c * outputs.distance + l;
    for (int i = 0; i < count; ++i, y += outputs.distance) {
      const Vector v = output(Ops::load(values + i * w));
      if (l + w <= lanes) {
        Ops::store(y, v);
      } else {
        Ops::store_part(y, v, lanes - l);
      }
    }
  }

  /// Of the exponentials of each block, from its share in the sum, which has the place of its maxima.
  void find_factors() {
    Acc* of_block = partials_;
    for (index_type b = 0; b < problem_.geometry.columns; b += Plan::block, of_block += 2 * padded_) {
      for (int l = 0; l < padded_; l += w) {
        Ops::store(of_block + l, Ops::load(of_block + l) * Ops::load(sum_ + l));
      }
    }
  }

  int pitch_;  ///< lanes that a tile has places for
  index_type chunks_;
  Acc* partials_ = nullptr;  ///< of the blocks: in the end, factors
};

}  // namespace KokkosSoftmax::impl

#endif
