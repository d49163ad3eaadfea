// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The float products on the tensor cores: never less accurate than SGEMM, whatever the operands hold, or,
// where TF32 is asked for, than cuBLAS's TF32; the same bits for the same row, packed or not (with TF32 but
// for what float arithmetic computes), in any layout; and the guard, which decides on the device.
#include <cmath>
#include <string>
#include <vector>

#include "../support/cuda_graph.hpp"
#include "../support/linear_cases.hpp"
#include "../support/refusals.hpp"
#include "../support/tool_recorder.hpp"

#if defined(KOKKOS_ENABLE_CUDA)

namespace {

using namespace tests;
using Exec = Kokkos::Cuda;
using Right = Kokkos::View<float**, Kokkos::LayoutRight, Kokkos::CudaSpace>;

bool has_tensor_cores() {
  return ks::impl::TensorCoreGemm::is_there(Exec());
}
#define NEEDS_TENSOR_CORES() \
  if (!has_tensor_cores()) GTEST_SKIP() << "no device of compute capability 9.0, or no code for it"

// ---- Operands ---------------------------------------------------------------------------------------------

enum class Values {
  positive,      // [0, 1)
  both_signs,    // [-1, 1)
  normal,        //
  scaled_rows,   // normal, rows times 2^-40 to 2^40
  wide,          // magnitudes within a row over 2^16
  very_wide,     // over 2^30
  trap,          // a column of 2^30 in X that meets zeros in W
  subnormal,     // X
  extreme_rows,  // rows of 2^100 and of 2^-100 that meet each other
  not_finite     // some infinities and NaNs
};
const std::vector<std::pair<Values, const char*>> all_values{{Values::positive, "[0, 1)"},
                                                             {Values::both_signs, "[-1, 1)"},
                                                             {Values::normal, "normal"},
                                                             {Values::scaled_rows, "rows scaled by 2^+-40"},
                                                             {Values::wide, "wide"},
                                                             {Values::very_wide, "very wide"},
                                                             {Values::trap, "trap"},
                                                             {Values::subnormal, "subnormal"},
                                                             {Values::extreme_rows, "extreme rows"},
                                                             {Values::not_finite, "not finite"}};

struct Fill {
  Right view;
  Values values;
  bool is_w;
  std::uint64_t seed;

  static KOKKOS_FUNCTION std::uint64_t mixed(std::uint64_t z) {
    z += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const auto columns = static_cast<std::int64_t>(view.extent(1));
    const std::int64_t row = i / columns, column = i % columns;
    const std::uint64_t a = mixed(seed + static_cast<std::uint64_t>(i)), b = mixed(a),
                        of_row = mixed(seed * 31 + static_cast<std::uint64_t>(row));
    const float u = static_cast<float>(a >> 40) * 0x1p-24f, v = static_cast<float>(b >> 40) * 0x1p-24f;
    const float sign = 2 * u - 1;
    const float normal = sqrtf(-2 * logf(u + 1e-9f)) * cosf(6.2831853f * v);
    float value = sign;
    switch (values) {
      case Values::positive:
        value = u;
        break;
      case Values::both_signs:
        break;
      case Values::normal:
        value = normal;
        break;
      case Values::scaled_rows:
        value = ldexpf(normal, static_cast<int>(of_row % 81) - 40);
        break;
      case Values::wide:
        value = ldexpf(sign, -static_cast<int>(b % 17));
        break;
      case Values::very_wide:
        value = ldexpf(sign, -static_cast<int>(b % 31));
        break;
      case Values::trap:
        value = column > 0 ? normal : is_w ? 0.0f : ldexpf(1 + u, 30);
        break;
      case Values::subnormal:
        value = is_w ? sign : ldexpf(sign, -130);
        break;
      case Values::extreme_rows:
        value = ldexpf(sign, (row & 1) == (is_w ? 1 : 0) ? -100 : 100);
        break;
      case Values::not_finite:
        value = normal;
        if (!is_w && row == 1 && column == 0) value = INFINITY;
        if (!is_w && row == 2 && column == columns - 1) value = NAN;
        if (is_w && row == 1 && column == columns / 2) value = -INFINITY;
        if (is_w && row == 3 && column == 0) value = NAN;
        if (!is_w && row == 4) value = 0;
        break;
    }
    view.data()[i] = value;
  }
};

Right filled(std::int64_t rows, std::int64_t columns, Values values, bool is_w, std::uint64_t seed) {
  const Right view(Kokkos::view_alloc(Kokkos::WithoutInitializing, "operand"), rows, columns);
  Kokkos::parallel_for(Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(0, rows * columns),
                       Fill{view, values, is_w, seed});
  return view;
}

// ---- Products ---------------------------------------------------------------------------------------------

auto problem_of(const Right& x, const Right& w) {
  using Head = ks::impl::PlainHead<ks::impl::BoundIdentity>;
  using Problem = ks::impl::LinearProblem<float, float, float, Head>;
  return Problem{ks::impl::as_const(ks::impl::matrix_of(x)),
                 ks::impl::as_const(ks::impl::matrix_of(w)),
                 {},
                 ks::impl::Operation::softmax,
                 ks::Precision::ieee,
                 {}};
}
ks::impl::BlasMatrix<float> blas(const Right& view) {
  const auto rows = static_cast<std::int64_t>(view.extent(0)),
             columns = static_cast<std::int64_t>(view.extent(1));
  return {view.data(), rows, columns, columns, true};
}
Right by_tensor_cores(const Right& x, const Right& w) {
  const Right result("result", x.extent(0), w.extent(0));
  Kokkos::deep_copy(result, 777.0f);
  ks::impl::TensorCoreGemm::multiply(Exec(), problem_of(x, w), 0, blas(result), ks::impl::BoundIdentity{});
  return result;
}
Right by_rounding(const Right& x, const Right& w) {
  const Right result("result", x.extent(0), w.extent(0));
  Kokkos::deep_copy(result, 777.0f);
  ks::impl::RoundedTensorCoreGemm::multiply(Exec(), problem_of(x, w), 0, blas(result),
                                            ks::impl::BoundIdentity{});
  return result;
}
Right by_cublas(ks::Precision precision, const Right& x, const Right& w) {
  const Right result("result", x.extent(0), w.extent(0));
  const auto as_const = [](const Right& view) {
    const auto m = blas(view);
    return ks::impl::BlasMatrix<const float>{m.data, m.rows, m.columns, m.leading, true};
  };
  ks::impl::CublasGemm::multiply(Exec(), precision, as_const(x), as_const(w), blas(result));
  return result;
}

// |error| / sum |x w| of two results, for elements that double says are finite as floats; of the others,
// whether they are of another kind.
struct Errors {
  Right x, w, a, b;
  Kokkos::View<double* [4], Kokkos::LayoutRight, Kokkos::CudaSpace> out;
  std::int64_t columns, every_row, every_column;

  static KOKKOS_FUNCTION bool differs_in_kind(float got, double want) {
    return want != want ? got == got : want > 0 ? !(got > 3.4e38f) : !(got < -3.4e38f);
  }
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const std::int64_t m = i / columns * every_row, n = i % columns * every_column;
    double sum = 0, size = 0;
    for (std::size_t k = 0; k < x.extent(1); ++k) {
      const double product = static_cast<double>(x(m, k)) * w(n, k);
      sum += product;
      size += fabs(product);
    }
    const float got[] = {a(m, n), b(m, n)};
    for (int j = 0; j < 2; ++j) {
      const bool finite = fabs(sum) < 3.4e38;
      // Below 1e-30 it is the result's own subnormals that count.
      out(i, j) = !finite || size < 1e-30 ? 0 : isfinite(got[j]) ? fabs(got[j] - sum) / size : 1e30;
      out(i, 2 + j) = !finite && differs_in_kind(got[j], sum);
    }
  }
};

struct Difference {
  Right a, b;
  KOKKOS_FUNCTION void operator()(std::int64_t i, std::int64_t& count) const {
    count += ks::impl::bits_as<std::uint32_t>(a.data()[i]) != ks::impl::bits_as<std::uint32_t>(b.data()[i]);
  }
};
std::int64_t bits_that_differ(const Right& a, const Right& b) {
  std::int64_t count = 0;
  Kokkos::parallel_reduce(Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(0, a.size()),
                          Difference{a, b}, count);
  return count;
}

// `good_enough`: an error that need not be smaller.
using Product = Right (*)(const Right& x, const Right& w);
void no_worse(Product product, ks::Precision precision, double good_enough, std::int64_t m, std::int64_t n,
              std::int64_t k, Values values, const char* name) {
  const Right x = filled(m, k, values, false, static_cast<std::uint64_t>(m * 7 + k)),
              w = filled(n, k, values, true, static_cast<std::uint64_t>(n * 13 + k + 1));
  const Right ours = product(x, w), theirs = by_cublas(precision, x, w);
  const std::int64_t every_row = std::max<std::int64_t>(1, m / 61),
                     every_column = std::max<std::int64_t>(1, n / 61);
  const std::int64_t rows = (m + every_row - 1) / every_row, columns = (n + every_column - 1) / every_column;
  const Errors errors{
      x, w, ours, theirs, decltype(Errors::out)("errors", rows * columns), columns, every_row, every_column};
  Kokkos::parallel_for(Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(0, rows * columns), errors);
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), errors.out);
  double result[3] = {0, 0, 0};
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    for (int j = 0; j < 2; ++j) result[j] = std::max(result[j], host(i, j));
    result[2] += host(i, 2);
  }
  const std::string where =
      std::to_string(m) + " x " + std::to_string(n) + " x " + std::to_string(k) + ", " + name;
  EXPECT_EQ(result[2], 0) << where << ": infinities or NaNs";
  // (The largest of some thousand errors is a random number itself.)
  const double units = 0x1p-24;
  EXPECT_LE(result[0], std::max(1.25 * result[1], good_enough))
      << where << ": in units " << result[0] / units << ", cuBLAS " << result[1] / units;
}
// Two roundings of the sum of magnitudes are good enough where SGEMM, which may have split K, has fewer.
void no_worse_than_sgemm(std::int64_t m, std::int64_t n, std::int64_t k, Values values, const char* name) {
  no_worse(by_tensor_cores, ks::Precision::ieee, 0x1p-23, m, n, k, values, name);
}
// And what may be lost of two operands with 10 bits of fraction, each rounded, of one product or of many,
// with what the tensor core truncates at each 16 of K, where cuBLAS loses less: it does not multiply short
// rows in TF32, and may have split K.
void no_worse_than_tf32(std::int64_t m, std::int64_t n, std::int64_t k, Values values, const char* name) {
  const auto length = static_cast<double>(k);
  const double of_operands = std::min(0x1p-10, 4 * 0x1p-10 / std::sqrt(length));
  no_worse(by_rounding, ks::Precision::tf32, of_operands + length / 16 * 0x1p-24, m, n, k, values, name);
}

TEST(TensorCoreGemm, NoWorseThanSgemmForAnyValues) {
  NEEDS_TENSOR_CORES();
  for (const auto& [values, name] : all_values) {
    for (const std::int64_t k : {127, 128, 256, 1000, 2049, 8193})
      no_worse_than_sgemm(300, 260, k, values, name);
  }
}

TEST(TensorCoreGemm, NoWorseThanSgemmForAnyExtents) {
  NEEDS_TENSOR_CORES();
  for (const std::int64_t m : {1, 3, 64, 127, 128, 129, 1000, 8193}) {
    for (const std::int64_t n : {1, 3, 64, 127, 128, 129, 1000, 8193}) {
      for (const std::int64_t k : {1, 3, 64, 127, 128, 129, 1000, 8193}) {
        if (m * n * k <= 3'000'000'000) no_worse_than_sgemm(m, n, k, Values::both_signs, "[-1, 1)");
      }
    }
  }
}

TEST(TensorCoreGemm, NoWorseThanSgemmForHeads) {
  NEEDS_TENSOR_CORES();
  for (const auto& [values, name] : all_values) no_worse_than_sgemm(1024, 8192, 8192, values, name);
}

TEST(RoundedTensorCoreGemm, NoWorseThanTf32ForAnyValues) {
  NEEDS_TENSOR_CORES();
  for (const auto& [values, name] : all_values) {
    for (const std::int64_t k : {1, 63, 128, 1000, 2049, 8193}) no_worse_than_tf32(300, 260, k, values, name);
    no_worse_than_tf32(1024, 8192, 8192, values, name);
  }
}

TEST(RoundedTensorCoreGemm, NoWorseThanTf32ForAnyExtents) {
  NEEDS_TENSOR_CORES();
  for (const std::int64_t m : {1, 3, 127, 129, 257, 1000, 8193}) {
    for (const std::int64_t n : {1, 3, 127, 129, 255, 257, 1000, 8193}) {
      for (const std::int64_t k : {1, 64, 65, 1000})
        no_worse_than_tf32(m, n, k, Values::both_signs, "[-1, 1)");
    }
  }
}

// The guard looks at an element's two rows alone, and K is not split: a row among others has the bits that it
// has alone.
void check_bits_in_any_batch(Product product) {
  for (const auto values : {Values::normal, Values::very_wide, Values::trap, Values::not_finite}) {
    for (const std::int64_t k : {100, 500, 1500, 3001}) {
      const Right x = filled(517, k, values, false, 3), w = filled(411, k, values, true, 4);
      const Right all = product(x, w);
      for (const auto& [first, count] : {std::pair{0, 1}, {0, 16}, {5, 33}, {7, 100}, {300, 217}, {1, 512}}) {
        const std::pair rows(first, first + count);
        const Right part(x.data() + first * k, count, k), want(all.data() + first * 411, count, 411);
        EXPECT_EQ(bits_that_differ(product(part, w), want), 0)
            << "rows " << first << " to " << first + count << " of " << k;
      }
    }
  }
}
TEST(TensorCoreGemm, ARowHasTheSameBitsInAnyBatch) {
  NEEDS_TENSOR_CORES();
  check_bits_in_any_batch(by_tensor_cores);
}
TEST(RoundedTensorCoreGemm, ARowHasTheSameBitsInAnyBatch) {
  NEEDS_TENSOR_CORES();
  check_bits_in_any_batch(by_rounding);
}

// ---- Heads ------------------------------------------------------------------------------------------------

template <class View>
std::vector<float> on_host(const View& view) {
  const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), view);
  return {host.data(), host.data() + host.size()};
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST(TensorCoreLinear, PackedWeightsGiveTheSameBits) {
  NEEDS_TENSOR_CORES();
  const Exec exec;
  const ks::ScopedImplementation forced("tensor_core_linear");
  for (const auto values : {Values::normal, Values::very_wide, Values::trap, Values::not_finite}) {
    const Right x = filled(150, 777, values, false, 5), w = filled(300, 777, values, true, 6),
                y("y", 150, 300), packed_y("y", 150, 300);
    const auto packed = ks::pack(exec, w);
    EXPECT_TRUE(packed.is_packed());
    EXPECT_EQ(packed.extent(0), 300);
    EXPECT_EQ(packed.extent(1), 777);
    const Kokkos::View<float**, Kokkos::LayoutLeft, Kokkos::CudaSpace> w_left("w", 300, 777);
    Kokkos::deep_copy(w_left, w);
    const auto packed_left = ks::pack(exec, w_left);
    ks::linear_softmax(exec, x, w, y, ks::gelu());
    const auto want = on_host(y);
    Kokkos::deep_copy(w, 0.0f);  // not looked at again
    Kokkos::deep_copy(w_left, 0.0f);
    ks::linear_softmax(exec, x, packed, packed_y, ks::gelu());
    EXPECT_STREQ(ks::last_implementation(), "tensor_core_linear");
    EXPECT_TRUE(same_bits(on_host(packed_y), want));
    ks::linear_softmax(exec, x, packed_left, packed_y, ks::gelu());
    EXPECT_TRUE(same_bits(on_host(packed_y), want));
  }
}

TEST(TensorCoreLinear, PackedWeightsOnTwoStreams) {
  NEEDS_TENSOR_CORES();
  const Stream stream_a, stream_b;
  const Exec exec_a(stream_a), exec_b(stream_b);
  const Right x = filled(257, 1024, Values::normal, false, 7),
              w = filled(1000, 1024, Values::normal, true, 8), y("y", 257, 1000), y_a("y", 257, 1000),
              y_b("y", 100, 1000);
  const auto packed = ks::pack(Exec(), w);
  ks::linear_log_softmax(Exec(), x, packed, y);
  Kokkos::fence();
  const auto want = on_host(y);
  const Right few(x.data(), 100, 1024);
  for (int i = 0; i < 20; ++i) {
    ks::linear_log_softmax(exec_a, x, packed, y_a);
    ks::linear_log_softmax(exec_b, few, packed, y_b);
  }
  Kokkos::fence();
  EXPECT_TRUE(same_bits(on_host(y_a), want));
  EXPECT_TRUE(same_bits(on_host(y_b), std::vector<float>(want.begin(), want.begin() + 100 * 1000)));
}

// One graph, operands that the guard lets through and operands that it does not.
TEST(TensorCoreLinear, TheGuardDecidesInAReplayedGraph) {
  NEEDS_TENSOR_CORES();
  const Stream stream;
  const Exec exec(stream);
  const ks::ScopedImplementation forced("tensor_core_linear");
  const Right x("x", 200, 1000), w("w", 333, 1000), y("y", 200, 333), y_eager("y", 200, 333);
  for (const bool with_pack : {false, true}) {
    const Values of_w = with_pack ? Values::normal : Values::trap;
    Kokkos::deep_copy(w, filled(333, 1000, of_w, true, 2));
    const auto packed = ks::pack(exec, w);
    const auto call = [&](const Right& to) {
      if (with_pack) {
        ks::linear_softmax(exec, x, packed, to, ks::scale(0.01f));
      } else {
        ks::linear_softmax(exec, x, w, to, ks::scale(0.01f));
      }
    };
    if (with_pack) {
      ks::reserve(exec, x, packed, y, ks::scale(0.01f));
    } else {
      ks::reserve(exec, x, w, y, ks::scale(0.01f));
    }
    exec.fence();
    const Graph graph(stream, [&] { call(y); });
    ASSERT_EQ(graph.failure(), "");
    for (const auto values : {Values::normal, Values::trap, Values::normal, Values::not_finite,
                              Values::very_wide, Values::normal}) {
      Kokkos::deep_copy(x, filled(200, 1000, values, false, 20));
      Kokkos::fence();
      Kokkos::deep_copy(exec, y, -1.0f);
      graph.launch();
      call(y_eager);
      exec.fence();
      EXPECT_TRUE(same_bits(on_host(y), on_host(y_eager)));
    }
  }
}

// Likewise where TF32 is asked for; W in other layouts, Y with a gap between rows and by columns.
TEST(RoundedTensorCoreLinear, LayoutsAndAReplayedGraph) {
  NEEDS_TENSOR_CORES();
  const Stream stream;
  const Exec exec(stream);
  const ks::ScopedImplementation forced("rounded_tensor_core_linear");
  constexpr std::int64_t m = 301, n = 515, k = 1001;
  using Left = Kokkos::View<float**, Kokkos::LayoutLeft, Kokkos::CudaSpace>;
  const Right x("x", m, k), y("y", m, n), y_eager("y", m, n), wide("y", m, n + 3), gap("gap", m, 3);
  const Left y_left("y", m, n), w_left("w", n, k);
  const auto y_with_gap = Kokkos::subview(wide, Kokkos::ALL, std::pair<int, int>(0, n));
  for (const auto of_w : {Values::normal, Values::trap}) {
    const Right w = filled(n, k, of_w, true, 2);
    Kokkos::deep_copy(w_left, w);
    const auto call = [&](const auto& weights, const auto& to) {
      ks::linear_log_softmax(exec, x, weights, to, ks::scale(0.01f), ks::Precision::tf32);
    };
    const auto packed = ks::pack(exec, w);
    ks::reserve(exec, x, w, y, ks::scale(0.01f), ks::Precision::tf32);
    exec.fence();
    const Graph graph(stream, [&] { call(w, y); });
    ASSERT_EQ(graph.failure(), "");
    for (const auto values : {Values::normal, Values::trap, Values::not_finite, Values::very_wide}) {
      Kokkos::deep_copy(x, filled(m, k, values, false, 20));
      Kokkos::deep_copy(wide, 5.0f);
      Kokkos::fence();
      Kokkos::deep_copy(exec, y, -1.0f);
      graph.launch();
      call(w, y_eager);
      EXPECT_STREQ(ks::last_implementation(), "rounded_tensor_core_linear");
      exec.fence();
      const auto want = on_host(y_eager);
      EXPECT_TRUE(same_bits(on_host(y), want));
      const auto expect_same = [&](const char* what, const auto& weights, const auto& to) {
        call(weights, to);
        exec.fence();
        Kokkos::deep_copy(y, to);
        EXPECT_TRUE(same_bits(on_host(y), want)) << what;
      };
      expect_same("W in LayoutLeft", w_left, y_eager);
      expect_same("rows of Y with a gap", w_left, y_with_gap);
      const auto expect_near = [&](const char* what, const auto& weights, const auto& to) {
        call(weights, to);
        exec.fence();
        Kokkos::deep_copy(y, to);
        const auto got = on_host(y);
        for (std::size_t i = 0; i < want.size(); ++i) {
          if (std::isfinite(want[i])) {
            EXPECT_NEAR(got[i], want[i], 4e-6f * std::max(1.0f, std::abs(want[i]))) << what << ", " << i;
          } else {
            EXPECT_FALSE(std::isfinite(got[i])) << what << ", " << i;
          }
        }
      };
      // Whose softmax sums in another order; and where float arithmetic has halves of W in place of W.
      expect_near("Y by columns", w, y_left);
      expect_near("packed", packed, y_eager);
      Kokkos::deep_copy(gap, Kokkos::subview(wide, Kokkos::ALL, std::pair<int, int>(n, n + 3)));
      EXPECT_EQ(on_host(gap), std::vector<float>(3 * m, 5.0f));
    }
  }
}

// A row with an infinity or NaN does not touch the others.
TEST(TensorCoreLinear, RowsThatAreNotFinite) {
  NEEDS_TENSOR_CORES();
  const Exec exec;
  const Right x = filled(140, 300, Values::not_finite, false, 9),
              w = filled(200, 300, Values::normal, true, 10), y("y", 140, 200), by_cublas("y", 140, 200);
  {
    const ks::ScopedImplementation forced("tensor_core_linear");
    ks::linear_softmax(exec, x, w, y);
  }
  {
    const ks::ScopedImplementation forced("cublas_linear");
    ks::linear_softmax(exec, x, w, by_cublas);
  }
  const auto ours = on_host(y), theirs = on_host(by_cublas);
  for (std::size_t i = 0; i < ours.size(); ++i) {
    if (std::isnan(theirs[i])) {
      EXPECT_TRUE(std::isnan(ours[i])) << i;
    } else {
      EXPECT_NEAR(ours[i], theirs[i], 1e-4f * theirs[i] + 1e-38f) << i;
    }
  }
}

// With few rows the transform is applied with the product, with many in the softmax.
TEST(TensorCoreLinear, FewRowsHaveTheBitsOfMany) {
  NEEDS_TENSOR_CORES();
  const Exec exec;
  const ks::ScopedImplementation forced("tensor_core_linear");
  const Right b = filled(1, 333, Values::normal, true, 13), y("y", 200, 333), few_y("y", 64, 333);
  const Kokkos::View<const float*, Kokkos::CudaSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>> bias(b.data(),
                                                                                                    333);
  const auto head = ks::bias(bias) | ks::gelu() | ks::causal(200) | ks::scale(0.07f);
  for (const auto values : {Values::normal, Values::trap, Values::not_finite}) {
    const Right x = filled(200, 700, values, false, 14),
                w = filled(333, 700, values == Values::not_finite ? Values::normal : values, true, 15);
    ks::linear_softmax(exec, x, w, y, head);
    const auto want = on_host(y);
    for (const int rows : {1, 16, 17, 33, 64}) {
      const Right few(x.data(), rows, 700), to(few_y.data(), rows, 333);
      ks::linear_softmax(exec, few, w, to, head);
      const auto got = on_host(to);
      EXPECT_TRUE(same_bits(got, std::vector<float>(want.begin(), want.begin() + rows * 333)))
          << rows << " rows";
    }
  }
}

TEST(TensorCoreLinear, AReservedCallIsQuiet) {
  NEEDS_TENSOR_CORES();
  const Stream stream;
  const Exec exec(stream);
  const ks::ScopedImplementation forced("tensor_core_linear");
  const Right x = filled(30, 500, Values::normal, false, 11), w = filled(70, 500, Values::normal, true, 12),
              y("y", 30, 70);
  const auto packed = ks::pack(exec, w);
  ks::reserve(exec, x, w, y, ks::gelu());
  ks::reserve(exec, x, packed, y, ks::gelu());
  {
    const ks::ScopedImplementation rounded("rounded_tensor_core_linear");
    ks::reserve(exec, x, w, y, ks::gelu(), ks::Precision::tf32);
  }
  exec.fence();
  ToolRecorder recorder;
  ks::linear_softmax(exec, x, w, y, ks::gelu());
  ks::linear_log_softmax(exec, x, packed, y, ks::gelu());
  {
    const ks::ScopedImplementation rounded("rounded_tensor_core_linear");
    ks::linear_softmax(exec, x, w, y, ks::gelu(), ks::Precision::tf32);
  }
  const auto& records = recorder.records();
  EXPECT_GE(records.kernels.size(), 10u);
  EXPECT_TRUE(records.fences.empty());
  EXPECT_TRUE(records.copies.empty());
  EXPECT_TRUE(records.allocations.empty());
  EXPECT_EQ(records.open_regions, 0);
  exec.fence();
}

TEST(TensorCoreLinear, WhatIsChosenAndWhatIsRefused) {
  NEEDS_TENSOR_CORES();
  const Exec exec;
  const Right x = filled(512, 1024, Values::normal, false, 1),
              w = filled(4096, 1024, Values::normal, true, 2), y("y", 512, 4096), short_x("x", 512, 32),
              short_w("w", 4096, 32), narrow("y", 512, 4000);
  ks::linear_softmax(exec, x, w, y);
  EXPECT_STREQ(ks::last_implementation(), "tensor_core_linear");
  ks::linear_softmax(exec, x, w, y, ks::Precision::tf32);
  EXPECT_STREQ(ks::last_implementation(), "cublas_linear");
  ks::linear_softmax(exec, short_x, short_w, y);
  EXPECT_STREQ(ks::last_implementation(), "cublas_linear");
  const Right many_x = filled(2048, 2048, Values::normal, false, 3),
              many_w = filled(8192, 2048, Values::normal, true, 4), many_y("y", 2048, 8192);
  ks::linear_softmax(exec, many_x, many_w, many_y, ks::Precision::tf32);
  EXPECT_STREQ(ks::last_implementation(), "rounded_tensor_core_linear");
  ks::linear_softmax(exec, many_x, many_w, many_y);
  EXPECT_STREQ(ks::last_implementation(), "tensor_core_linear");
  {
    const ks::ScopedImplementation forced("rounded_tensor_core_linear");
    expect_refused([&] { ks::linear_softmax(exec, x, w, y); }, {"rounded_tensor_core_linear", "tf32"});
  }
  const auto packed = ks::pack(exec, w);
  expect_refused([&] { ks::linear_softmax(exec, short_x, packed, y); },
                 {"linear_softmax", "X", "(512, 32)", "W", "(4096, 1024)", "K"});
  expect_refused([&] { ks::linear_softmax(exec, x, packed, narrow); },
                 {"linear_softmax", "Y", "(512, 4000)", "W", "(4096, 1024)"});
  {
    const ks::ScopedImplementation forced("cublas_linear");
    expect_refused([&] { ks::linear_softmax(exec, x, packed, y); }, {"cublas_linear", "tensor_core_linear"});
  }
  // Too few columns to be split: a copy, and whatever is best for it.
  const auto copied = ks::pack(exec, short_w);
  EXPECT_FALSE(copied.is_packed());
  ks::linear_softmax(exec, short_x, copied, y);
  EXPECT_STREQ(ks::last_implementation(), "cublas_linear");
  exec.fence();
}

}  // namespace

#endif
