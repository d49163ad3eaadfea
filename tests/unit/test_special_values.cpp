// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Infinities, NaN, magnitudes, ties: in every implementation, along the fast and the slow dimension.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "../support/cases.hpp"

namespace {

using namespace tests;
using reference::infinity;
using reference::nan;

using RowMaker = std::function<double(std::int64_t column, std::int64_t columns)>;

// One row from each maker, rounded to the type, with the finite values kept finite.
template <class In, class Out, class Exec>
void check_rows(std::int64_t columns, const std::vector<RowMaker>& makers) {
  constexpr Scalar scalar = scalar_of<In>;
  const double largest = reference::largest(scalar);
  Case c;
  c.extents = {static_cast<std::int64_t>(makers.size()), columns};
  c.logits.resize(c.size());
  const auto value = [&](std::size_t row, std::int64_t column) {
    const double wanted = makers[row](column, columns);
    return std::isfinite(wanted) ? reference::rounded(scalar, std::clamp(wanted, -largest, largest)) : wanted;
  };
  for (std::size_t r = 0; r < makers.size(); ++r) {
    for (std::int64_t i = 0; i < columns; ++i) c.logits[r * columns + i] = value(r, i);
  }
  check<In, Out, 2>(Exec(), c, true);
  // The same rows as columns.
  Case t;
  t.extents = {columns, static_cast<std::int64_t>(makers.size())};
  t.axis = 0;
  t.logits.resize(t.size());
  for (std::size_t r = 0; r < makers.size(); ++r) {
    for (std::int64_t i = 0; i < columns; ++i) t.logits[i * makers.size() + r] = c.logits[r * columns + i];
  }
  check<In, Out, 2>(Exec(), t, true);
}

template <class Exec>
void check_rows_of_all_scalars(std::int64_t columns, const std::vector<RowMaker>& makers) {
  for_each_scalar_pair([&]<class In, class Out>() { check_rows<In, Out, Exec>(columns, makers); });
}

// A value of the row that repeats on every run and machine.
double noise(std::int64_t column, double limit) {
  Random random(static_cast<std::uint64_t>(column) + 77);
  return random.uniform(-limit, limit);
}

template <class Space>
class SpecialValues : public OnEveryBackend<Space> {};
TYPED_TEST_SUITE(SpecialValues, Backends, BackendName);

TYPED_TEST(SpecialValues, Magnitudes) {
  std::vector<RowMaker> rows;
  for (double limit : {1e-3, 10.0, 88.0, 90.0, 1e4, 1e10, 1e30, 1e300}) {
    rows.push_back([=](auto column, auto) { return noise(column, limit); });
    rows.push_back([=](auto column, auto) { return limit + noise(column, 1); });   // all positive
    rows.push_back([=](auto column, auto) { return -limit + noise(column, 1); });  // all negative
    rows.push_back([=](auto column, auto) { return column % 2 ? limit : -limit; });
    rows.push_back([=](auto, auto) { return limit; });  // everywhere the maximum
  }
  for (double x : {87.0, 87.3, 88.0, 88.7, 89.0, 103.0, 104.0, 708.0, 708.396, 708.3964, 709.7, 745.0}) {
    rows.push_back([=](auto column, auto) { return column == 3 ? x : 0.0; });
    rows.push_back([=](auto column, auto) { return column == 3 ? -x : 0.0; });
    rows.push_back([=](auto column, auto) { return -x * (column % 7) / 6; });
  }
  for (std::int64_t columns : {11, 37, 2100}) check_rows_of_all_scalars<TypeParam>(columns, rows);
}

// The logarithm of a sum next to 1 shows what each term loses, and so does one that the maximum cancels.
TYPED_TEST(SpecialValues, LogarithmNearZero) {
  std::vector<RowMaker> rows;
  for (double x : {6.0, 9.0, 12.0, 14.0, 15.5, 17.0}) {
    rows.push_back([=](auto column, auto) { return column == 3 ? 0.0 : -x; });
    rows.push_back([=](auto column, auto) { return column == 3 ? 0.0 : -x + noise(column, 0.5); });
  }
  for (double offset : {0.0, 0.04}) {
    rows.push_back([=](auto column, auto columns) {
      return -std::log(static_cast<double>(columns)) - offset + noise(column, 0.5);
    });
  }
  for (std::int64_t columns : {11, 37, 2100}) check_rows_of_all_scalars<TypeParam>(columns, rows);
  check_rows<half_t, half_t, TypeParam>(5001, rows);
  check_rows<bhalf_t, bhalf_t, TypeParam>(5001, rows);
}

// So many equal terms beside 1 that what is lost of each, or kept beside larger units, comes to a lot: terms
// and sums of four of them that end halfway between units of 2^-16, or in all of the bits below.
TYPED_TEST(SpecialValues, ManyEqualTerms) {
  std::vector<RowMaker> rows;
  for (const double term :
       {0x1.8p-18, 0x1.4p-18, 0x1.7ffffep-18, 0x1.8p-20, 0x1.fffffep-1, 0x1.55p-2, 0x1p-30}) {
    const double logit = std::log(term);
    rows.push_back([=](auto column, auto) { return column == 0 ? 0.0 : logit; });
  }
  for (std::int64_t columns : {1000, 1024, 4096, 8192, 12288, 16384, 16383, 50257, 131072})
    check_rows<float, float, TypeParam>(columns, rows);
}

TYPED_TEST(SpecialValues, LargestFinite) {
  const double largest = std::numeric_limits<double>::max();  // check_rows makes it the type's own
  check_rows_of_all_scalars<TypeParam>(
      129, {[=](auto, auto) { return largest; }, [=](auto, auto) { return -largest; },
            [=](auto column, auto) { return column % 2 ? largest : -largest; },
            [=](auto column, auto) { return column == 5 ? largest : 0.0; },
            [=](auto column, auto) { return column == 5 ? -largest : 0.0; },
            [=](auto column, auto) { return column == 5 ? -largest : -infinity; },
            [=](auto column, auto) { return column == 5 ? largest : -infinity; },
            [=](auto column, auto) { return column == 5 ? 0.0 : -largest; },
            [=](auto column, auto) {
              return column % 3 == 0 ? -infinity : column % 3 == 1 ? -largest : largest;
            }});
}

TYPED_TEST(SpecialValues, SubnormalLogits) {
  check_rows_of_all_scalars<TypeParam>(
      65, {[](auto column, auto) { return column * 1e-40; }, [](auto column, auto) { return column * 6e-8; },
           [](auto column, auto) { return column % 2 ? 5e-324 : -5e-324; },
           [](auto column, auto) { return column % 2 ? 0.0 : -0.0; },
           [](auto column, auto) { return column == 9 ? 20.0 : 1e-45 * column; }});
}

TYPED_TEST(SpecialValues, TiesForTheMaximum) {
  check_rows_of_all_scalars<TypeParam>(
      389, {[](auto column, auto) { return column < 4 ? 7.0 : -1.0; },
            [](auto column, auto) { return column % 100 == 50 ? 7.0 : noise(column, 5); },
            [](auto column, auto columns) { return column == 0 || column == columns - 1 ? 100.0 : -100.0; },
            [](auto, auto) { return -3.0; }});
}

// Results at the edge of the subnormal numbers and beyond.
TYPED_TEST(SpecialValues, SmallResults) {
  std::vector<RowMaker> rows;
  for (double depth :
       {9.0, 9.7, 10.0, 14.0, 16.0, 17.0, 17.4, 18.0, 40.0, 86.0, 87.0, 87.4, 88.0, 92.0, 100.0, 110.0}) {
    rows.push_back([=](auto column, auto) { return column == 0 ? 0.0 : -depth - 0.001 * (column % 100); });
  }
  check_rows_of_all_scalars<TypeParam>(130, rows);
}

// Half results round correctly where they are subnormal: 1/N from 16385 elements on.
TYPED_TEST(SpecialValues, HalfResultsBelowTheSmallestNormal) {
  for (std::int64_t columns : {16385, 20000, 50257, 128255}) {
    Buffer<TypeParam> x(Scalar::float16, reference::right({2, columns})), y = x;
    y = Buffer<TypeParam>(Scalar::float16, reference::right({2, columns}));
    x.fill(std::vector<double>(2 * columns, 1.5));
    x.upload();
    ks::softmax(TypeParam(), x.template view<const half_t, 2>(), y.template view<half_t, 2>());
    TypeParam().fence();
    y.download();
    const auto values = y.values();
    const double expected = reference::rounded(Scalar::float16, 1.0 / static_cast<double>(columns));
    EXPECT_EQ(std::count(values.begin(), values.end(), expected), 2 * columns) << columns << ' ' << values[0];
  }
}

// Runs of -inf of every size that a kernel may give to a lane, a warp, a team or a slice, wherever they fall.
TYPED_TEST(SpecialValues, RunsOfMinusInfinity) {
  for (std::int64_t columns : {100, 2500, 20000}) {
    std::vector<RowMaker> rows;
    for (std::int64_t length : {1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192, 16384}) {
      if (length >= columns) break;
      std::vector<std::int64_t> starts{0, columns - length, columns / 2 / length * length};
      if (length > 1) starts.push_back(length / 2);
      for (auto start : starts) {
        rows.push_back([=](auto column, auto) {
          return column >= start && column < start + length ? -infinity : noise(column, 4);
        });
      }
      // Everything but the run.
      rows.push_back([=](auto column, auto) {
        return column >= starts[2] && column < starts[2] + length ? noise(column, 4) : -infinity;
      });
    }
    rows.push_back([](auto column, auto n) { return column < n / 2 ? -infinity : noise(column, 4); });
    rows.push_back([](auto column, auto n) { return column < n / 2 ? noise(column, 4) : -infinity; });
    check_rows<float, float, TypeParam>(columns, rows);
    if (columns == 2500) check_rows_of_all_scalars<TypeParam>(columns, rows);
  }
}

// The same for the share of one lane, which is every 4th, 8th, 32nd ... element, or a vector of neighbours in
// each.
TYPED_TEST(SpecialValues, SharesOfLanes) {
  std::vector<RowMaker> rows;
  for (std::int64_t lanes : {2, 4, 8, 16, 32, 64, 128, 256}) {
    for (std::int64_t width : {1, 4, 8}) {
      for (std::int64_t lane : {std::int64_t(0), lanes - 1}) {
        rows.push_back(
            [=](auto column, auto) { return column / width % lanes == lane ? -infinity : noise(column, 4); });
        rows.push_back(
            [=](auto column, auto) { return column / width % lanes == lane ? noise(column, 4) : -infinity; });
      }
    }
  }
  check_rows<float, float, TypeParam>(1300, rows);
  check_rows<double, double, TypeParam>(1300, rows);
}

TYPED_TEST(SpecialValues, MinusInfinityAtRandomAndAlone) {
  for (std::int64_t columns : {1, 2, 33, 1000, 9000}) {
    check_rows_of_all_scalars<TypeParam>(
        columns, {[](auto column, auto) { return Random(column).below(2) ? -infinity : noise(column, 5); },
                  [](auto column, auto) { return Random(column).below(10) ? -infinity : noise(column, 5); },
                  [](auto, auto) { return -infinity; },
                  [](auto column, auto) { return column == 0 ? -infinity : noise(column, 5); },
                  [](auto column, auto n) { return column == n - 1 ? -infinity : noise(column, 5); },
                  [](auto column, auto) { return column == 0 ? -5.0 : -infinity; },
                  [](auto column, auto n) { return column == n - 1 ? -5.0 : -infinity; },
                  [](auto column, auto n) { return column == n / 2 ? 1e4 : -infinity; }});
  }
}

TYPED_TEST(SpecialValues, PositiveInfinityAndNan) {
  for (std::int64_t columns : {1, 2, 13, 33, 1000, 9000}) {
    std::vector<RowMaker> rows;
    for (double special : {nan, infinity}) {
      for (int place : {0, 1, 2}) {
        const auto at = [place](std::int64_t n) { return place == 0 ? 0 : place == 1 ? n / 2 : n - 1; };
        rows.push_back([=](auto column, auto n) { return column == at(n) ? special : noise(column, 5); });
        rows.push_back([=](auto column, auto n) { return column == at(n) ? special : -infinity; });
      }
      rows.push_back([=](auto, auto) { return special; });
      rows.push_back(
          [=](auto column, auto) { return column % 2 ? special : std::numeric_limits<double>::max(); });
      rows.push_back(
          [=](auto column, auto) { return column % 2 ? special : -std::numeric_limits<double>::max(); });
      rows.push_back([=](auto column, auto) { return noise(column, 5); });  // between them: untouched
    }
    rows.push_back([](auto column, auto) { return column % 2 ? nan : infinity; });
    rows.push_back([](auto column, auto n) { return column == 0 ? nan : column == n - 1 ? infinity : 0.0; });
    rows.push_back([](auto column, auto n) { return column == 0 ? infinity : column == n - 1 ? nan : 0.0; });
    rows.push_back([](auto column, auto) {
      return column % 3 == 0 ? -infinity : column % 3 == 1 ? nan : 1.0;
    });
    rows.push_back([](auto column, auto) {
      return column % 3 == 0 ? -infinity : column % 3 == 1 ? infinity : 1.0;
    });
    check_rows_of_all_scalars<TypeParam>(columns, rows);
  }
}

// Logits and the same logits plus a constant that both can hold give the same row.
TYPED_TEST(SpecialValues, ShiftByAConstant) {
  constexpr std::int64_t columns = 1128;
  std::vector<double> plain(columns), shifted(columns);
  for (std::int64_t i = 0; i < columns; ++i) {
    plain[i] = static_cast<double>(Random(i).below(4096)) / 256 - 8;
    shifted[i] = plain[i] + 100;
  }
  Buffer<TypeParam> a(Scalar::float32, reference::right({1, columns}), &plain);
  Buffer<TypeParam> b(Scalar::float32, reference::right({1, columns}), &shifted);
  for (auto* x : {&a, &b}) {
    const auto view = x->template view<float, 2>();
    ks::softmax(TypeParam(), view, view);
    TypeParam().fence();
    x->download();
  }
  const std::vector<double> of_plain = a.values(), of_shifted = b.values();
  if constexpr (Kokkos::SpaceAccessibility<Kokkos::HostSpace, typename TypeParam::memory_space>::accessible) {
    EXPECT_EQ(of_plain, of_shifted);
  } else {
    // The kernels of CUDA form value log2(e) - max log2(e) in one rounding, which sees the constant: within
    // the bound that each row is held to.
    const double max = *std::max_element(plain.begin(), plain.end());
    for (std::int64_t i = 0; i < columns; ++i) {
      EXPECT_NEAR(of_shifted[i] / of_plain[i], 1, 2 * (1e-6 + (max - plain[i]) * 0x1p-24)) << i;
    }
  }
}

TYPED_TEST(SpecialValues, RowsSumToOne) {
  for (std::int64_t columns : {192, 760, 1128, 8191, 50257}) {
    const auto values = random_values(Scalar::float32, 3 * columns, -20, 20);
    Buffer<TypeParam> x(Scalar::float32, reference::right({3, columns}), &values);
    const auto view = x.template view<float, 2>();
    ks::softmax(TypeParam(), view, view);
    TypeParam().fence();
    x.download();
    const auto results = x.values();
    for (int r = 0; r < 3; ++r) {
      double sum = 0;
      for (std::int64_t i = 0; i < columns; ++i) sum += results[r * columns + i];
      EXPECT_NEAR(sum, 1, 1e-6) << columns;
    }
  }
}

}  // namespace
