// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// One program, two sources with the same instance of the kernels. A compiler may give each source a handle of
// its own for a device kernel (nvcc 13 does) while the linker merges the functions around it: what is allowed
// for one handle, shared memory above the default for one, must hold for the one that is launched.
#include <cstring>
#include <vector>

#include "../support/cases.hpp"
#include "translation_units.hpp"

namespace {

using namespace tests;

template <class Space>
class TranslationUnits : public OnEveryBackend<Space> {};
TYPED_TEST_SUITE(TranslationUnits, Backends, BackendName);

TYPED_TEST(TranslationUnits, GiveTheSame) {
  const TypeParam exec{};
  for (const auto& [rows, columns] :
       {std::pair{3, 100}, {3, 5000}, {200, 20000}, {2, 65536}, {300, 65536}, {40, 400000}}) {
    const std::vector<double> values =
        random_values(Scalar::float32, static_cast<std::size_t>(rows) * columns, -9, 9, 5);
    const FloatMatrix<TypeParam> x("x", rows, columns), here("here", rows, columns),
        there("there", rows, columns);
    const auto on_host = Kokkos::create_mirror_view(x);
    for (std::size_t i = 0; i < values.size(); ++i) on_host.data()[i] = static_cast<float>(values[i]);
    Kokkos::deep_copy(x, on_host);
    softmax_elsewhere(exec, x, there);
    const std::string name = ks::last_implementation();
    ks::softmax(exec, x, here, TwiceLessColumn{});
    EXPECT_EQ(ks::last_implementation(), name);
    exec.fence();
    const auto a = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), here);
    const auto b = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), there);
    EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << rows << " x " << columns;
    for (int row = 0; row < rows; ++row) {
      double sum = 0;
      for (int column = 0; column < columns; ++column) sum += a(row, column);
      EXPECT_NEAR(sum, 1, 1e-4) << "row " << row << " of " << rows << " x " << columns << " by " << name;
    }
  }
}

}  // namespace
