// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// A program that was built for a newer processor than it runs on ends at its start with a sentence that says
/// so, not at some later moment with an illegal instruction.

#ifndef KOKKOSSOFTMAX_CPU_HPP
#define KOKKOSSOFTMAX_CPU_HPP

namespace KokkosSoftmax::impl {

/// Instruction sets that compilers use when told to build for a newer processor, by the names of g++'s
/// __builtin_cpu_supports.
#define KOKKOSSOFTMAX_FOR_EACH_INSTRUCTION_SET(M) \
  M(avx2)                                         \
  M(fma)                                          \
  M(f16c)                                         \
  M(bmi)                                          \
  M(bmi2)                                         \
  M(avx512f)                                      \
  M(avx512cd)                                     \
  M(avx512bw)                                     \
  M(avx512dq)                                     \
  M(avx512vl)                                     \
  M(avx512vbmi)                                   \
  M(avx512vbmi2)                                  \
  M(avx512vnni)                                   \
  M(avx512bf16)

/// A bit for each, in that order.
enum class InstructionSet : unsigned {
#define KOKKOSSOFTMAX_NAME(name) name,
  KOKKOSSOFTMAX_FOR_EACH_INSTRUCTION_SET(KOKKOSSOFTMAX_NAME)
#undef KOKKOSSOFTMAX_NAME
};
constexpr unsigned bit_of(InstructionSet set) {
  return 1u << static_cast<unsigned>(set);
}

/// Those that the including file is compiled for.
inline constexpr unsigned instruction_sets_of_build = 0
#if defined(__AVX2__)
                                                      | bit_of(InstructionSet::avx2)
#endif
#if defined(__FMA__)
                                                      | bit_of(InstructionSet::fma)
#endif
#if defined(__F16C__)
                                                      | bit_of(InstructionSet::f16c)
#endif
#if defined(__BMI__)
                                                      | bit_of(InstructionSet::bmi)
#endif
#if defined(__BMI2__)
                                                      | bit_of(InstructionSet::bmi2)
#endif
#if defined(__AVX512F__)
                                                      | bit_of(InstructionSet::avx512f)
#endif
#if defined(__AVX512CD__)
                                                      | bit_of(InstructionSet::avx512cd)
#endif
#if defined(__AVX512BW__)
                                                      | bit_of(InstructionSet::avx512bw)
#endif
#if defined(__AVX512DQ__)
                                                      | bit_of(InstructionSet::avx512dq)
#endif
#if defined(__AVX512VL__)
                                                      | bit_of(InstructionSet::avx512vl)
#endif
#if defined(__AVX512VBMI__)
                                                      | bit_of(InstructionSet::avx512vbmi)
#endif
#if defined(__AVX512VBMI2__)
                                                      | bit_of(InstructionSet::avx512vbmi2)
#endif
#if defined(__AVX512VNNI__)
                                                      | bit_of(InstructionSet::avx512vnni)
#endif
#if defined(__AVX512BF16__)
                                                      | bit_of(InstructionSet::avx512bf16)
#endif
    ;

/// Those of them that the processor (and its system) lacks.
unsigned instruction_sets_missing(unsigned required);

/// Where `missing` is not 0: says on the standard error output what it is, and ends the program.
void refuse_processor_without(unsigned missing);

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
/// Before main, and before the constructors of most other objects. A copy for each file that is compiled with
/// the library: files may be built for different processors.
__attribute__((constructor(102))) static void check_processor() {
  refuse_processor_without(instruction_sets_missing(instruction_sets_of_build));
}
#endif

}  // namespace KokkosSoftmax::impl

#endif
