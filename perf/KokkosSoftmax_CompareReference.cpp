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

}  // namespace

void check_row(Quantity quantity, const double* x, std::int64_t columns, const double* y,
               const std::string& scalar_in, const std::string& scalar_out, Accuracy& accuracy) {
  const ScalarFormat format = scalar_format(scalar_out);
  const bool narrow = format.digits < 24;
  // Double is accumulated in double; what is then written as float is as good as float.
  const bool wide = scalar_out == "double" || (scalar_in == "double" && scalar_out != "float" && !narrow);
  const double eps = std::ldexp(1.0, wide ? -53 : -24);
  const double base = wide ? 1e-14 : 1e-6;
  const double smallest_normal = std::ldexp(1.0, format.min_exponent);

  double max = -INFINITY;
  for (std::int64_t j = 0; j < columns; ++j) max = std::max(max, x[j]);
  long double sum = 0;  // so that a million terms lose nothing
  for (std::int64_t j = 0; j < columns; ++j) sum += std::exp(x[j] - max);
  const double total = static_cast<double>(sum);

  if (quantity == Quantity::logsumexp) {
    const double expected = max + std::log(total);
    const double scale = std::max({1.0, std::abs(max), std::abs(expected)});
    const double excess = std::abs(y[0] - expected);
    double allowance = 4 * eps * scale;
    if (narrow) allowance += unit_in_last_place(format, std::max(std::abs(expected), std::abs(y[0])));
    widen(accuracy, excess / scale, excess, allowance);
    return;
  }
  for (std::int64_t j = 0; j < columns; ++j) {
    const double distance = std::abs(x[j] - max);
    if (quantity == Quantity::softmax) {
      const double expected = std::exp(x[j] - max) / total;
      const double excess = std::abs(y[j] - expected);
      if (expected < smallest_normal) {
        // Flushing to zero is allowed, except in half, whose subnormal results are rounded rightly.
        const double allowance =
            scalar_out == "half" ? expected * (base + distance * eps) + unit_in_last_place(format, expected)
                                 : smallest_normal;
        widen(accuracy, 0, excess, allowance);
        continue;
      }
      double allowance = expected * (base + distance * eps);
      if (narrow) allowance += unit_in_last_place(format, std::max(expected, std::abs(y[j])));
      widen(accuracy, excess / expected, excess, allowance);
    } else {
      const double expected = (x[j] - max) - std::log(total);
      const double scale = std::max({1.0, distance, std::log(static_cast<double>(columns))});
      const double excess = std::abs(y[j] - expected);
      double allowance = 4 * eps * scale;
      if (narrow) allowance += unit_in_last_place(format, std::max(std::abs(expected), std::abs(y[j])));
      widen(accuracy, excess / scale, excess, allowance);
    }
  }
}

}  // namespace compare
