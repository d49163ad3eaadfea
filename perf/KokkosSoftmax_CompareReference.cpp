// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

// The reference and the tolerances. Nothing of the library is used here: what it must be checked against
// cannot come from it.

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "KokkosSoftmax_Compare.hpp"

namespace compare {

ScalarFormat scalar_format(const std::string& name) {
  if (name == "float") return {24, -126};
  if (name == "double") return {53, -1022};
  if (name == "half") return {11, -14};
  if (name == "bfloat16") return {8, -126};
  throw std::logic_error("no format known for the scalar " + name);
}

namespace {

// The distance between neighbouring numbers of the format at `value`.
double unit_in_last_place(const ScalarFormat& format, double value) {
  int exponent = format.min_exponent;
  if (value != 0) exponent = std::max(exponent, std::ilogb(std::abs(value)));
  return std::ldexp(1.0, exponent - (format.digits - 1));
}

// `error` in the unit that is reported, `excess` and `allowance` in that of the result.
void widen(Accuracy& accuracy, double error, double excess, double allowance) {
  const double allowed = excess / allowance;
  // Written so that NaN counts as the worst there is.
  if (!(error <= accuracy.error)) accuracy.error = std::isnan(error) ? INFINITY : error;
  if (!(allowed <= accuracy.allowed)) accuracy.allowed = std::isnan(allowed) ? INFINITY : allowed;
  ++accuracy.checked;
}

// What has to be met to the bit.
void check_exact(double expected, double y, Accuracy& accuracy) {
  const double excess = y == expected ? 0 : INFINITY;
  widen(accuracy, excess, excess, 1);
}

}  // namespace

Transform::Transform(const std::string& name) {
  std::size_t begin = 0;
  while (begin < name.size() && name != "none") {
    const std::size_t end = std::min(name.find('_', begin), name.size());
    steps.push_back(name.substr(begin, end - begin));
    begin = end + 1;
  }
  one_row = has("row");
  if (one_row) steps.pop_back();
}

bool Transform::has(const std::string& step) const {
  return std::find(steps.begin(), steps.end(), step) != steps.end();
}

std::size_t Transform::operand_bytes(std::size_t size_in) const {
  return (has("mask") ? sizeof(bool) : 0) + (has("bias") ? size_in : 0);
}

double Transform::dropped_at_ends(std::int64_t rows, std::int64_t columns) const {
  if (!has("causal")) return 0;
  const auto shortened = static_cast<double>(std::min(rows, columns));
  return shortened * static_cast<double>(columns) - shortened * (shortened + 1) / 2;
}

void transform_row(const Transform& transform, const TransformOperands& operands,
                   const std::string& scalar_in, const std::string& scalar_out, double* x,
                   std::int64_t columns, std::vector<double>& error) {
  const bool wide = scalar_in == "double" || scalar_out == "double";
  const double eps = std::ldexp(1.0, wide ? -53 : -24);
  // A sum, product or quotient of floats that was rounded to double rounds to the same float as the exact
  // one.
  const auto rounded = [wide](double value) {
    return wide ? value : static_cast<double>(static_cast<float>(value));
  };
  error.assign(static_cast<std::size_t>(columns), 0.0);
  for (const std::string& step : transform.steps) {
    for (std::int64_t j = 0; j < columns; ++j) {
      if (x[j] == -INFINITY) continue;  // dropped
      double &value = x[j], &of = error[static_cast<std::size_t>(j)];
      if (step == "mask") {
        if (operands.mask[j] == 0) value = -INFINITY;
      } else if (step == "causal") {
        if (j > operands.query) value = -INFINITY;
      } else if (step == "scale") {
        value = rounded(value * transform_factor);
        of = of * transform_factor + (of > 0 ? eps * std::abs(value) : 0);
      } else if (step == "bias") {
        value = rounded(value + operands.bias[j]);
        of += of > 0 ? eps * std::abs(value) : 0;
      } else if (step == "temperature") {
        // A division, or a product with the reciprocal.
        value = rounded(value / operands.temperature);
        of = of / operands.temperature + 2.5 * eps * std::abs(value);
      } else if (step == "gelu") {
        // Its slope is below 1.13, and below 0 it is a small difference; far out the logit itself, or
        // nothing.
        const double size = std::abs(value), far = wide ? 9 : 6;
        of = 1.13 * of + 8 * eps * (size <= far ? size : value > 0 ? 0 : 1);
        value = rounded(value * 0.5 * std::erfc(-value / std::sqrt(2.0)));
      } else {
        throw std::logic_error("no transform known with the step " + step);
      }
      if (value == -INFINITY) of = 0;
    }
  }
}

void check_row(Quantity quantity, const double* x, const std::vector<double>& error, std::int64_t columns,
               const double* y, const std::string& scalar_in, const std::string& scalar_out,
               Accuracy& accuracy) {
  const ScalarFormat format = scalar_format(scalar_out);
  const bool narrow = format.digits < 24;
  // Double is accumulated in double; what is then written as float is as good as float.
  const bool wide = scalar_out == "double" || (scalar_in == "double" && scalar_out != "float" && !narrow);
  const double eps = std::ldexp(1.0, wide ? -53 : -24);
  const double base = wide ? 1e-14 : 1e-6;
  const double smallest_normal = std::ldexp(1.0, format.min_exponent);

  double max = -INFINITY;
  for (std::int64_t j = 0; j < columns; ++j) max = std::max(max, x[j]);
  if (max == -INFINITY) {
    const std::int64_t results = quantity == Quantity::logsumexp ? 1 : columns;
    for (std::int64_t j = 0; j < results; ++j) {
      check_exact(quantity == Quantity::softmax ? 0 : -INFINITY, y[j], accuracy);
    }
    return;
  }
  long double sum = 0, weighted = 0;  // so that a million terms lose nothing
  for (std::int64_t j = 0; j < columns; ++j) {
    const double power = std::exp(x[j] - max);
    sum += power;
    weighted += power * error[static_cast<std::size_t>(j)];
  }
  const double total = static_cast<double>(sum), error_of_sum = static_cast<double>(weighted / sum);
  constexpr double margin = 1.5;  // for what the errors of logits do beyond the first order

  if (quantity == Quantity::logsumexp) {
    const double expected = max + std::log(total);
    const double scale = std::max({1.0, std::abs(max), std::abs(expected)});
    const double excess = std::abs(y[0] - expected);
    double allowance = 4 * eps * scale + margin * error_of_sum;
    if (narrow) allowance += unit_in_last_place(format, std::max(std::abs(expected), std::abs(y[0])));
    widen(accuracy, excess / scale, excess, allowance);
    return;
  }
  for (std::int64_t j = 0; j < columns; ++j) {
    if (x[j] == -INFINITY) {
      check_exact(quantity == Quantity::softmax ? 0 : -INFINITY, y[j], accuracy);
      continue;
    }
    const double distance = std::abs(x[j] - max);
    const double through_logits = margin * (error_of_sum + error[static_cast<std::size_t>(j)]);
    if (quantity == Quantity::softmax) {
      const double relative = base + distance * eps + std::expm1(through_logits);
      const double expected = std::exp(x[j] - max) / total;
      const double excess = std::abs(y[j] - expected);
      if (expected < smallest_normal) {
        // Flushing to zero is allowed, except in half, whose subnormal results are rounded rightly.
        const double allowance = scalar_out == "half"
                                     ? expected * relative + unit_in_last_place(format, expected)
                                     : smallest_normal;
        widen(accuracy, 0, excess, allowance);
        continue;
      }
      double allowance = expected * relative;
      if (narrow) allowance += unit_in_last_place(format, std::max(expected, std::abs(y[j])));
      widen(accuracy, excess / expected, excess, allowance);
    } else {
      const double expected = (x[j] - max) - std::log(total);
      const double scale = std::max({1.0, distance, std::log(static_cast<double>(columns))});
      const double excess = std::abs(y[j] - expected);
      double allowance = 4 * eps * scale + through_logits;
      if (narrow) allowance += unit_in_last_place(format, std::max(std::abs(expected), std::abs(y[j])));
      widen(accuracy, excess / scale, excess, allowance);
    }
  }
}

}  // namespace compare
