"""What a run measured, on what machine, and the only place where ratios are computed.

Every measurement carries the id of its run. A ratio between two runs is an error: machines change from minute to
minute, and a ratio is honest only when both sides met the same minute.
"""

from __future__ import annotations

import gzip
import json
import os
import platform
import statistics
import subprocess
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

FORMAT = 1


class DifferentRuns(ValueError):
    """Two measurements come from different invocations: there is no ratio between them."""


@dataclass(frozen=True)
class Round:
    """One turn of one contestant. Nanoseconds of one operation, or another figure of which less is better."""

    p50: float
    p99: float
    count: int

    @staticmethod
    def of(samples: Sequence[float]) -> Round:
        ordered = sorted(samples)
        last = len(ordered) - 1
        return Round(ordered[last // 2], ordered[min(last, round(last * 0.99))], len(ordered))


@dataclass(frozen=True)
class Measurement:
    """All turns of one contestant in one row of one run."""

    run: str
    row: str
    contestant: str
    rounds: tuple[Round, ...]

    @property
    def p50(self) -> float:
        return statistics.median(r.p50 for r in self.rounds)

    @property
    def p99(self) -> float:
        return statistics.median(r.p99 for r in self.rounds)


@dataclass(frozen=True)
class Speedup:
    """How many times less `ours` took than `theirs`: of the medians, and the least and greatest of single turns."""

    ratio: float
    least: float
    greatest: float


def speedup(ours: Measurement, theirs: Measurement) -> Speedup:
    """The ratio between two contestants of one row; raises DifferentRuns where they did not meet in one invocation."""
    if ours.run != theirs.run:
        raise DifferentRuns(
            f"no ratio between run {ours.run[:8]} ({ours.contestant}) and run {theirs.run[:8]} ({theirs.contestant}): "
            "measure both in one invocation of benchmarks.run"
        )
    if ours.row != theirs.row:
        raise ValueError(f"no ratio between rows {ours.row!r} and {theirs.row!r}: they measure different things")
    turns = [b.p50 / max(a.p50, 1e-9) for a, b in zip(ours.rounds, theirs.rounds, strict=True)]
    return Speedup(theirs.p50 / max(ours.p50, 1e-9), min(turns), max(turns))


@dataclass
class RowResult:
    """One row: its description, and a measurement for each contestant, ours first."""

    name: str
    title: str
    unit: str
    work: float  # how the unit is computed from nanoseconds: rows.Unit
    rate: bool
    placement: str
    targets: dict[str, float]  # for a peer: how many times faster we are to be
    limit: float | None = None  # what our own figure, in its unit, may be at most
    contestants: list[Measurement] = field(default_factory=list)

    @property
    def ours(self) -> Measurement:
        return self.contestants[0]

    def speedups(self) -> dict[str, Speedup]:
        return {theirs.contestant: speedup(self.ours, theirs) for theirs in self.contestants[1:]}


@dataclass
class Run:
    """One invocation."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    quick: bool = False
    machine: dict[str, Any] = field(default_factory=dict)
    rows: list[RowResult] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Writes the run as JSON; packed, if the name ends in .gz."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"
        packed = path.suffix == ".gz"
        path.write_bytes(gzip.compress(text.encode(), mtime=0) if packed else text.encode())

    @staticmethod
    def load(path: Path) -> Run:
        """Reads what save() wrote; raises DifferentRuns for a file that was pieced together from several."""
        data = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
        if data.pop("format", None) != FORMAT:
            raise ValueError(f"{path.name} is not a benchmark run of format {FORMAT}")
        run = Run(**{**data, "rows": [_row(row) for row in data["rows"]]})
        strangers = {m.run for row in run.rows for m in row.contestants} - {run.id}
        if strangers:
            raise DifferentRuns(f"{path.name} is run {run.id[:8]} but holds rows of {sorted(s[:8] for s in strangers)}")
        return run


def _row(data: dict[str, Any]) -> RowResult:
    measured = [Measurement(**{**m, "rounds": tuple(Round(**r) for r in m["rounds"])}) for m in data["contestants"]]
    return RowResult(**{**data, "contestants": measured})


def describe_machine() -> dict[str, Any]:
    """What a reader needs to judge the figures. No host name, no user, no path."""
    versions = {"python": platform.python_version(), "linux": platform.release().split("-")[0]}
    for package in ("torch", "tensorferry", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    versions["commit"] = _commit()
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "versions": versions,
        "busy_before": round(busy_share(0.5), 3),  # share of the machine that others used before the first row
    }


def _commit() -> str:
    """Which sources; "-dirty" where they have been changed since."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()} ({platform.machine()})"
    return platform.machine()


def busy_share(seconds: float) -> float:
    """The share of all cores that was busy during `seconds`."""

    def ticks() -> tuple[int, int]:
        fields = [int(f) for f in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]

    total, idle = ticks()
    time.sleep(seconds)
    total_after, idle_after = ticks()
    return 1 - (idle_after - idle) / max(1, total_after - total)
