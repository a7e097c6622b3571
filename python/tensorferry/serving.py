"""The event loop of an agent: runs the coroutines that peers call."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Coroutine
from functools import cache, partial
from typing import Any

from . import _C
from .futures import inbox_of

__all__ = ["HandlerLoop", "log_raised"]

_log = logging.getLogger("tensorferry")

_PATIENCE = 1.0  # seconds that tasks have to end when the agent leaves, the same as functions


def log_raised(caller: str, traceback: str) -> None:
    """Logs, at the level INFO, that a function raised an exception which goes to ``caller``."""
    _log.info("a function that %r called raised an exception:\n%s", caller, traceback.rstrip())


class HandlerLoop:
    """A thread with an event loop, which starts with the first call. Each call runs as a task of the loop.

    The task is cancelled when the caller gives up the call or the call's deadline passes, whichever comes first, so the
    coroutine may await what it needs to end; and when the agent leaves.

    Args:
        agent: the agent's name, which becomes part of the thread's name.
    """

    def __init__(self, agent: str) -> None:
        self._name = f"tensorferry {agent}"
        self._lock = threading.Lock()  # guards the start and the end of the thread
        self._ended = False
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, call: _C._ServedCall, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Runs ``coroutine``, and answers ``call`` with its result or exception. May be called from any thread."""
        if not self._begin() or not self._inbox.post(partial(self._start, call, coroutine)):
            coroutine.close()
            call.give_up()

    def _begin(self) -> bool:
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._ended:
                    self._loop = asyncio.new_event_loop()
                    self._inbox = inbox_of(self._loop)
                    thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    thread.start()
                    self._thread = thread
        return not self._ended

    def stop(self) -> None:
        """Cancels all tasks, waits up to ``_PATIENCE`` s for them, closes asynchronous generators, and ends the thread.

        May be called from any thread. The loop's own thread does not wait for the end.
        """
        with self._lock:
            self._ended = True
        if self._thread is None:
            return
        self._inbox.post(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(3 * _PATIENCE)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._run_until_stopped()
            self._loop.run_until_complete(self._end_all())
        finally:
            self._inbox.close()
            self._loop.close()

    def _run_until_stopped(self) -> None:
        while True:
            try:
                return self._loop.run_forever()
            except BaseException:  # a SystemExit of a task that a coroutine has left behind, or of a handler of the log
                with contextlib.suppress(BaseException):
                    _log.exception("a task or a callback on the event loop of %s raised", self._name)

    async def _end_all(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._others_end()  # also waits until generators dropped just now have closed
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        self._loop.create_task(self._loop.shutdown_asyncgens())
        await self._others_end()

    async def _others_end(self) -> None:
        await asyncio.sleep(0)  # lets the loop schedule the closing of dropped generators
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=_PATIENCE)

    def _start(self, call: _C._ServedCall, coroutine: Coroutine[Any, Any, Any]) -> None:
        token = _C._serving.set(call)  # the task's context copies it
        try:
            task = self._loop.create_task(_serve(call, coroutine))
        finally:
            _C._serving.reset(token)
        cancel = cache(task.cancel)  # the first time alone
        left = call.time_left()
        timer = None if left is None else self._loop.call_later(left, cancel)
        self._tasks.add(task)
        task.add_done_callback(partial(self._end_of, call, coroutine, timer))
        call.when_cancelled(self._inbox, cancel)

    def _end_of(
        self,
        call: _C._ServedCall,
        coroutine: Coroutine[Any, Any, Any],
        timer: asyncio.TimerHandle | None,
        task: asyncio.Task[None],
    ) -> None:
        self._tasks.discard(task)
        if timer is not None:
            timer.cancel()
        coroutine.close()  # in case the task was cancelled before it began
        call.give_up()  # does nothing if the call has been answered


async def _serve(call: _C._ServedCall, coroutine: Coroutine[Any, Any, Any]) -> None:
    try:
        result = await coroutine
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # as for other functions: the caller gets the error, and this process goes on
        here = error.__traceback__
        call.error(error.with_traceback(here and here.tb_next))
    else:
        call.value(result)
