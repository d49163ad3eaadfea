// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Heads against the reference: the logits in higher precision, each with the error that a GEMM may add.
#ifndef KOKKOSSOFTMAX_TESTS_LINEAR_CASES_HPP
#define KOKKOSSOFTMAX_TESTS_LINEAR_CASES_HPP

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cases.hpp"

namespace tests {

// Logits of some rows with the most that a GEMM's roundings can do to them.
struct Logits {
  std::vector<double> value, error;
};

// Products and sums with the unit roundoff `epsilon`; operands are exact save for `operand_epsilon` (TF32).
inline Logits exact_logits(const std::vector<double>& x, const std::vector<double>& w,
                           const std::vector<std::int64_t>& rows, std::int64_t n, std::int64_t k,
                           double epsilon, double operand_epsilon = 0) {
  Logits logits;
  const double roundings =
      std::min<double>(static_cast<double>(k), 8 + 2 * std::sqrt(static_cast<double>(k)));
  for (const auto m : rows) {
    for (std::int64_t j = 0; j < n; ++j) {
      const double* a = x.data() + m * k;
      const double* b = w.data() + j * k;
      long double sum = 0;
      double size = 0;
      for (std::int64_t i = 0; i < k; ++i) {
        sum += static_cast<long double>(a[i]) * b[i];
        size += std::fabs(a[i] * b[i]);
      }
      logits.value.push_back(static_cast<double>(sum));
      logits.error.push_back((roundings * epsilon + 2 * operand_epsilon) * size);
    }
  }
  return logits;
}

// The first step of every chain: what the GEMM did.
inline reference::Step gemm_error(std::vector<double> error, std::int64_t columns) {
  return [error = std::move(error), columns](reference::Logit logit, Position at) {
    logit.error += error[at.row * columns + at.column];
    return logit;
  };
}

struct LinearCase {
  std::int64_t m = 0, n = 0, k = 0;
  std::optional<Layout> x{}, w{}, y{};  // row-major when absent
  double range = 1;
  std::uint64_t seed = 1;
  ks::Precision precision = ks::Precision::ieee;
  bool integers = false;  // operands for which every GEMM is exact

  std::string text() const {
    return std::to_string(m) + " x " + std::to_string(n) + " x " + std::to_string(k);
  }
};

inline constexpr Operation head_operations[] = {Operation::softmax, Operation::log_softmax};
inline std::string head_name(Operation operation) {
  return std::string("linear_") + reference::name(operation);
}

template <class Exec, class X, class W, class Y, class... Options>
void call_head(Operation operation, const Exec& exec, const X& x, const W& w, const Y& y,
               const Options&... options) {
  if (operation == Operation::softmax) {
    ks::linear_softmax(exec, x, w, y, options...);
  } else {
    ks::linear_log_softmax(exec, x, w, y, options...);
  }
}

// Those for a head's scalars at Precision::ieee, and "" for the default.
template <class Exec, class XS = float, class WS = float, class YS = float>
std::vector<std::string> linear_implementations_and_default() {
  using Head = ks::impl::PlainHead<ks::impl::BoundIdentity>;
  auto names =
      ks::impl::LinearCandidates<Exec>::template names<Exec, ks::impl::LinearProblem<XS, WS, YS, Head>>();
#if defined(KOKKOS_ENABLE_CUDA)
  // Whether it is there is known when it runs.
  if constexpr (std::is_same_v<Exec, Kokkos::Cuda>) {
    if (!ks::impl::TensorCoreGemm::is_there(Exec())) std::erase(names, ks::impl::TensorCoreGemm::name);
    std::erase(names, ks::impl::RoundedTensorCoreGemm::name);
  }
#endif
  names.insert(names.begin(), "");
  return names;
}

template <class XS, class WS, class YS, class Exec>
struct LinearOperands {
  LinearCase c;
  std::vector<double> x_values, w_values;
  Buffer<Exec> x, w, y;

  explicit LinearOperands(const LinearCase& c_)
      : c(c_),
        x_values(values(c_, scalar_of<XS>, c_.m * c_.k, 2 * c_.seed)),
        w_values(values(c_, scalar_of<WS>, c_.n * c_.k, 2 * c_.seed + 1)),
        x(scalar_of<XS>, c_.x ? *c_.x : reference::right({c_.m, c_.k}), &x_values),
        w(scalar_of<WS>, c_.w ? *c_.w : reference::right({c_.n, c_.k}), &w_values),
        y(scalar_of<YS>, c_.y ? *c_.y : reference::right({c_.m, c_.n})) {}

  // Other values in X.
  void refill(std::uint64_t seed) {
    x_values = values(c, scalar_of<XS>, c.m * c.k, seed);
    x.fill(x_values);
    x.upload();
    rows_of_logits_.clear();
    logits_ = {};
  }

  auto x_view() const { return x.template view<const XS, 2>(); }
  auto w_view() const { return w.template view<const WS, 2>(); }
  auto y_view() const { return y.template view<YS, 2>(); }

  reference::Scalar accumulator() const {
    const bool is_double =
        std::is_same_v<XS, double> || std::is_same_v<WS, double> || std::is_same_v<YS, double>;
    return is_double ? Scalar::float64 : Scalar::float32;
  }
  double epsilon() const { return accumulator() == Scalar::float64 ? 0x1p-53 : 0x1p-24; }

  const Logits& logits_of(const std::vector<std::int64_t>& rows) {
    if (rows != rows_of_logits_ || logits_.value.empty()) {
      const bool tf32 = c.precision == ks::Precision::tf32 && std::is_same_v<XS, float>;
      logits_ = exact_logits(x_values, w_values, rows, c.n, c.k, epsilon(), tf32 ? 0x1p-10 : 0);
      if (c.integers) std::fill(logits_.error.begin(), logits_.error.end(), 0.0);
      rows_of_logits_ = rows;
    }
    return logits_;
  }

  // Rows of the output against the reference. `chain(logits)` is what the head does to them.
  void check(Operation operation, const std::vector<std::int64_t>& rows,
             const std::function<Chain(const Logits&)>& chain) {
    x.download();
    w.download();
    y.download();
    EXPECT_TRUE(x.unchanged() && w.unchanged()) << "an input was written";
    EXPECT_TRUE(y.padding_untouched()) << "the padding of the output was written";
    const Logits& logits = logits_of(rows);
    // The rows that are looked at, one after the other.
    const auto count = static_cast<std::int64_t>(rows.size());
    const Layout chosen = reference::right({count, c.n});
    std::vector<unsigned char> bytes(static_cast<std::size_t>(count * c.n) * sizeof(YS));
    const Layout& from = y.layout();
    for (std::int64_t r = 0; r < count; ++r) {
      for (std::int64_t j = 0; j < c.n; ++j) {
        std::memcpy(bytes.data() + (r * c.n + j) * sizeof(YS),
                    y.host() + (from.offset + rows[r] * from.strides[0] + j * from.strides[1]) * sizeof(YS),
                    sizeof(YS));
      }
    }
    reference::Problem problem{operation, accumulator(), scalar_of<YS>, {count, c.n}, -1, logits.value, {}};
    problem.chain = chain(logits);
    problem.chain.insert(problem.chain.begin(), gemm_error(logits.error, c.n));
    std::string report;
    EXPECT_TRUE(reference::agrees(problem, chosen, bytes.data(), report))
        << report << head_name(operation) << ' ' << c.text() << " by " << ks::last_implementation();
  }

 private:
  std::vector<std::int64_t> rows_of_logits_;
  Logits logits_;

  static std::vector<double> values(const LinearCase& of, Scalar scalar, std::int64_t count,
                                    std::uint64_t seed) {
    if (!of.integers) return random_values(scalar, count, -of.range, of.range, seed);
    Random random(seed);
    std::vector<double> all(static_cast<std::size_t>(count));
    for (auto& value : all) value = static_cast<double>(random.below(5) - 2);
    return all;
  }
};

inline std::vector<std::int64_t> all_rows(std::int64_t m) {
  std::vector<std::int64_t> rows;
  for (std::int64_t i = 0; i < m; ++i) rows.push_back(i);
  return rows;
}

// Both operations by every implementation.
template <class XS, class WS, class YS, class Exec, class Make>
void check_head(
    const Exec& exec, const LinearCase& c, const std::vector<std::int64_t>& rows, Make&& head,
    const std::function<Chain(const Logits&)>& chain = [](const Logits&) { return Chain{}; }) {
  LinearOperands<XS, WS, YS, Exec> o(c);
  for (auto operation : head_operations) {
    for (const auto& name : linear_implementations_and_default<Exec, XS, WS, YS>()) {
      std::optional<ks::ScopedImplementation> forced;
      if (!name.empty()) forced.emplace(head_name(operation) + '=' + name);
      o.y.upload();
      ASSERT_NO_THROW(call_head(operation, exec, o.x_view(), o.w_view(), o.y_view(), head(), c.precision));
      exec.fence("test");
      if (!name.empty() && c.m * c.n > 0) {
        EXPECT_EQ(ks::last_implementation(), name);
      }
      o.check(operation, rows, chain);
    }
  }
}

template <class XS, class WS, class YS, class Exec>
void check_plain(const Exec& exec, const LinearCase& c, const std::vector<std::int64_t>& rows) {
  check_head<XS, WS, YS>(exec, c, rows, [] { return ks::transform(AsTheyAre{}); });
}

}  // namespace tests

#endif
