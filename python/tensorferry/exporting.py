"""Exports the metrics of this process's agents: to Prometheus over HTTP, and into a file. See docs/metrics.md."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

from . import errors, metrics

if TYPE_CHECKING:
    from .agent import Agent

__all__ = ["INTERVAL", "Exporter", "parse_address", "share"]

INTERVAL = 10.0  # seconds between two writes of the file
_log = logging.getLogger("tensorferry")


def parse_address(text: str) -> tuple[str, range]:
    """Returns the host and the ports of ``metrics_port``: ``"9400"``, ``"9400-9463"``, ``"0.0.0.0:9400"``.

    Raises:
        InvalidArgument: the text is none of these.
    """
    host, _, ports = text.rpartition(":")
    first, _, last = ports.partition("-")
    try:
        found = range(int(first), int(last or first) + 1)
        if not found or found[0] < 0 or found[-1] > 65535:
            raise ValueError
    except ValueError:
        raise errors.InvalidArgument(
            f'metrics_port is a port as 9400, ports as "9400-9463", or "ADDRESS:PORT", not {text!r}'
        ) from None
    return host.strip("[]") or "127.0.0.1", found


class _Handler(BaseHTTPRequestHandler):
    timeout = 2  # seconds for the request: one client is served at a time
    server: _Server

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/", "/metrics"):
            self.send_error(404, "the metrics are at /metrics")
            return
        body = self.server.read().encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        _log.debug(format, *args)


class _Server(HTTPServer):
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], read: Callable[[], str]) -> None:
        self.read = read
        super().__init__(address, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        _log.debug("a client of the metrics at %s went away", client_address, exc_info=True)


def _listen(text: str, read: Callable[[], str]) -> _Server:
    host, ports = parse_address(text)
    why: OSError | None = None
    for port in ports:
        try:
            return _Server((host, port), read)
        except OSError as error:
            why = error
    raise errors.InternalError(f"the metrics cannot be served at {text}: {why}. Give more ports, as 9400-9463")


class Exporter:
    """Exports the metrics of the agents that use it, from the first one's start until the last one's end.

    Args:
        port: where to listen, as ``metrics_port`` of an agent; None: nowhere.
        file: the file to write, whole, every 10 s, and to remove at the end; None: none.

    Raises:
        InvalidArgument: ``port`` makes no sense. InternalError: no server can listen there.
    """

    def __init__(self, port: str | None, file: Path | None) -> None:
        self._agents: list[Agent] = []
        self._server = None if port is None else _listen(port, self.text)
        self._file = file
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def _start(self, run: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=run, name="tensorferry-metrics", daemon=True))
        self._threads[-1].start()

    @property
    def port(self) -> int | None:
        """The port of the server; None: there is none."""
        return None if self._server is None else int(self._server.server_address[1])

    def text(self) -> str:
        """Returns the metrics of all agents as Prometheus reads them."""
        return metrics.text_of(metrics.take(agent) for agent in list(self._agents))

    def add(self, agent: Agent) -> None:
        """Exports this agent too. The first one starts the threads."""
        self._agents.append(agent)
        if self._threads:
            return
        if self._server is not None:
            self._start(self._server.serve_forever)
        if self._file is not None:
            self._start(self._write_often)

    def remove(self, agent: Agent) -> bool:
        """Exports this agent no more. True: it was the last one, and the exporter has ended."""
        self._agents.remove(agent)
        if self._agents:
            return False
        self._ended.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        for thread in self._threads:
            thread.join(5)
        return True

    def forget(self) -> None:
        """Closes the server's socket, in a forked child, which has none of the threads."""
        if self._server is not None:
            self._server.socket.close()

    def write(self) -> None:
        """Writes the file now. A reader sees the old text or the new one."""
        assert self._file is not None
        beside = self._file.with_name(f".{self._file.name}.new")
        beside.write_text(self.text())
        beside.replace(self._file)

    def _write_often(self) -> None:
        assert self._file is not None
        warned = False
        while True:
            try:
                self.write()
            except Exception as error:  # of the file system, or of a source that the program has added
                if not warned:
                    warned = True
                    with contextlib.suppress(Exception):  # of a handler of the log
                        _log.warning("the metrics cannot be written to %s: %s", self._file, error)
            if self._ended.wait(INTERVAL):
                break
        self._file.unlink(missing_ok=True)


_lock = threading.Lock()
_shared: dict[tuple[str | None, Path | None], Exporter] = {}  # of this process, by where they export


def _own_file(path: str) -> Path:
    """Returns the path with the process's id before the extension, so that each process has its own file."""
    given = Path(path)
    return given.with_name(f"{given.stem}.{os.getpid()}{given.suffix}")


def share(agent: Agent, port: int | str | None, file: str | os.PathLike[str] | None) -> None:
    """Exports the metrics of ``agent`` until :func:`unshare`, with those of the process's other agents that are
    exported in the same way. ``port`` and ``file`` are the agent's options; None: those of the environment.

    Raises:
        InvalidArgument, InternalError: as :class:`Exporter`.
    """
    if port is None:
        port = os.environ.get("TENSORFERRY_METRICS_PORT") or None
    if file is None:
        file = os.environ.get("TENSORFERRY_METRICS_FILE") or None
    if port is None and file is None:
        return
    key = None if port is None else str(port), None if file is None else _own_file(os.fspath(file))
    with _lock:
        exporter = _shared.get(key)
        if exporter is None:
            exporter = _shared[key] = Exporter(*key)
        exporter.add(agent)
    agent.__dict__["_exporter"] = exporter


def unshare(agent: Agent) -> None:
    """Exports the metrics of ``agent`` no more."""
    exporter = agent.__dict__.pop("_exporter", None)
    if exporter is None:
        return
    with _lock:
        if exporter.remove(agent):
            for key in [key for key, each in _shared.items() if each is exporter]:
                del _shared[key]


def _forget_in_child() -> None:
    for exporter in _shared.values():
        exporter.forget()
    _shared.clear()


os.register_at_fork(after_in_child=_forget_in_child)
