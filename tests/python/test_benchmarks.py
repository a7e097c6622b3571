"""The benchmark measures both sides, saves its figures, and never compares two different runs."""

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import contestants, figures, group_rows, plot, report, results, strangers
from benchmarks.contestants import GLOO, OURS, TORCH, Contestant, Lab, group, python, slowest, stranger
from benchmarks.group_workloads import Operation
from benchmarks.native import Missing
from benchmarks.placement import Placement
from benchmarks.results import DifferentRuns, Measurement, Round, RowResult, Run, speedup
from benchmarks.row import Row
from benchmarks.rows import ROWS
from benchmarks.run import Failed, chosen, keep_run, measure
from benchmarks.teams import Team
from benchmarks.units import MICROSECONDS, PERCENT, Figure, Unit

ROOT = Path(__file__).parents[2]


def measured(run: str, contestant: str, *medians: float) -> Measurement:
    return Measurement(run, "noop", contestant, tuple(Round(m, 2 * m, 100) for m in medians))


def a_run() -> Run:
    run = Run(machine={"cores": 2, "versions": {"torch": "0"}, "processor": "", "busy_before": 0, "busy_after": 0})
    both = [measured(run.id, OURS, 10, 11, 12), measured(run.id, TORCH, 200, 110, 360)]
    run.rows.append(RowResult("noop", "empty call", "us", 1e3, False, "unpinned", {TORCH: 10.0}, None, both))
    return run


def test_speedup_is_of_the_medians_with_the_lowest_and_the_highest_turn() -> None:
    s = speedup(measured("a", OURS, 10, 11, 12), measured("a", TORCH, 200, 110, 360))
    assert (s.ratio, s.least, s.greatest) == (200 / 11, 10, 30)


def test_speedup_between_different_runs_is_refused() -> None:
    with pytest.raises(DifferentRuns, match="measure both in one invocation"):
        speedup(measured("a", OURS, 10), measured("b", TORCH, 200))


def test_a_file_made_of_two_runs_is_refused(tmp_path: Path) -> None:
    run, other = a_run(), a_run()
    run.rows[0].contestants[1] = replace(other.rows[0].contestants[1])
    run.save(tmp_path / "run.json")
    with pytest.raises(DifferentRuns, match=other.id[:8]):
        Run.load(tmp_path / "run.json")


def test_a_saved_run_round_trips(tmp_path: Path) -> None:
    run = a_run()
    for name in ("run.json", "run.json.gz"):
        run.save(tmp_path / name)
        assert Run.load(tmp_path / name) == run
    assert (tmp_path / "run.json.gz").stat().st_size < (tmp_path / "run.json").stat().st_size


def test_the_picture_of_one_run_is_the_same_each_time(tmp_path: Path) -> None:
    run = a_run()
    plot.draw(run, tmp_path / "a.svg")
    plot.draw(run, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_text() == (tmp_path / "b.svg").read_text()
    assert "18x" in (tmp_path / "a.svg").read_text()


def with_peers(run: Run) -> Run:
    """The run, with an empty call: 300 times as fast as torch's and 3 times as fast as the others."""
    others = [measured(run.id, who, 30) for who in contestants.STRANGERS]
    row = replace(run.rows[0], name="peers-empty", contestants=[measured(run.id, OURS, 10), *others])
    row.contestants.insert(1, measured(run.id, TORCH, 3000))
    row.contestants = [replace(each, row=row.name) for each in row.contestants]
    run.rows.append(row)
    return run


def test_the_picture_shows_every_library_on_a_logarithmic_axis(tmp_path: Path) -> None:
    run = with_peers(a_run())
    assert plot.pictured(run) == [(run.rows[-1], {TORCH: 300, **{who: 3 for who in contestants.STRANGERS}})]
    plot.draw(run, tmp_path / "run.svg")
    drawn = (tmp_path / "run.svg").read_text()
    assert all(text in drawn for text in (*contestants.STRANGERS, "300x", "3x", "10x", "100x", "logarithmic"))


def with_groups(run: Run) -> Run:
    """The run, with ratios from 2 on one host and from 5 between two."""
    for row in ROWS:
        if row.name.startswith("group-"):
            for figure in row.figures:
                name = f"{row.name}-{figure.name}" if figure.name else row.name
                theirs = {"group-2-all_reduce-1kb": 120, "group-4-ddp": 11}.get(name, 50 if "network" in name else 20)
                both = [replace(measured(run.id, who, ns), row=name) for who, ns in ((OURS, 10), (GLOO, theirs))]
                run.rows.append(RowResult(name, row.title, "us", 1e3, False, "unpinned", {}, None, both))
    return run


def test_the_picture_of_groups_has_a_panel_for_each_operation_and_a_bar_for_each_row(tmp_path: Path) -> None:
    run = with_groups(a_run())
    rows_of_panels = [operation for panel in plot.PANELS.values() for operation in panel]
    assert rows_of_panels == list(group_rows.OPERATIONS) and list(plot.PLACES) == list(group_rows.GROUPS)
    plot.draw_groups(run, tmp_path / "groups.svg")
    plot.draw_groups(run, tmp_path / "again.svg")
    drawn = (tmp_path / "groups.svg").read_text()
    assert drawn == (tmp_path / "again.svg").read_text()
    assert all(text in drawn for text in (*plot.PANELS, ">2 ranks<", ">4 ranks<", ">2 ranks on two hosts<", "64 MB"))
    apart = sum("-network-" in row.name for row in run.rows)
    here = sum(row.name.startswith("group-") for row in run.rows) - apart
    assert [drawn.count(f">{value}<") for value in ("12", "1.1", "5", "2")] == [1, 1, apart, here - 2]


def test_the_page_says_what_groups_gain_if_the_run_has_them() -> None:
    run = Run.load(figures.KEPT)
    run.rows = [row for row in run.rows if not row.name.startswith("group-")]
    assert "Gloo" not in figures.expectations(run)
    said = figures.expectations(with_groups(run))
    assert "| `all_reduce` of 1 KB to 64 MB, 2 or 4 ranks, one host | Gloo | 2x to 12x |" in said
    assert "| other operations of a group, one host | Gloo | 1.1x to 2x |" in said
    assert "| operations of a group, two hosts | Gloo | 5x |" in said


def test_groups_of_another_run_are_quoted_beside_the_run_without_them() -> None:
    run, of_groups = Run.load(figures.KEPT), Run.load(figures.KEPT)
    run.rows = [row for row in run.rows if not row.name.startswith("group-")]
    of_groups.rows = []
    with_groups(of_groups)
    assert "one host | Gloo | 2x to 12x |" in figures.expectations(run, {"group": of_groups})
    said = figures.results(run, {"group": of_groups})
    assert f"\n{said}".count("\nRun `") == (3 if figures.GPUS.exists() else 2)
    assert all(row.title in said for row in of_groups.rows)


def test_the_readme_and_the_page_say_one_figure_for_an_empty_call() -> None:
    run = with_peers(Run.load(figures.KEPT))
    rows = {row.name: row for row in run.rows}
    for name, kept in ("in-flight", "in-flight"), *((f"sent-{size}mb", f"tensor-{size}mb") for size in (1, 16, 64)):
        if f"peers-{name}" not in rows:
            run.rows.append(replace(rows[kept], name=f"peers-{name}"))
    torchs = rows["noop-unpinned"].contestants[1]
    rows["noop-unpinned"].contestants[1] = replace(torchs, rounds=(Round(1, 1, 1),) * len(torchs.rounds))
    said = " ".join(figures.readme(run).split())
    assert "an empty call is answered **300x** faster" in said
    assert "| an empty call from Python | torch.distributed.rpc | 300x |" in figures.expectations(run)


def a_run_of_gpus() -> Run:
    """4 KB at 20x, 64 MB at 2x, reductions at 3x of NCCL and half of symmetric memory; in a graph at 6x and 2x."""
    run = Run(machine={"cores": 8, "gpus": ["H"] * 4, "versions": {"torch": "0"}, "processor": "", "busy_before": 0})

    def add(name: str, ours: float, **theirs: float) -> None:
        peers = {"torch": TORCH, "nccl": "NCCL", "send": "NCCL send/recv", "symmetric": "torch's symmetric memory"}
        each = [measured(run.id, OURS, ours), *[measured(run.id, peers[who], value) for who, value in theirs.items()]]
        each = [replace(m, row=name) for m in each]
        run.rows.append(RowResult(name, name, "us", 1e3, False, "unpinned", {}, None, each))

    add("4kb", 10, torch=200)
    add("64mb", 10, send=20)
    for ranks in (2, 4):
        for size in ("1kb", "8mb"):
            add(f"gpus{ranks}-all-reduce-{size}", 10, nccl=30, symmetric=5)
            add(f"gpus{ranks}-all-reduce-{size}-graph", 10, nccl=60, symmetric=20)
    return run


def test_a_run_on_gpus_is_kept_pictured_and_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- figures: -->\n<!-- end of figures -->")
    monkeypatch.setattr(figures, "GPUS", tmp_path / "gpus.json.gz")
    monkeypatch.setattr(figures, "PICTURES", tmp_path)
    monkeypatch.setattr(figures, "PAGES", {page: figures.expectations})
    assert " GPU" not in figures.expectations(Run.load(figures.KEPT))
    run = a_run_of_gpus()
    assert keep_run(run) == figures.GPUS
    assert Run.load(figures.GPUS) == run
    said = page.read_text()
    assert "| a call with a tensor of 4 KB, GPU to GPU | torch.distributed.rpc with device maps | 20x |" in said
    assert "| a call with a tensor of 64 MB, GPU to GPU | NCCL send/recv | 2x |" in said
    reduced = "| `all_reduce` of 1 KB to 8 MB, 2 to 4 GPUs"
    assert f"{reduced} | NCCL | 3x; in a CUDA graph 6x |" in said
    assert f"{reduced} | torch's symmetric memory | 0.5x; in a CUDA graph 2x |" in said
    assert "`make bench-gpu`, on 4 H on" in " ".join(said.split())
    drawn = (tmp_path / "gpus.svg").read_text()
    titles = ("2 GPUs", "4 GPUs", "2 GPUs, in a CUDA graph", "4 GPUs, in a CUDA graph", "1 KB", "8 MB", "0.5")
    assert all(f">{text}<" in drawn for text in titles)


def test_a_run_of_other_libraries_alone_is_pictured_and_quoted_until_a_full_run_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, page = tmp_path / "benchmark.json", tmp_path / "page.md"
    page.write_text("<!-- figures: -->\n<!-- end of figures -->")
    monkeypatch.setattr(figures, "KEPT", kept)
    monkeypatch.setattr(figures, "GPUS", tmp_path / "no run on GPUs")
    monkeypatch.setattr(figures, "PICTURES", tmp_path)
    monkeypatch.setattr(figures, "APART", {"peers": tmp_path / "peers.json"})
    monkeypatch.setattr(figures, "PAGES", {page: figures.results})
    a_run().save(kept)
    of_peers = with_peers(a_run())
    of_peers.rows = of_peers.rows[-1:]
    assert keep_run(of_peers) == tmp_path / "peers.json"
    assert "Ray" in (tmp_path / "benchmark.svg").read_text()
    assert page.read_text().count("Run `") == 2 and "| Ray |" in page.read_text()
    assert keep_run(with_peers(a_run())) == kept
    assert not (tmp_path / "peers.json").exists()
    assert page.read_text().count("Run `") == 1 and "| Ray |" in page.read_text()


@pytest.mark.parametrize(("unit", "shown"), [(Unit("us", 1e3), 2.0), (Unit("calls/s", 256e9, rate=True), 128e6)])
def test_units_show_nanoseconds_as_time_or_rate(unit: Unit, shown: float) -> None:
    assert unit.value(2000) == pytest.approx(shown)


def test_the_machine_is_described_without_naming_it() -> None:
    text = json.dumps(results.describe_machine())
    assert os.uname().nodename not in text or os.uname().nodename in ("", "localhost")
    assert "/" not in text.replace("calls/s", "")


def test_both_sides_are_measured_in_turns_in_one_invocation(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    command = [sys.executable, "-m", "benchmarks.run", "--quick", "--only", "tensor-1mb", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "1 MB tensors travel" in done.stdout
    row = Run.load(file).rows[0]
    assert [m.contestant for m in row.contestants] == [OURS, TORCH]
    assert [len(m.rounds) for m in row.contestants] == [5, 5]
    assert all(r.count >= 3 and 0 < r.p50 <= r.p99 for m in row.contestants for r in m.rounds)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(seconds=0.05, programs=None, quick=True) as lab:
        yield lab


# One of each group in its quickest form; in these, rounds are of one turn each.
@pytest.mark.parametrize(
    "name",
    [
        "noop-two-cores",
        "in-flight-torch-futures",
        "transport-unix-unpinned",
        "transport-tcp-one-core",
        "channel-shm-1mb",
        "channel-cma-1mb",
        "channel-basic-1mb",
        "channel-tcp-1mb",
        "channel-tensorpipe-1mb",
        "network-sent-4",
        "cpp-unpinned",
        "hogs-unpinned",
        "shared-256mb",
        "leaves-20kb",
        "tensor-64mb-busy",
        "gil-caller",
        "gil-server",
        "blocking-handler",
        "memory-tensors",
        "memory-replay",
        "group-2-barrier",
        "group-2-send",
        "group-4-all_reduce_empty",
        "group-network-broadcast",
    ],
)
def test_a_row_measures_every_figure_of_every_contestant(lab: Lab, name: str) -> None:
    (row,) = chosen(name, quick=True)
    try:
        turns = measure(row, lab, rounds=1)
    except Missing as missing:
        pytest.skip(str(missing))
    assert len(turns) == len(row.figures)
    for each in turns:
        assert list(each) == list(row.contestants())
        assert all(len(rounds) == 1 and rounds[0].count >= 1 for rounds in each.values())


@pytest.mark.parametrize("who", [OURS, TORCH])
def test_actors_are_measured_with_all_their_costs(lab: Lab, who: str) -> None:
    some = contestants.actors(who, 3)
    some.prepare(lab)
    turn = some.measure(lab, Placement.UNPINNED)
    assert isinstance(turn, dict)
    assert len(turn["each"]) >= 3
    assert turn["passed"][0] > 0 and turn["computed"][0] > 0
    lab.dismiss(larger_than=2)


@pytest.mark.parametrize("who", [OURS, GLOO])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_operation_of_a_group_writes_what_it_should(lab: Lab, who: str, ranks: int) -> None:
    # The ranks check what was written, and raise.
    for operation in group_rows.OPERATIONS:
        if operation != "ddp" and (str(ranks), operation) not in group_rows.NOT_IN_GROUPS:
            turn = group(who, operation, ranks, {"1kb": 1 << 10, "64kb": 1 << 16}).measure(lab, Placement.UNPINNED)
            assert isinstance(turn, dict)
            assert all(len(samples) >= 3 and min(samples) > 0 for samples in turn.values())


def test_an_operation_of_a_group_is_as_slow_as_its_slowest_rank() -> None:
    assert slowest([[1, 5, 3], [4, 2, 3]]) == [4, 5, 3]


def test_a_group_that_writes_something_else_is_a_failure() -> None:
    written = torch.tensor([1.0, 1.0, 2.0, 3.0])
    operation = Operation(lambda: None, lambda: None, lambda: written, [1.0, 2.0])
    with pytest.raises(AssertionError, match="not 2"):
        operation.check()
    written[3] = 2.0
    operation.check()


@pytest.mark.parametrize("who", [OURS, TORCH])
def test_starting_calling_and_ending_agents_are_measured_as_a_whole(lab: Lab, who: str) -> None:
    (nanoseconds,) = contestants.whole_lives(who, 4).measure(lab, Placement.UNPINNED)
    assert nanoseconds > 0


def test_a_contestant_that_fails_is_named_with_its_row_and_leaves_the_others_usable(lab: Lab) -> None:
    fails = Row("broken", "broken", (Figure(MICROSECONDS),), python(OURS, "tensors", size=-4))
    with pytest.raises(Failed, match="broken: tensorferry: RuntimeError"):
        measure(fails, lab, rounds=1)
    assert measure(replace(fails, ours=python(OURS, "sync")), lab, rounds=1)[0][OURS][0].count >= 3


def test_a_process_that_does_not_answer_is_abandoned() -> None:
    with Team("tensorferry.rpc", forked=True) as team:
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match="no answer in 1 s from caller0"):
            team.call(Placement.UNPINNED, "sync", patience=1, seconds=100)
        assert time.monotonic() - begin < 10


@pytest.mark.parametrize("forked", [False, True])
def test_no_process_outlives_a_driver_that_is_killed(forked: bool) -> None:
    code = (
        "import time; from benchmarks.teams import Team\n"
        f"team = Team('tensorferry.rpc', forked={forked})\n"
        "print(*[process.pid for process in team._processes], flush=True); time.sleep(600)"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 2
    driver.kill()
    driver.wait()
    driver.stdout.close()  # no communicate(): what is left over would hold the other end
    until = time.monotonic() + 20
    while any(_state(pid) not in "XZ" for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.01)


AT_ONCE = Contestant(lambda _: None, lambda *_: [1.0])


def test_a_library_that_is_not_installed_is_left_out_with_the_reason(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "PYTHON", Path(sys.executable))
    monkeypatch.setitem(strangers.MODULES, "Ray", "not_there")
    row = Row("peers", "peers", (Figure(MICROSECONDS),), AT_ONCE, {"Ray": stranger("Ray", "empty")})
    without: dict[str, str] = {}
    assert list(measure(row, lab, rounds=1, without=without)[0]) == [OURS]
    assert "Ray does not run here" in without["Ray"] and "not_there" in without["Ray"]


def test_another_library_measures_in_turns_and_is_stopped_meanwhile(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(strangers, "PACKAGE", "tests.python.programs")
    monkeypatch.setitem(strangers.MODULES, "Ray", "pipe_peer")
    row = Row("peers", "peers", (Figure(MICROSECONDS),), AT_ONCE, {"Ray": stranger("Ray", "empty")})
    assert measure(row, lab, rounds=2)[0]["Ray"][1].count >= 3
    pid = lab.stranger("Ray")._process.pid
    family = list(strangers.family(pid))
    assert len(family) == 2
    assert eventually(lambda: all(_state(each) == "T" for each in family))
    lab.dismiss()
    assert eventually(lambda: all(_state(each) in "XZ" for each in family))


def test_rows_with_other_libraries_are_measured_on_request() -> None:
    without, beside = chosen("", quick=True), chosen("", quick=True, peers=True)
    assert [row.name for row in beside if row not in without] == [
        *("peers-empty", "peers-in-flight", "peers-sent-1mb", "peers-sent-16mb", "peers-sent-64mb")
    ]


def test_a_row_beyond_the_machines_resources_gives_the_reason() -> None:
    there_is_none = contestants.in_new_pair("replay", ("callee", "both"), contestants.Scale(1, 1), 4, needs=1 << 60)
    with pytest.raises(Missing, match="GB of memory"):
        there_is_none.prepare(Lab(0, None, quick=True))


def test_busy_processes_compute_only_while_a_row_asks_for_them(lab: Lab) -> None:
    def measure_busy(_: Lab, placement: Placement) -> list[float]:
        return [results.busy_share(0.3)]

    row = Row(
        "busy", "busy", (Figure(PERCENT),), Contestant(lambda _: None, measure_busy), hogs=len(os.sched_getaffinity(0))
    )
    assert measure(row, lab, rounds=1)[0][OURS][0].p50 > 0.5
    until = time.monotonic() + 5  # a signal takes a moment
    while any(_state(process.pid) != "T" for process in lab.hogs._processes):
        assert time.monotonic() < until


def eventually(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + 10
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    return holds()


def _state(pid: int) -> str:
    """As in /proc; "X" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def test_a_row_is_chosen_by_its_whole_name_before_parts_of_names() -> None:
    assert [row.name for row in chosen("tensor-64mb", quick=False)] == ["tensor-64mb"]
    assert len(chosen("tensor-", quick=False)) > 1
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_ten_rows_are_the_core() -> None:
    assert len(chosen("", quick=False, core=True)) == 10


@pytest.mark.parametrize(("percent", "verdict"), [(1.5, "reached"), (2.5, "missed")])
def test_a_limit_is_met_by_a_smaller_figure_and_quoted_without_a_peer(percent: float, verdict: str) -> None:
    run = Run(machine={"cores": 2, "versions": {}, "busy_before": 0, "busy_after": 0, "processor": ""})
    growth = [Measurement(run.id, "memory", OURS, (Round(percent, percent, 1),))]
    run.rows.append(RowResult("memory", "growth", "%", 1, False, "unpinned", {}, 2, growth))
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report.table(run))
    assert f"at most 2 {verdict}" in console.export_text()
    assert verdict in figures.results(run)


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_figures_in_the_docs_equal_those_of_the_saved_run(page: Path) -> None:
    assert page.read_text() == figures.filled(page, Run.load(figures.KEPT))
