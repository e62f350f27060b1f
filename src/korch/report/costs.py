"""The times of a plan's kernels as functions of the sizes -> a text plot."""

from collections.abc import Iterator, Sequence

from korch.runtime.report import KernelCost, SizeRecord

WIDTH = 50
"""The length of the longest bar, in characters."""

MOST_KERNELS = 8
"""The most kernels whose functions are printed: those that take longest."""


def cost_lines(shapes: str, rows: Sequence[KernelCost]) -> Iterator[str]:
    """Yield the lines of a plot of a plan's times over the sizes, with the functions of its kernels."""
    samples = [sample.sizes for sample in rows[0].cost.samples] if rows else []
    if not samples:
        return
    yield f"time by size, inputs of {shapes}: sum of the kernels, timed (#) and as fitted (|)"
    timed = [sum(row.cost.samples[i].time_ns for row in rows) for i in range(len(samples))]
    fitted = [sum(row.cost.at(sizes) for row in rows) for sizes in samples]
    most = max(*timed, *fitted)
    for sizes, time_ns, fit_ns in sorted(zip(samples, timed, fitted, strict=True)):
        bar = "#" * round(WIDTH * time_ns / most)
        at = round(WIDTH * fit_ns / most)
        bar = f"{bar:<{at}}"[:at] + "|" + f"{bar:<{at}}"[at:]
        yield f"    {'x'.join(map(str, sizes)):>9} {time_ns / 1e3:>10.1f} us {fit_ns / 1e3:>10.1f} us  {bar.rstrip()}"
    yield "    kernels in nanoseconds, with the median error at sizes that were left out of the fit:"
    largest = max(samples)
    for row in sorted(rows, key=lambda row: -row.cost.at(largest))[:MOST_KERNELS]:
        yield f"    {row.kernel:>4} {row.provider:<10} {row.cost.error:>7.1%}  {row.cost}"
    if len(rows) > MOST_KERNELS:
        yield f"    and {len(rows) - MOST_KERNELS} more"


def size_lines(rows: Sequence[SizeRecord]) -> Iterator[str]:
    """Yield the lines of a table of the bound and the gap at each size at which kernels were measured."""
    if rows:
        width = max(len(row.sizes) for row in rows)
        yield "by size: the kernels of the plan that runs, the best plan of those measured, no plan below, the gap"
        for row in rows:
            times = "".join(f"{1e3 * ms:>10.1f} us" for ms in (row.sum_ms, row.best_ms, row.lower_bound_ms))
            yield f"    {row.sizes:<{width}}{times}{100 * row.gap:>7.1f} %  ({row.plan})"
