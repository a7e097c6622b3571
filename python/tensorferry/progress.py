"""What a command that takes longer than a second shows at a terminal meanwhile."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TextIO

__all__ = ["Progress"]


class Progress:
    """One line that says what goes on, and goes when it is done. Shows nothing if ``out`` is no terminal.

    Args:
        out: where to show it; None: the standard error, so that the output of the command stays whole.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stderr if out is None else out
        self._shows = self._out.isatty()

    def say(self, text: str) -> None:
        """Shows a text in place of the last one."""
        if self._shows:
            self._out.write(f"\r\x1b[K{text} ...")
            self._out.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._shows:
            self._out.write("\r\x1b[K")
            self._out.flush()
