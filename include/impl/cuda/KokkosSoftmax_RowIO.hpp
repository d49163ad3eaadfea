// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Rows between global memory and registers: 16-byte vectors where the row is aligned, coalesced scalars
/// turned into vectors in shared memory where it is not. Which thread holds which element depends on the
/// element's index in the row alone, so that results do not depend on alignment.

#ifndef KOKKOSSOFTMAX_ROWIO_HPP
#define KOKKOSSOFTMAX_ROWIO_HPP

#include <KokkosSoftmax_Transforms.hpp>
#include <impl/cuda/KokkosSoftmax_CudaRuntime.hpp>
#include <impl/cuda/KokkosSoftmax_Ptx.hpp>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <string>

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

  /// A thread's part of a row as it lies in memory.
  struct Raw {
    InVector vector[vectors];
  };

  /// Reads a row that is aligned to 16 bytes; past its end 0.
  template <int group>
  __device__ static void fetch_aligned(const In* x, index_type columns, const RowThreads<group>& threads,
                                       Raw& raw) {
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      const int first = (k * threads.count + threads.index) * width;
      if (first + width <= columns) {
        raw.vector[k] = load_streaming(reinterpret_cast<const InVector*>(x + first));
      } else {
#pragma unroll
        for (int i = 0; i < width; ++i)
          raw.vector[k].e[i] = first + i < columns ? x[first + i] : store_as<In>(Acc(0));
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
          raw.vector[k].e[i] = first + i * group < columns ? x[first + i * group] : store_as<In>(Acc(0));
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
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      const int first = (k * threads.count + threads.index) * width;
      Acc* v = value + k * width;
      if (first + width <= columns) {
        Acc part[width];
#pragma unroll
        for (int i = 0; i < width; ++i) part[i] = load_as<Acc>(raw.vector[k].e[i]);
        transform_neighbours<width>(transform, part, first);
#pragma unroll
        for (int i = 0; i < width; ++i) v[i] = part[i];
      } else {
#pragma unroll
        for (int i = 0; i < width; ++i) {
          v[i] = first + i < columns
                     ? transformed<Acc>(transform, load_as<Acc>(raw.vector[k].e[i]), first + i)
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
        if constexpr (std::is_same_v<Out, bhalf_t>) {
          words[i / 2] = bits_as<unsigned>(__floats2bfloat162_rn(v[i], v[i + 1]));
        } else {
          words[i / 2] = bits_as<unsigned>(__floats2half2_rn(v[i], v[i + 1]));
        }
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

/// exp of a difference to the maximum, as exact as the output can show: 16 bits need no correction of the
/// product with log2(e).
template <class Out, class Acc>
__device__ Acc exp_for_output(Acc difference) {
  if constexpr (is_16_bit_v<Out>) {
    return ex2_approx_ftz(difference * 1.4426950408889634f);
  } else {
    return exp_of_difference(difference);
  }
}

/// A sum across threads that keeps what rounding would take: double for float, a compensated pair for double.
template <class Acc>
struct ExactSum;

template <>
struct ExactSum<float> {
  double sum;
  __device__ static ExactSum of(float term) { return {term}; }
  __device__ void join(const ExactSum& other) { sum += other.sum; }
  __device__ ExactSum from_lane_xor(int mask) const { return {__shfl_xor_sync(0xffffffffu, sum, mask)}; }
  __device__ float rounded() const { return static_cast<float>(sum); }
};

template <>
struct ExactSum<double> {
  double sum, low;
  __device__ static ExactSum of(double term) { return {term, 0}; }
  __device__ void join(const ExactSum& other) {
    const double total = sum + other.sum;
    const double part = total - sum;
    low += other.low + ((sum - (total - part)) + (other.sum - part));
    sum = total;
  }
  __device__ ExactSum from_lane_xor(int mask) const {
    return {__shfl_xor_sync(0xffffffffu, sum, mask), __shfl_xor_sync(0xffffffffu, low, mask)};
  }
  __device__ double rounded() const { return low == low ? sum + low : sum; }
};

/// A kernel launch that Kokkos Tools see under the library's label.
template <class Launch>
void launch_labelled(const Kokkos::Cuda& exec, const std::string& label, const Launch& launch) {
  std::uint64_t id = 0;
  const bool watched = Kokkos::Tools::profileLibraryLoaded();
  if (watched) Kokkos::Tools::beginParallelFor(label, Kokkos::Tools::Experimental::device_id(exec), &id);
  launch();
  check_cuda(cudaPeekAtLastError(), label.c_str());
  if (watched) Kokkos::Tools::endParallelFor(id);
}

}  // namespace KokkosSoftmax::impl

#endif
