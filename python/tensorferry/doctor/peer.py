"""What two processes measure of each other, on one host or two: who reaches whom, and how fast each path is.

One process serves the store and answers: ``tensorferry doctor --serve ADDRESS:PORT``. The other one asks:
``tensorferry doctor ADDRESS:PORT``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .. import errors, rendezvous
from ..agent import Agent, Explanation
from .finding import BROKEN, OK, SLOW, Finding
from .network import why_not_reached

__all__ = ["Path", "ask", "local_peer", "serve"]

_LARGE = 64 << 20
_SMALL = 4096
_TURNS = 200  # empty calls
_COPIES = 8  # tensors


@dataclass(frozen=True)
class Path:
    """How fast one path to a peer is.

    Args:
        name: the transport of calls, or the channel of tensors with its devices.
        latency_us: the median of a call in microseconds, empty or with a tensor of 4 KiB; None: not measured.
        gigabytes_per_second: the rate at which a tensor of 64 MiB goes there; None: not measured.
        why: why it was not measured, or what it is; ``""`` if there is nothing to say.
    """

    name: str
    latency_us: float | None
    gigabytes_per_second: float | None
    why: str = ""


def _key() -> str:
    """Returns the cluster key of this process, for the store; ``""`` if there is none.

    Raises:
        InvalidArgument: the key's file cannot be read.
    """
    file = os.environ.get("TENSORFERRY_KEY_FILE")
    if not file:
        return os.environ.get("TENSORFERRY_KEY", "")
    try:
        with open(file, encoding="utf-8") as text:
            return text.read().strip()
    except OSError as error:
        raise errors.InvalidArgument(f"the key's file {file}: {error.strerror}") from None


def _nothing() -> None:
    pass


def _sink(tensor: torch.Tensor) -> int:
    return tensor.numel()


def _reached_back(host: str, port: int) -> tuple[str, str]:
    """Runs at the answering process: whether it can connect to the asking one."""
    return why_not_reached(host, port)


def _now() -> float:
    return time.time()


def serve(host: str, port: int, ended: threading.Event, ready: Callable[[int], None]) -> None:
    """Serves the store at this address, and answers until ``ended``. ``ready`` gets the port.

    Raises:
        Unauthenticated: the address is not of loopback, and there is no cluster key. InternalError: it cannot listen.
    """
    server = rendezvous.StoreServer(host, port, _key())
    store = rendezvous.connect_store(host, server.port, _key())
    with Agent("doctor-answers", store=store, reaches=host, trust="full"):
        ready(server.port)
        ended.wait()


@contextlib.contextmanager
def local_peer() -> Iterator[tuple[str, int]]:
    """Starts an answering process on this host; gives its address."""
    command = [sys.executable, "-m", "tensorferry", "doctor", "--serve", "127.0.0.1:0", "--while-stdin"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("serves"):
                raise errors.InternalError("the process that was to answer has ended: its error is above")
            yield "127.0.0.1", int(line.rpartition(":")[2])
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _silent(text: str) -> None:
    pass


def ask(
    host: str, port: int, timeout: float = 10.0, say: Callable[[str], None] = _silent
) -> tuple[list[Finding], list[Path]]:
    """Measures the paths to the process that answers at this address.

    Args:
        host, port: where ``tensorferry doctor --serve`` listens.
        timeout: seconds to reach it.
        say: is told what is measured.
    """
    cost = "Nothing reaches the peer."
    why, advice = why_not_reached(host, port, timeout)
    if why:
        return [Finding("peer", BROKEN, why, cost, f"{advice} There: tensorferry doctor --serve {host}:{port}")], []
    try:
        store = rendezvous.connect_store(host, port, _key(), timeout)
        with Agent(f"doctor-asks-{os.getpid()}", store=store, reaches=host, timeout=30) as agent:
            agent.rpc_sync("doctor-answers", _nothing)
            findings = [Finding("peer", OK, f"calls reach the peer at {host}:{port}")]
            findings += _both_ways(agent, host)
            findings += _clocks(agent)
            more, paths = _paths(agent, say)
            return findings + more, paths
    except errors.Unauthenticated as error:
        advice = "Copy one key to both hosts (tensorferry key), and set TENSORFERRY_KEY_FILE on both."
        return [Finding("peer_key", BROKEN, str(error), cost, advice)], []
    except errors.Error as error:
        return [Finding("peer", BROKEN, f"{type(error).__name__}: {error}", cost, "See the text.")], []


def _own_address(towards: str) -> str:
    """Returns the address from which this host reaches another."""
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        return str(probe.getsockname()[0])


def _both_ways(agent: Agent, host: str) -> Iterator[Finding]:
    """Lets the peer connect to a port of this process."""
    own = _own_address(host)
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    with socket.create_server((own, 0), family=family) as server:
        port = server.getsockname()[1]
        why, _ = agent.rpc_sync("doctor-answers", _reached_back, args=(own, port))
    if why:
        cost = "One direction works: agents then ask each other to dial. If neither could, calls would fail."
        advice = f"Open ports on this host ({own}) for the peer, and name them: ports=7000-7099."
        yield Finding("peer_back", SLOW, f"the peer cannot connect to this host: {why}", cost, advice)
    else:
        yield Finding("peer_back", OK, f"the peer can connect to this host at {own}")


def _clocks(agent: Agent) -> Iterator[Finding]:
    before = time.time()
    there = agent.rpc_sync("doctor-answers", _now)
    passed = time.time() - before
    apart = there - before - passed / 2
    if abs(apart) > max(1.0, passed):
        cost = "Traces and flight recorders of both hosts do not fit together."
        yield Finding("peer_clock", SLOW, f"the hosts' clocks are {apart:.3f} s apart", cost, "Start NTP on both.")
    else:
        yield Finding("peer_clock", OK, f"the hosts' clocks agree within {max(abs(apart), passed) * 1e3:.1f} ms")


def _median(samples: list[float]) -> float:
    return sorted(samples)[len(samples) // 2]


def _timed(run: Callable[[], object], times: int) -> list[float]:
    out = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        out.append(time.perf_counter() - began)
    return out


def _send(agent: Agent, tensor: torch.Tensor, channel: str) -> object:
    return agent.rpc_sync("doctor-answers", _sink, args=(tensor,), require=channel)


_OTHERS = "carries GPU memory", "no GPU memory"  # why a channel has nothing to do with tensors of the CPU


def _probed(agent: Agent) -> Explanation:
    """Returns how tensors travel to the peer when the channels have been tried, for 10 s at most."""
    until = time.monotonic() + 10
    while True:
        found = agent.explain("doctor-answers")
        if time.monotonic() > until or not any("under way" in reason for _, _, reason in found.candidates):
            return found
        time.sleep(0.05)


def _paths(agent: Agent, say: Callable[[str], None]) -> tuple[list[Finding], list[Path]]:
    found = _probed(agent)
    calls = _timed(lambda: agent.rpc_sync("doctor-answers", _nothing), _TURNS)
    paths = [Path(f"calls by {found.transport}", _median(calls[_TURNS // 4 :]) * 1e6, None, found.no_ring)]
    findings = []
    if found.no_ring and found.transport == "unix":
        cost = "Each call takes system calls: about twice the latency of shared memory."
        findings.append(
            Finding("peer_ring", SLOW, f"calls go by unix socket: {found.no_ring}", cost, "See memfd above.")
        )
    tensor, small = torch.zeros(_LARGE, dtype=torch.uint8), torch.zeros(_SMALL, dtype=torch.uint8)
    for channel, usable, reason in found.candidates:
        name = f"{channel}, {found.devices}"
        if any(each in reason for each in _OTHERS):
            continue
        if not usable:
            paths.append(Path(name, None, None, reason))
            continue
        say(f"measuring {name}")
        try:
            took = _timed(functools.partial(_send, agent, tensor, channel), _COPIES)
            calls = _timed(functools.partial(_send, agent, small, channel), _TURNS)
        except errors.Error as error:
            paths.append(Path(name, None, None, str(error)))
            continue
        chosen = "carries tensors now" if channel == found.channel else ""
        latency = _median(calls[_TURNS // 4 :]) * 1e6
        paths.append(Path(name, latency, _LARGE / _median(took) / 1e9, chosen))
    return findings, paths
