// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Logit transforms: what happens to a logit before the softmax (and, in a Linear head, after the product).
/// Each is `value' = t(value, row, column)` in the accumulator's type; `a | b` applies a, then b.

#ifndef KOKKOSSOFTMAX_TRANSFORMS_HPP
#define KOKKOSSOFTMAX_TRANSFORMS_HPP

#include <impl/KokkosSoftmax_Gelu.hpp>
#include <impl/KokkosSoftmax_Problem.hpp>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <utility>

namespace KokkosSoftmax {

/// Asks a transform to look at its values when it is used: reads them back, so the call waits for the
/// instance.
struct Checked {};
inline constexpr Checked checked{};

namespace impl {

/// What a transform is bound to at a call.
template <class Exec>
struct BindContext {
  const CallContext& call;
  const LogitShape& shape;
  const Exec& exec;
};

/// The base of the library's transforms; found by operator|.
struct TransformBase {};

template <class T>
inline constexpr bool is_library_transform_v = std::is_base_of_v<TransformBase, std::remove_cvref_t<T>>;

/// A callable as value' = f(value, row, column), for float or double accumulators.
template <class F>
concept callable_as_value_row_column =
    std::is_invocable_r_v<float, const F&, float, index_type, index_type> ||
    std::is_invocable_r_v<double, const F&, double, index_type, index_type>;

/// A functor that takes a host's vectors of consecutive columns too; see transform().
template <class F, class Vector>
concept takes_vectors_of_columns = requires(const F& f, const Vector& value) {
  { f.on_vector(value, index_type(0), index_type(0)) } -> std::convertible_to<Vector>;
};

template <class T>
concept logit_transform = is_library_transform_v<T> || callable_as_value_row_column<T>;

template <class View>
concept view_of_operand = requires(const View& view) {
  typename View::value_type;
  typename View::memory_space;
  typename View::execution_space;
  {view.data()};
  { view.extent(0) } -> std::convertible_to<std::size_t>;
  { view.stride(0) } -> std::convertible_to<std::size_t>;
  { view.rank() } -> std::convertible_to<std::size_t>;
};

// ---------------------------------------------------------------------------------------------------------------------
// Bound transforms: plain device data. A stage gives, for a row, an object that is called with (value,
// column), so that what depends on the row alone is found once a row; a mask's object says whether it keeps a
// column. One that has on_vector does the same on the host to a vector of consecutive columns, the first of
// them given: Ops is SimdOps (impl/host/KokkosSoftmax_Simd.hpp), and this file knows no vectors. Where a
// vector's lanes are rows, of_lanes makes an object for them of their objects, whose on_vector takes the
// column.

/// Says whether it makes -inf or NaN of a logit of -inf: where it does, and no result is NaN, whoever applies
/// it need not look for -inf.
template <class T>
concept knows_of_minus_infinity = requires(const T& t) {
  t.keeps_minus_infinity();
};
/// Makes of the maximum of its logits in the columns [first, end) that of its results, if it can, and says
/// whether it did. The maximum is finite, and logits that differ do so by a ten-thousandth, as those of 16
/// bits: rounding does not exchange their results. Where it did, it may be applied without looking for -inf
/// if it keeps_minus_infinity.
template <class T>
concept knows_maximum = requires(const T& t, float& maximum) {
  { t.finds_maximum(maximum, index_type(0), index_type(0)) } -> std::same_as<bool>;
};
/// Drops logits, and leaves the others as they are.
template <class RowStage>
concept drops_logits = requires(const RowStage& stage) {
  stage.keeps(index_type(0));
};

/// Says from which column on it drops all logits, of a row of so many (may be below 0): these need not be
/// read. What it is bound to says whether it does that in any row (drops_ends).
template <class RowStage>
concept knows_end_of_kept = requires(const RowStage& stage) {
  { stage.end_of_kept(index_type(0)) } -> std::same_as<index_type>;
};

/// Whether a row's object, or one of its operands, may be asked for columns that are not of the row.
template <class T>
inline constexpr bool takes_any_column = [] {
  if constexpr (requires { T::takes_any_column; }) {
    return T::takes_any_column;
  } else {
    return false;
  }
}();

/// Whether logits that are multiplied or divided by it stay in order, and neither all of them become 0 nor
/// -inf becomes NaN.
template <class Acc>
KOKKOS_FORCEINLINE_FUNCTION constexpr bool is_positive_and_has_room(Acc factor) {
  return factor > Acc(0x1p-100) && factor < Acc(0x1p100);
}

/// rounded_product() of the host's vectors.
template <class Ops>
typename Ops::Vector rounded_product_of_vectors(const typename Ops::Vector& a,
                                                const typename Ops::Vector& b) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return Ops::fma(a, b, typename Ops::Vector(-typename Ops::Acc(0)));
#else
  return a * b;
#endif
}

/// (value - mean) / sqrt(variance + eps) * gamma + beta.
template <class Acc>
KOKKOS_FORCEINLINE_FUNCTION Acc batch_normalized(Acc value, Acc mean, Acc variance, Acc eps, Acc gamma,
                                                 Acc beta) {
  return rounded_product<Acc>((value - mean) / Kokkos::sqrt(variance + eps), gamma) + beta;
}

/// The same of a vector, whose lanes are at one column, at those from there on, or at others.
template <class Ops, class Statistics>
typename Ops::Vector batch_normalized_vector(const typename Ops::Vector& value, const Statistics& all,
                                             index_type column) {
  using Vector = typename Ops::Vector;
  const Vector deviation =
      Ops::sqrt(all.variance.template vector<Ops>(column) + Vector(static_cast<typename Ops::Acc>(all.eps)));
  return rounded_product_of_vectors<Ops>((value - all.mean.template vector<Ops>(column)) / deviation,
                                         all.gamma.template vector<Ops>(column)) +
         all.beta.template vector<Ops>(column);
}

/// From the linear index of a row to an offset in an operand that may broadcast.
struct RowOffset {
  int rank = 0;
  index_type extent[max_outer_rank] = {};
  index_type stride[max_outer_rank] = {};

  KOKKOS_FORCEINLINE_FUNCTION index_type operator()(index_type row) const {
    index_type offset = 0;
    for (int d = rank - 1; d > 0; --d) {
      const index_type next = row / extent[d];
      offset += (row - next * extent[d]) * stride[d];
      row = next;
    }
    return rank > 0 ? offset + row * stride[0] : 0;
  }
  /// Whether it is 0 for all rows.
  KOKKOS_FORCEINLINE_FUNCTION bool is_none() const { return rank == 0 || (rank == 1 && stride[0] == 0); }

  void append(index_type e, index_type s) {
    if (e == 1) return;
    if (rank > 0 && stride[rank - 1] == e * s) {
      extent[rank - 1] *= e;
      stride[rank - 1] = s;
    } else {
      extent[rank] = e;
      stride[rank++] = s;
    }
  }
};

/// Bytes of an operand that are read at once for so many neighbouring columns, and that it is aligned to
/// then.
template <int width, class T>
inline constexpr int bytes_of_neighbours = width * sizeof(T) < 16 ? width* static_cast<int>(sizeof(T)) : 16;

/// Some neighbouring values of an operand, converted; in the accumulator's type where nothing else is said.
template <int width, class To, class T, class Convert>
KOKKOS_FORCEINLINE_FUNCTION void load_neighbours(const T* data, To (&to)[width], const Convert& convert) {
  constexpr int bytes = bytes_of_neighbours<width, T>, part = bytes / static_cast<int>(sizeof(T));
  struct alignas(bytes) Part {
    T e[part];
  };
  for (int p = 0; p < width / part; ++p) {
    const Part loaded = reinterpret_cast<const Part*>(data)[p];
    for (int i = 0; i < part; ++i) to[p * part + i] = convert(loaded.e[i]);
  }
}

template <int width, class Acc, class T>
KOKKOS_FORCEINLINE_FUNCTION void load_neighbours(const T* data, Acc (&to)[width]) {
#if defined(__CUDA_ARCH__)
  if constexpr (is_16_bit_v<T> && width % 2 == 0 && std::is_same_v<Acc, float>) {
    // In words: nvcc would load each of 16 bits from shared memory, and take three instructions for two.
    constexpr int bytes = bytes_of_neighbours<width, T>, words = bytes / 4;
    struct alignas(bytes) Part {
      std::uint32_t word[words];
    };
    for (int p = 0; p < width / (2 * words); ++p) {
      const Part loaded = reinterpret_cast<const Part*>(data)[p];
      for (int i = 0; i < words; ++i) {
        to[2 * (p * words + i)] = low_of_pair<T>(loaded.word[i]);
        to[2 * (p * words + i) + 1] = high_of_pair<T>(loaded.word[i]);
      }
    }
    return;
  }
#endif
  load_neighbours(data, to, [](const T& e) { return load_as<Acc>(e); });
}

/// Those of an operand from column `first` on: from where it lies, or as it has them.
template <int width, class Operand, class Acc>
KOKKOS_FORCEINLINE_FUNCTION void operand_neighbours(const Operand& operand, index_type first,
                                                    Acc (&to)[width]) {
  if constexpr (requires { operand.neighbours(to); }) {
    operand.neighbours(to);
  } else {
    load_neighbours(operand.data + first, to);
  }
}

/// An operand with a value for each logit, or broadcast: the shape of the logits with any extent 1, or one
/// value a column.
template <class T>
struct LogitOperand {
  const T* data = nullptr;
  RowOffset row_offset;
  index_type column_stride = 0;

  template <class View, class Exec>
  static LogitOperand bind(const char* name, const View& view, const BindContext<Exec>& c) {
    const Block block = block_of(view);
    const LogitShape& shape = c.shape;
    const bool one_for_all = block.rank < shape.rank && block.rank < 2 && block.size() == 1;
    const bool per_column = one_for_all || (block.rank == 1 && shape.rank > 1);
    bool fits = one_for_all || (per_column ? block.extent[0] == shape.columns : block.rank == shape.rank);
    for (int d = 0; fits && !per_column && d < shape.rank; ++d) {
      fits = block.extent[d] == shape.extent[d] || block.extent[d] == 1;
    }
    if (!fits) {
      c.call.fail(std::string(name) + " of extents " + block.extents_text() + " fits neither x of extents " +
                  shape.text() + " (an extent of 1 is broadcast) nor its " + std::to_string(shape.columns) +
                  " columns");
    }
    c.call.check_operand(name, block);
    LogitOperand operand;
    operand.data = view.data();
    if (per_column) {
      operand.column_stride = one_for_all ? 0 : block.stride[0];
      return operand;
    }
    operand.column_stride = block.extent[shape.axis] == 1 ? 0 : block.stride[shape.axis];
    for (int d = 0; d < shape.rank; ++d) {
      if (d != shape.axis)
        operand.row_offset.append(shape.extent[d], block.extent[d] == 1 ? 0 : block.stride[d]);
    }
    return operand;
  }

  struct Row {
    const T* data;
    index_type column_stride;
    KOKKOS_FORCEINLINE_FUNCTION const T& operator()(index_type column) const {
#if !defined(__CUDA_ARCH__)
      // A loop of its own, which vectorises. (On a device loads that no branch parts are under way together.)
      if (column_stride == 1) return data[column];
#endif
      return data[column * column_stride];
    }
    /// Whether load_neighbours takes the columns from `first` on, and from a multiple of `width` behind it.
    template <int width>
    KOKKOS_FORCEINLINE_FUNCTION bool has_neighbours(index_type first) const {
      return column_stride == 1 &&
             reinterpret_cast<std::uintptr_t>(data + first) % bytes_of_neighbours<width, T> == 0;
    }
    template <class Ops>
    auto vector(index_type column) const {
      return Ops::load_strided(data + column * column_stride, column_stride);
    }
  };
  KOKKOS_FORCEINLINE_FUNCTION Row at_row(index_type row) const {
    return {data + row_offset(row), column_stride};
  }
  /// Behind the last value in memory, of so many columns side by side.
  KOKKOS_FORCEINLINE_FUNCTION const T* end(index_type columns) const {
    index_type last_row = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
    for (int d = 0; d < row_offset.rank; ++d)
      last_row += Kokkos::max(index_type(0), (row_offset.extent[d] - 1) * row_offset.stride[d]);
    return data + last_row + columns;
  }
};

/// One value a column.
template <class T>
struct ColumnOperand {
  const T* data = nullptr;
  index_type stride = 0;

  template <class View, class Exec>
  static ColumnOperand bind(const char* name, const View& view, const BindContext<Exec>& c) {
    const Block block = block_of(view);
    if (block.rank != 1 || block.extent[0] != c.shape.columns) {
      c.call.fail(std::string(name) + " of extents " + block.extents_text() +
                  " does not have one value for each of the " + std::to_string(c.shape.columns) + " columns");
    }
    c.call.check_operand(name, block);
    return {view.data(), block.stride[0]};
  }
  KOKKOS_FORCEINLINE_FUNCTION const T& operator()(index_type column) const {
    if (stride == 1) return data[column];
    return data[column * stride];
  }
  template <class Ops>
  auto vector(index_type column) const {
    return Ops::load_strided(data + column * stride, stride);
  }
  template <class Ops, class Offsets>
  auto vector_of_lanes(index_type column, const Offsets& offsets) const {
    return offsets.template load<Ops>(data + offsets.first + column * stride);
  }
};

// Vectors of rows, on the host: a lane is a row, which begins at a column of its own. (Or all are one row,
// each a column later than the one before: the end of a row, where there are fewer columns than a vector has
// lanes.)

/// The rows' objects, each at a place of its own, and where they begin, of the first `count` lanes; there may
/// be fewer than a vector has.
template <class RowStage>
struct RowsOfLanes {
  static constexpr bool is_one_row = false;
  const void* const* objects;  ///< of which the rows' are parts, at an offset
  std::ptrdiff_t offset;       ///< bytes
  const index_type* column;    ///< of each lane; none: 0
  int count;

  const RowStage& row(int lane) const {
    return *reinterpret_cast<const RowStage*>(static_cast<const char*>(objects[lane]) + offset);
  }
  index_type first_column(int lane) const { return column ? column[lane] : 0; }
  /// The same of a part of each row's object. (Not a type of its own for each chain before it: their names
  /// would double in length with each transform.)
  template <class Part>
  RowsOfLanes<Part> of(Part RowStage::*part) const {
    const RowStage& first = row(0);
    const auto at = reinterpret_cast<const char*>(&(first.*part)) - reinterpret_cast<const char*>(&first);
    return {objects, offset + at, column, count};
  }
};

/// The same of one row, from a column on.
template <class RowStage>
struct ColumnsOfRow {
  static constexpr bool is_one_row = true;
  const RowStage* object;
  index_type first;
  int count;

  const RowStage& row(int) const { return *object; }
  index_type first_column(int lane) const { return first + lane; }
  template <class Part>
  ColumnsOfRow<Part> of(Part RowStage::*part) const {
    return {&(object->*part), first, count};
  }
};

/// A row's object as that of the lanes of a ColumnsOfRow, if it reads nothing that the lanes behind them
/// would.
template <class RowStage>
struct RowFromColumn {
  RowStage stage;
  index_type first;
  template <class Ops>
  void on_vector(typename Ops::Vector& value, typename Ops::Mask& kept, index_type column) const {
    stage.template on_vector<Ops>(value, kept, first + column);
  }
};

/// What lanes add to an offset: the same distance from each to the next, or anything.
template <int width>
struct OffsetsOfLanes {
  int count;
  bool is_even = true;
  index_type first, distance = 0;
  index_type each[width];  ///< from the first one, if not is_even

  /// offset(lane) of so many lanes.
  template <class Rows, class Offset>
  OffsetsOfLanes(const Rows& rows, const Offset& offset) : count(rows.count), first(offset(0)) {
    if (count > 1) distance = offset(1) - first;
    if constexpr (!Rows::is_one_row) {
      for (int l = 2; l < count; ++l) is_even = is_even && offset(l) == first + l * distance;
      for (int l = 0; !is_even && l < count; ++l) each[l] = offset(l) - first;
    }
  }
  /// One for all lanes.
  bool is_one() const { return is_even && distance == 0; }
  index_type operator()(int lane) const { return is_even ? lane * distance : each[lane]; }

  /// The values of an operand at these offsets from `data` on, which is where the first one is.
  template <class Ops, class T>
  typename Ops::Vector load(const T* data) const {
    using Acc = typename Ops::Acc;
    if (is_even) {
      if (count == width || distance == 0) return Ops::load_strided(data, distance);
      if constexpr (is_scalar_v<T>) {
        if (distance == 1) return Ops::load_part(data, count, Acc(0));
      }
    }
    alignas(64) Acc lanes[width] = {};
    for (int l = 0; l < count; ++l) lanes[l] = load_as<Acc>(data[(*this)(l)]);
    return Ops::load(lanes);
  }
  template <class Ops, class T>
  typename Ops::Mask load_mask(const T* data) const {
    if (is_one()) return Ops::mask_of_first(static_cast<bool>(*data) ? width : 0);
    if constexpr (std::is_same_v<T, bool>) {
      if (is_even && distance == 1) return Ops::mask_of_bools(data, count);
    }
    return Ops::mask_of([&](int lane) { return lane < count && static_cast<bool>(data[(*this)(lane)]); });
  }
};

/// An operand of some rows, a column of each at a time.
template <class Ops, class T>
struct OperandOfLanes {
  const T* data;
  index_type column_stride;
  OffsetsOfLanes<Ops::width> offsets;

  /// Of the operands' row objects: where its values are, and their distance.
  template <class Rows>
  explicit OperandOfLanes(const Rows& rows)
      : data(rows.row(0).data), column_stride(rows.row(0).column_stride), offsets(rows, [&](int lane) {
          return rows.row(lane).data - data + rows.first_column(lane) * column_stride;
        }) {
    data += offsets.first;
  }
  /// Of the rows' columns from the lanes' first ones on.
  template <class>
  auto vector(index_type column) const {
    fetch(column);
    return offsets.template load<Ops>(data + column * column_stride);
  }
  auto mask(index_type column) const {
    fetch(column);
    return offsets.template load_mask<Ops>(data + column * column_stride);
  }

 private:
  /// What the next vector of rows takes, after some columns of these: the processor does not see that by
  /// itself where columns are in different pages.
  void fetch(index_type column) const {
    if (offsets.distance == 1) __builtin_prefetch(data + column * column_stride + Ops::width, 0, 3);
  }
};

/// One value a column, for lanes at columns of their own.
template <class Ops, class Operand>
struct ColumnsOfLanes {
  Operand operand;
  OffsetsOfLanes<Ops::width> offsets;

  template <class Rows>
  ColumnsOfLanes(const Operand& operand_, const Rows& rows)
      : operand(operand_),
        offsets(rows, [&](int lane) { return rows.first_column(lane) * operand.stride; }) {}
  template <class>
  auto vector(index_type column) const {
    return operand.template vector_of_lanes<Ops>(column, offsets);
  }
};

/// Whether a bound stage gives the same object for every row.
template <class Bound>
KOKKOS_FORCEINLINE_FUNCTION bool rows_are_alike(const Bound& bound) {
  if constexpr (requires { bound.has_rows_alike(); }) {
    return bound.has_rows_alike();
  } else {
    return false;
  }
}

/// That object, of a stage whose rows_are_alike.
template <class Bound>
KOKKOS_FORCEINLINE_FUNCTION typename Bound::Row row_of_all(const Bound& bound) {
  if constexpr (requires { bound.row_of_all(); }) {
    return bound.row_of_all();
  } else {
    return bound.at_row(0);
  }
}

/// Nothing happens.
struct BoundIdentity {
  KOKKOS_FORCEINLINE_FUNCTION bool has_rows_alike() const { return true; }
  struct Row {
    template <class Acc>
    KOKKOS_FORCEINLINE_FUNCTION Acc operator()(Acc value, index_type) const {
      return value;
    }
  };
  KOKKOS_FORCEINLINE_FUNCTION Row at_row(index_type) const { return {}; }
};

/// A functor without parts that depend on the row alone. One of the library's says whether it looks at the
/// row and the column at all.
template <class F>
struct BoundFunctor {
  F f;
  KOKKOS_FORCEINLINE_FUNCTION bool has_rows_alike() const {
    return requires {
      F::is_same_for_all_rows;
    };
  }
  struct Row {
    static constexpr bool takes_any_column = requires { F::is_same_for_all_rows; };
    const F* f;
    index_type row;
    template <class Acc>
    KOKKOS_FORCEINLINE_FUNCTION Acc operator()(Acc value, index_type column) const {
      return static_cast<Acc>((*f)(value, row, column));
    }
    KOKKOS_FORCEINLINE_FUNCTION bool keeps_minus_infinity() const requires(knows_of_minus_infinity<F>) {
      return f->keeps_minus_infinity();
    }
    template <class Acc>
    KOKKOS_FORCEINLINE_FUNCTION bool finds_maximum(Acc& maximum, index_type,
                                                   index_type) const requires requires {
      f->keeps_maximum(maximum);
    }
    {
      if (!f->keeps_maximum(maximum)) return false;
      maximum = (*this)(maximum, 0);
      return true;
    }
    template <class Ops>
    void on_vector(typename Ops::Vector& value, typename Ops::Mask&, index_type column) const
        requires(takes_vectors_of_columns<F, typename Ops::Vector> ||
                 requires { f->template with<Ops>(value); }) {
      if constexpr (takes_vectors_of_columns<F, typename Ops::Vector>) {
        value = f->on_vector(value, row, column);
      } else {
        value = f->template with<Ops>(value);
      }
    }
    template <class Ops, class Rows>
    static auto of_lanes(const Rows& rows) {
      if constexpr (requires(const F& functor, const typename Ops::Vector& value) {
                      functor.template with<Ops>(value);
                    }) {
        return rows.row(0);
      } else {
        return Lanes<Ops::width>(rows);
      }
    }
  };
  template <int width>
  struct Lanes {
    const F* f;
    int count;
    index_type row[width] = {}, first_column[width] = {};

    template <class Rows>
    explicit Lanes(const Rows& rows) : f(rows.row(0).f), count(rows.count) {
      for (int l = 0; l < count; ++l) {
        row[l] = rows.row(l).row;
        first_column[l] = rows.first_column(l);
      }
    }
    template <class Ops>
    void on_vector(typename Ops::Vector& value, typename Ops::Mask&, index_type column) const {
      using Acc = typename Ops::Acc;
      alignas(64) Acc lane[width];
      Ops::store(lane, value);
      const auto apply_to = [&](int lanes) __attribute__((always_inline)) {
        for (int l = 0; l < lanes; ++l)
          lane[l] = static_cast<Acc>((*f)(lane[l], row[l], first_column[l] + column));
      };
      // A loop of its own, which vectorises.
      if (count == width) {
        apply_to(width);
      } else {
        apply_to(count);
      }
      value = Ops::load(lane);
    }
  };
  KOKKOS_FORCEINLINE_FUNCTION Row at_row(index_type row) const { return {&f, row}; }
};

template <class Predicate>
struct BoundKeepIf {
  Predicate predicate;
  struct Row {
    const Predicate* predicate;
    index_type row;
    KOKKOS_FORCEINLINE_FUNCTION bool keeps(index_type column) const { return (*predicate)(row, column); }
    template <class Ops>
    void on_vector(typename Ops::Vector&, typename Ops::Mask& kept, index_type column) const {
      kept =
          kept && Ops::mask_of([&](int lane) { return static_cast<bool>((*predicate)(row, column + lane)); });
    }
  };
  KOKKOS_FORCEINLINE_FUNCTION Row at_row(index_type row) const { return {&predicate, row}; }
};

template <class T>
struct BoundMask {
  static constexpr int operands = 1;
  LogitOperand<T> mask;
  template <class Operand>
  struct RowWith {
    static constexpr bool takes_any_column = impl::takes_any_column<Operand>;
    Operand mask;
    KOKKOS_FORCEINLINE_FUNCTION bool keeps(index_type column) const {
      return static_cast<bool>(mask(column));
    }
    template <int width>
    KOKKOS_FORCEINLINE_FUNCTION bool takes_neighbours(index_type first) const {
      return mask.template has_neighbours<width>(first);
    }
    template <int width, class Acc>
    KOKKOS_FORCEINLINE_FUNCTION void apply_to_neighbours(Acc (&)[width], bool (&kept)[width],
                                                         index_type first) const {
      if constexpr (requires { mask.keeps_neighbours(kept); }) {
        mask.keeps_neighbours(kept);
      } else {
#if defined(__CUDA_ARCH__)
        if constexpr (sizeof(T) == 1 && width % 4 == 0) {
          // In words, where a byte is looked at in one instruction.
          constexpr int words = bytes_of_neighbours<width, T> / 4;
          struct alignas(4 * words) Part {
            std::uint32_t word[words];
          };
          for (int p = 0; p < width / (4 * words); ++p) {
            const Part part = reinterpret_cast<const Part*>(mask.data + first)[p];
            for (int i = 0; i < 4 * words; ++i)
              kept[4 * words * p + i] =
                  kept[4 * words * p + i] && (part.word[i / 4] & 0xffu << 8 * (i % 4)) != 0;
          }
          return;
        }
#endif
        bool operand[width];
        load_neighbours(mask.data + first, operand, [](const T& e) { return static_cast<bool>(e); });
        for (int i = 0; i < width; ++i) kept[i] = kept[i] && operand[i];
      }
    }
    template <class Map>
    KOKKOS_FORCEINLINE_FUNCTION auto map_operands(const Map& map) const {
      return RowWith<decltype(map(mask))>{map(mask)};
    }
    template <class Ops>
    void on_vector(typename Ops::Vector&, typename Ops::Mask& kept, index_type column) const {
      if constexpr (requires { mask.mask(column); }) {
        kept = kept && mask.mask(column);
        return;
      } else {
        if constexpr (std::is_same_v<T, bool>) {
          if (mask.column_stride == 1) {
            kept = kept && Ops::mask_of_bools(&mask(column));
            return;
          }
        }
        kept = kept && Ops::mask_of([&](int lane) { return static_cast<bool>(mask(column + lane)); });
      }
    }
    template <class Ops, class Rows>
    static auto of_lanes(const Rows& rows) {
      using Lanes = OperandOfLanes<Ops, T>;
      return RowWith<Lanes>{Lanes(rows.of(&RowWith::mask))};
    }
  };
  using Row = RowWith<typename LogitOperand<T>::Row>;
  KOKKOS_FORCEINLINE_FUNCTION Row at_row(index_type row) const {
    return {mask.at_row(row)};
  }
  template <class Use>
  void visit_operands(const Use& use) const {
    use(mask);
  }
};

struct BoundCausal {
  index_type offset, queries, rows_per_query;
  KOKKOS_FORCEINLINE_FUNCTION bool drops_ends(index_type columns) const { return offset < columns - 1; }
  /// In columns that are less than 2^31 after `origin`.
  struct RowFrom {
    static constexpr bool takes_any_column = true;
    index_type origin;
    int last;  ///< of what it keeps, counted from there
    KOKKOS_FORCEINLINE_FUNCTION bool keeps(index_type column) const {
      return static_cast<int>(column - origin) <= last;
    }
    template <class Acc>
    KOKKOS_FORCEINLINE_FUNCTION bool finds_maximum(Acc&, index_type, index_type end) const {
      return keeps(end - 1);
    }
  };
  struct Row {
    static constexpr bool takes_any_column = true;
    index_type last;
    KOKKOS_FORCEINLINE_FUNCTION bool keeps(index_type column) const { return column <= last; }
    KOKKOS_FORCEINLINE_FUNCTION index_type end_of_kept(index_type columns) const {
      return last < columns ? last + 1 : columns;
    }
    template <class Acc>
    KOKKOS_FORCEINLINE_FUNCTION RowFrom prepared(index_type first) const {
      constexpr index_type most = 0x7fffffff;
      return {first, static_cast<int>(Kokkos::clamp<index_type>(last - first, -1, most))};
    }
    /// One comparison of 64 bits for all of them.
    template <int width, class Acc>
    KOKKOS_FORCEINLINE_FUNCTION void apply_to_neighbours(Acc (&)[width], bool (&kept)[width],
                                                         index_type first) const {
      const index_type left = last - first;
      const int last_kept = left < 0 ? -1 : left < width ? static_cast<int>(left) : width;
      for (int i = 0; i < width; ++i) kept[i] = kept[i] && i <= last_kept;
    }
    template <class Ops>
    void on_vector(typename Ops::Vector&, typename Ops::Mask& kept, index_type column) const {
      const index_type left = last - column + 1;
      if (left < Ops::width) kept = kept && Ops::mask_of_first(left);
    }
    template <class Ops, class Rows>
    static auto of_lanes(const Rows& rows) {
      if constexpr (Rows::is_one_row) {
        return RowFromColumn<Row>{*rows.object, rows.first};
      } else {
        return Lanes<Ops::width>(rows);
      }
    }
  };
  template <int width>
  struct Lanes {
    index_type last[width] = {};  ///< from each lane's first column
    index_type least, most;

    template <class Rows>
    explicit Lanes(const Rows& rows) {
      for (int l = 0; l < rows.count; ++l) last[l] = rows.row(l).last - rows.first_column(l);
      const auto range = std::minmax_element(last, last + rows.count);
      least = *range.first;
      most = *range.second;
    }
    template <class Ops>
    void on_vector(typename Ops::Vector&, typename Ops::Mask& kept, index_type column) const {
      if (column <= least) return;
      kept = kept && (column > most ? Ops::mask_of_first(0)
                                    : Ops::mask_of([&](int lane) { return column <= last[lane]; }));
    }
  };
  KOKKOS_FORCEINLINE_FUNCTION Row at_row(index_type row) const {
    index_type query = rows_per_query == 1 ? row : quotient(row, rows_per_query);
    if (query >= queries) query -= quotient(query, queries) * queries;
    return {query + offset};
  }

 private:
  /// A device has no instructions for it, and many of 64 bits.
  KOKKOS_FORCEINLINE_FUNCTION static index_type quotient(index_type a, index_type b) {
    constexpr index_type most = 0xffffffff;
    if (a <= most && b <= most) return static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b);
    return a / b;
  }
};

/// A logit and an operand that has a value for it.
template <class T, class Combine>
struct BoundWithOperand {
  static constexpr int operands = 1;
  LogitOperand<T> operand;
  KOKKOS_FORCEINLINE_FUNCTION bool has_rows_alike() const { return operand.row_offset.is_none(); }
  template <class Operand>
  struct RowWith {
    static constexpr bool takes_any_column = impl::takes_any_column<Operand>;
    Operand operand;
    template <class Acc>
    KOKKOS_FORCEINLINE_FUNCTION Acc operator()(Acc value, index_type column) const {
      return Combine::of(value, load_as<Acc>(operand(column)));
    }
    KOKKOS_FORCEINLINE_FUNCTION bool keeps_minus_infinity() const requires(Combine::keeps_minus_infinity) {
      return true;
    }
    template <int width>
    KOKKOS_FORCEINLINE_FUNCTION bool takes_neighbours(index_type first) const {
      return operand.template has_neighbours<width>(first);
    }
    template <int width, class Acc>
    KOKKOS_FORCEINLINE_FUNCTION void apply_to_neighbours(Acc (&value)[width], bool (&)[width],
                                                         index_type first) const {
      Acc neighbour[width];
      operand_neighbours(operand, first, neighbour);
      for (int i = 0; i < width; ++i) value[i] = Combine::of(value[i], neighbour[i]);
    }
    template <class Map>
    KOKKOS_FORCEINLINE_FUNCTION auto map_operands(const Map& map) const {
      return RowWith<decltype(map(operand))>{map(operand)};
    }
    template <class Ops>
    void on_vector(typename Ops::Vector& value, typename Ops::Mask&, index_type column) const {
      value = Combine::template of_vectors<Ops>(value, operand.template vector<Ops>(column));
    }
    template <class Ops, class Rows>
    static auto of_lanes(const Rows& rows) {
      using Lanes = OperandOfLanes<Ops, T>;
      return RowWith<Lanes>{Lanes(rows.of(&RowWith::operand))};
    }
  };
  using Row = RowWith<typename LogitOperand<T>::Row>;
  KOKKOS_FORCEINLINE_FUNCTION Row at_row(index_type row) const { return {operand.at_row(row)}; }
  template <class Use>
  void visit_operands(const Use& use) const {
    use(operand);
  }
};

struct Plus {
  static constexpr bool keeps_minus_infinity = true;
  template <class Acc>
  static KOKKOS_FORCEINLINE_FUNCTION Acc of(Acc value, Acc operand) {
    return value + operand;
  }
  template <class Ops, class Vector>
  static Vector of_vectors(const Vector& value, const Vector& operand) {
    return value + operand;
  }
};

struct Times {
  static constexpr bool keeps_minus_infinity = false;  // of a factor below 0
  template <class Acc>
  static KOKKOS_FORCEINLINE_FUNCTION Acc of(Acc value, Acc operand) {
    return rounded_product(value, operand);
  }
  template <class Ops, class Vector>
  static Vector of_vectors(const Vector& value, const Vector& operand) {
    return rounded_product_of_vectors<Ops>(value, operand);
  }
};

template <class T>
using BoundBias = BoundWithOperand<T, Plus>;
template <class T>
using BoundFactors = BoundWithOperand<T, Times>;

/// A divisor that many values share.
template <class Acc>
class SharedDivisor {
 public:
  KOKKOS_FORCEINLINE_FUNCTION explicit SharedDivisor(Acc divisor) : divisor_(divisor) {}
  KOKKOS_FORCEINLINE_FUNCTION Acc quotient(Acc value) const { return value / divisor_; }

 private:
  Acc divisor_;
};

/// On a device the quotient to 0.51 units in the last place, as a product with the reciprocal, which is
/// corrected by its remainder: a third of the instructions of a division.
template <>
class SharedDivisor<float> {
 public:
  KOKKOS_FORCEINLINE_FUNCTION explicit SharedDivisor(float divisor) : divisor_(divisor) {
    // What is close to 0 has no reciprocal.
    KOKKOS_IF_ON_DEVICE((factor_ = Kokkos::fabs(divisor) < 0x1p-100f ? 0x1p64f : 1.0f; divisor_ *= factor_;
                         reciprocal_ = 1.0f / divisor_;))
  }
  KOKKOS_FORCEINLINE_FUNCTION float quotient(float value) const {
    KOKKOS_IF_ON_DEVICE((return corrected_quotient(value * factor_);))
    return value / divisor_;
  }
  /// By a device, to 1.5 units in the last place, in one instruction, if the divisor
  /// is_positive_and_has_room.
  KOKKOS_FORCEINLINE_FUNCTION float coarse_quotient(float value) const {
    return rounded_product(value, reciprocal_);  // a maximum's is subtracted from it, and is rounded
  }

 private:
  float divisor_, factor_ = 1, reciprocal_ = 0;

  KOKKOS_FORCEINLINE_FUNCTION float corrected_quotient(float value) const {
    const float quotient = value * reciprocal_;
    const float corrected = Kokkos::fma(Kokkos::fma(-quotient, divisor_, value), reciprocal_, quotient);
    return corrected == corrected ? corrected : quotient;  // an infinity has no remainder
  }
};

template <class T>
struct BoundTemperature {
  const T* data;
  RowOffset row_offset;

  template <class Acc>
  struct PreparedRow {
    static constexpr bool takes_any_column = true;
    SharedDivisor<Acc> temperature;
    bool is_above_zero, has_room;
    KOKKOS_FORCEINLINE_FUNCTION Acc operator()(Acc value, index_type) const {
      return temperature.quotient(value);
    }
    KOKKOS_FORCEINLINE_FUNCTION bool keeps_minus_infinity() const { return is_above_zero; }
    KOKKOS_FORCEINLINE_FUNCTION bool finds_maximum(Acc& maximum, index_type, index_type) const {
      maximum = temperature.quotient(maximum);
      return has_room;
    }
    /// Where it finds_maximum.
    KOKKOS_FORCEINLINE_FUNCTION Acc coarse(Acc value) const requires(std::is_same_v<Acc, float>) {
      return temperature.coarse_quotient(value);
    }
  };
  struct Row {
    const T* temperature;
    template <class Acc>
    KOKKOS_FORCEINLINE_FUNCTION Acc operator()(Acc value, index_type) const {
      return SharedDivisor<Acc>(load_as<Acc>(*temperature)).quotient(value);
    }
    template <class Acc>
    KOKKOS_FORCEINLINE_FUNCTION PreparedRow<Acc> prepared(index_type) const {
      const Acc divisor = load_as<Acc>(*temperature);
      return {SharedDivisor<Acc>(divisor), divisor > Acc(0), is_positive_and_has_room(divisor)};
    }
    template <class Ops>
    void on_vector(typename Ops::Vector& value, typename Ops::Mask&, index_type) const {
      value = value / typename Ops::Vector(load_as<typename Ops::Acc>(*temperature));
    }
    template <class Ops, class Rows>
    static auto of_lanes(const Rows& rows) {
      alignas(64) typename Ops::Acc lanes[Ops::width] = {};
      for (int l = 0; l < rows.count; ++l) lanes[l] = load_as<typename Ops::Acc>(*rows.row(l).temperature);
      return Lanes<typename Ops::Vector>{Ops::load(lanes)};
    }
  };
  template <class Vector>
  struct Lanes {
    Vector temperature;
    template <class Ops>
    void on_vector(Vector& value, typename Ops::Mask&, index_type) const {
      value = value / temperature;
    }
  };
  KOKKOS_FORCEINLINE_FUNCTION Row at_row(index_type row) const { return {data + row_offset(row)}; }
};

/// What BoundBatchNorm is to lanes.
template <class M, class V, class G, class B>
struct BatchNormOfLanes {
  M mean;
  V variance;
  G gamma;
  B beta;
  double eps;
  template <class Ops>
  void on_vector(typename Ops::Vector& value, typename Ops::Mask&, index_type column) const {
    value = batch_normalized_vector<Ops>(value, *this, column);
  }
};

template <class M, class V, class G, class B>
struct BoundBatchNorm {
  ColumnOperand<M> mean;
  ColumnOperand<V> variance;
  ColumnOperand<G> gamma;
  ColumnOperand<B> beta;
  double eps;
  struct Row {
    const BoundBatchNorm* all;
    template <class Acc>
    KOKKOS_FORCEINLINE_FUNCTION Acc operator()(Acc value, index_type column) const {
      return batch_normalized<Acc>(value, load_as<Acc>(all->mean(column)),
                                   load_as<Acc>(all->variance(column)), static_cast<Acc>(all->eps),
                                   load_as<Acc>(all->gamma(column)), load_as<Acc>(all->beta(column)));
    }
    template <class Ops>
    void on_vector(typename Ops::Vector& value, typename Ops::Mask&, index_type column) const {
      value = batch_normalized_vector<Ops>(value, *all, column);
    }
    template <class Ops, class Rows>
    static auto of_lanes(const Rows& rows) {
      const BoundBatchNorm& all = *rows.row(0).all;
      const auto of_columns = [&](const auto& operand) {
        return ColumnsOfLanes<Ops, std::remove_cvref_t<decltype(operand)>>{operand, rows};
      };
      const auto mean = of_columns(all.mean);
      const auto variance = of_columns(all.variance);
      const auto gamma = of_columns(all.gamma);
      const auto beta = of_columns(all.beta);
      return BatchNormOfLanes<decltype(mean), decltype(variance), decltype(gamma), decltype(beta)>{
          mean, variance, gamma, beta, all.eps};
    }
  };
  KOKKOS_FORCEINLINE_FUNCTION bool has_rows_alike() const { return true; }
  KOKKOS_FORCEINLINE_FUNCTION Row at_row(index_type) const { return {this}; }
};

/// Whether a stage's row object takes vectors of consecutive columns.
template <class RowStage, class Ops>
concept goes_on_vectors = requires(const RowStage& stage, typename Ops::Vector& value,
                                   typename Ops::Mask& kept) {
  stage.template on_vector<Ops>(value, kept, index_type(0));
};

/// What a stage's row object does to a value and to whether the logit is kept.
template <class RowStage, class Acc>
KOKKOS_FORCEINLINE_FUNCTION void apply_stage(const RowStage& stage, Acc& value, bool& kept,
                                             index_type column) {
  if constexpr (requires { stage.apply(value, kept, column); }) {
    stage.apply(value, kept, column);
  } else if constexpr (drops_logits<RowStage>) {
    // Looked up in any case: loads would wait for a branch, and for one another.
    const bool keeps = stage.keeps(column);
    kept = kept && keeps;
  } else {
    value = stage(value, column);
  }
}

/// A stage's object for lanes that takes them one by one.
template <class Rows>
struct LanesOneByOne {
  Rows rows;
  template <class Ops>
  void on_vector(typename Ops::Vector& value, typename Ops::Mask& kept, index_type column) const {
    using Acc = typename Ops::Acc;
    alignas(64) Acc lane[Ops::width];
    bool keeps[Ops::width] = {};
    Ops::store(lane, value);
    for (int l = 0; l < rows.count; ++l) {
      keeps[l] = true;
      apply_stage(rows.row(l), lane[l], keeps[l], rows.first_column(l) + column);
    }
    value = Ops::load(lane);
    kept = kept && Ops::mask_of([&](int l) { return keeps[l]; });
  }
};

/// A stage's object for lanes; lives no longer than `rows` and what it refers to.
template <class Ops, class Rows>
auto stage_of_lanes(const Rows& rows) {
  using RowStage = std::remove_cvref_t<decltype(rows.row(0))>;
  if constexpr (Ops::width > 1 && requires { RowStage::template of_lanes<Ops>(rows); }) {
    return RowStage::template of_lanes<Ops>(rows);
  } else {
    return LanesOneByOne<Rows>{rows};
  }
}

/// Whether the operands of a stage lie so that they can be read in vectors, the first of them at a column.
template <int width, class RowStage>
KOKKOS_FORCEINLINE_FUNCTION bool stage_takes_neighbours(const RowStage& stage, index_type first = 0) {
  if constexpr (requires { stage.template takes_neighbours<width>(first); }) {
    return stage.template takes_neighbours<width>(first);
  } else {
    return true;
  }
}

/// A stage that drops logits never makes anything else of any.
template <class RowStage>
concept may_keep_minus_infinity = knows_of_minus_infinity<RowStage> || drops_logits<RowStage>;
template <may_keep_minus_infinity RowStage>
KOKKOS_FORCEINLINE_FUNCTION bool stage_keeps_minus_infinity(const RowStage& stage) {
  if constexpr (knows_of_minus_infinity<RowStage>) {
    return stage.keeps_minus_infinity();
  } else {
    return true;
  }
}

/// All columns of a row of so many from here on are dropped. Not below 0.
template <class RowStage>
KOKKOS_FORCEINLINE_FUNCTION index_type end_of_kept(const RowStage& stage, index_type columns) {
  if constexpr (knows_end_of_kept<RowStage>) {
    return Kokkos::clamp<index_type>(stage.end_of_kept(columns), 0, columns);
  } else {
    return columns;
  }
}

/// The same as apply_stage for neighbouring columns, a multiple of their number behind one from which on
/// stage_takes_neighbours.
template <int width, class RowStage, class Acc>
KOKKOS_FORCEINLINE_FUNCTION void apply_stage_to_neighbours(const RowStage& stage, Acc (&value)[width],
                                                           bool (&kept)[width], index_type first) {
  if constexpr (requires { stage.template apply_to_neighbours<width>(value, kept, first); }) {
    stage.template apply_to_neighbours<width>(value, kept, first);
  } else {
    for (int i = 0; i < width; ++i) apply_stage(stage, value[i], kept[i], first + i);
  }
}

/// Says that it transforms all logits that a thread of a device holds at once, vectors of `together`
/// neighbours, -inf and masks included: transform_held<together>(values, columns). `columns` is as
/// HeldNeighbours: vector v is of the columns origin + offset(v, i), which begin at origin + offset(v) if
/// vectors_are_whole; where a logit is of no column, that of another one. What it skips, and vectors behind
/// that, hold nothing. anew() gives the same, see not_known() of CUDA.
template <class RowStage>
concept transforms_held_logits = requires {
  RowStage::transforms_held_logits;
};

/// A single vector, or some, so many columns from each to the next.
struct HeldNeighbours {
  static constexpr bool vectors_are_whole = true;
  index_type origin;
  int distance = 0;
  KOKKOS_FORCEINLINE_FUNCTION static constexpr bool skips(int) { return false; }
  KOKKOS_FORCEINLINE_FUNCTION int offset(int v) const { return v * distance; }
  KOKKOS_FORCEINLINE_FUNCTION int offset(int v, int i) const { return v * distance + i; }
  KOKKOS_FORCEINLINE_FUNCTION HeldNeighbours anew() const { return *this; }
};

/// Whether a bound stage drops the end of any row of so many columns.
template <class Bound>
KOKKOS_FORCEINLINE_FUNCTION bool drops_ends(const Bound& bound, index_type columns) {
  if constexpr (requires { bound.drops_ends(columns); }) {
    return bound.drops_ends(columns);
  } else {
    return false;
  }
}

/// Operands of a bound stage that have a value for each logit.
template <class Bound>
inline constexpr int operands_of = [] {
  if constexpr (requires { Bound::operands; }) {
    return Bound::operands;
  } else {
    return 0;
  }
}();

/// Whether a bound transform is a chain that is known at run time alone: what looks up what to do is long,
/// and compiled for fewer kernels.
template <class Bound>
inline constexpr bool is_known_at_run_time = requires(const Bound& bound) {
  bound.with_rows_from(index_type(0));
};

/// Whether it is one whose operands are known at run time, too. visit_operands shows those whose columns lie
/// side by side, as a stage whose operands are known when it is compiled, and so does a row's
/// for_each_operand(use): use(number, data, bytes of a scalar). has_copies says to the row's object that
/// those of two columns from one on were copied: to where in a slot, each as far behind a `line` of memory as
/// it was.
template <class Bound>
inline constexpr bool shows_operands_at_run_time = requires {
  Bound::shows_operands_at_run_time;
};

/// A row's object with what `map` makes of each of its operands with a value for each logit: one that gives
/// the same values from another place.
template <class RowStage, class Map>
KOKKOS_FORCEINLINE_FUNCTION auto map_operands(const RowStage& stage, const Map& map) {
  if constexpr (requires { stage.map_operands(map); }) {
    return stage.map_operands(map);
  } else {
    return stage;
  }
}

/// A row's object with what it needs in registers, found once, for whoever applies it often to columns from
/// `first` on, less than 2^31 of them. Reads memory.
template <class Acc, class RowStage>
KOKKOS_FORCEINLINE_FUNCTION auto prepared_stage(const RowStage& stage, index_type first) {
  if constexpr (requires { stage.template prepared<Acc>(first); }) {
    return stage.template prepared<Acc>(first);
  } else {
    return stage;
  }
}

template <class A, class B>
struct BoundChain {
  static constexpr int operands = operands_of<A> + operands_of<B>;
  A a;
  B b;
  KOKKOS_FORCEINLINE_FUNCTION bool has_rows_alike() const { return rows_are_alike(a) && rows_are_alike(b); }
  KOKKOS_FORCEINLINE_FUNCTION bool drops_ends(index_type columns) const {
    return impl::drops_ends(a, columns) || impl::drops_ends(b, columns);
  }
  template <class RowA, class RowB>
  struct RowWith {
    static constexpr bool takes_any_column = impl::takes_any_column<RowA> && impl::takes_any_column<RowB>;
    RowA a;
    RowB b;
    template <class Acc>
    KOKKOS_FORCEINLINE_FUNCTION void apply(Acc& value, bool& kept, index_type column) const {
      apply_stage(a, value, kept, column);
      apply_stage(b, value, kept, column);
    }
    template <int width>
    KOKKOS_FORCEINLINE_FUNCTION bool takes_neighbours(index_type first) const {
      return stage_takes_neighbours<width>(a, first) && stage_takes_neighbours<width>(b, first);
    }
    template <int width, class Acc>
    KOKKOS_FORCEINLINE_FUNCTION void apply_to_neighbours(Acc (&value)[width], bool (&kept)[width],
                                                         index_type first) const {
      apply_stage_to_neighbours<width>(a, value, kept, first);
      apply_stage_to_neighbours<width>(b, value, kept, first);
    }
    KOKKOS_FORCEINLINE_FUNCTION index_type end_of_kept(index_type columns) const
        requires(knows_end_of_kept<RowA> || knows_end_of_kept<RowB>) {
      return Kokkos::min(impl::end_of_kept(a, columns), impl::end_of_kept(b, columns));
    }
    KOKKOS_FORCEINLINE_FUNCTION bool keeps_minus_infinity() const
        requires(may_keep_minus_infinity<RowA>&& may_keep_minus_infinity<RowB>) {
      return stage_keeps_minus_infinity(a) && stage_keeps_minus_infinity(b);
    }
    template <class Acc>
    KOKKOS_FORCEINLINE_FUNCTION bool finds_maximum(Acc& maximum, index_type first, index_type end) const
        requires(knows_maximum<RowA>&& knows_maximum<RowB>) {
      return a.finds_maximum(maximum, first, end) && b.finds_maximum(maximum, first, end);
    }
    template <class Acc>
    KOKKOS_FORCEINLINE_FUNCTION auto prepared(index_type first) const {
      const auto prepared_a = prepared_stage<Acc>(a, first);
      const auto prepared_b = prepared_stage<Acc>(b, first);
      return RowWith<std::remove_const_t<decltype(prepared_a)>, std::remove_const_t<decltype(prepared_b)>>{
          prepared_a, prepared_b};
    }
    template <class Map>
    KOKKOS_FORCEINLINE_FUNCTION auto map_operands(const Map& map) const {
      const auto mapped_a = impl::map_operands(a, map);
      const auto mapped_b = impl::map_operands(b, map);
      return RowWith<std::remove_const_t<decltype(mapped_a)>, std::remove_const_t<decltype(mapped_b)>>{
          mapped_a, mapped_b};
    }
    template <class Ops>
    void on_vector(typename Ops::Vector& value, typename Ops::Mask& kept, index_type column) const
        requires(goes_on_vectors<RowA, Ops>&& goes_on_vectors<RowB, Ops>) {
      a.template on_vector<Ops>(value, kept, column);
      b.template on_vector<Ops>(value, kept, column);
    }
    template <class Ops, class Rows>
    static auto of_lanes(const Rows& rows) {
      const auto lanes_a = stage_of_lanes<Ops>(rows.of(&RowWith::a));
      const auto lanes_b = stage_of_lanes<Ops>(rows.of(&RowWith::b));
      return RowWith<std::remove_const_t<decltype(lanes_a)>, std::remove_const_t<decltype(lanes_b)>>{lanes_a,
                                                                                                     lanes_b};
    }
  };
  using Row = RowWith<typename A::Row, typename B::Row>;
  KOKKOS_FORCEINLINE_FUNCTION Row at_row(index_type row) const { return {a.at_row(row), b.at_row(row)}; }
  template <class Use>
  void visit_operands(const Use& use) const {
    if constexpr (operands_of<A> != 0) a.visit_operands(use);
    if constexpr (operands_of<B> != 0) b.visit_operands(use);
  }
};

/// Whether any of its operands is one for all rows.
template <class Bound>
bool has_operands_of_all_rows(const Bound& bound) {
  bool has = false;
  if constexpr (operands_of<Bound> != 0)
    bound.visit_operands([&](const auto& operand) { has = has || operand.row_offset.is_none(); });
  return has;
}

/// Whether any is not.
template <class Bound>
bool has_operands_of_single_rows(const Bound& bound) {
  bool has = false;
  if constexpr (operands_of<Bound> != 0)
    bound.visit_operands([&](const auto& operand) { has = has || !operand.row_offset.is_none(); });
  return has;
}

/// Whether a bound stage does nothing but drop logits.
template <class Bound>
inline constexpr bool only_drops = drops_logits<typename Bound::Row>;
template <class A, class B>
inline constexpr bool only_drops<BoundChain<A, B>> = only_drops<A>&& only_drops<B>;

/// A logit as the softmax sees it. Masking is sticky: what a mask drops, and an input of -inf, stays -inf
/// whatever else is in the chain. (The choice at the end also keeps the compiler from fusing the chain's last
/// product with the subtraction of the maximum, which was found among rounded logits.) Logits of -inf need
/// not be looked for where the stage keeps_minus_infinity.
template <class Acc, bool looks_for_minus_infinity = true, class TransformRow>
KOKKOS_FORCEINLINE_FUNCTION Acc transformed(const TransformRow& row, Acc value, index_type column) {
  if constexpr (std::is_same_v<TransformRow, BoundIdentity::Row>) {
    return value;
  } else {
    bool kept = !looks_for_minus_infinity || value != -infinity_v<Acc>;
    Acc result = value;
    apply_stage(row, result, kept, column);
    return kept ? result : -infinity_v<Acc>;
  }
}

/// The same for neighbouring logits in the registers of a device's thread, to the same bits.
template <int width, bool looks_for_minus_infinity = true, class Acc, class TransformRow>
KOKKOS_FORCEINLINE_FUNCTION void transform_neighbours(const TransformRow& row, Acc (&value)[width],
                                                      index_type first) {
  if constexpr (!std::is_same_v<TransformRow, BoundIdentity::Row>) {
    bool kept[width];
    for (int i = 0; i < width; ++i) kept[i] = !looks_for_minus_infinity || value[i] != -infinity_v<Acc>;
    apply_stage_to_neighbours<width>(row, value, kept, first);
    for (int i = 0; i < width; ++i) value[i] = kept[i] ? value[i] : -infinity_v<Acc>;
  }
}

/// What of some vectors a transform keeps; -inf is dropped from the beginning. (Not by the mask's operator!,
/// for which Kokkos 4.5 asks each time whether a static one has been made, nor by !=, which is false of NaN.)
template <class Ops, int count>
struct KeptOfVectors {
  using Vector = typename Ops::Vector;
  typename Ops::Mask kept[count], is_dropped[count];

  explicit KeptOfVectors(const Vector (&value)[count]) {
    const Vector dropped(-infinity_v<typename Ops::Acc>);
    for (int i = 0; i < count; ++i) {
      is_dropped[i] = value[i] == dropped;
      kept[i] = typename Ops::Mask(true);
    }
  }
  void drop_others(Vector (&value)[count]) const {
    const Vector dropped(-infinity_v<typename Ops::Acc>);
    for (int i = 0; i < count; ++i)
      value[i] = Ops::select(is_dropped[i], dropped, Ops::select(kept[i], value[i], dropped));
  }
};

/// How many vectors a transform's row object takes at a time: more than one where it has to find out what to
/// do.
template <class TransformRow>
inline constexpr int vectors_at_once = 1;

/// The same of vectors of consecutive columns. Inlined, for the call would cost more than a mask does.
template <class Ops, int count, class TransformRow>
[[gnu::always_inline]] inline void transform_vectors(const TransformRow& row,
                                                     typename Ops::Vector (&value)[count],
                                                     index_type column) {
  KeptOfVectors<Ops, count> keeps(value);
  auto& kept = keeps.kept;
  if constexpr (vectors_at_once < TransformRow >> 1) {
    row.template on_vectors<Ops>(value, kept, column);
  } else {
    for (int i = 0; i < count; ++i) row.template on_vector<Ops>(value[i], kept[i], column + i * Ops::width);
  }
  keeps.drop_others(value);
}

/// The same of the lanes of a stage_of_lanes, a vector of them in each column from `column` on.
template <class Ops, int count, class Lanes>
[[gnu::always_inline]] inline void transform_lanes(const Lanes& lanes, typename Ops::Vector (&value)[count],
                                                   index_type column) {
  KeptOfVectors<Ops, count> keeps(value);
  auto& kept = keeps.kept;
  if constexpr (requires { lanes.template on_columns<Ops>(value, kept, column); }) {
    lanes.template on_columns<Ops>(value, kept, column);
  } else {
    for (int i = 0; i < count; ++i) lanes.template on_vector<Ops>(value[i], kept[i], column + i);
  }
  keeps.drop_others(value);
}

// ---------------------------------------------------------------------------------------------------------------------
// Transforms as the user makes them: they hold Views; bind() checks these against the logits.

struct Identity : TransformBase {
  template <class Exec>
  static constexpr bool reachable_from = true;
  template <class Exec>
  BoundIdentity bind(const BindContext<Exec>&) const {
    return {};
  }
};

template <class F>
struct FunctorTransform : TransformBase {
  F f;
  explicit FunctorTransform(F f_) : f(std::move(f_)) {}
  template <class Exec>
  static constexpr bool reachable_from = true;
  template <class Exec>
  BoundFunctor<F> bind(const BindContext<Exec>&) const {
    return {f};
  }
};

template <class Exec, class View>
inline constexpr bool view_reachable_from =
    Kokkos::SpaceAccessibility<Exec, typename View::memory_space>::accessible;

template <class Predicate>
struct KeepIf : TransformBase {
  Predicate predicate;
  explicit KeepIf(Predicate predicate_) : predicate(std::move(predicate_)) {}
  template <class Exec>
  static constexpr bool reachable_from = true;
  template <class Exec>
  BoundKeepIf<Predicate> bind(const BindContext<Exec>&) const {
    return {predicate};
  }
};

template <class View>
struct Mask : TransformBase {
  View view;
  explicit Mask(const View& view_) : view(view_) {}
  template <class Exec>
  static constexpr bool reachable_from = view_reachable_from<Exec, View>;
  template <class Exec>
  auto bind(const BindContext<Exec>& c) const {
    using T = typename View::non_const_value_type;
    return BoundMask<T>{LogitOperand<T>::bind("mask", view, c)};
  }
};

struct Causal : TransformBase {
  index_type offset;
  explicit Causal(index_type offset_) : offset(offset_) {}
  template <class Exec>
  static constexpr bool reachable_from = true;
  template <class Exec>
  BoundCausal bind(const BindContext<Exec>& c) const {
    if (c.shape.axis == 0) {
      c.call.fail("causal needs a dimension before the axis for the queries; x of extents " + c.shape.text() +
                  " has none before axis 0");
    }
    BoundCausal bound{offset, c.shape.extent[c.shape.axis - 1], 1};
    for (int d = c.shape.axis + 1; d < c.shape.rank; ++d) bound.rows_per_query *= c.shape.extent[d];
    return bound;
  }
};

template <class View, class Combine>
struct WithOperand : TransformBase {
  const char* name;
  View view;
  WithOperand(const char* name_, const View& view_) : name(name_), view(view_) {}
  template <class Exec>
  static constexpr bool reachable_from = view_reachable_from<Exec, View>;
  template <class Exec>
  auto bind(const BindContext<Exec>& c) const {
    using T = typename View::non_const_value_type;
    return BoundWithOperand<T, Combine>{LogitOperand<T>::bind(name, view, c)};
  }
};

template <class T>
struct CountNotPositive {
  BoundTemperature<T> bound;
  KOKKOS_FUNCTION void operator()(index_type row, index_type& count) const {
    const double value = load_as<double>(bound.data[bound.row_offset(row)]);
    if (!(value > 0)) ++count;
  }
};

template <class View>
struct Temperature : TransformBase {
  View view;
  bool is_checked;
  Temperature(const View& view_, bool is_checked_) : view(view_), is_checked(is_checked_) {}
  template <class Exec>
  static constexpr bool reachable_from = view_reachable_from<Exec, View>;

  template <class Exec>
  auto bind(const BindContext<Exec>& c) const {
    using T = typename View::non_const_value_type;
    const Block block = block_of(view);
    const LogitShape& shape = c.shape;
    BoundTemperature<T> bound{view.data(), {}};
    bool fits = block.rank == 1 && block.extent[0] == shape.rows;
    if (fits) {
      bound.row_offset.append(shape.rows, block.stride[0]);
    } else if (block.rank == shape.rank - 1) {
      fits = true;
      for (int d = 0, e = 0; d < shape.rank; ++d) {
        if (d == shape.axis) continue;
        fits = fits && block.extent[e] == shape.extent[d];
        bound.row_offset.append(shape.extent[d], block.stride[e++]);
      }
    }
    if (!fits) {
      c.call.fail("temperature of extents " + block.extents_text() +
                  " has neither one value for each of the " + std::to_string(shape.rows) +
                  " rows nor the extents of x " + shape.text() + " without the axis");
    }
    c.call.check_operand("temperature", block);
    if (is_checked) check_positive(c, bound, shape.rows);
    return bound;
  }

 private:
  template <class Exec, class Bound>
  static void check_positive(const BindContext<Exec>& c, const Bound& bound, index_type rows) {
    index_type bad = 0;
    Kokkos::parallel_reduce("KokkosSoftmax::check_temperature",
                            Kokkos::RangePolicy<Exec, Kokkos::IndexType<index_type>>(c.exec, 0, rows),
                            CountNotPositive<typename View::non_const_value_type>{bound}, bad);
    if (bad > 0) {
      c.call.fail("temperature is not positive in " + std::to_string(bad) + " of " + std::to_string(rows) +
                  " rows");
    }
  }
};

template <class M, class V, class G, class B>
struct BatchNorm : TransformBase {
  M mean;
  V variance;
  G gamma;
  B beta;
  double eps;
  BatchNorm(const M& mean_, const V& variance_, const G& gamma_, const B& beta_, double eps_)
      : mean(mean_), variance(variance_), gamma(gamma_), beta(beta_), eps(eps_) {}
  template <class Exec>
  static constexpr bool reachable_from = view_reachable_from<Exec, M>&& view_reachable_from<Exec, V>&&
      view_reachable_from<Exec, G>&& view_reachable_from<Exec, B>;
  template <class Exec>
  auto bind(const BindContext<Exec>& c) const {
    if (!(eps >= 0)) c.call.fail("eps of batch_norm is " + std::to_string(eps) + "; it must not be negative");
    using TM = typename M::non_const_value_type;
    using TV = typename V::non_const_value_type;
    using TG = typename G::non_const_value_type;
    using TB = typename B::non_const_value_type;
    return BoundBatchNorm<TM, TV, TG, TB>{
        ColumnOperand<TM>::bind("mean", mean, c), ColumnOperand<TV>::bind("variance", variance, c),
        ColumnOperand<TG>::bind("gamma", gamma, c), ColumnOperand<TB>::bind("beta", beta, c), eps};
  }
};

template <class A, class B>
struct Chain : TransformBase {
  A a;
  B b;
  Chain(A a_, B b_) : a(std::move(a_)), b(std::move(b_)) {}
  template <class Exec>
  static constexpr bool reachable_from = A::template reachable_from<Exec>&& B::template reachable_from<Exec>;
  template <class Exec>
  auto bind(const BindContext<Exec>& c) const {
    auto bound_a = a.bind(c);  // in order, so that the first transform that does not fit is named
    auto bound_b = b.bind(c);
    return BoundChain<decltype(bound_a), decltype(bound_b)>{bound_a, bound_b};
  }
};

/// A transform of the library as it is, a user's functor wrapped.
template <class T>
auto as_transform(const T& t) {
  if constexpr (is_library_transform_v<T>) {
    return t;
  } else {
    return FunctorTransform<T>(t);
  }
}

struct ScaleFunction {
  static constexpr bool is_same_for_all_rows = true;
  double factor;
  KOKKOS_FORCEINLINE_FUNCTION bool keeps_minus_infinity() const { return factor > 0; }
  template <class Acc>
  KOKKOS_FORCEINLINE_FUNCTION bool keeps_maximum(Acc) const {
    return is_positive_and_has_room(factor);
  }
  template <class Acc>
  KOKKOS_FORCEINLINE_FUNCTION Acc operator()(Acc value, index_type, index_type) const {
    return rounded_product(value, static_cast<Acc>(factor));
  }
  template <class Ops, class Vector>
  Vector with(const Vector& value) const {
    return rounded_product_of_vectors<Ops>(value, Vector(static_cast<typename Ops::Acc>(factor)));
  }
};

using BoundScale = BoundFunctor<ScaleFunction>;

struct ReluFunction {
  static constexpr bool is_same_for_all_rows = true;
  template <class Acc>
  KOKKOS_FORCEINLINE_FUNCTION bool keeps_maximum(Acc) const {
    return true;
  }
  template <class Acc>
  KOKKOS_FORCEINLINE_FUNCTION Acc operator()(Acc value, index_type, index_type) const {
    return value < Acc(0) ? Acc(0) : value;  // keeps NaN
  }
  template <class Ops, class Vector>
  static Vector with(const Vector& value) {
    return Ops::larger(Vector(typename Ops::Acc(0)), value);
  }
};

struct GeluErfFunction {
  static constexpr bool is_same_for_all_rows = true;
  /// GELU rises from 0 on, and is below 0 before.
  template <class Acc>
  KOKKOS_FORCEINLINE_FUNCTION bool keeps_maximum(Acc maximum) const {
    return maximum >= Acc(0);
  }
  template <class Acc>
  KOKKOS_FORCEINLINE_FUNCTION Acc operator()(Acc value, index_type, index_type) const {
    return gelu_by_erf(value);
  }
  template <class Ops, class Vector>
  static Vector with(const Vector& value) {
    return gelu_by_erf_of_vector<Ops>(value);
  }
};

struct GeluTanhFunction {
  static constexpr bool is_same_for_all_rows = true;
  /// GELU rises from 0 on, and is below 0 before.
  template <class Acc>
  KOKKOS_FORCEINLINE_FUNCTION bool keeps_maximum(Acc maximum) const {
    return maximum >= Acc(0);
  }
  template <class Acc>
  KOKKOS_FORCEINLINE_FUNCTION Acc operator()(Acc value, index_type, index_type) const {
    return gelu_by_tanh(value);
  }
  /// (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)).
  template <class Ops, class Vector>
  static Vector with(const Vector& value) {
    using Acc = typename Ops::Acc;
    const Vector twice =
        Vector(Acc(2 * 0.79788456080286535588)) * (value + Vector(Acc(0.044715)) * value * value * value);
    return value / (Vector(Acc(1)) + exp_of_vector<Ops>(-twice));
  }
};

/// `a | b`: a, then b. At least one of the two is a transform of the library; the other may be a user's
/// functor.
template <class A, class B>
requires((is_library_transform_v<A> ||
          is_library_transform_v<B>)&&logit_transform<A>&& logit_transform<B>) auto
operator|(const A& a, const B& b) {
  auto first = as_transform(a);
  auto second = as_transform(b);
  return Chain<decltype(first), decltype(second)>(std::move(first), std::move(second));
}

}  // namespace impl

using impl::operator|;

/// A user's functor `value' = f(value, row, column)`: `value` is the accumulator (float; double when input or
/// output is double), `row` and `column` are std::int64_t; `row` is the linear index over the dimensions
/// other than the axis, the last of them fastest. Called on the device; must be copyable as bytes.
///
/// On the host rows go through vectors. A functor that can take them has a member function beside operator():
///   template <class Vector> Vector on_vector(Vector value, std::int64_t row, std::int64_t column) const;
/// for the host alone (no KOKKOS_FUNCTION). Along a contiguous axis it is called with a Kokkos SIMD vector,
/// KokkosSoftmax::simd<float> (or <double>), whose lanes are the columns `column`, `column + 1`, ...; the
/// ends of rows and all other cases go through operator(), one by one, as everything does without it.
template <impl::callable_as_value_row_column F>
auto transform(F f) {
  return impl::FunctorTransform<F>(std::move(f));
}

/// value * factor.
inline auto scale(double factor) {
  return impl::FunctorTransform<impl::ScaleFunction>({factor});
}

/// value * factor, read where the call runs; the view's shape as for mask.
template <impl::view_of_operand View>
auto scale(const View& factor) {
  return impl::WithOperand<View, impl::Times>("scale", factor);
}

/// value / temperature, one temperature a row: a view of rank 1 with a value for each row, or of the logits'
/// extents without the axis. With `checked` a value that is not positive (or is NaN) throws
/// std::invalid_argument, at the cost of a fence.
template <impl::view_of_operand View>
auto temperature(const View& view) {
  return impl::Temperature<View>(view, false);
}
template <impl::view_of_operand View>
auto temperature(const View& view, Checked) {
  return impl::Temperature<View>(view, true);
}

/// Keeps the logits where the view is true; the others count as -inf. The view has the logits' rank with
/// their extents, or 1 where it is to be broadcast, or rank 1 with a value for each column or for all.
template <impl::view_of_operand View>
auto mask(const View& view) {
  static_assert(std::is_convertible_v<typename View::value_type, bool>,
                "KokkosSoftmax::mask: the mask's values are not convertible to bool");
  return impl::Mask<View>(view);
}

/// Keeps the logits for which predicate(row, column) is true; the others count as -inf.
template <class Predicate>
requires std::is_invocable_r_v<bool, const Predicate&, index_type, index_type>
auto keep_if(Predicate predicate) {
  return impl::KeepIf<Predicate>(std::move(predicate));
}

/// Keeps column <= query + offset, the query being the index along the dimension before the axis. Where the
/// columns of a row are contiguous, most of what lies behind that is not read.
inline auto causal(index_type offset = 0) {
  return impl::Causal(offset);
}

/// value + bias; the view's shape as for mask.
template <impl::view_of_operand View>
auto bias(const View& view) {
  return impl::WithOperand<View, impl::Plus>("bias", view);
}

/// max(value, 0); NaN stays NaN.
inline auto relu() {
  return impl::FunctorTransform<impl::ReluFunction>({});
}

/// value * Phi(value) with the normal distribution's Phi through erf (D. Hendrycks and K. Gimpel, "Gaussian
/// error linear units", 2016).
inline auto gelu() {
  return impl::FunctorTransform<impl::GeluErfFunction>({});
}

/// The same paper's approximation, 0.5 value (1 + tanh(sqrt(2 / pi) (value + 0.044715 value^3))).
inline auto gelu_tanh() {
  return impl::FunctorTransform<impl::GeluTanhFunction>({});
}

/// (value - mean) / sqrt(variance + eps) * gamma + beta with given statistics, one of each a column (S. Ioffe
/// and C. Szegedy, "Batch normalization", 2015). eps >= 0.
template <impl::view_of_operand M, impl::view_of_operand V, impl::view_of_operand G, impl::view_of_operand B>
auto batch_norm(const M& mean, const V& variance, const G& gamma, const B& beta, double eps) {
  return impl::BatchNorm<M, V, G, B>(mean, variance, gamma, beta, eps);
}

}  // namespace KokkosSoftmax

#endif
