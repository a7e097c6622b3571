"""``tensorferry tune``: measures on this machine up to how many bytes each algorithm of a collective operation is the
fastest, and on GPUs from how many bytes on inputs are read in place. It keeps that in a file which groups read.

docs/collectives.md says what is measured, and which groups use it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import _C, Agent, collectives, sharing
from .progress import Progress

__all__ = ["crossings_of", "main", "mapped_from", "medians_in_turns", "merged"]

OPERATIONS = ("all_reduce", "reduce")
ALGORITHMS = ("one_shot", "two_shot")  # from the one for small tensors on
INPUTS = ("copied", "mapped")  # how the ranks of GPUs read inputs, from small ones on
SMALLEST, LARGEST = 10, 24  # powers of two: the sizes in bytes
KEY = ("topology", "device", "ranks", "version")


def crossings_of(seconds: Mapping[int, Mapping[str, float]], algorithms: Sequence[str] = ALGORITHMS) -> str:
    """Returns up to how many bytes each algorithm is used, as ``"one_shot:65536:two_shot"``.

    It takes the crossings that lose least against the fastest algorithm of each size, so one noisy size moves none.
    An algorithm that is nowhere the fastest is left out.

    Args:
        seconds: by the size in bytes, and by algorithm.
        algorithms: in the order in which they are used, from small sizes to large ones.

    Example::

        times = {1024: {"one_shot": 1e-5, "two_shot": 2e-5}, 4096: {"one_shot": 4e-5, "two_shot": 3e-5}}
        assert tensorferry.tune.crossings_of(times) == "one_shot:1024:two_shot"
    """
    sizes = sorted(seconds)
    # losses[i] and rows[i]: of the best use of the algorithms so far for the first i sizes.
    losses, rows = [0.0] + [math.inf] * len(sizes), [list[tuple[str, int]]() for _ in range(len(sizes) + 1)]
    for algorithm in algorithms:
        lost = [math.log(seconds[size][algorithm] / min(seconds[size].values())) for size in sizes]
        next_losses, next_rows = list(losses), list(rows)
        for begin in range(len(sizes)):
            loss = losses[begin]
            for end in range(begin + 1, len(sizes) + 1):
                loss += lost[end - 1]
                if loss < next_losses[end]:
                    next_losses[end] = loss
                    next_rows[end] = [*rows[begin], (algorithm, sizes[end - 1])]
        losses, rows = next_losses, next_rows
    *bounded, (last, _) = rows[-1]
    return ":".join([*(f"{algorithm}:{size}" for algorithm, size in bounded), last])


def mapped_from(seconds: Mapping[int, Mapping[str, float]]) -> int | None:
    """Returns from how many bytes on inputs are mapped rather than copied; None if copies are always faster.

    Args:
        seconds: by the size in bytes, of ``"copied"`` and ``"mapped"`` inputs.

    Example::

        times = {1024: {"copied": 1e-5, "mapped": 2e-5}, 4096: {"copied": 4e-5, "mapped": 3e-5}}
        assert tensorferry.tune.mapped_from(times) == 1025
    """
    *copied, last = crossings_of(seconds, INPUTS).split(":")
    if last == "copied":
        return None
    return int(copied[1]) + 1 if copied else 0


def merged(kept: Mapping[str, Any], new: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what the file has afterwards: ``new`` entries take the place of those with the same key.

    Args:
        kept: what the file has.
        new: entries with ``topology``, ``device``, ``ranks``, ``version`` and ``crossings``.
    """

    def key(entry: Mapping[str, Any]) -> list[Any]:
        return [entry.get(each) for each in KEY]

    replaced = [key(entry) for entry in new]
    others = [entry for entry in kept.get("measured", []) if key(entry) not in replaced]
    return {**kept, "measured": [*others, *new]}


# ---- a rank


def medians_in_turns(
    start: collectives.Group, contestants: Mapping[str, tuple[Callable[[], object], Callable[[], object]]], times: int
) -> dict[str, float]:
    """Returns the median time of each contestant, in seconds.

    A sample is the time from a common start to the end of the slowest rank. Every rank calls this. The contestants take
    turns, so that a busy moment meets all of them.

    Args:
        start: a group of its own for the common starts, on tensors of the CPU.
        contestants: what rewrites the inputs before a sample, and what runs the operation and waits for its result.
        times: how many samples; two more come before them, to warm up.
    """
    slowest: dict[str, list[float]] = {each: [] for each in contestants}
    for turn in range(times + 2):
        for each, (rewrite, run) in contestants.items():
            rewrite()
            start.barrier().wait()
            began = time.perf_counter()
            run()
            took = torch.tensor([time.perf_counter() - began], device="cpu")
            worst = start.all_reduce(took, "max").wait().item()
            if turn >= 2:
                slowest[each].append(worst)
    return {each: statistics.median(samples) for each, samples in slowest.items()}


def _reduce(group: collectives.Group, name: str, tensor: torch.Tensor) -> collectives.Work[torch.Tensor]:
    return group.all_reduce(tensor) if name == "all_reduce" else group.reduce(tensor, 0)


def _operation(
    tensor: torch.Tensor, start: Callable[[torch.Tensor], collectives.Work[torch.Tensor]]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Returns what rewrites the tensor before an operation, and what runs the operation and waits for its result."""
    device = tensor.device.type

    def rewrite() -> None:
        tensor.fill_(1.0)
        _settle(device)

    def run() -> None:
        start(tensor).wait()
        _settle(device)

    return rewrite, run


def _settle(device: str) -> None:
    """Waits until the device has done its work, without a call that blocks inside the driver."""
    if device != "cpu":
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        while not event.query():
            pass


def _serve(given: argparse.Namespace) -> None:
    """Measures as one rank. Rank 0 prints a line of JSON for each size, and one with the key."""
    torch.set_num_threads(1)
    device = given.device if given.device == "cpu" else f"cuda:{given.rank}"
    if device != "cpu":
        torch.cuda.set_device(device)
    names = [f"rank{each}" for each in range(given.size)]
    agent = Agent(names[given.rank], store=dist.FileStore(given.serve, given.size), trust="registered")

    def form(label: str, algorithms: str = "") -> collectives.Group:
        return collectives.form_group(names, agent=agent, label=label, algorithms=algorithms, timeout=120.0)

    start = form("start")
    start.all_reduce(torch.ones(1, device=device)).wait()
    key = start._group.tuning_key(device != "cpu")
    reason = "" if key is not None else start.explain("all_reduce", 1024)
    if given.rank == 0:
        print(json.dumps({"key": key, "reason": reason}), flush=True)

    def measure(row: str, contestants_of: Callable[[int], dict[str, Any]]) -> None:
        for power in range(SMALLEST, given.largest + 1):
            times = max(3, given.times // (8 if power > 20 else 1))
            medians = medians_in_turns(start, contestants_of(1 << power), times)
            if given.rank == 0:
                print(json.dumps({"operation": row, "bytes": 1 << power, "seconds": medians}), flush=True)

    for name in OPERATIONS if key is not None else ():
        groups = {each: form(f"{name} {each}", f"{name}={each}") for each in ALGORITHMS}

        def by_algorithm(size: int, name: str = name, groups: dict[str, collectives.Group] = groups) -> dict[str, Any]:
            tensor = torch.empty(size // 4, device=device)
            return {each: _operation(tensor, partial(_reduce, group, name)) for each, group in groups.items()}

        measure(name, by_algorithm)
    if key is not None and device != "cpu":
        inputs = form("inputs")

        def by_input(size: int) -> dict[str, Any]:
            run = partial(inputs.all_reduce, out=torch.empty(size // 4, device=device))
            tensors = torch.empty(size // 4, device=device), sharing.empty(size // 4, device=device)
            return {each: _operation(tensor, run) for each, tensor in zip(INPUTS, tensors, strict=True)}

        measure("inputs", by_input)
    start.barrier().wait()
    os._exit(0)


# ---- the command


def _measure(size: int, device: str, times: int, largest: int) -> dict[str, Any] | None:
    """Runs so many ranks, prints a table, and returns the entry for the file; None if there is nothing to measure."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tensorferry.tune", "--serve", str(Path(folder) / "store")]
        options = ["--device", device, "--size", str(size), "--times", str(times), "--largest", str(largest)]
        environment = {**os.environ, "TENSORFERRY_TUNING": os.devnull}  # what was kept before says nothing now
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank), *options], stdout=subprocess.PIPE, text=True, env=environment
            )
            for rank in range(size)
        ]
        try:
            assert ranks[0].stdout is not None
            lines = []
            with Progress() as progress:
                progress.say(f"starting {size} ranks on {device}")
                for line in ranks[0].stdout:
                    lines.append(json.loads(line))
                    if "operation" in lines[-1]:
                        progress.say(
                            f"{size} ranks on {device}: {lines[-1]['operation']} of {lines[-1]['bytes']} bytes"
                        )
            failed = [rank for rank, process in enumerate(ranks) if process.wait(60) != 0]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()
    if failed:
        raise SystemExit(f"tensorferry tune: rank {failed[0]} of {size} on {device} has failed; its error is above")
    about, *rows = lines
    if about["key"] is None:
        print(f"{size} ranks on {device} are not measured: {about['reason']}")
        return None
    entry: dict[str, Any] = dict(zip(KEY, about["key"], strict=True))
    print(f"{size} ranks, {entry['topology']}, {entry['device']}:")

    def table(name: str, contestants: Sequence[str]) -> dict[int, dict[str, float]]:
        seconds = {row["bytes"]: row["seconds"] for row in rows if row["operation"] == name}
        print(f"  {'operation':12}{'bytes':>10}" + "".join(f"{each:>14}" for each in contestants))
        for bytes_, each in seconds.items():
            print(
                f"  {name:12}{bytes_:>10}"
                + "".join(f"{each[contestant] * 1e6:>11.1f} us" for contestant in contestants)
            )
        return seconds

    entry["crossings"] = {}
    for name in OPERATIONS:
        entry["crossings"][name] = crossings_of(table(name, ALGORITHMS))
        print(f"  {name}: {entry['crossings'][name]}")
    if device != "cpu":
        least = mapped_from(table("inputs", INPUTS))
        print("  inputs: always copied" if least is None else f"  inputs: mapped from {least} bytes on")
        if least is not None:
            entry["mapped_from"] = least
    entry["measured_at"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return entry


def _keep(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Adds the entries to the file, which other processes read at any time."""
    kept: dict[str, Any] = {}
    if path.exists():
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            print(f"{path} was not JSON, and is replaced")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(merged(kept, entries), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    beside.replace(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: ``tensorferry tune --ranks 2 4``."""
    parser = argparse.ArgumentParser(
        prog="tensorferry tune",
        description="Measures up to how many bytes each algorithm of a collective operation is the fastest on this "
        "machine. Groups that are formed later use the result.",
    )
    gpus = torch.cuda.device_count()
    parser.add_argument("--ranks", type=int, nargs="+", help="the sizes of the groups; by default 2, 4, and the GPUs")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default both, if there are two GPUs")
    parser.add_argument("--quick", action="store_true", help="fewer samples, of fewer sizes")
    parser.add_argument("--dry-run", action="store_true", help="print the table, and keep nothing")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--times", type=int, default=200, help=argparse.SUPPRESS)
    parser.add_argument("--largest", type=int, default=LARGEST, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve:
        _serve(given)
        return
    if given.quick:
        given.times, given.largest = 10, min(given.largest, 20)
    entries = []
    for device in [given.device] if given.device else ["cpu", *(["cuda"] if gpus > 1 else [])]:
        most = (os.cpu_count() or 1) if device == "cpu" else gpus
        sizes = given.ranks or sorted({size for size in (2, 4, gpus) if 1 < size <= max(2, most)})
        for size in sizes:
            if size < 2:
                raise SystemExit("tensorferry tune: a group of one rank has nothing to choose")
            if device == "cuda" and size > gpus:
                print(f"{size} ranks on cuda are not measured: each needs a GPU of its own, and there are {gpus}")
                continue
            entry = _measure(size, device, given.times, given.largest)
            if entry is not None:
                entries.append(entry)
    path = _C.tuning_file()
    if given.dry_run or not entries:
        return
    if not path:
        raise SystemExit("tensorferry tune: there is no folder for the file: set TENSORFERRY_TUNING, or HOME")
    _keep(Path(path), entries)
    print(f"kept in {path}")


if __name__ == "__main__":
    main()
