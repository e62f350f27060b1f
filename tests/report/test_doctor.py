"""The report of `korch doctor` on a complete machine, and on machines that lack something."""

import importlib
import sys
from pathlib import Path

import pytest

from korch.cli import main
from korch.errors import CompileError, UnsupportedError
from korch.measure.llvm_process import llvm_identity
from korch.report import doctor
from korch.system.extras import install_command

FLAWED = """
class Missing:
    def __init__(self):
        raise ImportError("libtoy is not installed")


class Broken:
    def __init__(self):
        raise ZeroDivisionError("oh")
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KORCH_CACHE", str(tmp_path / "cache"))


def lines() -> list[str]:
    return doctor.examine()[0].splitlines()


def test_a_machine_that_has_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"ok   compiler     {llvm_identity()}\n" in text
    assert "threads, L1 " in text and "providers    attention, conv, gemm, generated, " in text
    assert f"ok   cache        {tmp_path / 'cache'}, " in text


def test_a_runtime_that_can_not_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise CompileError("there is none")

    monkeypatch.setattr(doctor, "runtime", fail)
    text, is_well = doctor.examine()
    assert not is_well
    assert "FAIL runtime      it can't be loaded: there is none" in text


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = "\n".join(doctor._libraries())
    assert "--   openvino     missing (korch bench compares with it): " + install_command("openvino") in text
    assert "ok" not in text


def test_providers_that_are_left_out_are_named_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "korch_flawed.py").write_text(FLAWED)
    info = tmp_path / "korch_flawed-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: korch-flawed\nVersion: 1\n")
    points = info / "entry_points.txt"
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    points.write_text("[korch.providers]\nmissing = korch_flawed:Missing\n")
    importlib.invalidate_caches()
    assert list(doctor._providers()) == [
        "FAIL providers    none is registered; install Korch again",
        "--   providers    missing is disabled: libtoy is not installed",
    ]
    points.write_text("[korch.providers]\nbroken = korch_flawed:Broken\n")
    importlib.invalidate_caches()
    (found,) = doctor._providers()
    assert found.startswith("FAIL providers    provider 'broken' (korch_flawed:Broken): it can't")


def test_a_missing_device_is_told_without_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise UnsupportedError("there is no CUDA driver here", "option target", hint="Use --target cpu")

    monkeypatch.setattr(doctor, "detect_cuda_target", none)
    assert list(doctor._cuda())[-1] == "--   cuda         there is no CUDA driver here. Use --target cpu"


def test_a_cache_that_cannot_be_written(caplog: pytest.LogCaptureFixture) -> None:
    (found,) = doctor._cache(Path("/proc/korch"))
    assert found.startswith("--   cache        /proc/korch can't be written, so nothing is")


def test_a_cache_is_counted(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.so").write_bytes(bytes(3_000_000))
    (found,) = doctor._cache(tmp_path)
    assert found == f"ok   cache        {tmp_path}, 1 files, 3 MB"
