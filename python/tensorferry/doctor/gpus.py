"""Checks of GPUs: the driver, torch's kernels, what processes can share of their memory, and NVRTC."""

from __future__ import annotations

from collections.abc import Iterator

from .finding import BROKEN, NOTE, OK, SLOW, Finding, Host
from .gpu_facts import GpuFacts

__all__ = ["CHECKS"]

_ON_CPU = "Tensors stay on the CPU."
_STAGED = "Their tensors go through the host's memory (cuda_basic): 10 to 20 GB/s."


def gpus(host: Host) -> Iterator[Finding]:
    driver = (host.root / "proc/driver/nvidia").exists()
    facts = host.gpu_facts()
    if not facts.torch_cuda:
        if driver:
            cost = "Tensors on GPUs cannot be used at all."
            found = "this host has GPUs, and this torch was built without CUDA"
            yield Finding("gpus", BROKEN, found, cost, "pip install torch from the index for CUDA.")
    elif facts.gpus:
        count, names = len(facts.gpus), sorted({each.name for each in facts.gpus})
        yield Finding("gpus", OK, f"{count} GPU{'s' * (count > 1)}: {', '.join(names)}")
        for check in (_driver, _kernels, _compute_modes, _peer_access, _nvrtc):
            yield from check(facts)
        yield from _handles(host, facts)
        yield from _gpu_direct(host, facts)
    elif driver:
        yield from _no_gpu(host, facts)
    else:
        yield Finding("gpus", NOTE, "no GPU")


def _no_gpu(host: Host, facts: GpuFacts) -> Iterator[Finding]:
    """Says why CUDA finds no GPU although the driver is loaded."""
    hidden = host.variable("CUDA_VISIBLE_DEVICES")
    if hidden in ("-1", "NoDevFiles"):
        yield Finding("gpus", NOTE, f"CUDA_VISIBLE_DEVICES={hidden} hides the GPUs", _ON_CPU, "")
    elif facts.driver_error and not facts.driver_cuda:
        found = f"the driver is loaded, and its library is not: {facts.driver_error}"
        yield Finding(
            "driver", BROKEN, found, _ON_CPU, "docker run --gpus all, or install the package with libcuda.so.1."
        )
    elif _too_old(facts):
        yield _old_driver(facts)
    elif hidden:
        found = f"CUDA_VISIBLE_DEVICES={hidden} leaves no GPU"
        yield Finding("gpus", SLOW, found, _ON_CPU, "nvidia-smi -L lists them.")
    else:
        found = f"the driver is loaded, and CUDA finds no GPU: {facts.driver_error or 'no device'}"
        yield Finding("gpus", BROKEN, found, _ON_CPU, "Run nvidia-smi; docker run --gpus all.")


def _too_old(facts: GpuFacts) -> bool:
    """Returns whether the driver is of an older major version of CUDA than torch: minor versions are compatible."""
    return bool(facts.driver_cuda) and int(facts.driver_cuda.split(".")[0]) < int(facts.torch_cuda.split(".")[0])


def _old_driver(facts: GpuFacts) -> Finding:
    found = f"the driver supports CUDA {facts.driver_cuda} at most, and torch was built for {facts.torch_cuda}"
    cost = "CUDA does not start in torch: tensors on GPUs cannot be used."
    major = facts.driver_cuda.split(".")[0]
    return Finding("driver", BROKEN, found, cost, f"Update the driver, or install a torch for CUDA {major}.")


def _driver(facts: GpuFacts) -> Iterator[Finding]:
    if _too_old(facts):
        yield _old_driver(facts)
    elif facts.driver_error:
        cost = "TensorFerry moves no memory of GPUs: GPU tensors are refused."
        yield Finding(
            "driver", BROKEN, f"libcuda.so.1: {facts.driver_error}", cost, "Run nvidia-smi; reinstall the driver."
        )
    else:
        found = f"the driver supports CUDA {facts.driver_cuda}, and torch was built for {facts.torch_cuda}"
        yield Finding("driver", OK, found)


def _kernels(facts: GpuFacts) -> Iterator[Finding]:
    """Looks for GPUs for which torch has neither kernels of their generation nor PTX of an older one."""
    numbers = [(kind, int("".join(filter(str.isdigit, number)))) for kind, _, number in
               (each.partition("_") for each in facts.torch_architectures)]  # fmt: skip
    for index, gpu in enumerate(facts.gpus):
        major, minor = gpu.capability
        own = major * 10 + minor
        runs = any(number <= own and (kind == "compute" or number // 10 == major) for kind, number in numbers)
        if numbers and not runs:
            found = (
                f"torch has no kernels for cuda:{index} ({gpu.name}, sm_{own}): {', '.join(facts.torch_architectures)}"
            )
            cost = "Operations on it fail: no kernel image is available."
            yield Finding("gpu_kernels", BROKEN, found, cost, "Install a torch that was built for it.")


def _compute_modes(facts: GpuFacts) -> Iterator[Finding]:
    for index, gpu in enumerate(facts.gpus):
        advice = f"nvidia-smi -i {index} -c DEFAULT"
        if gpu.compute_mode == 2:
            found = f"cuda:{index} is in compute mode PROHIBITED"
            yield Finding("compute_mode", BROKEN, found, "No process can use it.", advice)
        elif gpu.compute_mode == 3:
            found = f"cuda:{index} is in compute mode EXCLUSIVE_PROCESS"
            cost = "A second process cannot use it: it cannot map the memory of the first one (cuda_ipc)."
            yield Finding("compute_mode", SLOW, found, cost, advice)


def _peer_access(facts: GpuFacts) -> Iterator[Finding]:
    pairs = len(facts.gpus) * (len(facts.gpus) - 1)
    if facts.without_peer_access:
        one, other = facts.without_peer_access[0]
        count = len(facts.without_peer_access)
        found = f"{count} of {pairs} pairs of GPUs have no peer access, as cuda:{one} and cuda:{other}"
        advice = "Choose GPUs of one NVLink domain or PCIe switch (nvidia-smi topo -m)."
        yield Finding("peer_access", SLOW, found, _STAGED, advice)
    elif pairs:
        yield Finding("peer_access", OK, "all pairs of GPUs have peer access")


def _nvrtc(facts: GpuFacts) -> Iterator[Finding]:
    if facts.nvrtc_error:
        cost = "Custom reductions on GPUs are not compiled: they run on the CPU, or fail."
        major = facts.torch_cuda.partition(".")[0]
        package = "nvidia-cuda-nvrtc-cu12" if major == "12" else "nvidia-cuda-nvrtc"
        found = f"NVRTC cannot be loaded: {facts.nvrtc_error}"
        yield Finding("nvrtc", SLOW, found, cost, f"pip install {package}, or put its folder in LD_LIBRARY_PATH.")
    else:
        yield Finding("nvrtc", OK, "NVRTC can be loaded")


def _handles(host: Host, facts: GpuFacts) -> Iterator[Finding]:
    """Looks for settings of torch's allocator whose memory other processes cannot map."""
    variables = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    variable, settings = next(((each, host.variable(each)) for each in variables if host.variable(each)), ("", ""))
    without = [f"cuda:{index}" for index, gpu in enumerate(facts.gpus) if not gpu.posix_descriptors]
    if "backend:cudaMallocAsync" in settings:
        found = f"{variable} takes memory from cudaMallocAsync's pools, which cannot be exported"
        yield Finding("gpu_handles", SLOW, found, _STAGED, f"Remove backend:cudaMallocAsync from {variable}.")
    elif "expandable_segments:True" in settings and without:
        found = f"{variable} has expandable_segments:True, and {without[0]} exports no file descriptors of such memory"
        yield Finding("gpu_handles", SLOW, found, _STAGED, f"Set expandable_segments:False in {variable}.")
    elif "expandable_segments:True" in settings:
        yield Finding("gpu_handles", OK, "other processes can map torch's expandable segments (file descriptors)")
    else:
        yield Finding("gpu_handles", OK, "other processes can map torch's memory (IPC handles)")


def _gpu_direct(host: Host, facts: GpuFacts) -> Iterator[Finding]:
    without = [f"cuda:{index}" for index, gpu in enumerate(facts.gpus) if not gpu.gpu_direct_rdma]
    if without and host.names("sys/class/infiniband"):
        cost = "The channel cuda_gdr is off: GPU tensors between hosts are copied through the host's memory."
        found = f"RDMA cards cannot reach the memory of {', '.join(without)}"
        advice = "modprobe nvidia_peermem, or a driver with DMA-BUF on a kernel of 5.12 or newer."
        yield Finding("gpu_direct", SLOW, found, cost, advice)


CHECKS = (gpus,)
