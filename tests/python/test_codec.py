"""Python values through the codec, without an agent: values keep their types and their identity."""

from __future__ import annotations

import array
import collections
import dataclasses
import decimal
import enum
import gc
import math
import pickle
import random
import struct
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorferry import errors
from tensorferry._C import _testing

FAR = 8 * 1024  # strings and arrays above this travel as buffers

codec = _testing.Codec()


def there_and_back(value):
    return codec.decode(codec.encode(value))


def request(*args, first=None, **kwargs):
    return codec.decode_request(codec.encode_request(args, kwargs or None, first))


def same(a, b) -> bool:
    """Equal, of the same types all the way down, floats bit by bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items()))
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    return a == b


text = st.text(st.characters(codec=None))  # lone surrogates too
hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text | st.binary(),
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.frozensets(inner, max_size=4),
    max_leaves=5,
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(1 << 200), max_value=1 << 200)
    | st.floats()
    | st.complex_numbers(allow_nan=True)
    | text
    | st.binary(max_size=100)
    | st.binary(max_size=100).map(bytearray),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(hashable, inner)
        | st.sets(hashable)
        | st.frozensets(hashable)
    ),
    max_leaves=40,
)


@given(values)
def test_values_round_trip(value):
    assert same(there_and_back(value), value)


@given(st.lists(values, max_size=4), st.dictionaries(text, values, max_size=4))
def test_arguments_keep_their_positions(args, kwargs):
    try:
        for name in kwargs:
            name.encode()
    except UnicodeEncodeError:
        with pytest.raises(UnicodeEncodeError):
            codec.encode_request(tuple(args), kwargs)
        return
    got_args, got_kwargs = codec.decode_request(codec.encode_request(tuple(args), kwargs))
    assert same(got_args, tuple(args))
    assert same(got_kwargs or {}, kwargs)


def test_the_first_argument_is_put_in_front():
    assert request(1, 2, first="self") == (("self", 1, 2), None)
    args, kwargs = request(2, first=collections.OrderedDict(a=1), key=3)  # pickled
    assert args == (collections.OrderedDict(a=1), 2)
    assert kwargs == {"key": 3}


@pytest.mark.parametrize("bits", [7, 8, 31, 32, 62, 63, 64, 65, 127, 128, 1000, 100_000])
def test_integers_around_powers_of_two(bits):
    for base in (1 << bits, -(1 << bits)):
        for value in (base - 1, base, base + 1):
            assert same(there_and_back(value), value)


def test_floats_keep_their_bits():
    signalling = struct.unpack("<d", struct.pack("<Q", 0x7FF0_0000_0000_0001))[0]
    negative_nan = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_0000_1234))[0]
    for value in (0.0, -0.0, math.inf, -math.inf, math.nan, negative_nan, signalling, 5e-324):
        assert same(there_and_back(value), value)


@pytest.mark.parametrize("size", [0, 1, 31, 32, 100, FAR, FAR + 1, 1_000_000])
def test_strings_of_all_lengths(size):
    for value in ("x" * size, "ä" * size, "\U0001f600" * size, "\ud800" * size, b"\0" * size, bytearray(size)):
        assert same(there_and_back(value), value)


def test_large_strings_travel_outside_the_payload():
    for value in ("x" * 100_000, b"y" * 100_000, np.zeros(100_000, np.uint8)):
        encoded = codec.encode(value)
        assert len(encoded.payload) < 100
        assert [len(buffer) for buffer in encoded.buffers] == [100_000]


def test_a_large_bytearray_can_be_resized_while_it_is_sent():
    value = bytearray(100_000)
    encoded = codec.encode(value)
    value.extend(b"more")
    assert len(codec.decode(encoded)) == 100_000


@pytest.mark.parametrize("depth", [150, 199, 200, 250, 400])
def test_deep_nesting_round_trips(depth):
    value = ["bottom"]
    for i in range(depth):
        value = (value,) if i % 3 == 0 else [value] if i % 3 == 1 else {"next": value}
    got = there_and_back(value)
    for i in reversed(range(depth)):
        assert type(got) is type(value)
        got, value = (got["next"], value["next"]) if i % 3 == 2 else (got[0], value[0])
    assert got == ["bottom"]


def test_nesting_beyond_pickles_limit_is_a_recursion_error():
    value = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(RecursionError):
        codec.encode(value)
    while value:
        value = value[0]


def test_a_value_with_many_paths_is_visited_once():
    value = ["leaf"]
    for i in range(90):
        value = [value, value] if i % 2 else (value, value)
    got = there_and_back(value)
    for _ in range(90):
        assert got[0] is got[1]
        got = got[0]
    assert got == ["leaf"]


# ---- One object stays one object


@pytest.mark.parametrize(
    "shared",
    [
        [1],
        {"a": 1},
        {1, 2},
        (1, [2]),
        bytearray(b"x"),
        "x" * (FAR + 1),
        b"x" * (FAR + 1),
        np.arange(3),
        np.arange(3000),
        torch.arange(3),
        torch.nn.Parameter(torch.ones(2)),
        collections.OrderedDict(a=1),
        decimal.Decimal(3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_object_that_occurs_twice_stays_one_object(shared):
    got = there_and_back([shared, {"again": shared}, (shared,)])
    assert got[0] is got[1]["again"] is got[2][0]
    args, kwargs = request(shared, [shared], key=shared)
    assert args[0] is args[1][0] is kwargs["key"]


def test_equal_objects_stay_separate():
    got = there_and_back([[1], [1], torch.ones(1), torch.ones(1)])
    assert got[0] is not got[1]
    got[2].fill_(5)
    assert got[3].item() == 1


def test_identity_holds_between_pickled_and_other_arguments():
    class_made = collections.OrderedDict()
    plain = [1]
    tensor = torch.ones(2)
    class_made["plain"] = plain
    class_made["tensor"] = tensor
    args, kwargs = request(plain, class_made, tensor, key=class_made)
    assert args[1]["plain"] is args[0]
    assert args[1]["tensor"] is args[2]
    assert kwargs["key"] is args[1]


def test_a_list_and_a_dict_that_hold_themselves():
    ring = [1]
    ring.append(ring)
    got = there_and_back(ring)
    assert got[0] == 1 and got[1] is got

    table = {"inner": [None]}
    table["inner"][0] = table
    got = there_and_back({"table": table})["table"]
    assert got["inner"][0] is got


def test_a_tuple_that_holds_itself():
    ring = ([],)
    ring[0].append(ring)
    got = there_and_back(ring)
    assert type(got) is tuple and got[0][0] is got
    args, _ = request(ring, ring)
    assert args[0] is args[1] and args[0][0][0] is args[0]


# ---- User-defined types


class Point(collections.namedtuple("Point", "x y")):
    __slots__ = ()


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


class Text(str):
    __slots__ = ("note",)


@dataclasses.dataclass
class Observation:
    image: object
    reward: float
    info: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: int


class Odd:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return type(other) is Odd and other.value == self.value

    __hash__ = None


@pytest.mark.parametrize(
    "value",
    [
        Point(1, [2]),
        Colour.RED,
        Level.HIGH,
        Text("x"),
        Observation("image", 1.5, {"a": Level.HIGH}),
        Frozen(3),
        Odd([1, 2]),
        collections.OrderedDict(b=1, a=2),
        collections.defaultdict(list, a=[1]),
        collections.Counter("aab"),
        collections.deque([1, 2], maxlen=5),
        decimal.Decimal("1.50"),
        array.array("d", [1, 2]),
        range(3),
        slice(1, 2),
        Ellipsis,
        NotImplemented,
        ValueError("x", 1),
        math.sqrt,
        Point,
        int,
        len,
        sys.modules[__name__].test_deep_nesting_round_trips,
        torch.nn.functional.relu,
        torch.preserve_format,
    ],
    ids=lambda value: getattr(value, "__qualname__", type(value).__name__),
)
def test_third_party_types_keep_their_type(value):
    got = there_and_back((value, 1))[0]
    assert type(got) is type(value)
    assert repr(got) == repr(value) if isinstance(value, ValueError) else got == value


def test_records_of_more_classes_than_are_remembered_keep_their_classes(monkeypatch):
    classes = [type(f"Numbered{i}", (Frozen,), {"__module__": __name__}) for i in range(5000)]
    for each in classes:
        monkeypatch.setattr(sys.modules[__name__], each.__name__, each, raising=False)
    for _ in range(2):
        for i, each in enumerate(classes):
            got = there_and_back(each(i))
            assert type(got) is each and got.value == i


def test_arrays_and_tensors_inside_pickled_objects_are_not_pickled():
    shared = torch.randn(100_000)
    value = Observation(np.arange(100_000), 1.0, {"tensor": shared, "raw": pickle.PickleBuffer(bytearray(50_000))})
    encoded = codec.encode([value, shared])
    assert len(encoded.payload) < 1000
    assert sorted(len(buffer) for buffer in encoded.buffers) == [50_000, 400_000, 800_000]
    assert shared.data_ptr() in encoded.addresses  # without a copy
    assert value.image.ctypes.data in encoded.addresses
    observation, tensor = codec.decode(encoded)
    assert observation.info["tensor"] is tensor
    assert tensor.equal(shared)
    assert np.array_equal(observation.image, value.image)
    observation.image[0] = 5  # writable
    assert bytes(observation.info["raw"]) == bytes(50_000)


def test_small_buffers_of_pickle_stay_in_the_payload_and_keep_their_type():
    got = there_and_back(Observation(pickle.PickleBuffer(b"abc"), 0, {"b": pickle.PickleBuffer(bytearray(b"x"))}))
    assert bytes(got.image) == b"abc"
    assert memoryview(got.image).readonly
    assert not memoryview(got.info["b"]).readonly


def test_large_read_only_buffers_of_pickle_stay_read_only():
    got = there_and_back(Observation(pickle.PickleBuffer(b"x" * 20_000), 0))
    assert bytes(got.image) == b"x" * 20_000
    assert memoryview(got.image).readonly


def test_modules_and_their_optimisers_share_parameters_across_arguments():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    (got, got_optimiser), _ = request(model, optimiser)
    assert [type(p) for p in got.parameters()] == [torch.nn.Parameter] * 4
    assert [id(p) for p in got.parameters()] == [id(p) for p in got_optimiser.param_groups[0]["params"]]
    got(torch.ones(2, 3)).sum().backward()
    got_optimiser.step()


def test_unpicklable_values_raise_the_exception_of_pickle():
    with pytest.raises((pickle.PicklingError, AttributeError)):
        codec.encode(lambda: 1)
    with pytest.raises(TypeError, match="pickle"):
        codec.encode([threading.Lock()])
    assert there_and_back(Odd(1)) == Odd(1)  # the next one is not hurt


class Raises:
    def __reduce__(self):
        raise ZeroDivisionError("in __reduce__")


class RaisesWhenLoaded:
    def __reduce__(self):
        return divmod, (1, 0)


class Encodes:
    """Uses the codec while it is pickled and while it is loaded."""

    def __init__(self, value):
        self.value = value

    def __getstate__(self):
        return there_and_back([self.value, torch.ones(2)])

    def __setstate__(self, state):
        self.value, self.tensor = there_and_back([state[0], state[1], Odd(1), torch.zeros(1)])[:2]


def test_exceptions_of_user_code_pass_through():
    with pytest.raises(ZeroDivisionError, match="in __reduce__"):
        codec.encode([torch.ones(1), Raises()])
    encoded = codec.encode(RaisesWhenLoaded())
    with pytest.raises(ZeroDivisionError):
        codec.decode(encoded)
    assert there_and_back(Odd(1)) == Odd(1)


def test_objects_may_encode_while_they_are_encoded():
    got = there_and_back([Encodes(torch.arange(3)), torch.full((2,), 7.0), Encodes("x")])
    assert got[0].value.tolist() == [0, 1, 2]
    assert got[0].tensor.tolist() == [1, 1]
    assert got[1].tolist() == [7, 7]
    assert got[2].value == "x"


def test_many_threads_encode_at_once():
    wrong = []

    def work(seed):
        rng = random.Random(seed)
        for _ in range(200):
            value = [Odd([rng.random() for _ in range(rng.randrange(20))]), torch.tensor([rng.random()]), Encodes(seed)]
            got = there_and_back(value)
            if got[0] != value[0] or not got[1].equal(value[1]) or got[2].value != seed:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- numpy


PLAIN_DTYPES = [
    *(np.dtype(code) for code in "?bhilqBHILQefdgFDG"),
    *(np.dtype(text) for text in (">f8", ">i2", ">u4", "S5", "U7", ">U3", "V6", "M8[ns]", "m8[us]", "M8[D]", ">M8[s]")),
]


def random_array(dtype, shape, seed=0):
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape))
    if dtype.kind == "U":
        return np.array(["abcdefg"[: i % 8] for i in range(count)], dtype).reshape(shape)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "fc":
        return rng.standard_normal(shape).astype(dtype)
    return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).reshape(shape).copy()


def check_array(got, sent):
    assert type(got) is np.ndarray
    assert got.dtype == sent.dtype and got.dtype.str == sent.dtype.str
    assert got.shape == sent.shape
    if got.dtype.hasobject:
        assert got.tolist() == sent.tolist()
    else:
        assert got.tobytes() == sent.tobytes()


@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (3, 4), (40, 50, 6)], ids=str)
def test_arrays_of_every_plain_dtype(dtype, shape):
    sent = random_array(dtype, shape)
    got = there_and_back(sent)
    check_array(got, sent)
    assert got.flags.writeable
    check_array(there_and_back(Odd(sent)).value, sent)  # the same inside a pickle


@pytest.mark.parametrize("size", [3, 50])
def test_arrays_keep_their_memory_order(size):
    fortran = np.asfortranarray(random_array(np.dtype("f8"), (size, size + 1)))
    got = there_and_back(fortran)
    check_array(got, fortran)
    assert got.flags.f_contiguous and not got.flags.c_contiguous
    for view in (
        fortran[::2],
        fortran[:, ::-1],
        fortran[..., None],
        np.broadcast_to(np.arange(size), (4, size)),
        fortran.T[1:, 1:],
    ):
        check_array(there_and_back(view), view)


@pytest.mark.parametrize("size", [3, 3000])
def test_read_only_arrays_stay_so(size):
    sent = np.arange(size)
    sent.flags.writeable = False
    got = there_and_back(sent)
    check_array(got, sent)
    assert not got.flags.writeable


@pytest.mark.parametrize(
    "sent",
    [
        np.zeros(3, dtype=[("a", "i4"), ("b", "f8", (2,))]),
        np.array([1, "x", None], dtype=object),
        np.zeros(2, dtype=[("o", object)]),
        np.array([], dtype="S0"),
        np.zeros(2, dtype=np.dtype("i4", metadata={"unit": "m"})),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_of_other_dtypes_are_pickled(sent):
    check_array(there_and_back(sent), sent)


def test_subclasses_of_arrays_keep_their_type():
    for sent in (np.ma.masked_array([1, 2], [0, 1]), np.rec.array([(1, 2.0)], dtype=[("a", int), ("b", float)])):
        got = there_and_back(sent)
        assert type(got) is type(sent)
        assert got.tolist() == sent.tolist()


def test_an_array_is_sent_without_a_copy_and_kept_until_it_is_sent():
    sent = np.arange(10_000)
    encoded = codec.encode(sent)
    assert encoded.addresses == [sent.ctypes.data]
    expected = sent.copy()
    del sent
    gc.collect()
    assert np.array_equal(codec.decode(encoded), expected)


def test_a_received_array_holds_its_memory_and_releases_it():
    before = codec.held_bytes()
    got = there_and_back(np.arange(100_000))
    part = got[10:20]
    del got
    gc.collect()
    assert codec.held_bytes() >= before + 800_000
    assert part.tolist() == list(range(10, 20))
    del part
    gc.collect()
    assert codec.held_bytes() == before


@pytest.mark.parametrize(
    "scalar",
    [
        *(np.dtype(code).type(1) for code in "?bhilBHILefdgFDG"),  # longlong is int64 after a pickle, too
        np.float64("nan"),
        np.float32("-0.0"),
        np.str_("text"),
        np.str_(""),
        np.str_("x" * 10_000),
        np.bytes_(b"bytes"),
        np.datetime64("2020-02-03T04:05"),
        np.datetime64("NaT"),
        np.timedelta64(3, "h"),
        np.void(b"abc"),
        np.zeros(1, [("a", int)])[0],
    ],
    ids=repr,
)
def test_numpy_scalars_stay_scalars(scalar):
    for got in (there_and_back(scalar), there_and_back(Odd([scalar])).value[0]):
        assert type(got) is type(scalar)
        assert got.dtype == scalar.dtype
        assert got.tobytes() == scalar.tobytes()


# ---- torch's constants


@pytest.mark.parametrize(
    "value",
    [
        *sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str),
        *(torch.device(text) for text in ("cpu", "cuda", "cuda:3", "meta", "mps", "xpu:1")),
        *(torch.Size(sizes) for sizes in ((), (0,), (3, 4), (1 << 62,), (1,) * 70)),
        *(v for v in vars(torch).values() if isinstance(v, (torch.layout, torch.memory_format))),
    ],
    ids=repr,
)
def test_torchs_constants_round_trip(value):
    got = there_and_back([value])[0]
    assert type(got) is type(value)
    assert got == value
    assert got is value or isinstance(value, (torch.device, torch.Size))


# ---- Exceptions


class Picky(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")  # cannot be rebuilt from its args


def test_exceptions_keep_their_type():
    described, got = codec.deliver_exception(KeyError("name"))
    assert described == "'name'"
    assert type(got) is KeyError and got.args == ("name",)
    _, got = codec.deliver_exception(ValueError(torch.arange(3)))
    assert got.args[0].tolist() == [0, 1, 2]


def test_exceptions_that_cannot_travel_are_described():
    for error in (Picky(1, 2), ValueError(lambda: 1)):
        described, got = codec.deliver_exception(error)
        assert described == str(error)
        assert got is None


# ---- References


class Handle:
    def __init__(self, number):
        self.number = number


class WithReferences(_testing.Codec):
    """One that Python can hang attributes on."""


@pytest.fixture
def references():
    own = WithReferences()
    own.written = []

    def number(handle):
        own.written.append(handle.number)
        return handle.number

    own.reference_type(Handle, number, Handle)
    return own


def test_references_travel_by_number(references):
    first, second = Handle(7), Handle(8)
    got = references.decode(references.encode([first, {"x": second}, first]))
    assert [got[0].number, got[1]["x"].number] == [7, 8]
    assert got[0] is got[2]
    assert references.written == [7, 8]


def test_references_inside_pickled_objects_travel_by_number(references):
    handle = Handle(9)
    got = references.decode(references.encode([Odd([handle, torch.ones(1), handle]), handle]))
    assert got[0].value[0] is got[0].value[2] is got[1]
    assert got[1].number == 9
    assert references.written == [9]


def test_references_are_refused_where_the_codec_takes_none():
    own = _testing.Codec()
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        own.encode(lambda: Handle(1))
    got = own.decode(own.encode(Handle(3)))  # just an object of a class
    assert got.number == 3


def test_values_that_change_while_they_are_encoded_are_refused():
    own = WithReferences()
    values = [Handle(1), Handle(2), 3]
    own.reference_type(Handle, lambda handle: values.pop() and 1, Handle)
    with pytest.raises(RuntimeError, match="changed while it was being sent"):
        own.encode(values)
    table = {i: Handle(i) for i in range(5)}
    own.reference_type(Handle, lambda handle: table.pop(4, None) is None or 1, Handle)
    with pytest.raises(RuntimeError, match="changed while it was being sent"):
        own.encode(table)


# ---- Without pickle


def test_without_pickle_no_pickle_is_written_or_read():
    careful = _testing.Codec()
    careful.refuse_pickle()
    assert careful.decode(careful.encode([1, torch.ones(2), np.arange(3)]))[0] == 1
    with pytest.raises(TypeError, match="no pickles"):
        careful.encode(Odd(1))
    with pytest.raises(errors.PermissionDenied):
        careful.decode(codec.encode(Odd(1)))
    with pytest.raises(errors.PermissionDenied):
        careful.decode_request(codec.encode_request((RaisesWhenLoaded(),)))


# ---- Invalid bytes


def a_message():
    tensor = torch.randn(4, 3, dtype=torch.complex64).conj()
    return codec.encode(
        [
            (1, -5, 1 << 80, 2.5, 3j, "text", "\ud800", b"bytes", bytearray(b"x")),
            {"tensor": tensor, "part": tensor[1:3], "column": tensor[:, 1], "sparse": torch.eye(3).to_sparse()},
            {1, 2},
            frozenset(["a"]),
            torch.eye(4).to_sparse_csr(),
            np.arange(6).reshape(2, 3),
            np.float32(1),
            np.array(["ab"]),
            torch.nn.Parameter(torch.ones(3)),
            [torch.float8_e4m3fn, torch.device("cuda:0"), torch.Size([1]), torch.strided, torch.channels_last],
            np.arange(5000),
            "x" * 9000,
        ]
    )


MESSAGE = a_message()
PAYLOAD, BUFFERS = MESSAGE.payload, MESSAGE.buffers


def decode_corrupted(data):
    careful = _testing.Codec()
    careful.refuse_pickle()
    payload = bytearray(PAYLOAD)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(payload) - 1))
        match data.draw(st.integers(0, 3)):
            case 0:
                payload[at] = data.draw(st.integers(0, 255))
            case 1:
                payload[at] ^= 1 << data.draw(st.integers(0, 7))
            case 2:
                del payload[at:]
                payload += b"\0"
            case 3:
                payload[at:at] = data.draw(st.binary(max_size=5))
    buffers = BUFFERS[: data.draw(st.integers(0, len(BUFFERS)))] if data.draw(st.booleans()) else BUFFERS
    try:
        repr(careful.decode(bytes(payload), buffers))
    except (RuntimeError, TypeError, ValueError):
        pass


@settings(max_examples=500, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_corrupted_messages_decode_or_raise(data):
    decode_corrupted(data)


@pytest.mark.soak
@settings(max_examples=20_000, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_many_corrupted_messages_decode_or_raise(data):
    decode_corrupted(data)


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_any_bytes_decode_or_raise(payload):
    careful = _testing.Codec()
    careful.refuse_pickle()
    try:
        careful.decode(b"\0" + payload, BUFFERS)
    except (RuntimeError, TypeError, ValueError):
        pass


def test_an_array_whose_items_are_larger_than_its_dtype_says_is_refused():
    codec.decode(codec.encode(np.zeros(3, "<f4")))  # the codec knows the dtype from now on
    sent = codec.encode(np.zeros(1, "<U16"))
    payload = sent.payload.replace(b"\x04<U16", b"\x03<f4")
    assert payload != sent.payload
    with pytest.raises(errors.ProtocolError, match="dtype <f4 comes with 64 bytes an element"):
        codec.decode(payload, [])


def careful_codec():
    careful = _testing.Codec()
    careful.refuse_pickle()
    return careful


@pytest.mark.parametrize(
    "keys",
    [
        [i * (2**61 - 1) for i in range(1000)],
        [(i * (2**61 - 1),) for i in range(1000)],
        [complex(-1000003.0 * i, float(i)) for i in range(1000)],
    ],
    ids=["integers", "tuples", "complex"],
)
@pytest.mark.parametrize("container", [set, frozenset, dict.fromkeys], ids=lambda kind: kind.__name__)
def test_many_keys_of_one_hash_are_refused_where_trust_is_less(container, keys):
    # Python would compare each of n keys with all others: n * n comparisons under the GIL.
    assert len({hash(key) for key in keys}) == 1
    encoded = codec.encode(container(keys))
    with pytest.raises(errors.ProtocolError, match="too many keys of one hash"):
        careful_codec().decode(encoded.payload, [])
    few = container(keys[:20] + list(range(1000, 3000)) + [f"text {i}" for i in range(3000)])
    assert careful_codec().decode(codec.encode(few).payload, []) == few


def test_keys_that_are_one_long_tuple_again_and_again_are_refused_where_trust_is_less():
    long = tuple(range(50_000))
    value = [long, *({long: i} for i in range(1000))]
    encoded = codec.encode(value)
    with pytest.raises(errors.ProtocolError, match="again and again"):
        careful_codec().decode(encoded.payload, [])
    few = [long, *({long: i} for i in range(10))]
    assert careful_codec().decode(codec.encode(few).payload, []) == few


@pytest.mark.parametrize("dtype", ["|S0", "<U0", "|V0"])
@pytest.mark.parametrize("count", [0, 7, 1 << 33])
def test_arrays_whose_elements_have_no_bytes_are_refused(dtype, count):
    # numpy makes 1-byte elements of such a dtype: memory that the message does not fill.
    sizes = bytearray()
    while count > 0x7F:
        sizes.append(count & 0x7F | 0x80)
        count >>= 7
    sizes.append(count)
    payload = b"\0\x11\0\x03" + dtype.encode() + b"\0\x01" + bytes(sizes) + b"\0"
    with pytest.raises(errors.ProtocolError, match="at least one"):
        codec.decode(payload, [])


def test_errors_name_the_fault_in_a_message():
    with pytest.raises(errors.ProtocolError, match="byte"):
        codec.decode(PAYLOAD[:-3], BUFFERS)
    with pytest.raises(errors.ProtocolError, match="after its last value"):
        codec.decode(PAYLOAD + b"\0", BUFFERS)
    with pytest.raises(errors.ProtocolError):
        codec.decode(b"\0\x43\xff\xfe\xfd", [])  # text that is no UTF-8


def test_a_pickle_cannot_ask_for_parts_of_another_value():
    class Thief:
        def __reduce__(self):
            from tensorferry import _C

            return _C._part, (0,)

    encoded = codec.encode(Thief())
    with pytest.raises(ValueError, match="part"):
        codec.decode(encoded)
    from tensorferry import _C

    with pytest.raises(ValueError, match="part"):
        _C._part(0)


# ---- Lifetimes


def test_buffers_may_be_dropped_without_the_gil():
    value = ["x" * 20_000, b"y" * 20_000, np.arange(5000), torch.from_numpy(np.arange(5000)), torch.ones(10_000)]
    counts = [sys.getrefcount(item) for item in value]
    encoded = codec.encode([*value, Odd(np.arange(7000))])
    encoded.drop_without_gil()
    assert [sys.getrefcount(item) for item in value] == counts


def test_a_tensor_of_numpy_memory_is_released_without_the_gil():
    import weakref

    class Memory(bytearray):
        pass

    memory = Memory(80_000)
    gone = weakref.ref(memory)
    encoded = codec.encode(torch.frombuffer(memory, dtype=torch.float64))
    del memory
    gc.collect()
    assert gone() is not None
    encoded.drop_without_gil()
    gc.collect()
    assert gone() is None


class TellsOfTheCollector:
    def __reduce__(self):
        return gc.isenabled, ()


@pytest.mark.parametrize("on", [True, False])
def test_messages_of_many_tensors_leave_the_collector_as_it_was(on):
    many = {i: torch.full((3,), i) for i in range(5000)}
    runs = []

    def count(phase, info):
        if phase == "start":
            runs.append(info)

    was = gc.isenabled()
    (gc.enable if on else gc.disable)()
    gc.callbacks.append(count)
    try:
        received = there_and_back(many)
        assert gc.isenabled() is on
        assert len(runs) <= (2 if on else 0), runs  # it makes no cycles; the collector would run 7 times
        objects, told = there_and_back((many, TellsOfTheCollector()))
        assert told is on and objects.keys() == many.keys()  # as code of the program left it
        with pytest.raises(errors.ProtocolError):
            codec.decode(b"\x3e", [bytes(16)] * 1000)
        assert gc.isenabled() is on
    finally:
        gc.callbacks.remove(count)
        (gc.enable if was else gc.disable)()
    assert all(same(received[i].tolist(), [i] * 3) for i in many)


def test_encoding_leaks_nothing():
    def once():
        value = [Odd(torch.ones(3)), np.arange(3), {"a": [1, 2]}, torch.nn.Parameter(torch.ones(2)), "x" * 9000]
        there_and_back(value)
        request(*value, key=value)
        there_and_back(value[1:])
        try:
            codec.encode([Raises(), value])
        except ZeroDivisionError:
            pass
        try:
            codec.decode(codec.encode([1, value]).payload[:-1], [])
        except errors.ProtocolError:
            pass

    for _ in range(5):
        once()
    gc.collect()
    before = len(gc.get_objects()), codec.held_bytes()
    for _ in range(50):
        once()
    gc.collect()
    assert len(gc.get_objects()) <= before[0] + 20
    assert codec.held_bytes() == before[1]


def test_messages_and_received_values_outlive_the_interpreter():
    script = """
        import numpy as np, sys, torch
        from tensorferry._C import _testing
        codec = _testing.Codec()
        sent = codec.encode([torch.from_numpy(np.arange(5000)), np.arange(5000), "x" * 10000])
        got = codec.decode(sent)
        sys.modules["kept"] = (sent, got)
        import builtins
        builtins.kept_too = (codec.decode(sent), codec.encode(np.arange(9999)))
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert not result.stderr
