# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""softmax, log_softmax, logsumexp and the heads: from Python's arguments to the C library's."""

from __future__ import annotations

import sys
import weakref
from typing import Any, Callable

from . import _arrays
from . import _library as _c
from ._library import library, thread
from ._transforms import Array, Transform

_families = _arrays._families
_HOST, _CUDA = _c.HOST, _c.CUDA
_AXES = {axis: _c.ctypes.c_int32(axis) for axis in range(-_c.MAX_RANK, _c.MAX_RANK)}
_COUNTS = [_c.ctypes.c_size_t(count) for count in range(_c.MAX_TRANSFORMS + 1)]
_ROWS, _LINEAR, _PACKED = "rows", "linear", "packed"


_modules = sys.modules


def _compiled(array) -> bool:
    """Whether torch.compile looks at this call, or a tensor without memory is asked about (torch.export, meta)."""
    torch = _modules.get("torch")
    if torch is None:
        return False
    if torch.compiler.is_compiling():
        return True
    return type(array) is not torch.Tensor and isinstance(array, torch.Tensor) and _is_fake(torch, array)


def _is_fake(torch, array):
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(array, module.FakeTensor)


_RESERVES = {_ROWS: "reserve", _LINEAR: "reserve_linear", _PACKED: "reserve_linear_packed"}


def _warm_up(c, kind, key, transform, frame, arguments):
    """Reserves after the first call of its kind, and after the first one since a capture, so that PyTorch's habit of calling
    once before a capture is enough, though the capture is on another stream."""
    steps = () if transform is None else tuple([stage[0] for stage in transform.stages])
    warm = thread.warm
    call = (key, steps, frame.known[0], frame.known[1][0], frame.known[1][3])
    if call not in warm:
        if len(warm) > 1000:
            warm.clear()
        status = getattr(c, _RESERVES[kind])(*arguments)
        if status:
            return status
        warm.add(call)
    frame.warm = key
    return 0


_OPERAND_NAMES = {
    _c.TEMPERATURE: ("temperature",),
    _c.MASK: ("mask",),
    _c.BIAS: ("bias",),
    _c.SCALE_BY: ("scale",),
    _c.BATCH_NORM: ("mean", "variance", "gamma", "beta"),
    _c.BATCH_NORM_TRAINING: ("gamma", "beta", "running_mean", "running_var"),
}


def _set_transforms(frame, transform, keep):
    """Fills the frame's transforms: their number, and what the call writes, each with its family."""
    if not isinstance(transform, Transform):
        raise ValueError(f"kokkossoftmax: the transform is a {type(transform).__name__}, not one of kokkossoftmax's")
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
            data, form, alive = family.describe(operand, name, is_written)
            keep.append(alive)
            frame.set_array(slot, name, data, form)
            addresses[place] = frame.arrays[slot].value
            slot += 1
            if is_written:
                written = written or []
                written.append((family, operand))
        frame.set_transform(index, kind, flags, number, momentum, offset, *addresses)
        index += 1
    return len(stages), written


def _call(kind, function, x, w, axis, transform, dtype, out, stream, tf32):
    """The one way into the library. `w` is the weights of a head; of rows, whether the axis is dropped. `function` is a
    name of the C library."""
    c = _c._library or library()
    family = _families.get(type(x)) or _arrays.family_of(x, "x")
    x_data, x_form, x_alive = family.describe(x, "x")
    scalar, memory, device, x_shape, _ = x_form
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
            rows = w.shape[0]
            _c.check_place("weight", w._place, (memory, device))
        else:
            w_data, w_form, w_alive = _arrays.family_of(w, "weight").describe(w, "weight")
            rows = w_form[3][0] if len(w_form[3]) == 2 else 0
        shape = (x_shape[0] if len(x_shape) == 2 else 0, rows)
    if out is None:
        of_given = None
        if dtype is not None:
            scalar = _arrays.scalar_of_dtype(dtype)
        out, (out_data, out_form, out_alive) = family.make(x, x_form, scalar, shape)
    else:
        of_given = _families.get(type(out)) or _arrays.family_of(out, "out")
        out_data, out_form, out_alive = of_given.describe(out, "out", True)
        if dtype is not None and _arrays.scalar_of_dtype(dtype) != out_form[0]:
            raise ValueError(f"kokkossoftmax: out is of {_c.SCALAR_NAMES[out_form[0]]}, dtype says {dtype}")
    if memory == _HOST:
        handle = 0
    elif stream is None:
        handle = family.stream(device)
    else:
        handle = _arrays.stream_handle(stream, device)
    count, written, keep = 0, None, []
    frames = thread.frames
    frame = frames.pop() if frames else _c.Frame()
    try:
        frame.set_execution(memory, device, handle)
        frame.set_array(0, "x", x_data, x_form)
        frame.set_array(1, "out", out_data, out_form)
        if transform is not None:
            count, written = _set_transforms(frame, transform, keep)
        arrays = frame.arrays
        if kind is _ROWS:
            arguments = (frame.execution, arrays[0], arrays[1], _AXES.get(axis) or axis, frame.transforms, _COUNTS[count])
        else:
            if kind is _LINEAR:
                frame.set_array(2, "weight", w_data, w_form)
            weight = w._handle if kind is _PACKED else arrays[2]
            arguments = (frame.execution, arrays[0], weight, arrays[1], frame.transforms, count, tf32)
        status = getattr(c, function)(*arguments)
        if memory == _CUDA and status == 0:
            if family.is_capturing():
                thread.is_cold(frame)
            else:
                key = (function, axis, tf32, count)
                if frame.warm != key:
                    status = _warm_up(c, kind, key, transform, frame, arguments)
    finally:
        frames.append(frame)
    if status:
        c.fail(status)
    if of_given is not None:
        of_given.written(out)
    if written is not None:
        for its_family, operand in written:
            its_family.written(operand)
    return out


def softmax(
    x: Array, dim: int = -1, transform: Transform | None = None, *, dtype=None, out: Array | None = None, stream=None
) -> Array:
    """Softmax of the transformed x along `dim`.

    x          logits, of rank 1 to 8 and any strides: a PyTorch tensor, a NumPy, CuPy or JAX array, or anything else
               with __dlpack__; float32, float64, float16 or bfloat16. Nothing is copied
    dim        the dimension to normalise over; negative counts from the end
    transform  what happens to the logits before: kokkossoftmax.scale(0.5) | kokkossoftmax.causal()
    dtype      of the result: x's own, or float32 for 16-bit x
    out        where the result goes, of x's shape and any strides; x itself for in place. None makes one of x's library;
               NumPy's for JAX's arrays on the host, which cannot be written
    stream     CUDA: where to run; None is PyTorch's current stream (CuPy's for its arrays). A handle, or a stream object

    Asynchronous on CUDA, and done on return on the host. Sums are formed in float32 (float64 for float64). -inf is a
    masked logit and gives 0, a row of nothing else gives 0 everywhere; NaN or +inf gives a row of NaN.

    ValueError says what is wrong, before anything runs. There is no gradient: tensors that require it are refused
    while grad mode is on.
    """
    if _compiled(x):
        from . import _torch_ops

        return _torch_ops.rows(0, x, dim, transform, dtype, out, stream)
    return _call(_ROWS, "softmax", x, False, dim, transform, dtype, out, stream, 0)


def log_softmax(
    x: Array, dim: int = -1, transform: Transform | None = None, *, dtype=None, out: Array | None = None, stream=None
) -> Array:
    """Logarithm of softmax(), -inf for a masked logit; everything else as there."""
    if _compiled(x):
        from . import _torch_ops

        return _torch_ops.rows(1, x, dim, transform, dtype, out, stream)
    return _call(_ROWS, "log_softmax", x, False, dim, transform, dtype, out, stream, 0)


def logsumexp(
    x: Array, dim: int = -1, transform: Transform | None = None, *, dtype=None, out: Array | None = None, stream=None
) -> Array:
    """Logarithm of the sum of the exponentials of the transformed x along `dim`, of x's shape without `dim`. A row of
    nothing but -inf gives -inf; everything else as for softmax()."""
    if _compiled(x):
        from . import _torch_ops

        return _torch_ops.rows(2, x, dim, transform, dtype, out, stream)
    return _call(_ROWS, "logsumexp", x, True, dim, transform, dtype, out, stream, 0)


class PackedWeight:
    """The weights of a head (N x K), brought into the form in which they are multiplied, once for many calls.

    Allocates, and waits for the device; the array is not looked at again. Worth it for float32 on a GPU of compute
    capability 9.0. Usable on any stream and thread. Where the array itself is multiplied on the tensor cores too, the results
    have the same bits as with it.
    """

    def __init__(self, weight: Array, *, stream=None):
        c = library()
        family = _arrays.family_of(weight, "weight")
        data, form, alive = family.describe(weight, "weight")
        scalar, memory, device, shape, _ = form
        if memory == _HOST:
            handle = 0
        else:
            handle = family.stream(device) if stream is None else _arrays.stream_handle(stream, device)
        packed = _c.ctypes.c_void_p()
        frame = thread.take()
        try:
            frame.set_execution(memory, device, handle)
            frame.set_array(0, "weight", data, form)
            status = c.pack(frame.execution, frame.arrays[0], _c.ctypes.addressof(packed))
        finally:
            thread.frames.append(frame)
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
    if type(weight) is PackedWeight:
        return _call(_PACKED, "linear_log_softmax_packed", x, weight, 0, transform, dtype, out, stream, bool(tf32))
    return _call(_LINEAR, "linear_log_softmax", x, weight, 0, transform, dtype, out, stream, bool(tf32))


def reserve(call: Callable, x: Array, *arguments: Any, **keywords: Any) -> None:
    """Makes what a call needs the first time, without running it: reserve(kokkossoftmax.softmax, x, dim=1).

    Scratch memory, the first launch of kernels, what a capture in a CUDA graph needs. Afterwards such a call, or a
    smaller one, on this stream and thread allocates nothing but its result. May wait for the device."""

    def rows(x, dim=-1, transform=None, *, dtype=None, out=None, stream=None):
        _call(_ROWS, "reserve", x, call is logsumexp, dim, transform, dtype, out, stream, 0)

    def linear(x, weight, transform=None, *, tf32=False, dtype=None, out=None, stream=None):
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
    frame = thread.take()
    try:
        frame.set_execution(_CUDA, device, _arrays.stream_handle(stream, device))
        status = library().forget_stream(frame.execution)
    finally:
        thread.frames.append(frame)
    if status:
        library().fail(status)
