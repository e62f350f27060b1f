"""Kernels for NEON -> an aarch64 program that QEMU runs, for tests on machines with another architecture.

It needs the command `qemu-aarch64` (Debian: qemu-user) and the package `ziglang`.
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from korch.errors import CompileError
from korch.measure.llvm_process import compile_llvm
from korch.primitive.op import Array
from korch.provider.provider import Kernel
from korch.system.deadline import Deadline
from korch.system.native_build import FOLDER

COMPILER = (sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl")
EMULATOR = "qemu-aarch64"

EMULATED = ("neon", "neon_dot", "neon_bf16")
"""Instruction sets that it has."""

_MAIN = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int main(int count_of_words, char** words) {
  FILE* file = fopen(words[2], "rb");
  long count = 0, sizes[64];
  void* buffers[64];
  int is_read = fread(&count, 8, 1, file) == 1;
  for (long i = 0; i < count && is_read; ++i) {
    is_read = fread(&sizes[i], 8, 1, file) == 1;
    buffers[i] = aligned_alloc(64, (sizes[i] + 127) / 64 * 64);
    is_read = is_read && fread(buffers[i], 1, sizes[i], file) == (size_t)sizes[i];
  }
  fclose(file);
  int code = -1;
  if (!is_read) return code;
@CALLS@
  file = fopen(words[2], "wb");
  for (long i = 0; i < count; ++i) fwrite(buffers[i], 1, sizes[i], file);
  fclose(file);
  return code;
}
"""


def missing_commands() -> tuple[str, ...]:
    """Return the commands that are not installed."""
    return tuple(command for command in (EMULATOR,) if shutil.which(command) is None)


@dataclass(frozen=True, slots=True)
class Emulated:
    """A folder in which a program with kernels is built and run."""

    folder: Path

    def build(self, kernels: Sequence[Kernel]) -> None:
        """Compile kernels without state into one program, together with the runtime.

        Raises:
            CompileError: the compiler rejects them.
        """
        symbols = list(dict.fromkeys(kernel.symbol for kernel in kernels))
        calls = [f'  if (!strcmp(words[1], "{symbol}")) code = {symbol}_run(0, buffers);' for symbol in symbols]
        heads = [f"int {symbol}_run(void*, void* const*);" for symbol in symbols]
        source = self.folder / "kernels.c"
        source.write_text("\n".join((*heads, _MAIN.replace("@CALLS@", "\n".join(calls)))))
        sources = dict.fromkeys(text for kernel in kernels for text in kernel.texts)
        objects = [self._object(i, text) for i, text in enumerate(sources)]
        parts = [str(path) for path in sorted(FOLDER.glob("*.c"))]
        command = [*COMPILER, "-std=gnu11", "-O1", "-static", str(source), *parts, *objects, "-lm"]
        command += ["-o", str(self.folder / "kernels")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError(f"the compiler refused the kernels: {done.stderr[:2000]}")

    def _object(self, number: int, text: str) -> str:
        """Compile a module of LLVM IR; return the name of the object."""
        source = self.folder / f"kernel{number}.ll"
        source.write_text(text)
        target = source.with_suffix(".o")
        compile_llvm(source, target, Deadline())
        return str(target)

    def run(self, kernel: Kernel, buffers: Sequence[Array]) -> int:
        """Run a kernel on arrays of bytes, which are updated in place; return the exit status."""
        data = self.folder / "buffers"
        parts = [len(buffers).to_bytes(8, "little")]
        for buffer in buffers:
            parts += [buffer.nbytes.to_bytes(8, "little"), buffer.tobytes()]
        data.write_bytes(b"".join(parts))
        command = [EMULATOR, str(self.folder / "kernels"), kernel.symbol, str(data)]
        code = subprocess.run(command, capture_output=True, check=False).returncode
        if code == 0:
            found, at = np.frombuffer(data.read_bytes(), np.uint8), 0
            for buffer in buffers:
                buffer[:] = found[at : at + buffer.nbytes]
                at += buffer.nbytes
        return code
