// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Operands that have a value for each logit. Rows of 16 bits in whole vectors whose operands lie at the same
// boundaries: CUDA reads both at once there, does not look for logits of -inf where a transform keeps them,
// and reads nothing behind the last logit that is kept. Rows that are no whole vectors.
#include "../support/transform_cases.hpp"

namespace {

using namespace tests;

template <class Space>
class TransformOperands : public OnEveryBackend<Space> {};
TYPED_TEST_SUITE(TransformOperands, Backends, BackendName);

// Rows of a part of a warp, of a warp, and of a block with all of its vectors or some of them.
const std::int64_t lengths[] = {64, 200, 512, 1024, 1096, 4096, 16384};

Case dense_case(Scalar in, std::int64_t columns) {
  Case c;
  c.extents = {1, 7, columns};
  c.axis = 2;
  c.logits = random_values(in, c.size(), -5, 5);
  Random random(3);
  for (auto& logit : c.logits) {
    if (random.below(17) == 0) logit = -reference::infinity;
  }
  return c;
}

TYPED_TEST(TransformOperands, Mask) {
  for (const auto columns : lengths) {
    auto c = dense_case(Scalar::bfloat16, columns);
    auto flags = random_flags(c.size());
    std::fill_n(flags.begin(), columns, 0.0);                // a row of nothing
    std::fill_n(flags.begin() + columns, columns - 1, 0.0);  // and one of hardly anything
    const Operand<bool, TypeParam> keep(c.extents, flags, true);
    const auto at = keep.at(c);
    for (std::size_t i = 0; i < flags.size(); i += 3) {
      if (flags[i] == 0) c.logits[i] = reference::nan;
    }
    c.chain = {reference::mask([at](Position p) { return at(p) != 0; })};
    check<bhalf_t, bhalf_t, 3>(TypeParam(), c, true, ks::mask(keep.template view<3>()));
  }
}

// A bias of +inf meets logits of -inf: these stay what they are, in a row in which nothing else is special.
template <class T, class Exec>
void check_infinite_bias(std::int64_t columns) {
  auto c = dense_case(scalar_of<T>, columns);
  auto values = random_values(scalar_of<T>, c.size(), -4, 4, 21);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i) / columns;
    if (row % 2 == 0 && c.logits[i] == -reference::infinity) values[i] = reference::infinity;
    if (row == 3 && i % 7 == 0) values[i] = -reference::infinity;
    if (row == 5 && i % columns == 2) c.logits[i] = reference::nan;
  }
  const Operand<T, Exec> add(c.extents, values, true);
  c.chain = {reference::bias(Accumulator(scalar_of<T>, scalar_of<T>), add.at(c))};
  check<T, T, 3>(Exec(), c, true, ks::bias(add.template view<3>()));
}

TYPED_TEST(TransformOperands, BiasOfPlusInfinity) {
  for (const auto columns : lengths) {
    check_infinite_bias<bhalf_t, TypeParam>(columns);
    check_infinite_bias<half_t, TypeParam>(columns);
  }
}

// NaN behind the diagonal is neither seen nor, where whole vectors are dropped, read; nor are operands there.
TYPED_TEST(TransformOperands, CausalWithOperands) {
  const Accumulator single(Scalar::bfloat16, Scalar::bfloat16);
  for (const auto columns : lengths) {
    auto c = dense_case(Scalar::bfloat16, columns);
    auto flags = random_flags(columns);
    flags[0] = 1;
    auto values = random_values(Scalar::bfloat16, columns, -4, 4, 22);
    const Operand<bool, TypeParam> keep({columns}, flags, true);
    const Operand<bhalf_t, TypeParam> add({columns}, values, true);
    const auto kept = keep.at(c);
    for (const std::int64_t offset : {-2 * columns, columns / 2 - 3, columns - 4, 3 * columns}) {
      auto of_offset = c;
      for (std::int64_t i = 0; i < c.size(); ++i) {
        if (i % columns > i / columns % c.extents[1] + offset)
          of_offset.logits[i] = i % 2 ? reference::nan : reference::infinity;
      }
      of_offset.chain = {reference::causal(offset)};
      check<bhalf_t, bhalf_t, 3>(TypeParam(), of_offset, true, ks::causal(offset));
      of_offset.chain = {reference::scale(single, 0.5), reference::causal(offset),
                         reference::bias(single, add.at(c)),
                         reference::mask([kept](Position p) { return kept(p) != 0; })};
      check<bhalf_t, bhalf_t, 3>(TypeParam(), of_offset, true,
                                 ks::scale(0.5) | ks::causal(offset) | ks::bias(add.template view<1>()) |
                                     ks::mask(keep.template view<1>()));
    }
  }
}

// Rows that are no whole vectors: CUDA brings longer ones, and their operands, to shared memory, from any
// boundary; operands that are the same for other rows, too, in another way.
template <class T, class Exec>
void check_odd_rows(std::int64_t rows, std::int64_t columns) {
  const Scalar scalar = scalar_of<T>;
  const Accumulator acc(scalar, scalar);
  const std::vector<std::int64_t> extents = {2, rows, columns};
  for (const bool dense : {true, false}) {
    auto c = dense_case(scalar, columns);
    c.extents = extents;
    c.logits = random_values(scalar, c.size(), -5, 5);
    for (std::size_t i = 0; i < c.logits.size(); i += 13) c.logits[i] = -reference::infinity;
    if (!dense) {
      c.in = reference::right(extents, 3, 5);
      c.out = reference::right(extents, 2, 1);
    }
    for (const auto& of_mask : {extents, std::vector<std::int64_t>{2, 1, columns}, {columns}}) {
      auto flags = random_flags(product(of_mask));
      std::fill_n(flags.begin(), columns - 1, 0.0);  // a row of hardly anything
      flags[static_cast<std::size_t>(columns) - 1] = 1;
      const Operand<bool, Exec> keep(of_mask, flags, dense);
      const Operand<T, Exec> add(extents, random_values(scalar, c.size(), -4, 4, 23), dense);
      const auto kept = keep.at(c);
      auto masked = c;
      for (std::int64_t i = 0; i < c.size(); i += 5) {
        if (kept({i / columns, i % columns, 0}) == 0)
          masked.logits[static_cast<std::size_t>(i)] = reference::nan;
      }
      masked.chain = {reference::bias(acc, add.at(c)),
                      reference::mask([kept](Position p) { return kept(p) != 0; }),
                      reference::causal(columns / 2)};
      const auto in_all = [&](const auto& mask) {
        const auto transform = ks::bias(add.template view<3>()) | mask | ks::causal(columns / 2);
        check<T, T, 3>(Exec(), masked, true, transform);
        if (!dense) {
          auto in_place = masked;
          in_place.in_place = true;
          run_case<T, T, 3>(Exec(), Operation::softmax, in_place, "", transform);
        }
      };
      if (of_mask.size() == 1) {
        in_all(ks::mask(keep.template view<1>()));
      } else {
        in_all(ks::mask(keep.template view<3>()));
      }
    }
  }
}

TYPED_TEST(TransformOperands, OddRowsOfABlock) {
  for (const std::int64_t columns : {1025, 2047, 9001, 16383}) {
    check_odd_rows<bhalf_t, TypeParam>(2, columns);
  }
  check_odd_rows<half_t, TypeParam>(2, 1500);
  check_odd_rows<float, TypeParam>(2, 1153);
  check_odd_rows<float, TypeParam>(2, 8193);
  check_odd_rows<double, TypeParam>(2, 3001);
}

// More than 512 rows of 577 columns or more have a warp each.
TYPED_TEST(TransformOperands, OddRowsOfAWarp) {
  check_odd_rows<float, TypeParam>(258, 579);
  check_odd_rows<bhalf_t, TypeParam>(258, 1001);
}

// A factor below 0 does not keep -inf, one of 0 makes NaN of it: both are looked for.
TYPED_TEST(TransformOperands, FactorsThatDoNotKeepMinusInfinity) {
  const Accumulator single(Scalar::bfloat16, Scalar::bfloat16);
  for (const auto columns : lengths) {
    auto c = dense_case(Scalar::bfloat16, columns);
    for (const double factor : {0.75, 0.0, -1.5}) {
      c.chain = {reference::scale(single, factor)};
      check<bhalf_t, bhalf_t, 3>(TypeParam(), c, true, ks::scale(factor));
    }
  }
}

}  // namespace
