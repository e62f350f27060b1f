"""Sets PyTorch's switches while kernels are measured and captured, so that its libraries always compute the same way.

These switches are global to the process. PyTorch has an older and a newer set of switches for TF32, which must
not be mixed: the older ones can't even be read once a newer one has been set. So the newer ones are used where
they exist.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def library_flags(torch: Any, allow_tf32: bool) -> Iterator[None]:
    """Set whether products may round float32 operands to 11 bits; sum in float32; let cuDNN time its convolutions.

    The switches are restored at the end.

    `allow_tf32`: whether operands may be rounded.
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
    """Return the switches to set: for each, the object that has it, its name, and the wanted value."""
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
