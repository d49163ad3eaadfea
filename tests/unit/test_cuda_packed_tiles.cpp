// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows of 16 bits whose columns are not contiguous, that CUDA keeps as they are, in pairs, with a transform
// that multiplies all logits of a row, or drops some: what a mask drops becomes -inf as it is read, a factor
// or a temperature is applied whenever logits are used, coarsely where products are small.
#include <string>
#include <vector>

#include "../support/tile_cases.hpp"

#if defined(KOKKOS_ENABLE_CUDA)

namespace {

using namespace tests;
using Exec = Kokkos::Cuda;

// Of a thread that has all of a row, of several; of slices that are filled and that are not.
const std::int64_t lengths[] = {1, 5, 8, 16, 17, 100, 256, 257, 300, 512, 1025};

template <class T>
Accumulator accumulator() {
  return Accumulator(scalar_of<T>, scalar_of<T>);
}

// By the library's choice and by every other kernel for such rows that takes them, in all layouts.
template <class T, int rank, class... Transform>
void check_layouts(const Case& c, const Transform&... transform) {
  for_tile_layouts(c, [&](const Case& laid_out) {
    check_tiles<T, T, rank>(Exec(), laid_out, transform...);
    for (auto operation : operations) {
      for (const char* const implementation : {"block_per_tile", "grid_pipelined_tiles"})
        run_case<T, T, rank>(Exec(), operation, laid_out, implementation, transform...);
    }
  });
}

// 105 has products on both sides of where they may be coarse; 1e29 makes infinities of large logits, the
// others change the order, make all logits the same, or NaN of infinities.
constexpr double factors[] = {0.7, 105.0, 1e29, -0.5, 0.0, 1e-39};

template <class T>
void check_factors(std::int64_t columns, std::int64_t rows) {
  auto c = tile_case(scalar_of<T>, {columns, rows}, 0);
  for (const double factor : factors) {
    SCOPED_TRACE(factor);
    c.chain = {reference::scale(accumulator<T>(), factor)};
    check_layouts<T, 2>(c, ks::scale(factor));
  }
}
TEST(CudaPackedTiles, Factor) {
  for (const auto columns : lengths) {
    check_factors<bhalf_t>(columns, 77);
    if (columns % 2 == 1) check_factors<half_t>(columns, 66);
  }
}

// Those that keep the order of logits, among them some whose quotients are on both sides of where they may be
// coarse, and others.
std::vector<double> some_temperatures(std::int64_t rows) {
  std::vector<double> values;
  const double some[] = {0.5, 1.7, 1.0 / 105, -2, 1e-30, 1, 3e38, 0.9, 1.0 / 102, 1e-41, 2.5};
  for (std::int64_t row = 0; row < rows; ++row)
    values.push_back(static_cast<double>(static_cast<float>(some[row % 11])));
  return values;
}
template <class T>
void check_temperatures(std::int64_t columns, std::int64_t rows) {
  auto c = tile_case(scalar_of<T>, {columns, rows}, 0);
  const auto values = some_temperatures(rows);
  c.chain = {reference::temperature(accumulator<T>(), values)};
  const Operand<float, Exec> temperatures({rows}, values);
  check_layouts<T, 2>(c, ks::temperature(temperatures.template view<1>()));
}
TEST(CudaPackedTiles, Temperature) {
  for (const auto columns : lengths) {
    check_temperatures<bhalf_t>(columns, 77);
    check_temperatures<half_t>(columns, 66);
  }
}

TEST(CudaPackedTiles, LogarithmsOfDominatedRows) {
  for (const auto columns : lengths) {
    for (const std::int64_t rows : {77, 5000}) {
      check_dominated_rows<bhalf_t, Exec>(0, columns, rows,
                                          [](const auto& numbers) { return ks::temperature(numbers); });
      check_dominated_rows<half_t, Exec>(0, columns, rows,
                                         [](const auto& numbers) { return ks::temperature(numbers); });
      check_dominated_rows<bhalf_t, Exec>(0, columns, rows, [](const auto&) { return ks::scale(0.77); });
    }
  }
}

// NaN and infinities where a mask drops them, and around it.
template <class T, class Check>
void for_masks(std::int64_t columns, std::int64_t rows, const Check& check_mask) {
  const std::vector<std::int64_t> extents{columns, rows};
  // As x lies, its columns on boundaries of pairs or not; rows that are no neighbours; the same for all rows.
  for (const auto& layout :
       {reference::right(extents), reference::right(extents, 0, 2), reference::right(extents, 1, 1),
        reference::left(extents, 0, 1), reference::right({columns, 1}, 0, 3)}) {
    auto c = tile_case(scalar_of<T>, extents, 0);
    const Operand<bool, Exec> keep(layout, random_flags(layout.size()));
    const auto kept = keep.at(c);
    for (std::int64_t i = 0; i < c.size(); ++i) {
      if (kept({i % rows, i / rows, 0}) == 0 && i % 3 != 0)
        c.logits[static_cast<std::size_t>(i)] = i % 2 ? reference::nan : reference::infinity;
    }
    check_mask(c, keep.template view<2>(), reference::mask([kept](Position p) { return kept(p) != 0; }));
  }
}

TEST(CudaPackedTiles, Mask) {
  for (const auto columns : lengths) {
    const auto check_mask = [](auto scalar, Case c, const auto& keep, const reference::Step& mask) {
      c.chain = {mask};
      check_layouts<decltype(scalar), 2>(c, ks::mask(keep));
    };
    for_masks<bhalf_t>(columns, 77, [&](const auto&... of) { check_mask(bhalf_t(), of...); });
    for_masks<half_t>(columns, 66, [&](const auto&... of) { check_mask(half_t(), of...); });
  }
}

TEST(CudaPackedTiles, MaskAndTemperature) {
  for (const auto columns : lengths) {
    const auto values = some_temperatures(77);
    const Operand<float, Exec> temperatures({77}, values);
    for_masks<bhalf_t>(columns, 77, [&](Case c, const auto& keep, const reference::Step& mask) {
      c.chain = {mask, reference::temperature(accumulator<bhalf_t>(), values)};
      check_layouts<bhalf_t, 2>(c, ks::mask(keep) | ks::temperature(temperatures.template view<1>()));
    });
  }
}

// Rows of two dimensions, of which one has queries.
TEST(CudaPackedTiles, FactorMaskAndCausal) {
  for (const auto columns : lengths) {
    for (const std::int64_t inner : {1, 13, 64}) {
      auto c = tile_case(Scalar::bfloat16, {7, columns, inner}, 1);
      const Operand<bool, Exec> keep(c.extents, random_flags(c.size()), true);
      const auto kept = keep.at(c);
      for (const std::int64_t offset : {std::int64_t(1), columns / 2}) {
        c.chain = {reference::scale(accumulator<bhalf_t>(), -3.0),
                   reference::mask([kept](Position p) { return kept(p) != 0; }), reference::causal(offset)};
        check_layouts<bhalf_t, 3>(c,
                                  ks::scale(-3.0) | ks::mask(keep.template view<3>()) | ks::causal(offset));
      }
    }
  }
}

// Operands of many rows, on the device.
struct ManyTemperatures {
  float* data;
  KOKKOS_FUNCTION void operator()(std::int64_t row) const {
    const float some[] = {0.7f, 1.1f, 0.016f, 1.3f, -0.8f, 0.9f, 0.0157f};
    data[row] = row % 1000 == 7 ? 0.0f : row % 1000 == 8 ? 1e-39f : some[row % 7];
  }
};
struct ManyFlags {
  bool* data;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    std::uint64_t z = static_cast<std::uint64_t>(i) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 31)) * 0xBF58476D1CE4E5B9u;
    data[i] = z >> 60 != 0;
  }
};
template <class T, class Fill>
Kokkos::View<T*, Kokkos::CudaSpace> many(std::int64_t size) {
  const Kokkos::View<T*, Kokkos::CudaSpace> operand("operand", size);
  Kokkos::parallel_for("fill", Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(Exec(), 0, size),
                       Fill{operand.data()});
  return operand;
}

// check_rows(with_transform) for each transform, see check_bits_of_many_rows.
template <class T, class CheckRows>
void check_transforms(std::int64_t columns, const CheckRows& check_rows) {
  const auto temperatures = [](std::int64_t rows) {
    return ks::temperature(many<float, ManyTemperatures>(rows));
  };
  // As x lies.
  const auto mask = [&](std::int64_t rows, std::int64_t distance) {
    using View = Kokkos::View<bool**, Kokkos::LayoutStride, Kokkos::CudaSpace>;
    const auto flags = many<bool, ManyFlags>(distance * columns);
    return std::pair(flags,
                     ks::mask(View(flags.data(), Kokkos::LayoutStride(static_cast<std::size_t>(rows), 1,
                                                                      static_cast<std::size_t>(columns),
                                                                      static_cast<std::size_t>(distance)))));
  };
  for (const double factor : {0.7, 70.0, -0.5}) {
    check_rows([&](std::int64_t, std::int64_t, const auto& use) { use(ks::scale(factor)); });
  }
  check_rows([&](std::int64_t rows, std::int64_t, const auto& use) { use(temperatures(rows)); });
  check_rows([&](std::int64_t rows, std::int64_t distance, const auto& use) {
    const auto [flags, keep] = mask(rows, distance);
    use(keep);
  });
  if constexpr (std::is_same_v<T, bhalf_t>) {  // (a minute of the compiler's for each)
    check_rows([&](std::int64_t rows, std::int64_t distance, const auto& use) {
      const auto [flags, keep] = mask(rows, distance);
      use(keep | temperatures(rows));
    });
  }
}
template <class T>
void check_bits(const char* implementation, const char* whose_bits, std::int64_t columns) {
  check_transforms<T>(columns, [&](const auto& with_transform) {
    check_bits_of_pairs<T, Exec>(implementation, whose_bits, columns, with_transform);
  });
}
TEST(CudaPackedTiles, SameBitsOfTwoPasses) {
  if (!has_clusters<Exec>()) GTEST_SKIP() << "the other kernel needs compute capability 9.0";
  for (const std::int64_t columns : {257, 600, 4097}) {
    check_bits<bhalf_t>("two_pass_tiles", "grid_pipelined_tiles", columns);
  }
  check_bits<half_t>("two_pass_tiles", "grid_pipelined_tiles", 1024);
}
TEST(CudaPackedTiles, WideBoxes) {
  if (!has_clusters<Exec>()) GTEST_SKIP() << "boxes need compute capability 9.0";
  for (const std::int64_t columns : {512, 1100}) {
    check_bits_of_wide_boxes<bhalf_t, Exec>(
        columns, [](std::int64_t, std::int64_t, const auto& use) { use(ks::scale(0.7)); });
    // (Which come as others do.)
    check_bits_of_wide_boxes<bhalf_t, Exec>(columns, [](std::int64_t rows, std::int64_t, const auto& use) {
      use(ks::temperature(many<float, ManyTemperatures>(rows)));
    });
  }
}
// So many rows that begin anywhere that every eighth column comes in its boxes.
TEST(CudaPackedTiles, BoxesAnywhere) {
  if (!has_clusters<Exec>()) GTEST_SKIP() << "boxes need compute capability 9.0";
  for (const std::int64_t columns : {385, 1000}) {
    const std::int64_t rows = 112 * ((129 << 20) / (2 * 112 * columns) + 1) + 113;
    for (const std::int64_t distance : {rows | 1, (rows | 3) + 3}) {
      for (const double factor : {0.7, -0.5}) {
        const auto with_factor = [&](std::int64_t, std::int64_t, const auto& use) { use(ks::scale(factor)); };
        check_bits_of_many_rows<bhalf_t, Exec>("grid_pipelined_tiles", "two_pass_tiles", rows, columns,
                                               distance, {{0, 0}, {1, 3}, {6, 1}}, with_factor);
        check_bits_of_many_rows<bhalf_t, Exec>("cluster_pipelined_tiles", "two_pass_tiles", rows, columns,
                                               distance, {{0, 0}, {1, 3}}, with_factor, false);
      }
      const auto with_mask = [&](std::int64_t, std::int64_t, const auto& use) {
        use(ks::scale(0.7) | ks::causal(columns / 2));
      };
      check_bits_of_many_rows<bhalf_t, Exec>("grid_pipelined_tiles", "two_pass_tiles", rows, columns,
                                             distance, {{0, 0}, {5, 2}}, with_mask);
      check_bits_of_many_rows<bhalf_t, Exec>("cluster_pipelined_tiles", "two_pass_tiles", rows, columns,
                                             distance, {{5, 2}}, with_mask, false);
    }
  }
}
// On boundaries of 32 bytes and of 16, in boxes and in wide ones.
TEST(CudaPackedTiles, SameBitsOfClusters) {
  if (!has_clusters<Exec>()) GTEST_SKIP() << "clusters need compute capability 9.0";
  const auto check = [](auto scalar, std::int64_t columns) {
    using T = decltype(scalar);
    const std::int64_t rows = 128 * 300 / ((columns + 255) / 256);
    check_transforms<T>(columns, [&](const auto& with_transform) {
      check_bits_of_many_rows<T, Exec>("cluster_pipelined_tiles", "two_pass_tiles", rows - 2, columns, rows,
                                       {{0, 0}, {8, 8}}, with_transform);
    });
  };
  for (const std::int64_t columns : {300, 512, 1024}) check(bhalf_t(0.0f), columns);
  check(half_t(0.0f), 700);
}
TEST(CudaPackedTiles, SameBitsOfSlicedTiles) {
  for (const std::int64_t columns : {257, 512}) {
    check_bits<bhalf_t>("block_per_sliced_tile", "two_pass_tiles", columns);
    check_bits<half_t>("block_per_sliced_tile", "two_pass_tiles", columns);
  }
}
TEST(CudaPackedTiles, SameBitsOfWideTiles) {
  for (const std::int64_t columns : {5, 8, 33, 256}) {
    check_bits<bhalf_t>("block_per_wide_tile", "block_per_tile", columns);
    check_bits<half_t>("block_per_wide_tile", "block_per_tile", columns);
  }
}

}  // namespace

#endif
