"""An agent of a job: it calls functions of its peers, and serves functions to them."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import ctypes
import inspect
import itertools
import threading
import traceback
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_size_t, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any, TypeVar

from . import errors
from ._library import Arguments, CallOptions, Event, check, in_thread, lib, options_for_c, text_from, texts_for_c
from ._values import Message, Writer

if TYPE_CHECKING:
    from .group import Group

__all__ = ["Agent", "Future"]

F = TypeVar("F", bound=Callable[..., Any])

NOTHING, COMPLETED, CALLED, LEFT = range(4)
REMOTE_ERROR = 11
#: How long a wait of the main thread lasts before Python may run the handler of a signal, in ms.
SLICE = 50

_living: weakref.WeakSet[Agent] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    for agent in list(_living):
        agent.leave()


class Future(concurrent.futures.Future):  # type: ignore[type-arg]
    """The result of a call that goes on: a future of :mod:`concurrent.futures`, which also can be awaited."""

    def __init__(self, handle: c_void_p, finish: Callable[[c_void_p], Any]) -> None:
        super().__init__()
        self._handle = handle
        self._finish = finish

    def cancel(self) -> bool:
        """Cancels the call, which then ends with :class:`errors.Cancelled`. Returns False if it has ended."""
        with self._condition:
            if self.done():
                return False
            lib.tferry_future_cancel(self._handle)
        return True

    def _complete(self) -> None:
        handle, self._handle = self._handle, c_void_p()
        try:
            result = self._finish(handle)
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(result)
        del self._finish  # and the group that it keeps

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self).__await__()


class Agent:
    """Joins a job, and returns when the agent may call its peers; with a ``world_size``, when all ranks have joined.

    Args:
        name: the agent's name, unique in the job; by default ``worker`` and the rank.
        rank, world_size: of agents that begin together; -1 and 0: agents join and leave at any time.
        rendezvous: where agents meet: ``tcp://host:port`` (torch's TCPStore), ``env://``, ``store://host:port``.
        functions: what peers may call from the start, by name: see :meth:`expose`.
        threads: how many of these functions run at once.
        key, tls: the cluster key, and TLS on TCP connections (docs/security.md).
        channels: the channels that may carry arrays, such as ``"shm,basic"`` or ``"-shm"``.
        timeout: the time-out of calls that give none, in seconds; 0: none.
        options: others of ``tensorferry::AgentOptions``, by name: ``interface``, ``ports``, ``join_timeout``, ...

    Raises:
        InvalidArgument, Unauthenticated, DeadlineExceeded: as the text says.

    Example::

        with tensorferry_core.Agent("client", rendezvous="store://127.0.0.1:29500") as agent:
            print(agent.call("server", "double", (numpy.ones(3),)))
    """

    def __init__(
        self,
        name: str = "",
        *,
        rank: int = -1,
        world_size: int = 0,
        rendezvous: str = "",
        functions: Mapping[str, Callable[..., Any]] | None = None,
        threads: int = 64,
        key: str | None = None,
        tls: str | None = None,
        channels: str | None = None,
        timeout: float | None = None,
        **options: object,
    ) -> None:
        if tls:
            _load_ssl()
        self._functions = dict(functions or {})
        self._tokens = itertools.count(1)
        self._futures: dict[int, Future] = {}
        self._memory: dict[int, list[Any]] = {}  # by the number that tferry_agent_released gives back
        self._lock = threading.Lock()
        self._threads, self._idle, self._most_threads = 0, 0, threads
        self._left = False
        given = options_for_c(
            {
                "name": name, "rank": rank, "world_size": world_size, "rendezvous": rendezvous, "key": key, "tls": tls,
                "channels": channels, "timeout": timeout, "threads": max(threads, 2), **options,
            }
        )  # fmt: skip
        served = texts_for_c(list(self._functions))

        def join() -> c_void_p:
            handle = c_void_p()
            check(lib.tferry_agent_join(*given, *served, byref(handle)))
            return handle

        self._handle = in_thread(join, lib.tferry_agent_free)
        #: The agent's name and rank; -1: it has none.
        self.name: str = lib.tferry_agent_name(self._handle).decode()
        self.rank: int = lib.tferry_agent_rank(self._handle)
        _living.add(self)
        self._start_thread()

    def __del__(self) -> None:  # its threads, which hold it, have ended
        if getattr(self, "_handle", None):
            lib.tferry_agent_free(self._handle)

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None:
            self.shutdown()
        else:
            self.leave()

    # ---- calls

    def call(
        self,
        peer: str,
        function: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        require: str | None = None,
        wait_for_ready: bool = False,
        order: int = 0,
        idempotent: bool = False,
    ) -> Any:
        """Calls a function of a peer, and returns its result.

        Args:
            peer: the name of the agent to call.
            function: a name that the peer serves, or ``"py:module:function"`` for one that a Python peer can import.
            args, kwargs: numpy arrays, numbers, texts, bytes, and tuples, lists, dicts and sets of them. A peer with
                torch gets arrays as tensors; its tensors arrive as numpy arrays, in memory of this process.
            timeout: in seconds; 0: none; None: the agent's.
            require: the only channel that may carry the arrays.
            wait_for_ready: waits for a peer that has not joined yet.
            order: calls to a peer with the same number, not 0, run one after the other.
            idempotent: the call goes over the next connection if this one is lost, and may run again.

        Raises:
            Exception: what the function raised, if Python has its type, else RemoteError; its ``__cause__`` is the
                peer's traceback. All others are those of :mod:`tensorferry_core.errors`.
        """
        options = (timeout, require, wait_for_ready, order, idempotent)
        future = self._start(peer, function, args, kwargs, options)
        try:
            return self._finish(_waited(future))
        finally:
            if self._memory:
                self._release()

    def call_async(
        self,
        peer: str,
        function: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        require: str | None = None,
        wait_for_ready: bool = False,
        order: int = 0,
        idempotent: bool = False,
    ) -> Future:
        """As :meth:`call`, but returns a future at once. Arrays must not change until it has completed."""
        options = (timeout, require, wait_for_ready, order, idempotent)
        return self._notified(self._start(peer, function, args, kwargs, options), self._finish)

    def _start(
        self,
        peer: str,
        function: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        options: tuple[float | None, str | None, bool, int, bool],
    ) -> c_void_p:
        writer = Writer()
        for value in args:
            writer.write(value)
        names, count = None, 0
        if kwargs:
            names, count = texts_for_c(list(kwargs))
            for value in kwargs.values():
                writer.write(value)
        number = self._keep(writer)
        arguments = Arguments(writer.values, writer.count, len(args), names, count, number)
        timeout, require, wait_for_ready, order, idempotent = options
        given = CallOptions(
            -1 if timeout is None else _milliseconds(timeout),
            None if require is None else require.encode(),
            order,
            wait_for_ready,
            idempotent,
        )
        future = c_void_p()
        try:
            check(
                lib.tferry_agent_call(
                    self._open(), byref(given), peer.encode(), function.encode(), byref(arguments), byref(future)
                )
            )
        finally:
            if not future:
                self._memory.pop(number, None)
        return future

    def _finish(self, future: c_void_p) -> Any:
        values = _taken(future)
        return values[0] if values else None

    def _notified(self, handle: c_void_p, finish: Callable[[c_void_p], Any]) -> Future:
        """Makes a future that a thread of the agent completes."""
        future = Future(handle, finish)
        token = next(self._tokens)
        self._futures[token] = future
        lib.tferry_future_notify(handle, token)
        return future

    def _keep(self, writer: Writer) -> int:
        """Keeps the memory of the writer's arrays until the library releases the number that this returns; 0: none."""
        if not writer.has_arrays:
            return 0
        number = next(self._tokens)
        self._memory[number] = writer.keep
        return number

    def _release(self) -> None:
        numbers = (c_uint64 * 64)()
        while True:
            count = lib.tferry_agent_released(self._handle, numbers, len(numbers))
            for i in range(count):
                self._memory.pop(numbers[i], None)
            if count < len(numbers):
                return

    def _open(self) -> c_void_p:
        if self._left:
            raise errors.AgentClosed(f'the agent "{self.name}" has left')
        handle: c_void_p = self._handle
        return handle

    # ---- serving

    def expose(self, function: F, name: str | None = None) -> F:
        """Lets peers call a function under a name, by default its own; as a call or as a decorator. Several calls run
        at once, each on a thread of its own; a coroutine function runs in an event loop of that thread.

        Raises:
            InvalidArgument: the name is empty, or begins with ``py:``, ``op:`` or ``tf:``.
        """
        name = function.__name__ if name is None else name
        self._functions[name] = function
        check(lib.tferry_agent_serve(self._open(), name.encode()))
        return function

    def _start_thread(self) -> None:
        with self._lock:
            if self._idle or self._threads >= self._most_threads:
                return
            self._threads += 1
            self._idle += 1
        threading.Thread(target=self._run, name="tensorferry events", daemon=True).start()

    def _run(self) -> None:
        """Takes events until the agent leaves. While a thread runs a function, another one waits for events."""
        event = Event()
        while True:
            lib.tferry_agent_next(self._handle, -1, byref(event))
            if event.kind == LEFT:
                return
            if event.kind == CALLED:
                with self._lock:
                    self._idle -= 1
                self._start_thread()
                self._serve(event.call)
                with self._lock:
                    self._idle += 1
            elif event.kind == COMPLETED:
                future = self._futures.pop(event.token, None)
                if future is not None:
                    future._complete()
                del future
            if self._memory:
                self._release()

    def _serve(self, call: int) -> None:
        name = lib.tferry_call_function(call).decode()
        number = 0
        try:
            args, kwargs = _arguments(call)
            if lib.tferry_call_cancelled(call):
                raise errors.Cancelled("nobody waits for the answer any more")
            result = self._functions[name](*args, **kwargs)
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
            writer = Writer()
            writer.write(result)
            number = self._keep(writer)
            check(lib.tferry_call_answer(call, writer.values, writer.count, number))
        except BaseException as error:
            self._memory.pop(number, None)
            _fail(call, error)

    # ---- the job

    def group(
        self, names: Sequence[str], label: str = "default", timeout: float = 1800.0, *, algorithms: str | None = None
    ) -> Group:
        """Forms a group of the agents with these names, in the order of their ranks. All of them do, in any language.

        Args:
            label: tells groups of the same agents apart.
            timeout: of the formation, and of each operation that gives none, in seconds.
            algorithms: prescribed ones, such as ``"all_reduce=ring"``.
        """
        from .group import Group

        return Group(self, names, {"label": label, "timeout": timeout, "algorithms": algorithms})

    def explain(self, peer: str, bytes: int = 1 << 20) -> str:
        """Tells which channel carries arrays of so many bytes to a peer, and why no other does."""
        return text_from(lambda out: lib.tferry_agent_explain(self._open(), peer.encode(), bytes, out))

    def link_state(self, peer: str) -> str:
        """Tells the state of the link to a peer and of the calls in flight."""
        return text_from(lambda out: lib.tferry_agent_link_state(self._open(), peer.encode(), out))

    def shutdown(self, timeout: float = 0) -> None:
        """Waits until no call is in flight, and in a world until all other agents do the same; then leaves.

        Args:
            timeout: in seconds; 0: none.
        """
        if self._left:
            return
        try:
            in_thread(
                lambda: check(lib.tferry_agent_shutdown(self._handle, _milliseconds(timeout))), lambda nothing: None
            )
        finally:
            self.leave()

    def leave(self) -> None:
        """Leaves at once: calls in flight fail with AgentClosed. Idempotent."""
        with self._lock:
            if self._left:
                return
            self._left = True
        _living.discard(self)
        lib.tferry_agent_leave(self._handle)
        while self._futures:  # those whose events no thread has taken
            try:
                _, future = self._futures.popitem()
            except KeyError:
                break
            future._complete()


def _waited(future: c_void_p) -> c_void_p:
    """Waits for a future. On the main thread, a signal whose handler raises ends the wait, and cancels the call."""
    slice = SLICE if threading.current_thread() is threading.main_thread() else -1
    try:
        while not lib.tferry_future_wait(future, slice):
            pass
    except BaseException:
        lib.tferry_future_cancel(future)
        lib.tferry_future_free(future)
        raise
    return future


def _taken(future: c_void_p) -> list[Any]:
    """Takes the values of a completed future, and frees it."""
    handle = c_void_p()
    try:
        check(lib.tferry_future_take(future, byref(handle)))
    finally:
        lib.tferry_future_free(future)
    return Message(handle.value or 0).read()


def _arguments(call: int) -> tuple[list[Any], dict[str, Any]]:
    positional, count = c_size_t(), c_size_t()
    keywords = POINTER(c_char_p)()
    handle = lib.tferry_call_arguments(call, byref(positional), byref(keywords), byref(count))
    values = Message(handle).read()
    names = [(keywords[i] or b"").decode() for i in range(count.value)]
    return values[: positional.value], dict(zip(names, values[positional.value :]))


def _fail(call: int, error: BaseException) -> None:
    """Answers with an exception of the served function."""
    cls = type(error)
    code = lib.tferry_error_code(cls.__name__.encode()) if isinstance(error, errors.Error) else 0
    where = "".join(traceback.format_exception(cls, error, error.__traceback__))
    type_name = f"{cls.__module__}.{cls.__qualname__}"
    text = str(error).encode("utf-8", "replace")
    lib.tferry_call_fail(call, code or REMOTE_ERROR, type_name.encode(), text, where.encode("utf-8", "replace"))


def _milliseconds(seconds: float) -> int:
    if seconds < 0:
        raise errors.InvalidArgument(f"a time-out of {seconds} s is negative")
    return int(seconds * 1000 + 0.999)


def _load_ssl() -> None:
    """Loads the OpenSSL of Python's own ssl, so that the library finds it where the system has none."""
    try:
        import _ssl

        ctypes.CDLL(_ssl.__file__)
    except (ImportError, AttributeError, OSError):
        pass
