// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Classification heads: the softmax of a linear layer's output, with a transform between them, as one call.
/// Needs Kokkos Kernels.

#ifndef KOKKOSSOFTMAX_LINEAR_HPP
#define KOKKOSSOFTMAX_LINEAR_HPP

#include <KokkosSoftmax_Softmax.hpp>
#include <impl/KokkosSoftmax_LinearCandidates.hpp>

namespace KokkosSoftmax {
namespace impl {

// ---------------------------------------------------------------------------------------------------------------------
// Batch statistics in a chain: before | batch_norm_training(...) | after. Not a logit transform, because it
// looks at whole columns: only the heads take such a chain.

struct StatisticsBase {};

template <class T>
concept statistics_step = std::is_base_of_v<StatisticsBase, T>;

/// In place of the running statistics when there are none.
struct NoRunning {};

template <class G, class B, class M, class V>
struct BatchStatistics : StatisticsBase {
  static constexpr bool is_chain = false;
  G gamma;
  B beta;
  double eps;
  M running_mean;
  V running_variance;
  double momentum;
  BatchStatistics(const G& gamma_, const B& beta_, double eps_, const M& mean, const V& variance,
                  double momentum_)
      : gamma(gamma_),
        beta(beta_),
        eps(eps_),
        running_mean(mean),
        running_variance(variance),
        momentum(momentum_) {}
};

template <class Before, class Statistics, class After>
struct StatisticsChain : StatisticsBase {
  static constexpr bool is_chain = true;
  Before before;
  Statistics statistics;
  After after;
  StatisticsChain(const Before& before_, const Statistics& statistics_, const After& after_)
      : before(before_), statistics(statistics_), after(after_) {}
};

template <statistics_step S>
auto as_statistics_chain(const S& s) {
  if constexpr (S::is_chain) {
    return s;
  } else {
    return StatisticsChain<Identity, S, Identity>({}, s, {});
  }
}

template <class A, class B>
auto joined(const A& a, const B& b) {
  if constexpr (std::is_same_v<A, Identity>) {
    return b;
  } else if constexpr (std::is_same_v<B, Identity>) {
    return a;
  } else {
    return a | b;
  }
}

template <class Before, class Statistics, class After>
auto make_statistics_chain(const Before& before, const Statistics& statistics, const After& after) {
  return StatisticsChain<Before, Statistics, After>(before, statistics, after);
}

template <logit_transform T, statistics_step S>
auto operator|(const T& before, const S& statistics) {
  const auto chain = as_statistics_chain(statistics);
  return make_statistics_chain(joined(as_transform(before), chain.before), chain.statistics, chain.after);
}

template <statistics_step S, logit_transform T>
auto operator|(const S& statistics, const T& after) {
  const auto chain = as_statistics_chain(statistics);
  return make_statistics_chain(chain.before, chain.statistics, joined(chain.after, as_transform(after)));
}

template <class T>
concept head_transform = logit_transform<T> || statistics_step<T>;

// ---------------------------------------------------------------------------------------------------------------------
// Checks, and the canonical form.

template <class View>
inline constexpr bool is_matrix_v = static_rank_v<View> == 2 || static_rank_v<View> < 0;

template <class Exec, class T>
constexpr bool head_reachable() {
  if constexpr (statistics_step<T>) {
    using Chain = decltype(as_statistics_chain(std::declval<const T&>()));
    using S = decltype(Chain::statistics);
    bool reachable = decltype(Chain::before)::template reachable_from<Exec> &&
                     decltype(Chain::after)::template reachable_from<Exec> &&
                     view_reachable_from<Exec, decltype(S::gamma)> &&
                     view_reachable_from<Exec, decltype(S::beta)>;
    if constexpr (!std::is_same_v<decltype(S::running_mean), NoRunning>) {
      reachable = reachable && view_reachable_from<Exec, decltype(S::running_mean)> &&
                  view_reachable_from<Exec, decltype(S::running_variance)>;
    }
    return reachable;
  } else {
    return transform_of<T>::template reachable_from<Exec>;
  }
}

template <class Exec, class X, class W, class Y, class T>
constexpr void check_linear_types() {
  static_assert(is_matrix_v<X> && is_matrix_v<W> && is_matrix_v<Y>,
                "KokkosSoftmax: X, W and Y of a head are matrices (rank 2)");
  static_assert(view_of_supported_scalar<X> && view_of_supported_scalar<W> && view_of_supported_scalar<Y>,
                "KokkosSoftmax: the scalars of X, W and Y are float, double, KokkosSoftmax::half_t or "
                "KokkosSoftmax::bhalf_t");
  static_assert(view_that_is_written<Y>, "KokkosSoftmax: the output Y is a view of const values");
  static_assert(execution_space_reaches_memory_of<Exec, X> && execution_space_reaches_memory_of<Exec, W> &&
                    execution_space_reaches_memory_of<Exec, Y>,
                "KokkosSoftmax: the execution space cannot access the memory of X, W or Y");
  static_assert(head_reachable<Exec, T>(),
                "KokkosSoftmax: the execution space cannot access the memory of a view in the transform");
}

/// What the logits are bound to: their shape, as the transforms see it.
inline LogitShape linear_shape(const CallContext& call, const Block& x, const Block& w, const Block& y) {
  for (const auto& [name, block] : {std::pair{"X", &x}, std::pair{"W", &w}, std::pair{"Y", &y}}) {
    if (block->rank != 2)
      call.fail(std::string(name) + " of extents " + block->extents_text() + " is not a matrix");
  }
  if (x.extent[1] != w.extent[1]) {
    call.fail("X of extents " + x.extents_text() + " and W of extents " + w.extents_text() +
              " differ in their number of columns (K)");
  }
  if (y.extent[0] != x.extent[0] || y.extent[1] != w.extent[0]) {
    call.fail("Y of extents " + y.extents_text() + " does not fit X of extents " + x.extents_text() +
              " and W of extents " + w.extents_text());
  }
  return LogitShape::of(call, y, Axis{1});
}

/// A view that a call writes beside its output: one value a column, apart from everything else.
template <class View, class Exec>
auto bind_running(const char* name, const View& view, const BindContext<Exec>& c,
                  std::initializer_list<std::pair<const char*, Block>> others) {
  if constexpr (std::is_same_v<View, NoRunning>) {
    return ColumnTarget<float>{};
  } else {
    using T = typename View::non_const_value_type;
    (void)ColumnOperand<T>::bind(name, view, c);
    const Block block = block_of(view);
    if (meets_itself(block)) {
      c.call.fail(std::string(name) + " of extents " + block.extents_text() +
                  " writes one element more than once (its strides)");
    }
    for (const auto& [other_name, other] : others) {
      if (may_overlap(block, other)) {
        c.call.fail(std::string(name) + " of extents " + block.extents_text() + " overlaps " + other_name +
                    " of extents " + other.extents_text());
      }
    }
    return ColumnTarget<T>{view.data(), block.stride[0]};
  }
}

template <class View>
Block running_block(const View& view) {
  if constexpr (std::is_same_v<View, NoRunning>) {
    Block none;
    none.rank = 1;  // of no elements: overlaps nothing
    return none;
  } else {
    return block_of(view);
  }
}

/// Binds the head; everything that can be wrong with it is found here.
template <class Exec, class T>
auto bind_head(const BindContext<Exec>& c, const Block& x, const Block& w, const T& head) {
  if constexpr (statistics_step<T>) {
    const auto chain = as_statistics_chain(head);
    const auto& s = chain.statistics;
    if (!(s.eps >= 0)) {
      c.call.fail("eps of batch_norm_training is " + std::to_string(s.eps) + "; it must not be negative");
    }
    if (!(s.momentum >= 0 && s.momentum <= 1)) {
      c.call.fail("momentum of batch_norm_training is " + std::to_string(s.momentum) +
                  "; it must lie between 0 and 1");
    }
    if (c.shape.rows == 1 && c.shape.columns > 0) {
      c.call.fail("batch_norm_training needs more than one row to have a variance; X has extents " +
                  x.extents_text());
    }
    const auto before = chain.before.bind(c);
    using G = typename decltype(s.gamma)::non_const_value_type;
    using B = typename decltype(s.beta)::non_const_value_type;
    const auto gamma = ColumnOperand<G>::bind("gamma", s.gamma, c);
    const auto beta = ColumnOperand<B>::bind("beta", s.beta, c);
    const std::pair<const char*, Block> gamma_block{"gamma", block_of(s.gamma)},
        beta_block{"beta", block_of(s.beta)};
    const auto mean =
        bind_running("running_mean", s.running_mean, c, {{"X", x}, {"W", w}, gamma_block, beta_block});
    const auto variance = bind_running(
        "running_variance", s.running_variance, c,
        {{"X", x}, {"W", w}, gamma_block, beta_block, {"running_mean", running_block(s.running_mean)}});
    const auto after = chain.after.bind(c);
    using M = std::remove_pointer_t<decltype(mean.data)>;
    using V = std::remove_pointer_t<decltype(variance.data)>;
    using Bound = BoundStatistics<G, B, M, V>;
    return StatisticsHead<std::remove_const_t<decltype(before)>, Bound, std::remove_const_t<decltype(after)>>{
        before, Bound{gamma, beta, s.eps, mean, variance, s.momentum}, after};
  } else {
    auto bound = as_transform(head).bind(c);
    return PlainHead<decltype(bound)>{bound};
  }
}

template <class View>
auto matrix_of(const View& view) {
  const Block b = block_of(view);
  return Matrix<typename View::value_type>{view.data(), b.extent[0], b.extent[1], b.stride[0], b.stride[1]};
}

template <class T>
auto as_const(const Matrix<T>& m) {
  return Matrix<const T>{m.data, m.rows, m.columns, m.row_stride, m.column_stride};
}

/// Checks a call and puts it in canonical form, then hands it to `use`; an empty call ends here.
template <class Exec, class X, class WT, class Y, class T, class Use>
void with_linear_problem(Operation operation, const char* function, const Exec& exec, const X& x,
                         const Matrix<const WT>& w, const Block& w_block, const Y& y, const T& head,
                         Precision precision, Use&& use) {
  const Block x_block = block_of(x), y_block = block_of(y);
  const CallContext call = CallContext::of(function, exec, y_block);
  const LogitShape shape = linear_shape(call, x_block, w_block, y_block);
  const auto bound = bind_head(BindContext<Exec>{call, shape, exec}, x_block, w_block, head);
  if (y_block.empty()) return;
  call.check_output("Y");
  call.check_input("X", x_block, false);
  call.check_input("W", w_block, false);
  using Problem = LinearProblem<typename X::non_const_value_type, WT, typename Y::non_const_value_type,
                                std::remove_const_t<decltype(bound)>>;
  const Matrix<const typename X::non_const_value_type> x_matrix = as_const(matrix_of(x));
  use(Problem{x_matrix, w, matrix_of(y), operation, precision, bound});
}

template <class Exec, class X, class W, class Y, class T, class Use>
void with_linear_problem(Operation operation, const char* function, const Exec& exec, const X& x, const W& w,
                         const Y& y, const T& head, Precision precision, Use&& use) {
  check_linear_types<Exec, X, W, Y, T>();
  const Matrix<const typename W::non_const_value_type> w_matrix = as_const(matrix_of(w));
  with_linear_problem(operation, function, exec, x, w_matrix, block_of(w), y, head, precision, use);
}

template <Operation operation, class Exec, class X, class W, class Y, class T>
void call_linear(const Exec& exec, const X& x, const W& w, const Y& y, const T& head, Precision precision) {
  const char* function = operation == Operation::softmax ? "linear_softmax" : "linear_log_softmax";
  with_linear_problem(operation, function, exec, x, w, y, head, precision, [&](const auto& problem) {
    const Kokkos::Profiling::ScopedRegion region(std::string("KokkosSoftmax::") + function);
    LinearCandidates<Exec>::choose(function, exec, problem,
                                   [&](auto implementation) { implementation.run(exec, problem); });
  });
}

}  // namespace impl

/// BatchNorm with the statistics of the batch, a step in the chain of a head:
/// `bias(b) | batch_norm_training(gamma, beta, eps) | scale(s)`. Each column of what stands before it is
/// brought to mean 0 and variance 1 over the rows (biased variance, plus eps), multiplied by gamma and
/// shifted by beta; a column without spread gives beta. One value a column in each view; eps >= 0. A batch of
/// one row is an error; a masked logit (-inf) before it makes its column NaN.
template <impl::view_of_operand G, impl::view_of_operand B>
auto batch_norm_training(const G& gamma, const B& beta, double eps) {
  return impl::BatchStatistics<G, B, impl::NoRunning, impl::NoRunning>(gamma, beta, eps, {}, {}, 0);
}

/// The same, and the running statistics are moved towards the batch's as in PyTorch: running = (1 - momentum)
/// running + momentum statistic, with the unbiased variance. They must not overlap any other operand.
template <impl::view_of_operand G, impl::view_of_operand B, impl::view_of_operand M, impl::view_of_operand V>
auto batch_norm_training(const G& gamma, const B& beta, double eps, const M& running_mean,
                         const V& running_variance, double momentum) {
  static_assert(!std::is_const_v<typename M::value_type> && !std::is_const_v<typename V::value_type>,
                "KokkosSoftmax::batch_norm_training: running_mean and running_variance are written");
  return impl::BatchStatistics<G, B, M, V>(gamma, beta, eps, running_mean, running_variance, momentum);
}

/// Y = softmax of each row of t(X W^T): Y_mn = softmax over n of t(sum_k X_mk W_nk, m, n).
///
/// \param exec       an execution space instance; the call is asynchronous on it and, where the GEMM is
///                   cuBLAS, can be captured in a CUDA graph once warm
/// \param X          M x K
/// \param W          N x K, the layout in which frameworks keep a layer's weights
/// \param Y          M x N, apart from X and W
/// \param transform  a logit transform as for softmax(): `bias(b) | gelu()`,
///                   `bias(b) | batch_norm(mean, variance, gamma, beta, eps) | scale(s)`; or a chain with
///                   batch_norm_training()
/// \param precision  Precision::ieee (the default) or Precision::tf32
///
/// Any layout of each matrix, contiguous or strided, so a transposed W is a view and no copy. Scalars are
/// float, double, half_t and bhalf_t in any mixture; sums are formed in float, or in double where one of the
/// three is double. While one of Y's strides is 1 and its scalar is what sums are formed in, the logits are
/// kept in Y itself; impl::GemmPlan says what the other cases need. K = 0 gives logits of 0. The same
/// extents, layout and hardware give the same bits.
///
/// On GPUs of compute capability 9.0 float heads at Precision::ieee are multiplied on the tensor cores
/// (tensor_core_linear): each operand as two binary16, at least as accurate as SGEMM and several times as
/// fast. Values that two binary16 do not hold well enough (elements below 2^-27 of their row's largest where
/// they decide a logit, infinities, NaN) are found on the device, and what depends on them is computed in
/// float arithmetic. Where it is used, a row's logits have the same bits whatever the other rows and their
/// number. It takes scratch for X and W in that form, as much as X and W (W in panels of up to 1 GiB); pack()
/// does W once and for all. Calls that have too few rows for that to pay, or a K too short or too long for it
/// to be as accurate, go to cuBLAS.
///
/// At Precision::tf32 they are multiplied as one binary16 beside a power of two for each row
/// (rounded_tensor_core_linear): with the 10 bits of fraction that TF32 has, each operand rounded to nearest,
/// in half the time that TF32 takes, where there are so many rows that rounding W pays or pack() has done it.
/// Logits that depend on elements which binary16 does not hold so well (below 2^-29 of their row's largest),
/// on infinities or NaN, are computed in float arithmetic likewise. It takes half of that scratch.
///
/// \throws std::invalid_argument  extents that do not fit, Y that overlaps X, W or an operand of the
/// transform,
///         statistics of the wrong length, eps negative, batch statistics of one row; nothing is launched
///         then and nothing is changed.
template <class Exec, impl::view_of_operand X, impl::view_of_operand W, impl::view_of_operand Y,
          impl::head_transform T = impl::Identity>
requires Kokkos::is_execution_space_v<Exec>
void linear_softmax(const Exec& exec, const X& x, const W& w, const Y& y, const T& transform = {},
                    Precision precision = Precision::ieee) {
  impl::call_linear<impl::Operation::softmax>(exec, x, w, y, transform, precision);
}

/// Without a transform.
template <class Exec, impl::view_of_operand X, impl::view_of_operand W, impl::view_of_operand Y>
requires Kokkos::is_execution_space_v<Exec>
void linear_softmax(const Exec& exec, const X& x, const W& w, const Y& y, Precision precision) {
  impl::call_linear<impl::Operation::softmax>(exec, x, w, y, impl::Identity{}, precision);
}

/// On the default instance of the execution space of X, and waits for it.
template <impl::view_of_operand X, impl::view_of_operand W, impl::view_of_operand Y, class... Options>
requires(sizeof...(Options) <= 2) void linear_softmax(const X& x, const W& w, const Y& y,
                                                      const Options&... options) {
  const typename X::execution_space exec{};
  linear_softmax(exec, x, w, y, options...);
  exec.fence("KokkosSoftmax::linear_softmax: the form without an instance is synchronous");
}

/// Y = log_softmax of each row of t(X W^T); everything else as linear_softmax().
template <class Exec, impl::view_of_operand X, impl::view_of_operand W, impl::view_of_operand Y,
          impl::head_transform T = impl::Identity>
requires Kokkos::is_execution_space_v<Exec>
void linear_log_softmax(const Exec& exec, const X& x, const W& w, const Y& y, const T& transform = {},
                        Precision precision = Precision::ieee) {
  impl::call_linear<impl::Operation::log_softmax>(exec, x, w, y, transform, precision);
}

/// Without a transform.
template <class Exec, impl::view_of_operand X, impl::view_of_operand W, impl::view_of_operand Y>
requires Kokkos::is_execution_space_v<Exec>
void linear_log_softmax(const Exec& exec, const X& x, const W& w, const Y& y, Precision precision) {
  impl::call_linear<impl::Operation::log_softmax>(exec, x, w, y, impl::Identity{}, precision);
}

/// On the default instance of the execution space of X, and waits for it.
template <impl::view_of_operand X, impl::view_of_operand W, impl::view_of_operand Y, class... Options>
requires(sizeof...(Options) <= 2) void linear_log_softmax(const X& x, const W& w, const Y& y,
                                                          const Options&... options) {
  const typename X::execution_space exec{};
  linear_log_softmax(exec, x, w, y, options...);
  exec.fence("KokkosSoftmax::linear_log_softmax: the form without an instance is synchronous");
}

/// Makes whatever linear_softmax or linear_log_softmax on these operands needs the first time, as reserve()
/// does for softmax.
template <class Exec, impl::view_of_operand X, impl::view_of_operand W, impl::view_of_operand Y,
          impl::head_transform T = impl::Identity>
requires Kokkos::is_execution_space_v<Exec>
void reserve(const Exec& exec, const X& x, const W& w, const Y& y, const T& transform = {},
             Precision precision = Precision::ieee) {
  impl::with_linear_problem(
      impl::Operation::softmax, "reserve", exec, x, w, y, transform, precision, [&](const auto& problem) {
        impl::LinearCandidates<Exec>::choose("linear_softmax", exec, problem, [&](auto implementation) {
          implementation.reserve(exec, problem);
        });
      });
}

/// Without a transform.
template <class Exec, impl::view_of_operand X, impl::view_of_operand W, impl::view_of_operand Y>
requires Kokkos::is_execution_space_v<Exec>
void reserve(const Exec& exec, const X& x, const W& w, const Y& y, Precision precision) {
  reserve(exec, x, w, y, impl::Identity{}, precision);
}

// ---------------------------------------------------------------------------------------------------------------------
// Weights that are brought into form once.

/// The weights W of heads (N x K), in the form in which the fastest implementation on `Exec` takes them, made
/// by pack(). Owns its memory, which copies share; W itself is not looked at again. May be used on any
/// instance. For float on a GPU of compute capability 9.0 that is two binary16 for each weight (the memory of
/// W once more); elsewhere it is a copy of W.
template <class Exec, class T>
class PackedWeights {
 public:
  using value_type = T;

  PackedWeights() = default;
  template <impl::view_of_operand W>
  PackedWeights(const Exec& exec, const W& w) {
    const impl::Matrix<const T> matrix = impl::as_const(impl::matrix_of(w));
    rows_ = matrix.rows;
    columns_ = matrix.columns;
    if constexpr (Packing::possible) packing_ = Packing::make(exec, matrix);
    if (packing_) return;
    matrix_ = View(Kokkos::view_alloc(exec, Kokkos::WithoutInitializing, "KokkosSoftmax::pack"),
                   static_cast<std::size_t>(rows_), static_cast<std::size_t>(columns_));
    using Copy = impl::Pack<Exec, T, T>;
    impl::launch_range(
        exec, "KokkosSoftmax::pack", rows_ * impl::ceil_div(columns_, Copy::width),
        Copy{matrix.data, matrix_.data(), rows_, columns_, matrix.row_stride, matrix.column_stride});
    exec.fence("KokkosSoftmax::pack: the weights may be used on any instance");
  }

  /// N for 0, K for 1.
  index_type extent(int dimension) const { return dimension == 0 ? rows_ : columns_; }

  /// Whether there is a form of its own; if not, the weights are matrix().
  bool is_packed() const { return packing_ != nullptr; }
  const auto& matrix() const { return matrix_; }

  /// \cond
  using Packing = impl::WeightPacking<Exec, T>;
  const Packing& packing() const { return *packing_; }
  /// \endcond

 private:
  using View = Kokkos::View<T**, Kokkos::LayoutRight, typename Exec::memory_space>;

  index_type rows_ = 0, columns_ = 0;
  std::shared_ptr<const Packing> packing_;
  View matrix_;
};

/// Brings the weights W (N x K, any layout) of heads into the form in which they are multiplied, for calls of
/// linear_softmax, linear_log_softmax and reserve in place of W. Allocates, and waits for the instance: the
/// result may be used on any instance and stream from then on. The outputs are the same to the bit as with W
/// where the same implementation runs. Not in a graph capture.
template <class Exec, impl::view_of_operand W>
requires Kokkos::is_execution_space_v<Exec>
auto pack(const Exec& exec, const W& w) {
  static_assert(impl::is_matrix_v<W>, "KokkosSoftmax: the weights W of a head are a matrix (rank 2)");
  static_assert(
      impl::view_of_supported_scalar<W>,
      "KokkosSoftmax: the scalars of W are float, double, KokkosSoftmax::half_t or KokkosSoftmax::bhalf_t");
  static_assert(impl::execution_space_reaches_memory_of<Exec, W>,
                "KokkosSoftmax: the execution space cannot access the memory of W");
  const impl::Block block = impl::block_of(w);
  const impl::CallContext call = impl::CallContext::of("pack", exec, block);
  if (block.rank != 2) call.fail("W of extents " + block.extents_text() + " is not a matrix");
  const Kokkos::Profiling::ScopedRegion region("KokkosSoftmax::pack");
  return PackedWeights<Exec, typename W::non_const_value_type>(exec, w);
}

namespace impl {

template <class Exec, class X, class WT, class Y, class T, class UseMatrix, class UsePacked>
void with_packed(Operation operation, const char* function, const Exec& exec, const X& x,
                 const PackedWeights<Exec, WT>& w, const Y& y, const T& head, Precision precision,
                 UseMatrix&& use_matrix, UsePacked&& use_packed) {
  static_assert(std::is_same_v<typename X::non_const_value_type, WT>,
                "KokkosSoftmax: X and packed weights W have the same scalar");
  static_assert(std::is_same_v<accumulator_t<WT, typename Y::non_const_value_type>, accumulator_t<WT>>,
                "KokkosSoftmax: packed weights W of another scalar than double cannot give Y of double");
  if constexpr (PackedWeights<Exec, WT>::Packing::possible &&
                !std::is_same_v<typename Y::value_type, double>) {
    if (w.is_packed()) {
      check_linear_types<Exec, X, Kokkos::View<WT**, typename Exec::memory_space>, Y, T>();
      const auto& weights = w.packing().weights;
      using Weights = std::remove_cvref_t<decltype(weights)>;
      const Matrix<const Weights> matrix{&weights, w.extent(0), w.extent(1), 0, 0};
      Block block;  // of extents alone: no view of the caller's is its memory
      block.data = reinterpret_cast<const char*>(weights.address());
      block.scalar_bytes = 1;
      block.rank = 2;
      block.extent[0] = w.extent(0);
      block.extent[1] = w.extent(1);
      with_linear_problem(operation, function, exec, x, matrix, block, y, head, precision, use_packed);
      return;
    }
  }
  use_matrix(w.matrix());
}

template <Operation operation, class Exec, class X, class WT, class Y, class T>
void call_packed(const Exec& exec, const X& x, const PackedWeights<Exec, WT>& w, const Y& y, const T& head,
                 Precision precision) {
  const char* function = operation == Operation::softmax ? "linear_softmax" : "linear_log_softmax";
  with_packed(
      operation, function, exec, x, w, y, head, precision,
      [&](const auto& matrix) { call_linear<operation>(exec, x, matrix, y, head, precision); },
      [&](const auto& problem) {
        const Kokkos::Profiling::ScopedRegion region(std::string("KokkosSoftmax::") + function);
        PackedLinearCandidates<Exec>::choose(function, exec, problem,
                                             [&](auto implementation) { implementation.run(exec, problem); });
      });
}

}  // namespace impl

/// linear_softmax() with weights from pack(); X has their scalar, and sums are formed in it, or in float.
template <class Exec, impl::view_of_operand X, class WT, impl::view_of_operand Y,
          impl::head_transform T = impl::Identity>
requires Kokkos::is_execution_space_v<Exec>
void linear_softmax(const Exec& exec, const X& x, const PackedWeights<Exec, WT>& w, const Y& y,
                    const T& transform = {}, Precision precision = Precision::ieee) {
  impl::call_packed<impl::Operation::softmax>(exec, x, w, y, transform, precision);
}

/// linear_log_softmax() with weights from pack().
template <class Exec, impl::view_of_operand X, class WT, impl::view_of_operand Y,
          impl::head_transform T = impl::Identity>
requires Kokkos::is_execution_space_v<Exec>
void linear_log_softmax(const Exec& exec, const X& x, const PackedWeights<Exec, WT>& w, const Y& y,
                        const T& transform = {}, Precision precision = Precision::ieee) {
  impl::call_packed<impl::Operation::log_softmax>(exec, x, w, y, transform, precision);
}

/// reserve() with weights from pack().
template <class Exec, impl::view_of_operand X, class WT, impl::view_of_operand Y,
          impl::head_transform T = impl::Identity>
requires Kokkos::is_execution_space_v<Exec>
void reserve(const Exec& exec, const X& x, const PackedWeights<Exec, WT>& w, const Y& y,
             const T& transform = {}, Precision precision = Precision::ieee) {
  impl::with_packed(
      impl::Operation::softmax, "reserve", exec, x, w, y, transform, precision,
      [&](const auto& matrix) { reserve(exec, x, matrix, y, transform, precision); },
      [&](const auto& problem) {
        impl::PackedLinearCandidates<Exec>::choose("linear_softmax", exec, problem, [&](auto implementation) {
          implementation.reserve(exec, problem);
        });
      });
}

/// The implementations of linear_softmax and linear_log_softmax on a backend, in the order in which they are
/// tried. They are forced by the names of the two functions; the softmax of the logits is a step of its own,
/// "linear_softmax/softmax" or "linear_log_softmax/log_softmax", with the candidates of softmax.
template <class Exec>
std::vector<std::string> linear_implementations() {
  using Head = impl::PlainHead<impl::BoundIdentity>;
  return impl::LinearCandidates<Exec>::template names<Exec, impl::LinearProblem<float, float, float, Head>>();
}

}  // namespace KokkosSoftmax

#endif
