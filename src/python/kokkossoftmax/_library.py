# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The C library (KokkosSoftmax.h): where it is, its constants, its functions, and structs packed for calls.

A call fills its structs in one buffer by struct.pack_into, which is several times as fast as ctypes.Structure, and
hands over addresses inside that buffer.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import struct
import sys

FLOAT, DOUBLE, HALF, BFLOAT16, BOOL = 1, 2, 3, 4, 5
SCALAR_NAMES = {FLOAT: "float32", DOUBLE: "float64", HALF: "float16", BFLOAT16: "bfloat16", BOOL: "bool"}
SCALAR_BYTES = {FLOAT: 4, DOUBLE: 8, HALF: 2, BFLOAT16: 2, BOOL: 1}
HOST, CUDA = 1, 2
IEEE, TF32 = 0, 1
SCALE, TEMPERATURE, MASK, CAUSAL, BIAS, GELU_ERF, GELU_TANH, RELU, BATCH_NORM, BATCH_NORM_TRAINING = range(1, 11)
CHECKED = 1
MAX_RANK, MAX_TRANSFORMS, MAX_OPERANDS = 8, 8, 4
OUT_OF_MEMORY = 3


class Library:
    """The loaded library: functions by the C names without their prefix."""

    def __init__(self):
        self.path = self._find()
        self.handle = handle = ctypes.CDLL(self.path)
        address, count, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32
        rows = [address, address, address, integer, address, count]
        linear = [address, address, address, address, address, count, integer]
        for name, arguments, result in (
            ("version_string", [], ctypes.c_char_p),
            ("is_initialized", [], ctypes.c_int),
            ("has_backend", [integer], ctypes.c_int),
            ("has_linear", [], ctypes.c_int),
            ("last_error", [], ctypes.c_char_p),
            ("last_implementation", [], ctypes.c_char_p),
            ("initialize", [address], ctypes.c_int),
            ("finalize", [], ctypes.c_int),
            ("forget_stream", [address], ctypes.c_int),
            ("synchronize", [address], ctypes.c_int),
            ("softmax", rows, ctypes.c_int),
            ("log_softmax", rows, ctypes.c_int),
            ("logsumexp", rows, ctypes.c_int),
            ("reserve", rows, ctypes.c_int),
            ("linear_softmax", linear, ctypes.c_int),
            ("linear_log_softmax", linear, ctypes.c_int),
            ("reserve_linear", linear, ctypes.c_int),
            ("linear_softmax_packed", linear, ctypes.c_int),
            ("linear_log_softmax_packed", linear, ctypes.c_int),
            ("reserve_linear_packed", linear, ctypes.c_int),
            ("pack", [address, address, address], ctypes.c_int),
            ("packed_free", [address], None),
        ):
            function = getattr(handle, "kokkossoftmax_" + name)
            function.argtypes, function.restype = arguments, result
            setattr(self, name, function)
        # Before the interpreter and CUDA's runtime come down; a Kokkos that another initialised is left to that one.
        atexit.register(self.finalize)

    @staticmethod
    def _find():
        """KOKKOSSOFTMAX_LIBRARY, else the one in this package, else the system's."""
        named = os.environ.get("KOKKOSSOFTMAX_LIBRARY")
        if named:
            return named
        base = "libkokkossoftmax_c" + (".dylib" if sys.platform == "darwin" else ".so")
        here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib", base)
        return here if os.path.exists(here) else base

    def fail(self, status):
        """Raises what a status other than 0 means, in the library's words."""
        message = self.last_error().decode("utf-8", "replace").replace("kokkossoftmax_", "kokkossoftmax.")
        if status == OUT_OF_MEMORY:
            raise MemoryError(message)
        raise ValueError(message)


_library = None


def library() -> Library:
    global _library
    if _library is None:
        _library = Library()
    return _library


# The structs of the header, without padding on any 64-bit platform.
_EXECUTION = struct.Struct("@NiiP")
_TRANSFORM = struct.Struct("@Niiddq4P")
_ARRAYS = [struct.Struct(f"@NPiiiiPP{2 * rank}q") for rank in range(MAX_RANK + 1)]
_ARRAY_SIZE = _ARRAYS[0].size
_ADDRESS, _ADDRESS_AT = struct.Struct("@P"), struct.calcsize("@N")
_SLOT = _ARRAYS[MAX_RANK].size
_SLOTS = 3 + MAX_TRANSFORMS * MAX_OPERANDS


class Frame:
    """The memory of one call's structs. One at a time uses a frame: take() and give_back().

    A frame knows what its structs say, and writes what is new: in a loop, the addresses of the data."""

    __slots__ = ("buffer", "base", "execution", "transforms", "transforms_at", "arrays_at")
    __slots__ += ("known", "known_execution", "known_transforms")

    def __init__(self):
        self.transforms_at = _EXECUTION.size
        self.arrays_at = self.transforms_at + MAX_TRANSFORMS * _TRANSFORM.size
        self.buffer = ctypes.create_string_buffer(self.arrays_at + _SLOTS * _SLOT)
        self.base = ctypes.addressof(self.buffer)
        self.execution = self.base
        self.transforms = self.base + self.transforms_at
        self.known = [(None, None, 0, 0)] * _SLOTS
        self.known_execution = None
        self.known_transforms = [None] * MAX_TRANSFORMS

    def set_execution(self, *place):
        """(memory, device, stream); a backend has the number of its memory."""
        if self.known_execution != place:
            _EXECUTION.pack_into(self.buffer, 0, _EXECUTION.size, *place)
            self.known_execution = place

    def set_array(self, slot, data, scalar, memory, shape, strides):
        """Describes an array; the address of its descriptor."""
        at = self.arrays_at + slot * _SLOT
        known = self.known[slot]
        if known[0] == shape and known[1] == strides and known[2] == scalar and known[3] == memory:
            _ADDRESS.pack_into(self.buffer, at + _ADDRESS_AT, data)
            return self.base + at
        self.known[slot] = (None, None, 0, 0)
        rank = len(shape)
        address = self.base + at
        numbers = address + _ARRAY_SIZE
        _ARRAYS[rank].pack_into(
            self.buffer, at, _ARRAY_SIZE, data, scalar, memory, rank, 0, numbers, numbers + 8 * rank, *shape, *strides
        )
        self.known[slot] = (shape, strides, scalar, memory)
        return address

    def set_transform(self, index, *members):
        """kind, flags, number, momentum, offset, and the addresses of four operands."""
        if self.known_transforms[index] != members:
            at = self.transforms_at + index * _TRANSFORM.size
            self.known_transforms[index] = None
            _TRANSFORM.pack_into(self.buffer, at, _TRANSFORM.size, *members)
            self.known_transforms[index] = members


_frames: list[Frame] = []


def take() -> Frame:
    """A frame of nobody else's: calls of several threads, and of a finaliser within a call, each have their own."""
    try:
        return _frames.pop()
    except IndexError:
        return Frame()


give_back = _frames.append
