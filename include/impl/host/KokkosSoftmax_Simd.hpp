// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The host's SIMD vectors: Kokkos SIMD under one spelling (4.5 to 5.x), and the few operations on memory and
/// bits that it lacks, in the processor's own instructions where they help and in plain loops elsewhere.

#ifndef KOKKOSSOFTMAX_SIMD_HPP
#define KOKKOSSOFTMAX_SIMD_HPP

#include <impl/KokkosSoftmax_Scalars.hpp>

#include <Kokkos_SIMD.hpp>

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

// The intrinsics with a mask of ones (maskz): those without trip a warning of g++ about their undefined
// source.
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

/// Inlined always, and for the host alone.
#define KOKKOSSOFTMAX_HOST_FUNCTION [[gnu::always_inline]] inline

namespace KokkosSoftmax {
namespace impl {

/// Bytes of a vector: the widest that Kokkos SIMD has for the processor that Kokkos was built for; 0: none.
#if defined(KOKKOS_ARCH_AVX512XEON)
inline constexpr std::size_t simd_bytes = 64;
#elif defined(KOKKOS_ARCH_AVX2)
inline constexpr std::size_t simd_bytes = 32;
#elif defined(KOKKOS_ARCH_ARM_SVE)
inline constexpr std::size_t simd_bytes = __ARM_FEATURE_SVE_BITS / 8;
#elif defined(KOKKOS_ARCH_ARM_NEON)
inline constexpr std::size_t simd_bytes = 16;
#else
inline constexpr std::size_t simd_bytes = 0;
#endif

template <class T>
inline constexpr int simd_width = simd_bytes == 0 ? 1 : static_cast<int>(simd_bytes / sizeof(T));

// Not Kokkos' native simd: that is the one of the default execution space, a GPU perhaps.
#if defined(KOKKOS_ARCH_AVX512XEON)
template <int width>
using SimdAbi = Kokkos::Experimental::simd_abi::avx512_fixed_size<width>;
#elif defined(KOKKOS_ARCH_AVX2)
template <int width>
using SimdAbi = Kokkos::Experimental::simd_abi::avx2_fixed_size<width>;
#elif defined(KOKKOS_ARCH_ARM_SVE)
template <int width>
using SimdAbi = Kokkos::Experimental::simd_abi::sve_fixed_size<width>;
#elif defined(KOKKOS_ARCH_ARM_NEON)
template <int width>
using SimdAbi = Kokkos::Experimental::simd_abi::neon_fixed_size<width>;
#else
template <int>
using SimdAbi = Kokkos::Experimental::simd_abi::scalar;
#endif
#if KOKKOS_VERSION >= 40600
template <class T, int width>
using FixedSimd = Kokkos::Experimental::basic_simd<T, SimdAbi<width>>;
#else
template <class T, int width>
using FixedSimd = Kokkos::Experimental::simd<T, SimdAbi<width>>;
#endif

/// Before an intrinsic touches memory. g++'s AddressSanitizer sees those that are plain loads and stores in
/// its headers; not those with a mask nor those past the caches, which would leave the ends of rows
/// unwatched.
#if defined(__SANITIZE_ADDRESS__)
[[gnu::noinline]] inline void show_to_sanitizer(const void* p, std::size_t bytes) {
  void* bad = __asan_region_is_poisoned(const_cast<void*>(p), bytes);
  if (bad != nullptr) static_cast<void>(*static_cast<volatile char*>(bad));  // reported, as a read
}
#else
KOKKOSSOFTMAX_HOST_FUNCTION void show_to_sanitizer(const void*, std::size_t) {}
#endif

}  // namespace impl

/// A vector of the host's logits in the accumulator's type (float or double): Kokkos SIMD of the widest kind
/// for the processor that Kokkos was built for.
template <class Acc>
using simd = impl::FixedSimd<Acc, impl::simd_width<Acc>>;

namespace impl {

/// What the kernels do with vectors of Acc.
template <class Acc_>
struct SimdOps {
  using Acc = Acc_;
  using Vector = simd<Acc>;
  using Mask = typename Vector::mask_type;
  using Integer = std::conditional_t<sizeof(Acc) == 4, std::int32_t, std::int64_t>;
  using IntegerVector = FixedSimd<Integer, simd_width<Acc>>;
  static constexpr int width = simd_width<Acc>;
  static constexpr bool avx512 = simd_bytes == 64;
  static constexpr bool avx2 = simd_bytes == 32;

  // -------------------------------------------------------------------------------------------------------
  // Arithmetic.

  KOKKOSSOFTMAX_HOST_FUNCTION static Vector fma(const Vector& a, const Vector& b, const Vector& c) {
    if constexpr (width == 1) {
      return a * b + c;
    } else {
      return Kokkos::fma(a, b, c);
    }
  }

  /// The larger one; where one is NaN, `b`.
  KOKKOSSOFTMAX_HOST_FUNCTION static Vector larger(const Vector& a, const Vector& b) {
#if defined(__AVX512F__)
    if constexpr (avx512 && sizeof(Acc) == 4) {
      return Vector(_mm512_maskz_max_ps(0xffff, raw(a), raw(b)));
    } else if constexpr (avx512) {
      return Vector(_mm512_maskz_max_pd(0xff, raw(a), raw(b)));
    } else
#endif
#if defined(__AVX2__)
        if constexpr (avx2 && sizeof(Acc) == 4) {
      return Vector(_mm256_max_ps(raw(a), raw(b)));
    } else if constexpr (avx2) {
      return Vector(_mm256_max_pd(raw(a), raw(b)));
    } else
#endif
    {
      return select(a > b, a, b);
    }
  }

  /// The smaller one; where one is NaN, `b`.
  KOKKOSSOFTMAX_HOST_FUNCTION static Vector smaller(const Vector& a, const Vector& b) {
#if defined(__AVX512F__)
    if constexpr (avx512 && sizeof(Acc) == 4) {
      return Vector(_mm512_maskz_min_ps(0xffff, raw(a), raw(b)));
    } else if constexpr (avx512) {
      return Vector(_mm512_maskz_min_pd(0xff, raw(a), raw(b)));
    } else
#endif
#if defined(__AVX2__)
        if constexpr (avx2 && sizeof(Acc) == 4) {
      return Vector(_mm256_min_ps(raw(a), raw(b)));
    } else if constexpr (avx2) {
      return Vector(_mm256_min_pd(raw(a), raw(b)));
    } else
#endif
    {
      return select(a < b, a, b);
    }
  }

  KOKKOSSOFTMAX_HOST_FUNCTION static Vector select(const Mask& mask, const Vector& yes, const Vector& no) {
    if constexpr (width == 1) {
      return static_cast<bool>(mask) ? yes : no;
    } else if constexpr (requires { simd_select(mask, yes, no); }) {
      return simd_select(mask, yes, no);
    } else {
      return condition(mask, yes, no);
    }
  }

#if defined(__AVX512F__)
  /// v * 2^n for whole numbers n of any size, rounded once; 0 in lanes whose x is less than `least`, whatever
  /// v and n are there.
  static constexpr bool scales_by_powers_of_two = avx512;
  KOKKOSSOFTMAX_HOST_FUNCTION static Vector times_power_of_two(const Vector& v, const Vector& n,
                                                               const Vector& x, Acc least) {
    if constexpr (sizeof(Acc) == 4) {
      const __mmask16 lanes = _mm512_cmp_ps_mask(raw(x), _mm512_set1_ps(least), _CMP_NLT_UQ);
      return Vector(_mm512_maskz_scalef_ps(lanes, raw(v), raw(n)));
    } else {
      const __mmask8 lanes = _mm512_cmp_pd_mask(raw(x), _mm512_set1_pd(least), _CMP_NLT_UQ);
      return Vector(_mm512_maskz_scalef_pd(lanes, raw(v), raw(n)));
    }
  }

  /// Doubles: 2^(n / 16) from what adding 1.5 * 2^52 leaves in the low bits, for whole n up to 16 * 1023; 0
  /// for -16 * 1023.
  static constexpr bool has_sixteenths_of_powers = avx512 && sizeof(Acc) == 8;
  KOKKOSSOFTMAX_HOST_FUNCTION static Vector sixteenth_of_power_of_two(const Vector& shifted) {
    // The four bits that choose have their weight in the exponent taken off beforehand.
    alignas(64) static constexpr auto bits = [] {
      std::array<std::uint64_t, 16> table{};
      constexpr double powers[] = {1.0,
                                   0x1.0b5586cf9890fp+0,
                                   0x1.172b83c7d517bp+0,
                                   0x1.2387a6e756238p+0,
                                   0x1.306fe0a31b715p+0,
                                   0x1.3dea64c123422p+0,
                                   0x1.4bfdad5362a27p+0,
                                   0x1.5ab07dd485429p+0,
                                   0x1.6a09e667f3bcdp+0,
                                   0x1.7a11473eb0187p+0,
                                   0x1.8ace5422aa0dbp+0,
                                   0x1.9c49182a3f090p+0,
                                   0x1.ae89f995ad3adp+0,
                                   0x1.c199bdd85529cp+0,
                                   0x1.d5818dcfba487p+0,
                                   0x1.ea4afa2a490dap+0};
      for (std::uint64_t i = 0; i < 16; ++i) table[i] = std::bit_cast<std::uint64_t>(powers[i]) - (i << 48);
      return table;
    }();
    const __m512i n = std::bit_cast<__m512i>(shifted);
    const __m512i fraction = _mm512_maskz_permutex2var_epi64(0xff, _mm512_load_si512(bits.data()), n,
                                                             _mm512_load_si512(bits.data() + 8));
    return std::bit_cast<Vector>(
        _mm512_maskz_add_epi64(0xff, fraction, _mm512_maskz_slli_epi64(0xff, n, 48)));
  }
#else
  static constexpr bool scales_by_powers_of_two = false;
  static constexpr bool has_sixteenths_of_powers = false;
#endif

  /// 2^n from what adding 1.5 * 2^p + bias leaves in the low bits: see ReducedExp.
  KOKKOSSOFTMAX_HOST_FUNCTION static Vector power_of_two(const Vector& shifted) {
    constexpr int mantissa_bits = sizeof(Acc) == 4 ? 23 : 52;
    if constexpr (width == 1) {
      using Bits = std::make_unsigned_t<Integer>;
      return Vector(std::bit_cast<Acc>(std::bit_cast<Bits>(static_cast<Acc>(shifted)) << mantissa_bits));
    } else
#if defined(__AVX512F__)
        if constexpr (avx512 && sizeof(Acc) == 4) {
      const __m512i bits = std::bit_cast<__m512i>(shifted);
      return std::bit_cast<Vector>(_mm512_maskz_slli_epi32(0xffff, bits, mantissa_bits));
    } else if constexpr (avx512) {
      const __m512i bits = std::bit_cast<__m512i>(shifted);
      return std::bit_cast<Vector>(_mm512_maskz_slli_epi64(0xff, bits, mantissa_bits));
    } else
#endif
    {
      return std::bit_cast<Vector>(std::bit_cast<IntegerVector>(shifted) << mantissa_bits);
    }
  }

  KOKKOSSOFTMAX_HOST_FUNCTION static Vector sqrt(const Vector& v) {
    if constexpr (width == 1) {
      return Vector(std::sqrt(static_cast<Acc>(v)));
    } else
#if defined(__AVX512F__)
        if constexpr (avx512 && sizeof(Acc) == 4) {
      return Vector(_mm512_maskz_sqrt_ps(0xffff, raw(v)));
    } else if constexpr (avx512) {
      return Vector(_mm512_maskz_sqrt_pd(0xff, raw(v)));
    } else
#endif
    {
      return Kokkos::sqrt(v);
    }
  }

  /// Normal positive v = result * 2^exponent with a result between the roots of 1/2 and 2.
  static constexpr bool splits = simd_bytes == 64 || simd_bytes == 32;
  KOKKOSSOFTMAX_HOST_FUNCTION static Vector split([[maybe_unused]] const Vector& v,
                                                  [[maybe_unused]] Vector& exponent) {
    // What takes the bits of the root of 1/2 to those of 1; a number with n in the low bits of its mantissa.
    [[maybe_unused]] constexpr std::int64_t root = sizeof(Acc) == 4 ? 0x3f3504f3 : 0x3fe6a09e667f3bcd;
    [[maybe_unused]] constexpr std::int64_t to_one =
        (sizeof(Acc) == 4 ? 0x3f800000 : 0x3ff0000000000000) - root;
    [[maybe_unused]] constexpr std::int64_t shift = 0x4330000000000000;
#if defined(__AVX512F__)
    if constexpr (avx512 && sizeof(Acc) == 4) {
      const __m512i bits =
          _mm512_add_epi32(std::bit_cast<__m512i>(v), _mm512_set1_epi32(static_cast<int>(to_one)));
      const __m512i n = _mm512_sub_epi32(_mm512_maskz_srli_epi32(0xffff, bits, 23), _mm512_set1_epi32(0x7f));
      exponent = Vector(_mm512_maskz_cvtepi32_ps(0xffff, n));
      return std::bit_cast<Vector>(_mm512_add_epi32(_mm512_and_si512(bits, _mm512_set1_epi32(0x7fffff)),
                                                    _mm512_set1_epi32(static_cast<int>(root))));
    } else if constexpr (avx512) {
      const __m512i bits = _mm512_add_epi64(std::bit_cast<__m512i>(v), _mm512_set1_epi64(to_one));
      const __m512i n = _mm512_or_si512(_mm512_maskz_srli_epi64(0xff, bits, 52), _mm512_set1_epi64(shift));
      exponent = std::bit_cast<Vector>(n) - Vector(0x1p52 + 1023);
      return std::bit_cast<Vector>(_mm512_add_epi64(
          _mm512_and_si512(bits, _mm512_set1_epi64(0xfffffffffffff)), _mm512_set1_epi64(root)));
    }
#endif
#if defined(__AVX2__)
    if constexpr (avx2 && sizeof(Acc) == 4) {
      const __m256i bits =
          _mm256_add_epi32(std::bit_cast<__m256i>(v), _mm256_set1_epi32(static_cast<int>(to_one)));
      const __m256i n = _mm256_sub_epi32(_mm256_srli_epi32(bits, 23), _mm256_set1_epi32(0x7f));
      exponent = Vector(_mm256_cvtepi32_ps(n));
      return std::bit_cast<Vector>(_mm256_add_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fffff)),
                                                    _mm256_set1_epi32(static_cast<int>(root))));
    } else if constexpr (avx2) {
      const __m256i bits = _mm256_add_epi64(std::bit_cast<__m256i>(v), _mm256_set1_epi64x(to_one));
      const __m256i n = _mm256_or_si256(_mm256_srli_epi64(bits, 52), _mm256_set1_epi64x(shift));
      exponent = std::bit_cast<Vector>(n) - Vector(0x1p52 + 1023);
      return std::bit_cast<Vector>(_mm256_add_epi64(
          _mm256_and_si256(bits, _mm256_set1_epi64x(0xfffffffffffff)), _mm256_set1_epi64x(root)));
    }
#endif
    return v;
  }

  /// Lane by lane what `keeps(lane)` says.
  template <class Keeps>
  KOKKOSSOFTMAX_HOST_FUNCTION static Mask mask_of(const Keeps& keeps) {
    alignas(64) Acc lanes[width];
    for (int i = 0; i < width; ++i) lanes[i] = keeps(i) ? Acc(1) : Acc(0);
    return Vector(Acc(0)) < load(lanes);  // Kokkos 4.5.1 has > of double with its operands exchanged
  }
  /// True in the first `count` lanes (0 or less: in none).
  KOKKOSSOFTMAX_HOST_FUNCTION static Mask mask_of_first(index_type count) {
    alignas(64) static constexpr auto lane = [] {
      std::array<Acc, width> numbers{};
      for (int i = 0; i < width; ++i) numbers[static_cast<std::size_t>(i)] = static_cast<Acc>(i);
      return numbers;
    }();
    return load(lane.data()) < Vector(static_cast<Acc>(count < 0 ? 0 : count < width ? count : width));
  }
  /// True where a bool, one of neighbours in memory, is.
  KOKKOSSOFTMAX_HOST_FUNCTION static Mask mask_of_bools(const bool* p) {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
    if constexpr (avx512 && sizeof(Acc) == 4) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
      return Mask(_mm_test_epi8_mask(bytes, bytes));
    }
#endif
    return mask_of([&](int lane) { return p[lane]; });
  }
  /// The same of the first `count` lanes, without a byte behind them; false in the others.
  KOKKOSSOFTMAX_HOST_FUNCTION static Mask mask_of_bools(const bool* p, int count) {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
    if constexpr (avx512) {
      show_to_sanitizer(p, static_cast<std::size_t>(count));
      const auto mask = static_cast<__mmask16>((1u << count) - 1u);
      const __m128i bytes = _mm_maskz_loadu_epi8(mask, p);
      if constexpr (sizeof(Acc) == 4)
        return Mask(_mm_test_epi8_mask(bytes, bytes));
      else
        return Mask(static_cast<__mmask8>(_mm_test_epi8_mask(bytes, bytes)));
    }
#endif
    if (count == width) return mask_of_bools(p);
    return mask_of([&](int lane) { return lane < count && p[lane]; });
  }

  // -------------------------------------------------------------------------------------------------------
  // Over the lanes, in a fixed order.

  KOKKOSSOFTMAX_HOST_FUNCTION static Acc sum(const Vector& v) {
    return fold(v, Add{});
  }
  /// Of lanes none of which is NaN.
  KOKKOSSOFTMAX_HOST_FUNCTION static Acc max(const Vector& v) {
    return fold(v, Larger{});
  }

  /// The same for each of `count` vectors, at most `width`, whose place in the result is their number.
  KOKKOSSOFTMAX_HOST_FUNCTION static Vector sum_each(const Vector* v, int count) {
    return fold_each(v, count, Add{});
  }
  KOKKOSSOFTMAX_HOST_FUNCTION static Vector max_each(const Vector* v, int count) {
    return fold_each(v, count, Larger{});
  }

  /// State{max, sum, low} of two vectors of sums and one of what rounding took from them; no rounding counts.
  template <class State>
  KOKKOSSOFTMAX_HOST_FUNCTION static State compensated_sum(Acc max, const Vector& a, const Vector& b,
                                                           const Vector& low) {
    if constexpr (sizeof(Acc) == 4) {
      alignas(64) float lanes[2 * width];
      store(lanes, a);
      store(lanes + width, b);
      double wide[width];
      for (int i = 0; i < width; ++i)
        wide[i] = static_cast<double>(lanes[i]) + static_cast<double>(lanes[width + i]);
      for (int n = width / 2; n > 0; n /= 2) {
        for (int i = 0; i < n; ++i) wide[i] += wide[i + n];
      }
      const float total = static_cast<float>(wide[0]);
      return {max, total, static_cast<float>(wide[0] - total) + sum(low)};
    } else {
      State state{max, Acc(0), sum(low)};
      alignas(64) Acc lanes[2 * width];
      store(lanes, a);
      store(lanes + width, b);
      for (const Acc lane : lanes) state.add(lane);
      return state;
    }
  }

  /// The same for several rows at once: what one row leaves to be added up, and its sums, rounded, for
  /// `count` of them, at most `width`.
  static constexpr bool compensates_several = avx512 && sizeof(Acc) == 4;
  using Wide = FixedSimd<double, avx512 ? 8 : simd_width<double>>;
#if defined(__AVX512F__)
  KOKKOSSOFTMAX_HOST_FUNCTION static Wide widened_sum(const Vector& a, const Vector& b) {
    const auto half = [](const Vector& v, auto which) __attribute__((always_inline)) {
      const __m512d pairs = _mm512_castps_pd(raw(v));
      return _mm512_maskz_cvtps_pd(
          0xff, _mm256_castpd_ps(_mm512_maskz_extractf64x4_pd(0xf, pairs, decltype(which)::value)));
    };
    const std::integral_constant<int, 0> low;
    const std::integral_constant<int, 1> high;
    return Wide(_mm512_add_pd(_mm512_add_pd(half(a, low), half(b, low)),
                              _mm512_add_pd(half(a, high), half(b, high))));
  }
  KOKKOSSOFTMAX_HOST_FUNCTION static Vector compensated_sums(const Wide* wide, const Vector* low, int count) {
    using Doubles = SimdOps<double>;
    alignas(64) double sums[width];
    for (int i = 0; i < width; i += 8) {
      if (i < count) Doubles::store(sums + i, Doubles::sum_each(wide + i, count - i < 8 ? count - i : 8));
    }
    alignas(64) float totals[width] = {}, rests[width] = {};
    for (int i = 0; i < count; ++i) {
      totals[i] = static_cast<float>(sums[i]);
      rests[i] = static_cast<float>(sums[i] - totals[i]);
    }
    // Where a sum is infinite or NaN, the rest is NaN: the sum speaks for itself.
    const Vector total = load(totals), rounded = total + (load(rests) + sum_each(low, count));
    return select(rounded == rounded, rounded, total);
  }
#endif

  // -------------------------------------------------------------------------------------------------------
  // Memory, with conversion: exact in, rounded once out.

  template <class T>
  KOKKOSSOFTMAX_HOST_FUNCTION static Vector load(const T* p) {
    if constexpr (std::is_same_v<T, Acc>) {
#if KOKKOS_VERSION >= 50000
      return Kokkos::Experimental::simd_unchecked_load<Vector>(p, Kokkos::Experimental::simd_flag_default);
#else
      Vector v;
      v.copy_from(p, Kokkos::Experimental::simd_flag_default);
      return v;
#endif
    } else {
#if defined(__AVX512F__)
      if constexpr (avx512 && std::is_same_v<T, bhalf_t> && sizeof(Acc) == 4) {
        return Vector(from_bfloat16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
      } else if constexpr (avx512 && std::is_same_v<T, half_t> && sizeof(Acc) == 4) {
        return Vector(_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
      } else
#endif
#if defined(__AVX2__) && defined(__F16C__)
          if constexpr (avx2 && std::is_same_v<T, bhalf_t> && sizeof(Acc) == 4) {
        const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return Vector(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)));
      } else if constexpr (avx2 && std::is_same_v<T, half_t> && sizeof(Acc) == 4) {
        return Vector(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
      } else
#endif
      {
        alignas(64) Acc lanes[width];
        for (int i = 0; i < width; ++i) lanes[i] = load_as<Acc>(p[i]);
        return load(lanes);
      }
    }
  }

  /// Elements at a distance; 0: the same one in all lanes. Of any type that converts to Acc.
  template <class T>
  KOKKOSSOFTMAX_HOST_FUNCTION static Vector load_strided(const T* p, index_type stride) {
    if (stride == 0) return Vector(load_as<Acc>(*p));
    if constexpr (is_scalar_v<T>) {
      if (stride == 1) return load(p);
    }
    alignas(64) Acc lanes[width];
    for (int i = 0; i < width; ++i) lanes[i] = load_as<Acc>(p[i * stride]);
    return load(lanes);
  }

  /// Where AVX-512 reads and writes the lanes of a mask alone.
  template <class T>
  static constexpr bool masks_parts_of = avx512 &&
                                         (std::is_same_v<T, Acc> || (is_16_bit_v<T> && sizeof(Acc) == 4));

  /// The first `count` (1 to width - 1) elements; the other lanes are `rest`.
  template <class T>
  KOKKOSSOFTMAX_HOST_FUNCTION static Vector load_part(const T* p, int count, Acc rest) {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
    if constexpr (masks_parts_of<T>) {
      show_to_sanitizer(p, static_cast<std::size_t>(count) * sizeof(T));
      const auto mask = static_cast<std::uint32_t>((1u << count) - 1u);
      if constexpr (std::is_same_v<T, float>) {
        return Vector(_mm512_mask_loadu_ps(_mm512_set1_ps(rest), static_cast<__mmask16>(mask), p));
      } else if constexpr (std::is_same_v<T, double>) {
        return Vector(_mm512_mask_loadu_pd(_mm512_set1_pd(rest), static_cast<__mmask8>(mask), p));
      } else {
        const __m256i bits = _mm256_maskz_loadu_epi16(static_cast<__mmask16>(mask), p);
        const __m512 wide =
            std::is_same_v<T, half_t> ? _mm512_maskz_cvtph_ps(0xffff, bits) : from_bfloat16(bits);
        return Vector(_mm512_mask_blend_ps(static_cast<__mmask16>(mask), _mm512_set1_ps(rest), wide));
      }
    } else
#endif
    {
      alignas(64) Acc lanes[width];
      for (int i = 0; i < width; ++i) lanes[i] = rest;
      for (int i = 0; i < count; ++i) lanes[i] = load_as<Acc>(p[i]);
      return load(lanes);
    }
  }

  /// The lanes of `mask` from `p`, the others from theirs behind `q`. All may be read.
  template <class T>
  KOKKOSSOFTMAX_HOST_FUNCTION static Vector load_both(const T* p, const T* q, const Mask& mask) {
#if defined(__AVX512F__)
    if constexpr (avx512 && std::is_same_v<T, Acc> && sizeof(Acc) == 4) {
      return Vector(_mm512_mask_loadu_ps(raw(load(q)), static_cast<__mmask16>(mask), p));
    } else if constexpr (avx512 && std::is_same_v<T, Acc>) {
      return Vector(_mm512_mask_loadu_pd(raw(load(q)), static_cast<__mmask8>(mask), p));
    } else
#endif
    {
      return select(mask, load(p), load(q));
    }
  }

  /// Lane i of the result is lane at[i].
  KOKKOSSOFTMAX_HOST_FUNCTION static Vector permuted(const Vector& v, const Integer* at) {
#if defined(__AVX512F__)
    if constexpr (avx512 && sizeof(Acc) == 4) {
      return Vector(_mm512_maskz_permutexvar_ps(0xffff, _mm512_loadu_si512(at), raw(v)));
    } else if constexpr (avx512) {
      return Vector(_mm512_maskz_permutexvar_pd(0xff, _mm512_loadu_si512(at), raw(v)));
    } else
#endif
#if defined(__AVX2__)
        if constexpr (avx2 && sizeof(Acc) == 4) {
      return Vector(
          _mm256_permutevar8x32_ps(raw(v), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))));
    } else
#endif
    {
      alignas(64) Acc from[width], to[width];
      store(from, v);
      for (int i = 0; i < width; ++i) to[i] = from[at[i]];
      return load(to);
    }
  }

  template <class T>
  KOKKOSSOFTMAX_HOST_FUNCTION static void store(T* p, const Vector& v) {
    if constexpr (std::is_same_v<T, Acc>) {
#if KOKKOS_VERSION >= 50000
      Kokkos::Experimental::simd_unchecked_store(v, p, Kokkos::Experimental::simd_flag_default);
#else
      v.copy_to(p, Kokkos::Experimental::simd_flag_default);
#endif
    } else {
#if defined(__AVX512F__)
      if constexpr (avx512 && is_16_bit_v<T> && sizeof(Acc) == 4) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_16_bits<T>(raw(v)));
      } else
#endif
#if defined(__AVX2__) && defined(__F16C__)
          if constexpr (avx2 && is_16_bit_v<T> && sizeof(Acc) == 4) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_16_bits<T>(raw(v)));
      } else
#endif
      {
        alignas(64) Acc lanes[width];
        store(lanes, v);
        for (int i = 0; i < width; ++i) p[i] = rounded<T>(lanes[i]);
      }
    }
  }

  /// One value, as store() rounds it: a row has the same bits wherever its outputs go one by one.
  template <class T>
  static T rounded(Acc value) {
#if defined(__AVX512BF16__)
    // The processor's conversion flushes subnormals to 0.
    if constexpr (avx512 && std::is_same_v<T, bhalf_t> && sizeof(Acc) == 4) {
      constexpr Acc smallest_normal = 0x1p-126f;
      if (Kokkos::fabs(value) < smallest_normal) value = Kokkos::copysign(Acc(0), value);
    }
#endif
    return store_as<T>(value);
  }

  /// The first `count` (1 to width - 1) lanes.
  template <class T>
  KOKKOSSOFTMAX_HOST_FUNCTION static void store_part(T* p, const Vector& v, int count) {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
    if constexpr (masks_parts_of<T>) {
      show_to_sanitizer(p, static_cast<std::size_t>(count) * sizeof(T));
      const auto mask = static_cast<std::uint32_t>((1u << count) - 1u);
      if constexpr (std::is_same_v<T, float>) {
        _mm512_mask_storeu_ps(p, static_cast<__mmask16>(mask), raw(v));
      } else if constexpr (std::is_same_v<T, double>) {
        _mm512_mask_storeu_pd(p, static_cast<__mmask8>(mask), raw(v));
      } else {
        _mm256_mask_storeu_epi16(p, static_cast<__mmask16>(mask), to_16_bits<T>(raw(v)));
      }
    } else
#endif
    {
      alignas(64) Acc lanes[width];
      store(lanes, v);
      for (int i = 0; i < count; ++i) p[i] = rounded<T>(lanes[i]);
    }
  }

  /// Past the caches where the processor can; `p` is aligned to the bytes that are stored.
  template <class T>
  KOKKOSSOFTMAX_HOST_FUNCTION static void stream(T* p, const Vector& v) {
    show_to_sanitizer(p, width * sizeof(T));
#if defined(__AVX512F__)
    if constexpr (avx512 && std::is_same_v<T, Acc> && sizeof(T) == 4) {
      return _mm512_stream_ps(p, raw(v));
    } else if constexpr (avx512 && std::is_same_v<T, Acc>) {
      return _mm512_stream_pd(p, raw(v));
    } else if constexpr (avx512 && is_16_bit_v<T> && sizeof(Acc) == 4) {
      return _mm256_stream_si256(reinterpret_cast<__m256i*>(p), to_16_bits<T>(raw(v)));
    }
#endif
#if defined(__AVX2__) && defined(__F16C__)
    if constexpr (avx2 && std::is_same_v<T, Acc> && sizeof(T) == 4) {
      return _mm256_stream_ps(p, raw(v));
    } else if constexpr (avx2 && std::is_same_v<T, Acc>) {
      return _mm256_stream_pd(p, raw(v));
    } else if constexpr (avx2 && is_16_bit_v<T> && sizeof(Acc) == 4) {
      return _mm_stream_si128(reinterpret_cast<__m128i*>(p), to_16_bits<T>(raw(v)));
    }
#endif
    store(p, v);
  }
  /// Two neighbours. `p` is aligned to a cache line, or to what is stored if that is more.
  template <class T>
  KOKKOSSOFTMAX_HOST_FUNCTION static void stream(T* p, const Vector& v0, const Vector& v1) {
#if defined(__AVX512F__)
    if constexpr (avx512 && is_16_bit_v<T> && sizeof(Acc) == 4) {
      show_to_sanitizer(p, 2 * width * sizeof(T));
      const __m512i low = _mm512_castsi256_si512(to_16_bits<T>(raw(v0)));
      return _mm512_stream_si512(reinterpret_cast<__m512i*>(p),
                                 _mm512_maskz_inserti64x4(0xff, low, to_16_bits<T>(raw(v1)), 1));
    }
#endif
    stream(p, v0);
    stream(p + width, v1);
  }

  /// A cache line of any type, likewise.
  KOKKOSSOFTMAX_HOST_FUNCTION static void stream_line(void* to, const void* from) {
    show_to_sanitizer(to, 64);
#if defined(__AVX512F__)
    _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif defined(__AVX2__)
    for (int i = 0; i < 2; ++i)
      _mm256_stream_si256(static_cast<__m256i*>(to) + i,
                          _mm256_loadu_si256(static_cast<const __m256i*>(from) + i));
#else
    std::memcpy(to, from, 64);
#endif
  }

 private:
  /// The processor's own type of a vector.
  KOKKOSSOFTMAX_HOST_FUNCTION static auto raw(const Vector& v) {
#if defined(__AVX512F__)
    if constexpr (avx512 && sizeof(Acc) == 4) return std::bit_cast<__m512>(v);
    if constexpr (avx512 && sizeof(Acc) == 8) return std::bit_cast<__m512d>(v);
#endif
#if defined(__AVX2__)
    if constexpr (avx2 && sizeof(Acc) == 4) return std::bit_cast<__m256>(v);
    if constexpr (avx2 && sizeof(Acc) == 8) return std::bit_cast<__m256d>(v);
#endif
  }

  struct Add {
    KOKKOSSOFTMAX_HOST_FUNCTION Acc operator()(Acc a, Acc b) const { return a + b; }
#if defined(__AVX2__)
    KOKKOSSOFTMAX_HOST_FUNCTION __m256 operator()(__m256 a, __m256 b) const {
      return _mm256_add_ps(a, b);
    }
    KOKKOSSOFTMAX_HOST_FUNCTION __m128 operator()(__m128 a, __m128 b) const {
      return _mm_add_ps(a, b);
    }
    KOKKOSSOFTMAX_HOST_FUNCTION __m256d operator()(__m256d a, __m256d b) const {
      return _mm256_add_pd(a, b);
    }
    KOKKOSSOFTMAX_HOST_FUNCTION __m128d operator()(__m128d a, __m128d b) const {
      return _mm_add_pd(a, b);
    }
#endif
#if defined(__AVX512F__)
    KOKKOSSOFTMAX_HOST_FUNCTION __m512 operator()(__m512 a, __m512 b) const {
      return _mm512_maskz_add_ps(0xffff, a, b);
    }
    KOKKOSSOFTMAX_HOST_FUNCTION __m512d operator()(__m512d a, __m512d b) const {
      return _mm512_maskz_add_pd(0xff, a, b);
    }
#endif
  };
  struct Larger {
    KOKKOSSOFTMAX_HOST_FUNCTION Acc operator()(Acc a, Acc b) const { return a > b ? a : b; }
#if defined(__AVX2__)
    KOKKOSSOFTMAX_HOST_FUNCTION __m256 operator()(__m256 a, __m256 b) const {
      return _mm256_max_ps(a, b);
    }
    KOKKOSSOFTMAX_HOST_FUNCTION __m128 operator()(__m128 a, __m128 b) const {
      return _mm_max_ps(a, b);
    }
    KOKKOSSOFTMAX_HOST_FUNCTION __m256d operator()(__m256d a, __m256d b) const {
      return _mm256_max_pd(a, b);
    }
    KOKKOSSOFTMAX_HOST_FUNCTION __m128d operator()(__m128d a, __m128d b) const {
      return _mm_max_pd(a, b);
    }
#endif
#if defined(__AVX512F__)
    KOKKOSSOFTMAX_HOST_FUNCTION __m512 operator()(__m512 a, __m512 b) const {
      return _mm512_maskz_max_ps(0xffff, a, b);
    }
    KOKKOSSOFTMAX_HOST_FUNCTION __m512d operator()(__m512d a, __m512d b) const {
      return _mm512_maskz_max_pd(0xff, a, b);
    }
#endif
  };

  /// fold of each, all at once: each level takes the halves of two vectors into one, so that of `width`
  /// vectors only one is left, in as many operations as two or three folds take. The order of the pairs puts
  /// each result in its place.
  template <class Operation>
  KOKKOSSOFTMAX_HOST_FUNCTION static Vector fold_each(const Vector* v, int count,
                                                      const Operation& operation) {
#if defined(__AVX512F__)
    if constexpr (avx512)
      if (count > width / 4) {
        Vector all[width];
        for (int i = 0; i < width; ++i) all[i] = i < count ? v[i] : Vector(Acc(0));
        if constexpr (sizeof(Acc) == 4) {
          fold_pairs<4, 0x44, 0xee, true>(all, operation);
          fold_pairs<8, 0x88, 0xdd, true>(all, operation);
          fold_pairs<1, 0x44, 0xee, false>(all, operation);
          fold_pairs<2, 0x88, 0xdd, false>(all, operation);
        } else {
          fold_pairs<2, 0x44, 0xee, true>(all, operation);
          fold_pairs<4, 0x88, 0xdd, true>(all, operation);
          fold_pairs<1, 0x00, 0xff, false>(all, operation);
        }
        return all[0];
      }
#endif
    alignas(64) Acc lanes[width] = {};
    for (int i = 0; i < count; ++i) lanes[i] = fold(v[i], operation);
    return load(lanes);
  }
#if defined(__AVX512F__)
  /// Vectors whose numbers differ in one bit go to the lower one; those that earlier levels emptied take part
  /// in nothing that is looked at.
  template <int bit, int low, int high, bool of_quarters, class Operation>
  KOKKOSSOFTMAX_HOST_FUNCTION static void fold_pairs(Vector* v, const Operation& operation) {
    for (int i = 0; i < width; ++i) {
      if ((i & bit) != 0) continue;
      const auto a = raw(v[i]), b = raw(v[i + bit]);
      if constexpr (sizeof(Acc) == 4 && of_quarters) {
        v[i] = Vector(operation(_mm512_maskz_shuffle_f32x4(0xffff, a, b, low),
                                _mm512_maskz_shuffle_f32x4(0xffff, a, b, high)));
      } else if constexpr (sizeof(Acc) == 4) {
        v[i] = Vector(operation(_mm512_maskz_shuffle_ps(0xffff, a, b, low),
                                _mm512_maskz_shuffle_ps(0xffff, a, b, high)));
      } else if constexpr (of_quarters) {
        v[i] = Vector(operation(_mm512_maskz_shuffle_f64x2(0xff, a, b, low),
                                _mm512_maskz_shuffle_f64x2(0xff, a, b, high)));
      } else {
        v[i] = Vector(
            operation(_mm512_maskz_shuffle_pd(0xff, a, b, low), _mm512_maskz_shuffle_pd(0xff, a, b, high)));
      }
    }
  }
#endif

  /// Halves upon halves.
  template <class Operation>
  KOKKOSSOFTMAX_HOST_FUNCTION static Acc fold(const Vector& v, const Operation& operation) {
#if defined(__AVX2__)
    if constexpr (avx512 || avx2) return fold_raw(raw(v), operation);
#endif
    alignas(64) Acc lanes[width];
    store(lanes, v);
    for (int half = width / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) lanes[i] = operation(lanes[i], lanes[i + half]);
    return lanes[0];
  }
#if defined(__AVX2__)
  template <class Operation>
  KOKKOSSOFTMAX_HOST_FUNCTION static float fold_raw(__m256 v, const Operation& operation) {
    const __m128 four = operation(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = operation(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(operation(two, _mm_movehdup_ps(two)));
  }
  template <class Operation>
  KOKKOSSOFTMAX_HOST_FUNCTION static double fold_raw(__m256d v, const Operation& operation) {
    const __m128d two = operation(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(operation(two, _mm_unpackhi_pd(two, two)));
  }
#endif
#if defined(__AVX512F__)
  template <class Operation>
  KOKKOSSOFTMAX_HOST_FUNCTION static float fold_raw(__m512 v, const Operation& operation) {
    const __m512d pairs = _mm512_castps_pd(v);
    const __m256 low = _mm256_castpd_ps(_mm512_maskz_extractf64x4_pd(0xf, pairs, 0));
    const __m256 high = _mm256_castpd_ps(_mm512_maskz_extractf64x4_pd(0xf, pairs, 1));
    return fold_raw(operation(low, high), operation);
  }
  template <class Operation>
  KOKKOSSOFTMAX_HOST_FUNCTION static double fold_raw(__m512d v, const Operation& operation) {
    const __m256d low = _mm512_maskz_extractf64x4_pd(0xf, v, 0),
                  high = _mm512_maskz_extractf64x4_pd(0xf, v, 1);
    return fold_raw(operation(low, high), operation);
  }
#endif

#if defined(__AVX512F__)
  KOKKOSSOFTMAX_HOST_FUNCTION static __m512 from_bfloat16(__m256i bits) {
    return _mm512_castsi512_ps(
        _mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, bits), 16));
  }

  template <class T>
  KOKKOSSOFTMAX_HOST_FUNCTION static __m256i to_16_bits(__m512 v) {
    if constexpr (std::is_same_v<T, half_t>) {
      return _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    } else {
#if defined(__AVX512BF16__)
      return std::bit_cast<__m256i>(_mm512_cvtneps_pbh(v));  // flushes subnormals to 0
#else
      const __m512i bits = _mm512_castps_si512(v);
      const __m512i odd = _mm512_and_si512(_mm512_maskz_srli_epi32(0xffff, bits, 16), _mm512_set1_epi32(1));
      const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
      const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
      const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
      return _mm512_maskz_cvtepi32_epi16(
          0xffff, _mm512_maskz_srli_epi32(0xffff, _mm512_mask_blend_epi32(nan, rounded, quiet), 16));
#endif
    }
  }
#endif
#if defined(__AVX2__) && defined(__F16C__)
  template <class T>
  KOKKOSSOFTMAX_HOST_FUNCTION static __m128i to_16_bits(__m256 v) {
    if constexpr (std::is_same_v<T, half_t>) {
      return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    } else {
      const __m256i bits = _mm256_castps_si256(v);
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
      const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
      const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
      const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
      const __m256i words = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
      const __m256i packed = _mm256_packus_epi32(words, words);
      return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
    }
  }
#endif
};

}  // namespace impl
}  // namespace KokkosSoftmax

#endif
