"""Checks kernels of every provider for random groups of every element type.

    python -m tests.support.fuzz_kernels [--rounds 200] [--seed 0] [--neon [SET] | --amx]

A round draws a few random graphs of one to three element types, cuts them into groups as a search
does, asks every provider of the CPU for kernels, compiles them together, and compares each with the
reference. A kernel that does not compile or has wrong results is a finding. Round n of a seed always
draws the same groups. With `--neon` kernels are built for NEON, or for NEON with more instructions (neon_dot or
neon_bf16), and run by emulation (`tests.support.emulated`); with `--amx` software emulates matrix units that the
machine lacks. `$KORCH_ISA` chooses other instruction sets.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.enumerate import enumerate_groups
from korch.candidate.shape import shapes_of
from korch.limits import SearchLimits
from korch.measure.compiler import Builder, CompileFailure
from korch.measure.llvm_process import llvm_identity
from korch.options import Options
from korch.primitive.types import DType
from korch.provider.generated import GeneratedProvider
from korch.provider.provider import Kernel, Provider, load_providers
from korch.target import LANES, Target, detect_target
from korch.testing.kernels import check_kernel, load_kernels
from korch.testing.samples import random_arrays
from tests.support.emulated import EMULATED, Emulated, missing_commands
from tests.support.matrix_units import matrix_units
from tests.support.random_graph import random_graph

PLAIN = ((DType.F32,), (DType.F16,), (DType.BF16,), (DType.F64,))
MIXED = (
    (DType.F16, DType.F32),
    (DType.BF16, DType.F32),
    (DType.I8, DType.F32, DType.U8),
    (DType.I32, DType.F16, DType.BOOL),
    (DType.I64, DType.BF16),
    (DType.U8, DType.F16),
    (DType.I16, DType.U32),
    (DType.U64, DType.F64),
    (DType.U16, DType.I8, DType.BOOL),
)
"""Sets of element types that one graph mixes; together with `PLAIN` they contain every type."""

SIZES = (1, 2, 3, 5, 8, 17, 40)
"""Sizes of axes: shorter and longer than a vector, and long enough for kernels that prefetch."""

UNIT = 10
"""The number of kernels in one compilation unit, because headers take longer to compile than a kernel."""


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel to check."""

    provider: str
    group: Group
    offer: Offer
    kernel: Kernel


@dataclass(frozen=True, slots=True)
class Finding:
    """A kernel that does not compile or has wrong results."""

    case: Case
    message: str

    def __str__(self) -> str:
        case = self.case
        layouts = ", ".join(map(str, (*case.offer.inputs, "->", *case.offer.outputs)))
        return f"{case.provider} ({layouts}): {self.message}\n{case.group.text}"


def cpu_providers() -> tuple[Provider[Any, Any], ...]:
    """Return every provider of the CPU, and the generator with streaming stores for every output.

    The default generator uses streaming stores for large tensors only.
    """
    return (*load_providers(), GeneratedProvider(least_stream_bytes=1))


def draw_groups(rng: np.random.Generator, dtypes: Sequence[DType], count: int, primitives: int = 10) -> list[Group]:
    """Return up to `count` different groups of a random graph, preceded by some groups with linear primitives."""
    graph = random_graph(rng, primitives, linear=True, dtypes=dtypes, sizes=SIZES)
    groups, _ = enumerate_groups(
        graph, Options(search=SearchLimits(max_primitives=6)), shapes=shapes_of(load_providers())
    )
    found = list({group.key: group for group in groups}.values())
    # Groups of several primitives are preferred, because they mix loads, sums and stores of different types.
    order = [found[i] for i in rng.permutation(len(found))]
    linear = [group for group in order if group.linear_flop][: count // 4]
    return linear + sorted(order[: 3 * count], key=lambda g: -len(g.primitives))[:count]


def cases_of(
    groups: Sequence[Group],
    providers: Sequence[Provider[Any, Any]],
    target: Target,
    rng: np.random.Generator,
    each: int = 2,
) -> list[Case]:
    """Return kernels for some groups: up to `each` random offers of every provider for a group.

    Raises:
        AssertionError: a provider refuses to build its own offer.
    """
    cases = []
    for group in groups:
        for provider in providers:
            offers = provider.offer(group, target)
            if isinstance(offers, Refusal):
                continue
            for i in rng.permutation(len(offers))[:each]:
                kernel = provider.build(group, offers[i], target)
                if isinstance(kernel, Refusal):
                    raise AssertionError(f"{provider.name} refuses its offer: {kernel.reason}")
                cases.append(Case(provider.name, group, offers[i], kernel))
    return list({case.kernel.symbol: case for case in cases}.values())


def uncompiled(cases: Sequence[Case], builder: Builder) -> Iterator[Finding]:
    """Yield a finding for each kernel that does not compile."""
    units = [cases[i : i + UNIT] for i in range(0, len(cases), UNIT)]
    for unit in units:
        if _failures(unit, builder):
            for case in unit:
                for failure in _failures([case], builder):
                    yield Finding(case, f"it does not compile: {failure.message}")


def check_cases(cases: Sequence[Case], builder: Builder | Emulated, rng: np.random.Generator) -> Iterator[Finding]:
    """Yield a finding for each kernel that does not compile or differs from the reference."""
    found = [] if isinstance(builder, Emulated) else list(uncompiled(cases, builder))
    yield from found
    bad = {finding.case.kernel.symbol for finding in found}
    good = [case for case in cases if case.kernel.symbol not in bad]
    library = load_kernels([case.kernel for case in good], builder)
    for case in good:
        inputs = random_arrays(rng, case.group.input_types)
        if any(p.op == "div" for p in case.group.body.primitives):  # keeps sums that are divisors away from 0
            inputs = [np.abs(x) if x.dtype.kind not in "iub" else x for x in inputs]
        try:
            check_kernel(case.kernel, case.group, case.offer, inputs, builder, library)
        except AssertionError as error:
            yield Finding(case, str(error))


def run_round(
    seed: int,
    number: int,
    target: Target,
    builder: Builder | Emulated,
    groups: int = 4,
    dtypes: Sequence[Sequence[DType]] = (*PLAIN, *MIXED),
) -> tuple[int, list[Finding]]:
    """Check kernels for some groups of each set of element types; return the number of kernels, and findings."""
    rng = np.random.default_rng((seed, number))
    drawn = [group for types in dtypes for group in draw_groups(rng, types, groups)]
    cases = cases_of(drawn, cpu_providers(), target, rng)
    if isinstance(builder, Emulated):
        cases = [case for case in cases if not case.kernel.has_state]
    return len(cases), list(check_cases(cases, builder, rng))


def _failures(cases: Sequence[Case], builder: Builder) -> list[CompileFailure]:
    objects = builder.compile([text for kernel in [case.kernel for case in cases] for text in kernel.texts])
    return [found for found in objects if isinstance(found, CompileFailure)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rounds; return 1 if there is a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.fuzz_kernels")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--neon", nargs="?", const="neon", choices=EMULATED, help="build for NEON and run by emulation")
    parser.add_argument("--amx", action="store_true", help="build for matrix units, in software if there are none")
    args = parser.parse_args(arguments)
    if args.neon and (missing := missing_commands()):
        parser.error(f"--neon needs {' and '.join(missing)}; in Debian: apt-get install qemu-user")
    target = detect_target(2, llvm_identity())
    target = Target(isa=args.neon, lanes=LANES[args.neon]) if args.neon else target
    begun_s, checked, wrong = time.monotonic(), 0, 0
    for number in range(args.first, args.first + args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            builder = Emulated(Path(folder)) if args.neon else Builder(target.isa, Path(folder))
            if args.amx:
                target, builder = matrix_units(target, Path(folder))
            count, findings = run_round(args.seed, number, target, builder)
        checked, wrong = checked + count, wrong + len(findings)
        for finding in findings:
            print(f"round {number}: {finding}", flush=True)
    print(f"{checked} kernels, {wrong} findings, {time.monotonic() - begun_s:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
