// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#ifndef KOKKOSSOFTMAX_TESTS_REFUSALS_HPP
#define KOKKOSSOFTMAX_TESTS_REFUSALS_HPP

#include <gtest/gtest.h>

#include <initializer_list>
#include <stdexcept>
#include <string>

#include "tool_recorder.hpp"

namespace tests {

// The call must throw std::invalid_argument with all of these words in its text, before it launched, copied
// or allocated anything. Kernels whose label is excepted may have run.
template <class Call>
std::string expect_refused(Call&& call, std::initializer_list<const char*> words,
                           const std::string& excepted = "") {
  std::string text;
  ToolRecorder recorder;
  try {
    call();
    ADD_FAILURE() << "accepted";
  } catch (const std::invalid_argument& error) {
    text = error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another exception: " << error.what();
  }
  for (const char* word : words) {
    EXPECT_NE(text.find(word), std::string::npos) << '"' << word << "\" is not in: " << text;
  }
  for (const auto& kernel : recorder.records().kernels) {
    EXPECT_EQ(kernel, excepted) << "launched in spite of bad input";
  }
  if (excepted.empty()) {
    EXPECT_TRUE(recorder.records().copies.empty());
    EXPECT_TRUE(recorder.records().allocations.empty());
  }
  EXPECT_EQ(recorder.records().open_regions, 0);
  return text;
}

// Nothing in a buffer may have changed.
template <class... Buffers>
void expect_unchanged(Buffers&... buffers) {
  (buffers.download(), ...);
  EXPECT_TRUE((buffers.unchanged() && ...)) << "an operand of a refused call was written";
}

}  // namespace tests

#endif
