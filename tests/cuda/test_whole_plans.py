"""Whole plans in Triton's interpreter: each launch, the arena, weights, tables and copies."""

import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.models import build
from benchmarks.models.narrow import in_float16
from korch.ablation import Ablation
from korch.cuda.runtime.build import build_cuda
from korch.cuda.runtime.record import BufferRecord, LaunchRecord, StepProgram, archive_of, read_program
from korch.cuda.runtime.schedule import STREAMS, schedule
from korch.limits import SearchLimits
from korch.options import Options
from korch.primitive import reference
from korch.system.content_name import content_name
from korch.system.scratch import write_atomically
from korch.testing.samples import random_inputs
from tests.support.cuda_issue import Stream, issue_on_cpu, issuer_on_cpu
from tests.support.cuda_plan import program_of_graph, split_model
from tests.support.models import parsed

SMALLER = {"tiny_candy": {"size": 12}}
"""The interpreter runs one program after another in Python."""

MOST_PRIMITIVES = {"tiny_efficientvit": 6, "tiny_candy": 6}
"""In larger sets nothing else is found, but ten times as many sets are looked at."""


def program_of(name, options, left_out=("torch", "torch-opaque", "tensorrt")):
    """Return a program of some providers' kernels, and the graph as given; the first test that asks searches for it."""
    path = options.cache_folder / content_name("program", f"{name} {options.precision} {left_out}")
    if not path.exists():
        model_name, _, kind = name.partition(" in ")
        model = build(model_name, **SMALLER.get(model_name, {}))
        found = program_of_model(in_float16(model) if kind else model, options, left_out)
        write_atomically(path, pickle.dumps(found))  # another process may do the same
    return pickle.loads(path.read_bytes())


def program_of_model(model, options, left_out):
    split = split_model(model)
    return program_of_graph(split, options, left_out, build_program), split


def build_program(graph, steps, meter):
    return build_cuda(graph, steps, meter.target, meter.compiler)


def options_of(name, cache_folder, **more):
    limits = SearchLimits(partition="off", max_primitives=MOST_PRIMITIVES.get(name, 24))
    quick = {"measure": False, "search": limits, "ablation": Ablation(baselines=False)}
    return Options(target="cuda:sm_90", cache_folder=cache_folder, **quick, **more)


def check_issued(program, split, allowed):
    """Compare what a program computes on random inputs with the reference."""
    inputs = random_inputs(split, np.random.default_rng(0))
    expected = reference.run(split, inputs, exact=True)
    torch = pytest.importorskip("torch")
    found = issue_on_cpu(program, [torch.from_numpy(inputs[name]) for name, _ in split.inputs])
    for (name, _), tensor in zip(split.outputs, found, strict=True):
        error = np.abs(tensor.numpy().astype(np.float64) - expected[name]).max()
        assert error <= allowed * np.abs(expected[name]).max(), name


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "precision", "allowed"),
    [
        ("tiny_candy", "float32", 1e-4),
        ("tiny_efficientvit", "float32", 1e-4),
        ("tiny_transformer", "float32", 1e-4),
        ("tiny_candy", "tf32", 1e-2),
        ("tiny_transformer", "tf32", 1e-2),
        ("tiny_candy", "float16", 2e-2),
        ("tiny_transformer", "float16", 2e-2),
        ("tiny_transformer in float16", "float32", 2e-2),
    ],
)
def test_a_plan_computes_what_the_model_does(name, precision, allowed, tmp_path, cache_folder):
    pytest.importorskip("torch")
    program, split = program_of(name, options_of(name, cache_folder, precision=precision))
    archive_of(program).write(tmp_path / "p.korch")
    again = read_program(tmp_path / "p.korch")
    assert replace(again, weights=program.weights) == program
    for i in range(len(program.weights)):
        assert np.array_equal(again.weights.array(i), program.weights.array(i))
    check_issued(again, split, allowed)


@pytest.mark.parametrize("name", ["tiny_candy", "tiny_transformer"])
def test_an_executable_issues_what_the_model_does(name, cache_folder):
    """Products are calls of PyTorch here: their results lie beside the arena."""
    pytest.importorskip("torch")
    products = ("triton-product", "triton-attention", "triton-winograd")
    program, split = program_of(name, options_of(name, cache_folder), products)
    assert any(step.call for step in program.steps) and any(s.launches for s in program.steps)
    check_issued(program, split, 1e-4)


def test_values_without_axes_are_inputs_and_outputs(cache_folder):
    torch = pytest.importorskip("torch")
    model = parsed("(float x) => (float y, float z) { y = Exp(x) v = Neg(x) z = Neg(v) }")
    options = Options(target="cuda:sm_90", measure=False, cache_folder=cache_folder, ablation=Ablation(baselines=False))
    program, _ = program_of_model(model, options, ())
    y, z = issue_on_cpu(program, [torch.tensor(0.5)])
    assert y.shape == z.shape == () and z.item() == 0.5
    assert y.item() == pytest.approx(np.exp(0.5))


def test_scratch_memory_is_in_the_arena_where_a_call_has_returned_a_result_before():
    """What a call returns lies beside the arena, and is smaller than scratch memory that begins at the same place."""
    torch = pytest.importorskip("torch")
    seen = []
    function = SimpleNamespace(launch=lambda programs, pointers, *_: seen.append(list(pointers)))
    result, middle, scratch = (BufferRecord("arena", at, size, "f32", (size // 4,), "a") for at, size in PLACES)
    x, y = BufferRecord("input", 0, 64, "f32", (16,), "a"), BufferRecord("output", 0, 64, "f32", (16,), "a")
    steps = (
        StepProgram((x, result), 1, 1, call="c"),
        StepProgram((result, middle), 1, 1, (LaunchRecord("f", 1, 1, 0, ("f32",) * 2, (0, 1)),)),
        StepProgram((middle, y, scratch), 1, 1, (LaunchRecord("f", 1, 1, 0, ("f32",) * 3, (0, 1, 2)),)),
    )
    weights = SimpleNamespace(block=np.zeros(0, np.uint8), offsets=())
    owner = issuer_on_cpu(SimpleNamespace(steps=steps, weights=weights, copies=()), torch, 8192)
    owner._calls, owner._functions = {"c": lambda torch, x: (x + 1,)}, {"f": function}
    owner._turns = schedule(steps)
    owner._issue([Stream()] * STREAMS, [torch.zeros(16)], [torch.zeros(16)])
    arena = owner._arena.data_ptr()
    assert seen[0][0] != arena and seen[0][1] == arena + 1024
    assert seen[1][2] == arena


PLACES = ((0, 64), (1024, 64), (0, 1024))
