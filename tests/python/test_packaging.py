"""What distributes the packages agrees with the tree: versions, lists, and who may publish."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

TREE = Path(__file__).parents[2]
VERSION = re.findall(r"project\(tensorferry VERSION ([0-9.]+)", (TREE / "CMakeLists.txt").read_text())[0]


def read_yaml(path: str) -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((TREE / path).read_text())


def test_the_release_runs_by_hand_alone_and_one_job_may_sign() -> None:
    release = read_yaml(".github/workflows/release.yml")
    assert list(release[True]) == ["workflow_dispatch"]  # YAML reads the key `on` as true
    assert release["permissions"] == {"contents": "read"}
    signers = [name for name, job in release["jobs"].items() if "id-token" in job.get("permissions", {})]
    assert signers == ["publish"]
    publish = release["jobs"]["publish"]
    assert publish["environment"] == "pypi" and set(publish["needs"]) == set(release["jobs"]) - {"publish"}
    uses = [step.get("uses", "").split("@")[0] for step in publish["steps"]]
    for action in ("anchore/sbom-action", "actions/attest-build-provenance", "actions/attest-sbom"):
        assert action in uses
    upload = publish["steps"][-1]
    assert upload["uses"].startswith("pypa/gh-action-pypi-publish@") and upload["if"] == "inputs.publish"
    assert "secrets." not in (TREE / ".github/workflows/release.yml").read_text()


def test_the_release_has_wheels_for_both_processors_and_each_torch() -> None:
    jobs = read_yaml(".github/workflows/release.yml")["jobs"]
    for job in ("core", "torch"):
        assert jobs[job]["strategy"]["matrix"]["runner"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]
    oldest, beyond = re.findall(r'"torch>=2\.(\d+),<2\.(\d+)"', (TREE / "pyproject.toml").read_text())[0]
    assert jobs["torch"]["strategy"]["matrix"]["torch"] == [f"2.{minor}" for minor in range(int(oldest), int(beyond))]


def test_the_wheels_of_the_release_have_gpus_and_rdma() -> None:
    torch = read_yaml(".github/workflows/release.yml")["jobs"]["torch"]["env"]
    # The containers have no CUDA toolkit: see cmake/Cuda.cmake.
    assert "nvidia-cuda-crt" in torch["CIBW_BEFORE_BUILD"] and "built.CUDA" in torch["CIBW_TEST_COMMAND"]
    assert "rdma-core-devel" in (TREE / "scripts/manylinux.sh").read_text()
    assert "libibverbs-dev" in (TREE / "packaging/Dockerfile").read_text()


def test_the_recipes_have_the_version_and_the_packages_of_the_tree() -> None:
    recipe = read_yaml("packaging/conda/recipe.yaml")
    assert recipe["context"]["version"] == VERSION
    assert [output["package"]["name"] for output in recipe["outputs"]] == ["tensorferry-core", "tensorferry"]
    bounds = re.findall(r'dependencies = \["torch(.*?)"\]', (TREE / "pyproject.toml").read_text())[0]
    assert f"pytorch {bounds}" in recipe["outputs"][1]["requirements"]["host"]
    docker = (TREE / "packaging/Dockerfile").read_text()
    installed = set(re.findall(r"--no-install-recommends (.*)", docker)[0].split())
    known = set((TREE / "scripts/system.sh").read_text().split())
    assert installed - known <= {"git"}, "scripts/system.sh installs what a build needs"


def test_a_build_of_the_wheel_makes_each_library_that_it_installs() -> None:
    import tensorferry

    build = Path(tensorferry.__file__).parents[2]
    if not (build / "build.ninja").is_file():
        pytest.skip("the package is not that of a build folder")
    (listed,) = re.findall(r"^build.targets = (.*)", (TREE / "pyproject.toml").read_text(), re.MULTILINE)
    targets = re.findall(r'"(.*?)"', listed)
    command = ["ninja", "-C", str(build), "-t", "commands", *targets]
    commands = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    pattern = (
        r'COMPONENT STREQUAL "(?:cpp|python)".*\n.*file\(INSTALL .* TYPE (?:STATIC_LIBRARY|MODULE) .*FILES "(.*?)"'
    )
    scripts = [build / "cmake_install.cmake", *build.glob("python/**/cmake_install.cmake")]
    installed = {Path(each) for script in scripts for each in re.findall(pattern, script.read_text())}
    names = {str(each.relative_to(build)) for each in installed}
    assert len(names) > 2
    assert {each for each in names if f" {each}" not in commands} == set()


def test_the_recipe_for_conda_can_be_rendered(tmp_path: Path) -> None:
    recipe = read_yaml("packaging/conda/recipe.yaml")
    tested = [
        name
        for output in recipe["outputs"]
        for test in output["tests"]
        for name in test.get("files", {}).get("source", [])
    ]
    assert tested and all((TREE / name).is_file() for name in tested)
    variants = read_yaml("packaging/conda/variants.yaml")  # without it, stdlib('c') has no value
    assert {"c_stdlib", "c_stdlib_version"} <= set(variants)
    oldest = re.findall(r'requires-python = ">=(3\.\d+)"', (TREE / "pyproject.toml").read_text())
    assert variants["python"][0] == f"{oldest[0]}.*"

    renderer = pytest.importorskip("rattler_build.cli_api", reason="needs py-rattler-build")
    for platform in ("linux-64", "linux-aarch64"):
        renderer.build_recipes(
            [TREE / "packaging/conda/recipe.yaml"], target_platform=platform, render_only=True, output_dir=tmp_path
        )


def test_sources_from_the_network_are_pinned_by_their_hashes() -> None:
    script = (TREE / "scripts/manylinux.sh").read_text()
    fetched = re.findall(r"fetch https://\S+ \\\n\s+(\w+)\n", script)
    assert len(fetched) == script.count("fetch https://") == 2
    assert all(re.fullmatch("[0-9a-f]{64}", each) for each in fetched)
    assert "boost_1_81_0" in script  # the oldest that cmake/Dependencies.cmake takes
