"""Rows as lines of text, for benchmarks that run where the tables of `report.py` cannot be drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks.placement import Placement
from benchmarks.results import Measurement, Round, RowResult, Run
from benchmarks.units import Unit


class Named(Protocol):
    @property
    def name(self) -> str: ...


class Contested(Named, Protocol):
    """A row whose contestants each take the lab and return the samples of a turn."""

    @property
    def title(self) -> str: ...
    @property
    def unit(self) -> Unit: ...
    @property
    def contestants(self) -> dict[str, Callable[[Any], list[float]]]: ...
    @property
    def targets(self) -> dict[str, float]: ...


R = TypeVar("R", bound=Named)


def named(text: str, rows: list[R]) -> list[R]:
    """The row of this name, else those whose name contains it."""
    return [row for row in rows if row.name == text] or [row for row in rows if text in row.name]


def take_turns(row: Contested, lab: object, run: Run, rounds: int) -> RowResult:
    """Each contestant takes its turn in each round, every other round in the opposite order."""
    turns: dict[str, list[Round]] = {who: [] for who in row.contestants}
    for number in range(rounds):
        for who in list(turns) if number % 2 == 0 else reversed(list(turns)):
            turns[who].append(Round.of(row.contestants[who](lab)))
    measured = [Measurement(run.id, row.name, who, tuple(rounds)) for who, rounds in turns.items()]
    unit, placement = row.unit, Placement.UNPINNED.value
    return RowResult(row.name, row.title, unit.text, unit.work, unit.rate, placement, row.targets, None, measured)


def measure_rows(
    run: Run,
    rows: Iterable[R],
    measure: Callable[[R], RowResult],
    failures: tuple[type[Exception], ...],
    json: Path | None,
    skipped: Iterable[str] = (),
) -> int:
    """Measures rows into the run and prints each, also those that fail, then the skipped ones. Saves the run in `json`
    unless it is None. Returns 0 if every row met its targets, else 1. One of `failures` fails its row alone."""
    failed, missed = [], []
    for row in rows:
        try:
            result = measure(row)
        except failures as error:
            failed.append(row.name)
            print(f"\nfailed: {row.name}: {error}", flush=True)
            continue
        run.rows.append(result)
        if not show(result):
            missed.append(row.name)
    for line in skipped:
        print(f"skipped: {line}")
    print(f"\n{len(run.rows)} rows measured, {len(missed)} missed a target{': ' if missed else ''}{', '.join(missed)}")
    if failed:
        print(f"{len(failed)} failed: {', '.join(failed)}")
    if json:
        run.save(json)
    return 1 if failed or missed else 0


def show(row: RowResult) -> bool:
    """Prints a row; whether it met its targets."""
    unit, speedups, met = Unit(row.unit, row.work, row.rate), row.speedups(), True
    print(f"\n{row.title}  [{row.name}]")
    for measured in row.contestants:
        line = f"  {measured.contestant:36} {unit.value(measured.p50):10.4g} {row.unit:5}"
        line += f"  p99 {unit.value(measured.p99):10.4g}"
        if (speedup := speedups.get(measured.contestant)) is not None:
            line += f"  we are {speedup.ratio:.3g}x as fast ({speedup.least:.3g} .. {speedup.greatest:.3g})"
            if (target := row.targets.get(measured.contestant)) is not None:
                reached = speedup.ratio >= target
                met = met and reached
                line += f", target {target:.3g}x {'reached' if reached else 'MISSED'}"
        print(line, flush=True)
    return met
