"""Where the bytes of a file come from: the operating system, memory, or any object with `read`.

Files of the operating system are read at an offset, by any number of threads at once. Other objects that can seek are
read under a lock. What can only be read onwards is read into memory first: as much as arrives, whatever it says of
itself.
"""

import io
import mmap
import os
import stat
import threading
from abc import ABC, abstractmethod
from typing import Any, BinaryIO

import numpy as np

from ..._errors import CorruptFileError
from ..._printable import printable

Readable = str | os.PathLike[str] | BinaryIO | bytes | bytearray | memoryview
"""A path, a file object open for reading in binary mode, or what is in such a file."""

_STREAM_BYTES = 2**20  # read at a time from what cannot seek


class Source(ABC):
    """The bytes of one file, from where it was positioned to its end.

    Attributes:
        label: what errors call it.
        size: in bytes.
        is_concurrent: whether several threads can read at once. If not, reads should go onwards through the file:
            compressed streams say that they can seek, and start from the beginning to go back.
    """

    label: str
    size: int
    is_concurrent = True

    @abstractmethod
    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills a buffer with the bytes from `offset` on.

        Raises:
            CorruptFileError: if the file has become shorter.
        """

    @abstractmethod
    def mapped(self) -> np.ndarray[Any, Any]:
        """All bytes as a flat, read-only array of uint8 that is not read before it is looked at."""

    def close(self) -> None:
        """Closes what `open_source` opened; a file that was given stays open."""
        return

    def read(self, offset: int, nbytes: int) -> bytearray:
        """Some bytes, fewer at the end of the file."""
        buffer = bytearray(max(0, min(nbytes, self.size - offset)))
        self.read_into(offset, memoryview(buffer))
        return buffer

    def ended(self) -> CorruptFileError:
        return CorruptFileError(
            f"`{self.label}` ended before its {self.size} bytes were read: something is cutting it short meanwhile.\n"
            "Load it again once nothing writes to it."
        )


def open_source(where: Readable) -> Source:
    """The bytes of a path, a file object or a buffer.

    Raises:
        OSError: if a path cannot be opened.
        TypeError: if it is none of these, or the file object is not in binary mode.
    """
    if isinstance(where, bytes | bytearray | memoryview):
        return _Memory(memoryview(where).cast("B"), "<bytes>")
    if isinstance(where, str | os.PathLike):
        file = open(where, "rb", buffering=0)  # noqa: SIM115  closed with the source, or below
        try:
            return _of_file(file, str(os.fspath(where)), owned=True)
        except BaseException:
            file.close()
            raise
    if isinstance(where, io.TextIOBase) or not hasattr(where, "read"):
        raise TypeError(
            f"`{type(where).__qualname__}` is not a path, nor a file open for reading in binary mode, nor bytes.\n"
            'Open a file with:\n    open(path, "rb")'
        )
    name = getattr(where, "name", None)
    return _of_file(where, name if isinstance(name, str) else f"<{type(where).__name__}>", owned=False)


def _of_file(file: BinaryIO, label: str, *, owned: bool) -> Source:
    label = printable(label)
    if type(file) is io.BytesIO:
        # Not `getbuffer`, which would keep the caller from closing the file. CPython copies nothing here either.
        return _Memory(memoryview(file.getvalue())[file.tell() :], label)
    raw = file.raw if isinstance(file, io.BufferedReader | io.BufferedRandom) else file
    if isinstance(raw, io.FileIO) and stat.S_ISREG(os.fstat(raw.fileno()).st_mode):
        if isinstance(file, io.BufferedRandom):
            file.flush()
        if hasattr(os, "preadv"):
            return _File(file, label, owned)
    if _can_seek(file):
        return _Seeking(file, label, owned)
    everything = io.BytesIO()
    while part := file.read(_STREAM_BYTES):
        everything.write(part)
    if owned:
        file.close()
    return _Memory(everything.getbuffer(), label)


def _can_seek(file: BinaryIO) -> bool:
    seekable = getattr(file, "seekable", None)
    return seekable is not None and seekable()


class _Memory(Source):
    def __init__(self, data: memoryview, label: str) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self._data.flags.writeable = False
        self.label = label
        self.size = len(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        np.copyto(np.frombuffer(buffer, np.uint8), self._data[offset : offset + len(buffer)])

    def mapped(self) -> np.ndarray[Any, Any]:
        return self._data


class _File(Source):
    """A regular file of the operating system. Reads do not move its position."""

    def __init__(self, file: BinaryIO, label: str, owned: bool) -> None:
        self._file = file  # kept, so that the descriptor stays open
        self._owned = owned
        self._start = file.tell()
        self.label = label
        self.size = max(0, os.fstat(file.fileno()).st_size - self._start)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        descriptor, at = self._file.fileno(), self._start + offset
        while len(buffer):
            count = os.preadv(descriptor, [buffer], at)
            if count == 0:
                raise self.ended()
            buffer = buffer[count:]
            at += count

    def mapped(self) -> np.ndarray[Any, Any]:
        # The array keeps the map alive, and the map its own descriptor.
        everything = mmap.mmap(self._file.fileno(), self._start + self.size, access=mmap.ACCESS_READ)
        return np.frombuffer(everything, np.uint8)[self._start :]

    def close(self) -> None:
        if self._owned:
            self._file.close()


class _Seeking(Source):
    """Any object that can seek. Nothing else may move it meanwhile."""

    is_concurrent = False

    def __init__(self, file: BinaryIO, label: str, owned: bool) -> None:
        self._file = file
        self._owned = owned
        self._lock = threading.Lock()
        self._start = file.tell()
        self.label = label
        file.seek(0, io.SEEK_END)
        self.size = max(0, file.tell() - self._start)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        with self._lock:
            self._file.seek(self._start + offset)
            while len(buffer):
                part = self._file.read(len(buffer)) if not hasattr(self._file, "readinto") else None
                if part is None:
                    count: int = self._file.readinto(buffer)  # type: ignore[attr-defined]
                else:
                    count = len(part)
                    buffer[:count] = part
                if not count:
                    raise self.ended()
                buffer = buffer[count:]

    def mapped(self) -> np.ndarray[Any, Any]:
        whole = self.read(0, self.size)
        data = np.frombuffer(whole, np.uint8)
        data.flags.writeable = False
        return data

    def close(self) -> None:
        if self._owned:
            self._file.close()
