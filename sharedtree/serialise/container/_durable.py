"""A file is replaced as a whole or not at all, whatever happens meanwhile.

The new contents go to a temporary file beside the target, are forced to the disk, and take the target's name in one
step; then the folder is forced to the disk too. A process that is killed leaves the old file, or the new one, and
perhaps a temporary file, which the next save to the same target removes. Whoever writes one holds a lock on it
(`flock`), which the kernel lets go of when the process ends, so a file that is still being written is not removed. On
Windows an open file cannot be removed at all, and the folder cannot be forced to the disk.
"""

import contextlib
import errno
import functools
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from typing import BinaryIO

from ..._printable import printable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_SUFFIX = ".sharedtree-tmp"
_RANDOM_DIGITS = 16


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` when the `with` block ends without an exception.

    It is unbuffered and can be read, too. Symbolic links stay, and what they point to is replaced. The permissions are
    those of the file that is replaced, or without one 0666 without the umask's bits; until then nobody has more of
    them. If the block raises, or writing to the disk fails, what was at `path` stays.

    Cost: two `fsync`. Needs the room of the old file and the new one at once.

    Limitations: the new file belongs to who writes it, has no access control lists, and hard links keep the old
    contents. On Windows, permissions are those of a new file.
    """
    target = os.path.realpath(path)
    mode = _mode_of(target, os.fspath(path))
    folder, name = os.path.split(target)
    encoded = os.fsencode(name)
    # File names end at 255 bytes, and the temporary one is longer than its target's.
    prefix = f".{name if len(encoded) <= 200 else hashlib.sha256(encoded).hexdigest()}."
    _remove_stale(folder, prefix)
    opener = functools.partial(os.open, mode=0o666 if mode is None else mode | 0o600)
    while True:
        temporary = os.path.join(folder, prefix + secrets.token_hex(_RANDOM_DIGITS // 2) + _SUFFIX)
        with open(temporary, "x+b", buffering=0, opener=opener) as file:
            try:
                if fcntl is not None:
                    with contextlib.suppress(OSError):  # without locks nobody removes temporary files either
                        fcntl.flock(file, fcntl.LOCK_EX)
                if not os.path.exists(temporary):
                    continue  # another save took it for a stale one between its creation and its lock
                yield file
                if mode is not None and fcntl is not None:
                    with contextlib.suppress(OSError):  # a file system without permissions
                        os.fchmod(file.fileno(), mode)
                force_to_disk(file.fileno())
                if fcntl is None:
                    file.close()  # Windows renames no open file
                os.replace(temporary, target)
                break
            except BaseException:
                file.close()
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
    _force_folder(folder)


def _mode_of(target: str, given: str) -> int | None:
    """The permissions of the file that is to be replaced; None if there is none."""
    shown, folder = printable(given), os.path.dirname(target)
    if not os.path.isdir(folder):
        message = f"The folder of `{shown}` does not exist. Make it:\n    os.makedirs({folder!r})\nMissing"
        raise FileNotFoundError(errno.ENOENT, message, folder)
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(mode):
        better = os.path.join(given, "model.safetensors")
        message = f"`{shown}` is a folder. Name a file in it:\n    {better!r}\nA folder"
        raise IsADirectoryError(errno.EISDIR, message, target)
    if not stat.S_ISREG(mode):
        message = (
            f"`{shown}` is a device or a pipe, which cannot be replaced. Open it and write to the file object:\n"
            f'    open({given!r}, "wb")\nNo regular file'
        )
        raise OSError(errno.EINVAL, message, target)
    return mode & 0o777


def _remove_stale(folder: str, prefix: str) -> None:
    """Removes the temporary files of a target that nobody holds. What cannot be removed is left."""
    pattern = re.compile(re.escape(prefix) + f"[0-9a-f]{{{_RANDOM_DIGITS}}}" + re.escape(_SUFFIX))
    with contextlib.suppress(OSError):  # a folder that may be written to but not listed
        for stale in filter(pattern.fullmatch, os.listdir(folder)):
            with contextlib.suppress(OSError):
                _remove_unless_held(os.path.join(folder, stale))


def _remove_unless_held(temporary: str) -> None:
    if fcntl is None:
        os.unlink(temporary)  # fails if it is open
        return
    descriptor = os.open(temporary, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(temporary)
    finally:
        os.close(descriptor)


def force_to_disk(descriptor: int) -> None:
    """Returns when the file's bytes are on the disk."""
    full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS, where fsync stops at the disk's cache
    if fcntl is not None and full is not None:
        with contextlib.suppress(OSError):  # file systems that do not have it have fsync
            fcntl.fcntl(descriptor, full)
            return
    os.fsync(descriptor)


def _force_folder(folder: str) -> None:
    if not hasattr(os, "O_DIRECTORY"):  # Windows
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # what network file systems say to folders
            raise
    finally:
        os.close(descriptor)
