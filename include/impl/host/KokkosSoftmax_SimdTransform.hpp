// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Transforms for the host's kernels whose lanes are rows: of one type for all transforms with row objects of
/// about the same size, so that those kernels are compiled once for them. What is compiled for each is a
/// function that takes a vector of rows through a block of columns.

#ifndef KOKKOSSOFTMAX_SIMDTRANSFORM_HPP
#define KOKKOSSOFTMAX_SIMDTRANSFORM_HPP

#include <KokkosSoftmax_Transforms.hpp>
#include <impl/host/KokkosSoftmax_Simd.hpp>

#include <algorithm>
#include <new>
#include <type_traits>

namespace KokkosSoftmax::impl {

/// A bound transform on the host, which has to outlive it.
template <class In, class Acc, int bytes>
class SimdTransform {
 public:
  using Ops = SimdOps<Acc>;
  using Vector = typename Ops::Vector;
  /// A row's object.
  struct Row {
    alignas(8) unsigned char object[bytes];
  };

  template <class Transform>
  static SimdTransform of(const Transform& bound) {
    SimdTransform erased;
    erased.bound_ = &bound;
    erased.make_rows_ = [](const void* transform, index_type first, index_type distance, int count,
                           Row* rows) {
      using TransformRow = typename Transform::Row;
      static_assert(sizeof(TransformRow) <= bytes && alignof(TransformRow) <= alignof(Row));
      static_assert(std::is_trivially_copyable_v<TransformRow>);
      for (int i = 0; i < count; ++i)
        new (rows[i].object)
            TransformRow(static_cast<const Transform*>(transform)->at_row(first + i * distance));
    };
    erased.apply_to_in_ = &apply<typename Transform::Row, In>;
    erased.apply_to_acc_ = &apply<typename Transform::Row, Acc>;
    return erased;
  }

  /// Objects of `count` rows, whose indices are `distance` apart.
  void make_rows(index_type first, index_type distance, int count, Row* rows) const {
    make_rows_(bound_, first, distance, count, rows);
  }

  /// Logits of rows in the first `count` lanes of a vector, in `columns` columns from `begin` on and as much
  /// later as `first_columns` says for each lane (none: 0): from x, through the transform, to `to`, which may
  /// be x; -inf in the other lanes. Returns the largest in each.
  template <class T>
  Vector operator()(const Row* const* rows, const index_type* first_columns, index_type begin, int count,
                    int columns, const T* x, index_type x_distance, Acc* to, index_type distance) const {
    if constexpr (std::is_same_v<T, Acc>) {
      return apply_to_acc_(rows, first_columns, begin, count, columns, x, x_distance, to, distance);
    } else {
      return apply_to_in_(rows, first_columns, begin, count, columns, x, x_distance, to, distance);
    }
  }
  /// The same of rows whose objects lie one behind the other, all from the same column on.
  template <class T>
  Vector operator()(const Row* row, index_type begin, int count, int columns, const T* x,
                    index_type x_distance, Acc* to, index_type distance) const {
    const Row* rows[Ops::width];
    for (int l = 0; l < Ops::width; ++l) rows[l] = row + std::min(l, count - 1);
    return (*this)(rows, nullptr, begin, count, columns, x, x_distance, to, distance);
  }

 private:
  template <class T>
  using Apply = Vector (*)(const Row* const*, const index_type*, index_type, int, int, const T*, index_type,
                           Acc*, index_type);

  template <class TransformRow, class T>
  static Vector apply(const Row* const* rows, const index_type* first_columns, index_type begin, int count,
                      int columns, const T* x, index_type x_distance, Acc* to, index_type distance) {
    const void* objects[Ops::width];
    for (int l = 0; l < Ops::width; ++l) objects[l] = rows[l < count ? l : 0]->object;
    const auto lanes = stage_of_lanes<Ops>(RowsOfLanes<TransformRow>{objects, 0, first_columns, count});
    const Vector dropped(-infinity_v<Acc>);
    Vector max = dropped;
    int c = 0;
    const auto transform = [&]<int at_once>(std::integral_constant<int, at_once>)
        __attribute__((always_inline)) {
      for (; c + at_once <= columns; c += at_once) {
        Vector value[at_once];
        for (int i = 0; i < at_once; ++i) {
          const T* const p = x + (c + i) * x_distance;
          value[i] = count == Ops::width ? Ops::load(p) : Ops::load_part(p, count, -infinity_v<Acc>);
        }
        transform_lanes<Ops>(lanes, value, begin + c);
        for (int i = 0; i < at_once; ++i) {
          Ops::store(to + (c + i) * distance, value[i]);
          max = Ops::larger(value[i], max);
        }
      }
    };
    constexpr int most = vectors_at_once<TransformRow>;
    transform(std::integral_constant<int, most>());
    if constexpr (most > 1) transform(std::integral_constant<int, 1>());
    return max;
  }

  const void* bound_;
  void (*make_rows_)(const void*, index_type, index_type, int, Row*);
  Apply<In> apply_to_in_;
  Apply<Acc> apply_to_acc_;
};

/// A problem with its transform of that kind. (Row objects of few sizes: the number of types.)
template <class Problem>
auto with_simd_transform(const Problem& problem) {
  using In = typename Problem::In;
  using Acc = typename Problem::Acc;
  constexpr int bytes = sizeof(typename Problem::Transform::Row);
  using Transform = SimdTransform<In, Acc, bytes <= 32 ? 32 : (bytes + 127) / 128 * 128>;
  return RowsProblem<In, typename Problem::Out, Transform>{
      problem.x,         problem.y,
      problem.operation, problem.axis_is_strided,
      problem.geometry,  Transform::of(problem.transform)};
}

}  // namespace KokkosSoftmax::impl

#endif
