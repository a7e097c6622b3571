"""Python's values as those of ``tferry_value``, and back: numpy arrays without a copy, if their strides allow it."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from . import errors
from ._library import lib

__all__ = ["Array", "Message", "Writer", "array_of"]

NONE, BOOL, INTEGER, BIG_INTEGER, REAL, COMPLEX, TEXT, BYTES, BYTEARRAY = range(9)
TUPLE, LIST, DICT, SET, FROZENSET, ARRAY = range(9, 15)

#: One tferry_value: kind, flags, dtype, dimensions, a number, a pointer, a pointer.
_VALUE = struct.Struct("=BBBBIqQQ")
_REAL = struct.Struct("=BBBBIddQ")
_FLOATS = struct.Struct("=dd")
_FIELDS = struct.Struct("=qQ")

#: numpy's dtypes by the numbers of include/tensorferry/dtype.h, and the names and sizes of those that numpy lacks.
_NUMPY: dict[int, np.dtype[Any]] = {
    number: np.dtype(text)
    for number, text in {
        0: "u1", 1: "i1", 2: "i2", 3: "i4", 4: "i8", 5: "f2", 6: "f4", 7: "f8", 9: "c8", 10: "c16", 11: "?",
        27: "u2", 28: "u4", 29: "u8",
    }.items()
}  # fmt: skip
_NUMBERS = {dtype: number for number, dtype in _NUMPY.items()}
_OTHERS = {
    8: ("complex32", 4), 15: ("bfloat16", 2), 18: ("bits1x8", 1), 19: ("bits2x4", 1), 20: ("bits4x2", 1),
    21: ("bits8", 1), 22: ("bits16", 2), 23: ("float8_e5m2", 1), 24: ("float8_e4m3fn", 1),
    25: ("float8_e5m2fnuz", 1), 26: ("float8_e4m3fnuz", 1), 44: ("float8_e8m0fnu", 1),
    45: ("float4_e2m1fn_x2", 1), 46: ("bcomplex32", 4),
}  # fmt: skip
_OTHER_NUMBERS = {name: number for number, (name, _) in _OTHERS.items()}
_BITS: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4")}
#: DLPack's dtypes, as code and bits.
_DLPACK = {
    (0, 8): 1, (0, 16): 2, (0, 32): 3, (0, 64): 4, (1, 8): 0, (1, 16): 27, (1, 32): 28, (1, 64): 29, (2, 16): 5,
    (2, 32): 6, (2, 64): 7, (4, 16): 15, (5, 64): 9, (5, 128): 10, (6, 8): 11,
}  # fmt: skip
_SENDABLE = (
    "None, bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset, numpy arrays and "
)
_SENDABLE += "objects with __array_interface__ or __dlpack__"


class Array:
    """An array of a dtype that numpy lacks, such as bfloat16.

    Attributes:
        dtype: torch's name of the dtype: ``"bfloat16"``.
        bits: the elements as unsigned integers of the same size.
    """

    def __init__(self, dtype: str, bits: np.ndarray) -> None:
        if dtype not in _OTHER_NUMBERS:
            raise errors.InvalidArgument(f"there is no dtype {dtype!r} beside numpy's: {', '.join(_OTHER_NUMBERS)}")
        self.dtype = dtype
        self.bits = np.asarray(bits, _BITS[_OTHERS[_OTHER_NUMBERS[dtype]][1]])

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.bits.shape)

    def __repr__(self) -> str:
        return f"tensorferry_core.Array({self.dtype!r}, {self.bits!r})"


class _DlpackTensor(ctypes.Structure):
    """DLTensor: the beginning of DLManagedTensor, and what follows the header of DLManagedTensorVersioned."""

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


#: The size of DLManagedTensorVersioned's header: version, manager_ctx, deleter and flags.
_DLPACK_HEADER = 32

_name_of_capsule = ctypes.pythonapi.PyCapsule_GetName
_name_of_capsule.restype, _name_of_capsule.argtypes = ctypes.c_char_p, [ctypes.py_object]
_pointer_of_capsule = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of_capsule.restype, _pointer_of_capsule.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _address(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def _exported(value: Any) -> tuple[Any, _DlpackTensor]:
    """Returns the capsule that an object exports by DLPack, and the tensor in it. Asks for the versioned form first,
    because the other one cannot be of memory that is read-only."""
    try:
        try:
            capsule = value.__dlpack__(max_version=(1, 0))
        except TypeError:  # a producer from before DLPack 1.0
            capsule = value.__dlpack__()
    except BufferError as error:
        raise errors.InvalidArgument(f"a {type(value).__name__} exports no memory by DLPack: {error}") from error
    name = _name_of_capsule(capsule)
    header = {b"dltensor": 0, b"dltensor_versioned": _DLPACK_HEADER}.get(name or b"")
    if header is None:
        raise errors.InvalidArgument(f"a {type(value).__name__} exports a capsule {name!r}, which is not DLPack's")
    return capsule, _DlpackTensor.from_address((_pointer_of_capsule(capsule, name) or 0) + header)


def array_of(value: Any) -> np.ndarray:
    """Returns an object as a numpy array that can be sent: of the machine's byte order, with strides of whole
    elements. A copy, if it must be. Raises InvalidArgument for a dtype that cannot be sent."""
    array = np.asarray(value)
    dtype = array.dtype
    if dtype not in _NUMBERS:
        native = dtype.newbyteorder("=")
        if native not in _NUMBERS:
            raise errors.InvalidArgument(f"a numpy array of dtype {dtype} cannot be sent: only numbers and bool can")
        return np.ascontiguousarray(array, native).reshape(array.shape)
    if not array.flags.c_contiguous and any(step < 0 or step % dtype.itemsize for step in array.strides):
        return np.ascontiguousarray(array)
    return array


class Writer:
    """Writes values. Afterwards ``values`` has them, ``count`` tells how many, ``keep`` is what must live meanwhile,
    and ``has_arrays`` whether their memory must live until it is released."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.keep: list[Any] = []
        self.has_arrays = False

    @property
    def values(self) -> bytes:
        return b"".join(self._parts)

    @property
    def count(self) -> int:
        return len(self._parts)

    def write(self, value: Any, depth: int = 0) -> None:
        cls = type(value)
        if cls is np.ndarray:
            self._array(array_of(value))
        elif value is None:
            self._add(NONE)
        elif cls is bool:
            self._add(BOOL, value)
        elif cls is int:
            self._integer(value)
        elif cls is float:
            self._parts.append(_REAL.pack(REAL, 0, 0, 0, 0, value, 0.0, 0))
        elif cls is str:
            self._bytes(TEXT, value.encode("utf-8", "surrogatepass"))
        elif cls is bytes:
            self._bytes(BYTES, value)
        elif cls is tuple:
            self._inside(TUPLE, value, depth)
        elif cls is list:
            self._inside(LIST, value, depth)
        elif cls is dict:
            self._dict(value, depth)
        else:
            self._other(value, depth)

    def _other(self, value: Any, depth: int) -> None:
        """Writes a value of a less frequent type, or of a subclass of one, as that one."""
        if isinstance(value, complex):
            self._parts.append(_REAL.pack(COMPLEX, 0, 0, 0, 0, value.real, value.imag, 0))
        elif isinstance(value, (bytearray, memoryview)):
            self._bytes(BYTEARRAY if isinstance(value, bytearray) else BYTES, bytes(value))
        elif isinstance(value, (set, frozenset)):
            self._inside(SET if isinstance(value, set) else FROZENSET, value, depth)
        elif isinstance(value, Array):
            self._array(value.bits, _OTHER_NUMBERS[value.dtype])
        elif isinstance(value, np.generic):
            self.write(array_of(value).item(), depth)
        elif isinstance(value, dict):
            self._dict(value, depth)
        elif isinstance(value, (tuple, list)):
            self._inside(TUPLE if isinstance(value, tuple) else LIST, value, depth)
        elif isinstance(value, (int, float, str, bytes)):
            base: Any = next(base for base in (int, float, str, bytes) if isinstance(value, base))
            self.write(base(value), depth)
        elif hasattr(value, "__array_interface__"):
            self._array(array_of(value))
        elif hasattr(value, "__dlpack__"):
            self._dlpack(value)
        else:
            raise errors.InvalidArgument(f"a {type(value).__name__} cannot be sent without torch: only {_SENDABLE} can")

    def _add(self, kind: int, number: int = 0, pointer: int = 0, flags: int = 0) -> None:
        self._parts.append(_VALUE.pack(kind, flags, 0, 0, 0, number, pointer, 0))

    def _integer(self, value: int) -> None:
        if -(1 << 63) <= value < 1 << 63:
            return self._add(INTEGER, value)
        magnitude = abs(value)
        data = magnitude.to_bytes((magnitude.bit_length() + 7) // 8, "little")
        self._bytes(BIG_INTEGER, data, 1 if value < 0 else 0)

    def _bytes(self, kind: int, data: bytes, flags: int = 0) -> None:
        self.keep.append(data)
        self._add(kind, len(data), _address(data), flags)

    def _inside(self, kind: int, values: Iterable[Any], depth: int) -> None:
        if depth >= 200:
            raise errors.InvalidArgument("values are nested more than 200 deep")
        values = tuple(values)
        self._add(kind, len(values))
        for value in values:
            self.write(value, depth + 1)

    def _dict(self, values: Mapping[Any, Any], depth: int) -> None:
        if depth >= 200:
            raise errors.InvalidArgument("values are nested more than 200 deep")
        self._add(DICT, len(values))
        for key, value in values.items():
            self.write(key, depth + 1)
            self.write(value, depth + 1)

    def _array(self, array: np.ndarray, number: int | None = None) -> None:
        itemsize = array.dtype.itemsize
        strides = [step // itemsize for step in array.strides]
        if number is None:
            number = _NUMBERS[array.dtype]
        self._tensor(number, array.shape, strides, array.__array_interface__["data"][0])
        self.keep.append(array)

    def _tensor(self, number: int, shape: Iterable[int], strides: Iterable[int], address: int) -> None:
        numbers = (*shape, *strides)
        layout = struct.pack(f"={len(numbers)}q", *numbers)
        self.keep.append(layout)
        self._parts.append(_VALUE.pack(ARRAY, 0, number, len(numbers) // 2, 0, 0, address, _address(layout)))
        self.has_arrays = True

    def _dlpack(self, value: Any) -> None:
        if value.__dlpack_device__()[0] not in (1, 3):  # kDLCPU, kDLCUDAHost
            raise errors.InvalidArgument("an array of a GPU cannot be sent without torch: copy it to the host")
        capsule, tensor = _exported(value)
        number = _DLPACK.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
        if number is None:
            raise errors.InvalidArgument(f"DLPack's dtype {tensor.code}, {tensor.bits} bits, cannot be sent")
        shape = [tensor.shape[i] for i in range(tensor.ndim)]
        strides: list[int] = []
        step = 1
        for i in reversed(range(tensor.ndim)):
            strides.insert(0, tensor.strides[i] if tensor.strides else step)
            step *= max(shape[i], 1)
        if any(each < 0 for each in strides):
            raise errors.InvalidArgument("an array with a negative stride cannot be sent: copy it first")
        self.keep.append(capsule)  # its end frees what the producer made for it
        self._tensor(number, shape, strides, (tensor.data or 0) + tensor.byte_offset)


class Message:
    """Owns a ``tferry_message``. Arrays keep it, and so each keeps the memory of all."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __del__(self) -> None:
        lib.tferry_message_free(self._handle)

    def read(self) -> list[Any]:
        """Returns the values that stand side by side."""
        count = ctypes.c_size_t()
        address = lib.tferry_message_values(self._handle, ctypes.byref(count))
        if not count.value:
            return []
        reader = _Reader(self, ctypes.string_at(address, count.value * _VALUE.size))
        values = []
        while reader.left:
            values.append(reader.read())
        return values


class _Memory:
    """The memory of one array, which numpy sees by ``__array_interface__``."""

    def __init__(self, owner: Message, interface: dict[str, Any]) -> None:
        self.owner = owner
        self.__array_interface__ = interface


class _Reader:
    def __init__(self, message: Message, values: bytes) -> None:
        self._message = message
        self._values = values
        self._next = _VALUE.iter_unpack(values).__next__
        self.left = len(values) // _VALUE.size

    def read(self) -> Any:
        kind, flags, dtype, dimensions, _, number, pointer, shape = self._next()
        self.left -= 1
        if kind == ARRAY:
            return self._array(dtype, dimensions, pointer, shape)
        if kind == NONE:
            return None
        if kind == BOOL:
            return number != 0
        if kind == INTEGER:
            return number
        if kind in (REAL, COMPLEX):
            real, imaginary = _FLOATS.unpack(_FIELDS.pack(number, pointer))
            return real if kind == REAL else complex(real, imaginary)
        if kind < TUPLE:
            data = ctypes.string_at(pointer, number) if number else b""
            if kind == TEXT:
                return data.decode("utf-8", "surrogatepass")
            if kind == BIG_INTEGER:
                value = int.from_bytes(data, "little")
                return -value if flags else value
            return data if kind == BYTES else bytearray(data)
        if kind == DICT:
            return {self.read(): self.read() for _ in range(number)}
        values = [self.read() for _ in range(number)]
        return values if kind == LIST else {TUPLE: tuple, SET: set, FROZENSET: frozenset}[kind](values)

    def _array(self, number: int, dimensions: int, pointer: int, layout: int) -> Any:
        numbers = struct.unpack(f"={2 * dimensions}q", ctypes.string_at(layout, 16 * dimensions)) if dimensions else ()
        shape, strides = numbers[:dimensions], numbers[dimensions:]
        dtype = _NUMPY.get(number)
        name = ""
        if dtype is None:
            if number not in _OTHERS:
                raise errors.InvalidArgument(f"an array came whose dtype has the number {number}, which numpy lacks")
            name, size = _OTHERS[number]
            dtype = _BITS[size]
        if 0 in shape:
            array = np.empty(shape, dtype)
        else:
            steps = tuple(step * dtype.itemsize for step in strides)
            interface = {"version": 3, "shape": shape, "typestr": dtype.str, "data": (pointer, False), "strides": steps}
            array = np.asarray(_Memory(self._message, interface))
        return Array(name, array) if name else array
