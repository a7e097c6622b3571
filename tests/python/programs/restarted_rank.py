"""A rank of a job that is started again, by torchrun or by a test, at a store that lives on.

    restarted_rank.py SEED ROUNDS KIND...

Each process runs the kinds of jobs one after another: "group" (a process group of torch.distributed), "rpc"
(tensorferry.rpc), "torch" (torch.distributed.rpc on the backend TENSORFERRY). In each round but the last, the seed
draws a rank, a kind, which then is the first one, and a moment, at which that rank is killed. The moments of
successive rounds are "joining", "forming", "operating", "leaving", and so on. In round 0 of no rounds, all is right.

Prints one line of JSON for each job: its kind, the round, the rank, the world size, and the times at which the rank
began to join and had joined. In the last round prints "done RANK ROUND".
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import tensorferry.c10d
import tensorferry.rpc
import tensorferry.torch
import torch
import torch.distributed as dist
import torch.distributed.rpc

MOMENTS = "joining", "forming", "operating", "leaving"
STEPS = 3

# As srun starts it, there are no other variables.
RANK = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "")))
SIZE = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "")))
WHERE = "env://"
if "JOB_ADDRESS" in os.environ:
    WHERE = f"tcp://{os.environ['JOB_ADDRESS']}"
elif "JOB_FILE" in os.environ:
    WHERE = f"file://{os.environ['JOB_FILE']}"
ROUND = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Fate:
    """When this rank is killed in this round, if it is."""

    def __init__(self, seed: int, rounds: int, kinds: list[str]) -> None:
        drawn = random.Random(f"{seed} {ROUND}")
        self.kinds = kinds
        self._moment = ""
        if rounds <= ROUND:
            return
        first = drawn.choice(kinds)
        self.kinds = [first]  # none comes to another one
        self._step = drawn.randrange(STEPS)
        self._delay = drawn.uniform(0, 0.1)
        if drawn.randrange(SIZE) == RANK:
            self._moment = MOMENTS[ROUND % len(MOMENTS)]

    def pass_by(self, moment: str, call: Callable[[], Any], step: int | None = None) -> Any:
        """Calls the function. Is killed within it, or at its end, if the moment has come."""
        if moment != self._moment or step not in (None, self._step):
            return call()
        threading.Timer(self._delay, die).start()
        call()
        die()


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # lines of several ranks do not mix


def joined(kind: str, began: float) -> None:
    say(json.dumps([kind, ROUND, RANK, SIZE, began, time.time()]))


def group(fate: Fate) -> None:
    began = time.time()
    options: dict[str, Any] = {"init_method": WHERE, "rank": RANK, "world_size": SIZE, "timeout": timedelta(seconds=60)}
    fate.pass_by("joining", lambda: dist.init_process_group("tensorferry", **options))
    joined("group", began)
    members = [0, SIZE - 1]
    pair = fate.pass_by("forming", lambda: dist.new_group(members))
    for step in range(STEPS):
        ones = torch.ones(100_000)
        fate.pass_by("operating", lambda ones=ones: dist.all_reduce(ones), step)
        assert ones[0].item() == SIZE
        if RANK in members:
            dist.barrier(group=pair)
    dist.barrier()
    fate.pass_by("leaving", dist.destroy_process_group)


def calls(module: Any, kind: str, fate: Fate, init: Callable[[str], Any]) -> None:
    began = time.time()
    fate.pass_by("joining", lambda: init(f"worker{RANK}"))
    joined(kind, began)
    peer = f"worker{(RANK + 1) % SIZE}"
    fate.pass_by("forming", lambda: module.rpc_sync(peer, torch.add, args=(torch.ones(2), 1), timeout=60))
    for step in range(STEPS):
        tensor = torch.ones(100_000)
        reference = module.remote(peer, torch.add, args=(tensor, step), timeout=60)
        got = fate.pass_by("operating", reference.to_here, step)
        assert got[0].item() == 1 + step
    fate.pass_by("leaving", module.shutdown)


def rpc(fate: Fate) -> None:
    module = tensorferry.rpc
    calls(module, "rpc", fate, lambda name: module.init_rpc(name, rank=RANK, world_size=SIZE, init_method=WHERE))


def torch_rpc(fate: Fate) -> None:
    module = torch.distributed.rpc
    options = tensorferry.torch.RpcBackendOptions(init_method=WHERE, rpc_timeout=60)
    backend = module.BackendType.TENSORFERRY
    calls(
        module, "torch", fate,
        lambda name: module.init_rpc(
            name, rank=RANK, world_size=SIZE, backend=backend, rpc_backend_options=options
        ),
    )  # fmt: skip


def main() -> None:
    seed, rounds, kinds = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    fate = Fate(seed, rounds, kinds)
    for kind in fate.kinds:
        {"group": group, "rpc": rpc, "torch": torch_rpc}[kind](fate)
    say(f"done {RANK} {ROUND}")


main()
