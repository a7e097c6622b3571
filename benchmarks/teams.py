"""Python processes that call each other through one module, stopped while others are measured.

An idle agent is not always quiet (torch.distributed.rpc's polls its shared-memory transport on a core of its own), so a
team that is not being measured is stopped by SIGSTOP: it then disturbs no measurement.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import random
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

from benchmarks.placement import Placement, place

START_TIMEOUT = 120.0
CALLER, CALLEE = 0, 1  # ranks; from 2 on there are more callers
PAIR = 2


def free_port() -> int:
    """Returns a TCP port of 127.0.0.1 that is free. It is below the range from which Linux serves sockets that
    name no port, so they do not take it before a process of the caller's listens there. Nor do other workers of one
    run of pytest, which have ports of their own."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    first = 20_000 + (int(worker) % 8 if worker.isdigit() else 0) * 1_596
    while True:
        port = random.SystemRandom().randrange(first, first + 1_596)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def name_of(rank: int) -> str:
    return "callee" if rank == CALLEE else f"caller{rank}"


def end_with_driver() -> None:
    """No process outlives the driver, stopped or not, however the driver ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; the parent is the driver or the fork server
    # The fork server ends when all have closed this descriptor, which Python lets its children inherit.
    alive = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_alive_fd", None)
    if alive is not None:
        os.close(alive)


def _serve(connection: Connection, module: str, port: int, workloads: str, environment: Mapping[str, str]) -> None:
    """The life of one process: it does what the driver asks until it is killed."""
    end_with_driver()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", **environment)
    warnings.simplefilter("ignore")
    try:
        rpc = importlib.import_module(module)
        jobs = importlib.import_module(workloads)
        connection.send(len(os.listdir("/proc/self/task")))
        while True:
            name, arguments = connection.recv()
            connection.send(getattr(jobs, name)(rpc, **arguments))
    except EOFError:
        return
    except BaseException:
        connection.send(RuntimeError(f"a process of {module} failed:\n{traceback.format_exc()}"))


def _context(forked: bool) -> SpawnContext | ForkServerContext:
    """Where processes come from: new interpreters, or one process that has imported everything and is forked, which
    takes milliseconds where importing torch takes seconds."""
    if not forked:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    ours = ["benchmarks.workloads", "benchmarks.rows", "benchmarks.report", "benchmarks.figures", "benchmarks.plot"]
    context.set_forkserver_preload(["torch.distributed.rpc", "tensorferry.rpc", "typer", "rich.progress", *ours])
    return context


class Team:
    """`size` processes with `module` imported, which have joined with its default options and those given: a callee
    (rank 1) and callers. `joined` False leaves the joining to the workload; `forked`: see _context(). `workloads` is
    the module of what they can be asked to do, `environment` what they find in theirs."""

    def __init__(
        self,
        module: str,
        size: int = PAIR,
        options: Mapping[str, Any] | None = None,
        joined: bool = True,
        forked: bool = False,
        workloads: str = "benchmarks.workloads",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.module = module
        context = _context(forked)
        port = free_port()
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._killed: set[int] = set()
        try:
            for _ in range(size):
                mine, theirs = context.Pipe()
                self._connections.append(mine)
                given = theirs, module, port, workloads, environment or {}
                process = context.Process(target=_serve, args=given, daemon=True)
                process.start()
                self._processes.append(process)
                theirs.close()
            self._threads_before = self._receive(range(size), START_TIMEOUT)
            if joined:
                joining = {
                    rank: ("join", {"name": name_of(rank), "rank": rank, "world_size": size, "options": options or {}})
                    for rank in range(size)
                }
                self._ask(joining, START_TIMEOUT)
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    @property
    def size(self) -> int:
        return len(self._processes)

    def call(self, placement: Placement, workload: str, *, patience: float = 60, **arguments: Any) -> Any:
        """What a workload in the caller returns, all processes placed, and running for just that long."""
        return self.run(placement, {CALLER: (workload, arguments)}, patience)[CALLER]

    def run(
        self, placement: Placement, jobs: Mapping[int, tuple[str, dict[str, Any]]], patience: float = 60
    ) -> dict[int, Any]:
        """What workloads return that run at once, by rank; `patience` is in seconds."""
        cpus = placement.cpus()
        assert cpus is not None, "rows that the machine cannot place are skipped before"
        self._signal(signal.SIGCONT)
        try:
            for rank, process in enumerate(self._processes):
                if rank not in self._killed:
                    place(process.pid or 0, cpus[1 if rank == CALLEE else 0])
            return self._ask(jobs, patience)
        finally:
            self._signal(signal.SIGSTOP)

    def kill(self, rank: int) -> int:
        """Kills one process, and returns the time of that, as time.perf_counter_ns() of any process tells it."""
        self._killed.add(rank)
        begin = time.perf_counter_ns()
        self._processes[rank].kill()
        return begin

    def cpu_time(self) -> int:
        """Nanoseconds of CPU that all processes have used."""
        return sum(_cpu_time(process.pid or 0) for process in self._processes)

    def idle(self, seconds: float) -> float:
        """The callee's CPU time over `seconds` without a call, as a share of one core."""
        self.call(Placement.UNPINNED, "touch")
        callee = self._processes[CALLEE].pid or 0
        self._signal(signal.SIGCONT)
        try:
            time.sleep(0.2)  # what follows a call (spinning, acknowledgements) is over by then
            before, begin = _cpu_time(callee), time.perf_counter_ns()
            time.sleep(seconds)
            return (_cpu_time(callee) - before) / (time.perf_counter_ns() - begin)
        finally:
            self._signal(signal.SIGSTOP)

    def threads(self) -> int:
        """How many threads the callee's agent added to its process."""
        added: int = len(os.listdir(f"/proc/{self._processes[CALLEE].pid}/task")) - self._threads_before[CALLEE]
        return added

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.join(10)
        for connection in self._connections:
            connection.close()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, jobs: Mapping[int, tuple[str, dict[str, Any]]], patience: float) -> dict[int, Any]:
        for rank, job in jobs.items():
            self._connections[rank].send(job)
        return self._receive(jobs, patience)

    def _receive(self, ranks: Any, patience: float) -> dict[int, Any]:
        """An answer of each; the first error of any of them."""
        until = time.monotonic() + patience
        answers: dict[int, Any] = {}
        missing = {self._connections[rank]: rank for rank in ranks}
        while missing:
            ready = wait(list(missing), timeout=max(0.0, until - time.monotonic()))
            if not ready:
                late = ", ".join(name_of(rank) for rank in sorted(missing.values()))
                raise TimeoutError(f"{self.module}: no answer in {patience:.0f} s from {late}")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = missing.pop(connection)
                answers[rank] = self._answer(connection, rank)
        return answers

    def _answer(self, connection: Connection, rank: int) -> Any:
        try:
            answer = connection.recv()
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(5)
            code = self._processes[rank].exitcode
            raise RuntimeError(f"{self.module}: {name_of(rank)} ended with exit code {code}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid or 0, number)


def _cpu_time(pid: int) -> int:
    """Nanoseconds of CPU that a process has used: clock_getcpuclockid's encoding, finer than /proc's 10 ms."""
    return time.clock_gettime_ns((~pid << 3) | 2)
