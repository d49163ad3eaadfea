// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Views, and the steps of chains, as the C interface takes them.
#ifndef KOKKOSSOFTMAX_TESTS_DESCRIPTORS_HPP
#define KOKKOSSOFTMAX_TESTS_DESCRIPTORS_HPP

#include <KokkosSoftmax.h>

#include <KokkosSoftmax.hpp>
#include <array>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "../support/random.hpp"

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
    for (std::size_t d = 0; d < view.rank(); ++d) {
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

}  // namespace tests

#endif
