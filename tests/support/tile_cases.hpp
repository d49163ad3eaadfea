// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows whose columns are not contiguous: with what tells one logit from another, in each layout, and beside
// others and at other places, where their bits stay what they are.
#ifndef KOKKOSSOFTMAX_TESTS_TILE_CASES_HPP
#define KOKKOSSOFTMAX_TESTS_TILE_CASES_HPP

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "transform_cases.hpp"

namespace tests {

// Whether a device has clusters, which cluster_per_tile and cluster_pipelined_tiles need, and what
// grid_pipelined_tiles does.
template <class Exec>
bool has_clusters() {
  return Exec().cuda_device_prop().major >= 9;
}

// Some logits -inf; a row of nothing else, one with NaN, one with +inf, and one with a thread's share and
// more of -inf.
inline Case tile_case(Scalar in, std::vector<std::int64_t> extents, int axis) {
  Case c;
  c.extents = std::move(extents);
  c.axis = axis;
  c.logits = random_values(in, c.size(), -5, 5);
  const reference::Rows rows(c.extents, axis);
  const auto logical = reference::right(c.extents);
  Random random(3);
  for (std::int64_t r = 0; r < rows.rows; ++r) {
    for (std::int64_t column = 0; column < rows.columns; ++column) {
      auto& logit = c.logits[static_cast<std::size_t>(
          rows.start(logical, r) + column * logical.strides[static_cast<std::size_t>(axis)])];
      const bool masked =
          random.below(17) == 0 || r % 8 == 1 || (r % 8 == 2 && column < rows.columns * 2 / 3);
      if (masked) logit = -reference::infinity;
      if (r % 8 == 3 && column == rows.columns / 2) logit = reference::nan;
      if (r % 8 == 4 && column == rows.columns - 1) logit = reference::infinity;
    }
  }
  return c;
}

// Rows of which some are special, in slices, in a thread's share of one, and as a whole.
template <class T>
Case special_case(const std::vector<std::int64_t>& extents, int axis) {
  Case c;
  c.extents = extents;
  c.axis = axis;
  c.logits = random_values(scalar_of<T>, c.size(), -5, 5);
  const reference::Rows rows(extents, axis);
  const auto logical = reference::right(extents);
  for (std::int64_t r = 0; r < rows.rows; ++r) {
    for (std::int64_t column = 0; column < rows.columns; ++column) {
      auto& logit = c.logits[static_cast<std::size_t>(
          rows.start(logical, r) + column * logical.strides[static_cast<std::size_t>(axis)])];
      switch (r % 12) {
        case 1:  // the first slice and more
          if (column < rows.columns * 2 / 3) logit = -reference::infinity;
          break;
        case 2:  // all but one
          if (column != rows.columns - 1) logit = -reference::infinity;
          break;
        case 3:
          logit = -reference::infinity;
          break;
        case 4:
          if (column == rows.columns / 2) logit = reference::nan;
          break;
        case 5:
          if (column == rows.columns - 1) logit = reference::infinity;
          break;
        case 6:
          if (column == 0) logit = reference::infinity;
          if (column == rows.columns - 1) logit = reference::nan;
          break;
        case 7:  // a thread's share
          if (column >= 32 && column < 64) logit = -reference::infinity;
          break;
        case 8:  // large, with small differences: a few units in the last place
          logit = scalar_of<T> == Scalar::float16    ? 0x1p13 + 8 * std::floor(logit)
                  : scalar_of<T> == Scalar::bfloat16 ? 0x1p13 + 64 * std::floor(logit)
                                                     : 0x1p20 + std::floor(logit) / 8;
          break;
        default:
          break;
      }
    }
  }
  return c;
}

// Layouts of the columns by rows of a case: boxes, padded boxes, off all boundaries, rows that are no
// neighbours, in place, into contiguous rows.
template <class Check>
void for_tile_layouts(Case c, const Check& check_case) {
  const std::vector<int> order = c.extents.size() == 2 ? std::vector<int>{1, 0} : std::vector<int>{2, 1, 0};
  const auto with = [&](const reference::Layout& in, const std::optional<reference::Layout>& out) {
    c.in = in;
    c.out = out;
    check_case(c);
  };
  const auto dense = reference::ordered(c.extents, order);
  with(dense, dense);
  c.in_place = true;
  check_case(c);
  c.in_place = false;
  const auto boxes = reference::ordered(c.extents, order, 1, 16, 16),
             odd = reference::ordered(c.extents, order, 1, 3, 1);
  with(boxes, boxes);
  with(boxes, odd);
  with(odd, boxes);
  with(reference::ordered(c.extents, order, 2, 1, 0), std::nullopt);
}

// The operands of a chain: laid out as x, with a value for each row, and for each column.
template <class T, class Exec>
struct ChainOperands {
  Operand<float, Exec> temperature;
  Operand<bool, Exec> keep;
  Operand<T, Exec> bias, of_column;
  std::vector<double> temperatures;

  explicit ChainOperands(const Case& c)
      : temperature(std::vector<std::int64_t>{rows(c)}, random_values(Scalar::float32, rows(c), 0.5, 2)),
        keep(c.extents, random_flags(c.size()), true),
        bias(c.extents, random_values(scalar_of<T>, c.size(), -2, 2, 41), true),
        of_column(std::vector<std::int64_t>{c.extents[static_cast<std::size_t>(c.axis)]},
                  random_values(scalar_of<T>, c.extents[static_cast<std::size_t>(c.axis)], -2, 2, 42)),
        temperatures(random_values(Scalar::float32, rows(c), 0.5, 2)) {}

  static std::int64_t rows(const Case& c) { return product(reference::without(c.extents, c.axis)); }
};

// Of a row of so many columns, `distance` elements apart, that has others beside it.
template <class T, class Exec, class... Transform>
std::vector<T> bits_of_first_row(Operation operation, std::int64_t columns, std::int64_t rows,
                                 std::int64_t distance, std::int64_t offset, const Transform&... transform) {
  const std::int64_t span = offset + (columns - 1) * distance + rows;
  const Kokkos::View<T*, typename Exec::memory_space> x("x", span), y("y", span), sums("lse", rows);
  const auto host = Kokkos::create_mirror_view(x);
  std::int64_t state = 1;
  for (std::int64_t c = 0; c < columns; ++c) {
    for (std::int64_t r = 0; r < rows; ++r) {
      state = (state * 1103515245 + 12345) % 2147483648;
      const double noise = static_cast<double>(state) / 2147483648.0;
      const double of_row = static_cast<double>((c * 7919) % 4093) / 4093;
      host(offset + c * distance + r) = T(static_cast<float>(8 * (r == 0 ? of_row : noise) - 4));
    }
  }
  Kokkos::deep_copy(x, host);
  using View = Kokkos::View<T**, Kokkos::LayoutStride, typename Exec::memory_space>;
  const Kokkos::LayoutStride layout(static_cast<std::size_t>(rows), 1, static_cast<std::size_t>(columns),
                                    static_cast<std::size_t>(distance));
  call(operation, Exec(), View(x.data() + offset, layout), View(y.data() + offset, layout), sums, 1,
       transform...);
  Exec().fence();
  const bool reduces = operation == Operation::logsumexp;
  const auto all = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), reduces ? sums : y);
  std::vector<T> bits;
  for (std::int64_t c = 0; c < (reduces ? 1 : columns); ++c)
    bits.push_back(reduces ? all(0) : all(offset + c * distance));
  return bits;
}

// How many rows lie beside it, where, and how far columns are apart.
struct RowsBeside {
  std::int64_t rows, distance, offset;
};

// That a row has the bits that it has alone wherever it lies, there by an implementation that is named and
// has the bits of another one (empty: the library's choice).
template <class T, class Exec, class... Transform>
void check_bits_beside(const std::string& implementation, const std::string& whose_bits,
                       const std::vector<RowsBeside>& places, const std::vector<std::int64_t>& lengths,
                       const Transform&... transform) {
  for (auto operation : operations) {
    for (const auto columns : lengths) {
      // (That one's, whichever the library chooses for a row alone.)
      const auto alone = bits_of_first_row<T, Exec>(operation, columns, 1, 2, 0, transform...);
      const std::string chosen = ks::last_implementation();
      if (!whose_bits.empty()) {
        const ks::ScopedImplementation forced(whose_bits);
        const auto bits = bits_of_first_row<T, Exec>(operation, columns, 1, 2, 0, transform...);
        EXPECT_EQ(ks::last_implementation(), whose_bits);
        ASSERT_EQ(bits.size(), alone.size());
        EXPECT_EQ(std::memcmp(bits.data(), alone.data(), bits.size() * sizeof(T)), 0)
            << reference::name(operation) << ' ' << ks::scalar_name<T>() << ' ' << columns
            << " columns, chosen " << chosen;
      }
      std::optional<ks::ScopedImplementation> forced;
      if (!implementation.empty()) forced.emplace(implementation);
      for (const auto& [rows, distance, offset] : places) {
        const auto bits =
            bits_of_first_row<T, Exec>(operation, columns, rows, distance, offset, transform...);
        ASSERT_EQ(bits.size(), alone.size());
        EXPECT_EQ(std::memcmp(bits.data(), alone.data(), bits.size() * sizeof(T)), 0)
            << reference::name(operation) << ' ' << ks::scalar_name<T>() << ' ' << columns << " columns, "
            << rows << " rows, " << distance << " apart, offset " << offset << ", ran "
            << ks::last_implementation();
      }
    }
  }
}

// Whatever lies beside it and however it is copied.
template <class T, class Exec, class... Transform>
void check_bits_of_first_row(const std::vector<std::int64_t>& lengths, const Transform&... transform) {
  check_bits_beside<T, Exec>(
      "", "", {{1, 17, 3}, {2, 2, 0}, {31, 31, 0}, {64, 64, 0}, {65, 80, 16}, {200, 208, 1}, {520, 520, 0}},
      lengths, transform...);
}

// Of a row alone, which has no other in its thread, where threads have several.
template <class T, class Exec, class... Transform>
void check_bits_of_several_rows(const std::string& implementation, const std::string& whose_bits,
                                const std::vector<std::int64_t>& lengths, const Transform&... transform) {
  check_bits_beside<T, Exec>(implementation, whose_bits,
                             {{1, 17, 3}, {64, 64, 0}, {65, 80, 16}, {200, 208, 1}, {1031, 1031, 5}}, lengths,
                             transform...);
}
template <class T, class Exec, class... Transform>
void check_bits_of_wide_tiles(const std::vector<std::int64_t>& lengths, const Transform&... transform) {
  check_bits_of_several_rows<T, Exec>("block_per_wide_tile", "block_per_tile", lengths, transform...);
}
template <class T, class Exec, class... Transform>
void check_bits_of_clusters(const std::vector<std::int64_t>& lengths, const Transform&... transform) {
  check_bits_of_several_rows<T, Exec>("cluster_per_tile", "grid_pipelined_tiles", lengths, transform...);
}

template <class T, class Exec, class... Transform>
void check_bits_of_sliced_tiles(const std::vector<std::int64_t>& lengths, const Transform&... transform) {
  check_bits_of_several_rows<T, Exec>("block_per_sliced_tile", "two_pass_tiles", lengths, transform...);
}
template <class T, class Exec, class... Transform>
void check_bits_of_two_passes(const std::vector<std::int64_t>& lengths, const Transform&... transform) {
  check_bits_of_several_rows<T, Exec>("two_pass_tiles", "grid_pipelined_tiles", lengths, transform...);
}

// Logits of a matrix by columns, with rows of -inf, NaN and infinities.
template <class T>
struct FillColumns {
  T* data;
  std::int64_t distance;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const std::int64_t row = i % distance, column = i / distance;
    std::uint64_t z = static_cast<std::uint64_t>(i) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    float value = static_cast<float>(z >> 40) * 0x1p-20f - 8.0f;
    const float inf = Kokkos::Experimental::infinity_v<float>;
    if (row % 1000 == 1 || (row % 1000 == 2 && column < 200)) value = -inf;
    if (row % 1000 == 3 && column == 7) value = Kokkos::Experimental::quiet_NaN_v<float>;
    if (row % 1000 == 4 && column == 100) value = inf;
    data[i] = T(value);
  }
};

// What a call takes that has no transform.
struct NoTransform {
  template <class Use>
  void operator()(std::int64_t, std::int64_t, const Use& use) const {
    use();
  }
};

// Of many rows, columns so far apart and from so many elements on in x and y: all of y, also what lies
// between columns, is that of an implementation with the same bits. with_transform(rows, distance, use) calls
// use with the transform. `sums`: whether logsumexp, too.
template <class T, class Exec, class WithTransform = NoTransform>
void check_bits_of_many_rows(const char* implementation, const char* whose_bits, std::int64_t rows,
                             std::int64_t columns, std::int64_t distance,
                             const std::vector<std::pair<std::int64_t, std::int64_t>>& offsets,
                             const WithTransform& with_transform = {}, bool sums = true) {
  using Memory = Kokkos::View<T*, typename Exec::memory_space>;
  using View = Kokkos::View<T**, Kokkos::LayoutStride, typename Exec::memory_space>;
  const Exec exec;
  constexpr std::int64_t most_offset = 8;
  const std::int64_t size = distance * columns + most_offset;
  const Memory x("x", size), y("y", size), expected("expected", size), lse("lse", rows),
      expected_lse("expected lse", rows);
  const auto matrix = [&](const Memory& memory, std::int64_t offset) {
    return View(memory.data() + offset,
                Kokkos::LayoutStride(static_cast<std::size_t>(rows), 1, static_cast<std::size_t>(columns),
                                     static_cast<std::size_t>(distance)));
  };
  Kokkos::parallel_for("fill", Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, size),
                       FillColumns<T>{x.data(), distance});
  for (const auto& [of_x, of_y] : offsets) {
    ASSERT_LE(std::max(of_x, of_y), most_offset);
    for (const auto operation : operations) {
      const bool reduces = operation == Operation::logsumexp;
      if (reduces && !sums) continue;
      const auto run = [&](const char* forced_one, const Memory& to, const Memory& to_sums) {
        Kokkos::deep_copy(exec, to, T(7.0f));
        const ks::ScopedImplementation forced(forced_one);
        with_transform(rows, distance, [&](const auto&... transform) {
          call(operation, exec, matrix(x, of_x), matrix(to, of_y), to_sums, 1, transform...);
        });
        EXPECT_STREQ(ks::last_implementation(), forced_one);
      };
      run(implementation, y, lse);
      run(whose_bits, expected, expected_lse);
      const std::int64_t different = reduces ? count_different(exec, lse.data(), expected_lse.data(), rows)
                                             : count_different(exec, y.data(), expected.data(), size);
      EXPECT_EQ(different, 0) << reference::name(operation) << ' ' << ks::scalar_name<T>() << ", " << rows
                              << " rows of " << columns << ", " << distance << " apart, offsets " << of_x
                              << " and " << of_y << ", " << implementation << " and " << whose_bits;
    }
  }
}

// Eight slices of 64 rows or more for each multiprocessor.
template <class Exec>
std::int64_t many_rows_of(std::int64_t columns) {
  const std::int64_t slices = (columns + 255) / 256;
  return 64 * 8 * Exec().cuda_device_prop().multiProcessorCount / slices + 77;
}

// Of so many rows of 16 bits that CUDA reduces those of several slices in pairs wherever these begin, columns
// are an odd and an even distance apart, in x and y alike or not; the last row may have no other.
template <class T, class Exec, class WithTransform = NoTransform>
void check_bits_of_pairs(const char* implementation, const char* whose_bits, std::int64_t columns,
                         const WithTransform& with_transform = {}) {
  const std::int64_t many = many_rows_of<Exec>(columns);
  for (const std::int64_t rows : {many | 1, many + (many & 1)}) {
    for (const std::int64_t distance : {rows, rows + 1})
      check_bits_of_many_rows<T, Exec>(implementation, whose_bits, rows, columns, distance,
                                       {{0, 0}, {1, 1}, {0, 1}, {3, 0}}, with_transform);
  }
}

// Of so many rows that their slices come as wide boxes, on boundaries of 16 bytes that are none of 32, the
// last tile filled or not.
template <class T, class Exec, class WithTransform = NoTransform>
void check_bits_of_wide_boxes(std::int64_t columns, const WithTransform& with_transform = {}) {
  constexpr std::int64_t unit = 16 / static_cast<std::int64_t>(sizeof(T));
  const std::int64_t distance = (many_rows_of<Exec>(columns) / unit | 1) * unit;
  for (const std::int64_t rows : {distance, distance - 2, distance / 128 * 128}) {
    check_bits_of_many_rows<T, Exec>("grid_pipelined_tiles", "two_pass_tiles", rows, columns, distance,
                                     {{0, 0}, {unit, unit}, {unit, 0}}, with_transform);
  }
}

// By the library's choice and by others, where they can; which of them could.
template <class In, class Out, int rank, class Exec, class... Transform>
std::set<std::string> check_tiles(const Exec& exec, const Case& c, const Transform&... transform) {
  check<In, Out, rank>(exec, c, false, transform...);
  std::set<std::string> ran;
  for (auto operation : operations) {
    for (const char* const implementation : {"block_per_wide_tile", "cluster_pipelined_tiles",
                                             "cluster_per_tile", "block_per_sliced_tile", "two_pass_tiles"}) {
      if (run_case<In, Out, rank>(exec, operation, c, implementation, transform...))
        ran.insert(implementation);
    }
  }
  return ran;
}

}  // namespace tests

#endif
