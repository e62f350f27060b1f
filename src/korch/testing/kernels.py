"""Compile a kernel, run it, compare it with the reference: for tests of any provider."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from korch.candidate.candidate import Group, Offer
from korch.libraries import find_library
from korch.measure.compiler import Builder
from korch.measure.worker import aligned
from korch.primitive import reference
from korch.primitive.op import Array
from korch.provider.provider import Kernel
from korch.testing.tolerance import assert_same


class KernelError(AssertionError):
    """A kernel could not be created, or its run failed."""


def run_kernel(
    kernel: Kernel, group: Group, offer: Offer, inputs: Sequence[Array], builder: Builder,
    threads: int = 2,
) -> list[Array]:  # fmt: skip
    """Return a kernel's outputs in the plain layout.

    Args:
        kernel: what the provider built.
        group: what it computes.
        offer: the layouts in which it reads and writes.
        inputs: an array per input, in the plain layout.
        builder: compiles it.
        threads: passed to its `create`.

    Raises:
        KernelError: it could not be created, or its run failed.
    """
    for name in kernel.libraries:
        path = find_library(name)
        if path is not None:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(builder.library([kernel.source], kernel.libraries)))
    packed = [layout.pack(a) for layout, a in zip(offer.inputs, inputs, strict=True)]
    memory = [aligned(max(1, array.nbytes)) for array in packed]
    for place, array in zip(memory, packed, strict=True):
        place[: array.nbytes] = array.reshape(-1).view(np.uint8)
    types = group.output_types
    sizes = [layout.size_bytes(t) for layout, t in zip(offer.outputs, types, strict=True)]
    results = [aligned(max(1, size)) for size in sizes]
    for result in results:
        result[:] = 0xFF  # not a number: what a kernel forgets to write is seen
    buffers = [*memory, *results, aligned(max(64, kernel.workspace_bytes))]
    pointers = (ctypes.c_void_p * len(buffers))(*(b.ctypes.data for b in buffers))
    state = _create(library, kernel, threads)
    code = getattr(library, kernel.symbol + "_run")(ctypes.c_void_p(state), pointers)
    if kernel.has_state:
        getattr(library, kernel.symbol + "_destroy")(ctypes.c_void_p(state))
    if code != 0:
        raise KernelError(f"{kernel.symbol}_run returned {code}")
    outputs = []
    for layout, type_, size, result in zip(offer.outputs, types, sizes, results, strict=True):
        flat = result[:size].view(type_.dtype.numpy)
        outputs.append(layout.unpack(flat, type_.shape))
    return outputs


def check_kernel(
    kernel: Kernel, group: Group, offer: Offer, inputs: Sequence[Array], builder: Builder
) -> None:
    """Compare a kernel with the reference interpreter in float64.

    Raises:
        AssertionError: they differ by more than the tolerance for such a group.
    """
    feeds = {name: array for (name, _), array in zip(group.body.inputs, inputs, strict=True)}
    expected = reference.run(group.body, feeds, exact=True)
    outputs = run_kernel(kernel, group, offer, inputs, builder)
    for (name, value), actual in zip(group.body.outputs, outputs, strict=True):
        assert_same(actual, expected[name].astype(actual.dtype), **tolerance_of(group, value))


def _create(library: ctypes.CDLL, kernel: Kernel, threads: int) -> int | None:
    if not kernel.has_state:
        return None
    create = getattr(library, kernel.symbol + "_create")
    create.restype = ctypes.c_void_p
    text = ctypes.create_string_buffer(512)
    state: int | None = create(ctypes.c_int(threads), text, ctypes.c_size_t(512))
    if not state:
        raise KernelError(f"{kernel.symbol}_create: {text.value.decode(errors='replace')}")
    return state
