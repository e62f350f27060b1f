"""PyTorch modules -> ONNX model with its weights in place, as `load_model` reads it.

Nothing of Korch imports this package unless PyTorch is there: `import korch` does not need it.
"""

from korch.frontend.torch.export import Exported, export_call, export_module, is_torch_model
from korch.frontend.torch.tree import Trees

__all__ = ["Exported", "Trees", "export_call", "export_module", "is_torch_model"]
