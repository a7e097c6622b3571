"""The calls that an agent makes: the one declaration of each verb."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

import torch

from . import _C, errors
from .published import Publication, Subscription
from .regions import OwnRegion, Region, find_region, make_region
from .streams import Stream
from .verbs import in_cpp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

    from ._C import Future, Published, RRef
    from .agent import WorkerInfo
    from .peers import Peer

__all__ = ["Calls", "DeviceChoice", "DeviceLike", "PeerLike"]

PeerLike: TypeAlias = "str | int | WorkerInfo | Peer"
DeviceLike: TypeAlias = int | str | torch.device
DeviceChoice: TypeAlias = DeviceLike | dict[Any, Any]

_T = TypeVar("_T")

_WORTH_A_BLOCK = 64 * 1024  # bytes of tensors from which call_many publishes the arguments


class Calls(_C.Agent):
    """The part of :class:`tensorferry.Agent` that calls peers."""

    @in_cpp
    def rpc_sync(
        self,
        to: PeerLike,
        func: Callable[..., Any] | str,
        args: Iterable[Any] | Published | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = -1.0,
        *,
        require: str | None = None,
        out: torch.Tensor | None = None,
        device: DeviceChoice | None = None,
        wait_for_ready: bool = False,
        idempotent: bool = False,
    ) -> Any:
        """Calls a function on a peer and waits for its result.

        Args:
            to: the peer: its name, its rank, a :class:`WorkerInfo` or a :class:`Peer`. An agent may call itself; the
                values are copied then, too.
            func: a module-level function, a class, a bound method (a copy of its object is sent), a torch operator, or
                a scripted function; or the name (a str) of a function that the peer exposed (:func:`expose`), in Python
                or in C++.
            args: the positional arguments, a tuple.
            kwargs: the keyword arguments, a dict.
            timeout: seconds; 0: no limit; -1: the default that ``init_rpc`` was given (60). Calls that the function
                makes inherit the deadline, but not a default time-out.
            require: the only channel that may carry tensors, such as ``"basic"``, or as :func:`tensorferry.measured`
                names it. If the channel is still being probed, the call waits for the probe.
            out: a dense tensor, on the CPU or a GPU, that receives the result: one tensor of the same dtype and shape.
                If ``out`` is contiguous, the bytes arrive in it without another copy. Do not use it before the call has
                ended. Nothing is written to it afterwards, even if the call timed out. If the call fails, its contents
                are undefined. On a GPU it is written in the order of the caller's current stream.
            device: where tensors among the arguments land at the peer: one of its devices (``"cuda:1"``, ``1``,
                ``"cpu"``) for all of them; or a one-to-one dict from devices here to devices there, by whose inverse
                the tensors of the result land here. None: the agent's device map for the peer, else the device of the
                same index, else the peer's first GPU, else its CPU.
            wait_for_ready: if the peer has not joined yet, or is about to restart, wait for it up to the time-out
                instead of failing. If the peer dies after the call was sent, the call fails all the same.
            idempotent: if the call's connection is lost, send the call again over the next connection to the same
                process, within the time-out, instead of failing. So ``func`` may run more than once. Do not change
                tensors among the arguments until the call has ended. InvalidArgument with an ordered handle or with
                :func:`share`.

        Returns:
            The result of ``func(*args, **kwargs)`` at the peer; ``out`` if it is given.

        Raises:
            DeadlineExceeded, ConnectionLost, NotFound, PermissionDenied, ChannelUnavailable: see
                :mod:`tensorferry.errors`. ChannelUnavailable also if the function returned memory marked by
                :func:`share`, which cannot land in ``out``.
            InvalidArgument: the peer has no such device.
            ValueError: the result has another dtype or shape than ``out``; or ``out`` is sparse, requires grad, or is
                on a GPU that the agent does not use.
            TypeError: ``out`` is not a tensor, or is given and the result is not one tensor; or a value cannot be sent,
                such as a tensor on a GPU on which a CUDA graph is being captured.
            Exception: the exception that ``func`` raised, as its own type if that type can be rebuilt here, else as
                :class:`RemoteError`.

        Example::

            total = rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
            rpc.rpc_sync("worker1", torch.add, args=(total, 1), out=total)
        """
        raise NotImplementedError

    @in_cpp
    def rpc_async(
        self,
        to: PeerLike,
        func: Callable[..., Any] | str,
        args: Iterable[Any] | Published | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = -1.0,
        *,
        require: str | None = None,
        out: torch.Tensor | None = None,
        device: DeviceChoice | None = None,
        wait_for_ready: bool = False,
        idempotent: bool = False,
    ) -> Future[Any]:
        """Calls a function on a peer and returns a :class:`Future` of its result at once.

        Tensors among the arguments may be overwritten once the future, or its ``sent``, has completed. ``out`` is
        filled once the future has completed. If the result has tensors on GPUs, :meth:`Future.wait` makes the current
        streams wait for them, and blocks no thread for that.

        Args:
            to, func, args, kwargs, timeout, require, out, device, wait_for_ready, idempotent: as for :func:`rpc_sync`.

        Returns:
            A :class:`Future`. If the caller drops it, the call goes on.

        Raises:
            DeadlineExceeded: a deadline around the call (:func:`deadline`) has passed. Also the exceptions that
                pickling the arguments raises. Waiting for the future raises the errors of the call itself.

        Example::

            futures = [rpc.rpc_async(worker, torch.sum, args=(torch.ones(10),)) for worker in ("worker1", "server")]
            assert tensorferry.wait_all(futures) == [10, 10]
        """
        raise NotImplementedError

    @in_cpp
    def remote(
        self,
        to: PeerLike,
        func: Callable[..., Any] | str,
        args: Iterable[Any] | Published | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = -1.0,
        *,
        require: str | None = None,
        device: DeviceChoice | None = None,
        wait_for_ready: bool = False,
        idempotent: bool = False,
    ) -> RRef[Any]:
        """Calls a function on a peer, keeps its result there, and returns an :class:`RRef` to it at once.

        Args:
            to, func, args, kwargs, require, device, idempotent: as for :func:`rpc_sync`. The object's tensors stay on
                their devices at the peer.
            timeout: as for :func:`rpc_sync`; it bounds the creation of the object.
            wait_for_ready: as for :func:`rpc_sync`, but ``remote`` itself waits for the peer.

        Returns:
            An :class:`RRef`, which can be used and passed on at once.

        Raises:
            NotFound: there is no such peer. DeadlineExceeded: the peer did not join in time (``wait_for_ready``). Also
                the exceptions that pickling the arguments raises. Each use of the reference raises the exception that
                ``func`` raised, or InvalidArgument if the peer has no such device.

        Example::

            model = rpc.remote("server", torch.nn.Linear, args=(784, 10))
            assert model.rpc_sync().forward(torch.ones(784)).shape == (10,)
        """
        raise NotImplementedError

    def rpc_stream(
        self,
        to: PeerLike,
        func: Callable[..., Iterable[_T] | AsyncIterator[_T]] | str,
        args: Iterable[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = -1.0,
        *,
        window: int = 8,
        require: str | None = None,
        wait_for_ready: bool = False,
    ) -> Stream[_T]:
        """Calls a generator function on a peer and returns an iterator over its items.

        Args:
            to: the peer, as for :func:`rpc_sync`.
            func: a generator function, an asynchronous one, or a function that returns an iterator; or the name under
                which the peer exposed one.
            args: the positional arguments, a tuple.
            kwargs: the keyword arguments, a dict.
            timeout: seconds that each item may take once the caller waits for it; 0: no limit; -1: the default of
                ``init_rpc`` (60). It also bounds the calls that the generator makes for the item.
            window: how many items the generator may be ahead of the caller, at least 1.
            require, wait_for_ready: as for :func:`remote`.

        Returns:
            A :class:`Stream`: an iterator, also an asynchronous one, and a context manager.

        Raises:
            At once: ValueError if ``window`` is below 1; otherwise as :func:`remote`.
            From the iterator, which closes the stream: the exception that ``func`` raised; DeadlineExceeded if an item
            did not come in time; ConnectionLost; TypeError if ``func`` returned no iterator.

        Example::

            async def ticks(count):                     # at the peer
                for tick in range(count):
                    await asyncio.sleep(0.01)
                    yield torch.full((4,), float(tick))

            total = torch.zeros(4)
            with rpc.rpc_stream("worker1", ticks, args=(3,), window=4) as stream:
                for item in stream:                     # or: async for
                    total += item
            assert total.tolist() == [3, 3, 3, 3]
        """
        if window < 1:
            raise ValueError("window must be at least 1: items that may be under way")
        generator = self.remote(to, func, args, kwargs, timeout, require=require, wait_for_ready=wait_for_ready)
        seconds = self._timeout if timeout == -1 else timeout
        return Stream(generator, getattr(func, "__qualname__", str(func)), seconds, window)

    @overload
    def publish(self, value: Any, name: None = None) -> Published: ...
    @overload
    def publish(
        self,
        value: Mapping[str, torch.Tensor] | torch.nn.Module,
        name: str,
        *,
        block: int = 65536,
        checksums: bool = False,
        kept: int = 3,
        on_gpu: bool = False,
    ) -> Publication: ...
    def publish(
        self,
        value: Any,
        name: str | None = None,
        *,
        block: int = 65536,
        checksums: bool = False,
        kept: int = 3,
        on_gpu: bool = False,
    ) -> Published | Publication:
        """Encodes a value once, for any number of calls. Its tensors and other large parts lie in one read-only block
        of memory.

        The returned handle may stand anywhere in the arguments or the result of a call, beside values that the codec
        knows. It arrives there as the value. A peer on this host maps the block copy-on-write: each peer has a value of
        its own, and 64 peers use the memory of one. A peer that cannot map the block (on another host, of another user,
        with sockets alone) gets a copy, as in any call. Sending the handle again costs about as much as an empty call.

        The block lives as long as the handle or any tensor that arrived out of the block, here or at a peer. The block
        is a memfd, so a killed process leaves nothing behind. Later changes of ``value`` do not change the block.

        With ``name``, it begins a publication instead, whose first version is ``value``: see :class:`Publication`, and
        docs/regions.md.

        Args:
            value: CPU tensors, and other values that the codec or pickle can encode. Not allowed: remote references,
                and results of :func:`tensorferry.share` or of this function.

            name: of a publication of this agent, for :meth:`subscribe`. ``value`` is then a module or a dict of
                tensors by name, on CPUs or GPUs.
            block: bytes that are compared and sent together when a version differs from the one before: a power of two
                from 4096 to 65536.
            checksums: compute a checksum of each version, which subscribers compare. It costs about as much as reading
                the bytes once more, on either side.
            kept: how many versions may be there at once, at least 2: one that is written, and those that are read.
            on_gpu: the versions of tensors stay on the GPU of the first such tensor, which takes its memory for 2 to
                ``kept`` copies. A :class:`Loader` of this host copies from there to tensors on GPUs; others get them by
                the host. Tensors on other devices go to the host.

        Raises:
            TypeError: the value cannot be encoded.
            InvalidArgument: the value contains tensors on a GPU and has no name, or there is a publication of that
                name, or ``on_gpu`` with ``checksums``.
            ResourceExhausted: there is no memory left.

        Example::

            weights = rpc.publish(torch.nn.Linear(784, 10).state_dict())
            futures = [rpc.rpc_async(actor, len, args=(weights,)) for actor in ("worker1", "server")]
            assert tensorferry.wait_all(futures) == [2, 2]
        """
        if name is not None:
            options = {"block": block, "checksums": checksums, "kept": kept, "on_gpu": on_gpu}
            return Publication(self, name, value, options)  # type: ignore[arg-type]
        return _C.publish(self, value)

    def subscribe(self, name: str, from_: PeerLike, timeout: float = -1.0) -> Subscription:
        """Subscribes to the publication ``name`` of a peer: see :class:`Subscription`.

        Args:
            name: the publication's name at its publisher.
            from_: the publisher.
            timeout: seconds; -1: the agent's default; 0: none.

        Raises:
            NotFound: the peer has no such publication, or there is no such peer. ConnectionLost, DeadlineExceeded.

        Example::

            publication = rpc.publish({"w": torch.zeros(2)}, name="policy")
            policy = rpc.subscribe("policy", from_="worker0")
            assert policy.wait(newer_than=0)["w"].shape == (2,)
            publication.withdraw()
        """
        publisher = self._find(from_)[0]
        return Subscription(self, name, publisher, timeout)  # type: ignore[arg-type]

    def region(
        self,
        tensor: torch.Tensor,
        name: str = "",
        *,
        read: bool = True,
        write: bool = False,
        peers: Sequence[str] = (),
    ) -> OwnRegion:
        """Makes a tensor's memory a region, which peers read and write without a call of this program.

        The tensor stays where it is, and alive until the region is dropped. Peers of this host map memory of
        :func:`tensorferry.empty`; of other memory the kernel copies reads, and this agent serves writes.
        Memory of a GPU is mapped by peers of this host, unless it is torch's expandable segments.

        Args:
            tensor: a dense tensor on the CPU or on a CUDA device.
            name: peers may find the region by it (:meth:`find_region`). A later region of the name replaces it there.
            read: peers may read it.
            write: peers may write it.
            peers: the names of the agents that may use it; empty: all agents of the job.

        Returns:
            A handle, which travels in calls.

        Raises:
            InvalidArgument: the tensor has gaps, or is on a device of another type.

        Example::

            with rpc.region(tensorferry.empty(8), name="cells", write=True) as cells:
                rpc.find_region("worker0", "cells")[2:4].write(torch.ones(2), notify=7)
                assert cells.await_notification().number == 7
                assert cells.tensor.sum() == 2
        """
        return make_region(self, tensor, name, read, write, peers)  # type: ignore[arg-type]

    def find_region(self, owner: PeerLike, name: str, timeout: float = -1.0) -> Region:
        """Returns a handle of the region that has the name ``name`` at ``owner`` now.

        Args:
            owner: the peer that made it.
            name: the name that it gave.
            timeout: seconds; -1: the agent's default; 0: none.

        Raises:
            NotFound: there is none. PermissionDenied: this agent may not use it. ConnectionLost, DeadlineExceeded.

        Example::

            with rpc.region(torch.arange(4), name="numbers"):
                assert rpc.find_region("worker0", "numbers").read().tolist() == [0, 1, 2, 3]
        """
        return find_region(self, self._find(owner)[0], name, timeout)  # type: ignore[arg-type]

    def call_many(
        self,
        peers: Iterable[PeerLike],
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = -1.0,
    ) -> list[Future[Any]]:
        """Calls a function on many peers with the same arguments, which are encoded once (:func:`publish`).

        Arguments that cannot be published, or whose tensors have less than 64 KiB in all, are encoded for each peer.

        Args:
            peers: the peers, each as for :func:`rpc_sync`.
            func, args, kwargs, timeout: as for :func:`rpc_async`.

        Returns:
            One future for each peer, in the order of ``peers``. An error at one peer fails that peer's future alone.

        Raises:
            TypeError: the arguments cannot be sent.

        Example::

            weights = torch.nn.Linear(784, 10).state_dict()
            assert tensorferry.wait_all(rpc.call_many(["worker1", "server"], len, args=(weights,))) == [2, 2]
        """
        given: tuple[Any, ...] | Published = tuple(args or ())
        named = dict(kwargs or {})
        if _C.is_called_by_name(func):
            # Arguments that cannot be published (references, tensors on GPUs) go to each peer by rpc_async. If they
            # cannot be sent either, rpc_async raises the error.
            with contextlib.suppress(TypeError, errors.Error):
                block = self.publish((given, named or None))
                if not 0 < block.nbytes < _WORTH_A_BLOCK:
                    given, named = block, {}
        return [self.rpc_async(peer, func, args=given, kwargs=named, timeout=timeout) for peer in peers]
