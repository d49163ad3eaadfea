// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The CUDA kernel for rows of a few contiguous columns: a thread has a row. Rows that lie one behind the
/// other come to shared memory and leave it as memory does, in pieces that know nothing of rows; threads that
/// read and wrote them where they lie would have a part of a sector each. (1 GiB on one H200, fractions of a
/// copy, tiled_rows for 16 and more columns of bfloat16, else warp_per_row, and this kernel: float 2 columns
/// 0.05 and 0.97, 5 0.13 and 0.99, 10 0.26 and 0.97, 16 0.81 and 0.98, 17 0.43 and 0.99, 31 0.69 and 0.99;
/// bfloat16 2 0.02 and 0.57, 5 0.05 and 0.82, 10 0.12 and 0.92, 15 0.17 and 0.92, 17 0.66 and 0.98, 31 0.90
/// and 0.92; double 2 0.13 and 0.93, 5 0.16 and 0.94, 8 0.57 and 0.89; microseconds in a CUDA graph, float 10
/// columns: 1 row 1.3 and 1.9, 100000 rows 8.1 and 3.0.) So do rows with the same between all of them,
/// element by element, but as vectors where they are such and begin on their boundaries.

#ifndef KOKKOSSOFTMAX_THREADPERROW_HPP
#define KOKKOSSOFTMAX_THREADPERROW_HPP

#include <impl/cuda/KokkosSoftmax_OperandNeighbours.hpp>
#include <impl/cuda/KokkosSoftmax_RowInRegisters.hpp>
#include <impl/cuda/KokkosSoftmax_RowTiles.hpp>

#include <algorithm>
#include <numeric>
#include <string_view>
#include <utility>

namespace KokkosSoftmax::impl {

/// A block's rows, and how they come to it.
struct ThreadPerRowTile {
  static constexpr int threads = 128;

  int rows;                               ///< a multiple of `threads`
  bool stages_x, stages_y;                ///< whether rows of x and of y go by shared memory
  index_type x_row_stride, y_row_stride;  ///< of these
  int y_begin;                            ///< of the outputs in shared memory

  /// Of a tile that has all that it can. (With 8 KB for the longer rows, too, on one H200: bfloat16 17
  /// columns 0.71 for 0.98, 25 0.70 for 0.91.)
  template <class Problem>
  KOKKOS_FORCEINLINE_FUNCTION static constexpr int rows_of_thread(int columns) {
    constexpr std::size_t x = sizeof(typename Problem::In), y = sizeof(typename Problem::Out);
    const int row_bytes = columns * static_cast<int>(x > y ? x : y);
    const int rows = (row_bytes > 32 ? 16384 : 8192) / (row_bytes * threads);
    return rows > 1 ? rows : 1;
  }
};

/// Rows of so many columns in shared memory, or of any number (0), one behind the other; but where they are
/// whole vectors, these in another order, for neighbouring rows would begin on the same bank. A tile has so
/// many rows of each thread, if there are enough.
template <class T, int columns, int rows_of_thread>
struct ImageOfRows {
  static constexpr int width = 16 / static_cast<int>(sizeof(T));
  static constexpr int row_bytes = columns * static_cast<int>(sizeof(T));
  /// What a thread takes at once of its row: as much as all rows are multiples of.
  static constexpr int unit = columns == 0 ? static_cast<int>(sizeof(T)) : std::gcd(row_bytes, 16);
  /// A scalar's bits. (As what it is the compiler would take it apart into its bytes.)
  using Bits = WordsOf<T>;
  struct Piece {
    static constexpr int count = unit / static_cast<int>(sizeof(T));
    Bits bits[count];
  };
  static constexpr int pieces = columns / Piece::count;
  T* data;

  __device__ explicit ImageOfRows(char* memory) : data(reinterpret_cast<T*>(memory)) {}
  __device__ static int mixed(int v) { return unit == 16 ? v ^ (v >> 3 & 7) : v; }
  __device__ uint4& vector_at(int v) const { return reinterpret_cast<uint4*>(data)[mixed(v)]; }
  __device__ WordsOf<Piece>& piece_at(int p) const {
    return reinterpret_cast<WordsOf<Piece>*>(data)[mixed(p)];
  }
  __device__ Bits& operator[](int i) const {
    return reinterpret_cast<Bits*>(data)[unit == 16 ? mixed(i / width) * width + i % width : i];
  }

  /// A row to and from a thread's registers, so much at once.
  __device__ void read_row(int row, T (&to)[columns == 0 ? 1 : columns]) const {
#pragma unroll
    for (int p = 0; p < pieces; ++p) {
      const auto piece = bits_as<Piece>(piece_at(row * pieces + p));
#pragma unroll
      for (int i = 0; i < Piece::count; ++i) to[p * Piece::count + i] = bits_as<T>(piece.bits[i]);
    }
  }
  __device__ void write_row(int row, const T (&from)[columns == 0 ? 1 : columns]) const {
#pragma unroll
    for (int p = 0; p < pieces; ++p) {
      Piece piece;
#pragma unroll
      for (int i = 0; i < Piece::count; ++i) piece.bits[i] = bits_as<Bits>(from[p * Piece::count + i]);
      piece_at(row * pieces + p) = bits_as<WordsOf<Piece>>(piece);
    }
  }

  /// Copies `count` scalars from global memory, by all threads of the block.
  __device__ void read(const T* from, int count) const {
    const auto behind = static_cast<int>(reinterpret_cast<std::uintptr_t>(from) % 16);
    const auto* const at = reinterpret_cast<const uint4*>(from - behind / size);
    if (behind == 0) {
      const int vectors = count / width;
      const auto get = [&](int v) { return load_past_l1(at + v); };
      const auto use = [&](int v, const uint4& held) { vector_at(v) = held; };
      if (rows_of_thread != 0 && vectors == vectors_of_tile) {
        for_each_of_tile(get, use);
      } else {
        for_each<4>(vectors, get, use);
      }
      read_scalars(from, vectors * width, count);
    } else {
      // Each lies in two of memory's. (What is before the first is of its allocation, which begins at a
      // boundary; what is behind the last may be of none.)
      struct Two {
        uint4 first, second;
      };
      const int vectors = max((behind + count * size) / 16 - 1, 0);
      for_each<2>(
          vectors,
          [&](int v) {
            return Two{at[v], at[v + 1]};
          },
          [&](int v, const Two& held) { vector_at(v) = between(held.first, held.second, behind); });
      read_scalars(from, vectors * width, count);
    }
  }
  /// Likewise of rows of so many columns with something between them; in vectors, where they are vectors.
  __device__ void read_apart(const T* from, index_type row_stride, int length, int count) const {
    if (begin_on_vectors(from, row_stride)) {
      for_units_of_rows<width, threads>(
          from, row_stride, length / width, count / width, thread(),
          [&](int i, const T* at, int) { vector_at(i) = *reinterpret_cast<const uint4*>(at); });
    } else {
      for_units_of_rows<1, threads>(from, row_stride, length, count, thread(), [&](int i, const T* at, int) {
        (*this)[i] = *reinterpret_cast<const Bits*>(at);
      });
    }
  }
  __device__ void write_apart(T* to, index_type row_stride, int length, int count) const {
    if (begin_on_vectors(to, row_stride)) {
      for_units_of_rows<width, threads>(
          to, row_stride, length / width, count / width, thread(),
          [&](int i, T* at, int) { *reinterpret_cast<uint4*>(at) = vector_at(i); });
    } else {
      for_units_of_rows<1, threads>(to, row_stride, length, count, thread(),
                                    [&](int i, T* at, int) { *reinterpret_cast<Bits*>(at) = (*this)[i]; });
    }
  }
  /// Likewise to global memory.
  __device__ void write(T* to, int count) const {
    const auto behind = static_cast<int>(reinterpret_cast<std::uintptr_t>(to) % 16);
    auto* const at = reinterpret_cast<uint4*>(to - behind / size);
    const int end = (behind + count * size) / 16;  // of whole vectors
    if (behind == 0) {
#pragma unroll 4
      for (int v = thread(); v < end; v += threads) at[v] = vector_at(v);
      write_scalars(to, 0, 0, end * width, count);
    } else {
#pragma unroll 1
      for (int v = thread() + 1; v < end; v += threads)
        at[v] = between(vector_at(v - 1), vector_at(v), 16 - behind);
      const int head = min(width - behind / size, count);
      write_scalars(to, 0, head, max(head, end * width - behind / size), count);
    }
  }

 private:
  static constexpr int size = static_cast<int>(sizeof(T)), threads = ThreadPerRowTile::threads;
  __device__ static bool begin_on_vectors(const T* first, index_type row_stride) {
    return unit == 16 && (reinterpret_cast<std::uintptr_t>(first) | (row_stride * size)) % 16 == 0;
  }
  __device__ static int thread() {
    return static_cast<int>(threadIdx.x);
  }

  /// The 16 bytes that begin so many behind the begin of the first of two neighbours.
  __device__ static uint4 between(const uint4& first, const uint4& second, int bytes) {
    unsigned words[] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
    shift_words<16, size, 4>(words, bytes);
    return {words[0], words[1], words[2], words[3]};
  }
  /// use(v, get(v)) for all `count`, so many of a thread at once.
  template <int at_once, class Get, class Use>
  __device__ static void for_each(int count, const Get& get, const Use& use) {
#pragma unroll 1
    for (int first = thread(); first < count; first += at_once * threads) {
      decltype(get(0)) held[at_once];
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        if (first + k * threads < count) held[k] = get(first + k * threads);
      }
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        if (first + k * threads < count) use(first + k * threads, held[k]);
      }
    }
  }
  /// All of a tile's at once. (There are not predicates enough to ask for each of eight.)
  static constexpr int vectors_of_tile = rows_of_thread * threads * row_bytes / 16;
  template <class Get, class Use>
  __device__ static void for_each_of_tile(const Get& get, const Use& use) {
    constexpr int of_all = vectors_of_tile / threads, others = vectors_of_tile % threads;
    const int first = thread(), last = first + of_all * threads;
    decltype(get(0)) held[of_all + 1];
#pragma unroll
    for (int k = 0; k < of_all; ++k) held[k] = get(first + k * threads);
    if (first < others) held[of_all] = get(last);
#pragma unroll
    for (int k = 0; k < of_all; ++k) use(first + k * threads, held[k]);
    if (first < others) use(last, held[of_all]);
  }
  __device__ void read_scalars(const T* from, int begin, int end) const {
#pragma unroll 1
    for (int i = begin + thread(); i < end; i += threads) (*this)[i] = reinterpret_cast<const Bits*>(from)[i];
  }
  /// Two ranges of them.
  __device__ void write_scalars(T* to, int begin, int end, int next, int next_end) const {
#pragma unroll 1
    for (int i = begin + thread(); i < end + next_end - next; i += threads) {
      const int at = i < end ? i : i - end + next;
      reinterpret_cast<Bits*>(to)[at] = (*this)[at];
    }
  }
};

/// A row of at most so many columns in a thread's registers; past the end -inf.
template <int columns, class Problem>
struct RowOfThread {
  using Acc = typename Problem::Acc;
  using Out = typename Problem::Out;
  Acc held[columns];

  /// Calls put(k, output) for the first `count`, or writes the logsumexp.
  template <class Put>
  __device__ void softmax(Operation operation, int count, Out* lse, const Put& put) {
    Acc top[columns], e[columns];
#pragma unroll
    for (int k = 0; k < columns; ++k) top[k] = held[k];
    const Acc max_of_row = fold_accumulators<columns>(top, [](Acc a, Acc b) { return maximum_or_nan(a, b); });
    const Acc max = finite_maximum(max_of_row);
    const ExponentialBelow<Acc> exponential(max);
#pragma unroll
    for (int k = 0; k < columns; ++k) e[k] = exponential.uncorrected(held[k]);
    const bool is_softmax = operation == Operation::softmax;
    if (is_softmax) {
#pragma unroll
      for (int k = 0; k < columns; ++k) held[k] = e[k];
    }
    const Acc uncorrected = fold_accumulators<columns>(e, [](Acc a, Acc b) { return a + b; });
    const Acc sum =
        sum_or_special(max_of_row, is_softmax ? uncorrected : uncorrected * exponential.correction);
    const RowResult<Acc> result(operation, MaxSum<Acc>{max, sum});
    if (operation == Operation::logsumexp) {
      *lse = store_as<Out>(result.logsumexp());
    } else {
      for_columns<columns>(count, [&](int k) {
        put(k, store_as<Out>(is_softmax ? held[k] * result.factor : result.log_softmax(held[k])));
      });
    }
  }
};

/// A row of doubles that stays in shared memory, where its exponentials take the place of its logits:
/// registers that hold it would be too many. (1 GiB on one H200, fractions of a copy, in registers and so: 9
/// columns 0.60 and 0.83, 13 0.52 and 0.83; in warps and so: 10 0.61 and 0.80, 17 0.45 and 0.83, 22 0.64 and
/// 0.87, 31 0.82 and 0.84, but 12 0.80 and 0.59, where rows begin on few banks.)
template <class Problem>
struct RowInShared {
  using Acc = typename Problem::Acc;
  using Out = typename Problem::Out;
  static_assert(sizeof(typename Problem::In) == sizeof(Acc) && sizeof(Out) == sizeof(Acc));
  using Image = ImageOfRows<Acc, 0, 0>;
  Image image;
  int first;

  __device__ Acc at(int k) const { return bits_as<Acc>(image[first + k]); }
  __device__ void put(int k, Acc value) const { image[first + k] = bits_as<typename Image::Bits>(value); }

  /// Calls write(k, output) for all `count`, or writes the logsumexp.
  template <class Write>
  __device__ void softmax(Operation operation, int count, Out* lse, const Write& write) const {
    const bool is_softmax = operation == Operation::softmax;
    Acc max_of_row = at(0);
#pragma unroll 4
    for (int k = 1; k < count; ++k) max_of_row = maximum_or_nan(max_of_row, at(k));
    const Acc max = finite_maximum(max_of_row);
    const ExponentialBelow<Acc> exponential(max);
    Acc sum[2] = {0, 0};
#pragma unroll 1
    for (int k = 0; k < count; k += 2) {
      const bool has_second = k + 1 < count;
      const Acc e = exponential(at(k)), second = exponential(at(has_second ? k + 1 : k));
      if (is_softmax) {
        put(k, e);
        if (has_second) put(k + 1, second);
      }
      sum[0] += e;
      sum[1] += has_second ? second : 0;
    }
    const RowResult<Acc> result(operation, MaxSum<Acc>{max, sum_or_special(max_of_row, sum[0] + sum[1])});
    if (operation == Operation::logsumexp) {
      *lse = result.logsumexp();
    } else {
#pragma unroll 2
      for (int k = 0; k < count; ++k)
        write(k, is_softmax ? at(k) * result.factor : result.log_softmax(at(k)));
    }
  }
};

/// Brings a block's rows, calls use_row(x, y, row, where) for each of a thread's, and takes y away. Images
/// have rows of so many columns, or of any number (0).
template <int columns, class Problem, class UseRow>
__device__ __forceinline__ void for_rows_of_thread(const Problem& problem, const ThreadPerRowTile& tile,
                                                   const UseRow& use_row) {
  using In = std::remove_const_t<typename Problem::In>;
  using Out = typename Problem::Out;
  constexpr int rows_of_thread = columns == 0 ? 0 : ThreadPerRowTile::rows_of_thread<Problem>(columns);
  extern __shared__ __align__(16) char images_of_tile[];
  const RowGeometry& g = problem.geometry;
  grid_dependency_wait();
  if (g.rows == 0) return;
  const int length = columns == 0 ? static_cast<int>(g.columns) : columns;
  const index_type first_row = static_cast<index_type>(blockIdx.x) * tile.rows;
  const auto rows = static_cast<int>(min(static_cast<index_type>(tile.rows), g.rows - first_row));
  const ImageOfRows<In, columns, rows_of_thread> x(images_of_tile);
  const ImageOfRows<Out, columns, rows_of_thread> y(images_of_tile + tile.y_begin);
  if (tile.stages_x) {
    const In* const from = problem.x + first_row * tile.x_row_stride;
    if (tile.x_row_stride == length) {
      x.read(from, rows * length);
    } else {
      x.read_apart(from, tile.x_row_stride, length, rows * length);
    }
    __syncthreads();
  }
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x); row < rows; row += ThreadPerRowTile::threads) {
    RowGeometry::Row where{0, 0, 0};
    if (has_transform_v<Problem> || !tile.stages_x || !tile.stages_y) where = g.row(first_row + row);
    use_row(x, y, row, where);
  }
  if (tile.stages_y) {
    __syncthreads();
    Out* const to = problem.y + first_row * tile.y_row_stride;
    if (tile.y_row_stride == length) {
      y.write(to, rows * length);
    } else {
      y.write_apart(to, tile.y_row_stride, length, rows * length);
    }
  }
}

/// Blocks for whose registers there must be room, where the compiler would take more. (One H200, without it
/// and with it: float 26 columns 0.97 and 0.99, double 8 0.74 and 0.84; but float 30 0.99 and, with five,
/// 0.85.)
template <class Problem>
constexpr int thread_per_row_blocks(int columns, bool exact) {
  if (sizeof(typename Problem::Acc) == 8) return columns > 6 ? 4 : 1;
  if (!exact) return columns > 8 ? 6 : 1;
  return columns >= 25 && columns <= 27 ? 5 : 1;
}

/// `exact`: rows have so many columns, else at most.
template <int columns, bool exact, class Problem>
__global__ void __launch_bounds__(ThreadPerRowTile::threads, thread_per_row_blocks<Problem>(columns, exact))
    thread_per_row_kernel(const __grid_constant__ Problem problem,
                          const __grid_constant__ ThreadPerRowTile tile) {
  using Acc = typename Problem::Acc;
  using In = std::remove_const_t<typename Problem::In>;
  using Out = typename Problem::Out;
  const int length = exact ? columns : static_cast<int>(problem.geometry.columns);
  for_rows_of_thread<exact ? columns : 0>(
      problem, tile, [&](const auto& x, const auto& y, int row, const RowGeometry::Row& where) {
        In logit[columns];
        if (tile.stages_x) {
          if constexpr (exact) {
            x.read_row(row, logit);
          } else {
            for_columns<columns>(length, [&](int k) { logit[k] = bits_as<In>(x[row * length + k]); });
          }
        } else {
          for_columns<columns>(length, [&](int k) { logit[k] = problem.x[where.x_offset + k]; });
        }
        RowOfThread<columns, Problem> mine;
#pragma unroll
        for (int k = 0; k < columns; ++k)
          mine.held[k] = k < length ? load_as<Acc>(logit[k]) : -infinity_v<Acc>;
        if constexpr (has_transform_v<Problem>)
          transform_columns<1>(prepared_stage<Acc>(problem.transform.at_row(where.index), 0), 0, length,
                               mine.held);
        [[maybe_unused]] Out output[columns];
        mine.softmax(problem.operation, length, problem.y + where.y_offset, [&](int k, Out out) {
          if (!tile.stages_y) {
            problem.y[where.y_offset + k] = out;
          } else if constexpr (exact) {
            output[k] = out;
          } else {
            y[row * length + k] = bits_as<WordsOf<Out>>(out);
          }
        });
        if constexpr (exact) {
          if (tile.stages_y) y.write_row(row, output);
        }
      });
}

/// Likewise, of RowInShared.
template <class Problem>
__global__ void __launch_bounds__(ThreadPerRowTile::threads)
    thread_per_row_in_shared_kernel(const __grid_constant__ Problem problem,
                                    const __grid_constant__ ThreadPerRowTile tile) {
  const auto length = static_cast<int>(problem.geometry.columns);
  for_rows_of_thread<0>(
      problem, tile, [&](const auto& image, const auto&, int row, const RowGeometry::Row& where) {
        const RowInShared<Problem> mine{image, row * length};
        if (!tile.stages_x) {
#pragma unroll 4
          for (int k = 0; k < length; ++k) mine.put(k, problem.x[where.x_offset + k]);
        }
        mine.softmax(problem.operation, length, problem.y + where.y_offset, [&](int k, auto output) {
          if (tile.stages_y) {
            mine.put(k, output);
          } else {
            problem.y[where.y_offset + k] = output;
          }
        });
      });
}

struct ThreadPerRow {
  static constexpr const char* name = "thread_per_row";

  template <class Exec, class Problem>
  static constexpr bool supports = row_in_registers_supports<Exec, Problem>;

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec&, const Problem& problem) {
    const std::string_view layout = refuse_row_in_registers(
        problem, shortest, longest, "a row has one column", "a row has too many columns for a thread");
    if (!layout.empty()) return layout;
    return takes<Problem>(problem.geometry.columns) ? "" : "rows of this length are faster in warps";
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    // `reserve` launches over no rows: that loads the kernels for shorter rows, too, which a capture could
    // not do.
    const index_type columns = problem.geometry.columns;
    const bool no_rows = problem.geometry.rows == 0;
    if constexpr (has_transform_v<Problem>) {
      if (columns <= 4 || no_rows) launch<&thread_per_row_kernel<4, false, Problem>>(exec, problem);
      if (columns > 4 && (columns <= 8 || no_rows))
        launch<&thread_per_row_kernel<8, false, Problem>>(exec, problem);
      if (columns > 8) launch<&thread_per_row_kernel<16, false, Problem>>(exec, problem);
    } else {
      if constexpr (is_double<Problem>) {
        if (stays_in_shared(columns)) launch<&thread_per_row_in_shared_kernel<Problem>>(exec, problem);
      }
      // One for each length, so that nothing is done for columns that are not there.
      const auto launch_of = [&]<int length>(std::integral_constant<int, length>) {
        if constexpr (takes<Problem>(length) && !(is_double<Problem> && stays_in_shared(length))) {
          if (columns == length || (columns > length && no_rows))
            launch<&thread_per_row_kernel<length, true, Problem>>(exec, problem);
        }
      };
      const auto launch_any = [&]<int... i>(std::integer_sequence<int, i...>) {
        (launch_of(std::integral_constant<int, shortest + i>()), ...);
      };
      launch_any(std::make_integer_sequence<int, longest - shortest + 1>());
    }
  }

  template <class Exec, class Problem>
  static void reserve(const Exec&, const Problem&) {}

 private:
  template <class Problem>
  static constexpr bool is_double = sizeof(typename Problem::In) == 8 && sizeof(typename Problem::Out) == 8;
  static constexpr bool stays_in_shared(index_type columns_of_double) { return columns_of_double > 8; }
  static constexpr int shortest = 2, longest = 31;

  /// The length decides, and whether there is a transform, for others give other bits: what warps are not
  /// faster with, whole vectors of floats from 24 columns on, say.
  template <class Problem>
  static constexpr bool takes(index_type columns) {
    constexpr std::size_t size = sizeof(typename Problem::In);
    const bool is_odd = columns % 2 != 0;
    if (size == 8 && columns <= 8) return true;
    if (has_transform_v<Problem>) return size == 8 ? is_odd && columns <= 13 : columns < 16;
    if (is_double<Problem>) return is_odd ? columns < 32 : columns % 4 == 2 && columns <= 26;
    if (size == 8) return is_odd && columns <= 13;
    if (size == 2) return columns < 32;
    return columns <= 20 || columns % 4 != 0;
  }

  template <auto kernel, class Problem>
  static void launch(const Kokkos::Cuda& exec, const Problem& problem) {
    using In = typename Problem::In;
    using Out = typename Problem::Out;
    const RowGeometry& g = problem.geometry;
    ThreadPerRowTile tile{};
    tile.stages_x = g.rank <= 1;
    tile.stages_y = problem.operation != Operation::logsumexp && g.rank <= 1;
    tile.x_row_stride = g.rank == 1 ? g.x_stride[0] : g.columns;
    tile.y_row_stride = g.rank == 1 ? g.y_stride[0] : g.columns;
    // As many rows as fill the memory, unless there are too few for all multiprocessors.
    constexpr index_type threads = ThreadPerRowTile::threads, blocks_at_once = 8;
    const auto bytes_of_threads = [&](std::size_t size) {
      return threads * g.columns * static_cast<index_type>(size);
    };
    const index_type most = ThreadPerRowTile::rows_of_thread<Problem>(static_cast<int>(g.columns));
    const index_type enough =
        g.rows / (index_type(exec.cuda_device_prop().multiProcessorCount) * blocks_at_once * threads);
    const index_type rows_of_thread = std::max<index_type>(1, std::min(most, enough));
    tile.rows = static_cast<int>(threads * rows_of_thread);
    const auto x_bytes = static_cast<int>(rows_of_thread * bytes_of_threads(sizeof(In))),
               y_bytes = static_cast<int>(rows_of_thread * bytes_of_threads(sizeof(Out)));
    // The outputs take the place of the inputs where they are as large.
    tile.y_begin = tile.stages_x && tile.stages_y && sizeof(In) != sizeof(Out) ? x_bytes : 0;
    // (Where neither is staged, too: doubles may stay in it.)
    const int bytes =
        tile.stages_y ? tile.y_begin + std::max(y_bytes, tile.y_begin == 0 ? x_bytes : 0) : x_bytes;
    launch_with_shared<kernel>(exec, kernel_label(problem.operation, name),
                               ceil_div(g.rows, static_cast<index_type>(tile.rows)),
                               ThreadPerRowTile::threads, bytes, problem, tile);
  }
};

}  // namespace KokkosSoftmax::impl

#endif
