// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// What the host does with a chunk of a row, in vectors: its maximum, its exponentials to that maximum and
/// their sum, its outputs. Whether exponentials are kept or computed once more, and where they go, moves no
/// bits.

#ifndef KOKKOSSOFTMAX_SIMDCHUNK_HPP
#define KOKKOSSOFTMAX_SIMDCHUNK_HPP

#include <impl/host/KokkosSoftmax_Simd.hpp>
#include <impl/portable/KokkosSoftmax_RowBlocks.hpp>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace KokkosSoftmax::impl {

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
  /// Elements of several short rows that are worked on together (which moves no bits).
  static constexpr index_type batch = chunk / 2;

  static index_type chunks(index_type columns) { return ceil_div(columns, chunk); }
};

/// Logits as they lie in memory: contiguous, no transform.
template <class Acc, class In>
struct LogitsInMemory {
  using Ops = SimdOps<Acc>;
  const In* x;
  KOKKOSSOFTMAX_HOST_FUNCTION typename Ops::Vector operator()(index_type i) const { return Ops::load(x + i); }
  KOKKOSSOFTMAX_HOST_FUNCTION typename Ops::Vector part(index_type i, int count) const {
    return Ops::load_part(x + i, count, -infinity_v<Acc>);
  }
  /// Before the first one that a vector can begin with which lies where its bytes divide addresses: fewer
  /// than a vector has.
  KOKKOSSOFTMAX_HOST_FUNCTION index_type columns_before_whole_vectors() const {
    constexpr std::uintptr_t bytes = Ops::width * sizeof(In);
    return static_cast<index_type>(-reinterpret_cast<std::uintptr_t>(x) % bytes / sizeof(In));
  }
};

/// Logits or exponentials in a thread's scratch, filled up to whole vectors with -inf or 0. Parts are read as
/// whole vectors wherever they begin: scratch has room for one vector behind the last value.
template <class Acc>
struct StagedValues {
  using Ops = SimdOps<Acc>;
  const Acc* v;
  KOKKOSSOFTMAX_HOST_FUNCTION typename Ops::Vector operator()(index_type i) const { return Ops::load(v + i); }
  KOKKOSSOFTMAX_HOST_FUNCTION typename Ops::Vector part(index_type i, int) const { return Ops::load(v + i); }
};

/// Exponentials that wait in the output: not a byte more is read.
template <class Acc>
struct StagedExactly {
  using Ops = SimdOps<Acc>;
  const Acc* v;
  KOKKOSSOFTMAX_HOST_FUNCTION typename Ops::Vector operator()(index_type i) const { return Ops::load(v + i); }
  KOKKOSSOFTMAX_HOST_FUNCTION typename Ops::Vector part(index_type i, int count) const {
    return Ops::load_part(v + i, count, Acc(0));
  }
};

/// What is in scratch, as StagedValues has it, up to `end`; nothing was staged behind it, where all are
/// `rest`.
template <class Acc>
struct StagedUpTo {
  using Ops = SimdOps<Acc>;
  const Acc* v;
  index_type end;
  Acc rest;
  KOKKOSSOFTMAX_HOST_FUNCTION typename Ops::Vector operator()(index_type i) const {
    const typename Ops::Vector behind(rest);
    if (i >= end) return behind;
    const auto staged = Ops::load(v + i);
    return i + Ops::width <= end ? staged : Ops::select(Ops::mask_of_first(end - i), staged, behind);
  }
  KOKKOSSOFTMAX_HOST_FUNCTION typename Ops::Vector part(index_type i, int) const { return (*this)(i); }
};

// ---------------------------------------------------------------------------------------------------------
// What memory does: the maximum of logits, which is found while they come from memory, and the outputs.
// Both go on in steps of four vectors, so that they can be done beside exponentials.

inline constexpr int vectors_of_step = 4;

/// Nothing.
struct NoWork {
  /// As many as anything beside it has.
  KOKKOSSOFTMAX_HOST_FUNCTION static constexpr index_type steps() { return index_type(1) << 40; }
  KOKKOSSOFTMAX_HOST_FUNCTION static constexpr bool in_bursts() { return false; }
  KOKKOSSOFTMAX_HOST_FUNCTION static void step() {}
  KOKKOSSOFTMAX_HOST_FUNCTION static void finish() {}
};

/// What is to be fetched from memory, a step of four vectors at a time: from `at` to `end`, then from `then`
/// on. It runs ahead of what is looked at next by as much as memory takes to answer.
template <class Acc, class In>
struct FetchAhead {
  static constexpr index_type lead = 4096 / sizeof(In);
  static constexpr int step = vectors_of_step * SimdOps<Acc>::width;
  const In *at = nullptr, *end = nullptr, *then = nullptr;

  KOKKOSSOFTMAX_HOST_FUNCTION void fetch() {
    constexpr int line = 64 / sizeof(In);
    for (int k = 0; k < step; k += line) __builtin_prefetch(at + k, 0, 2);
    at += step;
    if (at >= end && end) {
      at = then + (at - end);
      end = nullptr;
    }
  }
};

/// Nothing but fetches what will be read.
template <class Acc, class In>
struct FetchWork {
  FetchAhead<Acc, In> ahead;
  const In* end;

  KOKKOSSOFTMAX_HOST_FUNCTION static constexpr index_type steps() { return NoWork::steps(); }
  KOKKOSSOFTMAX_HOST_FUNCTION void step() {
    if (ahead.at < end) ahead.fetch();
  }
  KOKKOSSOFTMAX_HOST_FUNCTION void finish() {
    while (ahead.at < end) ahead.fetch();
  }
};

/// The largest logit; NaN is passed over.
template <class Acc, class Source, class Ahead = NoWork>
class MaxWork {
 public:
  using Ops = SimdOps<Acc>;
  using Vector = typename Ops::Vector;

  KOKKOSSOFTMAX_HOST_FUNCTION MaxWork(const Source& source, index_type count)
      : source_(source), count_(count) {}
  /// From memory: steps only fetch; the logits are looked at when they have come, in a loop of their own,
  /// because what waits for memory holds up the arithmetic beside it.
  KOKKOSSOFTMAX_HOST_FUNCTION MaxWork(const Source& source, index_type count, const Ahead& ahead)
      : source_(source), ahead_(ahead), count_(count), from_memory_(true) {}

  KOKKOSSOFTMAX_HOST_FUNCTION index_type steps() const {
    return from_memory_ ? NoWork::steps() : count_ / (vectors_of_step * w);
  }
  KOKKOSSOFTMAX_HOST_FUNCTION void step() {
    if constexpr (!std::is_same_v<Ahead, NoWork>) {
      if (from_memory_) return ahead_.fetch();
    }
    look();
  }
  KOKKOSSOFTMAX_HOST_FUNCTION void finish() {
    if (from_memory_ && count_ % (vectors_of_step * w) != 0) step();
    if constexpr (requires { source_.columns_before_whole_vectors(); }) {
      // Of what has just come no vector lies across two lines: it would wait for both.
      if (from_memory_ && count_ > 2 * vectors_of_step * w) {
        m0_ = Ops::larger(source_(0), m0_);
        at_ = source_.columns_before_whole_vectors();
        while (at_ + vectors_of_step * w <= count_) look();
        for (; at_ + w <= count_; at_ += w) m0_ = Ops::larger(source_(at_), m0_);
        m1_ = Ops::larger(source_(count_ - w), m1_);
        at_ = count_;
        return;
      }
    }
    while (at_ + vectors_of_step * w <= count_) look();
    for (; at_ + w <= count_; at_ += w) m0_ = Ops::larger(source_(at_), m0_);
    if (at_ < count_) m1_ = Ops::larger(source_.part(at_, static_cast<int>(count_ - at_)), m1_);
    at_ = count_;
  }
  /// The largest in any lane.
  KOKKOSSOFTMAX_HOST_FUNCTION Vector lanes() const { return Ops::larger(m0_, m1_); }

 private:
  static constexpr int w = Ops::width;

  KOKKOSSOFTMAX_HOST_FUNCTION void look() {
    m0_ = Ops::larger(source_(at_), m0_);
    m1_ = Ops::larger(source_(at_ + w), m1_);
    m0_ = Ops::larger(source_(at_ + 2 * w), m0_);
    m1_ = Ops::larger(source_(at_ + 3 * w), m1_);
    at_ += vectors_of_step * w;
  }
  Source source_;
  [[no_unique_address]] Ahead ahead_;
  index_type count_, at_ = 0;
  bool from_memory_ = false;
  Vector m0_ = Vector(-infinity_v<Acc>), m1_ = m0_;
};

template <class Acc, class Source>
KOKKOSSOFTMAX_HOST_FUNCTION Acc chunk_max(const Source& source, index_type count) {
  MaxWork<Acc, Source> work(source, count);
  work.finish();
  return SimdOps<Acc>::max(work.lanes());
}

/// Where a stream of `bytes` comes to a page of 4 KB: fetches a line of the next one for writing, so that its
/// address is looked up beside the arithmetic; stores past the caches would stand still for that.
KOKKOSSOFTMAX_HOST_FUNCTION void announce_next_page(const void* p, std::size_t bytes) {
  constexpr std::size_t page = 4096;
  if (reinterpret_cast<std::uintptr_t>(p) % page < bytes)
    __builtin_prefetch(static_cast<const char*>(p) + page, 1);
}

/// `count` bytes past the caches, but for parts of lines at their ends.
inline void stream_bytes(char* to, const char* from, int count) {
  const int head = std::min(count, static_cast<int>(-reinterpret_cast<std::uintptr_t>(to) % 64));
  int i = head;
  if (head > 0) std::memcpy(to, from, static_cast<std::size_t>(head));
  for (; i + 64 <= count; i += 64) {
    announce_next_page(to + i, 64);
    SimdOps<float>::stream_line(to + i, from + i);
  }
  if (i < count) std::memcpy(to + i, from + i, static_cast<std::size_t>(count - i));
}

/// Outputs that follow each other in y, row after row or chunk after chunk, past the caches in whole lines:
/// what one leaves of a line waits in vectors for the next one. (In memory it would wait long: a line that
/// two stores made is read only when both have left the queue in which streaming stores wait for memory.)
template <class Acc, class Out>
class ContinuedLines {
 public:
  using Ops = SimdOps<Acc>;
  using Vector = typename Ops::Vector;
  static constexpr int w = Ops::width;
  /// Elements of a cache line, or of a vector if that is more.
  static constexpr int line = std::max(w, static_cast<int>(64 / sizeof(Out)));
  static constexpr int vectors = line / w;  ///< of a line

  /// Lines from the one of `y` on, whose outputs before `y` are not these.
  KOKKOSSOFTMAX_HOST_FUNCTION explicit ContinuedLines(Out* y)
      : others_(static_cast<int>(reinterpret_cast<std::uintptr_t>(y) % (line * sizeof(Out)) / sizeof(Out))),
        filled_(others_),
        y_(y - others_) {
    for (Vector& v : waiting_) v = Vector(Acc(0));
  }

  /// The first of `count` outputs, as many as the line that waits lacks, or all. `output(i, n)` is a vector
  /// of those from i on, of which n are there.
  template <class Output>
  KOKKOSSOFTMAX_HOST_FUNCTION index_type complete(index_type count, const Output& output) {
    if (filled_ == 0) return 0;
    const int taken = static_cast<int>(std::min<index_type>(line - filled_, count));
    for (int j = filled_ / w; j < vectors && j * w < filled_ + taken; ++j) {
      const int first = j * w - filled_;
      if (first >= 0) {
        waiting_[j] = output(first, static_cast<int>(std::min<index_type>(w, count - first)));
      } else {
        const Vector first_ones = output(0, static_cast<int>(std::min<index_type>(w, count)));
        const Vector later = Ops::permuted(first_ones, lane_before.data() + w + first);
        waiting_[j] = Ops::select(Ops::mask_of_first(-first), waiting_[j], later);
      }
    }
    filled_ += taken;
    if (filled_ < line) return taken;
    put_line(waiting_);
    filled_ = 0;
    return taken;
  }
  /// One more line, where none waits.
  template <class Output>
  KOKKOSSOFTMAX_HOST_FUNCTION void add_line(index_type i, const Output& output) {
    Vector v[vectors];
    for (int j = 0; j < vectors; ++j) v[j] = output(i + j * w, w);
    stream(y_, v);
    y_ += line;
  }
  /// Part of a line, where none waits.
  template <class Output>
  KOKKOSSOFTMAX_HOST_FUNCTION void keep(index_type i, int count, const Output& output) {
    for (int j = 0; j * w < count; ++j) waiting_[j] = output(i + j * w, std::min(w, count - j * w));
    filled_ = count;
  }
  /// A row of more than `vectors_of_row` - 1 vectors and at most so many, two at least. `output(i)` is a
  /// vector of its outputs from i on, and behind its end anything; `last(i, n)` has its last n.
  template <int vectors_of_row, class Output, class Last>
  KOKKOSSOFTMAX_HOST_FUNCTION void add_row(int count, const Output& output, const Last& last) {
    const int first = filled_ / w;
    [&]<int... j>(std::integer_sequence<int, j...>) __attribute__((always_inline)) {
      static_cast<void>(
          ((first == j && (add_row_from<j, vectors_of_row>(count, output, last), true)) || ...));
    }
    (std::make_integer_sequence<int, vectors>());
  }
  KOKKOSSOFTMAX_HOST_FUNCTION bool waits() const { return filled_ > 0; }
  /// The next line is that of y: those before it went there past this.
  KOKKOSSOFTMAX_HOST_FUNCTION void pass(Out* y) { y_ = y; }
  /// Whether what comes next belongs to y.
  bool go_on_at(const Out* y) const { return y_ + filled_ == y; }
  KOKKOSSOFTMAX_HOST_FUNCTION void finish() {
    if (filled_ > others_) write_part(waiting_, filled_);
    others_ = filled_;
  }

 private:
  /// The same where the vector of the line that is not whole is known.
  template <int first, int vectors_of_row, class Output, class Last>
  KOKKOSSOFTMAX_HOST_FUNCTION void add_row_from(int count, const Output& output, const Last& last) {
    const int at = filled_ % w, all = at + count, rest = all % w;
    Vector v[vectors];
    for (int j = 0; j < first; ++j) v[j] = waiting_[j];
    const auto add = [&](auto k, const Vector& vector) __attribute__((always_inline)) {
      constexpr int j = (first + k()) % vectors;
      v[j] = vector;
      if constexpr (j + 1 == vectors) put_line(v);
    };
    const auto keep = [&](auto k) __attribute__((always_inline)) {
      constexpr int j = (first + k()) % vectors;
      for (int i = 0; i < j; ++i) waiting_[i] = v[i];
      if (rest > 0) waiting_[j] = last(count - rest, rest);
      filled_ = j * w + rest;
    };
    const Vector later = Ops::permuted(output(0), lane_before.data() + w - at);
    add(std::integral_constant<int, 0>(), Ops::select(Ops::mask_of_first(at), waiting_[first], later));
    [&]<int... k>(std::integer_sequence<int, k...>) __attribute__((always_inline)) {
      (add(std::integral_constant<int, k + 1>(), output((k + 1) * w - at)), ...);
    }
    (std::make_integer_sequence<int, vectors_of_row - 2>());
    if (all >= vectors_of_row * w) {
      add(std::integral_constant<int, vectors_of_row - 1>(), output((vectors_of_row - 1) * w - at));
      keep(std::integral_constant<int, vectors_of_row>());
    } else {
      keep(std::integral_constant<int, vectors_of_row - 1>());
    }
  }

  /// Lane i of what is read from w - n on is (i - n) modulo w.
  alignas(64) static constexpr auto lane_before = [] {
    std::array<typename Ops::Integer, 2 * w> lanes{};
    for (int i = 0; i < 2 * w; ++i) lanes[static_cast<std::size_t>(i)] = i % w;
    return lanes;
  }();

  KOKKOSSOFTMAX_HOST_FUNCTION static void stream(Out* y, const Vector* v) {
    announce_next_page(y, line * sizeof(Out));
    if constexpr (vectors == 1) {
      Ops::stream(y, v[0]);
    } else {
      for (int j = 0; j < vectors; j += 2) Ops::stream(y + j * w, v[j], v[j + 1]);
    }
  }
  KOKKOSSOFTMAX_HOST_FUNCTION void put_line(const Vector* v) {
    if (others_ > 0) {
      write_part(v, line);
    } else {
      stream(y_, v);
    }
    others_ = 0;
    y_ += line;
  }
  /// Of a line that has outputs of others, too, up to `end`.
  [[gnu::noinline]] void write_part(const Vector* v, int end) const {
    alignas(64) Out all[line];
    for (int j = 0; j * w < end; ++j) Ops::store(all + j * w, v[j]);
    std::memcpy(y_ + others_, all + others_, static_cast<std::size_t>(end - others_) * sizeof(Out));
  }

  int others_;  ///< outputs at the beginning of the line that waits that are not these
  int filled_;  ///< outputs of it that are there, with those
  Out* y_;      ///< where it goes
  Vector waiting_[vectors];
};

/// y = formula(value, index) for `count` values; to be streamed past the caches or not.
template <class Acc, class Source, class Out, class Formula>
class WriteWork {
 public:
  using Ops = SimdOps<Acc>;

  using Lines = ContinuedLines<Acc, Out>;

  /// Streams begin where a cache line of y does: what lies before is written here, if y is not `aligned`.
  /// `lines`: what is not whole lines goes through these.
  KOKKOSSOFTMAX_HOST_FUNCTION WriteWork(const Source& source, index_type count, Out* y, bool stream,
                                        const Formula& formula, bool aligned = false, Lines* lines = nullptr)
      : source_(source), formula_(formula), y_(y), lines_(lines), count_(count), stream_(stream) {
    if (!stream_) return;
    if (lines_) {
      at_ = lines_->complete(count_, output());
      return;
    }
    const auto bytes = static_cast<std::size_t>(count) * sizeof(Out);
    streams_rest_ = aligned || bytes >= least_row;
    if (aligned) return;
    // The line that this row, or one a little later, shares with the one behind it is written in parts.
    if (streams_rest_)
      __builtin_prefetch(y + count * (1 + static_cast<index_type>(least_row * 2 / bytes)) - 1, 1);
    write_head();
  }

  /// Memory takes a few lines one after the other better than single ones between reads.
  KOKKOSSOFTMAX_HOST_FUNCTION bool in_bursts() const { return stream_; }
  KOKKOSSOFTMAX_HOST_FUNCTION index_type steps() const { return (count_ - at_) / (vectors_of_step * w); }
  KOKKOSSOFTMAX_HOST_FUNCTION void step() {
    const auto v0 = one(at_), v1 = one(at_ + w), v2 = one(at_ + 2 * w), v3 = one(at_ + 3 * w);
    Out* y = y_ + at_;
    if (stream_) {
      announce_next_page(y, vectors_of_step * w * sizeof(Out));
      Ops::stream(y, v0, v1);
      Ops::stream(y + 2 * w, v2, v3);
    } else {
      Ops::store(y, v0);
      Ops::store(y + w, v1);
      Ops::store(y + 2 * w, v2);
      Ops::store(y + 3 * w, v3);
    }
    at_ += vectors_of_step * w;
  }
  KOKKOSSOFTMAX_HOST_FUNCTION void finish() {
    while (at_ + vectors_of_step * w <= count_) step();
    if (lines_) {
      if (lines_->waits()) return;
      lines_->pass(y_ + at_);
      for (; at_ + line <= count_; at_ += line) lines_->add_line(at_, output());
      if (at_ < count_) lines_->keep(at_, static_cast<int>(count_ - at_), output());
      at_ = count_;
      return;
    }
    while (streams_rest_ && at_ + line <= count_) {
      if constexpr (line == w) {
        Ops::stream(y_ + at_, one(at_));
        at_ += w;
      } else {
        for (int k = 0; k < line; k += 2 * w, at_ += 2 * w) Ops::stream(y_ + at_, one(at_), one(at_ + w));
      }
    }
    for (; at_ + w <= count_; at_ += w) Ops::store(y_ + at_, one(at_));
    if (at_ < count_) {
      const int rest = static_cast<int>(count_ - at_);
      Ops::store_part(y_ + at_, formula_(source_.part(at_, rest), at_), rest);
    }
    at_ = count_;
  }

 private:
  static constexpr int w = Ops::width;

  /// Elements of a cache line, or of a vector if that is more.
  static constexpr int line = Lines::line;
  /// Bytes of a row from which on its last lines are streamed, too: those of shorter ones are fetched with
  /// the parts of lines beside them anyway.
  static constexpr std::size_t least_row = 1024;

  KOKKOSSOFTMAX_HOST_FUNCTION auto one(index_type i) const { return formula_(source_(i), i); }
  KOKKOSSOFTMAX_HOST_FUNCTION auto output() const {
    return [this](index_type i, int count) __attribute__((always_inline)) {
      return formula_(count == w ? source_(i) : source_.part(i, count), i);
    };
  }

  KOKKOSSOFTMAX_HOST_FUNCTION void write_head() {
    constexpr std::uintptr_t bytes = line * sizeof(Out);
    const auto ahead =
        static_cast<index_type>((bytes - reinterpret_cast<std::uintptr_t>(y_) % bytes) % bytes / sizeof(Out));
    const index_type head = ahead < count_ ? ahead : count_;
    for (; at_ + w <= head; at_ += w) Ops::store(y_ + at_, one(at_));
    if (at_ < head) {
      // Reads a whole vector where there is one: what lies behind the head belongs to the row all the same.
      const int rest = static_cast<int>(head - at_);
      const auto v = at_ + w <= count_ ? source_(at_) : source_.part(at_, static_cast<int>(count_ - at_));
      Ops::store_part(y_ + at_, formula_(v, at_), rest);
      at_ = head;
    }
  }

  Source source_;
  Formula formula_;
  Out* y_;
  Lines* lines_;
  index_type count_, at_ = 0;
  bool stream_, streams_rest_ = false;
};

template <class Acc, class Source, class Out, class Formula>
KOKKOSSOFTMAX_HOST_FUNCTION void chunk_write(const Source& source, index_type count, Out* y, bool stream,
                                             const Formula& formula) {
  WriteWork<Acc, Source, Out, Formula>(source, count, y, stream, formula).finish();
}

/// exponential * factor.
template <class Acc>
struct ScaledExponential {
  simd<Acc> factor;
  KOKKOSSOFTMAX_HOST_FUNCTION simd<Acc> operator()(const simd<Acc>& v, index_type) const {
    return v * factor;
  }
};
/// The same from the logit.
template <class Acc>
struct ScaledExponentialOfLogit {
  simd<Acc> max, factor;
  KOKKOSSOFTMAX_HOST_FUNCTION simd<Acc> operator()(const simd<Acc>& v, index_type) const {
    return exp_of_vector_difference<SimdOps<Acc>>(v - max) * factor;
  }
};
template <class Acc>
struct LogitMinusLogSum {
  simd<Acc> max, log_sum;
  KOKKOSSOFTMAX_HOST_FUNCTION simd<Acc> operator()(const simd<Acc>& v, index_type) const {
    return (v - max) - log_sum;
  }
};

// ---------------------------------------------------------------------------------------------------------
// Exponentials.

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

/// The sum of exp(logit - max) over a chunk, and what rounding took from it; keeps the exponentials. A step
/// of four vectors takes with it one of what is `next` to be read and one of what is to be `written`, so that
/// memory and arithmetic do not wait for each other. `written` may lie where the exponentials are kept: each
/// is read before it is overwritten.
template <Keep keep, class Acc, class Source, class Next, class Written>
KOKKOSSOFTMAX_HOST_FUNCTION CompensatedVector<Acc> chunk_exponentials(const Source& from, index_type count,
                                                                      Acc max, Acc* kept, Next& next_work,
                                                                      const Written& written_work) {
  using Ops = SimdOps<Acc>;
  using Vector = typename Ops::Vector;
  using Plan = SimdRowsPlan<Acc>;
  constexpr int w = Ops::width;
  constexpr index_type step = vectors_of_step * w;
  const Vector m(max);
  // Copies that nothing else can refer to stay in registers.
  const Source source = from;
  Next next = next_work;
  Written written = written_work;
  const auto one = [&](index_type at) __attribute__((always_inline)) {
    const Vector e = exp_of_vector_difference<Ops>(source(at) - m);
    if constexpr (keep != Keep::none) Ops::store(kept + at, e);
    return e;
  };
  // Up to where there is something beside.
  const index_type steps = count / step;
  const index_type end_of_next = (next.steps() < steps ? next.steps() : steps) * step;
  const index_type end_of_written = (written.steps() < steps ? written.steps() : steps) * step;
  if (end_of_written == 0) written.finish();
  CompensatedVector<Acc> sum;
  index_type i = 0;
  do {
    Vector a0(Acc(0)), a1 = a0, a2 = a0, a3 = a0;
    const auto four = [&]() __attribute__((always_inline)) {
      a0 = a0 + one(i);
      a1 = a1 + one(i + w);
      a2 = a2 + one(i + 2 * w);
      a3 = a3 + one(i + 3 * w);
      i += step;
    };
    const bool first = i == 0;
    const index_type end = count - i < Plan::block ? count : i + Plan::block;
    const auto four_and_next = [&]() __attribute__((always_inline)) {
      if (i < end_of_next) next.step();
      four();
    };
    if (i < end_of_written) {
      const index_type stop = end_of_written < end ? end_of_written : end / step * step;
      if (written.in_bursts()) {
        for (index_type k = i; k < stop; k += step) written.step();
      }
      while (i < stop) {
        if (!written.in_bursts()) written.step();
        four_and_next();
      }
      if (i == end_of_written) written.finish();
    }
    while (i + step <= end) four_and_next();
    // What is less than a step, each vector to the accumulator of its place.
    const auto rest = [&](Vector & a) __attribute__((always_inline)) {
      if (i + w <= end) {
        a = a + one(i);
        i += w;
      } else if (i < end) {
        const int of_vector = static_cast<int>(end - i);
        const Vector e = exp_of_vector_difference<Ops>(source.part(i, of_vector) - m);
        if constexpr (keep == Keep::staged) Ops::store(kept + i, e);
        if constexpr (keep == Keep::exactly) Ops::store_part(kept + i, e, of_vector);
        a = a + e;
        i = end;
      }
    };
    rest(a0), rest(a1), rest(a2), rest(a3);
    const Vector part = (a0 + a1) + (a2 + a3);
    if (first) {
      sum.sum = part;
    } else {
      sum.add(part);
    }
  } while (i < count);
  next.finish();
  next_work = next;
  return sum;
}

/// Two vectors of sums, and what rounding took from them.
template <class Acc>
struct AccurateSums {
  simd<Acc> a, b, low;
};

/// The same for logsumexp, of which 4 eps are asked: next to a term of 1 even a few small ones must not be
/// lost.
template <class Acc, class Source, class Next>
KOKKOSSOFTMAX_HOST_FUNCTION AccurateSums<Acc> chunk_accurate_sums(const Source& from, index_type count,
                                                                  Acc max, Next& next_work) {
  using Ops = SimdOps<Acc>;
  using Vector = typename Ops::Vector;
  constexpr int w = Ops::width;
  constexpr index_type step = vectors_of_step * w;
  const Vector m(max);
  const Source source = from;
  Next next = next_work;
  const auto one = [&](index_type at) __attribute__((always_inline)) {
    return exp_of_vector_difference<Ops>(source(at) - m);
  };
  const index_type beside = next.steps() < count / step ? next.steps() * step : count / step * step;
  CompensatedVector<Acc> a, b;
  index_type i = 0;
  const auto four = [&]() __attribute__((always_inline)) {
    a.add(one(i) + one(i + w));
    b.add(one(i + 2 * w) + one(i + 3 * w));
    i += step;
  };
  while (i < beside) {
    next.step();
    four();
  }
  while (i + step <= count) four();
  for (; i + w <= count; i += w) a.add(one(i));
  if (i < count) b.add(exp_of_vector_difference<Ops>(source.part(i, static_cast<int>(count - i)) - m));
  next.finish();
  next_work = next;
  return {a.sum, b.sum, a.low + b.low};
}
template <class Acc, class Source, class Next>
KOKKOSSOFTMAX_HOST_FUNCTION CompensatedMaxSum<Acc> chunk_accurate_sum(const Source& from, index_type count,
                                                                      Acc max, Next& next_work) {
  const auto sums = chunk_accurate_sums<Acc>(from, count, max, next_work);
  return SimdOps<Acc>::template compensated_sum<CompensatedMaxSum<Acc>>(max, sums.a, sums.b, sums.low);
}

}  // namespace KokkosSoftmax::impl

#endif
