// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows of 16 bits that CUDA keeps as they are, in pairs, with a transform that makes the same of all logits
// of a row, or drops some: what a mask drops becomes -inf as it is read, the rest is applied whenever they
// are used, and the maximum is found among the pairs where it keeps their order, else among what it makes of
// them, for a warp's rows together. In registers, and short rows in tiles.
#include <Kokkos_Core.hpp>

#if defined(KOKKOS_ENABLE_CUDA)

#include "../support/packed_rows.hpp"

namespace {

using namespace tests;

// Of a lane of a tile, of parts of a warp, of a warp, of several warps, of a block; whole vectors and others.
const std::int64_t lengths[] = {1,    17,   33,   64,   128,  129,  256,  512,  577,  1024,
                                1401, 1601, 2047, 2601, 4096, 5000, 6656, 8191, 16384};

TEST(CudaPackedRows, Factor) {
  for (const auto columns : lengths) {
    for (const Gaps gaps : all_gaps) check_factor<bhalf_t>(columns, gaps);
  }
}

TEST(CudaPackedRows, Causal) {
  for (const auto columns : lengths) {
    for (const Gaps gaps : all_gaps) {
      check_causal<bhalf_t>(columns, gaps);
      if (columns % 2 == 1) check_causal<half_t>(columns, gaps);
    }
  }
}

// So many that threads have more than two vectors.
TEST(CudaPackedRows, ManyRows) {
  for (const std::int64_t columns : {100, 129, 160, 257, 577, 768, 1001, 1401, 2040, 2600, 3001}) {
    for (const Gaps gaps : {Gaps::none, Gaps::rows}) {
      auto c = special_case<bhalf_t>(columns, gaps, 1, 1201);
      for (auto operation : operations) run_case<bhalf_t, bhalf_t, 3>(Exec(), operation, c, "");
      c.chain = {reference::scale(accumulator<bhalf_t, bhalf_t>(), -0.5)};
      for (auto operation : operations)
        run_case<bhalf_t, bhalf_t, 3>(Exec(), operation, c, "", ks::scale(-0.5));
    }
  }
}

// Those of which a warp has few, and those of which it has many.
TEST(CudaPackedRows, CausalInManyRows) {
  for (const std::int64_t columns : {64, 100, 128, 256, 512, 1001, 1024, 1280, 1536, 2040}) {
    check_causal_rows<bhalf_t>(columns, columns <= 512 ? 3000 : 600, Gaps::none);
    check_causal_rows<bhalf_t>(columns, many_rows(columns), Gaps::none);
    if (columns == 512) check_causal_rows<half_t>(columns, many_rows(columns), Gaps::rows);
  }
}

TEST(CudaPackedRows, Temperature) {
  for (const auto columns : lengths) {
    for (const Gaps gaps : all_gaps) {
      check_temperature<bhalf_t>(columns, gaps);
      if (columns % 2 == 1) check_temperature<half_t>(columns, gaps);
    }
  }
}

TEST(CudaPackedRows, LogarithmsOfDominatedRows) {
  const auto temperatures = [](const auto& numbers) { return ks::temperature(numbers); };
  for (const auto columns : lengths) {
    if (columns == 1) continue;  // (no row of a matrix)
    check_dominated_rows<bhalf_t, Exec>(1, columns, 1001, temperatures);
    if (columns % 2 == 1) check_dominated_rows<half_t, Exec>(1, columns, 1001, temperatures);
    check_dominated_rows<bhalf_t, Exec>(1, columns, 1001, [](const auto&) { return ks::scale(0.77); });
  }
  // In slices, few rows and many.
  for (const std::int64_t columns : {20000, 20001, 131072}) {
    for (const std::int64_t rows : {5, 300}) {
      check_dominated_rows<bhalf_t, Exec>(1, columns, rows, temperatures);
      check_dominated_rows<half_t, Exec>(1, columns, rows, temperatures);
    }
  }
}

TEST(CudaPackedRows, Mask) {
  for (const auto columns : lengths) {
    for (const Gaps gaps : all_gaps) {
      check_mask<bhalf_t>(columns, gaps);
      if (columns % 2 == 1) check_mask<half_t>(columns, gaps);
    }
  }
}

TEST(CudaPackedRows, RowsGiveTheSameBitsAloneAndBesideOthers) {
  check_bits_alone_and_beside_others<bhalf_t>(
      {33, 64, 128, 256, 512, 577, 1019, 1401, 1601, 2041, 2048, 2601, 5000, 6656, 8191});
}

}  // namespace

#endif
