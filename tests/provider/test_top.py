"""The largest and smallest elements of rows: compiled, and compared with ONNX Runtime, also for ties and NaN."""

from dataclasses import replace

import numpy as np
import onnxruntime
import pytest

from korch.candidate.candidate import Refusal
from korch.primitive.ops.opaque import opaque_model
from korch.provider.generated import GeneratedProvider
from korch.provider.opaque import node_of
from korch.provider.provider import Kernel, Threading
from korch.provider.top import top_program
from korch.testing.kernels import check_offers, load_kernels, offers_of, run_kernel
from korch.tile.check.check import check_program
from korch.tile.check.reference import run_program
from korch.tile.ir.text import format_program
from korch.tile.lower.staging import Machine
from tests.provider.test_onnxruntime import opaque_group
from tests.support.parse_tiles import parse_program

PROVIDER = GeneratedProvider()
MACHINE = Machine(16, 2)
COUNT = np.array([2])


def top_group(shape, count, dtype="f32", wanted=(0, 1), opset=17, **attributes):
    """Return the group of outputs of one operator."""
    sizes, taken = ",".join(map(str, shape)), ",".join(map(str, (*shape[:-1], count)))
    texts = ([f"{dtype}[{sizes}]", "i64[1]"], [f"{dtype}[{taken}]", f"i64[{taken}]"])
    return opaque_group("TopK", *texts, wanted, {1: np.array([count])}, opset=opset, **attributes)


def with_ties(rng, type_):
    """Return elements of which many are equal, and floats of which some are no numbers."""
    x = rng.integers(0 if type_.dtype.value[0] == "u" else -3, 4, type_.shape).astype(type_.dtype.numpy)
    if type_.dtype.is_float:
        for value in (np.nan, np.inf, -np.inf, -0.0):
            x[rng.random(x.shape) < 0.15] = value
    return x


GROUPS = [
    top_group((16, 8), 2),
    top_group((3, 60), 4, largest=0),
    top_group((2, 5, 7), 7),
    top_group((2, 5, 7), 7, largest=0),
    top_group((1, 1), 1),
    top_group((9,), 1, largest=0),
    top_group((4, 300), 17),
    top_group((4, 40), 40, largest=0),
    top_group((300, 64), 8, axis=1),
    top_group((6, 20), 3, wanted=(1,)),
    top_group((6, 20), 3, wanted=(0,)),
    top_group((6, 20), 3, wanted=(1, 0)),
    *(top_group((5, 33), 6, d, largest=n % 2) for n, d in enumerate(("f64", "i64", "i32", "i16", "i8", "u16", "u8"))),
]


def test_it_computes_what_the_operator_does(target, builder, rng):
    checked = check_offers(PROVIDER, GROUPS, target, builder, rng)
    assert {kernel.threading for _, _, kernel in checked} == {Threading.CALLER, Threading.TEAM}
    for group, _, kernel in checked:
        assert kernel.program == top_program(group, MACHINE)
        assert check_program(top_program(group, MACHINE)) == ()
        assert parse_program(format_program(top_program(group, MACHINE))) == top_program(group, MACHINE)


def test_ties_keep_their_order_and_nan_is_greatest(target, builder, rng):
    """Also as the interpreter of tile programs computes it."""
    built = list(offers_of(PROVIDER, [g for g in GROUPS if "i16" not in g.text and "u16" not in g.text], target))
    kernels = [kernel for _, _, kernel in built if isinstance(kernel, Kernel)]
    library = load_kernels(kernels, builder)
    for (group, offer, _), kernel in zip(built, kernels, strict=True):
        x = with_ties(rng, group.input_types[0])
        node = node_of(group.body.primitives[0])
        session = onnxruntime.InferenceSession(opaque_model(node).SerializeToString())
        count = group.output_types[0].shape[-1]
        expected = session.run(None, {"x0": x, "x1": np.array([count])})
        order = {p.output: node_of(p).output for p in group.body.primitives}
        wanted = [expected[order[value]] for _, value in group.body.outputs]
        found = run_kernel(kernel, group, offer, [x], builder, library=library)
        interpreted = run_program(top_program(group, MACHINE), [x.reshape(-1)])
        for array, own, reference in zip(found, interpreted, wanted, strict=True):
            np.testing.assert_array_equal(array, reference)
            np.testing.assert_array_equal(own, reference.reshape(-1))


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (top_group((3, 8), 2, "f16"), "elements of type f16"),
        (
            opaque_group("TopK", ["f32[8,3]", "i64[1]"], ["f32[2,3]", "i64[2,3]"], (0, 1), {1: np.array([2])}, axis=0),
            "last",
        ),
        (top_group((0, 8), 2), "there are no elements"),
        (
            opaque_group("TopK", ["f32[3]", "i64[1]"], ["f32[1]", "i64[1]"], (0,), {0: np.ones(3, np.float32)}),
            "constants",
        ),
    ],
)
def test_refusals_say_why(group, reason, target):
    found = PROVIDER.offer(group, target)
    assert isinstance(found, Refusal)
    assert reason in found.reason


def test_outputs_of_two_operators_are_no_group_of_one(target):
    group = top_group((6, 20), 3, wanted=(0,))
    other = replace(node_of(group.body.primitives[0]), op_type="Unique")
    changed = replace(group.body.primitives[0], attributes=other)
    body = replace(group.body, primitives=(changed,))
    assert isinstance(PROVIDER.offer(replace(group, body=body), target), Refusal)
