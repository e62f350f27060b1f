"""A replacement for the package tensorrt with the same names and calls, which runs ONNX Runtime on the CPU.

An engine is the network itself and its precision; a run reads and writes at the addresses given.
"""

import ctypes
import json
from types import ModuleType, SimpleNamespace

import numpy as np
import onnx
import onnxruntime

VERSION = "10.9.0"


class Flags:
    TF32, DISABLE_TIMING_CACHE = range(2)
    STRONGLY_TYPED = 1


class Logger:
    ERROR = 1

    def __init__(self, level):
        self.level = level


class Config:
    def __init__(self):
        self.flags, self.max_aux_streams = {Flags.TF32}, None  # TF32 is on unless it is cleared

    def set_flag(self, flag):
        self.flags.add(flag)

    def clear_flag(self, flag):
        self.flags.discard(flag)


class Builder:
    def __init__(self, log):
        assert isinstance(log, Logger)

    def create_network(self, flags):
        assert flags == 1 << Flags.STRONGLY_TYPED
        return SimpleNamespace(model=None)

    def create_builder_config(self):
        return Config()

    def build_serialized_network(self, network, config):
        assert Flags.DISABLE_TIMING_CACHE in config.flags and config.max_aux_streams == 0
        head = {"tf32": Flags.TF32 in config.flags}
        return json.dumps(head).encode() + b"\n" + network.model


class OnnxParser:
    def __init__(self, network, log):
        self.network, self.errors = network, []

    def parse(self, text):
        try:
            onnxruntime.InferenceSession(text, providers=["CPUExecutionProvider"])
        except Exception as error:  # noqa: BLE001 - what it does not take
            self.errors.append(str(error))
            return False
        self.network.model = text
        return True

    @property
    def num_errors(self):
        return len(self.errors)

    def get_error(self, i):
        return SimpleNamespace(desc=lambda: self.errors[i])


class Context:
    def __init__(self, model):
        self.session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        self.addresses = {}

    def set_tensor_address(self, name, address):
        assert address % 256 == 0
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream):
        feeds = {item.name: self.view(item).copy() for item in self.session.get_inputs()}
        names = [item.name for item in self.session.get_outputs()]
        results = self.session.run(names, feeds)
        for item, result in zip(self.session.get_outputs(), results, strict=True):
            self.view(item)[...] = result
        return True

    def view(self, item):
        kind = {"tensor(float)": np.float32, "tensor(float16)": np.float16}[item.type]
        count = int(np.prod(item.shape))
        memory = (ctypes.c_uint8 * (count * np.dtype(kind).itemsize)).from_address(self.addresses[item.name])
        return np.frombuffer(memory, kind).reshape(item.shape)


class Runtime:
    def __init__(self, log):
        self.log = log

    def deserialize_cuda_engine(self, image):
        head, found, model = image.partition(b"\n")
        if not found or not head.startswith(b"{"):
            return None
        onnx.load_from_string(model)
        return SimpleNamespace(create_execution_context=lambda: Context(model))


def as_module():
    module = ModuleType("tensorrt")
    module.__version__ = VERSION
    module.Logger, module.Builder, module.OnnxParser = Logger, Builder, OnnxParser
    module.Runtime, module.BuilderFlag = Runtime, Flags
    module.NetworkDefinitionCreationFlag = Flags
    return module
