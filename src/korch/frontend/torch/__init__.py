"""Exports PyTorch modules as ONNX models for `load_model`, with the weights left in place.

Korch imports this package only if PyTorch is installed: `import korch` does not need it.
"""

from korch.frontend.torch.export import Exported, export_call, export_module, is_torch_model
from korch.frontend.torch.tree import Trees

__all__ = ["Exported", "Trees", "export_call", "export_module", "is_torch_model"]
