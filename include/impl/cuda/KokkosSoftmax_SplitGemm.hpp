// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// A float GEMM as three products of binary16 on the tensor cores of Hopper: what
/// src/KokkosSoftmax_SplitGemm.cpp offers. Knows no Kokkos.
///
/// **The split.** A row is multiplied by the power of two that brings its largest magnitude to [2^14, 2^15);
/// each element p of it becomes high = binary16(p) and low = binary16((p - high) 2^11). Because low is scaled
/// up, the pair keeps p to 2^-23 as long as |p| >= 2^-13, that is down to 2^-27 of the row's largest
/// magnitude, and to 2^-36 absolutely below that. x w = (high high) + 2^-11 (high low + low high); low low,
/// at most 2^-22 of x w, is dropped.
///
/// **The sum.** The tensor core truncates what it adds up, a bias of about 2^-24 for each 16 of K, so high
/// high is moved to a float sum and started anew every 64 of K; the cross products, 2^-11 of it, run through.
///
/// **The guard.** For each row the split counts the elements n that are smaller than 2^-13 and not kept
/// exactly. Only they can lose more than 2^-23 of themselves: together at most n 2^-36 max|w| <= n 2^-21 in
/// the scaled sum. So where the sum is at least 2 (n_x + n_w) in magnitude, that loss is at most 2^-22 of it,
/// and no more than 2^-22 of |x| |w|. Any other element, and any of a row with an infinity or NaN, is written
/// as a mark (a NaN that no arithmetic produces) and its tile flagged; a second kernel computes the marked
/// elements in float arithmetic from the operands as given. What happens to an element depends on its two
/// rows alone, so the same row gives the same bits in any batch.
///
/// **Rounded rows** are high halves alone, and their product is one in place of three: operands with the 10
/// bits of fraction that TF32 has, at twice TF32's speed. Elements that a half does not keep to 2^-11 are
/// smaller than 2^-14 and off by at most 2^-25, n of them by n 2^-10 in the scaled sum: the same guard, with
/// their number, lets through 2^-11 of the sum at most.

#ifndef KOKKOSSOFTMAX_SPLITGEMM_HPP
#define KOKKOSSOFTMAX_SPLITGEMM_HPP

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

namespace KokkosSoftmax::impl {

struct StridedFloats {
  const float* data = nullptr;
  std::int64_t rows = 0, columns = 0, row_stride = 0, column_stride = 0;
};

/// What the product has to know of a row that was split.
struct alignas(16) SplitRow {
  float unscale_first, unscale_second;  ///< their product takes the scale away; one alone may not be a float
  float lossy;  ///< how many elements are kept worse than halves can (2^-23 of them); infinity: not finite
  std::uint32_t magnitude;  ///< the bits of the largest magnitude
};

/// A matrix as its halves: all high ones, then all low ones, rows `leading()` apart, then the rows' SplitRow.
/// A rounded one has high halves alone.
struct SplitMatrix {
  std::int64_t rows = 0, columns = 0;
  std::uint16_t* halves = nullptr;
  SplitRow* row = nullptr;
  /// The matrix as it was: all of it, or, with `given_row`, the rows that are lossy, and where each row is
  /// there.
  StridedFloats given;
  const std::int32_t* given_row = nullptr;
  int parts = split;

  static constexpr int split = 2, rounded = 1;
  std::int64_t leading() const { return leading(columns); }
  /// The copy engine wants rows that begin at a multiple of 16 bytes.
  static std::int64_t leading(std::int64_t columns) { return (columns + 7) / 8 * 8; }
  static std::size_t halves_bytes(std::int64_t rows, std::int64_t columns, int parts = split) {
    return (static_cast<std::size_t>(parts * rows * leading(columns)) * 2 + 255) / 256 * 256;
  }
  static std::size_t bytes(std::int64_t rows, std::int64_t columns, int parts = split) {
    return halves_bytes(rows, columns, parts) + row_bytes(rows);
  }
  static std::size_t row_bytes(std::int64_t rows) {
    return (static_cast<std::size_t>(rows) * sizeof(SplitRow) + 255) / 256 * 256;
  }
  static SplitMatrix of(const StridedFloats& given, void* memory, int parts = split) {
    auto* base = static_cast<char*>(memory);
    return {given.rows,
            given.columns,
            reinterpret_cast<std::uint16_t*>(base),
            reinterpret_cast<SplitRow*>(base + halves_bytes(given.rows, given.columns, parts)),
            given,
            nullptr,
            parts};
  }
};

/// A result with any strides.
struct StridedResult {
  float* data = nullptr;
  std::int64_t row_stride = 0, column_stride = 0;
};

/// How a product is cut; does not change an element's bits.
struct SplitGemmPlan {
  bool w_is_left;  ///< tiles are 128 rows of the left operand by `width` rows of the right one
  int width;       ///< 16, 32, 64 or 128
  double cost;     ///< of a K step of 64, over that of one tile 128 wide
};

/// By extents alone.
SplitGemmPlan split_gemm_plan(std::int64_t m, std::int64_t n, int multiprocessors,
                              bool w_must_be_left = false);

/// One flag for each 128 x 128 elements of the result.
inline std::size_t split_gemm_flags(std::int64_t m, std::int64_t n) {
  return static_cast<std::size_t>((m + 127) / 128 * ((n + 127) / 128));
}

/// Whether the kernels were compiled for the device; loads them, so that a launch can be captured.
bool split_gemm_is_there(int device);
bool rounded_gemm_is_there(int device);

/// Splits or rounds `to.given`; clears `flags`.
cudaError_t split_rows(const SplitMatrix& to, unsigned char* flags, std::size_t flag_count,
                       cudaStream_t stream);

/// result = x w^T, of rows that split_rows wrote; marks and flags what the guard does not let through.
cudaError_t split_gemm(const SplitMatrix& x, const SplitMatrix& w, const StridedResult& result,
                       unsigned char* flags, const SplitGemmPlan& plan, cudaStream_t stream);

/// The same of rounded rows.
cudaError_t rounded_gemm(const SplitMatrix& x, const SplitMatrix& w, const StridedResult& result,
                         unsigned char* flags, cudaStream_t stream);
/// How many tiles one after the other it has for the multiprocessors.
std::int64_t rounded_gemm_rounds(std::int64_t m, std::int64_t n, int multiprocessors);

/// The same in float arithmetic: of the marked elements in flagged tiles, or of all without flags. Without
/// halves w is taken from `w.given`.
cudaError_t float_gemm(const StridedFloats& x, const SplitMatrix& w, const StridedResult& result,
                       const unsigned char* flags, cudaStream_t stream);

}  // namespace KokkosSoftmax::impl

#endif
