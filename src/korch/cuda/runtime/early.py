"""A program -> the same program, of which each kernel may begin before the kernel before it has ended.

This is programmatic dependent launch, on sm_90 and newer. At its begin, each program (in Triton's sense) of a kernel
lets the next kernel begin, brings weights into the level-2 cache, and waits until the kernel before has ended. Only
then does it read other memory or write any. As every program waits, a kernel ends after all kernels before it on its
stream, so memory of the arena may be reused as before.

Only the launches of `early_launches` begin early. In front of others, the device waits as usual.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from korch.cuda.compile import CubinCompiler, CubinFailure
from korch.cuda.kernel import Launch
from korch.cuda.runtime.record import BufferRecord, CudaProgram, LaunchRecord
from korch.cuda.runtime.schedule import early_launches, in_order
from korch.system.content_name import content_name
from korch.tile.triton.text import power_of_two

logger = logging.getLogger("korch.cuda")

EARLIEST_ARCH = 90

PREFETCH_BYTES = 4 << 20
"""The most weights that a kernel brings into the level-2 cache early: what the memory delivers in about 1 us."""

LINE_BYTES = 128
THREAD_LINES = 16
"""The most lines that a thread asks for."""

HEAD = "    pid = tl.program_id(0)\n"
BEGIN, PREFETCH, WAIT = "    f.begin_next()\n", "    f.prefetch(", "    f.wait_for_earlier()\n"


def early_program(program: CudaProgram, compiler: CubinCompiler) -> CudaProgram | None:
    """Return the program with kernels that begin early; None if none of them may, or one does not compile."""
    if program.arch < EARLIEST_ARCH or not any(map(any, early_launches(program.steps, in_order(program.steps)))):
        return None
    made: dict[str, Launch] = {}
    symbols: list[list[str]] = []
    for step in program.steps:
        launches = [begun_early(launch.launch(program.sources), step.buffers) for launch in step.launches]
        made |= {launch.symbol: launch for launch in launches}
        symbols.append([launch.symbol for launch in launches])
    cubins = compiler.compile(list(made.values()))
    images: dict[str, bytes] = {}
    shared: dict[str, int] = {}
    for symbol, cubin in cubins.items():
        if isinstance(cubin, CubinFailure):
            logger.warning("no kernel begins early: %s", cubin.message)
            return None
        images[symbol], shared[symbol] = cubin.image, cubin.shared_bytes

    def renamed(launch: LaunchRecord, symbol: str) -> LaunchRecord:
        return replace(launch, symbol=symbol, shared_bytes=shared[symbol])

    steps = tuple(
        replace(step, launches=tuple(map(renamed, step.launches, own)))
        for step, own in zip(program.steps, symbols, strict=True)
    )
    kept = {name: text for name, text in program.sources.items() if name not in program.launches}
    sources = kept | {launch.symbol: launch.source for launch in made.values()}
    return replace(program, steps=steps, cubins=dict(sorted(images.items())), sources=sources, is_early=True)


def without_early(source: str) -> str:
    """Return a kernel's source without the lines that let it begin early, for older devices."""
    return "".join(line for line in source.splitlines(True) if not line.startswith((BEGIN, PREFETCH, WAIT)))


def begun_early(launch: Launch, buffers: Sequence[BufferRecord]) -> Launch:
    """Return a launch that lets the next one begin, prefetches constants, and waits; it has another name."""
    source = launch.source.replace(launch.symbol, "NAME")
    if source.count(HEAD) != 1:
        raise AssertionError("a kernel does not begin with its number")
    source = source.replace(HEAD, "".join((HEAD, BEGIN, *_prefetches(launch, source, buffers), WAIT)))
    symbol = content_name("k", f"{source} {launch.warps}")
    return replace(launch, symbol=symbol, source=source.replace("NAME", symbol))


def _prefetches(launch: Launch, source: str, buffers: Sequence[BufferRecord]) -> Iterator[str]:
    """Yield lines that prefetch constants: the programs share the lines of each, beginning with the first."""
    names = source.split("def NAME(", 1)[1].split("):", 1)[0].split(", ")
    threads, left = 32 * launch.warps, PREFETCH_BYTES
    for name, argument in zip(names, launch.arguments, strict=True):
        lines = min(buffers[argument].size_bytes, left) // LINE_BYTES
        if buffers[argument].memory != "constant" or lines == 0:
            continue
        left -= lines * LINE_BYTES
        each = min(THREAD_LINES * threads, max(threads, power_of_two(-(-lines // launch.grid))))
        yield f"{PREFETCH}{name}, pid * {each}, {lines}, {each})\n"
