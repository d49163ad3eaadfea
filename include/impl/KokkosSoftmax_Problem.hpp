// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The canonical form of a call: any views and axis become rows x columns with strides, so that a kernel is
/// instantiated once for each (input scalar, output scalar, transform).

#ifndef KOKKOSSOFTMAX_PROBLEM_HPP
#define KOKKOSSOFTMAX_PROBLEM_HPP

#include <impl/KokkosSoftmax_Check.hpp>
#include <impl/KokkosSoftmax_Online.hpp>

namespace KokkosSoftmax {

/// The dimension that is reduced; negative counts from the end.
struct Axis {
  int index = -1;
};
constexpr Axis axis(int index) {
  return Axis{index};
}

namespace impl {

inline constexpr int max_outer_rank = max_rank - 1;

/// The shape of the logits as the user sees them, and where the axis is.
struct LogitShape {
  int rank = 1;
  int axis = 0;
  index_type extent[max_rank] = {};
  index_type rows = 1;
  index_type columns = 0;

  static LogitShape of(const CallContext& context, const Block& x, Axis axis) {
    LogitShape shape;
    shape.rank = x.rank;
    if (x.rank < 1) context.fail("x has rank 0; a softmax needs at least one dimension");
    shape.axis = axis.index < 0 ? axis.index + x.rank : axis.index;
    if (shape.axis < 0 || shape.axis >= x.rank) {
      context.fail("axis " + std::to_string(axis.index) + " is out of range for x of rank " +
                   std::to_string(x.rank) + " and extents " + x.extents_text());
    }
    for (int d = 0; d < x.rank; ++d) {
      shape.extent[d] = x.extent[d];
      if (d != shape.axis) shape.rows *= x.extent[d];
    }
    shape.columns = x.extent[shape.axis];
    return shape;
  }

  std::string text() const {
    std::string all = "(";
    for (int d = 0; d < rank; ++d) all += (d ? ", " : "") + std::to_string(extent[d]);
    return all + ")";
  }
};

/// Where the rows lie: the dimensions other than the axis, merged where the strides of all operands allow it,
/// in the memory order of x (the last one fastest), each with its weight in the linear index of the row.
struct RowGeometry {
  int rank = 0;
  index_type rows = 1;
  index_type columns = 0;
  index_type x_column_stride = 1;
  index_type y_column_stride = 1;
  index_type extent[max_outer_rank] = {};
  index_type x_stride[max_outer_rank] = {};
  index_type y_stride[max_outer_rank] = {};
  index_type row_weight[max_outer_rank] = {};

  struct Row {
    index_type x_offset;
    index_type y_offset;
    index_type index;  ///< linear over the user's dimensions, the last of them fastest
  };

  KOKKOS_FORCEINLINE_FUNCTION Row row(index_type position) const {
    Row result{0, 0, 0};
#if defined(__CUDA_ARCH__)
#pragma unroll 1  // most problems have one dimension of rows: their code shall not lie behind all the others'
#endif
    for (int d = rank - 1; d > 0; --d) {
      const index_type next = position / extent[d];
      const index_type i = position - next * extent[d];
      position = next;
      result.x_offset += i * x_stride[d];
      result.y_offset += i * y_stride[d];
      result.index += i * row_weight[d];
    }
    if (rank > 0) {
      result.x_offset += position * x_stride[0];
      result.y_offset += position * y_stride[0];
      result.index += position * row_weight[0];
    }
    return result;
  }

  /// row() of one dimension of rows, or of a single row: nothing to find out before its logits are read.
  KOKKOS_FORCEINLINE_FUNCTION Row row_of_one_dimension(index_type position) const {
    return {position * x_stride[0], position * y_stride[0], position * row_weight[0]};
  }

  /// The offset in x of the row that lies behind all others.
  KOKKOS_FORCEINLINE_FUNCTION index_type last_x_offset() const {
    index_type last = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
    for (int d = 0; d < rank; ++d) {
      if (x_stride[d] > 0) last += (extent[d] - 1) * x_stride[d];
    }
    return last;
  }

  /// `y` has the extents of the shape, or those without the axis.
  static RowGeometry of(const LogitShape& shape, const Block& x, const Block& y) {
    RowGeometry g;
    g.rows = shape.rows;
    g.columns = shape.columns;
    g.x_column_stride = x.stride[shape.axis];
    const bool y_has_axis = y.rank == x.rank;
    g.y_column_stride = y_has_axis ? y.stride[shape.axis] : 0;
    index_type weight = 1;
    for (int d = shape.rank - 1; d >= 0; --d) {
      if (d == shape.axis) continue;
      if (shape.extent[d] > 1) {
        const int at = g.rank++;
        g.extent[at] = shape.extent[d];
        g.x_stride[at] = x.stride[d];
        g.y_stride[at] = y.stride[y_has_axis || d < shape.axis ? d : d - 1];
        g.row_weight[at] = weight;
      }
      weight *= shape.extent[d];
    }
    // Insertion sort, stable: rising distances in x first, so fastest first; reversed below.
    for (int i = 1; i < g.rank; ++i) {
      for (int j = i; j > 0 && std::abs(g.x_stride[j]) < std::abs(g.x_stride[j - 1]); --j) g.swap(j, j - 1);
    }
    for (int i = 0, j = g.rank - 1; i < j; ++i, --j) g.swap(i, j);
    // Merge a dimension into the next faster one where they continue each other in x, in y and in the row
    // index.
    int kept = 0;
    for (int d = 1; d < g.rank; ++d) {
      const bool continues = g.x_stride[kept] == g.extent[d] * g.x_stride[d] &&
                             g.y_stride[kept] == g.extent[d] * g.y_stride[d] &&
                             g.row_weight[kept] == g.extent[d] * g.row_weight[d];
      if (continues) {
        g.extent[kept] *= g.extent[d];
      } else {
        g.extent[++kept] = g.extent[d];
      }
      g.x_stride[kept] = g.x_stride[d];
      g.y_stride[kept] = g.y_stride[d];
      g.row_weight[kept] = g.row_weight[d];
    }
    if (g.rank > 0) g.rank = kept + 1;
    return g;
  }

 private:
  void swap(int i, int j) {
    std::swap(extent[i], extent[j]);
    std::swap(x_stride[i], x_stride[j]);
    std::swap(y_stride[i], y_stride[j]);
    std::swap(row_weight[i], row_weight[j]);
  }
};

/// A call in canonical form. `Transform` is bound: a device functor.
template <class In_, class Out_, class Transform_>
struct RowsProblem {
  using In = In_;
  using Out = Out_;
  using Transform = Transform_;
  using Acc = accumulator_t<In, Out>;

  const In* x;
  Out* y;
  Operation operation;
  /// A dimension other than the axis is at least as fast in memory as the axis. Decided by the strides as
  /// given, not by the number of rows, because the kernels that it chooses between do not give the same bits.
  bool axis_is_strided;
  RowGeometry geometry;
  Transform transform;
};

inline bool axis_is_strided(const LogitShape& shape, const Block& x) {
  const index_type along_axis = std::abs(x.stride[shape.axis]);
  for (int d = 0; d < shape.rank; ++d) {
    if (d != shape.axis && x.stride[d] != 0 && std::abs(x.stride[d]) <= along_axis) return true;
  }
  return false;
}

}  // namespace impl
}  // namespace KokkosSoftmax

#endif
