"""The README's pictures, each drawn from one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.contestants import GLOO, MONARCH, PYZMQ, RAY, TORCH
from benchmarks.gpu_figures import NCCL_REDUCE, SYMMETRIC, ReductionFigure, reductions
from benchmarks.group_rows import GROUP_SIZES
from benchmarks.report import HEADLINES, GroupFigure, group_figures, times
from benchmarks.results import RowResult, Run
from benchmarks.units import ABSOLUTE

INK = "#7d8590"  # readable on a white page and on a dark one
COLOURS = {TORCH: "#1f9d8a", RAY: "#3b7dd8", MONARCH: "#b0713c", PYZMQ: "#8a63c9"}  # in this order

# The places of groups, by the names of group_rows.GROUPS, in this order.
PLACES = {"2": ("2 ranks", "#1f9d8a"), "4": ("4 ranks", "#3b7dd8"), "network": ("2 ranks on two hosts", "#b0713c")}
PANELS = {  # operations, by the titles of the panels that show them
    "all_reduce": ("all_reduce",),
    "all_reduce, tensorferry.empty": ("all_reduce_empty",),
    "broadcast": ("broadcast",),
    "all_gather": ("all_gather",),
    "reduce_scatter": ("reduce_scatter",),
    "all_to_all": ("all_to_all",),
    "send and receive": ("send",),
    "barrier, and a step of DDP": ("barrier", "ddp"),
}
REDUCERS = {NCCL_REDUCE: "#3b7dd8", SYMMETRIC: "#b0713c"}  # beside us in the rows of several GPUs
SIZELESS = {"barrier": "barrier", "ddp": "DDP step"}


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
    plt = _pyplot(run)
    from matplotlib.patches import Patch
    from matplotlib.ticker import NullLocator

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
    _save(figure, path)


def draw_groups(run: Run, path: Path) -> None:
    """A panel for each operation of process groups, with a bar for each size and place, on a logarithmic axis: how many
    times faster than Gloo we were in that run."""
    plt = _pyplot(run)
    from matplotlib.patches import Patch

    measured = group_figures(run)
    if not measured:
        raise ValueError(f"run {run.id[:8]} has no row beside {GLOO}: nothing to draw")
    panels = {title: found for title, of in PANELS.items() if (found := [g for g in measured if g.operation in of])}
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(2.9 * columns, 2.3 * rows + 0.9), sharey=True, squeeze=False)
    for axes, (title, found) in zip(grid.flat, panels.items()):
        _draw_panel(axes, found)
        axes.set_title(title, color=INK, loc="left", fontsize=10)
    _common_axis(grid, [g.ratio for g in measured])
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    places = [place for place in PLACES if any(g.where == place for g in measured)]
    handles = [Patch(color=PLACES[place][1]) for place in places]
    names = [PLACES[place][0] for place in places]
    figure.suptitle("times faster than Gloo", color=INK, x=0.01, ha="left", fontsize=11)
    figure.legend(handles, names, frameon=False, labelcolor=INK, fontsize=9, loc="upper right", ncol=3)
    _save_panels(figure, run, f"{run.machine['cores']} cores", path)


def draw_gpus(run: Run, path: Path) -> None:
    """A panel for each number of GPUs, without and with a CUDA graph, with a bar for each size and peer: how many times
    faster an all_reduce was in that run."""
    plt = _pyplot(run)
    from matplotlib.patches import Patch

    measured = reductions(run)
    if not measured:
        raise ValueError(f"run {run.id[:8]} has no all_reduce on several GPUs: nothing to draw")
    panels = sorted({(r.gpus, r.graph) for r in measured})
    rows = len(panels) // 2
    figure, grid = plt.subplots(rows, 2, figsize=(11.6, 2.3 * rows + 0.9), sharey=True, squeeze=False)
    for axes, (gpus, graph) in zip(grid.flat, panels):
        _draw_reductions(axes, [r for r in measured if (r.gpus, r.graph) == (gpus, graph)])
        axes.set_title(f"{gpus} GPUs" + (", in a CUDA graph" if graph else ""), color=INK, loc="left", fontsize=10)
    _common_axis(grid, [ratio for r in measured for ratio in r.ratios.values()])
    handles = [Patch(color=colour) for colour in REDUCERS.values()]
    figure.suptitle("all_reduce on GPUs, times faster than", color=INK, x=0.01, ha="left", fontsize=11)
    figure.legend(handles, list(REDUCERS), frameon=False, labelcolor=INK, fontsize=9, loc="upper right", ncol=2)
    _save_panels(figure, run, f"{len(run.machine['gpus'])} {run.machine['gpus'][0]}", path)


def _draw_reductions(axes: Any, found: list[ReductionFigure]) -> None:
    """The bars of one panel, in groups by size."""
    for place, figure in enumerate(found):
        for who, ratio in figure.ratios.items():
            at = place + 0.36 * (list(REDUCERS).index(who) - 0.5)
            bar = axes.bar(at, ratio - 1, bottom=1, color=REDUCERS[who], width=0.32)
            axes.bar_label(bar, [times(ratio).removesuffix("x")], padding=2, color=INK, fontsize=7)
    axes.set_xticks(range(len(found)), [figure.size for figure in found])


def _common_axis(grid: Any, ratios: list[float]) -> None:
    """A logarithmic axis of ratios for all panels, with a line at 1."""
    from matplotlib.ticker import NullLocator

    least, greatest = min(ratios), max(ratios)
    marks = [10**power for power in range(-2, 6)] if greatest > 5 else [0.5, 1, 2, 4]
    for axes in grid.flat:
        axes.set_yscale("log")
        axes.set_ylim(min(0.8, 0.7 * least), max(greatest, 1) * (2 if greatest > 5 else 1.3))
        axes.set_yticks([x for x in marks if 0.7 * least <= x <= 2 * greatest])
        axes.yaxis.set_major_formatter(lambda x, _: times(x))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.axhline(1, color=INK, linewidth=1, linestyle="--")
        axes.tick_params(colors=INK, length=0, labelsize=9)
        for side in axes.spines.values():
            side.set_visible(False)


def _save_panels(figure: Any, run: Run, machine: str, path: Path) -> None:
    caption = f"run {run.id[:8]}, {machine}, all measured in turns; logarithmic; longer is better"
    figure.supxlabel(caption, color=INK, fontsize=9)
    figure.tight_layout()
    _save(figure, path)


def _draw_panel(axes: Any, found: list[GroupFigure]) -> None:
    """The bars of an operation, in groups by size."""
    texts = [GROUP_SIZES[g.size][0] if g.size else SIZELESS[g.operation] for g in found]
    classes = list(dict.fromkeys(texts))
    for g, text in zip(found, texts):
        place = classes.index(text) + 0.28 * (list(PLACES).index(g.where) - 1)
        bar = axes.bar(place, g.ratio - 1, bottom=1, color=PLACES[g.where][1], width=0.24)
        axes.bar_label(bar, [times(g.ratio).removesuffix("x")], padding=2, color=INK, fontsize=7)
    axes.set_xticks(range(len(classes)), classes)
    axes.set_xlim(-0.6, len(classes) - 0.4)


def _pyplot(run: Run) -> Any:
    """matplotlib.pyplot, such that a run is drawn alike each time."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams.update({"svg.hashsalt": run.id, "svg.fonttype": "none", "font.family": "sans-serif"})
    return plt


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
