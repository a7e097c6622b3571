"""Who measures: contestants made of a workload between Python processes, or of a C++ program of this folder."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed

from benchmarks.hogs import Hogs
from benchmarks.native import Missing, Programs
from benchmarks.network import Hosts
from benchmarks.placement import Placement
from benchmarks.strangers import Stranger
from benchmarks.teams import CALLEE, CALLER, PAIR, Team

TORCH = "torch.distributed.rpc"
OURS = "tensorferry"
TORCH_ON_OURS = "torch.distributed.rpc on tensorferry"
ALONE = "tensorferry, undisturbed"
EMPTY_CALL = "empty rpc_sync of ours"
UNCOUNTED = "tensorferry, times of calls not counted"
ONE_TENSOR = "one tensor of the same bytes"
GLOO = "Gloo"
IPERF3 = "iperf3 -P {}"
QUIET = "without a transfer"
FEWER = "tensorferry, 16 actors"
ON_REQUEST = ("tensorpipe",)  # channels that an agent has only where its options name them
BARE_UNIX = "bare unix round trip"
BARE_TCP = "bare TCP round trip"
WITHOUT_TLS = "tensorferry without TLS"
ONE_INTERFACE = "tensorferry over one interface"
GRPC = "gRPC C++ over a unix socket"
BARE_TRANSFER = {"unix": "bare unix transfer", "tcp": "bare TCP transfer"}
RAY, MONARCH, PYZMQ = STRANGERS = ("Ray", "Monarch", "pyzmq")
WARM_COPY = "a copy inside one process, one thread"
TORCH_SHARED = "torch.multiprocessing shared tensor"
WHOLE = "all of it changed"
BARE_COPY = "process_vm_readv, warm, one thread"
MODULES = {
    OURS: "tensorferry.rpc",
    ALONE: "tensorferry.rpc",
    UNCOUNTED: "tensorferry.rpc",
    ONE_TENSOR: "tensorferry.rpc",
    TORCH: "torch.distributed.rpc",
    TORCH_ON_OURS: "benchmarks.torch_backend",
}

BACKENDS = {OURS: "tensorferry", GLOO: "gloo"}  # of torch.distributed

SMALL = 3  # processes; a larger team is forked also where others are new, for it would take longer to start than to run

# What a turn measured: figures of single operations, less is better; by name where there are several series.
Samples = Sequence[float]
Turn = Mapping[str, Samples]


class Lab:
    """What contestants measure with: teams, started when first needed, programs, and busy processes."""

    def __init__(self, seconds: float, programs: Path | None, quick: bool) -> None:
        self.seconds = seconds  # of one turn
        self.quick = quick
        self.programs = Programs(programs)
        self.hogs = Hogs()
        self._teams: dict[object, Team] = {}
        self._groups: dict[tuple[int, bool], Team] = {}
        self._strangers: dict[str, Stranger] = {}
        self._hosts: Hosts | None = None
        self._wide_hosts: Hosts | None = None
        self._stores: tempfile.TemporaryDirectory[str] | None = None

    def team(self, who: str, size: int = PAIR, options: Mapping[str, Any] | None = None) -> Team:
        key = MODULES[who], size, tuple(sorted((options or {}).items()))
        if key not in self._teams:
            forked = self.quick or size > SMALL
            self._teams[key] = Team(MODULES[who], size, options, forked=forked)
        return self._teams[key]

    def regions(self, size: int) -> Team:
        """Processes of ours with the workloads of one-sided memory."""
        key = "regions", size
        if key not in self._teams:
            workloads = "benchmarks.region_workloads"
            self._teams[key] = Team(MODULES[OURS], size, forked=self.quick or size > SMALL, workloads=workloads)
        return self._teams[key]

    def group(self, ranks: int, apart: bool = False) -> Team:
        """Ranks with a process group of each backend, on one host or, two of them, on two hosts."""
        if (ranks, apart) not in self._groups:
            self._stores = self._stores or tempfile.TemporaryDirectory()
            ends = [self.hosts().end(rank) if apart else None for rank in range(ranks)]
            workloads = "benchmarks.group_workloads"
            team = Team("torch.distributed", ranks, joined=False, forked=True, workloads=workloads)
            self._groups[ranks, apart] = team
            given = {"world_size": ranks, "folder": tempfile.mkdtemp(dir=self._stores.name)}
            joining = {rank: ("join", {"rank": rank, "host": ends[rank], **given}) for rank in range(ranks)}
            ways = team.run(Placement.UNPINNED, joining, 120)
            if apart and not all("several hosts" in way for way in ways.values()):
                raise RuntimeError(f"the ranks are not on two hosts: {ways}")
        return self._groups[ranks, apart]

    def hosts(self) -> Hosts:
        if self._hosts is None:
            self._hosts = Hosts()
        return self._hosts

    def wide_hosts(self) -> Hosts:
        """Two hosts with two networks between them, whose rate is the limit and not the CPUs."""
        if self._wide_hosts is None:
            self._wide_hosts = Hosts(2, "1gbit")
        return self._wide_hosts

    def stranger(self, name: str) -> Stranger:
        if name not in self._strangers:
            self._strangers[name] = Stranger(name)
        return self._strangers[name]

    def dismiss(self, larger_than: int = 0) -> None:
        """Ends teams: all after a failure, for one of them may hang; the large ones when their row is done."""
        for key, team in list(self._teams.items()):
            if team.size > larger_than:
                del self._teams[key]
                team.close()
        if larger_than == 0:
            for each in (self._groups, self._strangers):
                while each:
                    each.popitem()[1].close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.dismiss()
        self.hogs.close()
        for hosts in (self._hosts, self._wide_hosts):
            if hosts is not None:
                hosts.close()
        if self._stores is not None:
            self._stores.cleanup()


@dataclass(frozen=True)
class Contestant:
    """`prepare` starts what has to be there before the first turn and raises native.Missing where it cannot; `measure`
    takes one turn."""

    prepare: Callable[[Lab], Any]
    measure: Callable[[Lab, Placement], Samples | Turn]


@dataclass(frozen=True)
class Scale:
    """How often something is done: less often in --quick."""

    full: int
    quick: int

    def of(self, quick: bool) -> int:
        return self.quick if quick else self.full


def python(who: str, workload: str, options: Mapping[str, Any] | None = None, **arguments: Any) -> Contestant:
    """A workload of so many seconds between two Python processes."""

    def measure(lab: Lab, placement: Placement) -> Samples:
        patience = 60 + 10 * lab.seconds
        team = lab.team(who, options=options)
        samples: Samples = team.call(placement, workload, patience=patience, seconds=lab.seconds, **arguments)
        return samples

    return Contestant(lambda lab: lab.team(who, options=options), measure)


def one_sided(workload: str, processes: int = PAIR, **arguments: Any) -> Contestant:
    """A workload of region_workloads.py, of so many seconds."""

    def measure(lab: Lab, placement: Placement) -> Samples:
        patience = 120 + 10 * lab.seconds
        team = lab.regions(processes)
        samples: Samples = team.call(placement, workload, patience=patience, seconds=lab.seconds, **arguments)
        return samples

    return Contestant(lambda lab: lab.regions(processes), measure)


def program(name: str, **options: str) -> Contestant:
    """A C++ program of this folder."""
    return Contestant(
        lambda lab: lab.programs.check(name),
        lambda lab, placement: lab.programs.run(name, placement, lab.seconds / 4, None, **options),
    )


def between_hosts(name: str, **options: str) -> Contestant:
    """A C++ program of this folder whose two processes are on two emulated hosts."""

    def prepare(lab: Lab) -> None:
        lab.programs.check(name)
        lab.hosts()

    def measure(lab: Lab, placement: Placement) -> Samples:
        return lab.programs.run(name, placement, lab.seconds, None, **options, **lab.hosts().options())

    return Contestant(prepare, measure)


def over_interfaces(networks: int, name: str, **options: str) -> Contestant:
    """As between_hosts(), with so many of the networks of `Lab.wide_hosts`."""

    def prepare(lab: Lab) -> None:
        lab.programs.check(name)
        lab.wide_hosts()

    def measure(lab: Lab, placement: Placement) -> Samples:
        hosts = lab.wide_hosts()
        return lab.programs.run(name, placement, lab.seconds, hosts.interfaces(networks), **options, **hosts.options())

    return Contestant(prepare, measure)


def group(who: str, operation: str, ranks: int, sizes: Mapping[str, int], apart: bool = False) -> Contestant:
    """An operation of a process group with tensors of these sizes: from a common start to the end of the slowest rank.
    `apart`: on two emulated hosts."""

    def measure(lab: Lab, placement: Placement) -> Turn:
        given = {"backend": BACKENDS[who], "name": operation, "sizes": sizes, "seconds": lab.seconds / 4}
        found = lab.group(ranks, apart).run(placement, {rank: ("repeat", given) for rank in range(ranks)}, 120)
        return {size: slowest([samples[size] for samples in found.values()]) for size in sizes}

    return Contestant(lambda lab: lab.group(ranks, apart), measure)


def after_a_death(who: str, ranks: int, reducing: bool) -> Contestant:
    """A process group of new processes whose last rank is killed: from the signal to the end of the first all_reduce of
    the survivors, which reconfigure the group, at the slowest of them. `reducing`: they wait in an all_reduce, and
    reconfigure when it fails. Else they are idle, and reconfigure because they are told of the death."""
    pause = 0.5  # seconds; the survivors wait in the all_reduce by then

    def measure(lab: Lab, placement: Placement) -> Samples:
        workloads = "benchmarks.group_workloads"
        with (
            tempfile.TemporaryDirectory() as folder,
            Team("torch.distributed", ranks, joined=False, forked=True, workloads=workloads) as team,
        ):
            given = {"backend": BACKENDS[who], "store": str(Path(folder) / "store"), "world_size": ranks}
            joining = {rank: ("stand_by", {"rank": rank, **given}) for rank in range(ranks)}
            told = team.run(placement, joining, 120)
            first = {"handles": [told[rank] for rank in range(ranks)]}
            told = team.run(placement, {rank: ("begin", first) for rank in range(ranks)}, 120)
            then = {"handles": [told[rank] for rank in range(ranks - 1)], "reducing": reducing}
            killed: list[int] = []
            timer = threading.Timer(pause if reducing else 0, lambda: killed.append(team.kill(ranks - 1)))
            timer.start()
            if not reducing:
                timer.join()
            ended = team.run(placement, {rank: ("survive", then) for rank in range(ranks - 1)}, 120)
        return [max(ended.values()) - killed[0]]

    def prepare(_: Lab) -> None:
        if not hasattr(torch.distributed, "_reconfigure"):
            raise Missing("this version of torch cannot reconfigure a process group")

    return Contestant(prepare, measure)


def slowest(samples: Sequence[Samples]) -> Samples:
    """What each operation took at its slowest rank; `samples` are those of each rank."""
    return [max(each) for each in zip(*samples, strict=True)]


def iperf3(connections: int, size: int) -> Contestant:
    """iperf3 between the same hosts: nanoseconds for `size` bytes."""
    return Contestant(
        lambda lab: lab.hosts().check_iperf3(), lambda lab, _: [1e9 * size / lab.hosts().iperf3(connections)] * 3
    )


def stranger(name: str, workload: str, **arguments: Any) -> Contestant:
    """Another library, in processes of its own and by the environment of `make bench ARGS=--peers`."""
    return Contestant(
        lambda lab: lab.stranger(name),
        lambda lab, placement: lab.stranger(name).run(placement, lab.seconds, workload=workload, **arguments),
    )


def carried(
    workload: str, options: Mapping[str, Any], transport: str = "", channel: str = "", **arguments: Any
) -> Contestant:
    """Ours with options that leave one transport or channel, which is checked: a row never measures another one."""

    def prepare(lab: Lab) -> None:
        if channel and channel not in ON_REQUEST:  # an agent that is told of an unknown one does not start
            _, _, reasons = lab.team(OURS).call(Placement.UNPINNED, "explained")
            if channel not in reasons:
                raise Missing(f"there is no channel {channel}")
        *found, reasons = lab.team(OURS, options=options).call(Placement.UNPINNED, "explained")
        for wanted, got in zip((transport, channel), found):
            if wanted and wanted != got:
                why = reasons.get(wanted) or f"{got or 'nothing'} carries"
                raise Missing(f"{wanted} does not carry: {why}")

    return Contestant(prepare, python(OURS, workload, options, **arguments).measure)


def idle(who: str) -> Contestant:
    """The share of a core that an agent without work uses."""
    return Contestant(lambda lab: lab.team(who), lambda lab, _: [lab.team(who).idle(lab.seconds * 2)])


def threads(who: str) -> Contestant:
    """The threads that an agent adds to its process."""
    return Contestant(lambda lab: lab.team(who), lambda lab, _: [lab.team(who).threads()])


def beside_blocking(who: str, each: float) -> Contestant:
    """Empty calls of one caller while another one's calls block for `each` seconds; of none where it is 0."""

    def measure(lab: Lab, placement: Placement) -> Samples:
        jobs: dict[int, tuple[str, dict[str, Any]]] = {CALLER: ("sync", {"seconds": lab.seconds})}
        if each:
            jobs[2] = "blocking", {"seconds": lab.seconds, "each": each}
        samples: Samples = lab.team(who, size=3).run(placement, jobs, 60 + 10 * lab.seconds)[CALLER]
        return samples

    def prepare(lab: Lab) -> None:
        lab.team(who, size=3).run(Placement.UNPINNED, {CALLER: ("touch", {}), 2: ("touch", {})})

    return Contestant(prepare, measure)


def actors(who: str, count: int) -> Contestant:
    """Actors that think between empty calls to one learner: nanoseconds that pass for each call, that each call takes,
    and that all processes compute for each call."""

    def measure(lab: Lab, placement: Placement) -> Turn:
        team, seconds = lab.team(who, size=count + 1), 4 * lab.seconds
        ranks = [rank for rank in range(count + 1) if rank != CALLEE]
        computed = team.cpu_time()
        found = team.run(
            placement, {rank: ("actor", {"seconds": seconds, "seed": rank}) for rank in ranks}, 60 + 10 * seconds
        ).values()
        computed = team.cpu_time() - computed
        calls: list[float] = [sample for _, _, samples in found for sample in samples]
        passed = max(end for _, end, _ in found) - min(begin for begin, _, _ in found)
        return {"each": calls, "passed": [passed / len(calls)], "computed": [computed / len(calls)]}

    def prepare(lab: Lab) -> None:
        team = lab.team(who, size=count + 1)
        team.run(Placement.UNPINNED, {rank: ("touch", {}) for rank in range(count + 1) if rank != CALLEE})

    return Contestant(prepare, measure)


def whole_lives(who: str, count: int) -> Contestant:
    """Agents of new processes that have imported everything: from the first one's init_rpc to the end of the last
    one's shutdown."""

    def measure(lab: Lab, placement: Placement) -> Samples:
        with Team(MODULES[who], count, joined=False, forked=True) as team:
            jobs = {rank: ("whole_life", {"rank": rank, "world_size": count}) for rank in range(count)}
            found = team.run(placement, jobs, patience=180).values()
        return [max(end for _, end in found) - min(begin for begin, _ in found)]

    return Contestant(lambda lab: None, measure)


def in_new_pair(workload: str, series: Sequence[str], count: Scale, size: int, needs: int = 0) -> Contestant:
    """Ours, in two processes that have done nothing before; `needs`: bytes of memory for each operation."""

    def prepare(lab: Lab) -> None:
        if (wanted := needs * count.of(lab.quick)) > (there := _available_memory()):
            raise Missing(f"needs {wanted / 2**30:.1f} GB of memory, {there / 2**30:.1f} GB are there")

    def measure(lab: Lab, placement: Placement) -> Turn:
        with Team(MODULES[OURS], forked=lab.quick) as team:
            found = team.call(placement, workload, patience=580, count=count.of(lab.quick), size=size)
        return {name: [figure] for name, figure in zip(series, found)}

    return Contestant(prepare, measure)


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0
