"""What the programs of ranks check refusals with."""

from __future__ import annotations

from collections.abc import Callable


def refused(kind: type[BaseException], call: Callable[[], object], *texts: str) -> None:
    """Checks that the call raises an error of this kind, with these texts."""
    try:
        call()
    except kind as error:
        assert all(text in str(error) for text in texts), error
    else:
        raise AssertionError(texts)
