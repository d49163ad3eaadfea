// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Rows whose axis is contiguous, or at least not slower than the other dimensions: what one thread does with
/// rows of one chunk, several at a time, and with the chunks of longer ones.

#ifndef KOKKOSSOFTMAX_SIMDROWWORK_HPP
#define KOKKOSSOFTMAX_SIMDROWWORK_HPP

#include <impl/host/KokkosSoftmax_SimdChunk.hpp>

namespace KokkosSoftmax::impl {

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

  /// A thread's memory for rows of several chunks: the exponentials of a row if `staged`, else a chunk of
  /// logits, and where another row's may wait, or the same; twice a state for each chunk.
  struct Memory {
    Acc* stage[2];
    State* states[2];
    bool staged;
  };

  /// Rows of one chunk, several at a time, so that neither the latency of a row's reductions nor that of its
  /// division is waited for.
  void short_rows(index_type begin, index_type end) const {
    constexpr index_type half = Plan::chunk + w;
    alignas(64) Acc stage[2 * half];
    const index_type padded = ceil_div(columns_, w) * w;
    const int batch =
        static_cast<int>(std::min<index_type>(most_rows, std::max<index_type>(1, Plan::chunk / 2 / padded)));
    alternate(begin, end, batch, {{stage, stream_ ? stage + half : stage}, {nullptr, nullptr}, true});
  }

  /// Rows of several chunks, one after the other.
  void long_rows(index_type begin, index_type end, const Memory& memory) const {
    alternate(begin, end, 1, memory);
  }

  /// The chunk's state. The exponentials are left in `stage` if `staged`, or in the output if that is
  /// `kept_in_y`.
  template <class Between>
  State reduce_chunk(const Row& row, index_type c, Acc* stage, bool staged, Acc* kept_in_y, const In* next,
                     const Between& between) const {
    const index_type begin = c * Plan::chunk, count = std::min(Plan::chunk, columns_ - begin);
    if constexpr (!direct) load_logits(row, begin, count, stage);
    const Acc max = raw_max(row.x, begin, count, stage);
    if constexpr (operation == Operation::softmax) {
      if (kept_in_y)
        return reduce<Keep::exactly>(row.x, begin, count, max, stage, kept_in_y + begin, next, between);
      if (staged) return reduce<Keep::staged>(row.x, begin, count, max, stage, stage, next, between);
    }
    return reduce<Keep::none>(row.x, begin, count, max, stage, stage, next, between);
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
  static constexpr int most_rows = 32;

  /// Rows that are reduced together, and how far their outputs are written.
  struct Batch {
    int rows = 0, row = 0;
    index_type at = 0;
    Acc* stage = nullptr;
    State* states = nullptr;  ///< of the chunks of a single row
    const In* x[most_rows];
    Out* y[most_rows];
    Acc max[most_rows], factor[most_rows];  ///< log_softmax: the logarithm of the sum in place of the factor
  };

  /// Batch after batch. Where outputs go past the caches, those of a batch are written while the next one's
  /// exponentials are computed, so that neither memory nor arithmetic waits for the other.
  void alternate(index_type begin, index_type end, int batch_rows, const Memory& memory) const {
    constexpr bool writes = operation != Operation::logsumexp;
    // Without staged exponentials the logits of a transform come through the one scratch chunk.
    const bool overlap = writes && stream_ && (memory.staged ? memory.stage[0] != memory.stage[1] : direct);
    Batch batches[2];
    Batch* pending = nullptr;
    const auto between = [&](index_type vectors) __attribute__((always_inline)) {
      if constexpr (writes) {
        if (pending) write_some(*pending, vectors, memory.staged);
      }
    };
    int k = 0;
    for (index_type first = begin; first < end; first += batch_rows) {
      Batch& batch = batches[k];
      batch.rows = static_cast<int>(std::min<index_type>(batch_rows, end - first));
      batch.row = 0;
      batch.at = 0;
      batch.stage = memory.stage[k];
      batch.states = memory.states[k];
      if (batch.states) {
        reduce_long(first, batch, memory.staged, between);
      } else {
        reduce_short(first, batch, between);
      }
      if constexpr (writes) {
        if (pending) write_some(*pending, all_vectors, memory.staged);
        if (overlap) {
          pending = &batch;
          k = 1 - k;
        } else if (direct || memory.staged) {
          write_some(batch, all_vectors, memory.staged);
        } else {
          const Row row(problem_, first);
          const RowResult<Acc> result = joined(batch.states);
          for (index_type c = 0; c < Plan::chunks(columns_); ++c)
            write_chunk(row, c, batch.states[c], result, batch.stage, false, nullptr);
        }
      }
    }
    if constexpr (writes) {
      if (pending) write_some(*pending, all_vectors, memory.staged);
    }
  }
  static constexpr index_type all_vectors = std::numeric_limits<index_type>::max() / 64;

  template <class Between>
  void reduce_short(index_type first, Batch& batch, const Between& between) const {
    const index_type padded = ceil_div(columns_, w) * w;
    State state[most_rows];
    for (int k = 0; k < batch.rows; ++k) {
      const Row row(problem_, first + k);
      batch.x[k] = row.x;
      batch.y[k] = row.y;
      if constexpr (!direct) load_logits(row, 0, columns_, batch.stage + k * padded);
      batch.max[k] = raw_max(row.x, 0, columns_, batch.stage + k * padded);
    }
    for (int k = 0; k < batch.rows; ++k) {
      const index_type next_row = std::min(first + batch.rows + k, problem_.geometry.rows - 1);
      const In* next = fetch_ ? problem_.x + x_offset(next_row) : batch.x[k];
      constexpr Keep keep = operation == Operation::softmax ? Keep::staged : Keep::none;
      Acc* stage = batch.stage + k * padded;
      state[k] = reduce<keep>(batch.x[k], 0, columns_, batch.max[k], stage, stage, next, between);
    }
    for (int k = 0; k < batch.rows; ++k) finish_row(batch, k, RowResult<Acc>(operation, state[k].rounded()));
  }

  template <class Between>
  void reduce_long(index_type position, Batch& batch, bool staged, const Between& between) const {
    const Row row(problem_, position);
    const In* next_row = problem_.x + x_offset(std::min(position + 1, problem_.geometry.rows - 1));
    const index_type chunks = Plan::chunks(columns_);
    batch.x[0] = row.x;
    batch.y[0] = row.y;
    for (index_type c = 0; c < chunks; ++c) {
      const In* next = c + 1 < chunks ? row.x + (c + 1) * Plan::chunk * row.x_stride : next_row;
      Acc* stage = batch.stage + (staged ? c * Plan::chunk : 0);
      batch.states[c] = reduce_chunk(row, c, stage, staged, nullptr, next, between);
    }
    finish_row(batch, 0, joined(batch.states));
  }

  void finish_row(Batch& batch, int k, const RowResult<Acc>& result) const {
    if constexpr (operation == Operation::logsumexp) {
      *batch.y[k] = store_as<Out>(result.logsumexp());
    } else {
      batch.max[k] = result.max;
      batch.factor[k] = operation == Operation::softmax ? result.factor : result.log_sum;
    }
  }

  /// The next `vectors` of a batch's outputs, in pieces of a row that end where a cache line does.
  void write_some(Batch& batch, index_type vectors, bool staged) const {
    const index_type padded = ceil_div(columns_, w) * w;
    while (vectors > 0 && batch.row < batch.rows) {
      const int k = batch.row;
      index_type end = columns_;
      Acc max = batch.max[k], factor = batch.factor[k];
      if (batch.states) {
        const index_type c = batch.at / Plan::chunk;
        end = std::min(end, (c + 1) * Plan::chunk);
        if constexpr (operation == Operation::softmax) {
          factor *= exp_of_difference(batch.states[c].max - max);
          max = batch.states[c].max;
        }
      }
      index_type count = end - batch.at;
      if (count > vectors * w) {
        count = vectors * w;
        if (problem_.geometry.y_column_stride == 1) {
          const auto stop = reinterpret_cast<std::uintptr_t>(batch.y[k] + batch.at + count);
          count -= static_cast<index_type>(stop % 64 / sizeof(Out));
        }
      }
      Acc* stage = batch.stage + (staged ? k * padded + batch.at : 0);
      write(batch.x[k], batch.y[k], batch.at, count, max, factor, stage, staged);
      vectors -= (count + w - 1) / w;
      batch.at += count;
      if (batch.at == columns_) {
        ++batch.row;
        batch.at = 0;
      }
    }
  }

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
      index_type i = 0;
      if constexpr (!direct && goes_on_vectors<typename Problem::Transform::Row, Ops>) {
        for (; i + w <= count; i += w) {
          Ops::store(stage + i, transformed_vector<Ops>(transform, Ops::load(x + i), begin + i));
        }
      }
      for (; i < count; ++i) stage[i] = transformed<Acc>(transform, load_as<Acc>(x[i]), begin + i);
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

  template <Keep keep, class Between>
  State reduce(const In* x, index_type begin, index_type count, Acc max, const Acc* stage, Acc* kept,
               const In* next, const Between& between) const {
    const auto source = logits(x, begin, stage);
    if (max == infinity_v<Acc>) return of_infinite(source, count);
    const char* fetched = reinterpret_cast<const char*>(next);
    const int fetched_of_vector = fetch_ ? w * static_cast<int>(sizeof(In)) : 0;
    if constexpr (operation == Operation::logsumexp) {
      return chunk_accurate_sum<Acc>(source, count, finite_max(max), fetched, fetched_of_vector);
    } else {
      return chunk_exponentials<keep>(source, count, finite_max(max), kept, fetched, fetched_of_vector,
                                      between);
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

}  // namespace KokkosSoftmax::impl

#endif
