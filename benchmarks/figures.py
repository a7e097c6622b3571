"""The figures in README.md, docs/performance.md and benchmarks/results.md: written from kept runs, never by hand. Those
of process groups are of the same run, or of a kept run of the rows `group-*` alone; and so are those of other
libraries, the rows `peers-*`. Those on GPUs are of a kept run of benchmarks.gpu.

Each page has a block between two comments that this file fills; a test compares the blocks with the kept run.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.contestants import GRPC, STRANGERS, TORCH
from benchmarks.gpu_figures import NCCL, NCCL_REDUCE, SYMMETRIC, reductions
from benchmarks.report import GroupFigure, group_figures, times
from benchmarks.results import RowResult, Run, Speedup
from benchmarks.units import ABSOLUTE, Unit

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "benchmarks" / "runs"  # packed; benchmarks.run --show reads them
PICTURES = ROOT / "docs" / "images"
KEPT = RUNS / "benchmark.json.gz"
GPUS = RUNS / "gpus.json.gz"
# Rows that may be measured alone, by how their names begin, and the file of such a run. None, if KEPT has those rows.
APART = {"group": RUNS / "collectives.json.gz", "peers": RUNS / "peers.json.gz"}
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


def calls(run: Run, apart: Mapping[str, Run]) -> dict[str, float]:
    """How many times faster than torch.distributed.rpc the rows are that the picture shows: those beside all libraries,
    if a run has them, so that a page never says two figures for one thing."""
    of_peers = apart.get("peers", run)
    ratios = {row.name: row.speedups()[TORCH].ratio for row in of_peers.rows if TORCH in row.speedups()}
    names = ("peers-empty", "peers-in-flight", "peers-sent-1mb", "peers-sent-16mb", "peers-sent-64mb")
    if not has(of_peers, "peers"):
        names = ("noop-unpinned", "in-flight", "tensor-1mb", "tensor-16mb", "tensor-64mb")
    return {what: ratios[name] for what, name in zip(("empty", "in-flight", "1mb", "16mb", "64mb"), names)}


def command(run: Run, apart: Mapping[str, Run]) -> str:
    """The command that measures the rows of calls()."""
    if "peers" in apart:
        return '`make bench ARGS="--peers --only peers"`'
    return '`make bench ARGS="--peers"`' if has(run, "peers") else "`make bench`"


def readme(run: Run, apart: Mapping[str, Run] = {}) -> str:
    """The picture of calls, and what it says in words."""
    beside = calls(run, apart)
    tensors = [beside[size] for size in ("1mb", "16mb", "64mb")]
    of_peers = apart.get("peers", run)
    torch = f"`{TORCH}` {of_peers.machine['versions'].get('torch', '')}".strip()
    words = (
        f"Beside {torch}, in turns on {of_peers.machine['cores']} cores of one host: an empty call is answered "
        f"**{times(beside['empty'])}** faster, 256 calls in flight are done **{times(beside['in-flight'])}** faster, "
        f"and tensors of 1 to 64 MB travel **{times(min(tensors))} to {times(max(tensors))}** faster. "
        f"{command(run, apart)} measures it again; [performance](docs/performance.md) has groups, GPUs, "
        "and what is not reached."
    )
    others = [TORCH, *(who for who in STRANGERS if any(who in row.speedups() for row in of_peers.rows))]
    return f"![Times faster than {', '.join(others)}](docs/images/benchmark.svg)\n\n{paragraph(words)}"


def expectations(run: Run, apart: Mapping[str, Run] = {}) -> str:
    """What a user can expect, in about ten rows."""
    beside = calls(run, apart)
    ratios = {row.name: {who: s.ratio for who, s in row.speedups().items()} for row in run.rows}
    of_groups = group_figures(apart.get("group", run))
    tensors = [beside[size] for size in ("1mb", "16mb", "64mb")]
    rows = [
        ("an empty call from Python", TORCH, times(beside["empty"])),
        ("256 empty calls in flight", TORCH, times(beside["in-flight"])),
        ("a tensor of 1 to 64 MB, same host", TORCH, span(tensors)),
    ]
    typed = [value[GRPC] for name, value in ratios.items() if GRPC in value and name.startswith("typed-cpp-")]
    if typed:
        rows.append(("a typed call between C++ programs, empty to 64 MB", GRPC, span(typed)))
    for name, what in {
        "actors-16-rate": "16 actors and one learner",
        "torch-backend-noop": "torch's own module on our backend, an empty call",
    }.items():
        if TORCH in ratios.get(name, {}):
            rows.append((what, TORCH, times(ratios[name][TORCH])))
    places: dict[str, Callable[[GroupFigure], bool]] = {
        "`all_reduce` of 1 KB to 64 MB, 2 or 4 ranks, one host": lambda g: _here(g) and g.operation == "all_reduce",
        "other operations of a group, one host": lambda g: _here(g) and g.operation != "all_reduce",
        "operations of a group, two hosts": lambda g: not _here(g),
    }
    for what, chosen in places.items():
        if found := [g.ratio for g in of_groups if chosen(g)]:
            rows.append((what, "Gloo", span(found)))
    if GPUS.exists():
        rows += on_gpus(Run.load(GPUS))
    lines = ["| what | beside | times as fast |", "|---|---|---:|", *(f"| {' | '.join(row)} |" for row in rows)]
    machine = apart.get("peers", run).machine
    words = (
        f"The first three rows: {command(run, apart)}; those of groups and C++: `make bench`. Measured on "
        f"{machine['cores']} cores ({machine['processor']}) on {run.started[:10]}."
    )
    if GPUS.exists():
        gpu = Run.load(GPUS)
        words += f" The rows of GPUs: `make bench-gpu`, on {len(gpu.machine['gpus'])} {gpu.machine['gpus'][0]} on "
        words += f"{gpu.started[:10]}."
    return "\n".join(lines) + f"\n\n{paragraph(words)}"


def _here(figure: GroupFigure) -> bool:
    return figure.where != "network"


def span(ratios: Sequence[float]) -> str:
    """The least and the greatest of them."""
    least, greatest = times(min(ratios)), times(max(ratios))
    return least if least == greatest else f"{least} to {greatest}"


def on_gpus(run: Run) -> list[tuple[str, str, str]]:
    """What a user can expect of GPUs."""
    beside = {row.name: {who: s.ratio for who, s in row.speedups().items()} for row in run.rows}
    found = [
        ("a call with a tensor of 4 KB, GPU to GPU", f"{TORCH} with device maps", times(beside["4kb"][TORCH])),
        ("a call with a tensor of 64 MB, GPU to GPU", NCCL, times(beside["64mb"][NCCL])),
    ]
    measured = reductions(run)
    most = max(r.gpus for r in measured)
    which = f"`all_reduce` of {measured[0].size} to {measured[-1].size}, {'2 to ' if most > 2 else ''}{most} GPUs"
    for who in (NCCL_REDUCE, SYMMETRIC):
        plain, graph = ([r.ratios[who] for r in measured if r.graph == in_graph] for in_graph in (False, True))
        found.append((which, who, f"{span(plain)}; in a CUDA graph {span(graph)}"))
    return found


def paragraph(text: str) -> str:
    """The text in lines of 120 columns, without a break in what stands in backquotes."""
    unbroken = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    return textwrap.fill(unbroken, 120, break_long_words=False, break_on_hyphens=False).replace("\0", " ") + "\n"


def results(run: Run, apart: Mapping[str, Run] = {}) -> str:
    """Every ratio of the run, and of the runs of families that are other ones."""
    lines = _table(run)
    lines += ["", *[_absolute(row) for row in run.rows if row.unit in ABSOLUTE]]
    for other in apart.values():
        lines += ["", *_table(other)]
    if GPUS.exists():
        lines += ["", "## On GPUs: `make bench-gpu`", "", *_table(Run.load(GPUS))]
    return "\n".join(lines) + "\n"


def _table(run: Run) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in run.machine["versions"].items())
    machine = run.machine
    gpus = f", {len(machine['gpus'])} {machine['gpus'][0]}" if "gpus" in machine else ""
    words = (
        f"Run `{run.id[:8]}` of {run.started[:10]}: {machine['cores']} cores ({machine['processor']}){gpus}, "
        f"{versions}. "
        f"Other programs used {machine['busy_before']:.0%} of the machine before it"
        + (f", {machine['busy_after']:.0%} after it." if "busy_after" in machine else ".")
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
    ROOT / "docs" / "performance.md": expectations,
    ROOT / "benchmarks" / "results.md": results,
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
