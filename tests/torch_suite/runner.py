"""Runs a suite that ships in torch's wheel on TensorFerry's backend. The run.py of each suite calls main().

Each test has a process of its own, forked from this one, which has imported torch. A test that takes too long is ended
with all its processes. The exit status is 1 if a test failed that the suite's page in docs/ does not list, or if a
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
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PASSED, FAILED, SKIPPED, TIMED_OUT = "passed", "failed", "skipped", "timed out"
_EXITS = {0: PASSED, 1: FAILED, 2: SKIPPED}


@dataclasses.dataclass(frozen=True)
class Suite:
    title: str
    page: str  # lists the tests that cannot pass, from the root of the tree
    groups: tuple[str, ...]
    tests_of: Callable[[str], list[str]]  # the names of a group's tests, such as "RpcTest.test_add", in a fixed order
    case: Callable[[str], unittest.TestCase]
    default: tuple[str, ...] = ()  # the groups that run if none is named; empty: all
    # CUDA does not work in forks of a process that has asked for GPUs. Such a test has a new interpreter.
    needs_an_interpreter: Callable[[str], bool] = lambda test: False


@dataclasses.dataclass
class Result:
    test: str
    outcome: str
    seconds: float
    output: str
    earlier: str = ""  # why the try before this one failed

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


def listed_failures(suite: Suite) -> set[str]:
    """The tests in the first column of the page's tables."""
    return set(re.findall(r"^\| `(\w+\.\w+)` \|", (ROOT / suite.page).read_text(), re.MULTILINE))


def run_one(suite: Suite, test: str) -> int:
    result = unittest.TestResult()
    suite.case(test).run(result)
    for _, text in result.errors + result.failures:
        print(text)
    for _, why in result.skipped:
        print("Skipped:", why)
    if result.skipped:
        return 2
    return 0 if result.wasSuccessful() else 1


def start(suite: Suite, test: str, folder: str) -> tuple[int, Running]:
    output = os.path.join(folder, test)
    pid = os.fork()
    if pid == 0:
        os.setsid()  # so that all processes of the test can be ended together
        out = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        if suite.needs_an_interpreter(test):
            os.execv(sys.executable, [sys.executable, sys.argv[0], "--one", test])
        code = 1
        try:
            code = run_one(suite, test)
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


def run_all(suite: Suite, tests: list[str], shards: int, limit: float, again: int) -> list[Result]:
    results: list[Result] = []
    left = [(test, 0) for test in tests]
    tries: dict[str, int] = {}
    earlier: dict[str, str] = {}
    running: dict[int, Running] = {}
    with tempfile.TemporaryDirectory() as folder:
        while left or running:
            while left and len(running) < shards:
                test, tried = left.pop(0)
                tries[test] = tried
                pid, one = start(suite, test, folder)
                running[pid] = one
            for result in collect(running, limit):
                if result.outcome in (FAILED, TIMED_OUT) and tries[result.test] < again:
                    left.append((result.test, tries[result.test] + 1))
                    earlier[result.test] = f"{result.outcome}: {result.reason}"
                    print(f"{result.test}: {earlier[result.test]}; tries again", flush=True)
                    continue
                result.earlier = earlier.get(result.test, "")
                results.append(result)
                if result.outcome != PASSED:
                    print(f"{result.test}: {result.outcome}: {result.reason}", flush=True)
    return sorted(results, key=lambda result: result.test)


def report(suite: Suite, results: list[Result], listed: set[str], seconds: float) -> str:
    import torch

    lines = [f"# {suite.title}", "", f"torch {torch.__version__}, {seconds:.0f} s", ""]
    lines += ["| class | passed | failed | timed out | skipped |", "|---|---|---|---|---|"]

    def row(title: str, of: list[Result]) -> str:
        counts = Counter(result.outcome for result in of)
        return f"| {title} | {counts[PASSED]} | {counts[FAILED]} | {counts[TIMED_OUT]} | {counts[SKIPPED]} |"

    for name in sorted({result.test.split(".")[0] for result in results}):
        lines.append(row(name, [result for result in results if result.test.startswith(name + ".")]))
    lines.append(row(f"all {len(results)}", results))
    skipped = defaultdict(list)
    failed = []
    for result in results:
        if result.outcome == SKIPPED:
            skipped[result.reason].append(result.test)
        elif result.outcome != PASSED:
            known = " (listed)" if result.test in listed else ""
            failed.append(f"- `{result.test}` {result.outcome}{known}: {result.reason}")
    if failed:
        lines += ["", "## Failed", "", *failed]
    again = [f"- `{result.test}`, which first {result.earlier}" for result in results if result.earlier]
    if again:
        lines += ["", "## Tried again", "", *again]
    if skipped:
        lines += ["", "## Skipped", ""]
    for reason, tests in sorted(skipped.items(), key=lambda pair: -len(pair[1])):
        lines.append(f"- {len(tests)}: {reason.removeprefix('Skipped: ')}")
        lines += [f"  - `{test}`" for test in tests]
    return "\n".join(lines) + "\n"


def main(suite: Suite) -> int:
    default = suite.default or suite.groups
    parser = argparse.ArgumentParser(description=suite.title)
    parser.add_argument(
        "groups", nargs="*", default=default, help=f"of {' '.join(suite.groups)}; default: {' '.join(default)}"
    )
    parser.add_argument("--one", help="runs this test in this process, for the other processes of this program")
    parser.add_argument("-k", default="", help="only tests whose name contains this")
    parser.add_argument("--part", type=int, default=1, metavar="N", help="a fixed Nth part of the tests")
    parser.add_argument("--shards", type=int, default=os.cpu_count() or 1, help="tests that run side by side")
    parser.add_argument("--limit", type=float, default=120, help="seconds that one test may take")
    parser.add_argument("--again", type=int, default=1, help="how often a failed test is tried again")
    parser.add_argument("--report", type=Path, help="writes the report to this file, and outputs of failures beside it")
    options = parser.parse_args()
    if options.one:
        return run_one(suite, options.one)

    from torch.testing._internal import common_distributed

    # A test that takes too long prints where its processes are before it is ended.
    common_distributed.TIMEOUT_DEFAULT = int(options.limit * 0.9)
    common_distributed.TIMEOUT_OVERRIDE.clear()
    tests = [test for group in options.groups for test in suite.tests_of(group) if options.k in test]
    tests = [test for test in tests if zlib.crc32(test.encode()) % options.part == 0]
    began = time.monotonic()
    results = run_all(suite, tests, options.shards, options.limit, options.again)
    listed = listed_failures(suite)
    text = report(suite, results, listed, time.monotonic() - began)
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
        print(f"failed, and not in {suite.page}:", *unlisted)
    if surprises:
        print(f"passed, but in {suite.page}:", *surprises)
    return 1 if unlisted or surprises else 0
