"""Writes containers: tensors, a manifest and metadata in one safetensors file, whole or not at all.

Tensors whose size is a multiple of 64 bytes come first, so that each begins at such a multiple and can be mapped and
used as it is. The others follow by decreasing alignment, so that each is aligned for its own dtype.

A second thread hashes the data while the first writes it and forces it to the disk. At the end the digests are patched
into the header. A pipe, a compressed stream or a file opened for appending cannot be patched, so for these the digests
are computed first. An array may be changed between hashing and writing. The hashed bytes of such an array are kept and
written: they are kept in memory if they are few, otherwise in a temporary file.

A file is replaced as a whole or not at all, whatever happens meanwhile. The new contents go to a temporary file beside
the target, are forced to the disk, and take the target's name in one step; then the folder is forced to the disk too:

    .model.safetensors.0f3a….sharedtree-tmp     written, fsync
    model.safetensors                           replaced by rename, then fsync of the folder

A process that is killed leaves the old file or the new one. Perhaps it also leaves a temporary file, which the next
save to the same target removes. A process that writes a temporary file holds a lock on it (`flock`), so that others do
not remove it. The kernel releases the lock when the process ends. On Windows an open file cannot be removed at all,
and the folder cannot be forced to the disk.

Words: the *user's path* is the one passed to `save`, for errors. The *target* is the absolute path that it leads to,
with symbolic links resolved. A temporary file is *stale* if no process holds its lock.

`OSError` prints `: 'path'` after its text. So the texts for it here end with a word or two to go before that, such as
"Not replaced" on a line of its own.
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

# A temporary file is called `.<name of the target>.<16 random hexadecimal digits>.sharedtree-tmp`.
_SUFFIX = ".sharedtree-tmp"
_RANDOM_DIGITS = 16


# ---- Durable: temporary file beside the target, fsync, rename, fsync of the folder ----


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yields a new file to write to. When the `with` block ends without an exception, it replaces the file at `path`.

    The new file is unbuffered, and can be read too. If `path` is a symbolic link, the link stays, and the file it
    points to is replaced. If the block raises, or the data cannot be forced to the disk, the old file stays.

    The new file gets the permissions of the old one. If there is no old file, it gets 0666 without the umask's bits.
    While it is written, it has the same permissions, and its owner may read and write it in any case.

    Raises:
        OSError: if nothing at `path` can be replaced, and no file can be made there.

    Cost: two `fsync`. Until the end, the disk holds both the old file and the new one.

    Limitations: the new file belongs to the user who writes it. It has no access control lists and no setuid, setgid
    or sticky bit. Hard links keep the old contents. A folder that may be written to but not read is not forced to the
    disk. On Windows, the file has the permissions of a new file.
    """
    user_path, process_id = os.fsdecode(path), os.getpid()
    target = _target_of(user_path)
    mode = _mode_of(target, user_path)
    folder, name = os.path.split(target)
    prefix = _prefix_of(name)
    _remove_stale(folder, prefix)
    # The owner gets the permissions to read and write (0600) until the end, whatever the old file had.
    opener = functools.partial(os.open, mode=0o666 if mode is None else mode | 0o600)
    # A second round is needed only if another save removed the file before it was locked.
    while True:
        temporary = os.path.join(folder, prefix + secrets.token_hex(_RANDOM_DIGITS // 2) + _SUFFIX)
        # 1. Make the temporary file beside the target. Mode "x" raises if it exists.
        with _errors_about_target(target, user_path):
            opened = open(temporary, "x+b", buffering=0, opener=opener)  # noqa: SIM115  closed below
        with opened as file:
            try:
                if fcntl is not None:
                    # If the file system has no locks, other saves cannot lock the file either. Then they do not
                    # remove it.
                    with contextlib.suppress(OSError):
                        fcntl.flock(file, fcntl.LOCK_EX)
                # Before the file was locked, another save may have taken it for a stale one and removed it.
                if not os.path.exists(temporary):
                    continue
                # 2. The caller writes.
                yield file
                # 3. Give it the permissions of the old file. Some file systems have none.
                if mode is not None and fcntl is not None:
                    with contextlib.suppress(OSError):
                        os.fchmod(file.fileno(), mode)
                # 4. Force it to the disk.
                force_to_disk(file.fileno())
                # 5. Rename it, and force the folder to the disk. Windows renames no open file.
                if fcntl is None:
                    file.close()
                with _opened_folder(folder) as descriptor:
                    with _errors_about_target(target, user_path):
                        os.replace(temporary, target)
                    if descriptor is not None:
                        _force_folder(descriptor)
                break
            except BaseException:
                file.close()
                # A process that was forked during the block must not remove the file: its parent still writes it.
                if os.getpid() == process_id:
                    with contextlib.suppress(OSError):
                        os.unlink(temporary)
                raise


def _prefix_of(name: str) -> str:
    """Returns the text at the beginning of the names of all temporary files for a target.

    Args:
        name: name of the target, without its folder.
    """
    encoded = os.fsencode(name)
    # File names have at most 255 bytes, and that of a temporary file is longer than its target's. For a long name, its
    # digest stands.
    return f".{name if len(encoded) <= 200 else hashlib.sha256(encoded).hexdigest()}."


def _target_of(user_path: str) -> str:
    """Returns the path to write to: absolute, with symbolic links resolved.

    It is absolute because the current folder may change before the end. If the absolute path, or that of a
    temporary file beside it, is too long for the system, returns the user's path, which may be shorter. But for a
    symbolic link it returns the absolute path anyway: the new file would replace the link.
    """
    target = os.path.realpath(user_path)
    if not _is_too_long(_longest_path_needed(target)) or os.path.islink(user_path):
        return target
    return user_path


def _longest_path_needed(target: str) -> str:
    """Returns the longer of two paths: the target, and a temporary file beside it."""
    folder, name = os.path.split(target)
    return max(os.path.join(folder, _prefix_of(name) + "0" * _RANDOM_DIGITS + _SUFFIX), target, key=len)


def _is_too_long(path: str) -> bool:
    """Returns True if a path is too long for the system. The path need not exist."""
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno == errno.ENAMETOOLONG
    return False


# ---- Permissions of the file to be replaced; and whether it can be replaced at all ----


def _mode_of(target: str, user_path: str) -> int | None:
    """Returns the permissions of the file to be replaced; None if the file does not exist, but can be made.

    Args:
        target: the path to write to.
        user_path: the user's path, for errors.

    Raises:
        OSError: if there is a folder, a device or a pipe, if the folder is missing, or if the path is too long. The
            text says what to do.
    """
    shown, (folder, name) = printable(user_path), os.path.split(target)
    if _is_too_long(_longest_path_needed(target)):
        raise OSError(errno.ENAMETOOLONG, _too_long_text(folder, name), user_path)
    try:
        # The user's path, and not `target`: `/dev/stdout` may lead to a pipe or to a file without a name, and then
        # the resolved path leads nowhere.
        mode = os.stat(user_path or os.curdir).st_mode
    except OSError:
        mode = None
    is_folder = mode is not None and stat.S_ISDIR(mode)
    # A path that ends as "models/", "models/." or "models/.." can only be that of a folder.
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
            f'    open({user_path!r}, "wb")\nFile'
        )
        raise OSError(errno.EINVAL, message, user_path)
    # `/dev/stdout` may lead to a file that was removed, and is "/tmp/out (deleted)" then. But a file may as well be
    # called so.
    if target.endswith(_DELETED) and not user_path.endswith(_DELETED) and not _is_same(user_path, target):
        fact = f"`{shown}` is a file that was deleted, so no new file can take its place."
        raise OSError(errno.EINVAL, f"{fact} {_advice_to_write_into(user_path)}\nFile", user_path)
    return mode & 0o777


# Linux adds this to the former path of an open file that was removed.
_DELETED = " (deleted)"


def _is_same(path: str, other: str) -> bool:
    """Returns True if two paths lead to the same file; False if one of them leads nowhere."""
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False


def _require_folder(folder: str, name: str, user_path: str) -> None:
    """Raises `OSError` unless the folder for a new file exists. The text mostly says what to do.

    Args:
        folder: the folder.
        name: name of the file.
        user_path: the user's path of the file, for errors.

    Raises:
        NotADirectoryError: if the folder's path leads to a file, or through one.
        FileNotFoundError: if the folder does not exist.
        OSError: if the system raises anything else for the folder, for example because it may not be entered.
    """
    shown = printable(user_path)
    try:
        if stat.S_ISDIR(os.stat(folder).st_mode):
            return
        error_number = errno.ENOTDIR
    except OSError as error:
        error_number = error.errno or errno.ENOENT
    # There is a file in place of the folder, or of one above it.
    if error_number == errno.ENOTDIR:
        obstacle = folder
        while not os.path.exists(obstacle):
            obstacle = os.path.dirname(obstacle)
        message = f"`{shown}` cannot be there: `{printable(obstacle)}` is a file, and no folder.\nFile"
        raise NotADirectoryError(error_number, message, obstacle)
    # This user may not enter the folder, or one above it.
    if error_number in (errno.EACCES, errno.EPERM):
        message = f"The folder of `{shown}` may not be entered. {_advice_to_save_at_home(name)}\nFile"
        raise OSError(error_number, message, user_path)
    if error_number != errno.ENOENT:
        raise OSError(error_number, os.strerror(error_number), folder)
    # The folder does not exist. Raises an error with other advice if the path begins with `~`.
    require_expanded(user_path)
    # The nearest folder above that exists. If it can be written to, the missing folders can be made in it.
    ancestor = os.path.dirname(folder)
    while ancestor and not os.path.exists(ancestor):
        ancestor = os.path.dirname(ancestor)
    can_be_made = os.access(ancestor or os.curdir, os.W_OK)
    fix = f"Make it:\n    os.makedirs({folder!r})" if can_be_made else _advice_to_save_at_home(name)
    raise FileNotFoundError(error_number, f"The folder of `{shown}` does not exist. {fix}\nMissing", folder)


def _advice_to_save_at_home(name: str) -> str:
    """Returns the advice to save a file of this name to the home folder."""
    path = os.path.join("~", name)
    return f"Save to a folder of your own:\n    sharedtree.save(os.path.expanduser({path!r}), model)"


def _advice_to_write_into(path: str) -> str:
    """Returns the advice to overwrite an existing file instead of replacing it."""
    return (
        "Overwrite the file itself. If that is interrupted, neither the old model nor the new one is left:\n"
        f'    with open({path!r}, "r+b") as file:\n'
        "        sharedtree.save(file, model)\n"
        "        file.truncate()"
    )


def _too_long_text(folder: str, name: str) -> str:
    """Returns the text of the error for a path that is too long, with the advice of the least change.

    Args:
        folder: folder of the target.
        name: name of the target.
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
    """Replaces an `OSError` about the temporary file, which the user does not know, by one about the target.

    Only errors that forbid to replace the target (`_FORBIDDEN`) are changed. Others are raised as they are.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FORBIDDEN:
            raise
        fact = f"`{printable(user_path)}` cannot be replaced: no file can be made in its folder ({error.strerror})."
        if not os.path.lexists(target):
            fact = f"`{printable(user_path)}` cannot be made in its folder ({error.strerror})."
        # Here it is the target and not the folder that does not allow it.
        if error.errno == errno.EBUSY:
            fact = f"`{printable(user_path)}` cannot be replaced: {error.strerror}."
        if os.path.isfile(target) and os.access(target, os.W_OK):
            fix = _advice_to_write_into(user_path)
        else:
            fix = _advice_to_save_at_home(os.path.basename(target))
        raise OSError(error.errno, f"{fact} {fix}\nFile", user_path) from None


def _remove_stale(folder: str, prefix: str) -> None:
    """Removes the stale temporary files of a target. If one cannot be removed, it stays, without an error.

    Args:
        folder: folder of the target.
        prefix: beginning of the names of its temporary files.
    """
    pattern = re.compile(re.escape(prefix) + f"[0-9a-f]{{{_RANDOM_DIGITS}}}" + re.escape(_SUFFIX))
    # A folder may be writable and not readable.
    with contextlib.suppress(OSError):
        for stale in filter(pattern.fullmatch, os.listdir(folder or os.curdir)):
            with contextlib.suppress(OSError):
                _remove_unless_locked(os.path.join(folder, stale))


def _remove_unless_locked(temporary: str) -> None:
    """Removes a temporary file. Raises `OSError` if a process holds its lock, or it cannot be removed."""
    if fcntl is None:
        # Windows does not remove an open file.
        os.unlink(temporary)
        return
    # The name may be that of a symbolic link or a pipe, which somebody put there. The flags keep `open` from following
    # the one and from waiting for the other.
    descriptor = os.open(temporary, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(temporary)
    finally:
        os.close(descriptor)


def force_to_disk(descriptor: int) -> None:
    """Forces the bytes of an open file to the disk. Returns once they are there."""
    # On macOS, `fsync` returns when the bytes are in the disk's cache. `F_FULLFSYNC` waits until they are on the disk.
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if fcntl is not None and full is not None:
        # If the file system does not know the command, `fsync` has to do.
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, full)
            return
    os.fsync(descriptor)


@contextlib.contextmanager
def _opened_folder(folder: str) -> Iterator[int | None]:
    """Yields a descriptor for forcing a folder to the disk; None if there is none.

    Open it before a file in the folder is replaced. Then, if opening raises, the old file is still there.
    """
    descriptor: int | None = None
    # Windows has no descriptors of folders.
    if hasattr(os, "O_DIRECTORY"):
        # A folder into which many users put files may be writable and not readable.
        with contextlib.suppress(PermissionError):
            descriptor = os.open(folder or os.curdir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _force_folder(descriptor: int) -> None:
    """Forces the entries of a folder to the disk, if its file system can."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Network file systems raise these for folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise


# ---- Writing: data is hashed while it is written, and the digests are patched into the header ----

# A manifest with more characters than this goes into a tensor.
MAX_INLINE_MANIFEST = 16 * 2**20
# For a file that cannot be patched, so many bytes are kept in memory. If there are more, a temporary file is used.
MAX_KEPT_IN_MEMORY = 8 * 2**20
# A tensor with fewer bytes than this is hashed sooner than it could be passed to another thread.
_WORTH_A_THREAD = 2**20


def write(
    file: BinaryIO,
    sources: Sequence[TensorSource],
    manifest: str,
    metadata: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    force: Callable[[int], None] | None = None,
) -> int:
    """Writes a container to any object with `write`, from its position on.

    In the end the position is behind the container. Buffers of the file object are not flushed.

    Args:
        file: the file object.
        sources: the tensors, in any order.
        manifest: text of the manifest. If it is longer than 16 MiB, it goes into a tensor.
        metadata: the user's texts.
        progress: called with the bytes done and the total.
        force: function that forces the bytes of a descriptor to the disk. It may be called before the digests are
            patched, to use the time while the second thread still hashes. It is not a promise: force the file to
            the disk again after the end.

    Returns:
        The number of bytes written.

    Raises:
        ValueError: if the header would be longer than safetensors allows (some 800,000 tensors), or a name or a text
            cannot be in it. Nothing was written.
        BlockingIOError: if a raw file in non-blocking mode takes no more bytes.
    """
    # 1. Lay out the header, with zeros for digests. A manifest too long for the header goes into a tensor.
    reserved_names = [printable(source.name) for source in sources if source.name.startswith("sharedtree.")]
    if reserved_names:
        raise ValueError(f"The tensor name `{reserved_names[0]}` is taken: those that begin with `sharedtree.` are.")
    # Pairs of a source and its number of bytes, in the order of the file.
    sized = sorted(((source, nbytes_of(source.dtype, source.shape)) for source in sources), key=_place_in_file)
    is_long = len(manifest) > MAX_INLINE_MANIFEST
    header = bytearray() if is_long else blank_header(sized, manifest, metadata or {})
    if is_long or len(header) > MAX_HEADER_BYTES:
        text = manifest.encode()
        # `"U8"` are bytes, with an alignment of 1.
        sized.append((TensorSource(MANIFEST_TENSOR, "U8", (len(text),), 1, lambda: [memoryview(text)]), len(text)))
        header = blank_header(sized, "tensor", metadata or {})
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(
            f"The header of {len(sources)} tensors would have {len(header)} bytes, and no safetensors file may have "
            f"more than {MAX_HEADER_BYTES}. Stack small arrays into larger ones:\n    jax.numpy.stack(arrays)"
        )
    # 2. If the header can be patched, the digests are computed while the data is written. Otherwise they come first.
    data_bytes = sum(nbytes for _, nbytes in sized)
    report = byte_counter(progress, data_bytes)
    start = file.tell() if _can_be_patched(file) else None
    with contextlib.ExitStack() as stack:
        # After an error, leaving the block ends the second thread.
        hasher = stack.enter_context(_Hasher())
        if start is not None:
            # A generator: nothing is hashed before it is written.
            data = (buffer for source, nbytes in sized for buffer in hasher.hash_and_yield(source, nbytes))
        else:
            # The bytes of arrays that may change, in the order of the file.
            kept = stack.enter_context(tempfile.SpooledTemporaryFile(MAX_KEPT_IN_MEMORY))
            for source, nbytes in sized:
                for buffer in hasher.hash_and_yield(source, nbytes):
                    if source.may_change:
                        kept.write(buffer)
            # Writes the digests into the header.
            seal(header, hasher.wait_for_digests())
            kept.seek(0)
            data = (buffer for source, nbytes in sized for buffer in _bytes_hashed_before(source, nbytes, kept))
        # 3. Write header and data.
        _write_all(file, memoryview(header))
        for buffer in _join_small_buffers(data):
            _write_all(file, memoryview(buffer))
            report(len(buffer))
        # While the second thread still hashes, the disk can work already.
        if start is not None and force is not None and hasher.is_behind():
            force(file.fileno())
        digests = hasher.wait_for_digests()
    # 4. Patch the digests into the header, and go to the end.
    if start is not None:
        changed = seal(header, digests)
        file.seek(start + changed.start)
        _write_all(file, memoryview(header)[changed])
        file.seek(start + len(header) + data_bytes)
    return len(header) + data_bytes


def _place_in_file(source_and_size: tuple[TensorSource, int]) -> int:
    """Returns the key for sorting tensors in the file.

    Tensors with a size divisible by 64 bytes come first. Others, and empty ones, follow by decreasing alignment.
    """
    source, nbytes = source_and_size
    return -ALIGNMENT if nbytes and nbytes % ALIGNMENT == 0 else -source.alignment


class _Hasher:
    """Computes the digests of tensors, in the order of the file. Large tensors are hashed on a second thread.

    Use it in a `with` statement: leaving the block ends the thread.
    """

    def __init__(self) -> None:
        # The digests of all chunks of the tensors so far. A digest is complete once all bytes of its chunk are hashed.
        self._digests: list[int] = []
        # The thread starts with the first buffer that is submitted.
        self._thread = ThreadPoolExecutor(1, "sharedtree-digest")
        # One future for each buffer that was submitted since `wait_for_digests` was last called.
        self._submitted: collections.deque[Future[None]] = collections.deque()
        # Those of them whose buffers are copies.
        self._copies: collections.deque[Future[None]] = collections.deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def hash_and_yield(self, source: TensorSource, nbytes: int) -> Iterator[Buffer]:
        """Yields the non-empty buffers of a tensor's bytes, and hashes each while the caller uses it.

        The caller writes the very buffers that are hashed. So the digests are right even if the array changes.

        Call it for each tensor in the order of the file, and exhaust it: the digests are appended to those of the
        tensors before.

        Args:
            source: the tensor.
            nbytes: its number of bytes.
        """
        first_digest, offset = len(self._digests), 0
        self._digests += [0] * num_chunks(nbytes)
        buffers = source.buffers()
        # For an array in the host's memory, a list holds views of it. All other buffers are copies.
        is_copied = not (source.is_here and isinstance(buffers, list))
        for buffer in filter(len, buffers):
            # A tensor this small is one chunk, and is hashed at once, on this thread.
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
            is_copied: True if the buffer is a copy of the array's bytes.
        """
        # A copy takes memory until it is hashed. So if three were submitted, wait for the oldest.
        if is_copied and len(self._copies) == 3:
            self._copies.popleft().result()
        try:
            future = self._thread.submit(_hash, self._digests, first_digest, offset, buffer)
        # While the interpreter shuts down, executors take no more work, and the system may allow no more threads. Then
        # this thread hashes, after the other.
        except RuntimeError:
            self.wait_for_digests()
            # If the thread could not be started, the executor has queued the work all the same. It would do it with the
            # next work for which a thread starts, and the buffer would be hashed twice. After `shutdown` it takes no
            # more.
            self._thread.shutdown(cancel_futures=True)
            _hash(self._digests, first_digest, offset, buffer)
            return
        self._submitted.append(future)
        if is_copied:
            self._copies.append(future)

    def is_behind(self) -> bool:
        """Returns True if the second thread still has something to hash."""
        return bool(self._submitted) and not self._submitted[-1].done()

    def wait_for_digests(self) -> list[int]:
        """Waits until everything is hashed. Returns the digests of all chunks, in the order of the file.

        If hashing has raised an error on the second thread, raises it here.
        """
        while self._submitted:
            self._submitted.popleft().result()
        return self._digests


def _hash(digests: list[int], first_digest: int, offset: int, buffer: Buffer) -> None:
    """Updates the digests of a tensor with some more of its bytes, which follow those before.

    Args:
        digests: digests of all tensors. Changed in place.
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


# ---- The bytes that are written are those that were hashed ----


def _bytes_hashed_before(source: TensorSource, nbytes: int, kept: IO[bytes]) -> Iterable[Buffer]:
    """Returns the bytes of a tensor once more, after they were hashed.

    If the array cannot change, they come from the array again. Otherwise they are read from the file of kept bytes.

    Args:
        source: the tensor.
        nbytes: its number of bytes.
        kept: the kept bytes of all arrays that may change. Its position is at this tensor's first byte.
    """
    if not source.may_change:
        return source.buffers()
    sizes = (min(CHUNK_BYTES, nbytes - start) for start in range(0, nbytes, CHUNK_BYTES))
    return map(kept.read, sizes)


def _join_small_buffers(buffers: Iterable[Buffer]) -> Iterator[Buffer | bytearray]:
    """Yields the same bytes in the same order, with buffers below 64 KiB joined into larger ones.

    A call of `write` takes about as much time as writing 64 KiB.
    """
    joined = bytearray()
    for buffer in buffers:
        if len(buffer) < SMALL:
            joined += buffer
        # The joined bytes are yielded once there are 64 KiB of them, and also before a large buffer.
        if joined and (len(joined) >= SMALL or len(buffer) >= SMALL):
            yield joined
            # The file object may keep a view of the buffer, so it is not cleared but replaced.
            joined = bytearray()
        # A large buffer is yielded without a copy.
        if len(buffer) >= SMALL:
            yield buffer
    if joined:
        yield joined


def _can_be_patched(file: BinaryIO) -> bool:
    """Returns True if it is possible to go back in a file and overwrite bytes.

    Many objects say that they can seek, but cannot do this. So only files of the system and `BytesIO` count, and no
    file that is open for appending.
    """
    if type(file) is io.BytesIO:
        return True
    raw = file.raw if isinstance(file, io.BufferedWriter | io.BufferedRandom) else file
    if not isinstance(raw, io.FileIO) or not raw.seekable() or "a" in raw.mode:
        return False
    return fcntl is None or not fcntl.fcntl(raw.fileno(), fcntl.F_GETFL) & os.O_APPEND


def _write_all(file: BinaryIO, buffer: memoryview) -> None:
    """Writes a whole buffer, in as many calls as the file object needs.

    Raises:
        BlockingIOError: if a raw file in non-blocking mode takes no more bytes.
    """
    while len(buffer):
        written: int | None = file.write(buffer)
        # A raw file in non-blocking mode returns None if it can take nothing now. Other objects with a `write` may
        # return None though they have written everything.
        if written is None:
            if isinstance(file, io.RawIOBase):
                raise BlockingIOError("The file is in non-blocking mode and takes no more. Make it block:\n"
                                      "    os.set_blocking(file.fileno(), True)")  # fmt: skip
            return
        buffer = buffer[written:]
