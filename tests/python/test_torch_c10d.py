"""A fixed twentieth of PyTorch's own suite of torch.distributed runs here, and all of it by tests/torch_c10d."""

from __future__ import annotations

from pathlib import Path

from conftest import run_a_part


def test_a_fixed_twentieth_of_pytorchs_suite_passes(tmp_path: Path) -> None:
    run_a_part("torch_c10d", 20, tmp_path)
