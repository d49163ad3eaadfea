#!/usr/bin/env python3
# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The users' workloads: Model (PyTorch) beside ModelNew (kokkossoftmax), checked on random inputs and then timed.

    compare_workloads.py [--device cpu|cuda|all] [--full | --small] [--tf32] [--no-times] [--json FILE]

The two are made with the same seed, have the same parameters by name, and a state_dict carries over. On each of
five inputs torch.allclose must hold at 1e-4, and a stricter bound against the same model in float64:

- softmax: every element within 1e-6 + |x - max| 2^-24 of the exact one, relatively.
- heads: the relative error (of the whole output, and of its worst element) may be no larger than PyTorch's own, save
  for what a different order of the same sums makes of it (--slack: 1.25 on a GPU; 2 on a CPU, where they multiply
  with different BLAS libraries, whose roundings are nearly all of a head's error) and half a unit in the last place.
  BatchNorm's running statistics likewise.

Times are medians, on a GPU by CUDA events: cold, with the L2 flushed before each call, and warm, one call after the
other; in a graph too, which takes the host out of it. Sizes are the users' on a GPU, smaller on a CPU.

Exit status: 0 when all agree, 1 when not, 77 where PyTorch is absent.
"""

import argparse
import copy
import json
import statistics
import sys
import time

try:
    import torch
except ImportError as error:
    print(f"skipped: PyTorch is not here ({error})")
    sys.exit(77)

import kokkossoftmax
from workloads import linear_batch_norm_softmax, linear_gelu_softmax, softmax

WORKLOADS = {
    "softmax": softmax,
    "linear_gelu_softmax": linear_gelu_softmax,
    "linear_batch_norm_softmax": linear_batch_norm_softmax,
}
HALF_UNIT = 2.0**-24


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda", "all"), default="all")
    parser.add_argument("--workload", default="all", help=f"comma list of {', '.join(WORKLOADS)}, or all")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--full", action="store_true", help="the users' sizes on every device")
    size.add_argument("--small", action="store_true", help="small sizes on every device")
    parser.add_argument("--inputs", type=int, default=5, help="random inputs to check (default: 5)")
    parser.add_argument("--tf32", action="store_true", help="TF32 products, in PyTorch too (cuda)")
    parser.add_argument("--slack", type=float, help="largest factor over PyTorch's error")
    parser.add_argument("--no-times", action="store_true", help="check alone")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto", help="torch.compile(Model) too (auto: cuda)")
    parser.add_argument("--calls", type=int, default=30, help="calls timed a row of the table (default: 30)")
    parser.add_argument("--json", metavar="FILE", help="write every number")
    return parser.parse_args()


def same_state(model, new):
    a, b = model.state_dict(), new.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def errors(result, want_of_rows, rows_at_once):
    """Relative errors: of the whole, and of the worst element; in pieces, so that a large float64 is never whole."""
    squares = size = worst = 0.0
    for begin in range(0, result.shape[0], rows_at_once):
        rows = slice(begin, begin + rows_at_once)
        want = want_of_rows(rows)
        difference = (result[rows].double() - want).abs()
        squares += difference.square().sum().item()
        size += want.square().sum().item()
        worst = max(worst, (difference / want.clamp(min=1e-30)).max().item())
    return (squares / size) ** 0.5, worst


class Check:
    def __init__(self, options, device):
        self.device = device
        self.slack = options.slack or (1.25 if device == "cuda" else 2.0)
        self.failed = False
        self.rows = []

    def line(self, name, ours, theirs, fine, allclose=True):
        self.failed = self.failed or not (fine and allclose)
        self.rows.append({"device": self.device, "name": name, "ours": ours, "pytorch": theirs, "ok": fine and allclose})
        print(
            f"{self.device:5} {name:46} whole: ours {ours[0]:.2e} PyTorch {theirs[0]:.2e}   worst element: ours "
            f"{ours[1]:.2e} PyTorch {theirs[1]:.2e}   {'ok' if fine else 'WORSE'}{'' if allclose else ' NOT ALLCLOSE'}",
            flush=True,
        )

    def no_worse(self, ours, theirs):
        return all(a <= self.slack * b + HALF_UNIT for a, b in zip(ours, theirs))

    def softmax(self, name, x, ours, theirs, allclose):
        want = lambda rows: torch.softmax(x[rows].double(), dim=1)
        fine = True
        for begin in range(0, x.shape[0], 64):
            rows = slice(begin, begin + 64)
            exact, exponent = want(rows), x[rows].double()
            exponent = (exponent - exponent.amax(1, keepdim=True)).abs()
            fine = fine and bool(((ours[rows].double() - exact).abs() <= (1e-6 + exponent * HALF_UNIT) * exact).all())
        self.line(name, errors(ours, want, 64), errors(theirs, want, 64), fine, allclose)

    def head(self, name, exact, ours, theirs, allclose):
        want = lambda rows: exact[rows]
        a, b = errors(ours, want, 1024), errors(theirs, want, 1024)
        self.line(name, a, b, self.no_worse(a, b), allclose)

    def buffers(self, name, exact, ours, theirs):
        for key, want in exact.named_buffers():
            a, b = ours.get_buffer(key), theirs.get_buffer(key)
            if not want.is_floating_point():
                equal = bool((a == want).all())
                self.line(f"{name}: {key}", (0.0, 0.0), (0.0, 0.0), equal)
                continue
            distance = lambda v: ((v.double() - want).norm() / want.norm()).item()
            pair = (distance(a), 0.0), (distance(b), 0.0)
            self.line(f"{name}: {key}", *pair, self.no_worse(*pair))


def make_pair(workload, size, device, check):
    torch.manual_seed(0)
    model = workload.Model(*workload.get_init_inputs(size))
    torch.manual_seed(0)
    new = workload.ModelNew(*workload.get_init_inputs(size))
    if not same_state(model, new):
        check.failed = True
        print(f"{device}: the same seed does not give Model and ModelNew the same parameters")
    if hasattr(model, "bn"):  # parameters that a test would notice
        with torch.no_grad():
            torch.nn.init.normal_(model.bn.weight, 1.0, 0.2)
            torch.nn.init.normal_(model.bn.bias)
            model.scale.fill_(1.5)
    new.load_state_dict(model.state_dict())
    return model.to(device), new.to(device)


@torch.no_grad()
def check_workload(name, workload, size, device, options, check):
    model, new = make_pair(workload, size, device, check)
    exact = copy.deepcopy(model).double()
    for training in (True, False) if hasattr(model, "bn") else (True,):
        for m in (model, new, exact):
            m.train(training)
        mode = "" if not hasattr(model, "bn") else ", training" if training else ", evaluation"
        for seed in range(1, options.inputs + 1):
            torch.manual_seed(seed)
            (x,) = workload.get_inputs(size, device)
            ours, theirs = new(x), model(x)
            allclose = torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)
            label = f"{name} {' x '.join(str(s) for s in size.values())}{mode} {seed}"
            if name == "softmax":
                check.softmax(label, x, ours, theirs, allclose)
            else:
                check.head(label, exact(x.double()), ours, theirs, allclose)
            del x, ours, theirs
        if hasattr(model, "bn") and training:
            check.buffers(name, exact, new, model)


class Clock:
    """Milliseconds a call, medians."""

    def __init__(self, device, calls):
        self.device, self.calls = device, calls
        if device == "cuda":
            self.flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)

    def cold(self, call):
        times = []
        for _ in range(self.calls):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.flush.zero_()
            begin.record()
            call()
            end.record()
            times.append((begin, end))
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in times)

    def warm(self, call, batch=5):
        times = []
        for _ in range(max(3, self.calls // batch)):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(batch):
                call()
            end.record()
            times.append((begin, end))
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in times) / batch

    def host(self, call):
        times = []
        for _ in range(self.calls):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return 1e3 * statistics.median(times)

    def measure(self, call, graph):
        for _ in range(3):
            call()
        if self.device == "cpu":
            return {"warm": self.host(call)}
        torch.cuda.synchronize()
        times = {"cold": self.cold(call), "warm": self.warm(call)}
        if graph:
            recorded = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recorded):
                call()
            times["graph"] = self.warm(recorded.replay)
        return times


@torch.no_grad()
def time_workload(name, workload, size, device, options, check):
    model, new = make_pair(workload, size, device, check)
    torch.manual_seed(1)
    (x,) = workload.get_inputs(size, device)
    clock = Clock(device, options.calls)
    who = {"Model": model, "ModelNew": new}
    if options.compile == "on" or (options.compile == "auto" and device == "cuda"):
        who = {"Model": model, "torch.compile(Model)": torch.compile(copy.deepcopy(model)), "ModelNew": new}
    table = {}
    for title, module in who.items():
        table[title] = clock.measure(lambda: module(x), graph=title != "torch.compile(Model)")
    ours = table["ModelNew"]
    for title, times in table.items():
        cells = "  ".join(f"{kind} {value:9.4f} ms ({value / ours[kind]:5.2f})" for kind, value in times.items())
        print(f"{device:5} {name:28} {title:22} {cells}", flush=True)
    return {"device": device, "name": name, "size": size, "ms": table}


def main():
    options = parse()
    names = list(WORKLOADS) if options.workload == "all" else options.workload.split(",")
    devices = ("cpu", "cuda") if options.device == "all" else (options.device,)
    failed, checks, times = False, [], []
    torch.backends.cuda.matmul.allow_tf32 = options.tf32
    for device in devices:
        if not (kokkossoftmax.has_backend(device) and (device == "cpu" or torch.cuda.is_available())):
            print(f"{device}: not in this build or not on this machine")
            continue
        check = Check(options, device)
        full = options.full or (device == "cuda" and not options.small)
        for name in names:
            workload = WORKLOADS[name]
            size = workload.FULL if full else workload.SMALL
            check_workload(name, workload, size, device, options, check)
            if not options.no_times:
                times.append(time_workload(name, workload, size, device, options, check))
            if device == "cuda":
                torch.cuda.empty_cache()
        failed = failed or check.failed
        checks += check.rows
    if options.json:
        with open(options.json, "w", encoding="utf-8") as out:
            json.dump({"torch": torch.__version__, "checks": checks, "times": times}, out, indent=1)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
