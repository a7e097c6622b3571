"""What torch calls when it is imported, by the entry point torch.backends.

Apart from the package, which takes longer to import than this file.
"""

import os


def load() -> None:
    """Makes TensorFerry the backend of ``torch.distributed.rpc`` if ``TENSORFERRY_TORCH_RPC`` is 1."""
    if os.environ.get("TENSORFERRY_TORCH_RPC") == "1":
        import tensorferry.torch  # noqa: F401
