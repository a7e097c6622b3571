"""Busy processes: what a machine has beside the program that is measured. They compute in user space and never wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.placement import Placement, place

# PR_SET_PDEATHSIG: none outlives the driver, stopped or not.
CODE = "import ctypes; ctypes.CDLL(None).prctl(1, 9)\nwhile True: pass"


class Hogs:
    """As many as rows ask for, started when first needed, and stopped by SIGSTOP while no row asks."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    @contextmanager
    def busy(self, count: int, placement: Placement) -> Iterator[None]:
        """`count` processes compute, on the processors of the measured ones, in turn."""
        while len(self._processes) < count:
            self._processes.append(subprocess.Popen([sys.executable, "-S", "-c", CODE]))
        chosen, cpus = self._processes[:count], placement.cpus()
        assert cpus is not None, "rows that the machine cannot place are skipped before"
        for number, process in enumerate(chosen):
            place(process.pid, cpus[number % 2])
            os.kill(process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            for process in chosen:
                os.kill(process.pid, signal.SIGSTOP)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
