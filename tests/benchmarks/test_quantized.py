"""The benchmark of quantized models: what it quantizes, counts and prints."""

from types import SimpleNamespace

import onnx

from benchmarks import quantized
from benchmarks.models import build


def test_weights_and_activations_become_bytes(tmp_path) -> None:
    quantized.quantize(build("conv_bn_relu"), tmp_path / "q.onnx")
    model = onnx.load(tmp_path / "q.onnx")
    types = {t.data_type for t in model.graph.initializer}
    assert {onnx.TensorProto.INT8, onnx.TensorProto.UINT8} <= types
    assert {"QuantizeLinear", "DequantizeLinear", "Conv"} <= {node.op_type for node in model.graph.node}


def test_products_are_counted_by_the_type_of_their_first_operand() -> None:
    texts = (
        'graph(%0 "i0": u8[1,4,3,3], %1 "i1": i8[4,4,1,1]) -> (%2 "o0")\n%2: i32[1,4,3,3] = conv(%0, %1) {groups=1}\n',
        'graph(%0 "i0": f32[2,3], %1 "i1": f32[3,4]) -> (%3 "o0")\n%2: f32[2,3] = neg(%0)\n'
        "%3: f32[2,4] = matmul(%2, %1)\n",
        'graph(%0 "i0": u8[4]) -> (%1 "o0")\n%1: f32[4] = cast(%0) {to=\'f32\'}\n',
    )
    plan = SimpleNamespace(steps=[SimpleNamespace(primitives=text) for text in texts])
    assert list(quantized.products_of(SimpleNamespace(plan=plan))) == ["u8", "f32"]
