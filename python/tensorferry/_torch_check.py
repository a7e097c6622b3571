"""Refuses a version of torch that this build cannot work with.

torch does not promise a stable C++ ABI between minor versions. A module that is built with one version and loaded into
another fails without a clear error, from missing symbols to corrupted memory. So the package checks the version first.
"""

from ._build_info import TORCH_VERSION, VERSION


def _minor(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]


def check() -> None:
    """Imports torch, so that its libraries are loaded before ours.

    Raises ImportError if torch is missing, or if its minor version is not the one that this build was made with. In the
    latter case, the text gives the command that rebuilds the package.
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
