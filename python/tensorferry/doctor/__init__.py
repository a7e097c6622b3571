"""``tensorferry doctor``: what this host can do, what it cannot and why, what that costs, and what to do."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence

from .. import errors
from ..progress import Progress
from . import gpus, limits, memory, network, peer, rdma, report, settings
from .finding import BROKEN, Finding, Host, run
from .peer import Path

__all__ = ["CHECKS", "Finding", "Host", "Path", "examine", "main"]

#: All checks of the host, in the order of the report.
CHECKS = (*memory.CHECKS, *limits.CHECKS, *settings.CHECKS, *network.CHECKS, *gpus.CHECKS, *rdma.CHECKS)


def examine(host: Host | None = None) -> list[Finding]:
    """Runs all checks of this host. Starts no agent, and changes nothing.

    Args:
        host: the files and the environment to look at; None: those of this process.

    Example::

        from tensorferry import doctor

        broken = [finding for finding in doctor.examine() if finding.state == "broken"]
    """
    host = host or Host()
    return [finding for check in CHECKS for finding in run(check, host)]


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not ADDRESS:PORT")
    return host.strip("[]"), int(port)


_LOCAL = ("local", 0)


def _peer(text: str) -> tuple[str, int]:
    return _LOCAL if text == "local" else _address(text)


def _end_with_stdin(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


def _serve(where: tuple[str, int], while_stdin: bool) -> None:
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    if while_stdin:
        threading.Thread(target=_end_with_stdin, args=(ended,), daemon=True).start()
    try:
        peer.serve(*where, ended, lambda port: print(f"serves at {where[0]}:{port}", flush=True))
    except KeyboardInterrupt:
        pass


def _measured(where: tuple[str, int], progress: Progress) -> tuple[list[Finding], list[Path]]:
    if where != _LOCAL:
        return peer.ask(*where, say=progress.say)
    try:
        with peer.local_peer() as local:
            return peer.ask(*local, say=progress.say)
    except errors.InternalError as error:
        return [Finding("peer", BROKEN, str(error), "No agent starts on this host.", "Mend what is broken above.")], []


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: ``tensorferry doctor [PEER]``. The exit status is 1 if something is broken."""
    parser = argparse.ArgumentParser(
        prog="tensorferry doctor",
        description="Says what this host can do for TensorFerry, what it cannot and why, what each finding costs, and "
        "what to do. With a peer, also who reaches whom, and the latency and the rate of each path.",
    )
    parser.add_argument(
        "peer", nargs="?", type=_peer, metavar="PEER",
        help="ADDRESS:PORT of `tensorferry doctor --serve` on another host, or `local` for a process of this one",
    )  # fmt: skip
    parser.add_argument(
        "--serve", type=_address, metavar="ADDRESS:PORT", help="answer the doctor of another host there"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--while-stdin", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve:
        if given.peer:
            parser.error("a process either answers (--serve) or asks (PEER)")
        _serve(given.serve, given.while_stdin)
        return
    paths: list[Path] = []
    with Progress() as progress:
        progress.say("looking at this host")
        findings = examine()
        if given.peer:
            progress.say("reaching the peer")
            more, paths = _measured(given.peer, progress)
            findings += more
    print(report.as_json(findings, paths) if given.json else report.as_text(findings, paths))
    sys.exit(1 if any(finding.state == BROKEN for finding in findings) else 0)
