"""Two processes that call each other: python main.py"""

import os
import tempfile

import tensorferry.rpc as rpc
from rich import print
from torch.multiprocessing.spawn import spawn


def greet(name: str) -> str:
    return f"Hello {name}, this is {rpc.get_worker_info().name} in process {os.getpid()}."


def divide(a: float, b: float) -> float:
    return a / b


def talk() -> None:
    print(f"I am alice, in process {os.getpid()}.")

    # A call that waits for its result.
    print(f"rpc_sync:  {rpc.rpc_sync('bob', greet, args=('alice',))}")

    # Three calls at once; wait() takes each result.
    futures = [rpc.rpc_async("bob", divide, args=(84.0, b)) for b in (1.0, 2.0, 4.0)]
    print(f"rpc_async: {[future.wait() for future in futures]}")

    # What a function raises over there is raised here.
    try:
        rpc.rpc_sync("bob", divide, args=(1.0, 0.0))
    except ZeroDivisionError as error:
        print(f"raised:    ZeroDivisionError, {str(error).splitlines()[0]!r}")


def run(rank: int, world_size: int, init_method: str = "env://") -> None:
    rpc.init_rpc(("alice", "bob")[rank], rank=rank, world_size=world_size, init_method=init_method)
    if rank == 0:
        talk()
    rpc.shutdown()  # waits until everybody is done


def main() -> None:
    if "RANK" in os.environ:  # torchrun has started us
        return run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    with tempfile.TemporaryDirectory() as folder:
        spawn(run, args=(2, f"file://{folder}/store"), nprocs=2)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
