// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Heads through KokkosBlas::gemm, on every backend.

#ifndef KOKKOSSOFTMAX_BLASLINEAR_HPP
#define KOKKOSSOFTMAX_BLASLINEAR_HPP

#include <impl/portable/KokkosSoftmax_GemmThenRows.hpp>

#include <KokkosBlas3_gemm.hpp>

#include <mutex>

namespace KokkosSoftmax::impl {

/// KokkosBlas::gemm in the one form in which it does what it says: three unmanaged Views of LayoutLeft and
/// flags for transposition. (A mixed triple of layouts or a LayoutStride leaves BLAS without a word; with a
/// LayoutRight of one padded column it drops the stride.) K = 0 does not get here: it would run on the
/// default instance.
struct KokkosBlasGemm {
  static constexpr const char* name = "blas_linear";

  template <class Exec, class Problem>
  static constexpr bool supports = true;

  /// 16-bit operands, and operands of two types, are multiplied in the accumulator's type.
  template <class X, class W, class Acc>
  using Operand = Acc;

  /// On devices Kokkos Kernels takes a kernel with atomics for small products.
  template <class Exec>
  static constexpr bool avoids_small_dot_products = !runs_on_host_v<Exec>;

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec& exec, const Problem&) {
    // Kokkos Kernels' handle of a vendor's BLAS is one for the process and is not made for captures.
    if (Capture<Exec>::id(exec) != 0) return "KokkosBlas::gemm cannot be captured";
    return {};
  }

  template <class Exec, class T>
  static void multiply(const Exec& exec, Precision, const BlasMatrix<const T>& x,
                       const BlasMatrix<const T>& w, const BlasMatrix<T>& logits) {
    // A LayoutLeft result: the logits themselves, or, when their rows are contiguous, their transpose
    // W X^T.
    const BlasMatrix<const T>& left = logits.columns_contiguous ? w : x;
    const BlasMatrix<const T>& right = logits.columns_contiguous ? x : w;
    const auto a = left_layout<Exec>(left);
    const auto b = left_layout<Exec>(right);
    const auto c = left_layout<Exec>(logits);
    // The handle of a vendor's BLAS is shared by all host threads.
    std::unique_lock<std::mutex> lock;
    if constexpr (!runs_on_host_v<Exec>) lock = std::unique_lock(handle_mutex());
    KokkosBlas::gemm(exec, left.columns_contiguous ? "T" : "N", right.columns_contiguous ? "N" : "T", T(1), a,
                     b, T(0), c);
  }

  template <class Exec>
  static void reserve(const Exec&) {}

 private:
  static std::mutex& handle_mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }

  /// The matrix, or its transpose when that is what lies in memory column by column.
  template <class Exec, class T>
  static auto left_layout(const BlasMatrix<T>& m) {
    using View = Kokkos::View<T**, Kokkos::LayoutLeft, typename Exec::device_type,
                              Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
    const auto fast = static_cast<std::size_t>(m.columns_contiguous ? m.columns : m.rows);
    const auto slow = static_cast<std::size_t>(m.columns_contiguous ? m.rows : m.columns);
    const View padded(m.data, static_cast<std::size_t>(m.leading), slow);
    return View(Kokkos::subview(padded, std::pair<std::size_t, std::size_t>(0, fast), Kokkos::ALL));
  }
};

using BlasLinear = GemmThenRows<KokkosBlasGemm>;

}  // namespace KokkosSoftmax::impl

#endif
