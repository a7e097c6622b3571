"""An agent without a store in common with its peers: a program carries its address, a few bytes, to each of them.

For frameworks that connect processes in their own way. The agent has a store of its own, which holds its record, and
those of the peers that it was introduced to.
"""

from __future__ import annotations

import base64
import binascii
import threading
from typing import Any

import torch.distributed as dist

from . import errors
from .agent import Agent
from .transport_buffers import packed, unpacked

__all__ = ["StandaloneAgent"]

_PREFIX = "tensorferry/transport"  # of the keys in its store


class StandaloneAgent:
    """An agent with a store of its own. Peers may call only what it exposes. Thread-safe.

    Args:
        name: the agent's name. No two agents that a peer is introduced to may have the same.
        options: others of :class:`tensorferry.Agent`. Beyond one host it needs ``key=`` and ``interface=``, or the
            environment variables of both.

    Raises:
        TypeError: an option that the class sets itself. As :class:`tensorferry.Agent`.

    Example::

        from tensorferry.standalone import StandaloneAgent

        trainer, reader = StandaloneAgent("trainer-1"), StandaloneAgent("reader-1")
        trainer.agent.publish({"w": torch.ones(2)}, name="weights")
        name, incarnation = reader.introduce(trainer.address)
        assert reader.agent.subscribe("weights", from_=name).latest()["w"].sum() == 2
        reader.forget(name)
        trainer.leave()
        reader.leave()
    """

    def __init__(self, name: str, **options: Any) -> None:
        self._store = dist.HashStore()
        self._lock = threading.Lock()  # guards the keys of peers in the store
        own: dict[str, Any] = {"store": self._store, "prefix": _PREFIX, "trust": "registered", "devices": []}
        if taken := own.keys() & options:
            raise TypeError(f"an endpoint has its own {', '.join(sorted(taken))}")
        self.agent = Agent(name, **own, **options)
        self.incarnation = self.agent._self[2]

    @property
    def address(self) -> bytes:
        """What :meth:`introduce` of a peer takes, in ASCII. It holds no key."""
        record = base64.b64encode(self._store.get(_record_key(self.agent.name))).decode("ascii")
        return packed("address", {"name": self.agent.name, "incarnation": self.incarnation, "record": record})

    def introduce(self, address: bytes) -> tuple[str, int]:
        """Learns where a peer is, and connects to nothing yet. Returns the peer's name and incarnation.

        Args:
            address: the peer's :attr:`address`.

        Raises:
            TypeError, InvalidArgument: this is no address.
        """
        found = unpacked("address", address, {"name": str, "incarnation": int, "record": str})
        name = found["name"]
        try:
            record = base64.b64decode(found["record"], validate=True)
        except binascii.Error as error:
            raise errors.InvalidArgument("this is no address of transport 'tensorferry'") from error
        with self._lock:
            if name != self.agent.name and not self._store.check([_claims_key(name)]):
                self._store.set(_record_key(name), record)  # type: ignore[arg-type] # torch's stubs know str alone
                self._store.add(_claims_key(name), 1)
        return name, found["incarnation"]

    def forget(self, name: str) -> None:
        """Undoes :meth:`introduce`.

        Args:
            name: the peer's.

        Raises:
            Nothing.
        """
        with self._lock:
            if name != self.agent.name:
                self._store.delete_key(_claims_key(name))
                self._store.delete_key(_record_key(name))

    def leave(self) -> None:
        """Leaves, as :meth:`tensorferry.Agent.leave`.

        Raises:
            Nothing.
        """
        self.agent.leave()


def _record_key(agent: str) -> str:
    return f"{_PREFIX}/rec/n/{agent}/1"


def _claims_key(agent: str) -> str:
    return f"{_PREFIX}/gen/n/{agent}"
