// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What heads refuse, what a profiling tool sees of them, and how their implementations are forced.
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "../support/float_to_half.hpp"
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

// Without a BLAS Kokkos Kernels multiplies on the host by a kernel of its own: its label, and Kokkos'
// scratch.
template <class Exec>
constexpr bool multiplies_by_kokkos_kernels() {
#if defined(KOKKOSKERNELS_ENABLE_TPL_BLAS)
  return false;
#else
  return ks::impl::runs_on_host_v<Exec>;
#endif
}

template <class Exec>
void expect_quiet(const ToolRecorder::Records& records, const std::string& where, bool launches) {
  EXPECT_EQ(!records.kernels.empty(), launches) << where;
  for (const auto& label : records.fences) ADD_FAILURE() << where << ": fence " << label;
  for (const auto& label : records.copies) ADD_FAILURE() << where << ": copy " << label;
  for (const auto& [label, size] : records.allocations) {
    if (multiplies_by_kokkos_kernels<Exec>() && label.find("::scratch_mem") != std::string::npos) continue;
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
    expect_quiet<Exec>(recorder.records(), head_name(operation), true);
    for (const auto& label : recorder.records().kernels) {
      if (multiplies_by_kokkos_kernels<Exec>() && label.rfind("KokkosBlas::gemm", 0) == 0) continue;
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

// What a call needs beside its operands, by what GemmPlan says of it and what is allocated.
template <class Exec, class XS, class YS, class... Options>
std::size_t scratch_bytes(const LinearCase& c, const Options&... options) {
  const Exec exec;
  std::size_t bytes = 0;
  LinearOperands<XS, XS, YS, Exec> o(c);
  ks::impl::with_linear_problem(
      ks::impl::Operation::softmax, "test", exec, o.x_view(), o.w_view(), o.y_view(), options...,
      ks::Precision::ieee, [&](const auto& problem) {
        using Problem = std::remove_cvref_t<decltype(problem)>;
        bytes = ks::impl::GemmPlan<Exec, ks::impl::KokkosBlasGemm, Problem>(problem).bytes;
      });
  return bytes;
}

TYPED_TEST(LinearCalls, NoTemporaryWhereTheOutputHoldsTheLogits) {
  const typename TestFixture::Vector b("b", 300);
  const auto gelu = ks::bias(b) | ks::gelu();
  LinearCase c{.m = 200, .n = 300, .k = 100};
  for (const auto& layout : {reference::right({c.m, c.n}), reference::left({c.m, c.n}, 2, 5)}) {
    c.y = layout;
    EXPECT_EQ((scratch_bytes<TypeParam, float, float>(c, gelu)), 0u);
    EXPECT_EQ((scratch_bytes<TypeParam, double, double>(c, gelu)), 0u);
    // Statistics: three values a column, and moments for each chunk of rows.
    EXPECT_LT((scratch_bytes<TypeParam, float, float>(c, ks::bias(b) | ks::batch_norm_training(b, b, 0.1))),
              sizeof(float) * 200 * 300 / 2);
  }
  // Logits of 16 bits do not fit their output: those of a panel are beside it.
  c = {.m = 5000, .n = 300, .k = 1};
  EXPECT_GE((scratch_bytes<TypeParam, float, half_t>(c, gelu)), sizeof(float) * 1024 * 300);
  EXPECT_LE((scratch_bytes<TypeParam, float, half_t>(c, gelu)), sizeof(float) * 5000 * 300 + 4096);
}

// BLAS counts in int: longer strides are packed, more rows come in panels, and more of K or N is refused.
TYPED_TEST(LinearCalls, ExtentsBeyondAnInt) {
  using ks::impl::as_blas_matrix;
  const std::int64_t large = std::int64_t(1) << 31;
  const auto leading = [](std::int64_t rows, std::int64_t columns, std::int64_t row_stride,
                          std::int64_t column_stride) {
    return as_blas_matrix(ks::impl::Matrix<const float>{nullptr, rows, columns, row_stride, column_stride})
        .leading;
  };
  EXPECT_EQ(leading(3, 4, large - 1, 1), large - 1);
  EXPECT_EQ(leading(3, 4, large, 1), 0);
  EXPECT_EQ(leading(3, 4, 1, large), 0);
  EXPECT_EQ(leading(1, 4, large, 1), 4);
  {
    using Head = ks::impl::PlainHead<ks::impl::BoundIdentity>;
    using Problem = ks::impl::LinearProblem<float, float, float, Head>;
    const std::int64_t m = 3 * large;
    const Problem problem{{nullptr, m, 4, 4, 1},        {nullptr, 5, 4, 4, 1}, {nullptr, m, 5, 5, 1},
                          ks::impl::Operation::softmax, ks::Precision::ieee,   {}};
    const ks::impl::GemmPlan<TypeParam, ks::impl::KokkosBlasGemm, Problem> plan(problem);
    EXPECT_GT(plan.panel_rows, 0);
    EXPECT_LT(plan.panel_rows, large);
  }
  // All of K is one element.
  using Memory = typename TypeParam::memory_space;
  const Kokkos::View<float*, Memory> one("one", 1);
  const Kokkos::View<const float**, Kokkos::LayoutStride, Memory> long_row(
      one.data(), Kokkos::LayoutStride(1, 1, static_cast<std::size_t>(large), 0));
  const typename TestFixture::Floats out("out", 1, 1);
  const auto text =
      expect_refused([&] { ks::linear_softmax(TypeParam(), long_row, long_row, out); }, {"K", "int"});
  for (const auto& name : ks::linear_implementations<TypeParam>())
    EXPECT_NE(text.find(name), std::string::npos) << text;
}

// Rows that fill a kernel's vectors, with operands that can be read in vectors and with some that cannot.
TYPED_TEST(LinearCalls, OperandsInVectors) {
  const TypeParam exec;
  for (const std::int64_t n : {128, 1024, 2048, 5120}) {
    const LinearCase c{.m = 3, .n = n, .k = 5};
    for (const auto& [offset, stride] : {std::pair{0, 1}, std::pair{1, 1}, std::pair{0, 2}}) {
      const auto values = [&, from = offset, step = stride](std::uint64_t seed) {
        const Layout layout = reference::ordered({n}, {0}, step, 0, from);
        const auto content = random_values(Scalar::float32, n, 0.5, 1, seed);
        return std::pair(content, Buffer<TypeParam>(Scalar::float32, layout, &content));
      };
      const auto shift = values(3), center = values(4), spread = values(5), gamma = values(6),
                 beta = values(7);
      const auto view = [](const auto& operand) { return operand.second.template view<const float, 1>(); };
      const reference::Accumulator acc(Scalar::float32, Scalar::float32);
      check_head<float, float, float>(
          exec, c, all_rows(c.m),
          [&] {
            return ks::bias(view(shift)) |
                   ks::batch_norm(view(center), view(spread), view(gamma), view(beta), 1e-5) |
                   ks::gelu_tanh();
          },
          [&](const Logits&) {
            return Chain{
                reference::bias(acc, [&](Position p) { return shift.first[p.column]; }),
                reference::batch_norm(acc, center.first, spread.first, gamma.first, beta.first, 1e-5),
                reference::gelu_tanh(acc)};
          });
      if (::testing::Test::HasFailure()) return;
    }
  }
}

// W as it is kept for the other product is a view of it, not a copy.
TYPED_TEST(LinearCalls, TransposedWeights) {
  using Memory = typename TypeParam::memory_space;
  const TypeParam exec;
  const std::int64_t m = 4, n = 6, k = 5;
  const Kokkos::View<float**, Kokkos::LayoutRight, Memory> in("in", m, k), kept("kept", k, n),
      out("out", m, n);
  const auto x_host = Kokkos::create_mirror_view(in);
  const auto w_host = Kokkos::create_mirror_view(kept);
  for (int i = 0; i < k; ++i) {
    for (int r = 0; r < m; ++r) x_host(r, i) = static_cast<float>((r * 3 + i * 5) % 7 - 3);
    for (int c = 0; c < n; ++c) w_host(i, c) = static_cast<float>((c * 2 + i * 3) % 5 - 2);
  }
  Kokkos::deep_copy(in, x_host);
  Kokkos::deep_copy(kept, w_host);
  const Kokkos::View<const float**, Kokkos::LayoutLeft, Memory, Kokkos::MemoryTraits<Kokkos::Unmanaged>>
      weights(kept.data(), n, k);
  ks::linear_log_softmax(exec, in, weights, out);
  exec.fence();
  const auto got = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), out);
  for (int r = 0; r < m; ++r) {
    double sum = 0;
    std::vector<double> logit(n, 0.0);
    for (int c = 0; c < n; ++c) {
      for (int i = 0; i < k; ++i) logit[c] += x_host(r, i) * w_host(i, c);
      sum += std::exp(logit[c]);
    }
    for (int c = 0; c < n; ++c) EXPECT_NEAR(got(r, c), logit[c] - std::log(sum), 1e-5);
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
  expect_quiet<TypeParam>(recorder.records(), "smaller", true);
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
