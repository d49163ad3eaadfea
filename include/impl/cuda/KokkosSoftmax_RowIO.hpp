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
    } else {
      const In* const end = x + columns;
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
        const In* const at = from + k * step;
        if (!aligned || at + width > end) {
          raw.vector[k] = load_words(at, end, (k + 1) * step <= columns);
        } else {
          raw.vector[k] = load_streaming(at);
        }
      }
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
    if (aligned) {
      const bool full = is_full(columns, threads);
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
        if (!full && k * step >= columns) break;
        OutVector out;
        round_outputs(k, output, out);
        if (full || (k + 1) * step <= columns) {
#pragma unroll
          for (int p = 0; p < stores; ++p)
            store_streaming(reinterpret_cast<OutPart*>(y + first + k * step) + p, out.part[p]);
        } else {
#pragma unroll
          for (int p = 0; p < stores; ++p)
            store_clipped(y, first + k * step + p * part_width, columns, bits_as<PartWords>(out.part[p]));
        }
      }
      return;
    }
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      if (k * step >= row_columns) break;
      OutVector out;
      round_outputs(k, output, out);
      auto* to =
          reinterpret_cast<OutPart*>(threads.image + (first + k * step) * static_cast<int>(sizeof(Out)));
#pragma unroll
      for (int p = 0; p < stores; ++p) to[p] = out.part[p];
    }
    threads.synchronize();
    // Parts from the boundary before the row on.
    const int before = shift / static_cast<int>(sizeof(Out));
    const int odd_bytes = sizeof(Out) == 2 ? shift % 4 : 0;
#pragma unroll
    for (int k = 0; k <= vectors; ++k) {
      if (k * step - before >= row_columns) break;  // one step more than there are, if the row fills those
#pragma unroll
      for (int p = 0; p < stores; ++p) {
        // Neighbouring threads have neighbouring parts.
        const int column = k * step - before + (p * threads.count + threads.index) * part_width;
        if (column >= columns) continue;
        const auto* at = reinterpret_cast<const unsigned*>(
            threads.image + column * static_cast<int>(sizeof(Out)) - (odd_bytes ? 2 : 0));
        PartWords words;
        unsigned next = column >= 0 ? at[0] : 0;
#pragma unroll
        for (int i = 0; i < store_bytes / 4; ++i) {
          const unsigned word = next;
          next = 0;
          if (i + 1 < store_bytes / 4 || odd_bytes)
            next = column >= 0 || (i + 1) * 4 >= shift ? at[i + 1] : 0;
          words.word[i] = sizeof(Out) == 2 ? __funnelshift_r(word, next, odd_bytes * 8) : word;
        }
        if (column >= 0 && column + part_width <= columns) {
          store_streaming(reinterpret_cast<OutPart*>(y + column), bits_as<OutPart>(words));
        } else {
          store_clipped(y, column, columns, words);
        }
      }
    }
  }

 private:
  static constexpr int part_width = width / stores;
  struct alignas(store_bytes) PartWords {
    unsigned word[store_bytes / 4];
  };

  /// A vector at any address, or what of it lies before `end`.
  __device__ static InVector load_words(const In* at, const In* end, bool whole) {
    struct alignas(16) Words {
      unsigned word[4];
    } words;
    if constexpr (sizeof(In) == 8) {
      In e[2] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (at + i < end) e[i] = at[i];
      }
      memcpy(&words, e, sizeof(words));
    } else {
      const auto address = reinterpret_cast<std::uintptr_t>(at);
      const bool odd = sizeof(In) == 2 && address % 4 != 0;
      const auto* from = reinterpret_cast<const unsigned*>(address - (odd ? 2 : 0));
      unsigned all[5];
#pragma unroll
      for (int i = 0; i < 5; ++i) {
        all[i] = 0;
        if (i == 4 && !odd) continue;
        if (whole || reinterpret_cast<const In*>(from + i + 1) <= end) {
          all[i] = from[i];
        } else if (sizeof(In) == 2 && reinterpret_cast<const In*>(from + i) < end) {
          all[i] = *reinterpret_cast<const unsigned short*>(from + i);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words.word[i] = sizeof(In) == 2 ? __funnelshift_r(all[i], all[i + 1], odd ? 16 : 0) : all[i];
    }
    return bits_as<InVector>(words);
  }

  /// Writes what of a part lies in the row; its first element has column `first`.
  __device__ static void store_clipped(Out* y, int first, int columns, const PartWords& part) {
    constexpr int of_word = sizeof(Out) < 4 ? 4 / sizeof(Out) : 1;  // elements
    constexpr int words_of_element = sizeof(Out) / 4;
    if constexpr (sizeof(Out) < 4) {
#pragma unroll
      for (int i = 0; i < store_bytes / 4; ++i) {
        const int column = first + i * of_word;
        auto* to = reinterpret_cast<unsigned short*>(y + column);
        const unsigned word = part.word[i];
        if (column >= 0 && column + 1 < columns) {
          *reinterpret_cast<unsigned*>(to) = word;
        } else if (column >= 0 && column < columns) {
          to[0] = static_cast<unsigned short>(word);
        } else if (column + 1 >= 0 && column + 1 < columns) {
          to[1] = static_cast<unsigned short>(word >> 16);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < part_width; ++i) {
        if (first + i >= 0 && first + i < columns)
          memcpy(y + first + i, &part.word[i * words_of_element], sizeof(Out));
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
