"""Functions and files of the package stay within the limits of length and number of parameters."""

import ast
from functools import cache
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


@cache
def functions(text: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def long_functions(text: str) -> list[str]:
    """Return the names of the functions in a source that have more than MOST_LINES lines."""
    found = [(f.name, f.lineno, f.end_lineno) for f in functions(text)]
    return [name for name, first, last in found if last is not None and last - first >= MOST_LINES]


def functions_of_many_parameters(text: str) -> list[str]:
    """Return the names of the functions with more than MOST_PARAMETERS parameters, keyword-only ones left out."""
    named = [(f.name, [a.arg for a in (*f.args.posonlyargs, *f.args.args)]) for f in functions(text)]
    return [name for name, args in named if len([a for a in args if a not in ("self", "cls")]) > MOST_PARAMETERS]


def test_functions_have_at_most_6_parameters() -> None:
    found = {
        f"{path.relative_to(SOURCE)}: {name}"
        for path in SOURCE.rglob("*.py")
        for name in functions_of_many_parameters(path.read_text("utf-8"))
    }
    assert found == MORE_PARAMETERS
    assert functions_of_many_parameters("def f(a, b, c, d, e, f, g): ...") == ["f"]
    assert functions_of_many_parameters("def f(self, a, b, c, d, e, f, *, g): ...") == []


def test_functions_have_at_most_60_lines() -> None:
    found = {
        f"{path.relative_to(SOURCE)}: {name}"
        for path in SOURCE.rglob("*.py")
        for name in long_functions(path.read_text("utf-8"))
    }
    assert found == set()


def test_files_have_at_most_500_lines() -> None:
    paths = [path for path in SOURCE.rglob("*") if path.suffix in {".py", ".h", ".c"}]
    assert [path.name for path in paths if len(path.read_text("utf-8").splitlines()) > MOST_LINES_OF_A_FILE] == []


def test_a_long_function_is_found() -> None:
    assert long_functions("def f():\n" + "    x = 1\n" * MOST_LINES) == ["f"]
    assert long_functions("def f():\n" + "    x = 1\n" * (MOST_LINES - 1)) == []
