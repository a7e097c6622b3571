"""Tensors by an RDMA card, ours and perftest's in one invocation, in turns; needs a card, or two on one host.

python -m benchmarks.rdma [--cards CALLER,CALLEE] [--only NAME] [--rounds N] [--json FILE]

`make bench-rdma` runs it in a virtual machine, between two cards made of software that a cable joins. That shows what
TensorFerry adds to what the cards and the kernel take, and nothing about the speed of real cards.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lines import measure_rows, named, take_turns
from benchmarks.native import Missing, Programs
from benchmarks.placement import Placement
from benchmarks.results import Run, describe_machine
from benchmarks.units import MICROSECONDS, Unit, gigabytes_sent

OURS, BASIC, READ, WRITE = "tensorferry by ibv", "tensorferry by basic", "ib_read_bw", "ib_write_bw"
SECONDS = 1.0
KILO, MEGA = 1 << 10, 1 << 20
SMALLEST = 16 * KILO  # smaller tensors go by basic, which is faster then
LISTED = 64  # tensors in a call of cpp_transfer's kind "tensors"
HERE = Placement.UNPINNED
Measure = Callable[["Lab"], list[float]]


@dataclass
class Lab:
    programs: Programs
    cards: tuple[str, str]

    def perftest(self, program: str, size: int, count: int) -> float | None:
        """Nanoseconds that one of `count` transfers of `size` bytes took; None: it printed 0.00, as at times."""
        given = ["-s", str(size), "-n", str(count), "-F"]
        (first, (row, address)), (second, (other_row, _)) = self._gids()
        command = [program, "-d", second, "-x", str(other_row), *given, address]
        with subprocess.Popen(
            [program, "-d", first, "-x", str(row), *given], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as server:
            try:
                printed = _connect(command)
            except BaseException:
                server.kill()
                raise
        found = re.findall(rf"^ *{size} +\d+ +[\d.]+ +([\d.]+) ", printed, re.MULTILINE)
        if not found:
            raise RuntimeError(f"{program}: {printed.strip()}")
        rate = float(found[0]) * MEGA
        return size / rate * 1e9 if rate > 0 else None

    def _gids(self) -> list[tuple[str, tuple[int, str]]]:
        return [(card, ipv4_gid(card)) for card in self.cards]

    def check(self) -> None:
        """Raises Missing if there is nothing to measure with."""
        self._gids()
        self.programs.check("cpp_transfer")
        for program in (READ, WRITE):
            if subprocess.run([program, "--version"], capture_output=True).returncode not in (0, 1):
                raise Missing(f"{program} is not installed")


def _connect(command: list[str]) -> str:
    """The output of a program that connects to one that may not listen yet."""
    for _ in range(50):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode == 0:
            return done.stdout
        time.sleep(0.1)
    raise RuntimeError(f"{command[0]}: {done.stderr.strip() or done.stdout.strip()}")


def ipv4_gid(card: str) -> tuple[int, str]:
    """The index and the address of the first GID of port 1 that holds an IPv4 address."""
    for index in range(16):
        try:
            row = Path(f"/sys/class/infiniband/{card}/ports/1/gids/{index}").read_text().strip()
        except OSError:
            break
        if row.startswith("0000:0000:0000:0000:0000:ffff:"):
            number = row[-9:].replace(":", "")
            return index, ".".join(str(int(number[at : at + 2], 16)) for at in range(0, 8, 2))
    raise Missing(f"{card} has no GID with an IPv4 address")


@dataclass(frozen=True)
class Row:
    """Ours beside others; `targets`: how many times faster than each we are to be."""

    name: str
    title: str
    unit: Unit
    contestants: dict[str, Measure]
    targets: dict[str, float]


def ours(channels: str, kind: str, size: int, callers: int) -> Measure:
    def measure(lab: Lab) -> list[float]:
        options = {"kind": kind, "bytes": str(size), "callers": str(callers), "cards": ",".join(lab.cards)}
        if channels != "basic" and (kind == "tensors" or size >= SMALLEST):
            options["require"] = "ibv"
        return lab.programs.run("cpp_transfer", HERE, SECONDS, {}, transport="tcp", channels=channels, **options)

    return measure


def theirs(program: str, size: int, at_once: int) -> Measure:
    """As long as ours take: the time of `at_once` transfers."""
    count = max(5, min(10000, 64 * MEGA // size))  # about a second, as ours; perftest takes no fewer than 5

    def measure(lab: Lab) -> list[float]:
        for _ in range(3):
            if figure := lab.perftest(program, size, count):
                return [figure * at_once]
        raise RuntimeError(f"{program} has printed a bandwidth of 0 three times")

    return measure


def _slug(text: str) -> str:
    return text.replace(" ", "").lower()


def _beside_perftest(name: str, title: str, kind: str, size: int, calls: int, at_once: int) -> Row:
    """`calls` calls at once, which carry `at_once` tensors together."""
    return Row(
        name,
        title,
        gigabytes_sent(size * at_once),
        {
            OURS: ours("ibv,basic", kind, size, calls),
            READ: theirs(READ, size, at_once),
            WRITE: theirs(WRITE, size, at_once),
            BASIC: ours("basic", kind, size, calls),
        },
        {READ: 0.9, WRITE: 0.9},
    )


def _one_way(size: int, text: str) -> Row:
    at_once = max(1, min(64, 16 * MEGA // size))
    return _beside_perftest(
        _slug(text), f"{text} tensors, one way, {at_once} at once", "tensor", size, at_once, at_once
    )


def _lists(size: int, text: str) -> Row:
    """Like perftest, which keeps many transfers under way and sends no request and reply for each."""
    calls = 4
    return _beside_perftest(
        f"{_slug(text)}-list",
        f"calls with {LISTED} {text} tensors each, {calls} at once",
        "tensors",
        size,
        calls,
        LISTED * calls,
    )


def _beside_basic(name: str, title: str, kind: str, size: int) -> Row:
    contestants = {OURS: ours("ibv,basic", kind, size, 1), BASIC: ours("basic", kind, size, 1)}
    return Row(name, title, MICROSECONDS, contestants, {})


ROWS = [
    _one_way(4 * KILO, "4 KB"),
    _one_way(64 * KILO, "64 KB"),
    _one_way(MEGA, "1 MB"),
    _one_way(16 * MEGA, "16 MB"),
    _one_way(256 * MEGA, "256 MB"),
    _lists(4 * KILO, "4 KB"),
    _lists(16 * KILO, "16 KB"),
    _lists(64 * KILO, "64 KB"),
    _beside_basic("empty", "empty call by TCP", "empty", 0),
    _beside_basic("one-4kb", "call with one 4 KB tensor", "tensor", 4 * KILO),
    _beside_basic("one-1mb", "call with one 1 MB tensor", "tensor", MEGA),
]


def main() -> int:
    """0 when every row that could be measured met its targets, 1 when one failed or missed, 2 without cards."""
    parser = argparse.ArgumentParser(description="Tensors by an RDMA card, beside perftest, in turns.")
    parser.add_argument("--cards", default="rxe0,rxe1", help="the caller's card and the callee's")
    parser.add_argument("--bin", type=Path, help="the folder of cpp_transfer")
    parser.add_argument("--only", default="", help="the row of this name, else those whose name contains it")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant")
    parser.add_argument("--json", type=Path, help="write the run here")
    given = parser.parse_args()
    one, _, other = given.cards.partition(",")
    lab = Lab(Programs(given.bin), (one, other))
    try:
        lab.check()
    except Missing as missing:
        print(f"nothing to measure: {missing}")
        return 2
    rows = named(given.only, ROWS)
    run = Run(machine=describe_machine())
    print(f"run {run.id[:8]}, {one} to {other}, {run.machine['processor']}")
    failures = (RuntimeError, subprocess.TimeoutExpired)
    return measure_rows(run, rows, lambda row: take_turns(row, lab, run, given.rounds), failures, given.json)


if __name__ == "__main__":
    raise SystemExit(main())
