// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The CUDA kernel for many short rows of 16 bits that lie one behind the other, wherever they begin, with
/// little or nothing between them: a warp has a few rows, a tile of memory, which comes to shared memory and
/// leaves it in vectors of 16 bytes that know nothing of rows. There a few lanes take each row. Sums of these
/// rows are exact (PackedRow), so that the bits are those of warp_per_row and block_per_row.

#ifndef KOKKOSSOFTMAX_TILEDROWS_HPP
#define KOKKOSSOFTMAX_TILEDROWS_HPP

#include <impl/cuda/KokkosSoftmax_RowInRegisters.hpp>

#include <algorithm>
#include <iterator>

namespace KokkosSoftmax::impl {

template <class Problem>
struct TiledRowsCall {
  Problem problem;
  int log2_lanes;                 ///< of the lanes that have a row
  int tile_vectors;               ///< of a warp's part of shared memory
  int stride;                     ///< elements from a row to the next one
  int mask_of_all;                ///< where a mask for all rows is in shared memory, in vectors; or 0
  unsigned reciprocal_of_stride;  ///< in units of 2^-32

  TiledRowsCall(const Problem& problem_, int log2_lanes_, int tile_vectors_, int stride_, int mask_of_all_)
      : problem(problem_),
        log2_lanes(log2_lanes_),
        tile_vectors(tile_vectors_),
        stride(stride_),
        mask_of_all(mask_of_all_),
        reciprocal_of_stride(0xffffffffu / static_cast<unsigned>(stride_) + 1) {}

  /// The column of an element of a tile, counted from its first row on.
  __device__ int column(int element) const {
    const unsigned row = __umulhi(static_cast<unsigned>(max(element, 0)), reciprocal_of_stride);
    return element - static_cast<int>(row) * stride;
  }
};

/// A mask for all rows as a block has it in shared memory: once, and its begin again behind it, so that the
/// bytes of a vector lie one behind the other wherever rows end.
struct RepeatedMask {
  static constexpr int repeated = 12;
  KOKKOS_FORCEINLINE_FUNCTION static constexpr index_type vectors(index_type columns) {
    return (columns + repeated + 15) / 16;
  }
  const unsigned* words;

  /// By the first so many threads.
  __device__ static void stage(const bool* mask, int columns, unsigned* words, int threads) {
    auto* const bytes = reinterpret_cast<bool*>(words);
    for (int c = static_cast<int>(threadIdx.x); c < columns + repeated; c += threads)
      bytes[c] = mask[c < columns ? c : c - columns];
  }
  __device__ MaskBytes from(int column) const {
    const unsigned* const at = words + column / 4;
    return MaskBytes::shifted(at[0], at[1], at[2], column % 4);
  }
  __device__ bool keeps(int column) const { return reinterpret_cast<const bool*>(words)[column]; }
};

/// A vector at an end of a row, in registers, where the row has some of its elements.
template <class T>
struct EdgeOfRow {
  static constexpr int words = 4;
  uint4* at;
  unsigned held[words];  ///< -inf in place of what is not the row's
  unsigned mask[words];  ///< bits of the row's elements

  /// The row has the elements up to `bound`, or those from there on.
  __device__ EdgeOfRow(uint4* at_, int bound, bool is_first) : at(at_) {
    const uint4 v = *at;
    const unsigned read[words] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < words; ++i) {
      const unsigned from_bound = __funnelshift_lc(0, ~0u, max(16 * bound - 32 * i, 0));
      mask[i] = is_first ? from_bound : ~from_bound;
      held[i] = (read[i] & mask[i]) | (PackedPair<T>::minus_infinities & ~mask[i]);
    }
  }
};

/// The vectors of a row in shared memory: whole ones, spread over its lanes, and at both ends one of which
/// the neighbours may have a part. The first lane has the first and the last lane the last of them.
template <class T, int edges_of_lane>
struct TiledRow {
  static constexpr int width = 8, words = EdgeOfRow<T>::words;

  int lanes, whole;                ///< vectors of the lane
  uint4 *first, *start, *end;      ///< of these, `lanes` apart
  bool writes_first, writes_last;  ///< the vectors at the ends
  EdgeOfRow<T> edge[edges_of_lane];

  /// Elements `begin` to `stop` of the image, more than a vector; the next row, but of the last, begins at
  /// `next`. Of a row that does not `exist` nothing is written.
  __device__ static TiledRow of(uint4* image, int begin, int stop, int next, int log2_lanes, int index,
                                bool exists, bool is_last_row) {
    const int lanes = 1 << log2_lanes, head = begin / width, tail = (stop - 1) / width;
    const bool is_first = index == 0, is_last = index == lanes - 1;
    const int bound_of_first = begin - head * width, bound_of_last = stop - tail * width;
    uint4* const first = image + head + 1 + index;
    uint4* const end = image + tail;
    const int distance = static_cast<int>(end - first);
    const int whole = exists && distance > 0 ? (distance + lanes - 1) >> log2_lanes : 0;
    // Rows may begin on the same bank: their lanes begin elsewhere in them.
    const int turn = (static_cast<int>(threadIdx.x) - (head + 1 + index)) & (width - 1) & -lanes;
    uint4* const start = turn < distance ? first + turn : first;
    const bool writes_first = exists && is_first;
    const bool writes_last = exists && is_last && (is_last_row || next / width > tail);
    if constexpr (edges_of_lane == 2) {
      const EdgeOfRow<T> first_edge(image + head, bound_of_first, true), last_edge(end, bound_of_last, false);
      return {lanes, whole, first, start, end, writes_first, writes_last, {first_edge, last_edge}};
    } else {
      const int bound = is_first ? bound_of_first : is_last ? bound_of_last : 0;
      const EdgeOfRow<T> edge(is_first ? image + head : end, bound, is_first);
      return {lanes, whole, first, start, end, writes_first, writes_last, {edge}};
    }
  }

  /// Calls use with each of the lane's whole vectors.
  template <class Use>
  __device__ void for_whole(const Use& use) const {
    uint4* at = start;
#pragma unroll 2
    for (int i = 0; i < whole; ++i) {
      use(*at);
      at += lanes;
      if (at >= end) at = first;
    }
  }
  /// With the pairs of all vectors of the lane.
  template <class Use>
  __device__ void for_pairs(const Use& use) const {
#pragma unroll
    for (const auto& e : edge) {
#pragma unroll
      for (const unsigned pair : e.held) use(pair);
    }
    for_whole([&](const uint4& v) {
      use(v.x);
      use(v.y);
      use(v.z);
      use(v.w);
    });
  }
  /// Puts a function of the pairs in their place. By all lanes of the warp: where two rows share a vector,
  /// the second one writes all of it.
  template <class Change>
  __device__ void replace(const Change& change) const {
    for_whole([&](uint4& v) { v = uint4{change(v.x), change(v.y), change(v.z), change(v.w)}; });
    const EdgeOfRow<T>&head = edge[0], &tail = edge[edges_of_lane - 1];
    unsigned first_of_row[words], last_of_row[words];
#pragma unroll
    for (int i = 0; i < words; ++i) {
      first_of_row[i] = change(head.held[i]);
      last_of_row[i] = edges_of_lane == 2 ? change(tail.held[i]) : first_of_row[i];
      const unsigned of_previous = __shfl_up_sync(0xffffffffu, last_of_row[i], 1);
      first_of_row[i] = (first_of_row[i] & head.mask[i]) | (of_previous & ~head.mask[i]);
    }
    if (writes_first) *head.at = {first_of_row[0], first_of_row[1], first_of_row[2], first_of_row[3]};
    if (writes_last) *tail.at = {last_of_row[0], last_of_row[1], last_of_row[2], last_of_row[3]};
  }
};

/// The address of shared memory, once for all accesses that are constants apart (see anchored).
__device__ __forceinline__ std::uint32_t anchored_address(const void* pointer) {
  std::uint32_t address = shared_address(pointer);
  asm("" : "+r"(address));
  return address;
}

/// Puts -inf in place of what the mask drops of a tile that is on its way to shared memory: `whole` vectors
/// of it, each by the thread that has copied it, and what this thread has of the elements behind them, the
/// `last`.
template <class T, class Call>
__device__ __forceinline__ void apply_mask_to_tile(const LogitOperand<bool>& mask, const Call& call,
                                                   uint4* image, index_type first_row, index_type rows_left,
                                                   int before, int whole, unsigned short* last_element,
                                                   int last) {
  constexpr int width = MaskBytes::width;
  const auto columns = static_cast<int>(call.problem.geometry.columns),
             lane = static_cast<int>(threadIdx.x % 32);
  bool keeps_last = true;
  uint4* vector = image + lane;
  if (call.mask_of_all != 0) {
    extern __shared__ uint4 images_of_tiles[];
    auto* const words = reinterpret_cast<unsigned*>(images_of_tiles + call.mask_of_all);
    // (Warps without rows have left.)
    const int rows_of_tile = 32 >> call.log2_lanes;
    const index_type rows_left_of_block = rows_left + threadIdx.x / 32 * rows_of_tile;
    const auto threads = static_cast<int>(min((rows_left_of_block + rows_of_tile - 1) / rows_of_tile * 32,
                                              static_cast<index_type>(blockDim.x)));
    RepeatedMask::stage(mask.data, columns, words, threads);
    cp_async_wait_all();
    __syncthreads();
    const RepeatedMask repeated{words};
    int element = lane * width - before + columns;
#pragma unroll 2
    for (int left = whole - lane; left > 0; left -= 32, vector += 32, element += 32 * width)
      *vector = repeated.from(call.column(element)).template applied<T>(*vector);
    if (last_element) keeps_last = repeated.keeps(call.column(last - before));
  } else {
    const bool* const of_tile = mask.data + first_row * columns - before;
    const bool* at = anchored(of_tile + lane * width);
    // (As many as there are registers for.)
    constexpr int at_once = 10;
    bool waits = true;
#pragma unroll 1
    for (int left = whole - lane; waits || left > 0; left -= at_once * 32) {
      MaskBytes bytes[at_once];
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        if (left > i * 32) bytes[i] = MaskBytes::read(at + i * 32 * width);
      }
      if (waits) cp_async_wait_all();
      waits = false;
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        if (left > i * 32) vector[i * 32] = bytes[i].template applied<T>(vector[i * 32]);
      }
      at += at_once * 32 * width;
      vector += at_once * 32;
    }
    if (last_element) keeps_last = of_tile[last];
  }
  if (!keeps_last) *last_element = static_cast<unsigned short>(PackedPair<T>::minus_infinities);
}

/// `edges_of_lane`: two where a row has one lane. `padded`: there is something between the rows.
template <int edges_of_lane, bool padded, class Problem>
__global__ void __launch_bounds__(128, std::is_same_v<typename Problem::Transform, BoundIdentity> ? 9 : 8)
    tiled_rows_kernel(const __grid_constant__ TiledRowsCall<Problem> call) {
  using T = typename Problem::In;
  using Out = typename Problem::Out;
  using Transform = typename Problem::Transform;
  using Row = PackedRow<T, 1, true>;
  constexpr int width = Row::width;
  extern __shared__ uint4 images_of_tiles[];
  const Problem& problem = call.problem;
  const auto columns = static_cast<int>(problem.geometry.columns);
  const int lanes = 1 << call.log2_lanes, lane = static_cast<int>(threadIdx.x % 32),
            rows_of_tile = 32 >> call.log2_lanes;
  const index_type first_row =
      (static_cast<index_type>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32) * rows_of_tile;
  grid_dependency_wait();
  const index_type rows_left = problem.geometry.rows - first_row;
  if (rows_left <= 0) return;
  const auto rows = static_cast<int>(min(rows_left, static_cast<index_type>(rows_of_tile)));
  const int row = lane >> call.log2_lanes, index = lane & (lanes - 1);
  const bool exists = row < rows;
  uint4* const image = images_of_tiles + threadIdx.x / 32 * call.tile_vectors;
  const int stride = padded ? call.stride : columns;
  const T* const x = problem.x + first_row * stride;
  const auto before = static_cast<int>(reinterpret_cast<std::uintptr_t>(x) % 16 / sizeof(T));
  const int elements_of_tile = (rows - 1) * stride + columns, end = before + elements_of_tile;
  {
    const auto* const from = reinterpret_cast<const uint4*>(x - before);
    // Whole vectors at the ends too, as PackedRow reads them: behind the last row may lie nothing.
    const int whole = rows_left > rows_of_tile ? (end + width - 1) / width : end / width;
    const uint4* at = anchored(from + lane);
    std::uint32_t to = anchored_address(image + lane);
#pragma unroll 1
    for (int left = whole - lane; left > 0; left -= 4 * 32, at += 4 * 32, to += 4 * 32 * 16) {
#pragma unroll
      for (int i = 0; i < 4 * 32; i += 32) {
        if (left <= i) continue;
        if constexpr (padded) {
          const int column = call.column((whole - left + i) * width - before);
          if (column >= columns && column + width <= stride) continue;
        }
        cp_async_16(to + i * 16, at + i);
      }
    }
    const bool has_last = lane < end - whole * width;
    const int last = whole * width + lane;
    auto* const elements = reinterpret_cast<unsigned short*>(image);
    if (has_last) elements[last] = reinterpret_cast<const unsigned short*>(from)[last];
    if constexpr (has_packed_mask<Transform>) {
      apply_mask_to_tile<T>(PartsOfChain<Transform>::mask(problem.transform), call, image, first_row,
                            rows_left, before, whole, has_last ? elements + last : nullptr, last);
    } else {
      cp_async_wait_all();
    }
    __syncwarp();
  }
  const int begin = before + (exists ? row * stride : 0);
  const auto unprepared =
      problem.transform.at_row(problem.geometry.row(first_row + (exists ? row : 0)).index);
  const auto transform_of_row = prepared_stage<typename Problem::Acc>(without_mask<Transform>(unprepared), 0);
  if constexpr (may_drop_ends<Problem>) {
    auto* const elements = reinterpret_cast<unsigned short*>(image) + begin;
    const auto kept = static_cast<int>(end_of_kept(unprepared, columns));
#pragma unroll 1
    for (int c = kept + index; exists && c < columns; c += lanes)
      elements[c] = static_cast<unsigned short>(PackedPair<T>::minus_infinities);
    __syncwarp();
  }
  const auto mine = TiledRow<T, edges_of_lane>::of(image, begin, begin + columns, begin + stride,
                                                   call.log2_lanes, index, exists, row == rows - 1);
  unsigned pair_of_maxima = PackedPair<T>::minus_infinities;
  mine.for_pairs(
      [&](unsigned pair) { pair_of_maxima = PackedPair<T>::maximum_or_nan(pair_of_maxima, pair); });
  const auto of_row = [&](float max) {
    for (int mask = 1; mask < lanes; mask *= 2)
      max = maximum_or_nan(max, __shfl_xor_sync(0xffffffffu, max, mask));
    return max;
  };
  float max_of_row =
      of_row(maximum_or_nan(PackedPair<T>::low(pair_of_maxima), PackedPair<T>::high(pair_of_maxima)));
  const auto sum_of_exponentials = [&](const auto& exponential, auto of_logarithm) {
    constexpr bool exact = decltype(of_logarithm)::value;
    FixedPointUnits units{0, 0};
    mine.for_pairs([&](unsigned pair) {
      units.template add<exact>(exponential(PackedPair<T>::low(pair)),
                                exponential(PackedPair<T>::high(pair)));
    });
    unsigned long long whole = units.whole;
    for (int mask = 1; mask < lanes; mask *= 2) {
      whole += __shfl_xor_sync(0xffffffffu, whole, mask);
      if constexpr (exact) units.rest += __shfl_xor_sync(0xffffffffu, units.rest, mask);
    }
    return FixedPointUnits::rounded<exact>(whole, units.rest);
  };
  const auto finish = [&](const auto& logits) {
    addressed_row_result<Problem>(
        problem.operation, columns, max_of_row, logits, sum_of_exponentials,
        [&](const auto& output) {
          // (As late as that: with the reads before the copies of x 65 columns, 7 between them, have 0.58 of
          // a copy, behind them 0.63, here 0.71.)
          if constexpr (padded) {
            if (const int gap = gap_to_read(problem); exists && gap > 0)
              read_ends_of_row(problem.y + (first_row + row) * stride, columns, gap, index == 0,
                               index == lanes - 1);
          }
          // All lanes have read the vectors that rows share.
          __syncwarp();
          mine.replace(
              [&](unsigned pair) { return output(PackedPair<T>::low(pair), PackedPair<T>::high(pair)); });
        },
        [&](float logsumexp) {
          if (exists && index == 0) problem.y[first_row + row] = store_as<Out>(logsumexp);
        });
  };
  with_logits_of_packed<T, typename Problem::Out>(
      transform_of_row, max_of_row,
      [&](const auto& logits) {
        float max = -infinity_v<float>;
        mine.for_pairs([&](unsigned pair) {
          max = maximum_or_nan(
              max, maximum_or_nan(logits(PackedPair<T>::low(pair)), logits(PackedPair<T>::high(pair))));
        });
        return of_row(max);
      },
      finish);
  if (problem.operation == Operation::logsumexp) return;
  __syncwarp();
  // The tile's vectors of y, each from the two of the image in which it lies. Of padded rows those of sectors
  // of 32 bytes that a row has alone; the others are written in one piece each, as L2 asks for.
  constexpr int sector = (padded ? 32 : 16) / sizeof(Out);
  Out* const y = problem.y + first_row * stride;
  const auto y_before =
      static_cast<int>(reinterpret_cast<std::uintptr_t>(y) % (sector * sizeof(Out)) / sizeof(Out));
  const int y_end = y_before + elements_of_tile, shift = before - y_before;
  const uint4* const shifted_image = image + (shift >> 3);
  auto* const to = reinterpret_cast<uint4*>(y - y_before);
  const int whole_begin = (y_before + width - 1) / width, whole_end = y_end / width;
  const auto store = [&](const auto& vector) {
    const uint4* from = shifted_image + whole_begin + lane;
    uint4* at = anchored(to + whole_begin + lane);
#pragma unroll 1
    for (int left = whole_end - whole_begin - lane; left > 0; left -= 2 * 32, from += 2 * 32, at += 2 * 32) {
#pragma unroll
      for (int i = 0; i < 2 * 32; i += 32) {
        if (left <= i) continue;
        if constexpr (padded) {
          const int column = call.column(((whole_end - left + i) * width & -sector) - y_before);
          if (column < 0 || column + sector > columns) continue;
        }
        __stcg(at + i, vector(from + i));
      }
    }
  };
  if ((shift & (width - 1)) == 0) {
    store([](const uint4* v) { return *v; });
  } else {
    const int bytes = (shift & (width - 1)) * static_cast<int>(sizeof(Out));
    store([&](const uint4* v) { return shifted_vector<sizeof(Out)>(v, bytes); });
  }
  const auto* const elements = reinterpret_cast<const unsigned short*>(image) + shift;
  auto* const to_elements = reinterpret_cast<unsigned short*>(to);
  if constexpr (padded) {
    // Half a warp has what lies between two rows: a sector or two.
    const auto store_sector = [&](int element, int end_of_row, int begin_of_row) {
      const int at = (element & -sector) + lane % sector;
      if (at < end_of_row || at >= begin_of_row) __stcg(to_elements + at, elements[at]);
    };
    const int gap = stride - columns, behind_all = 1 << 24;
#pragma unroll 2
    for (int next = lane / sector; next <= rows; next += 32 / sector) {
      const int begin = next < rows ? y_before + next * stride : behind_all;
      const int end = next > 0 ? y_before + next * stride - gap : 0;
      store_sector(end, end, begin);
      if (begin % sector != 0 && (begin ^ end) >= sector) store_sector(begin, 0, begin);
    }
  } else {
    // The elements before the first whole vector and behind the last one.
    if (lane >= y_before && lane < whole_begin * width) __stcg(to_elements + lane, elements[lane]);
    const int last = whole_end * width + lane;
    if (last < y_end) __stcg(to_elements + last, elements[last]);
  }
}

struct TiledRows {
  static constexpr const char* name = "tiled_rows";

  template <class Exec, class Problem>
  static constexpr bool supports =
      row_in_registers_supports<Exec, Problem>&& may_be_by_address<Problem>&& is_packed<Problem>;

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec&, const Problem& problem) {
    const RowGeometry& g = problem.geometry;
    const bool writes_rows = problem.operation != Operation::logsumexp;
    const std::string_view layout =
        refuse_row_in_registers(problem, shortest, writes_rows ? longest_written : longest_reduced,
                                "rows are too short", "rows are too long");
    if (!layout.empty()) return layout;
    if (g.rank > 1 || stride(problem) < g.columns || stride(problem) > 2 * g.columns ||
        (g.rank == 1 && g.y_stride[0] != (writes_rows ? stride(problem) : 1)))
      return "the rows do not lie one behind the other";
    if constexpr (has_packed_mask<typename Problem::Transform>) {
      const LogitOperand<bool>& mask = mask_of(problem);
      const RowOffset& of_row = mask.row_offset;
      const bool like_x = of_row.rank == 1 && of_row.stride[0] == g.columns &&
                          (reinterpret_cast<std::uintptr_t>(problem.x) / sizeof(*problem.x) -
                           reinterpret_cast<std::uintptr_t>(mask.data)) %
                                  MaskBytes::width ==
                              0;
      if (stride(problem) != g.columns || mask.column_stride != 1 || !(of_row.is_none() || like_x))
        return "the mask does not lie as the rows do";
    }
    return {};
  }

  template <class Exec, class Problem>
  static std::string_view advise_against(const Exec&, const Problem& problem) {
    const index_type columns = problem.geometry.columns;
    // (Rows with something between them, softmax of bfloat16 from memory on one H200, fraction of a copy,
    // this kernel and those with rows in registers: 33 columns and 2 elements between them 0.55 and 0.28, 65
    // and 2 0.73 and 0.44, 129 and 2 0.81 and 0.62, 257 and 6 0.85 and 0.67; 64 and 8 0.70 and 0.62, 1000 and
    // 8 0.94 and 0.92, but 64 and 32, whole sectors, 0.82 and 0.90.)
    // (One behind the other, 256 MB, likewise: softmax 24 columns 0.91 and 0.56, 40 0.99 and 0.84, 72 0.98
    // and 0.79, 112 0.98 and 0.94, from 160 on 0.97 and 1.00; with a factor 24 0.82 and 0.46, 32 0.89 and
    // 0.60, 40 0.97 and 0.74, 96 0.96 and 0.88, 160 0.98 and 1.01, 64, which fill registers, 0.93 and 0.95;
    // with a causal mask 32 0.89 and 0.53, 64 0.94 and 0.91, 96 0.96 and 0.87.)
    const bool whole_sectors = columns % 16 == 0 && RowAlignment::of(problem).y % 32 == 0;
    if (!lies_anywhere(problem) && problem.operation != Operation::logsumexp &&
        (stride(problem) == columns ? fills_registers(problem) : whole_sectors || columns > 1024))
      return "the rows are whole vectors";
    // (A tile is read whole. Squares of bfloat16 with a factor and a causal mask on one H200, fraction of a
    // copy of what is kept and all of y, this kernel and those with rows in registers: 64 columns 0.60 and
    // 0.70, 96 0.71 and 0.75, 100 0.69 and 0.52, 500 0.66 and 0.79, 1001 0.70 and 0.82, 1023 0.68 and 0.66,
    // 2001 0.69 and 0.84, 2047 0.67 and 0.67, 4097 0.65 and 0.79.)
    if (drops_ends(problem.transform, columns) && columns >= (lies_anywhere(problem) ? 256 : 64))
      return "ends of rows need not be read";
    // (One H200, bfloat16, microseconds in a CUDA graph, this kernel and those with rows in registers: 2^16
    // elements of 17 columns 1.99 and 2.05; 65 columns 2^21 elements 5.02 and 4.83, 2^22 6.87 and 7.22; 129
    // columns 2^24 elements 22.6 and 21.0, and from memory 0.944 and 0.886 of a copy.)
    const int log2_elements = columns <= 32 ? 0 : columns <= 80 ? 22 : 25;
    if (problem.geometry.rows * columns < index_type(1) << log2_elements)
      return "there are too few rows for as many in each warp";
    if (problem.operation != Operation::logsumexp && stride(problem) == columns &&
        RowAlignment::of(problem).difference % 16 == 0 && stays_in_registers(problem))
      return "rows of this length stay in registers as fast";
    return {};
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    const auto columns = static_cast<int>(problem.geometry.columns);
    int log2_lanes = 0;
    const int columns_of_lane =
        problem.operation == Operation::logsumexp ? most_columns_read_by_lane : most_columns_of_lane;
    while (log2_lanes < 5 && columns > columns_of_lane << log2_lanes) ++log2_lanes;
    // `reserve` launches over no rows: that loads the other kernel, too, which a capture could not do.
    const bool both = problem.geometry.rows == 0;
    const bool padded = stride(problem) != problem.geometry.columns;
    if (log2_lanes == 0 || both) {
      if (!padded || both) launch<2, false>(exec, problem, log2_lanes);
      if (padded || both) launch_padded<2>(exec, problem, log2_lanes);
    }
    if (log2_lanes > 0 || both) {
      if (!padded || both) launch<1, false>(exec, problem, log2_lanes);
      if (padded || both) launch_padded<1>(exec, problem, log2_lanes);
    }
  }

  template <class Exec, class Problem>
  static void reserve(const Exec&, const Problem&) {}

 private:
  static constexpr int most_warps = 4;
  static constexpr int shortest = 16;  ///< more than a vector, wherever it begins
  /// A little more than a power of two, for rows a little longer than one. (Fraction of a copy with 80, 128
  /// and 160, bfloat16 on one H200: softmax of 81 columns 0.957, 0.949, 0.938, of 321 0.920, 0.930, 0.928;
  /// TB/s of logsumexp of 81 2.8, 3.7, 3.6, of 257 3.1, 3.2, 4.0.)
  static constexpr int most_columns_of_lane = 144;
  /// Of rows that are only read. (Logsumexp of bfloat16 on one H200, as a fraction of reading at a copy's
  /// speed, with 144, 192, 216 and 240: 161 columns 0.95, 0.97, 0.97, 0.97, 200 0.98, 0.98, 1.00, 0.99, 321
  /// 0.88, 0.97, 0.97, 0.98, 385 0.93, 0.935, 0.99, 0.99, 480 0.99, 0.985, 0.98, 0.92, 641 0.89, 0.97, 0.97,
  /// 0.97, 768 0.95, 1.02, 1.02, 1.02, 960 1.01, 1.00, 1.00, 0.945, 1200 0.84, 1.01, 1.00, 1.00, 2401 0.62,
  /// 0.76, 0.82, 0.82, 5001 0.92, 0.92, 0.95, 0.95.)
  static constexpr int most_columns_read_by_lane = 216;
  static constexpr int longest_written = 32 * most_columns_of_lane;
  /// (Logsumexp of bfloat16 on one H200, fraction of a sum of the same bytes, this kernel and block_per_row:
  /// 8192 columns 0.97 and 0.79, 12289 columns 0.90 and 0.85, 16384 columns 0.76 and 0.89.)
  static constexpr int longest_reduced = 3 * 4096 + 512;

  /// Rows that the kernels with rows in registers are faster with, of those that begin in x and y alike, one
  /// behind the other: how much faster depends on how full the registers are, and on the instructions of a
  /// logit. (1 GiB of bfloat16 on one H200, fraction of a copy, this kernel 0.93 to 0.96 at any length, and
  /// those: softmax without a transform 801 columns 0.94, 901 0.97, 1001 0.98, 1009 0.92, 1101 0.93, 1201
  /// 0.965, 1301 0.97, from 1401 on 0.975 to 0.997 but for 2047 0.93 and 2201 0.96; with a factor 901 0.93,
  /// 1001 0.97, 1101 0.90, 1273 0.97, 1301 0.89, 1401 0.93, 1529 0.97, 1601 0.95, 1785 to 2041 0.96 to 0.99,
  /// 2047 0.86, 2401 0.97, 2551 0.99, 2561 0.91, 2701 0.95, 2801 to 3577 0.97, 3579 and 3901 0.94, 4001 0.96,
  /// 4501 0.98, 4608 0.93; log_softmax and a causal mask much the same; with a factor and a causal mask and
  /// with a temperature 2001 0.99 and 0.92, 2551 0.98 and 0.92, 2801 0.94 and 0.91, 3001 0.99 and 0.96, 3201
  /// 0.96 and 0.94, 3577 0.975 and 0.97, 3901 0.92 and 0.91, 4301 0.96 and 0.95, 4501 0.975 and 0.965.)
  struct Lengths {
    index_type first, last;
  };
  static constexpr Lengths lengths_of_softmax[] = {{860, 1003}, {1160, 2041}, {2150, 4608}};
  static constexpr Lengths lengths_of_one_step[] = {{940, 1003},  {1240, 1273}, {1460, 2041},
                                                    {2350, 2553}, {2680, 3577}, {3640, 4601}};
  static constexpr Lengths lengths_of_others[] = {{940, 1003}, {2950, 3065}, {3200, 3577}, {4300, 4601}};

  /// With a mask for all rows, which the warps of a block share where rows are in tiles. (1 GiB of bfloat16
  /// on one H200, fraction of a copy of softmax and log_softmax, this kernel and those: 701 columns 0.93 and
  /// 0.75, 0.90 and 0.71, 1001 0.85 and 0.88, 0.84 and 0.85, 1473 0.82 twice, 0.80 and 0.82, 1601 0.88 and
  /// 0.80, 0.85 and 0.78, 1857 0.82 and 0.86, 0.81 and 0.79, 1921 0.765 and 0.88, 0.76 and 0.81, 2041 0.81
  /// and 0.91, 0.82 and 0.85, 2047 0.815 and 0.71, 0.815 and 0.66, 2241 0.82 and 0.77, 0.82 and 0.72, 2369
  /// 0.73 and 0.84, 0.71 and 0.78, 2497 0.745 and 0.87, 0.73 and 0.82, 2625 0.78 and 0.76, 0.76 and 0.695,
  /// 2799 0.77 and 0.80, 0.75 and 0.74, 2900 0.75 and 0.87, 0.73 and 0.79. With one as large as x 0.945 to
  /// 0.956 in tiles at all of these, and 0.89 to 0.95.)
  static constexpr Lengths lengths_with_mask_of_all[] = {{1880, 2041}, {2300, 2553}, {2801, longest_written}};

  template <class Problem>
  static bool stays_in_registers(const Problem& problem) {
    using Transform = typename Problem::Transform;
    const auto is_in = [&](const auto& lengths) {
      return std::any_of(std::begin(lengths), std::end(lengths), [&](const Lengths& l) {
        return problem.geometry.columns >= l.first && problem.geometry.columns <= l.last;
      });
    };
    if constexpr (has_packed_mask<Transform>)
      return mask_of(problem).row_offset.is_none() && is_in(lengths_with_mask_of_all);
    constexpr bool is_identity = std::is_same_v<Transform, BoundIdentity>;
    constexpr bool is_one_step =
        is_identity || std::is_same_v<Transform, BoundScale> || std::is_same_v<Transform, BoundCausal>;
    if (is_identity && problem.operation == Operation::softmax) return is_in(lengths_of_softmax);
    return is_one_step ? is_in(lengths_of_one_step) : is_in(lengths_of_others);
  }

  /// Rows of whole vectors that those kernels are faster with. (1 GiB of bfloat16 and of half on one H200,
  /// softmax, fraction of a copy, this kernel 0.97 to 0.98 throughout, and those: 152 columns 0.92 and 0.90,
  /// 160 1.00 and 0.98, 168 0.90 and 0.88, 176 0.96 and 0.95, 184 0.90 and 0.88, 192 0.98 and 0.97, 200 0.88
  /// and 0.85, 208 0.95 and 0.94, 216 0.88 and 0.85, 224 0.98 and 0.97; log_softmax up to 0.02 more.)
  template <class Problem>
  static bool fills_registers(const Problem& problem) {
    const index_type columns = problem.geometry.columns;
    if (std::is_same_v<typename Problem::Transform, BoundIdentity> && columns > 144 && columns < 224)
      return columns % 32 == 0;
    return columns > 144 || columns == 128 || (columns == 64 && !may_drop_ends<Problem>);
  }

  template <class Problem>
  static index_type stride(const Problem& problem) {
    return problem.geometry.rank == 1 ? problem.geometry.x_stride[0] : problem.geometry.columns;
  }

  template <class Problem>
  static const LogitOperand<bool>& mask_of(const Problem& problem) {
    return PartsOfChain<typename Problem::Transform>::mask(problem.transform);
  }

  template <int edges_of_lane, class Problem>
  static void launch_padded(const Kokkos::Cuda& exec, const Problem& problem, int log2_lanes) {
    if constexpr (!has_packed_mask<typename Problem::Transform>)
      launch<edges_of_lane, true>(exec, problem, log2_lanes);
  }

  template <int edges_of_lane, bool padded, class Problem>
  static void launch(const Kokkos::Cuda& exec, const Problem& problem, int log2_lanes) {
    const int rows_of_warp = 32 >> log2_lanes;
    const auto columns = static_cast<int>(problem.geometry.columns),
               distance = static_cast<int>(stride(problem));
    const int tile_vectors = (7 + (rows_of_warp - 1) * distance + columns + 7) / 8;
    // Small blocks of large tiles, so that a multiprocessor is filled.
    constexpr int most_bytes = 48 * 1024;
    int mask_vectors = 0;
    if constexpr (has_packed_mask<typename Problem::Transform>) {
      if (mask_of(problem).row_offset.is_none())
        mask_vectors = static_cast<int>(RepeatedMask::vectors(columns));
    }
    const int most_tiles = (most_bytes / 16 - mask_vectors) / tile_vectors;
    const int warps = columns <= longest_written ? std::min(most_warps, most_tiles) : 1,
              rows_of_block = rows_of_warp * warps,
              mask_of_all = mask_vectors == 0 ? 0 : warps * tile_vectors;
    constexpr auto kernel = &tiled_rows_kernel<edges_of_lane, padded, Problem>;
    static const bool early = has_grid_dependency_wait(kernel);
    launch_labelled(exec, kernel_label(problem.operation, name), [&] {
      launch_kernel(exec, kernel, early,
                    static_cast<unsigned>(
                        std::max<index_type>(1, (problem.geometry.rows + rows_of_block - 1) / rows_of_block)),
                    warps * 32, static_cast<std::size_t>((warps * tile_vectors + mask_vectors) * 16),
                    TiledRowsCall<Problem>(problem, log2_lanes, tile_vectors, distance, mask_of_all));
    });
  }
};

}  // namespace KokkosSoftmax::impl

#endif
