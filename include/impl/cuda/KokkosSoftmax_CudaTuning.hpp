// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// How the CUDA kernels cut rows, by length and type, and the parameters that move no bits, each with the
/// measurement behind it.

#ifndef KOKKOSSOFTMAX_CUDATUNING_HPP
#define KOKKOSSOFTMAX_CUDATUNING_HPP

#include <impl/KokkosSoftmax_Scalars.hpp>

#include <algorithm>

namespace KokkosSoftmax::impl {

/// How a long row is cut. A slice belongs to `shares` warps; lane l of warp w has the units i * 256 + w * 32
/// + l of the slice, a unit being one scalar, or two neighbours of 16 bits. (Where sums are formed in float,
/// a share's is in fixed point, and several warps may have a part of the share each.) The warps' results are
/// joined in a binary tree, those of the slices one after the other in a lane and then in a tree over lanes.
/// All by indices in the row, so that every kernel that follows it gives the same bits for the same row.
struct ReductionPlan {
  static constexpr int shares = 8;  ///< warps that reduce a slice, in one block or in several
  static constexpr int threads = shares * 32;

  index_type slices;  ///< of a row
  int slice_columns;  ///< of every slice but the last, which may have fewer; a multiple of 128 bytes
  /// A row is read twice, the second time as far as possible from L2: its slices would fill the rings of the
  /// whole grid before the first of them could be finished.
  bool reads_twice;

  /// The largest slice. What a slice costs beside its bytes, and the way of its result through L2, ask for
  /// large ones; seven of these fit a multiprocessor. (Fraction of a copy with slices of 16, 24 and 32 KB, 1
  /// GiB of float on one H200: 16384 columns 0.78, 0.88, 0.93; 393216 columns 0.70, 0.94, 0.94; when
  /// finishers still stored to global memory themselves. kokkossoftmax_tune_sliced_rows measures it again.)
  static constexpr int largest_slice_bytes = 32768;
  /// A row of more bytes is read twice (4 M columns of float 0.59 held, 0.75 read twice; 2 M 0.85 and 0.76).
  static constexpr index_type largest_row_bytes_held = 8 * 1024 * 1024;

  template <class In>
  static constexpr ReductionPlan of(index_type columns) {
    constexpr index_type width = 128 / sizeof(In);
    const index_type largest = largest_slice_bytes / static_cast<int>(sizeof(In));
    const index_type wanted = (columns + largest - 1) / largest;
    // Slices of one length: a short last one would hold a slot that is mostly empty.
    const index_type length = ((columns + wanted - 1) / wanted + width - 1) / width * width;
    return {(columns + length - 1) / length, static_cast<int>(length),
            columns * static_cast<index_type>(sizeof(In)) > largest_row_bytes_held};
  }
};

}  // namespace KokkosSoftmax::impl

#endif
