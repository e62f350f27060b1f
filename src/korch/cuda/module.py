"""Loads the sources of Triton functions as Python functions, through a file: Triton reads their text from there."""

import importlib.util
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from korch.cuda.kernel import IMPORTS, Launch
from korch.errors import UnsupportedError
from korch.system.extras import install_command
from korch.system.scratch import scratch_folder


def require_triton() -> Any:
    """Return the module `triton`.

    Raises:
        UnsupportedError: Triton is not installed.
    """
    try:
        import triton
    except ImportError as error:
        raise UnsupportedError(
            "Triton is not installed, and kernels for CUDA devices are compiled with it",
            where="option target",
            hint=f"Run: {install_command('cuda')}; or use --target cpu",
        ) from error
    return triton


def load_functions(launches: Iterable[Launch]) -> ModuleType:
    """Return a module that contains the functions of the launches, named by their symbols."""
    require_triton()
    sources = dict.fromkeys(launch.source for launch in launches)
    text = IMPORTS + "".join(f"\n\n{source}" for source in sources)
    with scratch_folder() as folder:
        path = folder / "kernels.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("korch_kernels", path)
        if spec is None or spec.loader is None:
            raise AssertionError("a module of kernels has no loader")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for launch in {launch.symbol: launch for launch in launches}.values():
            _ = getattr(module, launch.symbol)
    return module


def load_call(symbol: str, source: str) -> Any:
    """Return the Python function of a PyTorch call from its source, which Korch has generated itself."""
    names: dict[str, Any] = {}
    exec(compile(source, symbol, "exec"), names)
    return names[symbol]
