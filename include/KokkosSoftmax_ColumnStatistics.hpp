// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Mean and variance of each column of a matrix: the step of a BatchNorm with batch statistics that needs
/// whole columns.

#ifndef KOKKOSSOFTMAX_COLUMNSTATISTICS_HPP
#define KOKKOSSOFTMAX_COLUMNSTATISTICS_HPP

#include <KokkosSoftmax_Transforms.hpp>
#include <impl/KokkosSoftmax_RunColumnStatistics.hpp>

#include <Kokkos_Profiling_ScopedRegion.hpp>

namespace KokkosSoftmax {
namespace impl {

struct ColumnStatisticsScratch;

template <class TM, class TV>
struct StoreMoments {
  TM* mean;
  TV* variance;
  index_type mean_stride, variance_stride;
  double rows;

  KOKKOS_FORCEINLINE_FUNCTION void operator()(index_type column, SplitMean column_mean,
                                              double squares) const {
    mean[column * mean_stride] = store_as<TM>(column_mean.value);
    variance[column * variance_stride] = store_as<TV>(squares / rows);
  }
};

/// Checks a call and hands (problem, sink) to `use`; an empty call ends here.
template <class Exec, class X, class M, class V, class T, class Use>
void with_columns(const char* function, const Exec& exec, const X& x, const M& mean, const V& variance,
                  const T& transform, Use&& use) {
  using In = typename X::non_const_value_type;
  using TM = typename M::non_const_value_type;
  using TV = typename V::non_const_value_type;
  static_assert(is_scalar_v<In> && is_scalar_v<TM> && is_scalar_v<TV>,
                "KokkosSoftmax::column_statistics: the scalars are float, double, KokkosSoftmax::half_t or "
                "KokkosSoftmax::bhalf_t");
  static_assert(!std::is_const_v<typename M::value_type> && !std::is_const_v<typename V::value_type>,
                "KokkosSoftmax::column_statistics: mean and variance are written");
  static_assert(view_reachable_from<Exec, X> && view_reachable_from<Exec, M> && view_reachable_from<Exec, V>,
                "KokkosSoftmax::column_statistics: the execution space cannot access the memory of a view");
  const Block x_block = block_of(x), mean_block = block_of(mean), variance_block = block_of(variance);
  const CallContext call = CallContext::of(function, exec, mean_block);
  if (x_block.rank != 2) call.fail("x of extents " + x_block.extents_text() + " is not a matrix");
  const LogitShape shape = LogitShape::of(call, x_block, Axis{1});
  for (const auto& [name, block] : {std::pair{"mean", mean_block}, std::pair{"variance", variance_block}}) {
    if (block.rank != 1 || block.extent[0] != shape.columns) {
      call.fail(std::string(name) + " of extents " + block.extents_text() +
                " does not have one value for each of the " + std::to_string(shape.columns) +
                " columns of x of extents " + x_block.extents_text());
    }
  }
  const auto bound = as_transform(transform).bind(BindContext<Exec>{call, shape, exec});
  if (x_block.empty()) return;
  call.check_output("mean");
  call.check_input("x", x_block, false);
  call.check_operand("variance", variance_block);
  const CallContext other = CallContext::of(function, exec, variance_block);
  other.check_output("variance");
  other.check_input("x", x_block, false);
  (void)as_transform(transform).bind(BindContext<Exec>{other, shape, exec});
  use(
      ColumnsProblem<In, accumulator_t<In>, std::remove_const_t<decltype(bound)>>{
          x.data(), shape.rows, shape.columns, x_block.stride[0], x_block.stride[1], bound},
      StoreMoments<TM, TV>{mean.data(), variance.data(), mean_block.stride[0], variance_block.stride[0],
                           static_cast<double>(shape.rows)});
}

}  // namespace impl

/// Mean and biased variance (divided by the number of rows) of each column of transform(x), x a matrix.
///
/// Accumulated in double from differences, never from a difference of large squares, so an offset that all
/// values of a column share costs nothing. NaN, infinity and masked logits (-inf) make their column NaN. The
/// same extents give the same bits. Asynchronous on `exec`; nothing is allocated once warm. An empty matrix
/// is a no-op.
///
/// \param x                  rows x columns, any layout
/// \param mean, variance     one value a column, written
/// \param transform          applied to the values first, as in softmax()
/// \throws std::invalid_argument  x not a matrix, lengths that do not fit, operands that overlap; nothing is
///         launched then.
template <class Exec, impl::view_of_operand X, impl::view_of_operand M, impl::view_of_operand V,
          class T = impl::Identity>
requires Kokkos::is_execution_space_v<Exec>
void column_statistics(const Exec& exec, const X& x, const M& mean, const V& variance,
                       const T& transform = {}) {
  impl::with_columns(
      "column_statistics", exec, x, mean, variance, transform, [&](const auto& problem, const auto& sink) {
        const Kokkos::Profiling::ScopedRegion region("KokkosSoftmax::column_statistics");
        using Pool = impl::ScratchPool<typename Exec::memory_space, impl::ColumnStatisticsScratch>;
        void* partials = Pool::get(exec, impl::column_statistics_bytes<Exec>(problem.rows, problem.columns));
        impl::run_column_statistics(exec, "KokkosSoftmax::column_statistics", problem,
                                    static_cast<impl::Moments*>(partials), sink);
      });
}

/// Makes the scratch of such a call, as reserve() does for softmax.
template <class Exec, impl::view_of_operand X, impl::view_of_operand M, impl::view_of_operand V,
          class T = impl::Identity>
requires Kokkos::is_execution_space_v<Exec>
void reserve_column_statistics(const Exec& exec, const X& x, const M& mean, const V& variance,
                               const T& transform = {}) {
  impl::with_columns(
      "reserve_column_statistics", exec, x, mean, variance, transform, [&](const auto& problem, const auto&) {
        using Pool = impl::ScratchPool<typename Exec::memory_space, impl::ColumnStatisticsScratch>;
        Pool::reserve(exec, impl::column_statistics_bytes<Exec>(problem.rows, problem.columns));
      });
}

}  // namespace KokkosSoftmax

#endif
