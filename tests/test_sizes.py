"""Functions and files of the package stay within the limits of length and number of parameters."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "korch"
MOST_LINES = 60
MOST_LINES_OF_A_FILE = 500
MOST_PARAMETERS = 6
# A row of a table, and functions whose parameters are those of PyTorch's operators: a record would be worse.
MORE_PARAMETERS = {
    "frontend/torch/quantized.py: quantize",
    "frontend/torch/quantized.py: dequantize",
    "frontend/torch/windows.py: _average_pool",
    "frontend/torch/windows.py: _integer_convolution",
    "frontend/torch/windows.py: _integer_transposed",
    "frontend/torch/windows.py: _max_pool",
    "frontend/torch/missing.py: _bags",
    "frontend/torch/missing.py: _projected_lstm",
}


def functions(text: str) -> list[tuple[str, int, int]]:
    """Return name, number of lines and number of parameters, keyword-only ones left out, of the functions."""
    found = []
    for f in ast.walk(ast.parse(text)):
        if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [a.arg for a in (*f.args.posonlyargs, *f.args.args) if a.arg not in ("self", "cls")]
            found.append((f.name, (f.end_lineno or 0) - f.lineno + 1, len(names)))
    return found


def test_functions_have_at_most_6_parameters_and_60_lines() -> None:
    found = [
        (f"{path.relative_to(SOURCE)}: {name}", lines, parameters)
        for path in SOURCE.rglob("*.py")
        for name, lines, parameters in functions(path.read_text("utf-8"))
    ]
    assert {name for name, _, parameters in found if parameters > MOST_PARAMETERS} == MORE_PARAMETERS
    assert [name for name, lines, _ in found if lines > MOST_LINES] == []


def test_files_have_at_most_500_lines() -> None:
    paths = [path for path in SOURCE.rglob("*") if path.suffix in {".py", ".h", ".c"}]
    assert [path.name for path in paths if len(path.read_text("utf-8").splitlines()) > MOST_LINES_OF_A_FILE] == []


def test_lines_and_parameters_are_counted() -> None:
    assert functions("def f(a, /, b, *, g):\n" + "    x = 1\n" * MOST_LINES) == [("f", MOST_LINES + 1, 2)]
    assert functions("class A:\n    async def f(self, a): ...") == [("f", 1, 1)]
