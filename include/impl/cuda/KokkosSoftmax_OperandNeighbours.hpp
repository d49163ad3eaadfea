// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Values of an operand for neighbouring columns, in the registers of a thread: from shared memory in vectors
/// that begin at boundaries, wherever the operand does.

#ifndef KOKKOSSOFTMAX_OPERANDNEIGHBOURS_HPP
#define KOKKOSSOFTMAX_OPERANDNEIGHBOURS_HPP

#include <KokkosSoftmax_Transforms.hpp>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace KokkosSoftmax::impl {

/// Makes of the words that begin at a boundary of `boundary` bytes those that begin `bytes`, a multiple of
/// `unit` below that, behind it: `count` of them.
template <int boundary, int unit, int count, int available>
__device__ __forceinline__ void shift_words(unsigned (&word)[available], int bytes) {
  static_assert(available >= count + boundary / 4);
  if constexpr (boundary > 8) {
#pragma unroll
    for (int i = 0; i < count + 2; ++i) word[i] = bytes & 8 ? word[i + 2] : word[i];
  }
  if constexpr (unit < 8) {
#pragma unroll
    for (int i = 0; i < count + 1; ++i) word[i] = bytes & 4 ? word[i + 1] : word[i];
  }
  if constexpr (unit < 4) {
#pragma unroll
    for (int i = 0; i < count; ++i) word[i] = __funnelshift_r(word[i], word[i + 1], 8 * (bytes & (4 - unit)));
  }
}

/// Values of an operand for `width` neighbours: those, whatever column they are asked for.
template <class T, int width>
struct NeighboursInRegisters {
  static constexpr bool takes_any_column = true;
  static constexpr int bytes = bytes_of_neighbours<width, T>;  ///< of a vector of memory
  static constexpr int of_vector = bytes / static_cast<int>(sizeof(T)), vectors = width / of_vector,
                       words_of_vector = bytes / 4;
  unsigned word[vectors * words_of_vector];

  template <class Acc>
  __device__ void neighbours(Acc (&to)[width]) const {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      if constexpr (is_16_bit_v<T>) {
        to[i] = i % 2 == 0 ? low_of_pair<T>(word[i / 2]) : high_of_pair<T>(word[i / 2]);
      } else {
        to[i] = load_as<Acc>(value(i));
      }
    }
  }
  __device__ void keeps_neighbours(bool (&kept)[width]) const {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      if constexpr (sizeof(T) == 1) {
        kept[i] = kept[i] && (word[i / 4] & 0xffu << 8 * (i % 4)) != 0;
      } else {
        kept[i] = kept[i] && static_cast<bool>(value(i));
      }
    }
  }
  __device__ T value(int i) const {
    T result;
    memcpy(&result, reinterpret_cast<const char*>(word) + i * sizeof(T), sizeof(T));
    return result;
  }

  /// Bytes around an operand that `read` may reach, from any vector with a column of the row on.
  static constexpr int bytes_around = ((width - 1) * static_cast<int>(sizeof(T)) + bytes + 15) / 16 * 16;

  /// From column `first` on, where the operand has_neighbours, or, `shifted`, begins anywhere. From shared
  /// memory.
  template <bool shifted>
  __device__ static NeighboursInRegisters read(const T* data, int first) {
    const T* at = data + first;
    const auto behind = static_cast<int>(reinterpret_cast<std::uintptr_t>(at) % bytes);
    if constexpr (shifted) at -= behind / static_cast<int>(sizeof(T));
    constexpr int count = vectors * words_of_vector;
    unsigned words[count + words_of_vector];
#pragma unroll
    for (int v = 0; v < vectors + (shifted ? 1 : 0); ++v) {
      using Vector = std::conditional_t<bytes == 16, uint4, uint2>;
      const Vector* const from = reinterpret_cast<const Vector*>(at) + v;
      __builtin_assume(__isShared(from));
      const Vector vector = *from;
      words[v * words_of_vector] = vector.x;
      words[v * words_of_vector + 1] = vector.y;
      if constexpr (bytes == 16) {
        words[v * words_of_vector + 2] = vector.z;
        words[v * words_of_vector + 3] = vector.w;
      }
    }
    if constexpr (shifted) shift_words<bytes, static_cast<int>(sizeof(T)), count>(words, behind);
    NeighboursInRegisters result;
#pragma unroll
    for (int i = 0; i < count; ++i) result.word[i] = words[i];
    return result;
  }

  /// Element by element, of columns of the row; others are 0.
  template <class Operand>
  __device__ static NeighboursInRegisters elements(const Operand& operand, int first, int columns) {
    T value[width];
#pragma unroll
    for (int i = 0; i < width; ++i) {
      value[i] = T(0);
      if (first + i >= 0 && first + i < columns) value[i] = operand(first + i);
    }
    NeighboursInRegisters result;
    static_assert(sizeof(result.word) == sizeof(value));
    memcpy(result.word, value, sizeof(value));
    return result;
  }
};

}  // namespace KokkosSoftmax::impl

#endif
