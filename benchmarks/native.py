"""The C++ programs: built by CMake (targets bare_*, cpp_* and grpc_call), one JSON line each."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from benchmarks.placement import Placement

NOT_HERE = 77  # the exit status of a program that this machine does not let measure


class Missing(RuntimeError):
    """A row cannot be measured here: it is left out, and the report says why."""


class Programs:
    def __init__(self, folder: Path | None) -> None:
        self._folder = folder or _newest_build()

    def check(self, program: str) -> Path:
        path = self._folder / program if self._folder else None
        if path is None or not path.is_file():
            raise Missing(f"{program} is not built: cmake --build FOLDER --target {program}, --bin FOLDER/benchmarks")
        return path

    def run(
        self,
        program: str,
        placement: Placement,
        seconds: float,
        environment: dict[str, str] | None = None,
        **options: str,
    ) -> list[float]:
        """Nanoseconds of single round trips. Programs place their two processes themselves."""
        cpus = placement.cpus()
        assert cpus is not None, "rows that the machine cannot place are skipped before"
        pinned = [] if placement is Placement.UNPINNED else ["--cpus", ",".join(str(min(c)) for c in cpus)]
        flags = [text for name, value in options.items() for text in (f"--{name}", value)]
        command = [str(self.check(program)), *flags, *pinned, "--seconds", str(seconds)]
        variables = {**os.environ, **(environment or {})}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 10 * seconds, env=variables)
        if done.returncode == NOT_HERE:
            raise Missing(f"{program}: {done.stderr.strip()}")
        if done.returncode != 0:
            raise RuntimeError(f"{program} failed with {done.returncode}: {done.stderr.strip()}")
        samples: list[float] = json.loads(done.stdout.splitlines()[-1])["samples_ns"]
        return samples


def _newest_build() -> Path | None:
    """The build folder whose programs are newest."""
    built = (Path(__file__).parent.parent / "build").glob("*/benchmarks/bare_roundtrip")
    newest = max(built, key=lambda path: path.stat().st_mtime, default=None)
    return newest.parent if newest else None
