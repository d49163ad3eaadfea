// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Transforms for the host's kernels: of one type for all of a pair of scalars, so that those kernels are
/// compiled once for them, into the library. What is compiled for each transform is how it takes a row, and a
/// vector of rows, through some columns.

#ifndef KOKKOSSOFTMAX_SIMDTRANSFORM_HPP
#define KOKKOSSOFTMAX_SIMDTRANSFORM_HPP

#include <KokkosSoftmax_Transforms.hpp>
#include <impl/host/KokkosSoftmax_Simd.hpp>

#include <algorithm>
#include <new>
#include <type_traits>

namespace KokkosSoftmax::impl {

/// Logits in so many columns of a row, fewer than a vector has lanes, through the transform; -inf in the
/// other lanes.
template <class Ops, class TransformRow>
[[gnu::noinline]] typename Ops::Vector transform_part_of_row(const TransformRow& row,
                                                             const typename Ops::Vector& logits,
                                                             index_type column, int count) {
  const ColumnsOfRow<TransformRow> columns{&row, column, count};
  typename Ops::Vector value[1] = {logits};
  transform_lanes<Ops>(stage_of_lanes<Ops>(columns), value, 0);
  return value[0];
}

/// Whether a row's object may be asked for columns that are not of the row: what it is by type or, of a chain
/// that is known at run time alone, by its steps.
template <class TransformRow>
bool takes_columns_behind(const TransformRow& row) {
  if constexpr (requires { row.reads_columns(); }) {
    return !row.reads_columns();
  } else {
    return takes_any_column<TransformRow>;
  }
}

/// `count` logits of a row of any stride, from column `begin` on, which is at x, through the transform to
/// `stage`, filled up with -inf to whole vectors.
template <class In, class Acc, class TransformRow>
KOKKOSSOFTMAX_HOST_FUNCTION void load_transformed(const TransformRow& of_row, const In* x,
                                                  index_type x_stride, index_type begin, index_type count,
                                                  Acc* __restrict__ stage) {
  using Ops = SimdOps<Acc>;
  constexpr int w = Ops::width;
  // A copy: loops vectorise where nothing that they read could be changed by what they write. (But not of a
  // chain known at run time, whose functions are called anyway: it has just been made, in small parts.)
  const std::conditional_t<(vectors_at_once<TransformRow> > 1), const TransformRow&, TransformRow> transform =
      of_row;
  if (x_stride == 1) {
    index_type i = 0;
    if constexpr (goes_on_vectors<TransformRow, Ops>) {
      const auto transform_next = [&]<int vectors>(std::integral_constant<int, vectors>)
          __attribute__((always_inline)) {
        for (; i + vectors * w <= count; i += vectors * w) {
          typename Ops::Vector value[vectors];
          for (int v = 0; v < vectors; ++v) value[v] = Ops::load(x + i + v * w);
          transform_vectors<Ops>(transform, value, begin + i);
          for (int v = 0; v < vectors; ++v) Ops::store(stage + i + v * w, value[v]);
        }
      };
      constexpr int most = vectors_at_once<TransformRow>, few = most < 4 ? most : 4;
      transform_next(std::integral_constant<int, most>());
      if constexpr (most > few) transform_next(std::integral_constant<int, few>());
      if (takes_columns_behind(of_row)) {
        // All that is left in one turn: lanes of no column hold -inf, and keep it.
        const auto transform_rest = [&]<int vectors>(std::integral_constant<int, vectors>)
            __attribute__((always_inline)) {
          if (ceil_div(count - i, index_type(w)) != vectors) return;
          typename Ops::Vector value[vectors];
          for (int v = 0; v + 1 < vectors; ++v) value[v] = Ops::load(x + i + v * w);
          constexpr int last = (vectors - 1) * w;
          const In* const at = x + i + last;
          const auto rest = static_cast<int>(count - i) - last;
          value[vectors - 1] = rest == w ? Ops::load(at) : Ops::load_part(at, rest, -infinity_v<Acc>);
          transform_vectors<Ops>(transform, value, begin + i);
          for (int v = 0; v < vectors; ++v) Ops::store(stage + i + v * w, value[v]);
          i = count;
        };
        [&]<int... v>(std::integer_sequence<int, v...>) {
          (transform_rest(std::integral_constant<int, v + 1>()), ...);
        }
        (std::make_integer_sequence<int, few>());
        return;
      }
      if constexpr (most > 2) transform_next(std::integral_constant<int, 2>());
      if constexpr (most > 1) transform_next(std::integral_constant<int, 1>());
      if (i < count) {
        const auto rest = static_cast<int>(count - i);
        const auto value = Ops::load_part(x + i, rest, -infinity_v<Acc>);
        return Ops::store(stage + i, transform_part_of_row<Ops>(of_row, value, begin + i, rest));
      }
    }
    for (; i < count; ++i) stage[i] = transformed<Acc>(transform, load_as<Acc>(x[i]), begin + i);
  } else {
    for (index_type i = 0; i < count; ++i)
      stage[i] = transformed<Acc>(transform, load_as<Acc>(x[i * x_stride]), begin + i);
  }
  for (index_type i = count; i % w != 0; ++i) stage[i] = -infinity_v<Acc>;
}

/// Behind the last column of a row that is looked at: what is kept, in whole multiples of `at_once`.
inline index_type end_of_looked_at(index_type kept, int at_once, index_type columns) {
  if (kept >= columns) return columns;  // (a division takes as long as a row of 30 columns does)
  return std::min(ceil_div(kept, index_type(at_once)) * at_once, columns);
}

/// Whether a transform's row object takes several short rows at a time, because it has to find out what to
/// do: on_rows<Ops>(objects, rows, values, kept, vectors of each, columns in the last of these).
template <class TransformRow>
inline constexpr bool takes_rows_at_once = requires {
  TransformRow::takes_rows_at_once;
};

/// Objects of many rows wait in this many bytes, of at most so many each; those of larger ones are made
/// where they are used.
inline constexpr int bytes_of_row_objects = 128 << 10, most_bytes_of_row_object = 1024;

/// A bound transform on the host, which has to outlive it. `drops_ends`: whether it says where in a row it
/// drops all that follows.
template <class In, class Acc, bool drops_ends>
class SimdTransform {
 public:
  using Ops = SimdOps<Acc>;
  using Vector = typename Ops::Vector;

  /// Of a transform that lives as long.
  struct Row {
    const SimdTransform* transform;
    index_type index;

    /// As load_transformed.
    void load(const In* x, index_type x_stride, index_type begin, index_type count, Acc* stage) const {
      transform->load_(transform->bound_, 1, &index, &x, x_stride, begin, count, stage, 0, nullptr, 1);
    }
    /// From 0 to `columns`.
    index_type end_of_kept(index_type columns) const requires(drops_ends) {
      return transform->end_of_kept_(transform->bound_, index, columns);
    }
  };
  Row at_row(index_type row) const { return {this, row}; }

  template <class Transform>
  static SimdTransform of(const Transform& bound) {
    using Of = Functions<Transform>;
    return {&bound,   Of::bytes_of_object, Of::make_objects, Of::template apply<In>, Of::template apply<Acc>,
            Of::load, Of::end_of_kept};
  }

  /// As load_transformed, of so many rows, `distance` from each to the next in `stage`. If it drops ends,
  /// only what is kept of each, in whole multiples of `at_once`, to `ends`.
  void load_rows(int rows, const index_type* row, const In* const* x, index_type x_stride, index_type count,
                 Acc* stage, index_type distance, index_type* ends, int at_once) const {
    load_(bound_, rows, row, x, x_stride, 0, count, stage, distance, ends, at_once);
  }

  /// Of how many rows the objects have room.
  int most_rows() const { return bytes_of_row_objects / bytes_of_object_; }
  /// Objects of `count` rows, whose indices are `distance` apart, behind the first `before` of `objects`
  /// (aligned as index_type).
  void make_rows(index_type first, index_type distance, int count, unsigned char* objects,
                 int before = 0) const {
    make_objects_(bound_, first, distance, count, objects + before * bytes_of_object_);
  }
  const void* object(const unsigned char* objects, int row) const { return objects + row * bytes_of_object_; }

  /// Logits of rows in the first `count` lanes of a vector, each with its object, in `columns` columns from
  /// `begin` on and as much later as `first_columns` says for each lane (none: 0): from x, through the
  /// transform, to `to`, which may be x; -inf in the other lanes. Returns the largest in each.
  template <class T>
  Vector operator()(const void* const* objects, const index_type* first_columns, index_type begin, int count,
                    int columns, const T* x, index_type x_distance, Acc* to, index_type distance) const {
    if constexpr (std::is_same_v<T, Acc>) {
      return apply_to_acc_(objects, first_columns, begin, count, columns, x, x_distance, to, distance);
    } else {
      return apply_to_in_(objects, first_columns, begin, count, columns, x, x_distance, to, distance);
    }
  }
  /// The same of rows whose objects lie one behind the other from `first` on, all from the same column on.
  template <class T>
  Vector operator()(const unsigned char* objects, int first, index_type begin, int count, int columns,
                    const T* x, index_type x_distance, Acc* to, index_type distance) const {
    const void* of_lanes[Ops::width];
    for (int l = 0; l < Ops::width; ++l) of_lanes[l] = object(objects, first + std::min(l, count - 1));
    return (*this)(of_lanes, nullptr, begin, count, columns, x, x_distance, to, distance);
  }

 private:
  template <class T>
  using Apply = Vector (*)(const void* const*, const index_type*, index_type, int, int, const T*, index_type,
                           Acc*, index_type);

  using Load = void (*)(const void*, int, const index_type*, const In* const*, index_type, index_type,
                        index_type, Acc*, index_type, index_type*, int);

  /// What is compiled for a transform.
  template <class Transform>
  struct Functions {
    using TransformRow = typename Transform::Row;
    static_assert(std::is_trivially_copyable_v<TransformRow>);

    /// Of a row whose own object is too large to wait.
    struct OnDemand {
      const Transform* transform;
      index_type row;
    };
    static constexpr bool waits = sizeof(TransformRow) <= most_bytes_of_row_object;
    using Object = std::conditional_t<waits, TransformRow, OnDemand>;
    static constexpr int aligned_to = sizeof(index_type);
    static_assert(alignof(Object) <= aligned_to);
    static constexpr int bytes_of_object = (int(sizeof(Object)) + aligned_to - 1) / aligned_to * aligned_to;

    static void make_objects(const void* bound, index_type first, index_type distance, int count,
                             unsigned char* objects) {
      const Transform& transform = *static_cast<const Transform*>(bound);
      for (int i = 0; i < count; ++i, objects += bytes_of_object) {
        const index_type row = first + i * distance;
        if constexpr (waits) {
          new (objects) Object(transform.at_row(row));
        } else {
          new (objects) Object{&transform, row};
        }
      }
    }

    template <class T>
    static Vector apply(const void* const* objects, const index_type* first_columns, index_type begin,
                        int count, int columns, const T* x, index_type x_distance, Acc* to,
                        index_type distance) {
      if constexpr (waits) {
        return apply_to_rows(objects, first_columns, begin, count, columns, x, x_distance, to, distance);
      } else {
        alignas(TransformRow) unsigned char made[Ops::width][sizeof(TransformRow)];
        const void* rows[Ops::width];
        for (int l = 0; l < Ops::width; ++l) {
          const auto& object = *static_cast<const OnDemand*>(objects[l]);
          rows[l] = new (made[l]) TransformRow(object.transform->at_row(object.row));
        }
        return apply_to_rows(rows, first_columns, begin, count, columns, x, x_distance, to, distance);
      }
    }
    template <class T>
    static Vector apply_to_rows(const void* const* rows, const index_type* first_columns, index_type begin,
                                int count, int columns, const T* x, index_type x_distance, Acc* to,
                                index_type distance) {
      const auto lanes = stage_of_lanes<Ops>(RowsOfLanes<TransformRow>{rows, 0, first_columns, count});
      Vector max(-infinity_v<Acc>);
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

    static void load(const void* bound, int rows, const index_type* row, const In* const* x,
                     index_type x_stride, index_type begin, index_type count, Acc* stage, index_type distance,
                     [[maybe_unused]] index_type* ends, [[maybe_unused]] int at_once) {
      const Transform& transform = *static_cast<const Transform*>(bound);
      if constexpr (takes_rows_at_once<TransformRow>) {
        const bool may_end_early = drops_ends && ends != nullptr && impl::drops_ends(transform, count);
        if (rows > 1 && x_stride == 1 && begin == 0 && count <= most_vectors_of_rows / 2 * Ops::width &&
            !may_end_early) {
          if (drops_ends && ends != nullptr) std::fill_n(ends, rows, count);
          const int vectors = static_cast<int>(ceil_div(count, index_type(Ops::width)));
          for (int k = 0; k < rows; k += most_vectors_of_rows / vectors) {
            load_some(transform, std::min(rows - k, most_vectors_of_rows / vectors), row + k, x + k,
                      static_cast<int>(count), vectors, stage + k * distance, distance);
          }
          return;
        }
      }
      for (int k = 0; k < rows; ++k) {
        const TransformRow of_row = transform.at_row(row[k]);
        index_type end = count;
        if constexpr (drops_ends) {
          if (ends != nullptr) {
            ends[k] = end = end_of_looked_at(impl::end_of_kept(of_row, count), at_once, count);
          }
        }
        load_transformed(of_row, x[k], x_stride, begin, end, stage + k * distance);
      }
    }

    static constexpr int most_vectors_of_rows = 32;
    /// The same of some short rows, each step of the chain for all of them. (KeptOfVectors would go through
    /// all vectors once more before and after the chain: 30000 x 33 floats with a factor 327 us for 281.)
    static void load_some(const Transform& transform, int rows, const index_type* row, const In* const* x,
                          int count, int vectors, Acc* stage, index_type distance) {
      constexpr int w = Ops::width;
      const int rest = count - (vectors - 1) * w;
      const Vector dropped(-infinity_v<Acc>);
      Vector value[most_vectors_of_rows];
      typename Ops::Mask kept[most_vectors_of_rows], is_dropped[most_vectors_of_rows];
      TransformRow of_row[most_vectors_of_rows];
      for (int k = 0; k < rows; ++k) {
        new (of_row + k) TransformRow(transform.at_row(row[k]));
        for (int v = 0; v < vectors; ++v) {
          const int at = k * vectors + v;
          value[at] = v + 1 < vectors || rest == w ? Ops::load(x[k] + v * w)
                                                   : Ops::load_part(x[k] + v * w, rest, -infinity_v<Acc>);
          is_dropped[at] = value[at] == dropped;
          kept[at] = typename Ops::Mask(true);
        }
      }
      TransformRow::template on_rows<Ops>(of_row, rows, value, kept, vectors, rest);
      for (int k = 0; k < rows; ++k) {
        for (int v = 0; v < vectors; ++v) {
          const int at = k * vectors + v;
          Ops::store(stage + k * distance + v * w,
                     Ops::select(is_dropped[at], dropped, Ops::select(kept[at], value[at], dropped)));
        }
      }
    }

    static index_type end_of_kept(const void* bound, index_type row, index_type columns) {
      return impl::end_of_kept(static_cast<const Transform*>(bound)->at_row(row), columns);
    }
  };

  SimdTransform(const void* bound, int bytes_of_object,
                void (*make_objects)(const void*, index_type, index_type, int, unsigned char*),
                Apply<In> apply_to_in, Apply<Acc> apply_to_acc, Load load,
                index_type (*end_of_kept)(const void*, index_type, index_type))
      : bound_(bound),
        bytes_of_object_(bytes_of_object),
        make_objects_(make_objects),
        apply_to_in_(apply_to_in),
        apply_to_acc_(apply_to_acc),
        load_(load),
        end_of_kept_(end_of_kept) {}

  const void* bound_;
  int bytes_of_object_;
  void (*make_objects_)(const void*, index_type, index_type, int, unsigned char*);
  Apply<In> apply_to_in_;
  Apply<Acc> apply_to_acc_;
  Load load_;
  index_type (*end_of_kept_)(const void*, index_type, index_type);
};

/// Of a problem whose transform has been made one of these.
template <class In, class Out, bool drops_ends>
using TransformedRows = RowsProblem<In, Out, SimdTransform<In, accumulator_t<In, Out>, drops_ends>>;

template <bool drops_ends, class Problem>
auto with_simd_transform(const Problem& problem) {
  using In = typename Problem::In;
  using Transform = SimdTransform<In, typename Problem::Acc, drops_ends>;
  return TransformedRows<In, typename Problem::Out, drops_ends>{
      problem.x,         problem.y,
      problem.operation, problem.axis_is_strided,
      problem.geometry,  Transform::of(problem.transform)};
}

}  // namespace KokkosSoftmax::impl

#endif
