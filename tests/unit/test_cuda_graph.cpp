// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Each portable kernel captured in a CUDA graph and replayed a hundred times on data that changes, in between
// the same calls outside of it.
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "../support/cuda_graph.hpp"
#include "../support/transform_cases.hpp"

#if defined(KOKKOS_ENABLE_CUDA)

namespace {

using namespace tests;
using Exec = Kokkos::Cuda;

// Captures one call, replays it a hundred times on ten sets of logits. False when the implementation refuses.
template <class T, int rank, class... Transform>
bool captured(Case c, Operation operation, const std::string& implementation, const Transform&... transform) {
  const Stream stream;
  const Exec exec(stream);
  const bool reduces = operation == Operation::logsumexp;
  Buffer<Exec> x(scalar_of<T>, c.in ? *c.in : reference::right(c.extents), &c.logits);
  Buffer<Exec> y(scalar_of<T>, reduces ? reference::right(reference::without(c.extents, c.axis))
                               : c.out ? *c.out
                                       : reference::right(c.extents));
  const auto x_view = x.template view<const T, rank>();
  StridedView<T, rank, Exec> y_view;
  StridedView<T, rank - 1, Exec> lse;
  if (reduces) {
    lse = y.template view<T, rank - 1>();
  } else {
    y_view = y.template view<T, rank>();
  }
  std::optional<ks::ScopedImplementation> forced;
  if (!implementation.empty()) forced.emplace(implementation);
  try {
    if (reduces) {
      ks::reserve(exec, x_view, lse, ks::axis(c.axis), transform...);
    } else {
      ks::reserve(exec, x_view, y_view, ks::axis(c.axis), transform...);
    }
  } catch (const std::invalid_argument& error) {
    if (implementation.empty()) ADD_FAILURE() << error.what();
    return false;
  }
  exec.fence();
  const Graph graph(stream, [&] { call(operation, exec, x_view, y_view, lse, c.axis, transform...); });
  EXPECT_EQ(graph.failure(), "") << implementation;
  EXPECT_GE(graph.nodes(), 1u);
  EXPECT_LE(graph.nodes(), most_kernels_of(ks::last_implementation()))
      << "more than the kernels was captured";
  // Captured is not done.
  exec.fence();
  y.download();
  EXPECT_TRUE(y.unchanged());
  if (!graph.failure().empty()) return true;
  for (int set = 0; set < 10; ++set) {
    c.logits = random_values(scalar_of<T>, c.size(), -6, 6, 100 + set);
    x.fill(c.logits);
    x.upload();
    y.upload();
    Kokkos::fence();
    for (int replay = 0; replay < 10; ++replay) graph.launch();
    exec.fence();
    y.download();
    std::string report;
    EXPECT_TRUE(
        reference::agrees({operation, scalar_of<T>, scalar_of<T>, c.extents, c.axis, c.logits, c.chain},
                          y.layout(), y.host(), report))
        << report << implementation << ", set " << set;
    EXPECT_TRUE(y.padding_untouched());
  }
  return true;
}

std::vector<Case> shapes() {
  std::vector<Case> all;
  const auto add = [&](std::vector<std::int64_t> extents, int axis) {
    Case c;
    c.extents = extents;
    c.axis = axis;
    c.logits = random_values(Scalar::float32, c.size());
    all.push_back(c);
  };
  add({300, 10}, -1);
  add({129, 40}, -1);
  add({300, 65}, -1);
  add({3000, 66}, -1);
  add({7, 3000}, -1);
  add({2, 128255}, -1);
  add({1, 1 << 20}, -1);
  add({200, 77}, 0);
  add({500, 60}, 0);
  add({40000, 3}, 0);
  return all;
}

TEST(CudaGraph, EachKernel) {
  for (auto operation : operations) {
    for (const auto& name : implementations_and_default<Exec>(operation)) {
      int ran = 0;
      for (const auto& c : shapes()) {
        ran += captured<float, 2>(c, operation, name);
        // What takes rows of 16 bits alone takes these.
        if (c.extents[1] < 100) ran += captured<half_t, 2>(c, operation, name);
      }
      EXPECT_GT(ran, 0) << name;
    }
  }
}

TEST(CudaGraph, Half) {
  for (const auto& c : shapes()) captured<half_t, 2>(c, Operation::softmax, "");
}

// A functor and policy of 512 bytes and more take another way through Kokkos, one that a capture refuses.
TEST(CudaGraph, TheFattestChainOnAStridedView) {
  const Accumulator acc(Scalar::float32, Scalar::float32);
  for (int axis : {4, 1}) {
    Case c;
    c.extents = {2, 3, 4, 5, 150};
    c.axis = axis;
    c.logits = random_values(Scalar::float32, c.size());
    // Nothing of it collapses.
    c.in = reference::ordered(c.extents, {4, 2, 0, 3, 1}, 2, 3, 1);
    c.out = reference::ordered(c.extents, {4, 1, 3, 0, 2}, 1, 5, 2);
    const auto columns = c.extents[axis];
    const auto rest = reference::without(c.extents, axis);
    const Statistics s(columns);
    const Operand<float, Exec> mean({columns}, s.mean), variance({columns}, s.variance),
        gamma({columns}, s.gamma), beta({columns}, s.beta);
    const auto temperatures = random_values(Scalar::float32, product(rest), 0.5, 2);
    const Operand<float, Exec> temperature(rest, temperatures);
    const Operand<float, Exec> bias(c.extents, random_values(Scalar::float32, c.size(), -2, 2, 41));
    const Operand<bool, Exec> keep(c.extents, random_flags(c.size()));
    const auto keep_at = keep.at(c);
    c.chain = {reference::scale(acc, 0.5),
               reference::temperature(acc, temperatures),
               reference::mask([keep_at](Position p) { return keep_at(p) != 0; }),
               reference::bias(acc, bias.at(c)),
               reference::batch_norm(acc, s.mean, s.variance, s.gamma, s.beta, 1e-3),
               reference::causal(2),
               reference::gelu(acc),
               ripple(acc)};
    for (auto operation : operations) {
      for (const auto& name : implementations_and_default<Exec>(operation)) {
        captured<float, 5>(
            c, operation, name,
            ks::scale(0.5) | ks::temperature(temperature.view<4>()) | ks::mask(keep.view<5>()) |
                ks::bias(bias.view<5>()) |
                ks::batch_norm(mean.view<1>(), variance.view<1>(), gamma.view<1>(), beta.view<1>(), 1e-3) |
                ks::causal(2) | ks::gelu() | ks::transform(Ripple{}));
      }
    }
  }
}

// An operand of all rows, which kernels bring once for several rows: of rows in tiles, and of others, one
// after the other. Nothing but `reserve` has loaded their kernels.
TEST(CudaGraph, OperandOfAllRows) {
  const Accumulator acc(Scalar::bfloat16, Scalar::bfloat16);
  const auto check = [&](std::int64_t rows, std::int64_t columns, std::int64_t padding,
                         const char* expected) {
    Case c;
    c.extents = {rows, columns};
    c.logits = random_values(Scalar::bfloat16, c.size());
    c.in = reference::right(c.extents, padding);
    c.out = c.in;
    const Operand<bhalf_t, Exec> add({columns}, random_values(Scalar::bfloat16, columns, -2, 2, 42));
    c.chain = {reference::bias(acc, add.at(c))};
    captured<bhalf_t, 2>(c, Operation::softmax, "", ks::bias(add.view<1>()));
    EXPECT_STREQ(ks::last_implementation(), expected);
  };
  check(40000, 65, 0, "tiled_logits");
  check(150000, 33, 2, "warp_per_row");
}

// The call made once outside of a capture warms as reserve does.
TEST(CudaGraph, WarmByACall) {
  const Stream stream;
  const Exec exec(stream);
  const std::vector<double> values = random_values(Scalar::float32, 2 * 128255);
  Buffer<Exec> x(Scalar::float32, reference::right({2, 128255}), &values), y(Scalar::float32, x.layout());
  ks::softmax(exec, x.view<float, 2>(), y.view<float, 2>());
  exec.fence();
  const Graph graph(stream, [&] { ks::softmax(exec, x.view<float, 2>(), y.view<float, 2>()); });
  EXPECT_EQ(graph.failure(), "");
  y.upload();
  graph.launch();
  exec.fence();
  y.download();
  std::string report;
  EXPECT_TRUE(
      reference::agrees({Operation::softmax, Scalar::float32, Scalar::float32, {2, 128255}, -1, values, {}},
                        y.layout(), y.host(), report))
      << report;
}

// A call over many rows, which needs no scratch, warms those over few of them, which do.
TEST(CudaGraph, LogsumexpWarmByACallOverMoreRows) {
  const Stream stream;
  const Exec exec(stream);
  constexpr std::int64_t rows = 600, columns = 20001;
  const std::vector<double> values = random_values(Scalar::float32, rows * columns);
  Buffer<Exec> x(Scalar::float32, reference::right({rows, columns}), &values),
      lse(Scalar::float32, reference::right({rows}));
  const auto call_over = [&](std::int64_t some) {
    const ks::ScopedImplementation forced(some == rows ? "block_per_sliced_row" : "split_rows");
    const std::pair<std::int64_t, std::int64_t> some_rows(0, some);
    ks::logsumexp(exec, Kokkos::subview(x.view<const float, 2>(), some_rows, Kokkos::ALL),
                  Kokkos::subview(lse.view<float, 1>(), some_rows));
  };
  call_over(rows);
  exec.fence();
  const Graph graph(stream, [&] {
    call_over(rows);
    call_over(5);
  });
  ASSERT_EQ(graph.failure(), "");
  lse.upload();
  graph.launch();
  exec.fence();
  lse.download();
  std::string report;
  EXPECT_TRUE(reference::agrees(
      {Operation::logsumexp, Scalar::float32, Scalar::float32, {rows, columns}, -1, values, {}}, lse.layout(),
      lse.host(), report))
      << report;
}

// What was reserved for many long rows serves fewer and shorter ones, which other kernels take.
template <class T>
void check_reserved_for_more(const std::vector<std::int64_t>& rows, const std::vector<std::int64_t>& columns,
                             Operation operation = Operation::softmax, int axis = 1) {
  const Stream stream;
  const Exec exec(stream);
  const bool reduces = operation == Operation::logsumexp;
  const auto extents = [axis](std::int64_t r, std::int64_t c) {
    return axis == 1 ? std::array{r, c} : std::array{c, r};
  };
  const auto all = extents(rows[0] + 1, columns[0]);
  const Buffer<Exec> x(scalar_of<T>, reference::right({all[0], all[1]})),
      y(scalar_of<T>, reduces ? reference::right({rows[0] + 1}) : x.layout());
  if (reduces) {
    ks::reserve(exec, x.template view<const T, 2>(), y.template view<T, 1>(), ks::axis(axis));
  } else {
    ks::reserve(exec, x.template view<const T, 2>(), y.template view<T, 2>(), ks::axis(axis));
  }
  const Graph graph(stream, [&] {
    for (const std::int64_t r : rows) {
      for (const std::int64_t c : columns) {
        using Range = std::pair<std::int64_t, std::int64_t>;
        const auto some = extents(r, c);
        const auto some_of = [&](const auto& view) {
          return Kokkos::subview(view, Range(0, some[0]), Range(0, some[1]));
        };
        const auto some_of_x = some_of(x.template view<const T, 2>());
        if (reduces) {
          ks::logsumexp(exec, some_of_x, Kokkos::subview(y.template view<T, 1>(), Range(0, r)),
                        ks::axis(axis));
        } else {
          ks::softmax(exec, some_of_x, some_of(y.template view<T, 2>()), ks::axis(axis));
        }
      }
    }
  });
  EXPECT_EQ(graph.failure(), "") << ks::scalar_name<T>() << ", " << reference::name(operation);
  if (!graph.failure().empty()) return;
  graph.launch();
  exec.fence();
}
TEST(CudaGraph, ReservedForMore) {
  const std::vector<std::int64_t> rows{999, 300, 128, 60, 8, 1},
      columns{20000, 17000, 9000, 4001, 1000, 65, 9};
  check_reserved_for_more<float>(rows, columns);
  check_reserved_for_more<float>({2, 1}, {9000000, 8000000, 4194305, 2000000, 1100000, 128256});
  check_reserved_for_more<bhalf_t>(rows, columns);
  check_reserved_for_more<double>(rows, columns);
  check_reserved_for_more<float>(rows, columns, Operation::logsumexp);
  check_reserved_for_more<bhalf_t>(rows, columns, Operation::logsumexp);
}
TEST(CudaGraph, ReservedForMoreAlongAnotherAxis) {
  const auto check = [](const std::vector<std::int64_t>& rows, const std::vector<std::int64_t>& columns) {
    for (const Operation operation : {Operation::softmax, Operation::logsumexp}) {
      check_reserved_for_more<float>(rows, columns, operation, 0);
      check_reserved_for_more<bhalf_t>(rows, columns, operation, 0);
      check_reserved_for_more<double>(rows, columns, operation, 0);
    }
  };
  check({40000, 39999, 8000, 300, 77, 1}, {1100, 1000, 300, 256, 100, 16, 5, 1});
  check({500, 499, 64, 2}, {66000, 16384, 700, 64});
}

// The scratch that a graph took stays its own: neither larger calls on the instance nor a second graph
// disturb it, and it outlives the instance.
TEST(CudaGraph, ScratchBelongsToTheGraph) {
  const Stream stream;
  const std::vector<double> values = random_values(Scalar::float32, 3 * 200000);
  Buffer<Exec> x(Scalar::float32, reference::right({3, 200000}), &values), y(Scalar::float32, x.layout()),
      z(Scalar::float32, x.layout()), big(Scalar::float32, reference::right({4, 1000000}));
  std::optional<Graph> first, second;
  {
    const Exec exec(stream);
    const auto softmax = [&](Buffer<Exec>& out) {
      ks::softmax(exec, x.view<float, 2>(), out.view<float, 2>());
    };
    ks::reserve(exec, x.view<float, 2>(), y.view<float, 2>());
    first.emplace(stream, [&] { softmax(y); });
    ks::reserve(exec, x.view<float, 2>(), y.view<float, 2>());
    second.emplace(stream, [&] { softmax(z); });
    EXPECT_EQ(first->failure() + second->failure(), "");
    ks::softmax(exec, big.view<float, 2>(), big.view<float, 2>());
    exec.fence();
  }
  for (int i = 0; i < 10; ++i) {
    first->launch();
    second->launch();
  }
  EXPECT_CUDA(cudaStreamSynchronize(stream));
  for (auto* out : {&y, &z}) {
    out->download();
    std::string report;
    EXPECT_TRUE(
        reference::agrees({Operation::softmax, Scalar::float32, Scalar::float32, {3, 200000}, -1, values, {}},
                          out->layout(), out->host(), report))
        << report;
  }
}

// A call that would have to allocate says so instead of spoiling the capture silently.
TEST(CudaGraph, ColdCallNamesReserve) {
  const Stream stream;
  const Exec exec(stream);
  // More words than any instance has from the start; nothing is launched, so that there need be no such rows.
  const Buffer<Exec> memory(Scalar::float32, reference::right({1}));
  const Kokkos::View<float**, Kokkos::LayoutRight, Kokkos::CudaSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>
      x(memory.view<float, 1>().data(), 100000, 3000000);
  // The kernels were loaded by other instances; the scratch of this one is missing.
  std::string failure;
  {
    const Graph graph(stream, [&] { ks::softmax(exec, x, x); });
    failure = graph.failure();
  }
  EXPECT_NE(failure.find("reserve"), std::string::npos) << failure;
}

}  // namespace

#else

TEST(CudaGraph, NeedsCuda) {
  GTEST_SKIP() << "Kokkos was built without CUDA";
}

#endif
