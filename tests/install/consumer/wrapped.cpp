// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

// What it is compiled with is what is looked at.
int wrapped() {
  return 0;
}
