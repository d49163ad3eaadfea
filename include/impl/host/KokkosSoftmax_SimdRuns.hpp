// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Few rows side by side, or rows none of which are neighbours: the axis is not contiguous, and a column does
/// not fill a vector. Lanes are then rows times blocks of columns, so that all are filled; runs of
/// neighbouring rows are brought to their lanes and back as units of bytes. What a row does with its blocks
/// is what a tile does with them (KokkosSoftmax_SimdTile.hpp), and so are its bits.

#ifndef KOKKOSSOFTMAX_SIMDRUNS_HPP
#define KOKKOSSOFTMAX_SIMDRUNS_HPP

#include <impl/host/KokkosSoftmax_SimdTile.hpp>
#include <impl/host/KokkosSoftmax_SimdTranspose.hpp>

#include <algorithm>
#include <cstring>
#include <utility>

namespace KokkosSoftmax::impl {

// ---------------------------------------------------------------------------------------------------------
// Units of bytes: a run of neighbouring rows in one column.

/// `count` units of `bytes`, and if `parts` as many again that end `rest` bytes later: not a byte besides is
/// read or written.
template <int bytes, bool parts>
void copy_units(const char* from, index_type from_distance, char* to, index_type to_distance, int count,
                int rest) {
#if !defined(__CUDACC__)  // nvcc does not know the pragma
#pragma GCC unroll 4
#endif
  for (int i = 0; i < count; ++i, from += from_distance, to += to_distance) {
    char first[bytes], last[bytes];
    std::memcpy(first, from, bytes);
    if constexpr (parts) std::memcpy(last, from + rest, bytes);
    std::memcpy(to, first, bytes);
    if constexpr (parts) std::memcpy(to + rest, last, bytes);
  }
}

using CopyUnits = void (*)(const char*, index_type, char*, index_type, int, int);
/// For units of `size` bytes, at most 64, which end `rest` bytes behind the first of two parts.
template <int bytes = 1>
CopyUnits copy_of_units(int size, int& rest) {
  rest = size - bytes;
  if (size == bytes) return &copy_units<bytes, false>;
  if (size < 2 * bytes) return &copy_units<bytes, true>;
  if constexpr (bytes < 64) return copy_of_units<2 * bytes>(size, rest);
  return nullptr;
}

/// Moves units between runs of `count` of them, at a distance of `run_distance`, and columns of units side by
/// side, at a distance of `distance`, a few runs at a time: runs whose units continue each other are one run
/// of larger units.
template <bool back>
class UnitMover {
 public:
  UnitMover(char* columns, index_type distance, index_type run_distance, int size, int count)
      : columns_(columns), distance_(distance), run_distance_(run_distance), size_(size), count_(count) {
    copy_ = copy_of_units(size, rest_);
#if defined(__AVX2__)
    transposes_ = run_distance == size && count > 1 && (size == 2 || size == 4 || size == 8);
#endif
    at_once_ = (transposes_ ? 16 : 64) / size;
  }
  /// The next run.
  void add(char* run) {
    if (waiting_ > 0 && !transposes_ && run != runs_[0] + waiting_ * size_) finish();
    if (transposes_ || waiting_ == 0) runs_[waiting_] = run;
    if (++waiting_ == at_once_) finish();
  }
  void finish() {
    if (waiting_ == 0) return;
    if (!transposes_) {
      move(runs_[0], 0, waiting_ * size_);
      waiting_ = 0;
      return;
    }
    int done = 0;
#if defined(__AVX2__)
    if (waiting_ == at_once_) {
      done = at_once_ == 2   ? transpose_units<2, back>(runs_, columns_, distance_, count_)
             : at_once_ == 4 ? transpose_units<4, back>(runs_, columns_, distance_, count_)
                             : transpose_units<8, back>(runs_, columns_, distance_, count_);
    }
#endif
    for (int i = 0; i < waiting_; ++i) move(runs_[i], done, size_);
    waiting_ = 0;
  }

 private:
  /// Of a run, but for the first `done`.
  void move(char* run, int done, int size) {
    int rest = rest_;
    const CopyUnits copy = size == size_ ? copy_ : copy_of_units(size, rest);
    char* column = columns_ + done * distance_;
    run += done * run_distance_;
    if (back) {
      copy(column, distance_, run, run_distance_, count_ - done, rest);
    } else {
      copy(run, run_distance_, column, distance_, count_ - done, rest);
    }
    columns_ += size;
  }

  char* columns_;
  index_type distance_, run_distance_;
  CopyUnits copy_;
  int size_, rest_, count_, at_once_, waiting_ = 0;
  bool transposes_ = false;
  char* runs_[8];
};

// ---------------------------------------------------------------------------------------------------------

/// Runs of neighbouring rows, few enough that a lane can have a block of columns of a row. Lanes go in
/// groups; shorter blocks at the ends of rows have groups of their own.
template <class Problem, Operation operation>
class SimdRuns : SimdLanes<Problem, operation> {
  using Lanes = SimdLanes<Problem, operation>;
  using Lanes::w;
  using typename Lanes::ColumnsOfStage;

 public:
  using Acc = typename Problem::Acc;
  using In = typename Problem::In;
  using Out = typename Problem::Out;
  using Ops = SimdOps<Acc>;
  using Vector = typename Ops::Vector;
  using Plan = SimdTilePlan<Acc>;
  static constexpr bool identity = std::is_same_v<typename Problem::Transform, BoundIdentity>;

  SimdRuns(const Problem& problem, const SimdTiles& tiles, index_type tile, bool stream)
      : problem_(problem), stream_(stream), neighbours_(static_cast<int>(tiles.inner)) {
    const RowGeometry& g = problem.geometry;
    const index_type first = tile * tiles.runs;
    runs_ = static_cast<int>(std::min<index_type>(tiles.runs, g.rows / neighbours_ - first));
    rows_ = runs_ * neighbours_;
    state_lanes_ = tiles.lanes;
    runs_of_group_ = group / neighbours_;
    for (int i = 0; i < runs_; ++i) {
      const RowGeometry::Row row = g.row((first + i) * neighbours_);
      x_offset_[i] = row.x_offset;
      y_offset_[i] = row.y_offset;
      if constexpr (!identity) {
        problem.transform.make_rows(row.index, g.rank > 0 ? g.row_weight[g.rank - 1] : 0, neighbours_,
                                    row_objects_, i * neighbours_);
      }
    }
    const auto distance = static_cast<index_type>(neighbours_);
    across_ = neighbours_ == 1 && runs_ > 1;
    dense_ = identity && g.x_column_stride == distance && g.y_column_stride == distance;
  }

  /// Rows that wait in `scratch` as a whole.
  void whole(Acc* scratch) {
    Acc *partials = scratch, *stage = scratch + Plan::partials;
    begin(0, problem_.geometry.columns);
    reduce(stage, partials, block * group);
    finish();
    if constexpr (operation != Operation::logsumexp) write_staged(stage);
  }

  /// [max of each row, sum of each row] of one chunk of long rows.
  void reduce_chunk(index_type chunk, Acc* scratch, Acc* state) {
    begin_chunk(chunk);
    reduce(scratch + Plan::partials, scratch, 0);
    Lanes::keep_state(state, max_, sum_, state_lanes_);
  }

  void join(const Acc* states, index_type chunks, index_type distance) {
    Lanes::merge(states, state_lanes_, chunks, distance, max_, sum_);
  }

  /// From the sums to what the last formula takes; writes logsumexp.
  void finish() {
    Lanes::finish_sums(max_, sum_, rows_);
    if constexpr (operation == Operation::logsumexp) {
      const RowGeometry& g = problem_.geometry;
      for (int i = 0; i < rows_; ++i) {
        const int run = i / neighbours_, at = i % neighbours_;
        const index_type distance = at > 0 ? g.y_stride[g.rank - 1] : 0;
        problem_.y[y_offset_[run] + at * distance] = Ops::template rounded<Out>(sum_[i]);
      }
    }
  }

  void write_chunk(index_type chunk, Acc* scratch) {
    begin_chunk(chunk);
    if constexpr (identity) {
      if (dense_) return write_dense();
    }
    Acc* v = scratch + Plan::partials;
    spread(max_, max_of_lane_);
    spread(sum_, sum_of_lane_);
    for (int g = 0; g < groups_; ++g) {
      load(g, v);
      const Acc *max = max_of_lane_ + g * group, *factor = sum_of_lane_ + g * group;
      write_group(g, v, [&](int l) {
        return [ m = Ops::load(max + l), f = Ops::load(factor + l) ](const Vector& x)
            __attribute__((always_inline)) {
          return output(x, m, f);
        };
      });
    }
  }

 private:
  static constexpr int block = Plan::block, group = Plan::group;
  /// A long row's last chunk has a group more.
  static constexpr int most = Plan::most_lanes + 2 * group;

  void begin_chunk(index_type chunk) {
    begin(chunk * Plan::chunk, std::min((chunk + 1) * Plan::chunk, problem_.geometry.columns));
  }

  /// Lanes for the columns [begin, end).
  void begin(index_type begin, index_type end) {
    begin_ = begin;
    columns_ = end - begin;
    whole_blocks_ = static_cast<int>(columns_ / block);
    rest_ = static_cast<int>(columns_ % block);
    whole_groups_ = (runs_ * whole_blocks_ + runs_of_group_ - 1) / runs_of_group_;
    groups_ = whole_groups_ + (rest_ > 0 ? (runs_ + runs_of_group_ - 1) / runs_of_group_ : 0);
  }

  int lane(int run, int b) const {
    const int at = b == whole_blocks_ ? run : across_ ? b * runs_ + run : run * whole_blocks_ + b;
    return (b < whole_blocks_ ? at / runs_of_group_ : whole_groups_ + at / runs_of_group_) * group +
           at % runs_of_group_ * neighbours_;
  }
  int blocks() const { return whole_blocks_ + (rest_ > 0 ? 1 : 0); }
  int columns_of(int g) const { return g < whole_groups_ ? block : rest_; }

  /// use(run, block) for each run of a group in the order of their lanes; returns how many lanes these are.
  template <class Use>
  int for_each_run(int g, const Use& use) const {
    const bool is_whole = g < whole_groups_;
    const int of_run = is_whole ? whole_blocks_ : 1;
    const int first = (is_whole ? g : g - whole_groups_) * runs_of_group_;
    const int last = std::min(first + runs_of_group_, runs_ * of_run);
    const int of_line = across_ ? runs_ : of_run;
    for (int i = first, line = first / of_line, at = first % of_line; i < last; ++i) {
      const int run = across_ ? at : line, b = across_ ? line : at;
      use(run, is_whole ? b : whole_blocks_);
      if (++at == of_line) {
        ++line;
        at = 0;
      }
    }
    return (last - first) * neighbours_;
  }

  index_type x_distance() const { return problem_.geometry.x_column_stride; }
  index_type y_distance() const { return problem_.geometry.y_column_stride; }

  /// Where a group's first run begins.
  template <class T>
  T* first_of(T* base, const index_type* offsets, index_type distance, int g) const {
    const bool is_whole = g < whole_groups_;
    const int first = (is_whole ? g : g - whole_groups_) * runs_of_group_;
    const int of_line = across_ ? runs_ : is_whole ? whole_blocks_ : 1;
    const int line = first / of_line, at = first % of_line;
    const int run = across_ ? at : line, b = !is_whole ? whole_blocks_ : across_ ? line : at;
    return base + offsets[run] + (begin_ + b * block) * distance;
  }

  /// Lines to be fetched: the processor does not see by itself where lanes are filled next, which is across
  /// their columns.
  struct NextGroup {
    const void *stage, *x;
    KOKKOSSOFTMAX_HOST_FUNCTION void fetch() {
      __builtin_prefetch(stage, 1, 3);
      __builtin_prefetch(x, 0, 2);
      stage = static_cast<const char*>(stage) + 64;
      x = static_cast<const char*>(x) + 64;
    }
  };

  /// What each lane's row has.
  void spread(const Acc* of_row, Acc* of_lane) const {
    if (across_) {
      for (int b = 0; b < blocks(); ++b) {
        Acc* to = of_lane + lane(0, b);
        for (int l = 0; l < runs_; l += w) Ops::store(to + l, Ops::load(of_row + l));
      }
      return;
    }
    for (int g = 0; g < groups_; ++g) {
      Acc* to = of_lane + g * group;
      for_each_run(g, [&](int run, int) {
        const Acc* from = of_row + run * neighbours_;
        for (int l = 0; l < neighbours_; l += w) Ops::store(to + l, Ops::load(from + l));
        to += neighbours_;
      });
    }
  }

  /// A block of logits of a group's lanes.
  [[gnu::noinline]] void load(int g, Acc* v) const {
    const int columns = columns_of(g);
    int lanes = 0;
    const auto bring = [&](In* to) {
      const auto size = static_cast<index_type>(sizeof(In));
      UnitMover<false> mover(reinterpret_cast<char*>(to), group * size, x_distance() * size,
                             neighbours_ * static_cast<int>(size), columns);
      lanes = for_each_run(g, [&](int run, int b) {
        const In* x = problem_.x + x_offset_[run] + (begin_ + b * block) * x_distance();
        mover.add(const_cast<char*>(reinterpret_cast<const char*>(x)));  // which it only reads
      });
      mover.finish();
    };
    if constexpr (std::is_same_v<In, Acc>) {
      bring(v);
    } else {
      alignas(64) In narrow[block * group];
      bring(narrow);
      for (int c = 0; c < columns; ++c)
        for (int l = 0; l < lanes; l += w) Ops::store(v + c * group + l, Ops::load(narrow + c * group + l));
    }
    for (int l = lanes; l % w != 0; ++l)
      for (int c = 0; c < columns; ++c) v[c * group + l] = -infinity_v<Acc>;
    if constexpr (!identity) {
      const void* row[group];
      index_type first_column[group];
      int lane = 0;
      for_each_run(g, [&](int run, int b) {
        for (int i = 0; i < neighbours_; ++i, ++lane) {
          row[lane] = problem_.transform.object(row_objects_, run * neighbours_ + i);
          first_column[lane] = begin_ + b * block;
        }
      });
      for (; lane % w != 0; ++lane) {
        row[lane] = row[lane - 1];
        first_column[lane] = first_column[lane - 1];
      }
      for (int l = 0; l < lanes; l += w) {
        problem_.transform(row + l, first_column + l, 0, std::min(w, lanes - l), columns, v + l, group, v + l,
                           group);
      }
    }
  }
  int lanes_of(int g) const {
    return (for_each_run(g, [](int, int) {}) + w - 1) / w * w;
  }

  /// Maxima and sums of the rows over these columns; the groups' exponentials or logits are left at
  /// `distance` in `stage`, their maxima in `partials`.
  void reduce(Acc* stage, Acc* partials, int distance) {
    any_infinite_ = false;
    Acc* const sums = partials + groups_ * group;
    for (int g = 0; g < groups_; ++g) {
      Acc *v = stage + g * distance, *max = partials + g * group, *sum = sums + g * group;
      load(g, v);
      const int columns = columns_of(g), lanes = lanes_of(g);
      for (int l = 0; l < lanes; l += w) {
        Vector m0(-infinity_v<Acc>), m1 = m0;
        int c = 0;
        for (; c + 2 <= columns; c += 2) {
          m0 = Ops::larger(Ops::load(v + c * group + l), m0);
          m1 = Ops::larger(Ops::load(v + (c + 1) * group + l), m1);
        }
        if (c < columns) m0 = Ops::larger(Ops::load(v + c * group + l), m0);
        const Vector top = Ops::larger(m0, m1);
        any_infinite_ = any_infinite_ || Ops::max(top) == infinity_v<Acc>;
        Ops::store(max + l, Lanes::finite(top));
      }
      if (any_infinite_) note_infinite(g, v, max);
      NextGroup next{v + distance, v};
      if (!across_ && x_distance() == neighbours_)
        next.x = first_of(problem_.x, x_offset_, x_distance(), g) + runs_of_group_ * block * neighbours_;
      for (int l = 0; l < lanes; l += w) {
        constexpr bool keep = operation == Operation::softmax;
        Lanes::template add_block<keep>(ColumnsOfStage{v + l, group}, v + l, group, columns, max + l, sum + l,
                                        next);
        if (any_infinite_) take_infinite(l, sum);
      }
    }
    join_blocks(partials, sums);
  }

  /// exp of a vector makes NaN of +inf: where there was no NaN, the sum is +inf.
  [[gnu::noinline]] void note_infinite(int g, const Acc* v, const Acc* max) {
    for (int l = 0; l < group; ++l) {
      bool nan = max[l] != largest_v<Acc>, infinite = false;
      for (int c = 0; c < columns_of(g); ++c) {
        nan = nan || v[c * group + l] != v[c * group + l];
        infinite = infinite || v[c * group + l] == infinity_v<Acc>;
      }
      infinite_[l] = infinite && !nan;
    }
  }
  [[gnu::noinline]] void take_infinite(int begin, Acc* sum) const {
    for (int l = begin; l < begin + w; ++l) sum[l] = infinite_[l] ? infinity_v<Acc> : sum[l];
  }

  /// Of each row, over its blocks in order.
  void join_blocks(const Acc* maxima, const Acc* sums) {
    const int count = blocks();
    // Lanes that follow the rows are one run.
    const int runs = across_ ? 1 : runs_, side = across_ ? runs_ : neighbours_;
    for (int run = 0; run < runs; ++run) {
      for (int l = 0; l < side; l += w) {
        Vector max = Ops::load(maxima + lane(run, 0) + l);
        for (int b = 1; b < count; ++b) max = Ops::larger(Ops::load(maxima + lane(run, b) + l), max);
        Ops::store(max_ + run * neighbours_ + l, max);
      }
    }
    spread(max_, max_of_lane_);
    for (int l = 0; l < groups_ * group; l += w) {
      const Vector difference = Ops::load(maxima + l) - Ops::load(max_of_lane_ + l);
      Ops::store(factor_of_lane_ + l, exp_of_vector_difference<Ops>(difference));
    }
    for (int run = 0; run < runs; ++run) {
      for (int l = 0; l < side; l += w) {
        CompensatedVector<Acc> sum;
        for (int b = 0; b < count; ++b) {
          const int at = lane(run, b) + l;
          sum.add(Lanes::share_of_block(Ops::load(sums + at), Ops::load(factor_of_lane_ + at)));
        }
        Ops::store(sum_ + run * neighbours_ + l, Lanes::sum_without_nan(sum));
      }
    }
  }

  KOKKOSSOFTMAX_HOST_FUNCTION static Vector output(const Vector& x, const Vector& max, const Vector& factor) {
    if constexpr (operation == Operation::softmax) {
      return exp_of_vector_difference<Ops>(x - max) * factor;
    } else {
      return (x - max) - factor;
    }
  }

  /// Of the exponentials, or the logits for log_softmax, in `stage`.
  void write_staged(Acc* stage) {
    spread(sum_, sum_of_lane_);
    for (int g = 0; g < groups_; ++g, stage += block * group) {
      const Acc *max = max_of_lane_ + g * group, *sum = sum_of_lane_ + g * group;
      const Acc* factor = factor_of_lane_ + g * group;
      write_group(g, stage, [&](int l) {
        if constexpr (operation == Operation::softmax) {
          return [scale = Ops::load(factor + l) * Ops::load(sum + l)](const Vector& v)
              __attribute__((always_inline)) {
            return v * scale;
          };
        } else {
          return [ m = Ops::load(max + l), s = Ops::load(sum + l) ](const Vector& v)
              __attribute__((always_inline)) {
            return output(v, m, s);
          };
        }
      });
    }
  }

  /// formula(lane)(value) of a group's values, to y.
  template <class Formula>
  void write_group(int g, Acc* v, const Formula& formula) const {
    const int columns = columns_of(g), lanes = lanes_of(g);
    const bool stream = stream_ && y_distance() == neighbours_;
    const auto bring_back = [&](Out* from) {
      const char* y = reinterpret_cast<const char*>(first_of(problem_.y, y_offset_, y_distance(), g));
      for (int l = 0; l < lanes; l += w) {
        const auto output_of_lanes = formula(l);
        for (int c = 0; c < columns; ++c, y += w * sizeof(Out)) {
          if (!stream) __builtin_prefetch(y, 1, 3);
          Ops::store(from + c * group + l, output_of_lanes(Ops::load(v + c * group + l)));
        }
      }
      stream ? stream_group(g, from) : store_group(g, from);
    };
    if constexpr (std::is_same_v<Out, Acc>) {
      bring_back(v);
    } else {
      alignas(64) Out narrow[block * group];
      bring_back(narrow);
    }
  }

  /// A group's outputs to where they belong.
  [[gnu::noinline]] void store_group(int g, Out* from) const {
    const auto size = static_cast<index_type>(sizeof(Out));
    UnitMover<true> mover(reinterpret_cast<char*>(from), group * size, y_distance() * size,
                          neighbours_ * static_cast<int>(size), columns_of(g));
    for_each_run(g, [&](int run, int b) { mover.add(output_of(run, b)); });
    mover.finish();
  }
  /// The same past the caches, where the columns of y continue each other.
  [[gnu::noinline]] void stream_group(int g, Out* from) const {
    const auto size = static_cast<index_type>(sizeof(Out));
    alignas(64) char waiting[block * group * sizeof(Out)];
    UnitMover<true> mover(reinterpret_cast<char*>(from), group * size, y_distance() * size,
                          neighbours_ * static_cast<int>(size), columns_of(g));
    const int bytes = columns_of(g) * neighbours_ * static_cast<int>(size);
    char* at = waiting;
    for_each_run(g, [&](int, int) { mover.add(std::exchange(at, at + bytes)); });
    mover.finish();
    at = waiting;
    for_each_run(
        g, [&](int run, int b) { stream_bytes(output_of(run, b), std::exchange(at, at + bytes), bytes); });
  }
  char* output_of(int run, int b) const {
    return reinterpret_cast<char*>(problem_.y + y_offset_[run] + (begin_ + b * block) * y_distance());
  }

  /// Columns that continue each other in x and y: as they lie there, beside what their rows have, repeated.
  void write_dense() {
    constexpr int columns = 64;
    for (int run = 0; run < runs_; ++run) {
      if (repeated_ != run) {
        for (int c = 0; c < columns; ++c) {
          for (int l = 0; l < neighbours_; l += w) {
            Ops::store(max_of_lane_ + c * neighbours_ + l, Ops::load(max_ + run * neighbours_ + l));
            Ops::store(sum_of_lane_ + c * neighbours_ + l, Ops::load(sum_ + run * neighbours_ + l));
          }
        }
        repeated_ = run;
      }
      const auto formula = [&](const Vector& v, index_type i) __attribute__((always_inline)) {
        return output(v, Ops::load(max_of_lane_ + i), Ops::load(sum_of_lane_ + i));
      };
      for (index_type c = 0; c < columns_; c += columns) {
        const index_type at = (begin_ + c) * neighbours_;
        chunk_write<Acc>(LogitsInMemory<Acc, In>{problem_.x + x_offset_[run] + at},
                         std::min<index_type>(columns, columns_ - c) * neighbours_,
                         problem_.y + y_offset_[run] + at, stream_, formula);
      }
    }
  }

  const Problem& problem_;
  bool stream_, dense_, any_infinite_ = false;
  bool across_;  ///< lanes follow the rows, which may be neighbours in x or in y, before they follow the
                 ///< blocks
  int neighbours_, runs_, rows_, state_lanes_, runs_of_group_;
  index_type begin_ = 0, columns_ = 0;
  int whole_blocks_ = 0, rest_ = 0, whole_groups_ = 0, groups_ = 0;
  int repeated_ = -1;  ///< the run whose values are repeated for write_dense
  index_type x_offset_[most], y_offset_[most];
  alignas(index_type) unsigned char row_objects_[identity ? 1 : bytes_of_row_objects];
  bool infinite_[group];
  alignas(64) Acc max_[most + w], sum_[most + w];  ///< of each row; sum_: then what the last formula takes
  alignas(64) Acc max_of_lane_[most + w], sum_of_lane_[most + w], factor_of_lane_[most + w];
};

}  // namespace KokkosSoftmax::impl

#endif
