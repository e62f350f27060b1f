"""The time of work is predicted from earlier work of the same kind; other kinds are scaled by the known ones."""

import pytest

from korch.measure.pace import USUAL_S, Pace


def test_what_was_noted_is_predicted_and_the_rest_is_scaled() -> None:
    pace = Pace()
    assert pace.slowness == 1
    assert pace.predict_s("compile", 8) == pytest.approx(8 * USUAL_S["compile"])
    pace.note("compile", 4, 4 * 3 * USUAL_S["compile"])  # a busy machine
    assert pace.predict_s("compile", 2) == pytest.approx(6 * USUAL_S["compile"])
    assert pace.slowness == pytest.approx(3)
    assert pace.predict_s("build", 10) == pytest.approx(30 * USUAL_S["build"])
    pace.note("compile", 1, USUAL_S["compile"])  # it is quiet again: the newest counts most
    assert pace.predict_s("compile") == pytest.approx(2 * USUAL_S["compile"])
    pace.note("compile", 0, 5.0)  # nothing was missing
    assert pace.predict_s("compile") == pytest.approx(2 * USUAL_S["compile"])


def test_another_run_begins_with_what_was_usual() -> None:
    pace = Pace()
    pace.note("time", 1, USUAL_S["time"] / 4)
    again = Pace(pace.to_text())
    assert again.slowness == 1
    assert again.predict_s("time") == pytest.approx(USUAL_S["time"] / 2)


def test_a_busy_machine_changes_little_of_what_is_usual() -> None:
    pace = Pace()
    pace.note("build", 1, 100 * USUAL_S["build"])
    assert pace.to_text() == pace.to_text()  # it is written after each batch
    again = Pace(pace.to_text())
    assert again.predict_s("build") == pytest.approx(1.25 * USUAL_S["build"])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"compile": -1, "unknown": 3}', '{"time": "x"}'])
def test_a_damaged_text_is_left_out(text: str) -> None:
    assert Pace(text).usual_s == USUAL_S


def test_a_context_notes_the_time_between() -> None:
    times = iter([10.0, 16.0])
    pace = Pace(clock=lambda: next(times))
    with pace.noting("start", 3):
        pass
    assert pace.predict_s("start") == pytest.approx(2.0)
