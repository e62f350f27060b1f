"""Chooses how many lines of an image a task computes, so that they fit into a cache and all threads have equal work."""

import math

from korch.schedule.blocks import evenly
from korch.system.alignment import ceil_div, round_up

LEAST_LINES = 4
"""The least lines of a task if a size may need a part of the lines only; adjacent tasks compute some lines twice."""


def lines_of_task(lines: int, fitting: int, tasks: int, threads: int) -> int:
    """Return the lines that a task computes.

    `lines`: the lines of an image, which may be cut into several tasks. `tasks`: the number of tasks if no image is
    cut.
    """
    fitting = min(fitting, evenly(lines, lines, tasks, threads, LEAST_LINES))
    parts = threads // math.gcd(tasks, threads)
    return ceil_div(lines, min(lines, round_up(ceil_div(lines, max(1, fitting)), parts)))
