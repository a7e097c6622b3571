"""tensorferry_core, the package without torch, beside agents with torch: calls in both directions, errors, groups."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorferry
import torch
from tensorferry import errors

TREE = Path(__file__).parents[2]
PACKAGE = Path(tensorferry.__file__).parent.parent / "tensorferry_core"
LIBRARY = PACKAGE / "libtensorferry_c.so"

#: What a program without torch begins with. An import of torch fails in it.
PRELUDE = """
import sys
sys.modules["torch"] = None
import numpy as np
import tensorferry_core as tf
from tensorferry_core import errors
def raised(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")
"""


class Colour:
    """Pickled, because it has no fields."""


class Odd(Exception):
    pass


def fail(kind: str) -> None:
    if kind == "value":
        raise ValueError("seven is odd")
    if kind == "odd":
        raise Odd("no other process knows this class")
    raise errors.NotFound("no such shelf")


@pytest.fixture(scope="module")
def store() -> Iterator[tuple[str, Any]]:
    with_store = tensorferry.StoreServer()
    yield f"store://127.0.0.1:{with_store.port}", tensorferry.connect_store("127.0.0.1", with_store.port)


@pytest.fixture(scope="module")
def server(store: tuple[str, Any]) -> Iterator[tensorferry.Agent]:
    agent = tensorferry.Agent("server", store=store[1])
    agent.expose(lambda *args, **kwargs: [list(args), kwargs], name="echo")
    agent.expose(lambda value: f"{type(value).__name__} {getattr(value, 'dtype', '')}", name="kind")
    agent.expose(lambda: torch.arange(4, dtype=torch.bfloat16), name="bfloat16")
    agent.expose(lambda: Colour(), name="colour")
    agent.expose(fail, name="fail")
    release = threading.Event()
    agent.expose(lambda: release.wait(60), name="block")
    agent.expose(release.set, name="release")
    yield agent
    release.set()
    agent.shutdown(graceful=False)


def start(store: tuple[str, Any], body: str, *, name: str = "client", python: str = sys.executable) -> Any:
    program = (
        f"{PRELUDE}\nagent = tf.Agent({name!r}, rendezvous={store[0]!r})\n{textwrap.dedent(body)}\nagent.leave()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    return subprocess.Popen(
        [python, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def run(store: tuple[str, Any], body: str, **options: Any) -> str:
    """Runs a program whose agent is `agent`, and returns what it prints."""
    process = start(store, body, **options)
    out = process.communicate(timeout=120)[0]
    assert process.returncode == 0, out
    return str(out)


def test_arrays_arrive_as_tensors_and_tensors_as_arrays(store: Any, server: Any) -> None:
    run(
        store,
        """
        assert agent.call("server", "kind", (np.ones(3, "f4"),)) == "Tensor torch.float32"
        for dtype in "u1 i1 i2 i4 i8 f2 f4 f8 c8 c16 ? u2 u4 u8".split():
            whole = np.arange(24).reshape(4, 6).astype(dtype)
            swapped = whole.astype(whole.dtype.newbyteorder())
            given = [whole, whole.T, whole[::-1], whole[:, ::2], whole[:0], whole[1, 2], swapped]
            got, _ = agent.call("server", "echo", given)
            for a, b in zip(given, got):
                a = np.asarray(a)
                b = np.asarray(b)
                assert a.shape == b.shape and (a == b).all(), (dtype, a, b)
                assert isinstance(a[()], np.generic) or a.dtype.kind == b.dtype.kind
        got = agent.call("server", "bfloat16")
        assert got.dtype == "bfloat16" and got.shape == (4,)
        assert agent.call("server", "kind", (got,)) == "Tensor torch.bfloat16"
        big = np.random.default_rng(0).random((1000, 300))
        back = agent.call("server", "echo", (big, big))[0]
        assert (back[0] == big).all() and back[0].flags.writeable
        """,
    )


ONLY_DLPACK = """
class OnlyDlpack:
    'What numpy cannot see: an object with the two methods of DLPack alone.'
    def __init__(self, array):
        self.array, self.device = array, (1, 0)
    def __dlpack_device__(self):
        return self.device
class Old(OnlyDlpack):
    'A producer from before DLPack 1.0.'
    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()
class New(OnlyDlpack):
    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        return self.array.__dlpack__(max_version=max_version)
"""


def test_objects_of_dlpack_arrive_as_arguments_and_as_results(store: Any, server: Any) -> None:
    body = f"""{ONLY_DLPACK}
import gc, time, weakref
for kind in (Old, New):
    for dtype in "u1 i1 i2 i4 i8 f2 f4 f8 c8 c16 ? u2 u4 u8".split():
        whole = np.arange(24).reshape(4, 6).astype(dtype)
        given = [whole, whole.T, whole[:, ::2], whole[1:, 1:], whole[:0], whole[2, 3, ...]]
        got, named = agent.call("server", "echo", [kind(each) for each in given], dict(last=kind(whole)))
        for sent, came in zip(given + [whole], got + [named["last"]]):
            assert np.asarray(came).shape == sent.shape and (came == sent).all(), (dtype, sent, came)
    assert agent.call("server", "kind", (kind(np.ones(3, "f4")),)) == "Tensor torch.float32"
fixed = np.ones(3)
fixed.flags.writeable = False
assert (agent.call("server", "echo", (New(fixed),))[0][0] == 1).all()
assert "DLPack" in str(raised(agent.call, "server", "echo", (Old(fixed),)))
assert "negative stride" in str(raised(agent.call, "server", "echo", (New(np.ones(3)[::-1]),)))
on_gpu = New(np.ones(3))
on_gpu.device = (2, 0)
assert "copy it to the host" in str(raised(agent.call, "server", "echo", (on_gpu,)))
big = np.zeros(100_000)
gone = weakref.ref(big)
agent.call("server", "echo", (New(big),))
del big
until = time.monotonic() + 60
while gone() is not None and time.monotonic() < until:
    gc.collect()
    time.sleep(0.01)
assert gone() is None, "its memory is given back when the peer has it"
kept = np.arange(50_000.0)
agent.expose(lambda: New(kept), name="new")
agent.expose(lambda: [Old(kept[::2]), dict(small=New(np.float32([1, 2])))], name="old")
print("ready", flush=True)
sys.stdin.read()
"""
    process = start(store, body, name="dlpack")
    assert process.stdout.readline() == "ready\n"
    for _ in range(3):
        assert torch.equal(server.rpc_sync("dlpack", "new"), torch.arange(50_000.0, dtype=torch.float64))
    half, named = server.rpc_sync("dlpack", "old")
    assert torch.equal(half, torch.arange(0.0, 50_000, 2, dtype=torch.float64)) and named["small"].tolist() == [1, 2]
    process.stdin.close()
    assert process.wait(60) == 0


def test_memory_is_given_back_though_no_call_follows(store: Any) -> None:
    """The peer may read the arguments of a call that has timed out until it dies."""
    peer = start(store, 'agent.expose(len, name="len")\nprint("ready", flush=True)\nsys.stdin.read()', name="stopped")
    assert peer.stdout.readline() == "ready\n"
    body = f"""
    import gc, os, signal, time, weakref
    small = np.zeros(10)
    assert agent.call("stopped", "len", (small,), require="cma") == 10
    os.kill({peer.pid}, signal.SIGSTOP)
    big = np.zeros(1_000_000)
    gone = weakref.ref(big)
    error = raised(agent.call, "stopped", "len", (big,), require="cma", timeout=0.2)
    assert isinstance(error, errors.DeadlineExceeded), error
    del big, error
    gc.collect()
    assert gone() is not None
    os.kill({peer.pid}, signal.SIGKILL)
    until = time.monotonic() + 60
    while gone() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert gone() is None
    """
    run(store, body)
    peer.communicate()


def test_values_arrive_as_what_they_were(store: Any, server: Any) -> None:
    run(
        store,
        r"""
        values = (None, True, 5, -2**40, 2**70, -2**66, 1.5, float("inf"), 2j, "h\xe9\ud800", b"x" * 20000, "y" * 20000,
                  bytearray(b"abc"), (1, (2,)), [1, [2]], {"a": {1: 2}, (3, 4): None}, {1, 2}, frozenset([3]), (), [])
        args, kwargs = agent.call("server", "echo", values, {"by": values, "name": 1})
        assert tuple(args) == values and kwargs == {"by": values, "name": 1}, (args, kwargs)
        assert [type(value) for value in args] == [type(value) for value in values]
        assert "can be sent" not in str(agent.call("server", "echo", (1,)))
        for wrong in (object(), np.array(["a"]), lambda: 0):
            assert isinstance(raised(agent.call, "server", "echo", (wrong,)), errors.InvalidArgument)
        deep = []
        for _ in range(300):
            deep = [deep]
        assert "200 deep" in str(raised(agent.call, "server", "echo", (deep,)))
        error = raised(agent.call, "server", "colour")
        assert isinstance(error, errors.InvalidArgument) and "only Python can read" in str(error), error
        """,
    )


def test_exceptions_of_the_server_keep_their_type_and_traceback(store: Any, server: Any) -> None:
    run(
        store,
        """
        error = raised(agent.call, "server", "fail", ("value",))
        assert type(error) is ValueError and str(error) == "seven is odd"
        assert 'on "server"' in str(error.__cause__) and "in fail" in str(error.__cause__)
        error = raised(agent.call, "server", "fail", ("odd",))
        assert type(error) is errors.RemoteError, repr(error)
        assert error.type_name.endswith("test_core.Odd") and error.peer == "server", (error.type_name, error)
        assert type(raised(agent.call, "server", "fail", ("lost",))) is errors.NotFound
        assert type(raised(agent.call, "server", "nothing")) is errors.NotFound
        assert type(raised(agent.call, "stranger", "nothing")) is errors.NotFound
        assert type(raised(agent.call, "server", "block", timeout=0.2)) is errors.DeadlineExceeded
        """,
    )


def test_an_agent_with_torch_calls_functions_of_one_without(store: Any, server: Any) -> None:
    body = """
    def add(a, b=1, *, c=0):
        assert isinstance(a, np.ndarray)
        return a + b + c
    def broken():
        return {}["missing"]
    async def later(x):
        return x * 2
    agent.expose(add); agent.expose(broken); agent.expose(later)
    agent.expose(lambda: agent.call("server", "kind", (np.ones(2),)), name="back")
    agent.expose(lambda x: x, name="same")
    print("ready", flush=True)
    sys.stdin.read()
    """
    process = start(store, body, name="worker")
    assert process.stdout.readline() == "ready\n"
    call = server.rpc_sync
    assert call("worker", "add", args=(torch.ones(3),), kwargs={"c": 5}).tolist() == [7, 7, 7]
    assert call("worker", "add", args=(torch.ones(2), 2)).tolist() == [3, 3]
    assert call("worker", "later", args=(21,)) == 42
    assert call("worker", "back") == "Tensor torch.float64"
    with pytest.raises(KeyError, match="missing") as failed:
        call("worker", "broken")
    assert "in broken" in str(failed.value.__cause__)
    with pytest.raises(TypeError, match="add"):
        call("worker", "add")
    with pytest.raises(errors.InvalidArgument, match="without Python and torch"):
        call("worker", "same", args=(Colour(),))
    with pytest.raises(errors.NotFound):
        call("worker", "absent")
    futures = [server.rpc_async("worker", "same", args=(torch.full((1000,), i),)) for i in range(100)]
    assert [int(future.wait()[0]) for future in futures] == list(range(100))
    process.stdin.close()
    assert process.wait(60) == 0


def test_futures_complete_and_can_be_awaited_and_cancelled(store: Any, server: Any) -> None:
    run(
        store,
        """
        import asyncio, concurrent.futures
        futures = [agent.call_async("server", "echo", (i,)) for i in range(200)]
        done, _ = concurrent.futures.wait(futures, timeout=60)
        assert [future.result()[0] for future in futures] == [[i] for i in range(200)] and len(done) == 200
        async def both():
            calls = [agent.call_async("server", name, (1,)) for name in ("echo", "kind")]
            return await asyncio.gather(*calls)
        assert asyncio.run(both()) == [[[1], {}], "int "]
        stuck = agent.call_async("server", "block", timeout=0)
        assert stuck.cancel()
        assert type(raised(stuck.result, 60)) is errors.Cancelled and not stuck.cancel()
        left = agent.call_async("server", "block", timeout=0)
        agent.leave()
        assert type(raised(left.result, 60)) is errors.AgentClosed
        assert type(raised(agent.call, "server", "echo")) is errors.AgentClosed
        """,
    )


def test_an_interrupt_ends_a_call_that_waits(store: Any, server: Any) -> None:
    body = """
    try:
        print("waiting", flush=True)
        agent.call("server", "block", timeout=0)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    """
    process = start(store, body)
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0] == "interrupted\n"
    assert process.returncode == 0


def test_memory_of_arrays_is_released(store: Any, server: Any) -> None:
    run(
        store,
        """
        import time, weakref
        for _ in range(50):
            agent.call("server", "echo", (np.zeros(100_000),))
        futures = [agent.call_async("server", "echo", (np.zeros(100_000),)) for _ in range(20)]
        for future in futures:
            future.result()
        until = time.monotonic() + 60
        while agent._memory and time.monotonic() < until:
            time.sleep(0.01)
        assert not agent._memory
        """,
    )


def test_groups_have_ranks_with_torch_and_without(store: Any, server: Any) -> None:
    body = """
    group = agent.group(["server", "rank1"], timeout=60)
    assert (group.rank, group.size) == (1, 2)
    x = np.arange(1000, dtype="f4")
    assert group.all_reduce(x).result() is x and (x == np.arange(1000) * 3).all()
    assert (group.all_reduce(np.full(3, 4.0), "max").result() == 8).all()
    got = group.all_gather(np.array([1, 1])).result()
    assert [part.tolist() for part in got] == [[0, 0], [1, 1]]
    y = np.zeros(4)
    group.broadcast(y).result()
    assert (y == 7).all()
    out = np.zeros(2)
    group.reduce_scatter(out, [np.ones(2), np.ones(2)]).result()
    assert (out == 2).all()
    outs = [np.zeros(1), np.zeros(1)]
    group.all_to_all(outs, [np.array([10.0]), np.array([11.0])]).result()
    assert [part.item() for part in outs] == [1, 11]
    assert group.gather(np.array([5])).result() == []
    group.scatter(out).result()
    assert (out == 9).all()
    group.reduce(np.ones(2)).result()
    group.send(np.array([3.0]), 0, tag=4).result()
    z = np.zeros(1)
    assert group.receive(z, tag=5).result() == 0 and z[0] == 6
    group.barrier().result()
    assert isinstance(raised(group.all_reduce, np.zeros(2), "mean"), errors.InvalidArgument)
    assert isinstance(raised(group.all_reduce, [1.0, 2.0]), errors.InvalidArgument)
    """
    process = start(store, body, name="rank1")
    group = tensorferry.collectives.form_group(["server", "rank1"], agent=server, timeout=60)
    group.all_reduce(torch.arange(1000, dtype=torch.float32) * 2).wait()
    group.all_reduce(torch.full((3,), 8.0, dtype=torch.float64), "max").wait()
    group.all_gather(torch.zeros(2, dtype=torch.int64)).wait()
    group.broadcast(torch.full((4,), 7.0, dtype=torch.float64)).wait()
    two = [torch.ones(2, dtype=torch.float64)] * 2
    group.reduce_scatter(torch.zeros(2, dtype=torch.float64), two).wait()
    outs = [torch.zeros(1, dtype=torch.float64) for _ in range(2)]
    group.all_to_all(outs, [torch.tensor([0.0], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)]).wait()
    assert [out.item() for out in outs] == [0, 10]
    assert [part.item() for part in group.gather(torch.tensor([4])).wait()] == [4, 5]
    group.scatter(torch.zeros(2, dtype=torch.float64), [torch.full((2,), 9.0, dtype=torch.float64)] * 2).wait()
    total = group.reduce(torch.ones(2, dtype=torch.float64)).wait()
    assert total.tolist() == [2, 2]
    got = torch.zeros(1, dtype=torch.float64)
    assert group.receive(got, tag=4).wait() == 1 and got.item() == 3
    group.send(torch.tensor([6.0], dtype=torch.float64), 1, tag=5).wait()
    group.barrier().wait()
    assert process.wait(60) == 0


def test_keys_and_tls_are_those_of_other_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORFERRY_KEY", "a key of the test's own")
    served = tensorferry.StoreServer(tls="key")
    store = tensorferry.connect_store("127.0.0.1", served.port, tls="key")
    agent = tensorferry.Agent("server", store=store, tls="key", unix_sockets=False)
    agent.expose(lambda value: value, name="same")
    program = f"""{PRELUDE}
join = dict(rendezvous="store://127.0.0.1:{served.port}", unix_sockets=False, join_timeout=20)
with tf.Agent("client", tls="key", **join) as agent:
    assert (agent.call("server", "same", (np.ones(100_000),)) == 1).all()
    assert "up, calls by tcp" in agent.link_state("server")
assert type(raised(tf.Agent, "plain", tls="off", **join)) is not AssertionError
assert type(raised(tf.Agent, "other", tls="key", key="another key of the test's", **join)) is errors.Unauthenticated
assert type(raised(tf.Agent, "other", tls="what", **join)) is errors.InvalidArgument
assert "no option" in str(raised(tf.Agent, "other", colour="red", **join))
assert "no value" in str(raised(tf.Agent, "other", rank="first", **join))
"""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run([sys.executable, "-c", program], env=environment, timeout=120, check=True)
    agent.shutdown(graceful=False)


def test_agents_without_torch_need_no_other(tmp_path: Path) -> None:
    program = f"""{PRELUDE}
import threading
with tf.StoreServer() as store:
    names = ["a", "b", "c"]
    def work(name, rank):
        with tf.Agent(name, rank=rank, world_size=3, rendezvous=store.url, functions={{"name": lambda: name}}) as agent:
            for peer in names:
                assert agent.call(peer, "name") == peer
            assert agent.group(names).all_reduce(np.array([rank])).result()[0] == 3
    threads = [threading.Thread(target=work, args=(name, rank)) for rank, name in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("done", "torch" in [name for name, module in sys.modules.items() if module])
"""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, timeout=120, check=True, capture_output=True, text=True
    )
    assert done.stdout == "done False\n", done.stderr


def test_a_callee_with_too_many_unanswered_calls_refuses_more(store: Any, server: Any) -> None:
    program = f"""{PRELUDE}
import threading
go = threading.Event()
functions = {{"wait": lambda: go.wait(60)}}
agent = tf.Agent("narrow", rendezvous={store[0]!r}, threads=1, max_queued_calls=3, functions=functions)
print("ready", flush=True)
sys.stdin.readline()
go.set()
sys.stdin.read()
"""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdin and process.stdout
    assert process.stdout.readline() == "ready\n"
    futures = [server.rpc_async("narrow", "wait") for _ in range(10)]
    ended = tensorferry.as_completed(futures, timeout=120)
    for _ in range(7):  # calls begin in no order, and the refused ones end while three run or wait
        with pytest.raises(errors.ResourceExhausted):
            next(ended).wait()
    process.stdin.write("\n")
    process.stdin.flush()
    assert [future.wait() for future in ended] == [True] * 3
    process.stdin.close()
    assert process.wait(60) == 0


@pytest.mark.parametrize("version", ["3.9", "3.10", "3.12", "3.13", "3.14"])
def test_other_interpreters_run_it(version: str, store: Any, server: Any) -> None:
    python = shutil.which(f"python{version}")
    usable = python and subprocess.run([python, "-c", "import numpy"], capture_output=True).returncode == 0
    if not python or not usable:
        pytest.skip(f"there is no Python {version} with numpy")
    out = run(store, "print(agent.call('server', 'kind', (np.ones(2),)))", python=python)
    assert out == "Tensor torch.float64\n"


def test_the_library_shows_its_functions_alone_and_needs_the_c_library_alone() -> None:
    if shutil.which("nm") is None or shutil.which("readelf") is None:
        pytest.skip("there are no binutils")
    names = subprocess.run(["nm", "-D", "--defined-only", LIBRARY], capture_output=True, text=True, check=True).stdout
    shown = {line.split()[-1] for line in names.splitlines()}
    header = (TREE / "include/tensorferry/c.h").read_text()
    declared = {part.split("(")[0].split()[-1].lstrip("*") for part in header.split("TFERRY_API ")[2:] if "(" in part}
    assert shown == declared
    for name in declared:
        assert hasattr(ctypes.CDLL(str(LIBRARY)), name)
    needed = subprocess.run(["readelf", "-d", LIBRARY], capture_output=True, text=True, check=True).stdout
    libraries = [line.split("[")[1].rstrip("]") for line in needed.splitlines() if "NEEDED" in line]
    if "libcrypto.so.3" in libraries:
        pytest.skip("the build found no static libcrypto.a, and needs the shared one")
    of_glibc = {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
    of_glibc |= {"libpthread.so.0", "libdl.so.2"}  # apart from libc.so.6 before 2.34: scripts/old-glibc.sh
    assert set(libraries) <= of_glibc, libraries


C_PROGRAM = r"""
#include <stdio.h>
#include <string.h>
#include "tensorferry/c.h"

int main(int count, char** arguments) {
  const char* options[] = {"name", "program in C", "rendezvous", arguments[count - 1]};
  tferry_agent* agent = NULL;
  tferry_error* error = tferry_agent_join(options, 2, NULL, 0, &agent);
  float elements[3] = {1, 2, 3};
  int64_t shape[2] = {3, 1};
  tferry_value value;
  tferry_future* future = NULL;
  tferry_message* message = NULL;
  memset(&value, 0, sizeof value);
  value.kind = TFERRY_ARRAY;
  value.dtype = 6;
  value.dimensions = 1;
  value.data = elements;
  value.shape = shape;
  tferry_arguments given = {&value, 1, 1, NULL, 0, 0};
  if (error == NULL) error = tferry_agent_call(agent, NULL, "server", "kind", &given, &future);
  if (error == NULL) {
    tferry_future_wait(future, -1);
    error = tferry_future_take(future, &message);
  }
  if (error != NULL) return printf("%s: %s\n", error->name, error->text), 1;
  size_t values = 0;
  const tferry_value* result = tferry_message_values(message, &values);
  printf("%.*s\n", (int)result->count, (const char*)result->data);
  tferry_message_free(message);
  tferry_future_free(future);
  tferry_agent_free(agent);
  return 0;
}
"""


def test_the_header_is_c_and_a_program_in_c_calls_a_server(store: Any, server: Any, tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "program.c").write_text(C_PROGRAM)
    subprocess.run(
        [
            compiler, "-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{TREE}/include", "program.c",
            LIBRARY, f"-Wl,-rpath,{PACKAGE}", "-o", "program",
        ],
        cwd=tmp_path,
        check=True,
    )  # fmt: skip
    out = subprocess.run([tmp_path / "program", store[0]], capture_output=True, text=True, timeout=60)
    assert out.stdout == "Tensor torch.float32\n", out.stdout + out.stderr


def test_constants_of_the_header_are_those_of_the_package() -> None:
    sys.path.insert(0, str(PACKAGE.parent))
    from tensorferry_core import _values, group

    header = (TREE / "include/tensorferry/c.h").read_text()
    numbers = {
        line.split("=")[0].strip(): int(line.split("=")[1].split(",")[0])
        for line in header.splitlines()
        if line.startswith("  TFERRY_") and "=" in line
    }
    for name in ("NONE", "BOOL", "INTEGER", "REAL", "TEXT", "TUPLE", "DICT", "SET", "FROZENSET", "ARRAY"):
        assert getattr(_values, name) == numbers[f"TFERRY_{name}"]
    for name in ("BARRIER", "ALL_REDUCE", "SCATTER", "ALL_TO_ALL", "RECEIVE"):
        assert getattr(group, f"_{name}") == numbers[f"TFERRY_{name}"]
    dtypes = (TREE / "include/tensorferry/dtype.h").read_text()
    for number, (name, _) in _values._OTHERS.items():
        assert f"  {name} = {number}," in dtypes
    for number, dtype in _values._NUMPY.items():
        name = "boolean" if dtype == np.dtype("?") else dtype.name
        assert f"  {name} = {number}," in dtypes
