"""An agent whose process may take no more memory, and a peer that makes it want some."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorferry
import tensorferry._C
import torch
from raw_peer import RawPeer
from tensorferry import errors

HOSTILE_PEER = Path(tensorferry._C.__file__).parents[2] / "tests/hostile/hostile_peer"
KEY = "a key that the hostile peer has too"
AGENT = """
import os, resource, sys
import tensorferry

key, mebibytes = sys.argv[1], int(sys.argv[2])
store = tensorferry.StoreServer("127.0.0.1", 0, key)
client = tensorferry.connect_store("127.0.0.1", store.port, key)
agent = tensorferry.Agent("target", store=client, key=key, trust="registered")
agent.expose(lambda text: text, name="echo")
names = (line.split()[-1] for line in open("/proc/net/unix"))
unix = next(name for name in names if name.startswith(f"@tensorferry-{os.getpid()}-"))
files = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
mine = {os.readlink(file) for file in files if os.path.lexists(file)}
sockets = [line.split() for line in open("/proc/net/tcp")][1:]
listens = {int(each[1].split(":")[1], 16) for each in sockets if each[3] == "0A" and f"socket:[{each[9]}]" in mine}
(port,) = listens - {store.port}
(taken,) = (line.split()[1] for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (int(taken) * 1024 + (mebibytes << 20), resource.RLIM_INFINITY))
print(store.port, unix, f"127.0.0.1:{port}", flush=True)
sys.stdin.read()
"""


class Target:
    """An agent in a process of its own that may take so many MiB more, until it is relieved."""

    def __init__(self, mebibytes: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TENSORFERRY_LOG": "error"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT, KEY, str(mebibytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.process.stdout
        port, self.unix, self.tcp = self.process.stdout.readline().split()
        self.store = tensorferry.connect_store("127.0.0.1", int(port), KEY)

    def expect_alive(self) -> None:
        assert self.process.poll() is None, self.process.communicate()[1]

    def relieve(self) -> None:
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(self.process.pid, resource.RLIMIT_AS, unlimited)

    def expect_service(self) -> None:
        """The limit is lifted, and the agent serves a new peer."""
        self.expect_alive()
        self.relieve()
        with tensorferry.Agent("peer", store=self.store, key=KEY) as peer:
            assert peer.rpc_sync("target", "echo", args=("still here",), timeout=60) == "still here"


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    made = Target(request.param)
    yield made
    made.process.kill()
    made.process.communicate()


@pytest.mark.skipif(not HOSTILE_PEER.is_file(), reason="tests/hostile is not built")
@pytest.mark.parametrize("target", [8, 24, 64], indirect=True)
def test_a_process_without_memory_goes_on_when_there_is_some(target: Target) -> None:
    attack = [str(HOSTILE_PEER), target.unix, target.tcp, KEY, "3000", "11"]
    with contextlib.suppress(subprocess.TimeoutExpired):  # the target may take no link any more
        subprocess.run(attack, capture_output=True, timeout=20, check=False)
    target.expect_service()


@pytest.mark.parametrize("target", [8], indirect=True)
def test_links_for_which_there_is_no_memory_end_and_the_process_goes_on(target: Target) -> None:
    peers = []
    with contextlib.suppress(OSError, AssertionError):  # the target refuses, or ends the connection
        for number in range(1500):
            peers.append(RawPeer(target.unix, f"peer{number}", patience=5))
    target.expect_alive()
    for peer in peers:
        peer.socket.close()
    target.expect_service()


@pytest.mark.parametrize("target", [64], indirect=True)
def test_a_call_for_which_there_is_no_memory_fails_with_resource_exhausted(target: Target) -> None:
    with tensorferry.Agent("caller", store=target.store, key=KEY) as caller:
        for value in (torch.ones(1 << 25), np.ones(1 << 24), bytes(1 << 27), "x" * (1 << 27)):
            with pytest.raises(errors.ResourceExhausted, match="no memory on cpu"):
                caller.rpc_sync("target", "echo", args=(value,), timeout=60)
            assert caller.rpc_sync("target", "echo", args=("others go on",), timeout=60) == "others go on"
    target.expect_service()
