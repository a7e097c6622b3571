"""Pages of docs/ that repeat what the sources say. Needs neither torch nor a build:
python -m pytest --noconftest tests/python/test_docs.py"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("base", "channels", "converters", "agent", "rpc", "include", "python", "contrib")


def sources(*folders: str) -> dict[str, str]:
    """The text of the sources and scripts in ``folders``, tracked and new ones, by path."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    kinds = (".cpp", ".h", ".cu", ".py", ".sh", ".cmake", ".txt", "run")
    return {name: (ROOT / name).read_text() for name in names if name.endswith(kinds) and (ROOT / name).is_file()}


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


def table(heading: str) -> dict[str, list[str]]:
    """The cells of the first table below ``heading`` of docs/environment.md by their first, without links."""
    page = (ROOT / "docs/environment.md").read_text()
    section = re.search(rf"^## {heading}\n(.*?)(?=^##|\Z)", page, re.DOTALL | re.MULTILINE)
    assert section, f"docs/environment.md has no section {heading!r}"
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", section.group(1))
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", plain, re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split("|")] for name, rest in rows}


def test_environment_page_repeats_the_header() -> None:
    header = variables_of_the_header()
    assert header, "base/environment.h has no table"
    page = {name: (unset, meaning) for name, (meaning, unset, *_) in table("At run time").items()}
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


def test_environment_page_has_every_variable_that_tests_and_scripts_read() -> None:
    reads = r"""(?:getenv\(|environ(?:\.\w+\(|\[)|\$ENV\{|\$\{?)["']?(TENSORFERRY_[A-Z0-9_]+)"""
    read = {
        variable
        for name, text in sources("tests", "benchmarks", "scripts", "examples", ".ci").items()
        if name.endswith((".cpp", ".h", ".py", ".sh", "run"))
        for variable in re.findall(reads, text)
    }
    read |= set(re.findall(r"\$ENV\{(TENSORFERRY_\w+)\}", (ROOT / "cmake/Targets.cmake").read_text()))
    missing = read - set(table("At run time")) - set(table("In tests and scripts"))
    assert not missing, "docs/environment.md has no row for these"
    unread = {name for name in table("In tests and scripts") if name.startswith("TENSORFERRY_")} - read
    assert not unread, "no test or script reads these rows of docs/environment.md"
