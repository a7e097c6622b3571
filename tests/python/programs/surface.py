"""Every call of the module once: one line each, with what it gave or raised.

The lines are what docs/migrating-from-torch-rpc.md calls the same. Raised types are printed with the first of
RuntimeError, TypeError, ValueError that they are: the texts differ.
"""

import os
import threading
import time

import tensorferry.rpc as rpc
import torch
from torch.multiprocessing.spawn import spawn

NAMES = ["here", "there"]


class Counter:
    kind = "counter"

    def __init__(self, start=0):
        self.value = start

    def add(self, n=1):
        self.value += n
        return self.value

    def itself(self):
        return self

    @staticmethod
    def twice(n):
        return 2 * n

    @classmethod
    def who(cls):
        return cls.__name__, rpc.get_worker_info().name

    @rpc.functions.async_execution
    def later(self, n):
        future = torch.futures.Future()
        threading.Timer(0.01, future.set_result, (self.value + n,)).start()
        return future

    @staticmethod
    @rpc.functions.async_execution
    def static_later(to, x):
        return rpc.rpc_async(to, torch.add, args=(x, 1)).then(lambda future: future.wait() * 2)

    @classmethod
    @rpc.functions.async_execution
    def class_later(cls, x):
        future = torch.futures.Future()
        future.set_result((cls.__name__, x))
        return future


def where():
    return rpc.get_worker_info().name


def slow(seconds):
    threading.Event().wait(seconds)
    return seconds


def nested(to):
    return rpc.rpc_sync(to, where)


def ping_pong(times):
    """Calls within calls: each is held by the one that waits for it."""
    other = NAMES[1 - rpc.get_worker_info().id]
    return rpc.rpc_sync(other, ping_pong, args=(times - 1,)) if times else "done"


def owner_of(rref):
    return rref.owner_name(), rref.is_owner()


def value_of(rref):
    return rref.to_here().value


def local_value_of(rref):
    return rref.local_value().value


def make_reference():
    return rpc.RRef(Counter(5))


@torch.jit.script
def scripted(x: torch.Tensor, y: int) -> torch.Tensor:
    return x * y


def requires_grad(tensor):
    return tensor.requires_grad, tensor.is_leaf


def with_grad():
    return torch.ones(2, requires_grad=True)


def echo(value):
    return value


def raise_text(text):
    raise ValueError(text)


def show(what, call):
    try:
        result = repr(call())
    except Exception as error:
        known = next((kind.__name__ for kind in (RuntimeError, TypeError, ValueError) if isinstance(error, kind)), "")
        result = f"raises {known or type(error).__name__}"
    print(f"{what}: {result}".replace("\n", " "))


def calls():
    there = rpc.get_worker_info("there")
    x = torch.arange(4.0)
    show("sync", lambda: rpc.rpc_sync("there", torch.add, (x, 1)))
    show("sync by WorkerInfo", lambda: rpc.rpc_sync(there, where))
    show("sync by rank", lambda: rpc.rpc_sync(1, where))
    show("sync to oneself", lambda: rpc.rpc_sync("here", where))
    show("kwargs", lambda: rpc.rpc_sync("there", torch.full, args=((2,),), kwargs={"fill_value": 3.0}))
    show("async", lambda: rpc.rpc_async("there", torch.sum, args=(x,)).wait())
    show("then", lambda: rpc.rpc_async("there", where).then(lambda future: future.wait() + "!").wait())
    show("wait_all", lambda: torch.futures.wait_all([rpc.rpc_async("there", abs, args=(-i,)) for i in range(3)]))
    show("collect", lambda: len(torch.futures.collect_all([rpc.rpc_async("there", where)]).wait()))
    show("is a future", lambda: isinstance(rpc.rpc_async("there", where), torch._C.Future))
    show("nested", lambda: rpc.rpc_sync("there", nested, args=("here",)))
    show("calls within calls", lambda: ping_pong(3))
    show("scripted", lambda: rpc.rpc_sync("there", scripted, args=(x, 3)))
    show("static method", lambda: rpc.rpc_sync("there", Counter.twice, args=(4,)))
    show("class method", lambda: rpc.rpc_sync("there", Counter.who))
    show("bound method, by value", lambda: rpc.rpc_sync("there", Counter(2).add))
    show("class", lambda: rpc.rpc_sync("there", Counter, args=(2,)).value)
    show("containers", lambda: rpc.rpc_sync("there", echo, args=({"a": [x, (1, "b")], "c": {1}},)))
    show("requires_grad", lambda: rpc.rpc_sync("there", requires_grad, args=(torch.ones(2, requires_grad=True),)))
    show("result requires_grad", lambda: rpc.rpc_sync("there", with_grad).requires_grad)
    show("lambda", lambda: rpc.rpc_sync("there", lambda: 1))
    show("unknown peer", lambda: rpc.rpc_sync("nobody", where))
    show("raised", lambda: rpc.rpc_sync("there", raise_text, args=("on purpose",)))
    show("values, to oneself", lambda: (rpc.rpc_sync("here", torch.Tensor.zero_, args=(x,)), x))
    show("timeout", lambda: rpc.rpc_sync("there", slow, args=(0.5,), timeout=0.05))
    show("timeout 0 is none", lambda: rpc.rpc_sync("there", slow, args=(0.01,), timeout=0))
    show("async timeout", lambda: rpc.rpc_async("there", slow, (0.5,), None, 0.05).wait())


def references():
    counter = rpc.remote("there", Counter, args=(1,))
    mine = rpc.RRef(Counter(7))
    show("to_here", lambda: counter.to_here().value)
    show("to_here, timeout", lambda: counter.to_here(5).value)
    show("owner", lambda: (counter.owner().name, counter.owner().id, counter.owner_name(), counter.is_owner()))
    until = time.monotonic() + 5
    while not counter.confirmed_by_owner() and time.monotonic() < until:  # the owner's word may come after its results
        time.sleep(0.01)
    show("confirmed", lambda: counter.confirmed_by_owner())
    show("local value elsewhere", lambda: counter.local_value())
    show("rpc_sync", lambda: counter.rpc_sync().add(2))
    show("rpc_sync, timeout", lambda: counter.rpc_sync(timeout=5).add(n=2))
    show("rpc_async", lambda: counter.rpc_async().add().wait())
    show("remote", lambda: counter.remote().itself().rpc_sync().add())
    show("no such method", lambda: counter.rpc_sync().missing())
    show("own", lambda: (mine.is_owner(), mine.owner_name(), mine.local_value().value, mine.to_here().value))
    show("own confirmed", lambda: mine.confirmed_by_owner())
    show("own called", lambda: mine.rpc_sync().add())
    show("own kept", lambda: mine.local_value().value)
    show("passed", lambda: rpc.rpc_sync("there", owner_of, args=(counter,)))
    show("passed, own", lambda: rpc.rpc_sync("there", owner_of, args=(mine,)))
    show("passed, read", lambda: rpc.rpc_sync("there", value_of, args=(mine,)))
    show("passed, local", lambda: rpc.rpc_sync("there", local_value_of, args=(counter,)))
    show("returned", lambda: rpc.rpc_sync("there", make_reference).to_here().value)
    show("reference to a reference", lambda: rpc.remote("there", make_reference).to_here().to_here().value)
    show("failed", lambda: rpc.remote("there", raise_text, args=("x",)).to_here())
    show("oneself", lambda: rpc.remote("here", Counter, args=(3,)).local_value().value)
    show("the type", lambda: rpc.remote("there", Counter)._get_type().__name__)
    show("torch operator", lambda: rpc.remote("there", torch.add, args=(torch.ones(2), 1)).to_here())


def later():
    counter = rpc.remote("there", Counter, args=(1,))
    show("async method", lambda: counter.rpc_sync().later(2))
    show("async static method", lambda: rpc.rpc_sync("there", Counter.static_later, args=("here", torch.ones(1))))
    show("async class method", lambda: rpc.rpc_sync("there", Counter.class_later, args=(1,)))
    show("async by reference", lambda: counter.rpc_async().static_later("here", torch.ones(1)).wait())
    show("async remote", lambda: counter.remote().later(3).to_here())


def names():
    show("is_available", rpc.is_available)
    show("get_worker_info", lambda: (rpc.get_worker_info().name, rpc.get_worker_info().id))
    show("get_worker_info of", lambda: (rpc.get_worker_info("there").name, rpc.get_worker_info("there").id))
    show("get_worker_info of nobody", lambda: rpc.get_worker_info("nobody"))
    show("WorkerInfo", lambda: rpc.WorkerInfo("there", 1) == rpc.get_worker_info("there"))
    show("WorkerInfo, called", lambda: rpc.rpc_sync(rpc.WorkerInfo("there", 1), where))
    show("get_rpc_timeout", rpc.get_rpc_timeout)
    show("init twice", lambda: rpc.init_rpc("here", rank=0, world_size=2))
    show("PyRRef", lambda: isinstance(rpc.RRef(1), rpc.PyRRef))
    show("backend", lambda: rpc.BackendType.TENSORPIPE.name)
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=20.5, init_method="env://")
    show("options", lambda: (options.num_worker_threads, options.rpc_timeout, options.init_method))
    show("options are", lambda: isinstance(options, rpc.RpcBackendOptions))
    options.rpc_timeout = 30.5
    show("options set", lambda: options.rpc_timeout)
    show("no maps", lambda: (options.device_maps, options.devices))
    maps = rpc.TensorPipeRpcBackendOptions()
    show("map", lambda: maps.set_device_map("there", {"cuda:0": "cuda:1"}))
    show("maps", lambda: maps.device_maps)
    show("devices", lambda: maps.set_devices(["cuda:0"]))
    show("devices are", lambda: maps.devices)
    show("agent is set", lambda: rpc._is_current_rpc_agent_set())
    show("timeout set", lambda: rpc._set_rpc_timeout(50))
    show("timeout is", rpc.get_rpc_timeout)


def run(rank, world_size):
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=40)
    show("before init", lambda: rpc.rpc_sync("there", where))
    rpc.init_rpc(NAMES[rank], rpc.BackendType.TENSORPIPE, rank, world_size, options)
    if rank == 0:
        names()
        calls()
        references()
        later()
    rpc.shutdown()
    show("after shutdown", lambda: rpc.get_worker_info())


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29515")
    spawn(run, args=(len(NAMES),), nprocs=len(NAMES))
