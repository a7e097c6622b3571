"""``tensorferry bench``: calls between two processes of this machine, beside ``torch.distributed.rpc``, in a minute.

Both are measured in turns, because other programs of the machine come and go. `make bench` measures far more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import errors
from .progress import Progress

__all__ = ["main"]

#: The rows: a name, and the bytes of the tensor that goes there, or how many empty calls are in flight.
ROWS = (
    ("empty call", {"bytes": 0}),
    ("tensor of 1 MB", {"bytes": 1 << 20}),
    ("tensor of 64 MB", {"bytes": 64 << 20}),
    ("64 empty calls in flight", {"calls": 64}),
)
KINDS = ("tensorferry", "torch.distributed.rpc")
TURNS = 3


def received(tensor: torch.Tensor) -> int:
    """Is called at the peer."""
    return tensor.numel()


def nothing() -> None:
    """Is called at the peer."""


def _operation(rpc: Any, row: dict[str, int]) -> Callable[[], object]:
    if row.get("calls"):
        return lambda: [call.wait() for call in [rpc.rpc_async("b", nothing) for _ in range(row["calls"])]]
    if not row["bytes"]:
        return lambda: rpc.rpc_sync("b", nothing)
    tensor = torch.zeros(row["bytes"], dtype=torch.uint8)
    return lambda: rpc.rpc_sync("b", received, args=(tensor,))


def _member(kind: str, rank: int, port: int) -> None:
    """One of the two processes. That of rank 0 measures what its input asks for, and prints medians in seconds."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch.distributed.rpc's start warns of what torch itself does
    if kind == KINDS[0]:
        from . import rpc
    else:
        import torch.distributed.rpc as rpc  # type: ignore[no-redef]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    rpc.init_rpc("ab"[rank], rank=rank, world_size=2)
    if rank == 0:
        print("ready", flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            run = _operation(rpc, asked)
            run()
            took: list[float] = []
            until = time.perf_counter() + asked["seconds"]
            while not took or time.perf_counter() < until:
                began = time.perf_counter()
                run()
                took.append(time.perf_counter() - began)
            print(statistics.median(took), flush=True)
    rpc.shutdown()


class _Pair:
    """The two processes of one library."""

    def __init__(self, kind: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "tensorferry", "bench", "--member", kind, "--port", str(port), "--rank"]
        self._other = subprocess.Popen([*command, "1"], stdin=subprocess.DEVNULL)
        self._caller = subprocess.Popen([*command, "0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._kind = kind
        try:
            self._line()
        except BaseException:
            self.close()
            raise

    def _line(self) -> str:
        """Returns what the caller prints next. It prints one line for each that it is asked for.

        Raises:
            InternalError: one of the two processes has ended.
        """
        assert self._caller.stdout is not None
        while not select.select([self._caller.stdout], [], [], 0.5)[0]:
            if (status := self._other.poll()) is not None:  # the caller may wait for it for minutes
                self._caller.kill()
                raise errors.InternalError(f"{self._kind} cannot be measured: its second process has ended ({status})")
        line = self._caller.stdout.readline()
        if not line:
            self._other.kill()
            raise errors.InternalError(f"{self._kind} cannot be measured here: its error is above")
        return line

    def measure(self, row: dict[str, int], seconds: float) -> float:
        assert self._caller.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and prints no line
            self._caller.stdin.write(json.dumps({**row, "seconds": seconds}) + "\n")
            self._caller.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        assert self._caller.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._caller.stdin.close()
        for process in (self._caller, self._other):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _shown(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:,.2f} ms"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: ``tensorferry bench``."""
    parser = argparse.ArgumentParser(
        prog="tensorferry bench",
        description="Measures calls between two processes of this machine beside torch.distributed.rpc, in a minute.",
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="of each of the 24 measurements (default: 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--member", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.member:
        return _member(given.member, given.rank, given.port)
    pairs: list[_Pair] = []
    medians: dict[str, list[float]] = {}
    with Progress() as progress:
        try:
            for kind in KINDS:
                progress.say(f"starting two processes of {kind}")
                pairs.append(_Pair(kind))
            for number, (name, row) in enumerate(ROWS, 1):
                turns: list[list[float]] = [[], []]
                for turn in range(TURNS):
                    for pair, samples, kind in zip(pairs, turns, KINDS):
                        progress.say(f"{number} of {len(ROWS)}: {name}, {kind}, turn {turn + 1} of {TURNS}")
                        samples.append(pair.measure(row, given.seconds))
                medians[name] = [statistics.median(samples) for samples in turns]
        finally:
            for pair in pairs:
                pair.close()
    if given.json:
        return print(json.dumps({name: dict(zip(KINDS, both)) for name, both in medians.items()}, indent=1))
    print(f"{'':26}{'ours':>12}{'torch':>12}")
    for name, (ours, theirs) in medians.items():
        print(f"{name:26}{_shown(ours):>12}{_shown(theirs):>12}  {theirs / ours:.1f}x faster")
