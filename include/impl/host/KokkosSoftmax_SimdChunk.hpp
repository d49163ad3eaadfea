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
};

/// Logits or exponentials in a thread's scratch, filled up to whole vectors with -inf or 0.
template <class Acc>
struct StagedValues {
  using Ops = SimdOps<Acc>;
  const Acc* v;
  KOKKOSSOFTMAX_HOST_FUNCTION typename Ops::Vector operator()(index_type i) const { return Ops::load(v + i); }
  KOKKOSSOFTMAX_HOST_FUNCTION typename Ops::Vector part(index_type i, int) const { return Ops::load(v + i); }
};

/// The largest logit; NaN is passed over.
template <class Acc, class Source>
KOKKOSSOFTMAX_HOST_FUNCTION Acc chunk_max(const Source& source, index_type count) {
  using Ops = SimdOps<Acc>;
  using Vector = typename Ops::Vector;
  constexpr int w = Ops::width;
  Vector m0(-infinity_v<Acc>), m1 = m0, m2 = m0, m3 = m0;
  index_type i = 0;
  for (; i + 4 * w <= count; i += 4 * w) {
    m0 = Ops::larger(source(i), m0);
    m1 = Ops::larger(source(i + w), m1);
    m2 = Ops::larger(source(i + 2 * w), m2);
    m3 = Ops::larger(source(i + 3 * w), m3);
  }
  for (; i + w <= count; i += w) m0 = Ops::larger(source(i), m0);
  if (i < count) m1 = Ops::larger(source.part(i, static_cast<int>(count - i)), m1);
  return Ops::max(Ops::larger(Ops::larger(m0, m1), Ops::larger(m2, m3)));
}

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

/// The same for logsumexp, of which 4 eps are asked: next to a term of 1 even a few small ones must not be
/// lost.
template <class Acc, class Source>
KOKKOSSOFTMAX_HOST_FUNCTION CompensatedMaxSum<Acc> chunk_accurate_sum(const Source& source, index_type count,
                                                                      Acc max, const char* next,
                                                                      int next_bytes_of_vector) {
  using Ops = SimdOps<Acc>;
  using Vector = typename Ops::Vector;
  constexpr int w = Ops::width;
  const Vector m(max);
  const auto one = [&](index_type at) __attribute__((always_inline)) {
    return exp_of_vector_difference<Ops>(source(at) - m);
  };
  CompensatedVector<Acc> a, b;
  index_type i = 0;
  for (; i + 4 * w <= count; i += 4 * w) {
    a.add(one(i) + one(i + w));
    b.add(one(i + 2 * w) + one(i + 3 * w));
    for (int p = 0; p < 4 * next_bytes_of_vector; p += 64) __builtin_prefetch(next + p, 0, 2);
    next += 4 * next_bytes_of_vector;
  }
  for (; i + w <= count; i += w) a.add(one(i));
  if (i < count) b.add(exp_of_vector_difference<Ops>(source.part(i, static_cast<int>(count - i)) - m));
  return Ops::template compensated_sum<CompensatedMaxSum<Acc>>(max, a.sum, b.sum, a.low + b.low);
}

/// The sum of exp(logit - max) over a chunk, and what rounding took from it; keeps the exponentials. Memory
/// works beside it: while it computes it fetches what will be read next, and after each block it calls
/// `between(vectors)` to store as many of what is to be written.
template <Keep keep, class Acc, class Source, class Between>
KOKKOSSOFTMAX_HOST_FUNCTION CompensatedMaxSum<Acc> chunk_exponentials(const Source& source, index_type count,
                                                                      Acc max, Acc* kept, const char* next,
                                                                      int next_bytes_of_vector,
                                                                      const Between& between) {
  using Ops = SimdOps<Acc>;
  using Vector = typename Ops::Vector;
  using Plan = SimdRowsPlan<Acc>;
  constexpr int w = Ops::width;
  const Vector m(max);
  CompensatedVector<Acc> sum;
  index_type i = 0;
  const auto one = [&](index_type at) __attribute__((always_inline)) {
    const Vector e = exp_of_vector_difference<Ops>(source(at) - m);
    if constexpr (keep != Keep::none) Ops::store(kept + at, e);
    return e;
  };
  do {
    Vector a0(Acc(0)), a1 = a0, a2 = a0, a3 = a0;
    const index_type begin = i, end = count - i < Plan::block ? count : i + Plan::block;
    for (; i + 4 * w <= end; i += 4 * w) {
      a0 = a0 + one(i);
      a1 = a1 + one(i + w);
      a2 = a2 + one(i + 2 * w);
      a3 = a3 + one(i + 3 * w);
      for (int b = 0; b < 4 * next_bytes_of_vector; b += 64) __builtin_prefetch(next + b, 0, 2);
      next += 4 * next_bytes_of_vector;
    }
    if (i + w <= end) a0 = a0 + one(i), i += w;
    if (i + w <= end) a1 = a1 + one(i), i += w;
    if (i + w <= end) a2 = a2 + one(i), i += w;
    if (i < end) {
      const int rest = static_cast<int>(end - i);
      const Vector e = exp_of_vector_difference<Ops>(source.part(i, rest) - m);
      if constexpr (keep == Keep::staged) Ops::store(kept + i, e);
      if constexpr (keep == Keep::exactly) Ops::store_part(kept + i, e, rest);
      a3 = a3 + e;
      i = end;
    }
    between((end - begin + w - 1) / w);
    const Vector part = (a0 + a1) + (a2 + a3);
    if (count <= Plan::block) return {max, Ops::sum(part), Acc(0)};
    sum.add(part);
  } while (i < count);
  return {max, Ops::sum(sum.sum), Ops::sum(sum.low)};
}

/// y = formula(value, index) for `count` values; to be streamed past the caches or not.
template <class Acc, class Source, class Out, class Formula>
KOKKOSSOFTMAX_HOST_FUNCTION void chunk_write(const Source& source, index_type count, Out* y, bool stream,
                                             const Formula& formula) {
  using Ops = SimdOps<Acc>;
  constexpr int w = Ops::width;
  index_type i = 0;
  if (stream) {
    constexpr std::uintptr_t line = 64;
    const index_type ahead =
        static_cast<index_type>((line - reinterpret_cast<std::uintptr_t>(y) % line) % line / sizeof(Out));
    const index_type head = ahead < count ? ahead : count;
    for (; i + w <= head; i += w) Ops::store(y + i, formula(source(i), i));
    if (i < head) {
      // Reads a whole vector where there is one: what lies behind the head belongs to the row all the same.
      const int rest = static_cast<int>(head - i);
      const auto v = i + w <= count ? source(i) : source.part(i, static_cast<int>(count - i));
      Ops::store_part(y + i, formula(v, i), rest);
      i = head;
    }
    for (; i + 2 * w <= count; i += 2 * w) {
      Ops::stream(y + i, formula(source(i), i));
      Ops::stream(y + i + w, formula(source(i + w), i + w));
    }
    if (i + w <= count) Ops::stream(y + i, formula(source(i), i)), i += w;
  } else {
    for (; i + 4 * w <= count; i += 4 * w) {
      Ops::store(y + i, formula(source(i), i));
      Ops::store(y + i + w, formula(source(i + w), i + w));
      Ops::store(y + i + 2 * w, formula(source(i + 2 * w), i + 2 * w));
      Ops::store(y + i + 3 * w, formula(source(i + 3 * w), i + 3 * w));
    }
    for (; i + w <= count; i += w) Ops::store(y + i, formula(source(i), i));
  }
  if (i < count) {
    const int rest = static_cast<int>(count - i);
    Ops::store_part(y + i, formula(source.part(i, rest), i), rest);
  }
}

}  // namespace KokkosSoftmax::impl

#endif
