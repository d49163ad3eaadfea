// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#ifndef KOKKOSSOFTMAX_COMPAREROWS_HPP
#define KOKKOSSOFTMAX_COMPAREROWS_HPP

// How softmax, log_softmax and logsumexp are measured and checked, with a transform of the logits or without.

#include <cstdio>

#include "KokkosSoftmax_CompareMeasure.hpp"

namespace compare {

namespace ks = KokkosSoftmax;

struct Softmax {
  static constexpr const char* name = "softmax";
  static constexpr const char* description = "y = exp(x - max) / sum exp(x - max), along the axis";
  static constexpr Quantity quantity = Quantity::softmax;
  template <class Exec, class X, class Y, class T>
  static void call(const Exec& exec, const X& x, const Y& y, int axis, const T& transform) {
    ks::softmax(exec, x, y, ks::axis(axis), transform);
  }
};

struct LogSoftmax {
  static constexpr const char* name = "log_softmax";
  static constexpr const char* description = "y = x - max - log sum exp(x - max), along the axis";
  static constexpr Quantity quantity = Quantity::log_softmax;
  template <class Exec, class X, class Y, class T>
  static void call(const Exec& exec, const X& x, const Y& y, int axis, const T& transform) {
    ks::log_softmax(exec, x, y, ks::axis(axis), transform);
  }
};

struct LogSumExp {
  static constexpr const char* name = "logsumexp";
  static constexpr const char* description = "y = max + log sum exp(x - max), one value a row";
  static constexpr Quantity quantity = Quantity::logsumexp;
  template <class Exec, class X, class Y, class T>
  static void call(const Exec& exec, const X& x, const Y& y, int axis, const T& transform) {
    ks::logsumexp(exec, x, y, ks::axis(axis), transform);
  }
};

// What a case reads and writes. A mask or a bias has a value for each logit or, where the transform says so,
// for each column.
template <class Exec, class In, class Out>
struct Arrays {
  Block<In, Exec> x;
  Block<Out, Exec> y;
  Block<bool, Exec> mask;
  Block<In, Exec> bias;
  Block<ks::accumulator_t<In, Out>, Exec> temperature;
};

template <class Exec, class In, class Out>
using CallOf = std::function<void()> (*)(const Exec&, const Arrays<Exec, In, Out>&, const Case&);

// The view's extents as rows to normalise and their length.
struct Rows {
  explicit Rows(const Case& what)
      : rows(what.axis == 1 ? what.rows : what.columns), columns(what.axis == 1 ? what.columns : what.rows) {
    const bool contiguous = (what.axis == 1) == (what.layout == "right");
    row_stride = contiguous ? columns : 1;
    column_stride = contiguous ? 1 : rows;
  }
  std::int64_t rows, columns, row_stride, column_stride;
};

// The operands of a transform as views with the layout of the logits'.
template <class Layout, class Exec, class In, class Out>
struct OperandViews {
  using Memory = typename Exec::memory_space;
  OperandViews(const Arrays<Exec, In, Out>& arrays, const Case& what)
      : mask(arrays.mask.data(), what.rows, what.columns),
        bias(arrays.bias.data(), what.rows, what.columns),
        mask_row(arrays.mask),
        bias_row(arrays.bias),
        temperature(arrays.temperature) {}
  Kokkos::View<const bool**, Layout, Memory> mask;
  Kokkos::View<const In**, Layout, Memory> bias;
  Kokkos::View<const bool*, Memory> mask_row;
  Kokkos::View<const In*, Memory> bias_row;
  Kokkos::View<const ks::accumulator_t<In, Out>*, Memory> temperature;
};

// A transform is made by T::of from its OperandViews.
template <class Op, class T, class Layout, class Exec, class In, class Out>
std::function<void()> call_in_layout(const Exec& exec, const Arrays<Exec, In, Out>& arrays,
                                     const Case& what) {
  using Memory = typename Exec::memory_space;
  const auto rows = static_cast<std::size_t>(what.rows), columns = static_cast<std::size_t>(what.columns);
  const Kokkos::View<const In**, Layout, Memory> x(arrays.x.data(), rows, columns);
  const auto transform = T::of(OperandViews<Layout, Exec, In, Out>(arrays, what));
  if constexpr (Op::quantity == Quantity::logsumexp) {
    const Kokkos::View<Out*, Layout, Memory> y(arrays.y.data(), arrays.y.size());
    return [=, axis = what.axis] { Op::call(exec, x, y, axis, transform); };
  } else {
    const Kokkos::View<Out**, Layout, Memory> y(arrays.y.data(), rows, columns);
    return [=, axis = what.axis] { Op::call(exec, x, y, axis, transform); };
  }
}

template <class Op, class T, class Exec, class In, class Out>
std::function<void()> call_of(const Exec& exec, const Arrays<Exec, In, Out>& arrays, const Case& what) {
  return what.layout == "right" ? call_in_layout<Op, T, Kokkos::LayoutRight>(exec, arrays, what)
                                : call_in_layout<Op, T, Kokkos::LayoutLeft>(exec, arrays, what);
}

// The bytes of a case; in double, since an absurd shape overflows 64 bits.
struct Traffic {
  double allocated;  // by x, y and operands
  double moved;      // at least: once each but for what a causal mask drops at the ends of rows
  double yardstick;  // read by the yardstick, and by a copy written too
  bool yardstick_has_room;
};

template <class In, class Out>
Traffic traffic_of(const Case& what, const Transform& transform, bool writes_rows) {
  const Rows of(what);
  const auto rows = static_cast<double>(of.rows), columns = static_cast<double>(of.columns);
  const double input = rows * columns * sizeof(In);
  const double output = rows * (writes_rows ? columns : 1.0) * sizeof(Out);
  const auto operand = static_cast<double>(transform.operand_bytes(sizeof(In)));
  double operands = (transform.one_row ? columns : rows * columns) * operand;
  if (transform.has("temperature")) operands += rows * sizeof(ks::accumulator_t<In, Out>);
  const double dropped =
      transform.dropped_at_ends(of.rows, of.columns) * (sizeof(In) + (transform.one_row ? 0 : operand));
  Traffic traffic;
  traffic.allocated = input + output + operands;
  traffic.moved = traffic.allocated - dropped;
  // Without a transform the input into the output, and as much as both hold.
  const double room = writes_rows ? std::min(input, output) : input;
  traffic.yardstick = transform.steps.empty() ? room
                      : writes_rows           ? std::floor(traffic.moved / 2)
                                              : traffic.moved - output;
  traffic.yardstick_has_room = traffic.yardstick <= room;
  return traffic;
}

template <class Exec, class In, class Out>
Arrays<Exec, In, Out> make_arrays(const Exec& exec, const Rows& of, const Transform& transform,
                                  bool writes_rows, double range) {
  const std::int64_t size = of.rows * of.columns;
  const std::int64_t operand = transform.one_row ? of.columns : size;
  Arrays<Exec, In, Out> arrays;
  arrays.x = random_block<In>(exec, size, {range});
  arrays.y = Block<Out, Exec>(Kokkos::view_alloc(exec, "compare::output", Kokkos::WithoutInitializing),
                              static_cast<std::size_t>(writes_rows ? size : of.rows));
  // Each has numbers that the others have not. Three in ten are dropped, and a temperature is 0.5 to 1.5.
  if (transform.has("mask")) arrays.mask = random_block<bool>(exec, operand, {0.5, 0.2, size});
  if (transform.has("bias")) arrays.bias = random_block<In>(exec, operand, {1, 0, 2 * size});
  if (transform.has("temperature")) {
    using Acc = ks::accumulator_t<In, Out>;
    arrays.temperature = random_block<Acc>(exec, of.rows, {0.5, 1, 3 * size});
  }
  return arrays;
}

// An operand of the chosen rows, as check_rows takes it.
template <class T, class Exec>
std::vector<double> gather_operand(const Exec& exec, const Block<T, Exec>& operand, const Rows& of,
                                   const Transform& transform, const std::vector<std::int64_t>& chosen) {
  if (operand.size() == 0) return {};
  if (transform.one_row) return gather<T>(exec, operand, {0}, 0, of.columns, 1);
  return gather<T>(exec, operand, chosen, of.row_stride, of.columns, of.column_stride);
}

template <class Exec, class In, class Out>
Accuracy check_rows(const Exec& exec, const Arrays<Exec, In, Out>& arrays, const Case& what,
                    const Transform& transform, Quantity quantity, std::int64_t elements) {
  const Rows of(what);
  const bool writes_rows = quantity != Quantity::logsumexp;
  const std::vector<std::int64_t> chosen = rows_to_check(of.rows, of.columns, elements);
  std::vector<double> logits =
      gather<In>(exec, arrays.x, chosen, of.row_stride, of.columns, of.column_stride);
  const std::vector<double> values =
      writes_rows ? gather<Out>(exec, arrays.y, chosen, of.row_stride, of.columns, of.column_stride)
                  : gather<Out>(exec, arrays.y, chosen, 1, 1, 1);
  const std::vector<double> mask = gather_operand(exec, arrays.mask, of, transform, chosen);
  const std::vector<double> bias = gather_operand(exec, arrays.bias, of, transform, chosen);
  std::vector<double> temperature;
  if (arrays.temperature.size() > 0) {
    temperature = gather<ks::accumulator_t<In, Out>>(exec, arrays.temperature, chosen, 1, 1, 1);
  }
  Accuracy accuracy;
  std::vector<double> error;
  for (std::size_t r = 0; r < chosen.size(); ++r) {
    const std::size_t begin = r * static_cast<std::size_t>(of.columns);
    const std::size_t operand = transform.one_row ? 0 : begin;
    TransformOperands operands;
    if (!mask.empty()) operands.mask = mask.data() + operand;
    if (!bias.empty()) operands.bias = bias.data() + operand;
    if (!temperature.empty()) operands.temperature = temperature[r];
    operands.query = chosen[r];
    double* const row = logits.data() + begin;
    transform_row(transform, operands, what.scalar_in, what.scalar_out, row, of.columns, error);
    check_row(quantity, row, error, of.columns, values.data() + (writes_rows ? begin : r), what.scalar_in,
              what.scalar_out, accuracy);
  }
  accuracy.unwritten = count_nan<Out>(exec, arrays.y);
  return accuracy;
}

template <class Exec, class In, class Out>
std::vector<Action> yardsticks_of(const Runner<Exec>& runner, const Arrays<Exec, In, Out>& arrays,
                                  const Traffic& traffic, bool writes_rows) {
  const auto bytes = static_cast<std::int64_t>(traffic.yardstick);
  if (traffic.yardstick_has_room) {
    return writes_rows ? copy_yardsticks(runner, arrays.y.data(), arrays.x.data(), bytes)
                       : read_yardsticks(runner, arrays.x.data(), bytes);
  }
  const Exec& exec = runner.exec();
  const auto from = random_block<float>(exec, bytes / 4 + 1, {1});
  const auto to = writes_rows ? random_block<float>(exec, bytes / 4 + 1, {1}) : Block<float, Exec>();
  std::vector<Action> actions = writes_rows ? copy_yardsticks(runner, to.data(), from.data(), bytes)
                                            : read_yardsticks(runner, from.data(), bytes);
  for (Action& action : actions) {
    action.invoke = [from, to, invoke = action.invoke] { invoke(); };  // owns what it moves
  }
  return actions;
}

// One function for all operations and transforms of a backend and a pair of scalars, for the compiler's sake.
template <class Exec, class In, class Out>
Result run_rows(const Case& what, const Options& options, Quantity quantity, CallOf<Exec, In, Out> call) {
  const bool writes_rows = quantity != Quantity::logsumexp;
  const Rows of(what);
  const Transform transform(what.transform);
  const Traffic traffic = traffic_of<In, Out>(what, transform, writes_rows);
  Result result;
  result.what = what;
  result.bytes = traffic.moved;
  const double own = traffic.yardstick_has_room ? 0 : (writes_rows ? 2 : 1) * traffic.yardstick;
  const double needed = traffic.allocated + own, available = static_cast<double>(Runner<Exec>::free_bytes());
  if (needed > available) {
    char text[120];
    std::snprintf(text, sizeof text, "needs %.3g GiB of memory, %.3g GiB are available", needed / (1 << 30),
                  available / (1 << 30));
    result.failure = text;
    return result;
  }

  with_failure_in(result, [&] {
    const ks::ScopedImplementation force(what.implementation.empty() ? std::string()
                                                                     : what.operation + "@" + what.backend +
                                                                           "=" + what.implementation);
    const bool in_graph = options.graph && Runner<Exec>::has_graphs;
    Runner<Exec> runner(in_graph);
    const Exec& exec = runner.exec();
    const Arrays<Exec, In, Out> arrays =
        make_arrays<Exec, In, Out>(exec, of, transform, writes_rows, options.range);
    poison<Out>(exec, arrays.y);

    Action action{what.operation, call(exec, arrays, what)};
    action.invoke();  // makes what later calls use
    result.implementation = ks::last_implementation();
    exec.fence("compare::first call");
    if (in_graph) action = runner.in_graph(action);

    // What is timed is what is checked.
    poison<Out>(exec, arrays.y);
    action.invoke();
    result.accuracy = check_rows(exec, arrays, what, transform, quantity, options.check_elements);

    // The yardsticks may overwrite the output now.
    std::vector<Action> actions = yardsticks_of(runner, arrays, traffic, writes_rows);
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
      result.yardsticks.push_back({actions[a].name, timings[a], (writes_rows ? 2 : 1) * traffic.yardstick});
    }
  });
  return result;
}

template <class Op, class T, class Exec, class In, class Out>
Kernel rows_kernel() {
  constexpr bool writes_rows = Op::quantity != Quantity::logsumexp;
  return {Exec::name(),
          ks::scalar_name<In>(),
          ks::scalar_name<Out>(),
          sizeof(In),
          writes_rows ? sizeof(Out) : 0,
          [](const Case& what, const Options& options) {
            return run_rows<Exec, In, Out>(what, options, Op::quantity, &call_of<Op, T, Exec, In, Out>);
          },
          T::name};
}

}  // namespace compare

#endif
