"""The README's picture, drawn from one run."""

from __future__ import annotations

from pathlib import Path

from benchmarks.contestants import MONARCH, PYZMQ, RAY, TORCH
from benchmarks.report import HEADLINES, times
from benchmarks.results import RowResult, Run
from benchmarks.units import ABSOLUTE

INK = "#7d8590"  # readable on a white page and on a dark one
COLOURS = {TORCH: "#1f9d8a", RAY: "#3b7dd8", MONARCH: "#b0713c", PYZMQ: "#8a63c9"}  # in this order


def pictured(run: Run) -> list[tuple[RowResult, dict[str, float]]]:
    """The rows that the picture shows, and how many times faster than each peer we were: the rows with all the
    libraries that people would pick instead if the run has them, else the headlines. Of a run without either, every row
    beside torch.distributed.rpc."""
    beside = [row for row in run.rows if TORCH in row.speedups() and row.unit not in ABSOLUTE]
    rows = [row for row in beside if row.name.startswith("peers-")]
    rows = rows or [row for row in beside if row.name in HEADLINES] or beside
    return [(row, {who: s.ratio for who, s in row.speedups().items() if who in COLOURS}) for row in rows]


def draw(run: Run, path: Path) -> None:
    """A bar for each row and peer, on a logarithmic axis: how many times faster than that peer we were in that run."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch
    from matplotlib.ticker import NullLocator

    matplotlib.rcParams.update({"svg.hashsalt": run.id, "svg.fonttype": "none", "font.family": "sans-serif"})
    groups = pictured(run)
    if not groups:
        raise ValueError(f"run {run.id[:8]} has no row beside {TORCH}: nothing to draw")
    peers = [who for who in COLOURS if any(who in ratios for _, ratios in groups)]
    bars = sum(len(ratios) for _, ratios in groups)
    figure, axes = plt.subplots(figsize=(8.6, 0.3 * bars + 0.16 * len(groups) + 1.4))
    place, ticks, labels = 0.0, [], []
    for row, ratios in groups:
        middle = place + 0.62 * (len(ratios) - 1) / 2
        for who, ratio in ratios.items():
            bar = axes.barh(place, ratio - 1, left=1, color=COLOURS[who], height=0.52)
            axes.bar_label(bar, [times(ratio)], padding=4, color=INK, fontweight="bold", fontsize=9)
            place += 0.62
        place += 0.4
        ticks.append(middle)
        labels.append(row.title + (f", {row.placement}" if row.name.startswith("noop") else ""))
    every = [ratio for _, ratios in groups for ratio in ratios.values()]
    axes.set_xscale("log")
    axes.set_xlim(min(0.8, 0.7 * min(every)), max(every) * 2)
    decades = [10**power for power in range(-2, 6)]
    axes.set_xticks([x for x in decades if axes.get_xlim()[0] <= x <= axes.get_xlim()[1]])
    axes.xaxis.set_major_formatter(lambda x, _: times(x))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(ticks, labels)
    axes.axvline(1, color=INK, linewidth=1, linestyle="--")
    axes.invert_yaxis()
    torch = f"{TORCH} {run.machine['versions'].get('torch', '')}".strip()
    if peers == [TORCH]:
        axes.set_title(f"times faster than {torch}", color=INK, loc="left", fontsize=11, pad=12)
    else:
        axes.set_title("times faster than", color=INK, loc="left", fontsize=11, pad=12)
        handles = [Patch(color=COLOURS[who]) for who in peers]
        names = [torch if who == TORCH else who for who in peers]
        at = (0.2, 1.0)
        axes.legend(
            handles, names, frameon=False, labelcolor=INK, fontsize=9, loc="lower left", bbox_to_anchor=at, ncol=4
        )
    caption = f"run {run.id[:8]}, {run.machine['cores']} cores, all measured in turns; logarithmic; longer is better"
    axes.set_xlabel(caption, color=INK, fontsize=9)
    axes.tick_params(colors=INK, length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
