"""The README's picture, drawn from one run."""

from __future__ import annotations

from pathlib import Path

from benchmarks.contestants import TORCH
from benchmarks.report import HEADLINES, times
from benchmarks.results import Run
from benchmarks.units import ABSOLUTE

INK = "#7d8590"  # readable on a white page and on a dark one
ACCENT = "#1f9d8a"


def draw(run: Run, path: Path) -> None:
    """One bar a headline: how many times faster than torch.distributed.rpc we were in that run. Of a run without
    headlines, every row that it took part in."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams.update({"svg.hashsalt": run.id, "svg.fonttype": "none", "font.family": "sans-serif"})
    rows = [row for row in run.rows if TORCH in row.speedups() and row.unit not in ABSOLUTE]
    rows = [row for row in rows if row.name in HEADLINES] or rows
    bars = [(row, row.speedups()[TORCH]) for row in rows]
    if not bars:
        raise ValueError(f"run {run.id[:8]} has no row beside {TORCH}: nothing to draw")
    labels = [row.title + (f", {row.placement}" if row.name.startswith("noop") else "") for row, _ in bars]
    ratios = [speedup.ratio for _, speedup in bars]

    figure, axes = plt.subplots(figsize=(8.6, 0.42 * len(bars) + 1.2))
    drawn = axes.barh(labels, ratios, color=ACCENT, height=0.62)
    axes.bar_label(drawn, [times(r) for r in ratios], padding=4, color=INK, fontweight="bold")
    axes.axvline(1, color=INK, linewidth=1, linestyle="--")
    axes.text(1, -0.62, " 1x: equal", color=INK, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, max(ratios) * 1.12)
    axes.set_xticks([])
    peer = f"{TORCH} {run.machine['versions'].get('torch', '')}"
    axes.set_title(f"times faster than {peer}", color=INK, loc="left", fontsize=11, pad=12)
    caption = f"run {run.id[:8]}, {run.machine['cores']} cores, both measured in turns; longer is better"
    axes.set_xlabel(caption, color=INK, fontsize=9)
    axes.tick_params(colors=INK, length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
