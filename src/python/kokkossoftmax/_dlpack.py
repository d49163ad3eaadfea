# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reads DLPack capsules with ctypes; nothing is copied and no capsule is consumed.

A capsule that nobody consumes gives its tensor back when it dies, so it is enough to hold it while the pointer is used.
"""

from __future__ import annotations

import ctypes

CPU, CUDA, CUDA_HOST, ROCM, CUDA_MANAGED = 1, 2, 3, 10, 13
INT, UINT, FLOAT, BFLOAT, BOOL = 0, 1, 2, 4, 6
READ_ONLY = 1


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]


def capsule_of(array, stream: int | None):
    """The array's capsule. `stream` is where a device array will be used, in DLPack's numbers; None on the host."""
    keywords = {} if stream is None else {"stream": stream}
    try:
        return array.__dlpack__(max_version=(1, 0), **keywords)
    except TypeError:  # a producer from before versions
        return array.__dlpack__(**keywords)


def read(capsule):
    """(address, type code, bits, device type, device, shape, strides in elements, read-only) of a capsule's tensor."""
    read_only = False
    if _is_valid(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(_get_pointer(capsule, b"dltensor_versioned"))
        if managed.major > 1:
            raise ValueError(f"kokkossoftmax: DLPack of version {managed.major} is not known")
        read_only = bool(managed.flags & READ_ONLY)
        tensor = managed.tensor
    elif _is_valid(capsule, b"dltensor"):
        tensor = _Tensor.from_address(_get_pointer(capsule, b"dltensor"))
    else:
        raise ValueError("kokkossoftmax: __dlpack__ did not return a fresh DLPack capsule")
    if tensor.lanes != 1:
        raise ValueError("kokkossoftmax: arrays of short vectors (DLPack lanes) are not taken")
    rank = tensor.ndim
    shape = tuple(tensor.shape[:rank]) if rank else ()
    if rank and tensor.strides:
        strides = tuple(tensor.strides[:rank])
    else:
        strides = contiguous(shape)
    address = (tensor.data or 0) + tensor.byte_offset
    return address, tensor.code, tensor.bits, tensor.device_type, tensor.device_id, shape, strides, read_only


def contiguous(shape):
    """Strides in elements of a row-major array."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(1, extent)
    return tuple(reversed(strides))
