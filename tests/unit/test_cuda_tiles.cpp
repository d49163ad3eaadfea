// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows whose columns are not contiguous, on CUDA: tiles of neighbouring rows in registers, one or several in
// each thread, of a block or of a cluster of blocks, all slices of a row in a block, slices of tiles in a
// ring, copied as boxes of tensors where these lie on boundaries, else by threads, and slices that are read
// twice.
#include <cmath>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "../support/cuda_tiles.hpp"

#if defined(KOKKOS_ENABLE_CUDA)

namespace {

using namespace tests;
using Exec = Kokkos::Cuda;

// Images of 300 channels.
template <class T>
void expect_implementation_of_images(std::int64_t side, const char* expected) {
  const std::int64_t images = 200, channels = 300, pixels = side * side;
  const Kokkos::View<T***, Kokkos::LayoutRight, Kokkos::CudaSpace> x("x", images, channels, pixels),
      y("y", images, channels, pixels);
  ks::softmax(Exec(), x, y, ks::axis(1));
  EXPECT_STREQ(ks::last_implementation(), expected) << ks::scalar_name<T>() << ' ' << side;
  Exec().fence();
}

// Rows enough for several in each thread.
std::int64_t many_rows() {
  return std::int64_t(8 * 2048) * Exec().cuda_device_prop().multiProcessorCount;
}

// By length and type, never by the number of rows, but between the two that give each other's bits.
TEST(CudaTiles, LengthAndTypeDecideWhoRuns) {
  const char *const twice = "two_pass_tiles", *const in_block = "block_per_sliced_tile";
  const char* const sliced = has_clusters<Exec>() ? "grid_pipelined_tiles" : twice;
  for (const std::int64_t rows : {1, 2, 33, 256}) {
    for (const std::int64_t columns : {2, 8, 9, 256}) {
      expect_implementation<float>(columns, rows, "block_per_tile");
      expect_implementation<bhalf_t>(columns, rows, "block_per_tile");
    }
    expect_implementation<float>(257, rows, in_block);
    for (const std::int64_t columns : {1025, 4096}) {
      expect_implementation<float>(columns, rows, sliced);
      expect_implementation<half_t>(columns, rows, sliced);
    }
    // (Sums of rows enough for three kernels.)
    const char* const of_sums = rows == 256 ? twice : sliced;
    expect_implementation<float>(16384, rows, sliced, of_sums);
    expect_implementation<half_t>(16384, rows, sliced, of_sums);
    expect_implementation<float>(65537, rows, twice);
    expect_implementation<double>(128, rows, "block_per_tile");
    // (256 rows begin on boundaries of 32 bytes, which boxes are for.)
    const bool by_boxes = rows == 256 && has_clusters<Exec>();
    expect_implementation<double>(129, rows, by_boxes ? sliced : in_block, in_block);
    expect_implementation<double>(256, rows, in_block);
    expect_implementation<double>(512, rows, by_boxes ? sliced : in_block, twice);
    for (const std::int64_t columns : {513, 16384})
      expect_implementation<double>(columns, rows, by_boxes ? sliced : twice, twice);
    for (const std::int64_t columns : {16385, 40000}) expect_implementation<double>(columns, rows, twice);
  }
  expect_implementation<float>(5, many_rows(), "block_per_wide_tile");
  expect_implementation<bhalf_t>(5, many_rows() + 1, "block_per_wide_tile");
  for (const std::int64_t columns : {64, 100, 256}) {
    expect_implementation<float>(columns, 25600000 / columns, "block_per_wide_tile");
    expect_implementation<bhalf_t>(columns, 25600000 / columns, "block_per_wide_tile");
  }
  expect_implementation<float>(256, 10000, "block_per_tile");
  expect_implementation<double>(2, many_rows(), "block_per_tile");
  // Boxes are copied faster, but where they would write sectors in part. And half of 16 bits are no pairs.
  const char* const several = has_clusters<Exec>() ? "cluster_per_tile" : twice;
  if (has_clusters<Exec>()) {
    // (Of rows of several slices, of which there are not so many that clusters have them:
    // test_cuda_cluster_tiles.)
    expect_implementation<float>(300, 50001, in_block);
    expect_implementation<float>(300, 30000, in_block);
    expect_implementation<float>(400, 40001, several, in_block);
    expect_implementation<float>(600, 25001, several, twice);
    expect_implementation<float>(600, 16000, sliced);
    // From memory, every fourth column in its boxes, and whole sectors written.
    expect_implementation<float>(2500, 20001, sliced, twice);
    expect_implementation<float>(20001, 2001, sliced, twice);
    expect_implementation<float>(22001, 2001, twice);
    expect_implementation<half_t>(300, 100001, in_block, twice);
    expect_implementation<half_t>(500, 60001, in_block, twice);
    expect_implementation<half_t>(500, 40000, sliced);
    expect_implementation<half_t>(600, 50001, twice);
    expect_implementation<half_t>(600, 50002, twice);
    expect_implementation<half_t>(350, 190001, in_block, twice);
    expect_implementation<half_t>(1100, 70001, sliced, twice);
    expect_implementation<bhalf_t>(2560, 30001, sliced, twice);
    expect_implementation<bhalf_t>(2561, 30001, twice);
    // Of doubles every other one.
    expect_implementation<double>(256, 30001, in_block);
    expect_implementation<double>(300, 24001, sliced, twice);
    expect_implementation<double>(300, 20001, in_block, twice);
    expect_implementation<double>(1100, 8002, sliced, twice);
    expect_implementation<double>(2560, 5001, sliced, twice);
    expect_implementation<double>(2561, 5001, twice);
    // Wide boxes write whole sectors but for their edges.
    expect_implementation<float>(300, 30004, in_block);
    expect_implementation<float>(400, 40004, sliced, in_block);
    expect_implementation<float>(512, 30004, several, in_block);
    expect_implementation<float>(600, 25004, sliced);
    expect_implementation<float>(10000, 4004, sliced, twice);
    expect_implementation<bhalf_t>(4000, 20008, sliced, twice);
    expect_implementation<bhalf_t>(4000, 20004, twice);
    expect_implementation<float>(512, 10000, in_block);
  }
  // What cannot wait in shared memory as it is written, and of which there is too much to wait for.
  expect_implementation<float>(5000, 4000, sliced, twice);
  expect_implementation<float>(5000, 4001, twice);
  expect_implementation<float>(5000, 8001, sliced, twice);
  expect_implementation<float>(5000, 4004, sliced, twice);
  expect_implementation<float>(20000, 4004, twice);
  const bool has_fast_memory = ks::impl::has_fast_memory(Exec().cuda_device());
  expect_implementation<float>(50000, 4000, has_fast_memory ? twice : sliced, twice);
  expect_implementation<bhalf_t>(5000, 4000, sliced, twice);
  expect_implementation<bhalf_t>(5000, 4002, twice);
  expect_implementation<bhalf_t>(50000, 1024, twice);
  for (const std::int64_t side : {13, 14}) expect_implementation_of_images<float>(side, in_block);
  expect_implementation_of_images<float>(28, has_clusters<Exec>() ? "cluster_pipelined_tiles" : in_block);
  expect_implementation_of_images<bhalf_t>(13, in_block);
  if (has_clusters<Exec>()) expect_implementation_of_images<bhalf_t>(28, "cluster_pipelined_tiles");
}

// In the layout that was given and others: padded, in place, off boundaries.
template <class In, class Out, int rank>
void check_layouts(const std::vector<std::int64_t>& extents, const std::vector<int>& order, int axis) {
  Case c = special_case<In>(extents, axis);
  c.in = reference::ordered(extents, order);
  c.out = c.in;
  check<In, Out, rank>(Exec(), c, true);
  c.in_place = true;
  check<In, Out, rank>(Exec(), c, false);
  c.in_place = false;
  // Sixteen more between columns, and 16 elements on: boundaries of boxes; then off all of them.
  c.in = reference::ordered(extents, order, 1, 16, 16);
  check<In, Out, rank>(Exec(), c, false);
  // Columns that begin on boundaries and end anywhere: what lies behind them in the last 16 bytes stays.
  const std::int64_t inner = extents[static_cast<std::size_t>(order.front())];
  const auto dense = c.out;
  c.in = reference::ordered(extents, order, 1, 32 - inner % 16, 16);
  c.out = c.in;
  check<In, Out, rank>(Exec(), c, false);
  c.out = dense;
  c.in = reference::ordered(extents, order, 1, 3, 1);
  check<In, Out, rank>(Exec(), c, false);
  c.out = reference::ordered(extents, order, 1, 5, 2);
  check<In, Out, rank>(Exec(), c, false);
  // Into rows that are contiguous, from rows that are nowhere neighbours.
  c.out = std::nullopt;
  check<In, Out, rank>(Exec(), c, false);
  c.in = reference::ordered(extents, order, 2, 1, 0);
  check<In, Out, rank>(Exec(), c, false);
}

template <class In, class Out>
void check_lengths() {
  for (const std::int64_t columns : {2, 3, 4, 7, 8, 9, 16, 17, 100, 129, 256, 257, 300, 511, 512, 1025}) {
    for (const std::int64_t rows : {1, 2, 30, 64, 72, 77})
      check_layouts<In, Out, 2>({columns, rows}, {1, 0}, 0);
  }
  for (const std::int64_t columns : {4097, 10000}) check_layouts<In, Out, 2>({columns, 72}, {1, 0}, 0);
}
TEST(CudaTiles, Float) {
  check_lengths<float, float>();
}
TEST(CudaTiles, Double) {
  check_lengths<double, double>();
}
TEST(CudaTiles, Half) {
  check_lengths<half_t, half_t>();
}
TEST(CudaTiles, Bfloat16) {
  check_lengths<bhalf_t, bhalf_t>();
}
TEST(CudaTiles, HalfToFloat) {
  check_lengths<half_t, float>();
}

// A middle axis, and rows of two and three dimensions that do not continue each other: tiles of boxes end
// where the fastest of these does, others go on in the next one.
template <class T>
void check_dimensions() {
  for (const std::int64_t columns : {21, 300, 1000}) {
    for (const std::int64_t inner : {1, 14, 64, 128, 196, 560, 1030})
      check_layouts<T, T, 3>({3, columns, inner}, {2, 1, 0}, 1);
    check_layouts<T, T, 4>({2, 3, columns, 64}, {3, 2, 1, 0}, 2);
    Case c = special_case<T>({2, 3, columns, 64}, 2);
    c.in = reference::Layout{c.extents, {3 * columns * 80 + 4096, columns * 80 + 16, 80, 1}, 16};
    c.out = reference::Layout{c.extents, {3 * columns * 64, 64, 3 * 64, 1}, 0};
    check<T, T, 4>(Exec(), c, false);
  }
}
TEST(CudaTiles, DimensionsOfFloat) {
  check_dimensions<float>();
}
TEST(CudaTiles, DimensionsOfBfloat16) {
  check_dimensions<bhalf_t>();
}

// Several rows in each thread, which only many rows have unless that is forced: in vectors, in pairs, and off
// all boundaries, where lanes store what others have, up to the last row and the group's.
template <class In, class Out>
void check_several_rows(const char* implementation, const std::vector<std::int64_t>& lengths) {
  const ks::ScopedImplementation forced(implementation);
  for (const std::int64_t columns : lengths) {
    for (const std::int64_t rows : {1, 2, 7, 57, 64, 77, 121, 130, 512, 520, 1031}) {
      const std::vector<std::int64_t> extents{columns, rows};
      const std::vector<int> order{1, 0};
      Case c = special_case<In>(extents, 0);
      const auto check_in = [&](const reference::Layout& in, const reference::Layout& out) {
        c.in = in;
        c.out = out;
        check<In, Out, 2>(Exec(), c, false);
      };
      const auto dense = reference::ordered(extents, order),
                 padded = reference::ordered(extents, order, 1, 16, 16),
                 pairs = reference::ordered(extents, order, 1, 6, 2),
                 odd = reference::ordered(extents, order, 1, 3, 1);
      check_in(dense, dense);
      check_in(padded, padded);
      check_in(pairs, pairs);
      check_in(odd, odd);
      check_in(padded, odd);
      check_in(odd, pairs);
      c.in_place = true;
      check_in(dense, dense);
    }
  }
}
template <class In, class Out>
void check_wide_tiles() {
  check_several_rows<In, Out>("block_per_wide_tile", {2, 3, 4, 5, 8, 9, 16, 33, 100, 129, 200, 256});
}
template <class T>
void check_clusters() {
  if (!has_clusters<Exec>()) GTEST_SKIP() << "clusters need compute capability 9.0";
  check_several_rows<T, T>("cluster_per_tile", {257, 300, 512, 513, 1000, 2049, 4096});
}
// Rows of two dimensions, of which a thread has some that are neighbours.
template <class T>
void check_dimensions_of_several_rows(const char* implementation, const std::vector<std::int64_t>& lengths) {
  const ks::ScopedImplementation forced(implementation);
  for (const std::int64_t columns : lengths) {
    for (const std::int64_t inner : {8, 64, 200}) {
      Case c = special_case<T>({3, columns, inner}, 1);
      check<T, T, 3>(Exec(), c, false);
      c = special_case<T>({2, 3, columns, inner}, 2);
      c.in = reference::Layout{c.extents, {3 * columns * 208 + 4096, columns * 208 + 16, 208, 1}, 16};
      c.out = reference::Layout{c.extents, {3 * columns * inner, inner, 3 * inner, 1}, 0};
      check<T, T, 4>(Exec(), c, false);
    }
  }
}
TEST(CudaTiles, DimensionsOfWideTiles) {
  check_dimensions_of_several_rows<float>("block_per_wide_tile", {2, 3, 21, 200});
  check_dimensions_of_several_rows<bhalf_t>("block_per_wide_tile", {2, 3, 21, 200});
}
TEST(CudaTiles, DimensionsOfClusters) {
  if (!has_clusters<Exec>()) GTEST_SKIP() << "clusters need compute capability 9.0";
  check_dimensions_of_several_rows<float>("cluster_per_tile", {257, 600});
  check_dimensions_of_several_rows<bhalf_t>("cluster_per_tile", {257, 600});
}
TEST(CudaTiles, WideOfFloat) {
  check_wide_tiles<float, float>();
}
TEST(CudaTiles, WideOfHalf) {
  check_wide_tiles<half_t, half_t>();
}
TEST(CudaTiles, WideOfBfloat16) {
  check_wide_tiles<bhalf_t, bhalf_t>();
}
TEST(CudaTiles, WideOfBfloat16ToFloat) {
  check_wide_tiles<bhalf_t, float>();
}

TEST(CudaTiles, ClustersOfFloat) {
  check_clusters<float>();
}
TEST(CudaTiles, ClustersOfHalf) {
  check_clusters<half_t>();
}
TEST(CudaTiles, ClustersOfBfloat16) {
  check_clusters<bhalf_t>();
}

// All slices of a row in a block.
template <class In, class Out>
void check_sliced_tiles(const std::vector<std::int64_t>& lengths) {
  check_several_rows<In, Out>("block_per_sliced_tile", lengths);
  const ks::ScopedImplementation forced("block_per_sliced_tile");
  for (const std::int64_t rows : {1, 31, 72}) check_layouts<In, Out, 2>({lengths.back(), rows}, {1, 0}, 0);
}
TEST(CudaTiles, SlicedOfFloat) {
  check_sliced_tiles<float, float>({257, 300, 512, 600, 1024});
}
TEST(CudaTiles, SlicedOfDouble) {
  check_sliced_tiles<double, double>({129, 300, 512});
}
TEST(CudaTiles, SlicedOfHalf) {
  check_sliced_tiles<half_t, half_t>({257, 600, 1024});
}
TEST(CudaTiles, SlicedOfBfloat16) {
  check_sliced_tiles<bhalf_t, bhalf_t>({257, 600, 1024});
}
TEST(CudaTiles, SlicedOfBfloat16ToFloat) {
  check_sliced_tiles<bhalf_t, float>({257, 600});
}
TEST(CudaTiles, DimensionsOfSlicedTiles) {
  check_dimensions_of_several_rows<float>("block_per_sliced_tile", {257, 600});
  check_dimensions_of_several_rows<bhalf_t>("block_per_sliced_tile", {257, 600});
}
TEST(CudaTiles, SameBitsOfSlicedTiles) {
  const std::vector<std::int64_t> lengths{257, 300, 512, 600, 1000};
  check_bits_of_sliced_tiles<float, Exec>(lengths);
  check_bits_of_sliced_tiles<half_t, Exec>(lengths);
  check_bits_of_sliced_tiles<bhalf_t, Exec>(lengths);
  check_bits_of_sliced_tiles<double, Exec>({129, 300, 512});
}

// Slices that come as boxes, and others.
TEST(CudaTiles, RingOfDouble) {
  if (!has_clusters<Exec>()) GTEST_SKIP() << "boxes need compute capability 9.0";
  check_several_rows<double, double>("grid_pipelined_tiles", {129, 257, 300, 512, 513, 1000, 3584, 4097});
  check_dimensions_of_several_rows<double>("grid_pipelined_tiles", {257, 600});
}

// Written by sectors of memory, up to the last rows, of a tile more than there are; and rows that are nowhere
// neighbours.
template <class In, class Out>
void check_two_passes(const std::vector<std::int64_t>& lengths) {
  check_several_rows<In, Out>("two_pass_tiles", lengths);
  const ks::ScopedImplementation forced("two_pass_tiles");
  for (const std::int64_t rows : {1, 31, 72}) check_layouts<In, Out, 2>({1100, rows}, {1, 0}, 0);
}
TEST(CudaTiles, TwoPassesOfFloat) {
  check_two_passes<float, float>({257, 300, 512, 1000, 4097});
}
TEST(CudaTiles, TwoPassesOfDouble) {
  check_two_passes<double, double>({129, 130, 300, 1000, 4097});
}
TEST(CudaTiles, TwoPassesOfHalf) {
  check_two_passes<half_t, half_t>({257, 300, 1000, 4097});
}
TEST(CudaTiles, TwoPassesOfBfloat16) {
  check_two_passes<bhalf_t, bhalf_t>({257, 300, 1000, 4097});
}
TEST(CudaTiles, TwoPassesOfBfloat16ToFloat) {
  check_two_passes<bhalf_t, float>({257, 300, 1000});
}
TEST(CudaTiles, DimensionsOfTwoPasses) {
  check_dimensions_of_several_rows<float>("two_pass_tiles", {257, 600});
  check_dimensions_of_several_rows<bhalf_t>("two_pass_tiles", {257, 600});
}

// More results to join than a block does at once.
TEST(CudaTiles, LongRowsOfTwoPasses) {
  for (const std::int64_t rows : {3, 33}) {
    check_layouts<float, float, 2>({70001, rows}, {1, 0}, 0);
    check_layouts<bhalf_t, bhalf_t, 2>({70001, rows}, {1, 0}, 0);
    check_layouts<double, double, 2>({40001, rows}, {1, 0}, 0);
  }
}
TEST(CudaTiles, SameBitsOfLongRowsOfTwoPasses) {
  const std::vector<RowsBeside> places{{1, 17, 3}, {64, 64, 0}, {65, 80, 16}, {77, 77, 5}};
  check_bits_beside<float, Exec>("", "", places, {70001});
  check_bits_beside<bhalf_t, Exec>("", "", places, {70001});
  check_bits_beside<double, Exec>("", "", places, {40001});
}

TEST(CudaTiles, SameBitsOfTwoPasses) {
  if (!has_clusters<Exec>()) GTEST_SKIP() << "the other kernel needs compute capability 9.0";
  const std::vector<std::int64_t> lengths{257, 300, 512, 1000, 2049, 4096, 4353, 20001};
  check_bits_of_two_passes<float, Exec>(lengths);
  check_bits_of_two_passes<half_t, Exec>(lengths);
  check_bits_of_two_passes<bhalf_t, Exec>(lengths);
  check_bits_of_two_passes<double, Exec>({129, 200, 257, 300, 512, 1000, 2049, 3584, 4353, 20001});
}

// So many rows of 16 bits that they are reduced in pairs where these do not begin on boundaries.
TEST(CudaTiles, PairsThatBeginAnywhere) {
  if (!has_clusters<Exec>()) GTEST_SKIP() << "the other kernel needs compute capability 9.0";
  for (const std::int64_t columns : {257, 300, 600, 1024, 4097}) {
    check_bits_of_pairs<bhalf_t, Exec>("two_pass_tiles", "grid_pipelined_tiles", columns);
    check_bits_of_pairs<half_t, Exec>("two_pass_tiles", "grid_pipelined_tiles", columns);
  }
}

// And so many that slices come as boxes that are twice as wide.
TEST(CudaTiles, WideBoxes) {
  if (!has_clusters<Exec>()) GTEST_SKIP() << "boxes need compute capability 9.0";
  for (const std::int64_t columns : {300, 512, 600, 1024, 4000, 10000})
    check_bits_of_wide_boxes<float, Exec>(columns);
  for (const std::int64_t columns : {384, 512, 600, 2049, 4000}) {
    check_bits_of_wide_boxes<bhalf_t, Exec>(columns);
    check_bits_of_wide_boxes<half_t, Exec>(columns);
  }
  // A multiple of 256 bytes apart, the first tile and the last one filled or not, and parts of 16 bytes.
  for (const std::int64_t rows : {66624, 66626, 66688}) {
    check_bits_of_many_rows<float, Exec>("grid_pipelined_tiles", "two_pass_tiles", rows, 512, 66688,
                                         {{0, 0}, {4, 4}, {0, 4}, {8, 8}});
  }
  check_bits_of_many_rows<bhalf_t, Exec>("grid_pipelined_tiles", "two_pass_tiles", 66686, 512, 66688,
                                         {{0, 0}, {8, 8}});
}

TEST(CudaTiles, SameBitsOfClusters) {
  if (!has_clusters<Exec>()) GTEST_SKIP() << "clusters need compute capability 9.0";
  const std::vector<std::int64_t> lengths{257, 300, 512, 1000, 2049, 4096};
  check_bits_of_clusters<float, Exec>(lengths);
  check_bits_of_clusters<half_t, Exec>(lengths);
  check_bits_of_clusters<bhalf_t, Exec>(lengths);
}

TEST(CudaTiles, SameBitsOfWideTiles) {
  const std::vector<std::int64_t> lengths{2, 3, 4, 5, 8, 12, 16, 33, 100, 128, 200, 256};
  check_bits_of_wide_tiles<float, Exec>(lengths);
  check_bits_of_wide_tiles<half_t, Exec>(lengths);
  check_bits_of_wide_tiles<bhalf_t, Exec>(lengths);
}

// Columns of several slices that begin anywhere: boxes of every fourth column of floats, of every other one
// of doubles, of every eighth of 16 bits, from boundaries before their first rows, and whole sectors written,
// in the first tile and the last one, too, which are filled or not. (So many that they come so: see
// GridPipelinedTiles::come_as_boxes_anywhere.)
template <class T>
void check_boxes_anywhere(const std::vector<std::int64_t>& lengths, std::int64_t bytes,
                          std::pair<std::int64_t, std::int64_t> last_offsets) {
  if (!has_clusters<Exec>()) GTEST_SKIP() << "boxes need compute capability 9.0";
  constexpr std::int64_t size = sizeof(T), sector = 32 / size, tile = size == 2 ? 128 : 64,
                         step = tile - sector;
  for (const std::int64_t columns : lengths) {
    const std::int64_t whole = step * (bytes / (size * step * columns) + 1);
    for (const std::int64_t more : {std::int64_t(1), sector - 1, sector, tile - 1}) {
      const std::int64_t rows = whole + more;
      for (const std::int64_t distance : {rows | 1, (rows | 3) + 3})
        check_bits_of_many_rows<T, Exec>("grid_pipelined_tiles", "two_pass_tiles", rows, columns, distance,
                                         {{0, 0}, {1, 3}, last_offsets});
    }
  }
}
TEST(CudaTiles, BoxesAnywhere) {
  check_boxes_anywhere<float>({288, 290, 511, 513, 1000, 4097, 20480}, 129 << 20, {6, 0});
}
TEST(CudaTiles, DoublesInBoxesAnywhere) {
  check_boxes_anywhere<double>({257, 300, 511, 513, 1000, 2560}, 49 << 20, {2, 0});
}
TEST(CudaTiles, Bfloat16InBoxesAnywhere) {
  check_boxes_anywhere<bhalf_t>({385, 511, 513, 1000, 2560}, 129 << 20, {6, 1});
}
TEST(CudaTiles, HalfInBoxesAnywhere) {
  check_boxes_anywhere<half_t>({400, 1025}, 129 << 20, {6, 1});
}

// Wherever columns begin, how far ever they are apart, and whatever kernel has which of the rows.
template <class T>
void check_random_places(unsigned cases) {
  if (!has_clusters<Exec>()) GTEST_SKIP() << "the other kernel needs compute capability 9.0";
  std::mt19937 generator(1);
  const auto below = [&](std::int64_t end) { return static_cast<std::int64_t>(generator() % end); };
  for (unsigned i = 0; i < cases; ++i) {
    constexpr std::int64_t most = 64 << 20;
    const std::int64_t columns = 257 + below(i % 3 == 0 ? 9000 : 1500),
                       most_rows = most / (static_cast<std::int64_t>(sizeof(T)) * columns),
                       rows = 1 + below(i % 2 == 0 ? most_rows : 200), distance = rows + below(9);
    check_bits_of_many_rows<T, Exec>("grid_pipelined_tiles", "two_pass_tiles", rows, columns,
                                     i % 4 == 3 ? (distance + 15) / 16 * 16 : distance,
                                     {{below(9), below(9)}});
  }
}
TEST(CudaTiles, RandomPlacesOfFloat) {
  check_random_places<float>(60);
}
TEST(CudaTiles, RandomPlacesOfDouble) {
  check_random_places<double>(60);
}
TEST(CudaTiles, RandomPlacesOfBfloat16) {
  check_random_places<bhalf_t>(60);
}

// In place a tile's rows are no outputs of its neighbours'.
TEST(CudaTiles, ManyRowsInPlaceThatBeginAnywhere) {
  const Exec exec;
  for (const std::int64_t columns : {100, 256, 600}) {
    using View = Kokkos::View<float**, Kokkos::LayoutLeft, Kokkos::CudaSpace>;
    const std::int64_t rows = (140 << 20) / (4 * columns) | 1;
    const View x("x", rows, columns), y("y", rows, columns);
    Kokkos::parallel_for("fill",
                         Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, rows * columns),
                         FillColumns<float>{x.data(), rows});
    ks::softmax(exec, View(x), y);
    ks::softmax(exec, View(x), x);
    EXPECT_EQ(count_different(exec, x.data(), y.data(), rows * columns), 0) << columns << " columns";
  }
}

// Floats that begin anywhere are written by whole sectors: every row of every column by one group of lanes,
// those that two groups have, and the first and the last ones, too.
TEST(CudaTiles, SectorsOfWideTiles) {
  const auto check = [](const std::vector<std::int64_t>& lengths, const auto& with_transform) {
    for (const std::int64_t columns : lengths) {
      for (const std::int64_t rows : {3, 56, 57, 113, 120, 121, 10003}) {
        for (const std::int64_t distance : {rows, rows + 1, rows + 7}) {
          check_bits_of_many_rows<float, Exec>("block_per_wide_tile", "block_per_tile", rows, columns,
                                               distance, {{0, 0}, {1, 3}, {5, 2}}, with_transform);
        }
      }
    }
  };
  check({2, 4, 5, 16, 33, 100, 129, 256}, NoTransform());
  check({100, 129, 256}, [](std::int64_t, std::int64_t, const auto& use) { use(ks::scale(0.7)); });
}

template <class T>
void check_bits() {
  check_bits_of_first_row<T, Exec>({5, 16, 100, 256, 257, 512, 1000, 4097, 4352, 20000});
}
TEST(CudaTiles, SameBitsOfFloat) {
  check_bits<float>();
}
TEST(CudaTiles, SameBitsOfDouble) {
  check_bits<double>();
}
TEST(CudaTiles, SameBitsOfHalf) {
  check_bits<half_t>();
}
TEST(CudaTiles, SameBitsOfBfloat16) {
  check_bits<bhalf_t>();
}

// Blocks that wait for each other, on two streams at once and in shapes of all sizes: none waits for ever,
// and what comes out is what comes out alone.
TEST(CudaTiles, TwoStreamsAtOnce) {
  check_two_streams({{64, 300}, {5, 16384}, {4096, 513}, {1001, 2000}, {100, 9000}, {20000, 260}});
}

// Longer rows go through another kernel; what was reserved for them is enough for these, too, which need more
// than every workspace has (2 MB).
TEST(CudaTiles, ReservedForLongerRows) {
  const Stream stream;
  const Exec exec(stream);
  using View = Kokkos::View<float**, Kokkos::LayoutLeft, Kokkos::CudaSpace>;
  const View longer("x", 4000, 66000);
  ks::reserve(exec, longer, longer);
  exec.fence();
  const View x("x", 4000, 16384), y("y", 4000, 16384);
  ks::softmax(Exec(), View(x), View(y));  // its kernels are there
  Kokkos::fence();
  const Graph graph(stream, [&] { ks::softmax(exec, x, y); });
  EXPECT_EQ(graph.failure(), "");
  EXPECT_EQ(graph.nodes(), 1u);
  graph.launch();
  exec.fence();
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), y);
  for (const std::int64_t r : {0, 1, 3999})
    for (const std::int64_t c : {0, 1, 16383}) EXPECT_FLOAT_EQ(host(r, c), 0x1p-14f);
}

// What was reserved for many rows can be captured for few of them, whose kernel is another one.
TEST(CudaTiles, ReservedForMoreRows) {
  const Stream stream;
  const Exec exec(stream);
  using View = Kokkos::View<float**, Kokkos::LayoutLeft, Kokkos::CudaSpace>;
  const View more("x", many_rows(), 3), y_of_more("y", many_rows(), 3), few("x", 100, 3),
      y_of_few("y", 100, 3);
  ks::reserve(exec, more, y_of_more);
  exec.fence();
  const Graph graph(stream, [&] {
    ks::softmax(exec, few, y_of_few);
    EXPECT_STREQ(ks::last_implementation(), "block_per_tile");
    ks::softmax(exec, more, y_of_more);
    EXPECT_STREQ(ks::last_implementation(), "block_per_wide_tile");
  });
  EXPECT_EQ(graph.failure(), "");
  EXPECT_EQ(graph.nodes(), 2u);
  graph.launch();
  exec.fence();
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), y_of_more);
  const auto host_of_few = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), y_of_few);
  for (const std::int64_t c : {0, 1, 2}) {
    EXPECT_FLOAT_EQ(host(many_rows() - 1, c), 1.0f / 3);
    EXPECT_FLOAT_EQ(host_of_few(99, c), 1.0f / 3);
  }
}

// What was reserved for columns on boundaries can be captured for such as begin anywhere, and for few rows,
// and the other way round.
struct NamesOfRows {
  const char *on_boundaries, *between, *elsewhere, *of_few;
};
template <class T>
void check_reserved_for_other_alignments(std::int64_t columns, const NamesOfRows& names) {
  using View = Kokkos::View<T**, Kokkos::LayoutLeft, Kokkos::CudaSpace>;
  // A boundary of 16 bytes that is none of 32.
  const int between = 40000 - 16 / static_cast<int>(sizeof(T));
  struct Extents {
    int reserved, others[2];
  };
  for (const auto& [most, others] :
       {Extents{40000, {39999, 77}}, Extents{40001, {40000, 77}}, Extents{40001, {between, 77}}}) {
    const Stream stream;
    const Exec exec(stream);
    const View reserved("x", most, columns);
    for (const int rows : {most, others[0], others[1]}) {
      ks::reserve(exec, reserved, reserved);  // (what a graph takes is its own)
      exec.fence();
      const View x("x", rows, columns), y("y", rows, columns);
      const Graph graph(stream, [&] { ks::softmax(exec, x, y); });
      const char* const expected = rows == 77        ? names.of_few
                                   : rows == between ? names.between
                                   : rows % 2 != 0   ? names.elsewhere
                                                     : names.on_boundaries;
      EXPECT_STREQ(ks::last_implementation(), expected);
      EXPECT_EQ(graph.failure(), "") << rows << " rows, reserved for " << most;
      EXPECT_EQ(graph.nodes(), std::string_view(expected) == "two_pass_tiles" ? 3u : 1u);
      for (int launch = 0; launch < 2; ++launch) graph.launch();
      exec.fence();
      const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), y);
      for (const std::int64_t r : {0, rows - 1}) {
        for (const std::int64_t c : {std::int64_t(0), std::int64_t(255), std::int64_t(256), columns - 1})
          EXPECT_FLOAT_EQ(static_cast<float>(host(r, c)),
                          static_cast<float>(T(1.0f / static_cast<float>(columns))));
      }
    }
  }
}
TEST(CudaTiles, ReservedForOtherAlignments) {
  if (!has_clusters<Exec>()) GTEST_SKIP() << "clusters need compute capability 9.0";
  const char *const clusters = "cluster_pipelined_tiles", *const grid = "grid_pipelined_tiles",
                    *const in_block = "block_per_sliced_tile";
  check_reserved_for_other_alignments<float>(300, {clusters, in_block, in_block, in_block});
  check_reserved_for_other_alignments<float>(600, {clusters, clusters, clusters, grid});
  check_reserved_for_other_alignments<float>(5000, {grid, grid, grid, grid});
  check_reserved_for_other_alignments<bhalf_t>(600, {clusters, grid, "two_pass_tiles", grid});
}

}  // namespace

#endif
