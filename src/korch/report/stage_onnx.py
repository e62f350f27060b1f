"""The primitives of a model, or the candidates for its kernels, as ONNX models that other engines run."""

from collections.abc import Callable, Sequence
from pathlib import Path

import onnx

from korch.binary_program.candidate_file import CandidateFile, format_candidates
from korch.candidate.candidate import Candidate
from korch.errors import UnsupportedError
from korch.primitive.as_onnx import OnnxNodes
from korch.search.instance import Instance
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
    """Write a model for each group of primitives, and a file of the candidates with their costs (`CandidateFile`).

    `cost_ns`: returns the cost of a candidate, and whether it was measured. `folder`: where to write; it is made if it
    does not exist.

    Returns:
        The numbers of models and of candidates.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    blocks = []
    for task in tasks:
        more = []
        for candidate in task.candidates:
            group = candidate.group
            if group.key not in files:
                files[group.key] = f"{group.key}.onnx"
                try:
                    save_model(OnnxNodes(group.body, f"group {group.key}").model(), folder / files[group.key])
                except UnsupportedError:
                    files[group.key] = ""
            kernel = f"{candidate.provider} {candidate.offer.variant}".rstrip()
            more.append({"kernel": kernel, "model": files[group.key]})
        blocks.append(CandidateFile.of_problem(Instance(task.block.graph, task.candidates).problem(cost_ns), more))
    (folder / INDEX).write_text(format_candidates(blocks), encoding="utf-8")
    return sum(map(bool, files.values())), sum(len(task.candidates) for task in tasks)
