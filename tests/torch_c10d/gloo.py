"""Runs the unit tests that PyTorch has for Gloo on the backend "tensorferry": gloo.py PATH [options]

PATH is test/distributed/test_c10d_gloo.py of PyTorch's sources, which torch's wheel does not contain, beside
test_c10d_common.py. It may be of another release than torch: tests that need a name which this torch lacks are skipped.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
import types
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch_suite"))

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so that the report does not depend on the machine
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks share the processors

import runner
import tensorferry.c10d
import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed

#: What old releases of the tests use of torch.distributed without importing it by name.
GONE = {"torch.distributed": ["_round_robin_process_groups"]}


class Missing:
    """Stands for a name that this torch lacks. Tests that use it are skipped."""

    def __init__(self, name: str) -> None:
        self.why = f"torch {torch.__version__.partition('+')[0]} has no {name}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and all(isinstance(each, str) for each in args):  # skips a test in PyTorch's own CI, for a reason
            return lambda test: test
        if args and callable(args[0]):
            return unittest.skip(self.why)(args[0])
        raise unittest.SkipTest(self.why)


def supply_missing(file: Path) -> None:
    """Makes each import of the file work, by a Missing for each name that this torch lacks."""
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.module or not node.module.startswith("torch"):
            continue
        try:
            module: Any = importlib.import_module(node.module)
        except ImportError:
            module = sys.modules[node.module] = types.ModuleType(node.module)
        for alias in node.names:
            supply(module, alias.name)


def supply(module: Any, name: str) -> None:
    if not hasattr(module, name):
        setattr(module, name, Missing(f"{module.__name__}.{name}"))


class ProcessGroupGloo:
    """Makes a process group of TensorFerry's in the place of one of Gloo's."""

    class _Options:
        def __init__(self, timeout: Any = None) -> None:
            self._timeout: Any = timeout
            self._devices: list[Any] = []
            self._threads = 2

    Options = _Options

    def __new__(cls, store: Any, rank: int, size: int, options: Any = None, timeout: Any = None) -> Any:
        given = options if isinstance(options, timedelta) else getattr(options, "_timeout", None) or timeout
        described = types.SimpleNamespace(
            timeout=given or timedelta(minutes=1), store=store, group_rank=rank, group_size=size, group_id="gloo's",
            global_ranks_in_group=list(range(size)),
        )  # fmt: skip
        backend = tensorferry.c10d._make(described)
        group = dist.ProcessGroup(store, rank, size)  # DDP takes no bare backend
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
        return group

    @staticmethod
    def create_device(*args: Any, **kwargs: Any) -> None:
        """Gloo's devices are network interfaces. Ours are options of the backend."""

    create_default_device = create_device


def substituted(function: Any) -> Any:
    """Returns the function of torch.distributed, with Gloo's name read as ours."""

    def call(*args: Any, **kwargs: Any) -> Any:
        def read(value: Any) -> Any:
            return "tensorferry" if isinstance(value, str) and value.lower() in ("gloo", "cpu:gloo") else value

        return function(*map(read, args), **{name: read(value) for name, value in kwargs.items()})

    return call


def load(path: Path) -> types.ModuleType:
    """Imports the tests, after torch has been changed for them."""
    sys.path.insert(0, str(path.parent))
    for file in (path, path.with_name("test_c10d_common.py")):
        supply_missing(file)
    for name, gone in GONE.items():
        for each in gone:
            supply(importlib.import_module(name), each)
    changed: Any = dist
    changed.ProcessGroupGloo = ProcessGroupGloo
    changed.init_process_group = substituted(dist.init_process_group)
    changed.new_group = substituted(dist.new_group)
    of_tests: Any = common_distributed.MultiProcessTestCase
    forked = torch.multiprocessing.get_context("fork").Process  # it need not import torch again
    of_tests._spawn_processes = lambda self: self._start_processes(forked)
    common_distributed.DistTestCases.backend_feature["plugin"].add("tensorferry")
    return importlib.import_module(path.stem)


def main() -> int:
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        sys.exit(__doc__)
    module = load(Path(sys.argv.pop(1)).resolve())
    classes = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, unittest.TestCase) and value.__module__ == module.__name__
    }
    loader = unittest.TestLoader()
    tests = [f"{name}.{test}" for name, of in classes.items() for test in loader.getTestCaseNames(of)]

    def case(test: str) -> unittest.TestCase:
        name, _, method = test.partition(".")
        made: unittest.TestCase = classes[name](method)
        return made

    return runner.main(
        runner.Suite(
            title="PyTorch's unit tests of Gloo on TensorFerry",
            page="docs/torch-c10d-conformance.md",
            groups=("all",),
            tests_of=lambda group: tests,
            case=case,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
