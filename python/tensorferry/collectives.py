"""Groups of agents that reduce, gather and exchange tensors: :func:`form_group` makes one.

Every rank of a group calls the same operations in the same order. An operation returns a :class:`Work` at once, which
can be waited for and awaited. ``dist.init_process_group("tensorferry")`` uses the same groups.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeVar

import torch

from . import _C, errors
from .agent import Agent

__all__ = ["Group", "Work", "form_group"]

T = TypeVar("T")


#: The name of a reduction, registered ones included, or a function that reduces two tensors of one dimension.
Op = str | Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]


class Work(Generic[T]):
    """An operation of a group that has been started. ``await work`` returns its result too."""

    def __init__(self, works: Sequence[_C.GroupWork], result: Callable[[], T]) -> None:
        self._works = works
        self._result = result

    def wait(self, timeout: float | None = None) -> T:
        """Waits for the operation and returns its result.

        If GPUs do the operation among themselves, this waits until it is enqueued, and the current stream waits for the
        results. With ``timeout`` it waits for the GPU too.

        Args:
            timeout: seconds; the operation goes on afterwards. None: until the operation's own time-out.

        Raises:
            InvalidArgument: the ranks called different operations; the text names the rank that differs.
            ConnectionLost: a rank has died or left. DeadlineExceeded: ranks have not come in time, or ``timeout`` has
                passed. Cancelled: a rank has aborted or left the group.
        """
        if len(self._works) == 1:
            self._works[0].wait(timeout)
            return self._result()
        until = None if timeout is None else time.monotonic() + timeout
        failed: errors.Error | None = None
        for work in self._works:
            try:
                work.wait(None if until is None else max(0.0, until - time.monotonic()))
            except errors.Error as error:
                if not work.done():
                    raise
                failed = failed or error  # the others still use their tensors
        if failed is not None:
            raise failed
        return self._result()

    def done(self) -> bool:
        """Returns whether the operation has ended, with or without an error."""
        return all(work.done() for work in self._works)

    def _on_done(self, callback: Callable[[], object]) -> None:
        """Calls ``callback`` once, when the operation has ended, on any thread."""
        left = len(self._works)
        lock = threading.Lock()

        def ended() -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                callback()

        for work in self._works:
            work.on_done(ended)
        if not self._works:
            callback()

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

        self._on_done(told)
        yield from ended.__await__()
        for work in self._works:
            work.take()
        return self._result()


def _parts(
    tensors: Sequence[torch.Tensor] | torch.Tensor, sizes: Sequence[int] | None, ranks: int
) -> list[torch.Tensor]:
    """Returns the tensor for each rank: of a list its elements, of one tensor its rows, as many as ``sizes`` says or
    equally many."""
    if not isinstance(tensors, torch.Tensor):
        return list(tensors)
    rows = tensors.shape[0] if tensors.dim() else 1
    if sizes is None:
        if rows % ranks != 0:
            raise errors.InvalidArgument(f"{rows} rows do not divide among {ranks} ranks")
        sizes = [rows // ranks] * ranks
    elif len(sizes) != ranks or sum(sizes) != rows:
        raise errors.InvalidArgument(f"{rows} rows do not divide as {list(sizes)} among {ranks} ranks")
    return list(torch.split(tensors, list(sizes)))


class Group:
    """An ordered list of agents that perform operations together. :func:`form_group` makes it.

    Tensors are those of the CPU or of a GPU, strided ones included; those of one operation are on one device. An input
    must not be written, and an output not be used, until the work has ended. On a GPU, an operation reads its inputs
    after the work that the current stream had at the call, and its results are valid in the order of the stream that is
    current at :meth:`Work.wait` or ``await``.
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

    @property
    def progress(self) -> tuple[int, int]:
        """The numbers of the operation that was started last, and of the one that ended last; they begin at 1.

        Sends and receives are not counted.
        """
        return self._group.progress

    def __repr__(self) -> str:
        return f"<tensorferry.collectives.Group {self.label!r}, rank {self.rank} of {self.size}>"

    def barrier(self, *, timeout: float | None = None) -> Work[None]:
        """Ends when all ranks have called it."""
        return Work([self._group.barrier(timeout)], lambda: None)

    def monitored_barrier(self, timeout: float = 60.0, *, name_all: bool = True) -> None:
        """Waits for all ranks; if some do not come, rank 0 raises DeadlineExceeded with their names.

        Args:
            timeout: seconds; 0: fails at once, unless there is one rank.
            name_all: False: rank 0 names the first of them alone.
        """
        self._group.monitored_barrier(timeout, name_all)

    def broadcast(
        self, tensor: torch.Tensor, root: int = 0, *, timeout: float | None = None, algorithm: str = ""
    ) -> Work[torch.Tensor]:
        """Copies the tensor of rank ``root`` into that of every other rank. ``algorithm``: as of :meth:`all_reduce`."""
        return Work([self._group.broadcast(tensor, root, timeout, algorithm)], lambda: tensor)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: Op = "sum",
        *,
        out: torch.Tensor | None = None,
        factor: float = 1.0,
        timeout: float | None = None,
        algorithm: str = "",
    ) -> Work[torch.Tensor]:
        """Reduces the tensors of all ranks; every rank gets the same bits.

        Args:
            tensor: dense, or a sparse COO tensor, which is summed in place.
            op: ``sum``, ``average``, ``product``, ``min``, ``max``, ``band``, ``bor``, ``bxor`` or
                ``premultiplied_sum``; the name of a registered reduction (:func:`tensorferry.register_reduction`); or a
                function of two tensors with the elements of one rank each, the same at every rank. It writes the first
                one or returns the result, on any thread. If it raises, the operation fails at this rank alone.
            out: gets the result; None: ``tensor`` itself.
            factor: of ``premultiplied_sum``; the same at every rank.
            algorithm: how this call is done, such as ``"two_shot"``, the same at every rank; ``""``: as the group
                chooses.

        Raises:
            InvalidArgument: the algorithm does not fit; the text names those that do. If the ranks ask for different
                ones, :meth:`Work.wait` raises it at every rank.
        """
        into = tensor if out is None else out
        if tensor.layout is torch.sparse_coo:
            if op != "sum" or out is not None or algorithm:
                raise errors.InvalidArgument("sparse tensors are summed, in place, by one algorithm")
            return Work([self._group.all_reduce_sparse(tensor, timeout)], lambda: tensor)
        return Work([self._group.all_reduce(tensor, into, op, factor, timeout, algorithm)], lambda: into)

    def all_reduce_coalesced(
        self,
        tensors: Sequence[torch.Tensor],
        op: Op = "sum",
        *,
        factor: float = 1.0,
        timeout: float | None = None,
        algorithm: str = "",
    ) -> Work[list[torch.Tensor]]:
        """Reduces several tensors of one dtype in place, as if they were one."""
        given = list(tensors)
        return Work([self._group.all_reduce_coalesced(given, op, factor, timeout, algorithm)], lambda: given)

    def reduce(
        self,
        tensor: torch.Tensor,
        root: int = 0,
        op: Op = "sum",
        *,
        out: torch.Tensor | None = None,
        factor: float = 1.0,
        timeout: float | None = None,
        algorithm: str = "",
    ) -> Work[torch.Tensor]:
        """Reduces the tensors of all ranks into that of rank ``root``, or into its ``out``."""
        into = tensor if out is None else out
        return Work([self._group.reduce(tensor, into, op, factor, root, timeout, algorithm)], lambda: into)

    def all_gather(
        self,
        tensor: torch.Tensor,
        outs: Sequence[torch.Tensor] | torch.Tensor | None = None,
        *,
        timeout: float | None = None,
        algorithm: str = "",
    ) -> Work[list[torch.Tensor]]:
        """Gives every rank the tensors of all ranks.

        Args:
            outs: get them, one for each rank. Their sizes may differ if each rank knows all. One tensor: gets them
                behind each other along its first dimension. None: new tensors of the shape of ``tensor``.
        """
        into = [torch.empty_like(tensor) for _ in range(self.size)] if outs is None else _parts(outs, None, self.size)
        return Work([self._group.all_gather(tensor, into, timeout, algorithm)], lambda: into)

    def all_gather_coalesced(
        self, tensors: Sequence[torch.Tensor], *, timeout: float | None = None, algorithm: str = ""
    ) -> Work[list[list[torch.Tensor]]]:
        """Does :meth:`all_gather` for several tensors. The result has a list of new tensors for each of them."""
        outs = [[torch.empty_like(tensor) for _ in range(self.size)] for tensor in tensors]
        works = [
            self._group.all_gather(tensor, into, timeout, algorithm) for tensor, into in zip(tensors, outs, strict=True)
        ]
        return Work(works, lambda: outs)

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
        return Work([self._group.gather(tensor, into, root, timeout)], lambda: into)

    def scatter(
        self,
        out: torch.Tensor,
        tensors: Sequence[torch.Tensor] = (),
        root: int = 0,
        *,
        timeout: float | None = None,
    ) -> Work[torch.Tensor]:
        """Gives each rank one of the tensors of rank ``root``, in ``out``."""
        return Work([self._group.scatter(list(tensors), out, root, timeout)], lambda: out)

    def reduce_scatter(
        self,
        out: torch.Tensor,
        tensors: Sequence[torch.Tensor] | torch.Tensor,
        op: Op = "sum",
        *,
        factor: float = 1.0,
        timeout: float | None = None,
        algorithm: str = "",
    ) -> Work[torch.Tensor]:
        """Reduces the tensors of all ranks at each index into ``out`` of the rank of that index.

        Args:
            tensors: one for each rank; or one tensor, of which each rank gets equally many rows.
        """
        parts = _parts(tensors, None, self.size)
        return Work([self._group.reduce_scatter(parts, out, op, factor, timeout, algorithm)], lambda: out)

    def reduce_scatter_coalesced(
        self,
        outs: Sequence[torch.Tensor],
        tensors: Sequence[Sequence[torch.Tensor] | torch.Tensor],
        op: Op = "sum",
        *,
        factor: float = 1.0,
        timeout: float | None = None,
        algorithm: str = "",
    ) -> Work[list[torch.Tensor]]:
        """Does :meth:`reduce_scatter` for several outputs."""
        into = list(outs)
        given = [(out, _parts(each, None, self.size)) for out, each in zip(into, tensors, strict=True)]
        works = [self._group.reduce_scatter(parts, out, op, factor, timeout, algorithm) for out, parts in given]
        return Work(works, lambda: into)

    def all_to_all(
        self,
        outs: Sequence[torch.Tensor] | torch.Tensor,
        tensors: Sequence[torch.Tensor] | torch.Tensor,
        *,
        out_sizes: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> Work[list[torch.Tensor]]:
        """Gives the tensor at each index to the rank of that index, which gets it at the index of this rank.

        Args:
            outs, tensors: one for each rank; or one tensor, whose rows are divided among the ranks.
            out_sizes, sizes: how many rows of one tensor belong to each rank; None: equally many.
        """
        into, given = _parts(outs, out_sizes, self.size), _parts(tensors, sizes, self.size)
        return Work([self._group.all_to_all(given, into, timeout)], lambda: into)

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0, *, timeout: float | None = None) -> Work[None]:
        """Sends a tensor. The work ends when the receiver has its bytes, or a copy of them waits there."""
        return Work([self._group.send(tensor, to, tag, timeout)], lambda: None)

    def receive(
        self, tensor: torch.Tensor, source: int | None = None, tag: int = 0, *, timeout: float | None = None
    ) -> Work[int]:
        """Receives a tensor of the same tag. The result is the rank that it came from.

        Args:
            tensor: has the dtype and the number of elements of the tensor that was sent.
            source: the rank; None: any.
        """
        work = self._group.receive(tensor, source, tag, timeout)
        return Work([work], lambda: work.source)

    def broadcast_object(self, value: Any = None, root: int = 0, *, timeout: float | None = None) -> Any:
        """Returns the object of rank ``root``, pickled on the way. Blocks, as all operations on objects do.

        Raises:
            PermissionDenied: the agent has ``trust="registered"``, so it neither loads nor sends pickles.
        """
        mine = self._pickled(value if self.rank == root else None)
        size = torch.tensor([len(mine)], device="cpu")
        self.broadcast(size, root, timeout=timeout).wait()
        data = mine if self.rank == root else torch.empty(int(size), dtype=torch.uint8, device="cpu")
        return pickle.loads(self.broadcast(data, root, timeout=timeout).wait().numpy().tobytes())

    def all_gather_object(self, value: Any, *, timeout: float | None = None) -> list[Any]:
        """Returns the objects of all ranks. Blocks. Errors as in :meth:`broadcast_object`."""
        mine = self._pickled(value)
        outs = self._room_for(len(mine), timeout)
        return [pickle.loads(each.numpy().tobytes()) for each in self.all_gather(mine, outs, timeout=timeout).wait()]

    def gather_object(self, value: Any, root: int = 0, *, timeout: float | None = None) -> list[Any]:
        """Returns the objects of all ranks at rank ``root``, and an empty list elsewhere. Blocks. Errors as in
        :meth:`broadcast_object`."""
        mine = self._pickled(value)
        room = self._room_for(len(mine), timeout)
        most = max(len(each) for each in room)  # a gather takes tensors of one size
        padded = torch.nn.functional.pad(mine, (0, most - len(mine)))
        got = self.gather(padded, root, timeout=timeout).wait()
        return [pickle.loads(each[: len(of)].numpy().tobytes()) for each, of in zip(got, room)]

    def scatter_object(self, values: Sequence[Any] = (), root: int = 0, *, timeout: float | None = None) -> Any:
        """Returns one of the objects of rank ``root``, which gives one for each rank. Blocks. Errors as in
        :meth:`broadcast_object`."""
        given = [self._pickled(value) for value in values] if self.rank == root else []
        most = max((len(each) for each in given), default=0)
        of_each = [torch.tensor([len(each), most], device="cpu") for each in given]
        sizes = torch.zeros(2, dtype=torch.int64, device="cpu")  # of this rank's object, and of the largest
        size, most = self.scatter(sizes, of_each, root, timeout=timeout).wait().tolist()
        padded = [torch.nn.functional.pad(each, (0, most - len(each))) for each in given]
        room = torch.empty(most, dtype=torch.uint8, device="cpu")
        data = self.scatter(room, padded, root, timeout=timeout).wait()
        return pickle.loads(data[:size].numpy().tobytes())

    def _pickled(self, value: Any) -> torch.Tensor:
        if self._agent._trust != "full":
            raise errors.PermissionDenied(f'"{self._agent.name}" has trust="registered": it loads and sends no pickles')
        return torch.frombuffer(bytearray(pickle.dumps(value, protocol=5)), dtype=torch.uint8)

    def _room_for(self, mine: int, timeout: float | None) -> list[torch.Tensor]:
        """Returns bytes for as many as each rank has."""
        sizes = self.all_gather(torch.tensor([mine], device="cpu"), timeout=timeout).wait()
        return [torch.empty(int(size), dtype=torch.uint8, device="cpu") for size in sizes]

    def split(self, color: int | None, key: int = 0, *, timeout: float = 1800.0) -> Group | None:
        """Forms a group of the ranks with the same ``color``, ordered by ``key`` and then by rank. All ranks call it.

        Returns:
            The group; None if ``color`` is None.
        """
        mine = torch.tensor([color is not None, color or 0, key], dtype=torch.int64, device="cpu")
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

    @property
    def paths(self) -> dict[tuple[str, str, str], int]:
        """How many operations of all ranks have begun here, by operation, path and algorithm.

        The path is ``host`` (tensors of the CPU), ``staged`` (of a GPU, copied through host memory), ``gpu`` (GPUs do
        it among themselves) or ``graph`` (the same, captured into a CUDA graph: counted at the capture, not at each
        replay)::

            group.paths[("all_reduce", "gpu", "two_shot")]
        """
        return {(operation, path, algorithm): count for operation, path, algorithm, count in self._group.paths}

    def explain(self, operation: str, bytes: int) -> str:
        """Says which algorithm an operation such as ``"all_reduce"`` takes for so many bytes, and why.

        It speaks of GPUs once the group has had an operation there.
        """
        return self._group.explain(operation, bytes)

    def abort(self, why: str = "the program asked for it") -> None:
        """Fails the group at every rank with Cancelled."""
        self._group.abort(why)

    def close(self) -> None:
        """Leaves the group, after its operations on GPUs have ended at all ranks. Operations of the others that need
        this rank fail with Cancelled. Waits up to a second until the others have heard of it."""
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
    host: str = "",
) -> Group:
    """Forms a group of agents. Every agent of the group calls it with the same arguments, except for ``agent`` and
    ``host``; blocks until all have.

    Args:
        names: the agents, in the order of their ranks; None: all of the world, if the agent has a world size.
        agent: this process's agent; None: that of ``init_rpc``.
        label: tells groups of the same agents apart while they are formed, and names the group in errors.
        timeout: seconds for the formation, and for each operation that gives none.
        algorithms: algorithms that are prescribed, such as ``"all_reduce=two_shot"``; ``""``:
            ``TENSORFERRY_COLLECTIVES``.
        board: False: the ranks exchange messages even on one host.
        memory: False: the ranks do not read one another's memory.
        host: ranks that give the same text share a host; ``""``: those that run on one boot of a kernel.

    Raises:
        InvalidArgument: this agent is not among the names, or a name is there twice.
        DeadlineExceeded: not all have come; rank 0 says who. ConnectionLost: one of them cannot be reached.

    Example::

        group = tensorferry.collectives.form_group(["worker0", "worker1"])
        total = group.all_reduce(torch.ones(4)).wait()
    """
    if agent is None:
        found = _C.default_agent()
        if found is None or not found._usable_here:
            raise errors.InvalidArgument("form_group() needs an agent: call init_rpc() first, or pass agent=")
        assert isinstance(found, Agent)
        agent = found
    if names is None:
        if agent.world_size is None:
            raise errors.InvalidArgument("the agent has no world size, so form_group() needs names")
        names = [agent.get_worker_info(rank).name for rank in range(agent.world_size)]
    groups = _groups_of(agent)
    return Group(agent, groups.form(list(names), label, timeout, algorithms, board, memory, host))
