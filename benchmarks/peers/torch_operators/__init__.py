"""The ONNX operators of the benchmark models as PyTorch functions, one file per family.

The library onnx2torch, which does the same, had its last release in August 2024.
Importing this package imports PyTorch, so only the PyTorch peers import it, and only in `prepare`.
"""

from benchmarks.peers.torch_operators.elementwise import ELEMENTWISE
from benchmarks.peers.torch_operators.layout import LAYOUT
from benchmarks.peers.torch_operators.linear import LINEAR
from benchmarks.peers.torch_operators.node import Translator
from benchmarks.peers.torch_operators.normalization import NORMALIZATION
from benchmarks.peers.torch_operators.resize import RESIZE

TRANSLATORS: dict[str, Translator] = ELEMENTWISE | LINEAR | NORMALIZATION | LAYOUT | RESIZE
