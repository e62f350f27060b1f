"""Builds TensorRT engines of networks, and runs them on given memory.

An engine runs only with the TensorRT version and on the kind of device that built it. TensorRT is
imported only to build or run an engine.
"""

import logging
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

from korch.errors import CompileError, ProviderError, UnsupportedError, excerpt

logger = logging.getLogger("korch.cuda")

ALIGNMENT = 256
"""Tensors passed to an engine begin at multiples of this many bytes, as CUDA allocates; others are copied first."""

MISSING = "TensorRT is not installed; pip install tensorrt"


@lru_cache(maxsize=1)
def _library() -> tuple[Any, Any]:
    """Return the library and its logger; a process has only one logger.

    Raises:
        ImportError: TensorRT is not installed.
    """
    try:
        library = import_module("tensorrt")
    except ImportError as error:
        raise ImportError(MISSING) from error
    return library, library.Logger(library.Logger.ERROR)


def library_version() -> str:
    """Return the library's version.

    Raises:
        ImportError: it is not installed.
    """
    return str(_library()[0].__version__)


def maker(device: str, arch: int) -> str:
    """Return a text that identifies what builds an engine: TensorRT's version and the device."""
    return f"TensorRT {library_version()}, {device}, sm_{arch}"


@lru_cache(maxsize=64)
def build_engine(network: bytes, allow_tf32: bool) -> bytes:
    """Return the engine of a network, built on this machine's device.

    `allow_tf32`: whether float32 products may round their operands.

    Raises:
        CompileError: TensorRT rejects the network; the message contains TensorRT's own.
        ImportError: TensorRT is not installed.
    """
    library, log = _library()
    builder = library.Builder(log)
    typed = 1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    definition = builder.create_network(typed)
    parser = library.OnnxParser(definition, log)
    if not parser.parse(network):
        said = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
        raise CompileError(f"TensorRT does not take the network: {excerpt(said)}")
    config = builder.create_builder_config()
    config.set_flag(library.BuilderFlag.DISABLE_TIMING_CACHE)
    config.max_aux_streams = 0  # the plan itself runs its branches concurrently
    if allow_tf32:
        config.set_flag(library.BuilderFlag.TF32)
    else:
        config.clear_flag(library.BuilderFlag.TF32)
    engine = builder.build_serialized_network(definition, config)
    if engine is None:
        raise CompileError("TensorRT builds no engine of the network")
    return bytes(engine)


def check_maker(built_by: str, here: str) -> None:
    """Check that engines built by `built_by` can run on this machine.

    Raises:
        UnsupportedError: they were built by another version of TensorRT or on another kind of device.
    """
    if built_by != here:
        raise UnsupportedError(
            f"its engines were built by {built_by}; this machine has {here}",
            where="the artifact",
            expected="the same version of TensorRT and kind of device",
            hint="Build the artifact here again",
        )


class TensorRtEngine:
    """A loaded engine, with its own memory for intermediate tensors."""

    def __init__(self, image: bytes, names: Sequence[str]) -> None:
        """Load an engine.

        `names`: the names of its inputs and outputs, in the order in which `run` takes them.

        Raises:
            ProviderError: TensorRT can't load it, or has not enough memory for it.
            ImportError: TensorRT is not installed.
        """
        library, log = _library()
        self.names = tuple(names)
        # The engine must outlive its context, and the runtime must outlive its engine.
        self._runtime = library.Runtime(log)
        self._engine = self._runtime.deserialize_cuda_engine(image)
        if self._engine is None:
            raise ProviderError("TensorRT does not load an engine", hint="Build the artifact again")
        self._context = self._engine.create_execution_context()
        if self._context is None:
            raise ProviderError("TensorRT has no memory to run an engine in", hint="Free memory on the device")

    def run(self, tensors: Sequence[Any], inputs: int, stream: int) -> list[Any]:
        """Run the engine asynchronously on the current stream of PyTorch.

        `tensors`: the bytes, as uint8[n], of its inputs and outputs; those that do not begin at multiples of 256 bytes
        are copied.

        Returns:
            The copies: they must be kept as long as a graph that has captured the run.

        Raises:
            ProviderError: TensorRT refuses the run.
        """
        placed = [_placed(tensor) for tensor in tensors]
        for name, tensor in zip(self.names, placed, strict=True):
            self._context.set_tensor_address(name, tensor.data_ptr())
        if not self._context.execute_async_v3(stream):
            raise ProviderError("TensorRT does not run an engine")
        for given, own in list(zip(tensors, placed, strict=True))[inputs:]:
            if own is not given:
                given.copy_(own)
        return [own for given, own in zip(tensors, placed, strict=True) if own is not given]


def _placed(tensor: Any) -> Any:
    """Return a flat tensor of bytes if it is aligned to `ALIGNMENT`, else an aligned copy of it."""
    if tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    room = tensor.new_empty(tensor.numel() + ALIGNMENT)
    own = room[-room.data_ptr() % ALIGNMENT :][: tensor.numel()]
    return own.copy_(tensor)
