"""PyTorch is imported for modules only: Korch works without it, and starts quickly if it is installed."""

import re
import subprocess
import sys

import pytest

import korch
from korch.errors import ModelError, OptionError


def test_korch_does_not_import_pytorch() -> None:
    code = "import sys, korch, korch.api, korch.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_is_no_model_is_named() -> None:
    text = (
        "the model is of type list; expected the path of an ONNX file, its bytes, an "
        "onnx.ModelProto, or a module of PyTorch, which must be installed"
    )
    with pytest.raises(ModelError, match=f"^{re.escape(text)}$"):
        korch.optimize([1, 2])


def test_example_inputs_are_for_modules() -> None:
    text = (
        "example_inputs: only modules of PyTorch take example inputs. "
        "Bind the shapes of an ONNX model with shapes={name: shape}"
    )
    with pytest.raises(OptionError, match=f"^{re.escape(text)}$"):
        korch.optimize("model.onnx", {"x": 1})
