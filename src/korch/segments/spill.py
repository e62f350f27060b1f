"""Moves large constants that rules computed to temporary files.

Rules compute other forms of weights (the Winograd transform takes four times the memory), and most of them are
in no plan. When they exceed a limit, further ones are written to files without a name, which exist as long as
the constants do, and are read from there when a plan is built.
"""

import logging
import mmap
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from korch.limits import DEFAULT_LIMITS, SearchLimits
from korch.primitive.graph import Constant, PrimitiveGraph
from korch.primitive.op import Array

SPILLED_BYTES = 1 << 18  # smaller constants are never written to a file

logger = logging.getLogger("korch.segments")


class Spill:
    """Decides which constants of one model are moved to files, and moves them."""

    def __init__(self, folder: Path | None = None, limits: SearchLimits = DEFAULT_LIMITS) -> None:
        self.folder, self.left_bytes = folder, limits.kept_bytes
        self._moved: dict[str, Constant] = {}

    def take(self, graph: PrimitiveGraph, source: PrimitiveGraph) -> PrimitiveGraph:
        """Return a graph whose large constants may be in files, except for constants that its source has too."""
        own = {constant.digest for constant in source.constants.values()}
        constants = {
            value: constant if constant.digest in own else self.keep(constant)
            for value, constant in graph.constants.items()
        }
        return replace(graph, constants=constants)

    def keep(self, constant: Constant) -> Constant:
        """Return the constant itself, or an equal one in a file if it is large and the memory limit is reached."""
        if constant.is_uniform or constant.array.nbytes < SPILLED_BYTES:
            return constant
        if constant.digest in self._moved:
            return self._moved[constant.digest]
        if self.left_bytes >= constant.array.nbytes:
            self.left_bytes -= constant.array.nbytes
            return constant
        try:
            moved = self._written(constant)
        except OSError as error:
            logger.info("a constant stays in memory: %s", error)
            return constant
        self._moved[constant.digest] = moved
        return moved

    def _written(self, constant: Constant) -> Constant:
        with tempfile.TemporaryFile(dir=self.folder) as stream:
            stream.write(constant.array.reshape(-1).view(np.uint8).data)
            stream.flush()
            array = np.memmap(stream, constant.array.dtype, mode="r", shape=constant.array.shape)
        forget(array)
        return Constant(array, constant.digest)


def forget(array: Array) -> None:
    """Release the memory of a constant that is in a file; it is read from the file again when it is used."""
    mapped = getattr(array, "_mmap", None)
    if isinstance(mapped, mmap.mmap):
        mapped.madvise(mmap.MADV_DONTNEED)
