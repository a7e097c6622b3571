"""TensorFerry as a backend of ``torch.distributed.rpc``: existing programs keep their calls,
and the features that torch builds on its module, such as TorchScript and distributed autograd.

Importing this module registers ``rpc.BackendType.TENSORFERRY``. With the environment variable
``TENSORFERRY_TORCH_RPC=1``, ``init_rpc`` without ``backend`` takes it. An installed package needs no import then: torch
loads it by the entry point ``torch.backends``.
"""

from __future__ import annotations

import atexit
import enum
import functools
import json
import os
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.distributed.rpc import _utils, api, backend_registry

from . import _C, _torch_rpc, torch_calls  # type: ignore[attr-defined]  # a compiled module without types
from .errors import DeadlineExceeded, InvalidArgument
from .plugins import load_installed
from .rendezvous import LongWait, check_place, interruption_names, url_for_torch
from .rpc.options import options_of_tensorpipe_parts, options_of_torchs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .calls import DeviceLike

__all__ = ["RpcBackendOptions"]

NAME = "TENSORFERRY"

# Options of the agent underneath, which RpcBackendOptions takes too.
AGENT_OPTIONS = (
    "key", "channels", "max_threads", "max_bytes_in_flight", "heartbeat", "peer_timeout", "interface", "ports",
    "unix_sockets", "shared_memory", "socket_dir", "tls",
)  # fmt: skip


def _device_map(given: Mapping[Any, Any]) -> dict[torch.device, torch.device]:
    return {torch.device(local): torch.device(remote) for local, remote in given.items()}


def _device_list(given: Sequence[DeviceLike]) -> list[torch.device]:
    devices = [torch.device(device) for device in given]
    for device in devices:
        if device.type != "cuda":
            raise ValueError(f"`devices` is a list of CUDA devices, but got device type {device.type}")
    return devices


class RpcBackendOptions(rpc.RpcBackendOptions):  # type: ignore[misc]  # torch does not say its type
    """Options of the backend, for ``init_rpc(rpc_backend_options=...)``. ``TensorPipeRpcBackendOptions`` is taken too.

    Args:
        num_worker_threads: reported by ``get_debug_info`` alone; the pool grows while functions block, and shrinks.
        rpc_timeout: the default time-out of calls, in seconds; 0: none.
        init_method: where the workers meet; as for ``init_process_group``.
        device_maps: for each callee, a one-to-one dict from devices here to devices there; ``init_rpc`` checks that. A
            tensor on a GPU travels only by such a map; results travel by its inverse.
        devices: the local GPUs that tensors may be on; None: those of all device maps.
        join_timeout: seconds that ``init_rpc`` waits for the process that serves the rendezvous, and then for the other
            workers; 0: no limit.
        agent_options: the arguments of :class:`tensorferry.Agent` with the same names: ``channels``, ``key``,
            ``interface``, ``ports``, ``unix_sockets``, ``shared_memory``, ``socket_dir``, ``tls``,
            ``heartbeat``, ``peer_timeout``, ``max_threads``, ``max_bytes_in_flight``.

    Raises:
        ValueError: a device is no GPU, or ``num_worker_threads`` is not positive.
        TypeError: an option does not exist, or has a wrong type.

    Example::

        options = tensorferry.torch.RpcBackendOptions(rpc_timeout=10, channels="shm,basic")
        options.set_device_map("worker1", {0: 1})
        assert options.device_maps["worker1"] == {torch.device("cuda:0"): torch.device("cuda:1")}
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = rpc.constants.DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = rpc.constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = rpc.constants.DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[DeviceLike, DeviceLike]] | None = None,
        devices: Sequence[DeviceLike] | None = None,
        join_timeout: float = 300.0,
        **agent_options: Any,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        if num_worker_threads <= 0:
            raise ValueError(f"num_worker_threads must be positive, not {num_worker_threads}")
        for option in agent_options:
            if option not in AGENT_OPTIONS:
                raise TypeError(f"RpcBackendOptions has no option {option!r}")
        self.num_worker_threads = num_worker_threads
        self.device_maps = {to: _device_map(one) for to, one in (device_maps or {}).items()}
        self.devices = _device_list(devices or [])
        self.join_timeout = join_timeout
        self.agent_options = agent_options

    def set_device_map(self, to: str, device_map: Mapping[DeviceLike, DeviceLike]) -> None:
        """Adds entries to the device map of a callee.

        Args:
            to: the callee's name.
            device_map: devices here, and the devices there on which tensors from them land.

        Raises:
            ValueError: the map has another entry for a device. ``init_rpc`` refuses two devices with one target.

        Example::

            options = tensorferry.torch.RpcBackendOptions()
            options.set_device_map("worker1", {"cuda:0": "cuda:0"})
        """
        known = self.device_maps.get(to, {})
        added = _device_map(device_map)
        for local, remote in added.items():
            if known.get(local, remote) != remote:
                raise ValueError(
                    f"`set_device_map` only supports 1-to-1 mapping, not {local} to both {remote} and {known[local]}"
                )
        self.device_maps[to] = {**known, **added}

    def set_devices(self, devices: Sequence[DeviceLike]) -> None:
        """Sets the local GPUs that tensors may be on.

        Args:
            devices: the GPUs, as torch.device, text, or index.

        Raises:
            ValueError: a device is no GPU.

        Example::

            options = tensorferry.torch.RpcBackendOptions()
            options.set_devices(["cuda:0"])
        """
        self.devices = _device_list(devices)


class _FaultyOptions(RpcBackendOptions):
    """Options for tests: some sends fail, and some are late. Types are names of torch's MessageType."""

    def __init__(
        self,
        *,
        messages_to_fail: Sequence[str] = (),
        messages_to_delay: Mapping[str, float] | None = None,
        num_fail_sends: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.messages_to_fail = list(messages_to_fail)
        self.messages_to_delay = dict(messages_to_delay or {})
        self.num_fail_sends = num_fail_sends


# torch::distributed::rpc::MessageType: torch has the names in C++ alone.
_REQUEST = 0x100
_MESSAGE_TYPES = {
    "SCRIPT_CALL": _REQUEST | 0x00,
    "PYTHON_CALL": _REQUEST | 0x02,
    "SCRIPT_REMOTE_CALL": _REQUEST | 0x04,
    "PYTHON_REMOTE_CALL": _REQUEST | 0x05,
    "SCRIPT_RREF_FETCH_CALL": _REQUEST | 0x07,
    "PYTHON_RREF_FETCH_CALL": _REQUEST | 0x08,
    "RREF_USER_DELETE": _REQUEST | 0x0B,
    "RREF_FORK_REQUEST": _REQUEST | 0x0C,
    "RREF_CHILD_ACCEPT": _REQUEST | 0x0D,
    "FORWARD_AUTOGRAD_REQ": _REQUEST | 0x0F,
    "BACKWARD_AUTOGRAD_REQ": _REQUEST | 0x11,
    "CLEANUP_AUTOGRAD_CONTEXT_REQ": _REQUEST | 0x13,
    "RUN_WITH_PROFILING_REQ": _REQUEST | 0x15,
    "RREF_BACKWARD_REQ": _REQUEST | 0x17,
}


def _construct_options(rpc_timeout: float, init_method: str, **options: Any) -> RpcBackendOptions:
    parts = {option: options.pop(option, None) for option in ("_transports", "_channels")}
    options = {**options_of_tensorpipe_parts(**parts), **options}
    return RpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **options)


def _own_options(given: Any) -> RpcBackendOptions:
    if isinstance(given, RpcBackendOptions):
        return given
    tensorpipe = getattr(torch._C._distributed_rpc, "_TensorPipeRpcBackendOptionsBase", ())
    if not isinstance(given, tensorpipe):
        raise TypeError(
            "`rpc_backend_options` must be a `tensorferry.torch.RpcBackendOptions` or a `TensorPipeRpcBackendOptions`, "
            f"not {given!r}"
        )
    return RpcBackendOptions(
        num_worker_threads=given.num_worker_threads,
        rpc_timeout=given.rpc_timeout,
        init_method=given.init_method,
        device_maps=given.device_maps,
        devices=given.devices,
        **options_of_torchs(given),
    )


def _host_of(init_method: str) -> str:
    """The rendezvous's host; "" if it is this one."""
    found = urlparse(init_method)
    if found.scheme == "env":
        return os.environ.get("MASTER_ADDR", "")
    return found.hostname or ""


# ---- joining


def _agree_on_kind(store: dist.Store, static: bool) -> None:
    kind = "static" if static else "dynamic"
    agreed = store.compare_set("tensorferry/kind", "", kind).decode()
    if agreed != kind:
        raise RuntimeError(
            "RPC group mixes statically and dynamically initialized members which is not supported. "
            f"This member is {kind}, and the first one was {agreed}: give world_size= at all of them, or at none"
        )


def _await_keys(store: dist.Store, keys: list[str], rank: int, timeout: float) -> None:
    """Waits until each worker has set its key of ``keys``, in slices: torch's own wait would hear neither of Ctrl-C nor
    of ``timeout`` (seconds; 0: no limit)."""

    def missing() -> str:
        absent = [str(other) for other, key in enumerate(keys) if not store.check([key])]
        return ("rank " if len(absent) == 1 else "ranks ") + ", ".join(absent)

    wait = LongWait(timeout)
    pause = 0.001
    while not store.check(keys):
        wait.tell(lambda: f"rank {rank} waits for {missing()} of a world of {len(keys)} to join")
        if wait.over():
            raise DeadlineExceeded(
                f"a world of {len(keys)} was not complete within {timeout:g} s; missing: {missing()}. Are their "
                "processes running, with the same rendezvous and world size?"
            )
        time.sleep(min(pause, wait.left()))
        pause = min(2 * pause, 0.02 + len(keys) / 8000)  # one store serves all workers


def _exchange_devices(store: dist.Store, name: str, rank: int, world_size: int, options: RpcBackendOptions) -> Any:
    """Tells the other workers which devices and maps this one has, and checks those of all of them.

    Returns the reverse device maps, by which answers of this worker travel, and the devices that it needs.
    """
    mine: dict[str, Any] = {
        "name": name,
        "count": torch.accelerator.device_count(),
        "maps": {to: {str(a): str(b) for a, b in one.items()} for to, one in options.device_maps.items()},
        "devices": [str(device) for device in options.devices],
    }
    keys = [f"tensorferry/devices/{other}" for other in range(world_size)]
    store.set(keys[rank], json.dumps(mine))
    with interruption_names("the other workers to join"):
        _await_keys(store, keys, rank, options.join_timeout)
    all_ = [mine if other == rank else json.loads(store.get(key)) for other, key in enumerate(keys)]
    names = [one["name"] for one in all_]
    maps = {
        one["name"]: {
            to: {torch.device(a): torch.device(b) for a, b in entries.items()} for to, entries in one["maps"].items()
        }
        for one in all_
    }
    devices = {one["name"]: [torch.device(device) for device in one["devices"]] for one in all_}
    counts = {one["name"]: one["count"] for one in all_}
    backend_registry._validate_device_maps(names, counts, maps, devices)
    reverse = backend_registry._create_reverse_mapping(name, names, maps)
    return reverse, backend_registry._create_device_list(devices[name], maps[name], reverse)


def _make_agent(
    store: dist.Store, name: str, rank: int, world_size: int, options: RpcBackendOptions, reverse: Any, devices: Any
) -> Any:
    agent_options = {"reaches": _host_of(options.init_method), **options.agent_options}
    agent_options["gpus"] = list(range(torch.cuda.device_count())) if torch.version.cuda else []
    settings = {
        "world_size": world_size,
        "timeout": options.rpc_timeout,
        "join_timeout": options.join_timeout,
        "worker_threads": options.num_worker_threads,
        "device_maps": options.device_maps,
        "reverse_device_maps": reverse,
        "devices": devices,
        "fail": {_MESSAGE_TYPES[one] for one in getattr(options, "messages_to_fail", ())},
        "failures": getattr(options, "num_fail_sends", 0),
        "delay": {_MESSAGE_TYPES[one]: late for one, late in getattr(options, "messages_to_delay", {}).items()},
        "load": torch_calls.load,
        "run": torch_calls.run,
    }
    load_installed()
    agent = _torch_rpc.RpcAgent(store, name, rank, agent_options, settings)
    agent.store = store
    agent._options = options
    agent._get_backend_options = lambda: options  # torch asks for it when a worker joins a group without a world size
    global _agent
    _agent = agent  # keeps the attributes: torch keeps the C++ object alone
    torch_calls.use(None if devices else agent)
    return agent


_agent: Any = None


def _init_backend(
    store: dist.Store, name: str, rank: int, world_size: int | None, rpc_backend_options: rpc.RpcBackendOptions
) -> Any:
    if not isinstance(store, dist.Store):
        raise TypeError(f"`store` must be a c10d::Store. {store}")
    options = _own_options(rpc_backend_options)
    _agree_on_kind(store, bool(world_size))
    if world_size:
        reverse, devices = _exchange_devices(store, name, rank, world_size, options)
        if devices and torch.cuda.is_available():
            torch.cuda.init()  # a peer's tensor may come before the program uses a GPU
        agent = _make_agent(store, name, rank, world_size, options, reverse, devices)
        api._init_rpc_states(agent)
        return agent
    with _utils._group_membership_management(store, name, True):
        agent = _make_agent(store, name, rank, 0, options, {}, options.devices)
        for other in _members(store):
            if other.name == name:
                raise RuntimeError(f"the worker name {name!r} is not unique")
            agent._update_group_membership(other, [], {}, True)
        _set_members(store, [*_members(store), rpc.WorkerInfo(name, rank)])
        api._init_rpc_states(agent)
        try:
            backend_registry._set_devices_and_reverse_device_map(agent)
        except Exception:
            shutdown()
            raise
        return agent


# Workers of a group without a world size, as the store lists them. Whoever changes the list holds torch's token.
def _members(store: dist.Store) -> list[rpc.WorkerInfo]:
    listed = store.compare_set("tensorferry/members", "", "[]")
    return [rpc.WorkerInfo(name, id_) for name, id_ in json.loads(listed or b"[]")]


def _set_members(store: dist.Store, members: list[rpc.WorkerInfo]) -> None:
    store.set("tensorferry/members", json.dumps([[one.name, one.id] for one in members]))


# ---- leaving


def _leave_group(agent: Any, timeout: float) -> None:
    me = agent.get_worker_info()
    with _utils._group_membership_management(agent.store, me.name, False):
        for worker in agent.get_worker_infos():
            if worker.name != me.name:
                api.rpc_sync(worker.name, _utils._update_group_membership, args=(me, [], {}, False))
        _set_members(agent.store, [one for one in _members(agent.store) if one.name != me.name])
        agent.join(shutdown=True, timeout=timeout)


_torch_shutdown = api.shutdown
_torch_init_rpc = rpc.init_rpc


@functools.wraps(_torch_shutdown)
def shutdown(graceful: bool = True, timeout: float = rpc.constants.DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    # torch's own shutdown knows groups without a world size only of TensorPipe's agent, which a torch may lack.
    if not rpc._is_current_rpc_agent_set() or not isinstance(
        agent := rpc._get_current_rpc_agent(), _torch_rpc.RpcAgent
    ):
        _torch_shutdown(graceful, timeout)
        return
    global _agent
    try:
        if graceful and agent.is_static_group:
            api._wait_all_workers(timeout)
            api._delete_all_user_and_unforked_owner_rrefs()
            agent.join(shutdown=True, timeout=timeout)
        elif graceful:
            _leave_group(agent, timeout)
    finally:
        torch_calls.use(None)
        api._finalize_shutdown()
        _agent = None


@functools.wraps(_torch_init_rpc)
def init_rpc(name: str, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
    if backend is None and os.environ.get("TENSORFERRY_TORCH_RPC") == "1":
        backend = backend_registry.BackendType[NAME]
    elif isinstance(backend, enum.Enum) and backend_registry.backend_registered(backend.name):
        backend = backend_registry.BackendType[backend.name]  # each registration makes a new enumeration
    if isinstance(backend, enum.Enum) and backend.name == NAME:
        return _init_rpc(name, backend, *args, **kwargs)
    return _torch_init_rpc(name, backend, *args, **kwargs)


def _init_rpc(name: str, backend: Any, rank: Any = -1, world_size: Any = None, rpc_backend_options: Any = None) -> Any:
    """As torch's ``init_rpc``, but opens a TCPStore by ``_rendezvous()``: torch's own wait for the server and for the
    workers hears neither of Ctrl-C nor of ``join_timeout``.

    Raises:
        InvalidArgument: the world has no such rank, for which torch would wait.
    """
    options = RpcBackendOptions() if rpc_backend_options is None else rpc_backend_options
    method = getattr(options, "init_method", "")
    check_place(method, rank, world_size)
    try:
        found = _C.Rendezvous(method, rank, world_size or 0)
    except (InvalidArgument, TypeError):  # torch says what is wrong, or takes it
        found = None
    if found is None or found.path or found.built_in or not found.port:
        return _torch_init_rpc(name, backend, rank, world_size, options)
    options.init_method = url_for_torch(method, found, getattr(options, "join_timeout", 300.0))
    try:
        return _torch_init_rpc(name, backend, rank, world_size, options)
    finally:
        options.init_method = method


def _register() -> None:
    if backend_registry.backend_registered(NAME):
        return
    backend_registry.register_backend(NAME, _construct_options, _init_backend)
    rpc.BackendType = backend_registry.BackendType  # type: ignore[misc]
    rpc.init_rpc = init_rpc
    rpc.shutdown = api.shutdown = shutdown
    torch_calls.install()


_register()
# Runs before the interpreter ends, because no thread of ours may enter it afterwards.
atexit.register(_torch_rpc.set_closing)
