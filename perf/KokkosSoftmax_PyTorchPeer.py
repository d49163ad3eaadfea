#!/usr/bin/env python3
# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Measures PyTorch by the rules of kokkossoftmax_compare, alone or in turns with it.

    KokkosSoftmax_PyTorchPeer.py --compare build/perf/kokkossoftmax_compare

runs ours, PyTorch, ours, PyTorch on one shape after the other and prints one table, so that both and the
copy have met the same machine: memory's speed changes from hour to hour on a machine that is shared. Without
--compare, PyTorch is measured alone. With --peer, torch.compile, the cuDNN that PyTorch brings and QuACK
take turns too. Bytes are those of the input and the output; times are medians over rounds, after a warm-up,
of calls into an output that exists already (out=); what torch.compile made and QuACK return a new one, which
PyTorch's allocator has at hand.

Exit status: 0 when everything ran, 1 when something could not run or a result of ours was out of tolerance,
2 for wrong flags.
"""

import argparse
import ctypes
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import weakref

# Asked before PyTorch is imported: with OMP_PROC_BIND its OpenMP runtime binds this process to one core, and a program
# started from here would inherit that.
CORES = os.sched_getaffinity(0)

PEERS = {"eager": "PyTorch", "compiled": "torch.compile", "cudnn": "cuDNN", "quack": "QuACK"}
BACKENDS = {"cpu": ("OpenMP", "Threads", "HPX", "Serial"), "cuda": ("Cuda", "HIP")}
FIT_ROWS = 4096


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compare", metavar="PROGRAM", help="kokkossoftmax_compare, to run in turns with PyTorch")
    parser.add_argument("--peer", default="eager", help="comma list of eager (PyTorch), compiled (torch.compile), cudnn, quack, or all")
    parser.add_argument("--operation", default="softmax", help="comma list of softmax, log_softmax, logsumexp, or all")
    parser.add_argument(
        "--shape",
        default="64,256,1024,4096,16384,65536,131072,fitx393216,1048576",
        help="comma list of ROWSxCOLUMNS, COLUMNS (rows that make --total) or fitxCOLUMNS (as in kokkossoftmax_compare)",
    )
    parser.add_argument("--scalar", default="float", help="comma list of float, double, half, bfloat16, IN:OUT, or all")
    parser.add_argument("--device", default="all", help="cpu, cuda, or all that PyTorch has (default)")
    parser.add_argument("--axis", type=int, choices=(0, 1), default=1)
    parser.add_argument("--total", default="", help="bytes of input for a shape without rows (256M on the cpu, 1G on cuda)")
    parser.add_argument("--turns", type=int, default=2, help="how often each has its turn (default: 2)")
    parser.add_argument("--time-budget", type=float, default=1.0, help="seconds a turn and a shape (default: 1)")
    parser.add_argument("--threads", type=int, default=0, help="threads of the cpu (default: those that the process may use)")
    parser.add_argument("--graph", action="store_true", help="cuda: 20 calls in a graph, on both sides")
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    parser.add_argument("--peer-json", metavar="FILE", help="write every number as JSON")
    options = parser.parse_args()
    if options.turns < 1 or options.time_budget <= 0 or options.threads < 0:
        parser.error("--turns and --time-budget are positive, --threads is not negative")
    return parser, options


def bytes_of(text, parser):
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdigit() or int(digits) == 0:
        parser.error(f"--total: '{text}' is not a number of bytes")
    return int(digits) * unit


def host_available():
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 4 << 30


def duration(seconds):
    for unit, scale in (("us", 1e6), ("ms", 1e3), ("s", 1.0)):
        if seconds * scale < 1000 or unit == "s":
            value = seconds * scale
            return f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"


class Case:
    """One operation on one device, with a shape and a pair of scalars: the operands that all peers work on."""

    def __init__(self, torch, device, operation, rows, columns, scalar_in, scalar_out, axis):
        self.torch, self.device, self.operation, self.axis = torch, device, operation, axis
        types = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
        self.type_in, self.type_out = types[scalar_in], types[scalar_out]
        self.x = torch.empty((rows, columns), dtype=self.type_in, device=device).uniform_(-3, 3)
        shape = (rows, columns) if operation != "logsumexp" else (rows if axis == 1 else columns,)
        self.y = torch.empty(shape, dtype=self.type_out, device=device)

    def bytes(self):
        return sum(t.numel() * t.element_size() for t in (self.x, self.y))

    def call_of(self, peer):
        """What `peer` is called by; LookupError with the reason where it has no such call."""
        torch, x, y, axis = self.torch, self.x, self.y, self.axis
        # A type that differs from the input's is an argument only where it is needed.
        kind = {} if self.type_in == self.type_out else {"dtype": self.type_out}
        function = getattr(torch, self.operation)
        if self.operation == "logsumexp":
            convert = (lambda t: t.to(self.type_out)) if kind else (lambda t: t)
            plain = lambda t, **out: function(convert(t), axis, **out)
        else:
            plain = lambda t, **out: function(t, axis, **kind, **out)
        if peer == "eager":
            return lambda: plain(x, out=y)
        if peer == "compiled":
            torch.compiler.reset()  # else a tenth shape falls back to the interpreter
            compiled = torch.compile(plain, dynamic=False)
            return lambda: compiled(x)
        if peer == "cudnn":
            if self.operation == "logsumexp" or axis != 1 or kind or self.device != "cuda":
                raise LookupError("cuDNN is measured on softmax and log_softmax along the last axis, with one type, on CUDA alone")
            return cudnn_call(torch, x, y, self.operation)
        if self.operation != "softmax" or axis != 1 or kind or self.device != "cuda":
            raise LookupError("QuACK has softmax along the last axis, with one type, on CUDA alone")
        try:
            from quack.softmax import softmax_fwd
        except ImportError as error:
            raise LookupError(f"QuACK cannot be imported: {error}") from error
        return lambda: softmax_fwd(x)


class Cudnn:
    """cuDNN with one handle, which lives as long as the process; LookupError where there is none."""

    def __init__(self, torch):
        if not torch.backends.cudnn.is_available():
            raise LookupError("this PyTorch has no cuDNN")
        self.library = ctypes.CDLL(f"libcudnn.so.{torch.backends.cudnn.version() // 10000}")
        self.library.cudnnGetErrorString.restype = ctypes.c_char_p
        self.handle = ctypes.c_void_p()
        self.check(self.library.cudnnCreate(ctypes.byref(self.handle)))

    def check(self, status):
        """LookupError where cuDNN refuses."""
        if status != 0:
            raise LookupError(f"cuDNN: {self.library.cudnnGetErrorString(status).decode()}")


@functools.lru_cache(maxsize=None)
def cudnn_of(torch):
    """The process' Cudnn."""
    return Cudnn(torch)


def cudnn_call(torch, x, y, operation):
    """cudnnSoftmaxForward on PyTorch's current stream; LookupError where there is no cuDNN, or it refuses."""
    cudnn = cudnn_of(torch)
    library, check = cudnn.library, cudnn.check
    descriptor = ctypes.c_void_p()
    check(library.cudnnCreateTensorDescriptor(ctypes.byref(descriptor)))
    # cudnnDataType_t, CUDNN_TENSOR_NCHW, CUDNN_SOFTMAX_ACCURATE or _LOG, CUDNN_SOFTMAX_MODE_INSTANCE
    kind = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 9}[x.dtype]
    check(library.cudnnSetTensor4dDescriptor(descriptor, 0, kind, *x.shape, 1, 1))
    algorithm = {"softmax": 1, "log_softmax": 2}[operation]
    factor = ctypes.c_double if x.dtype == torch.float64 else ctypes.c_float
    one, zero = factor(1), factor(0)

    def call():
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        check(library.cudnnSetStream(cudnn.handle, stream))
        operands = (descriptor, ctypes.c_void_p(x.data_ptr()), ctypes.byref(zero), descriptor, ctypes.c_void_p(y.data_ptr()))
        check(library.cudnnSoftmaxForward(cudnn.handle, algorithm, 0, ctypes.byref(one), *operands))
        return y

    weakref.finalize(call, library.cudnnDestroyTensorDescriptor, descriptor)
    return call


class Peer:
    """One of PEERS on one case."""

    def __init__(self, case, name, graph):
        torch = self.torch = case.torch
        self.case, self.name, self.on_gpu = case, name, case.device == "cuda"
        self.call = case.call_of(name)
        self.invoke, self.calls = self.call, 1
        case.y.fill_(float("nan"))
        self.y = self.call()
        self.fence()
        self.error = self.largest_error()
        if graph and self.on_gpu:
            self.calls = 20
            recorded = torch.cuda.CUDAGraph()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                self.call()
                stream.synchronize()
                with torch.cuda.graph(recorded, stream=stream):
                    for _ in range(self.calls):
                        self.call()
            self.invoke = recorded.replay

    def fence(self):
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def largest_error(self):
        """On the first, the middle and the last row; defined as in kokkossoftmax_compare."""
        torch, axis, operation = self.torch, self.case.axis, self.case.operation
        rows = self.case.x.shape[1 - axis]
        index = torch.tensor(sorted({0, rows // 2, rows - 1}), device=self.case.device)
        x = self.case.x.index_select(1 - axis, index).double()
        x = x if axis == 1 else x.T
        y = self.y.index_select(0 if operation == "logsumexp" else 1 - axis, index).double()
        if operation == "logsumexp":
            reference = torch.logsumexp(x, 1)
            scale = torch.maximum(reference.abs(), x.amax(1).abs()).clamp(min=1)
        else:
            y = y if axis == 1 else y.T
            if operation == "softmax":
                reference = torch.softmax(x, 1)
                scale = reference
            else:
                reference = torch.log_softmax(x, 1)
                scale = (x.amax(1, keepdim=True) - x).clamp(min=max(1.0, math.log(x.shape[1])))
        error = (y - reference).abs() / scale
        if operation == "softmax":  # subnormal results have few digits
            error = error.where(reference >= torch.finfo(self.case.type_out).tiny, 0)
        return math.inf if error.isnan().any() else error.max().item()

    def seconds(self, count):
        self.fence()
        begin = time.perf_counter()
        for _ in range(count):
            self.invoke()
        self.fence()
        return time.perf_counter() - begin

    def turn(self, budget):
        """The seconds a call of each round."""
        self.seconds(1)
        shortest = 10e-3 if self.on_gpu else 2e-3
        count, once = 1, self.seconds(1)
        while once * count < shortest and count < 100000:
            count = int(max(count * 2, min(count * 10, shortest / once)))
            once = self.seconds(count) / count
        times, begin = [], time.perf_counter()
        while len(times) < 3 or time.perf_counter() - begin < budget:
            times.append(self.seconds(count) / count / self.calls)
        return times


def ours(options, device, operation, rows, columns, scalar, flags=()):
    """One turn of kokkossoftmax_compare: its results of the backends that belong to `device`."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "result.json")
        command = [options.compare, "--kokkos-disable-warnings", "--quiet", "--operation", operation, "--shape", f"{rows}x{columns}"]
        command += ["--scalar", scalar, "--axis", str(options.axis), "--json", file, *flags]
        command += ["--time-budget", str(2 * options.time_budget)]  # half of it goes to the copy
        command += ["--backend", ",".join(options.ours[device])] + (["--graph"] if options.graph else [])
        if options.threads:
            command += [f"--kokkos-num-threads={options.threads}"]
        unbound = lambda: os.sched_setaffinity(0, CORES)
        ran = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=unbound)
        if not os.path.exists(file):
            raise RuntimeError(f"{' '.join(command)} ended with {ran.returncode}:\n{ran.stderr}")
        if ran.returncode != 0:
            print(ran.stderr, file=sys.stderr)
        with open(file, encoding="utf-8") as text:
            return json.load(text)


def combined(turns):
    """Rounds of all turns: each turn's median counts alike."""
    return statistics.median(statistics.median(times) for times in turns), min(min(times) for times in turns)


def print_table(rows, markdown):
    headings = ["operation", "shape", "scalar", "who", "implementation", "median", "minimum", "GB/s", "copy GB/s"]
    headings += ["of copy", "error", "over the best peer", "checked"]
    cells = [headings]
    for row in rows:
        copy = row["copy_gb_per_s"]
        cells.append(
            [row["operation"], row["shape"], row["scalar"], row["who"], row["implementation"]]
            + [duration(row["median_s"]), duration(row["minimum_s"]), f"{row['gb_per_s']:.1f}"]
            + [f"{copy:.1f}" if copy else "-", f"{row['gb_per_s'] / copy:.3f}" if copy else "-"]
            + [f"{row['error']:.1e}", f"{row['over_peer']:.2f}" if row["over_peer"] else "-", row["status"]]
        )
    text_columns = 5
    if markdown:
        print("| " + " | ".join(headings) + " |")
        print("|" + "---|" * text_columns + "---:|" * (len(headings) - text_columns))
        for line in cells[1:]:
            print("| " + " | ".join(line) + " |")
        return
    widths = [max(len(line[c]) for line in cells) for c in range(len(headings))]
    for number, line in enumerate(cells):
        print("  ".join(t.ljust(w) if c < text_columns else t.rjust(w) for c, (t, w) in enumerate(zip(line, widths))))
        if number == 0:
            print("  ".join("-" * width for width in widths))


def main():
    parser, options = parse()
    try:
        import torch
    except ImportError as error:
        print(f"PyTorch cannot be imported: {error}", file=sys.stderr)
        return 1
    torch.set_grad_enabled(False)
    threads = options.threads or len(CORES)
    torch.set_num_threads(threads)
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    if options.device != "all":
        if options.device not in devices:
            parser.error(f"--device: this PyTorch has {', '.join(devices)}")
        devices = [options.device]
    operations = ["softmax", "log_softmax", "logsumexp"] if options.operation == "all" else options.operation.split(",")
    scalars = ["float", "double", "half", "bfloat16"] if options.scalar == "all" else options.scalar.split(",")
    for operation in operations:
        if operation not in ("softmax", "log_softmax", "logsumexp"):
            parser.error(f"--operation: PyTorch is measured on softmax, log_softmax and logsumexp, not '{operation}'")
    peers = list(PEERS) if options.peer == "all" else options.peer.split(",")
    for peer in peers:
        if peer not in PEERS:
            parser.error(f"--peer: '{peer}' is none of {', '.join(PEERS)}")
    size = {"float": 4, "double": 8, "half": 2, "bfloat16": 2}
    for scalar in scalars:
        if any(part not in size for part in scalar.split(":")) or scalar.count(":") > 1:
            parser.error(f"--scalar: '{scalar}' is not IN or IN:OUT of {', '.join(size)}")

    listed = ""
    if options.compare:
        command = [options.compare, "--kokkos-disable-warnings", "--list"]
        listing = subprocess.run(command, capture_output=True, text=True, check=False)
        if listing.returncode != 0:
            print(f"{' '.join(command)} ended with {listing.returncode}:\n{listing.stderr}", file=sys.stderr)
            return 1
        listed = listing.stdout
    options.ours = {d: [b for b in BACKENDS[d] if f"\n  {b}: " in listed] for d in devices}

    table, failed, library = [], False, ""
    for device in devices:
        total = bytes_of(options.total, parser) if options.total else (1 << 30 if device == "cuda" else 256 << 20)
        for text in options.shape.split(","):
            for operation in operations:
                for scalar in scalars:
                    scalar_in, scalar_out = scalar.split(":") if ":" in scalar else (scalar, scalar)
                    parts = text.split("x")
                    if len(parts) > 2 or not all(p.isdigit() and int(p) > 0 for p in parts if p != "fit") or parts[-1] == "fit":
                        parser.error(f"--shape: '{text}' is not ROWSxCOLUMNS, COLUMNS or fitxCOLUMNS")
                    columns = int(parts[-1])
                    row = columns * (size[scalar_in] + (size[scalar_out] if operation != "logsumexp" else 0))
                    if len(parts) == 1:
                        rows = max(1, total // (columns * size[scalar_in]))
                    elif parts[0] == "fit":
                        free = 0.8 * torch.cuda.mem_get_info()[0] / 2 if device == "cuda" else host_available() / 4
                        rows = int(max(1, min(FIT_ROWS, free // row)))
                    else:
                        rows = int(parts[0])
                    if options.axis == 0 and len(parts) == 1 or options.axis == 0 and parts[0] == "fit":
                        rows, columns = columns, rows
                    shape = f"{rows} x {columns}" + (" axis 0" if options.axis == 0 else "")
                    print(f"{operation} {shape} {scalar} on {device} ...", end="", file=sys.stderr, flush=True)
                    try:
                        case = Case(torch, device, operation, rows, columns, scalar_in, scalar_out, options.axis)
                        moved = case.bytes()
                        rivals, reasons = [], []
                        for name in peers:
                            try:
                                rivals.append(Peer(case, name, options.graph))
                            # Where a rival of PyTorch's fails that is a result, and ends nothing.
                            except Exception as error:
                                failed = failed or name == "eager"
                                reason = " ".join(str(error).split()) or type(error).__name__
                                reasons.append(f"{PEERS[name]}: {reason[:120]}")
                        peer_turns, our_turns, copies = [[] for _ in rivals], {}, []
                        for _ in range(options.turns):
                            if options.ours[device]:
                                report = ours(options, device, operation, rows, columns, scalar)
                                library = report["library"]
                                for result in report["results"]:
                                    our_turns.setdefault(result["backend"], []).append(result)
                                    copies += [max((y["gb_per_s"] for y in result.get("yardsticks", [])), default=0)]
                            for turns, rival in zip(peer_turns, rivals):
                                turns.append(rival.turn(options.time_budget))
                    except (RuntimeError, MemoryError) as error:
                        failed = True
                        print(f" failed: {error}", file=sys.stderr)
                        continue
                    copy = statistics.median(copies) if copies else 0
                    times = [combined(turns) for turns in peer_turns]
                    best = min((median for median, _ in times), default=0)
                    common = {"operation": operation, "shape": shape, "scalar": scalar, "copy_gb_per_s": copy}
                    common |= {"rows": rows, "columns": columns, "axis": options.axis, "bytes": moved}
                    for backend, results in our_turns.items():
                        bad = [r for r in results if r["status"] != "ok"]
                        failed = failed or bool(bad)
                        timed = [r for r in results if "median_s" in r]
                        if not timed:
                            continue
                        our_median, our_minimum = combined([[r["median_s"], r["median_s"], r["minimum_s"]] for r in timed])
                        table.append(
                            common
                            | {"who": backend, "implementation": timed[0]["implementation"], "median_s": our_median}
                            | {"minimum_s": our_minimum, "gb_per_s": moved / our_median * 1e-9}
                            | {"error": max(math.inf if r["error"] is None else r["error"] for r in timed), "over_peer": best / our_median}
                            | {"status": bad[0]["status"] if bad else "ok"}
                        )
                        print(f" {backend} {moved / our_median * 1e-9:.1f} GB/s ({best / our_median:.2f})", end="", file=sys.stderr)
                    for rival, (median, minimum) in zip(rivals, times):
                        table.append(
                            common
                            | {"who": f"{PEERS[rival.name]} {device}", "implementation": torch.__version__, "median_s": median}
                            | {"minimum_s": minimum, "gb_per_s": moved / median * 1e-9, "error": rival.error}
                            | {"over_peer": 0, "status": "-"}
                        )
                        print(f", {PEERS[rival.name]} {moved / median * 1e-9:.1f}", end="", file=sys.stderr)
                    print("".join(f"; {reason}" for reason in reasons), file=sys.stderr)
                    del case, rivals
                    if device == "cuda":
                        torch.cuda.empty_cache()

    where = f"{threads} threads" + (f", {torch.cuda.get_device_name()}" if "cuda" in devices else "")
    bullet = "- " if options.markdown else ""
    against = f"KokkosSoftmax {library} in turns with " if library else ""
    print(f"{bullet}{against}{', '.join(PEERS[name] for name in peers)} (PyTorch {torch.__version__}), {where}, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}\n")
    print_table(table, options.markdown)
    if options.peer_json:
        with open(options.peer_json, "w", encoding="utf-8") as out:
            json.dump({"torch": torch.__version__, "library": library, "threads": threads, "results": table}, out, indent=1)
    return 1 if failed or not table else 0


if __name__ == "__main__":
    sys.exit(main())
