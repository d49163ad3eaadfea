// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

// The product of rounded rows, see KokkosSoftmax_SplitGemm.hpp.

#include <impl/cuda/KokkosSoftmax_SplitGemmKernels.hpp>
#include <impl/cuda/KokkosSoftmax_TensorMap.hpp>

namespace KokkosSoftmax::impl {
namespace {

/// Tiles of 128 rows of x by 256 of w. The two blocks of a cluster have the same rows of w, of which each
/// copies one half to both.
constexpr int tile_width = 256, blocks_of_cluster = 2, half_width = tile_width / blocks_of_cluster;

}  // namespace

/// (Where the kernel has no body nothing calls its function, which a compiler would say of one without a name
/// for others.)
struct RoundedArguments {
  int m, n, steps;
  bool result_in_pairs;
  const SplitRow *x, *w;
  float* result;
  std::int64_t row_stride, column_stride;
  unsigned char* flags;
  std::int64_t flags_a_row;

  int pairs, tiles_of_w;  ///< of tiles of x, each of a cluster

  struct Tile {
    int x, w;
  };
  /// Groups of pairs of tiles of x: what runs at one time shares few panels of both operands in L2.
  __device__ __forceinline__ Tile tile(int t, unsigned rank) const {
    constexpr int group = 8;
    const int first = t / (group * tiles_of_w) * group;
    const int in_group = min(pairs - first, group), rest = t - first * tiles_of_w;
    return {(first + rest % in_group) * blocks_of_cluster + static_cast<int>(rank), rest / in_group};
  }
};

namespace {

/// Behind its slots: for each multiplying warpgroup what it has to know of the tile's columns. (Read from L2
/// as the tile is written, 1024 x 8192 -> 8192 on one H200 takes 214 us for 184.)
constexpr int info_bytes = consumers * tile_width * 16;
using RoundedRing = Ring<tile_width, info_bytes>;

/// Three warpgroups: two multiply, 64 x 256 of the tile each; one thread of the third feeds them. A slot's
/// `full` barrier expects one arrival and the bytes of the slot a round, its `free` barrier one from each of
/// the multiplying warps of both blocks, which are fed at the same time.
__global__ void __launch_bounds__(gemm_threads, 1) __cluster_dims__(blocks_of_cluster, 1, 1)
    rounded_gemm_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                        const __grid_constant__ RoundedArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
  extern __shared__ unsigned char shared[];
  RoundedRing ring(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned rank = cluster_ctarank();
  if (threadIdx.x == 0) {
    prefetch_tensormap(&x_map);
    prefetch_tensormap(&w_map);
    for (int i = 0; i < RoundedRing::slots; ++i) {
      mbarrier_init(ring.full(i), 1);
      mbarrier_init(ring.free(i), 4 * consumers * blocks_of_cluster);
    }
    fence_mbarrier_init();
  }
  cluster_arrive();
  cluster_wait();
  griddepcontrol_wait();
  const int tiles = a.pairs * a.tiles_of_w, first = static_cast<int>(blockIdx.x) / blocks_of_cluster,
            clusters = static_cast<int>(gridDim.x) / blocks_of_cluster;

  if (warp >= 4 * consumers) {
    setmaxnreg_dec<24>();
    if (warp == 4 * consumers && lane == 0) {
      for (int t = first; t < tiles; t += clusters) {
        const auto tile = a.tile(t, rank);
        const int x_row = tile.x * left_rows,
                  w_row = tile.w * tile_width + static_cast<int>(rank) * half_width;
#pragma unroll 1
        for (int step = 0; step < a.steps; ++step) {
          mbarrier_wait_parity(ring.free(ring.slot), ring.phase ^ 1);
          const std::uint32_t full = ring.full(ring.slot);
          mbarrier_arrive_expect_tx(full, RoundedRing::bytes);
          cp_async_bulk_tensor_3d(ring.left(), &x_map, step * step_columns, x_row, 0, full);
          cp_async_bulk_tensor_3d_multicast(ring.right() + rank * half_width * RoundedRing::row_bytes, &w_map,
                                            step * step_columns, w_row, 0, full,
                                            (1 << blocks_of_cluster) - 1);
          ring.advance();
        }
      }
    }
  } else {
    setmaxnreg_inc<240>();
    constexpr int count = tile_width / 2;
    const std::uint32_t my_left = warp / 4 * 64 * RoundedRing::row_bytes;
    float sum[count];
    float4* const column_info =
        reinterpret_cast<float4*>(shared + (ring.behind() - shared_address(shared))) + warp / 4 * tile_width;
    const auto meet = [&] { barrier_sync(1 + warp / 4, 128); };
    const auto release = [&](int slot) {
      if (lane < blocks_of_cluster) mbarrier_arrive_cluster(ring.free(slot), lane);
    };
    // A thread holds two neighbouring columns of each eight, in rows r and r + 8 of its warp's sixteen.
    const auto write = [&](const RoundedArguments::Tile& tile) {
      const int row = tile.x * left_rows + warp * 16 + lane / 4;
      const int column = tile.w * tile_width + lane % 4 * 2;
      const int rows_left = min(a.m - row, left_rows), columns_left = min(a.n - column, tile_width);
      const float4 none = make_float4(0, 0, 0, 0);
      float4 of_row[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        of_row[i] = 8 * i < rows_left ? __ldg(reinterpret_cast<const float4*>(a.x + row) + 8 * i) : none;
      float* const out = a.result + row * a.row_stride + column * a.column_stride;
      bool marked[2] = {false, false};
#pragma unroll
      for (int j = 0; j < tile_width / 8; ++j) {
        float value[2][2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float4 of_column = column_info[8 * j + lane % 4 * 2 + c];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float scaled = sum[4 * j + 2 * i + c];
            value[i][c] = scaled * (of_row[i].x * of_column.x) * (of_row[i].y * of_column.y);
            if (!(fabsf(scaled) >= 2 * (of_row[i].z + of_column.z))) {
              value[i][c] = __uint_as_float(mark_bits);
              marked[j / 16] = marked[j / 16] || (8 * i < rows_left && 8 * j + c < columns_left);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float* const at = out + 8 * i * a.row_stride;
          if (8 * i >= rows_left) continue;
          if (a.result_in_pairs && 8 * j + 1 < columns_left) {
            *reinterpret_cast<float2*>(at + 8 * j) = make_float2(value[i][0], value[i][1]);
          } else {
            if (8 * j < columns_left) at[8 * j * a.column_stride] = value[i][0];
            if (8 * j + 1 < columns_left) at[(8 * j + 1) * a.column_stride] = value[i][1];
          }
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (marked[h]) a.flags[tile.x * a.flags_a_row + tile.w * 2 + h] = 1;
      }
    };
    for (int t = first; t < tiles; t += clusters) {
      const auto tile = a.tile(t, rank);
      for (int i = threadIdx.x % 128; i < tile_width; i += 128) {
        const int column = tile.w * tile_width + i;
        column_info[i] =
            column < a.n ? __ldg(reinterpret_cast<const float4*>(a.w + column)) : make_float4(0, 0, 0, 0);
      }
      int held = -1;
#pragma unroll 1
      for (int step = 0; step < a.steps; ++step) {
        mbarrier_wait_parity(ring.full(ring.slot), ring.phase);
        const std::uint64_t left = matrix_descriptor(ring.left() + my_left),
                            right = matrix_descriptor(ring.right());
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < step_columns / 16; ++k)
          wgmma_f16(sum, left + k * matrix_descriptor_step, right + k * matrix_descriptor_step,
                    step > 0 || k > 0);
        wgmma_commit_group();
        wgmma_wait_group<1>();
        if (held >= 0) release(held);
        held = ring.slot;
        ring.advance();
      }
      wgmma_wait_group<0>();
      accumulators_are_complete(sum);
      release(held);
      meet();
      write(tile);
      meet();
    }
  }
  // (Until nobody needs this block's shared memory any more.)
  __syncwarp();
  cluster_arrive();
  cluster_wait();
#endif
}

int multiprocessors_of(int device) {
  int count = 0;
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess ? count : 0;
}

}  // namespace

bool rounded_gemm_is_there(int device) {
  static std::atomic<int> known[64];
  return split_gemm_is_there(device) && asked_once(known, device, [device] {
           int before = 0;
           if (cudaGetDevice(&before) != cudaSuccess || cudaSetDevice(device) != cudaSuccess) return false;
           cudaFuncAttributes attributes{};
           const bool there =
               cudaFuncGetAttributes(&attributes, rounded_gemm_kernel) == cudaSuccess &&
               cudaFuncSetAttribute(rounded_gemm_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    RoundedRing::shared_bytes) == cudaSuccess &&
               multiprocessors_of(device) >= blocks_of_cluster;
           (void)cudaGetLastError();
           return cudaSetDevice(before) == cudaSuccess && there;
         });
}

std::int64_t rounded_gemm_rounds(std::int64_t m, std::int64_t n, int multiprocessors) {
  constexpr std::int64_t rows = left_rows * blocks_of_cluster;
  const std::int64_t tiles = (m + rows - 1) / rows * ((n + tile_width - 1) / tile_width),
                     clusters = multiprocessors / blocks_of_cluster;
  return (tiles + clusters - 1) / clusters;
}

cudaError_t rounded_gemm(const SplitMatrix& x, const SplitMatrix& w, const StridedResult& result,
                         unsigned char* flags, cudaStream_t stream) {
  CUtensorMap x_map, w_map;
  cudaError_t error = encode_halves(x_map, x, left_rows);
  if (error == cudaSuccess) error = encode_halves(w_map, w, half_width);
  int device = 0;
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(rounded_gemm_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 RoundedRing::shared_bytes);
  if (error != cudaSuccess) return error;
  RoundedArguments a{};
  constexpr std::int64_t rows = left_rows * blocks_of_cluster;
  a.m = static_cast<int>(x.rows);
  a.n = static_cast<int>(w.rows);
  a.steps = static_cast<int>((x.columns + step_columns - 1) / step_columns);
  a.pairs = static_cast<int>((x.rows + rows - 1) / rows);
  a.tiles_of_w = static_cast<int>((w.rows + tile_width - 1) / tile_width);
  a.x = x.row;
  a.w = w.row;
  a.result = result.data;
  a.row_stride = result.row_stride;
  a.column_stride = result.column_stride;
  a.result_in_pairs = result.column_stride == 1 && (result.row_stride % 2 == 0 || x.rows == 1) &&
                      reinterpret_cast<std::uintptr_t>(result.data) % 8 == 0;
  a.flags = flags;
  a.flags_a_row = (w.rows + 127) / 128;
  const int clusters = std::min(multiprocessors_of(device) / blocks_of_cluster, a.pairs * a.tiles_of_w);
  return launch_overlapping(&rounded_gemm_kernel, static_cast<unsigned>(clusters * blocks_of_cluster),
                            gemm_threads, RoundedRing::shared_bytes, stream, x_map, w_map, a);
}

}  // namespace KokkosSoftmax::impl
