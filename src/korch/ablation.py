"""Parts of the method that can be switched off, to measure what each of them gives.

`benchmarks/ablation.py` and tests use them. From Python:
`korch.optimize(model, ablation=Ablation(rules="none"))`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from korch.fields import check_fields


@dataclass(frozen=True, slots=True)
class Ablation:
    """Which parts of the method are used; the default is all of them.

    Attributes:
        rules: the families of equivalences to use: "all", "none", some names ("layout,winograd"),
            or names with "-" before each to leave those out ("-winograd,-channels").
        rewrites: "joint" chooses rewrites together with kernels; "first" chooses them before
            kernels, by the cost of their operations.
        layouts: "any" allows all layouts of values; "last" only plain and channels-last ones;
            "plain" only the plain one.
        side_by_side: whether independent short kernels may run concurrently, each on a part of the
            threads (on CPUs only).
        contract_chains: whether a chain of elementwise primitives without a branch always stays in
            one candidate.
        baselines: whether the best plan is compared with other plans as a whole: the fully split,
            the plain-layout and the greedily fused one.
        fitted_costs: whether a search for a range leaves out kernels at a size that their times at other sizes
            predict to lose.
        host: whether operators that do not fit a graph of static tensors run in ONNX Runtime; else models with such
            operators are refused.

    Raises:
        OptionError: a value is not one of these.
    """

    rules: str = "all"
    rewrites: Literal["joint", "first"] = "joint"
    layouts: Literal["any", "last", "plain"] = "any"
    side_by_side: bool = True
    contract_chains: bool = True
    baselines: bool = True
    fitted_costs: bool = True
    host: bool = True

    def __post_init__(self) -> None:
        check_fields(self, {})
