// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

// The kernels behind KokkosSoftmax_SplitGemm.hpp, where the arithmetic is explained.

#include <impl/cuda/KokkosSoftmax_HopperPtx.hpp>
#include <impl/cuda/KokkosSoftmax_SplitGemm.hpp>

#include <cuda_fp16.h>
#include <cudaTypedefs.h>

#include <algorithm>
#include <atomic>
#include <new>

// The kernels' bodies exist where wgmma does; elsewhere split_gemm_is_there() says no.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define KOKKOSSOFTMAX_HAS_WGMMA
#endif

namespace KokkosSoftmax::impl {
namespace {

constexpr std::uint32_t infinity_bits = 0x7f800000u;
/// A quiet NaN that no instruction produces.
constexpr std::uint32_t mark_bits = 0x7fd5c0deu;
constexpr float low_scale = 2048, low_unscale = 1.0f / 2048;
constexpr float smallest_kept = 1.0f / 8192;

__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float(static_cast<std::uint32_t>(exponent + 127) << 23);
}

// ---- The split
// -------------------------------------------------------------------------------------------------------

/// The scale of a row, as two factors, because 2^163 (a row of the smallest subnormal) is not a float.
struct RowScale {
  float first = 1, second = 1, unscale_first = 1, unscale_second = 1;
  bool finite;

  __device__ explicit RowScale(std::uint32_t magnitude) : finite(magnitude < infinity_bits) {
    if (magnitude == 0 || !finite) return;
    const int exponent = magnitude >= 0x00800000u ? static_cast<int>(magnitude >> 23) - 127
                                                  : -118 - __clz(static_cast<int>(magnitude));
    const int shift = 14 - exponent, half = shift >> 1;
    first = power_of_two(half);
    second = power_of_two(shift - half);
    unscale_first = power_of_two(-half);
    unscale_second = power_of_two(half - shift);
  }
};

/// Two elements as their halves; counts those that are kept with less than 2^-23 relative.
struct HalvesOfTwo {
  __half2 high, low;

  __device__ __forceinline__ HalvesOfTwo(float a, float b, const RowScale& scale, int& lossy) {
    const float p = a * scale.first * scale.second, q = b * scale.first * scale.second;
    high = __floats2half2_rn(p, q);
    const float2 h = __half22float2(high);
    low = __floats2half2_rn((p - h.x) * low_scale, (q - h.y) * low_scale);
    // Small ones are rare: the comparison with what the halves give back is off the usual path.
    if (fabsf(p) < smallest_kept || fabsf(q) < smallest_kept) {
      const float2 l = __half22float2(low);
      lossy += fabsf(p) < smallest_kept && is_lossy(a, h.x, l.x, scale);
      lossy += fabsf(q) < smallest_kept && is_lossy(b, h.y, l.y, scale);
    }
  }

 private:
  static __device__ __forceinline__ bool is_lossy(float value, float h, float l, const RowScale& scale) {
    return fmaf(l, low_unscale, h) * scale.unscale_first * scale.unscale_second != value;
  }
};

/// Eight elements of a row, which are all or in part there.
struct Eight {
  float v[8];

  template <bool aligned>
  __device__ __forceinline__ void load(const float* row, std::int64_t column, std::int64_t columns) {
    if (aligned && column + 8 <= columns) {
      const float4 a = __ldg(reinterpret_cast<const float4*>(row + column)),
                   b = __ldg(reinterpret_cast<const float4*>(row + column) + 1);
      v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = column + i < columns ? __ldg(row + column + i) : 0.0f;
    }
  }

  __device__ __forceinline__ std::uint32_t magnitude() const {
    std::uint32_t m = 0;  // magnitudes order as their bits, infinity and NaN last
#pragma unroll
    for (int i = 0; i < 8; ++i) m = max(m, __float_as_uint(v[i]) & 0x7fffffffu);
    return m;
  }

  /// A row that is not finite is left to float_gemm: its halves are zeros.
  __device__ __forceinline__ int store(std::uint16_t* high, std::uint16_t* low, const RowScale& scale) const {
    int lossy = 0;
    __half2 h[4], l[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const HalvesOfTwo two(scale.finite ? v[2 * i] : 0.0f, scale.finite ? v[2 * i + 1] : 0.0f, scale, lossy);
      h[i] = two.high;
      l[i] = two.low;
    }
    *reinterpret_cast<uint4*>(high) = *reinterpret_cast<const uint4*>(h);
    *reinterpret_cast<uint4*>(low) = *reinterpret_cast<const uint4*>(l);
    return lossy;
  }
};

struct SplitTarget {
  std::uint16_t* high;
  std::uint16_t* low;
  std::int64_t leading;
  SplitRow* row;
  unsigned char* flags;
  std::size_t flag_count;

  SplitTarget(const SplitMatrix& m, unsigned char* flags_, std::size_t count)
      : high(m.halves),
        low(m.halves + m.rows * m.leading()),
        leading(m.leading()),
        row(m.row),
        flags(flags_),
        flag_count(count) {}

  __device__ __forceinline__ void clear_flags() const {
    for (std::size_t i = blockIdx.x * std::size_t(blockDim.x) + threadIdx.x; i < flag_count;
         i += std::size_t(gridDim.x) * blockDim.x) {
      flags[i] = 0;
    }
  }
};

constexpr int split_threads = 256, split_vectors = 4, split_pass = split_threads * split_vectors * 8;

/// A block a row whose columns are neighbours. Rows of up to split_pass elements stay in registers between
/// the two passes, longer ones are read again (from L2).
template <bool aligned, bool resident>
__global__ void __launch_bounds__(split_threads) split_rows_kernel(StridedFloats from, SplitTarget to) {
  to.clear_flags();
  const std::int64_t row = blockIdx.x;
  const float* x = from.data + row * from.row_stride;
  __shared__ std::uint32_t magnitudes[split_threads / 32];
  __shared__ int lossy_in_all;
  if (threadIdx.x == 0) lossy_in_all = 0;
  Eight part[split_vectors];
  const auto column_of = [&](std::int64_t pass, int i) {
    return pass + (static_cast<std::int64_t>(i) * split_threads + threadIdx.x) * 8;
  };
  const auto load = [&](std::int64_t pass) {
#pragma unroll
    for (int i = 0; i < split_vectors; ++i) part[i].load<aligned>(x, column_of(pass, i), from.columns);
  };
  const std::int64_t end = resident ? 1 : from.columns;
  std::uint32_t magnitude = 0;
  for (std::int64_t pass = 0; pass < end; pass += split_pass) {
    load(pass);
#pragma unroll
    for (int i = 0; i < split_vectors; ++i) magnitude = max(magnitude, part[i].magnitude());
  }
  magnitude = __reduce_max_sync(0xffffffffu, magnitude);
  if (threadIdx.x % 32 == 0) magnitudes[threadIdx.x / 32] = magnitude;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < split_threads / 32; ++i) magnitude = max(magnitude, magnitudes[i]);
  const RowScale scale(magnitude);
  int lossy = 0;
  for (std::int64_t pass = 0; pass < end; pass += split_pass) {
    if (!resident) load(pass);
#pragma unroll
    for (int i = 0; i < split_vectors; ++i) {
      const std::int64_t column = column_of(pass, i);
      if (column < from.columns) {
        const std::int64_t at = row * to.leading + column;
        lossy += part[i].store(to.high + at, to.low + at, scale);
      }
    }
  }
  lossy = __reduce_add_sync(0xffffffffu, lossy);
  if (threadIdx.x % 32 == 0 && lossy > 0) atomicAdd(&lossy_in_all, lossy);
  __syncthreads();
  if (threadIdx.x == 0) {
    to.row[row] = {scale.unscale_first, scale.unscale_second,
                   scale.finite ? static_cast<float>(lossy_in_all) : __uint_as_float(infinity_bits),
                   magnitude};
  }
}

constexpr int strided_rows = 32, strided_columns = 64;

/// The largest magnitudes of rows whose columns are not neighbours; SplitRow was cleared.
__global__ void __launch_bounds__(256)
    strided_magnitude_kernel(StridedFloats from, SplitTarget to, std::int64_t row_tiles, std::int64_t chunk) {
  to.clear_flags();
  const std::int64_t tile = blockIdx.x;
  const std::int64_t row = tile % row_tiles * strided_rows + threadIdx.x % strided_rows;
  const std::int64_t first = tile / row_tiles * chunk, end = min(from.columns, first + chunk);
  if (row >= from.rows) return;
  std::uint32_t magnitude = 0;
  for (std::int64_t k = first + threadIdx.x / strided_rows; k < end; k += 256 / strided_rows) {
    magnitude =
        max(magnitude,
            __float_as_uint(__ldg(from.data + row * from.row_stride + k * from.column_stride)) & 0x7fffffffu);
  }
  if (magnitude > 0) atomicMax(&to.row[row].magnitude, magnitude);
}

/// Splits and transposes tiles of 32 rows and 64 columns.
__global__ void __launch_bounds__(256)
    strided_split_kernel(StridedFloats from, SplitTarget to, std::int64_t row_tiles) {
  __shared__ float tile[strided_columns][strided_rows + 1];
  const std::int64_t first_row = blockIdx.x % row_tiles * strided_rows;
  const std::int64_t first_column = blockIdx.x / row_tiles * strided_columns;
  for (int i = threadIdx.x; i < strided_rows * strided_columns; i += 256) {
    const std::int64_t row = first_row + i % strided_rows, column = first_column + i / strided_rows;
    tile[i / strided_rows][i % strided_rows] =
        row < from.rows && column < from.columns
            ? __ldg(from.data + row * from.row_stride + column * from.column_stride)
            : 0.0f;
  }
  __syncthreads();
  const int r = threadIdx.x / 8, c = threadIdx.x % 8 * 8;
  const std::int64_t row = first_row + r, column = first_column + c;
  if (row >= from.rows) return;
  SplitRow& info = to.row[row];
  const RowScale scale(info.magnitude);
  Eight part;
#pragma unroll
  for (int i = 0; i < 8; ++i) part.v[i] = tile[c + i][r];
  if (column < from.columns) {
    const std::int64_t at = row * to.leading + column;
    const int lossy = part.store(to.high + at, to.low + at, scale);
    if (lossy > 0) atomicAdd(&info.lossy, static_cast<float>(lossy));
  }
  if (column == 0) {
    info.unscale_first = scale.unscale_first;
    info.unscale_second = scale.unscale_second;
    if (!scale.finite) atomicAdd(&info.lossy, __uint_as_float(infinity_bits));
  }
}

// ---- The product
// -----------------------------------------------------------------------------------------------------

constexpr int left_rows = 128, step_columns = 64, consumers = 2;
constexpr int gemm_threads = 128 * (consumers + 1);
/// A multiprocessor's shared memory, less what the system keeps.
constexpr int shared_bytes_of_block = 227 * 1024;

/// Both operands' tiles of one K step, of the high or of the low halves, are one slot of a ring.
template <int width>
struct Ring {
  static constexpr std::uint32_t row_bytes = step_columns * 2;
  static constexpr std::uint32_t left_bytes = left_rows * row_bytes, bytes = left_bytes + width * row_bytes;
  static constexpr int slots = std::min<int>(12, (shared_bytes_of_block - 1024 - 256) / bytes);
  static constexpr int shared_bytes = 1024 + slots * (bytes + 16);

  std::uint32_t base;
  int slot = 0;
  std::uint32_t phase = 0;

  __device__ explicit Ring(const void* shared) : base((shared_address(shared) + 1023) & ~1023u) {}

  __device__ std::uint32_t left() const { return base + slot * bytes; }
  __device__ std::uint32_t right() const { return left() + left_bytes; }
  __device__ std::uint32_t full(int i) const { return base + slots * bytes + i * 8; }
  __device__ std::uint32_t free(int i) const { return full(slots + i); }
  __device__ void advance() {
    if (++slot == slots) {
      slot = 0;
      phase ^= 1;
    }
  }
};

struct GemmArguments {
  std::int64_t left_extent, right_extent;
  int steps;
  bool w_is_left, result_in_pairs;
  const SplitRow* left;
  const SplitRow* right;
  float* result;
  std::int64_t left_stride, right_stride;
  unsigned char* flags;
  std::int64_t flags_a_row;

  /// Groups of 16 left tiles: what runs at one time shares few panels of both operands in L2.
  struct Tile {
    std::int64_t left, right;
  };
  __device__ __forceinline__ Tile tile(std::int64_t t, std::int64_t left_tiles,
                                       std::int64_t right_tiles) const {
    constexpr std::int64_t group = 16;
    const std::int64_t g = t / (group * right_tiles), first = g * group;
    const std::int64_t in_group = left_tiles - first < group ? left_tiles - first : group;
    const std::int64_t rest = t - first * right_tiles;
    return {first + rest % in_group, rest / in_group};
  }
};

/// Three warpgroups: two multiply, 64 x width of the tile each; one thread of the third feeds them.
///
/// All walk the same sequence of tiles, K steps and halves. A slot's `full` barrier expects one arrival and
/// the bytes of the slot a round, its `free` barrier one arrival from each of the eight multiplying warps; no
/// block waits for another. Each warpgroup has three accumulators: `sum` in float arithmetic, `high` and
/// `cross` in the tensor core's. While the tensor core is at the cross products of a chain, `high` of that
/// chain goes to `sum`.
template <int width, int chain>
__global__ void __launch_bounds__(gemm_threads, 1)
    split_gemm_kernel(const __grid_constant__ CUtensorMap left_map,
                      const __grid_constant__ CUtensorMap right_map,
                      const __grid_constant__ GemmArguments a) {
#if defined(KOKKOSSOFTMAX_HAS_WGMMA)
  extern __shared__ unsigned char shared[];
  Ring<width> ring(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    prefetch_tensormap(&left_map);
    prefetch_tensormap(&right_map);
    for (int i = 0; i < Ring<width>::slots; ++i) {
      mbarrier_init(ring.full(i), 1);
      mbarrier_init(ring.free(i), 4 * consumers);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  const std::int64_t left_tiles = (a.left_extent + left_rows - 1) / left_rows;
  const std::int64_t right_tiles = (a.right_extent + width - 1) / width;
  const std::int64_t tiles = left_tiles * right_tiles;

  if (warp >= 4 * consumers) {
    setmaxnreg_dec<24>();
    if (warp == 4 * consumers && lane == 0) {
      for (std::int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
        const auto tile = a.tile(t, left_tiles, right_tiles);
        const int left_row = static_cast<int>(tile.left * left_rows),
                  right_row = static_cast<int>(tile.right * width);
        for (int step = 0; step < a.steps; ++step) {
#pragma unroll 1
          for (int low = 0; low < 2; ++low) {
            mbarrier_wait_parity(ring.free(ring.slot), ring.phase ^ 1);
            const std::uint32_t full = ring.full(ring.slot);
            mbarrier_arrive_expect_tx(full, Ring<width>::bytes);
            cp_async_bulk_tensor_3d(ring.left(), &left_map, step * step_columns, left_row, low, full);
            cp_async_bulk_tensor_3d(ring.right(), &right_map, step * step_columns, right_row, low, full);
            ring.advance();
          }
        }
      }
    }
  } else {
    setmaxnreg_inc<240>();
    constexpr int count = width / 2;
    const std::uint32_t my_left = warp / 4 * 64 * Ring<width>::row_bytes;
    float sum[count], high[count], cross[count];
    for (std::int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
      const auto tile = a.tile(t, left_tiles, right_tiles);
#pragma unroll
      for (int i = 0; i < count; ++i) sum[i] = 0;
      int held_high = -1, held_low = -1;  // slots that the products under way may still read
      const auto release = [&] {
        if (held_high >= 0 && lane == 0) {
          mbarrier_arrive(ring.free(held_high));
          mbarrier_arrive(ring.free(held_low));
        }
      };
#pragma unroll 1
      for (int step = 0; step < a.steps; ++step) {
        mbarrier_wait_parity(ring.full(ring.slot), ring.phase);
        const int slot_high = ring.slot;
        const std::uint64_t left_high = matrix_descriptor(ring.left() + my_left),
                            right_high = matrix_descriptor(ring.right());
        ring.advance();
        const int slot_low = ring.slot;
        const std::uint32_t phase_low = ring.phase;
        const std::uint64_t left_low = matrix_descriptor(ring.left() + my_left),
                            right_low = matrix_descriptor(ring.right());
        ring.advance();
        // X's low halves first, on whichever side X is, so that both orientations give the same bits.
        const std::uint64_t left_1 = a.w_is_left ? left_high : left_low,
                            right_1 = a.w_is_left ? right_low : right_high;
        const std::uint64_t left_2 = a.w_is_left ? left_low : left_high,
                            right_2 = a.w_is_left ? right_high : right_low;
#pragma unroll
        for (int first = 0; first < 4; first += chain) {
          // After the reads of `high` below, and after the branches of a wait.
          wgmma_fence();
#pragma unroll
          for (int k = first; k < first + chain; ++k) {
            wgmma_f16(high, left_high + k * matrix_descriptor_step, right_high + k * matrix_descriptor_step,
                      k != first);
          }
          wgmma_commit_group();
          if (first == 0) {
            // Groups end in order: these products are the only ones under way, the step before is read out.
            wgmma_wait_group<1>();
            release();
            held_high = slot_high;
            held_low = slot_low;
            mbarrier_wait_parity(ring.full(slot_low), phase_low);
            wgmma_fence();
          }
#pragma unroll
          for (int k = first; k < first + chain; ++k) {
            wgmma_f16(cross, left_1 + k * matrix_descriptor_step, right_1 + k * matrix_descriptor_step,
                      step > 0 || k > 0);
          }
#pragma unroll
          for (int k = first; k < first + chain; ++k) {
            wgmma_f16(cross, left_2 + k * matrix_descriptor_step, right_2 + k * matrix_descriptor_step, true);
          }
          wgmma_commit_group();
          wgmma_wait_group<1>();
          accumulators_are_complete(high);
#pragma unroll
          for (int i = 0; i < count; ++i) sum[i] += high[i];
        }
      }
      wgmma_wait_group<0>();
      accumulators_are_complete(cross);
      release();

      // A thread holds two neighbouring columns of each eight, in rows r and r + 8 of its warp's sixteen.
      const std::int64_t row = tile.left * left_rows + warp * 16 + lane / 4;
      const std::int64_t column = tile.right * width + lane % 4 * 2;
      bool marked = false;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const std::int64_t l = row + 8 * i;
        if (l < a.left_extent) {
          const float4 info_l = __ldg(reinterpret_cast<const float4*>(a.left + l));
          float* out = a.result + l * a.left_stride;
#pragma unroll
          for (int j = 0; j < width / 8; ++j) {
            float value[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              const std::int64_t r = column + 8 * j + c;
              const float4 info_r = r < a.right_extent ? __ldg(reinterpret_cast<const float4*>(a.right + r))
                                                       : make_float4(1, 1, 0, 0);
              const int e = 4 * j + 2 * i + c;
              const float scaled = fmaf(cross[e], low_unscale, sum[e]);
              const bool passes = fabsf(scaled) >= 2 * (info_l.z + info_r.z);
              value[c] = passes ? scaled * (info_l.x * info_r.x) * (info_l.y * info_r.y)
                                : __uint_as_float(mark_bits);
              marked = marked || !passes;
            }
            const std::int64_t r = column + 8 * j;
            if (a.result_in_pairs && r + 1 < a.right_extent) {
              *reinterpret_cast<float2*>(out + r) = make_float2(value[0], value[1]);
            } else {
              if (r < a.right_extent) out[r * a.right_stride] = value[0];
              if (r + 1 < a.right_extent) out[(r + 1) * a.right_stride] = value[1];
            }
          }
        }
      }
      if (marked) {
        // A tile of `width` lies within one of 128.
        const std::int64_t l = tile.left, r = tile.right * width / 128;
        a.flags[a.w_is_left ? r * a.flags_a_row + l : l * a.flags_a_row + r] = 1;
      }
    }
  }
#endif
}

// ---- Float arithmetic
// ------------------------------------------------------------------------------------------------

constexpr int float_tile = 128, float_step = 16, float_run = 64;

struct FloatArguments {
  StridedFloats x;
  SplitMatrix w;
  std::int64_t w_leading;
  StridedResult result;
  const unsigned char* flags;
};

/// Where a row of W comes from: its halves where they keep enough, so that a packed W gives the bits of one
/// that is not.
struct FloatSource {
  const float* given;
  const std::uint16_t* high;  ///< null: from `given`
  float unscale_first, unscale_second;

  __device__ FloatSource(const FloatArguments& a, std::int64_t row) : given(nullptr), high(nullptr) {
    if (row >= a.w.rows) return;
    if (a.w.halves) {
      const SplitRow info = a.w.row[row];
      if (info.lossy == 0) {
        high = a.w.halves + row * a.w_leading;
        unscale_first = info.unscale_first;
        unscale_second = info.unscale_second;
        return;
      }
      if (a.w.given_row) row = a.w.given_row[row];
    }
    given = a.w.given.data + row * a.w.given.row_stride;
  }

  /// What is in memory; value() is apart from it, so that nothing waits for a load before its time.
  __device__ __forceinline__ std::uint32_t bits(const FloatArguments& a, std::int64_t k) const {
    if (high) return __ldg(high + k) | std::uint32_t(__ldg(high + a.w.rows * a.w_leading + k)) << 16;
    return given ? __float_as_uint(__ldg(given + k * a.w.given.column_stride)) : 0u;
  }
  __device__ __forceinline__ float value(std::uint32_t bits) const {
    if (!high) return __uint_as_float(bits);
    const float h = __half2float(__ushort_as_half(static_cast<unsigned short>(bits))),
                l = __half2float(__ushort_as_half(static_cast<unsigned short>(bits >> 16)));
    return fmaf(l, low_unscale, h) * unscale_first * unscale_second;
  }
};

/// 128 x 128 elements a block, 8 x 8 a thread. Each element is summed in the order of K, 64 at a time,
/// wherever it is in the tile.
__global__ void __launch_bounds__(256) float_gemm_kernel(const __grid_constant__ FloatArguments a) {
  __shared__ float xs[float_step][float_tile + 4], ws[float_step][float_tile + 4];
  __shared__ __align__(16) unsigned char sources[float_tile * sizeof(FloatSource)];
  auto* const source = reinterpret_cast<FloatSource*>(sources);
  const std::int64_t tiles_n = (a.w.rows + float_tile - 1) / float_tile;
  const std::int64_t tiles = (a.x.rows + float_tile - 1) / float_tile * tiles_n;
  const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
  const int load_k = threadIdx.x % 16, load_row = threadIdx.x / 16;
  for (std::int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    if (a.flags && a.flags[t] == 0) continue;
    const std::int64_t m0 = t / tiles_n * float_tile, n0 = t % tiles_n * float_tile;
    __syncthreads();
    if (threadIdx.x < float_tile) new (source + threadIdx.x) FloatSource(a, n0 + threadIdx.x);
    __syncthreads();
    float x_next[8];
    std::uint32_t w_next[8];
    const auto load = [&](std::int64_t k) {
      const bool there = k < a.x.columns;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const std::int64_t m = m0 + load_row + 16 * i;
        x_next[i] =
            there && m < a.x.rows ? __ldg(a.x.data + m * a.x.row_stride + k * a.x.column_stride) : 0.0f;
        w_next[i] = there ? source[load_row + 16 * i].bits(a, k) : 0u;
      }
    };
    float total[8][8] = {}, sum[8][8] = {};
    const auto add_up = [&] {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          total[i][j] += sum[i][j];
          sum[i][j] = 0;
        }
      }
    };
    load(load_k);
    for (std::int64_t k0 = 0; k0 < a.x.columns; k0 += float_step) {
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        xs[load_k][load_row + 16 * i] = x_next[i];
        ws[load_k][load_row + 16 * i] = source[load_row + 16 * i].value(w_next[i]);
      }
      __syncthreads();
      load(k0 + float_step + load_k);
#pragma unroll
      for (int k = 0; k < float_step; ++k) {
        float x[8], w[8];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          *reinterpret_cast<float4*>(x + 4 * i) = *reinterpret_cast<const float4*>(&xs[k][row + 64 * i]);
          *reinterpret_cast<float4*>(w + 4 * i) = *reinterpret_cast<const float4*>(&ws[k][column + 64 * i]);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
          for (int j = 0; j < 8; ++j) sum[i][j] = fmaf(x[i], w[j], sum[i][j]);
        }
      }
      if ((k0 + float_step) % float_run == 0) add_up();
    }
    add_up();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const std::int64_t m = m0 + row + i / 4 * 64 + i % 4;
      if (m >= a.x.rows) continue;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const std::int64_t n = n0 + column + j / 4 * 64 + j % 4;
        if (n >= a.w.rows) continue;
        float* out = a.result.data + m * a.result.row_stride + n * a.result.column_stride;
        if (!a.flags || __float_as_uint(*out) == mark_bits) *out = total[i][j];
      }
    }
  }
}

// ---- Launches
// --------------------------------------------------------------------------------------------------------

int multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 1;
  return count;
}

PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found);
#endif
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) entry = nullptr;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
  }();
  return encoder;
}

/// K, row, high or low; boxes of one K step by `box_rows` rows.
cudaError_t encode(CUtensorMap& map, const SplitMatrix& m, int box_rows) {
  const auto leading_bytes = static_cast<cuuint64_t>(m.leading()) * 2;
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(m.columns), static_cast<cuuint64_t>(m.rows), 2};
  const cuuint64_t strides[] = {leading_bytes, leading_bytes * static_cast<cuuint64_t>(m.rows)};
  const cuuint32_t box[] = {step_columns, static_cast<cuuint32_t>(box_rows), 1}, every[] = {1, 1, 1};
  const CUresult result =
      tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3, m.halves, extents, strides, box, every,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <int width, int chain>
cudaError_t launch_gemm(const CUtensorMap& left, const CUtensorMap& right, const GemmArguments& a,
                        cudaStream_t stream) {
  const std::int64_t tiles =
      (a.left_extent + left_rows - 1) / left_rows * ((a.right_extent + width - 1) / width);
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(multiprocessors(), tiles));
  split_gemm_kernel<width, chain>
      <<<blocks, gemm_threads, Ring<width>::shared_bytes, stream>>>(left, right, a);
  return cudaGetLastError();
}

template <int width>
cudaError_t launch_gemm(int chain, const CUtensorMap& left, const CUtensorMap& right, const GemmArguments& a,
                        cudaStream_t stream) {
  switch (chain) {
    case 1:
      return launch_gemm<width, 1>(left, right, a, stream);
    case 2:
      return launch_gemm<width, 2>(left, right, a, stream);
    default:
      return launch_gemm<width, 4>(left, right, a, stream);
  }
}

template <int width, int chain>
bool load_gemm() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, split_gemm_kernel<width, chain>) == cudaSuccess &&
         // The empty body, of another architecture, has next to no registers.
         attributes.numRegs > 64 &&
         cudaFuncSetAttribute(split_gemm_kernel<width, chain>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              Ring<width>::shared_bytes) == cudaSuccess;
}

template <int width>
bool load_gemms() {
  return load_gemm<width, 1>() && load_gemm<width, 2>() && load_gemm<width, 4>();
}

bool load_kernels(int device) {
  int before = 0, major = 0, minor = 0;
  if (cudaGetDevice(&before) != cudaSuccess || cudaSetDevice(device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    return false;
  }
  bool there = major == 9 && minor == 0 && tensor_map_encoder() && load_gemms<128>() && load_gemms<64>() &&
               load_gemms<32>() && load_gemms<16>();
  cudaFuncAttributes attributes{};
  const auto load = [&](auto* kernel) {
    there = there && cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess;
  };
  load(split_rows_kernel<true, true>);
  load(split_rows_kernel<true, false>);
  load(split_rows_kernel<false, true>);
  load(split_rows_kernel<false, false>);
  load(strided_magnitude_kernel);
  load(strided_split_kernel);
  load(float_gemm_kernel);
  (void)cudaGetLastError();
  return cudaSetDevice(before) == cudaSuccess && there;
}

}  // namespace

bool split_gemm_is_there(int device) {
  constexpr int most_devices = 64;
  static std::atomic<int> known[most_devices];  // 0: not asked yet, 1: no, 2: yes
  if (device < 0 || device >= most_devices) return false;
  int answer = known[device].load(std::memory_order_acquire);
  if (answer == 0) {
    answer = load_kernels(device) ? 2 : 1;
    known[device].store(answer, std::memory_order_release);
  }
  return answer == 2;
}

SplitGemmPlan split_gemm_plan(std::int64_t m, std::int64_t n, std::int64_t k, int sms) {
  // What a K step costs a tile, and what a row of a tile costs in traffic from L2, over the cost of a tile of
  // 128: on an H200 1.09 us; 16 to 64 are limited by shared memory, and all of them by 6.2 TB/s.
  struct Width {
    int rows;
    double cost;
  };
  constexpr Width widths[] = {{128, 1}, {64, 0.62}, {32, 0.47}, {16, 0.43}};
  constexpr double traffic = 3.8e-5;
  SplitGemmPlan best{false, 128, k <= 512 ? 1 : k <= 2048 ? 2 : 4, 0};
  for (const bool w_is_left : {false, true}) {
    const std::int64_t left = w_is_left ? n : m, right = w_is_left ? m : n;
    for (const auto& [rows, cost] : widths) {
      const std::int64_t tiles = (left + left_rows - 1) / left_rows * ((right + rows - 1) / rows);
      const double all = std::max(static_cast<double>((tiles + sms - 1) / sms) * cost,
                                  static_cast<double>(tiles * (left_rows + rows)) * traffic);
      if (best.cost == 0 || all < best.cost * 0.999) {
        best.cost = all;
        best.w_is_left = w_is_left;
        best.width = rows;
      }
    }
  }
  return best;
}

cudaError_t split_rows(const SplitMatrix& to, unsigned char* flags, std::size_t flag_count,
                       cudaStream_t stream) {
  const StridedFloats& from = to.given;
  const SplitTarget target(to, flags, flag_count);
  if (from.column_stride == 1 || from.columns == 1) {
    const bool aligned = reinterpret_cast<std::uintptr_t>(from.data) % 16 == 0 && from.row_stride % 4 == 0;
    const bool resident = from.columns <= split_pass;
    const auto kernel = aligned
                            ? (resident ? split_rows_kernel<true, true> : split_rows_kernel<true, false>)
                            : (resident ? split_rows_kernel<false, true> : split_rows_kernel<false, false>);
    kernel<<<static_cast<unsigned>(from.rows), split_threads, 0, stream>>>(from, target);
    return cudaGetLastError();
  }
  const cudaError_t error =
      cudaMemsetAsync(to.row, 0, static_cast<std::size_t>(from.rows) * sizeof(SplitRow), stream);
  if (error != cudaSuccess) return error;
  const std::int64_t row_tiles = (from.rows + strided_rows - 1) / strided_rows;
  constexpr std::int64_t chunk = 1024;
  strided_magnitude_kernel<<<static_cast<unsigned>(row_tiles * ((from.columns + chunk - 1) / chunk)), 256, 0,
                             stream>>>(from, target, row_tiles, chunk);
  strided_split_kernel<<<static_cast<unsigned>(row_tiles *
                                               ((from.columns + strided_columns - 1) / strided_columns)),
                         256, 0, stream>>>(from, target, row_tiles);
  return cudaGetLastError();
}

cudaError_t split_gemm(const SplitMatrix& x, const SplitMatrix& w, const StridedResult& result,
                       unsigned char* flags, const SplitGemmPlan& plan, cudaStream_t stream) {
  const SplitMatrix &left = plan.w_is_left ? w : x, &right = plan.w_is_left ? x : w;
  CUtensorMap left_map, right_map;
  cudaError_t error = encode(left_map, left, left_rows);
  if (error == cudaSuccess) error = encode(right_map, right, plan.width);
  if (error != cudaSuccess) return error;
  GemmArguments a{};
  a.left_extent = left.rows;
  a.right_extent = right.rows;
  a.steps = static_cast<int>((x.columns + step_columns - 1) / step_columns);
  a.w_is_left = plan.w_is_left;
  a.left = left.row;
  a.right = right.row;
  a.result = result.data;
  a.left_stride = plan.w_is_left ? result.column_stride : result.row_stride;
  a.right_stride = plan.w_is_left ? result.row_stride : result.column_stride;
  a.result_in_pairs = a.right_stride == 1 && (a.left_stride % 2 == 0 || left.rows == 1) &&
                      reinterpret_cast<std::uintptr_t>(result.data) % 8 == 0;
  a.flags = flags;
  a.flags_a_row = (w.rows + 127) / 128;
  switch (plan.width) {
    case 16:
      return launch_gemm<16>(plan.chain, left_map, right_map, a, stream);
    case 32:
      return launch_gemm<32>(plan.chain, left_map, right_map, a, stream);
    case 64:
      return launch_gemm<64>(plan.chain, left_map, right_map, a, stream);
    default:
      return launch_gemm<128>(plan.chain, left_map, right_map, a, stream);
  }
}

cudaError_t float_gemm(const StridedFloats& x, const SplitMatrix& w, const StridedResult& result,
                       const unsigned char* flags, cudaStream_t stream) {
  const FloatArguments a{x, w, w.leading(), result, flags};
  const std::int64_t tiles = static_cast<std::int64_t>(split_gemm_flags(x.rows, w.rows));
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(multiprocessors(), tiles));
  float_gemm_kernel<<<blocks, 256, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace KokkosSoftmax::impl
