"""Runs the items of a judge, each in a process that may crash or hang, and adds a line of JSON for each.

    python -m benchmarks.judges JUDGE [--results FILE] [--seconds S] [--jobs N] [--only NAME ...] [--table | --time]

An item that has a line in the results is not run again. --time adds times to the lines of right items. The exit code
is 1 if a result is wrong or something crashed.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.judges import Judge, table
from tests.support.workers import HUNG, answer_lines, run_in_workers

ROOT = Path(__file__).parents[2]

JUDGES = ("opinfo", "pipelines", "generate", "models")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the items that have no line yet, in a random order; return 1 if one of them is wrong or crashes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judges")
    parser.add_argument("judge", choices=JUDGES)
    parser.add_argument("--results", type=Path, help="default: build/JUDGE.jsonl")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no item after this time")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="parts of the names of items")
    parser.add_argument("--table", action="store_true", help="print the results that there are")
    parser.add_argument("--time", action="store_true", help="time the right items that have no times yet")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    judge: Judge = import_module(f"benchmarks.judges.{args.judge}").JUDGE
    if args.work:
        answer_lines(judge.time if args.time and judge.time else judge.run)
        return 0
    path = args.results or Path("build") / f"{args.judge}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(row) for row in path.open()] if path.exists() else []
    done, until_s = {row["item"] for row in rows}, time.monotonic() + args.seconds
    items = [] if args.table else [item for item in judge.items() if item not in done]
    items = [item for item in items if not args.only or any(part in item for part in args.only)]
    random.Random(0).shuffle(items)
    command = [sys.executable, "-m", "benchmarks.judges", args.judge, "--work"]
    if args.time:
        return _time(path, rows, [*command, "--time"], args, judge.limit_s, until_s)
    with path.open("a") as out:
        for item, answer, failure in run_in_workers(items, command, args.jobs, judge.limit_s, judge.life):
            kind = "timeout" if failure == HUNG and "timeout" in judge.verdicts else "crash"
            rows.append(answer or {"item": item, "counts": {"": {kind: 1}}, "texts": [f"{kind}: {failure}"]})
            # Messages of PyTorch name files; paths of one machine say nothing elsewhere.
            out.write(json.dumps(rows[-1]).replace(f"{ROOT}/", "") + "\n")
            out.flush()
            print(item, *rows[-1]["texts"], sep="\n  ", flush=True)
            if time.monotonic() > until_s:
                break
    print(table(rows, list(judge.verdicts)))
    return int(any({"wrong", "crash"} & set(counts) for row in rows for counts in row["counts"].values()))


def _time(
    path: Path,
    rows: list[dict[str, Any]],
    command: Sequence[str],
    args: argparse.Namespace,
    limit_s: float,
    until_s: float,
) -> int:
    """Add times to the lines of right items; one item is timed at once."""
    waiting = {row["item"]: row for row in rows if "times_ms" not in row and _is_right(row)}
    items = [item for item in waiting if not args.only or any(part in item for part in args.only)]
    for item, answer, failure in run_in_workers(items, command, 1, limit_s, 1):
        if answer:
            waiting[item]["times_ms"] = answer
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(item, answer or failure, flush=True)
        if time.monotonic() > until_s:
            break
    return 0


def _is_right(row: dict[str, Any]) -> bool:
    return all("right" in counts for counts in row["counts"].values())


if __name__ == "__main__":
    sys.exit(main())
