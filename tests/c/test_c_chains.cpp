// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Chains of transforms through the C interface, which learns of them at run time, beside those that a C++
// compiler sees: the same bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "descriptors.hpp"

namespace {

using namespace tests;

template <class Exec>
class CChains : public testing::Test {};
TYPED_TEST_SUITE(CChains, Backends);

template <class Exec, class Out, class In, class T>
void same_bits(const char* what, Operands<Exec, In>& o, const T& transform, const Steps& steps,
               int axis = 2) {
  using View = Kokkos::View<Out***, Kokkos::LayoutRight, typename Exec::memory_space>;
  const Exec exec;
  for (const Call call : {softmax, log_softmax}) {
    const View y("y", o.x.layout()), z("z", o.x.layout());
    call_cpp(call, exec, o.x, y, axis, transform);
    const std::string ran = ks::last_implementation();
    Described cx(o.x), cz(z);
    ASSERT_EQ(call_c(call, cx, cz, axis, steps), KOKKOSSOFTMAX_OK)
        << what << ": " << kokkossoftmax_last_error();
    EXPECT_EQ(ran, kokkossoftmax_last_implementation()) << what;
    EXPECT_EQ(bytes_of(y), bytes_of(z))
        << what << ", columns " << o.x.extent(2) << ", axis " << axis << ", call " << call;
  }
}

constexpr int lengths[] = {1, 37, 128, 1003, 20000};

TYPED_TEST(CChains, SameBitsOfMaskedChain) {
  for (const int columns : lengths) {
    Operands<TypeParam, float> o(columns);
    const auto chain = ks::scale(0.37) | ks::mask(o.mask) | ks::causal(columns / 2) | ks::bias(o.bias) |
                       ks::temperature(o.temperature);
    same_bits<TypeParam, float>(
        "masked", o, chain,
        {step(KOKKOSSOFTMAX_SCALE, 0.37), step_of(KOKKOSSOFTMAX_MASK, {&o.c_mask}), causal_step(columns / 2),
         step_of(KOKKOSSOFTMAX_BIAS, {&o.c_bias}), step_of(KOKKOSSOFTMAX_TEMPERATURE, {&o.c_temperature})});
  }
}

// Factors in memory: one a column, broadcast, one for all; a sum after them is not fused with the product.
TYPED_TEST(CChains, SameBitsOfFactorsInMemory) {
  using Exec = TypeParam;
  for (const int columns : lengths) {
    Operands<Exec, float> o(columns);
    const Kokkos::View<double*, typename Exec::memory_space> one("one", 1);
    fill(one, 13);
    Described c_one(one);
    same_bits<Exec, float>(
        "factors", o,
        ks::scale(o.bias) | ks::bias(o.half_bias) | ks::scale(o.half_bias) | ks::scale(one) | ks::bias(one),
        {step_of(KOKKOSSOFTMAX_SCALE_BY, {&o.c_bias}), step_of(KOKKOSSOFTMAX_BIAS, {&o.c_half_bias}),
         step_of(KOKKOSSOFTMAX_SCALE_BY, {&o.c_half_bias}), step_of(KOKKOSSOFTMAX_SCALE_BY, {&c_one}),
         step_of(KOKKOSSOFTMAX_BIAS, {&c_one})});
  }
}

TYPED_TEST(CChains, SameBitsOfActivations) {
  for (const int columns : lengths) {
    Operands<TypeParam, float> o(columns);
    same_bits<TypeParam, float>("gelu", o, ks::bias(o.half_bias) | ks::gelu() | ks::bias(o.bias),
                                {step_of(KOKKOSSOFTMAX_BIAS, {&o.c_half_bias}), step(KOKKOSSOFTMAX_GELU_ERF),
                                 step_of(KOKKOSSOFTMAX_BIAS, {&o.c_bias})});
  }
}

TYPED_TEST(CChains, SameBitsOfBatchNorm) {
  for (const int columns : lengths) {
    Operands<TypeParam, ks::bhalf_t> o(columns);
    const auto chain = ks::gelu_tanh() | ks::batch_norm(o.mean, o.variance, o.gamma, o.beta, 1e-3) |
                       ks::relu() | ks::scale(1.7);
    const Steps steps{
        step(KOKKOSSOFTMAX_GELU_TANH),
        step_of(KOKKOSSOFTMAX_BATCH_NORM, {&o.c_mean, &o.c_variance, &o.c_gamma, &o.c_beta}, 1e-3),
        step(KOKKOSSOFTMAX_RELU), step(KOKKOSSOFTMAX_SCALE, 1.7)};
    same_bits<TypeParam, float>("batch_norm", o, chain, steps);
  }
}

TYPED_TEST(CChains, SameBitsInDouble) {
  for (const int columns : lengths) {
    Operands<TypeParam, double> o(columns);
    const auto chain = ks::scale(1 / 3.0) | ks::bias(o.double_bias) | ks::gelu() | ks::bias(o.half_bias);
    same_bits<TypeParam, double>(
        "double", o, chain,
        {step(KOKKOSSOFTMAX_SCALE, 1 / 3.0), step_of(KOKKOSSOFTMAX_BIAS, {&o.c_double_bias}),
         step(KOKKOSSOFTMAX_GELU_ERF), step_of(KOKKOSSOFTMAX_BIAS, {&o.c_half_bias})});
  }
}

// Along another axis the same chain goes through other kernels.
TYPED_TEST(CChains, SameBitsAlongOtherAxes) {
  using Exec = TypeParam;
  Operands<Exec, float> o(50);
  const Kokkos::View<float*, typename Exec::memory_space> six("six", 6);
  fill(six, 12);
  Described c_six(six);
  same_bits<Exec, float>("axis 1", o, ks::scale(-0.7) | ks::mask(o.mask) | ks::bias(six),
                         {step(KOKKOSSOFTMAX_SCALE, -0.7), step_of(KOKKOSSOFTMAX_MASK, {&o.c_mask}),
                          step_of(KOKKOSSOFTMAX_BIAS, {&c_six})},
                         1);
}

// Rows of one tile of columns, and of several, on CUDA more than can wait for each other.
template <class Exec, class T>
void same_bits_along_the_first_axis() {
  using Space = typename Exec::memory_space;
  for (const int columns : {7, 200, 300, 1100, 66001}) {
    if (columns > 10000 && std::is_same_v<Exec, Kokkos::DefaultHostExecutionSpace>) continue;
    const Kokkos::View<T**, Kokkos::LayoutRight, Space> x("x", columns, 70);
    const Kokkos::View<bool**, Kokkos::LayoutRight, Space> mask("mask", columns, 70);
    const Kokkos::View<float*, Space> temperature("temperature", 70);
    fill(x, 1, -4, 4, true);
    fill(mask, 2);
    fill(temperature, 3, 0.5, 2);
    Described cx(x), c_mask(mask), c_temperature(temperature);
    const auto divided = step_of(KOKKOSSOFTMAX_TEMPERATURE, {&c_temperature}),
               masked = step_of(KOKKOSSOFTMAX_MASK, {&c_mask}), one = step(KOKKOSSOFTMAX_SCALE, 1);
    // The last of these has no kernels of its own.
    for (const Steps& steps :
         {Steps{divided, masked}, Steps{masked, divided}, Steps{one, divided, masked, one}}) {
      for (const Call call : {softmax, log_softmax}) {
        const Kokkos::View<T**, Kokkos::LayoutRight, Space> y("y", columns, 70), z("z", columns, 70);
        call_cpp(call, Exec(), x, y, 0, ks::temperature(temperature) | ks::mask(mask));
        const std::string ran = ks::last_implementation();
        Described cz(z);
        ASSERT_EQ(call_c(call, cx, cz, 0, steps), KOKKOSSOFTMAX_OK) << kokkossoftmax_last_error();
        EXPECT_EQ(ran, kokkossoftmax_last_implementation());
        EXPECT_EQ(bytes_of(y), bytes_of(z)) << "columns " << columns << ", call " << call;
      }
    }
  }
}

TYPED_TEST(CChains, SameBitsAlongTheFirstAxis) {
  same_bits_along_the_first_axis<TypeParam, float>();
  same_bits_along_the_first_axis<TypeParam, ks::bhalf_t>();
}

// Some chains have kernels of their own. Two factors of 1 more and a chain has none, which changes no bits.
template <class Exec, class T>
void same_bits_without_kernels_of_its_own() {
  using View = Kokkos::View<T***, Kokkos::LayoutRight, typename Exec::memory_space>;
  for (const int columns : {1, 37, 128, 1003, 14001, 20000, 70001}) {
    Operands<Exec, T> o(columns);
    const Kokkos::View<T*, typename Exec::memory_space> bias("bias of T", columns);
    fill(bias, 14);
    Described c_bias(bias);
    const auto scale = step(KOKKOSSOFTMAX_SCALE, 0.37), causal = causal_step(columns / 2);
    const auto mask = step_of(KOKKOSSOFTMAX_MASK, {&o.c_mask});
    const auto of_t = step_of(KOKKOSSOFTMAX_BIAS, {&c_bias}),
               of_float = step_of(KOKKOSSOFTMAX_BIAS, {&o.c_bias});
    const auto temperature = step_of(KOKKOSSOFTMAX_TEMPERATURE, {&o.c_temperature});
    const Steps chains[] = {{scale},
                            {causal},
                            {causal, scale},
                            {mask},
                            {mask, scale, causal},
                            {of_t},
                            {scale, of_float},
                            {scale, of_t, mask},
                            {causal, scale, mask, of_float},
                            {of_t, scale},
                            {mask, mask},
                            {temperature},
                            {temperature, mask}};
    for (const Steps& chain : chains) {
      // Logits of 16 bits that are nothing but kept or dropped, or on CUDA have a bias of theirs and nothing
      // else, are summed in a way of their own: see below.
      const bool only_drops = std::all_of(chain.begin(), chain.end(), [](const kokkossoftmax_transform& one) {
        return one.kind == KOKKOSSOFTMAX_MASK || one.kind == KOKKOSSOFTMAX_CAUSAL;
      });
      const bool is_bias = !std::is_same_v<Exec, Kokkos::DefaultHostExecutionSpace> && chain.size() == 1 &&
                           chain[0].kind == KOKKOSSOFTMAX_BIAS;
      // So are those with a temperature, whose quotients are coarser besides: of 14001 columns that shows.
      const bool has_temperature = std::any_of(
          chain.begin(), chain.end(),
          [](const kokkossoftmax_transform& one) { return one.kind == KOKKOSSOFTMAX_TEMPERATURE; });
      const bool is_coarse =
          !std::is_same_v<Exec, Kokkos::DefaultHostExecutionSpace> && has_temperature && columns == 14001;
      if ((only_drops || is_bias || is_coarse) && sizeof(T) == 2) continue;
      Steps longer = chain;
      longer.insert(longer.end(), 2, step(KOKKOSSOFTMAX_SCALE, 1));
      for (const Call call : {softmax, log_softmax}) {
        const View y("y", o.x.layout()), z("z", o.x.layout());
        Described cx(o.x), cy(y), cz(z);
        ASSERT_EQ(call_c(call, cx, cy, 2, chain), KOKKOSSOFTMAX_OK) << kokkossoftmax_last_error();
        const std::string ran = kokkossoftmax_last_implementation();
        ASSERT_EQ(call_c(call, cx, cz, 2, longer), KOKKOSSOFTMAX_OK) << kokkossoftmax_last_error();
        EXPECT_EQ(ran, kokkossoftmax_last_implementation());
        EXPECT_EQ(bytes_of(y), bytes_of(z))
            << "columns " << columns << ", chain " << &chain - chains << ", call " << call << ", " << ran;
      }
    }
  }
}

TYPED_TEST(CChains, SameBitsWithoutKernelsOfItsOwn) {
  same_bits_without_kernels_of_its_own<TypeParam, float>();
  same_bits_without_kernels_of_its_own<TypeParam, double>();
  same_bits_without_kernels_of_its_own<TypeParam, ks::bhalf_t>();
}

// A causal mask that keeps everything changes no bits.
TYPED_TEST(CChains, SameBitsOfDroppedLogits) {
  for (const int columns : lengths) {
    Operands<TypeParam, ks::bhalf_t> o(columns);
    const auto mask = step_of(KOKKOSSOFTMAX_MASK, {&o.c_mask});
    same_bits<TypeParam, ks::bhalf_t>("mask", o, ks::mask(o.mask), {mask});
    same_bits<TypeParam, ks::bhalf_t>("mask and causal", o, ks::mask(o.mask), {mask, causal_step(columns)});
    same_bits<TypeParam, ks::bhalf_t>("causal and mask", o, ks::mask(o.mask), {causal_step(columns), mask});
  }
}

// In either order: what a mask drops stays dropped.
template <class Exec, class T>
void same_bits_of_temperature_and_mask() {
  for (const int columns : {1, 37, 1003, 20000, 70001}) {
    Operands<Exec, T> o(columns);
    const auto temperature = step_of(KOKKOSSOFTMAX_TEMPERATURE, {&o.c_temperature}),
               mask = step_of(KOKKOSSOFTMAX_MASK, {&o.c_mask});
    same_bits<Exec, T>("temperature and mask", o, ks::temperature(o.temperature) | ks::mask(o.mask),
                       {temperature, mask});
    same_bits<Exec, T>("mask and temperature", o, ks::mask(o.mask) | ks::temperature(o.temperature),
                       {mask, temperature});
  }
}

TYPED_TEST(CChains, SameBitsOfTemperatureAndMask) {
  same_bits_of_temperature_and_mask<TypeParam, float>();
  same_bits_of_temperature_and_mask<TypeParam, ks::bhalf_t>();
}

// Of logits whose rounded maximum is as good, and of larger ones.
TYPED_TEST(CChains, SameBitsOfBias) {
  using Exec = TypeParam;
  for (const int columns : {1, 37, 1003, 20000, 70001}) {
    Operands<Exec, ks::bhalf_t> o(columns);
    const Kokkos::View<ks::bhalf_t*, typename Exec::memory_space> bias("bias", columns);
    Described c_bias(bias);
    const auto step = step_of(KOKKOSSOFTMAX_BIAS, {&c_bias});
    fill(bias, 14);
    same_bits<Exec, ks::bhalf_t>("bias", o, ks::bias(bias), {step});
    Kokkos::deep_copy(bias, ks::bhalf_t(1000));
    same_bits<Exec, ks::bhalf_t>("large bias", o, ks::bias(bias), {step});
  }
}

// Whatever is in a chain, a row among many has the bits that it has among few, which on CUDA go through other
// kernels. Operands with a row for each and one for all, one after another, with a gap and off a boundary.
template <class Exec, class T>
void same_bits_among_many_rows(int rows, int columns, int gap) {
  using Space = typename Exec::memory_space;
  constexpr int few = 3;
  const auto matrix = [&]<class S>(const S&, int seed, bool special = false) {
    const Kokkos::View<S**, Kokkos::LayoutRight, Space> whole("whole", rows, columns + gap);
    fill(whole, seed, -3, 3, special);
    return Kokkos::subview(whole, Kokkos::ALL, std::pair(gap / 2, gap / 2 + columns));
  };
  const auto x = matrix(T(), 1, true);
  const auto mask = matrix(bool(), 2);
  const auto bias = matrix(T(), 3);
  const auto factors = matrix(float(), 4);
  const Kokkos::View<float*, Space> bias_row("bias", columns), variance("variance", columns),
      temperature("temperature", rows);
  const Kokkos::View<ks::half_t*, Space> factor_row("factors", columns);
  fill(bias_row, 5);
  fill(variance, 6, 0.1, 2);
  fill(temperature, 7, 0.5, 2);
  fill(factor_row, 8);
  const auto results = [&](bool many) {
    const auto rows_of = [&](const auto& all) {
      return Described(Kokkos::subview(all, std::pair(0, many ? rows : few), Kokkos::ALL));
    };
    Described cx = rows_of(x), c_mask = rows_of(mask), c_bias = rows_of(bias), c_factors = rows_of(factors);
    Described c_bias_row(bias_row), c_variance(variance), c_factor_row(factor_row),
        c_temperature(Kokkos::subview(temperature, std::pair(0, many ? rows : few)));
    const auto relu = step(KOKKOSSOFTMAX_RELU), gelu = step(KOKKOSSOFTMAX_GELU_ERF),
               tanh = step(KOKKOSSOFTMAX_GELU_TANH), masked = step_of(KOKKOSSOFTMAX_MASK, {&c_mask}),
               biased = step_of(KOKKOSSOFTMAX_BIAS, {&c_bias}),
               multiplied = step_of(KOKKOSSOFTMAX_SCALE_BY, {&c_factors}),
               row_biased = step_of(KOKKOSSOFTMAX_BIAS, {&c_bias_row}),
               row_multiplied = step_of(KOKKOSSOFTMAX_SCALE_BY, {&c_factor_row});
    const auto normalised =
        step_of(KOKKOSSOFTMAX_BATCH_NORM, {&c_bias_row, &c_variance, &c_factor_row, &c_bias_row}, 1e-3);
    const Steps chains[] = {
        {relu},
        {row_biased},
        {gelu, biased},
        {row_biased, tanh},
        {multiplied, masked},
        {row_multiplied, row_biased, relu},
        {biased, masked, gelu, row_multiplied},
        {normalised, masked},
        {step_of(KOKKOSSOFTMAX_TEMPERATURE, {&c_temperature}), causal_step(columns / 2), relu}};
    std::vector<std::vector<unsigned char>> bytes;
    for (const Steps& chain : chains) {
      for (const Call call : {softmax, log_softmax, logsumexp}) {
        const int outputs = call == logsumexp ? 1 : columns;
        const Kokkos::View<T**, Kokkos::LayoutRight, Space> y("y", many ? rows : few, outputs);
        Described cy(y);
        if (call == logsumexp) cy->rank = 1;
        EXPECT_EQ(call_c(call, cx, cy, 1, chain), KOKKOSSOFTMAX_OK) << kokkossoftmax_last_error();
        if (!std::is_same_v<Exec, Kokkos::DefaultHostExecutionSpace> && columns > 16384) {
          EXPECT_STREQ(kokkossoftmax_last_implementation(), many ? "grid_pipelined_rows" : "split_rows");
        }
        bytes.push_back(bytes_of(Kokkos::subview(y, std::pair(0, few), Kokkos::ALL)));
      }
    }
    return bytes;
  };
  const auto among_many = results(true), alone = results(false);
  for (std::size_t i = 0; i < alone.size(); ++i) {
    EXPECT_EQ(among_many[i], alone[i]) << "chain " << i / 3 << ", call " << i % 3 << ", columns " << columns;
  }
}

TYPED_TEST(CChains, SameBitsAmongManyRows) {
  for (const int columns : {37, 600, 1001}) {
    same_bits_among_many_rows<TypeParam, float>(1000, columns, 0);
    same_bits_among_many_rows<TypeParam, ks::bhalf_t>(1000, columns, 0);
    same_bits_among_many_rows<TypeParam, ks::bhalf_t>(1000, columns, 3);
  }
}

// (So many of float that on a device rows share a single operand, for which 16 times the multiprocessors'
// slices are needed; a host has no patience for these.)
TYPED_TEST(CChains, SameBitsAmongManyRowsInSlices) {
  const bool host = std::is_same_v<TypeParam, Kokkos::DefaultHostExecutionSpace>;
  for (const int gap : {0, 3}) {
    same_bits_among_many_rows<TypeParam, float>(200, 20001, gap);
    same_bits_among_many_rows<TypeParam, float>(host ? 100 : 300, 65536, gap);
    same_bits_among_many_rows<TypeParam, ks::bhalf_t>(200, 40001, gap);
    same_bits_among_many_rows<TypeParam, ks::bhalf_t>(100, 65536, gap);
    same_bits_among_many_rows<TypeParam, double>(100, 20001, gap);
  }
}

TYPED_TEST(CChains, SeveralThreads) {
  using Exec = TypeParam;
  const Kokkos::View<float**, Kokkos::LayoutRight, typename Exec::memory_space> x("x", 20, 3000),
      y("y", 20, 3000);
  fill(x, 8);
  ks::softmax(Exec(), x, y, ks::scale(0.5));
  Kokkos::fence();
  const auto expected = bytes_of(y);
  std::vector<std::thread> threads;
  std::vector<int> failures(3, 0);
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      const Kokkos::View<float**, Kokkos::LayoutRight, typename Exec::memory_space> mine("mine", 20, 3000);
      Described cx(x), cm(mine);
      const Steps steps{step(KOKKOSSOFTMAX_SCALE, 0.5)};
      for (int i = 0; i < 20; ++i) {
        if (call_c(softmax, cx, cm, -1, steps) != KOKKOSSOFTMAX_OK) ++failures[t];
        if (bytes_of(mine) != expected) ++failures[t];
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(failures, std::vector<int>(3, 0));
}

}  // namespace
