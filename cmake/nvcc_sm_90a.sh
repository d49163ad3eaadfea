#!/bin/sh
# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

# nvcc_sm_90a.sh <command>...: runs it with -arch=sm_90a in place of -arch=sm_90. That is how Kokkos' targets tell
# nvcc_wrapper the architecture, which takes one alone; wgmma and setmaxnreg exist in 90a alone.
for argument; do
  shift
  [ "$argument" != -arch=sm_90 ] || argument=-arch=sm_90a
  set -- "$@" "$argument"
done
exec "$@"
