"""Converts float32 ONNX models to weights of 4 or 8 bits, or to 16-bit floats, as common tools write them."""

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

BLOCK = 32
"""The number of int4 weights, along the reduction axis, that share a scale."""


def with_int4_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose products by constants are MatMulNBits, made by ONNX Runtime's quantizer."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(model, bits=4, block_size=BLOCK, is_symmetric=True)
    quantizer.process()
    found: onnx.ModelProto = quantizer.model.model
    return found


def with_int8_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model, changed so that its products by constants read int8, with a scale for each column."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes = []
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in constants:
            name = node.input[1]
            weights = numpy_helper.to_array(constants[name])
            scale = (np.abs(weights).max(0) / 127).astype(np.float32)
            q = np.rint(weights / scale).astype(np.int8)
            model.graph.initializer.remove(constants.pop(name))
            parts = [numpy_helper.from_array(array, f"{name}_{part}") for part, array in (("q", q), ("scale", scale))]
            model.graph.initializer.extend(parts)
            names = [part.name for part in parts]
            nodes.append(helper.make_node("DequantizeLinear", names, [f"{name}_real"], axis=1, name=f"{name}_real"))
            node.input[1] = f"{name}_real"
        nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def in_float16(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model in float16, including inputs and outputs, converted by ONNX Runtime's tool."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    found: onnx.ModelProto = convert_float_to_float16(model, keep_io_types=False)
    return found


def in_bfloat16(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model in bfloat16, including inputs and outputs."""
    half = in_float16(model)
    for value in (*half.graph.input, *half.graph.output, *half.graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT16:
            value.type.tensor_type.elem_type = TensorProto.BFLOAT16
    tensors = [*half.graph.initializer]
    for node in half.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT16:
                attribute.i = TensorProto.BFLOAT16
            if attribute.type == onnx.AttributeProto.TENSOR:
                tensors.append(attribute.t)
    for tensor in tensors:
        if tensor.data_type == TensorProto.FLOAT16:
            tensor.CopyFrom(_bfloat16(tensor))
    half.opset_import[0].version = max(half.opset_import[0].version, 22)  # the first with bfloat16 convolutions
    return half


def _bfloat16(tensor: Any) -> Any:
    dtype = helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)
    array = numpy_helper.to_array(tensor).astype(np.float32).astype(dtype)
    return numpy_helper.from_array(array, tensor.name)
