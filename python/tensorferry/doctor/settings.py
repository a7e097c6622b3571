"""Checks of the program's settings: the cluster key, and the environment variables."""

from __future__ import annotations

import difflib
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from ..exporting import parse_address
from .finding import BROKEN, NOTE, OK, SLOW, Finding, Host

__all__ = ["CHECKS", "VARIABLES"]

#: The variables that the library reads, as docs/environment.md lists them, and what each value must look like.
VARIABLES = {
    "TENSORFERRY_KEY_FILE": "",
    "TENSORFERRY_KEY": "",
    "TENSORFERRY_TLS": r"key|off|\w+=.*",
    "TENSORFERRY_KERNEL_TLS": r"0|1",
    "TENSORFERRY_CHANNELS": r"[-\w, :]*",
    "TENSORFERRY_PLUGINS": "",
    "TENSORFERRY_SOCKET_DIR": "",
    "TENSORFERRY_SOCKET_IFNAME": "",
    "TENSORFERRY_COLLECTIVES": r"\w+=\w+(,\w+=\w+)*",
    "TENSORFERRY_TUNING": "",
    "TENSORFERRY_METRICS_PORT": "",
    "TENSORFERRY_METRICS_FILE": "",
    "TENSORFERRY_DUMP": "",
    "TENSORFERRY_LOG": "",
    "TENSORFERRY_TRACE": "",
    "TENSORFERRY_LIBIBVERBS": "",
    "TENSORFERRY_RDMA_DEVICES": r"[\w.-]+(:\d+)?(,[\w.-]+(:\d+)?)*",
    "TENSORFERRY_RDMA_GID_INDEX": r"\d+",
    "TENSORFERRY_RDMA_SERVICE_LEVEL": r"\d|1[0-5]",
    "TENSORFERRY_RDMA_TRAFFIC_CLASS": r"\d+",
    "TENSORFERRY_RDMA_TIMEOUT": r"[1-9]|[12]\d|3[01]",
    "TENSORFERRY_RDMA_STRIPE": r"\d+[KMGkmg]?",
    "TENSORFERRY_RDMA_QUEUE_DEPTH": r"\d+",
    "TENSORFERRY_RDMA_PINNED": r"\d+[KMGTkmgt]?",
    "TENSORFERRY_TORCH_RPC": r"[01]",
}
_OF_TESTS = [f"TENSORFERRY_{each}" for each in ("SEED", "SOAK", "TEST_RDMA", "TEST_PATIENCE")]
_CHANNELS = ("xth", "shm", "cma", "ibv", "basic", "cuda_xth", "cuda_ipc", "cuda_gdr", "cuda_basic", "tensorpipe")
_LEAST_KEY, _MOST_KEY = 16, 64 << 10
_LONGEST_SOCKET = 107  # bytes of a unix socket's path


def key(host: Host) -> Iterator[Finding]:
    file, text = host.variable("TENSORFERRY_KEY_FILE"), host.variable("TENSORFERRY_KEY")
    fails = "No agent starts: PermissionDenied, NotFound or InvalidArgument."
    if file:
        yield _key_file(Path(file), fails)
        if text:
            found = "TENSORFERRY_KEY_FILE and TENSORFERRY_KEY are both set: the file counts"
            yield Finding("key", NOTE, found, "", "unset TENSORFERRY_KEY")
    elif text:
        size = len(text.strip().encode())
        if not _LEAST_KEY <= size <= _MOST_KEY:
            yield Finding("key", BROKEN, f"TENSORFERRY_KEY has {size} bytes", fails, _make_one())
        else:
            cost = "Other processes of this user, and crash reports, can see it."
            yield Finding("key", NOTE, "the cluster key is in TENSORFERRY_KEY", cost, "Use TENSORFERRY_KEY_FILE.")
    else:
        found = "no cluster key: agents reach processes of this user on this host alone"
        yield Finding("key", NOTE, found, "Jobs on several hosts are refused.", _make_one())


def _make_one() -> str:
    return "tensorferry key makes a file: copy it to each host, and set TENSORFERRY_KEY_FILE to its path."


def _key_file(path: Path, fails: str) -> Finding:
    try:
        about = path.stat()
        text = path.read_bytes().strip() if stat.S_ISREG(about.st_mode) else b""
    except OSError as error:
        return Finding("key", BROKEN, f"{path}: {error.strerror}", fails, _make_one())
    if not stat.S_ISREG(about.st_mode):
        return Finding("key", BROKEN, f"{path} is not a regular file", fails, _make_one())
    if about.st_uid not in (0, os.geteuid()):
        found = f"{path} belongs to uid {about.st_uid}, neither to this user ({os.geteuid()}) nor to root"
        return Finding("key", BROKEN, found, fails, f"chown {os.geteuid()} {path}")
    if about.st_mode & 0o077:
        found = f"{path} has mode {stat.S_IMODE(about.st_mode):04o}: other users can use it"
        return Finding("key", BROKEN, found, fails, f"chmod 600 {path}; make a new key if others may have read it")
    if not _LEAST_KEY <= len(text) <= _MOST_KEY:
        return Finding(
            "key", BROKEN, f"{path} has {len(text)} bytes, not {_LEAST_KEY} to {_MOST_KEY}", fails, _make_one()
        )
    return Finding("key", OK, f"the cluster key is in {path}")


def variables(host: Host) -> Iterator[Finding]:
    known = [*VARIABLES, *_OF_TESTS]
    for name in sorted(host.environ):
        if not name.startswith("TENSORFERRY_"):
            continue
        value = host.environ[name]
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            advice = f"Did you mean {near[0]}?" if near else "docs/environment.md lists the variables."
            yield Finding("variables", SLOW, f"TensorFerry has no variable {name}", "It has no effect.", advice)
        elif value and (form := VARIABLES.get(name)) and not re.fullmatch(form, value):
            cost = "Agents refuse it when they start, or when the card is first used."
            yield Finding("variables", BROKEN, f"{name}={value!r} is no value for it", cost, "See docs/environment.md.")


def channels(host: Host) -> Iterator[Finding]:
    given = [each.strip() for each in host.variable("TENSORFERRY_CHANNELS").split(",") if each.strip()]
    if not given:
        return
    names = {each: each.lstrip("-").split(":")[0] for each in given}
    unknown = [each for each in given if names[each] not in _CHANNELS]
    changes = {each.startswith("-") or ":" in each for each in given}  # the default order, instead of naming all
    if unknown or len(changes) > 1:
        what = f"no channel {unknown[0]!r}" if unknown else "both allowed channels and changes of the default order"
        known = f"Known are {', '.join(_CHANNELS)}: name some, or put a minus before each, or a priority after each."
        cost = f"No agent starts{', unless a plugin has this channel' if unknown else ''}."
        yield Finding("channels", BROKEN, f"TENSORFERRY_CHANNELS names {what}", cost, known)
        return
    fast = ("shm", "xth", "cuda_ipc", "ibv")
    lost = [each for each in fast if ("-" + each in given if changes == {True} else each not in given)]
    cost = f"{', '.join(lost)} carry nothing." if lost else ""
    yield Finding("channels", SLOW if lost else OK, f"TENSORFERRY_CHANNELS={','.join(given)}", cost,
                  "unset TENSORFERRY_CHANNELS, unless this is meant." if lost else "")  # fmt: skip


def socket_dir(host: Host) -> Iterator[Finding]:
    given = host.variable("TENSORFERRY_SOCKET_DIR")
    if not given:
        return
    cost = "No agent starts, or peers of this host use TCP."
    path = Path(given)
    if len(given.encode()) > _LONGEST_SOCKET - 40:
        found = f"{given} is too long for the name of a unix socket"
        yield Finding("socket_dir", BROKEN, found, cost, "Use a short path, as /tmp/tf.")
        return
    try:
        about = path.stat()
    except FileNotFoundError:
        where = path.parent
        writable = os.access(where, os.W_OK)
        found = f"{given} is missing, and {'is made' if writable else f'cannot be made in {where}'}"
        yield Finding("socket_dir", OK if writable else BROKEN, found, "" if writable else cost)
        return
    except OSError as error:
        yield Finding("socket_dir", BROKEN, f"{given}: {error.strerror}", cost)
        return
    if not stat.S_ISDIR(about.st_mode):
        yield Finding("socket_dir", BROKEN, f"{given} is no folder", cost, "Name a folder of your own.")
    elif about.st_uid != os.geteuid() or about.st_mode & 0o077:
        found = f"{given} belongs to uid {about.st_uid} with mode {stat.S_IMODE(about.st_mode):04o}"
        yield Finding("socket_dir", BROKEN, found, cost, f"chown {os.geteuid()} {given}; chmod 700 {given}")
    else:
        yield Finding("socket_dir", OK, f"unix sockets are in {given}")


def written_files(host: Host) -> Iterator[Finding]:
    for name in ("TENSORFERRY_TRACE", "TENSORFERRY_DUMP", "TENSORFERRY_METRICS_FILE"):
        folder = Path(host.variable(name) or "/tmp/x").parent
        if host.variable(name) and not (folder.is_dir() and os.access(folder, os.W_OK)):
            found = f"{name}: {folder} is no folder that this process can write"
            yield Finding("written_files", BROKEN, found, "Nothing is written.", f"mkdir -p {folder}")
    tuning = host.variable("TENSORFERRY_TUNING")
    if tuning and Path(tuning).exists():
        try:
            json.loads(Path(tuning).read_text())
        except (OSError, ValueError) as error:
            cost = "Groups use the built-in table of algorithms."
            found = f"TENSORFERRY_TUNING: {tuning}: {error}"
            yield Finding("tuning", SLOW, found, cost, f"tensorferry tune writes it anew: rm {tuning}")


def metrics_port(host: Host) -> Iterator[Finding]:
    given = host.variable("TENSORFERRY_METRICS_PORT")
    if not given:
        return
    try:
        _, ports = parse_address(given)
    except ValueError as error:
        yield Finding("metrics_port", BROKEN, f"TENSORFERRY_METRICS_PORT: {error}", "No agent starts.")
        return
    if len(ports) == 1 and ports[0] != 0:
        cost = "The second process of this host does not start, because the first one has the port."
        advice = f"Give each process one of a range: TENSORFERRY_METRICS_PORT={ports[0]}-{min(65535, ports[0] + 63)}"
        yield Finding("metrics_port", SLOW, f"TENSORFERRY_METRICS_PORT={given} is one port", cost, advice)
    else:
        yield Finding("metrics_port", OK, f"metrics are served at {given}")


CHECKS = (key, variables, channels, socket_dir, written_files, metrics_port)
