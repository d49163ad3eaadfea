// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "reference.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>
#include <utility>

namespace reference {

// --- scalar types -----------------------------------------------------------------------------------------

namespace {

// 2^n for the n of normal doubles. (A multiplication by it is exact here, as ldexp is, which takes a third of
// a test of 16 bits, as does ilogb.)
double power_of_two(int n) {
  const std::uint64_t bits = static_cast<std::uint64_t>(1023 + n) << 52;
  double power;
  std::memcpy(&power, &bits, sizeof power);
  return power;
}

// Of a normal double that is not negative; of subnormals and 0 less than of any of these.
int exponent_of(double magnitude) {
  std::uint64_t bits;
  std::memcpy(&bits, &magnitude, sizeof bits);
  return static_cast<int>(bits >> 52) - 1023;
}

// The value of a 16-bit float with so many exponent and mantissa bits.
double decode16(std::uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int sign = bits >> 15;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const int exponent_of_one = (1 << (exponent_bits - 1)) - 1;
  double magnitude;
  if (exponent == (1 << exponent_bits) - 1) {
    magnitude = mantissa == 0 ? infinity : nan;
  } else if (exponent == 0) {
    magnitude = mantissa * power_of_two(1 - exponent_of_one - mantissa_bits);
  } else {
    magnitude = (mantissa + (1 << mantissa_bits)) * power_of_two(exponent - exponent_of_one - mantissa_bits);
  }
  return sign ? -magnitude : magnitude;
}

std::uint16_t encode16(double value, int exponent_bits, int mantissa_bits) {
  const int exponent_of_one = (1 << (exponent_bits - 1)) - 1;
  const std::uint16_t infinity_bits = static_cast<std::uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits);
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | infinity_bits | (1 << (mantissa_bits - 1)));
  const double magnitude = std::fabs(value);
  if (std::isinf(value)) return static_cast<std::uint16_t>(sign | infinity_bits);
  if (magnitude == 0) return sign;
  int exponent = std::max(exponent_of(magnitude), 1 - exponent_of_one);
  // nearbyint rounds to nearest even.
  double steps = std::nearbyint(magnitude * power_of_two(mantissa_bits - exponent));
  if (steps >= 1 << (mantissa_bits + 1)) {
    steps /= 2;
    ++exponent;
  }
  if (exponent > exponent_of_one) return static_cast<std::uint16_t>(sign | infinity_bits);
  const int whole = static_cast<int>(steps);
  const int hidden = 1 << mantissa_bits;
  if (whole < hidden) return static_cast<std::uint16_t>(sign | whole);  // subnormal
  return static_cast<std::uint16_t>(sign | ((exponent + exponent_of_one) << mantissa_bits) |
                                    (whole - hidden));
}

}  // namespace

double half_value(std::uint16_t bits) {
  return decode16(bits, 5, 10);
}
double bfloat16_value(std::uint16_t bits) {
  return decode16(bits, 8, 7);
}
std::uint16_t half_bits(double value) {
  return encode16(value, 5, 10);
}
std::uint16_t bfloat16_bits(double value) {
  return encode16(value, 8, 7);
}

std::size_t size_of(Scalar scalar) {
  switch (scalar) {
    case Scalar::float64:
      return 8;
    case Scalar::float32:
      return 4;
    case Scalar::boolean:
      return sizeof(bool);
    default:
      return 2;
  }
}

const char* name(Scalar scalar) {
  switch (scalar) {
    case Scalar::float64:
      return "double";
    case Scalar::float32:
      return "float";
    case Scalar::float16:
      return "half";
    case Scalar::bfloat16:
      return "bfloat16";
    default:
      return "bool";
  }
}

double decode(Scalar scalar, const void* from) {
  float single;
  double wide;
  std::uint16_t bits;
  bool flag;
  switch (scalar) {
    case Scalar::float64:
      std::memcpy(&wide, from, sizeof wide);
      return wide;
    case Scalar::float32:
      std::memcpy(&single, from, sizeof single);
      return single;
    case Scalar::boolean:
      std::memcpy(&flag, from, sizeof flag);
      return flag;
    default:
      std::memcpy(&bits, from, sizeof bits);
  }
  return scalar == Scalar::float16 ? half_value(bits) : bfloat16_value(bits);
}

void encode(Scalar scalar, double value, void* to) {
  const float single = static_cast<float>(value);
  const bool flag = value != 0;
  std::uint16_t bits;
  switch (scalar) {
    case Scalar::float64:
      std::memcpy(to, &value, sizeof value);
      return;
    case Scalar::float32:
      std::memcpy(to, &single, sizeof single);
      return;
    case Scalar::boolean:
      std::memcpy(to, &flag, sizeof flag);
      return;
    default:
      bits = scalar == Scalar::float16 ? half_bits(value) : bfloat16_bits(value);
  }
  std::memcpy(to, &bits, sizeof bits);
}

double rounded(Scalar scalar, double value) {
  unsigned char bytes[8];
  encode(scalar, value, bytes);
  return decode(scalar, bytes);
}

double smallest_normal(Scalar scalar) {
  switch (scalar) {
    case Scalar::float64:
      return std::numeric_limits<double>::min();
    case Scalar::float16:
      return 0x1p-14;
    default:
      return std::numeric_limits<float>::min();
  }
}

double largest(Scalar scalar) {
  switch (scalar) {
    case Scalar::float64:
      return std::numeric_limits<double>::max();
    case Scalar::float32:
      return std::numeric_limits<float>::max();
    case Scalar::float16:
      return 65504;
    default:
      return 0x1.FEp127;
  }
}

double unit_in_last_place(Scalar scalar, double value) {
  const int mantissa_bits = scalar == Scalar::float64   ? 52
                            : scalar == Scalar::float32 ? 23
                            : scalar == Scalar::float16 ? 10
                                                        : 7;
  const double at = std::clamp(std::fabs(value), smallest_normal(scalar), largest(scalar));
  return std::ldexp(1.0, std::ilogb(at) - mantissa_bits);
}

// --- layouts ----------------------------------------------------------------------------------------------

std::int64_t Layout::size() const {
  std::int64_t product = 1;
  for (auto extent : extents) product *= extent;
  return product;
}

std::int64_t Layout::span() const {
  if (size() == 0) return offset;
  std::int64_t last = offset;
  for (int d = 0; d < rank(); ++d) last += (extents[d] - 1) * strides[d];
  return last + 1;
}

Layout ordered(std::vector<std::int64_t> extents, std::vector<int> order, std::int64_t first_stride,
               std::int64_t padding, std::int64_t offset) {
  Layout layout{extents, std::vector<std::int64_t>(extents.size()), offset};
  std::int64_t stride = first_stride;
  for (int d : order) {
    layout.strides[d] = stride;
    stride = stride * std::max<std::int64_t>(extents[d], 1) + padding;
  }
  return layout;
}

Layout right(std::vector<std::int64_t> extents, std::int64_t padding, std::int64_t offset) {
  std::vector<int> order;
  for (int d = static_cast<int>(extents.size()) - 1; d >= 0; --d) order.push_back(d);
  return ordered(std::move(extents), order, 1, padding, offset);
}

Layout left(std::vector<std::int64_t> extents, std::int64_t padding, std::int64_t offset) {
  std::vector<int> order;
  for (int d = 0; d < static_cast<int>(extents.size()); ++d) order.push_back(d);
  return ordered(std::move(extents), order, 1, padding, offset);
}

std::vector<std::int64_t> without(std::vector<std::int64_t> extents, int axis) {
  extents.erase(extents.begin() + (axis < 0 ? axis + static_cast<int>(extents.size()) : axis));
  return extents;
}

Rows::Rows(const std::vector<std::int64_t>& all, int which)
    : axis(which < 0 ? which + static_cast<int>(all.size()) : which),
      rows(1),
      columns(all[axis]),
      extents(all) {
  for (int d = 0; d < static_cast<int>(extents.size()); ++d) {
    if (d != axis) rows *= extents[d];
  }
}

std::int64_t Rows::start(const Layout& layout, std::int64_t row) const {
  std::int64_t at = layout.offset;
  for (int d = static_cast<int>(extents.size()) - 1; d >= 0; --d) {
    if (d == axis) continue;
    at += row % extents[d] * layout.strides[d];
    row /= extents[d];
  }
  return at;
}

std::int64_t Rows::start_without_axis(const Layout& layout, std::int64_t row) const {
  std::int64_t at = layout.offset;
  for (int d = layout.rank() - 1; d >= 0; --d) {
    at += row % layout.extents[d] * layout.strides[d];
    row /= layout.extents[d];
  }
  return at;
}

std::int64_t Rows::query(std::int64_t row) const {
  for (int d = static_cast<int>(extents.size()) - 1; d > axis; --d) row /= extents[d];
  return axis == 0 ? 0 : row % extents[axis - 1];
}

// --- transforms -------------------------------------------------------------------------------------------

Step scale(Accumulator acc, double factor) {
  return [=](Logit logit, Position) {
    const long double product = logit.value * acc.round(factor);
    // Without an error before it, the product is the correctly rounded one: it may not be fused with the
    // subtraction of the maximum that follows.
    logit.error *= std::fabs(factor);
    if (logit.error > 0) logit.error += std::fabs(product) * acc.epsilon();
    logit.value = acc.round(product);
    return logit;
  };
}

Step scale(Accumulator acc, std::function<double(Position)> factor) {
  return [=](Logit logit, Position at) { return scale(acc, factor(at))(logit, at); };
}

Step temperature(Accumulator acc, std::vector<double> per_row) {
  return [=](Logit logit, Position at) {
    const long double t = acc.round(per_row[at.row]);
    logit.value = logit.value / t;
    // Division, or multiplication by the reciprocal.
    logit.error = logit.error / t + 2.5L * acc.epsilon() * std::fabs(logit.value);
    logit.value = acc.round(logit.value);
    return logit;
  };
}

Step mask(std::function<bool(Position)> keep) {
  return [keep](Logit logit, Position at) {
    if (!keep(at)) logit.masked = true;
    return logit;
  };
}

Step keep_if(std::function<bool(std::int64_t, std::int64_t)> predicate) {
  return mask([predicate](Position at) { return predicate(at.row, at.column); });
}

Step causal(std::int64_t offset) {
  return mask([offset](Position at) { return at.column <= at.query + offset; });
}

Step bias(Accumulator acc, std::function<double(Position)> value) {
  return [=](Logit logit, Position at) {
    const long double sum = logit.value + static_cast<long double>(value(at));
    logit.value = acc.round(sum);
    if (logit.error > 0) logit.error += acc.epsilon() * std::fabs(sum);
    return logit;
  };
}

Step relu() {
  return [](Logit logit, Position) {
    if (logit.value < 0) logit.value = 0;
    return logit;
  };
}

namespace {
// The steepest slope of either form of GELU is below 1.13. Below zero the value is a small difference from 1,
// which erf or tanh in the accumulator's type give with an error of some eps relative to x.
Logit after_gelu(Accumulator acc, Logit logit, long double value) {
  const long double size = std::fabs(logit.value);
  // Far out it is the logit itself, or nothing.
  const long double far = acc.is_double ? 9 : 6;
  const long double own = size <= far ? 8 * acc.epsilon() * size : logit.value > 0 ? 0 : 8 * acc.epsilon();
  logit.error = 1.13L * logit.error + own;
  logit.value = acc.round(value);
  return logit;
}
}  // namespace

Step gelu(Accumulator acc) {
  return [=](Logit logit, Position) {
    return after_gelu(acc, logit, logit.value * 0.5L * std::erfc(-logit.value / std::sqrt(2.0L)));
  };
}

Step gelu_tanh(Accumulator acc) {
  return [=](Logit logit, Position) {
    const long double x = logit.value;
    const long double inner = 0.79788456080286535588L * (x + 0.044715L * x * x * x);
    return after_gelu(acc, logit, 0.5L * x * (1 + std::tanh(inner)));
  };
}

Step batch_norm(Accumulator acc, std::vector<double> mean, std::vector<double> variance,
                std::vector<double> gamma, std::vector<double> beta, double epsilon) {
  return [=](Logit logit, Position at) {
    const auto c = at.column;
    const long double factor = gamma[c] / std::sqrt(static_cast<long double>(variance[c]) + epsilon);
    const long double value = (logit.value - mean[c]) * factor + beta[c];
    // Whether the statistics are folded into one multiply-add is the library's choice.
    const long double size =
        (std::fabs(logit.value) + std::fabs(mean[c])) * std::fabs(factor) + std::fabs(beta[c]);
    logit.error = logit.error * std::fabs(factor) + 6 * acc.epsilon() * (std::isinf(size) ? 0 : size);
    logit.value = acc.round(value);
    return logit;
  };
}

Step function(Accumulator acc, std::function<long double(long double, Position)> f, double roundings) {
  return [=](Logit logit, Position at) {
    const long double value = f(logit.value, at);
    logit.error = logit.error * 4 + roundings * acc.epsilon() * (std::isinf(value) ? 0 : std::fabs(value));
    logit.value = acc.round(value);
    return logit;
  };
}

// --- the operations ---------------------------------------------------------------------------------------

const char* name(Operation operation) {
  switch (operation) {
    case Operation::softmax:
      return "softmax";
    case Operation::log_softmax:
      return "log_softmax";
    default:
      return "logsumexp";
  }
}

namespace {

template <class Real>
struct Row {
  std::vector<Logit> logits;
  bool has_nan = false, has_positive_infinity = false, all_masked = true;
  Real maximum = -std::numeric_limits<Real>::infinity();
  Real log_sum = 0;  // of exp(x - maximum)
  Real error = 0;    // of logsumexp through the errors of the logits

  void reduce() {
    has_nan = has_positive_infinity = false;
    all_masked = true;
    maximum = -std::numeric_limits<Real>::infinity();
    for (const auto& logit : logits) {
      if (logit.masked) continue;
      all_masked = false;
      if (std::isnan(logit.value)) has_nan = true;
      if (std::isinf(logit.value)) has_positive_infinity = true;
      maximum = std::max(maximum, static_cast<Real>(logit.value));
    }
    if (has_nan || has_positive_infinity || all_masked) return;
    Real sum = 0, weighted = 0;
    for (const auto& logit : logits) {
      if (logit.masked) continue;
      const Real power = std::exp(static_cast<Real>(logit.value) - maximum);
      sum += power;
      weighted += power * static_cast<Real>(logit.error);
    }
    log_sum = std::log(sum);
    error = weighted / sum;
  }
};

struct Expected {
  double value;
  double tolerance;  // absolute, before the rounding to the output type
};

template <class Real>
Expected expected(const Problem& problem, const Row<Real>& row, const Logit* logit, Accumulator acc) {
  const bool whole_row = problem.operation == Operation::logsumexp;
  if (row.has_nan) return {nan, 0};
  if (row.has_positive_infinity) return {whole_row ? infinity : nan, 0};
  const double eps = acc.epsilon();
  const double maximum = static_cast<double>(row.maximum);
  if (whole_row) {
    if (row.all_masked) return {-infinity, 0};
    const double value = static_cast<double>(row.maximum + row.log_sum);
    const double size = std::max({1.0, std::fabs(maximum), std::fabs(value)});
    return {value, 4 * eps * size + 1.5 * static_cast<double>(row.error)};
  }
  const bool log = problem.operation == Operation::log_softmax;
  if (row.all_masked || logit->masked) return {log ? -infinity : 0.0, 0};
  const Real distance = static_cast<Real>(logit->value) - row.maximum;
  const double through_logits = 1.5 * static_cast<double>(row.error + static_cast<Real>(logit->error));
  if (log) {
    const double size = std::max(
        {1.0, std::fabs(static_cast<double>(distance)), std::log(static_cast<double>(row.logits.size()))});
    return {static_cast<double>(distance - row.log_sum), 4 * eps * size + through_logits};
  }
  const double value = static_cast<double>(std::exp(distance - row.log_sum));
  const double relative = (acc.is_double ? 1e-14 : 1e-6) + static_cast<double>(std::fabs(distance)) * eps +
                          std::expm1(std::min(through_logits, 500.0));
  return {value, value * relative};
}

bool within(const Problem& problem, Accumulator acc, const Expected& want, double got) {
  if (std::isnan(want.value)) return std::isnan(got);
  if (std::isnan(got)) return false;
  if (std::isinf(want.value)) return got == want.value;
  if (want.tolerance == 0 && want.value == 0) return got == 0;
  const Scalar out = problem.out;
  const bool narrowed = size_of(out) < (acc.is_double ? 8u : 4u);
  const double slack = want.tolerance + (narrowed ? unit_in_last_place(out, want.value) : 0.0);
  if (std::isinf(got))
    return std::signbit(got) == std::signbit(want.value) && std::fabs(want.value) + slack > largest(out);
  if (problem.operation == Operation::softmax && (got < 0 || got > 1 + slack)) return false;
  if (std::fabs(got - want.value) <= slack) return true;
  // Subnormal results may be flushed, save in half.
  return out != Scalar::float16 && problem.operation == Operation::softmax &&
         want.value < smallest_normal(out) * (1 + 1e-6) && got >= 0 && got <= smallest_normal(out);
}

Logit transformed_logit(const Problem& problem, double value, const Position& at) {
  Logit logit{value};
  // A masked logit stays masked, whatever the rest of the chain makes of its value.
  logit.masked = logit.value == -infinity;
  for (const auto& step : problem.chain) logit = step(logit, at);
  logit.masked = logit.masked || logit.value == -infinity;
  return logit;
}

template <class Real>
bool all_rows_agree(const Problem& problem, const Layout& out_layout, const unsigned char* out_buffer,
                    std::string& report) {
  const Rows rows(problem.extents, problem.axis);
  const Accumulator acc(problem.in, problem.out);
  const Layout logical = right(problem.extents);
  const std::int64_t stride = logical.strides[rows.axis];
  const auto width = static_cast<std::int64_t>(size_of(problem.out));
  int differences = 0;
  Row<Real> row;
  row.logits.resize(rows.columns);
  const auto compare = [&](std::int64_t r, std::int64_t c, const Expected& want, std::int64_t at) {
    const double got = decode(problem.out, out_buffer + at * width);
    if (within(problem, acc, want, got)) return;
    if (++differences > 3) return;
    std::ostringstream text;
    text.precision(17);
    text << name(problem.operation) << ' ' << name(problem.in) << " -> " << name(problem.out) << " row " << r
         << " of " << rows.rows;
    if (c >= 0) text << ", column " << c << " of " << rows.columns;
    text << ": got " << got << ", expected " << want.value << " +- " << want.tolerance
         << "; the row's maximum is " << static_cast<double>(row.maximum) << '\n';
    report += text.str();
  };
  for (std::int64_t r = 0; r < rows.rows; ++r) {
    const std::int64_t from = rows.start(logical, r);
    const std::int64_t query = rows.query(r);
    for (std::int64_t c = 0; c < rows.columns; ++c) {
      const std::int64_t at = from + c * stride;
      row.logits[c] = problem.transformed
                          ? (*problem.transformed)[at]
                          : transformed_logit(problem, problem.logits[at], Position{r, c, query});
    }
    row.reduce();
    if (problem.operation == Operation::logsumexp) {
      compare(r, -1, expected(problem, row, nullptr, acc), rows.start_without_axis(out_layout, r));
      continue;
    }
    const std::int64_t to = rows.start(out_layout, r);
    for (std::int64_t c = 0; c < rows.columns; ++c) {
      compare(r, c, expected(problem, row, &row.logits[c], acc), to + c * out_layout.strides[rows.axis]);
    }
  }
  if (differences > 3) report += "... " + std::to_string(differences) + " differences in all\n";
  return differences == 0;
}

}  // namespace

std::vector<Logit> transformed(const Problem& problem) {
  const Rows rows(problem.extents, problem.axis);
  const Layout logical = right(problem.extents);
  const std::int64_t stride = logical.strides[rows.axis];
  std::vector<Logit> result(problem.logits.size());
  for (std::int64_t r = 0; r < rows.rows; ++r) {
    const std::int64_t from = rows.start(logical, r), query = rows.query(r);
    for (std::int64_t c = 0; c < rows.columns; ++c) {
      const std::int64_t at = from + c * stride;
      result[at] = transformed_logit(problem, problem.logits[at], {r, c, query});
    }
  }
  return result;
}

bool agrees(const Problem& problem, const Layout& out_layout, const void* out_buffer, std::string& report) {
  const auto* bytes = static_cast<const unsigned char*>(out_buffer);
  return Accumulator(problem.in, problem.out).is_double
             ? all_rows_agree<long double>(problem, out_layout, bytes, report)
             : all_rows_agree<double>(problem, out_layout, bytes, report);
}

}  // namespace reference
