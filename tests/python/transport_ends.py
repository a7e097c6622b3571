"""Endpoints of torch's one-sided transports for tests: one in this process, connected with one in a worker process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Worker, WorkerFailed, Workers

api = pytest.importorskip("torch.distributed._transport", reason="it comes with torch 2.15")

import tensorferry.transport  # noqa: E402, registers it

PATIENT = 120.0  # seconds; no test waits for them to pass


def new_end(name: str, device: str = "cpu") -> Any:
    """Returns an endpoint of that implementation."""
    return api.new_transport(name, device, timeout=PATIENT)


@contextlib.contextmanager
def peer_process(workers: Workers) -> Iterator[Worker]:
    """A worker process that has started. It is killed in the end if a test has left it busy."""
    (worker,) = workers.take(1)
    worker.start(os.getpid)
    worker.result(180)  # with the time that a new process starts in
    yield worker
    if not worker.alive:
        return
    try:
        idle = worker.run(os.getpid) == worker.process.pid
    except (OSError, EOFError, TimeoutError, WorkerFailed):
        idle = False
    if idle:
        workers.give_back([worker])
    else:
        worker.kill()


class End:
    """An endpoint with the memory that it has registered, by name."""

    def __init__(self, transport: Any) -> None:
        self.transport = transport
        self.tensors: dict[str, torch.Tensor] = {}
        self.memories: dict[str, Any] = {}

    def register(self, key: str, tensor: torch.Tensor) -> Any:
        self.tensors[key] = tensor
        self.memories[key] = self.transport.register_memory(tensor)
        return self.memories[key]


theirs: End | None = None  # in a worker


def open_theirs(name: str, device: str = "cpu") -> bytes:
    global theirs
    theirs = End(new_end(name, device))
    return theirs.transport.bind()


def connect_theirs(url: bytes) -> int:
    return theirs.transport.connect(url)


def register_theirs(key: str, tensor: torch.Tensor, mappable: bool) -> bytes:
    if theirs.transport.device.type == "cuda":
        tensor = tensor.cuda()
        torch.cuda.synchronize()
    elif mappable:
        tensor = tensorferry.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return theirs.register(key, tensor).to_remote_buffer().serialize()


def unregister_theirs(key: str) -> None:
    theirs.transport.unregister_memory(theirs.memories[key])


def contents_of_theirs(key: str) -> torch.Tensor:
    return theirs.tensors[key].cpu().clone()  # to send a tensor itself would move its memory


def read_by_them(key: str, descriptor: bytes) -> int:
    kind = type(theirs.memories[key].to_remote_buffer())
    return theirs.transport.read(theirs.memories[key].to_mutable_view(), kind.deserialize(descriptor))


def close_theirs() -> None:
    global theirs
    theirs.transport.close()
    theirs = None


def meet_theirs(name: str, port: int) -> int:
    global theirs
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    theirs = End(api.new_transport_rank(name, "cpu", store=store, rank=1, peer_rank=0, bootstrap_timeout=PATIENT))
    theirs.register("met", torch.arange(5.0))
    store.set("descriptor", theirs.memories["met"].to_remote_buffer().serialize())
    return os.getpid()


class Pair(End):
    """An endpoint of this process, connected with that of a worker process."""

    def __init__(self, name: str, peer: Worker, device: str = "cpu") -> None:
        super().__init__(new_end(name, device))
        self.peer = peer
        url = self.transport.bind()
        assert self.transport.connect(peer.run(open_theirs, name, device)) == 0
        assert peer.run(connect_theirs, url) == 0

    def shown(self, key: str, tensor: torch.Tensor, mappable: bool = True) -> Any:
        """Registers a tensor at the peer, and returns its descriptor, as it arrives here."""
        sent = self.peer.run(register_theirs, key, tensor, mappable)
        own = self.transport.register_memory(torch.zeros(1, device=self.transport.device.type))
        return type(own.to_remote_buffer()).deserialize(sent)

    def theirs(self, key: str) -> torch.Tensor:
        return self.peer.run(contents_of_theirs, key)

    def close(self) -> None:
        """Closes this end, then the other: each closes when the other uses its memory no more."""
        self.transport.close()
        if self.peer.alive:
            self.peer.run(close_theirs)
