"""What the two modules answer differently: one line each, which test_migration.py knows for both."""

import os
import pickle
import time

import tensorferry.rpc as rpc
import torch
from torch.multiprocessing.spawn import spawn

NAMES = ["here", "there"]


class Custom(Exception):
    pass


class TwoArguments(Exception):
    def __init__(self, a, b):
        super().__init__(a + b)


class Double(torch.nn.Module):
    def forward(self, x):
        return 2 * x


def raises(kind, *arguments):
    raise kind(*arguments)


def storage_bytes(tensor):
    return tensor.untyped_storage().nbytes()


@rpc.functions.async_execution
def no_future():
    return 3


@rpc.functions.async_execution
def fails_later():
    future = torch.futures.Future()
    future.set_exception(ValueError("later"))
    return future


def wait(seconds):
    time.sleep(seconds)


def script_module():
    return torch.jit.script(Double())


def show(what, call):
    try:
        result = repr(call())
    except Exception as error:
        result = f"raises {type(error).__name__} <- {type(error.__cause__).__name__}: {str(error).splitlines()[0]}"
    print(f"{what} | {result[:60]}")


def kinds(what, call):
    """What the raised is, by its names."""
    try:
        print(what, "|", call())
    except Exception as error:
        print(what, "|", *(kind.__name__ for kind in type(error).__mro__[:-2]))


def compare():
    there = rpc.remote("there", script_module)
    kinds("raised KeyError", lambda: rpc.rpc_sync("there", raises, args=(KeyError, "k")))
    show("raised Custom", lambda: rpc.rpc_sync("there", raises, args=(Custom, "text")))
    kinds("raised TwoArguments", lambda: rpc.rpc_sync("there", raises, args=(TwoArguments, "a", "b")))
    kinds("time-out", lambda: rpc.rpc_sync("there", wait, args=(0.5,), timeout=0.05))
    kinds("unknown name", lambda: rpc.rpc_sync("nobody", wait, args=(0,)))
    kinds("negative time-out", lambda: rpc.rpc_sync("there", wait, args=(0,), timeout=-5))
    kinds("a peer that is none", lambda: rpc.rpc_sync(1.5, wait, args=(0,)))
    show("a future that fails", lambda: rpc.rpc_sync("there", fails_later))
    kinds("no future", lambda: rpc.rpc_sync("there", no_future))
    show("bytes of a view", lambda: rpc.rpc_sync("there", storage_bytes, args=(torch.zeros(1000)[:1],)))
    kinds("pickled", lambda: pickle.dumps(rpc.RRef(1)))
    show("type hint", lambda: rpc.RRef(3, int).to_here())
    show("a ScriptModule is called", lambda: there.rpc_sync().forward(torch.ones(1)))
    show("a ScriptModule is fetched", lambda: there.to_here()(torch.ones(1)))
    show("a time-out among options", lambda: rpc.TensorPipeRpcBackendOptions(rpc_timeout=20).rpc_timeout)
    show("printed", rpc.get_worker_info)
    options = rpc.TensorPipeRpcBackendOptions(device_maps={"there": {"cuda:0": "cuda:1"}})
    kinds("a map that is not one to one", lambda: options.set_device_map("there", {"cuda:1": "cuda:1"}))


def run(rank, world_size):
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=world_size)
    if rank == 0:
        compare()
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29516")
    spawn(run, args=(len(NAMES),), nprocs=len(NAMES))
