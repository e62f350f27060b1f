"""Compile a kernel, run it, and compare it with the reference, for tests of any provider."""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np

from korch.candidate.candidate import Group, Offer, Refusal
from korch.measure.compiler import Builder
from korch.primitive import reference
from korch.primitive.graph import Primitive
from korch.primitive.op import Array, Category
from korch.primitive.types import UNIT_ROUNDOFF, DType
from korch.provider.provider import Kernel, Provider
from korch.system.alignment import aligned_bytes
from korch.system.native import Code, runtime
from korch.target import Target
from korch.testing.samples import random_arrays
from korch.testing.tolerance import Family, assert_same

T = TypeVar("T")
K = TypeVar("K")


class KernelError(AssertionError):
    """A kernel could not be created, or its run failed."""


class Elsewhere(Protocol):
    """Runs kernels that this process can't run, such as in an emulator."""

    def build(self, kernels: Sequence[Kernel]) -> None:
        """Compile kernels without state."""

    def run(self, kernel: Kernel, buffers: Sequence[Array]) -> int:
        """Run a kernel on arrays of bytes, which are updated in place; return the exit status."""


def run_kernel(
    kernel: Kernel,
    group: Group,
    offer: Offer,
    inputs: Sequence[Array],
    builder: Builder | Elsewhere,
    *,
    threads: int = 2,
    library: Code | Elsewhere | None = None,
) -> list[Array]:
    """Return a kernel's outputs in the plain layout.

    Args:
        kernel: the kernel that the provider built.
        group: the group that it computes.
        offer: the offer, with the layouts in which it reads and writes.
        inputs: an array per input, in the plain layout.
        builder: compiles it.
        threads: passed to its `create`.
        library: the result of `load_kernels` for it and others (default: it is built alone).

    Raises:
        KernelError: it could not be created, or its run failed.
    """
    library = library or load_kernels([kernel], builder)
    packed = [layout.pack(a) for layout, a in zip(offer.inputs, inputs, strict=True)]
    memory = [aligned_bytes(max(1, array.nbytes)) for array in packed]
    for place, array in zip(memory, packed, strict=True):
        place[: array.nbytes] = array.reshape(-1).view(np.uint8)
    types = group.output_types
    sizes = [layout.size_bytes(t) for layout, t in zip(offer.outputs, types, strict=True)]
    results = [aligned_bytes(max(1, size)) for size in sizes]
    for result in results:
        result[:] = 0xFF  # NaN, so that elements which a kernel does not write are detected
    buffers = [*memory, *results, aligned_bytes(max(64, kernel.workspace_bytes))]
    code = _run(library, kernel, buffers, threads) if isinstance(library, Code) else library.run(kernel, buffers)
    if code != 0:
        raise KernelError(f"{kernel.symbol}_run returned {code}")
    outputs = []
    for layout, type_, size, result in zip(offer.outputs, types, sizes, results, strict=True):
        flat = result[:size].view(type_.dtype.numpy)
        outputs.append(layout.unpack(flat, type_.shape))
    return outputs


def check_kernel(
    kernel: Kernel,
    group: Group,
    offer: Offer,
    inputs: Sequence[Array],
    builder: Builder | Elsewhere,
    library: Code | Elsewhere | None = None,
) -> None:
    """Compare a kernel with the reference interpreter in float64.

    Raises:
        AssertionError: they differ by more than the tolerance for such a group.
    """
    compare(group, inputs, run_kernel(kernel, group, offer, inputs, builder, library=library))


def compare(group: Group, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
    """Compare the outputs of a kernel with the reference interpreter in float64.

    Raises:
        AssertionError: they differ by more than the tolerance for such a group.
    """
    feeds = {name: array for (name, _), array in zip(group.body.inputs, inputs, strict=True)}
    expected = reference.run(group.body, feeds, exact=True)
    for (name, value), actual in zip(group.body.outputs, outputs, strict=True):
        assert_same(
            actual,
            expected[name],
            family=group_family(group),
            terms=group_terms(group),
            dtype=narrowest_float(group, DType.of(actual.dtype)),
            name=f"{name} (%{value})",
        )


def offers_of(
    provider: Provider[T, K], groups: Sequence[Group], target: T, most: int | None = None
) -> Iterator[tuple[Group, Offer, K | Refusal]]:
    """Yield the kernels that a provider builds for its offers for some groups.

    Args:
        provider: the provider; it must make an offer for each group.
        groups: the groups to compute.
        target: passed to the provider.
        most: the most offers of a group that are built; None for all.

    Raises:
        KernelError: the provider refuses a group.
    """
    for group in groups:
        offers = provider.offer(group, target)
        if isinstance(offers, Refusal):
            raise KernelError(f"{provider.name} refuses: {offers.reason}; {group.text}")
        for offer in offers[:most]:
            yield group, offer, provider.build(group, offer, target)


def check_offers(
    provider: Provider[Target, Kernel],
    groups: Sequence[Group],
    target: Target,
    builder: Builder | Elsewhere,
    rng: np.random.Generator,
    specials: bool = False,
) -> list[tuple[Group, Offer, Kernel]]:
    """Compare every offer for some groups with the reference; all kernels are compiled together.

    Args:
        provider: the provider; it must make an offer for each group.
        groups: the groups to compute.
        target: passed to the provider.
        builder: compiles the kernels.
        rng: the source of the inputs.
        specials: whether inputs also contain NaN, infinities and extreme values.

    Returns:
        The groups, offers and kernels that were checked.

    Raises:
        KernelError: the provider refuses a group, or its own offer.
        AssertionError: a kernel is wrong.
    """
    checked = []
    for group, offer, kernel in offers_of(provider, groups, target):
        if isinstance(kernel, Refusal):
            raise KernelError(f"{provider.name} refuses its offer: {kernel.reason}")
        checked.append((group, offer, kernel))
    library = load_kernels([kernel for _, _, kernel in checked], builder)
    for group, offer, kernel in checked:
        inputs = random_arrays(rng, group.input_types, specials)
        try:
            check_kernel(kernel, group, offer, inputs, builder, library)
        except AssertionError as error:
            raise KernelError(f"{error}; {offer}; {group.text}") from error
    return checked


def load_kernels(kernels: Sequence[Kernel], builder: Builder | Elsewhere) -> Code | Elsewhere:
    """Compile kernels and load them."""
    if isinstance(builder, Builder):
        return Code(builder.objects([text for kernel in kernels for text in kernel.texts]))
    builder.build(kernels)
    return builder


def group_family(group: Group) -> Family:
    """Return the tolerance family of a group: "composite" if it computes, "move" if it only moves data."""
    return "composite" if any(map(_computes, group.body.primitives)) else "move"


def group_terms(group: Group) -> int:
    """Return the largest number of terms that are added up for one element, estimated from the operations."""
    body = group.body
    longest = 1
    for primitive in body.primitives:
        if primitive.row.category in (Category.LINEAR, Category.REDUCE):
            flop = body.work_flop(primitive)
            longest = max(longest, flop // max(1, body.types[primitive.output].size))
    return longest


def narrowest_float(group: Group, own: DType) -> DType:
    """Return the float type with the largest rounding error in a group; an output may depend on values of this type.

    Args:
        group: the group.
        own: the type of the output that is checked.
    """
    found = {type_.dtype for type_ in group.body.types if type_.dtype.is_float} | {own}
    return max(found, key=lambda dtype: UNIT_ROUNDOFF[dtype]) if own.is_float else own


def _computes(primitive: Primitive) -> bool:
    return primitive.row.category not in (Category.LAYOUT, Category.BROADCAST)


def _run(library: Code, kernel: Kernel, buffers: Sequence[Array], threads: int) -> int:
    pointers = (ctypes.c_void_p * len(buffers))(*(b.ctypes.data for b in buffers))
    before = runtime().korch_set_threads(threads)
    state = _create(library, kernel, threads)
    run = library.function(kernel.symbol + "_run")
    code = run(ctypes.c_void_p(state), pointers)
    runtime().korch_set_threads(before)
    if kernel.has_state:
        library.function(kernel.symbol + "_destroy", None)(ctypes.c_void_p(state))
    return int(code)


def _create(library: Code, kernel: Kernel, threads: int) -> int | None:
    if not kernel.has_state:
        return None
    create = library.function(kernel.symbol + "_create", ctypes.c_void_p)
    text = ctypes.create_string_buffer(512)
    state: int | None = create(ctypes.c_int(threads), text, ctypes.c_size_t(512))
    if not state:
        raise KernelError(f"{kernel.symbol}_create: {text.value.decode(errors='replace')}")
    return state
