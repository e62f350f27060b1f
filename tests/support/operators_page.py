"""Generates the page `docs/operators.md`: the ONNX operators that Korch runs, and how it runs them.

    python -m tests.support.operators_page > docs/operators.md

The page lists the newest version of each operator that is not deprecated. An operator is split if fission
has a rule for this version, or if ONNX defines it by other operators and Korch uses that definition. The
other operators are opaque, for ONNX Runtime, or run on the host by `onnx.reference`.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx

from korch.fission import RULES
from korch.frontend import classical
from korch.frontend.expand import COMPOSITES
from korch.frontend.infer import RANDOM

WAYS = {
    "fission": "split into primitives",
    "definition": "split by a definition in nodes of the ONNX standard; of ai.onnx.ml, those on numbers",
    "control flow": "a known branch is taken; else run by the host",
    "constant": "computed when the model is read",
    "opaque": "kept whole: ONNX Runtime, or where it refuses `onnx.reference` on the host",
    "host": "run by the host, because its results are random or not tensors of static shape",
    "unsupported": "no engine here runs it",
}
REASONS = (
    "Kept whole on purpose:",
    "",
    "- LSTM, GRU, RNN with lengths, peepholes, clipping, coupled gates or rare functions, and on CUDA devices. All",
    "  others become the products of all steps by the input, and a loop over the steps for each direction.",
    "- TopK, Unique, NonMaxSuppression and the like: they sort or search; no primitive does.",
    "  TopK along the last axis has a kernel of Korch, too.",
    "- Loop, Scan: if the number of iterations or a shape depends on data. All others are split: one iteration has",
    "  a plan of its own, and a short loop becomes its iterations.",
    "- Det: a library's algorithm is better than any sum of products.",
)

CONTROL_FLOW = frozenset({"If"})
CONSTANT = frozenset({"Constant", "Shape", "Size"})
UNSUPPORTED = frozenset({"Gradient"})
NO_STATIC_TENSOR = frozenset(
    {
        "Compress",
        "NonMaxSuppression",
        "NonZero",
        "Optional",
        "OptionalGetElement",
        "OptionalHasElement",
        "RegexFullMatch",
        "SequenceMap",
        "SplitToSequence",
        "StringConcat",
        "StringNormalizer",
        "StringSplit",
        "TfIdfVectorizer",
        "Unique",
        "ConcatFromSequence",
        "ImageDecoder",
    }
)


@dataclass(frozen=True, slots=True)
class Support:
    """The way in which one operator is run, a key of `WAYS`."""

    domain: str
    name: str
    since: int
    way: str


def supported_operators() -> tuple[Support, ...]:
    """Return all operators of the ONNX standard, each in its newest version, sorted by domain and name."""
    newest: dict[tuple[str, str], int] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        key = (schema.domain or "ai.onnx", schema.name)
        if not schema.deprecated:
            newest[key] = max(newest.get(key, 0), schema.since_version)
    return tuple(
        Support(domain, name, since, _way(domain, name, since)) for (domain, name), since in sorted(newest.items())
    )


def _way(domain: str, name: str, since: int) -> str:
    if name in UNSUPPORTED:
        return "unsupported"
    if domain == classical.DOMAIN and name in classical.DEFINITIONS:
        return "definition"
    if domain == classical.DOMAIN and name not in classical.TYPED:
        return "host"
    if domain != "ai.onnx":
        return "opaque"
    if name in CONTROL_FLOW:
        return "control flow"
    if name in CONSTANT:
        return "constant"
    if name in COMPOSITES:
        return "definition"
    if any(rule.operator == name and (rule.last is None or since <= rule.last) for rule in RULES):
        return "fission"
    if name in RANDOM or name in NO_STATIC_TENSOR or name.startswith("Sequence"):
        return "host"
    return "opaque"


def format_page(found: Iterable[Support]) -> str:
    """Return the page as Markdown."""
    rows = list(found)
    counts: Mapping[str, int] = Counter(row.way for row in rows)
    lines = [
        "# Operators",
        "",
        "How Korch runs each operator of the ONNX standard "
        f"(onnx {onnx.__version__.rpartition('.')[0]}). Made by "
        "`python -m tests.support.operators_page`.",
        "",
        "| way | operators | meaning |",
        "|---|---:|---|",
    ]
    lines += [f"| {way} | {counts[way]} | {text} |" for way, text in WAYS.items()]
    lines += ["", *REASONS, "", "| operator | since | way |", "|---|---:|---|"]
    for row in rows:
        prefix = "" if row.domain == "ai.onnx" else f"{row.domain}."
        lines.append(f"| {prefix}{row.name} | {row.since} | {row.way} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(format_page(supported_operators()))
