"""Groups of agents that reduce, gather and exchange tensors: :func:`form_group` makes one.

Every rank of a group calls the same operations in the same order. An operation returns a :class:`Work` at once, which
can be waited for and awaited. ``dist.init_process_group("tensorferry")`` uses the same groups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeVar

import torch

from . import _C, errors
from .agent import Agent

__all__ = ["Group", "Work", "form_group"]

T = TypeVar("T")


class Work(Generic[T]):
    """An operation of a group that has been started. ``await work`` returns its result too."""

    def __init__(self, work: _C.GroupWork, result: Callable[[], T]) -> None:
        self._work = work
        self._result = result

    def wait(self, timeout: float | None = None) -> T:
        """Waits for the operation and returns its result.

        Args:
            timeout: seconds; the operation goes on afterwards. None: until the operation's own time-out.

        Raises:
            InvalidArgument: the ranks called different operations; the text names the rank that differs.
            ConnectionLost: a rank has died or left. DeadlineExceeded: ranks have not come in time, or ``timeout`` has
                passed. Cancelled: a rank has aborted or left the group.
        """
        self._work.wait(timeout)
        return self._result()

    def done(self) -> bool:
        """Returns whether the operation has ended, with or without an error."""
        return self._work.done()

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def tell() -> None:
            if not ended.done():
                ended.set_result(None)

        def told() -> None:
            try:
                loop.call_soon_threadsafe(tell)
            except RuntimeError:
                pass  # the loop has been closed

        self._work.on_done(told)
        yield from ended.__await__()
        self._work.check()
        return self._result()


class Group:
    """An ordered list of agents that perform operations together. :func:`form_group` makes it.

    Tensors are those of the CPU, strided ones included. An input must not be written, and an output not be used, until
    the work has ended.
    """

    def __init__(self, agent: Agent, group: _C.Group) -> None:
        self._agent = agent
        self._group = group

    @property
    def rank(self) -> int:
        """This agent's place in the group."""
        return self._group.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._group.size

    @property
    def names(self) -> list[str]:
        """The names of the agents, in the order of their ranks."""
        return self._group.names

    @property
    def label(self) -> str:
        """The label that :func:`form_group` got."""
        return self._group.label

    def __repr__(self) -> str:
        return f"<tensorferry.collectives.Group {self.label!r}, rank {self.rank} of {self.size}>"

    def barrier(self, *, timeout: float | None = None) -> Work[None]:
        """Ends when all ranks have called it."""
        return Work(self._group.barrier(timeout), lambda: None)

    def monitored_barrier(self, timeout: float = 60.0, *, name_all: bool = True) -> None:
        """Waits for all ranks; if some do not come, rank 0 raises DeadlineExceeded with their names.

        Args:
            timeout: seconds.
            name_all: False: rank 0 names the first of them alone.
        """
        self._group.monitored_barrier(timeout, name_all)

    def broadcast(self, tensor: torch.Tensor, root: int = 0, *, timeout: float | None = None) -> Work[torch.Tensor]:
        """Copies the tensor of rank ``root`` into that of every other rank."""
        return Work(self._group.broadcast(tensor, root, timeout), lambda: tensor)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        *,
        out: torch.Tensor | None = None,
        factor: float = 1.0,
        timeout: float | None = None,
    ) -> Work[torch.Tensor]:
        """Reduces the tensors of all ranks; every rank gets the same bits.

        Args:
            op: ``sum``, ``average``, ``product``, ``min``, ``max``, ``band``, ``bor``, ``bxor`` or
                ``premultiplied_sum``.
            out: gets the result; None: ``tensor`` itself.
            factor: of ``premultiplied_sum``; the same at every rank.
        """
        into = tensor if out is None else out
        return Work(self._group.all_reduce(tensor, into, op, factor, timeout), lambda: into)

    def all_reduce_coalesced(
        self, tensors: Sequence[torch.Tensor], op: str = "sum", *, factor: float = 1.0, timeout: float | None = None
    ) -> Work[list[torch.Tensor]]:
        """Reduces several tensors of one dtype in place, as if they were one."""
        given = list(tensors)
        return Work(self._group.all_reduce_coalesced(given, op, factor, timeout), lambda: given)

    def reduce(
        self,
        tensor: torch.Tensor,
        root: int = 0,
        op: str = "sum",
        *,
        out: torch.Tensor | None = None,
        factor: float = 1.0,
        timeout: float | None = None,
    ) -> Work[torch.Tensor]:
        """Reduces the tensors of all ranks into that of rank ``root``, or into its ``out``."""
        into = tensor if out is None else out
        return Work(self._group.reduce(tensor, into, op, factor, root, timeout), lambda: into)

    def all_gather(
        self, tensor: torch.Tensor, outs: Sequence[torch.Tensor] | None = None, *, timeout: float | None = None
    ) -> Work[list[torch.Tensor]]:
        """Gives every rank the tensors of all ranks.

        Args:
            outs: get them, one for each rank. Their sizes may differ if each rank knows all. None: new tensors of the
                shape of ``tensor``.
        """
        into = [torch.empty_like(tensor) for _ in range(self.size)] if outs is None else list(outs)
        return Work(self._group.all_gather(tensor, into, timeout), lambda: into)

    def gather(
        self,
        tensor: torch.Tensor,
        root: int = 0,
        outs: Sequence[torch.Tensor] | None = None,
        *,
        timeout: float | None = None,
    ) -> Work[list[torch.Tensor]]:
        """Gives rank ``root`` the tensors of all ranks; the others get an empty list."""
        into = list(outs or [])
        if self.rank == root and outs is None:
            into = [torch.empty_like(tensor) for _ in range(self.size)]
        return Work(self._group.gather(tensor, into, root, timeout), lambda: into)

    def scatter(
        self,
        out: torch.Tensor,
        tensors: Sequence[torch.Tensor] = (),
        root: int = 0,
        *,
        timeout: float | None = None,
    ) -> Work[torch.Tensor]:
        """Gives each rank one of the tensors of rank ``root``, in ``out``."""
        return Work(self._group.scatter(list(tensors), out, root, timeout), lambda: out)

    def reduce_scatter(
        self,
        out: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        op: str = "sum",
        *,
        factor: float = 1.0,
        timeout: float | None = None,
    ) -> Work[torch.Tensor]:
        """Reduces the tensors of all ranks at each index into ``out`` of the rank of that index."""
        return Work(self._group.reduce_scatter(list(tensors), out, op, factor, timeout), lambda: out)

    def all_to_all(
        self, outs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], *, timeout: float | None = None
    ) -> Work[list[torch.Tensor]]:
        """Gives the tensor at each index to the rank of that index, which gets it at the index of this rank."""
        into = list(outs)
        return Work(self._group.all_to_all(list(tensors), into, timeout), lambda: into)

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0, *, timeout: float | None = None) -> Work[None]:
        """Sends a tensor. The work ends when the receiver has its bytes, or a copy of them waits there."""
        return Work(self._group.send(tensor, to, tag, timeout), lambda: None)

    def receive(
        self, tensor: torch.Tensor, source: int | None = None, tag: int = 0, *, timeout: float | None = None
    ) -> Work[int]:
        """Receives a tensor of the same tag. The result is the rank that it came from.

        Args:
            source: the rank; None: any.
        """
        work = self._group.receive(tensor, source, tag, timeout)
        return Work(work, lambda: work.source)

    def split(self, color: int | None, key: int = 0, *, timeout: float = 1800.0) -> Group | None:
        """Forms a group of the ranks with the same ``color``, ordered by ``key`` and then by rank. All ranks call it.

        Returns:
            The group; None if ``color`` is None.
        """
        mine = torch.tensor([color is not None, color or 0, key], dtype=torch.int64)
        all_of_them = [each.tolist() for each in self.all_gather(mine, timeout=timeout).wait()]
        if color is None:
            return None
        ranks = [rank for rank, (takes_part, of, _) in enumerate(all_of_them) if takes_part and of == color]
        ranks.sort(key=lambda rank: all_of_them[rank][2])
        names = [self.names[rank] for rank in ranks]
        return form_group(names, agent=self._agent, label=f"{self.label}/{color}", timeout=timeout)

    def merge(self, names: Sequence[str], *, timeout: float = 1800.0) -> Group:
        """Forms a group of these ranks and of the agents ``names`` behind them.

        All of them call it, or :func:`form_group` with the same names and the label ``LABEL/merged``.
        """
        all_of_them = [*self.names, *(name for name in names if name not in self.names)]
        return form_group(all_of_them, agent=self._agent, label=f"{self.label}/merged", timeout=timeout)

    def explain(self, operation: str, bytes: int) -> str:
        """Says which algorithm an operation such as ``"all_reduce"`` takes for so many bytes, and why."""
        return self._group.explain(operation, bytes)

    def abort(self, why: str = "the program asked for it") -> None:
        """Fails the group at every rank with Cancelled."""
        self._group.abort(why)

    def close(self) -> None:
        """Leaves the group. Operations of the others that need this rank fail with Cancelled."""
        self._group.close()


def _groups_of(agent: Agent) -> _C.Groups:
    groups: _C.Groups | None = agent.__dict__.get("_groups")
    if groups is None:
        groups = agent.__dict__.setdefault("_groups", _C.Groups(agent))
    return groups


def form_group(
    names: Sequence[str] | None = None,
    *,
    agent: Agent | None = None,
    label: str = "default",
    timeout: float = 1800.0,
    algorithms: str = "",
    board: bool = True,
    memory: bool = True,
) -> Group:
    """Forms a group of agents. Every agent of the group calls it with the same arguments; blocks until all have.

    Args:
        names: the agents, in the order of their ranks; None: all of the world, if the agent has a world size.
        agent: this process's agent; None: that of ``init_rpc``.
        label: tells groups of the same agents apart while they are formed, and names the group in errors.
        timeout: seconds for the formation, and for each operation that gives none.
        algorithms: algorithms that are prescribed, such as ``"all_reduce=two_shot"``; ``""``:
            ``TENSORFERRY_COLLECTIVES``.
        board: False: the ranks exchange messages even on one host.
        memory: False: the ranks do not read one another's memory.

    Raises:
        InvalidArgument: this agent is not among the names, or a name is there twice.
        DeadlineExceeded: not all have come; rank 0 says who. ConnectionLost: one of them cannot be reached.

    Example::

        group = tensorferry.collectives.form_group(["worker0", "worker1"])
        total = group.all_reduce(torch.ones(4)).wait()
    """
    if agent is None:
        found = _C.default_agent()
        if found is None:
            raise errors.InvalidArgument("form_group() needs an agent: call init_rpc() first, or pass agent=")
        assert isinstance(found, Agent)
        agent = found
    if names is None:
        if agent.world_size is None:
            raise errors.InvalidArgument("the agent has no world size, so form_group() needs names")
        names = [agent.get_worker_info(rank).name for rank in range(agent.world_size)]
    groups = _groups_of(agent)
    return Group(agent, groups.form(list(names), label, timeout, algorithms, board, memory))
