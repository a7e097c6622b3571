"""Checks of GPUs and of RDMA cards."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import torch

from .finding import BROKEN, NOTE, OK, SLOW, Finding, Host

__all__ = ["CHECKS"]


def gpus(host: Host) -> Iterator[Finding]:
    driver = (host.root / "proc/driver/nvidia").exists()
    if not torch.version.cuda:
        if driver:
            cost = "Tensors on GPUs cannot be used at all."
            found = "this host has GPUs, and this torch was built without CUDA"
            yield Finding("gpus", BROKEN, found, cost, "pip install torch from the index for CUDA.")
        return
    hidden = host.variable("CUDA_VISIBLE_DEVICES")
    if not torch.cuda.is_available():
        if driver and hidden not in ("", "-1", "NoDevFiles"):
            found = f"CUDA_VISIBLE_DEVICES={hidden} leaves no GPU"
            yield Finding("gpus", SLOW, found, "Tensors stay on the CPU.", "nvidia-smi -L lists them.")
        elif driver:
            cost = "Tensors stay on the CPU."
            yield Finding("gpus", BROKEN, "the driver is loaded, and CUDA finds no GPU", cost, "Run nvidia-smi.")
        else:
            yield Finding("gpus", NOTE, "no GPU")
        return
    count = torch.cuda.device_count()
    yield Finding(
        "gpus", OK, f"{count} GPUs: {', '.join(sorted({torch.cuda.get_device_name(i) for i in range(count)}))}"
    )
    yield from _peer_access(count)
    yield from _nvrtc()


def _peer_access(count: int) -> Iterator[Finding]:
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    without = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if without:
        one, other = without[0]
        found = f"{len(without)} of {len(pairs)} pairs of GPUs have no peer access, as cuda:{one} and cuda:{other}"
        cost = "Their tensors go through the host's memory (cuda_basic): 10 to 20 GB/s."
        yield Finding(
            "peer_access", SLOW, found, cost, "Choose GPUs of one NVLink domain or PCIe switch (nvidia-smi topo -m)."
        )
    elif pairs:
        yield Finding("peer_access", OK, "all pairs of GPUs have peer access")


def _nvrtc() -> Iterator[Finding]:
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        ctypes.CDLL(f"libnvrtc.so.{major}")
    except OSError as error:
        cost = "Custom reductions on GPUs are not compiled: they run on the CPU, or fail."
        yield Finding(
            "nvrtc", SLOW, f"NVRTC cannot be loaded: {error}", cost, f"pip install nvidia-cuda-nvrtc-cu{major}"
        )
    else:
        yield Finding("nvrtc", OK, "NVRTC can be loaded")


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


CHECKS = (gpus, rdma)
