"""Runs us and our peers in one invocation, in turns, and says how they compare.

python -m benchmarks.run [--quick | --core] [--peers] [--only NAME] [--json FILE] [--plot FILE]
python -m benchmarks.run --show FILE [--plot FILE]

All rows, not --quick, --core or --only, are also kept as benchmarks/runs/benchmark.json.gz, and drawn and quoted in the
docs. So are those of --only group and of --only peers, as collectives.json.gz and peers.json.gz.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import figures
from benchmarks.contestants import STRANGERS, Contestant, Lab
from benchmarks.lines import named
from benchmarks.native import Missing
from benchmarks.plot import draw, draw_gpus, draw_groups, pictured
from benchmarks.report import group_figures, summary, table
from benchmarks.results import Measurement, Round, RowResult, Run, busy_share, describe_machine
from benchmarks.row import Row
from benchmarks.rows import CORE, ROWS
from benchmarks.teams import PAIR
from benchmarks.units import Figure

# A pair of processes keeps what it was dealt at its start (addresses, heap, the core that it likes): the full run
# starts new ones several times, so that no row stands on one deal.
LIVES, ROUNDS, SECONDS = 3, 3, 0.4
QUICK_LIVES, QUICK_ROUNDS, QUICK_SECONDS = 1, 5, 0.3


Turns = dict[str, list[Round]]  # by contestant


class Failed(RuntimeError):
    """A contestant of a row failed, or did not end in time: there is a mistake somewhere."""


def turn(contestant: Contestant, row: Row, lab: Lab) -> list[Round]:
    """One turn: a round for each figure of the row."""
    with lab.hogs.busy(row.hogs, row.placement):
        measured = contestant.measure(lab, row.placement)
    series = measured if isinstance(measured, Mapping) else {"": measured}
    return [Round.of(figure.of(series[figure.series])) for figure in row.figures]


def prepare(row: Row, lab: Lab, without: dict[str, str]) -> dict[str, Contestant]:
    """The contestants that are ready. Another library that does not start here goes into `without`, with the reason."""
    contestants = row.contestants()
    for who, contestant in row.contestants().items():
        try:
            contestant.prepare(lab)
        except Missing as missing:
            if who not in STRANGERS:
                raise
            without[who] = str(missing)
            del contestants[who]
    return contestants


def measure(row: Row, lab: Lab, rounds: int, without: dict[str, str] | None = None) -> list[Turns]:
    """Each contestant takes its turn in each round, every other round in the opposite order; the result is in the
    order of the row's figures. Raises Missing where the row cannot be measured here. `without`: see prepare()."""
    if row.placement.cpus() is None:
        raise Missing("needs two cores")
    who = "its contestants"
    try:
        contestants = prepare(row, lab, {} if without is None else without)
        turns: list[Turns] = [{who: [] for who in contestants} for _ in row.figures]
        for number in range(rounds):
            for who in list(contestants) if number % 2 == 0 else reversed(list(contestants)):
                for into, measured in zip(turns, turn(contestants[who], row, lab)):
                    into[who].append(measured)
    except Missing:
        raise
    except Exception as error:
        lab.dismiss()
        raise Failed(f"{row.name}: {who}: {type(error).__name__}: {error}") from error
    lab.dismiss(larger_than=PAIR)
    return turns


def result(row: Row, figure: Figure, run: Run, turns: Turns) -> RowResult:
    name = f"{row.name}-{figure.name}" if figure.name else row.name
    title = row.titled(run.quick) + (f": {figure.title}" if figure.title else "")
    measured = [Measurement(run.id, name, who, tuple(rounds)) for who, rounds in turns.items()]
    unit, targets = figure.unit, dict(figure.targets)
    return RowResult(name, title, unit.text, unit.work, unit.rate, row.place(), targets, figure.limit, measured)


class Notes:
    """What happened to rows, by name: their turns so far, and why some have none."""

    def __init__(self) -> None:
        self.turns: dict[str, list[Turns]] = {}
        self.left_out: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def add(self, row: Row, turns: list[Turns]) -> None:
        kept = self.turns.setdefault(row.name, turns)
        if kept is not turns:
            for into, more in zip(kept, turns):
                for who in list(into):
                    if who in more:
                        into[who].extend(more[who])
                    else:  # it did not start this time: no comparison without a turn in each round
                        del into[who]

    def lost(self, row: Row) -> bool:
        return row.name in self.left_out or row.name in self.failed

    def print(self, console: Console) -> None:
        for name, reason in self.left_out.items():
            console.print(f"[yellow]left out:[/yellow] {name}: {escape(reason)}")
        for reason in self.failed.values():
            console.print(f"[red]failed:[/red] {escape(reason)}")
        longest = sorted(self.seconds, key=self.seconds.__getitem__, reverse=True)[:8]
        total = sum(self.seconds.values())
        console.print(
            f"{total / 60:.0f} min; longest: {', '.join(f'{row} {self.seconds[row]:.0f} s' for row in longest)}"
        )


def measure_all(rows: list[Row], bin: Path | None, quick: bool, console: Console) -> tuple[Run, bool]:
    """All rows, once for each life of the processes, with a line that says what is going on; whether none failed."""
    run = Run(quick=quick, machine=describe_machine())
    lives, rounds, seconds = (QUICK_LIVES, QUICK_ROUNDS, QUICK_SECONDS) if quick else (LIVES, ROUNDS, SECONDS)
    notes = Notes()
    columns = SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=lives * len(rows))
        for life in range(lives):
            with Lab(seconds, bin, quick) as lab:
                for row in rows:
                    progress.update(task, description=f"{row.titled(quick)}, {row.place()}")
                    begin = time.monotonic()
                    if not notes.lost(row) and not (row.once and life > 0):
                        try:
                            notes.add(row, measure(row, lab, min(rounds, row.rounds or rounds), notes.left_out))
                        except Missing as missing:
                            notes.left_out[row.name] = str(missing)
                        except Failed as failed:
                            notes.failed[row.name] = str(failed)
                    notes.seconds[row.name] = notes.seconds.get(row.name, 0.0) + time.monotonic() - begin
                    progress.advance(task)
    notes.print(console)
    for row in rows:
        if not notes.lost(row):
            run.rows += [result(row, figure, run, turns) for figure, turns in zip(row.figures, notes.turns[row.name])]
    run.machine["busy_after"] = round(busy_share(0.5), 3)  # our processes are gone: what is left is other people's work
    return run, not notes.failed


def chosen(only: str, quick: bool, peers: bool = False, core: bool = False) -> list[Row]:
    """The row of that name, else those whose name contains it; with ``core`` those of CORE. Rows with other libraries
    are there with ``peers``, or if ``only`` names them."""
    rows = named(only, ROWS)
    if not rows:
        raise typer.BadParameter(f"no row is named like {only!r}; there are {', '.join(row.name for row in ROWS)}")
    if only:
        return rows
    if core:
        return [row for row in rows if row.name in CORE]
    return [row for row in rows if (peers if row.strangers else row.quick or not quick)]


def keep_run(run: Run) -> Path:
    """Keeps, draws and quotes the run; one of a family alone, or of GPUs, takes the place of its figures. Returns its
    file."""
    if "gpus" in run.machine:
        run.save(figures.GPUS)
        draw_gpus(run, figures.PICTURES / "gpus.svg")
        figures.write(Run.load(figures.KEPT))
        return figures.GPUS
    family = figures.alone(run)
    kept = figures.APART[family] if family else figures.KEPT
    run.save(kept)
    for other, file in figures.APART.items():
        if not family and figures.has(run, other):
            file.unlink(missing_ok=True)
    main = Run.load(figures.KEPT)
    apart = figures.runs_apart(main)
    draw(apart.get("peers", main), figures.PICTURES / "benchmark.svg")
    if group_figures(apart.get("group", main)):
        draw_groups(apart.get("group", main), figures.PICTURES / "collectives.svg")
    figures.write(main)
    return kept


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    quick: Annotated[bool, typer.Option(help="Fewer rows and turns: under a minute.")] = False,
    core: Annotated[bool, typer.Option(help="The ten rows that decide, with all turns: three minutes.")] = False,
    only: Annotated[str, typer.Option(help="The row of this name, else those whose name contains it.")] = "",
    json: Annotated[Path | None, typer.Option(help="Write the run here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the run here (.svg).")] = None,
    show: Annotated[Path | None, typer.Option(help="Measure nothing; read this run.")] = None,
    keep: Annotated[bool, typer.Option(help="Keep and quote this run in the docs; a full run always is.")] = False,
    peers: Annotated[bool, typer.Option(help="Also the rows beside Ray, Monarch and pyzmq.")] = False,
    bin: Annotated[Path | None, typer.Option(help="Folder of the C++ programs; default: the newest build.")] = None,
) -> None:
    """Measures TensorFerry beside torch.distributed.rpc and the bare round trips, in turns."""
    console, complete = Console(), True
    if not console.is_terminal:
        console = Console(width=140)  # a log, not a window
    if show is not None:
        run = Run.load(show)
    else:
        run, complete = measure_all(chosen(only, quick, peers, core), bin, quick, console)
    console.print(table(run))
    busy = max(run.machine.get("busy_before", 0), run.machine.get("busy_after", 0))
    if busy > 0.1:
        console.print(f"[yellow]other programs used {busy:.0%} of this machine: figures are noisy[/yellow]")
    if json is not None:
        run.save(json)
    if plot is not None:
        (draw_groups if group_figures(run) and not pictured(run) else draw)(run, plot)
    if complete and ((show is None and not quick and not core and only in ("", *figures.APART)) or keep):
        kept = keep_run(run)
        console.print(f"kept as {kept.relative_to(figures.ROOT)}, and quoted on the pages of benchmarks.figures")
    summary(run, console)
    if not complete:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
