#!/usr/bin/env bash
# Checks the format, that no two C++ types share a name, the subjects of commits, the words of docs/, clang-tidy on the changed torch-free C++ sources
# (scripts/tidy.sh), ruff, mypy and stubtest. Runs every check, then fails if one has failed.
. "$(dirname "$0")/common.sh"
. scripts/sources.sh
scripts/system.sh build clang
scripts/venv.sh lint
failed=()

say "clang-format"
cpp_sources | xargs -r "$(first_of clang-format-16 clang-format)" --dry-run -Werror || failed+=(clang-format)

say "names, clocks"
"$venv/bin/python" scripts/names.py || failed+=(names)
"$venv/bin/python" scripts/clocks.py || failed+=(clocks)

say "subjects of commits"
"$venv/bin/python" scripts/subjects.py || failed+=(subjects)

say "words of docs/"
"$venv/bin/python" scripts/words.py | tail -n 1 || failed+=(words)

say "ruff"
"$venv/bin/ruff" check . || failed+=(ruff-check)
"$venv/bin/ruff" format --check . || failed+=(ruff-format)

say "mypy"
scripts/build.sh
"$venv/bin/mypy" || failed+=(mypy)
for example in examples/*/; do # each is a program of its own
  "$venv/bin/mypy" "$example" || failed+=("mypy $example")
done

say "stubtest"
# Compares the types of the compiled module, and every public name, with the module at run time.
PYTHONPATH=$PWD/$build/python "$venv/bin/python" -m mypy.stubtest tensorferry --concise --ignore-disjoint-bases \
  --mypy-config-file pyproject.toml --allowlist scripts/stubtest-allowlist.txt || failed+=(stubtest)

say "clang-tidy"
scripts/tidy.sh || failed+=(clang-tidy)

[ ${#failed[@]} -eq 0 ] || die "failed: ${failed[*]}"
say "lint: all clean"
