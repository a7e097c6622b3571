"""Prints where CMake finds this package's C++ API: ``cmake -DCMAKE_PREFIX_PATH=$(python -m tensorferry.cmake)``.

That folder has the headers, the libraries, the files of ``find_package(tensorferry)``, and ``tensorferry.pc``.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["prefix"]


def prefix() -> Path:
    """Returns the prefix for ``find_package(tensorferry)``: a folder of the wheel, or the build folder of a checkout.

    Raises:
        FileNotFoundError: the package was built without its C++ API.
    """
    package = Path(__file__).parent
    installed, build = package / "cpp", package.parents[1]
    if (installed / "lib/cmake/tensorferry/tensorferryConfig.cmake").exists():
        return installed
    if (build / "tensorferryConfig.cmake").exists():
        return build
    raise FileNotFoundError(f"there is no C++ side of tensorferry in {installed}")


if __name__ == "__main__":
    print(prefix())
