// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What is checked of rows of 16 bits that CUDA keeps as they are, whatever they become: with each kind of
// transform, special logits among them, wherever they lie.
#ifndef KOKKOSSOFTMAX_TESTS_PACKED_ROWS_HPP
#define KOKKOSSOFTMAX_TESTS_PACKED_ROWS_HPP

#include "transform_cases.hpp"

namespace tests {

using Exec = Kokkos::Cuda;

// One behind the other; with the same between all; with more between planes.
enum class Gaps { none, rows, planes };
constexpr Gaps all_gaps[] = {Gaps::none, Gaps::rows, Gaps::planes};

// Rows beside each other of which some are special. Off all boundaries, where there are gaps.
template <class T>
Case special_case(std::int64_t columns, Gaps gaps, std::int64_t planes = 2, std::int64_t rows = 9) {
  Case c;
  c.extents = {planes, rows, columns};
  c.axis = 2;
  c.logits = random_values(scalar_of<T>, c.size(), -5, 5);
  const double large = std::is_same_v<T, half_t> ? 0x1p13 : 0x1p120;
  for (std::int64_t i = 0; i < c.size(); ++i) {
    const std::int64_t row = i / columns, column = i % columns;
    auto& logit = c.logits[static_cast<std::size_t>(i)];
    if (row % 2 == 0 && i % 17 == 0) logit = -reference::infinity;
    if (row == 3 && column == columns / 2) logit = reference::nan;
    if (row == 5 && column == columns / 3) logit = reference::infinity;
    if (row == 6 || row == 17) logit = -reference::infinity;
    if (row == 9) logit *= large;
  }
  const std::int64_t stride = columns + 3;
  if (gaps == Gaps::rows) {
    c.in = reference::Layout{c.extents, {rows * stride, stride, 1}, 5};
    c.out = reference::Layout{c.extents, {rows * stride, stride, 1}, 1};
  } else if (gaps == Gaps::planes) {
    c.in = reference::right(c.extents, 3, 5);
    c.out = reference::right(c.extents, 2, 1);
  }
  return c;
}

template <class T, class Out>
Accumulator accumulator() {
  return Accumulator(scalar_of<T>, scalar_of<Out>);
}

// Whether tiled_rows takes such rows.
template <class Out>
bool fits_tile(std::int64_t columns) {
  return sizeof(Out) == 2 && columns >= 16 && columns <= 4608;
}

template <class T, class Out, class... Transform>
void check_all(const Case& c, Gaps gaps, const Transform&... transform) {
  for (auto operation : operations) {
    run_case<T, Out, 3>(Exec(), operation, c, "", transform...);
    // (With these few rows no one would choose it.)
    if (fits_tile<Out>(c.extents[2]) && gaps != Gaps::planes)
      EXPECT_TRUE((run_case<T, Out, 3>(Exec(), operation, c, "tiled_rows", transform...)));
  }
}

// 1e29 makes infinities of large logits, the others change the order, make all logits the same, or NaN of
// infinities.
constexpr double factors[] = {0.125, 3.0, 1e29, -0.5, 0.0, 1e-39};

template <class T, class Out = T>
void check_factor(std::int64_t columns, Gaps gaps) {
  auto c = special_case<T>(columns, gaps);
  for (const double factor : factors) {
    SCOPED_TRACE(factor);
    c.chain = {reference::scale(accumulator<T, Out>(), factor)};
    check_all<T, Out>(c, gaps, ks::scale(factor));
  }
  c.in_place = gaps == Gaps::none;
  check_all<T, Out>(c, gaps, ks::scale(factors[5]));
}

// With what makes NaN where a causal mask drops it.
inline Case with_dropped(const Case& c, std::int64_t offset) {
  auto dropped = c;
  for (std::int64_t i = 0; i < c.size(); ++i) {
    if (i % c.extents[2] > i / c.extents[2] % c.extents[1] + offset)
      dropped.logits[static_cast<std::size_t>(i)] = i % 2 ? reference::nan : reference::infinity;
  }
  return dropped;
}

// Ends in a vector, at its boundaries, before the first column and behind the last.
template <class T, class Out = T>
void check_causal(std::int64_t columns, Gaps gaps) {
  const auto c = special_case<T>(columns, gaps);
  for (const std::int64_t offset :
       {-std::int64_t(5), std::int64_t(0), columns / 2, columns - 6, 2 * columns}) {
    SCOPED_TRACE(offset);
    auto dropped = with_dropped(c, offset);
    dropped.chain = {reference::causal(offset)};
    check_all<T, Out>(dropped, gaps, ks::causal(offset));
    for (const double factor : {0.125, -0.5}) {
      dropped.chain = {reference::scale(accumulator<T, Out>(), factor), reference::causal(offset)};
      check_all<T, Out>(dropped, gaps, ks::scale(factor) | ks::causal(offset));
    }
  }
}

// So many that the device is short of threads for a row in each warp, or for a vector in each thread.
inline std::int64_t many_rows(std::int64_t columns) {
  return 600 + (std::int64_t(1) << 21) * 9 / 8 / columns;
}

// Of rows side by side anything is kept.
template <class T, class Out = T>
void check_causal_rows(std::int64_t columns, std::int64_t rows, Gaps gaps) {
  const std::int64_t offset = columns - rows / 2;
  auto c = with_dropped(special_case<T>(columns, gaps, 1, rows), offset);
  c.chain = {reference::scale(accumulator<T, Out>(), 0.125), reference::causal(offset)};
  for (auto operation : operations)
    run_case<T, Out, 3>(Exec(), operation, c, "", ks::scale(0.125) | ks::causal(offset));
}

// Of a warp's rows: those that keep the order of logits, and others.
inline std::vector<double> some_temperatures() {
  std::vector<double> values;
  const double some[] = {0.5, 1.7, -2, 1e-30, 1, 3e38, 0.9, 1e-41, 2.5};
  for (std::int64_t row = 0; row < 18; ++row) {
    // (A large logit over a small temperature is out of the reference's range as it is out of float's.)
    values.push_back(static_cast<double>(static_cast<float>(some[row % (row % 2 == 0 ? 9 : 2)])));
  }
  return values;
}
template <class T, class Out = T>
void check_temperature(std::int64_t columns, Gaps gaps) {
  auto c = special_case<T>(columns, gaps);
  const auto values = some_temperatures();
  c.chain = {reference::temperature(accumulator<T, Out>(), values)};
  const Operand<float, Exec> temperatures({18}, values);
  check_all<T, Out>(c, gaps, ks::temperature(temperatures.template view<1>()));
}

// A mask and whether it lies as the rows of a case do that have no gaps, or is the same for all rows.
struct PlaceOfMask {
  Layout layout;
  bool like_rows;
};
inline std::vector<PlaceOfMask> places_of_mask(const std::vector<std::int64_t>& extents) {
  const std::int64_t columns = extents[2];
  return {{reference::right(extents), true},
          {reference::right(extents, 0, 24), true},
          {reference::right(extents, 0, 3), false},
          {reference::right(extents, 5, 1), false},
          {reference::right({1, 1, columns}), true},
          {reference::right({1, 1, columns}, 0, 5), true},
          {reference::right({2, 1, columns}, 0, 2), false},
          {reference::right({2, 9, 1}), false},
          {reference::left(extents, 0, 1), false}};
}

// By turns alone and beside a factor and an end, or a temperature.
template <class T, class Out = T>
void check_mask(std::int64_t columns, Gaps gaps) {
  const auto plain = special_case<T>(columns, gaps);
  int turn = static_cast<int>(columns);
  for (const auto& [layout, like_rows] : places_of_mask(plain.extents)) {
    SCOPED_TRACE("mask " + std::to_string(turn - columns));
    auto c = plain;
    auto flags = random_flags(layout.size());
    if (layout.size() == c.size()) std::fill_n(flags.begin() + 7 * columns, columns, 0.0);
    const Operand<bool, Exec> keep(layout, flags);
    const auto kept = keep.at(c);
    const auto mask = reference::mask([kept](Position p) { return kept(p) != 0; });
    for (std::int64_t i = 0; i < c.size(); ++i) {
      if (kept({i / columns, i % columns, 0}) == 0 && i % 3 != 0)
        c.logits[static_cast<std::size_t>(i)] = i % 2 ? reference::nan : reference::infinity;
    }
    c.in_place = gaps == Gaps::none && turn % 2 == 0;
    const auto check = [&](const auto& transform) {
      for (auto operation : operations) {
        run_case<T, Out, 3>(Exec(), operation, c, "", transform);
        if (!fits_tile<Out>(columns)) continue;
        EXPECT_EQ((run_case<T, Out, 3>(Exec(), operation, c, "tiled_rows", transform)),
                  like_rows && gaps == Gaps::none);
      }
    };
    const auto factor = reference::scale(accumulator<T, Out>(), -0.5);
    const auto end = reference::causal(columns / 2);
    const auto values = some_temperatures();
    const auto temperature = reference::temperature(accumulator<T, Out>(), values);
    const Operand<float, Exec> temperatures({18}, values);
    switch (turn++ % 5) {
      case 0:
        c.chain = {mask, factor};
        check(ks::mask(keep.template view<3>()) | ks::scale(-0.5));
        break;
      case 1:
        c.chain = {factor, mask, end};
        check(ks::scale(-0.5) | ks::mask(keep.template view<3>()) | ks::causal(columns / 2));
        break;
      case 2:
        c.chain = {mask, temperature};
        check(ks::mask(keep.template view<3>()) | ks::temperature(temperatures.template view<1>()));
        break;
      case 3:
        c.chain = {temperature, mask};
        check(ks::temperature(temperatures.template view<1>()) | ks::mask(keep.template view<3>()));
        break;
      default:
        c.chain = {mask};
        check(ks::mask(keep.template view<3>()));
    }
  }
}

template <class T>
struct CopyRow {
  const T* from;
  T* to;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const { to[i] = from[i]; }
};

// Whatever rows are beside it, and wherever it lies.
template <class T, class Out = T>
void check_bits_alone_and_beside_others(const std::vector<std::int64_t>& lengths) {
  using Memory = Kokkos::View<T*, Kokkos::CudaSpace>;
  using OutMemory = Kokkos::View<Out*, Kokkos::CudaSpace>;
  using Rows =
      Kokkos::View<T**, Kokkos::LayoutRight, Kokkos::CudaSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  using OutRows =
      Kokkos::View<Out**, Kokkos::LayoutRight, Kokkos::CudaSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  const Exec exec;
  for (const std::int64_t columns : lengths) {
    const auto c = special_case<T>(columns, Gaps::none);
    const std::int64_t different = 18, rows = many_rows(columns);
    const Memory x("x", rows * columns), one("one row", columns + 8);
    const OutMemory y("y", rows * columns), result("its result", columns + 8);
    const auto host = Kokkos::create_mirror_view(x);
    for (std::int64_t i = 0; i < rows * columns; ++i)
      host(i) = T(static_cast<float>(c.logits[static_cast<std::size_t>(i % (different * columns))]));
    Kokkos::deep_copy(x, host);
    const Kokkos::View<float*, Kokkos::CudaSpace> temperatures("temperatures", rows);
    const auto host_temperatures = Kokkos::create_mirror_view(temperatures);
    for (std::int64_t row = 0; row < rows; ++row)
      host_temperatures(row) = row % 3 == 1 ? -1.5f : 0.25f * (row + 1);
    Kokkos::deep_copy(temperatures, host_temperatures);
    // Any byte but 0 keeps.
    using Flags = Kokkos::View<const bool**, Kokkos::LayoutRight, Kokkos::CudaSpace,
                               Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
    using Bytes = Kokkos::View<unsigned char*, Kokkos::CudaSpace>;
    const Bytes bytes("bytes", rows * columns), ones("ones", rows * columns);
    const auto host_bytes = Kokkos::create_mirror_view(bytes), host_ones = Kokkos::create_mirror_view(ones);
    const unsigned char some[] = {0, 1, 1, 2, 0x80, 0xff, 0};
    for (std::int64_t i = 0; i < rows * columns; ++i) {
      host_bytes(i) = some[i * i % 61 % 7];
      host_ones(i) = host_bytes(i) != 0;
    }
    Kokkos::deep_copy(bytes, host_bytes);
    Kokkos::deep_copy(ones, host_ones);
    const auto flags = [&](const Bytes& of, std::int64_t first, std::int64_t count) {
      return Flags(reinterpret_cast<const bool*>(of.data()) + first * columns, count, columns);
    };
    const auto slice = [&](const OutMemory& memory, std::int64_t first) {
      const auto part = Kokkos::subview(memory, std::make_pair(first, first + columns));
      const auto copy = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), part);
      return std::string(reinterpret_cast<const char*>(copy.data()),
                         static_cast<std::size_t>(columns) * sizeof(Out));
    };
    const auto same_bits_of = [&](const std::string& name, std::int64_t row, const auto& call,
                                  const auto& all, const auto& alone) {
      call(Rows(x.data(), rows, columns), OutRows(y.data(), rows, columns), all);
      const std::string among_others = slice(y, row * columns);
      if (fits_tile<Out>(columns)) {
        const ks::ScopedImplementation forced("tiled_rows");
        call(Rows(x.data(), rows, columns), OutRows(y.data(), rows, columns), all);
        exec.fence();
        EXPECT_EQ(slice(y, row * columns), among_others)
            << name << ", in a tile of " << columns << " columns";
      }
      for (const std::int64_t offset : {0, 1, 3}) {
        Kokkos::parallel_for("copy",
                             Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, columns),
                             CopyRow<T>{x.data() + row * columns, one.data() + offset});
        call(Rows(one.data() + offset, 1, columns), OutRows(result.data() + 2, 1, columns), alone);
        exec.fence();
        EXPECT_EQ(among_others, slice(result, 2))
            << name << ", " << columns << " columns, row " << row << ", offset " << offset;
      }
    };
    const auto same_bits = [&](const std::string& name, std::int64_t row, const auto& all,
                               const auto& alone) {
      same_bits_of(
          name, row,
          [&](const Rows& from, const OutRows& to, const auto& t) { ks::softmax(exec, from, to, t); }, all,
          alone);
      same_bits_of(
          "log_softmax, " + name, row,
          [&](const Rows& from, const OutRows& to, const auto& t) { ks::log_softmax(exec, from, to, t); },
          all, alone);
    };
    for (std::int64_t row = 0; row < different; ++row) {
      const Kokkos::View<const float*, Kokkos::CudaSpace> its =
          Kokkos::subview(temperatures, std::make_pair(row, row + 1));
      same_bits("none", row, ks::impl::Identity(), ks::impl::Identity());
      same_bits("temperature", row, ks::temperature(temperatures), ks::temperature(its));
      same_bits("factor", row, ks::scale(-0.3), ks::scale(-0.3));
      same_bits("mask", row, ks::mask(flags(bytes, 0, rows)), ks::mask(flags(ones, row, 1)));
      same_bits("mask and factor", row, ks::mask(flags(bytes, 0, rows)) | ks::scale(0.3),
                ks::mask(flags(ones, row, 1)) | ks::scale(0.3));
      same_bits("temperature and mask", row, ks::temperature(temperatures) | ks::mask(flags(bytes, 0, rows)),
                ks::temperature(its) | ks::mask(flags(ones, row, 1)));
      same_bits("mask for all", row, ks::mask(flags(bytes, row, 1)), ks::mask(flags(ones, row, 1)));
      for (const std::int64_t offset : {std::int64_t(-7), columns / 2, columns - 20}) {
        same_bits("causal", row, ks::scale(0.3) | ks::causal(offset),
                  ks::scale(0.3) | ks::causal(offset + row));
      }
    }
  }
}

}  // namespace tests

#endif
