"""What a run of benchmarks.gpu says of an all_reduce on several GPUs, and who the peers are. It needs no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.results import Run

NCCL = "NCCL send/recv"  # in rows of calls
NCCL_REDUCE, SYMMETRIC = "NCCL", "torch's symmetric memory"  # in rows of an all_reduce
NAME = re.compile(r"gpus(?P<gpus>\d+)-all-reduce-(?P<number>\d+)(?P<unit>[kmg]b)(?P<graph>-graph)?")


@dataclass(frozen=True)
class ReductionFigure:
    """A row of several GPUs, as its name tells it; `ratios`: how many times faster than each peer we were."""

    gpus: int
    size: str
    graph: bool
    ratios: dict[str, float]


def reductions(run: Run) -> list[ReductionFigure]:
    """In the order of the rows."""
    return [
        ReductionFigure(
            int(found["gpus"]),
            f"{found['number']} {found['unit'].upper()}",
            found["graph"] is not None,
            {who: s.ratio for who, s in row.speedups().items()},
        )
        for row in run.rows
        if (found := NAME.fullmatch(row.name))
    ]
