"""rpc.expose, and trust="registered": unexposed functions are refused, and nothing is unpickled or imported."""

from __future__ import annotations

import collections
import os
import pickle
import struct
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
from conftest import Agents, eventually
from raw_peer import RawPeer, varint
from tensorferry import errors

# ---- functions that peers call


def double(x: Any) -> Any:
    return x * 2


def never_exposed() -> str:
    return "ran"


class Touch:
    """Creates a file where its pickle is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return open, (self.path, "w")


class Counter:
    limit = 10

    def __init__(self, start: int = 0) -> None:
        self.value = start
        self.hook = os.getpid

    def add(self, n: int) -> int:
        self.value += n
        return self.value

    def _reset(self) -> None:
        self.value = 0

    @property
    def trap(self) -> Callable[[], None]:
        raise AssertionError("a property of the object's was looked at")

    @staticmethod
    def zero() -> int:
        return 0

    def __call__(self) -> int:
        return self.value


class Hidden:
    def run(self) -> str:
        return "ran"


def make_hidden() -> Hidden:
    return Hidden()


def pickled_result() -> Any:
    return Hidden()


class Unusual(Exception):
    pass


def fail(kind: str) -> None:
    raise {"value": ValueError("no such thing"), "unusual": Unusual("odd")}[kind]


@pytest.fixture
def server(agents: Agents) -> tensorferry.Agent:
    return agents("server", trust="registered")


@pytest.fixture
def client(agents: Agents) -> tensorferry.Agent:
    return agents("client")


# ---- names


def test_an_exposed_function_is_called_by_its_plain_name(agents: Agents) -> None:
    a, b = agents("a"), agents("b")
    assert b.expose(double) is double
    b.expose(double, name="twice")
    assert a.rpc_sync("b", "double", args=(21,)) == 42
    assert a.rpc_async("b", "twice", kwargs={"x": 4}).wait() == 8
    assert torch.equal(a.rpc_sync("b", "double", args=(torch.ones(3),)), torch.full((3,), 2.0))
    assert a.remote("b", "double", args=("ab",)).to_here() == "abab"


def test_expose_decorates_with_and_without_a_name(agents: Agents) -> None:
    a, b = agents("a"), agents("b")

    @b.expose
    def plain() -> str:
        return "plain"

    @b.expose("renamed")
    def inner() -> str:
        return "inner"

    assert (plain(), inner()) == ("plain", "inner")
    assert a.rpc_sync("b", "plain") == "plain"
    assert a.rpc_sync("b", "renamed") == "inner"
    with pytest.raises(errors.NotFound, match='serves no function "inner"'):
        a.rpc_sync("b", "inner")


def test_a_bound_method_and_a_lambda_can_be_exposed(agents: Agents) -> None:
    a, b = agents("a"), agents("b")
    counter = Counter()
    b.expose(counter.add)
    b.expose(lambda: "lambda", name="anonymous")
    a.rpc_sync("b", "add", args=(3,))
    assert a.rpc_sync("b", "add", args=(4,)) == 7 == counter.value
    assert a.rpc_sync("b", "anonymous") == "lambda"


def test_a_name_belongs_to_one_function(agents: Agents) -> None:
    b = agents("b")
    b.expose(double, name="f")
    b.expose(double, name="f")  # once more
    with pytest.raises(errors.InvalidArgument, match="exposed already"):
        b.expose(never_exposed, name="f")


@pytest.mark.parametrize("name", ["", "py:os:system", "op:aten::add", "tf:fetch", "x" * 4097])
def test_names_of_other_kinds_cannot_be_exposed(agents: Agents, name: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="cannot name an exposed function"):
        agents("b").expose(double, name=name)


def test_uncallable_and_nameless_objects_cannot_be_exposed(agents: Agents) -> None:
    b = agents("b")
    with pytest.raises(TypeError, match="only functions and classes"):
        b.expose(3, name="three")
    with pytest.raises(errors.InvalidArgument, match="no name of its own"):
        b.expose(collections.OrderedDict(a=1))


def test_calling_an_internal_name_is_a_mistake_of_the_caller(agents: Agents) -> None:
    a = agents("a")
    for name in ("tf:method", ""):
        with pytest.raises(ValueError, match="is not the name of a function"):
            a.rpc_sync("a", name)


@pytest.fixture
def default_agent() -> Iterator[Callable[..., tensorferry.Agent]]:
    """Begins the default agent, alone in its world."""

    def begin(**options: Any) -> tensorferry.Agent:
        rpc.init_rpc("alone", store=torch.distributed.HashStore(), **options)
        return rpc._default()

    yield begin
    if rpc._is_current_rpc_agent_set():
        rpc.shutdown(graceful=False)


def test_the_modules_expose_applies_to_the_default_agent_and_later_ones(
    default_agent: Callable[..., tensorferry.Agent], agents: Agents
) -> None:
    rpc.expose(double, name="exposed before the agent")
    default_agent(trust="registered")
    assert rpc.rpc_sync("alone", "exposed before the agent", args=(1,)) == 2
    rpc.expose(double, name="exposed after it")
    assert rpc.rpc_sync("alone", "exposed after it", args=(2,)) == 4
    later, caller = agents("later"), agents("caller")
    assert caller.rpc_sync(later.name, "exposed after it", args=(3,)) == 6


# ---- trust="registered"


def test_only_exposed_functions_run(server: tensorferry.Agent, client: tensorferry.Agent) -> None:
    server.expose(double)
    assert client.rpc_sync("server", "double", args=(1,)) == 2
    assert client.rpc_sync("server", double, args=(2,)) == 4  # the same function, by module and name
    for function in (never_exposed, os.getpid, torch.add, "never_exposed", "py:os:getpid", "op:aten::add"):
        with pytest.raises(errors.PermissionDenied, match='"server" has exposed no'):
            client.rpc_sync("server", function)
    server.expose(never_exposed)  # a name that was refused before
    assert client.rpc_sync("server", never_exposed) == "ran"


def test_a_decorated_function_is_also_found_by_its_module_and_name(
    default_agent: Callable[..., tensorferry.Agent],
) -> None:
    default_agent(trust="registered")
    module = types.ModuleType("made_for_this_test")
    sys.modules[module.__name__] = module
    try:
        exec("import tensorferry.rpc as rpc\n@rpc.expose\ndef decorated():\n    return 'ran'\n", module.__dict__)
        assert rpc.rpc_sync("alone", module.decorated) == "ran"
    finally:
        del sys.modules[module.__name__]


def test_a_callable_that_travels_by_value_is_refused(server: tensorferry.Agent, client: tensorferry.Agent) -> None:
    with pytest.raises(errors.PermissionDenied):
        client.rpc_sync("server", Counter().add, args=(1,))


def test_no_module_is_imported_for_a_peer(server: tensorferry.Agent, client: tensorferry.Agent) -> None:
    module = "this"  # prints when it is imported, and was not imported yet
    assert module not in sys.modules
    with pytest.raises(errors.PermissionDenied):
        client.rpc_sync("server", f"py:{module}:s")
    assert module not in sys.modules


def test_a_refused_call_is_one_line_in_the_log_with_the_peers_name(
    server: tensorferry.Agent, client: tensorferry.Agent, capfd: pytest.CaptureFixture[str]
) -> None:
    server.expose(double)
    for call, function, args in (("py:posix:getcwd", os.getcwd, ()), ("double", "double", (Hidden(),))):

        def is_logged(call: str = call, function: Any = function, args: tuple[Any, ...] = args) -> bool:
            capfd.readouterr()
            with pytest.raises(errors.PermissionDenied):
                client.rpc_sync("server", function, args=args)
            lines = capfd.readouterr().err.splitlines()
            assert len(lines) <= 1, lines
            return any(f"peer=client call={call} refused: PermissionDenied" in line for line in lines)

        assert eventually(is_logged)  # other tests in this process may have used up the rate of this kind of line


def test_a_pickled_argument_is_refused_and_not_loaded(
    server: tensorferry.Agent, client: tensorferry.Agent, tmp_path: Path
) -> None:
    server.expose(double)
    target = tmp_path / "touched"
    for arguments in ((Touch(target),), ([1, {"deep": (Touch(target),)}],), (torch.ones(2), Touch(target))):
        with pytest.raises(errors.PermissionDenied, match="pickle"):
            client.rpc_sync("server", "double", args=arguments)
        with pytest.raises(errors.PermissionDenied, match="pickle"):
            client.rpc_sync("server", "double", kwargs={"x": arguments})
    assert not target.exists()
    assert client.rpc_sync("server", "double", args=([1, {"deep": (2,)}],)) == [1, {"deep": (2,)}] * 2


def test_a_pickled_result_is_refused_and_not_loaded(
    server: tensorferry.Agent, client: tensorferry.Agent, tmp_path: Path
) -> None:
    target = tmp_path / "touched"
    client.expose(lambda: [1, Touch(target)], name="trick")
    with pytest.raises(errors.PermissionDenied, match="pickle"):
        server.rpc_sync("client", "trick")
    with pytest.raises(errors.PermissionDenied, match="pickle"):
        server.rpc_async("client", "trick").wait()
    with pytest.raises(errors.PermissionDenied, match="pickle"):
        server.remote("client", "trick").to_here()
    assert not target.exists()


def test_the_pickle_of_an_exception_is_not_read(
    server: tensorferry.Agent, client: tensorferry.Agent, tmp_path: Path
) -> None:
    target = tmp_path / "touched"

    def trick() -> None:
        raise ValueError("the text", Touch(target))

    client.expose(trick)
    with pytest.raises(ValueError, match="the text"):
        server.rpc_sync("client", "trick")
    assert not target.exists()


def test_exceptions_arrive_as_builtin_types_or_described(server: tensorferry.Agent, client: tensorferry.Agent) -> None:
    server.expose(fail)
    client.expose(fail)
    for caller, callee in ((client, "server"), (server, "client")):
        with pytest.raises(ValueError, match="no such thing"):
            caller.rpc_sync(callee, "fail", args=("value",))
    with pytest.raises(errors.RemoteError, match="odd"):  # its type was not exposed here
        server.rpc_sync("client", "fail", args=("unusual",))
    server.expose(Unusual)
    with pytest.raises(Unusual, match="odd"):
        server.rpc_sync("client", "fail", args=("unusual",))


def test_a_traceback_says_nothing_of_the_program(server: tensorferry.Agent, client: tensorferry.Agent) -> None:
    for agent in (server, client):
        agent.expose(fail)
    with pytest.raises(ValueError, match="no such thing") as caught:
        client.rpc_sync("server", "fail", args=("value",))
    text = str(caught.value.__cause__)
    assert text.endswith("ValueError: no such thing")
    for secret in (__file__, Path(__file__).name, "line", "raise", "fail("):
        assert secret not in text, text
    with pytest.raises(ValueError, match="no such thing") as caught:  # an agent with trust="full" sends it all
        server.rpc_sync("client", "fail", args=("value",))
    assert Path(__file__).name in str(caught.value.__cause__)


def fail_because_of_another() -> None:
    try:
        raise KeyError("the first")
    except KeyError as first:
        raise ValueError("the second") from first


def fail_with_a_note() -> None:
    error = ValueError("noted")
    error.__notes__ = [f"see {__file__}"]
    raise error


async def fail_in_a_coroutine() -> None:
    raise ValueError("awaited")


def fail_in_a_stream() -> Iterator[int]:
    yield 1
    raise ValueError("streamed")


class Failing:
    def fail(self) -> None:
        raise ValueError("a method")


def takes_one(one: int) -> int:
    return one


def texts_of(error: BaseException) -> str:
    """All that the caller can see of the exception."""
    cause = traceback.format_exception(type(error.__cause__), error.__cause__, None)
    return "".join([str(error), repr(vars(error)), *cause])


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.rpc_sync("server", "fail_because_of_another"),
        lambda client: client.rpc_sync("server", "fail_with_a_note"),
        lambda client: client.rpc_sync("server", "fail_in_a_coroutine"),
        lambda client: client.rpc_async("server", "fail_because_of_another").wait(),
        lambda client: client.remote("server", "fail_because_of_another").to_here(),
        lambda client: list(client.rpc_stream("server", "fail_in_a_stream")),
        lambda client: client.remote("server", "Failing").rpc_sync().fail(),
        lambda client: client.rpc_sync("server", "takes_one"),
        lambda client: client.rpc_sync("server", "pickled_result"),
    ],
    ids=["cause", "note", "coroutine", "future", "remote", "stream", "method", "arguments", "result"],
)
def test_no_exception_tells_files_or_lines(
    server: tensorferry.Agent, client: tensorferry.Agent, call: Callable[[tensorferry.Agent], Any]
) -> None:
    for each in (fail_because_of_another, fail_with_a_note, fail_in_a_coroutine, fail_in_a_stream):
        server.expose(each)
    for each in (Failing, takes_one, pickled_result):
        server.expose(each)
    with pytest.raises(Exception) as caught:
        call(client)
    told = texts_of(caught.value)
    for secret in (__file__, Path(__file__).name, "site-packages", ", line ", "raise "):
        assert secret not in told, told


def test_values_that_need_a_pickle_are_not_sent(server: tensorferry.Agent, client: tensorferry.Agent) -> None:
    with pytest.raises(TypeError, match="sends no pickles"):
        server.rpc_sync("client", double, args=(Hidden(),))
    with pytest.raises(TypeError, match="sends no pickles"):
        server.rpc_sync("client", lambda: 1)
    server.expose(pickled_result)
    with pytest.raises(TypeError, match="sends no pickles"):
        client.rpc_sync("server", "pickled_result")


# ---- references


def test_methods_of_exposed_classes_can_be_called(server: tensorferry.Agent, client: tensorferry.Agent) -> None:
    server.expose(Counter)
    counter = client.remote("server", "Counter", args=(5,))
    assert counter.rpc_sync().add(2) == 7
    assert counter.rpc_async().add(n=1).wait() == 8
    assert counter.remote().add(1).to_here() == 9
    assert counter.rpc_sync().zero() == 0
    assert counter.rpc_sync().__call__() == 9
    assert client.remote("server", Counter).rpc_sync().add(1) == 1


@pytest.mark.parametrize(
    "method", ["_reset", "__init__", "__reduce__", "__class__", "hook", "trap", "limit", "missing"]
)
def test_only_methods_of_exposed_classes_can_be_called(
    server: tensorferry.Agent, client: tensorferry.Agent, method: str
) -> None:
    server.expose(Counter)
    counter = client.remote("server", "Counter", args=(5,))
    with pytest.raises(errors.PermissionDenied, match=f'method "{method}" of a Counter'):
        counter.rpc_sync()._call(method, -1.0, False)
    with pytest.raises(errors.PermissionDenied, match=f'method "{method}" of a Counter'):
        counter.remote()._call(method, -1.0, False).to_here()
    assert counter.rpc_sync().add(0) == 5


def test_methods_of_other_classes_cannot(server: tensorferry.Agent, client: tensorferry.Agent) -> None:
    server.expose(make_hidden)
    hidden = client.remote("server", "make_hidden")
    with pytest.raises(errors.PermissionDenied, match="the class was not exposed"):
        hidden.rpc_sync().run()
    with pytest.raises(errors.PermissionDenied):
        client.remote("server", Hidden).to_here()


# ---- hand-made frames


@pytest.mark.parametrize("trust", ["registered", "full"])
def test_a_hand_made_frame_with_a_pickle_is_refused(agents: Agents, tmp_path: Path, trust: str) -> None:
    sockets = tempfile.TemporaryDirectory(prefix="tf-")  # tmp_path is too long for the address of a unix socket
    folder = Path(sockets.name)
    server = agents("server", socket_dir=sockets.name, trust=trust)
    server.expose(str, name="text")
    target = tmp_path / "touched"
    stream = pickle.dumps(Touch(target))
    value = b"\x12" + varint(2 * len(stream)) + stream + varint(0) + varint(0)
    peer = RawPeer(str(*folder.iterdir()), "stranger")

    code_of = {0: "reply", 1: "error"}
    arguments = b"\x00" + varint(1) + value + varint(0)
    packed = b"\x02" + value
    answers = [
        peer.call(function, payload)
        for function in ("text", "py:builtins:str", "tf:call")
        for payload in (arguments, packed)
    ]
    if trust == "full":  # so the frames are good ones
        assert code_of[answers[0][0]] == "reply"
        assert target.exists()
    else:
        permission_denied = 5
        assert [(code_of[flags & 1], payload[0]) for flags, payload in answers] == [("error", permission_denied)] * 6
        assert not target.exists()
        assert peer.call("text", b"\x00" + varint(1) + b"\x43abc" + varint(0)) == (0, b"\x00\x43abc")


# ---- objects


def yield_all(items: list[int]) -> Iterator[int]:
    yield from items


@pytest.mark.parametrize("trust", ["registered", "full"])
@pytest.mark.parametrize("as_whom", ["stranger", "holder"])
def test_a_peer_without_a_reference_cannot_use_an_object(agents: Agents, trust: str, as_whom: str) -> None:
    """A stranger, also one that says it has the holder's incarnation, knows all that can be guessed."""
    sockets = tempfile.TemporaryDirectory(prefix="tf-")
    server = agents("server", socket_dir=sockets.name, trust=trust)
    server.expose(Counter)
    server.expose(yield_all)
    client = agents("client")
    counter = client.remote("server", "Counter", args=(5,))
    assert counter.rpc_sync().add(1) == 6
    stream = client.rpc_stream("server", "yield_all", args=([1, 2, 3],), window=1)
    assert next(stream) == 1
    holder = int(repr(counter).split()[-1].split(":")[0])
    peer = RawPeer(str(*Path(sockets.name).iterdir()), "stranger", holder if as_whom == "holder" else 0)

    permission_denied = 5
    for number in (1, 2):  # the counter, and the generator
        for nonce, fork in [(0, (0, 0, 0)), (0, (holder, number, 0)), (number, (holder, number, 1))]:
            target = struct.pack("<7Q", peer.server, holder, number, nonce, *fork)
            fetched = peer.call("tf:fetch", target + b"\x00")
            assert (fetched[0] & 1, fetched[1][0]) == (1, permission_denied)
            for function, method in [("tf:method", b"add"), ("tf:next", b"__next__")]:
                named = target + method
                first = b"\x08" + varint(2 * len(named)) + named
                flags, payload = peer.call(function, b"\x00" + varint(2) + first + b"\x03\x02" + varint(0))
                assert b"holds no reference to the object" in payload, (flags, payload)
    assert counter.rpc_sync().add(0) == 6
    assert list(stream) == [2, 3]


def use(counter: rpc.RRef[Counter]) -> int:
    return counter.rpc_sync().add(1)


def pass_on(to: str, counter: rpc.RRef[Counter]) -> int:
    return rpc.rpc_sync(to, use, args=(counter,))


@pytest.mark.parametrize("passes", range(3))
def test_a_holder_uses_an_object_at_once(agents: Agents, passes: int) -> None:
    """Also before the owner has heard that the object was passed on, or made."""
    server = agents("server", trust="registered")
    server.expose(Counter)
    first, _, _ = (agents(name) for name in ("first", "second", "third"))
    for _ in range(30):
        counter = first.remote("server", "Counter")
        if passes == 0:
            assert use(counter) == 1
        elif passes == 1:
            assert first.rpc_sync("second", use, args=(counter,)) == 1
        else:
            assert first.rpc_sync("second", pass_on, args=("third", counter)) == 1
        assert counter.rpc_sync().add(1) == 2


def open_here(counter: rpc.RRef[Any]) -> Any:
    return counter._next(0.0, 1, "items").wait()


def test_only_the_agent_that_opened_a_stream_gets_its_items(agents: Agents) -> None:
    server = agents("server", trust="registered")
    server.expose(yield_all)
    client = agents("client")
    agents("other")
    generator = client.remote("server", "yield_all", args=([1, 2],))
    generator._check()
    assert generator._next(0.0, 1, "items").wait() == (1,)
    with pytest.raises(errors.PermissionDenied, match="a stream that another agent opened"):
        client.rpc_sync("other", open_here, args=(generator,))
    assert generator._next(0.0, 1, "items").wait() == (2,)
