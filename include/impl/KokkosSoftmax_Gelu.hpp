// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// GELU in both forms, without the mathematical library's erf: on the host without a call and without
/// branches, so that a loop over it vectorises, on devices in half the instructions; erf and tanh of the
/// library cost a head more than its GEMM may.

#ifndef KOKKOSSOFTMAX_GELU_HPP
#define KOKKOSSOFTMAX_GELU_HPP

#include <impl/KokkosSoftmax_Exp.hpp>

namespace KokkosSoftmax::impl {

/// 2^x for -126 <= x <= 0.
KOKKOS_FORCEINLINE_FUNCTION float power_of_two(float x) {
  KOKKOS_IF_ON_HOST((return exp_by_polynomial(x * 0.69314718055994530942f);))
#if defined(__CUDA_ARCH__)
  // CUDA's exp2f without what it does for subnormal results.
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#else
  KOKKOS_IF_ON_DEVICE((return Kokkos::exp2(x);))
#endif
}

/// The magnitude of x, at most `limit`; of NaN any.
KOKKOS_FORCEINLINE_FUNCTION float magnitude_up_to(float limit, float x) {
  KOKKOS_IF_ON_HOST((const float size = x < 0 ? -x : x; return size < limit ? size : limit;))
  KOKKOS_IF_ON_DEVICE((return Kokkos::fmin(Kokkos::fabs(x), limit);))
}

/// max(x, 0), NaN of NaN.
KOKKOS_FORCEINLINE_FUNCTION float positive_part(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float part;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(part) : "f"(x));
  return part;
#else
  return x < 0 ? 0.0f : x;
#endif
}

/// max(x, 0) - |x| Phi(-|x|), Phi(-x) as 2 to the power of a polynomial: its logarithm is near a parabola.
/// Weighted minimax fit on 0 <= x <= 8; Phi(-x) is wrong by 4.4e-8 at most, most of that the rounding of the
/// exponent near -1; beyond 8 it is less than 1e-15. NaN stays NaN, and +inf +inf.
KOKKOS_FORCEINLINE_FUNCTION float gelu_by_erf(float x) {
  const float size = magnitude_up_to(8.0f, x);
  float p = -2.8196366201882483e-06f;
  p = p * size + 3.9222304621944204e-05f;
  p = p * size - 0.00018556149734649807f;
  p = p * size - 0.00013816777209285647f;
  p = p * size + 0.007064715959131718f;
  p = p * size - 0.05249687656760216f;
  p = p * size - 0.45920801162719727f;
  p = p * size - 1.1511051654815674f;
  p = p * size - 1.0f;
  return positive_part(x) - size * power_of_two(p);
}

/// The same on a host's vectors of floats (Ops is SimdOps); Phi(-x) is wrong by 1.2e-7 at most, the error of
/// an exponential within two units in the last place.
template <class Ops>
requires std::is_same_v<typename Ops::Acc, float>
[[gnu::always_inline]] inline typename Ops::Vector gelu_by_erf_of_vector(const typename Ops::Vector& x) {
  using Vector = typename Ops::Vector;
  const Vector size = Ops::smaller(Vector(8.0f), Ops::larger(-x, x));
  Vector p = Ops::fma(Vector(-2.8196366201882483e-06f), size, Vector(3.9222304621944204e-05f));
  p = Ops::fma(p, size, Vector(-0.00018556149734649807f));
  p = Ops::fma(p, size, Vector(-0.00013816777209285647f));
  p = Ops::fma(p, size, Vector(0.007064715959131718f));
  p = Ops::fma(p, size, Vector(-0.05249687656760216f));
  p = Ops::fma(p, size, Vector(-0.45920801162719727f));
  p = Ops::fma(p, size, Vector(-1.1511051654815674f));
  p = Ops::fma(p, size, Vector(-1.0f));
  const Vector power = exp_of_vector_difference<Ops>(p * Vector(0.69314718055994530942f));
  return Ops::larger(Vector(0.0f), x) - size * power;
}

/// And of doubles: max(x, 0) - |x| exp(-t^2) f(t) / (2 (1 + 2 t)) with t = |x| / sqrt(2); f(t) =
/// (1 + 2 t) exp(t^2) erfc(t) is a polynomial in (t - 3.75) / (t + 3.75) (M. Shepherd and J. Laframboise,
/// "Chebyshev approximation of (1 + 2x) exp(x^2) erfc x", 1981; the coefficients were interpolated for
/// |x| <= 8.5, relative error 1.0e-16). Phi(-x) is wrong by 2e-16 at most; beyond 8.5 it is less than 1e-17.
template <class Ops>
requires std::is_same_v<typename Ops::Acc, double>
[[gnu::always_inline]] inline typename Ops::Vector gelu_by_erf_of_vector(const typename Ops::Vector& x) {
  using Vector = typename Ops::Vector;
  const Vector size = Ops::smaller(Vector(8.5), Ops::larger(-x, x));
  const Vector t = size * Vector(0.70710678118654752440);
  const Vector q = (t - Vector(3.75)) / (t + Vector(3.75));
  Vector p = Ops::fma(Vector(1.5691944545944687e-07), q, Vector(1.421989300398873e-06));
  p = Ops::fma(p, q, Vector(4.316857585775854e-06));
  p = Ops::fma(p, q, Vector(1.7266300210892375e-06));
  p = Ops::fma(p, q, Vector(-9.677215503452444e-06));
  p = Ops::fma(p, q, Vector(2.301822595545444e-05));
  p = Ops::fma(p, q, Vector(5.167746255847839e-05));
  p = Ops::fma(p, q, Vector(-0.0002902328366423835));
  p = Ops::fma(p, q, Vector(0.00029368397308327166));
  p = Ops::fma(p, q, Vector(0.001755625066902671));
  p = Ops::fma(p, q, Vector(-0.009746577680620419));
  p = Ops::fma(p, q, Vector(0.028362277741547332));
  p = Ops::fma(p, q, Vector(-0.05869339862826754));
  p = Ops::fma(p, q, Vector(0.09230432114813229));
  p = Ops::fma(p, q, Vector(-0.10880393014159366));
  p = Ops::fma(p, q, Vector(0.08227673849031195));
  p = Ops::fma(p, q, Vector(0.003585415485465685));
  p = Ops::fma(p, q, Vector(-0.14024059858554763));
  p = Ops::fma(p, q, Vector(1.2375126308378275));
  const Vector power = exp_of_vector_difference<Ops>(size * size * Vector(-0.5));
  return Ops::larger(Vector(0.0), x) - size * (power * (p / Ops::fma(Vector(4.0), t, Vector(2.0))));
}

/// x Phi(x) with erf.
KOKKOS_FORCEINLINE_FUNCTION double gelu_by_erf(double x) {
  return rounded_product(0.5 * x, 1 + Kokkos::erf(x * 0.70710678118654752440));
}

/// x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3). The same as x / (1 + exp(-2 u)), where
/// nothing cancels.
KOKKOS_FORCEINLINE_FUNCTION double gelu_by_tanh(double x) {
  const double twice_u = 1.59576912160573071176 * (x + 0.044715 * x * x * x);
  const double power = exp_of_difference(twice_u < 0 ? twice_u : -twice_u);
  return rounded_product(x, (twice_u < 0 ? power : 1.0) / (1.0 + power));
}

/// As gelu_by_erf: max(x, 0) - |x| / (1 + exp(2 |u|)), the second factor as 2 to the power of a
/// polynomial. Fit on 0 <= x <= 6, wrong by 3.8e-8 at most; beyond 6 it is less than 2e-11.
KOKKOS_FORCEINLINE_FUNCTION float gelu_by_tanh(float x) {
  const float size = magnitude_up_to(6.0f, x);
  float p = 2.274733787999139e-06f;
  p = p * size - 4.245820673531853e-05f;
  p = p * size + 0.0002989650529343635f;
  p = p * size - 0.0009051650995388627f;
  p = p * size + 0.0008607779163867235f;
  p = p * size - 0.001171886920928955f;
  p = p * size + 0.008265065960586071f;
  p = p * size - 0.051647018641233444f;
  p = p * size - 0.45919978618621826f;
  p = p * size - 1.151105284690857f;
  p = p * size - 1.0f;
  return positive_part(x) - size * power_of_two(p);
}

}  // namespace KokkosSoftmax::impl

#endif
