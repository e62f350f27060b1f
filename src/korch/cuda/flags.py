"""How PyTorch's libraries compute while kernels are measured and captured: the same way each time.

PyTorch holds these switches for the whole process, and has two generations of them for TF32 that it
lets nobody mix: the older one can't even be read once somebody has set the newer one. So the newer
one is used wherever it is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def library_flags(torch: Any, allow_tf32: bool) -> Iterator[None]:
    """Let products round float32 factors to 11 bits or not, sum in float32, and time convolutions.

    The switches are put back at the end.

    Args:
        torch: the module.
        allow_tf32: whether they may round.
    """
    wanted = switches(torch, allow_tf32)
    before = [getattr(holder, name) for holder, name, _ in wanted]
    try:
        for holder, name, value in wanted:
            setattr(holder, name, value)
        yield
    finally:
        for (holder, name, _), value in zip(wanted, before, strict=True):
            setattr(holder, name, value)


def switches(torch: Any, allow_tf32: bool) -> list[tuple[Any, str, Any]]:
    """Return what to set: where, by which name, to what."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    found: list[tuple[Any, str, Any]] = [
        (matmul, "allow_fp16_reduced_precision_reduction", False),
        (matmul, "allow_bf16_reduced_precision_reduction", False),
        (cudnn, "benchmark", True),
    ]
    if hasattr(cudnn, "conv"):  # PyTorch 2.9
        text = "tf32" if allow_tf32 else "ieee"
        return [*found, *((holder, "fp32_precision", text) for holder in (matmul, cudnn.conv, cudnn.rnn))]
    return [*found, (matmul, "allow_tf32", allow_tf32), (cudnn, "allow_tf32", allow_tf32)]
