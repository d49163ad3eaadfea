// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "tool_recorder.hpp"

#include <Kokkos_Core.hpp>

namespace tests {

namespace {

ToolRecorder::Records current;
Kokkos::Tools::Experimental::EventSet before;
std::uint64_t next_id = 0;

void kernel(const char* label, const std::uint32_t, std::uint64_t* id) {
  current.kernels.emplace_back(label);
  *id = ++next_id;
}

void fence(const char* label, const std::uint32_t, std::uint64_t* id) {
  *id = ++next_id;
  const std::string text = label;
  // Kokkos fences before it calls a tool; without a tool there is no such fence.
  if (text.find("Profile Tool Fence") != std::string::npos) return;
  // Kokkos' Threads fences in each of its launches. What the library itself asks for would be seen on the
  // other backends.
  if (text == "Kokkos::ThreadsInternal::fence: Unnamed Instance Fence") return;
  current.fences.push_back(text);
}

void allocation(Kokkos_Profiling_SpaceHandle, const char* label, const void*, const std::uint64_t size) {
  if (size > 0) current.allocations.emplace_back(label, size);
}

void copy(Kokkos_Profiling_SpaceHandle, const char* to, const void*, Kokkos_Profiling_SpaceHandle,
          const char* from, const void*, std::uint64_t) {
  current.copies.push_back(std::string(from) + " to " + to);
}

void push(const char* label) {
  current.regions.emplace_back(label);
  ++current.open_regions;
}

void pop() {
  --current.open_regions;
}

}  // namespace

ToolRecorder::ToolRecorder() {
  namespace kt = Kokkos::Tools::Experimental;
  before = kt::get_callbacks();
  current = {};
  kt::set_begin_parallel_for_callback(kernel);
  kt::set_begin_parallel_reduce_callback(kernel);
  kt::set_begin_parallel_scan_callback(kernel);
  kt::set_begin_fence_callback(fence);
  kt::set_allocate_data_callback(allocation);
  kt::set_begin_deep_copy_callback(copy);
  kt::set_push_region_callback(push);
  kt::set_pop_region_callback(pop);
}

ToolRecorder::~ToolRecorder() {
  Kokkos::Tools::Experimental::set_callbacks(before);
}

const ToolRecorder::Records& ToolRecorder::records() const {
  return current;
}

}  // namespace tests
