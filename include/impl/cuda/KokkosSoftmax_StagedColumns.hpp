// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Columns of a row and of its operands in shared memory, to which they come in vectors of 16 bytes, wherever
/// they begin, and which gives single elements to neighbouring threads as fast as vectors.

#ifndef KOKKOSSOFTMAX_STAGEDCOLUMNS_HPP
#define KOKKOSSOFTMAX_STAGEDCOLUMNS_HPP

#include <KokkosSoftmax_Transforms.hpp>
#include <impl/cuda/KokkosSoftmax_Ptx.hpp>

#include <type_traits>

namespace KokkosSoftmax::impl {

/// In shared memory they lie between boundaries of 16 bytes as they do in global memory.
template <class T>
struct ColumnsInShared {
  const T* data;
  __device__ const T& operator()(index_type column) const {
    __builtin_assume(__isShared(data));
    return data[static_cast<int>(column)];
  }
  template <int width>
  __device__ bool has_neighbours(index_type first) const {
    return reinterpret_cast<std::uintptr_t>(data + first) % bytes_of_neighbours<width, T> == 0;
  }
};

/// The shared memory that so many columns take, wherever they begin.
template <class T>
KOKKOS_FORCEINLINE_FUNCTION constexpr index_type bytes_of_staged(index_type columns) {
  return (columns * static_cast<index_type>(sizeof(T)) + 15) / 16 * 16 + 16;
}

/// Copies the first `end` columns to shared memory, where they are after cp_async_wait_all and a barrier.
/// Their first vector may begin before them: before a row lies its allocation, which begins at a boundary.
/// Nothing is read from `end_of_memory` on. `by_l1`: rows beside this one have the same columns.
/// (Asynchronous copies go past L1: a bias for all rows made 2047 columns of bfloat16 half as fast on one
/// H200.)
template <class T, class Threads>
__device__ ColumnsInShared<T> stage_columns(const T* from, int end, const void* end_of_memory, char* to,
                                            const Threads& threads, bool by_l1) {
  const auto before = static_cast<int>(reinterpret_cast<std::uintptr_t>(from) % 16);
  const char* const begin = reinterpret_cast<const char*>(from) - before;
  const int bytes = end > 0 ? before + end * static_cast<int>(sizeof(T)) : 0;
  const int whole = bytes / 16, step = threads.size() * 16;
  const char* vector = begin + threads.rank() * 16;
  if (by_l1) {
    char* vector_to = to + threads.rank() * 16;
#pragma unroll 4
    for (int left = whole - threads.rank(); left > 0; left -= threads.size()) {
      *reinterpret_cast<uint4*>(vector_to) = __ldg(reinterpret_cast<const uint4*>(vector));
      vector += step;
      vector_to += step;
    }
  } else {
    std::uint32_t vector_to = shared_address(to) + threads.rank() * 16;
#pragma unroll 1
    for (int left = whole - threads.rank(); left > 0; left -= threads.size()) {
      cp_async_16(vector_to, vector);
      vector += step;
      vector_to += step;
    }
  }
  if (bytes % 16 != 0) {
    const char* const last = begin + whole * 16;
    if (last + 16 <= end_of_memory) {
      if (threads.rank() == 0) cp_async_16(shared_address(to) + whole * 16, last);
    } else {
      // (For all rows, and not the last one alone, 4097 columns of bfloat16 with a mask have 0.75 of a copy
      // on one H200 for 0.93. An asynchronous copy of fewer bytes than 16 is one of 16 to memcheck.)
#pragma unroll 1
      for (int c = threads.rank(); c < bytes % 16 / static_cast<int>(sizeof(T)); c += threads.size())
        reinterpret_cast<T*>(to + whole * 16)[c] = reinterpret_cast<const T*>(last)[c];
    }
  }
  return {reinterpret_cast<const T*>(to + before)};
}

/// Copies so many columns to shared memory, where they begin anywhere, and are after a barrier.
template <class T, class Threads>
__device__ void stage_elements(const T* from, int columns, T* to, const Threads& threads) {
  __builtin_assume(__isShared(to));
#pragma unroll 4
  for (int c = threads.rank(); c < columns; c += threads.size()) to[c] = from[c];
}

}  // namespace KokkosSoftmax::impl

#endif
