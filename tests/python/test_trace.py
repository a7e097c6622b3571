"""Traces of calls: what they show, and that those of several processes load as one."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
from conftest import Agents
from tensorferry import trace

DOCS = Path(__file__).parents[2] / "docs"
Events = list[dict[str, Any]]


def work(milliseconds: int) -> int:
    time.sleep(milliseconds / 1000)
    return milliseconds


def slices(events: Events, name: str) -> Events:
    return [event for event in events if event["ph"] == "X" and event["name"] == name]


def arrows(events: Events) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """The beginning and the end of each arrow that has both, by its number."""
    ends: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"]][event["ph"]] = event
    return {number: (both["s"], both["f"]) for number, both in ends.items() if len(both) == 2}


def check_rows(events: Events) -> None:
    """No two calls of a row overlap, and each part of a call lies in its call."""
    rows: dict[tuple[int, int], Events] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append(event)
    for row in rows.values():
        calls = sorted((event for event in row if "args" in event), key=lambda event: event["ts"])
        for one, other in itertools.pairwise(calls):
            assert one["ts"] + one["dur"] <= other["ts"] + 0.001
        for part in (event for event in row if "args" not in event):
            assert any(
                call["ts"] - 0.001 <= part["ts"] and part["ts"] + part["dur"] <= call["ts"] + call["dur"] + 0.001
                for call in calls
            )


def test_a_call_is_shown_at_both_ends_with_its_stages(agents: Agents) -> None:
    a, b = agents("a"), agents("b")
    with a.trace() as made, b.trace() as served:
        assert a.rpc_sync("b", work, args=(30,)) == 30
    (call,), (handled,) = slices(made.events, "work"), slices(served.events, "work")
    assert call["args"]["callee"] == "b" and handled["args"]["caller"] == "a"
    assert call["args"]["function"] == "work" and call["args"]["bytes"] > 0
    assert call["dur"] >= 30_000 and handled["dur"] >= 30_000
    assert slices(served.events, "run")[0]["dur"] >= 30_000
    assert slices(made.events, "wait")[0]["dur"] >= 30_000
    assert call["ts"] <= handled["ts"] and handled["ts"] + handled["dur"] <= call["ts"] + call["dur"] + 50_000
    both = arrows(made.events + served.events)
    assert len(both) == 2, "one for the request, one for the reply"
    assert all(begin["ts"] <= end["ts"] + 50_000 for begin, end in both.values())
    check_rows(made.events)
    check_rows(served.events)


def test_calls_that_overlap_have_rows_of_their_own(agents: Agents) -> None:
    a, _ = agents("a"), agents("b")
    with a.trace() as made:
        for future in [a.rpc_async("b", work, args=(20,)) for _ in range(8)]:
            future.wait()
    assert len(slices(made.events, "work")) == 8
    check_rows(made.events)
    names = [event["args"]["name"] for event in made.events if event["ph"] == "M"]
    assert any(name.startswith("a (pid ") for name in names) and "calls made 1" in names


def test_a_trace_names_the_channel_of_a_tensor(agents: Agents) -> None:
    a, _ = agents("a", channels="basic"), agents("b", channels="basic")
    with a.trace() as made:
        a.rpc_sync("b", torch.sum, args=(torch.ones(1 << 20),))
    (call,) = slices(made.events, "sum")
    assert call["args"]["channel"] == "basic" and call["args"]["bytes"] >= 4 << 20


def test_a_trace_is_written_to_the_file_also_after_an_error(agents: Agents, tmp_path: Path) -> None:
    a, _ = agents("a"), agents("b")
    with pytest.raises(ZeroDivisionError), a.trace(tmp_path / "trace.json"):
        a.rpc_sync("b", divmod, args=(1, 0))
    assert slices(json.loads((tmp_path / "trace.json").read_text())["traceEvents"], "divmod")


def test_merging_shifts_another_host_to_the_clock_of_the_first() -> None:
    def of(host: str, offset: int, at: float) -> dict[str, Any]:
        events = [{"ph": "M", "name": "process_name"}, {"ph": "X", "ts": at, "dur": 1.0}]
        return {"traceEvents": events, "otherData": {"boot_id": host, "clock_to_realtime_us": offset}}

    merged = trace.merge([of("one", 1000, 5.0), of("one", 1002, 6.0), of("two", 400, 606.0)])
    assert [event["ts"] for event in merged["traceEvents"] if "ts" in event] == [5.0, 6.0, 6.0]


PROGRAM = """
import operator, sys
import tensorferry.rpc as rpc
rank = int(sys.argv[1])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, init_method=sys.argv[2])
if rank == 0:
    assert rpc.rpc_sync("worker1", operator.add, args=(1, 2)) == 3
rpc.shutdown()
"""


def test_the_traces_of_two_processes_merge_into_one(tmp_path: Path) -> None:
    environment = {**os.environ, "TENSORFERRY_TRACE": str(tmp_path / "job.json")}
    command = [sys.executable, "-c", PROGRAM]
    meet = f"file://{tmp_path}/meet"
    with subprocess.Popen([*command, "1", meet], env=environment) as other:
        subprocess.run([*command, "0", meet], env=environment, check=True, timeout=120)
        assert other.wait(60) == 0
    files = sorted(tmp_path.glob("job.worker?.*.json"))
    assert [re.sub(r"\d+\.json$", "PID.json", file.name) for file in files] == [
        "job.worker0.PID.json",
        "job.worker1.PID.json",
    ]
    merging = [sys.executable, "-m", "tensorferry.trace", "merge", *map(str, files)]
    merged = subprocess.run(merging, stdout=subprocess.PIPE, check=True, timeout=120)
    events = json.loads(merged.stdout)["traceEvents"]
    made, served = slices(events, "add")
    both = {begin["pid"]: end["pid"] for begin, end in arrows(events).values() if begin["pid"] == made["pid"]}
    assert made["pid"] != served["pid"] and both[made["pid"]] == served["pid"]


def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    page = (DOCS / "tracing.md").read_text()
    program = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert program
    (tmp_path / "traced.py").write_text(program[1])
    done = subprocess.run(
        [sys.executable, "traced.py"], cwd=tmp_path, stdout=subprocess.PIPE, check=True, text=True, timeout=120
    )
    assert done.stdout == "3 calls made\n"
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    assert len(slices(events, "work")) == 6 and len(arrows(events)) == 6


def test_the_default_agent_is_traced_by_the_function_of_the_module(agents: Agents) -> None:
    agents("b")
    assert rpc.trace.__doc__ == tensorferry.Agent.trace.__doc__
