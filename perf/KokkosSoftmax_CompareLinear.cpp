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

// X W^T alone, by the library that multiplies for the heads.
struct GemmAlone {
  static constexpr const char* name = "gemm";
  static constexpr const char* description = "X W^T alone, by the library that the heads use, shape MxKxN";
  static constexpr ks::Precision precision = ks::Precision::ieee;
  static constexpr bool has_statistics = false, is_head = false;
};

struct GeluHead {
  static constexpr const char* name = "linear_gelu_softmax";
  static constexpr const char* description = "softmax(gelu(X W^T + b)), shape MxKxN";
  static constexpr ks::Precision precision = ks::Precision::ieee;
  static constexpr bool has_statistics = false, is_head = true;
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
  static constexpr bool has_statistics = false, is_head = true;
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
  static constexpr bool has_statistics = true, is_head = true;
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

// With weights that were packed before the clock starts.
template <class Op>
struct Packed : Op {
  static inline const std::string text = std::string(Op::name) + "_packed";
  static inline const char* const name = text.c_str();
  static constexpr const char* description = "the same with W from pack()";
};
template <class Op>
inline constexpr bool is_packed_v = false;
template <class Op>
inline constexpr bool is_packed_v<Packed<Op>> = true;
template <class Op>
inline constexpr bool is_packed_v<Tf32<Op>> = is_packed_v<Op>;

template <class Op, class Exec, class View>
auto weights_of(const Exec& exec, const View& w) {
  if constexpr (is_packed_v<Op>) {
    return ks::pack(exec, w);
  } else {
    return w;
  }
}

template <class T, class Exec>
Block<T, Exec> constant(const Exec& exec, std::int64_t count, double value) {
  Block<T, Exec> block(Kokkos::view_alloc(exec, "compare::column"), static_cast<std::size_t>(count));
  Kokkos::deep_copy(exec, block, static_cast<T>(value));
  return block;
}

// Where a matrix lies in a block: "right", "left" or "strided", X's, W's or Y's in "X:W:Y".
struct Placement {
  std::int64_t rows, columns, row_stride, column_stride;

  Placement(const std::string& layouts, int which, std::int64_t m, std::int64_t n) : rows(m), columns(n) {
    std::string layout = layouts;
    for (int i = 0; i < which && layout.find(':') != std::string::npos; ++i)
      layout.erase(0, layout.find(':') + 1);
    layout = layout.substr(0, layout.find(':'));
    const std::int64_t step = layout == "strided" ? 2 : 1;
    row_stride = layout == "left" ? 1 : step * n;
    column_stride = layout == "left" ? m : step;
  }
  std::int64_t span() const { return (rows - 1) * row_stride + (columns - 1) * column_stride + 1; }
  template <class Memory, class T>
  auto view(T* data) const {
    const Kokkos::LayoutStride layout(rows, row_stride, columns, column_stride);
    return Kokkos::View<T**, Kokkos::LayoutStride, Memory, Kokkos::MemoryTraits<Kokkos::Unmanaged>>(data,
                                                                                                    layout);
  }
};

template <class Exec, class T>
ks::impl::BlasMatrix<T> row_major(T* data, std::int64_t rows, std::int64_t columns) {
  return {data, rows, columns, columns, true};
}

// The head's GEMM alone: the same library, the types that it multiplies and sums in.
template <class Op, class Exec, class In, class Acc>
Action gemm_alone(const Exec& exec, const Case& what, double range) {
  using Gemm = GemmOf<Exec>;
  using Operand = typename Gemm::template Operand<In, In, Acc>;
  const auto x = random_block<Operand>(exec, what.rows * what.inner, {range});
  const auto w = random_block<Operand>(exec, what.columns * what.inner, {range});
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

// Rows of a head's output `ys` against the softmax of the logits `value` in some columns.
template <class Op, class Acc, class Out, class Note>
void check_softmax(const std::vector<double>& ys, const std::vector<std::int64_t>& rows,
                   const std::vector<std::int64_t>& columns, std::int64_t n, const std::vector<double>& value,
                   const std::vector<double>& error, const Note& note) {
  const double unit = std::is_same_v<Acc, double> ? 0x1p-53 : 0x1p-24;
  const std::size_t width = columns.size();
  const auto m = static_cast<std::int64_t>(value.size() / width);
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

// What a float head on the tensor cores is measured by: its three products, without a split and without a
// softmax.
template <class Op, class Exec, class In>
constexpr bool has_half_floor() {
#if defined(KOKKOS_ENABLE_CUDA)
  return std::is_same_v<Exec, Kokkos::Cuda> && std::is_same_v<In, float> && Op::is_head &&
         Op::precision == ks::Precision::ieee;
#else
  return false;
#endif
}

template <class Exec>
Action three_half_gemms(const Exec& exec, const Case& what) {
  const auto x = random_block<ks::half_t>(exec, what.rows * what.inner, {1});
  const auto w = random_block<ks::half_t>(exec, what.columns * what.inner, {1});
  const Block<float, Exec> c("compare::product", static_cast<std::size_t>(what.rows * what.columns));
  GemmOf<Exec>::reserve(exec);
  exec.fence("compare::gemm");
  return {"three binary16 GEMMs, cuBLAS", [=] {
            for (int i = 0; i < 3; ++i) {
              GemmOf<Exec>::multiply(exec, ks::Precision::ieee,
                                     row_major<Exec, const ks::half_t>(x.data(), what.rows, what.inner),
                                     row_major<Exec, const ks::half_t>(w.data(), what.columns, what.inner),
                                     row_major<Exec, float>(c.data(), what.rows, what.columns));
            }
          }};
}

// Some rows of the output against double precision, with what a GEMM's roundings may do to each logit. Some
// columns of them: the ratio of two elements of a row needs the logits of two columns alone, and batch
// statistics those of all rows; the sum of the row speaks for the other columns.
template <class Op, class Exec, class In, class Out>
void check(const Exec& exec, const In* x, const Placement& x_at, const In* w, const Placement& w_at,
           const Block<Out, Exec>& y, const Placement& y_at, const Case& what, Accuracy& accuracy) {
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
  const auto gathered = [&](const In* from, const Placement& at, const std::vector<std::int64_t>& chosen) {
    const Kokkos::View<In*, typename Exec::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>> view(
        const_cast<In*>(from), static_cast<std::size_t>(at.span()));
    return gather<In>(exec, Block<In, Exec>(view), chosen, at.row_stride, k, at.column_stride);
  };
  const std::vector<double> xs = gathered(x, x_at, computed), ws = gathered(w, w_at, columns);
  const std::vector<double> ys = gather<Out>(exec, y, rows, y_at.row_stride, n, y_at.column_stride);
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
  const auto note = [&](double difference, double allowed) {
    accuracy.error = std::max(accuracy.error, difference);
    accuracy.allowed = std::max(accuracy.allowed, difference / allowed);
    ++accuracy.checked;
  };
  if constexpr (!Op::is_head) {
    // Relative to the largest value of the row.
    for (std::size_t r = 0; r < rows.size(); ++r) {
      double largest = 0;
      for (std::size_t c = 0; c < width; ++c) largest = std::max(largest, std::fabs(value[r * width + c]));
      for (std::size_t c = 0; c < width; ++c) {
        const double got = ys[r * static_cast<std::size_t>(n) + static_cast<std::size_t>(columns[c])];
        note(std::fabs(got - value[r * width + c]) / largest, error[r * width + c] / largest);
      }
    }
    return;
  } else {
    check_softmax<Op, Acc, Out>(ys, rows, columns, n, value, error, note);
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
  const Placement x_at(what.layout, 0, m, k), w_at(what.layout, 1, n, k), y_at(what.layout, 2, m, n);
  // The GEMM alone has operands of its own; what is strided takes twice its bytes.
  const std::int64_t needed = 4 * bytes, available = Runner<Exec>::free_bytes();
  if (needed > available) {
    result.failure = "needs " + std::to_string(needed >> 20) + " MiB of memory, " +
                     std::to_string(available >> 20) + " MiB are available";
    return result;
  }
  if (!Op::is_head && what.layout.find("strided") != std::string::npos) {
    result.failure = "BLAS takes no matrix that is strided in both dimensions";
    return result;
  }
  with_failure_in(result, [&] {
    const ks::ScopedImplementation force(what.implementation.empty()
                                             ? std::string()
                                             : "linear_softmax@" + what.backend + "=" + what.implementation);
    const bool in_graph = options.graph && Runner<Exec>::has_graphs;
    Runner<Exec> runner(in_graph);
    const Exec& exec = runner.exec();
    // Logits of about the size that a layer's have.
    const double range = 1.5 / std::sqrt(std::sqrt(static_cast<double>(std::max<std::int64_t>(k, 1))));
    // W is what follows X in one sequence of random numbers.
    const std::int64_t w_begin = (x_at.span() + 63) / 64 * 64;
    const Block<In, Exec> operands = random_block<In>(exec, w_begin + w_at.span(), {range});
    const In *const x = operands.data(), *const w = operands.data() + w_begin;
    Block<Out, Exec> y(Kokkos::view_alloc(exec, "compare::output", Kokkos::WithoutInitializing),
                       static_cast<std::size_t>(y_at.span()));
    const Columns<Exec> columns{constant<float>(exec, n, 0), constant<float>(exec, n, 1),
                                constant<float>(exec, n, 0), constant<float>(exec, n, 0),
                                constant<float>(exec, n, 1)};
    poison<Out>(exec, y);
    using Memory = typename Exec::memory_space;
    const auto x_view = x_at.template view<Memory>(x), w_view = w_at.template view<Memory>(w);
    const auto y_view = y_at.template view<Memory>(y.data());
    const auto weights = weights_of<Op>(exec, w_view);
    const auto call = [=] {
      if constexpr (Op::is_head) {
        ks::linear_softmax(exec, x_view, weights, y_view, Op::template head<Exec>(columns), Op::precision);
      } else {
        using Gemm = GemmOf<Exec>;
        const auto matrix = [](auto* data, const Placement& at) {
          using T = std::remove_pointer_t<decltype(data)>;
          return ks::impl::as_blas_matrix(
              ks::impl::Matrix<T>{data, at.rows, at.columns, at.row_stride, at.column_stride});
        };
        Gemm::multiply(exec, Op::precision, matrix(x, x_at), matrix(w, w_at), matrix(y.data(), y_at));
      }
    };
    const auto reserve = [=] {
      if constexpr (Op::is_head) {
        ks::reserve(exec, x_view, weights, y_view, Op::template head<Exec>(columns), Op::precision);
      }
      GemmOf<Exec>::reserve(exec);
    };
    Action action{Op::name, call};
    reserve();
    action.invoke();
    result.implementation = Op::is_head ? ks::last_implementation() : GemmOf<Exec>::name;
    exec.fence("compare::first call");
    std::vector<Action> actions{action};
    if constexpr (Op::is_head) actions.push_back(gemm_alone<Op, Exec, In, Acc>(exec, what, range));
    if constexpr (has_half_floor<Op, Exec, In>()) actions.push_back(three_half_gemms(exec, what));
    if (in_graph) {
      for (Action& each : actions) {
        each.invoke();
        reserve();
        each = runner.in_graph(each);
      }
    }
    poison<Out>(exec, y);
    actions[0].invoke();
    exec.fence("compare::checked call");
    check<Op>(exec, x, x_at, w, w_at, y, y_at, what, result.accuracy);
    // What lies between the elements stays as it was.
    result.accuracy.unwritten = count_nan<Out>(exec, y) - (y_at.span() - m * n);
    const std::vector<Timing> timings = time_in_rounds(exec, actions, options);
    result.time = timings[0];
    for (std::size_t i = 1; i < actions.size(); ++i) {
      result.yardsticks.push_back({actions[i].name, timings[i], result.bytes});
    }
  });
  return result;
}

template <class Op, class Exec, class In, class Out>
void add_kernel(Operation& operation) {
  // The GEMM alone multiplies what its library takes, and gives what it sums in.
  using Acc = ks::accumulator_t<In, Out>;
  using Operand = typename GemmOf<Exec>::template Operand<In, In, Acc>;
  if constexpr (Op::is_head || (std::is_same_v<In, Operand> && std::is_same_v<Out, Acc>)) {
    operation.kernels.push_back({Exec::name(), ks::scalar_name<In>(), ks::scalar_name<Out>(), sizeof(In),
                                 sizeof(Out), &run<Op, Exec, In, Out>});
  }
}

template <class Op, class Exec>
void add_kernels(Operation& operation) {
#define KOKKOSSOFTMAX_COMPARE_ADD(In, Out) add_kernel<Op, Exec, In, Out>(operation);
  if constexpr (Op::precision == ks::Precision::tf32 || is_packed_v<Op>) {
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
#define KOKKOSSOFTMAX_COMPARE_ADD(Exec)                                                                      \
  if (backend == Exec::name()) {                                                                             \
    names = Op::is_head ? ks::linear_implementations<Exec>() : std::vector<std::string>{GemmOf<Exec>::name}; \
  }
    KOKKOSSOFTMAX_FOR_EACH_BACKEND(KOKKOSSOFTMAX_COMPARE_ADD)
#undef KOKKOSSOFTMAX_COMPARE_ADD
    return names;
  };
  return operation;
}

}  // namespace

std::vector<Operation> linear_operations() {
  return {make_operation<GemmAlone>(),
          make_operation<GeluHead>(),
          make_operation<TrainingHead>(),
          make_operation<BatchNormHead>(),
          make_operation<Packed<GeluHead>>(),
          make_operation<Packed<TrainingHead>>(),
          make_operation<Packed<BatchNormHead>>(),
          make_operation<Tf32<GemmAlone>>(),
          make_operation<Tf32<GeluHead>>(),
          make_operation<Tf32<Packed<GeluHead>>>(),
          make_operation<Tf32<TrainingHead>>(),
          make_operation<Tf32<BatchNormHead>>()};
}

}  // namespace compare
