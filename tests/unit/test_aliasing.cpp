// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// In place, blocks of one matrix that do not meet, and every meeting that must be refused.
#include <optional>
#include <string>
#include <vector>

#include "../support/cases.hpp"
#include "../support/refusals.hpp"

namespace {

using namespace tests;

template <class Space>
class Aliasing : public OnEveryBackend<Space> {};
TYPED_TEST_SUITE(Aliasing, Backends, BackendName);

template <class T, int rank, class Exec>
StridedView<T, rank, Exec> block(const Buffer<Exec>& buffer, const Layout& layout) {
  return StridedView<T, rank, Exec>(static_cast<T*>(buffer.device()) + layout.offset, kokkos_layout(layout));
}

// Memory that holds random floats in every element.
template <class Exec>
Buffer<Exec> filled(std::int64_t count) {
  const auto values = random_values(Scalar::float32, count);
  return Buffer<Exec>(Scalar::float32, reference::right({count}), &values);
}

// Input and output in one allocation: the output must be right, everything else as it was.
template <int rank, class Exec>
void expect_accepted(std::int64_t count, const Layout& in, const Layout& out) {
  for (auto operation : {Operation::softmax, Operation::log_softmax}) {
    auto memory = filled<Exec>(count);
    const auto before = memory.values();
    const auto x = block<float, rank>(memory, in), y = block<float, rank>(memory, out);
    StridedView<float, rank - 1, Exec> unused;
    ASSERT_NO_THROW(call(operation, Exec(), x, y, unused, -1));
    Exec().fence();
    memory.download();
    reference::Problem problem{operation, Scalar::float32, Scalar::float32, in.extents, -1, {}, {}};
    std::vector<bool> is_output(count, false);
    const reference::Rows rows(in.extents, -1);
    for (std::int64_t r = 0; r < rows.rows; ++r) {
      for (std::int64_t c = 0; c < rows.columns; ++c) {
        problem.logits.push_back(before[rows.start(in, r) + c * in.strides.back()]);
        is_output[rows.start(out, r) + c * out.strides.back()] = true;
      }
    }
    std::string report;
    EXPECT_TRUE(reference::agrees(problem, out, memory.host(), report)) << report;
    const auto after = memory.values();
    for (std::int64_t i = 0; i < count; ++i) {
      if (!is_output[i]) {
        ASSERT_EQ(after[i], before[i]) << "element " << i;
      }
    }
  }
}

template <int rank, class Exec>
void expect_overlap_refused(std::int64_t count, const Layout& in, const Layout& out) {
  auto memory = filled<Exec>(count);
  const auto x = block<float, rank>(memory, in), y = block<float, rank>(memory, out);
  StridedView<float, rank - 1, Exec> unused;
  for (auto operation : {Operation::softmax, Operation::log_softmax}) {
    const std::string function = std::string("KokkosSoftmax::") + reference::name(operation);
    expect_refused([&] { call(operation, Exec(), x, y, unused, -1); },
                   {function.c_str(), "overlap", "x", "("});
  }
  expect_unchanged(memory);
}

TYPED_TEST(Aliasing, HalvesOfOneMatrixAreAccepted) {
  expect_accepted<2, TypeParam>(9 * 80, {{9, 40}, {80, 1}, 0}, {{9, 40}, {80, 1}, 40});
  expect_accepted<2, TypeParam>(9 * 80, {{9, 40}, {80, 1}, 40}, {{9, 40}, {80, 1}, 0});
  expect_accepted<2, TypeParam>(9 * 81, {{9, 40}, {81, 1}, 0}, {{9, 40}, {81, 1}, 41});
}

TYPED_TEST(Aliasing, EvenAndOddColumnsAreAccepted) {
  expect_accepted<2, TypeParam>(9 * 80, {{9, 40}, {80, 2}, 0}, {{9, 40}, {80, 2}, 1});
}

TYPED_TEST(Aliasing, EvenAndOddRowsAreAccepted) {
  expect_accepted<2, TypeParam>(10 * 40, {{5, 40}, {80, 1}, 0}, {{5, 40}, {80, 1}, 40});
}

TYPED_TEST(Aliasing, InterleavedBlocksOfRank3AreAccepted) {
  // A(:, 0:2, :) and A(:, 2:4, :) of 3 x 4 x 30.
  expect_accepted<3, TypeParam>(3 * 4 * 30, {{3, 2, 30}, {120, 30, 1}, 0}, {{3, 2, 30}, {120, 30, 1}, 60});
  // A(:, :, 0:15) and A(:, :, 15:30).
  expect_accepted<3, TypeParam>(3 * 4 * 30, {{3, 4, 15}, {120, 30, 1}, 0}, {{3, 4, 15}, {120, 30, 1}, 15});
}

TYPED_TEST(Aliasing, BlocksOfAMatrixThatLiesTheOtherWayAreAccepted) {
  expect_accepted<2, TypeParam>(20 * 40, {{10, 40}, {1, 20}, 0}, {{10, 40}, {1, 20}, 10});
  expect_accepted<2, TypeParam>(20 * 40, {{20, 20}, {1, 20}, 0}, {{20, 20}, {1, 20}, 400});
}

TYPED_TEST(Aliasing, OneAfterTheOtherIsAccepted) {
  expect_accepted<1, TypeParam>(200, {{100}, {1}, 0}, {{100}, {1}, 100});
  expect_accepted<2, TypeParam>(200, {{2, 50}, {50, 1}, 100}, {{2, 50}, {50, 1}, 0});
}

TYPED_TEST(Aliasing, ShiftedByOneElementIsRefused) {
  expect_overlap_refused<2, TypeParam>(500, {{9, 40}, {50, 1}, 0}, {{9, 40}, {50, 1}, 1});
  expect_overlap_refused<2, TypeParam>(500, {{9, 40}, {50, 1}, 1}, {{9, 40}, {50, 1}, 0});
  expect_overlap_refused<1, TypeParam>(500, {{40}, {2}, 0}, {{40}, {2}, 2});
}

TYPED_TEST(Aliasing, ShiftedByARowIsRefused) {
  expect_overlap_refused<2, TypeParam>(500, {{9, 40}, {40, 1}, 0}, {{9, 40}, {40, 1}, 40});
  expect_overlap_refused<2, TypeParam>(500, {{9, 40}, {50, 1}, 0}, {{9, 40}, {50, 1}, 50});
}

TYPED_TEST(Aliasing, BlocksThatShareAColumnAreRefused) {
  expect_overlap_refused<2, TypeParam>(9 * 80, {{9, 41}, {80, 1}, 0}, {{9, 41}, {80, 1}, 39});
}

TYPED_TEST(Aliasing, SamePointerWithOtherStridesIsRefused) {
  expect_overlap_refused<2, TypeParam>(1600, {{40, 40}, {40, 1}, 0}, {{40, 40}, {1, 40}, 0});
  expect_overlap_refused<2, TypeParam>(1600, {{9, 40}, {40, 1}, 0}, {{9, 40}, {41, 1}, 0});
}

// (A smaller one is in test_lengths, for its kernels have to be compiled.)
TYPED_TEST(Aliasing, SamePointerWithALargerScalarIsRefused) {
  auto memory = filled<TypeParam>(2 * 30);
  const Layout layout = reference::right({2, 30});
  const auto y = block<float, 2>(memory, layout);
  expect_refused([&] { ks::softmax(TypeParam(), block<half_t, 2>(memory, layout), y); },
                 {"softmax", "overlap", "(2, 30)"});
  expect_refused([&] { ks::softmax(TypeParam(), block<bhalf_t, 2>(memory, layout), y); },
                 {"softmax", "overlap", "(2, 30)"});
  expect_unchanged(memory);
}

TYPED_TEST(Aliasing, LogsumexpIntoThePaddingOfItsInputIsAccepted) {
  auto memory = filled<TypeParam>(9 * 41);
  const auto before = memory.values();
  const Layout in{{9, 40}, {41, 1}, 0}, out{{9}, {41}, 40};
  ks::logsumexp(TypeParam(), block<float, 2>(memory, in), block<float, 1>(memory, out));
  TypeParam().fence();
  memory.download();
  reference::Problem problem{Operation::logsumexp, Scalar::float32, Scalar::float32, in.extents, -1, {}, {}};
  for (int r = 0; r < 9; ++r)
    problem.logits.insert(problem.logits.end(), &before[r * 41], &before[r * 41] + 40);
  std::string report;
  EXPECT_TRUE(reference::agrees(problem, out, memory.host(), report)) << report;
}

TYPED_TEST(Aliasing, LogsumexpIntoItsInputIsRefused) {
  auto memory = filled<TypeParam>(9 * 41);
  const auto x = block<float, 2>(memory, {{9, 40}, {41, 1}, 0});
  expect_refused(
      [&] {
        ks::logsumexp(TypeParam(), x, block<float, 1>(memory, {{9}, {41}, 39}));
      },
      {"logsumexp", "overlap", "(9, 40)", "(9)"});
  expect_refused(
      [&] {
        ks::logsumexp(TypeParam(), x, block<float, 1>(memory, {{9}, {1}, 0}));
      },
      {"logsumexp", "overlap", "(9, 40)", "(9)"});
  expect_unchanged(memory);
}

// --- the operands of transforms
// ------------------------------------------------------------------------------

template <class Exec>
struct WithOperands {
  Buffer<Exec> x{Scalar::float32, reference::right({6, 20})}, y{Scalar::float32, reference::right({6, 20})};
  WithOperands() {
    x.fill(random_values(Scalar::float32, 120));
    x.upload();
  }
  template <class Transform>
  void refused(const Transform& transform, const char* argument) {
    expect_refused(
        [&] { ks::softmax(Exec(), x.template view<float, 2>(), y.template view<float, 2>(), transform); },
        {"KokkosSoftmax::softmax", "overlap", argument, "(6, 20)"});
    expect_unchanged(x, y);
  }
};

TYPED_TEST(Aliasing, OutputOverABiasIsRefused) {
  WithOperands<TypeParam> w;
  w.refused(ks::bias(w.y.template view<float, 2>()), "bias");
  w.refused(ks::bias(block<float, 1>(w.y, {{20}, {1}, 100})), "bias");
}

TYPED_TEST(Aliasing, OutputOverAMaskIsRefused) {
  WithOperands<TypeParam> w;
  w.refused(ks::mask(block<bool, 1>(w.y, {{20}, {1}, 460})), "mask");
}

TYPED_TEST(Aliasing, OutputOverTemperaturesIsRefused) {
  WithOperands<TypeParam> w;
  w.refused(ks::temperature(block<float, 1>(w.y, {{6}, {1}, 3})), "temperature");
}

TYPED_TEST(Aliasing, OutputOverStatisticsIsRefused) {
  WithOperands<TypeParam> w;
  const auto apart = filled<TypeParam>(20);
  const auto good = block<float, 1>(apart, {{20}, {1}, 0}), bad = block<float, 1>(w.y, {{20}, {1}, 7});
  w.refused(ks::batch_norm(bad, good, good, good, 0.1), "mean");
  w.refused(ks::batch_norm(good, bad, good, good, 0.1), "var");
  w.refused(ks::batch_norm(good, good, bad, good, 0.1), "gamma");
  w.refused(ks::batch_norm(good, good, good, bad, 0.1), "beta");
}

TYPED_TEST(Aliasing, LogsumexpOverABiasIsRefused) {
  WithOperands<TypeParam> w;
  const auto lse = block<float, 1>(w.y, {{6}, {1}, 0});
  expect_refused(
      [&] {
        ks::logsumexp(TypeParam(), w.x.template view<float, 2>(), lse,
                      ks::bias(w.y.template view<float, 2>()));
      },
      {"logsumexp", "overlap", "bias"});
  expect_unchanged(w.x, w.y);
}

// Two operands that are only read may share memory; in place, the bias would be overwritten.
TYPED_TEST(Aliasing, ABiasThatIsTheInput) {
  WithOperands<TypeParam> w;
  const auto x = w.x.template view<float, 2>();
  ASSERT_NO_THROW(ks::softmax(TypeParam(), x, w.y.template view<float, 2>(), ks::bias(x)));
  TypeParam().fence();
  w.y.download();
  const auto values = w.x.values();
  reference::Problem problem{Operation::softmax,
                             Scalar::float32,
                             Scalar::float32,
                             {6, 20},
                             -1,
                             values,
                             {reference::scale({Scalar::float32, Scalar::float32}, 2)}};
  std::string report;
  EXPECT_TRUE(reference::agrees(problem, w.y.layout(), w.y.host(), report)) << report;
  expect_refused([&] { ks::softmax(TypeParam(), x, x, ks::bias(x)); }, {"softmax", "overlap", "bias"});
}

TYPED_TEST(Aliasing, EmptyViewsNeverMeet) {
  auto memory = filled<TypeParam>(40);
  const Layout none{{0, 20}, {20, 1}, 0};
  EXPECT_NO_THROW(ks::softmax(TypeParam(), block<float, 2>(memory, none), block<float, 2>(memory, none)));
}

}  // namespace
