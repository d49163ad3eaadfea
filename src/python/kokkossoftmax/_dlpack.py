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


# DLTensor as words of 64 bits: data; device type, id; ndim, dtype (code, bits, lanes); shape; strides; byte_offset. A
# versioned one has its version (two numbers), the manager's context, a deleter and flags in front.
_WORDS = [ctypes.c_int64 * count for count in range(65)]
_VERSION_BYTES = 32


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


def address(capsule):
    """The address alone, of a fresh unversioned capsule without a byte offset, as NumPy's are."""
    return _void.from_address(_get_pointer(capsule, b"dltensor")).value or 0


_void = ctypes.c_void_p


def read(capsule):
    """(address, type code, bits, device type, device, shape, strides in elements, read-only) of a capsule's tensor."""
    read_only = False
    if _is_valid(capsule, b"dltensor_versioned"):
        at = _get_pointer(capsule, b"dltensor_versioned")
        version, _, _, flags = _WORDS[4].from_address(at)[:]
        if version & 0xFFFFFFFF > 1:
            raise ValueError(f"kokkossoftmax: DLPack of version {version & 0xFFFFFFFF} is not known")
        read_only = bool(flags & READ_ONLY)
        at += _VERSION_BYTES
    elif _is_valid(capsule, b"dltensor"):
        at = _get_pointer(capsule, b"dltensor")
    else:
        raise ValueError("kokkossoftmax: __dlpack__ did not return a fresh DLPack capsule")
    data, device, kind, shape_at, strides_at, offset = _WORDS[6].from_address(at)[:]
    rank, kind = kind & 0xFFFFFFFF, kind >> 32
    if kind >> 16 != 1:
        raise ValueError("kokkossoftmax: arrays of short vectors (DLPack lanes) are not taken")
    if rank == 0:
        shape = strides = ()
    else:
        shape = tuple(_WORDS[rank].from_address(shape_at))
        strides = tuple(_WORDS[rank].from_address(strides_at)) if strides_at else contiguous(shape)
    return data + offset, kind & 0xFF, kind >> 8 & 0xFF, device & 0xFFFFFFFF, device >> 32, shape, strides, read_only


def contiguous(shape):
    """Strides in elements of a row-major array."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(1, extent)
    return tuple(reversed(strides))
