#!/usr/bin/env python3
"""Checks the subjects of commits: `area: verb ...`, at most 72 characters.

scripts/subjects.py FILE        the message in this file, as git's hook commit-msg passes it
scripts/subjects.py             the commits since the merge base with TIDY_BASE (origin/main), or else the newest one

The area is a folder or a part of the tree: `channels/shm`, `docs`, or several: `rpc, agent`. What follows begins with a
verb in the imperative, in lower case: "agent: keep the order of calls", not "agent: keeps", "Agent: the order", "wip".
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

LONGEST = 72
FORM = re.compile(r"(?P<area>\w[\w./+-]*(?:, \w[\w./+-]*)*): (?P<verb>[a-z][\w-]*)(?: \S.*)?")
# Words that begin many a subject that does not say what the commit does.
NO_VERBS = re.compile(
    "a|all|an|and|another|any|both|each|every|few|fewer|for|from|here|how|if|in|it|its|less|many|more|most|new|no|now|of|"
    "on|one|our|several|some|that|the|there|these|they|this|those|three|to|two|what|when|where|which|who|why|with|"
    "without|wip"
)
# Words that are no imperative, "adding", "added", "adds", and the verbs that only look like them.
ENDINGS = re.compile(r".+(?:ing|ed|[^su]s)")
VERBS = {"alias", "bias", "bring", "canvas", "embed", "feed", "need", "ping", "shed", "speed", "spring", "string"}


def fault(subject: str) -> str | None:
    """What is wrong with a subject; None if nothing is."""
    if len(subject) > LONGEST:
        return f"has {len(subject)} characters, at most {LONGEST}"
    found = FORM.fullmatch(subject)
    if found is None:
        return "is not of the form `area: verb ...`, with a verb in lower case"
    verb = found["verb"]
    if NO_VERBS.fullmatch(verb) or (ENDINGS.fullmatch(verb) and verb not in VERBS):
        return f"does not begin with a verb in the imperative: {verb!r}"
    return None


def git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def subjects() -> list[str]:
    """The subjects of this branch's commits, without merges."""
    base = git("merge-base", os.environ.get("TIDY_BASE") or "origin/main", "HEAD")
    log = git("log", "--no-merges", "--format=%s", *([f"{base}..HEAD"] if base else ["-1"]))
    return log.splitlines() if log else []


def main() -> int:
    if len(sys.argv) > 1:
        first = Path(sys.argv[1]).read_text(encoding="utf-8").split("\n", 1)[0]
        given = [] if first.startswith("Merge ") else [first]
    else:
        given = subjects()
    wrong = [(subject, said) for subject in given if (said := fault(subject))]
    for subject, said in wrong:
        print(f"the subject {said}: {subject}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
