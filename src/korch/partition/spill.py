"""Constants that rules computed -> a temporary file, where they are many.

Rules compute other forms of weights (Winograd's transform takes four times the memory), most of
which no plan uses. Beyond a limit they are written to a file that has no name and lives as long as
they do, and are read from there when a plan is built.
"""

from __future__ import annotations

import logging
import mmap
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from korch.limits import DEFAULT_LIMITS, SearchLimits
from korch.primitive.graph import Constant, PrimitiveGraph
from korch.primitive.op import Array

logger = logging.getLogger("korch.partition")


class Spill:
    """The constants of one model that rules computed."""

    def __init__(self, folder: Path | None = None, limits: SearchLimits = DEFAULT_LIMITS) -> None:
        self.folder, self.limits = folder, limits
        self.left_bytes = limits.kept_bytes
        self._moved: dict[str, Constant] = {}

    def take(self, graph: PrimitiveGraph, source: PrimitiveGraph) -> PrimitiveGraph:
        """Return a graph whose large constants that its source has not may be in a file."""
        own = {constant.digest for constant in source.constants.values()}
        constants = {
            value: constant if constant.digest in own else self.keep(constant)
            for value, constant in graph.constants.items()
        }
        return replace(graph, constants=constants)

    def keep(self, constant: Constant) -> Constant:
        """Return an equal constant that may be in a file."""
        if constant.is_uniform or constant.array.nbytes < self.limits.spilled_bytes:
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
    """Give back the memory of a constant that waits in a file; it can be read again."""
    mapped = getattr(array, "_mmap", None)
    if isinstance(mapped, mmap.mmap):
        mapped.madvise(mmap.MADV_DONTNEED)
