"""device=, device maps and devices=, without a GPU; test_cuda.py has the tests that need one."""

import re
from pathlib import Path

import pytest
import tensorferry
import tensorferry.rpc as rpc
import torch
from conftest import Agents, Cluster

PeerPair = tuple[tensorferry.Agent, tensorferry.Agent]
BEYOND = torch.cuda.device_count()  # the index of no GPU


def where(x: torch.Tensor) -> str:
    return str(x.device)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), {"cpu": "cpu"}, {}, None])
def test_a_cpu_tensor_can_be_kept_on_the_cpu(pair: PeerPair, device: object) -> None:
    a, _ = pair
    assert a.rpc_sync("b", where, args=(torch.ones(3),), device=device) == "cpu"
    assert a.rpc_async("b", where, args=(torch.ones(3),), device=device).wait() == "cpu"
    assert a.remote("b", where, args=(torch.ones(3),), device=device).to_here(device="cpu") == "cpu"


@pytest.mark.parametrize("device", [BEYOND, f"cuda:{BEYOND}", torch.device("cuda", BEYOND), {"cpu": BEYOND}])
@pytest.mark.parametrize("elements", [1, 100_000])
def test_a_device_that_the_peer_lacks_is_reported_with_its_devices(
    pair: PeerPair, device: object, elements: int
) -> None:
    a, _ = pair
    for _ in range(2):  # the link stays up
        with pytest.raises(tensorferry.errors.InvalidArgument, match=f'cuda:{BEYOND} of "b", which has cpu'):
            a.rpc_sync("b", where, args=(torch.ones(elements),), device=device)
    assert a.rpc_sync("b", where, args=(torch.ones(elements),)) == "cpu"
    with pytest.raises(tensorferry.errors.InvalidArgument, match="which has cpu"):
        a.explain("b", torch.ones(elements), device=device)


def test_a_result_for_a_missing_device_fails_its_call(pair: PeerPair) -> None:
    a, _ = pair
    reference = a.remote("b", torch.ones, args=(10,))
    with pytest.raises(tensorferry.errors.InvalidArgument, match=f'cuda:{BEYOND} of "a", which has cpu'):
        reference.to_here(device=BEYOND)
    assert reference.to_here().sum() == 10


def test_only_tensors_are_moved(pair: PeerPair) -> None:
    a, _ = pair
    value = {"text": "x" * 50_000, "array": torch.arange(9000).numpy(), "bytes": b"y" * 50_000}
    back = a.rpc_sync("b", dict, args=(value,), device=BEYOND)
    assert back["text"] == value["text"] and (back["array"] == value["array"]).all()


@pytest.mark.parametrize(
    "device, error",
    [
        ("tpu", ValueError),
        ("meta", ValueError),
        ("mps", ValueError),
        (-1, ValueError),
        (1000, ValueError),
        (True, TypeError),
        (1.5, TypeError),
        ({"cpu": "cpu", 0: "cpu"}, ValueError),
        ({"cpu": 0, torch.device("cpu"): 1}, ValueError),
    ],
)
def test_an_invalid_device_is_refused_before_the_call_is_sent(
    pair: PeerPair, device: object, error: type[Exception]
) -> None:
    a, _ = pair
    before = a.counters().calls_sent
    with pytest.raises(error):
        a.rpc_sync("b", where, args=(torch.ones(3),), device=device)
    assert a.counters().calls_sent == before


def test_a_calls_own_placement_precedes_the_device_map(agents: Agents) -> None:
    a = agents("a", device_maps={"b": {"cpu": BEYOND}})
    agents("b")
    with pytest.raises(tensorferry.errors.InvalidArgument, match="which has cpu"):
        a.rpc_sync("b", where, args=(torch.ones(3),))
    with pytest.raises(tensorferry.errors.InvalidArgument, match="which has cpu"):
        a.remote("b", list).rpc_sync().append(torch.ones(3))
    assert a.rpc_sync("b", where, args=(torch.ones(3),), device="cpu") == "cpu"
    assert a.rpc_sync("b", max, args=(1, 2)) == 2


def test_device_maps_are_read_from_torchs_options(cluster: Cluster) -> None:
    options = rpc.TensorPipeRpcBackendOptions()
    options.set_device_map("worker1", {"cpu": f"cuda:{BEYOND}"})
    cluster.start(1, rpc_backend_options=options)
    with pytest.raises(tensorferry.errors.InvalidArgument, match="which has cpu"):
        rpc.rpc_sync("worker1", where, args=(torch.ones(3),))


def test_device_maps_and_devices_are_checked_when_an_agent_joins(agents: Agents) -> None:
    with pytest.raises(ValueError, match="not one to one"):
        agents("a", device_maps={"b": {"cpu": 0, "cuda:1": 0}})
    with pytest.raises(tensorferry.errors.InvalidArgument, match=f"torch sees {BEYOND} GPUs"):
        agents("a", devices=[BEYOND])
    with pytest.raises(ValueError, match="not meta"):
        agents("a", devices=["meta"])
    assert agents("a", devices=[]).rpc_sync("a", where, args=(torch.ones(3),)) == "cpu"


def test_no_source_file_calls_cuda_synchronisation() -> None:
    """The functions that block a thread until a GPU is done are not called, and not loaded, anywhere."""
    waits = re.compile(
        r"(Device|Stream|Event|Ctx)Synchronize|(device|stream|event|ctx)_synchronize|(?<!void )(?<!def )\bsynchronize\("
    )
    root = Path(__file__).parents[2]
    sources = [
        path for folder in ("channels", "converters", "agent", "rpc", "python") for path in root.glob(f"{folder}/**/*")
    ]
    sources = [path for path in sources if path.suffix in (".cpp", ".h", ".py")]
    assert any(path.name == "cuda.cpp" for path in sources)
    found = [
        f"{path.name}: {line.strip()}"
        for path in sources
        for line in path.read_text().splitlines()
        if waits.search(line)
    ]
    assert not found


def test_no_source_of_ours_waits_for_a_gpu() -> None:
    """Calls stay in the order of streams: nothing on their path may name what blocks a thread until a GPU is done."""
    root = Path(__file__).parents[2]
    folders = ["agent", "channels", "converters", "python/csrc", "rpc"]
    sources = [file for folder in folders for kind in ("*.cpp", "*.h") for file in (root / folder).rglob(kind)]
    assert root / "converters/cuda.cpp" in sources and root / "channels/cuda/api.h" in sources
    blocking = re.compile(
        r"(cuda|cu)(Device|Ctx|Stream|Event)Synchronize|cudaMemcpy\b|\bcuMemcpy(DtoH|HtoD|DtoD)?\b|->synchronize\("
    )
    found = [
        f"{file.relative_to(root)}: {match[0]}" for file in sources for match in blocking.finditer(file.read_text())
    ]
    assert not found
