// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Operands and functors for the tests of transforms, each with its twin in the reference.
#ifndef KOKKOSSOFTMAX_TESTS_TRANSFORM_CASES_HPP
#define KOKKOSSOFTMAX_TESTS_TRANSFORM_CASES_HPP

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "cases.hpp"

namespace tests {

// Cases that every kernel has a part in: short and long rows, each axis, padded, some inputs -inf.
inline std::vector<Case> transform_cases(Scalar in, double limit = 5) {
  std::vector<Case> all;
  for (const auto& extents : {std::vector<std::int64_t>{3, 5, 67}, std::vector<std::int64_t>{1, 2, 5000}}) {
    for (int axis : {2, 1, 0}) {
      if (extents[2] == 5000 && axis != 2) continue;
      Case c;
      c.extents = extents;
      c.axis = axis;
      c.logits = random_values(in, c.size(), -limit, limit);
      Random random(3);
      for (auto& logit : c.logits) {
        if (random.below(17) == 0) logit = -reference::infinity;
      }
      if (extents[2] == 67) {
        c.in = reference::right(extents, 3, 2);
        c.out = reference::left(extents, 1, 1);
      }
      all.push_back(c);
    }
  }
  return all;
}

// An operand with the values of a function of (i, j, k), of extents that are those of the case or 1; off all
// boundaries, unless it is dense.
template <class T, class Exec>
class Operand {
 public:
  Operand(std::vector<std::int64_t> extents, std::vector<double> values, bool dense = false)
      : buffer_(scalar_of<T>,
                dense ? reference::right(std::move(extents)) : reference::right(std::move(extents), 1, 3),
                &values),
        values_(buffer_.values()) {}
  // Wherever it is to lie, NaN and +inf around it.
  Operand(Layout layout, const std::vector<double>& values)
      : buffer_(scalar_of<T>, std::move(layout), &values, true), values_(buffer_.values()) {}

  template <int rank>
  auto view() const {
    return buffer_.template view<const T, rank>();
  }

  // As a function of the position in a case, for the reference.
  std::function<double(Position)> at(const Case& c) const {
    const auto own = buffer_.layout().extents;
    const reference::Rows rows(c.extents, c.axis);
    const auto values = values_;
    if (own.size() == 1 && c.extents.size() > 1) {
      return [values](Position p) { return values[p.column]; };
    }
    return [=](Position p) {
      std::int64_t row = p.row, index = 0, stride = 1;
      for (int d = static_cast<int>(own.size()) - 1; d >= 0; --d) {
        const std::int64_t i = d == rows.axis ? p.column : row % rows.extents[d];
        if (d != rows.axis) row /= rows.extents[d];
        if (own[d] > 1) index += i * stride;
        stride *= own[d];
      }
      return values[index];
    };
  }

 private:
  Buffer<Exec> buffer_;
  std::vector<double> values_;
};

// The ways in which an operand may follow the shape of a rank-3 case.
inline std::vector<std::vector<std::int64_t>> broadcasts(const std::vector<std::int64_t>& e) {
  return {{e[0], e[1], e[2]}, {1, e[1], e[2]}, {e[0], 1, e[2]}, {e[0], e[1], 1}, {1, 1, e[2]}, {1, 1, 1}};
}

inline std::int64_t product(const std::vector<std::int64_t>& extents) {
  return reference::right(extents).size();
}

inline std::vector<double> random_flags(std::int64_t count, std::uint64_t seed = 5) {
  Random random(seed);
  std::vector<double> flags(static_cast<std::size_t>(count));
  for (auto& flag : flags) flag = random.below(3) != 0;
  return flags;
}

// --- functors ----------------------------------------------------------------------------------------------

// Uses all of its arguments, and is not a library transform.
struct Ripple {
  template <class Acc>
  KOKKOS_FUNCTION Acc operator()(Acc value, std::int64_t row, std::int64_t column) const {
    return value * Acc(0.75) + Acc((row * 7 + column * 3) % 11);
  }
};
inline reference::Step ripple(Accumulator acc) {
  return reference::function(
      acc, [](long double v, Position p) { return v * 0.75L + (p.row * 7 + p.column * 3) % 11; }, 8);
}

struct EveryThird {
  KOKKOS_FUNCTION bool operator()(std::int64_t row, std::int64_t column) const {
    return (row + column) % 3 != 0;
  }
};
inline bool every_third(std::int64_t row, std::int64_t column) {
  return (row + column) % 3 != 0;
}

struct Statistics {
  std::vector<double> mean, variance, gamma, beta;
  explicit Statistics(std::int64_t columns, Scalar scalar = Scalar::float32)
      : mean(random_values(scalar, columns, -1, 1, 11)),
        variance(random_values(scalar, columns, 0.5, 2, 12)),
        gamma(random_values(scalar, columns, -2, 2, 13)),
        beta(random_values(scalar, columns, -1, 1, 14)) {}
};

// Rows of 16 bits along an axis of a matrix, each with one logit of some hundreds, far above all others: the
// logarithm of its probability is 0 but for what a sum of so many may be off by, however coarse products are.
template <class T, class Exec, class WithTransform>
void check_dominated_rows(int axis, std::int64_t columns, std::int64_t rows,
                          const WithTransform& transform_of) {
  const Exec exec;
  using View = Kokkos::View<T**, Kokkos::LayoutRight, typename Exec::memory_space>;
  const View x("x", axis == 0 ? columns : rows, axis == 0 ? rows : columns), y("y", x.extent(0), x.extent(1));
  const Kokkos::View<float*, typename Exec::memory_space> numbers("numbers", rows);
  const auto logits = Kokkos::create_mirror_view(x);
  const auto of_rows = Kokkos::create_mirror_view(numbers);
  const auto at = [&](const auto& matrix, std::int64_t row, std::int64_t column) -> auto& {
    return axis == 0 ? matrix(column, row) : matrix(row, column);
  };
  for (std::int64_t r = 0; r < rows; ++r) {
    of_rows(r) = 0.9f + 0.013f * static_cast<float>(r % 97);
    for (std::int64_t c = 0; c < columns; ++c) {
      const std::int64_t logit = c == columns / 2 ? 301 + r % 150 : (r * 31 + c * 17) % 101;
      at(logits, r, c) = T(static_cast<float>(logit));
    }
  }
  Kokkos::deep_copy(x, logits);
  Kokkos::deep_copy(numbers, of_rows);
  ks::log_softmax(exec, x, y, ks::axis(axis), transform_of(numbers));
  exec.fence();
  const auto result = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), y);
  const double bound = 4 * 0x1p-24 * std::max(1.0, std::log(static_cast<double>(columns)));
  for (std::int64_t r = 0; r < rows; ++r) {
    ASSERT_LE(std::fabs(static_cast<float>(at(result, r, columns / 2))), bound)
        << ks::scalar_name<T>() << ", row " << r << " of " << rows << ", " << columns << " columns, axis "
        << axis << ", ran " << ks::last_implementation();
  }
}

}  // namespace tests

#endif
