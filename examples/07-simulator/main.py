"""Learns to balance poles that a C++ simulator moves, a thousand at once: python main.py"""

import argparse
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import tensorferry
import tensorferry.cmake
import tensorferry.rpc as rpc
import torch

HERE = Path(__file__).parent
LONGEST = 500  # steps of an episode: the greatest return
GOAL = 300


def build(folder: Path, prefix: Path) -> Path:
    subprocess.run(
        ["cmake", "-S", HERE, "-B", folder, f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_BUILD_TYPE=Release"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    subprocess.run(["cmake", "--build", folder], check=True, stdout=subprocess.DEVNULL)
    return folder / "simulator"


def returns_of(policies: torch.Tensor, seed: int) -> tuple[torch.Tensor, int]:
    """How long each policy, four weights, balances a pole of its own; and how many steps were simulated."""
    observations = rpc.rpc_sync("simulator", "reset", args=(len(policies), seed))
    going = torch.ones(len(policies), dtype=torch.bool)
    returns = torch.zeros(len(policies))
    steps = 0
    while going.any() and steps < LONGEST:
        actions = (observations * policies).sum(1) > 0
        observations, ended = rpc.rpc_sync("simulator", "step", args=(actions,))
        returns += going
        going &= ~ended
        steps += 1
    return returns, steps * len(policies)


def learn(environments: int, generations: int) -> float:
    """The cross-entropy method: the best tenth of the policies says where the next are looked for."""
    dice = torch.Generator().manual_seed(0)
    mean, spread = torch.zeros(4), torch.ones(4)
    best = torch.zeros(1)
    for generation in range(generations):
        policies = mean + spread * torch.randn(environments, 4, generator=dice)
        start = time.perf_counter()
        returns, steps = returns_of(policies, seed=generation)
        rate = steps / (time.perf_counter() - start)
        best = returns.topk(max(2, environments // 10)).values
        elite = policies[returns.topk(len(best)).indices]
        mean, spread = elite.mean(0), elite.std(0) + 0.05
        print(f"generation {generation}: mean return {returns.mean():5.1f}, best {best[0]:.0f}, {rate:,.0f} steps/s")
    returns, _ = returns_of(mean.repeat(environments, 1), seed=generations)
    return float(returns.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--prefix", type=Path, default=tensorferry.cmake.prefix(), help="where TensorFerry is installed"
    )
    parser.add_argument("--environments", type=int, default=1000)
    parser.add_argument("--generations", type=int, default=6)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder), arguments.prefix)
        server = tensorferry.StoreServer()
        rpc.init_rpc("learner", store=tensorferry.connect_store("127.0.0.1", server.port))
        ready = threading.Event()
        rpc.expose(ready.set, name="ready")
        with subprocess.Popen([program, f"127.0.0.1:{server.port}"], stdin=subprocess.PIPE) as simulator:
            assert ready.wait(60), "the simulator has not come"
            after = learn(arguments.environments, arguments.generations)
            simulator.communicate(timeout=30)  # the end of its input ends it
            assert simulator.returncode == 0
        rpc.shutdown()
    print(f"the mean policy balances {arguments.environments} other poles for {after:.1f} of {LONGEST} steps")
    assert after > GOAL, f"it has not learned: {after:.1f} is not above {GOAL}"


if __name__ == "__main__":
    main()
