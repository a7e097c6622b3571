"""The module torch.distributed.rpc, with TensorFerry's backend as its default."""

import os

import tensorferry.torch  # noqa: F401, registers the backend
from torch.distributed.rpc import *  # noqa: F403

os.environ["TENSORFERRY_TORCH_RPC"] = "1"
