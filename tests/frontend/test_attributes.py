"""Attributes of a node have the types that its operator declares."""

import numpy as np
import onnx
import pytest

from korch.errors import ModelError
from korch.frontend.attributes import NodeAttributes


def attributes() -> NodeAttributes:
    node = onnx.helper.make_node(
        "Some",
        ["x"],
        ["y"],
        name="n",
        axis=-1,
        alpha=0.5,
        p=2.0,
        mode="edge",
        axes=[0, 2],
        scales=[1.0, 2.0],
        names=["a"],
    )
    node.attribute.append(onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(np.arange(3))))
    return NodeAttributes(node)


def test_each_type_is_read() -> None:
    found = attributes()
    assert found.integer("axis") == -1 and found.integer("p") == 2 and type(found.integer("p")) is int
    assert found.number("alpha") == 0.5 and found.number("axis") == -1.0
    assert found.text("mode") == "edge" and found.integers("axes") == (0, 2) and found.numbers("scales") == (1.0, 2.0)
    assert found["names"] == ("a",) and np.array_equal(np.asarray(found["value"]), np.arange(3))


def test_a_default_stands_for_an_attribute_that_the_node_lacks() -> None:
    found = attributes()
    assert (found.integer("group", 1), found.number("beta", 1.5), found.text("auto_pad", "NOTSET")) == (
        1,
        1.5,
        "NOTSET",
    )
    assert (found.integers("pads", ()), found.numbers("roi", (0.5,))) == ((), (0.5,))


@pytest.mark.parametrize(
    ("method", "name", "message"),
    [
        ("integer", "alpha", "Some n: the attribute 'alpha' is 0.5; expected an integer"),
        ("number", "mode", "Some n: the attribute 'mode' is 'edge'; expected a number"),
        ("text", "axis", "Some n: the attribute 'axis' is -1; expected a text"),
        ("integers", "scales", "Some n: the attribute 'scales' is (1.0, 2.0); expected integers"),
        ("numbers", "names", "Some n: the attribute 'names' is ('a',); expected numbers"),
        ("integer", "group", "Some n: the attribute 'group' is missing"),
    ],
)
def test_another_type_is_an_error(method: str, name: str, message: str) -> None:
    with pytest.raises(ModelError) as raised:
        getattr(attributes(), method)(name)
    assert str(raised.value) == message
