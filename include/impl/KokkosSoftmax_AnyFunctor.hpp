// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// A functor whose type Kokkos need not know.

#ifndef KOKKOSSOFTMAX_ANYFUNCTOR_HPP
#define KOKKOSSOFTMAX_ANYFUNCTOR_HPP

namespace KokkosSoftmax::impl {

/// Calls a functor, which has to outlive it: what Kokkos makes of a launch is compiled once then, not for
/// each kernel. For the host alone.
template <class Argument>
struct AnyFunctor {
  const void* functor;
  void (*call)(const void* functor, Argument argument);

  template <class Functor>
  static AnyFunctor of(const Functor& functor) {
    return {&functor,
            [](const void* of, Argument argument) { (*static_cast<const Functor*>(of))(argument); }};
  }
  void operator()(Argument argument) const { call(functor, argument); }
};

}  // namespace KokkosSoftmax::impl

#endif
