"""A trainer publishes its weights for three samplers; one is killed and joins again: python main.py [--gpu]"""

import argparse
import multiprocessing
import os
import time
from multiprocessing.process import BaseProcess

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes share this machine's cores

import tensorferry
import tensorferry.rpc as rpc
import torch
from tensorferry import errors
from torch import nn

STEPS = 60
SAMPLERS = 3
results: dict[str, tuple[int, int]] = {}


def network() -> nn.Sequential:
    # Training changes the small layer alone; the embedding, 8 MB, stays. So versions differ in a few blocks.
    embedding = nn.Embedding(8192, 256)
    embedding.weight.requires_grad_(False)
    return nn.Sequential(embedding, nn.Linear(256, 1))


def report(name: str, version: int, samples: int) -> None:
    """A sampler tells the trainer how far it has come."""
    results[name] = (version, samples)


def sample(port: int, name: str, device: str) -> None:
    rpc.init_rpc(name, store=tensorferry.connect_store("127.0.0.1", port))
    model = network().to(device)
    loader = rpc.subscribe("policy", from_="trainer").into(model)
    samples = 0
    try:
        while True:
            version = loader.wait(timeout=30)
            # All weights are of one version: the trainer keeps its number in the bias.
            linear = model.get_submodule("1")
            bias, step = linear.get_parameter("bias").item(), linear.get_parameter("weight")[0, 0].item()
            assert bias == step, f"torn: {bias} and {step}"
            with torch.no_grad():
                samples += len(model(torch.randint(8192, (32,), device=device)))
            rpc.rpc_sync("trainer", report, args=(name, version, samples))
    except errors.NotFound:  # the trainer has withdrawn the publication
        print(f"{name}: {samples} samples, the last with version {loader.version}, {loader.carried}", flush=True)
    rpc.shutdown()


def until(condition: str, holds: object) -> None:
    assert callable(holds)
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end, f"no sampler came to this: {condition}"
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", action="store_true", help="all processes have their weights on GPU 0")
    gpu = parser.parse_args().gpu
    device = "cuda:0" if gpu else "cpu"
    context = multiprocessing.get_context("spawn")
    server = tensorferry.StoreServer("127.0.0.1")
    rpc.init_rpc("trainer", store=tensorferry.connect_store("127.0.0.1", server.port))
    model = network().to(device)
    publication = rpc.publish(model, name="policy", checksums=not gpu, on_gpu=gpu)

    def start(name: str) -> BaseProcess:
        process = context.Process(target=sample, args=(server.port, name, device))
        process.start()
        return process

    samplers = {f"sampler{i}": start(f"sampler{i}") for i in range(SAMPLERS)}
    until("all sample", lambda: train(model, publication) and len(results) == SAMPLERS)
    samplers["sampler1"].kill()
    samplers["sampler1"].join()
    print(f"killed sampler1, which had sampled with version {results.pop('sampler1')[0]}", flush=True)
    for _ in range(STEPS):
        train(model, publication)
    samplers["sampler1"] = start("sampler1")
    until("sampler1 samples again", lambda: train(model, publication) and "sampler1" in results)
    print(f"sampler1 is back, with version {results['sampler1'][0]}", flush=True)
    last = publication.version
    until("all have the last version", lambda: all(version >= last for version, _ in results.values()))
    publication.withdraw()
    for process in samplers.values():
        process.join(60)
        assert process.exitcode == 0, process
    print(f"published {last} versions of {sum(each.nbytes for each in model.state_dict().values()) >> 20} MB")
    rpc.shutdown()


def train(model: nn.Sequential, publication: tensorferry.Publication) -> int:
    """One step: what it changes is the number of the version."""
    with torch.no_grad():
        for parameter in model.get_submodule("1").parameters():
            parameter.fill_(publication.version + 1)
    return publication.update(model, timeout=30)


if __name__ == "__main__":
    main()
