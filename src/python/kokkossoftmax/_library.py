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
import threading

FLOAT, DOUBLE, HALF, BFLOAT16, BOOL = 1, 2, 3, 4, 5
SCALAR_NAMES = {FLOAT: "float32", DOUBLE: "float64", HALF: "float16", BFLOAT16: "bfloat16", BOOL: "bool"}
SCALAR_BYTES = {FLOAT: 4, DOUBLE: 8, HALF: 2, BFLOAT16: 2, BOOL: 1}
HOST, CUDA = 1, 2
SCALE, TEMPERATURE, MASK, CAUSAL, BIAS, GELU_ERF, GELU_TANH, RELU, BATCH_NORM, BATCH_NORM_TRAINING, SCALE_BY = range(1, 12)
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
_SLOT = _ARRAYS[MAX_RANK].size
_SLOTS = 3 + MAX_TRANSFORMS * MAX_OPERANDS
_TRANSFORMS_AT = _EXECUTION.size
_ARRAYS_AT = _TRANSFORMS_AT + MAX_TRANSFORMS * _TRANSFORM.size
_DATA_AT = [(_ARRAYS_AT + slot * _SLOT) // 8 + 1 for slot in range(_SLOTS)]


def check_place(name, place, of_x):
    """Places are (memory, device)."""
    if place != of_x:
        where, where_x = ("the host" if memory == HOST else f"cuda:{device}" for memory, device in (place, of_x))
        raise ValueError(f"kokkossoftmax: {name} is on {where}, x on {where_x}")


class Frame:
    """The memory of one call's structs.

    A frame knows what its structs say, and writes what is new: in a loop, the addresses of the data. `warm` is the
    caller's: None once anything but these addresses and the place was written. What is handed over is made once, as
    ctypes' objects, which a call takes several times as fast as integers."""

    __slots__ = ("buffer", "words", "base", "execution", "transforms", "arrays")
    __slots__ += ("known", "known_execution", "known_transforms", "warm")

    def __init__(self):
        self.buffer = (ctypes.c_uint64 * ((_ARRAYS_AT + _SLOTS * _SLOT) // 8))()
        self.words = memoryview(self.buffer).cast("B").cast("Q")
        self.base = ctypes.addressof(self.buffer)
        self.execution = ctypes.c_void_p(self.base)
        self.transforms = ctypes.c_void_p(self.base + _TRANSFORMS_AT)
        self.arrays = [ctypes.c_void_p(self.base + _ARRAYS_AT + slot * _SLOT) for slot in range(_SLOTS)]
        self.known = [None] * _SLOTS
        self.known_execution = None
        self.known_transforms = [None] * MAX_TRANSFORMS
        self.warm = None

    def set_execution(self, *place):
        """(memory, device, stream), before the arrays; a backend has the number of its memory."""
        if self.known_execution != place:
            if self.known_execution is None or self.known_execution[:2] != place[:2]:
                self.known = [None] * _SLOTS  # that their arrays are there is not known any more
            _EXECUTION.pack_into(self.buffer, 0, _EXECUTION.size, *place)
            self.known_execution = place

    def set_array(self, slot, name, data, form):
        """Describes an array of a form, (scalar, memory, device, shape, strides), in self.arrays[slot]."""
        if self.known[slot] == form:
            self.words[_DATA_AT[slot]] = data
            return
        self.known[slot] = self.warm = None
        scalar, memory, device, shape, strides = form
        check_place(name, (memory, device), self.known_execution[:2])
        rank = len(shape)
        if rank > MAX_RANK:
            raise ValueError(f"kokkossoftmax: {name} has rank {rank}; at most {MAX_RANK} is possible")
        numbers = self.arrays[slot].value + _ARRAY_SIZE
        _ARRAYS[rank].pack_into(
            self.buffer, _ARRAYS_AT + slot * _SLOT, _ARRAY_SIZE, data, scalar, memory, rank, 0,
            numbers, numbers + 8 * rank, *shape, *strides,
        )  # fmt: skip
        self.known[slot] = form

    def set_transform(self, index, *members):
        """kind, flags, number, momentum, offset, and the addresses of four operands."""
        if self.known_transforms[index] != members:
            at = _TRANSFORMS_AT + index * _TRANSFORM.size
            self.known_transforms[index] = self.warm = None
            _TRANSFORM.pack_into(self.buffer, at, _TRANSFORM.size, *members)
            self.known_transforms[index] = members


class Thread(threading.local):
    """What a thread keeps: frames that no call uses (a finaliser that calls within a call takes another one), and the kinds
    of calls for which it reserved."""

    def __init__(self):
        self.frames: list[Frame] = []
        self.warm: set = set()

    def take(self) -> Frame:
        return self.frames.pop() if self.frames else Frame()

    def is_cold(self, frame: Frame):
        """A graph keeps the memory that was reserved."""
        self.warm.clear()
        frame.warm = None
        for other in self.frames:
            other.warm = None


thread = Thread()
