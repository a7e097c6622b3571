"""Jobs without a key, and ``tensorferry key``."""

from __future__ import annotations

import multiprocessing
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import tensorferry.rpc as rpc
import torch.distributed as dist
from conftest import free_port
from tensorferry import errors, key

LISTENS = "0A"


def listeners_at(port: int) -> set[str]:
    """Returns the addresses at which this host listens on the port, as the kernel prints them."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            address, _, number = local.partition(":")
            if state == LISTENS and int(number, 16) == port:
                found.add(address)
    return found


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("world_size", [None, 1])
def test_the_store_of_a_job_on_loopback_is_reached_from_this_host_alone(
    monkeypatch: pytest.MonkeyPatch, host: str, world_size: int | None
) -> None:
    port = free_port()
    monkeypatch.delenv("TENSORFERRY_KEY", raising=False)
    monkeypatch.delenv("TENSORFERRY_KEY_FILE", raising=False)
    rpc.init_rpc("alone", rank=0, world_size=world_size, init_method=f"tcp://{host}:{port}")
    try:
        assert listeners_at(port) <= {"0100007F", "00000000000000000000000001000000"}
        assert listeners_at(port)
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
        assert not store.check(["tensorferry/key/value"]), "the store holds no secret"
        assert rpc.rpc_sync("alone", max, args=(1, 2)) == 2
    finally:
        rpc.shutdown()


def _call_as(uid: int, port: int, results: multiprocessing.Queue[str]) -> None:
    os.setgid(uid)
    os.setuid(uid)
    try:
        rpc.init_rpc("stranger", rank=1, init_method=f"tcp://127.0.0.1:{port}")
        results.put(f"called: {rpc.rpc_sync('victim', os.getpid, timeout=10)}")
    except errors.Error as error:
        results.put(f"{type(error).__name__}: {error}")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_calls_no_agent_without_a_key() -> None:
    port = free_port()
    rpc.init_rpc("victim", rank=0, init_method=f"tcp://127.0.0.1:{port}")
    try:
        processes = multiprocessing.get_context("fork")
        results = processes.Queue()
        stranger = processes.Process(target=_call_as, args=(12345, port, results))
        stranger.start()
        said = results.get(timeout=100)
        stranger.join(100)
        assert said.startswith("Unauthenticated"), said
    finally:
        rpc.shutdown(graceful=False)


def test_the_command_makes_a_key_once(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    command = [sys.executable, "-m", "tensorferry", "key", str(path)]
    made = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert made.stdout == f"{path}\n" and "made" in made.stderr and str(path) in made.stderr
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    assert len(text.strip()) >= 40
    assert not key.make(path), "it is kept"
    assert path.read_text() == text


def test_the_command_says_why_it_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        key.main(["/nonexistent/folder/key"])
    assert ended.value.code == 1
    assert "/nonexistent/folder/key: No such file or directory" in capsys.readouterr().err
