"""Plans for two free dimensions compute the needed rows of each outer coordinate, and give the model's results."""

import itertools

import numpy as np
import pytest

from korch.target import has_matrix_units
from korch.tile.ir.parameters import PART
from tests.ranges.range_models import masked_model, model, weight
from tests.runtime.test_kernels_for_sizes import is_wrong, plans_of

BATCHES, LENGTH = 6, 21
SHAPES = {"b": (range(1, BATCHES + 1),), "n": (range(1, LENGTH + 1),)}
SIZES = tuple(itertools.product((1, 2, BATCHES - 1, BATCHES), (1, 15, 16, 17, LENGTH - 1, LENGTH)))

ENCODER = """
g (float[b, n, 32] x, float[b, n] bias) => (float[b, n, 32] y)
{
    q = MatMul(x, wq)
    k = MatMul(x, wk)
    t = Transpose <perm = [0, 2, 1]> (k)
    s = MatMul(q, t)
    one = Constant <value_ints: ints = [1]> ()
    row = Unsqueeze(bias, one)
    c = Add(s, row)
    p = Softmax <axis = -1> (c)
    v = MatMul(x, wv)
    a = MatMul(p, v)
    r = Add(a, x)
    m = ReduceMean <axes = [2]> (r)
    d = Sub(r, m)
    h = MatMul(d, wide)
    e = Relu(h)
    f = MatMul(e, narrow)
    y = Add(f, d)
}
"""


FLAT = """
g (float[b, n, 32] x) => (float[rows, 32] y, float[b, n, 32] z)
{
    r = Reshape(x, flat)
    h = MatMul(r, wide)
    e = Relu(h)
    y = MatMul(e, narrow)
    s = Shape(x)
    t = Reshape(y, s)
    z = Add(t, x)
}
"""


@pytest.mark.parametrize(("text", "count"), [(ENCODER, 6), (FLAT, 2)], ids=["encoder", "flat"])
def test_rows_of_two_dimensions(cache_folder, text: str, count: int) -> None:
    weights = {name: weight(32, 32) for name in ("wq", "wk", "wv")} | {"flat": np.array([-1, 32])}
    source = model(text, **weights, wide=weight(32, 96), narrow=weight(96, 32))
    whole = masked_model(source, SHAPES)
    plans, kernels, library = plans_of(whole, cache_folder, count)
    assert sum(bool(kernel.size_input) for kernel in kernels) >= 3
    if has_matrix_units() and text == ENCODER:  # products on vector units leave out what one dimension does not need
        programs = [kernel.program for kernel in kernels if kernel.program is not None]
        assert sum(PART in [parameter.name for parameter in program.parameters] for program in programs) >= 3
    wrong = [
        (seed, *sizes)
        for seed, steps in enumerate(plans)
        for sizes in SIZES
        if is_wrong(source, whole, steps, library, SHAPES, sizes)
    ]
    assert not wrong
