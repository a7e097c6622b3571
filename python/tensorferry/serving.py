"""The event loop of an agent, which the coroutines that peers call run on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from functools import partial
from typing import Any

from . import _C
from .futures import inbox_of

__all__ = ["HandlerLoop"]

_PATIENCE = 1.0  # seconds for tasks to end in when the agent leaves, as functions have


class HandlerLoop:
    """One thread with an event loop. Each call is a task of it, cancelled when the caller gives the call up, when its
    deadline passes, and when the agent leaves.

    Args:
        agent: the agent's name, for the thread's.
    """

    def __init__(self, agent: str) -> None:
        self._name = f"tensorferry {agent}"
        self._lock = threading.Lock()  # guards the beginning and the end
        self._ended = False
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, call: _C._ServedCall, coroutine: Coroutine[Any, Any, Any]) -> None:
        """What ``coroutine`` returns or raises is the answer to ``call``. From any thread."""
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
        """Cancels all tasks, waits for them a moment, closes asynchronous generators, ends the thread."""
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
            self._loop.run_forever()
            self._loop.run_until_complete(self._end_all())
        finally:
            self._inbox.close()
            self._loop.close()

    async def _end_all(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._others_end()  # which includes the ends of generators that have just been dropped
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        self._loop.create_task(self._loop.shutdown_asyncgens())
        await self._others_end()

    async def _others_end(self) -> None:
        await asyncio.sleep(0)  # what has been dropped is scheduled
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=_PATIENCE)

    def _start(self, call: _C._ServedCall, coroutine: Coroutine[Any, Any, Any]) -> None:
        token = _C._serving.set(call)  # which the task's context copies
        try:
            task = self._loop.create_task(_serve(call, coroutine))
        finally:
            _C._serving.reset(token)
        left = call.time_left()
        timer = None if left is None else self._loop.call_later(left, task.cancel)
        self._tasks.add(task)
        task.add_done_callback(partial(self._end_of, call, coroutine, timer))
        call.when_cancelled(self._inbox, task.cancel)

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
        coroutine.close()  # where the task was cancelled before it began
        call.give_up()  # nothing, where it has been answered


async def _serve(call: _C._ServedCall, coroutine: Coroutine[Any, Any, Any]) -> None:
    try:
        result = await coroutine
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # as of other functions: the caller is told, and this process goes on
        here = error.__traceback__
        call.error(error.with_traceback(here and here.tb_next))
    else:
        call.value(result)
