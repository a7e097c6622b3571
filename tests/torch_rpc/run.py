"""Runs PyTorch's RPC suite on TensorFerry's backend: run.py [cpu] [faulty] [gpu] [options]

Each test has a process of its own, forked from this one, which has imported torch. A test on GPUs has a new
interpreter, because CUDA does not work in forks of a process that has asked for GPUs. A test that takes too long is
ended with all its processes. Exits with 1 if a test failed that docs/torch-rpc-conformance.md does not list, or if a
listed one passed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import signal
import sys
import tempfile
import time
import unittest
import zlib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/torch-rpc-conformance.md"
sys.path.insert(0, str(Path(__file__).parent))

PASSED, FAILED, SKIPPED, TIMED_OUT = "passed", "failed", "skipped", "timed out"
_EXITS = {0: PASSED, 1: FAILED, 2: SKIPPED}


@dataclasses.dataclass
class Result:
    test: str
    outcome: str
    seconds: float
    output: str

    @property
    def reason(self) -> str:
        """The last line that says why."""
        lines = [
            line for line in self.output.splitlines() if re.match(r"\w*(Error|Exception|Interrupt|Skip)\w*\b", line)
        ]
        return (lines or self.output.splitlines() or ["no output"])[-1][:300]


@dataclasses.dataclass
class Running:
    test: str
    output: str
    began: float


def listed_failures() -> set[str]:
    """The tests in the first column of the page's tables."""
    if not PAGE.exists():
        return set()
    return set(re.findall(r"^\| `(\w+\.\w+)` \|", PAGE.read_text(), re.MULTILINE))


def run_one(test: str) -> int:
    import suite

    result = unittest.TestResult()
    suite.case(test).run(result)
    for _, text in result.errors + result.failures:
        print(text)
    for _, why in result.skipped:
        print("Skipped:", why)
    if result.skipped:
        return 2
    return 0 if result.wasSuccessful() else 1


def is_on_gpus(test: str) -> bool:
    return "Cuda" in test.split(".")[0]


def start(test: str, folder: str) -> tuple[int, Running]:
    output = os.path.join(folder, test)
    pid = os.fork()
    if pid == 0:
        os.setsid()  # so that all processes of the test can be ended together
        out = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        if is_on_gpus(test):
            os.execv(sys.executable, [sys.executable, __file__, "--one", test])
        code = 1
        try:
            code = run_one(test)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}")
        finally:
            sys.stdout.flush()
            os._exit(code)
    return pid, Running(test, output, time.monotonic())


def end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def collect(running: dict[int, Running], limit: float) -> list[Result]:
    """Waits until a test has ended, or ends one that takes too long."""
    while True:
        done = []
        for pid, one in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            late = time.monotonic() - one.began > limit
            if not ended and not late:
                continue
            end_group(pid)
            if not ended:
                os.waitpid(pid, 0)
            code = os.waitstatus_to_exitcode(status) if ended else None
            outcome = TIMED_OUT if code is None else _EXITS.get(code, FAILED)
            text = Path(one.output).read_text(errors="replace")
            done.append(Result(one.test, outcome, time.monotonic() - one.began, text))
            del running[pid]
        if done:
            return done
        time.sleep(0.02)


def run_all(tests: list[str], shards: int, limit: float, again: int) -> list[Result]:
    results: list[Result] = []
    left = [(test, 0) for test in tests]
    tries: dict[str, int] = {}
    running: dict[int, Running] = {}
    with tempfile.TemporaryDirectory() as folder:
        while left or running:
            while left and len(running) < shards:
                test, tried = left.pop(0)
                tries[test] = tried
                pid, one = start(test, folder)
                running[pid] = one
            for result in collect(running, limit):
                if result.outcome in (FAILED, TIMED_OUT) and tries[result.test] < again:
                    left.append((result.test, tries[result.test] + 1))
                    print(f"{result.test}: {result.outcome}, tries again", flush=True)
                    continue
                results.append(result)
                if result.outcome != PASSED:
                    print(f"{result.test}: {result.outcome}: {result.reason}", flush=True)
    return sorted(results, key=lambda result: result.test)


def report(results: list[Result], listed: set[str], seconds: float) -> str:
    import torch

    counts = Counter(result.outcome for result in results)
    lines = ["# PyTorch's RPC suite on TensorFerry", "", f"torch {torch.__version__}, {seconds:.0f} s", ""]
    lines += ["| class | passed | failed | timed out | skipped |", "|---|---|---|---|---|"]
    for name in sorted({result.test.split(".")[0] for result in results}):
        of = Counter(result.outcome for result in results if result.test.startswith(name + "."))
        lines.append(f"| {name} | {of[PASSED]} | {of[FAILED]} | {of[TIMED_OUT]} | {of[SKIPPED]} |")
    lines.append(
        f"| all {len(results)} | {counts[PASSED]} | {counts[FAILED]} | {counts[TIMED_OUT]} | {counts[SKIPPED]} |"
    )
    lines.append("")
    for result in results:
        if result.outcome != PASSED:
            known = " (listed)" if result.test in listed else ""
            lines.append(f"- `{result.test}` {result.outcome}{known}: {result.reason}")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("groups", nargs="*", default=["cpu", "faulty"], help="cpu, faulty, gpu; default: cpu faulty")
    parser.add_argument("--one", help="runs this test in this process, for the other processes of this program")
    parser.add_argument("-k", default="", help="only tests whose name contains this")
    parser.add_argument("--tenth", action="store_true", help="a fixed tenth of the tests")
    parser.add_argument("--shards", type=int, default=os.cpu_count() or 1, help="tests that run side by side")
    parser.add_argument("--limit", type=float, default=120, help="seconds that one test may take")
    parser.add_argument("--again", type=int, default=1, help="how often a failed test is tried again")
    parser.add_argument("--report", type=Path, help="writes the report to this file, and outputs of failures beside it")
    options = parser.parse_args()
    if options.one:
        return run_one(options.one)

    import suite
    from torch.testing._internal import common_distributed

    common_distributed.TIMEOUT_DEFAULT = int(options.limit)
    tests = [test for group in options.groups for test in suite.tests_of(group) if options.k in test]
    if options.tenth:
        tests = [test for test in tests if zlib.crc32(test.encode()) % 10 == 0]
    began = time.monotonic()
    results = run_all(tests, options.shards, options.limit, options.again)
    listed = listed_failures()
    text = report(results, listed, time.monotonic() - began)
    print(text)
    bad = [result for result in results if result.outcome in (FAILED, TIMED_OUT)]
    if options.report:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(text)
        outputs = "\n".join(f"==== {result.test} {result.outcome}\n{result.output}" for result in bad)
        options.report.with_suffix(".log").write_text(outputs)
    unlisted = [result.test for result in bad if result.test not in listed]
    surprises = [result.test for result in results if result.outcome == PASSED and result.test in listed]
    if unlisted:
        print("failed, and not in docs/torch-rpc-conformance.md:", *unlisted)
    if surprises:
        print("passed, but in docs/torch-rpc-conformance.md:", *surprises)
    return 1 if unlisted or surprises else 0


if __name__ == "__main__":
    sys.exit(main())
