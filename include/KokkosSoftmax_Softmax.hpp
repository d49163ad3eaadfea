// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// softmax, log_softmax, logsumexp over Kokkos Views of any rank, layout and scalar, along any axis, with
/// logit transforms fused in.

#ifndef KOKKOSSOFTMAX_SOFTMAX_HPP
#define KOKKOSSOFTMAX_SOFTMAX_HPP

#include <KokkosSoftmax_Transforms.hpp>
#include <KokkosSoftmax_config.hpp>
#include <impl/KokkosSoftmax_SoftmaxCandidates.hpp>

#include <Kokkos_Profiling_ScopedRegion.hpp>

#include <string>
#include <vector>

namespace KokkosSoftmax {
namespace impl {

// The kernels without a transform, and on the host those for any transform, are in the library (src/): no
// user's file has to compile them.
#ifndef KOKKOSSOFTMAX_INSTANTIATE_BACKEND
#define KOKKOSSOFTMAX_EXTERN(EXEC, IN, OUT)                                                                \
  extern template void run_rows(const EXEC&, const RowsProblem<IN, OUT, BoundIdentity>&, const char*);     \
  extern template void reserve_rows(const EXEC&, const RowsProblem<IN, OUT, BoundIdentity>&, const char*); \
  KOKKOSSOFTMAX_TRANSFORMED_ROWS(extern template, EXEC, IN, OUT)
#define KOKKOSSOFTMAX_EXTERN_PAIR(IN, OUT) KOKKOSSOFTMAX_FOR_EACH_BACKEND(KOKKOSSOFTMAX_EXTERN, IN, OUT)
KOKKOSSOFTMAX_FOR_EACH_SCALAR_PAIR(KOKKOSSOFTMAX_EXTERN_PAIR)
#undef KOKKOSSOFTMAX_EXTERN_PAIR
#undef KOKKOSSOFTMAX_EXTERN
#endif

// What a call needs of its operands, in words; see the static_asserts in check_types for the sentences.
template <class X>
concept view_with_extents_and_strides = view_of_operand<X>;

template <class X>
concept view_of_supported_scalar = is_scalar_v<std::remove_cv_t<typename X::value_type>>;

template <class Y>
concept view_that_is_written = !std::is_const_v<typename Y::value_type>;

template <class Exec, class X>
concept execution_space_reaches_memory_of = view_reachable_from<Exec, X>;

template <class X>
inline constexpr int static_rank_v = -1;  // DynRankView: known at run time
template <class X>
requires Kokkos::is_view_v<X>
inline constexpr int static_rank_v<X> = static_cast<int>(X::rank());

template <class T>
using transform_of = decltype(as_transform(std::declval<const T&>()));

template <class Exec, class X, class Y, class T, bool drops_axis, bool keeps_axis>
constexpr void check_types() {
  static_assert(Kokkos::is_execution_space_v<Exec>,
                "KokkosSoftmax: the first argument is not a Kokkos execution space instance");
  static_assert(view_with_extents_and_strides<X>, "KokkosSoftmax: x is not a Kokkos::View or DynRankView");
  static_assert(view_with_extents_and_strides<Y>,
                "KokkosSoftmax: the output is not a Kokkos::View or DynRankView");
  static_assert(
      view_of_supported_scalar<X>,
      "KokkosSoftmax: the scalar of x is not float, double, KokkosSoftmax::half_t or KokkosSoftmax::bhalf_t");
  static_assert(view_of_supported_scalar<Y>,
                "KokkosSoftmax: the scalar of the output is not float, double, KokkosSoftmax::half_t or "
                "KokkosSoftmax::bhalf_t");
  static_assert(view_that_is_written<Y>, "KokkosSoftmax: the output is a view of const values");
  static_assert(execution_space_reaches_memory_of<Exec, X>,
                "KokkosSoftmax: the execution space cannot access the memory of x");
  static_assert(execution_space_reaches_memory_of<Exec, Y>,
                "KokkosSoftmax: the execution space cannot access the memory of the output");
  static_assert(
      logit_transform<T>,
      "KokkosSoftmax: the transform is not callable as value' = f(value, row, column) on a const object");
  if constexpr (logit_transform<T>) {
    static_assert(transform_of<T>::template reachable_from<Exec>,
                  "KokkosSoftmax: the execution space cannot access the memory of a view in the transform");
  }
  constexpr int x = static_rank_v<X>, y = static_rank_v<Y>;
  static_assert(x != 0, "KokkosSoftmax: x has rank 0; a softmax needs at least one dimension");
  static_assert(
      x < 0 || y < 0 || (keeps_axis && x == y) || (drops_axis && x == y + 1),
      "KokkosSoftmax: the rank of the output does not fit: softmax and log_softmax write the rank of x, "
      "logsumexp one rank less");
}

/// Checks a call and puts it in canonical form, then hands it to `use`; an empty call ends here.
template <class Exec, class X, class Y, class T, class Use>
void with_problem(Operation operation, const char* function, const Exec& exec, const X& x, const Y& y,
                  Axis axis, const T& transform, Use&& use) {
  using In = typename X::non_const_value_type;
  using Out = typename Y::non_const_value_type;
  const Block x_block = block_of(x), y_block = block_of(y);
  const CallContext call = CallContext::of(function, exec, y_block);
  const LogitShape shape = LogitShape::of(call, x_block, axis);
  const bool drops_axis = operation == Operation::logsumexp;
  const std::string y_name = drops_axis ? "lse" : "y";
  bool fits = y_block.rank == shape.rank - (drops_axis ? 1 : 0);
  for (int d = 0, e = 0; fits && d < shape.rank; ++d) {
    if (drops_axis && d == shape.axis) continue;
    fits = y_block.extent[e++] == shape.extent[d];
  }
  if (!fits) {
    call.fail(y_name + " of extents " + y_block.extents_text() + " does not fit x of extents " +
              shape.text() + (drops_axis ? " without axis " + std::to_string(shape.axis) : std::string()));
  }
  auto bound = transform.bind(BindContext<Exec>{call, shape, exec});
  if (x_block.empty()) return;
  call.check_output(y_name);
  call.check_input("x", x_block, !drops_axis);
  use(RowsProblem<In, Out, decltype(bound)>{x.data(), y.data(), operation, axis_is_strided(shape, x_block),
                                            RowGeometry::of(shape, x_block, y_block), bound});
}

template <Operation operation, class Exec, class X, class Y, class T>
void call_rows(const Exec& exec, const X& x, const Y& y, Axis axis, const T& transform) {
  check_types<Exec, X, Y, T, operation == Operation::logsumexp, operation != Operation::logsumexp>();
  const auto library_transform = as_transform(transform);
  const char* function = operation_name(operation);
  with_problem(operation, function, exec, x, y, axis, library_transform, [&](const auto& problem) {
    const Kokkos::Profiling::ScopedRegion region(std::string("KokkosSoftmax::") + function);
    run_rows(exec, problem, function);
  });
}

}  // namespace impl

/// y = softmax of x along an axis: y_i = exp(t(x_i) - max) / sum_j exp(t(x_j) - max).
///
/// Asynchronous on `exec`: nothing fences, nothing is allocated once warm (see reserve()), and the call can
/// be captured in a CUDA graph.
///
/// \param exec       an execution space instance
/// \param x          logits: a View of rank 1 to 8 or a DynRankView, of any layout
/// \param y          output of the extents of x, of any layout and scalar; may be x itself (in place: same
/// pointer,
///                   strides and scalar size); elements between strides stay untouched
/// \param axis       the dimension to normalise over; negative counts from the end (default: the last)
/// \param transform  a logit transform (KokkosSoftmax_Transforms.hpp) or a functor value' = f(value, row,
/// column)
///
/// Sums are formed in float, or in double where x or y is double. -inf is a masked logit and gives 0; a row
/// of nothing but -inf gives 0 everywhere; NaN or +inf in a row gives a row of NaN. The same row gives the
/// same bits in any batch.
///
/// \throws std::invalid_argument  extents of y other than those of x, axis out of range, y that overlaps x
/// without
///         being it or that overlaps an operand of the transform, memory that `exec` cannot reach, operands
///         of a transform that do not fit; nothing is launched then and y is unchanged.
template <class Exec, class X, class Y, class T = impl::Identity>
requires Kokkos::is_execution_space_v<Exec>
void softmax(const Exec& exec, const X& x, const Y& y, Axis axis, const T& transform = {}) {
  impl::call_rows<impl::Operation::softmax>(exec, x, y, axis, transform);
}

/// Along the last axis.
template <class Exec, class X, class Y, class T = impl::Identity>
requires(Kokkos::is_execution_space_v<Exec> &&
         !std::is_same_v<T, Axis>) void softmax(const Exec& exec, const X& x, const Y& y,
                                                const T& transform = {}) {
  impl::call_rows<impl::Operation::softmax>(exec, x, y, Axis{-1}, transform);
}

/// On the default instance of the execution space of x, and waits for it.
template <class X, class Y, class... Options>
requires(!Kokkos::is_execution_space_v<X> &&
         sizeof...(Options) <= 2) void softmax(const X& x, const Y& y, const Options&... options) {
  const typename X::execution_space exec{};
  softmax(exec, x, y, options...);
  exec.fence("KokkosSoftmax::softmax: the form without an instance is synchronous");
}

/// y = log_softmax of x along an axis: y_i = t(x_i) - max - log(sum_j exp(t(x_j) - max)). As softmax(), with
/// -inf for a masked logit and in a row of nothing but -inf.
template <class Exec, class X, class Y, class T = impl::Identity>
requires Kokkos::is_execution_space_v<Exec>
void log_softmax(const Exec& exec, const X& x, const Y& y, Axis axis, const T& transform = {}) {
  impl::call_rows<impl::Operation::log_softmax>(exec, x, y, axis, transform);
}

/// Along the last axis.
template <class Exec, class X, class Y, class T = impl::Identity>
requires(Kokkos::is_execution_space_v<Exec> &&
         !std::is_same_v<T, Axis>) void log_softmax(const Exec& exec, const X& x, const Y& y,
                                                    const T& transform = {}) {
  impl::call_rows<impl::Operation::log_softmax>(exec, x, y, Axis{-1}, transform);
}

/// On the default instance of the execution space of x, and waits for it.
template <class X, class Y, class... Options>
requires(!Kokkos::is_execution_space_v<X> &&
         sizeof...(Options) <= 2) void log_softmax(const X& x, const Y& y, const Options&... options) {
  const typename X::execution_space exec{};
  log_softmax(exec, x, y, options...);
  exec.fence("KokkosSoftmax::log_softmax: the form without an instance is synchronous");
}

/// lse = logsumexp of x along an axis: max + log(sum_j exp(t(x_j) - max)). `lse` has the extents of x without
/// the axis (rank 0 for x of rank 1) and must not overlap x. A row of nothing but -inf gives -inf; a row with
/// NaN gives NaN, else one with +inf gives +inf. Everything else as softmax().
template <class Exec, class X, class Y, class T = impl::Identity>
requires Kokkos::is_execution_space_v<Exec>
void logsumexp(const Exec& exec, const X& x, const Y& lse, Axis axis, const T& transform = {}) {
  impl::call_rows<impl::Operation::logsumexp>(exec, x, lse, axis, transform);
}

/// Along the last axis.
template <class Exec, class X, class Y, class T = impl::Identity>
requires(Kokkos::is_execution_space_v<Exec> &&
         !std::is_same_v<T, Axis>) void logsumexp(const Exec& exec, const X& x, const Y& lse,
                                                  const T& transform = {}) {
  impl::call_rows<impl::Operation::logsumexp>(exec, x, lse, Axis{-1}, transform);
}

/// On the default instance of the execution space of x, and waits for it.
template <class X, class Y, class... Options>
requires(!Kokkos::is_execution_space_v<X> &&
         sizeof...(Options) <= 2) void logsumexp(const X& x, const Y& lse, const Options&... options) {
  const typename X::execution_space exec{};
  logsumexp(exec, x, lse, options...);
  exec.fence("KokkosSoftmax::logsumexp: the form without an instance is synchronous");
}

/// Makes whatever softmax, log_softmax or logsumexp on these operands needs the first time: scratch memory,
/// and what the backend does at the first launch of a kernel. After it such a call, on this instance and host
/// thread, with these extents or smaller ones, allocates nothing and can be captured in a graph; the memory
/// stays with the instance until Kokkos::finalize. A captured call keeps the memory that it took for the life
/// of its graph: reserve again before the next capture. `y` has the rank of x, or one less for logsumexp. May
/// fence. Throws what the call itself would throw.
template <class Exec, class X, class Y, class T = impl::Identity>
requires Kokkos::is_execution_space_v<Exec>
void reserve(const Exec& exec, const X& x, const Y& y, Axis axis, const T& transform = {}) {
  impl::check_types<Exec, X, Y, T, true, true>();
  const bool drops_axis = static_cast<int>(y.rank()) < static_cast<int>(x.rank());
  impl::with_problem(drops_axis ? impl::Operation::logsumexp : impl::Operation::softmax, "reserve", exec, x,
                     y, axis, impl::as_transform(transform), [&](const auto& problem) {
                       impl::reserve_rows(exec, problem, impl::operation_name(problem.operation));
                     });
}

/// Along the last axis.
template <class Exec, class X, class Y, class T = impl::Identity>
requires(Kokkos::is_execution_space_v<Exec> && !std::is_same_v<T, Axis> &&
         !impl::view_of_operand<T>) void reserve(const Exec& exec, const X& x, const Y& y,
                                                 const T& transform = {}) {
  reserve(exec, x, y, Axis{-1}, transform);
}

/// The implementations of "softmax", "log_softmax" or "logsumexp" on a backend, in the order in which they
/// are tried. \throws std::invalid_argument  any other name.
template <class Exec>
std::vector<std::string> implementations(std::string_view operation) {
  using impl::Operation;
  for (const Operation known : {Operation::softmax, Operation::log_softmax, Operation::logsumexp}) {
    if (operation == impl::operation_name(known)) {
      return impl::SoftmaxCandidates::names<Exec, impl::RowsProblem<float, float, impl::BoundIdentity>,
                                            impl::RowsProblem<half_t, half_t, impl::BoundIdentity>>(
          [&](const auto& implementation) {
            if constexpr (requires { implementation.only_for; }) return implementation.only_for == known;
            return true;
          });
    }
  }
  impl::bad_argument("implementations", "there is no operation '" + std::string(operation) + "'");
}

}  // namespace KokkosSoftmax

#endif
