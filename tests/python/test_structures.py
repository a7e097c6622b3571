"""Named tuples, dataclasses and TensorDicts as records of the codec, without an agent."""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
import importlib.util
import pickle
import sys
import types
import typing

import numpy as np
import pytest
import tensorferry
import torch
from tensorferry import errors
from tensorferry._C import _testing

codec = _testing.Codec()
closed = _testing.Codec()  # reads and writes no pickle: it takes only values that the codec encodes
closed.refuse_pickle()


def there_and_back(value):
    """By the codec alone."""
    return closed.decode(closed.encode(value))


def by_pickle(value):
    with pytest.raises(TypeError, match="sends no pickles"):
        closed.encode(value)
    return codec.decode(codec.encode(value))


Pair = collections.namedtuple("Pair", "left right")


class Typed(typing.NamedTuple):
    data: torch.Tensor
    weight: float = 1.0

    def twice(self):
        return self.weight * 2


class Subclass(Pair):
    __slots__ = ()


class WithAttributes(Pair):
    pass


class Picky(Pair):
    def __new__(cls, left, right):
        return super().__new__(cls, left, right or "nothing")


@dataclasses.dataclass
class Batch:
    inputs: torch.Tensor
    labels: np.ndarray
    meta: dict = dataclasses.field(default_factory=dict)
    count: typing.ClassVar[int] = 7
    setting: dataclasses.InitVar[int] = 0
    total: int = dataclasses.field(init=False, default=0)
    made: str = dataclasses.field(init=False)

    def __post_init__(self, setting):
        self.made = f"made with {setting}"


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: object


@dataclasses.dataclass(frozen=True, slots=True)
class Slim(Frozen):
    more: object = None


@dataclasses.dataclass(slots=True)
class Slots:
    first: int
    second: int = dataclasses.field(init=False)


@dataclasses.dataclass(kw_only=True, eq=False)
class Child(Batch, abc.ABC):
    extra: list

    @functools.cached_property
    def long(self):
        return len(self.extra)


class Plain(Frozen):
    """Not decorated: an heir of its fields alone."""


@dataclasses.dataclass
class OwnState:
    value: int

    def __getstate__(self):
        return {"value": self.value + 1}


@dataclasses.dataclass
class OwnReduce:
    value: int

    def __reduce__(self):
        return OwnReduce, (self.value + 1,)


@dataclasses.dataclass
class OwnNew:
    value: int

    def __new__(cls, *args):
        return super().__new__(cls)


@dataclasses.dataclass
class OwnEnd:
    value: int

    def __del__(self):
        pass


class Extra:
    __slots__ = ("hidden",)


@dataclasses.dataclass
class SlotBeside(Extra):
    value: int


class Outer:
    @dataclasses.dataclass
    class Inner:
        value: int


@dataclasses.dataclass
class WithProperty:
    value: int

    @property
    def value(self):
        return self._value

    @value.setter
    def value(self, value):
        self._value = value


def batch():
    return Batch(torch.arange(5.0), np.arange(3), {"nested": Frozen([1, Pair(2, None)])}, 4)


# ---- Values that the codec encodes


@pytest.mark.parametrize(
    "value",
    [
        Pair(1, [2]),
        Typed(3, 0.5),
        Subclass("x", ()),
        WithAttributes(1, 2),
        Frozen({"a": 1}),
        Slim("x", 2),
        Plain(4),
        Outer.Inner(5),
    ],
    ids=lambda value: type(value).__name__,
)
def test_records_keep_their_type_without_pickle(value):
    for given in (value, [value, {"key": (value,)}]):
        got = there_and_back(given)
        assert got == given
    assert type(there_and_back(value)) is type(value)


def test_a_dataclass_keeps_every_kind_of_field():
    given = batch()
    got = there_and_back(given)
    assert type(got) is Batch
    assert got.inputs.equal(given.inputs) and got.inputs is not given.inputs
    assert np.array_equal(got.labels, given.labels)
    assert got.meta == given.meta and type(got.meta["nested"].value[1]) is Pair
    assert got.made == "made with 4"
    assert "total" not in vars(got) and got.total == 0  # a class attribute, as at the sender
    given.total = 9
    assert there_and_back(given).total == 9


def test_neither_init_nor_post_init_runs_at_the_receiver(monkeypatch):
    def refuse(*_):
        raise AssertionError("must not run")

    encoded = closed.encode([batch(), Frozen(1)])
    monkeypatch.setattr(Batch, "__init__", refuse)
    monkeypatch.setattr(Batch, "__post_init__", refuse)
    monkeypatch.setattr(Frozen, "__setattr__", refuse)
    got = closed.decode(encoded)
    assert got[0].made == "made with 4"
    assert got[1].value == 1


def test_inherited_keyword_fields_and_cached_properties_round_trip():
    child = Child(inputs=torch.ones(2), labels=np.ones(1), extra=[1, 2])
    got = there_and_back(child)
    assert type(got) is Child and got.extra == [1, 2] and got.made == child.made
    assert child.long == 2  # lies beside the fields from now on
    assert by_pickle(child).__dict__["long"] == 2


def test_slots_round_trip():
    value = Slots(1)
    value.second = 2
    assert there_and_back(value) == value


def test_a_record_with_an_unset_field_is_pickled():
    got = by_pickle(Slots(1))
    assert got.first == 1
    assert not hasattr(got, "second")


def test_repeated_objects_and_shared_tensors_keep_their_identity():
    tensor = torch.ones(100_000)
    inner = Frozen(tensor)
    got = there_and_back({"a": inner, "b": [inner, Pair(tensor, tensor[:5])]})
    assert got["a"] is got["b"][0]
    assert got["b"][1].left is got["a"].value
    assert got["b"][1].right.data_ptr() == got["a"].value.data_ptr()


def test_a_record_that_holds_itself_arrives_as_one_object():
    loop = Frozen([])
    loop.value.append(loop)
    got = by_pickle(loop)
    assert got.value[0] is got


def test_tensors_of_records_travel_as_buffers():
    encoded = closed.encode(Batch(torch.ones(100_000), np.ones(100_000)))
    assert len(encoded.payload) < 300
    assert sorted(len(buffer) for buffer in encoded.buffers) == [400_000, 800_000]


def test_records_can_be_keys():
    assert there_and_back({Pair(1, 2): 3, Frozen(4): 5}) == {Pair(1, 2): 3, Frozen(4): 5}


# ---- Values that are pickled


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (OwnState(1), 2),
        (OwnReduce(1), 2),
        (OwnNew(1), 1),
        (OwnEnd(1), 1),
        (SlotBeside(1), 1),
        (WithProperty(1), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_class_with_its_own_construction_is_pickled(value, expected):
    assert by_pickle(value).value == expected


def test_a_record_with_extra_attributes_is_pickled():
    value = WithAttributes(1, 2)
    value.note = "kept"
    assert by_pickle(value).note == "kept"
    frozen = Plain(1)
    object.__setattr__(frozen, "note", "kept")
    assert by_pickle(frozen).note == "kept"


def test_a_named_tuple_with_its_own_new_is_pickled():
    assert by_pickle(Picky(1, None)).right == "nothing"


def test_struct_sequences_and_return_types_are_pickled():
    assert by_pickle(torch.max(torch.ones(2, 2), 0)).values.tolist() == [1, 1]


def test_local_classes_are_refused():
    @dataclasses.dataclass
    class Local:
        value: int

    with pytest.raises((AttributeError, pickle.PicklingError), match="Local"):
        codec.encode(Local(1))


def test_a_changed_class_is_inspected_again():
    @dataclasses.dataclass
    class Changed:
        value: int

    Changed.__qualname__ = "Changed"
    sys.modules[__name__].Changed = Changed
    assert there_and_back(Changed(1)).value == 1
    Changed.__getstate__ = lambda self: {"value": self.value + 1}
    assert by_pickle(Changed(1)).value == 2


# ---- Reading


@pytest.fixture
def module(monkeypatch):
    """A module that is gone, or another, when the value is read."""
    made = types.ModuleType("tensorferry_test_module")
    monkeypatch.setitem(sys.modules, made.__name__, made)

    def add(name, fields, maker=dataclasses.make_dataclass):
        made_class = maker(name, fields)
        made_class.__module__ = made.__name__
        setattr(made, name, made_class)
        return made_class

    made.add = add
    return made


def test_a_missing_class_is_a_clear_error(module, monkeypatch):
    encoded = codec.encode(module.add("Gone", ["x"])(1))
    del module.Gone
    with pytest.raises(errors.NotFound, match=r'no class "Gone" in module "tensorferry_test_module".*importable'):
        codec.decode(encoded)
    fresh = _testing.Codec()
    monkeypatch.delitem(sys.modules, module.__name__)
    with pytest.raises(errors.NotFound, match='no module "tensorferry_test_module"'):
        fresh.decode(encoded)


@pytest.mark.parametrize("fields", [["x"], ["y", "x"], ["x", "y", "z"], ["x", "z"]], ids=",".join)
@pytest.mark.parametrize("maker", [dataclasses.make_dataclass, collections.namedtuple])
def test_another_version_of_the_class_is_a_clear_error(module, fields, maker):
    encoded = codec.encode(module.add("Versioned", ["x", "y"], maker)(1, 2))
    module.add("Versioned", fields, maker)
    with pytest.raises(
        errors.InvalidArgument, match=r'Versioned" arrived with the fields "x,y"; here it has .*another version'
    ):
        codec.decode(encoded)


@pytest.mark.parametrize(
    "other",
    [int, len, 3, Pair, OwnNew, torch.nn.Linear, lambda: 1, collections.OrderedDict],
    ids=lambda other: getattr(other, "__qualname__", repr(other)),
)
def test_a_name_of_another_object_builds_nothing(module, other):
    encoded = codec.encode(module.add("Fine", ["x"])(1))
    module.Fine = other
    with pytest.raises(errors.InvalidArgument, match="is not, in this process, a class whose instances travel"):
        codec.decode(encoded)


def test_without_pickle_no_module_is_imported_for_a_peer(tmp_path, monkeypatch):
    (tmp_path / "tensorferry_unwanted.py").write_text(
        "import dataclasses\n@dataclasses.dataclass\nclass Thing:\n    x: int\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.util.find_spec("tensorferry_unwanted")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules["tensorferry_unwanted"] = loaded
    spec.loader.exec_module(loaded)
    encoded = codec.encode(loaded.Thing(3))
    del sys.modules["tensorferry_unwanted"]
    with pytest.raises(errors.NotFound, match="has been imported here"):
        closed.decode(encoded)
    assert "tensorferry_unwanted" not in sys.modules
    assert _testing.Codec().decode(encoded).x == 3
    del sys.modules["tensorferry_unwanted"]


def test_module_getattr_is_not_called(module):
    encoded = codec.encode(module.add("Lazy", ["x"])(1))
    del module.Lazy
    module.__getattr__ = lambda name: pytest.fail("asked")
    with pytest.raises(errors.NotFound):
        codec.decode(encoded)


# ---- TensorDict


@pytest.fixture
def tensordict():
    return pytest.importorskip("tensordict")


def test_tensordicts_travel_by_the_codec(tensordict):
    nested = tensordict.TensorDict({"c": torch.zeros(3, 4, 2)}, [3, 4], names=["x", "y"])
    given = tensordict.TensorDict({"a": torch.randn(3, 5), "n": nested}, [3], names=["x"])
    got = there_and_back({"td": given})["td"]
    assert type(got) is tensordict.TensorDict
    assert (got == given).all()
    assert got.batch_size == torch.Size([3]) and got["n"].batch_size == torch.Size([3, 4])
    assert got.names == ["x"] and got["n"].names == ["x", "y"]
    assert got.device is None
    assert not got.is_locked
    got["a"][0] = 5
    assert not (got == given).all()


def test_tensordicts_keep_locks_devices_and_identity(tensordict):
    given = tensordict.TensorDict(
        {"a": torch.ones(2), "p": torch.nn.Parameter(torch.ones(2))}, [2], device="cpu"
    ).lock_()
    first, second = there_and_back([given, Frozen(given)])
    assert first is second.value
    assert first.is_locked and first.device == torch.device("cpu")
    assert type(first["p"]) is torch.nn.Parameter
    with pytest.raises(RuntimeError, match="lock"):
        first["b"] = torch.ones(2)


def test_tensordicts_with_other_values_are_pickled(tensordict):
    assert by_pickle(tensordict.TensorDict({"text": "hello"}, []))["text"] == "hello"


def test_a_tensordict_with_mismatched_parts_is_refused(tensordict):
    encoded = closed.encode(tensordict.TensorDict({"a": torch.ones(2)}, [2]))
    payload = encoded.payload.replace(b"\x17\x01\x04", b"\x17\x01\x06")  # torch.Size([2]) becomes torch.Size([3])
    assert payload != encoded.payload
    with pytest.raises(RuntimeError, match="batch"):
        closed.decode(payload, encoded.buffers)


# ---- Between agents


def echo(value):
    return value


def test_a_registered_only_agent_accepts_only_exposed_classes(agents):
    a, b = agents("a"), agents("b", trust="registered")
    b.expose(echo)
    b.expose(Frozen)
    assert a.rpc_sync("b", echo, args=(Frozen(1),)) == Frozen(1)
    with pytest.raises(errors.PermissionDenied, match=r'test_structures:Outer\.Inner" .* not exposed'):
        a.rpc_sync("b", echo, args=(Outer.Inner(1),))


def test_structures_travel_between_agents(pair):
    a, _ = pair
    got = a.rpc_sync("b", echo, args=(batch(),))
    assert got.made == "made with 4"
    assert a.rpc_async("b", echo, args=(Typed(torch.ones(3)),)).wait().twice() == 2
    assert tensorferry.__name__ == "tensorferry"
