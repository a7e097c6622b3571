"""The life of a process that measures one of the other libraries: jobs come as JSON lines, and so do the answers.

Needs no package of the benchmark's own environment: the process has the one of .venv-peers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np


class Peer(ABC):
    """A library with one process that calls and one that answers, both started by the constructor."""

    @abstractmethod
    def empty(self) -> None:
        """An empty call and its answer."""

    @abstractmethod
    def in_flight(self, count: int) -> None:
        """So many empty calls at once, and all their answers."""

    @abstractmethod
    def send(self, array: np.ndarray[Any, Any]) -> None:
        """Sends an array, which the other process has when this returns."""


def samples(operation: Callable[[], None], seconds: float) -> list[int]:
    """As benchmarks.workloads repeats an operation: nanoseconds of each, without those of the first fifth."""
    clock = time.perf_counter_ns
    warm = clock() + int(seconds * 0.2e9)
    while clock() < warm:
        operation()
    found: list[int] = []
    end = clock() + int(seconds * 0.8e9)
    while True:
        begin = clock()
        operation()
        now = clock()
        found.append(now - begin)
        if now >= end and len(found) >= 3:
            return found


def _operation(peer: Peer, job: dict[str, Any]) -> Callable[[], None]:
    if job["workload"] == "empty":
        return peer.empty
    if job["workload"] == "in_flight":
        return lambda: peer.in_flight(job["count"])
    array = np.arange(job["size"] // 4, dtype=np.float32)
    return lambda: peer.send(array)


def serve(start: Callable[[], Peer]) -> None:
    """Measures what standard input asks for, until it closes. What the library prints goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    try:
        peer = start()
        peer.empty()
    except Exception as error:  # not installed, or it does not start here: the row is left out
        return answer(missing=f"{type(error).__name__}: {error}")
    answer(ready=True)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            operation = _operation(peer, job)
            operation()
            answer(samples_ns=samples(operation, job["seconds"]))
        except Exception as error:
            answer(failed=f"{type(error).__name__}: {error}")
