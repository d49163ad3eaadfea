// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The arithmetic that the CUDA kernels share, how they go past the caches, and how they are launched.

#ifndef KOKKOSSOFTMAX_ROWMATH_HPP
#define KOKKOSSOFTMAX_ROWMATH_HPP

#include <impl/KokkosSoftmax_Online.hpp>
#include <impl/cuda/KokkosSoftmax_CudaRuntime.hpp>
#include <impl/cuda/KokkosSoftmax_Ptx.hpp>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <string>

namespace KokkosSoftmax::impl {

/// A value that the compiler cannot know: what can be made of it, it would keep in registers from one use to
/// the next.
__device__ __forceinline__ int not_known(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

/// exp(value - max) for many values and one maximum. For a float in three instructions, where a difference
/// and exp() take nine: 2^(value L - max L), L = log2(e), the product with the value unrounded in the fma,
/// that of the maximum rounded, which is made up for by `correction`, one factor for all. From 2^18 up max L
/// would lose too much, and the difference is formed first: there values that are not negligible beside the
/// maximum have an exact one. -inf gives 0, NaN and +inf anything: who calls it knows of these from the
/// maximum.
template <class Acc>
struct ExponentialBelow;

template <>
struct ExponentialBelow<float> {
  static constexpr float log2e = 1.4426950408889634f;
  float subtracted, offset, correction;

  __device__ explicit ExponentialBelow(float max) {
    const bool direct = fabsf(max) < 0x1p18f;
    subtracted = direct ? 0.0f : max;
    offset = direct ? max * log2e : 0.0f;
    correction = direct ? ex2_approx_ftz(-fmaf(max, log2e, -offset)) : 1.0f;
  }
  /// To be multiplied by the correction.
  __device__ float uncorrected(float value) const { return (*this)(value - subtracted); }
  /// The same where, if it `subtracts_first`, the maximum has been subtracted from the value.
  __device__ bool subtracts_first() const { return subtracted != 0.0f; }
  __device__ float operator()(float value) const { return ex2_approx_ftz(fmaf(value, log2e, -offset)); }
};

/// Doubles of a thread that take each step together: where registers are short nvcc has one after the other,
/// and each of the sixteen steps of an exponential waits for the one before.
template <int count>
struct SeveralDoubles {
  double of[count];

  template <class Function>
  KOKKOS_FORCEINLINE_FUNCTION static SeveralDoubles each(const Function& function) {
    SeveralDoubles all;
    for (int i = 0; i < count; ++i) all.of[i] = function(i);
    return all;
  }
  KOKKOS_FORCEINLINE_FUNCTION friend SeveralDoubles operator*(const SeveralDoubles& a, double b) {
    return each([&](int i) { return a.of[i] * b; });
  }
  KOKKOS_FORCEINLINE_FUNCTION friend SeveralDoubles operator*(const SeveralDoubles& a,
                                                              const SeveralDoubles& b) {
    return each([&](int i) { return a.of[i] * b.of[i]; });
  }
  KOKKOS_FORCEINLINE_FUNCTION friend SeveralDoubles operator+(const SeveralDoubles& a, double b) {
    return each([&](int i) { return a.of[i] + b; });
  }
  KOKKOS_FORCEINLINE_FUNCTION friend SeveralDoubles operator-(const SeveralDoubles& a, double b) {
    return each([&](int i) { return a.of[i] - b; });
  }
  KOKKOS_FORCEINLINE_FUNCTION friend SeveralDoubles fma(const SeveralDoubles& a, double b, double c) {
    return each([&](int i) { return ::fma(a.of[i], b, c); });
  }
  KOKKOS_FORCEINLINE_FUNCTION friend SeveralDoubles fma(const SeveralDoubles& a, double b,
                                                        const SeveralDoubles& c) {
    return each([&](int i) { return ::fma(a.of[i], b, c.of[i]); });
  }
  KOKKOS_FORCEINLINE_FUNCTION friend SeveralDoubles fma(const SeveralDoubles& a, const SeveralDoubles& b,
                                                        double c) {
    return each([&](int i) { return ::fma(a.of[i], b.of[i], c); });
  }
};

template <>
struct ExponentialBelow<double> {
  double max;
  static constexpr double correction = 1;
  __device__ explicit ExponentialBelow(double max_) : max(max_) {}
  __device__ double uncorrected(double value) const { return (*this)(value); }
  __device__ static constexpr bool subtracts_first() { return false; }
  /// Of what is no more than a little over the maximum, as exp_by_polynomial; NaN and +inf give anything (see
  /// sum_or_special). (Without the branch that CUDA's exp has, softmax on one H200, fraction of a copy, by
  /// that and so: 13 columns 0.93 and 1.00, 97 0.80 and 0.97, 65536 0.82 and 0.92, 131073 0.73 and 0.77.)
  __device__ double operator()(double value) const {
    const double x = value - max;
    double shifted;
    return scaled(fraction(x, shifted), shifted, x);
  }
  /// Of several, in their place, step by step.
  template <int count>
  __device__ __forceinline__ void replace(double (&value)[count]) const {
    SeveralDoubles<count> x, shifted;
#pragma unroll
    for (int i = 0; i < count; ++i) x.of[i] = value[i] - max;
    const SeveralDoubles<count> p = fraction(x, shifted);
#pragma unroll
    for (int i = 0; i < count; ++i) value[i] = scaled(p.of[i], shifted.of[i], x.of[i]);
  }

 private:
  using Exp = VectorExp<double>;

  /// exp(x) / 2^n; n is in the low bits of `shifted`.
  template <class Doubles>
  __device__ __forceinline__ static Doubles fraction(const Doubles& x, Doubles& shifted) {
    shifted = fma(x, Exp::reciprocal, Exp::shift);
    const Doubles n = shifted - Exp::shift;
    const Doubles r = fma(n, -Exp::low, fma(n, -Exp::high, x));
    return fma(fma(exp_quotient(r), r, 1.0), r, 1.0);
  }
  __device__ static double scaled(double fraction, double shifted, double x) {
    const bool vanishes = static_cast<unsigned>(__double2hiint(x)) > 0xc086232bu;  // below Exp::smallest
    const int high = __double2hiint(fraction) + (__double2loint(shifted) << 20);
    return __hiloint2double(vanishes ? 0 : high, vanishes ? 0 : __double2loint(fraction));
  }
};

/// exp(x) of the difference of two maxima, neither infinite nor NaN, the larger one subtracted.
__device__ inline float exp_between_maxima(float x) {
  return exp_of_difference(x);
}
__device__ inline double exp_between_maxima(double x) {
  return ExponentialBelow<double>(0)(x);
}

/// By CUDA's exp, which has a branch.
struct BranchingExponentialBelow : ExponentialBelow<double> {
  using ExponentialBelow<double>::ExponentialBelow;
  __device__ double operator()(double value) const { return exp(value - max); }
};

/// The maximum of two, NaN where one of them is.
__device__ inline float maximum_or_nan(float a, float b) {
  return max_nan(a, b);
}
__device__ inline double maximum_or_nan(double a, double b) {
  return a > b || a != a ? a : b;
}

/// The maximum of a row may be NaN or infinite: what is subtracted from its logits.
template <class Acc>
__device__ Acc finite_maximum(Acc max) {
  return Kokkos::fmin(Kokkos::fmax(max, -largest_v<Acc>), largest_v<Acc>);
}

/// The sum of a row with this maximum: one that holds NaN or +inf has that.
template <class Acc>
__device__ Acc sum_or_special(Acc max, Acc sum) {
  return max <= largest_v<Acc> ? sum : max;
}

/// Floats as integers of the same order, those of NaN above all (as max.NaN makes them), and back.
__device__ inline int in_integer_order(float value) {
  const int bits = bits_as<int>(value);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
__device__ inline float from_integer_order(int order) {
  return bits_as<float>(order ^ ((order >> 31) & 0x7fffffff));
}

/// Two neighbours of 16 bits that may begin within a word.
template <class T>
__device__ unsigned pair_within_words(const T* first) {
  static_assert(sizeof(T) == 2);
  const auto* const at = reinterpret_cast<const unsigned short*>(first);
  return __byte_perm(at[0], at[1], 0x5410);
}

/// Two values as neighbours of 16 bits, by one instruction.
template <class Out>
__device__ unsigned rounded_pair(float first, float second) {
  if constexpr (std::is_same_v<Out, bhalf_t>) {
    return bits_as<unsigned>(__floats2bfloat162_rn(first, second));
  } else {
    return bits_as<unsigned>(__floats2half2_rn(first, second));
  }
}

/// exp(value - max), to be multiplied by a common factor next to 1, for values of 16 bits: one fma and one
/// ex2. From 2^18 up, where max log2(e) would be too coarse, neighbours of bfloat16 are 2^10 apart, so that
/// any power of the difference that is 0 or far below 0 will do: one whose factor is a power of two is exact.
template <class In>
struct ExponentialOf16Bits {
  float scale, offset;

  __device__ explicit ExponentialOf16Bits(float max) : scale(1.4426950408889634f) {
    if constexpr (std::is_same_v<In, bhalf_t>) {
      const unsigned exponent = bits_as<unsigned>(max) >> 23 & 0xffu;
      if (exponent >= 127 + 18) scale = bits_as<float>((127 + 127 + 18 - exponent) << 23);
    }
    offset = max * scale;
  }
  __device__ float operator()(float value) const { return ex2_approx_ftz(fmaf(value, scale, -offset)); }
  /// What sums of these have to be multiplied by.
  __device__ float correction(float max) const { return ex2_approx_ftz(-fmaf(max, scale, -offset)); }
};

/// Two neighbours of 16 bits as they come from memory.
template <class In>
struct PackedPair {
  static constexpr bool is_bfloat16 = std::is_same_v<In, bhalf_t>;
  static constexpr unsigned minus_infinities = is_bfloat16 ? 0xff80ff80u : 0xfc00fc00u;

  __device__ static float low(unsigned pair) { return low_of_pair<In>(pair); }
  __device__ static float high(unsigned pair) { return high_of_pair<In>(pair); }
  /// A pair with -inf in place of what is not kept.
  __device__ static unsigned kept(unsigned pair, bool low, bool high) {
    return __byte_perm(pair, minus_infinities, (low ? 0x10 : 0x54) | (high ? 0x3200 : 0x7600));
  }
  /// Each rounded once.
  __device__ static unsigned sum(unsigned a, unsigned b) {
    if constexpr (is_bfloat16)
      return bits_as<unsigned>(__hadd2(bits_as<__nv_bfloat162>(a), bits_as<__nv_bfloat162>(b)));
    return bits_as<unsigned>(__hadd2(bits_as<__half2>(a), bits_as<__half2>(b)));
  }
  /// Of two pairs; these pass over NaN.
  __device__ static unsigned maximum(unsigned a, unsigned b) {
    if constexpr (is_bfloat16)
      return bits_as<unsigned>(__hmax2(bits_as<__nv_bfloat162>(a), bits_as<__nv_bfloat162>(b)));
    return bits_as<unsigned>(__hmax2(bits_as<__half2>(a), bits_as<__half2>(b)));
  }
  __device__ static unsigned minimum(unsigned a, unsigned b) {
    if constexpr (is_bfloat16)
      return bits_as<unsigned>(__hmin2(bits_as<__nv_bfloat162>(a), bits_as<__nv_bfloat162>(b)));
    return bits_as<unsigned>(__hmin2(bits_as<__half2>(a), bits_as<__half2>(b)));
  }
  __device__ static unsigned maximum_or_nan(unsigned a, unsigned b) {
    if constexpr (is_bfloat16)
      return bits_as<unsigned>(__hmax2_nan(bits_as<__nv_bfloat162>(a), bits_as<__nv_bfloat162>(b)));
    return bits_as<unsigned>(__hmax2_nan(bits_as<__half2>(a), bits_as<__half2>(b)));
  }
};

/// Two floats from 0 up to below 2, as the exponentials below a maximum are, in 16 bits each, for outputs of
/// type T: without the sign and the first bits of the exponent, which leaves as many more to the significand.
/// Of bfloat16 two, so that an output rounded from these is within 5/8 of its last place. Of half, which has
/// but five bits of exponent, one more than its own: an output is within one of its last place, and what is
/// less than 2^-31 is that, of which every output is 0.
template <class T>
struct PackedExponentials {
  __device__ static unsigned of(float first, float second) {
    return __byte_perm(rounded(first), rounded(second), 0x7632);
  }
  __device__ static float low(unsigned pair) { return unpacked(pair << (16 - left_out)); }
  __device__ static float high(unsigned pair) { return unpacked(pair >> left_out); }
  /// What these keep of a float.
  __device__ static float kept(float value) { return high(rounded(value)); }

 private:
  static constexpr bool is_half = std::is_same_v<T, half_t>;
  static constexpr int left_out = is_half ? 4 : 2;
  static constexpr unsigned significant = 0xffffu << (16 - left_out);
  /// What all have in common of the bits that are left out.
  static constexpr unsigned common = is_half ? (127u - 31u) << 23 : 0;

  __device__ static unsigned rounded(float value) {
    if constexpr (is_half) value = fmaxf(value, 0x1p-31f);
    return bits_as<unsigned>(value) * (1u << left_out) + 0x8000u;
  }
  __device__ static float unpacked(unsigned shifted) {
    return bits_as<float>((shifted & significant) | common);
  }
};

/// A sum across threads that keeps what rounding would take: double for float, a compensated pair for double.
template <class Acc>
struct ExactSum;

template <>
struct ExactSum<float> {
  double sum;
  __device__ static ExactSum of(float term) { return {term}; }
  __device__ void join(const ExactSum& other) { sum += other.sum; }
  __device__ void scale(float factor) { sum *= factor; }
  __device__ ExactSum from_lane_xor(int mask) const { return {__shfl_xor_sync(0xffffffffu, sum, mask)}; }
  __device__ ExactSum from_lane(int lane) const { return {__shfl_sync(0xffffffffu, sum, lane)}; }
  __device__ ExactSum told() const { return *this; }
  __device__ float rounded() const { return static_cast<float>(sum); }
};

template <>
struct ExactSum<double> {
  double sum, low;
  __device__ static ExactSum of(double term) { return {term, 0}; }
  __device__ void join(const ExactSum& other) {
    const double total = sum + other.sum;
    const double part = total - sum;
    low = (low + other.low) + ((sum - (total - part)) + (other.sum - part));
    sum = total;
  }
  __device__ void scale(double factor) {
    const double product = sum * factor;
    low = low * factor + fma(sum, factor, -product);
    sum = product;
  }
  __device__ ExactSum from_lane_xor(int mask) const {
    return {__shfl_xor_sync(0xffffffffu, sum, mask), __shfl_xor_sync(0xffffffffu, low, mask)};
  }
  __device__ ExactSum from_lane(int lane) const {
    return {__shfl_sync(0xffffffffu, sum, lane), __shfl_sync(0xffffffffu, low, lane)};
  }
  __device__ ExactSum told() const { return {sum, static_cast<float>(low)}; }
  __device__ double rounded() const { return low == low ? sum + low : sum; }
};

/// A sum of positive floats, of one thread less than 128 and of all less than 2^15, in two integers: in units
/// of 2^-16 and the rest in units of 2^-38. Exact from then on, so that the order of threads is free. What
/// else floats can be gives anything.
struct FixedPointSum {
  /// Of each `low` has less than 2^21; a sum of sums that are carried() may have as many.
  static constexpr int most_terms = 1 << 9;
  unsigned high, low;

  __device__ static FixedPointSum of(float sum) {
    // Adding a number of the right magnitude rounds to the unit, and leaves the multiple in the low bits.
    constexpr float to_high = 0x1p7f, to_low = 0x1.8p-15f;
    const float rounded = sum + to_high;
    const float rest = sum - (rounded - to_high);
    return {bits_as<unsigned>(rounded) - bits_as<unsigned>(to_high),
            bits_as<unsigned>(rest + to_low) - bits_as<unsigned>(to_low)};
  }
  __device__ void join(const FixedPointSum& other) {
    high += other.high;
    low += other.low;
  }
  /// The same number, with what `low` has of units of `high` there.
  __device__ FixedPointSum carried() const {
    return {high + static_cast<unsigned>(static_cast<int>(low) >> 22), low & 0x3fffffu};
  }
  __device__ float rounded() const { return __ll2float_rn(units()) * 0x1p-38f; }
  __device__ double exact() const { return static_cast<double>(units()) * 0x1p-38; }

 private:
  __device__ long long units() const {
    return (static_cast<long long>(static_cast<int>(high)) << 22) + static_cast<int>(low);
  }
};

/// A sum of floats up to 1 that is exact from the first one on: `whole` units of 2^-22, less than 2^10 in 32
/// bits, and where it shall be `exact`, which the logarithm of a sum near 1 asks for, the rest of each in
/// units of 2^-38. Eight floats at least are added to a sum, or a multiple of eight.
struct FixedPointUnits {
  static constexpr float largest_error_of_whole = 0x1p-23f;  ///< for each float, where `rest` is left out
  unsigned whole, rest;

  template <bool exact>
  __device__ void add(float a, float b) {
    constexpr float to_whole = 2.0f, to_rest = 0x1.8p-15f, to_both = to_whole + to_rest;
    const float whole_a = a + to_whole, whole_b = b + to_whole;
    // The bits of eight times to_whole cancel out.
    whole += bits_as<unsigned>(whole_a) + bits_as<unsigned>(whole_b);
    if constexpr (exact) {
      // The differences are exact, only the sums round.
      rest += bits_as<unsigned>(a + (to_both - whole_a)) + bits_as<unsigned>(b + (to_both - whole_b)) -
              2 * bits_as<unsigned>(to_rest);
    }
  }
  template <bool exact>
  __device__ static float rounded(unsigned long long whole, unsigned rest) {
    if constexpr (exact) {
      return __ll2float_rn((static_cast<long long>(whole) << 16) + static_cast<int>(rest)) * 0x1p-38f;
    } else {
      return __ull2float_rn(whole) * 0x1p-22f;
    }
  }
};

/// The words of a scalar or vector.
template <class T>
using WordsOf = std::conditional_t<
    sizeof(T) == 2, unsigned short,
    std::conditional_t<sizeof(T) == 4, unsigned, std::conditional_t<sizeof(T) == 8, uint2, uint4>>>;

/// By L1, past it, and, streaming, with the hint that it is to leave L2 first.
template <class T>
__device__ T load_by_l1(const T* p) {
  return bits_as<T>(__ldca(reinterpret_cast<const WordsOf<T>*>(p)));
}
template <class T>
__device__ T load_past_l1(const T* p) {
  return bits_as<T>(__ldcg(reinterpret_cast<const WordsOf<T>*>(p)));
}
template <class T>
__device__ void store_past_l1(T* p, const T& value) {
  __stcg(reinterpret_cast<WordsOf<T>*>(p), bits_as<WordsOf<T>>(value));
}
template <class T>
__device__ T load_streaming(const T* p) {
  return bits_as<T>(__ldcs(reinterpret_cast<const WordsOf<T>*>(p)));
}
template <class T>
__device__ void store_streaming(T* p, const T& value) {
  __stcs(reinterpret_cast<WordsOf<T>*>(p), bits_as<WordsOf<T>>(value));
}

/// A kernel launch that Kokkos Tools see under the library's label.
template <class Launch>
void launch_labelled(const Kokkos::Cuda& exec, const std::string& label, const Launch& launch) {
  std::uint64_t id = 0;
  const bool watched = Kokkos::Tools::profileLibraryLoaded();
  if (watched) Kokkos::Tools::beginParallelFor(label, Kokkos::Tools::Experimental::device_id(exec), &id);
  launch();
  check_cuda(cudaPeekAtLastError(), label.c_str());
  if (watched) Kokkos::Tools::endParallelFor(id);
}

/// Launches a kernel that begins with grid_dependency_wait(), with so much shared memory a block.
template <auto kernel, class... Arguments>
void launch_with_shared(const Kokkos::Cuda& exec, const std::string& label, index_type blocks, dim3 threads,
                        int bytes, const Arguments&... arguments) {
  constexpr int always_allowed = 40 * 1024;  // beside what a kernel declares
  if (bytes > always_allowed) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "cudaFuncSetAttribute");
  }
  static const bool early = has_grid_dependency_wait(kernel);
  launch_labelled(exec, label, [&] {
    launch_kernel(exec, kernel, early, static_cast<unsigned>(std::max<index_type>(1, blocks)), threads,
                  static_cast<std::size_t>(bytes), arguments...);
  });
}

}  // namespace KokkosSoftmax::impl

#endif
