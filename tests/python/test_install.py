"""What the package holds for C++ programs, found through ``python -m tensorferry.cmake``."""

from __future__ import annotations

import subprocess
import sys

import tensorferry
import tensorferry.cmake


def test_the_module_prints_where_cmake_finds_the_package() -> None:
    printed = subprocess.run([sys.executable, "-m", "tensorferry.cmake"], check=True, capture_output=True, text=True)
    assert printed.stdout == f"{tensorferry.cmake.prefix()}\n"
    assert list(tensorferry.cmake.prefix().rglob("tensorferryConfig.cmake"))
