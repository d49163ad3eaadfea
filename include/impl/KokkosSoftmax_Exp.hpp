// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The exponential of a difference to a maximum, for each accumulator.

#ifndef KOKKOSSOFTMAX_EXP_HPP
#define KOKKOSSOFTMAX_EXP_HPP

#include <impl/KokkosSoftmax_Scalars.hpp>

namespace KokkosSoftmax::impl {

/// exp(x) for x <= 0, 0 below the logarithm of the smallest normal, and for what a difference to a finite
/// maximum can be besides: -inf (0), +inf (+inf), NaN (NaN), and a little over 0 where a logit was rounded
/// otherwise the second time. Branch-free arithmetic, so that a loop over it vectorises: reduction by n ln 2
/// with n = round(x / ln 2) in two parts, a polynomial for (exp(r) - 1 - r) / r^2 on |r| <= ln(2) / 2
/// (interpolated at Chebyshev nodes; relative error 1.0e-8 in float's, 1.7e-17 in double's degree), times
/// 2^n.
KOKKOS_FORCEINLINE_FUNCTION float exp_by_polynomial(float x) {
  constexpr float round = 12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
  const float clamped = x < -87.5f ? -87.5f : x;
  const float shifted = clamped * 1.44269504088896340736f + round;
  const float n = shifted - round;
  const float r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.3926213466332443e-3f;
  p = p * r + 8.3632029715758550e-3f;
  p = p * r + 4.1666554437685939e-2f;
  p = p * r + 1.6666576845976e-1f;
  p = p * r + 0.5f;
  p = (p * r) * r + r + 1.0f;
  const float power = bits_as<float>((bits_as<std::uint32_t>(shifted) << 23) + 0x3f800000u);
  const float result = x < -87.33654475f ? 0.0f : p * power;
  return x > 88.0f ? infinity_v<float> : result;
}

/// The polynomial for doubles: (exp(r) - 1 - r) / r^2. Of a double, or of several.
template <class Doubles>
KOKKOS_FORCEINLINE_FUNCTION Doubles exp_quotient(const Doubles& r) {
  Doubles p = r * 2.5100424157005066788e-8 + 2.7620138719733995569e-7;
  p = p * r + 2.7557268378684192873e-6;
  p = p * r + 2.4801521190217727651e-5;
  p = p * r + 1.9841269863105968749e-4;
  p = p * r + 1.3888888917281793308e-3;
  p = p * r + 8.3333333333300513464e-3;
  p = p * r + 4.1666666666623991516e-2;
  p = p * r + 1.6666666666666667456e-1;
  return p * r + 0.5;
}

KOKKOS_FORCEINLINE_FUNCTION double exp_by_polynomial(double x) {
  constexpr double round = 6755399441055744.0;  // 1.5 * 2^52
  const double clamped = x < -709.0 ? -709.0 : x;
  const double shifted = clamped * 1.4426950408889634074 + round;
  const double n = shifted - round;
  const double r = (clamped - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
  const double p = (exp_quotient(r) * r) * r + r + 1.0;
  const double power = bits_as<double>((bits_as<std::uint64_t>(shifted) << 52) + 0x3ff0000000000000u);
  const double result = x < -708.3964185322641 ? 0.0 : p * power;
  return x > 709.0 ? infinity_v<double> : result;
}

/// exp(x) of a difference to the maximum of a row: see exp_by_polynomial for the domain.
template <class Acc>
KOKKOS_FORCEINLINE_FUNCTION Acc exp_of_difference(Acc x) {
  KOKKOS_IF_ON_HOST((return exp_by_polynomial(x);))
  KOKKOS_IF_ON_DEVICE((return Kokkos::exp(x);))
}

// ---------------------------------------------------------------------------------------------------------
// The same on a host's vectors. Ops is SimdOps (impl/host/KokkosSoftmax_Simd.hpp): this file knows no
// vectors.

template <class Acc>
struct VectorExp;

/// ln 2 in two parts, the higher one with trailing zeros, so that n * high is exact without fma too; the
/// polynomial for exp(r) on |r| <= ln(2) / 2, with a constant term of 1, so that exp(0) is 1 exactly: minimax
/// in units in the last place of the result (Lawson's iteration; float's coefficients then moved by single
/// units until the whole function, roundings included, was best: 1.91 over all floats). Multiplications and
/// fmas are what limits a softmax in cache, hence no degree more than two units in the last place need.
template <>
struct VectorExp<float> {
  static constexpr float shift =
      12582912.0f;                       ///< 1.5 * 2^23: adding it leaves the rounded integer in the low bits
  static constexpr float bias = 127.0f;  ///< of the exponent
  static constexpr float reciprocal = 1.44269504088896340736f;
  static constexpr float high = 0.693359375f, low = -2.12194440e-4f;
  static constexpr float smallest = -87.33654475f;  ///< the logarithm of the smallest normal
  static constexpr float overflows = 89.0f;         ///< exp of this, and of what is more, to infinity
  template <class Ops, class Vector>
  [[gnu::always_inline]] static Vector polynomial(const Vector& r) {
    Vector p = Ops::fma(Vector(0x1.0edb36p-7f), r, Vector(0x1.573eb2p-5f));
    p = Ops::fma(p, r, Vector(0x1.555d1cp-3f));
    p = Ops::fma(p, r, Vector(0x1.fffdbap-2f));
    p = Ops::fma(p, r, Vector(0x1.ffffeep-1f));
    return Ops::fma(p, r, Vector(1.0f));
  }
};

template <>
struct VectorExp<double> {
  static constexpr double shift = 6755399441055744.0;  ///< 1.5 * 2^52
  static constexpr double bias = 1023.0;
  static constexpr double reciprocal = 1.4426950408889634074;
  static constexpr double high = 0.693147180369123816490, low = 1.90821492927058770002e-10;
  static constexpr double smallest = -708.3964185322641;
  static constexpr double overflows = 710.0;
  template <class Ops, class Vector>
  [[gnu::always_inline]] static Vector polynomial(const Vector& r) {
    Vector p = Ops::fma(Vector(2.4331986250171380281e-8), r, Vector(2.7632395245541136652e-7));
    p = Ops::fma(p, r, Vector(2.7559811531911123464e-6));
    p = Ops::fma(p, r, Vector(2.4801486986132028303e-5));
    p = Ops::fma(p, r, Vector(1.9841266799591440396e-4));
    p = Ops::fma(p, r, Vector(1.388888894960080502e-3));
    p = Ops::fma(p, r, Vector(8.333333334947892835e-3));
    p = Ops::fma(p, r, Vector(4.1666666666507273825e-2));
    p = Ops::fma(p, r, Vector(0.16666666666663163484));
    p = Ops::fma(p, r, Vector(0.500000000000001336));
    p = Ops::fma(p, r, Vector(1.0000000000000002154));
    return Ops::fma(p, r, Vector(1.0));
  }

  // By sixteenths: n = round(16 x / ln 2), the powers 2^(n / 16) from registers, and |r| <= ln(2) / 32 needs
  // five degrees less.
  static constexpr double sixteenth = 1.0 / 16;
  static constexpr double nearest = 0.69314718055994530942, rest = 2.3190468138462996e-17;  ///< of ln 2
  static constexpr double flushed = -709.0895657128241;  ///< -1023 ln 2, whose power of two is taken as 0
  /// exp(r) - 1, interpolated at Chebyshev nodes of the quotient by r; 1.4e-17 of exp(r).
  template <class Ops, class Vector>
  [[gnu::always_inline]] static Vector polynomial_of_sixteenth(const Vector& r) {
    Vector p = Ops::fma(Vector(1.3889063440690236e-3), r, Vector(8.333472974979158e-3));
    p = Ops::fma(p, r, Vector(4.1666666663595475e-2));
    p = Ops::fma(p, r, Vector(0.16666666664209706));
    p = Ops::fma(p, r, Vector(0.5000000000000001));
    p = Ops::fma(p, r, Vector(1.0000000000000007));
    return p * r;
  }
};

/// exp(x) = 2^n exp(r): n = round(x / ln 2), and exp(r).
template <class Ops>
struct ReducedExp {
  using Constants = VectorExp<typename Ops::Acc>;
  using Vector = typename Ops::Vector;
  Vector n, of_rest;

  /// `offset`: what `shifted`, the sum whose low bits hold the integer, shall hold besides.
  [[gnu::always_inline]] ReducedExp(const Vector& x, typename Ops::Acc offset, Vector& shifted) {
    const Vector shift(Constants::shift + offset);
    shifted = Ops::fma(x, Vector(Constants::reciprocal), shift);
    n = shifted - shift;
    const Vector r = Ops::fma(n, Vector(-Constants::low), Ops::fma(n, Vector(-Constants::high), x));
    of_rest = Constants::template polynomial<Ops>(r);
  }
};

/// exp of each lane for x <= 0 (a little over does no harm) and NaN; NaN or +inf for +inf. Within two units
/// in the last place; 0 below the logarithm of the smallest normal (doubles: some may be subnormal). To form
/// what is subnormal, or rounds to 0, takes Intel's processors a hundred times as long.
template <class Ops>
[[gnu::always_inline]] inline typename Ops::Vector exp_of_vector_difference(const typename Ops::Vector& x) {
  using Acc = typename Ops::Acc;
  using Vector = typename Ops::Vector;
  using Constants = VectorExp<Acc>;
  Vector shifted;
  if constexpr (Ops::width == 1) {
    // Where there are no vectors there may be no fma, without which the shorter polynomial is not good
    // enough.
    return Vector(exp_by_polynomial(static_cast<Acc>(x)));
  } else if constexpr (Ops::has_sixteenths_of_powers) {
    constexpr Acc part = Constants::sixteenth;
    const Vector shift(Constants::shift), clamped = Ops::larger(Vector(Constants::flushed), x);
    shifted = Ops::fma(clamped, Vector(Constants::reciprocal / part), shift);
    const Vector n = shifted - shift;
    const Vector r = Ops::fma(n, Vector(-Constants::rest * part),
                              Ops::fma(n, Vector(-Constants::nearest * part), clamped));
    const Vector power = Ops::sixteenth_of_power_of_two(shifted);
    return Ops::fma(Constants::template polynomial_of_sixteenth<Ops>(r), power, power);
  } else if constexpr (Ops::scales_by_powers_of_two) {
    const ReducedExp<Ops> e(x, Acc(0), shifted);
    return Ops::times_power_of_two(e.of_rest, e.n, x, Constants::smallest);
  } else {
    // With the bias in it, `shifted` is one integer shift away from 2^n.
    const ReducedExp<Ops> e(x, Constants::bias, shifted);
    return Ops::select(x < Vector(Constants::smallest), Vector(Acc(0)),
                       e.of_rest * Ops::power_of_two(shifted));
  }
}

/// exp of each lane for every x: +inf above the logarithm of the largest number, NaN for NaN.
template <class Ops>
[[gnu::always_inline]] inline typename Ops::Vector exp_of_vector(const typename Ops::Vector& x) {
  using Acc = typename Ops::Acc;
  using Vector = typename Ops::Vector;
  using Constants = VectorExp<Acc>;
  Vector shifted;
  const Vector clamped = Ops::smaller(Vector(Constants::overflows), x);
  if constexpr (Ops::width == 1) {
    return Vector(Kokkos::exp(static_cast<Acc>(x)));
  } else if constexpr (Ops::scales_by_powers_of_two) {
    const ReducedExp<Ops> e(clamped, Acc(0), shifted);
    return Ops::times_power_of_two(e.of_rest, e.n, x, Constants::smallest);
  } else {
    // Near the top 2^n overflows though the product does not: half of it for positive x, doubled at the end.
    const Vector half = Ops::select(Vector(Acc(0)) < x, Vector(Acc(1)), Vector(Acc(0)));
    const ReducedExp<Ops> e(clamped, Constants::bias, shifted);
    const Vector result = (e.of_rest * Ops::power_of_two(shifted - half)) * (Vector(Acc(1)) + half);
    return Ops::select(x < Vector(Constants::smallest), Vector(Acc(0)), result);
  }
}

// ---------------------------------------------------------------------------------------------------------
// The logarithm of a sum.

template <class Acc>
struct VectorLog;

/// log(1 + f) = 2 atanh(s) = f - f^2 / 2 + s (f^2 / 2 + s^2 r(s^2)), s = f / (2 + f), where little is rounded
/// of what is large (FreeBSD's msun adds up a logarithm so); r is the polynomial through 2 (atanh(s) / s - 1)
/// / s^2 at Chebyshev's points for |f| up to the root of 2 less 1. ln 2 is in two parts, the first short
/// enough for its product with an exponent to be exact.
template <>
struct VectorLog<float> {
  static constexpr float high = 0x1.62e4p-1f, low = 0x1.7f7d1cp-20f;
  static constexpr float r[] = {0x1.555556p-1f, 0x1.9999ecp-2f, 0x1.245c44p-2f, 0x1.ddced8p-3f};
};
template <>
struct VectorLog<double> {
  static constexpr double high = 0x1.62e42fefa38p-1, low = 0x1.ef35793c7673p-45;
  static constexpr double r[] = {0x1.5555555555558p-1, 0x1.99999999952e2p-2, 0x1.2492492df148dp-2,
                                 0x1.c71c62e5800a1p-3, 0x1.7462b4ab2ef6bp-3, 0x1.39fe606542ddep-3,
                                 0x1.2b584aae78a57p-3};
};

/// log of each lane's sum of exponentials, which is 0 or at least 1: `of_none` for 0, `of_infinite` for +inf,
/// NaN for NaN.
template <class Ops>
[[gnu::always_inline]] inline typename Ops::Vector log_of_vector_sum(const typename Ops::Vector& sum,
                                                                     typename Ops::Acc of_none,
                                                                     typename Ops::Acc of_infinite) {
  using Acc = typename Ops::Acc;
  using Vector = typename Ops::Vector;
  using Constants = VectorLog<Acc>;
  Vector log;
  if constexpr (Ops::splits) {
    Vector n;
    const Vector f = Ops::split(sum, n) - Vector(Acc(1));
    const Vector s = f / (Vector(Acc(2)) + f), z = s * s, half = f * f * Vector(Acc(0.5));
    constexpr int terms = sizeof(Constants::r) / sizeof(Acc);
    Vector p(Constants::r[terms - 1]);
    for (int i = terms - 2; i >= 0; --i) p = Ops::fma(p, z, Vector(Constants::r[i]));
    const Vector rest = Ops::fma(n, Vector(Constants::low), s * Ops::fma(p, z, half));
    log = Ops::fma(n, Vector(Constants::high), f - (half - rest));
    log = Ops::select(sum == sum, log, sum);
  } else {
    alignas(64) Acc lanes[Ops::width];
    Ops::store(lanes, sum);
    for (Acc& lane : lanes) lane = Kokkos::log(lane);
    log = Ops::load(lanes);
  }
  return Ops::select(sum == Vector(Acc(0)), Vector(of_none),
                     Ops::select(sum == Vector(infinity_v<Acc>), Vector(of_infinite), log));
}

/// RowResult's factor of a softmax.
template <class Ops>
[[gnu::always_inline]] inline typename Ops::Vector factor_of_vector_sum(const typename Ops::Vector& sum) {
  using Acc = typename Ops::Acc;
  using Vector = typename Ops::Vector;
  const Vector none(Acc(0)), factor = Vector(Acc(1)) / sum;
  return Ops::select(sum == none, none,
                     Ops::select(sum == Vector(infinity_v<Acc>), Vector(nan_v<Acc>), factor));
}

}  // namespace KokkosSoftmax::impl

#endif
