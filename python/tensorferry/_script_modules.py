"""How scripted modules travel among arguments and results: as ``torch.jit.save`` writes them."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.jit import ScriptModule


def reduce(module: ScriptModule) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
    """What pickle is to do with a scripted module: its own way refuses them."""
    saved = io.BytesIO()
    torch.jit.save(module, saved)
    return load, (saved.getvalue(),)


def load(saved: bytes) -> ScriptModule:
    """A copy of the module, where it arrived."""
    module: ScriptModule = torch.jit.load(io.BytesIO(saved))  # type: ignore[no-untyped-call]
    return module
