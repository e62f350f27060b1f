"""NEON kernels -> an aarch64 program that QEMU runs, for tests on machines with another architecture.

It needs the commands `aarch64-linux-gnu-g++` and `qemu-aarch64` (Debian: g++-aarch64-linux-gnu, qemu-user).
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from korch.errors import CompileError
from korch.measure.compiler import NATIVE_FOLDER, is_llvm
from korch.measure.llvm_process import compile_llvm
from korch.measure.toolchain import FLAGS
from korch.primitive.op import Array
from korch.provider.provider import Kernel
from korch.system.deadline import Deadline

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"

_MAIN = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int main(int, char** words) {
  FILE* file = fopen(words[2], "rb");
  long count = 0, sizes[64];
  void* buffers[64];
  bool is_read = fread(&count, 8, 1, file) == 1;
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
    return tuple(command for command in (COMPILER, EMULATOR) if shutil.which(command) is None)


@dataclass(frozen=True, slots=True)
class Emulated:
    """A folder in which a program with kernels is built and run."""

    folder: Path

    def build(self, kernels: Sequence[Kernel]) -> None:
        """Compile kernels without state into one program.

        Raises:
            CompileError: the compiler rejects them.
        """
        calls = [f'  if (!strcmp(words[1], "{k.symbol}")) code = {k.symbol}_run(nullptr, buffers);' for k in kernels]
        sources = dict.fromkeys(text for kernel in kernels for text in kernel.texts)
        heads = {f'extern "C" int {k.symbol}_run(void*, void* const*);' for k in kernels if is_llvm(k.source)}
        own = [text for text in sources if not is_llvm(text)]
        text = "\n".join((*own, *sorted(heads), _MAIN.replace("@CALLS@", "\n".join(dict.fromkeys(calls)))))
        source = self.folder / "kernels.cpp"
        source.write_text(text)
        objects = [self._object(i, text) for i, text in enumerate(filter(is_llvm, sources))]
        command = [COMPILER, *FLAGS, f"-I{NATIVE_FOLDER}", str(source), *objects]
        command += ["-o", str(self.folder / "kernels")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError(f"{COMPILER} refused the kernels: {done.stderr[:2000]}")

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
        command = [EMULATOR, "-L", "/usr/aarch64-linux-gnu", str(self.folder / "kernels"), kernel.symbol, str(data)]
        code = subprocess.run(command, capture_output=True, check=False).returncode
        if code == 0:
            found, at = np.frombuffer(data.read_bytes(), np.uint8), 0
            for buffer in buffers:
                buffer[:] = found[at : at + buffer.nbytes]
                at += buffer.nbytes
        return code
