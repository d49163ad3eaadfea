// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Every rank, axis and kind of layout; padding that stays as it was.
#include <numeric>
#include <string>
#include <vector>

#include "../support/cases.hpp"

namespace {

using namespace tests;

std::string text_of(const std::vector<int>& order) {
  std::string text;
  for (int d : order) text += std::to_string(d);
  return text;
}

// A few orders of the dimensions in memory: right, left, and rotated.
std::vector<std::vector<int>> orders(int rank) {
  std::vector<int> left(rank);
  std::iota(left.begin(), left.end(), 0);
  std::vector<int> right(left.rbegin(), left.rend());
  std::vector<std::vector<int>> all{right};
  if (rank > 1) all.push_back(left);
  if (rank > 2) {
    std::vector<int> rotated(left);
    std::rotate(rotated.begin(), rotated.begin() + 1, rotated.end());
    all.push_back(rotated);
  }
  return all;
}

template <int rank, class Exec>
void every_axis_and_order(const std::vector<std::int64_t>& extents) {
  Case c;
  c.extents = extents;
  c.logits = random_values(Scalar::float32, c.size());
  for (int axis = -rank; axis < rank; ++axis) {
    c.axis = axis;
    const auto lse_extents = reference::without(extents, axis);
    const bool negative = axis < 0;
    for (const auto& in_order : orders(rank)) {
      // The negative spelling of an axis needs no more than one layout.
      if (negative && in_order != orders(rank).front()) continue;
      SCOPED_TRACE("rank " + std::to_string(rank) + ", input's dimensions from the fastest " +
                   text_of(in_order));
      const auto lse_order = orders(rank - 1).back();
      c.in = reference::ordered(extents, in_order);
      c.out = std::nullopt;
      c.lse = std::nullopt;
      check<float, float, rank>(Exec(), c, false);
      // Into an output in another order that is contiguous in one dimension.
      for (const auto& out_order : orders(rank)) {
        if (out_order == in_order) continue;
        c.out = reference::ordered(extents, out_order, 1, 1, 3);
        check<float, float, rank>(Exec(), c, rank < 4 && !negative);
      }
      // Padded, with nothing contiguous, into an output in another order.
      c.in = reference::ordered(extents, in_order, 2, 3, 5);
      c.out = reference::ordered(extents, orders(rank).back(), 3, 1, 2);
      c.lse = reference::ordered(lse_extents, lse_order, 2, 1, 3);
      check<float, float, rank>(Exec(), c, rank < 5 && !negative);
    }
    c.in = reference::right(extents, 3, 1);
    c.out = std::nullopt;
    c.in_place = true;
    check<float, float, rank>(Exec(), c, rank < 4 && !negative);
    c.in_place = false;
  }
}

template <class Space>
class Layouts : public OnEveryBackend<Space> {};
TYPED_TEST_SUITE(Layouts, Backends, BackendName);

TYPED_TEST(Layouts, Rank1) {
  every_axis_and_order<1, TypeParam>({5});
  every_axis_and_order<1, TypeParam>({1000});
}
TYPED_TEST(Layouts, Rank2) {
  every_axis_and_order<2, TypeParam>({7, 33});
  every_axis_and_order<2, TypeParam>({130, 4});
  every_axis_and_order<2, TypeParam>({3, 2050});
}
TYPED_TEST(Layouts, Rank3) {
  every_axis_and_order<3, TypeParam>({4, 5, 37});
  every_axis_and_order<3, TypeParam>({2, 130, 3});
}
TYPED_TEST(Layouts, Rank4) {
  every_axis_and_order<4, TypeParam>({3, 4, 5, 6});
}
TYPED_TEST(Layouts, Rank5) {
  every_axis_and_order<5, TypeParam>({2, 3, 4, 3, 5});
}
TYPED_TEST(Layouts, Rank6) {
  every_axis_and_order<6, TypeParam>({2, 3, 2, 4, 3, 3});
}
TYPED_TEST(Layouts, Rank7) {
  every_axis_and_order<7, TypeParam>({2, 3, 2, 1, 4, 3, 2});
}
TYPED_TEST(Layouts, Rank8) {
  every_axis_and_order<8, TypeParam>({2, 2, 3, 2, 1, 2, 3, 4});
}

// The middle axis of a rank-3 or rank-4 view whose other strides do not collapse into one.
TYPED_TEST(Layouts, OuterStridesThatDoNotCollapse) {
  Case c;
  c.extents = {3, 5, 40};
  c.logits = random_values(Scalar::float32, c.size());
  c.in = Layout{{3, 5, 40}, {5 * 43 + 7, 43, 1}, 2};
  c.out = Layout{{3, 5, 40}, {41, 3 * 41 + 3, 1}, 1};
  for (int axis : {0, 1, 2}) {
    c.axis = axis;
    check<float, float, 3>(TypeParam(), c, true);
  }
  Case d;
  d.extents = {2, 3, 4, 36};
  d.logits = random_values(Scalar::float32, d.size());
  d.in = Layout{{2, 3, 4, 36}, {1000, 37, 3 * 37 + 5, 1}, 4};
  d.out = Layout{{2, 3, 4, 36}, {40, 4 * 80 + 11, 80, 1}, 0};
  for (int axis : {0, 1, 2, 3}) {
    d.axis = axis;
    check<float, float, 4>(TypeParam(), d, true);
  }
}

// --- views as users make them ------------------------------------------------------------------------------

// Copies to and from any view, element by element through a mirror of bytes.
template <class View>
void check_views(const View& x, const View& y, int rank, int axis) {
  using Exec = typename View::execution_space;
  using T = typename View::non_const_value_type;
  const Layout in = layout_of(x, rank), out = layout_of(y, rank);
  const auto values = random_values(scalar_of<T>, in.size());
  Kokkos::View<T*, Kokkos::HostSpace> host_x("x", in.span()), host_y("y", out.span());
  const reference::Rows rows(in.extents, axis);
  const auto logical = reference::right(in.extents);
  for (std::int64_t r = 0; r < rows.rows; ++r) {
    for (std::int64_t c = 0; c < rows.columns; ++c) {
      const auto value = values[rows.start(logical, r) + c * logical.strides[rows.axis]];
      reference::encode(scalar_of<T>, value, &host_x(rows.start(in, r) + c * in.strides[rows.axis]));
    }
  }
  using Flat = Kokkos::View<T*, typename View::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  Kokkos::deep_copy(Flat(x.data(), in.span()), host_x);
  for (auto operation : {Operation::softmax, Operation::log_softmax}) {
    if (operation == Operation::softmax) {
      ks::softmax(Exec(), x, y, ks::axis(axis));
    } else {
      ks::log_softmax(x, y, ks::axis(axis));  // the default instance, fenced
    }
    Exec().fence();
    Kokkos::deep_copy(host_y, Flat(y.data(), out.span()));
    reference::Problem problem{operation, scalar_of<T>, scalar_of<T>, in.extents, axis, values, {}};
    std::string report;
    EXPECT_TRUE(reference::agrees(problem, out, host_y.data(), report)) << report;
  }
}

template <class Space>
class Views : public OnEveryBackend<Space> {};
TYPED_TEST_SUITE(Views, Backends, BackendName);

TYPED_TEST(Views, RightAndLeft) {
  using Space = typename TypeParam::memory_space;
  for (int axis : {-1, 0}) {
    using Right = Kokkos::View<float**, Kokkos::LayoutRight, Space>;
    check_views(Right("x", 11, 35), Right("y", 11, 35), 2, axis);
    using Left = Kokkos::View<double**, Kokkos::LayoutLeft, Space>;
    check_views(Left("x", 11, 35), Left("y", 11, 35), 2, axis);
  }
  using Cube = Kokkos::View<float***, Kokkos::LayoutLeft, Space>;
  for (int axis : {0, 1, 2}) check_views(Cube("x", 6, 35, 4), Cube("y", 6, 35, 4), 3, axis);
}

TYPED_TEST(Views, StaticExtents) {
  using View = Kokkos::View<float* [5][7], typename TypeParam::memory_space>;
  for (int axis : {0, 1, 2}) check_views(View("x", 3), View("y", 3), 3, axis);
}

TYPED_TEST(Views, Subviews) {
  Kokkos::View<float***, Kokkos::LayoutRight, typename TypeParam::memory_space> x("x", 6, 9, 40),
      y("y", 6, 9, 40);
  const auto middle = std::make_pair(2, 33);
  for (int axis : {0, 1}) {
    check_views(Kokkos::subview(x, 3, Kokkos::ALL, middle), Kokkos::subview(y, 2, Kokkos::ALL, middle), 2,
                axis);
    check_views(Kokkos::subview(x, Kokkos::ALL, 4, middle), Kokkos::subview(y, Kokkos::ALL, 5, middle), 2,
                axis);
    check_views(Kokkos::subview(x, Kokkos::ALL, std::make_pair(1, 8), 39),
                Kokkos::subview(y, Kokkos::ALL, std::make_pair(0, 7), 0), 2, axis);
  }
  check_views(Kokkos::subview(x, Kokkos::ALL, 4, 7), Kokkos::subview(y, Kokkos::ALL, 5, 7), 1, 0);
}

TYPED_TEST(Views, DynamicRank) {
  using View = Kokkos::DynRankView<float, Kokkos::LayoutRight, typename TypeParam::memory_space>;
  check_views(View("x", 130), View("y", 130), 1, 0);
  for (int axis : {-1, 0}) check_views(View("x", 9, 33), View("y", 9, 33), 2, axis);
  for (int axis : {0, 1, 2}) check_views(View("x", 9, 5, 33), View("y", 9, 5, 33), 3, axis);
  check_views(View("x", 2, 3, 4, 2, 3, 2, 5), View("y", 2, 3, 4, 2, 3, 2, 5), 7, 4);
  using Left = Kokkos::DynRankView<float, Kokkos::LayoutLeft, typename TypeParam::memory_space>;
  for (int axis : {0, 1, 2}) check_views(Left("x", 9, 5, 33), Left("y", 9, 5, 33), 3, axis);
}

TYPED_TEST(Views, DynamicRankOfLogsumexp) {
  using Space = typename TypeParam::memory_space;
  Kokkos::DynRankView<float, Space> x("x", 3, 5), lse("lse", 3), scalar("scalar");
  Kokkos::View<float*, Space> fixed("fixed", 3);
  Kokkos::deep_copy(x, 2.0f);
  ks::logsumexp(TypeParam(), x, lse);
  ks::logsumexp(TypeParam(), x, fixed);
  const auto one = Kokkos::View<float*, Space>("one", 5);
  ks::logsumexp(TypeParam(), Kokkos::DynRankView<float, Space>(one.data(), 5), scalar);
  TypeParam().fence();
  const auto lse_host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), lse);
  const auto fixed_host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), fixed);
  const auto scalar_host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), scalar);
  for (int i = 0; i < 3; ++i) {
    EXPECT_NEAR(lse_host(i), 2 + std::log(5.0), 1e-6);
    EXPECT_EQ(lse_host(i), fixed_host(i));
  }
  EXPECT_NEAR(scalar_host(), std::log(5.0), 1e-6);
}

// One row read for all rows: an input may have a stride of 0.
TYPED_TEST(Views, InputBroadcastByAStrideOfZero) {
  Buffer<TypeParam> x(Scalar::float32, reference::right({1, 45}));
  const auto row = random_values(Scalar::float32, 45);
  x.fill(row);
  x.upload();
  Layout repeated{{6, 45}, {0, 1}};
  StridedView<const float, 2, TypeParam> view(static_cast<const float*>(x.device()), kokkos_layout(repeated));
  Buffer<TypeParam> y(Scalar::float32, reference::right({6, 45}));
  ks::softmax(TypeParam(), view, y.template view<float, 2>());
  TypeParam().fence();
  y.download();
  reference::Problem problem{Operation::softmax, Scalar::float32, Scalar::float32, {6, 45}, -1, {}, {}};
  for (int r = 0; r < 6; ++r) problem.logits.insert(problem.logits.end(), row.begin(), row.end());
  std::string report;
  EXPECT_TRUE(reference::agrees(problem, y.layout(), y.host(), report)) << report;
}

TYPED_TEST(Views, EmptyIsANoOp) {
  using Space = typename TypeParam::memory_space;
  Kokkos::View<float**, Space> none_by_some("x", 0, 7), some_by_none("x", 7, 0);
  Kokkos::View<float*, Space> nothing("lse", 0), lse("lse", 7);
  ks::softmax(TypeParam(), none_by_some, none_by_some);
  ks::softmax(TypeParam(), some_by_none, some_by_none);
  ks::log_softmax(none_by_some, none_by_some, ks::axis(0));
  ks::logsumexp(TypeParam(), none_by_some, nothing);
  // Rows of no elements have an empty sum.
  Kokkos::deep_copy(lse, 1.0f);
  EXPECT_NO_THROW(ks::logsumexp(TypeParam(), some_by_none, lse));
  TypeParam().fence();
}

}  // namespace
