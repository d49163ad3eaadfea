// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a profiling tool sees: our labels, and, once warm, no fence, no allocation, no copy.
#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "../support/cases.hpp"
#include "../support/refusals.hpp"
#include "../support/tool_recorder.hpp"
#include "../support/transform_cases.hpp"

namespace {

using namespace tests;

bool is_ours(const std::string& label) {
  return label.rfind("KokkosSoftmax", 0) == 0;
}

void expect_quiet(const ToolRecorder::Records& records, const std::string& where) {
  EXPECT_FALSE(records.kernels.empty()) << where;
  for (const auto& label : records.kernels) EXPECT_TRUE(is_ours(label)) << where << ": kernel " << label;
  for (const auto& label : records.fences) ADD_FAILURE() << where << ": fence " << label;
  for (const auto& label : records.copies) ADD_FAILURE() << where << ": copy " << label;
  for (const auto& [label, size] : records.allocations) {
    ADD_FAILURE() << where << ": allocation " << label << " of " << size << " bytes";
  }
  EXPECT_EQ(records.open_regions, 0) << where;
}

template <class Space>
class Tools : public OnEveryBackend<Space> {
 protected:
  using Matrix = Kokkos::View<float**, Kokkos::LayoutRight, typename Space::memory_space>;
  using Vector = Kokkos::View<float*, typename Space::memory_space>;
};

struct Shape {
  std::int64_t rows, columns;
  int axis;
};

// For each portable kernel one that it is made for. (A function: nvcc 13.0 crashes on a static constexpr
// array here.)
std::vector<Shape> shapes() {
  return {{500, 40, -1}, {20, 3000, -1}, {1, 300000, -1}, {3, 128255, -1}, {3000, 50, 0}};
}

TYPED_TEST_SUITE(Tools, Backends, BackendName);

TYPED_TEST(Tools, AWarmCallIsQuiet) {
  const TypeParam exec{};
  for (const auto& shape : shapes()) {
    typename TestFixture::Matrix x("x", shape.rows, shape.columns);
    typename TestFixture::Vector lse("lse", shape.axis == 0 ? shape.columns : shape.rows);
    for (auto operation : operations) {
      for (const auto& name : implementations_and_default<TypeParam>(operation)) {
        std::optional<ks::ScopedImplementation> forced;
        if (!name.empty()) forced.emplace(name);
        try {
          call(operation, exec, x, x, lse, shape.axis);
        } catch (const std::invalid_argument&) {
          continue;
        }
        exec.fence();
        ToolRecorder recorder;
        call(operation, exec, x, x, lse, shape.axis);
        const std::string where =
            std::string(reference::name(operation)) + " by " + ks::last_implementation();
        expect_quiet(recorder.records(), where);
        ASSERT_EQ(recorder.records().regions.size(), 1u) << where;
        EXPECT_EQ(recorder.records().regions[0], std::string("KokkosSoftmax::") + reference::name(operation));
        EXPECT_LE(recorder.records().kernels.size(), most_kernels_of(ks::last_implementation())) << where;
        exec.fence();
      }
    }
  }
}

TYPED_TEST(Tools, OneKernelForOrdinaryRows) {
  const TypeParam exec{};
  typename TestFixture::Matrix x("x", 5000, 100);
  ks::softmax(exec, x, x);
  exec.fence();
  ToolRecorder recorder;
  ks::softmax(exec, x, x);
  EXPECT_EQ(recorder.records().kernels.size(), 1u);
}

// Everything that a call needs is made by reserve, on an instance that has run nothing yet.
TYPED_TEST(Tools, AReservedCallIsQuiet) {
  if (TypeParam().concurrency() < 2) GTEST_SKIP() << "too few threads to divide";
  for (const auto& shape : shapes()) {
    const auto parts = Kokkos::Experimental::partition_space(TypeParam(), 1, 1);
    const auto& exec = parts[1];
    typename TestFixture::Matrix x("x", shape.rows, shape.columns);
    typename TestFixture::Vector lse("lse", shape.axis == 0 ? shape.columns : shape.rows);
    {
      ToolRecorder recorder;
      ks::reserve(exec, x, x, ks::axis(shape.axis));
      for (const auto& [label, size] : recorder.records().allocations) {
        // Kokkos makes some for itself.
        EXPECT_TRUE(is_ours(label) || label.find("Kokkos") != std::string::npos ||
                    label.find("kokkos") != std::string::npos || label.find("Internal") != std::string::npos)
            << label << ' ' << size;
      }
    }
    exec.fence();
    for (auto operation : operations) {
      ToolRecorder recorder;
      call(operation, exec, x, x, lse, shape.axis);
      expect_quiet(recorder.records(), std::string(reference::name(operation)) + " after reserve, by " +
                                           ks::last_implementation() + ", " + std::to_string(shape.rows) +
                                           " x " + std::to_string(shape.columns));
      exec.fence();
    }
  }
}

// Nothing of x is computed or written by reserve.
TYPED_TEST(Tools, ReserveLeavesTheOperandsAlone) {
  const TypeParam exec{};
  const auto values = random_values(Scalar::float32, 3 * 1000);
  Buffer<TypeParam> x(Scalar::float32, reference::right({3, 1000}), &values),
      y(Scalar::float32, reference::right({3, 1000}));
  ks::reserve(exec, x.template view<float, 2>(), y.template view<float, 2>());
  ks::reserve(exec, x.template view<float, 2>(), y.template view<float, 2>(), ks::axis(0), ks::scale(2));
  exec.fence();
  expect_unchanged(x, y);
}

TYPED_TEST(Tools, NoLargerExtentsAreWarmToo) {
  const TypeParam exec{};
  typename TestFixture::Matrix large("large", 4, 400000), small("small", 4, 150000), one("one", 1, 399999);
  for (auto operation : {Operation::softmax, Operation::log_softmax}) {
    typename TestFixture::Vector lse("lse", 4);
    call(operation, exec, large, large, lse, -1);
    exec.fence();
    ToolRecorder recorder;
    call(operation, exec, small, small, lse, -1);
    call(operation, exec, one, one, lse, -1);
    expect_quiet(recorder.records(), reference::name(operation));
  }
}

TYPED_TEST(Tools, OurAllocationsCarryOurPrefix) {
  if (TypeParam().concurrency() < 2) GTEST_SKIP() << "too few threads to divide";
  const auto parts = Kokkos::Experimental::partition_space(TypeParam(), 1, 1);
  typename TestFixture::Matrix x("x", 2, 2000000);
  ToolRecorder recorder;
  ks::softmax(parts[0], x, x);
  parts[0].fence();
  for (const auto& label : recorder.records().kernels) EXPECT_TRUE(is_ours(label)) << label;
  for (const auto& [label, size] : recorder.records().allocations) {
    EXPECT_TRUE(is_ours(label) || label.find("Kokkos") != std::string::npos ||
                label.find("kokkos") != std::string::npos || label.find("Internal") != std::string::npos)
        << label << ' ' << size;
  }
}

TYPED_TEST(Tools, WithoutAnInstanceItFences) {
  typename TestFixture::Matrix x("x", 5, 100);
  typename TestFixture::Vector lse("lse", 5);
  ks::softmax(x, x);
  ToolRecorder recorder;
  ks::softmax(x, x);
  EXPECT_GE(recorder.records().fences.size(), 1u);
  const auto fences = recorder.records().fences.size();
  ks::logsumexp(x, lse);
  EXPECT_GT(recorder.records().fences.size(), fences);
  for (const auto& label : recorder.records().fences) EXPECT_TRUE(is_ours(label)) << label;
}

TYPED_TEST(Tools, EmptyViewsLaunchNothing) {
  const TypeParam exec{};
  typename TestFixture::Matrix none("none", 0, 7), empty_rows("empty_rows", 7, 0);
  typename TestFixture::Vector nothing("nothing", 0);
  ToolRecorder recorder;
  ks::softmax(exec, none, none);
  ks::log_softmax(exec, empty_rows, empty_rows);
  ks::logsumexp(exec, none, nothing);
  EXPECT_TRUE(recorder.records().kernels.empty());
  EXPECT_TRUE(recorder.records().fences.empty());
}

TYPED_TEST(Tools, TransformsAreQuiet) {
  const TypeParam exec{};
  typename TestFixture::Matrix x("x", 40, 300);
  typename TestFixture::Vector b("b", 300), t("t", 40);
  Kokkos::deep_copy(t, 1.0f);
  const auto chain = ks::temperature(t) | ks::bias(b) | ks::causal();
  ks::softmax(exec, x, x, chain);
  exec.fence();
  ToolRecorder recorder;
  ks::softmax(exec, x, x, chain);
  expect_quiet(recorder.records(), "chain");
}

}  // namespace
