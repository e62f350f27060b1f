"""Artifacts for several instruction sets: the best one that the CPU has is loaded."""

import copy
from pathlib import Path

import numpy as np
import pytest

import korch
from korch.cli import main
from korch.errors import ArtifactError, OptionError
from korch.runtime import machine
from tests.support.models import parsed

X = np.arange(24, dtype=np.float32).reshape(4, 6) - 12


@pytest.fixture
def model() -> bytes:
    return parsed("(float[4,6] x) => (float[4,6] y) { a = Relu(x) y = Add(a, x) }").SerializeToString()


def test_the_best_instruction_set_of_the_cpu_is_loaded(
    model: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "both.korch"
    own = korch.optimize(model, isa="generic,avx2", threads=1, measure=False, cache_folder=tmp_path / "cache")
    own.save(path)
    assert sorted(own.others) == ["avx2", "generic"]
    for flags, isa in ((machine.cpu_flags(), "avx2"), (frozenset(), "generic")):
        monkeypatch.setattr(machine, "cpu_flags", lambda flags=flags: flags)
        found = korch.load(path)
        assert found.plan.target["isa"] == isa
        np.testing.assert_array_equal(found(X)[0], np.maximum(X, 0) + X)


def test_what_is_loaded_or_copied_for_one_set_is_not_saved_as_the_whole(model: bytes, tmp_path: Path) -> None:
    path = tmp_path / "both.korch"
    own = korch.optimize(model, isa="generic,avx2", threads=1, measure=False, cache_folder=tmp_path / "cache")
    own.save(path)
    for part in (korch.load(path), copy.copy(own), copy.copy(korch.load(path))):
        with pytest.raises(ArtifactError, match="its artifact is for generic, too"):
            part.save(path)
    alone = korch.optimize(model, isa="avx2", threads=1, measure=False, cache_folder=tmp_path / "cache")
    copy.copy(alone).save(path)


def test_a_cpu_without_any_of_them_gets_one_line(
    model: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "avx512f" not in machine.cpu_flags():
        pytest.skip("this CPU can build for no two sets that another one may lack")
    path = tmp_path / "both.korch"
    cache = tmp_path / "cache"
    korch.optimize(model, isa="avx512,avx2", threads=1, measure=False, cache_folder=cache).save(path)
    assert main(["unpack", str(path), str(tmp_path / "folder")]) == 0
    assert b"avx512vl " in (tmp_path / "folder" / "kernels.a").read_bytes()
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset({"sse2"}))
    with pytest.raises(ArtifactError, match="it has kernels for avx2, avx512, which this CPU can't run"):
        korch.load(path)
    capsys.readouterr()
    assert main(["run", str(path)]) != 0
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("isa", "what"),
    [
        ("avx2,avx2", "the value is 'avx2,avx2'"),
        ("avx2,", "the value is 'avx2,'"),
        ("neon", "this CPU has no instruction set 'neon'"),
    ],
)
def test_unusable_names_are_refused(model: bytes, isa: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=what):
        korch.optimize(model, isa=isa, threads=1, measure=False, cache_folder=tmp_path)
