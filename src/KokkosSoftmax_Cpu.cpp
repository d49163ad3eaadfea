// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include <impl/host/KokkosSoftmax_Cpu.hpp>

#include <cstdio>
#include <cstdlib>

// What runs here before it is known that the processor fits must itself be for every processor.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define KOKKOSSOFTMAX_FOR_EVERY_PROCESSOR __attribute__((target("arch=x86-64,no-avx"), noinline))
#else
#define KOKKOSSOFTMAX_FOR_EVERY_PROCESSOR
#endif

namespace KokkosSoftmax::impl {

KOKKOSSOFTMAX_FOR_EVERY_PROCESSOR unsigned instruction_sets_missing(unsigned required) {
  unsigned supported = 0;
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
  __builtin_cpu_init();
#define KOKKOSSOFTMAX_ASK(name) \
  if (__builtin_cpu_supports(#name)) supported |= bit_of(InstructionSet::name);
  KOKKOSSOFTMAX_FOR_EACH_INSTRUCTION_SET(KOKKOSSOFTMAX_ASK)
#undef KOKKOSSOFTMAX_ASK
#else
  supported = required;
#endif
  return required & ~supported;
}

KOKKOSSOFTMAX_FOR_EVERY_PROCESSOR void refuse_processor_without(unsigned missing) {
  if (missing == 0) return;
  std::fputs(
      "KokkosSoftmax: this program was built for a newer processor than the one it runs on, which lacks",
      stderr);
#define KOKKOSSOFTMAX_SAY(name) \
  if (missing & bit_of(InstructionSet::name)) std::fputs(" " #name, stderr);
  KOKKOSSOFTMAX_FOR_EACH_INSTRUCTION_SET(KOKKOSSOFTMAX_SAY)
#undef KOKKOSSOFTMAX_SAY
  std::fputs(
      ".\nBuild it on this machine, or for the oldest processor that it is to run on: "
      "-DKokkos_ARCH_HSW=ON is for those with AVX2, -DKokkosSoftmax_NATIVE=OFF for all.\n",
      stderr);
  std::_Exit(EXIT_FAILURE);
}

}  // namespace KokkosSoftmax::impl
