// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows of 16 bits that become floats on CUDA: kept as they are, in pairs, with the transforms that
// test_cuda_packed_rows.cpp names, else as logits. Lanes give each other halves of what they write.
#include <Kokkos_Core.hpp>

#if defined(KOKKOS_ENABLE_CUDA)

#include "../support/packed_rows.hpp"

namespace {

using namespace tests;

// Of each share of a warp's lanes, of warps, of blocks with each number of vectors a thread; whole vectors
// and others.
const std::int64_t lengths[] = {1,    16,   32,   33,   40,   64,   65,    97,    128,   150,  192,  256,
                                300,  384,  401,  513,  768,  801,  1001,  1024,  1301,  1601, 2040, 2041,
                                2048, 3001, 4096, 5000, 8191, 8192, 10001, 12288, 16381, 16384};

template <class T>
void check_without_transform(std::int64_t columns, Gaps gaps) {
  const auto c = special_case<T>(columns, gaps);
  for (auto operation : operations) run_case<T, float, 3>(Exec(), operation, c, "");
}

TEST(CudaWidenedRows, WithoutATransform) {
  for (const auto columns : lengths) {
    for (const Gaps gaps : all_gaps) {
      check_without_transform<bhalf_t>(columns, gaps);
      check_without_transform<half_t>(columns, gaps);
    }
  }
}

// y begins at any place against x.
TEST(CudaWidenedRows, OffBoundaries) {
  for (const std::int64_t columns : {40, 129, 401, 1024, 2041, 4097}) {
    for (std::int64_t at = 0; at < 8; ++at) {
      SCOPED_TRACE(at);
      auto c = special_case<bhalf_t>(columns, Gaps::none);
      c.in = reference::right(c.extents, at % 3, at);
      c.out = reference::right(c.extents, at % 2, (3 * at + at / 4) % 8);
      for (auto operation : operations) run_case<bhalf_t, float, 3>(Exec(), operation, c, "");
    }
  }
}

// So many that they are in warps and in parts of one: some whole warps of rows and a last one that is not.
TEST(CudaWidenedRows, ManyRows) {
  for (const std::int64_t columns : {32,  33,  47,  64,  80,  97,  128,  150,  192,  201,  256,  300,
                                     384, 401, 512, 600, 768, 801, 1001, 1024, 1301, 1601, 2040, 2041}) {
    const auto c = special_case<bhalf_t>(columns, columns % 2 == 0 ? Gaps::none : Gaps::rows, 1, 1201);
    for (auto operation : operations) run_case<bhalf_t, float, 3>(Exec(), operation, c, "");
    auto without_gaps = c;
    without_gaps.in.reset();
    without_gaps.out.reset();
    run_case<bhalf_t, float, 3>(Exec(), Operation::softmax, without_gaps, "");
  }
}

TEST(CudaWidenedRows, Factor) {
  for (const auto columns : lengths) check_factor<bhalf_t, float>(columns, all_gaps[columns % 3]);
}

TEST(CudaWidenedRows, Causal) {
  for (const auto columns : lengths) {
    check_causal<bhalf_t, float>(columns, all_gaps[columns % 3]);
    if (columns % 2 == 1) check_causal<half_t, float>(columns, all_gaps[columns / 2 % 3]);
  }
}

TEST(CudaWidenedRows, Temperature) {
  for (const auto columns : lengths) check_temperature<bhalf_t, float>(columns, all_gaps[columns % 3]);
}

TEST(CudaWidenedRows, Mask) {
  for (const auto columns : lengths) check_mask<bhalf_t, float>(columns, all_gaps[columns % 3]);
}

// As logits.
TEST(CudaWidenedRows, TwoFactors) {
  for (const auto columns : lengths) {
    for (const std::int64_t rows : {9, 601}) {
      if (columns * rows > 2000000) continue;
      auto c = special_case<bhalf_t>(columns, all_gaps[columns / 2 % 3], 1, rows);
      const auto half = reference::scale(accumulator<bhalf_t, float>(), 0.5);
      c.chain = {half, half};
      for (auto operation : operations)
        run_case<bhalf_t, float, 3>(Exec(), operation, c, "", ks::scale(0.5) | ks::scale(0.5));
    }
  }
}

TEST(CudaWidenedRows, RowsGiveTheSameBitsAloneAndBesideOthers) {
  check_bits_alone_and_beside_others<bhalf_t, float>(
      {33, 64, 97, 128, 201, 256, 401, 513, 801, 1001, 1024, 1401, 2040, 2048, 2601, 5000, 8191});
}

}  // namespace

#endif
