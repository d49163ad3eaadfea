# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From somebody else's arrays to (address, scalar, memory, device, shape, strides in elements).

A family knows one library's arrays: how to describe them, to make new ones, and which CUDA stream they are used on.
No library is imported that the program has not imported itself.
"""

from __future__ import annotations

import sys

from . import _dlpack
from . import _library as _c

_HOST, _CUDA = _c.HOST, _c.CUDA


def _unknown_dtype(name, dtype):
    known = "float32, float64, float16, bfloat16, or bool for a mask"
    return ValueError(f"kokkossoftmax: {name} has dtype {dtype}; known are {known}")


def _read_only(name):
    return ValueError(f"kokkossoftmax: {name} is read-only and cannot be written")


class Family:
    """The arrays of one library."""

    def describe(self, array, name, written=False):
        """The address, the form (scalar, memory, device, shape, strides), and what must live while the address is used."""
        raise NotImplementedError

    def make(self, like, form, scalar, shape):
        """A new array, described: of x's shape (shape None) or of another, on x's device; `form` is x's."""
        out = self.empty(like, form, scalar, form[3] if shape is None else shape)
        return out, family_of(out, "out").describe(out, "out", True)

    def empty(self, like, form, scalar, shape):
        raise NotImplementedError

    def stream(self, device):
        """The handle of the CUDA stream that this library's work is on now."""
        return torch_stream(device)

    def is_capturing(self):
        """Whether the current stream is captured into a CUDA graph."""
        torch = sys.modules.get("torch")
        return torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    def written(self, array):
        """Called after an array of the user's was written."""


def torch_stream(device):
    """PyTorch's current stream where it uses the GPU, else CUDA's default stream."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return torch.cuda.current_stream(device).cuda_stream
    return 0


class TorchFamily(Family):
    def __init__(self, torch):
        self.torch = torch
        self.scalars = {
            torch.float32: _c.FLOAT,
            torch.float64: _c.DOUBLE,
            torch.float16: _c.HALF,
            torch.bfloat16: _c.BFLOAT16,
            torch.bool: _c.BOOL,
        }
        self.dtypes = {scalar: dtype for dtype, scalar in self.scalars.items()}
        self.is_grad_enabled = torch.is_grad_enabled
        self.empty_like = torch.empty_like
        self.stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or torch_stream
        self.is_capturing = torch.cuda.is_current_stream_capturing
        raw_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
        if raw_capturing is not None:
            self.is_capturing = raw_capturing
        try:
            self.increment_version = torch._C._increment_version
            self.increment_version((torch.empty(0),))
        except (AttributeError, TypeError):
            self.increment_version = lambda arrays: torch.autograd.graph.increment_version(arrays[0])

    def describe(self, array, name, written=False):
        if array.requires_grad and self.is_grad_enabled():
            raise ValueError(
                f"kokkossoftmax: {name} requires grad, and kokkossoftmax has no gradient; call it under torch.no_grad() "
                "or with detached tensors"
            )
        scalar = self.scalars.get(array.dtype)
        if scalar is None:
            raise _unknown_dtype(name, array.dtype)
        try:
            if array.is_neg():
                raise RuntimeError("its negation is pending")
            device = array.get_device()
            if device >= 0:
                if array.is_cuda:
                    return array.data_ptr(), (scalar, _CUDA, device, array.shape, array.stride()), array
            elif array.is_cpu:
                return array.data_ptr(), (scalar, _HOST, -1, array.shape, array.stride()), array
        except RuntimeError as error:  # sparse ones, those of torch.func, ...
            raise ValueError(f"kokkossoftmax: {name} is not an ordinary strided tensor: {error}") from error
        raise ValueError(f"kokkossoftmax: {name} is on device {array.device}; known are cpu and cuda")

    def make(self, like, form, scalar, shape):
        dtype = self.dtypes[scalar]
        if shape is None:
            shape = form[3]
            out = self.empty_like(like) if scalar == form[0] else self.empty_like(like, dtype=dtype)
        else:
            out = self.torch.empty(shape, dtype=dtype, device=like.device)
        return out, (out.data_ptr(), (scalar, form[1], form[2], shape, out.stride()), out)

    def written(self, array):
        try:
            self.increment_version((array,))
        except RuntimeError:  # of inference mode, which has no version
            pass


class NumpyFamily(Family):
    def __init__(self, numpy):
        self.library, self.name = numpy, "NumPy"
        self.strides = {}  # from bytes to elements
        self.scalars = {}
        for name, scalar in (("float32", _c.FLOAT), ("float64", _c.DOUBLE), ("float16", _c.HALF), ("bool", _c.BOOL)):
            self.scalars[numpy.dtype(name)] = scalar
        self.dtypes = {scalar: dtype for dtype, scalar in self.scalars.items()}

    def scalar_of(self, dtype, name):
        # bfloat16 is no dtype of NumPy's own, but one that ml_dtypes registers.
        if dtype.name == "bfloat16" and dtype.itemsize == 2 and dtype.isnative:
            self.scalars[dtype] = _c.BFLOAT16
            self.dtypes[_c.BFLOAT16] = dtype
            return _c.BFLOAT16
        raise _unknown_dtype(name, dtype if dtype.isnative else f"{dtype} in foreign byte order")

    def describe(self, array, name, written=False):
        scalar = self.scalars.get(array.dtype)
        if scalar is None:
            scalar = self.scalar_of(array.dtype, name)
        if written and not array.flags.writeable:
            raise _read_only(name)
        try:
            address = _dlpack.address(array.__dlpack__())
        except (AttributeError, BufferError):  # read-only, bfloat16, a NumPy from before DLPack: several times as slow
            address = array.__array_interface__["data"][0]
        return address, (scalar, _HOST, -1, array.shape, self.strides_of(array, scalar, name)), array

    def strides_of(self, array, scalar, name):
        strides = array.strides
        found = self.strides.get((strides, scalar))
        if found is None:
            size = _c.SCALAR_BYTES[scalar]
            for stride in strides:
                if stride % size:
                    raise ValueError(f"kokkossoftmax: {name} has strides of {strides} bytes, no multiples of {size}")
            found = tuple(stride // size for stride in strides)
            if len(self.strides) < 1000:
                self.strides[strides, scalar] = found
        return found

    def empty(self, like, form, scalar, shape):
        dtype = self.dtypes.get(scalar)
        if dtype is None:
            raise ValueError(f"kokkossoftmax: {self.name} has no {_c.SCALAR_NAMES[scalar]} of its own; pass out=")
        return self.library.empty(shape, dtype)


class CupyFamily(NumpyFamily):
    """CuPy's arrays have NumPy's dtypes and strides. (Through DLPack, CuPy 14 tells strides below 0 wrongly.)"""

    def __init__(self, cupy):
        super().__init__(sys.modules["numpy"])
        self.library, self.name = cupy, "CuPy"

    def describe(self, array, name, written=False):
        scalar = self.scalars.get(array.dtype)
        if scalar is None:
            scalar = self.scalar_of(array.dtype, name)
        data = array.data
        return data.ptr, (scalar, _CUDA, data.device_id, array.shape, self.strides_of(array, scalar, name)), array

    def stream(self, device):
        return self.library.cuda.get_current_stream().ptr

    def is_capturing(self):
        return self.library.cuda.get_current_stream().is_capturing()


_DLPACK_SCALARS = {
    (_dlpack.FLOAT, 32): _c.FLOAT,
    (_dlpack.FLOAT, 64): _c.DOUBLE,
    (_dlpack.FLOAT, 16): _c.HALF,
    (_dlpack.BFLOAT, 16): _c.BFLOAT16,
    (_dlpack.BOOL, 8): _c.BOOL,
}
_DLPACK_MEMORY = {
    _dlpack.CPU: _HOST,
    _dlpack.CUDA: _CUDA,
    _dlpack.CUDA_HOST: _HOST,
    _dlpack.CUDA_MANAGED: _CUDA,
}


class DlpackFamily(Family):
    """Any other library's arrays, by the DLPack protocol."""

    def describe(self, array, name, written=False):
        device_type, device = array.__dlpack_device__()
        memory = _DLPACK_MEMORY.get(int(device_type))
        if memory is None:
            raise ValueError(f"kokkossoftmax: {name} is on a device of DLPack type {int(device_type)}; known are CPU and CUDA")
        stream = None
        if memory == _CUDA:
            stream = self.stream(device) or 1  # DLPack's number of CUDA's default stream
        capsule = _dlpack.capsule_of(array, stream)
        address, code, bits, _, device, shape, strides, read_only = _dlpack.read(capsule)
        scalar = _DLPACK_SCALARS.get((code, bits))
        if scalar is None:
            raise _unknown_dtype(name, f"(DLPack code {code}, {bits} bits)")
        if written and read_only:
            raise _read_only(name)
        return address, (scalar, memory, device if memory == _CUDA else -1, shape, strides), (array, capsule)

    def empty(self, like, form, scalar, shape):
        if form[1] == _HOST:
            numpy = sys.modules.get("numpy")
            if numpy is not None and scalar != _c.BFLOAT16:
                return numpy.empty(shape, _c.SCALAR_NAMES[scalar])
        torch = sys.modules.get("torch")
        if torch is not None:
            device = "cpu" if form[1] == _HOST else f"cuda:{form[2]}"
            return torch.empty(shape, dtype=family_of_type(torch.Tensor).dtypes[scalar], device=device)
        raise ValueError(f"kokkossoftmax: no library is known that makes the output for a {type(like).__name__}; pass out=")


class JaxFamily(DlpackFamily):
    """JAX's arrays are read alone, though their capsules do not say so; results on the host are NumPy's."""

    def __init__(self, jax):
        self.jax = jax

    def describe(self, array, name, written=False):
        if written:
            raise ValueError(f"kokkossoftmax: {name} is an array of JAX, which cannot be written; leave out= away")
        return super().describe(array, name)

    def empty(self, like, form, scalar, shape):
        if form[1] == _CUDA:
            return super().empty(like, form, scalar, shape)
        return sys.modules["numpy"].empty(shape, self.jax.numpy.dtype(_c.SCALAR_NAMES[scalar]))


_families: dict[type, Family] = {}
_by_module: dict[str, Family] = {}
_dlpack_family = DlpackFamily()


def family_of_type(kind) -> Family | None:
    """The family for a type of arrays; None for what is no array."""
    family = _families.get(kind)
    if family is not None:
        return family
    for module, name, make in (
        ("torch", "Tensor", TorchFamily),
        ("numpy", "ndarray", NumpyFamily),
        ("cupy", "ndarray", CupyFamily),
        ("jax", "Array", JaxFamily),
    ):
        imported = sys.modules.get(module)
        if imported is not None and issubclass(kind, getattr(imported, name, ())):
            family = _by_module.get(module)
            if family is None:
                family = _by_module[module] = make(imported)
            break
    else:
        if not hasattr(kind, "__dlpack__"):
            return None
        family = _dlpack_family
    _families[kind] = family
    return family


def family_of(array, name) -> Family:
    family = _families.get(type(array)) or family_of_type(type(array))
    if family is None:
        raise ValueError(f"kokkossoftmax: {name} is a {type(array).__name__} and no array (it has no __dlpack__)")
    return family


_scalar_names = {name: scalar for scalar, name in _c.SCALAR_NAMES.items()}
_scalar_names.update({"float": _c.FLOAT, "double": _c.DOUBLE, "half": _c.HALF})
_known_dtypes: dict = {}


def scalar_of_dtype(dtype) -> int:
    """From torch.float32, numpy.float32, numpy.dtype("float32") or "float32"."""
    try:
        return _known_dtypes[dtype]
    except (KeyError, TypeError):
        pass
    if isinstance(dtype, str):
        name = dtype
    elif isinstance(dtype, type):
        name = dtype.__name__
    else:
        name = getattr(dtype, "name", None) or str(dtype)  # NumPy's; torch.float32
    scalar = _scalar_names.get(name.removeprefix("torch."))
    if scalar is None or scalar == _c.BOOL or name == "float" and dtype is float:
        raise ValueError(f"kokkossoftmax: no output of dtype {dtype}; known are float32, float64, float16, bfloat16")
    _known_dtypes[dtype] = scalar
    return scalar


def stream_handle(stream, device) -> int:
    """The handle of a stream given as such, or as an object of PyTorch's, CuPy's or one with __cuda_stream__."""
    if isinstance(stream, int):
        return stream
    of_torch = getattr(stream, "cuda_stream", None)
    if of_torch is not None:
        if stream.device_index != device:
            raise ValueError(f"kokkossoftmax: the stream is one of cuda:{stream.device_index}, the arrays are on cuda:{device}")
        return of_torch
    of_cupy = getattr(stream, "ptr", None)
    if of_cupy is not None:
        return of_cupy
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return protocol()[1]
    raise ValueError(f"kokkossoftmax: a {type(stream).__name__} is no CUDA stream")
