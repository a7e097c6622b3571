"""Where this package's C++ side is: ``cmake -DCMAKE_PREFIX_PATH=$(python -m tensorferry.cmake)``.

There lie the headers, the libraries, the files of ``find_package(tensorferry)``, and ``tensorferry.pc``.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["prefix"]


def prefix() -> Path:
    """The prefix that ``find_package(tensorferry)`` is to look in: of the wheel, or the build folder of a checkout.

    Raises:
        FileNotFoundError: the package was built without its C++ side.
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
