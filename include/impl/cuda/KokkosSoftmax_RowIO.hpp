// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Rows between global memory and registers, in one of three layouts, chosen by types and length so that
/// results do not depend on alignment:
///   vectors       rows of whole vectors of 16 bytes: neighbours lie in one thread. Off a boundary they are
///                 read in words of 4 bytes, and written by way of an image of the row in shared memory.
///   interleaved   rows of any other length: neighbours lie in neighbouring threads, so that accesses of
///                 single elements coalesce at any alignment. Long rows with operands, and these, are read
///                 by way of shared memory (StagedRowPlan says which).
///   by address    16 bits in: vectors of 16 bytes begin at memory's boundaries, wherever the row does.
///                 Without a transform or with one of those that keeps_rows_packed names they stay as they
///                 are (PackedRow), rows of any length, which may become floats; else, of 16 bits in and out,
///                 those of other lengths than whole vectors become logits (LogitsByAddress), with operands
///                 by way of shared memory. Sums of these rows are exact, so that which thread adds what
///                 makes no difference.

#ifndef KOKKOSSOFTMAX_ROWIO_HPP
#define KOKKOSSOFTMAX_ROWIO_HPP

#include <KokkosSoftmax_Transforms.hpp>
#include <impl/cuda/KokkosSoftmax_OperandNeighbours.hpp>
#include <impl/cuda/KokkosSoftmax_PackedMask.hpp>
#include <impl/cuda/KokkosSoftmax_RowMath.hpp>
#include <impl/cuda/KokkosSoftmax_StagedColumns.hpp>

namespace KokkosSoftmax::impl {

/// A part of a warp, or a warp, that has a row: neighbouring lanes. Vector number k * count + index of the
/// row is step k of the thread with that index.
template <int lanes>
struct LanesOfRow {
  static constexpr int count = lanes;
  static constexpr bool has_neighbours = lanes < 32;  ///< rows beside this one in the warp
  static constexpr bool reads_by_l1 = true;           ///< see load_of_row
  int index;                                          ///< of this thread in its row
  char* image;  ///< of the row in shared memory: image_bytes(count), where x and y ask for one

  __device__ static constexpr int first_of_warp() { return 0; }

  __device__ static constexpr int first_step() { return 0; }
  __device__ int rank() const { return index; }
  __device__ static constexpr int size() { return lanes; }
  __device__ void synchronize() const { __syncwarp(); }
};

/// Likewise a block.
struct BlockOfRow {
  static constexpr bool has_neighbours = false;
  int index, count;
  char* image;

  /// Index of the first thread of the warp in the row.
  __device__ int first_of_warp() const { return index & ~31; }

  __device__ static constexpr int first_step() { return 0; }
  __device__ int rank() const { return index; }
  __device__ int size() const { return count; }
  __device__ void synchronize() const { __syncthreads(); }
};

/// A block whose rows lie on boundaries of 16 bytes and have all vectors of its threads but, of some threads,
/// the last one.
template <bool leaves_l2_first_>
struct BlockOfFilledRow {
  static constexpr bool has_neighbours = false;
  static constexpr bool leaves_l2_first = leaves_l2_first_;
  static constexpr bool fills_steps = true;
  int index, count;

  __device__ static constexpr int first_step() { return 0; }
  __device__ void synchronize() const { __syncthreads(); }
};

/// Whether every thread has something of the row in all steps but the last.
template <class Threads>
inline constexpr bool fills_steps_v = requires {
  Threads::fills_steps;
};

/// Likewise one whose rows stay in L2 and are whole steps, their transform one that takes neighbours.
struct BlockOfWholeRow : BlockOfFilledRow<true> {
  static constexpr bool has_whole_rows = true;
};

template <class Threads>
inline constexpr bool has_whole_rows_v = requires {
  Threads::has_whole_rows;
};

/// How a row is read and written, once. By L1 where rows of warps that are neighbours, or the scalars of one
/// that begins anywhere, have parts of a line each, else past it. (One H200, fractions of a copy, past L1 and
/// by it: floats of 63 columns 0.80 and 0.90, 65 0.81 and 0.92, 129 0.93 and 0.98, 257 0.93 and 0.975.)
///
/// The hint that it is to leave L2 first pays where all is in L2 from one call to the next, operands above
/// all. From memory it does not: what other kernels left in L2 never leaves it then, for lines that may go
/// first make room for each other, and operands without the hint take what room there is. (Softmax of 1 GiB
/// of floats on one H200, fraction of a copy with the hint after a copy and after a kernel that read
/// something else, and without it, the same after both: 64 columns 0.997, 0.974 and 0.999, 4096 0.986, 0.935
/// and 0.984, 4097 0.953, 0.875 and 0.953, 16384 0.978, 0.941 and 0.976; bfloat16 1024 0.983, 0.940 and
/// 0.981, 8192 0.993, 0.947 and 0.987. With the hint for reading or for writing alone 0.92 and 0.957 where
/// both and neither have 0.97. 8192 columns with a mask as large as x 0.905 and 0.979; of 32 MB 1.16
/// and 1.02.)
template <class Threads>
inline constexpr bool leaves_l2_first_v = requires {
  requires Threads::leaves_l2_first;
};
template <class Threads, class T>
__device__ T load_of_row(const T* p) {
  if constexpr (leaves_l2_first_v<Threads>) {
    return load_streaming(p);
  } else if constexpr (requires { Threads::reads_by_l1; }) {
    return load_by_l1(p);
  } else {
    return load_past_l1(p);
  }
}
template <class Threads, class T>
__device__ void store_of_row(T* p, const T& value) {
  if constexpr (leaves_l2_first_v<Threads>) {
    store_streaming(p, value);
  } else {
    store_past_l1(p, value);
  }
}

/// A block that has what a single warp would have, each warp one step of it.
struct WarpsOfRow {
  static constexpr int count = 32;
  static constexpr bool has_neighbours = false;
  int index;
  char* image;

  __device__ static int first_step() { return static_cast<int>(threadIdx.x) / 32; }
  __device__ static int rank() { return static_cast<int>(threadIdx.x); }
  __device__ static int size() { return static_cast<int>(blockDim.x); }
  __device__ void synchronize() const { __syncthreads(); }
};

/// Keeps the compiler from taking the address of a thread's first access apart: it would be put together
/// again for each of the others, in five instructions, where all of them are constants apart.
template <class T>
__device__ __forceinline__ T* anchored(T* pointer) {
  asm("" : "+l"(pointer));
  return pointer;
}

/// The 16 bytes that begin `bytes`, a multiple of `unit` below 16, behind the first of a and the vector that
/// follows it.
template <int unit>
__device__ __forceinline__ uint4 shifted_vector(const uint4* vectors, int bytes) {
  const uint4 a = vectors[0], b = vectors[1];
  unsigned w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  shift_words<16, unit, 4>(w, bytes);
  return {w[0], w[1], w[2], w[3]};
}

/// Two vectors that a lane has for neighbouring places, lanes one after the other: those of a pair of lanes
/// give each other one, so that each instruction writes whole sectors of 32 bytes. The first is for the even
/// lane's pair of places then, the second for the odd one's, each for its first or its second place as the
/// lane is even or odd. (Half sectors, written one after the other, are slow. Rows of bfloat16 to float on
/// one H200, fraction of a copy without and with this: 1024 columns 0.85 and 0.99, 4096 0.75 and 0.97, 16384
/// 0.65 and 0.96.)
template <class Vector>
__device__ __forceinline__ void exchange_halves(Vector (&half)[2]) {
  static_assert(sizeof(Vector) == sizeof(uint4));
  const bool odd = threadIdx.x % 2 != 0;
  const uint4 first = bits_as<uint4>(half[0]), second = bits_as<uint4>(half[1]);
  // (Word by word: a choice of whole vectors would be one of addresses.)
  const auto first_and_second = [&](unsigned of_first, unsigned of_second) {
    const unsigned got = __shfl_xor_sync(0xffffffffu, odd ? of_first : of_second, 1);
    return uint2{odd ? got : of_first, odd ? of_second : got};
  };
  const uint2 x = first_and_second(first.x, second.x), y = first_and_second(first.y, second.y),
              z = first_and_second(first.z, second.z), w = first_and_second(first.w, second.w);
  half[0] = bits_as<Vector>(uint4{x.x, y.x, z.x, w.x});
  half[1] = bits_as<Vector>(uint4{x.y, y.y, z.y, w.y});
}

/// For rows of y with `gap` elements between them: brings the sectors of 32 bytes to L2 that a row has a part
/// of alone, at its begin, unless the row before it has another part, and at its end. Else L2 reads what
/// such a sector lacks when it gives it up, one by one, slower than all the rest. (One H200, fraction of a
/// copy without and with this: 65 columns of float, 7 between them, 0.52 and 0.80, 257 and 6 0.66 and 0.84.)
template <class Out>
__device__ __forceinline__ void read_ends_of_row(const Out* y, int columns, int gap, bool at_begin,
                                                 bool at_end) {
  const auto in_sector = [](const Out* at) {
    return static_cast<int>(reinterpret_cast<std::uintptr_t>(at) % 32 / sizeof(Out));
  };
  if (at_begin && in_sector(y) > 0 && in_sector(y) <= gap) ld_volatile_unused(y);
  if (at_end && in_sector(y + columns) > 0) ld_volatile_unused(y + columns - 1);
}

/// use(i, at, row) for each i below `count` of the units of `together` elements that rows of one dimension
/// have one after the other, `length` each; at: its place in memory. The first row begins at `first`. By so
/// many threads in turn.
template <int together, int threads, class T, class Use>
__device__ __forceinline__ void for_units_of_rows(T* first, index_type row_stride, int length, int count,
                                                  int thread, const Use& use) {
  const int rows_of_step = threads / length, units_of_step = threads - rows_of_step * length;
  int row = thread / length, unit = thread - row * length;
  T* at = first + row * row_stride + unit * together;
  const index_type step = rows_of_step * row_stride + units_of_step * together,
                   to_next_row = row_stride - length * together;
#pragma unroll 4
  for (int i = thread; i < count; i += threads) {
    use(i, at, row);
    at += step;
    row += rows_of_step;
    unit += units_of_step;
    if (unit >= length) {
      unit -= length;
      at += to_next_row;
      ++row;
    }
  }
}

/// Writes a row of y from its image in shared memory, where it begins at `image`. Threads take what lies
/// between the boundaries of 16 bytes of global memory, at most `steps` of these vectors each. (Of rows that
/// threads write in smaller parts, element by element.) `alike`: the image begins as far behind a boundary as
/// y.
template <int store_bytes, int steps, bool alike = false, class Out, class Threads>
__device__ void store_image(Out* y, const Out* image, int columns, const Threads& threads) {
  constexpr int bytes = sizeof(Out), width = 16 / bytes;
  const auto shift = static_cast<int>(reinterpret_cast<std::uintptr_t>(y) % 16);
  // The ends, fewer elements than a vector each.
  const int head = store_bytes < 16 ? columns : shift == 0 ? 0 : min((16 - shift) / bytes, columns);
  const int whole = (columns - head) / width;
#pragma unroll 1
  for (int c = threads.rank(); c < head; c += threads.size()) y[c] = image[c];
#pragma unroll 1
  for (int c = head + whole * width + threads.rank(); c < columns; c += threads.size()) y[c] = image[c];
  // The vectors between the boundaries, a few at once, so that their loads are under way together.
  const auto* const body = reinterpret_cast<const char*>(image + head);
  const int behind = alike ? 0 : static_cast<int>(reinterpret_cast<std::uintptr_t>(body) % 16);
  const auto* const from = reinterpret_cast<const uint4*>(body - behind);
  auto* const to = reinterpret_cast<uint4*>(y + head);
  constexpr int at_once = steps < 4 ? steps : 4;
#pragma unroll
  for (int first = 0; first < steps; first += at_once) {
    if (first * threads.size() >= whole) break;
    uint4 vector[at_once];
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      const int i = (first + k) * threads.size() + threads.rank();
      // (Past the last one lies what was there before, or the padding.)
      const uint4* const at = from + (i < whole ? i : 0);
      vector[k] = alike ? *at : shifted_vector<bytes>(at, behind);
    }
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      const int i = (first + k) * threads.size() + threads.rank();
      if (i < whole) store_of_row<Threads>(to + i, vector[k]);
    }
  }
}

/// Where accesses of 16 bytes of several images fall on the same banks, half of them do not.
inline constexpr int image_padding = 64;

/// The columns that a thread holds, for a transform that transforms_held_logits: vectors that are so far
/// apart. Where a vector is behind the end, column 0's operands.
template <class Skips>
struct HeldColumns {
  static constexpr bool vectors_are_whole = true;
  int first, distance, end;
  const Skips& skips;
  __device__ int offset(int v) const {
    const int column = first + v * distance;
    return column < end ? column : 0;
  }
  __device__ int offset(int v, int i) const { return offset(v) + i; }
  static constexpr index_type origin = 0;
  __device__ HeldColumns anew() const { return {not_known(first), distance, end, skips}; }
};

/// Likewise of rows by address: the first and the last vector have a part of the row.
template <class Skips>
struct HeldColumnsByAddress {
  static constexpr bool vectors_are_whole = false;
  int first, distance, columns;
  const Skips& skips;
  __device__ int offset(int v, int i) const { return min(max(first + v * distance + i, 0), columns - 1); }
  __device__ int offset(int v) const { return offset(v, 0); }
  static constexpr index_type origin = 0;
  __device__ HeldColumnsByAddress anew() const { return {not_known(first), distance, columns, skips}; }
};

/// `interleaved_`: a thread's vector is not a vector of memory, but as many elements, each a row's threads
/// apart.
template <class In_, class Out_, int vectors_, bool interleaved_>
struct RowRegisters {
  using In = In_;
  using Out = Out_;
  using Acc = accumulator_t<In, Out>;
  static constexpr bool by_address = false;
  static constexpr int vectors = vectors_;
  static constexpr bool interleaved = interleaved_;
  static constexpr int width = interleaved ? 16 / sizeof(Acc) : 16 / sizeof(In);  ///< elements of a vector
  static constexpr int store_bytes = interleaved                ? sizeof(Out)
                                     : width * sizeof(Out) < 16 ? width * sizeof(Out)
                                                                : 16;
  static constexpr int stores = width * sizeof(Out) / store_bytes;
  KOKKOS_FORCEINLINE_FUNCTION static constexpr int image_bytes(int threads) {
    return interleaved ? 0 : threads * vectors * width * static_cast<int>(sizeof(Out)) + image_padding;
  }

  static constexpr int count = vectors * width;
  Acc held[count];

  /// As it comes from memory: 16 bits in pairs. nvcc would take an array of them apart at once, which waits
  /// for x before operands are asked for.
  struct alignas(16) InVector {
    using Word = std::conditional_t<is_16_bit_v<In>, unsigned, In>;
    Word word[16 / sizeof(Word)];
  };

  /// Whether no thread has anything of the row in step k. (The first steps are left to the compiler to
  /// interleave.)
  template <class Threads>
  __device__ static bool skips(int k, int columns, const Threads& threads) {
    if constexpr (fills_steps_v<Threads>) return false;
    constexpr int always = interleaved ? 2 : 5;
    return vectors > always && k >= always && k * threads.count * width >= columns;
  }

  /// Reads and transforms the row; past its end -inf. Whether it looked for logits of -inf: where it did not,
  /// and a result is NaN, the row has to be read again with `looks`.
  template <class Threads, class TransformRow>
  __device__ bool load(const In* x, int columns, const Threads& threads, const TransformRow& transform,
                       bool looks) {
    const int end = end_of_read(transform, columns);
    if constexpr (interleaved) {
      load_interleaved(x, columns, end, threads, transform);
    } else {
      constexpr bool may_overlook = may_keep_minus_infinity<TransformRow>;
      constexpr bool may_read_operands = requires {
        transform.template takes_neighbours<width>(0);
      };
      if constexpr (is_16_bit_v<In> && (may_overlook || may_read_operands)) {
        bool direct =
            reinterpret_cast<std::uintptr_t>(x) % 16 == 0 && stage_takes_neighbours<width>(transform);
        if constexpr (may_overlook) direct = direct && !looks && stage_keeps_minus_infinity(transform);
        if (__all_sync(0xffffffffu, direct)) {
          load_with_operands<!may_overlook>(x, end, threads, transform);
          return !may_overlook;
        }
      }
      InVector raw[vectors];
      fetch_vectors(x, end, threads, raw);
      take_vectors(raw, end, threads, transform);
    }
    return true;
  }

  /// What no logit is kept of need not be read.
  template <class TransformRow>
  __device__ static int end_of_read(const TransformRow& transform, int columns) {
    return static_cast<int>(end_of_kept(transform, columns));
  }

  /// load() of an interleaved row that ends at `end` from shared memory. (It always looks for -inf: that
  /// takes 2 of 41 instructions for each logit of bfloat16 with a bias, and one H200 has 0.96 of a copy for
  /// 0.92 at 2047 columns without it; but with a way to come again and look it has 0.80, and 0.47 for 0.85
  /// with a mask. Pairs of neighbours in place of single logits, which halve the addresses: 0.88.)
  template <class Threads, class TransformRow>
  __device__ void take_staged(const ColumnsInShared<In>& x, int columns, int end, const Threads& threads,
                              const TransformRow& transform) {
    const int first = interleaved_column(0, threads);
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      if (skips(k, columns, threads)) break;
      if (is_full(k, end, threads)) {
#pragma unroll
        for (int step = k * width; step < (k + 1) * width; ++step) {
          const int column = first + step * threads.count;
          held[step] = transformed<Acc>(transform, load_as<Acc>(x(column)), column);
        }
      } else {
#pragma unroll
        for (int step = k * width; step < (k + 1) * width; ++step) {
          const int column = first + step * threads.count;
          held[step] = -infinity_v<Acc>;
          if (column < end) held[step] = transformed<Acc>(transform, load_as<Acc>(x(column)), column);
        }
      }
    }
    __syncwarp();  // a warp that has a row alone writes its image in the same place
  }

  /// store() of an interleaved row by way of its image, which begins as far behind a boundary as y.
  template <class Threads, class Output>
  __device__ void store_by_image(Out* y, int columns, const Threads& threads, const Output& output) const {
    auto* const image = reinterpret_cast<Out*>(threads.image + reinterpret_cast<std::uintptr_t>(y) % 16);
    __builtin_assume(__isShared(image));
    const int first = interleaved_column(0, threads);
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      if (skips(k, columns, threads)) break;
      if (is_full(k, columns, threads)) {
#pragma unroll
        for (int step = k * width; step < (k + 1) * width; ++step)
          image[first + step * threads.count] = store_as<Out>(output(held[step]));
      } else {
#pragma unroll
        for (int step = k * width; step < (k + 1) * width; ++step) {
          const int column = first + step * threads.count;
          if (column < columns) image[column] = store_as<Out>(output(held[step]));
        }
      }
    }
    threads.synchronize();
    constexpr int vectors_of_image = (count * static_cast<int>(sizeof(Out)) + 15) / 16;
    store_image<16, vectors_of_image, true>(y, image, columns, threads);
  }

  /// Reads a row of vectors; past its end -inf.
  template <class Threads>
  __device__ static void fetch_vectors(const In* x, int columns, const Threads& threads,
                                       InVector (&raw)[vectors]) {
    const InVector nothing = vector_of_nothing();
    if (fills_steps_v<Threads> || __all_sync(0xffffffffu, reinterpret_cast<std::uintptr_t>(x) % 16 == 0)) {
      const auto* const from = anchored(reinterpret_cast<const InVector*>(x) + number(0, threads));
      if (is_full(vectors - 1, columns, threads)) {
#pragma unroll
        for (int k = 0; k < vectors; ++k) raw[k] = load_of_row<Threads>(from + k * threads.count);
      } else {
        const int left = columns - number(0, threads) * width;
#pragma unroll
        for (int k = 0; k < vectors; ++k) {
          raw[k] = nothing;
          if (has_all_of(k, threads) || left > k * threads.count * width)
            raw[k] = load_of_row<Threads>(from + k * threads.count);
        }
      }
    } else {
      // All loads before the first use, so that they are under way together.
      const bool odd = sizeof(In) == 2 && reinterpret_cast<std::uintptr_t>(x) % 4 != 0;
      Words words[vectors];
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
        words[k] = words_of(nothing);
        if (number(k, threads) * width < columns) words[k] = load_words(x + number(k, threads) * width, odd);
      }
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
        raw[k] = number(k, threads) * width < columns ? vector_of(words[k], odd) : nothing;
      }
    }
  }

  /// Transforms what fetch_vectors read.
  template <class Threads, class TransformRow>
  __device__ void take_vectors(const InVector (&raw)[vectors], int columns, const Threads& threads,
                               const TransformRow& transform) {
    if constexpr (transforms_held_logits<TransformRow>) {
      take_vectors_at_once(raw, columns, threads, transform);
    } else {
      const auto transform_vectors = [&](const auto& transform_vector) {
#pragma unroll
        for (int k = 0; k < vectors; ++k) {
          Acc part[width];
          convert(raw[k], part);
          const int column = number(k, threads) * width;
          transform_vector(part, has_whole_rows_v<Threads> ? column : operand_column(column, columns));
#pragma unroll
          for (int i = 0; i < width; ++i) held[k * width + i] = part[i];
        }
      };
      if constexpr (std::is_same_v<TransformRow, BoundIdentity::Row>) {
        transform_vectors([](Acc(&)[width], int) {});
      } else if (has_whole_rows_v<Threads> || stage_takes_neighbours<width>(transform)) {
        transform_vectors(
            [&](Acc(&part)[width], int first) { transform_neighbours<width>(transform, part, first); });
      } else {
        transform_vectors([&](Acc(&part)[width], int first) {
#pragma unroll
          for (int i = 0; i < width; ++i) part[i] = transformed<Acc>(transform, part[i], first + i);
        });
      }
    }
  }

  /// Writes output(value), rounded, to the row; of one that does not `exist` nothing.
  template <class Threads, class Output>
  __device__ void store(Out* y, int row_columns, bool exists, const Threads& threads,
                        const Output& output) const {
    const int columns = exists ? row_columns : 0;
    if constexpr (interleaved) {
      Out* const to = anchored(y + interleaved_column(0, threads));
      const int left = columns - interleaved_column(0, threads);
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
        if (skips(k, row_columns, threads)) break;
        if (exists && is_full(k, row_columns, threads)) {
#pragma unroll
          for (int step = k * width; step < (k + 1) * width; ++step)
            store_of_row<Threads>(to + step * threads.count, store_as<Out>(output(held[step])));
        } else {
#pragma unroll
          for (int step = k * width; step < (k + 1) * width; ++step) {
            if (left > step * threads.count)
              store_of_row<Threads>(to + step * threads.count, store_as<Out>(output(held[step])));
          }
        }
      }
    } else if (fills_steps_v<Threads> ||
               __all_sync(0xffffffffu, reinterpret_cast<std::uintptr_t>(y) % store_bytes == 0)) {
      auto* const to = anchored(reinterpret_cast<OutPart*>(y) + number(0, threads) * stores);
      const bool full = exists && is_full(vectors - 1, columns, threads);
      const int left = columns - number(0, threads) * width;
      if constexpr (stores == 2) {
        const bool odd = threads.index % 2 != 0;
        const int left_of[2] = {left + (odd ? width : 0), left - (odd ? 0 : width)};
#pragma unroll
        for (int k = 0; k < vectors; ++k) {
          OutVector out;
          round_outputs(k, output, out);
          exchange_halves(out.part);
#pragma unroll
          for (int p = 0; p < stores; ++p) {
            if (full || left_of[p] > k * threads.count * width)
              store_of_row<Threads>(to - odd + k * threads.count * stores + 2 * p, out.part[p]);
          }
        }
      } else {
#pragma unroll
        for (int k = 0; k < vectors; ++k) {
          if (has_all_of(k, threads) || full || left > k * threads.count * width) {
            OutVector out;
            round_outputs(k, output, out);
#pragma unroll
            for (int p = 0; p < stores; ++p)
              store_of_row<Threads>(to + k * threads.count * stores + p, out.part[p]);
          }
        }
      }
    } else if constexpr (!fills_steps_v<Threads>) {
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
        if (number(k, threads) * width >= row_columns) break;
        OutVector out;
        round_outputs(k, output, out);
        auto* to = reinterpret_cast<OutPart*>(threads.image) + number(k, threads) * stores;
#pragma unroll
        for (int p = 0; p < stores; ++p) to[p] = out.part[p];
      }
      threads.synchronize();
      store_image<store_bytes, vectors * stores>(y, reinterpret_cast<const Out*>(threads.image), columns,
                                                 threads);
    }
  }

 private:
  struct alignas(store_bytes) OutPart {
    Out e[width / stores];
  };
  struct alignas(store_bytes) OutVector {
    OutPart part[stores];
  };

  template <class Threads>
  __device__ static int number(int k, const Threads& threads) {
    return (k + threads.first_step()) * threads.count + threads.index;
  }
  /// Whether it is known of step k that every thread has a whole vector of the row there.
  template <class Threads>
  __device__ static constexpr bool has_all_of(int k, const Threads&) {
    return has_whole_rows_v<Threads> || (fills_steps_v<Threads> && k < vectors - 1);
  }
  /// Whether every thread has whole vectors of the row in step k.
  template <class Threads>
  __device__ static bool is_full(int k, int columns, const Threads& threads) {
    return has_all_of(k, threads) || (k + threads.first_step() + 1) * threads.count * width <= columns;
  }
  template <class Threads>
  __device__ static int interleaved_column(int step, const Threads& threads) {
    return (step + threads.first_step() * width) * threads.count + threads.index;
  }

  __device__ static InVector vector_of_nothing() {
    InVector nothing;
    for (auto& word : nothing.word) {
      if constexpr (is_16_bit_v<In>) {
        word = PackedPair<In>::minus_infinities;
      } else {
        word = -infinity_v<In>;
      }
    }
    return nothing;
  }
  __device__ static void convert(const InVector& raw, Acc (&to)[width]) {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      if constexpr (is_16_bit_v<In>) {
        to[i] = i % 2 == 0 ? low_of_pair<In>(raw.word[i / 2]) : high_of_pair<In>(raw.word[i / 2]);
      } else {
        to[i] = static_cast<Acc>(raw.word[i]);
      }
    }
  }

  /// load() where rows of x and of operands can be read in vectors: without a branch between the loads of x
  /// and of operands, which are under way together then. (Fractions of a copy on one H200, this and
  /// fetch_vectors: bfloat16 with a mask 4096 columns 0.92 and 0.85, 16384 0.94 and 0.73, a bias for all
  /// rows 1.00 and 0.93. Not for float, whose operands take as many registers again: 16384 columns 0.87 and
  /// 0.91, 0.84 and 0.96.)
  template <bool looks, class Threads, class TransformRow>
  __device__ void load_with_operands(const In* x, int end, const Threads& threads,
                                     const TransformRow& transform) {
    const auto* const from = anchored(reinterpret_cast<const InVector*>(x) + number(0, threads));
    const int left = end - number(0, threads) * width;
    InVector raw[vectors];
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      raw[k] = vector_of_nothing();
      if (left > k * threads.count * width) raw[k] = load_of_row<Threads>(from + k * threads.count);
    }
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      Acc part[width];
      convert(raw[k], part);
      transform_neighbours<width, looks>(transform, part, operand_column(number(k, threads) * width, end));
#pragma unroll
      for (int i = 0; i < width; ++i) held[k * width + i] = part[i];
    }
  }

  template <class Threads, class TransformRow>
  __device__ void take_vectors_at_once(const InVector (&raw)[vectors], int columns, const Threads& threads,
                                       const TransformRow& transform) {
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      Acc part[width];
      convert(raw[k], part);
#pragma unroll
      for (int i = 0; i < width; ++i) held[k * width + i] = part[i];
    }
    const auto skips_vector = [&](int k) { return skips(k, columns, threads); };
    transform.template transform_held<width>(
        held, HeldColumns<decltype(skips_vector)>{number(0, threads) * width, threads.count * width, columns,
                                                  skips_vector});
  }

  template <class Threads, class TransformRow>
  __device__ void load_interleaved(const In* x, int columns, int end, const Threads& threads,
                                   const TransformRow& transform) {
    const In* const from = anchored(x + interleaved_column(0, threads));
    const int left = end - interleaved_column(0, threads);
    In raw[count];
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      if (skips(k, columns, threads)) break;
      if (is_full(k, end, threads)) {
#pragma unroll
        for (int step = k * width; step < (k + 1) * width; ++step)
          raw[step] = load_by_l1(from + step * threads.count);
      } else {
#pragma unroll
        for (int step = k * width; step < (k + 1) * width; ++step) {
          raw[step] = store_as<In>(-infinity_v<Acc>);
          if (left > step * threads.count) raw[step] = load_by_l1(from + step * threads.count);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      if (skips(k, columns, threads)) break;
#pragma unroll
      for (int step = k * width; step < (k + 1) * width; ++step) {
        held[step] = load_as<Acc>(raw[step]);
        if constexpr (!std::is_same_v<TransformRow, BoundIdentity::Row> &&
                      !transforms_held_logits<TransformRow>) {
          held[step] =
              transformed<Acc>(transform, held[step], operand_column(interleaved_column(step, threads), end));
        }
      }
    }
    if constexpr (transforms_held_logits<TransformRow>) {
      const auto skips_step = [&](int step) { return skips(step / width, columns, threads); };
      transform.template transform_held<1>(
          held,
          HeldColumns<decltype(skips_step)>{interleaved_column(0, threads), threads.count, end, skips_step});
    }
  }

  /// Where operands for a column are read: for those past the end of the row, which hold -inf and keep it,
  /// where any are. Without branches between them the loads of all operands are under way together, and with
  /// the row's.
  __device__ static int operand_column(int column, int columns) {
    return column < columns ? column : 0;
  }

  /// The words of 4 bytes that a vector at any address lies in. The fifth is needed for 16 bits off a
  /// boundary.
  struct Words {
    unsigned word[5];
  };

  __device__ static Words words_of(const InVector& vector) {
    const uint4 bits = bits_as<uint4>(vector);
    return {{bits.x, bits.y, bits.z, bits.w, 0}};
  }
  __device__ static Words load_words(const In* at, bool odd) {
    Words words{};
    const auto* from =
        reinterpret_cast<const unsigned*>(reinterpret_cast<std::uintptr_t>(at) - (odd ? 2 : 0));
#pragma unroll
    for (int i = 0; i < 4; ++i) words.word[i] = from[i];
    if (odd) words.word[4] = *reinterpret_cast<const unsigned short*>(from + 4);
    return words;
  }
  __device__ static InVector vector_of(const Words& words, bool odd) {
    uint4 bits{words.word[0], words.word[1], words.word[2], words.word[3]};
    if constexpr (sizeof(In) == 2) {
      const unsigned shift = odd ? 16 : 0;
      bits.x = __funnelshift_r(words.word[0], words.word[1], shift);
      bits.y = __funnelshift_r(words.word[1], words.word[2], shift);
      bits.z = __funnelshift_r(words.word[2], words.word[3], shift);
      bits.w = __funnelshift_r(words.word[3], words.word[4], shift);
    }
    return bits_as<InVector>(bits);
  }

  /// Rounds a vector; 16-bit scalars in pairs, one instruction each.
  template <class Output>
  __device__ void round_outputs(int k, const Output& output, OutVector& out) const {
    Acc v[width];
#pragma unroll
    for (int i = 0; i < width; ++i) v[i] = output(held[k * width + i]);
    if constexpr (is_16_bit_v<Out> && std::is_same_v<Acc, float>) {
      unsigned words[width / 2];
#pragma unroll
      for (int i = 0; i < width; i += 2) words[i / 2] = rounded_pair<Out>(v[i], v[i + 1]);
      memcpy(&out, words, sizeof(out));
    } else {
#pragma unroll
      for (int i = 0; i < width; ++i)
        out.part[i / (width / stores)].e[i % (width / stores)] = store_as<Out>(v[i]);
    }
  }
};

/// A row of 16 bits by address: in vectors of memory's 16 bytes. Where it lies `anywhere`, the first and the
/// last of these may hold less of the row. Pairs stay as they lie in memory until they are used.
/// `may_drop_end`: rows may have an end of which nothing is kept. `Out`: what it becomes, 16 bits or floats.
template <class T, int vectors_, bool anywhere, bool may_drop_end = false, class Out = T>
struct PackedRow {
  static constexpr bool by_address = true;
  static constexpr int vectors = vectors_;
  static constexpr int width = 8;  ///< elements of a vector
  static constexpr int store_bytes = 16;
  static constexpr int pairs = width / 2;
  KOKKOS_FORCEINLINE_FUNCTION static constexpr int image_bytes(int threads) {
    return threads * vectors * width * static_cast<int>(sizeof(Out)) + image_padding;
  }
  /// Vectors that rows of so many elements lie in, at most.
  static constexpr index_type vectors_of_row(index_type columns) {
    return (columns + (anywhere ? width - 1 : 0) + width - 1) / width;
  }

  unsigned held[vectors * pairs];
  int columns;
  int before;  ///< elements that the row's first vector holds before the row
  int left;    ///< elements of the row from this thread's first vector on, and that may begin before the row
  int end_of_kept;  ///< from the row's first vector on; of a warp's rows the last one

  /// From a thread's first vector to that of step k.
  template <class Threads>
  __device__ static int offset(int k, const Threads& threads) {
    return k * threads.count * width;
  }
  /// Whether no thread of the warp has anything of the row in step k.
  template <class Threads>
  __device__ bool skips(int k, const Threads& threads) const {
    return vectors > 2 && k >= 2 &&
           offset(k, threads) + threads.first_of_warp() * width >= columns + (anywhere ? width - 1 : 0);
  }
  /// Whether nothing is kept of what the threads of the warp have from step k on. Its outputs, one like the
  /// other, take no exponentials. (Squares of bfloat16 with a factor and a causal mask on one H200, fraction
  /// of a copy of what is kept and all of y, with all exponentials and so: 1024 columns 0.81 and 0.85, 2048
  /// 0.78 and 0.82, 8192 0.865 and 0.90, log_softmax 0.84 and 0.905. Floats, which form them once, spill.)
  template <class Threads>
  __device__ bool drops_all(int k, const Threads& threads) const {
    if constexpr (!may_drop_end || vectors <= 2) {
      return false;
    } else {
      return k > 0 && offset(k, threads) + threads.first_of_warp() * width >= end_of_kept;
    }
  }

  __device__ uint4 vector(int k) const {
    return {held[k * pairs], held[k * pairs + 1], held[k * pairs + 2], held[k * pairs + 3]};
  }

  /// Reads what is kept of the row; around it -inf. So many elements behind the row may be read, too.
  template <class Threads>
  __device__ void load(const T* x, index_type may_read_behind, int columns_, int kept,
                       const Threads& threads) {
    read(x, may_read_behind, columns_, kept, threads);
    for_each_outside(columns_ - kept, threads, [&](int k, int i) { drop(k, i); });
  }

  /// Likewise of what a mask keeps, too, whose last value in memory is before `end_of_mask`.
  template <class Threads, class MaskOfRow>
  __device__ void load_masked(const T* x, index_type may_read_behind, int columns_, int kept,
                              const Threads& threads, const MaskOfRow& mask, const bool* end_of_mask) {
    read(x, may_read_behind, columns_, kept, threads);
    const auto drop_outside = [&] {
      for_each_outside(columns_ - kept, threads, [&](int k, int i) { drop(k, i); });
    };
    const int first_column = threads.index * width - before;
    if (mask.column_stride != 1) {
      drop_outside();
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
        if (skips(k, threads)) break;
#pragma unroll
        for (int i = 0; i < width; ++i) {
          const int column = first_column + offset(k, threads) + i;
          if (column >= 0 && column < columns && !mask(column)) drop(k, i);
        }
      }
      return;
    }
    const bool* const at = mask.data + first_column;
    const auto behind = static_cast<int>(reinterpret_cast<std::uintptr_t>(at) % MaskBytes::width);
    const int left_to_read = left - (columns_ - kept);
    const bool* const from = anchored(at - behind);
    // (Bytes of a mask up to its end in memory; where there are more than of the row.)
    const auto in_memory = static_cast<int>(Kokkos::min<std::ptrdiff_t>(end_of_mask - from, 1 << 30));
    if (__all_sync(0xffffffffu, behind == 0)) {
      MaskBytes bytes[vectors];
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
        if (skips(k, threads)) break;
        bytes[k] = {{0, 0}};
        if (left_to_read > offset(k, threads) && in_memory >= offset(k, threads) + width)
          bytes[k] = MaskBytes::read(from + offset(k, threads));
      }
      // Behind the mask's last row lies, as a rule, nothing.
      if (!__all_sync(0xffffffffu, in_memory >= left_to_read + width - 1)) {
#pragma unroll
        for (int k = 0; k < vectors; ++k) {
          if (left_to_read > offset(k, threads) && in_memory < offset(k, threads) + width)
            bytes[k] = MaskBytes::first_of(from + offset(k, threads), in_memory - offset(k, threads));
        }
      }
      drop_outside();
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
        if (skips(k, threads)) break;
        bytes[k].template apply<T>(held + k * pairs);
      }
    } else {
      load_masked_off_boundaries(at, first_column, left_to_read, end_of_mask, threads, drop_outside);
    }
  }

  /// The same, but that vectors with a part of the row may have anything around it.
  template <class Threads>
  __device__ void read(const T* x, index_type may_read_behind, int columns_, int kept,
                       const Threads& threads) {
    columns = columns_;
    if constexpr (!may_drop_end) kept = columns;
    before = anywhere ? static_cast<int>(reinterpret_cast<std::uintptr_t>(x) % 16 / sizeof(T)) : 0;
    left = columns + before - threads.index * width;
    const uint4* const from = anchored(reinterpret_cast<const uint4*>(x - before) + threads.index);
    const uint4 nothing{minus_infinities, minus_infinities, minus_infinities, minus_infinities};
    // Whole vectors are read at the ends, too: before a row lies its allocation, which begins at a boundary,
    // behind it as a rule another row.
    const int end = before + kept, in_last = (end - 1) % width + 1, left_to_read = left - (columns - kept);
    if constexpr (may_drop_end) end_of_kept = Threads::has_neighbours ? redux_max(end) : end;
    const bool whole =
        !anywhere || __all_sync(0xffffffffu, may_read_behind + (columns - kept) >= width - in_last);
    const int least_left = whole ? 1 : width;
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      if (skips(k, threads)) break;
      uint4 vector = nothing;
      if (left_to_read >= offset(k, threads) + least_left) vector = __ldcg(from + k * threads.count);
      keep(k, vector);
    }
    if (!whole && in_last < width) {
      const int last = (end - 1) / width;
      if (last % threads.count == threads.index) {
        const auto* const at = reinterpret_cast<const unsigned short*>(x - before) + last * width;
        uint4 vector = nothing;
        unsigned last_word = 0, word_before = 0;
        if (in_last & 4) {
          const uint2 bits = __ldcg(reinterpret_cast<const uint2*>(at));
          vector.x = bits.x;
          vector.y = bits.y;
        }
        if (in_last & 2) word_before = __ldcg(reinterpret_cast<const unsigned*>(at + (in_last & 4)));
        if (in_last & 1) last_word = __byte_perm(__ldcg(at + in_last - 1), minus_infinities, 0x5410);
        if (in_last & 2) (in_last & 4 ? vector.z : vector.x) = word_before;
        if (in_last & 1) {
          unsigned& word = in_last == 1   ? vector.x
                           : in_last == 3 ? vector.y
                           : in_last == 5 ? vector.z
                                          : vector.w;
          word = last_word;
        }
#pragma unroll
        for (int k = 0; k < vectors; ++k) {
          if (k * threads.count + threads.index == last) keep(k, vector);
        }
      }
    }
  }

  /// Calls `outside`(k, i) for the elements i of vectors k with a part of what is read that are not of it,
  /// the row being read but for so many at its end.
  template <class Threads, class Outside>
  __device__ void for_each_outside(int dropped, const Threads& threads, const Outside& outside) const {
    if constexpr (anywhere || may_drop_end) {
      const int left_to_read = may_drop_end ? left - dropped : left;
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
        if (skips(k, threads)) break;
        if (k == 0 && begins_before_row(k, threads)) {
#pragma unroll
          for (int i = 0; i < width; ++i) {
            if (i < before) outside(k, i);
          }
        }
        const int inside = left_to_read - offset(k, threads);
        if (inside < width && inside > 0) {
#pragma unroll
          for (int i = 1; i < width; ++i) {
            if (i >= inside) outside(k, i);
          }
        }
      }
    }
  }

  /// Writes output(k, i), a pair of results, for the pairs i of vectors k. `dense`: the next row, which has
  /// the next lanes, begins where this one ends.
  template <class Threads, class Output>
  __device__ void store(Out* y, bool exists, bool next_exists, bool dense, const Threads& threads,
                        const Output& output) const {
    if constexpr (is_16_bit_v<Out>) {
      store_16_bits(y, exists, next_exists, dense, threads, output);
    } else {
      store_floats(y, exists, next_exists, dense, threads, output);
    }
  }

 private:
  static constexpr unsigned minus_infinities = PackedPair<T>::minus_infinities;

  /// load_masked where a vector's bytes of the mask, from `at` on, begin anywhere: of the words of 4 bytes
  /// that they lie in three. (One H200, bfloat16 with a mask for all rows, fractions of a copy, by two words
  /// of 8 bytes and so: 129 columns 0.63 and 0.71, 1021 0.59 and 0.70, 4097 0.745 and 0.865, 8191 0.755 and
  /// 0.885, 16381 0.83 and 0.91; with that in each warp which one alone has, the end of the mask, 4097 0.85.)
  template <class Threads, class DropOutside>
  __device__ __forceinline__ void load_masked_off_boundaries(const bool* at, int first_column,
                                                             int left_to_read, const bool* end_of_mask,
                                                             const Threads& threads,
                                                             const DropOutside& drop_outside) {
    constexpr int of_word = 4, words = 3;
    const auto in_word = static_cast<int>(reinterpret_cast<std::uintptr_t>(at) % of_word);
    const bool* const from = anchored(at - in_word);
    // In bytes from there on: up to the last column that is kept, and up to the end of the mask in memory.
    const int to_kept = left_to_read + in_word;
    const auto in_memory = static_cast<int>(Kokkos::min<std::ptrdiff_t>(end_of_mask - from, 1 << 30));
    const int whole = min(to_kept, in_memory - of_word + 1);
    unsigned word[vectors][words];
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      if (skips(k, threads)) break;
#pragma unroll
      for (int i = 0; i < words; ++i) {
        // (Those of the first column at least: before the mask lies, as a rule, nothing.)
        const bool begins = k > 0 || i == words - 1 || first_column - in_word > -(i + 1) * of_word;
        word[k][i] = 0;
        if (begins && whole - offset(k, threads) > i * of_word)
          word[k][i] = __ldg(reinterpret_cast<const unsigned*>(from + offset(k, threads) + i * of_word));
      }
    }
    // Nor behind its last row: of the word that it ends in, the bytes that are there.
    const int last = in_memory / of_word * of_word;
    bool has_last = false;
#pragma unroll
    for (int k = 0; k < vectors; ++k)
      has_last = has_last || static_cast<unsigned>(last - offset(k, threads)) < words * of_word;
    has_last = has_last && last < to_kept;
    if (__any_sync(0xffffffffu, has_last)) {
      unsigned last_word = 0;
#pragma unroll
      for (int i = 0; i < of_word - 1; ++i) {
        if (has_last && last + i < in_memory)
          last_word |= static_cast<unsigned>(reinterpret_cast<const unsigned char*>(from)[last + i]) << 8 * i;
      }
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
#pragma unroll
        for (int i = 0; i < words; ++i) {
          if (has_last && offset(k, threads) + i * of_word == last) word[k][i] = last_word;
        }
      }
    }
    drop_outside();
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      if (skips(k, threads)) break;
      MaskBytes::shifted(word[k][0], word[k][1], word[k][2], in_word).template apply<T>(held + k * pairs);
    }
  }

  template <class Threads, class Output>
  __device__ void store_16_bits(Out* y, bool exists, bool next_exists, bool dense, const Threads& threads,
                                const Output& output) const {
    const auto shift = static_cast<int>(reinterpret_cast<std::uintptr_t>(y) % 16 / sizeof(T));
    if (!anywhere || __all_sync(0xffffffffu, shift == before)) {
      uint4* const to = anchored(reinterpret_cast<uint4*>(y - before) + threads.index);
      const int to_write = exists ? left : 0;
      uint4 head{}, last{};
      int last_step = vectors;
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
        if (skips(k, threads)) break;
        const uint4 vector{output(k, 0), output(k, 1), output(k, 2), output(k, 3)};
        const int inside = to_write - offset(k, threads);
        if (begins_before_row(k, threads)) {
          head = vector;
        } else if (inside >= width) {
          __stcg(to + k * threads.count, vector);
        } else if (anywhere && inside > 0) {
          last = vector;
          last_step = k;
        }
      }
      if constexpr (!anywhere) return;
      // A vector that this row shares with the one before it is written whole, in one piece, by this one.
      bool writes_last = last_step < vectors, shares_first = false;
      if constexpr (Threads::has_neighbours) {
        if (__all_sync(0xffffffffu, dense && columns >= 2 * width)) {
          const int lane = threadIdx.x % 32, first_lane = lane - threads.index;
          const int source = lane_of_last_before_row(first_lane, threads);
          const uint4 previous{
              __shfl_sync(0xffffffffu, last.x, source), __shfl_sync(0xffffffffu, last.y, source),
              __shfl_sync(0xffffffffu, last.z, source), __shfl_sync(0xffffffffu, last.w, source)};
          shares_first = first_lane > 0;
          writes_last = writes_last && (first_lane + threads.count == 32 || !next_exists);
          if (shares_first) head = joined(previous, head, before);
        }
      }
      if (begins_before_row(0, threads))
        store_elements(to, shares_first && exists ? 0 : before, to_write, head);
      if (writes_last)
        store_elements(to + last_step * threads.count, 0, to_write - offset(last_step, threads), last);
    } else {
      uint4* const to = reinterpret_cast<uint4*>(threads.image) + threads.index;
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
        if (skips(k, threads)) break;
        to[k * threads.count] = uint4{output(k, 0), output(k, 1), output(k, 2), output(k, 3)};
      }
      threads.synchronize();
      store_image<16, vectors>(y, reinterpret_cast<const Out*>(threads.image) + before, exists ? columns : 0,
                               threads);
    }
  }

  /// The lane that has the last vector of the row before this one, whose own begin with `first_lane`; of
  /// dense rows.
  template <class Threads>
  __device__ __forceinline__ int lane_of_last_before_row(int first_lane, const Threads& threads) const {
    const int before_previous = (before - columns) & (width - 1);
    const int last_of_previous = (before_previous + columns - 1) / width % threads.count;
    return (first_lane - threads.count + last_of_previous) & 31;
  }

  /// Of floats, a vector of the row being two of memory's: a sector, where rows are dense.
  template <class Threads, class Output>
  __device__ void store_floats(Out* y, bool exists, bool next_exists, bool dense, const Threads& threads,
                               const Output& output) const {
    constexpr int in_16_bytes = 16 / sizeof(Out);
    const auto shift = static_cast<int>(reinterpret_cast<std::uintptr_t>(y) % 16 / sizeof(Out));
    if (!anywhere || __all_sync(0xffffffffu, shift == before % in_16_bytes)) {
      const bool odd = threads.index % 2 != 0;
      float4* const to = anchored(reinterpret_cast<float4*>(y - before) + 2 * threads.index - odd);
      // Of the row, from the first vector of this pair of lanes on.
      const int to_write = exists ? left + (odd ? width : 0) : 0;
      const bool joins =
          anywhere && Threads::has_neighbours && __all_sync(0xffffffffu, dense && columns >= 2 * width);
      const int first_lane = static_cast<int>(threadIdx.x) % 32 - threads.index;
      const bool shares_first = joins && first_lane > 0;
      const bool shares_last = joins && first_lane + threads.count < 32 && next_exists;
      // A vector that this row shares with the one before it is written by this one, as in store_16_bits.
      // (512 MB of bfloat16 to float on one H200, fraction of a copy of softmax, each row its part and so: 33
      // columns 0.59 and 0.83, 47 0.75 and 0.81, 97 0.84 and 0.92, 201 0.93 and 0.97.)
      float last[width] = {};
#pragma unroll
      for (int k = vectors - 1; k >= 0; --k) {
        if (skips(k, threads)) continue;
        float value[width];
#pragma unroll
        for (int i = 0; i < width / 2; ++i) {
          const float2 pair = output(k, i);
          value[2 * i] = pair.x;
          value[2 * i + 1] = pair.y;
        }
        if constexpr (anywhere && Threads::has_neighbours) {
          if (joins) {
            const int inside = left - offset(k, threads);
            if (inside > 0 && inside < width) {
#pragma unroll
              for (int i = 0; i < width; ++i) last[i] = value[i];
            }
            if (k == 0) {
              const int source = lane_of_last_before_row(first_lane, threads);
              const bool takes = threads.index == 0 && shares_first;
#pragma unroll
              for (int i = 0; i < width - 1; ++i) {
                const float previous = __shfl_sync(0xffffffffu, last[i], source);
                if (takes && i < before) value[i] = previous;
              }
            }
          }
        }
        float4 half[2] = {float4{value[0], value[1], value[2], value[3]},
                          float4{value[4], value[5], value[6], value[7]}};
        exchange_halves(half);
        const int inside = to_write - offset(k, threads);
        const int first = anywhere && k == 0 && threads.index < 2 && !shares_first ? before : 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float4* const at = to + 2 * k * threads.count + 2 * i;
          const int column = i * width + odd * in_16_bytes;  // likewise
          if (anywhere && shares_last && inside < (i + 1) * width) continue;
          if (column >= first && column + in_16_bytes <= inside) {
            __stcg(at, half[i]);
          } else if (anywhere && column + in_16_bytes > first && column < inside) {
            store_part(reinterpret_cast<float*>(at), max(first - column, 0),
                       min(inside - column, in_16_bytes), half[i]);
          }
        }
      }
    } else {
      float4* const to = reinterpret_cast<float4*>(threads.image) + 2 * threads.index;
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
        if (skips(k, threads)) break;
        const float2 a = output(k, 0), b = output(k, 1), c = output(k, 2), d = output(k, 3);
        to[2 * k * threads.count] = float4{a.x, a.y, b.x, b.y};
        to[2 * k * threads.count + 1] = float4{c.x, c.y, d.x, d.y};
      }
      threads.synchronize();
      store_image<16, 2 * vectors>(y, reinterpret_cast<const Out*>(threads.image) + before,
                                   exists ? columns : 0, threads);
    }
  }

  /// Elements `first` to `end` of a vector, some but not all of the four.
  __device__ static void store_part(float* to, int first, int end, const float4& vector) {
    const int pair = first == 0 && end >= 2 ? 0 : 2;
    if (first <= pair && end >= pair + 2)
      __stcg(reinterpret_cast<float2*>(to + pair),
             pair == 0 ? float2{vector.x, vector.y} : float2{vector.z, vector.w});
    if (first % 2 != 0) __stcg(to + first, first == 1 ? vector.y : vector.w);
    if (end % 2 != 0) __stcg(to + end - 1, end == 1 ? vector.x : vector.z);
  }

  /// Elements `first` to `end` of a vector: from a boundary on, or up to one, in pieces of 8, 4 and 2 bytes.
  __device__ static void store_elements(uint4* to, int first, int end, const uint4& vector) {
    auto* const elements = reinterpret_cast<unsigned short*>(to);
    if (first == 0 && end >= width) {
      __stcg(to, vector);
    } else if (first == 0) {
      if (end & 4) __stcg(reinterpret_cast<uint2*>(elements), uint2{vector.x, vector.y});
      if (end & 2) __stcg(reinterpret_cast<unsigned*>(elements + (end & 4)), end & 4 ? vector.z : vector.x);
      if (end & 1) {
        const unsigned pair = end & 4 ? (end & 2 ? vector.w : vector.z) : (end & 2 ? vector.y : vector.x);
        __stcg(elements + end - 1, static_cast<unsigned short>(pair));
      }
    } else if (end >= width) {
      const int count = width - first;
      if (count & 4) __stcg(reinterpret_cast<uint2*>(elements + 4), uint2{vector.z, vector.w});
      if (count & 2)
        __stcg(reinterpret_cast<unsigned*>(elements + (count & 4 ? 2 : 6)), count & 4 ? vector.y : vector.w);
      if (count & 1) {
        const unsigned pair =
            count & 4 ? (count & 2 ? vector.x : vector.y) : (count & 2 ? vector.z : vector.w);
        __stcg(elements + first, static_cast<unsigned short>(pair >> 16));
      }
    } else {
      const unsigned pair[pairs] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
      for (int i = 0; i < width; ++i) {
        if (i >= first && i < end)
          __stcg(elements + i, static_cast<unsigned short>(i % 2 ? pair[i / 2] >> 16 : pair[i / 2]));
      }
    }
  }

  template <class Threads>
  __device__ bool begins_before_row(int k, const Threads& threads) const {
    return anywhere && k == 0 && threads.index == 0 && before > 0;
  }
  __device__ void keep(int k, const uint4& vector) {
    held[k * pairs] = vector.x;
    held[k * pairs + 1] = vector.y;
    held[k * pairs + 2] = vector.z;
    held[k * pairs + 3] = vector.w;
  }
  __device__ void drop(int k, int i) {
    unsigned& pair = held[k * pairs + i / 2];
    pair = __byte_perm(pair, minus_infinities, i % 2 ? 0x5410 : 0x3254);
  }
  /// So many elements of the first, the others of the second.
  __device__ static uint4 joined(const uint4& a, const uint4& b, int elements_of_a) {
    const auto pair = [&](int i, unsigned of_a, unsigned of_b) {
      const int n = elements_of_a - 2 * i;
      return __byte_perm(of_a, of_b, n >= 2 ? 0x3210 : n == 1 ? 0x7610 : 0x7654);
    };
    return {pair(0, a.x, b.x), pair(1, a.y, b.y), pair(2, a.z, b.z), pair(3, a.w, b.w)};
  }
};

/// A row of 16 bits by address anywhere, as the logits that a transform makes of it. `looks`: whether it may
/// make anything but -inf of -inf. (A second way through the kernel, for rows without, would take registers.)
template <class T, int vectors_, bool may_drop_end, bool looks>
struct LogitsByAddress {
  using Packed = PackedRow<T, vectors_, true, may_drop_end>;
  static constexpr bool by_address = true;
  static constexpr int vectors = vectors_;
  static constexpr unsigned first_units = 0;  ///< see FixedPointUnits
  static constexpr int width = Packed::width, store_bytes = Packed::store_bytes;
  KOKKOS_FORCEINLINE_FUNCTION static constexpr int image_bytes(int threads) {
    return Packed::image_bytes(threads);
  }
  static constexpr index_type vectors_of_row(index_type columns) { return Packed::vectors_of_row(columns); }
  template <class Operand>
  using NeighboursOf =
      NeighboursInRegisters<std::remove_cvref_t<decltype(*std::declval<Operand>().data)>, width>;

  float held[vectors * width];
  Packed packed;

  template <class Threads>
  __device__ bool skips(int k, const Threads& threads) const {
    return packed.skips(k, threads);
  }
  template <class Threads>
  __device__ bool drops_all(int k, const Threads& threads) const {
    return packed.drops_all(k, threads);
  }

  /// Reads what is kept of a row behind which so many elements may be read, and transforms it. Operands are
  /// read element by element.
  template <class Threads, class TransformRow>
  __device__ void load(const T* x, index_type may_read_behind, int columns, int kept, const Threads& threads,
                       const TransformRow& transform) {
    packed.read(x, may_read_behind, columns, kept, threads);
    if constexpr (transforms_held_logits<TransformRow>) {
      transform_at_once(columns, threads, transform);
    } else {
      const auto at = [&](int first) {
        return map_operands(transform, [&](const auto& operand) {
          return NeighboursOf<decltype(operand)>::elements(operand, first, columns);
        });
      };
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
        if (packed.skips(k, threads)) break;
        float value[width];
        convert(packed.vector(k), value);
        transform_vector(columns, transform, at, first_column(k, threads), value);
        keep(k, value);
      }
    }
    drop_outside(columns - kept, threads);
  }

  /// Transforms the row that `packed` has read, whose operands are in shared memory, with bytes_around them.
  template <class Threads, class TransformRow>
  __device__ void transform_staged(int end, const Threads& threads, const TransformRow& transform) {
    if (__all_sync(0xffffffffu, stage_takes_neighbours<width>(transform, -packed.before))) {
      transform_with<false>(end, threads, transform);
    } else {
      transform_with<true>(end, threads, transform);
    }
    drop_outside(packed.columns - end, threads);
    __syncwarp();  // a warp that has rows alone writes their images in the same place
  }

  /// Writes output(k, i), a pair of results, for the pairs i of vectors k.
  template <class Threads, class Output>
  __device__ void store(T* y, bool exists, bool next_exists, bool dense, const Threads& threads,
                        const Output& output) const {
    packed.store(y, exists, next_exists, dense, threads, output);
  }

 private:
  /// The column of the row that step k begins with; of the row's first vector it may be before the row.
  template <class Threads>
  __device__ int first_column(int k, const Threads& threads) const {
    return threads.index * width - packed.before + Packed::offset(k, threads);
  }
  __device__ static void convert(const uint4& vector, float (&to)[width]) {
    const unsigned pair[width / 2] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < width; ++i)
      to[i] = i % 2 == 0 ? PackedPair<T>::low(pair[i / 2]) : PackedPair<T>::high(pair[i / 2]);
  }
  __device__ void keep(int k, const float (&value)[width]) {
#pragma unroll
    for (int i = 0; i < width; ++i) held[k * width + i] = value[i];
  }
  template <class Threads>
  __device__ void drop_outside(int dropped, const Threads& threads) {
    packed.for_each_outside(dropped, threads,
                            [&](int k, int i) { held[k * width + i] = -infinity_v<float>; });
  }

  template <class Threads, class TransformRow>
  __device__ void transform_at_once(int columns, const Threads& threads, const TransformRow& transform) {
    const auto skips_vector = [&](int k) { return packed.skips(k, threads); };
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      if (skips_vector(k)) break;
      float value[width];
      convert(packed.vector(k), value);
      keep(k, value);
    }
    transform.template transform_held<width>(
        held, HeldColumnsByAddress<decltype(skips_vector)>{
                  first_column(0, threads), Packed::offset(1, threads), columns, skips_vector});
  }

  /// `at`(first): the transform with its operands from there on in registers.
  template <class TransformRow, class At>
  __device__ static void transform_vector(int columns, const TransformRow& transform, const At& at, int first,
                                          float (&value)[width]) {
    if constexpr (takes_any_column<decltype(at(first))>) {
      transform_neighbours<width, looks>(at(first), value, first);
    } else if (first >= 0 && first + width <= columns && stage_takes_neighbours<width>(transform, first)) {
      transform_neighbours<width, looks>(transform, value, first);
    } else {
#pragma unroll
      for (int i = 0; i < width; ++i)
        value[i] = transformed<float, looks>(transform, value[i], min(max(first + i, 0), columns - 1));
    }
  }

  template <bool shifted, class Threads, class TransformRow>
  __device__ void transform_with(int end, const Threads& threads, const TransformRow& transform) {
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      if (packed.skips(k, threads)) break;
      float value[width];
      convert(packed.vector(k), value);
      // Where a thread has nothing of the row, -inf stays -inf with any operand.
      const int first = first_column(k, threads);
      transform_vector(
          packed.columns, transform,
          [&](int column) {
            return map_operands(transform, [&](const auto& operand) {
              return NeighboursOf<decltype(operand)>::template read<shifted>(operand.data, column);
            });
          },
          first < end ? first : -packed.before, value);
      keep(k, value);
    }
  }
};

}  // namespace KokkosSoftmax::impl

#endif
