"""The memory that an executable's steps use: tensors of callers, and results of calls beside the arena."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from korch.cuda.runtime.executable import CudaExecutable, agree, use_equal_inputs
from korch.cuda.runtime.memory import StepMemory
from korch.cuda.runtime.record import BufferRecord
from korch.errors import InputError
from korch.runtime.record import TensorRecord

torch = pytest.importorskip("torch")


class OnDevice:
    """A tensor that claims to be on a device."""

    is_cuda, device = True, "cuda"

    def __init__(self, tensor):
        self.tensor = tensor

    def __getattr__(self, name):
        return getattr(self.tensor, name)


@pytest.fixture
def bind():
    """Return an executable's `bind` that captures nothing and returns the tensors."""
    owner = object.__new__(CudaExecutable)
    records = {side: tuple(TensorRecord(n, "f32", (4, 8)) for n in names) for side, names in SIDES.items()}
    owner._torch, owner._lock = torch, nullcontext()
    owner._program = SimpleNamespace(plan=SimpleNamespace(**records))
    owner._bind = lambda inputs, outputs: (inputs, outputs)
    return owner.bind


SIDES = {"inputs": ("x", "w"), "outputs": ("y", "z")}
FLAT = torch.zeros(1024)


def rows(begin):
    return OnDevice(FLAT[begin : begin + 32].view(4, 8))


def test_inputs_may_share_memory(bind):
    inputs, outputs = bind([rows(0), rows(4)], [rows(64), rows(96)])
    assert len(inputs) == len(outputs) == 2


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        ((0, 256), (28, 512), "output 'y': it shares memory with input 'x'; expected memory of its own"),
        ((0, 256), (512, 224 + 28), "output 'z': it shares memory with input 'w'; expected memory of its own"),
        ((0, 256), (512, 540), "output 'z': it shares memory with output 'y'; expected memory of its own"),
        ((0,), (512, 600), "inputs: 1 tensors are given; expected 2"),
        ((1, 256), (512, 600), r"input 'x': .* aligned and on the device"),
    ],
)
def test_tensors_that_a_run_would_overwrite_are_refused(bind, inputs, outputs, message):
    with pytest.raises(InputError, match=message):
        bind(list(map(rows, inputs)), list(map(rows, outputs)))


PLACE = BufferRecord("arena", 256, 24, "f32", (1, 2, 3, 1), "acdb")
"""Of two channels, which come last in memory."""


def results(arena):
    """Yield results of a call, each with whether kernels can read it where it lies."""
    numbers = torch.arange(6.0).view(1, 3, 1, 2).permute(0, 3, 1, 2)
    room = torch.zeros(64)
    odd = room[1 + (-room.data_ptr() // 4) % 4 :][:6].view(1, 3, 1, 2).permute(0, 3, 1, 2)
    within = arena[512:536].view(torch.float32).view(1, 3, 1, 2).permute(0, 3, 1, 2)
    for other in (odd, within):
        other.copy_(numbers)
    wide = torch.zeros(1, 3, 1, 4)[..., ::2].permute(0, 3, 1, 2).copy_(numbers)
    yield from ((numbers, True), (odd, False), (within, False), (wide, False), (numbers.contiguous(), False))


def test_a_calls_result_is_used_where_it_lies_only_if_kernels_can_read_it_there():
    arena = torch.zeros(1024, dtype=torch.uint8)
    assert arena.data_ptr() % 16 == 0
    weights = SimpleNamespace(offsets=())
    for result, is_usable in results(arena):
        arena[256:280] = 0
        memory = StepMemory(torch, SimpleNamespace(weights=weights), (arena, None, ()), (), ())
        memory.put(PLACE, result)
        address = result.data_ptr() if is_usable else arena.data_ptr() + 256
        assert memory.address(PLACE) == address
        assert bool(memory.kept) is is_usable
        np.testing.assert_array_equal(memory.tensor(PLACE), result)
        np.testing.assert_array_equal(memory.flat(PLACE).view(torch.float32), np.arange(6.0))


def test_schedules_are_compared_on_equal_inputs():
    """A schedule whose results differ from those of the kernels in order is not used."""

    def run(*outputs):
        inputs = [torch.zeros(3, 4), torch.ones(2, dtype=torch.int64)]
        return SimpleNamespace(inputs=inputs, outputs=[torch.tensor(output) for output in outputs])

    one = run([1.0, float("nan"), float("-inf")], [2])
    other = run([1.001, float("nan"), float("-inf")], [2])
    other.inputs[1].zero_()
    use_equal_inputs(one, other)
    assert all(map(torch.equal, one.inputs, other.inputs)) and one.inputs[0].std() > 0
    assert other.inputs[1].tolist() == [1, 1]
    assert agree(one, other)
    assert not agree(one, run([1.1, float("nan"), float("-inf")], [2]))
    assert not agree(one, run([1.0, 0.0, float("-inf")], [2]))
    assert not agree(one, run([1.0, float("nan"), float("-inf")], [3]))
    assert agree(run([]), run([]))
