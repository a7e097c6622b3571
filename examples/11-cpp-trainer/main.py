"""Builds trainer.cpp and runs a parameter server and two trainers in C++: python main.py"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import tensorferry
import tensorferry.cmake

HERE = Path(__file__).parent


def build(folder: Path, prefix: Path, gpu: bool) -> Path:
    """What a user of CMake types."""
    options = [
        f"-DCMAKE_PREFIX_PATH={prefix}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DGPU={'ON' if gpu else 'OFF'}",
    ]
    subprocess.run(
        ["cmake", "-S", HERE, "-B", folder, "-DCMAKE_BUILD_TYPE=Release", *options],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    subprocess.run(["cmake", "--build", folder], check=True, stdout=subprocess.DEVNULL)
    return folder / "trainer"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="train on GPU 0")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--prefix", type=Path, default=tensorferry.cmake.prefix(), help="where TensorFerry is installed"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder), options.prefix, options.gpu)
        server = tensorferry.StoreServer()
        command = [str(server.port), str(options.steps)]
        ranks = [
            subprocess.Popen([program, str(rank), *command], stdout=subprocess.PIPE, text=True) for rank in range(3)
        ]
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    print("".join(outputs), end="")
    assert all(rank.returncode == 0 for rank in ranks), "a process has failed"
    for accuracy in re.findall(r"batches: ([\d.]+)", "".join(outputs)):
        assert float(accuracy) > 0.8, f"the accuracy {accuracy} is not above 0.8"


if __name__ == "__main__":
    main()
