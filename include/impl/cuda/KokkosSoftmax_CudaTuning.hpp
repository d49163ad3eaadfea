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
/// joined in a binary tree, those of the slices one after the other in a lane and then in a tree over lanes;
/// where there are runs of slices, each of these first in a tree of its own, and then in place of a slice.
/// All by indices in the row, so that every kernel that follows it gives the same bits for the same row.
struct ReductionPlan {
  static constexpr int shares = 8;  ///< warps that reduce a slice, in one block or in several
  static constexpr int threads = shares * 32;

  index_type slices;  ///< of a row
  int slice_columns;  ///< of every slice but the last, which may have fewer; a multiple of 128 bytes
  /// Slices of a row may be read twice, the second time as far as possible from L2: all of them would fill
  /// much of the rings of the whole grid before the first could be finished.
  bool reads_twice;
  /// The first slices of a row, in runs that one block joins for all others once it has reduced what comes
  /// `slices_ahead` later.
  index_type runs;
  static constexpr index_type slices_of_run = 32, slices_ahead = 3 * slices_of_run;

  /// Slices are reduced part by part: one that ends within a part costs no more than the rest of it.
  static constexpr int part_bytes = 4096;
  static constexpr int most_parts = 9;
  /// The largest slice: six of these fit a multiprocessor, and seven of the usual length. What a slice costs
  /// beside its bytes, and the way of its result through L2, ask for large ones. (Fraction of a copy of 1 GiB
  /// on one H200, slices of 24, 32 and 36 KB: float 65536 columns 0.87, 0.97, 0.97, 1 M 0.90, 0.95, 0.90;
  /// half 131072 columns 0.82, 0.97, 0.96. A row a little longer than so many of the usual ones, 65537
  /// columns of bfloat16: in 4 slices 0.91, in 5 0.73.)
  static constexpr int largest_slice_bytes = most_parts * part_bytes;
  static constexpr int usual_slice_bytes = 8 * part_bytes;
  /// Slices whose results a warp asks for at once: of more it would ask too early.
  static constexpr int slices_at_once = 4 * 32;

  /// A row of more bytes may be read twice. Where registers hold slices, too (`parks`, see parks_slices),
  /// they do so of such a row. (One H200, fractions of a copy where they do not and do: 1.6 M columns of
  /// float 0.95 and 0.93, 1.8 M 0.95 both, 2 M 0.94 and 0.95.)
  static constexpr index_type largest_row_bytes_held(bool parks) {
    return (parks ? 15 : 16) * index_type(512 * 1024);
  }
  /// Outputs larger than the inputs (`widens`) are better written in smaller bursts. (One H200, bfloat16 to
  /// float, fractions of a copy, slices of 16, 20, 24 and 32 KB: 32768 columns 0.965, 0.935, 0.935 and 0.91,
  /// 65536 0.97, 0.94, 0.93 and 0.92, 131072 0.94, 0.955, 0.94 and 0.92, 151643 0.925, 0.96, - and 0.92, 1 M
  /// 0.95, 0.965, 0.945 and 0.935.)
  static constexpr index_type short_slice_bytes = 5 * part_bytes, shortest_slice_bytes = 4 * part_bytes;
  static constexpr bool has_short_slices(index_type row_bytes, bool widens) {
    return widens && row_bytes <= slices_at_once * usual_slice_bytes;
  }

  /// The slices of such a row: the less room it leaves in the rings, the more it pays to free that in small
  /// parts, though these cost more. (Fraction of a copy of 1 GiB of float on one H200, slices of 32, 24 and
  /// 20 KB, all held: 10 MB a row 0.93, 0.90, 0.87, 11 MB 0.85, 0.92, 0.80, 12 MB 0.84, 0.89, 0.86, 14 MB
  /// 0.82, 0.88, 0.85, 16 MB 0.72, 0.72, 0.83; all read twice 0.75 to 0.80.) Where registers hold slices,
  /// too, these are as long as leaves room for seven wherever they begin, unless a warp would then have to
  /// ask once more for their results. (With these and the usual ones: 4194305 columns of float 0.875 and
  /// 0.83, 5 M 0.89 both, but 2097152 0.93 and 0.955, 4194304 0.89 and 0.905; with 24 KB 3 M 0.88 for 0.92.)
  static constexpr index_type slice_bytes_of(index_type row_bytes, bool parks, bool widens) {
    constexpr index_type mega = 1024 * 1024;
    if (has_short_slices(row_bytes, widens)) {
      const bool is_short = row_bytes <= 8 * shortest_slice_bytes;
      return std::max(is_short ? shortest_slice_bytes : short_slice_bytes,
                      ceil_div(row_bytes, part_bytes * slices_at_once) * part_bytes);
    }
    if (parks && row_bytes > largest_row_bytes_held(parks)) {
      constexpr index_type shorter = usual_slice_bytes - 128;
      const auto turns = [&](index_type bytes) { return (row_bytes - 1) / (bytes * slices_at_once) + 1; };
      return turns(shorter) == turns(usual_slice_bytes) ? shorter : usual_slice_bytes;
    }
    if (row_bytes <= 10 * mega || row_bytes > 17 * mega) return usual_slice_bytes;
    return row_bytes <= 14 * mega ? 6 * part_bytes : 5 * part_bytes;
  }

  /// Where a warp would have to ask for the results of a row's slices twice for each one that it finishes (of
  /// slices_at_once it asks at once, and rows of more than 160 it finishes several slices of), and where it
  /// would have to ask many times. (One H200, fractions of a copy without runs and with them: float 1.06 M
  /// columns 0.84 and 0.91, 1.3 M 0.90 and 0.93, 6 M 0.72 and 0.75, 20 M 0.59 and 0.68, with a bias as large
  /// as x 0.58 and 0.65; bfloat16 2.2 M 0.80 and 0.91. But float 1.35 M 0.95 and 0.94, 3 M 0.86 and 0.82, 4.2
  /// M 0.81 and 0.77, and without slices_ahead, so that blocks wait for each other, 1 M 0.96 and 0.87. Where
  /// registers hold slices, too, 4.2 M 0.92 and 0.88, 5 M 0.89 and 0.86, but 6 M 0.76 and 0.84. Double, of
  /// which it asks for fewer at once, 700000 columns 0.64 and 0.69, 1 M 0.63 and 0.79, 2 M 0.44 and 0.60.)
  static constexpr index_type runs_of(index_type slices, index_type row_bytes, bool parks, index_type size) {
    const bool pays = (slices > slices_at_once && (slices <= 160 || size == 8)) ||
                      row_bytes > (parks ? 22 : 16) * 1024 * 1024;
    return pays ? std::max<index_type>(0, (slices - slices_ahead) / slices_of_run) : 0;
  }

  template <class In>
  static constexpr ReductionPlan of(index_type columns, bool parks, bool widens = false) {
    constexpr index_type size = sizeof(In), line = 128 / size;
    const auto slices_of = [&](index_type bytes) { return ceil_div(columns * size, bytes); };
    // Larger ones where the usual ones would be far from full: a row a little longer than so many of these.
    const index_type usual = slice_bytes_of(columns * size, parks, widens);
    const bool has_short = has_short_slices(columns * size, widens);
    const index_type largest = has_short ? std::max(usual, short_slice_bytes) : largest_slice_bytes;
    const bool fills = columns * size * 16 >= slices_of(usual) * usual * 15;
    index_type wanted = slices_of(fills ? usual : largest);
    // No more results than a warp asks for at once. (One H200, 1.05 to 1.17 M columns of float 0.945 of a
    // copy, in 129 to 143 slices 0.915; but with a bias as large as x 0.88 and 1.00, with one for all rows
    // 0.71 and 0.82, 2.3 M of bfloat16 0.88 and 0.91.)
    const bool as_many_as_asked_for =
        parks && wanted > slices_at_once && slices_of(largest_slice_bytes) <= slices_at_once;
    if (as_many_as_asked_for) wanted = slices_at_once;
    // Slices of one length: a short last one would hold a slot that is mostly empty. But, in slices of the
    // usual length or larger ones, a whole number of parts, read as whole ones: what is left for the last one
    // is less of a loss than a part of which each slice has a little. (One H200, fractions of a copy, all of
    // one length and so: bfloat16 80001 columns 0.95 and 0.96, with a factor 0.78 and 0.86, 393217 0.94 and
    // 0.96, with a factor 0.81 and 0.92, with a mask 0.81 and 0.88, logsumexp of it 0.83 and 0.97; float
    // 128256 0.957 and 0.964, with a mask 0.953 and 0.965. Of the larger ones bfloat16 50257 columns with a
    // factor 0.92 and 0.94, a temperature 0.75 and 0.79, a bias for all rows 0.61 and 0.65, 131073 columns
    // with a temperature 0.72 and 0.78; but with a mask, beside whose operands fewer slots fit then, by runs
    // apart 0.86 to 0.89 and 0.84. A slice alone is no longer than its row, nor is its slot.)
    const bool in_parts = (usual == usual_slice_bytes || has_short) && !as_many_as_asked_for;
    const index_type unit = in_parts ? part_bytes / size : line;
    const index_type length =
        std::min(ceil_div(ceil_div(columns, wanted), unit) * unit, ceil_div(columns, line) * line);
    const index_type slices = ceil_div(columns, length);
    return {slices, static_cast<int>(length), columns * size > largest_row_bytes_held(parks),
            runs_of(slices, columns * size, parks, size)};
  }
};

}  // namespace KokkosSoftmax::impl

#endif
