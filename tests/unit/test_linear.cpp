// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The heads with a transform between GEMM and softmax, by every implementation: scalars, layouts, extents,
// transforms.
#include <string>
#include <vector>

#include "../support/float_to_half.hpp"
#include "../support/linear_cases.hpp"

namespace {

using namespace tests;

template <class Space>
class Linear : public OnEveryBackend<Space> {};
TYPED_TEST_SUITE(Linear, Backends, BackendName);

const LinearCase small{.m = 7, .n = 37, .k = 29};

TYPED_TEST(Linear, EqualScalarsAndWiderOutput) {
  const TypeParam exec;
#define KOKKOSSOFTMAX_TESTS_PAIR(In, Out) check_plain<In, In, Out>(exec, small, all_rows(small.m));
  KOKKOSSOFTMAX_FOR_EACH_SCALAR_PAIR(KOKKOSSOFTMAX_TESTS_PAIR)
#undef KOKKOSSOFTMAX_TESTS_PAIR
}

TYPED_TEST(Linear, MixedScalars) {
  const TypeParam exec;
  check_plain<float, float, half_t>(exec, small, all_rows(small.m));
  check_plain<half_t, bhalf_t, float>(exec, small, all_rows(small.m));
  check_plain<float, bhalf_t, float>(exec, small, all_rows(small.m));
  check_plain<half_t, float, double>(exec, small, all_rows(small.m));
  check_plain<double, float, bhalf_t>(exec, small, all_rows(small.m));
}

// One dimension or the other fastest, padded or not, both strided.
std::vector<Layout> layouts(std::int64_t rows, std::int64_t columns) {
  return {reference::right({rows, columns}), reference::right({rows, columns}, 3, 2),
          reference::left({rows, columns}), reference::left({rows, columns}, 2, 5),
          reference::ordered({rows, columns}, {1, 0}, 2, 1, 1)};
}

TYPED_TEST(Linear, EveryMixtureOfLayouts) {
  const TypeParam exec;
  LinearCase c{.m = 5, .n = 11, .k = 8};
  for (const auto& x : layouts(c.m, c.k)) {
    for (const auto& w : layouts(c.n, c.k)) {
      for (const auto& y : layouts(c.m, c.n)) {
        c.x = x;
        c.w = w;
        c.y = y;
        check_plain<float, float, float>(exec, c, all_rows(c.m));
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

TYPED_TEST(Linear, LayoutsOf16Bits) {
  const TypeParam exec;
  LinearCase c{.m = 5, .n = 11, .k = 8};
  for (std::size_t i = 0; i < 5; ++i) {
    c.x = layouts(c.m, c.k)[i];
    c.w = layouts(c.n, c.k)[(i + 1) % 5];
    c.y = layouts(c.m, c.n)[(i + 2) % 5];
    check_plain<half_t, half_t, half_t>(exec, c, all_rows(c.m));
    check_plain<bhalf_t, bhalf_t, float>(exec, c, all_rows(c.m));
  }
}

// A matrix of one row or one column inside a larger one, where the stride of the other dimension says
// nothing, or all.
TYPED_TEST(Linear, OneRowOrColumnOfALargerMatrix) {
  const TypeParam exec;
  for (const std::int64_t m : {1, 6}) {
    for (const std::int64_t n : {1, 9}) {
      for (const std::int64_t k : {1, 5}) {
        for (int i = 0; i < 5; ++i) {
          LinearCase c{.m = m, .n = n, .k = k};
          c.x = layouts(m, k)[i];
          c.w = layouts(n, k)[i];
          for (int j = 0; j < 5; ++j) {
            c.y = layouts(m, n)[j];
            check_plain<float, float, float>(exec, c, all_rows(m));
          }
        }
      }
    }
  }
}

TYPED_TEST(Linear, Extents) {
  const TypeParam exec;
  for (const std::int64_t m : {0, 1, 2, 199}) {
    for (const std::int64_t n : {1, 2, 1000, 8193}) {
      for (const std::int64_t k : {0, 1, 3, 8191}) {
        const LinearCase c{.m = m, .n = n, .k = k, .range = k > 1000 ? 0.3 : 1.0};
        std::vector<std::int64_t> rows = all_rows(m);
        if (m * n * k > 50'000'000)
          rows = m > 2 ? std::vector<std::int64_t>{0, m - 1} : std::vector<std::int64_t>{m - 1};
        check_plain<float, float, float>(exec, c, rows);
        if (n < 8193 && k < 8191) {
          check_plain<double, double, double>(exec, c, rows);
          check_plain<half_t, half_t, half_t>(exec, c, rows);
          check_plain<bhalf_t, bhalf_t, float>(exec, c, rows);
        }
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

// The transforms of our users' heads, and GELU both ways.
TYPED_TEST(Linear, GeluAndBatchNormHeads) {
  const TypeParam exec;
  const LinearCase c{.m = 9, .n = 130, .k = 64};
  std::vector<double> b = random_values(Scalar::float32, c.n, -1, 1, 7),
                      mean = random_values(Scalar::float32, c.n, -1, 1, 8),
                      variance = random_values(Scalar::float32, c.n, 0.1, 3, 9),
                      gamma = random_values(Scalar::float32, c.n, -1, 2, 10),
                      beta = random_values(Scalar::float32, c.n, -1, 1, 11);
  const auto column = [&](const std::vector<double>& values) {
    return Buffer<TypeParam>(Scalar::float32, reference::right({c.n}), &values);
  };
  const auto b_buffer = column(b), mean_buffer = column(mean), variance_buffer = column(variance),
             gamma_buffer = column(gamma), beta_buffer = column(beta);
  const auto view = [](const auto& buffer) { return buffer.template view<const float, 1>(); };
  const reference::Accumulator acc(Scalar::float32, Scalar::float32);
  const auto bias_step = reference::bias(acc, [&](Position p) { return b[p.column]; });
  check_head<float, float, float>(
      exec, c, all_rows(c.m), [&] { return ks::bias(view(b_buffer)) | ks::gelu(); },
      [&](const Logits&) {
        return Chain{bias_step, reference::gelu(acc)};
      });
  check_head<float, float, float>(
      exec, c, all_rows(c.m), [&] { return ks::bias(view(b_buffer)) | ks::gelu_tanh(); },
      [&](const Logits&) {
        return Chain{bias_step, reference::gelu_tanh(acc)};
      });
  check_head<bhalf_t, bhalf_t, float>(
      exec, c, all_rows(c.m), [&] { return ks::bias(view(b_buffer)) | ks::gelu(); },
      [&](const Logits&) {
        return Chain{bias_step, reference::gelu(acc)};
      });
  check_head<half_t, half_t, half_t>(
      exec, c, all_rows(c.m), [&] { return ks::bias(view(b_buffer)) | ks::relu(); },
      [&](const Logits&) {
        return Chain{bias_step, reference::relu()};
      });
  check_head<float, float, float>(
      exec, c, all_rows(c.m),
      [&] {
        return ks::bias(view(b_buffer)) |
               ks::batch_norm(view(mean_buffer), view(variance_buffer), view(gamma_buffer), view(beta_buffer),
                              1e-5) |
               ks::scale(2.5);
      },
      [&](const Logits&) {
        return Chain{bias_step, reference::batch_norm(acc, mean, variance, gamma, beta, 1e-5),
                     reference::scale(acc, 2.5)};
      });
}

struct EveryThird {
  KOKKOS_FUNCTION bool operator()(std::int64_t row, std::int64_t column) const {
    return (row + column) % 3 != 0;
  }
};

TYPED_TEST(Linear, RowsAndMasks) {
  const TypeParam exec;
  const LinearCase c{.m = 12, .n = 40, .k = 16};
  const auto chain = [](const Logits&) {
    return Chain{reference::causal(3), reference::keep_if([](std::int64_t row, std::int64_t column) {
                   return EveryThird()(row, column);
                 })};
  };
  check_head<float, float, float>(
      exec, c, all_rows(c.m), [] { return ks::causal(3) | ks::keep_if(EveryThird{}); }, chain);
  check_head<float, float, half_t>(
      exec, c, all_rows(c.m), [] { return ks::causal(3) | ks::keep_if(EveryThird{}); }, chain);
}

// Where Y cannot hold the logits, they come in panels of rows: the transform counts rows from the first of
// all.
TYPED_TEST(Linear, PanelsOfRows) {
  const TypeParam exec;
  const LinearCase c{.m = 4200, .n = 8193, .k = 3};
  check_head<float, float, half_t>(
      exec, c, {0, 1, 2046, 2047, 2048, 4093, 4094, 4095, 4199},
      [] { return ks::scale(1.0) | ks::keep_if(EveryThird{}); },
      [](const Logits&) {
        static const std::int64_t rows[] = {0, 1, 2046, 2047, 2048, 4093, 4094, 4095, 4199};
        return Chain{reference::keep_if(
            [](std::int64_t row, std::int64_t column) { return EveryThird()(rows[row], column); })};
      });
}

// W of 16 bits comes in panels on the host.
TYPED_TEST(Linear, PanelsOfColumns) {
  const TypeParam exec;
  const std::int64_t m = 3, n = 4200, k = 8191;
  if constexpr (ks::impl::runs_on_host_v<TypeParam>) {
    using Head = ks::impl::PlainHead<ks::impl::BoundIdentity>;
    using Problem = ks::impl::LinearProblem<bhalf_t, bhalf_t, float, Head>;
    const Problem problem{{nullptr, m, k, k, 1},        {nullptr, n, k, k, 1}, {nullptr, m, n, n, 1},
                          ks::impl::Operation::softmax, ks::Precision::ieee,   {}};
    const ks::impl::GemmPlan<TypeParam, ks::impl::KokkosBlasGemm, Problem> plan(problem);
    ASSERT_LT(plan.panel_columns, n);
  }
  check_plain<bhalf_t, bhalf_t, float>(exec, {.m = m, .n = n, .k = k, .range = 0.3}, all_rows(m));
}

TYPED_TEST(Linear, Tf32IsAsGoodAsItSays) {
  const TypeParam exec;
  check_plain<float, float, float>(
      exec, {.m = 65, .n = 130, .k = 512, .range = 0.5, .precision = ks::Precision::tf32}, all_rows(65));
  check_plain<double, double, double>(exec, {.m = 5, .n = 13, .k = 51, .precision = ks::Precision::tf32},
                                      all_rows(5));
}

TYPED_TEST(Linear, SameBitsEachTime) {
  const TypeParam exec;
  for (const auto& name : linear_implementations_and_default<TypeParam>()) {
    std::optional<ks::ScopedImplementation> forced;
    if (!name.empty()) forced.emplace(name);
    LinearOperands<float, float, float, TypeParam> o({.m = 67, .n = 515, .k = 333});
    std::vector<unsigned char> first;
    for (int i = 0; i < 5; ++i) {
      o.y.upload();
      ks::linear_softmax(exec, o.x_view(), o.w_view(), o.y_view(), ks::gelu());
      exec.fence();
      o.y.download();
      const std::vector<unsigned char> bytes(o.y.host(), o.y.host() + 67 * 515 * sizeof(float));
      if (i == 0) first = bytes;
      EXPECT_EQ(bytes, first) << name;
    }
  }
}

TYPED_TEST(Linear, FormsWithoutAnInstanceAndWithoutATransform) {
  LinearOperands<float, float, float, TypeParam> o(small);
  const auto nothing = [](const Logits&) { return Chain{}; };
  ks::linear_softmax(o.x_view(), o.w_view(), o.y_view());
  o.check(Operation::softmax, all_rows(small.m), nothing);
  ks::linear_log_softmax(o.x_view(), o.w_view(), o.y_view(), ks::Precision::ieee);
  o.check(Operation::log_softmax, all_rows(small.m), nothing);
  ks::linear_softmax(TypeParam(), o.x_view(), o.w_view(), o.y_view(), AsTheyAre{});
  TypeParam().fence();
  o.check(Operation::softmax, all_rows(small.m), nothing);
}

TYPED_TEST(Linear, DynamicRank) {
  using View = Kokkos::DynRankView<float, typename TypeParam::memory_space>;
  const TypeParam exec;
  const View x("x", 3, 4), w("w", 5, 4), y("y", 3, 5);
  Kokkos::deep_copy(x, 1.0f);
  Kokkos::deep_copy(w, 1.0f);
  ks::linear_softmax(exec, x, w, y);
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), y);
  for (int i = 0; i < 3; ++i) {
    for (int j = 0; j < 5; ++j) EXPECT_NEAR(host(i, j), 0.2f, 1e-7f);
  }
}

// Two instances at once do not disturb each other.
TYPED_TEST(Linear, TwoInstances) {
  if (TypeParam().concurrency() < 2) GTEST_SKIP() << "too few threads to divide";
  const auto parts = Kokkos::Experimental::partition_space(TypeParam(), 1, 1);
  LinearOperands<float, float, half_t, TypeParam> a({.m = 31, .n = 257, .k = 100, .seed = 2}),
      b({.m = 64, .n = 100, .k = 300, .seed = 3});
  for (int i = 0; i < 5; ++i) {
    ks::linear_softmax(parts[0], a.x_view(), a.w_view(), a.y_view());
    ks::linear_softmax(parts[1], b.x_view(), b.w_view(), b.y_view());
  }
  parts[0].fence();
  parts[1].fence();
  const auto nothing = [](const Logits&) { return Chain{}; };
  a.check(Operation::softmax, all_rows(31), nothing);
  b.check(Operation::softmax, all_rows(64), nothing);
}

}  // namespace
