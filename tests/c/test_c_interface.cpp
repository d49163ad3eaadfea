// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The C interface beside the C++ one, in a program that uses Kokkos itself: the same bits, and one Kokkos.
#include <gtest/gtest.h>

#include "descriptors.hpp"

namespace {

using namespace tests;

template <class Exec>
class CInterface : public testing::Test {};
TYPED_TEST_SUITE(CInterface, Backends);

template <class T, class Exec>
using Strided = Kokkos::View<T, Kokkos::LayoutStride, typename Exec::memory_space>;

// Without a transform, for every pair of scalars, axis and operation, on a view with gaps whose dimensions
// are in another order in the output.
template <class Exec, class In, class Out>
void same_bits_without_transform() {
  const Strided<In***, Exec> x("x", Kokkos::LayoutStride(5, 150, 7, 800, 48, 3));
  const Strided<Out***, Exec> y("y", Kokkos::LayoutStride(5, 1, 7, 5, 48, 36)), z("z", y.layout());
  const Exec exec;
  fill(x, 3, -6, 6, true);
  Described cx(x), cz(z);
  for (int axis = -3; axis < 3; ++axis) {
    for (const Call call : {softmax, log_softmax}) {
      fill(y, 4);
      fill(z, 4);
      call_cpp(call, exec, x, y, axis, ks::impl::Identity{});
      const std::string ran = ks::last_implementation();
      ASSERT_EQ(call_c(call, cx, cz, axis, {}), KOKKOSSOFTMAX_OK) << kokkossoftmax_last_error();
      EXPECT_EQ(ran, kokkossoftmax_last_implementation());
      EXPECT_EQ(bytes_of(y), bytes_of(z)) << "axis " << axis << ", call " << call;
    }
    const int dropped = axis < 0 ? axis + 3 : axis;
    const std::size_t first = x.extent(dropped == 0 ? 1 : 0), second = x.extent(dropped == 2 ? 1 : 2);
    const Kokkos::View<Out**, typename Exec::memory_space> sum("sum", first, second),
        sum_c("sum_c", first, second);
    ks::logsumexp(exec, x, sum, ks::axis(axis));
    exec.fence();
    Described c_sum(sum_c);
    ASSERT_EQ(call_c(logsumexp, cx, c_sum, axis, {}), KOKKOSSOFTMAX_OK) << kokkossoftmax_last_error();
    EXPECT_EQ(bytes_of(sum), bytes_of(sum_c)) << "axis " << axis;
  }
}

TYPED_TEST(CInterface, SameBitsWithoutTransform) {
#define SAME_BITS(IN, OUT) same_bits_without_transform<TypeParam, IN, OUT>();
  KOKKOSSOFTMAX_FOR_EACH_SCALAR_PAIR(SAME_BITS)
#undef SAME_BITS
}

// Contiguous rows of all kinds of lengths, in C order without strides; in place too.
TYPED_TEST(CInterface, SameBitsInCOrder) {
  using Exec = TypeParam;
  const Exec exec;
  for (const int columns : {1, 2, 17, 64, 1000, 5003, 70001}) {
    const Kokkos::View<float**, Kokkos::LayoutRight, typename Exec::memory_space> x("x", 3, columns),
        y("y", 3, columns), z("z", 3, columns);
    fill(x, static_cast<std::uint64_t>(columns), -6, 6, true);
    ks::softmax(exec, x, y);
    exec.fence();
    Described cx(x), cz(z);
    cx->strides = nullptr;
    kokkossoftmax_array source = *cx.get(), target = *cz.get();
    source.strides = target.strides = nullptr;
    EXPECT_OK(kokkossoftmax_softmax(nullptr, &source, &target, -1, nullptr, 0));
    EXPECT_OK(kokkossoftmax_synchronize(nullptr));
    Kokkos::fence();
    EXPECT_EQ(bytes_of(y), bytes_of(z)) << columns;
    EXPECT_OK(kokkossoftmax_softmax(nullptr, &source, &source, 1, nullptr, 0));
    Kokkos::fence();
    EXPECT_EQ(bytes_of(y), bytes_of(x)) << columns << ", in place";
  }
}

// Dimensions that lie backwards, of x, of y, and of both: rows have the bits of the same rows lying forwards.
TYPED_TEST(CInterface, Backwards) {
  using Exec = TypeParam;
  for (const int columns : {5, 64, 777, 70001}) {
    using View = Kokkos::View<float***, Kokkos::LayoutRight, typename Exec::memory_space>;
    const View x("x", 3, 2, columns), y("y", x.layout()), z("z", x.layout());
    fill(x, static_cast<std::uint64_t>(columns), -6, 6, true);
    const auto backwards = [&](const View& view, unsigned dims) {
      Described d(view);
      for (unsigned k = 0; k < 3; ++k) {
        if (!(dims >> k & 1)) continue;
        d->data = static_cast<float*>(d->data) + (d.extents()[k] - 1) * d.strides()[k];
        d.strides()[k] *= -1;
      }
      return d;
    };
    const auto values = [&](const View& view, unsigned dims) {
      const auto host = Kokkos::create_mirror_view_and_copy(Kokkos::HostSpace(), view);
      std::vector<float> all;
      for (int i = 0; i < 3; ++i)
        for (int j = 0; j < 2; ++j)
          for (int c = 0; c < columns; ++c)
            all.push_back(host(dims & 1 ? 2 - i : i, dims & 2 ? 1 - j : j, dims & 4 ? columns - 1 - c : c));
      return all;
    };
    Described cx = backwards(x, 0), cz = backwards(z, 0);
    EXPECT_OK(call_c(softmax, cx, cz, -1, {}));
    for (unsigned of_x = 0; of_x < 8; ++of_x) {
      for (unsigned of_y = 0; of_y < 8; ++of_y) {
        Described from = backwards(x, of_x), to = backwards(y, of_y);
        fill(y, 7);
        EXPECT_OK(call_c(softmax, from, to, -1, {}));
        const auto got = values(y, of_y), want = values(z, of_x);
        for (std::size_t i = 0; i < got.size(); ++i) {
          if (of_x < 4 && of_y < 4) {
            ASSERT_EQ(got[i], want[i]) << columns << " columns, x " << of_x << ", y " << of_y << ", " << i;
          } else {
            ASSERT_NEAR(got[i], want[i], 2e-6 * want[i])
                << columns << " columns, x " << of_x << ", y " << of_y << ", " << i;
          }
        }
      }
    }
    INVALID("overlaps", [&] {
      Described back = backwards(x, 4);
      return kokkossoftmax_softmax(nullptr, cx, back, -1, nullptr, 0);
    }());
  }
}

// logsumexp of a vector is one value, of rank 0.
TYPED_TEST(CInterface, RankZero) {
  using Exec = TypeParam;
  const Kokkos::View<double*, typename Exec::memory_space> x("x", 99);
  const Kokkos::View<double, typename Exec::memory_space> a("a"), b("b");
  fill(x, 5);
  ks::logsumexp(Exec(), x, a);
  Kokkos::fence();
  Described cx(x), cb(b);
  EXPECT_OK(call_c(logsumexp, cx, cb, 0, {}));
  EXPECT_EQ(bytes_of(a), bytes_of(b));
}

// The interface finds the Kokkos that this program initialised, and leaves it as it is.
TYPED_TEST(CInterface, OneKokkos) {
  EXPECT_EQ(kokkossoftmax_is_initialized(), 1);
  EXPECT_OK(kokkossoftmax_initialize(nullptr));
  EXPECT_OK(kokkossoftmax_finalize());
  EXPECT_TRUE(Kokkos::is_initialized());
  EXPECT_EQ(kokkossoftmax_is_initialized(), 1);
}

TYPED_TEST(CInterface, ReserveThenCall) {
  using Exec = TypeParam;
  Operands<Exec, float> o(300);
  const Kokkos::View<float***, Kokkos::LayoutRight, typename Exec::memory_space> y("y", o.x.layout());
  const Kokkos::View<float**, Kokkos::LayoutRight, typename Exec::memory_space> sum("sum", 4, 6);
  Described cx(o.x), cy(y), c_sum(sum);
  const Steps steps{step(KOKKOSSOFTMAX_SCALE, 2)};
  EXPECT_OK(kokkossoftmax_reserve(nullptr, cx, cy, -1, steps.data(), steps.size()));
  EXPECT_OK(kokkossoftmax_reserve(nullptr, cx, c_sum, -1, steps.data(), steps.size()));
  EXPECT_OK(call_c(softmax, cx, cy, -1, steps));
}

// ---- What is refused --------------------------------------------------------------------------------------

TYPED_TEST(CInterface, RefusesBadStructs) {
  using Exec = TypeParam;
  const Kokkos::View<float**, Kokkos::LayoutRight, typename Exec::memory_space> x("x", 4, 6), y("y", 4, 6);
  fill(y, 77);
  const auto before = bytes_of(y);
  Described cx(x), cy(y);
  kokkossoftmax_execution execution = KOKKOSSOFTMAX_EXECUTION_INIT;
  INVALID("x is a null pointer", kokkossoftmax_softmax(&execution, nullptr, cy, -1, nullptr, 0));
  INVALID("y is a null pointer", kokkossoftmax_softmax(nullptr, cx, nullptr, -1, nullptr, 0));
  execution.struct_size = 7;
  INVALID("struct_size of execution", kokkossoftmax_softmax(&execution, cx, cy, -1, nullptr, 0));
  execution.struct_size = sizeof execution;
  execution.backend = 9;
  INVALID("no backend 9", kokkossoftmax_softmax(&execution, cx, cy, -1, nullptr, 0));
  for (const int which : {0, 1}) {
    Described& bad = which ? cy : cx;
    const std::string name = which ? "y" : "x";
    const auto refused = [&](const std::string& part) {
      INVALID(part, kokkossoftmax_softmax(nullptr, cx, cy, -1, nullptr, 0));
    };
    bad->struct_size += 8;
    refused("struct_size of " + name);
    bad->struct_size -= 8;
    bad->scalar = 77;
    refused("scalar of " + name);
    bad->scalar = KOKKOSSOFTMAX_BOOL;
    refused("scalar of " + name);
    bad->scalar = KOKKOSSOFTMAX_FLOAT;
    const std::int32_t memory = bad->memory;
    if (!which) {
      bad->memory = 5;
      refused("memory of " + name);
      bad->memory = memory == KOKKOSSOFTMAX_HOST ? KOKKOSSOFTMAX_CUDA : KOKKOSSOFTMAX_HOST;
      refused(name + " is in memory of ");
      bad->memory = memory;
    }
    bad->rank = 9;
    refused("rank 9");
    bad->rank = -1;
    refused("rank -1");
    bad->rank = 2;
    bad.extents()[0] = -4;
    refused("extent 0 of " + name);
    bad.extents()[0] = std::int64_t(1) << 60;
    refused(name);
    bad.extents()[0] = 4;
    void* data = bad->data;
    bad->data = nullptr;
    refused("null pointer");
    bad->data = data;
    bad.strides()[0] = std::numeric_limits<std::int64_t>::min();
    refused("spans more than there is memory");
    bad.strides()[0] = 6;
    kokkossoftmax_array flat = *bad.get();
    flat.extents = nullptr;
    INVALID("extents of " + name, kokkossoftmax_softmax(nullptr, which ? cx.get() : &flat,
                                                        which ? &flat : cy.get(), -1, nullptr, 0));
  }
  INVALID("axis 2", kokkossoftmax_softmax(nullptr, cx, cy, 2, nullptr, 0));
  INVALID("axis -3", kokkossoftmax_softmax(nullptr, cx, cy, -3, nullptr, 0));
  cy.extents()[1] = 5;
  INVALID("does not fit", kokkossoftmax_softmax(nullptr, cx, cy, -1, nullptr, 0));
  cy.extents()[1] = 6;
  cy.strides()[0] = 0;
  INVALID("writes one element more than once", kokkossoftmax_softmax(nullptr, cx, cy, -1, nullptr, 0));
  cy.strides()[0] = 6;
  INVALID("does not fit", kokkossoftmax_logsumexp(nullptr, cx, cy, -1, nullptr, 0));
  EXPECT_EQ(bytes_of(y), before);
}

TYPED_TEST(CInterface, RefusesScalars) {
  using Exec = TypeParam;
  const Kokkos::View<float*, typename Exec::memory_space> x("x", 4);
  const Kokkos::View<ks::half_t*, typename Exec::memory_space> y("y", 4);
  Described cx(x), cy(y);
  UNSUPPORTED("pair of scalars", kokkossoftmax_softmax(nullptr, cx, cy, -1, nullptr, 0));
}

TYPED_TEST(CInterface, RefusesTransforms) {
  using Exec = TypeParam;
  Operands<Exec, float> o(8);
  const Kokkos::View<float***, Kokkos::LayoutRight, typename Exec::memory_space> y("y", o.x.layout());
  Described cx(o.x), cy(y);
  const auto call = [&](const Steps& steps) {
    return kokkossoftmax_softmax(nullptr, cx, cy, -1, steps.data(), steps.size());
  };
  INVALID("transforms is a null pointer", kokkossoftmax_softmax(nullptr, cx, cy, -1, nullptr, 1));
  UNSUPPORTED("more than 8", call(Steps(9, step(KOKKOSSOFTMAX_RELU))));
  INVALID("kind of transform 1 is 99", call({step(KOKKOSSOFTMAX_RELU), step(99)}));
  Steps bad{step(KOKKOSSOFTMAX_RELU)};
  bad[0].struct_size = 1;
  INVALID("struct_size of transform 0", call(bad));
  bad = {step(KOKKOSSOFTMAX_RELU)};
  bad[0].flags = 1;
  INVALID("flags of transform 0", call(bad));
  INVALID("mask is a null pointer", call({step(KOKKOSSOFTMAX_MASK)}));
  INVALID("scalar of mask", call({step_of(KOKKOSSOFTMAX_MASK, {&o.c_bias})}));
  INVALID("scalar of bias", call({step_of(KOKKOSSOFTMAX_BIAS, {&o.c_mask})}));
  INVALID("bias of extents (4, 6) fits neither", call({step_of(KOKKOSSOFTMAX_BIAS, {&o.c_temperature})}));
  INVALID("temperature of extents (8)", call({step_of(KOKKOSSOFTMAX_TEMPERATURE, {&o.c_mean})}));
  INVALID("gamma is a null pointer",
          call({step_of(KOKKOSSOFTMAX_BATCH_NORM, {&o.c_mean, &o.c_variance, nullptr, &o.c_beta})}));
  INVALID("eps of batch_norm",
          call({step_of(KOKKOSSOFTMAX_BATCH_NORM, {&o.c_mean, &o.c_variance, &o.c_gamma, &o.c_beta}, -1)}));
  INVALID("overlaps bias", kokkossoftmax_softmax(nullptr, cx, o.c_bias, 2, nullptr, 0) == KOKKOSSOFTMAX_INVALID_ARGUMENT
                               ? [&] {
                                   Described whole(o.x);
                                   const Steps steps{step_of(KOKKOSSOFTMAX_BIAS, {&whole})};
                                   return kokkossoftmax_softmax(nullptr, cx, cx, 2, steps.data(), 1);
                                 }()
                               : KOKKOSSOFTMAX_OK);
  UNSUPPORTED("batch_norm_training is a step of heads",
              call({step_of(KOKKOSSOFTMAX_BATCH_NORM_TRAINING, {&o.c_gamma, &o.c_mean})}));
  fill(o.temperature, 1, -1, 1);
  Steps checked{step_of(KOKKOSSOFTMAX_TEMPERATURE, {&o.c_temperature})};
  EXPECT_OK(call(checked));
  checked[0].flags = KOKKOSSOFTMAX_CHECKED;
  INVALID("temperature is not positive", call(checked));
}

TEST(CInterfaceBackends, RefusesWhatIsNotBuilt) {
  kokkossoftmax_execution execution = KOKKOSSOFTMAX_EXECUTION_INIT;
  execution.backend = KOKKOSSOFTMAX_BACKEND_CUDA;
  EXPECT_EQ(kokkossoftmax_has_backend(KOKKOSSOFTMAX_BACKEND_HOST), 1);
  EXPECT_EQ(kokkossoftmax_has_backend(17), 0);
  if (!kokkossoftmax_has_backend(KOKKOSSOFTMAX_BACKEND_CUDA)) {
    UNSUPPORTED("built without CUDA", kokkossoftmax_synchronize(&execution));
  }
  EXPECT_EQ(kokkossoftmax_version(), KOKKOSSOFTMAX_VERSION);
  EXPECT_STREQ(kokkossoftmax_status_name(KOKKOSSOFTMAX_FINALIZED), "KOKKOSSOFTMAX_FINALIZED");
}

}  // namespace
