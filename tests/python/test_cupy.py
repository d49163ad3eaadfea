# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The Python package on CuPy's arrays, without PyTorch: values, streams, CUDA graphs. NumPy has what is compared."""

import itertools
import sys
import unittest

import support

np, cupy = support.need("numpy", "cupy")
import kokkossoftmax as ks

OPERATIONS = {"softmax": ks.softmax, "log_softmax": ks.log_softmax, "logsumexp": ks.logsumexp}
TOLERANCE = {"float32": 4e-6, "float64": 1e-13, "float16": 2e-3}


def has_cuda():
    try:
        return ks.has_backend("cuda") and cupy.cuda.runtime.getDeviceCount() > 0
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


def logits(*shape, dtype="float32", seed=0):
    return (4 * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def head(m=64, n=200, k=96, dtype="float32"):
    """Operands and, in float64, softmax(relu(x @ w.T + b)); logits of a few units whatever k is."""
    x, w, b = logits(m, k, seed=1) / 4, logits(n, k, seed=2) / k**0.5, logits(n, seed=3)
    x, w, b = (a.astype(dtype) for a in (x, w, b))
    z = np.maximum(x.astype("float64") @ w.astype("float64").T + b, 0)
    return x, w, b, support.reference(np, "softmax", z, 1)


@unittest.skipUnless(has_cuda(), "no CUDA")
class Cupy(unittest.TestCase):
    def test_every_dtype_rank_and_axis(self):
        shapes = [(7,), (5, 33), (3, 4, 19), (1, 2, 1, 2, 1, 2, 1, 9)]
        for dtype, shape, name in itertools.product(TOLERANCE, shapes, OPERATIONS):
            x = logits(*shape, dtype=dtype)
            for axis in range(-len(shape), len(shape)):
                with self.subTest(dtype=dtype, shape=shape, operation=name, axis=axis):
                    y = OPERATIONS[name](cupy.asarray(x), axis)
                    self.assertIsInstance(y, cupy.ndarray)
                    self.assertEqual(y.dtype, x.dtype)
                    want = support.reference(np, name, x.astype("float64"), axis)
                    np.testing.assert_allclose(y.get(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])

    def test_strides(self):
        base = logits(12, 14, 16)
        on_device = cupy.asarray(base)
        views = (
            lambda a: a.T,
            lambda a: a[::2, ::3, ::4],
            lambda a: a[:, :, 3:11],
            lambda a: a[::-1],
            lambda a: a[::-1, :, ::-1],
        )
        for view, axis in itertools.product(views, range(3)):
            x = view(on_device)
            want = support.reference(np, "softmax", view(base).astype("float64"), axis)
            np.testing.assert_allclose(ks.softmax(x, axis).get(), want, rtol=4e-6, atol=1e-7)
            large = cupy.asarray(np.full((2 * x.shape[0], x.shape[1], 3 * x.shape[2]), 7, "float32"))
            out = large[::2, :, ::3]
            self.assertIs(ks.softmax(x, axis, out=out), out)
            got = large.get()
            np.testing.assert_allclose(got[::2, :, ::3], want, rtol=4e-6, atol=1e-7)
            self.assertTrue((got[1::2] == 7).all() and (got[:, :, 1::3] == 7).all())

    def test_transforms(self):
        x, b, keep = logits(6, 5000), logits(5000, seed=1), logits(6, 5000, seed=2) > 0
        chain = ks.bias(cupy.asarray(b)) | ks.scale(cupy.asarray(np.float32(0.5))) | ks.mask(cupy.asarray(keep))
        z = np.where(keep, ((x + b) * np.float32(0.5)).astype("float64"), -np.inf)
        got = ks.softmax(cupy.asarray(x), transform=chain).get()
        np.testing.assert_allclose(got, support.reference(np, "softmax", z, 1), rtol=4e-6, atol=1e-12)

    @support.needs_heads
    def test_heads(self):
        x, w, b, want = head()
        x, w, b = (cupy.asarray(a) for a in (x, w, b))
        chain = ks.bias(b) | ks.relu()
        for weight in (w, cupy.asarray(w.get().T.copy()).T, ks.PackedWeight(w)):
            y = ks.linear_softmax(x, weight, chain)
            self.assertIsInstance(y, cupy.ndarray)
            np.testing.assert_allclose(y.get(), want, rtol=2e-5, atol=1e-8)
        x, w, b, want = head(dtype="float16")
        x, w, b = (cupy.asarray(a) for a in (x, w, b))
        y = ks.linear_softmax(x, w, ks.bias(b) | ks.relu(), dtype=cupy.float32)
        self.assertEqual(y.dtype, np.float32)
        np.testing.assert_allclose(y.get(), want, rtol=2e-5, atol=1e-8)

    def test_dtypes_of_the_output(self):
        x = cupy.asarray(logits(9, 40, dtype="float16"))
        y = ks.softmax(x, dtype="float32")
        self.assertEqual(y.dtype, np.float32)
        want = support.reference(np, "softmax", x.get().astype("float64"), 1)
        np.testing.assert_allclose(y.get(), want, rtol=4e-6, atol=1e-7)
        if "ml_dtypes" in sys.modules:  # which CuPy imports where it is
            return
        with self.assertRaisesRegex(ValueError, "CuPy has no bfloat16 of its own; pass out="):
            ks.softmax(x, dtype="bfloat16")

    def test_the_current_stream(self):
        """What is on a stream comes first: a large copy from the host, which is no short work."""
        host = cupy.cuda.alloc_pinned_memory(1 << 28)
        source = np.frombuffer(host, "float32", 1 << 26).reshape(-1, 4096)
        source[:] = logits(1, 4096)
        want = ks.softmax(cupy.asarray(source[:1])).get()
        x = cupy.asarray(np.zeros_like(source))
        for given in (False, True):
            stream = cupy.cuda.Stream(non_blocking=True)
            x.data.memset(0, x.nbytes)
            cupy.cuda.Device().synchronize()
            x.data.copy_from_host_async(host.ptr, x.nbytes, stream)
            if given:
                y = ks.softmax(x[-4:], stream=stream)
            else:
                with stream:
                    y = ks.softmax(x[-4:])
            stream.synchronize()
            np.testing.assert_array_equal(y.get(), np.repeat(want, 4, 0))

    @support.needs_heads
    def test_graphs(self):
        x, w, b, want_of_head = head(512, 1024, 1024)
        x, w, b = (cupy.asarray(a) for a in (x, w, b))
        y, z = cupy.empty((512, 1024), "float32"), cupy.empty((512, 1024), "float32")
        packed = ks.PackedWeight(w)

        def calls():
            ks.softmax(x, out=y)
            ks.linear_softmax(x, packed, ks.bias(b) | ks.relu(), out=z)

        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            calls()
            stream.synchronize()
            want = y.get()
            stream.begin_capture()
            calls()
            graph = stream.end_capture()
            for a in (y, z):
                a.data.memset_async(0, a.nbytes, stream)
            graph.launch(stream)
            stream.synchronize()
        np.testing.assert_array_equal(y.get(), want)
        np.testing.assert_allclose(z.get(), want_of_head, rtol=2e-5, atol=1e-8)

    def test_memory_does_not_grow(self):
        x = cupy.asarray(logits(100, 3000))
        y = cupy.empty_like(x)
        for _ in range(20):
            ks.softmax(x, out=y)
        cupy.cuda.Device().synchronize()
        free, resident = cupy.cuda.runtime.memGetInfo()[0], support.resident_bytes()
        for _ in range(1000):
            ks.softmax(x, out=y)
        cupy.cuda.Device().synchronize()
        self.assertEqual(cupy.cuda.runtime.memGetInfo()[0], free)
        self.assertLess(support.resident_bytes() - resident, 4 << 20)

    def test_refusals(self):
        x = cupy.asarray(logits(4, 5))
        for text, call in (
            ("dtype|scalar", lambda: ks.softmax(cupy.asarray(np.zeros((2, 3), "int32")))),
            ("on the host", lambda: ks.softmax(x, out=np.empty((4, 5), "float32"))),
            ("on the host", lambda: ks.softmax(x, transform=ks.bias(np.zeros(5, "float32")))),
            ("extents", lambda: ks.softmax(x, out=cupy.empty((4, 6), "float32"))),
        ):
            with self.assertRaisesRegex(ValueError, text):
                call()


if __name__ == "__main__":
    support.main()
