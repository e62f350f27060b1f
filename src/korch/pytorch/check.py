"""Compares what is exported of a module, and its executable, with the module itself.

The inputs are the example inputs and others that reach masks, empty rows and boundaries
(`korch.frontend.torch.samples`). The errors that are allowed are those of the validation (`korch.numerics`).
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from korch.errors import InaccurateError, ProviderError, UnsupportedError
from korch.fission import fission
from korch.frontend.onnx import load_model
from korch.frontend.torch import Exported
from korch.numerics import ROUNDINGS, TOLERANCE, Standard, difference
from korch.options import Options
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.op import Array
from korch.pytorch.tensors import as_array
from korch.validation.standard import has_opaque

SECONDS, SHARE = 2.0, 0.05
"""The comparison takes no further inputs after this time, or after this share of the budget."""

MOST_BYTES, MOST_FLOP = 1 << 26, 1e8
"""A module with more weights or more work is compared only when it is built, since the interpreter is slow."""

OTHERWISE_EXPORTED = "PyTorch exports something else than it computes"


def check_module(exported: Exported, options: Options, flat: Any = None) -> None:
    """Compare an exported module, or its executable, with the module.

    `options`: the tolerance, and the budget, of which this takes a part. `flat`: the executable; None to interpret the
    exported primitives, which is left out for large modules.

    Raises:
        UnsupportedError: PyTorch exported something else than the module computes.
        InaccurateError: the executable computes something else.
    """

    @cache
    def graph() -> PrimitiveGraph | None:
        try:
            found = fission(load_model(exported.model, exported.shapes))
        except UnsupportedError:  # a part of it runs on the host
            return None
        return None if has_opaque(found) else found

    if flat is None and not _is_small(exported, graph):
        return
    for sample in exported.samples(limit_s(options)):
        inputs, wanted = ([as_array(t, "a tensor") for t in side] for side in (sample.inputs, sample.outputs))
        try:
            found = None if flat is None else flat(*inputs)
        except ProviderError:  # such as a place outside of a tensor, which PyTorch may not notice
            continue
        if found is not None and all(map(_is_near, found, wanted)):
            continue
        standard = _standard(graph(), inputs, options)
        names = [value.name for value in exported.model.proto.graph.output]
        if standard is not None and (text := _discrepancy(names, wanted, wanted, standard)):
            raise UnsupportedError(
                f"{OTHERWISE_EXPORTED} with {sample.name}: {text}",
                where=exported.model.name,
                hint="Replace what it exports wrongly; torch.compile(module, backend='korch') leaves it to PyTorch",
            )
        if found is not None and (text := _discrepancy(names, found, wanted, standard)):
            raise InaccurateError(
                f"the executable computes something else than the module with {sample.name}: {text}",
                where=exported.model.name,
                hint="Set strict=True, or tolerance= above what the module needs, or report this with the module",
            )


def limit_s(options: Options) -> float:
    """Return the seconds after which a comparison takes no further inputs."""
    return SECONDS if options.budget_s is None else min(SECONDS, SHARE * options.budget_s)


def _is_small(exported: Exported, graph: Callable[[], PrimitiveGraph | None]) -> bool:
    """Return whether the primitives of a module can be interpreted in little time."""
    if sum(array.nbytes for array in exported.model.arrays.values()) > MOST_BYTES or (found := graph()) is None:
        return False
    return found.total_flop <= MOST_FLOP


def _standard(graph: PrimitiveGraph | None, inputs: Sequence[Array], options: Options) -> Standard | None:
    """Return the exact results of the primitives for some inputs; None if a part of the module has none."""
    if graph is None:
        return None
    given = {name: array for (name, _), array in zip(graph.inputs, inputs, strict=True)}
    with np.errstate(all="ignore"):
        return Standard(graph, given, graph, options.allowed_error, options.search.seed, precision=options.precision)


def _is_near(found: Array, wanted: Array) -> bool:
    """Return whether two arrays agree within the least tolerance."""
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return False
    if found.dtype.kind in "iub":
        return np.array_equal(found, wanted)
    roundoff = float(ml_dtypes.finfo(found.dtype).eps)  # type: ignore[no-untyped-call]
    return difference(found, wanted).of_largest <= max(TOLERANCE, ROUNDINGS * roundoff)


def _discrepancy(
    names: Sequence[str], found: Sequence[Array], wanted: Sequence[Array], standard: Standard | None
) -> str:
    """Return which output differs and how; "" if all are within the allowed errors of the standard, or of `wanted`."""
    for name, array, right in zip(names, found, wanted, strict=True):
        if (array.dtype, array.shape) != (right.dtype, right.shape):
            return f"output {name!r} is {array.dtype}{list(array.shape)}, not {right.dtype}{list(right.shape)}"
    if standard is None:
        pairs = {name: (array, right) for name, array, right in zip(names, found, wanted, strict=True)}
        errors = {name: difference(*pair).of_largest for name, pair in pairs.items() if not _is_near(*pair)}
    else:
        with np.errstate(all="ignore"):
            judged, refused = standard.judge(dict(zip(names, found, strict=True)))
        errors = {name: judged[name].of_largest for name in refused}
    for name, error in errors.items():
        if np.isfinite(error):
            return f"output {name!r} differs by {error:.2e} of its largest element"
        return f"output {name!r} has NaN or infinities elsewhere"
    return ""
