"""What is read off the samples of a turn, and how it is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Unit:
    """How the nanoseconds of one operation are shown: divided by `work`, or as `work` in that time."""

    text: str
    work: float
    rate: bool = False

    def value(self, figure: float) -> float:
        return self.work / max(figure, 1e-9) if self.rate else figure / self.work


MICROSECONDS = Unit("us", 1e3)
MILLISECONDS = Unit("ms", 1e6)
SECONDS = Unit("s", 1e9)
# These hold on any machine, so that they may be quoted as they are.
SHARE_OF_CORE = Unit("% of a core", 1e-2)
THREADS = Unit("threads", 1)
PERCENT = Unit("%", 1)
TIMES_ITS_BYTES = Unit("times its bytes", 1)
ABSOLUTE = {unit.text for unit in (SHARE_OF_CORE, THREADS, PERCENT, TIMES_ITS_BYTES)}


def per_second(what: str, operations: float) -> Unit:
    """Operations a second of samples that did `operations` each."""
    return Unit(what, operations * 1e9, rate=True)


def gigabytes(size: int) -> Unit:
    """A round trip carries its bytes twice."""
    return Unit("GB/s", 2.0 * size, rate=True)


def gigabytes_sent(size: int) -> Unit:
    """Of samples that carry their bytes once."""
    return Unit("GB/s", float(size), rate=True)


def p99(samples: Sequence[float]) -> Sequence[float]:
    return [sorted(samples)[round((len(samples) - 1) * 0.99)]]


def maximum(samples: Sequence[float]) -> Sequence[float]:
    return [max(samples)]


@dataclass(frozen=True)
class Figure:
    """One line of the report for each contestant. `targets` holds, for a peer, how many times faster than it we are to
    be, `limit` what our own figure may be at most."""

    unit: Unit
    targets: dict[str, float] = field(default_factory=dict)
    name: str = ""  # behind the row's name and title
    title: str = ""
    series: str = ""  # of a turn that measures several
    of: Callable[[Sequence[float]], Sequence[float]] = list
    limit: float | None = None
