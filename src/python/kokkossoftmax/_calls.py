# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""softmax, log_softmax, logsumexp and the heads: from Python's arguments to the C library's."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any, Callable

from . import _arrays
from . import _library as _c
from ._library import give_back, library, take
from ._transforms import Array, Transform

_families = _arrays._families
_ROWS, _LINEAR, _PACKED = "rows", "linear", "packed"


def _compiled(array) -> bool:
    """Whether torch.compile looks at this call, or a tensor without memory is asked about (torch.export, meta)."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch.compiler.is_compiling():
        return True
    return type(array) is not torch.Tensor and isinstance(array, torch.Tensor) and _is_fake(torch, array)


def _is_fake(torch, array):
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(array, module.FakeTensor)


def _place(name, described, memory, device):
    where = lambda m, d: "the host" if m == _c.HOST else f"cuda:{d}"
    return ValueError(f"kokkossoftmax: {name} is on {where(described[2], described[3])}, x on {where(memory, device)}")


def _set(frame, slot, name, described, memory, device):
    if described[2] != memory or described[3] != device:
        raise _place(name, described, memory, device)
    try:
        return frame.set_array(slot, described[0], described[1], memory, described[4], described[5])
    except IndexError:
        raise ValueError(f"kokkossoftmax: {name} has rank {len(described[4])}; at most {_c.MAX_RANK} is possible") from None


class _Warm(threading.local):
    def __init__(self):
        self.calls = set()


_warm = _Warm()
_RESERVES = {_ROWS: "reserve", _LINEAR: "reserve_linear", _PACKED: "reserve_linear_packed"}


def _warm_up(c, family, kind, function, arguments, of_x, of_out, transform):
    """Reserves after the first call of its kind, and after the first one since a capture, so that PyTorch's habit of calling
    once before a capture is enough, though the capture is on another stream. Nothing is reserved during a capture."""
    if family.is_capturing():
        _warm.calls.clear()  # the graph keeps the memory that it took
        return 0
    steps = None if transform is None else tuple([stage[0] for stage in transform.stages])
    choice = arguments[3 if kind is _ROWS else 6]  # axis; precision
    key = (function, choice, steps, of_x[1], of_x[4], of_x[5], of_out[1], of_out[4])
    if key in _warm.calls:
        return 0
    if len(_warm.calls) > 1000:
        _warm.calls.clear()
    status = getattr(c, _RESERVES[kind])(*arguments)
    if status == 0:
        _warm.calls.add(key)
    return status


_OPERAND_NAMES = {
    _c.TEMPERATURE: ("temperature",),
    _c.MASK: ("mask",),
    _c.BIAS: ("bias",),
    _c.BATCH_NORM: ("mean", "variance", "gamma", "beta"),
    _c.BATCH_NORM_TRAINING: ("gamma", "beta", "running_mean", "running_var"),
}


def _set_transforms(frame, transform, memory, device, keep):
    """Fills the frame's transforms; what was written by the call is appended to keep with its family."""
    stages = transform.stages
    if len(stages) > _c.MAX_TRANSFORMS:
        raise ValueError(f"kokkossoftmax: a chain of {len(stages)} transforms; at most {_c.MAX_TRANSFORMS} are possible")
    slot = 3
    written = None
    index = 0
    for kind, flags, number, momentum, offset, operands in stages:
        if not operands:
            frame.set_transform(index, kind, flags, number, momentum, offset, 0, 0, 0, 0)
            index += 1
            continue
        addresses = [0, 0, 0, 0]
        names = _OPERAND_NAMES[kind]
        for place, operand in enumerate(operands):
            name = names[place]
            is_written = place >= 2 and kind == _c.BATCH_NORM_TRAINING
            if operand is None and is_written:
                continue
            family = _families.get(type(operand)) or _arrays.family_of(operand, name)
            described = family.describe(operand, name, is_written)
            keep.append(described)
            addresses[place] = _set(frame, slot, name, described, memory, device)
            slot += 1
            if is_written:
                written = written or []
                written.append((family, operand))
        frame.set_transform(index, kind, flags, number, momentum, offset, *addresses)
        index += 1
    return len(stages), written


def _output(family, x, described, dtype, out, shape):
    """The output, its family and its description."""
    if out is None:
        out = family.empty(x, described, described[1] if dtype is None else _arrays.scalar_of_dtype(dtype), shape)
        if family is _arrays._dlpack_family:
            family = _arrays.family_of(out, "out")
        return out, family.describe(out, "out", True)
    family = _families.get(type(out)) or _arrays.family_of(out, "out")
    of_out = family.describe(out, "out", True)
    if dtype is not None and _arrays.scalar_of_dtype(dtype) != of_out[1]:
        raise ValueError(f"kokkossoftmax: out is of {_c.SCALAR_NAMES[of_out[1]]}, dtype says {dtype}")
    return out, of_out


def _call(kind, function, x, w, axis, transform, dtype, out, stream, tf32):
    """The one way into the library. `w` is the weights of a head; of rows, whether the axis is dropped. `function` is a
    name of the C library."""
    c = _c._library or library()
    family = _families.get(type(x)) or _arrays.family_of(x, "x")
    of_x = family.describe(x, "x")
    _, _, memory, device, x_shape, _, _ = of_x
    shape = None
    if kind is _ROWS:
        if w:  # logsumexp, which drops the axis
            rank = len(x_shape)
            if not -rank <= axis < rank:
                raise ValueError(f"kokkossoftmax: dim {axis} is out of range for x of shape {tuple(x_shape)}")
            at = axis % rank
            shape = (*x_shape[:at], *x_shape[at + 1 :])
    else:
        if kind is _PACKED:
            of_w = None
            rows = w.shape[0]
            if w._place != (memory, device):
                raise _place("weight", (0, 0, *w._place), memory, device)
        else:
            of_w = _arrays.family_of(w, "weight").describe(w, "weight")
            rows = of_w[4][0] if len(of_w[4]) == 2 else 0
        shape = (x_shape[0] if len(x_shape) == 2 else 0, rows)
    given = out is not None
    out, of_out = _output(family, x, of_x, dtype, out, shape)
    if memory == _c.HOST:
        handle = 0
    elif stream is None:
        handle = family.stream(device)
    else:
        handle = _arrays.stream_handle(stream, device)
    keep: list = []
    written = None
    frame = take()
    try:
        frame.set_execution(memory, device, handle)
        x_at = _set(frame, 0, "x", of_x, memory, device)
        y_at = _set(frame, 1, "out", of_out, memory, device)
        count = 0
        if transform is not None:
            count, written = _set_transforms(frame, transform, memory, device, keep)
        if kind is _ROWS:
            arguments = (frame.execution, x_at, y_at, axis, frame.transforms, count)
        else:
            w_at = w._handle if kind is _PACKED else _set(frame, 2, "weight", of_w, memory, device)
            arguments = (frame.execution, x_at, w_at, y_at, frame.transforms, count, tf32)
        status = getattr(c, function)(*arguments)
        if memory == _c.CUDA and status == 0:
            status = _warm_up(c, family, kind, function, arguments, of_x, of_out, transform)
    finally:
        give_back(frame)
    if status:
        c.fail(status)
    if given:
        _families[type(out)].written(out)
    if written is not None:
        for its_family, operand in written:
            its_family.written(operand)
    return out


def _checked_transform(transform):
    if transform is not None and not isinstance(transform, Transform):
        raise ValueError(f"kokkossoftmax: the transform is a {type(transform).__name__}, not one of kokkossoftmax's")


def softmax(
    x: Array, dim: int = -1, transform: Transform | None = None, *, dtype=None, out: Array | None = None, stream=None
) -> Array:
    """Softmax of the transformed x along `dim`.

    x          logits, of rank 1 to 8 and any strides: a PyTorch tensor, a NumPy, CuPy or JAX array, or anything else
               with __dlpack__; float32, float64, float16 or bfloat16. Nothing is copied
    dim        the dimension to normalise over; negative counts from the end
    transform  what happens to the logits before: kokkossoftmax.scale(0.5) | kokkossoftmax.causal()
    dtype      of the result: x's own, or float32 for 16-bit x
    out        where the result goes, of x's shape and any strides; x itself for in place
    stream     CUDA: where to run; None is PyTorch's current stream (CuPy's for its arrays). A handle, or a stream object

    Asynchronous on CUDA, and done on return on the host. Sums are formed in float32 (float64 for float64). -inf is a
    masked logit and gives 0, a row of nothing else gives 0 everywhere; NaN or +inf gives a row of NaN.

    ValueError says what is wrong, before anything runs. There is no gradient: tensors that require it are refused
    while grad mode is on.
    """
    if _compiled(x):
        from . import _torch_ops

        return _torch_ops.rows(0, x, dim, transform, dtype, out, stream)
    if transform is not None:
        _checked_transform(transform)
    return _call(_ROWS, "softmax", x, False, dim, transform, dtype, out, stream, 0)


def log_softmax(
    x: Array, dim: int = -1, transform: Transform | None = None, *, dtype=None, out: Array | None = None, stream=None
) -> Array:
    """Logarithm of softmax(), -inf for a masked logit; everything else as there."""
    if _compiled(x):
        from . import _torch_ops

        return _torch_ops.rows(1, x, dim, transform, dtype, out, stream)
    if transform is not None:
        _checked_transform(transform)
    return _call(_ROWS, "log_softmax", x, False, dim, transform, dtype, out, stream, 0)


def logsumexp(
    x: Array, dim: int = -1, transform: Transform | None = None, *, dtype=None, out: Array | None = None, stream=None
) -> Array:
    """Logarithm of the sum of the exponentials of the transformed x along `dim`, of x's shape without `dim`. A row of
    nothing but -inf gives -inf; everything else as for softmax()."""
    if _compiled(x):
        from . import _torch_ops

        return _torch_ops.rows(2, x, dim, transform, dtype, out, stream)
    if transform is not None:
        _checked_transform(transform)
    return _call(_ROWS, "logsumexp", x, True, dim, transform, dtype, out, stream, 0)


class PackedWeight:
    """The weights of a head (N x K), brought into the form in which they are multiplied, once for many calls.

    Allocates, and waits for the device; the array is not looked at again. Worth it for float32 on a GPU of compute
    capability 9.0. The results have the same bits as with the array itself. Usable on any stream and thread.
    """

    def __init__(self, weight: Array, *, stream=None):
        c = library()
        family = _arrays.family_of(weight, "weight")
        described = family.describe(weight, "weight")
        _, scalar, memory, device, shape, _, _ = described
        if memory == _c.HOST:
            handle = 0
        else:
            handle = family.stream(device) if stream is None else _arrays.stream_handle(stream, device)
        packed = _c.ctypes.c_void_p()
        frame = take()
        try:
            frame.set_execution(memory, device, handle)
            at = _set(frame, 0, "weight", described, memory, device)
            status = c.pack(frame.execution, at, _c.ctypes.addressof(packed))
        finally:
            give_back(frame)
        if status:
            c.fail(status)
        self.shape: tuple[int, int] = tuple(shape)
        self.dtype: str = _c.SCALAR_NAMES[scalar]
        self._handle = packed.value
        self._place = (memory, device)
        self._token = id(self)
        _packed[self._token] = self
        weakref.finalize(self, c.packed_free, self._handle)

    def __repr__(self) -> str:
        return f"PackedWeight(shape={self.shape}, dtype={self.dtype})"


_packed: weakref.WeakValueDictionary[int, PackedWeight] = weakref.WeakValueDictionary()


def linear_softmax(
    x: Array,
    weight: Array | PackedWeight,
    transform: Transform | None = None,
    *,
    tf32: bool = False,
    dtype=None,
    out: Array | None = None,
    stream=None,
) -> Array:
    """Softmax of each row of the transformed x weight^T: the classification head of a model as one call.

    x          M x K
    weight     N x K, as torch.nn.Linear keeps it, or a PackedWeight; any strides, so a transposed matrix is fine
    transform  kokkossoftmax.bias(b) | kokkossoftmax.gelu(), or with batch_norm() or batch_norm_training()
    tf32       round float32 operands to TF32 where the GPU has it

    The rest as for softmax().
    """
    if _compiled(x):
        from . import _torch_ops

        return _torch_ops.linear(0, x, weight, transform, tf32, dtype, out, stream)
    if transform is not None:
        _checked_transform(transform)
    if type(weight) is PackedWeight:
        return _call(_PACKED, "linear_softmax_packed", x, weight, 0, transform, dtype, out, stream, bool(tf32))
    return _call(_LINEAR, "linear_softmax", x, weight, 0, transform, dtype, out, stream, bool(tf32))


def linear_log_softmax(
    x: Array,
    weight: Array | PackedWeight,
    transform: Transform | None = None,
    *,
    tf32: bool = False,
    dtype=None,
    out: Array | None = None,
    stream=None,
) -> Array:
    """Logarithm of linear_softmax(); everything else as there."""
    if _compiled(x):
        from . import _torch_ops

        return _torch_ops.linear(1, x, weight, transform, tf32, dtype, out, stream)
    if transform is not None:
        _checked_transform(transform)
    if type(weight) is PackedWeight:
        return _call(_PACKED, "linear_log_softmax_packed", x, weight, 0, transform, dtype, out, stream, bool(tf32))
    return _call(_LINEAR, "linear_log_softmax", x, weight, 0, transform, dtype, out, stream, bool(tf32))


def reserve(call: Callable, x: Array, *arguments: Any, **keywords: Any) -> None:
    """Makes what a call needs the first time, without running it: reserve(kokkossoftmax.softmax, x, dim=1).

    Scratch memory, the first launch of kernels, what a capture in a CUDA graph needs. Afterwards such a call, or a
    smaller one, on this stream and thread allocates nothing but its result. May wait for the device."""

    def rows(x, dim=-1, transform=None, *, dtype=None, out=None, stream=None):
        _checked_transform(transform)
        _call(_ROWS, "reserve", x, call is logsumexp, dim, transform, dtype, out, stream, 0)

    def linear(x, weight, transform=None, *, tf32=False, dtype=None, out=None, stream=None):
        _checked_transform(transform)
        kind, name = (_PACKED, "reserve_linear_packed") if type(weight) is PackedWeight else (_LINEAR, "reserve_linear")
        _call(kind, name, x, weight, 0, transform, dtype, out, stream, bool(tf32))

    if call in (softmax, log_softmax, logsumexp):
        rows(x, *arguments, **keywords)
    elif call in (linear_softmax, linear_log_softmax):
        linear(x, *arguments, **keywords)
    else:
        raise ValueError(f"kokkossoftmax: reserve takes one of kokkossoftmax's functions, not {call!r}")


def version() -> str:
    """The version of the library that runs."""
    return library().version_string().decode()


def has_backend(name: str) -> bool:
    """Whether the library was built for "cpu" or "cuda"; no matter whether the machine has such a device."""
    known = {"cpu": _c.HOST, "cuda": _c.CUDA}
    if name not in known:
        raise ValueError(f"kokkossoftmax: there is no backend '{name}'; known are cpu and cuda")
    return bool(library().has_backend(known[name]))


def has_linear() -> bool:
    """Whether the library was built with the heads."""
    return bool(library().has_linear())


def last_implementation() -> str:
    """The name of the implementation that ran last on this thread; empty before the first."""
    return library().last_implementation().decode()


def forget_stream(stream, device: int) -> None:
    """Lets go of what is kept for a CUDA stream; to be called before a stream of one's own is destroyed."""
    frame = take()
    try:
        frame.set_execution(_c.CUDA, device, _arrays.stream_handle(stream, device))
        status = library().forget_stream(frame.execution)
    finally:
        give_back(frame)
    if status:
        library().fail(status)
