"""The families of random fragments: recurrences, transforms, indices, samples, loops.

`random_onnx` runs a fragment with both references before it becomes part of a graph.
"""

from collections.abc import Callable

import numpy as np

from korch.primitive.op import Array
from tests.support.random_onnx_bodies import branch, loop, scan
from tests.support.random_onnx_fragment import Fragment, Writer
from tests.support.random_onnx_images import columns, conv_transpose, grid, regions, resized, unpooled
from tests.support.random_onnx_indices import elements, extremes, looked_up, n_dimensional
from tests.support.random_onnx_others import others, quantized, quantized_data
from tests.support.random_onnx_shapes import Rng
from tests.support.random_onnx_signals import dft, recurrent, stft

Family = Callable[[Rng, Writer, Array, str, int], bool]


FAMILIES: tuple[Family, ...] = (
    recurrent,
    recurrent,
    dft,
    stft,
    elements,
    elements,
    n_dimensional,
    looked_up,
    extremes,
    grid,
    regions,
    resized,
    unpooled,
    columns,
    conv_transpose,
    conv_transpose,
    quantized,
    quantized_data,
    scan,
    scan,
    loop,
    loop,
    branch,
    others,
)
"""The families of fragments; a family that does not suit a value draws nothing."""


STEPS = (extremes, unpooled, quantized_data, others)
"""The families for which a rounding error may change the result a lot."""

OPEN = (recurrent, dft, stft, grid, regions, resized, conv_transpose, quantized)
"""The families for which implementations may differ on NaN and infinities: some skip weights of 0."""


def draw_fragment(rng: Rng, x: Array, opset: int, source: str, out: str, *, is_exact: bool) -> Fragment | None:
    """Return a random fragment that reads `x` by the name `source` and writes `out`; None if `x` is not suitable.

    Args:
        rng: the source of all choices.
        x: the value.
        opset: the opset of the graph.
        source: the value's name.
        out: the name of the fragment's output.
        is_exact: whether every implementation computes the same value: others are not read by steps.
    """
    w = Writer(out)
    family = FAMILIES[int(rng.integers(len(FAMILIES)))]
    if (family in STEPS and not is_exact) or (family in OPEN and not np.isfinite(x).all()):
        return None
    return w.fragment if family(rng, w, x, source, opset) and w.fragment.nodes else None
