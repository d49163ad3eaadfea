// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows whose columns are not contiguous, beside others and at other places: their bits stay what they are.
#ifndef KOKKOSSOFTMAX_TESTS_TILE_CASES_HPP
#define KOKKOSSOFTMAX_TESTS_TILE_CASES_HPP

#include <cstring>
#include <vector>

#include "cases.hpp"

#if defined(KOKKOS_ENABLE_CUDA)

namespace tests {

// Of a row of so many columns, `distance` elements apart, that has others beside it.
template <class T, class... Transform>
std::vector<T> bits_of_first_row(Operation operation, std::int64_t columns, std::int64_t rows,
                                 std::int64_t distance, std::int64_t offset, const Transform&... transform) {
  const std::int64_t span = offset + (columns - 1) * distance + rows;
  const Kokkos::View<T*, Kokkos::CudaSpace> x("x", span), y("y", span), sums("lse", rows);
  const auto host = Kokkos::create_mirror_view(x);
  std::int64_t state = 1;
  for (std::int64_t c = 0; c < columns; ++c) {
    for (std::int64_t r = 0; r < rows; ++r) {
      state = (state * 1103515245 + 12345) % 2147483648;
      const double noise = static_cast<double>(state) / 2147483648.0;
      const double of_row = static_cast<double>((c * 7919) % 4093) / 4093;
      host(offset + c * distance + r) = T(static_cast<float>(8 * (r == 0 ? of_row : noise) - 4));
    }
  }
  Kokkos::deep_copy(x, host);
  using View = Kokkos::View<T**, Kokkos::LayoutStride, Kokkos::CudaSpace>;
  const Kokkos::LayoutStride layout(static_cast<std::size_t>(rows), 1, static_cast<std::size_t>(columns),
                                    static_cast<std::size_t>(distance));
  call(operation, Kokkos::Cuda(), View(x.data() + offset, layout), View(y.data() + offset, layout), sums, 1,
       transform...);
  Kokkos::Cuda().fence();
  const bool reduces = operation == Operation::logsumexp;
  const auto all = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), reduces ? sums : y);
  std::vector<T> bits;
  for (std::int64_t c = 0; c < (reduces ? 1 : columns); ++c)
    bits.push_back(reduces ? all(0) : all(offset + c * distance));
  return bits;
}

// Whatever lies beside it and however it is copied.
template <class T, class... Transform>
void check_bits_of_first_row(const std::vector<std::int64_t>& lengths, const Transform&... transform) {
  for (auto operation : operations) {
    for (const auto columns : lengths) {
      const auto alone = bits_of_first_row<T>(operation, columns, 1, 2, 0, transform...);
      const auto same = [&](std::int64_t rows, std::int64_t distance, std::int64_t offset) {
        const auto bits = bits_of_first_row<T>(operation, columns, rows, distance, offset, transform...);
        ASSERT_EQ(bits.size(), alone.size());
        EXPECT_EQ(std::memcmp(bits.data(), alone.data(), bits.size() * sizeof(T)), 0)
            << reference::name(operation) << ' ' << ks::scalar_name<T>() << ' ' << columns << " columns, "
            << rows << " rows, " << distance << " apart, offset " << offset;
      };
      same(1, 17, 3);
      same(2, 2, 0);
      same(31, 31, 0);
      same(64, 64, 0);
      same(65, 80, 16);
      same(200, 208, 1);
      same(520, 520, 0);
    }
  }
}

}  // namespace tests

#endif

#endif
