"""The process in which one engine runs.

It reads one JSON object per line from standard input and answers each with one line on standard
output; the output of the engine goes to standard error. It ends when its input ends, so it never
outlives the process that started it. While it waits for input, it uses no processor time.

    {"do": "prepare", "engine", "path", "threads", "inputs": npz, "names": [...]}  -> {}
    {"do": "run", "untimed": n, "rest_ms": t, "timed": m}                   -> {"times_ns": [...]}
    {"do": "outputs", "to": npz}                                            -> {}

An error of the engine is answered as {"error": {"kind", "what", "where", "expected", "hint"}}.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from time import perf_counter_ns, sleep
from typing import Any

from korch.errors import KorchError
from korch.report.peers import get_peer
from korch.report.peers.arrays import load_arrays, save_arrays
from korch.report.peers.peer import Run, require


def serve() -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    session = _Session()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = session.answer(request)
        except KorchError as error:
            answer = {"error": _describe(error)}
        except Exception as error:  # noqa: BLE001  the edge: any engine may raise anything
            traceback.print_exc()
            what = f"{type(error).__name__}: {str(error).strip()}"
            answer = {"error": {"kind": "MeasureError", "what": what}}
        print(json.dumps(answer), file=answers, flush=True)


class _Session:
    """The prepared engine; there is none until the first "prepare" request."""

    def __init__(self) -> None:
        self._run: Run | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Execute a request and return the answer."""
        match request["do"]:
            case "prepare":
                self._run = _prepare(request)
                return {}
            case "run":
                untimed, rest_s = request["untimed"], request["rest_ms"] / 1e3
                return {"times_ns": _time(self._prepared(), untimed, rest_s, request["timed"])}
            case "outputs":
                save_arrays(Path(request["to"]), self._prepared()())
                return {}
            case other:
                raise KorchError(f"the worker got an unknown request {other!r}")

    def _prepared(self) -> Run:
        if self._run is None:
            raise KorchError("the worker was asked to run before it was asked to prepare")
        return self._run


def _prepare(request: dict[str, Any]) -> Run:
    peer = get_peer(request["engine"])
    require(peer)
    inputs = dict(zip(request["names"], load_arrays(Path(request["inputs"])), strict=True))
    return peer.prepare(Path(request["path"]), inputs, request["threads"])


def _time(run: Run, untimed: int, rest_s: float, timed: int) -> list[int]:
    for _ in range(untimed):
        run()
    if rest_s:
        sleep(rest_s)
    times_ns = []
    for _ in range(timed):
        start_ns = perf_counter_ns()
        run()
        times_ns.append(perf_counter_ns() - start_ns)
    return times_ns


def _describe(error: KorchError) -> dict[str, str]:
    return {
        "kind": type(error).__name__,
        "what": error.what,
        "where": error.where,
        "expected": error.expected,
        "hint": error.hint,
    }


if __name__ == "__main__":
    serve()
