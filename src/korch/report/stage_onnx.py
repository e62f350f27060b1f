"""The primitives of a model, or the candidates for its kernels, as ONNX models that other engines run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx

from korch.candidate.candidate import Candidate
from korch.errors import UnsupportedError
from korch.primitive.as_onnx import OnnxNodes
from korch.segments.block_task import BlockTask

LARGEST_PROTOBUF = 1 << 30
"""The weights of a larger model are written to a separate file."""

INDEX = "candidates.json"
"""The file that lists the candidates of a folder."""


def save_model(model: onnx.ModelProto, path: Path) -> None:
    """Write a model; large weights go to a file beside it."""
    is_large = model.ByteSize() > LARGEST_PROTOBUF
    onnx.save(model, str(path), save_as_external_data=is_large, location=f"{path.name}.data" if is_large else None)


def save_candidates(
    tasks: Sequence[BlockTask], cost_ns: Callable[[Candidate], tuple[int, bool]], folder: Path
) -> tuple[int, int]:
    """Write a model for each group of primitives, and a list of the candidates with their costs.

    `candidates.json` has an object for each candidate: "block", "primitives" and "outputs" (of the block's graph),
    "model" (the file of its group; "" if it has no ONNX form), "provider", "variant", "inputs" and "outputs_in" (the
    layouts), "cost_ns", and "is_measured" (false: the cost is a lower bound).

    `cost_ns`: returns the cost of a candidate, and whether it was measured. `folder`: where to write; it is made if it
    does not exist.

    Returns:
        The numbers of models and of candidates.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    rows = []
    for b, task in enumerate(tasks):
        for candidate in task.candidates:
            group, offer, (cost, is_measured) = candidate.group, candidate.offer, cost_ns(candidate)
            if group.key not in files:
                files[group.key] = f"{group.key}.onnx"
                try:
                    save_model(OnnxNodes(group.body, f"group {group.key}").model(), folder / files[group.key])
                except UnsupportedError:
                    files[group.key] = ""
            rows.append(
                {
                    "block": b,
                    "primitives": group.primitives,
                    "outputs": group.outputs,
                    "model": files[group.key],
                    "provider": candidate.provider,
                    "variant": offer.variant,
                    "inputs": [str(layout) for layout in offer.inputs],
                    "outputs_in": [str(layout) for layout in offer.outputs],
                    "cost_ns": cost,
                    "is_measured": is_measured,
                }
            )
    (folder / INDEX).write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")
    return sum(map(bool, files.values())), len(rows)
