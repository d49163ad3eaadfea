// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The same numbers on every machine: the standard's distributions are not.
#ifndef KOKKOSSOFTMAX_TESTS_RANDOM_HPP
#define KOKKOSSOFTMAX_TESTS_RANDOM_HPP

#include <cstdint>
#include <vector>

#include "../reference/reference.hpp"

namespace tests {

class Random {
 public:
  explicit Random(std::uint64_t seed = 1) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
  std::uint64_t bits() {  // splitmix64
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  double uniform(double from, double to) {
    return from + (to - from) * (static_cast<double>(bits() >> 11) * 0x1p-53);
  }
  std::int64_t below(std::int64_t limit) {
    return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(limit));
  }

 private:
  std::uint64_t state_;
};

// Values that the type holds exactly.
inline std::vector<double> random_values(reference::Scalar scalar, std::int64_t count, double from = -5,
                                         double to = 5, std::uint64_t seed = 1) {
  Random random(seed);
  std::vector<double> values(static_cast<std::size_t>(count));
  for (auto& value : values) value = reference::rounded(scalar, random.uniform(from, to));
  return values;
}

}  // namespace tests

#endif
