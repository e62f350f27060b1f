"""A sample of ONNX's backend tests, and the harness's reports of failures."""

import random
from pathlib import Path

import pytest

from tests.support import conformance
from tests.support.conformance import Outcome, cases, excluded, format_table, read_exclusions

EXCLUSIONS = Path(__file__).parent / "exclusions.txt"
ALWAYS = (
    "test_nonzero_example",
    "test_loop11",
    "test_sequence_insert_at_back",
    "test_string_concat",
    "test_operator_conv",
    "test_single_relu_model",
    "test_Conv2d_padding",
    "test_strnorm_model_nostopwords_nochangecase",
    "test_adam",
)
SAMPLE = 24


@pytest.fixture
def _cache(cache_folder, monkeypatch):
    monkeypatch.setenv(conformance.CACHE_VARIABLE, str(cache_folder))


def sample() -> list[str]:
    skipped = read_exclusions(EXCLUSIONS)
    names = sorted(n for n in cases("korch") if not excluded(n, skipped) and n not in ALWAYS)
    return [*ALWAYS, *random.Random(20261121).sample(names, SAMPLE)]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_cache")
def test_a_sample_passes() -> None:
    failed = {}
    for name in sample():
        outcome = conformance.run_case(name)
        if not outcome.passed:
            failed[name] = outcome.message
    assert failed == {}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("test_relu", "native"),
        ("test_det_2d", "opaque"),
        ("test_nonzero_example", "host"),
        ("test_constant", "constant"),
    ],
)
def test_who_computed_is_told(name: str, way: str) -> None:
    assert conformance.run_case(name).way == way


def test_all_cases_of_all_kinds_are_there() -> None:
    kinds = [kind for kind, _ in cases("korch").values()]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "node": 1884,
        "simple": 23,
        "pytorch-operator": 35,
        "pytorch-converted": 82,
    } or len(kinds) > 2024


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_result_and_a_raised_error_are_failures(monkeypatch) -> None:
    class Wrong:
        def run(self, inputs):
            return [inputs[0] + 1]

    monkeypatch.setattr(conformance._Recorder, "prepare", classmethod(lambda *_, **__: Wrong()))
    assert not conformance.run_case("test_relu").passed

    def fail(*_, **__):
        raise ValueError("no such thing")

    monkeypatch.setattr(conformance._Recorder, "prepare", classmethod(fail))
    outcome = conformance.run_case("test_relu")
    assert not outcome.passed and outcome.message == "ValueError: no such thing"


def test_every_exclusion_names_cases_and_a_reason() -> None:
    for pattern, reason in read_exclusions(EXCLUSIONS).items():
        assert any(excluded(name, {pattern: reason}) for name in cases("korch")), pattern


def test_an_exclusion_without_a_reason_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "exclusions.txt"
    path.write_text("# fine\ntest_abs\n")
    with pytest.raises(ValueError, match="has no reason"):
        read_exclusions(path)


def test_the_table_counts_by_kind_and_way() -> None:
    rows = [
        Outcome("a", "node", True, "native", "", 0.1),
        Outcome("b", "node", False, "", "no", 0),
        Outcome("c", "simple", True, "host", "", 0.1),
    ]
    table = format_table(rows, [Outcome("a", "node", True, "", "", 0)])
    assert "| node | 2 | 1 | 1 | 0 | 0 | 0 | 1 |" in table
    assert "| all | 3 | 2 | 1 | 0 | 1 | 0 | 1 |" in table
