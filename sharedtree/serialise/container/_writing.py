"""Writes containers: tensors, a manifest and metadata in one safetensors file, whole or not at all.

Tensors whose size is a multiple of 64 bytes come first, so that each begins at such a multiple and can be mapped and
used as it is. The others follow by decreasing alignment, so that each is aligned for its own dtype.

Data is hashed by a second thread while the first writes it and forces it to the disk, and the digests are patched into
the header at the end. If the file cannot be patched (a pipe, a compressed stream, one opened for appending), they are
worked out first. Bytes that might have changed by the time they are written are kept meanwhile: in memory if they are
few, otherwise in a temporary file.

A file is replaced as a whole or not at all, whatever happens meanwhile. The new contents go to a temporary file beside
the target, are forced to the disk, and take the target's name in one step; then the folder is forced to the disk too:

    .model.safetensors.0f3a….sharedtree-tmp     written, fsync
    model.safetensors                           replaced by rename, then fsync of the folder

A process that is killed leaves the old file, or the new one, and perhaps a temporary file, which the next save to the
same target removes. A process that writes a temporary file holds a lock on it (`flock`). The kernel releases the lock
when the process ends, so a file that is still being written is not removed. On Windows an open file cannot be removed
at all, and the folder cannot be forced to the disk.
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
from ._byte_sources import CHUNK_BYTES, SMALL, Progress, byte_counter, crc32, num_chunks, require_expanded
from ._header import ALIGNMENT, MANIFEST_TENSOR, MAX_HEADER_BYTES, Buffer, TensorSource, blank_header, nbytes_of, seal

try:
    import fcntl
# Windows has no `fcntl`.
except ImportError:
    fcntl = None

_SUFFIX = ".sharedtree-tmp"
_RANDOM_DIGITS = 16


# ---- Durable: temporary file beside the target, fsync, rename, fsync of the folder ----


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yields a file to write to. It takes the place of `path` when the `with` block ends without an exception.

    It is unbuffered and can be read, too. Symbolic links stay, and the file they point to is replaced. The new
    file gets the permissions of the old one; if there is none, 0666 without the umask's bits. While it is written
    nobody but its owner has more permissions than that. If the block raises, or writing the data to the disk
    fails, what was at `path` stays.

    Cost: two `fsync`. Needs the room of the old file and the new one at once.

    Limitations: the new file belongs to who writes it, has no access control lists and no setuid, setgid or sticky bit,
    and hard links keep the old contents. A folder that may be written to but not read is not forced to the disk. On
    Windows, permissions are those of a new file.
    """
    user_path, process_id = os.fsdecode(path), os.getpid()
    target = _target_of(user_path)
    mode = _mode_of(target, user_path)
    folder, name = os.path.split(target)
    prefix = _prefix_of(name)
    _remove_stale(folder, prefix)
    # The writer needs to read and write the file, so it has these permissions (0600) until the end.
    opener = functools.partial(os.open, mode=0o666 if mode is None else mode | 0o600)
    # A second round is needed only if another save removed the file before it was locked.
    while True:
        temporary = os.path.join(folder, prefix + secrets.token_hex(_RANDOM_DIGITS // 2) + _SUFFIX)
        # Temporary file beside the target.
        with _errors_about_target(target, user_path):
            opened = open(temporary, "x+b", buffering=0, opener=opener)  # noqa: SIM115  closed below
        with opened as file:
            try:
                if fcntl is not None:
                    # On a file system without locks, other saves cannot lock it either, and do not remove it.
                    with contextlib.suppress(OSError):
                        fcntl.flock(file, fcntl.LOCK_EX)
                # Between creation and lock, another save may have taken it for a stale one and removed it.
                if not os.path.exists(temporary):
                    continue
                yield file
                # The mode of the file it replaces. Some file systems have no permissions.
                if mode is not None and fcntl is not None:
                    with contextlib.suppress(OSError):
                        os.fchmod(file.fileno(), mode)
                # fsync.
                force_to_disk(file.fileno())
                # Windows renames no open file.
                if fcntl is None:
                    file.close()
                # Rename, and fsync of the folder.
                with _opened_folder(folder) as descriptor:
                    with _errors_about_target(target, user_path):
                        os.replace(temporary, target)
                    if descriptor is not None:
                        _force_folder(descriptor)
                break
            except BaseException:
                file.close()
                # In a process that was forked meanwhile, the file is its parent's, which still writes it.
                if os.getpid() == process_id:
                    with contextlib.suppress(OSError):
                        os.unlink(temporary)
                raise


def _prefix_of(name: str) -> str:
    """Returns the beginning of the names of a target's temporary files."""
    encoded = os.fsencode(name)
    # File names have at most 255 bytes, and the temporary one is longer than its target's.
    return f".{name if len(encoded) <= 200 else hashlib.sha256(encoded).hexdigest()}."


def _target_of(user_path: str) -> str:
    """Returns the path to write to: absolute, with symbolic links resolved.

    The current folder may change meanwhile, hence absolute. If the system does not take so long a path, returns the
    user's, which may be shorter.
    """
    target = os.path.realpath(user_path)
    if not _is_too_long(_longest_beside(target)) or os.path.islink(user_path):
        return target
    return user_path


def _longest_beside(target: str) -> str:
    """Returns the longest of the paths that are used to replace a target."""
    folder, name = os.path.split(target)
    return max(os.path.join(folder, _prefix_of(name) + "0" * _RANDOM_DIGITS + _SUFFIX), target, key=len)


def _is_too_long(path: str) -> bool:
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno == errno.ENAMETOOLONG
    return False


# ---- The mode of the file it replaces, else by umask; and whether something can be replaced at all ----


def _mode_of(target: str, user_path: str) -> int | None:
    """Returns the permissions of the file that is to be replaced; None if there is none.

    Raises:
        OSError: if nothing can be replaced or made there: a folder, a device, a pipe, a missing folder, too long a
            path.
    """
    shown, (folder, name) = printable(user_path), os.path.split(target)
    if _is_too_long(_longest_beside(target)):
        raise OSError(errno.ENAMETOOLONG, _too_long_text(folder, name), user_path)
    try:
        # `target` would not do: `/dev/stdout` may be a pipe or a file without a name, which no path leads to.
        mode = os.stat(user_path or os.curdir).st_mode
    except OSError:
        mode = None
    is_folder = mode is not None and stat.S_ISDIR(mode)
    if is_folder or (user_path and os.path.basename(user_path) in ("", os.curdir, os.pardir)):
        example = os.path.join(user_path, "model.safetensors")
        fact = f"`{shown}` is a folder." if is_folder else f"`{shown}` names a folder, which does not exist."
        raise IsADirectoryError(errno.EISDIR, f"{fact} Name a file in it:\n    {example!r}\nA folder", target)
    if mode is None:
        _require_folder(folder or os.curdir, name, user_path)
        return None
    if not stat.S_ISREG(mode):
        message = (
            f"`{shown}` is a device or a pipe, which cannot be replaced. Open it and write to the file object:\n"
            f'    open({user_path!r}, "wb")\nNo regular file'
        )
        raise OSError(errno.EINVAL, message, user_path)
    if target.endswith(_DELETED) and not user_path.endswith(_DELETED) and not _is_same(user_path, target):
        fact = f"`{shown}` is a file that has no name any more, so nothing can take its place."
        raise OSError(errno.EINVAL, f"{fact} {_write_into(user_path)}\nNo name", user_path)
    return mode & 0o777


# Linux adds this to the former name of a file that has none.
_DELETED = " (deleted)"


def _is_same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False


def _require_folder(folder: str, name: str, user_path: str) -> None:
    """Raises `OSError` unless the folder in which a file is to be made exists. The error says what to do.

    `OSError` prints `: 'path'` after its text, so the texts here end where the path follows.
    """
    shown = printable(user_path)
    try:
        if stat.S_ISDIR(os.stat(folder).st_mode):
            return
        error = errno.ENOTDIR
    except OSError as raised:
        error = raised.errno or errno.ENOENT
    if error == errno.ENOTDIR:
        obstacle = folder
        while not os.path.exists(obstacle):
            obstacle = os.path.dirname(obstacle)
        message = f"`{shown}` cannot be there: `{printable(obstacle)}` is a file, and no folder.\nNo folder"
        raise NotADirectoryError(error, message, obstacle)
    if error in (errno.EACCES, errno.EPERM):
        raise OSError(error, f"The folder of `{shown}` may not be entered. {_in_home(name)}\nNot entered", user_path)
    if error != errno.ENOENT:
        raise OSError(error, os.strerror(error), folder)
    require_expanded(user_path)
    ancestor = os.path.dirname(folder)
    while ancestor and not os.path.exists(ancestor):
        ancestor = os.path.dirname(ancestor)
    fix = f"Make it:\n    os.makedirs({folder!r})" if os.access(ancestor or os.curdir, os.W_OK) else _in_home(name)
    raise FileNotFoundError(error, f"The folder of `{shown}` does not exist. {fix}\nMissing", folder)


def _in_home(name: str) -> str:
    path = os.path.join("~", name)
    return f"Save to a folder of your own:\n    sharedtree.save(os.path.expanduser({path!r}), model)"


def _write_into(path: str) -> str:
    """Returns the advice to write into an existing file instead."""
    return (
        "Write into the file that is there, which is not whole until the end:\n"
        f'    with open({path!r}, "r+b") as file:\n'
        "        sharedtree.save(file, model)\n"
        "        file.truncate()"
    )


def _too_long_text(folder: str, name: str) -> str:
    """Returns the error text for too long a path, with the shortest way round it.

    `OSError` prints `: 'path'` after its text, so this ends where the path follows.
    """
    if _is_too_long(os.path.join(os.curdir, name)):
        return f"The name of the file has {len(os.fsencode(name))} bytes, more than the system takes. Shorten it. It is"
    fact = "The path is longer than the system takes, or that of the temporary file beside it would be."
    if _is_too_long(folder):
        return f"{fact} Its folder alone is. Save to a shorter path. It is"
    return (
        f"{fact} Go into the folder, and save from there:\n"
        f"    os.chdir({folder!r})\n    sharedtree.save({name!r}, model)\nThe path is"
    )


# Errors that say that a file may not be replaced. `EBUSY` comes from a file that is mounted by itself.
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY})


@contextlib.contextmanager
def _errors_about_target(target: str, user_path: str) -> Iterator[None]:
    """Turns errors about the temporary file, of which the user does not know, into errors about the target."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FORBIDDEN:
            raise
        fact = f"`{printable(user_path)}` cannot be replaced, since its folder takes no new file: {error.strerror}."
        if error.errno == errno.EBUSY:
            fact = f"`{printable(user_path)}` cannot be replaced: {error.strerror}."
        if os.path.isfile(target) and os.access(target, os.W_OK):
            fix = _write_into(user_path)
        else:
            fix = _in_home(os.path.basename(target))
        raise OSError(error.errno, f"{fact} {fix}\nNot replaced", user_path) from None


def _remove_stale(folder: str, prefix: str) -> None:
    """Removes a target's temporary files, except those in use. Failures are passed over."""
    pattern = re.compile(re.escape(prefix) + f"[0-9a-f]{{{_RANDOM_DIGITS}}}" + re.escape(_SUFFIX))
    # A folder may be writable and not readable.
    with contextlib.suppress(OSError):
        for stale in filter(pattern.fullmatch, os.listdir(folder or os.curdir)):
            with contextlib.suppress(OSError):
                _remove_unless_held(os.path.join(folder, stale))


def _remove_unless_held(temporary: str) -> None:
    """Removes a temporary file. Raises `OSError` if a process holds its lock."""
    if fcntl is None:
        # Windows does not remove an open file.
        os.unlink(temporary)
        return
    descriptor = os.open(temporary, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(temporary)
    finally:
        os.close(descriptor)


def force_to_disk(descriptor: int) -> None:
    """Returns once the bytes of a file are on the disk."""
    # On macOS, `fsync` stops at the disk's cache.
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if fcntl is not None and full is not None:
        # A file system without it has `fsync`.
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, full)
            return
    os.fsync(descriptor)


@contextlib.contextmanager
def _opened_folder(folder: str) -> Iterator[int | None]:
    """Yields a descriptor with which a folder can be forced to the disk; None if there is none.

    It is opened before a file in the folder is replaced, so that an error leaves the old file.
    """
    descriptor: int | None = None
    # Windows has no such descriptors.
    if hasattr(os, "O_DIRECTORY"):
        # A folder into which everybody drops files may be writable and not readable.
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
        # Network file systems raise these for folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise


# ---- Fast: hash while writing, and patch a fixed-width header ----

# A longer manifest goes into a tensor.
MAX_INLINE_MANIFEST = 16 * 2**20
# How much is kept for a file that cannot be patched, before a temporary file is used.
MAX_KEPT_IN_MEMORY = 8 * 2**20
# Below this, passing a tensor to another thread takes longer than hashing it.
_WORTH_A_THREAD = 2**20


def write(
    file: BinaryIO,
    sources: Sequence[TensorSource],
    manifest: str,
    metadata: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    force: Callable[[int], None] | None = None,
) -> int:
    """Writes a container to any object with `write`, from where it is positioned. Leaves it at the end, unflushed.

    Args:
        file: the file object.
        sources: the tensors, in any order.
        manifest: text of the manifest. It goes into a tensor past 16 MiB.
        metadata: the user's texts.
        progress: called with the bytes done and the bytes in all.
        force: forces the bytes of a descriptor to the disk. Called for a file that can be patched, once the data is
            written and while some of it is not hashed yet.

    Returns:
        The number of bytes written.

    Raises:
        ValueError: if the header would be longer than safetensors allows (some 800,000 tensors), or a name or a text
            cannot be in it. Nothing was written.
    """
    # Lay out the header, with zeros for digests. A manifest for which it has no room goes into a tensor.
    reserved_names = [printable(source.name) for source in sources if source.name.startswith("sharedtree.")]
    if reserved_names:
        raise ValueError(f"The tensor name `{reserved_names[0]}` is taken: those that begin with `sharedtree.` are.")
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
    # Digests: computed meanwhile, if the header can be patched; otherwise first.
    data_bytes = sum(nbytes for _, nbytes in sized)
    report = byte_counter(progress, data_bytes)
    start = file.tell() if _can_be_patched(file) else None
    with contextlib.ExitStack() as stack:
        # After an error, leaving the block ends the second thread.
        hasher = stack.enter_context(_Hasher())
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
            data = (buffer for source, nbytes in sized for buffer in _hashed_bytes(source, nbytes, kept))
        # Write header and data.
        _write_all(file, memoryview(header))
        for buffer in _gathered(data):
            _write_all(file, memoryview(buffer))
            report(len(buffer))
        # The disk and the hasher can work at once.
        if start is not None and force is not None and hasher.is_behind():
            force(file.fileno())
        digests = hasher.finished()
    # Patch the digests into the header.
    if start is not None:
        changed = seal(header, digests)
        file.seek(start + changed.start)
        _write_all(file, memoryview(header)[changed])
        file.seek(start + len(header) + data_bytes)
    return len(header) + data_bytes


def _place(sized: tuple[TensorSource, int]) -> int:
    """Returns the sort key of a tensor: sizes that are multiples of 64 bytes first, then by decreasing alignment."""
    source, nbytes = sized
    return -ALIGNMENT if nbytes and nbytes % ALIGNMENT == 0 else -source.alignment


class _Hasher:
    """Computes digests on a second thread, in the order of the file."""

    def __init__(self) -> None:
        self._digests: list[int] = []
        # The thread starts with the first job.
        self._thread = ThreadPoolExecutor(1, "sharedtree-digest")
        self._behind: collections.deque[Future[None]] = collections.deque()
        self._copies: collections.deque[Future[None]] = collections.deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def hashed(self, source: TensorSource, nbytes: int) -> Iterator[Buffer]:
        """Iterates over the bytes of the next tensor, and hashes them while the caller uses them.

        A snapshot: the buffers that are hashed are the very ones that are written.
        """
        first_digest, offset = len(self._digests), 0
        self._digests += [0] * num_chunks(nbytes)
        buffers = source.buffers()
        is_copied = not (source.is_here and isinstance(buffers, list))
        for buffer in filter(len, buffers):
            # A small tensor has one chunk, whose digest is updated here.
            if nbytes < _WORTH_A_THREAD:
                self._digests[first_digest] = crc32(buffer, self._digests[first_digest])
            else:
                self._submit(first_digest, offset, buffer, is_copied)
            yield buffer
            offset += len(buffer)

    def _submit(self, first_digest: int, offset: int, buffer: Buffer, is_copied: bool) -> None:
        """Passes one buffer to the second thread, to be hashed.

        Args:
            first_digest: index of the tensor's first digest in the digests of all tensors.
            offset: of the buffer in the tensor.
            buffer: the bytes.
            is_copied: True if the buffer is a copy, which takes memory beside the array's.
        """
        # Copied pieces hold memory, so at most three of them wait.
        if is_copied and len(self._copies) == 3:
            self._copies.popleft().result()
        try:
            future = self._thread.submit(_hash, self._digests, first_digest, offset, buffer)
        # When Python ends, its executors take no more work.
        except RuntimeError:
            self.finished()
            _hash(self._digests, first_digest, offset, buffer)
            return
        self._behind.append(future)
        if is_copied:
            self._copies.append(future)

    def is_behind(self) -> bool:
        """Returns True if something is not hashed yet."""
        return bool(self._behind) and not self._behind[-1].done()

    def finished(self) -> list[int]:
        """Waits for the thread, and returns all digests."""
        while self._behind:
            self._behind.popleft().result()
        return self._digests


def _hash(digests: list[int], first_digest: int, offset: int, buffer: Buffer) -> None:
    """Adds bytes of a tensor to its digests.

    Args:
        digests: digests of all tensors.
        first_digest: index of the tensor's first digest in `digests`.
        offset: of the bytes in the tensor.
        buffer: the bytes.
    """
    while len(buffer):
        chunk, offset_in_chunk = divmod(offset, CHUNK_BYTES)
        part = buffer[: CHUNK_BYTES - offset_in_chunk]
        digests[first_digest + chunk] = crc32(part, digests[first_digest + chunk])
        offset += len(part)
        buffer = buffer[len(part) :]


# ---- A snapshot: what is hashed is what is written ----


def _hashed_bytes(source: TensorSource, nbytes: int, kept: IO[bytes]) -> Iterable[Buffer]:
    """Returns the bytes of a tensor that were hashed: from its memory or, if that may change, from what was kept."""
    if not source.may_change:
        return source.buffers()
    sizes = (min(CHUNK_BYTES, nbytes - start) for start in range(0, nbytes, CHUNK_BYTES))
    return map(kept.read, sizes)


def _gathered(buffers: Iterable[Buffer]) -> Iterator[Buffer | bytearray]:
    """Iterates over the same bytes, with small buffers joined.

    A call of `write` takes about as much time as writing 64 KiB.
    """
    small = bytearray()
    for buffer in buffers:
        if len(buffer) < SMALL:
            small += buffer
        # The joined bytes go out once they are many, and before a large buffer, which is passed on as it is.
        if small and max(len(buffer), len(small)) >= SMALL:
            yield small
            # The file object may keep a view of the buffer, so it is not cleared but replaced.
            small = bytearray()
        if len(buffer) >= SMALL:
            yield buffer
    if small:
        yield small


def _can_be_patched(file: BinaryIO) -> bool:
    """Returns True if it is safe to go back in a file and write again.

    Many objects say that they can seek, and cannot do this. So only files of the system and `BytesIO` count.
    """
    if type(file) is io.BytesIO:
        return True
    raw = file.raw if isinstance(file, io.BufferedWriter | io.BufferedRandom) else file
    if not isinstance(raw, io.FileIO) or not raw.seekable() or "a" in raw.mode:
        return False
    return fcntl is None or not fcntl.fcntl(raw.fileno(), fcntl.F_GETFL) & os.O_APPEND


def _write_all(file: BinaryIO, buffer: memoryview) -> None:
    """Writes a buffer, in as many calls as the file object needs."""
    while len(buffer):
        written: int | None = file.write(buffer)
        # Raw files that would block return None. Objects that only resemble files do, too, when they have written all.
        if written is None:
            if isinstance(file, io.RawIOBase):
                raise BlockingIOError("The file is in non-blocking mode and takes no more. Make it block:\n"
                                      "    os.set_blocking(file.fileno(), True)")  # fmt: skip
            return
        buffer = buffer[written:]
