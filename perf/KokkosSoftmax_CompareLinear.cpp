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

// Some rows of the output against double precision, with what a GEMM's roundings may do to each logit. Some
// columns of them: the ratio of two elements of a row needs the logits of two columns alone, and batch
// statistics those of all rows; the sum of the row speaks for the other columns.
template <class Op, class Exec, class In, class Out>
void check(const Exec& exec, const In* x, const In* w, const Block<Out, Exec>& y, const Case& what,
           Accuracy& accuracy) {
  using Acc = ks::accumulator_t<In, Out>;
  const double unit = std::is_same_v<Acc, double> ? 0x1p-53 : 0x1p-24;
  const bool tf32 =
      Op::precision == ks::Precision::tf32 && std::is_same_v<In, float> && !is_host_backend<Exec>;
  const std::int64_t m = what.rows, n = what.columns, k = what.inner;
  const std::vector<std::int64_t> rows = rows_to_check(m, n, 1), columns = rows_to_check(n, 1, 32);
  std::vector<std::int64_t> computed = rows;
  if (Op::has_statistics) {
    computed.clear();
    for (std::int64_t i = 0; i < m; ++i) computed.push_back(i);
  }
  const auto gathered = [&](const In* from, const std::vector<std::int64_t>& chosen, std::int64_t extent) {
    const Kokkos::View<In*, typename Exec::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>> view(
        const_cast<In*>(from), static_cast<std::size_t>(extent * k));
    return gather<In>(exec, Block<In, Exec>(view), chosen, k, k, 1);
  };
  const std::vector<double> xs = gathered(x, computed, m), ws = gathered(w, columns, n);
  const std::vector<double> ys = gather<Out>(exec, y, rows, n, n, 1);
  const double roundings =
      std::min<double>(static_cast<double>(k), 8 + 2 * std::sqrt(static_cast<double>(k)));
  const std::size_t width = columns.size();
  std::vector<double> value(computed.size() * width), error(value.size());
  for (std::size_t r = 0; r < computed.size(); ++r) {
    for (std::size_t c = 0; c < width; ++c) {
      double sum = 0, size = 0;
      for (std::int64_t i = 0; i < k; ++i) {
        const double product = xs[r * k + i] * ws[c * k + i];
        sum += product;
        size += std::fabs(product);
      }
      value[r * width + c] = sum;
      error[r * width + c] = (roundings * unit + (tf32 ? 0x1p-9 : 0)) * size + 8 * unit * std::fabs(sum);
    }
  }
  std::vector<double> mean(width, 0.0), variance(width, 0.0);
  for (std::size_t c = 0; Op::has_statistics && c < width; ++c) {
    for (std::int64_t r = 0; r < m; ++r) mean[c] += value[r * width + c] / static_cast<double>(m);
    for (std::int64_t r = 0; r < m; ++r) {
      variance[c] +=
          (value[r * width + c] - mean[c]) * (value[r * width + c] - mean[c]) / static_cast<double>(m);
    }
  }
  const double output_unit = sizeof(Out) == 2 ? (std::is_same_v<Out, ks::half_t> ? 0x1p-10 : 0x1p-7) : 0;
  const double base = (unit == 0x1p-53 ? 1e-14 : 1e-6) + output_unit;
  const auto note = [&](double difference, double allowed) {
    accuracy.error = std::max(accuracy.error, difference);
    accuracy.allowed = std::max(accuracy.allowed, difference / allowed);
    ++accuracy.checked;
  };
  for (std::size_t chosen = 0; chosen < rows.size(); ++chosen) {
    const std::size_t r = Op::has_statistics ? static_cast<std::size_t>(rows[chosen]) : chosen;
    const double* row = ys.data() + chosen * static_cast<std::size_t>(n);
    double sum = 0;
    for (std::int64_t j = 0; j < n; ++j) sum += row[j];
    note(std::fabs(sum - 1), 1e-5 + output_unit);
    std::vector<double> logit(width), logit_error(width);
    std::size_t best = 0;
    for (std::size_t c = 0; c < width; ++c) {
      logit[c] = Op::logit(value[r * width + c], mean[c], variance[c]);
      logit_error[c] =
          Op::slope(mean[c], variance[c]) * error[r * width + c] + 16 * unit * std::fabs(logit[c]);
      if (logit[c] > logit[best]) best = c;
    }
    for (std::size_t c = 0; c < width; ++c) {
      const double want = std::exp(logit[c] - logit[best]), got = row[columns[c]] / row[columns[best]];
      // Half has few digits below its smallest normal, 2^-14.
      const double floor = sizeof(Out) == 2 ? 0x1p-14 / row[columns[best]] : 0;
      note(std::fabs(got - want) / std::max(want, floor),
           std::expm1(logit_error[c] + logit_error[best]) + 2 * base);
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
    // W is what follows X in one sequence of random numbers.
    const std::int64_t w_at = (m * k + 63) / 64 * 64;
    const Block<In, Exec> operands = random_block<In>(exec, w_at + n * k, range);
    const In *const x = operands.data(), *const w = operands.data() + w_at;
    Block<Out, Exec> y(Kokkos::view_alloc(exec, "compare::output", Kokkos::WithoutInitializing),
                       static_cast<std::size_t>(m * n));
    const Columns<Exec> columns{constant<float>(exec, n, 0), constant<float>(exec, n, 1),
                                constant<float>(exec, n, 0), constant<float>(exec, n, 0),
                                constant<float>(exec, n, 1)};
    poison<Out>(exec, y);
    using Memory = typename Exec::memory_space;
    const Kokkos::View<const In**, Kokkos::LayoutRight, Memory> x_view(x, m, k),
        w_view(w, n, k);
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
