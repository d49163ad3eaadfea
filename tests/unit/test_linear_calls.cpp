// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What heads refuse, what a profiling tool sees of them, and how their implementations are forced.
#include <string>
#include <vector>

#include "../support/linear_cases.hpp"
#include "../support/refusals.hpp"
#include "../support/tool_recorder.hpp"

namespace {

using namespace tests;

template <class Space>
class LinearCalls : public OnEveryBackend<Space> {
 protected:
  using Floats = Kokkos::View<float**, Kokkos::LayoutRight, typename Space::memory_space>;
  using Vector = Kokkos::View<float*, typename Space::memory_space>;
  Floats x{"x", 6, 4}, w{"w", 5, 4}, y{"y", 6, 5};
  Vector five{"five", 5}, mean{"mean", 5}, variance{"variance", 5}, four{"four", 4};

  template <class... Options>
  void refused(const Floats& x_, const Floats& w_, const Floats& y_, std::initializer_list<const char*> words,
               const Options&... options) {
    Kokkos::deep_copy(y_, 7.0f);
    Kokkos::deep_copy(mean, 8.0f);
    expect_refused([&] { ks::linear_softmax(Space(), x_, w_, y_, options...); }, words);
    expect_refused([&] { ks::linear_log_softmax(Space(), x_, w_, y_, options...); }, words);
    expect_refused([&] { ks::reserve(Space(), x_, w_, y_, options...); }, words);
    Space().fence();
    const auto y_host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), y_);
    for (std::size_t i = 0; i < y_host.size(); ++i) ASSERT_EQ(y_host.data()[i], 7.0f);
    const auto mean_host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), mean);
    for (std::size_t i = 0; i < mean_host.size(); ++i) ASSERT_EQ(mean_host.data()[i], 8.0f);
  }
};
TYPED_TEST_SUITE(LinearCalls, Backends, BackendName);

TYPED_TEST(LinearCalls, ExtentsThatDoNotFit) {
  using Matrix = typename TestFixture::Floats;
  this->refused(this->x, Matrix("w", 5, 3), this->y, {"KokkosSoftmax::", "X", "(6, 4)", "W", "(5, 3)", "K"});
  this->refused(this->x, this->w, Matrix("y", 6, 4), {"Y", "(6, 4)", "(5, 4)"});
  this->refused(this->x, this->w, Matrix("y", 5, 6), {"Y", "(5, 6)"});
  this->refused(Matrix("x", 0, 4), this->w, this->y, {"Y", "(6, 5)", "(0, 4)"});
}

TYPED_TEST(LinearCalls, OutputThatOverlaps) {
  using Matrix = typename TestFixture::Floats;
  const Matrix square("square", 5, 5), more("more", 5, 5);
  this->refused(square, more, square, {"overlaps", "X", "(5, 5)"});
  this->refused(more, square, square, {"overlaps", "W", "(5, 5)"});
  const Kokkos::View<float*, typename TypeParam::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>> row(
      this->y.data() + 3, 5);
  this->refused(this->x, this->w, this->y, {"overlaps", "bias", "(5)"}, ks::bias(row));
  this->refused(this->x, this->w, this->y, {"overlaps", "gamma"},
                ks::batch_norm_training(row, this->five, 1e-5));
}

TYPED_TEST(LinearCalls, StatisticsThatDoNotFit) {
  this->refused(this->x, this->w, this->y, {"mean", "(4)", "5"},
                ks::batch_norm(this->four, this->five, this->five, this->five, 0.1));
  this->refused(this->x, this->w, this->y, {"eps", "-0.1"},
                ks::batch_norm(this->five, this->five, this->five, this->five, -0.1));
  this->refused(this->x, this->w, this->y, {"gamma", "(4)", "5"},
                ks::batch_norm_training(this->four, this->five, 0.1));
  this->refused(this->x, this->w, this->y, {"beta", "(4)", "5"},
                ks::batch_norm_training(this->five, this->four, 0.1));
  this->refused(this->x, this->w, this->y, {"running_mean", "(4)"},
                ks::batch_norm_training(this->five, this->five, 0.1, this->four, this->variance, 0.1));
  this->refused(this->x, this->w, this->y, {"running_variance", "(4)"},
                ks::batch_norm_training(this->five, this->five, 0.1, this->mean, this->four, 0.1));
  this->refused(this->x, this->w, this->y, {"eps", "-0.1"},
                ks::batch_norm_training(this->five, this->five, -0.1));
  this->refused(this->x, this->w, this->y, {"eps"},
                ks::batch_norm_training(this->five, this->five, reference::nan));
  this->refused(this->x, this->w, this->y, {"momentum", "2"},
                ks::batch_norm_training(this->five, this->five, 0.1, this->mean, this->variance, 2));
  this->refused(this->x, this->w, this->y, {"bias", "(4)"},
                ks::bias(this->four) | ks::batch_norm_training(this->five, this->five, 0.1));
  this->refused(this->x, this->w, this->y, {"bias", "(4)"},
                ks::batch_norm_training(this->five, this->five, 0.1) | ks::bias(this->four));
}

TYPED_TEST(LinearCalls, RunningStatisticsThatOverlap) {
  this->refused(this->x, this->w, this->y, {"running_variance", "running_mean"},
                ks::batch_norm_training(this->five, this->five, 0.1, this->mean, this->mean, 0.1));
  this->refused(this->x, this->w, this->y, {"running_mean", "gamma"},
                ks::batch_norm_training(this->mean, this->five, 0.1, this->mean, this->variance, 0.1));
  const Kokkos::View<float*, typename TypeParam::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>> of_w(
      this->w.data(), 5);
  this->refused(this->x, this->w, this->y, {"running_mean", "W"},
                ks::batch_norm_training(this->five, this->five, 0.1, of_w, this->variance, 0.1));
}

TYPED_TEST(LinearCalls, BatchOfOne) {
  using Matrix = typename TestFixture::Floats;
  this->refused(Matrix("x", 1, 4), this->w, Matrix("y", 1, 5), {"one row", "(1, 4)"},
                ks::batch_norm_training(this->five, this->five, 0.1));
}

TYPED_TEST(LinearCalls, ColumnStatistics) {
  const TypeParam exec;
  expect_refused([&] { ks::column_statistics(exec, this->y, this->four, this->variance); },
                 {"mean", "(4)", "5"});
  expect_refused([&] { ks::column_statistics(exec, this->y, this->mean, this->four); },
                 {"variance", "(4)", "5"});
  expect_refused([&] { ks::column_statistics(exec, this->y, this->mean, this->mean); },
                 {"overlaps", "variance"});
  expect_refused([&] { ks::column_statistics(exec, this->five, this->mean, this->variance); },
                 {"x", "(5)", "matrix"});
}

void expect_quiet(const ToolRecorder::Records& records, const std::string& where, bool launches) {
  EXPECT_EQ(!records.kernels.empty(), launches) << where;
  for (const auto& label : records.fences) ADD_FAILURE() << where << ": fence " << label;
  for (const auto& label : records.copies) ADD_FAILURE() << where << ": copy " << label;
  for (const auto& [label, size] : records.allocations) {
    ADD_FAILURE() << where << ": allocation " << label << " of " << size << " bytes";
  }
  EXPECT_EQ(records.open_regions, 0) << where;
}

template <class XS, class YS, class Exec, class... Options>
void expect_quiet_once_reserved(const Exec& exec, const LinearCase& c, const Options&... options) {
  LinearOperands<XS, XS, YS, Exec> o(c);
  ks::reserve(exec, o.x_view(), o.w_view(), o.y_view(), options...);
  exec.fence();
  for (auto operation : head_operations) {
    ToolRecorder recorder;
    call_head(operation, exec, o.x_view(), o.w_view(), o.y_view(), options...);
    expect_quiet(recorder.records(), head_name(operation), true);
    for (const auto& label : recorder.records().kernels) {
      EXPECT_EQ(label.rfind("KokkosSoftmax::" + head_name(operation), 0) == 0 ||
                    label.rfind(std::string("KokkosSoftmax::") + reference::name(operation), 0) == 0,
                true)
          << label;
    }
    ASSERT_GE(recorder.records().regions.size(), 1u);
    EXPECT_EQ(recorder.records().regions[0], "KokkosSoftmax::" + head_name(operation));
    exec.fence();
  }
}

TYPED_TEST(LinearCalls, AReservedCallIsQuiet) {
  if (TypeParam().concurrency() < 2) GTEST_SKIP() << "too few threads to divide";
  for (int i = 0; i < 4; ++i) {
    const auto parts = Kokkos::Experimental::partition_space(TypeParam(), 1, 1);
    const auto& exec = parts[1];
    const typename TestFixture::Vector b("b", 90), running("running", 90), running_too("running_too", 90);
    if (i == 0)
      expect_quiet_once_reserved<float, float>(exec, {.m = 20, .n = 90, .k = 30}, ks::bias(b) | ks::gelu());
    if (i == 1) expect_quiet_once_reserved<half_t, half_t>(exec, {.m = 20, .n = 90, .k = 30});
    if (i == 2) {
      expect_quiet_once_reserved<float, float>(
          exec, {.m = 20, .n = 90, .k = 30},
          ks::bias(b) | ks::batch_norm_training(b, b, 0.1, running, running_too, 0.1) | ks::scale(2));
    }
    // Rows so long that their softmax takes scratch of its own.
    if (i == 3) expect_quiet_once_reserved<bhalf_t, half_t>(exec, {.m = 3, .n = 140000, .k = 2});
  }
}

TYPED_TEST(LinearCalls, RowsThatAreSplit) {
  const TypeParam exec;
  check_plain<float, float, half_t>(exec, {.m = 3, .n = 140000, .k = 2}, all_rows(3));
  check_plain<float, float, float>(exec, {.m = 3, .n = 140000, .k = 2}, all_rows(3));
}

TYPED_TEST(LinearCalls, SmallerExtentsAreWarmToo) {
  const TypeParam exec;
  LinearOperands<half_t, half_t, half_t, TypeParam> large({.m = 50, .n = 90, .k = 30}),
      little({.m = 49, .n = 80, .k = 30});
  ks::linear_softmax(exec, large.x_view(), large.w_view(), large.y_view());
  exec.fence();
  ToolRecorder recorder;
  ks::linear_softmax(exec, little.x_view(), little.w_view(), little.y_view());
  expect_quiet(recorder.records(), "smaller", true);
}

TYPED_TEST(LinearCalls, ReserveLeavesTheOperandsAlone) {
  const TypeParam exec;
  Kokkos::deep_copy(this->y, 3.0f);
  Kokkos::deep_copy(this->mean, 2.0f);
  ks::reserve(exec, this->x, this->w, this->y,
              ks::batch_norm_training(this->five, this->five, 0.1, this->mean, this->variance, 0.1));
  exec.fence();
  const auto y_host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), this->y);
  const auto mean_host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), this->mean);
  EXPECT_EQ(y_host(0, 0), 3.0f);
  EXPECT_EQ(y_host(5, 4), 3.0f);
  EXPECT_EQ(mean_host(0), 2.0f);
}

TYPED_TEST(LinearCalls, EmptyCallsLaunchNothing) {
  using Matrix = typename TestFixture::Floats;
  const TypeParam exec;
  const Matrix no_rows("x", 0, 4), none("none", 0, 4), nothing("y", 0, 5), no_columns("y", 6, 0);
  ToolRecorder recorder;
  ks::linear_softmax(exec, no_rows, this->w, nothing);
  ks::linear_softmax(exec, this->x, none, no_columns);
  EXPECT_TRUE(recorder.records().kernels.empty());
}

TYPED_TEST(LinearCalls, ImplementationsAndForcing) {
  const TypeParam exec;
  const auto names = ks::linear_implementations<TypeParam>();
  ASSERT_FALSE(names.empty());
  EXPECT_EQ(names.back(), "blas_linear");
  {
    const ks::ScopedImplementation force("linear_softmax=no_such_kernel");
    const auto text =
        expect_refused([&] { ks::linear_softmax(exec, this->x, this->w, this->y); }, {"no_such_kernel"});
    for (const auto& name : names) EXPECT_NE(text.find(name), std::string::npos) << text;
    EXPECT_NO_THROW(ks::linear_log_softmax(exec, this->x, this->w, this->y));
  }
  {
    // A name alone is for the head, not for the softmax within.
    const ks::ScopedImplementation force("blas_linear");
    EXPECT_NO_THROW(ks::linear_softmax(exec, this->x, this->w, this->y));
    EXPECT_STREQ(ks::last_implementation(), "blas_linear");
  }
  {
    const ks::ScopedImplementation force("linear_softmax/softmax=team_rows");
    EXPECT_NO_THROW(ks::linear_softmax(exec, this->x, this->w, this->y));
  }
  {
    const ks::ScopedImplementation force("linear_softmax/softmax=no_such_kernel");
    EXPECT_THROW(ks::linear_softmax(exec, this->x, this->w, this->y), std::invalid_argument);
  }
  exec.fence();
}

}  // namespace
