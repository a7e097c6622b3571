"""Prints, as a CMake list: version; folder; C++11 ABI (0 or 1); CUDA version or "none"."""

import os

import torch

print(
    torch.__version__,
    os.path.dirname(torch.__file__),
    int(torch.compiled_with_cxx11_abi()),
    torch.version.cuda or "none",
    sep=";",
)
