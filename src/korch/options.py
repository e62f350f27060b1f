"""The options of one optimization: one frozen record, read by every stage.

The command line's flags are made from these fields (name, type, default, `help` metadata), so that
`korch --help`, the documentation and the code agree by construction.
"""

from __future__ import annotations

import logging
import math
import os
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

from korch.cores import machine_cores, usable_cores
from korch.errors import OptionError
from korch.limits import SearchLimits

logger = logging.getLogger("korch.options")


def default_cache_folder() -> Path:
    """Return `$KORCH_CACHE`, else `$XDG_CACHE_HOME/korch`, else `~/.cache/korch`.

    Of a user who has no home, as in a container, that is in `/`, where it can hardly be written.
    """
    if folder := os.environ.get("KORCH_CACHE"):
        return Path(folder)
    try:
        home = Path.home()
    except RuntimeError:
        home = Path("/")
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "korch"


def default_threads() -> int:
    """Return the number of cores that this process may use, by affinity and container."""
    return usable_cores()


def unknown_option(name: str, known: Iterable[str], where: str) -> OptionError:
    """Return the error for an option that there is not, with the one that may be meant."""
    names = sorted(known)
    similar = get_close_matches(name.removesuffix("_s"), names, 1)
    return OptionError(
        f"there is no option {name!r}",
        where,
        "one of " + ", ".join(names),
        f"Do you mean {similar[0]!r}?" if similar else "",
    )


WHOLE_PRIMITIVES = 320
"""Models of at most this size are searched as a whole."""

SEGMENT_PRIMITIVES = 120
"""Most primitives in a segment of a larger model."""

_RANGES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("threads", "max_primitives", "max_inputs", "max_outputs", "max_candidates", "solver_workers"),
        (lambda value: value >= 1, "at least 1"),
    ),
    **dict.fromkeys(("patience", "seed"), (lambda value: value >= 0, "at least 0")),
    **dict.fromkeys(("gap", "max_measured"), (lambda value: value >= 0, "a share, at least 0")),
    **dict.fromkeys(("budget_s", "solver_seconds"), (lambda v: v > 0, "seconds, more than 0")),
    "tolerance": (lambda v: 0 < v < math.inf, "a part of the largest element, more than 0"),
}
"""What is true of an option's value, and how that is said. NaN is out of every range."""


def _flag(name: str) -> str:
    return name.removesuffix("_s")


def _check_kind(name: str, value: object, hint: Any) -> None:
    """Raise `OptionError` if a value, which may come from Python, is of another type."""
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        is_fit, expected = value in choices, " or ".join(map(repr, choices))
    else:
        kinds = typing.get_args(hint) or (hint,)
        is_fit = any(_is_of(value, kind) for kind in kinds)
        expected = " or ".join(_KINDS[kind][1] for kind in kinds)
    if not is_fit:
        raise OptionError(f"the value is {value!r}", f"option {_flag(name)}", expected)


_KINDS: Mapping[type, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    str: (str, "a text"),
    Path: (Path, "a path"),
    type(None): (type(None), "None"),
    SearchLimits: (SearchLimits, "a korch.limits.SearchLimits"),
}


def _check_threads(threads: int) -> None:
    """Refuse more threads than there are cores; warn of more than this process may use of them."""
    cores, usable = machine_cores(), usable_cores()
    if threads > cores:
        raise OptionError(
            f"the value {threads} is more than the {cores} cores of this machine",
            "option threads",
            f"at most {cores}",
            "Threads that share a core wait for each other",
        )
    if threads > usable:
        logger.warning(
            "%d threads share the %d cores that this process may use; its plan will be slow here", threads, usable
        )


def flagged_fields() -> tuple[Field[Any], ...]:
    """Return the fields that are flags of the command line: all but the limits of the search."""
    return tuple(field for field in fields(Options) if field.name != "search")


def _is_of(value: object, kind: type) -> bool:
    return isinstance(value, _KINDS[kind][0]) and (kind is bool or not isinstance(value, bool))


@dataclass(frozen=True, slots=True)
class Options:
    """How to optimize; every field but `search` is an option of `korch optimize`.

    Raises:
        OptionError: a value is out of range.
    """

    target: str = field(
        default="cpu",
        metadata={
            "help": "what to build for: cpu; cuda, the device at hand; or cuda:sm_90 or cuda:sm_80 "
            "with --dry-run, which needs no device"
        },
    )
    tf32: bool = field(
        default=False,
        metadata={
            "help": "on CUDA devices, let float32 products round their factors to 11 bits, as "
            "PyTorch does if it is told to"
        },
    )
    precision: Literal["float32", "float16", "bfloat16"] = field(
        default="float32",
        metadata={
            "help": "on CUDA devices, the type in which float32 models multiply and keep what they "
            "multiply; sums and what is not multiplied stay float32"
        },
    )
    threads: int = field(
        default_factory=default_threads,
        metadata={
            "help": "threads of the executable: at most the machine's cores; by default as many as "
            "affinity and a container's CPU quota leave"
        },
    )
    budget_s: float | None = field(
        default=None,
        metadata={"help": "seconds until the artifact is written, with the best plan so far (default: none)"},
    )
    strict: bool = field(
        default=False,
        metadata={
            "help": "only rewrites and algorithms that keep the order of floating-point "
            "operations up to reduction order"
        },
    )
    rules: str = field(
        default="all",
        metadata={
            "help": "families of rewrites to use: all, none, some names (layout,winograd), or "
            "with - before each those to leave out (--rules=-winograd,-channels)"
        },
    )
    rewrites: Literal["joint", "first"] = field(
        default="joint",
        metadata={
            "help": "choose rewrites together with the kernels; first: before them, by their "
            "operations alone, to see what that costs"
        },
    )
    layouts: Literal["any", "last", "plain"] = field(
        default="any",
        metadata={
            "help": "layouts of values: any; last: plain or channels-last, none in blocks of "
            "channels; plain: one only, to see what the others give"
        },
    )
    check: Literal[0, 1, 2] = field(default=1, metadata={"help": "checks between stages: 0 none, 1 linear-time, 2 all"})
    partition: str | int = field(
        default="auto",
        metadata={
            "help": "cut the model into segments of at most N primitives, so that blocks that are "
            "repeated are searched once; off: never; auto: only models of more than "
            f"{WHOLE_PRIMITIVES} primitives"
        },
    )
    host: bool = field(
        default=True,
        metadata={
            "help": "leave what can't be in a graph of static tensors to ONNX Runtime; --no-host refuses such models"
        },
    )
    max_primitives: int = field(default=24, metadata={"help": "largest number of primitives in a candidate"})
    max_inputs: int = field(default=10, metadata={"help": "most tensors that a candidate reads"})
    max_outputs: int = field(default=2, metadata={"help": "most tensors that a candidate writes"})
    side_by_side: bool = field(
        default=True,
        metadata={
            "help": "on a CPU, run independent small kernels side by side, each on a share of the "
            "threads, where that is faster; --no-side-by-side: one after the other, each on all "
            "threads"
        },
    )
    contract_chains: bool = field(
        default=True,
        metadata={
            "help": "never end a kernel between elementwise primitives that follow each other "
            "without a branch; --no-contract-chains enumerates those groups too"
        },
    )
    max_candidates: int = field(default=100_000, metadata={"help": "most convex groups enumerated for one model"})
    gap: float = field(
        default=0.005,
        metadata={
            "help": "stop once the plan is proven to cost at most this share more than the best "
            "possible one; timings are no better than that"
        },
    )
    tolerance: float | None = field(
        default=None,
        metadata={
            "help": "largest error of a plan, relative to the largest element of an output; plans "
            "beyond it are rejected, and if none is left the search is done again with --strict. "
            "By default 1e-3, 5e-3 with float16, 4e-2 with bfloat16, or twice the error of the "
            "model in its own types where that is more"
        },
    )
    patience: int = field(
        default=2,
        metadata={
            "help": "stop after this many rounds of measuring in which neither the plan nor the "
            "bound got noticeably better; the gap is reported"
        },
    )
    on_interrupt: Literal["stop", "keep"] = field(
        default="stop",
        metadata={
            "help": "what Ctrl-C does while searching: stop (what was measured is kept), or keep: "
            "end the search and build the best plan so far"
        },
    )
    measure: bool = field(
        default=True,
        metadata={
            "help": "measure candidates; --no-measure takes their bounds for their costs, and "
            "compiles the kernels of one plan only: quick, but nothing is known of its speed"
        },
    )
    baselines: bool = field(
        default=True,
        metadata={
            "help": "compare the best plan end to end with simpler ones: fully split, in the plain "
            "layout, greedily fused; --no-baselines builds the best one only"
        },
    )
    max_measured: float = field(
        default=0.24,
        metadata={
            "help": "largest share of the different candidates that is measured (of small models "
            "300 may always be); more brings the proof nearer"
        },
    )
    solver_workers: int = field(default=2, metadata={"help": "threads of the solver"})
    solver_seconds: float = field(default=60.0, metadata={"help": "longest time for one solve; the gap is reported"})
    seed: int = field(default=0, metadata={"help": "seed of the random inputs used for checking"})
    cache_folder: Path = field(default_factory=default_cache_folder, metadata={"help": "kernels and measurements"})
    search: SearchLimits = field(default=SearchLimits(), metadata={"help": "limits of the search"})

    def __post_init__(self) -> None:
        if isinstance(self.cache_folder, str | os.PathLike):
            object.__setattr__(self, "cache_folder", Path(self.cache_folder))
        for name, hint in typing.get_type_hints(Options).items():
            _check_kind(name, getattr(self, name), hint)
        for name, (is_fit, expected) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not is_fit(value):
                raise OptionError(
                    f"the value {value} is out of range", where=f"option {_flag(name)}", expected=expected
                )
        _check_threads(self.threads)
        size = str(self.partition)
        if size not in ("auto", "off") and not (re.fullmatch("[0-9]{1,18}", size) and int(size) > 0):
            raise OptionError(
                f"the value {size!r} is no size of a segment",
                where="option partition",
                expected="auto, off, or the most primitives in a segment",
            )
        if not re.fullmatch(r"cpu|cuda(:sm_\d+)?", self.target):
            raise OptionError(
                f"unknown target {self.target!r}",
                where="option target",
                expected="cpu, cuda, or cuda:sm_90 with --dry-run",
            )
        for name, is_set in (("tf32", self.tf32), ("precision", self.precision != "float32")):
            if is_set and self.target == "cpu":
                raise OptionError(
                    "it is for CUDA devices only",
                    where=f"option {name}",
                    hint="Give --target cuda too, or leave it out",
                )

    @property
    def is_cuda(self) -> bool:
        """Whether the target is a CUDA device."""
        return self.target != "cpu"

    def segment_limit(self, primitives: int) -> int | None:
        """Return the most primitives in a segment of a model of some size; None if it is whole."""
        if self.partition == "off":
            return None
        if self.partition == "auto":
            return SEGMENT_PRIMITIVES if primitives > WHOLE_PRIMITIVES else None
        return int(self.partition)
