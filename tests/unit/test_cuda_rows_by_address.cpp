// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows of 16 bits that CUDA holds by address, with transforms that are not the same for all logits: vectors
// of 16 bytes begin at memory's boundaries, wherever rows and their operands begin. What belongs to no row
// is NaN or +inf, so that none of it is used unseen.
#include "../support/transform_cases.hpp"

#if defined(KOKKOS_ENABLE_CUDA)

#include <cuda.h>

#include <optional>

namespace {

using namespace tests;
using Exec = Kokkos::Cuda;

// Of parts of a warp, of a warp or several, of a block; around whole vectors and what each of them holds.
const std::int64_t lengths[] = {1,    2,    7,    8,    9,    15,    16,    17,    32,   33,   48,
                                63,   64,   65,   96,   97,   128,   129,   160,   248,  255,  257,
                                384,  512,  513,  577,  640,  641,   1000,  1017,  1018, 1024, 1025,
                                1273, 2047, 2048, 4097, 8191, 10240, 10241, 16377, 16384};

const Accumulator single(Scalar::bfloat16, Scalar::bfloat16);

// Where the rows of a case and of an operand as large lie, and a number for what tests do by turns.
struct Placement {
  Layout x, operand;
  Operation operation;
  std::int64_t turn;
  bool in_tiles = false;  // all rows lie one behind the other, and so do those of the operand
};

// Each of the rows of a batch begins one element further behind a boundary; and those of the operand, against
// those of x, one element further from batch to batch.
Placement at_all_boundaries(std::int64_t batches, std::int64_t rows, std::int64_t columns,
                            std::int64_t offset, std::int64_t turn) {
  const std::int64_t stride = columns | 1, of_operand = stride + 16;
  const std::vector<std::int64_t> extents = {batches, rows, columns};
  return {{extents, {rows * stride, stride, 1}, 3},
          {extents, {rows * of_operand + 1, of_operand, 1}, 3 + offset},
          operations[turn % 3],
          turn};
}

// All rows of an operand lie alike against those of x.
Placement alike(std::int64_t columns, std::int64_t shift) {
  const std::vector<std::int64_t> extents = {1, 3, columns};
  const std::int64_t padding = shift % 3, offset = (columns + 5 * shift) % 8;
  return {reference::right(extents, padding, offset),
          reference::right(extents, padding + shift % 2 * 8, offset + shift),
          operations[(columns + shift / 3) % 3], shift};
}

// One behind the other.
Placement in_tiles(std::int64_t columns, std::int64_t shift) {
  const bool are_short = columns < 80;
  const std::vector<std::int64_t> extents = {are_short ? 15 : 2, 9, columns};
  return {reference::right(extents, 0, (columns + shift) % 8),
          reference::right(extents, 0, (5 * shift + shift / 8) % 16), operations[(columns / 2 + shift) % 3],
          shift, true};
}

template <class Use>
void for_each_placement(const Use& use) {
  const auto traced = [&](const Placement& at) {
    SCOPED_TRACE("x at " + std::to_string(at.x.offset) + ", operand at " + std::to_string(at.operand.offset));
    use(at);
  };
  for (const auto columns : lengths) {
    const bool is_long = columns > 2000;
    for (std::int64_t turn = 0; turn < 3; ++turn)
      traced(at_all_boundaries(is_long ? 1 : 9, 8, columns, is_long ? (columns + 3 * turn) % 8 : 0, turn));
    for (std::int64_t shift = 0; shift <= 8; ++shift) traced(alike(columns, shift));
    for (std::int64_t shift = 0; shift <= 8; ++shift) traced(in_tiles(columns, shift));
  }
  // More than 512 rows that fit a warp have one or a part of one each, their operands by way of shared
  // memory; fewer have several.
  for (const std::int64_t columns : {9, 33, 97, 129, 257, 385, 513, 641, 769, 1001, 1018, 1273})
    traced(at_all_boundaries(9, 58, columns, 0, columns / 4 % 3));
}

// Rows with NaN or +inf at both ends, and rows of nothing, beside others; y like x, in place, or otherwise.
template <class T>
Case case_at(const Placement& at) {
  Case c;
  c.extents = at.x.extents;
  c.axis = 2;
  c.in = at.x;
  c.special_around = true;
  const std::int64_t columns = c.extents[2], way = (at.turn + columns) % 3;
  c.in_place = way == 1;
  c.out = way == 0 ? at.x : reference::right(c.extents, at.in_tiles ? 0 : 2, 6 - at.turn % 2);
  c.logits = random_values(scalar_of<T>, c.size(), -5, 5);
  for (std::int64_t i = 0; i < c.size(); ++i) {
    const std::int64_t row = i / columns + at.turn, column = i % columns;
    auto& logit = c.logits[static_cast<std::size_t>(i)];
    if (i % 13 == 0 || row % 16 == 6) logit = -reference::infinity;
    if (row % 4 == 3 && (column == 0 || column == columns - 1))
      logit = row % 8 < 4 ? reference::nan : reference::infinity;
  }
  return c;
}

// With these few rows no one would choose tiles. Wide operands of long rows do not fit a block's shared
// memory.
template <class T, class... Transform>
void run_at(const Placement& at, const Case& c, const Transform&... transform) {
  run_case<T, T, 3>(Exec(), at.operation, c, "", transform...);
  const std::int64_t columns = c.extents[2];
  if (!at.in_tiles || columns < 16 || columns > 8191 || columns % 8 == 0) return;
  EXPECT_TRUE((run_case<T, T, 3>(Exec(), at.operation, c, "tiled_logits", transform...)));
}

// A mask that keeps nothing of some rows.
std::vector<double> flags_of(const Case& c) {
  auto flags = random_flags(c.size());
  for (std::int64_t row = 1; row < c.size() / c.extents[2]; row += 7)
    std::fill_n(flags.begin() + row * c.extents[2], c.extents[2], 0.0);
  return flags;
}

template <class T>
reference::Step mask_of(const Operand<T, Exec>& keep, const Case& c) {
  const auto kept = keep.at(c);
  return reference::mask([kept](Position p) { return kept(p) != 0; });
}

// NaN and +inf, by turns, in the logits or, by turns, in the operand that `dropped` says are dropped.
template <class Dropped>
void make_special(std::vector<double>& logits, std::vector<double>* operand, const Dropped& dropped) {
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (!dropped(static_cast<std::int64_t>(i)) || i % 3 == 0) continue;
    (operand && i % 3 == 1 ? *operand : logits)[i] = i % 2 ? reference::nan : reference::infinity;
  }
}

template <class T>
void check_bias() {
  for_each_placement([](const Placement& at) {
    auto c = case_at<bhalf_t>(at);
    auto values = random_values(scalar_of<T>, c.size(), -4, 4, 21);
    // Logits of -inf stay so with whatever bias.
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (c.logits[i] == -reference::infinity && i % 2) values[i] = reference::infinity;
    }
    const Operand<T, Exec> add(at.operand, values);
    c.chain = {reference::bias(single, add.at(c))};
    run_at<bhalf_t>(at, c, ks::bias(add.template view<3>()));
  });
}

TEST(CudaRowsByAddress, Bias) {
  check_bias<bhalf_t>();
  check_bias<float>();
}

TEST(CudaRowsByAddress, Mask) {
  for_each_placement([](const Placement& at) {
    auto c = case_at<bhalf_t>(at);
    const auto flags = flags_of(c);
    make_special(c.logits, nullptr, [&](std::int64_t i) { return flags[static_cast<std::size_t>(i)] == 0; });
    const Operand<bool, Exec> keep(at.operand, flags);
    c.chain = {mask_of(keep, c)};
    run_case<bhalf_t, bhalf_t, 3>(Exec(), at.operation, c, "", ks::mask(keep.view<3>()));
  });
}

// With ends before the first column, at boundaries and off them, and behind the last.
TEST(CudaRowsByAddress, ScaleBiasMaskCausal) {
  for_each_placement([](const Placement& at) {
    const auto columns = at.x.extents[2], queries = at.x.extents[1];
    const std::int64_t ends[] = {-5, 0, columns / 2, columns - 6, columns - 2, 2 * columns};
    for (const auto end : {ends[at.turn % 3], ends[3 + at.turn % 3]}) {
      auto c = case_at<bhalf_t>(at);
      const double factor = at.turn % 2 ? -0.5 : 0.125;
      const auto flags = flags_of(c);
      auto values = random_values(Scalar::bfloat16, c.size(), -4, 4, 21);
      make_special(c.logits, &values, [&](std::int64_t i) {
        return flags[static_cast<std::size_t>(i)] == 0 || i % columns > i / columns % queries + end;
      });
      const Operand<bhalf_t, Exec> add(at.operand, values);
      const Operand<bool, Exec> keep(at.operand, flags);
      c.chain = {reference::scale(single, factor), reference::bias(single, add.at(c)), mask_of(keep, c),
                 reference::causal(end)};
      run_at<bhalf_t>(
          at, c, ks::scale(factor) | ks::bias(add.view<3>()) | ks::mask(keep.view<3>()) | ks::causal(end));
    }
  });
}

// -inf stays -inf, which GELU alone would make NaN of.
TEST(CudaRowsByAddress, Gelu) {
  for_each_placement([](const Placement& at) {
    auto c = case_at<bhalf_t>(at);
    c.chain = {reference::gelu(single)};
    run_at<bhalf_t>(at, c, ks::gelu());
  });
}

// Operands of other widths beside each other, of which one lies as x does.
TEST(CudaRowsByAddress, HalfWithOperandsOfOtherTypes) {
  for_each_placement([](const Placement& at) {
    auto c = case_at<half_t>(at);
    const auto flags = flags_of(c);
    const auto factors = random_values(Scalar::float16, c.size(), -2, 2, 22);
    auto values = random_values(Scalar::float32, c.size(), -4, 4, 23);
    make_special(c.logits, &values, [&](std::int64_t i) { return flags[static_cast<std::size_t>(i)] == 0; });
    const Operand<half_t, Exec> times(at.operand, factors);
    const Operand<double, Exec> add(at.x, values);
    const Operand<float, Exec> keep(at.operand, flags);
    c.chain = {reference::scale(single, times.at(c)), reference::bias(single, add.at(c)), mask_of(keep, c)};
    run_at<half_t>(at, c, ks::scale(times.view<3>()) | ks::bias(add.view<3>()) | ks::mask(keep.view<3>()));
  });
}

// Operands of all rows beside others, and statistics of each column.
TEST(CudaRowsByAddress, OperandsOfAllRows) {
  for (const auto columns : lengths) {
    for (std::int64_t shift = 0; shift <= 8; ++shift) {
      const Placement at = in_tiles(columns, shift);
      SCOPED_TRACE("x at " + std::to_string(at.x.offset));
      auto c = case_at<bhalf_t>(at);
      const std::vector<std::int64_t> of_all = {1, 1, columns};
      const Layout all = reference::right(of_all, 0, shift);
      const auto flags = random_flags(columns);
      make_special(c.logits, nullptr,
                   [&](std::int64_t i) { return flags[static_cast<std::size_t>(i % columns)] == 0; });
      const Operand<bool, Exec> keep(all, flags);
      const Operand<bhalf_t, Exec> add(all, random_values(Scalar::bfloat16, columns, -4, 4, 31));
      const Operand<float, Exec> add_float(all, random_values(Scalar::float32, columns, -4, 4, 32));
      const Operand<bhalf_t, Exec> times(at.operand, random_values(Scalar::bfloat16, c.size(), -2, 2, 33));
      const auto run = [&](const auto& transform) { run_at<bhalf_t>(at, c, transform); };
      c.chain = {mask_of(keep, c), reference::bias(single, add.at(c))};
      run(ks::mask(keep.view<3>()) | ks::bias(add.view<3>()));
      c.chain = {reference::bias(single, add_float.at(c)), reference::scale(single, times.at(c)),
                 mask_of(keep, c)};
      run(ks::bias(add_float.view<3>()) | ks::scale(times.view<3>()) | ks::mask(keep.view<3>()));
      const Statistics of(columns);
      const auto column = [&](const std::vector<double>& values) {
        return Operand<float, Exec>({columns}, values);
      };
      const auto mean = column(of.mean), variance = column(of.variance), gamma = column(of.gamma),
                 beta = column(of.beta);
      c.chain = {mask_of(keep, c),
                 reference::batch_norm(single, of.mean, of.variance, of.gamma, of.beta, 1e-5)};
      run(ks::mask(keep.view<3>()) |
          ks::batch_norm(mean.view<1>(), variance.view<1>(), gamma.view<1>(), beta.view<1>(), 1e-5));
    }
  }
}

// Whether a functor is asked for what is there alone.
struct Inside {
  std::int64_t rows, columns;
  int* outside;
  KOKKOS_FUNCTION bool operator()(std::int64_t row, std::int64_t column) const {
    const bool inside = row >= 0 && row < rows && column >= 0 && column < columns;
    if (!inside) *outside = 1;
    return inside;
  }
};
struct AddFromTables {
  const float *of_row, *of_column;
  Inside inside;
  template <class Acc>
  KOKKOS_FUNCTION Acc operator()(Acc value, std::int64_t row, std::int64_t column) const {
    return inside(row, column) ? value * Acc(-0.5) + of_row[row] + of_column[column]
                               : Kokkos::Experimental::quiet_NaN_v<Acc>;
  }
};
struct DropEveryThird {
  Inside inside;
  KOKKOS_FUNCTION bool operator()(std::int64_t row, std::int64_t column) const {
    return !inside(row, column) || EveryThird{}(row, column);
  }
};

TEST(CudaRowsByAddress, FunctorAndPredicate) {
  const Kokkos::View<int, Exec::memory_space> outside("outside");
  for_each_placement([&](const Placement& at) {
    auto c = case_at<bhalf_t>(at);
    const auto columns = c.extents[2], rows = c.size() / columns;
    make_special(c.logits, nullptr, [=](std::int64_t i) { return !every_third(i / columns, i % columns); });
    const auto row_values = random_values(Scalar::float32, rows, -4, 4, 24);
    const auto column_values = random_values(Scalar::float32, columns, -4, 4, 25);
    const Operand<float, Exec> of_row(reference::right({rows}), row_values),
        of_column(reference::right({columns}), column_values);
    c.chain = {reference::keep_if(every_third),
               reference::function(
                   single,
                   [&](long double value, Position p) {
                     return value * -0.5L + row_values[static_cast<std::size_t>(p.row)] +
                            column_values[static_cast<std::size_t>(p.column)];
                   },
                   4)};
    const Inside inside{rows, columns, outside.data()};
    run_at<bhalf_t>(at, c,
                    ks::keep_if(DropEveryThird{inside}) |
                        AddFromTables{of_row.view<1>().data(), of_column.view<1>().data(), inside});
    int was_outside = 0;
    Kokkos::deep_copy(was_outside, outside);
    EXPECT_EQ(was_outside, 0) << rows << " rows of " << columns << " columns";
    Kokkos::deep_copy(outside, 0);
  });
}

// An operand that is the same for some rows, or for all columns, or whose columns are not side by side.
TEST(CudaRowsByAddress, BroadcastAndStridedOperands) {
  for (const std::int64_t columns : {9, 64, 129, 640, 1018, 2048, 4097, 10241}) {
    const std::vector<std::int64_t> extents = {2, 5, columns};
    std::vector<Layout> layouts = {reference::ordered(extents, {2, 1, 0}, 2, 1, 3),
                                   reference::left(extents, 0, 1)};
    for (const auto& broadcast : broadcasts(extents)) {
      layouts.push_back(reference::right(broadcast));
      layouts.push_back(reference::right(broadcast, 1, 3 + columns % 5));
    }
    std::int64_t turn = 0;
    for (const auto& layout : layouts) {
      const Placement at{reference::right(extents, columns % 8 ? 1 : 0, turn / 2 % 2 * 3), layout,
                         operations[turn % 3], turn};
      ++turn;
      const auto plain = case_at<bhalf_t>(at);
      const auto flags = random_flags(layout.size());
      const Operand<bool, Exec> keep(layout, flags);
      const Operand<bhalf_t, Exec> add(layout, random_values(Scalar::bfloat16, layout.size(), -4, 4, 26));
      const Operand<float, Exec> add_float(layout, random_values(Scalar::float32, layout.size(), -4, 4, 27));
      auto c = plain;
      c.chain = {reference::bias(single, add.at(c))};
      run_at<bhalf_t>(at, c, ks::bias(add.view<3>()));
      c.chain = {reference::bias(single, add_float.at(c))};
      run_at<bhalf_t>(at, c, ks::bias(add_float.view<3>()));
      c.chain = {mask_of(keep, c)};
      run_at<bhalf_t>(at, c, ks::mask(keep.view<3>()));
      c.chain = {reference::scale(single, -0.5), reference::bias(single, add.at(c)), mask_of(keep, c),
                 reference::causal(columns / 2)};
      run_at<bhalf_t>(
          at, c,
          ks::scale(-0.5) | ks::bias(add.view<3>()) | ks::mask(keep.view<3>()) | ks::causal(columns / 2));
    }
  }
}

// The bytes of the results of all operations with some transforms, a string each.
std::vector<std::string> results(const Buffer<Exec>& x, const Operand<bhalf_t, Exec>& add,
                                 const Operand<bool, Exec>& keep, std::int64_t end, std::int64_t y_offset,
                                 const char* implementation = "") {
  std::vector<std::string> bytes;
  const auto rows = x.layout().extents[0];
  const auto run = [&](Operation operation, const auto& transform) {
    const bool reduces = operation == Operation::logsumexp;
    Buffer<Exec> result(Scalar::bfloat16, reduces ? reference::right({rows})
                                                  : reference::right(x.layout().extents, 0, y_offset));
    StridedView<bhalf_t, 2, Exec> y;
    StridedView<bhalf_t, 1, Exec> lse;
    if (reduces) {
      lse = result.view<bhalf_t, 1>();
    } else {
      y = result.view<bhalf_t, 2>();
    }
    const Exec exec;
    call(operation, exec, x.view<const bhalf_t, 2>(), y, lse, 1, transform);
    exec.fence();
    result.download();
    const auto& layout = result.layout();
    bytes.emplace_back(reinterpret_cast<const char*>(result.host()) + 2 * layout.offset,
                       static_cast<std::size_t>(2 * layout.size()));
  };
  for (const auto operation : operations) {
    run(operation, ks::mask(keep.view<2>()));
    std::optional<ks::ScopedImplementation> forced;
    if (*implementation) forced.emplace(implementation);
    run(operation, ks::bias(add.view<2>()));
    run(operation, ks::scale(-0.3) | ks::bias(add.view<2>()) | ks::mask(keep.view<2>()) | ks::causal(end));
    run(operation, ks::gelu());
  }
  return bytes;
}

// Whatever rows are beside it, and wherever it and its operands lie.
TEST(CudaRowsByAddress, RowsGiveTheSameBitsAloneAndBesideOthers) {
  for (const std::int64_t columns :
       {9, 32, 33, 48, 64, 96, 129, 256, 577, 640, 1018, 1273, 2048, 4097, 8191, 16384}) {
    const std::int64_t rows = columns <= 2048 ? 520 : 18;  // a warp for a row, and warps for it alone
    const std::vector<std::int64_t> extents = {rows, columns};
    auto logits = random_values(Scalar::bfloat16, rows * columns, -5, 5);
    for (std::size_t i = 0; i < logits.size(); i += 13) logits[i] = -reference::infinity;
    const auto values = random_values(Scalar::bfloat16, rows * columns, -4, 4, 28);
    const auto flags = random_flags(rows * columns);
    const auto all = results(Buffer<Exec>(Scalar::bfloat16, reference::right(extents), &logits, true),
                             {reference::right(extents, 3, 5), values},
                             {reference::right(extents, 1, 2), flags}, columns / 2, 0);
    if (columns >= 16 && columns % 8 != 0) {
      for (const std::int64_t offset : {0, 1, 3}) {
        const auto in_tiles = results(
            Buffer<Exec>(Scalar::bfloat16, reference::right(extents, 0, offset), &logits, true),
            {reference::right(extents, 0, 5 * offset), values},
            {reference::right(extents, 0, 7 * offset), flags}, columns / 2, offset / 2, "tiled_logits");
        for (std::size_t i = 0; i < all.size(); ++i)
          EXPECT_TRUE(in_tiles[i] == all[i]) << "result " << i << " in tiles, " << columns << " columns";
      }
    }
    for (const auto row : std::initializer_list<std::int64_t>{0, 1, 2, 3, 5, 6, rows - 1}) {
      const auto of_row = [&](const std::vector<double>& of_all) {
        return std::vector<double>(of_all.begin() + row * columns, of_all.begin() + (row + 1) * columns);
      };
      const auto row_logits = of_row(logits);
      for (const std::int64_t offset : {0, 1, 3}) {
        const auto at = [&](std::int64_t from) { return reference::right({1, columns}, 0, from); };
        const auto alone = results(Buffer<Exec>(Scalar::bfloat16, at(offset), &row_logits, true),
                                   {at((row + 5 * offset) % 8), of_row(values)},
                                   {at((3 * row + offset) % 8), of_row(flags)}, columns / 2 + row, 2);
        for (std::size_t i = 0; i < all.size(); ++i) {
          const std::size_t length = all[i].size() / static_cast<std::size_t>(rows);
          EXPECT_EQ(all[i].substr(static_cast<std::size_t>(row) * length, length), alone[i])
              << "result " << i << ", " << columns << " columns, row " << row << ", offset " << offset;
        }
      }
    }
  }
}

using Bits = Kokkos::View<std::uint16_t*, Exec>;
template <class T>
using Batches = Kokkos::View<T***, Kokkos::LayoutStride, Exec, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;

std::uint32_t KOKKOS_FUNCTION hash_of(std::int64_t i) {
  std::uint32_t hash = static_cast<std::uint32_t>(i) * 2654435761u;
  hash = (hash ^ hash >> 15) * 0x85ebca6bu;
  return hash ^ hash >> 13;
}
// bfloat16 from -8 to 8, and -inf.
struct Fill {
  Bits bits;
  std::int64_t seed;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const std::uint32_t hash = hash_of(i + seed);
    const std::uint32_t value = (hash & 0x807fu) | (124u + (hash >> 16) % 6u) << 7;
    bits(i) = static_cast<std::uint16_t>(hash >> 28 == 0 ? 0xff80u : value);
  }
};
struct FillFlags {
  Kokkos::View<bool*, Exec> flags;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const { flags(i) = hash_of(i) >> 29 != 0; }
};
struct CountDifferent {
  Bits a, b;
  KOKKOS_FUNCTION void operator()(std::int64_t i, std::int64_t& count) const { count += a(i) != b(i); }
};

// Two batches of rows one behind the other, `gap` elements between them, the second off the first's boundary.
struct PlaceOfBatches {
  std::int64_t rows, columns, gap, offset;
  std::int64_t stride() const { return columns + gap; }
  std::int64_t batch_stride() const { return rows * stride() + 3; }
  std::size_t size() const { return static_cast<std::size_t>(offset + 2 * batch_stride()); }
  template <class T>
  Batches<T> view(T* data) const {
    return Batches<T>(data + offset, Kokkos::LayoutStride(2, batch_stride(), rows, stride(), columns, 1));
  }
};

// Some rows of one batch.
template <class T>
Batches<T> part(const Batches<T>& all, std::int64_t batch, std::int64_t first, std::int64_t count) {
  return Batches<T>(all.data() + batch * all.stride(0) + first * all.stride(1),
                    Kokkos::LayoutStride(1, all.stride(0), count, all.stride(1), all.extent(2), 1));
}

// Many rows with an operand that is the same for all of them, which is brought to shared memory once for
// several: the bits that few rows have, each of which brings it for itself.
TEST(CudaRowsByAddress, RowsThatHaveAnOperandInCommonGiveTheBitsThatFewGive) {
  const Exec exec;
  const auto in_turn = static_cast<std::int64_t>(exec.cuda_device_prop().multiProcessorCount) * 9;
  struct Shape {
    std::int64_t columns, rows, gap, y_offset;
  };
  // Three or four rows in turn on an H200, of which the last ones do not exist.
  for (const auto& [columns, rows, gap, y_offset] :
       std::initializer_list<Shape>{{33, 119 * in_turn, 0, 0},
                                    {129, 59 * in_turn, 0, 1},
                                    {257, 29 * in_turn, 2, 0},
                                    {1001, 15 * in_turn, 0, 0},
                                    {2047, 5 * in_turn + 1, 1, 0},
                                    {4097, 4 * in_turn - 3, 0, 1},
                                    {10241, 2 * in_turn + 5, 0, 0}}) {
    SCOPED_TRACE(std::to_string(columns) + " columns");
    const PlaceOfBatches in{rows, columns, gap, 5}, out{rows, columns, gap, 5 + y_offset};
    const Bits x_bits("x", in.size()), y_bits("y", out.size()), few_bits("y of few", out.size()),
        add_bits("bias", static_cast<std::size_t>(columns) + 1);
    const Kokkos::View<bool*, Exec> flags("flags", in.size());
    Kokkos::parallel_for(Kokkos::RangePolicy<Exec>(exec, 0, in.size()), Fill{x_bits, 1});
    Kokkos::parallel_for(Kokkos::RangePolicy<Exec>(exec, 0, columns + 1), Fill{add_bits, 77});
    Kokkos::parallel_for(Kokkos::RangePolicy<Exec>(exec, 0, in.size()), FillFlags{flags});
    const auto values = [](const Bits& bits) { return reinterpret_cast<bhalf_t*>(bits.data()); };
    const auto x = in.view(values(x_bits)), y = out.view(values(y_bits)), few = out.view(values(few_bits));
    const auto keep = in.view(flags.data());
    const Kokkos::View<const bhalf_t*, Exec, Kokkos::MemoryTraits<Kokkos::Unmanaged>> add(
        values(add_bits) + 1, static_cast<std::size_t>(columns));
    const Kokkos::View<const bool*, Exec, Kokkos::MemoryTraits<Kokkos::Unmanaged>> keep_columns(
        flags.data() + 3, static_cast<std::size_t>(columns));
    // `transform`(mask, first row): of some rows.
    const auto check = [&](const char* name, const auto& transform) {
      SCOPED_TRACE(name);
      for (const bool logarithm : {false, true}) {
        const auto run = [&](const auto& from, const auto& to, const auto& of_rows) {
          if (logarithm) {
            ks::log_softmax(exec, from, to, of_rows);
          } else {
            ks::softmax(exec, from, to, of_rows);
          }
        };
        Kokkos::deep_copy(exec, y_bits, std::uint16_t(1));
        Kokkos::deep_copy(exec, few_bits, std::uint16_t(1));
        run(x, y, transform(keep, 0));
        for (std::int64_t batch = 0; batch < 2; ++batch) {
          for (std::int64_t first = 0; first < rows; first += 500) {
            const auto count = std::min<std::int64_t>(500, rows - first);
            run(part(x, batch, first, count), part(few, batch, first, count),
                transform(part(keep, batch, first, count), first));
          }
        }
        std::int64_t different = 0;
        Kokkos::parallel_reduce(Kokkos::RangePolicy<Exec>(exec, 0, y_bits.extent(0)),
                                CountDifferent{y_bits, few_bits}, different);
        EXPECT_EQ(different, 0) << (logarithm ? "log_softmax" : "softmax");
      }
    };
    check("bias", [&](const auto&, std::int64_t) { return ks::bias(add); });
    check("mask", [&](const auto&, std::int64_t) { return ks::mask(keep_columns); });
    check("scale, bias, mask of each row, causal", [&](const auto& mask, std::int64_t first) {
      return ks::scale(0.5) | ks::bias(add) | ks::mask(mask) | ks::causal(first + columns / 3);
    });
  }
}

// Memory of the device, of ones in every byte, that has nothing before it and nothing behind it: whoever
// reads there ends the program's use of the device.
class Island {
 public:
  Island() {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = Exec().cuda_device();
    CUmemAccessDesc access{};
    access.location = properties.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    expect(cuMemGetAllocationGranularity(&bytes_, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    expect(cuMemAddressReserve(&address_, 3 * bytes_, 0, 0, 0));
    expect(cuMemCreate(&memory_, bytes_, &properties, 0));
    expect(cuMemMap(address_ + bytes_, bytes_, 0, memory_, 0));
    expect(cuMemSetAccess(address_ + bytes_, bytes_, &access, 1));
    expect(cuMemsetD8(address_ + bytes_, 1, bytes_));
  }
  ~Island() {
    expect(cuMemUnmap(address_ + bytes_, bytes_));
    expect(cuMemRelease(memory_));
    expect(cuMemAddressFree(address_, 3 * bytes_));
  }
  Island(const Island&) = delete;
  Island& operator=(const Island&) = delete;

  // So many elements from one of the two ends.
  template <class T>
  auto rows(std::int64_t count, std::int64_t columns, bool at_end, std::int64_t offset) const {
    const auto elements = static_cast<std::int64_t>(bytes_ / sizeof(T));
    T* const begin = reinterpret_cast<T*>(address_ + bytes_);
    return Kokkos::View<T**, Kokkos::LayoutRight, Kokkos::CudaSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>(
        begin + (at_end ? elements - count * columns - offset : offset), count, columns);
  }

 private:
  static void expect(CUresult result) { EXPECT_EQ(result, CUDA_SUCCESS); }

  CUdeviceptr address_ = 0;
  CUmemGenericAllocationHandle memory_ = 0;
  std::size_t bytes_ = 0;
};

// The last test, for what it finds ends all.
TEST(CudaRowsByAddress, ReadsNothingBesideAllocations) {
  const Exec exec;
  const Island of_x, of_y, of_operand, of_mask;
  for (const std::int64_t columns : {1, 8, 15, 64, 129, 640, 1273, 2047, 4097, 16384}) {
    for (const bool at_end : {false, true}) {
      for (std::int64_t i = 0; i < 72; ++i) {
        const std::int64_t offset = i % 8, other = i / 8, rows = i % 5 < 2 ? 1 : 3;
        const auto x = of_x.rows<const bhalf_t>(rows, columns, at_end, offset);
        const auto y = of_y.rows<bhalf_t>(rows, columns, at_end, i % 3 ? offset : other);
        const auto add = of_operand.rows<const bhalf_t>(rows, columns, at_end, other);
        const auto keep = of_mask.rows<const bool>(rows, columns, at_end, other);
        ks::softmax(exec, x, y, ks::bias(add));
        ks::softmax(exec, x, y, ks::bias(of_operand.rows<const float>(rows, columns, at_end, other)));
        ks::softmax(exec, x, y, ks::mask(keep));
        ks::softmax(exec, x, y,
                    ks::scale(0.5) | ks::bias(add) | ks::mask(keep) | ks::causal(columns - 1 - other));
        ks::softmax(exec, x, y, ks::gelu());
        if (columns < 16 || columns % 8 == 0) continue;
        const ks::ScopedImplementation forced("tiled_logits");
        const auto add_to_all = Kokkos::subview(add, rows - 1, Kokkos::ALL);
        ks::softmax(exec, x, y, ks::bias(add) | ks::bias(add_to_all));
        ks::softmax(exec, x, y,
                    ks::scale(0.5) | ks::bias(add) | ks::mask(keep) | ks::causal(columns - 1 - other));
      }
      exec.fence();
    }
  }
}

}  // namespace

#endif
