"""Builds embed.cpp, a C++ program with an agent in it, and calls it, and is called by it: python main.py"""

import argparse
import subprocess
import tempfile
import threading
from pathlib import Path

import tensorferry
import tensorferry.cmake
import tensorferry.rpc as rpc
import torch

HERE = Path(__file__).parent


@rpc.expose
def weigh(values: torch.Tensor, by: float) -> float:
    return float(values.sum() * by)


def build(folder: Path, prefix: Path) -> Path:
    """What a user of CMake types."""
    subprocess.run(
        ["cmake", "-S", HERE, "-B", folder, f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_BUILD_TYPE=Release"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    subprocess.run(["cmake", "--build", folder], check=True, stdout=subprocess.DEVNULL)
    return folder / "embed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--prefix", type=Path, default=tensorferry.cmake.prefix(), help="where TensorFerry is installed"
    )
    prefix = parser.parse_args().prefix
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder), prefix)
        server = tensorferry.StoreServer()
        rpc.init_rpc("python", store=tensorferry.connect_store("127.0.0.1", server.port))
        offsets = rpc.publish({"offsets": torch.zeros(4)}, name="offsets")
        rpc.expose(lambda: offsets.update({"offsets": torch.full((4,), 2.5)}), name="next_offsets")
        ready = threading.Event()
        rpc.expose(ready.set, name="ready")
        with subprocess.Popen([program, f"127.0.0.1:{server.port}"], stdin=subprocess.PIPE) as embedded:
            assert ready.wait(60), "the C++ program has not come"
            values = torch.arange(6.0)
            print("Python called mean() of C++:", rpc.rpc_sync("cpp", "mean", args=(values,)))
            print("and count_words():", rpc.rpc_sync("cpp", "count_words", kwargs={"text": "to be or not to be"}))
            try:
                rpc.rpc_sync("cpp", "mean", args=(values[:0],))
            except tensorferry.errors.InvalidArgument as error:
                print("Python was told of C++'s exception:", error)
            embedded.communicate(timeout=30)  # the end of its input ends it
            assert embedded.returncode == 0
        rpc.shutdown()


if __name__ == "__main__":
    main()
