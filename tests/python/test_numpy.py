# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The Python package on NumPy's arrays, and on anybody's that have __dlpack__."""

import gc
import itertools
import os
import subprocess
import sys
import unittest

import support
from support import Foreign

(np,) = support.need("numpy")
import kokkossoftmax as ks

OPERATIONS = {"softmax": ks.softmax, "log_softmax": ks.log_softmax, "logsumexp": ks.logsumexp}
TOLERANCE = {"float32": 4e-6, "float64": 1e-13, "float16": 2e-3}


def logits(*shape, dtype="float32", seed=0):
    return (4 * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


class Values(unittest.TestCase):
    def test_every_dtype_rank_and_axis(self):
        shapes = [(7,), (5, 33), (3, 4, 19), (2, 3, 4, 5), (2, 2, 2, 2, 3), (1, 2, 1, 2, 1, 2, 1, 9)]
        for dtype, shape, name in itertools.product(TOLERANCE, shapes, OPERATIONS):
            x = logits(*shape, dtype=dtype)
            for axis in range(-len(shape), len(shape)):
                with self.subTest(dtype=dtype, shape=shape, operation=name, axis=axis):
                    y = OPERATIONS[name](x, axis)
                    self.assertEqual(y.dtype, x.dtype)
                    want = support.reference(np, name, x.astype("float64"), axis)
                    np.testing.assert_allclose(y, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])

    def test_strides(self):
        base = logits(12, 14, 16)
        views = {
            "transposed": base.T,
            "every other": base[::2, ::3, ::4],
            "columns": base[:, :, 3:11],
            "swapped": base.swapaxes(0, 1),
            "broadcast": np.broadcast_to(base[0], (5, 14, 16)),
            "Fortran": np.asfortranarray(base),
            "rows backwards": base[::-1],
            "columns backwards": base[..., ::-1],
            "all backwards": base[::-1, ::-1, ::-1],
            "every third backwards": base[:, ::-3, ::-2],
        }
        for (name, x), axis in itertools.product(views.items(), range(3)):
            with self.subTest(view=name, axis=axis):
                np.testing.assert_array_almost_equal_nulp(ks.softmax(x, axis), ks.softmax(np.ascontiguousarray(x), axis), 8)
                large = np.full((2 * x.shape[0], x.shape[1], 3 * x.shape[2]), 7, "float32")
                out = large[::2, :, ::3]
                self.assertIs(ks.softmax(x, axis, out=out), out)
                np.testing.assert_array_almost_equal_nulp(out, ks.softmax(np.ascontiguousarray(x), axis), 8)
                self.assertTrue((large[1::2] == 7).all() and (large[:, :, 1::3] == 7).all())

    def test_bits_of_a_row_alone_that_lies_backwards(self):
        """What else there is along a dimension does not decide which kernel a row has; the dimension's stride does."""
        buffer = np.zeros(1022 * 48 + 64, "float32")
        x = np.lib.stride_tricks.as_strided(buffer[8:], (1022, 5, 3), (4 * 48, 4 * 4, -4))
        x[...] = logits(*x.shape)
        for row in range(3):
            alone = x[:, :, row : row + 1]
            np.testing.assert_array_equal(ks.softmax(x, 1)[:, :, row : row + 1], ks.softmax(alone, 1))

    def test_backwards(self):
        """Strides below 0, of the output and operands too, and where signs differ."""
        for shape in ((5, 1000), (2, 70001), (6, 7, 40), (40, 9)):
            x = logits(*shape)
            column, keep = logits(shape[-1], seed=1), np.random.default_rng(2).random(shape) < 0.7
            for axis in range(x.ndim):
                want = ks.softmax(x, axis)
                last = axis == x.ndim - 1
                for dims in itertools.product((1, -1), repeat=x.ndim):
                    back = tuple(slice(None, None, step) for step in dims)
                    flipped = np.ascontiguousarray(x[back])[back]  # x, lying in memory the other way round
                    out = np.full(shape, 7, "float32")
                    for y in (ks.softmax(flipped, axis), ks.softmax(x, axis, out=out[back])[...]):
                        np.testing.assert_array_almost_equal_nulp(y, want, 8)
                    if dims[axis] == 1 and last:  # a row's bits do not depend on where it lies
                        np.testing.assert_array_equal(ks.softmax(flipped, axis), want)
                    given = x[back].copy()[back]
                    self.assertIs(ks.softmax(given, axis, out=given), given)
                    np.testing.assert_array_almost_equal_nulp(given, want, 8)
                    if last:
                        chain = ks.bias(np.ascontiguousarray(column[::-1])[::-1]) | ks.mask(np.ascontiguousarray(keep[back])[back])
                        np.testing.assert_allclose(
                            ks.log_softmax(flipped, axis, chain),
                            ks.log_softmax(x, axis, ks.bias(column) | ks.mask(keep)), rtol=2e-6, atol=2e-6,
                        )  # fmt: skip

    @support.needs_heads
    def test_backwards_heads(self):
        x, w, b = logits(20, 30, seed=1) / 4, logits(50, 30, seed=2) / 4, logits(50, seed=3)
        want = ks.linear_softmax(x, w, ks.bias(b))
        chain = ks.bias(b[::-1].copy()[::-1])
        out = np.empty((20, 50), "float32")
        flipped = lambda a: np.ascontiguousarray(a[::-1, ::-1])[::-1, ::-1]
        for y in (
            ks.linear_softmax(flipped(x), flipped(w), chain),
            ks.linear_softmax(x[:, ::-1], w[:, ::-1], chain, out=out[::-1, ::-1]),
        ):
            np.testing.assert_allclose(y, want, rtol=1e-5)

    def test_backwards_and_overlapping(self):
        x = logits(8, 40)
        for out in (x[::-1], x[:, ::-1], x[::-1, ::-1]):
            with self.assertRaisesRegex(ValueError, "overlaps"):
                ks.softmax(x, out=out)
        half = logits(16, 40)
        want = ks.softmax(half[7::-1].copy())
        np.testing.assert_array_equal(ks.softmax(half[7::-1], out=half[:7:-1]), want)  # apart

    def test_in_place_and_other_dtypes(self):
        x = logits(9, 40)
        want = ks.softmax(x)
        y = x.copy()
        self.assertIs(ks.softmax(y, out=y), y)
        np.testing.assert_array_equal(y, want)
        h = x.astype("float16")
        wide = ks.softmax(h, dtype="float32")
        self.assertEqual(wide.dtype, np.float32)
        np.testing.assert_array_equal(wide, ks.softmax(h, dtype=np.float32))
        np.testing.assert_array_equal(wide, ks.softmax(h, out=np.empty((9, 40), "float32")))
        np.testing.assert_allclose(wide, support.reference(np, "softmax", h.astype("float64"), 1), rtol=4e-6)

    def test_empty_and_masked(self):
        self.assertEqual(ks.softmax(np.empty((0, 5), "float32")).shape, (0, 5))
        self.assertEqual(ks.softmax(np.empty((5, 0), "float32")).shape, (5, 0))
        x = np.full((2, 3), -np.inf, "float32")
        np.testing.assert_array_equal(ks.softmax(x), 0)
        np.testing.assert_array_equal(ks.logsumexp(x), -np.inf)

    def test_one_value_of_logsumexp(self):
        x = logits(100)
        y = ks.logsumexp(x)
        self.assertEqual(y.shape, ())
        np.testing.assert_allclose(y, support.reference(np, "logsumexp", x.astype("float64"), 0), rtol=1e-6)

    def test_transforms(self):
        self.check_transforms("float32", 1e-5)

    def test_transforms_in_double(self):
        self.check_transforms("float64", 1e-6)  # the operands are of float32

    def check_transforms(self, dtype, tolerance):
        x = logits(6, 5, 21, dtype=dtype)
        rng = np.random.default_rng(1)
        column = rng.standard_normal(21).astype("float32")
        wide = rng.standard_normal((6, 1, 21))
        keep = rng.random((6, 5, 21)) < 0.7
        hot = rng.uniform(0.5, 2, (6, 5)).astype("float32")
        var = rng.uniform(0.5, 2, 21).astype("float32")
        d = x.astype("float64")
        erf = np.vectorize(__import__("math").erf)
        gelu = lambda v: v / 2 * (1 + erf(v / np.sqrt(2)))
        tanh = lambda v: v / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)))
        ahead = np.arange(21)[None, None, :] <= np.arange(5)[None, :, None] + 2
        chains = {
            "scale": (ks.scale(0.3), d * 0.3),
            "scale of columns": (ks.scale(column), d * column),
            "scale broadcast": (ks.scale(wide), d * wide),
            "scale of an array of one": (ks.scale(wide[0, 0, :1]) | ks.bias(column[:1]), d * wide[0, 0, 0] + column[0]),
            "scale of an array of rank 0": (ks.scale(np.array(0.3)), d * 0.3),
            "temperature": (ks.temperature(hot), d / hot[:, :, None]),
            "temperature of rows": (ks.temperature(hot.reshape(30)), d / hot[:, :, None]),
            "mask": (ks.mask(keep), np.where(keep, d, -np.inf)),
            "causal": (ks.causal(2), np.where(ahead, d, -np.inf)),
            "bias": (ks.bias(column), d + column),
            "bias broadcast": (ks.bias(wide), d + wide),
            "gelu": (ks.gelu(), gelu(d)),
            "gelu_tanh": (ks.gelu_tanh(), tanh(d)),
            "relu": (ks.relu(), np.maximum(d, 0)),
            "batch_norm": (
                ks.batch_norm(column, var, var, column, 1e-5),
                (d - column) / np.sqrt(var + 1e-5) * var + column,
            ),
            "chain": (ks.bias(column) | ks.gelu() | ks.scale(2) | ks.mask(keep), np.where(keep, 2 * gelu(d + column), -np.inf)),
        }
        for name, (chain, values) in chains.items():
            for operation, call in OPERATIONS.items():
                with self.subTest(transform=name, operation=operation):
                    want = support.reference(np, operation, values, -1)
                    np.testing.assert_allclose(call(x, transform=chain), want, rtol=tolerance, atol=tolerance)
        self.assertEqual(repr(ks.bias(column) | ks.gelu()), "bias | gelu")

    @support.needs_heads
    def test_heads(self):
        x, w, b = logits(20, 30, seed=1) / 4, logits(50, 30, seed=2) / 4, logits(50, seed=3)
        z = x.astype("float64") @ w.astype("float64").T + b
        want = support.reference(np, "softmax", np.maximum(z, 0), 1)
        chain = ks.bias(b) | ks.relu()
        y = ks.linear_softmax(x, w, chain)
        np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(ks.linear_softmax(x, np.asfortranarray(w), chain), want, rtol=1e-4, atol=1e-7)
        want = support.reference(np, "log_softmax", np.maximum(z, 0), 1)
        np.testing.assert_allclose(ks.linear_log_softmax(x, w, chain), want, rtol=1e-4, atol=1e-5)
        packed = ks.PackedWeight(w)
        self.assertEqual((packed.shape, packed.dtype), ((50, 30), "float32"))
        np.testing.assert_array_equal(ks.linear_softmax(x, packed, chain), y)
        ks.reserve(ks.linear_softmax, x, packed, chain)
        ks.reserve(ks.linear_softmax, x, w, chain)

    @support.needs_heads
    def test_batch_statistics(self):
        x, w = logits(40, 8, seed=1), logits(6, 8, seed=2)
        gamma, beta = logits(6, seed=3), logits(6, seed=4)
        mean, var = np.zeros(6, "float32"), np.ones(6, "float32")
        y = ks.linear_softmax(x, w, ks.batch_norm_training(gamma, beta, 1e-5, mean, var, 0.1) | ks.scale(0.5))
        z = x.astype("float64") @ w.astype("float64").T
        normed = (z - z.mean(0)) / np.sqrt(z.var(0) + 1e-5) * gamma + beta
        np.testing.assert_allclose(y, support.reference(np, "softmax", 0.5 * normed, 1), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(mean, 0.1 * z.mean(0), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(var, 0.9 + 0.1 * z.var(0, ddof=1), rtol=1e-4)
        np.testing.assert_array_equal(y, ks.linear_softmax(x, w, ks.batch_norm_training(gamma, beta, 1e-5) | ks.scale(0.5)))


class BitForBit(unittest.TestCase):
    """Against the C++ interface, in a process of its own."""

    def check_rows(self, name, x, out_dtype, axis, chain_name="none", chain=None, operands=()):
        with self.subTest(operation=name, scalar=str(x.dtype), axis=axis, chain=chain_name):
            contiguous = np.ascontiguousarray(x)
            raw = support.cpp_results(
                ["host", "rows", name, x.dtype.name, out_dtype, axis, *x.shape, chain_name],
                contiguous.tobytes(), *(np.ascontiguousarray(o).tobytes() for o in operands),
            )
            y = OPERATIONS[name](x, axis, chain, dtype=out_dtype)
            np.testing.assert_array_equal(y, np.frombuffer(raw, out_dtype).reshape(y.shape))

    def test_rows(self):
        for name, dtype, axis in itertools.product(OPERATIONS, TOLERANCE, (0, 1, 2)):
            self.check_rows(name, logits(5, 6, 77, dtype=dtype), dtype, axis)

    def test_strided_rows(self):
        base = logits(8, 9, 90)
        for x in (base[::2, :, 3:80], base[1:, ::3, :64]):
            self.check_rows("softmax", x, "float32", 2)
            self.check_rows("log_softmax", x, "float32", 2)

    def test_transforms(self):
        x = logits(5, 6, 77)
        column = logits(77, seed=1)
        keep = np.random.default_rng(2).random(x.shape) < 0.6
        hot = np.random.default_rng(3).uniform(0.5, 2, 30).astype("float32")
        chain = ks.temperature(hot) | ks.bias(column) | ks.gelu() | ks.scale(0.3) | ks.mask(keep) | ks.causal(40)
        for name in OPERATIONS:
            self.check_rows(name, x, "float32", 2, "all", chain, [hot, column, keep])

    @support.needs_heads
    def test_heads(self):
        m, n, k = 24, 100, 64
        x, w, b = logits(m, k, seed=1) / 4, logits(n, k, seed=2) / 4, logits(n, seed=3)
        for name, call in (("linear_softmax", ks.linear_softmax), ("linear_log_softmax", ks.linear_log_softmax)):
            raw = support.cpp_results(
                ["host", "head", name, "bias_gelu", m, n, k], x.tobytes(), w.tobytes(), b.tobytes()
            )
            y = call(x, w, ks.bias(b) | ks.gelu())
            np.testing.assert_array_equal(y, np.frombuffer(raw, "float32").reshape(m, n))
            gamma, beta, mean, var = logits(n, seed=4), logits(n, seed=5), logits(n, seed=6), np.ones(n, "float32")
            operands = [b, gamma, beta, mean, var]
            raw = support.cpp_results(
                ["host", "head", name, "bias_batch_norm_scale", m, n, k], x.tobytes(), w.tobytes(), *(o.tobytes() for o in operands)
            )
            y = call(x, w, ks.bias(b) | ks.batch_norm_training(gamma, beta, 1e-5, mean, var, 0.1) | ks.scale(1.5))
            np.testing.assert_array_equal(np.concatenate([y.ravel(), mean, var]), np.frombuffer(raw, "float32"))


class Dlpack(unittest.TestCase):
    def test_both_kinds_of_capsule(self):
        x = logits(4, 5, 30)
        want = ks.softmax(x, 1)
        for old in (False, True):
            y = ks.softmax(Foreign(x, old), 1)
            self.assertIsInstance(y, np.ndarray)
            np.testing.assert_array_equal(y, want)
            out = np.empty_like(x)
            given = Foreign(out, old)
            self.assertIs(ks.softmax(x, 1, out=given), given)
            np.testing.assert_array_equal(out, want)
            strided = x[::2, :, ::3]
            np.testing.assert_array_equal(ks.softmax(Foreign(strided, old), 1), ks.softmax(strided, 1))
        column = logits(30, seed=1)
        np.testing.assert_array_equal(ks.softmax(x, transform=ks.bias(Foreign(column))), ks.softmax(x, transform=ks.bias(column)))

    def test_capsules_are_given_back(self):
        x = logits(4, 5)
        before = sys.getrefcount(x)
        for _ in range(100):
            ks.softmax(Foreign(x))
            ks.softmax(x)
        gc.collect()
        self.assertEqual(sys.getrefcount(x), before)

    def test_read_only(self):
        x = logits(4, 5)
        x.flags.writeable = False
        np.testing.assert_array_equal(ks.softmax(x), ks.softmax(x.copy()))
        with self.assertRaisesRegex(ValueError, "out is read-only"):
            ks.softmax(x.copy(), out=x)
        try:
            x.__dlpack__(max_version=(1, 0))
        except (TypeError, BufferError):
            self.skipTest("this NumPy does not export read-only arrays")
        np.testing.assert_array_equal(ks.softmax(Foreign(x)), ks.softmax(x))
        with self.assertRaisesRegex(ValueError, "out is read-only"):
            ks.softmax(x.copy(), out=Foreign(x))
        mean = np.zeros(5, "float32")
        mean.flags.writeable = False
        with self.assertRaisesRegex(ValueError, "running_mean is read-only"):
            g = np.ones(5, "float32")
            ks.linear_softmax(logits(4, 3), logits(5, 3), ks.batch_norm_training(g, g, 1e-5, mean, g.copy(), 0.1))

    def test_bfloat16_of_ml_dtypes(self):
        try:
            import ml_dtypes
        except ImportError:
            self.skipTest("ml_dtypes is not here")
        x = logits(4, 50).astype(ml_dtypes.bfloat16)
        y = ks.softmax(x)
        self.assertEqual(y.dtype, x.dtype)
        want = support.reference(np, "softmax", x.astype("float64"), 1)
        np.testing.assert_allclose(y.astype("float64"), want, rtol=2**-8)


class Jax(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        try:
            os.environ.setdefault("JAX_PLATFORMS", "cpu")  # else its arrays are on the first GPU
            import jax
        except ImportError:
            raise unittest.SkipTest("jax is not here") from None
        cls.jnp = jax.numpy

    def test_inputs(self):
        a, b, keep = logits(6, 5, 40), logits(40, seed=1), logits(6, 5, 40, seed=2) > 0
        x = self.jnp.asarray(a)
        for axis in range(3):
            y = ks.softmax(x, axis)
            self.assertIsInstance(y, np.ndarray)
            np.testing.assert_array_equal(y, ks.softmax(a, axis))
        chain = ks.bias(self.jnp.asarray(b)) | ks.scale(self.jnp.asarray(2.0)) | ks.mask(self.jnp.asarray(keep))
        np.testing.assert_array_equal(ks.logsumexp(x, 2, chain), ks.logsumexp(a, 2, ks.bias(b) | ks.scale(2) | ks.mask(keep)))
        np.testing.assert_array_equal(ks.softmax(x[::2, :, ::-1]), ks.softmax(a[::2, :, ::-1].copy()))
        for dtype in ("float16", "bfloat16"):
            narrow = x.astype(dtype)
            self.assertEqual(ks.softmax(narrow).dtype, narrow.dtype)
            self.assertEqual(ks.softmax(narrow, dtype="float32").dtype, np.float32)

    @support.needs_heads
    def test_heads(self):
        a = logits(5, 40)
        x, w = self.jnp.asarray(a), self.jnp.asarray(logits(7, 40, seed=3))
        np.testing.assert_array_equal(ks.linear_softmax(x, w), ks.linear_softmax(a, np.asarray(w)))

    def test_nothing_of_jax_is_written(self):
        x = self.jnp.asarray(logits(4, 5))
        before = np.array(x)
        for out in (x, self.jnp.zeros((4, 5))):
            with self.assertRaisesRegex(ValueError, "out is an array of JAX, which cannot be written"):
                ks.softmax(x, out=out)
        g = self.jnp.ones(5)
        with self.assertRaisesRegex(ValueError, "running_mean is an array of JAX"):
            ks.linear_softmax(logits(4, 3), logits(5, 3), ks.batch_norm_training(g, g, 1e-5, g, g))
        np.testing.assert_array_equal(np.array(x), before)
        out = np.empty((4, 5), "float32")
        self.assertIs(ks.softmax(x, out=out), out)


class Refusals(unittest.TestCase):
    def refused(self, text, call, *arguments, **keywords):
        with self.assertRaisesRegex(ValueError, text):
            call(*arguments, **keywords)

    def test_what_is_no_array(self):
        for wrong in (None, 3.0, [[1.0, 2.0]], "abc"):
            self.refused("x is a", ks.softmax, wrong)
        x = logits(4, 5)
        self.refused("out is a", ks.softmax, x, out=[1.0])
        self.refused("bias is a NoneType", ks.softmax, x, transform=ks.bias(None))
        self.refused("the transform is a float", ks.softmax, x, transform=0.5)
        self.refused("the transform is a float", ks.softmax, x, -1, 0.5)
        self.refused("weight is a NoneType", ks.linear_softmax, x, None)

    def test_dtypes(self):
        for dtype in ("int32", "uint8", "complex64", ">f4", "bool"):
            with self.subTest(dtype=dtype):
                self.refused("dtype|scalar", ks.softmax, np.zeros((2, 3), dtype))
        x = logits(4, 5)
        self.refused("int32", ks.softmax, x, dtype="int32")
        self.refused("scalar|pair", ks.softmax, x, dtype="float16")
        self.refused("dtype says", ks.softmax, x, dtype="float64", out=np.empty((4, 5), "float32"))
        self.refused("mask", ks.softmax, x, transform=ks.mask(x))
        self.refused("bias", ks.softmax, x, transform=ks.bias(x > 0))

    def test_ranks_axes_and_extents(self):
        x = logits(4, 5)
        self.refused("rank 0", ks.softmax, np.zeros((), "float32"))
        self.refused("rank 9", ks.softmax, np.zeros((1,) * 9, "float32"))
        for axis in (2, -3, 100):
            self.refused("axis|dim", ks.softmax, x, axis)
            self.refused("axis|dim", ks.logsumexp, x, axis)
        self.refused("extents", ks.softmax, x, out=np.empty((5, 4), "float32"))
        self.refused("extents", ks.softmax, x, out=np.empty(5, "float32"))
        self.refused("extents", ks.softmax, x, transform=ks.bias(logits(4)))
        self.refused("extents", ks.softmax, x, transform=ks.temperature(logits(5)))
        odd = np.zeros((4, 5), [("a", "u1"), ("b", "f4")])["b"]
        self.refused("strides", ks.softmax, odd)

    @support.needs_heads
    def test_heads(self):
        x = logits(4, 5)
        self.refused("extents|matrix", ks.linear_softmax, x, logits(6, 4))
        self.refused("matrix", ks.linear_softmax, logits(5), logits(6, 5))
        self.refused("matrix", ks.linear_softmax, x, logits(5))
        six = np.ones(6, "float32")
        self.refused("running", ks.linear_softmax, x, logits(6, 5), ks.batch_norm_training(six, six, 1e-5, six))

    def test_overlap_and_values(self):
        x = logits(6, 5)
        self.refused("overlap", ks.softmax, x[1:], out=x[:-1])
        self.refused("not positive", ks.softmax, x, transform=ks.temperature(np.zeros(6, "float32"), checked=True))
        self.refused("eps", ks.softmax, x, transform=ks.batch_norm(x[0], x[0], x[0], x[0], -1.0))
        one = np.ones(5, "float32")
        self.refused("head", ks.softmax, x, transform=ks.batch_norm_training(one, one, 1e-5))
        many = ks.scale(1)
        for _ in range(8):
            many = many | ks.scale(1)
        self.refused("at most 8", ks.softmax, x, transform=many)
        self.refused("reserve takes", ks.reserve, np.exp, x)
        self.refused("no backend", ks.has_backend, "tpu")

    def test_output_stays_as_it_was(self):
        x, y = logits(4, 5), np.full((4, 5), 7, "float32")
        self.refused("extents", ks.softmax, x, transform=ks.bias(logits(9)), out=y)
        np.testing.assert_array_equal(y, 7)


class Process(unittest.TestCase):
    def test_memory_does_not_grow(self):
        x, w, b = logits(64, 200), logits(100, 200), logits(100)
        y, z = np.empty_like(x), np.empty((64, 100), "float32")

        def calls(count):
            for _ in range(count):
                ks.softmax(x, out=y)
                ks.softmax(Foreign(x), 1, ks.scale(2.0) | ks.causal(), out=y)
                ks.logsumexp(x)
                if ks.has_linear():
                    ks.linear_softmax(x, w, ks.bias(b) | ks.gelu(), out=z)
                    ks.linear_softmax(x, ks.PackedWeight(w), ks.bias(b))
                try:
                    ks.softmax(x, 5)
                except ValueError:
                    pass

        calls(200)
        before = support.resident_bytes()
        calls(1000)
        gc.collect()
        self.assertLess(support.resident_bytes() - before, 2 << 20)

    def test_two_threads(self):
        inputs = [logits(50, 300 + i, seed=i) for i in range(8)]
        wants = [ks.softmax(x, transform=ks.scale(0.5)) for x in inputs]

        def work(first):
            for turn in range(100):
                i = (first + turn) % len(inputs)
                np.testing.assert_array_equal(ks.softmax(inputs[i], transform=ks.scale(0.5)), wants[i])
                try:
                    ks.softmax(inputs[i], 7 + first)
                except ValueError as error:  # a thread's message is its own
                    assert str(7 + first) in str(error), error

        self.assertEqual(support.failures_of_two_threads(work), [])

    def test_what_is_said_of_the_library(self):
        self.assertRegex(ks.version(), r"^\d+\.\d+\.\d+$")
        self.assertTrue(ks.has_backend("cpu"))
        ks.softmax(logits(3, 4))
        self.assertNotEqual(ks.last_implementation(), "")

    def test_nobody_else_is_imported_and_the_process_ends(self):
        program = "import sys, kokkossoftmax; assert not {'numpy', 'torch'} & set(sys.modules)"
        subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
        program = "import numpy, kokkossoftmax as ks; p = ks.has_linear() and ks.PackedWeight(numpy.ones((3, 4), 'float32')); ks.softmax(numpy.ones(5))"
        subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


if __name__ == "__main__":
    support.main()
