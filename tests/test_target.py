"""The instruction set for which code is built."""

import pytest

from korch import target as module
from korch.errors import OptionError
from korch.target import ISA_FLAGS, REQUIRED_FLAGS, detect_target


@pytest.fixture
def with_units(monkeypatch):
    flags = frozenset(ISA_FLAGS["amx"] + ISA_FLAGS["avx2"])
    monkeypatch.delenv("KORCH_ISA", raising=False)
    monkeypatch.setattr(module, "_cpuinfo", lambda: (flags, "a CPU"))
    monkeypatch.setattr(module, "has_matrix_units", lambda: True)


def test_matrix_units_are_used_where_the_system_lets_them(with_units, monkeypatch):
    assert detect_target(2, "").isa == "amx"
    assert detect_target(2, "", matrix_units=False).isa == "avx512_vnni"
    monkeypatch.setattr(module, "has_matrix_units", lambda: False)
    assert detect_target(2, "").isa == "avx512_vnni"


def test_instructions_for_bfloat16_stand_in_for_units(with_units, monkeypatch):
    flags = frozenset(ISA_FLAGS["amx"] + ISA_FLAGS["avx512_bf16"])
    monkeypatch.setattr(module, "_cpuinfo", lambda: (flags, "a CPU"))
    assert detect_target(2, "").isa == "amx"
    monkeypatch.setenv("KORCH_ISA", "avx512_bf16")
    assert detect_target(2, "").isa == "avx512_bf16"
    assert detect_target(2, "", matrix_units=False).isa == "avx512_vnni"
    monkeypatch.delenv("KORCH_ISA")
    monkeypatch.setattr(module, "has_matrix_units", lambda: False)
    found = detect_target(2, "")
    assert (found.isa, found.lanes, found.registers) == ("avx512_bf16", 16, 32)
    assert [found.sums_components(pairs) for pairs in (0.5, 1, 4, 6)] == [False, True, False, False]


@pytest.mark.parametrize(("best", "strict"), [("neon_bf16", "neon_dot"), ("neon_dot", "neon_dot"), ("neon", "neon")])
def test_sets_of_neon(best, strict, with_units, monkeypatch):
    monkeypatch.setattr(module, "_cpuinfo", lambda: (frozenset(ISA_FLAGS[best]), "a CPU"))
    monkeypatch.setattr(module, "has_matrix_units", lambda: False)
    found = detect_target(2, "")
    assert (found.isa, found.lanes, found.registers) == (best, 4, 32)
    assert (found.has_dot, found.sums_components(1)) == (best != "neon", best == "neon_bf16")
    assert detect_target(2, "", matrix_units=False).isa == strict


def test_the_environment_forces_a_set(with_units, monkeypatch):
    monkeypatch.setenv("KORCH_ISA", "avx2")
    found = detect_target(2, "")
    assert (found.isa, found.lanes, found.registers) == ("avx2", 8, 16)
    monkeypatch.setenv("KORCH_ISA", "amx")
    assert detect_target(2, "").isa == "amx"
    assert detect_target(2, "", matrix_units=False).isa == "avx512_vnni"
    monkeypatch.setattr(module, "has_matrix_units", lambda: False)
    assert detect_target(2, "").isa == "avx512_vnni"


@pytest.mark.parametrize("name", ["mmx", "avx512", "amx", "neon", "neon_dot"])
def test_a_set_that_the_cpu_lacks_is_refused(name, monkeypatch):
    monkeypatch.setattr(module, "_cpuinfo", lambda: (frozenset(ISA_FLAGS["avx2"]), "a CPU"))
    monkeypatch.setenv("KORCH_ISA", name)
    with pytest.raises(OptionError) as caught:
        detect_target(2, "")
    assert str(caught.value) == (
        f"the environment variable KORCH_ISA: this CPU has no instruction set {name!r}; expected one of avx2, generic. "
        "Change it, or remove it to use the best"
    )


def test_a_set_is_chosen_only_where_its_kernels_run():
    """Code may use every extension of its set, so a CPU that lacks one must not be given the set."""
    assert all(set(REQUIRED_FLAGS[isa]) <= set(need) for isa, need in ISA_FLAGS.items())
