// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What Kokkos Tools are told while a recorder lives.
#ifndef KOKKOSSOFTMAX_TESTS_TOOL_RECORDER_HPP
#define KOKKOSSOFTMAX_TESTS_TOOL_RECORDER_HPP

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace tests {

class ToolRecorder {
 public:
  ToolRecorder();
  ~ToolRecorder();
  ToolRecorder(const ToolRecorder&) = delete;
  ToolRecorder& operator=(const ToolRecorder&) = delete;

  struct Records {
    std::vector<std::string> kernels;  // parallel_for, _reduce and _scan
    std::vector<std::string> fences;   // save those that Kokkos adds for the tool itself
    std::vector<std::string> copies;
    std::vector<std::string> regions;
    std::vector<std::pair<std::string, std::uint64_t>> allocations;  // of more than 0 bytes
    int open_regions = 0;
  };
  const Records& records() const;
};

}  // namespace tests

#endif
