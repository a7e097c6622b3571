"""future.sent: it completes when the arguments of a call may be overwritten, on every channel."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
from conftest import eventually, stop_child
from tensorferry import errors

looked_at = threading.Event()  # in the process that runs the handlers


def look_later(tensors, value):
    """Whether all elements are ``value``, once the caller has said that it has overwritten its own."""
    if not looked_at.wait(30):
        raise TimeoutError("nobody called let_look()")
    looked_at.clear()
    return [bool((tensor == value).all()) for tensor in tensors]


def let_look():
    looked_at.set()


WAYS = {
    "basic-ring": {"channels": "basic"},
    "basic-unix": {"channels": "basic", "shared_memory": False},
    "basic-tcp": {"channels": "basic", "unix_sockets": False},
    "shm-ring": {"channels": "shm,basic"},
    "shm-unix": {"channels": "shm,basic", "shared_memory": False},
    "cma-ring": {"channels": "cma,basic"},
    "cma-unix": {"channels": "cma,basic", "shared_memory": False},
    "cma-tcp": {"channels": "cma,basic", "unix_sockets": False},
    "xth-ring": {"channels": "xth"},
    "xth-unix": {"channels": "xth", "shared_memory": False},
    "xth-tcp": {"channels": "xth", "unix_sockets": False},
}


def go_by(way, to):
    """Skips if the machine lacks the channel."""
    channel, transport = way.split("-")
    assert eventually(lambda: all("under way" not in reason for _, _, reason in rpc.explain(to).candidates))
    found = rpc.explain(to)
    if found.channel != channel or found.transport != transport:
        pytest.skip(f"no {way} here:\n{found}")


@pytest.mark.parametrize("way", WAYS)
def test_arguments_may_be_overwritten_once_they_are_sent(cluster, way):
    to = "main" if way.startswith("xth") else "worker1"
    cluster.start(0 if to == "main" else 1, **WAYS[way])
    rpc.rpc_sync(to, let_look, timeout=10)
    assert rpc.rpc_sync(to, look_later, ([torch.ones(1)], 1)) == [True]  # which opens the channel
    go_by(way, to)
    for count in (3, 900, 5_000, 100_000, 3_000_000):
        tensors = [torch.ones(count), torch.ones(count, 2)[:, 0], torch.ones(2, count).t()]
        future = rpc.rpc_async(to, look_later, (tensors, 1))
        assert future.sent.wait(30) is None
        for tensor in tensors:
            tensor.fill_(9)
        assert not future.done(), "the call goes on"
        rpc.rpc_sync(to, let_look)
        assert future.wait() == [True] * 3, count


def test_sent_is_an_ordinary_future(pair):
    future = pair[0].rpc_async("b", torch.add, (torch.ones(100_000), 1))
    sent = future.sent
    assert sent is future.sent
    assert isinstance(sent, tensorferry.Future)
    assert sent.then(lambda f: "then").wait() == "then"
    assert set(tensorferry.as_completed([future, sent])) == {future, sent}
    assert torch.futures.wait_all([sent]) == [None]
    with pytest.raises(errors.InvalidArgument, match="future of a call"):
        _ = sent.sent
    with pytest.raises(errors.InvalidArgument, match="future of a call"):
        _ = future.then(lambda f: f).sent


def test_sent_may_be_requested_after_the_call(pair):
    future = pair[0].rpc_async("b", torch.add, (torch.ones(100_000), 1))
    future.wait()
    assert future.sent.wait(10) is None


def test_calls_without_tensors_are_sent_at_once(pair):
    future = pair[0].rpc_async("b", max, (1, 2))
    assert future.sent.wait(10) is None
    assert future.wait() == 2


def test_arguments_of_unsent_calls_may_be_overwritten(pair):
    future = pair[0].rpc_async("nobody", torch.add, (torch.ones(100_000), 1))
    assert future.sent.wait(30) is None
    with pytest.raises(errors.NotFound):
        future.wait()


@pytest.mark.parametrize("way", ["basic-ring", "basic-tcp", "cma-ring", "cma-tcp"])
@pytest.mark.parametrize("ending", ["goes on", "dies"])
def test_a_timeout_does_not_mean_that_the_arguments_were_read(cluster, way, ending):
    cluster.start(1, **WAYS[way])
    rpc.rpc_sync("worker1", torch.add, (torch.ones(1), 1))
    go_by(way, "worker1")
    stop_child(cluster.pids[0])
    try:
        future = rpc.rpc_async("worker1", torch.add, (torch.ones(8_000_000), 1), timeout=0.3)
        with pytest.raises(errors.DeadlineExceeded):
            future.wait()
        assert not future.sent.done(), "the peer has not read them"
        if ending == "dies":
            cluster.workers[0].kill()
    finally:
        if ending == "goes on":
            os.kill(cluster.pids[0], signal.SIGCONT)
    assert eventually(future.sent.done)
