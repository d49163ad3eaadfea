# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Logit transforms: what happens to a logit before the softmax. `a | b` applies a, then b."""

from __future__ import annotations

from typing import Any

from . import _library as _c

Array = Any
"""Anything with __dlpack__: a PyTorch tensor, a NumPy, CuPy or JAX array."""

_NAMES = {
    _c.SCALE: "scale",
    _c.TEMPERATURE: "temperature",
    _c.MASK: "mask",
    _c.CAUSAL: "causal",
    _c.BIAS: "bias",
    _c.GELU_ERF: "gelu",
    _c.GELU_TANH: "gelu_tanh",
    _c.RELU: "relu",
    _c.BATCH_NORM: "batch_norm",
    _c.BATCH_NORM_TRAINING: "batch_norm_training",
    _c.SCALE_BY: "scale",
}


class Transform:
    """A chain of steps, composed with `|`. Holds its arrays, and looks at them anew at each call.

    The steps are applied in float32, or in float64 where input or output is float64. Masking is sticky: what a mask
    drops, and an input of -inf, counts as -inf whatever else is in the chain.
    """

    __slots__ = ("stages",)

    def __init__(self, stages: tuple):
        # Each: kind, flags, number, momentum, offset, operands.
        self.stages = stages

    def __or__(self, other: Transform) -> Transform:
        if not isinstance(other, Transform):
            return NotImplemented
        return Transform(self.stages + other.stages)

    def __repr__(self) -> str:
        return " | ".join(_NAMES[stage[0]] for stage in self.stages)


_gelu = Transform(((_c.GELU_ERF, 0, 0.0, 0.0, 0, ()),))
_gelu_tanh = Transform(((_c.GELU_TANH, 0, 0.0, 0.0, 0, ()),))
_relu = Transform(((_c.RELU, 0, 0.0, 0.0, 0, ()),))


def scale(factor: float | Array) -> Transform:
    """value * factor: a number, or an array, which is read when the device comes to it, with the shapes of bias()."""
    if hasattr(factor, "__dlpack__"):
        return Transform(((_c.SCALE_BY, 0, 0.0, 0.0, 0, (factor,)),))
    return Transform(((_c.SCALE, 0, float(factor), 0.0, 0, ()),))


def temperature(values: Array, *, checked: bool = False) -> Transform:
    """value / temperature, one temperature a row: rank 1 with a value for each row, or x's shape without `dim`.

    With `checked` a value that is not positive raises ValueError, at the cost of waiting for the device."""
    return Transform(((_c.TEMPERATURE, _c.CHECKED if checked else 0, 0.0, 0.0, 0, (values,)),))


def mask(keep: Array) -> Transform:
    """Booleans; true keeps a logit. Of x's rank, with x's extents or 1 (broadcast), or of one value a column or for all."""
    return Transform(((_c.MASK, 0, 0.0, 0.0, 0, (keep,)),))


def causal(offset: int = 0) -> Transform:
    """Keeps column <= query + offset, the query being the index along the dimension before `dim`."""
    return Transform(((_c.CAUSAL, 0, 0.0, 0.0, int(offset), ()),))


def bias(values: Array) -> Transform:
    """value + bias. Of x's rank, with x's extents or 1 (broadcast), or of one value a column or for all."""
    return Transform(((_c.BIAS, 0, 0.0, 0.0, 0, (values,)),))


def gelu() -> Transform:
    """value * Phi(value), through erf, as torch.nn.functional.gelu."""
    return _gelu


def gelu_tanh() -> Transform:
    """The approximation of gelu() through tanh."""
    return _gelu_tanh


def relu() -> Transform:
    """max(value, 0)."""
    return _relu


def batch_norm(mean: Array, variance: Array, gamma: Array, beta: Array, eps: float) -> Transform:
    """(value - mean) / sqrt(variance + eps) * gamma + beta; one value a column in each."""
    return Transform(((_c.BATCH_NORM, 0, float(eps), 0.0, 0, (mean, variance, gamma, beta)),))


def batch_norm_training(
    gamma: Array,
    beta: Array,
    eps: float,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    momentum: float = 0.1,
) -> Transform:
    """BatchNorm with the statistics of the batch, in the chain of a head alone, and once.

    Where running statistics are given (both), they are written, as PyTorch does it: running = (1 - momentum) running +
    momentum statistic, with the unbiased variance."""
    operands = (gamma, beta, running_mean, running_var)
    return Transform(((_c.BATCH_NORM_TRAINING, 0, float(eps), float(momentum), 0, operands),))
