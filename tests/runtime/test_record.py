from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from korch.errors import ArtifactError, ModelError
from korch.options import Options
from korch.records import from_json, plain, read_record, to_json
from korch.runtime.build import model_record
from korch.runtime.record import ModelRecord, PlanRecord, TensorRecord
from tests.runtime import runtime_plans as plans


class Color(Enum):
    RED = "red"


@pytest.mark.parametrize("make", plans.PLANS)
def test_a_plan_is_read_as_it_was_written(make, make_artifact):
    plan = make_artifact(make(), options=Options(cache_folder=Path("/cache"))).plan
    assert PlanRecord.from_json(plan.to_json()) == plan
    assert plan.options["cache_folder"] == "/cache"
    assert plan.target["isa"] == "generic"
    stored = PlanRecord.from_members(*plan.members().values())
    assert stored == plan
    assert stored.to_json() == plan.to_json()
    assert stored.symbols == plan.symbols


def test_equal_plans_have_equal_artifacts(make_artifact):
    first, second = make_artifact(plans.state()), make_artifact(plans.state())
    assert (first.objects, first.plan, first.sources) == (second.objects, second.plan, second.sources)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (Color.RED, "red"),
        ((1, True, None, "x", 0.5), [1, True, None, "x", 0.5]),
        ([float("inf"), float("-inf")], ["inf", "-inf"]),
        ({Color.RED: np.float64(2), 3: np.int32(4)}, {"red": 2.0, "3": 4}),
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
        (frozenset({1}), [1]),
        (TensorRecord("x", "f32", (1, 2)), {"name": "x", "dtype": "f32", "shape": [1, 2]}),
        (Path("/a/b"), "/a/b"),
    ],
)
def test_data_becomes_json(data, expected):
    assert plain(data) == expected
    json.dumps(plain(data), allow_nan=False)


def with_offset(step, offset):
    return step | {"outputs": [step["outputs"][0] | {"offset": offset}]}


@dataclass(frozen=True)
class Tree:
    """A record with fields of its own type, and of each other type that fields may have."""

    colors: Mapping[str, Color]
    kind: Literal["a", "b"] = "a"
    weight: float | None = None
    branches: tuple[Tree, ...] = ()


@pytest.mark.parametrize(
    "tree",
    [Tree({}), Tree({"x": Color.RED}, "b", 1.5), Tree({}, branches=(Tree({}, weight=float("inf")), Tree({}, "b")))],
)
def test_a_record_with_fields_of_its_own_type_is_read_as_it_was_written(tree):
    assert from_json(Tree, to_json(tree), "tree.json") == tree


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"colors": {"x": "blue"}}, "tree.colors.x is 'blue'; expected Color"),
        ({"colors": {"x": ["red"]}}, "tree.colors.x is ['red']; expected Color"),
        ({"colors": {}, "kind": "c"}, "tree.kind is 'c'; expected ('a', 'b')"),
        ({"colors": {}, "branches": [{"colors": 1}]}, "tree.branches[0].colors is 1; expected Mapping"),
        ({"colors": {}, "weight": "1"}, "tree.weight is '1'; expected float"),
    ],
)
def test_what_is_wrong_in_a_record_is_named(data, text):
    with pytest.raises(ValueError) as caught:
        read_record(Tree, data, "tree")
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda plan: [], "it is no object"),
        (lambda plan: plan | {"more": 1}, "plan has the unknown field more"),
        (lambda plan: plan | {"threads": "2"}, "plan.threads is '2'; expected int"),
        (lambda plan: plan | {"threads": True}, "plan.threads is True; expected int"),
        (lambda plan: plan | {"opens": "x"}, "plan.opens is no list"),
        (lambda plan: plan | {"model": None}, "plan.model is None; expected an object"),
        (lambda plan: plan | {"certificate": 1}, "plan.certificate is 1; expected dict"),
        (
            lambda plan: plan | {"steps": [*plan["steps"][:1], {}]},
            "plan.steps[1] does not have the field bound_ns, candidate",
        ),
        (
            lambda plan: plan | {"steps": [with_offset(plan["steps"][0], "4")]},
            "plan.steps[0].outputs[0].offset is '4'; expected int",
        ),
    ],
)
def test_other_data_is_no_plan(change, text, make_artifact):
    plan = json.loads(make_artifact(plans.chain()).plan.to_json())
    with pytest.raises(ArtifactError) as caught:
        PlanRecord.from_json(json.dumps(change(plan)))
    assert str(caught.value).startswith(f"plan.json: it can't be read: {text}")
    assert str(caught.value).endswith(". Build the artifact again")


def test_other_text_is_no_plan():
    with pytest.raises(ArtifactError, match=r"plan\.json: it can't be read: Expecting value"):
        PlanRecord.from_json("nonsense")


def test_a_model_is_recorded_by_its_path_and_checksum(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"abc")
    assert model_record(tmp_path / "m.onnx") == ModelRecord(
        str(tmp_path / "m.onnx"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
    with pytest.raises(ModelError) as caught:
        model_record(tmp_path / "none.onnx")
    assert str(caught.value) == (f"{tmp_path / 'none.onnx'}: it can't be read: No such file or directory")
