import tracemalloc

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from korch.errors import ModelError, UnsupportedError
from korch.fission import fission
from korch.frontend.onnx import load_model, load_segments
from korch.primitive.reference import run
from tests.support.models import chain

F = TensorProto.FLOAT
X = {"x": (F, [2, 3])}


def _node(op="Relu", inputs=("x",), outputs=("y",), name="n", **attributes):
    return helper.make_node(op, list(inputs), list(outputs), name=name, **attributes)


def _good():
    weights = {"w": np.ones((2, 3), np.float32)}
    return chain([_node("Add", ("x", "w"))], X, ["y"], weights).SerializeToString()


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n" + bytes(50), b"hello, world\n", bytes(9)])
def test_what_is_no_onnx_file_is_refused(tmp_path, content):
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"m\.onnx: this is no ONNX model"):
        load_model(path)


def test_every_truncation_is_refused():
    content = _good()
    load_model(content)
    for length in range(1, len(content) - 1):
        with pytest.raises(ModelError):
            load_model(content[:length])


def test_names_that_are_no_text_are_refused():
    with pytest.raises(ModelError, match="no UTF-8"):
        load_model(_good().replace(b"Add", b"A\xffd"))


def test_values_of_absurd_size_are_refused():
    shape = {"s": np.array([1 << 40, 3])}
    model = chain([_node("Expand", ["x", "s"])], {"x": (F, [1, 3])}, ["y"], shape)
    with pytest.raises(ModelError, match=r"node 'n' \(Expand\): .*12288 GiB; expected at most"):
        load_model(model)


@pytest.mark.parametrize("axis", [1 << 31, -(1 << 31), -3])
def test_an_axis_that_no_input_has_is_refused_before_onnx_looks_for_it(axis):
    """Its shape inference writes where a layer normalization's axis says, and the process dies."""
    nodes = [_node("LayerNormalization", ["x", "w"], ["y", "mean"], axis=axis)]
    model = chain(nodes, X, ["y"], {"w": np.ones(3, np.float32)})
    with pytest.raises(ModelError) as caught:
        load_model(model)
    assert str(caught.value) == (
        f"model: node 'n' (LayerNormalization): its axis is {axis}, of an input with 2 axes; expected -2 to 1"
    )


def test_an_empty_file_a_missing_one_and_a_folder_are_refused(tmp_path):
    (tmp_path / "empty.onnx").write_bytes(b"")
    with pytest.raises(ModelError, match="the file is empty"):
        load_model(tmp_path / "empty.onnx")
    with pytest.raises(ModelError, match=r"can't be read \(No such file"):
        load_model(tmp_path / "none.onnx")
    with pytest.raises(ModelError, match=r"can't be read \(Is a directory"):
        load_model(tmp_path)


BAD = [
    ([_node(domain="my.own")], ModelError, r"node 'n' \(my.own::Relu\): the model does not import"),
    ([_node("Fly")], UnsupportedError, r"node 'n' \(Fly\): opset 17 has no operator 'Fly'"),
    (
        [_node(inputs=["ghost"])],
        ModelError,
        r"node 'n' \(Relu\): no node or input of the model provides its input 'ghost'",
    ),
    ([_node(outputs=["z"])], ModelError, "no node computes the output 'y'"),
    ([_node(inputs=["x", "x"])], ModelError, r"node 'n' \(Relu\): it breaks the operator"),
    ([_node("Flatten", axis="one")], ModelError, r"node 'n' \(Flatten\): it breaks"),
    ([_node(), _node("Neg", name="m")], ModelError, r"node 'm' \(Neg\): it computes 'y', which already"),
    ([_node(outputs=["x"])], ModelError, r"node 'n' \(Relu\): it computes 'x', which already"),
    (
        [_node("Add", ["x", "b"], ["a"], "p"), _node("Neg", ["a"], ["b"], "q"), _node("Abs", ["a"])],
        ModelError,
        r"node '[pq]' .*depends on its own output",
    ),
    ([_node("RandomNormalLike")], UnsupportedError, r"\(RandomNormalLike\): its output is random"),
    ([_node("NonZero")], UnsupportedError, r"node 'n' \(NonZero\): .* depends on data"),
    ([_node("SplitToSequence", split=None)], UnsupportedError, "is a sequence, not a tensor"),
    ([_node("Cast", to=TensorProto.STRING)], UnsupportedError, r"\(Cast\): .*type STRING"),
    ([_node("Cast", to=TensorProto.COMPLEX64)], ModelError, r"node 'n' \(Cast\)"),
    ([_node("Constant", [])], ModelError, "0 attributes"),
]


@pytest.mark.parametrize(("nodes", "error", "complaint"), BAD, ids=range(len(BAD)))
def test_each_fault_has_one_clear_error_with_model_and_node(nodes, error, complaint):
    with pytest.raises(error, match=complaint) as caught:
        load_model(chain(nodes, X, ["y"]))
    assert str(caught.value).startswith("model")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("op", ["AveragePool", "LpPool", "MaxPool"])
@pytest.mark.parametrize(
    ("width", "attributes"),
    [(3, {"pads": [0, 1, 0, 0], "strides": [2, 3]}), (2, {"ceil_mode": 1}), (4, {"auto_pad": "VALID"})],
)
def test_windows_larger_than_the_padded_image_are_refused(op, width, attributes):
    node = helper.make_node(op, ["x"], ["y"], kernel_shape=[1, 5], **attributes)
    with pytest.raises(ModelError, match=rf"\({op}\): its window spans 5 elements of axis 3, which has [24] with pads"):
        load_model(chain([node], {"x": (1, [1, 2, 3, width])}, ["y"], opset=20))


def test_an_unknown_domain_is_unsupported_and_named():
    model = chain([_node(domain="my.own")], X, ["y"])
    model.opset_import.append(helper.make_opsetid("my.own", 1))
    with pytest.raises(UnsupportedError, match=r"node 'n' .*the domain 'my.own' is unknown"):
        load_model(model)


def test_an_opset_that_nothing_knows_is_unsupported():
    with pytest.raises(UnsupportedError, match="at most"):
        load_model(chain([_node()], X, ["y"], opset=999))


def test_an_old_opset_is_converted():
    assert load_model(chain([_node()], X, ["y"], opset=6)).operators[0].version == 7


def test_an_old_opset_that_onnx_cannot_convert_is_unsupported():
    model = chain([_node("Upsample", inputs=("x",))], X, ["y"], opset=1)
    with pytest.raises(UnsupportedError, match="opset 1, and ONNX can't convert it"):
        load_model(model)


@pytest.mark.parametrize("kind", [TensorProto.STRING, TensorProto.COMPLEX64, TensorProto.INT4])
def test_inputs_of_other_element_types_are_unsupported(kind):
    with pytest.raises(UnsupportedError, match="input 'x': elements of type"):
        load_model(chain([_node("Identity")], {"x": (kind, [2])}, ["y"]))


def test_an_input_that_is_a_sequence_is_unsupported():
    model = chain([_node("SequenceLength")], X, ["y"])
    del model.graph.input[:]
    model.graph.input.append(helper.make_tensor_sequence_value_info("x", F, [2]))
    with pytest.raises(UnsupportedError, match="input 'x': it is of kind sequence_type"):
        load_model(model)


def test_duplicate_names_and_missing_outputs_are_refused():
    model = chain([_node()], X, ["y", "y"])
    with pytest.raises(ModelError, match="two outputs are called 'y'"):
        load_model(model)
    model = chain([_node()], X, ["y"], {"w": np.ones(1)})
    model.graph.initializer.append(model.graph.initializer[0])
    with pytest.raises(ModelError, match="two initializers are called 'w'"):
        load_model(model)
    with pytest.raises(ModelError, match="it has no output"):
        load_model(chain([_node()], X, []))


def test_sparse_tensors_are_unsupported():
    values = numpy_helper.from_array(np.ones(1, np.float32), "s")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([1]), "i"), [3])
    model = chain([_node("Constant", [], sparse_value=sparse)], {}, ["y"])
    with pytest.raises(UnsupportedError, match="sparse"):
        load_model(model)
    model = chain([_node("Add", ["x", "s"])], X, ["y"])
    model.graph.sparse_initializer.append(sparse)
    with pytest.raises(UnsupportedError, match="initializer 's' is sparse"):
        load_model(model)


# External data


@pytest.fixture
def external(tmp_path):
    """A model with external data in a folder of its own."""
    folder = tmp_path / "model"
    folder.mkdir()
    model = chain([_node("Add", ["x", "w"])], X, ["y"], {"w": np.arange(6, dtype=np.float32).reshape(2, 3)})
    onnx.save(model, folder / "m.onnx", save_as_external_data=True, size_threshold=0, location="w.bin")
    return folder


def _relocate(folder, **entries):
    model = onnx.load(folder / "m.onnx", load_external_data=False)
    tensor = model.graph.initializer[0]
    kept = {item.key: item.value for item in tensor.external_data} | entries
    del tensor.external_data[:]
    for key, value in kept.items():
        tensor.external_data.add(key=key, value=value)
    (folder / "m.onnx").write_bytes(model.SerializeToString())


def test_external_data_is_mapped(external):
    graph = load_model(external / "m.onnx")
    assert isinstance(graph.constants["w"], np.memmap)
    np.testing.assert_array_equal(graph.constants["w"], np.arange(6).reshape(2, 3))


@pytest.mark.parametrize("name", ["INT4", "UINT4", "INT2", "UINT2", "FLOAT4E2M1"])
@pytest.mark.parametrize("entries", [{"offset": "0", "length": "{}"}, {"offset": "5"}, {}])
def test_external_data_of_few_bits_is_unpacked(name, entries, tmp_path):
    kind = getattr(TensorProto, name)
    numbers = np.array([[0, 1, 1], [1, 0, 1], [1, 1, 0]]).astype(helper.tensor_dtype_to_np_dtype(kind))  # an odd count
    weights, scale = numpy_helper.from_array(numbers, "w"), np.array([0.5, 2, 3], np.float32)
    (tmp_path / "w.bin").write_bytes(bytes(int(entries.get("offset", 0))) + weights.raw_data)
    for key, value in {"location": "w.bin", **entries}.items():
        weights.external_data.add(key=key, value=value.format(len(weights.raw_data)))
    weights.ClearField("raw_data")
    weights.data_location = TensorProto.EXTERNAL
    nodes = [_node("DequantizeLinear", ["w", "s"], ["d"], axis=1), _node("Add", ["x", "d"])]
    model = chain(nodes, {"x": (1, [3, 3])}, ["y"], {"s": scale}, opset=25)
    model.graph.initializer.append(weights)
    onnx.save(model, tmp_path / "m.onnx")
    found = run(fission(load_model(tmp_path / "m.onnx")), {"x": np.zeros((3, 3), np.float32)})["y"]
    np.testing.assert_array_equal(found, numbers.astype(np.float32) * scale)


def test_missing_external_data_names_tensor_and_file(external):
    (external / "w.bin").unlink()
    with pytest.raises(ModelError, match=r"tensor 'w': its external data is missing.*'w\.bin'"):
        load_model(external / "m.onnx")


def test_external_data_that_was_cut_short_is_refused(external):
    (external / "w.bin").write_bytes(bytes(20))
    with pytest.raises(ModelError, match="which has 20"):
        load_model(external / "m.onnx")


@pytest.mark.parametrize(
    "location", ["../w.bin", "/etc/passwd", "sub/../../w.bin", "", "..\\w.bin", "C:\\w.bin", "a\0b"]
)
def test_external_data_outside_of_the_folder_is_refused(external, location):
    (external.parent / "w.bin").write_bytes((external / "w.bin").read_bytes())
    _relocate(external, location=location)
    with pytest.raises(ModelError, match="outside the model's folder"):
        load_model(external / "m.onnx")


def test_a_symbolic_link_to_the_outside_is_refused(external):
    (external / "w.bin").rename(external.parent / "w.bin")
    (external / "w.bin").symlink_to(external.parent / "w.bin")
    with pytest.raises(ModelError, match="outside the model's folder"):
        load_model(external / "m.onnx")


def test_a_linked_folder_to_the_outside_is_refused(external):
    (external / "sub").symlink_to(external.parent)
    (external / "w.bin").rename(external.parent / "w.bin")
    _relocate(external, location="sub/w.bin")
    with pytest.raises(ModelError, match="outside the model's folder"):
        load_model(external / "m.onnx")


@pytest.mark.parametrize("entries", [{"length": "8"}, {"offset": "-4"}, {"offset": "four"}, {"offset": "1000000"}])
def test_a_place_that_makes_no_sense_is_refused(external, entries):
    _relocate(external, **entries)
    with pytest.raises(ModelError, match="tensor 'w'"):
        load_model(external / "m.onnx")


def test_external_data_of_a_model_from_memory_is_refused(external):
    with pytest.raises(ModelError, match="came from memory"):
        load_model((external / "m.onnx").read_bytes())


@pytest.mark.parametrize(
    ("node", "constants", "text"),
    [
        (
            _node("Gather", ["x", "i"]),
            {"i": np.array([0, 2])},
            "its constant index 2 is outside of the first input; expected -2 to 1 along axis 0",
        ),
        (
            _node("Gather", ["x", "i"], axis=-1),
            {"i": np.array(-4)},
            "its constant index -4 is outside of the first input; expected -3 to 2 along axis -1",
        ),
        (
            _node("GatherElements", ["x", "i"], axis=1),
            {"i": np.array([[3]])},
            "its constant index 3 is outside of the first input; expected -3 to 2 along axis 1",
        ),
        (
            _node("GatherND", ["x", "i"]),
            {"i": np.array([[1, 3]])},
            "its constant index 3 is outside of the first input; expected -3 to 2 along axes of [2, 3]",
        ),
        (
            _node("ScatterND", ["x", "i", "u"]),
            {"i": np.array([[2]]), "u": np.zeros((1, 3), np.float32)},
            "its constant index 2 is outside of the first input; expected -2 to 1 along axes of [2]",
        ),
        (
            _node("ScatterElements", ["x", "i", "u"]),
            {"i": np.array([[5, 0, 0]]), "u": np.zeros((1, 3), np.float32)},
            "its constant index 5 is outside of the first input; expected -2 to 1 along axis 0",
        ),
        (_node("Expand", ["x", "s"]), {"s": np.array([-5, 3])}, "its shape is [-5, 3]; expected sizes of at least 0"),
        (
            _node("Pad", ["x", "p"]),
            {"p": np.array([-3, 0, 0, 0])},
            "its output 'y' has the shape [-1, 3]: a size is negative",
        ),
    ],
    ids=lambda item: item.op_type if hasattr(item, "op_type") else "",
)
@pytest.mark.parametrize("load", [load_model, load_segments])
def test_constant_elements_that_can_not_be_meant_are_refused(node, constants, text, load):
    with pytest.raises(ModelError) as caught:
        load(chain([node], X, ["y"], constants))
    assert str(caught.value) == f"model: node 'n' ({node.op_type}): {text}"


def test_constant_indices_within_their_axis_pass():
    load_model(chain([_node("Gather", ["x", "i"])], X, ["y"], {"i": np.array([-2, 1])}))
    load_model(chain([_node("GatherND", ["x", "i"])], X, ["y"], {"i": np.array([[-2, 2]])}))


def test_tensors_and_inputs_of_negative_size_are_refused():
    weights = {"w": np.ones((2, 3), np.float32)}
    model = chain([_node("Add", ("x", "w"))], X, ["y"], weights)
    model.graph.initializer[0].dims[0] = -2
    with pytest.raises(ModelError, match=r"tensor 'w': its shape is \[-2, 3\]: a size is negative"):
        load_model(model)
    model = chain([_node()], {"x": (F, [-4, 3])}, ["y"])
    with pytest.raises(ModelError, match="input 'x': dimension 0 is -4: a size is negative"):
        load_model(model)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("m.pt", b"PK\x03\x04" + bytes(26) + b"archive/data.pkl", "it is a file of PyTorch's"),
        ("m.pth", b"hello, world\n", "it is a file of PyTorch's"),
        ("m.korch", b"PK\x03\x04" + bytes(26) + b"manifest.json", "it is a Korch artifact"),
        ("m.ort", b"\x20\0\0\0ORTM" + bytes(40), "it is in ONNX Runtime's own format"),
    ],
)
def test_other_models_are_named(name, content, text, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ModelError, match=text):
        load_model(path)


def test_reading_takes_memory_in_proportion_to_the_file(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(_good())
    tracemalloc.start()
    try:
        load_model(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_file_that_is_too_long_for_a_model_is_not_parsed(tmp_path):
    path = tmp_path / "m.onnx"
    with path.open("wb") as stream:
        stream.truncate(1 << 31)
    with pytest.raises(ModelError, match="it has more than 2 GiB"):
        load_model(path)
