"""Python and C++ in one job: tests/rpc/cpp/peer_main.cpp is the other end."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorferry
import tensorferry._C
import torch
from conftest import free_port
from tensorferry import errors

PEER = Path(tensorferry._C.__file__).parents[2] / "tests/rpc/cpp/cpp_peer"


class Counter:
    """What C++ uses by reference."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, n: int) -> int:
        self.value += n
        return self.value


def scale(tensor: torch.Tensor, by: float) -> torch.Tensor:
    return tensor * by


def divide() -> float:
    return 1 / 0


def peer_program() -> str:
    if not PEER.is_file():
        pytest.skip(f"{PEER} is not built")
    return str(PEER)


def start_peer(
    name: str,
    rendezvous: str,
    rank: int = -1,
    world_size: int = 0,
    stderr: int | None = None,
    environment: dict[str, str] | None = None,
) -> subprocess.Popen[str]:
    command = [peer_program(), name, rendezvous, str(rank), str(world_size)]
    environment = os.environ | (environment or {})
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, text=True, env=environment)


def end_peer(peer: subprocess.Popen[str]) -> int:
    assert peer.stdin is not None
    peer.stdin.close()
    return peer.wait(60)


@pytest.fixture(scope="module")
def agent() -> Iterator[tensorferry.Agent]:
    """A Python agent, "py", in a world of two with "cpp", which is a C++ process."""
    where = f"tcp://127.0.0.1:{free_port()}"
    peer = start_peer("cpp", where, 1, 2)
    try:
        made = tensorferry.Agent("py", 0, 2, init_method=where, join_timeout=60)
        made.expose(scale)
        made.expose(divide)
        yield made
        assert peer.stdin is not None
        peer.stdin.close()  # then it comes to the shutdown too
        made.shutdown(timeout=60)
        assert peer.wait(60) == 0
    finally:
        peer.kill()
        peer.wait()


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_regions_are_read_and_written_in_both_languages(agent: tensorferry.Agent, dtype: torch.dtype) -> None:
    contents = torch.arange(12).reshape(4, 3).to(dtype)
    agent.rpc_sync("cpp", "make_table", args=(contents,))
    theirs = agent.find_region("cpp", "table")
    assert torch.equal(theirs.read(), contents)
    assert torch.equal(theirs[1:3, 2].read(), contents[1:3, 2])
    theirs[3].write(contents[0], notify=7)
    peer, after = agent.rpc_sync("cpp", "table_after", args=(7,))
    assert peer == "py" and torch.equal(after[3], contents[0])
    with agent.region(contents, "mine"):
        assert torch.equal(agent.rpc_sync("cpp", "read_region", args=("py", "mine")), contents)
    with agent.region(contents.t(), "turned"), pytest.raises(errors.InvalidArgument, match="not row-major"):
        agent.rpc_sync("cpp", "read_region", args=("py", "turned"))
    agent.rpc_sync("cpp", "drop_table")
    with pytest.raises(errors.NotFound):
        theirs.read()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_versions_are_published_and_read_in_both_languages(agent: tensorferry.Agent, dtype: torch.dtype) -> None:
    contents = torch.arange(12).reshape(4, 3).to(dtype)
    agent.rpc_sync("cpp", "publish", args=(contents,))
    theirs = agent.subscribe("policy", from_="cpp")
    assert torch.equal(theirs.latest()["contents"], contents)
    assert agent.rpc_sync("cpp", "update", args=(contents.flip(0),)) == 2
    assert torch.equal(theirs.wait(newer_than=1)["contents"], contents.flip(0))
    mine = agent.publish({"other": torch.ones(3), "contents": contents}, name="mine")
    try:
        number, loaded = agent.rpc_sync("cpp", "load", args=("py", "mine", contents))
        assert number == 1 and torch.equal(loaded, contents)
        with pytest.raises(errors.InvalidArgument, match="does not fit"):
            agent.rpc_sync("cpp", "load", args=("py", "mine", contents[1:]))
    finally:
        mine.withdraw()


def test_python_calls_a_function_of_cpp_by_name(agent: tensorferry.Agent) -> None:
    assert agent.rpc_sync("cpp", "add", args=(40, 2)) == 42
    assert agent.rpc_sync(1, "add", kwargs={"b": 1, "a": 2}) == 3
    assert agent.rpc_async("cpp", "later", args=(7,)).wait() == 7


def test_tensors_and_structs_cross_both_ways(agent: tensorferry.Agent) -> None:
    action = torch.arange(6.0).reshape(2, 3)
    observation, reward, done = agent.rpc_sync("cpp", "step", args=(action, 3))
    assert torch.equal(observation, 3 * action) and (reward, done) == (0.5, True)
    assert agent.rpc_sync("cpp", "step", args=(action, 1), kwargs={"how": "well"})[1:] == (1.0, False)
    for tensor in (torch.arange(1 << 20), torch.ones(3, 4).t(), torch.zeros(0, 2), torch.tensor(True)):
        echoed = agent.rpc_sync("cpp", "echo", args=(tensor,))
        assert torch.equal(echoed, tensor) and echoed.dtype == tensor.dtype
    column = torch.arange(12).reshape(3, 4)[:, 1]
    assert torch.equal(agent.rpc_sync("cpp", "echo", args=(column,)), column)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert torch.equal(agent.rpc_sync("cpp", "echo", args=(array,)), torch.from_numpy(array))


def test_containers_cross_both_ways(agent: tensorferry.Agent) -> None:
    given: dict[str, list[tuple[int, float]]] = {"a": [(1, 0.5)], "b": []}
    assert agent.rpc_sync("cpp", "values", args=(given, b"\0x")) == (given, b"\0x")
    assert agent.rpc_sync("cpp", "values", args=({}, None)) == ({}, None)
    shared = [1, 2]
    assert agent.rpc_sync("cpp", "sum", args=(shared, shared)) == 33
    assert agent.rpc_sync("cpp", "sum", args=((1, 2), shared)) == 33


def test_wrong_arguments_are_reported_with_the_signature(agent: tensorferry.Agent) -> None:
    with pytest.raises(errors.InvalidArgument) as raised:
        agent.rpc_sync("cpp", "step", args=("left",))
    assert "step(action: float32 tensor, n: int, how: str or None) -> Step" in str(raised.value)
    assert "called with (str)" in str(raised.value)
    with pytest.raises(errors.InvalidArgument, match=r"called with \(int, c=int\)"):
        agent.rpc_sync("cpp", "add", args=(1,), kwargs={"c": 2})
    with pytest.raises(errors.InvalidArgument, match="only Python can read"):
        agent.rpc_sync("cpp", "add", args=(object(), 1))
    with pytest.raises(errors.NotFound):
        agent.rpc_sync("cpp", "nothing")


def test_cpp_exceptions_arrive_as_remote_errors(agent: tensorferry.Agent) -> None:
    with pytest.raises(tensorferry.RemoteError, match="no such level") as raised:
        agent.rpc_sync("cpp", "fail")
    assert raised.value.type_name == "std::out_of_range" and raised.value.peer == "cpp"


def test_cpp_calls_functions_of_python(agent: tensorferry.Agent) -> None:
    tensor = torch.arange(4.0)
    assert torch.equal(agent.rpc_sync("cpp", "call_scale", args=("py", tensor)), 3 * tensor)
    assert agent.rpc_sync("cpp", "call_by_import", args=("py", 16.0)) == 4.0


def test_python_exceptions_arrive_in_cpp(agent: tensorferry.Agent) -> None:
    type_name, message, trace = agent.rpc_sync("cpp", "outcome", args=("py", "divide"))
    assert type_name == "builtins.ZeroDivisionError" and message == "division by zero"
    assert "in divide" in trace and "1 / 0" in trace
    assert agent.rpc_sync("cpp", "outcome", args=("py", "nothing"))[0] == "NotFound"


def test_python_uses_an_object_of_cpp(agent: tensorferry.Agent) -> None:
    counter: Any = agent.rpc_sync("cpp", "counter")
    assert counter.owner_name() == "cpp"
    assert counter.rpc_sync().add(2) == 2
    assert counter.rpc_async().add(n=3).wait() == 5
    assert torch.equal(counter.rpc_sync().history(2), torch.tensor([5, 5]))
    with pytest.raises(tensorferry.RemoteError, match="counted wrongly"):
        counter.rpc_sync().fail()
    with pytest.raises(errors.NotFound, match="it has: add, fail, history"):
        counter.rpc_sync().subtract(1)
    with pytest.raises(errors.InvalidArgument, match="is an object of C\\+\\+, which cannot be copied"):
        counter.to_here()


def test_remote_keeps_a_result_in_cpp(agent: tensorferry.Agent) -> None:
    counter = agent.remote("cpp", "counter")
    assert counter.rpc_sync().add(4) == 4
    kept = agent.remote("cpp", "add", args=(1, 2))
    assert kept.to_here() == 3
    with pytest.raises(tensorferry.RemoteError, match="no such level"):
        agent.remote("cpp", "fail").to_here()
    with pytest.raises(errors.InvalidArgument, match="called with"):
        agent.remote("cpp", "add", args=("x",)).to_here()


def test_a_result_that_is_an_object_still_under_way_stays_in_cpp(agent: tensorferry.Agent) -> None:
    slow = agent.remote("cpp", "later", args=(7, 0.3))
    assert agent.remote("cpp", "same", args=(slow,)).to_here() == 7
    failed = agent.remote("cpp", "fail")
    with pytest.raises(tensorferry.RemoteError, match="no such level"):
        agent.remote("cpp", "same", args=(failed,)).to_here()
    here = agent.remote("py", scale, args=(torch.ones(1), 2.0))
    with pytest.raises(errors.InvalidArgument, match="object of another agent cannot stay here"):
        agent.remote("cpp", "same", args=(here,)).to_here()


def test_cpp_uses_an_object_of_python(agent: tensorferry.Agent) -> None:
    import tensorferry.rpc as rpc

    before = tensorferry._C.default_agent()
    tensorferry._C.set_default_agent(agent)
    try:
        counter = rpc.RRef(Counter())
        assert agent.rpc_sync("cpp", "use", args=(counter, 3)) == 3
        assert agent.rpc_sync("cpp", "use", args=(counter, 4)) == 7
        assert counter.local_value().value == 7
    finally:
        tensorferry._C.set_default_agent(before)


def test_a_group_has_ranks_of_both_languages(agent: tensorferry.Agent) -> None:
    mine, theirs = torch.arange(1 << 16, dtype=torch.float32), torch.ones(1 << 16)
    for names in (["py", "cpp"], ["cpp", "py"]):
        answer = agent.rpc_async("cpp", "reduce_with", args=(names, theirs))
        group = tensorferry.collectives.form_group(names, agent=agent, label="both languages", timeout=60)
        given = group.all_gather(mine).wait()
        assert torch.equal(given[names.index("cpp")], theirs)
        total = group.all_reduce(mine.clone()).wait()
        reduced, gathered = answer.wait()
        assert torch.equal(total, mine + theirs) and torch.equal(reduced, total)
        assert all(torch.equal(a, b) for a, b in zip(gathered, given, strict=True))


def test_cpp_joins_a_dynamic_group() -> None:
    where = f"tcp://127.0.0.1:{free_port()}"
    with tensorferry.Agent("head", 0, init_method=where) as head:
        for life in range(2):
            peer = start_peer("visitor", where)
            assert peer.stdout is not None and peer.stdout.readline() == "ready\n"
            assert head.rpc_sync("visitor", "add", args=(life, 1)) == life + 1
            assert end_peer(peer) == 0


def test_cpp_takes_its_place_from_the_environment() -> None:
    port = free_port()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "1", "WORLD_SIZE": "2"}
    peer = start_peer("by environment", "env://", environment=place)
    with tensorferry.Agent("head", 0, 2, init_method=f"tcp://127.0.0.1:{port}", join_timeout=60) as head:
        assert head.rpc_sync(1, "add", args=(2, 3)) == 5
        assert peer.stdin is not None
        peer.stdin.close()
        head.shutdown(timeout=60)
    assert peer.wait(60) == 0


def test_cpp_without_an_environment_names_the_missing_variables() -> None:
    peer = start_peer("lost", "env://", stderr=subprocess.PIPE, environment={"MASTER_ADDR": "", "MASTER_PORT": ""})
    assert peer.wait(60) == 1 and peer.stderr is not None
    assert "env:// (MASTER_ADDR, MASTER_PORT) needs a host and a port" in peer.stderr.read()


@pytest.mark.parametrize("rank_of_python", [0, 1])
def test_torchrun_starts_python_and_cpp_in_one_job(tmp_path: Path, rank_of_python: int) -> None:
    (tmp_path / "main.py").write_text(
        "import tensorferry\n"
        "with tensorferry.Agent('head') as head:\n"
        "    total = head.rpc_sync('from torchrun', 'add', args=(2, 3))\n"
        "    print(f'the sum is {total}')\n"  # in one piece: the other process writes to the same pipe
        "    head.shutdown()\n"
    )
    job = tmp_path / "job.sh"
    job.write_text(
        f"cd {tmp_path}\n"
        f"if [ $RANK = {rank_of_python} ]; then exec {sys.executable} main.py; fi\n"
        f"exec {peer_program()} 'from torchrun' env:// -1 0 </dev/null\n"
    )
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python", "sh", str(job)]
    done = subprocess.run([sys.executable, *launch], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "the sum is 5" in done.stdout, done.stdout + done.stderr


def test_cpp_and_python_join_by_the_built_in_store() -> None:
    server = tensorferry.StoreServer("127.0.0.1", 0)
    store = tensorferry.connect_store("127.0.0.1", server.port)
    with tensorferry.Agent("here", store=store) as here:
        peer = start_peer("there", f"store://127.0.0.1:{server.port}")
        assert peer.stdout is not None and peer.stdout.readline() == "ready\n"
        assert here.rpc_sync("there", "add", args=(1, 1)) == 2
        assert end_peer(peer) == 0


def test_an_object_of_cpp_is_lost_with_its_process() -> None:
    where = f"tcp://127.0.0.1:{free_port()}"
    with tensorferry.Agent("head", 0, init_method=where) as head:
        peer = start_peer("mortal", where)
        assert peer.stdout is not None and peer.stdout.readline() == "ready\n"
        counter: Any = head.rpc_sync("mortal", "counter")
        assert counter.rpc_sync().add(1) == 1
        peer.kill()
        peer.wait()
        until = time.monotonic() + 30
        with pytest.raises(errors.ConnectionLost):
            while time.monotonic() < until:
                counter.rpc_sync().add(1)
        del counter
        gc.collect()
