// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Heads captured in a CUDA graph and replayed on data that changes, in between the same calls outside of it.
#include <string>
#include <vector>

#include "../support/cuda_graph.hpp"
#include "../support/linear_cases.hpp"

#if defined(KOKKOS_ENABLE_CUDA)

namespace {

using namespace tests;
using Exec = Kokkos::Cuda;

// The logits as they are; what a chain does to them is tested without graphs.
template <class XS, class YS, class... Options>
void captured(const LinearCase& c, const std::function<Chain(const Logits&)>& chain,
              const Options&... options) {
  const Stream stream;
  const Exec exec(stream);
  LinearOperands<XS, XS, YS, Exec> o(c);
  ks::reserve(exec, o.x_view(), o.w_view(), o.y_view(), options...);
  exec.fence();
  const Graph graph(stream,
                    [&] { ks::linear_softmax(exec, o.x_view(), o.w_view(), o.y_view(), options...); });
  ASSERT_EQ(graph.failure(), "");
  exec.fence();
  o.y.download();
  EXPECT_TRUE(o.y.unchanged()) << "captured is not done";
  EXPECT_STREQ(ks::last_implementation(), "cublas_linear");
  LinearOperands<XS, XS, YS, Exec> other({.m = 33, .n = 65, .k = 40, .seed = 9});
  for (int set = 0; set < 20; ++set) {
    o.y.upload();
    graph.launch();
    // Between replays, on the same instance: neither may use the other's scratch or workspace.
    ks::linear_softmax(exec, other.x_view(), other.w_view(), other.y_view());
    graph.launch();
    exec.fence();
    o.check(Operation::softmax, all_rows(c.m), chain);
    other.check(Operation::softmax, all_rows(33), [](const Logits&) { return Chain{}; });
    o.refill(static_cast<std::uint64_t>(100 + set));
  }
}

const auto nothing = [](const Logits&) { return Chain{}; };

TEST(LinearCudaGraph, Float) {
  captured<float, float>({.m = 65, .n = 1000, .k = 257}, nothing, ks::transform(AsTheyAre{}));
}
TEST(LinearCudaGraph, Tf32) {
  captured<float, float>({.m = 65, .n = 1000, .k = 256, .range = 0.5, .precision = ks::Precision::tf32},
                         nothing, ks::Precision::tf32);
}
TEST(LinearCudaGraph, Double) {
  captured<double, double>({.m = 65, .n = 130, .k = 257}, nothing, ks::transform(AsTheyAre{}));
}
TEST(LinearCudaGraph, Half) {
  captured<half_t, half_t>({.m = 65, .n = 1000, .k = 257}, nothing, ks::transform(AsTheyAre{}));
}
TEST(LinearCudaGraph, Bfloat16InFloatOut) {
  captured<bhalf_t, float>({.m = 65, .n = 1000, .k = 257}, nothing, ks::transform(AsTheyAre{}));
}
TEST(LinearCudaGraph, PackedOperands) {
  LinearCase c{.m = 65, .n = 130, .k = 31};
  c.x = reference::ordered({c.m, c.k}, {1, 0}, 2, 1, 1);
  c.w = reference::left({c.n, c.k}, 3, 1);
  c.y = reference::ordered({c.m, c.n}, {0, 1}, 2, 1, 1);
  captured<float, float>(c, nothing, ks::transform(AsTheyAre{}));
}
TEST(LinearCudaGraph, LongRows) {
  captured<bhalf_t, half_t>({.m = 3, .n = 140000, .k = 8}, nothing, ks::transform(AsTheyAre{}));
}

// Two replays of a head with batch statistics: the running ones move each time.
TEST(LinearCudaGraph, RunningStatisticsMoveWithEachReplay) {
  const Stream stream;
  const Exec exec(stream);
  using Vector = Kokkos::View<float*, Kokkos::CudaSpace>;
  const std::int64_t n = 70;
  const Vector gamma("gamma", n), beta("beta", n), mean("mean", n), variance("variance", n);
  Kokkos::deep_copy(gamma, 1.0f);
  LinearOperands<float, float, float, Exec> o({.m = 40, .n = n, .k = 0});
  const auto head = ks::batch_norm_training(gamma, beta, 1e-5, mean, variance, 0.5);
  Kokkos::deep_copy(variance, 1.0f);
  ks::reserve(exec, o.x_view(), o.w_view(), o.y_view(), head);
  exec.fence();
  const Graph graph(stream, [&] { ks::linear_softmax(exec, o.x_view(), o.w_view(), o.y_view(), head); });
  ASSERT_EQ(graph.failure(), "");
  for (int i = 0; i < 3; ++i) graph.launch();
  exec.fence();
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), variance);
  for (std::int64_t j = 0; j < n; ++j) EXPECT_EQ(host(j), 0.125f);
}

TEST(LinearCudaGraph, WarmByACall) {
  const Stream stream;
  const Exec exec(stream);
  LinearOperands<half_t, half_t, half_t, Exec> o({.m = 65, .n = 1000, .k = 257});
  ks::linear_softmax(exec, o.x_view(), o.w_view(), o.y_view());
  exec.fence();
  const Graph graph(stream, [&] { ks::linear_softmax(exec, o.x_view(), o.w_view(), o.y_view()); });
  ASSERT_EQ(graph.failure(), "");
  o.y.upload();
  graph.launch();
  exec.fence();
  o.check(Operation::softmax, all_rows(65), nothing);
}

TEST(LinearCudaGraph, AColdCallNamesReserve) {
  const Stream stream;
  const Exec exec(stream);
  // More logits beside Y than any other test here: an instance may have the number, and with it the scratch,
  // of one that is gone.
  LinearOperands<half_t, half_t, half_t, Exec> o({.m = 1024, .n = 9000, .k = 8});
  std::string text;
  {
    const Graph graph(stream, [&] { ks::linear_softmax(exec, o.x_view(), o.w_view(), o.y_view()); });
    text = graph.failure();
  }
  EXPECT_NE(text.find("reserve"), std::string::npos) << text;
  (void)cudaGetLastError();
}

// TF32 is asked for, and IEEE is what is done otherwise.
TEST(LinearCudaGraph, Tf32IsAnotherProduct) {
  const Exec exec;
  LinearOperands<float, float, float, Exec> o({.m = 64, .n = 256, .k = 512});
  const auto bytes = [&](ks::Precision precision) {
    o.y.upload();
    ks::linear_log_softmax(exec, o.x_view(), o.w_view(), o.y_view(), precision);
    exec.fence();
    o.y.download();
    return std::vector<unsigned char>(o.y.host(), o.y.host() + 64 * 256 * sizeof(float));
  };
  const auto ieee = bytes(ks::Precision::ieee);
  EXPECT_NE(ieee, bytes(ks::Precision::tf32));
  EXPECT_EQ(ieee, bytes(ks::Precision::ieee));
  o.check(Operation::log_softmax, all_rows(64), nothing);
}

TEST(LinearCudaGraph, BlasLinearRefusesACapture) {
  const Stream stream;
  const Exec exec(stream);
  LinearOperands<float, float, float, Exec> o({.m = 65, .n = 100, .k = 25});
  ks::reserve(exec, o.x_view(), o.w_view(), o.y_view());
  exec.fence();
  const ks::ScopedImplementation forced("blas_linear");
  std::string text;
  {
    const Graph graph(stream, [&] { ks::linear_softmax(exec, o.x_view(), o.w_view(), o.y_view()); });
    text = graph.failure();
  }
  EXPECT_NE(text.find("captured"), std::string::npos) << text;
  (void)cudaGetLastError();
}

}  // namespace

#endif
