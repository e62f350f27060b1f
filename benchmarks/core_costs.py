"""Measures what synchronization costs on this machine: joins, waits, and reads from the caches of other cores.

    python -m benchmarks.core_costs [--threads 2,4,8]

A join is the barrier that the threads of a plan call after a kernel (`native/korch_threads.c`). `core_costs.c` is
compiled with the runtime's sources. The cost of a byte from another core's cache is measured on a buffer of 256 KB that
another thread has just written: the time of the first read minus the time of a second read.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
from functools import cache
from pathlib import Path
from statistics import median

from korch.events.simulate import CoreCosts
from korch.system.native_build import compile_library

REPEATED = 9


@cache
def library() -> ctypes.CDLL:
    """Return the runtime with the functions of `core_costs.c`.

    Raises:
        OSError: it can't be compiled.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "core_costs.so"
        compile_library(path, "", Path(__file__).with_suffix(".c"))
        return ctypes.CDLL(str(path))


def measure_costs(threads: int) -> CoreCosts:
    """Return the costs for a number of threads, at least two: medians of `REPEATED` measurements."""
    found = {}
    for name in ("join_ns", "wait_ns", "fetch_ns_per_byte"):
        function = getattr(library(), f"korch_{name}")
        function.restype = ctypes.c_double
        found[name] = median(function(threads) for _ in range(REPEATED))
    return CoreCosts(**found)


def main() -> None:
    """Measure, and print a line for each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", default="2")
    for threads in map(int, parser.parse_args().threads.split(",")):
        print(threads, "threads:", measure_costs(threads), flush=True)


if __name__ == "__main__":
    main()
