"""Tensors on GPUs, ours and our peers' in one invocation, in turns; needs a GPU, for most rows two.

python -m benchmarks.gpu [--only NAME] [--rounds N] [--json FILE]

Needs torch and nothing else beside the package, so that it runs where the other benchmarks' tables cannot be drawn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from benchmarks.gpu_figures import NCCL, NCCL_REDUCE, SYMMETRIC
from benchmarks.lines import measure_rows, named, take_turns
from benchmarks.placement import Placement
from benchmarks.results import RowResult, Run, describe_machine
from benchmarks.teams import CALLEE, CALLER, Team
from benchmarks.units import MICROSECONDS, Unit
from benchmarks.units import gigabytes_sent as gigabytes

OURS, TORCH, COPY = "tensorferry", "torch.distributed.rpc", "cudaMemcpyPeerAsync"
PINNED, CHUNKED = "slower of pinned D2H, H2D", "down and up in chunks, one process"
FIXED = "tensorferry, cudaMalloc'd segments"
BY_CALL, GATHER, COPIES = "tensorferry, a dict by a call", "index_select, one process", "copy_ of each, one process"
GLOO = "Gloo"
AMONG = {OURS: "tensorferry", NCCL_REDUCE: "nccl", SYMMETRIC: "symmetric"}
SECONDS = 0.4
KILO, MEGA, GIGA = 1 << 10, 1 << 20, 1 << 30
WORKLOADS = "benchmarks.gpu_workloads"
HERE = Placement.UNPINNED

Samples = list[float]
Measure = Callable[["Lab"], Samples]


class Lab:
    """The processes, each pair started when it is first needed and stopped while others are measured."""

    def __init__(self) -> None:
        self._teams: dict[Any, Team] = {}

    def team(
        self, module: str, here: int, there: int, environment: dict[str, str] | None = None, **options: Any
    ) -> Team:
        """Two processes that have joined; the caller's tensors are on `here`, the callee's on `there`."""
        key = module, here, there, str(environment), str(options)
        if key not in self._teams:
            team = self._teams[key] = Team(module, joined=False, workloads=WORKLOADS, environment=environment)
            joining = {"world_size": 2, "here": here, "there": there, "options": options}
            ranks = {CALLER: "caller", CALLEE: "callee"}
            jobs = {rank: ("join", {"name": name, "rank": rank, **joining}) for rank, name in ranks.items()}
            team.run(HERE, jobs, 120)
        return self._teams[key]

    def alone(self) -> Team:
        """One process that copies by itself."""
        if "alone" not in self._teams:
            self._teams["alone"] = Team("torch.cuda", 1, joined=False, workloads=WORKLOADS)
        return self._teams["alone"]

    def nccl(self) -> Team:
        if "nccl" not in self._teams:
            team = self._teams["nccl"] = Team("torch.distributed", joined=False, workloads=WORKLOADS)
            team.run(HERE, {rank: ("nccl_join", {"rank": rank, "device": rank}) for rank in range(2)}, 120)
        return self._teams["nccl"]

    def group(self, there: int) -> Team:
        """Two ranks with a process group of each backend, whose tensors are on GPU 0 and on GPU `there`."""
        if ("group", there) not in self._teams:
            team = self._teams["group", there] = Team("torch.distributed", joined=False, workloads=WORKLOADS)
            jobs = {rank: ("group_join", {"rank": rank, "device": rank * there}) for rank in range(2)}
            team.run(HERE, jobs, 120)
        return self._teams["group", there]

    def among(self, ranks: int) -> Team:
        """Ranks with a GPU each, which have a process group of each backend."""
        if ("among", ranks) not in self._teams:
            team = Team("torch.distributed", ranks, joined=False, workloads=WORKLOADS)
            self._teams["among", ranks] = team
            jobs = {rank: ("among_join", {"rank": rank, "device": rank, "ranks": ranks}) for rank in range(ranks)}
            team.run(HERE, jobs, 120)
        return self._teams["among", ranks]

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for team in self._teams.values():
            team.close()


def calls(module: str, workload: str, size: int, here: int, there: int, **options: Any) -> Measure:
    def measure(lab: Lab) -> Samples:
        team = lab.team(module, here, there, **options)
        samples: Samples = team.call(HERE, workload, seconds=SECONDS, size=size, here=here)
        return samples

    return measure


def ours(workload: str, size: int, here: int, there: int, **options: Any) -> Measure:
    return calls("tensorferry.rpc", workload, size, here, there, **options)


def theirs(workload: str, size: int, here: int, there: int) -> Measure:
    return calls("torch.distributed.rpc", workload, size, here, there)


def bare(workload: str, **arguments: Any) -> Measure:
    return lambda lab: lab.alone().call(HERE, workload, seconds=SECONDS, **arguments)


def nccl(size: int, each: int) -> Measure:
    count = max(5, min(200, int(20 * GIGA / size / each)))

    def measure(lab: Lab) -> Samples:
        given = {"size": size, "count": count, "each": each}
        jobs = {rank: ("nccl", {"rank": rank, "device": rank, **given}) for rank in range(2)}
        samples: Samples = lab.nccl().run(HERE, jobs, 120)[0]
        return samples

    return measure


def all_reduce(backend: str, size: int, there: int) -> Measure:
    count = max(5, min(200, GIGA // size))

    def measure(lab: Lab) -> Samples:
        given = {"backend": backend, "size": size, "count": count}
        jobs = {rank: ("all_reduce", {"rank": rank, "device": rank * there, **given}) for rank in range(2)}
        each = lab.group(there).run(HERE, jobs, 120)
        return [max(ranks) for ranks in zip(each[0], each[1])]

    return measure


def among(backend: str, size: int, ranks: int, graph: bool) -> Measure:
    count = max(5, min(200, GIGA // size))

    def measure(lab: Lab) -> Samples:
        given = {"backend": backend, "ranks": ranks, "size": size, "count": count, "graph": graph}
        jobs = {rank: ("among", {"rank": rank, "device": rank, **given}) for rank in range(ranks)}
        each = lab.among(ranks).run(HERE, jobs, 240)
        return [max(samples) for samples in zip(*(each[rank] for rank in range(ranks)))]

    return measure


@dataclass(frozen=True)
class Row:
    """Ours beside others; `targets`: how many times faster than each we are to be."""

    name: str
    title: str
    unit: Unit
    contestants: dict[str, Measure]
    targets: dict[str, float]
    gpus: int = 2
    carried: dict[str, Any] = field(
        default_factory=dict
    )  # ours must go by this channel: "channel", here, there, options


def _beside_copies(name: str, title: str, workload: str, floor: str, size: int, target: float) -> Row:
    return Row(
        name,
        title,
        gigabytes(size),
        {
            OURS: ours(workload, size, 0, 1),
            COPY: bare(floor, size=size, here=0, there=1),
            NCCL: nccl(size, 1 if workload == "one" else 16),
        },
        {COPY: target, NCCL: 1.0},
        carried={"channel": "cuda_ipc", "here": 0, "there": 1},
    )


def _small_call(name: str, there: int) -> Row:
    size = 4 * KILO
    where = "GPU 0 to GPU 1" if there else "one GPU, two processes"
    contestants = {OURS: ours("one", size, 0, there), TORCH: theirs("one", size, 0, there)}
    return Row(name, f"4 KB call, {where}", MICROSECONDS, contestants, {TORCH: 20}, gpus=1 + there)


def _on_one_gpu(name: str, size: int, text: str, target: float) -> Row:
    contestants = {OURS: ours("one", size, 0, 0), COPY: bare("copy", size=size, here=0, there=0)}
    carried = {"channel": "cuda_ipc", "here": 0, "there": 0}
    title = f"{text} call, one GPU, two processes, beside a copy and its synchronisation in one"
    return Row(name, title, MICROSECONDS, contestants, {COPY: target}, gpus=1, carried=carried)


BASIC = {"channels": "cuda_basic,shm,cma,basic"}


def _staged(name: str, workload: str, text: str, there: int) -> Row:
    size = 64 * MEGA
    contestants = {OURS: ours(workload, size, 0, there, **BASIC), PINNED: bare("pinned", size=size, here=0)}
    if workload == "one":
        contestants[CHUNKED] = bare("chunked", size=size, here=0, there=there)
    carried = {"channel": "cuda_basic", "here": 0, "there": there, **BASIC}
    title = f"64 MB by cuda_basic, {text}, " + ("GPU 0 to GPU 1" if there else "one GPU, two processes")
    return Row(name, title, gigabytes(size), contestants, {PINNED: 0.9}, gpus=1 + there, carried=carried)


def _by_tensorpipe(name: str, there: int) -> Row:
    size, options = 64 * MEGA, {"channels": "tensorpipe"}
    contestants = {OURS: ours("one", size, 0, there, **options), TORCH: theirs("one", size, 0, there)}
    carried = {"channel": "tensorpipe", "here": 0, "there": there, **options}
    title = "64 MB by channel tensorpipe, " + ("GPU 0 to GPU 1" if there else "one GPU, two processes")
    return Row(name, title, gigabytes(size), contestants, {}, gpus=1 + there, carried=carried)


def _expandable(name: str, there: int) -> Row:
    size = 64 * MEGA
    grown = {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
    contestants = {OURS: ours("one", size, 0, there, **grown), FIXED: ours("one", size, 0, there)}
    title = "64 MB call, expandable segments, " + ("GPU 0 to GPU 1" if there else "one GPU, two processes")
    return Row(name, title, gigabytes(size), contestants, {FIXED: 0.95}, gpus=1 + there)


def _torch_backend(name: str, size: int, unit: Unit, there: int) -> Row:
    """A program of torch's module on both backends."""
    contestants = {
        OURS: calls("benchmarks.torch_backend", "one", size, 0, there),
        TORCH: theirs("one", size, 0, there),
    }
    where = "GPU 0 to GPU 1" if there else "one GPU, two processes"
    text = f"{size // MEGA} MB" if size >= MEGA else f"{size // KILO} KB"
    return Row(
        name, f"torch.distributed.rpc on both backends: {text} call, {where}", unit, contestants, {TORCH: 1}, 1 + there
    )


def _all_reduce(name: str, size: int, target: float, there: int) -> Row:
    """A tensor on a GPU that two ranks reduce, until the slower rank has the sum."""
    contestants = {OURS: all_reduce("tensorferry", size, there), GLOO: all_reduce("gloo", size, there)}
    where = "GPU 0 and GPU 1" if there else "one GPU, two processes"
    text = f"{size // MEGA} MB" if size >= MEGA else f"{size // KILO} KB"
    return Row(name, f"all_reduce of {text}, {where}", MICROSECONDS, contestants, {GLOO: target}, 1 + there)


def _region_blocks(name: str, there: int) -> Row:
    contestants = {OURS: ours("region_blocks", 0, 0, there), GATHER: bare("gather", here=0)}
    where = "GPU 1 to GPU 0" if there else "one GPU, two processes"
    title = f"40,064 blocks of 8 KB of a peer's region, read in any order, {where}"
    return Row(name, title, MICROSECONDS, contestants, {}, gpus=1 + there)


def _region_weights(name: str, there: int) -> Row:
    contestants = {
        OURS: ours("region_weights", 0, 0, there),
        BY_CALL: ours("weights_by_call", 0, 0, there),
        COPIES: bare("copies_of_weights", here=0, there=there),
    }
    where = "GPU 1 to GPU 0" if there else "one GPU, two processes"
    title = f"290 tensors (0.6 GB) of a peer's regions, {where}"
    return Row(name, title, MICROSECONDS, contestants, {COPIES: 0.8}, gpus=1 + there)


def _version_weights(name: str, there: int) -> Row:
    contestants = {
        OURS: ours("version_weights", 0, 0, there),
        COPIES: bare("copies_of_weights", here=0, there=there),
    }
    where = "GPU 1 to GPU 0" if there else "one GPU, two processes"
    title = f"290 tensors (0.6 GB) of a peer's new version, {where}"
    return Row(name, title, MICROSECONDS, contestants, {COPIES: 0.8}, gpus=1 + there)


# Bytes, and how many times as fast as Gloo we are to be on one GPU and on two.
GROUP_SIZES = (("1kb", KILO, 5, 5), ("1mb", MEGA, 6, 10), ("64mb", 64 * MEGA, 50, 50))

# Bytes, and how many times as fast as torch's symmetric memory and as NCCL we are to be, if there is a target.
AMONG_SIZES: list[tuple[str, int, float | None, float | None]] = [
    ("1kb", KILO, 1.0, None),
    ("16kb", 16 * KILO, 1.0, None),
    ("64kb", 64 * KILO, 1.0, None),
    ("256kb", 256 * KILO, None, None),
    ("1mb", MEGA, None, None),
    ("8mb", 8 * MEGA, None, 1.1),
    ("64mb", 64 * MEGA, None, None),
    ("256mb", 256 * MEGA, None, 1.0),
    ("1gb", GIGA, None, None),
]


def _among(ranks: int, name: str, size: int, targets: list[float | None], graph: bool) -> Row:
    contestants = {who: among(backend, size, ranks, graph) for who, backend in AMONG.items()}
    wanted = {who: target for who, target in zip((SYMMETRIC, NCCL_REDUCE), targets) if target is not None}
    title = f"all_reduce of {name.upper()}, {ranks} GPUs, a process each" + (", in a CUDA graph" if graph else "")
    row = f"gpus{ranks}-all-reduce-{name}" + ("-graph" if graph else "")
    return Row(row, title, MICROSECONDS, contestants, wanted, gpus=ranks)


ROWS = [
    _small_call("4kb", 1),
    _beside_copies("64mb", "64 MB call", "one", "copy", 64 * MEGA, 0.9),
    _beside_copies("64mb-four", "64 MB, four calls in flight", "several", "copies", 64 * MEGA, 0.95),
    _beside_copies("1gb", "1 GB call", "one", "copy", GIGA, 0.95),
    _small_call("same-4kb", 0),
    _on_one_gpu("same-4kb-copy", 4 * KILO, "4 KB", 1 / 3),
    _on_one_gpu("same-64mb-copy", 64 * MEGA, "64 MB", 1 / 2),
    _staged("basic-64mb", "one", "one call", 1),
    _staged("basic-64mb-four", "several", "four calls in flight", 1),
    _staged("same-basic-64mb", "one", "one call", 0),
    _by_tensorpipe("tensorpipe-64mb", 1),
    _by_tensorpipe("same-tensorpipe-64mb", 0),
    _expandable("expandable-64mb", 1),
    _expandable("same-expandable-64mb", 0),
    _region_blocks("region-blocks", 1),
    _region_blocks("same-region-blocks", 0),
    _region_weights("region-weights", 1),
    _region_weights("same-region-weights", 0),
    _version_weights("version-weights", 1),
    _version_weights("same-version-weights", 0),
    *[
        _torch_backend(f"{prefix}torch-backend-{name}", size, unit, there)
        for prefix, there in (("", 1), ("same-", 0))
        for name, size, unit in (("4kb", 4 * KILO, MICROSECONDS), ("64mb", 64 * MEGA, gigabytes(64 * MEGA)))
    ],
    *[
        _all_reduce(f"{prefix}group-{name}", size, targets[there], there)
        for prefix, there in (("", 1), ("same-", 0))
        for name, size, *targets in GROUP_SIZES
    ],
    *[
        _among(ranks, name, size, targets, graph)
        for ranks in (2, 4, 8)
        for name, size, *targets in AMONG_SIZES
        for graph in (False, True)
    ],
]


def measure(row: Row, lab: Lab, run: Run, rounds: int) -> RowResult:
    """The row, if ours goes by the channel that the row is about."""
    if row.carried:
        options = {name: value for name, value in row.carried.items() if name not in ("channel", "here", "there")}
        team = lab.team("tensorferry.rpc", row.carried["here"], row.carried["there"], **options)
        found = team.call(HERE, "channel", here=row.carried["here"])
        if found != row.carried["channel"]:
            raise RuntimeError(f"{row.carried['channel']} does not carry, {found or 'nothing'} does")
    return take_turns(row, lab, run, rounds)


def main() -> int:
    """0 when every row that could be measured met its targets, 1 when one failed or missed."""
    parser = argparse.ArgumentParser(description="Tensors on GPUs, beside their peers, in turns.")
    parser.add_argument("--only", default="", help="the row of this name, else those whose name contains it")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant")
    parser.add_argument("--json", type=Path, help="write the run here")
    given = parser.parse_args()
    there = torch.cuda.device_count()  # makes no context
    if there == 0:
        print("no GPU that torch can use here: nothing to measure")
        return 2
    rows = named(given.only, ROWS)
    run = Run(machine={**describe_machine(), "gpus": [torch.cuda.get_device_name(i) for i in range(there)]})
    print(f"run {run.id[:8]}, torch {torch.__version__}, {there} x {run.machine['gpus'][0]}")
    skipped = [f"{row.name}: needs {row.gpus} GPUs, {there} there" for row in rows if row.gpus > there]
    fitting = [row for row in rows if row.gpus <= there]
    failures = (RuntimeError, TimeoutError, AssertionError)
    with Lab() as lab:
        return measure_rows(
            run, fitting, lambda row: measure(row, lab, run, given.rounds), failures, given.json, skipped
        )


if __name__ == "__main__":
    sys.exit(main())
