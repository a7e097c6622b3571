"""Prints the test targets of a build folder that a change reaches, one a line, in the order in which they should run.

python3 -m scripts.reached BUILD_FOLDER [COMMIT]

The change is what differs from COMMIT; without a COMMIT all targets are printed. The order:
  1. the near: targets whose own files changed, and those of tests/X after a change of the folder X;
  2. a fifth of all others, chosen by the hash of the newest commit, so that each has its turn; reached ones first;
  3. the others that the change reaches, by what a target links and by what its sources include.
"""

import json
import pathlib
import re
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from scripts.tidy import ROOT, changed_since, closure, lines_of

# A change of these reaches everything.
EVERYWHERE = ("cmake/", "CMakeLists.txt", "CMakePresets.json", "scripts/sanitize.sh", "scripts/run-tests.sh")


@dataclass
class Target:
    name: str
    folder: str
    sources: set[pathlib.Path] = field(default_factory=set)
    needs: set[str] = field(default_factory=set)  # ids of targets

    @property
    def is_test(self) -> bool:
        return self.name.endswith(("_test", "_fuzz"))


def targets_of(build: pathlib.Path) -> dict[str, Target]:
    """The targets of CMake's file API by their id. Configures again if the folder was configured without the API."""
    query = build / ".cmake/api/v1/query/codemodel-v2"
    reply = build / ".cmake/api/v1/reply"
    if not query.exists() or not list(reply.glob("index-*.json")):
        query.parent.mkdir(parents=True, exist_ok=True)
        query.touch()
        subprocess.run(["cmake", str(build)], check=True, stdout=subprocess.DEVNULL)
    index: dict[str, Any] = json.loads(max(reply.glob("index-*.json")).read_text())
    model = json.loads((reply / index["reply"]["codemodel-v2"]["jsonFile"]).read_text())
    found = {}
    for entry in model["configurations"][0]["targets"]:
        about = json.loads((reply / entry["jsonFile"]).read_text())
        written = (source["path"] for source in about.get("sources", []) if "isGenerated" not in source)
        sources = {ROOT / path for path in written if path.endswith((".cpp", ".h"))}
        needs = {each["id"] for each in about.get("dependencies", [])}
        found[entry["id"]] = Target(about["name"], about["paths"]["source"], sources, needs)
    return found


def all_needed(targets: dict[str, Target], start: str) -> set[str]:
    """The ids of what a target depends on, directly or through others."""
    seen: set[str] = set()
    todo = [start]
    while todo:
        each = todo.pop()
        if each not in seen:
            seen.add(each)
            todo += targets[each].needs
    return seen


def folder_with_targets(name: str, folders: set[str]) -> str | None:
    """The nearest folder around a file that defines targets."""
    parents = [str(parent) for parent in pathlib.PurePath(name).parents]
    return next((parent for parent in parents if parent in folders), None)


def files_of(target: Target) -> set[pathlib.Path]:
    """The sources of a target, and the files of the repository that they include."""
    return {file for source in target.sources for file in closure(source)}


def chosen(targets: dict[str, Target], changed_names: set[str], number: int) -> list[str]:
    """The names of the test targets to run, in order. `number` is the commit's, and chooses the fifth."""
    folders = {target.folder for target in targets.values()} - {"."}
    changed = {ROOT / name for name in changed_names}
    changed_folders = {folder for name in changed_names if (folder := folder_with_targets(name, folders))}
    if any(name.startswith("include/") for name in changed_names):
        changed_folders.add("rpc/cpp")
    # Folders of tests mirror those of the sources; rpc/collectives/cuda has its tests in tests/rpc/collectives.
    near_folders = {folder_with_targets(f"tests/{folder}/.", folders) for folder in changed_folders}
    seeds = {f"{name}_fuzz" for name in re.findall(r"tests/fuzz/corpus/(\w+)_fuzz/", "\n".join(changed_names))}
    owners = {id for id, target in targets.items() if target.folder in changed_folders and not target.is_test}
    is_everywhere = any(name.startswith(EVERYWHERE) for name in changed_names)

    near, reached, rest = [], [], []
    for id, test in targets.items():
        if not test.is_test:
            continue
        files = files_of(test)
        own = {file for file in files if file.is_relative_to(ROOT / "tests")}
        if own & changed or test.folder in near_folders or test.name in seeds:
            near.append(test.name)
        elif is_everywhere or files & changed or all_needed(targets, id) & owners:
            reached.append(test.name)
        else:
            rest.append(test.name)
    near, reached = rotated(near, number), rotated(reached, number)
    fifth = set(sorted([*reached, *rest])[number % 5 :: 5])
    ordered = [*near, *(name for name in [*reached, *sorted(rest)] if name in fifth), *reached]
    return list(dict.fromkeys(ordered))


def rotated(names: list[str], number: int) -> list[str]:
    """The names in order, but with another one first, so that a run that is short of time drops others each time."""
    names = sorted(names)
    start = number % len(names) if names else 0
    return names[start:] + names[:start]


def main() -> None:
    targets = targets_of(pathlib.Path(sys.argv[1]))
    if len(sys.argv) > 2:
        number = int(lines_of("git", "rev-parse", "HEAD")[0][:8], 16)
        print(*chosen(targets, changed_since(sys.argv[2]), number), sep="\n")
    else:
        print(*sorted(target.name for target in targets.values() if target.is_test), sep="\n")


if __name__ == "__main__":
    main()
