// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The three workloads as C functions on the memory of somebody else's tensors, for workloads.py. Each returns
// null, or what went wrong.

#include <KokkosSoftmax.hpp>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>

namespace {

namespace ks = KokkosSoftmax;

template <class Exec>
using Matrix = Kokkos::View<float**, Kokkos::LayoutRight, typename Exec::memory_space,
                            Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
template <class Exec>
using Column = Kokkos::View<float*, typename Exec::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;

// Calls work(exec) on the execution space for PyTorch's name of a device.
template <class Work>
const char* on(const char* device, const Work& work) {
  static std::string failure;
  try {
    if (!Kokkos::is_initialized()) Kokkos::initialize();
    if (std::strcmp(device, "cpu") == 0) {
      work(Kokkos::DefaultHostExecutionSpace());
    } else {
      work(Kokkos::DefaultExecutionSpace());
    }
    Kokkos::fence("workloads");
    return nullptr;
  } catch (const std::exception& error) {
    failure = error.what();
    return failure.c_str();
  }
}

}  // namespace

extern "C" {

// Whether the library runs on PyTorch's device of this name.
int has_device(const char* device) {
  const bool default_is_host =
      Kokkos::SpaceAccessibility<Kokkos::HostSpace, Kokkos::DefaultExecutionSpace::memory_space>::accessible;
  return std::strcmp(device, "cpu") == 0 || !default_is_host;
}

const char* softmax(const char* device, std::int64_t rows, std::int64_t columns, float* x, float* y) {
  return on(device, [=](const auto& exec) {
    using Exec = std::remove_cvref_t<decltype(exec)>;
    ks::softmax(exec, Matrix<Exec>(x, rows, columns), Matrix<Exec>(y, rows, columns));
  });
}

const char* gelu_head(const char* device, std::int64_t m, std::int64_t n, std::int64_t k, float* x, float* w,
                      float* b, float* y, int tf32) {
  return on(device, [=](const auto& exec) {
    using Exec = std::remove_cvref_t<decltype(exec)>;
    ks::linear_softmax(exec, Matrix<Exec>(x, m, k), Matrix<Exec>(w, n, k), Matrix<Exec>(y, m, n),
                       ks::bias(Column<Exec>(b, n)) | ks::gelu(),
                       tf32 ? ks::Precision::tf32 : ks::Precision::ieee);
  });
}

// A momentum below zero: evaluation, with the statistics as they are.
const char* batch_norm_head(const char* device, std::int64_t m, std::int64_t n, std::int64_t k, float* x,
                            float* w, float* b, float* gamma, float* beta, float* mean, float* variance,
                            double eps, double momentum, double scale, float* y, int tf32) {
  return on(device, [=](const auto& exec) {
    using Exec = std::remove_cvref_t<decltype(exec)>;
    const auto column = [n](float* data) { return Column<Exec>(data, n); };
    const Matrix<Exec> x_view(x, m, k), w_view(w, n, k), y_view(y, m, n);
    const ks::Precision precision = tf32 ? ks::Precision::tf32 : ks::Precision::ieee;
    if (momentum < 0) {
      ks::linear_softmax(
          exec, x_view, w_view, y_view,
          ks::bias(column(b)) |
              ks::batch_norm(column(mean), column(variance), column(gamma), column(beta), eps) |
              ks::scale(scale),
          precision);
    } else {
      ks::linear_softmax(exec, x_view, w_view, y_view,
                         ks::bias(column(b)) |
                             ks::batch_norm_training(column(gamma), column(beta), eps, column(mean),
                                                     column(variance), momentum) |
                             ks::scale(scale),
                         precision);
    }
  });
}

const char* last_implementation() {
  return ks::last_implementation();
}

void finish() {
  if (Kokkos::is_initialized()) Kokkos::finalize();
}
}
