"""The compiler process: compiles launches to cubins, one at a time. If it crashes, the parent process survives.

It reads pickles from stdin: first the folder for Triton's files, then pairs of a launch and an architecture.
It answers each pair with a cubin or a failure. It ends when its input ends, thus also when its parent is
killed, and then deletes the folder.
"""

import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from korch.cuda.compile import Cubin, CubinFailure
from korch.cuda.kernel import POINTER_ALIGNMENT, SIGNATURE, Launch
from korch.cuda.module import load_functions


def serve() -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps the compiler's output out of the answers
    folder: str = pickle.load(sys.stdin.buffer)
    tempfile.tempdir = folder
    os.environ.pop("TRITON_INTERPRET", None)  # the parent may have set it to interpret kernels
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # it would name the file, which is temporary
    if os.environ.setdefault("TRITON_CACHE_DIR", folder) == folder:
        # In a new folder, no version of the compiler needs to be told from others by a hash of all its files.
        import triton.runtime.cache

        triton.runtime.cache.triton_key = str
    try:
        while True:
            launch, arch = pickle.load(sys.stdin.buffer)
            pickle.dump(_compile(launch, arch), answers)
            answers.flush()
    except (EOFError, BrokenPipeError):
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)  # skips flushing buffers: the reader may be gone


def _compile(launch: Launch, arch: int) -> Cubin | CubinFailure:
    """Compile one launch; an exception of the compiler becomes a failure with its message."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    try:
        function = getattr(load_functions([launch]), launch.symbol)
        types = [SIGNATURE[dtype] for dtype in launch.signature]
        signature = dict(zip(function.arg_names, types, strict=True))
        attrs = {(i,): [["tt.divisibility", POINTER_ALIGNMENT]] for i in range(len(types))}
        source = ASTSource(fn=function, signature=signature, constexprs={}, attrs=attrs)
        # Overflow checks take effect in debug modes only, but the code for them would always be generated.
        compiled = triton.compile(
            source, target=GPUTarget("cuda", arch, 32), options={"num_warps": launch.warps, "sanitize_overflow": False}
        )
    except Exception as error:  # noqa: BLE001 - the compiler raises what it likes
        text = str(error).strip() or type(error).__name__
        return CubinFailure(launch.symbol, text.splitlines()[-1][:300])
    metadata: Any = compiled.metadata
    if getattr(metadata, "profile_scratch_size", 0) or metadata.global_scratch_size:
        return CubinFailure(launch.symbol, "the compiler asks for memory that launches don't pass")
    if metadata.num_warps != launch.warps or metadata.num_ctas != 1:
        return CubinFailure(launch.symbol, "the compiler asks for another number of warps")
    image: bytes = compiled.asm["cubin"]
    registers, spills = _resources(image)
    return Cubin(launch.symbol, image, metadata.shared, registers, spills)


def _resources(image: bytes) -> tuple[int, int]:
    """Return the registers and the stack bytes of a thread, as the disassembler reports them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=False)
    match = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout + done.stderr)
    if match is None:
        raise ValueError(f"cuobjdump printed no resources: {done.stdout[:200]}")
    return int(match[1]), int(match[2])
