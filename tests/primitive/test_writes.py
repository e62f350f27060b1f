"""Scattered rows of an input become writes along its own axis, with the same results."""

import numpy as np
import onnx
import pytest

from korch.fission import fission
from korch.frontend.onnx import load_model
from korch.primitive import reference
from korch.primitive.ops.state import WriteAttributes
from korch.primitive.writes import write_rows

MODEL = """<ir_version: 8, opset_import: ["" : 18]>
g (float[2, 5, 3] x, int64[2, 1] at, float[2, 2, 3] rows) => (float[2, 5, 3] y, float[5, 3] z) <int64[1] axes = {1}> {
    first = Transpose <perm = [1, 0, 2]> (x)
    given = Transpose <perm = [1, 0, 2]> (rows)
    new = ScatterND <REDUCTION> (first, at, given)
    y = Transpose <perm = [1, 0, 2]> (RESULT)
    z = ReduceSum <keepdims = 0> (new, axes)
}"""


def read(reduction: str = "", result: str = "new") -> onnx.ModelProto:
    return onnx.parser.parse_model(MODEL.replace("<REDUCTION>", reduction).replace("RESULT", result))


def test_rows_between_transpositions_are_written_along_the_axis_of_the_input() -> None:
    graph = fission(load_model(read()))
    found = write_rows(graph)
    (attributes,) = [p.attributes for p in found.primitives if p.op == "write_rows"]
    assert attributes == WriteAttributes(1, is_checked=True)
    assert [p.op for p in found.primitives if p.inputs[0] == found.inputs[0][1]] == ["write_rows"]
    rng = np.random.default_rng(0)
    given = {name: rng.integers(-9, 9, (2, n, 3)).astype(float) for name, n in (("x", 5), ("rows", 2))}
    for places in ([[0], [4]], [[-1], [1]], [[-5], [3]]):
        feeds = {**given, "at": np.array(places)}
        one, other = reference.run(graph, feeds), reference.run(found, feeds)
        assert all(np.array_equal(one[name], other[name]) for name in ("y", "z"))
    for wrong in (5, -6):
        with pytest.raises(IndexError, match="a position is out of range for axis 1 with size 5"):
            reference.run(found, {**given, "at": np.array([[0], [wrong]])})


@pytest.mark.parametrize("change", [{"reduction": '<reduction = "add">'}, {"result": "first"}])
def test_other_scatters_stay_whole(change) -> None:
    graph = fission(load_model(read(**change)))
    assert write_rows(graph) is graph
