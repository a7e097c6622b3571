"""Builds a channel, a reduction and a converter of a program's own, and uses them from C++ and Python:
python main.py [--test]"""

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tensorferry.cmake
import torch
import torch.distributed as dist

HERE = Path(__file__).parent


def use_the_plugin(library: Path, folder: str) -> None:
    """Two agents of this process, which have the channel and the reduction of the library."""
    os.environ["SPOOL_FOLDER"] = folder
    print("Python loaded", ", ".join(tensorferry.load_plugin(library)))
    names, store = ["a", "b"], dist.HashStore()
    agents = [tensorferry.Agent(name, store=store, channels="spool:200") for name in names]  # above xth
    ones = torch.ones(1 << 20)
    print("the sum is", agents[0].rpc_sync("b", torch.sum, (ones,), require="spool").item())  # waits for spool's probe
    print("a tensor goes by", agents[0].explain("b").channel)
    with ThreadPoolExecutor() as pool:
        groups = list(pool.map(lambda agent: tensorferry.collectives.form_group(names, agent=agent), agents))
        works = [group.all_reduce(torch.zeros(2), "log_add_exp") for group in groups]
        results = list(pool.map(lambda work: work.wait(), works))
        print("log(exp(0) + exp(0)) is", results[0])
    for agent in agents:
        agent.leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--prefix", type=Path, default=tensorferry.cmake.prefix(), help="where TensorFerry is installed"
    )
    parser.add_argument("--test", action="store_true", help="also run the tests of the channel, which need GoogleTest")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        build = Path(folder) / "build"
        found = [f"-DCMAKE_PREFIX_PATH={options.prefix}", f"-DPython_EXECUTABLE={sys.executable}"]
        subprocess.run(
            ["cmake", "-S", HERE, "-B", build, "-DCMAKE_BUILD_TYPE=Release", *found],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        targets = ["all"] if options.test else ["own_channel", "own_device", "spool_plugin"]
        subprocess.run(["cmake", "--build", build, "--target", *targets], check=True, stdout=subprocess.DEVNULL)
        subprocess.run([build / "own_channel", folder], check=True)
        subprocess.run([build / "own_device"], check=True)
        use_the_plugin(build / "libspool_plugin.so", folder)
        if options.test:
            subprocess.run(["ctest", "--test-dir", build, "--output-on-failure", "--no-tests=error"], check=True)


if __name__ == "__main__":
    main()
