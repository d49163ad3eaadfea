// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// One test for each kind of bad input: the text names the function, the argument and the extents; nothing is
// launched. Overlaps are in test_aliasing.cpp.
#include <string>

#include "../support/cases.hpp"
#include "../support/refusals.hpp"

namespace {

using namespace tests;

template <class Space>
class BadInput : public OnEveryBackend<Space> {
 protected:
  BadInput() {
    x.fill(random_values(Scalar::float32, 3 * 5));
    x.upload();
  }
  ~BadInput() override { expect_unchanged(x, y, other, lse); }

  auto good_x() const { return x.template view<float, 2>(); }
  auto good_y() const { return y.template view<float, 2>(); }
  auto good_lse() const { return lse.template view<float, 1>(); }
  // A view of rank 1 with this many values.
  template <class T = float>
  auto values(std::int64_t count) const {
    return StridedView<T, 1, Space>(static_cast<T*>(other.device()),
                                    kokkos_layout(reference::right({count})));
  }
  template <class T = float>
  auto matrix(std::int64_t rows, std::int64_t columns) const {
    return StridedView<T, 2, Space>(static_cast<T*>(other.device()),
                                    kokkos_layout(reference::right({rows, columns})));
  }

  // All three functions must refuse the transform.
  template <class Transform>
  void refused(const Transform& transform, std::initializer_list<const char*> words) {
    expect_refused([&] { ks::softmax(Space(), good_x(), good_y(), transform); }, words);
    expect_refused([&] { ks::log_softmax(Space(), good_x(), good_y(), ks::axis(1), transform); }, words);
    expect_refused([&] { ks::logsumexp(Space(), good_x(), good_lse(), transform); }, words);
    expect_refused([&] { ks::softmax(good_x(), good_y(), transform); }, {"KokkosSoftmax::softmax"});
  }

  Buffer<Space> x{Scalar::float32, reference::right({3, 5})}, y{Scalar::float32, reference::right({3, 5})},
      other{Scalar::float32, reference::right({100})}, lse{Scalar::float32, reference::right({3})};
};
TYPED_TEST_SUITE(BadInput, Backends, BackendName);

TYPED_TEST(BadInput, OutputOfOtherExtents) {
  const TypeParam exec{};
  for (auto [rows, columns] : {std::pair{3, 4}, {4, 5}, {5, 3}, {0, 5}}) {
    const auto wrong = this->matrix(rows, columns);
    const std::string extents = "(" + std::to_string(rows) + ", " + std::to_string(columns) + ")";
    expect_refused([&] { ks::softmax(exec, this->good_x(), wrong); },
                   {"KokkosSoftmax::softmax", "y", extents.c_str(), "(3, 5)"});
    expect_refused([&] { ks::log_softmax(exec, this->good_x(), wrong, ks::axis(0)); },
                   {"KokkosSoftmax::log_softmax", "y", extents.c_str(), "(3, 5)"});
  }
}

TYPED_TEST(BadInput, LogsumexpOfOtherExtents) {
  const TypeParam exec{};
  expect_refused([&] { ks::logsumexp(exec, this->good_x(), this->values(4)); },
                 {"KokkosSoftmax::logsumexp", "lse", "(4)", "(3, 5)"});
  expect_refused([&] { ks::logsumexp(exec, this->good_x(), this->values(3), ks::axis(0)); },
                 {"KokkosSoftmax::logsumexp", "lse", "(3)", "(3, 5)"});
}

TYPED_TEST(BadInput, AxisOutOfRange) {
  const TypeParam exec{};
  for (int axis : {2, 7, -3, -100}) {
    const std::string text = std::to_string(axis);
    expect_refused([&] { ks::softmax(exec, this->good_x(), this->good_y(), ks::axis(axis)); },
                   {"KokkosSoftmax::softmax", "axis", text.c_str(), "(3, 5)"});
    expect_refused([&] { ks::log_softmax(this->good_x(), this->good_y(), ks::axis(axis)); },
                   {"KokkosSoftmax::log_softmax", "axis", text.c_str(), "(3, 5)"});
    expect_refused([&] { ks::logsumexp(exec, this->good_x(), this->good_lse(), ks::axis(axis)); },
                   {"KokkosSoftmax::logsumexp", "axis", text.c_str(), "(3, 5)"});
    expect_refused([&] { ks::reserve(exec, this->good_x(), this->good_y(), ks::axis(axis)); },
                   {"KokkosSoftmax::", "axis", text.c_str(), "(3, 5)"});
  }
}

TYPED_TEST(BadInput, AxisOutOfRangeOfAnEmptyView) {
  const TypeParam exec{};
  const auto empty = this->matrix(0, 5);
  expect_refused([&] { ks::softmax(exec, empty, empty, ks::axis(2)); }, {"softmax", "axis", "2", "(0, 5)"});
}

TYPED_TEST(BadInput, DynamicRanksThatDiffer) {
  using View = Kokkos::DynRankView<float, typename TypeParam::memory_space>;
  const TypeParam exec{};
  const View two("two", 3, 5), three("three", 3, 5, 1), zero("zero");
  expect_refused([&] { ks::softmax(exec, two, three); },
                 {"KokkosSoftmax::softmax", "y", "(3, 5)", "(3, 5, 1)"});
  expect_refused([&] { ks::logsumexp(exec, three, two, ks::axis(0)); },
                 {"KokkosSoftmax::logsumexp", "lse", "(3, 5)", "(3, 5, 1)"});
  expect_refused([&] { ks::softmax(exec, zero, zero); }, {"KokkosSoftmax::softmax", "x", "rank 0"});
}

TYPED_TEST(BadInput, MaskOfAnotherShape) {
  this->refused(ks::mask(this->template matrix<bool>(5, 3)), {"KokkosSoftmax::", "mask", "(5, 3)", "(3, 5)"});
  this->refused(ks::mask(this->template matrix<bool>(3, 4)), {"mask", "(3, 4)", "(3, 5)"});
  this->refused(ks::mask(this->template values<bool>(3)), {"mask", "(3)", "(3, 5)"});
}

TYPED_TEST(BadInput, BiasOfAnotherShape) {
  this->refused(ks::bias(this->matrix(2, 5)), {"KokkosSoftmax::", "bias", "(2, 5)", "(3, 5)"});
  this->refused(ks::bias(this->values(3)), {"bias", "(3)", "(3, 5)"});
}

TYPED_TEST(BadInput, TemperatureOfAnotherShape) {
  this->refused(ks::temperature(this->values(5)), {"KokkosSoftmax::", "temperature", "(5)", "(3, 5)"});
  this->refused(ks::temperature(this->matrix(3, 5)), {"temperature", "(3, 5)"});
}

TYPED_TEST(BadInput, TemperatureThatIsNotPositive) {
  const TypeParam exec{};
  for (double bad : {0.0, -1.0, reference::nan, -0.0}) {
    const std::vector<double> temperatures{1, bad, 2};
    const Buffer<TypeParam> buffer(Scalar::float32, reference::right({3}), &temperatures);
    const auto view = buffer.template view<float, 1>();
    expect_refused(
        [&] { ks::softmax(exec, this->good_x(), this->good_y(), ks::temperature(view, ks::checked)); },
        {"KokkosSoftmax::softmax", "temperature", "positive", "3"}, "KokkosSoftmax::check_temperature");
  }
}

TYPED_TEST(BadInput, StatisticsOfAnotherLength) {
  const auto good = this->values(5), bad = this->values(3);
  this->refused(ks::batch_norm(bad, good, good, good, 0.1), {"KokkosSoftmax::", "mean", "(3)", "5"});
  this->refused(ks::batch_norm(good, bad, good, good, 0.1), {"var", "(3)", "5"});
  this->refused(ks::batch_norm(good, good, bad, good, 0.1), {"gamma", "(3)", "5"});
  this->refused(ks::batch_norm(good, good, good, bad, 0.1), {"beta", "(3)", "5"});
}

TYPED_TEST(BadInput, EpsilonOfBatchNormNegative) {
  const auto good = this->values(5);
  this->refused(ks::batch_norm(good, good, good, good, -0.1), {"KokkosSoftmax::", "eps", "-0.1"});
  this->refused(ks::batch_norm(good, good, good, good, reference::nan), {"eps"});
}

TYPED_TEST(BadInput, CausalWithoutADimensionBeforeTheAxis) {
  expect_refused([&] { ks::softmax(TypeParam(), this->good_x(), this->good_y(), ks::axis(0), ks::causal()); },
                 {"KokkosSoftmax::softmax", "causal", "(3, 5)"});
}

// A bad transform is found wherever it stands in a chain.
TYPED_TEST(BadInput, BadTransformWithinAChain) {
  const auto bad = ks::bias(this->values(3));
  this->refused(ks::scale(2) | bad | ks::gelu(), {"bias", "(3)", "(3, 5)"});
  this->refused(ks::mask(this->template matrix<bool>(3, 5)) | bad, {"bias", "(3)", "(3, 5)"});
  this->refused(ks::mask(this->template values<bool>(3)) | ks::bias(this->values(5)),
                {"mask", "(3)", "(3, 5)"});
}

TYPED_TEST(BadInput, ViewsWithoutMemory) {
  const TypeParam exec{};
  const StridedView<float, 2, TypeParam> nothing(nullptr, kokkos_layout(reference::right({3, 5})));
  expect_refused([&] { ks::softmax(exec, nothing, this->good_y()); },
                 {"KokkosSoftmax::softmax", "x", "(3, 5)"});
  expect_refused([&] { ks::softmax(exec, this->good_x(), nothing); },
                 {"KokkosSoftmax::softmax", "y", "(3, 5)"});
  expect_refused([&] { ks::softmax(exec, this->good_x(), this->good_y(), ks::bias(nothing)); },
                 {"KokkosSoftmax::softmax", "bias", "(3, 5)"});
}

TYPED_TEST(BadInput, OutputThatMeetsItself) {
  const TypeParam exec{};
  const StridedView<float, 2, TypeParam> repeated(static_cast<float*>(this->other.device()),
                                                  kokkos_layout(Layout{{3, 5}, {0, 1}}));
  expect_refused([&] { ks::softmax(exec, this->good_x(), repeated); },
                 {"KokkosSoftmax::softmax", "y", "(3, 5)"});
  const StridedView<float, 1, TypeParam> one(static_cast<float*>(this->other.device()),
                                             kokkos_layout(Layout{{3}, {0}}));
  expect_refused([&] { ks::logsumexp(exec, this->good_x(), one); },
                 {"KokkosSoftmax::logsumexp", "lse", "(3)"});
}

// A view whose type says the device's memory and whose pointer does not: only the run time can tell.
TYPED_TEST(BadInput, MemoryThatTheSpaceCannotReach) {
  if (Kokkos::SpaceAccessibility<TypeParam, Kokkos::HostSpace>::accessible) {
    GTEST_SKIP() << TypeParam::name() << " reaches all memory of the host";
  }
  float on_host[15] = {};
  const TypeParam exec{};
  const StridedView<float, 2, TypeParam> wrong(on_host, kokkos_layout(reference::right({3, 5})));
  expect_refused([&] { ks::softmax(exec, wrong, this->good_y()); },
                 {"KokkosSoftmax::softmax", "x", "(3, 5)", "reach"});
  expect_refused([&] { ks::softmax(exec, this->good_x(), wrong); },
                 {"KokkosSoftmax::softmax", "y", "(3, 5)", "reach"});
  expect_refused([&] { ks::softmax(exec, this->good_x(), this->good_y(), ks::bias(wrong)); },
                 {"KokkosSoftmax::softmax", "bias", "(3, 5)", "reach"});
}

}  // namespace
