// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// More than 2^31 and 2^32 elements: every offset has 64 bits. Skipped where the memory is missing.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <string>

#include "../support/cases.hpp"

namespace {

using namespace tests;

// What a space can still give; half of it for a host that others use too.
template <class Exec>
double free_bytes() {
#if defined(KOKKOS_ENABLE_CUDA)
  if constexpr (std::is_same_v<Exec, Kokkos::Cuda>) {
    std::size_t free = 0, total = 0;
    return cudaMemGetInfo(&free, &total) == cudaSuccess ? static_cast<double>(free) * 0.9 : 0;
  }
#endif
  std::ifstream file("/proc/meminfo");
  std::string word;
  double kilobytes = 0;
  while (file >> word) {
    if (word == "MemAvailable:") file >> kilobytes;
  }
  return kilobytes * 1024 / 2;
}

template <class Space>
class Large : public OnEveryBackend<Space> {
 protected:
  static bool fits(double bytes) { return bytes < free_bytes<Space>(); }
};
TYPED_TEST_SUITE(Large, Backends, BackendName);

#define KOKKOSSOFTMAX_TESTS_NEEDS(bytes) \
  if (!this->fits(bytes))                \
  GTEST_SKIP() << (bytes) / 1e9 << " GB are needed, " << free_bytes<TypeParam>() / 1e9 << " are free"

constexpr std::int64_t two_31 = std::int64_t(1) << 31, two_32 = std::int64_t(1) << 32;

// Fills in pieces that 32 bits count: on CUDA, Kokkos 4.5 finds the indices of a RangePolicy in 32 bits.
template <class Exec, class Functor>
void fill(const Exec& exec, std::int64_t count, const Functor& functor) {
  using Range = Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>;
  for (std::int64_t first = 0; first < count; first += two_31) {
    Kokkos::parallel_for("fill", Range(exec, first, std::min(count, first + two_31)), functor);
  }
}

// Rows repeat after seven of them, so that a few rows computed by themselves say what every row must hold.
template <class T>
struct FillRepeating {
  T* data;
  std::int64_t columns, row_stride, column_stride;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const std::int64_t row = i / columns, column = i % columns;
    const float value = static_cast<float>((column * 37 + row % 7 * 11) % 101) * 0.1f - 5.0f;
    data[row * row_stride + column * column_stride] = T(value);
  }
};

template <class T>
struct CountWrong {
  const T* data;
  const T* expected;
  std::int64_t columns, row_stride, column_stride, expected_row_stride, expected_column_stride;
  KOKKOS_FUNCTION void operator()(std::int64_t i, std::int64_t& wrong) const {
    const std::int64_t row = i / columns, column = i % columns;
    const float got = static_cast<float>(data[row * row_stride + column * column_stride]);
    const float want =
        static_cast<float>(expected[row % 7 * expected_row_stride + column * expected_column_stride]);
    wrong += !(got == want);
  }
};

// In place on rows x columns of T; the axis is the last dimension, fast or slow in memory.
template <class T, class Exec>
void many_rows(std::int64_t rows, std::int64_t columns, bool slow_axis, int axis_of_two) {
  using Memory = typename Exec::memory_space;
  using Range = Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>;
  const Exec exec{};
  const Kokkos::View<T*, Memory> large(Kokkos::view_alloc(Kokkos::WithoutInitializing, "large"),
                                       rows * columns),
      small(Kokkos::view_alloc(Kokkos::WithoutInitializing, "small"), 7 * columns);
  const auto strides = [&](std::int64_t n) {
    return slow_axis ? std::vector<std::int64_t>{1, n} : std::vector<std::int64_t>{columns, 1};
  };
  for (const auto& [memory, n] : {std::pair{large, rows}, std::pair{small, std::int64_t(7)}}) {
    const auto s = strides(n);
    fill(exec, n * columns, FillRepeating<T>{memory.data(), columns, s[0], s[1]});
    // As the user would have it: rows x columns with axis 1, or columns x rows with axis 0.
    const Layout layout = axis_of_two == 1 ? Layout{{n, columns}, s} : Layout{{columns, n}, {s[1], s[0]}};
    const StridedView<T, 2, Exec> view(memory.data(), kokkos_layout(layout));
    ks::softmax(exec, view, view, ks::axis(axis_of_two));
  }
  const auto s = strides(rows), e = strides(7);
  std::int64_t wrong = 0;
  Kokkos::parallel_reduce("compare", Range(exec, 0, rows * columns),
                          CountWrong<T>{large.data(), small.data(), columns, s[0], s[1], e[0], e[1]}, wrong);
  EXPECT_EQ(wrong, 0) << rows << " x " << columns << ", ran " << ks::last_implementation();
  // And the small ones are right.
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), small);
  reference::Problem problem{Operation::softmax, scalar_of<T>, scalar_of<T>, {7, columns}, -1, {}, {}};
  for (std::int64_t i = 0; i < 7 * columns; ++i) {
    const float value = static_cast<float>((i % columns * 37 + i / columns * 11) % 101) * 0.1f - 5.0f;
    problem.logits.push_back(reference::rounded(scalar_of<T>, value));
  }
  std::string report;
  EXPECT_TRUE(reference::agrees(problem, Layout{{7, columns}, e}, host.data(), report)) << report;
}

TYPED_TEST(Large, RowsBeyond31Bits) {
  KOKKOSSOFTMAX_TESTS_NEEDS(2.0 * two_31 + 1e9);
  many_rows<half_t, TypeParam>(two_31 / 64 + 5, 64, false, 1);
}

TYPED_TEST(Large, RowsBeyond32Bits) {
  KOKKOSSOFTMAX_TESTS_NEEDS(2.0 * two_32 + 1e9);
  many_rows<half_t, TypeParam>(two_32 / 1000 + 5, 1000, false, 1);
}

TYPED_TEST(Large, MoreRowsThan32BitsCount) {
  KOKKOSSOFTMAX_TESTS_NEEDS(2.0 * two_32 * 2 + 1e9);
  many_rows<half_t, TypeParam>(two_32 + 70, 2, false, 1);
}

TYPED_TEST(Large, StridedAxisBeyond32Bits) {
  KOKKOSSOFTMAX_TESTS_NEEDS(2.0 * two_32 + 1e9);
  many_rows<half_t, TypeParam>(two_32 / 1000 + 5, 1000, true, 0);
}

TYPED_TEST(Large, MoreStridedRowsThan32BitsCount) {
  KOKKOSSOFTMAX_TESTS_NEEDS(2.0 * two_32 * 2 + 1e9);
  many_rows<half_t, TypeParam>(two_32 + 70, 2, true, 0);
}

TYPED_TEST(Large, FloatBeyond32Bits) {
  KOKKOSSOFTMAX_TESTS_NEEDS(4.0 * two_32 + 1e9);
  many_rows<float, TypeParam>(two_32 / 128256 + 3, 128256, false, 1);
}

template <class T>
struct FillConstant {
  T* data;
  std::int64_t special;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const { data[i] = T(i == special ? 30.0f : 1.0f); }
};

// One row with more columns than 32 bits count.
TYPED_TEST(Large, ColumnsBeyond32Bits) {
  const std::int64_t columns = two_32 + 12345;
  KOKKOSSOFTMAX_TESTS_NEEDS(2.0 * columns + 1e9);
  const TypeParam exec{};
  const Kokkos::View<half_t*, typename TypeParam::memory_space> x(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, "x"), columns);
  const Kokkos::View<float, typename TypeParam::memory_space> lse("lse");
  const auto value = [&](std::int64_t i) {
    const auto one = Kokkos::subview(x, std::make_pair(i, i + 1));
    return static_cast<float>(Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), one)(0));
  };
  for (std::int64_t special : {std::int64_t(-1), columns - 1, two_32, two_31 + 1}) {
    fill(exec, columns, FillConstant<half_t>{x.data(), special});
    ks::logsumexp(exec, x, lse);
    exec.fence();
    const double n = static_cast<double>(columns);
    const double expected = special < 0 ? 1 + std::log(n) : 30 + std::log1p(std::exp(-29.0) * (n - 1));
    const double got = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), lse)();
    EXPECT_NEAR(got, expected, 4 * 0x1p-24 * expected) << special;
    if (special < 0) continue;
    ks::log_softmax(exec, x, x);
    exec.fence();
    // Within an ulp of half.
    EXPECT_NEAR(value(special), 30 - expected, 0x1p-10) << special;
    EXPECT_NEAR(value(special - 1), 1 - expected, 0x1p-5) << special;
    EXPECT_NEAR(value(0), 1 - expected, 0x1p-5) << special;
  }
}

}  // namespace
