"""Progress: one line that is updated on a terminal, and occasional lines elsewhere."""

import io
import json
import sys

import pytest

from korch.errors import OptionError
from korch.report.progress import Bar, Update, is_rewritable, shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_each_text_and_what_is_left() -> None:
    now, stream = [100.0], Terminal()
    bar = Bar(20.0, 98.0, stream, lambda: now[0])
    bar.tell(Update("frontend"))
    now[0] = 103.0
    bar.show()  # as it does every second
    bar.tell(Update("orchestrate", "2 measured", 21.0, 20.0))
    bar.tell(Update("build", "timing"))
    now[0] = 121.0
    bar.show()
    lines = [line.rstrip() for line in stream.getvalue().split("\r")]
    assert [line for line in lines if line] == [
        "1/9 frontend [2 s, 18 s left]",
        "1/9 frontend [5 s, 15 s left]",
        "6/9 orchestrate [5 s, 15 s left] best 21.000 ms, 20.000 ms expected: 2 measured",
        "8/9 build [5 s, 15 s left] best 21.000 ms, 20.000 ms expected: timing",
        "8/9 build [23 s, 3 s over budget] best 21.000 ms, 20.000 ms expected: timing",
    ]


def test_a_log_has_a_line_every_ten_seconds_if_it_is_asked_for() -> None:
    now, stream, quiet = [0.0], io.StringIO(), io.StringIO()
    bar, other = Bar(stream=stream, clock=lambda: now[0], show="lines"), Bar(stream=quiet, clock=lambda: now[0])
    for second in range(25):
        now[0] = float(second)
        for each in (bar, other):
            each.tell(Update("orchestrate", f"text {second}"))
    assert not quiet.getvalue()
    assert stream.getvalue().splitlines() == ["6/9 orchestrate [10 s]: text 10", "6/9 orchestrate [20 s]: text 20"]


def test_json_lines_come_each_second_and_with_each_stage_and_better_plan() -> None:
    now, stream = [0.0], io.StringIO()
    bar = Bar(10.0, 0.0, stream, lambda: now[0], "json")
    updates = [
        Update("candidates"),
        Update("candidates", "9 groups"),  # neither a stage nor a better plan, and no second has passed
        Update("orchestrate", "one", 3.0, 2.0),
        Update("orchestrate", "two"),
        Update("orchestrate", "three", 2.5, 2.0),
    ]
    for update in updates:
        now[0] += 0.25
        bar.tell(update)
    now[0] = 12.0
    bar.show()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    keys = ("stage", "text", "best_ms", "expected_ms", "seconds", "left_s")
    assert [tuple(line[key] for key in keys) for line in lines] == [
        ("candidates", "", None, None, 0.2, 9.8),
        ("orchestrate", "one", 3.0, 2.0, 0.8, 9.2),
        ("orchestrate", "three", 2.5, 2.0, 1.2, 8.8),
        ("orchestrate", "three", 2.5, 2.0, 12.0, -2.0),
    ]


@pytest.mark.parametrize(
    ("progress", "is_terminal", "is_shown"),
    [(None, True, True), (None, False, False), (True, True, True), (False, True, False)],
)
def test_python_shows_progress_on_a_terminal_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, progress: bool | None, is_terminal: bool, is_shown: bool
) -> None:
    stream = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with shown(progress, 20.0) as tell:
        tell(Update("build", "timing the plan"))
    assert ("timing the plan" in stream.getvalue()) == is_shown


def test_a_function_is_called_and_other_values_are_refused() -> None:
    told: list[Update] = []
    with shown(told.append, None) as tell:
        tell(Update("build", "timing"))
    assert list(map(str, told)) == ["build: timing"]
    values: tuple[object, ...] = (1, "yes", [])
    for value in values:
        with pytest.raises(OptionError, match="progress"):
            shown(value, None)  # type: ignore[arg-type]


def test_stderr_of_a_notebook_is_rewritten_and_a_closed_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    assert not is_rewritable(stream)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert is_rewritable(stream)
    stream.close()
    assert not is_rewritable(stream)
    monkeypatch.setattr(sys, "stderr", None)
    with shown(True, None) as tell:
        tell(Update("build"))
