"""The C sources of the runtime -> its shared library, by the package `ziglang` or the system's C compiler.

`setup.py` calls this when a wheel is built or a checkout is installed; it imports nothing but the standard library. The
name of the library has a hash of its sources, so a library of other sources is never used.
"""

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "native"

GLIBC = "2.28"
"""The oldest version of the GNU C library for which wheels are built."""

FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-ffp-contract=fast", "-fvisibility=hidden", "-shared", "-fPIC")
LINK_FLAGS = ("-ldl", "-lpthread", "-lm", "-Wl,-z,nodelete", "-Wl,-soname,libkorch_runtime.so")
"""Threads of the library wait in its code, so it is never unloaded."""


MACHINE = platform.machine()


def library_path(machine: str = MACHINE) -> Path:
    """Return where the library for a machine (x86_64 or aarch64) is, or is to be."""
    digest = hashlib.sha256("\n".join((*FLAGS, *LINK_FLAGS)).encode())
    for path in sorted((*FOLDER.glob("*.c"), *FOLDER.glob("*.h"))):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return FOLDER / f"libkorch_runtime-{machine}-{digest.hexdigest()[:12]}.so"


def find_compiler(machine: str = MACHINE) -> list[str]:
    """Return the command that compiles C for a machine; an empty list if there is none."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.{GLIBC}"]
    found = shutil.which("cc") if machine == MACHINE else None
    return [found] if found else []


def build_library(machine: str = MACHINE) -> Path:
    """Compile the library for a machine, unless it exists, and remove those of other sources.

    Raises:
        OSError: there is no compiler, it fails, or the folder can't be written.
    """
    target, command = library_path(machine), find_compiler(machine)
    if target.exists():
        return target
    if not command:
        raise OSError("there is no C compiler: install the package ziglang, or name one in $CC")
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix=".build-") as folder:
        made = Path(folder) / target.name
        command += [*FLAGS, *map(str, sorted(FOLDER.glob("*.c"))), *LINK_FLAGS, "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{' '.join(command)} failed:\n{done.stderr}")
        made.replace(target)
    for old in FOLDER.glob(f"libkorch_runtime-{machine}-*.so"):
        if old != target:
            old.unlink(missing_ok=True)
    return target
