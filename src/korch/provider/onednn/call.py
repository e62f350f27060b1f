"""A oneDNN primitive as data, from which both queries to the library and the source of a kernel are made."""

from __future__ import annotations

import re
from dataclasses import dataclass

from korch.candidate.layout import Layout

Dims = tuple[int, ...]

ANY = "any"


@dataclass(frozen=True, slots=True)
class CallTensor:
    """A tensor of a primitive."""

    buffer: int  # its position in the kernel's buffers
    dims: Dims  # its sizes along oneDNN's axes
    # its memory format: a format tag (`abcd`), a stride for each axis, or `any`, for which the library chooses the
    # format that it prefers
    form: str | Dims


@dataclass(frozen=True, slots=True)
class Eltwise:
    """A post-operation on each element."""

    kind: str
    alpha: float = 0.0
    beta: float = 0.0


@dataclass(frozen=True, slots=True)
class Binary:
    """A post-operation with a second tensor, whose dims broadcast to the output's."""

    kind: str
    other: CallTensor


@dataclass(frozen=True, slots=True)
class PrimitiveCall:
    """A oneDNN primitive with all of its arguments."""

    kind: str  # convolution, deconvolution, matmul, pooling or reorder
    algorithm: str  # the constant of `dnnl_alg_kind_t` that some kinds take, without its prefix
    tensors: tuple[CallTensor, ...]  # the tensors that it reads and writes: x, w and y, or x and y
    bias: CallTensor | None = None  # a tensor that is added per output channel
    # strides, then the kernel (pooling only), dilations (0 means dense), pads before and after
    steps: tuple[Dims, ...] = ()
    post: tuple[Eltwise | Binary, ...] = ()  # post-operations in order


@dataclass(frozen=True, slots=True)
class LibraryAnswer:
    """How the library would run a call."""

    implementation: str  # the library's name of the implementation
    # the layout of the weights in memory, in terms of oneDNN's axes; None if there are no weights, or if no format tag
    # has this layout
    weights: Layout | None
    workspace_bytes: int  # the scratch memory of a run

    @property
    def is_reference(self) -> bool:
        """Whether the implementation is the slow reference code, which can run every primitive."""
        return any(part.startswith("ref") for part in re.split("[:+]", self.implementation))
