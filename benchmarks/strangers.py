"""The processes of other libraries: started in an environment of their own, stopped while others are measured."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from benchmarks.native import Missing
from benchmarks.placement import Placement, place
from benchmarks.teams import end_with_driver

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / ".venv-peers" / "bin" / "python"
PACKAGE = "benchmarks.peers"
MODULES = {"Ray": "ray_peer", "Monarch": "monarch_peer", "pyzmq": "zmq_peer"}
START_TIMEOUT = 120.0  # Ray and Monarch take half a minute on a busy machine


def family(pid: int) -> Iterator[int]:
    """A process, and all that descend from it."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue  # ended meanwhile
        for child in children:
            yield from family(int(child))


class Stranger:
    """The process of one library, with the processes that the library starts. Raises Missing where it does not start.

    Unpinned only: nobody says which of a library's processes does what.
    """

    def __init__(self, name: str) -> None:
        if not PYTHON.is_file():
            raise Missing(f"{name} is not installed: make bench ARGS=--peers sets up {PYTHON.parts[-3]}")
        command = [str(PYTHON), "-m", f"{PACKAGE}.{MODULES[name]}"]
        self._name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 closed by close()
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
            preexec_fn=end_with_driver,
        )
        try:
            started = self._read(START_TIMEOUT)
            if "missing" in started:
                raise Missing(f"{name} does not start here: {started['missing']}")
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def run(self, placement: Placement, seconds: float, **job: Any) -> list[float]:
        """Nanoseconds of single operations; see benchmarks/peers/loop.py."""
        cpus = placement.cpus()
        assert placement is Placement.UNPINNED and cpus is not None, "rows with other libraries are unpinned"
        self._signal(signal.SIGCONT)
        try:
            for pid in family(self._process.pid):
                place(pid, cpus[0])
            self._pipe(self._process.stdin).write(json.dumps({"seconds": seconds, **job}) + "\n")
            answer = self._read(60 + 10 * seconds)
        finally:
            self._signal(signal.SIGSTOP)
        if "failed" in answer:
            raise RuntimeError(f"{self._name}: {answer['failed']}")
        samples: list[float] = answer["samples_ns"]
        return samples

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            self._pipe(pipe).close()
        self._errors.close()

    def _read(self, patience: float) -> dict[str, Any]:
        pipe, until = self._pipe(self._process.stdout), time.monotonic() + patience
        if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
            raise TimeoutError(f"{self._name}: no answer in {patience:.0f} s")
        if not (line := pipe.readline()):
            self._process.wait(10)
            self._errors.seek(0)
            said = self._errors.read().splitlines() or [f"exit code {self._process.returncode}"]
            raise Missing(f"{self._name} does not run here: {said[-1]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: int) -> None:
        for pid in list(family(self._process.pid)):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe
