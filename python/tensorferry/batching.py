"""Batching: a function serves several waiting calls at once."""

from __future__ import annotations

import functools
import inspect
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from . import _C

__all__ = ["batch"]

P = ParamSpec("P")
R = TypeVar("R")

_IDLE = 1.0  # seconds after which an idle thread ends

Answer = Any  # torch.futures.Future, which cannot be subscripted at run time


def batch(max_size: int, max_wait: float = 0.0) -> Callable[[Callable[..., list[R]]], Callable[..., Any]]:
    """Decorates a function so that one run of it serves several calls that arrive at about the same time.

    The function gets one list for each of its parameters. The list has the arguments of the calls (defaults filled in),
    in the order of arrival. The function returns as many results, in the same order, and each caller gets its own. An
    exception among the results is raised at its caller alone; an exception that the function raises is raised at all
    callers of the batch.

    The batches of one function run one after another, on a thread of their own. The batches of a method do so for each
    object separately. Waiting calls hold no thread. Calls that their callers have given up are left out of the batch.

    A call from this process itself returns a ``torch.futures.Future``, as under ``async_execution``.

    Args:
        max_size: the largest number of calls in one batch, at least 1.
        max_wait: how many seconds the first call of a batch waits for others, at most; 0: a batch has the calls that
            arrived while the previous batch ran, and does not wait for more.

    Raises:
        ValueError: ``max_size`` is below 1, or ``max_wait`` below 0. At each caller, if the function returns more or
            fewer results than the batch has calls.
        TypeError: the function takes ``*args``, ``**kwargs`` or positional-only parameters, or is a coroutine function.

    Example::

        class Model:
            def __init__(self):
                self.network = torch.nn.Linear(784, 10)

            @rpc.batch(max_size=32, max_wait=0.005)
            @torch.no_grad()
            def predict(self, rows, temperature=1.0):   # lists, of the same length
                logits = self.network(torch.stack(rows)) / torch.tensor(temperature)[:, None]
                return list(logits.softmax(-1))

        model = rpc.remote("server", Model)
        result = model.rpc_sync().predict(torch.ones(784))  # of one row
        assert result.shape == (10,)
    """
    if max_size < 1 or not max_wait >= 0:
        raise ValueError("a batch has at least 1 call, and waits 0 or more seconds")
    return lambda function: _Batched(function, max_size, max_wait)


@dataclass
class _Waiting:
    """A call that waits for its batch."""

    arguments: tuple[Any, ...]
    answer: Answer
    agent: Any
    given_up: _C._GivenUp = field(default_factory=_C._GivenUp)
    since: float = field(default_factory=time.monotonic)


class _Queue:
    """The waiting calls of one function, or of one object's method. While calls arrive, one thread serves them."""

    def __init__(self, name: str, parameters: list[str], max_size: int, max_wait: float) -> None:
        self._name = name
        self._parameters = parameters
        self._max_size = max_size
        self._max_wait = max_wait
        self._waiting: deque[_Waiting] = deque()
        self._changed = threading.Condition()
        self._running = False

    def put(self, call: _Waiting, function: Callable[..., Any]) -> None:
        """Adds a call, and starts the thread if none runs. The thread keeps ``function`` until it ends."""
        with self._changed:
            self._waiting.append(call)
            if self._running:
                self._changed.notify()
                return
            thread = threading.Thread(
                target=self._serve, args=(function,), name=f"tensorferry {self._name}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # the system gives no thread: the call fails, and the next one tries again
                self._waiting.pop()
                raise
            self._running = True

    def _serve(self, function: Callable[..., Any]) -> None:
        while batch := self._take():
            _run(self._name, self._parameters, function, batch)

    def _take(self) -> list[_Waiting]:
        """Waits for the next batch and returns it; empty if no call has come for ``_IDLE`` s: the thread then ends."""
        with self._changed:
            while True:
                if not self._changed.wait_for(lambda: self._waiting, _IDLE):
                    self._running = False
                    return []
                left = self._waiting[0].since + self._max_wait - time.monotonic()
                if left > 0:
                    self._changed.wait_for(lambda: len(self._waiting) >= self._max_size, left)
                batch: list[_Waiting] = []
                while self._waiting and len(batch) < self._max_size:
                    call = self._waiting.popleft()
                    if call.given_up:
                        call.answer.set_result(None)  # no caller gets this
                    else:
                        batch.append(call)
                if batch:
                    return batch


def _run(name: str, parameters: list[str], function: Callable[..., Any], batch: list[_Waiting]) -> None:
    results: list[Any]
    token = _C._serving.set(_C._ServedCall(batch[0].agent)) if batch[0].agent is not None else None
    try:
        columns = zip(*(call.arguments for call in batch))
        results = list(function(**{parameter: list(column) for parameter, column in zip(parameters, columns)}))
        if len(results) != len(batch):
            raise ValueError(f'"{name}" returned {len(results)} results for a batch of {len(batch)} calls')
    except BaseException as error:
        results = [error] * len(batch)
    finally:
        if token is not None:
            _C._serving.reset(token)
    for call, result in zip(batch, results):
        if not isinstance(result, BaseException):
            call.answer.set_result(result)
        elif isinstance(result, Exception):
            call.answer.set_exception(result)
        else:  # SystemExit, for example: the callers get an error, and this process goes on
            call.answer.set_exception(RuntimeError(f'"{name}" raised {result!r}'))


class _Batched(Generic[R]):
    """Replaces a decorated function. As a class attribute, it binds to the object as a method does."""

    def __init__(self, function: Callable[..., list[R]], max_size: int, max_wait: float) -> None:
        if inspect.iscoroutinefunction(function):
            raise TypeError("a batch function runs on a thread of its own: it cannot be a coroutine function")
        functools.update_wrapper(self, function)
        self._wrapped_async_rpc_function = function  # as functions.async_execution does
        self._function = function
        self._signature = inspect.signature(function)
        starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
        if any(parameter.kind in starred for parameter in self._signature.parameters.values()):
            raise TypeError("a batch function takes parameters with names: a list is made for each")
        self._limits = max_size, max_wait
        self._lock = threading.Lock()
        self._own: _Queue | None = None
        self._queues: dict[int, _Queue] = {}  # by the object's id()

    def __call__(self, *args: Any, **kwargs: Any) -> Answer:
        if self._own is None:
            with self._lock:
                if self._own is None:
                    self._own = self._queue(list(self._signature.parameters))
        return self._put(self._own, self._function, self._signature.bind(*args, **kwargs), 0)

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., Answer]:
        if instance is None:
            return self
        bound = functools.partial(self._call_of, instance)
        bound._wrapped_async_rpc_function = self._function  # type: ignore[attr-defined]
        return bound

    def _call_of(self, instance: Any, *args: Any, **kwargs: Any) -> Answer:
        with self._lock:
            queue = self._queues.get(id(instance))
            if queue is None:
                queue = self._queues[id(instance)] = self._queue(list(self._signature.parameters)[1:])
                weakref.finalize(instance, self._queues.pop, id(instance), None)
        function = functools.partial(self._function, instance)
        return self._put(queue, function, self._signature.bind(instance, *args, **kwargs), 1)

    def _queue(self, parameters: list[str]) -> _Queue:
        return _Queue(getattr(self, "__qualname__", "batch"), parameters, *self._limits)

    def _put(self, queue: _Queue, function: Callable[..., Any], given: inspect.BoundArguments, skipped: int) -> Answer:
        given.apply_defaults()
        agent = _C.current_agent() if _C.is_serving() else _C.default_agent()
        call = _Waiting(tuple(given.arguments.values())[skipped:], torch.futures.Future(), agent)
        queue.put(call, function)
        return call.answer
