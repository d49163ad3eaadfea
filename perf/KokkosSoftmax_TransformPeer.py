#!/usr/bin/env python3
# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Softmax with logit transforms, through the Python package or a program in C++, beside PyTorch and torch.compile.

    KOKKOSSOFTMAX_LIBRARY=build/src/libkokkossoftmax_c.so PYTHONPATH=src/python perf/KokkosSoftmax_TransformPeer.py
    KokkosSoftmax_TransformPeer.py --compare build/perf/kokkossoftmax_compare_transforms

A copy moves as many bytes as the input, the output and the transform's operands have, but for what a causal mask
drops of input and operands, which need not be read, and takes turns with the others; a figure is the copy's time over
the call's. Every result of ours is checked against float64.

Exit status: 0 when everything ran, 1 when something could not run or a result of ours was out of tolerance,
2 for wrong flags.
"""

import argparse
import importlib
import statistics
import sys

import KokkosSoftmax_PyTorchPeer as peer

TOLERANCE = {"float": 2e-5, "double": 1e-12, "half": 2e-3, "bfloat16": 1e-2}
TRANSFORMS = ("none", "scale", "causal", "scale_causal", "mask", "mask_row", "scale_mask", "bias", "bias_row")
TRANSFORMS += ("temperature", "temperature_mask", "gelu", "gelu_mask", "bias_gelu", "bias_gelu_row")


class TransformedCase(peer.Case):
    """Logits, the operands of a transform of them, and both as ours and as PyTorch's."""

    def __init__(self, torch, ks, device, transform, rows, columns, scalar, axis):
        super().__init__(torch, device, "softmax", rows, columns, scalar, scalar, axis)
        self.ks, self.steps = ks, [] if transform == "none" else transform.removesuffix("_row").split("_")
        shape = [rows, columns]
        if transform.endswith("_row"):
            shape[1 - axis] = 1
        self.operands = {}
        if "mask" in self.steps:
            self.operands["mask"] = torch.rand(shape, device=device) > 0.3
        if "bias" in self.steps:
            self.operands["bias"] = torch.randn(shape, device=device).to(self.type_in)
        if "temperature" in self.steps:
            kind = torch.float64 if self.type_in == torch.float64 else torch.float32
            self.operands["temperature"] = torch.rand(self.x.shape[1 - axis], device=device, dtype=kind) + 0.5

    def bytes(self):
        """That have to be moved."""
        dropped = 0
        if "causal" in self.steps:
            rows, columns = self.x.shape
            short = min(rows, columns)
            dropped = short * columns - short * (short + 1) // 2
        of_x = [self.x, *(t for t in self.operands.values() if t.shape == self.x.shape)]
        total = super().bytes() + sum(t.numel() * t.element_size() for t in self.operands.values())
        return total - dropped * sum(t.element_size() for t in of_x)

    def chain(self):
        """As the package's transform; None without one."""
        made = {"scale": lambda: self.ks.scale(0.125), "causal": self.ks.causal, "gelu": self.ks.gelu}
        made |= {name: lambda of=getattr(self.ks, name), t=t: of(t) for name, t in self.operands.items()}
        chain = None
        for step in self.steps:
            chain = made[step]() if chain is None else chain | made[step]()
        return chain

    def transformed(self, x, operands, queries):
        """As PyTorch writes it; `queries` are the indices of x's rows, which are along its last axis then."""
        torch = self.torch
        for step in self.steps:
            if step == "scale":
                x = x * 0.125
            elif step == "causal":
                x = x.masked_fill(torch.arange(x.shape[1], device=x.device)[None] > queries[:, None], float("-inf"))
            elif step == "mask":
                x = x.masked_fill(~operands["mask"], float("-inf"))
            elif step == "bias":
                x = x + operands["bias"]
            elif step == "gelu":
                x = torch.nn.functional.gelu(x)
            else:
                x = (x / operands["temperature"].unsqueeze(self.axis)).to(x.dtype)
        return x

    def call_of(self, name):
        torch, x, y = self.torch, self.x, self.y
        if name == "ours":
            chain = self.chain()
            return lambda: self.ks.softmax(x, self.axis, chain, out=y)
        queries = torch.arange(x.shape[0], device=x.device)
        whole = lambda t, operands, q: torch.softmax(self.transformed(t, operands, q), self.axis)
        if name == "compiled":
            torch.compiler.reset()
            whole = torch.compile(whole, dynamic=False)
        return lambda: whole(x, self.operands, queries)


class TransformedPeer(peer.Peer):
    def largest_error(self):
        """Relative, on the first, the middle and the last row."""
        case, torch, across = self.case, self.torch, 1 - self.case.axis
        rows = case.x.shape[across]
        index = torch.tensor(sorted({0, rows // 2, rows - 1}), device=case.device)

        def chosen(t):
            dimension = across if t.dim() == 2 else 0
            t = t.index_select(dimension, index) if t.shape[dimension] == rows else t
            return t if t.dtype == torch.bool else t.double()

        operands = {name: chosen(t) for name, t in case.operands.items()}
        reference = torch.softmax(case.transformed(chosen(case.x), operands, index), case.axis)
        reference = reference.nan_to_num(0)  # a row that a mask drops whole
        error = (chosen(self.y) - reference).abs() / reference
        return error.where(reference >= torch.finfo(case.type_out).tiny, 0).max().item()


class Program:
    """Ours as kokkossoftmax_compare_transforms measures and checks it: it has operands of its own."""

    def __init__(self, options, case, transform, scalar):
        self.options, self.case, self.transform, self.scalar = options, case, transform, scalar
        self.error, self.implementation = 0.0, ""

    def turn(self, budget):  # pylint: disable=unused-argument
        """The seconds a call, as the program's median."""
        flags = [] if self.transform == "none" else ["--transform", self.transform]
        rows, columns = self.case.x.shape
        report = peer.ours(self.options, self.case.device, "softmax", rows, columns, self.scalar, flags)
        result = next(r for r in report["results"] if "median_s" in r)
        self.error = max(self.error, float("inf") if result["error"] is None else result["error"])
        self.implementation = result["implementation"]
        return [result["median_s"]]


class Copy(peer.Peer):
    """Of as many bytes."""

    def __init__(self, case):  # pylint: disable=super-init-not-called
        torch = self.torch = case.torch
        self.on_gpu, self.calls = case.device == "cuda", 1
        source, target = (torch.zeros(case.bytes() // 2, dtype=torch.uint8, device=case.device) for _ in range(2))
        self.invoke = lambda: target.copy_(source)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transform", help=f"comma list (default: all that there are for the rest of the flags): {','.join(TRANSFORMS)}")
    parser.add_argument("--shape", default="65536x4096,4096x65536", help="comma list of ROWSxCOLUMNS")
    parser.add_argument("--scalar", default="float,bfloat16", help="comma list of float, double, half, bfloat16")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--axis", type=int, choices=(0, 1), default=1)
    parser.add_argument("--compare", metavar="PROGRAM", help="kokkossoftmax_compare_transforms, in place of the package")
    parser.add_argument("--peer", default="eager,compiled", help="comma list of eager (PyTorch), compiled (torch.compile); empty: none")
    parser.add_argument("--turns", type=int, default=2, help="how often each has its turn (default: 2)")
    parser.add_argument("--time-budget", type=float, default=0.1, help="seconds a turn (default: 0.1)")
    options = parser.parse_args()
    # The program lacks one; along the first axis a causal mask has no queries.
    missing = ("scale_mask",) * bool(options.compare) + ("causal", "scale_causal") * (options.axis == 0)
    transforms = tuple(name for name in TRANSFORMS if name not in missing)
    options.transform = options.transform or ",".join(transforms)
    lists = {name: getattr(options, name).split(",") for name in ("transform", "scalar", "shape")}
    lists["peer"] = [name for name in options.peer.split(",") if name]
    for name, allowed in (("transform", transforms), ("scalar", TOLERANCE), ("peer", ("eager", "compiled"))):
        for value in lists[name]:
            if value not in allowed:
                parser.error(f"--{name}: '{value}' is none of {', '.join(allowed)}")
    for shape in lists["shape"]:
        if shape.count("x") != 1 or not all(p.isdigit() and int(p) > 0 for p in shape.split("x")):
            parser.error(f"--shape: '{shape}' is not ROWSxCOLUMNS")
    if options.turns < 1 or options.time_budget <= 0:
        parser.error("--turns and --time-budget are positive")
    options.ours, options.graph, options.threads = {"cuda": ["Cuda"], "cpu": ["OpenMP"]}, False, 0
    return options, lists


def main():
    options, lists = parse()
    try:
        import torch
        ks = None if options.compare else importlib.import_module("kokkossoftmax")
    except ImportError as error:
        print(f"cannot be imported: {error}", file=sys.stderr)
        return 1
    torch.set_grad_enabled(False)
    names = ["ours"] + lists["peer"]
    titles = {"ours": "KokkosSoftmax", **peer.PEERS}
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name() if options.device == 'cuda' else 'host'}; of a copy of all bytes\n")
    print("| " + " | ".join(["shape", "scalar", "transform", "us", *(titles[n] for n in names), "copy GB/s", "error", "implementation"]) + " |")
    print("|---|---|---|" + "---:|" * (len(names) + 3) + "---|")
    failed = False
    for shape in lists["shape"]:
        rows, columns = (int(part) for part in shape.split("x"))
        for scalar in lists["scalar"]:
            for transform in lists["transform"]:
                case = TransformedCase(torch, ks, options.device, transform, rows, columns, scalar, options.axis)
                runs = {"copy": Copy(case)}
                for name in names:
                    if name == "ours" and options.compare:
                        runs[name] = Program(options, case, transform, scalar)
                        continue
                    try:
                        runs[name] = TransformedPeer(case, name, False)
                    except Exception as error:  # of a rival's: a result
                        if name == "ours":
                            raise
                        print(f"{titles[name]}, {transform}: {error}", file=sys.stderr)
                    if name == "ours":
                        runs[name].implementation = ks.last_implementation()
                turns = {name: [] for name in runs}
                for _ in range(options.turns):
                    for name, run in runs.items():
                        turns[name].append(statistics.median(run.turn(options.time_budget)))
                time = {name: statistics.median(of) for name, of in turns.items()}
                error = runs["ours"].error
                good = error <= TOLERANCE[scalar]
                failed = failed or not good
                cells = [f"{rows} x {columns}" + (" axis 0" if options.axis == 0 else ""), scalar, transform, f"{1e6 * time['ours']:.1f}"]
                cells += [f"{time['copy'] / time[n]:.2f}" if n in time else "-" for n in names]
                cells += [f"{case.bytes() / time['copy'] * 1e-9:.0f}", f"{error:.1e}{'' if good else ' WRONG'}", runs["ours"].implementation]
                print("| " + " | ".join(cells) + " |", flush=True)
                del case, runs
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
