# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The calls as PyTorch operators, so that torch.compile and torch.export keep them whole. Imported only for these.

A chain of transforms goes flat into an operator: four integers and two numbers a step, the arrays behind each other;
running statistics, which are written, are arguments of an operator of their own. There is no gradient.
"""

from __future__ import annotations

import torch

from . import _arrays
from . import _calls
from . import _library as _c
from ._transforms import Transform

_CHAIN = "int[] steps, float[] numbers, Tensor[] operands"
_HEAD = f"int operation, bool tf32, {_CHAIN}"
_RUNNING = "Tensor(b!) running_mean, Tensor(c!) running_var"
_OPERATORS = {
    "rows": f"(Tensor x, int operation, int dim, ScalarType? dtype, {_CHAIN}) -> Tensor",
    "rows_out": f"(Tensor x, Tensor(a!) out, int operation, int dim, {_CHAIN}) -> ()",
}
# What writes a tensor returns none, and lists are read alone: compilers follow that in every version.
for _name, _weight in (("linear", "Tensor weight"), ("packed", "int weight")):
    _OPERATORS[_name] = f"(Tensor x, {_weight}, ScalarType? dtype, {_HEAD}) -> Tensor"
    _OPERATORS[_name + "_out"] = f"(Tensor x, {_weight}, Tensor(a!) out, {_HEAD}) -> ()"
    _OPERATORS[_name + "_training_out"] = f"(Tensor x, {_weight}, Tensor(a!) out, {_HEAD}, {_RUNNING}) -> ()"
_ROWS = ("softmax", "log_softmax", "logsumexp")
_LINEAR = ("linear_softmax", "linear_log_softmax")


# ---- What torch.compile traces -------------------------------------------------------------------------------------


def _without_grad(tensors):
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                raise ValueError(
                    "kokkossoftmax: an argument requires grad, and kokkossoftmax has no gradient; call it under "
                    "torch.no_grad() or with detached tensors"
                )


def _flat(transform):
    steps, numbers, operands, running = [], [], [], []
    if transform is not None:
        for kind, flags, number, momentum, offset, arrays in transform.stages:
            has_running = kind == _c.BATCH_NORM_TRAINING and arrays[2] is not None and arrays[3] is not None
            if kind == _c.BATCH_NORM_TRAINING:
                operands.extend(arrays[:2])
                if has_running:
                    running.extend(arrays[2:])
                elif arrays[2] is not None or arrays[3] is not None:
                    raise ValueError("kokkossoftmax: batch_norm_training has one of its two running statistics alone")
            else:
                operands.extend(arrays)
            steps.extend((kind, flags, offset, 1 if has_running else 0))
            numbers.extend((number, momentum))
    return steps, numbers, operands, running


def _dtype(dtype):
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    return _by_scalar[_arrays.scalar_of_dtype(dtype)]


_by_scalar = {
    _c.FLOAT: torch.float32,
    _c.DOUBLE: torch.float64,
    _c.HALF: torch.float16,
    _c.BFLOAT16: torch.bfloat16,
}


def _same_dtype(dtype, out):
    if dtype is not None and _dtype(dtype) != out.dtype:
        raise ValueError(f"kokkossoftmax: out is of {out.dtype}, dtype says {dtype}")


def _no_stream(stream):
    if stream is not None:
        raise ValueError("kokkossoftmax: under torch.compile a call is on the current stream; leave stream out")


def rows(operation, x, dim, transform, dtype, out, stream):
    _no_stream(stream)
    steps, numbers, operands, _ = _flat(transform)
    _without_grad([x, *operands])
    if out is None:
        return torch.ops.kokkossoftmax.rows(x, operation, dim, _dtype(dtype), steps, numbers, operands)
    _same_dtype(dtype, out)
    torch.ops.kokkossoftmax.rows_out(x, out, operation, dim, steps, numbers, operands)
    return out


def linear(operation, x, weight, transform, tf32, dtype, out, stream):
    _no_stream(stream)
    steps, numbers, operands, running = _flat(transform)
    is_packed = isinstance(weight, _calls.PackedWeight)
    _without_grad([x, *operands] if is_packed else [x, weight, *operands])
    name, of_weight = ("packed", weight._token) if is_packed else ("linear", weight)
    if out is not None:
        _same_dtype(dtype, out)
    elif running:
        out = x.new_empty([x.shape[0], weight.shape[0]], dtype=_dtype(dtype))
    else:
        operator = getattr(torch.ops.kokkossoftmax, name)
        return operator(x, of_weight, _dtype(dtype), operation, tf32, steps, numbers, operands)
    operator = getattr(torch.ops.kokkossoftmax, name + ("_training_out" if running else "_out"))
    operator(x, of_weight, out, operation, tf32, steps, numbers, operands, *running)
    return out


# ---- What runs ------------------------------------------------------------------------------------------------------


def _chain(steps, numbers, operands, running=()):
    if not steps:
        return None
    stages, at = [], 0
    for index in range(len(steps) // 4):
        kind, flags, offset, has_running = steps[4 * index : 4 * index + 4]
        count = 2 if kind == _c.BATCH_NORM_TRAINING else len(_calls._OPERAND_NAMES.get(kind, ()))
        arrays = tuple(operands[at : at + count])
        at += count
        if kind == _c.BATCH_NORM_TRAINING:
            arrays += tuple(running) if has_running else (None, None)
        stages.append((kind, flags, numbers[2 * index], numbers[2 * index + 1], offset, arrays))
    return Transform(tuple(stages))


def _packed_weight(token):
    weight = _calls._packed.get(token)
    if weight is None:
        raise ValueError("kokkossoftmax: the PackedWeight of a compiled call is gone")
    return weight


def _run_rows(x, operation, dim, dtype, steps, numbers, operands):
    chain = _chain(steps, numbers, operands)
    return _calls._call(_calls._ROWS, _ROWS[operation], x, operation == 2, dim, chain, dtype, None, None, 0)


def _run_rows_out(x, out, operation, dim, steps, numbers, operands):
    chain = _chain(steps, numbers, operands)
    _calls._call(_calls._ROWS, _ROWS[operation], x, operation == 2, dim, chain, None, out, None, 0)


def _run_linear(x, weight, dtype, operation, tf32, steps, numbers, operands):
    chain = _chain(steps, numbers, operands)
    return _calls._call(_calls._LINEAR, _LINEAR[operation], x, weight, 0, chain, dtype, None, None, tf32)


def _run_linear_out(x, weight, out, operation, tf32, steps, numbers, operands, *running):
    chain = _chain(steps, numbers, operands, running)
    _calls._call(_calls._LINEAR, _LINEAR[operation], x, weight, 0, chain, None, out, None, tf32)


def _run_packed(x, weight, dtype, operation, tf32, steps, numbers, operands):
    chain, name = _chain(steps, numbers, operands), _LINEAR[operation] + "_packed"
    return _calls._call(_calls._PACKED, name, x, _packed_weight(weight), 0, chain, dtype, None, None, tf32)


def _run_packed_out(x, weight, out, operation, tf32, steps, numbers, operands, *running):
    chain, name = _chain(steps, numbers, operands, running), _LINEAR[operation] + "_packed"
    _calls._call(_calls._PACKED, name, x, _packed_weight(weight), 0, chain, None, out, None, tf32)


# ---- What stands in for it without memory ---------------------------------------------------------------------------


def _fake_rows(x, operation, dim, dtype, steps, numbers, operands):
    if operation != 2:
        return torch.empty_like(x, dtype=dtype)
    at = dim % x.dim()
    return x.new_empty([*x.shape[:at], *x.shape[at + 1 :]], dtype=dtype)


def _fake_linear(x, weight, dtype, operation, tf32, steps, numbers, operands):
    return x.new_empty([x.shape[0], weight.shape[0]], dtype=dtype)


def _fake_packed(x, weight, dtype, operation, tf32, steps, numbers, operands):
    return x.new_empty([x.shape[0], _packed_weight(weight).shape[0]], dtype=dtype)


def _fake_out(*arguments):
    return None


_registered = torch.library.Library("kokkossoftmax", "DEF")
for _name, _schema in _OPERATORS.items():
    _registered.define(_name + _schema)
    for _key in ("CPU", "CUDA"):
        _registered.impl(_name, globals()["_run_" + _name.replace("_training", "")], _key)
    torch.library.register_fake(
        "kokkossoftmax::" + _name, globals()["_fake_out" if _name.endswith("_out") else "_fake_" + _name], lib=_registered
    )
