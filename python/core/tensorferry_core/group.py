"""Groups of agents that reduce, gather and exchange numpy arrays. Their ranks may be in Python, with torch or without,
and in C++."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from ctypes import byref, c_void_p
from typing import TYPE_CHECKING, Any

import numpy as np

from . import errors
from ._library import GroupOptions, check, in_thread, lib, options_for_c, texts_for_c
from ._values import Writer, array_of
from .agent import Future, _milliseconds, _taken

if TYPE_CHECKING:
    from .agent import Agent

__all__ = ["Group"]

_BARRIER, _BROADCAST, _ALL_REDUCE, _REDUCE, _ALL_GATHER, _GATHER, _SCATTER, _REDUCE_SCATTER = range(8)
_ALL_TO_ALL, _SEND, _RECEIVE = range(8, 11)
#: By number, as in include/tensorferry/reduction.h.
_REDUCTIONS = ("sum", "average", "product", "min", "max", "band", "bor", "bxor", "premultiplied_sum")
_ANY = (1 << 64) - 1


def _inputs(arrays: Sequence[Any]) -> list[np.ndarray]:
    return [array_of(array) for array in arrays]


def _outputs(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Checks arrays that the library writes to."""
    for array in arrays:
        if not isinstance(array, np.ndarray) or not array.flags.writeable or array_of(array) is not array:
            raise errors.InvalidArgument(
                "an output is a numpy array of numbers that can be written, with strides of whole elements"
            )
    return list(arrays)


class Group:
    """An ordered list of agents; :meth:`Agent.group` forms it.

    Every rank calls the same operations in the same order. Each returns a future, whose result is the outputs: an input
    must not change, and an output not be used, until it has completed. ``timeout`` is in seconds; None: the group's.

    The errors are those of groups everywhere (docs/collectives.md): if a rank dies, leaves or comes too late, the group
    has failed at every rank.

    Example::

        group = agent.group(["a", "b"])
        total = group.all_reduce(numpy.ones(3)).result()
    """

    def __init__(self, agent: Agent, names: Sequence[str], options: dict[str, object]) -> None:
        self._agent = agent
        #: The names of the agents, in the order of their ranks.
        self.names = list(names)
        agent_handle = agent._open()

        def form() -> c_void_p:
            handle = c_void_p()
            check(lib.tferry_group_form(agent_handle, *texts_for_c(self.names), *options_for_c(options), byref(handle)))
            return handle

        self._handle = in_thread(form, lib.tferry_group_free)
        #: This agent's rank, and the number of ranks.
        self.rank: int = lib.tferry_group_rank(self._handle)
        self.size: int = lib.tferry_group_size(self._handle)

    def __del__(self) -> None:
        self.close()

    def barrier(self, *, timeout: float | None = None) -> Future:
        """Completes when all ranks have called it."""
        return self._start(_BARRIER, [], [], None, timeout=timeout)

    def broadcast(self, array: np.ndarray, root: int = 0, *, timeout: float | None = None) -> Future:
        """Copies the array of rank ``root`` into that of every other rank."""
        arrays = _inputs([array]) if root == self.rank else _outputs([array])
        return self._start(_BROADCAST, arrays, [], array, root=root, timeout=timeout)

    def all_reduce(
        self,
        array: np.ndarray,
        op: str = "sum",
        *,
        out: np.ndarray | None = None,
        factor: float = 1.0,
        timeout: float | None = None,
    ) -> Future:
        """Reduces the arrays of all ranks, in place or into ``out``; every rank gets the same bits.

        Args:
            op: one of ``sum``, ``average``, ``product``, ``min``, ``max``, ``band``, ``bor``, ``bxor``,
                ``premultiplied_sum``.
            factor: of ``premultiplied_sum``.
        """
        out = array if out is None else out
        return self._start(_ALL_REDUCE, _inputs([array]), _outputs([out]), out, op=op, factor=factor, timeout=timeout)

    def reduce(
        self, array: np.ndarray, root: int = 0, op: str = "sum", *, factor: float = 1.0, timeout: float | None = None
    ) -> Future:
        """Reduces the arrays of all ranks into that of rank ``root``."""
        outs = _outputs([array]) if root == self.rank else []
        return self._start(_REDUCE, _inputs([array]), outs, array, root=root, op=op, factor=factor, timeout=timeout)

    def all_gather(
        self, array: np.ndarray, outs: Sequence[np.ndarray] | None = None, *, timeout: float | None = None
    ) -> Future:
        """Gives every rank the arrays of all ranks, in ``outs`` or new ones of the same shape."""
        given = self._alike(array) if outs is None else list(outs)
        return self._start(_ALL_GATHER, _inputs([array]), _outputs(given), given, timeout=timeout)

    def gather(
        self,
        array: np.ndarray,
        root: int = 0,
        outs: Sequence[np.ndarray] | None = None,
        *,
        timeout: float | None = None,
    ) -> Future:
        """Gives rank ``root`` the arrays of all ranks; the others get an empty list."""
        given = [] if root != self.rank else self._alike(array) if outs is None else list(outs)
        return self._start(_GATHER, _inputs([array]), _outputs(given), given, root=root, timeout=timeout)

    def scatter(
        self,
        out: np.ndarray,
        arrays: Sequence[np.ndarray] = (),
        root: int = 0,
        *,
        timeout: float | None = None,
    ) -> Future:
        """Gives each rank one of the arrays of rank ``root``, in ``out``."""
        given = _inputs(arrays) if root == self.rank else []
        return self._start(_SCATTER, given, _outputs([out]), out, root=root, timeout=timeout)

    def reduce_scatter(
        self,
        out: np.ndarray,
        arrays: Sequence[np.ndarray],
        op: str = "sum",
        *,
        factor: float = 1.0,
        timeout: float | None = None,
    ) -> Future:
        """Reduces the arrays of all ranks at each index into ``out`` of the rank of that index."""
        return self._start(
            _REDUCE_SCATTER, _inputs(arrays), _outputs([out]), out, op=op, factor=factor, timeout=timeout
        )

    def all_to_all(
        self, outs: Sequence[np.ndarray], arrays: Sequence[np.ndarray], *, timeout: float | None = None
    ) -> Future:
        """Gives the array at each index to the rank of that index, which gets it at the index of this rank."""
        return self._start(_ALL_TO_ALL, _inputs(arrays), _outputs(outs), list(outs), timeout=timeout)

    def send(self, array: np.ndarray, to: int, tag: int = 0, *, timeout: float | None = None) -> Future:
        """Sends an array. Completes when the receiver has its elements, or a copy of them waits there."""
        return self._start(_SEND, _inputs([array]), [], None, root=to, tag=tag, timeout=timeout)

    def receive(
        self, array: np.ndarray, source: int | None = None, tag: int = 0, *, timeout: float | None = None
    ) -> Future:
        """Receives an array of the same tag, from any rank if ``source`` is None. The result is the sender's rank."""
        root = _ANY if source is None else source
        return self._start(_RECEIVE, [], _outputs([array]), None, root=root, tag=tag, timeout=timeout)

    def abort(self, why: str = "the program asked for it") -> None:
        """Fails the group at every rank with Cancelled."""
        lib.tferry_group_abort(self._handle, why.encode())

    def close(self) -> None:
        """Leaves the group: operations of the others that need this rank fail with Cancelled. Idempotent."""
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            lib.tferry_group_free(handle)

    def _alike(self, array: np.ndarray) -> list[np.ndarray]:
        return [np.empty(array.shape, array.dtype) for _ in range(self.size)]

    def _start(
        self,
        operation: int,
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        result: Any,
        *,
        root: int = 0,
        op: str = "sum",
        factor: float = 1.0,
        tag: int = 0,
        timeout: float | None = None,
    ) -> Future:
        if op not in _REDUCTIONS:
            raise errors.InvalidArgument(f"there is no reduction {op!r}: {', '.join(_REDUCTIONS)}")
        if not self._handle:
            raise errors.Cancelled("the group is closed")
        if root < 0:
            raise errors.InvalidArgument(f"there is no rank {root}")
        given, taken = Writer(), Writer()
        for array in inputs:
            given.write(array)
        for array in outputs:
            taken.write(array)
        given.has_arrays = given.has_arrays or taken.has_arrays
        given.keep += taken.keep
        number = self._agent._keep(given)
        limit = 0 if timeout is None else max(_milliseconds(timeout), 1)
        options = GroupOptions(root, tag, factor, limit, number, _REDUCTIONS.index(op), 0)
        future = c_void_p()
        try:
            check(
                lib.tferry_group_start(
                    self._handle, operation, byref(options), given.values, given.count, taken.values, taken.count,
                    byref(future),
                )
            )  # fmt: skip
        finally:
            if not future:
                self._agent._memory.pop(number, None)

        # The future keeps the group, which would be closed if the program dropped it meanwhile.
        return self._agent._notified(future, functools.partial(self._finish, result))

    def _finish(self, result: Any, handle: c_void_p) -> Any:
        values = _taken(handle)
        return values[0] if values else result
