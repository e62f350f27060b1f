"""Costs are stored under a hash of the files that determine the kernels."""

import shutil

import pytest

from korch.provider import content
from korch.provider.content import content_version


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of the package, whose files may be edited."""
    copy = tmp_path / "korch"
    shutil.copytree(content.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    monkeypatch.setattr(content, "PACKAGE", copy)
    return copy


def edit(path):
    path.write_text((path.read_text("utf-8") if path.exists() else "") + "\n")
    content._digest.cache_clear()


@pytest.mark.parametrize(
    "path",
    [
        "native/korch_gemm.c",
        "tile/llvm/print.py",
        "tile/lower/lower.py",
        "provider/gemm/blocking.py",
        "measure/llvm_worker.py",
    ],
)
def test_an_edited_file_gives_another_version(package, path):
    before = content_version("provider/gemm")
    edit(package / path)
    assert content_version("provider/gemm") != before


@pytest.mark.parametrize("path", ["provider/conv/provider.py", "measure/worker.py", "provider/gemm/notes.txt"])
def test_other_files_do_not_matter(package, path):
    before = content_version("provider/gemm")
    edit(package / path)
    assert content_version("provider/gemm") == before


def test_providers_of_different_files_have_different_versions():
    versions = {content_version(), content_version("provider/gemm"), content_version("provider/conv")}
    assert len(versions) == 3
