// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Run-time preconditions. The only place that throws for bad input; nothing is launched before all of it
/// passed.

#ifndef KOKKOSSOFTMAX_CHECK_HPP
#define KOKKOSSOFTMAX_CHECK_HPP

#include <impl/KokkosSoftmax_Scalars.hpp>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace KokkosSoftmax::impl {

inline constexpr int max_rank = 8;

[[noreturn]] inline void bad_argument(const std::string& function, const std::string& what) {
  throw std::invalid_argument("KokkosSoftmax::" + function + ": " + what);
}

/// Extents and strides of an operand, whatever its type: what checks and canonical forms are made from.
/// Strides below 0 come from the C interface alone.
struct Block {
  const char* data = nullptr;
  index_type scalar_bytes = 1;
  int rank = 0;
  index_type extent[max_rank] = {};
  index_type stride[max_rank] = {};  ///< in elements

  bool empty() const {
    return std::any_of(extent, extent + rank, [](index_type e) { return e == 0; });
  }
  index_type size() const {
    index_type product = 1;
    for (int d = 0; d < rank; ++d) product *= extent[d];
    return product;
  }
  std::string extents_text() const {
    std::string text = "(";
    for (int d = 0; d < rank; ++d) text += (d ? ", " : "") + std::to_string(extent[d]);
    return text + ")";
  }
};

template <class View>
Block block_of(const View& view) {
  Block block;
  block.data = reinterpret_cast<const char*>(view.data());
  block.scalar_bytes = sizeof(typename View::value_type);
  block.rank = static_cast<int>(view.rank());
  for (int d = 0; d < block.rank && d < max_rank;
       ++d) {  // the second bound is for the compiler: no view has more
    block.extent[d] = static_cast<index_type>(view.extent(d));
    block.stride[d] = static_cast<index_type>(view.stride(d));
  }
  return block;
}

/// Whether two blocks could share a byte: false only where it is provable. Peels off the dimension of the
/// largest stride, which must be the same in both; only a few of the distances between their slices bring
/// these near each other, and each of those is looked at in turn.
class OverlapTest {
 public:
  OverlapTest(const Block& a, const Block& b) : a_(sorted(a)), b_(sorted(b)) {}

  bool may_overlap() const {
    if (a_.count < 0 || b_.count < 0) return false;  // empty
    return may_overlap(b_.address - a_.address, 0, 0);
  }

 private:
  struct Sorted {
    std::intptr_t address = 0;
    index_type bytes = 1;
    int count = 0;  ///< dimensions; -1: empty
    index_type extent[max_rank] = {};
    index_type stride[max_rank] = {};  ///< in bytes, falling
  };

  static Sorted sorted(const Block& block) {
    Sorted s;
    s.address = reinterpret_cast<std::intptr_t>(block.data);
    s.bytes = block.scalar_bytes;
    if (block.empty()) {
      s.count = -1;
      return s;
    }
    for (int d = 0; d < block.rank; ++d) {
      if (block.extent[d] < 2 || block.stride[d] == 0) continue;
      index_type stride = block.stride[d] * block.scalar_bytes;
      if (stride < 0) {  // the same bytes from their other end
        s.address += (block.extent[d] - 1) * stride;
        stride = -stride;
      }
      int at = s.count++;
      for (; at > 0 && s.stride[at - 1] < stride; --at) {
        s.stride[at] = s.stride[at - 1];
        s.extent[at] = s.extent[at - 1];
      }
      s.stride[at] = stride;
      s.extent[at] = block.extent[d];
    }
    return s;
  }

  /// Bytes from the first to past the last of what is left from dimension `from` on.
  static index_type span(const Sorted& s, int from) {
    index_type bytes = s.bytes;
    for (int i = from; i < s.count; ++i) bytes += (s.extent[i] - 1) * s.stride[i];
    return bytes;
  }

  bool may_overlap(index_type delta, int i, int j) const {
    const index_type span_a = span(a_, i), span_b = span(b_, j);
    if (delta >= span_a || -delta >= span_b) return false;
    if (i == a_.count && j == b_.count) return true;
    const index_type stride_a = i < a_.count ? a_.stride[i] : 0;
    const index_type stride_b = j < b_.count ? b_.stride[j] : 0;
    const index_type stride = std::max(stride_a, stride_b);
    // A block without this stride takes part as one slice.
    const bool in_a = stride_a == stride, in_b = stride_b == stride;
    const index_type extent_a = in_a ? a_.extent[i] : 1, extent_b = in_b ? b_.extent[j] : 1;
    const int next_i = in_a ? i + 1 : i, next_j = in_b ? j + 1 : j;
    const index_type rest_a = span(a_, next_i), rest_b = span(b_, next_j);
    // Slice k of b lies delta + k stride after a slice of a, k counted from the slice of a: near ones only.
    const index_type first = std::max(-(extent_a - 1), ceil_div(-rest_b - delta + 1, stride));
    const index_type last = std::min(extent_b - 1, floor_div(rest_a - delta - 1, stride));
    if (last - first > 8) return true;  // not nested strides: nothing is provable this way
    for (index_type k = first; k <= last; ++k) {
      if (may_overlap(delta + k * stride, next_i, next_j)) return true;
    }
    return false;
  }

  static index_type floor_div(index_type a, index_type b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }
  static index_type ceil_div(index_type a, index_type b) { return -floor_div(-a, b); }

  Sorted a_, b_;
};

inline bool may_overlap(const Block& a, const Block& b) {
  return OverlapTest(a, b).may_overlap();
}

/// Same elements at the same places: what in place means.
inline bool same_elements(const Block& a, const Block& b) {
  if (a.data != b.data || a.scalar_bytes != b.scalar_bytes || a.rank != b.rank) return false;
  for (int d = 0; d < a.rank; ++d) {
    if (a.extent[d] != b.extent[d] || (a.extent[d] > 1 && a.stride[d] != b.stride[d])) return false;
  }
  return true;
}

/// Whether two indices of a block meet in one element (a stride of 0, or strides that interlock).
inline bool meets_itself(const Block& block) {
  if (block.empty()) return false;
  index_type extent[max_rank], stride[max_rank];
  int count = 0;
  for (int d = 0; d < block.rank; ++d) {
    if (block.extent[d] < 2) continue;
    const index_type distance = std::abs(block.stride[d]);
    int at = count++;
    for (; at > 0 && stride[at - 1] > distance; --at) {
      stride[at] = stride[at - 1];
      extent[at] = extent[at - 1];
    }
    stride[at] = distance;
    extent[at] = block.extent[d];
  }
  index_type reached = 1;
  for (int i = 0; i < count; ++i) {
    if (stride[i] < reached) return true;
    reached += (extent[i] - 1) * stride[i];
  }
  return false;
}

/// Whether a backend can reach a pointer at run time: null, or why not. Specialised by backends that can
/// tell.
template <class Exec>
struct Reach {
  static const char* refuse(const Exec&, const void*) { return nullptr; }
};

/// What every operand of a call is checked against. `output` is what the call writes.
struct CallContext {
  std::string function;  ///< as the user spells it, without the namespace
  Block output;
  const char* (*refuse_pointer)(const void* exec, const void* pointer) = nullptr;
  const void* exec = nullptr;

  template <class Exec>
  static CallContext of(const char* function, const Exec& exec, const Block& output) {
    CallContext context;
    context.function = function;
    context.output = output;
    context.exec = &exec;
    context.refuse_pointer = [](const void* space, const void* pointer) {
      return Reach<Exec>::refuse(*static_cast<const Exec*>(space), pointer);
    };
    return context;
  }

  [[noreturn]] void fail(const std::string& what) const { bad_argument(function, what); }

  void check_reachable(const std::string& argument, const Block& block) const {
    if (block.empty()) return;
    if (!block.data) fail(argument + " of extents " + block.extents_text() + " has no memory (null pointer)");
    if (const char* why = refuse_pointer(exec, block.data)) {
      fail(argument + " of extents " + block.extents_text() +
           " cannot be reached by the execution space: " + why);
    }
  }

  /// An operand beside the input: reachable, and apart from the output.
  void check_operand(const std::string& argument, const Block& block) const {
    check_reachable(argument, block);
    if (may_overlap(output, block)) {
      fail("the output of extents " + output.extents_text() + " overlaps " + argument + " of extents " +
           block.extents_text());
    }
  }

  void check_output(const std::string& argument) const {
    check_reachable(argument, output);
    if (meets_itself(output)) {
      fail(argument + " of extents " + output.extents_text() +
           " writes one element more than once (its strides)");
    }
  }

  void check_input(const std::string& argument, const Block& input, bool in_place_allowed) const {
    check_reachable(argument, input);
    if (in_place_allowed && same_elements(input, output)) return;
    if (may_overlap(output, input)) {
      fail("the output of extents " + output.extents_text() + " overlaps " + argument + " of extents " +
           input.extents_text() + (in_place_allowed ? " without being the same elements" : ""));
    }
  }
};

}  // namespace KokkosSoftmax::impl

#endif
