#!/usr/bin/env python3
"""Draws docs/images/top.svg and docs/images/explain.svg: what `tensorferry top` and `tensorferry explain` show of a
small job, which this script runs. Needs rich, and the package:

PYTHONPATH=build/release/python .venv/bin/python scripts/terminal_pictures.py
"""

from __future__ import annotations

import io
import re
import threading
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from tensorferry import Agent, StoreServer, collectives, connect_store, errors, explaining, top
from tensorferry.watching import Watcher

IMAGES = Path(__file__).resolve().parents[1] / "docs/images"
TRAINERS = ["trainer0", "trainer1"]


def draw(name: str, title: str, width: int, shown: Any) -> None:
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(shown)
    text = console.export_svg(title=title, unique_id=name)
    text = re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL)  # no picture of the docs loads anything
    (IMAGES / f"{name}.svg").write_text(re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE))
    print(IMAGES / f"{name}.svg")


def train(agent: Agent, ended: threading.Event) -> None:
    group = collectives.form_group(TRAINERS, agent=agent, label="trainers")
    weights = torch.zeros(1 << 20)
    step = 0
    while not ended.is_set():
        weights = agent.rpc_sync("server", torch.add, args=(weights, 1))
        agent.rpc_sync("server", max, args=(step, 1))
        step += 1
        if step % 10 == 0:
            try:
                group.barrier().wait()
            except errors.Error:  # the other one has ended
                return


def main() -> None:
    server = StoreServer("127.0.0.1", 0)
    store = connect_store("127.0.0.1", server.port)
    agents = [Agent(name, rank, store=store) for rank, name in enumerate(["server", *TRAINERS])]
    ended = threading.Event()
    threads = [threading.Thread(target=train, args=(agent, ended)) for agent in agents[1:]]
    for thread in threads:
        thread.start()
    slow = agents[1].rpc_async("server", time.sleep, args=(20,))
    with Watcher(f"tf://127.0.0.1:{server.port}") as watcher:
        time.sleep(2)
        before, began = watcher.look(), time.monotonic()
        time.sleep(2)
        now = watcher.look()
        draw("top", "tensorferry top", 150, top.rich_view(top.tables(now, before, time.monotonic() - began, {})))
        names = watcher.names
        found = {
            (one, other): explaining.explained(watcher, one, other) for one in names for other in names if one != other
        }
        shown = f"{explaining.matrix(names, found)}\n\ntrainer0 -> {found['trainer0', 'server']}"
        draw("explain", "tensorferry explain", 110, Text(shown))
    ended.set()
    for thread in threads:
        thread.join()
    slow.wait()
    for agent in agents:
        agent.leave()


if __name__ == "__main__":
    main()
