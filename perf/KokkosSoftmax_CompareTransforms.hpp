// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#ifndef KOKKOSSOFTMAX_COMPARETRANSFORMS_HPP
#define KOKKOSSOFTMAX_COMPARETRANSFORMS_HPP

// The transforms of the comparison. Their kernels are compiled where a file adds them for a pair of scalars.
// A new one is a struct and a line at the end; its name tells the reference what to do.

#include "KokkosSoftmax_CompareRows.hpp"

namespace compare {

struct Scale {
  static constexpr const char* name = "scale";
  template <class Views>
  static auto of(const Views&) {
    return ks::scale(transform_factor);
  }
};

struct Temperature {
  static constexpr const char* name = "temperature";
  template <class Views>
  static auto of(const Views& views) {
    return ks::temperature(views.temperature);
  }
};

struct Causal {
  static constexpr const char* name = "causal";
  template <class Views>
  static auto of(const Views&) {
    return ks::causal();
  }
};

struct ScaleCausal {
  static constexpr const char* name = "scale_causal";
  template <class Views>
  static auto of(const Views&) {
    return ks::scale(transform_factor) | ks::causal();
  }
};

struct Mask {
  static constexpr const char* name = "mask";
  template <class Views>
  static auto of(const Views& views) {
    return ks::mask(views.mask);
  }
};

struct MaskRow {
  static constexpr const char* name = "mask_row";
  template <class Views>
  static auto of(const Views& views) {
    return ks::mask(views.mask_row);
  }
};

struct TemperatureMask {
  static constexpr const char* name = "temperature_mask";
  template <class Views>
  static auto of(const Views& views) {
    return ks::temperature(views.temperature) | ks::mask(views.mask);
  }
};

struct Bias {
  static constexpr const char* name = "bias";
  template <class Views>
  static auto of(const Views& views) {
    return ks::bias(views.bias);
  }
};

struct BiasRow {
  static constexpr const char* name = "bias_row";
  template <class Views>
  static auto of(const Views& views) {
    return ks::bias(views.bias_row);
  }
};

struct ScaleBiasMaskCausal {
  static constexpr const char* name = "scale_bias_mask_causal";
  template <class Views>
  static auto of(const Views& views) {
    return ks::scale(transform_factor) | ks::bias(views.bias) | ks::mask(views.mask) | ks::causal();
  }
};

struct Gelu {
  static constexpr const char* name = "gelu";
  template <class Views>
  static auto of(const Views&) {
    return ks::gelu();
  }
};

template <class Exec, class In, class Out, class... T>
void add_transform_kernels() {
  auto& kernels = transform_kernels();
  (kernels.emplace_back(Softmax::name, rows_kernel<Softmax, T, Exec, In, Out>()), ...);
  (kernels.emplace_back(LogSoftmax::name, rows_kernel<LogSoftmax, T, Exec, In, Out>()), ...);
  (kernels.emplace_back(LogSumExp::name, rows_kernel<LogSumExp, T, Exec, In, Out>()), ...);
}

// Of every backend.
template <class In, class Out>
bool add_all_transform_kernels() {
#define KOKKOSSOFTMAX_COMPARE_ADD(Exec)                                                        \
  add_transform_kernels<Exec, In, Out, Scale, Temperature, Causal, ScaleCausal, Mask, MaskRow, \
                        TemperatureMask, Bias, BiasRow, ScaleBiasMaskCausal, Gelu>();
  KOKKOSSOFTMAX_FOR_EACH_BACKEND(KOKKOSSOFTMAX_COMPARE_ADD)
#undef KOKKOSSOFTMAX_COMPARE_ADD
  return true;
}

}  // namespace compare

#endif
