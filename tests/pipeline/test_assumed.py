"""Models with open dimensions run without the option --shape, for sizes that a warning names."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import korch
from korch.cli.shapes import parse_bindings
from korch.errors import InputError, OptionError
from korch.pipeline.assumed import BATCHES, IMAGES, LENGTHS, assumed, binding_text, fixed
from korch.ranges.binding import binding_of, dimensions_of, static

QUICK: dict[str, Any] = {"measure": False, "threads": 1, "ablation": korch.Ablation(baselines=False)}


def model(inputs: str, body: str) -> onnx.ModelProto:
    head = '<ir_version: 8, opset_import: ["" : 18]> g '
    return onnx.parser.parse_model(f"{head}({inputs}) => (float[1] y) {{ {body} }}".replace("(float[1] y)", "(y)"))


@pytest.mark.parametrize(
    ("inputs", "given", "expected"),
    [
        ("float[batch, m] x, float[m] b", {}, {"batch": (BATCHES,), "m": (LENGTHS,)}),
        ("float[N, 3, h, w] x", {"N": (2,)}, {"h": (IMAGES,), "w": (IMAGES,)}),
        ("float[?, 3, ?, 8] x", {}, {"x": (BATCHES, 3, IMAGES, 8)}),
        ("float[?, 16] x, float[?, ?] z", {}, {"x": (1, 16), "z": (1, 128)}),
        ("float[?, 16] x, float[m] z", {"x": (4, 16)}, {"m": (LENGTHS,)}),
        ("float[2, 3] x", {}, {}),
    ],
)
def test_open_dimensions_get_ranges_by_their_names_and_places(inputs: str, given: Any, expected: Any) -> None:
    assert assumed(model(inputs, "y = Relu(x)").graph.input, given) == expected


def test_the_binding_is_named_in_the_syntax_of_the_option() -> None:
    text = "--shape batch=1..8 --shape x=1x3x64..512:32"
    binding = {"batch": (BATCHES,), "x": (1, 3, IMAGES)}
    assert binding_text(binding) == text
    assert parse_bindings(text.replace("--shape ", "").split()) == [binding]
    assert fixed(binding) == {"batch": (1,), "x": (1, 3, 224)}


def test_a_dimension_takes_the_size_of_another(cache_folder: Path) -> None:
    (binding,) = parse_bindings(["h=2..4", "v=w", "w=h"])
    assert [str(d) for d in dimensions_of(binding)] == ["h"]
    assert binding_of(binding, (3,)) == {"h": (3,), "v": (3,), "w": (3,)}
    assert static({"h": (5,), "w": ("h",)}) == {"h": (5,), "w": (5,)}
    square = model("float[h, w] x", "s = Softmax (x) y = MatMul(s, x)")
    run = korch.optimize(square, shapes={"h": range(2, 5), "w": "h"}, cache_folder=cache_folder, **QUICK)
    x = np.arange(9, dtype=np.float32).reshape(3, 3)
    e = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(run(x)[0], e / e.sum(1, keepdims=True) @ x, rtol=1e-6)
    with pytest.raises(InputError, match="axis 1: the size of 'h' is 4; expected 3, as another axis"):
        run(np.zeros((3, 4), np.float32))


def test_a_dimension_may_take_an_assumed_size(cache_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert parse_bindings(["w=h"]) == [{"w": ("h",)}]
    run = korch.optimize(model("float[h, w] x", "y = Relu (x)"), shapes={"w": "h"}, cache_folder=cache_folder, **QUICK)
    assert "sizes that are not given are assumed; to change them: --shape h=1..128" in caplog.messages
    np.testing.assert_array_equal(run(np.ones((7, 7), np.float32))[0], np.ones((7, 7)))
    with pytest.raises(OptionError, match="'w' is to have the size of 'q', which has none"):
        korch.optimize(model("float[h, w] x", "y = Relu (x)"), shapes={"h": 4, "w": "q"}, **QUICK)


@pytest.mark.parametrize("texts", [["w=h", "h=w"], ["w=h", "h=1x3"]])
def test_a_dimension_that_gives_no_size_is_refused(texts: list[str]) -> None:
    with pytest.raises(OptionError, match="'w' is to have the size of '2', which has none"):
        static({"w": ("2",)})
    with pytest.raises(OptionError, match=r"'[hw]' is to have the size of '[hw]', which has none"):
        static(parse_bindings(texts)[0])


def test_sizes_that_are_not_given_are_assumed(cache_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = korch.optimize(model("float[batch, 3] x", "y = Softmax (x)"), cache_folder=cache_folder, **QUICK)
    assert "sizes that are not given are assumed; to change them: --shape batch=1..8" in caplog.messages
    for n in (1, 8):
        np.testing.assert_allclose(run(np.ones((n, 3), np.float32))[0], np.full((n, 3), 1 / 3), rtol=1e-6)


def test_one_size_is_assumed_if_ranges_are_refused(cache_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = korch.optimize(model("float[k, m] x", "y = Det (x)"), cache_folder=cache_folder, **QUICK)
    assert caplog.messages[-1] == ("sizes that are not given are assumed; to change them: --shape k=128 --shape m=128")
    np.testing.assert_allclose(run(np.eye(128, dtype=np.float32))[0], 1.0)
