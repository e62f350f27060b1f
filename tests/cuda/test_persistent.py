"""Persistent kernels: accesses of programs, proof of order, interpreted runs in threads, compilation for sm_90."""

from __future__ import annotations

import itertools
import logging
import subprocess
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.models import build
from benchmarks.models.writer import GraphWriter
from korch.ablation import Ablation
from korch.cuda.compile import CubinCompiler
from korch.cuda.kernel import CudaKernel, TorchCall
from korch.cuda.persistent import (
    ENTRY,
    PersistentTask,
    plan_table,
    print_persistent,
    read_plan_table,
    resident_programs,
)
from korch.cuda.runtime.build import build_cuda
from korch.cuda.runtime.executable import CudaExecutable
from korch.cuda.runtime.persistent import segments_of
from korch.cuda.runtime.record import archive_of, read_program
from korch.cuda.target import NOMINAL
from korch.errors import InvalidGraphError
from korch.events.launches import LaunchUse, check_table, schedule_launches, table_of
from korch.events.spans import NOTHING
from korch.limits import SearchLimits
from korch.options import Options
from korch.primitive import reference
from korch.provider.triton import TritonProvider
from korch.runtime.bind import PlanStep
from korch.testing.samples import random_inputs
from korch.tile.ir.program import Level
from tests.cuda.test_compile import sample
from tests.support.cuda_issue import issue_on_cpu
from tests.support.cuda_plan import program_of_graph, split_model
from tests.support.interpret import Memory, run_launches, run_together
from tests.tile.tile_groups import Graph

LIBRARIES = ("torch", "torch-opaque", "tensorrt")


def mlp():
    w = GraphWriter("mlp", 0)
    x = w.input("x", (5, 24))
    for wide, other in ((24, 40), (40, 24)):
        x = w.op("Relu", w.dense(x, wide, other))
    w.output(x, "y", (5, 24))
    return w.finish()


def normalized_product():
    w = GraphWriter("rms", 0)
    x = w.input("x", (6, 32))
    mean = w.op("ReduceMean", w.op("Mul", x, x), axes=[-1])
    root = w.op("Sqrt", w.op("Add", mean, w.scalar(1e-5, "epsilon")))
    x = w.op("Mul", w.op("Div", x, root), w.uniform(32, 0.5, 1.5, "scale"))
    w.output(w.dense(x, 32, 40), "y", (6, 40))
    return w.finish()


MODELS = {"mlp": mlp, "rms": normalized_product, "transformer": partial(build, "tiny_transformer")}


def options_of(folder, most=24):
    return Options(
        target="cuda:sm_90",
        measure=False,
        search=SearchLimits(partition="off", max_primitives=most),
        ablation=Ablation(baselines=False),
        cache_folder=folder,
    )


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """Return what gives the program of a model on a device of some multiprocessors, and the model's primitives."""
    options = options_of(tmp_path_factory.mktemp("cache"))

    @cache
    def plan(name, processors):
        def made(graph, steps, meter):
            return build_cuda(graph, steps, replace(meter.target, processors=processors), meter.compiler, parts=2)

        split = split_model(MODELS[name]())
        return program_of_graph(split, options, LIBRARIES, made), split

    return plan


@pytest.mark.parametrize(("name", "processors"), [*itertools.product(MODELS, (1, 3))])
def test_persistent_kernels_compute_what_the_model_does(name, processors, plans, tmp_path):
    """Programs run in threads, twice: counters go on from run to run."""
    torch = pytest.importorskip("torch")
    program, split = plans(name, processors)
    (record,) = program.persistent
    assert (record.first, record.end, record.launch.grid) == (0, len(program.steps), processors)
    archive_of(program).write(tmp_path / "p.korch")
    again = read_program(tmp_path / "p.korch")
    assert replace(again, weights=program.weights) == program
    inputs = random_inputs(split, np.random.default_rng(0))
    expected = reference.run(split, inputs, exact=True)
    found = issue_on_cpu(again, [torch.from_numpy(inputs[name]) for name, _ in split.inputs], runs=2)
    for (output, _), tensor in zip(split.outputs, found, strict=True):
        error = np.abs(tensor.numpy().astype(np.float64) - expected[output]).max()
        assert error <= 1e-5 * np.abs(expected[output]).max()


def chain(target):
    """Return a segment of launches whose buffers overlap: each waits for others, and overwrites what they read."""
    kernels = [kernel for kernel in sample(target) if len(kernel.launches) == 1 and kernel.orders[0] is not None]
    uses = [
        LaunchUse(kernel, 0, tuple(("arena", 64 * i) for i in range(len(kernel.names))), 1000.0)
        for kernel in kernels[:6]
    ]
    return schedule_launches(uses, 3)


def test_tables_are_read_as_they_are_written():
    queues = [
        [PersistentTask(0, 0, 0, 2, (), (0,)), PersistentTask(1, 3, 4, 5, ((0, 2), (1, 7)), ())],
        [],
        [PersistentTask(0, 0, 2, 3, (), (0, 1))],
    ]
    assert read_plan_table(plan_table(queues), 3) == queues


def mutants(task, segment):
    """Yield entries that differ in one thing."""
    yield replace(task, kernel=(task.kernel + 1) % len(segment.functions))
    yield replace(task, end=task.end + 1)
    for w, (event, count) in enumerate(task.waits):
        rest = (*task.waits[:w], *task.waits[w + 1 :])
        yield replace(task, waits=rest)
        yield from (replace(task, waits=(*rest, (event, count + more))) for more in (-1, 1))
    for n in range(len(task.notifies)):
        yield replace(task, notifies=(*task.notifies[:n], *task.notifies[n + 1 :]))


def test_each_change_of_a_table_is_refused(small):
    segment = chain(small)
    table = table_of(segment)
    check_table(table, segment)
    queues = read_plan_table(table, 3)
    seen = 0
    for q, queue in enumerate(queues):
        for i, task in enumerate(queue):
            for mutant in mutants(task, segment):
                changed = [*queues[:q], [*queue[:i], mutant, *queue[i + 1 :]], *queues[q + 1 :]]
                with pytest.raises(InvalidGraphError):
                    check_table(plan_table(changed), segment)
                seen += 1
            fewer = [*queues[:q], [*queue[:i], *queue[i + 1 :]], *queues[q + 1 :]]
            with pytest.raises(InvalidGraphError):
                check_table(plan_table(fewer), segment)
    assert seen > 50


def test_queues_that_would_hang_are_refused(small):
    segment = chain(small)
    queues = read_plan_table(table_of(segment), 3)
    for q, queue in enumerate(queues):
        turned = [queue[::-1] if own is queue else own for own in queues]
        assert len(queue) > 1, q
        with pytest.raises(InvalidGraphError, match=r"waits forever|runs before"):
            check_table(plan_table(turned), segment)


def memory_of(kernel, rng):
    """Return what the buffers of a kernel hold: zeros and ones in inputs, and what no kernel writes in others."""
    buffers = {buffer.name: buffer for buffer in kernel.program.buffers}
    ports = kernel.names[: len(kernel.names) - len(kernel.scratch) - len(kernel.tables)]
    sizes = [(buffers[name].dtype, buffers[name].size) for name in ports] + list(kernel.scratch)
    memory = [
        rng.integers(0, 2, size).astype(dtype.numpy)
        if name in ports and buffers[name].level is Level.INPUT
        else np.full(size * dtype.size_bytes, 0xFF, np.uint8).view(dtype.numpy)
        for name, (dtype, size) in zip(kernel.names, sizes, strict=False)
    ]
    return memory + [np.array(table, np.int32) for table in kernel.tables]


def mask_of(spans, size_bytes):
    found = np.zeros(size_bytes, bool)
    for begin, end in zip(spans.begins, spans.ends, strict=True):
        found[begin:end] = True
    return found


def test_programs_touch_what_their_orders_say(small, rng):
    """Each program of a launch runs alone: it writes some bytes of its footprint, and reads no others."""
    written = apart = 0
    known = [(k, i) for k in sample(small) for i, order in enumerate(k.orders) if order and k.launches[i].grid <= 40]
    for kernel, number in known:
        launch = kernel.launches[number]
        use = LaunchUse(kernel, number, tuple((name, 0) for name in kernel.names), 1.0)
        footprints = schedule_launches([use], launch.grid).footprints[0]
        for pid in sorted({0, launch.grid // 2, launch.grid - 1}):
            touched = footprints[pid]
            before = memory_of(kernel, rng)
            source = launch.source.replace("tl.program_id(0)", f"tl.program_id(0) + {pid}")
            results = []
            for is_other in (False, True):
                memory = [array.copy() for array in before]
                for name, array in zip(kernel.names, memory, strict=True):
                    if is_other and name in touched.reads and name not in touched.writes:
                        array.view(np.uint8)[~mask_of(touched.reads[name], array.nbytes)] ^= 0xFF
                run_launches(
                    [replace(launch, source=source, programs=1)], [[Memory(memory[i]) for i in launch.arguments]]
                )
                results.append(memory)
            for name, old, new, other in zip(kernel.names, before, *results, strict=True):
                said = mask_of(touched.writes.get(name, NOTHING), new.nbytes)
                changed = old.view(np.uint8) != new.view(np.uint8)
                assert said[changed].all(), (launch.symbol, pid, name)
                assert not said.any() or np.array_equal(new.view(np.uint8), other.view(np.uint8))
                written += changed.sum()
                apart += said.any() and not said.all()
    assert written > 1000 and apart > 10


def test_launches_that_do_not_say_what_each_program_computes(small, rng):
    """Rows are split into parts: each task of a launch waits for all of the one before."""
    g = Graph()
    group = g.group(g.reduce("sum", g.tensor("f32[2,20000]"), 1))
    provider = TritonProvider()
    offer = next(offer for offer in provider.offer(group, small) if offer.variant == "split")
    kernel = provider.build(group, offer, small)
    assert kernel.orders == (None, None)
    places = tuple(("arena", i << 20) for i in range(len(kernel.names)))
    segment = schedule_launches([LaunchUse(kernel, i, places, 1.0) for i in range(2)], 3)
    assert segment.counted.counts == (len(segment.parts[0]),)
    table = table_of(segment)
    check_table(table, segment)
    memory = memory_of(kernel, rng)
    rows = np.array([memory[i].ctypes.data for launch in kernel.launches for i in launch.arguments], np.int64)
    state = np.zeros(4, np.int32)
    launch = replace(print_persistent(list(segment.functions.values()), 4), programs=3)
    for turn in (1, 2):
        memory[1][:] = np.nan
        run_together(launch, [Memory(np.array(table, np.int32)), Memory(rows), Memory(state)])
        assert state.tolist() == [turn, turn, turn, turn * len(segment.parts[0])]
        np.testing.assert_allclose(memory[1], memory[0].reshape(2, -1).sum(1), rtol=1e-6)


def test_a_block_of_a_transformer_is_one_kernel_for_a_hopper_device(tmp_path):
    """Waits acquire, notifications release, nothing is spilled, and a multiprocessor has room for a program."""
    made = []

    def build_it(graph, steps, meter):
        made.append(build_cuda(graph, steps, meter.target, meter.compiler, parts=2))
        return made[0]

    split = split_model(build("transformer_block", sequence=64, width=128))
    options = replace(options_of(tmp_path, 10), precision="float16")
    program = program_of_graph(split, options, LIBRARIES, build_it)
    (record,) = program.persistent
    assert (record.first, record.end, record.launch.grid) == (0, len(program.steps), NOMINAL[90].processors)
    compiler = CubinCompiler(90, tmp_path, workers=1)
    cubin = compiler.compile([record.launch.launch(program.sources)])[record.launch.symbol]
    compiler.close()
    assert cubin.spill_bytes <= 64
    assert resident_programs(cubin, record.launch.warps, NOMINAL[90].shared_bytes) >= 1
    code = disassembled(cubin.image, tmp_path)
    for instruction in ("LDG.E.STRONG.GPU", "CCTL.IVALL", "MEMBAR.ALL.GPU", "REDG.E.ADD.STRONG.GPU", "HMMA", "LDGSTS"):
        assert instruction in code, instruction


def disassembled(image: bytes, folder: Path) -> str:
    import triton

    path = folder / "x.cubin"
    path.write_bytes(image)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, "-sass", path], capture_output=True, text=True, check=True).stdout


def test_calls_end_segments(small):
    kernel = next(sample(small))
    call = CudaKernel((TorchCall("c", ""),))
    nothing = CudaKernel(())
    steps = [PlanStep(None, k) for k in (kernel, call, kernel, nothing, kernel, call, kernel, kernel, kernel)]
    assert segments_of(steps) == [(2, 5), (6, 9)]
    assert segments_of([PlanStep(None, kernel)] * 70) == [(0, 64), (64, 70)]


def test_programs_that_are_not_all_resident_are_launched_one_by_one(plans, caplog):
    program, _ = plans("mlp", 3)
    (record,) = program.persistent
    executable = object.__new__(CudaExecutable)
    executable._program = program
    for resident, expected in ((1, ()), (2, (record,))):
        executable._functions = {record.launch.symbol: SimpleNamespace(resident=lambda n=resident: n)}
        with caplog.at_level(logging.WARNING, "korch.cuda"):
            assert executable._resident(2) == expected
    assert len(caplog.records) == 1 and "this device runs 2 of them" in caplog.text


def test_one_text_serves_all_sizes_of_queues(small):
    first, second = itertools.islice(sample(small), 2)
    launches = [*first.launches, *second.launches]
    made = print_persistent(launches, 4)
    assert made == print_persistent(launches, 4)
    assert made.symbol != print_persistent(launches, 8).symbol
    assert all(f"{launch.symbol}_task(pid" in made.source for launch in launches)
    assert ENTRY == 8 and "at += 8" in made.source
