// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Transforms composed: the order, the types, and masks that nothing after or before them brings back.
#include "../support/transform_cases.hpp"

namespace {

using namespace tests;

template <class Space>
class Chains : public OnEveryBackend<Space> {};
TYPED_TEST_SUITE(Chains, Backends, BackendName);

template <class In, class Out, class Exec, class... Transform>
void check_all(const std::vector<Case>& cases, const Chain& chain, const Transform&... transform) {
  for (auto c : cases) {
    c.chain = chain;
    check<In, Out, 3>(Exec(), c, true, transform...);
  }
}

const Accumulator single(Scalar::float32, Scalar::float32);

TYPED_TEST(Chains, FirstTheLeftOne) {
  const auto cases = transform_cases(Scalar::float32);
  check_all<float, float, TypeParam>(cases, {reference::scale(single, -2), reference::relu()},
                                     ks::scale(-2) | ks::relu());
  check_all<float, float, TypeParam>(cases, {reference::relu(), reference::scale(single, -2)},
                                     ks::relu() | ks::scale(-2));
}

TYPED_TEST(Chains, AUsersFunctorOnEitherSide) {
  const auto cases = transform_cases(Scalar::float32);
  check_all<float, float, TypeParam>(cases, {ripple(single), reference::scale(single, 0.5)},
                                     Ripple{} | ks::scale(0.5));
  check_all<float, float, TypeParam>(cases, {reference::scale(single, 0.5), ripple(single)},
                                     ks::scale(0.5) | Ripple{});
}

// A mask under every other transform: first, last, and on both sides.
template <class Exec, class Transform>
void sticky(reference::Step step, const Transform& transform) {
  const auto cases = transform_cases(Scalar::float32);
  const auto keep = reference::keep_if(every_third);
  check_all<float, float, Exec>(cases, {keep, step}, ks::keep_if(EveryThird{}) | transform);
  check_all<float, float, Exec>(cases, {step, keep}, transform | ks::keep_if(EveryThird{}));
}

TYPED_TEST(Chains, MaskUnderScale) {
  sticky<TypeParam>(reference::scale(single, -1), ks::scale(-1));
}
TYPED_TEST(Chains, MaskUnderRelu) {
  sticky<TypeParam>(reference::relu(), ks::relu());
}
TYPED_TEST(Chains, MaskUnderGelu) {
  sticky<TypeParam>(reference::gelu(single), ks::gelu());
}
TYPED_TEST(Chains, MaskUnderGeluTanh) {
  sticky<TypeParam>(reference::gelu_tanh(single), ks::gelu_tanh());
}
TYPED_TEST(Chains, MaskUnderAFunctor) {
  sticky<TypeParam>(ripple(single), ks::transform(Ripple{}));
}

TYPED_TEST(Chains, MaskUnderOperands) {
  for (auto c : transform_cases(Scalar::float32)) {
    const auto columns = c.extents[c.axis];
    const Statistics s(columns);
    const Operand<float, TypeParam> mean({columns}, s.mean), variance({columns}, s.variance),
        gamma({columns}, s.gamma), beta({columns}, s.beta);
    const Operand<bool, TypeParam> keep(c.extents, random_flags(c.size()));
    const auto at = keep.at(c);
    const auto dropped = reference::mask([at](Position p) { return at(p) != 0; });
    const auto norm = ks::batch_norm(mean.template view<1>(), variance.template view<1>(),
                                     gamma.template view<1>(), beta.template view<1>(), 1e-3);
    const auto norm_step = reference::batch_norm(single, s.mean, s.variance, s.gamma, s.beta, 1e-3);
    const auto mask = ks::mask(keep.template view<3>());
    c.chain = {dropped, norm_step};
    check<float, float, 3>(TypeParam(), c, true, mask | norm);
    c.chain = {dropped, reference::bias(single, [&](Position p) { return s.beta[p.column]; })};
    check<float, float, 3>(TypeParam(), c, true, mask | ks::bias(beta.template view<1>()));
    const auto rest = product(reference::without(c.extents, c.axis));
    const auto temperatures = random_values(Scalar::float32, rest, 0.3, 3);
    const Operand<float, TypeParam> temperature({rest}, temperatures);
    c.chain = {dropped, reference::temperature(single, temperatures)};
    check<float, float, 3>(TypeParam(), c, true, mask | ks::temperature(temperature.template view<1>()));
  }
}

// The mask that the whole row falls to: zeros, whatever comes after.
TYPED_TEST(Chains, WholeRowsMasked) {
  for (auto c : transform_cases(Scalar::float32)) {
    if (c.axis == 0) continue;
    c.chain = {reference::causal(-1), reference::gelu(single), reference::scale(single, -1)};
    check<float, float, 3>(TypeParam(), c, true, ks::causal(-1) | ks::gelu() | ks::scale(-1));
    c.chain = {reference::causal(-100000), reference::gelu(single), reference::scale(single, -1)};
    check<float, float, 3>(TypeParam(), c, true, ks::causal(-100000) | ks::gelu() | ks::scale(-1));
  }
}

// Inputs of -inf are masked logits too, and rows of nothing else stay so under transforms that make them
// finite.
TYPED_TEST(Chains, RowsOfMinusInfinityStayMasked) {
  for (auto c : transform_cases(Scalar::float32)) {
    c.logits.assign(c.logits.size(), -reference::infinity);
    c.chain = {reference::relu(), reference::scale(single, -2)};
    check<float, float, 3>(TypeParam(), c, true, ks::relu() | ks::scale(-2));
    c.chain = {reference::scale(single, 0.0)};
    check<float, float, 3>(TypeParam(), c, true, ks::scale(0));
  }
}

// The attention chain and the two heads of the design, in the scalar types that they are used with.
template <class In, class Out, class Exec>
void attention_and_heads() {
  const Accumulator acc(scalar_of<In>, scalar_of<Out>);
  for (auto c : transform_cases(scalar_of<In>)) {
    if (c.axis == 0) continue;
    const auto columns = c.extents[c.axis];
    const Operand<In, Exec> bias({columns}, random_values(scalar_of<In>, columns, -2, 2, 31));
    const auto bias_step = reference::bias(acc, bias.at(c));
    c.chain = {reference::scale(acc, 0.125), bias_step, reference::causal(1)};
    check<In, Out, 3>(Exec(), c, true, ks::scale(0.125) | ks::bias(bias.template view<1>()) | ks::causal(1));
    c.chain = {bias_step, reference::gelu(acc)};
    check<In, Out, 3>(Exec(), c, true, ks::bias(bias.template view<1>()) | ks::gelu());
  }
}
TYPED_TEST(Chains, AttentionAndHeadsFloat) {
  attention_and_heads<float, float, TypeParam>();
}
TYPED_TEST(Chains, AttentionAndHeadsDouble) {
  attention_and_heads<double, double, TypeParam>();
}
TYPED_TEST(Chains, AttentionAndHeadsHalf) {
  attention_and_heads<half_t, half_t, TypeParam>();
}
TYPED_TEST(Chains, AttentionAndHeadsBfloat16ToFloat) {
  attention_and_heads<bhalf_t, float, TypeParam>();
}

#if defined(KOKKOSSOFTMAX_TEST_ALL_SCALAR_PAIRS)
TYPED_TEST(Chains, AttentionAndHeadsOfEveryPair) {
  for_each_scalar_pair([]<class In, class Out>() { attention_and_heads<In, Out, TypeParam>(); });
}
#endif

TYPED_TEST(Chains, BatchNormHead) {
  for (auto c : transform_cases(Scalar::float32)) {
    const auto columns = c.extents[c.axis];
    const Statistics s(columns);
    const Operand<float, TypeParam> bias({columns}, s.beta), mean({columns}, s.mean),
        variance({columns}, s.variance), gamma({columns}, s.gamma), beta({columns}, s.beta);
    c.chain = {reference::bias(single, bias.at(c)),
               reference::batch_norm(single, s.mean, s.variance, s.gamma, s.beta, 1e-5),
               reference::scale(single, 1.5)};
    check<float, float, 3>(TypeParam(), c, true,
                           ks::bias(bias.template view<1>()) |
                               ks::batch_norm(mean.template view<1>(), variance.template view<1>(),
                                              gamma.template view<1>(), beta.template view<1>(), 1e-5) |
                               ks::scale(1.5));
  }
}

// Every kind at once.
TYPED_TEST(Chains, TheFattest) {
  for (auto c : transform_cases(Scalar::float32, 2)) {
    if (c.axis == 0) continue;
    const auto columns = c.extents[c.axis];
    const auto rest = product(reference::without(c.extents, c.axis));
    const Statistics s(columns);
    const Operand<float, TypeParam> mean({columns}, s.mean), variance({columns}, s.variance),
        gamma({columns}, s.gamma), beta({columns}, s.beta);
    const auto temperatures = random_values(Scalar::float32, rest, 0.5, 2);
    const Operand<float, TypeParam> temperature(reference::without(c.extents, c.axis), temperatures);
    const Operand<float, TypeParam> bias(c.extents, random_values(Scalar::float32, c.size(), -2, 2, 41));
    const Operand<bool, TypeParam> keep(broadcasts(c.extents)[1],
                                        random_flags(product(broadcasts(c.extents)[1])));
    const auto keep_at = keep.at(c);
    c.chain = {reference::scale(single, 0.5),
               reference::temperature(single, temperatures),
               reference::mask([keep_at](Position p) { return keep_at(p) != 0; }),
               reference::bias(single, bias.at(c)),
               reference::batch_norm(single, s.mean, s.variance, s.gamma, s.beta, 1e-3),
               reference::causal(2),
               reference::gelu(single),
               ripple(single)};
    check<float, float, 3>(TypeParam(), c, true,
                           ks::scale(0.5) | ks::temperature(temperature.template view<2>()) |
                               ks::mask(keep.template view<3>()) | ks::bias(bias.template view<3>()) |
                               ks::batch_norm(mean.template view<1>(), variance.template view<1>(),
                                              gamma.template view<1>(), beta.template view<1>(), 1e-3) |
                               ks::causal(2) | ks::gelu() | ks::transform(Ripple{}));
  }
}

}  // namespace
