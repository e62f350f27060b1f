"""An executable -> the times of its runs in a process of their own, as its users will run it.

The process of a search has other threads, a used memory and warm caches. The process here only loads the
artifact, which takes a fraction of a second, and runs it.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from korch.measure.absence import Absence
from korch.measure.record import summarize
from korch.primitive.op import Array
from korch.runtime.executable import Executable
from korch.runtime.report import RunTimes
from korch.system.child import child_command
from korch.system.scratch import scratch_folder

FRESH_S = 1.0
"""The time to start a process and to run a short plan often enough; longer plans run `LEAST_RUNS` times."""

TIMED_S = 0.3
LEAST_RUNS, MOST_RUNS = 5, 200

_PATIENCE = 20.0
"""The process is killed after this many times the time that it was thought to need."""


def time_fresh(executable: Executable, arrays: Sequence[Array], run_ns: float, left_s: float | None) -> RunTimes | None:
    """Return the times of runs in another process; None if there is no time for them or the process fails.

    `left_s`: the seconds that are left; None if there is no limit.
    """
    needed_s = FRESH_S + 2 * LEAST_RUNS * run_ns / 1e9
    if left_s is not None and left_s < needed_s:
        return None
    with scratch_folder() as folder:
        executable.save(folder / "plan.korch")
        for i, array in enumerate(arrays):
            (folder / str(i)).write_bytes(np.ascontiguousarray(array).tobytes())
        try:
            done = subprocess.run(
                child_command("korch.validation.fresh"),
                input=str(folder),
                capture_output=True,
                text=True,
                timeout=_PATIENCE * needed_s if left_s is None else left_s,
                check=True,
            )
            found = json.loads(done.stdout)
        except (subprocess.SubprocessError, OSError, ValueError):
            return None
    measured = summarize(found["run_ns"], found["away_ns"])
    low_ms, median_ms, high_ms = (float(ns) / 1e6 for ns in np.percentile(measured.samples_ns, [10, 50, 90]))
    return RunTimes(median_ms, low_ms, high_ms, measured.is_disturbed)


def serve() -> None:
    """Run the artifact of the folder whose name is read from stdin; write the times as JSON to stdout."""
    folder = Path(sys.stdin.read())
    executable = Executable.load(folder / "plan.korch")
    arrays = [
        np.frombuffer((folder / str(i)).read_bytes(), info.dtype).reshape(info.shape)
        for i, info in enumerate(executable.get_inputs())
    ]
    run = executable.stopwatch(arrays) if executable.plan.extended else executable.bind(*arrays)
    run_ns: list[int] = []
    away_ns: list[int] = []
    run()
    run()
    begun = time.monotonic()
    while len(run_ns) < LEAST_RUNS or (len(run_ns) < MOST_RUNS and time.monotonic() - begun < TIMED_S):
        absence, start = Absence(), time.perf_counter_ns()
        run()
        run_ns.append(time.perf_counter_ns() - start)
        away_ns.append(absence.away_ns())
    print(json.dumps({"run_ns": run_ns, "away_ns": away_ns}))
