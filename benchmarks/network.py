"""Two hosts for the rows `*network-*`: network namespaces joined by veth pairs; and iperf3 between them."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import time
import uuid
from pathlib import Path

from benchmarks.native import Missing

CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000


def _installed(program: str) -> None:
    if shutil.which(program) is None:
        raise Missing(f"{program} is not installed")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise Missing(f"{' '.join(command)}: {done.stderr.strip()}")


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _addresses(network: int) -> tuple[str, str]:
    """The caller's and the callee's."""
    return f"10.213.{77 + network}.1", f"10.213.{77 + network}.2"


CALLER, CALLEE = _addresses(0)


def enter(namespace: str, file: str) -> None:
    """Moves this process to an emulated host: into a network namespace, and with a boot id of its own, which is written
    to `file`. A program that finds out whether a peer is on its host then sees another one. Threads that run already
    stay where they are."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int, what: str) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")

    with open(f"/run/netns/{namespace}") as inside:
        check(libc.setns(inside.fileno(), CLONE_NEWNET), f"enter {namespace}")
    Path(file).write_text(f"{uuid.uuid4()}\n")
    check(libc.unshare(CLONE_NEWNS), "a mount namespace")
    check(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "make mounts private")
    target = b"/proc/sys/kernel/random/boot_id"
    check(libc.mount(os.fsencode(file), target, None, MS_BIND, None), "mount a boot id")


class Hosts:
    """Makes the namespaces, joined by `networks` pairs. `rate`: the bound on what each end of a pair sends, as tc reads
    it. Raises Missing where the machine does not let it."""

    def __init__(self, networks: int = 1, rate: str = "") -> None:
        if os.geteuid() != 0:
            raise Missing("needs root, for network namespaces")
        for program in ("ip", "tc") if rate else ("ip",):
            _installed(program)
        self.names = [f"tensorferry-{os.getpid()}-{networks}-{end}" for end in ("caller", "callee")]
        self._pairs = [[f"tf{os.getpid()}{end}{n}" for end in "ab"] for n in range(networks)]
        try:
            for name in self.names:
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
            for network, pair in enumerate(self._pairs):
                self._join(network, pair, rate)
        except Missing:
            self.close()
            raise

    def _join(self, network: int, pair: list[str], rate: str) -> None:
        caller, callee = ["netns", self.names[0]], ["netns", self.names[1]]
        _ip("link", "add", pair[0], *caller, "type", "veth", "peer", "name", pair[1], *callee)
        for name, device, address in zip(self.names, pair, _addresses(network)):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", device)
            _ip("-n", name, "link", "set", device, "up")
            if rate:
                limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "20ms"]
                _run("tc", "-n", name, "qdisc", "add", "dev", device, *limit)

    def interfaces(self, networks: int) -> dict[str, str]:
        """The variables of programs that use so many of the networks."""
        devices = [device for pair in self._pairs[:networks] for device in pair]
        return {"TENSORFERRY_SOCKET_IFNAME": "=" + ",".join(devices)}

    def options(self) -> dict[str, str]:
        """What a program needs to know to be on both hosts."""
        return {"namespaces": ",".join(self.names), "address": CALLER}

    def end(self, number: int) -> dict[str, str]:
        """What a Python process needs to know to be on one of the hosts, 0 or 1."""
        return {"namespace": self.names[number], "device": self._pairs[0][number]}

    def check_iperf3(self) -> None:
        """Raises Missing where there is no iperf3."""
        _installed("iperf3")

    def iperf3(self, connections: int, seconds: int = 1) -> float:
        """Bytes a second from the caller's host to the callee's."""
        inside = [["ip", "netns", "exec", name, "iperf3"] for name in self.names]
        with subprocess.Popen([*inside[1], "-s", "-1"], stdout=subprocess.DEVNULL) as server:
            try:
                for _ in range(100):
                    client = [*inside[0], "-c", CALLEE, "-P", str(connections), "-t", str(seconds), "-J"]
                    done = subprocess.run(client, capture_output=True, text=True, timeout=60)
                    found = json.loads(done.stdout or "{}")
                    received = found.get("end", {}).get("sum_received")
                    if received is not None:
                        return float(received["bits_per_second"]) / 8
                    if "refused" not in found.get("error", ""):
                        raise RuntimeError(f"iperf3: {found.get('error', done.stderr)}")
                    time.sleep(0.05)  # the server does not listen yet
            finally:
                server.kill()
        raise RuntimeError("iperf3: its server does not listen")

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
