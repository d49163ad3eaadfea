// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A program built for a newer processor than it runs on says so and ends.
#include <gtest/gtest.h>

#include <impl/host/KokkosSoftmax_Cpu.hpp>

namespace {

using namespace KokkosSoftmax::impl;

TEST(Cpu, ThisBuildFitsThisProcessor) {
  EXPECT_EQ(instruction_sets_missing(0), 0u);
  EXPECT_EQ(instruction_sets_missing(instruction_sets_of_build), 0u);
}

TEST(CpuDeathTest, WhatIsMissingIsNamed) {
  refuse_processor_without(0);
  EXPECT_EXIT(refuse_processor_without(bit_of(InstructionSet::avx512f) | bit_of(InstructionSet::f16c)),
              testing::ExitedWithCode(1),
              "newer processor than the one it runs on, which lacks f16c avx512f\\.");
}

}  // namespace
