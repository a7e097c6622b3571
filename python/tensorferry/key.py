"""``tensorferry key``: makes the cluster key of a job."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

DEFAULT = "~/.tensorferry.key"


def make(path: Path) -> bool:
    """Makes the file with a random key, readable by this user alone. False: it exists, and is left as it is.

    Raises:
        OSError: the file cannot be made, for example because its folder is missing.
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(file, "w") as out:
        out.write(secrets.token_urlsafe(32) + "\n")
    return True


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes the key's file if it is missing, prints its path, and says on stderr what to do with it."""
    parser = argparse.ArgumentParser(
        prog="tensorferry key",
        description="Makes the file of the cluster key that all processes of a job share, of mode 0600. "
        "A file that exists is left as it is.",
    )
    parser.add_argument("file", nargs="?", help=f"default: TENSORFERRY_KEY_FILE, else {DEFAULT}")
    given = parser.parse_args(arguments).file or os.environ.get("TENSORFERRY_KEY_FILE") or DEFAULT
    path = Path(given).expanduser()
    try:
        made = make(path)
    except OSError as error:
        parser.exit(1, f"tensorferry key: {path}: {error.strerror}\n")
    print(path)
    state = "made" if made else "exists already, and is kept"
    advice = f"Copy it to each host, and start every process with TENSORFERRY_KEY_FILE={path}"
    parser.exit(0, f"tensorferry key: {state}. {advice}\n")
