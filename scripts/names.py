#!/usr/bin/env python3
"""Lists the types of the C++ sources that share their name with another type, and fails if there is one.

A name stands for one thing, so that a reader who searches for it finds one declaration. Types inside a class may share
their names: they are always read with the name of their class. Tests, benchmarks and examples are programs of their
own.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

# clang-format indents what is inside a class, and nothing inside a namespace.
DECLARED = re.compile(
    r"^(?:template [^;{]*> )?(?:class|struct|enum class|enum|union) ([A-Z]\w*)(?: final)?(?: :(?!:)[^;{]*)? \{",
    re.MULTILINE,
)


def main() -> int:
    files = subprocess.run(
        ["git", "ls-files", "*.h", "*.cpp"], check=True, capture_output=True, text=True
    ).stdout.split()
    places = defaultdict(set)
    for file in files:
        if not file.startswith(("tests/", "benchmarks/", "examples/")):
            for name in DECLARED.findall(Path(file).read_text(encoding="utf-8")):
                places[name].add(file)
    shared = {name: sorted(where) for name, where in places.items() if len(where) > 1}
    for name, where in sorted(shared.items()):
        print(f"{name} is declared in {len(where)} files: {', '.join(where)}")
    return 1 if shared else 0


if __name__ == "__main__":
    sys.exit(main())
