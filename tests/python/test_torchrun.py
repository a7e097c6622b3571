"""Jobs that are started again: the ranks of the next round meet at the store of the one that failed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from conftest import eventually, free_port, outputs_of

PROGRAM = Path(__file__).parent / "programs" / "restarted_rank.py"
RANKS = 3
KINDS = "group", "rpc", "torch"
LONGEST_JOIN = 30.0  # seconds, ten times what a round may take; one that waits for a dead rank takes 300
RENDEZVOUS = {
    "standalone": lambda: ["--standalone"],
    "c10d": lambda: [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--local-addr=127.0.0.1",
    ],
    "static": lambda: ["--master-addr=127.0.0.1", f"--master-port={free_port()}"],
}


def run(rendezvous: str, restarts: int, *kinds: str, seed: int = 1) -> tuple[str, str]:
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", f"--max-restarts={restarts}",
        "--monitor-interval=1", *RENDEZVOUS[rendezvous](), str(PROGRAM), str(seed), str(restarts), *kinds,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    limit = 240 + 60 * restarts
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit, check=False)
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout, job.stderr


def check(told: tuple[str, str], restarts: int) -> None:
    """All ranks were done in the last round. In each round, all had joined soon after the last one had begun to. A
    survivor has named the dead process before torchrun ended it: an agent of process groups by the rank in its name."""
    said, errors = told
    assert re.search(r"peer=\S+( rank=\S+)? connection lost: .*its process has ended \(pid \d+ on ", errors), errors
    assert sorted(re.findall(rf"done (\d) {restarts}\b", said)) == [str(rank) for rank in range(RANKS)], said
    jobs: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for line in re.findall(r"\[.*\]", said):
        kind, round_, _, _, began, joined = json.loads(line)
        jobs.setdefault((kind, round_), []).append((began, joined))
    whole = [times for times in jobs.values() if len(times) == RANKS]
    assert whole
    for times in whole:
        assert max(joined for _, joined in times) - max(began for began, _ in times) < LONGEST_JOIN, said


def test_a_job_goes_on_after_a_rank_was_killed_as_it_joined_formed_operated_and_left() -> None:
    check(run("standalone", 4, *KINDS), 4)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rendezvous", RENDEZVOUS)
def test_a_job_goes_on_after_a_rank_was_killed_fifty_times(kind: str, rendezvous: str) -> None:
    check(run(rendezvous, 50, kind, seed=7), 50)


# ---- without torchrun


class Job:
    """Processes of programs/restarted_rank.py that meet at a place of the test's own."""

    def __init__(self, *arguments: str, size: int = 2, **environment: str) -> None:
        self._ranks = [
            subprocess.Popen(
                [sys.executable, str(PROGRAM), "1", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | self.place_of(rank, size) | environment,
            )
            for rank in range(size)
        ]

    @staticmethod
    def place_of(rank: int, size: int) -> dict[str, str]:
        return {"RANK": str(rank), "WORLD_SIZE": str(size)}

    def kill_in_the_midst(self) -> None:
        """Kills all processes once each has joined."""
        try:
            for rank in self._ranks:
                assert rank.stdout is not None and rank.stdout.readline(), rank.communicate()[1]
        finally:
            for rank in self._ranks:
                rank.kill()
                rank.communicate()

    def check(self) -> None:
        """All processes were done, with each kind of job."""
        said = outputs_of(self._ranks, 300)
        done = [[line for line in text.splitlines() if line.startswith("done")] for text in said]
        assert done == [[f"done {rank} 0"] for rank in range(len(said))], said


class SlurmJob(Job):
    """As srun starts it: the variables that torch reads are not set."""

    @staticmethod
    def place_of(rank: int, size: int) -> dict[str, str]:
        return {
            "SLURM_JOB_ID": "17", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": str(size),
            "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1",
        }  # fmt: skip


def test_a_world_whose_processes_were_all_killed_begins_again_at_a_store_that_lives_on() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    # The second one of a kind meets behind the first one. A second session of torch's own module in one process waits
    # 100 s in shutdown(), with TensorPipe too.
    kinds = *KINDS, "group", "rpc"
    Job("0", *kinds, **place).kill_in_the_midst()
    Job("0", *kinds, **place).check()


def test_a_job_of_slurm_begins_again_at_its_address() -> None:
    address = f"127.0.0.1:{free_port()}"
    SlurmJob("0", *KINDS, JOB_ADDRESS=address).kill_in_the_midst()
    SlurmJob("0", *KINDS, JOB_ADDRESS=address).check()


@pytest.mark.parametrize("kind", ["group", *(pytest.param(kind, marks=pytest.mark.soak) for kind in KINDS[1:])])
def test_a_file_that_an_earlier_run_has_left_begins_a_new_world(tmp_path: Path, kind: str) -> None:
    file = str(tmp_path / "store")
    Job("0", kind, JOB_FILE=file).kill_in_the_midst()
    Job("0", kind, JOB_FILE=file).check()


# ---- worlds that shrink and grow


class Elastic:
    """Agents of torchrun on this host, each with one rank, of a world of 1 to 4.

    The ranks of each round meet at a store of their own (TORCH_DISABLE_SHARE_RDZV_TCP_STORE). In the store that torch's
    agents share otherwise, an agent that joins a later round waits for an address that only the first round's agents
    were told: docs/troubleshooting.md, "A job that torchrun starts again".
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._endpoint = f"127.0.0.1:{free_port()}"
        self._agents: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *, serves: bool = False) -> None:
        configuration = f"is_host={int(serves)},last_call_timeout=2,keep_alive_interval=2,keep_alive_max_attempt=30"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=1:4", "--nproc-per-node=1", "--max-restarts=20",
            "--monitor-interval=0.2", "--rdzv-backend=c10d", f"--rdzv-endpoint={self._endpoint}", "--rdzv-id=elastic",
            f"--rdzv-conf={configuration}", "--local-addr=127.0.0.1", str(PROGRAM.with_name("elastic_rank.py")),
            str(self._folder), name,
        ]  # fmt: skip
        environment = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (self._folder / f"{name}.log").open("wb") as log:
            self._agents[name] = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env=os.environ | environment
            )

    def await_world(self, size: int, *names: str) -> None:
        """Waits until the ranks of these agents have done some steps in a world of that size."""

        def there() -> bool:
            return all(self._last_of(name) == str(size) for name in names)

        assert eventually(there, 300), {each: (self._folder / f"{each}.log").read_text() for each in self._agents}

    def _last_of(self, name: str) -> str:
        path = self._folder / f"{name}.size"
        return path.read_text() if path.exists() else ""

    def kill(self, name: str) -> None:
        agent = self._agents.pop(name)
        os.killpg(agent.pid, signal.SIGKILL)
        # Torchrun starts each rank in a session of its own. There may be none yet, or none any more.
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.kill(int((self._folder / f"{name}.pid").read_text()), signal.SIGKILL)
        agent.wait()

    def finish(self) -> None:
        (self._folder / "enough").touch()
        for name, agent in list(self._agents.items()):
            assert agent.wait(120) == 0, (self._folder / f"{name}.log").read_text()
            del self._agents[name]

    def stop(self) -> None:
        for name in list(self._agents):
            self.kill(name)


@pytest.mark.soak
def test_a_world_of_torchrun_shrinks_and_grows(tmp_path: Path) -> None:
    job = Elastic(tmp_path)
    try:
        job.start("a", serves=True)
        job.start("b")
        job.start("c")
        job.await_world(3, "a", "b", "c")
        job.kill("b")
        job.await_world(2, "a", "c")
        job.start("d")
        job.await_world(3, "a", "c", "d")
        job.finish()
    finally:
        job.stop()
