// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include <KokkosSoftmax.hpp>

#include <cmath>
#include <cstdio>

namespace ks = KokkosSoftmax;

int main(int argc, char** argv) {
  Kokkos::ScopeGuard kokkos(argc, argv);
  const Kokkos::DefaultHostExecutionSpace exec;
  const int rows = 3;
  const int columns = 5;
  Kokkos::View<float**, Kokkos::LayoutRight, Kokkos::HostSpace> x("x", rows, columns);
  Kokkos::View<float**, Kokkos::LayoutRight, Kokkos::HostSpace> y("y", rows, columns);
  Kokkos::deep_copy(x, 1.0f);
  ks::softmax(exec, x, y);
  // Compiled here and not in the library.
  ks::softmax(exec, x, y, ks::scale(0.5f) | ks::gelu());
  exec.fence();
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; ++column) {
      if (std::fabs(y(row, column) - 1.0f / columns) > 1e-6f) {
        std::printf("y(%d, %d) = %g\n", row, column, static_cast<double>(y(row, column)));
        return 1;
      }
    }
  }
}
