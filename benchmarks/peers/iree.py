"""IREE: ONNX -> MLIR -> a module for this CPU, run by its pool of worker threads.

The module is compiled for the host's instruction set with the flags that IREE's guides recommend for
speed on CPUs: optimization level 3, and data tiling, which packs the operands of matrix products.
(The level alone does not enable it, and YOLOX then takes twice as long.) The limit on a function's stack
is raised from 32 to 256 KiB, and the workers' stacks with it; otherwise Segformer does not compile.

Inputs are copied to the device's memory, which on a CPU is the process's memory, before the first run. Outputs
are read in place. Each run still allocates its outputs, because IREE has no way to bind them.

Source: IREE documentation, "CPU deployment" and "Optimization options".
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.tool import run_tool
from korch.inputs import free_dimensions, read_graph
from korch.report.peers.peer import Array, Arrays, Run, contiguous, missing, require

_STACK_BYTES = 1 << 18
_FLAGS = (
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
    "--iree-opt-level=O3",
    "--iree-opt-data-tiling",
    f"--iree-llvmcpu-stack-allocation-limit={_STACK_BYTES}",
)
_OPSET = "17"
"""The ONNX opset that the importer supports best; older models are converted to it."""


@dataclass(frozen=True, slots=True)
class IreePeer:
    """IREE."""

    name: str = "iree"

    def is_available(self) -> str | None:
        """Check whether the compiler and the runtime are installed, without importing them."""
        return missing("iree", "iree", "iree.compiler", "iree.runtime")

    def prepare(self, model_path: Path, inputs: Arrays, threads: int) -> Run:
        """Compile the model for the shapes of `inputs`, and load the compiled module."""
        require(self)
        inputs = contiguous(inputs)
        with tempfile.TemporaryDirectory(prefix="korch-iree-") as folder:
            return _Module(_compile(model_path, inputs, Path(folder)), inputs, threads)


def _compile(model_path: Path, inputs: Arrays, folder: Path) -> bytes:
    """Return the module's bytes. They are not mapped from a file, so that its weights count as memory."""
    source, module = folder / "model.mlir", folder / "model.vmfb"
    fixed = with_fixed_shapes(model_path, inputs, folder)
    tools = [sys.executable, "-P", "-m", "iree.compiler.tools"]
    run_tool(
        [*tools[:-1], f"{tools[-1]}.import_onnx", str(fixed), "-o", str(source), "--opset-version", _OPSET],
        "import the model",
    )
    run_tool(
        [*tools[:-1], f"{tools[-1]}.scripts.iree_compile", str(source), "-o", str(module), *_FLAGS], "compile the model"
    )
    return module.read_bytes()


def with_fixed_shapes(model_path: Path, inputs: Arrays, folder: Path) -> Path:
    """Return the model if its input shapes are fixed, else a copy in `folder` with the shapes of `inputs`."""
    import onnx

    graph = read_graph(model_path)
    declared = {value.name: value.type.tensor_type.shape.dim for value in graph.input}
    if all(d.HasField("dim_value") for name in inputs for d in declared[name]):
        return model_path
    sizes = free_dimensions(graph, inputs)
    model = onnx.load(str(model_path))
    for value in (*model.graph.input, *model.graph.output):
        known = inputs[value.name].shape if value.name in inputs else ()
        for i, dimension in enumerate(value.type.tensor_type.shape.dim):
            if i < len(known):
                dimension.dim_value = known[i]
            elif dimension.dim_param in sizes:
                dimension.dim_value = sizes[dimension.dim_param]
    del model.graph.value_info[:]  # to be inferred again with the known sizes
    path = folder / model_path.name
    onnx.save(model, str(path))
    return path


class _Module:
    """A loaded module with its inputs on the device."""

    def __init__(self, code: bytes, inputs: Arrays, threads: int) -> None:
        import iree.runtime as rt

        rt.flags.parse_flags(
            f"--task_topology_max_group_count={threads}", f"--task_worker_stack_size={4 * _STACK_BYTES}"
        )
        # A single thread runs tasks immediately on the calling thread; worker threads would have to be woken.
        # IREE keeps the device to the end of the process: outputs are in its memory and don't keep it alive.
        device = rt.get_device("local-task" if threads > 1 else "local-sync")
        config = rt.Config(device=device)
        module = rt.VmModule.copy_buffer(config.vm_instance, code)
        context = rt.load_vm_module(module, config)
        self._call: Any = context[_entry(module.function_names)]
        self._inputs = [rt.asdevicearray(device, array) for array in inputs.values()]

    def __call__(self) -> list[Array]:
        found = self._call(*self._inputs)
        outputs = found if isinstance(found, tuple) else (found,)
        return [output.to_host() for output in outputs]


def _entry(names: list[str]) -> str:
    """Return the function to call; the module also has its asynchronous variant and the initializer.

    >>> _entry(["graph$async", "graph", "__init"])
    'graph'
    """
    return next(name for name in names if "$" not in name and not name.startswith("__"))
