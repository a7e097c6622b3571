"""A library with one other process, for the tests of the benchmark: it echoes lines."""

from __future__ import annotations

import subprocess
from typing import Any

import numpy as np

from benchmarks.peers.loop import Peer, serve


class PipePeer(Peer):
    def __init__(self) -> None:
        self._other = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def empty(self) -> None:
        assert self._other.stdin is not None and self._other.stdout is not None
        self._other.stdin.write(b"\n")
        assert self._other.stdout.read(1) == b"\n"

    def in_flight(self, count: int) -> None:
        for _ in range(count):
            self.empty()

    def send(self, array: np.ndarray[Any, Any]) -> None:
        self.empty()


if __name__ == "__main__":
    serve(PipePeer)
