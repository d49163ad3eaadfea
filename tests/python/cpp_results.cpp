// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the C++ interface makes of the numbers on stdin, on stdout: the tests of the Python package compare
// with it bit for bit.
//
//   cpp_results host|cuda rows OPERATION SCALAR_IN SCALAR_OUT AXIS E0 E1 E2 CHAIN    stdin: x, operands of
//   the chain cpp_results host|cuda head OPERATION CHAIN M N K                                 stdin: X, W,
//   operands (float)

#include <KokkosSoftmax.hpp>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

namespace ks = KokkosSoftmax;

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "cpp_results: %s\n", what.c_str());
  std::exit(1);
}

// The next values of stdin, in the memory of the execution space.
template <class View>
View read(const View& to) {
  const auto host = Kokkos::create_mirror_view(to);
  if (std::fread(host.data(), sizeof(typename View::value_type), host.size(), stdin) != host.size())
    fail("stdin ended early");
  Kokkos::deep_copy(to, host);
  return to;
}

template <class View>
void write(const View& from) {
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), from);
  std::fwrite(host.data(), sizeof(typename View::value_type), host.size(), stdout);
}

struct Arguments {
  std::vector<std::string> all;
  std::size_t next = 0;
  std::string text() {
    if (next == all.size()) fail("an argument is missing");
    return all[next++];
  }
  int number() { return std::stoi(text()); }
};

template <class Exec>
struct Calls {
  template <class T>
  using Column = Kokkos::View<T*, Exec>;
  template <class T>
  using Box = Kokkos::View<T***, Kokkos::LayoutRight, Exec>;
  template <class T>
  using Matrix = Kokkos::View<T**, Kokkos::LayoutRight, Exec>;

  Exec exec;
  Arguments& arguments;

  Column<float> column(int n) const { return read(Column<float>("operand", n)); }

  template <class X, class Y, class T>
  void row_call(const std::string& operation, const X& x, const Y& y, int axis, const T& transform) {
    if (operation == "softmax") {
      ks::softmax(exec, x, y, ks::axis(axis), transform);
    } else if (operation == "log_softmax") {
      ks::log_softmax(exec, x, y, ks::axis(axis), transform);
    } else {
      const int kept[2] = {axis == 0 ? 1 : 0, axis == 2 ? 1 : 2};
      const Matrix<typename Y::value_type> lse("lse", x.extent(kept[0]), x.extent(kept[1]));
      ks::logsumexp(exec, x, lse, ks::axis(axis), transform);
      exec.fence();
      write(lse);
      return;
    }
    exec.fence();
    write(y);
  }

  template <class In, class Out>
  void rows(const std::string& operation) {
    const int axis = arguments.number();
    const int e0 = arguments.number(), e1 = arguments.number(), e2 = arguments.number();
    const std::string chain = arguments.text();
    const auto x = read(Box<In>("x", e0, e1, e2));
    const Box<Out> y("y", e0, e1, e2);
    const int columns = static_cast<int>(x.extent(axis));
    if (chain == "none") {
      row_call(operation, x, y, axis, ks::impl::Identity{});
      return;
    }
    if constexpr (std::is_same_v<In, float> && std::is_same_v<Out, float>) {
      if (chain != "all") fail("no chain " + chain);
      // One chain of many steps, because each chain is a set of kernels to compile.
      const auto hot = column(static_cast<int>(x.size()) / columns), b = column(columns);
      const auto keep = read(Box<bool>("mask", e0, e1, e2));
      row_call(
          operation, x, y, axis,
          ks::temperature(hot) | ks::bias(b) | ks::gelu() | ks::scale(0.3) | ks::mask(keep) | ks::causal(40));
    } else {
      fail("no chain " + chain);
    }
  }

#if defined(KOKKOSSOFTMAX_ENABLE_LINEAR)
  template <class T>
  void head_call(const std::string& operation, int m, int n, int k, const T& make_transform) {
    const auto x = read(Matrix<float>("x", m, k));
    const auto w = read(Matrix<float>("w", n, k));
    const Matrix<float> y("y", m, n);
    const auto transform = make_transform(n);
    if (operation == "linear_softmax") {
      ks::linear_softmax(exec, x, w, y, transform);
    } else {
      ks::linear_log_softmax(exec, x, w, y, transform);
    }
    exec.fence();
    write(y);
  }

  void head() {
    const std::string operation = arguments.text(), chain = arguments.text();
    const int m = arguments.number(), n = arguments.number(), k = arguments.number();
    if (chain == "bias_gelu") {
      head_call(operation, m, n, k, [&](int columns) { return ks::bias(column(columns)) | ks::gelu(); });
    } else if (chain == "bias_batch_norm_scale") {
      Column<float> mean, variance;
      head_call(operation, m, n, k, [&](int columns) {
        const auto b = column(columns), gamma = column(columns), beta = column(columns);
        mean = column(columns);
        variance = column(columns);
        return ks::bias(b) | ks::batch_norm_training(gamma, beta, 1e-5, mean, variance, 0.1) | ks::scale(1.5);
      });
      write(mean);
      write(variance);
    } else {
      fail("no chain " + chain);
    }
  }
#else
  void head() {
    fail("a library without heads");
  }
#endif

  void run() {
    const std::string what = arguments.text();
    if (what == "head") {
      head();
      return;
    }
    const std::string operation = arguments.text(), in = arguments.text(), out = arguments.text();
    if (in == "float32" && out == in) {
      rows<float, float>(operation);
    } else if (in == "float64" && out == in) {
      rows<double, double>(operation);
    } else if (in == "float16" && out == in) {
      rows<ks::half_t, ks::half_t>(operation);
    } else if (in == "bfloat16" && out == "float32") {
      rows<ks::bhalf_t, float>(operation);
    } else {
      fail("no pair " + in + ", " + out);
    }
  }
};

}  // namespace

int main(int argc, char** argv) {
  Kokkos::InitializationSettings settings;
  settings.set_disable_warnings(true);
  const Kokkos::ScopeGuard kokkos(settings);
  Arguments arguments{std::vector<std::string>(argv + 1, argv + argc)};
  const std::string where = arguments.text();
  if (where == "host") {
    Calls<Kokkos::DefaultHostExecutionSpace>{{}, arguments}.run();
    return 0;
  }
#ifdef KOKKOS_ENABLE_CUDA
  if (where == "cuda") {
    Calls<Kokkos::Cuda>{{}, arguments}.run();
    return 0;
  }
#endif
  fail("no backend " + where);
}
