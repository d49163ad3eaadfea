// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows of a few slices whose columns are not contiguous, on CUDA, each slice of a tile by a block of a
// cluster: as boxes, wide ones, and boxes of columns in turn, where these begin anywhere.
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../support/cuda_tiles.hpp"

#if defined(KOKKOS_ENABLE_CUDA)

namespace {

using namespace tests;
using Exec = Kokkos::Cuda;

constexpr const char* name = "cluster_pipelined_tiles";

template <class T>
constexpr std::int64_t columns_of_slice = sizeof(T) == 8 ? 128 : 256;

// Against double: columns on boundaries, in place too, whose last rows end within 16 bytes or not, and such
// as begin anywhere, whose sums are for others, as they are in place.
template <class In, class Out>
void check_cases(const std::vector<std::int64_t>& lengths) {
  if (!has_clusters<Exec>()) GTEST_SKIP() << "clusters need compute capability 9.0";
  for (const std::int64_t columns : lengths) {
    for (const std::int64_t rows : {8, 57, 64, 77, 130, 264}) {
      Case c = special_case<In>({columns, rows}, 0);
      const auto expect = [&](const char* layout, bool runs, bool has_sums) {
        for (const auto operation : operations) {
          const bool should = operation == Operation::logsumexp ? has_sums : runs;
          EXPECT_EQ((run_case<In, Out, 2>(Exec(), operation, c, name)), should)
              << reference::name(operation) << ' ' << ks::scalar_name<In>() << " to "
              << ks::scalar_name<Out>() << ' ' << columns << " columns, " << rows << " rows, " << layout;
        }
      };
      const auto ordered = [&](std::int64_t gap, std::int64_t offset) {
        return reference::ordered(c.extents, {1, 0}, 1, gap, offset);
      };
      c.in = ordered(32 - rows % 16, 16);
      c.out = c.in;
      const bool comes = sizeof(In) != 2 || rows % 2 == 0;  // of 16 bits as pairs of rows
      expect("on boundaries", comes, comes);
      c.in_place = true;
      expect("in place", comes, comes);
      c.in_place = false;
      c.in = ordered(3, 1);
      c.out = c.in;
      expect("anywhere", true, false);
      c.in_place = true;
      expect("anywhere, in place", !std::is_same_v<In, Out>, false);  // (which is in place of one type alone)
      c.in_place = false;
      c.out = ordered(32 - rows % 16, 16);
      expect("from anywhere", true, false);
      c.out = reference::ordered(c.extents, {0, 1});
      expect("to contiguous columns", false, false);
    }
  }
}
TEST(CudaClusterTiles, Float) {
  check_cases<float, float>({257, 300, 512, 513, 1000, 2048, 2049, 4096});
}
TEST(CudaClusterTiles, Double) {
  check_cases<double, double>({129, 200, 256, 257, 500, 1024, 1025, 2048});
}
TEST(CudaClusterTiles, Half) {
  check_cases<half_t, half_t>({257, 300, 512, 1000, 2048, 2049, 4096});
}
TEST(CudaClusterTiles, Bfloat16) {
  check_cases<bhalf_t, bhalf_t>({257, 300, 512, 1000, 2048, 2049, 4096});
}

TEST(CudaClusterTiles, HalfToBfloat16) {
  check_cases<half_t, bhalf_t>({300, 1000});
}

// Rows of two and three dimensions, where tiles of boxes end where the fastest of these does.
template <class T>
void check_dimensions() {
  if (!has_clusters<Exec>()) GTEST_SKIP() << "clusters need compute capability 9.0";
  for (const std::int64_t columns : {2 * columns_of_slice<T> - 9, 5 * columns_of_slice<T>}) {
    for (const std::int64_t inner : {64, 128, 1030}) {
      Case c = special_case<T>({3, columns, inner}, 1);
      const std::int64_t distance = (inner + 31) / 16 * 16;
      c.in = reference::Layout{c.extents, {columns * distance, distance, 1}, 0};
      c.out = c.in;
      for (const auto operation : operations)
        EXPECT_TRUE((run_case<T, T, 3>(Exec(), operation, c, name))) << columns << " by " << inner;
      c = special_case<T>({2, 3, columns, 64}, 2);
      c.in = reference::Layout{c.extents, {3 * columns * 80 + 4096, columns * 80 + 16, 80, 1}, 16};
      c.out = reference::Layout{c.extents, {3 * columns * 64, 64, 3 * 64, 1}, 0};
      for (const auto operation : operations)
        EXPECT_TRUE((run_case<T, T, 4>(Exec(), operation, c, name))) << columns;
    }
  }
}
TEST(CudaClusterTiles, DimensionsOfFloat) {
  check_dimensions<float>();
}
TEST(CudaClusterTiles, DimensionsOfDouble) {
  check_dimensions<double>();
}
TEST(CudaClusterTiles, DimensionsOfBfloat16) {
  check_dimensions<bhalf_t>();
}

// Clusters of each size, several tiles for each, and the bits of others: in tiles that are filled or not, the
// first one, too, and with slices that are.
template <class T>
void check_bits() {
  if (!has_clusters<Exec>()) GTEST_SKIP() << "clusters need compute capability 9.0";
  constexpr std::int64_t slice = columns_of_slice<T>, unit = 16 / static_cast<std::int64_t>(sizeof(T));
  for (std::int64_t slices = 2; slices <= 16; ++slices) {
    for (const std::int64_t columns :
         {slices * slice, slices * slice - slice / 2 - 1, (slices - 1) * slice + 1}) {
      const std::int64_t rows = 64 * (1400 / slices) + 48;
      for (const std::int64_t distance : {rows, rows + 16})
        check_bits_of_many_rows<T, Exec>(name, "two_pass_tiles", rows, columns, distance,
                                         {{0, 0}, {unit, unit}});
      check_bits_of_many_rows<T, Exec>(name, "two_pass_tiles", rows - (sizeof(T) == 2 ? 2 : 3), columns, rows,
                                       {{0, unit}});
      for (const std::int64_t distance : {rows + 1, rows + 3, rows + 6})
        check_bits_of_many_rows<T, Exec>(name, "two_pass_tiles", rows, columns, distance, {{0, 0}, {1, 3}},
                                         NoTransform(), false);
    }
  }
}
TEST(CudaClusterTiles, SameBitsOfFloat) {
  check_bits<float>();
}
TEST(CudaClusterTiles, SameBitsOfDouble) {
  check_bits<double>();
}
TEST(CudaClusterTiles, SameBitsOfHalf) {
  check_bits<half_t>();
}
TEST(CudaClusterTiles, SameBitsOfBfloat16) {
  check_bits<bhalf_t>();
}

// Of many rows, and where few multiprocessors are left over: see ClusterPipelinedTiles::advise_against.
TEST(CudaClusterTiles, WhoRuns) {
  if (!has_clusters<Exec>()) GTEST_SKIP() << "clusters need compute capability 9.0";
  const char *const grid = "grid_pipelined_tiles", *const twice = "two_pass_tiles",
                    *const in_block = "block_per_sliced_tile";
  expect_implementation<float>(400, 40000, name, name);
  expect_implementation<float>(400, 24000, in_block, in_block);
  expect_implementation<float>(400, 60001, name, in_block);
  expect_implementation<float>(300, 36000, name, name);
  expect_implementation<float>(258, 66001, name, in_block);
  expect_implementation<float>(1000, 16000, name, name);
  expect_implementation<float>(2000, 16000, name, twice);
  expect_implementation<float>(2100, 16000, grid, twice);
  expect_implementation<float>(3400, 16000, name, twice);
  expect_implementation<float>(3400, 16001, grid, twice);
  expect_implementation<float>(4000, 16001, name, twice);
  expect_implementation<float>(4100, 16000, grid, twice);
  // On boundaries of 16 bytes columns come in turn, of 16 bits they do not.
  expect_implementation<float>(600, 40004, name, grid);
  expect_implementation<bhalf_t>(600, 80008, grid, grid);
  expect_implementation<bhalf_t>(300, 80008, name, name);
  expect_implementation<bhalf_t>(300, 220001, in_block, twice);
  expect_implementation<bhalf_t>(300, 230001, name, twice);
  expect_implementation<double>(130, 41000, name, name);
  expect_implementation<double>(130, 65001, name, in_block);
  expect_implementation<double>(200, 40000, name, name);
  expect_implementation<double>(1000, 8000, name, twice);
  expect_implementation<double>(1000, 9001, name, twice);
  expect_implementation<double>(1100, 8000, grid, twice);
  expect_implementation<double>(2000, 8000, name, twice);
  expect_implementation<bhalf_t>(512, 50000, name, name);
  expect_implementation<bhalf_t>(2000, 16000, name, twice);
  expect_implementation<bhalf_t>(3500, 16000, grid, twice);
  expect_implementation<bhalf_t>(4000, 16000, name, twice);
  expect_implementation<half_t>(600, 70001, name, twice);
  expect_implementation<half_t>(1300, 60001, grid, twice);
  expect_implementation<half_t>(4000, 16001, twice, twice);
}

// On two streams at once, one shape after the other: what comes out is what another kernel makes of it, and
// the tickets of a launch begin where they should.
TEST(CudaClusterTiles, TwoStreamsAtOnce) {
  if (!has_clusters<Exec>()) GTEST_SKIP() << "clusters need compute capability 9.0";
  check_two_streams({{64, 300}, {8, 4096}, {4096, 513}, {1001, 2000}, {20000, 260}, {40, 1500}, {3000, 1024}},
                    name, "two_pass_tiles");
}

// Captured and replayed; what was reserved for longer rows, or for others that lie elsewhere, is enough.
TEST(CudaClusterTiles, Graphs) {
  if (!has_clusters<Exec>()) GTEST_SKIP() << "clusters need compute capability 9.0";
  using View = Kokkos::View<float**, Kokkos::LayoutLeft, Kokkos::CudaSpace>;
  for (const auto& [reserved_rows, reserved_columns] :
       {std::pair(20000, 1000), {20000, 5000}, {20001, 1000}}) {
    const Stream stream;
    const Exec exec(stream);
    const View reserved("x", reserved_rows, reserved_columns);
    ks::reserve(exec, reserved, reserved);
    exec.fence();
    const View x("x", 20000, 1000), y("y", 20000, 1000), expected("y", 20000, 1000);
    Kokkos::parallel_for("fill",
                         Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(Exec(), 0, x.span()),
                         FillColumns<float>{x.data(), 20000});
    {
      const ks::ScopedImplementation forced("softmax=two_pass_tiles");
      ks::softmax(Exec(), x, expected);
    }
    Exec().fence();
    const Graph graph(stream, [&] { ks::softmax(exec, x, y); });
    EXPECT_STREQ(ks::last_implementation(), name);
    EXPECT_EQ(graph.failure(), "");
    EXPECT_EQ(graph.nodes(), 1u);
    for (int launch = 0; launch < 100; ++launch) graph.launch();
    exec.fence();
    EXPECT_EQ(count_different(Exec(), y.data(), expected.data(), static_cast<std::int64_t>(y.span())), 0);
  }
}

// In place, so many rows that each cluster has several tiles.
TEST(CudaClusterTiles, ManyRowsInPlace) {
  if (!has_clusters<Exec>()) GTEST_SKIP() << "clusters need compute capability 9.0";
  for (const std::int64_t columns : {400, 1024, 4096}) {
    using View = Kokkos::View<float**, Kokkos::LayoutLeft, Kokkos::CudaSpace>;
    const std::int64_t rows = (48 << 20) / (4 * columns) / 8 * 8;
    const View x("x", rows, columns), y("y", rows, columns);
    Kokkos::parallel_for(
        "fill", Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(Exec(), 0, rows * columns),
        FillColumns<float>{x.data(), rows});
    ks::softmax(Exec(), View(x), y);
    EXPECT_STREQ(ks::last_implementation(), name);
    ks::softmax(Exec(), View(x), x);
    EXPECT_STREQ(ks::last_implementation(), name);
    EXPECT_EQ(count_different(Exec(), x.data(), y.data(), rows * columns), 0) << columns << " columns";
  }
}

}  // namespace

#endif
