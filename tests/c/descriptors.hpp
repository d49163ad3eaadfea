// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Views, and the steps of chains, as the C interface takes them.
#ifndef KOKKOSSOFTMAX_TESTS_DESCRIPTORS_HPP
#define KOKKOSSOFTMAX_TESTS_DESCRIPTORS_HPP

#include <KokkosSoftmax.h>
#include <gtest/gtest.h>

#include <KokkosSoftmax.hpp>
#include <array>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "../support/random.hpp"

// A call fails with a message that names the function and holds `part`.
#define EXPECT_REFUSED(expected, part, call)                 \
  do {                                                       \
    EXPECT_EQ(call, expected) << kokkossoftmax_last_error(); \
    const std::string text = kokkossoftmax_last_error();     \
    EXPECT_NE(text.find(part), std::string::npos) << text;   \
    EXPECT_EQ(text.rfind("kokkossoftmax_", 0), 0u) << text;  \
  } while (false)
#define INVALID(part, call) EXPECT_REFUSED(KOKKOSSOFTMAX_INVALID_ARGUMENT, part, call)
#define UNSUPPORTED(part, call) EXPECT_REFUSED(KOKKOSSOFTMAX_UNSUPPORTED, part, call)

namespace tests {

namespace ks = KokkosSoftmax;

template <class T>
constexpr std::int32_t code_of() {
  using S = std::remove_const_t<T>;
  if (std::is_same_v<S, float>) return KOKKOSSOFTMAX_FLOAT;
  if (std::is_same_v<S, double>) return KOKKOSSOFTMAX_DOUBLE;
  if (std::is_same_v<S, ks::half_t>) return KOKKOSSOFTMAX_HALF;
  if (std::is_same_v<S, ks::bhalf_t>) return KOKKOSSOFTMAX_BFLOAT16;
  return KOKKOSSOFTMAX_BOOL;
}

template <class Exec>
inline constexpr bool is_host =
    Kokkos::SpaceAccessibility<Kokkos::HostSpace, typename Exec::memory_space>::accessible;

// A descriptor that keeps what it points to.
class Described {
 public:
  template <class View>
  explicit Described(const View& view) {
    array_.data = const_cast<void*>(static_cast<const void*>(view.data()));
    array_.scalar = code_of<typename View::value_type>();
    array_.memory = is_host<typename View::execution_space> ? KOKKOSSOFTMAX_HOST : KOKKOSSOFTMAX_CUDA;
    array_.rank = static_cast<std::int32_t>(view.rank());
    for (std::int32_t d = 0; d < array_.rank; ++d) {  // a rank of the type's may be 0, which nvcc warns of
      extents_[d] = static_cast<std::int64_t>(view.extent(d));
      strides_[d] = static_cast<std::int64_t>(view.stride(d));
    }
  }
  kokkossoftmax_array* get() {
    array_.extents = extents_.data();
    array_.strides = strides_.data();
    return &array_;
  }
  operator const kokkossoftmax_array*() { return get(); }
  kokkossoftmax_array* operator->() { return get(); }
  std::array<std::int64_t, 8>& extents() { return extents_; }
  std::array<std::int64_t, 8>& strides() { return strides_; }

 private:
  kokkossoftmax_array array_ = KOKKOSSOFTMAX_ARRAY_INIT;
  std::array<std::int64_t, 8> extents_{}, strides_{};
};

inline kokkossoftmax_transform step(std::int32_t kind, double number = 0) {
  kokkossoftmax_transform t = KOKKOSSOFTMAX_TRANSFORM_INIT;
  t.kind = kind;
  t.number = number;
  return t;
}
inline kokkossoftmax_transform step_of(std::int32_t kind, std::initializer_list<Described*> operands,
                                       double number = 0) {
  kokkossoftmax_transform t = step(kind, number);
  int o = 0;
  for (Described* operand : operands) t.operands[o++] = operand ? operand->get() : nullptr;
  return t;
}
inline kokkossoftmax_transform causal_step(std::int64_t offset) {
  kokkossoftmax_transform t = step(KOKKOSSOFTMAX_CAUSAL);
  t.offset = offset;
  return t;
}

using Steps = std::vector<kokkossoftmax_transform>;

// Fills a view, whatever its memory, in the order of its elements in memory; -inf and NaN here and there if
// `special`.
template <class View>
void fill(const View& view, std::uint64_t seed, double from = -4, double to = 4, bool special = false) {
  using T = typename View::non_const_value_type;
  const std::size_t count = view.span();
  std::vector<T> values(count);
  Random random(seed);
  for (std::size_t i = 0; i < count; ++i) {
    double value = random.uniform(from, to);
    if (special && random.below(37) == 0) value = -std::numeric_limits<double>::infinity();
    if constexpr (std::is_same_v<T, bool>) {
      values[i] = value > 0;
    } else {
      values[i] = static_cast<T>(static_cast<float>(value));
    }
  }
  using Bytes = Kokkos::View<char*, typename View::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  using HostBytes = Kokkos::View<const char*, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  std::vector<char> bytes(count * sizeof(T));
  for (std::size_t i = 0; i < count; ++i) {
    const T one = values[i];
    std::memcpy(bytes.data() + i * sizeof(T), &one, sizeof(T));
  }
  Kokkos::deep_copy(Bytes(reinterpret_cast<char*>(view.data()), bytes.size()),
                    HostBytes(bytes.data(), bytes.size()));
}

template <class View>
std::vector<unsigned char> bytes_of(const View& view) {
  std::vector<unsigned char> bytes(view.span() * sizeof(typename View::value_type));
  using Bytes =
      Kokkos::View<const char*, typename View::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  using HostBytes = Kokkos::View<char*, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  Kokkos::deep_copy(HostBytes(reinterpret_cast<char*>(bytes.data()), bytes.size()),
                    Bytes(reinterpret_cast<const char*>(view.data()), bytes.size()));
  return bytes;
}

// Every backend for which there are compiled kernels.
#define KOKKOSSOFTMAX_TEST_SPACE(EXEC) EXEC,
struct End {};
template <class List, class... Spaces>
struct Collect;
template <class... Kept>
struct Collect<testing::Types<Kept...>, End> {
  using type = testing::Types<Kept...>;
};
template <class... Kept, class First, class... Rest>
struct Collect<testing::Types<Kept...>, First, Rest...> {
  using type = typename Collect<testing::Types<Kept..., First>, Rest...>::type;
};
using Backends = Collect < testing::Types<>, KOKKOSSOFTMAX_FOR_EACH_BACKEND(KOKKOSSOFTMAX_TEST_SPACE)
End > ::type;
#define EXPECT_OK(call) EXPECT_EQ(call, KOKKOSSOFTMAX_OK) << kokkossoftmax_last_error()

enum Call { softmax, log_softmax, logsumexp };

template <class Exec, class X, class Y, class T>
void call_cpp(Call which, const Exec& exec, const X& x, const Y& y, int axis, const T& transform) {
  if (which == softmax) {
    ks::softmax(exec, x, y, ks::axis(axis), transform);
  } else if (which == log_softmax) {
    ks::log_softmax(exec, x, y, ks::axis(axis), transform);
  }
  exec.fence();
}

inline kokkossoftmax_status call_c(Call which, Described& x, Described& y, int axis, const Steps& steps,
                                   const kokkossoftmax_execution* execution = nullptr) {
  const auto function = which == softmax       ? kokkossoftmax_softmax
                        : which == log_softmax ? kokkossoftmax_log_softmax
                                               : kokkossoftmax_logsumexp;
  const kokkossoftmax_status status = function(execution, x, y, axis, steps.data(), steps.size());
  if (status == KOKKOSSOFTMAX_OK) {
    EXPECT_OK(kokkossoftmax_synchronize(execution));
  }
  Kokkos::fence();
  return status;
}

// What the transforms below look at, for logits of (4, 6, columns).
template <class Exec, class T>
struct Operands {
  using Space = typename Exec::memory_space;
  Kokkos::View<T***, Kokkos::LayoutRight, Space> x;
  Kokkos::View<bool***, Kokkos::LayoutRight, Space> mask;
  Kokkos::View<float***, Kokkos::LayoutLeft, Space> bias;
  Kokkos::View<ks::half_t*, Space> half_bias;
  Kokkos::View<double*, Space> double_bias;
  Kokkos::View<float**, Kokkos::LayoutRight, Space> temperature;
  Kokkos::View<float*, Space> mean, gamma;
  Kokkos::View<double*, Space> variance;
  Kokkos::View<ks::bhalf_t*, Space> beta;
  Described c_mask, c_bias, c_half_bias, c_double_bias, c_temperature, c_mean, c_gamma, c_variance, c_beta;

  explicit Operands(int columns)
      : x("x", 4, 6, columns),
        mask("mask", 4, 1, columns),
        bias("bias", 1, 6, columns),
        half_bias("half_bias", columns),
        double_bias("double_bias", columns),
        temperature("temperature", 4, 6),
        mean("mean", columns),
        gamma("gamma", columns),
        variance("variance", columns),
        beta("beta", columns),
        c_mask(mask),
        c_bias(bias),
        c_half_bias(half_bias),
        c_double_bias(double_bias),
        c_temperature(temperature),
        c_mean(mean),
        c_gamma(gamma),
        c_variance(variance),
        c_beta(beta) {
    fill(x, 1, -6, 6, true);
    fill(mask, 2, -1, 3);
    fill(bias, 3);
    fill(half_bias, 4);
    fill(double_bias, 5);
    fill(temperature, 6, 0.5, 2);
    fill(mean, 7);
    fill(gamma, 8);
    fill(variance, 9, 0.1, 2);
    fill(beta, 10);
  }
};

}  // namespace tests

#endif
