// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Rows between global memory and registers: 16-byte vectors where the row is aligned, coalesced scalars
/// turned into vectors in shared memory where it is not. Which thread holds which element depends on the
/// element's index in the row alone, so that results do not depend on alignment.

#ifndef KOKKOSSOFTMAX_ROWIO_HPP
#define KOKKOSSOFTMAX_ROWIO_HPP

#include <KokkosSoftmax_Transforms.hpp>
#include <impl/cuda/KokkosSoftmax_RowMath.hpp>

namespace KokkosSoftmax::impl {

/// The threads that share a row: `count` of them, in groups of `group` consecutive lanes of one warp.
template <int group_>
struct RowThreads {
  static constexpr int group = group_;
  int index;      ///< of this thread in its row
  int count;      ///< threads of the row
  char* staging;  ///< of this group: group * vector elements of the larger scalar, in shared memory

  __device__ int lane() const { return index % group; }
};

/// `packed_`: a row of 16 bits without a transform stays as it is until it is used, in half the registers, so
/// that more rows are under way.
template <class In, class Out, int vectors_, bool packed_>
struct RowRegisters {
  using Acc = accumulator_t<In, Out>;
  static constexpr int vectors = vectors_;
  static constexpr bool packed = packed_;
  static constexpr int width = 16 / sizeof(In);  ///< elements of a vector
  static constexpr int staging_bytes_a_lane = width * (sizeof(In) > sizeof(Out) ? sizeof(In) : sizeof(Out));
  static constexpr int store_bytes = width * sizeof(Out) < 16 ? width * sizeof(Out) : 16;
  static constexpr int stores = width * sizeof(Out) / store_bytes;

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

  /// A thread's part of a row as it lies in memory.
  struct Raw {
    InVector vector[vectors];
  };

  /// Whether every thread has whole vectors: the loops without a look at the end of the row.
  template <int group>
  __device__ static bool is_full(index_type columns, const RowThreads<group>& threads) {
    return columns == threads.count * (vectors * width);
  }

  /// Reads a row that is aligned to 16 bytes; past its end -inf.
  template <int group>
  __device__ static void fetch_aligned(const In* x, index_type columns, const RowThreads<group>& threads,
                                       Raw& raw) {
    if (is_full(columns, threads)) {
      const InVector* from = reinterpret_cast<const InVector*>(x) + threads.index;
#pragma unroll
      for (int k = 0; k < vectors; ++k) raw.vector[k] = load_streaming(from + k * threads.count);
      return;
    }
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      const int first = (k * threads.count + threads.index) * width;
      if (first + width <= columns) {
        raw.vector[k] = load_streaming(reinterpret_cast<const InVector*>(x + first));
      } else {
#pragma unroll
        for (int i = 0; i < width; ++i)
          raw.vector[k].e[i] = first + i < columns ? x[first + i] : store_as<In>(-infinity_v<Acc>);
      }
    }
  }

  /// Reads and transforms the row; past its end -inf.
  template <int group, class TransformRow>
  __device__ void load(const In* x, index_type columns, const RowThreads<group>& threads,
                       const TransformRow& transform) {
    const bool aligned = __all_sync(0xffffffffu, reinterpret_cast<std::uintptr_t>(x) % 16 == 0);
    Raw raw;
    if (aligned) {
      fetch_aligned(x, columns, threads, raw);
    } else {
      const int lane = threads.lane();
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
        const int first = (k * threads.count + threads.index - lane) * width + lane;
#pragma unroll
        for (int i = 0; i < width; ++i) {
          raw.vector[k].e[i] =
              first + i * group < columns ? x[first + i * group] : store_as<In>(-infinity_v<Acc>);
        }
      }
      In* staging = reinterpret_cast<In*>(threads.staging);
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
#pragma unroll
        for (int i = 0; i < width; ++i) staging[i * group + lane] = raw.vector[k].e[i];
        __syncwarp();
        raw.vector[k] = reinterpret_cast<const InVector*>(threads.staging)[lane];
        __syncwarp();
      }
    }
    take(raw, columns, threads, transform);
  }

  /// Transforms what was read.
  template <int group, class TransformRow>
  __device__ void take(const Raw& raw, index_type columns, const RowThreads<group>& threads,
                       const TransformRow& transform) {
    if constexpr (packed) {
      memcpy(held, &raw, sizeof(held));
    } else {
      take_values(raw, columns, threads, transform);
    }
  }

  /// Writes output(value), rounded, to the row.
  template <int group, class Output>
  __device__ void store(Out* y, index_type columns, const RowThreads<group>& threads,
                        const Output& output) const {
    const bool aligned = __all_sync(0xffffffffu, reinterpret_cast<std::uintptr_t>(y) % store_bytes == 0);
    if (aligned && is_full(columns, threads)) {
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
        OutVector out;
        round_outputs(k, output, out);
        OutPart* to = reinterpret_cast<OutPart*>(y + (k * threads.count + threads.index) * width);
#pragma unroll
        for (int p = 0; p < stores; ++p) store_streaming(to + p, out.part[p]);
      }
      return;
    }
    const int lane = threads.lane();
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      const int first = (k * threads.count + threads.index) * width;
      OutVector out;
      round_outputs(k, output, out);
      if (aligned) {
        if (first + width <= columns) {
#pragma unroll
          for (int p = 0; p < stores; ++p)
            store_streaming(reinterpret_cast<OutPart*>(y + first) + p, out.part[p]);
        } else {
#pragma unroll
          for (int i = 0; i < width; ++i) {
            if (first + i < columns) y[first + i] = out.part[i / (width / stores)].e[i % (width / stores)];
          }
        }
      } else {
#pragma unroll
        for (int p = 0; p < stores; ++p)
          reinterpret_cast<OutPart*>(threads.staging)[lane * stores + p] = out.part[p];
        __syncwarp();
        const Out* staging = reinterpret_cast<const Out*>(threads.staging);
        const int start = first - lane * width + lane;
#pragma unroll
        for (int i = 0; i < width; ++i) {
          if (start + i * group < columns) y[start + i * group] = staging[i * group + lane];
        }
        __syncwarp();
      }
    }
  }

 private:
  template <int group, class TransformRow>
  __device__ void take_values(const Raw& raw, index_type columns, const RowThreads<group>& threads,
                              const TransformRow& transform) {
    if (is_full(columns, threads) && stage_takes_neighbours(transform)) {
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
        Acc part[width];
#pragma unroll
        for (int i = 0; i < width; ++i) part[i] = load_as<Acc>(raw.vector[k].e[i]);
        transform_neighbours<width>(transform, part, (k * threads.count + threads.index) * width);
#pragma unroll
        for (int i = 0; i < width; ++i) held[k * width + i] = part[i];
      }
      return;
    }
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      const int first = (k * threads.count + threads.index) * width;
      Acc* v = held + k * width;
#pragma unroll
      for (int i = 0; i < width; ++i) {
        v[i] = first + i < columns ? transformed<Acc>(transform, load_as<Acc>(raw.vector[k].e[i]), first + i)
                                   : -infinity_v<Acc>;
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
  __device__ static InVector load_streaming(const InVector* p) {
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
