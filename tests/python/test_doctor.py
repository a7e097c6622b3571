"""``tensorferry doctor``: each provoked fault is named, with what it costs and what to do."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_at_terminal
from emulated_network import EmulatedNetwork
from tensorferry import doctor
from tensorferry.doctor import report, settings
from tensorferry.doctor.gpu_facts import Gpu, GpuFacts, gather

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
DOCTOR = [sys.executable, "-m", "tensorferry", "doctor"]
X86_64 = os.uname().machine == "x86_64"
READV, MEMFD = "310", "319"  # numbers of system calls on x86-64
CARD = "sys/class/infiniband/mlx5_0/ports/1/"
GID = "fe80:0000:0000:0000:0000:0000:0000:0001"
ACTIVE = {CARD + "state": "4: ACTIVE", CARD + "rate": "100 Gb/sec", CARD + "link_layer": "Ethernet",
          CARD + "gids/0": GID, "dev/infiniband/uverbs0": ""}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A fault in the environment or in files. ``{tmp}`` stands for a folder of the test's own."""

    name: str
    check: str
    state: str
    found: str  # a regular expression
    environ: dict[str, str] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)  # below the root
    prepare: Callable[[Path], object] = lambda tmp: None


def key_of(mode: int, text: str = "0123456789abcdef", uid: int | None = None) -> Callable[[Path], None]:
    def make(tmp: Path) -> None:
        (tmp / "key").write_text(text)
        (tmp / "key").chmod(mode)
        if uid is not None:
            if os.geteuid() != 0:
                pytest.skip("only root can give a file away")
            os.chown(tmp / "key", uid, uid)

    return make


def folder_of(mode: int) -> Callable[[Path], None]:
    def make(tmp: Path) -> None:
        (tmp / "run").mkdir()
        (tmp / "run").chmod(mode)

    return make


KEY_FILE = {"TENSORFERRY_KEY_FILE": "{tmp}/key"}
FAULTS = [
    Fault("the key's file is missing", "key", "broken", "No such file", KEY_FILE),
    Fault("others can read the key", "key", "broken", "mode 0644", KEY_FILE, prepare=key_of(0o644)),
    Fault(
        "the key is another user's", "key", "broken", "belongs to uid 12345", KEY_FILE, prepare=key_of(0o600, uid=12345)
    ),
    Fault("the key is short", "key", "broken", "has 3 bytes", KEY_FILE, prepare=key_of(0o600, " abc\n")),
    Fault("the key is a folder", "key", "broken", "not a regular file", {"TENSORFERRY_KEY_FILE": "{tmp}"}),
    Fault("the key's variable is short", "key", "broken", "has 5 bytes", {"TENSORFERRY_KEY": "short"}),
    Fault(
        "a variable is misspelt", "variables", "slow", "no variable TENSORFERRY_CHANELS", {"TENSORFERRY_CHANELS": "shm"}
    ),
    Fault("a variable has no valid value", "variables", "broken", "TIMEOUT='99'", {"TENSORFERRY_RDMA_TIMEOUT": "99"}),
    Fault("a channel is unknown", "channels", "broken", "no channel 'smh'", {"TENSORFERRY_CHANNELS": "smh,basic"}),
    Fault("channels are allowed and removed", "channels", "broken", "both", {"TENSORFERRY_CHANNELS": "shm,-cma"}),
    Fault("shared memory is switched off", "channels", "slow", "-shm", {"TENSORFERRY_CHANNELS": "-shm"}),
    Fault(
        "the sockets' folder is open",
        "socket_dir",
        "broken",
        "mode 0755",
        {"TENSORFERRY_SOCKET_DIR": "{tmp}/run"},
        prepare=folder_of(0o755),
    ),
    Fault(
        "the sockets' folder is a file", "socket_dir", "broken", "no folder", {"TENSORFERRY_SOCKET_DIR": "/etc/passwd"}
    ),
    Fault(
        "the sockets' folder has a long name",
        "socket_dir",
        "broken",
        "too long",
        {"TENSORFERRY_SOCKET_DIR": "/tmp/" + "x" * 90},
    ),
    Fault(
        "the trace's folder is missing",
        "written_files",
        "broken",
        "TENSORFERRY_TRACE",
        {"TENSORFERRY_TRACE": "{tmp}/no/t.json"},
    ),
    Fault(
        "the tuning file is broken",
        "tuning",
        "slow",
        "Expecting",
        {"TENSORFERRY_TUNING": "{tmp}/t.json"},
        prepare=lambda tmp: (tmp / "t.json").write_text("{"),
    ),
    Fault(
        "all processes have one metrics port",
        "metrics_port",
        "slow",
        "is one port",
        {"TENSORFERRY_METRICS_PORT": "9400"},
    ),
    Fault("the metrics port is none", "metrics_port", "broken", "not 'all'", {"TENSORFERRY_METRICS_PORT": "all"}),
    Fault("an interface is missing", "interfaces", "broken", "names eth77", {"TENSORFERRY_SOCKET_IFNAME": "eth77"}),
    Fault(
        "an interface is down",
        "interfaces",
        "broken",
        "ib0 is down",
        {"TENSORFERRY_SOCKET_IFNAME": "ib0"},
        {"sys/class/net/ib0/flags": "0x1002"},
    ),
    Fault(
        "packets are small",
        "interfaces",
        "slow",
        "MTU of 576",
        {},
        {"sys/class/net/eth0/flags": "0x1003", "sys/class/net/eth0/mtu": "576"},
    ),
    Fault(
        "the store's host is unknown",
        "rendezvous",
        "broken",
        "no known name",
        {"MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "29500", "RANK": "1"},
    ),
    Fault(
        "no store listens",
        "rendezvous",
        "broken",
        "no process listens",
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "1"},
    ),
    Fault("the store's address is incomplete", "rendezvous", "broken", "are no address", {"MASTER_ADDR": "127.0.0.1"}),
    Fault(
        "rank 0 is on another host",
        "rendezvous",
        "broken",
        "cannot listen",
        {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500", "RANK": "0"},
    ),
    Fault(
        "huge pages are off",
        "huge_pages",
        "slow",
        "never",
        {},
        {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"},
    ),
    Fault(
        "the cgroup has little memory",
        "memory",
        "slow",
        "memory.max",
        {},
        {"sys/fs/cgroup/memory.max": "209715200", "sys/fs/cgroup/memory.current": "104857600"},
    ),
    Fault("the cgroup has few threads", "threads", "slow", "100 processes", {}, {"sys/fs/cgroup/pids.max": "100"}),
    Fault(
        "the cgroup has half a processor",
        "processors",
        "slow",
        "one processor",
        {},
        {"sys/fs/cgroup/cpu.max": "50000 100000"},
    ),
    Fault(
        "the clock is slow",
        "clock",
        "slow",
        "hpet",
        {},
        {"sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet"},
    ),
    Fault("an RDMA port is down", "rdma", "slow", "is DOWN", {}, {**ACTIVE, CARD + "state": "1: DOWN"}),
    Fault(
        "an RDMA port has no GID",
        "rdma_gids",
        "broken",
        "no GID",
        {},
        {**ACTIVE, CARD + "gids/0": "0000:" * 7 + "0000"},
    ),
    Fault(
        "the GID's index is wrong", "rdma_gids", "broken", "GID_INDEX=7", {"TENSORFERRY_RDMA_GID_INDEX": "7"}, ACTIVE
    ),
    Fault("an RDMA card is unknown", "rdma", "broken", "names mlx9", {"TENSORFERRY_RDMA_DEVICES": "mlx9:1"}, ACTIVE),
    Fault(
        "the verbs library is missing",
        "rdma_library",
        "broken",
        "cannot be loaded",
        {"TENSORFERRY_LIBIBVERBS": "/no/lib.so"},
        ACTIVE,
    ),
    Fault("the container has no uverbs", "rdma", "broken", "no uverbs", {}, {**ACTIVE, "dev/infiniband/uverbs0": None}),
]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose name is short enough for a unix socket's."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_fault_in_settings_or_files_is_named(fault: Fault, short_path: Path) -> None:
    fault.prepare(short_path)
    root = short_path / "root"
    write_files(root, fault.files)
    environ = {name: value.replace("{tmp}", str(short_path)) for name, value in fault.environ.items()}
    check_named(doctor.examine(doctor.Host(root, environ)), fault.check, fault.state, fault.found)


def write_files(root: Path, files: dict[str, Any]) -> None:
    """Writes files below ``root``; None makes the folder alone."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            (root / name).write_text(text)


def check_named(findings: list[doctor.Finding], check: str, state: str, found: str) -> None:
    named = [each for each in findings if (each.check, each.state) == (check, state) and re.search(found, each.found)]
    assert named, "\n".join(map(str, findings))
    assert all(each.cost for each in named), "it says what the fault costs"
    assert not any("the check itself failed" in each.found for each in findings)


# ---- faults of GPUs, which this host need not have

H200 = Gpu("H200")
WORKING = GpuFacts("13.0", ("sm_80", "sm_90", "compute_90"), "13.1", "", (H200, H200))
LOADED = {"proc/driver/nvidia/version": "NVRM"}
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def gpu_fault(
    name: str, check: str, state: str, found: str, environ: dict[str, str] | None = None, **facts: Any
) -> Any:
    given = dataclasses.replace(WORKING, **facts)
    return pytest.param(given, environ or {}, check, state, found, id=name.replace(" ", "-"))


@pytest.mark.parametrize(
    ("facts", "environ", "check", "state", "found"),
    [
        gpu_fault("torch is built without CUDA", "gpus", "broken", "without CUDA", torch_cuda="", gpus=()),
        gpu_fault(
            "the container has no library of the driver", "driver", "broken", "libcuda.so.1: cannot open",
            gpus=(), driver_cuda="", driver_error="libcuda.so.1: cannot open shared object file",
        ),
        gpu_fault(
            "the driver is too old for torch", "driver", "broken", "CUDA 12.8 at most, and .* for 13.0",
            gpus=(), driver_cuda="12.8",
        ),
        gpu_fault(
            "the driver does not start", "gpus", "broken", "CUDA_ERROR_SYSTEM_NOT_READY",
            gpus=(), driver_error="cuInit: CUDA_ERROR_SYSTEM_NOT_READY",
        ),
        gpu_fault(
            "the driver fails beside torch", "driver", "broken", "CUDA_ERROR_UNKNOWN", driver_error="CUDA_ERROR_UNKNOWN"
        ),
        gpu_fault(
            "a variable leaves no GPU", "gpus", "slow", "CUDA_VISIBLE_DEVICES=9 leaves no GPU",
            {"CUDA_VISIBLE_DEVICES": "9"}, gpus=(), driver_error="cuInit: CUDA_ERROR_NO_DEVICE",
        ),
        gpu_fault("GPUs have no peer access", "peer_access", "slow", "1 of 2 pairs", without_peer_access=((0, 1),)),
        gpu_fault("NVRTC is missing", "nvrtc", "slow", "libnvrtc.so.13", nvrtc_error="libnvrtc.so.13: no such file"),
        gpu_fault(
            "torch has no kernels for the GPU", "gpu_kernels", "broken", r"cuda:0 \(V100, sm_70\)",
            gpus=(Gpu("V100", (7, 0)),),
        ),
        gpu_fault(
            "the GPU is exclusive", "compute_mode", "slow", "cuda:1 .* EXCLUSIVE_PROCESS",
            gpus=(H200, Gpu("H200", compute_mode=3)),
        ),
        gpu_fault(
            "the GPU is prohibited", "compute_mode", "broken", "PROHIBITED", gpus=(Gpu("H200", compute_mode=2),)
        ),
        gpu_fault(
            "expandable segments cannot be exported", "gpu_handles", "slow", "cuda:0 exports no file descriptors",
            EXPANDABLE, gpus=(Gpu("T4", posix_descriptors=False),),
        ),
        gpu_fault(
            "pools cannot be exported", "gpu_handles", "slow", "PYTORCH_ALLOC_CONF takes memory from cudaMallocAsync",
            {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"},
        ),
        gpu_fault(
            "cards do not reach the GPU", "gpu_direct", "slow", "memory of cuda:0",
            gpus=(Gpu("RTX", gpu_direct_rdma=False),),
        ),
    ],
)  # fmt: skip
def test_a_fault_of_gpus_is_named(
    facts: GpuFacts, environ: dict[str, str], check: str, state: str, found: str, tmp_path: Path
) -> None:
    write_files(tmp_path, {**LOADED, **ACTIVE})
    findings = doctor.examine(doctor.Host(tmp_path, environ, lambda: facts))
    check_named(findings, check, state, found)
    assert all(each.advice for each in findings if each.check == check and each.state != "ok"), "it says what to do"


@pytest.mark.parametrize("environ", [{}, EXPANDABLE])
def test_gpus_without_a_fault_are_as_they_should_be(environ: dict[str, str], tmp_path: Path) -> None:
    write_files(tmp_path, LOADED)
    findings = doctor.examine(doctor.Host(tmp_path, environ, lambda: WORKING))
    of_gpus = ("gpus", "driver", "gpu_kernels", "compute_mode", "peer_access", "nvrtc", "gpu_handles", "gpu_direct")
    states = {each.check: each.state for each in findings if each.check in of_gpus}
    assert states == dict.fromkeys(["gpus", "driver", "peer_access", "nvrtc", "gpu_handles"], "ok")


@pytest.mark.parametrize("environ", [{}, {"CUDA_VISIBLE_DEVICES": "-1"}])
def test_a_host_whose_gpus_are_hidden_or_missing_has_nothing_to_mend(environ: dict[str, str], tmp_path: Path) -> None:
    write_files(tmp_path, LOADED if environ else {})
    findings = doctor.examine(doctor.Host(tmp_path, environ, lambda: dataclasses.replace(WORKING, gpus=())))
    assert [each.state for each in findings if each.check in ("gpus", "driver")] == ["note"]


def test_the_facts_of_this_hosts_gpus_are_those_of_torch() -> None:
    facts = gather()
    assert facts.torch_cuda == (torch.version.cuda or "")
    assert len(facts.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if facts.gpus:
        assert facts.gpus[0].capability == torch.cuda.get_device_capability(0)
        assert facts.driver_error == "" and float(facts.driver_cuda) >= 12
    elif facts.torch_cuda:
        assert facts.driver_error


def test_little_locked_memory_is_broken_beside_an_rdma_card_only(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, limits[1]))
    try:
        (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
        check_named(doctor.examine(doctor.Host(tmp_path, {})), "locked_memory", "broken", "64 KiB")
        without = doctor.examine(doctor.Host(tmp_path / "nothing", {}))
        assert [each.state for each in without if each.check == "locked_memory"] == ["note"]
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)


# ---- faults of the system


def limited(kind: int, most: int) -> Callable[[], None]:
    return functools.partial(resource.setrlimit, kind, (most, most))


def apart(*flags: str, script: str = "") -> list[str]:
    """A command that runs the rest in namespaces of its own, after ``script``."""
    command = ["unshare", *flags]
    if os.geteuid() != 0:
        command.append("--map-root-user")
    return [*command, "sh", "-c", f'{script}\nexec "$@"', "sh"]


forbidden = functools.partial(lambda calls: [sys.executable, str(PROGRAMS / "without_syscalls.py"), calls])
SMALL_MTU = "ip link set lo up; ip link add d0 type veth peer name d1; ip link set d0 mtu 576 up"
SMALL_SHM = "mount -t tmpfs -o size=16m none /dev/shm"
READ_ONLY_SHM = "mount -t tmpfs -o ro none /dev/shm"
SYSTEM: list[tuple[str, str, str, str, list[str], Callable[[], None] | None]] = [
    ("memfd_create is forbidden", "memfd", "broken", "not permitted", forbidden(MEMFD), None),
    ("process_vm_readv is forbidden", "cma", "slow", "seccomp|ptrace_scope", forbidden(READV), None),
    ("there are few descriptors", "descriptors", "broken", "100 descriptors", [], limited(resource.RLIMIT_NOFILE, 100)),
    ("there are some descriptors", "descriptors", "slow", "500 descriptors", [], limited(resource.RLIMIT_NOFILE, 500)),
    ("the address space is limited", "address_space", "slow", "RLIMIT_AS", [], limited(resource.RLIMIT_AS, 200 << 30)),
    ("there is one processor", "processors", "slow", "one processor", ["taskset", "-c", "0"], None),
    ("loopback is down", "loopback", "broken", r"127\.0\.0\.1", apart("--net"), None),
    ("/dev/shm is small", "dev_shm", "slow", "16 MiB", apart("--mount", script=SMALL_SHM), None),
    (
        "/dev/shm cannot be written",
        "dev_shm",
        "broken",
        "cannot be written",
        apart("--mount", script=READ_ONLY_SHM),
        None,
    ),
    (
        "an interface has a small MTU",
        "interfaces",
        "slow",
        "d0 has an MTU of 576",
        apart("--net", script=SMALL_MTU),
        None,
    ),
]


@pytest.mark.skipif(not X86_64, reason="the numbers of system calls are those of x86-64")
@pytest.mark.parametrize("fault", SYSTEM, ids=lambda fault: fault[0].replace(" ", "-").replace("/", "_"))
def test_a_fault_of_the_system_is_named(fault: tuple[str, str, str, str, list[str], Any]) -> None:
    _, check, state, found, before, limit = fault
    if "unshare" in before and subprocess.run([*before, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this process may not make these namespaces")
    command = [*before, *DOCTOR, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, preexec_fn=limit, check=False)
    assert done.stdout.startswith("{"), done.stderr
    about = json.loads(done.stdout)
    findings = [doctor.Finding(**each) for each in about["findings"]]
    check_named(findings, check, state, found)
    assert done.returncode == any(each.state == "broken" for each in findings)
    assert about["verdict"].endswith(".") and about["paths"] == []


# ---- peers


@pytest.fixture
def answering(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Starts ``tensorferry doctor --serve`` on this host; returns its port."""
    processes = []

    def start(**environment: str) -> int:
        process = subprocess.Popen(
            [*DOCTOR, "--serve", "127.0.0.1:0"],
            env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        processes.append(process)
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith("serves at 127.0.0.1:"), process.stderr.read()
        return int(line.rpartition(":")[2])

    yield start
    for process in processes:
        process.terminate()
        process.communicate(timeout=180)


def asked(port: int, **environment: str) -> tuple[list[doctor.Finding], list[dict[str, Any]]]:
    command = [*DOCTOR, f"127.0.0.1:{port}", "--json"]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600, check=False
    )
    about = json.loads(done.stdout)
    return [doctor.Finding(**each) for each in about["findings"]], about["paths"]


def test_the_paths_to_a_peer_are_measured(answering: Callable[..., int]) -> None:
    findings, paths = asked(answering())
    states = {each.check: each.state for each in findings if each.check.startswith("peer")}
    assert states == {"peer": "ok", "peer_back": "ok", "peer_clock": "ok"}
    calls = paths[0]
    assert calls["name"].startswith("calls by ") and calls["latency_us"] > 0
    rates = {path["name"].partition(",")[0]: path["gigabytes_per_second"] for path in paths[1:]}
    assert rates["basic"] > 0
    measured = [path for path in paths[1:] if path["gigabytes_per_second"]]
    assert all(path["latency_us"] > 0 for path in measured)
    assert [path["why"] for path in paths].count("carries tensors now") == 1


def test_a_peer_that_does_not_listen_is_named() -> None:
    with socket.socket() as silent:  # it keeps the port from others, and takes no connections
        silent.bind(("127.0.0.1", 0))
        findings, paths = asked(silent.getsockname()[1])
    check_named(findings, "peer", "broken", "no process listens")
    assert paths == []


def test_a_peer_with_another_key_is_named(answering: Callable[..., int]) -> None:
    port = answering(TENSORFERRY_KEY="the key of one job")
    findings, _ = asked(port, TENSORFERRY_KEY="the key of another job")
    check_named(findings, "peer_key", "broken", "key")


def test_a_firewall_that_stops_one_direction_is_named() -> None:
    environment = {**os.environ, "TENSORFERRY_KEY": "a key of more than 16 bytes"}
    with EmulatedNetwork("one", "two") as network:
        network.tell("open two 1 2")  # nothing else can be dialled there
        where = f"{network.addresses['one']}:29417"
        pipe = subprocess.PIPE
        serving = network.start("one", [*DOCTOR, "--serve", where], env=environment, stdout=pipe)
        try:
            assert serving.stdout is not None and serving.stdout.readline().startswith("serves")
            asking = network.start("two", [*DOCTOR, where, "--json"], env=environment, stdout=pipe)
            about = json.loads(asking.communicate(timeout=600)[0])
        finally:
            serving.terminate()
            serving.wait(180)
    findings = [doctor.Finding(**each) for each in about["findings"]]
    check_named(findings, "peer_back", "slow", "cannot connect to this host")


# ---- the command


def test_findings_are_told_with_their_cost_and_advice_the_worst_last() -> None:
    findings = [
        doctor.Finding("b", "broken", "does not work", "fails", "mend it"),
        doctor.Finding("o", "ok", "works"),
        doctor.Finding("s", "slow", "creeps", "time", "push it"),
    ]
    lines = report.as_text(findings, [doctor.Path("calls by ring", 1.5, None)]).splitlines()
    assert [line.split()[0] for line in lines if line and line[0] != " "] == [
        "ok",
        "SLOW",
        "BROKEN",
        "path",
        "calls",
        "1",
    ]
    assert "          costs: fails" in lines and "          do: mend it" in lines
    assert lines[-1] == "1 broken, 1 that cost speed."
    assert report.verdict([findings[1]]) == "Nothing to do."


def test_at_a_terminal_the_doctor_shows_what_it_does() -> None:
    out, shown = run_at_terminal([*DOCTOR, "--json"], status=None)
    assert "looking at this host" in shown and json.loads(out)["findings"]


def test_a_check_that_fails_itself_is_a_finding() -> None:
    from tensorferry.doctor import finding

    def wrong(host: doctor.Host) -> Iterator[doctor.Finding]:
        raise ZeroDivisionError("a bug")
        yield

    (found,) = finding.run(wrong, doctor.Host())
    assert (found.check, found.state) == ("wrong", "broken") and "a bug" in found.found


def test_the_doctor_knows_each_variable_that_the_library_reads() -> None:
    header = (ROOT / "base/environment.h").read_text()
    assert set(settings.VARIABLES) == set(re.findall(r'Variable \w+\{\s*"(TENSORFERRY_\w+)"', header))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "is not ADDRESS:PORT"),
        (["--serve", "1"], "is not ADDRESS:PORT"),
        (["--serve", "a:1", "b:2"], "either answers"),
        (["--loud"], "unrecognized"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        doctor.main(arguments)
    assert said in capsys.readouterr().err


def test_a_host_on_which_no_agent_starts_is_still_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TENSORFERRY_KEY_FILE", "/no/such/file")
    with pytest.raises(SystemExit, match="1"):
        doctor.main(["local", "--json"])
    findings = [doctor.Finding(**each) for each in json.loads(capsys.readouterr().out)["findings"]]
    check_named(findings, "key", "broken", "No such file")
    check_named(findings, "peer", "broken", "has ended")
