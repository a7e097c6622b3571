"""Joining: stores, torchrun's environment, keys, names that are taken, agents that join again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
import torch.distributed as dist
import torch.distributed.rpc as torch_rpc
from conftest import eventually, free_port, leave
from tensorferry import errors


def name_and_rank():
    info = rpc.get_worker_info()
    return info.name, info.id


def run_script(tmp_path, text, *, env=None, args=(), launcher=()):
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(text))
    environment = {**os.environ, **(env or {})}
    command = [sys.executable, *launcher, str(script), *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(autouse=True)
def no_default_agent_is_left():
    yield
    leave()


def test_torchruns_environment_suffices(tmp_path):
    result = run_script(
        tmp_path,
        """
        import tensorferry.rpc as rpc, torch
        def rank(): return rpc.get_worker_info().id
        rpc.init_rpc()
        me = rpc.get_worker_info()
        assert me.name == f"worker{me.id}"
        others = [rpc.rpc_sync(i, rank) for i in range(3)]
        assert others == [0, 1, 2], others
        assert torch.equal(rpc.rpc_sync((me.id + 1) % 3, torch.ones, (4,)), torch.ones(4))
        rpc.shutdown()
        print("fine", flush=True)
        """,
        launcher=["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"],
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("fine") == 3


def test_torchs_arguments_start_an_agent(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=7)
    rpc.init_rpc("alone", rpc.BackendType.TENSORPIPE, 0, 1, options)
    assert rpc.get_rpc_timeout() == 7
    assert rpc.get_worker_info() == rpc.WorkerInfo("alone", 0)
    assert rpc.rpc_sync("alone", max, (1, 2)) == 2
    with pytest.raises(RuntimeError, match=r"already initialized"):
        rpc.init_rpc("again", rank=0, world_size=1)
    rpc.shutdown()
    with pytest.raises(RuntimeError, match=r"not been initialized"):
        rpc.rpc_sync("alone", max, (1, 2))
    with pytest.raises(RuntimeError, match=r"not been initialized"):
        rpc.shutdown()
    rpc.init_rpc(
        "alone", rank=0, world_size=1, rpc_backend_options=torch_rpc.TensorPipeRpcBackendOptions(rpc_timeout=5)
    )
    assert rpc.get_rpc_timeout() == 5
    rpc._set_rpc_timeout(3)
    assert rpc.get_rpc_timeout() == 3


def call_back_later(to):
    """A function whose work continues outside it: in a thread, and in a callback of a future."""
    results = [torch.futures.Future(), torch.futures.Future()]

    def in_a_thread():
        try:
            results[0].set_result(rpc.rpc_sync(to, max, (1, 2)))
        except BaseException as error:
            results[0].set_exception(error)

    threading.Thread(target=in_a_thread).start()
    rpc.rpc_async(to, max, (3, 4)).then(lambda done: results[1].set_result(rpc.rpc_sync(to, max, (done.wait(), 5))))
    return [result.wait() for result in results]


def test_functions_that_peers_call_before_init_rpc_has_returned_use_the_default_agent():
    store = dist.HashStore()
    starting = threading.Thread(
        target=rpc.init_rpc, args=("early",), kwargs={"rank": 0, "world_size": 2, "store": store, "prefix": "all"}
    )
    starting.start()  # waits for rank 1
    with tensorferry.Agent("caller", store=store, prefix="all") as caller:
        assert caller.rpc_sync("early", call_back_later, ("caller",), timeout=10, wait_for_ready=True) == [2, 5]
        assert caller.rpc_sync("early", name_and_rank) == ("early", 0)
        assert starting.is_alive()
    with tensorferry.Agent("late", rank=1, store=store, prefix="all"):
        starting.join(30)
        assert not starting.is_alive()


def test_an_agent_that_cannot_join_does_not_become_the_default_agent():
    store = dist.HashStore()
    with tensorferry.Agent("taken", store=store), pytest.raises(errors.InvalidArgument, match="taken"):
        rpc.init_rpc("taken", store=store)
    with pytest.raises(errors.DeadlineExceeded, match="1"):
        rpc.init_rpc("alone", rank=0, world_size=2, store=store, join_timeout=0.1)
    with pytest.raises(RuntimeError, match="not been initialized"):
        rpc.rpc_sync("alone", max, (1, 2))


def test_a_timeout_among_the_options_is_a_float_like_torchs():
    for kind in (rpc.RpcBackendOptions, rpc.TensorPipeRpcBackendOptions, torch_rpc.TensorPipeRpcBackendOptions):
        options = kind() if kind is rpc.RpcBackendOptions else kind(rpc_timeout=20)
        options.rpc_timeout = 20
        assert repr(options.rpc_timeout) == "20.0"
    with pytest.raises(ValueError, match="soon"):
        rpc.RpcBackendOptions(rpc_timeout="soon")


@pytest.mark.parametrize(
    ("transports", "channels", "expected"),
    [
        (None, ["cma", "mpt_uv", "basic"], {"channels": "cma,basic"}),
        (["uv"], None, {"unix_sockets": False}),
        (["ibv", "uv", "shm"], ["basic"], {"channels": "basic"}),
        (["shm"], None, {"interface": "lo"}),
    ],
)
def test_transports_and_channels_of_tensorpipe_have_their_meaning(transports, channels, expected):
    options = rpc.TensorPipeRpcBackendOptions(_transports=transports, _channels=channels)
    assert options.agent_options == expected


@pytest.mark.parametrize("module", [rpc, torch_rpc])
def test_transports_and_channels_of_tensorpipe_reach_the_agent(module):
    store = dist.HashStore()
    options = module.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["cma", "basic"])
    rpc.init_rpc("a", rpc_backend_options=options, store=store)
    try:
        with tensorferry.Agent("b", store=store):
            explained = rpc.explain("b")
    finally:
        rpc.shutdown()
    assert [name for name, _, _ in explained.candidates] == ["cma", "basic"]
    assert explained.transport == "tcp"


def test_transports_and_channels_that_tensorpipe_has_not_are_refused():
    with pytest.raises(ValueError, match=r"_channels names 'shm'; TensorPipe has basic, xth, cma"):
        rpc.TensorPipeRpcBackendOptions(_channels=["shm"])
    with pytest.raises(ValueError, match=r"_transports names 'tcp'; TensorPipe has uv, shm, ibv"):
        rpc.TensorPipeRpcBackendOptions(_transports=["tcp"])
    with pytest.raises(ValueError, match="names 'ibv' without 'uv': calls between hosts travel by TCP"):
        rpc.TensorPipeRpcBackendOptions(_transports=["ibv", "shm"])
    with pytest.raises(ValueError, match="_channels is a list of names"):
        rpc.TensorPipeRpcBackendOptions(_channels="cma")
    with pytest.raises(ValueError, match="_channels is a list of names"):
        rpc.TensorPipeRpcBackendOptions(_channels=[])


def test_wrong_arguments_are_reported(monkeypatch):
    with pytest.raises(TypeError, match=r"backend"):
        rpc.init_rpc("a", backend="tensorpipe")
    with pytest.raises(TypeError, match=r"rpc_backend_options"):
        rpc.init_rpc("a", rpc_backend_options={})

    class Foreign(rpc.RpcBackendOptions):
        pass

    with pytest.raises(TypeError, match=r"rpc_backend_options.*Foreign"):
        rpc.init_rpc("a", rpc_backend_options=Foreign())
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(errors.InvalidArgument, match=r"MASTER_ADDR"):
        rpc.init_rpc("a")
    with pytest.raises(errors.InvalidArgument, match=r"rank"):
        rpc.init_rpc("a", world_size=2, init_method="tcp://127.0.0.1:1")
    with pytest.raises(errors.InvalidArgument, match=r"gopher"):
        rpc.init_rpc("a", init_method="gopher://here")
    with pytest.raises(errors.InvalidArgument, match=r"name"):
        tensorferry.Agent(store=dist.HashStore())
    with pytest.raises(errors.InvalidArgument):
        tensorferry.Agent("bad\nname", store=dist.HashStore())
    with pytest.raises(TypeError, match=r"rank= is an int, not '0'"):
        tensorferry.Agent("a", rank="0", store=dist.HashStore())
    with pytest.raises(TypeError, match=r"world_size= is an int, not '2'"):
        tensorferry.Agent("a", rank=0, world_size="2", store=dist.HashStore())
    with pytest.raises(TypeError, match=r"name is a str, not 3"):
        tensorferry.Agent(3, rank=0, store=dist.HashStore())
    with pytest.raises(ValueError, match=r"time-out"):
        tensorferry.Agent("a", store=dist.HashStore(), timeout=-1)
    with pytest.raises(TypeError, match=r"no_such_option"):
        tensorferry.Agent("a", store=dist.HashStore(), no_such_option=1)
    with pytest.raises(RuntimeError, match=r"not been initialized"):
        rpc.rpc_sync("a", max, (1, 2))


@pytest.mark.parametrize("kind", ["tcp", "file", "prefix", "hash", "built-in", "init_method=file", "init_method=tcp"])
def test_agents_join_by_any_store(kind, tmp_path):
    keep = []

    def one():
        if kind == "file":
            return {"store": dist.FileStore(str(tmp_path / "store"), -1)}
        if kind == "built-in":
            if not keep:
                keep.append(tensorferry.StoreServer("127.0.0.1", 0))
            return {"store": tensorferry.connect_store("127.0.0.1", keep[0].port)}
        if kind == "init_method=file":
            return {"init_method": f"file://{tmp_path}/store"}
        if kind == "init_method=tcp":
            if not keep:
                keep.append(free_port())
            return {"init_method": f"tcp://127.0.0.1:{keep[0]}"}
        if not keep:
            store = dist.HashStore() if kind == "hash" else dist.TCPStore(
                "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))  # fmt: skip
            keep.append(dist.PrefixStore("mine", store) if kind == "prefix" else store)
        return {"store": keep[0]}

    with tensorferry.Agent("a", 0, **one()) as a, tensorferry.Agent("b", 1, **one()) as b:
        assert a.rpc_sync("b", name_and_rank) == ("b", 1)
        assert b.rpc_sync(0, name_and_rank) == ("a", 0)


def test_a_world_starts_together(agents):
    made = {}

    def start(rank):
        time.sleep(0.1 * rank)
        made[rank] = agents(f"w{rank}", rank=rank, world_size=3, join_timeout=20)

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [0, 1, 2]
    assert made[0].rpc_sync(2, name_and_rank) == ("w2", 2)


@pytest.mark.parametrize("kind", ["tcp", "file", "hash"])
def test_worlds_that_have_ended_leave_nothing_in_the_store(kind, tmp_path):
    if kind == "file":
        store = dist.FileStore(str(tmp_path / "store"), -1)
    else:
        store = dist.HashStore() if kind == "hash" else dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))  # fmt: skip
    keys = []
    for _ in range(50):
        with ThreadPoolExecutor(2) as pool:
            made = list(pool.map(lambda rank: tensorferry.Agent(f"w{rank}", rank, 2, store=store), range(2)))
            assert made[0].rpc_sync("w1", max, args=(1, 2)) == 2
            list(pool.map(lambda agent: agent.shutdown(), made))
        keys.append(store.num_keys())
    assert keys == keys[:1] * len(keys)


def test_an_incomplete_world_names_the_missing_ranks(agents):
    start = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded, match=r"rank 1"):
        agents("w0", rank=0, world_size=2, join_timeout=0.3)
    assert time.monotonic() - start < 5
    assert agents("w0", rank=0).name == "w0"  # the name is free again


def test_a_name_or_rank_is_unique(agents):
    agents("a", rank=0)
    with pytest.raises(errors.InvalidArgument, match=r'"a"|a'):
        agents("a")
    with pytest.raises(errors.InvalidArgument, match=r"rank 0|0"):
        agents("b", rank=0)
    agents("b", rank=1)


def test_all_ranks_are_told_of_two_with_one_name():
    """Also the ranks beside the one that serves the store, whichever of the two comes second."""
    port = free_port()
    program = f"""
import sys
import tensorferry
import tensorferry.rpc as rpc
rank = int(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
try:
    rpc.init_rpc(["one", "two", "one"][rank], rank=rank, world_size=3, init_method="tcp://127.0.0.1:{port}")
except tensorferry.errors.InvalidArgument as error:
    print(error)
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for rank in range(3)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:  # they join at the same time, however long each has taken to import
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert all('the name "one" is taken by the agent "one" (rank ' in text for text in said), said
    assert sum(" could not join the world: " in text for text in said) == 2, said


def test_a_departed_agent_can_join_again(agents):
    a = agents("a")
    for _ in range(3):
        b = agents("b", rank=1)
        assert a.rpc_sync("b", name_and_rank) == ("b", 1)
        assert a.rpc_sync(1, name_and_rank) == ("b", 1)
        b.leave()
        assert eventually(lambda: is_gone(a, "b"))


def is_gone(agent, name):
    try:
        agent.rpc_sync(name, name_and_rank, timeout=1)
    except errors.Error:
        return True
    return False


def test_a_killed_agent_can_join_again(cluster, workers):
    cluster.start(1, static=False)
    assert rpc.rpc_sync("worker1", os.getpid) == cluster.pids[0]
    cluster.workers[0].kill()
    [again] = workers.take(1)
    cluster.workers[0] = again
    from conftest import join

    again.run(join, "worker1", 1, None, cluster.store.port, {"prefix": "test0"})
    assert rpc.rpc_sync("worker1", os.getpid) == again.process.pid
    assert rpc.rpc_sync(1, os.getpid) == again.process.pid


def test_a_wrong_key_is_refused(agents):
    a = agents("a", key="the right one, long enough")
    agents("b", key="the right one, long enough")
    assert a.rpc_sync("b", name_and_rank) == ("b", -1)
    with pytest.raises(errors.Error, match=r"(?i)key"):
        c = agents("c", key="a wrong one, long enough")
        c.rpc_sync("b", name_and_rank, timeout=5)
    assert a.rpc_sync("b", name_and_rank) == ("b", -1)


def test_listening_beyond_this_host_needs_a_key():
    server = tensorferry.StoreServer("127.0.0.1", 0)
    store = tensorferry.connect_store("127.0.0.1", server.port)
    try:
        tensorferry.Agent("a", store=store, reaches="192.0.2.1", interface="").leave()
    except errors.Error as error:
        assert "TENSORFERRY_KEY" in str(error) or "interface" in str(error)


def test_an_agent_can_start_again_after_a_shutdown(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    for i in range(5):
        rpc.init_rpc("again", rank=0, world_size=1)
        assert rpc.rpc_sync("again", max, (i, 2)) == max(i, 2)
        rpc.shutdown()


def test_functions_use_the_agent_that_serves_them(agents):
    a, _ = agents("a"), agents("b")
    assert a.rpc_sync("b", name_and_rank)[0] == "b"
    assert a.rpc_sync("a", name_and_rank)[0] == "a"


def test_tensors_travel_in_both_directions_between_processes(cluster):
    cluster.start(2)
    tensors = [torch.full((300_000,), float(i)) for i in range(8)]
    futures = [rpc.rpc_async(1 + i % 2, torch.mul, (tensor, 2)) for i, tensor in enumerate(tensors)]
    for i, result in enumerate(tensorferry.wait_all(futures)):
        assert torch.equal(result, torch.full((300_000,), 2.0 * i))


# ---- waiting for others


@pytest.mark.parametrize("how", ["env", "tcp"])
def test_join_timeout_bounds_the_wait_for_the_rendezvous(how, monkeypatch):
    port = free_port()
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 1, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    where = {} if how == "env" else {"rank": 1, "world_size": 2, "init_method": f"tcp://127.0.0.1:{port}"}
    start = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded, match=rf"127.0.0.1:{port} cannot be reached within 0.3 s.*rank 0"):
        rpc.init_rpc(**where, join_timeout=0.3)
    assert time.monotonic() - start < 5


def test_join_timeout_bounds_the_wait_for_the_world_by_an_address():
    start = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded, match=r"rank 1"):
        rpc.init_rpc("w0", rank=0, world_size=2, init_method=f"tcp://127.0.0.1:{free_port()}", join_timeout=0.3)
    assert time.monotonic() - start < 10


def test_ctrl_c_ends_the_wait_for_the_rendezvous():
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        rpc.init_rpc("w1", rank=1, world_size=2, init_method=f"tcp://127.0.0.1:{free_port()}")
    assert time.monotonic() - start < 5


def test_a_rank_outside_of_the_world_fails_at_once():
    with pytest.raises(errors.InvalidArgument, match=r"rank 2 is not within a world of 2"):
        rpc.init_rpc("w2", rank=2, world_size=2, init_method=f"tcp://127.0.0.1:{free_port()}")


def test_a_line_names_the_ranks_that_are_awaited(agents, capfd):
    def start(rank):
        with pytest.raises(errors.DeadlineExceeded, match=r"missing: rank.*\b3[;.]"):
            agents(f"w{rank}", rank=rank, world_size=4, join_timeout=7)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(start, range(3)))
    said = capfd.readouterr().err
    for rank in range(3):
        assert said.count(f'"w{rank}" waits for rank 3 of a world of 4 to join\n') == 1, said
