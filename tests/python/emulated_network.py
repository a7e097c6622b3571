"""A network of the tests' own, for processes that are on several hosts: tests/network/hosts_main.cpp makes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import tensorferry._C
from conftest import outputs_of

PROGRAM = Path(tensorferry._C.__file__).parents[2] / "tests/network/network_hosts"


class EmulatedNetwork:
    """Hosts 10.99.0.1, 10.99.0.2, ... with the names ``names``, each in a network namespace with the interface eth0.
    Skips the test if this process may not make them."""

    def __init__(self, *names: str) -> None:
        if not PROGRAM.is_file():
            pytest.skip(f"{PROGRAM} is not built")
        pipe = subprocess.PIPE
        self._program = subprocess.Popen([PROGRAM, *names], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self.addresses: dict[str, str] = {}
        self._namespaces: dict[str, str] = {}
        for name in names:
            line = self._line()
            if not line:
                pytest.skip(self._program.communicate()[1].strip())
            _, self.addresses[name], self._namespaces[name] = line.split()

    def __enter__(self) -> EmulatedNetwork:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._program.communicate()

    def _line(self) -> str:
        assert self._program.stdout
        return self._program.stdout.readline().strip()

    def tell(self, command: str) -> None:
        """Changes the network; hosts_main.cpp lists the commands."""
        assert self._program.stdin
        print(command, file=self._program.stdin, flush=True)
        assert (answer := self._line()) == "ok", answer

    def namespace(self, host: str) -> str:
        """The file of the host's network namespace."""
        return self._namespaces[host]

    def start(self, host: str, command: list[str], **options: Any) -> subprocess.Popen[str]:
        """Starts a program on a host; ``options`` are those of Popen."""
        return subprocess.Popen(["nsenter", f"--net={self._namespaces[host]}", *command], text=True, **options)


def outputs_on_two_hosts(folder: Path, program: str, one: str, two: str, **environment: str) -> list[str]:
    """Runs a program on two hosts, in a folder that both see, and returns what each printed. It gets the folder, its
    host's name and the other's. It has no key of this environment's."""
    (folder / "program.py").write_text(program)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TENSORFERRY_KEY")}
    kept |= {"TENSORFERRY_CHANNELS": "basic", **environment}  # the hosts are one machine
    with EmulatedNetwork(one, two) as network:
        network.tell(f"path {one} {two} 1e9 1000 0")
        network.tell(f"path {two} {one} 1e9 1000 0")
        started = [
            network.start(
                host,
                [sys.executable, "program.py", str(folder), host, other],
                env=kept,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for host, other in ((one, two), (two, one))
        ]
        return outputs_of(started, timeout=200)
