"""The findings of ``tensorferry doctor`` as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence

from .finding import BROKEN, NOTE, OK, SLOW, Finding
from .peer import Path

__all__ = ["as_json", "as_text", "verdict"]

_MARKS = {OK: "ok    ", NOTE: "note  ", SLOW: "SLOW  ", BROKEN: "BROKEN"}


def verdict(findings: Sequence[Finding]) -> str:
    """Returns the last line: how many findings need work."""
    broken = sum(each.state == BROKEN for each in findings)
    slow = sum(each.state == SLOW for each in findings)
    if not broken and not slow:
        return "Nothing to do."
    parts = [f"{broken} broken" if broken else "", f"{slow} that cost speed" if slow else ""]
    return ", ".join(filter(None, parts)) + "."


def as_text(findings: Sequence[Finding], paths: Sequence[Path] = (), width: int = 120) -> str:
    """Returns the findings, the broken ones last, where a terminal shows them."""
    order = [OK, NOTE, SLOW, BROKEN]
    out = []
    for each in sorted(findings, key=lambda finding: order.index(finding.state)):
        out.append(f"{_MARKS[each.state]}  {each.check}: {each.found}")
        for text, lead in ((each.cost, "costs: "), (each.advice, "do: ")):
            if text:
                out += textwrap.wrap(lead + text, width, initial_indent=" " * 10, subsequent_indent=" " * 12)
    if paths:
        out.append(f"\n{'path':24}{'latency':>12}{'rate':>14}")
        for path in paths:
            latency = f"{path.latency_us:.1f} us" if path.latency_us is not None else ""
            rate = f"{path.gigabytes_per_second:.2f} GB/s" if path.gigabytes_per_second is not None else ""
            out.append(f"{path.name:24}{latency:>12}{rate:>14}  {path.why}".rstrip())
    out.append("")
    out.append(verdict(findings))
    return "\n".join(out)


def as_json(findings: Sequence[Finding], paths: Sequence[Path] = ()) -> str:
    """Returns the same as one JSON object: ``findings``, ``paths``, ``verdict``."""
    about = {
        "findings": [dataclasses.asdict(each) for each in findings],
        "paths": [dataclasses.asdict(each) for each in paths],
        "verdict": verdict(findings),
    }
    return json.dumps(about, indent=1)
