// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A C++ program that uses Kokkos, the C++ library and the C library: there is one Kokkos among them. Argument
// "ours": Kokkos is initialised and finalised here; "theirs": through the C interface.
#include <KokkosSoftmax.h>

#include <KokkosSoftmax.hpp>
#include <cstdio>
#include <cstring>

namespace {

int failures = 0;

#define CHECK(condition)                                                         \
  do {                                                                           \
    if (!(condition)) {                                                          \
      std::printf("%s:%d: %s; last error: %s\n", __FILE__, __LINE__, #condition, \
                  kokkossoftmax_last_error());                                   \
      ++failures;                                                                \
    }                                                                            \
  } while (false)

// What a profiling tool sees of either library.
int regions = 0;
void count_region(const char* name) {
  if (std::strcmp(name, "KokkosSoftmax::softmax") == 0) ++regions;
}

void both_libraries_work() {
  const Kokkos::View<float**, Kokkos::LayoutRight, Kokkos::HostSpace> x("x", 3, 7), y("y", 3, 7),
      z("z", 3, 7);
  for (int r = 0; r < 3; ++r) {
    for (int c = 0; c < 7; ++c) x(r, c) = static_cast<float>((r * 31 + c * 17) % 11);
  }
  Kokkos::Tools::Experimental::set_push_region_callback(count_region);
  const Kokkos::DefaultHostExecutionSpace exec;
  KokkosSoftmax::softmax(exec, x, y);
  exec.fence();
  CHECK(regions == 1);
  const std::int64_t extents[] = {3, 7};
  kokkossoftmax_array in = KOKKOSSOFTMAX_ARRAY_INIT;
  in.data = x.data();
  in.scalar = KOKKOSSOFTMAX_FLOAT;
  in.memory = KOKKOSSOFTMAX_HOST;
  in.rank = 2;
  in.extents = extents;
  kokkossoftmax_array out = in;
  out.data = z.data();
  CHECK(kokkossoftmax_softmax(nullptr, &in, &out, -1, nullptr, 0) == KOKKOSSOFTMAX_OK);
  CHECK(std::memcmp(y.data(), z.data(), 3 * 7 * sizeof(float)) == 0);
  // The other library's call came to the tool that was set here. Each has a note of its own of what ran last.
  CHECK(regions == 2);
  CHECK(std::strcmp(kokkossoftmax_last_implementation(), "") != 0);
  CHECK(std::strcmp(kokkossoftmax_last_implementation(), KokkosSoftmax::last_implementation()) == 0);
  Kokkos::Tools::Experimental::set_push_region_callback(nullptr);
}

}  // namespace

int main(int argc, char** argv) {
  const bool ours = argc < 2 || std::strcmp(argv[1], "theirs") != 0;
  CHECK(!Kokkos::is_initialized() && kokkossoftmax_is_initialized() == 0);
  if (ours) {
    Kokkos::initialize(argc, argv);
  } else {
    CHECK(kokkossoftmax_initialize(nullptr) == KOKKOSSOFTMAX_OK);
  }
  CHECK(Kokkos::is_initialized() && kokkossoftmax_is_initialized() == 1);
  both_libraries_work();
  CHECK(kokkossoftmax_finalize() == KOKKOSSOFTMAX_OK);
  CHECK(Kokkos::is_initialized() == ours);
  if (ours) {
    regions = 0;
    both_libraries_work();
    Kokkos::finalize();
  }
  CHECK(Kokkos::is_finalized() && kokkossoftmax_is_initialized() == 0);
  CHECK(kokkossoftmax_initialize(nullptr) == KOKKOSSOFTMAX_FINALIZED);
  if (failures == 0) std::printf("done\n");
  return failures != 0;
}
