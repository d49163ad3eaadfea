// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

// softmax, log_softmax and logsumexp as entries of the comparison.

#include <cstdio>

#include "KokkosSoftmax_CompareMeasure.hpp"

namespace compare {
namespace {

namespace ks = KokkosSoftmax;

struct Softmax {
  static constexpr const char* name = "softmax";
  static constexpr const char* description = "y = exp(x - max) / sum exp(x - max), along the axis";
  static constexpr Quantity quantity = Quantity::softmax;
  template <class Exec, class X, class Y>
  static void call(const Exec& exec, const X& x, const Y& y, int axis) {
    ks::softmax(exec, x, y, ks::axis(axis));
  }
};

struct LogSoftmax {
  static constexpr const char* name = "log_softmax";
  static constexpr const char* description = "y = x - max - log sum exp(x - max), along the axis";
  static constexpr Quantity quantity = Quantity::log_softmax;
  template <class Exec, class X, class Y>
  static void call(const Exec& exec, const X& x, const Y& y, int axis) {
    ks::log_softmax(exec, x, y, ks::axis(axis));
  }
};

struct LogSumExp {
  static constexpr const char* name = "logsumexp";
  static constexpr const char* description = "y = max + log sum exp(x - max), one value a row";
  static constexpr Quantity quantity = Quantity::logsumexp;
  template <class Exec, class X, class Y>
  static void call(const Exec& exec, const X& x, const Y& y, int axis) {
    ks::logsumexp(exec, x, y, ks::axis(axis));
  }
};

template <class Op, class Exec, class In, class Out, class Layout>
std::function<void()> make_call(const Exec& exec, const Block<In, Exec>& x_block,
                                const Block<Out, Exec>& y_block, const Case& what) {
  const auto rows = static_cast<std::size_t>(what.rows), columns = static_cast<std::size_t>(what.columns);
  const Kokkos::View<const In**, Layout, typename Exec::memory_space> x(x_block.data(), rows, columns);
  if constexpr (Op::quantity == Quantity::logsumexp) {
    const Kokkos::View<Out*, Layout, typename Exec::memory_space> y(y_block.data(), y_block.size());
    return [=, axis = what.axis] { Op::call(exec, x, y, axis); };
  } else {
    const Kokkos::View<Out**, Layout, typename Exec::memory_space> y(y_block.data(), rows, columns);
    return [=, axis = what.axis] { Op::call(exec, x, y, axis); };
  }
}

template <class Op, class Exec, class In, class Out>
Result run(const Case& what, const Options& options) {
  constexpr bool writes_rows = Op::quantity != Quantity::logsumexp;
  Result result;
  result.what = what;

  // The view's extents as rows to normalise and their length.
  const bool last = what.axis == 1, right = what.layout == "right";
  const std::int64_t rows = last ? what.rows : what.columns, columns = last ? what.columns : what.rows;
  const bool rows_contiguous = last == right;
  const std::int64_t row_stride = rows_contiguous ? columns : 1, column_stride = rows_contiguous ? 1 : rows;
  // In double, since an absurd shape overflows 64 bits.
  const double written = writes_rows ? static_cast<double>(columns) : 1.0;
  result.bytes =
      static_cast<double>(rows) * (static_cast<double>(columns) * sizeof(In) + written * sizeof(Out));
  const auto available = static_cast<double>(Runner<Exec>::free_bytes());
  if (result.bytes > available) {
    char text[120];
    std::snprintf(text, sizeof text, "needs %.3g GiB of memory, %.3g GiB are available",
                  result.bytes / (1 << 30), available / (1 << 30));
    result.failure = text;
    return result;
  }
  const std::int64_t size_in = rows * columns, size_out = writes_rows ? size_in : rows;
  const std::int64_t bytes_in = size_in * static_cast<std::int64_t>(sizeof(In));
  const std::int64_t bytes_out = size_out * static_cast<std::int64_t>(sizeof(Out));

  try {
    const ks::ScopedImplementation force(what.implementation.empty() ? std::string()
                                                                     : what.operation + "@" + what.backend +
                                                                           "=" + what.implementation);
    const bool in_graph = options.graph && Runner<Exec>::has_graphs;
    Runner<Exec> runner(in_graph);
    const Exec& exec = runner.exec();
    const Block<In, Exec> x = random_block<In>(exec, size_in, options.range);
    Block<Out, Exec> y(Kokkos::view_alloc(exec, "compare::output", Kokkos::WithoutInitializing),
                       static_cast<std::size_t>(size_out));
    poison<Out>(exec, y);

    Action action{Op::name, right ? make_call<Op, Exec, In, Out, Kokkos::LayoutRight>(exec, x, y, what)
                                  : make_call<Op, Exec, In, Out, Kokkos::LayoutLeft>(exec, x, y, what)};
    action.invoke();  // makes what later calls use
    result.implementation = ks::last_implementation();
    exec.fence("compare::first call");
    if (in_graph) action = runner.in_graph(action);

    // What is timed is what is checked.
    poison<Out>(exec, y);
    action.invoke();
    const std::vector<std::int64_t> chosen = rows_to_check(rows, columns, options.check_elements);
    const std::vector<double> logits = gather<In>(exec, x, chosen, row_stride, columns, column_stride);
    const std::vector<double> values = writes_rows
                                           ? gather<Out>(exec, y, chosen, row_stride, columns, column_stride)
                                           : gather<Out>(exec, y, chosen, 1, 1, 1);
    for (std::size_t r = 0; r < chosen.size(); ++r) {
      const std::size_t begin = r * static_cast<std::size_t>(columns);
      check_row(Op::quantity, logits.data() + begin, columns, values.data() + (writes_rows ? begin : r),
                what.scalar_in, what.scalar_out, result.accuracy);
    }
    result.accuracy.unwritten = count_nan<Out>(exec, y);

    // The yardsticks may overwrite the output now.
    const std::int64_t copied = std::min(bytes_in, bytes_out);
    std::vector<Action> actions = writes_rows ? copy_yardsticks(runner, y.data(), x.data(), copied)
                                              : read_yardsticks(runner, x.data(), bytes_in);
    if (in_graph) {
      for (Action& yardstick : actions) {
        yardstick.invoke();
        yardstick = runner.in_graph(yardstick);
      }
    }
    actions.insert(actions.begin(), action);
    const std::vector<Timing> timings = time_in_rounds(exec, actions, options);
    result.time = timings[0];
    for (std::size_t a = 1; a < actions.size(); ++a) {
      result.yardsticks.push_back(
          {actions[a].name, timings[a], static_cast<double>(writes_rows ? 2 * copied : bytes_in)});
    }
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
                               Op::quantity == Quantity::logsumexp ? 0 : sizeof(Out),                   \
                               &run<Op, Exec, In, Out>});
  KOKKOSSOFTMAX_FOR_EACH_SCALAR_PAIR(KOKKOSSOFTMAX_COMPARE_ADD)
#undef KOKKOSSOFTMAX_COMPARE_ADD
}

template <class Op>
Operation make_operation() {
  Operation operation;
  operation.name = Op::name;
  operation.description = Op::description;
#define KOKKOSSOFTMAX_COMPARE_ADD(Exec) add_kernels<Op, Exec>(operation);
  KOKKOSSOFTMAX_FOR_EACH_BACKEND(KOKKOSSOFTMAX_COMPARE_ADD)
#undef KOKKOSSOFTMAX_COMPARE_ADD
  operation.implementations = [](const std::string& backend) {
    std::vector<std::string> names;
#define KOKKOSSOFTMAX_COMPARE_ADD(Exec) \
  if (backend == Exec::name()) names = ks::implementations<Exec>(Op::name);
    KOKKOSSOFTMAX_FOR_EACH_BACKEND(KOKKOSSOFTMAX_COMPARE_ADD)
#undef KOKKOSSOFTMAX_COMPARE_ADD
    return names;
  };
  return operation;
}

}  // namespace

std::vector<Operation> softmax_operations() {
  return {make_operation<Softmax>(), make_operation<LogSoftmax>(), make_operation<LogSumExp>()};
}

std::vector<Backend> all_backends() {
  std::vector<Backend> backends;
#define KOKKOSSOFTMAX_COMPARE_ADD(Exec)                                                                  \
  backends.push_back({Exec::name(), is_host_backend<Exec>, Exec().concurrency(), Runner<Exec>::device(), \
                      &Runner<Exec>::free_bytes});
  KOKKOSSOFTMAX_FOR_EACH_BACKEND(KOKKOSSOFTMAX_COMPARE_ADD)
#undef KOKKOSSOFTMAX_COMPARE_ADD
  return backends;
}

}  // namespace compare
