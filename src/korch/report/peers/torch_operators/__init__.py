"""ONNX operators as PyTorch functions, one file per family.

No library that is still maintained does this: the last release of onnx2torch is of August 2024.
Importing this package imports PyTorch, so only the PyTorch peers do it, and late.
"""

from korch.report.peers.torch_operators.elementwise import ELEMENTWISE
from korch.report.peers.torch_operators.layout import LAYOUT
from korch.report.peers.torch_operators.linear import LINEAR
from korch.report.peers.torch_operators.node import Translator
from korch.report.peers.torch_operators.normalization import NORMALIZATION
from korch.report.peers.torch_operators.resize import RESIZE

TRANSLATORS: dict[str, Translator] = ELEMENTWISE | LINEAR | NORMALIZATION | LAYOUT | RESIZE
