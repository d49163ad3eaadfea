// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// One call of the library on operands of given layouts, checked against the reference, its padding and its
// input.
#ifndef KOKKOSSOFTMAX_TESTS_CASES_HPP
#define KOKKOSSOFTMAX_TESTS_CASES_HPP

#include <gtest/gtest.h>

#include <KokkosSoftmax.hpp>
#include <Kokkos_Core.hpp>
#include <Kokkos_DynRankView.hpp>
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "buffers.hpp"
#include "random.hpp"

namespace tests {

namespace ks = KokkosSoftmax;
using reference::Accumulator;
using reference::Chain;
using reference::Operation;
using reference::operations;
using reference::Position;

// (Not memcmp, which g++ calls for each of them where it optimises little.)
template <class T>
KOKKOS_INLINE_FUNCTION bool have_same_bits(const T& a, const T& b) {
  using Bits = std::conditional_t<sizeof(T) == 2, std::uint16_t,
                                  std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>>;
  return ks::impl::bits_as<Bits>(a) == ks::impl::bits_as<Bits>(b);
}

template <class T>
struct AddIfDifferent {
  const T *a, *b;
  KOKKOS_FUNCTION void operator()(std::int64_t i, std::int64_t& different) const {
    bool same = have_same_bits(a[i], b[i]);
    // (Which NaN it is may depend on the place, of doubles.)
    if constexpr (sizeof(T) == 8) same = same || (a[i] != a[i] && b[i] != b[i]);
    different += !same;
  }
};
// How many of so many elements in an instance's memory have other bits; a NaN of double is any other.
template <class Exec, class T>
std::int64_t count_different(const Exec& exec, const T* a, const T* b, std::int64_t count) {
  std::int64_t different = -1;
  Kokkos::parallel_reduce("compare",
                          Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, count),
                          AddIfDifferent<T>{a, b}, different);
  return different;
}

// --- typed tests over the execution spaces -----------------------------------------------------------------

template <class Ignored, class... Spaces>
struct AfterFirst {
  using type = testing::Types<Spaces...>;
};
#define KOKKOSSOFTMAX_TESTS_SPACE(Space) , Space
using Backends = AfterFirst < void KOKKOSSOFTMAX_FOR_EACH_BACKEND(KOKKOSSOFTMAX_TESTS_SPACE)
> ::type;
#undef KOKKOSSOFTMAX_TESTS_SPACE

struct BackendName {
  template <class Space>
  static std::string GetName(int) {
    return Space::name();
  }
};

template <class Space>
class OnEveryBackend : public testing::Test {
 protected:
  using Exec = Space;
};

// --- pairs of scalars --------------------------------------------------------------------------------------

// visit.template operator()<In, Out>() for the pairs that are compiled into the library; for every pair where
// KOKKOSSOFTMAX_TEST_ALL_SCALAR_PAIRS is defined.
template <class Visit>
void for_each_scalar_pair(Visit visit) {
#if defined(KOKKOSSOFTMAX_TEST_ALL_SCALAR_PAIRS)
  const auto with_input = [&]<class In>() {
#define KOKKOSSOFTMAX_TESTS_OUTPUT(Out, name) visit.template operator()<In, Out>();
    KOKKOSSOFTMAX_FOR_EACH_SCALAR(KOKKOSSOFTMAX_TESTS_OUTPUT)
#undef KOKKOSSOFTMAX_TESTS_OUTPUT
  };
#define KOKKOSSOFTMAX_TESTS_INPUT(In, name) with_input.template operator()<In>();
  KOKKOSSOFTMAX_FOR_EACH_SCALAR(KOKKOSSOFTMAX_TESTS_INPUT)
#undef KOKKOSSOFTMAX_TESTS_INPUT
#else
#define KOKKOSSOFTMAX_TESTS_PAIR(In, Out) visit.template operator()<In, Out>();
  KOKKOSSOFTMAX_FOR_EACH_SCALAR_PAIR(KOKKOSSOFTMAX_TESTS_PAIR)
#undef KOKKOSSOFTMAX_TESTS_PAIR
#endif
}

// --- calls -------------------------------------------------------------------------------------------------

template <class Exec, class X, class Y, class Lse, class... Transform>
void call(Operation operation, const Exec& exec, const X& x, const Y& y, const Lse& lse, int axis,
          const Transform&... transform) {
  switch (operation) {
    case Operation::softmax:
      ks::softmax(exec, x, y, ks::axis(axis), transform...);
      return;
    case Operation::log_softmax:
      ks::log_softmax(exec, x, y, ks::axis(axis), transform...);
      return;
    case Operation::logsumexp:
      ks::logsumexp(exec, x, lse, ks::axis(axis), transform...);
      return;
  }
}

// The names that the tests force, one after the other; the first is empty: the library's own choice.
template <class Exec>
std::vector<std::string> implementations_and_default(Operation operation) {
  std::vector<std::string> names = ks::implementations<Exec>(reference::name(operation));
  names.insert(names.begin(), "");
  return names;
}

// Kernels that an implementation launches for a call, at most.
inline std::size_t most_kernels_of(std::string_view implementation) {
  return implementation == "two_pass_tiles" ? 3 : 2;  // it reduces, joins and writes
}

// An operand on a backend: the exact layout and, in the row-major order of its extents, its values.
struct Case {
  std::vector<std::int64_t> extents;
  int axis = -1;
  std::vector<double> logits;
  std::optional<Layout> in, out, lse;  // row-major when absent
  bool in_place = false;
  Chain chain;
  bool special_around = false;  // NaN and +inf around the input's elements

  std::int64_t size() const { return reference::right(extents).size(); }
};

// Runs one case with the implementation named (empty: the library's choice). False when that one refused it.
// `transformed`: see reference::Problem.
template <class In, class Out, int rank, class Exec, class... Transform>
bool run_case_on(const std::vector<reference::Logit>* transformed, const Exec& exec, Operation operation,
                 const Case& c, const std::string& implementation, const Transform&... transform) {
  const bool reduces = operation == Operation::logsumexp;
  const auto lse_extents = reference::without(c.extents, c.axis);
  Buffer<Exec> x(scalar_of<In>, c.in ? *c.in : reference::right(c.extents), &c.logits, c.special_around);
  const bool in_place = c.in_place && !reduces && std::is_same_v<In, Out>;
  std::optional<Buffer<Exec>> separate;
  if (!in_place) {
    separate.emplace(scalar_of<Out>, reduces ? (c.lse ? *c.lse : reference::right(lse_extents))
                                             : (c.out ? *c.out : reference::right(c.extents)));
  }
  Buffer<Exec>& result = in_place ? x : *separate;
  const auto x_view = x.template view<const In, rank>();
  try {
    std::optional<ks::ScopedImplementation> forced;
    if (!implementation.empty())
      forced.emplace(std::string(reference::name(operation)) + '=' + implementation);
    // Only one of the two outputs exists; the other view is never used.
    StridedView<Out, rank, Exec> y;
    StridedView<Out, rank - 1, Exec> lse;
    if (reduces) {
      lse = result.template view<Out, rank - 1>();
    } else {
      y = result.template view<Out, rank>();
    }
    call(operation, exec, x_view, y, lse, c.axis, transform...);
    exec.fence("test");
  } catch (const std::invalid_argument& error) {
    if (implementation.empty()) ADD_FAILURE() << error.what();
    return false;
  }
  if (!implementation.empty() && x.layout().size() > 0) {
    EXPECT_EQ(ks::last_implementation(), implementation);
  }
  if (!in_place) {
    x.download();
    EXPECT_TRUE(x.unchanged()) << "the input or what lies around it was written";
  }
  result.download();
  EXPECT_TRUE(result.padding_untouched()) << "the padding of the output was written";
  reference::Problem problem{operation, scalar_of<In>, scalar_of<Out>, c.extents,
                             c.axis,    c.logits,      c.chain,        transformed};
  std::string report;
  const bool agrees = reference::agrees(problem, result.layout(), result.host(), report);
  std::string extents;
  for (auto extent : c.extents) extents += (extents.empty() ? "" : " x ") + std::to_string(extent);
  EXPECT_TRUE(agrees) << report << extents << ", axis " << c.axis << ", ran " << ks::last_implementation()
                      << (in_place ? ", in place" : "");
  return true;
}

template <class In, class Out, int rank, class Exec, class... Transform>
bool run_case(const Exec& exec, Operation operation, const Case& c, const std::string& implementation,
              const Transform&... transform) {
  return run_case_on<In, Out, rank>(nullptr, exec, operation, c, implementation, transform...);
}

// Every operation; with every implementation when asked to. The reference goes through a chain once for all.
template <class In, class Out, int rank, class Exec, class... Transform>
void check(const Exec& exec, const Case& c, bool force_each, const Transform&... transform) {
  std::vector<reference::Logit> transformed;
  constexpr std::int64_t most_logits = std::int64_t(1) << 20;  // for the memory that they take
  const bool is_known = !c.chain.empty() && c.size() <= most_logits;
  if (is_known)
    transformed = reference::transformed(
        {operations[0], scalar_of<In>, scalar_of<Out>, c.extents, c.axis, c.logits, c.chain});
  const auto* const known = is_known ? &transformed : nullptr;
  for (auto operation : operations) {
    if (!force_each) {
      run_case_on<In, Out, rank>(known, exec, operation, c, "", transform...);
      continue;
    }
    int ran = 0;
    for (const auto& name : implementations_and_default<Exec>(operation)) {
      ran += run_case_on<In, Out, rank>(known, exec, operation, c, name, transform...);
    }
    EXPECT_GE(ran, 2) << "no implementation could be forced";
  }
}

// The logits as they are.
struct AsTheyAre {
  template <class Acc>
  KOKKOS_FUNCTION Acc operator()(Acc value, std::int64_t, std::int64_t) const {
    return value;
  }
};

}  // namespace tests

#endif
