"""An agent behind a router that masquerades, as iptables does it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import outputs_of

PROGRAM = [sys.executable, str(Path(__file__).parent / "programs" / "behind_nat.py")]
OUTSIDE, PUBLIC = "10.99.2.2", "10.99.2.1"  # the server, and the router's address on that side
INSIDE, PRIVATE = "10.99.1.2", "10.99.1.1"  # the client, and the router's address on that side


class Routed:
    """The hosts "inside", "router" and "outside": network namespaces that end with this object. "outside" has no route
    to the addresses behind the router."""

    def __init__(self) -> None:
        self._hosts = {
            name: subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "echo; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            for name in ("inside", "router", "outside")
        }
        try:
            for host in self._hosts.values():
                assert host.stdout is not None
                host.stdout.readline()  # it is in its namespace now
            self._join("inside", INSIDE, "router", PRIVATE)
            self._join("outside", OUTSIDE, "router", PUBLIC)
            self.run("inside", f"ip route add default via {PRIVATE}")
            self.run("router", "sysctl -qw net.ipv4.ip_forward=1")
            self.run("router", f"iptables -t nat -A POSTROUTING -s {INSIDE} -j MASQUERADE")
        except BaseException:
            self.close()
            raise

    def _join(self, host: str, address: str, router: str, routers_address: str) -> None:
        pids = [self._hosts[name].pid for name in (host, router)]
        device = f"to-{host}"
        made = f"ip link add {device} type veth peer name eth0 netns {pids[0]}"
        self.run(router, made)
        self.run(router, f"ip address add {routers_address}/24 dev {device} && ip link set {device} up")
        self.run(host, f"ip address add {address}/24 dev eth0 && ip link set eth0 up && ip link set lo up")

    def command(self, host: str, *command: str) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._hosts[host].pid}/ns/net", *command]

    def run(self, host: str, script: str) -> str:
        done = subprocess.run(self.command(host, "sh", "-ec", script), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{script}: {done.stderr}"
        return done.stdout

    def close(self) -> None:
        for host in self._hosts.values():
            host.communicate()


@pytest.fixture
def hosts() -> Iterator[Routed]:
    if os.geteuid() != 0:
        pytest.skip("needs root, for network namespaces")
    for program in ("ip", "iptables", "nsenter", "sysctl"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    masquerade = ["unshare", "--net", "iptables", "-t", "nat", "-A", "POSTROUTING", "-j", "MASQUERADE"]
    tried = subprocess.run(masquerade, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"this kernel does not masquerade: {tried.stderr.strip()}")
    made = Routed()
    yield made
    made.close()


def test_an_agent_behind_a_masquerading_router_works_in_both_directions(hosts: Routed) -> None:
    way = subprocess.run(hosts.command("outside", "ip", "route", "get", INSIDE), capture_output=True, check=False)
    assert way.returncode != 0, "there is a route to the address behind the router"
    environment = {**os.environ, "TENSORFERRY_KEY": "a key of the job", "TENSORFERRY_CHANNELS": "basic"}
    environment.pop("TENSORFERRY_KEY_FILE", None)
    store = f"{OUTSIDE}:29500"
    started = [
        subprocess.Popen(
            hosts.command(name, *PROGRAM, name, str(rank), store),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, name in enumerate(("outside", "inside"))
    ]
    assert outputs_of(started)[1] == "both ways\n"
    translated = hosts.run("router", "iptables -t nat -L POSTROUTING -v -x -n")
    packets = [line.split()[0] for line in translated.splitlines() if "MASQUERADE" in line]
    assert int(packets[0]) > 0, "no connection went through the router"
