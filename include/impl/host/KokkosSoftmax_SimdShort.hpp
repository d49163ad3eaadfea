// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Rows of a few columns, which would leave most of a vector empty: a lane has a row, and a register a
/// column, whether x has the rows one behind the other or side by side. Strips of them are transposed on
/// their way in and out as x and y ask for. The order in which a row is added up is that of all other rows of
/// its kind (KokkosSoftmax_SimdRowWork.hpp, KokkosSoftmax_SimdTile.hpp), and so are its bits.

#ifndef KOKKOSSOFTMAX_SIMDSHORT_HPP
#define KOKKOSSOFTMAX_SIMDSHORT_HPP

#include <impl/host/KokkosSoftmax_SimdTile.hpp>
#include <impl/host/KokkosSoftmax_SimdTranspose.hpp>

#include <algorithm>
#include <bit>
#include <utility>

namespace KokkosSoftmax::impl {

template <class Acc>
struct SimdShortPlan {
  static constexpr int width = SimdOps<Acc>::width;
  /// Columns that are transposed at once.
  static constexpr int of_piece = std::is_void_v<BytesOfVector<Acc>> ? 1 : 16 / static_cast<int>(sizeof(Acc));
  static constexpr int most_pieces = 4;
  /// More columns than a vector has lanes would be added up in another order.
  static constexpr int longest = std::min(width, of_piece* most_pieces);
  /// Elements of a strip: in and out they lie in half of the smallest first-level cache.
  static constexpr int strip = 8192 / static_cast<int>(sizeof(Acc));
};

/// Rows that are short.
struct ShortRows {
  template <class Problem>
  static bool has(const Problem& p) {
    using Plan = SimdShortPlan<typename Problem::Acc>;
    const RowGeometry& g = p.geometry;
    if (Plan::width == 1 || g.columns < 1 || g.columns > Plan::longest) return false;
    const int last = g.rank - 1;
    if (p.axis_is_strided) return g.rank > 0 && g.x_stride[last] == 1 && g.extent[last] >= 2 * Plan::width;
    if (g.x_column_stride != 1) return false;
    // A functor that takes vectors of columns is given whole ones.
    if (!std::is_same_v<typename Problem::Transform, BoundIdentity> && g.columns == Plan::width) return false;
    // Whole vectors that are written as they were read are faster as they are.
    if (p.operation == Operation::softmax && g.columns == Plan::width && g.y_column_stride == 1) return false;
    // The bits of a logsumexp tell this way from others: which one it takes is no matter of y.
    return p.operation == Operation::logsumexp || g.rank < 2 || g.y_stride[last] == 1 ||
           g.y_column_stride == 1;
  }
};

template <class Problem, Operation operation>
class SimdShort : SimdLanes<Problem, operation> {
  using Lanes = SimdLanes<Problem, operation>;
  using Lanes::w;

 public:
  using Acc = typename Problem::Acc;
  using In = typename Problem::In;
  using Out = typename Problem::Out;
  using Ops = SimdOps<Acc>;
  using Vector = typename Ops::Vector;
  using Plan = SimdShortPlan<Acc>;
  static constexpr bool identity = std::is_same_v<typename Problem::Transform, BoundIdentity>;

  SimdShort(const Problem& problem, bool stream, bool from_memory)
      : problem_(problem),
        stream_(stream),
        from_memory_(from_memory),
        columns_(static_cast<int>(problem.geometry.columns)) {
    const RowGeometry& g = problem.geometry;
    const int last = g.rank - 1;
    inner_ = g.rank > 0 ? g.extent[last] : 1;
    x_distance_ = g.rank > 0 ? g.x_stride[last] : columns_;
    y_distance_ = g.rank > 0 ? g.y_stride[last] : columns_;
    if constexpr (writes) {
      dense_ = g.y_column_stride == 1 && y_distance_ == columns_;
      columns_follow_ = !dense_ && y_distance_ == 1;
      // Past the caches go whole lines.
      constexpr auto line = static_cast<index_type>(64 / sizeof(Out));
      straight_ = columns_follow_ && (!stream_ || (line == w && g.y_column_stride % line == 0));
    }
    // Memory is busy all the time where strips are short; columns of y are written in long pieces.
    rows_of_strip_ = (columns_follow_ && !straight_ ? Plan::strip : Plan::strip / 4) / columns_ / w * w;
  }

  void rows(index_type begin, index_type end) {
    while (begin < end) {
      const RowGeometry::Row row = problem_.geometry.row(begin);
      const index_type count = std::min(end - begin, inner_ - begin % inner_);
      const In* x = problem_.x + row.x_offset;
      Out* y = problem_.y + row.y_offset;
      row_index_ = row.index;
      if (problem_.axis_is_strided) {
        run_columns(x, y, count, std::make_integer_sequence<int, Plan::most_pieces>());
      } else {
        run_rows(x, y, count, std::make_integer_sequence<int, Plan::most_pieces>());
      }
      begin += count;
    }
  }

 private:
  static constexpr bool writes = operation != Operation::logsumexp;
  using Bytes = BytesOfVector<Acc>;
  static constexpr int piece = Plan::of_piece;

  template <int... number>
  void run_columns(const In* x, Out* y, index_type count, std::integer_sequence<int, number...>) {
    const int pieces = (columns_ + piece - 1) / piece;
    static_cast<void>(((pieces == number + 1 && (run<number + 1, 0>(x, y, count), true)) || ...));
  }
  template <int... number>
  void run_rows(const In* x, Out* y, index_type count, std::integer_sequence<int, number...>) {
    if constexpr (SimdInterleaved<Acc, 2>::works) {
      if (columns_ == 2) return run<(2 + piece - 1) / piece, 2>(x, y, count);
      if (columns_ == 3) return run<(3 + piece - 1) / piece, 3>(x, y, count);
    }
    const int pieces = (columns_ + piece - 1) / piece;
    static_cast<void>(((pieces == number + 1 && (run<number + 1, 1>(x, y, count), true)) || ...));
  }

  /// Rows at one distance from each other. `kind`: 0 for rows side by side, else for rows that are
  /// contiguous; 2, 3 for as many columns.
  template <int pieces, int kind>
  [[gnu::noinline]] void run(const In* x, Out* y, index_type count) {
    if constexpr (pieces * piece - piece < Plan::longest) {
      straight_here_ = straight_ && (!stream_ || reinterpret_cast<std::uintptr_t>(y) % 64 == 0);
      for (index_type first = 0; first < count; first += rows_of_strip_) {
        const auto rows = static_cast<int>(std::min<index_type>(rows_of_strip_, count - first));
        Out* const to = y + first * y_distance_;
        first_ = first;
        if constexpr (kind == 0) {
          strip_of_columns<pieces>(x + first, rows, to);
        } else {
          strip_of_rows<pieces, kind>(x + first * x_distance_, rows, count - first - rows, to);
        }
        if (!straight_here_) put(to, rows);
      }
    }
  }

  /// What comes from memory next: lines of a vector of rows, or of one column of them.
  KOKKOSSOFTMAX_HOST_FUNCTION void fetch(const In* x, int vectors) const {
    constexpr int ahead = 4096;
    const char* p = reinterpret_cast<const char*>(x) + ahead;
    for (int i = 0; i < vectors; ++i) __builtin_prefetch(p + i * w * static_cast<int>(sizeof(In)), 0, 2);
  }

  template <int pieces>
  KOKKOSSOFTMAX_HOST_FUNCTION void strip_of_columns(const In* x, int rows, Out* y) {
    const int padded = (rows + w - 1) / w * w;
    for (int r = 0; r < rows; r += w) {
      Vector v[pieces * piece];
      for (int c = 0; c < pieces * piece; ++c) {
        v[c] = Vector(Acc(0));
        if (c >= columns_) continue;
        const In* of_column = x + r + c * problem_.geometry.x_column_stride;
        if (from_memory_) fetch(of_column, 1);
        v[c] = r + w <= rows ? Ops::load(of_column) : Ops::load_part(of_column, rows - r, Acc(0));
      }
      block<pieces, 0>(v, r, rows, padded, y);
    }
  }

  /// Behind the rows `behind` more may be read.
  template <int pieces, int kind>
  KOKKOSSOFTMAX_HOST_FUNCTION void strip_of_rows(const In* x, int rows, index_type behind, Out* y) {
    const int padded = (rows + w - 1) / w * w;
    // What a row's last piece reads besides belongs to the next rows, or to scratch.
    int direct = 0;
    if constexpr (std::is_same_v<In, Acc>) {
      if (x_distance_ == columns_) {
        constexpr int more = kind > 1 ? 0 : piece - 1;
        direct = behind >= more ? rows / w * w : std::max(0, (rows - more) / w * w);
      }
      for (int r = 0; r < direct; r += w) {
        if (from_memory_) fetch(x + r * columns_, columns_);
        block_of_rows<pieces, kind>(x + r * columns_, r, rows, padded, y);
      }
    }
    if (direct < padded) {
      bring(x + direct * x_distance_, rows - direct, padded - direct);
      for (int r = direct; r < padded; r += w)
        block_of_rows<pieces, kind>(in_ + (r - direct) * columns_, r, rows, padded, y);
    }
  }

  /// Rows to scratch, one behind the other, filled up with others.
  void bring(const In* x, int rows, int padded) {
    const int elements = rows * columns_;
    if (x_distance_ == columns_) {
      int i = 0;
      for (; i + w <= elements; i += w) {
        if (from_memory_) fetch(x + i, 1);
        Ops::store(in_ + i, Ops::load(x + i));
      }
      if (i < elements) Ops::store(in_ + i, Ops::load_part(x + i, elements - i, Acc(0)));
    } else {
      Acc* to = in_;
      for (int r = 0; r < rows; ++r, x += x_distance_)
        for (int c = 0; c < columns_; ++c) *to++ = load_as<Acc>(x[c]);
    }
    for (int i = elements; i < padded * columns_ + piece; ++i) in_[i] = Acc(0);
  }

  template <int pieces, int kind>
  KOKKOSSOFTMAX_HOST_FUNCTION void block_of_rows(const Acc* from, int r, int rows, int padded, Out* y) {
    Vector v[pieces * piece];
    if constexpr (kind > 1) {
      for (int c = kind; c < pieces * piece; ++c) v[c] = Vector(Acc(0));
      SimdInterleaved<Acc, kind>::load(from, v);
    } else {
      for (int p = 0; p < pieces; ++p) {
        if constexpr (std::is_void_v<Bytes>) {
          alignas(64) Acc lanes[w];
          for (int l = 0; l < w; ++l) lanes[l] = from[l * columns_ + p];
          v[p] = Ops::load(lanes);
        } else {
          typename Bytes::Raw raw[piece];
          for (int i = 0; i < piece; ++i)
            raw[i] = Bytes::gather([&](int j) __attribute__((always_inline)) {
              return from + (j * piece + i) * columns_ + p * piece;
            });
          transpose<Bytes, piece>(raw);
          for (int i = 0; i < piece; ++i) v[p * piece + i] = std::bit_cast<Vector>(raw[i]);
        }
      }
    }
    block<pieces, kind>(v, r, rows, padded, y);
  }

  /// Of `count` rows from r of the strip on, of which v has the columns.
  [[gnu::noinline]] void transform(Vector* v, int r, int count, int columns) const {
    const RowGeometry& g = problem_.geometry;
    const index_type weight = g.rank > 0 ? g.row_weight[g.rank - 1] : 0;
    alignas(index_type) unsigned char rows[w * most_bytes_of_row_object];
    problem_.transform.make_rows(row_index_ + (first_ + r) * weight, weight, count, rows);
    alignas(64) Acc logits[Plan::longest * w] = {};
    for (int c = 0; c < columns; ++c) Ops::store(logits + c * w, v[c]);
    problem_.transform(rows, 0, 0, count, columns, logits, w, logits, w);
    for (int c = 0; c < columns; ++c) v[c] = Ops::load(logits + c * w);
  }

  /// Outputs of a vector of rows, of which v has the columns.
  template <int pieces, int kind>
  KOKKOSSOFTMAX_HOST_FUNCTION void block(Vector* v, int r, int rows, int padded, Out* y) {
    constexpr int all = pieces * piece;
    const int columns = kind > 1 ? kind : columns_;
    if constexpr (!identity) transform(v, r, std::min(rows - r, w), columns);
    Vector top(-infinity_v<Acc>);
    for (int c = 0; c < all; ++c)
      if (c < columns) top = Ops::larger(v[c], top);
    const Vector max = Lanes::finite(top);
    Vector e[all];
    for (int c = 0; c < all; ++c)
      e[c] = c < columns ? exp_of_vector_difference<Ops>(v[c] - max) : Vector(Acc(0));
    Vector sum;
    if constexpr (operation == Operation::logsumexp) {
      CompensatedVector<Acc> total;
      for (int c = 0; c < all; c += 2)
        if (c < columns) total.add(c + 1 < all ? e[c] + e[c + 1] : e[c]);
      sum = Lanes::sum_without_nan(total);
    } else if constexpr (kind == 0) {
      Vector a[4] = {Vector(Acc(0)), Vector(Acc(0)), Vector(Acc(0)), Vector(Acc(0))};
      for (int c = 0; c < all; ++c) a[c % 4] = c < 4 ? e[c] : a[c % 4] + e[c];
      sum = (a[0] + a[1]) + (a[2] + a[3]);
    } else {
      // As over the lanes of a vector (SimdOps::sum_each).
      Vector a[all];
      for (int c = 0; c < all; ++c) a[c] = e[c];
      for (int half = w / 2; half > 0; half /= 2)
        for (int c = 0; c < half; ++c)
          if (c + half < all) a[c] = a[c] + a[c + half];
      sum = a[0];
    }
    if constexpr (operation == Operation::logsumexp) {
      Vector result = max + log_of_vector_sum<Ops>(sum, -infinity_v<Acc>, infinity_v<Acc>);
      if (Ops::max(top) == infinity_v<Acc>) {
        Vector infinite(infinity_v<Acc>);
        for (int c = 0; c < all; ++c)
          if (c < columns) infinite = Ops::select(v[c] == v[c], infinite, v[c]);
        result = Ops::select(top == Vector(infinity_v<Acc>), infinite, result);
      }
      Ops::store(out_ + r, result);
    } else {
      if constexpr (operation == Operation::softmax) {
        const Vector factor = factor_of_vector_sum<Ops>(sum);
        for (int c = 0; c < all; ++c) v[c] = e[c] * factor;
      } else {
        const Vector log_sum = log_of_vector_sum<Ops>(sum, Acc(0), nan_v<Acc>);
        for (int c = 0; c < all; ++c)
          if (c < columns) v[c] = (v[c] - max) - log_sum;
      }
      if (straight_here_) {
        for (int c = 0; c < all; ++c) {
          if (c >= columns) continue;
          Out* const to = y + c * problem_.geometry.y_column_stride + r;
          if (r + w > rows) {
            Ops::store_part(to, v[c], rows - r);
          } else if (stream_) {
            Ops::stream(to, v[c]);
          } else {
            Ops::store(to, v[c]);
          }
        }
      } else if (columns_follow_) {
        for (int c = 0; c < all; ++c)
          if (c < columns) Ops::store(out_ + c * padded + r, v[c]);
      } else if constexpr (kind > 1) {
        SimdInterleaved<Acc, kind>::store(v, out_ + r * columns);
      } else if constexpr (kind == 0) {
        if (columns == 2 && SimdInterleaved<Acc, 2>::works) {
          if constexpr (SimdInterleaved<Acc, 2>::works) SimdInterleaved<Acc, 2>::store(v, out_ + r * columns);
        } else if (columns == 3 && SimdInterleaved<Acc, 3>::works) {
          if constexpr (SimdInterleaved<Acc, 3>::works && all >= 3)
            SimdInterleaved<Acc, 3>::store(v, out_ + r * columns);
        } else {
          store_rows<pieces>(v, out_ + r * columns);
        }
      } else {
        store_rows<pieces>(v, out_ + r * columns);
      }
    }
  }

  /// A vector of rows, one behind the other; what the last one's last piece has besides is overwritten later.
  template <int pieces>
  KOKKOSSOFTMAX_HOST_FUNCTION void store_rows(const Vector* v, Acc* to) const {
    if constexpr (std::is_void_v<Bytes>) {
      for (int c = 0; c < columns_; ++c) {
        alignas(64) Acc lanes[w];
        Ops::store(lanes, v[c]);
        for (int l = 0; l < w; ++l) to[l * columns_ + c] = lanes[l];
      }
    } else {
      typename Bytes::Raw raw[pieces * piece];
      for (int i = 0; i < pieces * piece; ++i) raw[i] = std::bit_cast<typename Bytes::Raw>(v[i]);
      for (int p = 0; p < pieces; ++p) transpose<Bytes, piece>(raw + p * piece);
      [&]<int... part>(std::integer_sequence<int, part...>) __attribute__((always_inline)) {
        (store_part_of_rows<part, pieces>(raw, to + part * piece * columns_), ...);
      }
      (std::make_integer_sequence<int, Bytes::parts>());
    }
  }
#if defined(__AVX2__)
  template <int part, int pieces, class Raw>
  KOKKOSSOFTMAX_HOST_FUNCTION void store_part_of_rows(const Raw* raw, Acc* to) const {
    for (int i = 0; i < piece; ++i, to += columns_)
      for (int p = 0; p < pieces; ++p)
        Bytes16::store(to + p * piece, Bytes::template part<part>(raw[p * piece + i]));
  }
#endif

  /// What out_ has, to y.
  void put(Out* y, int rows) const {
    const RowGeometry& g = problem_.geometry;
    const int padded = (rows + w - 1) / w * w;
    if constexpr (!writes) {
      if (y_distance_ == 1) return write(out_, rows, y);
      for (int r = 0; r < rows; ++r) y[r * y_distance_] = Ops::template rounded<Out>(out_[r]);
    } else if (dense_) {
      write(out_, rows * columns_, y);
    } else if (columns_follow_) {
      for (int c = 0; c < columns_; ++c) write(out_ + c * padded, rows, y + c * g.y_column_stride);
    } else {
      const Acc* from = out_;
      for (int r = 0; r < rows; ++r, y += y_distance_)
        for (int c = 0; c < columns_; ++c) y[c * g.y_column_stride] = Ops::template rounded<Out>(*from++);
    }
  }
  [[gnu::noinline]] void write(const Acc* from, int count, Out* y) const {
    chunk_write<Acc>(
        StagedValues<Acc>{from}, count, y, stream_,
        [](const Vector& v, index_type) __attribute__((always_inline)) { return v; });
  }

  const Problem& problem_;
  bool stream_, from_memory_;
  bool straight_ = false, straight_here_ = false;  ///< columns of y are written without scratch
  bool dense_ = false;                             ///< rows of y lie one behind the other
  bool columns_follow_ = false;                    ///< out_ has columns one behind the other, not rows
  int columns_, rows_of_strip_ = 0;
  index_type inner_, x_distance_, y_distance_;
  index_type row_index_ = 0, first_ = 0;  ///< of the rows at one distance, and the strip among them
  alignas(64) Acc in_[Plan::strip + 2 * w], out_[Plan::strip + 2 * w];
};

}  // namespace KokkosSoftmax::impl

#endif
