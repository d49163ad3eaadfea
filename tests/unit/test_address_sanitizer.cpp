// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// In a build with AddressSanitizer: it sees the loads and stores of the host's vectors, those of parts of
// vectors and those past the caches, too. Else the other tests would watch all of a row but its end.
#include <gtest/gtest.h>

#include <impl/host/KokkosSoftmax_Simd.hpp>

namespace {

namespace ks = KokkosSoftmax;

#define EXPECT_REPORT(...) EXPECT_DEATH(__VA_ARGS__, "heap-buffer-overflow")

template <class T>
void check() {
  SCOPED_TRACE(ks::scalar_name<T>());
  using Ops = ks::impl::SimdOps<ks::accumulator_t<T>>;
  using Vector = typename Ops::Vector;
  constexpr int width = Ops::width, size = 4 * width;
  const Kokkos::View<T*, Kokkos::HostSpace> values("values", size);  // begins where a cache line does
  T* const end = values.data() + size;
  const Vector one(1);
  const auto use = [](const Vector& v) {
    volatile auto sum = Ops::sum(v);
    static_cast<void>(sum);
  };

  use(Ops::load(end - width));
  Ops::store(end - width, one);
  Ops::stream(end - width, one);
  Ops::stream(end - 2 * width, one, one);
  EXPECT_REPORT(use(Ops::load(end)));
  EXPECT_REPORT(Ops::store(end, one));
  EXPECT_REPORT(Ops::stream(end, one));
  EXPECT_REPORT(Ops::stream(end, one, one));
  if constexpr (size * sizeof(T) >= 64) {
    Ops::stream_line(end - 64 / sizeof(T), values.data());
    EXPECT_REPORT(Ops::stream_line(end, values.data()));
  }
  for (int count = 1; count < width; ++count) {
    use(Ops::load_part(end - count, count, 0));
    Ops::store_part(end - count, one, count);
    if (count > 1 && count < width - 1) continue;  // a child takes half a second
    EXPECT_REPORT(use(Ops::load_part(end - count + 1, count, 0)));
    EXPECT_REPORT(Ops::store_part(end - count + 1, one, count));
  }
}

TEST(AddressSanitizerDeathTest, SeesTheEndsOfRows) {
  // A child begins anew: Kokkos' threads would be missing in a copy.
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  check<float>();
  check<double>();
  check<ks::half_t>();
  check<ks::bhalf_t>();
}

}  // namespace
