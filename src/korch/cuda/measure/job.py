"""A kernel to be measured, as plain data: what its process reads, and the key of its record.

The key is a hash of all that a time depends on apart from the device and its software: buffers, printed code and how it
is launched. It does not depend on how the kernel was found, so records outlive changes of other code.
"""

import ast
import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from korch.candidate.candidate import Candidate
from korch.cuda.compile import Cubin, CubinFailure
from korch.cuda.kernel import CudaKernel, TorchCall

FUNCTIONS = Path(__file__).parents[1] / "functions.py"
"""The functions that printed code calls."""


def job_of(candidate: Candidate, kernel: CudaKernel, allow_tf32: bool) -> dict[str, Any]:
    """Return the job of a candidate's kernel, without its cubins.

    `allow_tf32`: whether libraries may round float32 factors; generated code says so itself.
    """
    group = candidate.group
    buffers: list[dict[str, Any]] = []
    for i, (type_, layout) in enumerate(candidate.stored):
        kind = "output" if i >= len(group.inputs) else ("constant" if i in group.constant_inputs else "input")
        buffers.append(
            {
                "kind": kind,
                "bytes": layout.size_bytes(type_),
                "dtype": type_.dtype.value,
                "shape": list(type_.shape),
                "layout": str(layout),
            }
        )
    buffers += [
        {"kind": "scratch", "bytes": size * dtype.size_bytes, "dtype": dtype.value} for dtype, size in kernel.scratch
    ]
    buffers += [{"kind": "table", "bytes": 4 * len(table), "table": list(table)} for table in kernel.tables]
    step = kernel.steps[0] if kernel.steps else None
    call = {"symbol": step.symbol, "source": step.source} if isinstance(step, TorchCall) else None
    network = kernel.network and {
        "model": base64.b64encode(kernel.network.model).decode(),
        "known": list(kernel.network.constants),
    }
    launches = [
        {"symbol": launch.symbol, "warps": launch.warps, "programs": launch.grid, "arguments": list(launch.arguments)}
        for launch in kernel.launches
    ]
    return {
        "buffers": buffers,
        "launches": launches,
        "functions": _called(launch.source for launch in kernel.launches),
        "call": call,
        "network": network,
        "allow_tf32": bool(call or network) and allow_tf32,
    }


def job_key(job: Mapping[str, Any]) -> str:
    """Return the key of a job's record; cubins are not part of it."""
    return hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:20]


def with_cubins(
    job: Mapping[str, Any], cubins: Mapping[str, Cubin | CubinFailure], folder: Path
) -> dict[str, Any] | str:
    """Return a job with the facts and the files of its cubins, or why one of them is missing.

    `folder`: where the file of each cubin is, named by its symbol.
    """
    launches = []
    for launch in job["launches"]:
        found = cubins[launch["symbol"]]
        if isinstance(found, CubinFailure):
            return found.message
        path = str(folder / f"{found.symbol}.cubin")
        launches.append({**launch, "path": path, "shared_bytes": found.shared_bytes})
    return {**job, "launches": launches}


def _called(sources: Iterable[str]) -> str:
    """Return a hash of the functions that printed code calls, and of those that they call; "" if there are none."""
    known = _functions()
    called: set[str] = set()
    todo = {name for source in sources for name in re.findall(r"\bf\.(\w+)", source)} & known.keys()
    while todo:
        called |= todo
        todo = {word for name in todo for word in re.findall(r"\w+", known[name])} & known.keys() - called
    text = "".join(known[name] for name in sorted(called))
    return hashlib.sha256(text.encode()).hexdigest()[:16] if called else ""


@cache
def _functions() -> dict[str, str]:
    """Return what `functions.py` defines, as text without docstrings, by name."""
    found = {}
    for node in ast.parse(FUNCTIONS.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            node.body = node.body[ast.get_docstring(node) is not None :]
            found[node.name] = ast.unparse(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: ast.unparse(node) for target in targets if isinstance(target, ast.Name)}
    return found
