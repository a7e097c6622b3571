"""Runs PyTorch's RPC suite on TensorFerry's backend: run.py [cpu] [faulty] [gpu] [options]"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch_suite"))

if __name__ == "__main__":
    import runner
    import suite

    sys.exit(
        runner.main(
            runner.Suite(
                title="PyTorch's RPC suite on TensorFerry",
                page="docs/torch-rpc-conformance.md",
                groups=("cpu", "faulty", "gpu"),
                default=("cpu", "faulty"),
                tests_of=suite.tests_of,
                case=suite.case,
                needs_an_interpreter=lambda test: "Cuda" in test.split(".")[0],
            )
        )
    )
