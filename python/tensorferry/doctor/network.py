"""Checks of the network: interfaces, names, and the store at which the job meets."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from .finding import BROKEN, NOTE, OK, SLOW, Finding, Host

__all__ = ["CHECKS", "why_not_reached"]

_UP = 0x1  # IFF_UP, of an interface's flags
_GET_FLAGS, _GET_MTU = 0x8913, 0x8921  # SIOCGIFFLAGS, SIOCGIFMTU
_PATIENCE = 3.0  # seconds to connect


def why_not_reached(host: str, port: int, patience: float = _PATIENCE) -> tuple[str, str]:
    """Tries to connect. Returns ``("", "")``, or what happened and what to do."""
    try:
        socket.create_connection((host, port), patience).close()
    except socket.gaierror as error:
        return f"{host} is no known name: {error.strerror}", "Use an address, or add the name to DNS or /etc/hosts."
    except ConnectionRefusedError:
        found = f"no process listens at {host}:{port}, or a firewall rejects it"
        return found, "Start that process first; check the port."
    except TimeoutError:
        found = f"{host}:{port} does not answer within {patience:g} s"
        return found, f"A firewall drops packets to port {port}, or the address is of another network: open the port."
    except OSError as error:
        return f"{host}:{port}: {error.strerror or error}", "Check the routes (ip route) and the interface."
    return "", ""


def _interfaces(host: Host) -> dict[str, tuple[bool, int]]:
    """Returns whether each interface is up, and its MTU.

    The kernel is asked, because ``/sys`` may be that of another network namespace.
    """
    out = {}
    if host.root != Path("/"):
        for name in host.names("sys/class/net"):
            place = f"sys/class/net/{name}"
            flags = int(host.read(f"{place}/flags") or "0x0", 16)
            out[name] = bool(flags & _UP), int(host.read(f"{place}/mtu") or 1500)
        return out
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            asked = struct.pack("16s24x", name.encode())
            (flags,) = struct.unpack_from("H", fcntl.ioctl(any_socket, _GET_FLAGS, asked), 16)
            (mtu,) = struct.unpack_from("i", fcntl.ioctl(any_socket, _GET_MTU, asked), 16)
            out[name] = bool(flags & _UP), mtu
    return out


def loopback(host: Host) -> Iterator[Finding]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), _PATIENCE).close()
    except OSError as error:
        cost = "Stores at 127.0.0.1 cannot be reached: no job starts."
        yield Finding("loopback", BROKEN, f"127.0.0.1: {error.strerror or error}", cost, "ip link set lo up")
    else:
        yield Finding("loopback", OK, "127.0.0.1 can be reached")


def _wanted_interfaces(host: Host, there: Mapping[str, tuple[bool, int]]) -> Iterator[Finding]:
    """Looks at TENSORFERRY_SOCKET_IFNAME: prefixes of names, or names after `=` or `^`, or addresses of this host."""
    text = host.variable("TENSORFERRY_SOCKET_IFNAME").strip()
    given = [each.strip() for each in text.lstrip("=^").split(",") if each.strip()]
    if not given or text.startswith("^"):
        return
    exact = text.startswith("=")
    matching = [name for name in there if any(name == each if exact else name.startswith(each) for each in given)]
    for name in matching:
        if not there[name][0]:
            cost = "No agent listens there: peers of other hosts cannot reach this one by it."
            yield Finding("interfaces", BROKEN, f"the interface {name} is down", cost, f"ip link set {name} up")
    if matching:
        return
    try:
        for each in given:
            socket.getaddrinfo(each, None)
    except OSError:
        found = f"TENSORFERRY_SOCKET_IFNAME names {text}, and no interface of this host matches"
        yield Finding("interfaces", BROKEN, found, "No agent starts.", f"This host has {', '.join(there)}.")


def interfaces(host: Host) -> Iterator[Finding]:
    there = _interfaces(host)
    yield from _wanted_interfaces(host, there)
    up = [name for name, (is_up, _) in there.items() if name != "lo" and is_up]
    if not up:
        yield Finding("interfaces", NOTE, "no interface but loopback is up", "Other hosts cannot be reached.")
        return
    parts = []
    for name in up:
        speed = host.read(f"sys/class/net/{name}/speed")
        parts.append(name + (f" ({int(speed) / 1000:g} Gbit/s)" if speed and int(speed) > 0 else ""))
    yield Finding("interfaces", OK, f"up: {', '.join(parts)}")
    for name in up:
        mtu = there[name][1]
        if mtu < 1280:
            cost = "Many small packets: large tensors between hosts are slower."
            yield Finding("interfaces", SLOW, f"{name} has an MTU of {mtu}", cost, f"ip link set {name} mtu 1500")


def name(host: Host) -> Iterator[Finding]:
    own = socket.gethostname()
    try:
        socket.getaddrinfo(own, None)
    except OSError:
        cost = "torch's own stores and debug server give this name to other ranks; TensorFerry gives addresses."
        yield Finding("name", NOTE, f"the name of this host, {own}, has no address", cost, "Add it to /etc/hosts.")


def rendezvous(host: Host) -> Iterator[Finding]:
    address, port = host.variable("MASTER_ADDR"), host.variable("MASTER_PORT")
    if not address and not port:
        return
    cost = "init_rpc() by env:// fails."
    if not address or not port.isdigit():
        found = f"MASTER_ADDR={address!r} and MASTER_PORT={port!r} are no address"
        yield Finding("rendezvous", BROKEN, found, cost, "Set both: those of the host of rank 0.")
        return
    rank = host.variable("RANK")
    if rank == "0" and host.variable("TORCHELASTIC_USE_AGENT_STORE") != "True":
        try:
            family = socket.getaddrinfo(address, None)[0][0]
            socket.create_server((address, int(port)), family=family).close()
        except OSError as error:
            found = f"rank 0 cannot listen at {address}:{port}: {error.strerror or error}"
            advice = "MASTER_ADDR is an address of the host of rank 0, and MASTER_PORT a free port."
            yield Finding("rendezvous", BROKEN, found, cost, advice)
        else:
            yield Finding("rendezvous", OK, f"rank 0 can listen at {address}:{port}")
        return
    why, advice = why_not_reached(address, int(port))
    if why:
        yield Finding("rendezvous", BROKEN, f"the store: {why}", cost, advice)
    else:
        yield Finding("rendezvous", OK, f"the store at {address}:{port} can be reached")


def namespaces(host: Host) -> Iterator[Finding]:
    mapped = (host.read("proc/self/uid_map") or "").split()
    users = len(mapped) == 3 and mapped[2] != "4294967295"
    inside = " and ".join(
        what for what, yes in (("a user namespace", users), ("a container", _in_container(host))) if yes
    )
    if not inside:
        yield Finding("namespaces", OK, "this process is in no container")
        return
    found = f"this process is in {inside}, as uid {os.geteuid()}"
    cost = (
        "Agents in other containers of this host are reached by TCP unless the containers share the network namespace, "
        "and share memory only if they also have one user."
    )
    yield Finding("namespaces", NOTE, found, cost, "docker run --network=host --ipc=host --pid=host shares all.")


def _in_container(host: Host) -> bool:
    marks = ".dockerenv", "run/.containerenv"
    if any((host.root / mark).exists() for mark in marks):
        return True
    pids = [
        line.split()[1:] for line in (host.read("proc/self/status") or "").splitlines() if line.startswith("NSpid:")
    ]
    return bool(pids) and len(pids[0]) > 1


CHECKS = (loopback, interfaces, name, rendezvous, namespaces)
