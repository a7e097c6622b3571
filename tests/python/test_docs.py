"""Pages of docs/ that repeat what the sources say. Needs neither torch nor a build:
python -m pytest --noconftest tests/python/test_docs.py"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("base", "channels", "converters", "agent", "rpc", "include", "python", "contrib")


def listed(*folders: str) -> list[str]:
    """The files of the tree in ``folders``, tracked and new ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [name for name in names if (ROOT / name).is_file()]


@functools.cache
def sources(*folders: str) -> dict[str, str]:
    """The text of the sources and scripts in ``folders``, by path."""
    kinds = (".cpp", ".h", ".cu", ".py", ".sh", ".cmake", ".txt", "run")
    return {name: (ROOT / name).read_text() for name in listed(*folders) if name.endswith(kinds)}


def variables_of_the_header() -> dict[str, tuple[str, str]]:
    """Default and meaning of each variable in base/environment.h."""
    text = (ROOT / "base/environment.h").read_text()
    rows = re.findall(r"constexpr Variable \w+\{(.*?)\};", text, re.DOTALL)
    out = {}
    for row in rows:
        joined = re.sub(r'"\s+"', "", row)  # neighbouring literals are one text
        name, unset, meaning = re.findall(r'"((?:[^"\\]|\\.)*)"', joined)
        out[name] = (unset, meaning)
    return out


RUN_TIME = "docs/environment.md", "At run time"
IN_TESTS = "CONTRIBUTING.md", "Variables of tests and scripts"


def table(page: str, heading: str) -> dict[str, list[str]]:
    """The cells of the first table below ``heading`` of ``page`` by their first, without links."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^##|\Z)", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert section, f"{page} has no section {heading!r}"
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", section.group(1))
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", plain, re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split("|")] for name, rest in rows}


def test_environment_page_repeats_the_header() -> None:
    header = variables_of_the_header()
    assert header, "base/environment.h has no table"
    page = {name: (unset, meaning) for name, (meaning, unset, *_) in table(*RUN_TIME).items()}
    assert page == header


def test_only_the_header_names_variables_that_the_library_reads() -> None:
    known = variables_of_the_header()
    named = {
        (name, variable)
        for name, text in sources(*PRODUCT).items()
        for variable in re.findall(r"""["'](TENSORFERRY_[A-Z0-9_]+)["']""", text)
        if name != "base/environment.h" and not (name.endswith(".py") and variable in known)
    }
    assert not named, "these belong into base/environment.h"


def test_a_page_has_every_variable_that_tests_and_scripts_read() -> None:
    reads = r"""(?:getenv\(|environ(?:\.\w+\(|\[)|\$ENV\{|\$\{?)["']?(TENSORFERRY_[A-Z0-9_]+)"""
    read = {
        variable
        for name, text in sources("tests", "benchmarks", "scripts", "examples", ".ci").items()
        if name.endswith((".cpp", ".h", ".py", ".sh", "run"))
        for variable in re.findall(reads, text)
    }
    read |= set(re.findall(r"\$ENV\{(TENSORFERRY_\w+)\}", (ROOT / "cmake/Targets.cmake").read_text()))
    missing = read - set(table(*RUN_TIME)) - set(table(*IN_TESTS))
    assert not missing, "docs/environment.md and CONTRIBUTING.md have no row for these"
    unread = {name for name in table(*IN_TESTS) if name.startswith("TENSORFERRY_")} - read
    assert not unread, "no test or script reads these rows of CONTRIBUTING.md"


# The folders of the house whose dependencies the build or the #includes show.
LIBRARIES = (
    "base", "channels", "converters", "agent", "rpc/c", "rpc/core", "rpc/cpp", "rpc/member", "rpc/regions", "rpc/torch",
    "rpc", "include", "python/csrc", "contrib/tensorpipe", "rpc/collectives", "rpc/collectives/cuda",
    "rpc/collectives/torch",
)  # fmt: skip
FOR_PROGRAMS = "include/tensorferry/channel.h"  # gathers headers of other folders


def drawn(picture: str) -> str:
    return (ROOT / "docs/images" / picture).read_text()


def folder_of(path: str) -> str | None:
    """The library that a source or an included name belongs to: the longest that matches."""
    if path.startswith("tensorferry/"):
        return "include"
    return max((one for one in LIBRARIES if path.startswith(one + "/")), key=len, default=None)


def dependencies() -> set[tuple[str, str]]:
    """Pairs of libraries of which the first links or includes the second."""
    owners: dict[str, str] = {}
    links: list[tuple[str, str]] = []
    for folder in LIBRARIES:
        lists = ROOT / folder / "CMakeLists.txt"
        text = lists.read_text() if lists.exists() else ""
        made = r"tensorferry_(?:library|python_module|python_extension)"
        for name, rest in re.findall(made + r"\(\s*(\w*)([^)]*)\)", text):
            owners.setdefault(name, folder)
            links += [(folder, used) for used in re.findall(r"\btensorferry_\w+", rest.partition("LINK")[2])]
    assert owners, "no targets found"
    pairs = {(folder, owners[used]) for folder, used in links if used in owners}
    for name, text in sources(*LIBRARIES).items():
        if name == FOR_PROGRAMS:
            continue
        folder = folder_of(name)
        pairs |= {(folder, used) for path in re.findall(r'#include ["<]([\w/]+\.h)', text) if (used := folder_of(path))}
    return {(a, b) for a, b in pairs if a != b}


def test_the_house_has_every_folder() -> None:
    labels = dict(re.findall(r'^  "([^"]+)" \[label="([^"]*)"', drawn("house.dot"), re.MULTILINE))
    named = set(labels)
    for node, label in labels.items():  # "wire/" in the label of agent is agent/wire
        named |= {f"{node}/{part}" for part in re.findall(r"(\w+)/", " ".join(label.split(r"\n")[1:]))}
    missing = {folder for folder in named if not (ROOT / folder).is_dir()}
    assert not missing, "docs/images/house.dot names folders that do not exist"

    files = [name for name in sources(".") if name.endswith((".cpp", ".h", ".cu", ".py"))]
    there = {name.split("/")[0] for name in files if "/" in name} - {"cmake", "docs", "scripts"}
    rooms = {"/".join(name.split("/")[:2]) for name in files if name.startswith(PRODUCT) and name.count("/") > 1}
    house = {folder.split("/")[0] for folder in named}
    assert there == house, "docs/images/house.dot misses a folder"
    assert rooms <= named, "docs/images/house.dot misses a folder inside a folder"


def check_arrows(picture: str, real: set[tuple[str, str]]) -> None:
    """Compares the arrows of a picture, and what they lead to, with the pairs of folders that depend on each other."""
    edges = set(re.findall(r'^  "([^"]+)" -> "([^"]+)"', drawn(picture), re.MULTILINE))
    folders = {folder for pair in real for folder in pair}
    reached: dict[str, set[str]] = {}
    for folder in folders:
        todo = {folder}
        while todo:
            one = todo.pop()
            new = {b for a, b in edges if a == one} - reached.setdefault(folder, set())
            reached[folder] |= new
            todo |= new
    forbidden = {(a, b) for a, b in real if b not in reached[a]}
    assert not forbidden, f"these dependencies have no arrows in docs/images/{picture}"
    unused = {(a, b) for a, b in edges if a in folders and (a, b) not in real}
    assert not unused, f"docs/images/{picture} has arrows without a dependency"
    rings = {folder for folder in folders if folder in reached[folder]}
    assert not rings, f"docs/images/{picture} has arrows that lead back"


def test_the_house_shows_what_depends_on_what() -> None:
    check_arrows("house.dot", dependencies())


# The sources beside the interface of agent/, which no other part includes.
ABOVE_ALL = {"agent/agent.cpp", "agent/call.cpp", "agent/collect_metrics.cpp", "agent/idempotent_call.cpp"}


def test_the_parts_of_the_agent_depend_on_one_another_as_drawn() -> None:
    def part_of(name: str) -> str:
        return "agent/*.cpp" if name in ABOVE_ALL else name.rpartition("/")[0]

    real = {
        (part_of(name), part_of(path))
        for name, text in sources("agent").items()
        for path in re.findall(r'#include "(agent/[\w/]+\.h)"', text)
    }
    check_arrows("agent.dot", {(a, b) for a, b in real if a != b})


def test_pictures_of_calls_name_functions_where_they_are() -> None:
    boxes: dict[str, list[str]] = {}
    for picture in ("call.dot", "timeout.dot"):
        for label in re.findall(r'label="([^"]*\\n[^"]*)"', drawn(picture)):
            *functions, file = label.split(r"\n")
            if not re.fullmatch(r"[\w/]+\.(cpp|h)", file):
                continue
            boxes.setdefault(picture, []).append(file)
            text = (ROOT / file).read_text()
            for function in re.findall(r"([\w:~]+)\(", " ".join(functions)):
                name = function if file.endswith(".cpp") else function.split("::")[-1]
                assert re.search(rf"\b{name}\(", text), f"{picture}: {file} has no {function}()"
    call = boxes["call.dot"]
    page = (ROOT / "docs/architecture.md").read_text()
    assert f"The {len(call)} boxes of the picture stand in {len(set(call))} files" in page


def test_drawings_are_those_of_their_texts() -> None:
    for text in sorted((ROOT / "docs/images").glob("*.dot")):
        digest = hashlib.sha256(text.read_bytes()).hexdigest()
        drawing = text.with_suffix(".svg").read_text()
        assert digest in drawing, f"{text.name} has changed: run scripts/pictures.sh"


def test_pages_name_files_that_exist() -> None:
    files = listed(".")
    stale = set()
    for page in (name for name in files if name.endswith(".md") and name != "CHANGELOG.md"):
        for path in re.findall(r"`([\w./*-]+\.(?:h|cpp|cu|py|sh|cmake|dot))`", (ROOT / page).read_text()):
            if (
                path in ("why.py", "hosts.py", "ray_hosts.py", "traced.py", "tests/python/test_rpc_map.py")
                or "barge" in path
            ):
                continue  # readers of a guide write it
            patterns = (path, f"{Path(page).parent}/{path}", f"*/{path}")
            if not any(fnmatch.fnmatch(name, pattern) for name in files for pattern in patterns):
                stale.add((page, path))
    assert not stale, "pages name files that do not exist"


def test_readmes_of_folders_are_short() -> None:
    readmes = [name for name in listed(".") if name.endswith("/README.md")]
    assert len(readmes) > 40
    long = {name: count for name in readmes if (count := len((ROOT / name).read_text().splitlines())) > 15}
    assert not long, "the README of a folder has at most 15 lines"


def test_folders_with_sources_have_a_readme() -> None:
    kinds = (".cpp", ".h", ".cu", ".py", ".sh", ".cmake", ".pml", "/run")
    files = listed(".")
    folders = {str(Path(name).parent) for name in files if name.endswith(kinds)} - {".", "docs"}  # docs has index.md
    assert len(folders) > 50
    without = sorted(folder for folder in folders if f"{folder}/README.md" not in files)
    assert not without, "these folders have sources and no README.md"


def test_prose_fits_160_columns() -> None:
    long = []
    for page in (name for name in listed(".") if name.endswith(".md")):
        blocks = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
        text = blocks.sub(lambda block: "\n" * block.group().count("\n"), (ROOT / page).read_text())
        long += [
            f"{page}:{number}"
            for number, line in enumerate(text.splitlines(), 1)
            if len(line) > 160 and not line.lstrip().startswith("|")  # rows of tables cannot be wrapped
        ]
    assert not long, "these lines are too long"


def test_guides_number_what_is_free() -> None:
    """The guides add a number to a table. If it has been given away meanwhile, a reader cannot follow them."""
    frame = (ROOT / "agent/wire/frame.h").read_text()
    extensions = re.findall(
        r"constexpr std::uint16_t \w+ = (\d+);", frame.partition("namespace extension {")[2].partition("}")[0]
    )
    page = (ROOT / "docs/contributing/change-a-wire-record.md").read_text()
    assert f"serving = {max(map(int, extensions)) + 1};" in page
    tags = re.findall(r"^  \w+ = 0x([0-9a-f]+),", (ROOT / "rpc/core/codec.h").read_text(), re.MULTILINE)
    page = (ROOT / "docs/contributing/add-a-value-type.md").read_text()
    assert f"ellipsis = 0x{max(int(tag, 16) for tag in tags if tag != '3f') + 1:02x}," in page


def test_guides_name_things_that_exist() -> None:
    everything = "\n".join(sources("agent", "base", "channels", "rpc", "python", "tests", "include").values())
    known = set(re.findall(r"\w+", everything))
    made = {"ellipsis", "rpc_map"}  # by readers of the guides
    missing = {
        (page, name)
        for page in listed("docs/contributing")
        for span in re.findall(r"`([\w:]+)`", (ROOT / page).read_text())
        for name in span.split("::")
        if name and name not in known | made
    }
    assert not missing, "the sources have no such names"


@functools.cache
def cases() -> frozenset[str]:
    """The names of all tests: "Suite.Case" and "test_case"."""
    texts = list(sources("tests").values())
    made = {
        f"{suite}.{name}"
        for text in texts
        for suite, name in re.findall(r"^TEST(?:_F|_P)?\((\w+), (\w+)\)", text, re.MULTILINE)
    }
    return frozenset(made | {name for text in texts for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)})


def test_the_page_of_failures_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| (?!what happens|-)(.*) \|$", (ROOT / "docs/failures.md").read_text(), re.MULTILINE)
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(\w+\.\w+|test_\w+)`", row.split(" | ")[-1])
        assert named, f"no test is named: {row}"
        assert set(named) <= cases(), f"no such test: {set(named) - cases()}"


def missing_tests(cell: str) -> set[str]:
    """The tests that a cell names and that do not exist: a case, the beginning of some ("Suite.Begins..."), a suite, a
    file of pytest, or a target."""
    known = cases()
    targets = {Path(name).stem for name in sources("tests")}

    def exists(name: str) -> bool:
        if name.endswith("..."):
            return any(case.startswith(name[:-3]) for case in known)
        suites = {case.partition(".")[0] for case in known if "." in case}
        return name in known or name in suites or name.removesuffix(".py") in targets

    return {name for name in re.findall(r"`([^`]+)`", cell) if not exists(name)}


def rows_below(page: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without its head."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert section, f"{page} has no section {heading!r}"
    lines = re.findall(r"^\|(.*)\|$", section.group(1), re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines[2:]]


def test_each_bound_has_a_test_that_exists() -> None:
    rows = rows_below("docs/architecture.md", "Bounds")
    assert len(rows) > 20
    for row in rows:
        assert "`" in row[-1] or row[-1].startswith("none: "), f"neither a test nor why there is none: {row[0]}"
        assert not missing_tests(row[-1]), f"{row[0]}: no such test"


def test_what_holds_against_each_attacker_has_a_test_that_exists() -> None:
    rows = rows_below("docs/security.md", "Who may attack, and what holds")
    assert len(rows) >= 7
    for row in rows:
        assert len(row) == 4 and not missing_tests(row[-1].replace("`...", "...`")), row[0]
    assert sum("`" in row[-1] for row in rows) >= len(rows) - 2


def test_the_hosted_workflows_have_every_step() -> None:
    def steps(*options: str) -> list[str]:
        command = [ROOT / ".ci/run", *options, "--list"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    def matrix(workflow: str) -> list[str]:
        text = (ROOT / ".github/workflows" / workflow).read_text()
        found = re.search(r"^ +step: \[(.*)\]$", text, re.MULTILINE)
        assert found
        return found.group(1).split(", ")

    assert matrix("ci.yml") == [step for step in steps() if step != "packages"]
    assert matrix("nightly.yml") == [step for step in steps("--night") if step not in steps()]


def test_each_case_of_collectives_on_gpus_runs_once_on_emulated_ones() -> None:
    folder = ROOT / "tests/rpc/collectives"
    filters = re.findall(
        r"tensorferry_test_emulated\(group_(\w+)_test FILTERS(.*?)\)\n",
        (folder / "CMakeLists.txt").read_text(),
        re.DOTALL,
    )
    checked = 0
    for name, patterns in filters:
        if name == "processes":
            continue
        text = (folder / f"{name}_test.cpp").read_text()
        for case in (
            f"{suite}.{case}" for suite, case in re.findall(r"^TEST(?:_F)?\((\w+), (\w+)\)", text, re.MULTILINE)
        ):
            assert sum(fnmatch.fnmatchcase(case, pattern) for pattern in patterns.split()) == 1, case
            checked += 1
    assert checked > 40
