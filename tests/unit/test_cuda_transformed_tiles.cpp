// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Transforms of rows whose columns are not contiguous, on CUDA: in tiles of neighbouring rows, in registers
// (one or several of a thread, of a block or of a cluster), in a ring, copied as boxes of tensors, in pairs
// of 16 bits and one by one, and read twice.
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "../support/cuda_graph.hpp"
#include "../support/tile_cases.hpp"

#if defined(KOKKOS_ENABLE_CUDA)

namespace {

using namespace tests;
using Exec = Kokkos::Cuda;

const std::int64_t lengths[] = {2, 7, 16, 17, 100, 129, 256, 257, 300, 512, 1025};

template <class In, class Out>
void check_chain(Case c) {
  const Accumulator acc(scalar_of<In>, scalar_of<Out>);
  const ChainOperands<In, Exec> o(c);
  const auto keep = o.keep.at(c);
  c.chain = {reference::scale(acc, -0.7), reference::mask([keep](Position p) { return keep(p) != 0; }),
             reference::bias(acc, o.bias.at(c)), reference::temperature(acc, o.temperatures),
             reference::bias(acc, o.of_column.at(c))};
  std::set<std::string> ran;
  for_tile_layouts(c, [&](const Case& laid_out) {
    ran.merge(check_tiles<In, Out, 2>(
        Exec(), laid_out,
        ks::scale(-0.7) | ks::mask(o.keep.template view<2>()) | ks::bias(o.bias.template view<2>()) |
            ks::temperature(o.temperature.template view<1>()) | ks::bias(o.of_column.template view<1>())));
  });
  constexpr bool is_double = scalar_of<Out> == Scalar::float64;
  const std::int64_t columns = c.extents[0];
  std::set<std::string> expected;
  if (columns <= 256 && !is_double) expected.insert("block_per_wide_tile");
  if (columns > 256 && columns <= 4096 && std::is_same_v<In, float> && has_clusters<Exec>())
    expected.insert("cluster_per_tile");
  // (Where columns begin on boundaries of 16 bytes in any of the layouts.)
  constexpr std::int64_t unit = 16 / static_cast<std::int64_t>(sizeof(Out));
  if (columns > (is_double ? 128 : 256) && columns <= (is_double ? 2048 : 4096) && c.extents[1] % unit == 0 &&
      std::is_same_v<In, Out> && has_clusters<Exec>())
    expected.insert("cluster_pipelined_tiles");
  if (columns > (is_double ? 128 : 256)) expected.insert("two_pass_tiles");
  if (columns > (is_double ? 128 : 256) && columns <= (is_double ? 512 : 1024))
    expected.insert("block_per_sliced_tile");
  EXPECT_EQ(ran, expected) << columns << " columns";
}

template <class In, class Out>
void check_chains() {
  for (const auto columns : lengths) {
    for (const std::int64_t rows : {1, 30, 64, 77})
      check_chain<In, Out>(tile_case(scalar_of<In>, {columns, rows}, 0));
  }
  check_chain<In, Out>(tile_case(scalar_of<In>, {5000, 72}, 0));
}

TEST(CudaTransformedTiles, ChainOfFloat) {
  check_chains<float, float>();
}
TEST(CudaTransformedTiles, ChainOfDouble) {
  check_chains<double, double>();
}
TEST(CudaTransformedTiles, ChainOfHalf) {
  check_chains<half_t, half_t>();
}
TEST(CudaTransformedTiles, ChainOfBfloat16) {
  check_chains<bhalf_t, bhalf_t>();
}
TEST(CudaTransformedTiles, ChainOfBfloat16ToFloat) {
  check_chains<bhalf_t, float>();
}

// Rows of two dimensions, whose index a functor looks at, and a causal mask, whose queries one of them is.
template <class T>
void check_positions() {
  const Accumulator acc(scalar_of<T>, scalar_of<T>);
  for (const auto columns : lengths) {
    for (const std::int64_t inner : {1, 13, 64, 200}) {
      auto c = tile_case(scalar_of<T>, {3, columns, inner}, 1);
      c.chain = {ripple(acc), reference::causal(1)};
      for_tile_layouts(c, [&](const Case& laid_out) {
        check_tiles<T, T, 3>(Exec(), laid_out, ks::transform(Ripple{}) | ks::causal(1));
      });
    }
  }
}
TEST(CudaTransformedTiles, PositionsOfFloat) {
  check_positions<float>();
}
TEST(CudaTransformedTiles, PositionsOfBfloat16) {
  check_positions<bhalf_t>();
}

// What other kernels leave in 16 bits: logits that are dropped or not, and sums of two.
template <class T>
void check_masks_and_sums() {
  const Accumulator acc(scalar_of<T>, scalar_of<T>);
  for (const auto columns : lengths) {
    for (const std::int64_t rows : {30, 77}) {
      auto c = tile_case(scalar_of<T>, {columns, rows}, 0);
      const ChainOperands<T, Exec> o(c);
      const auto keep = o.keep.at(c);
      c.chain = {reference::mask([keep](Position p) { return keep(p) != 0; })};
      for_tile_layouts(c, [&](const Case& laid_out) {
        check_tiles<T, T, 2>(Exec(), laid_out, ks::mask(o.keep.template view<2>()));
      });
      c.chain = {reference::bias(acc, o.bias.at(c))};
      for_tile_layouts(c, [&](const Case& laid_out) {
        check_tiles<T, T, 2>(Exec(), laid_out, ks::bias(o.bias.template view<2>()));
      });
    }
  }
}
TEST(CudaTransformedTiles, MasksAndSumsOfHalf) {
  check_masks_and_sums<half_t>();
}
TEST(CudaTransformedTiles, MasksAndSumsOfBfloat16) {
  check_masks_and_sums<bhalf_t>();
}

// A mask as large as x, in boxes as x is, comes with it in rings, which are chosen for that.
TEST(CudaTransformedTiles, MasksOfFloatDecideWhoRuns) {
  for (const std::int64_t columns : {300, 512}) {
    for (const std::int64_t rows : {64, 72, 77}) {
      auto c = tile_case(Scalar::float32, {columns, rows}, 0);
      const ChainOperands<float, Exec> o(c);
      const auto keep = o.keep.at(c);
      c.chain = {reference::mask([keep](Position p) { return keep(p) != 0; })};
      for_tile_layouts(c, [&](const Case& laid_out) {
        check_tiles<float, float, 2>(Exec(), laid_out, ks::mask(o.keep.template view<2>()));
      });
    }
    for (const auto& [many, ring] :
         {std::pair(20000, "grid_pipelined_tiles"), {40000, "cluster_pipelined_tiles"}}) {
      const Kokkos::View<float**, Kokkos::LayoutLeft, Kokkos::CudaSpace> x("x", many, columns),
          y("y", many, columns);
      const Kokkos::View<bool**, Kokkos::LayoutLeft, Kokkos::CudaSpace> keep("keep", many, columns);
      ks::softmax(Exec(), x, y, ks::mask(keep));
      EXPECT_STREQ(ks::last_implementation(), has_clusters<Exec>() ? ring : "two_pass_tiles") << columns;
    }
  }
  Exec().fence();
}

// By length and type, as without a transform.
TEST(CudaTransformedTiles, LengthAndTypeDecideWhoRuns) {
  const std::string sliced = has_clusters<Exec>() ? "grid_pipelined_tiles" : "two_pass_tiles",
                    several = has_clusters<Exec>() ? "cluster_per_tile" : "two_pass_tiles",
                    many = has_clusters<Exec>() ? "cluster_pipelined_tiles" : "two_pass_tiles";
  const auto expect = [](auto scalar, std::int64_t columns, std::int64_t rows, const std::string& expected) {
    using T = decltype(scalar);
    const Kokkos::View<T**, Kokkos::LayoutLeft, Kokkos::CudaSpace> x("x", rows, columns),
        y("y", rows, columns);
    ks::softmax(Exec(), x, y, ks::transform(Ripple{}) | ks::causal(1));
    EXPECT_EQ(ks::last_implementation(), expected) << columns << " columns, " << rows << " rows";
  };
  for (const std::int64_t rows : {1, 33, 256}) {
    expect(0.0f, 256, rows, "block_per_tile");
    expect(bhalf_t(0.0f), 256, rows, "block_per_tile");
    expect(0.0f, 257, rows, "block_per_sliced_tile");
    expect(0.0f, 600, rows, sliced);
    expect(bhalf_t(0.0f), 4096, rows, sliced);
    expect(0.0f, 65537, rows, "two_pass_tiles");
    expect(0.0, 129, rows, "block_per_sliced_tile");
    // (256 rows begin on boundaries of 32 bytes, which boxes are for.)
    expect(0.0, 513, rows, rows == 256 && has_clusters<Exec>() ? sliced : "two_pass_tiles");
  }
  // A row alone in a thread, or several, which take registers.
  expect(0.0f, 16, 1600000, "block_per_tile");
  expect(0.0f, 100, 256000, "block_per_wide_tile");
  expect(0.0f, 100, 256001, "block_per_tile");
  expect(0.0f, 256, 100000, "block_per_wide_tile");
  expect(0.0f, 256, 100001, "block_per_wide_tile");
  expect(0.0f, 300, 40001, "block_per_sliced_tile");
  expect(0.0f, 400, 40001, several);
  expect(0.0f, 400, 100001, many);
  expect(0.0f, 300, 30000, "block_per_sliced_tile");
  expect(0.0f, 300, 40000, has_clusters<Exec>() ? many : "block_per_sliced_tile");
  expect(0.0f, 600, 16000, sliced);
  expect(0.0f, 600, 40000, many);
  expect(0.0, 150, 60000, "block_per_sliced_tile");
  expect(0.0, 200, 60000, many);
  expect(0.0, 600, 16000, many);
  expect(bhalf_t(0.0f), 1000, 20000, sliced);
  expect(bhalf_t(0.0f), 1000, 40000, many);
  expect(bhalf_t(0.0f), 1100, 40000, sliced);
  expect(bhalf_t(0.0f), 1000, 40001, "block_per_sliced_tile");
  // Where columns do not begin on boundaries, by how many slices there are to wait for.
  expect(0.0f, 5000, 4000, sliced);
  expect(0.0f, 5000, 4001, "two_pass_tiles");
  expect(bhalf_t(0.0f), 5000, 4001, "two_pass_tiles");
  expect(bhalf_t(0.0f), 5000, 4002, sliced);
  expect(half_t(0.0f), 300, 40000, "block_per_sliced_tile");
  expect(half_t(0.0f), 1100, 40001, "two_pass_tiles");
  Exec().fence();
}

// (The causal mask drops half of the columns or less.)
template <class T>
void check_bits() {
  for (const std::int64_t columns : {5, 16, 100, 256, 257, 1000, 4352})
    check_bits_of_first_row<T, Exec>({columns}, ks::transform(Ripple{}) | ks::causal(columns / 2));
  for (const std::int64_t columns : {5, 16, 100, 160, 256})
    check_bits_of_wide_tiles<T, Exec>({columns}, ks::transform(Ripple{}) | ks::causal(columns / 2));
}
// So many rows that begin anywhere that every fourth column comes in its boxes.
TEST(CudaTransformedTiles, BoxesAnywhere) {
  if (!has_clusters<Exec>()) GTEST_SKIP() << "boxes need compute capability 9.0";
  for (const std::int64_t columns : {320, 1000, 4097}) {
    const std::int64_t rows = 56 * ((129 << 20) / (4 * 56 * columns) + 1) + 57;
    const auto with_ripple = [columns](std::int64_t, std::int64_t, const auto& use) {
      use(ks::transform(Ripple{}) | ks::causal(columns / 2));
    };
    for (const std::int64_t distance : {rows | 1, (rows | 3) + 3})
      check_bits_of_many_rows<float, Exec>("grid_pipelined_tiles", "two_pass_tiles", rows, columns, distance,
                                           {{0, 0}, {1, 3}, {6, 0}}, with_ripple);
  }
}
// The blocks of clusters: on boundaries of 32 bytes, and floats on those of 16 and anywhere, in turn.
template <class T>
void check_bits_of_cluster_pipelined(std::int64_t columns) {
  constexpr std::int64_t slice = sizeof(T) == 8 ? 128 : 256;
  const std::int64_t rows = 64 * (700 / ((columns + slice - 1) / slice)) + 48;
  const auto check = [&](std::int64_t distance, std::vector<std::pair<std::int64_t, std::int64_t>> offsets,
                         bool sums) {
    check_bits_of_many_rows<T, Exec>(
        "cluster_pipelined_tiles", "two_pass_tiles", rows, columns, distance, offsets,
        [columns](std::int64_t, std::int64_t, const auto& use) {
          use(ks::transform(Ripple{}) | ks::causal(columns / 2));
        },
        sums);
  };
  check(rows, {{0, 0}, {8, 8}}, true);
  check(rows + 32, {{0, 8}}, true);
  if constexpr (std::is_same_v<T, float>) check(rows + 3, {{0, 0}, {1, 3}}, false);
}
TEST(CudaTransformedTiles, SameBitsOfClusterPipelined) {
  if (!has_clusters<Exec>()) GTEST_SKIP() << "clusters need compute capability 9.0";
  for (const std::int64_t columns : {257, 384, 512, 1000, 2048, 4096}) {
    check_bits_of_cluster_pipelined<float>(columns);
    check_bits_of_cluster_pipelined<half_t>(columns);
    check_bits_of_cluster_pipelined<bhalf_t>(columns);
    check_bits_of_cluster_pipelined<double>((columns + 1) / 2);
  }
}
TEST(CudaTransformedTiles, SameBitsOfFloat) {
  check_bits<float>();
  if (!has_clusters<Exec>()) return;
  for (const std::int64_t columns : {257, 1000, 4000})
    check_bits_of_clusters<float, Exec>({columns}, ks::transform(Ripple{}) | ks::causal(columns / 2));
}
TEST(CudaTransformedTiles, SameBitsOfBfloat16) {
  check_bits<bhalf_t>();
}
template <class T>
void check_bits_of_sliced() {
  for (const std::int64_t columns : {257, 600, 1000})
    check_bits_of_sliced_tiles<T, Exec>({columns}, ks::transform(Ripple{}) | ks::causal(columns / 2));
}
TEST(CudaTransformedTiles, SameBitsOfSlicedTiles) {
  check_bits_of_sliced<float>();
  check_bits_of_sliced<half_t>();
  check_bits_of_sliced<bhalf_t>();
  check_bits_of_sliced_tiles<double, Exec>({129, 300, 500}, ks::transform(Ripple{}) | ks::causal(100));
}
TEST(CudaTransformedTiles, SameBitsOfTwoPasses) {
  if (!has_clusters<Exec>()) GTEST_SKIP() << "the other kernel needs compute capability 9.0";
  for (const std::int64_t columns : {257, 1000, 4352, 20001}) {
    const auto transform = ks::transform(Ripple{}) | ks::causal(columns / 2);
    check_bits_of_two_passes<float, Exec>({columns}, transform);
    check_bits_of_two_passes<half_t, Exec>({columns}, transform);
    check_bits_of_two_passes<bhalf_t, Exec>({columns}, transform);
    check_bits_of_two_passes<double, Exec>({columns}, transform);
  }
}

TEST(CudaTransformedTiles, WideBoxes) {
  if (!has_clusters<Exec>()) GTEST_SKIP() << "boxes need compute capability 9.0";
  for (const std::int64_t columns : {512, 600, 4352}) {
    check_bits_of_wide_boxes<float, Exec>(columns, [&](std::int64_t, std::int64_t, const auto& use) {
      use(ks::transform(Ripple{}) | ks::causal(columns / 2));
    });
  }
}

// What was reserved is enough for a capture, whatever the rows' alignment.
template <class T>
void check_reserved(std::int64_t columns) {
  const Stream stream;
  const Exec exec(stream);
  using View = Kokkos::View<T**, Kokkos::LayoutLeft, Kokkos::CudaSpace>;
  const auto transform = ks::transform(Ripple{}) | ks::causal(1);
  const View widest("x", 1000, columns);
  ks::reserve(exec, widest, widest, transform);
  exec.fence();
  for (const std::int64_t rows : {1000, 333}) {
    const View x("x", rows, columns), y("y", rows, columns), expected("y", rows, columns);
    const auto host = Kokkos::create_mirror_view(x);
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t c = 0; c < columns; ++c)
        host(r, c) = T(static_cast<float>((r * 31 + c * 17) % 101) / 16);
    Kokkos::deep_copy(x, host);
    const Graph graph(stream, [&] { ks::softmax(exec, x, y, transform); });
    EXPECT_EQ(graph.failure(), "") << rows << " rows of " << columns;
    for (int launch = 0; launch < 3; ++launch) graph.launch();
    exec.fence();
    ks::softmax(Exec(), x, expected, transform);
    Kokkos::fence();
    const auto a = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), y),
               b = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), expected);
    EXPECT_EQ(std::memcmp(a.data(), b.data(), a.span() * sizeof(T)), 0) << rows << " rows of " << columns;
  }
}
TEST(CudaTransformedTiles, ReservedForACapture) {
  check_reserved<float>(100);
  check_reserved<float>(1000);
  check_reserved<bhalf_t>(100);
  check_reserved<bhalf_t>(1000);
  check_reserved<float>(5000);
  check_reserved<double>(300);
}

}  // namespace

#endif
