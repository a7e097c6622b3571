"""Checks of RDMA cards."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

from .finding import BROKEN, NOTE, OK, SLOW, Finding, Host

__all__ = ["CHECKS"]


def rdma(host: Host) -> Iterator[Finding]:
    cards = host.names("sys/class/infiniband")
    wanted = [each.partition(":")[0].strip() for each in host.variable("TENSORFERRY_RDMA_DEVICES").split(",")]
    cost = "Tensors between hosts go by TCP."
    for name in filter(None, wanted):
        if name not in cards:
            found = f"TENSORFERRY_RDMA_DEVICES names {name}; this host has {', '.join(cards) or 'no card'}"
            yield Finding("rdma", BROKEN, found, cost, "ibv_devices lists the cards.")
    if not cards:
        yield Finding("rdma", NOTE, "no RDMA card", cost)
        return
    yield from _library(host, cost)
    if not [each for each in host.names("dev/infiniband") if each.startswith("uverbs")]:
        yield Finding(
            "rdma", BROKEN, "/dev/infiniband has no uverbs device", cost, "docker run --device=/dev/infiniband"
        )
    elif not any(
        os.access(host.root / "dev/infiniband" / each, os.R_OK | os.W_OK)
        for each in host.names("dev/infiniband")
        if each.startswith("uverbs")
    ):
        yield Finding(
            "rdma", BROKEN, "this user may not open /dev/infiniband/uverbs*", cost, "chmod 666 them, or a udev rule."
        )
    for card in cards:
        yield from _ports(host, card, cost)


def _library(host: Host, cost: str) -> Iterator[Finding]:
    path = host.variable("TENSORFERRY_LIBIBVERBS") or "libibverbs.so.1"
    try:
        ctypes.CDLL(path)
    except OSError as error:
        yield Finding(
            "rdma_library",
            BROKEN,
            f"{path} cannot be loaded: {error}",
            cost,
            "apt install libibverbs1 ibverbs-providers",
        )


def _ports(host: Host, card: str, cost: str) -> Iterator[Finding]:
    for port in host.names(f"sys/class/infiniband/{card}/ports"):
        place = f"sys/class/infiniband/{card}/ports/{port}"
        state = (host.read(f"{place}/state") or "unknown").rpartition(": ")[2]
        rate = host.read(f"{place}/rate") or "an unknown rate"
        layer = host.read(f"{place}/link_layer") or "unknown"
        zero = "0000:0000:0000:0000:0000:0000:0000:0000"
        gids = {int(each): host.read(f"{place}/gids/{each}") for each in host.names(f"{place}/gids") if each.isdigit()}
        valid = sorted(index for index, gid in gids.items() if gid and gid != zero)
        what = f"{card} port {port} ({layer}, {rate})"
        if state != "ACTIVE":
            yield Finding("rdma", SLOW, f"{what} is {state}", cost, "Check the cable and the switch; ibstat.")
        elif not valid:
            yield Finding("rdma_gids", BROKEN, f"{what} has no GID", cost, "Give its network interface an address.")
        else:
            chosen = host.variable("TENSORFERRY_RDMA_GID_INDEX")
            if chosen.isdigit() and int(chosen) not in valid:
                found = f"TENSORFERRY_RDMA_GID_INDEX={chosen} is no GID of {what}"
                yield Finding("rdma_gids", BROKEN, found, cost, f"It has {', '.join(map(str, valid))}; show_gids.")
            else:
                yield Finding("rdma", OK, f"{what} is active, with GIDs {', '.join(map(str, valid))}")


CHECKS = (rdma,)
