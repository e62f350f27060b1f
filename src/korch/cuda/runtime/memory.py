"""The memory of a program's buffers on a device: addresses for kernels, tensors for calls of PyTorch."""

from collections.abc import Sequence
from typing import Any

from korch.candidate.layout import Layout
from korch.cuda.kernel import POINTER_ALIGNMENT
from korch.cuda.layout import strided, strides_of
from korch.cuda.runtime.record import BufferRecord, CudaProgram
from korch.primitive.torch_calls.node import TORCH_TYPES


class StepMemory:
    """Addresses and views of a program's buffers."""

    def __init__(
        self,
        torch: Any,
        program: CudaProgram,
        own: tuple[Any, Any, Sequence[Any]],
        inputs: Sequence[Any],
        outputs: Sequence[Any],
    ) -> None:
        """Store the memory of a run."""
        self.torch = torch
        self.arena, self.weights, tables = own
        self.offsets = program.weights.offsets
        self.lists = {"input": inputs, "output": outputs, "table": tables}
        self.results: dict[int, Any] = {}
        self.kept: list[Any] = []

    def put(self, place: BufferRecord, result: Any) -> None:
        """Use a call's result in place of a buffer of the arena; copy it if it is an output or not as kernels read it.

        Results stay alive as long as the graph, because branches of the graph run concurrently.
        """
        if place.memory == "arena" and self._is_usable(result, place):
            self.results[place.at] = result
            self.kept.append(result)
        else:
            self.forget([place])
            self.tensor(place).copy_(result)

    def _is_usable(self, result: Any, place: BufferRecord) -> bool:
        """Return whether a result is dense in the buffer's layout, begins where vectors may, and is not in the arena.

        A view of an argument in the arena would change when the argument's memory is reused.
        """
        begin = result.data_ptr()
        is_own = not 0 <= begin - self.arena.data_ptr() < self.arena.numel()
        wanted = zip(result.shape, result.stride(), strides_of(place.shape, Layout.parse(place.layout)), strict=True)
        return is_own and begin % POINTER_ALIGNMENT == 0 and all(n == 1 or own == step for n, own, step in wanted)

    def forget(self, places: Sequence[BufferRecord]) -> None:
        """Record that a step writes these buffers (or uses them as scratch memory), so they are in the arena again."""
        for place in places:
            if place.memory == "arena":
                self.results.pop(place.at, None)

    def address(self, place: BufferRecord) -> int:
        """Return the address of a buffer."""
        if place.memory == "arena" and place.at in self.results:
            return int(self.results[place.at].data_ptr())
        if place.memory == "arena":
            return int(self.arena.data_ptr()) + place.at
        if place.memory == "constant":
            return int(self.weights.data_ptr()) + self.offsets[place.at]
        return int(self.lists[place.memory][place.at].data_ptr())

    def flat(self, place: BufferRecord) -> Any:
        """Return a buffer as a flat tensor of bytes."""
        if place.memory == "arena" and place.at in self.results:
            found = self.results[place.at]
            return bytes_of(self.torch, found.as_strided((found.numel(),), (1,)))
        if place.memory == "arena":
            return self.arena[place.at : place.at + place.size_bytes]
        if place.memory == "constant":
            begin = self.offsets[place.at]
            return self.weights[begin : begin + place.size_bytes]
        return bytes_of(self.torch, self.lists[place.memory][place.at])

    def tensor(self, place: BufferRecord) -> Any:
        """Return a buffer as a tensor of its logical shape."""
        kind = getattr(self.torch, TORCH_TYPES[place.dtype])
        return strided(self.flat(place).view(kind), place.shape, place.layout)


def bytes_of(torch: Any, tensor: Any) -> Any:
    """Return a dense tensor's bytes; it is flattened first because a 0-d tensor can't be viewed as bytes."""
    return tensor.reshape(-1).view(torch.uint8)
