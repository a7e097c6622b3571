"""Shapes of calls, drawn at random: who calls, over a new link or a warm one, how the call is awaited, what the waiting
thread does meanwhile, what travels, and how. Every call ends soon after it could.

``TENSORFERRY_SEED=7`` draws the same shapes again. tests/rpc/cpp/call_shapes_test.cpp has the same for C++.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import subprocess
import threading
import time
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import tensorferry
import torch
import torch.distributed as dist
from conftest import repeated

PROMISED = 1  # seconds; what takes longer is counted
LIMIT = 10


class Shape(NamedTuple):
    caller: str
    link: str
    awaited: str
    meanwhile: str
    payload: str
    cores: str

    def __str__(self) -> str:
        return (
            f"called by {self.caller} over a {self.link} link with {self.payload}, awaited by {self.awaited}, "
            f"meanwhile the thread {self.meanwhile}, cores {self.cores}"
        )


VALUES = Shape(
    ("the main thread", "a handler", "an async handler", "a callback", "a task", "four threads"),
    ("new", "warm"),
    ("wait", "then", "a done callback", "await", "torch's wait_all", "wait_all", "as_completed", "dropping it"),
    ("does nothing", "waits for an event", "computes", "sleeps"),
    ("nothing", "1 KB", "1 MB", "a structure sent again", "a reference", "an exception"),
    ("free", "busy"),
)


def all_pairs(rng: random.Random) -> list[Shape]:
    """Shapes in which any value of a property meets any value of another."""
    missing = {
        (a, v, b, w)
        for a, b in itertools.combinations(range(len(VALUES)), 2)
        for v, w in itertools.product(VALUES[a], VALUES[b])
    }
    shapes = []
    while missing:
        a, v, b, w = min(missing)
        values = [rng.choice(values) for values in VALUES]
        values[a], values[b] = v, w
        shapes.append(Shape(*values))
        missing = {pair for pair in missing if (values[pair[0]], values[pair[2]]) != (pair[1], pair[3])}
    return shapes


# ---- at the callee


def nothing():
    return None


def same(value):
    return value


def fail():
    raise KeyError("as asked")


class Value:
    def __init__(self, number):
        self.number = number

    def twice(self):
        return 2 * self.number


def use(reference):
    return reference.to_here(LIMIT).number


# ---- at the caller


def structure():
    return {"a": [torch.ones(2000), torch.ones(3)], "b": ("text" * 100, {1, 2}), "c": torch.ones(3000)}


def is_right(payload: str, value: Any) -> bool:
    match payload:
        case "nothing":
            return value is None
        case "1 KB" | "1 MB":
            return value.numel() == (256 if payload == "1 KB" else 1 << 18) and bool((value == 1).all())
        case "a structure sent again":
            return value["c"].numel() == 3000 and value["b"][1] == {1, 2}
        case "a reference":
            return value == 6
        case _:
            return False


def make(agent: tensorferry.Agent, peer: str, payload: str) -> Any:
    """The future of a call."""
    call = {
        "nothing": (nothing, ()),
        "1 KB": (same, (torch.ones(256),)),
        "1 MB": (same, (torch.ones(1 << 18),)),
        "a structure sent again": (same, (structure(),)),
        "an exception": (fail, ()),
    }
    if payload == "a reference":
        reference = agent.remote(peer, Value, (6,), timeout=LIMIT)
        return agent.rpc_async(peer, use, (reference,), timeout=LIMIT)
    function, args = call[payload]
    return agent.rpc_async(peer, function, args, timeout=LIMIT)


def compute(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(100))


def wait_meanwhile(meanwhile: str, holds: Any) -> bool:
    until = time.monotonic() + LIMIT
    while not holds():
        if time.monotonic() > until:
            return False
        if meanwhile == "computes":
            compute(0.0002)
        else:
            time.sleep(0.0002)
    return True


def outcome(payload: str, take: Any) -> str:
    """What is wrong with the result; "": nothing."""
    try:
        value = take()
    except KeyError as error:
        return "" if payload == "an exception" and "as asked" in str(error) else repr(error)
    except Exception as error:
        return repr(error)
    return "" if is_right(payload, value) else f"a wrong result: {value!r}"


def before_waiting(agent: tensorferry.Agent, peer: str, meanwhile: str) -> str:
    """What the thread does between making the call and waiting for it."""
    match meanwhile:
        case "waits for an event":  # another call's
            event = threading.Event()
            agent.rpc_async(peer, nothing, timeout=LIMIT).add_done_callback(lambda _: event.set())
            if not event.wait(LIMIT):
                return "a callback did not run"
        case "computes":
            compute(0.001)
        case "sleeps":
            time.sleep(0.001)
    return ""


def after_callback(future: Any, shape: Shape, ran: threading.Event) -> str:
    """Waits for an event that a callback sets."""
    if shape.meanwhile in ("does nothing", "waits for an event"):
        return "" if ran.wait(LIMIT) else "a callback did not run"
    return "" if wait_meanwhile(shape.meanwhile, ran.is_set) else "a callback did not run"


def once(agent: tensorferry.Agent, peer: str, shape: Shape) -> str:
    future = make(agent, peer, shape.payload)
    match shape.awaited:
        case "then":
            ran = threading.Event()
            results: list[str] = []

            def called(done: Any) -> None:
                results.append(outcome(shape.payload, done.wait))
                ran.set()

            future.then(called)
            return after_callback(future, shape, ran) or results[0]
        case "a done callback":
            ran = threading.Event()
            future.add_done_callback(lambda _: ran.set())
            return after_callback(future, shape, ran) or outcome(shape.payload, future.value)
        case "dropping it":
            del future
            ended = wait_meanwhile(shape.meanwhile, lambda: agent._in_flight()[0] == 0)
            return "" if ended else "did not end"
    if wrong := before_waiting(agent, peer, shape.meanwhile):
        return wrong
    match shape.awaited:
        case "wait":
            return outcome(shape.payload, lambda: future.wait(LIMIT))
        case "torch's wait_all":
            return outcome(shape.payload, lambda: torch.futures.wait_all([future])[0])
        case "wait_all":
            return outcome(shape.payload, lambda: tensorferry.wait_all([future], LIMIT)[0])
        case "as_completed":
            return outcome(shape.payload, lambda: next(tensorferry.as_completed([future], LIMIT)).wait())
    return outcome(shape.payload, lambda: asyncio.run(wait_for(future)))


async def wait_for(future: Any) -> Any:
    return await future


async def once_in_task(agent: tensorferry.Agent, peer: str, shape: Shape) -> str:
    """Awaits without blocking the event loop. The other ways to wait block it, as programs do."""
    if shape.awaited != "await":
        return once(agent, peer, shape)
    future = make(agent, peer, shape.payload)
    match shape.meanwhile:
        case "waits for an event":
            event = asyncio.Event()

            async def other() -> None:
                await agent.rpc_async(peer, nothing, timeout=LIMIT)
                event.set()

            task = asyncio.create_task(other())
            await event.wait()
            await task
        case "computes":
            compute(0.001)
        case "sleeps":
            await asyncio.sleep(0.001)
    try:
        value = await future
    except KeyError as error:
        return "" if shape.payload == "an exception" else repr(error)
    return "" if is_right(shape.payload, value) else f"a wrong result: {value!r}"


def run(agent: tensorferry.Agent, peer: str, shape: Shape) -> str:
    times = 2 if shape.payload == "a structure sent again" else 1
    return next(filter(None, (once(agent, peer, shape) for _ in range(times))), "")


async def run_in_task(agent: tensorferry.Agent, peer: str, shape: Shape) -> str:
    for _ in range(2 if shape.payload == "a structure sent again" else 1):
        if wrong := await once_in_task(agent, peer, shape):
            return wrong
    return ""


callers: dict[str, tensorferry.Agent] = {}


def run_in_handler(name: str, peer: str, shape: tuple[str, ...]) -> str:
    return run(callers[name], peer, Shape(*shape))


async def run_in_async_handler(name: str, peer: str, shape: tuple[str, ...]) -> str:
    return await run_in_task(callers[name], peer, Shape(*shape))


# ---- in the process of the callees, and of the agent that calls the caller's handlers

others: dict[str, tensorferry.Agent] = {}


def join_others(names: list[str], port: int, options: dict[str, Any]) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    for name in names:
        others[name] = tensorferry.Agent(name, store=store, **options)


def leave_others(names: list[str]) -> None:
    for name in names:
        others.pop(name).leave()


def call_caller(function: Any, *args: Any) -> str:
    return others["outer"].rpc_sync("caller", function, args, timeout=2 * LIMIT)


class Stage:
    """The caller in this process, the others in a worker's."""

    def __init__(self, worker: Any, transport: str) -> None:
        self.worker = worker
        self.options = {"unix_sockets": transport != "tcp", "shared_memory": transport == "ring"}
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.made = itertools.count()
        worker.run(join_others, ["warm", "outer"], self.store.port, self.options)
        self.caller = callers["caller"] = tensorferry.Agent("caller", store=self.store, **self.options)
        self.caller.rpc_sync("warm", nothing)

    def new_peers(self, count: int) -> list[str]:
        names = [f"new{next(self.made)}" for _ in range(count)]
        self.worker.run(join_others, names, self.store.port, self.options)
        return names

    def run(self, shape: Shape, peer: str) -> str:
        match shape.caller:
            case "a handler":
                self.worker.start(call_caller, run_in_handler, "caller", peer, tuple(shape))
                return self.worker.result(3 * LIMIT)
            case "an async handler":
                self.worker.start(call_caller, run_in_async_handler, "caller", peer, tuple(shape))
                return self.worker.result(3 * LIMIT)
            case "a callback":
                before = self.caller.rpc_async("warm", nothing, timeout=LIMIT)
                return before.then(lambda _: run(self.caller, peer, shape)).wait(3 * LIMIT)
            case "a task":
                return asyncio.run(run_in_task(self.caller, peer, shape))
            case "four threads":
                verdicts: list[str] = []
                threads = [
                    threading.Thread(target=lambda: verdicts.append(run(self.caller, peer, shape))) for _ in range(4)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(3 * LIMIT)
                return next(filter(None, verdicts), "") if len(verdicts) == 4 else "a thread did not end"
        return run(self.caller, peer, shape)

    def outcome(self, shape: Shape, peer: str) -> str:
        try:
            return self.run(shape, peer)
        except Exception as error:
            return repr(error)

    def close(self) -> None:
        callers.clear()
        self.caller.leave()
        self.worker.run(leave_others, ["warm", "outer"])


@pytest.fixture
def busy_cores():
    hogs: list[subprocess.Popen[bytes]] = []

    def begin() -> None:
        hogs.extend(subprocess.Popen(["sh", "-c", "while kill -0 $PPID; do :; done"]) for _ in os.sched_getaffinity(0))

    yield begin
    for hog in hogs:
        hog.kill()
        hog.wait()


@repeated(200_000)
@pytest.mark.parametrize("transport", ["ring", "unix", "tcp"])
def test_every_call_ends(workers, busy_cores, transport, times):
    seed = int(os.environ.get("TENSORFERRY_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"TENSORFERRY_SEED={seed} draws these shapes again")
    rng = random.Random(seed)
    shapes = all_pairs(rng) if times == 200_000 else []
    shapes += [Shape(*map(rng.choice, VALUES)) for _ in range(times // 3 + 1)]
    slow = 0
    taken = workers.take(1)
    stage = Stage(taken[0], transport)
    try:
        for cores in VALUES.cores:
            if cores == "busy":
                busy_cores()
            drawn = [shape for shape in shapes if shape.cores == cores]
            for some in (drawn[i : i + 50] for i in range(0, len(drawn), 50)):
                new = stage.new_peers(sum(shape.link == "new" for shape in some))
                unused = iter(new)
                for shape in some:
                    peer = next(unused) if shape.link == "new" else "warm"
                    began = time.monotonic()
                    wrong = stage.outcome(shape, peer)
                    took = time.monotonic() - began
                    slow += took > PROMISED
                    state = f"seed {seed}: {shape}, after {took:.1f} s\n{stage.caller._link_state(peer)}"
                    assert wrong == "", f"{wrong}: {state}"
                    assert took < LIMIT, state
                stage.worker.run(leave_others, new)
        print(f"{len(shapes)} shapes, {slow} of them took more than a second")
    finally:
        stage.close()
        workers.give_back(taken)
