"""Products by matrices that an index selects: compiled, run and compared with the reference in float64."""

import numpy as np
import pytest

from korch.candidate.candidate import Group, Refusal
from korch.primitive.ops.elementwise import CastAttributes
from korch.primitive.ops.layout import ReshapeAttributes
from korch.primitive.ops.reduce import BroadcastAttributes
from korch.primitive.types import DType, ValueType
from korch.provider.gemm import GemmProvider
from korch.provider.gemm.gathered import program_of
from korch.testing.kernels import check_kernel, check_offers, load_kernels, offers_of
from korch.tile.check.check import check_program
from korch.tile.check.reference import run_program
from korch.tile.ir.text import format_program
from tests.provider.linear_groups import Graph
from tests.support.parse_tiles import parse_program


def gathered(
    rows: int,
    matrices: int,
    terms: int,
    columns: int,
    index: DType = DType.I64,
    copies: int = 1,
    after: bool = False,
    weights: DType = DType.F32,
) -> Group:
    """Return a product of rows, each of them perhaps several times, by constant matrices."""
    g = Graph()
    array = g.rng.standard_normal((matrices, terms, columns)).astype(np.float32)
    w = g.constant(array.astype(weights.numpy))
    if weights is not DType.F32:
        w = g.add("cast", [w], CastAttributes("f32"))
    x = g.tensor(rows // copies, terms)
    if copies > 1:
        x = g.add("reshape", [x], ReshapeAttributes((rows // copies, 1, terms)))
        x = g.add("broadcast", [x], BroadcastAttributes((rows // copies, copies, terms)))
        x = g.add("reshape", [x], ReshapeAttributes((rows, terms)))
    keys = g.input("keys", ValueType((rows // copies, copies), index))
    y = g.add("matmul_gathered", [x, w, g.add("reshape", [keys], ReshapeAttributes((rows,)))])
    if after:
        y = g.with_tensor("mul", y, g.tensor(rows, columns))
        y = g.with_tensor("add", y, g.weights(1, columns))
    return g.group(y)


def inputs_of(group: Group, rng: np.random.Generator, keys: np.ndarray) -> list[np.ndarray]:
    """Return inputs of a group with an index."""
    return [
        keys.reshape(type_.shape).astype(type_.dtype.numpy)
        if not type_.dtype.is_float
        else rng.standard_normal(type_.shape).astype(np.float32).astype(type_.dtype.numpy)
        for type_ in group.input_types
    ]


SHAPES = [(1, 1, 5, 7), (2, 8, 33, 40), (13, 3, 17, 65), (40, 5, 70, 33)]


def test_products_of_few_and_of_many_rows(target, builder, rng):
    groups = [
        *(gathered(*shape) for shape in SHAPES),
        gathered(12, 4, 40, 64, DType.I32, copies=2, after=True),
        gathered(260, 2, 130, 600, after=True),
        gathered(24, 3, 32, 64, weights=DType.BF16),
    ]
    for group, offer, _ in check_offers(GemmProvider(), groups, target, builder, rng):
        program = program_of(group, group.body.linear[0], offer, target)
        assert check_program(program) == ()
        assert parse_program(format_program(program)) == program


@pytest.mark.parametrize("which", ["one", "last", "two", "all", "from the end"])
def test_every_distribution_of_rows(target, builder, rng, which):
    group = gathered(130, 9, 32, 64, after=True)
    keys = {
        "one": np.full(130, 3),
        "last": np.full(130, 8),
        "two": np.where(np.arange(130) % 7 == 0, 0, 5),
        "all": rng.permutation(130) % 9,
        "from the end": -1 - np.arange(130) % 9,
    }[which]
    built = list(offers_of(GemmProvider(), [group], target))
    library = load_kernels([kernel for _, _, kernel in built], builder)
    for _, offer, kernel in built:
        check_kernel(kernel, group, offer, inputs_of(group, rng, keys), builder, library)


def test_what_is_not_finite_stays_so(target, builder, rng):
    group = gathered(9, 3, 33, 64)
    for _, offer, kernel in offers_of(GemmProvider(), [group], target, most=1):
        inputs = inputs_of(group, rng, np.arange(9) % 3)
        x = next(array for array in inputs if array.shape == (9, 33))
        x[0, 1], x[3, 2], x[4, 0], x[5, 32] = np.nan, np.inf, -np.inf, 1e-40
        check_kernel(kernel, group, offer, inputs, builder)


def test_only_the_chosen_matrices_are_read(target, builder, rng):
    """Matrices that no row chooses may hold anything: they are not numbers here."""
    group = gathered(4, 6, 32, 64)
    (place,) = [i for i, type_ in enumerate(group.input_types) if type_.rank == 3]
    keys = np.array([1, 4, 4, 1])
    for _, offer, kernel in offers_of(GemmProvider(), [group], target):
        inputs = inputs_of(group, rng, keys)
        inputs[place][[0, 2, 3, 5]] = np.nan
        check_kernel(kernel, group, offer, inputs, builder)


def test_the_program_means_what_the_group_computes(target, rng):
    group = gathered(7, 3, 5, 9, copies=1)
    (offer, *_) = GemmProvider().offer(group, target)
    program = program_of(group, group.body.linear[0], offer, target)
    inputs = inputs_of(group, rng, np.array([2, 0, 0, 2, -3, 2, 0]))
    packed = [layout.pack(array).reshape(-1) for layout, array in zip(offer.inputs, inputs, strict=True)]
    (found,) = run_program(program, packed)
    weights = next(array for array in inputs if array.ndim == 3)
    x = next(array for array in inputs if array.shape == (7, 5))
    expected = np.einsum("rk,rkn->rn", x, weights[[2, 0, 0, 2, 0, 2, 0]])
    np.testing.assert_allclose(found.reshape(7, 9), expected, rtol=1e-5, atol=1e-5)


def test_matrices_that_are_no_constants_are_refused(target):
    g = Graph()
    keys = g.input("keys", ValueType((4,), DType.I64))
    y = g.add("matmul_gathered", [g.tensor(4, 8), g.tensor(2, 8, 16), keys])
    found = GemmProvider().offer(g.group(y), target)
    assert isinstance(found, Refusal)
    assert found.reason == "the matrices are no constants"
