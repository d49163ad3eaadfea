// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The CUDA kernels for rows in slices, those whose blocks wait for each other, grid_pipelined_rows and
// split_rows, and, for logsumexp, block_per_sliced_row: the same bits from all at any alignment, rows with
// slices of -inf or NaN, many launches beside other work, graphs, and the workspace.
#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../support/cases.hpp"

#if defined(KOKKOS_ENABLE_CUDA)

namespace {

using namespace tests;
using Exec = Kokkos::Cuda;
template <class T>
using Memory = Kokkos::View<T*, Kokkos::CudaSpace>;
template <class T>
using Rows =
    Kokkos::View<T**, Kokkos::LayoutRight, Kokkos::CudaSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
template <class T>
using RowValues = Kokkos::View<T*, Kokkos::CudaSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;

#define EXPECT_CUDA(call) EXPECT_EQ(call, cudaSuccess) << cudaGetErrorString(cudaGetLastError())

constexpr const char* kernels[] = {"grid_pipelined_rows", "split_rows"};
constexpr const char* kernel_of_logsumexp = "block_per_sliced_row";
constexpr const char* all_kernels[] = {kernels[0], kernels[1], kernel_of_logsumexp};

// A logit by row and column, so that a row can be made again anywhere.
template <class T>
struct Fill {
  T* data;
  std::int64_t columns, first_row;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    std::uint64_t z = static_cast<std::uint64_t>(i % columns) * 0x9E3779B97F4A7C15u +
                      static_cast<std::uint64_t>(first_row + i / columns) * 0xD1B54A32D192ED03u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z ^= z >> 29;
    data[i] = T(static_cast<float>(z >> 40) * 0x1p-20f - 8.0f);
  }
};

template <class T>
void fill(const Exec& exec, T* data, std::int64_t rows, std::int64_t columns, std::int64_t first_row = 0) {
  Kokkos::parallel_for("fill",
                       Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, rows * columns),
                       Fill<T>{data, columns, first_row});
}

template <class T>
void run(Operation operation, const Exec& exec, const T* x, T* y, std::int64_t rows, std::int64_t columns) {
  const Rows<const T> logits(x, rows, columns);
  if (operation == Operation::logsumexp) {
    ks::logsumexp(exec, logits, RowValues<T>(y, rows));
  } else if (operation == Operation::softmax) {
    ks::softmax(exec, logits, Rows<T>(y, rows, columns));
  } else {
    ks::log_softmax(exec, logits, Rows<T>(y, rows, columns));
  }
}

bool device_runs_them() {
  const Exec exec;
  const Memory<float> x("x", 4), y("y", 4);
  try {
    const ks::ScopedImplementation forced(kernels[0]);
    run(Operation::softmax, exec, x.data(), y.data(), 1, 4);
  } catch (const std::invalid_argument&) {
    return false;
  }
  exec.fence();
  return true;
}

class CudaSlicedRows : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!device_runs_them()) GTEST_SKIP() << "needs a device of compute capability 9.0";
  }
};

// Each row among others, and each alone through each kernel that takes it, at other alignments.
template <class T>
void check_same_bits(std::initializer_list<std::int64_t> lengths) {
  const Exec exec;
  for (const std::int64_t columns : lengths) {
    const std::int64_t rows = std::clamp<std::int64_t>((1 << 24) / columns, 2, 300);
    const Memory<T> x(Kokkos::view_alloc("x", Kokkos::WithoutInitializing), rows * columns + 8),
        y(Kokkos::view_alloc("y", Kokkos::WithoutInitializing), rows * columns + 8),
        some(Kokkos::view_alloc("some rows", Kokkos::WithoutInitializing),
             std::min<std::int64_t>(rows, 264) * columns),
        one(Kokkos::view_alloc("one row", Kokkos::WithoutInitializing), columns + 16);
    for (const auto operation : operations) {
      const bool reduces = operation == Operation::logsumexp;
      const std::int64_t width = reduces ? 1 : columns;
      for (const std::int64_t offset : {0, 1}) {
        fill(exec, x.data() + offset, rows, columns);
        {
          const ks::ScopedImplementation forced(kernels[0]);
          run(operation, exec, x.data() + offset, y.data() + offset, rows, columns);
        }
        // As many as each way to split rows takes: with more rows a thread has more of a slice, then a block
        // two slices where rows lie so.
        for (const std::int64_t few : {2, 6, 12, 20, 33, 40, 63, 64, 99, 132, 250, 264}) {
          if (few > rows) break;
          const ks::ScopedImplementation forced(kernels[1]);
          try {
            run(operation, exec, x.data() + offset, some.data(), few, columns);
          } catch (const std::invalid_argument&) {
            break;
          }
          EXPECT_EQ(count_different(exec, some.data(), y.data() + offset, few * width), 0)
              << reference::name(operation) << ' ' << ks::scalar_name<T>() << ", " << columns << " columns, "
              << few << " rows split, offset " << offset;
        }
        if (reduces) {
          const ks::ScopedImplementation forced(kernel_of_logsumexp);
          try {
            run(operation, exec, x.data() + offset, some.data(), std::min<std::int64_t>(rows, 264), columns);
            EXPECT_EQ(
                count_different(exec, some.data(), y.data() + offset, std::min<std::int64_t>(rows, 264)), 0)
                << ks::scalar_name<T>() << ", " << columns << " columns, offset " << offset
                << ", read by blocks";
          } catch (const std::invalid_argument&) {
            // It takes no doubles, nor rows of many slices.
            EXPECT_TRUE(sizeof(T) == 8 || columns * static_cast<std::int64_t>(sizeof(T)) > 1 << 20);
          }
        }
        for (const std::int64_t row : {std::int64_t(0), rows / 2, rows - 1}) {
          int ran = 0;
          for (const char* kernel : all_kernels) {
            for (const std::int64_t shift : {0, 1, 3, 6}) {
              // Over the other rows of x, which are made again for the next offset: x may be written here.
              T* const alone = one.data() + shift;
              const ks::ScopedImplementation forced(kernel);
              try {
                run(operation, exec, x.data() + offset + row * columns, alone, 1, columns);
              } catch (const std::invalid_argument&) {
                continue;
              }
              ++ran;
              EXPECT_EQ(count_different(exec, alone, y.data() + offset + row * width, width), 0)
                  << reference::name(operation) << ' ' << ks::scalar_name<T>() << ", " << columns
                  << " columns, row " << row << " of " << rows << ", offset " << offset << ", alone by "
                  << kernel << " at " << shift;
            }
          }
          EXPECT_GE(ran, 4);
        }
      }
    }
  }
}

// Around the ends of slices, of the eighths that they are reduced in, and of rows that a block has for
// itself.
TEST_F(CudaSlicedRows, FloatRowsGiveTheSameBitsAnywhere) {
  check_same_bits<float>({2,      1023,   1025,    2047,    2048,    2049,    4095,   4097,   8191,   8193,
                          12289,  16383,  16384,   16385,   16386,   24577,   28673,  32767,  32768,  32769,
                          40000,  50257,  50260,   65537,   98303,   128255,  128256, 131071, 151643, 196609,
                          393215, 786433, 1100003, 1572865, 2097152, 4194303, 8388608});
}
TEST_F(CudaSlicedRows, Bfloat16RowsGiveTheSameBitsAnywhere) {
  check_same_bits<bhalf_t>({2,     2047,  4097,  8193,  16383,  16385,  16386,  24577,   32768,   32769,
                            50257, 65536, 65537, 80000, 128255, 128256, 393215, 1572865, 2200003, 8388609});
}
TEST_F(CudaSlicedRows, HalfRowsGiveTheSameBitsAnywhere) {
  check_same_bits<half_t>({3, 8191, 16386, 32769, 50257, 128256, 151643});
}
// Of up to 32 slices a lane has one, of up to 224 two warps take turns at them, of more than 128 they come in
// runs.
TEST_F(CudaSlicedRows, DoubleRowsGiveTheSameBitsAnywhere) {
  check_same_bits<double>({5,      511,    513,    2049,   4097,   8193,   9217,   12289,  14001,
                           16384,  16385,  24577,  50257,  65536,  65537,  131072, 131073, 200001,
                           262144, 262145, 393215, 524289, 700001, 917505, 921601, 1572865});
}

// Whether a row of many is not as the one that it repeats.
template <class T>
struct AddIfNotRepeated {
  const T *y, *expected;
  std::int64_t period;
  KOKKOS_FUNCTION void operator()(std::int64_t i, std::int64_t& different) const {
    different += !have_same_bits(y[i], expected[i % period]);
  }
};

// So many rows that how a block's reads are paced is chosen for them, by length, boundaries and type: all
// have the bits that they have among few, which another kernel computes, if it takes so many slices.
template <class T>
void check_many_rows(std::initializer_list<std::int64_t> lengths, const char* kernel_of_few = kernels[1]) {
  const Exec exec;
  constexpr std::int64_t different = 8, slices_a_multiprocessor = 100, bytes_of_slice = 36 * 1024;
  const std::int64_t bytes =
      slices_a_multiprocessor * bytes_of_slice * exec.cuda_device_prop().multiProcessorCount;
  for (const std::int64_t columns : lengths) {
    const std::int64_t period = different * columns,
                       rows = bytes / (period * static_cast<std::int64_t>(sizeof(T))) * different,
                       size = rows * columns;
    const Memory<T> x(Kokkos::view_alloc("x", Kokkos::WithoutInitializing), size),
        y(Kokkos::view_alloc("y", Kokkos::WithoutInitializing), size),
        expected(Kokkos::view_alloc("expected", Kokkos::WithoutInitializing), period);
    fill(exec, x.data(), different, columns);
    for (std::int64_t have = period; have < size; have *= 2) {
      EXPECT_CUDA(cudaMemcpyAsync(x.data() + have, x.data(), std::min(have, size - have) * sizeof(T),
                                  cudaMemcpyDeviceToDevice, exec.cuda_stream()));
    }
    for (const auto operation : {Operation::softmax, Operation::log_softmax}) {
      {
        const ks::ScopedImplementation forced(kernel_of_few);
        run(operation, exec, x.data(), expected.data(), different, columns);
      }
      const ks::ScopedImplementation forced(kernels[0]);
      run(operation, exec, x.data(), y.data(), rows, columns);
      std::int64_t count = -1;
      Kokkos::parallel_reduce("count",
                              Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, size),
                              AddIfNotRepeated<T>{y.data(), expected.data(), period}, count);
      EXPECT_EQ(count, 0) << reference::name(operation) << ' ' << ks::scalar_name<T>() << ", " << rows
                          << " x " << columns;
    }
  }
}

TEST_F(CudaSlicedRows, ManyRowsAreAsFew) {
  check_many_rows<float>({16385, 18432, 20001, 24576, 24577, 40001, 65536, 131073});
  check_many_rows<bhalf_t>({16385, 18432, 20001, 24576, 32768, 33001, 49152, 65536, 65537, 73728, 131073});
  check_many_rows<half_t>({32768, 65537, 73728});
}

// More rows than every workspace has words for (2 MB), dealt out slice by slice, of which each has one.
TEST_F(CudaSlicedRows, ManyRowsOfOneSlice) {
  const Exec exec;
  constexpr std::int64_t columns = 2, rows = std::int64_t(1) << 26, size = rows * columns;
  const Memory<float> x("x", size), y("y", size), expected("expected", columns);
  Kokkos::deep_copy(exec, expected, 0.5f);
  const ks::ScopedImplementation forced(kernels[0]);
  run(Operation::softmax, exec, x.data(), y.data(), rows, columns);
  std::int64_t count = -1;
  Kokkos::parallel_reduce("count", Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, size),
                          AddIfNotRepeated<float>{y.data(), expected.data(), columns}, count);
  EXPECT_EQ(count, 0);
}

TEST_F(CudaSlicedRows, ManyRowsOfManySlicesAreAsFew) {
  check_many_rows<float>({1300001, 1900032}, kernels[0]);
  check_many_rows<bhalf_t>({262144, 300001, 524288, 1000003, 2500001, 4194303}, kernels[0]);
  check_many_rows<half_t>({524288, 1000003, 4194303}, kernels[0]);
}

// The slices of logsumexp come some at a time, of one row or of several: as many rows as leave any rest.
template <class T>
void check_logsumexp_of_rows(std::initializer_list<std::int64_t> lengths) {
  const Exec exec;
  constexpr std::int64_t most_rows = 530;
  for (const std::int64_t columns : lengths) {
    // (As many as split_rows takes.)
    const std::int64_t slices = ks::impl::ReductionPlan::of<T>(columns, std::is_same_v<T, float>).slices,
                       rows_of_split = slices > 20 ? 2 : 6;
    const Memory<T> x(Kokkos::view_alloc("x", Kokkos::WithoutInitializing), most_rows * columns),
        lse("lse", most_rows + 1), expected("expected", most_rows + rows_of_split);
    fill(exec, x.data(), most_rows, columns);
    {
      const ks::ScopedImplementation forced(kernels[1]);
      for (std::int64_t row = 0; row < most_rows; row += rows_of_split)
        run(Operation::logsumexp, exec, x.data() + row * columns, expected.data() + row,
            std::min(rows_of_split, most_rows - row), columns);
    }
    for (const char* kernel : {kernels[0], kernel_of_logsumexp}) {
      if (kernel == kernel_of_logsumexp && sizeof(T) == 8) continue;
      const ks::ScopedImplementation forced(kernel);
      for (const std::int64_t rows : {1,   2,   3,   4,   5,   43,  44,  45,  131, 132, 133,
                                      263, 264, 265, 395, 396, 397, 398, 527, 528, 529, 530}) {
        Kokkos::deep_copy(exec, lse, T(-1));
        run(Operation::logsumexp, exec, x.data(), lse.data(), rows, columns);
        const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), lse);
        EXPECT_EQ(count_different(exec, lse.data(), expected.data(), rows), 0)
            << ks::scalar_name<T>() << ", " << rows << " x " << columns << " by " << kernel;
        EXPECT_EQ(static_cast<float>(host(rows)), -1)
            << ks::scalar_name<T>() << ", " << rows << " x " << columns << " by " << kernel;
      }
    }
  }
}
TEST_F(CudaSlicedRows, LogsumexpOfAnyNumberOfRows) {
  check_logsumexp_of_rows<float>({8200, 16386, 40000, 57344, 65536, 131073});
  check_logsumexp_of_rows<bhalf_t>({13313, 14337, 16386, 20001, 33000, 98303, 131072, 262144});
  check_logsumexp_of_rows<half_t>({14335, 16383, 50257});
  check_logsumexp_of_rows<double>({9217, 16385, 40001, 131073, 200001});
}

// How the values of an operand lie: those of a row side by side or not, one row or one column for all.
constexpr int operand_layouts = 5;
template <class T>
ks::impl::LogitOperand<T> operand_of(const T* data, int layout, std::int64_t rows, std::int64_t columns) {
  constexpr std::int64_t column_strides[] = {1, 1, 1, 2, 0};
  const std::int64_t row_strides[] = {columns, columns + 3, 0, 2 * columns, 1};
  ks::impl::LogitOperand<T> operand;
  operand.data = data + layout % 3;
  operand.column_stride = column_strides[layout];
  operand.row_offset.append(rows, row_strides[layout]);
  return operand;
}

// What a transform makes of logits, in the accumulator's type.
template <class T, class To, class Transform>
struct TransformAll {
  const T* x;
  To* to;
  std::int64_t columns;
  Transform transform;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const auto row = transform.at_row(i / columns);
    to[i] = To(ks::impl::transformed<float>(row, static_cast<float>(x[i]), i % columns));
  }
};

// More than a unit in the last place of 16 bits.
template <class T>
struct CountFarApart {
  const T* a;
  const float* b;
  KOKKOS_FUNCTION void operator()(std::int64_t i, std::int64_t& differences) const {
    const float difference = Kokkos::abs(static_cast<float>(a[i]) - b[i]);
    const bool both_nan = static_cast<float>(a[i]) != static_cast<float>(a[i]) && b[i] != b[i];
    constexpr bool is_half = std::is_same_v<T, half_t>;
    differences += static_cast<float>(a[i]) != b[i] && !both_nan &&
                   !(difference <=
                     (is_half ? 0x1p-10f : 0x1p-7f) * Kokkos::abs(b[i]) + (is_half ? 0x1p-24f : 0x1p-125f));
  }
};

struct DropSome {
  bool* mask;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const { mask[i] = i * 2654435761u % 64 > 20; }
};

template <class T, class Transform>
ks::impl::RowsProblem<T, T, Transform> problem_of(Operation operation, const T* x, T* y, std::int64_t rows,
                                                  std::int64_t columns, const Transform& transform) {
  using ks::impl::block_of;
  ks::impl::LogitShape shape;
  shape.rank = 2;
  shape.axis = 1;
  shape.extent[0] = shape.rows = rows;
  shape.extent[1] = shape.columns = columns;
  const auto out = block_of(Rows<T>(y, rows, operation == Operation::logsumexp ? 1 : columns));
  const auto geometry = ks::impl::RowGeometry::of(shape, block_of(Rows<const T>(x, rows, columns)), out);
  return {x, y, static_cast<ks::impl::Operation>(operation), false, geometry, transform};
}

// Whether the kernel takes the rows.
template <class Kernel, class T, class Transform>
bool run_kernel(Operation operation, const Exec& exec, const T* x, T* y, std::int64_t rows,
                std::int64_t columns, const Transform& transform) {
  const auto problem = problem_of(operation, x, y, rows, columns, transform);
  if (!Kernel::refuse(exec, problem).empty()) return false;
  Kernel::run(exec, problem);
  return true;
}

// A transform with operands gives the bits of its results as logits, through each kernel, wherever x and the
// operands lie. `make(layout, rows)` gives a transform.
template <class T, class Expected, class Make>
void check_operands(std::int64_t columns, const Make& make) {
  using ks::impl::BoundIdentity, ks::impl::GridPipelinedRows, ks::impl::SplitRows;
  const Exec exec;
  // So many that slots of the ring are used again.
  const std::int64_t rows = std::clamp<std::int64_t>((1 << 23) / columns, 1, 400), count = rows * columns;
  const std::int64_t few = std::min<std::int64_t>(rows, 3);
  const Memory<T> x("x", count + 8), y("y", count + 8), split("by split_rows", few * columns);
  const Memory<Expected> logits("logits", count), expected("expected", count);
  for (int layout = 0; layout < operand_layouts; ++layout) {
    const auto transform = make(layout, rows);
    using Transform = std::remove_const_t<decltype(transform)>;
    for (const std::int64_t offset : {0, 1}) {
      const T* const from = x.data() + offset;
      fill(exec, x.data() + offset, rows, columns);
      Kokkos::parallel_for("transform",
                           Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, count),
                           TransformAll<T, Expected, Transform>{from, logits.data(), columns, transform});
      for (const auto operation : operations) {
        const std::int64_t width = operation == Operation::logsumexp ? 1 : columns;
        EXPECT_TRUE((run_kernel<GridPipelinedRows>(operation, exec, logits.data(), expected.data(), rows,
                                                   columns, BoundIdentity{})));
        EXPECT_TRUE(
            (run_kernel<GridPipelinedRows>(operation, exec, from, y.data() + 1, rows, columns, transform)));
        std::int64_t different = 0, differently_split = 0;
        if constexpr (std::is_same_v<T, Expected>) {
          different = count_different(exec, y.data() + 1, expected.data(), rows * width);
        } else {
          Kokkos::parallel_reduce(
              "compare", Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, rows * width),
              CountFarApart<T>{y.data() + 1, expected.data()}, different);
        }
        if (run_kernel<SplitRows>(operation, exec, from, split.data(), few, columns, transform))
          differently_split = count_different(exec, split.data(), y.data() + 1, few * width);
        EXPECT_TRUE(different == 0 && differently_split == 0)
            << reference::name(operation) << ' ' << ks::scalar_name<T>() << ", " << columns
            << " columns, layout " << layout << ", offset " << offset << ": " << different << ' '
            << differently_split;
      }
    }
  }
}

template <class T>
struct Operands {
  std::int64_t columns;
  Memory<bool> mask;
  Memory<T> bias;
  explicit Operands(std::int64_t columns_)
      : columns(columns_), mask("mask", (std::int64_t(1) << 24) + 4 * columns), bias("bias", mask.extent(0)) {
    const Exec exec;
    const auto count = static_cast<std::int64_t>(mask.extent(0));
    fill(exec, bias.data(), 1, count, 77);
    Kokkos::parallel_for("drop some",
                         Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, count),
                         DropSome{mask.data()});
    exec.fence();
  }
  ks::impl::BoundMask<bool> bound_mask(int layout, std::int64_t rows) const {
    return {operand_of(mask.data(), layout, rows, columns)};
  }
  ks::impl::BoundBias<T> bound_bias(int layout, std::int64_t rows) const {
    return {operand_of(bias.data(), layout, rows, columns)};
  }
  // One for all rows, from this element on.
  ks::impl::BoundMask<bool> mask_of_all(int first) const { return {of_all(mask.data() + first)}; }
  ks::impl::BoundBias<T> bias_of_all(int first) const { return {of_all(bias.data() + first)}; }

 private:
  template <class Of>
  static ks::impl::LogitOperand<Of> of_all(const Of* data) {
    ks::impl::LogitOperand<Of> operand;
    operand.data = data;
    operand.column_stride = 1;
    return operand;
  }
};

TEST_F(CudaSlicedRows, FloatRowsWithMaskAndBias) {
  for (const std::int64_t columns : {1000, 16384, 16387, 32769, 50257, 131072, 2200003}) {
    const Operands<float> operands(columns);
    check_operands<float, float>(columns, [&](int layout, std::int64_t rows) {
      return ks::impl::BoundChain<ks::impl::BoundMask<bool>, ks::impl::BoundBias<float>>{
          operands.bound_mask(layout, rows), operands.bound_bias((2 * layout + 2) % operand_layouts, rows)};
    });
  }
}
// Of slices that each have a place for their operands, which stay there, and of more slices than that.
TEST_F(CudaSlicedRows, FloatRowsWithMaskAndBiasOfAll) {
  for (const std::int64_t columns : {1000, 8191, 12290, 16387, 24001, 32768, 50257}) {
    const Operands<float> operands(columns);
    check_operands<float, float>(columns, [&](int layout, std::int64_t) {
      return ks::impl::BoundChain<ks::impl::BoundMask<bool>, ks::impl::BoundBias<float>>{
          operands.mask_of_all(layout), operands.bias_of_all(3 * layout % 4)};
    });
  }
}
// What launches leave to those after them: no tickets, nor parts that have ended.
void expect_ready_for_the_next_launch() {
  const Exec exec;
  exec.fence();
  ks::impl::CudaWorkspaceHeader header{};
  EXPECT_CUDA(cudaMemcpy(&header, ks::impl::CudaWorkspace::get<float>(exec, 1).header, sizeof(header),
                         cudaMemcpyDeviceToHost));
  EXPECT_EQ(header.next_ticket, 0u);
  EXPECT_EQ(header.epoch_and_arrivals & 0xffffffffu, 0u);
  for (const auto next : header.next_ticket_of) EXPECT_EQ(next, 0u);
}

// Where many rows have the same operands, blocks keep to their columns. Some of these rows, too few for that,
// have the same bits.
template <class T, class Transform>
void check_rows_alike(std::int64_t columns, std::int64_t rows, const Transform& transform) {
  using ks::impl::GridPipelinedRows, ks::impl::SplitRows;
  const Exec exec;
  constexpr std::int64_t some = 12, few = 3;
  const Memory<T> x("x", rows * columns + 8), y("y", rows * columns + 8),
      expected("expected", some * columns);
  for (const std::int64_t offset : {0, 1}) {
    fill(exec, x.data() + offset, rows, columns);
    for (const auto operation : operations) {
      const std::int64_t width = operation == Operation::logsumexp ? 1 : columns;
      Kokkos::deep_copy(exec, y, T(77.0f));
      EXPECT_TRUE((run_kernel<GridPipelinedRows>(operation, exec, x.data() + offset, y.data() + 1, rows,
                                                 columns, transform)));
      expect_ready_for_the_next_launch();
      for (std::int64_t row = 0; row < rows; row += some) {
        const std::int64_t here = std::min(some, rows - row);
        const T* const from = x.data() + offset + row * columns;
        const auto expect_same = [&](std::int64_t count, const char* kernel) {
          EXPECT_EQ(count_different(exec, expected.data(), y.data() + 1 + row * width, count * width), 0)
              << reference::name(operation) << ' ' << ks::scalar_name<T>() << ", " << columns
              << " columns, from row " << row << " of " << rows << " on, offset " << offset << ", " << kernel;
        };
        EXPECT_TRUE((
            run_kernel<GridPipelinedRows>(operation, exec, from, expected.data(), here, columns, transform)));
        expect_same(here, "grid_pipelined_rows");
        if (run_kernel<SplitRows>(operation, exec, from, expected.data(), std::min(few, here), columns,
                                  transform))
          expect_same(std::min(few, here), "split_rows");
      }
    }
  }
}
// Of two or three slices to as many as there are tickets of different kinds; of those that leave a third of
// the blocks without work, too, which rows of 16 bits alone have so.
TEST_F(CudaSlicedRows, RowsWithTheSameOperands) {
  using namespace ks::impl;
  for (const auto& [columns, rows] : {std::pair{16388, 601},
                                      {20001, 500},
                                      {40001, 401},
                                      {65536, 300},
                                      {131073, 151},
                                      {360448, 49},
                                      {393216, 49},
                                      {524288, 34}}) {
    const Operands<float> operands(columns);
    check_rows_alike<float>(columns, rows, operands.bias_of_all(1));
    check_rows_alike<float>(columns, rows,
                            BoundChain<BoundScale, BoundBias<float>>{{{0.75}}, operands.bias_of_all(2)});
  }
  for (const auto& [columns, rows] :
       {std::pair{40001, 500}, {65536, 301}, {100001, 331}, {262147, 151}, {737280, 41}, {1000000, 41}}) {
    const Operands<bhalf_t> operands(columns);
    check_rows_alike<bhalf_t>(columns, rows, operands.bias_of_all(0));
    check_rows_alike<bhalf_t>(columns, rows, operands.mask_of_all(1));
  }
  // Finishers need their operands, too.
  for (const auto& [columns, rows] : {std::pair{49152, 401}, {100001, 331}}) {
    const Operands<half_t> operands(columns);
    check_rows_alike<half_t>(columns, rows, operands.bias_of_all(1));
  }
}
// One call after the other in place, on two streams at once, with calls between them whose tickets are of one
// kind: what they give with a fence after each, and so in a graph that is replayed.
TEST_F(CudaSlicedRows, RowsWithTheSameOperandsOneCallAfterTheOther) {
  using ks::impl::GridPipelinedRows;
  constexpr std::int64_t rows = 300, columns = 50257, count = rows * columns;
  const Operands<float> operands(columns);
  struct OfStream {
    cudaStream_t stream{};
    cudaGraphExec_t graph{};
    Memory<float> x{"x", count}, sums{"sums", rows}, expected{"expected", count};
  } of[2];
  const auto call_all = [&](const OfStream& c, const Exec& exec, bool fences) {
    for (int i = 0; i < 9; ++i) {
      float* const x = c.x.data();
      const auto operation = i % 3 == 1 ? Operation::logsumexp : Operation::log_softmax;
      float* const y = i % 3 == 1 ? c.sums.data() : x;
      EXPECT_TRUE(
          (run_kernel<GridPipelinedRows>(operation, exec, x, y, rows, columns, operands.bias_of_all(i % 4))));
      if (i % 4 == 3) {
        EXPECT_TRUE((run_kernel<GridPipelinedRows>(operation, exec, x, y, rows / 4, columns,
                                                   operands.bias_of_all(1))));
      }
      if (fences) exec.fence();
    }
  };
  const auto expect_right = [&](const OfStream& c, const Exec& exec, const char* how) {
    EXPECT_EQ(count_different(exec, c.x.data(), c.expected.data(), count), 0) << how;
  };
  for (int id = 0; id < 2; ++id) {
    EXPECT_CUDA(cudaStreamCreateWithFlags(&of[id].stream, cudaStreamNonBlocking));
    const Exec exec(of[id].stream);
    fill(exec, of[id].x.data(), rows, columns, id * rows);
    call_all(of[id], exec, true);
    Kokkos::deep_copy(exec, of[id].expected, of[id].x);
    EXPECT_CUDA(cudaStreamBeginCapture(of[id].stream, cudaStreamCaptureModeThreadLocal));
    fill(exec, of[id].x.data(), rows, columns, id * rows);
    call_all(of[id], exec, false);
    cudaGraph_t graph{};
    EXPECT_CUDA(cudaStreamEndCapture(of[id].stream, &graph));
    EXPECT_CUDA(cudaGraphInstantiate(&of[id].graph, graph, 0));
    EXPECT_CUDA(cudaGraphDestroy(graph));
  }
  for (int turn = 0; turn < 20; ++turn) {
    for (const OfStream& c : of) {
      const Exec exec(c.stream);
      fill(exec, c.x.data(), rows, columns, (&c - of) * rows);
      call_all(c, exec, false);
    }
    for (const OfStream& c : of) expect_right(c, Exec(c.stream), "on streams");
  }
  for (int replay = 0; replay < 200; ++replay) {
    for (const OfStream& c : of) EXPECT_CUDA(cudaGraphLaunch(c.graph, c.stream));
  }
  for (const OfStream& c : of) {
    EXPECT_CUDA(cudaStreamSynchronize(c.stream));
    expect_right(c, Exec(), "in graphs");
    EXPECT_CUDA(cudaGraphExecDestroy(c.graph));
    EXPECT_CUDA(cudaStreamDestroy(c.stream));
  }
}
TEST_F(CudaSlicedRows, Bfloat16RowsWithMask) {
  for (const std::int64_t columns : {1001, 16384, 32771, 50257, 65536, 4400003}) {
    const Operands<bhalf_t> operands(columns);
    check_operands<bhalf_t, bhalf_t>(
        columns, [&](int layout, std::int64_t rows) { return operands.bound_mask(layout, rows); });
  }
}

/// Makes what a causal mask drops NaN, +inf and large numbers in turn, or all of it -inf.
template <class T>
struct SpoilDropped {
  T* data;
  std::int64_t columns, offset;
  bool minus_infinity;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const std::int64_t row = i / columns, column = i % columns;
    if (column <= row + offset) return;
    using ks::impl::infinity_v, ks::impl::nan_v;
    data[i] = T(minus_infinity ? -infinity_v<float>
                : i % 3 == 0   ? nan_v<float>
                : i % 3 == 1   ? infinity_v<float>
                               : 3e4f);
  }
};

// Slices behind the end of what a row keeps are not read: the bits of rows that hold -inf there, by either
// kernel. `chain(causal, rows)`: a transform with the mask in it.
template <class T, class Chain>
void check_dropped_ends(std::int64_t columns, const Chain& chain) {
  using ks::impl::BoundCausal, ks::impl::GridPipelinedRows, ks::impl::SplitRows;
  const Exec exec;
  // So many that slots of the ring are used again.
  const std::int64_t rows = std::clamp<std::int64_t>((1 << 23) / columns, 5, 400), count = rows * columns;
  const Memory<T> x("x", count + 8), y("y", count + 8), expected("expected", count + 8);
  for (const std::int64_t offset :
       {-2 * rows, -std::int64_t(2), std::int64_t(20), std::int64_t(4094), std::int64_t(8190),
        std::int64_t(16382), columns / 2, columns - 7, 2 * columns}) {
    for (const std::int64_t shift : {0, 1}) {
      T* const logits = x.data() + shift;
      for (const auto operation : operations) {
        const std::int64_t results = operation == Operation::logsumexp ? rows : count;
        const auto run_spoiled = [&]<class Kernel>(Kernel, bool minus_infinity, T* to) {
          fill(exec, logits, rows, columns);
          Kokkos::parallel_for("spoil",
                               Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, count),
                               SpoilDropped<T>{logits, columns, offset, minus_infinity});
          Kokkos::deep_copy(exec, Memory<T>(y), T(-1));
          const BoundCausal causal{minus_infinity ? 2 * columns : offset, rows, 1};
          return run_kernel<Kernel>(operation, exec, logits, to, rows, columns, chain(causal, rows));
        };
        ASSERT_TRUE(run_spoiled(GridPipelinedRows(), true, expected.data()));
        ASSERT_TRUE(run_spoiled(GridPipelinedRows(), false, y.data()));
        EXPECT_EQ(count_different(exec, y.data(), expected.data(), results), 0)
            << reference::name(operation) << ", " << columns << " columns, offset " << offset;
        if (!run_spoiled(SplitRows(), false, y.data())) continue;
        EXPECT_EQ(count_different(exec, y.data(), expected.data(), results), 0)
            << "split_rows, " << reference::name(operation) << ", " << columns << " columns, offset "
            << offset;
      }
    }
  }
}

TEST_F(CudaSlicedRows, EndsThatACausalMaskDrops) {
  using namespace ks::impl;
  const auto causal = [](const BoundCausal& c, std::int64_t) { return c; };
  const auto scaled = [](const BoundCausal& c, std::int64_t) {
    return BoundChain<BoundScale, BoundCausal>{{{0.25}}, c};
  };
  // (In slices of one block, in slices of all, and read twice.)
  for (const std::int64_t columns : {16384, 20003, 65536, 131074, 4700000}) {
    check_dropped_ends<float>(columns, scaled);
  }
  for (const std::int64_t columns : {16392, 20003, 65536, 131074, 9000000}) {
    check_dropped_ends<bhalf_t>(columns, causal);
    check_dropped_ends<bhalf_t>(columns, scaled);
  }
  for (const std::int64_t columns : {20003, 65536}) {
    check_dropped_ends<float>(columns, causal);
    check_dropped_ends<half_t>(columns, causal);
    check_dropped_ends<half_t>(columns, scaled);
    check_dropped_ends<double>(columns, scaled);
  }
  for (const std::int64_t columns : {20003, 131072}) {
    const Operands<bhalf_t> operands(columns);
    check_dropped_ends<bhalf_t>(columns, [&](const BoundCausal& c, std::int64_t rows) {
      return BoundChain<BoundChain<BoundScale, BoundMask<bool>>, BoundCausal>{
          {{{-0.5}}, operands.bound_mask(0, rows)}, c};
    });
    for (const int layout : {0, 1, 2}) {
      check_dropped_ends<bhalf_t>(columns, [&](const BoundCausal& c, std::int64_t rows) {
        return BoundChain<BoundChain<BoundBias<bhalf_t>, BoundMask<bool>>, BoundCausal>{
            {operands.bound_bias(layout, rows), operands.bound_mask(layout, rows)}, c};
      });
    }
  }
}

TEST_F(CudaSlicedRows, Bfloat16RowsWithBias) {
  for (const std::int64_t columns : {1001, 16384, 32771, 50257, 65536, 4400003}) {
    const Operands<bhalf_t> operands(columns);
    check_operands<bhalf_t, float>(
        columns, [&](int layout, std::int64_t rows) { return operands.bound_bias(layout, rows); });
  }
}

struct NoShift {
  float operator()(std::int64_t) const { return 0; }
};

// Rows of -inf, infinities, NaN and nothing but negative logits, by both kernels, beside their logits as a
// transform gives them. `shift_of`: what is added to the logits of a column.
template <class T = bhalf_t, class Transform, class ShiftOf = NoShift>
void check_special_rows(std::int64_t columns, const Transform& transform, const ShiftOf& shift_of = {}) {
  using ks::impl::BlockPerSlicedRow, ks::impl::BoundIdentity, ks::impl::GridPipelinedRows,
      ks::impl::SplitRows;
  const Exec exec;
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const std::int64_t rows = 9, count = rows * columns;
  const Memory<T> x("x", count), y("y", count), split("by split_rows", count);
  const Memory<float> logits("logits", count), expected("expected", count);
  fill(exec, x.data(), rows, columns);
  const auto host_x = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), x);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t row = i / columns, column = i % columns;
    if (const float shift = shift_of(column); shift != 0)
      host_x(i) = T(static_cast<float>(host_x(i)) + shift);
    // Row 0 keeps what is infinite in the bias, row 1 what is NaN, and row 2 nothing.
    if ((row != 0 && column == columns / 2) || (row != 1 && column == columns - 3) || row == 2 ||
        (row > 2 && row < 6 && i % (row * row) == 0) || (row == 4 && column < 20000))
      host_x(i) = T(-inf);
    if (row == 6) host_x(i) = T(-std::fabs(static_cast<float>(host_x(i))));
    if (row == 7 && column == columns / 3) host_x(i) = T(nan);
    if (row == 8 && column == columns / 3) host_x(i) = T(inf);
  }
  Kokkos::deep_copy(x, host_x);
  Kokkos::parallel_for("transform",
                       Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, count),
                       TransformAll<T, float, Transform>{x.data(), logits.data(), columns, transform});
  for (const auto operation : operations) {
    const std::int64_t results = operation == Operation::logsumexp ? rows : count;
    EXPECT_TRUE((run_kernel<GridPipelinedRows>(operation, exec, logits.data(), expected.data(), rows, columns,
                                               BoundIdentity{})));
    EXPECT_TRUE(
        (run_kernel<GridPipelinedRows>(operation, exec, x.data(), y.data(), rows, columns, transform)));
    EXPECT_TRUE((run_kernel<SplitRows>(operation, exec, x.data(), split.data(), rows, columns, transform)));
    std::int64_t different = 0;
    Kokkos::parallel_reduce("compare",
                            Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, results),
                            CountFarApart<T>{y.data(), expected.data()}, different);
    EXPECT_EQ(different, 0) << reference::name(operation) << ", " << columns << " columns";
    EXPECT_EQ(count_different(exec, split.data(), y.data(), results), 0)
        << reference::name(operation) << ", " << columns << " columns";
    if constexpr (std::is_same_v<Transform, BoundIdentity>) {
      if (operation != Operation::logsumexp) continue;
      EXPECT_TRUE(
          (run_kernel<BlockPerSlicedRow>(operation, exec, x.data(), split.data(), rows, columns, transform)));
      EXPECT_EQ(count_different(exec, split.data(), y.data(), results), 0) << columns << " columns";
    }
  }
}
TEST_F(CudaSlicedRows, RowsOf16BitsWithMinusInfinityNaNAndInfinity) {
  for (const std::int64_t columns : {8193, 14336, 16385, 20001, 65536, 98303}) {
    check_special_rows<bhalf_t>(columns, ks::impl::BoundIdentity{});
    check_special_rows<half_t>(columns, ks::impl::BoundIdentity{});
  }
}

// One for all rows, with +inf and NaN where check_special_rows has -inf.
template <class T>
struct SpecialBias {
  Memory<T> memory;
  SpecialBias(std::int64_t columns, float factor, float shift) : memory("bias", columns) {
    fill(Exec(), memory.data(), 1, columns, 77);
    const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), memory);
    for (std::int64_t i = 0; i < columns; ++i) host(i) = T(static_cast<float>(host(i)) * factor + shift);
    host(columns / 2) = T(std::numeric_limits<float>::infinity());
    host(columns - 3) = T(std::numeric_limits<float>::quiet_NaN());
    Kokkos::deep_copy(memory, host);
  }
  ks::impl::BoundBias<T> bound() const {
    ks::impl::LogitOperand<T> operand;
    operand.data = memory.data();
    operand.column_stride = 1;
    return {operand};
  }
};

// Logits that are -inf stay -inf, whatever factor and bias would make of them.
TEST_F(CudaSlicedRows, Bfloat16RowsOfMinusInfinityWithScaleAndBias) {
  using ks::impl::BoundBias, ks::impl::BoundChain, ks::impl::BoundFunctor, ks::impl::ScaleFunction;
  for (const std::int64_t columns : {16384, 50257, 65536}) {
    const SpecialBias<bhalf_t> bias(columns, 1, 0);
    for (const double factor : {0.5, -0.5, 0.0, 1e6}) {
      SCOPED_TRACE(factor);
      check_special_rows(
          columns, BoundChain<BoundFunctor<ScaleFunction>, BoundBias<bhalf_t>>{{{factor}}, bias.bound()});
    }
  }
}

// Of a bias alone the maximum may be that of sums rounded to 16 bits, where it is small: these are around
// that.
template <class T>
void check_rows_with_bias(std::int64_t columns, std::initializer_list<float> shifts) {
  for (const float shift : shifts) {
    SCOPED_TRACE(shift);
    const SpecialBias<T> bias(columns, 0.25f, shift);
    check_special_rows<T>(columns, bias.bound());
  }
}
TEST_F(CudaSlicedRows, RowsOf16BitsWithBiasOfAnySize) {
  for (const std::int64_t columns : {16384, 50257, 65538}) {
    check_rows_with_bias<bhalf_t>(columns,
                                  {0, 21, 22, 22.5f, 23, 24, 30, 100, 1e6f, -22, -40, -41, -60, -1e6f});
    check_rows_with_bias<half_t>(columns,
                                 {0, 245, 246, 246.5f, 247, 248, 300, 3e4f, -246, -265, -266, -3e4f});
  }
}

// Of rows that one logit dominates the logarithm of its probability is next to 0, though its sum with the
// bias is no number of 16 bits: what log_softmax subtracts is not rounded to one.
template <class T, class Kernel>
void check_dominated_rows_with_bias(std::int64_t columns, std::int64_t rows) {
  using ks::impl::BoundBias, ks::impl::LogitOperand;
  const Exec exec;
  const Memory<T> x("x", rows * columns), y("y", rows * columns), bias("bias", columns);
  Kokkos::deep_copy(bias, T(0.3f));
  const auto logits = Kokkos::create_mirror_view(x);
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    const std::int64_t row = i / columns, column = i % columns;
    const std::int64_t logit =
        column == (row * 997 + 5) % columns ? 3 + row % 300 : -250 + (row + column) % 100;
    logits(i) = T(static_cast<float>(logit));
  }
  Kokkos::deep_copy(x, logits);
  LogitOperand<T> operand;
  operand.data = bias.data();
  operand.column_stride = 1;
  EXPECT_TRUE((run_kernel<Kernel>(Operation::log_softmax, exec, x.data(), y.data(), rows, columns,
                                  BoundBias<T>{operand})));
  const auto result = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), y);
  const double bound = 4 * 0x1p-24 * std::log(static_cast<double>(columns));
  for (std::int64_t row = 0; row < rows; ++row) {
    ASSERT_LE(std::fabs(static_cast<float>(result(row * columns + (row * 997 + 5) % columns))), bound)
        << ks::scalar_name<T>() << ", row " << row << " of " << columns << " columns, " << Kernel::name;
  }
}
TEST_F(CudaSlicedRows, RowsOf16BitsThatOneLogitDominatesBehindABias) {
  using ks::impl::GridPipelinedRows, ks::impl::SplitRows;
  for (const std::int64_t columns : {20000, 20001, 131072}) {
    check_dominated_rows_with_bias<bhalf_t, GridPipelinedRows>(columns, 300);
    check_dominated_rows_with_bias<half_t, GridPipelinedRows>(columns, 300);
    check_dominated_rows_with_bias<bhalf_t, SplitRows>(columns, 5);
    check_dominated_rows_with_bias<half_t, SplitRows>(columns, 5);
  }
}

// A transform that knows its maximum from that of the logits, where it does and where it does not.
TEST_F(CudaSlicedRows, Bfloat16RowsOfKnownMaximum) {
  using ks::impl::BoundCausal, ks::impl::BoundChain, ks::impl::BoundFunctor, ks::impl::BoundTemperature,
      ks::impl::GeluErfFunction, ks::impl::ReluFunction, ks::impl::ScaleFunction;
  const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  const Memory<float> temperature("temperature", 1);
  for (const std::int64_t columns : {16385, 50257, 65536}) {
    for (const double value : {3.0, 1e6, 1e-3, -2.0, 0.0, 1e-37, -1e-39, inf, -inf, nan}) {
      SCOPED_TRACE(value);
      // Queries of which the last keeps all, so that slices are kept, cut and dropped.
      check_special_rows(
          columns, BoundChain<BoundFunctor<ScaleFunction>, BoundCausal>{{{value}}, {columns - 9, 9, 1}});
      Kokkos::deep_copy(temperature, static_cast<float>(value));
      check_special_rows(columns, BoundTemperature<float>{temperature.data(), {}});
    }
    check_special_rows(columns,
                       BoundChain<BoundFunctor<ScaleFunction>, BoundCausal>{{{0.5}}, {columns / 2, 2, 1}});
    check_special_rows(columns, BoundChain<BoundFunctor<ReluFunction>, BoundFunctor<GeluErfFunction>>{});
    check_special_rows(columns,
                       BoundChain<BoundFunctor<ScaleFunction>, BoundFunctor<GeluErfFunction>>{{{3.0}}, {}});
  }
}

// Logits that a transform makes, of which slots keep exponentials or differences in 16 bits: of rows and
// slices with dropped ends, and of so large ones that the maximum is subtracted first.
template <class T>
void check_rows_of_made_logits() {
  using ks::impl::BoundBias, ks::impl::BoundCausal, ks::impl::BoundChain, ks::impl::BoundFunctor,
      ks::impl::GeluErfFunction, ks::impl::ScaleFunction;
  for (const std::int64_t columns : {16385, 20001, 50257, 65536, 131073}) {
    const SpecialBias<T> bias(columns, 0.25f, 0);
    check_special_rows<T>(columns, BoundChain<BoundBias<T>, BoundFunctor<GeluErfFunction>>{bias.bound(), {}});
    check_special_rows<T>(columns,
                          BoundChain<BoundFunctor<GeluErfFunction>, BoundCausal>{{}, {columns / 2, 2, 1}});
    for (const double factor : {0.5, std::is_same_v<T, half_t> ? -3e3 : -1e6})
      check_special_rows<T>(columns,
                            BoundChain<BoundFunctor<ScaleFunction>, BoundBias<T>>{{{factor}}, bias.bound()});
  }
}
TEST_F(CudaSlicedRows, Bfloat16RowsOfMadeLogits) {
  check_rows_of_made_logits<bhalf_t>();
}
TEST_F(CudaSlicedRows, HalfRowsOfMadeLogits) {
  check_rows_of_made_logits<half_t>();
}

// A mask among factors, before and behind them: what it drops is dropped in pairs.
TEST_F(CudaSlicedRows, RowsOf16BitsWithMaskAmongFactors) {
  using ks::impl::BoundCausal, ks::impl::BoundChain, ks::impl::BoundMask, ks::impl::BoundScale,
      ks::impl::BoundTemperature;
  const Memory<float> temperature("temperature", 1);
  for (const std::int64_t columns : {1001, 16384, 32771, 50257, 65536, 4400003}) {
    const Operands<bhalf_t> operands(columns);
    const auto mask_and_factor = [&](int layout, std::int64_t rows) {
      return BoundChain<BoundMask<bool>, BoundScale>{operands.bound_mask(layout, rows), {{0.5}}};
    };
    check_operands<bhalf_t, float>(columns, mask_and_factor);
    if (columns == 50257) check_operands<half_t, float>(columns, mask_and_factor);
    Kokkos::deep_copy(temperature, 1.7f);
    check_operands<bhalf_t, float>(columns, [&](int layout, std::int64_t rows) {
      return BoundChain<BoundTemperature<float>, BoundMask<bool>>{{temperature.data(), {}},
                                                                  operands.bound_mask(layout, rows)};
    });
  }
  for (const std::int64_t columns : {16385, 50257, 65536}) {
    const Operands<bhalf_t> operands(columns);
    for (const int layout : {0, 1, 2, 3}) {
      const BoundMask<bool> mask = operands.bound_mask(layout, 9);
      for (const double value : {3.0, 1e6, -2.0, 0.0, 1e-37, std::numeric_limits<double>::infinity(),
                                 std::numeric_limits<double>::quiet_NaN()}) {
        SCOPED_TRACE(value);
        Kokkos::deep_copy(temperature, static_cast<float>(value));
        check_special_rows(
            columns, BoundChain<BoundTemperature<float>, BoundMask<bool>>{{temperature.data(), {}}, mask});
        check_special_rows(columns, BoundChain<BoundChain<BoundScale, BoundCausal>, BoundMask<bool>>{
                                        {{{value}}, {columns - 9, 9, 1}}, mask});
      }
    }
  }
}

// Quotients by a temperature are coarse where the maximum of a share, or of the row, is below 512: some of
// these are on the one side of that and some on the other.
template <class T>
void check_quotients(std::int64_t columns) {
  using ks::impl::BoundChain, ks::impl::BoundMask, ks::impl::BoundTemperature;
  const Memory<float> memory("temperature", 1);
  const BoundTemperature<float> temperature{memory.data(), {}};
  const Operands<T> operands(columns);
  for (const float value : {1.0f, 0.7f, 3.0f}) {
    SCOPED_TRACE(value);
    Kokkos::deep_copy(memory, value);
    for (const float first : {0.0f, 505.0f, 515.0f, -505.0f, -515.0f}) {
      SCOPED_TRACE(first);
      for (const float step : {0.0f, 300.0f, -300.0f}) {
        SCOPED_TRACE(step);
        const auto shift_of = [&](std::int64_t column) {
          return (first + step * static_cast<float>(column / 3000 % 4)) * value;
        };
        check_special_rows<T>(columns, temperature, shift_of);
        check_special_rows<T>(
            columns,
            BoundChain<BoundMask<bool>, BoundTemperature<float>>{operands.bound_mask(0, 9), temperature},
            shift_of);
      }
    }
  }
}
TEST_F(CudaSlicedRows, RowsOf16BitsWithSmallAndLargeQuotients) {
  for (const std::int64_t columns : {16385, 65536}) {
    check_quotients<bhalf_t>(columns);
    check_quotients<half_t>(columns);
  }
}

// x of a few rows against the reference; y has as many elements.
template <class T>
void expect_right(Operation operation, std::int64_t rows, std::int64_t columns,
                  const std::vector<double>& logits, const char* kernel) {
  constexpr Scalar scalar = std::is_same_v<T, double> ? Scalar::float64 : Scalar::float32;
  Case c;
  c.extents = {rows, columns};
  c.logits = logits;
  const Exec exec;
  Buffer<Exec> x(scalar, reference::right(c.extents), &c.logits);
  const bool reduces = operation == Operation::logsumexp;
  Buffer<Exec> y(scalar, reduces ? Layout{{rows}, {1}} : reference::right(c.extents));
  const ks::ScopedImplementation forced(kernel);
  try {
    if (reduces) {
      ks::logsumexp(exec, x.template view<const T, 2>(), y.template view<T, 1>());
    } else if (operation == Operation::softmax) {
      ks::softmax(exec, x.template view<const T, 2>(), y.template view<T, 2>());
    } else {
      ks::log_softmax(exec, x.template view<const T, 2>(), y.template view<T, 2>());
    }
  } catch (const std::invalid_argument&) {
    return;
  }
  exec.fence();
  y.download();
  std::string report;
  EXPECT_TRUE(reference::agrees({operation, scalar, scalar, c.extents, 1, c.logits, {}}, y.layout(), y.host(),
                                report))
      << kernel << ' ' << ks::scalar_name<T>() << ", " << columns << " columns: " << report;
}

TEST_F(CudaSlicedRows, RunsOfMinusInfinityNaNAndInfinity) {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  for (const std::int64_t columns : {8192, 20000, 65536, 131075, 200001}) {
    // A slice, a warp's share and more of -inf; all of a row; NaN, +inf and both in one place each.
    std::vector<double> logits = random_values(Scalar::float32, 7 * columns, -9, 9, columns);
    const auto row = [&](std::int64_t r) { return logits.begin() + r * columns; };
    std::fill(row(0), row(0) + columns / 2 + 777, -inf);
    std::fill(row(1) + 1, row(2), -inf);
    std::fill(row(2), row(3), -inf);
    *(row(3) + columns - 1) = nan;
    *(row(4) + columns / 3) = inf;
    *row(5) = inf;
    *(row(5) + columns - 2) = nan;
    for (std::int64_t i = 0; i < columns; ++i)
      *(row(6) + i) = static_cast<float>(*(row(6) + i) * (i % 2 ? 1e6 : -1e4));
    for (const auto operation : operations) {
      for (const char* kernel : all_kernels) {
        expect_right<float>(operation, 7, columns, logits, kernel);
        expect_right<double>(operation, 7, columns, logits, kernel);
      }
    }
  }
}

/// Rows of -inf in part and in whole, with NaN and with +inf, among others.
template <class T>
struct SpoilSomeRows {
  T* data;
  std::int64_t columns;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const std::int64_t row = i / columns, column = i % columns;
    using ks::impl::infinity_v, ks::impl::nan_v;
    const float inf = infinity_v<float>;
    if ((row % 11 == 3 && column < columns / 2 + 777) || row % 11 == 5 || (row % 11 == 6 && column > 0))
      data[i] = T(-inf);
    if (row % 11 == 8 && column == columns - 1) data[i] = T(nan_v<float>);
    if (row % 11 == 9 && column == columns / 3) data[i] = T(inf);
  }
};

// So many slices that blocks have one in registers and one in shared memory each, some of them or none: the
// bits of grid_pipelined_rows, whatever the rows hold and however far apart they lie, in place, too; nothing
// between them is written. At most one `transform`.
template <class T, class Out, class... Transform>
void check_held_slices(std::int64_t columns, std::int64_t planes, std::int64_t rows_of_plane,
                       const Transform&... transform) {
  const Exec exec;
  const std::int64_t rows = planes * rows_of_plane, count = rows * columns;
  const Memory<T> compact(Kokkos::view_alloc("compact", Kokkos::WithoutInitializing), count);
  fill(exec, compact.data(), rows, columns);
  Kokkos::parallel_for("spoil", Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, count),
                       SpoilSomeRows<T>{compact.data(), columns});
  // A gap behind each row, and another one behind each plane; both keep rows on boundaries of 16 bytes.
  for (const std::int64_t gap : {0, 8, 104}) {
    const std::int64_t pitch = columns + gap, pitch_of_plane = rows_of_plane * pitch + 3 * gap;
    using Layout3 = Kokkos::LayoutStride;
    const Layout3 layout(planes, pitch_of_plane, rows_of_plane, pitch, columns, 1);
    const auto all = static_cast<std::size_t>(planes * pitch_of_plane);
    using Unmanaged = Kokkos::MemoryTraits<Kokkos::Unmanaged>;
    const Memory<T> x("x", all);
    const Memory<Out> y("y", all), expected("expected", all), in_place("in place", all);
    const Kokkos::View<T***, Layout3, Kokkos::CudaSpace, Unmanaged> logits(x.data(), layout);
    const auto view_of = [&](const Memory<Out>& memory) {
      return Kokkos::View<Out***, Layout3, Kokkos::CudaSpace, Unmanaged>(memory.data(), layout);
    };
    const Kokkos::View<T***, Kokkos::LayoutRight, Kokkos::CudaSpace, Unmanaged> values(
        compact.data(), planes, rows_of_plane, columns);
    Kokkos::deep_copy(exec, logits, values);
    for (const auto operation : operations) {
      const auto run_by = [&](const char* kernel, const auto& from, const Memory<Out>& to) {
        const ks::ScopedImplementation forced(kernel);
        const Kokkos::View<const T***, Layout3, Kokkos::CudaSpace, Unmanaged> in(from);
        if (operation == Operation::logsumexp) {
          ks::logsumexp(exec, in,
                        Kokkos::View<Out**, Kokkos::LayoutRight, Kokkos::CudaSpace, Unmanaged>(
                            to.data(), planes, rows_of_plane),
                        transform...);
        } else if (operation == Operation::softmax) {
          ks::softmax(exec, in, view_of(to), transform...);
        } else {
          ks::log_softmax(exec, in, view_of(to), transform...);
        }
      };
      for (const auto& to : {y, expected}) Kokkos::deep_copy(exec, to, Out(77.0f));
      run_by(kernels[0], logits, expected);
      run_by(kernels[1], logits, y);
      const auto differ = [&](const Memory<Out>& result) {
        return count_different(exec, result.data(), expected.data(), static_cast<std::int64_t>(all));
      };
      const auto what = [&] {
        return std::string(reference::name(operation)) + ' ' + ks::scalar_name<T>() + ", " +
               std::to_string(rows) + " x " + std::to_string(columns) + ", gap " + std::to_string(gap);
      };
      EXPECT_EQ(differ(y), 0) << what();
      if constexpr (std::is_same_v<T, Out>) {
        if (operation == Operation::logsumexp) continue;
        Kokkos::deep_copy(exec, in_place, Out(77.0f));
        Kokkos::deep_copy(exec, view_of(in_place), logits);
        run_by(kernels[1], view_of(in_place), in_place);
        EXPECT_EQ(differ(in_place), 0) << what() << ", in place";
      }
    }
  }
}
TEST_F(CudaSlicedRows, RowsWhoseSlicesAreAllHeld) {
  // Whole slices, slices that end within a part, and more of a row than a warp has lanes.
  check_held_slices<float, float>(65536, 5, 12);
  check_held_slices<float, float>(65536, 1, 100);
  check_held_slices<float, float>(128256, 2, 32);
  check_held_slices<float, float>(128256, 33, 1);
  check_held_slices<float, float>(40004, 13, 11);
  check_held_slices<float, float>(20000, 3, 75);
  check_held_slices<float, float>(393216, 7, 3);
  check_held_slices<bhalf_t, bhalf_t>(131072, 10, 6);
  check_held_slices<bhalf_t, bhalf_t>(128256, 1, 128);
  check_held_slices<bhalf_t, float>(128256, 7, 11);
  check_held_slices<bhalf_t, float>(128256, 5, 7);
  check_held_slices<bhalf_t, float>(40008, 11, 19);
  check_held_slices<bhalf_t, float>(393216, 3, 7);
  check_held_slices<half_t, half_t>(80008, 3, 60);
  check_held_slices<half_t, float>(65536, 12, 10);
}

// However many rows there are, and so warps for a share of each slice: the bits of grid_pipelined_rows,
// wherever rows begin, and nothing behind the last of them is written.
template <class T, class Out, class... Transform>
void check_numbers_of_rows(std::int64_t columns, const Transform&... transform) {
  const Exec exec;
  constexpr std::int64_t most_rows = 70;
  const std::int64_t count = most_rows * columns;
  using Unmanaged = Kokkos::MemoryTraits<Kokkos::Unmanaged>;
  for (const std::int64_t offset : {0, 1}) {
    const Memory<T> x("x", count + offset);
    const Memory<Out> y("y", count + 1), expected("expected", count + 1);
    T* const logits = x.data() + offset;
    fill(exec, logits, most_rows, columns);
    Kokkos::parallel_for("spoil", Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, count),
                         SpoilSomeRows<T>{logits, columns});
    const auto run_by = [&](const char* kernel, const Memory<Out>& to, bool log, std::int64_t rows) {
      const ks::ScopedImplementation forced(kernel);
      const Kokkos::View<const T**, Kokkos::LayoutRight, Kokkos::CudaSpace, Unmanaged> in(logits, rows,
                                                                                          columns);
      const Kokkos::View<Out**, Kokkos::LayoutRight, Kokkos::CudaSpace, Unmanaged> out(
          to.data() + (log ? offset : 0), rows, columns);
      if (log) {
        ks::log_softmax(exec, in, out, transform...);
      } else {
        ks::softmax(exec, in, out, transform...);
      }
    };
    for (const bool log : {false, true}) {
      for (const std::int64_t rows : {1, 2, 4, 7, 11, 16, 23, 31, 50, 70}) {
        for (const auto& to : {y, expected}) Kokkos::deep_copy(exec, to, Out(77.0f));
        run_by(kernels[0], expected, log, rows);
        try {
          run_by(kernels[1], y, log, rows);
        } catch (const std::invalid_argument&) {
          EXPECT_GT(rows, 16) << "refused";
          continue;
        }
        EXPECT_EQ(count_different(exec, y.data(), expected.data(), count + 1), 0)
            << (log ? "log_softmax " : "softmax ") << ks::scalar_name<T>() << ", " << rows << " x " << columns
            << ", offset " << offset;
      }
    }
  }
}
TEST_F(CudaSlicedRows, AnyNumberOfRowsInFewSlices) {
  for (const std::int64_t columns : {20001, 32768, 50257, 128256}) {
    check_numbers_of_rows<float, float>(columns);
    check_numbers_of_rows<bhalf_t, bhalf_t>(columns);
    check_numbers_of_rows<bhalf_t, float>(columns);
    check_numbers_of_rows<half_t, float>(columns);
  }
  check_numbers_of_rows<half_t, half_t>(131072);
}
TEST_F(CudaSlicedRows, AnyNumberOfTransformedRowsInFewSlices) {
  constexpr std::int64_t columns = 50260;
  const Kokkos::View<bool**, Kokkos::LayoutRight, Kokkos::CudaSpace> mask("mask", 1, columns);
  Kokkos::parallel_for("drop some", Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(0, columns),
                       DropSome{mask.data()});
  Kokkos::fence();
  check_numbers_of_rows<float, float>(columns, ks::scale(0.7));
  check_numbers_of_rows<bhalf_t, bhalf_t>(columns, ks::scale(0.7));
  check_numbers_of_rows<bhalf_t, float>(columns, ks::scale(0.7) | ks::mask(mask));
}

// With a transform that is one function of the logits of a row, of floats: a factor below 0, too, a
// temperature of each row, and one that takes many instructions.
TEST_F(CudaSlicedRows, RowsWhoseTransformedSlicesAreAllHeld) {
  check_held_slices<float, float>(65536, 5, 12, ks::scale(1.7));
  check_held_slices<float, float>(40004, 13, 11, ks::scale(-0.3));
  check_held_slices<float, float>(128256, 33, 1, ks::scale(0.0));
  constexpr std::int64_t planes = 4, rows_of_plane = 12;
  const Kokkos::View<float**, Kokkos::LayoutRight, Kokkos::CudaSpace> temperature("temperature", planes,
                                                                                  rows_of_plane);
  const auto host = Kokkos::create_mirror_view(temperature);
  for (std::int64_t p = 0; p < planes; ++p) {
    for (std::int64_t r = 0; r < rows_of_plane; ++r)
      host(p, r) = 0.1f + 0.3f * static_cast<float>(p * rows_of_plane + r);
  }
  host(0, 3) = -2;
  Kokkos::deep_copy(temperature, host);
  check_held_slices<float, float>(128256, planes, rows_of_plane, ks::temperature(temperature));
  check_held_slices<float, float>(100004, planes, rows_of_plane, ks::temperature(temperature));
  check_held_slices<float, float>(65536, 10, 9, ks::gelu());
}

// Rows that take so much of the grid's slots that some of their slices, or all, may be read twice: in slices
// of each length, all held, none, the last ones.
TEST_F(CudaSlicedRows, RowsThatFillMuchOfTheGrid) {
  const Exec exec;
  for (const std::int64_t columns : {2200003, 3000001, 4194304, 5500001, 8388608, 20000003}) {
    constexpr std::int64_t rows = 3;
    const std::vector<double> logits = random_values(Scalar::float32, columns, -9, 9, columns);
    for (const auto operation : operations) expect_right<float>(operation, 1, columns, logits, kernels[0]);
    const Memory<float> x("x", rows * columns), y("y", rows * columns);
    for (const auto operation : {Operation::softmax, Operation::log_softmax}) {
      fill(exec, x.data(), rows, columns);
      const ks::ScopedImplementation forced(kernels[0]);
      run(operation, exec, x.data(), y.data(), rows, columns);
      run(operation, exec, x.data(), x.data(), rows, columns);
      EXPECT_EQ(count_different(exec, x.data(), y.data(), rows * columns), 0)
          << reference::name(operation) << ' ' << columns;
    }
  }
}

// How many slices of a row are held, and how many are read twice, moves no bits; nor does where they wait for
// their row, in shared memory alone or in registers, too (a part below 0, which leaves it to the kernel).
template <class T, class Make>
void check_parts_held(std::int64_t columns, const Make& make) {
  using ks::impl::GridPipelinedRows, ks::impl::GridPipelinedShape, ks::impl::ReductionPlan;
  const Exec exec;
  constexpr std::int64_t rows = 5;
  constexpr std::int64_t most_off = 3;
  const Memory<T> x("x", rows * columns + most_off), y("y", rows * columns + most_off),
      expected("expected", rows * columns);
  const auto transform = make(rows);
  struct Place {
    std::int64_t x, y;
  };
  for (const auto operation : {Operation::softmax, Operation::log_softmax}) {
    const auto run_with = [&](double part, Place off, T* to) {
      fill(exec, x.data() + off.x, rows, columns);
      if (to != x.data()) fill(exec, to, rows, columns, 99);
      const auto problem = problem_of(operation, x.data() + off.x, to + off.y, rows, columns, transform);
      const ReductionPlan plan = ks::impl::plan_of(problem);
      ASSERT_TRUE(plan.reads_twice);
      GridPipelinedRows::run_with(exec, problem, plan, {.part_held = part});
    };
    run_with(0, {0, 0}, expected.data());
    const auto check = [&](double part, Place off, const T* to) {
      EXPECT_EQ(count_different(exec, to + off.y, expected.data(), rows * columns), 0)
          << reference::name(operation) << ' ' << ks::scalar_name<T>() << ", " << columns << " columns, "
          << part << " of the slots, x off by " << off.x << ", y by " << off.y;
    };
    for (const double part : {0.1, 0.45, 0.7, 1.0, -1.0}) {
      run_with(part, {0, 0}, y.data());
      check(part, {0, 0}, y.data());
    }
    for (const Place off : {Place{1, 1}, Place{most_off, most_off}, Place{1, 0}}) {
      run_with(-1, off, y.data());
      check(-1, off, y.data());
    }
    run_with(-1, {1, 1}, x.data());
    check(-1, {1, 1}, x.data());
  }
}

TEST_F(CudaSlicedRows, RowsGiveTheSameBitsHoweverMuchIsHeld) {
  using ks::impl::BoundIdentity;
  const auto identity = [](std::int64_t) { return BoundIdentity{}; };
  for (const std::int64_t columns : {1966081, 2097152}) check_parts_held<float>(columns, identity);
  for (const std::int64_t columns : {2097153, 2200003, 4194304, 8388608, 9000000}) {
    check_parts_held<float>(columns, identity);
    const Operands<float> operands(columns);
    check_parts_held<float>(columns, [&](std::int64_t rows) { return operands.bound_bias(0, rows); });
  }
  for (const std::int64_t columns : {4400003, 8388608, 9000001}) {
    check_parts_held<bhalf_t>(columns, identity);
    const Operands<bhalf_t> operands(columns);
    check_parts_held<bhalf_t>(columns, [&](std::int64_t rows) { return operands.bound_mask(0, rows); });
    check_parts_held<bhalf_t>(columns, [&](std::int64_t rows) { return operands.bound_bias(0, rows); });
  }
}

// Rows whose slices are joined in runs, and those at the limits of that, with runs of -inf, NaN and +inf.
template <class T>
void check_rows_with_runs(std::initializer_list<std::int64_t> lengths, bool parks, int expected_with_runs) {
  using ks::impl::ReductionPlan;
  const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  constexpr std::int64_t rows = 3;
  int with_runs = 0;
  for (const std::int64_t columns : lengths) {
    SCOPED_TRACE(columns);
    const ReductionPlan plan = ReductionPlan::of<T>(columns, parks);
    ASSERT_LE(plan.runs * ReductionPlan::slices_of_run + ReductionPlan::slices_ahead, plan.slices);
    with_runs += plan.runs > 0 ? 1 : 0;
    const std::int64_t run = ReductionPlan::slices_of_run * plan.slice_columns;
    std::vector<double> logits = random_values(Scalar::float32, rows * columns, -9, 9, columns);
    std::fill_n(logits.begin(), run, -inf);                            // the first run
    std::fill_n(logits.begin() + columns + run, columns - run, -inf);  // all behind it
    logits[static_cast<std::size_t>(columns + 7)] = 80;
    logits[static_cast<std::size_t>(2 * columns + run / 2)] = columns % 2 == 0 ? nan : inf;
    for (const auto operation : operations) expect_right<T>(operation, rows, columns, logits, kernels[0]);
  }
  EXPECT_EQ(with_runs, expected_with_runs);
}
TEST_F(CudaSlicedRows, RowsWithRunsOfSlices) {
  constexpr std::int64_t slice = ks::impl::ReductionPlan::usual_slice_bytes / sizeof(float);
  check_rows_with_runs<float>({128 * slice, 128 * slice + 1, 145 * slice, 159 * slice, 160 * slice,
                               160 * slice + 1, 4194304, 4194305, 6000001, 9000001},
                              true, 5);
  constexpr std::int64_t of_double = slice / 2;
  check_rows_with_runs<double>({127 * of_double, 129 * of_double, 160 * of_double, 224 * of_double,
                                225 * of_double + 1, 256 * of_double, 1572865, 3000001},
                               false, 7);
}

// Holds multiprocessors for a while.
__global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}

// Launches of random shapes on two streams of different priority from two host threads, beside a kernel that
// holds half the multiprocessors now and then. Whether it ends is the test, and whether the results are
// right.
template <class T>
void launch_many_on_two_streams(int launches) {
  int least = 0, greatest = 0;
  EXPECT_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  cudaDeviceProp device{};
  EXPECT_CUDA(cudaGetDeviceProperties(&device, 0));
  std::atomic<int> running{2};
  const auto work = [&](int id) {
    cudaStream_t stream{};
    EXPECT_CUDA(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, id ? greatest : least));
    {
      const Exec exec(stream);
      constexpr std::int64_t most = (1 << 25) / sizeof(T);
      const Memory<T> x(Kokkos::view_alloc("x", Kokkos::WithoutInitializing), most), y("y", most),
          expected("expected", most);
      fill(exec, x.data(), 1, most);
      std::mt19937 random(id + 1);
      for (int i = 0; i < launches; ++i) {
        const auto columns = std::uniform_int_distribution<std::int64_t>(1, most >> (random() % 14))(random);
        const auto rows = std::max<std::int64_t>(1, std::min<std::int64_t>(most / columns, random() % 64));
        const ks::ScopedImplementation forced(kernels[random() % 2]);
        try {
          run(Operation::softmax, exec, x.data(), y.data(), rows, columns);
          if (i % 50 != 0) continue;
          const ks::ScopedImplementation grid(kernels[0]);
          run(Operation::softmax, exec, x.data(), expected.data(), rows, columns);
          EXPECT_EQ(count_different(exec, y.data(), expected.data(), rows * columns), 0)
              << rows << " x " << columns;
        } catch (const std::invalid_argument&) {
        }
      }
      exec.fence();
    }
    EXPECT_CUDA(cudaStreamDestroy(stream));
    --running;
  };
  std::thread a(work, 0), b(work, 1);
  cudaStream_t background{};
  EXPECT_CUDA(cudaStreamCreateWithFlags(&background, cudaStreamNonBlocking));
  while (running > 0) {
    spin<<<static_cast<unsigned>(device.multiProcessorCount / 2), 1024, 0, background>>>(200000);
    EXPECT_CUDA(cudaStreamSynchronize(background));
  }
  a.join();
  b.join();
  EXPECT_CUDA(cudaStreamDestroy(background));
}
TEST_F(CudaSlicedRows, ManyLaunchesOnTwoStreamsBesideOtherWork) {
  launch_many_on_two_streams<float>(5000);
  launch_many_on_two_streams<double>(2000);
}

// Calls that may begin before the one before them has ended read what that one wrote, and write what it read:
// the same bits as with a fence after each, on a stream and in a graph. (Of these kernels none ends so late
// behind its trigger that a missing grid_dependency_wait() would show: see test_cuda_dependent_launch.cpp.)
TEST_F(CudaSlicedRows, EachCallSeesTheOneBefore) {
  cudaStream_t stream{};
  EXPECT_CUDA(cudaStreamCreate(&stream));
  {
    const Exec exec(stream);
    for (const auto& [rows, columns] : {std::pair<std::int64_t, std::int64_t>{1, 128256},
                                        {7, 50257},
                                        {40, 128256},
                                        {300, 20000},
                                        {300, 50257},
                                        {90, 100000}}) {
      const std::int64_t count = rows * columns;
      const Memory<float> x("x", count), y("y", count),
          expected[] = {Memory<float>("expected", count), Memory<float>("others", count)};
      const Rows<float> in_x(x.data(), rows, columns), in_y(y.data(), rows, columns);
      // In place and not, and nothing of the logits gets lost on the way.
      const auto call_all = [&](bool fences) {
        for (int i = 0; i < 12; ++i) {
          const ks::ScopedImplementation forced(kernels[rows < 10 && i % 3 == 0 ? 1 : 0]);
          ks::log_softmax(exec, i % 4 < 2 ? in_x : in_y, i % 4 == 0 || i % 4 == 3 ? in_x : in_y,
                          ks::scale(i % 2 == 0 ? 1.25 : 0.8));
          if (fences) exec.fence();
        }
      };
      // Others in turn, so that what is left of those before is not right.
      const auto fill_x = [&](int turn) { fill(exec, x.data(), rows, columns, turn % 2 * rows); };
      const auto expect_right = [&](int turn, const char* how) {
        EXPECT_EQ(count_different(exec, x.data(), expected[turn % 2].data(), count), 0)
            << how << ", " << rows << " x " << columns << ", turn " << turn;
      };
      for (int turn = 0; turn < 2; ++turn) {
        fill_x(turn);
        call_all(true);
        Kokkos::deep_copy(exec, expected[turn], x);
      }
      EXPECT_GT(count_different(exec, expected[0].data(), expected[1].data(), count), count / 2);
      for (int turn = 0; turn < 20; ++turn) {
        fill_x(turn);
        call_all(false);
        expect_right(turn, "on a stream");
      }
      cudaGraph_t graph{};
      cudaGraphExec_t instance{};
      EXPECT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      call_all(false);
      EXPECT_CUDA(cudaStreamEndCapture(stream, &graph));
      EXPECT_CUDA(cudaGraphInstantiate(&instance, graph, 0));
      for (int turn = 0; turn < 20; ++turn) {
        fill_x(turn);
        EXPECT_CUDA(cudaGraphLaunch(instance, stream));
        expect_right(turn, "in a graph");
      }
      EXPECT_CUDA(cudaGraphExecDestroy(instance));
      EXPECT_CUDA(cudaGraphDestroy(graph));
    }
  }
  EXPECT_CUDA(cudaStreamDestroy(stream));
}

// Two graphs of several calls each, at once and a thousand times.
TEST_F(CudaSlicedRows, TwoGraphsReplayedAtOnce) {
  constexpr std::int64_t shapes[][2] = {{3, 70000}, {64, 9000}, {1, 128256}, {5, 400000}};
  struct Captured {
    cudaStream_t stream{};
    cudaGraphExec_t graph{};
    Memory<float> x, y, expected;
  } captured[2];
  std::int64_t most = 0;
  for (const auto& shape : shapes) most = std::max(most, shape[0] * shape[1]);
  for (int id = 0; id < 2; ++id) {
    Captured& c = captured[id];
    EXPECT_CUDA(cudaStreamCreateWithFlags(&c.stream, cudaStreamNonBlocking));
    const Exec exec(c.stream);
    c.x = Memory<float>("x", most);
    c.y = Memory<float>("y", most);
    c.expected = Memory<float>("expected", most);
    fill(exec, c.x.data(), 1, most, id);
    for (const auto& shape : shapes) {
      const Rows<float> x(c.x.data(), shape[0], shape[1]), y(c.y.data(), shape[0], shape[1]);
      ks::reserve(exec, x, y);
      run(Operation::softmax, exec, c.x.data(), c.expected.data(), shape[0], shape[1]);
    }
    exec.fence();
    EXPECT_CUDA(cudaStreamBeginCapture(c.stream, cudaStreamCaptureModeThreadLocal));
    for (const auto& shape : shapes)
      run(Operation::softmax, exec, c.x.data(), c.y.data(), shape[0], shape[1]);
    cudaGraph_t graph{};
    EXPECT_CUDA(cudaStreamEndCapture(c.stream, &graph));
    EXPECT_CUDA(cudaGraphInstantiate(&c.graph, graph, 0));
    EXPECT_CUDA(cudaGraphDestroy(graph));
  }
  for (int replay = 0; replay < 1000; ++replay) {
    for (const Captured& c : captured) EXPECT_CUDA(cudaGraphLaunch(c.graph, c.stream));
  }
  for (Captured& c : captured) {
    EXPECT_CUDA(cudaStreamSynchronize(c.stream));
    const Exec exec;
    EXPECT_EQ(count_different(exec, c.y.data(), c.expected.data(), most), 0);
    EXPECT_CUDA(cudaGraphExecDestroy(c.graph));
    EXPECT_CUDA(cudaStreamDestroy(c.stream));
  }
}

// The epoch of the workspace's words wraps around: what older launches left there is not taken for new,
// whichever kernels ran before, last, and since. Rows of several slices whose blocks need not be resident
// together, and of such that do. Launches of one row in between leave words of the others where they were.
TEST_F(CudaSlicedRows, EpochWrapsAround) {
  constexpr std::uint32_t largest = ks::impl::CudaWorkspace::largest_epoch;
  for (const std::int64_t columns : {50000, 100000, 300000}) {
    constexpr std::int64_t all_rows = 5;
    const Exec exec;
    const Memory<float> x("x", all_rows * columns), y("y", all_rows * columns),
        expected("expected", all_rows * columns);
    const auto run_with = [&](std::int64_t first_row, const char* kernel, std::int64_t rows,
                              const Memory<float>& to) {
      fill(exec, x.data(), rows, columns, first_row);
      const ks::ScopedImplementation forced(kernel);
      run(Operation::softmax, exec, x.data(), to.data(), rows, columns);
      exec.fence();
    };
    run_with(0, kernels[0], all_rows, expected);
    auto* header = ks::impl::CudaWorkspace::get<float>(exec, 1).header;
    const auto set_epoch = [&](std::uint32_t epoch) {
      const unsigned long long word = static_cast<unsigned long long>(epoch) << 32;
      EXPECT_CUDA(cudaMemcpy(&header->epoch_and_arrivals, &word, sizeof(word), cudaMemcpyHostToDevice));
    };
    for (int which = 0; which < 8; ++which) {
      const char *before = kernels[which & 1], *last = kernels[which >> 1 & 1],
                 *since = kernels[which >> 2 & 1];
      const auto expect_right = [&](const char* kernel, std::int64_t rows) {
        run_with(0, kernel, rows, y);
        EXPECT_EQ(count_different(exec, y.data(), expected.data(), rows * columns), 0)
            << columns << " columns, " << rows << " rows, " << before << ", " << last << ", " << since;
      };
      // Words of other logits under the tag of the last epoch.
      set_epoch(largest);
      run_with(1000, last, all_rows, y);
      set_epoch(largest - 1);
      expect_right(before, 1);
      expect_right(last, all_rows);
      // And under the first one.
      set_epoch(0);
      run_with(1000, since, all_rows, y);
      set_epoch(largest - 1);
      expect_right(before, 1);
      expect_right(last, 1);
      expect_right(since, all_rows);
      expect_right(since, all_rows);
      unsigned long long now = 0;
      EXPECT_CUDA(cudaMemcpy(&now, &header->epoch_and_arrivals, sizeof(now), cudaMemcpyDeviceToHost));
      EXPECT_EQ(now >> 32, 2u) << before << ", " << last << ", " << since;
    }
  }
}

// Holds every multiprocessor that it gets but the first two, until it is told to let go, or for too long.
__global__ void hold_all_but_two(const volatile int* lets_go, unsigned* held, long long cycles) {
  unsigned number = 0;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
  if (number < 2) return;
  atomicAdd_system(held, 1u);
  const long long start = clock64();
  while (*lets_go == 0 && clock64() - start < cycles) {
  }
}

// Rows of which the rings of one block, or of two, hold one need no others: they end while other work holds
// all multiprocessors but two, for as long as that may be. So does logsumexp, whose blocks hold none. Longer
// rows wait until all are free.
template <class T>
void run_on_two_multiprocessors() {
  cudaDeviceProp device{};
  EXPECT_CUDA(cudaGetDeviceProperties(&device, 0));
  const auto others = static_cast<unsigned>(device.multiProcessorCount) - 2;
  const int all_shared = static_cast<int>(device.sharedMemPerBlockOptin);
  EXPECT_CUDA(
      cudaFuncSetAttribute(hold_all_but_two, cudaFuncAttributeMaxDynamicSharedMemorySize, all_shared));
  cudaStream_t background{}, stream{};
  EXPECT_CUDA(cudaStreamCreateWithFlags(&background, cudaStreamNonBlocking));
  EXPECT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  unsigned* words = nullptr;  // whether the holder lets go, and how many multiprocessors it has
  EXPECT_CUDA(cudaHostAlloc(&words, 2 * sizeof(unsigned), cudaHostAllocMapped));
  auto* const lets_go = reinterpret_cast<volatile int*>(words);
  volatile unsigned* const held = words + 1;
  {
    const Exec exec(stream);
    struct Rows {
      Operation operation;
      std::int64_t rows, columns;
      bool needs_others = false;
    };
    constexpr std::int64_t slice = 32768 / sizeof(T);
    for (const auto& [operation, rows, columns, needs_others] :
         {Rows{Operation::softmax, 300, 2 * slice},
          {Operation::softmax, 300, 2 * slice + 1},
          {Operation::softmax, 200, 3 * slice + 1},
          {Operation::softmax, 200, 6 * slice},
          {Operation::log_softmax, 150, 6 * slice - 77},
          {Operation::softmax, 100, 8 * slice},
          {Operation::softmax, 100, 12 * slice},
          {Operation::log_softmax, 100, 11 * slice + 3},
          {Operation::logsumexp, 300, 2 * slice},
          {Operation::logsumexp, 100, 8 * slice},
          {Operation::logsumexp, 40, 50 * slice + 1},
          {Operation::logsumexp, 3, 200 * slice},
          {Operation::softmax, 100, 20 * slice, true}}) {
      const std::int64_t outputs = rows * (operation == Operation::logsumexp ? 1 : columns);
      const Memory<T> x("x", rows * columns), y("y", outputs), expected("expected", outputs);
      fill(exec, x.data(), rows, columns);
      const ks::ScopedImplementation forced(kernels[0]);
      run(operation, exec, x.data(), expected.data(), rows, columns);
      exec.fence();
      *lets_go = 0;
      *held = 0;
      hold_all_but_two<<<others + 2, 1, static_cast<std::size_t>(all_shared), background>>>(
          lets_go, words + 1, 40'000'000'000);
      const auto start = std::chrono::steady_clock::now();
      const std::chrono::milliseconds most(needs_others ? 200 : 10000);
      const auto waits = [&] { return std::chrono::steady_clock::now() - start < most; };
      while (*held < others && waits()) std::this_thread::yield();
      EXPECT_EQ(*held, others);
      run(operation, exec, x.data(), y.data(), rows, columns);
      while (cudaStreamQuery(stream) == cudaErrorNotReady && waits()) std::this_thread::yield();
      EXPECT_EQ(cudaStreamQuery(stream), needs_others ? cudaErrorNotReady : cudaSuccess)
          << reference::name(operation) << ' ' << ks::scalar_name<T>() << ", " << rows << " x " << columns;
      EXPECT_EQ(cudaStreamQuery(background), cudaErrorNotReady) << "it did not hold on";
      *lets_go = 1;
      EXPECT_CUDA(cudaStreamSynchronize(background));
      EXPECT_EQ(count_different(exec, y.data(), expected.data(), outputs), 0)
          << reference::name(operation) << ' ' << ks::scalar_name<T>() << ", " << rows << " x " << columns;
    }
  }
  EXPECT_CUDA(cudaFreeHost(words));
  EXPECT_CUDA(cudaStreamDestroy(stream));
  EXPECT_CUDA(cudaStreamDestroy(background));
}
TEST_F(CudaSlicedRows, RowsThatOneBlockOrTwoHoldNeedNoOthers) {
  run_on_two_multiprocessors<float>();
  run_on_two_multiprocessors<ks::bhalf_t>();
  run_on_two_multiprocessors<double>();
}

// The last row ends where its memory ends, off a boundary of 16 bytes: for compute-sanitizer, which sees
// reads beyond.
template <class T>
void run_at_the_end_of_memory() {
  const Exec exec;
  for (const std::int64_t columns : {2, 3, 8191, 20001, 100003}) {
    for (const std::int64_t rows : {1, 3}) {
      T *x = nullptr, *y = nullptr, *bias = nullptr;
      bool* mask = nullptr;
      EXPECT_CUDA(cudaMalloc(&x, rows * columns * sizeof(T)));
      EXPECT_CUDA(cudaMalloc(&y, rows * columns * sizeof(T)));
      EXPECT_CUDA(cudaMalloc(&bias, rows * columns * sizeof(T)));
      EXPECT_CUDA(cudaMalloc(&mask, rows * columns));
      fill(exec, x, rows, columns);
      fill(exec, bias, rows, columns);
      EXPECT_CUDA(cudaMemset(mask, 1, rows * columns));
      const ks::impl::BoundMask<bool> dropped{operand_of(mask, 0, rows, columns)};
      const ks::impl::BoundBias<T> added{operand_of(bias, 0, rows, columns)};
      for (const char* kernel : kernels) {
        const ks::ScopedImplementation forced(kernel);
        for (const auto operation : operations) run(operation, exec, x, y, rows, columns);
      }
      {
        const ks::ScopedImplementation forced(kernel_of_logsumexp);
        run(Operation::logsumexp, exec, x, y, rows, columns);
      }
      for (const auto operation : operations) {
        if constexpr (sizeof(T) == 4) {
          const ks::impl::BoundChain<ks::impl::BoundMask<bool>, ks::impl::BoundBias<T>> both{dropped, added};
          run_kernel<ks::impl::GridPipelinedRows>(operation, exec, x, y, rows, columns, both);
        } else {
          run_kernel<ks::impl::GridPipelinedRows>(operation, exec, x, y, rows, columns, dropped);
          run_kernel<ks::impl::GridPipelinedRows>(operation, exec, x, y, rows, columns, added);
        }
      }
      exec.fence();
      EXPECT_CUDA(cudaFree(x));
      EXPECT_CUDA(cudaFree(y));
      EXPECT_CUDA(cudaFree(bias));
      EXPECT_CUDA(cudaFree(mask));
    }
  }
}

TEST_F(CudaSlicedRows, ReadsNothingBehindTheLastRow) {
  run_at_the_end_of_memory<float>();
  run_at_the_end_of_memory<bhalf_t>();
}

}  // namespace

#endif
