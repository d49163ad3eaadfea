// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The scalar types: 16-bit storage types, the accumulator of each pair of types, conversions, and the
/// lists that instantiation, tests and benchmarks iterate. A further type is a line in each list.

#ifndef KOKKOSSOFTMAX_SCALARS_HPP
#define KOKKOSSOFTMAX_SCALARS_HPP

#include <Kokkos_Core.hpp>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace KokkosSoftmax {

/// Counts rows and columns, and offsets in elements; 64 bits wide on every backend.
using index_type = std::int64_t;

namespace impl {

/// Of a that is not negative.
KOKKOS_FORCEINLINE_FUNCTION constexpr index_type ceil_div(index_type a, index_type b) {
  return (a + b - 1) / b;
}

template <class To, class From>
KOKKOS_FORCEINLINE_FUNCTION To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  // Not Kokkos::bit_cast: Kokkos' own half_t is not trivially copyable on every backend.
  memcpy(static_cast<void*>(&to), static_cast<const void*>(&from), sizeof(To));
  return to;
}

/// IEEE 754 binary16 from float: to nearest, ties to even, subnormals too; NaN stays NaN. Free of branches,
/// so that a loop over it vectorises.
KOKKOS_FORCEINLINE_FUNCTION std::uint16_t half_bits_from_float(float value) {
  const std::uint32_t all = bits_as<std::uint32_t>(value);
  const std::uint32_t sign = (all >> 16) & 0x8000u;
  const std::uint32_t magnitude = all & 0x7fffffffu;
  // Below 2^-14 the sum with 0.5 puts the unit of the subnormals at the last bit of the sum, which rounds it.
  const std::uint32_t subnormal = bits_as<std::uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u;
  const std::uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  std::uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x47800000u ? 0x7c00u : result;
  result = magnitude > 0x7f800000u ? (0x7e00u | ((magnitude >> 13) & 0x3ffu)) : result;
  return static_cast<std::uint16_t>(sign | result);
}

KOKKOS_FORCEINLINE_FUNCTION float float_from_half_bits(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16;
  const std::uint32_t magnitude = half & 0x7fffu;
  // Exponent and mantissa moved in place, then 2^112 corrects the bias, for subnormals too.
  const float finite = bits_as<float>(magnitude << 13) * 5.192296858534828e33f;
  const std::uint32_t special = 0x7f800000u | (magnitude << 13);
  const std::uint32_t result = magnitude >= 0x7c00u ? special : bits_as<std::uint32_t>(finite);
  return bits_as<float>(sign | result);
}

/// bfloat16 from float: to nearest, ties to even; NaN stays NaN.
KOKKOS_FORCEINLINE_FUNCTION std::uint16_t bfloat16_bits_from_float(float value) {
  const std::uint32_t all = bits_as<std::uint32_t>(value);
  const std::uint32_t rounded = (all + 0x7fffu + ((all >> 16) & 1u)) >> 16;
  const std::uint32_t quiet = (all >> 16) | 0x40u;
  return static_cast<std::uint16_t>((all & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

KOKKOS_FORCEINLINE_FUNCTION float float_from_bfloat16_bits(std::uint16_t bfloat16) {
  return bits_as<float>(static_cast<std::uint32_t>(bfloat16) << 16);
}

/// Rounds to odd, so that rounding the float once more to 16 bits gives what rounding the double at once
/// gives.
KOKKOS_FORCEINLINE_FUNCTION float float_rounded_to_odd(double value) {
  const float nearest = static_cast<float>(value);
  const double back = static_cast<double>(nearest);
  std::uint32_t bits = bits_as<std::uint32_t>(nearest);
  const bool inexact = back != value && value == value;
  const bool away = (value < 0 ? -back : back) > (value < 0 ? -value : value);
  bits -= inexact && away ? 1u
                          : 0u;  // one step towards zero; an overflow to infinity steps to the largest finite
  return bits_as<float>(bits | (inexact ? 1u : 0u));
}

/// The 16-bit storage types of builds in which Kokkos has none of its own (there its half_t is an alias of
/// float).
template <bool is_bfloat16>
class Storage16 {
 public:
  Storage16() = default;
  KOKKOS_FORCEINLINE_FUNCTION Storage16(float value)
      : bits_(is_bfloat16 ? bfloat16_bits_from_float(value) : half_bits_from_float(value)) {}
  KOKKOS_FORCEINLINE_FUNCTION Storage16(double value) : Storage16(float_rounded_to_odd(value)) {}
  template <class Integer>
  requires std::is_integral_v<Integer> KOKKOS_FORCEINLINE_FUNCTION Storage16(Integer value)
      : Storage16(static_cast<double>(value)) {}

  KOKKOS_FORCEINLINE_FUNCTION explicit operator float() const {
    return is_bfloat16 ? float_from_bfloat16_bits(bits_) : float_from_half_bits(bits_);
  }
  KOKKOS_FORCEINLINE_FUNCTION explicit operator double() const { return static_cast<float>(*this); }

  friend KOKKOS_FORCEINLINE_FUNCTION bool operator==(Storage16 a, Storage16 b) {
    return static_cast<float>(a) == static_cast<float>(b);
  }
  friend KOKKOS_FORCEINLINE_FUNCTION bool operator<(Storage16 a, Storage16 b) {
    return static_cast<float>(a) < static_cast<float>(b);
  }

 private:
  std::uint16_t bits_;
};

using KokkosHalf = Kokkos::Experimental::half_t;
using KokkosBhalf = Kokkos::Experimental::bhalf_t;

}  // namespace impl

/// IEEE 754 binary16 and bfloat16. They are Kokkos' half_t and bhalf_t where those have 16 bits; elsewhere
/// (builds for the host alone; bfloat16 under HIP) Kokkos makes them aliases of float, and these are storage
/// types of the library's own with the same bits. They convert from float and double implicitly and back by
/// static_cast, rounding to nearest even and keeping NaN and infinities.
using half_t = std::conditional_t<sizeof(impl::KokkosHalf) == 2, impl::KokkosHalf, impl::Storage16<false>>;
using bhalf_t = std::conditional_t<sizeof(impl::KokkosBhalf) == 2, impl::KokkosBhalf, impl::Storage16<true>>;

}  // namespace KokkosSoftmax

/// Every scalar, with its name.
#define KOKKOSSOFTMAX_FOR_EACH_SCALAR(M) \
  M(float, "float")                      \
  M(double, "double")                    \
  M(KokkosSoftmax::half_t, "half")       \
  M(KokkosSoftmax::bhalf_t, "bfloat16")

/// The pairs (input, output) whose kernels without a user's functor are compiled into the library. Any other
/// pair works too and is compiled where it is used. The build reads these lines: one pair a line.
#define KOKKOSSOFTMAX_FOR_EACH_SCALAR_PAIR(M)       \
  M(float, float)                                   \
  M(double, double)                                 \
  M(KokkosSoftmax::half_t, KokkosSoftmax::half_t)   \
  M(KokkosSoftmax::bhalf_t, KokkosSoftmax::bhalf_t) \
  M(KokkosSoftmax::half_t, float)                   \
  M(KokkosSoftmax::bhalf_t, float)

namespace KokkosSoftmax {

template <class T>
inline constexpr bool is_scalar_v = false;
#define KOKKOSSOFTMAX_DEFINE(T, name) \
  template <>                         \
  inline constexpr bool is_scalar_v<T> = true;
KOKKOSSOFTMAX_FOR_EACH_SCALAR(KOKKOSSOFTMAX_DEFINE)
#undef KOKKOSSOFTMAX_DEFINE

template <class T>
constexpr const char* scalar_name() {
#define KOKKOSSOFTMAX_DEFINE(S, name) \
  if (std::is_same_v<T, S>) return name;
  KOKKOSSOFTMAX_FOR_EACH_SCALAR(KOKKOSSOFTMAX_DEFINE)
#undef KOKKOSSOFTMAX_DEFINE
  return "unknown";
}

/// What sums are formed in: double when the input or the output is double, float otherwise.
template <class In, class Out = In>
using accumulator_t =
    std::conditional_t<std::is_same_v<In, double> || std::is_same_v<Out, double>, double, float>;

namespace impl {

template <class T>
inline constexpr bool is_16_bit_v = std::is_same_v<T, half_t> || std::is_same_v<T, bhalf_t>;

/// A stored scalar as accumulator; exact.
template <class Acc, class T>
KOKKOS_FORCEINLINE_FUNCTION Acc load_as(const T& value) {
  if constexpr (is_16_bit_v<T>) {
    // On the host the conversion by bits vectorises; on a device the backend's own is one instruction.
    KOKKOS_IF_ON_HOST(
        (const std::uint16_t bits = bits_as<std::uint16_t>(value);
         return std::is_same_v<T, bhalf_t> ? float_from_bfloat16_bits(bits) : float_from_half_bits(bits);))
    KOKKOS_IF_ON_DEVICE((return static_cast<float>(value);))
  } else {
    return static_cast<Acc>(value);
  }
}

#if defined(__CUDACC__)
/// The two scalars of 16 bits in a word.
template <class T>
__device__ inline float low_of_pair(std::uint32_t pair) {
  if constexpr (std::is_same_v<T, bhalf_t>) return __uint_as_float(pair << 16);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(pair)));
}
template <class T>
__device__ inline float high_of_pair(std::uint32_t pair) {
  if constexpr (std::is_same_v<T, bhalf_t>) return __uint_as_float(pair & 0xffff0000u);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16)));
}
#endif

/// An accumulator rounded once to a stored scalar.
template <class T, class Acc>
KOKKOS_FORCEINLINE_FUNCTION T store_as(Acc value) {
  if constexpr (is_16_bit_v<T>) {
    float narrow;
    if constexpr (std::is_same_v<Acc, double>) {
      narrow = float_rounded_to_odd(value);
    } else {
      narrow = value;
    }
    KOKKOS_IF_ON_HOST((const std::uint16_t bits = std::is_same_v<T, bhalf_t>
                                                      ? bfloat16_bits_from_float(narrow)
                                                      : half_bits_from_float(narrow);
                       return bits_as<T>(bits);))
    KOKKOS_IF_ON_DEVICE((return T(narrow);))
  } else {
    return static_cast<T>(value);
  }
}

/// a * b, rounded before whatever comes next. A compiler that fuses a product with the sum of the next stage
/// does so here and there, as loops and branches fall, and a chain would not have the same bits everywhere.
template <class Acc>
KOKKOS_FORCEINLINE_FUNCTION Acc rounded_product(Acc a, Acc b) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Acc) == 4) {
    return __fmul_rn(a, b);
  } else {
    return __dmul_rn(a, b);
  }
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return std::fma(a, b, -Acc(0));
#else
  return a * b;
#endif
}

template <class Acc>
inline constexpr Acc infinity_v = std::numeric_limits<Acc>::infinity();
template <class Acc>
inline constexpr Acc nan_v = std::numeric_limits<Acc>::quiet_NaN();
template <class Acc>
inline constexpr Acc largest_v = std::numeric_limits<Acc>::max();

}  // namespace impl
}  // namespace KokkosSoftmax

#endif
