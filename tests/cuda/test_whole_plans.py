"""Whole plans in Triton's interpreter: every launch, the arena, weights, tables and copies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.models import build

from korch.backend import open_meter
from korch.fission import fission
from korch.frontend.onnx import load_model
from korch.measure.cuda.meter import CudaMeter
from korch.options import Options
from korch.orchestrate.blocks import prepare
from korch.orchestrate.lazy import LazyLoop
from korch.partition.join import join
from korch.pipeline import _partition
from korch.primitive import reference
from korch.runtime.cuda.build import build_cuda
from korch.runtime.cuda.program import read_program, write_program
from korch.runtime.program import Step
from korch.testing.cuda_program import run_program
from korch.testing.samples import random_inputs

SMALLER = {"tiny_candy": {"size": 12}}
"""The interpreter runs one program after another in Python."""


def program_of(name, options):
    """Return a program of Triton kernels only, its graph as given, and inputs."""
    split = fission(load_model(build(name, **SMALLER.get(name, {})).SerializeToString()))
    partition = _partition(split, options)
    with open_meter(options) as meter:
        assert isinstance(meter, CudaMeter)
        meter.providers = tuple(p for p in meter.providers if not p.name.startswith("torch"))
        (block,) = partition.blocks
        task, joined = prepare(partition, block, meter, options), join(partition)
        chosen = LazyLoop(task.block.graph, task.candidates, meter, options).run().steps
        steps = [Step(c, meter.kernel(c)) for c in chosen]
        return build_cuda(joined.graph, steps, meter.target, meter.compiler), split


@pytest.mark.parametrize(
    ("name", "precision", "allowed"),
    [("tiny_candy", "float32", 1e-4), ("tiny_efficientvit", "float32", 1e-4),
     ("tiny_transformer", "float32", 1e-4), ("tiny_candy", "float16", 2e-2)],
)  # fmt: skip
def test_a_plan_computes_what_the_model_does(name, precision, allowed, tmp_path):
    options = Options(target="cuda:sm_90", precision=precision, measure=False, baselines=False,
                      partition="off", cache_folder=tmp_path)  # fmt: skip
    program, split = program_of(name, options)
    inputs = random_inputs(split, np.random.default_rng(0))
    expected = reference.run(split, inputs, exact=True)
    write_program(program, tmp_path / "p.korch")
    again = read_program(tmp_path / "p.korch")
    assert replace(again, weights=program.weights) == program
    for i in range(len(program.weights)):
        assert np.array_equal(again.weights.array(i), program.weights.array(i))
    found = run_program(again, [inputs[name] for name, _ in split.inputs])
    for (name, _), array in zip(split.outputs, found, strict=True):
        error = np.abs(array.astype(np.float64) - expected[name]).max()
        assert error <= allowed * np.abs(expected[name]).max(), name
