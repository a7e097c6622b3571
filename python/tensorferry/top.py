"""``tensorferry top``: the agents of a running job, their links, rates, channels and slow calls, in the terminal."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .doctor.finding import size_text
from .watching import Watcher, add_arguments, watcher_of

__all__ = ["Table", "folded", "main", "plain", "rich_view", "tables"]

Seen = Mapping[str, Mapping[str, Any]]  # by agent: what observing.observe() says
_MOST_ROWS = 40
_SLOW = 0.1  # seconds after which a call in flight is shown


@dataclass(frozen=True)
class Table:
    """A table of the picture: its title, its columns, and its rows of texts."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def _seconds(value: float) -> str:
    if not math.isfinite(value):
        return "-" if math.isnan(value) else "long"
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if value * factor < 1000:
            return f"{value * factor:.3g} {unit}"
    return f"{value:.3g} s"


def _rate(bytes_: float) -> str:
    return f"{size_text(bytes_)}/s" if bytes_ else "-"


def _number(value: float) -> str:
    return "-" if not value else f"{value:.3g}" if value < 100 else f"{value:.0f}"


class _Rates:
    """Differences of counters between two looks, for each second."""

    def __init__(self, before: Seen, now: Seen, seconds: float) -> None:
        self._before, self._now, self._seconds = before, now, seconds

    def of(self, agent: str, read: Callable[[Mapping[str, Any]], float]) -> float:
        """Returns the rate of a counter; 0 at the first look, and if the agent is another one of that name."""
        before = self._before.get(agent)
        if before is None or self._seconds <= 0 or before["pid"] != self._now[agent]["pid"]:
            return 0.0
        return max(0.0, read(self._now[agent]) - read(before)) / self._seconds


def _agents(now: Seen, rates: _Rates) -> Table:
    rows = []
    for name in sorted(now, key=lambda name: (now[name]["rank"] < 0, now[name]["rank"], name)):
        one = now[name]
        calls = one["latencies"]["call_time"]
        up = sum(link["state"] == "up" for link in one["links"])
        rows.append((
            name,
            "" if one["rank"] < 0 else str(one["rank"]),
            f"{one['host']}:{one['pid']}",
            _number(rates.of(name, lambda each: each["calls_sent"])),
            _number(rates.of(name, lambda each: each["calls_served"])),
            _seconds(calls["0.5"]),
            _seconds(calls["0.99"]),
            str(one["pending"]),
            f"{one['busy']}+{one['queued']}",
            _rate(rates.of(name, lambda each: sum(each["bytes_sent"].values()))),
            _rate(rates.of(name, lambda each: sum(each["bytes_received"].values()))),
            size_text(one["held_bytes"] + one["idle_bytes"]),
            f"{up}/{len(one['links'])}",
            _number(sum(one["failed"].values())),
        ))  # fmt: skip
    columns = "agent rank process calls/s served/s p50 p99 flying run+wait sent received memory links failed"
    return Table("agents", tuple(columns.split()), rows)


def _channels(now: Seen, rates: _Rates) -> Table:
    rows = []
    for name, one in sorted(now.items()):
        for channel in sorted({*one["bytes_sent"], *one["bytes_received"]}):
            sent, received = (
                rates.of(name, lambda each, key=key, channel=channel: each[key].get(channel, 0))  # type: ignore[misc]
                for key in ("bytes_sent", "bytes_received")
            )
            total = one["bytes_sent"].get(channel, 0) + one["bytes_received"].get(channel, 0)
            rows.append((name, channel, _rate(sent), _rate(received), size_text(total)))
    return Table("channels", ("agent", "channel", "sent", "received", "in all"), rows)


def _links(now: Seen, rates: _Rates) -> Table:
    rows = []
    for name, one in sorted(now.items()):
        for link in one["links"]:
            if link["peer"].startswith("watcher-"):
                continue

            def count(each: Mapping[str, Any], key: str, peer: str = link["peer"]) -> float:
                return float(sum(other[key] for other in each["links"] if other["peer"] == peer))

            silent = link["silent_seconds"]
            rows.append((
                f"{name} -> {link['peer']}",
                link["state"],
                link["transport"] or link["no_ring"],
                _number(rates.of(name, lambda each: count(each, "calls_made"))),
                str(link["in_flight"] + link["waiting"]),
                _rate(rates.of(name, lambda each: count(each, "bytes_sent"))),
                _rate(rates.of(name, lambda each: count(each, "bytes_received"))),
                _seconds(silent) if silent >= 0 else "-",
            ))  # fmt: skip
    columns = ("link", "state", "calls by", "calls/s", "flying", "sent", "received", "silent for")
    return Table("links", columns, rows)


def _slow_calls(now: Seen) -> Table:
    calls = [
        (age, name, peer, function, sent)
        for name, one in now.items()
        for function, peer, age, sent in one["oldest_calls"]
        if age >= _SLOW
    ]
    rows = [
        (f"{name} -> {peer}", function, _seconds(age), "sent" if sent else "not sent")
        for age, name, peer, function, sent in sorted(calls, reverse=True)
    ]
    return Table("slow calls", ("call", "function", "for", "request"), rows)


def _groups(now: Seen) -> Table:
    rows = [
        (f"{group['label']} ({group['size']} ranks)", name, str(group["rank"]), "{} / {}".format(*group["progress"]))
        for name, one in sorted(now.items())
        for group in one["groups"]
    ]
    return Table("groups", ("group", "agent", "rank", "started / ended"), rows)


def tables(now: Seen, before: Seen, seconds: float, gone: Mapping[str, str]) -> list[Table]:
    """Returns the tables of one picture.

    Args:
        now: what was seen of each agent.
        before: what was seen ``seconds`` earlier; empty: there are no rates yet.
        seconds: the time between the two.
        gone: why agents do not answer.
    """
    rates = _Rates(before, now, seconds)
    made = [_agents(now, rates), _channels(now, rates), _links(now, rates), _slow_calls(now), _groups(now)]
    made.append(Table("gone", ("agent", "why"), sorted(gone.items())))
    return [made[0], *(table for table in made[1:] if table.rows)]


def _widths(table: Table) -> list[int]:
    rows = [table.columns, *table.rows[:_MOST_ROWS]]
    return [max(len(row[i]) for row in rows) for i in range(len(table.columns))]


def folded(made: Sequence[Table], width: int) -> list[Table]:
    """Returns the tables with each that is wider than ``width`` characters split into parts. A part has the first
    column and as many of the others, in their order, as fit; at least one."""
    out = []
    for table in made:
        widths = _widths(table)
        indent = 2  # as plain() has
        parts, used = [[0]], indent + widths[0]
        for i in range(1, len(widths)):
            if len(parts[-1]) > 1 and used + 2 + widths[i] > width:
                parts.append([0])
                used = indent + widths[0]
            parts[-1].append(i)
            used += 2 + widths[i]
        for number, part in enumerate(parts):
            title = f"{table.title}, continued" if number else table.title
            rows = [tuple(row[i] for i in part) for row in table.rows]
            out.append(Table(title, tuple(table.columns[i] for i in part), rows))
    return out


def plain(made: Sequence[Table]) -> str:
    """Returns the tables as text, for any width. :func:`folded` makes them narrower."""
    out = []
    for table in made:
        rows = [table.columns, *table.rows[:_MOST_ROWS]]
        widths = _widths(table)
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        left = len(table.rows) - _MOST_ROWS
        out += [f"{table.title}:", *(f"  {line}" for line in lines), *([f"  and {left} more"] if left > 0 else []), ""]
    return "\n".join(out)


def rich_view(made: Sequence[Table]) -> Any:
    """Returns the tables for a console of rich. It cuts what is wider than it: see :func:`folded`.

    Raises:
        ImportError: rich is not installed.
    """
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    views = []
    for table in made:
        view = RichTable(title=table.title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for column in table.columns:
            style = "cyan" if column == table.columns[0] else None
            view.add_column(column, style=style, no_wrap=column != "why")
        for row in table.rows[:_MOST_ROWS]:
            view.add_row(*(Text(cell) for cell in row))
        if len(table.rows) > _MOST_ROWS:
            view.add_row(f"and {len(table.rows) - _MOST_ROWS} more")
        views.append(view)
    return Group(*views)


def _clear_and_print(made: list[Table]) -> None:
    print("\033[H\033[2J" + plain(folded(made, shutil.get_terminal_size().columns)), flush=True)


def _show(watcher: Watcher, interval: float, once: bool, draw: Callable[[list[Table]], None]) -> None:
    before, seen_at = watcher.look(), time.monotonic()
    while True:
        time.sleep(interval)
        now, at = watcher.look(), time.monotonic()
        draw(tables(now, before, at - seen_at, watcher.gone))
        if once:
            return
        before, seen_at = now, at


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: ``tensorferry top HOST:PORT``."""
    parser = argparse.ArgumentParser(
        prog="tensorferry top",
        description="Shows the agents of a running job with their links, rates, channels and slow calls, until Ctrl-C. "
        "The job's cluster key is that of TENSORFERRY_KEY_FILE or TENSORFERRY_KEY.",
    )
    add_arguments(parser)
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between two looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one picture as text, and end")
    given = parser.parse_args(arguments)
    if not given.interval > 0:
        parser.error("--interval is more than 0")
    with watcher_of(given, parser) as watcher:
        try:
            if given.once or not sys.stdout.isatty():
                _show(watcher, given.interval, given.once, lambda made: print(plain(made), flush=True))
                return
            try:
                from rich.live import Live
            except ImportError:
                _show(watcher, given.interval, False, _clear_and_print)
                return
            with Live(screen=True, auto_refresh=False) as live:

                def draw(made: list[Table]) -> None:
                    live.update(rich_view(folded(made, live.console.width)), refresh=True)

                _show(watcher, given.interval, False, draw)
        except KeyboardInterrupt:
            pass
