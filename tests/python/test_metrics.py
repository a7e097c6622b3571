"""Metrics: what is counted, that docs/metrics.md names all of it, and how it is exported."""

from __future__ import annotations

import json
import math
import os
import re
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import tensorferry
import torch
from conftest import Agents, Cluster, eventually
from tensorferry import collectives, errors, exporting, metrics

ROOT = Path(__file__).parents[2]


def read(port: int | None, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return str(answer.read().decode())


def nothing() -> None:
    pass


# ---- names


def test_the_page_has_each_metric_with_its_kind_unit_and_labels() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    rows = {
        name: (kind, unit, labels, text)
        for name, kind, unit, labels, text in re.findall(
            r"^\| `(tensorferry_\w+)` \| (\w+) \| (\w*) ?\| ([^|]*?) ?\| (.*?) \|$", page, re.MULTILINE
        )
    }
    known = {
        each.name: (each.kind, each.unit, ", ".join(f"`{label}`" for label in each.labels), each.help)
        for each in metrics.all_metrics()
        if each.name.startswith("tensorferry_")
    }
    assert rows == known


def test_names_follow_the_conventions_of_prometheus() -> None:
    for each in metrics.all_metrics():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", each.name)
        assert each.name.endswith("_total") == (each.kind == "counter")
        if each.unit:
            assert each.name.removesuffix("_total").endswith(f"_{each.unit}")
        assert each.help.endswith(".") and "agent" not in each.labels


def test_the_dashboard_queries_metrics_that_exist() -> None:
    dashboard = json.loads((ROOT / "contrib/grafana/tensorferry.json").read_text())
    expressions = re.findall(r'"expr": "((?:[^"\\]|\\.)*)"', json.dumps(dashboard))
    assert len(expressions) > 10
    queried = set(re.findall(r"tensorferry_\w+", " ".join(expressions)))
    known = {each.name: each for each in metrics.all_metrics()}
    for name in queried:
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        assert name in known or known[base].kind == "histogram", name
    labels = {label for by in re.findall(r"by \(([^)]*)\)", " ".join(expressions)) for label in by.split(", ")}
    assert labels <= {"le", "agent", *(label for each in known.values() for label in each.labels)}


# ---- what is counted


def test_calls_bytes_and_errors_are_counted(pair: tuple[tensorferry.Agent, tensorferry.Agent]) -> None:
    a, _ = pair
    for _ in range(5):
        a.rpc_sync("b", nothing)
    a.rpc_sync("b", torch.add, args=(torch.ones(1 << 18), 1))
    with pytest.raises(errors.NotFound):
        a.rpc_sync("b", "missing")
    now = a.metrics()
    assert now.agent == "a"
    assert now.value("tensorferry_calls_sent_total") == 7
    assert now.value("tensorferry_calls_failed_total", error="NotFound") == 1
    assert now.value("tensorferry_calls_failed_total") == 1
    assert now.value("tensorferry_calls_pending") == 0
    assert now.value("tensorferry_sent_bytes_total") >= 1 << 20
    assert now.value("tensorferry_link_sent_bytes_total", peer="b") == now.value("tensorferry_sent_bytes_total")
    assert now.value("tensorferry_links", state="up") == 1
    calls = now.histogram("tensorferry_call_seconds")
    assert calls.count == 7 and calls.sum > 0
    assert 0 < calls.quantile(0.5) <= calls.quantile(1) < math.inf


def test_groups_are_counted(pair: tuple[tensorferry.Agent, tensorferry.Agent]) -> None:
    import concurrent.futures

    def member(agent: tensorferry.Agent) -> float:
        group = collectives.form_group(["a", "b"], agent=agent, label="pair")
        group.all_reduce(torch.ones(4)).wait()
        now = agent.metrics()
        assert now.value("tensorferry_groups") == 1
        one_shot = {"group": "pair", "operation": "all_reduce", "path": "host", "algorithm": "one_shot"}
        assert now.value("tensorferry_group_operations_by_path_total", **one_shot) == 1, str(now)
        return now.value("tensorferry_group_operations_ended_total", group="pair")

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(member, pair)) == [1, 1]


GROUPS_OF_TORCH = """
import gc, torch, torch.distributed as dist, tensorferry, tensorferry.c10d
from tensorferry import metrics
dist.init_process_group("tensorferry", store=dist.HashStore(), rank=0, world_size=1)
agent = tensorferry.c10d.group_of()._agent
lazy = dist.new_group([0], pg_options=tensorferry.c10d.Options(lazy=True, name="late"))
assert agent.metrics().value("tensorferry_groups") == 1  # the lazy one is not formed
for group in (None, None, lazy):
    dist.all_reduce(torch.ones(3), group=group)
now = agent.metrics()
assert now.value("tensorferry_groups") == 2
assert now.value("tensorferry_group_operations_started_total", group="late") == 1, str(now)
assert now.value("tensorferry_group_operations_ended_total") == 3, str(now)
assert 'group="late"} 1' in metrics.text_of([now])
dist.destroy_process_group()
del group, lazy
gc.collect()
assert agent.metrics().value("tensorferry_groups") == 0
"""


def test_process_groups_of_torch_are_counted() -> None:
    subprocess.run([sys.executable, "-c", GROUPS_OF_TORCH], check=True, timeout=120)


def test_an_agent_without_metrics_counts_no_times(agents: Agents) -> None:
    a, _ = agents("a", metrics=False), agents("b")
    a.rpc_sync("b", nothing)
    assert a.metrics().histogram("tensorferry_call_seconds").count == 0
    assert a.metrics().value("tensorferry_calls_sent_total") == 1


def test_wrong_names_and_kinds_are_refused(agents: Agents) -> None:
    now = agents("a").metrics()
    with pytest.raises(KeyError, match=r"docs/metrics\.md"):
        now.value("tensorferry_misspelt")
    with pytest.raises(TypeError, match="is a histogram"):
        now.value("tensorferry_call_seconds")
    with pytest.raises(TypeError, match="is no histogram"):
        now.histogram("tensorferry_threads")


def test_a_source_adds_metrics(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_sources", list(metrics._sources))
    steps = metrics.Metric("trainer_steps_total", "counter", "", ("phase",), "Steps.")
    metrics.add_source([steps], lambda agent: [metrics.Sample(steps, ('"a"\n',), 3)])
    broken = metrics.Metric("broken", "gauge", "", (), "Fails.")

    def fail(agent: tensorferry.Agent) -> list[metrics.Sample]:
        raise RuntimeError("no value")

    metrics.add_source([broken], fail)
    now = agents("a").metrics()
    assert now.value("trainer_steps_total") == 3
    assert 'trainer_steps_total{agent="a",phase="\\"a\\"\\n"} 3\n' in str(now)
    with pytest.raises(ValueError, match="already"):
        metrics.add_source([steps], fail)


# ---- the text of Prometheus


def check_format(text: str) -> dict[str, float]:
    """Checks each line of the text, and returns the samples."""
    samples: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kinds[name] = line.split(" ")
        elif not line.startswith("# HELP "):
            match = re.fullmatch(r'([a-z_0-9]+)\{((?:[a-z_]+="(?:[^"\\]|\\.)*",?)+)\} (\S+)', line)
            assert match, line
            base = re.sub(r"_(bucket|sum|count)$", "", match[1])
            assert match[1] in kinds or kinds[base] == "histogram", line
            samples[f"{match[1]}{{{match[2]}}}"] = float(match[3])
    return samples


def test_the_text_has_one_type_for_each_name_and_whole_histograms(agents: Agents) -> None:
    a, b = agents("a"), agents("b")
    a.rpc_sync("b", nothing)
    text = metrics.text_of([a.metrics(), b.metrics()])
    samples = check_format(text)
    types = re.findall(r"^# TYPE (\w+)", text, re.MULTILINE)
    assert len(types) == len(set(types))
    buckets = [value for name, value in samples.items() if name.startswith('tensorferry_call_seconds_bucket{agent="a"')]
    assert buckets == sorted(buckets) and buckets[-1] == samples['tensorferry_call_seconds_count{agent="a"}'] == 1


# ---- exports


def test_a_port_of_this_host_serves_the_metrics_of_all_agents_of_the_process(agents: Agents) -> None:
    a = agents("a", metrics_port=0)
    agents("b", metrics_port="0")
    exporter = a.__dict__["_exporter"]
    assert exporter._server.server_address[0] == "127.0.0.1"
    samples = check_format(read(exporter.port))
    assert 'tensorferry_threads{agent="a"}' in samples and 'tensorferry_threads{agent="b"}' in samples
    with pytest.raises(urllib.error.HTTPError, match="404"):
        read(exporter.port, "/elsewhere")
    port = exporter.port
    agents.leave()
    with pytest.raises(OSError):
        read(port)


def test_a_range_of_ports_gives_the_first_free_one(agents: Agents) -> None:
    first = exporting.Exporter("0", None)
    assert first.port is not None
    try:
        a = agents("a", metrics_port=f"{first.port}-{first.port + 40}")
        assert first.port < a.__dict__["_exporter"].port <= first.port + 40
        with pytest.raises(errors.InternalError, match="Give more ports"):
            agents("c", metrics_port=first.port)
    finally:
        assert first._server is not None
        first._server.server_close()


@pytest.mark.parametrize("port", ["", "x", "1:2:x", "70000", "9-1", "-1"])
def test_wrong_ports_are_refused(agents: Agents, port: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="metrics_port"):
        agents("a", metrics_port=port)
    agents("a").leave()  # the name was freed


def test_the_file_is_whole_and_goes_with_the_last_agent(agents: Agents, tmp_path: Path) -> None:
    a = agents("a", metrics_file=tmp_path / "tf.prom")
    file = tmp_path / f"tf.{os.getpid()}.prom"
    until = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    assert 'tensorferry_threads{agent="a"}' in check_format(file.read_text())
    assert stat.S_IMODE(file.stat().st_mode) & stat.S_IRUSR
    a.leave()
    assert list(tmp_path.iterdir()) == []


def test_the_environment_names_the_port(tmp_path: Path) -> None:
    program = (
        "import tensorferry, torch, sys; from torch.distributed import HashStore;"
        "agent = tensorferry.Agent('a', store=HashStore()); print(agent._exporter.port, flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "TENSORFERRY_METRICS_PORT": "0"}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        assert 'tensorferry_threads{agent="a"}' in check_format(read(int(process.stdout.readline())))
        process.stdin.close()
        assert process.wait(180) == 0


def test_names_of_peers_cannot_break_the_text() -> None:
    hostile = metrics.Sample(metrics._HELD, ('x"} 1\ntensorferry_evil{a="',), 1)
    line = metrics.text_of([metrics.Metrics("a", [hostile])]).splitlines()[-1]
    assert check_format("# TYPE tensorferry_references_held gauge\n" + line) and "\n" not in line


def test_torchs_debug_server_shows_the_agents_of_the_process(agents: Agents) -> None:
    distributed = pytest.importorskip("torch._C._distributed_c10d")
    if not hasattr(distributed, "_register_handler"):
        pytest.skip("this torch has no worker server")
    agents("seen")
    server = distributed._WorkerServer("127.0.0.1", 0)
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{server.port}/handler/tensorferry", method="POST", data=b"")
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
    finally:
        server.shutdown()
    assert "<tensorferry.Agent 'seen', rank -1>" in text
    assert 'tensorferry_threads{agent="seen"}' in text


def test_the_page_of_the_debug_server_has_a_section_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    frontend = pytest.importorskip("torch.distributed.debug._frontend")
    from tensorferry import debug_page

    page = debug_page.page()
    answers = [frontend.Response(200, "calls of rank 0"), frontend.Response(503, "gone")]
    monkeypatch.setattr(frontend, "fetch_all", lambda *args, **kwargs: (["http://one", "http://two"], answers))
    assert page.dump() == "http://one\ncalls of rank 0\nhttp://two\ngone"
    assert [route.path for route in page.routes()] == ["/tensorferry"]

    class Rendered:
        def render_template(self, name: str, **values: Any) -> bytes:
            import jinja2

            base = "{% block header %}{% endblock %}{% block content %}{% endblock %}"
            loader = jinja2.DictLoader({"base.html": base, **page.templates()})
            environment = jinja2.Environment(loader=loader, autoescape=True)
            environment.globals.update(zip=zip, enumerate=enumerate)
            return environment.get_template(name).render(**values).encode()

    request = type("Request", (), {"frontend": Rendered()})()
    shown = page.routes()[0].handler(request).decode()
    assert "Rank 0: http://one" in shown and "calls of rank 0" in shown and "status=503" in shown


def test_a_forked_child_leaves_the_port_to_its_parent(agents: Agents) -> None:
    a = agents("a", metrics_port=0)
    port = a.__dict__["_exporter"].port
    child = os.fork()
    if child == 0:
        time.sleep(120)
        os._exit(0)
    try:
        assert 'agent="a"' in read(port)
        a.leave()
        with pytest.raises(OSError):
            read(port)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_agents_in_other_processes_have_metrics_too(cluster: Cluster) -> None:
    import tensorferry.rpc as rpc

    cluster.start(1)
    rpc.rpc_sync("worker1", nothing)
    assert rpc.metrics().value("tensorferry_link_calls_made_total", peer="worker1") >= 1
    assert eventually(lambda: rpc.rpc_sync("worker1", served) >= 1), "a call counts after its answer"


def served() -> float:
    import tensorferry.rpc as rpc

    return rpc.metrics().value("tensorferry_calls_served_total")
