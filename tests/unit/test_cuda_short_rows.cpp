// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Short rows of which, on CUDA, a thread has one, or four lanes: one behind the other, with something between
// them, in planes, wherever they begin, more than a block has and fewer than a warp has.
#include "../support/cases.hpp"

#if defined(KOKKOS_ENABLE_CUDA)

namespace {

using namespace tests;
using Exec = Kokkos::Cuda;

// A gap that lets the next row begin on a boundary, too: some, and as many as bring it there.
constexpr std::int64_t to_boundary = -1;

// Where rows of x and of y lie: how many elements behind a boundary, and apart. `together`: rows of the next
// plane as far apart as those of one.
struct Arrangement {
  std::int64_t x_offset, x_gap, y_offset, y_gap;
  bool together;
  bool in_place = false;
};

// One behind the other, wherever they begin, x and y alike and not; apart, so that all begin on a boundary of
// 16 bytes, and so that they do not; one so and the other so.
constexpr Arrangement arrangements[] = {
    {0, 0, 0, 0, true},
    {1, 0, 1, 0, true},
    {2, 0, 2, 0, true},
    {3, 0, 3, 0, true},
    {1, 0, 2, 0, true},
    {0, 0, 3, 0, true},
    {0, 4, 0, 4, true},
    {0, 1, 0, 1, true},
    {2, 6, 3, 3, true},
    {0, 0, 0, 5, true},
    {1, 3, 1, 0, true},
    {0, 4, 0, 4, false},
    {0, to_boundary, 0, to_boundary, true},
    {0, to_boundary, 0, 0, true},
    {0, 0, 0, to_boundary, true},
    {0, to_boundary, 1, 2, true},
    {0, to_boundary, 0, to_boundary, false},
    {0, to_boundary, 0, to_boundary, true, true},
    {1, 2, 0, 1, false},
    {0, 0, 0, 0, true, true},
    {3, 0, 3, 0, true, true},
    {1, 5, 1, 5, true, true},
};

template <class T>
Case short_rows(std::int64_t rows, std::int64_t columns, const Arrangement& a) {
  Case c;
  c.extents = {2, rows, columns};
  c.axis = 2;
  c.logits = random_values(scalar_of<T>, c.size(), -5, 5);
  for (std::int64_t i = 0; i < c.size(); ++i) {
    const std::int64_t row = i / columns, column = i % columns;
    auto& logit = c.logits[static_cast<std::size_t>(i)];
    if (row % 2 == 0 && i % 7 == 0) logit = -reference::infinity;
    if (row == 3 && column == columns - 1) logit = reference::nan;
    if (row == 5 && column == columns / 3) logit = reference::infinity;
    if (row == 6) logit = -reference::infinity;
    if (row == 9) logit *= 0x1p12;
  }
  const auto layout = [&](std::int64_t offset, std::int64_t gap) {
    constexpr std::int64_t boundary = 16 / sizeof(T);
    const std::int64_t stride = gap == to_boundary ? (columns / boundary + 2) * boundary : columns + gap;
    const std::int64_t plane = rows * stride + (a.together ? 0 : 2 * boundary);
    return reference::Layout{c.extents, {plane, stride, 1}, offset};
  };
  c.in = layout(a.x_offset, a.x_gap);
  c.out = layout(a.y_offset, a.y_gap);
  c.in_place = a.in_place;
  c.special_around = true;
  return c;
}

// Of each plane: more than few, which may go another way, and no whole blocks.
std::int64_t many_rows() {
  return Exec().cuda_device_prop().multiProcessorCount * 4 + 65;
}

template <class In, class Out>
void check_lengths(const std::string& implementation, std::initializer_list<std::int64_t> lengths) {
  for (const std::int64_t columns : lengths) {
    for (const Arrangement& arrangement : arrangements) {
      if (arrangement.in_place && !std::is_same_v<In, Out>) continue;
      for (const std::int64_t rows : {many_rows(), std::int64_t(67), std::int64_t(1)}) {
        SCOPED_TRACE("x at " + std::to_string(arrangement.x_offset) + ", gap " +
                     std::to_string(arrangement.x_gap) + ", y at " + std::to_string(arrangement.y_offset) +
                     ", gap " + std::to_string(arrangement.y_gap));
        const Case c = short_rows<In>(rows, columns, arrangement);
        for (auto operation : operations) {
          run_case<In, Out, 3>(Exec(), operation, c, "");
          EXPECT_EQ(ks::last_implementation(), implementation)
              << reference::name(operation) << ", " << columns << " columns";
        }
      }
    }
  }
}

TEST(CudaShortRows, ThreadPerRow) {
  check_lengths<float, float>("thread_per_row", {2, 3, 4, 7, 8, 10, 16, 19, 26, 31});
  check_lengths<double, double>("thread_per_row", {2, 5, 8, 10, 13, 31});
  check_lengths<bhalf_t, bhalf_t>("thread_per_row", {2, 5, 8, 11, 16, 24, 31});
  check_lengths<half_t, half_t>("thread_per_row", {3, 12, 30});
  check_lengths<bhalf_t, float>("thread_per_row", {6, 9, 31});
}

// Whole vectors that begin on the same bank and that do not, pairs, others; of each number of rounds, with as
// few columns and as many in the last one as lanes take alike.
TEST(CudaShortRows, QuadPerRow) {
  check_lengths<float, float>("quad_per_row",
                              {33, 34, 36, 37, 38, 40, 44, 48, 49, 50, 52, 56, 60,  63,  65,  66,  68,
                               70, 72, 73, 76, 79, 80, 84, 88, 92, 95, 97, 98, 101, 106, 111, 118, 127});
}
// (logsumexp of these goes by warps.)
TEST(CudaShortRows, QuadPerRowOfLongerVectors) {
  for (const std::int64_t columns : {96, 100, 104, 108, 112, 116}) {
    for (const Arrangement& arrangement : arrangements) {
      for (const std::int64_t rows : {many_rows(), std::int64_t(67)}) {
        const Case c = short_rows<float>(rows, columns, arrangement);
        for (auto operation : {Operation::softmax, Operation::log_softmax})
          EXPECT_TRUE((run_case<float, float, 3>(Exec(), operation, c, "quad_per_row"))) << columns;
      }
    }
  }
}

}  // namespace

#endif
