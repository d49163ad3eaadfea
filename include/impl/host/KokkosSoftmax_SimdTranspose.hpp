// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Blocks of memory transposed in registers, and tiles of outputs that wait in scratch in the order in which
/// x is worked on until they go to a y of another order, whole lines at a time.

#ifndef KOKKOSSOFTMAX_SIMDTRANSPOSE_HPP
#define KOKKOSSOFTMAX_SIMDTRANSPOSE_HPP

#include <impl/host/KokkosSoftmax_SimdTile.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

namespace KokkosSoftmax::impl {

#if defined(__AVX2__)
// Vectors of units, each 16 bytes of them a matrix of its own.

struct Bytes16 {
  using Raw = __m128i;
  static constexpr int parts = 1;
  KOKKOSSOFTMAX_HOST_FUNCTION static Raw low8(Raw a, Raw b) { return _mm_unpacklo_epi64(a, b); }
  KOKKOSSOFTMAX_HOST_FUNCTION static Raw high8(Raw a, Raw b) { return _mm_unpackhi_epi64(a, b); }
  KOKKOSSOFTMAX_HOST_FUNCTION static Raw low4(Raw a, Raw b) { return _mm_unpacklo_epi32(a, b); }
  KOKKOSSOFTMAX_HOST_FUNCTION static Raw high4(Raw a, Raw b) { return _mm_unpackhi_epi32(a, b); }
  KOKKOSSOFTMAX_HOST_FUNCTION static Raw low2(Raw a, Raw b) { return _mm_unpacklo_epi16(a, b); }
  KOKKOSSOFTMAX_HOST_FUNCTION static Raw high2(Raw a, Raw b) { return _mm_unpackhi_epi16(a, b); }
  KOKKOSSOFTMAX_HOST_FUNCTION static Raw load(const void* p) {
    return _mm_loadu_si128(static_cast<const __m128i*>(p));
  }
  /// at(0), at(1), ... are where its parts come from.
  template <class At>
  KOKKOSSOFTMAX_HOST_FUNCTION static Raw gather(const At& at) {
    return load(at(0));
  }
  template <int>
  KOKKOSSOFTMAX_HOST_FUNCTION static Raw part(Raw v) {
    return v;
  }
  KOKKOSSOFTMAX_HOST_FUNCTION static void store(void* p, Raw v) {
    _mm_storeu_si128(static_cast<__m128i*>(p), v);
  }
};

struct Bytes32 {
  using Raw = __m256i;
  static constexpr int parts = 2;
  KOKKOSSOFTMAX_HOST_FUNCTION static Raw low8(Raw a, Raw b) { return _mm256_unpacklo_epi64(a, b); }
  KOKKOSSOFTMAX_HOST_FUNCTION static Raw high8(Raw a, Raw b) { return _mm256_unpackhi_epi64(a, b); }
  KOKKOSSOFTMAX_HOST_FUNCTION static Raw low4(Raw a, Raw b) { return _mm256_unpacklo_epi32(a, b); }
  KOKKOSSOFTMAX_HOST_FUNCTION static Raw high4(Raw a, Raw b) { return _mm256_unpackhi_epi32(a, b); }
  KOKKOSSOFTMAX_HOST_FUNCTION static Raw low2(Raw a, Raw b) { return _mm256_unpacklo_epi16(a, b); }
  KOKKOSSOFTMAX_HOST_FUNCTION static Raw high2(Raw a, Raw b) { return _mm256_unpackhi_epi16(a, b); }
  template <class At>
  KOKKOSSOFTMAX_HOST_FUNCTION static Raw gather(const At& at) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(Bytes16::load(at(0))), Bytes16::load(at(1)), 1);
  }
  template <int i>
  KOKKOSSOFTMAX_HOST_FUNCTION static __m128i part(Raw v) {
    return _mm256_extracti128_si256(v, i);
  }
  KOKKOSSOFTMAX_HOST_FUNCTION static void store(void* p, Raw v) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), v);
  }
};
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__)
struct Bytes64 {
  using Raw = __m512i;
  static constexpr int parts = 4;
  KOKKOSSOFTMAX_HOST_FUNCTION static Raw low8(Raw a, Raw b) {
    return _mm512_maskz_unpacklo_epi64(0xff, a, b);
  }
  KOKKOSSOFTMAX_HOST_FUNCTION static Raw high8(Raw a, Raw b) {
    return _mm512_maskz_unpackhi_epi64(0xff, a, b);
  }
  KOKKOSSOFTMAX_HOST_FUNCTION static Raw low4(Raw a, Raw b) {
    return _mm512_maskz_unpacklo_epi32(0xffff, a, b);
  }
  KOKKOSSOFTMAX_HOST_FUNCTION static Raw high4(Raw a, Raw b) {
    return _mm512_maskz_unpackhi_epi32(0xffff, a, b);
  }
  KOKKOSSOFTMAX_HOST_FUNCTION static Raw low2(Raw a, Raw b) {
    return _mm512_maskz_unpacklo_epi16(0xffffffff, a, b);
  }
  KOKKOSSOFTMAX_HOST_FUNCTION static Raw high2(Raw a, Raw b) {
    return _mm512_maskz_unpackhi_epi16(0xffffffff, a, b);
  }
  template <class At>
  KOKKOSSOFTMAX_HOST_FUNCTION static Raw gather(const At& at) {
    const __m256i low = Bytes32::gather(at), high = Bytes32::gather([&](int i) { return at(i + 2); });
    return _mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(low), high, 1);
  }
  template <int i>
  KOKKOSSOFTMAX_HOST_FUNCTION static __m128i part(Raw v) {
    return _mm512_maskz_extracti32x4_epi32(0xf, v, i);
  }
  KOKKOSSOFTMAX_HOST_FUNCTION static void store(void* p, Raw v) { _mm512_storeu_si512(p, v); }
  KOKKOSSOFTMAX_HOST_FUNCTION static void stream(void* p, Raw v) {
    _mm512_stream_si512(static_cast<__m512i*>(p), v);
  }
};
#endif

#if defined(__AVX2__)
/// Of n rows, as matrices of n x n units.
template <class Bytes, int n>
KOKKOSSOFTMAX_HOST_FUNCTION void transpose(typename Bytes::Raw* v) {
  using Raw = typename Bytes::Raw;
  if constexpr (n == 2) {
    const Raw low = Bytes::low8(v[0], v[1]);
    v[1] = Bytes::high8(v[0], v[1]);
    v[0] = low;
  } else if constexpr (n == 4) {
    const Raw a = Bytes::low4(v[0], v[1]), b = Bytes::high4(v[0], v[1]);
    const Raw c = Bytes::low4(v[2], v[3]), d = Bytes::high4(v[2], v[3]);
    v[0] = Bytes::low8(a, c);
    v[1] = Bytes::high8(a, c);
    v[2] = Bytes::low8(b, d);
    v[3] = Bytes::high8(b, d);
  } else {
    Raw pairs[8];
    for (int i = 0; i < 4; ++i) {
      pairs[i] = Bytes::low2(v[2 * i], v[2 * i + 1]);
      pairs[4 + i] = Bytes::high2(v[2 * i], v[2 * i + 1]);
    }
    transpose<Bytes, 4>(pairs);
    transpose<Bytes, 4>(pairs + 4);
    for (int i = 0; i < 8; ++i) v[i] = pairs[i];
  }
}

/// Rows of `count` units, n of them, each contiguous, to columns, or back; returns how many units were moved.
template <int n, bool back>
int transpose_units(char* const* rows, char* columns, index_type distance, int count) {
  constexpr int size = 16 / n;
  int c = 0;
  for (; c + n <= count; c += n) {
    __m128i v[n];
    for (int i = 0; i < n; ++i)
      v[i] = Bytes16::load(back ? columns + (c + i) * distance : rows[i] + c * size);
    transpose<Bytes16, n>(v);
    for (int i = 0; i < n; ++i)
      Bytes16::store(back ? rows[i] + c * size : columns + (c + i) * distance, v[i]);
  }
  return c;
}

/// to[c][r] = from[r][c] of `rows` rows, at most as many as a vector has units; of n columns, of which
/// `count` are stored. Reads n columns.
template <class Bytes, int n>
KOKKOSSOFTMAX_HOST_FUNCTION void transpose_columns(const char* from, index_type from_distance, int count,
                                                   char* to, index_type to_distance, bool stream) {
  typename Bytes::Raw v[n];
  for (int i = 0; i < n; ++i) v[i] = Bytes::gather([&](int j) { return from + (j * n + i) * from_distance; });
  transpose<Bytes, n>(v);
  for (int i = 0; i < n; ++i) {
    if (i < count) {
      if constexpr (requires { Bytes::stream(to, v[i]); }) {
        if (stream) {
          Bytes::stream(to + i * to_distance, v[i]);
          continue;
        }
      }
      Bytes::store(to + i * to_distance, v[i]);
    }
  }
}
#endif

/// Rows of n columns, one behind the other, to vectors of columns and back, in registers alone.
template <class Acc, int n>
struct SimdInterleaved {
  static constexpr bool works = false;
};
#if defined(__AVX512F__)
template <class Acc, int n>
requires(simd_bytes == 64 && std::is_floating_point_v<Acc> &&
         (n == 2 || n == 3)) struct SimdInterleaved<Acc, n> {
  static constexpr bool works = true;
  using Ops = SimdOps<Acc>;
  using Vector = typename Ops::Vector;
  static constexpr int w = Ops::width;

  KOKKOSSOFTMAX_HOST_FUNCTION static void load(const Acc* from, Vector* v) {
    __m512i raw[n];
    for (int i = 0; i < n; ++i) raw[i] = _mm512_loadu_si512(from + i * w);
    for (int c = 0; c < n; ++c)
      v[c] = std::bit_cast<Vector>(chosen(raw, columns[static_cast<std::size_t>(c)]));
  }
  KOKKOSSOFTMAX_HOST_FUNCTION static void store(const Vector* v, Acc* to) {
    __m512i raw[n];
    for (int c = 0; c < n; ++c) raw[c] = std::bit_cast<__m512i>(v[c]);
    for (int i = 0; i < n; ++i)
      _mm512_storeu_si512(to + i * w, chosen(raw, rows[static_cast<std::size_t>(i)]));
  }

 private:
  using Index = typename Ops::Integer;
  /// Which lanes of the first two vectors, and then which of these and the third one.
  struct Choice {
    alignas(64) std::array<Index, w> of_two, of_third;
  };
  using Choices = std::array<Choice, n>;
  static constexpr Choices choices(bool of_columns) {
    Choices all{};
    for (int k = 0; k < n; ++k) {
      for (int i = 0; i < w; ++i) {
        const int flat = of_columns ? i * n + k : (k * w + i) % n * w + (k * w + i) / n;
        Choice& choice = all[static_cast<std::size_t>(k)];
        const auto at = static_cast<std::size_t>(i);
        choice.of_two[at] = static_cast<Index>(flat < 2 * w ? flat : 0);
        choice.of_third[at] = static_cast<Index>(flat < 2 * w ? i : flat - w);
      }
    }
    return all;
  }
  static constexpr Choices columns = choices(true), rows = choices(false);

  KOKKOSSOFTMAX_HOST_FUNCTION static __m512i chosen(const __m512i* from, const Choice& choice) {
    __m512i v = permuted(from[0], choice.of_two.data(), from[1]);
    if constexpr (n == 3) v = permuted(v, choice.of_third.data(), from[2]);
    return v;
  }
  KOKKOSSOFTMAX_HOST_FUNCTION static __m512i permuted(__m512i a, const Index* index, __m512i b) {
    if constexpr (sizeof(Acc) == 4) {
      return _mm512_maskz_permutex2var_epi32(0xffff, a, _mm512_load_si512(index), b);
    } else {
      return _mm512_maskz_permutex2var_epi64(0xff, a, _mm512_load_si512(index), b);
    }
  }
};
#endif

/// transpose_block of rows of n columns, one behind the other, or to such, as far as there are vectors of
/// them; returns how many.
template <int n, bool back, class T>
int transpose_interleaved([[maybe_unused]] const T* from, [[maybe_unused]] index_type from_distance,
                          [[maybe_unused]] int count, [[maybe_unused]] T* to,
                          [[maybe_unused]] index_type to_distance, [[maybe_unused]] bool stream) {
  int i = 0;
  if constexpr (SimdInterleaved<T, n>::works) {
    using Ops = SimdOps<T>;
    constexpr int w = Ops::width;
    for (; i + w <= count; i += w) {
      typename Ops::Vector v[n];
      if constexpr (back) {
        for (int k = 0; k < n; ++k) v[k] = Ops::load(from + k * from_distance + i);
        SimdInterleaved<T, n>::store(v, to + i * n);
      } else {
        SimdInterleaved<T, n>::load(from + i * n, v);
        for (int k = 0; k < n; ++k)
          stream ? Ops::stream(to + k * to_distance + i, v[k]) : Ops::store(to + k * to_distance + i, v[k]);
      }
    }
  }
  return i;
}

/// to[c * to_distance + r] = from[r * from_distance + c]. 16 bytes behind the last column of `from` may be
/// read.
template <class T>
void transpose_block(const T* from, index_type from_distance, int rows, int columns, T* to,
                     index_type to_distance, [[maybe_unused]] bool stream) {
  if ((columns == 2 || columns == 3) && from_distance == columns) {
    const int done =
        columns == 2 ? transpose_interleaved<2, false>(from, from_distance, rows, to, to_distance, stream)
                     : transpose_interleaved<3, false>(from, from_distance, rows, to, to_distance, stream);
    from += done * from_distance;
    to += done;
    rows -= done;
  } else if ((rows == 2 || rows == 3) && to_distance == rows) {
    const int done =
        rows == 2 ? transpose_interleaved<2, true>(from, from_distance, columns, to, to_distance, stream)
                  : transpose_interleaved<3, true>(from, from_distance, columns, to, to_distance, stream);
    from += done;
    to += done * to_distance;
    columns -= done;
  }
#if defined(__AVX2__)
  constexpr int n = 16 / sizeof(T), size = sizeof(T);
  if (rows < n && to_distance == rows) {
    // Each column with what its successors overwrite.
    int c = 0;
    for (; (columns - c - n) * rows >= n - rows; c += n) {
      __m128i v[n];
      for (int i = 0; i < n; ++i) v[i] = Bytes16::load(from + std::min(i, rows - 1) * from_distance + c);
      transpose<Bytes16, n>(v);
      for (int i = 0; i < n; ++i) Bytes16::store(to + (c + i) * rows, v[i]);
    }
    from += c;
    to += c * to_distance;
    columns -= c;
  }
  if (rows >= n) {
    for (int c = 0; c < columns; c += n) {
      const char* x = reinterpret_cast<const char*>(from + c);
      char* y = reinterpret_cast<char*>(to + c * to_distance);
      const int count = std::min(n, columns - c);
      int r = 0;
#if defined(__AVX512F__) && defined(__AVX512BW__)
      for (; r + 4 * n <= rows; r += 4 * n)
        transpose_columns<Bytes64, n>(x + r * from_distance * size, from_distance * size, count, y + r * size,
                                      to_distance * size, stream);
#endif
      while (r < rows) {
        r = std::min(r, rows - n);  // some twice
        transpose_columns<Bytes16, n>(x + r * from_distance * size, from_distance * size, count, y + r * size,
                                      to_distance * size, false);
        r += n;
      }
    }
    return;
  }
#endif
  for (int c = 0; c < columns; ++c)
    for (int r = 0; r < rows; ++r) to[c * to_distance + r] = from[r * from_distance + c];
}

/// Blocks of a matrix y[c * distance + r]: `fill(r, height, c, width, to, to_distance, past)` writes their
/// elements, to y itself, past the caches if `past`, or to where they wait until whole lines are streamed.
template <class T, class Fill>
void write_columns_of(index_type rows, index_type columns, T* y, index_type distance, bool stream,
                      const Fill& fill) {
  constexpr auto size = static_cast<index_type>(sizeof(T));
  constexpr index_type most = 16384 / size, run = 512 / size, line = 64 / size;
  const bool aligned = reinterpret_cast<std::uintptr_t>(y) % 64 == 0 && distance % line == 0;
  if (!stream || aligned) {
    for (index_type r = 0; r < rows; r += run)
      fill(r, std::min(run, rows - r), 0, columns, y + r, distance, stream);
    return;
  }
  // Where columns of y continue each other several are one run; else runs as long as may be.
  alignas(64) T waiting[most];
  const bool dense = distance == rows && rows * line <= most;
  const index_type of_run = dense ? rows : std::min(rows, run);
  const index_type at_once = std::max(line, most / of_run / line * line);
  const auto write = [](T* to, index_type count, const T* values) {
    stream_bytes(reinterpret_cast<char*>(to), reinterpret_cast<const char*>(values),
                 static_cast<int>(count * size));
  };
  for (index_type r = 0; r < rows; r += of_run) {
    const index_type height = std::min(of_run, rows - r);
    for (index_type c = 0; c < columns; c += at_once) {
      const index_type width = std::min(at_once, columns - c);
      fill(r, height, c, width, waiting, height, false);
      T* to = y + c * distance + r;
      if (dense) {
        write(to, width * height, waiting);
      } else {
        for (index_type i = 0; i < width; ++i) write(to + i * distance, height, waiting + i * height);
      }
    }
  }
}

/// y[c * distance + r] = from[r * pitch + c] for all rows and columns. 16 bytes behind `from` may be read.
template <class T>
void write_transposed(const T* from, index_type pitch, index_type rows, index_type columns, T* y,
                      index_type distance, bool stream) {
  write_columns_of(rows, columns, y, distance, stream,
                   [&](index_type r, index_type height, index_type c, index_type width, T* to,
                       index_type to_distance, bool past) {
                     transpose_block(from + r * pitch + c, pitch, static_cast<int>(height),
                                     static_cast<int>(width), to, to_distance, past);
                   });
}

/// The bytes of a vector of Acc as matrices, if the processor has a way to transpose these. (A member, for
/// `void` to be known only where Acc is.)
template <class Acc>
struct BytesOf {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  using type =
      std::conditional_t<simd_bytes == 64, Bytes64, std::conditional_t<simd_bytes == 32, Bytes32, void>>;
#elif defined(__AVX2__)
  using type = std::conditional_t<simd_bytes == 32, Bytes32, void>;
#else
  using type = void;
#endif
};
template <class Acc>
using BytesOfVector = typename BytesOf<Acc>::type;

/// Vectors of rows: n columns from `at` on.
template <class Bytes, int n, class Acc, class Vector>
KOKKOSSOFTMAX_HOST_FUNCTION void gather_columns(const Acc* const* rows, index_type at, Vector* v) {
  if constexpr (std::is_void_v<Bytes>) {
    static_assert(n == 1);
    alignas(64) Acc lanes[SimdOps<Acc>::width];
    for (int l = 0; l < SimdOps<Acc>::width; ++l) lanes[l] = rows[l][at];
    *v = SimdOps<Acc>::load(lanes);
  } else {
    typename Bytes::Raw raw[n];
    for (int i = 0; i < n; ++i) raw[i] = Bytes::gather([&](int j) { return rows[j * n + i] + at; });
    transpose<Bytes, n>(raw);
    for (int i = 0; i < n; ++i) v[i] = std::bit_cast<Vector>(raw[i]);
  }
}

/// y[c * distance + r] = formula(x[r][c], r) for all rows and columns, in vectors of rows. `x` has pointers
/// up to a whole vector of rows; that many columns as 16 bytes have are readable, or those before them.
template <class Acc, class Out, class Formula>
void write_transposed_values(const Acc* const* x, index_type rows, index_type columns, Out* y,
                             index_type distance, bool stream, const Formula& formula) {
  using Ops = SimdOps<Acc>;
  using Vector = typename Ops::Vector;
  constexpr int w = Ops::width;
  constexpr bool in_registers = !std::is_void_v<BytesOfVector<Acc>>;
  constexpr int n = in_registers ? 16 / static_cast<int>(sizeof(Acc)) : 1;
  write_columns_of(rows, columns, y, distance, stream,
                   [&](index_type r0, index_type height, index_type c0, index_type width, Out* to,
                       index_type to_distance, bool past) {
                     for (index_type c = 0; c < width; c += n) {
                       // The last ones once more where fewer are left.
                       const auto again = static_cast<int>(std::max<index_type>(0, c + n - width));
                       const index_type at = c0 + c - again;
                       for (index_type r = 0; r < height; r += w) {
                         const Acc* const* of_row = x + r0 + r;
                         // From memory: lines that come next, a share of these rows' with each step, for they
                         // are more streams than the processor sees by itself.
                         constexpr int of_line = 64 / static_cast<int>(sizeof(Acc)),
                                       lines = std::max(1, w * n / of_line);
                         for (int i = 0; stream && i < lines; ++i)
                           __builtin_prefetch(of_row[(c / n * lines + i) % w] + at + 2 * of_line, 0, 3);
                         Vector v[n];
                         gather_columns<BytesOfVector<Acc>, n>(of_row, at, v);
                         const auto lanes = static_cast<int>(std::min<index_type>(w, height - r));
                         for (int i = again; i < n; ++i) {
                           const Vector value = formula(v[i], r0 + r);
                           Out* const out = to + (c - again + i) * to_distance + r;
                           if (lanes < w) {
                             Ops::store_part(out, value, lanes);
                           } else if (past) {
                             Ops::stream(out, value);
                           } else {
                             Ops::store(out, value);
                           }
                         }
                       }
                     }
                   });
}

// ---------------------------------------------------------------------------------------------------------
// Which tiles.

/// Scratch for the outputs of a tile: a part of the second level.
inline constexpr std::size_t bytes_of_transposed = std::size_t(640) << 10;

/// Rows that are contiguous in x and neighbours in y, and the other way round.
struct Transposed {
  /// Outputs of long rows with fewer neighbours are made row by row before they are transposed: vectors of
  /// neighbours would be half empty. (Measured with float and AVX-512; less narrow vectors would do with
  /// less.)
  static constexpr index_type fewest_of_long = 8;

  /// Rows of which y has one beside the other.
  static index_type neighbours(const RowGeometry& g) {
    index_type count = 1;
    for (bool more = true; more;) {
      more = false;
      for (int d = 0; d < g.rank && !more; ++d) {
        if (g.y_stride[d] == count && g.extent[d] > 1) {
          count *= g.extent[d];
          more = true;
        }
      }
    }
    return count;
  }
  /// Whether more columns or other extents may make it `rows`.
  template <class Problem>
  static bool may_be_rows(const Problem& p) {
    const RowGeometry& g = p.geometry;
    return p.operation != Operation::logsumexp && !p.axis_is_strided && g.x_column_stride == 1 &&
           g.y_column_stride != 1;
  }
  template <class Problem>
  static bool rows(const Problem& p) {
    if (!may_be_rows(p)) return false;
    return neighbours(p.geometry) >= 2;
  }
  template <class Problem>
  static bool columns(const Problem& p) {
    const RowGeometry& g = p.geometry;
    return p.operation != Operation::logsumexp && p.axis_is_strided && g.rank > 0 &&
           g.x_stride[g.rank - 1] == 1 && g.y_stride[g.rank - 1] != 1 && g.y_column_stride == 1;
  }
};

/// Rows that are contiguous in x, in tiles of those that are neighbours in y.
template <class Problem>
class TransposedRows {
 public:
  using Acc = typename Problem::Acc;
  using Out = typename Problem::Out;
  /// Rows of a line of y.
  static constexpr auto line = static_cast<index_type>(64 / sizeof(Out));
  /// Rows of several chunks: what a tile has at most, and columns of it that are written at once.
  static constexpr index_type most_of_long = 1024 / sizeof(Acc), piece = 512;
  static constexpr index_type pitch_of_piece = piece + 64 / sizeof(Acc);
  static_assert(SimdRowsPlan<Acc>::chunk % piece == 0);
  static_assert((most_of_long + 1) * pitch_of_piece * sizeof(Acc) <= bytes_of_transposed);

  /// `cache`: bytes of x that are read again from where they were.
  TransposedRows(const Problem& problem, index_type threads, std::size_t cache)
      : problem_(problem), pitch_((ceil_div(problem.geometry.columns, line) | 1) * line) {
    RowGeometry& g = problem_.geometry = in_order_of_y(problem.geometry);
    inner_ = 1;
    for (int d = g.rank - 1; d >= 0 && g.y_stride[d] == inner_; --d) inner_ *= g.extent[d];
    const bool is_long = SimdRowsPlan<Acc>::chunks(g.columns) > 1;
    // What fits; whole lines of y where the threads have enough of them.
    const auto bytes_of_row = static_cast<std::size_t>(g.columns) * sizeof(typename Problem::In);
    const auto fit = static_cast<index_type>(is_long ? cache / bytes_of_row
                                                     : bytes_of_transposed /
                                                           (static_cast<std::size_t>(pitch_) * sizeof(Out)));
    const index_type enough = ceil_div(g.rows, (is_long ? 1 : 4) * threads), few = ceil_div(g.rows, threads);
    rows_ = std::min(fit, enough) / line * line;
    if (is_long) rows_ = std::min(fit / line * line, most_of_long);
    if (rows_ < line) rows_ = is_long || few >= line ? line : std::max(few, line / 4);
    rows_ = std::min(rows_, inner_);
    of_inner_ = ceil_div(inner_, rows_);
    count_ = g.rows / inner_ * of_inner_;
    of_group_ = std::max<index_type>(1, fit / rows_);
  }

  /// Its rows in the order of y.
  const Problem& problem() const { return problem_; }

  struct Tile {
    index_type first, rows;
    Out* y;
  };
  Tile tile(index_type t) const {
    const index_type run = t / of_inner_, at = (t - run * of_inner_) * rows_, first = run * inner_ + at;
    return {first, std::min(rows_, inner_ - at), problem_.y + problem_.geometry.row(first).y_offset};
  }
  index_type count() const { return count_; }
  /// Tiles whose logits stay in the cache together.
  index_type of_group() const { return of_group_; }

  /// The problem with contiguous outputs, for those of a tile to wait at `waiting`: an odd number of lines
  /// from row to row, for these to lie in different sets of a cache.
  class Staged {
   public:
    explicit Staged(const TransposedRows& rows) : pitch_(rows.pitch_), problem_(rows.problem_) {
      RowGeometry& g = problem_.geometry;
      g.y_column_stride = 1;
      index_type distance = pitch_;
      for (int d = g.rank - 1; d >= 0; distance *= g.extent[d--]) g.y_stride[d] = distance;
    }
    const Problem& problem(const Tile& tile, Out* waiting) {
      problem_.y = waiting - tile.first * pitch_;
      return problem_;
    }

   private:
    index_type pitch_;
    Problem problem_;
  };

  void write(const Out* waiting, const Tile& tile, bool stream) const {
    const RowGeometry& g = problem_.geometry;
    write_transposed(waiting, pitch_, tile.rows, g.columns, tile.y, g.y_column_stride, stream);
  }

 private:
  static RowGeometry in_order_of_y(const RowGeometry& g) {
    RowGeometry sorted = g;
    for (int d = 0; d < g.rank; ++d) {
      int at = 0;
      for (int e = 0; e < g.rank; ++e) {
        const index_type of_d = std::abs(g.y_stride[d]), of_e = std::abs(g.y_stride[e]);
        at += of_e > of_d || (of_e == of_d && e < d) ? 1 : 0;
      }
      sorted.extent[at] = g.extent[d];
      sorted.x_stride[at] = g.x_stride[d];
      sorted.y_stride[at] = g.y_stride[d];
      sorted.row_weight[at] = g.row_weight[d];
    }
    return sorted;
  }

  Problem problem_;
  index_type pitch_, inner_, rows_, of_inner_, count_, of_group_;
};

/// Rows side by side in x that are contiguous in y: what a tile does beside a y like x, whose outputs wait in
/// scratch.
template <class Problem, class Tile>
class TransposedTile {
 public:
  using Acc = typename Problem::Acc;
  using Out = typename Problem::Out;
  using Plan = SimdTilePlan<Acc>;

  /// How the rows are grouped.
  static SimdTiles tiles(const Problem& problem, int concurrency, std::size_t stage_bytes) {
    Problem staged = problem;
    RowGeometry& g = staged.geometry;
    g.y_stride[g.rank - 1] = 1;
    g.y_column_stride = g.extent[g.rank - 1];
    const index_type most = static_cast<index_type>(bytes_of_transposed / sizeof(Out)) / columns_of(g) - line;
    return SimdTiles::of(staged, concurrency, stage_bytes, most);
  }

  TransposedTile(const Problem& problem, const SimdTiles& tiles, index_type tile, bool stream)
      : problem_(problem),
        stream_(stream),
        pitch_(tiles.wide && !tiles.dense ? tiles.lanes + line : tiles.inner),
        staged_(like_x(problem, pitch_)),
        tile_(staged_, tiles, tile, false) {
    const RowGeometry& g = problem.geometry;
    const index_type of_tile = tiles.wide && !tiles.dense ? tiles.of_inner : 1;
    const index_type first = tile / of_tile * tiles.runs, at = tile % of_tile * tiles.lanes;
    inner_ = tiles.inner;
    first_ = first * inner_ + at;
    runs_ = std::min<index_type>(tiles.runs, g.rows / inner_ - first);
    lanes_ = of_tile == 1 && tiles.runs > 1 ? inner_ : std::min<index_type>(tiles.lanes, inner_ - at);
  }

  void whole(Acc* scratch) {
    Out* const waiting = begin(0, scratch);
    tile_.whole(scratch + elements);
    write(waiting, 0, problem_.geometry.columns);
  }
  void reduce_chunk(index_type chunk, Acc* scratch, Acc* state) {
    tile_.reduce_chunk(chunk, scratch + elements, state);
  }
  void join(const Acc* states, index_type chunks, index_type distance) {
    tile_.join(states, chunks, distance);
  }
  void finish() { tile_.finish(); }
  void write_chunk(index_type chunk, Acc* scratch) {
    const index_type first = chunk * Plan::chunk;
    Out* const waiting = begin(first, scratch);
    tile_.write_chunk(chunk, scratch + elements);
    write(waiting, first, std::min(Plan::chunk, problem_.geometry.columns - first));
  }

 private:
  static constexpr auto line = static_cast<index_type>(64 / sizeof(Out));
  static constexpr std::size_t elements = bytes_of_transposed / sizeof(Acc);
  static_assert(Plan::longest_staged >= Plan::chunk);
  static_assert((2 * Plan::fewest_lanes + line) * Plan::longest_staged * sizeof(Out) <= bytes_of_transposed);
  static_assert(Plan::most_of_dense * Plan::longest_staged * sizeof(Out) <= bytes_of_transposed);

  /// Columns whose outputs wait.
  static index_type columns_of(const RowGeometry& g) {
    return Plan::chunks(g.columns) == 1 ? g.columns : Plan::chunk;
  }
  static Problem like_x(const Problem& problem, index_type pitch) {
    Problem staged = problem;
    RowGeometry& g = staged.geometry;
    g.y_column_stride = pitch;
    g.y_stride[g.rank - 1] = 1;
    index_type distance = columns_of(g) * pitch;
    for (int d = g.rank - 2; d >= 0; --d) {
      g.y_stride[d] = distance;
      distance *= g.extent[d];
    }
    return staged;
  }
  /// Outputs from this column on go to scratch.
  Out* begin(index_type column, Acc* scratch) {
    Out* const waiting = reinterpret_cast<Out*>(scratch);
    staged_.y = waiting - staged_.geometry.row(first_).y_offset - column * pitch_;
    return waiting;
  }
  void write(const Out* waiting, index_type column, index_type columns) const {
    const RowGeometry& g = problem_.geometry;
    for (index_type i = 0; i < runs_; ++i, waiting += columns_of(g) * pitch_) {
      Out* const y = problem_.y + g.row(first_ + i * inner_).y_offset + column;
      write_transposed(waiting, pitch_, columns, lanes_, y, g.y_stride[g.rank - 1], stream_);
    }
  }

  const Problem& problem_;
  bool stream_;
  index_type pitch_, inner_, first_, runs_, lanes_;
  Problem staged_;
  Tile tile_;
};

}  // namespace KokkosSoftmax::impl

#endif
