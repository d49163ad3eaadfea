// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Operands of any layout with a known pattern in every byte that belongs to no element.
#ifndef KOKKOSSOFTMAX_TESTS_BUFFERS_HPP
#define KOKKOSSOFTMAX_TESTS_BUFFERS_HPP

#include <Kokkos_Core.hpp>

#include <cstring>
#include <utility>
#include <vector>

#include "../reference/reference.hpp"
#include "impl/KokkosSoftmax_Scalars.hpp"

namespace tests {

using KokkosSoftmax::bhalf_t;
using KokkosSoftmax::half_t;
using reference::Layout;
using reference::Scalar;

template <class T>
struct ScalarOf;
template <>
struct ScalarOf<float> {
  static constexpr Scalar value = Scalar::float32;
};
template <>
struct ScalarOf<double> {
  static constexpr Scalar value = Scalar::float64;
};
template <>
struct ScalarOf<half_t> {
  static constexpr Scalar value = Scalar::float16;
};
template <>
struct ScalarOf<bhalf_t> {
  static constexpr Scalar value = Scalar::bfloat16;
};
template <>
struct ScalarOf<bool> {
  static constexpr Scalar value = Scalar::boolean;
};
template <class T>
inline constexpr Scalar scalar_of = ScalarOf<std::remove_const_t<T>>::value;

template <class T, int rank>
struct DataType {
  using type = typename DataType<T, rank - 1>::type*;
};
template <class T>
struct DataType<T, 0> {
  using type = T;
};

template <class T, int rank, class Space>
using StridedView = Kokkos::View<typename DataType<T, rank>::type, Kokkos::LayoutStride,
                                 typename Space::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;

inline Kokkos::LayoutStride kokkos_layout(const Layout& layout) {
  Kokkos::LayoutStride result;
  for (int d = 0; d < layout.rank(); ++d) {
    result.dimension[d] = layout.extents[d];
    result.stride[d] = layout.strides[d];
  }
  return result;
}

// The layout of a view that somebody else made.
template <class View>
Layout layout_of(const View& view, int rank) {
  Layout layout;
  for (int d = 0; d < rank; ++d) {
    layout.extents.push_back(view.extent(d));
    layout.strides.push_back(view.stride(d));
  }
  return layout;
}

// Memory of a space for one operand, with a copy on the host, and bytes before and after that nobody may
// touch.
template <class Space>
class Buffer {
 public:
  static constexpr unsigned char untouched = 0xA5;
  static constexpr std::size_t guard = 256;  // bytes; keeps the alignment of the allocation

  // `special_around`: NaN and +inf by turns, or true, in all that belongs to no element.
  Buffer(Scalar scalar, Layout layout, const std::vector<double>* values = nullptr,
         bool special_around = false)
      : scalar_(scalar),
        layout_(std::move(layout)),
        width_(reference::size_of(scalar)),
        host_(2 * guard + layout_.span() * width_, untouched),
        device_(Kokkos::view_alloc(Kokkos::WithoutInitializing, "test operand"), host_.size()) {
    if (special_around) {
      for (std::size_t at = 0; at < host_.size(); at += width_)
        reference::encode(scalar_, at / width_ % 2 ? reference::infinity : reference::nan, host_.data() + at);
    }
    if (values) fill(*values);
    upload();
  }

  const Layout& layout() const { return layout_; }
  Scalar scalar() const { return scalar_; }
  const unsigned char* host() const { return host_.data() + guard; }
  unsigned char* host() { return host_.data() + guard; }
  void* device() const { return device_.data() + guard; }

  // The values in the order of their indices, the last dimension the fastest, rounded to the type.
  void fill(const std::vector<double>& values) {
    std::size_t next = 0;
    each_element([&](std::size_t at) { reference::encode(scalar_, values[next++], host() + at); });
  }
  std::vector<double> values() const {
    std::vector<double> result;
    result.reserve(layout_.size());
    each_element([&](std::size_t at) { result.push_back(reference::decode(scalar_, host() + at)); });
    return result;
  }

  void upload() {
    Kokkos::deep_copy(device_, HostBytes(host_.data(), host_.size()));
    uploaded_ = host_;
  }
  void download() { Kokkos::deep_copy(HostBytes(host_.data(), host_.size()), device_); }

  // Both look at what download() brought.
  bool unchanged() const { return host_ == uploaded_; }
  bool padding_untouched() const {
    std::vector<unsigned char> rest = host_, before = uploaded_;
    each_element([&](std::size_t at) {
      std::memset(rest.data() + guard + at, 0, width_);
      std::memset(before.data() + guard + at, 0, width_);
    });
    return rest == before;
  }

  template <class T, int rank>
  StridedView<T, rank, Space> view() const {
    return StridedView<T, rank, Space>(static_cast<T*>(device()) + layout_.offset, kokkos_layout(layout_));
  }

 private:
  using HostBytes = Kokkos::View<unsigned char*, Kokkos::HostSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;

  template <class Visit>
  void each_element(Visit visit) const {
    if (layout_.size() == 0) return;
    const int rank = layout_.rank();
    std::vector<std::int64_t> index(rank, 0);
    std::int64_t at = layout_.offset;
    while (true) {
      visit(static_cast<std::size_t>(at) * width_);
      int d = rank - 1;
      for (; d >= 0; --d) {
        at += layout_.strides[d];
        if (++index[d] < layout_.extents[d]) break;
        at -= layout_.strides[d] * layout_.extents[d];
        index[d] = 0;
      }
      if (d < 0) return;
    }
  }

  Scalar scalar_;
  Layout layout_;
  std::size_t width_;
  std::vector<unsigned char> host_, uploaded_;
  Kokkos::View<unsigned char*, typename Space::memory_space> device_;
};

}  // namespace tests

#endif
