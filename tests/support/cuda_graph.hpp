// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A CUDA stream, and calls on it captured in a graph.
#ifndef KOKKOSSOFTMAX_TESTS_CUDA_GRAPH_HPP
#define KOKKOSSOFTMAX_TESTS_CUDA_GRAPH_HPP

#include <gtest/gtest.h>

#include <Kokkos_Core.hpp>
#include <cstddef>
#include <exception>
#include <string>

#if defined(KOKKOS_ENABLE_CUDA)

namespace tests {

#define EXPECT_CUDA(call) EXPECT_EQ(call, cudaSuccess) << cudaGetErrorString(cudaGetLastError())

class Stream {
 public:
  Stream() { EXPECT_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { EXPECT_CUDA(cudaStreamDestroy(stream_)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_;
};

// What is captured is done exactly when launch() says so.
class Graph {
 public:
  template <class Body>
  Graph(cudaStream_t stream, Body&& body, cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal)
      : stream_(stream) {
    EXPECT_CUDA(cudaStreamBeginCapture(stream, mode));
    try {
      body();
    } catch (const std::exception& error) {
      failure_ = error.what();
    }
    cudaGraph_t graph = nullptr;
    EXPECT_CUDA(cudaStreamEndCapture(stream, &graph));
    if (!graph) return;
    EXPECT_CUDA(cudaGraphGetNodes(graph, nullptr, &nodes_));
    EXPECT_CUDA(cudaGraphInstantiate(&executable_, graph, 0));
    EXPECT_CUDA(cudaGraphDestroy(graph));
  }
  ~Graph() {
    if (executable_) EXPECT_CUDA(cudaGraphExecDestroy(executable_));
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch() const { EXPECT_CUDA(cudaGraphLaunch(executable_, stream_)); }
  std::size_t nodes() const { return nodes_; }
  const std::string& failure() const { return failure_; }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t executable_ = nullptr;
  std::size_t nodes_ = 0;
  std::string failure_;
};

}  // namespace tests

#endif

#endif
