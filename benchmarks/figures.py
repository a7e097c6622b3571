"""The figures in README.md and docs/performance.md: written from a kept run, never by hand. Those of process groups are
of the same run, or of a kept run of the rows `group-*` alone; and so are those of other libraries, the rows `peers-*`.
Those on GPUs are of a kept run of benchmarks.gpu.

Each page has a block between two comments that this file fills; a test compares the blocks with the kept run.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.contestants import STRANGERS, TORCH
from benchmarks.gpu_figures import NCCL, NCCL_REDUCE, SYMMETRIC, reductions
from benchmarks.report import GroupFigure, group_figures, times
from benchmarks.results import RowResult, Run, Speedup
from benchmarks.units import ABSOLUTE, Unit

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "docs" / "images" / "benchmark.json"
GROUPS = KEPT.with_name("collectives.svg")
GPUS = KEPT.with_name("gpus.json")
# Rows that may be measured alone, by how their names begin, and the file of such a run. None, if KEPT has those rows.
APART = {"group": KEPT.with_name("collectives.json"), "peers": KEPT.with_name("peers.json")}
BLOCK = re.compile(r"(<!-- figures: [^\n]*-->\n).*?(<!-- end of figures -->)", re.DOTALL)


def has(run: Run, family: str) -> bool:
    """Whether the run has rows of a family of APART."""
    return any(row.name.startswith(f"{family}-") for row in run.rows)


def alone(run: Run) -> str | None:
    """The family of APART that all rows of the run belong to."""
    return next((f for f in APART if all(row.name.startswith(f"{f}-") for row in run.rows)), None)


def runs_apart(run: Run) -> dict[str, Run]:
    """The kept runs, by family, of what this run does not have."""
    return {f: Run.load(kept) for f, kept in APART.items() if not has(run, f) and kept.exists()}


def readme(run: Run, apart: Mapping[str, Run] = {}) -> str:
    """The pictures, and what they say in words. `apart`: the runs of families that are other ones."""
    beside = {row.name: row.speedups()[TORCH].ratio for row in run.rows if TORCH in row.speedups()}
    tensors = [beside[name] for name in ("tensor-1mb", "tensor-16mb", "tensor-64mb")]
    torch = f"`{TORCH}` {run.machine['versions'].get('torch', '')}".strip()
    words = (
        f"Beside {torch}, in one run and in turns on {run.machine['cores']} cores: an empty Python call is "
        f"answered **{times(beside['noop-unpinned'])}** faster, 256 calls in flight are done "
        f"**{times(beside['in-flight'])}** faster, and tensors of 1 to 64 MB travel "
        f"**{times(min(tensors))} to {times(max(tensors))}** faster. Run it yourself with `make bench`; "
        "[docs/performance.md](docs/performance.md) says how it is measured, and what is not reached."
    )
    of_peers = apart.get("peers", run)
    if has(of_peers, "peers"):
        of, only = ("another", " --only peers") if "peers" in apart else ("the same", "")
        words += f' The picture is of {of} run, `make bench ARGS="--peers{only}"`: tensors are sent, none returns.'
    others = [TORCH, *(who for who in STRANGERS if any(who in row.speedups() for row in of_peers.rows))]
    picture = f"![Times faster than {', '.join(others)}](docs/images/benchmark.svg)\n\n{paragraph(words)}"
    beside_gloo = group_figures(apart.get("group", run))
    when = "in another run" if "group" in apart else "in the same run"
    on_gpus = f"\n{gpus(Run.load(GPUS))}" if GPUS.exists() else ""
    return picture + (f"\n{groups(beside_gloo, when)}" if beside_gloo else "") + on_gpus


def groups(measured: list[GroupFigure], when: str) -> str:
    """The picture of the process groups, and what it says in words."""

    def span(of: str, here: bool, but: bool = False) -> str:
        """Least and greatest ratio of an operation, or of all but this one."""
        ratios = [g.ratio for g in measured if (g.operation == of) != but and (g.where != "network") == here]
        least, greatest = (times(f(ratios)) for f in (min, max))
        return f"**{least}**" if least == greatest else f"**{least} to {greatest}**"

    words = (
        f'Beside Gloo, {when}, `dist.init_process_group("tensorferry")` does an all_reduce of 1 KB to 64 MB '
        f"among 2 and 4 ranks of one host {span('all_reduce', True)} as fast, and the other operations "
        f"{span('all_reduce', True, but=True)}"
    )
    if any(g.where == "network" for g in measured):
        words += f"; between two hosts all of them are {span('', False, but=True)} as fast"
    return f"![Times faster than Gloo](docs/images/collectives.svg)\n\n{paragraph(words + '.')}"


def gpus(run: Run) -> str:
    """The picture of several GPUs, and what it says in words."""

    def span(who: str, graph: bool) -> str:
        ratios = [r.ratios[who] for r in reductions(run) if r.graph == graph]
        return f"**{times(min(ratios))} to {times(max(ratios))}**"

    beside = {row.name: {who: s.ratio for who, s in row.speedups().items()} for row in run.rows}
    machine = run.machine
    most = max(r.gpus for r in reductions(run))
    words = (
        f"On {len(machine['gpus'])} {machine['gpus'][0]} with torch {machine['versions']['torch']}, in one run of "
        f"`make bench-gpu`: a call with a tensor of 4 KB from GPU to GPU is answered "
        f"**{times(beside['4kb'][TORCH])}** faster than by `{TORCH}` with device maps, and one of 64 MB moves "
        f"**{times(beside['64mb'][NCCL])}** as fast as by NCCL's send and receive. An all_reduce of 1 KB "
        f"to 1 GB on 2 to {most} GPUs is {span(NCCL_REDUCE, False)} as fast as NCCL's and {span(SYMMETRIC, False)} "
        f"as fast as {SYMMETRIC}; in a CUDA graph {span(NCCL_REDUCE, True)} and {span(SYMMETRIC, True)}."
    )
    return f"![Times faster than NCCL and {SYMMETRIC}](docs/images/gpus.svg)\n\n{paragraph(words)}"


def paragraph(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def results(run: Run, apart: Mapping[str, Run] = {}) -> str:
    """Every ratio of the run, and of the runs of families that are other ones."""
    lines = _table(run)
    lines += ["", *[_absolute(row) for row in run.rows if row.unit in ABSOLUTE]]
    for other in apart.values():
        lines += ["", *_table(other)]
    return "\n".join(lines) + "\n"


def _table(run: Run) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in run.machine["versions"].items())
    machine = run.machine
    words = (
        f"Run `{run.id[:8]}` of {run.started[:10]}: {machine['cores']} cores ({machine['processor']}), {versions}. "
        f"Other programs used {machine['busy_before']:.0%} of the machine before it, "
        f"{machine['busy_after']:.0%} after it."
    )
    lines = [
        paragraph(words),
        "| what | placement | beside | we are faster | single rounds | target |",
        "|---|---|---|---:|---:|---:|",
    ]
    for row in run.rows:
        lines += [_line(row, theirs, s) for theirs, s in row.speedups().items() if row.unit not in ABSOLUTE]
    return lines


def _line(row: RowResult, theirs: str, s: Speedup) -> str:
    wanted = row.targets.get(theirs)
    target = "" if wanted is None else f"{times(wanted)}, {'reached' if s.ratio >= wanted else '**missed**'}"
    rounds = f"{times(s.least)} to {times(s.greatest)}"
    return f"| {row.title} | {row.placement} | {theirs} | {times(s.ratio)} | {rounds} | {target} |"


def _absolute(row: RowResult) -> str:
    """What does not depend on how fast the machine is, said as it is."""
    unit = Unit(row.unit, row.work, row.rate)
    costs = [f"{unit.value(m.p50):.3g} {unit.text} ({m.contestant})" for m in row.contestants]
    said = f"- {row.title[0].upper()}{row.title[1:]}: {', '.join(costs)}"
    if row.limit is not None:
        said += f"; at most {row.limit:g}: {'reached' if unit.value(row.ours.p50) <= row.limit else '**missed**'}"
    return said + "."


PAGES: dict[Path, Callable[[Run, Mapping[str, Run]], str]] = {
    ROOT / "README.md": readme,
    ROOT / "docs" / "performance.md": results,
}


def filled(page: Path, run: Run) -> str:
    """The page with its block as this run says it, and the kept runs of the families that it does not have."""
    apart = runs_apart(run)
    text, blocks = BLOCK.subn(lambda found: found[1] + PAGES[page](run, apart) + found[2], page.read_text())
    if blocks != 1:
        raise ValueError(f"{page.name} has {blocks} blocks of figures, not one")
    return text


def write(run: Run) -> None:
    for page in PAGES:
        page.write_text(filled(page, run))
