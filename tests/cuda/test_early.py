"""Kernels that begin before the kernel in front of them has ended: interpreted as early as possible, and compiled."""

import ast
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from korch.cuda import driver
from korch.cuda.compile import Cubin, CubinFailure
from korch.cuda.driver import CudaFunction, LaunchAttribute, LaunchConfig
from korch.cuda.kernel import Launch
from korch.cuda.runtime.early import HEAD, WAIT, begun_early, early_program, without_early
from korch.cuda.runtime.record import BufferRecord, StepProgram, archive_of, read_program
from korch.cuda.runtime.schedule import early_launches, schedule
from korch.primitive import reference
from korch.primitive.types import DType
from korch.testing.samples import random_inputs
from tests.cuda.test_whole_plans import options_of, program_of
from tests.support.cuda_issue import Pending, issue_on_cpu


class Uncompiled:
    """A compiler whose cubins are empty."""

    def compile(self, launches):
        return {launch.symbol: Cubin(launch.symbol, b"", 64, 0, 0) for launch in launches}


@pytest.fixture(scope="module")
def plan(cache_folder):
    """Return a function that plans a model without some providers; it returns a program and the model's primitives."""
    return lambda *left_out, name="tiny_transformer": program_of(name, options_of(name, cache_folder), left_out)


@pytest.fixture(scope="module")
def planned(plan):
    """Return a program of launches, the same with launches that begin early, and the model's primitives."""
    program, split = plan("torch", "torch-opaque", "tensorrt")
    return program, early_program(program, Uncompiled()), split


def run(program, split, pending):
    torch = pytest.importorskip("torch")
    inputs = random_inputs(split, np.random.default_rng(0))
    expected = reference.run(split, inputs, exact=True)
    found = issue_on_cpu(program, [torch.from_numpy(inputs[name]) for name, _ in split.inputs], 2, pending)
    return max(
        float(np.abs(tensor.numpy() - expected[name]).max() / np.abs(expected[name]).max())
        for (name, _), tensor in zip(split.outputs, found, strict=True)
    )


def changed(program, change):
    sources = {name: change(text) if WAIT in text else text for name, text in program.sources.items()}
    return replace(program, sources=sources)


def test_kernels_that_begin_early_compute_the_same(planned):
    _, early, split = planned
    pending = Pending()
    assert run(early, split, pending) <= 1e-4
    assert pending.early == 2 * sum(map(sum, early_launches(early.steps, schedule(early.steps)))) >= 10
    assert any("f.prefetch(" in text for text in early.sources.values())


@pytest.mark.long
@pytest.mark.parametrize("name", ["tiny_candy", "tiny_efficientvit"])
def test_models_of_images_compute_the_same(name, plan):
    program, split = plan("torch", "torch-opaque", "tensorrt", name=name)
    pending = Pending()
    assert run(early_program(program, Uncompiled()), split, pending) <= 1e-4
    assert pending.early > 20


def test_calls_between_kernels_end_before_the_next_one_begins(plan):
    program, split = plan("triton-product", "triton-attention", "triton-winograd")
    assert any(step.call for step in program.steps)
    pending = Pending()
    assert run(early_program(program, Uncompiled()), split, pending) <= 1e-4
    assert pending.early


def test_a_kernel_that_does_not_wait_is_found_out(planned):
    _, early, split = planned
    error = run(changed(early, without_early), split, Pending())
    assert not error <= 1e-4


def test_an_access_before_the_wait_is_found_out(planned):
    _, early, split = planned
    last = changed(early, lambda text: text.replace(WAIT, "") + WAIT)
    with pytest.raises(Exception, match="memory is accessed before the wait"):
        run(last, split, Pending())


def test_a_prefetch_of_other_memory_is_found_out(planned):
    _, early, split = planned
    wrong = changed(early, lambda text: text.replace(", pid * ", " + 65536, pid * "))
    with pytest.raises(Exception, match="not constant"):
        run(wrong, split, Pending())


def test_an_artifact_keeps_how_kernels_begin(planned, tmp_path):
    program, early, _ = planned
    archive_of(early).write(tmp_path / "p.korch")
    again = read_program(tmp_path / "p.korch")
    assert again.is_early and replace(again, weights=early.weights) == early
    assert set(again.launches) <= set(again.cubins) & set(again.sources)
    assert not set(early.launches) & set(program.launches)
    before, after = ({without_early(t).split("(", 1)[1] for t in p.sources.values()} for p in (program, early))
    assert before == after


def test_programs_stay_as_they_are_where_nothing_can_begin_early(planned, caplog):
    program, _, _ = planned
    assert early_program(replace(program, arch=80), Uncompiled()) is None
    apart = [item for step in program.steps for item in (step, StepProgram((), 0, 0, call="c"))]
    apart = [item for item in apart if len(item.launches) < 2]
    assert early_program(replace(program, steps=tuple(apart)), Uncompiled()) is None
    broken = SimpleNamespace(compile=lambda launches: {la.symbol: CubinFailure(la.symbol, "no") for la in launches})
    assert early_program(program, broken) is None
    assert "no kernel begins early: no" in caplog.text


def fetched(grid, warps, *sizes):
    """Return for each constant the lines that a launch prefetches in all, and those that each program asks for."""
    names = [f"p_i{i}" for i in range(len(sizes))]
    source = f"@triton.jit\ndef k({', '.join(names)}):\n{HEAD}    tl.store(p_i0, 1.0)\n"
    launch = Launch("k", source, (DType.F32,) * len(sizes), tuple(range(len(sizes))), grid, warps)
    made = begun_early(launch, [BufferRecord("constant", 0, size) for size in sizes])
    assert made.symbol != "k" and made.symbol in made.source
    calls = [node for node in ast.walk(ast.parse(made.source)) if isinstance(node, ast.Call)]
    calls = [call for call in calls if ast.unparse(call.func) == "f.prefetch"]
    return [tuple(arg.value for arg in call.args[2:]) for call in calls]


def test_programs_share_the_lines_of_constants():
    assert fetched(10, 4, 1 << 20) == [(8192, 1024)]  # 8 programs have all lines
    assert fetched(64, 1, 1000, 100) == [(7, 32)]  # nothing beyond the end, and no part of a line
    assert fetched(1, 4, 1 << 20) == [(8192, 2048)]  # one program has no time for more
    assert fetched(1000, 4, 3 << 20, 3 << 20) == [(24576, 128), (8192, 128)]  # 4 MB in all


# The driver


def test_structures_have_the_layout_of_the_drivers_header(tmp_path):
    triton, compiler = pytest.importorskip("triton"), shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    names = ("gridDimX", "blockDimX", "sharedMemBytes", "hStream", "attrs", "numAttrs")
    offsets = ", ".join(f"offsetof(CUlaunchConfig, {name})" for name in names)
    wanted = f"sizeof(CUlaunchConfig), {offsets}, sizeof(CUlaunchAttribute), offsetof(CUlaunchAttribute, value)"
    (tmp_path / "a.c").write_text(
        "#include <cuda.h>\n#include <stddef.h>\n#include <stdio.h>\n"
        f"int main(void) {{ size_t n[] = {{{wanted}, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION}};\n"
        'for (unsigned i = 0; i < sizeof n / sizeof *n; ++i) printf("%zu ", n[i]); return 0; }\n'
    )
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    subprocess.run([compiler, "-std=c11", "-I", include, "a.c", "-o", "a"], cwd=tmp_path, check=True)
    done = subprocess.run([tmp_path / "a"], capture_output=True, text=True, check=True)
    own = [getattr(LaunchConfig, name).offset for name, _ in LaunchConfig._fields_]
    sizes = [driver.ctypes.sizeof(kind) for kind in (LaunchConfig, LaunchAttribute)]
    expected = [sizes[0], *own, sizes[1], LaunchAttribute.value.offset]
    expected += [driver.PROGRAMMATIC_STREAM_SERIALIZATION]
    assert list(map(int, done.stdout.split())) == expected


@pytest.mark.parametrize("is_early", [False, True])
def test_only_an_early_launch_has_the_attribute(is_early, monkeypatch):
    seen = []

    class Driver:
        def __getattr__(self, name):
            return lambda *_: 0

        def cuLaunchKernelEx(self, reference, function, parameters, extra):  # noqa: N802 - the driver's name
            config = reference._obj
            attribute = config.attributes[0]
            seen.append((list(config.grid), list(config.block), config.shared_bytes, config.stream, config.count))
            seen.append((attribute.id, attribute.value))
            return 0

    monkeypatch.setattr(driver, "_driver", Driver)
    CudaFunction(b"", "k", 1024, 4).launch(7, [1, 2], 99, is_early)
    assert seen == [([7, 1, 1], [128, 1, 1], 1024, 99, int(is_early)), (6, 1)]
