#!/usr/bin/env bash
# Builds the site into docs/_build/html; a warning is an error.
. "$(dirname "$0")/common.sh"
scripts/system.sh build docs
scripts/venv.sh docs
scripts/build.sh
PYTHONPATH=$PWD/$build/python "$venv/bin/python" -m sphinx -W --keep-going -q -b html docs docs/_build/html
[ -s docs/_build/html/searchindex.js ] || die "the site has no search"
doxygen docs/Doxyfile
say "docs/_build/html/index.html"
