// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The CUDA kernel for many rows of 16 bits that are no whole vectors and lie one behind the other, with a
/// transform that makes logits of them. A warp has a few rows, or a block has one: a tile of memory, which
/// comes to shared memory and leaves it in vectors of 16 bytes that know nothing of rows, as do operands. A
/// lane takes an odd number of neighbouring words of its row there, so that lanes fall on different banks,
/// and holds the logits of their pairs in registers. Sums of these rows are exact, so that the bits are those
/// of warp_per_row and block_per_row.

#ifndef KOKKOSSOFTMAX_TILEDLOGITS_HPP
#define KOKKOSSOFTMAX_TILEDLOGITS_HPP

#include <impl/cuda/KokkosSoftmax_RowInRegisters.hpp>

#include <algorithm>

namespace KokkosSoftmax::impl {

/// A value of an operand, in a register: that, whatever column it is asked for.
template <class T>
struct OneOfOperand {
  T value;
  __device__ T operator()(index_type) const { return value; }
};

/// Two neighbouring values of an operand, in registers: those, whatever column they are asked for.
template <class T>
struct PairOfOperand {
  static constexpr bool takes_any_column = true;
  T value[2];

  __device__ OneOfOperand<T> one(int i) const { return {value[i]}; }
  template <class Acc>
  __device__ void neighbours(Acc (&to)[2]) const {
    to[0] = load_as<Acc>(value[0]);
    to[1] = load_as<Acc>(value[1]);
  }
  __device__ void keeps_neighbours(bool (&kept)[2]) const {
    kept[0] = kept[0] && static_cast<bool>(value[0]);
    kept[1] = kept[1] && static_cast<bool>(value[1]);
  }
};
template <class T>
requires is_16_bit_v<T>
struct PairOfOperand<T> {
  static constexpr bool takes_any_column = true;
  unsigned pair;

  __device__ OneOfOperand<T> one(int i) const {
    return {bits_as<T>(static_cast<unsigned short>(i == 0 ? pair : pair >> 16))};
  }
  template <class Acc>
  __device__ void neighbours(Acc (&to)[2]) const {
    to[0] = low_of_pair<T>(pair);
    to[1] = high_of_pair<T>(pair);
  }
  __device__ void keeps_neighbours(bool (&kept)[2]) const {
    kept[0] = kept[0] && (pair & 0x7fffu) != 0;
    kept[1] = kept[1] && (pair & 0x7fff0000u) != 0;
  }
};

/// The values of an operand for a lane's pairs, in shared memory, from element `first` on, which may be -1.
template <class T>
struct PairsOfOperand {
  const T* data;

  __device__ static PairsOfOperand from(const char* shared, int first) {
    return {reinterpret_cast<const T*>(shared) + first};
  }
  __device__ PairOfOperand<T> at(int k) const {
    __builtin_assume(__isShared(data));
    return {{data[2 * k], data[2 * k + 1]}};
  }
};
template <class T>
requires is_16_bit_v<T>
struct PairsOfOperand<T> {
  const unsigned* words;
  unsigned selector;

  __device__ static PairsOfOperand from(const char* shared, int first) {
    return {reinterpret_cast<const unsigned*>(shared) + (first >> 1), first & 1 ? 0x5432u : 0x3210u};
  }
  __device__ PairOfOperand<T> at(int k) const {
    __builtin_assume(__isShared(words));
    return {__byte_perm(words[k], words[k + 1], selector)};
  }
};

/// A call, and where all is in shared memory: for each tile x and the operands that have a row for each of
/// its rows, then those of all rows.
template <class Problem>
struct TiledLogitsCall {
  static constexpr int most_operands = 6;
  /// Before each operand, so that an element before its first one is there.
  static constexpr int before_operand = 16;

  Problem problem;
  int steps;       ///< pairs of a lane
  int turns;       ///< tiles of a warp, or of a block that has one
  int ahead;       ///< 1 where the next tile comes while one is computed, else 0
  int tile_bytes;  ///< of shared memory, of each
  bool has_operands_of_all = false;
  struct Operand {
    const void* data;  ///< of the first row
    int at;            ///< behind the begin of the tile, or of shared memory
    int end;           ///< likewise, of what lanes may read
    bool is_of_all;
  };
  Operand operand[most_operands] = {};

  /// Calls use(operand, pointer) with those of a row object, and a pointer of the type of their values.
  template <class TransformRow, class Use>
  __device__ __forceinline__ void for_each_operand(const TransformRow& row, const Use& use) const {
    int i = 0;
    map_operands(row, [&](const auto& of_row) {
      use(operand[i], static_cast<decltype(of_row.data)>(operand[i].data));
      ++i;
      return of_row;
    });
  }
};

/// Copies so many elements to shared memory, where they begin as far behind a boundary of 16 bytes as in
/// memory, and where they are after a wait for the thread's asynchronous copies and a barrier. Whole vectors
/// at their begin: before them lies their allocation, which begins at a boundary; at their end, if that
/// `may_read_behind`.
template <bool by_l1, class T>
__device__ __forceinline__ void copy_to_shared(const T* from, int elements, bool may_read_behind, char* to,
                                               int rank, int size) {
  const auto before = static_cast<int>(reinterpret_cast<std::uintptr_t>(from) % 16);
  const char* const begin = reinterpret_cast<const char*>(from) - before;
  const int bytes = before + elements * static_cast<int>(sizeof(T));
  const int whole = elements == 0 ? 0 : (may_read_behind ? bytes + 15 : bytes) / 16;
  const char* at = anchored(begin + rank * 16);
  std::uint32_t shared_at = shared_address(to) + rank * 16;
  const int step = size * 16;
#pragma unroll 1
  for (int left = whole - rank; left > 0; left -= 4 * size, at += 4 * step, shared_at += 4 * step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (left <= i * size) continue;
      if constexpr (by_l1) {
        cp_async_16_by_l1(shared_at + i * step, at + i * step);
      } else {
        cp_async_16(shared_at + i * step, at + i * step);
      }
    }
  }
  if (!may_read_behind) {
#pragma unroll 1
    for (int c = whole * 16 / static_cast<int>(sizeof(T)) + rank; c < bytes / static_cast<int>(sizeof(T));
         c += size)
      reinterpret_cast<T*>(to)[c] = reinterpret_cast<const T*>(begin)[c];
  }
}

/// Writes so many elements of y from shared memory, where they begin at `image`: the vectors between the
/// boundaries of 16 bytes of y, and the elements around these.
template <class Out>
__device__ __forceinline__ void store_from_shared(Out* y, int elements, const Out* image, int rank,
                                                  int size) {
  constexpr int width = 16 / sizeof(Out);
  const auto y_before = static_cast<int>(reinterpret_cast<std::uintptr_t>(y) % 16 / sizeof(Out));
  const int y_end = y_before + elements, whole_begin = y_before > 0 ? 1 : 0, whole_end = y_end / width;
  const Out* const shifted = image - y_before;  // where y's boundary would be
  const auto behind = static_cast<int>(reinterpret_cast<std::uintptr_t>(shifted) % 16);
  const auto* from =
      reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(shifted) - behind) + whole_begin + rank;
  auto* const to = reinterpret_cast<uint4*>(y - y_before);
  const auto store = [&](const auto& vector) {
    uint4* at = anchored(to + whole_begin + rank);
#pragma unroll 1
    for (int left = whole_end - whole_begin - rank; left > 0;
         left -= 2 * size, from += 2 * size, at += 2 * size) {
      __stcg(at, vector(from));
      if (left > size) __stcg(at + size, vector(from + size));
    }
  };
  if (behind == 0) {
    store([](const uint4* v) { return *v; });
  } else {
    store([&](const uint4* v) { return shifted_vector<sizeof(Out)>(v, behind); });
  }
  // The elements before the first of these and behind the last.
  if (rank < 2 * width) {
    const bool is_last = rank >= width;
    const int i = is_last ? max(whole_end, whole_begin) * width + rank - width : rank;
    const int first = is_last ? 0 : y_before == 0 ? width : y_before;
    if (i >= first && i < y_end) store_past_l1(y - y_before + i, shifted[i]);
  }
}

/// Pairs that each lane has at least, and a multiple of two more: asked for where they begin alone.
inline constexpr int least_pairs_of_lane = 9;

/// The logits of a lane: pairs of words of 16-bit elements in shared memory.
template <class T, int pairs_>
struct LogitsOfTile {
  static constexpr int vectors = pairs_, width = 2;
  /// So that the sum of an odd number of pairs begins with 0.
  static constexpr unsigned first_units = 0x80000000u;
  float held[vectors * width];
  int steps;        ///< of the pairs, an odd number
  int first;        ///< column of the first element; of a row's first pair it may be -1
  unsigned* words;  ///< of the pairs

  template <class Threads>
  __device__ bool skips(int k, const Threads&) const {
    return k >= least_pairs_of_lane && (k - least_pairs_of_lane) % 2 == 0 && k >= steps;
  }

  /// Puts -inf behind the row, before `end`, and gives its first word without what lies before the row. By
  /// all lanes, before any of them brings its logits.
  template <class Threads>
  __device__ unsigned bounded(int end, const Threads& threads) const {
    __builtin_assume(__isShared(words));
    constexpr unsigned nothing = PackedPair<T>::minus_infinities;
    unsigned first_word = words[0];
    if (first < 0) first_word = __byte_perm(first_word, nothing, 0x3254);
    threads.synchronize();
    const int behind = end - first;
    if (threads.rank() == 0 && behind % 2 != 0)
      reinterpret_cast<unsigned short*>(words)[behind] = static_cast<unsigned short>(nothing);
    threads.synchronize();
    return first_word;
  }

  /// Brings the logits of the columns before `end`. `pairs_of`(k): the transform with operands for pair k.
  template <bool looks, class Threads, class PairsOf>
  __device__ void load(unsigned first_word, int end, int columns, const Threads& threads,
                       const PairsOf& pairs_of) {
    __builtin_assume(__isShared(words));
    const int left = end - first;
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      if (skips(k, threads)) break;
      unsigned pair = PackedPair<T>::minus_infinities;
      if (left > 2 * k) pair = k == 0 && threads.rank() == 0 ? first_word : words[k];
      float value[width] = {PackedPair<T>::low(pair), PackedPair<T>::high(pair)};
      const auto with_operands = pairs_of(k);
      if constexpr (takes_any_column<std::remove_const_t<decltype(with_operands)>>) {
        transform_neighbours<width, looks>(with_operands, value, first + 2 * k);
      } else {
#pragma unroll
        for (int i = 0; i < width; ++i) {
          const auto with_one =
              map_operands(with_operands, [&](const auto& of_pair) { return of_pair.one(i); });
          value[i] =
              transformed<float, looks>(with_one, value[i], min(max(first + 2 * k + i, 0), columns - 1));
        }
      }
      held[2 * k] = value[0];
      held[2 * k + 1] = value[1];
    }
  }

  /// Writes output(k, 0), pairs of results, in the place of the elements.
  template <class Threads, class Output>
  __device__ void store(int columns, bool shares_words, const Threads& threads, const Output& output) const {
    __builtin_assume(__isShared(words));
    const int left = columns - first;
    unsigned first_pair = 0;
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      if (skips(k, threads)) break;
      const unsigned pair = output(k, 0);
      if (k == 0) first_pair = pair;
      // (A row's last word may be the first one of the next row, which writes its element of it below.)
      if (left > 2 * k && (k > 0 || first >= 0 || !shares_words)) words[k] = pair;
    }
    if (shares_words) {
      threads.synchronize();
      if (first < 0 && left > 1)
        reinterpret_cast<unsigned short*>(words)[1] = static_cast<unsigned short>(first_pair >> 16);
    }
    threads.synchronize();
  }
};

/// `group` lanes a row, or, of 0, a block.
template <int group, int most_threads, int least_blocks, int pairs, class Problem>
__global__ void __launch_bounds__(most_threads, least_blocks)
    tiled_logits_kernel(const __grid_constant__ TiledLogitsCall<Problem> call) {
  using In = typename Problem::In;
  using Out = typename Problem::Out;
  using Acc = typename Problem::Acc;
  using Transform = typename Problem::Transform;
  constexpr bool of_block = group == 0;
  constexpr int lanes = of_block ? 32 : group, rows_of_tile = 32 / lanes;
  constexpr int tiles_of_block = of_block ? 1 : most_threads / 32;
  extern __shared__ __align__(16) char shared_of_tiles[];
  const Problem& problem = call.problem;
  const auto columns = static_cast<int>(problem.geometry.columns), thread = static_cast<int>(threadIdx.x),
             threads_of_block = static_cast<int>(blockDim.x);
  const int rank = of_block ? thread : thread % 32, size = of_block ? threads_of_block : 32;
  const int row = of_block ? 0 : rank / lanes, index = of_block ? thread : rank % lanes;
  constexpr int rows_of_turn = tiles_of_block * rows_of_tile;
  constexpr bool may_have_turns = operands_of<Transform> != 0;
  const int ahead = may_have_turns ? call.ahead : 0, turns = may_have_turns ? call.turns : 1;
  char* const own = shared_of_tiles + (of_block ? 0 : thread / 32 * (1 + ahead) * call.tile_bytes);
  grid_dependency_wait();
  if (problem.geometry.rows == 0) return;
  // Of the tile that is to come.
  index_type first_row = static_cast<index_type>(blockIdx.x) * (turns * rows_of_turn) +
                         (of_block ? 0 : thread / 32 * rows_of_tile);
  auto rows_left = static_cast<int>(
      min(max(problem.geometry.rows - first_row, index_type(0)), index_type(turns * rows_of_turn + 1)));
  index_type offset = first_row * columns;
  if constexpr (operands_of<Transform> != 0) {
    // What is read around an operand is 0: NaN would be asked for again.
    call.for_each_operand(problem.transform.at_row(0), [&](const auto& operand, const auto* data) {
      constexpr int bytes = sizeof(*data);
      const int first = operand.at + (operand.is_of_all ? 1 : rows_of_tile) * columns * bytes / 16 * 16;
      for (int tile = 0; tile <= (operand.is_of_all ? 0 : ahead); ++tile) {
        char* const begin = operand.is_of_all ? shared_of_tiles : own + tile * call.tile_bytes;
        for (int at = first + 16 * rank; at < operand.end; at += 16 * size)
          *reinterpret_cast<uint4*>(begin + at) = uint4{0, 0, 0, 0};
        if (rank == 0) *reinterpret_cast<uint4*>(begin + operand.at - 16) = uint4{0, 0, 0, 0};
      }
    });
    __syncthreads();
    call.for_each_operand(problem.transform.at_row(0), [&](const auto& operand, const auto* data) {
      if (operand.is_of_all)
        copy_to_shared<true>(data, columns, false, shared_of_tiles + operand.at, thread, threads_of_block);
    });
  }
#pragma unroll 1
  for (int turn = -ahead; turn < turns; ++turn) {
    if (turn + ahead < turns && rows_left > 0) {
      char* const tile = own + (turn + ahead & ahead) * call.tile_bytes;
      const bool more_rows = rows_left > rows_of_tile;
      const auto of_first_row = problem.transform.at_row(first_row);
      const int elements =
          (min(rows_left, rows_of_tile) - 1) * columns +
          (rows_of_tile == 1 ? static_cast<int>(end_of_kept(of_first_row, columns)) : columns);
      copy_to_shared<false>(problem.x + offset, elements, more_rows, tile, rank, size);
      call.for_each_operand(of_first_row, [&](const auto& operand, const auto* data) {
        if (!operand.is_of_all)
          copy_to_shared<false>(data + offset, elements, more_rows, tile + operand.at, rank, size);
      });
    }
    cp_async_commit_group();
    rows_left -= rows_of_turn;
    first_row += rows_of_turn;
    offset += rows_of_turn * columns;
    if (turn < 0) continue;
    if (ahead != 0) {
      cp_async_wait_group<1>();
    } else {
      cp_async_wait_group<0>();
    }
    if (of_block || (turn == 0 && call.has_operands_of_all)) {
      __syncthreads();
    } else {
      __syncwarp();
    }
    char* const tile = own + (turn & ahead) * call.tile_bytes;
    const int rows_since = (1 + ahead) * rows_of_turn;
    const int rows = min(rows_left + rows_since, rows_of_tile);
    if (rows <= 0) break;
    const index_type row_of_tile = first_row - rows_since, offset_of_tile = offset - rows_since * columns;
    const bool exists = row < rows;
    const auto transform_of_row = problem.transform.at_row(row_of_tile + (exists ? row : 0));
    const int end = exists ? static_cast<int>(end_of_kept(transform_of_row, columns)) : 0;
    const auto before =
        static_cast<int>(reinterpret_cast<std::uintptr_t>(problem.x + offset_of_tile) % 16 / sizeof(In));
    const int begin = before + (exists ? row * columns : 0);
    LogitsOfTile<In, pairs> logits;
    logits.steps = call.steps;
    logits.first = 2 * index * call.steps - (begin & 1);
    logits.words = reinterpret_cast<unsigned*>(tile) + begin / 2 + index * call.steps;
    int i = 0;
    const auto with_pairs = map_operands(transform_of_row, [&](const auto& of_row) {
      using T = std::remove_cvref_t<decltype(*of_row.data)>;
      const auto& operand = call.operand[i++];
      const bool of_all = operand.is_of_all;
      const T* const from = static_cast<const T*>(operand.data) + (of_all ? 0 : offset_of_tile);
      const auto before_operand = static_cast<int>(reinterpret_cast<std::uintptr_t>(from) % 16 / sizeof(T));
      return PairsOfOperand<T>::from((of_all ? shared_of_tiles : tile) + operand.at,
                                     before_operand + (of_all ? 0 : begin - before) + logits.first);
    });
    const auto transform = prepared_stage<Acc>(with_pairs, 0);
    const auto run = [&](const auto& threads, const auto& reduce) {
      const unsigned first_word = logits.bounded(end, threads);
      const auto pairs_of = [&](int k) {
        return map_operands(transform, [&](const auto& pairs_of_operand) { return pairs_of_operand.at(k); });
      };
      softmax_in_registers(
          logits, threads, problem, problem.y + row_of_tile + row, exists && index == 0, reduce,
          [&](bool looks) {
            if constexpr (may_keep_minus_infinity<std::remove_const_t<decltype(transform)>>) {
              if (!looks && __all_sync(0xffffffffu, stage_keeps_minus_infinity(transform))) {
                logits.template load<false>(first_word, end, columns, threads, pairs_of);
                return only_drops<Transform>;
              }
            }
            if constexpr (!only_drops<Transform>)
              logits.template load<true>(first_word, end, columns, threads, pairs_of);
            return true;
          },
          [&](const auto& output) {
            // (All lanes have read the words that rows share.)
            logits.store(exists ? columns : 0, rows_of_tile > 1, threads, output);
            store_from_shared(problem.y + offset_of_tile, rows * columns,
                              reinterpret_cast<const Out*>(tile) + before, rank, size);
          });
      threads.synchronize();  // before another tile comes
    };
    if constexpr (of_block) {
      using Reduce = ReduceWarps<Acc>;
      __shared__ typename Reduce::Shared shared_of_reduction;
      run(BlockOfRow{thread, threads_of_block, nullptr}, Reduce{shared_of_reduction, {}});
    } else {
      run(LanesOfRow<lanes>{index, nullptr}, ReduceGroup<Acc, lanes>{});
    }
  }
}

struct TiledLogits {
  static constexpr const char* name = "tiled_logits";

  template <class Exec, class Problem>
  static constexpr bool supports = [] {
    if constexpr (may_be_by_address<Problem> && !is_packed<Problem> &&
                  row_in_registers_supports<Exec, Problem>) {
      return operands_of<typename Problem::Transform> <= TiledLogitsCall<Problem>::most_operands &&
             !is_known_at_run_time<typename Problem::Transform>;
    } else {
      return false;
    }
  }();

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec& exec, const Problem& problem) {
    using InRegisters = RowInRegistersPlan<Problem>;
    const RowGeometry& g = problem.geometry;
    const std::string_view layout = refuse_row_in_registers(problem, shortest, InRegisters::longest,
                                                            "rows are too short", "rows are too long");
    if (!layout.empty()) return layout;
    if (!InRegisters::interleaves(g.columns)) return "rows of whole vectors have other bits";
    const bool writes_rows = problem.operation != Operation::logsumexp;
    if (g.rank > 1 || (g.rank == 1 && (g.row_weight[0] != 1 || g.x_stride[0] != g.columns ||
                                       g.y_stride[0] != (writes_rows ? g.columns : 1))))
      return "the rows do not lie one behind the other";
    bool fits = true;
    visit_operands(problem, [&](const auto& operand) {
      const RowOffset& of_row = operand.row_offset;
      const bool as_x = of_row.rank == 1 && of_row.stride[0] == g.columns;
      fits = fits && operand.column_stride == 1 && (of_row.is_none() || as_x);
    });
    if (!fits) return "an operand does not lie as the rows do";
    const cudaDeviceProp& device = exec.cuda_device_prop();
    constexpr int bytes_beside = 4096;  // what the kernel declares
    if (Plan<Problem>(device, problem).bytes > static_cast<int>(device.sharedMemPerBlockOptin) - bytes_beside)
      return "rows and operands do not fit the shared memory of a block";
    return {};
  }

  template <class Exec, class Problem>
  static std::string_view advise_against(const Exec&, const Problem& problem) {
    const index_type columns = problem.geometry.columns;
    // (One H200, bfloat16, microseconds in a CUDA graph, this kernel and those with rows in registers: 2^19
    // elements of 33 columns with a bias 2.92 and 3.56, of 257 3.03 and 3.75, of 1001 3.04 and 2.77; 2^21 of
    // 1001 4.98 and 5.03, of 2047 5.37 and 5.34.)
    if (problem.geometry.rows * columns < index_type(1) << (columns <= 640 ? 19 : 21))
      return "there are too few rows for as many in each warp";
    // (256 MB of bfloat16 on one H200, fraction of a copy, this kernel and those: with a bias for all rows
    // 0.72 to 0.92 at any length, and 0.32 to 0.81; with GELU 385 columns 0.66 and 0.51, 701 0.65 and 0.66,
    // 1001 0.71 and 0.74, 1273 0.56, 1601 0.64 and 0.54, 2047 0.66 and 0.61, 2601 0.61 and 0.65, 6001 0.63
    // and 0.77; with a factor, a bias, a mask and a causal mask 385 0.88 and 0.74, 701 0.84 and 0.88, 1001
    // 0.94 and 0.95, 1273 0.73, 1601 0.85 and 0.79, 2047 0.92 and 0.91, 2601 0.83 and 0.96, 6001 0.86 and
    // 0.95.)
    if (!has_operands_of_all_rows(problem.transform) && columns > 640 && (columns <= 1400 || columns > 2080))
      return "rows of this length stay in registers as fast";
    return {};
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    const Plan<Problem> plan(exec.cuda_device_prop(), problem);
    switch (plan.lanes) {
      case 1:
        return launch<1>(exec, plan);
      case 2:
        return launch<2>(exec, plan);
      case 4:
        return launch<4>(exec, plan);
      case 8:
        return launch<8>(exec, plan);
      case 16:
        return launch<16>(exec, plan);
      case 32:
        return launch<32>(exec, plan);
      default:
        return launch<0>(exec, plan);
    }
  }

  template <class Exec, class Problem>
  static void reserve(const Exec&, const Problem&) {}

 private:
  static constexpr int shortest = 16;  ///< more than a vector of an operand of bytes
  /// Of a lane: rows a little longer than a power of two fill them.
  static constexpr int pairs = 17, most_warps = 4, most_turns = 4;

  template <class Problem, class Use>
  static void visit_operands(const Problem& problem, const Use& use) {
    if constexpr (operands_of<typename Problem::Transform> != 0) problem.transform.visit_operands(use);
  }

  /// How rows are spread over lanes and shared memory.
  template <class Problem>
  struct Plan {
    using Call = TiledLogitsCall<Problem>;
    Call call;
    int lanes = 1;  ///< of a row; 0: a block
    int threads, bytes;
    index_type blocks;

    Plan(const cudaDeviceProp& device, const Problem& problem) : call{problem, 0, 1, 0, 0} {
      call.has_operands_of_all = has_operands_of_all_rows(problem.transform);
      const auto columns = static_cast<int>(problem.geometry.columns);
      const int words = columns / 2 + 1;  // wherever a row begins
      while (lanes <= 32 && words > pairs * lanes) lanes *= 2;
      threads = most_warps * 32;
      int lanes_of_row = lanes;
      if (lanes > 32) {
        lanes = 0;
        threads = lanes_of_row = ((words + pairs - 1) / pairs + 31) / 32 * 32;
      }
      call.steps = std::max((words + lanes_of_row - 1) / lanes_of_row | 1, least_pairs_of_lane);
      const int rows_of_tile = lanes == 0 ? 1 : 32 / lanes;
      // Lanes read whole words, beyond the row's, and half of another one.
      const auto bytes_of = [&](int rows, int size) {
        const int elements = (rows - 1) * columns + 2 * call.steps * lanes_of_row + 2;
        return (elements * size + 2 * 16 + 15) / 16 * 16;
      };
      call.tile_bytes = bytes_of(rows_of_tile, 2);
      const auto place = [&](bool of_all, int& end) {
        int i = 0;
        visit_operands(problem, [&]<class T>(const LogitOperand<T>& operand) {
          const bool is_of_all = operand.row_offset.is_none();
          if (is_of_all == of_all) {
            const int at = end + Call::before_operand;
            end = at + bytes_of(is_of_all ? 1 : rows_of_tile, sizeof(T));
            call.operand[i] = {operand.data, at, end, is_of_all};
          }
          ++i;
        });
      };
      place(false, call.tile_bytes);
      const int together = lanes == 0 ? 1 : most_warps;
      const index_type tiles = ceil_div(problem.geometry.rows, rows_of_tile);
      // Not so many that there are fewer blocks than run at once. (Without such operands, softmax of bfloat16
      // on one H200, fraction of a copy with 1 and 4: a bias as large as x 33 columns 1.00 and 0.95, 2047
      // 0.97 and 0.94, 8191 0.97 and 0.92; with a bias for all rows 257 columns 0.81 and 0.91, 2047 0.79 and
      // 0.91, 8191 0.77 and 0.87, of these the next tile on its way 0.03 to 0.09.)
      const int blocks_of_multiprocessor = 1024 / threads;
      const index_type blocks_at_once =
          static_cast<index_type>(device.multiProcessorCount) * blocks_of_multiprocessor;
      if (call.has_operands_of_all)
        call.turns =
            static_cast<int>(std::clamp<index_type>(tiles / together / (2 * blocks_at_once), 1, most_turns));
      const auto bytes_with = [&](int ahead) {
        int end = call.tile_bytes * together * (1 + ahead);
        place(true, end);
        return end;
      };
      const auto fits = [&](int bytes_of_block) {
        constexpr int bytes_beside = 1024;  // what the system takes of each block
        return (bytes_of_block + bytes_beside) * blocks_of_multiprocessor <=
               static_cast<int>(device.sharedMemPerMultiprocessor);
      };
      call.ahead = call.turns > 1 && fits(bytes_with(1)) ? 1 : 0;
      bytes = bytes_with(call.ahead);
      blocks = ceil_div(tiles, together * call.turns);
    }
  };

  template <int group, class Problem>
  static void launch(const Kokkos::Cuda& exec, const Plan<Problem>& plan) {
    constexpr int most_threads = group == 0 ? 512 : most_warps * 32, least_blocks = group == 0 ? 2 : 8;
    const Problem& problem = plan.call.problem;
    launch_with_shared<&tiled_logits_kernel<group, most_threads, least_blocks, pairs, Problem>>(
        exec, kernel_label(problem.operation, name), plan.blocks, plan.threads, plan.bytes, plan.call);
  }
};

}  // namespace KokkosSoftmax::impl

#endif
