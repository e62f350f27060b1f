"""Reads arrays from files, generates random ones, and writes arrays to files."""

from __future__ import annotations

import argparse
import math
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from korch.cli.select import inputs_at
from korch.cli.shapes import parse_shapes
from korch.errors import InputError, OptionError
from korch.system.files import open_file

if TYPE_CHECKING:
    from korch.primitive.op import Array
    from korch.runtime.runnable import Runnable, TensorInfo


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write an .npz file; unlike `numpy.savez`, use exactly this file name and allow any keys."""
    from korch.runtime.artifact import write_file

    def write(file: IO[bytes]) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                    np.lib.format.write_array(stream, array, allow_pickle=False)

    write_file(path, write)


@contextmanager
def writing(path: Path, where: str) -> Iterator[None]:
    """Convert an OSError while a file is written into an error that names the file.

    Raises:
        OptionError: the file can't be written.
    """
    try:
        yield
    except OSError as error:
        raise OptionError(f"{path} can't be written ({error.strerror or error})", where) from error


def read_feeds(parsed: argparse.Namespace, executable: Runnable) -> dict[str, Array]:
    """Return the inputs of `korch run` by name: from files, or random ones of the shapes of `--shape`."""
    from korch.runtime.runnable import random_feeds

    feeds: dict[str, Array] = dict(executable.defaults)
    if parsed.random:
        inputs = [t for t in inputs_at(executable, parse_shapes(parsed.shape)) if t.name not in feeds]
        _require_static(inputs)
        feeds |= random_feeds(inputs, parsed.seed)
    for text in parsed.input:
        known = [t.name for t in executable.get_inputs() if text.startswith(f"{t.name}=")]
        name = known[0] if known else text.partition("=")[0]
        file = text[len(name) + 1 :]
        if not name or not file:
            raise OptionError(f"can't read {text!r}", where="option --input", expected="NAME=x.npy")
        feeds[name] = _read_array(name, Path(file))
    return feeds


def _require_static(inputs: Sequence[TensorInfo]) -> None:
    for tensor in inputs:
        if tensor.dtype == np.dtype(object) or -1 in tensor.shape:
            raise OptionError(
                f"the input {tensor.name!r} is a {tensor.type}, for which there are no random inputs",
                where="option --random",
                expected="--input for each input",
            )


def _read_array(name: str, path: Path) -> Array:
    where, expected = f"input {name!r}", "a .npy file"
    try:
        with open_file(path) as stream:
            _check_header(stream)
            array: Array = np.lib.format.read_array(stream, allow_pickle=False)
            return array
    except OSError as error:
        raise InputError(f"{path} can't be read ({error.strerror})", where, expected) from error
    except (ValueError, EOFError, RecursionError, MemoryError) as error:
        raise InputError(f"{path} is no array ({error})", where, expected) from error


def _check_header(stream: IO[bytes]) -> None:
    """Refuse an .npy file that is smaller than its header says, before memory is allocated."""
    read = np.lib.format.read_array_header_1_0
    if np.lib.format.read_magic(stream) != (1, 0):
        read = np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    claimed = math.prod(shape) * dtype.itemsize
    held = os.fstat(stream.fileno()).st_size - stream.tell()
    if min(shape, default=0) < 0 or claimed > held:
        raise ValueError(f"its header says {claimed} bytes, but it has {held}")
    stream.seek(0)
