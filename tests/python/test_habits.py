"""What the project asks of its own commits and pages. Needs neither torch nor a build:
python -m pytest --noconftest tests/python/test_habits.py"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import subjects  # noqa: E402
import words  # noqa: E402


@pytest.mark.parametrize(
    "subject",
    [
        "agent: keep the order of calls that wait for a link",
        "channels/shm: keep cold blocks off the call path",
        "rpc, agent: bound what a peer can make us keep",
        "tests: process what is left",
        "rpc/torch: need no key on one host",
        "docs, tests: run every program of a page",
    ],
)
def test_a_subject_names_an_area_and_begins_with_a_verb(subject: str) -> None:
    assert subjects.fault(subject) is None


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        ("keep the order of calls", "form"),
        ("agent: Keep the order", "form"),
        ("agent:keep the order", "form"),
        ("agent: keep the order of calls that wait for a link, a probe, a reply or for memory", "characters"),
        ("agent: the order of calls", "'the'"),
        ("agent: keeps the order", "'keeps'"),
        ("agent: adding a bound", "'adding'"),
        ("agent: mended", "'mended'"),
        ("wip: wip", "'wip'"),
    ],
)
def test_other_subjects_are_refused_with_the_reason(subject: str, said: str) -> None:
    found = subjects.fault(subject)
    assert found is not None and said in found


def test_the_hook_reads_the_message_that_git_passes(tmp_path: Path) -> None:
    def run(message: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "message").write_text(message)
        command = [sys.executable, ROOT / "scripts/subjects.py", tmp_path / "message"]
        return subprocess.run(command, capture_output=True, text=True)

    assert run("docs: say when a call ends\n\nA body of any form.\n").returncode == 0
    assert run("Merge branch 'main' into topic\n").returncode == 0
    refused = run("Docs\n")
    assert refused.returncode == 1 and "is not of the form" in refused.stdout


def test_the_docs_have_no_more_words_than_a_reader_can_be_asked_for() -> None:
    counted = words.words()
    assert "quick-reference.md" in counted and "contributing/release.md" in counted
    assert sum(counted.values()) <= words.CEILING, "cut what a header or another page says already"


def test_hooks_run_programs_that_exist() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    scripts = set(re.findall(r"entry: python3 (\S+)", hooks))
    assert scripts == {"scripts/names.py", "scripts/words.py", "scripts/subjects.py"}
    assert all((ROOT / script).is_file() for script in scripts)
    lint = (ROOT / "scripts/lint.sh").read_text()
    assert all(script in lint for script in scripts), "what a hook checks, make lint checks too"


def slug(heading: str) -> str:
    """The anchor that the code host and the site give a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {slug(found) for found in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def test_links_lead_to_files_and_headings() -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", "*.md"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    dead = []
    for page in (ROOT / name for name in names if (ROOT / name).is_file()):
        text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for path, anchor in re.findall(r"\]\(([^)#\s:]*)(?:#([^)\s]+))?\)", text):
            target = page.parent / path if path else page
            headed = target.suffix == ".md" and target.is_file()
            if not target.exists() or (anchor and headed and anchor not in anchors(target)):
                dead.append(f"{page.relative_to(ROOT)}: {path}#{anchor}")
    assert not dead


def test_lines_that_a_page_quotes_stand_in_their_file() -> None:
    quoted = 0
    for page in (ROOT / "docs").rglob("*.md"):
        for path, lines in re.findall(
            r"^From `([\w./]+)`:\n\n```\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE
        ):
            assert lines in (ROOT / path).read_text(), f"{page.name} quotes {path} as it no longer is"
            quoted += 1
    assert quoted >= 2


def test_the_lines_that_install_the_core_alone_are_run_by_ci() -> None:
    page = (ROOT / "docs/getting-started.md").read_text()
    (lines,) = re.findall(r"^```bash\n# the core alone\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert "TENSORFERRY_TORCH=OFF" in lines and "--install" in lines
    step = (ROOT / ".ci/without-torch").read_text()
    (command,) = re.findall(r"^lines=\$\((awk .*)\)$", step, re.MULTILINE)
    assert subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True).stdout == lines
