// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows of 16 bits in slices that become floats on CUDA: what grid_pipelined_rows stages beside its ring,
// piece by piece, and the same bits from split_rows, whose rows are cut alike.
#include <Kokkos_Core.hpp>

#if defined(KOKKOS_ENABLE_CUDA)

#include "../support/packed_rows.hpp"

namespace {

using namespace tests;

constexpr const char* ring = "grid_pipelined_rows";
constexpr Operation written[] = {Operation::softmax, Operation::log_softmax};

class CudaWidenedSlices : public ::testing::Test {
 protected:
  void SetUp() override {
    const Case c = special_case<bhalf_t>(20003, Gaps::none, 1);
    if (!run_case<bhalf_t, float, 3>(Exec(), Operation::softmax, c, ring))
      GTEST_SKIP() << "needs a device of compute capability 9.0";
  }
};

// In slices of each length: rows of two and more of them, of a last one that is short, of as many as have
// their results asked for at once.
const std::int64_t lengths[] = {17, 8193, 16385, 16392, 20003, 32768, 40001, 65536, 65537, 81920, 131073};

template <class T>
void check_without_transform(std::int64_t columns, Gaps gaps) {
  const auto c = special_case<T>(columns, gaps, 1);
  for (const auto operation : operations) {
    EXPECT_TRUE((run_case<T, float, 3>(Exec(), operation, c, ring)));
    EXPECT_TRUE((run_case<T, float, 3>(Exec(), operation, c, "split_rows")));
  }
}

TEST_F(CudaWidenedSlices, WithoutATransform) {
  for (const auto columns : lengths) {
    for (const Gaps gaps : all_gaps) check_without_transform<bhalf_t>(columns, gaps);
    check_without_transform<half_t>(columns, all_gaps[columns % 3]);
  }
}

// Of more slices than results are asked for at once but for longer ones, in runs of slices, and read twice.
TEST_F(CudaWidenedSlices, LongRows) {
  for (const std::int64_t columns : {1310721, 1900003, 2300001, 4300001}) {
    const auto c = special_case<bhalf_t>(columns, columns % 2 == 0 ? Gaps::none : Gaps::rows, 1, 4);
    for (const auto operation : operations)
      EXPECT_TRUE((run_case<bhalf_t, float, 3>(Exec(), operation, c, ring)));
  }
}

// y begins at any place against x.
TEST_F(CudaWidenedSlices, OffBoundaries) {
  for (const std::int64_t columns : {8190, 16387, 40001, 65536}) {
    for (std::int64_t at = 0; at < 8; ++at) {
      SCOPED_TRACE(at);
      auto c = special_case<bhalf_t>(columns, Gaps::none, 1);
      c.in = reference::right(c.extents, at % 3, at);
      c.out = reference::right(c.extents, at % 2, (3 * at + at / 4) % 8);
      for (const auto operation : written)
        EXPECT_TRUE((run_case<bhalf_t, float, 3>(Exec(), operation, c, ring)));
    }
  }
}

// So many that a block has slices in all its slots more than once, and in the places of outputs many times.
struct ManyRows {
  std::int64_t columns, rows;
};
const ManyRows many[] = {{16385, 900}, {40001, 400}, {65536, 250}, {131073, 120}};

TEST_F(CudaWidenedSlices, ManyRows) {
  for (const auto& [columns, rows] : many) {
    const auto c = special_case<bhalf_t>(columns, columns % 2 == 0 ? Gaps::none : Gaps::rows, 1, rows);
    for (const auto operation : written)
      EXPECT_TRUE((run_case<bhalf_t, float, 3>(Exec(), operation, c, ring)));
  }
}

// Some slices are not read, and written all the same: of all rows, of the first ones, of none.
TEST_F(CudaWidenedSlices, Causal) {
  int turn = 0;
  for (const auto& [columns, rows] : {ManyRows{16385, 900}, ManyRows{65536, 170}}) {
    for (const std::int64_t offset : {-rows / 2, std::int64_t(8100), columns / 2}) {
      SCOPED_TRACE(offset);
      auto c = with_dropped(
          special_case<bhalf_t>(columns, columns % 2 == 0 ? Gaps::none : Gaps::rows, 1, rows), offset);
      c.chain = {reference::scale(accumulator<bhalf_t, float>(), 0.125), reference::causal(offset)};
      const auto operation = written[turn++ % 2];
      EXPECT_TRUE(
          (run_case<bhalf_t, float, 3>(Exec(), operation, c, ring, ks::scale(0.125) | ks::causal(offset))));
    }
  }
}

// Operands lie between the slots and the places of outputs: one for each logit, one for all rows.
TEST_F(CudaWidenedSlices, Bias) {
  for (const auto& [columns, rows] : {ManyRows{16385, 900}, ManyRows{131073, 100}}) {
    auto c = special_case<bhalf_t>(columns, columns % 2 == 0 ? Gaps::none : Gaps::rows, 1, rows);
    for (const auto& extents : {std::vector<std::int64_t>{1, rows, columns}, {1, 1, columns}}) {
      const auto layout = reference::right(extents);
      const Operand<bhalf_t, Exec> add(layout, random_values(scalar_of<bhalf_t>, layout.size(), -3, 3));
      c.chain = {reference::bias(accumulator<bhalf_t, float>(), add.at(c))};
      for (const auto operation : written)
        EXPECT_TRUE(
            (run_case<bhalf_t, float, 3>(Exec(), operation, c, ring, ks::bias(add.template view<3>()))));
    }
  }
}

// Wherever it and its results lie, and whatever rows are beside it.
TEST_F(CudaWidenedSlices, RowsGiveTheSameBitsAloneAndBesideOthers) {
  using Logits = Kokkos::View<bhalf_t**, Kokkos::LayoutRight, Kokkos::CudaSpace,
                              Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  using Outputs =
      Kokkos::View<float**, Kokkos::LayoutRight, Kokkos::CudaSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  const Exec exec;
  for (const std::int64_t columns : {16385, 20003, 32768, 65537, 131073, 400001, 1310721}) {
    const std::int64_t rows = std::max<std::int64_t>(3, 1400 * 16384 / columns);
    const Kokkos::View<bhalf_t*, Kokkos::CudaSpace> x("x", rows * columns + 8), one("one row", columns + 8);
    const Kokkos::View<float*, Kokkos::CudaSpace> y("y", rows * columns + 8),
        result("its result", columns + 8);
    const auto host = Kokkos::create_mirror_view(x);
    const auto logits = random_values(scalar_of<bhalf_t>, columns + 1000, -8, 8);
    for (std::int64_t i = 0; i < rows * columns; ++i) {
      const std::int64_t from = i / columns * 37 % 1000 + i % columns;
      host(i) = bhalf_t(static_cast<float>(logits[static_cast<std::size_t>(from)]));
    }
    Kokkos::deep_copy(x, host);
    const auto run = [&](Operation operation, const Logits& from, const Outputs& to, const char* kernel) {
      const ks::ScopedImplementation forced(kernel);
      if (operation == Operation::softmax) {
        ks::softmax(exec, from, to);
      } else {
        ks::log_softmax(exec, from, to);
      }
    };
    for (const auto operation : written) {
      run(operation, Logits(x.data(), rows, columns), Outputs(y.data(), rows, columns), ring);
      for (const std::int64_t row : {std::int64_t(0), rows / 2, rows - 1}) {
        const auto its = std::make_pair(row * columns, (row + 1) * columns);
        const auto expected =
            Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), Kokkos::subview(y, its));
        for (const char* kernel : {ring, "split_rows"}) {
          if (kernel != ring && columns > 1000000) continue;  // too many slices
          for (const std::int64_t offset : {0, 1, 3, 6}) {
            Kokkos::parallel_for("copy",
                                 Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, columns),
                                 CopyRow<bhalf_t>{x.data() + row * columns, one.data() + offset});
            float* const to = result.data() + offset / 2;
            run(operation, Logits(one.data() + offset, 1, columns), Outputs(to, 1, columns), kernel);
            const auto alone = Kokkos::create_mirror_view_and_copy(
                Kokkos::HostSpace(),
                Kokkos::subview(result, std::make_pair(offset / 2, offset / 2 + columns)));
            EXPECT_EQ(std::memcmp(alone.data(), expected.data(), alone.span() * sizeof(float)), 0)
                << reference::name(operation) << ", " << columns << " columns, row " << row << " of " << rows
                << ", by " << kernel << " at " << offset;
          }
        }
      }
    }
  }
}

}  // namespace

#endif
