// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The descriptors of the C interface as the library takes operands: what has extents, strides and a pointer
/// and is therefore a view to it, with a rank that is known at run time.

#ifndef KOKKOSSOFTMAX_CARRAY_HPP
#define KOKKOSSOFTMAX_CARRAY_HPP

#include <KokkosSoftmax.h>

#include <impl/KokkosSoftmax_Check.hpp>

namespace KokkosSoftmax::c {

/// The scalar codes of the C interface.
template <class T>
inline constexpr std::int32_t scalar_code = 0;
template <>
inline constexpr std::int32_t scalar_code<float> = KOKKOSSOFTMAX_FLOAT;
template <>
inline constexpr std::int32_t scalar_code<double> = KOKKOSSOFTMAX_DOUBLE;
template <>
inline constexpr std::int32_t scalar_code<half_t> = KOKKOSSOFTMAX_HALF;
template <>
inline constexpr std::int32_t scalar_code<bhalf_t> = KOKKOSSOFTMAX_BFLOAT16;
template <>
inline constexpr std::int32_t scalar_code<bool> = KOKKOSSOFTMAX_BOOL;

/// A checked descriptor: strides are always there.
struct Array {
  void* data = nullptr;
  std::int32_t scalar = 0;
  int rank = 0;
  index_type extent[impl::max_rank] = {};
  index_type stride[impl::max_rank] = {};
};

/// An Array of a known scalar, in the memory that Exec_ uses: what the library's templates take for a view.
template <class T, class Exec_>
class ArrayView {
 public:
  using value_type = T;
  using non_const_value_type = std::remove_const_t<T>;
  using execution_space = Exec_;
  using memory_space = typename Exec_::memory_space;

  explicit ArrayView(const Array& array) : array_(&array) {}

  T* data() const { return static_cast<T*>(array_->data); }
  std::size_t rank() const { return static_cast<std::size_t>(array_->rank); }
  std::size_t extent(std::size_t d) const { return static_cast<std::size_t>(array_->extent[d]); }
  std::size_t stride(std::size_t d) const { return static_cast<std::size_t>(array_->stride[d]); }

 private:
  const Array* array_;
};

}  // namespace KokkosSoftmax::c

#endif
