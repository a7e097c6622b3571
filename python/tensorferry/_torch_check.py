"""Refuses a torch that this build cannot work with.

torch gives no promise about its C++ interface between minor versions: a module built with one and loaded into another
fails in ways that say nothing, from missing symbols to wrong memory. So the package asks first.
"""

from ._build_info import TORCH_VERSION, VERSION


def _minor(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]


def check() -> None:
    """Imports torch, so that its libraries are loaded before ours.

    Raises ImportError, with what to type, where torch is missing or is of another minor version than the one that
    this build was made with.
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
