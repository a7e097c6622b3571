"""Where the two processes of a row run. Latency between processes depends on it more than on anything else."""

from __future__ import annotations

import enum
import os
from pathlib import Path


class Placement(enum.Enum):
    UNPINNED = "unpinned"
    ONE_CORE = "one core"
    TWO_CORES = "two cores"

    def cpus(self) -> tuple[set[int], set[int]] | None:
        """Caller's and callee's processors; None where the machine has too few."""
        allowed = sorted(os.sched_getaffinity(0))
        if self is Placement.UNPINNED:
            return set(allowed), set(allowed)
        if self is Placement.ONE_CORE:
            return {allowed[0]}, {allowed[0]}
        other = next((cpu for cpu in allowed[1:] if _core(cpu) != _core(allowed[0])), None)
        return None if other is None else ({allowed[0]}, {other})


def _core(cpu: int) -> tuple[str, str]:
    """Two hardware threads of one core share these."""
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return (topology / "physical_package_id").read_text(), (topology / "core_id").read_text()
    except OSError:
        return "", str(cpu)


def place(pid: int, cpus: set[int]) -> None:
    """Moves every thread of a process; threads made later inherit it."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            os.sched_setaffinity(int(thread), cpus)
        except ProcessLookupError:
            continue  # ended meanwhile
