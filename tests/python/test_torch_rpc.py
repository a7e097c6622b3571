"""torch.distributed.rpc on TensorFerry's backend: how it is chosen, its options, groups, and whole programs.

tests/torch_rpc runs PyTorch's own suite; a fixed twentieth of it runs here."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from conftest import run_a_part
from programs.launch import execute, launch

ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str, timeout: float = 120, **environment: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=timeout, env={**os.environ, **environment}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


# Runs the body of `work(name, rank)` in two forked workers that are members of a world, or of a group without one.
WORKERS = """
import os, sys, tempfile, traceback
import tensorferry.torch as ferry
import torch, torch.distributed as dist, torch.distributed.rpc as rpc
from torch.distributed.rpc import backend_registry

folder = tempfile.mkdtemp()
store = "file://" + folder + "/store"

def workers(work, count=2, killed=()):
    # No worker begins before the last fork: a thread of this process that serves it might hold a lock of libc.
    forking, forked = os.pipe()
    children = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(forked)
                os.read(forking, 1)
                work(rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        children.append(pid)
    os.close(forked)
    os.close(forking)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes == [-9 if rank in killed else 0 for rank in range(count)], codes

def init(rank, world_size=2, **options):
    rpc.init_rpc(f"w{rank}", backend=rpc.BackendType.TENSORFERRY, rank=rank, world_size=world_size,
                 rpc_backend_options=ferry.RpcBackendOptions(init_method=store, **options))
"""


def run_workers(code: str) -> str:
    """What a program prints that begins with WORKERS."""
    with tempfile.TemporaryDirectory() as folder:
        return execute(WORKERS + textwrap.dedent(code), folder)


# ---- how the backend is chosen


def test_importing_registers_the_backend_under_every_name_of_the_enumeration() -> None:
    run_python(
        """
        import torch.distributed.rpc as rpc
        stale = rpc.BackendType.TENSORPIPE
        import tensorferry.torch
        from torch.distributed.rpc import backend_registry
        assert rpc.BackendType is backend_registry.BackendType
        assert rpc.BackendType.TENSORFERRY.name == "TENSORFERRY"
        assert not isinstance(stale, rpc.BackendType)
        try:  # a member that the program took before the import still names its backend
            rpc.init_rpc("a", backend=stale, rank=0, world_size=1,
                         rpc_backend_options=tensorferry.torch.RpcBackendOptions(init_method="tcp://127.0.0.1:0"))
        except TypeError as error:
            assert "must be a `TensorPipeRpcBackendOptions`" in str(error), error
        else:
            raise AssertionError
        """
    )


@pytest.mark.parametrize("default", [True, False])
def test_the_variable_makes_it_the_default(default: bool) -> None:
    said = run_python(
        """
        import torch.distributed.rpc as rpc, tensorferry.torch, tempfile
        rpc.init_rpc("a", rank=0, world_size=1,
                     rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method="file://" + tempfile.mktemp()))
        print(type(rpc.api._get_current_rpc_agent()).__module__)
        rpc.shutdown()
        """,
        TENSORFERRY_TORCH_RPC="1" if default else "",
    )
    assert ("tensorferry" in said) == default


def test_transports_and_channels_of_tensorpipes_options_have_their_meaning() -> None:
    said = run_python(
        """
        import torch.distributed.rpc as rpc, tensorferry.torch, tempfile
        given = rpc.TensorPipeRpcBackendOptions(
            _transports=["uv"], _channels=["cma", "mpt_uv"], init_method="file://" + tempfile.mktemp())
        print(tensorferry.torch._own_options(given).agent_options)
        rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=given)
        print(rpc.rpc_sync("a", max, (1, 2)))
        rpc.shutdown()
        given = rpc.TensorPipeRpcBackendOptions(_channels=["cuda_xth"], init_method="file://" + tempfile.mktemp())
        try:
            tensorferry.torch.rpc.init_rpc("b", backend=rpc.BackendType.TENSORFERRY, rank=0, world_size=1,
                                           rpc_backend_options=given)
            rpc.shutdown()
            print("a build for GPUs")
        except tensorferry.errors.InvalidArgument as error:
            print(error)
        """,
        TENSORFERRY_TORCH_RPC="1",
    ).splitlines()
    assert said[0] == "{'channels': 'cma,basic', 'unix_sockets': False}"
    assert said[1] == "2"
    assert said[2] == "a build for GPUs" or 'no channel "cuda_xth"; known are: ' in said[2]


def test_torch_loads_it_by_its_entry_point(tmp_path: Path) -> None:
    declared = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points."torch.backends"]\ntensorferry = "tensorferry_autoload:load"' in declared
    metadata = tmp_path / "tensorferry-0.dist-info"  # the build folder has none
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorferry\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\ntensorferry = tensorferry_autoload:load\n")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    code = """
        import sys, torch
        print("tensorferry" in sys.modules)
        import torch.distributed.rpc as rpc
        print(hasattr(rpc.BackendType, "TENSORFERRY"))
    """
    assert run_python(code, PYTHONPATH=path, TENSORFERRY_TORCH_RPC="1") == "True\nTrue\n"
    assert run_python(code, PYTHONPATH=path, TENSORFERRY_TORCH_RPC="") == "False\nFalse\n"


# ---- options


def test_options_are_checked() -> None:
    run_python(
        """
        import tensorferry.torch as ferry, torch, torch.distributed.rpc as rpc
        def refused(kind, make, text):
            try:
                make()
            except kind as error:
                assert text in str(error), error
            else:
                raise AssertionError(text)
        refused(TypeError, lambda: ferry.RpcBackendOptions(no_such=1), "no_such")
        refused(ValueError, lambda: ferry.RpcBackendOptions(num_worker_threads=0), "positive")
        refused(ValueError, lambda: ferry.RpcBackendOptions(devices=["cpu"]), "CUDA")
        options = ferry.RpcBackendOptions(device_maps={"a": {0: 1}})
        refused(ValueError, lambda: options.set_device_map("a", {0: 2}), "1-to-1")
        options.set_device_map("a", {1: 0})
        assert len(options.device_maps["a"]) == 2
        from torch.distributed.rpc.backend_registry import construct_rpc_backend_options
        made = construct_rpc_backend_options(rpc.BackendType.TENSORFERRY, _transports=["uv"], _channels=["cma"])
        assert made.agent_options == {"unix_sockets": False, "channels": "cma"}
        class Foreign(rpc.RpcBackendOptions):
            pass
        refused(TypeError, lambda: rpc.init_rpc("a", backend=rpc.BackendType.TENSORFERRY, rank=0, world_size=1,
                rpc_backend_options=Foreign(60, "file:///tmp/tensorferry-never-joined")), "must be a")
        """
    )


def test_a_device_map_with_one_target_for_two_devices_is_refused_when_workers_join() -> None:
    run_workers(
        """
        def work(rank):
            try:
                init(rank, device_maps={"w1": {0: 0, 1: 0}} if rank == 0 else {})
            except ValueError as error:
                assert "Node w0 has duplicated target devices in its device map for w1" in str(error), error
            else:
                raise AssertionError
        workers(work)
        """
    )


def test_options_of_the_agent_are_taken() -> None:
    said = run_workers(
        """
        def work(rank):
            init(rank, channels="basic", num_worker_threads=5, rpc_timeout=21)
            if rank == 0:
                assert rpc.get_rpc_timeout() == 21
                x = torch.ones(1 << 20)
                assert rpc.rpc_sync("w1", torch.add, args=(x, 1)).sum() == 2 << 20
                info = rpc.api._get_current_rpc_agent().get_debug_info()
                assert info["agent.thread_pool_size"] == "5"
                print(sorted(key for key in rpc.api._get_current_rpc_agent().get_metrics() if "bytes_sent" in key))
            rpc.shutdown()
        workers(work)
        """
    )
    assert "agent.bytes_sent.basic" in said and "shm" not in said


# ---- workers and groups


def test_workers_are_known_in_every_form() -> None:
    run_workers(
        """
        def work(rank):
            init(rank)
            agent = rpc.api._get_current_rpc_agent()
            other = f"w{1 - rank}"
            assert agent.get_worker_info().name == f"w{rank}" and agent.get_worker_info(other).id == 1 - rank
            assert agent.get_worker_info(rank).name == f"w{rank}"
            assert rpc.get_worker_info(other) == agent.get_worker_info(1 - rank)
            assert sorted(one.name for one in agent.get_worker_infos()) == ["w0", "w1"]
            for form in (other, 1 - rank, rpc.get_worker_info(other)):
                assert rpc.rpc_sync(form, max, args=(1, 2)) == 2
            try:
                rpc.rpc_sync("nobody", max, args=(1, 2))
            except RuntimeError as error:
                assert "nobody" in str(error)
            rpc.shutdown()
        workers(work)
        """
    )


def test_workers_join_and_leave_a_group_without_a_world_size() -> None:
    run_workers(
        """
        master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.environ["MASTER_PORT"], os.environ["MASTER_ADDR"] = str(master.port), "127.0.0.1"
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        store = f"tcp://127.0.0.1:{master.port}"
        def work(rank):
            # The connection of `master` cannot be shared by several processes.
            server = dist.TCPStore("127.0.0.1", master.port, is_master=False)
            if rank:
                server.wait([f"joined {rank - 1}"])
            init(rank, world_size=None)
            server.set(f"joined {rank}", "")
            agent = rpc.api._get_current_rpc_agent()
            assert not agent.is_static_group
            names = sorted(one.name for one in agent.get_worker_infos())
            assert names[: rank + 1] == [f"w{one}" for one in range(rank + 1)], names
            for other in range(rank):
                assert rpc.rpc_sync(f"w{other}", max, args=(1, 2)) == 2
            server.wait(["joined 2"])
            if rank == 2:
                rpc.shutdown()
                server.set("left", "")
            else:
                server.wait(["left"])
                assert sorted(one.name for one in agent.get_worker_infos()) == ["w0", "w1"]
                assert rpc.rpc_sync(f"w{1 - rank}", max, args=(3, 4)) == 4
                server.set(f"done {rank}", "")
                server.wait(["done 0", "done 1"])
                rpc.shutdown()
        workers(work, 3)
        """
    )


def test_members_with_and_without_a_world_size_do_not_mix() -> None:
    run_workers(
        """
        found = dist.FileStore(folder + "/mixed", -1)
        ferry._agree_on_kind(found, True)
        ferry._agree_on_kind(found, True)
        try:
            ferry._agree_on_kind(found, False)
        except RuntimeError as error:
            assert "mixes statically and dynamically" in str(error)
        else:
            raise AssertionError
        """
    )


def test_shutdown_without_grace_ends_the_calls_under_way() -> None:
    run_workers(
        """
        import time
        def work(rank):
            init(rank)
            if rank == 0:
                slow = rpc.rpc_async("w1", time.sleep, args=(30,))
                began = time.monotonic()
                rpc.shutdown(graceful=False)
                try:
                    slow.wait()
                except RuntimeError as error:
                    assert time.monotonic() - began < 10, error
                else:
                    raise AssertionError
                os._exit(0)
            time.sleep(3)
            rpc.shutdown(graceful=False)
            os._exit(0)
        workers(work)
        """
    )


@pytest.mark.parametrize("how", ["is killed", "leaves"])
def test_a_caller_survives_an_owner_that_ends_while_it_creates_references(how: str) -> None:
    """torch's callback of a creation throws if the creation has failed."""
    run_workers(
        """
        import signal, time
        def sleep(seconds, folder):
            open(folder + "/began", "w").close()
            time.sleep(seconds)
        def work(rank):
            init(rank)
            if rank == 0:
                pid = rpc.rpc_sync("w1", os.getpid)
                references = [rpc.remote("w1", sleep, args=(60, folder)) for _ in range(3)]
                call = rpc.rpc_async("w1", time.sleep, args=(60,))
                until = time.monotonic() + 60
                while not os.path.exists(folder + "/began"):
                    assert time.monotonic() < until
                    time.sleep(0.01)
                os.kill(pid, HOW)
                try:
                    call.wait()
                except RuntimeError as error:
                    assert "w1" in str(error), error
                else:
                    raise AssertionError
                assert rpc.rpc_sync("w0", max, args=(1, 2)) == 2
            else:
                signal.signal(signal.SIGUSR1, lambda *_: (rpc.shutdown(graceful=False), os._exit(0)))
                time.sleep(60)
            rpc.shutdown(graceful=False)  # waits for the threads that run the callbacks
        workers(work, killed=KILLED)
        """.replace("HOW", "signal.SIGKILL" if how == "is killed" else "signal.SIGUSR1").replace(
            "KILLED", "[1]" if how == "is killed" else "[]"
        )
    )


# ---- messages


def test_a_transposed_tensor_arrives_transposed() -> None:
    run_workers(
        """
        def stride(x):
            return x.stride()
        def work(rank):
            init(rank)
            x = torch.arange(6.0).view(2, 3).t()
            assert rpc.rpc_sync(f"w{1 - rank}", stride, args=(x,)) == (1, 3)
            back = rpc.rpc_sync(f"w{1 - rank}", torch.neg, args=(x,))
            assert torch.equal(back, -x) and back.stride() == (1, 3)
            rpc.shutdown()
        workers(work)
        """
    )


def test_tensors_that_the_codec_lacks_travel_too() -> None:
    run_workers(
        """
        def echo(*values):
            return values
        def work(rank):
            init(rank)
            q = torch.quantize_per_tensor(torch.arange(8.0), 0.5, 3, torch.quint8)
            sparse = torch.eye(4).to_sparse()
            long = "x" * (1 << 20)
            one, two, three = rpc.rpc_sync(f"w{1 - rank}", echo, args=(q, sparse, long))
            assert one.is_quantized and torch.equal(one.dequantize(), q.dequantize())
            (again,) = rpc.rpc_sync(f"w{1 - rank}", echo, args=(sparse,))
            assert again.is_sparse and torch.equal(again.to_dense(), torch.eye(4)) and three == long
            rpc.shutdown()
        workers(work)
        """
    )


# ---- calls by fewer layers than torch's


def test_a_method_of_a_reference_is_one_message() -> None:
    run_workers(
        """
        class Counter:
            def __init__(self):
                self.count = 0
            def add(self, number, times=1):
                self.count += number * times
                return self.count
            def fail(self):
                raise KeyError("no such thing")
            @staticmethod
            @rpc.functions.async_execution
            def later(number):
                return rpc.rpc_async("w0", int, args=(number,))
        def sent():
            return int(rpc.api._get_current_rpc_agent().get_metrics()["agent.calls_sent"])
        def hold(reference):
            return reference.rpc_sync().add(100)
        def work(rank):
            init(rank)
            if rank == 0:
                counter = rpc.remote("w1", Counter)
                assert counter.rpc_sync().add(1) == 1
                here, there = sent(), rpc.rpc_sync("w1", sent)
                for i in range(10):
                    assert counter.rpc_sync(timeout=5).add(1, times=2) == 3 + 2 * i
                assert sent() == here + 11 and rpc.rpc_sync("w1", sent) == there
                try:
                    counter.rpc_sync().fail()
                except KeyError as error:
                    assert "no such thing" in str(error)
                else:
                    raise AssertionError
                assert counter.rpc_sync().later(7) == 7
                assert rpc.rpc_sync("w1", hold, args=(counter,)) == 121  # it is its owner there
                assert counter.rpc_async().add(1).wait() == 122 and counter.to_here().count == 122
                del counter
            rpc.shutdown()
        workers(work)
        """
    )


def test_calls_end_as_with_torch() -> None:
    run_workers(
        """
        import time
        from torch.distributed import autograd
        class Odd(Exception):
            def __init__(self, one, two):
                super().__init__(one, two)
        def gone():
            return 1
        def odd():
            raise Odd(1, 2)
        def unsendable():
            return lambda: 1
        def double(x, *, more=0):
            return x * 2 + more
        def nested(to, depth):
            return 1 + rpc.rpc_sync(to, nested, args=(f"w{depth % 2}", depth - 1)) if depth else 0
        ran = []
        def slow(seconds):
            time.sleep(seconds)
            ran.append(seconds)
        def error_of(function, *args, **options):
            try:
                rpc.rpc_sync("w1", function, args=args, **options)
            except Exception as error:
                return error
        def work(rank):
            if rank == 1:
                del globals()["gone"]
            init(rank)
            if rank == 0:
                missing = error_of(gone)
                assert type(missing) is AttributeError and "Default RPC pickler" in str(missing), missing
                assert "Failed to create original exception" in str(error_of(odd))
                assert "pickle" in str(error_of(unsendable))
                assert "RPC ran for more than set timeout (100 ms)" in str(error_of(slow, 0.5, timeout=0.1))
                assert type(error_of(double)) is TypeError and type(error_of(int, "x")) is ValueError
                assert rpc.rpc_sync("w1", double, args=(torch.ones(3),), kwargs={"more": 1}).tolist() == [3.0] * 3
                assert rpc.rpc_sync(1, double, args=(2,)) == rpc.rpc_sync(rpc.get_worker_info("w1"), double, args=(2,))
                assert rpc.rpc_sync("w0", double, args=(4,)) == 8 and rpc.rpc_sync("w1", nested, args=("w0", 20)) == 20
                with autograd.context() as context:
                    x = torch.ones(3, requires_grad=True)
                    autograd.backward(context, [rpc.rpc_sync("w1", double, args=(x,)).sum()])
                    assert autograd.get_gradients(context)[x].tolist() == [2.0] * 3
            rpc.shutdown()
            assert ran == ([0.5] if rank == 1 else [])  # it waits for the call that had timed out
        workers(work)
        """
    )


def test_sends_fail_and_are_late_as_the_faults_say() -> None:
    run_workers(
        """
        import time
        def make():
            return 1
        backend_registry.register_backend("FAULTY", ferry._construct_options, ferry._init_backend)
        rpc.BackendType = backend_registry.BackendType
        def work(rank):
            rpc.init_rpc(f"w{rank}", backend=rpc.BackendType.FAULTY, rank=rank, world_size=2,
                rpc_backend_options=ferry._FaultyOptions(init_method=store, messages_to_fail=["PYTHON_REMOTE_CALL"],
                    num_fail_sends=1, messages_to_delay={"SCRIPT_CALL": 0.3}))
            if rank == 0:
                began = time.monotonic()
                rpc.rpc_sync("w1", torch.add, args=(torch.ones(1), 1))
                assert time.monotonic() - began > 0.29
                try:
                    rpc.rpc_sync("w1", torch.add, args=(torch.ones(1), 1), timeout=0.1)
                except RuntimeError as error:
                    assert "RPC ran for more than" in str(error)
                else:
                    raise AssertionError
                try:
                    rpc.remote("w1", make).to_here()
                except RuntimeError as error:  # to_here() says the second if the creation has failed by then
                    assert "intentionally" in str(error) or "RRef creation" in str(error), error
                else:
                    raise AssertionError
            rpc.shutdown()
        workers(work)
        """
    )


def test_a_reference_that_is_dropped_before_it_exists_leaves_nothing_at_its_owner() -> None:
    run_workers(
        """
        import threading, time
        go, ran = threading.Event(), threading.Event()
        def held():
            go.wait(60)
            ran.set()
            return 1
        def let_go():
            go.set()
            return ran.wait(60)
        def counted():
            found = rpc._rref_context_get_debug_info()
            return int(found["num_owner_rrefs"]), int(found["num_forks"])
        def work(rank):
            init(rank)
            if rank == 0:
                assert rpc.remote("w1", max, args=(0, 1)).to_here() == 1  # one that is dropped afterwards
                late = rpc.remote("w1", held, timeout=0.1)
                try:
                    late._get_future().wait()
                except RuntimeError as error:
                    assert "RPC ran for more than" in str(error)
                else:
                    raise AssertionError
                del late
                assert rpc.rpc_sync("w1", let_go)  # held() returns, and only then the owner counts the reference
                until = time.monotonic() + 10
                while rpc.rpc_sync("w1", counted) != (0, 0):
                    assert time.monotonic() < until
                    time.sleep(0.05)
            rpc.shutdown()
        rpc.api._ignore_rref_leak = False
        workers(work)
        """
    )


def test_a_slow_call_after_quick_ones_ends() -> None:
    run_workers(
        """
        import time
        def work(rank):
            init(rank)
            if rank == 0:
                for i in range(100):
                    rpc.rpc_sync("w1", max, args=(1, 2))
                    if i % 10 == 9:
                        rpc.rpc_sync("w1", time.sleep, args=(0.05,), timeout=20)
            rpc.shutdown()
        workers(work)
        """
    )


# ---- distributed autograd


def test_a_backward_pass_waits_for_all_gradients_of_requests_that_come_together(tmp_path: Path) -> None:
    library = tmp_path / "slow_backward.so"
    source = Path(__file__).parent / "programs" / "slow_backward.cpp"
    subprocess.run([os.environ.get("CXX", "c++"), "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    run_python(
        WORKERS
        + textwrap.dedent(
            """
            import torch.distributed.autograd as dist_autograd
            weight = torch.ones(1, requires_grad=True)
            def inner(values):
                return values * weight
            def outer(values):
                return rpc.rpc_sync("w2", inner, args=(values,)) * weight
            def gradient(context):
                return dist_autograd.get_gradients(context).get(weight)
            def work(rank):
                os.environ["SLOW_BACKWARD_MS"] = ["0", "20", "150"][rank]
                init(rank, world_size=3)
                wrong = []
                for _ in range(6 if rank == 0 else 0):
                    with dist_autograd.context() as context:
                        calls = [rpc.rpc_async("w1", outer, args=(torch.ones(5),)) for _ in range(4)]
                        dist_autograd.backward(context, [sum(call.wait().sum() for call in calls)])
                        for name in ("w2", "w1"):
                            if (found := rpc.rpc_sync(name, gradient, args=(context,))) != torch.tensor([20.0]):
                                wrong.append((name, found))
                rpc.shutdown()
                assert not wrong, wrong
            workers(work, 3)
            """
        ),
        LD_PRELOAD=str(library),
    )


# ---- programs


@pytest.mark.parametrize(
    "program", ["parameter_server", "reinforcement_learning", "batch_updates", "split_rnn", "pipeline"]
)
def test_a_program_prints_the_same_on_both_backends(program: str, tmp_path: Path) -> None:
    ours = launch(program, "torch on tensorferry", tmp_path)
    assert ours.count("\n") >= 2
    # Now and then TensorPipe loses gradients of micro-batches: rpc/torch/backward_passes.h says how.
    expected = launch(program, "torch", tmp_path)
    assert ours == expected or ours == launch(program, "torch", tmp_path)


def test_a_fixed_twentieth_of_pytorchs_suite_passes(tmp_path: Path) -> None:
    run_a_part("torch_rpc", 20, tmp_path)
