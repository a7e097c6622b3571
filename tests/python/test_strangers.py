"""Strangers: processes without the key, on this host and on another one, and an agent with all defaults."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
from pathlib import Path

import tensorferry
from emulated_network import EmulatedNetwork

KEY = "the key that strangers lack"

AGENT = """
import os, sys, tensorferry

key = sys.argv[1]
server = tensorferry.StoreServer("127.0.0.1", 0, key)
store = tensorferry.connect_store("127.0.0.1", server.port, key)
agent = tensorferry.Agent("target", store=store, key=key, unix_sockets=False, shared_memory=False)
files = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
mine = {os.readlink(file) for file in files if os.path.lexists(file)}
sockets = [line.split() for line in open("/proc/net/tcp")][1:]
listens = {int(each[1].split(":")[1], 16) for each in sockets if each[3] == "0A" and f"socket:[{each[9]}]" in mine}
(port,) = listens - {server.port}
print(server.port, port, flush=True)
sys.stdin.read()
"""


def test_a_log_that_nobody_reads_and_strangers_fill_stops_no_agent() -> None:
    unread, log = os.pipe()
    target = subprocess.Popen(
        [sys.executable, "-c", AGENT, KEY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
    )
    try:
        assert target.stdout
        store_port, port = map(int, target.stdout.readline().split())
        os.set_blocking(log, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(log, b"x" * 4096)
        os.set_blocking(log, True)  # the agent shares the open file: a write to it would block
        for _ in range(300):
            with (
                socket.create_connection(("127.0.0.1", port), timeout=60) as stranger,
                contextlib.suppress(ConnectionResetError),
            ):
                stranger.sendall(b"G" * 48)
                stranger.recv(1)  # the agent closes it, when it has logged that
        store = tensorferry.connect_store("127.0.0.1", store_port, KEY)
        with tensorferry.Agent("peer", store=store, key=KEY, unix_sockets=False, shared_memory=False) as peer:
            assert peer.rpc_sync("target", max, args=(1, 2), timeout=60) == 2
        assert not select.select([], [log], [], 0)[1], "the pipe was full all the time"
    finally:
        target.kill()
        target.communicate()
        os.close(unread)
        os.close(log)


JOB = """
import socket, sys
import tensorferry.rpc as rpc

reachable = socket.create_server(("0.0.0.0", 0))
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
rpc.init_rpc("alone", rank=0, world_size=1, init_method=f"tcp://127.0.0.1:{port}")
print(reachable.getsockname()[1], flush=True)
sys.stdin.read()
"""

ATTACK = """
import socket, sys

for port in sys.argv[2:]:
    try:
        socket.create_connection((sys.argv[1], int(port)), timeout=30).close()
        print(port)
    except ConnectionRefusedError:
        pass
"""


def test_another_host_reaches_no_port_of_a_job_without_a_key() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TENSORFERRY_KEY")}
    with EmulatedNetwork("victim", "attacker") as network:
        pipe = subprocess.PIPE
        job = network.start("victim", [sys.executable, "-c", JOB], stdin=pipe, stdout=pipe, env=environment)
        try:
            assert job.stdout
            reachable = job.stdout.readline().strip()
            tables = (Path(f"/proc/{job.pid}/net/{table}").read_text() for table in ("tcp", "tcp6"))
            rows = [line.split() for table in tables for line in table.splitlines()[1:]]
            listening = {str(int(row[1].rpartition(":")[2], 16)) for row in rows if row[3] == "0A"}
            assert reachable in listening and len(listening) >= 3, "the store and the agent listen"
            attack = [sys.executable, "-c", ATTACK, network.addresses["victim"], *listening]
            attacker = network.start("attacker", attack, stdout=pipe)
            reached = attacker.communicate(timeout=300)[0].split()
            assert reached == [reachable]
        finally:
            job.kill()
            job.communicate()
