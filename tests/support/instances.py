"""Random instances of the binary linear program that chooses kernels, with up to a thousand primitives.

A random model consists of a few parallel chains with skip edges. Its candidates are connected convex
sets of primitives with at most one linear primitive, once per layout. Their costs are computed like
bounds: bytes over bandwidth, or operations over peak, plus the launch. Linear primitives are much
faster in blocked layouts, so a good plan must weigh this gain against the cost of layout changes. Each
attribute of `Severity` makes an instance harder in its own way. Equal arguments give equal instances.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from korch.binary_program.problem import Computation, Port, PricedKernel, Problem

LAUNCH_NS = 2_000
LAYOUTS = ("abcd", "acdb", "aBcd16b")
LINEAR_SHARE = 0.25
# A linear primitive's time in each layout, divided by its time in the first layout.
LINEAR_SPEED = {"abcd": 1.0, "acdb": 0.7, "aBcd16b": 0.45}


@dataclass(frozen=True, slots=True)
class Severity:
    """How hard an instance is."""

    primitives: int  # how many primitives the model has before alternatives are added
    width: int = 2  # how many chains run side by side
    skips: float = 0.15  # the share of primitives that also read an earlier value
    alternatives: float = 0.0  # the share of values that a path of other primitives computes too
    cycles: float = 0.0  # the share of values from which another value is computed and back, which closes a cycle
    layouts: int = 1  # the number of layouts, 1 to 3
    max_primitives: int = 12  # the most primitives of a candidate
    max_outputs: int = 3  # the most values that a candidate writes
    sets_per_primitive: float = 1.5  # the most sets of each size, divided by the number of primitives


def make_instance(severity: Severity, seed: int = 0) -> Problem:
    """Return the instance of a severity and a seed."""
    return _Maker(severity, seed).make()


class _Maker:
    """The tables from which one random instance is made."""

    def __init__(self, severity: Severity, seed: int) -> None:
        self.severity = severity
        self.random = random.Random(seed)
        self.layouts = LAYOUTS[: severity.layouts]
        self.steps: list[Computation] = []
        self.is_undo: list[bool] = []
        self.work_ns: list[int] = []
        self.size_ns: list[int] = [self._size_ns()]

    def make(self) -> Problem:
        ends = self._main_graph()
        self._alternatives()
        self._cycles()
        self._index(ends)
        kernels = [kernel for group in self._sets() for kernel in self._kernels(group)]
        kernels += self._layout_changes()
        return Problem(
            steps=tuple(self.steps),
            kernels=tuple(kernels),
            required=tuple(Port(v, LAYOUTS[0]) for v in ends),
            given=frozenset({Port(0, LAYOUTS[0])}),
        )

    def _size_ns(self) -> int:
        """Return a random time, in nanoseconds, for one pass over a value."""
        return self.random.choice((1_000, 2_000, 4_000, 8_000, 16_000))

    def _add(
        self, inputs: tuple[int, ...], output: int | None = None, work_ns: int | None = None, undo: bool = False
    ) -> int:
        if output is None:
            output = len(self.size_ns)
            near = self.size_ns[inputs[0]]
            self.size_ns.append(near if self.random.random() < 0.7 else self._size_ns())
        if work_ns is None:
            scale = self.random.choice((2, 4, 8, 16))
            linear = self.random.random() < LINEAR_SHARE
            work_ns = scale * self.size_ns[output] if linear else 0
        self.steps.append(Computation(output, inputs))
        self.is_undo.append(undo)
        self.work_ns.append(work_ns)
        return output

    def _main_graph(self) -> list[int]:
        chains = [[0] for _ in range(self.severity.width)]
        for i in range(self.severity.primitives):
            chain = chains[i % len(chains)]
            inputs = [chain[-1]]
            if self.random.random() < self.severity.skips:
                other = self.random.choice(chains)
                inputs.append(self.random.choice(other[-6:]))
            chain.append(self._add(tuple(dict.fromkeys(inputs))))
        return sorted({chain[-1] for chain in chains})

    def _alternatives(self) -> None:
        """Add alternative paths of one to three primitives; their linear work is 0.4 to 1.4 times the original work."""
        for p, step in enumerate(tuple(self.steps)):
            if self.random.random() < self.severity.alternatives:
                inputs = step.inputs
                for _ in range(self.random.randint(0, 2)):
                    inputs = (self._add(inputs, work_ns=0),)
                work_ns = int(self.random.uniform(0.4, 1.4) * self.work_ns[p])
                self._add(inputs, step.output, work_ns)

    def _cycles(self) -> None:
        for p, step in enumerate(tuple(self.steps)):
            if self.random.random() < self.severity.cycles:
                other = self._add((step.output,), work_ns=0)
                self._add(step.inputs, other, self.work_ns[p])
                self._add((other,), step.output, 0, undo=True)

    def _index(self, ends: list[int]) -> None:
        """Fill the tables that the enumeration reads."""
        n = len(self.steps)
        self.readers: dict[int, list[int]] = {v: [] for v in range(len(self.size_ns))}
        self.writers: dict[int, list[int]] = {v: [] for v in range(len(self.size_ns))}
        for p, step in enumerate(self.steps):
            self.writers[step.output].append(p)
            for v in step.inputs:
                self.readers[v].append(p)
        self.ends = frozenset(ends)
        self.near = [
            sorted({q for v in self.steps[p].inputs for q in self.writers[v]} | set(self.readers[self.steps[p].output]))
            for p in range(n)
        ]
        after = [0] * n
        changed = True
        while changed:
            changed = False
            for p in reversed(range(n)):
                mask = 1 << p
                for q in self.readers[self.steps[p].output]:
                    if not self.is_undo[q]:
                        mask |= after[q] | 1 << q
                changed |= mask != after[p]
                after[p] = mask
        self.after = after

    def _sets(self) -> Iterator[tuple[int, ...]]:
        level: set[tuple[int, ...]] = {(p,) for p in range(len(self.steps))}
        most = int(self.severity.sets_per_primitive * len(self.steps))
        for size in range(self.severity.max_primitives):
            yield from sorted(level)
            grown = {
                tuple(sorted((*group, q)))
                for group in level
                for q in {q for p in group for q in self.near[p]}
                if q not in group
            }
            legal = [group for group in sorted(grown) if self._is_legal(group)]
            if len(legal) > most:
                legal = self.random.sample(legal, most)
            level = set(legal)
            if not level or size + 2 > self.severity.max_primitives:
                return

    def _is_legal(self, group: tuple[int, ...]) -> bool:
        outputs = {self.steps[p].output for p in group}
        if len(outputs) < len(group) or sum(self.work_ns[p] > 0 for p in group) > 1:
            return False
        if sum(self.is_undo[p] for p in group) > 0 and len(group) > 2:
            return False
        mask = sum(1 << p for p in group)
        outside = 0
        for p in group:
            outside |= self.after[p] & ~mask
        for q in range(group[-1]):
            if outside >> q & 1 and self.after[q] & mask and not self.is_undo[q]:
                return False
        return not self._has_inner_cycle(group)

    def _has_inner_cycle(self, group: tuple[int, ...]) -> bool:
        waiting = set(group)
        while waiting:
            blocked = {self.steps[p].output for p in waiting}
            ready = {p for p in waiting if not blocked & set(self.steps[p].inputs)}
            if not ready:
                return True
            waiting -= ready
        return False

    def _kernels(self, group: tuple[int, ...]) -> Iterator[PricedKernel]:
        made = {self.steps[p].output for p in group}
        read = sorted({v for p in group for v in self.steps[p].inputs} - made)
        used = sorted(v for v in made if v in self.ends or any(q not in group for q in self.readers[v]))
        if not 1 <= len(used) <= self.severity.max_outputs:
            return
        choices = [tuple(used)] + ([(used[-1],)] if len(used) > 1 else [])
        for outputs in choices:
            for reads in self.layouts:
                for writes in self.layouts:
                    if reads == writes or (len(group) == 1 and any(self.work_ns[p] for p in group)):
                        yield self._kernel(group, read, outputs, reads, writes)

    def _kernel(
        self, group: tuple[int, ...], read: list[int], outputs: tuple[int, ...], reads: str, writes: str
    ) -> PricedKernel:
        bytes_ns = sum(self.size_ns[v] for v in (*read, *outputs))
        speed = LINEAR_SPEED[writes] if reads == writes else 1.1 * LINEAR_SPEED[writes]
        work_ns = int(speed * sum(self.work_ns[p] for p in group))
        noise = self.random.randint(0, 200)
        return PricedKernel(
            steps=frozenset(group),
            inputs=tuple(Port(v, reads) for v in read),
            outputs=tuple(Port(v, writes) for v in outputs),
            cost_ns=LAUNCH_NS + max(bytes_ns, work_ns) + bytes_ns // 8 + noise,
        )

    def _layout_changes(self) -> Iterator[PricedKernel]:
        for v, size_ns in enumerate(self.size_ns):
            for a in self.layouts:
                for b in self.layouts:
                    if a != b:
                        cost_ns = LAUNCH_NS + 2 * size_ns
                        yield PricedKernel(frozenset(), (Port(v, a),), (Port(v, b),), cost_ns)
