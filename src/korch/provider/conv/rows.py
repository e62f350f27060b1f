"""Lines of an image that fit into a cache, and images -> the lines of a task, so that all threads have equal work."""

from __future__ import annotations

import math

from korch.alignment import ceil_div, round_up


def lines_of_task(lines: int, fitting: int, tasks: int, threads: int) -> int:
    """Return the lines that a task computes.

    Args:
        lines: of an image, which may be cut into tasks.
        fitting: the lines whose data fit into the cache at most.
        tasks: those that there are if no image is cut.
        threads: that share the tasks.
    """
    parts = threads // math.gcd(tasks, threads)
    return ceil_div(lines, min(lines, round_up(ceil_div(lines, max(1, fitting)), parts)))
