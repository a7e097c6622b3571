"""Two hosts that two networks join: large tensors go over both side by side."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import outputs_of

PROGRAM = [sys.executable, str(Path(__file__).parent / "programs" / "wide_transfers.py")]
NETWORKS = range(2)
MEBIBYTE = 1 << 20


class Joined:
    """The hosts "sender" and "receiver": network namespaces that end with this object. Each has the interfaces "net0"
    and "net1", and what these send is limited to `rate`."""

    def __init__(self, rate: str) -> None:
        self._hosts = {
            name: subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "echo; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            for name in ("sender", "receiver")
        }
        try:
            for host in self._hosts.values():
                assert host.stdout is not None
                host.stdout.readline()  # it is in its namespace now
            for n in NETWORKS:
                other = self._hosts["receiver"].pid
                self.run("sender", f"ip link add net{n} type veth peer name net{n} netns {other}")
                for end, name in enumerate(self._hosts, 1):
                    self.run(name, f"ip address add 10.99.{n}.{end}/24 dev net{n} && ip link set net{n} up")
                    self.run(name, f"tc qdisc add dev net{n} root tbf rate {rate} burst 256kb latency 20ms")
            for name in self._hosts:
                self.run(name, "ip link set lo up")
        except BaseException:
            self.close()
            raise

    def command(self, host: str, *command: str) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._hosts[host].pid}/ns/net", *command]

    def run(self, host: str, script: str) -> None:
        done = subprocess.run(self.command(host, "sh", "-ec", script), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{script}: {done.stderr}"

    def outputs(self, mode: str, interfaces: str) -> str:
        """What the program prints at the sender, if both hosts use these interfaces."""
        environment = {
            **os.environ,
            "TENSORFERRY_KEY": "a key of the job",
            "TENSORFERRY_CHANNELS": "basic",
            "TENSORFERRY_SOCKET_IFNAME": interfaces,
        }
        environment.pop("TENSORFERRY_KEY_FILE", None)
        started = [
            subprocess.Popen(
                self.command(name, *PROGRAM, mode, name, str(rank), "10.99.0.1:29500"),
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, name in enumerate(self._hosts)
        ]
        return str(outputs_of(started)[0])

    def close(self) -> None:
        for host in self._hosts.values():
            host.communicate()


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Joined]:
    if os.geteuid() != 0:
        pytest.skip("needs root, for network namespaces")
    for program in ("ip", "tc", "nsenter"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    limited = "ip link set lo up && tc qdisc add dev lo root tbf rate 1gbit burst 256kb latency 20ms"
    tried = subprocess.run(["unshare", "--net", "sh", "-ec", limited], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"this kernel does not limit an interface's rate: {tried.stderr.strip()}")
    made = Joined(getattr(request, "param", "1gbit"))
    yield made
    made.close()


def test_a_large_tensor_goes_over_both_interfaces_in_both_directions(hosts: Joined) -> None:
    moved = json.loads(hosts.outputs("count", "=net0,net1"))
    assert sorted(moved) == ["net0", "net1"]
    for name, (received, sent) in moved.items():
        assert received >= 8 * MEBIBYTE and sent >= 8 * MEBIBYTE, f"{name}: {moved}"


def test_an_interface_that_is_not_named_carries_nothing(hosts: Joined) -> None:
    moved = json.loads(hosts.outputs("count", "=net0"))
    assert max(moved["net1"]) < MEBIBYTE, moved
    assert min(moved["net0"]) >= 64 * MEBIBYTE, moved


@pytest.mark.parametrize("hosts", ["100mbit"], indirect=True)
def test_an_interface_that_goes_down_ends_the_transfer_and_the_next_one_goes_by_the_other(hosts: Joined) -> None:
    ended, *came = hosts.outputs("cut", "=net0,net1").split()
    assert ended == "lost"
    assert came == [str(64 * MEBIBYTE)]
