// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

// softmax, log_softmax and logsumexp as entries of the comparison.

#include "KokkosSoftmax_CompareRows.hpp"

namespace compare {
namespace {

struct NoTransform {
  static constexpr const char* name = "none";
  template <class Views>
  static ks::impl::Identity of(const Views&) {
    return {};
  }
};

template <class Op, class Exec>
void add_kernels(Operation& operation) {
#define KOKKOSSOFTMAX_COMPARE_ADD(In, Out) \
  operation.kernels.push_back(rows_kernel<Op, NoTransform, Exec, In, Out>());
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
  for (const auto& [name, kernel] : transform_kernels()) {
    if (name == Op::name) operation.kernels.push_back(kernel);
  }
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

std::vector<std::pair<std::string, Kernel>>& transform_kernels() {
  static std::vector<std::pair<std::string, Kernel>> kernels;
  return kernels;
}

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
