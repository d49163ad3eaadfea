// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The 16-bit types, exhaustively, against the reference's own conversions; the pair of (max, sum); the lists.
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

#include "../support/cases.hpp"

namespace {

using tests::bhalf_t;
using tests::half_t;
namespace ks = KokkosSoftmax;

static_assert(sizeof(half_t) == 2 && sizeof(bhalf_t) == 2);
static_assert(!std::is_same_v<half_t, bhalf_t>);
static_assert(std::is_same_v<ks::accumulator_t<float, float>, float>);
static_assert(std::is_same_v<ks::accumulator_t<half_t, bhalf_t>, float>);
static_assert(std::is_same_v<ks::accumulator_t<float, double>, double>);
static_assert(std::is_same_v<ks::accumulator_t<double, half_t>, double>);

template <class T>
std::uint16_t bits_of(T value) {
  std::uint16_t bits;
  std::memcpy(&bits, static_cast<const void*>(&value), sizeof bits);
  return bits;
}

template <class T>
T of_bits(std::uint16_t bits) {
  T value;
  std::memcpy(static_cast<void*>(&value), &bits, sizeof bits);
  return value;
}

template <class T>
std::uint16_t expected_bits(double value) {
  return std::is_same_v<T, half_t> ? reference::half_bits(value) : reference::bfloat16_bits(value);
}

template <class T>
double expected_value(std::uint16_t bits) {
  return std::is_same_v<T, half_t> ? reference::half_value(bits) : reference::bfloat16_value(bits);
}

template <class T>
class SixteenBits : public testing::Test {};
using SixteenBitTypes = testing::Types<half_t, bhalf_t>;
TYPED_TEST_SUITE(SixteenBits, SixteenBitTypes);

TYPED_TEST(SixteenBits, EveryPatternConvertsToFloatAndBack) {
  for (unsigned pattern = 0; pattern < 0x10000; ++pattern) {
    const auto bits = static_cast<std::uint16_t>(pattern);
    const double expected = expected_value<TypeParam>(bits);
    const float value = static_cast<float>(of_bits<TypeParam>(bits));
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << std::hex << pattern;
      ASSERT_TRUE(std::isnan(static_cast<float>(TypeParam(value)))) << std::hex << pattern;
      continue;
    }
    ASSERT_EQ(value, expected) << std::hex << pattern;
    ASSERT_EQ(std::signbit(value), std::signbit(expected)) << std::hex << pattern;
    ASSERT_EQ(bits_of(TypeParam(value)), bits) << std::hex << pattern;
  }
}

// The middle between two neighbours goes to the even one; a float to either side of it to the nearer.
TYPED_TEST(SixteenBits, RoundsToNearestEven) {
  const auto largest = expected_bits<TypeParam>(reference::infinity) - 1;
  for (int pattern = 0; pattern < largest; ++pattern) {
    const auto low = static_cast<std::uint16_t>(pattern);
    const auto high = static_cast<std::uint16_t>(pattern + 1);
    const auto middle =
        static_cast<float>((expected_value<TypeParam>(low) + expected_value<TypeParam>(high)) / 2);
    const auto even = low % 2 == 0 ? low : high;
    ASSERT_EQ(bits_of(TypeParam(middle)), even) << std::hex << pattern;
    ASSERT_EQ(bits_of(TypeParam(-middle)), even | 0x8000) << std::hex << pattern;
    ASSERT_EQ(bits_of(TypeParam(std::nextafter(middle, 0.0f))), low) << std::hex << pattern;
    ASSERT_EQ(bits_of(TypeParam(std::nextafter(middle, std::numeric_limits<float>::infinity()))), high)
        << std::hex << pattern;
  }
}

TYPED_TEST(SixteenBits, RoundsAnyFloatAsTheReferenceDoes) {
  tests::Random random(7);
  for (int i = 0; i < 500000; ++i) {
    const auto bits = static_cast<std::uint32_t>(random.bits());
    float value;
    std::memcpy(&value, &bits, sizeof value);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(static_cast<float>(TypeParam(value)))) << std::hex << bits;
    } else {
      ASSERT_EQ(bits_of(TypeParam(value)), expected_bits<TypeParam>(value)) << value;
    }
  }
}

TYPED_TEST(SixteenBits, EdgesOfTheRange) {
  const double largest = reference::largest(tests::scalar_of<TypeParam>);
  const double step = reference::unit_in_last_place(tests::scalar_of<TypeParam>, largest);
  const auto infinity = expected_bits<TypeParam>(reference::infinity);
  EXPECT_EQ(bits_of(TypeParam(static_cast<float>(largest + step / 2))), infinity);
  EXPECT_EQ(bits_of(TypeParam(std::nextafter(static_cast<float>(largest + step / 2), 0.0f))), infinity - 1);
  EXPECT_EQ(bits_of(TypeParam(std::numeric_limits<float>::infinity())), infinity);
  EXPECT_EQ(bits_of(TypeParam(-std::numeric_limits<float>::infinity())), infinity | 0x8000);
  EXPECT_EQ(bits_of(TypeParam(std::numeric_limits<float>::denorm_min())),
            expected_bits<TypeParam>(std::numeric_limits<float>::denorm_min()));
  EXPECT_EQ(bits_of(TypeParam(-0.0f)), 0x8000);
  EXPECT_EQ(bits_of(TypeParam(1.0f)), expected_bits<TypeParam>(1));
  // A NaN whose payload lies in the bits that are cut off must not become an infinity.
  for (std::uint32_t bits : {0x7f800001u, 0xff800001u, 0x7fffffffu, 0x7fc00000u}) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    EXPECT_TRUE(std::isnan(static_cast<float>(TypeParam(value)))) << std::hex << bits;
  }
}

TEST(Scalars, HaveNames) {
  EXPECT_STREQ(ks::scalar_name<float>(), "float");
  EXPECT_STREQ(ks::scalar_name<double>(), "double");
  EXPECT_STREQ(ks::scalar_name<half_t>(), "half");
  EXPECT_STREQ(ks::scalar_name<bhalf_t>(), "bfloat16");
}

TEST(Scalars, TheListHoldsEveryType) {
  int count = 0;
#define KOKKOSSOFTMAX_TESTS_COUNT(T, text) \
  ++count;                                 \
  EXPECT_STREQ(ks::scalar_name<T>(), text);
  KOKKOSSOFTMAX_FOR_EACH_SCALAR(KOKKOSSOFTMAX_TESTS_COUNT)
#undef KOKKOSSOFTMAX_TESTS_COUNT
  EXPECT_EQ(count, 4);
}

TEST(MaxSum, JoinsInAnyOrder) {
  const ks::MaxSum<float> nothing;
  const ks::MaxSum<float> a{3.0f, 2.0f}, b{1.0f, 5.0f};
  const auto ab = join(a, b), ba = join(b, a);
  EXPECT_EQ(ab.max, 3.0f);
  EXPECT_EQ(ba.max, 3.0f);
  EXPECT_NEAR(ab.sum, 2.0 + 5.0 * std::exp(-2.0), 1e-6);
  EXPECT_EQ(ab.sum, ba.sum);
  EXPECT_EQ(join(nothing, a).sum, a.sum);
  EXPECT_EQ(join(a, nothing).max, a.max);
  EXPECT_EQ(join(nothing, nothing).sum, 0.0f);
  // Far apart: the difference of the maxima may not overflow into NaN.
  const float largest = std::numeric_limits<float>::max();
  EXPECT_EQ(join(ks::MaxSum<float>{largest, 1.0f}, ks::MaxSum<float>{-largest, 7.0f}).sum, 1.0f);
}

template <class Space>
class ScalarsOnBackend : public testing::Test {};
TYPED_TEST_SUITE(ScalarsOnBackend, tests::Backends, tests::BackendName);

template <class T>
struct Convert {
  const T* from;
  float* widened;
  T* narrowed;
  KOKKOS_FUNCTION void operator()(int i) const {
    widened[i] = static_cast<float>(from[i]);
    narrowed[i] = T(widened[i]);
  }
};

template <class T, class Exec>
void patterns_on_device() {
  constexpr int count = 0x10000;
  Kokkos::View<std::uint16_t*, typename Exec::memory_space> from("from", count), narrowed("narrowed", count);
  Kokkos::View<float*, typename Exec::memory_space> widened("widened", count);
  const auto host = Kokkos::create_mirror_view(from);
  for (int i = 0; i < count; ++i) host(i) = static_cast<std::uint16_t>(i);
  Kokkos::deep_copy(from, host);
  Kokkos::parallel_for("convert", Kokkos::RangePolicy<Exec>(0, count),
                       Convert<T>{reinterpret_cast<const T*>(from.data()), widened.data(),
                                  reinterpret_cast<T*>(narrowed.data())});
  const auto widened_host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), widened);
  const auto narrowed_host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), narrowed);
  for (int i = 0; i < count; ++i) {
    const double expected = expected_value<T>(static_cast<std::uint16_t>(i));
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(widened_host(i))) << std::hex << i;
      ASSERT_TRUE(std::isnan(expected_value<T>(narrowed_host(i)))) << std::hex << i;
    } else {
      ASSERT_EQ(widened_host(i), expected) << std::hex << i;
      ASSERT_EQ(narrowed_host(i), i) << std::hex << i;
    }
  }
}

TYPED_TEST(ScalarsOnBackend, EveryPatternConvertsOnTheDevice) {
  patterns_on_device<half_t, TypeParam>();
  patterns_on_device<bhalf_t, TypeParam>();
}

}  // namespace
