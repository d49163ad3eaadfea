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

/// Phi(-x) of the normal distribution for x >= 0: half of erfc(z), z = x / sqrt(2), as exp(-z^2) t P(1 - t)
/// with t = 1 / (1 + 0.3 z) (the form of C. Hastings, "Approximations for digital computers", 1955;
/// coefficients interpolated at Chebyshev nodes on 0 <= z <= 10, relative error 2.5e-8; beyond, exp(-z^2) is
/// 0).
KOKKOS_FORCEINLINE_FUNCTION float normal_tail(float x) {
  const float z = x * 0.70710678118654752440f;
  const float t = 1.0f / (1.0f + 0.3f * z), s = (0.3f * z) * t;
  float p = -0.130770877269f;
  p = p * s + 0.554232747591f;
  p = p * s - 0.744196332443f;
  p = p * s - 0.415054819867f;
  p = p * s + 2.88705096662f;
  p = p * s - 4.80924522668f;
  p = p * s + 4.58841595196f;
  p = p * s - 2.76125933129f;
  p = p * s + 1.0f;
  return 0.5f * t * p * exp_by_polynomial(-z * z);
}

/// max(x, 0) - |x| Phi(-|x|), Phi(-x) as 2 to the power of a polynomial: its logarithm is near a parabola.
/// Weighted minimax fit on 0 <= x <= 8; Phi(-x) is wrong by 4.4e-8 at most, most of that the rounding of the
/// exponent near -1; beyond 8 it is less than 1e-15. NaN stays NaN, and +inf +inf.
KOKKOS_FORCEINLINE_FUNCTION float gelu_by_log_of_tail(float x) {
  const float size = Kokkos::fmin(Kokkos::fabs(x), 8.0f);
  float p = -2.8196366201882483e-06f;
  p = p * size + 3.9222304621944204e-05f;
  p = p * size - 0.00018556149734649807f;
  p = p * size - 0.00013816777209285647f;
  p = p * size + 0.007064715959131718f;
  p = p * size - 0.05249687656760216f;
  p = p * size - 0.45920801162719727f;
  p = p * size - 1.1511051654815674f;
  p = p * size - 1.0f;
  return (x < 0 ? 0.0f : x) - size * Kokkos::exp2(p);
}

/// x Phi(x) with erf.
template <class Acc>
KOKKOS_FORCEINLINE_FUNCTION Acc gelu_by_erf_function(Acc x) {
  return Acc(0.5) * x * (Acc(1) + Kokkos::erf(x * Acc(0.70710678118654752440)));
}
KOKKOS_FORCEINLINE_FUNCTION float gelu_by_tail(float x) {
  const float tail = normal_tail(x < 0 ? -x : x);
  return x * (x < 0 ? tail : 1.0f - tail);
}
KOKKOS_FORCEINLINE_FUNCTION float gelu_by_erf(float x) {
  KOKKOS_IF_ON_HOST((return gelu_by_tail(x);))
  KOKKOS_IF_ON_DEVICE((return gelu_by_log_of_tail(x);))
}
KOKKOS_FORCEINLINE_FUNCTION double gelu_by_erf(double x) {
  return gelu_by_erf_function(x);
}

/// x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3). The same as x / (1 + exp(-2 u)), where
/// nothing cancels.
template <class Acc>
KOKKOS_FORCEINLINE_FUNCTION Acc gelu_by_logistic_function(Acc x) {
  const Acc twice_u = Acc(1.59576912160573071176) * (x + Acc(0.044715) * x * x * x);
  const Acc power = exp_of_difference(twice_u < 0 ? twice_u : -twice_u);
  return x * ((twice_u < 0 ? power : Acc(1)) / (Acc(1) + power));
}

/// As gelu_by_log_of_tail: max(x, 0) - |x| / (1 + exp(2 |u|)), the second factor as 2 to the power of a
/// polynomial. Fit on 0 <= x <= 6, wrong by 3.8e-8 at most; beyond 6 it is less than 2e-11.
KOKKOS_FORCEINLINE_FUNCTION float gelu_by_log_of_logistic(float x) {
  const float size = Kokkos::fmin(Kokkos::fabs(x), 6.0f);
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
  return (x < 0 ? 0.0f : x) - size * Kokkos::exp2(p);
}
KOKKOS_FORCEINLINE_FUNCTION float gelu_by_tanh(float x) {
  KOKKOS_IF_ON_HOST((return gelu_by_logistic_function(x);))
  KOKKOS_IF_ON_DEVICE((return gelu_by_log_of_logistic(x);))
}
KOKKOS_FORCEINLINE_FUNCTION double gelu_by_tanh(double x) {
  return gelu_by_logistic_function(x);
}

}  // namespace KokkosSoftmax::impl

#endif
