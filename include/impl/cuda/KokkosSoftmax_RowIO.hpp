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

template <class In, class Out, int vectors_>
struct RowRegisters {
  using Acc = accumulator_t<In, Out>;
  static constexpr int vectors = vectors_;
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

  Acc value[vectors * width];

  /// Reads and transforms the row; past its end -inf.
  template <int group, class TransformRow>
  __device__ void load(const In* x, index_type columns, const RowThreads<group>& threads,
                       const TransformRow& transform) {
    const bool aligned = __all_sync(0xffffffffu, reinterpret_cast<std::uintptr_t>(x) % 16 == 0);
    InVector raw[vectors];
    if (aligned) {
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
        const int first = (k * threads.count + threads.index) * width;
        if (first + width <= columns) {
          raw[k] = load_streaming(reinterpret_cast<const InVector*>(x + first));
        } else {
#pragma unroll
          for (int i = 0; i < width; ++i)
            raw[k].e[i] = first + i < columns ? x[first + i] : store_as<In>(Acc(0));
        }
      }
    } else {
      const int lane = threads.lane();
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
        const int first = (k * threads.count + threads.index - lane) * width + lane;
#pragma unroll
        for (int i = 0; i < width; ++i) {
          raw[k].e[i] = first + i * group < columns ? x[first + i * group] : store_as<In>(Acc(0));
        }
      }
      In* staging = reinterpret_cast<In*>(threads.staging);
#pragma unroll
      for (int k = 0; k < vectors; ++k) {
#pragma unroll
        for (int i = 0; i < width; ++i) staging[i * group + lane] = raw[k].e[i];
        __syncwarp();
        raw[k] = reinterpret_cast<const InVector*>(threads.staging)[lane];
        __syncwarp();
      }
    }
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      const int first = (k * threads.count + threads.index) * width;
      Acc* v = value + k * width;
      if (first + width <= columns) {
#pragma unroll
        for (int i = 0; i < width; ++i)
          v[i] = transformed<Acc>(transform, load_as<Acc>(raw[k].e[i]), first + i);
      } else {
#pragma unroll
        for (int i = 0; i < width; ++i) {
          v[i] = first + i < columns ? transformed<Acc>(transform, load_as<Acc>(raw[k].e[i]), first + i)
                                     : -infinity_v<Acc>;
        }
      }
    }
  }

  /// Writes the values, rounded, to the row.
  template <int group>
  __device__ void store(Out* y, index_type columns, const RowThreads<group>& threads) const {
    const bool aligned = __all_sync(0xffffffffu, reinterpret_cast<std::uintptr_t>(y) % store_bytes == 0);
    const int lane = threads.lane();
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      const int first = (k * threads.count + threads.index) * width;
      OutVector out;
      convert(value + k * width, out);
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
