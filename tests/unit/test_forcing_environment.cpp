// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// KOKKOSSOFTMAX_FORCE_IMPL, which the library reads once: a program of its own.
#include <cstdlib>

#include "../support/cases.hpp"

namespace {

using namespace tests;

const int environment = setenv("KOKKOSSOFTMAX_FORCE_IMPL", "softmax=team_rows,log_softmax=no_such_rows", 1);

template <class Space>
class ForcingByEnvironment : public OnEveryBackend<Space> {};
TYPED_TEST_SUITE(ForcingByEnvironment, Backends, BackendName);

TYPED_TEST(ForcingByEnvironment, Holds) {
  ASSERT_EQ(environment, 0);
  // A shape for which team_rows is not the first choice, where there is one.
  const Kokkos::View<float**, Kokkos::LayoutRight, typename TypeParam::memory_space> x("x", 1, 200000);
  const Kokkos::View<float*, typename TypeParam::memory_space> lse("lse", 1);
  ks::softmax(x, x);
  EXPECT_STREQ(ks::last_implementation(), "team_rows");
  EXPECT_THROW(ks::log_softmax(x, x), std::invalid_argument);
  EXPECT_NO_THROW(ks::logsumexp(x, lse));
  // A scope comes before the environment.
  const ks::ScopedImplementation scope("log_softmax=team_rows");
  EXPECT_NO_THROW(ks::log_softmax(x, x));
}

}  // namespace
