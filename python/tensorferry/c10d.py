"""The backend ``tensorferry`` of ``torch.distributed``: ``dist.init_process_group("tensorferry")``.

``pip install`` registers it, by an entry point. Without an installation, ``import tensorferry.c10d`` does.
"""

from __future__ import annotations

import threading
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from . import _C
from .agent import Agent
from .collectives import Group, form_group

__all__ = ["group_of", "register"]

_lock = threading.Lock()
_own: Agent | None = None  # the agent of this process's groups, if it has no other
_groups: dict[str, Group] = {}  # by the name of torch's group


def _shared(store: Any) -> Any:
    """Returns the store without the prefixes that torch has put around it."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _agent(store: Any) -> Agent:
    """Returns the agent of ``init_rpc``, or else one of the backend's own."""
    global _own
    default = _C.default_agent()
    if default is not None and not default._left:
        assert isinstance(default, Agent)
        return default
    with _lock:
        if _own is None or _own._left or not _own._usable_here:
            _own = Agent(
                f"c10d-{uuid.uuid4().hex[:12]}",
                store=_shared(store),
                trust="registered",
                prefix="tensorferry/c10d",
                devices=[],
            )
        return _own


def _make(options: Any, _pg_options: Any = None) -> Any:
    store, rank, size = options.store, options.group_rank, options.group_size
    timeout = options.timeout
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    agent = _agent(store)
    store.set(f"tensorferry/agent/{rank}", agent.name)
    names = [store.get(f"tensorferry/agent/{each}").decode() for each in range(size)]
    label = options.group_id or "default"
    group = form_group(names, agent=agent, label=label, timeout=seconds)
    _groups[label] = group
    return _C.process_group(group._group, seconds)


def group_of(process_group: Any = None) -> Group:
    """Returns the :class:`tensorferry.collectives.Group` under a process group of torch's; None: the default one.

    Raises:
        KeyError: the process group has another backend.

    Example::

        print(tensorferry.c10d.group_of().explain("all_reduce", 1 << 20))
    """
    group = dist.group.WORLD if process_group is None else process_group
    if group is None:
        raise ValueError("there is no default process group: call torch.distributed.init_process_group() first")
    return _groups[group.group_name]


def register() -> None:
    """Registers the backend. Does nothing the second time."""
    if not hasattr(dist.Backend, "TENSORFERRY"):
        dist.Backend.register_backend("tensorferry", _make, extended_api=True, devices=["cpu"])


register()
