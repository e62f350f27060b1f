"""Runs cubins on a device through the driver's C interface: Triton is not needed to run a kernel.

A Triton kernel takes pointers and then two more: to memory for tensor descriptors that it makes, and to memory for
profiles. Korch's kernels use neither (Triton 3.6 and 3.7; a kernel with fewer parameters ignores the rest).
The driver acts on the calling thread's current context. PyTorch works in the device's primary context, but makes it
current only where needed, so this module makes it current on a thread that has no context yet.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

from korch.errors import UnsupportedError

MAX_DYNAMIC_SHARED_SIZE = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""

PREFERRED_CARVEOUT = 9
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent."""

PROGRAMMATIC_STREAM_SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""

STATIC_SHARED_BYTES = 48 << 10


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute with a value that is an int."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", ctypes.c_uint),
    )


class DriverError(UnsupportedError):
    """A call of the CUDA driver failed."""


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnsupportedError(
            "there is no CUDA driver on this machine (libcuda.so.1)",
            where="option target",
            hint="Use --target cpu, or --target cuda:sm_90 --dry-run to plan without a device",
        ) from error


def has_driver() -> bool:
    """Return whether the CUDA driver is installed."""
    try:
        _driver()
    except UnsupportedError:
        return False
    return True


def _call(name: str, *arguments: Any) -> None:
    driver = _driver()
    code = getattr(driver, name)(*arguments)
    if code != 0:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        said = (text.value or b"").decode(errors="replace")
        raise DriverError(f"{name} failed: {said} (code {code})")


def enter_context(device: int = 0) -> None:
    """Make a device's primary context current on this thread, if the thread has none.

    Raises:
        DriverError: there is no such device.
    """
    current = ctypes.c_void_p()
    _call("cuInit", 0)
    _call("cuCtxGetCurrent", ctypes.byref(current))
    if current:
        return
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(current), device)
    _call("cuCtxSetCurrent", current)


class CudaFunction:
    """A kernel that has been loaded into the current context."""

    def __init__(self, image: bytes, symbol: str, shared_bytes: int, warps: int) -> None:
        """Load a cubin.

        Raises:
            DriverError: the cubin is not for this device, or needs more resources than the device has.
        """
        self._image = image
        self._module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        self.symbol = symbol
        self.shared_bytes = shared_bytes
        self.threads = 32 * warps
        enter_context()
        _call("cuModuleLoadData", ctypes.byref(self._module), image)
        _call("cuModuleGetFunction", ctypes.byref(self._function), self._module, symbol.encode())
        if shared_bytes > STATIC_SHARED_BYTES:
            _call("cuFuncSetAttribute", self._function, MAX_DYNAMIC_SHARED_SIZE, shared_bytes)
            _call("cuFuncSetAttribute", self._function, PREFERRED_CARVEOUT, 100)

    def unload(self) -> None:
        """Unload the cubin; no launch may still run. On a device that does not work any more, this does nothing."""
        _driver().cuModuleUnload(self._module)

    def launch(self, programs: int, pointers: Sequence[int], stream: int, is_early: bool = False) -> None:
        """Launch the kernel asynchronously.

        `is_early`: whether it may begin before the kernel in front of it has ended; it must then wait by itself.

        Raises:
            DriverError: the launch was refused.
        """
        enter_context()
        values = [*map(ctypes.c_uint64, (*pointers, 0, 0))]
        parameters = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        early = LaunchAttribute(id=PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        config = LaunchConfig(
            (programs, 1, 1), (self.threads, 1, 1), self.shared_bytes, stream, ctypes.pointer(early), int(is_early)
        )
        _call("cuLaunchKernelEx", ctypes.byref(config), self._function, parameters, None)
