"""Every way of joining: time-outs, Ctrl-C, and the line that says what is awaited and from whom.

test_init.py has init_rpc() and Agent.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tensorferry
import test_c10d
import torch.distributed as dist
from conftest import Agents, eventually, free_port
from tensorferry import _C, c10d, collectives, errors
from tensorferry.collectives import _groups_of
from tensorferry.regions import service_of
from test_c10d import told

# ---- torch's module on the backend

TORCH = """
import os, signal, sys, threading
import tensorferry.torch as ferry, torch.distributed.rpc as rpc
from tensorferry import errors
def init(rank, port, world_size=2, **options):
    options = ferry.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", **options)
    rpc.init_rpc(f"w{rank}", backend=rpc.BackendType.TENSORFERRY, rank=rank, world_size=world_size,
                 rpc_backend_options=options)
def interrupt_soon():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
"""


def run_torch(code: str) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` in a process, which prints the error that it gets."""
    program = TORCH + "try:\n" + textwrap.indent(textwrap.dedent(code), "    ")
    program += "\nexcept BaseException as error:\n    print(type(error).__name__, error)\nos._exit(0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_torchs_module_waits_for_the_rendezvous_as_long_as_join_timeout_says() -> None:
    port = free_port()
    said = run_torch(f"init(1, {port}, join_timeout=0.3)").stdout
    assert said.startswith(f"DeadlineExceeded the rendezvous host at 127.0.0.1:{port} cannot be reached within 0.3 s")


def test_ctrl_c_ends_the_wait_of_torchs_module_for_the_rendezvous() -> None:
    said = run_torch(f"interrupt_soon()\ninit(1, {free_port()})").stdout
    assert said == "KeyboardInterrupt interrupted while waiting for the rendezvous\n"


def test_torchs_module_names_the_ranks_that_are_missing_after_5_s_and_at_the_end() -> None:
    done = run_torch(f"init(0, {free_port()}, world_size=3, join_timeout=6)")
    assert done.stderr.count("rank 0 waits for ranks 1, 2 of a world of 3 to join\n") == 1, done.stderr
    expected = "DeadlineExceeded a world of 3 was not complete within 6 s; missing: ranks 1, 2."
    assert done.stdout.startswith(expected), done.stdout


def test_ctrl_c_ends_the_wait_of_torchs_module_for_the_world() -> None:
    said = run_torch(f"interrupt_soon()\ninit(0, {free_port()}, rpc_timeout=1000)").stdout
    assert said == "KeyboardInterrupt interrupted while waiting for the other workers to join\n"


def test_a_rank_outside_of_the_world_is_refused_at_once_by_torchs_module() -> None:
    text = "InvalidArgument rank 2 is not within a world of 2: ranks are 0 to 1"
    assert run_torch(f"init(2, {free_port()})").stdout.startswith(text)
    code = f"""
        os.environ.update(RANK="2", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="{free_port()}")
        rpc.init_rpc("w2", backend=rpc.BackendType.TENSORFERRY)
        """
    assert run_torch(code).stdout.startswith(text)


def test_two_processes_of_one_rank_are_told_of_each_other_by_torchs_module(tmp_path: Path) -> None:
    port = free_port()
    logs = [tmp_path / name for name in ("0", "1", "1 again")]
    said = lambda: [log.read_text() for log in logs]  # noqa: E731
    ranks = []
    for log in logs:
        code = f"""
            try:
                init({log.name[0]}, {port})
            except RuntimeError as error:
                print(error, file=sys.stderr)
            sys.stdin.read()
            os._exit(0)
            """
        program = TORCH + textwrap.dedent(code)
        with log.open("w") as stderr:
            ranks.append(subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stderr=stderr))
    try:
        refused = r'(?:the name "w1"|rank 1) is taken by the agent "w1" \(rank 1, pid (\d+) on \S+\), which is alive'
        holder = r'"w1" \(rank 1, pid (\d+) on \S+\) was refused because it has the (?:name|rank) of this agent'
        assert eventually(lambda: all(any(re.search(text, each) for each in said()) for text in (refused, holder)), 60)
        one, other = sorted(said()[1:], key=lambda text: re.search(holder, text) is not None)
        pids = int(re.findall(refused, one)[0]), int(re.findall(holder, other)[0])
        assert sorted(pids) == sorted(rank.pid for rank in ranks[1:])
    finally:
        for rank in ranks:
            rank.communicate(b"")


def test_two_agents_of_one_rank_are_told_of_each_other(agents: Agents, capfd: pytest.CaptureFixture[str]) -> None:
    agents("one", rank=0)
    with pytest.raises(errors.InvalidArgument, match=r'rank 0 is taken by the agent "one" \(rank 0, pid \d+ on '):
        agents("two", rank=0)
    said = ""

    def told() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return re.search(r'"two" \(rank 0, pid \d+ on \S+\) was refused because it has the rank', said) is not None

    assert eventually(told, 30), said


def test_a_rank_outside_of_the_world_is_refused_at_once_by_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "rank 2 is not within a world of 2: ranks are 0 to 1"
    for place in {"init_method": f"tcp://127.0.0.1:{free_port()}"}, {"store": dist.HashStore()}:
        with pytest.raises(ValueError, match=text):
            dist.init_process_group("tensorferry", rank=2, world_size=2, **place)
    for variable, value in ("RANK", "2"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1"):
        monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=text):
        dist.init_process_group("tensorferry")
    # A program may make the backend's group by itself.
    store = dist.HashStore()
    with (
        pytest.raises(ValueError, match="rank 2 is not within a process group of 2 ranks"),
        c10d._agent(store, c10d.Options()) as agent,
    ):
        _C.ProcessGroup(_groups_of(agent), store, 2, 2, c10d.Options(), "one", 1.0, [], service_of(agent), False)


# ---- servers that take connections and answer nothing


def test_join_timeout_bounds_the_wait_for_a_server_that_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        where = f"127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(errors.DeadlineExceeded, match=f"{where} does not answer within 0.3 s"):
            tensorferry.Agent("w1", rank=1, world_size=2, init_method=f"tcp://{where}", join_timeout=0.3)


# ---- process groups, and groups of agents


def test_a_process_group_names_the_ranks_for_which_it_waits(tmp_path: Path) -> None:
    ranks = test_c10d.run(tmp_path, 3, "waits_for_a_rank", program="c10d_endings.py", fresh=True)
    assert [rank.returncode for rank in ranks] == [0, 0, 0], told(ranks)
    rank_2 = r'rank 2 \("rank2@\S+:\d+/\w+"\)'
    awaited = rf'rank (\d) of process group "\S+" waits for (?:rank \d \(\S+\), )?{rank_2} to make it too\n'
    for rank in range(2):
        assert re.findall(awaited, ranks[rank].stderr) == [str(rank)], told(ranks)
    assert "waits for" not in ranks[2].stderr, told(ranks)


def test_a_group_of_agents_names_those_for_which_it_waits(agents: Agents, capfd: pytest.CaptureFixture[str]) -> None:
    def form(rank: int) -> None:
        """Only one of two members, in two groups: the root, and the other one."""
        members = [agents(f"{name}{rank}") for name in ("root", "member")]
        with pytest.raises(errors.DeadlineExceeded) as raised:
            names = [member.name for member in members]
            collectives.form_group(names, agent=members[rank], label=f"pair{rank}", timeout=6)
        texts[rank] = str(raised.value)

    texts = ["", ""]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(form, range(2)))
    assert texts[0] == 'group "pair0" was not formed in time: "member0" did not join'
    assert texts[1] == 'group "pair1" was not formed in time: "root1", its rank 0, has formed no group'
    said = capfd.readouterr().err
    assert said.count('group "pair0" waits for "member0" to form it too\n') == 1, said
    assert said.count('group "pair1" waits for "root1", its rank 0, which has not formed it with all') == 1, said


# ---- the built-in store


def test_a_client_of_the_built_in_store_says_that_it_waits_for_the_server(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    with pytest.raises(errors.DeadlineExceeded, match=rf"no store at 127.0.0.1:{port} within 6.0 s"):
        tensorferry.connect_store("127.0.0.1", port, timeout=6)
    said = capfd.readouterr().err
    assert said.count(f"waits for the process that serves the store at 127.0.0.1:{port} (") == 1, said
