"""``tensorferry doctor``: each provoked fault is named, with what it costs and what to do."""

from __future__ import annotations

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
from emulated_network import EmulatedNetwork
from tensorferry import doctor
from tensorferry.doctor import report, settings

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
    files: dict[str, str] = field(default_factory=dict)  # below the root
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
    for name, text in fault.files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            (root / name).write_text(text)
    environ = {name: value.replace("{tmp}", str(short_path)) for name, value in fault.environ.items()}
    check_named(doctor.examine(doctor.Host(root, environ)), fault.check, fault.state, fault.found)


def check_named(findings: list[doctor.Finding], check: str, state: str, found: str) -> None:
    named = [each for each in findings if (each.check, each.state) == (check, state) and re.search(found, each.found)]
    assert named, "\n".join(map(str, findings))
    assert all(each.cost for each in named), "it says what the fault costs"
    assert not any("the check itself failed" in each.found for each in findings)


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


def test_the_command_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    from tensorferry import __main__ as command

    with pytest.raises(SystemExit, match="0"):
        command.main(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in command.COMMANDS)
    with pytest.raises(SystemExit, match="2"):
        command.main(["dctor"])
    assert "invalid choice: 'dctor'" in capsys.readouterr().err
