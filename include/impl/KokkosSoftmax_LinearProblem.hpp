// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The canonical form of a head: three matrices with strides, and what happens to the logits X W^T.

#ifndef KOKKOSSOFTMAX_LINEARPROBLEM_HPP
#define KOKKOSSOFTMAX_LINEARPROBLEM_HPP

#include <KokkosSoftmax_Transforms.hpp>

namespace KokkosSoftmax {

/// How a head multiplies float operands. `ieee`: no less accurate than products and sums in IEEE single
/// precision. `tf32`: operands rounded to the 10 bits of fraction that TF32 has, on GPUs whose tensor cores
/// have it, `ieee` elsewhere. double is always IEEE; 16-bit operands are exact in both and summed in float.
enum class Precision { ieee, tf32 };

namespace impl {

/// A matrix of rows x columns.
template <class T>
struct Matrix {
  T* data = nullptr;
  index_type rows = 0, columns = 0;
  index_type row_stride = 0, column_stride = 0;

  Matrix row_panel(index_type first, index_type count) const {
    return {data + first * row_stride, count, columns, row_stride, column_stride};
  }
  Matrix column_panel(index_type first, index_type count) const {
    return {data + first * column_stride, rows, count, row_stride, column_stride};
  }
  Block block() const {
    Block b;
    b.data = reinterpret_cast<const char*>(data);
    b.scalar_bytes = sizeof(T);
    b.rank = 2;
    b.extent[0] = rows;
    b.extent[1] = columns;
    b.stride[0] = row_stride;
    b.stride[1] = column_stride;
    return b;
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// What happens to the logits. Bound: plain device data.

/// How many BatchNorms a bound transform holds.
template <class T>
inline constexpr int batch_norms_v = 0;
template <class M, class V, class G, class B>
inline constexpr int batch_norms_v<BoundBatchNorm<M, V, G, B>> = 1;
template <class A, class B>
inline constexpr int batch_norms_v<BoundChain<A, B>> = batch_norms_v<A> + batch_norms_v<B>;

/// A transform, then the softmax.
template <class Transform_>
struct PlainHead {
  using Transform = Transform_;
  static constexpr bool has_statistics = false;
  static constexpr int normalizers = batch_norms_v<Transform_>;
  Transform transform;
};

/// One value a column, written; no data: absent.
template <class T>
struct ColumnTarget {
  T* data = nullptr;
  index_type stride = 0;
  KOKKOS_FORCEINLINE_FUNCTION T& operator()(index_type column) const { return data[column * stride]; }
};

template <class G, class B, class M, class V>
struct BoundStatistics {
  ColumnOperand<G> gamma;
  ColumnOperand<B> beta;
  double eps;
  ColumnTarget<M> running_mean;
  ColumnTarget<V> running_variance;
  double momentum;
};

/// A transform, the normalisation of each column by the statistics of the whole batch, a transform, then the
/// softmax.
template <class Before_, class Statistics_, class After_>
struct StatisticsHead {
  using Before = Before_;
  using Statistics = Statistics_;
  using After = After_;
  static constexpr bool has_statistics = true;
  static constexpr int normalizers = 1 + batch_norms_v<Before_> + batch_norms_v<After_>;
  Before before;
  Statistics statistics;
  After after;
};

/// A head in canonical form.
template <class X_, class W_, class Y_, class Head_>
struct LinearProblem {
  using X = X_;
  using W = W_;
  using Y = Y_;
  using Head = Head_;
  using Acc = accumulator_t<accumulator_t<X, W>, Y>;

  Matrix<const X> x;  ///< M x K
  Matrix<const W> w;  ///< N x K
  Matrix<Y> y;        ///< M x N
  Operation operation;
  Precision precision;
  Head head;

  /// The name under which the softmax of the logits is chosen and forced.
  const char* softmax_step() const {
    return operation == Operation::softmax ? "linear_softmax/softmax" : "linear_log_softmax/log_softmax";
  }
  const char* name() const {
    return operation == Operation::softmax ? "linear_softmax" : "linear_log_softmax";
  }
};

}  // namespace impl
}  // namespace KokkosSoftmax

#endif
