"""An agent whose process may take no more memory, and a peer that makes it want some."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import tensorferry
import tensorferry._C

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


@pytest.mark.skipif(not HOSTILE_PEER.is_file(), reason="tests/hostile is not built")
@pytest.mark.parametrize("mebibytes", [8, 24, 64])
def test_a_process_without_memory_goes_on_when_there_is_some(mebibytes: int) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TENSORFERRY_LOG": "error"}
    target = subprocess.Popen(
        [sys.executable, "-c", AGENT, KEY, str(mebibytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert target.stdout
        port, unix, tcp = target.stdout.readline().split()
        store = tensorferry.connect_store("127.0.0.1", int(port), KEY)
        attack = [str(HOSTILE_PEER), unix, tcp, KEY, "3000", "11"]
        with contextlib.suppress(subprocess.TimeoutExpired):  # the target may take no link any more
            subprocess.run(attack, capture_output=True, timeout=20, check=False)
        assert target.poll() is None, target.communicate()[1]
        resource.prlimit(target.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        peer = tensorferry.Agent("peer", store=store, key=KEY)
        try:
            assert peer.rpc_sync("target", "echo", args=("still here",), timeout=60) == "still here"
        finally:
            peer.leave()
    finally:
        target.kill()
        target.communicate()
