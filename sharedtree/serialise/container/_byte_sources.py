"""Sources of a file's bytes: the operating system, memory or any object with `read`; and reading a part of a tensor.

Files of the operating system are read at an offset, by any number of threads at once. Other objects that can seek are
read under a lock. A stream that can only be read onwards is read into memory, no further than somebody asks: its header
is judged before the rest is read, which may never end.

Data is read in chunks of 4 MiB. Each has a digest, threads share them out, and progress is reported. A digest is
the CRC-32 of a chunk. It finds what disks, networks and copies do to a file, not a forger, who writes the digest too.
CRC-32 is what the standard library has that is about as fast as memory is copied. It finds every single flipped bit,
every burst of up to 32 bits, and all else but one change in 2³². Reading, writing and the digest all let go of the
interpreter lock, so two threads suffice to hide one behind another. Where zlib-ng is installed, which computes the same
several times faster, as the extra `fast` has it, its function is used.
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

try:
    from zlib_ng.zlib_ng import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

CHUNK_BYTES = 4 * 2**20
"""Size of the chunks that have digests. It is part of the format."""

# ---- Chunks, threads and progress ----

SMALL = 64 * 2**10
"""Tensors below this are read and written together with their neighbours: a call costs about as much as their bytes."""

Progress = Callable[[int, int], Any]
"""Called with the bytes done and the bytes in all, perhaps on another thread, but never twice at once."""

ProgressOption = Progress | Literal[True] | None
"""A function (bytes done, bytes in all), True for a bar in the terminal, or None."""


def num_chunks(nbytes: int) -> int:
    """Number of chunks, and so of digests, of a tensor."""
    return -(-nbytes // CHUNK_BYTES)


def run_jobs(jobs: Iterable[Callable[[], None]], num_threads: int | None = None) -> None:
    """Runs independent jobs on several threads. The caller's thread is one of them.

    After an error no more jobs are started, and all threads end before the first error is raised.

    Args:
        jobs: is advanced by one thread at a time.
        num_threads: None for one a core, at most four.
    """
    # One thread for each core that this process may use. Past four, memory is the limit.
    if num_threads is None:
        num_threads = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    remaining_jobs, errors, lock = iter(jobs), list[BaseException](), threading.Lock()

    def work() -> None:
        """Runs jobs until there are none or one has failed."""
        try:
            while not errors:
                # Generators may not be advanced by two threads at once.
                with lock:
                    job = next(remaining_jobs, None)
                if job is None:
                    return
                job()
        # Raised again on the caller's thread.
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, name=f"sharedtree-read-{i}") for i in range(1, num_threads)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def byte_counter(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Returns a function to call with the bytes just done, from any thread. It calls `progress` with the totals.

    It raises in a process forked by `progress`: the threads for reading and hashing are not there, and it would write
    into its parent's file.
    """
    done, lock, process_id = 0, threading.Lock(), os.getpid()

    def report(nbytes: int) -> None:
        """Adds the bytes just done."""
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
    """Yields the function to call with the progress, and shows a bar meanwhile if the user asked for one.

    Args:
        progress: the user's option.
        title: of the bar.
    """
    if progress is not None and progress is not True and not callable(progress):
        raise TypeError(
            f"`progress` is {progress!r}. Give True for a bar, or a function, or leave it out:\n"
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
            bar.update(done - bar.n)

        yield report


# ---- Sources: pipes are opened once, and nothing is allocated beyond the file's size ----

Readable = str | os.PathLike[str] | BinaryIO | bytes | bytearray | memoryview
"""A path, a file object open for reading in binary mode, or what is in such a file."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""A flat array of uint8."""

ReadInto = Callable[[int, memoryview], None]
"""Fills a buffer with the bytes from an offset on."""


class Source:
    """Bytes of one file, from where it was positioned to its end. This class has those of a file in memory.

    Attributes:
        label: name of the file, for errors.
    """

    # True if several threads may read at once. Otherwise reads should go onwards through the file: compressed streams
    # say that they can seek, and start from the beginning to go back.
    is_concurrent = True

    # True if the size is known without reading the whole file.
    size_is_known = True

    def __init__(self, data: memoryview, label: str) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self._data.flags.writeable = False
        self.label = label
        self._size = len(data)

    @property
    def size(self) -> int:
        """Number of bytes. A stream is read to its end for it."""
        return self._size

    def size_up_to(self, most: int) -> int:
        """Returns the size; or, if it is larger than `most`, any number above that. A stream is read no further."""
        return self.size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills a buffer with the bytes from `offset` on.

        Raises:
            CorruptFileError: if the file has become shorter meanwhile.
        """
        # A copy by NumPy releases the interpreter lock; a slice assignment does not.
        np.copyto(np.frombuffer(buffer, np.uint8), self._data[offset : offset + len(buffer)])

    def read(self, offset: int, nbytes: int) -> bytearray:
        """Returns up to `nbytes` bytes from `offset` on. At the end of the file there are fewer."""
        # A header may ask for any number of bytes, and no more are allocated than the file has.
        nbytes = max(0, min(nbytes, self.size_up_to(offset + nbytes) - offset))
        try:
            buffer = bytearray(nbytes)
        except MemoryError:
            raise MemoryError(f"`{self.label}`: this machine does not have the memory for {nbytes:,} bytes.") from None
        self.read_into(offset, memoryview(buffer))
        return buffer

    def map_bytes(self) -> Bytes:
        """Returns all bytes as a read-only array. If possible, they are not read before they are used."""
        return self._data

    def close(self) -> None:
        """Closes the file if `open_source` opened it. A user's file object stays open."""


def open_source(location: Readable) -> Source:
    """Opens a path, a file object in binary mode, from where it is positioned, or a buffer."""
    if isinstance(location, bytes | bytearray | memoryview):
        return Source(memoryview(location).cast("B"), "<bytes>")
    if isinstance(location, str | os.PathLike):
        try:
            # It is closed with the source, or below. A pipe could not be opened a second time.
            file = open(location, "rb", buffering=0)  # noqa: SIM115
        except FileNotFoundError:
            require_expanded(os.fsdecode(location))
            raise
        try:
            return _of_file(file, printable(os.fsdecode(location)), owned=True)
        except BaseException:
            file.close()
            raise
    if isinstance(location, io.TextIOBase) or not hasattr(location, "read"):
        raise TypeError(
            f"`{type(location).__qualname__}` is not a path, nor a file open for reading in binary mode, nor bytes.\n"
            'Open a file with:\n    open(path, "rb")'
        )
    name = getattr(location, "name", None)
    return _of_file(location, printable(name if isinstance(name, str) else f"<{type(location).__name__}>"), owned=False)


def require_expanded(path: str) -> None:
    """Raises `FileNotFoundError` if a missing path begins with `~`. Shells replace that, Python does not."""
    expanded = os.path.expanduser(path)
    if expanded != path:
        message = (
            f"`{printable(path)}` begins with `~`, which stands for a home folder in a shell, and in Python only if "
            f"you say so:\n    path = os.path.expanduser({path!r})\nThere is no"
        )
        raise FileNotFoundError(errno.ENOENT, message, path)


def _of_file(file: BinaryIO, label: str, *, owned: bool) -> Source:
    """Returns the source for a file object: in memory, of the operating system, seekable, or a stream."""
    if type(file) is io.BytesIO:
        # `getbuffer` would keep the caller from closing the file. CPython's `getvalue` copies nothing either.
        return Source(memoryview(file.getvalue())[file.tell() :], label)
    raw = file.raw if isinstance(file, io.BufferedReader | io.BufferedRandom) else file
    if isinstance(raw, io.FileIO) and stat.S_ISREG(os.fstat(raw.fileno()).st_mode) and hasattr(os, "preadv"):
        if isinstance(file, io.BufferedRandom):
            file.flush()
        return _File(file, label, owned)
    if hasattr(file, "seekable") and file.seekable():
        return _Seeking(file, label, owned)
    return _Stream(file, label, owned)


class _Stream(Source):
    """A stream without a position, like a pipe. It keeps the bytes read so far."""

    is_concurrent = False
    size_is_known = False

    def __init__(self, file: BinaryIO, label: str, owned: bool) -> None:
        self._file, self._owned, self.label = file, owned, label
        self._kept, self._is_at_end = bytearray(), False

    @property
    def size(self) -> int:
        while not self._is_at_end:
            self._read_on(2**20)
        return len(self._kept)

    def size_up_to(self, most: int) -> int:
        while len(self._kept) <= most and not self._is_at_end:
            # One byte more than `most` shows that there are more.
            self._read_on(min(most + 1 - len(self._kept), 2**20))
        return len(self._kept)

    def _read_on(self, nbytes: int) -> None:
        """Reads some more bytes. Raises `BlockingIOError` or `MemoryError` with the name of the file."""
        part: bytes | None = self._file.read(nbytes)
        if part is None:
            raise BlockingIOError(
                f"`{self.label}` is in non-blocking mode and has no more bytes yet. Make it block:\n"
                "    os.set_blocking(file.fileno(), True)"
            )
        self._is_at_end = not part
        try:
            self._kept += part
        except MemoryError:
            count = len(self._kept)
            raise MemoryError(f"`{self.label}` goes on after {count:,} bytes, which fill the memory.") from None

    def read_into(self, offset: int, buffer: memoryview) -> None:
        num_available = self.size_up_to(offset + len(buffer) - 1)
        if num_available < offset + len(buffer):
            raise CorruptFileError(f"`{self.label}` ended after {num_available} bytes: it was cut short.")
        np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(self._kept, np.uint8, len(buffer), offset))

    def map_bytes(self) -> Bytes:
        nbytes = self.size
        return Source(memoryview(self._kept)[:nbytes], self.label).map_bytes()

    def close(self) -> None:
        if self._owned:
            self._file.close()


class _Seeking(Source):
    """Any object that can seek. Nothing else may move its position meanwhile."""

    is_concurrent = False

    def __init__(self, file: BinaryIO, label: str, owned: bool) -> None:
        self._file, self._owned, self.label = file, owned, label
        self._lock: Any = Lock()
        self._start = file.tell()
        file.seek(0, io.SEEK_END)
        self._size = max(0, file.tell() - self._start)
        file.seek(self._start)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        # Reads may be short, and the position is shared, hence the loop and the lock.
        at = self._start + offset
        with self._lock:
            while len(buffer):
                count = self._read_some(at, buffer)
                if not count:
                    raise self._cut_short()
                buffer = buffer[count:]
                at += count

    def _cut_short(self) -> CorruptFileError:
        return CorruptFileError(
            f"`{self.label}` ended before its {self.size} bytes were read: something is cutting it short meanwhile.\n"
            "Load it again once nothing writes to it."
        )

    def _read_some(self, at: int, buffer: memoryview) -> int:
        """Reads at most as many bytes as the buffer has. Returns how many."""
        self._file.seek(at)
        if hasattr(self._file, "readinto"):
            return self._file.readinto(buffer)  # type: ignore[attr-defined]
        part = self._file.read(len(buffer))
        buffer[: len(part)] = part
        return len(part)

    def map_bytes(self) -> Bytes:
        return Source(memoryview(self.read(0, self.size)), self.label).map_bytes()

    def close(self) -> None:
        if self._owned:
            self._file.close()


class _File(_Seeking):
    """A regular file of the operating system. Its position is not moved, so many threads may load from it at once."""

    is_concurrent = True

    def __init__(self, file: BinaryIO, label: str, owned: bool) -> None:
        self._file, self._owned, self.label = file, owned, label
        self._lock = contextlib.nullcontext()
        self._start = file.tell()
        self._size = max(0, os.fstat(file.fileno()).st_size - self._start)

    def _read_some(self, at: int, buffer: memoryview) -> int:
        return os.preadv(self._file.fileno(), [buffer], at)

    def map_bytes(self) -> Bytes:
        # The array keeps the map alive, and the map its own descriptor.
        try:
            mapping = map_file(self._file.fileno(), self._start + self.size)
        # The file has become shorter since it was opened.
        except ValueError:
            raise self._cut_short() from None
        return np.frombuffer(mapping, np.uint8)[self._start :]


# ---- Only the selected part where asked ----


def read_part(
    read_into: ReadInto, shape: Sequence[int], item_size: int, selected: Sequence[range], memory: Bytes
) -> None:
    """Reads a part of a tensor into memory, in C order, run by run.

    Args:
        read_into: reads bytes of the tensor.
        shape: the stored shape.
        item_size: bytes of an item.
        selected: the positions along each axis.
        memory: as large as the part.
    """
    if not len(memory):
        return
    # Axes of size 1 make no difference. The bytes of an item are one more axis.
    axes = [(size, positions) for size, positions in zip(shape, selected, strict=True) if size != 1]
    sizes, ranges = zip(*axes, (item_size, range(item_size)), strict=True)
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    # The strides are in bytes, since the last axis is that of the bytes of an item.
    # A run is one step, or many in a row, of the innermost axis that is not selected whole. It has no gaps.
    axis = max((axis for axis, size in enumerate(sizes) if len(ranges[axis]) < size), default=0)
    at_once = len(ranges[axis]) if ranges[axis].step == 1 else 1
    filled, nbytes, buffer = 0, at_once * strides[axis], memoryview(memory)
    for positions in itertools.product(*ranges[:axis], ranges[axis][::at_once]):
        # The offset of the run. `map` ends with the positions: along the axes inside the run, it begins at 0.
        read_into(sum(map(operator.mul, positions, strides)), buffer[filled : filled + nbytes])
        filled += nbytes
