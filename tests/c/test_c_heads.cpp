// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The heads of the C interface beside the C++ ones: the same bits.
#include <gtest/gtest.h>

#include "descriptors.hpp"

namespace {

using namespace tests;

using Exec = Kokkos::DefaultExecutionSpace;
using Space = Exec::memory_space;

template <class T>
using Matrix = Kokkos::View<T**, Kokkos::LayoutRight, Space>;
template <class T>
using Vector = Kokkos::View<T*, Space>;

struct Sizes {
  int m, n, k;
};
constexpr Sizes sizes[] = {{2, 3, 4}, {33, 130, 257}, {70, 2000, 64}, {5, 17, 0}};

template <class In, class Out>
struct Head {
  Matrix<In> x, w;
  Matrix<Out> y, z;
  Vector<float> bias, mean, variance, gamma, beta;
  Described cx, cw, cy, cz, c_bias, c_mean, c_variance, c_gamma, c_beta;

  explicit Head(const Sizes& s)
      : x("x", s.m, s.k),
        w("w", s.n, s.k),
        y("y", s.m, s.n),
        z("z", s.m, s.n),
        bias("bias", s.n),
        mean("mean", s.n),
        variance("variance", s.n),
        gamma("gamma", s.n),
        beta("beta", s.n),
        cx(x),
        cw(w),
        cy(y),
        cz(z),
        c_bias(bias),
        c_mean(mean),
        c_variance(variance),
        c_gamma(gamma),
        c_beta(beta) {
    fill(x, 1, -1, 1);
    fill(w, 2, -0.5, 0.5);
    fill(bias, 3, -1, 1);
    fill(mean, 4, -1, 1);
    fill(variance, 5, 0.1, 2);
    fill(gamma, 6, 0.5, 1.5);
    fill(beta, 7, -1, 1);
  }
};

// Also from weights that were packed, and log_softmax.
template <class In, class Out, class T>
void same_bits(const char* what, Head<In, Out>& h, const T& transform, const Steps& steps,
               ks::Precision precision = ks::Precision::ieee) {
  const Exec exec;
  const int p =
      precision == ks::Precision::tf32 ? KOKKOSSOFTMAX_PRECISION_TF32 : KOKKOSSOFTMAX_PRECISION_IEEE;
  ks::linear_softmax(exec, h.x, h.w, h.y, transform, precision);
  exec.fence();
  const std::string ran = ks::last_implementation();
  EXPECT_OK(kokkossoftmax_reserve_linear(nullptr, h.cx, h.cw, h.cz, steps.data(), steps.size(), p));
  EXPECT_OK(kokkossoftmax_linear_softmax(nullptr, h.cx, h.cw, h.cz, steps.data(), steps.size(), p));
  EXPECT_EQ(ran, kokkossoftmax_last_implementation()) << what;
  EXPECT_OK(kokkossoftmax_synchronize(nullptr));
  Kokkos::fence();
  EXPECT_EQ(bytes_of(h.y), bytes_of(h.z)) << what;

  kokkossoftmax_packed* packed = nullptr;
  EXPECT_OK(kokkossoftmax_pack(nullptr, h.cw, &packed));
  const auto packed_cpp = ks::pack(exec, h.w);
  ks::linear_log_softmax(exec, h.x, packed_cpp, h.y, transform, precision);
  exec.fence();
  EXPECT_OK(kokkossoftmax_reserve_linear_packed(nullptr, h.cx, packed, h.cz, steps.data(), steps.size(), p));
  EXPECT_OK(
      kokkossoftmax_linear_log_softmax_packed(nullptr, h.cx, packed, h.cz, steps.data(), steps.size(), p));
  Kokkos::fence();
  EXPECT_EQ(bytes_of(h.y), bytes_of(h.z)) << what << ", packed, log_softmax";
  EXPECT_OK(kokkossoftmax_linear_log_softmax(nullptr, h.cx, h.cw, h.cz, steps.data(), steps.size(), p));
  EXPECT_OK(kokkossoftmax_linear_softmax_packed(nullptr, h.cx, packed, h.cz, steps.data(), steps.size(), p));
  Kokkos::fence();
  kokkossoftmax_packed_free(packed);
}

TEST(CHeads, NothingAndBiasGelu) {
  for (const Sizes& s : sizes) {
    Head<float, float> h(s);
    same_bits("bias | gelu", h, ks::bias(h.bias) | ks::gelu(),
              {step_of(KOKKOSSOFTMAX_BIAS, {&h.c_bias}), step(KOKKOSSOFTMAX_GELU_ERF)});
  }
}

TEST(CHeads, BatchNormWithGivenStatistics) {
  for (const Sizes& s : sizes) {
    Head<float, float> h(s);
    const auto norm = ks::batch_norm(h.mean, h.variance, h.gamma, h.beta, 1e-5);
    const auto norm_step =
        step_of(KOKKOSSOFTMAX_BATCH_NORM, {&h.c_mean, &h.c_variance, &h.c_gamma, &h.c_beta}, 1e-5);
    same_bits("bias | batch_norm | scale", h, ks::bias(h.bias) | norm | ks::scale(0.7),
              {step_of(KOKKOSSOFTMAX_BIAS, {&h.c_bias}), norm_step, step(KOKKOSSOFTMAX_SCALE, 0.7)});
    Head<ks::half_t, float> f(s);
    const auto norms = ks::batch_norm(f.mean, f.variance, f.gamma, f.beta, 1e-5);
    const auto norms_step =
        step_of(KOKKOSSOFTMAX_BATCH_NORM, {&f.c_mean, &f.c_variance, &f.c_gamma, &f.c_beta}, 1e-5);
    same_bits("scale | batch_norm | relu | batch_norm | bias", f,
              ks::scale(1.3) | norms | ks::relu() | norms | ks::bias(f.bias),
              {step(KOKKOSSOFTMAX_SCALE, 1.3), norms_step, step(KOKKOSSOFTMAX_RELU), norms_step,
               step_of(KOKKOSSOFTMAX_BIAS, {&f.c_bias})});
  }
}

TEST(CHeads, Bfloat16AndDouble) {
  for (const Sizes& s : sizes) {
    Head<ks::bhalf_t, ks::bhalf_t> h(s);
    same_bits("bfloat16", h, ks::gelu_tanh() | ks::bias(h.bias),
              {step(KOKKOSSOFTMAX_GELU_TANH), step_of(KOKKOSSOFTMAX_BIAS, {&h.c_bias})});
    Head<double, double> d(s);
    same_bits("double", d, ks::scale(0.3) | ks::bias(d.bias),
              {step(KOKKOSSOFTMAX_SCALE, 0.3), step_of(KOKKOSSOFTMAX_BIAS, {&d.c_bias})});
  }
}

// The running statistics have the same bits too.
template <class MakeChain>
void same_statistics(const char* what, const MakeChain& make,
                     Steps (*steps)(Head<float, float>&, Described&, Described&)) {
  for (const Sizes& s : sizes) {
    Head<float, float> h(s);
    const Exec exec;
    const Vector<float> mean("running_mean", s.n), variance("running_variance", s.n),
        mean_c("running_mean", s.n), variance_c("running_variance", s.n);
    for (const auto& v : {mean, mean_c}) fill(v, 20);
    for (const auto& v : {variance, variance_c}) fill(v, 21, 0.5, 2);
    Described c_mean(mean_c), c_variance(variance_c);
    for (int i = 0; i < 2; ++i) {
      ks::linear_softmax(exec, h.x, h.w, h.y, make(h, mean, variance));
      const Steps list = steps(h, c_mean, c_variance);
      EXPECT_OK(kokkossoftmax_linear_softmax(nullptr, h.cx, h.cw, h.cz, list.data(), list.size(), 0));
    }
    Kokkos::fence();
    EXPECT_OK(kokkossoftmax_synchronize(nullptr));
    EXPECT_EQ(bytes_of(h.y), bytes_of(h.z)) << what << " " << s.m;
    EXPECT_EQ(bytes_of(mean), bytes_of(mean_c)) << what << " " << s.m;
    EXPECT_EQ(bytes_of(variance), bytes_of(variance_c)) << what << " " << s.m;
  }
}

TEST(CHeads, BatchStatistics) {
  same_statistics(
      "bias | batch_norm_training | scale",
      [](auto& h, const auto& mean, const auto& variance) {
        return ks::bias(h.bias) | ks::batch_norm_training(h.gamma, h.beta, 1e-5, mean, variance, 0.1) |
               ks::scale(0.9);
      },
      [](Head<float, float>& h, Described& mean, Described& variance) {
        auto training =
            step_of(KOKKOSSOFTMAX_BATCH_NORM_TRAINING, {&h.c_gamma, &h.c_beta, &mean, &variance}, 1e-5);
        training.momentum = 0.1;
        return Steps{step_of(KOKKOSSOFTMAX_BIAS, {&h.c_bias}), training, step(KOKKOSSOFTMAX_SCALE, 0.9)};
      });
  same_statistics(
      "gelu | batch_norm_training | gelu_tanh | bias",
      [](auto& h, const auto& mean, const auto& variance) {
        return ks::gelu() | ks::batch_norm_training(h.gamma, h.beta, 1e-5, mean, variance, 0.25) |
               ks::gelu_tanh() | ks::bias(h.bias);
      },
      [](Head<float, float>& h, Described& mean, Described& variance) {
        auto training =
            step_of(KOKKOSSOFTMAX_BATCH_NORM_TRAINING, {&h.c_gamma, &h.c_beta, &mean, &variance}, 1e-5);
        training.momentum = 0.25;
        return Steps{step(KOKKOSSOFTMAX_GELU_ERF), training, step(KOKKOSSOFTMAX_GELU_TANH),
                     step_of(KOKKOSSOFTMAX_BIAS, {&h.c_bias})};
      });
}

TEST(CHeads, Refusals) {
  Head<float, float> h(sizes[0]);
  Head<double, double> d(sizes[0]);
  const auto call = [&](const Steps& steps) {
    return kokkossoftmax_linear_softmax(nullptr, h.cx, h.cw, h.cz, steps.data(), steps.size(), 0);
  };
  INVALID("w is a null pointer", kokkossoftmax_linear_softmax(nullptr, h.cx, nullptr, h.cz, nullptr, 0, 0));
  INVALID("w is a null pointer",
          kokkossoftmax_linear_softmax_packed(nullptr, h.cx, nullptr, h.cz, nullptr, 0, 0));
  INVALID("precision is 5", kokkossoftmax_linear_softmax(nullptr, h.cx, h.cw, h.cz, nullptr, 0, 5));
  INVALID("does not fit", kokkossoftmax_linear_softmax(nullptr, h.cx, h.cw, h.cx, nullptr, 0, 0));
  INVALID("differ in their number of columns",
          kokkossoftmax_linear_softmax(nullptr, h.cx, h.c_bias, h.cz, nullptr, 0, 0) ==
                  KOKKOSSOFTMAX_INVALID_ARGUMENT
              ? kokkossoftmax_linear_softmax(nullptr, h.cx, h.cz, h.cz, nullptr, 0, 0)
              : KOKKOSSOFTMAX_OK);
  UNSUPPORTED("scalars", kokkossoftmax_linear_softmax(nullptr, h.cx, d.cw, h.cz, nullptr, 0, 0));
  UNSUPPORTED("scalars", kokkossoftmax_linear_softmax(nullptr, h.cx, h.cw, d.cz, nullptr, 0, 0));
  INVALID("running_mean and running_variance",
          call({step_of(KOKKOSSOFTMAX_BATCH_NORM_TRAINING, {&h.c_gamma, &h.c_beta, &h.c_mean})}));
  const auto training = step_of(KOKKOSSOFTMAX_BATCH_NORM_TRAINING, {&h.c_gamma, &h.c_beta});
  UNSUPPORTED("more than once", call({training, training}));
  Vector<double> wide("wide", 3);
  Described c_wide(wide);
  UNSUPPORTED("of float in this call",
              call({step_of(KOKKOSSOFTMAX_BATCH_NORM_TRAINING, {&h.c_gamma, &c_wide})}));
  INVALID("overlaps",
          call({step_of(KOKKOSSOFTMAX_BATCH_NORM_TRAINING, {&h.c_gamma, &h.c_beta, &h.c_mean, &h.c_gamma})}));
  kokkossoftmax_packed* packed = nullptr;
  INVALID("packed is a null pointer", kokkossoftmax_pack(nullptr, h.cw, nullptr));
  INVALID("W of extents (3) is not a matrix", kokkossoftmax_pack(nullptr, h.c_bias, &packed));
  EXPECT_EQ(packed, nullptr);
  EXPECT_OK(kokkossoftmax_pack(nullptr, h.cw, &packed));
  UNSUPPORTED("scalars", kokkossoftmax_linear_softmax_packed(nullptr, d.cx, packed, d.cz, nullptr, 0, 0));
  kokkossoftmax_packed_free(packed);
  kokkossoftmax_packed_free(nullptr);
}

}  // namespace
