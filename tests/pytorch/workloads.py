#!/usr/bin/env python3
# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The three workloads as PyTorch writes them, ours beside PyTorch's, both against float64.

    workloads.py LIBRARY [--device cpu|cuda|all] [--full | --small] [--tf32]

LIBRARY is libkokkossoftmax_pytorch_workloads.so of the build. Our relative error (of the whole output, and of
its worst element) may be no larger than PyTorch's own, save for what a different order of the same sums makes
of it (--slack: 1.25 on a GPU, where both multiply with cuBLAS; 2 on a CPU, where they multiply with different
BLAS libraries, whose roundings are nearly all of a head's error) and half a unit in the last place. Sizes are
those of the users on a GPU, smaller on a CPU.

Exit status: 0 when all agree, 1 when not, 77 where torch is absent.
"""

import argparse
import ctypes
import sys

try:
    import torch
    from torch import nn
except ImportError as error:
    print(f"skipped: PyTorch is not here ({error})")
    sys.exit(77)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--device", choices=("cpu", "cuda", "all"), default="all")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--full", action="store_true", help="the users' sizes on every device")
    size.add_argument("--small", action="store_true", help="small sizes on every device")
    parser.add_argument("--tf32", action="store_true", help="TF32 products, in PyTorch too (cuda)")
    parser.add_argument("--slack", type=float, help="largest factor over PyTorch's error")
    return parser.parse_args()


class Library:
    def __init__(self, path):
        self.calls = ctypes.CDLL(path)
        for name in ("softmax", "gelu_head", "batch_norm_head", "last_implementation"):
            getattr(self.calls, name).restype = ctypes.c_char_p

    def call(self, name, device, *arguments):
        converted = []
        for a in arguments:
            if isinstance(a, torch.Tensor):
                assert a.is_contiguous() and a.dtype == torch.float32
                converted.append(ctypes.c_void_p(a.data_ptr()))
            elif isinstance(a, bool):
                converted.append(ctypes.c_int(a))
            elif isinstance(a, int):
                converted.append(ctypes.c_int64(a))
            else:
                converted.append(ctypes.c_double(a))
        if device == "cuda":
            torch.cuda.synchronize()
        failure = getattr(self.calls, name)(device.encode(), *converted)
        if failure:
            raise RuntimeError(failure.decode())
        return self.calls.last_implementation().decode()


# Errors in pieces of rows, so that the float64 of the largest workload is never whole.
def errors(result, reference_of_rows, rows_at_once):
    squares = size = worst = 0.0
    for begin in range(0, result.shape[0], rows_at_once):
        rows = slice(begin, begin + rows_at_once)
        want = reference_of_rows(rows)
        difference = (result[rows].double() - want).abs()
        squares += difference.square().sum().item()
        size += want.square().sum().item()
        # Relative to the element, of those that count (1e-30 and up).
        worst = max(worst, (difference / want.clamp(min=1e-30)).max().item())
    return (squares / size) ** 0.5, worst


class Run:
    def __init__(self, options, library, device):
        self.options, self.library, self.device = options, library, device
        self.full = options.full or (device == "cuda" and not options.small)
        self.slack = options.slack or (1.25 if device == "cuda" else 2.0)
        self.failed = False

    def report(self, name, ours, theirs, implementation):
        half_unit = 2.0**-24
        fine = all(a <= self.slack * b + half_unit for a, b in zip(ours, theirs))
        self.failed = self.failed or not fine
        print(
            f"{self.device:5} {name:38} whole: ours {ours[0]:.2e} PyTorch {theirs[0]:.2e}   "
            f"worst element: ours {ours[1]:.2e} PyTorch {theirs[1]:.2e}   {'ok' if fine else 'WORSE'} ({implementation})",
            flush=True,
        )

    def softmax(self):
        rows, columns = (4096, 393216) if self.full else (32, 39321)
        x = torch.randn(rows, columns, device=self.device)
        y = torch.empty_like(x)
        implementation = self.library.call("softmax", self.device, rows, columns, x, y)
        want = lambda r: torch.softmax(x[r].double(), dim=1)
        ours = errors(y, want, 64)
        torch.softmax(x, dim=1, out=y)
        self.report(f"softmax {rows} x {columns}", ours, errors(y, want, 64), implementation)

    def head_operands(self):
        m, n, k = (1024, 8192, 8192) if self.full else (128, 1000, 1024)
        torch.manual_seed(2)
        linear = nn.Linear(k, n, device=self.device)
        return m, n, k, torch.randn(m, k, device=self.device), linear

    @torch.no_grad()
    def gelu_head(self):
        m, n, k, x, linear = self.head_operands()
        y = torch.empty(m, n, device=self.device)
        implementation = self.library.call(
            "gelu_head", self.device, m, n, k, x, linear.weight, linear.bias, y, self.options.tf32
        )
        theirs = torch.softmax(nn.functional.gelu(linear(x)), dim=1)
        exact = torch.softmax(nn.functional.gelu(linear.double()(x.double())), dim=1)
        want = lambda r: exact[r]
        self.report(f"Linear + GELU + softmax {m} x {n} x {k}", errors(y, want, m), errors(theirs, want, m), implementation)

    @torch.no_grad()
    def batch_norm_head(self, training):
        m, n, k, x, linear = self.head_operands()
        scale = 2.0
        norm = nn.BatchNorm1d(n, device=self.device)
        norm.train(training)
        for parameter in (norm.weight, norm.bias, norm.running_mean):
            parameter.normal_()
        norm.running_var.uniform_(0.5, 1.5)
        mean, variance = norm.running_mean.clone(), norm.running_var.clone()
        exact_norm = nn.BatchNorm1d(n, device=self.device, dtype=torch.float64)
        exact_norm.load_state_dict(norm.state_dict())
        exact_norm.train(training)
        y = torch.empty(m, n, device=self.device)
        implementation = self.library.call(
            "batch_norm_head", self.device, m, n, k, x, linear.weight, linear.bias, norm.weight, norm.bias, mean,
            variance, norm.eps, norm.momentum if training else -1.0, scale, y, self.options.tf32,
        )
        theirs = torch.softmax(norm(linear(x)) * scale, dim=1)
        exact = torch.softmax(exact_norm(linear.double()(x.double())) * scale, dim=1)
        want = lambda r: exact[r]
        mode = "training" if training else "evaluation"
        self.report(f"Linear + BatchNorm ({mode}) {m} x {n} x {k}", errors(y, want, m), errors(theirs, want, m), implementation)
        if training:
            for name, ours in (("running_mean", mean), ("running_var", variance)):
                self.report_running(name, ours, getattr(norm, name), getattr(exact_norm, name))

    def report_running(self, name, ours, theirs, exact):
        distance = lambda a: ((a.double() - exact).norm() / exact.norm()).item()
        self.report(f"  {name}", (distance(ours), 0.0), (distance(theirs), 0.0), "")


def main():
    options = parse()
    library = Library(options.library)
    devices = ("cpu", "cuda") if options.device == "all" else (options.device,)
    failed = False
    for device in devices:
        if device == "cuda" and not (torch.cuda.is_available() and library.calls.has_device(b"cuda")):
            print("cuda: not in this build or not on this machine")
            continue
        torch.backends.cuda.matmul.allow_tf32 = options.tf32
        run = Run(options, library, device)
        torch.manual_seed(1)
        run.softmax()
        run.gelu_head()
        run.batch_norm_head(training=True)
        run.batch_norm_head(training=False)
        failed = failed or run.failed
    library.calls.finish()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
