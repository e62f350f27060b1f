"""Parts of the optimization method that can be switched off, to measure the effect of each.

`benchmarks/ablation.py` and the tests use these switches. From Python:
`korch.optimize(model, ablation=Ablation(rules="none"))`.
"""

from dataclasses import dataclass
from typing import Literal

from korch.records.fields import check_fields


@dataclass(frozen=True, slots=True)
class Ablation:
    """Which parts of the optimization method are used; by default all of them.

    Attributes:
        rules: the families of equivalences to use: "all", "none", a list of names ("layout,winograd"),
            or a list of names to leave out, each with a "-" before it ("-winograd,-channels").
        rewrites: "joint" chooses rewrites together with kernels; "first" chooses them before
            kernels, by the cost of their operations.
        layouts: "any" allows all layouts of values; "last" only plain and channels-last layouts;
            "plain" only the plain layout.
        groups: "any" allows all groups of primitives; "by-rules" those that ONNX Runtime's and Inductor's fusion by
            rules would make (`korch.search.baselines.grown_by_rules`).
        attach_chains: whether a chain of elementwise primitives without a branch always stays in
            one candidate.
        baselines: whether the best plan is compared end to end with the plans of `korch.search.baselines`.
        learned_costs: whether kernels that are not measured are estimated by the learned model of costs, not by their
            bytes and operations alone.
        host: whether operators that do not fit a graph of static tensors run in ONNX Runtime. If not, models with
            such operators are refused.

    Raises:
        OptionError: a value is not one of those listed.
    """

    rules: str = "all"
    rewrites: Literal["joint", "first"] = "joint"
    layouts: Literal["any", "last", "plain"] = "any"
    groups: Literal["any", "by-rules"] = "any"
    attach_chains: bool = True
    baselines: bool = True
    learned_costs: bool = True
    host: bool = True

    def __post_init__(self) -> None:
        check_fields(self, {})
