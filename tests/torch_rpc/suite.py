"""The classes of PyTorch's RPC suite, each with a fixture for TensorFerry's backend."""

from __future__ import annotations

import unittest
from typing import Any

import tensorferry.torch as ferry
import torch
import torch.distributed.rpc as rpc
from torch.distributed.rpc import backend_registry
from torch.testing._internal import common_distributed
from torch.testing._internal.distributed import rpc_utils
from torch.testing._internal.distributed.rpc.rpc_agent_test_fixture import RpcAgentTestFixture

FAULTY = "FAULTY_TENSORFERRY"
# As in torch's fixture for its faulty agent, whose import registers a backend that breaks other tests.
RETRIED = ["RREF_FORK_REQUEST", "RREF_CHILD_ACCEPT", "RREF_USER_DELETE", "CLEANUP_AUTOGRAD_CONTEXT_REQ"]
DELAYED = {"PYTHON_CALL": 1.5, "SCRIPT_CALL": 1.5}


class Fixture(RpcAgentTestFixture):
    @property
    def rpc_backend(self) -> Any:
        return backend_registry.BackendType["TENSORFERRY"]

    @property
    def rpc_backend_options(self) -> Any:
        return ferry.RpcBackendOptions(init_method=self.init_method)

    def get_shutdown_error_regex(self) -> str:
        return "is no longer running|has left|was lost|ConnectionLost|AgentClosed|NotFound"

    def get_timeout_error_regex(self) -> str:
        return "RPC ran for more than"


class FaultyFixture(Fixture):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.messages_to_fail = RETRIED
        self.messages_to_delay = DELAYED

    @property
    def rpc_backend(self) -> Any:
        return backend_registry.BackendType[FAULTY]

    @property
    def rpc_backend_options(self) -> Any:
        return ferry._FaultyOptions(
            init_method=self.init_method,
            num_worker_threads=8,
            num_fail_sends=3,
            messages_to_fail=self.messages_to_fail,
            messages_to_delay=self.messages_to_delay,
        )

    def setup_fault_injection(self, faulty_messages: Any, messages_to_delay: Any) -> None:
        if faulty_messages is not None:
            self.messages_to_fail = faulty_messages
        if messages_to_delay is not None:
            self.messages_to_delay = messages_to_delay


class Forked(common_distributed.MultiProcessTestCase):
    """Forks the processes of a test: they need not import torch again."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


class Spawned(common_distributed.MultiProcessTestCase):
    """CUDA does not work in a forked child of a process that has used it."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


def _register_faulty() -> None:
    if backend_registry.backend_registered(FAULTY):
        return
    backend_registry.register_backend(
        FAULTY,
        lambda rpc_timeout, init_method, **options: ferry._FaultyOptions(
            rpc_timeout=rpc_timeout, init_method=init_method, **options
        ),
        ferry._init_backend,
    )
    rpc.BackendType = backend_registry.BackendType


_register_faulty()

GROUPS: dict[str, list[str]] = {}


def _make(group: str, classes: list[type], fixture: type, processes: type) -> None:
    for base in classes:
        made = type(base.__name__, (base, fixture, processes), {"__module__": __name__, "__qualname__": base.__name__})
        globals()[base.__name__] = made
        GROUPS.setdefault(group, []).append(base.__name__)


_make("cpu", rpc_utils.GENERIC_TESTS + rpc_utils.TENSORPIPE_TESTS, Fixture, Forked)
_make("faulty", rpc_utils.FAULTY_AGENT_TESTS, FaultyFixture, Forked)
_make("gpu", rpc_utils.GENERIC_CUDA_TESTS + rpc_utils.TENSORPIPE_CUDA_TESTS, Fixture, Spawned)


def tests_of(group: str) -> list[str]:
    """The names of a group's tests, such as "RpcTest.test_add", in a fixed order."""
    return sorted(
        f"{name}.{test}" for name in GROUPS[group] for test in unittest.TestLoader().getTestCaseNames(globals()[name])
    )


def case(test: str) -> unittest.TestCase:
    name, _, method = test.partition(".")
    return globals()[name](method)
