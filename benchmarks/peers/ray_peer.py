"""Ray: an actor on the same host. Arrays go through its object store."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.peers.loop import Peer, serve


class RayPeer(Peer):
    def __init__(self) -> None:
        import ray

        ray.init(num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False)

        class Callee:
            def noop(self) -> None:
                pass

            def take(self, array: np.ndarray[Any, Any]) -> None:
                pass

        self._get = ray.get
        self._callee = ray.remote(Callee).remote()

    def empty(self) -> None:
        self._get(self._callee.noop.remote())

    def in_flight(self, count: int) -> None:
        self._get([self._callee.noop.remote() for _ in range(count)])

    def send(self, array: np.ndarray[Any, Any]) -> None:
        self._get(self._callee.take.remote(array))


if __name__ == "__main__":
    serve(RayPeer)
