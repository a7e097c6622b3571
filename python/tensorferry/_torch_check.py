"""Refuses a version of torch that this build cannot work with.

torch does not promise a stable C++ ABI between minor versions. A module that is built with one version and loaded into
another fails without a clear error, from missing symbols to corrupted memory. So the package checks the version first.
"""

from ._build_info import CUDA, TORCH_CUDA, TORCH_VERSION, VERSION


def _minor(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]


def check() -> None:
    """Imports torch, so that its libraries are loaded before ours.

    Raises ImportError if torch is missing, or if its minor version is not the one that this build was made with. The
    same goes for the major version of CUDA of a build with parts for GPUs. In the latter cases, the text gives the
    command that rebuilds the package.
    """
    remedy = "To rebuild it, in its source tree: pip install --no-build-isolation --no-deps --force-reinstall ."
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"tensorferry needs torch {'.'.join(_minor(TORCH_VERSION))}: {error}") from error
    if _minor(str(torch.__version__)) != _minor(TORCH_VERSION):
        raise ImportError(
            f"tensorferry {VERSION} was built with torch {TORCH_VERSION}, "
            f"and this is torch {torch.__version__}. {remedy}"
        )
    cuda = str(torch.version.cuda or "none")
    if CUDA and cuda.split(".")[0] != TORCH_CUDA.split(".")[0]:
        raise ImportError(
            f"tensorferry {VERSION} was built with a torch for CUDA {TORCH_CUDA}, and this is one for {cuda}. {remedy}"
        )
