#!/usr/bin/env python3
# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""PyTorch's softmax on the host, for kokkossoftmax_host_rivals, which starts this and talks to it.

A line of input "operation scalar extents axis seconds" (extents as 8x4096) is answered with the shortest time of a call in
seconds. The first line of output is PyTorch's version, or "none" and the reason.
"""

import os
import sys
import time

# Asked before PyTorch is imported, whose OpenMP may bind this process to one core.
CORES = os.sched_getaffinity(0)


def main():
    try:
        import torch
    except ImportError as error:
        print("none", error, flush=True)
        return
    os.sched_setaffinity(0, CORES)
    torch.set_num_threads(int(sys.argv[1]))
    print(torch.__version__, flush=True)
    types = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
    operand = {}
    for line in sys.stdin:
        operation, scalar, extents, axis, seconds = line.split()
        key = (scalar, extents)
        if key not in operand:
            operand.clear()
            x = torch.empty([int(e) for e in extents.split("x")], dtype=torch.float32).uniform_(-3, 3).to(types[scalar])
            operand[key] = (x, torch.empty_like(x))
        x, y = operand[key]
        if operation == "forget":
            operand.clear()
            x = y = None
            print(0, flush=True)
            continue
        function = torch.softmax if operation == "softmax" else torch.log_softmax
        best, calls = float("inf"), 0
        end = time.perf_counter() + float(seconds)
        while calls < 3 or time.perf_counter() < end:
            begin = time.perf_counter()
            function(x, int(axis), out=y)
            best = min(best, time.perf_counter() - begin)
            calls += 1
        print(best, flush=True)


main()
