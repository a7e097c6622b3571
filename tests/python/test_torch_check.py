"""A build of tensorferry works with one minor version of torch and says so at import."""

import importlib
import sys

import pytest
import torch
from tensorferry import _build_info, _torch_check


def test_the_torch_of_the_build_is_accepted():
    _torch_check.check()


def test_a_patch_release_of_the_same_minor_version_is_accepted(monkeypatch):
    major, minor = _build_info.TORCH_VERSION.split(".")[:2]
    monkeypatch.setattr(torch, "__version__", f"{major}.{minor}.99+cpu")
    _torch_check.check()


@pytest.mark.parametrize("other", ["2.10.0", "3.0.0+cu140", "2.1.5"])
def test_another_minor_version_is_refused_by_one_line_that_names_both_and_the_remedy(monkeypatch, other):
    monkeypatch.setattr(torch, "__version__", other)
    with pytest.raises(ImportError) as refusal:
        _torch_check.check()
    said = str(refusal.value)
    assert "\n" not in said
    assert other in said and _build_info.TORCH_VERSION in said
    assert "pip install --no-build-isolation" in said


@pytest.mark.parametrize(("built_for", "other"), [("13.2", "12.8"), ("12.8", "13.0"), ("13.2", None)])
def test_a_torch_for_another_major_version_of_cuda_is_refused(monkeypatch, built_for, other):
    monkeypatch.setattr(_torch_check, "CUDA", True)
    monkeypatch.setattr(_torch_check, "TORCH_CUDA", built_for)
    monkeypatch.setattr(torch.version, "cuda", other)
    with pytest.raises(
        ImportError, match=f"for CUDA {built_for}, and this is one for {str(other).lower()}.*pip install"
    ):
        _torch_check.check()


def test_a_torch_for_a_newer_minor_version_of_cuda_is_accepted(monkeypatch):
    monkeypatch.setattr(_torch_check, "CUDA", True)
    monkeypatch.setattr(_torch_check, "TORCH_CUDA", "13.0")
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    _torch_check.check()


def test_a_torch_without_transports_is_named_by_the_import_of_ours(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed._transport", None)
    monkeypatch.delitem(sys.modules, "tensorferry.transport", raising=False)
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    with pytest.raises(ImportError, match=r"_transport, which torch 2\.15 has and 2\.13\.0 lacks"):
        importlib.import_module("tensorferry.transport")
