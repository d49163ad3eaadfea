// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Rows between global memory and registers. Aligned rows in vectors of 16 bytes. Others are read in words of
/// 4 bytes, which costs L1 more accesses but memory nothing, and written by way of an image of the row in
/// shared memory, from which threads take what lies between the boundaries of 16 bytes of global memory.
/// Which thread holds which element depends on the element's index in the row alone, so that results do not
/// depend on alignment.

#ifndef KOKKOSSOFTMAX_ROWIO_HPP
#define KOKKOSSOFTMAX_ROWIO_HPP

#include <KokkosSoftmax_Transforms.hpp>
#include <impl/cuda/KokkosSoftmax_RowMath.hpp>

namespace KokkosSoftmax::impl {

/// A part of a warp, or a warp, that has a row: neighbouring lanes. Vector number k * count + index of the
/// row is step k of the thread with that index.
template <int lanes>
struct LanesOfRow {
  static constexpr int count = lanes;
  int index;    ///< of this thread in its row
  char* image;  ///< of the row in shared memory: RowRegisters::image_bytes(count), where y is not aligned

  __device__ void synchronize() const { __syncwarp(); }
};

/// Likewise a block.
struct BlockOfRow {
  int index, count;
  char* image;

  __device__ void synchronize() const { __syncthreads(); }
};

/// `packed_`: a row of 16 bits without a transform stays as it is until it is used, in half the registers, so
/// that more rows are under way.
template <class In, class Out, int vectors_, bool packed_>
struct RowRegisters {
  using Acc = accumulator_t<In, Out>;
  static constexpr int vectors = vectors_;
  static constexpr bool packed = packed_;
  static constexpr int width = 16 / sizeof(In);  ///< elements of a vector
  static constexpr int store_bytes = width * sizeof(Out) < 16 ? width * sizeof(Out) : 16;
  static constexpr int stores = width * sizeof(Out) / store_bytes;
  /// Where accesses of 16 bytes of several images fall on the same banks, half of them do not.
  static constexpr int image_padding = 64;
  KOKKOS_FORCEINLINE_FUNCTION static constexpr int image_bytes(int threads) {
    return threads * vectors * width * static_cast<int>(sizeof(Out)) + image_padding;
  }

  struct alignas(16) InVector {
    In e[width];
  };
  struct alignas(store_bytes) OutPart {
    Out e[width / stores];
  };
  struct alignas(store_bytes) OutVector {
    OutPart part[stores];
  };

  static constexpr int count = vectors * width;
  std::conditional_t<packed, unsigned, Acc> held[packed ? count / 2 : count];

  __device__ Acc value(int i) const {
    if constexpr (packed) {
      return i % 2 ? PackedPair<In>::high(held[i / 2]) : PackedPair<In>::low(held[i / 2]);
    } else {
      return held[i];
    }
  }

  /// Keeps the compiler from remembering what it made of packed values: that would take the registers that
  /// packing spares.
  __device__ void hide_from_optimizer() {
#pragma unroll
    for (auto& word : held) asm volatile("" : "+r"(word));
  }

  /// Whether no thread has anything of the row in step k. (Rows of many vectors a thread have at least the
  /// first five of eight, which are left to the compiler to interleave.)
  template <class Threads>
  __device__ static bool skips(int k, int columns, const Threads& threads) {
    return vectors > 5 && k >= 5 && k * threads.count * width >= columns;
  }

  /// A thread's part of a row as it lies in memory.
  struct Raw {
    InVector vector[vectors];
  };

  /// Whether every thread has whole vectors: the loops without a look at the end of the row.
  template <class Threads>
  __device__ static bool is_full(index_type columns, const Threads& threads) {
    return columns == threads.count * (vectors * width);
  }

  /// Reads and transforms the row; past its end -inf.
  template <class Threads, class TransformRow>
  __device__ void load(const In* x, index_type columns, const Threads& threads,
                       const TransformRow& transform) {
    const bool aligned = __all_sync(0xffffffffu, reinterpret_cast<std::uintptr_t>(x) % 16 == 0);
    const In* const from = x + threads.index * width;
    const int step = threads.count * width;
    Raw raw;
    if (aligned && is_full(columns, threads)) {
#pragma unroll
      for (int k = 0; k < vectors; ++k) raw.vector[k] = load_streaming(from + k * step);
    } else if (aligned) {
      const int vectors_before_end = static_cast<int>(columns) / width;
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
        raw.vector[k] = InVector{};
        if (k * threads.count + threads.index < vectors_before_end)
          raw.vector[k] = load_streaming(from + k * step);
      }
      if (vectors_before_end * width < columns) {
        const Words words = load_words(x + vectors_before_end * width, x + columns, false);
        const InVector last = vector_of(words, false);
#pragma unroll
        for (int k = 0; k < vectors; ++k) {
          if (k * threads.count + threads.index == vectors_before_end) raw.vector[k] = last;
        }
      }
    } else {
      // All loads before the first use, so that they are under way together.
      const bool odd = sizeof(In) == 2 && reinterpret_cast<std::uintptr_t>(x) % 4 != 0;
      Words words[vectors];
#pragma unroll
      for (int k = 0; k < vectors; ++k)
        words[k] = load_words(from + k * step, x + columns, (k + 1) * step <= columns);
#pragma unroll
      for (int k = 0; k < vectors; ++k) raw.vector[k] = vector_of(words[k], odd);
    }
    take(raw, columns, threads, transform);
  }

  /// Writes output(value), rounded, to the row; of one that does not `exist` nothing.
  template <class Threads, class Output>
  __device__ void store(Out* y, index_type row_columns, bool exists, const Threads& threads,
                        const Output& output) const {
    const auto shift = static_cast<int>(reinterpret_cast<std::uintptr_t>(y) % store_bytes);
    const bool aligned = __all_sync(0xffffffffu, shift == 0);
    const int step = threads.count * width, first = threads.index * width;
    const int columns = exists ? static_cast<int>(row_columns) : 0;
    if (aligned && is_full(columns, threads)) {
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
        OutVector out;
        round_outputs(k, output, out);
#pragma unroll
        for (int p = 0; p < stores; ++p)
          store_streaming(reinterpret_cast<OutPart*>(y + first + k * step) + p, out.part[p]);
      }
    } else if (aligned) {
      OutVector last{};
      int last_column = columns;
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
        if (k * step >= columns) break;
        OutVector out;
        round_outputs(k, output, out);
        const int column = first + k * step;
        if (column + width <= columns) {
#pragma unroll
          for (int p = 0; p < stores; ++p)
            store_streaming(reinterpret_cast<OutPart*>(y + column) + p, out.part[p]);
        } else if (column < columns) {
          last = out;
          last_column = column;
        }
      }
      if (last_column < columns) {
#pragma unroll
        for (int i = 0; i < width - 1; ++i) {
          if (last_column + i < columns) y[last_column + i] = last.part[i / part_width].e[i % part_width];
        }
      }
    } else {
      store_by_image(y, shift, static_cast<int>(row_columns), columns, threads, output);
    }
  }

 private:
  static constexpr int part_width = width / stores;
  struct alignas(store_bytes) PartWords {
    unsigned word[store_bytes / 4];
  };

  /// The words of 4 bytes that a vector at any address lies in. The fifth is needed for 16 bits off a
  /// boundary.
  struct Words {
    unsigned word[5];
  };

  /// What of them lies before `end`.
  __device__ static Words load_words(const In* at, const In* end, bool whole) {
    Words words{};
    const auto address = reinterpret_cast<std::uintptr_t>(at);
    const bool odd = sizeof(In) == 2 && address % 4 != 0;
    const auto* from = reinterpret_cast<const unsigned*>(address - (odd ? 2 : 0));
    if (whole) {
#pragma unroll
      for (int i = 0; i < 4; ++i) words.word[i] = from[i];
      if (odd) words.word[4] = *reinterpret_cast<const unsigned short*>(from + 4);
    } else {
      const auto left =
          static_cast<int>(reinterpret_cast<const char*>(end) - reinterpret_cast<const char*>(from));
#pragma unroll
      for (int i = 0; i < (sizeof(In) == 2 ? 5 : 4); ++i) {
        if (i * 4 + 4 <= left && (i < 4 || odd)) {
          words.word[i] = from[i];
        } else if (sizeof(In) == 2 && i * 4 + 2 <= left) {
          words.word[i] = *reinterpret_cast<const unsigned short*>(from + i);
        }
      }
    }
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

  /// Of a row `shift` bytes behind a boundary. `columns` of it are written: all, or none.
  template <class Threads, class Output>
  __device__ void store_by_image(Out* y, int shift, int row_columns, int columns, const Threads& threads,
                                 const Output& output) const {
    const int step = threads.count * width;
    char* const image = threads.image;
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      if (k * step >= row_columns) break;
      OutVector out;
      round_outputs(k, output, out);
      auto* to = reinterpret_cast<OutPart*>(image) + (threads.index + k * threads.count) * stores;
#pragma unroll
      for (int p = 0; p < stores; ++p) to[p] = out.part[p];
    }
    threads.synchronize();
    // The ends, fewer elements than a part each.
    constexpr int bytes = sizeof(Out);
    const int head = shift == 0 ? 0 : min((store_bytes - shift) / bytes, columns);
    const int parts = (columns - head) / part_width;
    const Out* const elements = reinterpret_cast<const Out*>(image);
    for (int c = threads.index; c < head; c += threads.count) y[c] = elements[c];
    for (int c = head + parts * part_width + threads.index; c < columns; c += threads.count)
      y[c] = elements[c];
    // The parts between the boundaries, a few at once, so that their loads are under way together.
    const bool odd = bytes == 2 && head % 2 != 0;
    const auto* from = reinterpret_cast<const unsigned*>(image + head * bytes - (odd ? 2 : 0));
    OutPart* const to = reinterpret_cast<OutPart*>(y + head);
    constexpr int words = store_bytes / 4, steps = vectors * stores, at_once = steps < 4 ? steps : 4;
#pragma unroll
    for (int first = 0; first < steps; first += at_once) {
      if (first * threads.count >= parts) break;
      unsigned word[at_once][words + 1];
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        const int part = (first + k) * threads.count + threads.index;
        // (Past the last part lies what was there before, or the padding.)
        const unsigned* at = from + (part < parts ? part * words : 0);
#pragma unroll
        for (int i = 0; i < words; ++i) word[k][i] = at[i];
        word[k][words] = odd ? at[words] : 0;
      }
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        const int part = (first + k) * threads.count + threads.index;
        PartWords shifted;
#pragma unroll
        for (int i = 0; i < words; ++i) {
          shifted.word[i] =
              bytes == 2 ? __funnelshift_r(word[k][i], word[k][i + 1], odd ? 16 : 0) : word[k][i];
        }
        if (part < parts) store_streaming(to + part, bits_as<OutPart>(shifted));
      }
    }
  }

  /// Transforms what was read.
  template <class Threads, class TransformRow>
  __device__ void take(const Raw& raw, index_type columns, const Threads& threads,
                       const TransformRow& transform) {
    const int step = threads.count * width;
    constexpr bool is_identity = std::is_same_v<TransformRow, BoundIdentity::Row>;
    [[maybe_unused]] const bool takes_neighbours = stage_takes_neighbours(transform);
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      const int first = k * step + threads.index * width;
      const bool whole_step = (k + 1) * step <= columns;
      if constexpr (packed) {
        memcpy(held + k * width / 2, &raw.vector[k], 16);
        if (!whole_step && first + width > columns) {
#pragma unroll
          for (int i = 0; i < width; i += 2) {
            unsigned& pair = held[(k * width + i) / 2];
            constexpr unsigned nothing = PackedPair<In>::minus_infinities;
            pair = first + i + 1 < columns ? pair
                   : first + i < columns   ? (pair & 0xffffu) | (nothing & 0xffff0000u)
                                           : nothing;
          }
        }
      } else {
        Acc part[width];
#pragma unroll
        for (int i = 0; i < width; ++i) part[i] = load_as<Acc>(raw.vector[k].e[i]);
        if constexpr (is_identity) {
          if (!whole_step && first + width > columns) {
#pragma unroll
            for (int i = 0; i < width; ++i) part[i] = first + i < columns ? part[i] : -infinity_v<Acc>;
          }
        } else if (whole_step && takes_neighbours) {
          transform_neighbours<width>(transform, part, first);
        } else {
#pragma unroll
          for (int i = 0; i < width; ++i)
            part[i] =
                first + i < columns ? transformed<Acc>(transform, part[i], first + i) : -infinity_v<Acc>;
        }
#pragma unroll
        for (int i = 0; i < width; ++i) held[k * width + i] = part[i];
      }
    }
  }

  template <class Output>
  __device__ void round_outputs(int k, const Output& output, OutVector& out) const {
    Acc v[width];
#pragma unroll
    for (int i = 0; i < width; ++i) v[i] = output(value(k * width + i));
    convert(v, out);
  }

  /// Rounds a vector; 16-bit scalars in pairs, one instruction each.
  __device__ static void convert(const Acc* v, OutVector& out) {
    if constexpr (is_16_bit_v<Out> && std::is_same_v<Acc, float>) {
      unsigned words[width / 2];
#pragma unroll
      for (int i = 0; i < width; i += 2) {
        words[i / 2] = rounded_pair<Out>(v[i], v[i + 1]);
      }
      memcpy(&out, words, sizeof(out));
    } else {
#pragma unroll
      for (int i = 0; i < width; ++i)
        out.part[i / (width / stores)].e[i % (width / stores)] = store_as<Out>(v[i]);
    }
  }

  // Evict-first: a row is read and written once.
  __device__ static InVector load_streaming(const In* p) {
    const uint4 bits = __ldcs(reinterpret_cast<const uint4*>(p));
    return bits_as<InVector>(bits);
  }
  __device__ static void store_streaming(OutPart* p, const OutPart& v) {
    if constexpr (store_bytes == 16) {
      __stcs(reinterpret_cast<uint4*>(p), bits_as<uint4>(v));
    } else if constexpr (store_bytes == 8) {
      __stcs(reinterpret_cast<uint2*>(p), bits_as<uint2>(v));
    } else {
      __stcs(reinterpret_cast<unsigned*>(p), bits_as<unsigned>(v));
    }
  }
};

}  // namespace KokkosSoftmax::impl

#endif
