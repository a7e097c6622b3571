"""Sphinx: the guides of this folder, in Markdown, and the reference from the package's docstrings."""

import pathlib
import re

_root = pathlib.Path(__file__).resolve().parent.parent
_version = re.search(r"project\(tensorferry VERSION ([0-9.]+)", (_root / "CMakeLists.txt").read_text())

project = "TensorFerry"
author = "the TensorFerry authors"
copyright = author
release = _version.group(1) if _version else ""

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
exclude_patterns = ["_build", "README.md"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"

html_theme = "furo"
html_title = f"TensorFerry {release}"

# Links between the guides and files of the repository (sources, folders) are for readers on the code host.
suppress_warnings = ["myst.xref_missing"]
