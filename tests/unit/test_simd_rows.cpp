// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What only the host's vector kernels promise: functors on vectors, which threads work, the same bits with
// and without stores past the caches. (That their results are right is what every other test asks of each
// implementation.)
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "../support/cases.hpp"
#include "../support/transform_cases.hpp"

namespace {

using namespace tests;
using Exec = Kokkos::DefaultHostExecutionSpace;
using Matrix = Kokkos::View<float**, Kokkos::LayoutRight, Exec::memory_space>;

class SimdRows : public testing::Test {
 protected:
  const ks::ScopedImplementation forced{"simd_rows"};
  const Exec exec{};
};

// --- functors ----------------------------------------------------------------------------------------------

std::atomic<std::int64_t>& vector_calls() {
  static std::atomic<std::int64_t> calls = 0;
  return calls;
}

// value / 2 + column % 5, on vectors from the first lane's column.
struct HalfPlusColumn {
  float operator()(float value, std::int64_t, std::int64_t column) const {
    return value * 0.5f + static_cast<float>(column % 5);
  }
  template <class Vector>
  Vector on_vector(Vector value, std::int64_t, std::int64_t column) const {
    static_assert(std::is_same_v<Vector, ks::simd<float>>);
    ++vector_calls();
    using Ops = ks::impl::SimdOps<float>;  // versions of Kokkos differ in how vectors are loaded and stored
    constexpr int width = static_cast<int>(Vector::size());
    float lanes[width];
    Ops::store(lanes, value);
    for (int i = 0; i < width; ++i) lanes[i] = (*this)(lanes[i], 0, column + i);
    return Ops::load(lanes);
  }
};

// The same; a functor without on_vector must not be given vectors, though it could take them.
struct HalfPlusColumnAlone {
  template <class Value>
  Value operator()(Value value, std::int64_t, std::int64_t column) const {
    static_assert(std::is_arithmetic_v<Value>, "was given a vector without on_vector");
    return value * 0.5f + static_cast<float>(column % 5);
  }
};

// Sizes of caches from what systems say of theirs, in megabytes.
TEST(HostCaches, OfWhatTheSystemSays) {
  constexpr std::size_t mega = 1024 * 1024;
  struct {
    const char* of;
    std::size_t told, cores, shared, streams_beyond;
  } const cases[] = {
      {"two cores of a group of AMD's", 32, 2, 32, 32},
      {"a group with a large cache", 96, 16, 96, 96},
      {"an Intel processor", 112, 60, 112, 112},
      {"a large one", 504, 128, 504, 384},
      {"a virtual machine of two of its cores", 260, 2, 32, 6},
      {"one of sixteen", 300, 16, 256, 48},
      {"one of 32", 300, 32, 300, 96},
      {"a system that says nothing of cores", 16, 0, 16, 16},
  };
  for (const auto& c : cases) {
    const auto sizes = ks::impl::HostCaches::of_told(c.told * mega, c.cores);
    EXPECT_EQ(sizes.shared, c.shared * mega) << c.of;
    EXPECT_EQ(sizes.streams_beyond, c.streams_beyond * mega) << c.of;
  }
}

TEST_F(SimdRows, AFunctorWithOnVectorIsGivenVectors) {
  const std::int64_t rows = 3, columns = 1000 * ks::simd<float>::size() + 1;
  const Matrix x("x", rows, columns), y("y", rows, columns), expected("expected", rows, columns);
  Random random(1);
  for (std::int64_t i = 0; i < rows * columns; ++i) x.data()[i] = static_cast<float>(random.uniform(-5, 5));
  for (const auto& chain : {0, 1}) {
    vector_calls() = 0;
    if (chain == 0) {
      ks::softmax(exec, x, y, HalfPlusColumn{});
      ks::softmax(exec, x, expected, HalfPlusColumnAlone{});
    } else {
      const auto causal = ks::causal(columns);  // drops nothing
      ks::softmax(exec, x, y, ks::scale(2) | HalfPlusColumn{} | causal | ks::relu());
      ks::softmax(exec, x, expected, ks::scale(2) | HalfPlusColumnAlone{} | causal | ks::relu());
    }
    // Once or twice for each vector, whether exponentials are kept or not.
    const std::int64_t vectors = rows * (columns / static_cast<std::int64_t>(ks::simd<float>::size()));
    EXPECT_GE(vector_calls(), vectors);
    EXPECT_LE(vector_calls(), 2 * vectors);
    for (std::int64_t i = 0; i < rows * columns; ++i)
      ASSERT_FLOAT_EQ(y.data()[i], expected.data()[i]) << "element " << i << " of chain " << chain;
  }
}

// Vectors in which a causal mask drops everything are not looked at: in short rows, in long ones, and in some
// that all threads share.
TEST_F(SimdRows, AFunctorIsGivenNothingThatACausalMaskDrops) {
  const auto width = static_cast<std::int64_t>(ks::simd<float>::size());
  for (const std::int64_t columns : {3 * width, 64 * width, 1000 * width}) {
    for (const std::int64_t rows : {3, 40}) {
      const Matrix x("x", rows, columns);
      for (const std::int64_t offset : {-rows - 1, -rows / 2, columns / 2}) {
        std::int64_t vectors = 0;
        for (std::int64_t r = 0; r < rows; ++r)
          vectors += (std::clamp<std::int64_t>(r + offset + 1, 0, columns) + width - 1) / width;
        vector_calls() = 0;
        ks::softmax(exec, x, x, ks::scale(2) | HalfPlusColumn{} | ks::causal(offset) | ks::relu());
        EXPECT_GE(vector_calls(), vectors) << rows << " x " << columns << ", offset " << offset;
        EXPECT_LE(vector_calls(), 2 * vectors) << rows << " x " << columns << ", offset " << offset;
      }
    }
  }
}

// --- threads -----------------------------------------------------------------------------------------------

struct Visitors {
  std::mutex mutex;
  std::set<std::thread::id> ids;
  void note() {
    const std::lock_guard lock(mutex);
    ids.insert(std::this_thread::get_id());
  }
};

struct NoteThread {
  Visitors* visitors;
  float operator()(float value, std::int64_t, std::int64_t column) const {
    if (column == 0 || column % 4096 == 0) visitors->note();
    return value;
  }
};

struct NoteThreadOfRange {
  Visitors* visitors;
  void operator()(std::int64_t) const { visitors->note(); }
};

struct Shape {
  std::int64_t rows, columns;
  int axis;
};

TEST_F(SimdRows, ShortWorkWakesNoOtherThread) {
  for (const Shape& s : {Shape{1, 1000, 1}, Shape{10, 1000, 1}, Shape{1000, 10, 1}, Shape{1000, 10, 0},
                         Shape{1, 12000, 1}, Shape{12000, 1, 0}}) {
    const Matrix x("x", s.rows, s.columns);
    Visitors visitors;
    ks::softmax(exec, x, x, ks::axis(s.axis), NoteThread{&visitors});
    EXPECT_EQ(visitors.ids, std::set{std::this_thread::get_id()}) << s.rows << " x " << s.columns;
  }
}

TEST_F(SimdRows, LongWorkUsesTheInstancesThreadsAndNoOthers) {
  Visitors all;
  Kokkos::parallel_for("threads", Kokkos::RangePolicy<Exec>(exec, 0, 1000 * exec.concurrency()),
                       NoteThreadOfRange{&all});
  // Many rows, a few long ones, one; and the same across the other axis.
  for (const Shape& s : {Shape{3000, 300, 1}, Shape{2, 400000, 1}, Shape{1, 1000000, 1}, Shape{300, 3000, 0},
                         Shape{400000, 2, 0}, Shape{100000, 1, 0}}) {
    const Matrix x("x", s.rows, s.columns);
    Visitors visitors;
    const std::string where = std::to_string(s.rows) + " x " + std::to_string(s.columns);
    // A thread that comes late may find its share taken: not all need to have had one, and on a busy machine
    // it takes many calls until two have.
    const std::size_t least = std::min<std::size_t>(all.ids.size(), 2);
    for (int calls = 0; calls < 1000 && visitors.ids.size() < (calls < 20 ? all.ids.size() : least); ++calls)
      ks::softmax(exec, x, x, ks::axis(s.axis), NoteThread{&visitors});
    EXPECT_GE(visitors.ids.size(), least) << where;
    EXPECT_TRUE(std::includes(all.ids.begin(), all.ids.end(), visitors.ids.begin(), visitors.ids.end()))
        << where;
  }
}

#if defined(KOKKOS_ENABLE_OPENMP) && defined(_OPENMP)
// Kokkos 4 runs what is launched in a parallel region one after the other, on the thread that launches it.
// Kokkos 5 ends the program there, unless regions may be nested: then it launches one.
TEST_F(SimdRows, WorkThatThreadsShareMayBeLaunchedInAParallelRegion) {
  if constexpr (!std::is_same_v<Exec, Kokkos::OpenMP>) GTEST_SKIP() << "not OpenMP";
  const int levels = omp_get_max_active_levels();
  if (KOKKOS_VERSION >= 50000) omp_set_max_active_levels(2);
  for (const Shape& s : {Shape{1, 100000, 1}, Shape{500, 100, 0}, Shape{2500, 100, 0}}) {
    const Matrix x("x", s.rows, s.columns), y("y", s.rows, s.columns),
        expected("expected", s.rows, s.columns);
    Random random(3);
    for (std::int64_t r = 0; r < s.rows; ++r)
      for (std::int64_t c = 0; c < s.columns; ++c) x(r, c) = static_cast<float>(random.uniform(-9, 9));
    ks::softmax(exec, x, expected, ks::axis(s.axis));
#pragma omp parallel num_threads(2)
    {
#pragma omp single
      ks::softmax(exec, x, y, ks::axis(s.axis));
    }
    EXPECT_EQ(std::memcmp(y.data(), expected.data(), y.span() * sizeof(float)), 0)
        << s.rows << " x " << s.columns;
  }
  omp_set_max_active_levels(levels);
}
#endif

// --- the same bits whatever the size of the call
// -------------------------------------------------------------

// Large calls store past the caches, fetch ahead and share rows otherwise than small ones; the bits are those
// of a row alone. 80 MB, more than the caches of most machines, at every alignment of the output.
template <class T>
void check_large(const Exec& exec, Operation operation, std::int64_t columns, int offset,
                 bool in_place = false) {
  const std::int64_t rows = (std::int64_t(80) << 20) / static_cast<std::int64_t>(sizeof(T)) / columns;
  // Kinds of rows, one after the other. Of rows that are not too long the largest logits lie anywhere at the
  // beginning, at the end, or where another chunk begins.
  const std::int64_t kinds = columns < 10000 ? 97 : 5;
  using Flat = Kokkos::View<T*, Exec::memory_space>;
  const Flat x(Kokkos::view_alloc(Kokkos::WithoutInitializing, "x"), rows * columns + offset + 64);
  const Flat y =
      in_place ? x : Flat(Kokkos::view_alloc(Kokkos::WithoutInitializing, "y"), rows * columns + offset + 64);
  using Rows =
      Kokkos::View<T**, Kokkos::LayoutRight, Exec::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  const Kokkos::View<T*, Exec::memory_space> lse("lse", 1);
  const Kokkos::View<T**, Kokkos::LayoutRight, Exec::memory_space> kind("kind", kinds, columns),
      alone("alone", kinds, columns);
  Random random(5);
  for (std::int64_t i = 0; i < kinds * columns; ++i)
    kind.data()[i] = T(static_cast<float>(random.uniform(-8, 8)));
  const std::size_t bytes = static_cast<std::size_t>(columns) * sizeof(T);
  if (kinds > 5) {
    for (std::int64_t k = 0; k < kinds; ++k) {
      const std::int64_t from[] = {k, columns - 1 - k, 4096 + k};
      const std::int64_t c = from[k % 3];
      if (c >= 0 && c < columns) kind(k, c) = T(200.0f);
    }
    kind(90, 0) = kind(91, std::min<std::int64_t>(20, columns - 1)) =
        T(std::numeric_limits<float>::quiet_NaN());
    kind(92, columns - 1) = T(std::numeric_limits<float>::infinity());
    for (std::int64_t c = 0; c < columns; ++c) kind(93, c) = T(-std::numeric_limits<float>::infinity());
  }
  for (std::int64_t k = 0; k < kinds; ++k)
    call(operation, exec, Rows(&kind(k, 0), 1, columns), Rows(&alone(k, 0), 1, columns), lse, 1);
  for (std::int64_t r = 0; r < rows; ++r)
    std::memcpy(static_cast<void*>(x.data() + offset + r * columns), &kind(r % kinds, 0), bytes);
  const T mark(-7.0f);
  for (std::int64_t i = 0; i < offset; ++i) y.data()[i] = mark;
  for (std::int64_t i = 0; i < 64; ++i) y.data()[offset + rows * columns + i] = mark;
  call(operation, exec, Rows(x.data() + offset, rows, columns), Rows(y.data() + offset, rows, columns), lse,
       1);
  std::int64_t different = 0;
  for (std::int64_t r = 0; r < rows; ++r)
    different += std::memcmp(y.data() + offset + r * columns, &alone(r % kinds, 0), bytes) != 0;
  EXPECT_EQ(different, 0) << "rows of " << columns << " " << ks::scalar_name<T>() << ", offset " << offset;
  for (std::int64_t i = 0; i < offset; ++i)
    EXPECT_EQ(static_cast<float>(y.data()[i]), -7.0f) << "before the output";
  for (std::int64_t i = 0; i < 64; ++i)
    EXPECT_EQ(static_cast<float>(y.data()[offset + rows * columns + i]), -7.0f) << "behind the output";
}

TEST_F(SimdRows, LargeCallsGiveTheBitsOfSmallOnes) {
  for (auto operation : {Operation::softmax, Operation::log_softmax}) {
    for (std::int64_t columns : {7, 64, 1003, 5001, 300001}) {
      check_large<float>(exec, operation, columns, columns % 2 == 0 ? 0 : 3);
      check_large<ks::bhalf_t>(exec, operation, columns, 1);
    }
    check_large<double>(exec, operation, 1003, 1);
    check_large<double>(exec, operation, 64, 0);
    check_large<float>(exec, operation, 128, 16);
    check_large<ks::half_t>(exec, operation, 1024, 0);
    // Rows that share lines of the output: of each number of vectors that has a loop of its own, and longer.
    for (std::int64_t columns : {17, 40, 50, 65, 90, 97, 127, 129, 150, 170, 257, 320, 513})
      check_large<float>(exec, operation, columns, static_cast<int>(columns % 16));
    for (std::int64_t columns : {9, 15, 18, 30, 33, 47, 50, 57, 70, 77, 81, 129, 500})
      check_large<double>(exec, operation, columns, static_cast<int>(columns % 8));
    for (std::int64_t columns : {17, 31, 40, 50, 70, 90, 97, 127, 129, 150, 170, 257})
      check_large<ks::half_t>(exec, operation, columns, static_cast<int>(columns % 32));
    check_large<float>(exec, operation, 4097, 5, true);
    check_large<float>(exec, operation, 4000001, 11);
    check_large<double>(exec, operation, 4000001, 3, true);
    check_large<float>(exec, operation, 33, 5);
    check_large<float>(exec, operation, 250, 16, true);
    check_large<double>(exec, operation, 61, 7);
    check_large<ks::half_t>(exec, operation, 100, 9, true);
    check_large<ks::bhalf_t>(exec, operation, 509, 31);
    // Whole lines behind the last whole step.
    check_large<float>(exec, operation, 1008, 0);
    check_large<ks::bhalf_t>(exec, operation, 1120, 32);
  }
}

// The same with a transform, of rows that end where a causal mask lets them, and that lie apart or not: slabs
// of a few rows are the small calls.
template <class T>
void check_large_transformed(const Exec& exec, Operation operation, std::int64_t columns, std::int64_t gap) {
  using Flat = Kokkos::View<T*, Exec::memory_space>;
  using Rows =
      Kokkos::View<T**, Kokkos::LayoutStride, Exec::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  const std::int64_t distance = columns + gap;
  const std::int64_t rows = (std::int64_t(80) << 20) / static_cast<std::int64_t>(sizeof(T)) / distance;
  const std::int64_t rows_of_slab = std::max<std::int64_t>(1, 200000 / distance);
  constexpr int offset = 3;
  const Flat x("x", rows * distance), y("y", rows * distance + offset),
      small("small", rows_of_slab * columns);
  // The same come again.
  const std::int64_t size = rows * distance, period = std::min<std::int64_t>(size, 1 << 20);
  Random random(9);
  for (std::int64_t i = 0; i < period; ++i) x.data()[i] = T(static_cast<float>(random.uniform(-8, 8)));
  for (std::int64_t i = period; i < size; i += period)
    std::copy_n(x.data(), std::min(period, size - i), x.data() + i);
  std::fill_n(y.data(), size + offset, T(-7.0f));
  const auto some = [&](T* data, std::int64_t first, std::int64_t count, std::int64_t row_distance) {
    return Rows(data + first * row_distance, Kokkos::LayoutStride(count, row_distance, columns, 1));
  };
  const Kokkos::View<T*, Exec::memory_space> lse("lse", 1);
  for (const bool ends : {false, true}) {
    const auto run = [&](const Rows& from, const Rows& to, std::int64_t first) {
      const auto causal = ks::causal(first - rows / 2);
      if (ends) {
        call(operation, exec, from, to, lse, 1, ks::scale(0.5f) | causal);
      } else {
        call(operation, exec, from, to, lse, 1, ks::scale(0.5f) | ks::relu());
      }
    };
    run(some(x.data(), 0, rows, distance), some(y.data() + offset, 0, rows, distance), 0);
    std::int64_t different = 0;
    for (std::int64_t first = 0; first < rows; first += rows_of_slab) {
      const std::int64_t count = std::min(rows_of_slab, rows - first);
      run(some(x.data(), first, count, distance), some(small.data(), 0, count, columns), first);
      for (std::int64_t r = 0; r < count; ++r) {
        const T* const row = y.data() + offset + (first + r) * distance;
        different +=
            std::memcmp(row, small.data() + r * columns, static_cast<std::size_t>(columns) * sizeof(T)) != 0;
        for (std::int64_t c = columns; c < distance; ++c) different += static_cast<float>(row[c]) != -7.0f;
      }
    }
    EXPECT_EQ(different, 0) << "rows of " << columns << " " << ks::scalar_name<T>() << ", " << gap << " apart"
                            << (ends ? ", that end" : "");
  }
}

TEST_F(SimdRows, LargeCallsWithTransformsGiveTheBitsOfSmallOnes) {
  for (auto operation : {Operation::softmax, Operation::log_softmax}) {
    for (std::int64_t gap : {0, 7}) {
      for (std::int64_t columns : {17, 64, 100, 300, 1008, 5001, 70001}) {
        check_large_transformed<float>(exec, operation, columns, gap);
        check_large_transformed<ks::bhalf_t>(exec, operation, columns, gap);
      }
      check_large_transformed<double>(exec, operation, 61, gap);
      check_large_transformed<double>(exec, operation, 5001, gap);
    }
  }
}

// Rows of one chunk go in batches, those of one or two steps of vectors in a loop of their own when batches
// are full: in cache, in place or not, wherever a row is among others, its bits are those of the row alone.
template <class T>
void check_batches(const Exec& exec, Operation operation, bool in_place) {
  constexpr std::int64_t rows = 70;
  for (std::int64_t columns :
       {1, 16, 31, 32, 33, 64, 100, 128, 192, 512, 600, 2047, 2048, 4096, 4100, 9000}) {
    using Rows = Kokkos::View<T**, Kokkos::LayoutRight, Exec::memory_space>;
    const Rows x("x", rows, columns), y("y", rows, columns), row("row", 1, columns),
        alone("alone", 1, columns), expected("expected", rows, columns);
    const Kokkos::View<T*, Exec::memory_space> lse("lse", rows), lse_alone("lse_alone", 1);
    Random random(7);
    for (std::int64_t i = 0; i < rows * columns; ++i)
      x.data()[i] = T(static_cast<float>(random.uniform(-9, 9)));
    const std::size_t bytes = static_cast<std::size_t>(columns) * sizeof(T);
    for (std::int64_t r = 0; r < rows; ++r) {
      std::memcpy(static_cast<void*>(row.data()), &x(r, 0), bytes);
      call(operation, exec, row, alone, lse_alone, 1);
      std::memcpy(static_cast<void*>(&expected(r, 0)), alone.data(), bytes);
    }
    call(operation, exec, x, in_place ? x : y, lse, 1);
    EXPECT_EQ(std::memcmp((in_place ? x : y).data(), expected.data(), bytes * rows), 0)
        << rows << " rows of " << columns << " " << ks::scalar_name<T>() << (in_place ? " in place" : "");
  }
}
TEST_F(SimdRows, BatchesGiveTheBitsOfRowsAlone) {
  for (auto operation : {Operation::softmax, Operation::log_softmax}) {
    for (bool in_place : {false, true}) {
      check_batches<float>(exec, operation, in_place);
      check_batches<double>(exec, operation, in_place);
      check_batches<ks::half_t>(exec, operation, in_place);
      check_batches<ks::bhalf_t>(exec, operation, in_place);
    }
  }
}

// Along the other axis: columns of tiles that wait as a whole, and of those that are read twice; whole and
// part tiles, at a distance that shares sets of the caches and at one that does not.
TEST_F(SimdRows, TilesGiveTheBitsOfColumnsAlone) {
  for (const Shape& s : {Shape{40, 16384, 0}, Shape{1000, 3000, 0}, Shape{1030, 1000, 0},
                         Shape{5000, 1100, 0}, Shape{3000, 8192, 0}}) {
    const Matrix x(Kokkos::view_alloc(Kokkos::WithoutInitializing, "x"), s.rows, s.columns),
        y(Kokkos::view_alloc(Kokkos::WithoutInitializing, "y"), s.rows, s.columns);
    Random random(6);
    for (std::int64_t r = 0; r < s.rows; ++r) {
      const auto value = static_cast<float>(random.uniform(-8, 8));
      for (std::int64_t c = 0; c < s.columns; ++c) x(r, c) = value;
    }
    const Kokkos::View<float**, Kokkos::LayoutRight, Exec::memory_space> thin("thin", s.rows, 17),
        alone("alone", s.rows, 17);
    for (std::int64_t r = 0; r < s.rows; ++r)
      for (std::int64_t c = 0; c < 17; ++c) thin(r, c) = x(r, c);
    ks::softmax(exec, x, y, ks::axis(0));
    ks::softmax(exec, thin, alone, ks::axis(0));
    std::int64_t different = 0;
    for (std::int64_t r = 0; r < s.rows; ++r)
      for (std::int64_t c = 0; c < s.columns; ++c) different += !have_same_bits(y(r, c), alone(r, 0));
    EXPECT_EQ(different, 0) << s.rows << " x " << s.columns;
    for (std::int64_t c = 0; c < 17; ++c)
      EXPECT_EQ(std::memcmp(&alone(s.rows - 1, c), &alone(s.rows - 1, 0), sizeof(float)), 0);
  }
}

// Tiles of every width have vectors that are whole and one that is not, in groups that are full and one that
// is not; their columns lie wherever padding puts them, in place or not. A row's bits are those it has among
// 16 others, and no byte of the padding changes.
template <class T>
void check_tile_widths(const Exec& exec, Operation operation, bool in_place) {
  using Rows = Kokkos::View<T**, Kokkos::LayoutRight, Exec::memory_space>;
  using Padded =
      Kokkos::View<T**, Kokkos::LayoutStride, Exec::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  const Kokkos::View<T*, Exec::memory_space> lse("lse", 0);
  for (const std::int64_t columns : {1, 31, 33, 70, 1025, 4097}) {
    for (const std::int64_t width : {17, 31, 40, 64, 77, 112, 120, 128, 141, 300}) {
      if (columns > 1000 && width != 31 && width != 141) continue;
      for (const std::int64_t padding : {0, 5}) {
        const std::int64_t distance = width + padding;
        const auto bytes = static_cast<std::size_t>(columns * distance) * sizeof(T);
        const Kokkos::View<T*, Exec::memory_space> x("x", columns * distance), y("y", columns * distance),
            kept("kept", columns * distance);
        const Rows thin("thin", columns, 17), alone("alone", columns, 17);
        Random random(8);
        for (std::int64_t i = 0; i < columns * distance; ++i) {
          x.data()[i] = T(static_cast<float>(random.uniform(-9, 9)));
          y.data()[i] = T(-7.0f);
        }
        std::memcpy(static_cast<void*>(kept.data()), in_place ? x.data() : y.data(), bytes);
        const Kokkos::LayoutStride layout(columns, distance, width, 1);
        const Rows logits("logits", columns, width);
        for (std::int64_t c = 0; c < columns; ++c)
          std::memcpy(static_cast<void*>(&logits(c, 0)), x.data() + c * distance,
                      static_cast<std::size_t>(width) * sizeof(T));
        T* out = in_place ? x.data() : y.data();
        call(operation, exec, Padded(x.data(), layout), Padded(out, layout), lse, 0);
        std::int64_t different = 0;
        for (std::int64_t first = 0; first < width;
             first = first + 17 < width ? std::min(first + 17, width - 17) : width) {
          for (std::int64_t c = 0; c < columns; ++c)
            std::memcpy(static_cast<void*>(&thin(c, 0)), &logits(c, first), 17 * sizeof(T));
          call(operation, exec, thin, alone, lse, 0);
          for (std::int64_t c = 0; c < columns; ++c)
            different += std::memcmp(out + c * distance + first, &alone(c, 0), 17 * sizeof(T)) != 0;
        }
        for (std::int64_t i = 0; i < columns * distance; ++i)
          different += i % distance >= width && !have_same_bits(out[i], kept.data()[i]);
        EXPECT_EQ(different, 0) << columns << " x " << width << " + " << padding << " "
                                << ks::scalar_name<T>() << (in_place ? " in place" : "");
      }
    }
  }
}
TEST_F(SimdRows, TilesOfEveryWidthGiveTheBitsOfThinOnes) {
  for (auto operation : {Operation::softmax, Operation::log_softmax}) {
    for (bool in_place : {false, true}) {
      check_tile_widths<float>(exec, operation, in_place);
      check_tile_widths<double>(exec, operation, in_place);
      check_tile_widths<ks::half_t>(exec, operation, in_place);
      check_tile_widths<ks::bhalf_t>(exec, operation, in_place);
    }
  }
}

template <class T>
bool differs(const T& a, const T& b) {
  const bool nan = a != a && b != b;  // of either sign
  return !nan && !have_same_bits(a, b);
}
// Few neighbours: blocks of columns share vectors, in runs of one slab or of many. The bits are those of the
// same rows among more neighbours; with -inf, +inf and NaN among the logits; wherever padding puts columns
// and slabs, in place or not, and no byte of the padding changes.
template <class T>
void check_few_neighbours(const Exec& exec, Operation operation, bool in_place) {
  using Thin = Kokkos::View<T**, Kokkos::LayoutRight, Exec::memory_space>;
  using Slabs =
      Kokkos::View<T***, Kokkos::LayoutStride, Exec::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  struct Extents {
    std::int64_t slabs, columns, width;
  };
  std::vector<Extents> all;
  for (const std::int64_t width : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15}) {
    for (const std::int64_t columns : {1, 7, 32, 33, 100}) all.push_back({40, columns, width});
    all.push_back({3, 2047, width});
    all.push_back({width < 3 ? 19 : 3, 4131, width});
  }
  for (const std::int64_t width : {21, 32, 63}) {
    for (const std::int64_t columns : {35, 2100}) all.push_back({3, columns, width});
    if (width == 21) {
      all.push_back({40, 70, width});
      all.push_back({14, 2100, width});
    }
  }
  for (const Extents& e : all) {
    for (const std::int64_t padding : {0, 3}) {
      const std::int64_t distance = e.width + padding, slab = e.columns * distance + 2 * padding;
      const std::int64_t size = e.slabs * slab, many = e.width < 17 ? 17 : 64;
      const Kokkos::View<T*, Exec::memory_space> x("x", size + 1), y("y", size + 1);
      const Kokkos::View<T**, Kokkos::LayoutRight, Exec::memory_space> lse("lse", e.slabs, e.width);
      const Kokkos::View<T*, Exec::memory_space> lse_alone("lse_alone", many);
      Random random(9);
      for (std::int64_t i = 0; i < size; ++i) {
        x(i) = T(static_cast<float>(random.uniform(-9, 9)));
        y(i) = T(-7.0f);
      }
      const auto at = [&](std::int64_t s, std::int64_t c, std::int64_t r) {
        return s * slab + c * distance + r;
      };
      const float infinity = std::numeric_limits<float>::infinity();
      x(at(0, e.columns / 2, 0)) = T(infinity);
      x(at(1, e.columns - 1, e.width - 1)) = T(std::numeric_limits<float>::quiet_NaN());
      for (std::int64_t c = 0; c < e.columns; ++c) x(at(2, c, e.width / 2)) = T(-infinity);
      std::vector<T> logits(x.data(), x.data() + size),
          kept(in_place ? x.data() : y.data(), (in_place ? x.data() : y.data()) + size);
      // An output that begins elsewhere in a cache line.
      T* out = in_place ? x.data() : y.data() + (padding > 0 ? 1 : 0);
      if (!in_place) std::copy(kept.begin(), kept.end(), out);
      const Kokkos::LayoutStride layout(e.slabs, slab, e.columns, distance, e.width, 1);
      call(operation, exec, Slabs(x.data(), layout), Slabs(out, layout), lse, 1);
      const Thin thin("thin", e.columns, many), alone("alone", e.columns, many);
      std::int64_t different = 0;
      for (std::int64_t s = 0; s<e.slabs; s += e.slabs> 3 ? 13 : 1) {
        for (std::int64_t c = 0; c < e.columns; ++c)
          for (std::int64_t r = 0; r < many; ++r)
            thin(c, r) = logits[static_cast<std::size_t>(at(s, c, r % e.width))];
        call(operation, exec, thin, alone, lse_alone, 0);
        for (std::int64_t r = 0; r < e.width; ++r) {
          if (operation == Operation::logsumexp) {
            different += differs(lse(s, r), lse_alone(r));
          } else {
            for (std::int64_t c = 0; c < e.columns; ++c) different += differs(out[at(s, c, r)], alone(c, r));
          }
        }
      }
      for (std::int64_t i = 0; i < size; ++i) {
        const bool is_padding = i % slab >= e.columns * distance || i % slab % distance >= e.width;
        if (is_padding || operation == Operation::logsumexp)
          different += !have_same_bits(out[i], kept[static_cast<std::size_t>(i)]);
      }
      EXPECT_EQ(different, 0) << e.slabs << " x " << e.columns << " x " << e.width << " + " << padding << " "
                              << ks::scalar_name<T>() << (in_place ? " in place" : "");
    }
  }
}
TEST_F(SimdRows, FewNeighboursGiveTheBitsOfMany) {
  for (auto operation : operations) {
    for (bool in_place : {false, true}) {
      check_few_neighbours<float>(exec, operation, in_place);
      check_few_neighbours<double>(exec, operation, in_place);
      check_few_neighbours<ks::half_t>(exec, operation, in_place);
      check_few_neighbours<ks::bhalf_t>(exec, operation, in_place);
    }
  }
}

// Many neighbours: a tile is written while the next one is reduced. Whole tiles and a part of one, of one
// slab or of several; blocks and chunks of columns that are whole or not; with -inf, +inf and NaN among the
// logits; at a distance of a power of two or wherever padding puts columns, in place or not, with a transform
// or without. A row's bits are those it has among 16 others, and no byte of the padding changes.
struct RiseByColumn {
  float operator()(float value, std::int64_t row, std::int64_t column) const {
    return value * 0.5f + static_cast<float>(column % 5) - static_cast<float>(row % 3);
  }
};
struct ManyNeighbours {
  std::int64_t slabs, columns, width, padding;
  bool in_place = false;
  std::int64_t offset = 0;  // of the output
};
template <class T, class... Transform>
void check_many_neighbours(const Exec& exec, Operation operation, const ManyNeighbours& n,
                           const Transform&... transform) {
  using Slabs =
      Kokkos::View<T***, Kokkos::LayoutStride, Exec::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  constexpr std::int64_t few = 17;
  const std::int64_t distance = n.width + n.padding, slab = n.columns * distance + n.padding;
  const std::int64_t size = n.slabs * slab;
  const Kokkos::View<T*, Exec::memory_space> x(Kokkos::view_alloc(Kokkos::WithoutInitializing, "x"), size),
      y(Kokkos::view_alloc(Kokkos::WithoutInitializing, "y"), size + n.offset);
  Random random(12);
  std::vector<T> some(4099);
  for (T& v : some) v = T(static_cast<float>(random.uniform(-9, 9)));
  for (std::int64_t i = 0; i < size; ++i) x(i) = some[static_cast<std::size_t>(i % 4099)];
  for (std::int64_t i = 0; i < size + n.offset; ++i) y(i) = T(-7.0f);
  const auto at = [&](std::int64_t s, std::int64_t c, std::int64_t r) { return s * slab + c * distance + r; };
  const float infinity = std::numeric_limits<float>::infinity();
  x(at(0, n.columns / 2, 0)) = T(infinity);
  x(at(0, n.columns / 3, n.width / 2)) = T(infinity);
  x(at(n.slabs - 1, n.columns - 1, n.width - 1)) = T(std::numeric_limits<float>::quiet_NaN());
  for (std::int64_t c = 0; c < n.columns; ++c) {
    x(at(0, c, n.width - 2)) = T(-infinity);
    if (c < n.columns - 1 || n.columns == 1) x(at(n.slabs / 2, c, 5)) = T(-infinity);
  }
  std::vector<T> logits(x.data(), x.data() + size);
  T* const out = n.in_place ? x.data() : y.data() + n.offset;
  const std::vector<T> kept(out, out + size);
  const Kokkos::LayoutStride layout(n.slabs, slab, n.columns, distance, n.width, 1);
  call(operation, exec, Slabs(x.data(), layout), Slabs(out, layout),
       Kokkos::View<T**, Exec::memory_space>("lse", 0, 0), 1, transform...);
  // The same rows, a few neighbours of a slab at a time: those at the edges of tiles, and some others.
  std::vector<std::int64_t> firsts{0, n.width - few};
  for (std::int64_t first = 56; first + few <= n.width; first += n.columns > 200 ? 128 : 64)
    firsts.push_back(first);
  std::int64_t different = 0;
  const Kokkos::View<T**, Kokkos::LayoutRight, Exec::memory_space> thin("thin", n.columns, n.width),
      alone("alone", n.columns, n.width);
  using Part =
      Kokkos::View<T***, Kokkos::LayoutStride, Exec::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  for (std::int64_t s = 0; s < n.slabs; ++s) {
    for (const std::int64_t first : firsts) {
      // A transform sees the rows' numbers: so many before these that they are the same but for multiples
      // of 3.
      const std::int64_t skipped = (s * n.width + first) % 3;
      const Kokkos::LayoutStride of_part(1, n.columns * n.width, n.columns, n.width, skipped + few, 1);
      for (std::int64_t c = 0; c < n.columns; ++c)
        for (std::int64_t r = 0; r < few; ++r)
          thin(c, skipped + r) = logits[static_cast<std::size_t>(at(s, c, first + r))];
      call(operation, exec, Part(thin.data(), of_part), Part(alone.data(), of_part),
           Kokkos::View<T**, Exec::memory_space>("lse", 0, 0), 1, transform...);
      for (std::int64_t c = 0; c < n.columns; ++c)
        for (std::int64_t r = 0; r < few; ++r)
          different += differs(out[at(s, c, first + r)], alone(c, skipped + r));
    }
  }
  for (std::int64_t i = 0; i < size; ++i) {
    if (i % slab >= n.columns * distance || i % slab % distance >= n.width)
      different += !have_same_bits(out[i], kept[static_cast<std::size_t>(i)]);
  }
  EXPECT_EQ(different, 0) << n.slabs << " x " << n.columns << " x " << n.width << " + " << n.padding << " "
                          << ks::scalar_name<T>() << (n.in_place ? " in place" : "");
}
TEST_F(SimdRows, ManyNeighboursGiveTheBitsOfFew) {
  // Enough tiles, of 128 rows, for each thread to have some behind each other.
  const std::int64_t tiles = std::int64_t(4) * exec.concurrency();
  if (tiles > 256) GTEST_SKIP() << "more threads than the matrices of this test have columns for";
  for (auto operation : {Operation::softmax, Operation::log_softmax}) {
    for (bool in_place : {false, true}) {
      for (const std::int64_t columns : {1, 7, 33, 100, 1025, 2090}) {
        const ManyNeighbours n{1, columns, tiles * 128 + 37, columns % 2 == 0 ? 0 : 11, in_place};
        check_many_neighbours<float>(exec, operation, n);
        if (columns > 1000 && in_place) continue;
        check_many_neighbours<double>(exec, operation, n);
        check_many_neighbours<ks::half_t>(exec, operation, n);
        check_many_neighbours<ks::bhalf_t>(exec, operation, n);
      }
      check_many_neighbours<float>(exec, operation, {1, 64, tiles * 128, 0, in_place});
      check_many_neighbours<float>(exec, operation, {tiles, 70, 150, 3, in_place});
      check_many_neighbours<float>(exec, operation, {tiles, 2049, 128, 0, in_place});
      check_many_neighbours<float>(exec, operation, {1, 70, tiles * 128 + 5, 9, in_place}, RiseByColumn());
      check_many_neighbours<float>(exec, operation, {1, 2100, tiles * 128 + 5, 9, in_place}, RiseByColumn());
    }
    check_many_neighbours<float>(exec, operation, {1, 70, tiles * 128, 0, false, 3});
  }
}
// One array, or two, whose columns all threads share; exponentials wait in the output, if that is not the
// input, and has the sums' scalar. Vectors that go round from column to column, and those that do not.
TEST_F(SimdRows, ArraysThatThreadsShareGiveTheBitsOfFewNeighbours) {
  for (const bool in_place : {false, true}) {
    for (const std::int64_t columns : {97, 514, 1003, 2048, 2051}) {
      for (const std::int64_t width : {18, 33, 37, 100, 256, 500, 515, 1000}) {
        if (columns * width > 600000 && in_place) continue;
        const ManyNeighbours n{1, columns, width, 0, in_place, columns % 2};
        check_many_neighbours<float>(exec, Operation::softmax, n);
        if (width <= 515) check_many_neighbours<double>(exec, Operation::softmax, n);
        check_many_neighbours<float>(exec, Operation::log_softmax, n);
        if (width <= 100) {
          check_many_neighbours<ks::bhalf_t>(exec, Operation::softmax, n);
          check_many_neighbours<float>(exec, Operation::softmax, n, RiseByColumn());
        }
      }
    }
    check_many_neighbours<float>(exec, Operation::softmax, {2, 514, 100, 0, in_place});
    check_many_neighbours<float>(exec, Operation::softmax, {3, 514, 37, 0, in_place});
    check_many_neighbours<double>(exec, Operation::softmax, {2, 1003, 33, 0, in_place}, RiseByColumn());
  }
}
// Wider ones, and such whose columns share sets of the cache, of which nothing waits where more than two
// threads share them. (ctest has an entry with five.)
TEST_F(SimdRows, WideArraysThatThreadsShareGiveTheBitsOfFewNeighbours) {
  for (const bool in_place : {false, true}) {
    for (auto operation : {Operation::softmax, Operation::log_softmax}) {
      for (const std::int64_t width : {512, 1024, 1030, 1500, 2048, 4096, 4097}) {
        const ManyNeighbours n{1, 300, width, 0, in_place, width % 4};
        check_many_neighbours<float>(exec, operation, n);
        if (width <= 1500) check_many_neighbours<double>(exec, operation, n);
        if (width <= 2048) check_many_neighbours<ks::bhalf_t>(exec, operation, n);
      }
      check_many_neighbours<float>(exec, operation, {1, 1000, 512, 0, in_place});
      check_many_neighbours<float>(exec, operation, {5, 70, 512, 0, in_place});
      check_many_neighbours<float>(exec, operation, {20, 40, 1024, 0, in_place});
      check_many_neighbours<float>(exec, operation, {3, 300, 700, 0, in_place});
      check_many_neighbours<float>(exec, operation, {1, 300, 1024, 0, in_place}, RiseByColumn());
    }
  }
}
// 80 MB: past the caches, where lines of the output are whole, in each tile or not.
TEST_F(SimdRows, LargeMatricesGiveTheBitsOfFewNeighbours) {
  for (auto operation : {Operation::softmax, Operation::log_softmax}) {
    check_many_neighbours<float>(exec, operation, {1, 1300, 8192, 0});
    check_many_neighbours<float>(exec, operation, {1, 1300, 8192, 0, true});
    check_many_neighbours<float>(exec, operation, {1, 2500, 4080, 16});
    check_many_neighbours<float>(exec, operation, {1, 2500, 4080, 0, false, 5});
    check_many_neighbours<double>(exec, operation, {3, 333, 5000, 0});
    check_many_neighbours<ks::bhalf_t>(exec, operation, {1, 1300, 16384, 0});
    check_many_neighbours<ks::half_t>(exec, operation, {1, 5000, 4000, 32});
  }
}

// Slabs whose columns continue each other are written past the caches as one array, whose lines blocks, slabs
// and threads share. 80 MB; the bits are those of columns that padding keeps apart.
template <class T>
void check_large_slabs(const Exec& exec, Operation operation, std::int64_t columns, std::int64_t width,
                       int offset, bool in_place = false) {
  const std::int64_t slab = columns * width;
  const std::int64_t slabs = (std::int64_t(80) << 20) / static_cast<std::int64_t>(sizeof(T)) / slab;
  const std::int64_t kinds = std::min<std::int64_t>(3, slabs);  // of slabs, one after the other
  const std::int64_t size = slabs * slab;
  using Flat = Kokkos::View<T*, Exec::memory_space>;
  using Slabs =
      Kokkos::View<T***, Kokkos::LayoutStride, Exec::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  const Flat x(Kokkos::view_alloc(Kokkos::WithoutInitializing, "x"), size + offset + 64);
  const Flat y =
      in_place ? x : Flat(Kokkos::view_alloc(Kokkos::WithoutInitializing, "y"), size + offset + 64);
  const Kokkos::View<T***, Kokkos::LayoutRight, Exec::memory_space> kind("kind", kinds, columns, width + 1);
  const Kokkos::View<T**, Kokkos::LayoutRight, Exec::memory_space> lse("lse", 0, 0);
  Random random(11);
  for (std::int64_t i = 0; i < kinds * columns * (width + 1); ++i)
    kind.data()[i] = T(static_cast<float>(random.uniform(-8, 8)));
  const std::size_t bytes = static_cast<std::size_t>(width) * sizeof(T);
  for (std::int64_t i = 0; i < slabs * columns; ++i)
    std::memcpy(static_cast<void*>(x.data() + offset + i * width), &kind(i / columns % kinds, i % columns, 0),
                bytes);
  const T mark(-7.0f);
  for (std::int64_t i = 0; i < offset; ++i) y.data()[i] = mark;
  for (std::int64_t i = 0; i < 64; ++i) y.data()[offset + size + i] = mark;
  const Kokkos::LayoutStride layout(slabs, slab, columns, width, width, 1);
  call(operation, exec, Slabs(x.data() + offset, layout), Slabs(y.data() + offset, layout), lse, 1);
  const Kokkos::LayoutStride apart(kinds, columns * (width + 1), columns, width + 1, width, 1);
  call(operation, exec, Slabs(kind.data(), apart), Slabs(kind.data(), apart), lse, 1);
  std::int64_t different = 0;
  for (std::int64_t i = 0; i < slabs * columns; ++i)
    different +=
        std::memcmp(y.data() + offset + i * width, &kind(i / columns % kinds, i % columns, 0), bytes) != 0;
  EXPECT_EQ(different, 0) << columns << " x " << width << " " << ks::scalar_name<T>() << ", offset "
                          << offset;
  for (std::int64_t i = 0; i < offset; ++i)
    EXPECT_EQ(static_cast<float>(y.data()[i]), -7.0f) << "before the output";
  for (std::int64_t i = 0; i < 64; ++i)
    EXPECT_EQ(static_cast<float>(y.data()[offset + size + i]), -7.0f) << "behind the output";
}

TEST_F(SimdRows, LargeSlabsGiveTheBitsOfColumnsApart) {
  for (auto operation : {Operation::softmax, Operation::log_softmax}) {
    check_large_slabs<float>(exec, operation, 70, 49, 3);
    check_large_slabs<float>(exec, operation, 64, 100, 0, true);
    check_large_slabs<float>(exec, operation, 300, 250, 16);
    check_large_slabs<ks::bhalf_t>(exec, operation, 37, 33, 1);
  }
  check_large_slabs<double>(exec, Operation::softmax, 2100, 17, 1, true);
  check_large_slabs<float>(exec, Operation::softmax, 160000, 131, 5);
}

// Rows that are neighbours in x alone, or in neither, have the bits that they have where they are neighbours
// in y, too.
template <class T>
void check_layouts(const Exec& exec, Operation operation) {
  using Strided =
      Kokkos::View<T**, Kokkos::LayoutStride, Exec::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  const Kokkos::View<T*, Exec::memory_space> lse("lse", 0);
  for (const std::int64_t columns : {1, 10, 33, 100, 2100}) {
    for (const std::int64_t rows : {5, 70, 300}) {
      const std::int64_t size = columns * rows;
      const Kokkos::LayoutStride layouts[] = {Kokkos::LayoutStride(columns, rows, rows, 1),
                                              Kokkos::LayoutStride(columns, 1, rows, columns),
                                              Kokkos::LayoutStride(columns, 2 * rows, rows, 2),
                                              Kokkos::LayoutStride(columns, 2, rows, 2 * columns)};
      const Kokkos::View<T*, Exec::memory_space> x("x", 2 * size), y("y", 2 * size),
          expected("expected", size);
      Random random(10);
      const auto fill = [&](const Kokkos::LayoutStride& layout) {
        random = Random(10);
        const Strided logits(x.data(), layout);
        for (std::int64_t c = 0; c < columns; ++c)
          for (std::int64_t r = 0; r < rows; ++r) logits(c, r) = T(static_cast<float>(random.uniform(-9, 9)));
      };
      fill(layouts[0]);
      const Strided result(expected.data(), layouts[0]);
      call(operation, exec, Strided(x.data(), layouts[0]), result, lse, 0);
      for (const auto& from : {layouts[0], layouts[2]}) {
        fill(from);
        for (const auto& to : layouts) {
          Kokkos::deep_copy(y, T(-7.0f));
          const Strided out(y.data(), to);
          call(operation, exec, Strided(x.data(), from), out, lse, 0);
          std::int64_t different = 0;
          for (std::int64_t c = 0; c < columns; ++c) {
            for (std::int64_t r = 0; r < rows; ++r) {
              different += !have_same_bits(out(c, r), result(c, r));
              out(c, r) = T(-7.0f);
            }
          }
          for (std::int64_t i = 0; i < 2 * size; ++i) different += static_cast<float>(y(i)) != -7.0f;
          EXPECT_EQ(different, 0) << columns << " x " << rows << ", from a distance of " << from.stride[0]
                                  << " to " << to.stride[0] << ' ' << ks::scalar_name<T>();
        }
      }
    }
  }
}
TEST_F(SimdRows, OtherLayoutsGiveTheBitsOfNeighbours) {
  for (auto operation : {Operation::softmax, Operation::log_softmax}) {
    check_layouts<float>(exec, operation);
    check_layouts<double>(exec, operation);
    check_layouts<ks::half_t>(exec, operation);
    check_layouts<ks::bhalf_t>(exec, operation);
  }
}

// Rows that are contiguous in x and neighbours in y, or the other way round, are transposed on their way: the
// bits are those of a y like x, and what lies between is left alone.
template <class T, class... Transform>
void check_transposed(const Exec& exec, Operation operation, std::int64_t rows, std::int64_t columns,
                      const Transform&... transform) {
  using Strided =
      Kokkos::View<T**, Kokkos::LayoutStride, Exec::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  const Kokkos::View<T*, Exec::memory_space> lse("lse", 0);
  for (const std::int64_t padding : {0, 3}) {
    const Kokkos::LayoutStride contiguous(rows, columns + padding, columns, 1),
        neighbours(rows, 1, columns, rows + padding);
    const std::int64_t size = (rows + padding) * (columns + padding);
    const Kokkos::View<T*, Exec::memory_space> x("x", size), expected("expected", size),
        y("y", size + padding);
    for (const bool from_contiguous : {true, false}) {
      const auto& from = from_contiguous ? contiguous : neighbours;
      const Strided logits(x.data(), from), result(expected.data(), from),
          out(y.data() + padding, from_contiguous ? neighbours : contiguous);
      Random random(11);
      for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t c = 0; c < columns; ++c)
          logits(r, c) = T(static_cast<float>(random.uniform(-9, 9)));
      // Rows of nothing, of NaN and of +inf beside others.
      for (std::int64_t c = 0; rows > 2 && c < columns; ++c) logits(1, c) = T(-HUGE_VALF);
      if (rows > 5) {
        logits(3, columns / 2) = T(std::nanf(""));
        logits(rows - 2, columns - 1) = T(HUGE_VALF);
      }
      Kokkos::deep_copy(y, T(-7.0f));
      call(operation, exec, logits, result, lse, 1, transform...);
      call(operation, exec, logits, out, lse, 1, transform...);
      std::int64_t different = 0;
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t c = 0; c < columns; ++c) {
          const auto a = static_cast<float>(out(r, c)), b = static_cast<float>(result(r, c));
          different += !have_same_bits(out(r, c), result(r, c)) && !(a != a && b != b);
          out(r, c) = T(-7.0f);
        }
      }
      for (std::int64_t i = 0; i < size + padding; ++i) different += static_cast<float>(y(i)) != -7.0f;
      EXPECT_EQ(different, 0) << rows << " x " << columns << " + " << padding << " from "
                              << (from_contiguous ? "contiguous rows " : "neighbours ")
                              << ks::scalar_name<T>();
    }
  }
}
TEST_F(SimdRows, TransposedOutputsHaveTheBitsOfOthers) {
  const Kokkos::View<float*, Exec::memory_space> bias("bias", 5000);
  for (std::int64_t i = 0; i < 5000; ++i) bias(i) = static_cast<float>(i % 17) * 0.25f;
  const auto bias_of = [&](std::int64_t columns) {
    return ks::bias(Kokkos::subview(bias, std::make_pair(std::int64_t(0), columns)));
  };
  for (auto operation : {Operation::softmax, Operation::log_softmax}) {
    for (const Shape& s : {Shape{2, 3, 0}, Shape{3, 700, 0}, Shape{7, 4097, 0}, Shape{16, 16, 0},
                           Shape{33, 17, 0}, Shape{300, 5, 0}, Shape{37, 2049, 0}, Shape{70, 9001, 0},
                           Shape{1000, 100, 0}, Shape{130, 600, 0}, Shape{5, 20000, 0}, Shape{3000, 2, 0},
                           Shape{2, 9001, 0}, Shape{3, 20011, 0}, Shape{2, 300, 0}, Shape{3, 1999, 0}}) {
      check_transposed<float>(exec, operation, s.rows, s.columns);
      check_transposed<double>(exec, operation, s.rows, s.columns);
      check_transposed<ks::half_t>(exec, operation, s.rows, s.columns);
      check_transposed<ks::bhalf_t>(exec, operation, s.rows, s.columns);
      if (s.columns <= 5000)
        check_transposed<float>(exec, operation, s.rows, s.columns,
                                ks::scale(0.5f) | bias_of(s.columns) | ks::causal(2));
    }
  }
  // Beyond the caches: rows of one chunk and of several, columns that wait and that are read twice, whose
  // lines begin with those of y or not.
  check_transposed<float>(exec, Operation::softmax, 3104, 3200);
  check_transposed<float>(exec, Operation::softmax, 9000, 1100);
  check_transposed<float>(exec, Operation::log_softmax, 704, 15000);
  check_transposed<float>(exec, Operation::softmax, 2, 3000017);
  check_transposed<double>(exec, Operation::log_softmax, 3, 1000003);
}

// A functor that changes nothing, and with it the ways that all other rows take.
struct Unchanged {
  template <class Value>
  KOKKOS_FUNCTION Value operator()(Value value, std::int64_t, std::int64_t) const {
    return value;
  }
};

// What a causal mask drops, NaN and +inf in x and in operands included, counts as -inf wherever in a row it
// begins: the bits are those of rows of -inf, which go through the same kernels without a mask; and no byte
// of the padding changes.
struct CausalMatrices {
  std::int64_t slabs, queries, columns, offset;
  std::int64_t padding = 3;
  bool in_place = false;
};
template <class T, class With, class Without>
void check_causal(const Exec& exec, Operation operation, const CausalMatrices& n, const With& with,
                  const Without& without) {
  using Slabs =
      Kokkos::View<T***, Kokkos::LayoutStride, Exec::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  const std::int64_t rows = n.slabs * n.queries, distance = n.columns + n.padding, size = rows * distance;
  const Kokkos::View<T*, Exec::memory_space> x("x", size), y("y", size), masked("masked", size),
      expected("expected", size);
  const Kokkos::View<T**, Kokkos::LayoutRight, Exec::memory_space> lse("lse", n.slabs, n.queries),
      lse_expected("lse_expected", n.slabs, n.queries);
  Random random(13);
  std::vector<T> some(4099);
  for (T& v : some) v = T(static_cast<float>(random.uniform(-9, 9)));
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  for (std::int64_t i = 0; i < size; ++i) {
    const std::int64_t r = i / distance, c = i % distance;
    const bool dropped = c > r % n.queries + n.offset;
    // Rows of NaN and of +inf among others.
    const T kept =
        r % 7 == 3 && c == r % 5 ? T(r % 2 ? nan : infinity) : some[static_cast<std::size_t>(i % 4099)];
    masked(i) = dropped ? T(-infinity) : kept;
    x(i) = c >= n.columns ? T(-7.0f) : dropped ? T(c % 2 ? nan : infinity) : kept;
    y(i) = expected(i) = T(-7.0f);
    if (c >= n.columns) masked(i) = T(-7.0f);
  }
  const Kokkos::LayoutStride layout(n.slabs, n.queries * distance, n.queries, distance, n.columns, 1);
  const auto& out = n.in_place && operation != Operation::logsumexp ? x : y;
  call(operation, exec, Slabs(masked.data(), layout), Slabs(expected.data(), layout), lse_expected, 2,
       without);
  call(operation, exec, Slabs(x.data(), layout), Slabs(out.data(), layout), lse, 2, with);
  std::int64_t different = 0;
  for (std::int64_t i = 0; i < size; ++i) different += differs(out(i), expected(i));
  for (std::int64_t r = 0; r < rows; ++r) different += differs(lse.data()[r], lse_expected.data()[r]);
  EXPECT_EQ(different, 0) << n.slabs << " x " << n.queries << " x " << n.columns << " + " << n.padding
                          << ", offset " << n.offset << ' ' << ks::scalar_name<T>()
                          << (n.in_place ? " in place" : "");
}
TEST_F(SimdRows, CausalRowsHaveTheBitsOfRowsOfMinusInfinity) {
  const auto check = [&](Operation operation, const CausalMatrices& n) {
    check_causal<float>(exec, operation, n, ks::causal(n.offset), Unchanged{});
    check_causal<double>(exec, operation, n, ks::causal(n.offset), Unchanged{});
    check_causal<ks::bhalf_t>(exec, operation, n, ks::causal(n.offset), Unchanged{});
    // With an operand of the extents of x.
    const Kokkos::View<float***, Kokkos::LayoutRight, Exec::memory_space> bias("bias", n.slabs, n.queries,
                                                                               n.columns);
    for (std::int64_t s = 0; s < n.slabs; ++s) {
      for (std::int64_t q = 0; q < n.queries; ++q) {
        for (std::int64_t c = 0; c < n.columns; ++c)
          bias(s, q, c) = c > q + n.offset ? std::nanf("") : static_cast<float>((s + q + c) % 17) * 0.25f;
      }
    }
    const auto chain = ks::scale(-0.5) | ks::bias(bias);
    check_causal<float>(exec, operation, n, chain | ks::causal(n.offset), chain);
  };
  for (auto operation : operations) {
    for (const bool in_place : {false, true}) {
      if (in_place && operation == Operation::logsumexp) continue;
      for (const std::int64_t padding : {0, 3}) {
        // So many queries that the end of what is kept falls everywhere in a vector, and a little further.
        constexpr std::int64_t queries = 2 * static_cast<std::int64_t>(ks::simd<float>::size()) + 3;
        for (const std::int64_t columns : {1, 33, 64, 1000, 4096}) {
          for (const std::int64_t offset :
               {-queries - 1, std::int64_t(-queries / 2), std::int64_t(-1), columns / 2, columns - queries})
            check(operation, {2, queries, columns, offset, padding, in_place});
        }
        // Several chunks: whole rows, and few that all threads share.
        for (const std::int64_t offset : {-1, 4090, 9000, 13001}) {
          check(operation, {1, queries, 13001, offset, padding, in_place});
          check(operation, {1, 3, 13001, offset, padding, in_place});
        }
      }
    }
    // Beyond the caches: short rows that share lines of y, longer ones, some that wait and some that are read
    // twice, as whole rows or shared.
    const auto causal = [&](const CausalMatrices& n) {
      check_causal<float>(exec, operation, n, ks::causal(n.offset), Unchanged{});
    };
    causal({900, 100, 101, 0, 0});
    causal({3, 1000, 3003, 1000, 0});
    causal({1, 700, 15000, 7000, 1});
    causal({1, 4 * exec.concurrency(), 1200001, 600000});
    causal({1, 2, 3000017, 2000003, 5, true});
  }
}

// Rows of a few columns have a lane each, whatever the order of x and of y: one behind the other, side by
// side, with gaps, or neither. Their bits are those of rows that go other ways, which a transform makes them
// do, and those of a row alone; -inf, +inf and NaN do not change others; what lies between is left alone.
template <class T>
void check_short(const Exec& exec, Operation operation, std::int64_t rows, std::int64_t columns) {
  using Strided =
      Kokkos::View<T**, Kokkos::LayoutStride, Exec::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  using Values = Kokkos::View<T*, Exec::memory_space>;
  constexpr double epsilon = std::is_same_v<T, double>       ? 0x1p-53
                             : std::is_same_v<T, float>      ? 0x1p-24
                             : std::is_same_v<T, ks::half_t> ? 0x1p-10
                                                             : 0x1p-7;
  const Kokkos::LayoutStride layouts[] = {
      Kokkos::LayoutStride(rows, columns, columns, 1), Kokkos::LayoutStride(rows, 1, columns, rows),
      Kokkos::LayoutStride(rows, columns + 3, columns, 1), Kokkos::LayoutStride(rows, 1, columns, rows + 5),
      Kokkos::LayoutStride(rows, 2 * columns, columns, 2)};
  const std::int64_t size = 2 * (rows + 5) * (columns + 3);
  const Values x("x", size), y("y", size + 1), expected("expected", size), lse("lse", rows),
      lse_expected("lse_expected", rows), lse_alone("lse_alone", 1);
  for (const auto& from : layouts) {
    const Strided logits(x.data(), from), result(expected.data(), from);
    Random random(12);
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t c = 0; c < columns; ++c) logits(r, c) = T(static_cast<float>(random.uniform(-9, 9)));
    for (std::int64_t c = 0; rows > 2 && c < columns; ++c) logits(1, c) = T(-HUGE_VALF);
    if (rows > 5) {
      logits(3, columns / 2) = T(std::nanf(""));
      logits(rows - 2, columns - 1) = T(HUGE_VALF);
      logits(rows - 1, 0) = T(-HUGE_VALF);
    }
    call(operation, exec, logits, result, lse_expected, 1, Unchanged{});
    for (const auto& to : layouts) {
      const Strided out(y.data() + 1, to);
      Kokkos::deep_copy(y, T(-7.0f));
      call(operation, exec, logits, out, lse, 1);
      std::int64_t different = 0;
      for (std::int64_t r = 0; r < rows; ++r) {
        if (operation == Operation::logsumexp) {
          // Of which the last bit may differ.
          const auto a = static_cast<double>(lse(r)), b = static_cast<double>(lse_expected(r));
          different += std::isfinite(b) ? !(std::abs(a - b) <= 4 * epsilon * std::max(1.0, std::abs(b)))
                                        : !(a == b || (a != a && b != b));
        } else {
          for (std::int64_t c = 0; c < columns; ++c) different += differs(out(r, c), result(r, c));
        }
      }
      if (rows <= 100 && from.stride[1] == 1 && from.stride[0] >= static_cast<std::size_t>(columns)) {
        const Strided alone(expected.data(), Kokkos::LayoutStride(1, columns, columns, 1));
        for (std::int64_t r = 0; r < rows; ++r) {
          if (operation != Operation::logsumexp) break;
          const Strided row(&logits(r, 0), Kokkos::LayoutStride(1, columns, columns, 1));
          call(operation, exec, row, alone, lse_alone, 1);
          different += differs(lse(r), lse_alone(0));
        }
      }
      // Too few neighbours for that are blocks of columns.
      if (operation == Operation::logsumexp && rows >= 5 && from.stride[0] == 1) {
        const Values lse_of_few("lse_of_few", 5);
        for (std::int64_t first = 0; first + 5 <= std::min<std::int64_t>(rows, 100); first += 5) {
          const Strided few(&logits(first, 0), Kokkos::LayoutStride(5, 1, columns, from.stride[1]));
          call(operation, exec, few, few, lse_of_few, 1);
          for (std::int64_t r = 0; r < 5; ++r) different += differs(lse(first + r), lse_of_few(r));
        }
      }
      if (operation != Operation::logsumexp) {
        for (std::int64_t r = 0; r < rows; ++r)
          for (std::int64_t c = 0; c < columns; ++c) out(r, c) = T(-7.0f);
      }
      for (std::int64_t i = 0; i < size + 1; ++i) different += static_cast<float>(y(i)) != -7.0f;
      EXPECT_EQ(different, 0) << rows << " x " << columns << ", from " << from.stride[0] << ", "
                              << from.stride[1] << " to " << to.stride[0] << ", " << to.stride[1] << ' '
                              << ks::scalar_name<T>();
    }
    if (operation == Operation::logsumexp) continue;
    call(operation, exec, logits, logits, lse, 1);
    std::int64_t different = 0;
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t c = 0; c < columns; ++c) different += differs(logits(r, c), result(r, c));
    EXPECT_EQ(different, 0) << rows << " x " << columns << " in place, " << from.stride[0] << ", "
                            << from.stride[1] << ' ' << ks::scalar_name<T>();
  }
}
TEST_F(SimdRows, ShortRowsGiveTheBitsOfOthers) {
  for (auto operation : operations) {
    for (const std::int64_t rows : {1, 15, 16, 33, 100, 2611}) {
      for (const std::int64_t columns : {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 16, 17}) {
        if (rows > 100 && columns != 2 && columns != 3 && columns != 7 && columns != 13) continue;
        check_short<float>(exec, operation, rows, columns);
        check_short<double>(exec, operation, rows, columns);
        if (columns % 2 == 0 && rows != 15) continue;
        check_short<ks::half_t>(exec, operation, rows, columns);
        check_short<ks::bhalf_t>(exec, operation, rows, columns);
      }
    }
  }
  // Beyond the caches.
  check_short<float>(exec, Operation::softmax, 2500003, 2);
  check_short<float>(exec, Operation::log_softmax, 1600016, 3);
  check_short<double>(exec, Operation::softmax, 700001, 3);
  check_short<ks::bhalf_t>(exec, Operation::log_softmax, 900001, 7);
}

// Some processors flush subnormals where they round vectors to bfloat16: then single outputs are flushed,
// too.
TEST_F(SimdRows, SubnormalOutputsAreTheSameInAnyLayout) {
  using T = ks::bhalf_t;
  constexpr int rows = 9;
  for (const int columns : {7, 100, 439}) {
    const Kokkos::View<T**, Kokkos::LayoutLeft, Exec::memory_space> x("x", columns, rows),
        neighbours("neighbours", columns, rows);
    const Kokkos::View<T**, Kokkos::LayoutRight, Exec::memory_space> among("among", columns, rows),
        alone("alone", columns, rows);
    // The exponentials of most columns are between 2^-133, the least subnormal, and 2^-126.
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < columns; ++c)
        x(c, r) = T(c == 0 ? 0.0f : -87.0f - static_cast<float>((c * 5 + r) % 11) * 0.5f);
    }
    ks::softmax(exec, x, neighbours, ks::axis(0));
    ks::softmax(exec, x, among, ks::axis(0));
    for (int r = 0; r < rows; ++r) {
      const auto one = std::pair(r, r + 1);
      ks::softmax(exec, Kokkos::subview(x, Kokkos::ALL, one), Kokkos::subview(alone, Kokkos::ALL, one),
                  ks::axis(0));
    }
    exec.fence();
    const auto bits = [](T value) { return ks::impl::bits_as<std::uint16_t>(value); };
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < columns; ++c) {
        ASSERT_EQ(bits(among(c, r)), bits(alone(c, r))) << columns << " columns, " << c << " of row " << r;
        ASSERT_EQ(bits(neighbours(c, r)), bits(alone(c, r)))
            << columns << " columns, " << c << " of row " << r;
      }
    }
  }
}

// A maximum that rises from block to block, the hardest order for sums that are rescaled: within the contract
// all the same, along either axis.
TEST_F(SimdRows, RisingRows) {
  for (int axis : {1, 0}) {
    Case c;
    c.extents = axis == 1 ? std::vector<std::int64_t>{2, 70000} : std::vector<std::int64_t>{70000, 2};
    c.axis = axis;
    c.logits.resize(140000);
    for (std::int64_t i = 0; i < 70000; ++i) {
      for (std::int64_t r = 0; r < 2; ++r) {
        const double value = static_cast<float>(static_cast<double>(i) * (r == 0 ? 1e-4 : 3e-5));
        c.logits[static_cast<std::size_t>(axis == 1 ? r * 70000 + i : i * 2 + r)] = value;
      }
    }
    for (auto operation : operations) run_case<float, float, 2>(exec, operation, c, "simd_rows");
  }
}

}  // namespace
