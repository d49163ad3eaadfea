// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Masks of bytes on rows of 16 bits that stay as they are in memory: what a mask drops becomes -inf there,
/// as whoever has the row finds it, and of the transform only the rest is left to apply; where that divides
/// by a temperature, perhaps coarsely.

#ifndef KOKKOSSOFTMAX_PACKEDMASK_HPP
#define KOKKOSSOFTMAX_PACKEDMASK_HPP

#include <KokkosSoftmax_Transforms.hpp>
#include <impl/cuda/KokkosSoftmax_Ptx.hpp>
#include <impl/cuda/KokkosSoftmax_RowMath.hpp>

namespace KokkosSoftmax::impl {

/// What a bound transform is made of: stages of each kind, its mask, if it has one, and what its row object
/// is without that.
template <class Bound>
struct PartsOfChain {
  static constexpr int factors = 0, temperatures = 0, ends = 0, masks = 0, others = 1;
};
template <>
struct PartsOfChain<BoundIdentity> {
  static constexpr int factors = 0, temperatures = 0, ends = 0, masks = 0, others = 0;
};
template <>
struct PartsOfChain<BoundScale> {
  static constexpr int factors = 1, temperatures = 0, ends = 0, masks = 0, others = 0;
};
template <>
struct PartsOfChain<BoundTemperature<float>> {
  static constexpr int factors = 0, temperatures = 1, ends = 0, masks = 0, others = 0;
};
template <>
struct PartsOfChain<BoundCausal> {
  static constexpr int factors = 0, temperatures = 0, ends = 1, masks = 0, others = 0;
};
template <>
struct PartsOfChain<BoundMask<bool>> {
  static constexpr int factors = 0, temperatures = 0, ends = 0, masks = 1, others = 0;
  KOKKOS_FORCEINLINE_FUNCTION static const LogitOperand<bool>& mask(const BoundMask<bool>& bound) {
    return bound.mask;
  }
};
template <class A, class B>
struct PartsOfChain<BoundChain<A, B>> {
  using OfA = PartsOfChain<A>;
  using OfB = PartsOfChain<B>;
  using Chain = BoundChain<A, B>;
  static constexpr int factors = OfA::factors + OfB::factors,
                       temperatures = OfA::temperatures + OfB::temperatures, ends = OfA::ends + OfB::ends,
                       masks = OfA::masks + OfB::masks, others = OfA::others + OfB::others;

  KOKKOS_FORCEINLINE_FUNCTION static const LogitOperand<bool>& mask(const Chain& bound) {
    if constexpr (OfA::masks != 0) {
      return OfA::mask(bound.a);
    } else {
      return OfB::mask(bound.b);
    }
  }
};

/// A row object of a bound transform, but for its stages of the types `Removed`. (Also one that is prepared,
/// or has its operands in another place.)
template <class... Removed, class Bound, class Row>
KOKKOS_FORCEINLINE_FUNCTION auto row_without(std::type_identity<Bound>, const Row& row) {
  if constexpr ((std::is_same_v<Bound, Removed> || ...)) {
    return BoundIdentity::Row{};
  } else {
    return row;
  }
}
template <class... Removed, class A, class B, class Row>
KOKKOS_FORCEINLINE_FUNCTION auto row_without(std::type_identity<BoundChain<A, B>>, const Row& row) {
  const auto a = row_without<Removed...>(std::type_identity<A>{}, row.a);
  const auto b = row_without<Removed...>(std::type_identity<B>{}, row.b);
  using RestOfA = std::remove_const_t<decltype(a)>;
  using RestOfB = std::remove_const_t<decltype(b)>;
  if constexpr (std::is_same_v<RestOfA, BoundIdentity::Row>) {
    return b;
  } else if constexpr (std::is_same_v<RestOfB, BoundIdentity::Row>) {
    return a;
  } else {
    return typename BoundChain<A, B>::template RowWith<RestOfA, RestOfB>{a, b};
  }
}
template <class Bound, class Row>
KOKKOS_FORCEINLINE_FUNCTION auto without_mask(const Row& row) {
  return row_without<BoundMask<bool>>(std::type_identity<Bound>{}, row);
}
/// But for what drops ends, which is nothing up to there.
template <class Bound, class Row>
KOKKOS_FORCEINLINE_FUNCTION auto without_ends(const Row& row) {
  return row_without<BoundCausal>(std::type_identity<Bound>{}, row);
}
/// But for both.
template <class Bound, class Row>
KOKKOS_FORCEINLINE_FUNCTION auto without_mask_and_ends(const Row& row) {
  return row_without<BoundMask<bool>, BoundCausal>(std::type_identity<Bound>{}, row);
}

/// The mask's part of such an object.
template <class Bound, class Row>
KOKKOS_FORCEINLINE_FUNCTION auto mask_of_row(const Row& row) {
  if constexpr (std::is_same_v<Bound, BoundMask<bool>>) {
    return row;
  } else {
    return [&]<class A, class B>(const BoundChain<A, B>*) {
      if constexpr (PartsOfChain<A>::masks != 0) {
        return mask_of_row<A>(row.a);
      } else {
        return mask_of_row<B>(row.b);
      }
    }(static_cast<const Bound*>(nullptr));
  }
}

/// Transforms that do the same to all logits of a row, but for those that they drop. (Not every chain of
/// these: one for which the C interface has no kernel of its own goes through that of all chains there, where
/// rows are not packed, and C++ shall give the same bits.)
template <class Bound>
inline constexpr bool keeps_rows_packed = [] {
  using Parts = PartsOfChain<Bound>;
  if (Parts::ends > 1 || Parts::masks > 1 || Parts::others > 0) return false;
  return Parts::temperatures == 0 ? Parts::factors <= 1
                                  : Parts::temperatures == 1 && Parts::factors + Parts::ends == 0;
}();

/// Whether a row's object has a way with fewer instructions that is good enough for outputs of 16 bits where
/// logits are small: a unit in the last place of 2^9 is 2^-14.
template <class Out, class Row>
inline constexpr bool may_be_coarse = is_16_bit_v<Out>&& requires(const Row& row) {
  row.coarse(0.0f);
};
inline constexpr float most_coarse = 0x1p9f;

/// The temperature's part of a prepared object.
template <class Bound, class Row>
KOKKOS_FORCEINLINE_FUNCTION const auto& temperature_of_row(const Row& row) {
  if constexpr (requires { row.coarse(0.0f); }) {
    return row;
  } else {
    return [&]<class A, class B>(const BoundChain<A, B>*) -> const auto& {
      if constexpr (PartsOfChain<A>::temperatures != 0) {
        return temperature_of_row<A>(row.a);
      } else {
        return temperature_of_row<B>(row.b);
      }
    }
    (static_cast<const Bound*>(nullptr));
  }
}

/// Whether such a transform has a mask.
template <class Bound>
inline constexpr bool has_packed_mask = keeps_rows_packed<Bound>&& PartsOfChain<Bound>::masks == 1;

/// Whether it has a mask among factors, temperatures and ends, and is more than a mask.
template <class Bound>
inline constexpr bool is_masked_product = [] {
  using Parts = PartsOfChain<Bound>;
  return Parts::masks == 1 && Parts::factors + Parts::temperatures > 0 && Parts::others == 0;
}();

/// Whether values stay what they are, but for what a mask drops.
template <class Bound>
inline constexpr bool only_masks = [] {
  using Parts = PartsOfChain<Bound>;
  return Parts::factors == 0 && Parts::temperatures == 0 && Parts::ends == 0 && Parts::others == 0;
}();

/// The bytes of a mask for the eight elements of a vector.
struct MaskBytes {
  static constexpr int width = 8;
  unsigned word[2];

  /// So many of them are in memory.
  __device__ static MaskBytes first_of(const bool* at, int in_memory) {
    MaskBytes bytes{{0, 0}};
#pragma unroll 1
    for (int i = 0; i < width && i < in_memory; ++i)
      bytes.word[i / 4] |= static_cast<unsigned>(reinterpret_cast<const unsigned char*>(at)[i]) << i % 4 * 8;
    return bytes;
  }
  /// From a boundary of 8 bytes on. (With a hint that it is not needed again, as x is read, rows of bfloat16
  /// with a mask as large lose 1 to 2 points of a copy on one H200: 257 columns 0.98 and 0.96, 2047 0.98 and
  /// 0.95.)
  __device__ static MaskBytes read(const bool* at) {
    const uint2 words = __ldg(reinterpret_cast<const uint2*>(at));
    return {{words.x, words.y}};
  }
  /// Those that begin `bytes` behind a's first one, less than 4.
  __device__ static MaskBytes shifted(unsigned a, unsigned b, unsigned c, int bytes) {
    return {{__funnelshift_r(a, b, 8 * bytes), __funnelshift_r(b, c, 8 * bytes)}};
  }

  /// A vector's four pairs, with -inf in place of what is dropped.
  template <class T>
  __device__ __forceinline__ void apply(unsigned* pair) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned kept = kept_in_first_bit(word[i]);
      pair[2 * i] = masked<T>(pair[2 * i], prmt(kept, 0, 0x9988));
      pair[2 * i + 1] = masked<T>(pair[2 * i + 1], prmt(kept, 0, 0xbbaa));
    }
  }
  /// The same of one pair and its two bytes.
  template <class T>
  __device__ static unsigned applied_to_pair(unsigned pair, const bool* at) {
    const unsigned bytes = *reinterpret_cast<const unsigned short*>(at);
    return masked<T>(pair, prmt(kept_in_first_bit(bytes), 0, 0x9988));
  }
  /// The same by its two bytes as_numbers of 16 bits, subnormal ones. (Two instructions less; but with this
  /// for applied_to_pair contiguous rows of bfloat16 in slices, 65536 columns with a mask as large as x, have
  /// 0.98 of a copy on one H200 where they have 0.99.)
  template <class T>
  __device__ static unsigned applied_as_numbers(unsigned pair, unsigned numbers) {
    return masked<T>(pair, __hne2_mask(bits_as<__half2>(numbers), bits_as<__half2>(0u)));
  }
  __device__ static unsigned as_numbers(unsigned bytes) {
    return prmt(bytes, 0, 0x4140);
  }
  __device__ static unsigned as_numbers(unsigned first, unsigned second) {
    return prmt(first, second, 0x5410);
  }
  template <class T>
  __device__ uint4 applied(const uint4& vector) const {
    unsigned pair[4] = {vector.x, vector.y, vector.z, vector.w};
    apply<T>(pair);
    return {pair[0], pair[1], pair[2], pair[3]};
  }

 private:
  /// Of each byte, whether it is not 0.
  __device__ static unsigned kept_in_first_bit(unsigned bytes) {
    return ((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes;
  }
  template <class T>
  __device__ static unsigned masked(unsigned pair, unsigned kept) {
    return (pair & kept) | (PackedPair<T>::minus_infinities & ~kept);
  }
};

/// Whether a row's object is that of a mask of bytes alone, from wherever these are.
template <class Row>
inline constexpr bool is_mask_of_bytes = false;
template <template <class> class RowWith, class Operand>
inline constexpr bool is_mask_of_bytes<RowWith<Operand>> =
    std::is_same_v<RowWith<Operand>, BoundMask<bool>::RowWith<Operand>>&& requires(const Operand& operand) {
  { operand.data } -> std::convertible_to<const bool*>;
};

}  // namespace KokkosSoftmax::impl

#endif
