// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// What the portable kernels do with a block of logits, on a device (a few logits in the registers of a lane)
/// and on the host (a few hundred in a small array, in loops that the compiler vectorises).

#ifndef KOKKOSSOFTMAX_ROWBLOCKS_HPP
#define KOKKOSSOFTMAX_ROWBLOCKS_HPP

#include <KokkosSoftmax_Transforms.hpp>
#include <impl/KokkosSoftmax_Scratch.hpp>

namespace KokkosSoftmax::impl {

/// Whether the kernels of an execution space run on the host's cores.
template <class Exec>
inline constexpr bool runs_on_host_v = Kokkos::SpaceAccessibility<Exec, Kokkos::HostSpace>::accessible;

KOKKOS_FORCEINLINE_FUNCTION constexpr index_type ceil_div(index_type a, index_type b) {
  return (a + b - 1) / b;
}

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

/// The columns [begin, end) of a row cut into blocks. A lane's block is `size` columns at a distance of
/// `lanes`, so that neighbouring lanes read neighbouring columns; with one lane it is contiguous. What
/// belongs to a block depends on the column's index alone, and so do the bits of the result.
template <class Exec, class Acc>
struct Blocks {
  static constexpr bool on_host = runs_on_host_v<Exec>;
  static constexpr int size = on_host ? 256 : 8;

  index_type begin, end, lanes;

  KOKKOS_FORCEINLINE_FUNCTION index_type count() const { return ceil_div(end - begin, size * lanes) * lanes; }
  KOKKOS_FORCEINLINE_FUNCTION index_type first(index_type block) const {
    if constexpr (on_host) {
      return begin + block * size;
    } else {
      return begin + (block / lanes) * (size * lanes) + block % lanes;
    }
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// On a device.

template <int size, class Problem>
KOKKOS_FORCEINLINE_FUNCTION void reduce_lane_block(const RowAccess<Problem>& row, index_type first,
                                                   index_type step, index_type end,
                                                   CompensatedMaxSum<typename Problem::Acc>& total) {
  using Acc = typename Problem::Acc;
  Acc v[size];
  Acc max = total.max;
  for (int i = 0; i < size; ++i) {
    const index_type column = first + i * step;
    v[i] = column < end ? row.logit(column) : -infinity_v<Acc>;
  }
  for (int i = 0; i < size; ++i) max = larger(v[i], max);
  total.raise_max(finite_max(max));
  Acc sum = 0;
  for (int i = 0; i < size; ++i) sum += exp_of_difference(v[i] - total.max);
  total.add(sum);
}

template <int size, class Problem>
KOKKOS_FORCEINLINE_FUNCTION void write_lane_block(const RowAccess<Problem>& row, index_type first,
                                                  index_type step, index_type end,
                                                  const RowResult<typename Problem::Acc>& result) {
  using Acc = typename Problem::Acc;
  Acc v[size];
  for (int i = 0; i < size; ++i) {
    const index_type column = first + i * step;
    v[i] = column < end ? row.logit(column) : Acc(0);
  }
  for (int i = 0; i < size; ++i) {
    const index_type column = first + i * step;
    if (column < end) row.y[column * row.y_stride] = store_as<typename Problem::Out>(result(v[i]));
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
    Acc m[width];
    for (int l = 0; l < width; ++l) m[l] = v_[l];
    for (int i = width; i < padded_; i += width) {
      for (int l = 0; l < width; ++l) m[l] = m[l] > v_[i + l] ? m[l] : v_[i + l];
    }
    for (int half = width / 2; half > 0; half /= 2) {
      for (int l = 0; l < half; ++l) m[l] = m[l] > m[l + half] ? m[l] : m[l + half];
    }
    return m[0];
  }

  /// Replaces the logits by exp(logit - max) and returns their sum.
  KOKKOS_INLINE_FUNCTION Acc exponentiate(Acc max) {
    Acc s[width];
    for (int l = 0; l < width; ++l) s[l] = 0;
    for (int i = 0; i < padded_; i += width) {
      for (int l = 0; l < width; ++l) {
        const Acc e = exp_by_polynomial(v_[i + l] - max);
        v_[i + l] = e;
        s[l] += e;
      }
    }
    for (int half = width / 2; half > 0; half /= 2) {
      for (int l = 0; l < half; ++l) s[l] += s[l + half];
    }
    return s[0];
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
  alignas(64) Acc v_[size];
  int count_ = 0, padded_ = 0;
};

}  // namespace KokkosSoftmax::impl

#endif
