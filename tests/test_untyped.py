"""Where types are not checked: modules that use `Any`, and those that read printed text by regular expressions.

Each has a reason. A new module needs an entry, and an entry that no module needs any more is removed.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src/korch"

ANY: Mapping[str, Sequence[str]] = {
    "PyTorch is an extra without complete types: modules, tensors, nodes of its graphs": (
        "api.py",
        "cuda/",
        "frontend/torch/",
        "inputs.py",
        "primitive/agreed.py",
        "pytorch/",
        "torch_backend.py",
    ),
    "objects of libraries without types: sessions, evaluators, streams, progress bars": (
        "binary_program/cp_sat.py",
        "cli/command.py",
        "host/",
        "report/peers/",
        "report/progress.py",
        "runtime/library.py",
    ),
    "the caller gives whatever converts to an array, or feeds by name": (
        "options.py",
        "pipeline/background.py",
        "report/profile.py",
        "runtime/",
    ),
    "JSON that is written, or read and then checked": (
        "costs/rates.py",
        "measure/",
        "records/",
        "report/",
        "search/",
        "tile/ir/stored.py",
    ),
    "an annotation is evaluated at run time: flags of options, names of attributes, names that are loaded late": (
        "__init__.py",
        "cli/flags.py",
        "primitive/text.py",
    ),
    "arrays of any element type (`np.dtype[Any]`, `NDArray[Any]`), and their scalars": (
        "frontend/tensors.py",
        "primitive/graph.py",
        "primitive/op.py",
        "primitive/ops/",
        "system/alignment.py",
        "tile/ir/sort.py",
    ),
    "attributes of ONNX nodes: a number, a text, or a sequence of them": (
        "frontend/contributed.py",
        "frontend/definition.py",
        "frontend/fused.py",
        "frontend/experts.py",
        "primitive/as_onnx.py",
        "primitive/definitions/",
        "primitive/torch_calls/node.py",
    ),
    "one type for providers, rules and kernels of all targets, whose kinds of offers and kernels differ": (
        "backend.py",
        "equivalence/rule.py",
        "provider/provider.py",
        "validation/",
    ),
}

EXPRESSIONS: Mapping[str, Sequence[str]] = {
    "words and numbers of a provider's variant, which only the provider can read": ("costs/features.py",),
    "the parser of a documented text form, beside its printer": (
        "binary_program/text.py",
        "candidate/layout.py",
        "primitive/text.py",
        "provider/triton/",
        "segments/text.py",
    ),
    "what the user wrote: options, shapes, names": ("cli/", "cuda/target.py", "options.py", "runtime/unpack.py"),
    "what another program printed: compilers, drivers, exporters, kernel files of the system, headers, metadata": (
        "cuda/compile_worker.py",
        "frontend/torch/trouble.py",
        "report/assembly.py",
        "system/",
    ),
    "a check of what a file says before it is trusted": ("runtime/artifact.py", "runtime/build.py"),
    "C++, Python and Triton sources: the names in a text": (
        "cuda/measure/job.py",
        "provider/torch_opaque.py",
        "tile/triton/text.py",
    ),
    "places to fill in a page": ("report/page.py",),
}


def modules(pattern: str) -> list[str]:
    """Return the modules with a line of code, not of an import, that matches."""
    return [
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if any(re.search(pattern, line) for line in path.read_text("utf-8").splitlines() if " import " not in line)
    ]


@pytest.mark.parametrize(
    ("pattern", "reasons"),
    [(r"[\[, |]Any[\],)]|[:>] Any\b", ANY), (r"\bre\.[a-z]+\(", EXPRESSIONS)],
    ids=["any", "expressions"],
)
def test_each_module_that_is_less_checked_has_a_reason(pattern: str, reasons: Mapping[str, Sequence[str]]) -> None:
    places = [place for row in reasons.values() for place in row]
    found = modules(pattern)
    assert [m for m in found if not any(m == place or m.startswith(place) for place in places)] == []
    assert [place for place in places if not any(m == place or m.startswith(place) for m in found)] == []
