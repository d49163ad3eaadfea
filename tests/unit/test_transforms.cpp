// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Each transform alone, in every implementation, on every axis; masks and biases in every way to broadcast
// them.
#include "../support/transform_cases.hpp"

namespace {

using namespace tests;

template <class Space>
class Transforms : public OnEveryBackend<Space> {};
TYPED_TEST_SUITE(Transforms, Backends, BackendName);

const Accumulator single(Scalar::float32, Scalar::float32);

TYPED_TEST(Transforms, Scale) {
  for (double factor : {0.5, -1.0, 0.1, 0.0}) {
    SCOPED_TRACE(factor);
    for (auto c : transform_cases(Scalar::float32)) {
      c.chain = {reference::scale(single, factor)};
      check<float, float, 3>(TypeParam(), c, true, ks::scale(factor));
    }
  }
}

// The product is rounded before the maximum is subtracted: a fused multiply-add there would leave its
// rounding error, here hundreds, in the exponent.
TYPED_TEST(Transforms, ScaleOfLargeLogitsIsRoundedOnce) {
  for (auto c : transform_cases(Scalar::float32, 1e10)) {
    for (double factor : {0.1, -0.3}) {
      c.chain = {reference::scale(single, factor)};
      check<float, float, 3>(TypeParam(), c, true, ks::scale(factor));
    }
  }
}

TYPED_TEST(Transforms, Temperature) {
  for (auto c : transform_cases(Scalar::float32)) {
    const auto rest = reference::without(c.extents, c.axis);
    const auto values = random_values(Scalar::float32, product(rest), 0.3, 3);
    c.chain = {reference::temperature(single, values)};
    // One value a row, or the shape without the axis.
    const Operand<float, TypeParam> flat({product(rest)}, values), shaped(rest, values);
    check<float, float, 3>(TypeParam(), c, true, ks::temperature(flat.template view<1>()));
    check<float, float, 3>(TypeParam(), c, false, ks::temperature(shaped.template view<2>()));
    check<float, float, 3>(TypeParam(), c, false, ks::temperature(flat.template view<1>(), ks::checked));
  }
}

// Those whose reciprocal is no number, or has few digits, too.
TYPED_TEST(Transforms, TemperatureOfAnySize) {
  const auto in_float = [](double v) { return static_cast<double>(static_cast<float>(v)); };
  for (double temperature : {1e-39, 1e-37, 1e-20, 1e20, 3e38}) {
    SCOPED_TRACE(temperature);
    for (auto c : transform_cases(Scalar::float32)) {
      for (auto& logit : c.logits) logit = in_float(0.2 * temperature * logit);
      c.logits[c.logits.size() / 2] = -reference::infinity;
      const auto rest = product(reference::without(c.extents, c.axis));
      const std::vector<double> values(static_cast<std::size_t>(rest), in_float(temperature));
      c.chain = {reference::temperature(single, values)};
      const Operand<float, TypeParam> all({rest}, values);
      check<float, float, 3>(TypeParam(), c, true, ks::temperature(all.template view<1>()));
    }
  }
}

TYPED_TEST(Transforms, Mask) {
  for (auto c : transform_cases(Scalar::float32)) {
    for (const auto& extents : broadcasts(c.extents)) {
      const Operand<bool, TypeParam> keep(extents, random_flags(product(extents)));
      const auto at = keep.at(c);
      c.chain = {reference::mask([at](Position p) { return at(p) != 0; })};
      check<float, float, 3>(TypeParam(), c, extents == c.extents, ks::mask(keep.template view<3>()));
    }
    const auto columns = c.extents[c.axis];
    const Operand<bool, TypeParam> keep({columns}, random_flags(columns));
    const auto at = keep.at(c);
    c.chain = {reference::mask([at](Position p) { return at(p) != 0; })};
    check<float, float, 3>(TypeParam(), c, true, ks::mask(keep.template view<1>()));
    // Vectors of double are half as wide as the masks of float.
    check<double, double, 3>(TypeParam(), c, false, ks::mask(keep.template view<1>()));
  }
}

TYPED_TEST(Transforms, KeepIf) {
  for (auto c : transform_cases(Scalar::float32)) {
    c.chain = {reference::keep_if(every_third)};
    check<float, float, 3>(TypeParam(), c, true, ks::keep_if(EveryThird{}));
  }
}

TYPED_TEST(Transforms, Causal) {
  for (int offset : {0, 1, -1, 3, -100, 10000}) {
    SCOPED_TRACE(offset);
    for (auto c : transform_cases(Scalar::float32)) {
      if (c.axis == 0) continue;  // refused: it has no dimension before it
      c.chain = {reference::causal(offset)};
      check<float, float, 3>(TypeParam(), c, true, ks::causal(offset));
    }
  }
  // Square, as in attention, of rank 2 and 4.
  Case square;
  square.extents = {40, 40};
  square.logits = random_values(Scalar::float32, square.size());
  square.chain = {reference::causal(0)};
  check<float, float, 2>(TypeParam(), square, true, ks::causal());
  Case heads;
  heads.extents = {2, 3, 20, 20};
  heads.logits = random_values(Scalar::float32, heads.size());
  heads.chain = {reference::causal(0)};
  check<float, float, 4>(TypeParam(), heads, true, ks::causal());
}

TYPED_TEST(Transforms, Bias) {
  for (auto c : transform_cases(Scalar::float32)) {
    for (const auto& extents : broadcasts(c.extents)) {
      const Operand<float, TypeParam> add(extents,
                                          random_values(Scalar::float32, product(extents), -4, 4, 21));
      c.chain = {reference::bias(single, add.at(c))};
      check<float, float, 3>(TypeParam(), c, extents == c.extents, ks::bias(add.template view<3>()));
    }
    const auto columns = c.extents[c.axis];
    const Operand<float, TypeParam> add({columns}, random_values(Scalar::float32, columns, -4, 4, 22));
    c.chain = {reference::bias(single, add.at(c))};
    check<float, float, 3>(TypeParam(), c, true, ks::bias(add.template view<1>()));
  }
}

TYPED_TEST(Transforms, ScaleByAView) {
  for (auto c : transform_cases(Scalar::float32)) {
    for (const auto& extents : broadcasts(c.extents)) {
      const Operand<float, TypeParam> factor(extents,
                                             random_values(Scalar::float32, product(extents), -2, 2, 25));
      c.chain = {reference::scale(single, factor.at(c))};
      check<float, float, 3>(TypeParam(), c, extents == c.extents, ks::scale(factor.template view<3>()));
    }
  }
}

// An additive mask: -inf in a bias drops a logit as well.
TYPED_TEST(Transforms, BiasOfMinusInfinityMasks) {
  for (auto c : transform_cases(Scalar::float32)) {
    auto values = random_values(Scalar::float32, c.size(), -1, 1, 23);
    Random random(24);
    for (auto& value : values) value = random.below(3) == 0 ? -reference::infinity : value;
    const Operand<float, TypeParam> add(c.extents, values);
    c.chain = {reference::bias(single, add.at(c))};
    check<float, float, 3>(TypeParam(), c, true, ks::bias(add.template view<3>()));
  }
}

TYPED_TEST(Transforms, Relu) {
  for (auto c : transform_cases(Scalar::float32)) {
    c.chain = {reference::relu()};
    check<float, float, 3>(TypeParam(), c, true, ks::relu());
  }
}

TYPED_TEST(Transforms, Gelu) {
  for (double limit : {5.0, 50.0, 1e10}) {
    for (auto c : transform_cases(Scalar::float32, limit)) {
      c.chain = {reference::gelu(single)};
      check<float, float, 3>(TypeParam(), c, limit == 5, ks::gelu());
    }
  }
}

TYPED_TEST(Transforms, GeluTanh) {
  for (double limit : {5.0, 50.0, 1e10}) {
    for (auto c : transform_cases(Scalar::float32, limit)) {
      c.chain = {reference::gelu_tanh(single)};
      check<float, float, 3>(TypeParam(), c, limit == 5, ks::gelu_tanh());
    }
  }
}

TYPED_TEST(Transforms, BatchNorm) {
  constexpr double eps = 1e-5;
  for (auto c : transform_cases(Scalar::float32)) {
    const auto columns = c.extents[c.axis];
    const Statistics s(columns);
    const Operand<float, TypeParam> mean({columns}, s.mean), variance({columns}, s.variance),
        gamma({columns}, s.gamma), beta({columns}, s.beta);
    c.chain = {reference::batch_norm(single, s.mean, s.variance, s.gamma, s.beta, eps)};
    check<float, float, 3>(TypeParam(), c, true,
                           ks::batch_norm(mean.template view<1>(), variance.template view<1>(),
                                          gamma.template view<1>(), beta.template view<1>(), eps));
  }
}

TYPED_TEST(Transforms, UserFunctor) {
  for (auto c : transform_cases(Scalar::float32)) {
    c.chain = {ripple(single)};
    check<float, float, 3>(TypeParam(), c, true, ks::transform(Ripple{}));
    check<float, float, 3>(TypeParam(), c, false, Ripple{});
  }
}

// A NaN goes through every transform, and makes a row of NaN.
TYPED_TEST(Transforms, NanSurvives) {
  for (auto c : transform_cases(Scalar::float32)) {
    c.logits[c.logits.size() / 2] = reference::nan;
    c.chain = {reference::relu()};
    check<float, float, 3>(TypeParam(), c, true, ks::relu());
    c.chain = {reference::gelu(single)};
    check<float, float, 3>(TypeParam(), c, true, ks::gelu());
    c.chain = {reference::scale(single, 0)};
    check<float, float, 3>(TypeParam(), c, true, ks::scale(0));
  }
}

// What is dropped counts as -inf, even a NaN or an infinity.
TYPED_TEST(Transforms, WhatAMaskDropsMayBeAnything) {
  for (auto c : transform_cases(Scalar::float32)) {
    const reference::Rows rows(c.extents, c.axis);
    const auto logical = reference::right(c.extents);
    for (std::int64_t r = 0; r < rows.rows; ++r) {
      for (std::int64_t column = 0; column < rows.columns; ++column) {
        if (every_third(r, column)) continue;
        c.logits[rows.start(logical, r) + column * logical.strides[rows.axis]] =
            column % 2 ? reference::nan : reference::infinity;
      }
    }
    c.chain = {reference::keep_if(every_third)};
    check<float, float, 3>(TypeParam(), c, true, ks::keep_if(EveryThird{}));
  }
}

#if defined(KOKKOSSOFTMAX_TEST_ALL_SCALAR_PAIRS)
template <class In, class Out, class Exec>
void transforms_of_pair() {
  const Accumulator acc(scalar_of<In>, scalar_of<Out>);
  for (auto c : transform_cases(scalar_of<In>)) {
    const auto columns = c.extents[c.axis];
    const auto rows = c.size() / columns;
    const Operand<In, Exec> temperature({rows}, random_values(scalar_of<In>, rows, 0.3, 3));
    const Operand<Out, Exec> add({columns}, random_values(scalar_of<Out>, columns, -2, 2, 31));
    const Statistics s(columns, scalar_of<In>);
    const Operand<In, Exec> mean({columns}, s.mean), variance({columns}, s.variance),
        gamma({columns}, s.gamma), beta({columns}, s.beta);
    c.chain = {reference::temperature(acc, random_values(scalar_of<In>, rows, 0.3, 3)),
               reference::keep_if(every_third)};
    check<In, Out, 3>(Exec(), c, true,
                      ks::temperature(temperature.template view<1>()) | ks::keep_if(EveryThird{}));
    c.chain = {reference::bias(acc, add.at(c)), reference::gelu_tanh(acc)};
    check<In, Out, 3>(Exec(), c, true, ks::bias(add.template view<1>()) | ks::gelu_tanh());
    c.chain = {reference::batch_norm(acc, s.mean, s.variance, s.gamma, s.beta, 1e-3), reference::relu()};
    check<In, Out, 3>(Exec(), c, true,
                      ks::batch_norm(mean.template view<1>(), variance.template view<1>(),
                                     gamma.template view<1>(), beta.template view<1>(), 1e-3) |
                          ks::relu());
    c.chain = {ripple(acc)};
    check<In, Out, 3>(Exec(), c, true, Ripple{});
  }
}

TYPED_TEST(Transforms, OfEveryPair) {
  for_each_scalar_pair([]<class In, class Out>() { transforms_of_pair<In, Out, TypeParam>(); });
}
#endif

}  // namespace
