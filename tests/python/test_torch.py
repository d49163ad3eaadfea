# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The Python package on PyTorch's tensors: values, streams, torch.compile, CUDA graphs."""

import gc
import itertools
import os
import subprocess
import sys
import unittest

import support

(torch,) = support.need("torch")
import kokkossoftmax as ks

OPERATIONS = {"softmax": ks.softmax, "log_softmax": ks.log_softmax, "logsumexp": ks.logsumexp}
TORCH = {"softmax": torch.softmax, "log_softmax": torch.log_softmax, "logsumexp": torch.logsumexp}
TOLERANCE = {torch.float32: 4e-6, torch.float64: 1e-13, torch.float16: 2e-3, torch.bfloat16: 2e-2}
HAS_CUDA = torch.cuda.is_available() and ks.has_backend("cuda")
DEVICES = os.environ.get("KOKKOSSOFTMAX_TEST_DEVICES", "cpu,cuda" if HAS_CUDA else "cpu").split(",")


def logits(*shape, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype).to(device)


def head_operands(device, m=64, n=200, k=96):
    x, w = logits(m, k, device=device, seed=1) / 4, logits(n, k, device=device, seed=2) / 4
    return x, w, logits(n, device=device, seed=3)


def double_head(x, w, b):
    return torch.softmax(torch.nn.functional.gelu(x.double() @ w.double().T + b.double()), 1)


class Values(unittest.TestCase):
    def test_every_dtype_rank_and_axis(self):
        shapes = [(7,), (5, 33), (3, 4, 19), (1, 2, 1, 2, 1, 2, 1, 9)]
        for device, dtype, shape, name in itertools.product(DEVICES, TOLERANCE, shapes, OPERATIONS):
            x = logits(*shape, dtype=dtype, device=device)
            for dim in range(-len(shape), len(shape)):
                with self.subTest(device=device, dtype=dtype, shape=shape, operation=name, dim=dim):
                    y = OPERATIONS[name](x, dim)
                    want = TORCH[name](x.double(), dim)
                    self.assertEqual((y.dtype, y.device, y.shape), (dtype, x.device, want.shape))
                    torch.testing.assert_close(y.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])

    def test_strides(self):
        for device in DEVICES:
            base = logits(12, 14, 16, device=device)
            views = [base.permute(2, 1, 0), base[::2, ::3, ::4], base[:, :, 3:11], base[0].expand(5, 14, 16), base[1:, 2:]]
            for x, dim in itertools.product(views, range(3)):
                want = torch.softmax(x.double(), dim)
                torch.testing.assert_close(ks.softmax(x, dim).double(), want, rtol=4e-6, atol=1e-7)
                large = torch.full((2 * x.shape[0], x.shape[1], 3 * x.shape[2]), 7.0, device=device)
                out = large[::2, :, ::3]
                self.assertIs(ks.softmax(x, dim, out=out), out)
                torch.testing.assert_close(out.double(), want, rtol=4e-6, atol=1e-7)
                self.assertTrue(bool((large[1::2] == 7).all()))

    def test_dtypes_of_the_output(self):
        for device, dtype in itertools.product(DEVICES, (torch.float16, torch.bfloat16)):
            x = logits(9, 40, dtype=dtype, device=device)
            y = ks.softmax(x, dtype=torch.float32)
            self.assertEqual(y.dtype, torch.float32)
            torch.testing.assert_close(y.double(), torch.softmax(x.double(), 1), rtol=4e-6, atol=1e-7)
            self.assertTrue(torch.equal(y, ks.softmax(x, dtype="float32")))

    def test_the_same_bits_as_numpy(self):
        x = logits(9, 77)
        self.assertTrue((ks.softmax(x).numpy() == ks.softmax(x.numpy())).all())

    @support.needs_heads
    def test_heads(self):
        for device in DEVICES:
            x, w, b = head_operands(device)
            want = double_head(x, w, b)
            chain = ks.bias(b) | ks.gelu()
            y = ks.linear_softmax(x, w, chain)
            torch.testing.assert_close(y.double(), want, rtol=2e-5, atol=1e-8)
            torch.testing.assert_close(ks.linear_log_softmax(x, w, chain).double(), want.log(), rtol=1e-5, atol=1e-5)
            transposed = w.T.contiguous().T
            torch.testing.assert_close(ks.linear_softmax(x, transposed, chain).double(), want, rtol=2e-5, atol=1e-8)
            torch.testing.assert_close(ks.linear_softmax(x, ks.PackedWeight(w), chain).double(), want, rtol=2e-5, atol=1e-8)
            for dtype in (torch.float16, torch.bfloat16):
                narrow = [t.to(dtype) for t in (x, w, b)]
                y = ks.linear_softmax(narrow[0], narrow[1], ks.bias(narrow[2]) | ks.gelu(), dtype=torch.float32)
                torch.testing.assert_close(y.double(), double_head(*narrow), rtol=1e-3, atol=1e-5)

    def test_written_tensors_have_a_new_version(self):
        x, y = logits(4, 5), torch.empty(4, 5)
        before = y._version
        ks.softmax(x, out=y)
        self.assertGreater(y._version, before)

    def test_bits_of_cpp(self):
        for device in DEVICES:
            where = "cuda" if device == "cuda" else "host"
            cases = itertools.product(OPERATIONS, ("float32", "float64", "float16", "bfloat16"), range(3))
            if device == "cuda":  # where each process takes a second to begin
                cases = [("softmax", "float32", 2), ("softmax", "bfloat16", 0), ("log_softmax", "float16", 2)]
                cases += [("logsumexp", "float64", 1)]
            for name, dtype, axis in cases:
                x = logits(5, 6, 770, dtype=getattr(torch, dtype))
                out = "float32" if dtype == "bfloat16" else dtype
                raw = support.cpp_results(
                    [where, "rows", name, dtype, out, axis, 5, 6, 770, "none"], bytes(x.untyped_storage())
                )
                y = OPERATIONS[name](x.to(device), axis, dtype=out).cpu()
                want = torch.frombuffer(bytearray(raw), dtype=y.dtype).reshape(y.shape)
                self.assertTrue(torch.equal(y, want), f"{device} {name} {dtype} {axis}")

    @support.needs_heads
    def test_bits_of_cpp_heads(self):
        m, n, k = 256, 512, 1024
        for device in DEVICES:
            where = "cuda" if device == "cuda" else "host"
            x, w, b = (t.contiguous() for t in head_operands("cpu", m, n, k))
            inputs = [bytes(t.clone().untyped_storage()) for t in (x, w, b)]
            raw = support.cpp_results([where, "head", "linear_softmax", "bias_gelu", m, n, k], *inputs)
            want = torch.frombuffer(bytearray(raw), dtype=torch.float32).reshape(m, n)
            x, w, b = (t.to(device) for t in (x, w, b))
            # On CUDA packed weights go through the tensor cores, the array of these extents through cuBLAS.
            for weight in (w, ks.PackedWeight(w)) if device == "cpu" else (w,):
                y = ks.linear_softmax(x, weight, ks.bias(b) | ks.gelu()).cpu()
                self.assertTrue(torch.equal(y, want), f"{device} head")


class Refusals(unittest.TestCase):
    def refused(self, text, call, *arguments, **keywords):
        with self.assertRaisesRegex(ValueError, text):
            call(*arguments, **keywords)

    def test_gradients(self):
        x, w = logits(4, 5).requires_grad_(), logits(6, 5)
        self.refused("requires grad", ks.softmax, x)
        self.refused("requires grad", ks.linear_softmax, w, torch.nn.Parameter(w))
        self.refused("bias requires grad", ks.softmax, w, transform=ks.bias(torch.nn.Parameter(w[0])))
        with torch.no_grad():
            self.assertFalse(ks.softmax(x).requires_grad)
        with torch.inference_mode():
            ks.softmax(logits(4, 5), out=logits(4, 5))

    def test_tensors(self):
        self.refused("dtype", ks.softmax, torch.zeros(3, 4, dtype=torch.int64))
        self.refused("meta", ks.softmax, torch.zeros(3, 4, device="meta"))
        self.refused("strided", ks.softmax, torch.zeros(3, 4).to_sparse())
        self.refused("rank 0", ks.softmax, torch.tensor(1.0))
        self.refused("rank 9", ks.softmax, torch.zeros((1,) * 9))
        self.refused("extents", ks.softmax, logits(4, 5), out=torch.empty(5))

    @unittest.skipUnless(HAS_CUDA, "no CUDA")
    def test_devices(self):
        x = logits(4, 5, device="cuda")
        self.refused("no CUDA stream", ks.softmax, x, stream="no")
        self.refused("on the host", ks.softmax, x, out=torch.empty(4, 5))
        self.refused("on the host", ks.softmax, x, transform=ks.bias(torch.zeros(5)))
        self.refused("on cuda:0", ks.softmax, torch.zeros(4, 5), out=x)
        if ks.has_linear():
            self.refused("on the host", ks.linear_softmax, x, ks.PackedWeight(torch.zeros(6, 5)))
        other = type("Stream", (), {"cuda_stream": 0, "device_index": 1})()
        self.refused("stream is one of cuda:1", ks.softmax, x, stream=other)

    @unittest.skipUnless(HAS_CUDA and torch.cuda.device_count() > 1, "no second CUDA device")
    def test_another_device(self):
        x = logits(4, 5, device="cuda")
        ks.softmax(x)  # the first call says which device it is
        stream = torch.cuda.Stream(1)
        self.refused("stream is one of cuda:1", ks.softmax, x, stream=stream)
        self.refused("stream is of CUDA device 1, and Kokkos in this process uses device 0", ks.softmax, x, stream=stream.cuda_stream)
        there = x.to("cuda:1")
        self.refused("on CUDA device 1, and Kokkos in this process uses device 0", ks.softmax, there)
        self.refused("on CUDA device 1, and Kokkos in this process uses device 0", ks.PackedWeight, there)
        self.refused("out is on cuda:1, x on cuda:0", ks.softmax, x, out=there)
        self.refused("bias is on cuda:1, x on cuda:0", ks.softmax, x, transform=ks.bias(there))
        with torch.cuda.device(1):
            torch.testing.assert_close(ks.softmax(x), torch.softmax(x, 1))
            self.assertEqual(torch.cuda.current_device(), 1)

    @unittest.skipUnless(HAS_CUDA and torch.cuda.device_count() > 1, "no second CUDA device")
    def test_a_process_on_the_second_device(self):
        program = """if True:
            import torch, kokkossoftmax as ks
            x = torch.randn(64, 5000, device="cuda:1")
            for call, want in ((ks.softmax, torch.softmax(x, 1)), (ks.log_softmax, torch.log_softmax(x, 1))):
                torch.testing.assert_close(call(x), want)
            assert torch.cuda.current_device() == 0
            graph, y = torch.cuda.CUDAGraph(), torch.empty_like(x)
            with torch.cuda.device(1), torch.cuda.graph(graph):
                ks.softmax(x, out=y)
            graph.replay()
            torch.testing.assert_close(y, torch.softmax(x, 1))
            try:
                ks.softmax(x.to("cuda:0"))
            except ValueError as error:
                assert "on CUDA device 0, and Kokkos in this process uses device 1" in str(error), error
            else:
                raise AssertionError("a tensor of device 0 was taken")
        """
        subprocess.run([sys.executable, "-c", program], check=True, timeout=200)


class Compile(unittest.TestCase):
    """torch.compile keeps the calls whole; graphs are seen by a backend that runs them as they are."""

    def setUp(self):
        torch._dynamo.reset()
        self.targets = []

    def compiled(self, function):
        def backend(graph, inputs):
            self.targets += [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
            return graph.forward

        return torch.compile(function, backend=backend, fullgraph=True)

    def check(self, function, *arguments, operator, backend=None):
        want = function(*arguments)
        compiled = self.compiled(function) if backend is None else torch.compile(function, backend=backend, fullgraph=True)
        got = compiled(*arguments)
        self.assertTrue(torch.equal(got, want))
        if backend is None:
            self.assertEqual(sum(f"kokkossoftmax.{operator}" in t for t in self.targets), 1, self.targets)

    def test_calls(self):
        for device in DEVICES:
            x = head_operands(device)[0]
            for backend in (None, "aot_eager"):
                torch._dynamo.reset()
                self.targets = []
                self.check(lambda t: ks.softmax(t * 2, 0) + 1, x, operator="rows", backend=backend)
                self.targets = []
                self.check(
                    lambda t, c: ks.log_softmax(t, transform=ks.bias(c) | ks.scale(0.5)), x, x[0].clone(), operator="rows",
                    backend=backend,
                )
                self.targets = []
                self.check(lambda t: ks.logsumexp(t, 1, dtype="float32"), x.half(), operator="rows", backend=backend)

    @support.needs_heads
    def test_calls_of_heads(self):
        for device in DEVICES:
            x, w, b = head_operands(device)
            packed = ks.PackedWeight(w)
            for backend in (None, "aot_eager"):
                torch._dynamo.reset()
                self.targets = []
                self.check(lambda t, v, c: ks.linear_softmax(t, v, ks.bias(c) | ks.gelu()), x, w, b, operator="linear", backend=backend)
                self.targets = []
                self.check(lambda t, c: ks.linear_softmax(t, packed, ks.bias(c) | ks.gelu()), x, b, operator="packed", backend=backend)

    @support.needs_heads
    def test_outputs_and_running_statistics(self):
        for device, backend in itertools.product(DEVICES, (None, "aot_eager")):
            torch._dynamo.reset()
            x, w, b = head_operands(device)
            mean, var, y = torch.zeros_like(b), torch.ones_like(b), torch.empty(64, 200, device=device)

            def head(t, v, c, m, s, out):
                return ks.linear_softmax(t, v, ks.bias(c) | ks.batch_norm_training(c, c, 1e-5, m, s, 0.1), out=out)

            want, want_mean, want_var = torch.empty_like(y), mean.clone(), var.clone()
            head(x, w, b, want_mean, want_var, want)
            compiled = self.compiled(head) if backend is None else torch.compile(head, backend=backend, fullgraph=True)
            got = compiled(x, w, b, mean, var, y)
            for one, other in ((got, want), (y, want), (mean, want_mean), (var, want_var)):
                self.assertTrue(torch.equal(one, other))

    def test_gradients_are_refused(self):
        x = logits(4, 5).requires_grad_()
        compiled = torch.compile(lambda t: ks.softmax(t), backend="eager")
        with self.assertRaisesRegex(Exception, "requires grad"):
            compiled(x)

    def test_operators_agree_with_their_fake_versions(self):
        x, w, b = head_operands("cpu")
        ks.softmax(x)
        from kokkossoftmax import _torch_ops  # registers

        del _torch_ops
        checks = ("test_schema", "test_faketensor")
        ops = torch.ops.kokkossoftmax
        for t, dim, operation in ((x, 0, 0), (x.T, 1, 1), (x[:, ::2], 1, 2)):
            torch.library.opcheck(ops.rows.default, (t, operation, dim, None, [], [], []), test_utils=checks)
        if not ks.has_linear():
            return
        torch.library.opcheck(ops.linear.default, (x, w, None, 0, False, [5, 0, 0, 0], [0.0, 0.0], [b]), test_utils=checks)
        mean, var = torch.zeros_like(b), torch.ones_like(b)
        steps = ([10, 0, 0, 1], [1e-5, 0.1], [b, b.clone()])
        operands = (x, w, torch.empty(64, 200), 1, False, *steps, mean, var)
        torch.library.opcheck(ops.linear_training_out.default, operands, test_utils=checks)

    def test_fake_tensors(self):
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            y = ks.softmax(torch.empty(3, 4), 0)
        self.assertEqual(y.shape, (3, 4))


@unittest.skipUnless(HAS_CUDA, "no CUDA")
class Cuda(unittest.TestCase):
    def test_the_current_stream(self):
        x = logits(512, 4096, device="cuda")
        want = ks.softmax(x)
        for given in (False, True):
            stream = torch.cuda.Stream()
            late = torch.zeros_like(x)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(50_000_000)  # what is on the stream comes first
                late.copy_(x)
                if not given:
                    y = ks.softmax(late)
            if given:
                y = ks.softmax(late, stream=stream)
            stream.synchronize()
            self.assertTrue(torch.equal(y, want))

    def graph_of(self, call, warm_stream=None):
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_stream or stream):
            call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = call()
        return graph, y

    @support.needs_heads
    def test_graphs(self):
        x, w, b = head_operands("cuda", 512, 1024, 1024)
        packed = ks.PackedWeight(w)
        calls = {
            "softmax": lambda: ks.softmax(x),
            "long rows": lambda: ks.softmax(x.view(4, -1), transform=ks.scale(2)),
            "column": lambda: ks.logsumexp(x, 0),
            "head": lambda: ks.linear_softmax(x, w, ks.bias(b) | ks.gelu()),
            "packed head": lambda: ks.linear_softmax(x, packed, ks.bias(b) | ks.gelu()),
            "batch statistics": lambda: ks.linear_softmax(x, w, ks.bias(b) | ks.batch_norm_training(b, b, 1e-5)),
        }
        graphs = []
        for turn, (name, call) in itertools.product(range(2), calls.items()):
            with self.subTest(call=name, turn=turn):
                want = call().clone()
                graph, y = self.graph_of(call)
                y.fill_(0)
                for _ in range(3):
                    graph.replay()
                torch.cuda.synchronize()
                self.assertTrue(torch.equal(y, want))
                graphs.append((graph, y, want))
        for graph, y, want in graphs:  # all of them live at once
            y.fill_(0)
            graph.replay()
            torch.cuda.synchronize()
            self.assertTrue(torch.equal(y, want))

    def test_graph_after_reserve_alone(self):
        x = logits(300, 5000, device="cuda")
        y = torch.empty_like(x)
        ks.reserve(ks.softmax, x, out=y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ks.softmax(x, out=y)
        graph.replay()
        self.assertTrue(torch.equal(y, ks.softmax(x)))

    def test_memory_does_not_grow(self):
        x, w, b = head_operands("cuda", 256, 512, 1024)
        y, z = torch.empty_like(x), torch.empty(256, 512, device="cuda")

        def calls(count):
            for _ in range(count):
                ks.softmax(x, out=y)
                ks.logsumexp(x.view(2, -1), out=z[0, :2])
                if ks.has_linear():
                    ks.linear_softmax(x, w, ks.bias(b) | ks.gelu(), out=z)

        calls(50)
        torch.cuda.synchronize()
        resident, free = support.resident_bytes(), torch.cuda.mem_get_info()[0]
        calls(1000)
        torch.cuda.synchronize()
        gc.collect()
        self.assertEqual(torch.cuda.mem_get_info()[0], free)
        self.assertLess(support.resident_bytes() - resident, 4 << 20)

    @support.needs_heads
    def test_two_threads_on_two_streams(self):
        inputs = [logits(100, 3000 + 100 * i, device="cuda", seed=i) for i in range(6)]
        x, w, b = head_operands("cuda", 256, 512, 1024)
        wants = [ks.softmax(t) for t in inputs]
        want = ks.linear_softmax(x, w, ks.bias(b))
        torch.cuda.synchronize()

        def work(first):
            with torch.cuda.stream(torch.cuda.Stream()):
                for turn in range(100):
                    i = (first + turn) % len(inputs)
                    y = ks.softmax(inputs[i])
                    z = ks.linear_softmax(x, w, ks.bias(b))
                    torch.cuda.current_stream().synchronize()
                    assert torch.equal(y, wants[i]) and torch.equal(z, want)

        self.assertEqual(support.failures_of_two_threads(work), [])

    def test_dlpack_of_another_library(self):
        """What CuPy's and JAX's arrays look like to the package."""
        x = logits(6, 5000, device="cuda")
        want = ks.softmax(x)
        for old in (False, True):
            y = ks.softmax(support.Foreign(x, old))
            self.assertEqual((y.device, y.dtype), (x.device, x.dtype))
            self.assertTrue(torch.equal(y, want))
            out = torch.empty_like(x)
            ks.softmax(x, out=support.Foreign(out, old))
            self.assertTrue(torch.equal(out, want))
        with torch.cuda.stream(torch.cuda.Stream()):
            late = torch.zeros_like(x)
            torch.cuda._sleep(50_000_000)
            late.copy_(x)
            y = ks.softmax(support.Foreign(late))  # on the current stream, behind the copy
            torch.cuda.current_stream().synchronize()
        self.assertTrue(torch.equal(y, want))

    def test_backwards(self):
        """Strides below 0, which CuPy's arrays may have."""
        for shape in ((6, 64), (5, 1000), (33, 777), (4, 70001), (2, 300000)):
            x = logits(*shape, device="cuda")
            rows, columns = shape
            last_row, last = 4 * (rows - 1) * columns, 4 * (rows * columns - 1)
            want = ks.softmax(x)
            y = torch.empty_like(x)
            for offset, strides, dims in ((last_row, (-columns, 1), [0]), (4 * (columns - 1), (columns, -1), [1]), (last, (-columns, -1), [0, 1])):
                with self.subTest(shape=shape, dims=dims):
                    back = lambda t: support.Described(t.data_ptr() + offset, shape, strides, (2, 0))
                    torch.testing.assert_close(ks.softmax(back(x)), ks.softmax(x.flip(dims)), rtol=4e-6, atol=0)
                    ks.softmax(x, out=back(y))
                    torch.testing.assert_close(y.flip(dims), want, rtol=4e-6, atol=0)
                    ks.softmax(back(x), out=back(y))
                    torch.testing.assert_close(y, want, rtol=4e-6, atol=0)
                    if dims == [0]:
                        self.assertTrue(torch.equal(y, want))

    def test_forgotten_streams(self):
        x = logits(10, 1000, device="cuda")
        want = ks.softmax(x)
        for _ in range(40):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                y = ks.softmax(x)
            ks.forget_stream(stream, 0)
            self.assertTrue(torch.equal(y, want))

    def test_compiled_models_of_inductor(self):
        x, w, b = head_operands("cuda")
        function = lambda t, v, c: ks.linear_softmax(t * 2, v, ks.bias(c) | ks.gelu()) + 1
        compiled = torch.compile(function, fullgraph=True)
        torch.testing.assert_close(compiled(x, w, b), function(x, w, b))


if __name__ == "__main__":
    support.main()
