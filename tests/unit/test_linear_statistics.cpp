// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The head with batch statistics, and the statistics of columns as a step of their own.
#include <cmath>
#include <string>
#include <vector>

#include "../support/linear_cases.hpp"

namespace {

using namespace tests;

template <class Space>
class LinearStatistics : public OnEveryBackend<Space> {};
TYPED_TEST_SUITE(LinearStatistics, Backends, BackendName);

struct ColumnMoments {
  std::vector<long double> first,
      from_first;                     // the first value of the column, and the mean's distance from it
  std::vector<long double> variance;  // biased
  long double mean(std::int64_t c) const { return first[c] + from_first[c]; }
  std::vector<long double> error;  // the largest error of a value of the column
};

// Of values rounded to the accumulator.
ColumnMoments moments(const std::vector<double>& value, const std::vector<double>& error, std::int64_t rows,
                      std::int64_t columns) {
  ColumnMoments result;
  for (std::int64_t c = 0; c < columns; ++c) {
    const long double first = value[c];
    long double sum = 0, squares = 0, largest = 0;
    for (std::int64_t r = 0; r < rows; ++r) {
      sum += value[r * columns + c] - first;
      largest = std::max<long double>(largest, error[r * columns + c]);
    }
    const long double from_first = sum / rows;
    for (std::int64_t r = 0; r < rows; ++r) {
      const long double difference = (value[r * columns + c] - first) - from_first;
      squares += difference * difference;
    }
    result.first.push_back(first);
    result.from_first.push_back(from_first);
    result.variance.push_back(squares / rows);
    result.error.push_back(largest);
  }
  return result;
}

// gamma and beta and what the reference makes of them.
template <class T, class Exec>
struct Training {
  std::int64_t n;
  double eps;
  std::vector<double> bias, gamma, beta, mean0, variance0;
  Buffer<Exec> bias_buffer, gamma_buffer, beta_buffer, mean, variance;

  Training(std::int64_t n_, double eps_, double offset = 0)
      : n(n_),
        eps(eps_),
        bias(values(offset == 0 ? -1 : offset, offset == 0 ? 1 : offset, 21)),
        gamma(values(0.5, 2, 22)),
        beta(values(-1, 1, 23)),
        mean0(values(-1, 1, 24)),
        variance0(values(0.5, 1, 25)),
        bias_buffer(scalar_of<T>, column(), &bias),
        gamma_buffer(scalar_of<T>, column(), &gamma),
        beta_buffer(scalar_of<T>, column(), &beta),
        mean(scalar_of<T>, column(), &mean0),
        variance(scalar_of<T>, column(), &variance0) {}

  std::vector<double> values(double from, double to, std::uint64_t seed) const {
    return random_values(scalar_of<T>, n, from, to, seed);
  }
  Layout column() const {
    return reference::ordered({n}, {0}, 2, 0, 1);
  }  // a stride of 2: padding is watched
  static auto in(const Buffer<Exec>& buffer) { return buffer.template view<const T, 1>(); }
  static auto out(const Buffer<Exec>& buffer) { return buffer.template view<T, 1>(); }

  auto head(double momentum) const {
    return ks::bias(in(bias_buffer)) |
           ks::batch_norm_training(in(gamma_buffer), in(beta_buffer), eps, out(mean), out(variance),
                                   momentum) |
           ks::scale(1.5);
  }

  std::vector<double> shifted(const std::vector<double>& logits, bool is_double) const {
    std::vector<double> all = logits;
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i] += bias[i % n];
      if (!is_double) all[i] = static_cast<float>(all[i]);
    }
    return all;
  }

  Chain chain(reference::Accumulator acc, const Logits& logits, std::int64_t rows) const {
    const auto m = moments(shifted(logits.value, acc.is_double), logits.error, rows, n);
    const auto normalize = [=, *this](Logit logit, Position p) {
      const auto c = p.column;
      const long double deviation = std::sqrt(m.variance[c] + static_cast<long double>(eps));
      const long double factor = deviation == 0 ? 0 : gamma[c] / deviation;
      const long double from_mean = (logit.value - m.first[c]) - m.from_first[c];
      const long double value = from_mean * factor + beta[c];
      const long double relative = deviation == 0 ? 0 : m.error[c] / deviation;
      logit.error = (logit.error + m.error[c]) * std::fabs(factor) +
                    std::fabs(from_mean * factor) * relative +
                    6 * acc.epsilon() * (std::fabs(from_mean * factor) + std::fabs(beta[c]));
      logit.value = acc.round(value);
      return logit;
    };
    return {reference::bias(acc, [this](Position p) { return bias[p.column]; }), normalize,
            reference::scale(acc, 1.5)};
  }

  using Logit = reference::Logit;

  void check_running(double momentum, const std::vector<double>& values, const std::vector<double>& error,
                     std::int64_t rows, int updates) {
    mean.download();
    variance.download();
    EXPECT_TRUE(mean.padding_untouched() && variance.padding_untouched());
    const auto m = moments(values, error, rows, n);
    const auto got_mean = mean.values(), got_variance = variance.values();
    for (std::int64_t c = 0; c < n; ++c) {
      const long double unbiased = m.variance[c] * rows / (rows - 1);
      long double want_mean = mean0[c], want_variance = variance0[c];
      for (int i = 0; i < updates; ++i) {
        want_mean = (1 - momentum) * want_mean + momentum * m.mean(c);
        want_variance = (1 - momentum) * want_variance + momentum * unbiased;
      }
      const double rounding = 4 * (scalar_of<T> == Scalar::float64 ? 0x1p-53 : 0x1p-24);
      const long double deviation = std::sqrt(m.variance[c]);
      EXPECT_NEAR(got_mean[c], static_cast<double>(want_mean),
                  static_cast<double>(rounding * (std::fabs(want_mean) + std::fabs(m.mean(c))) + m.error[c]))
          << "column " << c;
      EXPECT_NEAR(got_variance[c], static_cast<double>(want_variance),
                  static_cast<double>(rounding * (want_variance + unbiased) +
                                      3 * m.error[c] * (deviation + m.error[c])))
          << "column " << c;
    }
  }
};

template <class XS, class YS, class T, class Exec>
void check_training(const Exec& exec, const LinearCase& c, double eps = 1e-5, double offset = 0) {
  for (auto operation : head_operations) {
    for (const auto& name : linear_implementations_and_default<Exec, XS, XS, YS>()) {
      std::optional<ks::ScopedImplementation> forced;
      if (!name.empty()) forced.emplace(name);
      Training<T, Exec> training(c.n, eps, offset);
      LinearOperands<XS, XS, YS, Exec> o(c);
      const reference::Accumulator acc(o.accumulator(), scalar_of<YS>);
      const double momentum = 0.25;
      for (int i = 0; i < 2; ++i) {
        call_head(operation, exec, o.x_view(), o.w_view(), o.y_view(), training.head(momentum), c.precision);
      }
      exec.fence();
      o.check(operation, all_rows(c.m),
              [&](const Logits& logits) { return training.chain(acc, logits, c.m); });
      const Logits& logits = o.logits_of(all_rows(c.m));
      training.check_running(momentum, training.shifted(logits.value, acc.is_double), logits.error, c.m, 2);
    }
  }
}

TYPED_TEST(LinearStatistics, Heads) {
  const TypeParam exec;
  for (const std::int64_t m : {2, 3, 63, 64, 65, 199}) {
    for (const std::int64_t n : {1, 2, 65, 300}) {
      check_training<float, float, float>(exec, {.m = m, .n = n, .k = 31});
    }
  }
  check_training<double, double, double>(exec, {.m = 130, .n = 70, .k = 31});
  check_training<half_t, half_t, float>(exec, {.m = 130, .n = 70, .k = 31});
  check_training<bhalf_t, float, float>(exec, {.m = 130, .n = 70, .k = 31});
  check_training<float, float, double>(exec, {.m = 130, .n = 70, .k = 31});
}

TYPED_TEST(LinearStatistics, ManyRows) {
  const TypeParam exec;
  check_training<float, float, float>(exec, {.m = 9000, .n = 33, .k = 5});
  check_training<float, half_t, float>(exec, {.m = 9000, .n = 3, .k = 5});
}

TYPED_TEST(LinearStatistics, Layouts) {
  const TypeParam exec;
  LinearCase c{.m = 70, .n = 80, .k = 12};
  c.y = reference::left({c.m, c.n}, 3, 1);
  check_training<float, float, float>(exec, c);
  c.y = reference::ordered({c.m, c.n}, {1, 0}, 2, 1, 1);
  check_training<float, float, float>(exec, c);
}

// The columns' values are 1e10 and a little, as exactly as their type holds that.
TYPED_TEST(LinearStatistics, LargeOffsets) {
  const TypeParam exec;
  check_training<float, float, float>(exec, {.m = 199, .n = 70, .k = 64, .integers = true}, 1e-5, 65536);
  check_training<double, double, double>(exec, {.m = 199, .n = 70, .k = 64, .integers = true}, 1e-5, 1e10);
  check_training<float, float, double>(exec, {.m = 199, .n = 70, .k = 64, .integers = true}, 1e-5, 8388608);
}

TYPED_TEST(LinearStatistics, NoSpreadGivesBeta) {
  const TypeParam exec;
  const std::int64_t m = 100, n = 40;
  for (const double eps : {1e-5, 0.0}) {
    Training<float, TypeParam> training(n, eps);
    // K = 0: every logit is the bias of its column.
    LinearOperands<float, float, float, TypeParam> o({.m = m, .n = n, .k = 0});
    ks::linear_log_softmax(exec, o.x_view(), o.w_view(), o.y_view(), training.head(0.5));
    exec.fence();
    o.check(Operation::log_softmax, all_rows(m), [&](const Logits&) {
      return Chain{[&](reference::Logit logit, Position p) {
        logit.value = static_cast<float>(training.beta[p.column] * 1.5);
        return logit;
      }};
    });
  }
}

TYPED_TEST(LinearStatistics, ABatchOfOneIsRefusedAndAnEmptyOneIsNothing) {
  const TypeParam exec;
  const std::int64_t n = 4;
  Training<float, TypeParam> training(n, 1e-5);
  LinearOperands<float, float, float, TypeParam> one({.m = 1, .n = n, .k = 3}),
      none({.m = 0, .n = n, .k = 3});
  try {
    ks::linear_softmax(exec, one.x_view(), one.w_view(), one.y_view(), training.head(0.5));
    ADD_FAILURE() << "accepted";
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("more than one row"), std::string::npos) << error.what();
  }
  ks::linear_softmax(exec, none.x_view(), none.w_view(), none.y_view(), training.head(0.5));
  exec.fence();
  one.y.download();
  training.mean.download();
  training.variance.download();
  EXPECT_TRUE(one.y.unchanged() && training.mean.unchanged() && training.variance.unchanged());
}

// The step may stand anywhere in a chain, or alone, and need not keep running statistics.
TYPED_TEST(LinearStatistics, Spellings) {
  const TypeParam exec;
  const std::int64_t m = 20, n = 30;
  Training<float, TypeParam> t(n, 1e-5);
  LinearOperands<float, float, float, TypeParam> o({.m = m, .n = n, .k = 6});
  const auto step = ks::batch_norm_training(t.in(t.gamma_buffer), t.in(t.beta_buffer), t.eps);
  const reference::Accumulator acc(Scalar::float32, Scalar::float32);
  const auto run = [&](const auto& head, bool with_bias, bool with_scale) {
    ks::linear_softmax(exec, o.x_view(), o.w_view(), o.y_view(), head);
    exec.fence();
    Training<float, TypeParam> as_reference(n, 1e-5);
    if (!with_bias) std::fill(as_reference.bias.begin(), as_reference.bias.end(), 0.0);
    o.check(Operation::softmax, all_rows(m), [&](const Logits& logits) {
      Chain chain = as_reference.chain(acc, logits, m);
      if (!with_scale) chain.pop_back();
      return chain;
    });
  };
  run(step, false, false);
  run(ks::bias(t.in(t.bias_buffer)) | step, true, false);
  run(step | ks::scale(1.5), false, true);
  run(ks::bias(t.in(t.bias_buffer)) | (step | ks::scale(1.5)), true, true);
  run(AsTheyAre{} | step | AsTheyAre{} | ks::scale(1.5), false, true);
}

TYPED_TEST(LinearStatistics, SameBitsEachTime) {
  const TypeParam exec;
  Training<float, TypeParam> t(300, 1e-5);
  LinearOperands<float, float, float, TypeParam> o({.m = 500, .n = 300, .k = 20});
  std::vector<unsigned char> first;
  for (int i = 0; i < 5; ++i) {
    ks::linear_softmax(exec, o.x_view(), o.w_view(), o.y_view(), t.head(0.1));
    exec.fence();
    o.y.download();
    const std::vector<unsigned char> bytes(o.y.host(), o.y.host() + 500 * 300 * sizeof(float));
    if (i == 0) first = bytes;
    EXPECT_EQ(bytes, first);
  }
}

// --- column_statistics
// --------------------------------------------------------------------------------------

template <class In, class Out, class Exec>
void check_columns(const Exec& exec, std::int64_t m, std::int64_t n, const Layout& layout, double offset,
                   double spread) {
  const auto values = random_values(scalar_of<In>, m * n, offset - spread, offset + spread, 5);
  Buffer<Exec> x(scalar_of<In>, layout, &values), mean(scalar_of<Out>, reference::right({n})),
      variance(scalar_of<Out>, reference::right({n}));
  ks::column_statistics(exec, x.template view<const In, 2>(), mean.template view<Out, 1>(),
                        variance.template view<Out, 1>());
  exec.fence();
  mean.download();
  variance.download();
  const auto want = moments(values, std::vector<double>(values.size(), 0.0), m, n);
  const double rounding = scalar_of<Out> == Scalar::float64   ? 1e-13
                          : scalar_of<Out> == Scalar::float32 ? 0x1p-23
                                                              : 0x1p-8;
  const auto got_mean = mean.values(), got_variance = variance.values();
  for (std::int64_t c = 0; c < n; ++c) {
    const auto w = static_cast<double>(want.mean(c)), v = static_cast<double>(want.variance[c]);
    ASSERT_NEAR(got_mean[c], w, rounding * std::fabs(w) + 0x1p-45 * spread)
        << m << " x " << n << " column " << c;
    ASSERT_NEAR(got_variance[c], v, rounding * v) << m << " x " << n << " column " << c;
  }
}

TYPED_TEST(LinearStatistics, Columns) {
  const TypeParam exec;
  for (const std::int64_t m : {1, 2, 63, 64, 65, 4096, 4097, 20000}) {
    for (const std::int64_t n : {1, 63, 64, 65, 200}) {
      if (m * n > 1'000'000) continue;
      check_columns<float, float>(exec, m, n, reference::right({m, n}), 0.5, 1);
      check_columns<double, double>(exec, m, n, reference::left({m, n}, 3, 1), -0.5, 1);
    }
  }
  check_columns<half_t, float>(exec, 500, 70, reference::right({500, 70}, 3, 2), 0, 10);
  check_columns<bhalf_t, bhalf_t>(exec, 500, 70, reference::ordered({500, 70}, {1, 0}, 2, 1, 1), 0, 10);
}

// A device joins the chunks of many columns in the launch that reduces them, of few columns in one of its
// own.
TYPED_TEST(LinearStatistics, ColumnsHaveTheSameBitsAmongFewAndMany) {
  const TypeParam exec;
  const std::int64_t m = 1100, n = 4100, first = 7, count = 100;
  check_columns<float, float>(exec, m, n, reference::right({m, n}), 3, 1);
  const auto values = random_values(Scalar::float32, m * n, 2, 4, 9);
  Buffer<TypeParam> x(Scalar::float32, reference::right({m, n}), &values),
      mean(Scalar::float64, reference::right({n})), variance(Scalar::float64, reference::right({n})),
      some_means(Scalar::float64, reference::right({count})),
      some_variances(Scalar::float64, reference::right({count}));
  const auto all = x.template view<const float, 2>();
  ks::column_statistics(exec, all, mean.template view<double, 1>(), variance.template view<double, 1>());
  ks::column_statistics(exec, Kokkos::subview(all, Kokkos::ALL, std::pair(first, first + count)),
                        some_means.template view<double, 1>(), some_variances.template view<double, 1>());
  exec.fence();
  for (auto* buffer : {&mean, &variance, &some_means, &some_variances}) buffer->download();
  const auto means = mean.values(), variances = variance.values();
  for (std::int64_t c = 0; c < count; ++c) {
    ASSERT_EQ(some_means.values()[c], means[first + c]) << c;
    ASSERT_EQ(some_variances.values()[c], variances[first + c]) << c;
  }
}

TYPED_TEST(LinearStatistics, ColumnsOfLargeOffset) {
  const TypeParam exec;
  check_columns<double, double>(exec, 5000, 100, reference::right({5000, 100}), 1e10, 1);
  check_columns<float, float>(exec, 5000, 100, reference::right({5000, 100}), 1e10, 1e4);
}

TYPED_TEST(LinearStatistics, OneOutlier) {
  const TypeParam exec;
  const std::int64_t m = 3000, n = 2;
  std::vector<double> values(m * n, 1.0);
  values[0] = 1e10;
  values[(m - 1) * n + 1] = 1e10;
  Buffer<TypeParam> x(Scalar::float64, reference::right({m, n}), &values),
      mean(Scalar::float64, reference::right({n})), variance(Scalar::float64, reference::right({n}));
  ks::column_statistics(exec, x.template view<const double, 2>(), mean.template view<double, 1>(),
                        variance.template view<double, 1>());
  exec.fence();
  mean.download();
  variance.download();
  const auto want = moments(values, std::vector<double>(values.size(), 0.0), m, n);
  for (int c = 0; c < 2; ++c) {
    EXPECT_NEAR(variance.values()[c] / static_cast<double>(want.variance[c]), 1, 1e-12);
    EXPECT_NEAR(mean.values()[c] / static_cast<double>(want.mean(c)), 1, 1e-12);
  }
}

TYPED_TEST(LinearStatistics, NanStaysInItsColumn) {
  const TypeParam exec;
  std::vector<double> values = random_values(Scalar::float32, 100 * 3);
  values[50 * 3 + 1] = reference::nan;
  Buffer<TypeParam> x(Scalar::float32, reference::right({100, 3}), &values),
      mean(Scalar::float32, reference::right({3})), variance(Scalar::float32, reference::right({3}));
  ks::column_statistics(exec, x.template view<const float, 2>(), mean.template view<float, 1>(),
                        variance.template view<float, 1>());
  exec.fence();
  mean.download();
  variance.download();
  for (int c = 0; c < 3; ++c) {
    EXPECT_EQ(std::isnan(mean.values()[c]), c == 1);
    EXPECT_EQ(std::isnan(variance.values()[c]), c == 1);
  }
}

}  // namespace
