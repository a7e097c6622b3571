"""Gets a SIGINT in each public function of the package that blocks: interrupted_calls.py FOLDER.

The table says of each public function and method whether it blocks, and how to make it. A new one is in neither part,
and fails the check. Other functions of torch.distributed, and methods of Group, are in interrupted_rank.py.
"""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tensorferry
import tensorferry.c10d
import tensorferry.collectives
import tensorferry.ddp
import tensorferry.rendezvous
import tensorferry.rpc as rpc
import tensorferry.rpc.functions
import tensorferry.torch
import torch
import torch.distributed as dist
from interrupting import interrupt
from tensorferry import _C

FOLDER = Path(sys.argv[1])
MODULES = [
    tensorferry, rpc, rpc.functions, tensorferry.futures, tensorferry.collectives, tensorferry.c10d, tensorferry.ddp,
    tensorferry.torch, tensorferry.rendezvous,
]  # fmt: skip
TRANSPORT = importlib.util.find_spec("torch.distributed._transport") is not None  # torch 2.15 has it
if TRANSPORT:
    import tensorferry.transport

    MODULES.append(tensorferry.transport)
OF_INSTANCES = {"__next__", "__iter__", "__anext__", "__aiter__", "__await__", "__enter__", "__exit__", "__call__"}


# ---- a peer, and a store, that do not answer


def start_frozen() -> tuple[int, _C.Store]:
    """Forks a process with an agent "frozen" and a store, and stops it. Returns its pid, and the store."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a stopped process would keep the pipes open
        server = tensorferry.StoreServer()
        theirs.send(str(server.port).encode())
        theirs.recv(1)
        tensorferry.Agent("frozen", store=dist.FileStore(str(FOLDER / "agents"), -1))
        if TRANSPORT:
            (FOLDER / "transport").write_bytes(tensorferry.transport.RegionTransport().bind())
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    store = tensorferry.connect_store("127.0.0.1", int(ours.recv(10)))
    ours.send(b"x")
    os.waitpid(child, os.WUNTRACED)
    return child, store


signal.signal(signal.SIGINT, signal.default_int_handler)
child, frozen_store = start_frozen()
deaf = socket.create_server(("127.0.0.1", 0))  # takes connections, and says nothing
deaf_port = deaf.getsockname()[1]
free = socket.create_server(("127.0.0.1", 0))
closed_port = free.getsockname()[1]
free.close()
meeting = dist.FileStore(str(FOLDER / "agents"), -1)
b = tensorferry.Agent("b", store=meeting)
rpc.init_rpc("a", store=meeting)
a = rpc._current()


class Late:
    def late(self) -> None:
        time.sleep(100)


def items() -> Iterator[int]:
    time.sleep(100)
    yield 1


def sleeping() -> tensorferry.Future[None]:
    return rpc.rpc_async("b", time.sleep, (100,), timeout=0)


def world(**options: Any) -> Any:
    return tensorferry.Agent("w0", store=dist.HashStore(), rank=0, world_size=2, **options)


def join_default(**options: Any) -> None:
    """init_rpc(), while there is no default agent."""
    before = _C.default_agent()
    _C.set_default_agent(None)
    try:
        rpc.init_rpc("w1", rank=1, world_size=2, **options)
    finally:
        _C.set_default_agent(before)


def shut_down(agent: tensorferry.Agent) -> None:
    agent.rpc_async("b", time.sleep, (100,), timeout=0)
    agent.shutdown()


def member_of_a_world() -> tensorferry.Agent:
    """The agent of rank 0. That of rank 1 stays, and does not come to a shutdown."""
    store = dist.HashStore()
    join = lambda rank: tensorferry.Agent(f"m{rank}", store=store, rank=rank, world_size=2)  # noqa: E731
    with ThreadPoolExecutor(2) as pool:
        members.extend(pool.map(join, range(2)))
    return members[0]


def join_group(port: int, rank: int) -> None:
    dist.init_process_group("tensorferry", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


def pairs() -> tensorferry.collectives.Group:
    return tensorferry.collectives.form_group(["a", "b"], agent=a, label="pairs", timeout=100)


members: list[tensorferry.Agent] = []
member = member_of_a_world()
WEIGHTS = b.publish({"weight": torch.zeros(4)}, name="weights")
BLOCK: dict[str, Callable[[], Any]] = {
    "Agent": world,
    "Agent at a store that does not answer": lambda: tensorferry.Agent("late", store=frozen_store),
    "Agent.explain": lambda: a.explain("frozen"),
    "Agent.find_region": lambda: a.find_region("frozen", "cache"),
    "Agent.rpc_sync": lambda: a.rpc_sync("b", time.sleep, (100,)),
    "Agent.shutdown of a world": lambda: member.shutdown(),
    "Agent.shutdown": lambda: shut_down(tensorferry.Agent("c", store=meeting)),
    "Agent.subscribe": lambda: a.subscribe("weights", from_="frozen"),
    "Future.wait": lambda: sleeping().wait(),
    "OwnRegion.await_notification": lambda: rpc.region(tensorferry.empty(4), write=True).await_notification(),
    "Peer.rpc_sync": lambda: a.peer("b").rpc_sync(time.sleep, (100,)),
    "RRef.local_value": lambda: rpc.remote("a", time.sleep, (100,)).local_value(),
    "RRef.rpc_sync": lambda: rpc.remote("b", Late).rpc_sync().late(),
    "RRef.to_here": lambda: rpc.remote("b", time.sleep, (100,)).to_here(),
    "Store.add": lambda: frozen_store.add("key", 1),
    "Store.get": lambda: frozen_store.get("key", 100.0),
    "Store.set": lambda: frozen_store.set("key", "value"),
    "Subscription.wait": lambda: rpc.subscribe("weights", from_="b").wait(newer_than=99),
    "Stream.__next__": lambda: next(rpc.rpc_stream("b", items)),
    "as_completed": lambda: list(tensorferry.as_completed([sleeping()])),
    "collectives.form_group": pairs,
    "connect_store": lambda: tensorferry.connect_store("127.0.0.1", closed_port),
    "connect_store to a server that says nothing": lambda: tensorferry.connect_store("127.0.0.1", deaf_port),
    "rendezvous.meet": lambda: tensorferry.rendezvous.meet(f"tcp://127.0.0.1:{closed_port}", None, 1, 2, 100),
    "rendezvous.meet at a server that says nothing": lambda: tensorferry.rendezvous.meet(
        f"tcp://127.0.0.1:{deaf_port}", None, 1, 2, 100
    ),
    "rpc.explain": lambda: rpc.explain("frozen"),
    "rpc.find_region": lambda: rpc.find_region("frozen", "cache"),
    "rpc.init_rpc": lambda: join_default(store=dist.HashStore()),
    "rpc.init_rpc at an address": lambda: join_default(init_method=f"tcp://127.0.0.1:{closed_port}"),
    "rpc.rpc_sync": lambda: rpc.rpc_sync("b", time.sleep, (100,)),
    "rpc.rpc_sync to a peer that does not answer": lambda: rpc.rpc_sync("frozen", max, (1, 2)),
    "rpc.subscribe": lambda: rpc.subscribe("weights", from_="frozen"),
    "wait_all": lambda: tensorferry.wait_all([sleeping(), sleeping()]),
}
# Torch's, on the backend.
OF_TORCH: dict[str, Callable[[], Any]] = {
    "init_process_group without a server": lambda: join_group(closed_port, 1),
    "init_process_group at a server that says nothing": lambda: join_group(deaf_port, 1),
    "init_process_group without the other ranks": lambda: join_group(closed_port, 0),
}
# Run after the others, because they end the agent.
LAST: dict[str, Callable[[], Any]] = {"rpc.shutdown": lambda: (sleeping(), rpc.shutdown())}
ELSEWHERE = {
    "Loader.wait": "waits as Subscription.wait",
    "Subscription.latest": "waits as Subscription.wait",
    **dict.fromkeys(
        (
            f"{kind}.{name}"
            for kind in ("OwnRegion", "Region")
            for name in ("carried", "read", "read_blocks", "write", "write_blocks")
        ),
        "opens the region as find_region",
    ),
    **dict.fromkeys(
        (f"{kind}.{name}_async" for kind in ("OwnRegion", "Region") for name in ("read", "read_blocks", "write")),
        "a task of asyncio",
    ),
    "OwnRegion.await_notification_async": "a task of asyncio",
    "measured": "its calls wait as rpc_sync",
    "read_regions": "opens the regions as find_region",
    "Subscription.wait_async": "a task of asyncio",
    "Work.wait": "interrupted_rank.py, with each method of Group",
    "c10d.group_of": "interrupted_rank.py, by new_group: it forms a lazy group",
    "ddp.broadcast_coalesced": "waits as Work.wait",
    "ddp.reduce_gradients": "waits as Work.wait",
}
# They return within the time that stands here, even if no peer answers.
BOUNDED = {
    "Agent.__exit__": "as leave()",
    "Agent.get_worker_info": "2 s, for an agent that joins at this moment",
    "Agent.leave": "2 s",
    "Agent.remote": "its time-out, if the peer does not read large arguments",
    "Agent.rpc_async": "its time-out, if the peer does not read large arguments",
    "Agent.call_many": "as rpc_async()",
    "Publication.update": "its time-out, while readers hold all versions that are kept",
    "Agent.rpc_stream": "as remote()",
    "Peer.remote": "as Agent.remote()",
    "Peer.rpc_async": "as Agent.rpc_async()",
    "Peer.rpc_stream": "as Agent.rpc_stream()",
    "rpc.call_many": "as rpc_async()",
    "rpc.get_worker_info": "2 s",
    "rpc.remote": "as Agent.remote()",
    "rpc.rpc_async": "as Agent.rpc_async()",
    "rpc.rpc_stream": "as remote()",
}
AT_ONCE = {
    "Agent.__enter__", "Agent.counters", "Agent.dump", "Agent.expose", "Agent.metrics", "Agent.peer", "Agent.publish",
    "Agent.region", "Agent.trace", "Loader.load", "OwnRegion.__enter__", "OwnRegion.__exit__", "OwnRegion.check",
    "OwnRegion.drop", "Region.check",
    "Publication.withdraw", "Subscription.into", "Version.__iter__", "rpc.dump", "rpc.metrics", "rpc.region",
    "Future.__await__", "Future.add_done_callback", "Future.cancel", "Future.done", "Future.exception", "Future.then",
    "Future.value", "Peer.ordered",
    "RRef.confirmed_by_owner", "RRef.is_owner", "RRef.owner", "RRef.owner_name", "RRef.remote", "RRef.rpc_async",
    "Registered.__enter__", "Registered.__exit__", "Registered.release", "Stream.__aiter__", "Stream.__anext__",
    "Stream.__enter__", "Stream.__exit__", "Stream.__iter__", "Stream.close", "StoreServer", "Work.__await__",
    "Work.done", "awaitable", "c10d.register", "ddp.all_reduce_hook", "ddp.bfloat16_hook", "ddp.half_hook", "empty",
    "load_plugin", "on_default_stream", "register", "register_converter", "register_reduction", "rpc.batch",
    "rpc.cancelled", "rpc.counters", "rpc.deadline", "rpc.expose",
    "rpc.functions.async_execution", "rpc.get_rpc_timeout", "rpc.is_available", "rpc.peer", "rpc.publish", "rpc.trace",
    "share",
}  # fmt: skip
# Classes whose constructors and methods only keep values, or that the other program has.
VALUES = {
    "BackendType", "CommHook", "Counters", "Error", "Explanation", "Future", "GradBucket", "Group", "Loader", "Meeting",
    "Notification", "Options", "OwnRegion", "Peer", "Publication", "Published", "RRef", "Region", "Registered",
    "RemoteError", "RemoteTraceback", "RpcBackendOptions", "Shared", "Store", "Stream", "Subscription",
    "TensorPipeRpcBackendOptions", "Version", "Work", "WorkerInfo",
}  # fmt: skip


# Those of them whose methods stand in the tables.
WITH_METHODS = {
    "Future", "Loader", "OwnRegion", "Peer", "Publication", "RRef", "Region", "Registered", "Subscription", "Version",
}  # fmt: skip


if TRANSPORT:
    BLOCK |= {
        "RegionTransfer.wait": lambda: tensorferry.transport.RegionTransfer(100.0).wait(),
        "RegionTransport.connect": lambda: tensorferry.transport.RegionTransport().connect(
            (FOLDER / "transport").read_bytes()
        ),
    }
    waiting = ("RegionTransfer.result", "RegionTransfer.synchronize")
    waiting += ("RegionTransport.close", "RegionTransport.read", "RegionTransport.write")
    ELSEWHERE |= dict.fromkeys(waiting, "waits as RegionTransfer.wait")
    ELSEWHERE["RegionTransport.close_async"] = "a task of asyncio"
    AT_ONCE |= {
        "RegionTransfer.exception", "RegionTransfer.get_future", "RegionTransfer.is_completed",
        "RegionTransfer.is_success", "RegionTransport.bind", "RegionTransport.connected", "RegionTransport.poison",
        "RegionTransport.read_stream",
        "RegionTransport.register_memory", "RegionTransport.supported", "RegionTransport.unregister_memory",
        "RegionTransport.write_stream",
    }  # fmt: skip
    VALUES |= {
        "RegionMemory", "RegionTransfer", "RegionTransport", "RegionView", "RemoteRegionBuffer", "WritableRegionView",
    }  # fmt: skip
    WITH_METHODS |= {"RegionTransfer", "RegionTransport"}


def public() -> set[str]:
    """The names of all public functions, classes and methods, as the tables have them."""
    names, seen = set(), {id(_C.Store)}
    classes: dict[str, type] = {"Store": _C.Store}
    for module in MODULES:
        prefix = module.__name__.removeprefix("tensorferry").removeprefix(".")
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.ismodule(thing) or isinstance(thing, str) or id(thing) in seen:
                continue
            seen.add(id(thing))
            if isinstance(thing, type):
                classes[thing.__name__] = thing
            elif callable(thing) and getattr(thing, "__module__", "") != "typing":
                names.add(f"{prefix}.{name}" if prefix and prefix != "futures" else name)
    for name, kind in classes.items():
        names.add(name)
        if name == "Group":
            continue
        own = {each for base in kind.__mro__ if base.__module__.startswith("tensorferry") for each in vars(base)}
        methods = {each for each in own if each in OF_INSTANCES or not each.startswith("_")}
        names |= {f"{name}.{each}" for each in methods if callable(getattr(kind, each))}
    return names


def check_that_all_are_here() -> None:
    known = BLOCK.keys() | LAST.keys() | ELSEWHERE.keys() | BOUNDED.keys() | AT_ONCE | VALUES
    of_values = {each for each in public() if each.split(".")[0] in VALUES - WITH_METHODS}
    kept = {each for each in of_values if each.split(".")[0] not in {"Store", "Stream", "Work"}}
    assert not (new := public() - known - kept), f"without an entry: {sorted(new)}"
    functions = {each.split(" ")[0] for each in known}
    assert not (old := functions - public()), f"there is no such function: {sorted(old)}"


check_that_all_are_here()
for name, call in {**BLOCK, **OF_TORCH, **LAST}.items():
    interrupt(name, call, 0.2)
os.kill(child, signal.SIGKILL)
print("interrupted", len(BLOCK) + len(OF_TORCH) + len(LAST), time.monotonic(), flush=True)
