"""Where the bytes of a file come from, the operating system, memory or any object with `read`; and how to read a part.

Files of the operating system are read at an offset, by any number of threads at once. Other objects that can seek are
read under a lock. What can only be read onwards is read into memory first: as much as arrives, whatever it says of
itself.
"""

import contextlib
import io
import itertools
import math
import mmap
import operator
import os
import stat
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import numpy as np

from ..._locks import Lock
from ..._printable import printable
from ...errors import CorruptFileError

Readable = str | os.PathLike[str] | BinaryIO | bytes | bytearray | memoryview
"""A path, a file object open for reading in binary mode, or what is in such a file."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""A flat array of uint8."""

ReadInto = Callable[[int, memoryview], None]
"""Fills a buffer with the bytes from an offset on."""


class Source:
    """The bytes of one file, from where it was positioned to its end; here of one that is in memory."""

    # If several threads cannot read at once, reads should go onwards through the file: compressed streams say that they
    # can seek, and start from the beginning to go back.
    is_concurrent = True

    def __init__(self, data: memoryview, label: str) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self._data.flags.writeable = False
        self.label = label  # what errors call it
        self.size = len(data)  # in bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills a buffer with the bytes from `offset` on; a `CorruptFileError` if the file has become shorter."""
        # NumPy lets go of the interpreter lock.
        np.copyto(np.frombuffer(buffer, np.uint8), self._data[offset : offset + len(buffer)])

    def read(self, offset: int, nbytes: int) -> bytearray:
        """Some bytes, fewer at the end of the file."""
        buffer = bytearray(max(0, min(nbytes, self.size - offset)))
        self.read_into(offset, memoryview(buffer))
        return buffer

    def mapped(self) -> Bytes:
        """All bytes as a read-only array that is not read before it is looked at."""
        return self._data

    def close(self) -> None:
        """Closes what `open_source` opened; a file that was given stays open."""


def open_source(where: Readable) -> Source:
    """The bytes of a path, of a file object that is in binary mode, from where it is positioned, or of a buffer."""
    if isinstance(where, bytes | bytearray | memoryview):
        return Source(memoryview(where).cast("B"), "<bytes>")
    if isinstance(where, str | os.PathLike):
        file = open(where, "rb", buffering=0)  # noqa: SIM115  closed with the source, or below
        try:
            return _of_file(file, printable(str(os.fspath(where))), owned=True)
        except BaseException:
            file.close()
            raise
    if isinstance(where, io.TextIOBase) or not hasattr(where, "read"):
        raise TypeError(
            f"`{type(where).__qualname__}` is not a path, nor a file open for reading in binary mode, nor bytes.\n"
            'Open a file with:\n    open(path, "rb")'
        )
    name = getattr(where, "name", None)
    return _of_file(where, printable(name if isinstance(name, str) else f"<{type(where).__name__}>"), owned=False)


def _of_file(file: BinaryIO, label: str, *, owned: bool) -> Source:
    if type(file) is io.BytesIO:
        # Not `getbuffer`, which would keep the caller from closing the file. CPython copies nothing here either.
        return Source(memoryview(file.getvalue())[file.tell() :], label)
    raw = file.raw if isinstance(file, io.BufferedReader | io.BufferedRandom) else file
    if isinstance(raw, io.FileIO) and stat.S_ISREG(os.fstat(raw.fileno()).st_mode) and hasattr(os, "preadv"):
        if isinstance(file, io.BufferedRandom):
            file.flush()
        return _File(file, label, owned)
    if hasattr(file, "seekable") and file.seekable():
        return _Seeking(file, label, owned)
    everything = io.BytesIO()
    while part := file.read(2**20):
        everything.write(part)
    if owned:
        file.close()
    return Source(everything.getbuffer(), label)


class _Seeking(Source):
    """Any object that can seek. Nothing else may move it meanwhile."""

    is_concurrent = False

    def __init__(self, file: BinaryIO, label: str, owned: bool) -> None:
        self._file, self._owned, self.label = file, owned, label
        self._lock: Any = Lock()
        self._start = file.tell()
        file.seek(0, io.SEEK_END)
        self.size = max(0, file.tell() - self._start)
        file.seek(self._start)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        at = self._start + offset
        with self._lock:
            while len(buffer):
                count = self._read_some(at, buffer)
                if not count:
                    raise CorruptFileError(
                        f"`{self.label}` ended before its {self.size} bytes were read: something is cutting it short "
                        "meanwhile.\nLoad it again once nothing writes to it."
                    )
                buffer = buffer[count:]
                at += count

    def _read_some(self, at: int, buffer: memoryview) -> int:
        self._file.seek(at)
        if hasattr(self._file, "readinto"):
            return self._file.readinto(buffer)  # type: ignore[attr-defined]
        part = self._file.read(len(buffer))
        buffer[: len(part)] = part
        return len(part)

    def mapped(self) -> Bytes:
        return Source(memoryview(self.read(0, self.size)), self.label).mapped()

    def close(self) -> None:
        if self._owned:
            self._file.close()


class _File(_Seeking):
    """A regular file of the operating system. Its position is not moved, so that many threads may open it at once."""

    is_concurrent = True

    def __init__(self, file: BinaryIO, label: str, owned: bool) -> None:
        self._file, self._owned, self.label = file, owned, label
        self._lock = contextlib.nullcontext()
        self._start = file.tell()
        self.size = max(0, os.fstat(file.fileno()).st_size - self._start)

    def _read_some(self, at: int, buffer: memoryview) -> int:
        return os.preadv(self._file.fileno(), [buffer], at)

    def mapped(self) -> Bytes:
        # The array keeps the map alive, and the map its own descriptor.
        everything = mmap.mmap(self._file.fileno(), self._start + self.size, access=mmap.ACCESS_READ)
        return np.frombuffer(everything, np.uint8)[self._start :]


def read_part(
    read_into: ReadInto, shape: Sequence[int], item_size: int, wanted: Sequence[range], memory: Bytes
) -> None:
    """Fills `memory` with a part of a tensor: the positions `wanted` along each axis, in C order, run by run."""
    if not len(memory):
        return
    # Axes of size 1 tell nothing apart. The bytes of an item are one more axis.
    axes = [(size, positions) for size, positions in zip(shape, wanted, strict=True) if size != 1]
    sizes, ranges = zip(*axes, (item_size, range(item_size)), strict=True)
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    # The innermost axis of which not all is wanted: inside one of its steps, or of many in a row, there are no gaps.
    axis = max((axis for axis, size in enumerate(sizes) if len(ranges[axis]) < size), default=0)
    at_once = len(ranges[axis]) if ranges[axis].step == 1 else 1
    done, nbytes, buffer = 0, at_once * strides[axis], memoryview(memory)
    for positions in itertools.product(*ranges[:axis], ranges[axis][::at_once]):
        read_into(sum(map(operator.mul, positions, strides)), buffer[done : done + nbytes])
        done += nbytes
