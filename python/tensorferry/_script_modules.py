"""Pickles scripted modules in arguments and results, in the format of ``torch.jit.save``."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.jit import ScriptModule


def reduce(module: ScriptModule) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
    """Returns how pickle rebuilds a scripted module, as ``__reduce__`` does. Pickle itself refuses such modules."""
    saved = io.BytesIO()
    torch.jit.save(module, saved)
    return load, (saved.getvalue(),)


def load(saved: bytes) -> ScriptModule:
    """Returns a copy of the module, at the receiver."""
    module: ScriptModule = torch.jit.load(io.BytesIO(saved))  # type: ignore[no-untyped-call]
    return module
