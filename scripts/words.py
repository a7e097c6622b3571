#!/usr/bin/env python3
"""Counts the words of docs/, and fails if there are more than a reader can be asked for. Programs and their output are
not counted: the tests want them whole.

scripts/words.py        prints each page with its words, longest last
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
CEILING = 50_000  # of all pages together
BLOCK = re.compile(r"^ *```[^{\n]*\n.*?^ *```$", re.DOTALL | re.MULTILINE)
WORD = re.compile(r"\S*\w\S*")  # the bars of a table are no words


def words() -> dict[str, int]:
    pages = [page for page in DOCS.rglob("*.md") if "_build" not in page.parts]
    return {
        str(page.relative_to(DOCS)): len(WORD.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))))
        for page in pages
    }


def main() -> int:
    counted = words()
    for page, count in sorted(counted.items(), key=lambda item: item[1]):
        print(f"{count:7,} {page}")
    total = sum(counted.values())
    print(f"{total:7,} in all, of at most {CEILING:,}")
    return 1 if total > CEILING else 0


if __name__ == "__main__":
    sys.exit(main())
