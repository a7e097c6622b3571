"""Agents for the tests: several in this process, or one in each of some worker processes that all tests share (a fresh
process spends two seconds on importing torch)."""

from __future__ import annotations

import faulthandler
import itertools
import json
import multiprocessing
import os
import pty
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[2]))  # for benchmarks

from benchmarks.teams import free_port  # noqa: F401

# Streams of CUDA share 8 hardware queues by default, and work that waits in one of them holds up all behind it.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

# Groups use the table of algorithms, also if this user has measured other crossings.
os.environ.setdefault("TENSORFERRY_TUNING", "/nonexistent/tuning.json")

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("any time", deadline=None)
hypothesis.settings.load_profile("any time")

# A shell's background job ignores it, and Python then leaves it at that.
signal.signal(signal.SIGINT, signal.default_int_handler)


# One process runs all tests of a file, so the files that take longest start first.
LONG = ("examples", "torch_rpc", "c10d", "torch_c10d", "shutdown", "rref_kills", "codec", "call_shapes")
LONG_FILES = [f"test_{name}.py" for name in LONG]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failures", metavar="FILE", help="write what failed into this file, for scripts/retry.py")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--failures")
    if path is not None and not hasattr(config, "workerinput"):  # a worker of pytest-xdist tells the first process
        config.pluginmanager.register(Failures(path))


class Failures:
    """Appends each failed test, or file that cannot be imported, to a file: one JSON object a line."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            output = "\n".join([report.longreprtext, *(f"-- {name}\n{text}" for name, text in report.sections)])
            with self._path.open("a") as file:
                file.write(json.dumps({"test": report.nodeid, "output": output}) + "\n")


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = 2 if item.get_closest_marker("gpu2") else 1 if item.get_closest_marker("gpu") else 0
    if needed and (there := torch.cuda.device_count()) < needed:
        pytest.skip(f"needs {needed} GPU{'s' * (needed > 1)}, and torch sees {there} on this machine")
    if needed and "cluster" not in item.fixturenames:
        POOL.close()  # such a test starts its own processes, and a GPU takes a limited number of them


def carried_into_a_container(device: str, environment: dict[str, str] | None = None) -> str:
    """The channel that carries a tensor on ``device`` to an agent in a container, with which the sender has a folder in
    common, but no pid, IPC, network or mount namespace."""
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--ipc", "--net", "--mount-proc"]
    if os.geteuid() != 0:
        apart.insert(1, "--map-root-user")
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this process may not make pid, IPC, network and mount namespaces")
    program = [sys.executable, str(Path(__file__).parent / "programs" / "container.py")]
    environment = {**os.environ, **(environment or {})}
    with tempfile.TemporaryDirectory() as folder:  # a short name, as addresses of sockets are
        inside = [*apart, *program, "inside", "1", folder, device]
        outside = [*program, "outside", "0", folder, device]
        with subprocess.Popen(inside, env=environment) as contained:
            try:
                done = subprocess.run(
                    outside, env=environment, capture_output=True, text=True, timeout=180, check=False
                )
                assert done.returncode == 0, done.stderr
                assert contained.wait(120) == 0
            finally:
                contained.kill()
    return done.stdout.strip()


def empty_caches() -> None:
    """Gives back the memory of GPUs that this process does not use any more. The processes of several tests live side
    by side, and each stream has a cache of its own."""
    torch.cuda.empty_cache()  # nothing, if this process has used no GPU


# ---- several agents in this process


class Agents:
    """Makes agents that meet in one store; all leave when the test ends."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self._made: list[tensorferry.Agent] = []

    def __call__(self, name: str, **options: Any) -> tensorferry.Agent:
        agent = tensorferry.Agent(name, store=self.store, **options)
        self._made.append(agent)
        return agent

    def leave(self) -> None:
        for agent in self._made:
            agent.leave()
        empty_caches()


@pytest.fixture
def agents() -> Iterator[Agents]:
    """``agents("a", rank=0)`` is an agent of that name in this process."""
    made = Agents()
    yield made
    made.leave()


@pytest.fixture
def pair(agents: Agents) -> tuple[tensorferry.Agent, tensorferry.Agent]:
    """Two agents, "a" and "b", of ranks 0 and 1."""
    return agents("a", rank=0), agents("b", rank=1)


# ---- agents in worker processes


PATIENCE = float(os.environ.get("TENSORFERRY_TEST_PATIENCE", 0))  # seconds at least, where the processor is emulated


class WorkerFailed(Exception):
    """What a worker's function raised, as text."""


def _serve(control: Connection, path: list[str], environment: dict[str, str]) -> None:
    faulthandler.enable()
    os.environ.update(environment)  # what spawning imports has not asked CUDA for anything
    sys.path[:] = path
    while True:
        try:
            function, args, kwargs = control.recv()
        except EOFError:
            os._exit(0)
        try:
            control.send((True, function(*args, **kwargs)))
        except BaseException:
            control.send((False, traceback.format_exc()))


class Worker:
    """A process that runs functions of the tests' modules, one after another."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self.own = environment is not None
        context = multiprocessing.get_context("spawn")
        self.control, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, sys.path, environment or {}), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            self.control.send((function, args, kwargs))
        except BrokenPipeError as error:
            self.process.join(5)
            raise BrokenPipeError(f"the worker has ended with exit code {self.process.exitcode}") from error

    def result(self, timeout: float = 120) -> Any:
        if not self.control.poll(max(timeout, PATIENCE)):
            raise TimeoutError("the worker is still busy")
        ok, value = self.control.recv()
        if not ok:
            raise WorkerFailed(value)
        return value

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.start(function, *args, **kwargs)
        return self.result()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    @property
    def alive(self) -> bool:
        return self.process.is_alive()


def card_of_end(end: int) -> dict[str, str]:
    """What gives end 0 or end 1 of a test a card of its own, if TENSORFERRY_TEST_RDMA names two: ``rxe0,rxe1``."""
    cards = os.environ.get("TENSORFERRY_TEST_RDMA", "").split(",")
    return {"TENSORFERRY_RDMA_DEVICES": cards[end]} if len(cards) == 2 else {}


class Workers:
    """Processes that are kept from test to test, unless a test killed them."""

    def __init__(self) -> None:
        self._idle: list[Worker] = []

    def take(self, count: int) -> list[Worker]:
        self._idle = [worker for worker in self._idle if worker.alive]
        while len(self._idle) < count:
            self._idle.append(Worker())
        taken, self._idle = self._idle[:count], self._idle[count:]
        return taken

    def give_back(self, workers: list[Worker]) -> None:
        for worker in workers:
            if worker.own:
                worker.kill()
            else:
                self._idle.append(worker)

    def close(self) -> None:
        for worker in self._idle:
            worker.kill()
        self._idle = []


POOL = Workers()


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    yield POOL
    POOL.close()


def join(name: str, rank: int, world_size: int | None, port: int, options: dict[str, Any]) -> int:
    """Starts the default agent of this process, at the store that the test serves; returns the process's id."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=120))
    rpc.init_rpc(name, rank=rank, world_size=world_size, store=store, **options)
    return os.getpid()


def leave() -> None:
    if rpc._is_current_rpc_agent_set():
        rpc.shutdown(graceful=False)
    empty_caches()


class Cluster:
    """This process is "main", of rank 0; the others are "worker1", "worker2", ..."""

    def __init__(self, workers: Workers) -> None:
        self._pool = workers
        self.workers: list[Worker] = []
        self.pids: list[int] = []
        self.store: dist.TCPStore | None = None
        self._sessions = itertools.count()

    def start(
        self,
        count: int,
        *,
        static: bool = True,
        environment: dict[str, str] | None = None,
        at_once: Callable[[], object] | None = None,
        **options: Any,
    ) -> Cluster:
        """Starts the agents. If there is an ``environment``, the workers are processes of this test's own, which have
        it. ``at_once`` runs when this process's ``init_rpc`` has returned; the workers' may still be under way."""
        timeout = timedelta(seconds=120)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self.workers = self._pool.take(count) if environment is None else [Worker(environment) for _ in range(count)]
        # The processes have lived through different numbers of sessions.
        options.setdefault("prefix", f"test{next(self._sessions)}")
        size = count + 1 if static else None
        for rank, worker in enumerate(self.workers, start=1):
            worker.start(join, f"worker{rank}", rank, size, self.store.port, options)
        rpc.init_rpc("main", rank=0, world_size=size, store=self.store, **options)
        if at_once is not None:
            at_once()
        self.pids = [worker.result(180) for worker in self.workers]  # with the time that a new process starts in
        return self

    def stop(self) -> None:
        for worker in self.workers:
            if worker.alive:
                try:
                    worker.start(leave)
                except OSError:
                    worker.kill()  # a test did, a moment ago: the system has not reaped it yet
        leave()
        for worker in self.workers:
            if worker.alive:
                try:
                    worker.result(30)
                except (OSError, EOFError):  # it is late, or a test has killed it
                    worker.kill()
        self._pool.give_back([worker for worker in self.workers if worker.alive])
        self.workers = []  # a test may stop before its fixture does, and start again


@pytest.fixture
def cluster(workers: Workers) -> Iterator[Cluster]:
    """``cluster.start(2)``: default agents here ("main") and in two other processes ("worker1", "worker2")."""
    made = Cluster(workers)
    yield made
    made.stop()


def repeated(full: int) -> pytest.MarkDecorator:
    """Runs the test with ``times`` = ``full`` in ``make soak``, and with a hundredth of it (at least 1) otherwise."""
    return pytest.mark.parametrize("times", [max(1, full // 100), pytest.param(full, marks=pytest.mark.soak)])


def run_a_part(suite: str, part: int, tmp_path: Path) -> None:
    """Runs a fixed ``part``-th of a suite of PyTorch's, ``tests/torch_rpc`` or ``tests/torch_c10d``; it must pass."""
    report = tmp_path / "report.md"
    program = Path(__file__).resolve().parents[1] / suite / "run.py"
    command = [sys.executable, program, "--part", str(part), "--limit", "60", "--report", report]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout
    assert report.exists()


def outputs_of(started: list[subprocess.Popen[Any]], timeout: float = 300) -> list[Any]:
    """What the processes print, each to its pipe, once all have ended without an error."""
    try:
        ended = [process.communicate(timeout=timeout) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, error) in zip(started, ended, strict=True):
        assert process.returncode == 0, error
    return [output for output, _ in ended]


def run_at_terminal(command: list[str], status: int | None = 0) -> tuple[str, str]:
    """Runs a command whose standard error is a terminal. Returns its output, and what the terminal has got.

    Args:
        status: the exit status that the command must have; None: any.
    """
    terminal, other_end = pty.openpty()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=other_end, text=True)
    os.close(other_end)
    shown = b""
    try:
        while part := os.read(terminal, 65536):
            shown += part
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(terminal)
    out = process.communicate(timeout=300)[0]
    assert status is None or process.returncode == status, shown
    return out, shown.decode()


def stop_child(pid: int) -> None:
    """Stops a child of this process by SIGSTOP; returns once it has stopped, because a busy kernel takes its time."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)


def eventually(condition: Callable[[], bool], seconds: float = max(60, PATIENCE)) -> bool:
    """Waits for ``condition``, longer than a busy machine holds a process up; returns False if it stays false."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True
