"""Joins a running job to look at it, for ``tensorferry top`` and ``tensorferry explain``."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable
from typing import Any

from . import errors, observing, rendezvous
from .agent import Agent

__all__ = ["PATIENCE", "Watcher", "add_arguments", "watcher_of"]

PATIENCE = 3.0  # seconds for an answer
_STORE_TIMEOUT = 10.0  # seconds to reach the store
_ASKED_AGAIN = 10.0  # seconds after which an agent that was gone is asked again: it may have been started again


class Watcher:
    """A member of a job that looks at the others. It has no rank, and serves nothing of its own.

    Args:
        store: where the job meets: ``"HOST:PORT"`` of torch's store (MASTER_ADDR and MASTER_PORT), ``"tf://HOST:PORT"``
            of the built-in one, or ``"file:///PATH"``.
        world_size: that of the job; None: its agents join and leave at any time.
        names: agents to begin with. Agents with ranks are found in the store; others by the links of those.
        patience: seconds for an agent's answer, after which it counts as gone.

    Raises:
        Unauthenticated: the cluster key is another one. DeadlineExceeded, ConnectionLost: no store is there.
        ValueError: ``store`` is no such text.
    """

    def __init__(
        self, store: str, world_size: int | None = None, names: Iterable[str] = (), patience: float = PATIENCE
    ) -> None:
        self.patience = patience
        prefix = f"tensorferry/{world_size}/0" if world_size else "tensorferry"
        options: dict[str, Any] = {"prefix": prefix, "trust": "registered", "timeout": patience}
        name = f"watcher-{os.getpid()}"
        if store.startswith("tf://"):
            host, _, port = store.removeprefix("tf://").rpartition(":")
            if not host or not port.isdecimal() or int(port) > 65535:
                raise ValueError(f"{store!r} is not tf://HOST:PORT")
            met = rendezvous.connect_store(host, int(port), timeout=_STORE_TIMEOUT)
            self.agent = Agent(name, store=met, reaches=host, **options)
        else:
            method = store if "://" in store else f"tcp://{store}"
            meeting = rendezvous.meet(method, None, -1, None, _STORE_TIMEOUT)
            self.agent = Agent(name, store=meeting.store, reaches=meeting.host, **options)
        self._world_size = world_size
        self._names = set(names)
        self._gone: dict[str, str] = {}
        self._gone_since: dict[str, float] = {}

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.agent.leave()

    @property
    def names(self) -> list[str]:
        """The agents that are known, sorted."""
        return sorted(self._names - set(self._gone) - {self.agent.name})

    @property
    def gone(self) -> dict[str, str]:
        """Why agents do not answer, by name."""
        return dict(self._gone)

    def _find_ranks(self) -> None:
        rank = 0
        while self._world_size is None or rank < self._world_size:
            try:
                self._names.add(self.agent.get_worker_info(rank).name)
            except errors.NotFound:
                if self._world_size is None:
                    return
            rank += 1

    def look(self) -> dict[str, dict[str, Any]]:
        """Asks all agents, and those that they are linked with. Returns what observing.observe() says of each.

        One that is gone is asked again every 10 s.
        """
        for name, since in list(self._gone_since.items()):
            if time.monotonic() - since >= _ASKED_AGAIN:
                del self._gone[name], self._gone_since[name]
        if not self._names:
            self._find_ranks()
        seen: dict[str, dict[str, Any]] = {}
        while asked := {name for name in self._names - set(seen) - set(self._gone) if not _watches(name)}:
            futures = {name: self.agent.rpc_async(name, observing.FUNCTION, timeout=self.patience) for name in asked}
            for name, future in futures.items():
                try:
                    seen[name] = future.wait()
                except errors.Error as error:
                    self._gone[name] = f"{type(error).__name__}: {error}"
                    self._gone_since[name] = time.monotonic()
                else:
                    self._names |= {link["peer"] for link in seen[name]["links"] if link["state"] == "up"}
        return seen


def _watches(name: str) -> bool:
    return name.startswith("watcher-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what names a job to a command."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    default = f"{address}:{port}" if address and port else None
    parser.add_argument(
        "store", nargs="?" if default else None, default=default, metavar="STORE",
        help="HOST:PORT of the store at which the job meets (default: MASTER_ADDR:MASTER_PORT), tf://HOST:PORT of a "
        "StoreServer, or file:///PATH",
    )  # fmt: skip
    size = os.environ.get("WORLD_SIZE")
    parser.add_argument(
        "--world-size", type=int, default=int(size) if size and size.isdigit() else None, metavar="N",
        help="that of the job, if it has one (default: WORLD_SIZE)",
    )  # fmt: skip
    parser.add_argument("--agents", nargs="+", default=[], metavar="NAME", help="agents without ranks to begin with")
    parser.add_argument(
        "--patience", type=float, default=PATIENCE, metavar="SECONDS",
        help=f"how long an agent may take to answer before it counts as gone (default: {PATIENCE:g})",
    )  # fmt: skip


def watcher_of(given: argparse.Namespace, parser: argparse.ArgumentParser) -> Watcher:
    """Joins the job that the arguments name; ends the program with the reason if it cannot."""
    try:
        return Watcher(given.store, given.world_size, given.agents, given.patience)
    except ValueError as error:
        parser.error(str(error))
    except errors.Error as error:
        hint = "" if "://" in given.store else f". If a StoreServer serves there, the address is tf://{given.store}"
        parser.exit(1, f"{parser.prog}: {error}{hint}\n")
