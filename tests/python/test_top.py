"""``tensorferry top`` and ``tensorferry explain``: what they show of a job."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import tensorferry
import torch
import torch.distributed as dist
from conftest import eventually
from tensorferry import Agent, StoreServer, connect_store, explaining, observing, top, watching
from tensorferry.watching import Watcher

KEY = "a key of at least 16 bytes"
PATIENCE = 60.0  # seconds: a busy machine does not make an agent count as gone


def nothing() -> None:
    pass


class Job:
    """Agents "one" and "two" of ranks 0 and 1, and "guest" without a rank, at the built-in store."""

    def __init__(self, **options: Any) -> None:
        self.server = StoreServer("127.0.0.1", 0)
        self.store = connect_store("127.0.0.1", self.server.port)
        self.where = f"tf://127.0.0.1:{self.server.port}"
        self.agents = [Agent("one", 0, store=self.store, **options), Agent("two", 1, store=self.store)]
        self.agents.append(Agent("guest", store=self.store))

    def close(self) -> None:
        for agent in self.agents:
            agent.leave()


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.close()


def has_served(agent: Agent, calls: int) -> bool:
    """A callee counts a call after its answer."""
    return bool(observing.observe(agent)["calls_served"] >= calls)


def by_title(made: list[top.Table]) -> dict[str, list[dict[str, str]]]:
    return {table.title: [dict(zip(table.columns, row, strict=True)) for row in table.rows] for table in made}


def test_agents_are_found_by_rank_and_by_the_links_of_others(job: Job) -> None:
    job.agents[2].rpc_sync("two", nothing)
    with Watcher(job.where, patience=PATIENCE) as watcher:
        seen = watcher.look()
        assert sorted(seen) == ["guest", "one", "two"] == watcher.names
        assert seen["two"]["pid"] == os.getpid() and seen["two"]["rank"] == 1
        job.agents[1].leave()
        assert sorted(watcher.look()) == ["guest", "one"]
        assert "two" in watcher.gone


def test_an_agent_that_was_gone_is_seen_when_it_is_back(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    with Watcher(job.where, patience=PATIENCE) as watcher:
        assert "two" in watcher.look()
        job.agents[1].leave()
        assert eventually(lambda: "two" not in watcher.look()) and "two" in watcher.gone
        job.agents[1] = Agent("two", 1, store=job.store)
        monkeypatch.setattr(watching, "_ASKED_AGAIN", 0.0)
        assert eventually(lambda: "two" in watcher.look()) and watcher.gone == {}


def test_an_agent_that_serves_exposed_functions_alone_is_seen_too() -> None:
    job = Job(trust="registered")
    try:
        with Watcher(job.where, patience=PATIENCE) as watcher:
            assert "one" in watcher.look()
            found = explaining.explained(watcher, "one", "two")
            assert isinstance(found, tensorferry.Explanation) and found.peer == "two" and found.channel
            assert "NotFound" in str(explaining.explained(watcher, "one", "nine"))
    finally:
        job.close()


def test_rates_channels_links_and_slow_calls_are_shown(job: Job) -> None:
    one, two, _ = job.agents
    going, go = threading.Event(), threading.Event()

    def hold() -> None:
        going.set()
        go.wait(60)

    two.expose(hold, name="hold")
    one.rpc_sync("two", torch.add, args=(torch.ones(1 << 18), 1))
    assert eventually(lambda: has_served(two, 1))
    before = {"one": observing.observe(one), "two": observing.observe(two)}
    for _ in range(10):
        one.rpc_sync("two", nothing)
    one.rpc_sync("two", torch.add, args=(torch.ones(1 << 18), 1))
    future = one.rpc_async("two", "hold")
    assert going.wait(60)
    try:
        assert eventually(lambda: observing.observe(one)["oldest_calls"][0][2] >= 0.1)
        assert eventually(lambda: has_served(two, 12) and observing.observe(two)["busy"] == 1)
        now = {"one": observing.observe(one), "two": observing.observe(two)}
    finally:
        go.set()
    future.wait()
    shown = by_title(top.tables(now, before, 2.0, {"three": "ConnectionLost"}))
    agents = {row["agent"]: row for row in shown["agents"]}
    assert agents["one"]["calls/s"] == "6" and agents["two"]["served/s"] == "5.5"
    assert agents["one"]["flying"] == "1" and agents["two"]["run+wait"] == "1+0"
    assert any(row["sent"] == "512 KiB/s" for row in shown["channels"] if row["agent"] == "one")
    (link,) = (row for row in shown["links"] if row["link"] == "one -> two")
    assert link["state"] == "up" and link["calls by"] in ("ring", "unix", "tcp") and link["sent"] == "512 KiB/s"
    (slow,) = shown["slow calls"]
    assert slow["call"] == "one -> two" and slow["function"] == "hold" and slow["request"] == "sent"
    assert shown["gone"] == [{"agent": "three", "why": "ConnectionLost"}]
    text = top.plain(top.tables(now, before, 2.0, {}))
    assert "one -> two" in text and "gone" not in text


def test_an_agent_started_again_has_no_rates(job: Job) -> None:
    now = {"one": observing.observe(job.agents[0])}
    before = {"one": {**now["one"], "pid": -1, "calls_sent": 0}}
    assert by_title(top.tables(now, before, 1.0, {}))["agents"][0]["calls/s"] == "-"


def test_times_and_numbers_are_short() -> None:
    assert [top._seconds(each) for each in (2e-6, 0.0015, 2.5, math.nan, math.inf)] == [
        "2 us", "1.5 ms", "2.5 s", "-", "long",
    ]  # fmt: skip


def test_the_picture_of_rich_has_the_same_rows(job: Job) -> None:
    console = pytest.importorskip("rich.console").Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    seen = {"one": observing.observe(job.agents[0])}
    seen["one"]["name"] = "[bold]one"
    console.print(top.rich_view(top.tables({"[bold]one": seen["one"]}, {}, 1.0, {})))
    assert "[bold]one" in console.export_text()


def test_a_terminal_of_80_columns_shows_each_cell_whole(job: Job) -> None:
    job.agents[0].rpc_sync("two", torch.add, args=(torch.ones(1 << 18), 1))
    seen = {each.name: observing.observe(each) for each in job.agents}
    why = "ConnectionLost: " + "its process has ended " * 6
    made = top.tables(seen, {}, 1.0, {"three": why})
    parts = top.folded(made, 80)
    assert [part.title for part in parts][:2] == ["agents", "agents, continued"]
    assert all(part.columns[0] == "agent" for part in parts[:2])
    assert sorted({*parts[0].columns, *parts[1].columns}) == sorted(made[0].columns)
    of_agents = [part for part in parts if part.title.startswith("agents")]
    assert all(len(line) <= 80 for line in top.plain(of_agents).splitlines())
    wide = top.Table("exact", ("a" * 26, "b" * 26, "c" * 24), [("1", "2", "3")])  # 80 characters beside each other
    assert all(len(line) <= 80 for line in top.plain(top.folded([wide], 80)).splitlines())
    console = pytest.importorskip("rich.console").Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(top.rich_view(parts))
    shown = console.export_text()
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown and f"{os.uname().nodename}:{os.getpid()}" in shown
    assert " ".join(shown.split()).count("its process has ended") == 6


def test_tables_that_fit_are_not_folded(job: Job) -> None:
    made = top.tables({"one": observing.observe(job.agents[0])}, {}, 1.0, {})
    assert top.folded(made, 1000) == [top.Table(each.title, each.columns, list(each.rows)) for each in made]
    narrow = top.folded(made[:1], 1)
    assert [len(part.columns) for part in narrow] == [2] * (len(made[0].columns) - 1)


def run(command: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tensorferry", command, *arguments],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_the_commands_show_a_job_of_this_host(job: Job) -> None:
    job.agents[0].rpc_sync("two", nothing)
    patiently = "--patience", str(PATIENCE)
    shown = run("top", job.where, *patiently, "--once", "--interval", "0.1", "--agents", "guest", "one", "two")
    assert shown.returncode == 0, shown.stderr
    assert "agents:" in shown.stdout and "guest" in shown.stdout and "one -> two" in shown.stdout
    told = run("explain", job.where, *patiently)
    assert told.returncode == 0, told.stderr
    assert "from \\ to" in told.stdout and "one -> two: cpu -> cpu by " in told.stdout
    alone = run("explain", job.where, *patiently, "--from", "one", "--to", "two")
    assert "from \\ to" not in alone.stdout and alone.stdout.count("one -> ") == 1
    missing = run("explain", job.where, *patiently, "--from", "nine")
    assert missing.returncode == 1 and "no agent 'nine'; there are one, two" in missing.stderr


def test_a_job_of_torchs_store_is_found_by_the_environment() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = tensorferry.Agent("worker0", 0, 1, store=store)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "1"}
    try:
        shown = run("top", "--once", "--interval", "0.1", "--patience", str(PATIENCE), **place)
        assert shown.returncode == 0, shown.stderr
        assert "worker0" in shown.stdout
    finally:
        agent.leave()


@pytest.mark.parametrize(("command", "where"), [(top, "tf://127.0.0.1:http"), (explaining, "tf://127.0.0.1")])
def test_an_address_that_is_none_is_named(command: Any, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main([where])
    assert f"{where!r} is not tf://HOST:PORT" in capsys.readouterr().err


def test_an_address_without_a_scheme_names_the_one_of_a_store_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watching, "_STORE_TIMEOUT", 0.5)
    with socket.socket() as silent:  # it keeps the port from others, and takes no connections
        silent.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(SystemExit, match="1"):
            top.main([where, "--once"])
    assert f"the address is tf://{where}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [
        ("top", ["--interval", "0", "x:1"], "--interval is more than 0"),
        ("top", ["--world-size", "many", "x:1"], "invalid int"),
        ("top", [], "STORE"),
        ("explain", ["--to"], "expected one argument"),
        ("explain", ["nowhere"], "nowhere"),
    ],
)
def test_wrong_arguments_are_named(command: str, arguments: list[str], said: str) -> None:
    done = run(command, *arguments)
    assert done.returncode in (1, 2) and said in done.stderr and "Traceback" not in done.stderr
