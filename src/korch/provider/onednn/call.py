"""A oneDNN primitive as data: what is asked of the library, and what a kernel's source says."""

from __future__ import annotations

import re
from dataclasses import dataclass

from korch.candidate.layout import Layout

Dims = tuple[int, ...]

ANY = "any"


@dataclass(frozen=True, slots=True)
class CallTensor:
    """A tensor of a primitive.

    Attributes:
        buffer: its position in the kernel's buffers.
        dims: its sizes as oneDNN counts them.
        form: its order in memory: a format tag (`abcd`), a stride for each axis, or `any`, for
            which the library names what it prefers.
    """

    buffer: int
    dims: Dims
    form: str | Dims


@dataclass(frozen=True, slots=True)
class Eltwise:
    """A post-operation on each element."""

    kind: str
    alpha: float = 0.0
    beta: float = 0.0


@dataclass(frozen=True, slots=True)
class Binary:
    """A post-operation with another tensor, whose dims broadcast to the output's."""

    kind: str
    other: CallTensor


@dataclass(frozen=True, slots=True)
class PrimitiveCall:
    """A primitive with all that it is made of.

    Attributes:
        kind: convolution, deconvolution, matmul, pooling or reorder.
        algorithm: the constant of `dnnl_alg_kind_t` that some kinds take, without its prefix.
        tensors: what it reads and writes: x, w and y, or x and y.
        bias: a tensor that is added per output channel.
        steps: strides, then the kernel (pooling only), dilations from 0, pads before and after.
        post: post-operations in order.
    """

    kind: str
    algorithm: str
    tensors: tuple[CallTensor, ...]
    bias: CallTensor | None = None
    steps: tuple[Dims, ...] = ()
    post: tuple[Eltwise | Binary, ...] = ()


@dataclass(frozen=True, slots=True)
class LibraryAnswer:
    """How the library would run a call.

    Attributes:
        implementation: its name for the code.
        weights: the order of the weights in memory, axes as oneDNN counts them; None if there are
            no weights, or no format tag names it.
        workspace_bytes: scratch memory of a run.
    """

    implementation: str
    weights: Layout | None
    workspace_bytes: int

    @property
    def is_reference(self) -> bool:
        """Whether it is the slow reference code, which runs every primitive."""
        return any(part.startswith("ref") for part in re.split("[:+]", self.implementation))
