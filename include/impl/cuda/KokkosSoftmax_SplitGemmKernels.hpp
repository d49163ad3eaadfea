// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The kernels of the split product (KokkosSoftmax_SplitGemm.hpp explains the arithmetic), with what is done
/// to a logit before it is written. Without that they are compiled in src/; with a transform, where the
/// transform is known. They have bodies where wgmma exists, which is for compute capability 9.0a.

#ifndef KOKKOSSOFTMAX_SPLITGEMMKERNELS_HPP
#define KOKKOSSOFTMAX_SPLITGEMMKERNELS_HPP

#include <impl/cuda/KokkosSoftmax_HopperPtx.hpp>
#include <impl/cuda/KokkosSoftmax_SplitGemm.hpp>

#include <cuda_fp16.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <type_traits>

namespace KokkosSoftmax::impl {

inline constexpr std::uint32_t infinity_bits = 0x7f800000u;
/// A quiet NaN that no instruction produces.
inline constexpr std::uint32_t mark_bits = 0x7fd5c0deu;
inline constexpr float low_scale = 2048, low_unscale = 1.0f / 2048;
inline constexpr float smallest_kept = 1.0f / 8192;

/// Nothing is done to a logit. An epilogue gives, for a row, a callable of (value, column).
struct PlainLogits {
  struct Row {
    __device__ __forceinline__ float operator()(float value, std::int64_t) const { return value; }
  };
  __device__ __forceinline__ Row at_row(std::int64_t) const { return {}; }
};

// ---- The product ------------------------------------------------------------------------------------------

inline constexpr int left_rows = 128, step_columns = 64, consumers = 2;
inline constexpr int gemm_threads = 128 * (consumers + 1);
/// A multiprocessor's shared memory, less what the system keeps.
inline constexpr int shared_bytes_of_block = 227 * 1024;

/// Both operands' tiles of one K step, of the high or of the low halves, are one slot of a ring, behind which
/// some bytes are left to others.
template <int width, int bytes_behind = 0>
struct Ring {
  static constexpr std::uint32_t row_bytes = step_columns * 2;
  static constexpr std::uint32_t left_bytes = left_rows * row_bytes, bytes = left_bytes + width * row_bytes;
  static constexpr int slots = std::min<int>(12, (shared_bytes_of_block - 1024 - 256 - bytes_behind) / bytes);
  static constexpr int shared_bytes = 1024 + slots * (bytes + 16) + bytes_behind;

  std::uint32_t base;
  int slot = 0;
  std::uint32_t phase = 0;

  __device__ explicit Ring(const void* shared) : base((shared_address(shared) + 1023) & ~1023u) {}

  __device__ std::uint32_t left() const { return base + slot * bytes; }
  __device__ std::uint32_t right() const { return left() + left_bytes; }
  __device__ std::uint32_t full(int i) const { return base + slots * bytes + i * 8; }
  __device__ std::uint32_t free(int i) const { return full(slots + i); }
  __device__ std::uint32_t behind() const { return full(2 * slots); }
  __device__ void advance() {
    if (++slot == slots) {
      slot = 0;
      phase ^= 1;
    }
  }
};

/// What a product has to know of its tile's columns: for each of them three floats, in shared memory. (Read
/// from L2 as the tile is written, 1024 x 8192 -> 8192 on one H200 takes 541 us for 529.)
template <int width>
struct ColumnInfo {
  static constexpr int bytes = 3 * width * static_cast<int>(sizeof(float));
  float* data;

  __device__ void store(int column, const float4& info) const {
    data[column] = info.x;
    data[width + column] = info.y;
    data[2 * width + column] = info.z;
  }
  /// Of two columns.
  struct Two {
    float2 first, second, lossy;
    __device__ float unscaled(int c, float scaled, const float4& of_row) const {
      return scaled * (of_row.x * (c == 0 ? first.x : first.y)) * (of_row.y * (c == 0 ? second.x : second.y));
    }
    /// Whether the guard lets it through.
    __device__ bool is_kept(int c, float scaled, const float4& of_row) const {
      return fabsf(scaled) >= 2 * (of_row.z + (c == 0 ? lossy.x : lossy.y));
    }
  };
  __device__ Two two(int column) const {
    const auto* const at = reinterpret_cast<const float2*>(data + column);
    return {at[0], at[width / 2], at[width]};
  }
};

struct GemmArguments {
  std::int64_t left_extent, right_extent;
  int steps;
  bool result_in_pairs;
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
/// `cross` in the tensor core's. While the tensor core is at the cross products of a K step, `high` of that
/// step goes to `sum`.
template <int width, bool w_is_left, class Epilogue>
__global__ void __launch_bounds__(gemm_threads, 1)
    split_gemm_kernel(const __grid_constant__ CUtensorMap left_map,
                      const __grid_constant__ CUtensorMap right_map, const __grid_constant__ GemmArguments a,
                      const __grid_constant__ Epilogue epilogue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
  extern __shared__ unsigned char shared[];
  using RingOfTiles = Ring<width, ColumnInfo<width>::bytes>;
  RingOfTiles ring(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    prefetch_tensormap(&left_map);
    prefetch_tensormap(&right_map);
    for (int i = 0; i < RingOfTiles::slots; ++i) {
      mbarrier_init(ring.full(i), 1);
      mbarrier_init(ring.free(i), 4 * consumers);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  griddepcontrol_wait();
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
            mbarrier_arrive_expect_tx(full, RingOfTiles::bytes);
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
    const std::uint32_t my_left = warp / 4 * 64 * RingOfTiles::row_bytes;
    float sum[count], high[count], cross[count];
    const ColumnInfo<width> column_info{
        reinterpret_cast<float*>(shared + (ring.behind() - shared_address(shared)))};
    const auto meet = [] { barrier_sync(1, 128 * consumers); };
    int held_high = -1, held_low = -1;  // slots that the products under way may still read
    const auto release = [&] {
      if (held_high >= 0 && lane == 0) {
        mbarrier_arrive(ring.free(held_high));
        mbarrier_arrive(ring.free(held_low));
      }
      held_high = -1;
    };
    // Sets the products of one K step going, in two groups: of the high halves, then the cross products.
    const auto multiply = [&](bool first) {
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
      const std::uint64_t left_1 = w_is_left ? left_high : left_low,
                          right_1 = w_is_left ? right_low : right_high;
      const std::uint64_t left_2 = w_is_left ? left_low : left_high,
                          right_2 = w_is_left ? right_high : right_low;
      // After the reads of `high` by promote(), and after the branches of a wait.
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < step_columns / 16; ++k) {
        wgmma_f16(high, left_high + k * matrix_descriptor_step, right_high + k * matrix_descriptor_step,
                  k > 0);
      }
      wgmma_commit_group();
      // Groups end in order: these products are the only ones under way, the step before is read out.
      wgmma_wait_group<1>();
      release();
      held_high = slot_high;
      held_low = slot_low;
      mbarrier_wait_parity(ring.full(slot_low), phase_low);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < step_columns / 16; ++k) {
        wgmma_f16(cross, left_1 + k * matrix_descriptor_step, right_1 + k * matrix_descriptor_step,
                  !first || k > 0);
      }
#pragma unroll
      for (int k = 0; k < step_columns / 16; ++k) {
        wgmma_f16(cross, left_2 + k * matrix_descriptor_step, right_2 + k * matrix_descriptor_step, true);
      }
      wgmma_commit_group();
    };
    const auto promote = [&] {
      wgmma_wait_group<1>();
      accumulators_are_complete(high);
#pragma unroll
      for (int i = 0; i < count; ++i) sum[i] += high[i];
    };
    // A thread holds two neighbouring columns of each eight, in rows r and r + 8 of its warp's sixteen.
    const auto write = [&](const GemmArguments::Tile& tile) {
      const std::int64_t row = tile.left * left_rows + warp * 16 + lane / 4;
      const std::int64_t column = tile.right * width + lane % 4 * 2;
      const int rows_left = static_cast<int>(min(a.left_extent - row, std::int64_t(left_rows)));
      const int columns_left = static_cast<int>(min(a.right_extent - column, std::int64_t(width)));
      const float4 none = make_float4(0, 0, 0, 0);
      float4 of_row[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        of_row[i] = 8 * i < rows_left ? __ldg(reinterpret_cast<const float4*>(a.left + row) + 8 * i) : none;
      }
      float* const out = a.result + row * a.left_stride + column * a.right_stride;
      bool marked = false;
#pragma unroll
      for (int j = 0; j < width / 8; ++j) {
        float value[2][2];
        const auto of_columns = column_info.two(8 * j + lane % 4 * 2);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float scaled = sum[4 * j + 2 * i + c];
            value[i][c] = of_columns.unscaled(c, scaled, of_row[i]);
            const bool there = 8 * i < rows_left && 8 * j + c < columns_left;
            if constexpr (!std::is_same_v<Epilogue, PlainLogits>) {
              const std::int64_t l = row + 8 * i, r = column + 8 * j + c;
              if (there) value[i][c] = epilogue.at_row(w_is_left ? r : l)(value[i][c], w_is_left ? l : r);
            }
            if (!of_columns.is_kept(c, scaled, of_row[i])) {
              value[i][c] = __uint_as_float(mark_bits);
              marked = marked || there;
            }
          }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float* const at = out + 8 * i * a.left_stride;
          if (8 * i >= rows_left) continue;
          if (a.result_in_pairs && 8 * j + 1 < columns_left) {
            *reinterpret_cast<float2*>(at + 8 * j) = make_float2(value[i][0], value[i][1]);
          } else {
            if (8 * j < columns_left) at[8 * j * a.right_stride] = value[i][0];
            if (8 * j + 1 < columns_left) at[(8 * j + 1) * a.right_stride] = value[i][1];
          }
        }
      }
      if (marked) {
        // A tile of `width` lies within one of 128.
        const std::int64_t l = tile.left, r = tile.right * width / 128;
        a.flags[w_is_left ? r * a.flags_a_row + l : l * a.flags_a_row + r] = 1;
      }
    };

    // A tile is written while the products of the next one's first step run.
    GemmArguments::Tile before{};
    for (std::int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
      multiply(true);
      if (t != blockIdx.x) {
        meet();
        write(before);
        meet();
      }
      before = a.tile(t, left_tiles, right_tiles);
      if (threadIdx.x < width) {
        const std::int64_t column = before.right * width + threadIdx.x;
        column_info.store(threadIdx.x, column < a.right_extent
                                           ? __ldg(reinterpret_cast<const float4*>(a.right + column))
                                           : make_float4(0, 0, 0, 0));
      }
#pragma unroll
      for (int i = 0; i < count; ++i) sum[i] = 0;
      promote();
#pragma unroll 1
      for (int step = 1; step < a.steps; ++step) {
        multiply(false);
        promote();
      }
      wgmma_wait_group<0>();
      accumulators_are_complete(cross);
      release();
#pragma unroll
      for (int i = 0; i < count; ++i) sum[i] = fmaf(cross[i], low_unscale, sum[i]);
    }
    meet();
    write(before);
  }
#endif
}

// ---- Float arithmetic -------------------------------------------------------------------------------------

inline constexpr int float_tile = 128, float_step = 16, float_run = 16;

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

  /// What is in memory: the bits of a float, or of both halves. value() is apart from it, and the halves are
  /// apart from each other, so that nothing waits for a load before its time.
  struct Bits {
    std::uint32_t first, low;
  };
  __device__ __forceinline__ Bits bits(const FloatArguments& a, std::int64_t k) const {
    if (high) return {__ldg(high + k), __ldg(high + a.w.rows * a.w_leading + k)};
    return {given ? __float_as_uint(__ldg(given + k * a.w.given.column_stride)) : 0u, 0u};
  }
  __device__ __forceinline__ float value(const Bits& bits) const {
    if (!high) return __uint_as_float(bits.first);
    const float h = __half2float(__ushort_as_half(static_cast<unsigned short>(bits.first))),
                l = __half2float(__ushort_as_half(static_cast<unsigned short>(bits.low)));
    return fmaf(l, low_unscale, h) * unscale_first * unscale_second;
  }
};

/// 128 x 128 elements a block, 8 x 8 a thread. Each element is summed in the order of K, 16 at a time,
/// wherever it is in the tile.
template <class Epilogue>
__global__ void __launch_bounds__(256)
    float_gemm_kernel(const __grid_constant__ FloatArguments a, const __grid_constant__ Epilogue epilogue) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  griddepcontrol_wait();
#endif
  __shared__ float xs[float_step][float_tile + 4], ws[float_step][float_tile + 4];
  __shared__ __align__(16) unsigned char sources[float_tile * sizeof(FloatSource)];
  auto* const source = reinterpret_cast<FloatSource*>(sources);
  const std::int64_t tiles_n = (a.w.rows + float_tile - 1) / float_tile;
  const std::int64_t tiles = (a.x.rows + float_tile - 1) / float_tile * tiles_n;
  if (a.flags) {
    // Almost always there is nothing to do: look at all of the block's flags at once.
    bool flagged = false;
    for (std::int64_t t = blockIdx.x + std::int64_t(threadIdx.x) * gridDim.x; t < tiles;
         t += std::int64_t(blockDim.x) * gridDim.x) {
      flagged = flagged || a.flags[t] != 0;
    }
    if (!__syncthreads_or(flagged)) return;
  }
  const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
  const int load_k = threadIdx.x % 16, load_row = threadIdx.x / 16;
  for (std::int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    if (a.flags && a.flags[t] == 0) continue;
    const std::int64_t m0 = t / tiles_n * float_tile, n0 = t % tiles_n * float_tile;
    __syncthreads();
    if (threadIdx.x < float_tile) new (source + threadIdx.x) FloatSource(a, n0 + threadIdx.x);
    __syncthreads();
    float x_next[8];
    FloatSource::Bits w_next[8];
    const auto load = [&](std::int64_t k) {
      const bool there = k < a.x.columns;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const std::int64_t m = m0 + load_row + 16 * i;
        x_next[i] =
            there && m < a.x.rows ? __ldg(a.x.data + m * a.x.row_stride + k * a.x.column_stride) : 0.0f;
        w_next[i] = there ? source[load_row + 16 * i].bits(a, k) : FloatSource::Bits{0, 0};
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
    const auto row_of = [&](int i) { return m0 + row + i / 4 * 64 + i % 4; };
    const auto column_of = [&](int j) { return n0 + column + j / 4 * 64 + j % 4; };
    const auto element = [&](std::int64_t m, std::int64_t n) -> float& {
      return a.result.data[m * a.result.row_stride + n * a.result.column_stride];
    };
    std::uint64_t written = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const std::int64_t m = row_of(i), n = column_of(j);
        if (m >= a.x.rows || n >= a.w.rows) continue;
        float& out = element(m, n);
        if (a.flags && __float_as_uint(out) != mark_bits) continue;
        out = total[i][j];
        written |= std::uint64_t(1) << (8 * i + j);
      }
    }
    if constexpr (!std::is_same_v<Epilogue, PlainLogits>) {
      // A loop, and so one copy of the transform's code: this kernel is rarely used.
#pragma unroll 1
      for (int e = 0; e < 64; ++e) {
        if ((written >> e & 1) == 0) continue;
        const std::int64_t m = row_of(e / 8), n = column_of(e % 8);
        element(m, n) = epilogue.at_row(m)(element(m, n), n);
      }
    }
  }
}

// ---- Launches
// ----------------------------------------------------------------------------------------------

/// What a launch needs of the host: the copy engine's descriptions of both operands.
struct GemmLaunch {
  CUtensorMap left, right;
  GemmArguments arguments;
  int multiprocessors;
};
/// K, row, high or low; boxes of one K step by `box_rows` rows.
cudaError_t encode_halves(CUtensorMap& map, const SplitMatrix& m, int box_rows);
cudaError_t prepare_gemm(GemmLaunch& launch, const SplitMatrix& x, const SplitMatrix& w,
                         const StridedResult& result, unsigned char* flags, const SplitGemmPlan& plan);
FloatArguments float_arguments(const StridedFloats& x, const SplitMatrix& w, const StridedResult& result,
                               const unsigned char* flags);

/// May begin while the launch before it ends; the kernel waits for that one's results itself.
template <class... Parameters>
cudaError_t launch_overlapping(void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
                               int shared_bytes, cudaStream_t stream,
                               const std::remove_const_t<Parameters>&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

/// Calls `use` with the kernel of a plan, its width and its shared memory. With an epilogue W is left.
template <class Epilogue, class Use>
auto with_gemm_kernel(const SplitGemmPlan& plan, const Use& use) {
  const auto kernel = [&]<int width, bool w_is_left>(std::integral_constant<int, width>,
                                                     std::bool_constant<w_is_left>) {
    return use(&split_gemm_kernel<width, w_is_left, Epilogue>, width,
               Ring<width, ColumnInfo<width>::bytes>::shared_bytes);
  };
  using std::integral_constant;
  if constexpr (std::is_same_v<Epilogue, PlainLogits>) {
    if (!plan.w_is_left) {
      if (plan.width == 16) return kernel(integral_constant<int, 16>{}, std::false_type{});
      if (plan.width == 64) return kernel(integral_constant<int, 64>{}, std::false_type{});
      return kernel(integral_constant<int, 128>{}, std::false_type{});
    }
  }
  if (plan.width == 16) return kernel(integral_constant<int, 16>{}, std::true_type{});
  if (plan.width == 32) return kernel(integral_constant<int, 32>{}, std::true_type{});
  return kernel(integral_constant<int, 64>{}, std::true_type{});
}

inline constexpr SplitGemmPlan split_gemm_kernels[] = {{true, 16, 0},  {true, 32, 0},  {true, 64, 0},
                                                       {false, 16, 0}, {false, 64, 0}, {false, 128, 0}};

/// Loads the kernels with this epilogue on the current device; whether they have bodies.
template <class Epilogue>
bool load_gemm_kernels() {
  bool there = true;
  for (const SplitGemmPlan& plan : split_gemm_kernels) {
    if (!plan.w_is_left && !std::is_same_v<Epilogue, PlainLogits>) continue;
    there = there && with_gemm_kernel<Epilogue>(plan, [](auto kernel, int, int shared_bytes) {
              cudaFuncAttributes attributes{};
              return cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess &&
                     // The empty body, of another architecture, has next to no registers.
                     attributes.numRegs > 64 &&
                     cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          shared_bytes) == cudaSuccess;
            });
  }
  cudaFuncAttributes attributes{};
  there = there && cudaFuncGetAttributes(&attributes, float_gemm_kernel<Epilogue>) == cudaSuccess;
  (void)cudaGetLastError();
  return there;
}

/// The answer of `ask` for a device, asked once.
template <class Ask>
bool asked_once(std::atomic<int> (&known)[64], int device, const Ask& ask) {
  if (device < 0 || device >= 64) return false;
  int answer = known[device].load(std::memory_order_acquire);  // 0: not asked yet, 1: no, 2: yes
  if (answer == 0) {
    answer = ask() ? 2 : 1;
    known[device].store(answer, std::memory_order_release);
  }
  return answer == 2;
}

/// Whether the kernels with this epilogue are there for the device, which is the current one.
template <class Epilogue>
bool epilogue_is_there(int device) {
  static std::atomic<int> known[64];
  return asked_once(known, device, [] { return load_gemm_kernels<Epilogue>(); });
}

template <class Epilogue>
cudaError_t launch_split_gemm(const SplitMatrix& x, const SplitMatrix& w, const StridedResult& result,
                              unsigned char* flags, const SplitGemmPlan& plan, const Epilogue& epilogue,
                              cudaStream_t stream) {
  GemmLaunch launch;
  const cudaError_t error = prepare_gemm(launch, x, w, result, flags, plan);
  if (error != cudaSuccess) return error;
  return with_gemm_kernel<Epilogue>(plan, [&](auto kernel, int width, int shared_bytes) {
    // Of the very pointer that is launched: nvcc gives every translation unit a kernel of its own.
    const cudaError_t sized =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (sized != cudaSuccess) return sized;
    const GemmArguments& a = launch.arguments;
    const std::int64_t tiles =
        (a.left_extent + left_rows - 1) / left_rows * ((a.right_extent + width - 1) / width);
    return launch_overlapping(kernel,
                              static_cast<unsigned>(std::min<std::int64_t>(launch.multiprocessors, tiles)),
                              gemm_threads, shared_bytes, stream, launch.left, launch.right, a, epilogue);
  });
}

template <class Epilogue>
cudaError_t launch_float_gemm(const StridedFloats& x, const SplitMatrix& w, const StridedResult& result,
                              const unsigned char* flags, int multiprocessors, const Epilogue& epilogue,
                              cudaStream_t stream) {
  const auto tiles = static_cast<std::int64_t>(split_gemm_flags(x.rows, w.rows));
  return launch_overlapping(&float_gemm_kernel<Epilogue>,
                            static_cast<unsigned>(std::min<std::int64_t>(multiprocessors, tiles)), 256, 0,
                            stream, float_arguments(x, w, result, flags), epilogue);
}

}  // namespace KokkosSoftmax::impl

#endif
