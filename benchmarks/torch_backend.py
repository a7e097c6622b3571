"""The module torch.distributed.rpc, with TensorFerry's backend as its default."""

import os
from typing import Any

import tensorferry.torch  # noqa: F401, registers the backend
import torch.distributed.rpc as torch_rpc

os.environ["TENSORFERRY_TORCH_RPC"] = "1"


def __getattr__(name: str) -> Any:
    return getattr(torch_rpc, name)
