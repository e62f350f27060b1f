"""Models on the device: they are optimized, checked, saved, loaded, bound, and called from several threads."""

import gc
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from onnx.reference import ReferenceEvaluator

import korch
from benchmarks.models import build
from korch.cuda.runtime.early import early_program
from korch.cuda.runtime.executable import CudaExecutable
from korch.errors import InputError
from korch.numerics import TOLERANCE, max_error
from korch.runtime.runnable import random_feeds

TINY = ("tiny_candy", "tiny_efficientvit", "tiny_yolox", "tiny_segformer", "tiny_transformer")


def near(found, expected):
    """Compare outputs within the tolerance of plans; cuDNN may choose another algorithm for each binding."""
    found, expected = ([torch.as_tensor(t).cpu().numpy() for t in side] for side in (found, expected))
    assert max_error(found, expected) <= TOLERANCE


@pytest.fixture(scope="module")
def candy(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    return korch.optimize(build("tiny_candy"), target="cuda", budget=8, cache_folder=cache)


@pytest.mark.parametrize("name", TINY)
def test_models_are_optimized_and_right(name, tmp_path):
    model = build(name)
    executable = korch.optimize(model, target="cuda", budget=8, cache_folder=tmp_path)
    feeds = random_feeds(executable.get_inputs(), seed=1)
    near(executable(*feeds.values()), ReferenceEvaluator(model).run(None, feeds))
    assert executable.report.measured_ms > 0


def test_kernels_that_begin_early_compute_the_same(compiler, tmp_path):
    """Each replay has other inputs, so that a kernel that does not wait for the one in front is seen."""
    program = korch.optimize(build("tiny_transformer"), target="cuda", budget=8, cache_folder=tmp_path)._program
    early = program if program.is_early else early_program(program, compiler)
    assert early is not None, "no kernel follows another one"
    one, other = CudaExecutable(early), CudaExecutable(replace(early, is_early=False))
    for _ in range(50):
        x = torch.randn(tuple(one.get_inputs()[0].shape), device="cuda")
        near(one(x), other(x))


def test_half_precision_is_within_its_tolerance(tmp_path):
    executable = korch.optimize(
        build("tiny_candy"), target="cuda", precision="float16", budget=8, cache_folder=tmp_path
    )
    assert executable.report.max_error < 1e-2


def test_an_artifact_gives_the_same(candy, tmp_path):
    candy.save(tmp_path / "a.korch")
    again = korch.load(tmp_path / "a.korch")
    x = torch.randn(tuple(candy.get_inputs()[0].shape), device="cuda")
    near(candy(x), again(x))


def test_a_bound_run_takes_the_callers_memory(candy):
    x = torch.randn(tuple(candy.get_inputs()[0].shape), device="cuda")
    y = torch.empty(tuple(candy.get_outputs()[0].shape), device="cuda")
    bound = candy.bind([x], [y])
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        bound.replay()
        near([y], candy(x))
    with pytest.raises(InputError, match="dense"):
        candy.bind([x.transpose(2, 3)], [y])
    with pytest.raises(InputError, match="shares memory"):
        candy.bind([x], [x])


def test_arrays_of_numpy_give_arrays(candy):
    x = np.random.default_rng(0).standard_normal(candy.get_inputs()[0].shape).astype(np.float32)
    (found,) = candy(x)
    assert isinstance(found, np.ndarray)
    near([found], candy(torch.from_numpy(x).cuda()))
    with pytest.raises(InputError, match="expected"):
        candy(x[:, :2])


def test_several_threads_may_call_it(candy):
    shape = tuple(candy.get_inputs()[0].shape)
    inputs = [torch.randn(shape, device="cuda") for _ in range(8)]
    expected = [candy(x)[0].clone() for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: candy(x)[0], inputs))
    torch.cuda.synchronize()
    near(found, expected)


def test_nothing_is_allocated_by_a_bound_run(candy):
    bound = candy.bind()
    bound.replay()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(5):
        bound.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_bound_run_outlives_its_executable(candy, tmp_path):
    candy.save(tmp_path / "b.korch")
    bound = korch.load(tmp_path / "b.korch").bind()
    gc.collect()
    torch.cuda.empty_cache()
    filled = [torch.full((64 << 20,), 255, dtype=torch.uint8, device="cuda") for _ in range(8)]
    bound.inputs[0].normal_()
    bound.replay()
    near(bound.outputs, candy(bound.inputs[0]))
    assert all(bool((part == 255).all()) for part in filled)


def test_calls_on_several_streams_do_not_mix(candy):
    shape = tuple(candy.get_inputs()[0].shape)
    inputs = [torch.randn(shape, device="cuda") for _ in range(8)]
    expected = [candy(x)[0].clone() for x in inputs]
    torch.cuda.synchronize()
    found = []
    for x in inputs:
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(candy(x)[0])
    torch.cuda.synchronize()
    near(found, expected)


def test_a_new_process_and_another_thread_load_it(candy, tmp_path):
    candy.save(tmp_path / "c.korch")
    code = """
import sys, threading
import korch
def load():
    print(len(korch.load(sys.argv[1]).bind().outputs))
thread = threading.Thread(target=load)
thread.start()
thread.join()
load()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "c.korch")], text=True, capture_output=True, check=False
    )
    assert done.stdout.split() == ["1", "1"], done.stderr


def test_switches_of_pytorch_are_left_alone(candy):
    before = (torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32)
    candy.bind().replay()
    assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32) == before
