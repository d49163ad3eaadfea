// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The CUDA kernel for rows of floats that are too long for a thread and too short for a warp: four lanes
/// have a row. A warp brings some rows to shared memory as they lie in memory, in vectors that know nothing
/// of rows, and takes them away so; between, each lane has its part of a row in registers. (1 GiB on one
/// H200, fractions of a copy, softmax by warp_per_row and so: 36 columns 0.85 and 0.99, 40 0.89 and 0.98, 47
/// 0.91 and 0.98, 56 0.97 and 0.99, 63 0.89 and 0.98, 65 0.91 and 0.97, 84 0.96 and 0.99, 95 0.84 and 0.97,
/// 100 0.94 and 0.98, 119 0.92 and 0.97; where x and y begin off a boundary of 16 bytes 36 0.64 and 0.92, 65
/// 0.91 and 0.97, 80 0.72 and 0.94, 100 0.80 and 0.98; microseconds in a CUDA graph, 65 columns: 1 row 1.50
/// and 1.35, 4096 rows 2.2 and 2.5, 100000 rows 15.8 and 14.5. Eight lanes a row have 0.97 to 0.99, too, but
/// 0.94 to 0.97 of log_softmax below 56 columns, and less of logsumexp.)

#ifndef KOKKOSSOFTMAX_QUADPERROW_HPP
#define KOKKOSSOFTMAX_QUADPERROW_HPP

#include <impl/cuda/KokkosSoftmax_RowInRegisters.hpp>

#include <string_view>
#include <type_traits>

namespace KokkosSoftmax::impl {

/// A block's rows, and how they come and go.
struct QuadTile {
  static constexpr int threads = 128, lanes = 4, rows_at_once = 32 / lanes;
  /// Columns of a row are dealt to its lanes in rounds, so many neighbours to each: wherever the rows of a
  /// warp begin, its lanes find these on banks of their own, if rows are an odd number of them apart.
  static constexpr int columns_of_round = 32, columns_of_lane = columns_of_round / lanes;

  /// Where rows begin in memory: one behind the other, as far behind a boundary of 16 bytes as in shared
  /// memory; each on such a boundary; anywhere.
  enum class Begin { as_in_image, on_boundaries, anywhere };

  int batches;            ///< of rows_at_once, of a warp
  unsigned rows_of_warp;  ///< that is
  int before;             ///< elements of a warp's image that lie before its first row
  int image_row;          ///< from row to row of the image
  int image;              ///< elements of that image, whole vectors
  Begin x, y;
};

/// A warp's rows in shared memory.
struct ImageOfQuads {
  float* data;
  int begin, row_stride, rows;

  __device__ float* row(int row) const { return data + begin + row * row_stride; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  /// use(v) for vectors from `first` up to `end`, which the lanes take in turn.
  template <class Use>
  __device__ static void for_vectors(int first, int end, const Use& use) {
    constexpr int at_once = 4;
#pragma unroll 1
    for (int v = first + lane(); v < end; v += at_once * 32) {
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        if (v + k * 32 < end) use(v + k * 32);
      }
    }
  }

  /// Rows that are one behind the other, as they are in memory, where the image's begin is at `first`.
  __device__ void read(const float* first) const {
    const int end = begin + rows * row_stride, whole = end / 4;
    const std::uint32_t to = shared_address(data);
    for_vectors(0, whole, [&](int v) { cp_async_16(to + v * 16, first + v * 4); });
    // (What is behind the last row may be no memory.)
    if (end % 4 != 0 && lane() < end % 4) data[whole * 4 + lane()] = first[whole * 4 + lane()];
  }
  __device__ void write(float* first) const {
    const int end = begin + rows * row_stride, first_whole = (begin + 3) / 4, whole = end / 4;
    for_vectors(first_whole, whole,
                [&](int v) { reinterpret_cast<uint4*>(first)[v] = reinterpret_cast<const uint4*>(data)[v]; });
    if ((begin | end) % 4 != 0 && lane() < 8) {
      const bool at_begin = lane() < 4;
      const int i = at_begin ? lane() : whole * 4 + lane() - 4;
      if (at_begin ? i >= begin && i < first_whole * 4 : i < end) first[i] = data[i];
    }
  }
  /// use(in the image, in memory) for each so many neighbours, and use_one for what each row has behind
  /// these, of rows that are elsewhere in memory.
  template <int together, class T, class Use, class UseOne>
  __device__ void for_memory(const RowGeometry& g, T* data_of_all, const index_type* strides,
                             index_type first_row, const Use& use, const UseOne& use_one) const {
    const auto columns = static_cast<int>(g.columns);
    const int length = columns / together, between = row_stride - length * together;
    const auto row_in_memory = [&](int r) {
      const RowGeometry::Row where = g.row(first_row + r);
      return data_of_all + (strides == g.x_stride ? where.x_offset : where.y_offset);
    };
    if (g.rank <= 1) {
      const index_type stride = g.rank == 0 ? columns : strides[0];
      float* const here = row(0);
      for_units_of_rows<together, 32>(
          data_of_all + first_row * stride, stride, length, rows * length, lane(),
          [&](int i, T* at, int r) { use(here + i * together + r * between, at); });
    } else {
#pragma unroll 1
      for (int r = 0; r < rows; ++r) {
        T* const at = row_in_memory(r);
#pragma unroll 1
        for (int unit = lane(); unit < length; unit += 32)
          use(row(r) + unit * together, at + unit * together);
      }
    }
    if (together > 1 && columns % together != 0) {
      const int column = length * together + lane() % together;
#pragma unroll 1
      for (int r = lane() / together; r < rows; r += 32 / together) {
        if (column < columns) use_one(row(r) + column, row_in_memory(r) + column);
      }
    }
  }
};

/// What a lane has of its row: eight neighbours of each round, of the last one `tail`, four or eight. The
/// first four of all rounds come before the others.
template <int rounds, int tail>
struct QuadRegisters {
  static constexpr int of_round = QuadTile::columns_of_lane, count = (rounds - 1) * of_round + tail;
  static constexpr int width = 4, vectors = count / width;
  static_assert(of_round == 2 * width && count % width == 0);
  float held[count];

  template <class Threads>
  __device__ static constexpr bool skips(int, int, const Threads&) {
    return false;
  }
  /// use(k, column, whether it is there) for each `unit` of them. `turn`: of the neighbours of a round that
  /// one first whose number differs by so much, bit by bit. This moves no bits: fours are added up in pairs
  /// that differ by two and then by one, and the first of them in a round and the second in a pair.
  template <int unit, class Use>
  __device__ static void for_units(int lane_of_quad, int columns, int turn, const Use& use) {
#pragma unroll
    for (int round = 0; round < rounds; ++round) {
      const int of_lane = round < rounds - 1 ? of_round : tail;
#pragma unroll
      for (int i = 0; i < of_lane; i += unit) {
        const int k = (i / width * rounds + round) * width + i % width;
        const int turned = i ^ (turn & (of_lane - 1));
        const int column = round * QuadTile::columns_of_round + lane_of_quad * of_lane + turned;
        use(k, column, round < rounds - 1 || column < columns);
      }
    }
  }
};

/// Blocks for whose registers there must be room, where the compiler would take more.
constexpr int quad_per_row_blocks(int rounds) {
  return rounds == 2 ? 8 : rounds == 3 ? 7 : 6;
}

/// Lanes take so many elements at once (`unit`). `turns`: rows of the image may begin on the same bank, and
/// each lane takes what it has in an order of its row.
template <int rounds, int tail, int unit, bool turns, class Problem>
__global__ void __launch_bounds__(QuadTile::threads, quad_per_row_blocks(rounds))
    quad_per_row_kernel(const __grid_constant__ Problem problem, const __grid_constant__ QuadTile tile) {
  using Registers = QuadRegisters<rounds, tail>;
  struct alignas(4 * unit) Unit {
    float value[unit];
  };
  extern __shared__ __align__(16) float images_of_quads[];
  const RowGeometry& g = problem.geometry;
  const auto columns = static_cast<int>(g.columns);
  const unsigned warp = threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x % 32), quad = lane / QuadTile::lanes,
            of_quad = lane % QuadTile::lanes;
  const index_type first_row =
      static_cast<index_type>(blockIdx.x * (QuadTile::threads / 32) + warp) * tile.rows_of_warp;
  grid_dependency_wait();
  const index_type rows_left = g.rows - first_row;
  if (rows_left <= 0) return;
  const auto rows = static_cast<int>(min(rows_left, static_cast<index_type>(tile.rows_of_warp)));
  const ImageOfQuads image{images_of_quads + warp * tile.image, tile.before, tile.image_row, rows};
  using Begin = QuadTile::Begin;
  constexpr bool may_begin_on_boundaries = unit == 4 || turns;
  const auto copy_one = [](float* to, const float* from) {
    cp_async_by_l1<sizeof(float)>(shared_address(to), from);
  };
  if (tile.x == Begin::as_in_image) {
    image.read(problem.x + first_row * columns - tile.before);
  } else if (may_begin_on_boundaries && tile.x == Begin::on_boundaries) {
    image.for_memory<4>(
        g, problem.x, g.x_stride, first_row,
        [](float* to, const float* from) { cp_async_16(shared_address(to), from); }, copy_one);
  } else if constexpr (unit != 4) {
    image.for_memory<1>(g, problem.x, g.x_stride, first_row, copy_one, copy_one);
  }
  // (Behind the copies: what comes first of its registers would wait for it.)
  if (const int gap = gap_to_read(problem); gap > 0) {
#pragma unroll 1
    for (int row = quad; row < rows; row += QuadTile::rows_at_once)
      read_ends_of_row(problem.y + g.row(first_row + row).y_offset, columns, gap, of_quad == 0, of_quad == 1);
  }
  cp_async_wait_all();
  __syncwarp();
#pragma unroll 1
  for (int batch = 0; batch < tile.batches; ++batch) {
    const int row = batch * QuadTile::rows_at_once + quad;
    const bool exists = row < rows;
    float* const image_of_row = image.row(row);
    const int turn = !turns ? 0 : unit == 4 ? row % 2 * 4 : row % 8;
    Registers mine;
    Registers::template for_units<unit>(of_quad, columns, turn, [&](int k, int column, bool is_there) {
      Unit held;
#pragma unroll
      for (float& value : held.value) value = -infinity_v<float>;
      if (is_there) held = *reinterpret_cast<const Unit*>(image_of_row + column);
#pragma unroll
      for (int i = 0; i < unit; ++i) mine.held[k + i] = held.value[i];
    });
    float* lse = nullptr;
    if (problem.operation == Operation::logsumexp && exists)
      lse = problem.y + g.row(first_row + row).y_offset;
    softmax_in_registers(
        mine, LanesOfRow<QuadTile::lanes>{of_quad, nullptr}, problem, lse, lse != nullptr && of_quad == 0,
        ReduceGroup<float, QuadTile::lanes>{}, [](bool) { return true; },
        [&](const auto& output) {
          Registers::template for_units<unit>(of_quad, columns, turn, [&](int k, int column, bool is_there) {
            Unit put;
#pragma unroll
            for (int i = 0; i < unit; ++i) put.value[i] = output(mine.held[k + i]);
            if (is_there) *reinterpret_cast<Unit*>(image_of_row + column) = put;
          });
        });
  }
  if (problem.operation == Operation::logsumexp) return;
  __syncwarp();
  const auto put_one = [](const float* from, float* to) { *to = *from; };
  if (tile.y == Begin::as_in_image) {
    image.write(problem.y + first_row * columns - tile.before);
  } else if (may_begin_on_boundaries && tile.y == Begin::on_boundaries) {
    image.for_memory<4>(
        g, problem.y, g.y_stride, first_row,
        [](const float* from, float* to) {
          *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
        },
        put_one);
  } else if constexpr (unit != 4) {
    image.for_memory<1>(g, problem.y, g.y_stride, first_row, put_one, put_one);
  }
}

/// The same to the same bits, of few rows, a warp's a block, without shared memory.
template <int rounds, int tail, class Problem>
__global__ void __launch_bounds__(32) quad_per_row_of_few_kernel(const __grid_constant__ Problem problem) {
  using Registers = QuadRegisters<rounds, tail>;
  const RowGeometry& g = problem.geometry;
  const auto columns = static_cast<int>(g.columns);
  const auto of_quad = static_cast<int>(threadIdx.x % QuadTile::lanes);
  const index_type position =
      static_cast<index_type>(blockIdx.x) * QuadTile::rows_at_once + threadIdx.x / QuadTile::lanes;
  const bool exists = position < g.rows;
  grid_dependency_wait();
  if (g.rows == 0) return;
  // Lanes past the last row go along with that one: the warp's shuffles want them.
  const RowGeometry::Row where = g.row(exists ? position : g.rows - 1);
  const float* const x = problem.x + where.x_offset;
  float* const y = problem.y + where.y_offset;
  Registers mine;
  Registers::template for_units<1>(of_quad, columns, 0, [&](int k, int column, bool is_there) {
    mine.held[k] = is_there ? x[column] : -infinity_v<float>;
  });
  softmax_in_registers(
      mine, LanesOfRow<QuadTile::lanes>{of_quad, nullptr}, problem, y, exists && of_quad == 0,
      ReduceGroup<float, QuadTile::lanes>{}, [](bool) { return true; },
      [&](const auto& output) {
        Registers::template for_units<1>(of_quad, columns, 0, [&](int k, int column, bool is_there) {
          if (exists && is_there) y[column] = output(mine.held[k]);
        });
      });
}

struct QuadPerRow {
  static constexpr const char* name = "quad_per_row";

  template <class Exec, class Problem>
  static constexpr bool supports =
      row_in_registers_supports<Exec, Problem>&& std::is_same_v<typename Problem::Transform, BoundIdentity>&&
          std::is_same_v<std::remove_const_t<typename Problem::In>, float>&&
              std::is_same_v<typename Problem::Out, float>;

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec&, const Problem& problem) {
    const std::string_view layout = refuse_row_in_registers(
        problem, shortest, longest, "a thread can have a row", "a row has too many columns for four lanes");
    if (!layout.empty()) return layout;
    return takes(problem.geometry.columns, problem.operation) ? ""
                                                              : "rows of this length are faster in warps";
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    with_number<2, 4>(ceil_div(problem.geometry.columns, index_type(QuadTile::columns_of_round)),
                      [&](auto rounds) { run_rounds<decltype(rounds)::value>(exec, problem); });
  }

  template <class Exec, class Problem>
  static void reserve(const Exec&, const Problem&) {}

 private:
  static constexpr int shortest = 33, longest = 127;

  /// The length decides, for others give other bits. (Fractions of a copy by warp_per_row and so: 64 columns
  /// 1.00 both, 116 0.965 and 0.973, 120 1.00 and 0.97, 128 1.00 and 0.97; logsumexp, of half a copy, 65 0.75
  /// and 0.94, 84 0.93 and 0.95, 96 0.99 and 0.97, 97 0.61 and 0.96, 112 1.00 and 0.97.)
  static constexpr bool takes(index_type columns, Operation operation) {
    if (columns % 4 != 0) return true;
    return columns != 64 && columns < (operation == Operation::logsumexp ? 96 : 120);
  }

  /// use(n, as a type), one from `first` to `last`.
  template <int first, int last, class Use>
  static void with_number(index_type n, const Use& use) {
    if constexpr (first < last) {
      if (n > first) return with_number<first + 1, last>(n, use);
    }
    use(std::integral_constant<int, first>());
  }

  template <int rounds, class Problem>
  static void run_rounds(const Kokkos::Cuda& exec, const Problem& problem) {
    const index_type columns = problem.geometry.columns,
                     of_lane = ceil_div(columns - (rounds - 1) * QuadTile::columns_of_round,
                                        index_type(QuadTile::lanes));
    if (of_lane <= 4) {
      run_tail<rounds, 4>(exec, problem);
    } else {
      run_tail<rounds, 8>(exec, problem);
    }
  }

  template <int rounds, int tail, class Problem>
  static void run_tail(const Kokkos::Cuda& exec, const Problem& problem) {
    const RowGeometry& g = problem.geometry;
    const bool reduces = problem.operation == Operation::logsumexp, no_rows = g.rows == 0;
    const auto columns = static_cast<int>(g.columns);
    // `reserve` launches over no rows: that loads the kernels for more rows and other addresses, too, which a
    // capture could not do.
    // (Microseconds in a CUDA graph, warp_per_row and so, 65 columns: 1 row 1.50 and 1.35, 128 rows 1.69 and
    // 1.54, 1000 rows 1.75 and 1.61; but 2048 rows 1.84 and 2.62, by quad_per_row_kernel 2.4; 100
    // columns 1.55 and 1.42, 2.12 and 1.69, 2.18 and 1.77. Blocks of four warps 1.3, 3.0 and 3.1.)
    if (g.rows <= index_type(exec.cuda_device_prop().multiProcessorCount) * QuadTile::rows_at_once) {
      launch_with_shared<&quad_per_row_of_few_kernel<rounds, tail, Problem>>(
          exec, kernel_label(problem.operation, name), ceil_div(g.rows, index_type(QuadTile::rows_at_once)),
          32, 0, problem);
      if (!no_rows) return;
    }
    const auto lie_one_behind_the_other = [&](const index_type* stride) {
      return g.rank == 0 || (g.rank == 1 && stride[0] == columns);
    };
    // How many elements behind a boundary of 16 bytes.
    const auto begin = [](const float* data) {
      return static_cast<int>(reinterpret_cast<std::uintptr_t>(data) % 16 / sizeof(float));
    };
    QuadTile tile{};
    // (With one and two 36 columns 0.91 and 0.985, 40 0.97 and 0.98, 47 0.98 and 0.97; logsumexp with two and
    // four 36 0.79 and 0.87, 52 0.89 and 0.96.)
    tile.batches = reduces ? (columns < 64 ? 4 : 2) : (columns < 44 ? 2 : 1);
    const int rows_of_warp = tile.batches * QuadTile::rows_at_once;
    tile.rows_of_warp = static_cast<unsigned>(rows_of_warp);
    using Begin = QuadTile::Begin;
    const bool x_is_dense = lie_one_behind_the_other(g.x_stride);
    if (x_is_dense) tile.before = begin(problem.x);
    const RowAlignment alignment = RowAlignment::of(problem);
    const auto begin_of_rows = [&](const float* data, const index_type* stride, std::uintptr_t aligned_to) {
      if (tile.image_row == columns && lie_one_behind_the_other(stride) && begin(data) == tile.before)
        return Begin::as_in_image;
      return tile.image_row % 4 == 0 && tile.before == 0 && aligned_to % 16 == 0 ? Begin::on_boundaries
                                                                                 : Begin::anywhere;
    };
    // Rows that begin on boundaries do so in shared memory.
    tile.image_row = !x_is_dense && alignment.x % 16 == 0 ? ceil_div(columns, 4) * 4 : columns;
    tile.image = rows_of_warp * tile.image_row + 4;
    tile.x = begin_of_rows(problem.x, g.x_stride, alignment.x);
    tile.y = reduces ? Begin::as_in_image : begin_of_rows(problem.y, g.y_stride, alignment.y);
    const bool fours = columns % 4 == 0 && tile.x != Begin::anywhere && tile.y != Begin::anywhere &&
                       tile.before == 0,
               turns = tile.image_row % 4 == 0, pairs = columns % 4 == 2 && tile.before % 2 == 0;
    const auto launch_for = [&]<int unit, bool turns>(bool these) {
      if (these || no_rows)
        launch<&quad_per_row_kernel<rounds, tail, unit, turns, Problem>>(exec, problem, tile);
    };
    launch_for.template operator()<4, false>(fours && columns % 8 != 0);
    launch_for.template operator()<4, true>(fours && columns % 8 == 0);
    launch_for.template operator()<1, true>(turns && !fours);
    launch_for.template operator()<2, false>(pairs && !turns);
    launch_for.template operator()<1, false>(!pairs && !turns);
  }

  template <auto kernel, class Problem>
  static void launch(const Kokkos::Cuda& exec, const Problem& problem, const QuadTile& tile) {
    constexpr int warps = QuadTile::threads / 32;
    launch_with_shared<kernel>(
        exec, kernel_label(problem.operation, name),
        ceil_div(problem.geometry.rows, warps * static_cast<index_type>(tile.rows_of_warp)),
        QuadTile::threads, warps * tile.image * static_cast<int>(sizeof(float)), problem, tile);
  }
};

}  // namespace KokkosSoftmax::impl

#endif
