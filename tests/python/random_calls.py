#!/usr/bin/env python3
# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Random calls of the Python package, beside more than double precision: shapes, axes, strides, scalars, chains of
transforms, special values; every fourth a head.

    random_calls.py [--arrays numpy|torch] [--device auto|cpu|cuda] [--cases N] [--seed S] [--largest ELEMENTS]

Each case is drawn from a seed of its own, S, S + 1, ...: a failure names it, and `--seed <it> --cases 1` repeats it. A
result may be off by what the library promises for an output and by what rounding may do to its logits, for which each
step of a chain adds its share. What lies between the strides of the output, and the inputs, must stay as they were; and
rows have the same bits among fewer others and alone.

Exit status: 0 when all agree, 1 when not, 77 where the library of arrays, or a GPU, is absent.
"""

import argparse
import math
import sys

import support

(np,) = support.need("numpy")
import kokkossoftmax as ks

EPS = {"float32": 2.0**-24, "float64": 2.0**-53}
PROMISED = {"float32": 1e-6, "float64": 1e-14}
# One unit in the last place of an output, relatively, and the largest that may be 0 instead.
OUTPUT = {"float64": (0, 3e-308), "float32": (0, 2e-38), "float16": (2.0**-10, 2.0**-24), "bfloat16": (2.0**-7, 2e-38)}
LENGTHS = (1, 1, 2, 3, 5, 7, 8, 16, 17, 24, 31, 33, 40, 63, 64, 65, 100, 127, 129, 250, 257, 511, 640, 1000, 1025, 1273, 2047)
LENGTHS += (2048, 2049, 3001, 4096, 4097, 5000, 8191, 12289, 16383, 16384, 16386, 20000, 32769, 50257, 65536, 70001, 131073)
PAD = 7.0  # between the strides


class NumpyArrays:
    scalars = ("float32", "float32", "float64", "float16")
    backwards = True

    def array(self, values, scalar):
        return np.array(values, dtype=scalar)

    def values(self, array):
        return np.array(array)

    def wide(self, array):
        return np.array(array, "float64")


class TorchArrays:
    scalars = ("float32", "float32", "bfloat16", "bfloat16", "float16", "float64")
    backwards = False

    def __init__(self, torch, device):
        self.torch, self.device = torch, device

    def array(self, values, scalar):
        return self.torch.from_numpy(np.array(values, order="C")).to(self.device, getattr(self.torch, scalar))

    def values(self, array):
        """As NumPy has them; bfloat16, which it has not, as float32."""
        return (array.float() if array.dtype == self.torch.bfloat16 else array).cpu().numpy()

    def wide(self, array):
        return array.double().cpu().numpy()


class Layout:
    """Where an array of some shape lies in a larger one: an order of the dimensions, steps, gaps, an offset."""

    def __init__(self, draw, shape, backwards, contiguous_axis=None):
        rank = len(shape)
        self.order = list(range(rank))
        plain = draw.random() < 0.4
        if not plain:
            if draw.random() < 0.5:
                draw.shuffle(self.order)
            if contiguous_axis is not None:
                self.order.remove(contiguous_axis)
                self.order.append(contiguous_axis)
        step = [1 if plain or d == contiguous_axis or draw.random() < 0.7 else int(draw.integers(2, 4)) for d in range(rank)]
        gap = [0 if plain or draw.random() < 0.5 else int(draw.integers(1, 4)) for _ in range(rank)]
        self.offset = 0 if draw.random() < 0.5 else int(draw.integers(1, 9))
        self.base = [shape[d] * step[d] + gap[d] for d in self.order]
        self.slices = []
        for d in range(rank):
            back = backwards and not plain and d != contiguous_axis and draw.random() < 0.15 and shape[d] > 1
            first, last = gap[d] // 2, gap[d] // 2 + shape[d] * step[d]
            # Backwards from the last one that a step comes to.
            at = first + (shape[d] - 1) * step[d]
            self.slices.append(slice(at, first - 1 if first > 0 else None, -step[d]) if back else slice(first, last, step[d]))

    def elements(self):
        return self.offset + math.prod(self.base)

    def view(self, flat):
        whole = flat[self.offset :].reshape(self.base)
        inverse = [self.order.index(d) for d in range(len(self.order))]
        whole = whole.permute(inverse) if hasattr(whole, "permute") else whole.transpose(inverse)
        return whole[(..., *self.slices)]


class Placed:
    """An array in a larger one, and what that was before the call."""

    def __init__(self, arrays, layout, values, scalar):
        flat = np.full(layout.elements(), PAD)
        layout.view(flat)[...] = values
        self.arrays, self.layout = arrays, layout
        self.flat = arrays.array(flat, scalar)
        self.array = layout.view(self.flat)
        self.before = arrays.values(self.flat).copy()

    def is_untouched(self, but_for_the_array=False):
        now = bits_of(self.arrays.values(self.flat))
        same = now == bits_of(self.before)
        if but_for_the_array:
            self.layout.view(same)[...] = True
        return bool(same.all())


def bits_of(values):
    if values.dtype.kind == "f":
        values = np.where(np.isnan(values), np.nan, values).astype(values.dtype)  # one NaN is as good as another
    return values.view({1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}[values.dtype.itemsize])


class Logits:
    """As transformed, exactly, each with a bound of what rounding in the accumulator has done to it."""

    def __init__(self, x, eps):
        self.value, self.error, self.eps = x.astype(np.longdouble), np.zeros_like(x), eps
        self.kept = x != -np.inf
        self.undefined = np.zeros(x.shape, bool)

    def step(self, value, error):
        self.value = value
        self.error = error + self.eps * np.where(np.isfinite(value), np.abs(value), 0).astype("float64")

    def multiply(self, factor):
        self.step(self.value * factor, self.error * np.abs(factor))

    def add(self, term):
        self.step(self.value + term, self.error)

    def curve(self, function, wrong):
        """A function whose slope is at most 1.2. Of what became -inf on the way it may make 0 or NaN."""
        self.undefined |= self.value == -np.inf
        self.step(function(self.value), 1.2 * self.error + wrong * np.where(np.isfinite(self.value), np.abs(self.value), 0))

    def finish(self):
        return np.where(self.kept, self.value, -np.inf), np.where(self.kept, self.error, 0)


def gelu_erf(x):
    return x * 0.5 * np.vectorize(math.erfc, otypes=["float64"])(-x * (1 / math.sqrt(2)))


def gelu_tanh(x):
    return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class Case:
    def __init__(self, arrays, seed, largest):
        self.arrays, self.seed, self.largest = arrays, seed, largest
        self.draw = draw = np.random.default_rng(seed)
        self.operation = str(draw.choice(["softmax", "softmax", "log_softmax", "logsumexp"]))
        self.scalar = str(draw.choice(arrays.scalars))
        self.is_narrow = self.scalar in ("float16", "bfloat16")
        self.out_scalar = "float32" if self.is_narrow and draw.random() < 0.25 else self.scalar
        self.accumulator = "float64" if self.scalar == "float64" else "float32"
        self.eps = EPS[self.accumulator]
        self.axis, self.shape = self.draw_shape()
        self.in_place = self.operation != "logsumexp" and self.out_scalar == self.scalar and draw.random() < 0.2
        self.described = []

    def draw_shape(self):
        draw = self.draw
        columns = int(draw.choice(LENGTHS)) if draw.random() < 0.85 else int(draw.integers(1, 3000))
        rank = int(draw.choice([1, 2, 2, 2, 3, 4]))
        room, others = max(1, self.largest // columns), []
        for _ in range(rank - 1):
            most = min(room, int(draw.choice([1, 3, 10, 50, 200, 2000])))
            others.append(int(draw.integers(1, most + 1)))
            room //= others[-1]
        if draw.random() < 0.02 and others:
            others[0] = 0
        axis = rank - 1 if draw.random() < 0.6 else int(draw.integers(0, rank))
        others.insert(axis, columns)
        return axis, tuple(others)

    def logits(self):
        draw = self.draw
        x = draw.standard_normal(self.shape) * float(draw.choice([0.01, 1, 1, 4, 30])) + float(draw.choice([0, 0, 5, -40, 1000]))
        kind = draw.random()
        if kind < 0.15:
            x[draw.random(self.shape) < float(draw.choice([0.01, 0.5, 0.99]))] = -np.inf
        elif kind < 0.22:
            # A row of nothing else, or a long stretch of it.
            rows = np.moveaxis(x, self.axis, -1)
            begin, end = sorted(draw.integers(0, rows.shape[-1] + 1, 2))
            rows[draw.random(rows.shape[:-1]) < 0.5, begin:end] = -np.inf
        if draw.random() < 0.15 and x.size > 0:
            at = tuple(int(draw.integers(0, n)) for n in self.shape)
            x[at] = float(draw.choice([np.nan, np.inf]))
        return x

    def operand(self, shape, values, scalar):
        layout = Layout(self.draw, shape, self.arrays.backwards)
        placed = Placed(self.arrays, layout, values, scalar)
        self.operands.append(placed)
        return placed.array

    def operand_of_logits(self, make, scalar):
        """Of x's shape, of 1 in some dimensions, of one value a column, or for all; as float64 of x's rank, too."""
        draw, kind = self.draw, self.draw.random()
        rank, columns = len(self.shape), self.shape[self.axis]
        if kind < 0.3:
            shape, of_rank = (columns,), tuple(columns if d == self.axis else 1 for d in range(rank))
        elif kind < 0.35:
            shape, of_rank = (1,), (1,) * rank
        else:
            shape = of_rank = tuple(1 if draw.random() < 0.25 else n for n in self.shape)
        array = self.operand(shape, make(shape), scalar)
        return array, self.arrays.wide(array).reshape(of_rank), shape

    def scalar_of_operand(self):
        if self.accumulator == "float64":
            return str(self.draw.choice(["float64", "float32"]))
        return str(self.draw.choice([self.scalar, "float32"]))

    def add_step(self, kind, z):
        """Applies it to `z`. The package's transform, as a function of the part of each dimension that a call has."""
        draw = self.draw
        rank, columns = len(self.shape), self.shape[self.axis]
        as_accumulator = lambda number: float(np.dtype(self.accumulator).type(number))
        if kind == "scale":
            factor = float(draw.choice([0.125, 0.3, 1.0, -0.7, 2.5]))
            z.multiply(as_accumulator(factor))
            self.described.append(f"scale({factor})")
            return lambda part: ks.scale(factor)
        if kind == "causal":
            offset = int(draw.integers(-2, columns + 2)) if draw.random() < 0.5 else 0
            before = self.axis - 1
            query = np.arange(self.shape[before]).reshape([-1 if d == before else 1 for d in range(rank)])
            column = np.arange(columns).reshape([-1 if d == self.axis else 1 for d in range(rank)])
            z.kept = z.kept & (column <= query + offset)
            self.described.append(f"causal({offset})")
            return lambda part: ks.causal(offset)
        if kind == "mask":
            part = float(draw.choice([0.02, 0.5, 0.9]))
            array, wide, shape = self.operand_of_logits(lambda s: draw.random(s) < part, "bool")
            z.kept = z.kept & (wide != 0)
            self.described.append(f"mask{shape}")
            return lambda part: ks.mask(self.cut(array, part))
        if kind in ("bias", "scale_by"):
            scalar = self.scalar_of_operand()
            array, wide, shape = self.operand_of_logits(draw.standard_normal, scalar)
            self.described.append(f"{kind}{shape} of {scalar}")
            if kind == "bias":
                z.add(wide)
                return lambda part: ks.bias(self.cut(array, part))
            z.multiply(wide)
            return lambda part: ks.scale(self.cut(array, part))
        if kind == "temperature":
            shape = self.without_axis(self.shape)
            if len(shape) != 1 and draw.random() < 0.5:
                shape = (math.prod(shape),)
            scalar = self.scalar_of_operand()
            array = self.operand(shape, draw.random(shape) + 0.25, scalar)
            wide = self.arrays.wide(array).reshape([1 if d == self.axis else n for d, n in enumerate(self.shape)])
            z.step(z.value / wide, z.error / wide)
            self.described.append(f"temperature{shape} of {scalar}")

            def temperature_of(part):
                if len(shape) == len(self.shape) - 1:
                    return ks.temperature(array[(..., *self.without_axis(part))])
                return ks.temperature(array.reshape(self.without_axis(self.shape))[(..., *self.without_axis(part))])

            return temperature_of
        if kind in ("gelu", "gelu_tanh"):
            z.curve(gelu_erf if kind == "gelu" else gelu_tanh, 2e-7 if self.accumulator == "float32" else 1e-15)
            self.described.append(kind)
            return lambda part: getattr(ks, kind)()
        if kind == "relu":
            z.step(np.where(z.value < 0, 0, z.value), z.error)
            self.described.append(kind)
            return lambda part: ks.relu()
        scalar = self.scalar_of_operand()
        four, wide = [], []
        for add in (0, 1, 0, 0):
            values = np.abs(draw.standard_normal(columns)) if add else draw.standard_normal(columns)
            four.append(self.operand((columns,), values + add, scalar))
            wide.append(self.arrays.wide(four[-1]).reshape([-1 if d == self.axis else 1 for d in range(rank)]))
        mean, variance, gamma, beta = wide
        z.add(-mean)
        deviation = np.sqrt(variance + as_accumulator(1e-3))
        z.step(z.value / deviation, z.error / deviation + 2 * z.eps * np.abs(np.where(np.isfinite(z.value), z.value, 0) / deviation))
        z.multiply(gamma)
        z.add(beta)
        self.described.append(f"batch_norm of {scalar}")
        return lambda part: ks.batch_norm(*four, 1e-3)

    def kinds(self):
        """The steps of a chain."""
        kinds = ["scale", "mask", "bias", "scale_by", "temperature", "gelu", "gelu_tanh", "relu", "batch_norm"]
        if self.axis > 0:
            kinds.append("causal")
        return [str(kind) for kind in self.draw.choice(kinds, int(self.draw.choice([0, 0, 1, 1, 2, 3, 4])))]

    def chain(self, z):
        self.operands = []
        steps = [self.add_step(kind, z) for kind in self.kinds()]

        def chain_of(part):
            chain = None
            for step in steps:
                chain = step(part) if chain is None else chain | step(part)
            return chain

        return chain_of

    def without_axis(self, of_dimensions):
        return tuple(n for d, n in enumerate(of_dimensions) if d != self.axis)

    def cut(self, array, part):
        """Of an operand, what belongs to a part of x."""
        if len(array.shape) != len(self.shape):
            return array
        return array[tuple(slice(None) if n == 1 else p for n, p in zip(array.shape, part))]

    def expected(self, z, error):
        """The result, and by how much one may differ from it."""
        axis, eps, promised = self.axis, self.eps, PROMISED[self.accumulator]
        want = support.reference(np, self.operation, z, axis)
        top = z.max(axis, keepdims=True)
        finite_top = np.where(np.isfinite(top), top, 0)
        # What logits of a sum's terms may be off by moves it by as much, each in its proportion.
        exps = np.exp(z - finite_top)
        total = exps.sum(axis, keepdims=True)
        of_sum = (exps * np.where(exps > 0, error, 0)).sum(axis, keepdims=True) / np.where(total > 0, total, 1)
        if self.operation == "logsumexp":
            size = np.maximum(1, np.maximum(np.abs(np.squeeze(finite_top, axis)), np.where(np.isfinite(want), np.abs(want), 0)))
            return want, 4 * eps * size + np.squeeze(of_sum, axis)
        far = np.where(np.isfinite(z), np.abs(z - finite_top), 0)
        if self.operation == "log_softmax":
            size = np.maximum(np.maximum(1, far), math.log(max(1, self.shape[axis])))
            allowed = 4 * eps * size + error + of_sum
        else:
            allowed = want * np.expm1(promised + far * eps + error + of_sum)
        # Which the plain reference leaves to whoever asks: a row with NaN or +inf is all NaN.
        return np.where(np.isnan(top) | (top == np.inf), np.nan, want), allowed

    def run(self):
        """What is wrong, or nothing."""
        arrays, draw = self.arrays, self.draw
        operation = getattr(ks, self.operation)
        contiguous = self.axis if draw.random() < 0.6 else None
        x = Placed(arrays, Layout(draw, self.shape, arrays.backwards, contiguous), self.logits(), self.scalar)
        z = Logits(arrays.wide(x.array), self.eps)
        chain_of = self.chain(z)
        y = x
        if not self.in_place:
            if self.operation == "logsumexp":
                layout = Layout(draw, self.without_axis(self.shape), arrays.backwards)
            else:
                layout = Layout(draw, self.shape, arrays.backwards, contiguous)
            y = Placed(arrays, layout, 0, self.out_scalar)
        of_parts = self.some_rows(x, y, chain_of, operation)
        operation(x.array, self.axis, chain_of((slice(None),) * len(self.shape)), out=y.array)
        wrong = self.wrong(z, y, [] if self.in_place else [x])
        if wrong:
            return wrong
        for part, bits in of_parts:
            if (bits_of(arrays.values(y.array[part])) != bits).any():
                return f"rows {part} have other bits alone"
        return None

    def wrong(self, z, y, inputs):
        wrong = self.wrong_values(z, self.arrays.wide(y.array))
        if wrong:
            return wrong
        if not y.is_untouched(but_for_the_array=True):
            return "what lies between the output's strides has changed"
        if not all(placed.is_untouched() for placed in self.operands + inputs):
            return "an input has changed"
        return None

    def wrong_values(self, z, got):
        want, allowed = self.expected(*z.finish())
        undefined = (z.undefined & z.kept).any(self.axis, keepdims=self.operation != "logsumexp")
        unit, smallest = OUTPUT[self.out_scalar]
        allowed = np.where(np.isfinite(want), allowed + unit * np.abs(want) + smallest, 0)
        too_large = np.abs(want) > (65504 if self.out_scalar == "float16" else 3.3e38)
        same = undefined | (got == want) | (np.isnan(got) & np.isnan(want)) | (np.abs(got - want) <= allowed)
        same |= too_large & (got == np.copysign(np.inf, want))
        if same.all():
            return None
        at = tuple(int(i[0]) for i in np.nonzero(~same))
        return f"at {at} {got[at]!r}, expected {want[at]!r} within {allowed[at]:.3g}; {np.count_nonzero(~same)} of {same.size}"

    def some_rows(self, x, y, chain_of, operation):
        """The bits of some of the rows where they are, and of one row somewhere else, in calls of their own."""
        arrays, draw, found = self.arrays, self.draw, []
        if 0 in self.shape:
            return found
        is_logsumexp = self.operation == "logsumexp"
        part = [slice(None)] * len(self.shape)
        for d, n in enumerate(self.shape):
            if d != self.axis and draw.random() < 0.7:
                begin = 0 if d == self.axis - 1 else int(draw.integers(0, n))  # a causal mask counts from there
                part[d] = slice(begin, int(draw.integers(begin, n)) + 1)
        of_output = (..., *(self.without_axis(part) if is_logsumexp else part))
        source = Placed(arrays, x.layout, arrays.wide(x.array), self.scalar)
        to = source if self.in_place else Placed(arrays, y.layout, 0, self.out_scalar)
        operation(source.array[tuple(part)], self.axis, chain_of(part), out=to.array[of_output])
        found.append((of_output, bits_of(arrays.values(to.array[of_output]))))
        if chain_of(part) is None and self.is_contiguous(x.array) and (is_logsumexp or self.is_contiguous(y.array)):
            index = tuple(slice(None) if d == self.axis else int(draw.integers(0, n)) for d, n in enumerate(self.shape))
            row = arrays.array(arrays.wide(x.array[index]), self.scalar)
            out = arrays.array(np.zeros(() if is_logsumexp else row.shape), self.out_scalar)
            operation(row, 0, None, out=out)
            found.append(((..., *(self.without_axis(index) if is_logsumexp else index)), bits_of(arrays.values(out))))
        return found

    def is_contiguous(self, array):
        """Along the axis, and along it alone: the library goes by the strides of all dimensions, of extent 1 too."""
        strides = array.stride() if callable(getattr(array, "stride", None)) else [n // array.itemsize for n in array.strides]
        return strides[self.axis] == 1 and all(abs(n) > 1 for d, n in enumerate(strides) if d != self.axis)

    def __str__(self):
        return (
            f"seed {self.seed}: {self.operation} of {self.shape} along {self.axis}, {self.scalar} to {self.out_scalar}"
            f"{', in place' if self.in_place else ''}, {' | '.join(self.described) or 'no transform'}"
        )


class HeadCase(Case):
    """softmax of the transformed x weight^T, along its columns."""

    def __init__(self, arrays, seed, largest):
        super().__init__(arrays, seed, largest)
        draw = self.draw
        self.operation = str(draw.choice(["softmax", "log_softmax"]))
        self.in_place = False
        rows, columns = int(draw.choice([1, 2, 3, 16, 33, 100, 199])), int(draw.choice([1, 2, 3, 7, 16, 33, 100, 257, 1000, 2049]))
        self.k = int(draw.choice([0, 1, 2, 3, 8, 17, 64, 100, 300]))
        while rows * columns * self.k > 10 * largest:
            self.k //= 2
        self.axis, self.shape = 1, (rows, columns)

    def kinds(self):
        kinds = super().kinds()
        if self.shape[0] > 1 and self.draw.random() < 0.3:
            # Behind what moves no logit out of the statistics.
            before = [str(kind) for kind in self.draw.choice(["bias", "scale", "relu", "gelu"], int(self.draw.integers(0, 3)))]
            kinds = before + ["training"] + kinds
        return kinds

    def add_step(self, kind, z):
        return self.add_training(z) if kind == "training" else super().add_step(kind, z)

    def add_training(self, z):
        """BatchNorm with the statistics of the batch."""
        draw, columns, scalar = self.draw, self.shape[1], self.accumulator
        gamma, beta = (self.operand((columns,), draw.standard_normal(columns), scalar) for _ in range(2))
        mean, variance = z.value.mean(0), z.value.var(0)
        deviation = np.sqrt(variance + 1e-3)
        of_column = z.error.max(0) + z.eps * np.abs(z.value).max(0)
        norm = (z.value - mean) / deviation
        factor = np.abs(self.arrays.wide(gamma)).astype("float64")
        rest = (8 * z.eps * (np.abs(z.value) + np.abs(mean)) / deviation * factor).astype("float64")
        error = ((z.error + of_column) / deviation + np.abs(norm) * of_column / deviation).astype("float64")
        z.step(norm * self.arrays.wide(gamma) + self.arrays.wide(beta), error * factor + rest)
        self.described.append(f"batch_norm_training of {scalar}")
        return lambda part: ks.batch_norm_training(gamma, beta, 1e-3)

    def run(self):
        arrays, draw = self.arrays, self.draw
        operation = getattr(ks, f"linear_{self.operation}")
        (rows, columns), k = self.shape, self.k
        matrix = lambda n, m, values, scalar: Placed(arrays, Layout(draw, (n, m), arrays.backwards), values, scalar)
        x = matrix(rows, k, draw.standard_normal((rows, k)) + float(draw.choice([0, 0, 3])), self.scalar)
        w = matrix(columns, k, draw.standard_normal((columns, k)) / max(1, k) ** 0.5, self.scalar)
        y = matrix(rows, columns, 0, self.out_scalar)
        left, right = (arrays.wide(a.array).astype(np.longdouble) for a in (x, w))
        z = Logits(left @ right.T, self.eps)
        z.error += self.eps * (2 * k**0.5 + 4) * (np.abs(left) @ np.abs(right.T)).astype("float64")
        chain = self.chain(z)((slice(None),) * 2)
        operation(x.array, w.array, chain, out=y.array)
        return self.wrong(z, y, [x, w])

    def __str__(self):
        return f"{super().__str__()}, K {self.k}"


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arrays", choices=("numpy", "torch"), default="numpy")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of torch's (auto: cuda if it is there)")
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--largest", type=int, default=200000, help="elements of x (default: %(default)s)")
    return parser.parse_args()


def main():
    options = parse()
    arrays = NumpyArrays()
    if options.arrays == "torch":
        (torch,) = support.need("torch")
        has_cuda = torch.cuda.is_available() and ks.has_backend("cuda")
        if options.device == "cuda" and not has_cuda:
            print("skipped: no CUDA")
            return support.SKIPPED
        torch.set_grad_enabled(False)
        arrays = TorchArrays(torch, "cuda" if has_cuda and options.device != "cpu" else "cpu")
    failures = 0
    for seed in range(options.seed, options.seed + options.cases):
        is_head = seed % 4 == 0 and ks.has_linear()
        case = (HeadCase if is_head else Case)(arrays, seed, options.largest)
        with np.errstate(all="ignore"):
            try:
                wrong = case.run()
            except ValueError as error:
                wrong = str(error)
        if wrong:
            failures += 1
            print(f"{case}\n  {wrong}", flush=True)
    print(f"{options.cases} cases, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
