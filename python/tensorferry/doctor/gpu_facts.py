"""What torch and the driver tell about the GPUs of this host, as data that the checks read."""

from __future__ import annotations

import ctypes
import glob
import os
from dataclasses import dataclass

import torch

__all__ = ["Gpu", "GpuFacts", "gather"]

# CUdevice_attribute of cuda.h
_COMPUTE_MODE, _POSIX_DESCRIPTORS, _GPU_DIRECT_RDMA, _DMA_BUF = 20, 103, 116, 124


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch sees.

    Args:
        name: the name of its model.
        capability: its compute capability, such as ``(9, 0)``.
        compute_mode: 0: any process may use it; 2: none may; 3: one process at a time.
        posix_descriptors: whether memory of the virtual memory API can be exported as a file descriptor.
        gpu_direct_rdma: whether RDMA cards can read and write its memory.
    """

    name: str
    capability: tuple[int, int] = (9, 0)
    compute_mode: int = 0
    posix_descriptors: bool = True
    gpu_direct_rdma: bool = True


@dataclass(frozen=True)
class GpuFacts:
    """The GPUs of this host, and the libraries for them.

    Args:
        torch_cuda: the version of CUDA that torch was built for, such as ``"13.0"``; ``""``: it was built without.
        torch_architectures: what torch has kernels for, such as ``("sm_80", "sm_90", "compute_90")``.
        driver_cuda: the newest version of CUDA that the driver supports, such as ``"12.8"``; ``""``: there is none.
        driver_error: why the driver's library cannot be used; ``""``: it can.
        gpus: the GPUs that torch sees.
        without_peer_access: the pairs of GPUs of which the first cannot reach the memory of the second.
        nvrtc_error: why NVRTC cannot be loaded; ``""``: it can.
    """

    torch_cuda: str = ""
    torch_architectures: tuple[str, ...] = ()
    driver_cuda: str = ""
    driver_error: str = ""
    gpus: tuple[Gpu, ...] = ()
    without_peer_access: tuple[tuple[int, int], ...] = ()
    nvrtc_error: str = ""


def gather() -> GpuFacts:
    """Returns the facts of this host. The driver is initialized in this process if torch was built for CUDA."""
    if not torch.version.cuda:
        return GpuFacts()
    driver, version, error = _driver()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    return GpuFacts(
        torch_cuda=torch.version.cuda,
        torch_architectures=tuple(torch.cuda.get_arch_list()),
        driver_cuda=version,
        driver_error=error,
        gpus=tuple(_gpu(driver, index) for index in range(count)),
        without_peer_access=tuple(pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)),
        nvrtc_error=_nvrtc_error(version) if count else "",
    )


def _driver() -> tuple[ctypes.CDLL | None, str, str]:
    """Returns the driver's library, the newest CUDA that it supports, and why it cannot be used."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return None, "", str(error)
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    text = f"{version.value // 1000}.{version.value % 1000 // 10}"
    failed = driver.cuInit(0)
    if failed == 0:
        return driver, text, ""
    name = ctypes.c_char_p()
    driver.cuGetErrorName(failed, ctypes.byref(name))
    return driver, text, f"cuInit: {(name.value or b'').decode() or failed}"


def _gpu(driver: ctypes.CDLL | None, index: int) -> Gpu:
    def attribute(number: int) -> int:
        value, device = ctypes.c_int(), ctypes.c_int()
        if driver is None or driver.cuDeviceGet(ctypes.byref(device), index) != 0:
            return 0
        return value.value if driver.cuDeviceGetAttribute(ctypes.byref(value), number, device) == 0 else 0

    return Gpu(
        name=torch.cuda.get_device_name(index),
        capability=torch.cuda.get_device_capability(index),
        compute_mode=attribute(_COMPUTE_MODE),
        posix_descriptors=attribute(_POSIX_DESCRIPTORS) != 0,
        gpu_direct_rdma=attribute(_DMA_BUF) != 0 or attribute(_GPU_DIRECT_RDMA) != 0,
    )


def _nvrtc_error(driver_cuda: str) -> str:
    """Returns why NVRTC cannot be loaded, from where the library looks: the loader's folders, and those of wheels.

    It looks for the NVRTC of torch's CUDA first, and for none that is newer than the driver.
    """
    folder = os.path.dirname(os.path.dirname(torch.__file__))
    own = int((torch.version.cuda or "0").split(".")[0])
    newest = int((driver_cuda or "13").split(".")[0])
    versions = sorted((each for each in (13, 12) if each <= newest), key=lambda each: each != own)
    names = [f"libnvrtc.so.{version}" for version in versions]
    places = [
        "/usr/local/cuda/lib64",
        f"{folder}/torch/lib",
        f"{folder}/nvidia/cu13/lib",
        f"{folder}/nvidia/cuda_nvrtc/lib",
    ]
    errors = []
    for path in [*names, *(path for place in places for name in names for path in glob.glob(f"{place}/{name}"))]:
        try:
            ctypes.CDLL(path)
        except OSError as error:
            errors.append(str(error))
        else:
            return ""
    return errors[0] if errors else f"the driver supports CUDA {driver_cuda} at most"
