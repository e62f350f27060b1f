"""Options are validated when they are created, because Python callers may pass values of any type."""

import inspect
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import korch
from korch import limits
from korch.ablation import Ablation
from korch.errors import OptionError
from korch.limits import SearchLimits
from korch.options import Options, default_cache_folder, flagged_fields

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"threads": 0}, "option threads: the value 0 is out of range; expected at least 1"),
    ({"threads": "2"}, "option threads: the value is '2'; expected an integer"),
    ({"threads": True}, "option threads: the value is True; expected an integer"),
    (
        {"budget_s": math.nan},
        "option budget: the value nan is out of range; expected a number of seconds greater than 0",
    ),
    ({"budget_s": "5"}, "option budget: the value is '5'; expected a number or None"),
    (
        {"tolerance": math.inf},
        "option tolerance: the value inf is out of range; expected a part of the largest element, more than 0",
    ),
    ({"search": 3}, "option search: the value is 3; expected a SearchLimits"),
    ({"ablation": None}, "option ablation: the value is None; expected an Ablation"),
    (
        {"precision": "tf32"},
        "option precision: the value 'tf32' is for CUDA devices only. Add --target cuda, or remove --precision",
    ),
    (
        {"precision": "int8", "target": "cuda"},
        "option precision: the value 'int8' is for CPUs only. Add --target cpu, or remove --precision",
    ),
    ({"state": "bfloat16", "target": "cuda"}, "option state: sessions are for CPUs only. Remove --state"),
    ({"farm": "tcp://h:1", "target": "cuda"}, "option farm: farms are for CPUs only. Remove --farm"),
    ({"precision": "int8", "strict": True}, "option precision: int8 does not go with --strict. Remove one of both"),
    (
        {"schedule": "tasks", "target": "cuda"},
        "option schedule: kernels for CUDA devices do not run as tasks. Remove --schedule",
    ),
    ({"strict": None}, "option strict: the value is None; expected True or False"),
    ({"cache_folder": 3}, "option cache_folder: the value is 3; expected a path"),
]

WRONG_LIMITS: list[tuple[dict[str, Any], str]] = [
    (
        {"solver_seconds": -1.0},
        "option solver_seconds: the value -1.0 is out of range; expected a number of seconds greater than 0",
    ),
    ({"seed": -1}, "option seed: the value -1 is out of range; expected at least 0"),
    ({"patience": -1}, "option patience: the value -1 is out of range; expected at least 0"),
    (
        {"gap": math.nan},
        "option gap: the value nan is out of range; expected a share, at least 0 and less than 1; 0.05 is 5 %",
    ),
    ({"gap": 5}, "option gap: the value 5 is out of range; expected a share, at least 0 and less than 1; 0.05 is 5 %"),
    ({"partition": 3.5}, "option partition: the value is 3.5; expected a text or an integer"),
    (
        {"partition": "12"},
        "option partition: the value 12 is out of range; expected 'auto', 'off', or the largest number of primitives "
        "in a segment",
    ),
    ({"max_measured": -0.1}, "option max_measured: the value -0.1 is out of range; expected a share, at least 0"),
]


@pytest.mark.parametrize(("fields", "text"), WRONG, ids=[str(fields) for fields, _ in WRONG])
def test_a_value_that_makes_no_sense_is_named(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=f"^{re.escape(text)}$"):
        Options(**fields)


@pytest.mark.parametrize("fields", [{"budget_s": 3}, {"budget_s": math.inf}, {"tolerance": 1}])
def test_values_at_the_ends_of_ranges_are_taken(fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        assert getattr(Options(**fields), name) == value


@pytest.mark.parametrize(("fields", "text"), WRONG_LIMITS, ids=[str(fields) for fields, _ in WRONG_LIMITS])
def test_a_limit_that_makes_no_sense_is_named(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=f"^{re.escape(text)}$"):
        SearchLimits(**fields)


def test_users_have_at_most_18_options() -> None:
    """What few users change is a limit of the search, or a switch of the ablation."""
    assert len(flagged_fields()) <= 18


def test_a_switch_that_makes_no_sense_is_named() -> None:
    with pytest.raises(OptionError, match="option layouts: the value is 'all'; expected 'any' or 'last' or 'plain'"):
        Ablation(layouts="all")  # type: ignore[arg-type]


def test_the_python_interface_says_so_too() -> None:
    with pytest.raises(OptionError, match="expected an integer"):
        korch.optimize("model.onnx", threads=2.5)  # type: ignore[arg-type]


def test_a_user_without_a_home_has_a_cache_folder_all_the_same(monkeypatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("KORCH_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", none)
    assert default_cache_folder() == Path("/.cache/korch")


def test_threads_are_at_most_the_cores_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("korch.options.machine_cores", lambda: 8)
    monkeypatch.setattr("korch.options.usable_cores", lambda: 2)
    assert Options().threads == 2
    Options(threads=2)
    assert caplog.messages == []
    Options(threads=8)
    assert caplog.messages == ["8 threads share the 2 cores that this process may use; its plan will be slow here"]
    with pytest.raises(OptionError) as caught:
        Options(threads=9)
    assert str(caught.value) == (
        "option threads: the value 9 is more than the 8 cores of this machine; expected at most 8. "
        "Threads that share a core wait for each other"
    )


@pytest.mark.parametrize(("name", "meant"), [("threadz", "threads"), ("budget_s", "budget")])
def test_an_unknown_option_is_named_with_the_one_that_may_be_meant(name: str, meant: str) -> None:
    with pytest.raises(OptionError, match=f"there is no option '{name}'; .*Do you mean '{meant}'"):
        korch.optimize("m.onnx", **{name: 3})


def test_each_limit_is_documented_and_read() -> None:
    source = Path(limits.__file__).parent
    texts = [path.read_text("utf-8") for path in source.rglob("*.py") if path.name != "limits.py"]
    names = [field.name for field in fields(SearchLimits)]
    assert [name for name in names if not re.search(rf"^        {name}: ", SearchLimits.__doc__ or "", re.M)] == []
    read = set(re.findall(r"\w+", "".join([*texts, inspect.getsource(SearchLimits.segment_limit)])))
    assert [name for name in names if name not in read] == []
