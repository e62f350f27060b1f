"""Runs kernels for CUDA devices in Triton's interpreter and compares them with the reference, for tests."""

import math
import re
from collections.abc import Sequence

import numpy as np

from korch.candidate.candidate import Group, Offer, Refusal
from korch.cuda.kernel import CudaKernel, Launch
from korch.cuda.target import CudaTarget
from korch.primitive.op import Array
from korch.provider.provider import Provider
from korch.testing.kernels import KernelError, compare, offers_of
from korch.testing.samples import random_arrays
from tests.support.interpret import run_interpreted


def run_cuda_kernel(kernel: CudaKernel, group: Group, offer: Offer, inputs: Sequence[Array]) -> list[Array]:
    """Run a kernel in Triton's interpreter; return its outputs in the plain layout."""
    packed = [layout.pack(a) for layout, a in zip(offer.inputs, inputs, strict=True)]
    types = group.output_types
    sizes = [
        (type_.dtype, math.prod(layout.physical_shape(type_.shape)))
        for layout, type_ in zip(offer.outputs, types, strict=True)
    ]
    found = run_interpreted(kernel, packed, sizes)
    return [layout.unpack(flat, type_.shape) for layout, type_, flat in zip(offer.outputs, types, found, strict=True)]


def check_cuda_offers(
    provider: Provider[CudaTarget, CudaKernel],
    groups: Sequence[Group],
    target: CudaTarget,
    rng: np.random.Generator,
    specials: bool = False,
    most: int | None = None,
) -> list[tuple[Group, Offer, CudaKernel]]:
    """Compare every offer for some groups with the reference.

    Args:
        provider: a provider that has offers for each of the groups.
        groups: the groups to compute.
        target: the target of the kernels.
        rng: the source of the inputs.
        specials: whether inputs also contain NaN, infinities and extreme numbers.
        most: the most offers of a group that are checked; all if not given.

    Returns:
        The group, offer and kernel of each checked offer; offers that the provider refuses to build are left out.

    Raises:
        KernelError: the provider refuses a group, or a kernel is wrong.
    """
    checked, seen = [], set()
    for group, offer, kernel in offers_of(provider, groups, target, most):
        if isinstance(kernel, Refusal):
            continue
        checked.append((group, offer, kernel))
        text = (group.key, offer.inputs, offer.outputs, *map(_computation, kernel.launches))
        if text in seen:
            continue
        seen.add(text)
        inputs = random_arrays(rng, group.input_types, specials)
        try:
            compare(group, inputs, run_cuda_kernel(kernel, group, offer, inputs))
        except Exception as error:
            sources = "\n".join(step.source for step in kernel.steps)
            raise KernelError(f"{error}; {offer}; {sources}") from error
    return checked


def _computation(launch: Launch) -> str:
    """Return a launch's source without the parts that the interpreter ignores."""
    text = launch.source.replace(launch.symbol, "")
    return re.sub(r'num_stages=\d+|, input_precision="\w+"|# variant.*', "", text)
