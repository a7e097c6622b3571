"""The rows of groups: operations of torch.distributed, and the loss of a rank."""

from __future__ import annotations

from benchmarks.contestants import GLOO, OURS, after_a_death, group
from benchmarks.row import Row
from benchmarks.units import MICROSECONDS, MILLISECONDS, Figure

GROUP_SIZES = {
    "1kb": ("1 KB", 1 << 10),
    "64kb": ("64 KB", 1 << 16),
    "1mb": ("1 MB", 1 << 20),
    "64mb": ("64 MB", 1 << 26),
}
GROUPS = {"2": (2, False), "4": (4, False), "network": (2, True)}  # ranks, and whether each is on a host of its own
OPERATIONS = {
    "all_reduce": "all_reduce",
    "all_reduce_empty": "all_reduce in tensorferry.empty memory",
    "broadcast": "broadcast",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "send": "send and receive",
    "barrier": "barrier",
    "ddp": "a DistributedDataParallel step of 25 million parameters",
}


def group_row(where: str, operation: str) -> Row:
    """An operation of torch.distributed on both backends, with a figure for each size."""
    ranks, apart = GROUPS[where]
    sizes = {"": 4} if operation in ("barrier", "ddp") else {name: size for name, (_, size) in GROUP_SIZES.items()}
    targets: dict[str, float] = {}
    if operation == "all_reduce_empty":
        sizes = {name: sizes[name] for name in ("1mb", "64mb")}
        targets = {"1mb": 6, "64mb": 6}
    elif operation == "all_reduce" and not apart:
        targets = {"1kb": 10, "64kb": 6, "1mb": 4, "64mb": 2.5}
    return Row(
        f"group-{where}-{operation}",
        f"{OPERATIONS[operation]}, {ranks} ranks" + (" on two hosts" if apart else ""),
        tuple(
            Figure(MICROSECONDS, {GLOO: targets.get(size, 1)}, size, GROUP_SIZES[size][0] if size else "", size)
            for size in sizes
        ),
        ours=group(OURS, operation, ranks, sizes, apart),
        peers={GLOO: group(GLOO, operation, ranks, sizes, apart)},
        rounds=3 if operation == "ddp" else 2,
        once=operation == "ddp",
    )


def after_a_death_row(name: str, title: str, reducing: bool) -> Row:
    return Row(
        f"reconfigure-{name}",
        f"SIGKILL of one of 4 ranks, {title}: to the first all_reduce after reconfigure()",
        (Figure(MILLISECONDS, {GLOO: 2}),),
        ours=after_a_death(OURS, 4, reducing),
        peers={GLOO: after_a_death(GLOO, 4, reducing)},
        rounds=1 if reducing else None,  # Gloo's time-out ends the wait
        once=reducing,
    )


# A send has two ranks, and the memory of tensorferry.empty() is for one host.
NOT_IN_GROUPS = {("4", "send"), ("network", "all_reduce_empty")}
