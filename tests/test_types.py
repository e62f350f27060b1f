"""The types that a type checker finds in a user's program."""

from mypy import api

PROGRAM = """
import numpy as np
import korch

executable = korch.optimize("model.onnx", threads=2, budget=10.0)
(y,) = executable(np.zeros((1, 3), np.float32))
reveal_type(executable)
reveal_type(y)
reveal_type(executable.run(None, {"x": y}))
reveal_type(korch.load("model.korch")(y))
korch.optimize("model.onnx", budget="ten")
"""


def test_executables_and_their_outputs_have_types(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    text, _, _ = api.run(["--strict", str(tmp_path / "program.py")])
    array = "numpy.ndarray[Any, numpy.dtype[Any]]"
    for revealed in ("korch.runtime.runnable.Runnable", array, f"list[{array}]", f"tuple[{array}, ...]"):
        assert f'Revealed type is "{revealed}"' in text
    assert text.count("error:") == 1
    assert 'No overload variant of "optimize" matches argument types "str", "str"' in text
