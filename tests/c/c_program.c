/* SPDX-FileCopyrightText: The KokkosSoftmax authors
 * SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
 *
 * A C program that knows no Kokkos: the library initialises it, does its work, and finalises it once. */
#define _POSIX_C_SOURCE 200809L

#include <KokkosSoftmax.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures = 0;

#define CHECK(condition)                                                                                 \
  do {                                                                                                   \
    if (!(condition)) {                                                                                  \
      printf("%s:%d: %s; last error: %s\n", __FILE__, __LINE__, #condition, kokkossoftmax_last_error()); \
      ++failures;                                                                                        \
    }                                                                                                    \
  } while (0)

/* Memory of the process that stays, in kilobytes. */
static long resident(void) {
  long kilobytes = 0;
  char line[256];
  FILE* status = fopen("/proc/self/status", "r");
  if (!status) return 0;
  while (fgets(line, sizeof line, status)) {
    if (sscanf(line, "VmRSS: %ld", &kilobytes) == 1) break;
  }
  fclose(status);
  return kilobytes;
}

static kokkossoftmax_array matrix(void* data, int32_t scalar, const int64_t* extents) {
  kokkossoftmax_array array = KOKKOSSOFTMAX_ARRAY_INIT;
  array.data = data;
  array.scalar = scalar;
  array.memory = KOKKOSSOFTMAX_HOST;
  array.rank = 2;
  array.extents = extents;
  return array;
}

enum { rows = 5, columns = 300 };

static float x[rows][columns], y[rows][columns];
static double xd[rows][columns], yd[rows][columns];

static void softmax_of_rows(void) {
  const int64_t extents[] = {rows, columns};
  const kokkossoftmax_array in = matrix(x, KOKKOSSOFTMAX_FLOAT, extents),
                            out = matrix(y, KOKKOSSOFTMAX_FLOAT, extents);
  CHECK(kokkossoftmax_softmax(NULL, &in, &out, -1, NULL, 0) == KOKKOSSOFTMAX_OK);
  for (int r = 0; r < rows; ++r) {
    double sum = 0;
    for (int c = 0; c < columns; ++c) sum += exp((double)x[r][c]);
    for (int c = 0; c < columns; ++c)
      CHECK(fabs(y[r][c] - exp((double)x[r][c]) / sum) < 1e-6 * y[r][c] + 1e-30);
  }
}

static void log_softmax_of_scaled_and_masked_columns(void) {
  const int64_t extents[] = {rows, columns}, mask_extents[] = {rows, 1}, mask_strides[] = {1, 1};
  const kokkossoftmax_array in = matrix(xd, KOKKOSSOFTMAX_DOUBLE, extents),
                            out = matrix(yd, KOKKOSSOFTMAX_DOUBLE, extents);
  const _Bool keep[rows] = {1, 0, 1, 1, 1};
  kokkossoftmax_array mask = matrix((void*)keep, KOKKOSSOFTMAX_BOOL, mask_extents);
  mask.strides = mask_strides;
  kokkossoftmax_transform chain[] = {KOKKOSSOFTMAX_TRANSFORM_INIT, KOKKOSSOFTMAX_TRANSFORM_INIT};
  chain[0].kind = KOKKOSSOFTMAX_SCALE;
  chain[0].number = 0.5;
  chain[1].kind = KOKKOSSOFTMAX_MASK;
  chain[1].operands[0] = &mask;
  CHECK(kokkossoftmax_log_softmax(NULL, &in, &out, 0, chain, 2) == KOKKOSSOFTMAX_OK);
  for (int c = 0; c < columns; ++c) {
    double sum = 0;
    for (int r = 0; r < rows; ++r) sum += keep[r] ? exp(0.5 * xd[r][c]) : 0;
    for (int r = 0; r < rows; ++r) {
      CHECK(keep[r] ? fabs(yd[r][c] - (0.5 * xd[r][c] - log(sum))) < 1e-12 : yd[r][c] == -INFINITY);
    }
  }
}

static void softmax_of_masked_columns(void) {
  const int64_t extents[] = {rows, columns}, mask_extents[] = {columns};
  const kokkossoftmax_array in = matrix(xd, KOKKOSSOFTMAX_DOUBLE, extents),
                            out = matrix(yd, KOKKOSSOFTMAX_DOUBLE, extents);
  static _Bool keep[columns];
  kokkossoftmax_array mask = matrix(keep, KOKKOSSOFTMAX_BOOL, mask_extents);
  kokkossoftmax_transform chain = KOKKOSSOFTMAX_TRANSFORM_INIT;
  mask.rank = 1;
  chain.kind = KOKKOSSOFTMAX_MASK;
  chain.operands[0] = &mask;
  for (int c = 0; c < columns; ++c) keep[c] = c % 3 != 0;
  CHECK(kokkossoftmax_softmax(NULL, &in, &out, 1, &chain, 1) == KOKKOSSOFTMAX_OK);
  for (int r = 0; r < rows; ++r) {
    double sum = 0;
    for (int c = 0; c < columns; ++c) sum += keep[c] ? exp(xd[r][c]) : 0;
    for (int c = 0; c < columns; ++c) CHECK(fabs(yd[r][c] - (keep[c] ? exp(xd[r][c]) / sum : 0)) < 1e-14);
  }
}

static void thousands_of_calls(void) {
  const int64_t extents[] = {rows, columns}, w_extents[] = {rows, columns}, y_extents[] = {rows, rows};
  const kokkossoftmax_array in = matrix(x, KOKKOSSOFTMAX_FLOAT, extents),
                            out = matrix(y, KOKKOSSOFTMAX_FLOAT, extents),
                            w = matrix(x, KOKKOSSOFTMAX_FLOAT, w_extents);
  float product[rows][rows];
  const kokkossoftmax_array of_head = matrix(product, KOKKOSSOFTMAX_FLOAT, y_extents);
  kokkossoftmax_transform scale = KOKKOSSOFTMAX_TRANSFORM_INIT;
  scale.kind = KOKKOSSOFTMAX_SCALE;
  scale.number = 2;
  long before = 0;
  for (int i = 0; i < 3000; ++i) {
    if (i == 300) before = resident();
    CHECK(kokkossoftmax_softmax(NULL, &in, &out, i % 2, &scale, 1) == KOKKOSSOFTMAX_OK);
    CHECK(kokkossoftmax_softmax(NULL, &in, &out, 2, &scale, 1) == KOKKOSSOFTMAX_INVALID_ARGUMENT);
    if (kokkossoftmax_has_linear() && i % 3 == 0) {
      kokkossoftmax_packed* packed = NULL;
      CHECK(kokkossoftmax_linear_softmax(NULL, &in, &w, &of_head, &scale, 1, KOKKOSSOFTMAX_PRECISION_IEEE) ==
            KOKKOSSOFTMAX_OK);
      CHECK(kokkossoftmax_pack(NULL, &w, &packed) == KOKKOSSOFTMAX_OK);
      CHECK(kokkossoftmax_linear_softmax_packed(NULL, &in, packed, &of_head, NULL, 0,
                                                KOKKOSSOFTMAX_PRECISION_TF32) == KOKKOSSOFTMAX_OK);
      kokkossoftmax_packed_free(packed);
    }
  }
  printf("resident: %ld kB after 300 calls, %ld kB after 3000\n", before, resident());
  CHECK(resident() - before < 512);
}

int main(void) {
  const int64_t extents[] = {rows, columns};
  const kokkossoftmax_array in = matrix(x, KOKKOSSOFTMAX_FLOAT, extents),
                            out = matrix(y, KOKKOSSOFTMAX_FLOAT, extents);
  kokkossoftmax_options options = KOKKOSSOFTMAX_OPTIONS_INIT;
  kokkossoftmax_packed* packed = NULL;

  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < columns; ++c) {
      x[r][c] = (float)sin(r * columns + c) * 4;
      xd[r][c] = x[r][c];
    }
  }
  printf("KokkosSoftmax %s\n", kokkossoftmax_version_string());
  CHECK(kokkossoftmax_version() >= 100);
  CHECK(strcmp(kokkossoftmax_last_error(), "") == 0);
  CHECK(strcmp(kokkossoftmax_last_implementation(), "") == 0);
  CHECK(kokkossoftmax_is_initialized() == 0);
  CHECK(kokkossoftmax_finalize() == KOKKOSSOFTMAX_OK); /* nothing to do, and nothing is spoilt */
  options.num_threads = -1;
  CHECK(kokkossoftmax_initialize(&options) == KOKKOSSOFTMAX_INVALID_ARGUMENT);
  CHECK(strstr(kokkossoftmax_last_error(), "num_threads is -1") != NULL);
  CHECK(kokkossoftmax_is_initialized() == 0);

  softmax_of_rows(); /* initialises */
  CHECK(kokkossoftmax_is_initialized() == 1);
  CHECK(strlen(kokkossoftmax_last_implementation()) > 0);
  CHECK(kokkossoftmax_initialize(NULL) == KOKKOSSOFTMAX_OK);
  log_softmax_of_scaled_and_masked_columns();
  softmax_of_masked_columns();
  thousands_of_calls();
  if (kokkossoftmax_has_linear()) {
    CHECK(kokkossoftmax_pack(NULL, &in, &packed) == KOKKOSSOFTMAX_OK);
  } else {
    CHECK(kokkossoftmax_pack(NULL, &in, &packed) == KOKKOSSOFTMAX_UNSUPPORTED);
  }

  CHECK(kokkossoftmax_finalize() == KOKKOSSOFTMAX_OK);
  CHECK(kokkossoftmax_finalize() == KOKKOSSOFTMAX_OK);
  CHECK(kokkossoftmax_is_initialized() == 0);
  CHECK(kokkossoftmax_softmax(NULL, &in, &out, -1, NULL, 0) == KOKKOSSOFTMAX_FINALIZED);
  CHECK(strstr(kokkossoftmax_last_error(), "cannot be initialised again") != NULL);
  CHECK(kokkossoftmax_initialize(NULL) == KOKKOSSOFTMAX_FINALIZED);
  CHECK(kokkossoftmax_forget_stream(NULL) == KOKKOSSOFTMAX_OK);
  kokkossoftmax_packed_free(packed);
  if (failures == 0) printf("done\n");
  return failures != 0;
}
