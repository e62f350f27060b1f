"""A model with open dimensions -> the sizes that are assumed where the caller gives none."""

from collections.abc import Mapping, Sequence

import onnx

from korch.frontend.shapes import is_batch
from korch.ranges.binding import Bound
from korch.ranges.form import range_text

BATCHES, IMAGES, LENGTHS = range(1, 9), range(64, 513, 32), range(1, 129)
"""The sizes of a batch, of an axis of an image, and of any other axis."""

FIXED = {BATCHES: 1, IMAGES: 224, LENGTHS: 128}
"""The size instead of each range, if a model can't be run for a range."""

Binding = Mapping[str, tuple[Bound, ...]]


def assumed(declared: Sequence[onnx.ValueInfoProto], given: Binding) -> dict[str, tuple[Bound, ...]]:
    """Return ranges of sizes for the dimensions that a model and a binding leave open.

    Named dimensions are bound by their names. An input with dimensions without a name is bound as a whole, except if
    there are several of these: their dimensions are mostly equal, which ranges can't say, so they get one size each.
    """
    found: dict[str, tuple[Bound, ...]] = {}
    unnamed: dict[str, tuple[Bound, ...]] = {}
    for item in declared:
        tensor = item.type.tensor_type
        if item.name in given or not tensor.HasField("shape"):
            continue
        dims = tensor.shape.dim
        bounds = [_range(dim.dim_param, axis, len(dims)) for axis, dim in enumerate(dims)]
        is_open = [not dim.HasField("dim_value") or dim.dim_value < 0 for dim in dims]
        if any(free and not dim.dim_param for free, dim in zip(is_open, dims, strict=True)):
            unnamed[item.name] = tuple(
                bound if free else dim.dim_value for free, bound, dim in zip(is_open, bounds, dims, strict=True)
            )
            continue
        for dim, bound in zip(dims, bounds, strict=True):
            if dim.dim_param and dim.dim_param not in given:
                found.setdefault(dim.dim_param, (bound,))
    return found | (unnamed if len(unnamed) == 1 else fixed(unnamed))


def fixed(binding: Binding) -> dict[str, tuple[Bound, ...]]:
    """Return a binding with one size for each range."""
    return {
        name: tuple(FIXED[bound] if isinstance(bound, range) else bound for bound in shape)
        for name, shape in binding.items()
    }


def assumed_text(sizes: Binding) -> str:
    """Return the line that says which sizes are assumed."""
    return f"sizes that are not given are assumed; to change them: {binding_text(sizes)}"


def binding_text(binding: Binding) -> str:
    """Return a binding in the syntax of the option --shape."""
    texts = {name: [range_text(n) if isinstance(n, range) else str(n) for n in own] for name, own in binding.items()}
    return " ".join(f"--shape {name}={'x'.join(sizes)}" for name, sizes in texts.items())


def _range(name: str, axis: int, rank: int) -> range:
    if is_batch(name) or (axis == 0 and not name):
        return BATCHES
    return IMAGES if rank >= 4 and axis >= 2 else LENGTHS
