// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Forcing each implementation, one that does not exist, and one that refuses; scopes of operation, backend
// and thread.
#include <algorithm>
#include <set>
#include <string>
#include <thread>

#include "../support/cases.hpp"
#include "../support/refusals.hpp"

namespace {

using namespace tests;

template <class Space>
class Forcing : public OnEveryBackend<Space> {
 protected:
  Kokkos::View<float**, Kokkos::LayoutRight, typename Space::memory_space> x{"x", 4, 300}, y{"y", 4, 300};
  Kokkos::View<float**, Kokkos::LayoutLeft, typename Space::memory_space> left{"left", 40, 30};
  Kokkos::View<float*, typename Space::memory_space> lse{"lse", 4};

  void run(Operation operation) {
    call(operation, Space(), x, y, lse, -1);
    Space().fence();
  }
};
TYPED_TEST_SUITE(Forcing, Backends, BackendName);

TYPED_TEST(Forcing, TheListsNameEachImplementationOnce) {
  for (auto operation : operations) {
    const auto names = ks::implementations<TypeParam>(reference::name(operation));
    EXPECT_FALSE(names.empty());
    EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), names.size());
  }
}

// Each candidate runs on some shape, and says why where it does not.
TYPED_TEST(Forcing, EachCandidate) {
  using Space = typename TypeParam::memory_space;
  const Kokkos::View<float**, Kokkos::LayoutRight, Space> longer("longer", 1, 200000), out("out", 1, 200000);
  const Kokkos::View<float**, Kokkos::LayoutRight, Space> middle("middle", 1, 5000),
      middle_out("middle_out", 1, 5000);
  const Kokkos::View<float*, Space> one("one", 1), many("many", 40);
  const Kokkos::View<half_t**, Kokkos::LayoutRight, Space> short_rows("short", 40, 65);
  const Kokkos::View<half_t*, Space> many_halves("many_halves", 40);
  const Kokkos::View<float**, Kokkos::LayoutLeft, Space> longer_left("longer_left", 40, 300);
  for (auto operation : operations) {
    for (const auto& name : ks::implementations<TypeParam>(reference::name(operation))) {
      int ran = 0;
      const ks::ScopedImplementation forced(name);
      for (int shape : {0, 1, 2, 3, 4, 5}) {
        try {
          if (shape == 0) this->run(operation);
          if (shape == 1) call(operation, TypeParam(), longer, out, one, -1);
          if (shape == 2) call(operation, TypeParam(), this->left, this->left, many, -1);
          if (shape == 3) call(operation, TypeParam(), middle, middle_out, one, -1);
          if (shape == 4) call(operation, TypeParam(), short_rows, short_rows, many_halves, -1);
          if (shape == 5) call(operation, TypeParam(), longer_left, longer_left, many, -1);
          TypeParam().fence();
          EXPECT_EQ(ks::last_implementation(), name);
          ++ran;
        } catch (const std::invalid_argument& error) {
          const std::string text = error.what();
          EXPECT_NE(text.find("refuses"), std::string::npos) << text;
          EXPECT_NE(text.find(name), std::string::npos) << text;
        }
      }
      EXPECT_GT(ran, 0) << name << " never ran";
    }
  }
}

TYPED_TEST(Forcing, ANameThatDoesNotExist) {
  for (auto operation : operations) {
    const ks::ScopedImplementation forced("no_such_rows");
    const auto text =
        expect_refused([&] { this->run(operation); },
                       {"KokkosSoftmax::", reference::name(operation), "no_such_rows", "not exist"});
    for (const auto& name : ks::implementations<TypeParam>(reference::name(operation))) {
      EXPECT_NE(text.find(name), std::string::npos) << "not every candidate is listed: " << text;
    }
  }
}

// Rows whose columns are neighbours in memory are not what strided_rows is for.
TYPED_TEST(Forcing, OneThatMustRefuse) {
  const ks::ScopedImplementation forced("strided_rows");
  const auto text = expect_refused([&] { this->run(Operation::softmax); },
                                   {"KokkosSoftmax::softmax", "strided_rows", "refuses", TypeParam::name()});
  for (const auto& name : ks::implementations<TypeParam>("softmax"))
    EXPECT_NE(text.find(name), std::string::npos) << text;
}

TYPED_TEST(Forcing, OnlyTheOperationNamed) {
  const ks::ScopedImplementation forced("log_softmax=no_such_rows");
  EXPECT_NO_THROW(this->run(Operation::softmax));
  EXPECT_NO_THROW(this->run(Operation::logsumexp));
  EXPECT_THROW(this->run(Operation::log_softmax), std::invalid_argument);
}

TYPED_TEST(Forcing, OnlyTheBackendNamed) {
  {
    const ks::ScopedImplementation forced("softmax@NoSuchBackend=no_such_rows,@NoSuchBackend=no_such_rows");
    EXPECT_NO_THROW(this->run(Operation::softmax));
  }
  {
    const ks::ScopedImplementation forced("softmax@" + std::string(TypeParam::name()) + "=no_such_rows");
    EXPECT_THROW(this->run(Operation::softmax), std::invalid_argument);
    EXPECT_NO_THROW(this->run(Operation::log_softmax));
  }
  {
    const ks::ScopedImplementation forced("@" + std::string(TypeParam::name()) + "=no_such_rows");
    EXPECT_THROW(this->run(Operation::softmax), std::invalid_argument);
    EXPECT_THROW(this->run(Operation::logsumexp), std::invalid_argument);
  }
}

TYPED_TEST(Forcing, EverySpellingOfAnyOperation) {
  for (const char* rules :
       {"team_rows", "=team_rows", "softmax=team_rows", "other=nothing,softmax=team_rows"}) {
    const ks::ScopedImplementation forced(rules);
    this->run(Operation::softmax);
    EXPECT_STREQ(ks::last_implementation(), "team_rows") << rules;
  }
}

TYPED_TEST(Forcing, ScopesNestAndEnd) {
  {
    const ks::ScopedImplementation outer("no_such_rows");
    {
      const ks::ScopedImplementation inner("softmax=team_rows");
      EXPECT_NO_THROW(this->run(Operation::softmax));
      EXPECT_THROW(this->run(Operation::log_softmax), std::invalid_argument);
    }
    EXPECT_THROW(this->run(Operation::softmax), std::invalid_argument);
  }
  EXPECT_NO_THROW(this->run(Operation::softmax));
}

TYPED_TEST(Forcing, OtherThreadsAreFree) {
  const ks::ScopedImplementation forced("no_such_rows");
  EXPECT_THROW(this->run(Operation::softmax), std::invalid_argument);
  std::string failure, last = "none yet";
  std::thread([&] {
    last = ks::last_implementation();
    try {
      this->run(Operation::softmax);
    } catch (const std::exception& error) {
      failure = error.what();
    }
  }).join();
  EXPECT_EQ(failure, "");
  EXPECT_EQ(last, "");
}

TYPED_TEST(Forcing, AnUnknownOperationHasNoList) {
  EXPECT_THROW(ks::implementations<TypeParam>("no_such_operation"), std::invalid_argument);
}

}  // namespace
