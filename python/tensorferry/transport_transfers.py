"""The transfers of transport.py: what a caller waits for, and the threads that run those that wait for a peer."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from . import errors


class RegionTransfer(Work):
    """A transfer under way. Its error, if it fails, is the one of :class:`tensorferry.Region`.

    It keeps the local buffer until the transfer has ended. A time-out ends only the wait.
    """

    def __init__(self, timeout: float, buffers: tuple[Any, ...] = ()) -> None:
        super().__init__()
        self._timeout = timeout
        self._buffers = buffers
        self._error: Exception | None = None
        self._ended = threading.Event()
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

    def _end(self, error: Exception | None = None) -> None:
        self._error = error
        self._buffers = ()
        self._ended.set()
        if error is None:
            self._future.set_result([])
        else:
            self._future.set_exception(error)  # type: ignore[arg-type] # torch's annotation is wrong

    def is_completed(self) -> bool:
        """Returns whether it has ended, also with an error."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Returns whether it has ended without an error."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> Exception | None:  # type: ignore[override]
        """Returns the error with which it has ended, if there is one."""
        return self._error if self._ended.is_set() else None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits for the end. Raises the transfer's error, or TimeoutError: then the transfer goes on.

        Args:
            timeout: of this wait; 0: that of the transfer.
        """
        seconds = timeout.total_seconds()
        check_timeout(seconds)
        if not self._ended.wait(seconds or self._timeout):
            raise errors.DeadlineExceeded("the transfer has not ended in time: it goes on; wait for it again")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Waits as :meth:`wait`."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Waits as :meth:`wait`, and returns an empty list."""
        self.wait()
        return []

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Returns a future of the end: an empty list, or the error."""
        return self._future


class Threads:
    """Runs transfers on daemon threads, which do not keep the interpreter from ending. Threads start when needed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = 0

    def run(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._started < self._most:
                self._started += 1
                threading.Thread(target=self._serve, name="tensorferry-transfer", daemon=True).start()
        self._queue.put(job)

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            job()

    def end(self) -> None:
        for _ in range(self._started):
            self._queue.put(None)


def check_timeout(timeout: float | None) -> None:
    if timeout is not None and not (math.isfinite(timeout) and timeout >= 0):
        raise ValueError("a time-out is a finite number of seconds, 0 or more")
