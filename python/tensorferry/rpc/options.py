"""The options of ``torch.distributed.rpc``, so that programs written for it start here as they are."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    DeviceLike = int | str | torch.device
    DeviceMap = dict[DeviceLike, DeviceLike]

__all__ = ["BackendType", "RpcBackendOptions", "TensorPipeRpcBackendOptions"]

DEFAULT_RPC_TIMEOUT_SEC = 60.0
DEFAULT_INIT_METHOD = "env://"
DEFAULT_NUM_WORKER_THREADS = 16


class BackendType(enum.Enum):
    """Accepted by ``init_rpc`` for torch's sake; either means this package.

    Example::

        assert rpc.BackendType.TENSORPIPE.name == "TENSORPIPE"
    """

    TENSORPIPE = "tensorpipe"
    TENSORFERRY = "tensorferry"


class RpcBackendOptions:
    """What every backend takes.

    Args:
        rpc_timeout: the default time-out of calls, seconds; 0: none.
        init_method: where agents find one another: ``env://``, ``tcp://host:port``, ``file:///path``.

    Raises:
        ValueError: ``rpc_timeout`` is no number.

    Example::

        options = rpc.RpcBackendOptions(rpc_timeout=20, init_method="tcp://127.0.0.1:29500")
    """

    def __init__(self, rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC, init_method: str = DEFAULT_INIT_METHOD) -> None:
        self.rpc_timeout = rpc_timeout
        self.init_method = init_method

    @property
    def rpc_timeout(self) -> float:
        """The default time-out of calls, seconds; 0: none."""
        return self._rpc_timeout

    @rpc_timeout.setter
    def rpc_timeout(self, seconds: float) -> None:
        self._rpc_timeout = float(seconds)


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """torch's options. All are used but ``num_worker_threads``.

    Args:
        num_worker_threads: kept, not used: threads here grow with the calls that block (``max_threads=`` of
            ``init_rpc`` bounds them), so a fixed number could only make nested calls deadlock.
        rpc_timeout: the default time-out of calls, seconds; 0: none.
        init_method: ``env://``, ``tcp://host:port`` or ``file:///path``.
        device_maps: by peer, devices here to devices there: where tensors among the arguments land, and, the other way
            round, those of the results. What is not named lands on the device of the same index where there is one
            (torch refuses to send it).
        devices: the local GPUs that tensors may be on; None: all. Those that a device map names belong to them.

    Raises:
        ValueError: a map of ``device_maps`` is not one to one.

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
        _transports: list[Any] | None = None,
        _channels: list[Any] | None = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        self.num_worker_threads = num_worker_threads
        self.device_maps: dict[str, dict[torch.device, torch.device]] = {}
        self.devices: list[torch.device] = []
        for to, device_map in (device_maps or {}).items():
            self.set_device_map(to, device_map)
        if devices:
            self.set_devices(devices)

    def set_device_map(self, to: str, device_map: DeviceMap) -> None:
        """Says on which of ``to``'s devices tensors of ours shall land: one to one.

        Args:
            to: the peer's name.
            device_map: devices here to devices there.

        Raises:
            ValueError: two devices here would go to one there, or one to two.
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
            RuntimeError: torch knows no such device.
        """
        import torch

        self.devices = [torch.device(device) for device in devices]
