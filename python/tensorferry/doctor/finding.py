"""A finding of ``tensorferry doctor``, and the host that it looks at."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .gpu_facts import GpuFacts, gather

__all__ = ["BROKEN", "NOTE", "OK", "SLOW", "Check", "Finding", "Host", "run"]

OK = "ok"  # as it should be
NOTE = "note"  # not there, and nothing is lost by it on this host
SLOW = "slow"  # works, at a cost
BROKEN = "broken"  # something does not work, or will fail


@dataclass(frozen=True)
class Finding:
    """What one check has found.

    Args:
        check: the check's name, such as ``"memfd"``; scripts may compare it.
        state: ``"ok"``, ``"note"``, ``"slow"`` or ``"broken"``.
        found: what is there.
        cost: what it costs; ``""`` if nothing.
        advice: what to do; ``""`` if nothing.
    """

    check: str
    state: str
    found: str
    cost: str = ""
    advice: str = ""


@dataclass(frozen=True)
class Host:
    """The host that is looked at: its files, this process's environment and the GPUs. Tests give others.

    Args:
        root: the folder whose ``proc`` and ``sys`` are read.
        environ: the variables.
        gpu_facts: returns what is known of the GPUs.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    gpu_facts: Callable[[], GpuFacts] = gather

    def read(self, path: str) -> str | None:
        """Returns the text of a file below the root, stripped; None: it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return None

    def names(self, path: str) -> list[str]:
        """Returns the names in a folder below the root, sorted; none if there is no such folder."""
        try:
            return sorted(each.name for each in (self.root / path).iterdir())
        except OSError:
            return []

    def variable(self, name: str) -> str:
        """Returns the value of a variable; ``""`` if it is unset."""
        return self.environ.get(name, "")


Check = Callable[[Host], Iterable[Finding]]


def run(check: Check, host: Host) -> list[Finding]:
    """Runs a check. An exception becomes a finding: the other checks go on."""
    try:
        return list(check(host))
    except Exception as error:
        name = check.__name__
        return [Finding(name, BROKEN, f"the check itself failed: {error!r}", "", "Report this as a bug.")]


def size_text(count: float) -> str:
    """Returns a number of bytes for people: 64 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
