"""Runs clang-tidy on the sources of a build folder that changed since they last passed.

python scripts/tidy.py CLANG_TIDY BUILD_FOLDER JOBS [COMMIT]

With a COMMIT: of these, only the sources that differ from it, and for each header that differs a source that includes
it, because clang-tidy checks a header together with a source.
"""

import concurrent.futures
import functools
import hashlib
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


@functools.cache
def included(source: pathlib.Path) -> frozenset[pathlib.Path]:
    """The files of this repository that `source` includes, directly."""
    names = re.findall(r'^#include "([^"]+)"', source.read_text(), re.MULTILINE)
    return frozenset(ROOT / name for name in names if (ROOT / name).is_file())


@functools.cache
def closure(source: pathlib.Path) -> frozenset[pathlib.Path]:
    """`source`, and the files of this repository that it includes, directly or through others."""
    seen: set[pathlib.Path] = set()
    todo = {source}
    while todo:
        file = todo.pop()
        seen.add(file)
        todo |= included(file) - seen
    return frozenset(seen)


def fingerprint(source: pathlib.Path) -> str:
    """A hash of all that clang-tidy's verdict on `source` depends on inside this repository."""
    digest = hashlib.sha256()
    for file in [ROOT / ".clang-tidy", *sorted(closure(source))]:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def lines_of(*command: str) -> list[str]:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def changed_since(commit: str) -> set[str]:
    """The files that differ from `commit`, those included that git does not know yet."""
    names = lines_of("git", "diff", "--name-only", commit)
    return {*names, *lines_of("git", "ls-files", "--others", "--exclude-standard")}


def touched(sources: list[pathlib.Path], commit: str) -> list[pathlib.Path]:
    """The sources to check for what differs from `commit`. All of them if the checks themselves differ."""
    changed = {ROOT / name for name in changed_since(commit)}
    if ROOT / ".clang-tidy" in changed:
        return sources
    chosen = [source for source in sources if source in changed]
    for header in sorted(changed - set(sources)):
        if header.suffix != ".h" or any(header in closure(source) for source in chosen):
            continue
        users = [source for source in sources if header in closure(source)]
        users.sort(key=lambda source: source.stem != header.stem)  # its own source first
        chosen += users[:1]
    return sorted(chosen)


def main() -> int:
    clang_tidy, build, jobs = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
    commands = json.loads((build / "compile_commands.json").read_text())
    everything = sorted({pathlib.Path(command["file"]) for command in commands})
    sources = touched(everything, sys.argv[4]) if len(sys.argv) > 4 else everything
    passed_file = build / "tidy-passed.json"
    passed = set(json.loads(passed_file.read_text())) if passed_file.exists() else set()
    todo = [source for source in sources if fingerprint(source) not in passed]
    print(f"{len(todo)} of {len(everything)} sources to check", flush=True)

    def check(source: pathlib.Path) -> subprocess.CompletedProcess[str]:
        command = [clang_tidy, "-p", str(build), "--quiet", "--warnings-as-errors=*", str(source)]
        return subprocess.run(command, capture_output=True, text=True)

    failures = 0
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for source, result in zip(todo, pool.map(check, todo)):
            if result.returncode == 0:
                passed.add(fingerprint(source))
            else:
                failures += 1
                print(f"{source.relative_to(ROOT)}\n{result.stdout}", flush=True)
    passed_file.write_text(json.dumps(sorted(passed)))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
