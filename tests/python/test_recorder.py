"""The flight recorder: what rpc.dump() returns, what SIGUSR2 writes, and what errors and ``tensorferry trace`` show."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
from conftest import Agents, Cluster
from tensorferry import collectives, errors, recorder, trace

Pair = tuple[tensorferry.Agent, tensorferry.Agent]


def texts(dump: dict[str, Any], subject: str, name: str) -> list[str]:
    events = dump["tensorferry"]["events"]
    return [event["text"] for event in events if (event["subject"], event["name"]) == (subject, name)]


def nothing() -> None:
    pass


def test_a_dump_tells_how_a_link_began_and_which_calls_failed(pair: Pair) -> None:
    a, _ = pair
    a.rpc_sync("b", nothing)
    with pytest.raises(errors.NotFound):
        a.rpc_sync("b", "missing")
    dump = a.dump()
    assert any(text.startswith("connection for calls dialled") for text in texts(dump, "link", "b"))
    assert any(text.startswith('"missing" NotFound after') for text in texts(dump, "calls", "b"))
    about = dump["tensorferry"]
    assert about["agent"] == "a" and about["rank"] == 0 and about["pid"] == os.getpid()
    assert about["links"][0]["peer"] == "b" and about["links"][0]["state"] == "up"
    assert about["metrics"]["tensorferry_calls_failed_total{error=NotFound}"] == 1
    times = [event["time"] for event in about["events"]]
    assert times == sorted(times) and abs(times[-1] - time.time()) < 60


def test_a_dump_has_the_calls_in_flight(pair: Pair) -> None:
    a, b = pair
    going, go = threading.Event(), threading.Event()

    def wait() -> None:
        going.set()
        go.wait(60)

    b.expose(wait, name="wait")
    future = a.rpc_async("b", "wait")
    assert going.wait(60)
    try:
        dump = a.dump()
    finally:
        go.set()
    future.wait()
    (call,) = dump["tensorferry"]["calls_in_flight"]
    assert call["function"] == "wait" and call["peer"] == "b" and call["sent"] and call["age_seconds"] > 0
    (shown,) = (event for event in dump["traceEvents"] if event["ph"] == "X")
    assert shown["name"] == "wait" and shown["args"]["callee"] == "b"
    assert "'wait' at b is in flight" in trace.told([dump])[-1]


def test_a_dump_has_the_events_of_groups(pair: Pair) -> None:
    def member(agent: tensorferry.Agent) -> collectives.Group:
        group = collectives.form_group(["a", "b"], agent=agent, label="pair")
        group.all_reduce(torch.ones(4)).wait()
        return group

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(member, pair))
    groups[0].abort("enough")
    with pytest.raises(errors.Cancelled):
        groups[0].barrier().wait()
    told = texts(pair[0].dump(), "group", "pair")
    assert told[0] == "formed by 2 ranks; this one is 0"
    assert re.match(r"failed after 1 operations: .*enough", told[1])


def test_a_dump_is_a_trace_that_merges_with_others(pair: Pair, tmp_path: Path) -> None:
    a, b = pair
    with a.trace() as made:
        a.rpc_sync("b", nothing)
    dump = a.dump(tmp_path / "dump.json")
    assert json.loads((tmp_path / "dump.json").read_text()) == dump
    marks = [event for event in dump["traceEvents"] if event["ph"] == "i"]
    rows = {
        event["tid"]: event["args"]["name"]
        for event in dump["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    assert {rows[event["tid"]] for event in marks} == {"link b"}
    merged = trace.merge([dump, b.dump()])
    assert len({event["pid"] for event in merged["traceEvents"]}) == 2
    (call,) = (event for event in made.events if event["name"] == "nothing" and event["ph"] == "X")
    assert call["pid"] == marks[0]["pid"] and abs(call["ts"] - marks[0]["ts"]) < 60e6, "one clock"


def test_a_trace_of_torchs_profiler_merges_on_the_same_axis(pair: Pair, tmp_path: Path) -> None:
    a, _ = pair
    a.rpc_sync("b", nothing)
    with torch.profiler.profile() as profile, a.trace() as made, torch.profiler.record_function("around"):
        a.rpc_sync("b", nothing)
    profile.export_chrome_trace(str(tmp_path / "torch.json"))
    (tmp_path / "own.json").write_text(json.dumps({"traceEvents": made.events, "otherData": a.dump()["otherData"]}))
    merged = trace.merge([json.loads((tmp_path / name).read_text()) for name in ("torch.json", "own.json")])
    events = [event for event in merged["traceEvents"] if event.get("ph") == "X"]
    (around,) = (event for event in events if event["name"] == "around")
    (call,) = (event for event in events if event["name"] == "nothing" and event["args"].get("callee") == "b")
    assert around["ts"] - 50_000 < call["ts"]
    assert call["ts"] + call["dur"] < around["ts"] + around["dur"] + 50_000
    with pytest.raises(ValueError, match="none of the traces is of an agent"):
        trace.merge([json.loads((tmp_path / "torch.json").read_text())])


def hang() -> None:
    time.sleep(120)


def test_a_call_that_the_transport_fails_tells_what_came_before_on_its_link(cluster: Cluster) -> None:
    cluster.start(1, static=False)
    rpc.rpc_sync("worker1", nothing)
    future = rpc.rpc_async("worker1", hang)
    os.kill(cluster.pids[0], signal.SIGKILL)
    with pytest.raises(
        errors.ConnectionLost, match=r"Before that, on this link: .*connection for calls dialled"
    ) as lost:
        future.wait()
    assert len(str(lost.value)) < 1000


PROGRAM = """
import signal, sys, time
import tensorferry
from torch.distributed import HashStore

seen = []
signal.signal(signal.SIGUSR2, lambda number, frame: (seen.append(number), print("own handler", flush=True)))
store = HashStore()
with tensorferry.Agent("a/1", store=store) as a, tensorferry.Agent("b", store=store) as b:
    a.rpc_sync("b", max, args=(1, 2))
    print("ready", flush=True)
    while not seen:
        a.rpc_async("b", time.sleep, args=(0.05,)).wait()
    sys.stdin.read()
"""


def test_the_signal_writes_a_file_for_each_agent_and_runs_the_programs_own_handler(tmp_path: Path) -> None:
    environment = {**os.environ, "TENSORFERRY_DUMP": str(tmp_path / "now.json")}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR2)
        assert process.stdout.readline() == "own handler\n"
        wanted = [tmp_path / f"now.{name}.{process.pid}.json" for name in ("a_1", "b")]
        until = time.monotonic() + 60
        while not all(file.exists() and file.read_text().endswith("}") for file in wanted):
            assert time.monotonic() < until, list(tmp_path.iterdir())
            time.sleep(0.01)
        process.stdin.close()
        assert process.wait(180) == 0
    command = [sys.executable, "-m", "tensorferry", "trace", "show", *map(str, wanted)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    assert "a/1: link b: connection for calls dialled" in shown
    assert "b: link a/1: connection for calls accepted" in shown
    assert shown.splitlines() == sorted(shown.splitlines())


def test_without_the_variable_the_signal_is_left_alone(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORFERRY_DUMP", raising=False)
    before = signal.getsignal(signal.SIGUSR2)
    agents("a")
    assert signal.getsignal(signal.SIGUSR2) == before


def test_an_agent_of_another_thread_says_that_the_signal_has_no_effect(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TENSORFERRY_DUMP", "/nonexistent/dump.json")
    monkeypatch.setattr(recorder, "_installed", False)
    thread = threading.Thread(target=recorder.dump_at_signal)
    thread.start()
    thread.join()
    assert "TENSORFERRY_DUMP has no effect" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "{tmp}/missing"], "No such file"),
        (["show", "{tmp}/list"], "no flight recorder"),
        (["merge", "{tmp}/broken"], "Expecting"),
        (["merge", "{tmp}/list"], "none of the traces"),
        (["draw"], "invalid choice"),
        ([], "required"),
    ],
)
def test_wrong_arguments_of_the_command_are_named(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "broken").write_text("{")
    (tmp_path / "list").write_text('{"traceEvents": []}')
    given = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    command = [sys.executable, "-m", "tensorferry", "trace", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode in (1, 2) and said in done.stderr and "Traceback" not in done.stderr
