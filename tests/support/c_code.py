"""C -> LLVM IR and programs, by the package `ziglang`: kernels of tests are compiled as those that are printed."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from korch.system.native_build import FOLDER
from korch.tile.llvm.print import MARK

COMPILER = (sys.executable, "-m", "ziglang", "cc")
FLAGS = ("-std=gnu11", "-fno-sanitize=all", "-fno-stack-protector", "-g0", f"-I{FOLDER}")

MEMBER = """
typedef struct Member { long me, threads; void (*meet)(struct Member *); void *team; unsigned turn; } Member;
int korch_region(int threads, int (*team)(void *const *, Member *), void *const *buffers);
int korch_max_threads(void);
"""
"""What kernels for several threads are given by the runtime."""

SYSTEM = """
#include <sys/syscall.h>
static long ask_system(long number, long a, long b, long c, long d) {
#ifdef __x86_64__
    register long fourth __asm__("r10") = d;
    __asm__ volatile("syscall" : "+a"(number) : "D"(a), "S"(b), "d"(c), "r"(fourth) : "rcx", "r11", "memory");
    return number;
#else
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3) : "memory");
    return x0;
#endif
}
static void sleep_us(long us) {
    long time[2] = {us / 1000000, us % 1000000 * 1000};
    ask_system(SYS_nanosleep, (long)time, 0, 0, 0);
}
static void append_byte(const char *path) {
    const long file = ask_system(SYS_openat, -100, (long)path, 02101, 0600);
    ask_system(SYS_write, file, (long)"x", 1, 0);
    ask_system(SYS_close, file, 0, 0, 0);
}
"""
"""Functions that ask the system themselves: kernels can't call the C library."""


@cache
def llvm_of(text: str) -> str:
    """Return the LLVM IR of a C source."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.c").write_text(text)
        command = [*COMPILER, *FLAGS, "-O1", "-w", "-fPIC", "-S", "-emit-llvm", "kernel.c", "-o", "kernel.ll"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return f"{MARK}generic\n{Path(folder, 'kernel.ll').read_text()}"


def program_of(text: str, folder: Path, *more: str, flags: Sequence[str] = ()) -> Path:
    """Return a program that is compiled from a C source and further arguments."""
    (folder / "main.c").write_text(text)
    command = [*COMPILER, *FLAGS, "-O1", "-Wall", "-Wextra", "-Werror", *flags, "main.c", *more, "-o", "main"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "main"
