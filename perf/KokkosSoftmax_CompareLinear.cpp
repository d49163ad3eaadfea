// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

// The heads as entries of the comparison, and the GEMM alone, which is their yardstick: "of copy" is the part
// of a head's time that its GEMM takes.

#include "KokkosSoftmax_CompareMeasure.hpp"

namespace compare {
namespace {

namespace ks = KokkosSoftmax;

#if defined(KOKKOS_ENABLE_CUDA)
template <class Exec>
using GemmOf =
    std::conditional_t<std::is_same_v<Exec, Kokkos::Cuda>, ks::impl::CublasGemm, ks::impl::KokkosBlasGemm>;
#else
template <class Exec>
using GemmOf = ks::impl::KokkosBlasGemm;
#endif

// One value a column for each of a head's operands.
template <class Exec>
struct Columns {
  Block<float, Exec> bias, gamma, beta, mean, variance;
};

constexpr double eps = 1e-5, factor = 2;

struct GeluHead {
  static constexpr const char* name = "linear_gelu_softmax";
  static constexpr const char* description = "softmax(gelu(X W^T + b)), shape MxKxN";
  static constexpr ks::Precision precision = ks::Precision::ieee;
  static constexpr bool has_statistics = false;
  template <class Exec>
  static auto head(const Columns<Exec>& c) {
    return ks::bias(c.bias) | ks::gelu();
  }
  // With the column's mean and variance over the batch where they are used.
  static double logit(double value, double, double) {
    return value * 0.5 * std::erfc(-value / std::sqrt(2.0));
  }
  static double slope(double, double) { return 1.13; }
};

struct BatchNormHead {
  static constexpr const char* name = "linear_batch_norm_softmax";
  static constexpr const char* description =
      "softmax(scale batch_norm(X W^T + b)) with given statistics, shape MxKxN";
  static constexpr ks::Precision precision = ks::Precision::ieee;
  static constexpr bool has_statistics = false;
  template <class Exec>
  static auto head(const Columns<Exec>& c) {
    return ks::bias(c.bias) | ks::batch_norm(c.mean, c.variance, c.gamma, c.beta, eps) | ks::scale(factor);
  }
  // The statistics are 0 and 1 here, gamma 1 and beta 0.
  static double logit(double value, double, double) { return value / std::sqrt(1 + eps) * factor; }
  static double slope(double, double) { return factor; }
};

struct TrainingHead {
  static constexpr const char* name = "linear_batch_norm_training_softmax";
  static constexpr const char* description =
      "softmax(scale batch_norm(X W^T + b)) with the batch's statistics, shape MxKxN";
  static constexpr ks::Precision precision = ks::Precision::ieee;
  static constexpr bool has_statistics = true;
  template <class Exec>
  static auto head(const Columns<Exec>& c) {
    return ks::bias(c.bias) | ks::batch_norm_training(c.gamma, c.beta, eps, c.mean, c.variance, 0.1) |
           ks::scale(factor);
  }
  static double logit(double value, double mean, double variance) {
    return (value - mean) / std::sqrt(variance + eps) * factor;
  }
  static double slope(double, double variance) { return 4 * factor / std::sqrt(variance + eps); }
};

template <class Op>
struct Tf32 : Op {
  static constexpr ks::Precision precision = ks::Precision::tf32;
  static inline const std::string text = std::string(Op::name) + "_tf32";
  static inline const char* const name = text.c_str();
  static constexpr const char* description = "the same with TF32 products where the hardware has them";
};

template <class T, class Exec>
Block<T, Exec> constant(const Exec& exec, std::int64_t count, double value) {
  Block<T, Exec> block(Kokkos::view_alloc(exec, "compare::column"), static_cast<std::size_t>(count));
  Kokkos::deep_copy(exec, block, static_cast<T>(value));
  return block;
}

template <class Exec, class T>
ks::impl::BlasMatrix<T> row_major(T* data, std::int64_t rows, std::int64_t columns) {
  return {data, rows, columns, columns, true};
}

// The head's GEMM alone: the same library, the types that it multiplies and sums in.
template <class Op, class Exec, class In, class Acc>
Action gemm_alone(const Exec& exec, const Case& what, double range) {
  using Gemm = GemmOf<Exec>;
  using Operand = typename Gemm::template Operand<In, In, Acc>;
  const auto x = random_block<Operand>(exec, what.rows * what.inner, range);
  const auto w = random_block<Operand>(exec, what.columns * what.inner, range);
  const Block<Acc, Exec> c("compare::product", static_cast<std::size_t>(what.rows * what.columns));
  Gemm::reserve(exec);
  exec.fence("compare::gemm");
  return {std::string("GEMM alone, ") +
              (std::is_same_v<Gemm, ks::impl::KokkosBlasGemm> ? "KokkosBlas" : "cuBLAS"),
          [=] {
            Gemm::multiply(exec, Op::precision,
                           row_major<Exec, const Operand>(x.data(), what.rows, what.inner),
                           row_major<Exec, const Operand>(w.data(), what.columns, what.inner),
                           row_major<Exec, Acc>(c.data(), what.rows, what.columns));
          }};
}

// Some rows of the output against double precision, with what a GEMM's roundings may do to each logit.
template <class Op, class Exec, class In, class Out>
void check(const Exec& exec, const Block<In, Exec>& x, const Block<In, Exec>& w, const Block<Out, Exec>& y,
           const Case& what, Accuracy& accuracy) {
  using Acc = ks::accumulator_t<In, Out>;
  const double unit = std::is_same_v<Acc, double> ? 0x1p-53 : 0x1p-24;
  const bool tf32 =
      Op::precision == ks::Precision::tf32 && std::is_same_v<In, float> && !is_host_backend<Exec>;
  const std::int64_t m = what.rows, n = what.columns, k = what.inner;
  const double work = static_cast<double>(n) * static_cast<double>(k);
  // Batch statistics need every row.
  if (Op::has_statistics && work * static_cast<double>(m) > 2e9) return;
  std::vector<std::int64_t> computed, chosen{0, m / 2, m - 1};
  chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
  if (Op::has_statistics) {
    for (std::int64_t i = 0; i < m; ++i) computed.push_back(i);
  } else {
    computed = chosen;
  }
  std::vector<std::int64_t> w_rows;
  for (std::int64_t j = 0; j < n; ++j) w_rows.push_back(j);
  const std::vector<double> xs = gather<In>(exec, x, computed, k, k, 1),
                            ws = gather<In>(exec, w, w_rows, k, k, 1);
  const std::vector<double> ys = gather<Out>(exec, y, chosen, n, n, 1);
  const double roundings =
      std::min<double>(static_cast<double>(k), 8 + 2 * std::sqrt(static_cast<double>(k)));
  std::vector<double> value(computed.size() * n), error(value.size());
  for (std::size_t r = 0; r < computed.size(); ++r) {
    for (std::int64_t j = 0; j < n; ++j) {
      double sum = 0, size = 0;
      for (std::int64_t i = 0; i < k; ++i) {
        const double product = xs[r * k + i] * ws[j * k + i];
        sum += product;
        size += std::fabs(product);
      }
      value[r * n + j] = sum;
      error[r * n + j] = (roundings * unit + (tf32 ? 0x1p-9 : 0)) * size + 8 * unit * std::fabs(sum);
    }
  }
  std::vector<double> mean(n, 0.0), variance(n, 0.0);
  if (Op::has_statistics) {
    for (std::int64_t j = 0; j < n; ++j) {
      for (std::int64_t r = 0; r < m; ++r) mean[j] += value[r * n + j] / static_cast<double>(m);
      for (std::int64_t r = 0; r < m; ++r) {
        variance[j] += (value[r * n + j] - mean[j]) * (value[r * n + j] - mean[j]) / static_cast<double>(m);
      }
    }
  }
  const double half_unit_out = sizeof(Out) == 2 ? (std::is_same_v<Out, ks::half_t> ? 0x1p-10 : 0x1p-7) : 0;
  for (std::size_t c = 0; c < chosen.size(); ++c) {
    const std::size_t r = Op::has_statistics ? static_cast<std::size_t>(chosen[c]) : c;
    double largest = -1e300, largest_error = 0, sum = 0;
    std::vector<double> logit(n);
    for (std::int64_t j = 0; j < n; ++j) {
      logit[j] = Op::logit(value[r * n + j], mean[j], variance[j]);
      largest = std::max(largest, logit[j]);
      largest_error = std::max(largest_error, Op::slope(mean[j], variance[j]) * error[r * n + j] +
                                                  16 * unit * std::fabs(logit[j]));
    }
    for (std::int64_t j = 0; j < n; ++j) sum += std::exp(logit[j] - largest);
    for (std::int64_t j = 0; j < n; ++j) {
      const double want = std::exp(logit[j] - largest) / sum;
      // Below the smallest normal of the output there is no relative error to speak of.
      const double difference = std::fabs(ys[c * n + j] - want) / std::max(want, 0x1p-14);
      const double may = std::expm1(2 * largest_error) + (unit == 0x1p-53 ? 1e-14 : 1e-6) + half_unit_out;
      accuracy.error = std::max(accuracy.error, difference);
      accuracy.allowed = std::max(accuracy.allowed, difference / may);
      ++accuracy.checked;
    }
  }
}

template <class Op, class Exec, class In, class Out>
Result run(const Case& what, const Options& options) {
  using Acc = ks::accumulator_t<In, Out>;
  Result result;
  result.what = what;
  const std::int64_t m = what.rows, n = what.columns, k = what.inner;
  const std::int64_t bytes = (m * k + n * k) * static_cast<std::int64_t>(sizeof(In)) +
                             m * n * static_cast<std::int64_t>(sizeof(Out));
  result.bytes = static_cast<double>(bytes);
  // The GEMM alone has operands of its own.
  const std::int64_t needed = 3 * bytes, available = Runner<Exec>::free_bytes();
  if (needed > available) {
    result.failure = "needs " + std::to_string(needed >> 20) + " MiB of memory, " +
                     std::to_string(available >> 20) + " MiB are available";
    return result;
  }
  try {
    const ks::ScopedImplementation force(what.implementation.empty()
                                             ? std::string()
                                             : "linear_softmax@" + what.backend + "=" + what.implementation);
    const bool in_graph = options.graph && Runner<Exec>::has_graphs;
    Runner<Exec> runner(in_graph);
    const Exec& exec = runner.exec();
    // Logits of about the size that a layer's have.
    const double range = 1.5 / std::sqrt(std::sqrt(static_cast<double>(std::max<std::int64_t>(k, 1))));
    const Block<In, Exec> x = random_block<In>(exec, m * k, range), w = random_block<In>(exec, n * k, range);
    Block<Out, Exec> y(Kokkos::view_alloc(exec, "compare::output", Kokkos::WithoutInitializing),
                       static_cast<std::size_t>(m * n));
    const Columns<Exec> columns{constant<float>(exec, n, 0), constant<float>(exec, n, 1),
                                constant<float>(exec, n, 0), constant<float>(exec, n, 0),
                                constant<float>(exec, n, 1)};
    poison<Out>(exec, y);
    using Memory = typename Exec::memory_space;
    const Kokkos::View<const In**, Kokkos::LayoutRight, Memory> x_view(x.data(), m, k),
        w_view(w.data(), n, k);
    const Kokkos::View<Out**, Kokkos::LayoutRight, Memory> y_view(y.data(), m, n);
    Action action{Op::name, [=] {
                    ks::linear_softmax(exec, x_view, w_view, y_view, Op::template head<Exec>(columns),
                                       Op::precision);
                  }};
    action.invoke();
    result.implementation = ks::last_implementation();
    exec.fence("compare::first call");
    std::vector<Action> actions{action, gemm_alone<Op, Exec, In, Acc>(exec, what, range)};
    if (in_graph) {
      for (Action& each : actions) {
        each.invoke();
        ks::reserve(exec, x_view, w_view, y_view, Op::template head<Exec>(columns), Op::precision);
        GemmOf<Exec>::reserve(exec);
        each = runner.in_graph(each);
      }
    }
    poison<Out>(exec, y);
    actions[0].invoke();
    exec.fence("compare::checked call");
    check<Op>(exec, x, w, y, what, result.accuracy);
    result.accuracy.unwritten = count_nan<Out>(exec, y);
    const std::vector<Timing> timings = time_in_rounds(exec, actions, options);
    result.time = timings[0];
    result.yardsticks.push_back({actions[1].name, timings[1], result.bytes});
  } catch (const std::invalid_argument& error) {
    result.failure = error.what();
    result.refused = !what.implementation.empty();
  } catch (const std::exception& error) {
    result.failure = error.what();
  }
  return result;
}

template <class Op, class Exec>
void add_kernels(Operation& operation) {
#define KOKKOSSOFTMAX_COMPARE_ADD(In, Out)                                                              \
  operation.kernels.push_back({Exec::name(), ks::scalar_name<In>(), ks::scalar_name<Out>(), sizeof(In), \
                               sizeof(Out), &run<Op, Exec, In, Out>});
  if constexpr (Op::precision == ks::Precision::tf32) {
    KOKKOSSOFTMAX_COMPARE_ADD(float, float)
  } else {
    KOKKOSSOFTMAX_FOR_EACH_SCALAR_PAIR(KOKKOSSOFTMAX_COMPARE_ADD)
  }
#undef KOKKOSSOFTMAX_COMPARE_ADD
}

template <class Op>
Operation make_operation() {
  Operation operation;
  operation.name = Op::name;
  operation.description = Op::description;
  operation.extents = 3;
#define KOKKOSSOFTMAX_COMPARE_ADD(Exec) add_kernels<Op, Exec>(operation);
  KOKKOSSOFTMAX_FOR_EACH_BACKEND(KOKKOSSOFTMAX_COMPARE_ADD)
#undef KOKKOSSOFTMAX_COMPARE_ADD
  operation.implementations = [](const std::string& backend) {
    std::vector<std::string> names;
#define KOKKOSSOFTMAX_COMPARE_ADD(Exec) \
  if (backend == Exec::name()) names = ks::linear_implementations<Exec>();
    KOKKOSSOFTMAX_FOR_EACH_BACKEND(KOKKOSSOFTMAX_COMPARE_ADD)
#undef KOKKOSSOFTMAX_COMPARE_ADD
    return names;
  };
  return operation;
}

}  // namespace

std::vector<Operation> linear_operations() {
  return {make_operation<GeluHead>(),           make_operation<TrainingHead>(),
          make_operation<BatchNormHead>(),      make_operation<Tf32<GeluHead>>(),
          make_operation<Tf32<TrainingHead>>(), make_operation<Tf32<BatchNormHead>>()};
}

}  // namespace compare
