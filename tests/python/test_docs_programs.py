"""Every program in README.md and docs/ is whole, and runs. A block of another language, or of none, is console output,
commands, or lines of a source (`diff`).

A Python block runs as it stands, as a process of its own; a C++ block is compiled as a program of its own, linked with
the package, and run. If the next block has no language and only "It prints" or an empty line stands between, the
program prints that block; a line `...` in it stands for any lines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import tensorferry.cmake
from conftest import free_port

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Pages whose programs need more than a process; the named test follows these pages.
ELSEWHERE = {"docs/several-hosts.md": "test_several_hosts.py"}
# The languages of blocks that are no programs.
NO_PROGRAMS = {"", "bash", "cmake", "console", "diff", "text", "yaml"}

BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
OUTPUT = re.compile(r"\s*(?:It prints:?\s*)?```\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Program:
    page: str
    line: int
    language: str
    text: str
    prints: str | None

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def programs_of(page: Path) -> list[Program]:
    """The blocks of the page in a language, C++ and Python among them."""
    text = page.read_text()
    found = []
    for block in BLOCK.finditer(text):
        output = OUTPUT.match(text, block.end())
        lines = [line.removeprefix(block["indent"]) for line in block["text"].splitlines()]
        found.append(
            Program(
                str(page.relative_to(ROOT)),
                text.count("\n", 0, block.start()) + 1,
                block["language"],
                "\n".join(lines) + "\n",
                output["text"] if output else None,
            )
        )
    return found


BLOCKS = [program for page in PAGES if page.exists() for program in programs_of(page)]


def written_in(language: str) -> list[Program]:
    return [each for each in BLOCKS if each.language == language and each.page not in ELSEWHERE]


def test_blocks_are_programs_or_say_that_they_are_none() -> None:
    known = NO_PROGRAMS | {"python", "cpp"}
    odd = [each.name for each in BLOCKS if each.language not in known and not each.language.startswith("{")]
    assert not odd, f"no test runs blocks of these languages; write python or cpp, or one of {sorted(NO_PROGRAMS)}"
    assert all((ROOT / "tests/python" / test).is_file() for test in ELSEWHERE.values())
    assert len(written_in("python")) > 15 and len(written_in("cpp")) > 2


def expect(program: Program, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, f"{program.name} fails; a program in the docs is whole:\n{done.stdout}{done.stderr}"
    if program.prints is not None:
        wanted = re.escape(program.prints).replace(re.escape("...\n"), "(?:.*\n)*?")
        wanted = wanted.replace(re.escape("..."), ".*")
        assert re.fullmatch(wanted, done.stdout), f"{program.name} prints:\n{done.stdout}"


@pytest.mark.parametrize("program", written_in("python"), ids=lambda program: program.name)
def test_a_python_program_runs(program: Program, tmp_path: Path) -> None:
    if "torch.distributed._transport" in program.text:
        pytest.importorskip("torch.distributed._transport", reason="it comes with torch 2.15")
    for framework in re.findall(r"^from tensorferry\.integrations\.(\w+)", program.text, re.MULTILINE):
        pytest.importorskip(framework, reason=f"{framework} is not installed")
    port = str(free_port())
    (tmp_path / "program.py").write_text(program.text.replace("29500", port))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TENSORFERRY_")}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    expect(program, done)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all C++ programs, by their place in the list."""
    folder = tmp_path_factory.mktemp("cpp")
    project = [
        "cmake_minimum_required(VERSION 3.25)",
        "project(docs LANGUAGES CXX)",
        "find_package(tensorferry 0.1 REQUIRED COMPONENTS core)",
    ]
    for number, program in enumerate(written_in("cpp")):
        (folder / f"program{number}.cpp").write_text(program.text)
        project.append(f"add_executable(program{number} program{number}.cpp)")
        project.append(f"target_link_libraries(program{number} PRIVATE tensorferry::core)")
    (folder / "CMakeLists.txt").write_text("\n".join(project) + "\n")
    prefix = f"-DCMAKE_PREFIX_PATH={tensorferry.cmake.prefix()}"
    for command in (["cmake", "-S", folder, "-B", folder, prefix], ["cmake", "--build", folder]):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, done.stdout
    return folder


@pytest.mark.parametrize("program", written_in("cpp"), ids=lambda program: program.name)
def test_a_cpp_program_compiles_and_runs(program: Program, compiled: Path) -> None:
    number = written_in("cpp").index(program)
    expect(program, subprocess.run([compiled / f"program{number}"], capture_output=True, text=True, timeout=120))
