// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Rows of 16 bits whose columns are not contiguous and that a transform leaves as they are in memory, so
/// that a thread has two neighbours as a pair: what is dropped becomes -inf there, as whoever has the rows
/// finds them, and a factor or a temperature is applied to a value whenever that is used.

#ifndef KOKKOSSOFTMAX_PACKEDTILES_HPP
#define KOKKOSSOFTMAX_PACKEDTILES_HPP

#include <impl/cuda/KokkosSoftmax_SlicedRows.hpp>

namespace KokkosSoftmax::impl {

template <class Problem>
inline constexpr bool has_transform_v = !std::is_same_v<typename Problem::Transform, BoundIdentity>;

/// Whether rows stay as they are, with a transform or without. (Outputs of float show that products are
/// coarse.)
template <class Problem>
inline constexpr bool stays_packed =
    sizeof(typename Problem::In) == 2 && std::is_same_v<typename Problem::Acc, float> &&
    (!has_transform_v<Problem> ||
     (is_16_bit_v<typename Problem::Out> && keeps_rows_packed<typename Problem::Transform>));

/// Whether these are multiplied.
template <class Problem>
inline constexpr bool multiplies_packed =
    stays_packed<Problem>&& PartsOfChain<typename Problem::Transform>::factors +
        PartsOfChain<typename Problem::Transform>::temperatures !=
    0;

/// Whether a transform makes logits of all values before anything else is done with them.
template <class Problem>
inline constexpr bool makes_logits = has_transform_v<Problem> && !stays_packed<Problem>;

/// A factor of rows, and a temperature: what they make of a value, the same in one instruction that is good
/// enough for small products (most_coarse), and the number whose sign and size say whether they keep order.
struct FactorOfRow {
  float number;
  __device__ explicit FactorOfRow(float factor) : number(factor) {}
  __device__ float operator()(float value) const { return rounded_product(value, number); }
  __device__ float coarse(float value) const { return (*this)(value); }
  /// What a factor that is 0, or not finite, does to a value.
  __device__ static float turn(float factor) { return factor; }
};
struct TemperatureOfRow {
  float number;
  __device__ explicit TemperatureOfRow(float temperature) : number(temperature) {}
  __device__ float operator()(float value) const { return SharedDivisor<float>(number).quotient(value); }
  __device__ float coarse(float value) const { return rounded_product(value, rcp_approx_ftz(number)); }
  __device__ static float turn(float temperature) { return 1.0f / temperature; }
};

/// What the values of a row that stays_packed are multiplied by, if they are: a number above 0, which leaves
/// them in their order. Of others the values are to be turned(): then their size is left.
template <class Transform, bool multiplies>
struct RowScale {
  static constexpr bool reads_number = false;
};
template <class Transform>
struct RowScale<Transform, true> {
  using Number = std::conditional_t<PartsOfChain<Transform>::factors != 0, FactorOfRow, TemperatureOfRow>;
  Number number = Number(1.0f);
  float turns = 1;

  RowScale() = default;
  template <class Row>
  __device__ explicit RowScale(const Row& row) : RowScale(number_of(row)) {}
  __device__ explicit RowScale(float of_row) {
    const bool in_order = of_row > 0 && of_row <= largest_v<float>,
               has_size = of_row != 0 && fabsf(of_row) <= largest_v<float>;
    turns = in_order ? 1.0f : has_size ? -1.0f : Number::turn(of_row);
    number = Number(has_size ? fabsf(of_row) : 1.0f);
  }
  /// That of a row's object. Of temperatures it is in memory.
  static constexpr bool reads_number = PartsOfChain<Transform>::factors == 0;
  template <class Row>
  __device__ static float number_of(const Row& row) {
    const auto product = without_mask_and_ends<Transform>(row);
    if constexpr (reads_number) {
      return *product.temperature;
    } else {
      return static_cast<float>(product.f->factor);
    }
  }

  /// Whether values are to be turned first: these are 0, infinite or NaN then, or negated; -inf stays.
  __device__ bool turns_values() const { return turns != 1; }
  __device__ float turned(float value) const { return value == -infinity_v<float> ? value : value * turns; }

  __device__ float operator()(float value) const { return number(value); }
  __device__ float coarse(float value) const { return number.coarse(value); }
  /// Whether products with this maximum are coarse.
  __device__ bool is_coarse(float max) const {
    return __builtin_expect(is_positive_and_has_room(number.number) && fabsf(max) < most_coarse, 1);
  }
  /// The maximum of products from that of the values.
  __device__ float of_maximum(float max) const {
    const float product = coarse(max);
    return is_coarse(product) ? product : number(max);
  }
};

/// use(k) for the first `count` of so many columns. Where all are there, without a predicate for each.
template <int columns, class Use>
__device__ __forceinline__ void for_columns(int count, const Use& use) {
  if (count == columns) {
#pragma unroll
    for (int k = 0; k < columns; ++k) use(k);
  } else {
#pragma unroll
    for (int k = 0; k < columns; ++k) {
      if (k < count) use(k);
    }
  }
}

/// The first `count` of so many columns of two rows side by side, wherever these begin in memory: at_once(k,
/// at) where both lie on a boundary of pairs, else one_by_one(k, at). Not `both` are there: one by one.
template <int columns, class T, class AtOnce, class OneByOne>
__device__ __forceinline__ void for_pairs_anywhere(const T* at, index_type distance, int count, bool both,
                                                   const AtOnce& at_once, const OneByOne& one_by_one) {
  const bool on_boundary = reinterpret_cast<std::uintptr_t>(at) % (2 * sizeof(T)) == 0;
  const auto each = [&](const auto& use) {
    for_columns<columns>(count, [&](int k) {
      use(k, at);
      at += distance;
    });
  };
  // (Of two columns an odd distance apart one begins on a boundary.)
  if (both && distance % 2 != 0) {
    const auto every_other = [&](auto odd) {
      each([&](int k, const T* of_column) {
        k % 2 == odd.value ? at_once(k, of_column) : one_by_one(k, of_column);
      });
    };
    if (on_boundary) {
      every_other(std::integral_constant<int, 0>{});
    } else {
      every_other(std::integral_constant<int, 1>{});
    }
  } else if (both && on_boundary) {
    each(at_once);
  } else {
    each(one_by_one);
  }
}

struct NoneDropped {
  static constexpr bool any = false;
};

/// Of the rows of a thread, one or two neighbours, what a transform that stays_packed is to drop in so many
/// columns. A mask may be loaded before the rows are: both are on their way then, and one takes the other's
/// registers.
template <class Transform, int rows, int columns>
class DroppedOfRows {
  using Parts = PartsOfChain<Transform>;
  static constexpr bool has_masks = Parts::masks != 0;

 public:
  static constexpr bool any = has_masks || Parts::ends != 0;

  /// Of rows' objects, in `count` columns from one on, so far apart.
  template <int distance, class Row>
  __device__ void load(const Row (&row)[rows], index_type first_column, int count) {
    if constexpr (has_masks) {
#pragma unroll
      for (unsigned& bytes : bytes_) bytes = 0;
      with_masks<distance>(row, first_column, count, [&](int k, unsigned bytes) { bytes_[k] = bytes; });
    }
  }

  /// -inf in place of what is dropped. `loaded`: the mask is.
  template <int distance, class In, bool loaded, class Row, class Held>
  __device__ void drop(const Row (&row)[rows], index_type first_column, int count,
                       Held (&held)[columns]) const {
    if constexpr (has_masks) {
      const auto drop_by = [&](int k, unsigned bytes) {
        if constexpr (rows == 2) {
          held[k] = MaskBytes::applied_as_numbers<In>(held[k], bytes);
        } else if (bytes == 0) {
          held[k] = -infinity_v<float>;
        }
      };
      if constexpr (loaded) {
#pragma unroll
        for (int k = 0; k < columns; ++k) drop_by(k, bytes_[k]);
      } else {
        with_masks<distance>(row, first_column, count, drop_by);
      }
    }
    if constexpr (Parts::ends != 0) {
      const auto first = end_of_row(row[0], first_column), last = end_of_row(row[rows - 1], first_column);
#pragma unroll
      for (int k = 0; k < columns; ++k) {
        const index_type column = first_column + k * distance;
        if constexpr (rows == 2) {
          held[k] = PackedPair<In>::kept(held[k], first.keeps(column), last.keeps(column));
        } else if (!first.keeps(column)) {
          held[k] = -infinity_v<float>;
        }
      }
    }
  }

 private:
  /// use(k, bytes): of each column the row's byte of the mask, or those of two as numbers.
  template <int distance, class Row, class Use>
  __device__ static void with_masks(const Row (&row)[rows], index_type first_column, int count,
                                    const Use& use) {
    const auto first = mask_of_row<Transform>(row[0]), last = mask_of_row<Transform>(row[rows - 1]);
    const auto byte = [](const bool* at) -> unsigned { return *reinterpret_cast<const unsigned char*>(at); };
    const bool* const at = &first.mask(first_column);
    if constexpr (rows == 2) {
      // (Side by side in memory, as rows of x are.)
      if (&last.mask(first_column) == at + 1) {
        for_pairs_anywhere<columns>(
            at, &first.mask(first_column + distance) - at, count, true,
            [&](int k, const bool* of_column) {
              use(k, MaskBytes::as_numbers(*reinterpret_cast<const unsigned short*>(of_column)));
            },
            [&](int k, const bool* of_column) {
              use(k, MaskBytes::as_numbers(byte(of_column), byte(of_column + 1)));
            });
        return;
      }
    }
    for_columns<columns>(count, [&](int k) {
      const index_type column = first_column + k * distance;
      const unsigned of_first = byte(&first.mask(column));
      use(k, rows == 2 ? MaskBytes::as_numbers(of_first, byte(&last.mask(column))) : of_first);
    });
  }
  unsigned bytes_[has_masks ? columns : 1];  ///< the mask's, of each column

  template <class Row>
  __device__ static auto end_of_row(const Row& row, index_type first_column) {
    return prepared_stage<float>(row_without<BoundMask<bool>, BoundScale, BoundTemperature<float>>(
                                     std::type_identity<Transform>{}, row),
                                 first_column);
  }
};

}  // namespace KokkosSoftmax::impl

#endif
