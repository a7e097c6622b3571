"""A row of the benchmark."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.contestants import OURS, Contestant, Scale
from benchmarks.placement import Placement
from benchmarks.units import Figure


@dataclass(frozen=True)
class Row:
    """Ours beside its peers, measured once for all its figures."""

    name: str
    title: str  # "{count}" is how often something is done, where that depends on --quick
    figures: tuple[Figure, ...]
    ours: Contestant
    peers: dict[str, Contestant] = field(default_factory=dict)
    placement: Placement = Placement.UNPINNED
    hogs: int = 0  # busy processes beside it
    count: Scale | None = None
    quick: bool = False  # also in --quick
    rounds: int | None = None  # fewer than the run's where a turn is long
    once: bool = False  # in the first life only
    strangers: bool = False  # only with --peers

    def contestants(self) -> dict[str, Contestant]:
        return {OURS: self.ours, **self.peers}

    def place(self) -> str:
        return self.placement.value + (f", {self.hogs} busy processes" if self.hogs else "")

    def titled(self, quick: bool) -> str:
        return self.title.format(count=f"{self.count.of(quick):,}" if self.count else "")
