/* SPDX-FileCopyrightText: The KokkosSoftmax authors
 * SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception */
#include <KokkosSoftmax.h>
#include <stdio.h>

int main(void) {
  float x[2][3] = {{1, 1, 1}, {2, 2, 2}}, y[2][3];
  const int64_t extents[] = {2, 3};
  kokkossoftmax_array in = KOKKOSSOFTMAX_ARRAY_INIT;
  in.data = x;
  in.scalar = KOKKOSSOFTMAX_FLOAT;
  in.memory = KOKKOSSOFTMAX_HOST;
  in.rank = 2;
  in.extents = extents;
  kokkossoftmax_array out = in;
  out.data = y;
  if (kokkossoftmax_softmax(NULL, &in, &out, -1, NULL, 0) != KOKKOSSOFTMAX_OK) {
    printf("%s\n", kokkossoftmax_last_error());
    return 1;
  }
  for (int c = 0; c < 3; ++c) {
    if (y[1][c] < 0.333f || y[1][c] > 0.334f) return 1;
  }
  return kokkossoftmax_finalize() != KOKKOSSOFTMAX_OK;
}
