# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the tests of the Python package share: skipping, the C++ results, memory in use, a plain float64 reference."""

import ctypes
import importlib
import os
import subprocess
import sys
import threading
import unittest

SKIPPED = 77


def need(*modules):
    """The modules, or the end of the program with the status that ctest takes for skipped."""
    found = []
    for module in modules:
        try:
            found.append(importlib.import_module(module))
        except ImportError as error:
            print(f"skipped: {module} is not here ({error})")
            sys.exit(SKIPPED)
    return found


class Foreign:
    """An array of a library that is known by DLPack alone; `old` is one from before versions."""

    def __init__(self, array, old=False):
        self.array, self.old = array, old

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **keywords):
        if self.old and "max_version" in keywords:
            raise TypeError("no such keywords")
        return self.array.__dlpack__(**keywords)


class Described:
    """Memory of float32 that says by DLPack alone what it is, with strides that not every library makes."""

    def __init__(self, address, shape, strides, device=(1, 0)):
        rank = len(shape)
        self.numbers = (ctypes.c_int64 * (2 * rank))(*shape, *strides)
        at = ctypes.addressof(self.numbers)
        self.device = device
        # DLManagedTensor: data; device; rank and type (a float of 32 bits, one lane); shape; strides; offset; no deleter.
        self.tensor = (ctypes.c_int64 * 8)(
            address, device[0] | device[1] << 32, rank | (2 | 32 << 8 | 1 << 16) << 32, at, at + 8 * rank
        )

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, stream=None):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


def needs_heads(test):
    """A test of heads, which a library that was built without Kokkos Kernels lacks."""
    return unittest.skipUnless(importlib.import_module("kokkossoftmax").has_linear(), "a library without heads")(test)


def failures_of_two_threads(work):
    """What work(0) and work(1) raise, side by side."""
    failures = []

    def run(first):
        try:
            work(first)
        except BaseException as error:  # pylint: disable=broad-except
            failures.append(error)

    threads = [threading.Thread(target=run, args=(first,)) for first in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def main():
    program = unittest.main(exit=False, verbosity=2 if "-v" in sys.argv else 1)
    result = program.result
    if result.testsRun and len(result.skipped) == result.testsRun and result.wasSuccessful():
        print(f"skipped: {result.skipped[0][1]}")
        sys.exit(SKIPPED)
    sys.exit(0 if result.wasSuccessful() else 1)


def cpp_results(arguments, *inputs):
    """What the C++ interface makes of the inputs' bytes; skips where the program was not built."""
    program = os.environ.get("KOKKOSSOFTMAX_CPP_RESULTS")
    if not program:
        raise unittest.SkipTest("KOKKOSSOFTMAX_CPP_RESULTS names no program")
    # Kokkos of another process: as many threads as here, since a BLAS gives other bits with others.
    ran = subprocess.run(
        [program, *(str(a) for a in arguments)], input=b"".join(inputs), capture_output=True, check=False
    )
    if ran.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, arguments))}: {ran.stderr.decode()}")
    return ran.stdout


def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def reference(np, operation, x, axis):
    """In float64, of logits that are float64 already."""
    top = x.max(axis, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    with np.errstate(divide="ignore"):
        exps = np.exp(x - top)
        total = exps.sum(axis, keepdims=True)
        if operation == "logsumexp":
            return np.squeeze(top + np.log(total), axis)
        if operation == "log_softmax":
            return np.where(total > 0, x - top - np.log(total), -np.inf)
    return np.where(total > 0, exps / np.where(total > 0, total, 1), 0)
