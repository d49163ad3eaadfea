// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Transforms on the host's vectors where a lane is a row: rows whose columns are not contiguous, few and many
// of them, in registers, in tiles, along the array that they are together, and read twice; and the ends of
// rows that are contiguous.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../support/tile_cases.hpp"

namespace {

using namespace tests;
using Exec = Kokkos::DefaultHostExecutionSpace;

// The same without +inf, of which a factor below 0 makes -inf, and GELU of that NaN or 0.
Case finite_case(Scalar in, std::vector<std::int64_t> extents, int axis) {
  Case c = tile_case(in, std::move(extents), axis);
  std::replace(c.logits.begin(), c.logits.end(), reference::infinity, 4.0);
  return c;
}

class SimdTransformedTiles : public testing::Test {
 protected:
  const ks::ScopedImplementation forced{"simd_rows"};
};

// In registers; in one block of columns, in several, with a rest; in chunks.
const std::int64_t lengths[] = {3, 16, 33, 300, 2100};
// Fewer than a vector has lanes, an end of a vector, pieces of columns, a group, several; in tiles of a
// thread.
const std::int64_t rows_beside[] = {1, 3, 15, 33, 40, 77, 200, 300};

template <class In, class Out>
void check_chains(std::span<const std::int64_t> all_lengths, std::span<const std::int64_t> all_rows) {
  const Accumulator acc(scalar_of<In>, scalar_of<Out>);
  for (const auto columns : all_lengths) {
    for (const auto rows : all_rows) {
      if (columns > 1000 && rows > 77 && rows != 200) continue;
      auto c = tile_case(scalar_of<In>, {columns, rows}, 0);
      SCOPED_TRACE(std::to_string(columns) + " columns, " + std::to_string(rows) + " rows");
      const ChainOperands<In, Exec> o(c);
      const auto keep = o.keep.at(c);
      // Of all rows, of all columns, and lying the other way round.
      const Operand<bool, Exec> keep_column({columns, 1}, random_flags(columns, 6));
      const Operand<float, Exec> of_row({1, rows}, random_values(Scalar::float32, rows, 0.5, 2, 43));
      const Operand<In, Exec> across(reference::left(c.extents, 0, 1),
                                     random_values(scalar_of<In>, c.size(), -1, 1, 44));
      const auto keep_of_column = keep_column.at(c);
      const auto both = [=](Position p) { return keep(p) != 0 && keep_of_column(p) != 0; };
      c.chain = {reference::scale(acc, -0.7),
                 reference::mask(both),
                 reference::bias(acc, o.bias.at(c)),
                 reference::temperature(acc, o.temperatures),
                 reference::bias(acc, o.of_column.at(c)),
                 reference::scale(acc, of_row.at(c)),
                 reference::bias(acc, across.at(c))};
      c.special_around = true;
      for_tile_layouts(c, [&](const Case& laid_out) {
        check<In, Out, 2>(Exec(), laid_out, false,
                          ks::scale(-0.7) | ks::mask(o.keep.template view<2>()) |
                              ks::mask(keep_column.template view<2>()) | ks::bias(o.bias.template view<2>()) |
                              ks::temperature(o.temperature.template view<1>()) |
                              ks::bias(o.of_column.template view<1>()) |
                              ks::scale(of_row.template view<2>()) | ks::bias(across.template view<2>()));
      });
    }
  }
}
TEST_F(SimdTransformedTiles, ChainOfFloat) {
  check_chains<float, float>(lengths, rows_beside);
}
const std::int64_t some_lengths[] = {7, 300, 2100}, some_rows[] = {3, 33, 140};
TEST_F(SimdTransformedTiles, ChainOfDouble) {
  check_chains<double, double>(some_lengths, some_rows);
}
TEST_F(SimdTransformedTiles, ChainOfBfloat16) {
  check_chains<bhalf_t, bhalf_t>(some_lengths, some_rows);
}

// What is not one value after the other: functions of the value, statistics, rows of two dimensions whose
// index a functor looks at, and a causal mask, whose queries one of them is.
TEST_F(SimdTransformedTiles, FunctionsAndPositions) {
  const Accumulator acc(Scalar::float32, Scalar::float32);
  for (const auto columns : lengths) {
    for (const std::int64_t inner : {1, 5, 20, 150}) {
      if (columns > 1000 && inner > 20) continue;
      SCOPED_TRACE(std::to_string(columns) + " columns, " + std::to_string(inner) + " rows");
      auto c = finite_case(Scalar::float32, {3, columns, inner}, 1);
      const Statistics s(columns);
      const Operand<float, Exec> mean({columns}, s.mean), variance({columns}, s.variance),
          gamma({columns}, s.gamma), beta({columns}, s.beta);
      c.chain = {reference::batch_norm(acc, s.mean, s.variance, s.gamma, s.beta, 1e-3), ripple(acc),
                 reference::gelu(acc), reference::causal(1)};
      for_tile_layouts(c, [&](const Case& laid_out) {
        check<float, float, 3>(Exec(), laid_out, false,
                               ks::batch_norm(mean.template view<1>(), variance.template view<1>(),
                                              gamma.template view<1>(), beta.template view<1>(), 1e-3) |
                                   ks::transform(Ripple{}) | ks::gelu() | ks::causal(1));
      });
    }
  }
}

// Contiguous rows: of a few columns, several in a vector; their ends.
TEST_F(SimdTransformedTiles, ContiguousRows) {
  const Accumulator acc(Scalar::float32, Scalar::float32);
  for (const std::int64_t columns : {1, 2, 3, 5, 8, 13, 15, 16, 17, 31, 33, 100, 127, 4100}) {
    for (const std::int64_t rows : {1, 15, 50}) {
      SCOPED_TRACE(std::to_string(columns) + " columns, " + std::to_string(rows) + " rows");
      auto c = finite_case(Scalar::float32, {rows, columns}, 1);
      const ChainOperands<float, Exec> o(c);
      const auto keep = o.keep.at(c);
      const Statistics s(columns);
      const Operand<float, Exec> mean({columns}, s.mean), variance({columns}, s.variance),
          gamma({columns}, s.gamma), beta({columns}, s.beta);
      c.chain = {reference::temperature(acc, o.temperatures),
                 reference::mask([keep](Position p) { return keep(p) != 0; }),
                 reference::bias(acc, o.bias.at(c)),
                 reference::batch_norm(acc, s.mean, s.variance, s.gamma, s.beta, 1e-3),
                 reference::gelu_tanh(acc),
                 ripple(acc)};
      c.special_around = true;
      for (const auto& out : {reference::right(c.extents), reference::right(c.extents, 3, 1),
                              reference::left(c.extents), reference::ordered(c.extents, {0, 1}, 2)}) {
        c.in = reference::right(c.extents, columns % 2, 1);
        c.out = out;
        check<float, float, 2>(Exec(), c, false,
                               ks::temperature(o.temperature.template view<1>()) |
                                   ks::mask(o.keep.template view<2>()) | ks::bias(o.bias.template view<2>()) |
                                   ks::batch_norm(mean.template view<1>(), variance.template view<1>(),
                                                  gamma.template view<1>(), beta.template view<1>(), 1e-3) |
                                   ks::gelu_tanh() | ks::transform(Ripple{}));
      }
    }
  }
}

// So many transforms that the objects of fewer rows than a tile may have find room, and that none do: what
// leaves logits as they are changes no bit.
template <class Chain>
constexpr std::size_t bytes_of_row = sizeof(typename decltype(std::declval<const Chain&>().bind(
    std::declval<const ks::impl::BindContext<Exec>&>()))::Row);
template <class Chain, class Same>
void check_same_bits(const Chain& chain, const Same& same) {
  using Matrix = Kokkos::View<float**, Kokkos::LayoutRight, Exec>;
  for (const std::int64_t columns : {3, 40, 300, 2100}) {
    for (const int axis : {0, 1}) {
      const std::int64_t rows = 400;
      const Matrix x("x", axis == 0 ? columns : rows, axis == 0 ? rows : columns);
      const Matrix y("y", x.extent(0), x.extent(1)), expected("expected", x.extent(0), x.extent(1));
      const auto logits = random_values(Scalar::float32, columns * rows, -4, 4, 45);
      std::copy(logits.begin(), logits.end(), x.data());
      ks::softmax(Exec(), x, expected, ks::axis(axis), same);
      ks::softmax(Exec(), x, y, ks::axis(axis), chain);
      EXPECT_EQ(std::memcmp(y.data(), expected.data(), y.size() * sizeof(float)), 0)
          << columns << " columns, axis " << axis;
    }
  }
}
TEST_F(SimdTransformedTiles, ManyTransforms) {
  const auto one = ks::transform(AsTheyAre{});
  const auto four = one | one | one | one;
  const auto sixteen = four | four | four | four;
  const auto sixty_four = sixteen | sixteen | sixteen | sixteen;
  const auto some = ks::transform(Ripple{}) | sixteen;
  const auto many = ks::transform(Ripple{}) | sixty_four | four;
  constexpr std::size_t room = ks::impl::bytes_of_row_objects, most = ks::impl::most_bytes_of_row_object;
  static_assert(bytes_of_row<decltype(some)> * ks::impl::SimdTilePlan<float>::most_lanes > room);
  static_assert(bytes_of_row<decltype(some)> <= most && bytes_of_row<decltype(many)> > most);
  check_same_bits(some, ks::transform(Ripple{}));
  check_same_bits(many, ks::transform(Ripple{}));
}

// Whatever lies beside a row: in a tile, in a panel, in runs of few.
template <class T>
void check_bits() {
  for (const std::int64_t columns : {5, 16, 33, 100, 257, 1000, 2100})
    check_bits_of_first_row<T, Exec>({columns},
                                     ks::gelu() | ks::transform(Ripple{}) | ks::causal(columns / 2));
}
TEST_F(SimdTransformedTiles, SameBitsOfFloat) {
  check_bits<float>();
}
TEST_F(SimdTransformedTiles, SameBitsOfBfloat16) {
  check_bits<bhalf_t>();
}

}  // namespace
