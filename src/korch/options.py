"""The options of one optimization: one frozen record that every stage reads.

The flags of the command line are generated from the fields (name, type, default, `help` metadata), so
that `korch --help`, the documentation and the code agree. `search` and `ablation` have no flags:
they can only be set from Python.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from korch.ablation import Ablation
from korch.errors import OptionError
from korch.limits import SearchLimits
from korch.records.fields import Ranges, check_fields
from korch.system.cores import machine_cores, usable_cores

logger = logging.getLogger("korch.options")

_RANGES: Ranges = {
    "threads": (lambda value: value >= 1, "at least 1"),
    "budget_s": (lambda value: value > 0, "a number of seconds greater than 0"),
    "superopt_s": (lambda value: value >= 0, "a number of seconds, at least 0"),
    "error": (lambda value: 0 <= value < 1, "at least 0 and less than 1; 0.01 is 1 % of the largest element"),
    "tolerance": (lambda value: 0 < value < math.inf, "a part of the largest element, more than 0"),
}


def default_cache_folder() -> Path:
    """Return `$KORCH_CACHE`, else `$XDG_CACHE_HOME/korch`, else `~/.cache/korch`.

    For a user without a home folder, as in some containers, `~` is `/`, which is usually not
    writable.
    """
    if folder := os.environ.get("KORCH_CACHE"):
        return Path(folder)
    try:
        home = Path.home()
    except RuntimeError:
        home = Path("/")
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "korch"


def default_threads() -> int:
    """Return the number of cores that this process may use, by affinity and container quota."""
    return usable_cores()


def unknown_option(name: str, known: Iterable[str], where: str) -> OptionError:
    """Return the error for an option that does not exist, with a similar name."""
    names = sorted(known)
    similar = get_close_matches(name.removesuffix("_s"), names, 1)
    return OptionError(
        f"there is no option {name!r}",
        where,
        "one of " + ", ".join(names),
        f"Do you mean {similar[0]!r}?" if similar else "",
    )


@dataclass(frozen=True, slots=True)
class Options:
    """How to optimize; every field with a `help` text is an option of `korch optimize`.

    Attributes:
        search: the limits of the search.
        ablation: parts of the method that are switched off.

    Raises:
        OptionError: a value is out of range.
    """

    target: str = field(
        default="cpu",
        metadata={
            "help": "the device to build for: cpu; cuda (the device of this machine); cuda:NAME, as in cuda:h200 (a "
            "device whose records were imported, see `korch measure`); or cuda:sm_90 or cuda:sm_80 with --dry-run or "
            "`korch prepare`. Only cuda needs a device"
        },
    )
    threads: int = field(
        default_factory=default_threads,
        metadata={
            "help": "the number of threads of the executable, at most the cores of this machine; by default the "
            "cores that affinity and the container's CPU quota allow"
        },
    )
    isa: str = field(
        default="",
        metadata={
            "help": "the instruction set to build for, or several separated by commas, such as amx,avx512,avx2: the "
            "artifact then has a plan for each, and the best one that the CPU has is run where it is loaded. They must "
            "be this CPU's, because plans are run to check them (default: the best one of this CPU)"
        },
    )
    budget_s: float | None = field(
        default=None,
        metadata={
            "help": "the number of seconds after which the artifact is written with the best plan found so far "
            "(default: no limit)"
        },
    )
    superopt_s: float | None = field(
        default=None,
        metadata={
            "help": "the number of seconds for the search for kernels of several products or sums, such as of "
            "normalizations (default: no search; kernels that an earlier search found are used); 0: no such kernels"
        },
    )
    strict: bool = field(
        default=False,
        metadata={
            "help": "use only rewrites and algorithms that keep the order of floating-point operations; only the "
            "order within reductions may change"
        },
    )
    precision: Literal["float32", "tf32", "float16", "bfloat16", "int8"] = field(
        default="float32",
        metadata={
            "help": "the precision of products in float32 models; sums stay float32. On CUDA devices: tf32 rounds the "
            "factors to 11 bits; float16 and bfloat16 also store them in that type. On CPUs: int8 rounds data that is "
            "multiplied by weights of 2, 4 or 8 bits with scales for blocks; accuracy_level=4 of a node does the same"
        },
    )
    state: Literal["float32", "float16", "bfloat16", "int8"] = field(
        default="float32",
        metadata={
            "help": "the type in which sessions keep states that are float32 in the model, such as keys and values; "
            "16 bits take half of the memory, int8 with a scale for each row of a head a quarter"
        },
    )
    tolerance: float | None = field(
        default=None,
        metadata={
            "help": "the largest error of a plan, relative to the largest element of each output; if no plan is "
            "within it, the search is repeated with --strict (default: 1e-3, 5e-3 for tf32 and float16, 4e-2 for "
            "bfloat16, or twice the error of the model in its own types, whichever is largest)"
        },
    )
    inputs: Path | Mapping[str, Any] | None = field(
        default=None,
        metadata={
            "help": "a file .npz with an array for each input of the model, on which plans are compared with the "
            "model; in Python also arrays by name (default: random normal numbers, smaller if the model's own outputs "
            "are infinite otherwise, and integers 0 and 1)"
        },
    )
    error: float = field(
        default=0.0,
        metadata={
            "help": "on CPUs, the error that a plan may have, relative to the largest element of each output, in "
            "exchange for computing products of a float32 model in fewer bits or reading weights as bytes or bfloat16; "
            "0: neither"
        },
    )
    calibrate: Path | None = field(
        default=None,
        metadata={
            "help": "with --error, a file .npz of inputs from which the ranges of bytes are read: an array for each "
            "input of the model, with an axis of samples before the others (default: random normal inputs)"
        },
    )
    schedule: Literal["auto", "joins", "tasks", "fastest"] = field(
        default="auto",
        metadata={
            "help": "what a thread waits for. joins: for all threads, after each kernel. tasks: only for the tasks "
            "whose results it reads (on CPUs only). fastest: time both plans, and keep the faster one. auto: joins for "
            "ranges, with --no-measure and on CUDA devices, else fastest"
        },
    )
    measure: bool = field(
        default=True,
        metadata={
            "help": "measure candidates; --no-measure uses lower bounds as costs and compiles one plan only, so that "
            "the speed of the plan is unknown"
        },
    )
    farm: str = field(
        default="",
        metadata={
            "help": "on CPUs, the address of a Dask scheduler, as tcp://10.0.0.1:8786, whose workers compile kernels, "
            "and time them if their machines are of this kind (default: this machine measures alone)"
        },
    )
    cache_folder: Path = field(
        default_factory=default_cache_folder,
        metadata={"help": "the folder that keeps compiled kernels and measurements"},
    )
    ledger: Path | None = field(
        default=None, metadata={"help": "write each question and answer of the search to this file, for --replay"}
    )
    replay: Path | None = field(
        default=None,
        metadata={"help": "take the answers from this ledger: the same plan is found, and no kernel is measured"},
    )
    search: SearchLimits = field(default_factory=SearchLimits)
    ablation: Ablation = field(default_factory=Ablation)

    def __post_init__(self) -> None:
        for name in ("cache_folder", "ledger", "replay", "calibrate", "inputs"):
            value = getattr(self, name)
            if isinstance(value, str | os.PathLike):
                object.__setattr__(self, name, Path(value))
        check_fields(self, _RANGES)
        if "$" in str(self.cache_folder):
            raise OptionError(
                f"the value is {str(self.cache_folder)!r}, and the system's loader replaces names such as $ORIGIN",
                where="option cache_folder",
                expected="a path without $",
            )
        if self.ledger and self.replay:
            raise OptionError("a replay writes no ledger", "option ledger", hint="Remove --ledger or --replay")
        _check_threads(self.threads)
        self._check_error()
        if not re.fullmatch(r"cpu|cuda(:[\w -]+)?", self.target):
            raise OptionError(
                f"unknown target {self.target!r}",
                where="option target",
                expected="cpu, cuda, cuda:NAME, or with --dry-run cuda:sm_90 or cuda:sm_80",
            )
        if len(set(self.isas)) < len(self.isas) or (self.isa and not all(self.isas)):
            raise OptionError(f"the value is {self.isa!r}", "option isa", "different names, such as avx512,avx2")
        if self.isa and self.is_cuda:
            raise OptionError("instruction sets are those of CPUs", "option isa", hint="Remove --isa")
        self._check_types()
        if self.schedule in ("tasks", "fastest") and self.is_cuda:
            raise OptionError(
                "kernels for CUDA devices do not run as tasks", "option schedule", hint="Remove --schedule"
            )

    def _check_types(self) -> None:
        for_cpus = {"state": ("sessions are", self.state != "float32"), "farm": ("farms are", bool(self.farm))}
        for name, (what, is_set) in for_cpus.items():
            if is_set and self.is_cuda:
                raise OptionError(f"{what} for CPUs only", f"option {name}", hint=f"Remove --{name}")
        if self.precision != "float32" and self.is_cuda == (self.precision == "int8"):
            devices, other = ("CUDA devices", "cuda") if self.precision != "int8" else ("CPUs", "cpu")
            raise OptionError(
                f"the value {self.precision!r} is for {devices} only",
                where="option precision",
                hint=f"Add --target {other}, or remove --precision",
            )
        if self.precision == "int8" and self.strict:
            raise OptionError("int8 does not go with --strict", "option precision", hint="Remove one of both")

    def _check_error(self) -> None:
        if self.calibrate is not None and not self.error:
            raise OptionError("--calibrate has no effect without --error", "option calibrate", hint="Add --error 1e-2")
        for flag, is_set in (("--strict", self.strict), ("--target cuda", self.is_cuda)):
            if self.error and is_set:
                raise OptionError(f"less precise types do not go with {flag}", "option error", hint=f"Remove {flag}")

    @property
    def is_cuda(self) -> bool:
        """Whether the target is a CUDA device."""
        return self.target != "cpu"

    @property
    def is_recorded(self) -> bool:
        """Whether the target is a CUDA device that is known from records."""
        return self.target.startswith("cuda:") and not self.target.startswith("cuda:sm_")

    @property
    def isas(self) -> tuple[str, ...]:
        """The instruction sets to build for; one empty name for the best one of this CPU."""
        return tuple(name.strip() for name in self.isa.split(","))

    @property
    def allowed_error(self) -> float | None:
        """The largest error that a check allows: `tolerance` or, without one, the error budget; None without both."""
        return self.tolerance if self.tolerance is not None else self.error or None

    @property
    def allows_tf32(self) -> bool:
        """Whether float32 products may round their factors to 11 bits."""
        return self.precision == "tf32"

    @property
    def files(self) -> list[Path]:
        """The files that are read, other than the model."""
        return [path for path in (self.inputs, self.calibrate, self.replay) if isinstance(path, Path)]

    @property
    def recorded(self) -> Options:
        """The options without arrays, as artifacts and ledgers record them."""
        return replace(self, inputs=None) if isinstance(self.inputs, Mapping) else self

    def for_search(self, number: int, kind: str = "") -> Options:
        """Return the options for search `number` of several.

        In all searches but the first, `.NUMBER` is appended to the name of the ledger file. Searches that consist of
        several have a `kind`, which precedes the number, so that no two files have the same name.
        """
        named = {name: path for name in ("ledger", "replay") if (path := getattr(self, name)) is not None}
        numbered = {name: path.with_name(f"{path.name}.{kind}{number}") for name, path in named.items() if number}
        return replace(self, **numbered)


def flagged_fields() -> list[Any]:
    """Return the fields of `Options` that the command line has flags for."""
    return [f for f in fields(Options) if "help" in f.metadata]


def _check_threads(threads: int) -> None:
    """Refuse more threads than cores; warn if there are more than this process may use."""
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
