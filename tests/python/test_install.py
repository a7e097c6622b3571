"""The files of the package for C++ programs, found through ``python -m tensorferry.cmake``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import tensorferry
import tensorferry.cmake
import torch

PROGRAM = """
#include <ATen/ATen.h>
#include <tensorferry/agent.h>
#include <tensorferry/c10d.h>
#include <tensorferry/torch.h>
#include <tensorferry/torch_rpc.h>

#include <cstdio>

int main() {
  tensorferry::AgentOptions options;
  options.name = "alone";
  options.store = tensorferry::local_store();
  const auto agent = tensorferry::Agent::join(options);
  agent->serve("double", [](const at::Tensor& x) { return at::Tensor(x * 2); });
  const auto out = agent->call<at::Tensor>("alone", "double", at::ones({2, 3})).get();
  std::printf("sum %g\\n", out.sum().item<double>());

  options.name = "worker0";
  options.rank = 0;
  options.world_size = 1;
  const auto worker = tensorferry::make_rpc_agent(options);
  worker->start();
  std::printf("%s\\n", worker->getWorkerInfo().name_.c_str());
  worker->join();
  worker->shutdown();
}
"""

PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(with_torch LANGUAGES CXX)
find_package(tensorferry 0.1 REQUIRED COMPONENTS core torch c10d torch_rpc)
add_executable(with_torch main.cpp)
target_link_libraries(with_torch PRIVATE tensorferry::torch tensorferry::c10d tensorferry::torch_rpc)
"""


def configure(source: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["cmake", "-S", source, "-B", source / "build", f"-DCMAKE_PREFIX_PATH={tensorferry.cmake.prefix()}", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def project(folder: Path) -> Path:
    (folder / "main.cpp").write_text(PROGRAM)
    (folder / "CMakeLists.txt").write_text(PROJECT)
    return folder


def test_the_module_prints_the_cmake_path_of_the_package() -> None:
    printed = subprocess.run([sys.executable, "-m", "tensorferry.cmake"], check=True, capture_output=True, text=True)
    assert printed.stdout == f"{tensorferry.cmake.prefix()}\n"
    assert list(tensorferry.cmake.prefix().rglob("tensorferryConfig.cmake"))


def test_a_program_with_torch_links_the_installed_components(tmp_path: Path) -> None:
    done = configure(project(tmp_path), f"-DPython_EXECUTABLE={sys.executable}")
    assert done.returncode == 0, done.stdout
    subprocess.run(["cmake", "--build", tmp_path / "build"], check=True)
    ran = subprocess.run([tmp_path / "build/with_torch"], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "sum 12\nworker0\n"), ran.stderr


def test_another_torch_is_refused_by_one_line(tmp_path: Path) -> None:
    stub = tmp_path / "python"
    stub.write_text("#!/bin/sh\necho '1.13.1;/nowhere;1;none'\n")
    stub.chmod(0o755)
    done = configure(project(tmp_path), f"-DPython_EXECUTABLE={stub}")
    assert done.returncode != 0
    built_with = ".".join(torch.__version__.split(".")[:2])
    assert f"was built with torch {built_with}" in " ".join(done.stdout.split())
    assert "has 1.13.1" in " ".join(done.stdout.split())
