"""Plugins: libraries, converters and reductions that are registered for a process, entry points, priorities."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tensorferry
import torch
from tensorferry import errors
from tensorferry.collectives import form_group

Pair = tuple[tensorferry.Agent, tensorferry.Agent]


def run(tmp_path: Path, program: str, *path: Path, **environment: str) -> str:
    """Runs a program with further folders on its path, and returns what it prints."""
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(program))
    found = os.pathsep.join([*map(str, path), *sys.path])
    given = {**os.environ, "PYTHONPATH": found, **environment}
    done = subprocess.run([sys.executable, script], env=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- priorities


def order(agent: tensorferry.Agent) -> list[str]:
    return [name for name, _, _ in agent.explain("b").candidates if name in ("xth", "shm", "cma", "basic")]


def test_the_environment_and_an_option_set_priorities(agents: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    agents("b")
    monkeypatch.setenv("TENSORFERRY_CHANNELS", "cma:10,shm:5")
    assert order(agents("a")) == ["xth", "cma", "shm", "basic"]
    assert order(agents("c", channels="basic:1000")) == ["basic", "xth", "shm", "cma"]


@pytest.mark.parametrize(("wrong", "said"), [("nonesuch:5", "no channel"), ("cma:fast", "gives no priority")])
def test_a_wrong_priority_is_an_error_that_lists_the_channels(
    agents: Any, monkeypatch: pytest.MonkeyPatch, wrong: str, said: str
) -> None:
    with pytest.raises(errors.InvalidArgument, match=rf"{said}.* known.* are: xth, .*shm, .*basic"):
        agents("a", channels=wrong)
    monkeypatch.setenv("TENSORFERRY_CHANNELS", wrong)
    with pytest.raises(errors.InvalidArgument, match=said):
        agents("a")


# ---- libraries


def test_a_file_that_is_no_plugin_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidArgument, match=r"cannot load the plugin: .*absent\.so"):
        tensorferry.load_plugin(tmp_path / "absent.so")
    with pytest.raises(errors.InvalidArgument, match="is no plugin: it has no function tensorferry_plugin"):
        tensorferry.load_plugin("libc.so.6")
    with pytest.raises(TypeError):
        tensorferry.load_plugin(5)  # type: ignore[arg-type]


# ---- reductions


def reduced(pair: Pair, op: str) -> list[torch.Tensor | Exception]:
    """What an all_reduce of 1 and 2 by two ranks gives each of them."""

    def rank(number: int) -> torch.Tensor | Exception:
        group = form_group(["a", "b"], agent=pair[number], label=op, timeout=30)
        try:
            return group.all_reduce(torch.tensor([number + 1.0]), op).wait()
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))


def test_a_registered_reduction_is_an_op(pair: Pair) -> None:
    tensorferry.register_reduction("first", lambda accumulated, other: None)
    tensorferry.register_reduction("twice_the_sum", lambda accumulated, other: 2 * (accumulated + other))
    assert reduced(pair, "first") == [1, 1]
    assert reduced(pair, "twice_the_sum") == [6, 6]
    with pytest.raises(errors.InvalidArgument, match='"reduction first" is registered twice'):
        tensorferry.register_reduction("first", torch.maximum)
    with pytest.raises(errors.InvalidArgument, match="a name of TensorFerry's own"):
        tensorferry.register_reduction("sum", torch.maximum)
    for error in reduced(pair, "third"):
        assert isinstance(error, ValueError)
        assert 'no reduction "third"; known are: sum, ' in str(error) and "twice_the_sum" in str(error)


def test_a_registered_reduction_that_raises_fails_the_group_at_every_rank(pair: Pair) -> None:
    def broken(accumulated: torch.Tensor, other: torch.Tensor) -> None:
        raise LookupError("no such number")

    tensorferry.register_reduction("broken", broken)
    for error in reduced(pair, "broken"):
        assert isinstance(error, Exception) and "LookupError: no such number" in str(error)


# ---- converters

# A device type whose tensors have no memory that torch knows: the converter keeps what lands there.
DEVICE = """
    import tensorferry, torch, torch.distributed as dist
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
    _setup_privateuseone_for_python_backend()
    landed = []
    def empty(*shape):
        return torch._C._acc.create_empty_tensor(shape, torch.float32)
    def from_host(host, device):
        assert not torch.is_grad_enabled()
        landed.append(host)
        return empty(*host.shape)
    def to_host(tensor):
        if tensor.shape == (9,):
            raise LookupError("the device is gone")
        return torch.full(tensor.shape, 7.0)
    def look(value):
        return str(value["x"][0].device), value["x"][0].requires_grad, type(value["x"][0]).__name__
    store = dist.HashStore()
    before = tensorferry.Agent("before", store=store)
"""


@pytest.mark.skipif(not hasattr(torch._C, "_acc"), reason="this torch makes no device types in Python")
def test_tensors_of_a_registered_device_type_travel(tmp_path: Path) -> None:
    program = """
    try:
        before.rpc_sync("before", look, ({"x": [empty(2)]},))
    except TypeError as error:
        print("1", error)
    tensorferry.register_converter("privateuseone", to_host, from_host)
    a, b = tensorferry.Agent("a", store=store), tensorferry.Agent("b", store=store)
    print("2", a.rpc_sync("b", look, ({"x": [empty(2, 3)]},)), landed.pop().tolist())
    print("3", a.rpc_sync("b", look, ({"x": [empty(2).requires_grad_()]},)))
    print("4", a.rpc_sync("b", look, ({"x": [torch.nn.Parameter(empty(2))]},)))
    print("5", a.rpc_sync("before", look, ({"x": [empty(2)]},)))
    for wrong in (empty(9), torch.empty(2, device="meta")):
        try:
            print("6", a.rpc_sync("b", look, ({"x": [wrong]},)))
        except TypeError as error:
            print("6", str(error).splitlines()[0])
    for wrong in ("privateuseone", "cpu", "nonesuch"):
        try:
            tensorferry.register_converter(wrong, to_host, from_host)
        except (ValueError, tensorferry.errors.InvalidArgument) as error:
            print("7", type(error).__name__, str(error).splitlines()[0])
    for agent in a, b, before:
        agent.leave()
    """
    said = run(tmp_path, textwrap.dedent(DEVICE) + textwrap.dedent(program))
    lines = said.splitlines()
    assert lines[0].startswith("1 ") and "cannot send a tensor on device privateuseone" in lines[0]
    assert lines[1] == "2 ('privateuseone:0', False, 'Tensor') [[7.0, 7.0, 7.0], [7.0, 7.0, 7.0]]"
    assert lines[2] == "3 ('privateuseone:0', True, 'Tensor')"
    assert lines[3] == "4 ('privateuseone:0', True, 'Parameter')"
    assert lines[4] == "5 ('cpu', False, 'Tensor')", "an agent that was made before has no converter"
    assert "between privateuseone:0 and cpu failed: LookupError: the device is gone" in lines[5]
    assert lines[6] == "6 ('meta', False, 'Tensor')", "such tensors travel as they did"
    assert lines[7].startswith('7 InvalidArgument "converter privateuseone" is registered twice')
    assert lines[8].startswith('7 InvalidArgument "converter cpu" of Python has a name of TensorFerry\'s own')
    assert lines[9].startswith("7 ValueError")


# ---- entry points


def install(folder: Path, name: str, body: str) -> Path:
    """A package with a plugin of that name, as pip installs it."""
    info = folder / f"{name}_package-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-package\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[tensorferry.plugins]\n{name} = {name}_module:register\n")
    (folder / f"{name}_module.py").write_text(textwrap.dedent(body))
    return folder


PROGRAM = """
    import tensorferry, torch, torch.distributed as dist
    for name in "a", "b":
        try:
            agent = tensorferry.Agent(name, store=dist.HashStore())
            group = tensorferry.collectives.form_group([name], agent=agent)
            print(group.all_reduce(torch.ones(2), "owl").wait().tolist())
        except (tensorferry.errors.InvalidArgument, ValueError) as error:
            print(type(error).__name__, error)
"""
OWL = """
    import tensorferry
    def register():
        print("called")
        tensorferry.register_reduction("owl", lambda accumulated, other: None)
"""


def test_the_first_agent_calls_the_plugins_that_are_installed(tmp_path: Path) -> None:
    package = install(tmp_path / "site", "owl", OWL)
    assert run(tmp_path, PROGRAM, package).splitlines() == ["called", "[1.0, 1.0]", "[1.0, 1.0]"]
    off = run(tmp_path, PROGRAM, package, TENSORFERRY_PLUGINS="off").splitlines()
    assert len(off) == 2 and all('ValueError there is no reduction "owl"' in line for line in off)


def test_a_plugin_that_fails_is_named_with_its_package(tmp_path: Path) -> None:
    package = install(tmp_path / "site", "owl", OWL)
    install(package, "bat", "def register():\n    raise LookupError('no cave')\n")
    said = run(tmp_path, PROGRAM, package).splitlines()
    assert len(said) == 2, "no agent starts, and no plugin is called again"
    for line in said:
        assert "the plugin 'bat' of bat-package 1.2 failed (bat_module:register): LookupError: no cave" in line
    said = run(tmp_path, PROGRAM, package, TENSORFERRY_PLUGINS="owl").splitlines()
    assert said == ["called", "[1.0, 1.0]", "[1.0, 1.0]"]


def test_an_unknown_plugin_in_the_environment_is_an_error_that_lists_the_installed_ones(tmp_path: Path) -> None:
    package = install(tmp_path / "site", "owl", OWL)
    said = run(tmp_path, PROGRAM, package, TENSORFERRY_PLUGINS="crow").splitlines()
    assert said[0].startswith(
        "InvalidArgument TENSORFERRY_PLUGINS names 'crow', and there is no such plugin; installed"
    )
    assert "are: owl" in said[0]
