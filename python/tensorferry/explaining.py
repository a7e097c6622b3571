"""``tensorferry explain``: how the agents of a running job would send tensors to one another, and why not otherwise."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import errors, observing
from .agent import Explanation
from .watching import Watcher, add_arguments, watcher_of

__all__ = ["explained", "main", "matrix"]

_TIMEOUT = 15.0  # seconds; the agents may have to connect first


def explained(watcher: Watcher, one: str, other: str) -> Explanation | str:
    """Returns how a tensor of the CPU would travel from one agent to another, as the first one says; else why not."""
    try:
        found = watcher.agent.rpc_sync(one, observing.EXPLAIN, args=(other,), timeout=max(_TIMEOUT, watcher.patience))
    except errors.Error as error:
        return f"{type(error).__name__}: {error}"
    return Explanation(**found)


def _short(found: Explanation | str) -> str:
    return f"{found.channel or 'none'} / {found.transport}" if isinstance(found, Explanation) else "?"


def matrix(names: Sequence[str], found: dict[tuple[str, str], Explanation | str]) -> str:
    """Returns a table: from the agent of the row to that of the column, by which channel, and how calls go."""
    cells = [["from \\ to", *names]]
    for one in names:
        cells.append([one, *("" if one == other else _short(found[one, other]) for other in names)])
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: ``tensorferry explain HOST:PORT``."""
    parser = argparse.ArgumentParser(
        prog="tensorferry explain",
        description="Asks the agents of a running job how tensors would go from each to each, and why not by a faster "
        "channel. The job's cluster key is that of TENSORFERRY_KEY_FILE or TENSORFERRY_KEY.",
    )
    add_arguments(parser)
    parser.add_argument("--from", dest="one", metavar="NAME", help="this agent alone")
    parser.add_argument("--to", dest="other", metavar="NAME", help="to this agent alone")
    given = parser.parse_args(arguments)
    with watcher_of(given, parser) as watcher:
        watcher.look()
        names = watcher.names
        if missing := [name for name in (given.one, given.other) if name and name not in names]:
            parser.exit(1, f"{parser.prog}: there is no agent {missing[0]!r}; there are {', '.join(names) or 'none'}\n")
        if len(names) < 2:
            parser.exit(1, f"{parser.prog}: the job has {len(names)} agents: nothing to send between\n")
        pairs = [
            (one, other)
            for one in names
            for other in names
            if one != other and given.one in (None, one) and given.other in (None, other)
        ]
        found = {pair: explained(watcher, *pair) for pair in pairs}
    if given.one is None and given.other is None:
        print(matrix(names, found))
        print("\neach cell: the channel of a CPU tensor of 1 MiB / how calls go\n")
    told: set[str] = set()
    for (one, _), explanation in found.items():
        text = str(explanation)
        if text not in told:
            print(f"{one} -> {text}")
        told.add(text)
