"""PyTorch tensors <-> NumPy arrays of the same memory."""

from typing import Any

import ml_dtypes
import numpy as np
import torch

from korch.errors import InputError
from korch.primitive.op import Array


def as_array(tensor: Any, name: str) -> Any:
    """Return a PyTorch tensor's memory as an array; other objects are returned unchanged.

    Raises:
        InputError: it is not a dense tensor in the memory of the CPU.
    """
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise InputError(
            f"it lies on {tensor.device}, stored as {tensor.layout}",
            where=f"input {name!r}",
            expected="a dense tensor on the CPU",
            hint="Call tensor.cpu() first",
        )
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype is torch.bfloat16:
        return plain.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return plain.numpy()


def as_tensor(array: Array) -> Any:
    """Return an array's memory as a PyTorch tensor."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)
