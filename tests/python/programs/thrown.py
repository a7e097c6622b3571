"""A rank of two whose program throws on the library's threads: thrown.py FOLDER RANK.

Rank 0 goes through CASES: in each, code of the program throws on a thread that the library has started, here or at rank
1. Both processes then still serve calls and operations. Prints "survived" and the number of cases.

Functions that peers call are found by the name of this module, so it imports itself.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import tensorferry.c10d
import tensorferry.rpc as rpc
import torch
import torch.distributed as dist
from tensorferry.collectives import Group
from tensorferry.rpc import functions


class Meant(Exception):
    """What all of them throw."""


class Unprintable(Exception):
    def __str__(self) -> str:
        raise Meant("__str__")

    __repr__ = __str__


def fail(*_: object) -> Any:
    raise Meant("this is meant")


def leave(*_: object) -> Any:
    raise SystemExit(3)


class Bomb:
    """Raises when it is destroyed."""

    def __del__(self) -> None:
        raise Meant("__del__")


class Unsendable:
    def __reduce__(self) -> Any:
        raise Meant("__reduce__")


class Unreadable:
    def __getstate__(self) -> dict[str, int]:
        return {"a": 1}

    def __setstate__(self, _: object) -> None:
        raise Meant("__setstate__")


# ---- functions that rank 0 calls at rank 1


def take(*_: object) -> None:
    """Drops its arguments on the thread that serves it."""


def fail_unprintably() -> None:
    raise Unprintable


def items() -> Iterator[int]:
    try:
        yield from range(1000)
    finally:
        fail()


async def fail_slowly() -> None:
    await asyncio.sleep(0)
    fail()


async def fail_when_cancelled() -> None:
    try:
        await asyncio.sleep(100)
    except asyncio.CancelledError:
        fail()


async def leave_a_task_that_exits() -> None:
    async def exits() -> None:
        leave()

    kept.append(asyncio.ensure_future(exits()))


@functions.async_execution
def failing_future() -> Any:
    return rpc.rpc_async("rank1", max, (1, 2)).then(fail)


@functions.async_execution
def unsendable_future() -> Any:
    return rpc.rpc_async("rank1", max, (1, 2)).then(lambda _: Unsendable())


def sum_of_all() -> float:
    ones = torch.ones(10)
    dist.all_reduce(ones)
    return ones[0].item()


def reduce_in_group() -> None:
    groups[0].all_reduce(torch.ones(10), op="sum" if rank == 0 else add).wait()


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


async def seven() -> int:
    return 7


class FailingHandler(logging.Handler):
    emit = fail  # type: ignore[assignment]


def observe() -> None:
    """Lets each log record, and each exception that Python cannot hand to a caller, raise another exception."""
    logger = logging.getLogger("tensorferry")
    logger.setLevel(logging.INFO)
    logger.addHandler(FailingHandler())
    sys.unraisablehook = fail


# ---- the cases


def raises(kind: type[BaseException], call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def completed(future: Any) -> Any:
    """Waits until a thread of the library has completed the future."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    assert done.wait(60)
    return future


def call(function: Callable[..., Any], *arguments: object) -> Any:
    return rpc.rpc_async("rank1", function, arguments)


def operation() -> Any:
    """The torch future of an operation, which a thread of the library completes."""
    other = call(sum_of_all)
    kept.append(other)
    return dist.all_reduce(torch.ones(10), async_op=True).get_future()


def stream() -> None:
    with rpc.rpc_stream("rank1", items) as got:
        next(got)


def reduction_that_fails() -> None:
    other = call(reduce_in_group)
    raises(RuntimeError, lambda: groups[0].all_reduce(torch.ones(10), op=fail).wait())
    completed(other)


def closure_with_a_bomb() -> None:
    def callback(_: object, bomb: Bomb = Bomb()) -> None:  # noqa: B008
        del bomb

    completed(call(max, 1, 2)).add_done_callback(callback)


def finalizer_that_fails() -> None:
    bomb = Bomb()
    kept.append(weakref.ref(bomb, fail))
    call(max, 1, 2).then(lambda _, bomb=bomb: None)


def remote_bomb() -> None:
    reference = rpc.remote("rank1", Bomb)
    reference.rpc_sync().__eq__(1)
    del reference


CASES: dict[str, Callable[[], object]] = {
    "a done callback": lambda: completed(call(max, 1, 2)).add_done_callback(fail),
    "a done callback that exits": lambda: call(max, 1, 2).add_done_callback(leave),
    "a function of then()": lambda: call(max, 1, 2).then(fail),
    "a function of then() that exits": lambda: completed(call(max, 1, 2).then(leave)),
    "a function of then() of a dropped future that fails unprintably": lambda: call(fail_unprintably).then(fail),
    "a done callback of a torch future": lambda: operation().add_done_callback(fail),
    "a function of then() of a torch future": lambda: completed(operation().then(fail)),
    "a function of then() of a torch future that exits": lambda: completed(operation().then(leave)),
    "a reduction": reduction_that_fails,
    "the destructor of an argument": lambda: call(take, Bomb()).wait(),
    "the destructor of a result": lambda: call(Bomb),
    "the destructor of what a callback holds": closure_with_a_bomb,
    "the callback of a weak reference": finalizer_that_fails,
    "the destructor of an object that a reference held": remote_bomb,
    "the encoder of a result": lambda: raises(Exception, call(Unsendable).wait),
    "the decoder of an argument": lambda: raises(Meant, call(take, Unreadable()).wait),
    "the decoder of a result": lambda: raises(Meant, completed(call(Unreadable)).wait),
    "a function whose exception has no text": lambda: raises(Exception, call(fail_unprintably).wait),
    "a function that exits": lambda: raises(RuntimeError, call(leave).wait),
    "a generator that is closed": stream,
    "a coroutine": lambda: raises(Meant, call(fail_slowly).wait),
    "a coroutine that is cancelled": lambda: call(fail_when_cancelled).cancel(),
    "a task that a coroutine leaves behind": lambda: call(leave_a_task_that_exits).wait(),
    "the future of a function": lambda: raises(Meant, call(failing_future).wait),
    "the encoder of the future of a function": lambda: raises(Exception, call(unsendable_future).wait),
}


def check_that_all_goes_on() -> None:
    assert call(max, 1, 2).wait(60) == 2
    assert call(seven).wait(60) == 7
    assert rpc.rpc_async("rank0", max, (3, 4)).wait(60) == 4
    others = call(sum_of_all)
    assert sum_of_all() == 2 == others.wait(60)


def main() -> None:
    global rank
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    store = dist.FileStore(str(folder / "store"), 2)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, store=store)
    dist.init_process_group("tensorferry", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=100))
    groups.append(tensorferry.collectives.form_group(["rank0", "rank1"], label="own"))
    if rank == 0:
        for observed in False, True:
            if observed:
                observe()
                call(observe).wait()
            for name, case in CASES.items():
                print(name, file=sys.stderr, flush=True)
                case()
                check_that_all_goes_on()
    rpc.shutdown()
    dist.destroy_process_group()
    print("survived", len(CASES), flush=True)


rank = -1
kept: list[Any] = []
groups: list[Group] = []

if __name__ == "__main__":
    import thrown

    thrown.main()
