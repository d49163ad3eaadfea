// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Few rows side by side whose columns continue each other in x and in y: an array that is read and written
/// as it lies there. Vectors go over pieces of four columns, as many as a row's sum has accumulators, so that
/// every element stays in the lane of its accumulator; what the four have of a row is joined once a block.
/// Where a piece is no whole vectors, those of several blocks are taken together. What a row does with its
/// blocks is what a tile does with them (KokkosSoftmax_SimdTile.hpp), and so are its bits.

#ifndef KOKKOSSOFTMAX_SIMDDENSE_HPP
#define KOKKOSSOFTMAX_SIMDDENSE_HPP

#include <impl/host/KokkosSoftmax_SimdTile.hpp>

#include <algorithm>
#include <numeric>

namespace KokkosSoftmax::impl {

/// A run of neighbouring rows (a tile has one).
template <class Problem, Operation operation>
class SimdDense : SimdLanes<Problem, operation> {
  using Lanes = SimdLanes<Problem, operation>;
  using Lanes::w;

 public:
  using Acc = typename Problem::Acc;
  using In = typename Problem::In;
  using Out = typename Problem::Out;
  using Ops = SimdOps<Acc>;
  using Vector = typename Ops::Vector;
  using Plan = SimdTilePlan<Acc>;

  SimdDense(const Problem& problem, const SimdTiles& tiles, index_type tile, bool stream)
      : problem_(problem),
        columns_(problem.geometry.columns),
        stream_(stream),
        neighbours_(static_cast<int>(tiles.inner)),
        piece_(columns_of_piece * neighbours_),
        blocks_of_strip_(std::max(1, most_of_strip / (block * neighbours_))) {
    const RowGeometry::Row row = problem.geometry.row(tile * tiles.inner);
    x_ = problem.x + row.x_offset;
    y_offset_ = row.y_offset;
    if (neighbours_ <= most_of_sets) prepare_sets();
  }

  /// Rows that wait in `scratch` as a whole.
  void whole(Acc* scratch) {
    Acc *partials = scratch, *stage = scratch + Plan::partials;
    reduce<operation == Operation::softmax>(0, columns_, stage, partials);
    finish();
    if constexpr (operation == Operation::softmax) {
      write_staged(stage, factors(partials, Plan::blocks(columns_)));
    } else {
      write_logits(0, columns_);
    }
  }

  /// [max of each row, sum of each row] of one chunk of long rows.
  void reduce_chunk(index_type chunk, Acc* scratch, Acc* state) {
    reduce<false>(chunk * Plan::chunk, std::min((chunk + 1) * Plan::chunk, columns_), nullptr, scratch);
    Lanes::keep_state(state, max_, sum_, neighbours_);
  }

  void join(const Acc* states, index_type chunks, index_type distance) {
    Lanes::merge(states, neighbours_, chunks, distance, max_, sum_);
  }

  /// From the sums to what the last formula takes.
  void finish() { Lanes::finish_sums(max_, sum_, neighbours_); }

  void write_chunk(index_type chunk, Acc*) {
    write_logits(chunk * Plan::chunk, std::min((chunk + 1) * Plan::chunk, columns_));
  }

 private:
  static constexpr int block = Plan::block, columns_of_piece = 4;
  static_assert(block % columns_of_piece == 0);
  static constexpr int most = Plan::most_of_dense;
  /// Elements that go through one step after the other: each step's results are long there when the next one
  /// takes them.
  static constexpr int most_of_strip = block * most;
  /// Columns that are written in one go, of as many rows as a tile may have.
  static constexpr int columns_of_write = block;

  /// Of how many blocks the pieces are whole vectors, at most.
  static constexpr int units_of_vector = std::max(1, w / columns_of_piece);
  /// Neighbours for which that is worth a loop of their own.
  static constexpr int most_of_sets = std::clamp(w - 1, 1, 7);
  static_assert(most_of_strip >= block * most_of_sets * units_of_vector);

  /// A vector that is taken from two places: so many lanes from the one, the others from behind the other.
  struct Parts {
    int first, second, count;
  };

  void prepare_sets() {
    blocks_of_set_ = units_of_vector / std::gcd(units_of_vector, neighbours_);
    blocks_of_strip_ = blocks_of_strip_ / blocks_of_set_ * blocks_of_set_;
    for (int i = 0; i < neighbours_ * w; ++i)
      row_of_[i] = static_cast<typename Ops::Integer>(i % neighbours_);
  }
  /// Of so many elements one after the other, where runs of a piece lie `distance` apart: from `at` on.
  KOKKOSSOFTMAX_HOST_FUNCTION static Parts parts(int at, int piece, int distance) {
    const int run = at / piece, begin = at % piece, count = std::min(w, piece - begin);
    const int first = run * distance + begin;
    return {first, count < w ? (run + 1) * distance - count : first, count};
  }
  /// Sets of whole blocks among those of a strip.
  int sets(index_type first, index_type last, index_type columns) const {
    if (blocks_of_set_ == 0) return 0;
    return static_cast<int>(std::min(last, columns / block) - first) / blocks_of_set_;
  }

  int columns_of(index_type b, index_type columns) const {
    return static_cast<int>(std::min<index_type>(block, columns - b * block));
  }
  /// From what a block has in `between_` to that of the next one.
  int pitch() const { return piece_ + w; }

  /// `partials` has a block's maxima, sums and factors, in this order, of each row.
  index_type size_of_partials(index_type blocks) const {
    return (blocks + columns_of_piece) * neighbours_ + w;
  }
  Acc* factors(Acc* partials, index_type blocks) const { return partials + 2 * size_of_partials(blocks); }

  /// use(at) for vectors that cover a piece: the last one overlaps the one before, if there is one.
  template <class Use>
  KOKKOSSOFTMAX_HOST_FUNCTION void for_each_vector(const Use& use) const {
    const int last = piece_ - w;
    for (int at = 0; at < last; at += w) use(at);
    use(std::max(last, 0));
  }
  /// use(element, count) for what a vector that begins `at` covers of each piece in order.
  template <class Use>
  KOKKOSSOFTMAX_HOST_FUNCTION void for_each_piece(int at, int columns, const Use& use) const {
    const int pieces = columns / columns_of_piece, rest = columns % columns_of_piece * neighbours_ - at;
    const int piece = piece_;
    index_type i = at;
    if (piece >= w) {
      for (int k = 0; k < pieces; ++k, i += piece) use(i, w);
    } else {
      for (int k = 0; k < pieces; ++k, i += piece) use(i, piece);
    }
    if (rest > 0) use(i, std::min(rest, w));
  }
  template <class T>
  KOKKOSSOFTMAX_HOST_FUNCTION static Vector load(const T* p, int count) {
    return count == w ? Ops::load(p) : Ops::load_part(p, count, -infinity_v<Acc>);
  }
  template <class T>
  KOKKOSSOFTMAX_HOST_FUNCTION static void store(T* p, const Vector& v, int count) {
    count == w ? Ops::store(p, v) : Ops::store_part(p, v, count);
  }

  /// to[i] = of_row(l) for each column of a piece.
  template <class OfRow>
  KOKKOSSOFTMAX_HOST_FUNCTION void repeat(Acc* to, const OfRow& of_row) const {
    for (int j = 0; j < columns_of_piece; ++j, to += neighbours_)
      for (int l = 0; l < neighbours_; l += w) Ops::store(to + l, of_row(l));
  }

  /// Maxima and sums of the rows over these columns; the exponentials are left in `stage` if `keep`.
  template <bool keep>
  void reduce(index_type begin, index_type end, Acc* stage, Acc* partials) {
    const index_type columns = end - begin, blocks = Plan::blocks(columns);
    const index_type size_of_block = block * neighbours_, strip = blocks_of_strip_ * size_of_block;
    Acc *const maxima = partials, *const sums = partials + size_of_partials(blocks);
    const In* x = x_ + begin * neighbours_;
    for (index_type first = 0; first < blocks; first += blocks_of_strip_) {
      const index_type last = std::min(first + blocks_of_strip_, blocks);
      const int sets_here = sets(first, last, columns);
      if (sets_here > 0) {
        const auto reduce_here = [&](auto neighbours) {
          reduce_sets<keep, neighbours()>(x + first * size_of_block, sets_here,
                                          keep ? stage + first * size_of_block : nullptr,
                                          maxima + first * neighbours_, sums + first * neighbours_);
        };
        [&]<int... i>(std::integer_sequence<int, i...>) {
          static_cast<void>(
              ((neighbours_ == i + 2 && (reduce_here(std::integral_constant<int, i + 2>()), true)) || ...));
        }
        (std::make_integer_sequence<int, most_of_sets - 1>());
      }
      const index_type alone = first + sets_here * blocks_of_set_;
      Acc* between = between_;
      for (index_type b = alone; b < last; ++b, between += pitch()) {
        const In* of_block = x + b * size_of_block;
        for_each_vector([&](int at) __attribute__((always_inline)) {
          Vector m(-infinity_v<Acc>);
          for_each_piece(
              at, columns_of(b, columns), [&](index_type i, int count) __attribute__((always_inline)) {
                m = Ops::larger(load(of_block + i, count), m);
              });
          Ops::store(between + at, m);
        });
      }
      between = between_;
      for (index_type b = alone; b < last; ++b, between += pitch()) {
        Acc* const max = maxima + b * neighbours_;
        for (int l = 0; l < neighbours_; l += w) {
          const auto of = [&](int j) { return Ops::load(between + j * neighbours_ + l); };
          Ops::store(max + l,
                     Lanes::finite(Ops::larger(Ops::larger(of(0), of(1)), Ops::larger(of(2), of(3)))));
        }
        repeat(between, [&](int l) { return Ops::load(max + l); });
      }
      between = between_;
      Acc* sum_between = sum_between_;
      for (index_type b = alone; b < last; ++b, between += pitch(), sum_between += pitch()) {
        const In* of_block = x + b * size_of_block;
        Acc* const to = keep ? stage + b * size_of_block : nullptr;
        for_each_vector([&](int at) __attribute__((always_inline)) {
          const Vector max = Ops::load(between + at);
          Vector sum(Acc(0));
          for_each_piece(
              at, columns_of(b, columns), [&](index_type i, int count) __attribute__((always_inline)) {
                __builtin_prefetch(of_block + i + strip, 0, 2);
                if constexpr (keep) __builtin_prefetch(to + i + strip, 1, 3);
                const Vector e = exp_of_vector_difference<Ops>(load(of_block + i, count) - max);
                if constexpr (keep) store(to + i, e, count);
                sum = sum + e;
              });
          Ops::store(sum_between + at, sum);
        });
      }
      sum_between = sum_between_;
      for (index_type b = alone; b < last; ++b, sum_between += pitch()) {
        for (int l = 0; l < neighbours_; l += w) {
          const auto of = [&](int j) { return Ops::load(sum_between + j * neighbours_ + l); };
          Ops::store(sums + b * neighbours_ + l, (of(0) + of(1)) + (of(2) + of(3)));
        }
      }
    }
    join_blocks(blocks, maxima, sums, factors(partials, blocks));
  }

  /// The same for the blocks of so many sets. The exponentials are left a piece of all blocks after the
  /// other.
  template <bool keep, int neighbours>
  [[gnu::noinline]] void reduce_sets(const In* x, int sets, Acc* stage, Acc* maxima, Acc* sums) {
    constexpr int pieces = block / columns_of_piece;
    constexpr int piece = columns_of_piece * neighbours;
    constexpr int of_set = units_of_vector / std::gcd(units_of_vector, neighbours);
    constexpr int size_of_block = block * neighbours, size_of_set = of_set * size_of_block;
    constexpr int of_piece = of_set * piece;
    const int blocks = sets * of_set;
    const index_type strip = blocks_of_strip_ * size_of_block;
    // use(v, load): load(p) is the vector in piece p.
    const auto for_each_vector_of_set = [&](const In* set, const auto& use) __attribute__((always_inline)) {
      for (int at = 0; at < of_piece; at += w) {
        const Parts from = parts(at, piece, size_of_block);
        const In *first = set + from.first, *second = set + from.second;
        if (from.count == w) {
          use(
              at, [&](index_type i) __attribute__((always_inline)) { return Ops::load(first + i); });
        } else {
          const auto mask = Ops::mask_of_first(from.count);
          use(
              at, [&](index_type i)
                      __attribute__((always_inline)) { return Ops::load_both(first + i, second + i, mask); });
        }
      }
    };
    for (int s = 0; s < sets; ++s) {
      for_each_vector_of_set(
          x + s * size_of_set, [&](int at, const auto& load_at) __attribute__((always_inline)) {
            Vector m0(-infinity_v<Acc>), m1 = m0;
            for (int i = 0; i < pieces * piece; i += 2 * piece) {
              m0 = Ops::larger(load_at(i), m0);
              m1 = Ops::larger(load_at(i + piece), m1);
            }
            Ops::store(between_ + s * of_piece + at, Ops::larger(m0, m1));
          });
    }
    for (int b = 0; b < blocks; ++b) {
      const auto column = [&](int j) { return Ops::load(between_ + b * piece + j * neighbours); };
      const Vector max =
          Lanes::finite(Ops::larger(Ops::larger(column(0), column(1)), Ops::larger(column(2), column(3))));
      Ops::store(maxima + b * neighbours, max);
      for (int i = 0; i < piece; i += w)
        Ops::store(sum_between_ + b * piece + i, Ops::permuted(max, row_of_ + i));
    }
    for (int s = 0; s < sets; ++s) {
      const In* const set = x + s * size_of_set;
      Acc* const to = keep ? stage + s * size_of_set : nullptr;
      const char* fetched = reinterpret_cast<const char*>(set + strip);
      for_each_vector_of_set(
          set, [&](int at, const auto& load_at) __attribute__((always_inline)) {
            const Vector max = Ops::load(sum_between_ + s * of_piece + at);
            Vector sum(Acc(0));
            for (int p = 0; p < pieces; ++p) {
              __builtin_prefetch(fetched, 0, 2);
              fetched += w * sizeof(In);
              const Vector e = exp_of_vector_difference<Ops>(load_at(p * piece) - max);
              if constexpr (keep) Ops::store(to + p * of_piece + at, e);
              sum = sum + e;
            }
            Ops::store(between_ + s * of_piece + at, sum);
          });
    }
    for (int b = 0; b < blocks; ++b) {
      const auto column = [&](int j) { return Ops::load(between_ + b * piece + j * neighbours); };
      Ops::store(sums + b * neighbours, (column(0) + column(1)) + (column(2) + column(3)));
    }
  }

  /// Of each row, over its blocks in order.
  void join_blocks(index_type blocks, const Acc* maxima, const Acc* sums, Acc* factors) {
    for (int l = 0; l < neighbours_; l += w) {
      Vector max = Ops::load(maxima + l);
      for (index_type b = 1; b < blocks; ++b) max = Ops::larger(Ops::load(maxima + b * neighbours_ + l), max);
      Ops::store(max_ + l, max);
    }
    repeat(between_, [&](int l) { return Ops::load(max_ + l); });
    for_each_vector([&](int at) __attribute__((always_inline)) {
      const Vector max = Ops::load(between_ + at);
      for (index_type b = 0; b < blocks; b += columns_of_piece) {
        const index_type i = b * neighbours_ + at;
        Ops::store(factors + i, exp_of_vector_difference<Ops>(Ops::load(maxima + i) - max));
      }
    });
    for (int l = 0; l < neighbours_; l += w) {
      CompensatedVector<Acc> sum;
      for (index_type b = 0; b < blocks; ++b) {
        const index_type at = b * neighbours_ + l;
        sum.add(Lanes::share_of_block(Ops::load(sums + at), Ops::load(factors + at)));
      }
      Ops::store(sum_ + l, Lanes::sum_without_nan(sum));
    }
  }

  /// Of the exponentials in `stage`.
  void write_staged(const Acc* stage, const Acc* factors) {
    const index_type blocks = Plan::blocks(columns_), size_of_block = block * neighbours_;
    const index_type strip = blocks_of_strip_ * size_of_block;
    for (index_type first = 0; first < blocks; first += blocks_of_strip_) {
      const index_type last = std::min(first + blocks_of_strip_, blocks);
      const int sets_here = sets(first, last, columns_);
      const index_type alone = first + sets_here * blocks_of_set_;
      Acc* between = between_;
      for (index_type b = alone; b < last; ++b, between += pitch()) {
        repeat(between,
               [&](int l) { return Ops::load(factors + b * neighbours_ + l) * Ops::load(sum_ + l); });
      }
      alignas(64) Out waiting[most_of_strip];
      Out* const y = this->y() + first * size_of_block;
      Out* const to = stream_ ? waiting : y;
      between = between_;
      for (index_type b = alone; b < last; ++b, between += pitch()) {
        const Acc* from = stage + b * size_of_block;
        Out* const of_block = to + (b - first) * size_of_block;
        for_each_vector([&](int at) __attribute__((always_inline)) {
          const Vector factor = Ops::load(between + at);
          for_each_piece(
              at, columns_of(b, columns_), [&](index_type i, int count) __attribute__((always_inline)) {
                if (!stream_) __builtin_prefetch(of_block + i + strip, 1, 3);
                __builtin_prefetch(from + i + strip, 0, 3);
                store(of_block + i, Ops::load(from + i) * factor, count);
              });
        });
      }
      if (sets_here > 0)
        write_sets(stage + first * size_of_block, sets_here, factors + first * neighbours_, to);
      if (stream_) {
        const index_type elements = std::min(last * block, columns_) * neighbours_ - first * size_of_block;
        stream_bytes(reinterpret_cast<char*>(y), reinterpret_cast<const char*>(waiting),
                     static_cast<int>(elements * static_cast<index_type>(sizeof(Out))));
      }
    }
  }

  /// The same for the blocks of so many sets.
  void write_sets(const Acc* stage, int sets, const Acc* factors, Out* y) {
    const int size_of_block = block * neighbours_, size_of_set = blocks_of_set_ * size_of_block;
    const int of_piece = blocks_of_set_ * piece_, blocks = sets * blocks_of_set_;
    const index_type strip = blocks_of_strip_ * size_of_block;
    const Vector sum = Ops::load(sum_);
    for (int b = 0; b < blocks; ++b) Ops::store(between_ + b * w, Ops::load(factors + b * neighbours_) * sum);
    for (int at = 0; at < size_of_block; at += w) {
      const Parts from = parts(at, piece_, of_piece);
      const auto mask = Ops::mask_of_first(from.count);
      const auto* row_of = row_of_ + at % (neighbours_ * w);
      for (int s = 0, b = 0; s < sets; ++s) {
        const Acc* first = stage + s * size_of_set + from.first;
        const Acc* second = stage + s * size_of_set + from.second;
        for (int i = 0; i < blocks_of_set_; ++i, ++b, first += piece_, second += piece_) {
          const Vector factor = Ops::permuted(Ops::load(between_ + b * w), row_of);
          Out* const to = y + b * size_of_block + at;
          if (!stream_) __builtin_prefetch(to + strip, 1, 3);
          Ops::store(to, Ops::load_both(first, second, mask) * factor);
        }
      }
    }
  }

  /// Outputs from the logits, read once more.
  void write_logits(index_type begin, index_type end) {
    // What the rows have, for some columns, so many that streams begin at lines.
    const int columns = std::min(2, columns_of_write * most / (block * neighbours_)) * block;
    for (int c = 0; !repeated_ && c < columns; ++c) {
      for (int l = 0; l < neighbours_; l += w) {
        Ops::store(max_of_column_ + c * neighbours_ + l, Ops::load(max_ + l));
        Ops::store(sum_of_column_ + c * neighbours_ + l, Ops::load(sum_ + l));
      }
    }
    repeated_ = true;
    const auto formula = [&](const Vector& v, index_type i) __attribute__((always_inline)) {
      const Vector difference = v - Ops::load(max_of_column_ + i);
      if constexpr (operation == Operation::softmax) {
        return exp_of_vector_difference<Ops>(difference) * Ops::load(sum_of_column_ + i);
      } else {
        return difference - Ops::load(sum_of_column_ + i);
      }
    };
    for (index_type c = begin; c < end; c += columns) {
      chunk_write<Acc>(LogitsInMemory<Acc, In>{x_ + c * neighbours_},
                       std::min<index_type>(columns, end - c) * neighbours_, y() + c * neighbours_, stream_,
                       formula);
    }
  }

  Out* y() const { return problem_.y + y_offset_; }

  const Problem& problem_;
  const In* x_;
  index_type y_offset_, columns_;
  bool stream_, repeated_ = false;
  int neighbours_, piece_, blocks_of_strip_;
  int blocks_of_set_ = 0;                          ///< whose pieces are whole vectors together; 0: none
  typename Ops::Integer row_of_[w * w];            ///< of elements one after the other
  alignas(64) Acc max_[most + w], sum_[most + w];  ///< of each row; sum_: then what the last formula takes
  alignas(64) Acc max_of_column_[columns_of_write * most + w], sum_of_column_[columns_of_write * most + w];
  /// What a strip's blocks have for a piece: maxima or factors; sums.
  static constexpr int most_between = columns_of_piece * most + most * w + w;
  alignas(64) Acc between_[most_between], sum_between_[most_between];
};

}  // namespace KokkosSoftmax::impl

#endif
