"""One run of the command line: its arguments, its exit code, and its errors as single lines."""

import argparse
import io
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import Any

from korch.cli.parser import make_parser
from korch.errors import KorchError, printable

logger = logging.getLogger("korch.cli")


def run_command(arguments: Sequence[str] | None) -> int:
    """Run one command; return its exit code.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # print "?" for characters that can't be encoded
            stream.reconfigure(errors="replace")
    with redirect_stdout(_Printed(sys.stdout)), redirect_stderr(_Printed(sys.stderr)):
        return _run(arguments)


class _Printed:
    """A stream on which control characters are escaped, except those of layout and at the start of a progress line."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        start = "\r" if text.startswith("\r") else ""
        self._stream.write(start + printable(text.removeprefix(start)))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _run(arguments: Sequence[str] | None) -> int:
    parsed, unknown = make_parser().parse_known_args(arguments)
    parsed.begun_s = time.monotonic() - (_age_s() if arguments is None else 0.0)
    logging.basicConfig(
        level=logging.DEBUG if parsed.verbose else logging.WARNING, format="korch: %(message)s", stream=sys.stderr
    )
    try:
        _refuse_unknown(parsed.parser, unknown)
        with _ended_by_signal():
            code: int = parsed.command(parsed)
        sys.stdout.flush()
    except KorchError as error:
        text = re.sub(r"^option ([a-z_]+)", lambda match: "option --" + match[1].replace("_", "-"), str(error))
        print("korch: " + " ".join(text.split()), file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of the output has closed it, like `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # for example, a file name is too long, or the disk is full
        logger.debug("the command ends", exc_info=True)
        where = f"{error.filename}: " if error.filename else ""
        print(f"korch: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    except MemoryError as error:
        logger.debug("the command ends", exc_info=True)
        print(f"korch: there is not enough memory{f' ({error})' * bool(str(error))}", file=sys.stderr)
        return 1
    return code


def _refuse_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    """Refuse arguments that the command does not have."""
    if not unknown:
        return
    flags = set(re.findall(r"--[a-z][a-z-]*", parser.format_usage()))
    similar = [get_close_matches(text.partition("=")[0], flags, 1) for text in unknown if text.startswith("--")]
    meant = " and ".join(flag for found in similar for flag in found)
    hint = f"Do you mean {meant}? " if meant else ""
    message = f"unrecognized arguments: {' '.join(unknown)}. {hint}`{parser.prog} --help` lists the flags"
    parser.exit(2, f"{parser.prog}: error: {message}\n")


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    """Make SIGTERM end the command like an exception, so that the processes that it started end too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _age_s() -> float:
    """Return the age of this process: the time for its start counts as part of a budget."""
    try:
        fields = Path("/proc/self/stat").read_text("utf-8").rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):  # the system is not Linux
        return 0.0
