// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The C interface on CUDA: streams of the caller's, captures, threads, and pointers that are not what they
// are said to be.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <thread>

#include "../support/cuda_graph.hpp"
#include "descriptors.hpp"

#if defined(KOKKOS_ENABLE_CUDA)

namespace {

using namespace tests;
using Exec = Kokkos::Cuda;
using Matrix = Kokkos::View<float**, Kokkos::LayoutRight, Exec::memory_space>;

kokkossoftmax_execution on(cudaStream_t stream) {
  kokkossoftmax_execution execution = KOKKOSSOFTMAX_EXECUTION_INIT;
  execution.backend = KOKKOSSOFTMAX_BACKEND_CUDA;
  execution.stream = stream;
  return execution;
}

struct Softmax {
  Matrix x, y, expected;
  Described cx, cy;
  Steps steps{step(KOKKOSSOFTMAX_SCALE, 0.5), causal_step(3)};

  explicit Softmax(int rows = 64, int columns = 5000)
      : x("x", rows, columns), y("y", rows, columns), expected("expected", rows, columns), cx(x), cy(y) {
    refill(1);
  }
  void refill(std::uint64_t seed) {
    fill(x, seed);
    ks::softmax(Exec(), x, expected, ks::scale(0.5) | ks::causal(3));
    Kokkos::fence();
  }
  kokkossoftmax_status call(const kokkossoftmax_execution& execution) {
    return kokkossoftmax_softmax(&execution, cx, cy, -1, steps.data(), steps.size());
  }
  kokkossoftmax_status reserve(const kokkossoftmax_execution& execution) {
    return kokkossoftmax_reserve(&execution, cx, cy, -1, steps.data(), steps.size());
  }
  void check(const char* what) { EXPECT_EQ(bytes_of(y), bytes_of(expected)) << what; }
};

std::size_t free_bytes() {
  std::size_t free = 0, total = 0;
  EXPECT_CUDA(cudaMemGetInfo(&free, &total));
  return free;
}

TEST(CStreams, CallsGoToTheCallersStream) {
  Softmax s;
  const Stream stream;
  const auto execution = on(stream);
  EXPECT_OK(s.call(execution));
  EXPECT_OK(kokkossoftmax_synchronize(&execution));
  s.check("a stream");
  EXPECT_OK(s.call(on(nullptr)));
  EXPECT_CUDA(cudaStreamSynchronize(nullptr));
  s.check("the default stream");
  EXPECT_OK(kokkossoftmax_forget_stream(&execution));
}

TEST(CStreams, CapturedAndReplayed) {
  Softmax s;
  const Stream stream;
  const auto execution = on(stream);
  EXPECT_OK(s.reserve(execution));
  EXPECT_CUDA(cudaStreamSynchronize(stream));
  const Graph graph(stream, [&] { EXPECT_OK(s.call(execution)); });
  for (int i = 0; i < 3; ++i) {
    s.refill(static_cast<std::uint64_t>(10 + i));
    graph.launch();
    EXPECT_CUDA(cudaStreamSynchronize(stream));
    s.check("replayed");
  }
  EXPECT_OK(kokkossoftmax_forget_stream(&execution));
}

// As torch.cuda.graph does: the stream is made for the capture.
TEST(CStreams, CaptureOnAStreamNeverSeen) {
  // Rows of all kinds of kernels, with scratch and without.
  for (const int columns : {100, 5000, 300000}) {
    Softmax s(3, columns);
    const Stream other, stream;
    EXPECT_OK(s.reserve(on(other)));
    EXPECT_CUDA(cudaStreamSynchronize(other));
    const Graph graph(stream, [&] {
      EXPECT_OK(s.call(on(stream)));
      EXPECT_OK(s.call(on(stream)));
    });
    for (int i = 0; i < 3; ++i) {
      s.refill(static_cast<std::uint64_t>(20 + i));
      graph.launch();
      EXPECT_CUDA(cudaStreamSynchronize(stream));
      s.check("replayed");
    }
    // Now outside of a capture.
    const auto execution = on(stream);
    EXPECT_OK(s.call(execution));
    EXPECT_OK(kokkossoftmax_synchronize(&execution));
    EXPECT_OK(kokkossoftmax_forget_stream(&execution));
    const auto of_other = on(other);
    EXPECT_OK(kokkossoftmax_forget_stream(&of_other));
  }
}

TEST(CStreams, CaptureWithoutReserveSaysWhatToDo) {
  Softmax s;
  std::thread([&] {  // a thread on which reserve was never called
    const Stream stream;
    const Graph graph(stream, [&] { UNSUPPORTED("call kokkossoftmax_reserve", s.call(on(stream))); });
    EXPECT_EQ(graph.nodes(), 0u);
  })
      .join();
}

TEST(CStreams, ManyStreamsDoNotGrow) {
  Softmax s(8, 1000);
  std::size_t before = 0;
  for (int i = 0; i < 60; ++i) {
    if (i == 10) before = free_bytes();
    const Stream stream;
    const auto execution = on(stream);
    EXPECT_OK(s.call(execution));
    EXPECT_OK(kokkossoftmax_forget_stream(&execution));
  }
  EXPECT_LE(before, free_bytes() + (std::size_t(4) << 20));
  const Stream stream;
  const auto execution = on(stream);
  EXPECT_OK(s.call(execution));
  before = free_bytes();
  for (int i = 0; i < 2000; ++i) EXPECT_OK(s.call(execution));
  EXPECT_OK(kokkossoftmax_synchronize(&execution));
  EXPECT_EQ(before, free_bytes());
  s.check("two thousand calls");
  EXPECT_OK(kokkossoftmax_forget_stream(&execution));
}

TEST(CStreams, ThreadsOnStreamsOfTheirOwn) {
  Softmax s;
  std::vector<std::thread> threads;
  std::vector<int> failures(4, 0);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const Stream stream;
      const auto execution = on(stream);
      const Matrix mine("mine", s.x.extent(0), s.x.extent(1));
      Described x(s.x), y(mine);
      for (int i = 0; i < 50; ++i) {
        if (kokkossoftmax_softmax(&execution, x, y, -1, s.steps.data(), s.steps.size()) != KOKKOSSOFTMAX_OK)
          ++failures[t];
      }
      if (kokkossoftmax_synchronize(&execution) != KOKKOSSOFTMAX_OK) ++failures[t];
      if (bytes_of(mine) != bytes_of(s.expected)) ++failures[t];
      if (kokkossoftmax_forget_stream(&execution) != KOKKOSSOFTMAX_OK) ++failures[t];
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(failures, std::vector<int>(4, 0));
}

TEST(CStreams, RefusesWhatIsNotWhatItIsSaidToBe) {
  Softmax s(4, 10);
  std::vector<float> host(40);
  s.cx->data = host.data();
  int pageable = 0;
  EXPECT_CUDA(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, 0));
  if (!pageable) {
    INVALID("ordinary host memory", s.call(on(nullptr)));
  }
  s.cx->data = s.x.data();
  s.cx->memory = s.cy->memory = KOKKOSSOFTMAX_HOST;
  INVALID("x is said to be memory of the host", kokkossoftmax_softmax(nullptr, s.cx, s.cy, -1, nullptr, 0));
  s.cy->memory = KOKKOSSOFTMAX_CUDA;
  INVALID("x is in memory of the host", s.call(on(nullptr)));
  s.cx->memory = KOKKOSSOFTMAX_CUDA;
  auto elsewhere = on(nullptr);
  elsewhere.device = 117;
  UNSUPPORTED("CUDA device 117", s.call(elsewhere));
  int devices = 0;
  EXPECT_CUDA(cudaGetDeviceCount(&devices));
  if (devices > 1) {
    int ours = 0;
    EXPECT_CUDA(cudaGetDevice(&ours));
    EXPECT_CUDA(cudaSetDevice(1 - ours));
    {
      const Stream stream;
      INVALID("the stream is of CUDA device", s.call(on(stream)));
      // The thread's device is the caller's own business.
      EXPECT_OK(s.call(on(nullptr)));
      int now = -1;
      EXPECT_CUDA(cudaGetDevice(&now));
      EXPECT_EQ(now, 1 - ours);
    }
    EXPECT_CUDA(cudaSetDevice(ours));
  }
}

// What a call costs beside the C++ one; printed, and held to a generous bound.
TEST(CStreams, Overhead) {
  Softmax s(1, 1000);
  const Stream stream;
  const auto execution = on(stream);
  const Exec exec(stream);
  const auto microseconds = [&](const auto& body) {
    double best = 1e9;
    for (int r = 0; r < 5; ++r) {
      EXPECT_CUDA(cudaStreamSynchronize(stream));
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < 200; ++i) body();
      const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - begin;
      best = std::min(best, time.count() / 200);
    }
    return best;
  };
  const double cpp = microseconds([&] { ks::softmax(exec, s.x, s.y); });
  const double c = microseconds([&] { kokkossoftmax_softmax(&execution, s.cx, s.cy, -1, nullptr, 0); });
  std::printf("a call of 1 x 1000 takes the host %.2f us from C++, %.2f us from C\n", cpp, c);
  EXPECT_LT(c, cpp + 10);
  EXPECT_CUDA(cudaStreamSynchronize(stream));
  EXPECT_OK(kokkossoftmax_forget_stream(&execution));
}

}  // namespace

#endif
