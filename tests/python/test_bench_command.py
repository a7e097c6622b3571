"""`tensorferry bench`, and the line that shows the progress of a command at a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys

from tensorferry import bench


def test_the_command_measures_both_libraries_and_prints_how_much_faster() -> None:
    command = [sys.executable, "-m", "tensorferry", "bench", "--seconds", "0.05"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^(.+?)  +[\d.,]+ [mu]s +[\d.,]+ [mu]s  [\d.]+x faster$", done.stdout, re.MULTILINE)
    assert rows == [name for name, _ in bench.ROWS], done.stdout
    assert "\x1b" not in done.stdout + done.stderr  # no terminal, no progress


def test_at_a_terminal_the_progress_goes_to_the_standard_error_alone() -> None:
    terminal, other_end = pty.openpty()
    command = [sys.executable, "-m", "tensorferry", "bench", "--seconds", "0.01", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=other_end, text=True)
    os.close(other_end)
    shown = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    out = process.communicate(timeout=170)[0]
    assert process.returncode == 0, shown
    assert set(json.loads(out)) == {name for name, _ in bench.ROWS}
    assert b"1 of 4: empty call, tensorferry, turn 1 of 3" in shown and shown.endswith(b"\r\x1b[K"), shown
