// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The CUDA kernel for rows of a few contiguous columns: a thread has a row. Rows that lie one behind the
/// other come to shared memory and leave it as memory does, in pieces that know nothing of rows; threads that
/// read and wrote them where they lie would have a part of a sector each. (1 GiB on one H200, fractions of a
/// copy, warp_per_row and this kernel: float 2 columns 0.05 and 0.96, 5 0.13 and 0.98, 10 0.26 and 0.95, 16
/// 0.82 and 0.96, 17 0.43 and 0.82, 31 0.67 and 0.80; bfloat16 2 0.02 and 0.54, 5 0.05 and 0.78, 10 0.12 and
/// 0.89, 15 0.17 and 0.89; double 2 0.13 and 0.72, 5 0.15 and 0.68, 9 0.28 and 0.52; microseconds in a CUDA
/// graph, float 10 columns: 1 row 1.3 and 1.8, 100000 rows 8.1 and 3.1.)

#ifndef KOKKOSSOFTMAX_THREADPERROW_HPP
#define KOKKOSSOFTMAX_THREADPERROW_HPP

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
  static constexpr int usual_bytes = 8192;                              ///< of the larger of x and y
  static constexpr int vectors_of_thread = usual_bytes / 16 / threads;  ///< under way at once

  int rows;                 ///< a multiple of `threads`
  bool stages_x, stages_y;  ///< whether rows of x and of y lie one behind the other
  int y_begin;              ///< of the outputs in shared memory
};

/// Rows of so many columns in shared memory, or of any number (0), one behind the other; but where they are
/// whole vectors, these in another order, for neighbouring rows would begin on the same bank.
template <class T, int columns>
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
    constexpr int threads = ThreadPerRowTile::threads;
    const auto thread = static_cast<int>(threadIdx.x);
    int done = 0;
    if (reinterpret_cast<std::uintptr_t>(from) % 16 == 0) {
      const int vectors = count / width;
      constexpr int at_once = ThreadPerRowTile::vectors_of_thread;
      for (int first = thread; first < vectors; first += at_once * threads) {
        uint4 held[at_once];
#pragma unroll
        for (int k = 0; k < at_once; ++k) {
          if (first + k * threads < vectors)
            held[k] = load_past_l1(reinterpret_cast<const uint4*>(from) + first + k * threads);
        }
#pragma unroll
        for (int k = 0; k < at_once; ++k) {
          if (first + k * threads < vectors) vector_at(first + k * threads) = held[k];
        }
      }
      done = vectors * width;
    }
    constexpr int at_once = 8;
    for (int first = done + thread; first < count; first += at_once * threads) {
      Bits held[at_once];
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        if (first + k * threads < count) held[k] = reinterpret_cast<const Bits*>(from)[first + k * threads];
      }
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        if (first + k * threads < count) (*this)[first + k * threads] = held[k];
      }
    }
  }
  /// Likewise to global memory, word by word. (Vector by vector it had 0.65 of a copy for 0.97, but by loads
  /// of bytes, which the compiler made of copies of vectors: not tried since.)
  __device__ void write(T* to, int count) const {
    constexpr int threads = ThreadPerRowTile::threads;
    const auto thread = static_cast<int>(threadIdx.x);
    int done = 0;
    if (reinterpret_cast<std::uintptr_t>(to) % 4 == 0) {
      const int words = count * static_cast<int>(sizeof(T)) / 4;
      for (int w = thread; w < words; w += threads) {
        const int in_order = unit == 16 ? mixed(w / 4) * 4 + w % 4 : w;
        reinterpret_cast<unsigned*>(to)[w] = reinterpret_cast<const unsigned*>(data)[in_order];
      }
      done = words * 4 / static_cast<int>(sizeof(T));
    }
    for (int i = done + thread; i < count; i += threads) reinterpret_cast<Bits*>(to)[i] = (*this)[i];
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

/// `exact`: rows have so many columns, else at most.
template <int columns, bool exact, class Problem>
__global__ void __launch_bounds__(ThreadPerRowTile::threads)
    thread_per_row_kernel(const __grid_constant__ Problem problem,
                          const __grid_constant__ ThreadPerRowTile tile) {
  using Acc = typename Problem::Acc;
  using In = std::remove_const_t<typename Problem::In>;
  using Out = typename Problem::Out;
  constexpr int columns_of_image = exact ? columns : 0;
  extern __shared__ __align__(16) char images_of_tile[];
  const RowGeometry& g = problem.geometry;
  grid_dependency_wait();
  if (g.rows == 0) return;
  const int length = exact ? columns : static_cast<int>(g.columns);
  const index_type first_row = static_cast<index_type>(blockIdx.x) * tile.rows;
  const auto rows = static_cast<int>(min(static_cast<index_type>(tile.rows), g.rows - first_row));
  const ImageOfRows<In, columns_of_image> x(images_of_tile);
  const ImageOfRows<Out, columns_of_image> y(images_of_tile + tile.y_begin);
  if (tile.stages_x) {
    x.read(problem.x + first_row * length, rows * length);
    __syncthreads();
  }
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x); row < rows; row += ThreadPerRowTile::threads) {
    RowGeometry::Row where{0, 0, 0};
    if (has_transform_v<Problem> || !tile.stages_x || !tile.stages_y) where = g.row(first_row + row);
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
    for (int k = 0; k < columns; ++k) mine.held[k] = k < length ? load_as<Acc>(logit[k]) : -infinity_v<Acc>;
    if constexpr (has_transform_v<Problem>)
      transform_columns<1>(prepared_stage<Acc>(problem.transform.at_row(where.index), 0), 0, length,
                           mine.held);
    Out output[columns];
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
  }
  if (tile.stages_y) {
    __syncthreads();
    y.write(problem.y + first_row * length, rows * length);
  }
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
    if constexpr (has_transform_v<Problem>) {
      // `reserve` launches over no rows: that loads all three, which a capture could not do.
      const index_type columns = problem.geometry.columns;
      const bool no_rows = problem.geometry.rows == 0;
      if (columns <= 4 || no_rows) launch<4, false>(exec, problem);
      if ((columns > 4 && columns <= 8) || no_rows) launch<8, false>(exec, problem);
      if (columns > 8 || no_rows) launch<16, false>(exec, problem);
    } else {
      // One for each length, so that nothing is done for columns that are not there.
      const auto launch_of = [&]<int columns>(std::integral_constant<int, columns>) {
        if constexpr (takes<Problem>(columns)) {
          if (problem.geometry.columns == columns) launch<columns, true>(exec, problem);
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
  static constexpr int shortest = 2, longest = 31;

  /// The length decides, and whether there is a transform, for others give other bits: up to 15 columns, but
  /// of double what warps are not faster with; of float without a transform up to 16, and longer rows that
  /// are no whole vectors. (Of 16 bits tiled_rows takes longer ones.)
  template <class Problem>
  static constexpr bool takes(index_type columns) {
    using In = std::remove_const_t<typename Problem::In>;
    if (sizeof(In) == 2) return columns < 16;
    if (sizeof(In) == 8) return columns <= (columns % 2 == 0 ? 8 : 13);
    return columns < 16 || (!has_transform_v<Problem> && (columns == 16 || columns % 4 != 0));
  }

  template <int columns, bool exact, class Problem>
  static void launch(const Kokkos::Cuda& exec, const Problem& problem) {
    using In = typename Problem::In;
    using Out = typename Problem::Out;
    const RowGeometry& g = problem.geometry;
    const auto lie_behind_each_other = [&](const index_type* stride) {
      return g.rank == 0 || (g.rank == 1 && stride[0] == g.columns);
    };
    ThreadPerRowTile tile{};
    tile.stages_x = lie_behind_each_other(g.x_stride);
    tile.stages_y = problem.operation != Operation::logsumexp && lie_behind_each_other(g.y_stride);
    // As many rows as fill the memory, unless there are too few for all multiprocessors.
    constexpr index_type threads = ThreadPerRowTile::threads, blocks_at_once = 8;
    const auto bytes_of_threads = [&](std::size_t size) {
      return threads * g.columns * static_cast<index_type>(size);
    };
    const index_type most =
        ThreadPerRowTile::usual_bytes / bytes_of_threads(std::max(sizeof(In), sizeof(Out)));
    const index_type enough =
        g.rows / (index_type(exec.cuda_device_prop().multiProcessorCount) * blocks_at_once * threads);
    const index_type rows_of_thread = std::max<index_type>(1, std::min(most, enough));
    tile.rows = static_cast<int>(threads * rows_of_thread);
    const auto x_bytes = static_cast<int>(rows_of_thread * bytes_of_threads(sizeof(In))),
               y_bytes = static_cast<int>(rows_of_thread * bytes_of_threads(sizeof(Out)));
    // The outputs take the place of the inputs where they are as large.
    tile.y_begin = tile.stages_x && tile.stages_y && sizeof(In) != sizeof(Out) ? x_bytes : 0;
    const int bytes =
        tile.stages_y ? tile.y_begin + std::max(y_bytes, tile.y_begin == 0 ? x_bytes : 0) : x_bytes;
    launch_with_shared<&thread_per_row_kernel<columns, exact, Problem>>(
        exec, kernel_label(problem.operation, name), ceil_div(g.rows, static_cast<index_type>(tile.rows)),
        ThreadPerRowTile::threads, bytes, problem, tile);
  }
};

}  // namespace KokkosSoftmax::impl

#endif
