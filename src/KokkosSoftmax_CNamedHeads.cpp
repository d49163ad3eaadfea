// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

// The chains of heads that are met most, for float on CUDA, with kernels of their own: those of a softmax
// whose rows fit registers, after the GEMM. All others go through the kernels of the chain that is known at
// run time, to the same bits.

#include "KokkosSoftmax_CHead.hpp"

#include <initializer_list>

namespace KokkosSoftmax::c {
namespace {

using Exec = Kokkos::Cuda;

/// A GEMM whose head has these kernels and no others, so that they compile in a minute.
template <class Gemm>
struct OfNamedHead : Gemm {
  using Rows = impl::CandidateList<impl::ThreadPerRow, impl::WarpPerRow, impl::BlockPerRow>;
};
struct TensorCoreGemmOfNamedHead : OfNamedHead<impl::TensorCoreGemm> {
  template <class Transform>
  static constexpr bool fuses = false;
};
using TensorCores = impl::GemmThenRows<TensorCoreGemmOfNamedHead>;
using RoundedTensorCores = impl::GemmThenRows<OfNamedHead<impl::RoundedTensorCoreGemm>>;
using Candidates =
    impl::CandidateList<TensorCores, RoundedTensorCores, impl::GemmThenRows<OfNamedHead<impl::CublasGemm>>>;
using PackedCandidates = impl::CandidateList<RoundedTensorCores, TensorCores>;

/// Whether they take the call.
bool has_kernels_for(const HeadCall& call) {
  using Plan = impl::RowInRegistersPlan<impl::RowsProblem<float, float, BoundAnyChain>>;
  const auto is_forced = [](const std::string& operation) {
    return impl::forced_implementation(operation, Exec::name()) != nullptr;
  };
  const std::string rows = impl::operation_name(call.operation), head = "linear_" + rows;
  const Array& y = call.y;
  return y.rank == 2 && y.extent[1] > 1 && y.extent[1] <= Plan::longest && y.stride[1] == 1 &&
         !is_forced(head) && !is_forced(head + "/" + rows);
}

/// Whether the chain is of these kinds, and all operands are of float.
bool is_chain(const Steps& steps, std::initializer_list<std::int32_t> kinds) {
  if (steps.count != static_cast<int>(kinds.size())) return false;
  const Step* step = steps.step;
  for (const std::int32_t kind : kinds) {
    if (step->kind != kind) return false;
    for (const int o : {0, 1, 2, 3}) {
      if (step->has_operand[o] && step->operand[o].scalar != KOKKOSSOFTMAX_FLOAT) return false;
    }
    ++step;
  }
  return true;
}

}  // namespace

template <>
bool call_named_head(const Exec& exec, const HeadCall& call) {
  if (!has_kernels_for(call)) return false;
  using View = ArrayView<const float, Exec>;
  using Running = ArrayView<float, Exec>;
  const Steps& steps = call.steps;
  const auto run = [&](const auto& head) {
    run_head<float, float>(exec, call, head, Candidates(), PackedCandidates());
  };
  if (is_chain(steps, {KOKKOSSOFTMAX_BIAS, KOKKOSSOFTMAX_GELU_ERF})) {
    run(bias(View(steps.step[0].operand[0])) | gelu());
    return true;
  }
  // After a BatchNorm the scale may be left out: a factor of 1 changes no bits.
  Steps unscaled = steps;
  double factor = 1;
  if (steps.count > 0 && steps.step[steps.count - 1].kind == KOKKOSSOFTMAX_SCALE) {
    factor = steps.step[--unscaled.count].number;
  }
  if (is_chain(unscaled, {KOKKOSSOFTMAX_BIAS, KOKKOSSOFTMAX_BATCH_NORM})) {
    const Step& s = steps.step[1];
    run(bias(View(steps.step[0].operand[0])) |
        batch_norm(View(s.operand[0]), View(s.operand[1]), View(s.operand[2]), View(s.operand[3]), s.number) |
        scale(factor));
    return true;
  }
  if (is_chain(unscaled, {KOKKOSSOFTMAX_BIAS, KOKKOSSOFTMAX_BATCH_NORM_TRAINING}) &&
      steps.step[1].has_operand[2]) {
    const Step& s = steps.step[1];
    run(bias(View(steps.step[0].operand[0])) |
        batch_norm_training(View(s.operand[0]), View(s.operand[1]), s.number, Running(s.operand[2]),
                            Running(s.operand[3]), s.momentum) |
        scale(factor));
    return true;
  }
  return false;
}

}  // namespace KokkosSoftmax::c
