"""What transport "tensorferry" adds to the contract of torch.distributed._transport: how transfers end when a peer does
not answer, closes, or dies. test_torch_transport.py has the contract."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Worker, Workers, eventually, repeated, stop_child
from emulated_network import outputs_on_two_hosts
from tensorferry import errors
from transport_ends import Pair, api, close_theirs, new_end, open_theirs, peer_process, unregister_theirs

LONG = timedelta(seconds=60)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def peer(workers: Workers) -> Iterator[Worker]:
    with peer_process(workers) as worker:
        yield worker


@pytest.fixture
def ferry(peer: Worker) -> Iterator[Pair]:
    made = Pair("tensorferry", peer)
    yield made
    made.close()


@pytest.fixture(params=["mapped", "other memory"])
def mappable(request: pytest.FixtureRequest) -> bool:
    return request.param == "mapped"


def error_of(function: Any, *args: Any, **kwargs: Any) -> Exception | None:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error
    return None


def eventual_error(function: Any, *args: Any, **kwargs: Any) -> Exception:
    """The first error of a function that is called until it fails."""
    failed: list[Exception] = []

    def fails() -> bool:
        failed.extend(error for error in [error_of(function, *args, **kwargs)] if error is not None)
        return bool(failed)

    assert eventually(fails, 60)
    return failed[0]


def test_a_killed_peer_is_an_error_of_transfers(ferry: Pair, mappable: bool) -> None:
    there = ferry.shown("there", torch.zeros(1000), mappable)
    mine = ferry.register("mine", torch.zeros(1000))
    assert ferry.transport.read(mine.to_mutable_view(), there) == 0
    ferry.peer.kill()
    assert isinstance(eventual_error(ferry.transport.read, mine.to_mutable_view(), there), errors.ConnectionLost)
    work = ferry.transport.write(mine.to_view(), there, async_op=True)
    with pytest.raises(errors.ConnectionLost):
        work.wait(LONG)
    assert isinstance(work.exception(), errors.ConnectionLost) and not work.is_success()
    assert eventually(lambda: not ferry.transport.connected())


@repeated(200)
def test_a_peer_killed_at_any_moment_fails_transfers_alone(workers: Workers, times: int) -> None:
    for seed in range(times):
        with peer_process(workers) as peer:
            pair = Pair("tensorferry", peer)
            moments = random.Random(seed)
            there = pair.shown("there", torch.zeros(300_000), mappable=seed % 2 == 0)
            mine = pair.register("mine", torch.zeros(300_000))
            killing = threading.Timer(moments.uniform(0, 0.1), peer.kill)
            killing.start()

            def both(pair: Pair = pair, mine: Any = mine, there: Any = there) -> None:
                works = [
                    pair.transport.read(mine.to_mutable_view(0, 600_000), there, async_op=True),
                    pair.transport.write(mine.to_view(600_000), there, async_op=True),
                ]
                asyncio.run(api.wait_all(works, timeout=60))

            assert isinstance(eventual_error(both), errors.ConnectionLost), seed
            killing.join()
            pair.transport.close()


def test_a_time_out_ends_the_wait_and_not_the_transfer(ferry: Pair) -> None:
    there = ferry.shown("there", torch.zeros(1000), mappable=False)
    mine = ferry.register("mine", torch.ones(1000))
    stop_child(ferry.peer.process.pid)
    work = ferry.transport.write(mine.to_view(), there, async_op=True)
    with pytest.raises(TimeoutError, match="goes on"):
        work.wait(timedelta(milliseconds=50))
    with pytest.raises(TimeoutError):
        ferry.transport.write(mine.to_view(), there, timeout=0)
    assert not work.is_completed() and not work.is_success() and work.exception() is None
    with pytest.raises(RuntimeError, match="under way"):
        ferry.transport.unregister_memory(mine)
    os.kill(ferry.peer.process.pid, signal.SIGCONT)
    assert work.wait(LONG)
    assert ferry.theirs("there").sum() == 1000


def test_coroutines_that_wait_do_not_block_the_loop(ferry: Pair) -> None:
    there = ferry.shown("there", torch.zeros(1000), mappable=False)
    mine = ferry.register("mine", torch.ones(1000))
    stop_child(ferry.peer.process.pid)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await ferry.transport.write_async(mine.to_view(), there, timeout=0.05)
        with pytest.raises(TimeoutError):
            await ferry.transport.close_async(timeout=0.05)
        with pytest.raises(RuntimeError, match="closed"):
            await ferry.transport.write_async(mine.to_view(), there)
        closing = asyncio.ensure_future(ferry.transport.close_async(timeout=60))
        await asyncio.sleep(0)
        os.kill(ferry.peer.process.pid, signal.SIGCONT)
        await closing

    asyncio.run(main())
    assert not ferry.transport.connected()
    assert ferry.theirs("there").sum() == 1000


def test_a_transfer_under_way_fails_when_its_peer_is_killed(ferry: Pair) -> None:
    there = ferry.shown("there", torch.zeros(1000), mappable=False)
    mine = ferry.register("mine", torch.ones(1000))
    stop_child(ferry.peer.process.pid)
    work = ferry.transport.write(mine.to_view(), there, async_op=True)
    ferry.peer.kill()
    with pytest.raises(errors.ConnectionLost):
        work.wait(LONG)
    with pytest.raises(errors.ConnectionLost):
        work.get_future().wait()
    late = ferry.transport.write(mine.to_view(), there, async_op=True)
    failed = error_of(ferry.transport.close, timeout=60)
    assert late.is_completed()
    assert failed is None or isinstance(failed, errors.ConnectionLost)
    ferry.transport.close()


def test_memory_that_the_peer_has_unregistered_is_not_found(ferry: Pair, mappable: bool) -> None:
    there = ferry.shown("there", torch.zeros(10), mappable)
    other = ferry.shown("other", torch.ones(10), mappable)
    mine = ferry.register("mine", torch.zeros(10))
    assert ferry.transport.read(mine.to_mutable_view(), there) == 0
    ferry.peer.run(unregister_theirs, "there")
    for transfer, view in ((ferry.transport.read, mine.to_mutable_view()), (ferry.transport.write, mine.to_view())):
        with pytest.raises(errors.NotFound):
            transfer(view, there)
    assert ferry.transport.read(mine.to_mutable_view(), other) == 0
    assert ferry.tensors["mine"].sum() == 10


def test_a_peer_that_has_closed_is_an_error(ferry: Pair) -> None:
    there = ferry.shown("there", torch.zeros(10))
    mine = ferry.register("mine", torch.zeros(10))
    assert ferry.transport.read(mine.to_mutable_view(), there) == 0
    ferry.peer.run(close_theirs)
    assert isinstance(
        eventual_error(ferry.transport.read, mine.to_mutable_view(), there), errors.ConnectionLost | errors.NotFound
    )
    ferry.peer.run(open_theirs, "tensorferry")  # for the fixture to close


def test_connecting_to_a_peer_that_has_gone_fails_and_may_be_tried_again(peer: Worker) -> None:
    with new_end("tensorferry") as transport:
        gone = peer.run(open_theirs, "tensorferry")
        peer.run(close_theirs)
        with pytest.raises(errors.Error):
            transport.connect(gone, timeout=30)
        assert not transport.connected()
        with pytest.raises(ValueError):
            transport.connect(gone[:-1])
        assert transport.connect(peer.run(open_theirs, "tensorferry")) == 0
        peer.run(close_theirs)


def test_a_part_of_a_descriptor_names_bytes_within_the_memory(ferry: Pair) -> None:
    there = ferry.shown("there", torch.arange(8, dtype=torch.uint8))
    mine = ferry.register("mine", torch.zeros(2, dtype=torch.uint8))
    assert ferry.transport.read(mine.to_mutable_view(), there.part(3, 4).part(1, 2)) == 0
    assert ferry.tensors["mine"].tolist() == [4, 5]
    for offset, length in ((0, 9), (-1, 2), (8, 1), (4, -1)):
        with pytest.raises(ValueError):
            there.part(offset, length)
    for odd in (b"[" * 5000, b'"' * 100_000):
        with pytest.raises(ValueError, match="no descriptor"):
            type(there).deserialize(odd)
    forged = type(there)(there.owner, there.incarnation, there.region, 7, 2)
    with pytest.raises(ValueError):
        ferry.transport.read(mine.to_mutable_view(), forged)


def test_other_devices_and_streams_of_host_memory_are_refused_by_name(ferry: Pair) -> None:
    with pytest.raises(RuntimeError) as refused:
        api.new_transport("tensorferry", "meta")
    assert "meta: it has memory of the CPU and of CUDA devices" in str(refused.value.__cause__)
    there = ferry.shown("there", torch.zeros(4))
    mine = ferry.register("mine", torch.zeros(4))
    with pytest.raises(ValueError, match="a stream transfer is for memory of a GPU"):
        ferry.transport.read_stream(mine.to_mutable_view(), there)
    with pytest.raises(ValueError, match="a stream transfer is for memory of a GPU"):
        ferry.transport.write_stream(mine.to_view(), there)
    with pytest.raises(RuntimeError) as unknown:
        api.new_transport("tensorferry", trust="full")
    assert "trust" in str(unknown.value.__cause__)


def run_program(code: str, path: str = "") -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(each for each in (path, os.environ["PYTHONPATH"]) if each),
    }
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "Fatal" not in done.stderr and "terminate" not in done.stderr, done.stderr
    return done.stdout


def test_torch_finds_it_by_its_entry_point(tmp_path: Path) -> None:
    declared = (ROOT / "pyproject.toml").read_text()
    table = (
        '[project.entry-points."torch.distributed.transports"]\ntensorferry = "tensorferry.transport:RegionTransport"'
    )
    assert table in declared
    metadata = tmp_path / "tensorferry-0.dist-info"  # the build folder has none
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorferry\nVersion: 0\n")
    entry = "[torch.distributed.transports]\ntensorferry = tensorferry.transport:RegionTransport\n"
    (metadata / "entry_points.txt").write_text(entry)
    code = """
        import sys
        from torch.distributed._transport import available_transports, new_transport
        print("tensorferry" in available_transports(), "tensorferry" in sys.modules)
        with new_transport("TensorFerry", "cpu") as transport:
            print(type(transport).__module__)
    """
    assert run_program(code, str(tmp_path)) == "True False\ntensorferry.transport\n"


def test_a_process_ends_while_a_transfer_waits_for_its_peer() -> None:
    code = """
        import ctypes, os, signal, torch
        from tensorferry.transport import RegionTransport, RemoteRegionBuffer
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            peer = RegionTransport()
            memory = peer.register_memory(torch.zeros(4))
            os.write(writing, peer.bind() + b" " + memory.to_remote_buffer().serialize())
            signal.pause()
        url, descriptor = os.read(reading, 65536).split(b" ")
        transport = RegionTransport()
        transport.connect(url)
        mine = transport.register_memory(torch.ones(4))
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        work = transport.write(mine.to_view(), RemoteRegionBuffer.deserialize(descriptor), async_op=True)
        print(work.is_completed())
    """
    assert run_program(code) == "False\n"


ON_A_HOST = """
import pathlib, sys, time, torch
import tensorferry.transport
from torch.distributed._transport import new_transport

folder, me, other = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]

def tell(what, data=b""):
    (folder / f"{me}.part").write_bytes(data)
    (folder / f"{me}.part").rename(folder / f"{me}.{what}")

def hear(what):
    while not (folder / f"{other}.{what}").exists():
        time.sleep(0.01)
    return (folder / f"{other}.{what}").read_bytes()

with new_transport("tensorferry", "cpu", key="a key of the job's own", interface="eth0") as transport:
    received = torch.zeros(4)
    descriptor = transport.register_memory(received).to_remote_buffer()
    tell("address", transport.bind())
    tell("descriptor", descriptor.serialize())
    transport.connect(hear("address"))
    sent = transport.register_memory(torch.full((4,), {"one": 1.0, "two": 2.0}[me]))
    transport.write(sent.to_view(), type(descriptor).deserialize(hear("descriptor")))
    tell("written")
    hear("written")
    print(received.tolist())
    tell("done")
    hear("done")
"""


def test_endpoints_of_two_hosts_need_no_store_in_common(tmp_path: Path) -> None:
    printed = outputs_on_two_hosts(tmp_path, ON_A_HOST, "one", "two")
    assert printed == ["[2.0, 2.0, 2.0, 2.0]\n", "[1.0, 1.0, 1.0, 1.0]\n"]
