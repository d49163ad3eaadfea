// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Rows side by side, at least as many as a vector has lanes, whose columns continue each other in x and in
/// y: a panel, an array that is read and written as it lies there. Where columns are no whole vectors, a
/// vector goes from one column to the next: beside it is read what the rows have, repeated, from the row on
/// that it begins with. So no vector is half empty, and what goes past the caches are whole lines. What a row
/// does with its blocks of columns is what a tile does with them (KokkosSoftmax_SimdTile.hpp), and so are its
/// bits. Logits with a transform go through it in vectors of rows, and are an array of their own then.

#ifndef KOKKOSSOFTMAX_SIMDPANEL_HPP
#define KOKKOSSOFTMAX_SIMDPANEL_HPP

#include <impl/host/KokkosSoftmax_SimdTile.hpp>

#include <algorithm>
#include <cstring>

namespace KokkosSoftmax::impl {

/// A line of y whose outputs come from two blocks, or two panels, that are written one after the other past
/// the caches: it waits until it is whole. (A store to a line that the cache does not have holds up all those
/// behind it.)
template <class Acc, class Out>
class PanelLines {
 public:
  using Ops = SimdOps<Acc>;
  /// Elements of a cache line, or of a vector if that is more.
  static constexpr int line = std::max(Ops::width, static_cast<int>(64 / sizeof(Out)));

  /// How many of `count` outputs that begin at y are to be added, for those behind them to begin at a line.
  KOKKOSSOFTMAX_HOST_FUNCTION index_type begin(Out* y, index_type count) {
    const int at = place(y);
    if (y != y_ + end_) {
      finish();
      begin_ = end_ = at;
      y_ = y - at;
    }
    return std::min<index_type>((line - at) % line, count);
  }
  /// The next outputs begin at this line.
  KOKKOSSOFTMAX_HOST_FUNCTION void begin_line(Out* y) {
    begin_ = end_ = 0;
    y_ = y;
  }
  KOKKOSSOFTMAX_HOST_FUNCTION void add(const simd<Acc>& v, int count) {
    Ops::store(waiting_ + end_, v);
    end_ += count;
    if (end_ < line) return;
    if (begin_ > 0) {
      write_part();
    } else {
      for (int i = 0; i < line; i += line_of_cache) Ops::stream_line(y_ + i, waiting_ + i);
    }
    y_ += line;
    begin_ = end_ = 0;
  }
  /// Writes what waits.
  void finish() {
    if (end_ > begin_) write_part();
    y_ = nullptr;
    begin_ = end_ = 0;
  }

 private:
  static constexpr auto line_of_cache = static_cast<int>(64 / sizeof(Out));

  /// Not what others have before it.
  void write_part() {
    std::memcpy(y_ + begin_, waiting_ + begin_, static_cast<std::size_t>(end_ - begin_) * sizeof(Out));
  }
  static int place(const Out* y) {
    return static_cast<int>(reinterpret_cast<std::uintptr_t>(y) % (line * sizeof(Out)) / sizeof(Out));
  }

  Out* y_ = nullptr;  ///< the line that waits
  int begin_ = 0, end_ = 0;
  alignas(64) Out waiting_[line + Ops::width];
};

/// Whether four vectors, which are written at once, are whole lines: not where a vector is short.
template <class Acc, class Out>
inline constexpr bool panels_have_lines = 4 * SimdOps<Acc>::width % PanelLines<Acc, Out>::line == 0;

/// A run of neighbouring rows (a tile has one).
template <class Problem, Operation operation>
class SimdPanel : SimdLanes<Problem, operation> {
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
  static constexpr bool identity = std::is_same_v<typename Problem::Transform, BoundIdentity>;

  /// Rows of which exponentials wait beside x and y where threads share them: measured with floats and two
  /// threads.
  static constexpr index_type most_beside = 1600 / sizeof(Acc);

  /// What waits for the sums of rows, and where.
  enum class Waiting {
    logits,  ///< as they are, in x; of transformed ones, too, where rows are long
    in_y,    ///< exponentials, in y, which then need not be brought to the cache beside them
    beside   ///< exponentials or transformed logits, in the stage
  };
  static Waiting waiting(const Problem& problem, bool stream) {
    const RowGeometry& g = problem.geometry;
    if (Plan::chunks(g.columns) > 1 || of_stage == Kept::nothing) return Waiting::logits;
    // Past the caches y would be written twice, or x read.
    if (stream) return Waiting::beside;
    // Not in y where they come from: vectors overlap, and what one has read the next one reads again.
    const bool may_be_in_y = of_stage == Kept::exponentials && std::is_same_v<Acc, Out> &&
                             static_cast<const void*>(problem.x) != static_cast<const void*>(problem.y);
    const index_type rows = g.x_column_stride;
    // To form exponentials twice takes less time than to wait for columns of y that share sets of the cache
    // (1024 x 1024 floats along the first axis, two cores of Zen 5: 61 GB/s, and 33 in y), or for more of the
    // cache in a single array. Not of 16 bits, which come faster than exponentials are formed.
    const bool is_wide = rows > most_beside && g.rows == rows;
    if (identity && std::is_same_v<In, Acc> && (columns_share_sets(rows) || (is_wide && !may_be_in_y)))
      return Waiting::logits;
    return may_be_in_y ? Waiting::in_y : Waiting::beside;
  }
  /// Whether that takes room of its own in a thread's cache, as do logits that would come from memory twice.
  /// (Of long rows they do.)
  static bool needs_cache(const Problem& problem, bool stream) {
    return Plan::chunks(problem.geometry.columns) == 1 &&
           (stream || waiting(problem, stream) == Waiting::beside);
  }
  /// Whether columns lie in a few sets of the first-level cache, which cannot hold all of a block.
  static bool columns_share_sets(index_type rows) {
    return rows * static_cast<index_type>(sizeof(Acc)) % 2048 == 0;
  }

  /// What a thread writes it writes through the same `lines`.
  SimdPanel(const Problem& problem, const SimdTiles& tiles, index_type tile, bool stream,
            PanelLines<Acc, Out>& lines)
      : problem_(problem),
        columns_(problem.geometry.columns),
        stream_(stream),
        waiting_(waiting(problem, stream)),
        copies_(identity && columns_share_sets(tiles.inner)),
        rows_(static_cast<int>(tiles.inner)),
        lines_(lines) {
    const RowGeometry::Row row = problem.geometry.row(tile * tiles.inner);
    x_ = problem.x + row.x_offset;
    y_ = problem.y + row.y_offset;
    const int vectors = (rows_ + w - 1) / w;
    // Where a vector that overlaps another one would be a sixth of all.
    in_pieces_ = vectors * w * 5 > rows_ * 6;
    if constexpr (!identity) {
      problem.transform.make_rows(row.index, problem.geometry.row_weight[problem.geometry.rank - 1], rows_,
                                  row_objects_);
    }
  }

  /// [max of each row, sum of each row] of blocks; what rows are written from, if not from x, in `stage` or
  /// in y.
  void reduce_blocks(index_type begin, index_type end, Acc* stage, Acc* partials) {
    const index_type first = begin * block, last = std::min(end * block, columns_);
    partials += begin * 2 * rows_;
    if (waiting_ != Waiting::logits) {
      reduce<of_stage>(first, last, kept(begin, stage), partials);
    } else {
      reduce<Kept::nothing>(first, last, stage, partials);
    }
  }
  /// To be called between the two, and take; or join and finish. [max of each row, what the last formula
  /// takes of each] of the vectors of rows [begin, end) to `results`.
  static void join_vectors(int begin, int end, int rows, index_type columns, const Acc* partials,
                           Acc* scratch, Acc* results) {
    alignas(64) Acc max[w], sum[w];
    for (int l = begin * w; l < std::min(end * w, rows); l += w) {
      join_vector(l, rows, columns, partials, scratch, max, sum);
      Lanes::finish_sums(max, sum, w);
      const auto bytes = static_cast<std::size_t>(std::min(w, rows - l)) * sizeof(Acc);
      std::memcpy(results + l, max, bytes);
      std::memcpy(results + rows + l, sum, bytes);
    }
  }
  void take(const Acc* results) {
    const auto bytes = static_cast<std::size_t>(rows_) * sizeof(Acc);
    std::memcpy(max_, results, bytes);
    std::memcpy(sum_, results + rows_, bytes);
    repeat(max_);
    repeat(sum_);
  }
  /// Brings the logits of another panel beside what is written, unless that needs the cache for itself.
  void fetch_beside(const SimdTiles& tiles, index_type tile) {
    constexpr index_type most_bytes = index_type(256) << 10;
    if (columns_ * rows_ * static_cast<index_type>(sizeof(In)) > most_bytes) return;
    fetch_ = problem_.x + problem_.geometry.row(tile * tiles.inner).x_offset;
  }
  void write_blocks(index_type begin, index_type end, Acc* stage, const Acc* partials) {
    if (waiting_ != Waiting::logits) {
      const Acc* const first = kept(begin, stage);
      write_of_blocks<of_stage>(begin, end, partials, [&](index_type b) {
        return StagedExactly<Acc>{first + (b - begin) * block * rows_};
      });
    } else if (identity && operation == Operation::softmax && Plan::chunks(columns_) == 1) {
      write_of_blocks<Kept::nothing>(begin, end, partials, [&](index_type b) {
        return LogitsInMemory<Acc, In>{x_ + b * block * rows_};
      });
    } else {
      write_logits(begin * block, std::min(end * block, columns_), stage);
    }
  }

  /// [max of each row, sum of each row] of one chunk of long rows.
  void reduce_chunk(index_type chunk, Acc* scratch, Acc* state) {
    const index_type begin = chunk * Plan::chunk, end = std::min(begin + Plan::chunk, columns_);
    reduce<Kept::nothing>(begin, end, scratch + Plan::partials, scratch);
    join(scratch, Plan::blocks(end - begin), 2 * rows_);
    Lanes::keep_state(state, max_, sum_, rows_);
  }

  void join(const Acc* states, index_type chunks, index_type distance) {
    Lanes::merge(states, rows_, chunks, distance, max_, sum_);
  }

  /// From the sums to what the last formula takes.
  void finish() {
    Lanes::finish_sums(max_, sum_, rows_);
    repeat(max_);
    repeat(sum_);
  }

  void write_chunk(index_type chunk, Acc* scratch) {
    write_logits(chunk * Plan::chunk, std::min((chunk + 1) * Plan::chunk, columns_), scratch);
  }

 private:
  static constexpr int block = Plan::block;
  /// Logits are fetched so far ahead, or a block if that is more.
  static constexpr index_type elements_ahead = 16384 / sizeof(In);
  /// Elements that go together, of four vectors.
  static constexpr int step = 4 * w;
  static_assert(panels_have_lines<Acc, Out>);

  /// What waits for the sums of rows: logits are read once more from x, unless they are transformed.
  enum class Kept { nothing, exponentials, logits };
  static constexpr Kept of_stage = operation == Operation::softmax ? Kept::exponentials
                                   : identity                      ? Kept::nothing
                                                                   : Kept::logits;
  /// Where that is, of the blocks from `begin` on.
  Acc* kept(index_type begin, Acc* stage) const {
    if constexpr (std::is_same_v<Acc, Out>) {
      if (waiting_ == Waiting::in_y) return y_ + begin * block * rows_;
    }
    return stage;
  }

  /// Of a vector of rows from l on. `scratch`: [max, sum] of such a vector for each chunk of long rows.
  static void join_vector(int l, int rows, index_type columns, const Acc* partials, Acc* scratch, Acc* max,
                          Acc* sum) {
    const index_type chunks = Plan::chunks(columns), distance = 2 * rows;
    const auto keep = [](const typename Lanes::MaxAndSum& of_vector, Acc* m, Acc* s) {
      Ops::store(m, of_vector.max);
      Ops::store(s, of_vector.sum);
    };
    if (chunks == 1) {
      keep(Lanes::template merge_vector<false>(partials + l, rows, Plan::blocks(columns), distance), max,
           sum);
      return;
    }
    for (index_type c = 0; c < chunks; ++c) {
      const index_type first = c * (Plan::chunk / block),
                       blocks = std::min<index_type>(Plan::chunk / block, Plan::blocks(columns) - first);
      keep(Lanes::template merge_vector<false>(partials + first * distance + l, rows, blocks, distance),
           scratch + c * 2 * w, scratch + (c * 2 + 1) * w);
    }
    keep(Lanes::template merge_vector<false>(static_cast<const Acc*>(scratch), w, chunks, 2 * w), max, sum);
  }

  /// Of each row, repeated for vectors that begin with any row.
  void repeat(Acc* of_row) const {
    for (int k = 0; k < step; k += w) Ops::store(of_row + rows_ + k, Ops::load(of_row + k));
  }
  /// The row that an element has which comes `elements` after one of this row.
  KOKKOSSOFTMAX_HOST_FUNCTION int row_after(int row, int elements_in_rows) const {
    const int next = row + elements_in_rows;
    return next >= rows_ ? next - rows_ : next;
  }

  /// use(row) for vectors that cover the rows [begin, end), at least a vector of them: the last one overlaps
  /// the one before.
  template <class Use>
  KOKKOSSOFTMAX_HOST_FUNCTION static void for_each_vector(int begin, int end, const Use& use) {
    int l = begin;
    for (; l + w <= end; l += w) use(l);
    if (l < end) use(end - w);
  }

  /// Logits to be fetched.
  struct Ahead {
    const In* x;
    KOKKOSSOFTMAX_HOST_FUNCTION void fetch() {
      __builtin_prefetch(x, 0, 2);
      x += w;
    }
  };

  /// Transformed logits of the rows [begin, end), at least a vector of them, in so many columns from `column`
  /// on, `distance` from column to column; their largest ones, as MaxSum keeps them.
  void transform(index_type column, int columns, int begin, int end, Acc* to, int distance,
                 Acc* maxima) const {
    const In* const x = x_ + column * rows_;
    for_each_vector(begin, end, [&](int l) {
      const Vector max =
          problem_.transform(row_objects_, l, column, w, columns, x + l, rows_, to + l - begin, distance);
      Ops::store(maxima + l, Lanes::finite(max));
    });
  }

  /// Maxima and sums of the blocks of [begin, end), at `partials`; what is kept one behind the other in
  /// `stage`.
  template <Kept kept>
  void reduce(index_type begin, index_type end, Acc* stage, Acc* partials) {
    constexpr bool keep = kept == Kept::exponentials;
    const In* x = x_ + begin * rows_;
    for (index_type b = begin; b < end; b += block, partials += 2 * rows_, x += block * rows_) {
      const int columns = static_cast<int>(std::min<index_type>(block, end - b));
      Ahead next{x + std::max<index_type>(block * rows_, elements_ahead)};
      Acc* const sums = partials + rows_;
      for (int first = 0; first < rows_; first += Plan::group) {
        // A group that is no vector takes some of the one before once more.
        const int last = std::min(first + Plan::group, rows_);
        const int from = std::min(first, last - w);
        constexpr bool in_stage = kept == Kept::logits;
        Acc* const logits = in_stage ? stage + from : logits_;
        const int distance = in_stage ? rows_ : last - from;
        if constexpr (!identity) {
          transform(b, columns, from, last, logits, distance, partials);
        } else if (copies_) {
          find_maxima<true>(x, columns, from, last, partials, logits, distance);
        } else {
          find_maxima<false>(x, columns, from, last, partials, nullptr, 0);
        }
        if (in_pieces_) break;
        const auto add = [&](const auto& source_of) __attribute__((always_inline)) {
          for_each_vector(
              from, last, [&](int l) __attribute__((always_inline)) {
                Lanes::template add_block<keep>(source_of(l), stage + l, rows_, columns, partials + l,
                                                sums + l, next);
              });
        };
        const auto of_logits = [&](int l) { return ColumnsOfStage{logits + l - from, distance}; };
        if (!identity || copies_) {
          add(of_logits);
        } else if constexpr (identity) {
          add([&](int l) { return ColumnsOfX{x + l, rows_}; });
        }
      }
      if (in_pieces_) {
        if constexpr (identity) {
          add_pieces<keep>(x, columns, partials, stage, sums, next);
        } else {
          add_pieces<keep>(kept == Kept::logits ? stage : logits_, columns, partials, stage, sums, next);
        }
      }
      if (kept != Kept::nothing) stage += block * rows_;
    }
  }

  /// Of the rows [begin, end); copies their logits, `distance` from column to column.
  template <bool copies>
  KOKKOSSOFTMAX_HOST_FUNCTION void find_maxima(const In* x, int columns, int begin, int end, Acc* maxima,
                                               Acc* copy, int distance) const {
    constexpr int several = 4;
    const auto of_rows = [&]<int vectors>(int l, std::integral_constant<int, vectors>)
        __attribute__((always_inline)) {
      const auto place = [&](int k) __attribute__((always_inline)) {
        return k + 1 < vectors ? k * w : std::min((vectors - 1) * w, end - l - w);
      };
      Vector m[vectors];
      for (int k = 0; k < vectors; ++k) m[k] = Vector(-infinity_v<Acc>);
      const In* p = x + l;
      [[maybe_unused]] Acc* to = copies ? copy + (l - begin) : nullptr;
      for (int c = 0; c < columns; ++c, p += rows_) {
        for (int k = 0; k < vectors; ++k) {
          const Vector v = Ops::load(p + place(k));
          if constexpr (copies) Ops::store(to + place(k), v);
          m[k] = Ops::larger(v, m[k]);
        }
        if constexpr (copies) to += distance;
      }
      for (int k = 0; k < vectors; ++k) Ops::store(maxima + l + place(k), Lanes::finite(m[k]));
    };
    int l = begin;
    for (; l + several * w <= end; l += several * w) of_rows(l, std::integral_constant<int, several>());
    const int rest = (end - l + w - 1) / w;
    if (rest == 1) of_rows(std::min(l, end - w), std::integral_constant<int, 1>());
    if (rest == 2) of_rows(l, std::integral_constant<int, 2>());
    if (rest == 3) of_rows(l, std::integral_constant<int, 3>());
    if (rest == 4) of_rows(l, std::integral_constant<int, 4>());
  }

  /// Exponentials and sums of a block in pieces of four columns, as many as a sum has accumulators: every
  /// element stays in the lane of its accumulator.
  template <bool keep, class T>
  void add_pieces(const T* x, int columns, const Acc* maxima, Acc* stage, Acc* sums, Ahead next) {
    for_each_vector(
        0, rows_, [&](int l) __attribute__((always_inline)) {
          Ops::store(repeated_ + l, Ops::load(maxima + l));
        });
    repeat(repeated_);
    const int piece = 4 * rows_, pieces = columns / 4, rest = columns % 4 * rows_;
    int row = 0;
    for_each_vector(
        0, piece, [&](int at) __attribute__((always_inline)) {
          if (at == piece - w) row = rows_ - w;
          const Vector max = Ops::load(repeated_ + row);
          Vector sum(Acc(0));
          const auto add = [&](const Vector& v, int i, int count) __attribute__((always_inline)) {
            const Vector e = exp_of_vector_difference<Ops>(v - max);
            if constexpr (keep) count == w ? Ops::store(stage + i, e) : Ops::store_part(stage + i, e, count);
            next.fetch();
            sum = sum + e;
          };
          int i = at;
          for (int k = 0; k < pieces; ++k, i += piece) add(Ops::load(x + i), i, w);
          if (at + w <= rest) {
            add(Ops::load(x + i), i, w);
          } else if (at < rest) {
            add(Ops::load_part(x + i, rest - at, -infinity_v<Acc>), i, rest - at);
          }
          Ops::store(sums_of_piece_ + at, sum);
          row = row_after(row, w % rows_);
        });
    for_each_vector(
        0, rows_, [&](int l) __attribute__((always_inline)) {
          const auto of = [&](int j) __attribute__((always_inline)) {
            return Ops::load(sums_of_piece_ + j * rows_ + l);
          };
          Ops::store(sums + l, (of(0) + of(1)) + (of(2) + of(3)));
        });
  }

  /// Outputs of blocks from what was kept of them, or from logits to the same bits: source_of(block).
  template <Kept kept, class SourceOf>
  void write_of_blocks(index_type begin, index_type end, const Acc* partials, const SourceOf& source_of) {
    for (index_type b = begin; b < end; ++b) {
      const index_type first = b * block, last = std::min((b + 1) * block, columns_);
      const auto source = source_of(b);
      if constexpr (kept == Kept::logits) {
        write(source, first, last, formula_of_logits());
        continue;
      }
      const Acc* const max = partials + b * 2 * rows_;
      for_each_vector(
          0, rows_, [&](int l) __attribute__((always_inline)) {
            const Vector factor = exp_of_vector_difference<Ops>(Ops::load(max + l) - Ops::load(max_ + l));
            Ops::store(repeated_ + l, factor * Ops::load(sum_ + l));
            if constexpr (kept == Kept::nothing) Ops::store(max_of_block_ + l, Ops::load(max + l));
          });
      repeat(repeated_);
      if constexpr (kept == Kept::nothing) repeat(max_of_block_);
      write(
          source, first, last, [&](const Vector& v, int row) __attribute__((always_inline)) {
            if constexpr (kept == Kept::nothing) {
              return exp_of_vector_difference<Ops>(v - Ops::load(max_of_block_ + row)) *
                     Ops::load(repeated_ + row);
            } else {
              return v * Ops::load(repeated_ + row);
            }
          });
    }
  }

  auto formula_of_logits() const {
    return [this](const Vector& v, int row) __attribute__((always_inline)) {
      const Vector difference = v - Ops::load(max_ + row);
      if constexpr (operation == Operation::softmax) {
        return exp_of_vector_difference<Ops>(difference) * Ops::load(sum_ + row);
      } else {
        return difference - Ops::load(sum_ + row);
      }
    };
  }

  /// Outputs from the logits, read once more.
  void write_logits(index_type begin, index_type end, [[maybe_unused]] Acc* scratch) {
    if constexpr (identity) {
      write(LogitsInMemory<Acc, In>{x_ + begin * rows_}, begin, end, formula_of_logits());
    } else {
      for (index_type b = begin; b < end; b += block) {
        const index_type columns = std::min<index_type>(block, end - b);
        transform(b, static_cast<int>(columns), 0, rows_, scratch, rows_, repeated_);
        write(StagedValues<Acc>{scratch}, b, b + columns, formula_of_logits());
      }
    }
  }

  /// y = formula(value, row that the vector begins with) for the columns [begin, end).
  template <class Source, class Formula>
  KOKKOSSOFTMAX_HOST_FUNCTION void write(const Source& source, index_type begin, index_type end,
                                         const Formula& formula) {
    Out* const y = y_ + begin * rows_;
    const index_type count = (end - begin) * rows_;
    index_type i = 0;
    int row = 0;
    const auto next = [&](int elements) __attribute__((always_inline)) {
      const Vector v = elements == w ? source(i) : source.part(i, elements);
      const Vector value = formula(v, row);
      i += elements;
      row = row_after(row, elements % rows_);
      return value;
    };
    const auto next_count = [&](index_type last) __attribute__((always_inline)) {
      return static_cast<int>(std::min<index_type>(w, last - i));
    };
    if (stream_) {
      for (index_type head = lines_.begin(y, count); i < head;) {
        const int n = next_count(head);
        lines_.add(next(n), n);
      }
    }
    const int rows_of_step = step % rows_;
    for (; i + step <= count; i += step, row = row_after(row, rows_of_step)) {
      Vector v[4];
      for (int k = 0; k < 4; ++k) v[k] = formula(source(i + k * w), row + k * w);
      if (fetch_ != nullptr) {
        for (int k = 0; k < step; k += 64 / static_cast<int>(sizeof(In)))
          __builtin_prefetch(fetch_ + k, 0, 2);
        fetch_ += step;
      }
      if (stream_) {
        announce_next_page(y + i, step * sizeof(Out));
        Ops::stream(y + i, v[0], v[1]);
        Ops::stream(y + i + 2 * w, v[2], v[3]);
      } else {
        for (int k = 0; k < 4; ++k) Ops::store(y + i + k * w, v[k]);
      }
    }
    if (stream_ && i < count) lines_.begin_line(y + i);
    while (i < count) {
      const int n = next_count(count);
      const Vector value = next(n);
      if (stream_) {
        lines_.add(value, n);
      } else if (n == w) {
        Ops::store(y + i - n, value);
      } else {
        Ops::store_part(y + i - n, value, n);
      }
    }
  }

  const Problem& problem_;
  const In* x_;
  Out* y_;
  index_type columns_;
  bool stream_;
  Waiting waiting_;
  bool copies_;  ///< the logits of a block, so that they are read once from columns that share sets
  bool in_pieces_;
  const In* fetch_ = nullptr;  ///< what is fetched next beside what is written
  int rows_;
  PanelLines<Acc, Out>& lines_;
  static constexpr int most = most_rows_of_panel<Acc, identity>;
  alignas(64) Acc max_[most + step], sum_[most + step];  ///< of each row; sum_: what the last formula takes
  alignas(64) Acc repeated_[most + step];
  alignas(64) Acc max_of_block_[identity && operation == Operation::softmax ? most + step : 1];
  static constexpr int most_in_pieces = 5 * w;
  static_assert((most_in_pieces / w + 1) * w * 5 <= most_in_pieces * 6);
  alignas(64) Acc sums_of_piece_[4 * most_in_pieces + w];
  alignas(index_type) unsigned char row_objects_[identity ? 1 : bytes_of_row_objects];
  /// Logits of a block and a group of rows: transformed, or copied.
  alignas(64) Acc logits_[block * Plan::group];
};

}  // namespace KokkosSoftmax::impl

#endif
