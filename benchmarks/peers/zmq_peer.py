"""ZeroMQ by pyzmq: multipart messages over a unix socket, with the bytes of arrays out of band (pickle protocol 5)."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
from typing import Any

import numpy as np
import zmq

from benchmarks.peers.loop import Peer, serve


def dumps(value: object) -> list[Any]:
    """The parts of a message: a pickle, and the buffers that it leaves out."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return [head, *buffers]


def loads(parts: list[zmq.Frame]) -> Any:
    return pickle.loads(parts[0].buffer, buffers=[part.buffer for part in parts[1:]])


def answer(address: str) -> None:
    """The callee: unpickles each request and answers None."""
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.connect(address)
    while True:
        who, *parts = socket.recv_multipart(copy=False)
        loads(parts)
        socket.send_multipart([who, *dumps(None)], copy=False)


class ZmqPeer(Peer):
    def __init__(self) -> None:
        address = f"ipc://{tempfile.mkdtemp(prefix='tensorferry-zmq')}/socket"
        self._socket = zmq.Context().socket(zmq.DEALER)
        self._socket.bind(address)
        multiprocessing.get_context("spawn").Process(target=answer, args=(address,), daemon=True).start()

    def _call(self, value: object) -> None:
        self._socket.send_multipart(dumps(value), copy=False)
        loads(self._socket.recv_multipart(copy=False))

    def empty(self) -> None:
        self._call(None)

    def in_flight(self, count: int) -> None:
        for _ in range(count):
            self._socket.send_multipart(dumps(None), copy=False)
        for _ in range(count):
            loads(self._socket.recv_multipart(copy=False))

    def send(self, array: np.ndarray[Any, Any]) -> None:
        self._call(array)


if __name__ == "__main__":
    serve(ZmqPeer)
