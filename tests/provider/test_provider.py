"""Providers are found by entry point: one from a third party, one whose library is missing, and broken ones."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from korch.candidate.candidate import Group, Refusal, make_group
from korch.errors import ProviderError
from korch.primitive.graph import GraphBuilder
from korch.primitive.types import ValueType
from korch.provider.provider import load_providers
from korch.testing.kernels import KernelError, check_offers

TOY = '''
"""A provider of one kernel: the absolute value of a plain float32 tensor."""

from korch.candidate.candidate import Offer, Refusal
from korch.candidate.layout import Layout
from korch.provider.provider import Kernel
from tests.support.c_code import llvm_of

SOURCE = """
int NAME_run(void *state, void *const *buffers) {
  const float* x = buffers[0];
  float* y = buffers[1];
  for (long i = 0; i < COUNT; ++i) y[i] = RESULT;
  return CODE;
}
"""


class Toy:
    missing = 0
    name = "toy"
    version = "1"
    result, code = "__builtin_fabsf(x[i])", 0

    def offer(self, group, target):
        if [p.op for p in group.body.primitives] != ["abs"]:
            return Refusal("only abs")
        plain = Layout.plain(group.input_types[0].rank)
        return [Offer((plain,), (plain,))]

    def build(self, group, offer, target):
        symbol = f"toy_{group.key}"
        text = SOURCE.replace("NAME", symbol).replace("RESULT", self.result)
        text = text.replace("COUNT", str(group.input_types[0].size - self.missing)).replace("CODE", str(self.code))
        return Kernel(symbol, llvm_of(text))


class Wrong(Toy):
    result = "x[i]"


class Failing(Toy):
    code = 3


class Stubborn(Toy):
    def build(self, group, offer, target):
        return Refusal("not today")


class NoLibrary(Toy):
    def __init__(self):
        raise ImportError("libtoy is not installed")


class Crashing(Toy):
    def __init__(self):
        raise ZeroDivisionError("toy")


class Half:
    name = "half"
    version = "1"
    offer = None
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that installs a package with entry points, alone of all providers."""
    (tmp_path / "korch_toy.py").write_text(TOY)
    folder = tmp_path / "korch_toy-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: korch-toy\nVersion: 1\n")

    def write(*classes: str) -> None:
        lines = [f"{name.lower()} = korch_toy:{name}" for name in classes]
        text = "\n".join(["[korch.providers]", *lines]) + "\n"
        (folder / "entry_points.txt").write_text(text)
        # Only this folder: what is installed beside korch must not decide the test.
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        monkeypatch.delitem(sys.modules, "korch_toy", raising=False)
        importlib.invalidate_caches()

    yield write
    sys.modules.pop("korch_toy", None)


def abs_group(op: str = "abs") -> Group:
    builder = GraphBuilder()
    x = builder.input("x", ValueType.parse("f32[3,5]"))
    builder.output("y", builder.add(op, [x]))
    return make_group(builder.freeze(), [0], [1])


def test_a_third_partys_kernel_is_found_built_and_right(install, target, builder, rng):
    install("Toy")
    (toy,) = load_providers()
    assert (toy.name, toy.version) == ("toy", "1")
    assert len(check_offers(toy, [abs_group()], target, builder, rng)) == 1
    assert len(check_offers(toy, [abs_group()], target, builder, rng, specials=True)) == 1
    assert toy.offer(abs_group("exp"), target) == Refusal("only abs")


def test_a_provider_without_its_library_is_left_out(install, caplog):
    install("NoLibrary", "Toy")
    with caplog.at_level("INFO", "korch.provider"):
        assert [provider.name for provider in load_providers()] == ["toy"]
    assert caplog.messages == ["provider 'nolibrary' (korch_toy:NoLibrary) is disabled: libtoy is not installed"]


def test_a_module_that_is_missing_is_left_out(install, tmp_path):
    install("Toy")
    (tmp_path / "korch_toy.py").unlink()
    assert load_providers() == ()


def test_a_provider_that_crashes_is_named(install):
    install("Crashing")
    with pytest.raises(ProviderError) as caught:
        load_providers()
    assert str(caught.value) == (
        "provider 'crashing' (korch_toy:Crashing): it can't be loaded: toy. Uninstall the package "
        "that registers it, or fix it"
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_class_that_does_not_exist_is_named(install):
    install("Nobody")
    with pytest.raises(ProviderError, match=r"provider 'nobody' \(korch_toy:Nobody\)"):
        load_providers()


def test_a_provider_with_a_missing_member_is_named(install):
    install("Half")
    with pytest.raises(ProviderError, match=r"provider 'half' \(korch_toy:Half\): it has no member 'build'"):
        load_providers()


def test_two_providers_of_one_name_are_refused(install):
    install("Toy", "Wrong")
    with pytest.raises(ProviderError, match="provider 'toy': two providers have this name"):
        load_providers()


def test_no_provider_at_all_is_an_empty_tuple(install):
    install()
    assert load_providers() == ()


@pytest.mark.parametrize(
    ("name", "message"),
    [("Wrong", "more than"), ("Failing", "_run returned 3"), ("Stubborn", "toy refuses its offer: not today")],
)
def test_the_check_of_offers_says_no(install, target, builder, rng, name, message):
    install(name)
    (provider,) = load_providers()
    with pytest.raises(KernelError, match=message):
        check_offers(provider, [abs_group()], target, builder, rng)


def test_the_check_of_offers_names_a_refused_group(install, target, builder, rng):
    install("Toy")
    (toy,) = load_providers()
    with pytest.raises(KernelError, match="toy refuses: only abs"):
        check_offers(toy, [abs_group("exp")], target, builder, rng)


def test_what_a_kernel_forgets_to_write_is_seen(install, target, builder, rng):
    install("Toy")
    (toy,) = load_providers()
    toy.missing = 1
    with pytest.raises(KernelError, match=r"NaN on one side at \(2, 4\)"):
        check_offers(toy, [abs_group()], target, builder, rng)
    assert np.isnan(np.full(1, 0xFFFFFFFF, np.uint32).view(np.float32)).all()


def test_korchs_own_providers_are_registered():
    project = Path(__file__).parents[2] / "pyproject.toml"
    table = project.read_text("utf-8").partition('[project.entry-points."korch.providers"]')[2]
    rows = [line.partition(" = ") for line in table.partition("\n[")[0].strip().splitlines()]
    for name, _, place in rows:
        module, _, member = place.strip('"').partition(":")
        assert getattr(importlib.import_module(module), member).name == name
    assert {name for name, _, _ in rows} >= {"generated", "onnxruntime"}
