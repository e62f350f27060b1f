"""Progress: one line that is updated on a terminal, and occasional lines elsewhere."""

import io

from korch.report.progress import Bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_each_text_and_what_is_left() -> None:
    now, stream = [100.0], Terminal()
    bar = Bar(20.0, 98.0, stream, lambda: now[0])
    bar.tell("frontend", "")
    now[0] = 103.0
    bar.show()  # as it does every second
    bar.tell("build", "timing the plan")
    now[0] = 121.0
    bar.show()
    assert stream.getvalue().split("\r\x1b[K")[1:] == [
        "1/9 frontend [2 s, 18 s left]",
        "1/9 frontend [5 s, 15 s left]",
        "8/9 build [5 s, 15 s left]: timing the plan",
        "8/9 build [23 s, 3 s over budget]: timing the plan",
    ]


def test_a_log_has_a_line_every_ten_seconds() -> None:
    now, stream = [0.0], io.StringIO()
    bar = Bar(stream=stream, clock=lambda: now[0])
    for second in range(25):
        now[0] = float(second)
        bar.tell("orchestrate", f"text {second}")
    assert stream.getvalue().splitlines() == ["6/9 orchestrate [10 s]: text 10", "6/9 orchestrate [20 s]: text 20"]
