"""An artifact's kernels for the current device: the stored cubins, or cubins compiled again from the sources."""

from korch.cuda.compile import Cubin, CubinCompiler, CubinFailure
from korch.cuda.runtime.early import EARLIEST_ARCH, without_early
from korch.cuda.runtime.record import CudaProgram
from korch.errors import UnsupportedError
from korch.options import default_cache_folder
from korch.system.extras import install_command


def cubins_for(program: CudaProgram, arch: int) -> dict[str, Cubin]:
    """Return the program's cubins by symbol, for a device's architecture.

    A cubin runs on devices of the same major architecture with the same or a higher minor one. From sm_90
    on, Triton uses features of a single architecture (sm_90a), so the cubin runs on no other.

    Raises:
        UnsupportedError: the cubins are for another architecture and can't be compiled again.
    """
    launches = program.launches
    is_older = program.arch // 10 == arch // 10 and program.arch <= arch and arch < 90
    if program.arch == arch or is_older:
        return {
            symbol: Cubin(symbol, program.cubins[symbol], launch.shared_bytes, 0, 0)
            for symbol, launch in launches.items()
        }
    try:
        compiler = CubinCompiler(arch, default_cache_folder())
    except UnsupportedError as error:
        raise UnsupportedError(
            f"its kernels are for sm_{program.arch}, this device is sm_{arch}, and Triton is not "
            "here to compile them again",
            hint=f"Run: {install_command('cuda')}; or build the artifact on such a device",
        ) from error
    texts = program.sources
    if arch < EARLIEST_ARCH:
        texts = {name: without_early(text) for name, text in texts.items()}
    sources = [launch.launch(texts) for launch in launches.values()]
    try:
        found = compiler.compile(sources)
    finally:
        compiler.close()
    ready: dict[str, Cubin] = {}
    for symbol, cubin in found.items():
        if isinstance(cubin, CubinFailure):
            raise UnsupportedError(
                f"kernel {symbol} does not compile for sm_{arch}: {cubin.message}",
                hint="Build the artifact on this device",
            )
        ready[symbol] = cubin
    return ready
