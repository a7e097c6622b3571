"""Runs failed tests alone, three times each. A test that passes each time is reported as unstable.

python3 -m scripts.retry cpp BUILD_FOLDER LOG       the C++ tests that CTest's LOG lists as failed
python3 -m scripts.retry python PYTHON FAILURES     the Python tests of the file that pytest --failures wrote

Prints a line "==> unstable: NAME" for each test that passes each time, and then its first failure, whose first lines
.ci/run repeats at its end. Exits 0 if all failed tests are unstable. Other failures stay failures:
  - what a sanitizer reports, because a report is a proof;
  - more than `at_most` failed tests, because that is no chance.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

times = 3
at_most = 6
lines_shown = 60
# Where a failure begins: in GoogleTest, in pytest, by the system, by CTest's time-out.
failure_begins = re.compile(r": Failure$|^E  +\S|^terminate called|what\(\): |\*\*\*Exception|^killed after ")


@dataclass
class Failed:
    """A test that failed, and how it runs alone."""

    name: str
    output: str  # of its first failure
    command: list[str]
    # Run once if the others pass: the process of the test, if it ended before all of its cases had run.
    afterwards: list[str] | None = None
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    folder: str = "."
    seconds: float = 900
    failure: re.Pattern[str] | None = None  # output that means a failure, whatever the exit status
    case: str = ""  # of GoogleTest, if the output is that of a whole suite

    def first_failure(self) -> list[str]:
        """The output from the line before the first failure on; its end if no line is known as one."""
        lines = self.output.splitlines()
        begin = next((i for i, line in enumerate(lines) if self.case and line.endswith(f"] {self.case}")), 0)
        found = next((i for i in range(begin, len(lines)) if failure_begins.search(lines[i])), None)
        return lines[-lines_shown:] if found is None else lines[max(begin, found - 1) : found + lines_shown]


def passes(test: Failed, command: list[str]) -> bool:
    """Runs a command of the test in its environment. Kills it, and its children, at the end of its time."""
    process = subprocess.Popen(
        command,
        cwd=test.folder,
        env=test.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=test.seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0] + f"\nkilled after {test.seconds:.0f} s"
    ok = process.returncode == 0 and not (test.failure and test.failure.search(output))
    if not ok:
        print(output, flush=True)
    return ok


def is_unstable(test: Failed) -> bool:
    """Whether a test passes each time. Prints what happens."""
    for time in range(1, times + 1):
        if not passes(test, test.command):
            print(f"==> failed again, alone, at time {time} of {times}: {test.name}", flush=True)
            return False
    if test.afterwards and not passes(test, test.afterwards):
        print(f"==> failed again, with the cases beside it: {test.name}", flush=True)
        return False
    print(f"==> passed {times} times, alone: {test.name}", flush=True)
    return True


# ---- C++


def listed_as_failed(log: str) -> list[str]:
    """The names in the last list of failed tests that CTest printed."""
    section = log.rpartition("The following tests FAILED:")[2]
    return re.findall(r"^\s+\d+ - (.+) \([^()]+\)$", section, re.MULTILINE)


def outputs(folder: pathlib.Path) -> dict[str, str]:
    """What each test of the last run printed, by CTest's own log."""
    log = (folder / "Testing/Temporary/LastTest.log").read_text(errors="replace")
    found = re.findall(r"^\d+/\d+ Testing: (.*?)$.*?^Output:\n-+\n(.*?)^<end of output>", log, re.MULTILINE | re.DOTALL)
    return dict(found)


def failed_cases(output: str) -> tuple[list[str], bool]:
    """The cases of GoogleTest that failed, the one in which the process ended included, and whether there is one."""
    began = re.findall(r"\[ RUN      \] (\S+)", output)
    ended = set(re.findall(r"\[(?:       OK|  SKIPPED) \] ([^\s,]+)", output))
    failed = set(re.findall(r"\[  FAILED  \] ([^\s,]+)", output))
    cut_off = bool(began) and began[-1] not in ended | failed
    return [case for case in dict.fromkeys(began) if case in failed or (cut_off and case == began[-1])], cut_off


def environment_of(properties: dict[str, Any]) -> dict[str, str]:
    """The environment of a test without its part of a suite: it runs single cases."""
    environment = dict(os.environ)
    for entry in properties.get("ENVIRONMENT", []):
        name, _, value = entry.partition("=")
        environment[name] = value
    for entry in properties.get("ENVIRONMENT_MODIFICATION", []):
        name, _, change = entry.partition("=")
        kind, _, value = change.partition(":")
        if kind != "path_list_prepend":
            raise ValueError(f"scripts/retry.py does not know the change {kind!r} of {name}")
        environment[name] = ":".join([value, *filter(None, [environment.get(name)])])
    return environment


def failed_of(test: dict[str, Any], output: str) -> list[Failed]:
    """The failed cases of a test of CTest, each as a test of its own; the test itself if it has no cases."""
    properties = {each["name"]: each["value"] for each in test["properties"]}
    whole: list[str] = test["command"]
    parts = [f"GTEST_{name}" for name in ("TOTAL_SHARDS", "SHARD_INDEX")]
    environment = environment_of(properties)
    all_cases = ["env", *(f"{name}={environment.pop(name)}" for name in parts if name in environment), *whole]
    patterns = properties.get("FAIL_REGULAR_EXPRESSION", [])
    common = {
        "environment": environment,
        "folder": properties.get("WORKING_DIRECTORY", "."),
        "seconds": properties.get("TIMEOUT", 900),
        "failure": re.compile("|".join(patterns)) if patterns else None,
    }
    cases, cut_off = failed_cases(output)
    if not cases or not any(argument.startswith("--gtest_filter=") for argument in whole):
        return [Failed(test["name"], output, all_cases, **common)]
    plain = [argument for argument in whole if not argument.startswith("--gtest_filter=")]
    return [
        Failed(
            f"{test['name']}: {case}",
            output,
            [*plain, f"--gtest_filter={case}"],
            all_cases if cut_off and case == cases[-1] else None,
            case=case,
            **common,
        )
        for case in cases
    ]


def failed_cpp_tests(folder: pathlib.Path, log: pathlib.Path) -> list[Failed]:
    printed = outputs(folder)  # now, because the next command begins the log anew
    command = ["ctest", "--test-dir", str(folder), "--show-only=json-v1"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    tests = {test["name"]: test for test in json.loads(shown)["tests"]}
    failed = []
    for name in listed_as_failed(log.read_text(errors="replace")):
        if "command" not in tests[name]:
            raise ValueError(f"{name} was not built")
        failed += failed_of(tests[name], printed.get(name, ""))
    return failed


# ---- Python


def failed_python_tests(python: str, failures: pathlib.Path) -> list[Failed]:
    found: dict[str, str] = {}
    for line in failures.read_text().splitlines():
        entry = json.loads(line)
        found.setdefault(entry["test"], entry["output"])
    # A failed import of a file has no test to run.
    if files := [name for name in found if "::" not in name]:
        raise ValueError(f"pytest could not read {', '.join(files)}")
    alone = [python, "-m", "pytest", "-q", "-rsfE", "-p", "no:cacheprovider"]
    return [Failed(name, output, [*alone, name]) for name, output in found.items()]


def main() -> int:
    kind, where, what = sys.argv[1:]
    try:
        if kind == "cpp":
            failed = failed_cpp_tests(pathlib.Path(where), pathlib.Path(what))
        else:
            failed = failed_python_tests(where, pathlib.Path(what))
    except ValueError as error:
        print(f"==> no test runs again: {error}")
        return 1
    if not failed or len(failed) > at_most:
        print(f"==> no test runs again: {len(failed) or 'none'} of {at_most} that could have failed by chance")
        return 1
    report = re.compile(r"(?:Address|Leak|Thread|UndefinedBehavior)Sanitizer|: runtime error: ")
    if proved := [test.name for test in failed if report.search(test.output)]:
        print(f"==> no test runs again: a sanitizer reported an error in {', '.join(proved)}")
        return 1

    print(f"==> each failed test runs alone, {times} times: {', '.join(test.name for test in failed)}", flush=True)
    unstable = [test for test in failed if is_unstable(test)]
    if unstable:
        print("\n######## unstable: failed once, then passed alone. tests/unstable.md lists such tests.")
    for test in unstable:
        print(f"==> unstable: {test.name}", *test.first_failure(), sep="\n")
    return 0 if len(unstable) == len(failed) else 1


if __name__ == "__main__":
    sys.exit(main())
