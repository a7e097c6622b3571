"""Runs PyTorch's suite of torch.distributed on the backend "tensorferry": run.py [own] [gloo] [mpi] [options]"""

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
                title="PyTorch's suite of torch.distributed on TensorFerry",
                page="docs/torch-c10d-conformance.md",
                groups=suite.GROUPS,
                tests_of=suite.tests_of,
                case=suite.case,
            )
        )
    )
