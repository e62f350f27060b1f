"""Compiles the runtime when a wheel is built, or when a checkout is installed; all else is in pyproject.toml.

`KORCH_MACHINE=aarch64` builds the wheel for another machine than the one at hand.
"""

import importlib.util
import os
import platform
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

MACHINE = os.environ.get("KORCH_MACHINE", platform.machine())


def _build_library():
    path = Path(__file__).parent / "src" / "korch" / "system" / "native_build.py"
    spec = importlib.util.spec_from_file_location("native_build", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build_library(MACHINE)


class BuildPython(build_py):
    """Copies the package with the library, which is compiled before."""

    def run(self):
        """Compile the library, then do the rest."""
        library = _build_library()
        super().run()
        if not self.editable_mode:
            for other in Path(self.build_lib, "korch", "native").glob("libkorch_runtime-*.so"):
                if other.name != library.name:
                    other.unlink()


class BuildWheel(bdist_wheel):
    """Makes a wheel for one kind of machine and any version of Python."""

    def get_tag(self):
        """Return the tag: the library needs no more than the GNU C library of that version."""
        return "py3", "none", f"manylinux_2_28_{MACHINE}"


class MachineCode(Distribution):
    """Packages with machine code."""

    def has_ext_modules(self):
        """Return that it has some."""
        return True


setup(distclass=MachineCode, cmdclass={"build_py": BuildPython, "bdist_wheel": BuildWheel})
