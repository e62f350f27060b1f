"""Costs of candidates on the CPU."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from korch.candidate.candidate import Candidate, Refusal
from korch.costs.analysis import analyse, work_of
from korch.costs.calibrated import ScoreTail
from korch.costs.features import features_of
from korch.costs.model import model_for
from korch.costs.operations import gathered_indices, iterations
from korch.costs.rates import Calibration, Rates, Work
from korch.measure import uncompiled
from korch.measure.batch import JobResult, NotCompiled, SourcedJob, compile_and_time, least_timing_s
from korch.measure.build_job import PRINTING
from korch.measure.build_pool import BuildPool
from korch.measure.calibrate import FACT, calibrate
from korch.measure.compiler import Builder, target_of, usable_folder
from korch.measure.database import Database
from korch.measure.farm import Batch, Farm
from korch.measure.llvm_process import start_processes
from korch.measure.meter import NEVER, SPREAD, CandidateMeter
from korch.measure.pace import Pace
from korch.measure.record import Failed, FailureKind, Measured, Record
from korch.measure.timer import SCRATCH, BufferSpec, Job, Setup
from korch.options import Options
from korch.provider.for_sizes import kernel_for_sizes
from korch.provider.in_place import InPlaceProvider
from korch.provider.provider import Kernel, Provider
from korch.provider.state import StateProvider
from korch.records import plain
from korch.system.cores import usable_cores
from korch.system.deadline import Deadline
from korch.target import Target

logger = logging.getLogger("korch.measure")

DISPATCH_NS = 20
"""The time per kernel for its call: loading pointers, an indirect call."""

CALIBRATION_LIMIT_S, CALIBRATION_SHARE, UNCALIBRATED_S = 5.0, 0.1, 5.0
"""A search with a budget calibrates for at most the first seconds, and at most this share of what its budget has beyond
the last ones. It takes three seconds on an idle machine, and much longer on a busy one."""

PACE_FACT = "pace-3"
"""The name in the database of the usual durations of work."""

NOTHING = Measured(0, (0,), is_confirmed=True)
"""The record of an in-place candidate, for which no kernel runs."""


def usual_pace(options: Options) -> tuple[Pace, bool]:
    """Return the durations of work in earlier runs, and whether the machine was calibrated, from the cache folder."""
    if not options.cache_folder.is_dir():
        return Pace(None), False
    target = target_of(options)
    database = Database(usable_folder(options.cache_folder), target.fingerprint)
    try:
        return Pace(database.fact(PACE_FACT)), database.fact(FACT) is not None
    finally:
        database.close()


class CpuMeter(CandidateMeter[Target, Kernel]):
    """Builds kernels with the machine's compiler and times them in a separate process.

    Attributes:
        builds: the processes that build kernels.
        farm: the workers that measure for this process; None if there are none.
        failures: the folder for the compiler's output on kernels that do not compile.
        reads_weights_from_memory: whether a model's weights don't remain in the caches from one run
            to the next. Then kernels are timed, and their bounds computed, with cold weights.
    """

    def __init__(
        self,
        options: Options,
        providers: Sequence[Provider[Target, Kernel]],
        weights_bytes: int = 0,
        end: Deadline | None = None,
    ) -> None:
        """Open the database.

        `weights_bytes`: the bytes of the model's constants; a run reads all of them.
        """
        super().__init__(options, (*providers, InPlaceProvider(), StateProvider()))
        self.target = target_of(options)
        self.model = model_for(self.target.isa) if options.ablation.learned_costs else None
        self.builder = Builder(self.target.isa, options.cache_folder, end)
        has_farm = options.farm and options.measure and options.replay is None
        self.farm = Farm(options, self.target, self.builder, end) if has_farm else None
        mine = {p.name: p for p in providers if type(p).__module__.startswith(PRINTING)}
        self.builds = BuildPool(self.builder, self.target, mine, compiles=self.farm is None)
        self.failures = self.builder.folder.parent / "not-compiled"
        folder = self.builder.folder.parent
        fields = json.dumps(plain(self.target))
        self.database = Database(folder, self.target.fingerprint, fields=fields)
        self.pace = Pace(self.database.fact(PACE_FACT))
        self.calibration = self._calibrate()
        self.reads_weights_from_memory = weights_bytes > self.calibration.kept_bytes
        if self.reads_weights_from_memory:
            self.database.close()
            self.database = Database(folder, self.target.fingerprint, "cold weights", fields)
            self.calibration = self._calibrate(self.calibration)

    def expect_work(self) -> None:
        """Start the processes that build kernels, if this process builds any."""
        if self.options.measure and self.options.replay is None and self.farm is None:
            start_processes(usable_cores())

    def known(self, candidate: Candidate) -> Record | None:
        """Return the record of a candidate from this run or the database; None if there is none."""
        if candidate.offer.is_in_place:
            self._records[candidate.key] = NOTHING
        found = super().known(candidate)
        is_new = candidate.key not in self.uncompiled
        if isinstance(found, Failed) and found.kind == "not compiled" and is_new:
            row = uncompiled.recorded(self.failures, candidate, found.message)
            self.uncompiled[candidate.key] = row
        return found

    def build(self, candidate: Candidate) -> Kernel | Refusal:
        """Let a candidate's provider build its kernel; with `served`, one that computes what a size needs."""
        build = partial(kernel_for_sizes, candidate, super().build)
        return self.faults.survive(candidate.provider, candidate.group, build)

    def bound_ns(self, candidate: Candidate) -> int:
        """Return a lower bound of the time of any kernel for a candidate."""
        if candidate.offer.is_in_place:
            return 0
        return DISPATCH_NS + self.calibration.bound_ns(self._work(candidate))

    def predict(self, candidates: Sequence[Candidate]) -> list[tuple[int, float]]:
        """Return the approximate time of each candidate in nanoseconds, and the usual error of its logarithm.

        Both come from the learned model of costs if the instruction set has one, else from an analytic guess.
        """
        is_cold = self.reads_weights_from_memory
        analyses = [analyse(candidate, self.calibration, is_cold=is_cold) for candidate in candidates]
        if self.model is None:
            return [(analysis.guess_ns, SPREAD) for analysis in analyses]
        rows = features_of(candidates, analyses, self.target)
        return self.model.predict(rows, [analysis.guess_ns for analysis in analyses])

    def tails(self) -> Mapping[str, ScoreTail]:
        """Return the scores of the learned model's predictions, by provider; empty without a model."""
        return {} if self.model is None else self.model.tails

    def correct(self, candidate: Candidate, record: Record) -> None:
        """Raise the calibrated rates until the bound holds for a measured candidate."""
        if isinstance(record, Measured) and record.time_ns < self.bound_ns(candidate):
            seconds = 1e-9 * max(1, record.time_ns - DISPATCH_NS)
            self.calibration = self.calibration.raised(self._work(candidate), seconds)
            self.database.put_fact(FACT, self.calibration.to_text())

    def _work(self, candidate: Candidate) -> Work:
        return work_of(candidate, is_cold=self.reads_weights_from_memory)

    def rates(self) -> Rates:
        """Return the rates of the calibration."""
        return self.calibration.rates

    @property
    def machines(self) -> int:
        """The number of machines that compile or time kernels at once."""
        return 1 if self.farm is None else max(1, len(self.farm.machines))

    def begin(self, candidates: Sequence[Candidate]) -> None:
        """Begin to build candidates that will likely be measured, in parallel with other work."""
        self.builds.begin(self._unbuilt([c for c in candidates if self.known(c) is None]))

    def rest(self) -> None:
        """Stop the work that `begin` has started, and keep the kernels that are built."""
        self._kernels |= self.builds.rest()

    def prepare(self, candidates: Sequence[Candidate], deadline: Deadline = NEVER) -> list[Candidate]:
        """Build and compile candidates in several processes, until the time that is left is needed to time them."""
        self.rest()
        if len(todo := self._unbuilt(candidates)) < 2:
            return list(candidates)
        end = deadline.before(least_timing_s(self.pace, len(todo)))
        begun_s = time.monotonic()
        found = self.builds.build(todo, end, self.tell)
        self.pace.note("compile", len(found), time.monotonic() - begun_s)
        self._kernels |= found
        return [c for c in candidates if not end.is_over or c.kernel_key in self._kernels or c.kernel_key not in todo]

    def _unbuilt(self, candidates: Sequence[Candidate]) -> dict[str, Candidate]:
        """Return the candidates that other processes can build and that are not built, by the keys of their kernels.

        Kernels for several sizes are built here: their providers know the kernels for the largest size.
        """
        todo = [c for c in candidates if c.served is None and c.provider in self.builds.providers]
        return {c.kernel_key: c for c in todo if c.kernel_key not in self._kernels}

    def close(self) -> None:
        """Stop compilers, store the usual durations, and close the database."""
        self.builds.close()
        if self.farm is not None:
            self.farm.close()
        self.database.put_fact(PACE_FACT, self.pace.to_text())
        super().close()

    def measure_batches(
        self, batches: Sequence[Sequence[Candidate]], kernels: Mapping[str, Kernel], deadline: Deadline
    ) -> None:
        """Build and time batches of kernels on the machines of the farm, if there is one, else one after another."""
        left = batches
        if self.farm is not None:
            left = self._on_farm(self.farm, batches, kernels, deadline)
        super().measure_batches(left, kernels, deadline)

    def measure_batch(self, batch: Sequence[Candidate], kernels: Mapping[str, Kernel], deadline: Deadline) -> None:
        """Compile kernels and time them."""
        jobs = self._jobs(batch, kernels)
        self._keep(batch, compile_and_time(jobs, self.builder, self._setup(), self.pace, deadline, self.tell))

    def _on_farm(
        self, farm: Farm, batches: Sequence[Sequence[Candidate]], kernels: Mapping[str, Kernel], deadline: Deadline
    ) -> list[Sequence[Candidate]]:
        """Let a farm measure batches; return what it did not, or could not."""
        asked = [
            Batch(self._jobs(batch, kernels), [self.bound_ns(c) - DISPATCH_NS for c in batch]) for batch in batches
        ]
        again: list[Candidate] = []

        def keep(i: int, records: Sequence[Measured | None]) -> None:
            self._keep(batches[i], records)
            again.extend(c for c, record in zip(batches[i], records, strict=True) if record is None)

        left = farm.measure(asked, self._setup(), deadline, keep, self.tell)
        return [*(batches[i] for i in left), *([again] if again else [])]

    def _jobs(self, batch: Sequence[Candidate], kernels: Mapping[str, Kernel]) -> list[SourcedJob]:
        return [SourcedJob(kernels[c.key].texts, self._job(c, kernels[c.key])) for c in batch]

    def _setup(self) -> Setup:
        return Setup((), self.options.threads, own_cache_bytes=self.target.l2_bytes, l3_bytes=self.target.l3_bytes)

    def _keep(self, batch: Sequence[Candidate], outcomes: Sequence[JobResult]) -> None:
        """Store what became of the kernels of a batch."""
        for candidate, outcome in zip(batch, outcomes, strict=True):
            match outcome:
                case Measured():
                    self.keep(candidate.key, replace(outcome, time_ns=outcome.time_ns + DISPATCH_NS))
                case Failed():
                    self.keep(candidate.key, outcome)
                case NotCompiled(source, failure):
                    kind: FailureKind = "killed" if failure.was_killed else "not compiled"
                    self.keep(candidate.key, Failed(kind, failure.message))
                    if not failure.was_killed:
                        row = uncompiled.record(self.failures, candidate, source, failure)
                        self.uncompiled[candidate.key] = row

    def compile_s(self, candidates: Sequence[Candidate]) -> float:
        """Return the predicted seconds to compile the candidates that are not compiled yet."""
        built = [self._kernels[c.kernel_key] for c in candidates if c.kernel_key in self._kernels]
        texts = [text for kernel in built if isinstance(kernel, Kernel) for text in kernel.texts]
        unbuilt = {c.kernel_key for c in candidates} - self._kernels.keys()
        return self.pace.predict_s("compile", self.builder.missing_work(texts) + len(unbuilt))

    def _calibrate(self, known: Calibration | None = None) -> Calibration:
        """Return the calibration from the database, or else `known`, or else a new one.

        The latter two are stored, unless a budget has shortened the calibration: then its rates may be too low.
        """
        text = self.database.fact(FACT)
        if text is not None:
            try:
                found = Calibration.from_text(text)
                self.has_brief_rates = False
                return found
            except (ValueError, TypeError, KeyError):
                logger.warning("the stored calibration is damaged; the machine is measured again")
        if known is None:
            budget_s = self.options.budget_s
            share_s = CALIBRATION_SHARE * max(0.0, (budget_s or 0.0) - UNCALIBRATED_S)
            limit_s = None if budget_s is None else min(CALIBRATION_LIMIT_S, share_s)
            end = Deadline.after(limit_s, time.monotonic())
            found = calibrate(self.target, self.builder, end)
            known = Calibration.from_text(found.to_text())  # what later searches read
            self.has_brief_rates = end.is_over
        if not self.has_brief_rates:
            self.database.put_fact(FACT, known.to_text())
        return known

    def _job(self, candidate: Candidate, kernel: Kernel) -> Job:
        group, updates = candidate.group, candidate.offer.updates
        indices = gathered_indices(group) | iterations(group, candidate.served)
        buffers = [
            BufferSpec(
                layout.size_bytes(type_),
                layout.stored_type(type_).dtype.value,
                indices.get(i),
                same_as=0 if updates and i == len(group.inputs) else None,
            )
            for i, (type_, layout) in enumerate(candidate.stored)
        ]
        if kernel.workspace_bytes or not kernel.size_input:
            buffers.append(BufferSpec(max(64, kernel.workspace_bytes), SCRATCH))
        if candidate.served is not None and kernel.size_input:
            sizes = np.array(candidate.served.sizes, np.int64)
            buffers.append(BufferSpec(sizes.nbytes, "i64", sizes))
        kept = {0} if updates else set()  # memory of sessions, of which no other kernel has written much
        written = tuple(i for i in range(len(group.inputs)) if i not in group.constant_inputs | kept)
        cold = tuple(sorted(group.constant_inputs)) if self.reads_weights_from_memory else ()
        return Job(kernel.symbol, kernel.has_state, tuple(buffers), written, cold)
