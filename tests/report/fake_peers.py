"""Peers with scripted behaviour, which workers import as "fake_peers:NAME"."""

import os
import signal
import subprocess
import threading

import numpy as np

from korch.errors import UnsupportedError


class FakePeer:
    def __init__(self, name, run, prepare=None, reason=None):
        self.name = name
        self._run, self._prepare, self._reason = run, prepare, reason

    def is_available(self):
        return self._reason

    def prepare(self, model_path, inputs, threads):
        if self._prepare is not None:
            self._prepare(model_path, inputs, threads)
        arrays = list(inputs.values())
        return lambda: self._run(*arrays)


def _double(x):
    return [2 * x]


def _segfault(x):
    print("about to die")
    os.kill(os.getpid(), signal.SIGSEGV)


def _exit(x):
    os._exit(3)


def _hang(x):
    threading.Event().wait()


def _raise(x):
    raise ValueError("scripted trouble")


def _refuse(model_path, inputs, threads):
    raise UnsupportedError("no such operator: Fizz", where="node 7", hint="Use another peer")


def _spin(model_path, inputs, threads):
    def burn():
        while True:
            pass

    threading.Thread(target=burn, daemon=True).start()


def _print(x):
    print("engines print to stdout")
    return [2 * x]


def _seen(model_path, inputs, threads):
    SEEN.extend([str(model_path), list(inputs), threads, os.environ["OMP_NUM_THREADS"]])


def _tired(x):
    """Fail in the second round: after two runs at first, one for the outputs, two a turn."""
    CALLS.append(x)
    if len(CALLS) > 6:
        raise RuntimeError("enough")
    threading.Event().wait(0.02)  # so long that a turn is one run
    return [2 * x]


def _compiler(model_path, inputs, threads):
    child = subprocess.Popen(["sleep", "600"])
    model_path.write_text(str(child.pid))
    child.wait()


CALLS = []
SEEN = []
DOUBLE = FakePeer("double", _double)
WRONG = FakePeer("wrong", lambda x: [2 * x + 0.5])
OTHER_SHAPE = FakePeer("other-shape", lambda x: [2 * x[:1]])
SEGFAULT = FakePeer("segfault", _segfault)
EXIT = FakePeer("exit", _exit)
HANG = FakePeer("hang", _hang)
RAISE = FakePeer("raise", _raise)
REFUSE = FakePeer("refuse", _double, prepare=_refuse)
SPIN = FakePeer("spin", _double, prepare=_spin)
TIRED = FakePeer("tired", _tired)
COMPILING = FakePeer("compiling", _double, prepare=_compiler)
PRINT = FakePeer("print", _print)
ABSENT = FakePeer("absent", _double, reason="the Python package fizz is not installed; run: pip install fizz")
ARGUMENTS = FakePeer(
    "arguments", lambda x: [np.array([int(SEEN[2]), int(SEEN[3]), len(SEEN[1]), len(SEEN[0])])], prepare=_seen
)
