// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// What the portable kernels do with a block of logits, on a device (a few logits in the registers of a lane)
/// and on the host (a few hundred in a small array, in loops that the compiler vectorises).

#ifndef KOKKOSSOFTMAX_ROWBLOCKS_HPP
#define KOKKOSSOFTMAX_ROWBLOCKS_HPP

#include <KokkosSoftmax_Transforms.hpp>
#include <impl/KokkosSoftmax_Scratch.hpp>
#include <impl/portable/KokkosSoftmax_Launch.hpp>

namespace KokkosSoftmax::impl {

template <class Acc>
KOKKOS_FORCEINLINE_FUNCTION Acc larger(Acc a, Acc b) {
  return a > b ? a : b;  // NaN in `a` is passed over: the sum carries it
}

/// A maximum as MaxSum keeps it: finite.
template <class Acc>
KOKKOS_FORCEINLINE_FUNCTION Acc finite_max(Acc max) {
  return max > largest_v<Acc> ? largest_v<Acc> : max > -largest_v<Acc> ? max : -largest_v<Acc>;
}

/// One row: where it lies and its transform.
template <class Problem>
struct RowAccess {
  using Acc = typename Problem::Acc;
  using Out = typename Problem::Out;

  const typename Problem::In* x;
  Out* y;
  index_type x_stride;
  index_type y_stride;
  typename Problem::Transform::Row transform;

  KOKKOS_FORCEINLINE_FUNCTION RowAccess(const Problem& p, index_type position)
      : RowAccess(p, p.geometry.row(position)) {}
  KOKKOS_FORCEINLINE_FUNCTION RowAccess(const Problem& p, const RowGeometry::Row& row)
      : x(p.x + row.x_offset),
        y(p.y + row.y_offset),
        x_stride(p.geometry.x_column_stride),
        y_stride(p.geometry.y_column_stride),
        transform(p.transform.at_row(row.index)) {}

  KOKKOS_FORCEINLINE_FUNCTION Acc logit(index_type column) const {
    return transformed<Acc>(transform, load_as<Acc>(x[column * x_stride]), column);
  }
};

/// The columns [begin, end) of a row cut into blocks. A lane's block is `size` columns at a distance of the
/// number of lanes (a power of two), so that neighbouring lanes read neighbouring columns; with one lane it
/// is contiguous. What belongs to a block depends on the column's index alone, and so do the bits of the
/// result.
template <class Exec, int size_>
struct Blocks {
  static constexpr bool on_host = runs_on_host_v<Exec>;
  static constexpr int size = size_;

  index_type begin, end;
  int lane_bits;  ///< shifts, because a division of 64 bits costs a device more than a block does

  KOKKOS_FORCEINLINE_FUNCTION int lanes() const { return 1 << lane_bits; }
  KOKKOS_FORCEINLINE_FUNCTION index_type count() const {
    if constexpr (on_host) {
      return (end - begin + size - 1) / size;
    } else {
      return ((end - begin + size * lanes() - 1) / size >> lane_bits) << lane_bits;
    }
  }
  KOKKOS_FORCEINLINE_FUNCTION index_type first(index_type block) const {
    if constexpr (on_host) {
      return begin + block * size;
    } else {
      return begin + (block >> lane_bits) * (size * lanes()) + (block & (lanes() - 1));
    }
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// On a device.

/// Whether offsets within a lane's block fit 32 bits, in which a device computes an address in one
/// instruction.
template <int size>
KOKKOS_FORCEINLINE_FUNCTION bool offsets_are_short(index_type jump) {
  return jump >= 0 && jump < (index_type(1) << 31) / size;
}

/// Calls `body(i, offset)` for the elements of a lane's block at a distance of `jump` elements.
template <int size, class Body>
KOKKOS_FORCEINLINE_FUNCTION void for_each_offset(index_type jump, const Body& body) {
  if (offsets_are_short<size>(jump)) {
    const int short_jump = static_cast<int>(jump);
    for (int i = 0; i < size; ++i) body(i, i * short_jump);
  } else {
    for (int i = 0; i < size; ++i) body(i, i * jump);
  }
}

/// The number of columns of a lane's block before `end`.
template <int size>
KOKKOS_FORCEINLINE_FUNCTION int columns_before(index_type first, int step, index_type end) {
  const index_type left = end - first;
  if (left > (size - 1) * static_cast<index_type>(step)) return size;
  const int short_left = static_cast<int>(left);
  int n = 0;
  for (int i = 0; i < size; ++i) n += i * step < short_left ? 1 : 0;
  return n;
}

/// The logits of a lane's block; past the end `fill`.
template <int size, class Problem>
KOKKOS_FORCEINLINE_FUNCTION void load_lane_block(const RowAccess<Problem>& row, index_type first, int step,
                                                 int count, typename Problem::Acc fill,
                                                 typename Problem::Acc (&v)[size]) {
  using Acc = typename Problem::Acc;
  const typename Problem::In* x = row.x + first * row.x_stride;
  if (count == size) {
    typename Problem::In raw[size];  // all loads under way before the first use
    for_each_offset<size>(step * row.x_stride, [&](int i, auto offset) { raw[i] = x[offset]; });
    for (int i = 0; i < size; ++i)
      v[i] = transformed<Acc>(row.transform, load_as<Acc>(raw[i]), first + i * step);
  } else {
    for_each_offset<size>(step * row.x_stride, [&](int i, auto offset) {
      v[i] = i < count ? transformed<Acc>(row.transform, load_as<Acc>(x[offset]), first + i * step) : fill;
    });
  }
}

/// Leaves the sum in v[0]. Recursive, not a loop, so that a device keeps the array in registers.
template <int size, class Acc>
KOKKOS_FORCEINLINE_FUNCTION void sum_by_halves(Acc* v) {
  if constexpr (size > 1) {
    for (int i = 0; i < size / 2; ++i) v[i] += v[i + size / 2];
    sum_by_halves<size / 2>(v);
  }
}

template <int size, class Problem>
KOKKOS_FORCEINLINE_FUNCTION void reduce_lane_block(const RowAccess<Problem>& row, index_type first, int step,
                                                   index_type end,
                                                   CompensatedMaxSum<typename Problem::Acc>& total) {
  using Acc = typename Problem::Acc;
  Acc v[size];
  load_lane_block<size>(row, first, step, columns_before<size>(first, step, end), -infinity_v<Acc>, v);
  Acc max = total.max;
  for (int i = 0; i < size; ++i) max = larger(v[i], max);
  total.raise_max(finite_max(max));
  // A tree, then compensated: beside a maximum's 1, terms of half an eps would vanish one after the other.
  for (int i = 0; i < size; ++i) v[i] = exp_of_difference(v[i] - total.max);
  sum_by_halves<size>(v);
  total.add(v[0]);
}

template <int size, class Problem>
KOKKOS_FORCEINLINE_FUNCTION void write_lane_block(const RowAccess<Problem>& row, index_type first, int step,
                                                  index_type end,
                                                  const RowResult<typename Problem::Acc>& result) {
  using Acc = typename Problem::Acc;
  using Out = typename Problem::Out;
  Acc v[size];
  const int count = columns_before<size>(first, step, end);
  load_lane_block<size>(row, first, step, count, Acc(0), v);
  if (result.operation == Operation::softmax) {
    for (int i = 0; i < size; ++i) v[i] = result.softmax(v[i]);
  } else {
    for (int i = 0; i < size; ++i) v[i] = result.log_softmax(v[i]);
  }
  Out* y = row.y + first * row.y_stride;
  if (count == size) {
    for_each_offset<size>(step * row.y_stride, [&](int i, auto offset) { y[offset] = store_as<Out>(v[i]); });
  } else {
    for_each_offset<size>(step * row.y_stride, [&](int i, auto offset) {
      if (i < count) y[offset] = store_as<Out>(v[i]);
    });
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// On the host.

/// A block of logits in an array, filled up with -inf (which changes neither maximum nor sum) to whole
/// vectors.
template <class Acc, int size>
class HostBlock {
 public:
  static constexpr int width =
      128 / sizeof(Acc);  ///< independent accumulators: enough to hide the latency of an add

  template <class Problem>
  KOKKOS_INLINE_FUNCTION void load(const RowAccess<Problem>& row, index_type first, index_type end) {
    count_ = static_cast<int>(end - first < size ? end - first : size);
    padded_ = (count_ + width - 1) / width * width;
    const auto* x = row.x + first * row.x_stride;
    if (row.x_stride == 1) {
      for (int i = 0; i < count_; ++i) v_[i] = transformed<Acc>(row.transform, load_as<Acc>(x[i]), first + i);
    } else {
      for (int i = 0; i < count_; ++i) {
        v_[i] = transformed<Acc>(row.transform, load_as<Acc>(x[i * row.x_stride]), first + i);
      }
    }
    for (int i = count_; i < padded_; ++i) v_[i] = -infinity_v<Acc>;
  }

  KOKKOS_INLINE_FUNCTION Acc max() const {
    return fold<Acc>([](Acc a, Acc b) { return b > a ? b : a; });  // passes over NaN: the sum carries it
  }

  /// Replaces the logits by exp(logit - max) and adds these to a sum.
  KOKKOS_INLINE_FUNCTION void exponentiate(CompensatedMaxSum<Acc>& total) {
    exponentiate(total.max);
    if constexpr (std::is_same_v<Acc, float>) {
      // In double: cheaper than to carry what each addition rounds off.
      const double sum = fold<double>([](double a, double b) { return a + b; });
      const float high = static_cast<float>(sum);
      total.add(high);
      total.low += high - high == 0.0f ? static_cast<float>(sum - high) : 0.0f;
    } else {
      using Pair = CompensatedMaxSum<Acc>;
      alignas(64) Acc high[size], low[size];
      int n = padded_;
      if (n <= 0) return;  // never; tells the compiler that the arrays are filled
      for (int i = 0; i < n; ++i) {
        high[i] = v_[i];
        low[i] = 0;
      }
      while (n > 1) {
        const int half = n / 2;
        for (int i = 0; i < half; ++i) {
          Pair pair{total.max, high[i], low[i]};
          pair.add(high[i + half]);
          high[i] = pair.sum;
          low[i] = pair.low + low[i + half];
        }
        if (n & 1) {
          Pair pair{total.max, high[0], low[0]};
          pair.add(high[n - 1]);
          high[0] = pair.sum;
          low[0] = pair.low + low[n - 1];
        }
        n = half;
      }
      total.add(high[0]);
      total.low += low[0];
    }
  }

  KOKKOS_INLINE_FUNCTION void exponentiate(Acc max) {
    for (int i = 0; i < padded_; ++i) v_[i] = exp_by_polynomial(v_[i] - max);
  }

  KOKKOS_INLINE_FUNCTION void subtract(Acc max, Acc log_sum) {
    for (int i = 0; i < padded_; ++i) v_[i] = (v_[i] - max) - log_sum;
  }
  KOKKOS_INLINE_FUNCTION void multiply(Acc factor) {
    for (int i = 0; i < padded_; ++i) v_[i] *= factor;
  }

  template <class Out>
  KOKKOS_INLINE_FUNCTION void store(Out* y, index_type stride) const {
    if (stride == 1) {
      for (int i = 0; i < count_; ++i) y[i] = store_as<Out>(v_[i]);
    } else {
      for (int i = 0; i < count_; ++i) y[i * stride] = store_as<Out>(v_[i]);
    }
  }

 private:
  /// A tree over the block: halves upon halves in whole vectors, in flat loops because a nest of two is
  /// vectorised along the wrong one, then scalars because a vector stored in parts and loaded whole stalls.
  template <class T, class Operation>
  KOKKOS_INLINE_FUNCTION T fold(const Operation& operation) const {
    alignas(64) T t[size / 2 < width ? width : size / 2];
    for (int i = 0; i < width; ++i)
      t[i] = T(0);  // for the compiler, which does not see that they are overwritten
    int n = padded_ / width / 2 * width;
    for (int i = 0; i < n; ++i) t[i] = operation(static_cast<T>(v_[i]), static_cast<T>(v_[i + n]));
    if (n == 0) {
      for (int i = 0; i < width; ++i) t[i] = static_cast<T>(v_[i]);
      n = width;
    } else if (padded_ > 2 * n) {
      for (int i = 0; i < width; ++i) t[i] = operation(t[i], static_cast<T>(v_[2 * n + i]));
    }
    while (n > width) {
      const int half = n / width / 2 * width;
      for (int i = 0; i < half; ++i) t[i] = operation(t[i], t[i + half]);
      if (n > 2 * half) {
        for (int i = 0; i < width; ++i) t[i] = operation(t[i], t[2 * half + i]);
      }
      n = half;
    }
    return fold_scalars<width>(t, operation);
  }

  template <int n, class T, class Operation>
  KOKKOS_FORCEINLINE_FUNCTION static T fold_scalars(const T* v, const Operation& operation) {
    if constexpr (n == 1) {
      return *v;
    } else {
      return operation(fold_scalars<n / 2>(v, operation), fold_scalars<n / 2>(v + n / 2, operation));
    }
  }

  alignas(64) Acc v_[size];
  int count_ = 0, padded_ = 0;
};

}  // namespace KokkosSoftmax::impl

#endif
