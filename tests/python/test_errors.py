"""How calls fail: exceptions as their own types, time-outs, lost peers, refusals."""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import runpy
import sys
import threading
import time
from pathlib import Path

import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
from conftest import eventually
from tensorferry import errors


class Detailed(Exception):
    def __init__(self, what, code):
        super().__init__(what, code)
        self.what = what
        self.code = code


class NeedsKeyword(Exception):
    """Its pickle cannot be loaded: __init__ wants more than the pickle brings."""

    def __init__(self, text, *, code):
        super().__init__(text)
        self.code = code


class HoldsALock(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()  # cannot be pickled


def raise_(kind, *args):
    raise kind(*args)


def raise_needs_keyword():
    raise NeedsKeyword("odd", code=7)


def raise_local():
    class Local(Exception):
        pass

    raise Local("only here")


def raise_chained():
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise ValueError("outer") from error


def raise_with_bad_text():
    class Bad(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    raise Bad


def leave_the_interpreter():
    sys.exit(5)


def unsendable():
    return threading.Lock()


def unsendable_tensor():
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)


def nested(to):
    rpc.rpc_sync(to, raise_, (LookupError, "far away"))


def nested_time_out(to):
    rpc.rpc_sync(to, time.sleep, (2,), timeout=0.1)


class Unloadable:
    def __init__(self):
        pass

    def __reduce__(self):
        return raise_, (ArithmeticError, "cannot be loaded")


class Result:
    pass


def identity(value):
    return value


# ---- exceptions of functions


def test_exceptions_keep_their_type(pair):
    a, _ = pair
    with pytest.raises(IndexError, match=r"out of range"):
        a.rpc_sync("b", list.pop, ([1], 5))
    with pytest.raises(Detailed) as caught:
        a.rpc_sync("b", raise_, (Detailed, "full", 28))
    assert (caught.value.what, caught.value.code) == ("full", 28)
    with pytest.raises(UnicodeDecodeError):
        a.rpc_sync("b", bytes.decode, (b"\xff", "utf-8"))
    with pytest.raises(FileNotFoundError) as missing:
        a.rpc_sync("b", open, ("/no/such/file",))
    assert missing.value.errno == 2
    with pytest.raises(RuntimeError, match=r"size"):
        a.rpc_sync("b", torch.add, (torch.ones(2), torch.ones(3)))


def test_the_remote_traceback_is_the_cause(pair):
    with pytest.raises(ValueError, match=r"outer") as caught:
        pair[0].rpc_sync("b", raise_chained)
    cause = caught.value.__cause__
    assert isinstance(cause, tensorferry.RemoteTraceback)
    assert cause.peer == "b"
    text = str(cause)
    assert 'on "b"' in text
    assert "raise_chained" in text
    assert "KeyError: 'inner'" in text


def test_an_unpicklable_exception_is_rebuilt_from_its_text(pair):
    with pytest.raises(HoldsALock, match=r"locked"):
        pair[0].rpc_sync("b", raise_, (HoldsALock, "locked"))


def test_an_exception_that_cannot_be_rebuilt_is_a_remote_error(pair):
    a, _ = pair
    for function, text in ((raise_needs_keyword, "odd"), (raise_local, "only here"), (raise_with_bad_text, "Bad")):
        with pytest.raises(errors.RemoteError, match=text) as caught:
            a.rpc_sync("b", function)
        assert caught.value.peer == "b"
        assert caught.value.type_name.startswith("test_errors.")
        assert isinstance(caught.value.__cause__, tensorferry.RemoteTraceback)
        assert isinstance(caught.value, RuntimeError)


def test_a_function_that_exits_does_not_end_its_caller(pair):
    with pytest.raises(errors.RemoteError, match=r"SystemExit"):
        pair[0].rpc_sync("b", leave_the_interpreter)
    with pytest.raises(errors.RemoteError, match=r"KeyboardInterrupt"):
        pair[0].rpc_sync("b", raise_, (KeyboardInterrupt,))
    assert pair[0].rpc_sync("b", identity, (1,)) == 1


def test_results_that_cannot_be_sent_are_an_error(pair):
    with pytest.raises(TypeError, match=r"lock"):
        pair[0].rpc_sync("b", unsendable)
    with pytest.raises(Exception, match=r"(?i)quanti"):
        pair[0].rpc_sync("b", unsendable_tensor)


def test_arguments_that_the_callee_cannot_load_are_an_error(pair):
    with pytest.raises(ArithmeticError, match=r"cannot be loaded"):
        pair[0].rpc_sync("b", identity, (Unloadable(),))


def test_nested_exceptions_name_every_agent_on_their_path(agents):
    a, _, _ = agents("a"), agents("b"), agents("c")
    with pytest.raises(LookupError, match=r"far away") as caught:
        a.rpc_sync("b", nested, ("c",))
    assert 'on "b"' in str(caught.value.__cause__)
    assert 'on "c"' in str(caught.value.__cause__)
    with pytest.raises(errors.DeadlineExceeded, match=r"c"):
        a.rpc_sync("b", nested_time_out, ("c",))


def test_errors_are_runtime_errors():
    for name in errors.__all__:
        kind = getattr(errors, name)
        if name != "RemoteTraceback":
            assert issubclass(kind, RuntimeError), name
    assert issubclass(errors.DeadlineExceeded, TimeoutError)
    for error in (
        errors.DeadlineExceeded("late"),
        errors.RemoteError("text", "m.T", "b"),
        errors.RemoteTraceback("b", "text"),
    ):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_classes_and_documentation_are_those_of_the_table():
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "errors.py"))
    for path, text in script["texts"]().items():
        assert path.read_text() == text, f"{path} differs from error_codes.h: run `make format`"


# ---- missing functions


def in_main():
    """Stands for a function of the program that was started, as the callee sees it."""


def test_a_missing_module_is_named(pair, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def f():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("only_here")
    assert pair[0].rpc_sync("b", module.f) == 1  # one process: it is there
    function = module.f
    monkeypatch.delattr(module, "f")
    with pytest.raises(errors.NotFound, match=r'"f" in module "only_here" on "b"'):
        pair[0].rpc_sync("b", function)


def define_in_main():
    exec("def of_main():\n    return 1\n", sys.modules["__main__"].__dict__)


def test_a_function_of_another_main_module_is_refused_with_advice(cluster, tmp_path, monkeypatch):
    cluster.start(1)
    define_in_main()
    function = sys.modules["__main__"].of_main
    with pytest.raises(errors.NotFound, match=r'__main__ on "worker1".*put the function in a module'):
        rpc.rpc_sync("worker1", function)
    rpc.rpc_sync("worker1", define_in_main)
    assert rpc.rpc_sync("worker1", function) == 1
    (tmp_path / "not_there.py").write_text("def f():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(errors.NotFound, match='no module "not_there" on "worker1"'):
        rpc.rpc_sync("worker1", importlib.import_module("not_there").f)


# ---- time-outs


def test_a_call_ends_at_its_timeout(pair):
    a, _ = pair
    RELEASED.clear()
    start = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded) as caught:
        a.rpc_sync("b", begin_and_wait, timeout=0.2)
    assert 0.15 < time.monotonic() - start < 10
    assert "b" in str(caught.value)
    assert "begin_and_wait" in str(caught.value)
    with pytest.raises(TimeoutError):
        a.rpc_async("b", begin_and_wait, timeout=0.1).wait()
    RELEASED.set()


def test_the_default_timeout_is_the_agents(agents):
    a = agents("a", timeout=0.2)
    agents("b")
    with pytest.raises(errors.DeadlineExceeded):
        a.rpc_sync("b", time.sleep, (1,))
    assert a.rpc_sync("b", time.sleep, (0.4,), timeout=0) is None  # none
    assert a.rpc_sync("b", time.sleep, (0.4,), timeout=5) is None
    a.timeout = 5
    assert a.rpc_sync("b", time.sleep, (0.4,)) is None
    with pytest.raises(ValueError):
        a.timeout = -1


def test_a_late_reply_does_not_reach_the_next_call(pair):
    a, _ = pair
    for i in range(20):
        with pytest.raises(errors.DeadlineExceeded):
            a.rpc_sync("b", sleep_and_return, (0.02, "late"), timeout=0.005)
        assert a.rpc_sync("b", identity, (i,)) == i


def sleep_and_return(seconds, value):
    time.sleep(seconds)
    return value


# ---- peers that end


def exit_now(code):
    os._exit(code)


def test_a_killed_peer_fails_its_calls_at_once(cluster):
    cluster.start(1)
    assert rpc.rpc_sync("worker1", os.getpid) == cluster.pids[0]
    futures = [rpc.rpc_async("worker1", time.sleep, (30,)) for _ in range(10)]
    time.sleep(0.2)
    cluster.workers[0].process.kill()
    start = time.monotonic()
    for future in futures:
        with pytest.raises(errors.ConnectionLost, match=r"worker1"):
            future.wait()
    assert time.monotonic() - start < 10  # 0.1 s on an idle machine
    with pytest.raises(errors.Error, match=r"worker1"):
        rpc.rpc_sync("worker1", os.getpid, timeout=10)


def test_a_peer_that_dies_in_the_function_is_lost(cluster):
    cluster.start(2)
    with pytest.raises(errors.ConnectionLost, match=r"worker1"):
        rpc.rpc_sync("worker1", exit_now, (3,))
    assert rpc.rpc_sync("worker2", identity, (1,)) == 1  # calls to other peers still work


def test_a_waiting_thread_wakes_at_its_peers_death(cluster):
    cluster.start(1)
    rpc.rpc_sync("worker1", identity, (1,))
    threading.Timer(0.2, cluster.workers[0].process.kill).start()
    start = time.monotonic()
    with pytest.raises(errors.ConnectionLost, match=r"worker1"):
        rpc.rpc_sync("worker1", time.sleep, (30,))
    assert time.monotonic() - start < 10


def test_calls_of_a_departed_agent_fail(agents):
    a, b = agents("a"), agents("b")
    future = a.rpc_async("b", time.sleep, (0.5,))
    a.leave()
    with pytest.raises(errors.AgentClosed):
        future.wait()
    with pytest.raises(errors.AgentClosed):
        a.rpc_sync("b", identity, (1,))
    with pytest.raises(errors.Error, match=r"a"):
        b.rpc_sync("a", identity, (1,), timeout=5)


def test_a_departed_peer_is_named(agents):
    a, b = agents("a"), agents("b")
    assert a.rpc_sync("b", identity, (1,)) == 1
    b.leave()
    with pytest.raises((errors.ConnectionLost, errors.NotFound), match=r"b"):
        a.rpc_sync("b", identity, (1,), timeout=5)


def test_a_restarted_peer_is_a_new_incarnation(agents):
    a, b = agents("a"), agents("b")
    thing = a.remote("b", Result)
    thing.to_here()
    b.leave()
    assert eventually(lambda: comes_back(a, agents))
    with pytest.raises(errors.ConnectionLost, match=r"b"):
        thing.to_here()


def comes_back(a, agents):
    if not any(agent.name == "b" and not agent._left for agent in agents._made):
        agents("b")
    try:
        return a.rpc_sync("b", identity, (2,), timeout=5) == 2
    except errors.Error:
        return False


UNDECODABLE = "a name with \udcff"  # as os.fsdecode gives for a byte that is no UTF-8


def raise_undecodable():
    raise ValueError(UNDECODABLE)


@rpc.functions.async_execution
def undecodable_later():
    future = torch.futures.Future()
    future.set_exception(ValueError(UNDECODABLE))
    return future


@rpc.functions.async_execution
def undecodable_in_a_callback():
    return rpc.rpc_async("b", identity, (1,)).then(lambda _: raise_undecodable())


@pytest.mark.parametrize("function", [raise_undecodable, undecodable_later, undecodable_in_a_callback])
def test_a_text_without_utf_8_arrives(pair, function):
    with pytest.raises(ValueError, match="a name with "):
        pair[0].rpc_sync("b", function)
    assert pair[0].rpc_sync("b", identity, (5,)) == 5
    pair[1].shutdown(timeout=30)


# ---- the limit of handlers


BEGUN = threading.Semaphore(0)
RELEASED = threading.Event()


def begin_and_wait():
    BEGUN.release()
    RELEASED.wait(30)


def occupy(agent):
    """Two calls that run at "b" until ``RELEASED`` is set. Until they run, they wait in the queue too."""
    RELEASED.clear()
    while BEGUN.acquire(blocking=False):
        pass
    calls = [agent.rpc_async("b", begin_and_wait) for _ in range(2)]
    for _ in calls:
        assert BEGUN.acquire(timeout=30)
    return calls


def test_calls_beyond_the_limit_of_handlers_wait_their_turn(agents):
    a = agents("a")
    agents("b", max_threads=4)
    futures = [a.rpc_async("b", time.sleep, (0.2,)) for _ in range(17)]
    assert tensorferry.wait_all(futures) == [None] * 17


def test_calls_beyond_the_queue_are_refused(agents):
    a = agents("a")
    b = agents("b", max_threads=2, max_queued_calls=4)
    futures = occupy(a)
    futures += [a.rpc_async("b", time.sleep, (0,)) for _ in range(4)]
    assert eventually(lambda: b._in_flight()[1] == 6)  # a later call may overtake those that are still under way
    late = a.rpc_async("b", time.sleep, (1,))
    with pytest.raises(errors.ResourceExhausted, match=r"max_queued_calls"):
        late.wait()
    RELEASED.set()
    assert tensorferry.wait_all(futures) == [None] * 6


def test_bytes_beyond_the_queue_are_refused(agents):
    a = agents("a")
    b = agents("b", max_threads=2, max_queued_bytes=1_000_000)
    running = occupy(a)
    waiting = a.rpc_async("b", identity, (torch.ones(200_000),))
    assert eventually(lambda: b._in_flight()[1] == 3)
    late = a.rpc_async("b", identity, (torch.ones(100_000),))
    with pytest.raises(errors.ResourceExhausted, match=r"max_queued_bytes"):
        late.wait()
    RELEASED.set()
    assert torch.equal(waiting.wait(), torch.ones(200_000))
    assert tensorferry.wait_all(running) == [None] * 2


def test_a_waiting_call_that_expires_does_not_run(agents):
    a = agents("a")
    b = agents("b", max_threads=2)
    RAN.clear()
    running = occupy(a)
    with pytest.raises(errors.DeadlineExceeded):
        a.rpc_sync("b", note_that_it_ran, timeout=0.1)
    assert eventually(lambda: b._in_flight()[1] == 2)  # it leaves the queue while both places are taken
    RELEASED.set()
    assert tensorferry.wait_all(running) == [None] * 2
    assert a.rpc_sync("b", identity, (1,)) == 1
    assert RAN == []


RAN: list[int] = []


def note_that_it_ran():
    RAN.append(1)


def fails_where_it_runs():
    raise LookupError("only here")


@pytest.mark.parametrize("remote", [False, True])
def test_an_exception_is_logged_where_the_function_runs(pair, caplog, remote):
    caplog.set_level(logging.INFO, logger="tensorferry")
    with pytest.raises(LookupError, match="only here"):
        if remote:
            pair[0].remote("b", fails_where_it_runs).to_here()
        else:
            pair[0].rpc_sync("b", fails_where_it_runs)
    (record,) = [one for one in caplog.records if one.name == "tensorferry"]
    text = record.getMessage()
    assert "'a'" in text and "LookupError: only here" in text and "fails_where_it_runs" in text
