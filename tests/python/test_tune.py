"""``tensorferry tune``: what it measures, keeps, and what groups make of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorferry
from conftest import Agents, run_at_terminal
from tensorferry import tune
from test_collectives import form


def times(**by_algorithm: list[float]) -> dict[int, dict[str, float]]:
    """Seconds at 1, 2, 4, ... bytes."""
    columns = list(by_algorithm.items())
    return {1 << i: {name: column[i] for name, column in columns} for i in range(len(columns[0][1]))}


@pytest.mark.parametrize(
    ("one_shot", "two_shot", "crossings"),
    [
        ([1, 1, 1, 1], [2, 2, 2, 2], "one_shot"),
        ([2, 2, 2, 2], [1, 1, 1, 1], "two_shot"),
        ([1, 1, 3, 3], [2, 2, 2, 2], "one_shot:2:two_shot"),
        ([1, 1, 2.1, 1, 1, 3, 5], [2, 2, 2, 2, 2, 2, 2], "one_shot:16:two_shot"),  # a noisy size moves nothing
        ([1, 1, 1, 3, 2.9, 5], [2, 2, 2, 2, 3, 2], "one_shot:4:two_shot"),
        ([3, 3, 1, 1], [2, 2, 2, 2], "one_shot"),  # two_shot is not for smaller sizes than one_shot
        ([1], [2], "one_shot"),
    ],
)
def test_crossings_lose_least(one_shot: list[float], two_shot: list[float], crossings: str) -> None:
    assert tune.crossings_of(times(one_shot=one_shot, two_shot=two_shot)) == crossings


def test_crossings_of_three_algorithms() -> None:
    seconds = times(a=[1, 2, 3, 4], b=[2, 1, 1, 4], c=[3, 3, 3, 1])
    assert tune.crossings_of(seconds, ("a", "b", "c")) == "a:1:b:4:c"
    assert tune.crossings_of(times(a=[1, 1, 1], b=[2, 2, 2], c=[3, 3, 0.1]), ("a", "b", "c")) == "a:2:c"


@pytest.mark.parametrize(
    ("copied", "mapped", "least"),
    [
        ([1, 1, 1, 1], [2, 2, 2, 2], None),
        ([2, 2, 2, 2], [1, 1, 1, 1], 0),
        ([1, 1, 3, 4], [2, 2, 2, 2], 3),
        ([1, 3, 1, 4, 5], [2, 2, 2, 2, 2], 5),
    ],
)
def test_inputs_are_mapped_from_the_size_that_loses_least(
    copied: list[float], mapped: list[float], least: int | None
) -> None:
    assert tune.mapped_from(times(copied=copied, mapped=mapped)) == least


def test_entries_take_the_place_of_those_with_the_same_key() -> None:
    def entry(ranks: int, crossings: str) -> dict[str, Any]:
        key = {"topology": "one host", "device": "x", "ranks": ranks, "version": "1"}
        return {**key, "crossings": {"reduce": crossings}}

    kept = tune.merged({}, [entry(2, "one_shot"), entry(4, "one_shot")])
    kept = tune.merged({**kept, "note": "of the user"}, [entry(2, "two_shot")])
    assert kept == {"measured": [entry(4, "one_shot"), entry(2, "two_shot")], "note": "of the user"}


def test_groups_use_what_has_been_measured(tmp_path: Path, agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "folder" / "tuning.json"
    environment = {**os.environ, "TENSORFERRY_TUNING": str(file)}
    command = [sys.executable, "-m", "tensorferry", "tune", "--device", "cpu", "--ranks", "2", "--quick"]
    for _ in range(2):  # the second time replaces the entry
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert ran.returncode == 0, ran.stderr[-3000:]
    assert f"kept in {file}" in ran.stdout and "2 ranks, one host" in ran.stdout
    [entry] = json.loads(file.read_text())["measured"]
    assert (entry["topology"], entry["ranks"]) == ("one host", 2)
    assert entry["version"] == tensorferry.__version__
    assert set(entry["crossings"]) == {"all_reduce", "reduce"}
    assert len([line for line in ran.stdout.splitlines() if line.startswith("  all_reduce ")]) == 11  # 1 KB to 1 MB

    monkeypatch.setenv("TENSORFERRY_TUNING", str(file))
    pair = [agents("a", rank=0), agents("b", rank=1)]
    groups = form(pair)
    said = {group.explain("all_reduce", 1024) for group in groups}
    assert len(said) == 1 and "as measured by `tensorferry tune`" in said.pop()
    assert f"{'one' if entry['crossings']['all_reduce'].startswith('one') else 'two'}_shot" in groups[0].explain(
        "all_reduce", 1024
    )

    entry["crossings"]["all_reduce"] = "two_shot"
    file.write_text(json.dumps({"measured": [entry]}))
    for group in form(pair, label="again"):
        assert "all_reduce of 1024 bytes over 2 ranks: two_shot (" in group.explain("all_reduce", 1024)


def test_a_dry_run_keeps_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tuning.json"
    environment = {**os.environ, "TENSORFERRY_TUNING": str(file)}
    command = [sys.executable, "-m", "tensorferry", "tune", "--device", "cuda", "--ranks", "4096", "--dry-run"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "4096 ranks on cuda are not measured: each needs a GPU of its own" in ran.stdout
    assert not file.exists()


def test_at_a_terminal_each_size_is_shown() -> None:
    command = [sys.executable, "-m", "tensorferry", "tune", "--device", "cpu", "--ranks", "2", "--quick", "--dry-run"]
    out, shown = run_at_terminal(command)
    assert "2 ranks on cpu: all_reduce of 1048576 bytes" in shown and shown.endswith("\r\x1b[K"), shown
    assert "\x1b" not in out


@pytest.mark.gpu2
def test_gpus_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    environment = {**os.environ, "TENSORFERRY_TUNING": str(file)}
    command = [sys.executable, "-m", "tensorferry", "tune", "--device", "cuda", "--ranks", "2", "--quick"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    print(ran.stdout)
    [entry] = json.loads(file.read_text())["measured"]
    assert entry["topology"] != "one host" and entry["topology"] != "unknown", entry
    assert "NVIDIA" in entry["device"]
    assert "  inputs: " in ran.stdout and entry.get("mapped_from", 0) >= 0
