// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Lengths and numbers of rows, of every compiled pair of scalars, along the fast and the slow dimension.
#include "../support/cases.hpp"
#include "../support/float_to_half.hpp"
#include "../support/refusals.hpp"

namespace {

using namespace tests;

constexpr std::int64_t lengths[] = {1,    2,    3,    5,    31,   32,    33,    127,    129,    389,
                                    1000, 1023, 1025, 4097, 8191, 12289, 50257, 128255, 1 << 20};

// Elements of a case: the reference takes its time.
constexpr std::int64_t most_elements = 2600000;

template <class In, class Out, class Exec>
void check_lengths(std::int64_t most) {
  for (std::int64_t columns : lengths) {
    for (std::int64_t rows : {0, 1, 3, 199}) {
      if (rows * columns > most) continue;
      SCOPED_TRACE(std::to_string(rows) + " rows of " + std::to_string(columns));
      Case c;
      c.extents = {rows, columns};
      c.logits = random_values(scalar_of<In>, c.size(), -8, 8, columns + rows);
      // The forms that one implementation never sees by itself are forced where that is cheap.
      check<In, Out, 2>(Exec(), c, rows > 0 && rows * columns <= 210000);
      if (rows == 199 || rows == 3) {
        c.in_place = true;
        check<In, Out, 2>(Exec(), c, false);
        c.in_place = false;
      }
      c.extents = {columns, rows};
      c.axis = 0;
      check<In, Out, 2>(Exec(), c, rows > 0 && rows * columns <= 210000);
    }
  }
}

template <class Space>
class Lengths : public OnEveryBackend<Space> {};
TYPED_TEST_SUITE(Lengths, Backends, BackendName);

TYPED_TEST(Lengths, Float) {
  check_lengths<float, float, TypeParam>(most_elements);
}
TYPED_TEST(Lengths, Double) {
  check_lengths<double, double, TypeParam>(1 << 20);
}
TYPED_TEST(Lengths, Half) {
  check_lengths<half_t, half_t, TypeParam>(1 << 20);
}
TYPED_TEST(Lengths, Bfloat16) {
  check_lengths<bhalf_t, bhalf_t, TypeParam>(1 << 20);
}
TYPED_TEST(Lengths, HalfToFloat) {
  check_lengths<half_t, float, TypeParam>(400000);
}
TYPED_TEST(Lengths, Bfloat16ToFloat) {
  check_lengths<bhalf_t, float, TypeParam>(400000);
}

// Pairs that the library compiles where they are used.
TYPED_TEST(Lengths, FloatToHalf) {
  check_lengths<float, half_t, TypeParam>(13000);
}
TYPED_TEST(Lengths, SamePointerWithASmallerScalarIsRefused) {
  const Layout layout = reference::right({2, 30});
  const auto values = random_values(Scalar::float32, 60);
  Buffer<TypeParam> memory(Scalar::float32, layout, &values);
  const StridedView<half_t, 2, TypeParam> y(static_cast<half_t*>(memory.device()), kokkos_layout(layout));
  expect_refused([&] { ks::softmax(TypeParam(), memory.template view<const float, 2>(), y); },
                 {"softmax", "overlap", "(2, 30)"});
  expect_unchanged(memory);
}
TYPED_TEST(Lengths, HalfToBfloat16) {
  check_lengths<half_t, bhalf_t, TypeParam>(13000);
}
TYPED_TEST(Lengths, DoubleToFloat) {
  check_lengths<double, float, TypeParam>(13000);
}

#if defined(KOKKOSSOFTMAX_TEST_ALL_SCALAR_PAIRS)
TYPED_TEST(Lengths, EveryPair) {
  for_each_scalar_pair([]<class In, class Out>() { check_lengths<In, Out, TypeParam>(400000); });
}
#endif

}  // namespace
