"""Model files -> operator graph."""

from korch.frontend.onnx import load_model
from korch.frontend.operator import Operator, OperatorGraph, format_operators

__all__ = ["Operator", "OperatorGraph", "format_operators", "load_model"]
