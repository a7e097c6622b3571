"""The Python parts of :class:`RRef`, beside the C++ class."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._C import Future, RRef
    from .agent import WorkerInfo

__all__ = ["Proxy", "owner_of", "type_of"]


class Proxy:
    """Calls methods of the object that an :class:`RRef` refers to: ``proxy.name(...)`` calls its method ``name``."""

    __slots__ = ("_call", "_idempotent", "_timeout")

    def __init__(self, call: Callable[..., Any], timeout: float, idempotent: bool) -> None:
        self._call = call
        self._timeout = timeout
        self._idempotent = idempotent

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name, self._timeout, self._idempotent)


def owner_of(rref: RRef[Any]) -> WorkerInfo:
    """Implements ``RRef.owner()``."""
    owner: WorkerInfo = rref._agent.get_worker_info(rref.owner_name())
    return owner


def _local_type(rref: RRef[Any]) -> type:
    return type(rref.local_value())


def type_of(rref: RRef[Any], timeout: float, blocking: bool) -> type | Future[type]:
    """Implements ``RRef._get_type()``, which torch has too."""
    future: Future[type] = rref._agent.rpc_async(rref.owner_name(), _local_type, args=(rref,), timeout=timeout)
    return future.wait() if blocking else future
