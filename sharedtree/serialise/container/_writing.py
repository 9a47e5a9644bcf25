"""Containers are written here: tensors, a manifest and metadata in one safetensors file, whole or not at all.

Tensors whose size is a multiple of 64 bytes come first, so that each begins at such a multiple and can be mapped and
used as it is. The others follow by decreasing alignment, so that each is aligned for its own dtype.

Data is hashed by a second thread while the first writes it and forces it to the disk, and the digests are patched into
the header at the end. Of a file that cannot be patched (a pipe, a compressed stream, one opened for appending) they are
worked out first. What might be other bytes when its turn to be written comes is kept meanwhile: in memory as far as
that is little, else in a temporary file.

A file is replaced as a whole or not at all, whatever happens meanwhile. The new contents go to a temporary file beside
the target, are forced to the disk, and take the target's name in one step; then the folder is forced to the disk too. A
process that is killed leaves the old file, or the new one, and perhaps a temporary file, which the next save to the
same target removes. Whoever writes one holds a lock on it (`flock`), which the kernel lets go of when the process ends,
so a file that is still being written is not removed. On Windows an open file cannot be removed at all, and the folder
cannot be forced to the disk.
"""

import collections
import contextlib
import errno
import functools
import hashlib
import io
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, BinaryIO, Self

from ...core._printing import printable
from ._byte_sources import CHUNK_BYTES, SMALL, Progress, counting, crc32, num_chunks, require_expanded
from ._header import ALIGNMENT, MANIFEST_TENSOR, MAX_HEADER_BYTES, Buffer, TensorSource, blank_header, nbytes_of, seal

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

    Limitations: the new file belongs to who writes it, has no access control lists and no setuid, setgid or sticky bit,
    and hard links keep the old contents. A folder that may be written to but not read is not forced to the disk. On
    Windows, permissions are those of a new file.
    """
    given, process = os.fsdecode(path), os.getpid()
    target = _target_of(given)
    mode = _mode_of(target, given)
    folder, name = os.path.split(target)
    prefix = _prefix_of(name)
    _remove_stale(folder, prefix)
    opener = functools.partial(os.open, mode=0o666 if mode is None else mode | 0o600)
    while True:
        temporary = os.path.join(folder, prefix + secrets.token_hex(_RANDOM_DIGITS // 2) + _SUFFIX)
        with _said_of_target(target, given):
            opened = open(temporary, "x+b", buffering=0, opener=opener)  # noqa: SIM115  closed below
        with opened as file:
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
                with _opened_folder(folder) as descriptor:
                    with _said_of_target(target, given):
                        os.replace(temporary, target)
                    if descriptor is not None:
                        _force_folder(descriptor)
                break
            except BaseException:
                file.close()
                # A process that was forked meanwhile has its parent's file, which the parent still writes.
                if os.getpid() == process:
                    with contextlib.suppress(OSError):
                        os.unlink(temporary)
                raise


def _prefix_of(name: str) -> str:
    """How the names of the temporary files of a target begin."""
    encoded = os.fsencode(name)
    # File names end at 255 bytes, and the temporary one is longer than its target's.
    return f".{name if len(encoded) <= 200 else hashlib.sha256(encoded).hexdigest()}."


def _target_of(given: str) -> str:
    """The path that is written to: what symbolic links lead to, and absolute, since the current folder may change.

    If the system does not take so long a path, it is the given one, which may be shorter.
    """
    target = os.path.realpath(given)
    if not _is_too_long(_longest_beside(target)) or os.path.islink(given):
        return target
    return given


def _longest_beside(target: str) -> str:
    """The longest path that is used to replace a target."""
    folder, name = os.path.split(target)
    return max(os.path.join(folder, _prefix_of(name) + "0" * _RANDOM_DIGITS + _SUFFIX), target, key=len)


def _is_too_long(path: str) -> bool:
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno == errno.ENAMETOOLONG
    return False


def _mode_of(target: str, given: str) -> int | None:
    """The permissions of the file that is to be replaced; None if there is none."""
    shown, (folder, name) = printable(given), os.path.split(target)
    if _is_too_long(_longest_beside(target)):
        raise OSError(errno.ENAMETOOLONG, _too_long(folder, name), given)
    try:
        # Not of `target`: what a pipe or a file without a name is reached by, `/dev/stdout` say, leads to no path.
        mode = os.stat(given or os.curdir).st_mode
    except OSError:
        mode = None
    is_folder = mode is not None and stat.S_ISDIR(mode)
    if is_folder or (given and os.path.basename(given) in ("", os.curdir, os.pardir)):
        better = os.path.join(given, "model.safetensors")
        what = f"`{shown}` is a folder." if is_folder else f"`{shown}` names a folder, which does not exist."
        raise IsADirectoryError(errno.EISDIR, f"{what} Name a file in it:\n    {better!r}\nA folder", target)
    if mode is None:
        _require_folder(folder or os.curdir, name, given)
        return None
    if not stat.S_ISREG(mode):
        message = (
            f"`{shown}` is a device or a pipe, which cannot be replaced. Open it and write to the file object:\n"
            f'    open({given!r}, "wb")\nNo regular file'
        )
        raise OSError(errno.EINVAL, message, given)
    if target.endswith(_DELETED) and not given.endswith(_DELETED) and not _is_same(given, target):
        fact = f"`{shown}` is a file that has no name any more, so nothing can take its place."
        raise OSError(errno.EINVAL, f"{fact} {_write_into(given)}\nNo name", given)
    return mode & 0o777


_DELETED = " (deleted)"  # what Linux adds to the name that a file had


def _is_same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False


def _require_folder(folder: str, name: str, given: str) -> None:
    """Raises unless a folder, in which a file is to be made, is there; says what to do."""
    shown = printable(given)
    try:
        if stat.S_ISDIR(os.stat(folder).st_mode):
            return
        error = errno.ENOTDIR
    except OSError as raised:
        error = raised.errno or errno.ENOENT
    if error == errno.ENOTDIR:
        at = folder
        while not os.path.exists(at):
            at = os.path.dirname(at)
        message = f"`{shown}` cannot be there: `{printable(at)}` is a file, and no folder.\nNo folder"
        raise NotADirectoryError(error, message, at)
    if error in (errno.EACCES, errno.EPERM):
        raise OSError(error, f"The folder of `{shown}` may not be entered. {_in_home(name)}\nNot entered", given)
    if error != errno.ENOENT:
        raise OSError(error, os.strerror(error), folder)
    require_expanded(given)
    above = os.path.dirname(folder)
    while above and not os.path.exists(above):
        above = os.path.dirname(above)
    fix = f"Make it:\n    os.makedirs({folder!r})" if os.access(above or os.curdir, os.W_OK) else _in_home(name)
    raise FileNotFoundError(error, f"The folder of `{shown}` does not exist. {fix}\nMissing", folder)


def _in_home(name: str) -> str:
    path = os.path.join("~", name)
    return f"Save to a folder of your own:\n    sharedtree.save(os.path.expanduser({path!r}), model)"


def _write_into(given: str) -> str:
    return (
        "Write into the file that is there, which is not whole until the end:\n"
        f'    with open({given!r}, "r+b") as file:\n'
        "        sharedtree.save(file, model)\n"
        "        file.truncate()"
    )


def _too_long(folder: str, name: str) -> str:
    if _is_too_long(os.path.join(os.curdir, name)):
        return f"The name of the file has {len(os.fsencode(name))} bytes, more than the system takes. Shorten it. It is"
    fact = "The path is longer than the system takes, or that of the temporary file beside it would be."
    if _is_too_long(folder):
        return f"{fact} Its folder alone is. Save to a shorter path. It is"
    return (
        f"{fact} Go into the folder, and save from there:\n"
        f"    os.chdir({folder!r})\n    sharedtree.save({name!r}, model)\nThe path is"
    )


_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY})  # the last of what is mounted by itself


@contextlib.contextmanager
def _said_of_target(target: str, given: str) -> Iterator[None]:
    """Errors that forbid to replace a file are about the target, and not about a temporary file."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FORBIDDEN:
            raise
        fact = f"`{printable(given)}` cannot be replaced, since its folder takes no new file: {error.strerror}."
        if error.errno == errno.EBUSY:
            fact = f"`{printable(given)}` cannot be replaced: {error.strerror}."
        if os.path.isfile(target) and os.access(target, os.W_OK):
            fix = _write_into(given)
        else:
            fix = _in_home(os.path.basename(target))
        raise OSError(error.errno, f"{fact} {fix}\nNot replaced", given) from None


def _remove_stale(folder: str, prefix: str) -> None:
    """Removes the temporary files of a target that nobody holds. What cannot be removed is left."""
    pattern = re.compile(re.escape(prefix) + f"[0-9a-f]{{{_RANDOM_DIGITS}}}" + re.escape(_SUFFIX))
    with contextlib.suppress(OSError):  # a folder that may be written to but not listed
        for stale in filter(pattern.fullmatch, os.listdir(folder or os.curdir)):
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


@contextlib.contextmanager
def _opened_folder(folder: str) -> Iterator[int | None]:
    """A descriptor with which a folder can be forced to the disk; None where there is none.

    It is opened before a file in the folder is replaced, so that an error leaves what is there.
    """
    descriptor: int | None = None
    if hasattr(os, "O_DIRECTORY"):  # not Windows
        # A folder may be written to and not read, as one is into which everybody drops files.
        with contextlib.suppress(PermissionError):
            descriptor = os.open(folder or os.curdir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _force_folder(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # what network file systems say to folders
            raise


MAX_INLINE_MANIFEST = 16 * 2**20
MAX_KEPT_IN_MEMORY = 8 * 2**20
_WORTH_A_THREAD = 2**20  # below, handing a tensor over takes longer than hashing it


def write(
    file: BinaryIO,
    sources: Sequence[TensorSource],
    manifest: str,
    metadata: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    force: Callable[[int], None] | None = None,
) -> int:
    """Writes a container to any object with `write`, from where it is positioned. Returns how many bytes that took.

    The file is left at their end, unflushed if it has a buffer. `force` is called with the descriptor of a file that
    can be patched once the data is there, if some of it is not hashed yet. The manifest goes into a tensor past 16 MiB.
    A `ValueError` if the header would be longer than safetensors allows (some 800,000 tensors), or a name or a text
    cannot be in it. Nothing was written then.
    """
    taken = [printable(source.name) for source in sources if source.name.startswith("sharedtree.")]
    if taken:
        raise ValueError(f"The tensor name `{taken[0]}` is taken: those that begin with `sharedtree.` are.")
    sized = sorted(((source, nbytes_of(source.dtype, source.shape)) for source in sources), key=_place)
    is_long = len(manifest) > MAX_INLINE_MANIFEST
    header = bytearray() if is_long else blank_header(sized, manifest, metadata or {})
    if is_long or len(header) > MAX_HEADER_BYTES:
        text = manifest.encode()
        sized.append((TensorSource(MANIFEST_TENSOR, "U8", (len(text),), 1, lambda: [memoryview(text)]), len(text)))
        header = blank_header(sized, "tensor", metadata or {})
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(
            f"The header of {len(sources)} tensors would have {len(header)} bytes, and no safetensors file may have "
            f"more than {MAX_HEADER_BYTES}. Stack small arrays into larger ones:\n    jax.numpy.stack(arrays)"
        )
    data_bytes = sum(nbytes for _, nbytes in sized)
    report = counting(progress, data_bytes)
    start = file.tell() if _can_be_patched(file) else None
    with contextlib.ExitStack() as stack:
        hasher = stack.enter_context(_Hasher())  # an error ends the second thread
        if start is not None:
            data = (buffer for source, nbytes in sized for buffer in hasher.hashed(source, nbytes))
        else:
            kept = stack.enter_context(tempfile.SpooledTemporaryFile(MAX_KEPT_IN_MEMORY))
            for source, nbytes in sized:
                for buffer in hasher.hashed(source, nbytes):
                    if source.may_change:
                        kept.write(buffer)
            seal(header, hasher.finished())
            kept.seek(0)
            data = (buffer for source, nbytes in sized for buffer in _again(source, nbytes, kept))
        _write_all(file, memoryview(header))
        for buffer in _gathered(data):
            _write_all(file, memoryview(buffer))
            report(len(buffer))
        if start is not None and force is not None and hasher.is_behind():
            force(file.fileno())
        digests = hasher.finished()
    if start is not None:
        changed = seal(header, digests)
        file.seek(start + changed.start)
        _write_all(file, memoryview(header)[changed])
        file.seek(start + len(header) + data_bytes)
    return len(header) + data_bytes


def _place(sized: tuple[TensorSource, int]) -> int:
    source, nbytes = sized
    return -ALIGNMENT if nbytes and nbytes % ALIGNMENT == 0 else -source.alignment


class _Hasher:
    """Works out digests on a second thread, in the order of the file."""

    def __init__(self) -> None:
        self._digests: list[int] = []
        self._thread = ThreadPoolExecutor(1, "sharedtree-digest")  # which starts when it is needed
        self._behind: collections.deque[Future[None]] = collections.deque()
        self._copies: collections.deque[Future[None]] = collections.deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def hashed(self, source: TensorSource, nbytes: int) -> Iterator[Buffer]:
        """The bytes of the next tensor, which are hashed while the caller has them."""
        first, at = len(self._digests), 0
        self._digests += [0] * num_chunks(nbytes)
        buffers = source.buffers()
        is_copied = not (source.is_here and isinstance(buffers, list))
        for buffer in filter(len, buffers):
            if nbytes < _WORTH_A_THREAD:  # one chunk
                self._digests[first] = crc32(buffer, self._digests[first])
            else:
                self._submit(first, at, buffer, is_copied)
            yield buffer
            at += len(buffer)

    def _submit(self, first: int, at: int, buffer: Buffer, is_copied: bool) -> None:
        if is_copied and len(self._copies) == 3:  # what waits bounds the memory held by copied pieces
            self._copies.popleft().result()
        try:
            future = self._thread.submit(_hash, self._digests, first, at, buffer)
        except RuntimeError:  # Python ends, and its executors take no more work
            self.finished()
            _hash(self._digests, first, at, buffer)
            return
        self._behind.append(future)
        if is_copied:
            self._copies.append(future)

    def is_behind(self) -> bool:
        """Whether something is left to be hashed."""
        return bool(self._behind) and not self._behind[-1].done()

    def finished(self) -> list[int]:
        """All digests, once they are there."""
        while self._behind:
            self._behind.popleft().result()
        return self._digests


def _hash(digests: list[int], first: int, at: int, buffer: Buffer) -> None:
    """Adds the bytes of a tensor from `at` on to its digests, which begin at `first`."""
    while len(buffer):
        chunk, within = divmod(at, CHUNK_BYTES)
        part = buffer[: CHUNK_BYTES - within]
        digests[first + chunk] = crc32(part, digests[first + chunk])
        at += len(part)
        buffer = buffer[len(part) :]


def _again(source: TensorSource, nbytes: int, kept: IO[bytes]) -> Iterable[Buffer]:
    """The bytes of a tensor that were hashed: from its memory, or, if that may change, from what was kept of it."""
    if not source.may_change:
        return source.buffers()
    sizes = (min(CHUNK_BYTES, nbytes - start) for start in range(0, nbytes, CHUNK_BYTES))
    return map(kept.read, sizes)


def _gathered(buffers: Iterable[Buffer]) -> Iterator[Buffer | bytearray]:
    """The same bytes, with small buffers put together."""
    small = bytearray()
    for buffer in buffers:
        if len(buffer) < SMALL:
            small += buffer
        if small and max(len(buffer), len(small)) >= SMALL:
            yield small
            small = bytearray()  # a new one: the file object may keep a view of the old one
        if len(buffer) >= SMALL:
            yield buffer
    if small:
        yield small


def _can_be_patched(file: BinaryIO) -> bool:
    """Whether it is safe to go back and write again. Many objects say that they can seek, and cannot do this."""
    if type(file) is io.BytesIO:
        return True
    raw = file.raw if isinstance(file, io.BufferedWriter | io.BufferedRandom) else file
    if not isinstance(raw, io.FileIO) or not raw.seekable() or "a" in raw.mode:
        return False
    return fcntl is None or not fcntl.fcntl(raw.fileno(), fcntl.F_GETFL) & os.O_APPEND


def _write_all(file: BinaryIO, buffer: memoryview) -> None:
    while len(buffer):
        written: int | None = file.write(buffer)
        if written is None:  # what raw files that would block return; objects that only resemble files too
            if isinstance(file, io.RawIOBase):
                raise BlockingIOError("The file is in non-blocking mode and takes no more. Make it block:\n"
                                      "    os.set_blocking(file.fileno(), True)")  # fmt: skip
            return
        buffer = buffer[written:]
