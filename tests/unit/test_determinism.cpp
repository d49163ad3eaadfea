// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The same row gives the same bits: alone, in a batch of any size, at any place and alignment, on any
// instance, twice.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "../support/cases.hpp"

namespace {

using namespace tests;

// Two rows of three are the probe; the others are different.
KOKKOS_INLINE_FUNCTION bool is_probe(std::int64_t row) {
  return row % 3 != 1;
}

// Columns of a row that a functor goes through at a time: to find the row of each element would take longer
// than all that is tested.
struct Piece {
  static constexpr std::int64_t size = 32;
  std::int64_t row, begin, end;
  KOKKOS_FUNCTION Piece(std::int64_t i, std::int64_t columns)
      : row(i / of_row(columns)), begin((i - row * of_row(columns)) * size), end(begin + size) {
    if (end > columns) end = columns;
  }
  KOKKOS_FUNCTION static std::int64_t of_row(std::int64_t columns) { return (columns + size - 1) / size; }
};

template <class T>
struct Fill {
  T* data;
  std::int64_t columns, row_stride, column_stride;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const Piece piece(i, columns);
    const std::uint64_t of_row =
        is_probe(piece.row) ? 99u : static_cast<std::uint64_t>(piece.row) * 0xD1B54A32D192ED03u;
    for (std::int64_t column = piece.begin; column < piece.end; ++column) {
      std::uint64_t z = static_cast<std::uint64_t>(column) * 0x9E3779B97F4A7C15u + of_row;
      z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
      z ^= z >> 29;
      data[piece.row * row_stride + column * column_stride] =
          ks::impl::store_as<T>(static_cast<float>(z >> 40) * 0x1p-20f - 8.0f);
    }
  }
};

// Rows of `logits`, which has one of the probe and so many behind it: others begin at other places of it.
template <class T>
struct CopyRows {
  static constexpr std::int64_t behind = 1000;
  T* data;
  const T* logits;
  std::int64_t columns, row_stride, column_stride;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const Piece piece(i, columns);
    const T* const from = logits + (is_probe(piece.row) ? 0 : 1 + piece.row * 37 % behind);
    T* const to = data + piece.row * row_stride;
    for (std::int64_t column = piece.begin; column < piece.end; ++column)
      to[column * column_stride] = from[column];
  }
};

template <class T>
struct CountDifferences {
  const T* data;
  const T* expected;
  std::int64_t columns, row_stride, column_stride;
  KOKKOS_FUNCTION void operator()(std::int64_t i, std::int64_t& differences) const {
    const Piece piece(i, columns);
    if (!is_probe(piece.row)) return;
    const T* const of_row = data + piece.row * row_stride;
    for (std::int64_t column = piece.begin; column < piece.end; ++column)
      differences += !have_same_bits(of_row[column * column_stride], expected[column]);
  }
};

template <class T>
struct Copy {
  const T* from;
  T* to;
  std::int64_t stride;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const { to[i] = from[i * stride]; }
};

// Elements outside of the rows that do not hold what was there.
template <class T>
struct CountWrittenPadding {
  const T* data;
  T there;
  std::int64_t size, offset, rows, columns, row_stride;
  KOKKOS_FUNCTION void operator()(std::int64_t i, std::int64_t& written) const {
    const Piece piece(i, size);
    std::int64_t row = 0, column = piece.begin - offset;  // below 0: before the rows
    if (column > 0) {
      row = column / row_stride;
      column -= row * row_stride;
    }
    for (std::int64_t at = piece.begin; at < piece.end; ++at, ++column) {
      if (column == row_stride) {
        column = 0;
        ++row;
      }
      const bool in_row = column >= 0 && row < rows && column < columns;
      written += !in_row && static_cast<float>(data[at]) != static_cast<float>(there);
    }
  }
};

struct Arrangement {
  std::int64_t rows;
  bool columns_first = false;  // the axis is the slow dimension
  std::int64_t offset = 0;     // elements: what the alignment of the first row depends on
  std::int64_t padding = 0;
  std::int64_t offset_of_output = -1;  // of y, that of x when negative
  bool in_place = false;
};

template <class T, class Exec>
class SameBits {
  using Memory = Kokkos::View<T*, typename Exec::memory_space>;
  using Range = Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>;

 public:
  SameBits(Operation operation, std::int64_t columns)
      : operation_(operation),
        columns_(columns),
        logits_(Kokkos::view_alloc(Kokkos::WithoutInitializing, "logits"), columns + CopyRows<T>::behind) {
    const auto count = static_cast<std::int64_t>(logits_.extent(0));
    const Exec exec{};
    Kokkos::parallel_for("fill", Range(exec, 0, Piece::of_row(count)), Fill<T>{logits_.data(), count, 0, 1});
  }

  // Runs the operation on so many rows; the first arrangement of each order in memory sets what the others
  // must give.
  template <class... Transform>
  void check(const Exec& exec, const Arrangement& a, const std::string& implementation = "",
             const Transform&... transform) {
    const std::int64_t row_stride = a.columns_first ? 1 : columns_ + a.padding;
    const std::int64_t column_stride = a.columns_first ? a.rows + a.padding : 1;
    const std::int64_t span = (a.rows - 1) * row_stride + (columns_ - 1) * column_stride + 1;
    const bool reduces = operation_ == Operation::logsumexp;
    const std::int64_t y_offset = a.in_place || a.offset_of_output < 0 ? a.offset : a.offset_of_output;
    const std::int64_t y_size = (reduces ? a.rows : span) + y_offset + 16;
    const Memory x(Kokkos::view_alloc(Kokkos::WithoutInitializing, "x"), a.offset + span + 16);
    const Memory y =
        a.in_place && !reduces ? x : Memory(Kokkos::view_alloc(Kokkos::WithoutInitializing, "y"), y_size);
    const T there = T(-7.0f);
    Kokkos::deep_copy(x, there);
    Kokkos::deep_copy(y, there);
    const auto strided = [&](const Memory& memory, std::int64_t offset) {
      return StridedView<T, 2, Exec>(memory.data() + offset,
                                     kokkos_layout(Layout{{a.rows, columns_}, {row_stride, column_stride}}));
    };
    const StridedView<T, 1, Exec> lse(y.data() + y_offset, kokkos_layout(Layout{{a.rows}, {1}}));
    const Exec fill_exec{};
    Kokkos::parallel_for(
        "fill", Range(fill_exec, 0, a.rows * Piece::of_row(columns_)),
        CopyRows<T>{x.data() + a.offset, logits_.data(), columns_, row_stride, column_stride});
    fill_exec.fence();
    {
      std::optional<ks::ScopedImplementation> forced;
      if (!implementation.empty()) forced.emplace(implementation);
      try {
        call(operation_, exec, strided(x, a.offset), strided(y, y_offset), lse, -1, transform...);
      } catch (const std::invalid_argument&) {
        ASSERT_FALSE(implementation.empty());
        return;  // refuses this arrangement
      }
      exec.fence();
    }
    Memory& expected = expected_[a.columns_first];
    const std::int64_t count = reduces ? 1 : columns_;
    if (expected.extent(0) == 0) {
      expected = Memory("expected", count);
      Kokkos::parallel_for("keep", Range(fill_exec, 0, count),
                           Copy<T>{y.data() + y_offset, expected.data(), reduces ? 1 : column_stride});
      fill_exec.fence();
    }
    std::int64_t differences = 0;
    Kokkos::parallel_reduce("compare", Range(fill_exec, 0, a.rows * Piece::of_row(count)),
                            CountDifferences<T>{y.data() + y_offset, expected.data(), count,
                                                reduces ? 1 : row_stride, reduces ? 1 : column_stride},
                            differences);
    EXPECT_EQ(differences, 0) << reference::name(operation_) << ' ' << ks::scalar_name<T>() << ", rows of "
                              << columns_ << ", " << a.rows << " of them"
                              << (a.columns_first ? ", axis slow" : "") << ", offset " << a.offset
                              << ", of the output " << y_offset << (a.in_place ? ", in place" : "")
                              << ", padding " << a.padding << ", ran " << ks::last_implementation();
    if (a.columns_first) return;
    std::int64_t written = 0;
    const auto y_extent = static_cast<std::int64_t>(y.extent(0));
    Kokkos::parallel_reduce(
        "look at the padding", Range(fill_exec, 0, Piece::of_row(y_extent)),
        CountWrittenPadding<T>{y.data(), there, y_extent, y_offset, a.rows, count, reduces ? 1 : row_stride},
        written);
    EXPECT_EQ(written, 0) << "padding was written: " << reference::name(operation_) << ' '
                          << ks::scalar_name<T>() << ", rows of " << columns_ << ", offset " << y_offset
                          << ", ran " << ks::last_implementation();
  }

 private:
  Operation operation_;
  std::int64_t columns_;
  Memory logits_, expected_[2];
};

// A batch of 4096, or as many as a host has patience for.
template <class Exec>
std::int64_t large_batch(std::int64_t columns) {
  const bool host = Kokkos::SpaceAccessibility<Exec, Kokkos::HostSpace>::accessible;
  return host ? std::min<std::int64_t>(4096, 6000000 / columns + 9) : 4096;
}

template <class T, class Exec>
void check_batches(std::initializer_list<std::int64_t> lengths) {
  const Exec exec{};
  for (auto operation : operations) {
    for (auto columns : lengths) {
      SameBits<T, Exec> same(operation, columns);
      const auto large = large_batch<Exec>(columns);
      for (bool slow : {false, true}) {
        same.check(exec, {1, slow});  // alone: the one that counts
        same.check(exec, {1, slow});
        for (std::int64_t rows : {std::int64_t(7), large}) {
          same.check(exec, {rows, slow});
          same.check(exec, {rows, slow});
        }
        for (std::int64_t offset : {1, 2, 3, 5, 8}) same.check(exec, {7, slow, offset, offset % 3});
        same.check(exec, {2, slow, 1});
        same.check(exec, {33, slow, 0, 1});
      }
    }
  }
}

// Rows that begin at every place between two boundaries of 16 bytes, of x and of y, dense and padded, in
// place, through every implementation: to the bits of aligned rows. `transform` has operands of `columns`
// values.
template <class T, class Exec, class MakeTransform>
void check_misalignments(std::initializer_list<std::int64_t> lengths, const MakeTransform& make_transform) {
  const Exec exec{};
  constexpr int places = 16 / sizeof(T);
  for (auto operation : operations) {
    for (auto columns : lengths) {
      make_transform(columns, [&](const auto&... transform) {
        for (const auto& name : ks::implementations<Exec>(reference::name(operation))) {
          SameBits<T, Exec> same(operation, columns);
          const std::int64_t to_boundary = (places - columns % places) % places;
          same.check(exec, {3, false, 0, to_boundary}, name, transform...);
          for (std::int64_t offset = 0; offset < places; ++offset) {
            for (std::int64_t output : {offset, std::int64_t(0), (offset + 3) % places}) {
              same.check(exec, {3, false, offset, 0, output}, name, transform...);
              same.check(exec, {5, false, offset, 1 + offset % 3, output}, name, transform...);
            }
            same.check(exec, {3, false, offset, 0, -1, true}, name, transform...);
            // More than the rows of a block where these are short.
            if (columns > 2100) continue;
            for (const std::int64_t rows : {70, 133}) {
              same.check(exec, {rows, false, offset, 0, (offset + 5 * rows) % places}, name, transform...);
              for (const std::int64_t padding : {std::int64_t(1), offset + 2, std::int64_t(9), columns / 2})
                same.check(exec, {rows, false, offset, padding, (offset + 3 * rows) % places}, name,
                           transform...);
            }
            same.check(exec, {133, false, offset, 0, -1, true}, name, transform...);
            same.check(exec, {133, false, offset, 3, -1, true}, name, transform...);
          }
        }
      });
    }
  }
}
const auto no_transform = [](std::int64_t, const auto& use) { use(); };

template <class Space>
class Determinism : public OnEveryBackend<Space> {};
TYPED_TEST_SUITE(Determinism, Backends, BackendName);

TYPED_TEST(Determinism, FloatShortRows) {
  check_batches<float, TypeParam>({1, 2, 5, 31, 33, 129, 389, 1000});
}
TYPED_TEST(Determinism, FloatLongRows) {
  check_batches<float, TypeParam>({1025, 4097, 8191, 12289, 50257, 128255});
}
TYPED_TEST(Determinism, Double) {
  check_batches<double, TypeParam>({3, 33, 389, 4097, 50257});
}
TYPED_TEST(Determinism, Half) {
  check_batches<half_t, TypeParam>({3, 33, 389, 4097, 50257});
}
TYPED_TEST(Determinism, Bfloat16) {
  check_batches<bhalf_t, TypeParam>({33, 4097});
}

TYPED_TEST(Determinism, EveryMisalignmentFloat) {
  check_misalignments<float, TypeParam>(
      {2, 33, 64, 65, 259, 515, 1000, 1001, 1025, 4096, 4097, 7172, 12288, 12291, 20003}, no_transform);
}
TYPED_TEST(Determinism, EveryMisalignmentDouble) {
  check_misalignments<double, TypeParam>({3, 64, 65, 389, 1025, 4096, 4097, 9001}, no_transform);
}
TYPED_TEST(Determinism, EveryMisalignmentHalf) {
  check_misalignments<half_t, TypeParam>(
      {3,   16,   17,   33,   49,   64,   65,   145,  150,  259,  390,   577,
       600, 1001, 1023, 1029, 1500, 2040, 2041, 2051, 4099, 8197, 16384, 20003},
      no_transform);
}
TYPED_TEST(Determinism, EveryMisalignmentBfloat16) {
  check_misalignments<bhalf_t, TypeParam>({5, 67, 200, 256, 257, 1001, 1008, 2049, 9001, 16383, 17003},
                                          no_transform);
}
TYPED_TEST(Determinism, EveryMisalignmentWithABias) {
  const auto with_bias = [](std::int64_t columns, const auto& use) {
    Kokkos::View<float*, typename TypeParam::memory_space> bias("bias", columns);
    Kokkos::deep_copy(bias, 0.25f);
    use(ks::bias(bias));
  };
  check_misalignments<float, TypeParam>({256, 259, 4096, 4097, 9000, 20003}, with_bias);
}

struct FillOperands {
  bool* keep;
  float* bias;
  std::int64_t stride = 1;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    keep[i * stride] = i % 7 != 3 && i % 11 != 5;
    bias[i * stride] = static_cast<float>(i % 13) * 0.125f;
  }
};

// A mask and a bias give the same bits wherever they begin, and side by side or not: they are read in vectors
// where they are aligned, and by way of shared memory.
template <class T, class Exec>
void check_places_of_operands(std::initializer_list<std::int64_t> lengths, std::int64_t rows = 5) {
  using Memory = typename Exec::memory_space;
  constexpr std::int64_t places = 10;  // the last one with every other element alone
  const Exec exec;
  for (const std::int64_t columns : lengths) {
    const std::int64_t size = rows * columns;
    const Kokkos::View<T**, Kokkos::LayoutRight, Memory> x("x", rows, columns), y("y", rows, columns);
    const Kokkos::View<bool*, Memory> keep("keep", 2 * size + places);
    const Kokkos::View<float*, Memory> bias("bias", 2 * size + places);
    Kokkos::parallel_for(
        "fill",
        Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, rows * Piece::of_row(columns)),
        Fill<T>{x.data(), columns, columns, 1});
    for (const auto& name : implementations_and_default<Exec>(Operation::softmax)) {
      std::optional<ks::ScopedImplementation> forced;
      if (!name.empty()) forced.emplace(name);
      std::vector<T> expected;
      for (std::int64_t place = 0; place < places; ++place) {
        const std::int64_t stride = place == places - 1 ? 2 : 1;
        Kokkos::parallel_for("fill",
                             Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, size),
                             FillOperands{keep.data() + place, bias.data() + place, stride});
        using Unmanaged = Kokkos::MemoryTraits<Kokkos::Unmanaged>;
        const auto layout = kokkos_layout(Layout{{rows, columns}, {columns * stride, stride}});
        const StridedView<const bool, 2, Exec> keep_here(keep.data() + place, layout);
        const StridedView<const float, 2, Exec> bias_here(bias.data() + place, layout);
        try {
          ks::softmax(exec, x, y, ks::mask(keep_here) | ks::bias(bias_here));
        } catch (const std::invalid_argument&) {
          break;
        }
        exec.fence();
        std::vector<T> got(static_cast<std::size_t>(size));
        Kokkos::deep_copy(Kokkos::View<T*, Kokkos::HostSpace, Unmanaged>(got.data(), size),
                          Kokkos::View<T*, Memory, Unmanaged>(y.data(), size));
        if (expected.empty()) expected = got;
        EXPECT_EQ(std::memcmp(got.data(), expected.data(), got.size() * sizeof(T)), 0)
            << ks::scalar_name<T>() << ", " << columns << " columns, operands at " << place << ", ran "
            << ks::last_implementation();
      }
    }
  }
}
TYPED_TEST(Determinism, OperandsAtAnyPlace) {
  check_places_of_operands<float, TypeParam>({64, 100, 259, 1000, 1025, 4096, 6001, 12288, 16383, 20000});
}
TYPED_TEST(Determinism, OperandsOf16BitsAtAnyPlace) {
  check_places_of_operands<bhalf_t, TypeParam>({1000, 1025, 4097, 16383});
}
// So many that each has a warp.
TYPED_TEST(Determinism, OperandsOfManyRowsAtAnyPlace) {
  check_places_of_operands<float, TypeParam>({577, 1023}, 515);
  check_places_of_operands<bhalf_t, TypeParam>({1001}, 515);
}

// More rows with operands than a device's L2 holds, which it may read in another way: the bits of the same
// rows a few at a time.
template <class T, class Exec, class MakeTransform>
void check_many_rows_of_operands(std::initializer_list<std::int64_t> lengths,
                                 const MakeTransform& transform_of) {
  using Memory = typename Exec::memory_space;
  using Range = Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>;
  if (Kokkos::SpaceAccessibility<Exec, Kokkos::HostSpace>::accessible)
    GTEST_SKIP() << "hosts do not decide by the size of a call how rows are read";
  const Exec exec;
  for (const std::int64_t columns : lengths) {
    constexpr int parts = 3;
    const std::int64_t rows_of_part =
        (std::int64_t(136) << 20) / static_cast<int>(sizeof(T)) / columns / parts + 1;
    const std::int64_t rows = parts * rows_of_part, size = rows * columns;
    const Kokkos::View<T**, Kokkos::LayoutRight, Memory> x("x", rows, columns), y("y", rows, columns),
        expected("expected", rows, columns);
    const Kokkos::View<bool**, Kokkos::LayoutRight, Memory> keep("keep", rows, columns);
    const Kokkos::View<float**, Kokkos::LayoutRight, Memory> bias("bias", rows, columns);
    Kokkos::parallel_for("fill", Range(exec, 0, rows * Piece::of_row(columns)),
                         Fill<T>{x.data(), columns, columns, 1});
    Kokkos::parallel_for("fill", Range(exec, 0, size), FillOperands{keep.data(), bias.data()});
    const auto softmax_of = [&](std::int64_t begin, std::int64_t end, const auto& to) {
      const auto some = [&](const auto& view) {
        return Kokkos::subview(view, Kokkos::make_pair(begin, end), Kokkos::ALL());
      };
      ks::softmax(exec, some(x), some(to), transform_of(some(keep), some(bias)));
    };
    softmax_of(0, rows, y);
    for (std::int64_t part = 0; part < parts; ++part)
      softmax_of(part * rows_of_part, (part + 1) * rows_of_part, expected);
    const std::int64_t differences = count_different(exec, y.data(), expected.data(), size);
    EXPECT_EQ(differences, 0) << ks::scalar_name<T>() << ", " << rows << " rows of " << columns;
  }
}
TYPED_TEST(Determinism, AMaskOfMoreRowsThanL2Holds) {
  const auto mask = [](const auto& keep, const auto&) { return ks::mask(keep); };
  check_many_rows_of_operands<float, TypeParam>({64, 1000, 4096, 5000, 12288, 16380}, mask);
  check_many_rows_of_operands<bhalf_t, TypeParam>({64, 1000, 2056, 4096, 16384}, mask);
}
TYPED_TEST(Determinism, ABiasOfMoreRowsThanL2Holds) {
  const auto bias = [](const auto&, const auto& b) { return ks::bias(b); };
  check_many_rows_of_operands<float, TypeParam>({64, 1000, 4096, 5000, 12288, 16380}, bias);
}
TYPED_TEST(Determinism, AMaskAndABiasOfMoreRowsThanL2Holds) {
  const auto both = [](const auto& keep, const auto& bias) { return ks::mask(keep) | ks::bias(bias); };
  check_many_rows_of_operands<float, TypeParam>({64, 1000, 4096, 12284}, both);
}

// The implementations between which the number of rows decides agree to the bit, wherever both take a call:
// each that is ever chosen by itself for these shapes, and those of the same arrangement that differ by the
// number of rows alone.
template <class Scalar, class Exec, class... Transform>
void check_what_is_chosen(std::int64_t columns, const Transform&... transform) {
  const Exec exec{};
  for (auto operation : operations) {
    std::vector<std::string> chosen;
    SameBits<Scalar, Exec> same(operation, columns);
    for (std::int64_t rows : {std::int64_t(1), std::int64_t(2), std::int64_t(16), std::int64_t(64),
                              std::int64_t(600), large_batch<Exec>(columns)}) {
      same.check(exec, {rows}, "", transform...);
      const std::string name = ks::last_implementation();
      if (std::find(chosen.begin(), chosen.end(), name) == chosen.end()) chosen.push_back(name);
    }
    for (const auto& name : chosen) {
      for (std::int64_t rows : {1, 3, 40}) same.check(exec, {rows}, name, transform...);
    }
  }
}
TYPED_TEST(Determinism, WhatIsChosenByTheNumberOfRowsAgrees) {
  for (std::int64_t columns : {1000, 12289, 50257, 128255}) check_what_is_chosen<float, TypeParam>(columns);
  for (std::int64_t columns :
       {24, 33, 48, 80, 97, 129, 160, 161, 192, 257, 300, 320, 321, 384, 500, 1001, 12289})
    check_what_is_chosen<double, TypeParam>(columns);
  for (std::int64_t columns : {145, 176, 200, 321, 1200, 10000, 14335, 14336, 16384, 20001, 131072})
    check_what_is_chosen<bhalf_t, TypeParam>(columns);
}

// Of `columns` columns.
template <class Exec>
auto bias_gelu_and_scale(std::int64_t columns) {
  using Memory = typename Exec::memory_space;
  const Kokkos::View<bool*, Memory> keep("keep", columns);
  const Kokkos::View<float*, Memory> bias("bias", columns);
  const Exec exec{};
  Kokkos::parallel_for("fill", Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, columns),
                       FillOperands{keep.data(), bias.data()});
  exec.fence();
  return ks::bias(bias) | ks::gelu() | ks::scale(3.0);
}
TYPED_TEST(Determinism, WhatIsChosenByTheNumberOfRowsAgreesWithATransform) {
  for (std::int64_t columns : {1000, 9217, 12289, 14001, 16383, 50257})
    check_what_is_chosen<float, TypeParam>(columns, bias_gelu_and_scale<TypeParam>(columns));
}

// Many rows with a transform that is the same for all of them, which a block may have one after the other:
// the bits of a single row that is not aligned.
TYPED_TEST(Determinism, ManyRowsWithATransformForAll) {
  const TypeParam exec{};
  for (std::int64_t columns : {2048, 4100, 7168, 8192, 12284, 16384}) {
    const auto transform = bias_gelu_and_scale<TypeParam>(columns);
    const auto rows = std::min<std::int64_t>(1100, large_batch<TypeParam>(columns));
    for (auto operation : operations) {
      SameBits<float, TypeParam> same(operation, columns);
      same.check(exec, {1, false, 1}, "", transform);
      for (std::int64_t padding : {0, 4, 1}) same.check(exec, {rows, false, 0, padding}, "", transform);
      same.check(exec, {rows, false, 0, 0, 1}, "", transform);
      same.check(exec, {rows, false, 0, 0, -1, true}, "", transform);
    }
  }
}

// Rows that a device may deal to more threads where there is more of them than its L2 holds.
TYPED_TEST(Determinism, FloatRowsOfMoreThanL2Holds) {
  if (Kokkos::SpaceAccessibility<TypeParam, Kokkos::HostSpace>::accessible)
    GTEST_SKIP() << "what hosts decide by the size of a call is in simd_rows";
  const TypeParam exec{};
  for (std::int64_t columns : {1028, 2048, 4096, 5000, 6144, 6148, 8192, 12284, 12292, 16384}) {
    const std::int64_t rows = (std::int64_t(34) << 20) / columns + 1;
    for (auto operation : operations) {
      SameBits<float, TypeParam> same(operation, columns);
      same.check(exec, {1});
      same.check(exec, {rows});
      same.check(exec, {rows, false, 0, 4});
      same.check(exec, {rows, false, 1, 1});
      same.check(exec, {rows, false, 0, 0, 1});
      same.check(exec, {rows, false, 0, 0, -1, true});
    }
  }
}

// Rows of which a device may have one in a thread, or in a few lanes, several threads' one behind the other
// where there are many.
TYPED_TEST(Determinism, RowsOfAFewColumns) {
  const TypeParam exec{};
  const bool host = Kokkos::SpaceAccessibility<TypeParam, Kokkos::HostSpace>::accessible;
  const std::int64_t many = host ? 3000 : 300001;
  const auto check = [&]<class Scalar, class... Transform>(Scalar, std::int64_t columns,
                                                           const Transform&... transform) {
    for (auto operation : operations) {
      SameBits<Scalar, TypeParam> same(operation, columns);
      for (const std::int64_t rows : {std::int64_t(1), std::int64_t(129), many})
        same.check(exec, {rows}, "", transform...);
      same.check(exec, {many, false, 1, 0, 2}, "", transform...);
      same.check(exec, {many, false, 3, 0, 8}, "", transform...);
      same.check(exec, {many, false, 8, 0, 5}, "", transform...);
      for (const std::int64_t rows : {1, 2, 129}) same.check(exec, {rows, false, 5, 0, 7}, "", transform...);
      same.check(exec, {300, false, 0, 1}, "", transform...);
      same.check(exec, {300, false, 1, 6, 0}, "", transform...);
      same.check(exec, {many, false, 0, 0, -1, true}, "", transform...);
      same.check(exec, {many, false, 3, 0, -1, true}, "", transform...);
      for (const std::int64_t rows : {300, 3000}) {
        for (const std::int64_t padding : {1, 2, 4})
          same.check(exec, {rows, false, 0, padding}, "", transform...);
      }
    }
  };
  for (std::int64_t columns :
       {2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 20, 22, 24, 25, 27, 29, 31, 33, 34, 39}) {
    check(float{}, columns);
    check(double{}, columns);
    check(ks::half_t{}, columns);
    check(ks::bhalf_t{}, columns);
  }
  for (std::int64_t columns : {36, 40, 44, 48,  50,  56,  60,  63,  65,  66,  68,  72, 80,
                               84, 96, 97, 100, 102, 104, 108, 111, 112, 116, 119, 127})
    check(float{}, columns);
  for (std::int64_t columns : {2, 5, 8, 15}) {
    check(float{}, columns, ks::scale(0.5) | ks::gelu());
    check(ks::bhalf_t{}, columns, ks::scale(0.5));
  }
}

// Short rows in slices that are dealt one by one where there are many, 64 for each of a device's
// multiprocessors.
TYPED_TEST(Determinism, ManyShortRowsInSlices) {
  if (Kokkos::SpaceAccessibility<TypeParam, Kokkos::HostSpace>::accessible)
    GTEST_SKIP() << "what hosts decide by the number of rows is in simd_rows";
  const TypeParam exec{};
  const auto check = [&]<class Scalar>(Scalar, std::initializer_list<std::int64_t> lengths) {
    for (const std::int64_t columns : lengths) {
      for (auto operation : operations) {
        SameBits<Scalar, TypeParam> same(operation, columns);
        for (const std::int64_t rows : {1, 300, 5000}) same.check(exec, {rows});
        same.check(exec, {5000, false, 1, 1});
      }
    }
  };
  check(float{}, {16388, 20001, 24576});
  check(ks::bhalf_t{}, {40002, 49152});
}

// Rows of two dimensions that are not one, and the same rows one behind the other.
TYPED_TEST(Determinism, RowsOfTwoDimensions) {
  using Memory = typename TypeParam::memory_space;
  const TypeParam exec{};
  const std::int64_t blocks = 2, rows = 3;
  for (const std::int64_t columns : {1000, 2048, 4100, 8192, 12288}) {
    const std::int64_t size = blocks * rows * columns, apart = rows * columns + 4;
    const Kokkos::View<float*, Memory> x("x", blocks * apart), y("y", blocks * apart), bias("bias", columns);
    const Kokkos::View<bool*, Memory> keep("keep", columns);
    using Range = Kokkos::RangePolicy<TypeParam, Kokkos::IndexType<std::int64_t>>;
    Kokkos::parallel_for("fill", Range(exec, 0, columns), FillOperands{keep.data(), bias.data()});
    const auto in_blocks_of = [&](const Kokkos::View<float*, Memory>& memory, std::int64_t block) {
      return StridedView<float, 3, TypeParam>(
          memory.data(), kokkos_layout(Layout{{blocks, rows, columns}, {block, columns, 1}}));
    };
    const auto check = [&](const char* what, const auto& softmax_of) {
      std::vector<std::vector<float>> got;
      for (std::int64_t block : {apart - 4, apart}) {
        for (std::int64_t b = 0; b < blocks; ++b)
          Kokkos::parallel_for("fill", Range(exec, 0, rows * Piece::of_row(columns)),
                               Fill<float>{x.data() + b * block, columns, columns, 1});
        softmax_of(in_blocks_of(x, block), in_blocks_of(y, block));
        exec.fence();
        const auto all = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace{}, y);
        auto& values = got.emplace_back();
        for (std::int64_t b = 0; b < blocks; ++b)
          values.insert(values.end(), all.data() + b * block, all.data() + b * block + rows * columns);
      }
      EXPECT_EQ(std::memcmp(got[0].data(), got[1].data(), static_cast<std::size_t>(size) * sizeof(float)), 0)
          << what << " of rows of " << columns;
    };
    check("softmax", [&](const auto& from, const auto& to) { ks::softmax(exec, from, to); });
    check("log_softmax", [&](const auto& from, const auto& to) { ks::log_softmax(exec, from, to); });
    check("softmax with a bias", [&](const auto& from, const auto& to) {
      ks::softmax(exec, from, to, ks::bias(Kokkos::View<const float*, Memory>(bias)));
    });
  }
}

TYPED_TEST(Determinism, OnAnotherInstance) {
  const TypeParam exec{};
  if (exec.concurrency() < 2) GTEST_SKIP() << "too few threads to divide";
  const auto parts = Kokkos::Experimental::partition_space(exec, 1, 1);
  for (auto operation : operations) {
    for (std::int64_t columns : {389, 128255}) {
      SameBits<float, TypeParam> same(operation, columns);
      for (std::int64_t rows : {1, 7}) {
        same.check(exec, {rows});
        for (const auto& part : parts) same.check(part, {rows});
      }
    }
  }
}

}  // namespace
