// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The CUDA kernels whose blocks may begin before the kernel ahead of them in the stream has ended
// (programmatic dependent launch): each waits for that one before it reads or writes anything, on a stream
// and in a graph.
#include <cstdint>
#include <string>
#include <vector>

#include "../support/cases.hpp"
#include "../support/cuda_graph.hpp"

#if defined(KOKKOS_ENABLE_CUDA)

namespace {

using namespace tests;
using Exec = Kokkos::Cuda;

using Bytes = std::vector<unsigned char>;
std::int64_t count_bytes(const Buffer<Exec>& buffer) {
  return buffer.layout().span() * static_cast<std::int64_t>(reference::size_of(buffer.scalar()));
}
Bytes bytes_of(const Buffer<Exec>& buffer) {
  return {buffer.host(), buffer.host() + count_bytes(buffer)};
}

struct Copy {
  const uint4* from = nullptr;
  uint4* to = nullptr;
  std::int64_t vectors = 0;

  Copy() = default;
  // (The last vector may take some of what guards a buffer along: the same bytes in all of them.)
  Copy(const Buffer<Exec>& from_, const Buffer<Exec>& to_)
      : from(static_cast<const uint4*>(from_.device())),
        to(static_cast<uint4*>(to_.device())),
        vectors((count_bytes(from_) + 15) / 16) {
    EXPECT_EQ(count_bytes(from_), count_bytes(to_));
  }
  __device__ void by_warp() const {
    for (std::int64_t i = threadIdx.x; i < vectors; i += 32) to[i] = from[i];
  }
};

// One after the other.
struct Copies {
  Copy copy[3];
};

// Lets the kernel behind it begin at once, and copies half a millisecond later: by then that one has ended,
// unless it waits. One warp of few registers and no shared memory: whatever begins has room beside it.
__global__ void __launch_bounds__(32) copy_late(const __grid_constant__ Copies copies) {
  ks::impl::grid_launch_dependents();
  const long long begin = clock64();
  while (clock64() - begin < 1000000) {
  }
  for (const Copy& copy : copies.copy) copy.by_warp();
}

// Does not wait.
__global__ void __launch_bounds__(32) copy_at_once(const __grid_constant__ Copy copy) {
  copy.by_warp();
}

// The name of the kernel that was captured last; of no kernel where CUDA does not tell.
std::string last_captured_kernel([[maybe_unused]] cudaStream_t stream) {
  std::string result;
#if CUDART_VERSION >= 12030
  cudaStreamCaptureStatus status{};
  const cudaGraphNode_t* nodes = nullptr;
  std::size_t count = 0;
#if CUDART_VERSION >= 13000
  const cudaGraphEdgeData* edges = nullptr;
  EXPECT_CUDA(cudaStreamGetCaptureInfo(stream, &status, nullptr, nullptr, &nodes, &edges, &count));
#else
  EXPECT_CUDA(cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, nullptr, &nodes, &count));
#endif
  if (count != 1) return result;
  cudaKernelNodeParams kernel{};
  EXPECT_CUDA(cudaGraphKernelNodeGetParams(nodes[0], &kernel));
  const char* name = nullptr;
  EXPECT_CUDA(cudaFuncGetName(&name, kernel.func));
  if (name) result = name;
#endif
  return result;
}

// What a call reads: values that it must not see, and those that are written over them late.
struct Input {
  std::vector<double> early_values, late_values;
  Buffer<Exec> memory, late;

  // The late ones are larger, so that sums of many show it.
  Input(Scalar scalar, const Layout& layout, std::uint64_t seed)
      : early_values(random_values(scalar, layout.size(), -5, 5, seed)),
        late_values(random_values(scalar, layout.size(), -2, 8, seed + 1)),
        memory(scalar, layout),
        late(scalar, layout, &late_values) {}
  void hold(const std::vector<double>& values) {
    memory.fill(values);
    memory.upload();
  }
};

struct Shape {
  const char* kernel;  // the function that this shape comes to, of the implementation
  const char* implementation;
  std::int64_t rows, columns, padding = 0;
};

class CudaDependentLaunch : public testing::Test {
 protected:
  void SetUp() override {
    if (exec.cuda_device_prop().major < 9 || !ks::impl::has_grid_dependency_wait(&copy_late))
      GTEST_SKIP() << "needs a device of compute capability 9.0";
    // A kernel whose blocks have all of a multiprocessor's shared memory begins beside a block of this one
    // only where that had L1 divided like this.
    EXPECT_CUDA(cudaFuncSetAttribute(&copy_late, cudaFuncAttributePreferredSharedMemoryCarveout,
                                     cudaSharedmemCarveoutMaxShared));
  }

  void launch_copy_late(const Copies& copies) const {
    copy_late<<<1, 32, 0, stream>>>(copies);
    EXPECT_CUDA(cudaGetLastError());
  }

  // `softmax` is called outside of a capture first, which loads its kernel.
  template <class Softmax>
  void expect_kernel(const Softmax& softmax, const char* expected, const char* parameters) const {
    softmax();
    std::string kernel;
    const Graph graph(stream, [&] {
      softmax();
      kernel = last_captured_kernel(stream);
    });
    ASSERT_EQ(graph.failure(), "");
    if (kernel.empty()) GTEST_SKIP() << "CUDA does not tell the names of kernels";
    EXPECT_NE(kernel.find(expected), std::string::npos) << kernel;
    EXPECT_NE(kernel.find(parameters), std::string::npos) << kernel;
  }

  // The kernels in the library.
  template <class T>
  void check(const Shape& shape) {
    check_operations<T>(shape, nullptr);
  }
  // Those that are compiled here. (Of float alone: those of 16 bits with a transform are the same.)
  void check_with_bias(const Shape& shape) {
    Input bias(Scalar::float32, reference::right({shape.rows, shape.columns}), 11);
    check_operations<float>(shape, &bias, ks::bias(bias.memory.view<const float, 2>()));
  }
  void check_with_bias_of_all_rows(const Shape& shape) {
    Input bias(Scalar::float32, reference::right({1, shape.columns}), 11);
    check_operations<float>(shape, &bias, ks::bias(bias.memory.view<const float, 2>()));
  }

  template <class T, class... Transform>
  void check_operations(const Shape& shape, Input* bias, const Transform&... transform) {
    SCOPED_TRACE(std::string(shape.kernel) + " of " + ks::scalar_name<T>() + ", " +
                 std::to_string(shape.rows) + " x " + std::to_string(shape.columns) +
                 (bias ? " with a bias" : ""));
    check_call<T>(shape, Operation::softmax, false, bias, transform...);
    check_call<T>(shape, Operation::softmax, true, bias, transform...);
    check_call<T>(shape, Operation::logsumexp, false, bias, transform...);
  }

  template <class T, class... Transform>
  void check_call(const Shape& shape, Operation operation, bool in_place, Input* bias,
                  const Transform&... transform) {
    SCOPED_TRACE(std::string(reference::name(operation)) + (in_place ? " in place" : ""));
    const Layout rows = reference::right({shape.rows, shape.columns}, shape.padding);
    const bool reduces = operation == Operation::logsumexp;
    Input x(scalar_of<T>, rows, 1);
    Buffer<Exec> separate(scalar_of<T>, reduces ? reference::right({shape.rows}) : rows);
    Buffer<Exec>& y = in_place ? x.memory : separate;
    const auto call_on_stream = [&] {
      // Only one of the two outputs exists; the other view is never used.
      StridedView<T, 2, Exec> y_view;
      StridedView<T, 1, Exec> lse_view;
      if (reduces) {
        lse_view = y.template view<T, 1>();
      } else {
        y_view = y.template view<T, 2>();
      }
      const ks::ScopedImplementation forced(shape.implementation);
      call(operation, exec, x.memory.template view<const T, 2>(), y_view, lse_view, -1, transform...);
    };
    const auto hold = [&](bool late) {
      x.hold(late ? x.late_values : x.early_values);
      if (bias) bias->hold(late ? bias->late_values : bias->early_values);
    };
    const auto result_of_fenced_call = [&](bool late) {
      hold(late);
      call_on_stream();
      exec.fence();
      y.download();
      return bytes_of(y);
    };
    const Bytes expected = result_of_fenced_call(true);
    ASSERT_NE(expected, result_of_fenced_call(false));

    Buffer<Exec> seen(y.scalar(), y.layout());
    Copies copies{{Copy(y, seen), Copy(x.late, x.memory)}};
    if (bias) copies.copy[2] = Copy(bias->late, bias->memory);
    const std::vector<double> no_results(static_cast<std::size_t>(y.layout().size()), -99);
    for (const bool in_graph : {false, true}) {
      SCOPED_TRACE(in_graph ? "in a graph" : "on a stream");
      hold(false);
      if (!in_place) {
        separate.fill(no_results);
        separate.upload();
      }
      const Bytes before = bytes_of(y);
      if (in_graph) {
        std::string kernel;
        const Graph graph(stream, [&] {
          launch_copy_late(copies);
          call_on_stream();
          kernel = last_captured_kernel(stream);
        });
        ASSERT_EQ(graph.failure(), "");
        EXPECT_EQ(graph.nodes(), 2u);
        if (!kernel.empty()) EXPECT_NE(kernel.find(shape.kernel), std::string::npos) << kernel;
        graph.launch();
        exec.fence();
      } else {
        launch_copy_late(copies);
        call_on_stream();
        exec.fence();
      }
      y.download();
      EXPECT_TRUE(bytes_of(y) == expected) << "not the results of what the kernel ahead wrote";
      seen.download();
      EXPECT_TRUE(bytes_of(seen) == before) << "the kernel ahead did not see what was there before";
    }
  }

  const Stream stream;
  const Exec exec{stream};
};

// What the other tests lean on. (It fails where kernels run one after the other, as with CUDA_LAUNCH_BLOCKING
// or under a tool that watches each: the others show nothing there.)
TEST_F(CudaDependentLaunch, AKernelThatDoesNotWaitIsEarly) {
  Input x(Scalar::float32, reference::right({1000}), 1);
  Buffer<Exec> seen(Scalar::float32, reference::right({1000}));
  bool early = false;
  const auto launch_both = [&] {
    launch_copy_late({{Copy(x.late, x.memory)}});
    ks::impl::launch_kernel(exec, &copy_at_once, true, 1, 32, 0, Copy(x.memory, seen));
  };
  const auto is_early = [&](const auto& launch) {
    x.hold(x.early_values);
    launch();
    exec.fence();
    seen.download();
    return bytes_of(seen) == bytes_of(x.memory);
  };
  // More than once: the host may be slow.
  for (int i = 0; i < 20 && !early; ++i) early = is_early(launch_both);
  EXPECT_TRUE(early) << "on a stream";
  const Graph graph(stream, launch_both);
  ASSERT_EQ(graph.failure(), "");
  EXPECT_TRUE(is_early([&] { graph.launch(); })) << "in a graph";
}

TEST_F(CudaDependentLaunch, ThreadPerRow) {
  for (const std::int64_t padding : {0, 2}) {
    const Shape shape{"thread_per_row_kernel", "thread_per_row", 200, 10, padding};
    check<float>(shape);
    check<bhalf_t>(shape);
    check_with_bias(shape);
  }
}

TEST_F(CudaDependentLaunch, QuadPerRow) {
  for (const std::int64_t columns : {40, 65}) {
    for (const std::int64_t padding : {0, 2, 4})
      check<float>({"quad_per_row_kernel", "quad_per_row", 3000, columns, padding});
    check<float>({"quad_per_row_of_few_kernel", "quad_per_row", 200, columns});
  }
}

TEST_F(CudaDependentLaunch, WarpPerRow) {
  const std::int64_t many = 8 * exec.cuda_device_prop().multiProcessorCount + 1;  // for rows of 16 bits
  for (const std::int64_t columns : {64, 65}) {
    const Shape shape{"warp_per_row_kernel", "warp_per_row", 200, columns};
    check<float>(shape);
    check<bhalf_t>({"warp_per_row_kernel", "warp_per_row", many, columns});
    check_with_bias(shape);
  }
}

TEST_F(CudaDependentLaunch, BlockPerRow) {
  // A row of a warp in more of them, and rows that begin off boundaries of 16 bytes.
  for (const Shape& shape : {Shape{"block_per_row_kernel", "warp_per_row", 20, 1000},
                             Shape{"block_per_row_kernel", "block_per_row", 5, 4096, 2}}) {
    check<float>(shape);
    check<bhalf_t>(shape);
    check_with_bias(shape);
  }
  const Shape filled{"block_per_filled_row_kernel", "block_per_row", 5, 4096};
  check<float>(filled);
  check_with_bias(filled);
  check<bhalf_t>({"block_per_row_kernel", "block_per_row", 5, 4096});
  const Shape irregular{"block_per_row_kernel", "block_per_row", 5, 4097};
  check<float>(irregular);
  check<bhalf_t>(irregular);
}

TEST_F(CudaDependentLaunch, RowsInTurn) {
  check_with_bias_of_all_rows({"rows_in_turn_kernel", "block_per_row", 40, 2048});
}

TEST_F(CudaDependentLaunch, StagedRows) {
  check_with_bias({"staged_row_kernel", "warp_per_row", 520, 301});
  check_with_bias({"staged_row_kernel", "block_per_row", 5, 4097});
}

TEST_F(CudaDependentLaunch, TiledRows) {
  for (const std::int64_t columns : {33, 301}) {
    for (const std::int64_t padding : {0, 2})
      check<bhalf_t>({"tiled_rows_kernel", "tiled_rows", 300, columns, padding});
  }
}

// Many threads for a slice, and few.
TEST_F(CudaDependentLaunch, SplitRows) {
  for (const Shape& shape : {Shape{"split_rows_kernel", "split_rows", 1, 50257},
                             Shape{"split_rows_kernel", "split_rows", 100, 2048}}) {
    check<float>(shape);
    check<bhalf_t>(shape);
    check_with_bias(shape);
  }
}

// One slice of each block, and two.
TEST_F(CudaDependentLaunch, HeldSlices) {
  check<float>({"held_slices_kernel", "split_rows", 28, 128256});
  check<float>({"held_slices_kernel", "split_rows", 64, 128256});
  check<bhalf_t>({"held_slices_kernel", "split_rows", 60, 131072});
}

TEST_F(CudaDependentLaunch, BlockPerSlicedRow) {
  const Shape shape{"block_per_sliced_row_kernel", "block_per_sliced_row", 40, 20001};
  check_call<float>(shape, Operation::logsumexp, false, nullptr);
  check_call<bhalf_t>(shape, Operation::logsumexp, false, nullptr);
}

// Rows that a block has for itself, and rows of several blocks. (Of float: it begins when all multiprocessors
// have room, and of 16 bits it takes nearly all of their registers.)
TEST_F(CudaDependentLaunch, GridPipelinedRows) {
  for (const Shape& shape : {Shape{"grid_pipelined_rows_kernel", "grid_pipelined_rows", 40, 2100},
                             Shape{"grid_pipelined_rows_kernel", "grid_pipelined_rows", 3, 46100}}) {
    check<float>(shape);
    check_with_bias(shape);
  }
  // Slices of this one wait for their row in registers, too.
  check<float>({"grid_pipelined_rows_kernel", "grid_pipelined_rows", 1, 2200000});
}

// Of the kernels that give the same bits, the one that is meant for so many rows.
TEST_F(CudaDependentLaunch, RowsOfFloatComeToTheirKernel) {
  const std::int64_t multiprocessors = exec.cuda_device_prop().multiProcessorCount;
  const std::int64_t length = 128256, slices = 16;
  const struct {
    std::int64_t rows, columns;
    const char *kernel, *parameters;
  } cases[] = {
      // Of more than L2 holds, and of less.
      {6000, 8192, "block_per_filled_row_kernel", "ILb1ELb1ELi4ELi768E"},
      {300, 8192, "block_per_filled_row_kernel", "ILb1ELb0ELi4ELi1024E"},
      {3000, 16384, "block_per_filled_row_kernel", "ILb1ELb1ELi4ELi1024E"},
      {9000, 5000, "block_per_row_kernel", "ILi4ELb0ELi512E"},
      {1, length, "split_rows_kernel", "ILi2ELi2E"},
      {6 * multiprocessors / slices / 4, length, "split_rows_kernel", "ILi2ELi2E"},
      {3 * multiprocessors / slices, length, "split_rows_kernel", "ILi1ELi8ELi768E"},
      // Those that lie on boundaries of 16 bytes, and those that do not.
      {4 * multiprocessors / slices, length, "held_slices_kernel", "ILb1E"},
      {8 * multiprocessors / slices, length, "held_slices_kernel", "ILb1E"},
      {8 * multiprocessors / slices + 1, length, "grid_pipelined_rows_kernel", "RingForE0E"},
      {4 * multiprocessors / slices, length + 1, "split_rows_kernel", "ILi1ELi8ELi1024E"},
      {4 * multiprocessors / slices + 1, length + 1, "grid_pipelined_rows_kernel", "RingForE0E"},
      {1, 2200000, "grid_pipelined_rows_kernel", "RingForE1E"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(std::to_string(c.rows) + " x " + std::to_string(c.columns));
    const Layout rows = reference::right({c.rows, c.columns});
    Buffer<Exec> x(Scalar::float32, rows), y(Scalar::float32, rows);
    expect_kernel([&] { ks::softmax(exec, x.view<const float, 2>(), y.view<float, 2>()); }, c.kernel,
                  c.parameters);
  }
  // With a bias as large as x, and with one for all rows.
  for (const std::int64_t rows : {8000, 300}) {
    for (const std::int64_t rows_of_bias : {rows, std::int64_t(1)}) {
      SCOPED_TRACE(std::to_string(rows) + " rows with a bias of " + std::to_string(rows_of_bias));
      const Layout layout = reference::right({rows, 5000});
      Buffer<Exec> x(Scalar::float32, layout), y(Scalar::float32, layout),
          bias(Scalar::float32, reference::right({rows_of_bias, 5000}));
      expect_kernel(
          [&] {
            ks::softmax(exec, x.view<const float, 2>(), y.view<float, 2>(),
                        ks::bias(bias.view<const float, 2>()));
          },
          "block_per_filled_row_kernel", rows == 8000 ? "ILb1ELb1ELi8ELi512E" : "ILb1ELb0ELi8ELi512E");
    }
  }
  // One for all rows in slices, of which each has blocks of its own where there are enough.
  for (const std::int64_t rows_of_bias : {2 * multiprocessors, std::int64_t(1)}) {
    SCOPED_TRACE("slices with a bias of " + std::to_string(rows_of_bias) + " rows");
    const Layout layout = reference::right({2 * multiprocessors, 65536});
    Buffer<Exec> x(Scalar::float32, layout), y(Scalar::float32, layout),
        bias(Scalar::float32, reference::right({rows_of_bias, 65536}));
    expect_kernel(
        [&] {
          ks::softmax(exec, x.view<const float, 2>(), y.view<float, 2>(),
                      ks::bias(bias.view<const float, 2>()));
        },
        "grid_pipelined_rows_kernel", rows_of_bias == 1 ? "RingForE2E" : "RingForE0E");
  }
}

// Of 16 bits, as many warps a share of a slice as fit; then all slices are held.
TEST_F(CudaDependentLaunch, RowsOf16BitsComeToTheirKernel) {
  const std::int64_t multiprocessors = exec.cuda_device_prop().multiProcessorCount;
  const std::int64_t length = 131072, slices = 8, shares = 8;
  const std::int64_t fit = multiprocessors / slices;  // rows that have a block for each slice
  const struct {
    std::int64_t rows;
    const char *kernel, *parameters;
  } cases[] = {{1, "split_rows_kernel", "ILi8ELi1E"},
               {fit / shares, "split_rows_kernel", "ILi8ELi1E"},
               {fit / shares + 1, "split_rows_kernel", "ILi4ELi2E"},
               {fit, "split_rows_kernel", "ILi4ELi2E"},
               {fit + 1, "split_rows_kernel", "ILi2ELi2E"},
               {2 * fit, "split_rows_kernel", "ILi2ELi2E"},
               {2 * fit + 2, "held_slices_kernel", "ILb0E"},
               {8 * fit, "held_slices_kernel", "ILb0E"},
               {8 * fit + 8, "grid_pipelined_rows_kernel", "RingForE0E"}};
  for (const auto& c : cases) {
    SCOPED_TRACE(std::to_string(c.rows) + " rows");
    const Layout rows = reference::right({c.rows, length});
    Buffer<Exec> x(Scalar::bfloat16, rows), y(Scalar::bfloat16, rows);
    expect_kernel([&] { ks::softmax(exec, x.view<const bhalf_t, 2>(), y.view<bhalf_t, 2>()); }, c.kernel,
                  c.parameters);
  }
}

// Of 16 bits in registers, those that are few enough for threads with a vector or two.
TEST_F(CudaDependentLaunch, FewPackedRowsComeToTheirKernel) {
  const std::int64_t multiprocessors = exec.cuda_device_prop().multiProcessorCount;
  const auto expect_of = [&]<class Out>(Out, std::int64_t rows, std::int64_t columns, const char* kernel,
                                        const char* parameters) {
    SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(columns));
    const Layout layout = reference::right({rows, columns});
    Buffer<Exec> x(Scalar::bfloat16, layout), y(scalar_of<Out>, layout);
    expect_kernel([&] { ks::softmax(exec, x.view<const bhalf_t, 2>(), y.template view<Out, 2>()); }, kernel,
                  parameters);
  };
  const auto expect = [&](std::int64_t rows, std::int64_t columns, const char* kernel,
                          const char* parameters) {
    expect_of(bhalf_t(), rows, columns, kernel, parameters);
  };
  constexpr const char *in_a_warp = "warp_per_row_kernel", *in_a_block = "block_per_row_kernel";
  expect(1, 512, in_a_warp, "ILi2ELb0ELi32E");
  expect(512, 768, in_a_block, "ILi1ELb0ELi256ELi4E");
  expect(513, 768, in_a_warp, "ILi8ELb0ELi16E");
  expect(8 * multiprocessors, 1001, in_a_block, "ILi1ELb1ELi256ELi4E");
  expect(8 * multiprocessors + 1, 1001, in_a_warp, "ILi8ELb1ELi16E");
  expect(8 * multiprocessors, 2048, in_a_block, "ILi2ELb0ELi1024ELi1E");
  expect(8 * multiprocessors + 1, 2048, in_a_block, "ILi4ELb0ELi256ELi4E");
  expect(3 * multiprocessors, 4097, in_a_block, "ILi2ELb1ELi1024ELi1E");
  expect(3 * multiprocessors + 1, 4097, in_a_block, "ILi6ELb1ELi192ELi5E");
  expect(multiprocessors, 16384, in_a_block, "ILi2ELb0ELi1024ELi1E");
  expect(1, 16383, in_a_block, "ILi7ELb1ELi320ELi3E");
  expect_of(0.0f, 2 * multiprocessors, 8192, in_a_block, "ILi2ELb0ELi1024ELi1E");
  expect_of(0.0f, 1, 8200, in_a_block, "ILi6ELb0ELi256ELi3E");
}

// Of logsumexp, likewise.
template <class T>
void expect_implementation(const Exec& exec, std::int64_t rows, std::int64_t columns, const char* expected) {
  Buffer<Exec> x(scalar_of<T>, reference::right({rows, columns})),
      lse(scalar_of<T>, reference::right({rows}));
  ks::logsumexp(exec, x.template view<const T, 2>(), lse.template view<T, 1>());
  exec.fence();
  EXPECT_STREQ(ks::last_implementation(), expected)
      << ks::scalar_name<T>() << ", " << rows << " x " << columns;
}
TEST_F(CudaDependentLaunch, LogsumexpComesToItsKernel) {
  const std::int64_t multiprocessors = exec.cuda_device_prop().multiProcessorCount;
  constexpr const char *by_all = "split_rows", *in_the_ring = "grid_pipelined_rows";
  expect_implementation<float>(exec, 3, 32000, by_all);
  expect_implementation<float>(exec, multiprocessors, 16384, "block_per_row");
  expect_implementation<bhalf_t>(exec, multiprocessors, 14335, "block_per_row");
  expect_implementation<bhalf_t>(exec, 3, 14336, by_all);
  expect_implementation<float>(exec, 5 * multiprocessors, 50257, in_the_ring);
  expect_implementation<half_t>(exec, 2 * multiprocessors, 200000, in_the_ring);
  const bool memory_is_fast = ks::impl::has_fast_memory(exec.cuda_device());
  const char* const by_blocks = memory_is_fast ? "block_per_sliced_row" : in_the_ring;
  expect_implementation<float>(exec, 7 * multiprocessors, 50257, by_blocks);
  expect_implementation<bhalf_t>(exec, 7 * multiprocessors, 65536, by_blocks);
  expect_implementation<half_t>(exec, 7 * multiprocessors, 128256, by_blocks);
  if (!memory_is_fast) return;
  expect_implementation<float>(exec, multiprocessors, 12289, by_blocks);
  expect_implementation<float>(exec, multiprocessors, 32000, by_blocks);
  expect_implementation<bhalf_t>(exec, multiprocessors, 14336, by_blocks);
  expect_implementation<bhalf_t>(exec, multiprocessors, 65536, by_blocks);
  expect_implementation<half_t>(exec, 2 * multiprocessors, 128256, by_blocks);
}

}  // namespace

#endif
