"""Sources of a file's bytes: the operating system, memory or any object with `read`; and reading a part of a tensor.

Files of the operating system are read at an offset, by any number of threads at once. Other objects that can seek are
read under a lock. A stream that can only be read onwards is read into memory, and no further than a caller asks for.
A stream may never end, so its header is checked before the rest is read.

Data is read in chunks of 4 MiB. Each chunk has a digest, its CRC-32. Threads read different chunks, and progress is
reported after each. The digest finds damage by disks, networks and copies. It stops no forger, who can write a new
digest. CRC-32 is in the standard library, and takes about as long as copying the bytes. It finds every single flipped
bit, every burst of up to 32 bits, and all other changes except one in 2³². Reading, writing and CRC-32 all release the
interpreter lock, so with two threads one can hash while the other reads or writes. If zlib-ng is installed (the extra
`fast`), its function is used: it computes the same digest several times faster.

Words: an *offset* counts bytes from the beginning of a source. A source begins where the file object was positioned
when it was opened, so offset 0 may lie inside the file.
"""

import contextlib
import errno
import io
import itertools
import math
import operator
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, Literal

import numpy as np

from ...core._errors import CorruptFileError
from ...core._locks import Lock
from ...core._printing import printable
from ._mapped_files import map_file

# Other files import `crc32` from here.
try:
    from zlib_ng.zlib_ng import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

CHUNK_BYTES = 4 * 2**20
"""Size of the chunks that have digests. It is part of the format."""

# ---- Chunks, threads and progress ----

SMALL = 64 * 2**10
"""Tensors of fewer bytes than this (64 KiB) are read and written together with their neighbours.

One call of `read` or `write` takes about as long as copying so many bytes.
"""

Progress = Callable[[int, int], Any]
"""Function called with the bytes done and the total, perhaps on another thread, but never twice at once."""

ProgressOption = Progress | Literal[True] | None
"""The user's option: a function (bytes done, total), True for a bar in the terminal, or None for no report."""


def num_chunks(nbytes: int) -> int:
    """Returns the number of chunks of a tensor with so many bytes. Each chunk has one digest."""
    # Division rounded up.
    return -(-nbytes // CHUNK_BYTES)


def run_jobs(jobs: Iterable[Callable[[], None]], num_threads: int | None = None) -> None:
    """Runs independent jobs on several threads. The caller's thread is one of them.

    If a job or the iterator raises, no more jobs are started. Once all threads have ended, the first error is raised
    on the caller's thread. If the system allows no more threads, those that there are do the jobs.

    Args:
        jobs: functions to call once each. The iterator is only advanced by one thread at a time.
        num_threads: number of threads, with the caller's. If None, one for each core that this process may use, and
            at most four.
    """
    if num_threads is None:
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
        # With more than four threads, memory is the limit.
        num_threads = min(4, num_cores)
    remaining_jobs, errors, lock = iter(jobs), list[BaseException](), threading.Lock()

    def work() -> None:
        """Runs jobs until none remains or some thread has recorded an error."""
        try:
            while not errors:
                # Generators may not be advanced by two threads at once.
                with lock:
                    job = next(remaining_jobs, None)
                if job is None:
                    return
                job()
        # `run_jobs` raises it on the caller's thread.
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads: list[threading.Thread] = []
    for i in range(1, num_threads):
        thread = threading.Thread(target=work, name=f"sharedtree-read-{i}")
        # `start` raises this if the system allows no more threads, and while the interpreter shuts down.
        try:
            thread.start()
        except RuntimeError:
            break
        threads.append(thread)
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def byte_counter(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Returns a function for counting bytes. It may be called from any thread, with the number of bytes just done.

    It calls `progress` with the number of bytes done so far and `total`. Without `progress` it does nothing.

    It raises `RuntimeError` in a process that `progress` has forked. Such a child lacks the threads that read and hash,
    and would go on writing into its parent's file.
    """
    done, lock, process_id = 0, threading.Lock(), os.getpid()

    def report(nbytes: int) -> None:
        """Adds to the bytes done, and calls `progress`."""
        nonlocal done
        if progress is not None:
            with lock:
                done += nbytes
                progress(done, total)
            if os.getpid() != process_id:
                raise RuntimeError(
                    "`progress` forked this process, and its parent goes on with what it is doing. End the child in "
                    "`progress`, with `os._exit`, or start it before."
                )

    return report


@contextlib.contextmanager
def progress_reporter(progress: ProgressOption, title: str) -> Iterator[Progress | None]:
    """Yields the function for reporting progress, or None if there is nothing to report.

    If the user asked for a bar, it is shown until the `with` block ends.

    Args:
        progress: the user's option.
        title: title of the bar.

    Raises:
        TypeError: if the option is neither callable nor True nor None.
        ImportError: if a bar is asked for and tqdm is not installed.
    """
    if progress is not None and progress is not True and not callable(progress):
        raise TypeError(
            f"`progress` is {progress!r}. It must be True, for a bar, or a function:\n"
            "    progress = lambda done, total: print(done, total)"
        )
    if progress is not True:
        yield progress
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise ImportError(
            "A progress bar needs tqdm:\n    pip install tqdm\nOr pass a function: progress=lambda done, total: ..."
        ) from None
    with tqdm(desc=title, unit="B", unit_scale=True, unit_divisor=1024) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            # tqdm takes the increase, not the sum.
            bar.update(done - bar.n)

        yield report


# ---- Sources: pipes are opened once, and nothing is allocated beyond the file's size ----

Readable = str | os.PathLike[str] | BinaryIO | bytes | bytearray | memoryview
"""A path, a file object open for reading in binary mode, or the contents of a file."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""A flat array of uint8."""

ReadInto = Callable[[int, memoryview], None]
"""Function (offset, buffer) that fills the whole buffer with the bytes from that offset on."""


class Source:
    """The bytes of one file, from its position when it was opened to its end.

    This class serves bytes in memory. Its subclasses serve streams, seekable objects, and files of the system.

    Attributes:
        label: name of the file, for errors.
    """

    # True if several threads may read at once. If False, callers should read in order of offset: a compressed stream
    # says that it can seek, but to go back it decompresses everything again from the beginning.
    is_concurrent = True

    # True if the size is known before the whole file is read.
    size_is_known = True

    def __init__(self, data: memoryview, label: str) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self._data.flags.writeable = False
        self.label = label
        self._size = len(data)

    @property
    def size(self) -> int:
        """Number of bytes. To find it, a stream is read to its end."""
        return self._size

    def size_up_to(self, most: int) -> int:
        """Returns the size if it is at most `most`, otherwise any number above `most`.

        This is enough to learn whether the file is longer than `most`. For it, a stream is read up to one byte further
        than `most`, not to its end.
        """
        return self.size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills a buffer with the bytes from `offset` on.

        Raises:
            CorruptFileError: if the file ends before the buffer is full.
        """
        # A copy by NumPy releases the interpreter lock; a slice assignment does not.
        np.copyto(np.frombuffer(buffer, np.uint8), self._data[offset : offset + len(buffer)])

    def read(self, offset: int, nbytes: int) -> bytearray:
        """Returns `nbytes` bytes from `offset` on, or fewer if the file ends before.

        Raises:
            MemoryError: if there is no memory for the bytes. The error has the file's name.
            CorruptFileError: if the file became shorter meanwhile, as for `read_into`.
        """
        # `nbytes` may come from a damaged header. So no more is allocated than the file has.
        nbytes = max(0, min(nbytes, self.size_up_to(offset + nbytes) - offset))
        try:
            buffer = bytearray(nbytes)
        except MemoryError:
            raise MemoryError(f"`{self.label}`: this machine does not have the memory for {nbytes:,} bytes.") from None
        self.read_into(offset, memoryview(buffer))
        return buffer

    def map_bytes(self) -> Bytes:
        """Returns all bytes as a read-only array.

        A file of the system is mapped into memory, so its bytes are read when they are used. Others are read now.
        """
        return self._data

    def close(self) -> None:
        """Closes the file if `open_source` opened it from a path. A user's file object stays open."""


def open_source(location: Readable) -> Source:
    """Returns the source for a path, a buffer, or a binary file object. A file object is read from its position on.

    Raises:
        TypeError: if the location is none of these.
        OSError: if the file does not exist, or it cannot be opened.
    """
    if isinstance(location, bytes | bytearray | memoryview):
        return Source(memoryview(location).cast("B"), "<bytes>")
    if isinstance(location, str | os.PathLike):
        try:
            # The file is closed by `Source.close`, or below after an error. It is opened just once, since the bytes
            # that were read from a pipe are gone.
            file = open(location, "rb", buffering=0)  # noqa: SIM115
        except FileNotFoundError:
            require_expanded(os.fsdecode(location))
            raise
        try:
            return _source_of_file(file, printable(os.fsdecode(location)), is_owner=True)
        except BaseException:
            file.close()
            raise
    if isinstance(location, io.TextIOBase) or not hasattr(location, "read"):
        raise TypeError(
            f"`{type(location).__qualname__}` is not a path, nor a file open for reading in binary mode, nor bytes.\n"
            'Open a file with:\n    open(path, "rb")'
        )
    name = getattr(location, "name", None)
    # The `name` of a file opened by its descriptor is a number.
    label = printable(name if isinstance(name, str) else f"<{type(location).__name__}>")
    return _source_of_file(location, label, is_owner=False)


def require_expanded(path: str) -> None:
    """Raises `FileNotFoundError` with advice if a missing path begins with `~`, as in `~/model.safetensors`.

    A shell replaces `~` by the home folder, and Python does not. Does nothing for other paths, and does not look at
    the disk. So call it only for a missing path.
    """
    expanded = os.path.expanduser(path)
    if expanded != path:
        message = (
            f"`{printable(path)}` begins with `~`, which stands for a home folder in a shell, and in Python only if "
            f"you say so:\n    path = os.path.expanduser({path!r})\nThere is no"
        )
        # `OSError` appends `: 'path'` to its text, hence the open end "There is no".
        raise FileNotFoundError(errno.ENOENT, message, path)


def _source_of_file(file: BinaryIO, label: str, *, is_owner: bool) -> Source:
    """Returns the source for a file object: in memory, of the operating system, seekable, or a stream.

    Args:
        file: the file object.
        label: its name, for errors.
        is_owner: True if closing the source closes the file.
    """
    if type(file) is io.BytesIO:
        # `getbuffer` would keep the caller from closing the file. CPython's `getvalue` copies nothing either.
        return Source(memoryview(file.getvalue())[file.tell() :], label)
    raw = file.raw if isinstance(file, io.BufferedReader | io.BufferedRandom) else file
    if isinstance(raw, io.FileIO) and stat.S_ISREG(os.fstat(raw.fileno()).st_mode) and hasattr(os, "preadv"):
        # The source reads past the buffer of the file object, so bytes written to the buffer must go to the file.
        if isinstance(file, io.BufferedRandom):
            file.flush()
        return _File(file, label, is_owner)
    if hasattr(file, "seekable") and file.seekable():
        return _Seekable(file, label, is_owner)
    return _Stream(file, label, is_owner)


class _Stream(Source):
    """A stream that cannot seek, like a pipe. All bytes read so far stay in memory, so any offset can be read."""

    is_concurrent = False
    size_is_known = False

    def __init__(self, file: BinaryIO, label: str, is_owner: bool) -> None:
        self._file, self._is_owner, self.label = file, is_owner, label
        self._bytes_so_far, self._is_at_end = bytearray(), False

    @property
    def size(self) -> int:
        while not self._is_at_end:
            self._read_on(2**20)
        return len(self._bytes_so_far)

    def size_up_to(self, most: int) -> int:
        while len(self._bytes_so_far) <= most and not self._is_at_end:
            # One byte after `most` shows that the stream is longer than `most`.
            self._read_on(min(most + 1 - len(self._bytes_so_far), 2**20))
        return len(self._bytes_so_far)

    def _read_on(self, nbytes: int) -> None:
        """Reads up to `nbytes` more bytes, and appends them to the bytes so far. Notices the end of the stream.

        Raises:
            BlockingIOError: if the stream does not block and has no bytes yet.
            MemoryError: if the bytes so far fill the memory.
        """
        part: bytes | None = self._file.read(nbytes)
        if part is None:
            raise BlockingIOError(
                f"`{self.label}` is in non-blocking mode and has no more bytes yet. Make it block:\n"
                "    os.set_blocking(file.fileno(), True)"
            )
        # An empty read is the end.
        self._is_at_end = not part
        try:
            self._bytes_so_far += part
        except MemoryError:
            count = len(self._bytes_so_far)
            raise MemoryError(f"`{self.label}` goes on after {count:,} bytes, which fill the memory.") from None

    def read_into(self, offset: int, buffer: memoryview) -> None:
        # Reads the stream on until the last byte of the buffer is there, or to the end.
        num_available = self.size_up_to(offset + len(buffer) - 1)
        if num_available < offset + len(buffer):
            raise CorruptFileError(f"`{self.label}` ended after {num_available} bytes: it was cut short.")
        np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(self._bytes_so_far, np.uint8, len(buffer), offset))

    def map_bytes(self) -> Bytes:
        nbytes = self.size
        return Source(memoryview(self._bytes_so_far)[:nbytes], self.label).map_bytes()

    def close(self) -> None:
        if self._is_owner:
            self._file.close()


class _Seekable(Source):
    """Any object that can seek. Nobody else may move its position while it is read."""

    is_concurrent = False

    def __init__(self, file: BinaryIO, label: str, is_owner: bool) -> None:
        self._file, self._is_owner, self.label = file, is_owner, label
        self._lock: Any = Lock()
        self._start = file.tell()
        file.seek(0, io.SEEK_END)
        self._size = max(0, file.tell() - self._start)
        file.seek(self._start)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        # A read may return fewer bytes than asked for, hence the loop. Threads share the position, hence the lock.
        position = self._start + offset
        with self._lock:
            while len(buffer):
                count = self._read_some(position, buffer)
                if not count:
                    raise self._cut_short_error()
                buffer = buffer[count:]
                position += count

    def _cut_short_error(self) -> CorruptFileError:
        """Returns the error for a file that has become shorter since it was opened."""
        return CorruptFileError(
            f"`{self.label}` ended before its {self.size} bytes were read: something is cutting it short meanwhile.\n"
            "Load it again once nothing writes to it."
        )

    def _read_some(self, position: int, buffer: memoryview) -> int:
        """Reads bytes at a position of the file into the beginning of a buffer.

        Returns:
            The number of bytes read, up to the length of the buffer; 0 at the end of the file.
        """
        self._file.seek(position)
        # Not every object with `read` has `readinto`, which saves a copy.
        if hasattr(self._file, "readinto"):
            return self._file.readinto(buffer)  # type: ignore[attr-defined]
        part = self._file.read(len(buffer))
        buffer[: len(part)] = part
        return len(part)

    def map_bytes(self) -> Bytes:
        return Source(memoryview(self.read(0, self.size)), self.label).map_bytes()

    def close(self) -> None:
        if self._is_owner:
            self._file.close()


class _File(_Seekable):
    """A regular file of the operating system. Reads leave its position alone, so threads can read it at once."""

    is_concurrent = True

    def __init__(self, file: BinaryIO, label: str, is_owner: bool) -> None:
        self._file, self._is_owner, self.label = file, is_owner, label
        # Unlike the base class, this one needs no lock.
        self._lock = contextlib.nullcontext()
        self._start = file.tell()
        self._size = max(0, os.fstat(file.fileno()).st_size - self._start)

    def _read_some(self, position: int, buffer: memoryview) -> int:
        return os.preadv(self._file.fileno(), [buffer], position)

    def map_bytes(self) -> Bytes:
        # The array keeps the mapping alive, and the mapping has a descriptor of its own. So the file may be closed.
        try:
            mapping = map_file(self._file.fileno(), self._start + self.size)
        # The file has become shorter since it was opened.
        except ValueError:
            raise self._cut_short_error() from None
        return np.frombuffer(mapping, np.uint8)[self._start :]


# ---- Reading a part of a tensor ----


def read_part(
    read_into: ReadInto, shape: Sequence[int], item_size: int, selected: Sequence[range], memory: Bytes
) -> None:
    """Reads a part of a tensor into memory, in C order.

    It is read run by run: a run is a stretch of the part without gaps in the file. For example, of a tensor (4, 5, 6),
    the part [1:3, 2:4, :] has two runs of 2 * 6 items each, at [1, 2:4] and [2, 2:4].

    Args:
        read_into: function (offset in the tensor, buffer) for filling the buffer.
        shape: the stored shape.
        item_size: size of an item in bytes.
        selected: the selected positions along each axis of `shape`.
        memory: the memory to fill. It has the size of the part.
    """
    if not len(memory):
        return
    # Axes of size 1 do not change an offset. The bytes of an item become one more axis, so that all sizes and strides
    # below are in bytes.
    axes = [(size, positions) for size, positions in zip(shape, selected, strict=True) if size != 1]
    sizes, ranges = zip(*axes, (item_size, range(item_size)), strict=True)
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    # The innermost axis that is not selected whole: everything inside it is read without gaps. If its positions follow
    # each other, a run spans all of them. If they are some steps apart, each position is a run.
    axis = max((axis for axis, size in enumerate(sizes) if len(ranges[axis]) < size), default=0)
    positions_in_run = len(ranges[axis]) if ranges[axis].step == 1 else 1
    filled, run_bytes, buffer = 0, positions_in_run * strides[axis], memoryview(memory)
    for first_positions in itertools.product(*ranges[:axis], ranges[axis][::positions_in_run]):
        # The offset of the run's first byte. There are positions up to `axis`, and more strides. `map` passes over the
        # further strides, since the run begins at position 0 along the axes inside it.
        read_into(sum(map(operator.mul, first_positions, strides)), buffer[filled : filled + run_bytes])
        filled += run_bytes
