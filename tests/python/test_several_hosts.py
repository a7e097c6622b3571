"""docs/several-hosts.md, followed to the letter on two hosts of an emulated network, behind firewalls that let through
the ports that the page names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import outputs_of
from emulated_network import EmulatedNetwork

PAGE = Path(__file__).resolve().parents[2] / "docs/several-hosts.md"


def blocks(language: str) -> list[str]:
    """The blocks of that language, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [block for kind, block in found if kind == language]


def commands(comment: str) -> str:
    """The block of commands that begins with this comment."""
    (found,) = (block for block in blocks("bash") if block.startswith(f"# {comment}\n"))
    return found


def run_on_two_hosts(folder: Path, first: str, second: str) -> list[str]:
    """Runs commands on both hosts, and returns what they printed."""
    (program,) = blocks("python")
    (folder / "hosts.py").write_text(program)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # The hosts are one machine, where cma would reach the other process.
    environment = {**os.environ, "HOME": str(folder), "PATH": path, "TENSORFERRY_CHANNELS": "basic"}
    for name in ("TENSORFERRY_KEY", "TENSORFERRY_KEY_FILE", "TENSORFERRY_SOCKET_IFNAME", "TENSORFERRY_TLS"):
        environment.pop(name, None)
    with EmulatedNetwork("one", "two") as network:
        network.tell("open one 29500 29500 7000 7099")
        network.tell("open two 7000 7099")
        network.tell("path one two 1e9 1000 0")
        network.tell("path two one 1e9 1000 0")
        key = ["bash", "-ec", commands("once")]
        subprocess.run(key, env=environment, check=True)
        started = [
            network.start(
                host,
                ["bash", "-ec", script],
                env=environment,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for host, script in (("one", first), ("two", second))
        ]
        return outputs_of(started)


def expect_the_pages_output(outputs: list[str]) -> None:
    (shown,) = blocks("")
    wanted = shown.splitlines()[:-1]  # the last line stands for more
    assert outputs[0].splitlines()[: len(wanted)] == wanted
    assert outputs[1].splitlines() == ["I am worker1"]


def test_the_commands_work_and_print_what_the_page_says(tmp_path: Path) -> None:
    interface = commands("on every host with several networks")
    first, second = commands("on the first host"), commands("on the second host")
    expect_the_pages_output(run_on_two_hosts(tmp_path, interface + first, interface + second))


def test_the_recipe_of_tls_works(tmp_path: Path) -> None:
    tls = commands("on every host")
    first, second = commands("on the first host"), commands("on the second host")
    expect_the_pages_output(run_on_two_hosts(tmp_path, tls + first, tls + second))


@pytest.mark.soak
def test_the_command_of_torchrun_works(tmp_path: Path) -> None:
    (command,) = re.findall(r"`(torchrun .*?)`", PAGE.read_text())
    key = commands("on the first host").splitlines()[1]
    first = f"{key}\n{command}"
    expect_the_pages_output(run_on_two_hosts(tmp_path, first, first.replace("--node-rank 0", "--node-rank 1")))


ONE_WAY = """
import pathlib
import sys
import time

import tensorferry
import tensorferry.rpc as rpc

tried = pathlib.Path(sys.argv[1])


def call_back():
    return rpc.rpc_sync("worker1", max, args=(1, 2))


if __name__ == "__main__":
    rpc.init_rpc(ports="7000-7099")
    if rpc.get_worker_info().id == 0:
        try:
            rpc.rpc_sync("worker1", max, args=(1, 2), timeout=3)
        except tensorferry.errors.Error as error:
            print(type(error).__name__)
        tried.touch()
    else:
        while not tried.exists():
            time.sleep(0.01)
        print(rpc.rpc_sync("worker0", call_back, timeout=30))
    rpc.shutdown()
"""


def test_an_agent_that_cannot_dial_its_peer_can_call_it_once_that_has_called(tmp_path: Path) -> None:
    (tmp_path / "hosts.py").write_text(ONE_WAY)
    environment = {**os.environ, "TENSORFERRY_KEY": "a key of the job's own", "TENSORFERRY_CHANNELS": "basic"}
    environment.pop("TENSORFERRY_KEY_FILE", None)
    with EmulatedNetwork("one", "two") as network:
        network.tell("open one 29500 29500 7000 7099")
        network.tell("open two")
        environment |= {"MASTER_ADDR": network.addresses["one"], "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
        started = [
            network.start(
                host,
                [sys.executable, "hosts.py", str(tmp_path / "tried")],
                env=environment | {"RANK": str(rank)},
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank, host in enumerate(("one", "two"))
        ]
        refused, called = outputs_of(started)
    assert refused.strip() in ("ConnectionLost", "DeadlineExceeded")
    assert called == "2\n"
