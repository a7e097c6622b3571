"""out=: the result of a call lands in a tensor that the caller provides."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
from conftest import eventually, stop_child
from tensorferry import errors

WAYS = {
    "basic-ring": {"channels": "basic"},
    "basic-unix": {"channels": "basic", "shared_memory": False},
    "basic-tcp": {"channels": "basic", "unix_sockets": False},
    "shm-ring": {"channels": "shm,basic"},
    "cma-ring": {"channels": "cma,basic"},
    "cma-tcp": {"channels": "cma,basic", "unix_sockets": False},
    "xth-ring": {"channels": "xth"},
}


def count_up(*sizes, dtype=torch.float32):
    return torch.arange(torch.Size(sizes).numel(), dtype=dtype).reshape(sizes)


begun, ended = [0], [0]  # calls of count_up_late() in this process


def count_up_late(seconds, *sizes):
    begun[0] += 1
    time.sleep(seconds)
    out = count_up(*sizes)
    ended[0] += 1
    return out


def all_have_ended():
    return begun[0] == ended[0]


def transposed(*sizes):
    return count_up(*sizes).t().contiguous().t()


def expanded(*sizes):
    return torch.full((1, 1), 7.0).expand(sizes)


def conjugated(*sizes):
    return torch.complex(count_up(*sizes), count_up(*sizes)).conj()


def shared(*sizes):
    tensor = tensorferry.empty(sizes, dtype=torch.float32)
    tensor.copy_(count_up(*sizes))
    return tensorferry.share(tensor)


def with_grad(*sizes):
    return count_up(*sizes).requires_grad_()


def listed(*sizes):
    return [count_up(*sizes)]


def fail(text):
    raise KeyError(text)


def address(tensor):
    return tensor.data_ptr()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", ["rpc_sync", "rpc_async", "to_here"])
def test_results_land_in_the_given_tensor(cluster, way, verb):
    to = "main" if way.startswith("xth") else "worker1"
    cluster.start(0 if to == "main" else 1, **WAYS[way])
    rpc.rpc_sync(to, count_up, (1,))
    channel = way.split("-")[0]
    if not eventually(lambda: rpc.explain(to).channel == channel, 3):
        pytest.skip(f"no {way} here:\n{rpc.explain(to)}")
    for rows in (1, 100, 1000, 100_000):
        out = torch.full((rows, 10), -1.0)
        before = address(out)
        if verb == "rpc_sync":
            came = rpc.rpc_sync(to, count_up, (rows, 10), out=out)
        elif verb == "rpc_async":
            came = rpc.rpc_async(to, count_up, (rows, 10), out=out).wait()
        else:
            came = rpc.remote(to, count_up, (rows, 10)).to_here(out=out)
        assert came is out
        assert address(out) == before
        assert torch.equal(out, count_up(rows, 10))
        came = None
        out.fill_(3)  # it is the caller's as before
        assert out.sum() == 30 * rows


@pytest.mark.parametrize("function", [count_up, transposed, expanded, conjugated, with_grad])
@pytest.mark.parametrize("size", [(3, 5), (300, 500)])
def test_results_of_any_layout_land_in_the_given_tensor(cluster, function, size):
    cluster.start(1)
    expected = function(*size)
    plain = torch.zeros(size, dtype=expected.dtype)
    outs = {
        "plain": plain,
        "transposed": torch.zeros(size[::-1], dtype=expected.dtype).t(),
        "with gaps": torch.zeros(*size, 2, dtype=expected.dtype)[:, :, 0],
        "inside a larger one": torch.zeros(size[0] + 2, size[1], dtype=expected.dtype)[1:-1],
    }
    for name, out in outs.items():
        assert rpc.rpc_sync("worker1", function, size, out=out) is out
        assert torch.equal(out, expected.detach()), name
        assert not out.requires_grad
    around = outs["inside a larger one"]._base
    assert not around[0].any() and not around[-1].any()


def test_shared_memory_cannot_land_elsewhere(cluster):
    cluster.start(1)
    with pytest.raises(errors.ChannelUnavailable, match="cannot land in memory that the caller provides"):
        rpc.rpc_sync("worker1", shared, (3, 5), out=torch.zeros(3, 5))
    assert torch.equal(rpc.rpc_sync("worker1", shared, (3, 5)), count_up(3, 5))


def test_dtype_and_shape_must_fit(pair):
    a, _ = pair
    cases = [
        (torch.zeros(4), r"out is a tensor of torch.float32 of shape \[4\].* torch.float32 of shape \[2, 2\]"),
        (torch.zeros(2, 2, dtype=torch.int32), r"torch.int32 of shape \[2, 2\].* torch.float32 of shape \[2, 2\]"),
    ]
    rref = a.remote("b", count_up, (2, 2))
    for out, said in cases:
        with pytest.raises(ValueError, match=said):
            a.rpc_sync("b", count_up, (2, 2), out=out)
        with pytest.raises(ValueError, match=said):
            a.rpc_async("b", count_up, (2, 2), out=out).wait()
        assert isinstance(a.rpc_async("b", count_up, (2, 2), out=out).exception(), ValueError)
        with pytest.raises(ValueError, match=said):
            rref.to_here(out=out)


def test_the_result_must_be_one_tensor(pair):
    a, _ = pair
    for function, kind in [(listed, "list"), (torch.Size, "Size"), (time.sleep, "NoneType")]:
        args = () if function is torch.Size else (1,) if function is listed else (0,)
        with pytest.raises(TypeError, match=f"one tensor, and this is a .*{kind}"):
            a.rpc_sync("b", function, args, out=torch.zeros(1))
    with pytest.raises(KeyError, match="raised"):
        a.rpc_sync("b", fail, ("raised",), out=torch.zeros(1))


def test_out_of_a_wrong_type_is_refused(pair):
    a, _ = pair
    with pytest.raises(TypeError, match="must be a tensor"):
        a.rpc_sync("b", count_up, (1,), out=[1.0])
    with pytest.raises(ValueError, match="CPU"):
        a.rpc_sync("b", count_up, (1,), out=torch.zeros(1, device="meta"))
    with pytest.raises(ValueError, match="dense"):
        a.rpc_sync("b", count_up, (1,), out=torch.zeros(1).to_sparse())
    with pytest.raises(ValueError, match="require grad"):
        a.rpc_sync("b", count_up, (1,), out=torch.zeros(1, requires_grad=True))
    with pytest.raises(TypeError, match="remote"):
        a.remote("b", count_up, (1,), out=torch.zeros(1))
    with pytest.raises(RuntimeError, match="single memory location"):
        a.rpc_sync("b", count_up, (3,), out=torch.zeros(1).expand(3))
    overlapping = a.rpc_async("b", count_up, (3,), out=torch.zeros(1).expand(3))
    assert "single memory location" in str(overlapping.exception())
    assert a.rpc_sync("b", count_up, (3,), out=None).tolist() == [0, 1, 2]
    assert a.rpc_sync("b", count_up, (0,), out=torch.zeros(0)).numel() == 0
    parameter = torch.nn.Parameter(torch.zeros(3))
    a.rpc_sync("b", count_up, (3,), out=parameter.data)
    assert parameter.tolist() == [0, 1, 2]


def test_autograd_notices_that_out_was_written(pair):
    weights = torch.ones(1000, requires_grad=True)
    values = torch.ones(1000)
    loss = (weights * values).sum()
    pair[0].rpc_sync("b", count_up, (1000,), out=values)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_owner_copies_its_value_into_out(pair):
    a, _ = pair
    rref = tensorferry.rpc.RRef
    value = count_up(10, 10)
    token = None
    tensorferry._C.set_default_agent(a)
    try:
        token = rref(value)
        out = torch.zeros(10, 10)
        assert token.to_here(out=out) is out
        assert torch.equal(out, value)
        assert token.to_here(out=value) is value
        flipped = value.t()
        token.to_here(out=flipped)  # a view of the value itself
        assert torch.equal(flipped, count_up(10, 10))
    finally:
        tensorferry._C.set_default_agent(None)
        del token


def test_out_may_also_be_an_argument(cluster):
    cluster.start(1)
    total = torch.ones(300_000)
    for _ in range(3):
        rpc.rpc_sync("worker1", torch.mul, (total, 2), out=total)
    assert torch.equal(total, torch.full((300_000,), 8.0))


@pytest.mark.parametrize("way", ["basic-ring", "basic-tcp", "shm-ring", "cma-ring"])
@pytest.mark.parametrize("ending", ["time-out", "cancel"])
def test_nothing_lands_after_the_call_has_ended(cluster, way, ending):
    cluster.start(1, **WAYS[way])
    rows = 200_000
    rpc.rpc_sync("worker1", count_up, (1,))
    for delay in (0.0, 0.02, 0.1, 0.15, 0.2, 0.3):
        out = torch.full((rows, 10), -1.0)
        try:
            if ending == "time-out":
                rpc.rpc_sync("worker1", count_up_late, (delay, rows, 10), timeout=0.15, out=out)
            else:
                future = rpc.rpc_async("worker1", count_up_late, (delay, rows, 10), out=out)
                time.sleep(0.15)
                future.cancel()
                future.wait()
        except (errors.DeadlineExceeded, errors.Cancelled):
            out.fill_(-2)
            assert eventually(lambda: rpc.rpc_sync("worker1", all_have_ended))
            rpc.rpc_sync("worker1", count_up, (rows, 10))  # as large, so it comes behind on the same connection
            assert bool((out == -2).all()), delay
        else:
            assert torch.equal(out, count_up(rows, 10)), delay
    with pytest.raises((errors.DeadlineExceeded, errors.Cancelled)):  # that does happen
        future = rpc.rpc_async("worker1", count_up_late, (1, rows, 10), timeout=0.1, out=out)
        future.wait()


def test_nothing_lands_after_a_stopped_peer_continues(cluster):
    cluster.start(1)
    rpc.rpc_sync("worker1", count_up, (1,))
    out = torch.full((1000, 1000), -1.0)
    stop_child(cluster.pids[0])
    try:
        with pytest.raises(errors.DeadlineExceeded):
            rpc.rpc_sync("worker1", count_up, (1000, 1000), timeout=0.2, out=out)
    finally:
        os.kill(cluster.pids[0], signal.SIGCONT)
    rpc.rpc_sync("worker1", count_up, (1000, 1000))  # as large, so it comes behind on the same connection
    assert bool((out == -1).all())


def test_nothing_lands_after_ctrl_c(pair):
    a, _ = pair
    out = torch.full((1000, 1000), -1.0)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        a.rpc_sync("b", count_up_late, (1, 1000, 1000), out=out)
    assert eventually(all_have_ended)
    a.rpc_sync("b", count_up, (1000, 1000))  # as large, so it comes behind on the same connection
    assert bool((out == -1).all())
