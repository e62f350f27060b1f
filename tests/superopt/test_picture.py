"""Text diagrams of tile programs."""

from korch.superopt.picture import picture
from korch.tile.ir.parse import parse_program
from tests.superopt.superopt_programs import ATTENTION, LORA


def test_a_loop_with_rescaled_sums():
    lines = picture(parse_program(ATTENTION))
    assert lines[0] == "1 task (g):"
    assert lines[1] == "+- memory: reads q 84 B, reads w 108 B, reads v 180 B, writes o 140 B"
    assert "top 28 B (carried)" in lines[2]
    assert "|  +- loop j, 3 times, carries top, total, y" in lines
    assert any(
        line.startswith("|  |  ") and "y += s * v along r, its old sum rescaled by factor" in line for line in lines
    )
    assert "|  |  for each i<7: most = max along r of s" in lines
    assert "|  |  for each i<7: new = max(top, most); factor = exp(sub(top, max(top, most)))" in lines
    assert lines[-1] == "+-"


def test_several_products():
    text = "\n".join(picture(parse_program(LORA)))
    assert text.count(" += ") == 3
    assert "loop" not in text
