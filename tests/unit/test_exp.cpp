// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The exponentials that rows on the host are made of, on vectors and on scalars, against a wider type: every
// 641st float, or (labelled exhaustive) every one of the 2^32; doubles of every magnitude and at the edges.
#include <gtest/gtest.h>

#include <KokkosSoftmax.hpp>

#include <bit>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>

#include "../support/random.hpp"

namespace {

using namespace KokkosSoftmax::impl;

#if defined(KOKKOSSOFTMAX_TEST_ALL_SCALAR_PAIRS)
constexpr std::uint64_t step = 1;
#else
constexpr std::uint64_t step = 641;
#endif

/// The worst case that a thread saw.
struct Worst {
  double ulps = 0;
  double at = 0;
  std::int64_t wrong = 0;  ///< NaN, infinity or 0 where it must not be, or not where it must
  double wrong_at = 0;
};

/// Units in the last place of T at a normal value.
template <class T, class Wide>
Wide unit(Wide value) {
  return std::ldexp(Wide(1), std::ilogb(value) - (std::numeric_limits<T>::digits - 1));
}

/// `any`: for every x; else for x <= 0 and NaN.
template <class T, class Wide>
void check_one(T x, T got, Wide want, bool any, Worst& worst) {
  const auto fail = [&](bool bad) {
    if (!bad) return;
    ++worst.wrong;
    worst.wrong_at = static_cast<double>(x);
  };
  if (std::isnan(x)) return fail(!std::isnan(got));
  if (!any && x > 0) return;
  constexpr Wide smallest = std::numeric_limits<T>::min();
  constexpr Wide largest = std::numeric_limits<T>::max();
  if (want < smallest) return fail(!(got >= 0 && static_cast<Wide>(got) <= smallest));
  if (want > largest) {
    // Within two units of the largest number either is right.
    return fail(!std::isinf(got) && !(want <= largest + 2 * unit<T>(largest)));
  }
  if (!std::isfinite(got)) return fail(!(std::isinf(got) && want >= largest - 2 * unit<T>(largest)));
  const double ulps = static_cast<double>(std::abs(static_cast<Wide>(got) - want) / unit<T>(want));
  if (ulps > worst.ulps) {
    worst.ulps = ulps;
    worst.at = static_cast<double>(x);
  }
}

enum class Which { vector_any, vector_difference, scalar_difference };

template <Which which, class Acc>
void exponentials(const Acc* x, Acc* y) {
  using Ops = SimdOps<Acc>;
  if constexpr (which == Which::scalar_difference) {
    for (int i = 0; i < Ops::width; ++i) y[i] = exp_by_polynomial(x[i]);
  } else {
    Ops::store(y, which == Which::vector_any ? exp_of_vector<Ops>(Ops::load(x))
                                             : exp_of_vector_difference<Ops>(Ops::load(x)));
  }
}

template <Which which>
Worst sweep_floats() {
  using Ops = SimdOps<float>;
  const unsigned threads = std::max(1u, std::thread::hardware_concurrency());
  std::vector<Worst> of_thread(threads);
  std::vector<std::thread> running;
  for (unsigned t = 0; t < threads; ++t) {
    running.emplace_back([&, t] {
      float x[Ops::width], y[Ops::width];
      const std::uint64_t all = std::uint64_t(1) << 32, block = step * Ops::width;
      for (std::uint64_t first = t * block; first < all; first += threads * block) {
        for (int i = 0; i < Ops::width; ++i)
          x[i] =
              std::bit_cast<float>(static_cast<std::uint32_t>(first + static_cast<std::uint64_t>(i) * step));
        exponentials<which>(x, y);
        for (int i = 0; i < Ops::width; ++i)
          check_one(x[i], y[i], std::exp(static_cast<double>(x[i])), which == Which::vector_any,
                    of_thread[t]);
      }
    });
  }
  for (auto& thread : running) thread.join();
  Worst worst;
  for (const Worst& w : of_thread) {
    if (w.ulps > worst.ulps) worst.ulps = w.ulps, worst.at = w.at;
    if (w.wrong > 0) worst.wrong += w.wrong, worst.wrong_at = w.wrong_at;
  }
  return worst;
}

void expect_within(const Worst& worst, double ulps) {
  EXPECT_LE(worst.ulps, ulps) << "at " << worst.at;
  EXPECT_EQ(worst.wrong, 0) << "one of them at " << worst.wrong_at;
  EXPECT_GT(worst.ulps, 0) << "nothing was looked at";
}

TEST(Exp, FloatVectorsOfAnyNumber) {
  expect_within(sweep_floats<Which::vector_any>(), 2);
}
TEST(Exp, FloatVectorsOfDifferences) {
  expect_within(sweep_floats<Which::vector_difference>(), 2);
}
TEST(Exp, FloatDifferences) {
  expect_within(sweep_floats<Which::scalar_difference>(), 2);
}

template <Which which>
Worst sweep_doubles() {
  using Ops = SimdOps<double>;
  std::vector<double> values = {0.0, -0.0, std::nan(""), -infinity_v<double>, infinity_v<double>};
  for (double edge :
       {-708.3964185322641, -745.2, -746.0, 709.782712893384, 710.0, 0.5 * 0.6931471805599453}) {
    double below = edge, above = edge;
    for (int i = 0; i < 50; ++i) {
      values.push_back(below);
      values.push_back(above);
      below = std::nextafter(below, -1e300);
      above = std::nextafter(above, 1e300);
    }
  }
  tests::Random random(17);
  for (int i = 0; i < 2000000; ++i) values.push_back(random.uniform(-750, 750));
  for (int exponent = -1074; exponent < 1024; ++exponent) {
    values.push_back(std::ldexp(1.0 + random.uniform(0, 1), exponent));
    values.push_back(-values.back());
  }
  while (values.size() % Ops::width != 0) values.push_back(-1);
  Worst worst;
  double y[Ops::width];
  for (std::size_t i = 0; i < values.size(); i += Ops::width) {
    exponentials<which>(&values[i], y);
    for (std::size_t k = 0; k < Ops::width; ++k)
      check_one(values[i + k], y[k], std::exp(static_cast<long double>(values[i + k])),
                which == Which::vector_any, worst);
  }
  return worst;
}

TEST(Exp, DoubleVectorsOfAnyNumber) {
  expect_within(sweep_doubles<Which::vector_any>(), 2);
}
TEST(Exp, DoubleVectorsOfDifferences) {
  expect_within(sweep_doubles<Which::vector_difference>(), 2);
}
TEST(Exp, DoubleDifferences) {
  expect_within(sweep_doubles<Which::scalar_difference>(), 2);
}

// The polynomial alone, which CUDA has, too: two units in the last place would hide a wrong digit of it.
TEST(Exp, PolynomialForDoubles) {
  if (std::numeric_limits<long double>::digits < 64) GTEST_SKIP() << "there is no wider type";
  const double end = 0.5 * 0.6931471805599453;
  long double worst = 0;
  for (int i = -20000; i <= 20000; ++i) {
    const double r = end * i / 20000;
    const long double wide = r, got = 1 + wide + static_cast<long double>(exp_quotient(r)) * wide * wide;
    worst = std::max(worst, std::abs(got / std::exp(wide) - 1));
  }
  EXPECT_LE(worst, 5e-17L);
  EXPECT_GT(worst, 0);
}

// --- what GELU is made of ----------------------------------------------------------------------------------

// x Phi(x) on vectors and on scalars: the error in units of |x| 2^-24, that is of Phi(x)'s.
template <class Function>
void sweep_gelu(const Function& gelu, double most) {
  using Ops = SimdOps<float>;
  double worst = 0, worst_at = 0;
  float x[Ops::width], y[Ops::width];
  const std::uint64_t all = std::uint64_t(1) << 32, stride = step == 1 ? 7 : 6007;
  for (std::uint64_t first = 0; first < all; first += stride * Ops::width) {
    for (int i = 0; i < Ops::width; ++i)
      x[i] = std::bit_cast<float>(static_cast<std::uint32_t>(first + static_cast<std::uint64_t>(i) * stride));
    gelu(x, y);
    for (int i = 0; i < Ops::width; ++i) {
      if (std::isnan(x[i])) {
        ASSERT_TRUE(std::isnan(y[i]));
      } else if (std::isfinite(x[i]) && std::abs(x[i]) > 1e-30f) {
        const double wide = static_cast<double>(x[i]);
        const double want = 0.5 * wide * std::erfc(-wide * 0.70710678118654752440);
        const double error = std::abs(static_cast<double>(y[i]) - want) / std::abs(wide) * 0x1p24;
        if (!(error <= worst)) worst = error, worst_at = wide;
      }
    }
  }
  EXPECT_LE(worst, most) << "at " << worst_at;
  EXPECT_GT(worst, 0) << "nothing was looked at";
}

TEST(Gelu, FloatVectors) {
  using Ops = SimdOps<float>;
  sweep_gelu([](const float* x, float* y) { Ops::store(y, gelu_by_erf_of_vector<Ops>(Ops::load(x))); }, 2.5);
}
TEST(Gelu, Floats) {
  sweep_gelu(
      [](const float* x, float* y) {
        for (int i = 0; i < SimdOps<float>::width; ++i) y[i] = gelu_by_erf(x[i]);
      },
      2);
}
// The same in units of |x| 2^-53, at numbers of every magnitude.
TEST(Gelu, DoubleVectors) {
  using Ops = SimdOps<double>;
  tests::Random random(23);
  double worst = 0, worst_at = 0;
  for (int i = 0; i < (step == 1 ? 5000000 : 200000); ++i) {
    double x[Ops::width], y[Ops::width];
    for (int k = 0; k < Ops::width; ++k) {
      x[k] = k % 4 == 3 ? std::ldexp(random.uniform(-1, 1), -i % 60) : random.uniform(-10, 10);
    }
    Ops::store(y, gelu_by_erf_of_vector<Ops>(Ops::load(x)));
    for (int k = 0; k < Ops::width; ++k) {
      const long double wide = x[k];
      const long double want = 0.5L * wide * std::erfc(-wide * 0.70710678118654752440084436210485L);
      const double error =
          static_cast<double>(std::abs(static_cast<long double>(y[k]) - want) / std::abs(wide) * 0x1p53L);
      if (!(error <= worst)) worst = error, worst_at = x[k];
    }
  }
  EXPECT_LE(worst, 4) << "at " << worst_at;
  EXPECT_GT(worst, 0) << "nothing was looked at";
}

template <class Acc>
void check_gelu_of_special() {
  using Ops = SimdOps<Acc>;
  const auto of = [](Acc x) {
    Acc lanes[Ops::width];
    Ops::store(lanes, gelu_by_erf_of_vector<Ops>(typename Ops::Vector(x)));
    return lanes[0];
  };
  EXPECT_EQ(of(infinity_v<Acc>), infinity_v<Acc>);
  EXPECT_TRUE(std::isnan(of(std::numeric_limits<Acc>::quiet_NaN())));
  EXPECT_EQ(of(0), Acc(0));
}
TEST(Gelu, VectorsKeepInfinityAndNaN) {
  check_gelu_of_special<float>();
  check_gelu_of_special<double>();
}

// What a softmax leans on beyond accuracy.
template <class Acc>
void check_special() {
  using Ops = SimdOps<Acc>;
  const auto difference = [](Acc x) {
    Acc lanes[Ops::width];
    Ops::store(lanes, exp_of_vector_difference<Ops>(typename Ops::Vector(x)));
    return lanes[Ops::width - 1];
  };
  EXPECT_EQ(difference(0), Acc(1));
  EXPECT_EQ(difference(-infinity_v<Acc>), Acc(0));
  EXPECT_EQ(difference(-largest_v<Acc>), Acc(0));
  EXPECT_TRUE(std::isnan(difference(std::numeric_limits<Acc>::quiet_NaN())));
  EXPECT_FALSE(
      std::isfinite(difference(infinity_v<Acc>)));  // NaN or +inf: rows with +inf are told apart elsewhere
}
// Nor underflow, to 0 or less far, which some processors take a hundred times as long for.
TEST(Exp, FloatVectorsThatVanishAreNotFormed) {
  using Ops = SimdOps<float>;
  if (Ops::width == 1) GTEST_SKIP() << "no vectors";
  constexpr float smallest = -87.33654475f;
  for (const float x : {std::nextafter(smallest, -100.0f), -88.0f, -103.9f, -104.1f, -1000.0f, -1e30f,
                        -largest_v<float>, -infinity_v<float>}) {
    std::feclearexcept(FE_UNDERFLOW);
    volatile float argument = x;
    float of_difference[Ops::width], of_any[Ops::width];
    Ops::store(of_difference, exp_of_vector_difference<Ops>(typename Ops::Vector(argument)));
    Ops::store(of_any, exp_of_vector<Ops>(typename Ops::Vector(argument)));
    // AVX2 multiplies by a power of two of what bits there are, and selects afterwards.
    EXPECT_FALSE(Ops::scales_by_powers_of_two && std::fetestexcept(FE_UNDERFLOW) != 0) << x;
    for (int i = 0; i < Ops::width; ++i) {
      EXPECT_EQ(of_difference[i], 0.0f) << x;
      EXPECT_EQ(of_any[i], 0.0f) << x;
    }
  }
  // And the smallest normal is one.
  float least[Ops::width];
  Ops::store(least, exp_of_vector_difference<Ops>(typename Ops::Vector(smallest)));
  EXPECT_GE(least[0], std::numeric_limits<float>::min() * 0.999f);
}
TEST(Exp, SpecialFloats) {
  check_special<float>();
}
TEST(Exp, SpecialDoubles) {
  check_special<double>();
}

}  // namespace
