// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Run on an emulated processor without AVX-512: must not come to main() when built for one with it.
#include <KokkosSoftmax.hpp>

#include <cstdio>

int main() {
#if defined(__AVX512F__)
  std::puts("came to main");
  return 1;
#else
  std::puts("nothing to refuse");
  return 0;
#endif
}
