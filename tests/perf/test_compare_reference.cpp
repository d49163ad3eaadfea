// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

// The comparison's own reference: that it passes what is right, and nothing else.
#include <KokkosSoftmax_Compare.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

namespace {

using compare::Accuracy;
using compare::Quantity;
using compare::Transform;

struct Row {
  std::vector<double> logits, error;
};

Row transformed(const std::string& name, const compare::TransformOperands& operands) {
  Row row{{0.5, -1.25, 2, 0.75}, {}};
  compare::transform_row(Transform(name), operands, "float", "float", row.logits.data(), 4, row.error);
  return row;
}

bool passes(Quantity quantity, const Row& row, const std::vector<double>& y) {
  Accuracy accuracy;
  compare::check_row(quantity, row.logits.data(), row.error, 4, y.data(), "float", "float", accuracy);
  return accuracy.allowed <= 1;
}

std::vector<double> softmax(const Row& row) {
  std::vector<double> y;
  for (const double x : row.logits) y.push_back(std::exp(x));
  const double sum = std::accumulate(y.begin(), y.end(), 0.0);
  for (double& each : y) each = static_cast<float>(each / sum);
  return y;
}

const double mask[] = {1, 0, 1, 1}, no_mask[] = {0, 0, 0, 0}, bias[] = {0.5, 1, -0.5, 0.25};

TEST(CompareReference, TransformsInTheOrderOfTheName) {
  compare::TransformOperands operands;
  operands.mask = mask;
  operands.bias = bias;
  operands.query = 2;
  EXPECT_EQ(transformed("scale_bias_mask_causal", operands).logits,
            (std::vector<double>{0.5625, -INFINITY, -0.25, -INFINITY}));
  EXPECT_EQ(transformed("bias_row", operands).logits, (std::vector<double>{1, -0.25, 1.5, 1}));
  EXPECT_EQ(transformed("none", operands).logits, (std::vector<double>{0.5, -1.25, 2, 0.75}));
  operands.temperature = 0.75;
  EXPECT_EQ(transformed("temperature", operands).logits[0], static_cast<float>(0.5 / 0.75));
  EXPECT_NEAR(transformed("gelu", operands).logits[1], -1.25 * 0.10564977366685535, 1e-7);
  EXPECT_THROW(transformed("relu", operands), std::logic_error);
}

TEST(CompareReference, TellsRightFromWrong) {
  compare::TransformOperands operands;
  operands.mask = mask;
  operands.temperature = 0.75;
  for (const std::string name : {"none", "scale", "mask", "temperature", "gelu"}) {
    const Row row = transformed(name, operands);
    std::vector<double> y = softmax(row);
    EXPECT_TRUE(passes(Quantity::softmax, row, y)) << name;
    y[2] *= 1 + 1e-5;
    EXPECT_FALSE(passes(Quantity::softmax, row, y)) << name;
    y[2] = NAN;
    EXPECT_FALSE(passes(Quantity::softmax, row, y)) << name;
  }
  const Row row = transformed("mask", operands);
  std::vector<double> y = softmax(row);
  y[1] = 1e-30;
  EXPECT_FALSE(passes(Quantity::softmax, row, y)) << "what was dropped is 0";
}

TEST(CompareReference, RowsThatAreDropped) {
  compare::TransformOperands operands;
  operands.mask = no_mask;
  const Row row = transformed("mask", operands);
  EXPECT_TRUE(passes(Quantity::softmax, row, {0, 0, 0, 0}));
  EXPECT_FALSE(passes(Quantity::softmax, row, {0, 0.25, 0, 0}));
  EXPECT_TRUE(passes(Quantity::log_softmax, row, std::vector<double>(4, -INFINITY)));
  EXPECT_TRUE(passes(Quantity::logsumexp, row, {-INFINITY}));
  EXPECT_FALSE(passes(Quantity::logsumexp, row, {0}));
}

TEST(CompareReference, WhatACausalMaskDrops) {
  const Transform causal("scale_causal");
  EXPECT_EQ(causal.dropped_at_ends(4, 4), 6);  // 3, 2, 1, 0
  EXPECT_EQ(causal.dropped_at_ends(2, 5), 7);  // 4, 3
  EXPECT_EQ(causal.dropped_at_ends(5, 2), 1);
  EXPECT_EQ(Transform("mask_row").dropped_at_ends(4, 4), 0);
  EXPECT_EQ(Transform("scale_bias_mask_causal").operand_bytes(2), 3u);
}

}  // namespace
