"""The options of ``torch.distributed.rpc``, so that programs written for it start unchanged."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    DeviceLike = int | str | torch.device
    DeviceMap = dict[DeviceLike, DeviceLike]

__all__ = ["BackendType", "RpcBackendOptions", "TensorPipeRpcBackendOptions"]

DEFAULT_RPC_TIMEOUT_SEC = 60.0
DEFAULT_INIT_METHOD = "env://"
DEFAULT_NUM_WORKER_THREADS = 16


class BackendType(enum.Enum):
    """The backends that ``init_rpc`` accepts, for compatibility with torch. Both mean this package.

    Example::

        assert rpc.BackendType.TENSORPIPE.name == "TENSORPIPE"
    """

    TENSORPIPE = "tensorpipe"
    TENSORFERRY = "tensorferry"


class RpcBackendOptions:
    """The options that all backends share.

    Args:
        rpc_timeout: the default time-out of calls, in seconds; 0: none.
        init_method: where the agents meet: ``env://``, ``tcp://host:port``, ``file:///path``.

    Raises:
        ValueError: ``rpc_timeout`` is not a number.

    Example::

        options = rpc.RpcBackendOptions(rpc_timeout=20, init_method="tcp://127.0.0.1:29500")
    """

    def __init__(self, rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC, init_method: str = DEFAULT_INIT_METHOD) -> None:
        self.rpc_timeout = rpc_timeout
        self.init_method = init_method

    @property
    def rpc_timeout(self) -> float:
        """The default time-out of calls, in seconds; 0: none."""
        return self._rpc_timeout

    @rpc_timeout.setter
    def rpc_timeout(self, seconds: float) -> None:
        self._rpc_timeout = float(seconds)


_TENSORPIPE_CHANNELS = ("basic", "xth", "cma", "mpt_uv", "cuda_basic", "cuda_xth", "cuda_ipc", "cuda_gdr")
_TENSORPIPE_TRANSPORTS = ("uv", "shm", "ibv")


def _check_names(kind: str, given: Sequence[str], known: Sequence[str]) -> None:
    if isinstance(given, str) or not given:
        raise ValueError(f"{kind} is a list of names, of {', '.join(known)}, not {given!r}")
    if unknown := [each for each in given if each not in known]:
        raise ValueError(f"{kind} names {unknown[0]!r}; TensorPipe has {', '.join(known)}")


def options_of_tensorpipe_parts(
    *, _transports: Sequence[str] | None = None, _channels: Sequence[str] | None = None
) -> dict[str, Any]:
    """The options of an agent that mean the same as these names of TensorPipe's transports and channels."""
    options: dict[str, Any] = {}
    if _channels is not None:
        _check_names("_channels", _channels, _TENSORPIPE_CHANNELS)
        ours = ["basic" if each == "mpt_uv" else each for each in _channels]  # TCP by several connections
        options["channels"] = ",".join(dict.fromkeys(ours))
    if _transports is not None:
        _check_names("_transports", _transports, _TENSORPIPE_TRANSPORTS)
        if "ibv" in _transports and "uv" not in _transports:
            raise ValueError(
                "_transports names 'ibv' without 'uv': calls between hosts travel by TCP, and only tensors by RDMA, by "
                "the channel ibv. Add 'uv'"
            )
        if "shm" not in _transports:
            options["unix_sockets"] = False
        elif len(_transports) == 1:
            options["interface"] = "lo"
    return options


def options_of_torchs(given: object) -> dict[str, Any]:
    """The same for options of torch's own classes, whose Python has no names for them."""
    import torch

    tensorpipe = getattr(torch._C._distributed_rpc, "_TensorPipeRpcBackendOptionsBase", ())
    if not isinstance(given, tensorpipe):
        return {}
    from .. import _torch_rpc  # type: ignore[attr-defined]  # a compiled module without types

    transports, channels = _torch_rpc.tensorpipe_parts(given)
    return options_of_tensorpipe_parts(_transports=transports, _channels=channels)


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """torch's options. All of them are used except ``num_worker_threads``.

    Args:
        num_worker_threads: stored, but not used. The number of threads grows with the functions that block, up to
            ``max_threads=`` of ``init_rpc``, and beyond it with those that wait for a call of their own.
        rpc_timeout: the default time-out of calls, in seconds; 0: none.
        init_method: ``env://``, ``tcp://host:port`` or ``file:///path``.
        device_maps: for each peer, a dict from devices here to devices there. Tensors in arguments land by it, and
            tensors in results land by its inverse. A tensor on a device that the map does not name lands on the device
            of the same index, else on the first GPU, else on the CPU (torch refuses to send it).
        devices: the local GPUs that tensors may be on; None: all. Name the GPUs of ``device_maps`` too.
        _transports: how calls travel: ``shm`` between processes of one host, ``uv`` by TCP. Without ``shm`` they go by
            TCP on one host too; with ``shm`` alone no other host is reached. ``ibv`` needs ``uv`` beside it, because
            calls do not travel by RDMA; tensors do, by the channel ``ibv``.
        _channels: the channels that may carry tensors, in this order, as ``channels=`` of ``init_rpc``, which goes
            before it. TensorFerry's have TensorPipe's names; ``mpt_uv`` is ``basic``.

    Raises:
        ValueError: a map of ``device_maps`` is not one to one, TensorPipe has no such transport or channel, or
            ``_transports`` has ``ibv`` without ``uv``.

    Example::

        options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=20)
        options.set_device_map("worker1", {"cuda:0": "cuda:1"})
        options.set_devices(["cuda:0"])
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: dict[str, DeviceMap] | None = None,
        devices: list[DeviceLike] | None = None,
        _transports: list[str] | None = None,
        _channels: list[str] | None = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        self.agent_options = options_of_tensorpipe_parts(_transports=_transports, _channels=_channels)
        self.num_worker_threads = num_worker_threads
        self.device_maps: dict[str, dict[torch.device, torch.device]] = {}
        self.devices: list[torch.device] = []
        for to, device_map in (device_maps or {}).items():
            self.set_device_map(to, device_map)
        if devices:
            self.set_devices(devices)

    def set_device_map(self, to: str, device_map: DeviceMap) -> None:
        """Adds to the map of devices by which tensors sent to ``to`` land there. The map is one to one.

        Args:
            to: the peer's name.
            device_map: a dict from devices here to devices there.

        Raises:
            ValueError: two devices here would map to one there, or one here to two there.
        """
        import torch

        mine = self.device_maps.setdefault(to, {})
        for local, remote in device_map.items():
            key, value = torch.device(local), torch.device(remote)
            taken = [k for k, v in mine.items() if v == value and k != key]
            if taken or mine.get(key, value) != value:
                raise ValueError(f"device maps are one to one: {key} to {value}, but {taken or mine[key]} is taken")
            mine[key] = value

    def set_devices(self, devices: list[DeviceLike]) -> None:
        """Names the local devices that calls may use.

        Args:
            devices: such as ``["cuda:0", "cuda:1"]``.

        Raises:
            RuntimeError: torch does not know such a device.
        """
        import torch

        self.devices = [torch.device(device) for device in devices]


def are_known(options: object) -> bool:
    """Whether ``init_rpc`` knows all settings of ``options``: those of this package, and torch's own."""
    if isinstance(options, TensorPipeRpcBackendOptions) or type(options) is RpcBackendOptions:
        return True
    import torch.distributed.rpc as theirs

    base = getattr(theirs, "RpcBackendOptions", None)
    tensorpipe = getattr(theirs, "TensorPipeRpcBackendOptions", None)
    return (base is not None and type(options) is base) or (tensorpipe is not None and isinstance(options, tensorpipe))
