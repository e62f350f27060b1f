"""Files of candidates and costs: read, solved by the command line, and refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from korch.binary_program import candidate_file
from korch.binary_program.candidate_file import CandidateFile, format_candidates, parse_candidates
from korch.binary_program.solve import solve
from korch.cli import main
from korch.errors import OptionError
from tests.small_problems import brute_force, random_problem, with_owners
from tests.support.instances import Severity, make_instance

EXAMPLE = "".join(line[4:] for line in (candidate_file.__doc__ or "").splitlines(True) if line.startswith("    "))


def solved(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    path = tmp_path / "candidates.json"
    path.write_text(text)
    assert main(["orchestrate", str(path)]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_example_prints_the_chosen_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, *ids = solved(tmp_path, EXAMPLE, capsys)
    assert head == "plan optimal objective=5500 bound=5500 kernels=3 measured=0 bound-costs" and ids == ["conv+relu"]
    cheaper = EXAMPLE.replace("5500", "6500")
    assert solved(tmp_path, cheaper, capsys)[1:] == ["conv", "relu"]
    blocks = solved(tmp_path, f'{{"blocks": [{EXAMPLE}, {cheaper}]}}', capsys)
    assert [blocks[0], blocks[2], *blocks[5:]] == ["block 0", "conv+relu", "conv", "relu"]


@pytest.mark.parametrize("seed", range(40))
def test_instances_are_read_as_they_were_written(seed: int) -> None:
    problem = with_owners(random_problem(seed, kernels=9, layouts=1 + seed % 2), seed)
    file = CandidateFile.of_problem(problem)
    assert parse_candidates(format_candidates([file]), "it") == (file,)
    found, names = file.to_problem()
    assert CandidateFile.of_problem(found).candidates != () and len(found.steps) == len(problem.steps)
    assert brute_force(found) == brute_force(problem)
    assert {f"%{value}" for step in problem.steps for value in step.inputs} <= {*names}


@pytest.mark.parametrize("seed", range(4))
def test_without_primitives_the_cheapest_plan_costs_the_same(seed: int) -> None:
    """Constants would have a port for each layout, so the instances have none."""
    severity = Severity(12, alternatives=0.3, cycles=0.1, layouts=2, sets_per_primitive=0.5)
    file = CandidateFile.of_problem(make_instance(severity, seed))
    bare = replace(file, primitives=(), candidates=tuple(replace(row, primitives=()) for row in file.candidates))
    costs = [solve(each.to_problem()[0], seconds=60).certificate for each in (file, bare)]
    assert costs[0].objective_ns == costs[1].objective_ns and costs[0].gap == costs[1].gap == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"cost_ns": 2.5}, "the file.candidates[0].cost_ns is 2.5; expected int"),
        ({"cost_ns": -1}, "the cost of 'a' is negative"),
        ({"outputs": []}, "candidate 'a' has no outputs"),
        ({"primitives": [3]}, "candidate 'a' runs primitive 3, of 0"),
        ({"id": "b"}, "several candidates have the id 'b'"),
        ({"price": 3}, "the file.candidates[0] has the unknown field price"),
    ],
)
def test_a_wrong_file_is_refused(change: dict[str, object], text: str) -> None:
    rows = [{"id": name, "inputs": ["x"], "outputs": ["y"], "cost_ns": 1} for name in "ab"]
    wrong = json.dumps({"required": ["y"], "candidates": [rows[0] | change, rows[1]]})
    with pytest.raises(OptionError) as raised:
        parse_candidates(wrong, "it.json")
    assert str(raised.value).startswith(f"it.json: it can't be read: {text}. ")
    with pytest.raises(OptionError, match="it can't be read"):
        parse_candidates("[", "it.json")


def test_a_port_that_nothing_writes_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "candidates.json"
    path.write_text(EXAMPLE.replace('"given": ["x"]', '"given": []'))
    assert main(["orchestrate", str(path)]) == 1
    assert "no candidate produces x in layout any" in capsys.readouterr().err
