"""What a person reads: the table of one run, and its summary in a few lines."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.contestants import GLOO, TORCH
from benchmarks.results import Measurement, RowResult, Run
from benchmarks.units import Unit


def figure(value: float) -> str:
    """Three significant digits at most, thousands apart."""
    if abs(value) >= 1000:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}"


def times(ratio: float) -> str:
    """ "14x", "2.3x", "0.8x": a ratio as it is said."""
    return f"{ratio:,.0f}x" if ratio >= 10 else f"{ratio:.2g}x"


def table(run: Run) -> Table:
    """One line a contestant: its median and p99, how many times faster than it we were, the least and greatest turn."""
    view = Table(title=f"run {run.id[:8]}", title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    view.add_column("")
    for column in ("median", "p99", "we are faster", "(turns)", "target"):
        view.add_column(column, justify="right", no_wrap=True)
    for row in run.rows:
        _add(view, row)
    return view


def _add(view: Table, row: RowResult) -> None:
    unit = Unit(row.unit, row.work, row.rate)
    speedups = row.speedups()
    view.add_row(f"[bold]{row.title}[/bold], {row.placement}")
    for measured in row.contestants:
        ratio, turns, target = "", "", ""
        if (s := speedups.get(measured.contestant)) is not None:
            ratio = times(s.ratio)
            turns = f"{times(s.least)} .. {times(s.greatest)}" if len(measured.rounds) > 1 else ""
            if (wanted := row.targets.get(measured.contestant)) is not None:
                target = _verdict(times(wanted), s.ratio >= wanted)
        elif row.limit is not None:
            target = _verdict(f"at most {figure(row.limit)}", unit.value(measured.p50) <= row.limit)
        median, p99 = _figures(unit, measured)
        last = measured is row.contestants[-1]
        view.add_row(f"  {measured.contestant}", median, p99, ratio, turns, target, end_section=last)


def _verdict(wanted: str, reached: bool) -> str:
    return f"{wanted} [green]reached" if reached else f"{wanted} [red]missed"


def _figures(unit: Unit, measured: Measurement) -> tuple[str, str]:
    median = f"{figure(unit.value(measured.p50))} {unit.text}"
    return median, figure(unit.value(measured.p99)) if measured.rounds[0].count > 1 else ""


def headline(run: Run, name: str) -> float | None:
    """How many times faster than torch.distributed.rpc we were in a row of this run; None where it was not measured."""
    for row in run.rows:
        if row.name == name and TORCH in row.speedups():
            return row.speedups()[TORCH].ratio
    return None


# The rows that stand for the whole, as the demo says them and the README's picture shows them.
HEADLINES = {
    "noop-unpinned": "an empty call is answered",
    "in-flight": "256 calls in flight are done",
    "tensor-1mb": "1 MB tensors travel",
    "tensor-16mb": "16 MB tensors travel",
    "tensor-64mb": "64 MB tensors travel",
}


@dataclass(frozen=True)
class GroupFigure:
    """A row beside Gloo, as its name tells it."""

    where: str  # group_rows.GROUPS
    operation: str
    size: str  # group_rows.GROUP_SIZES; "" if the operation has none
    row: RowResult

    @property
    def ratio(self) -> float:
        return self.row.speedups()[GLOO].ratio


def group_figures(run: Run) -> list[GroupFigure]:
    """What the run measured of process groups; empty if nothing."""
    found = []
    for row in run.rows:
        if row.name.startswith("group-") and GLOO in row.speedups():
            _, where, operation, *size = row.name.split("-")
            found.append(GroupFigure(where, operation, "".join(size), row))
    return found


def summary(run: Run, console: Console) -> None:
    """The lines that the demo ends in."""
    measured = [(text, ratio) for name, text in HEADLINES.items() if (ratio := headline(run, name)) is not None]
    if not measured:
        return
    console.print(f"\n[bold]Beside {TORCH}, measured in turns on these {run.machine['cores']} cores just now:")
    for text, ratio in measured:
        # Said the right way round also on the day when we are the slower one.
        said = f"{times(ratio)} faster" if ratio >= 1 else f"{times(1 / ratio)} [red]slower[/red]"
        console.print(f"  {text:<30} [bold]{said}[/bold]")
