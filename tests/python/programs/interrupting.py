"""A SIGINT in the middle of a call, for the programs that go through all functions that block."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

BOUND = 10.0  # seconds: fifty times what a wait may take, and much less than each call would block


def interrupt(name: str, call: Callable[[], Any], after: float) -> None:
    """Runs ``call``, which blocks, and sends the process a SIGINT ``after`` so many seconds: a signal that comes before
    the wait ends it too. The call must end by a KeyboardInterrupt in time."""
    sent: list[float] = []

    def send() -> None:
        time.sleep(after)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    try:
        thread.start()
        call()
        thread.join()
    except KeyboardInterrupt:
        took = time.monotonic() - sent[0]
        assert took < BOUND, f"{name} took {took} s"
    else:
        raise AssertionError(f"{name} returned")
    thread.join()
