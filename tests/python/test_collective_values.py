"""The table in docs/collectives.md of the tensors that each operation takes: scripts/collective_values.py makes it."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "collective_values.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_operations_take_the_tensors_that_the_table_says(script: dict[str, Any]) -> None:
    told = script["ours_on_the_page"]()
    found = script["measure"]("tensorferry", every=7)  # by night all
    assert len(found) == 20
    for (_, kind, operation), (outcome, error) in found.items():
        assert told[kind, operation] == outcome, (kind, operation, error)


@pytest.mark.soak
@pytest.mark.skipif(torch.__version__ < "2.15", reason="the table tells of Gloo in torch 2.15")
def test_the_whole_table_is_right_also_of_gloo(script: dict[str, Any]) -> None:
    assert script["table"](script["measure"](*script["BACKENDS"])) == script["on_the_page"]()
