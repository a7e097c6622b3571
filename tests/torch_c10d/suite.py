"""PyTorch's DistributedTest, on the backend "tensorferry". Each of its tests is in one of the classes here.

torch's module reads the name of the backend when it is imported, and its decorators skip the tests that name another
backend. So the module is imported once for each name, and every test then runs on "tensorferry":

- DistributedTest has the tests that the name "tensorferry" admits, and those that no name here admits.
- GlooTest has those that the name "gloo" admits, and MpiTest those of "mpi": for example sparse all_reduce and the
  monitored barrier (Gloo), or all_to_all of CPU tensors (MPI).
"""

from __future__ import annotations

import importlib.util
import os
import sys
import unittest
from types import ModuleType
from typing import Any

BACKEND = "tensorferry"
SIZE, LARGE_SIZE = 4, 8  # ranks of a test; the second for tests that skip smaller groups
GROUPS = ("own", "gloo", "mpi")

os.environ.update(BACKEND=BACKEND, WORLD_SIZE=str(SIZE), INIT_METHOD="file:///", TEMP_DIR="")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so that the report does not depend on the machine
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks share the processors

import tensorferry.c10d  # noqa: E402, F401
import torch  # noqa: E402
from torch.testing._internal import common_distributed  # noqa: E402

for feature in "ddp", "subgroup", "plugin":
    common_distributed.DistTestCases.backend_feature[feature].add(BACKEND)


def _imported_as(name: str) -> ModuleType:
    """Imports torch's module anew, with the decorators' verdict for the backend `name`."""
    os.environ["BACKEND"] = name
    found = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test")
    assert found is not None and found.origin is not None
    spec = importlib.util.spec_from_file_location(f"distributed_test_{name}", found.origin)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # objects of its classes are pickled
    spec.loader.exec_module(module)
    os.environ["BACKEND"] = module.BACKEND = BACKEND
    module.PROFILING_SUPPORTED_BACKENDS.append(BACKEND)
    module.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(BACKEND)
    return module


_SKIPS_SMALL_GROUPS = common_distributed.skip_if_small_worldsize(lambda: None).__code__


def _size_for(function: Any) -> int:
    """More ranks if one of the function's decorators is skip_if_small_worldsize."""
    while function is not None:
        if function.__code__ is _SKIPS_SMALL_GROUPS:
            return LARGE_SIZE
        function = getattr(function, "__wrapped__", None)
    return SIZE


def _made(name: str, backend: str) -> Any:
    module: Any = _imported_as(backend)

    class Made(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[name-defined, misc]
        def setUp(self) -> None:
            os.environ["WORLD_SIZE"] = str(_size_for(getattr(type(self), self._testMethodName)))
            super().setUp()
            module.INIT_METHOD = os.environ["INIT_METHOD"]
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def _test_accumulate_gradients_no_sync(self, *args: Any, **kwargs: Any) -> None:
            module.BACKEND = backend  # it makes no model for a name that it does not know
            super()._test_accumulate_gradients_no_sync(*args, **kwargs)

        def _barrier(self, *args: Any, timeout: float = 60, **kwargs: Any) -> None:
            super()._barrier(*args, timeout=max(timeout, 60), **kwargs)

    Made.__name__ = Made.__qualname__ = name
    Made.__module__ = __name__
    return Made


DistributedTest = _made("DistributedTest", BACKEND)
GlooTest = _made("GlooTest", "gloo")
MpiTest = _made("MpiTest", "mpi")


def _divided() -> dict[str, list[str]]:
    tests: dict[str, list[str]] = {group: [] for group in GROUPS}
    for test in unittest.TestLoader().getTestCaseNames(DistributedTest):
        group, of = next(
            (
                (group, of)
                for group, of in zip(GROUPS, (DistributedTest, GlooTest, MpiTest))
                if not getattr(getattr(of, test), "__unittest_skip__", False)
            ),
            (GROUPS[0], DistributedTest),
        )
        tests[group].append(f"{of.__name__}.{test}")
    return tests


_tests = _divided()


def tests_of(group: str) -> list[str]:
    return _tests[group]


def case(test: str) -> unittest.TestCase:
    name, _, method = test.partition(".")
    made: unittest.TestCase = globals()[name](method)
    return made
