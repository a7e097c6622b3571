"""Programs for torch.distributed.rpc run here by changing one import; the guide's tables are complete and true."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import tensorferry.rpc as ours
import torch.distributed.rpc as theirs
import torch.distributed.rpc.constants
from conftest import free_port
from programs.launch import launch

GUIDE = Path(__file__).parents[2] / "docs" / "migrating-from-torch-rpc.md"


# ---- programs


@pytest.mark.parametrize(
    "program", ["parameter_server", "reinforcement_learning", "batch_updates", "split_rnn", "surface"]
)
def test_a_program_prints_the_same_on_both_modules(program: str, tmp_path: Path) -> None:
    expected = launch(program, "torch", tmp_path)
    assert expected.count("\n") >= 2
    assert launch(program, "tensorferry", tmp_path) == expected


def losses(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"loss(?:es)? ([-\d.]+)", output)]


@pytest.mark.parametrize("program", ["parameter_server", "split_rnn"])
def test_a_program_learns(program: str, tmp_path: Path) -> None:
    first, *_, last = losses(launch(program, "tensorferry", tmp_path))
    assert last < 0.6 * first


def test_the_guides_program_learns_through_a_remote_part(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(import itertools\n.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "program.py").write_text(program)
    environment = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    first, *_, last = losses(done.stdout)
    assert last < 0.2 * first


# What the guide says under "What behaves differently": (torch's, ours).
DIFFERENCES = {
    "raised KeyError": ("RuntimeError Exception", "KeyError LookupError Exception"),
    "raised Custom": ("raises RuntimeError <- NoneType: Custom: On Worker", "raises Custom <- RemoteTraceback: text"),
    "raised TwoArguments": ("RuntimeError Exception", "RemoteError Error RuntimeError Exception"),
    "time-out": ("RuntimeError Exception", "DeadlineExceeded Error RuntimeError TimeoutError OSError Exception"),
    "unknown name": ("RuntimeError Exception", "NotFound Error RuntimeError LookupError Exception"),
    "negative time-out": ("RuntimeError Exception", "ValueError Exception"),
    "a peer that is none": ("ValueError Exception", "TypeError Exception"),
    "a future that fails": ("ValueError('later')", "raises ValueError <- RemoteTraceback: later"),
    "no future": ("RuntimeError Exception", "TypeError Exception"),
    "bytes of a view": ("4000", "4"),
    "pickled": ("RuntimeError Exception", "TypeError Exception"),
    "type hint": ("raises RuntimeError <- NoneType: type_hint should", "3"),
    "a ScriptModule is called": ("tensor([2.])", "tensor([2.])"),
    "a ScriptModule is fetched": ("tensor([2.])", "tensor([2.])"),
    "a time-out among options": ("20.0", "20.0"),
    "printed": ("WorkerInfo(id=0, name=here)", "WorkerInfo(name='here', id=0)"),
    "a map that is not one to one": ("None", "ValueError Exception"),
}


@pytest.mark.parametrize("side", [0, 1], ids=["torch", "tensorferry"])
def test_the_modules_differ_only_as_the_guide_says(side: int, tmp_path: Path) -> None:
    output = launch("differences", ("torch", "tensorferry")[side], tmp_path)
    found = dict(line.split(" | ", 1) for line in output.splitlines())
    assert found.keys() == DIFFERENCES.keys()
    wrong = {
        what: (found[what], expected)
        for what, both in DIFFERENCES.items()
        if not found[what].startswith(expected := both[side])
    }
    assert not wrong


# ---- the guide's tables


def table() -> dict[str, tuple[str, str]]:
    """The rows of "Every name", which may have several names: name to (verdict, how)."""
    text = GUIDE.read_text().split("## Every name", 1)[1]
    rows = re.findall(r"^\| ((?:`[\w.]+`(?:, )?)+) \| (same|differs|missing) \| (.*?) ?\|$", text, re.MULTILINE)
    named = [(name, verdict, how) for names, verdict, how in rows for name in re.findall(r"[\w.]+", names)]
    assert len(named) == len({name for name, _, _ in named}), "a name stands in two rows"
    return {name: (verdict, how) for name, verdict, how in named}


def public(module: types.ModuleType) -> list[tuple[str, object]]:
    return [(name, thing) for name, thing in vars(module).items() if not name.startswith("_")]


def is_foreign(thing: object) -> bool:
    """A name of another package, which torch's module only imports."""
    home = thing.__name__ if isinstance(thing, types.ModuleType) else getattr(thing, "__module__", None)
    return not str(home or "").startswith("torch") or thing in (torch, torch.distributed)


def names_of_torch() -> set[str]:
    """All that a program can write after ``torch.distributed.rpc.``; of its classes, the public members too."""
    names = {name for name, thing in public(theirs) if not is_foreign(thing)}
    names |= set(theirs.__all__)
    names |= {f"functions.{name}" for name, thing in public(theirs.functions) if not is_foreign(thing)}
    names |= {f"constants.{name}" for name, _ in public(theirs.constants) if name.isupper()}
    members = {name: kind for name in names if inspect.isclass(kind := getattr(theirs, name, None))}
    for name, kind in members.items():
        if name in ("RRef", "WorkerInfo", "BackendType") or name.endswith(("Options", "Agent")):
            names |= {f"{name}.{member}" for member in dir(kind) if not member.startswith("_")}
    return names


def test_every_public_name_of_torchs_module_is_in_the_table() -> None:
    names = names_of_torch()
    assert {"rpc_sync", "RRef.to_here", "functions.async_execution", "BackendValue"} <= names
    assert names - table().keys() == set()


def test_the_table_names_only_names_of_torch() -> None:
    private = {name for name in table() if name.rpartition(".")[2].startswith("_")}
    not_in_all_versions = {"BackendValue", "Store", "logger", "server_process_global_profiler"}
    assert table().keys() - private - names_of_torch() <= not_in_all_versions


def reached(name: str) -> object:
    thing: object = ours
    for part in name.split("."):
        thing = getattr(thing, part, None)
    return thing


# Set by the constructor.
OPTIONS = ours.TensorPipeRpcBackendOptions(), ours.RpcBackendOptions(), ours.WorkerInfo("a", 0)


def is_there(name: str) -> bool:
    owner, _, member = name.rpartition(".")
    made = next((each for each in OPTIONS if type(each).__name__ == owner), None)
    return hasattr(made, member) if made is not None else reached(name) is not None


@pytest.mark.parametrize("verdict", ["same", "differs", "missing"])
def test_the_table_is_right_about_existing_names(verdict: str) -> None:
    rows = [name for name, (said, _) in table().items() if said == verdict]
    assert rows
    assert [name for name in rows if is_there(name) != (verdict != "missing")] == []


def test_a_missing_name_has_a_replacement() -> None:
    assert [name for name, (verdict, how) in table().items() if verdict != "same" and not how] == []


@pytest.mark.parametrize(
    "name", ["init_rpc", "shutdown", "is_available", "get_worker_info", "rpc_sync", "rpc_async", "remote"]
)
def test_positions_and_defaults_are_torchs(name: str) -> None:
    mine = list(inspect.signature(getattr(ours, name)).parameters.values())
    positional = [each for each in mine if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    wanted = list(inspect.signature(getattr(theirs, name)).parameters.values())
    assert [each.name for each in positional] == [each.name for each in wanted]
    for each, torchs in zip(positional, wanted):
        assert torchs.default in (each.default, inspect.Parameter.empty)
