"""The adapters for other frameworks say what to install. The files beside this one test what they do."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("framework", ["ray", "torchrl", "vllm"])
def test_without_its_framework_an_adapter_says_what_to_install(framework: str, monkeypatch) -> None:
    for name in [each for each in sys.modules if each.split(".")[0] == framework]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, framework, None)  # its import now fails
    adapter = f"tensorferry.integrations.{framework}"
    monkeypatch.delitem(sys.modules, adapter, raising=False)
    with pytest.raises(ImportError, match=f"{adapter} needs .*: pip install '{framework}>="):
        importlib.import_module(adapter)


@pytest.mark.parametrize("framework", ["ray", "torchrl"])
def test_the_examples_of_the_adapters_run(framework: str, tmp_path: Path) -> None:
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    source = (ROOT / f"python/tensorferry/integrations/{framework}.py").read_text()
    (example,) = re.findall(r"^    Example::\n\n((?:        .*\n|\n)+)", source, re.MULTILINE)
    (tmp_path / "example.py").write_text(f"import pickle, torch, {framework}\n{textwrap.dedent(example)}")
    environment = {**os.environ, "HOME": str(tmp_path)}  # Ray writes a token there
    command = [sys.executable, "example.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_wheel_has_the_adapters_and_tells_vllm_of_its_own() -> None:
    declared = (ROOT / "pyproject.toml").read_text()
    assert 'wheel.packages = ["python/tensorferry"]' in declared  # with all folders in it
    assert (ROOT / "python/tensorferry/integrations/__init__.py").is_file()
    entry = '[project.entry-points."vllm.general_plugins"]\ntensorferry = "tensorferry.integrations.vllm:register"'
    assert entry in declared
