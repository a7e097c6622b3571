"""tensorferry.empty() and tensorferry.share(): memory handed over without a copy, between real processes."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
from conftest import eventually
from tensorferry import errors, share

MEGABYTE = 1 << 18  # elements
kept: dict[str, object] = {}


class Unknown:
    """What the codec leaves to pickle."""

    def __init__(self, value):
        self.value = value


def fill(tensor, value):
    tensor.fill_(value)


def total(tensor):
    return tensor.sum().item()


def keep(name, value):
    kept[name] = value


def take(name):
    return kept[name]


def forget(name=None):
    kept.pop(name) if name else kept.clear()
    gc.collect()


def total_of_kept(name):
    return kept[name].sum().item()


def fill_kept(name, value):
    kept[name].fill_(value)


def mappings_of(least):
    """How many memfds of ours, of at least so many bytes, this process has mapped."""
    sizes = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "memfd:tensorferry" in line:
                begin, end = line.split()[0].split("-")
                sizes.append(int(end, 16) - int(begin, 16))
    return sum(size >= least for size in sizes)


def held(least):
    """How many descriptors of files of at least so many bytes this process has."""
    sizes = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder's own, and what another thread closes
            sizes.append(os.stat(f"/proc/self/fd/{name}").st_size)
    return sum(size >= least for size in sizes)


def mapped():
    """Where this process has memfds of ours mapped, and how many descriptors it has."""
    return mappings_of(0), len(os.listdir("/proc/self/fd"))


def make_and_share(name, value):
    kept[name] = tensorferry.empty(MEGABYTE).fill_(value)
    return share(kept[name])


def echo(value):
    return value


def twice(value):
    return [value, {"again": value}]


def fill_everything(tensors, value, *, last):
    for tensor in (*tensors["list"], *tensors["tuple"], last):
        tensor.fill_(value)
    return len(tensors)


def geometry(tensor):
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.tolist()


def share_again(tensor):
    return share(tensor)


def refill_value_of(unknown, value):
    unknown.value.fill_(value)


def fork_and_drop(name):
    pid = os.fork()
    if pid == 0:
        try:
            same = kept[name][0].item() == 7
            kept[name][1] = 8  # the memory is shared with the child too
            kept.clear()
            gc.collect()
            os._exit(0 if same else 3)
        finally:
            os._exit(4)
    return os.waitpid(pid, 0)[1]


def end_agent_and_read(name, value):
    """Runs in a worker, outside of a call."""
    rpc.shutdown(graceful=False)
    read = kept[name].sum().item()
    kept[name].fill_(value)
    return read


# ---- tensors of empty()


@pytest.mark.parametrize("size", [(3, 4), ((3, 4),), ([3, 4],), (torch.Size([3, 4]),), (12,), (np.int64(5),), ((),)])
def test_empty_takes_sizes_as_torch_does(size):
    made = tensorferry.empty(*size)
    assert made.shape == torch.empty(*size).shape
    assert made.is_contiguous()
    assert made.device.type == "cpu"
    assert type(made) is torch.Tensor
    assert not made.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex128])
def test_empty_takes_every_dtype(dtype):
    made = tensorferry.empty(3, 5, dtype=dtype)
    assert made.dtype is dtype
    assert torch.equal(made, torch.zeros(3, 5, dtype=dtype))
    assert torch.equal(made.fill_(1), torch.ones(3, 5, dtype=dtype))


def test_empty_follows_the_default_dtype_and_can_require_grad():
    torch.set_default_dtype(torch.float64)
    try:
        made = tensorferry.empty(2, requires_grad=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert made.dtype is torch.float64
    assert made.requires_grad
    (made * 3).sum().backward()
    assert made.grad.tolist() == [3, 3]


def test_impossible_arguments_of_empty_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="on a CUDA device, not on meta"):
        tensorferry.empty(3, device="meta")
    with pytest.raises(ValueError, match="negative"):
        tensorferry.empty(3, -1)
    with pytest.raises(ValueError, match="qint8"):
        tensorferry.empty(3, dtype=torch.qint8)
    with pytest.raises(ValueError, match="2\\^63"):
        tensorferry.empty(1 << 40, 1 << 40)
    with pytest.raises(TypeError, match="pin_memory"):
        tensorferry.empty(3, pin_memory=True)
    with pytest.raises(TypeError, match="size"):
        tensorferry.empty()
    with pytest.raises(TypeError):
        tensorferry.empty(3.5)
    assert tensorferry.empty(3, device="cpu").shape == (3,)


def test_memory_of_empty_is_an_ordinary_tensor():
    made = tensorferry.empty(1000).fill_(2)
    assert pickle.loads(pickle.dumps(made)).sum() == 2000
    assert copy.deepcopy(made).sum() == 2000
    assert tensorferry.empty(1000).fill_(2).numpy().sum() == 2000
    assert made.resize_(1 << 20)[:1000].sum() == 2000  # moves, and is not empty()'s any more
    with pytest.raises(ValueError, match=r"not made by tensorferry.empty\(\)"):
        share(made)


def test_empty_frees_its_memory():
    before = mapped()
    for _ in range(300):
        tensorferry.empty(MEGABYTE)[0] = 1
    assert mapped() == before


def test_empty_reports_that_no_file_descriptor_is_left():
    code = """
        import resource, tensorferry
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        held = []
        try:
            while True:
                held.append(tensorferry.empty(3))
        except tensorferry.errors.ResourceExhausted as error:
            assert "ulimit -n" in str(error), error
            assert len(held) > 10
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)


# ---- the marker


def test_only_memory_of_empty_can_be_shared():
    with pytest.raises(ValueError, match=r"not made by tensorferry.empty\(\)"):
        share(torch.ones(3))
    with pytest.raises(ValueError, match="meta"):
        share(torch.ones(3, device="meta"))
    with pytest.raises(ValueError, match="sparse"):
        share(torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        share([tensorferry.empty(3)])


def test_the_marker_is_not_a_tensor():
    made = tensorferry.empty(3)
    marked = share(made)
    assert marked.tensor is made
    assert isinstance(marked, tensorferry.Shared)
    assert repr(marked).startswith("tensorferry.share(tensor(")
    with pytest.raises(AttributeError, match=r"its \.tensor"):
        marked.fill_(1)
    with pytest.raises(TypeError, match="Shared"):
        torch.add(marked, 1)
    with pytest.raises(TypeError):
        marked + 1
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="pickled or copied"):
            copied(marked)
    with pytest.raises(TypeError):
        tensorferry.Shared(made)


# ---- between processes


def test_the_first_call_of_a_link_may_share(cluster):
    cluster.start(1)
    board = tensorferry.empty(3)
    rpc.rpc_sync("worker1", fill, (share(board), 1))
    assert board.tolist() == [1, 1, 1]


def test_a_handler_may_be_the_first_to_share(cluster):
    cluster.start(1)
    got = rpc.rpc_sync("worker1", make_and_share, ("theirs", 4))
    assert got.sum() == 4 * MEGABYTE


def test_both_sides_see_the_same_bytes(cluster):
    cluster.start(1)
    board = tensorferry.empty(MEGABYTE)
    rpc.rpc_sync("worker1", fill, (share(board), 2))
    assert total(board) == 2 * MEGABYTE
    rpc.rpc_sync("worker1", keep, ("board", share(board)))
    board.fill_(3)
    assert rpc.rpc_sync("worker1", total_of_kept, ("board",)) == 3 * MEGABYTE
    rpc.rpc_sync("worker1", fill_kept, ("board", 4))
    assert total(board) == 4 * MEGABYTE


def test_memory_shared_by_a_handler_is_seen_by_both(cluster):
    cluster.start(1)
    got = rpc.rpc_sync("worker1", make_and_share, ("theirs", 1))
    assert type(got) is torch.Tensor
    rpc.rpc_sync("worker1", fill_kept, ("theirs", 5))
    assert total(got) == 5 * MEGABYTE
    got.fill_(6)
    assert rpc.rpc_sync("worker1", total_of_kept, ("theirs",)) == 6 * MEGABYTE
    later = rpc.rpc_async("worker1", make_and_share, ("more", 1)).wait()
    assert rpc.remote("worker1", make_and_share, ("rref", 2)).to_here().sum() == 2 * MEGABYTE
    assert later.sum() == MEGABYTE


def test_without_share_a_tensor_is_copied(cluster):
    cluster.start(1)
    for elements in (4, MEGABYTE):
        board = tensorferry.empty(elements).fill_(1)
        rpc.rpc_sync("worker1", fill, (board, 2))
        assert total(board) == elements
        both = rpc.rpc_sync("worker1", fill_everything, ({"list": [board], "tuple": ()}, 9), {"last": share(board)})
        assert both == 2
        assert total(board) == 9 * elements


def test_views_are_shared_with_their_own_geometry(cluster):
    cluster.start(1)
    board = tensorferry.empty(64, 64, dtype=torch.int16)
    board.copy_(torch.arange(4096).view(64, 64))
    views = [
        board[5],
        board[3:9],
        board[:, 7],
        board[1::3, 2::5],
        board.t(),
        board.view(-1)[4095:],
        board.view(16, 256)[:, 3:200].t(),
        board[0, 0],
        board[2].expand(5, 64),
        board.view(torch.uint8)[1:, 1::2],
        board[:0],
        torch.nn.Parameter(board.view(torch.float16)[9]),
        board.unsqueeze(0).permute(2, 0, 1),
    ]
    for view in views:
        assert rpc.rpc_sync("worker1", geometry, (share(view),)) == geometry(view)
    rpc.rpc_sync("worker1", fill, (share(board[:, 7]), -1))
    assert (board[:, 7] == -1).all()
    assert (board[:, 6] != -1).all()
    assert (board[:, 8] != -1).all()
    rpc.rpc_sync("worker1", fill, (share(torch.from_numpy(board.numpy())[3:5, 60:]), -2))
    assert (board[3:5, 60:] == -2).all()
    assert (board == -2).sum() == 8


def test_shared_tensors_travel_in_structures_beside_values(cluster):
    cluster.start(1)
    boards = [tensorferry.empty(n) for n in (3, 1000, MEGABYTE)]
    tensors = {"list": [share(boards[0])], "tuple": (share(boards[1]),)}
    assert rpc.rpc_sync("worker1", fill_everything, (tensors, 7), {"last": share(boards[2])}) == 2
    assert all((board == 7).all() for board in boards)


def test_a_marker_that_occurs_twice_is_one_tensor(cluster):
    cluster.start(1)
    board = tensorferry.empty(10)
    marked = share(board)
    got = rpc.rpc_sync("worker1", twice, ((marked, marked),))
    assert got[0][0] is got[0][1]
    assert got[1]["again"] is got[0]


def test_shared_tensors_travel_beside_pickled_values(cluster):
    cluster.start(1)
    board = tensorferry.empty(10)
    rpc.rpc_sync("worker1", refill_value_of, (Unknown(share(board)), 3))
    assert board.tolist() == [3] * 10


def test_one_region_is_shared_with_many_peers(cluster):
    cluster.start(2)
    board = tensorferry.empty(MEGABYTE)
    for worker in ("worker1", "worker2"):
        rpc.rpc_sync(worker, keep, ("board", share(board)))
    rpc.rpc_sync("worker1", fill_kept, ("board", 3))
    assert rpc.rpc_sync("worker2", total_of_kept, ("board",)) == 3 * MEGABYTE


def test_many_calls_in_flight_share_memory_that_is_dropped_at_once(cluster):
    cluster.start(1)
    for _ in range(20):
        sums = [rpc.rpc_async("worker1", total, (share(tensorferry.empty(1000).fill_(i)),)) for i in range(50)]
        assert tensorferry.wait_all(sums) == [1000 * i for i in range(50)]


def test_received_shared_memory_can_be_shared_only_by_its_maker(cluster):
    cluster.start(1)
    with pytest.raises(ValueError, match=r"tensorferry.empty\(\) in this process"):
        rpc.rpc_sync("worker1", share_again, (share(tensorferry.empty(3)),))


# ---- memory that cannot be shared


@pytest.mark.parametrize("options", [{"shared_memory": False}, {"unix_sockets": False}, {"channels": "basic"}])
def test_a_call_fails_with_the_reason_if_memory_cannot_be_shared(cluster, options):
    cluster.start(1, **options)
    board = tensorferry.empty(1000).fill_(1)
    for _ in range(2):
        with pytest.raises(errors.ChannelUnavailable, match="worker1") as raised:
            rpc.rpc_sync("worker1", fill, (share(board), 2))
        assert "shares memory" in str(raised.value)
    with pytest.raises(errors.ChannelUnavailable, match="main"):
        rpc.rpc_sync("worker1", make_and_share, ("theirs", 1))
    assert rpc.rpc_sync("worker1", total, (board,)) == 1000


def test_other_channels_refuse_to_share(cluster):
    cluster.start(1)
    with pytest.raises(errors.ChannelUnavailable, match="basic copies bytes"):
        rpc.rpc_sync("worker1", total, (share(tensorferry.empty(5)),), require="basic")
    assert rpc.rpc_sync("worker1", total, (share(tensorferry.empty(5)),)) == 0


# ---- endings


def test_a_received_tensor_outlives_its_makers_kill(cluster):
    cluster.start(1)
    got = rpc.rpc_sync("worker1", make_and_share, ("theirs", 3))
    cluster.workers[0].kill()
    assert total(got) == 3 * MEGABYTE
    got.fill_(4)
    assert total(got) == 4 * MEGABYTE


def test_the_maker_releases_the_memory_of_a_killed_receiver(cluster):
    before = mapped()[0]
    cluster.start(1)
    board = tensorferry.empty(MEGABYTE).fill_(1)
    rpc.rpc_sync("worker1", keep, ("board", share(board)))
    os.kill(cluster.pids[0], signal.SIGKILL)
    with pytest.raises(errors.ConnectionLost):
        for _ in range(1000):
            rpc.rpc_sync("worker1", time.sleep, (0.01,))
    assert total(board) == MEGABYTE
    del board
    rpc.shutdown(graceful=False)
    assert eventually(lambda: mapped()[0] <= before)


def test_shared_tensors_outlive_both_agents(cluster):
    cluster.start(1)
    board = tensorferry.empty(MEGABYTE).fill_(1)
    theirs = rpc.rpc_sync("worker1", make_and_share, ("theirs", 2))
    rpc.rpc_sync("worker1", keep, ("board", share(board)))
    worker = cluster.workers[0]
    assert worker.run(end_agent_and_read, "board", 5) == MEGABYTE
    assert total(board) == 5 * MEGABYTE
    rpc.shutdown(graceful=False)
    theirs.fill_(6)
    assert worker.run(total_of_kept, "theirs") == 6 * MEGABYTE
    board.fill_(7)
    assert worker.run(total_of_kept, "board") == 7 * MEGABYTE
    del theirs, board
    worker.run(forget)


def test_a_forked_child_does_not_disturb_shared_memory(cluster):
    cluster.start(1)
    board = tensorferry.empty(MEGABYTE).fill_(7)
    rpc.rpc_sync("worker1", keep, ("board", share(board)))
    rpc.rpc_sync("worker1", make_and_share, ("theirs", 7))
    for name in ("board", "theirs"):
        assert rpc.rpc_sync("worker1", fork_and_drop, (name,)) == 0
        assert rpc.rpc_sync("worker1", total_of_kept, (name,)) == 7 * MEGABYTE + 1
    assert board[1] == 8
    rpc.rpc_sync("worker1", fill, (share(board), 1))
    assert total(board) == MEGABYTE


def test_a_thousand_hand_overs_leak_nothing(cluster):
    cluster.start(1)
    rpc.rpc_sync("worker1", total, (share(tensorferry.empty(3)),))
    rpc.rpc_sync("worker1", make_and_share, ("theirs", 1))
    rpc.rpc_sync("worker1", forget)
    gc.collect()
    here, there = mapped(), rpc.rpc_sync("worker1", mapped)
    for i in range(1000):
        assert rpc.rpc_sync("worker1", total, (share(tensorferry.empty(1000).fill_(i)),)) == 1000 * i
        got = rpc.rpc_sync("worker1", make_and_share, ("theirs", 1))
        assert got[5] == 1
    del got
    rpc.rpc_sync("worker1", forget)
    assert eventually(lambda: mapped() <= here), (mapped(), here)
    assert eventually(lambda: rpc.rpc_sync("worker1", mapped) <= there), (rpc.rpc_sync("worker1", mapped), there)


def test_the_same_memory_is_mapped_once(cluster):
    cluster.start(1)
    board = tensorferry.empty(65 * MEGABYTE)  # larger than any other file of that process
    for i in range(200):
        rpc.rpc_sync("worker1", keep, (f"part{i}", share(board[i:])))
    assert rpc.rpc_sync("worker1", mappings_of, (board.nbytes,)) == 1
    assert rpc.rpc_sync("worker1", held, (board.nbytes,)) <= 1
    rpc.rpc_sync("worker1", forget)


# ---- in one process


@pytest.mark.parametrize("peer", ["a", "b"])
def test_within_a_process_the_very_memory_is_handed_over(pair, peer):
    a, _ = pair
    board = tensorferry.empty(MEGABYTE)
    a.rpc_sync(peer, fill, (share(board), 3))
    assert total(board) == 3 * MEGABYTE
    got = a.rpc_sync(peer, make_and_share, ("own", 1))
    assert got.data_ptr() == kept["own"].data_ptr()
    a.rpc_sync(peer, fill, (board[:100], 9))
    assert (board == 3).all()
    again = a.rpc_sync(peer, share_again, (share(board[5:]),))  # it is this process's
    del board
    assert again[0] == 3
    forget()
