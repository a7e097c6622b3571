"""Two agents with several interfaces: python wide_transfers.py MODE NAME RANK STORE. STORE is the address of torch's
store, which "sender" serves. In the mode
- "count", large tensors go both ways, and "sender" prints how many bytes each of its interfaces has received and sent;
- "cut", "sender" takes an interface down under a transfer, prints how that ends, and sends again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import tensorferry.rpc as rpc
import torch
from tensorferry.errors import ConnectionLost

LARGE = 64 << 20
ENOUGH = LARGE // 8
ROUNDS = 20  # at most


def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def take(x: torch.Tensor) -> int:
    return x.numel()


def moved() -> dict[str, tuple[int, int]]:
    """The bytes that each interface of this network namespace has received and sent."""
    lines = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    fields = {name.strip(): values.split() for name, values in lines}
    return {name: (int(values[0]), int(values[8])) for name, values in fields.items() if name != "lo"}


def count() -> None:
    """Goes on until each interface that this agent uses has carried enough."""
    used = os.environ["TENSORFERRY_SOCKET_IFNAME"].removeprefix("=").split(",")
    for n in range(ROUNDS):
        sent = torch.arange(n, LARGE // 8 + n, dtype=torch.int64)  # a piece in another place would show
        assert torch.equal(rpc.rpc_sync("receiver", plus_one, args=(sent,)), sent + 1)
        if min(min(moved()[name]) for name in used) >= ENOUGH:
            break
    print(json.dumps(moved()), flush=True)


def cut() -> None:
    sent = torch.ones(LARGE, dtype=torch.uint8)
    assert rpc.rpc_sync("receiver", take, args=(sent,)) == LARGE  # its connections are made
    for _ in range(ROUNDS):
        if cut_one(sent) == "lost":
            break
    else:
        print("came before the cut", flush=True)
    print(rpc.rpc_sync("receiver", take, args=(sent,)), flush=True)


def cut_one(sent: torch.Tensor) -> str:
    """How a transfer ends whose interface goes down. It comes if this process was held up before the cut."""
    subprocess.run(["ip", "link", "set", "net1", "up"], check=True)
    before = moved()["net1"][1]
    future = rpc.rpc_async("receiver", take, args=(sent,))
    while moved()["net1"][1] - before < ENOUGH // 4 and not future.done():
        time.sleep(0.001)
    subprocess.run(["ip", "link", "set", "net1", "down"], check=True)
    try:
        future.wait()
    except ConnectionLost:
        print("lost", flush=True)
        return "lost"
    return "came"


def main(mode: str, name: str, rank: int, store: str) -> None:
    heartbeat = 1.0 if mode == "cut" else 5.0
    rpc.init_rpc(name, rank=rank, world_size=2, init_method=f"tcp://{store}", heartbeat=heartbeat)
    if name == "sender":
        {"count": count, "cut": cut}[mode]()
    rpc.shutdown(timeout=60)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
