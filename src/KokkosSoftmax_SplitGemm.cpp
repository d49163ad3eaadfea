// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

// What KokkosSoftmax_SplitGemm.hpp offers, where the arithmetic is explained: the split, and the products of
// split rows without a transform.

#include <impl/cuda/KokkosSoftmax_SplitGemmKernels.hpp>
#include <impl/cuda/KokkosSoftmax_TensorMap.hpp>

#include <iterator>

namespace KokkosSoftmax::impl {
namespace {

__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float(static_cast<std::uint32_t>(exponent + 127) << 23);
}

// ---- The split --------------------------------------------------------------------------------------------

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

/// Two elements as their halves, or the high ones alone; counts those that are kept worse than these can:
/// 2^-23 of them, or 2^-11.
template <int parts>
struct HalvesOfTwo {
  __half2 high, low;

  __device__ __forceinline__ HalvesOfTwo(float a, float b, const RowScale& scale, int& lossy) {
    const float p = a * scale.first * scale.second, q = b * scale.first * scale.second;
    high = __floats2half2_rn(p, q);
    const float2 h = __half22float2(high);
    if constexpr (parts == SplitMatrix::rounded) {
      constexpr float smallest_normal = 1.0f / 16384;
      lossy += fabsf(p) < smallest_normal && h.x != p;
      lossy += fabsf(q) < smallest_normal && h.y != q;
      return;
    }
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
  template <int parts>
  __device__ __forceinline__ int store(std::uint16_t* high, std::uint16_t* low, const RowScale& scale) const {
    int lossy = 0;
    __half2 h[4], l[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const HalvesOfTwo<parts> two(scale.finite ? v[2 * i] : 0.0f, scale.finite ? v[2 * i + 1] : 0.0f, scale,
                                   lossy);
      h[i] = two.high;
      l[i] = two.low;
    }
    *reinterpret_cast<uint4*>(high) = *reinterpret_cast<const uint4*>(h);
    if constexpr (parts == SplitMatrix::split)
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
template <bool aligned, bool resident, int parts>
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
  // The product may be launched now: it waits for the end of this kernel itself.
  griddepcontrol_launch_dependents();
  const RowScale scale(magnitude);
  int lossy = 0;
  for (std::int64_t pass = 0; pass < end; pass += split_pass) {
    if (!resident) load(pass);
#pragma unroll
    for (int i = 0; i < split_vectors; ++i) {
      const std::int64_t column = column_of(pass, i);
      if (column < from.columns) {
        const std::int64_t at = row * to.leading + column;
        lossy += part[i].store<parts>(to.high + at, to.low + at, scale);
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
template <int parts>
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
    const int lossy = part.store<parts>(to.high + at, to.low + at, scale);
    if (lossy > 0) atomicAdd(&info.lossy, static_cast<float>(lossy));
  }
  if (column == 0) {
    info.unscale_first = scale.unscale_first;
    info.unscale_second = scale.unscale_second;
    if (!scale.finite) atomicAdd(&info.lossy, __uint_as_float(infinity_bits));
  }
}

// ---- Launches ---------------------------------------------------------------------------------------------

int multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 1;
  return count;
}

/// Calls use with the kernel for rows whose columns are neighbours.
template <int parts, class Use>
auto with_split_kernel(const StridedFloats& from, const Use& use) {
  const bool aligned = reinterpret_cast<std::uintptr_t>(from.data) % 16 == 0 && from.row_stride % 4 == 0;
  if (from.columns <= split_pass)
    return aligned ? use(split_rows_kernel<true, true, parts>) : use(split_rows_kernel<false, true, parts>);
  return aligned ? use(split_rows_kernel<true, false, parts>) : use(split_rows_kernel<false, false, parts>);
}

bool load_kernels(int device) {
  int before = 0, major = 0, minor = 0;
  if (cudaGetDevice(&before) != cudaSuccess || cudaSetDevice(device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    return false;
  }
  bool there = major == 9 && minor == 0 && tensor_map_encoder() && load_gemm_kernels<PlainLogits>();
  cudaFuncAttributes attributes{};
  const auto load = [&](auto* kernel) {
    there = there && cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess;
  };
  const auto load_for = [&]<int parts>(std::integral_constant<int, parts>) {
    load(split_rows_kernel<true, true, parts>);
    load(split_rows_kernel<true, false, parts>);
    load(split_rows_kernel<false, true, parts>);
    load(split_rows_kernel<false, false, parts>);
    load(strided_split_kernel<parts>);
  };
  load_for(std::integral_constant<int, SplitMatrix::split>{});
  load_for(std::integral_constant<int, SplitMatrix::rounded>{});
  load(strided_magnitude_kernel);
  (void)cudaGetLastError();
  return cudaSetDevice(before) == cudaSuccess && there;
}

}  // namespace

bool split_gemm_is_there(int device) {
  static std::atomic<int> known[64];
  return asked_once(known, device, [device] { return load_kernels(device); });
}

SplitGemmPlan split_gemm_plan(std::int64_t m, std::int64_t n, int sms, bool w_must_be_left) {
  // What a K step costs a tile, and what a row of a tile costs in traffic from L2, over the cost of a tile of
  // 128: on an H200 1.09 us; 16 to 64 are limited by shared memory, and all of them by 6.2 TB/s.
  const auto step = [](int width) {
    return width == 128 ? 1 : width == 64 ? 0.62 : width == 32 ? 0.47 : 0.43;
  };
  constexpr double traffic = 3.8e-5;
  SplitGemmPlan best{false, 128, 0};
  for (auto kernel = std::rbegin(split_gemm_kernels); kernel != std::rend(split_gemm_kernels); ++kernel) {
    if (w_must_be_left && !kernel->w_is_left) continue;
    const std::int64_t left = kernel->w_is_left ? n : m, right = kernel->w_is_left ? m : n;
    const std::int64_t tiles =
        (left + left_rows - 1) / left_rows * ((right + kernel->width - 1) / kernel->width);
    const double cost = std::max(static_cast<double>((tiles + sms - 1) / sms) * step(kernel->width),
                                 static_cast<double>(tiles * (left_rows + kernel->width)) * traffic);
    if (best.cost == 0 || cost < best.cost * 0.999) best = {kernel->w_is_left, kernel->width, cost};
  }
  return best;
}

cudaError_t encode_halves(CUtensorMap& map, const SplitMatrix& m, int box_rows) {
  const auto leading_bytes = static_cast<cuuint64_t>(m.leading()) * 2;
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(m.columns), static_cast<cuuint64_t>(m.rows),
                                static_cast<cuuint64_t>(m.parts)};
  const cuuint64_t strides[] = {leading_bytes, leading_bytes * static_cast<cuuint64_t>(m.rows)};
  const cuuint32_t box[] = {step_columns, static_cast<cuuint32_t>(box_rows), 1}, every[] = {1, 1, 1};
  const CUresult result =
      tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3, m.halves, extents, strides, box, every,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

namespace {

template <int parts>
cudaError_t split_into_parts(const SplitMatrix& to, unsigned char* flags, std::size_t flag_count,
                             cudaStream_t stream) {
  const StridedFloats& from = to.given;
  const SplitTarget target(to, flags, flag_count);
  if (from.column_stride == 1 || from.columns == 1) {
    return with_split_kernel<parts>(from, [&](auto kernel) {
      kernel<<<static_cast<unsigned>(from.rows), split_threads, 0, stream>>>(from, target);
      return cudaGetLastError();
    });
  }
  const cudaError_t error =
      cudaMemsetAsync(to.row, 0, static_cast<std::size_t>(from.rows) * sizeof(SplitRow), stream);
  if (error != cudaSuccess) return error;
  const std::int64_t row_tiles = (from.rows + strided_rows - 1) / strided_rows;
  constexpr std::int64_t chunk = 1024;
  strided_magnitude_kernel<<<static_cast<unsigned>(row_tiles * ((from.columns + chunk - 1) / chunk)), 256, 0,
                             stream>>>(from, target, row_tiles, chunk);
  strided_split_kernel<parts>
      <<<static_cast<unsigned>(row_tiles * ((from.columns + strided_columns - 1) / strided_columns)), 256, 0,
         stream>>>(from, target, row_tiles);
  return cudaGetLastError();
}

}  // namespace

cudaError_t split_rows(const SplitMatrix& to, unsigned char* flags, std::size_t flag_count,
                       cudaStream_t stream) {
  return to.parts == SplitMatrix::rounded
             ? split_into_parts<SplitMatrix::rounded>(to, flags, flag_count, stream)
             : split_into_parts<SplitMatrix::split>(to, flags, flag_count, stream);
}

cudaError_t prepare_gemm(GemmLaunch& launch, const SplitMatrix& x, const SplitMatrix& w,
                         const StridedResult& result, unsigned char* flags, const SplitGemmPlan& plan) {
  const SplitMatrix &left = plan.w_is_left ? w : x, &right = plan.w_is_left ? x : w;
  cudaError_t error = encode_halves(launch.left, left, left_rows);
  if (error == cudaSuccess) error = encode_halves(launch.right, right, plan.width);
  GemmArguments& a = launch.arguments;
  a.left_extent = left.rows;
  a.right_extent = right.rows;
  a.steps = static_cast<int>((x.columns + step_columns - 1) / step_columns);
  a.left = left.row;
  a.right = right.row;
  a.result = result.data;
  a.left_stride = plan.w_is_left ? result.column_stride : result.row_stride;
  a.right_stride = plan.w_is_left ? result.row_stride : result.column_stride;
  a.result_in_pairs = a.right_stride == 1 && (a.left_stride % 2 == 0 || left.rows == 1) &&
                      reinterpret_cast<std::uintptr_t>(result.data) % 8 == 0;
  a.flags = flags;
  a.flags_a_row = (w.rows + 127) / 128;
  launch.multiprocessors = multiprocessors();
  return error;
}

FloatArguments float_arguments(const StridedFloats& x, const SplitMatrix& w, const StridedResult& result,
                               const unsigned char* flags) {
  return {x, w, w.leading(), result, flags};
}

cudaError_t split_gemm(const SplitMatrix& x, const SplitMatrix& w, const StridedResult& result,
                       unsigned char* flags, const SplitGemmPlan& plan, cudaStream_t stream) {
  return launch_split_gemm(x, w, result, flags, plan, PlainLogits{}, stream);
}

cudaError_t float_gemm(const StridedFloats& x, const SplitMatrix& w, const StridedResult& result,
                       const unsigned char* flags, cudaStream_t stream) {
  return launch_float_gemm(x, w, result, flags, multiprocessors(), PlainLogits{}, stream);
}

}  // namespace KokkosSoftmax::impl
