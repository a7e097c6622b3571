"""Writes what is made from the table of errors, include/tensorferry/error_codes.h.

These are the classes at the end of python/tensorferry/errors.py, the codes in docs/protocol.md, and the table of what
to do in docs/troubleshooting.md. `make format` runs this script. With --doxygen it prints the table as C++ classes,
because doxygen cannot show what macros describe.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = (ROOT / "include/tensorferry/error_codes.h").read_text()
# Number, name, builtin base and description of each error. RemoteError's class is written by hand.
ERRORS = sorted(re.findall(r'ERROR\((\d+), \w+, (\w+), (\w+),[\s\\]*"([^"]*)"\)', TABLE), key=lambda row: int(row[0]))
SECTIONS = {"RemoteError": "remoteerror-and-exceptions-of-the-function-itself"}  # of docs/troubleshooting.md
PLAIN = [error for error in ERRORS if error[1] != "RemoteError"]
REMEDIES = dict(re.findall(r"^// DO\((\w+)\) (.*)$", TABLE, re.MULTILINE))
assert REMEDIES.keys() == {name for _, name, _, _ in ERRORS}, "each error has a line of what to do"
assert len(ERRORS) == TABLE.count("  ERROR("), "a row is not ERROR(number, enumerator, Class, Builtin, string literal)"


def replaced(path: Path, begin: str, text: str, end: str) -> str:
    """Returns the file's text with `text` between `begin` and `end`."""
    head, _, rest = path.read_text().partition(begin)
    return head + begin + text + rest[rest.index(end) :]


def texts() -> dict[Path, str]:
    """Returns the files' texts as the table makes them."""
    names = sorted(f'"{name}",' for name in ["Error", "RemoteTraceback", *(error[1] for error in ERRORS)])
    exported = textwrap.indent(textwrap.fill(" ".join(names), 116), "    ")
    classes = [f'class {name}(Error, {base}):\n    """{text}"""\n\n\n' for _, name, base, text in PLAIN]
    python = "".join(classes).replace(", RuntimeError", "")  # Error is one
    rows = ", ".join(f"{number} {name}" for number, name, _, _ in ERRORS)
    codes = textwrap.fill(f"The codes: {rows}.", 160) + "\n"
    linked = {name: f"[{name}](#{SECTIONS.get(name, name.lower())})" for _, name, _, _ in ERRORS}
    advice = "".join(f"| {linked[name]} | {text} | {REMEDIES[name]} |\n" for _, name, _, text in ERRORS)
    module, protocol = ROOT / "python/tensorferry/errors.py", ROOT / "docs/protocol.md"
    page = ROOT / "docs/troubleshooting.md"
    return {
        page: replaced(page, "| error | what it tells | what to do |\n|---|---|---|\n", advice, "\n### "),
        module: replaced(module, "error_codes.h.\n\n\n", f"{python}__all__ = [\n{exported}\n", "]  # fmt: skip"),
        protocol: replaced(protocol, "what each code means.\n\n", codes, "\n### "),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--doxygen"]:
        print("namespace tensorferry {")
        for _, name, _, text in PLAIN:
            print(f"/// {text}\n/// \\headerfile tensorferry/errors.h\nclass {name} : public Error {{}};")
        print("}")
    else:
        for path, text in texts().items():
            path.write_text(text)
