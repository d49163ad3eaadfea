// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A plain softmax in higher precision, and the tolerances that the library promises. It knows neither Kokkos
// nor the library, not even for the 16-bit types, so that a mistake there cannot hide itself here.
#ifndef KOKKOSSOFTMAX_TESTS_REFERENCE_HPP
#define KOKKOSSOFTMAX_TESTS_REFERENCE_HPP

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

namespace reference {

inline constexpr double infinity = std::numeric_limits<double>::infinity();
inline constexpr double nan = std::numeric_limits<double>::quiet_NaN();

// --- scalar types, by value -----------------------------------------------------------------------------

enum class Scalar { float32, float64, float16, bfloat16, boolean };

std::size_t size_of(Scalar scalar);
const char* name(Scalar scalar);
double half_value(std::uint16_t bits);
double bfloat16_value(std::uint16_t bits);
// Rounding to nearest, ties to even, once, from any double.
std::uint16_t half_bits(double value);
std::uint16_t bfloat16_bits(double value);
double decode(Scalar scalar, const void* from);
void encode(Scalar scalar, double value, void* to);
double rounded(Scalar scalar, double value);
double smallest_normal(Scalar scalar);
double largest(Scalar scalar);
// The distance between neighbouring values of the type around value.
double unit_in_last_place(Scalar scalar, double value);

// The type in which the library computes: double as soon as one side is double.
struct Accumulator {
  bool is_double;
  Accumulator(Scalar in, Scalar out) : is_double(in == Scalar::float64 || out == Scalar::float64) {}
  double epsilon() const { return is_double ? 0x1p-53 : 0x1p-24; }
  long double round(long double value) const {
    return is_double ? static_cast<double>(value) : static_cast<float>(value);
  }
};

// --- where an element of a multi-dimensional array lies ---------------------------------------------------

struct Layout {
  std::vector<std::int64_t> extents;
  std::vector<std::int64_t> strides;
  std::int64_t offset = 0;  // elements before the first one of the view

  int rank() const { return static_cast<int>(extents.size()); }
  std::int64_t size() const;
  std::int64_t span() const;  // elements from the start of the buffer to the end of the view
};

// The first dimension named in order is the fastest. Each stride is that of the dimension before times its
// extent, plus padding.
Layout ordered(std::vector<std::int64_t> extents, std::vector<int> order, std::int64_t first_stride = 1,
               std::int64_t padding = 0, std::int64_t offset = 0);
Layout right(std::vector<std::int64_t> extents, std::int64_t padding = 0, std::int64_t offset = 0);
Layout left(std::vector<std::int64_t> extents, std::int64_t padding = 0, std::int64_t offset = 0);

std::vector<std::int64_t> without(std::vector<std::int64_t> extents, int axis);

// rows x columns: the row is the linear index over the dimensions other than the axis, the last the fastest.
struct Rows {
  Rows(const std::vector<std::int64_t>& extents, int axis);
  int axis;  // not negative
  std::int64_t rows, columns;
  std::vector<std::int64_t> extents;

  // Index into the buffer of the first element of a row, and into that of an array without the axis.
  std::int64_t start(const Layout& layout, std::int64_t row) const;
  std::int64_t start_without_axis(const Layout& layout, std::int64_t row) const;
  // The index along the dimension before the axis (0 when there is none).
  std::int64_t query(std::int64_t row) const;
};

// --- logit transforms -------------------------------------------------------------------------------------

// A logit, and how far the library's own arithmetic may stray from it: the tests state that bound for each
// step.
struct Logit {
  long double value;
  long double error = 0;
  bool masked = false;
};
struct Position {
  std::int64_t row, column, query;
};
using Step = std::function<Logit(Logit, Position)>;
using Chain = std::vector<Step>;

Step scale(Accumulator acc, double factor);
Step scale(Accumulator acc, std::function<double(Position)> factor);
Step temperature(Accumulator acc, std::vector<double> per_row);
Step keep_if(std::function<bool(std::int64_t, std::int64_t)> predicate);
Step mask(std::function<bool(Position)> keep);
Step causal(std::int64_t offset);
Step bias(Accumulator acc, std::function<double(Position)> value);
Step relu();
Step gelu(Accumulator acc);
Step gelu_tanh(Accumulator acc);
Step batch_norm(Accumulator acc, std::vector<double> mean, std::vector<double> variance,
                std::vector<double> gamma, std::vector<double> beta, double epsilon);
// A function that the test itself writes; error is the relative error of its result.
Step function(Accumulator acc, std::function<long double(long double, Position)> f, double roundings);

// --- the operations ---------------------------------------------------------------------------------------

enum class Operation { softmax, log_softmax, logsumexp };
inline constexpr Operation operations[] = {Operation::softmax, Operation::log_softmax, Operation::logsumexp};
const char* name(Operation operation);

struct Problem {
  Operation operation = Operation::softmax;
  Scalar in = Scalar::float32, out = Scalar::float32;
  std::vector<std::int64_t> extents;
  int axis = -1;
  std::vector<double> logits;  // as the input type holds them; the last dimension is the fastest
  Chain chain;
  const std::vector<Logit>* transformed = nullptr;  // what the chain makes of the logits, where that is known
};

// What the chain makes of the logits, in their order.
std::vector<Logit> transformed(const Problem& problem);

// Compares an output that lies in a buffer with this layout; fills report with the first few differences.
// True when there are none.
bool agrees(const Problem& problem, const Layout& out_layout, const void* out_buffer, std::string& report);

}  // namespace reference

#endif
