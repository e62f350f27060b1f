"""Checks of files that users name: input files must be regular, and output files are tested before the work begins.

Reading a pipe would block, and a device may have no end.
"""

import errno
import os
import stat
import tempfile
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path

from korch.errors import OptionError


def open_file(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file for reading.

    Raises:
        OSError: it can't be opened, is not a regular file, or the path can't be the name of a file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a null character, or half of a surrogate pair
        raise OSError(errno.EINVAL, f"the name of a file can't be like this: {error}", str(path)) from error
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def make_private(folder: Path) -> None:
    """Make a folder for executable code: it belongs to this user, and no other user may access it.

    Raises:
        OSError: the folder can't be made, or belongs to another user.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another user", str(folder))
    if stat.S_IMODE(found.st_mode) != 0o700:  # the umask, or an earlier version, has set another mode
        folder.chmod(0o700)


def check_output(path: Path, option: str, inputs: Sequence[Path] = ()) -> None:
    """Check that a file can be written, before the work begins.

    `inputs`: files that are read and must not be overwritten.

    Raises:
        OptionError: the file can't be written.
    """
    where = f"option {option}"
    try:
        target = Path(os.path.realpath(path))  # writing to a dangling link creates the file that it points to
        if not target.parent.is_dir():
            raise OptionError(f"the folder of {target} does not exist", where, hint="Create it first")
        try:
            found = target.stat()
        except FileNotFoundError:
            pass
        else:
            if stat.S_ISDIR(found.st_mode):
                raise OptionError(f"{path} is a folder", where, "the name of a file")
            if not stat.S_ISREG(found.st_mode):
                raise OptionError(f"{path} is a pipe or a device", where, "the name of a file")
            for one in inputs:
                if one.exists() and one.samefile(target):
                    raise OptionError(f"{path} is read, too: it would be overwritten", where, "another file")
        with tempfile.TemporaryFile(dir=target.parent) as probe:
            probe.write(b"korch")
            probe.flush()
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else "") or error
        raise OptionError(f"{path} can't be written ({reason})", where, hint="Choose another name or folder") from error
