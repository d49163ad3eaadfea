// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// How portable kernels are launched: without the one staging buffer that Kokkos has for functors of 512
/// bytes and more, which comes with a wait that a graph capture refuses. The hint keeps it out of the way.

#ifndef KOKKOSSOFTMAX_IMPL_LAUNCH_HPP
#define KOKKOSSOFTMAX_IMPL_LAUNCH_HPP

#include <impl/KokkosSoftmax_AnyFunctor.hpp>
#include <impl/KokkosSoftmax_Scalars.hpp>

#include <Kokkos_Core.hpp>

#include <algorithm>
#include <string>

namespace KokkosSoftmax::impl {

/// Whether the kernels of an execution space run on the host's cores.
template <class Exec>
inline constexpr bool runs_on_host_v = Kokkos::SpaceAccessibility<Exec, Kokkos::HostSpace>::accessible;

/// Whether a launch has ended when it returns, and its functor may stay where it is.
template <class Exec>
inline constexpr bool ends_before_launch_returns_v = runs_on_host_v<Exec>;
#if defined(KOKKOS_ENABLE_HPX)
template <>
inline constexpr bool ends_before_launch_returns_v<Kokkos::Experimental::HPX> = false;
#endif

/// Whether the arguments of a kernel have room for it.
template <class Functor>
inline constexpr bool fits_kernel_arguments_v = sizeof(Functor) < 3800;

/// Four teams of 256 threads (or as many threads in other teams) on a multiprocessor hide the latency of
/// memory; the bound keeps the compiler to the registers that allow them.
using TeamBounds = Kokkos::LaunchBounds<1024, 1>;

template <class Policy, class Functor>
void launch_team_policy(const typename Policy::execution_space& exec, const std::string& label,
                        index_type league, int threads, int lanes, std::size_t team_scratch,
                        const Functor& functor) {
  // At least one team, so that a call over no rows loads the kernel: that is how reserve() warms it.
  Policy policy(exec, static_cast<int>(std::max<index_type>(league, 1)), threads, lanes);
  if (team_scratch) policy.set_scratch_size(0, Kokkos::PerTeam(static_cast<int>(team_scratch)));
  Kokkos::parallel_for(
      label, Kokkos::Experimental::require(policy, Kokkos::Experimental::WorkItemProperty::HintLightWeight),
      functor);
}

template <class Bounds = TeamBounds, class Functor, class Exec>
void launch_teams(const Exec& exec, const std::string& label, index_type league, int threads, int lanes,
                  std::size_t team_scratch, const Functor& functor) {
  static_assert(fits_kernel_arguments_v<Functor>,
                "KokkosSoftmax: the transform is too large for the arguments of a kernel");
  using Policy = Kokkos::TeamPolicy<Exec, Bounds>;
  if constexpr (ends_before_launch_returns_v<Exec>) {
    launch_team_policy<Policy>(exec, label, league, threads, lanes, team_scratch,
                               AnyFunctor<const typename Policy::member_type&>::of(functor));
  } else {
    launch_team_policy<Policy>(exec, label, league, threads, lanes, team_scratch, functor);
  }
}

template <class Exec, class Functor>
void launch_range_policy(const Exec& exec, const std::string& label, index_type count,
                         const Functor& functor) {
  const Kokkos::RangePolicy<Exec, Kokkos::IndexType<index_type>> policy(exec, 0, count);
  Kokkos::parallel_for(
      label, Kokkos::Experimental::require(policy, Kokkos::Experimental::WorkItemProperty::HintLightWeight),
      functor);
}

template <class Exec, class Functor>
void launch_range(const Exec& exec, const std::string& label, index_type count, const Functor& functor) {
  static_assert(fits_kernel_arguments_v<Functor>,
                "KokkosSoftmax: the transform is too large for the arguments of a kernel");
  if constexpr (ends_before_launch_returns_v<Exec>) {
    // A call for each index: only a head without columns of X has one for each logit.
    launch_range_policy(exec, label, count, AnyFunctor<index_type>::of(functor));
  } else {
    launch_range_policy(exec, label, count, functor);
  }
}

}  // namespace KokkosSoftmax::impl

#endif
