"""A farm: workers of a Dask cluster that compile and time kernels for a search.

A machine does one thing at a time, so that nothing disturbs its timings. Workers on a machine whose target differs
only compile. A batch whose worker is lost, late or answers nonsense is given to another machine. What no machine has
measured is left to the caller.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from korch import __version__
from korch.errors import OptionError
from korch.measure.batch import SourcedJob, sources_of
from korch.measure.compiler import Builder
from korch.measure.farm_worker import answer, compile_sources, describe, time_batch
from korch.measure.record import Failed, Measured, from_text
from korch.measure.timer import Setup
from korch.options import Options
from korch.records import plain
from korch.system.deadline import Deadline
from korch.system.extras import install_command
from korch.target import Target

logger = logging.getLogger("korch.measure")

CONNECT_S = 10.0
"""How long a scheduler may take to answer."""

DESCRIBE_S = 60.0
"""How long to wait for a first machine whose times count: its worker imports Korch."""

HUNG_S = 900.0
"""A worker that has not answered after this time gets no more work."""

TICK_S = 0.02

ELF = b"\x7fELF"

MOST_TRIES = 3
"""The number of machines that try a batch; after that the caller measures it."""

DOUBTED = 0.3
"""The share of a lower bound below which a time is doubted."""


@dataclass(frozen=True)
class Batch:
    """Kernels that one process times, with a lower bound of the time of each in nanoseconds."""

    jobs: Sequence[SourcedJob]
    bounds_ns: Sequence[int]

    @property
    def sources(self) -> list[str]:
        """The distinct sources."""
        return sources_of(self.jobs)


@dataclass
class _Machine:
    name: str
    is_timer: bool  # whether its times count
    workers: list[str] = field(default_factory=list)  # their addresses
    is_busy: bool = False


@dataclass(frozen=True)
class _Task:
    batch: int
    machine: str
    worker: str
    is_timing: bool
    begun_s: float


class Farm:
    """The workers of a Dask scheduler.

    Attributes:
        target: the target whose times count.
        machines: the machines by name.
        present: the addresses of the workers that the scheduler has.
    """

    def __init__(self, options: Options, target: Target, builder: Builder, deadline: Deadline | None = None) -> None:
        """Connect to a scheduler, and wait for a machine whose times count.

        Args:
            options: the scheduler's address, and the threads and instructions for which kernels are built.
            target: the target whose times count.
            builder: keeps the objects that workers compile.
            deadline: when to wait no longer.

        Raises:
            OptionError: Dask is not installed, or no scheduler answers.
        """
        address = options.farm
        try:
            from distributed import Client
        except ImportError as error:
            raise OptionError("Dask is not installed", "option --farm", hint=install_command("farm")) from error
        try:
            self._client: Any = Client(address, timeout=CONNECT_S, set_as_default=False)
        except Exception as error:  # Dask raises errors of many kinds
            raise OptionError(
                f"no Dask scheduler answers at {address!r} ({_line(error)})",
                "option --farm",
                "an address such as tcp://10.0.0.1:8786",
                "Start one with `dask scheduler`, and workers on each machine with `dask worker ADDRESS`",
            ) from error
        self._options, self.target, self._builder = options, target, builder
        self.present: set[str] = set()
        self._asked: dict[str, Any] = {}  # new workers, which were asked to describe themselves
        self._refused: set[str] = set()  # workers that get no work
        self.machines: dict[str, _Machine] = {}
        end = (deadline or Deadline()).until(time.monotonic() + DESCRIBE_S)
        while not (self.timers or end.is_over):
            self.join()
            time.sleep(TICK_S)
        if not self.timers:
            logger.warning("no worker of the farm is on a machine like this one, which therefore times kernels itself")

    def close(self) -> None:
        """Disconnect; what workers still do is dropped."""
        with suppress(Exception):  # the scheduler may be gone
            self._client.close()

    @property
    def timers(self) -> int:
        """The number of machines whose times count."""
        return sum(machine.is_timer for machine in self.machines.values())

    def measure(
        self,
        batches: Sequence[Batch],
        setup: Setup,
        deadline: Deadline,
        keep: Callable[[int, Sequence[Measured | None]], None],
        tell: Callable[[str], None],
    ) -> list[int]:
        """Let machines compile and time batches until the deadline.

        Args:
            batches: the batches.
            setup: the processes that time them.
            deadline: when to end; answers that come later are dropped.
            keep: called once for each measured batch with its number and the records of its kernels; None for those
                that this machine must measure itself.
            tell: called with a text for each step that takes a while.

        Returns:
            The numbers of the batches that no machine has measured.
        """
        self.join()
        run = _Run(self, batches, setup, deadline)
        done: list[int] = []
        try:
            while run.goes_on():
                run.give()
                for i, records in run.answers():
                    done.append(i)
                    keep(i, records)
                self.join()
                tell(f"{len(done)} of {len(batches)} batches are timed on {self.timers} machines")
        finally:
            run.drop()
        return [i for i in range(len(batches)) if i not in done]

    def submit(self, worker: str, function: Callable[..., Any], *args: Any) -> Any:
        """Return the future of a call on one worker."""
        return self._client.submit(answer, function, *args, workers=[worker], pure=False)

    def refuse(self, worker: str, why: str) -> None:
        """Give a worker no more work."""
        logger.warning("worker %s gets no more work: %s", worker, why)
        self._refused.add(worker)
        self._leave(worker)

    def store(self, sources: Sequence[str], objects: Sequence[bytes | None]) -> list[tuple[str, bytes]]:
        """Put objects into the cache; return those that there are, with their sources.

        Raises:
            ValueError: one is no object.
        """
        found = [(source, data) for source, data in zip(sources, objects, strict=True) if data is not None]
        for source, data in found:
            if not data.startswith(ELF):
                raise ValueError("what it compiled is no object")
            self._builder.store(source, data)
        return found

    def _leave(self, worker: str) -> None:
        for name, machine in list(self.machines.items()):
            if worker in machine.workers:
                machine.workers.remove(worker)
                if not machine.workers:
                    del self.machines[name]

    def join(self) -> None:
        """Take in new workers that have described their machines, and out those that are lost."""
        try:
            self.present = set(self._client.sync(self._client.scheduler.identity, n_workers=-1)["workers"])
        except Exception as error:  # noqa: BLE001 - Dask raises errors of many kinds when its scheduler is gone
            if self.machines:
                logger.warning("the scheduler is lost (%s); this machine goes on alone", _line(error))
            self.present = set()
        for worker in self._workers() - self.present:
            logger.warning("worker %s is lost", worker)
            self._leave(worker)
        for worker in self.present - self._workers() - self._refused - self._asked.keys():
            options = self._options
            self._asked[worker] = self.submit(worker, describe, options.threads, self.target.isa, options.strict)
        for worker, future in list(self._asked.items()):
            if future.done() or worker not in self.present:
                del self._asked[worker]
                if worker in self.present:
                    self._take(worker, future)

    def _workers(self) -> set[str]:
        return {worker for machine in self.machines.values() for worker in machine.workers}

    def _take(self, worker: str, future: Any) -> None:
        """Take a worker in by the description of its machine, or refuse it."""
        own = plain(self.target)
        try:
            facts = _answered(future)
            for what, mine in (("Korch", __version__), ("the compiler", self.target.compiler)):
                if facts[what] != mine:
                    raise ValueError(f"{what} is {facts[what]}, not {mine}")
            name, target, why = str(facts["machine"]), dict(facts["target"]), str(facts["why"])
            differing = [
                f"its {key} is {target.get(key)!r}, not {own[key]!r}" for key in own if target.get(key) != own[key]
            ]
        except Exception as error:  # noqa: BLE001 - whatever a foreign process answers, or raises
            self.refuse(worker, f"it can't take part ({_line(error)})")
            return
        if differing:
            logger.warning("worker %s on %s only compiles: %s", worker, name, why or "; ".join(differing))
            name += " (only compiles)"  # workers of one machine may have different limits
        self.machines.setdefault(name, _Machine(name, not differing)).workers.append(worker)


class _Run:
    """The batches of one call, and what machines do for them."""

    def __init__(self, farm: Farm, batches: Sequence[Batch], setup: Setup, deadline: Deadline) -> None:
        self.farm, self.batches, self.setup, self.deadline = farm, batches, setup, deadline
        self.waiting = deque(range(len(batches)))
        self.objects: dict[int, list[tuple[str, bytes]]] = {}  # those of batches that only compiling workers have had
        self.tries = [0] * len(batches)
        self.tasks: dict[Any, _Task] = {}

    def goes_on(self) -> bool:
        """Return whether an answer may still come."""
        if self.deadline.is_over:
            return False
        return bool(self.tasks) or any(self._next(machine) is not None for machine in self.farm.machines.values())

    def _next(self, machine: _Machine) -> int | None:
        """Return the batch that a machine should get: one that is compiled, if its times count."""
        if machine.is_timer:
            return next((i for i in self.waiting if i in self.objects), next(iter(self.waiting), None))
        return next((i for i in self.waiting if i not in self.objects), None)

    def give(self) -> None:
        """Give each idle machine a batch."""
        left_s = self.deadline.left_s
        for machine in sorted(self.farm.machines.values(), key=lambda machine: not machine.is_timer):
            i = None if machine.is_busy else self._next(machine)
            if i is None:
                continue
            self.waiting.remove(i)
            batch, worker, isa = self.batches[i], machine.workers[0], self.farm.target.isa
            if machine.is_timer:
                objects = self.objects.get(i, [])
                future = self.farm.submit(worker, time_batch, batch.jobs, objects, isa, self.setup, left_s)
            else:
                future = self.farm.submit(worker, compile_sources, isa, batch.sources, left_s)
            machine.is_busy = True
            self.tasks[future] = _Task(i, machine.name, worker, machine.is_timer, time.monotonic())

    def answers(self) -> list[tuple[int, list[Measured | None]]]:
        """Wait a moment; return the numbers and records of the batches that were timed meanwhile."""
        time.sleep(TICK_S)
        found = []
        for future, task in list(self.tasks.items()):
            is_done, is_late = future.done(), time.monotonic() - task.begun_s > HUNG_S
            if not (is_done or is_late or task.worker not in self.farm.present):
                continue
            del self.tasks[future]
            self._free(task)
            if not is_done:
                _cancel(future)
                self.farm.refuse(task.worker, "it is lost")
                self._again(task)
            elif (records := self._checked(future, task)) is not None:
                found.append((task.batch, records))
        return found

    def _checked(self, future: Any, task: _Task) -> list[Measured | None] | None:
        """Return the records of a batch; None if it waits for another machine."""
        batch = self.batches[task.batch]
        try:
            found = _answered(future)
            if task.is_timing:
                self.farm.store(batch.sources, found["objects"])
                pairs = zip(found["records"], batch.bounds_ns, strict=True)
                return [_measured(text, bound_ns, task.machine) for text, bound_ns in pairs]
            self.objects[task.batch] = self.farm.store(batch.sources, found)
            self.waiting.append(task.batch)
        except Exception as error:  # noqa: BLE001 - whatever a foreign process answers, or raises
            self.farm.refuse(task.worker, f"its answer is no measurement ({_line(error)})")
            self._again(task)
        return None

    def _free(self, task: _Task) -> None:
        if task.machine in self.farm.machines:
            self.farm.machines[task.machine].is_busy = False

    def _again(self, task: _Task) -> None:
        self.tries[task.batch] += 1
        if self.tries[task.batch] < MOST_TRIES:
            self.waiting.appendleft(task.batch)

    def drop(self) -> None:
        """Cancel what runs."""
        for future, task in self.tasks.items():
            _cancel(future)
            self._free(task)


def _cancel(future: Any) -> None:
    with suppress(Exception):  # the scheduler may be gone
        future.cancel()


def _answered(future: Any) -> Any:
    """Return what a worker has answered.

    Raises:
        Exception: it has raised an error, or its answer does not come.
    """
    found = future.result(timeout=CONNECT_S)
    if "error" in found:
        raise ValueError(str(found["error"]))
    return found["answer"]


def _measured(text: Any, bound_ns: int, machine: str) -> Measured | None:
    """Return a machine's record of a kernel; None for one that this machine must measure itself.

    It must if the kernel failed, so that a machine that is out of order excludes no kernel, and if the time is far
    below the bound, which may be too high.

    Raises:
        ValueError: the text is no record.
    """
    if text is None:
        return None
    record = from_text(text)
    if isinstance(record, Failed) or record.time_ns < DOUBTED * bound_ns:
        return None
    return replace(record, machine=machine)


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200] or type(error).__name__
