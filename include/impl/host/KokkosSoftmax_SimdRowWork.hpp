// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Rows whose axis is contiguous, or at least not slower than the other dimensions: what one thread does with
/// rows of one chunk, several at a time, and with the chunks of longer ones.

#ifndef KOKKOSSOFTMAX_SIMDROWWORK_HPP
#define KOKKOSSOFTMAX_SIMDROWWORK_HPP

#include <impl/host/KokkosSoftmax_SimdChunk.hpp>
#include <impl/host/KokkosSoftmax_SimdTransform.hpp>

#include <algorithm>
#include <optional>
#include <utility>

namespace KokkosSoftmax::impl {

/// One row: where it lies and its transform. (For the host alone: nvcc knows no vectors in what a device
/// could have, too.)
template <class Problem>
struct SimdRowAccess {
  const typename Problem::In* x;
  typename Problem::Out* y;
  index_type x_stride;
  typename Problem::Transform::Row transform;

  SimdRowAccess(const Problem& p, index_type position) : SimdRowAccess(p, p.geometry.row(position)) {}
  SimdRowAccess(const Problem& p, const RowGeometry::Row& row)
      : x(p.x + row.x_offset),
        y(p.y + row.y_offset),
        x_stride(p.geometry.x_column_stride),
        transform(p.transform.at_row(row.index)) {}
};

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
  using Row = SimdRowAccess<Problem>;
  using Lines = ContinuedLines<Acc, Out>;
  static constexpr int w = Ops::width;
  static constexpr bool identity = std::is_same_v<typename Problem::Transform, BoundIdentity>;
  static constexpr bool y_can_keep_exponentials = direct && std::is_same_v<Acc, Out>;
  /// Whether a mask says where in a row it drops all that follows. That is not looked at; the sums are those
  /// with -inf there.
  static constexpr bool rows_end_early = knows_end_of_kept<typename Problem::Transform::Row>;

  SimdRowWork(const Problem& problem, bool stream, bool from_memory)
      : problem_(problem),
        columns_(problem.geometry.columns),
        stream_(stream),
        from_memory_(from_memory),
        whole_lines_(writes && stream && has_whole_lines()) {}

  /// A thread's memory for rows of several chunks: the exponentials of a row if `staged`, else a chunk of
  /// logits; a second such place, or the same; twice a state for each chunk.
  struct Memory {
    Acc* stage[2];
    State* states[2];
    bool staged;
  };

  /// Rows of one chunk, in batches of as many as reductions across lanes take at once. While the exponentials
  /// of a batch are computed, the next one is read and the one before is written.
  void short_rows(index_type begin, index_type end) const {
    constexpr index_type half = Plan::chunk + w;
    alignas(64) Acc stages[direct ? half : 2 * half];
    const auto most = std::min<index_type>(most_rows, std::max<index_type>(1, Plan::batch / padded()));
    const bool overlap = writes && problem_.geometry.y_column_stride == 1;
    std::optional<Lines> continued;
    Lines* lines = nullptr;
    if (overlap && begin < end && rows_continue())
      lines = lines_at(problem_.y + problem_.geometry.row(begin).y_offset, continued);
    Batch batches[3];
    Batch *batch = batches, *next = batches + 1, *before = batches + 2;
    begin_batch(begin, std::min(most, end - begin), stages, *batch);
    for (int k = 0; direct && k < batch->rows; ++k) {
      auto work = reading(batch->x[k], columns_, {batch->x[k]});
      work.finish();
      batch->top[k] = lanes_of(work);
    }
    before->rows = 0;
    for (index_type first = begin; first < end; first += most) {
      if constexpr (!direct) load_batch(*batch);
      keep_maxima(*batch);
      // Logits that were transformed wait where exponentials are: another batch needs another place.
      Acc* stage = direct || batch->stage != stages ? stages : stages + half;
      begin_batch(first + most, std::min(most, end - first - most), stage, *next);
      if (!reduce_if_few_vectors(*batch, *next, *before, lines)) reduce_batch(*batch, *next, *before, lines);
      if constexpr (writes) {
        for (int k = batch->rows; k < before->rows; ++k) write_row(*before, k, lines);
        if (!overlap) {
          for (int k = 0; k < batch->rows; ++k) write_row(*batch, k, nullptr);
        }
      }
      Batch* done = before;
      before = batch;
      batch = next;
      next = done;
      if (!overlap) before->rows = 0;
    }
    if constexpr (writes) {
      for (int k = 0; k < before->rows; ++k) write_row(*before, k, lines);
      if (lines) lines->finish();
    }
  }

  /// Rows of several chunks, one after the other.
  void long_rows(index_type begin, index_type end, const Memory& memory) const {
    const index_type chunks = Plan::chunks(columns_);
    // Exponentials are written before others take their place.
    const bool waits = operation == Operation::log_softmax && direct;
    const bool overlap = writes && problem_.geometry.y_column_stride == 1 &&
                         (waits || (memory.staged && (direct || memory.stage[0] != memory.stage[1])));
    LongRow rows[2];
    LongRow* before = nullptr;
    std::optional<Lines> lines;
    Acc max = 0;
    for (index_type position = begin; position < end; ++position) {
      const int at = static_cast<int>((position - begin) % 2);
      LongRow& row = rows[at];
      const Row access(problem_, position);
      row.x = access.x;
      row.y = access.y;
      row.end = end_of(access);
      row.stage = memory.stage[at];
      row.states = memory.states[at];
      row.staged = memory.staged;
      const In* next_row = position + 1 < end ? problem_.x + x_offset(position + 1) : nullptr;
      for (index_type c = 0; c < chunks; ++c) {
        Acc* stage = row.stage + (row.staged ? c * Plan::chunk : 0);
        if (!direct || (position == begin && c == 0)) max = first_max(access, row.end, c, stage);
        const auto reduce_beside = [&](auto written) {
          row.states[c] =
              reduce_chunk(access.x, row.end, c, chunks, next_row, stage, row.staged, nullptr, max, written);
        };
        if (before) {
          const Outputs outputs = outputs_of_chunk(*before, c);
          reduce_beside(writing(outputs, lines_at(outputs.y, lines)));
        } else {
          reduce_beside(NoWork{});
        }
      }
      row.result = joined(row.states);
      if constexpr (operation == Operation::logsumexp) {
        *row.y = Ops::template rounded<Out>(row.result.logsumexp());
      } else if (overlap) {
        before = &row;
      } else {
        for (index_type c = 0; c < chunks; ++c)
          write_chunk(access, c, row.states[c], row.result, row.stage + (row.staged ? c * Plan::chunk : 0),
                      row.staged, nullptr, lines);
      }
    }
    if constexpr (writes) {
      for (index_type c = 0; before && c < chunks; ++c) {
        const Outputs outputs = outputs_of_chunk(*before, c);
        write(outputs, lines_at(outputs.y, lines));
      }
      if (lines) lines->finish();
    }
  }

  /// The states of chunks [first, last) of a row. The exponentials are left in `stage_of(chunk)` if `staged`,
  /// or in the output if that is `kept_in_y`.
  template <class StageOf>
  void reduce_chunks(const Row& row, index_type first, index_type last, const StageOf& stage_of, bool staged,
                     Acc* kept_in_y, State* states) const {
    const index_type end = end_of(row);
    Acc max = 0;
    for (index_type c = first; c < last; ++c) {
      if (!direct || c == first) max = first_max(row, end, c, stage_of(c));
      NoWork nothing;
      states[c] = reduce_chunk(row.x, end, c, last, nullptr, stage_of(c), staged, kept_in_y, max, nothing);
    }
  }

  /// `continued`: lines of y that chunks share, see lines_at.
  void write_chunk(const Row& row, index_type c, const State& state, const RowResult<Acc>& result, Acc* stage,
                   bool staged, Acc* kept_in_y, std::optional<Lines>& continued) const {
    const index_type begin = c * Plan::chunk;
    const Outputs outputs = outputs_of_chunk(row.x, row.y, end_of(row), c, state, result, stage);
    if constexpr (y_can_keep_exponentials) {
      if (kept_in_y) {
        const auto formula = output_formula(outputs);
        return chunk_write<Acc>(StagedExactly<Acc>{kept_in_y + begin}, outputs.count, outputs.y, false,
                                formula);
      }
    }
    Lines* const lines = lines_at(outputs.y, continued);
    if (staged) return write(outputs, lines);
    if constexpr (!direct) load_logits(row, begin, outputs.end, stage);
    if constexpr (operation == Operation::softmax) {
      const ScaledExponentialOfLogit<Acc> formula{Vector(state.max), Vector(outputs.factor)};
      store_values(logits(row.x, begin, stage), outputs.y, outputs.end, stage, formula, lines);
      if constexpr (rows_end_early) {
        store_values(StagedUpTo<Acc>{stage, 0, Acc(0)}, outputs.y + outputs.end * y_stride(),
                     outputs.count - outputs.end, stage, output_formula(outputs), lines);
      }
    } else {
      write(outputs, lines);
    }
  }

  /// Logits of any stride, transformed, into scratch.
  void load_logits(const Row& row, index_type begin, index_type count, Acc* stage) const {
    const In* x = row.x + begin * row.x_stride;
    if constexpr (identity) {
      load_transformed(row.transform, x, row.x_stride, begin, count, stage);
    } else {
      row.transform.load(x, row.x_stride, begin, count, stage);
    }
  }

  /// What the last formula takes for a chunk: a maximum, and a factor or the logarithm of the sum.
  static std::pair<Acc, Acc> numbers_of_chunk(const State& state, const RowResult<Acc>& result) {
    if constexpr (operation == Operation::softmax) return {state.max, factor_of_chunk(state, result)};
    return {result.max, result.log_sum};
  }

  RowResult<Acc> joined(const State* states) const {
    const index_type chunks = Plan::chunks(columns_);
    State total = states[0];
    for (index_type c = 1; c < chunks; ++c) total.join(states[c]);
    return RowResult<Acc>(operation, total.rounded());
  }

 private:
  static constexpr int most_rows = w;
  static constexpr bool writes = operation != Operation::logsumexp;

  /// Rows that are reduced together.
  struct Batch {
    int rows = 0;
    Acc* stage = nullptr;
    const In* x[most_rows];
    Out* y[most_rows];
    index_type index[identity ? 1 : most_rows];  ///< unless identity
    Vector top[most_rows];                       ///< the largest logits
    alignas(64) Acc max[most_rows];
    alignas(64) Acc factor[most_rows];               ///< log_softmax: the logarithm of the sum
    index_type end[rows_end_early ? most_rows : 1];  ///< if rows_end_early
  };

  struct LongRow {
    const In* x;
    Out* y;
    index_type end;
    Acc* stage;
    State* states;
    bool staged;
    RowResult<Acc> result;
  };

  /// What a piece of outputs is made of: exponentials or logits, those that were looked at, and the formula's
  /// numbers.
  struct Outputs {
    const In* x;
    Acc* stage;
    Out* y;
    index_type end, count;
    Acc max, factor;
  };

  index_type padded() const { return ceil_div(columns_, w) * w; }
  index_type y_stride() const { return direct ? 1 : problem_.geometry.y_column_stride; }

  /// Of a row that ends early.
  static constexpr int columns_at_once = operation == Operation::logsumexp ? vectors_of_step * w : w;
  /// Behind the last column of a row that is looked at: what is kept, in as many whole vectors as the sum
  /// takes at once.
  index_type end_of(const Row& row) const {
    if constexpr (rows_end_early) {
      return end_of_looked_at(row.transform.end_of_kept(columns_), columns_at_once, columns_);
    } else {
      return columns_;
    }
  }
  index_type end_of_row([[maybe_unused]] const Batch& batch, [[maybe_unused]] int k) const {
    if constexpr (rows_end_early) {
      return batch.end[k];
    } else {
      return columns_;
    }
  }
  /// Whether no row ends early.
  bool all_to_the_end(const Batch& batch) const {
    return std::all_of(batch.end, batch.end + batch.rows, [&](index_type end) { return end == columns_; });
  }
  /// Of the columns up to `end`, those of the chunk from `begin` on.
  static index_type count_of_chunk(index_type begin, index_type end) {
    const index_type count = std::min(Plan::chunk, end - begin);
    return rows_end_early ? std::max<index_type>(count, 0) : count;
  }

  [[gnu::noinline]] void begin_batch(index_type first, index_type rows, Acc* stage, Batch& batch) const {
    batch.rows = static_cast<int>(std::max<index_type>(rows, 0));
    batch.stage = stage;
    const RowGeometry& g = problem_.geometry;
    if (g.rank == 1) {
      for (int k = 0; k < batch.rows; ++k) {
        batch.x[k] = problem_.x + (first + k) * g.x_stride[0];
        batch.y[k] = problem_.y + (first + k) * g.y_stride[0];
        if constexpr (!identity) batch.index[k] = (first + k) * g.row_weight[0];
      }
      return;
    }
    for (int k = 0; k < batch.rows; ++k) {
      const RowGeometry::Row row = g.row(first + k);
      batch.x[k] = problem_.x + row.x_offset;
      batch.y[k] = problem_.y + row.y_offset;
      if constexpr (!identity) batch.index[k] = row.index;
    }
  }

  void load_batch(Batch& batch) const {
    const auto keep_top = [&](int k, index_type end) {
      MaxWork<Acc, StagedValues<Acc>> max(StagedValues<Acc>{batch.stage + k * padded()}, end);
      max.finish();
      batch.top[k] = max.lanes();
    };
    if constexpr (identity) {
      for (int k = 0; k < batch.rows; ++k) {
        load_transformed(BoundIdentity::Row(), batch.x[k], problem_.geometry.x_column_stride, 0, columns_,
                         batch.stage + k * padded());
        keep_top(k, columns_);
      }
    } else {
      problem_.transform.load_rows(batch.rows, batch.index, batch.x, problem_.geometry.x_column_stride,
                                   columns_, batch.stage, padded(), batch.end, columns_at_once);
      for (int k = 0; k < batch.rows; ++k) keep_top(k, end_of_row(batch, k));
    }
  }

  void keep_maxima(Batch& batch) const {
    Vector max = Ops::max_each(batch.top, batch.rows);
    // As finite_max has it; logsumexp asks whether there was +inf.
    if constexpr (writes)
      max = Ops::larger(Vector(-largest_v<Acc>), Ops::smaller(Vector(largest_v<Acc>), max));
    Ops::store(batch.max, max);
  }

  /// Whether each row of y begins where the one before ends.
  bool rows_continue() const {
    const RowGeometry& g = problem_.geometry;
    return g.rank == 0 || (g.rank == 1 && g.y_stride[0] == columns_);
  }

  /// For outputs from y on, where they are streamed: those that they share with the ones before them, if they
  /// go on there; else others. `place` holds them, and is finished at the end.
  Lines* lines_at(Out* y, std::optional<Lines>& place) const {
    if (!stream_ || whole_lines_ || y_stride() != 1) return nullptr;
    if (place && place->go_on_at(y)) return &*place;
    if (place) place->finish();
    return &place.emplace(y);
  }

  /// Whether outputs of one row share no cache line of y with those of another one.
  bool has_whole_lines() const {
    const RowGeometry& g = problem_.geometry;
    constexpr auto line = static_cast<index_type>(64 / sizeof(Out));
    bool whole = columns_ % line == 0 && reinterpret_cast<std::uintptr_t>(problem_.y) % 64 == 0;
    for (int d = 0; d < g.rank; ++d) whole = whole && g.y_stride[d] % line == 0;
    return whole;
  }

  /// reduce_batch for rows of at most so many vectors. (Two AVX-512 cores, float in cache, GB/s with 8 and
  /// so: 129 columns 77 and 97, 160 94 and 117; of 12 to 16 vectors with 16 no more, from memory up to a
  /// fifth less.)
  static constexpr int few_vectors = 11;
  bool reduce_if_few_vectors(Batch& batch, Batch& next, const Batch& before, Lines* lines) const {
    if constexpr (writes) {
      if ((stream_ && !whole_lines_ && !lines) || problem_.geometry.y_column_stride != 1) return false;
      if constexpr (rows_end_early) {
        if (!all_to_the_end(batch) || !all_to_the_end(before)) return false;
      }
      return [&]<int... v>(std::integer_sequence<int, v...>) {
        return ((ceil_div(columns_, w) == v + 1 &&
                 (reduce_few_vectors<v + 1>(batch, next, before, lines), true)) ||
                ...);
      }
      (std::make_integer_sequence<int, few_vectors>());
    } else {
      return false;
    }
  }

  /// reduce_batch for rows of `vectors` vectors, where all the rest would cost more than the exponentials.
  template <int vectors>
  [[gnu::noinline]] void reduce_few_vectors(Batch& batch, Batch& next, const Batch& before,
                                            Lines* lines) const {
    Vector sum[most_rows];
    const int rest = static_cast<int>(columns_) - (vectors - 1) * w;
    const auto load = [&](const In* x, const Acc* logits, int v) __attribute__((always_inline)) {
      if constexpr (!direct) return Ops::load(logits + v * w);
      if (v + 1 < vectors || rest == w) return Ops::load(x + v * w);
      return Ops::load_part(x + v * w, rest, -infinity_v<Acc>);
    };
    constexpr int row = vectors * w;
    for (int k = 0; k < batch.rows; ++k) {
      Acc* stage = batch.stage + k * row;
      if (k < before.rows) {
        const Acc* staged = before.stage + k * row;
        Out* y = before.y[k];
        const auto formula =
            output_formula({before.x[k], nullptr, y, columns_, columns_, before.max[k], before.factor[k]});
        const auto output = [&](int v) __attribute__((always_inline)) {
          return formula(
              operation == Operation::softmax ? Ops::load(staged + v * w) : load(before.x[k], staged, v), 0);
        };
        if (whole_lines_) {
          announce_next_page(y, row * sizeof(Out));
          if constexpr (64 / sizeof(Out) <= w) {
            for (int v = 0; v < vectors; ++v) Ops::stream(y + v * w, output(v));
          } else {
            for (int v = 0; v + 1 < vectors; v += 2) Ops::stream(y + v * w, output(v), output(v + 1));
          }
        } else if (lines) {
          add_row<vectors>(before, k, staged, formula, *lines);
        } else {
          for (int v = 0; v + 1 < vectors; ++v) Ops::store(y + v * w, output(v));
          if (rest == w) {
            Ops::store(y + (vectors - 1) * w, output(vectors - 1));
          } else {
            Ops::store_part(y + (vectors - 1) * w, output(vectors - 1), rest);
          }
        }
      }
      const Vector m(batch.max[k]);
      Vector a[vectors_of_step];
      for (int v = 0; v < vectors; ++v) {
        const Vector e = exp_of_vector_difference<Ops>(load(batch.x[k], stage, v) - m);
        if constexpr (kept_while_staged != Keep::none) Ops::store(stage + v * w, e);
        a[v % vectors_of_step] = v < vectors_of_step ? e : a[v % vectors_of_step] + e;
      }
      if constexpr (vectors > 1) a[0] = a[0] + a[1];
      if constexpr (vectors > 3) a[2] = a[2] + a[3];
      sum[k] = vectors > 2 ? a[0] + a[2] : a[0];
      if (k < next.rows) {
        const In* x = next.x[k];
        constexpr auto line = static_cast<int>(64 / sizeof(In));
        if (from_memory_) {
          for (int i = 0; i < row; i += line) __builtin_prefetch(x + Ahead::lead + i, 0, 2);
        }
        if constexpr (direct) {
          Vector top = load(x, nullptr, 0);
          for (int v = 1; v < vectors; ++v) top = Ops::larger(load(x, nullptr, v), top);
          next.top[k] = top;
        }
      }
    }
    finish_sums(sum, sum, batch);
  }

  /// A row of `vectors` vectors to those that rows share.
  template <int vectors, class Formula>
  KOKKOSSOFTMAX_HOST_FUNCTION void add_row(const Batch& batch, int k, [[maybe_unused]] const Acc* staged,
                                           const Formula& formula, Lines& lines) const {
    // (Vectors that are a small part of a line would need many loops, and gain little.)
    if constexpr (vectors == 1 || Lines::vectors > 4) {
      writing(outputs_of_row(batch, k), &lines).finish();
    } else {
      constexpr bool from_stage = operation == Operation::softmax || !direct;
      [[maybe_unused]] const In* x = batch.x[k];
      lines.template add_row<vectors>(
          static_cast<int>(columns_),
          [&](int i) __attribute__((always_inline)) {
            if constexpr (from_stage) return formula(Ops::load(staged + i), 0);
            return formula(Ops::load(x + i), 0);
          },
          [&](int i, [[maybe_unused]] int count) __attribute__((always_inline)) {
            if constexpr (from_stage) return formula(Ops::load(staged + i), 0);
            return formula(Ops::load_part(x + i, count, -infinity_v<Acc>), 0);
          });
    }
  }

  void reduce_batch(Batch& batch, Batch& next, const Batch& before, Lines* lines) const {
    Vector sum[most_rows], low[most_rows];
    // logsumexp:
    using Wide = typename Ops::Wide;
    [[maybe_unused]] Wide wide[most_rows];
    alignas(64) Acc max_of[most_rows] = {}, sum_of[most_rows] = {};
    // (The end of a row is asked for where it is needed: a variable that the lambda refers to would be kept
    // in memory, at 4 % of a log_softmax in cache.)
    for (int k = 0; k < batch.rows; ++k) {
      const bool more = k < next.rows;
      auto reads =
          reading(next.x[k], more ? end_of_row(batch, k) : 0, {more ? next.x[k] + Ahead::lead : nullptr});
      if constexpr (operation == Operation::logsumexp) {
        const auto source = logits(batch.x[k], 0, batch.stage + k * padded());
        max_of[k] = finite_max(batch.max[k]);
        if constexpr (Ops::compensates_several) {
          if (batch.max[k] == infinity_v<Acc>) {
            reads.finish();
            wide[k] = Wide(static_cast<double>(of_infinite(source, end_of_row(batch, k)).sum));
            low[k] = Vector(Acc(0));
          } else {
            const auto sums = chunk_accurate_sums<Acc>(source, end_of_row(batch, k), max_of[k], reads);
            wide[k] = Ops::widened_sum(sums.a, sums.b);
            low[k] = sums.low;
          }
        } else {
          NoWork nothing;
          sum_of[k] = reduce<Keep::none>(source, end_of_row(batch, k), batch.max[k], nullptr, reads, nothing)
                          .rounded()
                          .sum;
        }
      } else {
        const auto beside = [&](auto written) {
          Acc* stage = batch.stage + k * padded();
          const auto sums = chunk_exponentials<kept_while_staged>(
              logits(batch.x[k], 0, stage), end_of_row(batch, k), batch.max[k], stage, reads, written);
          sum[k] = sums.sum;
          low[k] = sums.low;
        };
        if (k < before.rows) {
          beside(writing(outputs_of_row(before, k), lines));
        } else {
          beside(NoWork{});
        }
      }
      next.top[k] = lanes_of(reads);
    }
    if constexpr (writes) {
      finish_sums(sum, low, batch);
    } else {
      Vector total = Ops::load(sum_of);
      if constexpr (Ops::compensates_several) total = Ops::compensated_sums(wide, low, batch.rows);
      const Vector result =
          Ops::load(max_of) + log_of_vector_sum<Ops>(total, -infinity_v<Acc>, infinity_v<Acc>);
      Ops::store(sum_of, result);
      for (int k = 0; k < batch.rows; ++k) *batch.y[k] = Ops::template rounded<Out>(sum_of[k]);
    }
  }

  /// From sums to what the last formula takes: RowResult for several rows.
  [[gnu::noinline]] void finish_sums(const Vector* sums, const Vector* lows, Batch& batch) const {
    Vector sum = Ops::sum_each(sums, batch.rows);
    if (columns_ > Plan::block) {
      const Vector rounded = sum + Ops::sum_each(lows, batch.rows);
      sum = Ops::select(rounded == rounded, rounded, sum);
    }
    if constexpr (operation == Operation::softmax) {
      Ops::store(batch.factor, factor_of_vector_sum<Ops>(sum));
    } else {
      Ops::store(batch.factor, log_of_vector_sum<Ops>(sum, Acc(0), nan_v<Acc>));
    }
  }

  Outputs outputs_of_row(const Batch& batch, int k) const {
    return {
        batch.x[k],     batch.stage + k * padded(), batch.y[k], end_of_row(batch, k), columns_, batch.max[k],
        batch.factor[k]};
  }

  Outputs outputs_of_chunk(const LongRow& row, index_type c) const {
    return outputs_of_chunk(row.x, row.y, row.end, c, row.states[c], row.result,
                            row.stage + (row.staged ? c * Plan::chunk : 0));
  }
  Outputs outputs_of_chunk(const In* x, Out* y, index_type end, index_type c, const State& state,
                           const RowResult<Acc>& result, Acc* stage) const {
    const index_type begin = c * Plan::chunk;
    return {x + begin,
            stage,
            y + begin * y_stride(),
            count_of_chunk(begin, end),
            count_of_chunk(begin, columns_),
            result.max,
            operation == Operation::softmax ? factor_of_chunk(state, result) : result.log_sum};
  }

  static Acc factor_of_chunk(const State& state, const RowResult<Acc>& result) {
    return exp_of_difference(state.max - result.max) * result.factor;
  }

  void write_row(const Batch& batch, int k, Lines* lines) const { write(outputs_of_row(batch, k), lines); }

  /// The maximum of a chunk of which nothing was read before; brings its logits into scratch where they do
  /// not come from x directly.
  Acc first_max(const Row& row, index_type end, index_type c, Acc* stage) const {
    const index_type begin = c * Plan::chunk, count = count_of_chunk(begin, end);
    if constexpr (!direct) load_logits(row, begin, count, stage);
    return chunk_max<Acc>(logits(row.x, begin, stage), count);
  }

  using Ahead = FetchAhead<Acc, In>;

  /// Beside exponentials: the maximum of logits as they lie in x. Where rows end early the next one is only
  /// fetched, about as much of it as of this one: it does not continue what the processor fetches by itself.
  auto reading([[maybe_unused]] const In* x, [[maybe_unused]] index_type count,
               [[maybe_unused]] const Ahead& ahead) const {
    if constexpr (direct) {
      using Work = MaxWork<Acc, LogitsInMemory<Acc, In>, Ahead>;
      return from_memory_ && ahead.at ? Work({x}, count, ahead) : Work({x}, count);
    } else if constexpr (rows_end_early) {
      return FetchWork<Acc, In>{{x}, x + count};
    } else {
      return NoWork{};
    }
  }
  template <class Work>
  KOKKOSSOFTMAX_HOST_FUNCTION static Vector lanes_of(const Work& work) {
    if constexpr (direct) {
      return work.lanes();
    } else {
      return Vector(Acc(0));
    }
  }

  /// Where outputs of `outputs` come from, and by which formula.
  auto output_source(const Outputs& outputs) const {
    if constexpr (rows_end_early) {
      return StagedUpTo<Acc>{outputs.stage, outputs.end,
                             operation == Operation::softmax ? Acc(0) : -infinity_v<Acc>};
    } else if constexpr (operation == Operation::softmax) {
      return StagedValues<Acc>{outputs.stage};
    } else {
      return logits(outputs.x, 0, outputs.stage);
    }
  }
  static auto output_formula(const Outputs& outputs) {
    if constexpr (operation == Operation::softmax) {
      return ScaledExponential<Acc>{Vector(outputs.factor)};
    } else {
      return LogitMinusLogSum<Acc>{Vector(outputs.max), Vector(outputs.factor)};
    }
  }
  /// `lines`: through these.
  auto writing([[maybe_unused]] const Outputs& outputs, [[maybe_unused]] Lines* lines = nullptr) const {
    if constexpr (writes) {
      const auto source = output_source(outputs);
      const auto formula = output_formula(outputs);
      return WriteWork<Acc, std::remove_const_t<decltype(source)>, Out,
                       std::remove_const_t<decltype(formula)>>(source, outputs.count, outputs.y, stream_,
                                                               formula, whole_lines_, lines);
    } else {
      return NoWork{};
    }
  }
  void write(const Outputs& outputs, Lines* lines = nullptr) const {
    store_values(output_source(outputs), outputs.y, outputs.count, outputs.stage, output_formula(outputs),
                 lines);
  }

  static constexpr Keep kept_while_staged = operation == Operation::softmax ? Keep::staged : Keep::none;

  /// From a chunk behind `begin` on, through the next row.
  static Ahead a_chunk_ahead(const In* x, index_type begin, index_type columns, const In* next_row) {
    const index_type at = begin + Plan::chunk + Ahead::lead;
    if (at < columns) return {x + at, next_row ? x + columns : nullptr, next_row};
    return {next_row ? next_row + (at - columns) : nullptr};
  }

  /// The state of chunk c. `max`: its maximum; then that of what comes next, which is read meanwhile: the
  /// next one of `chunks`, or the beginning of `next_row`.
  template <class Written>
  State reduce_chunk(const In* x, index_type end, index_type c, index_type chunks, const In* next_row,
                     Acc* stage, bool staged, [[maybe_unused]] Acc* kept_in_y, Acc& max,
                     Written& written) const {
    const index_type begin = c * Plan::chunk, count = count_of_chunk(begin, end);
    // What comes after the last chunk that is looked at comes beside that one, not beside those behind it.
    const bool goes_on = c + 1 < chunks && (!rows_end_early || begin + Plan::chunk < end);
    const bool reads_on = !rows_end_early || count > 0;
    const In* next = goes_on ? x + begin + Plan::chunk : next_row;
    const index_type next_begin = goes_on ? begin + Plan::chunk : 0;
    auto reads = reading(next, next && reads_on ? count_of_chunk(next_begin, end) : 0,
                         a_chunk_ahead(x, begin, columns_, next_row));
    const auto source = logits(x, begin, stage);
    State state;
    if (y_can_keep_exponentials && kept_in_y) {
      if constexpr (y_can_keep_exponentials && operation == Operation::softmax)
        state = reduce<Keep::exactly>(source, count, max, kept_in_y + begin, reads, written);
    } else if (staged) {
      state = reduce<kept_while_staged>(source, count, max, stage, reads, written);
    } else {
      state = reduce<Keep::none>(source, count, max, stage, reads, written);
    }
    if constexpr (direct) max = Ops::max(reads.lanes());
    return state;
  }

  template <Keep keep, class Source, class Next, class Written>
  static State reduce(const Source& source, index_type count, Acc max, Acc* kept, Next& next,
                      Written& written) {
    if constexpr (operation == Operation::logsumexp) {
      if (max == infinity_v<Acc>) {
        next.finish();
        return of_infinite(source, count);
      }
      return chunk_accurate_sum<Acc>(source, count, finite_max(max), next);
    } else {
      const Acc finite = finite_max(max);
      const auto sums = chunk_exponentials<keep>(source, count, finite, kept, next, written);
      return {finite, Ops::sum(sums.sum), Ops::sum(sums.low)};
    }
  }

  index_type x_offset(index_type position) const { return problem_.geometry.row(position).x_offset; }

  auto logits(const In* x, index_type begin, const Acc* stage) const {
    if constexpr (direct) {
      return LogitsInMemory<Acc, In>{x + begin};
    } else {
      return StagedValues<Acc>{stage};
    }
  }

  /// With +inf among the logits the sum says whether there is NaN too; what the exponentials are is of no
  /// matter.
  template <class Source>
  [[gnu::noinline]] static State of_infinite(const Source& source, index_type count) {
    bool nan = false;
    for (index_type i = 0; i < count; ++i) {
      alignas(64) Acc lanes[Ops::width];
      Ops::store(lanes, source.part(i, 1));
      nan = nan || lanes[0] != lanes[0];
    }
    return {largest_v<Acc>, nan ? std::numeric_limits<Acc>::quiet_NaN() : infinity_v<Acc>, Acc(0)};
  }

  /// Through scratch where y is not contiguous.
  template <class Source, class Formula>
  void store_values(const Source& source, Out* y, index_type count, Acc* stage, const Formula& formula,
                    Lines* lines) const {
    const index_type stride = y_stride();
    if (direct || stride == 1) {
      // (What a row that ends early has behind its end begins where it pleases.)
      const bool aligned = whole_lines_ && reinterpret_cast<std::uintptr_t>(y) % 64 == 0;
      WriteWork<Acc, Source, Out, Formula>(source, count, y, stream_, formula, aligned, lines).finish();
    } else {
      for (index_type i = 0; i < count; i += w) Ops::store(stage + i, formula(source(i), i));
      for (index_type i = 0; i < count; ++i) y[i * stride] = Ops::template rounded<Out>(stage[i]);
    }
  }

  const Problem& problem_;
  index_type columns_;
  bool stream_, from_memory_;
  bool whole_lines_;  ///< whether rows are streamed that share no cache line
};

}  // namespace KokkosSoftmax::impl

#endif
