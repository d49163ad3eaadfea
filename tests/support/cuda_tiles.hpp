// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Calls on CUDA with rows whose columns are not contiguous: which implementation runs, and two streams at
// once.
#ifndef KOKKOSSOFTMAX_TESTS_CUDA_TILES_HPP
#define KOKKOSSOFTMAX_TESTS_CUDA_TILES_HPP

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "cuda_graph.hpp"
#include "tile_cases.hpp"

#if defined(KOKKOS_ENABLE_CUDA)

namespace tests {

// Of sums another one may be.
template <class T>
void expect_implementation(std::int64_t columns, std::int64_t rows, const char* expected,
                           const char* expected_of_sums = nullptr) {
  const Kokkos::View<T**, Kokkos::LayoutLeft, Kokkos::CudaSpace> x("x", rows, columns), y("y", rows, columns);
  const Kokkos::View<T*, Kokkos::CudaSpace> lse("lse", rows);
  for (auto operation : operations) {
    call(operation, Kokkos::Cuda(), x, y, lse, 1);
    EXPECT_STREQ(ks::last_implementation(),
                 operation == Operation::logsumexp && expected_of_sums ? expected_of_sums : expected)
        << reference::name(operation) << ' ' << ks::scalar_name<T>() << ' ' << columns << " columns, " << rows
        << " rows";
  }
  Kokkos::Cuda().fence();
}

// Shapes (rows, columns) one after the other on two streams at once, by an implementation: none waits for
// ever, and what comes out is what comes out alone, by one with the same bits. (Empty: the library's choice.)
inline void check_two_streams(const std::vector<std::pair<std::int64_t, std::int64_t>>& shapes,
                              const char* implementation = "", const char* whose_bits = "") {
  using Exec = Kokkos::Cuda;
  const Stream streams[2];
  const Exec execs[2] = {Exec(streams[0]), Exec(streams[1])};
  using View = Kokkos::View<float**, Kokkos::LayoutLeft, Kokkos::CudaSpace>;
  std::vector<View> x, alone, together;
  for (const auto& [rows, columns] : shapes) {
    x.emplace_back("x", rows, columns);
    alone.emplace_back("y", rows, columns);
    for (int i = 0; i < 2; ++i) together.emplace_back("y", rows, columns);
    Kokkos::parallel_for(
        "fill", Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(Exec(), 0, rows * columns),
        FillColumns<float>{x.back().data(), rows});
    const ks::ScopedImplementation forced(whose_bits);
    ks::softmax(Exec(), x.back(), alone.back());
  }
  Kokkos::fence();
  const ks::ScopedImplementation forced(implementation);
  for (int turn = 0; turn < 5000; ++turn) {
    for (std::size_t i = 0; i < 2; ++i) {
      const std::size_t shape = (static_cast<std::size_t>(turn) * (i == 0 ? 1 : 5) + i * 3) % shapes.size();
      ks::softmax(execs[i], x[shape], together[2 * shape + i]);
    }
  }
  Kokkos::fence();
  for (std::size_t shape = 0; shape < shapes.size(); ++shape) {
    for (std::size_t i = 0; i < 2; ++i) {
      const View a = alone[shape], b = together[2 * shape + i];
      const std::int64_t differences =
          count_different(Exec(), a.data(), b.data(), static_cast<std::int64_t>(a.span()));
      EXPECT_EQ(differences, 0) << shape << ", stream " << i;
    }
  }
}

}  // namespace tests

#endif

#endif
