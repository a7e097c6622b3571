"""docs/several-hosts.md, followed to the letter on two hosts of an emulated network, behind firewalls that let through
the ports that the page names."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
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


def environment_of(folder: Path) -> dict[str, str]:
    """The environment of the commands: ``folder`` is the home, with the page's program, and with ``tensorferry``."""
    program, of_ray = blocks("python")
    (folder / "ray_hosts.py").write_text(of_ray)
    (folder / "hosts.py").write_text(program)
    command(folder, "tensorferry", f'exec "{sys.executable}" -m tensorferry "$@"')
    path = f"{folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    # The hosts are one machine, where cma would reach the other process.
    environment = {**os.environ, "HOME": str(folder), "PATH": path, "TENSORFERRY_CHANNELS": "basic"}
    for name in ("TENSORFERRY_KEY", "TENSORFERRY_KEY_FILE", "TENSORFERRY_SOCKET_IFNAME", "TENSORFERRY_TLS"):
        environment.pop(name, None)
    return environment


def command(folder: Path, name: str, script: str) -> None:
    """Makes a command that stands in for a program of the launcher."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
    (folder / "bin" / name).chmod(0o755)


@contextlib.contextmanager
def two_hosts() -> Iterator[EmulatedNetwork]:
    """Hosts "one" and "two", behind firewalls that let the page's ports through."""
    with EmulatedNetwork("one", "two") as network:
        network.tell("open one 29500 29500 7000 7099")
        network.tell("open two 7000 7099")
        network.tell("path one two 1e9 1000 0")
        network.tell("path two one 1e9 1000 0")
        yield network


def run_on_two_hosts(folder: Path, first: str, second: str) -> list[str]:
    """Runs commands on both hosts, and returns what they printed."""
    environment = environment_of(folder)
    with two_hosts() as network:
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
def test_the_recipe_for_torchrun_works(tmp_path: Path) -> None:
    first = commands("torchrun, on the first host")
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
        print(rpc.rpc_sync("worker0", call_back, timeout=100))
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


def test_the_recipe_for_slurm_works(tmp_path: Path) -> None:
    environment = environment_of(tmp_path)
    command(tmp_path, "scontrol", '[ "$*" = "show hostnames nodes" ] && printf "10.99.0.1\\n10.99.0.2\\n"')
    srun = """for rank in 0 1; do
  namespace=NAMESPACE_$rank
  SLURM_PROCID=$rank SLURM_NTASKS=2 nsenter --net="${!namespace}" "$@" >"task$rank" &
done
wait -n && wait -n"""
    command(tmp_path, "srun", srun)
    with two_hosts() as network:
        environment |= {"SLURM_JOB_NODELIST": "nodes"}
        environment |= {f"NAMESPACE_{rank}": network.namespace(host) for rank, host in enumerate(("one", "two"))}
        batch = network.start(
            "one",
            ["bash", "-ec", commands("Slurm")],
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        outputs_of([batch])
    assert stat.S_IMODE((tmp_path / ".tensorferry.key").stat().st_mode) == 0o600
    expect_the_pages_output([(tmp_path / f"task{rank}").read_text() for rank in (0, 1)])


#: Waits for the first host's Ray, as a person would.
WHEN_RAY_LISTENS = "until (: >/dev/tcp/10.99.0.1/6379) 2>/dev/null; do sleep 0.1; done\n"


@pytest.mark.soak
def test_the_recipe_for_ray_works(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.60'")
    environment = {**environment_of(tmp_path), "RAY_USAGE_STATS_ENABLED": "0", "RAY_COLOR_PREFIX": "0"}
    start = f'exec "{sys.executable}" -m ray.scripts.scripts "$@" --num-cpus 1 --disable-usage-stats'
    command(tmp_path, "ray", start)
    # Each host has processes and a /tmp of its own. They end with the first one, because "ray stop" ends every Ray of
    # the machine.
    host = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-ec"]
    host.append('mount -t tmpfs none /tmp && bash -ec "$1" </dev/null && if [ "$2" = stay ]; then sleep 1000; fi')
    folder = tempfile.mkdtemp(dir="/var/tmp")  # /tmp is each host's own
    shutil.copytree(tmp_path, folder, dirs_exist_ok=True)
    environment |= {"HOME": folder, "PATH": environment["PATH"].replace(str(tmp_path), folder)}
    subprocess.run(["bash", "-ec", commands("once")], env=environment, check=True)
    started = []
    try:
        with EmulatedNetwork("one", "two") as network:  # no firewalls: Ray needs many ports
            network.tell("path one two 1e9 1000 0")
            network.tell("path two one 1e9 1000 0")
            for name, script, end in (
                ("two", WHEN_RAY_LISTENS + commands("Ray, on the second host"), "stay"),
                ("one", commands("Ray, on the first host"), "leave"),
            ):
                command_line = [*host, "host", script, end]
                pipe = subprocess.PIPE
                started.append(
                    network.start(
                        name, command_line, env=environment, cwd=folder, stdout=pipe, stderr=subprocess.STDOUT
                    )
                )
            try:
                printed = started[1].communicate(timeout=300)[0]
            finally:
                for process in started:
                    process.kill()
                second = started[0].communicate()[0]
    finally:
        shutil.rmtree(folder)
    assert started[1].returncode == 0, printed + second
    for line in (
        "I am worker0",
        "I am worker1",
        "tensor([2., 2., 2.])",
        "worker1: cpu -> cpu by basic, calls over tcp",
    ):
        assert re.search(rf"^\(Worker pid=.*\) {re.escape(line)}$", printed, re.MULTILINE), printed


def test_the_recipe_for_kubernetes_works(tmp_path: Path) -> None:
    environment = environment_of(tmp_path)
    command(tmp_path, "kubectl", '[ "$*" = "create secret generic tensorferry --from-file=key=job.key" ]')
    subprocess.run(["bash", "-ec", commands("Kubernetes, once")], env=environment, cwd=tmp_path, check=True)
    (manifest,) = blocks("yaml")
    (indented,) = re.findall(r"args:\n +- \|\n((?: {14}.*\n)+)", manifest)
    # A pod sees the Secret as a link into a folder of links, of mode 0400 and root's, and the names of its Service.
    pod = """mount -t tmpfs none /run
mkdir -p /run/secrets/tensorferry/..data
install -m 0400 job.key /run/secrets/tensorferry/..data/key
ln -s ..data/key /run/secrets/tensorferry/key
printf '127.0.0.1 localhost\n10.99.0.1 hosts-0.hosts\n10.99.0.2 hosts-1.hosts\n' >/run/hosts
mount --bind /run/hosts /etc/hosts
mkdir /run/tmp
mount --bind /run/tmp /tmp
exec bash -ec "$1"
"""
    work = tempfile.mkdtemp(dir="/var/tmp")  # in the pod, /tmp is its own
    try:
        for name in ("hosts.py", "job.key"):
            shutil.copy(tmp_path / name, work)
        with two_hosts() as network:
            pods = [
                network.start(
                    host,
                    ["unshare", "--mount", "bash", "-ec", pod, "pod", textwrap.dedent(indented)],
                    env={**environment, "JOB_COMPLETION_INDEX": str(index)},
                    cwd=work,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
                for index, host in enumerate(("one", "two"))
            ]
            expect_the_pages_output(outputs_of(pods))
    finally:
        shutil.rmtree(work)
