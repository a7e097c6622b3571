"""Two agents, of which one may live in a container: python container.py NAME RANK FOLDER DEVICE.

They have nothing in common but FOLDER. "outside", rank 0, sends tensors on DEVICE to "inside" and prints the channel
that carries them in the end; each value is checked.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
import time

import tensorferry.rpc as rpc
import torch
import torch.distributed as dist


def start_loopback() -> None:
    """As the runtime of a container does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        up_and_running = struct.pack("16sh", b"lo", 0x41)
        fcntl.ioctl(any_socket, 0x8914, up_and_running)  # SIOCSIFFLAGS


def total(x: torch.Tensor) -> float:
    return float(x.sum().item())


def main(name: str, rank: int, folder: str, device: str) -> None:
    if name == "inside":
        start_loopback()
    os.environ["TENSORFERRY_SOCKET_DIR"] = folder
    rpc.init_rpc(name, rank=rank, world_size=2, store=dist.FileStore(f"{folder}/store", 2))
    if rank == 0:
        x = torch.ones(3 << 18, device=device)
        until = time.monotonic() + 10
        while True:
            if (found := rpc.rpc_sync("inside", total, args=(x,))) != x.numel():
                raise AssertionError(f"{found} instead of {x.numel()}")
            how = rpc.explain("inside", x)
            if how.channel not in ("", "basic", "cuda_basic") or time.monotonic() > until:
                break
        print(how.channel)
        print(how, file=sys.stderr)
    rpc.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
