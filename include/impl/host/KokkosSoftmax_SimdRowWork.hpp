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
  void load_logits(const Row& row, index_type begin, index_type count, Acc* stage) const {
    const In* x = row.x + begin * row.x_stride;
    if (row.x_stride == 1) {
      index_type i = 0;
      if constexpr (!direct && goes_on_vectors<typename Problem::Transform::Row, Ops>) {
        for (; i + w <= count; i += w) {
          Ops::store(stage + i, transformed_vector<Ops>(row.transform, Ops::load(x + i), begin + i));
        }
      }
      for (; i < count; ++i) stage[i] = transformed<Acc>(row.transform, load_as<Acc>(x[i]), begin + i);
    } else {
      for (index_type i = 0; i < count; ++i) {
        stage[i] = transformed<Acc>(row.transform, load_as<Acc>(x[i * row.x_stride]), begin + i);
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

}  // namespace KokkosSoftmax::impl

#endif
