// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Two instances at work at once on different data, each with scratch of its own.
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "../support/cases.hpp"

namespace {

using namespace tests;

template <class Exec>
struct Work {
  Exec exec;
  std::vector<double> values;
  Buffer<Exec> x, y;
  std::vector<std::int64_t> extents;

  Work(const Exec& instance, const std::vector<std::int64_t>& all, std::uint64_t seed)
      : exec(instance),
        values(random_values(Scalar::float32, reference::right(all).size(), -9, 9, seed)),
        x(Scalar::float32, reference::right(all), &values),
        y(Scalar::float32, reference::right(all)),
        extents(all) {}

  void run() {
    for (int repetition = 0; repetition < 20; ++repetition) {
      ks::softmax(exec, x.template view<const float, 2>(), y.template view<float, 2>());
    }
  }
  void check() {
    exec.fence();
    y.download();
    std::string report;
    EXPECT_TRUE(
        reference::agrees({Operation::softmax, Scalar::float32, Scalar::float32, extents, -1, values, {}},
                          y.layout(), y.host(), report))
        << report;
  }
};

template <class Space>
class Instances : public OnEveryBackend<Space> {};
TYPED_TEST_SUITE(Instances, Backends, BackendName);

TYPED_TEST(Instances, TwoAtOnce) {
  const TypeParam whole{};
  if (whole.concurrency() < 2) GTEST_SKIP() << "too few threads to divide";
  const auto parts = Kokkos::Experimental::partition_space(whole, 1, 1);
  for (const auto& extents : {std::vector<std::int64_t>{2, 128255}, {300, 129}, {1, 1 << 20}, {40, 4097}}) {
    Work<TypeParam> a(parts[0], extents, 1), b(parts[1], extents, 2);
    a.run();
    b.run();
    a.run();
    a.check();
    b.check();
    // And from two host threads. Kokkos' Threads takes work from the thread that initialized it alone.
    if (std::string_view(TypeParam::name()) == "Threads") continue;
    std::thread first([&] { a.run(); }), second([&] { b.run(); });
    first.join();
    second.join();
    a.check();
    b.check();
  }
}

// The same instance from two host threads: the calls follow one another on it.
TYPED_TEST(Instances, CopiesOfOneInstance) {
  const TypeParam exec, same = exec;
  Work<TypeParam> a(exec, {2, 128255}, 3), b(same, {2, 100000}, 4);
  a.run();
  b.run();
  a.check();
  b.check();
}

// Instances that come and go leave nothing that a later one could stumble over.
TYPED_TEST(Instances, ManyAfterEachOther) {
  const TypeParam whole{};
  if (whole.concurrency() < 2) GTEST_SKIP() << "too few threads to divide";
  for (int i = 0; i < 20; ++i) {
    const auto parts = Kokkos::Experimental::partition_space(whole, 1, 1);
    Work<TypeParam> a(parts[i % 2], {1, 60000 + 1000 * i}, i + 10);
    a.run();
    a.check();
  }
}

}  // namespace
