"""Builds a C++ program with a channel of its own, and runs it: python main.py [--test]"""

import argparse
import subprocess
import tempfile
from pathlib import Path

import tensorferry.cmake

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--prefix", type=Path, default=tensorferry.cmake.prefix(), help="where TensorFerry is installed"
    )
    parser.add_argument("--test", action="store_true", help="also run the tests of the channel, which need GoogleTest")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        build = Path(folder) / "build"
        subprocess.run(
            ["cmake", "-S", HERE, "-B", build, f"-DCMAKE_PREFIX_PATH={options.prefix}", "-DCMAKE_BUILD_TYPE=Release"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        target = "all" if options.test else "own_channel"
        subprocess.run(["cmake", "--build", build, "--target", target], check=True, stdout=subprocess.DEVNULL)
        subprocess.run([build / "own_channel", folder], check=True)
        if options.test:
            subprocess.run(["ctest", "--test-dir", build, "--output-on-failure", "--no-tests=error"], check=True)


if __name__ == "__main__":
    main()
