"""Every public docstring describes the arguments and the exceptions, and gives an example that runs."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import pytest
import tensorferry
import tensorferry.ddp
import tensorferry.rpc as rpc
import tensorferry.standalone
import torch
from tensorferry import _C

MODULES = [
    tensorferry, tensorferry.rpc, tensorferry.rpc.functions, tensorferry.futures, tensorferry.errors, tensorferry.ddp,
    tensorferry.standalone,
]  # fmt: skip

# What need not say that it raises something.
RAISES_NOTHING = {
    "tensorferry.rpc.is_available": "is always true",
    "tensorferry.rpc.cancelled": "only answers",
    "tensorferry.rpc.BackendType": "an enumeration",
    "tensorferry.Shared": "made by share() alone",
    "tensorferry.Registered": "made by register() alone",
    "tensorferry.Registered.release": "does nothing where it has ended",
    "tensorferry.Future": "made by calls alone",
    "tensorferry.Future.done": "only answers",
    "tensorferry.Future.cancel": "does nothing where it is too late",
    "tensorferry.rpc.RRef.is_owner": "only answers",
    "tensorferry.rpc.RRef.owner_name": "only answers",
    "tensorferry.rpc.RRef.confirmed_by_owner": "only answers",
    "tensorferry.Agent.leave": "leaves in any case",
    "tensorferry.Stream.close": "closes in any case",
    "tensorferry.Peer": "made by peer() alone",
    "tensorferry.Peer.ordered": "asks nothing of the peer",
    "tensorferry.rpc.Published": "made by publish() alone",
    "tensorferry.Publication": "made by publish() alone",
    "tensorferry.Version": "made by subscriptions alone",
    "tensorferry.Subscription": "made by subscribe() alone",
    "tensorferry.Loader": "made by into() alone",
    "tensorferry.Notification": "made by regions alone",
}
# Classes whose constructors are the package's own.
MADE_FOR_YOU = {
    "tensorferry.Stream": "made by rpc_stream() alone",
    "tensorferry.Peer": "made by peer() alone",
    "tensorferry.Registered": "made by register() alone",
    "tensorferry.Region": "made by find_region() alone",
    "tensorferry.OwnRegion": "made by region() alone",
    "tensorferry.Publication": "made by publish() alone",
    "tensorferry.Version": "made by subscriptions alone",
    "tensorferry.Subscription": "made by subscribe() alone",
    "tensorferry.Loader": "made by into() alone",
    "tensorferry.Notification": "made by regions alone",
}
# Examples that the tests below cannot run as they stand.
NOT_RUN = {
    "tensorferry.rpc.init_rpc": "starts the default agent, which is there already: test_init.py",
    "tensorferry.rpc.shutdown": "ends the default agent: test_shutdown.py",
}


@dataclasses.dataclass(frozen=True)
class Public:
    """A public thing: its name, and the class that it belongs to."""

    name: str
    thing: Any
    owner: type | None = None

    @property
    def doc(self) -> str:
        return inspect.cleandoc(self.thing.__doc__ or "")

    @property
    def is_error(self) -> bool:
        return inspect.isclass(self.thing) and issubclass(self.thing, BaseException)

    @property
    def is_property(self) -> bool:
        return isinstance(self.thing, property) or inspect.isdatadescriptor(self.thing)


def is_ours(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).startswith("tensorferry") or type(thing).__name__ in (
        "builtin_function_or_method",
        "method_descriptor",
    )


def members(name: str, kind: type) -> Iterator[Public]:
    for base in kind.__mro__:
        if not base.__module__.startswith("tensorferry"):
            continue
        for member, thing in vars(base).items():
            thing = thing.__func__ if isinstance(thing, staticmethod | classmethod) else thing
            if not member.startswith("_") and (inspect.isroutine(thing) or isinstance(thing, property)):
                yield Public(f"{name}.{member}", thing, kind)


def everything() -> list[Public]:
    found: dict[str, Public] = {}
    seen: set[int] = set()
    for module in MODULES:
        for name in reversed(module.__all__):  # RRef, before its other name PyRRef
            thing = getattr(module, name)
            if isinstance(thing, types.ModuleType | str) or id(thing) in seen or thing is tensorferry.ddp.GradBucket:
                continue  # that one is torch's
            seen.add(id(thing))
            public = Public(f"{module.__name__}.{name}", thing)
            found[public.name] = public
            if inspect.isclass(thing) and not public.is_error:
                found.update({each.name: each for each in members(public.name, thing)})
    return list(found.values())


EVERYTHING = everything()
of_each = pytest.mark.parametrize("public", [pytest.param(each, id=each.name) for each in EVERYTHING])


def section(doc: str, title: str) -> str | None:
    found = re.search(rf"^{title}:\n((?:[ \t]+.*\n|\n)*)", doc + "\n", re.MULTILINE)
    return found[1] if found else None


def documented_signature(thing: Any) -> ast.arguments:
    """The parameters in the first line of the docstring of a function that was made in C++."""
    return ast.parse(f"def {thing.__doc__.splitlines()[0]}: ...").body[0].args  # type: ignore[attr-defined]


def parameters(public: Public) -> list[str]:
    try:
        names = list(inspect.signature(public.thing).parameters)
    except (TypeError, ValueError):
        thing = public.thing.__init__ if inspect.isclass(public.thing) else public.thing
        if inspect.isclass(public.thing) and not thing.__doc__.startswith("__init__("):
            return []  # without a constructor
        said = documented_signature(thing)
        names = [each.arg for each in [*said.args, *said.kwonlyargs]]
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def test_the_walk_finds_the_public_names() -> None:
    names = {each.name for each in EVERYTHING}
    assert {
        "tensorferry.Agent",
        "tensorferry.Agent.rpc_sync",
        "tensorferry.Agent.shutdown",
        "tensorferry.Future.wait",
        "tensorferry.share",
        "tensorferry.rpc.RRef.to_here",
        "tensorferry.rpc.rpc_async",
        "tensorferry.rpc.functions.async_execution",
        "tensorferry.errors.ConnectionLost",
    } <= names
    assert RAISES_NOTHING.keys() | MADE_FOR_YOU.keys() | NOT_RUN.keys() <= names


@of_each
def test_docstrings_have_a_summary(public: Public) -> None:
    assert len(public.doc) > 20 and public.doc != inspect.cleandoc(object.__doc__ or "")


def takes_arguments(public: Public) -> bool:
    exempt = public.is_property or public.name in MADE_FOR_YOU
    return not exempt and public.thing is not tensorferry.rpc.BackendType


@of_each
def test_docstrings_name_every_argument(public: Public) -> None:
    if not takes_arguments(public) or (public.is_error and "__init__" not in vars(public.thing)):
        return
    wanted = parameters(public)
    said = section(public.doc, "Args") or ""
    missing = [name for name in wanted if name != "options" and not re.search(rf"\b{name}\b[^\n]*:", said)]
    assert not missing, f"{public.name}: Args: lacks {missing}"


@of_each
def test_docstrings_name_the_exceptions(public: Public) -> None:
    exempt = public.is_property or public.is_error or dataclasses.is_dataclass(public.thing)
    if exempt or public.name in RAISES_NOTHING:
        return
    assert section(public.doc, "Raises"), f"{public.name}: no Raises:"


def example_of(public: Public) -> str | None:
    found = re.search(r"^Example::\n\n((?:[ \t]+.*\n|\n)*)", public.doc + "\n", re.MULTILINE)
    return textwrap.dedent(found[1]) if found else None


@of_each
def test_docstrings_have_an_example(public: Public) -> None:
    """A method may be shown in its class's."""
    if public.is_error or public.is_property or example_of(public):
        return
    classes = example_of(Public("", public.owner)) if public.owner else None
    assert classes and f".{public.name.rpartition('.')[2]}(" in classes, f"{public.name}: no Example::"


@pytest.fixture
def place(agents, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A module for an example, in a process with the agents "worker0" (the default one), "worker1" and "server"."""
    monkeypatch.setattr(tensorferry.exposing, "everywhere", _C.Exposed())
    for rank, name in enumerate(("worker0", "worker1", "server")):
        agent = agents(name, rank=rank)
        if rank == 0:
            _C.set_default_agent(agent)
    module = types.ModuleType("example")
    vars(module).update(asyncio=asyncio, collections=__import__("collections"), torch=torch)
    vars(module).update(tensorferry=tensorferry, rpc=rpc)
    sys.modules["example"] = module
    yield module
    del sys.modules["example"]
    _C.set_default_agent(None)


RUNNABLE = [each for each in EVERYTHING if example_of(each) and each.name not in NOT_RUN]


@pytest.mark.parametrize("public", [pytest.param(each, id=each.name) for each in RUNNABLE])
def test_examples_of_docstrings_run(public: Public, place: types.ModuleType) -> None:
    example = example_of(public)
    assert example
    code = compile(example, public.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:

        async def run() -> None:
            await eval(code, vars(place))

        asyncio.run(run())
    else:
        exec(code, vars(place))
