"""Containers are written here: tensors, a manifest and metadata in one safetensors file.

Tensors whose size is a multiple of 64 bytes come first, so that each begins at such a multiple and can be mapped and
used as it is. The others follow by decreasing alignment, so that each is aligned for its own dtype.

Data is hashed by a second thread while the first writes it, and the digests are patched into the header at the end. A
file that cannot be patched (a pipe, a socket, a compressed stream, a file opened for appending) has its digests worked
out first, in one more pass over the arrays.
"""

import io
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ..._printable import printable
from ..arrays._dtypes import nbytes_of, stored
from ..arrays._pieces import is_as_on_disk, pieces
from ..arrays._shards import Sharded
from ._digest import RunningDigests, SecondThread
from ._header import (
    ALIGNMENT,
    MANIFEST_TENSOR,
    MAX_HEADER_BYTES,
    MAX_INLINE_MANIFEST,
    Tensor,
    blank_header,
    laid_out,
    seal,
)

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_WORTH_A_THREAD = 2**20  # below, handing a tensor over takes longer than hashing it
_SMALL = 64 * 2**10  # buffers below this are gathered into one write

Progress = Callable[[int, int], None]
"""Called with how many bytes of data are done and how many there are; perhaps on another thread, once at a time."""


class TensorSource(NamedTuple):
    """An array that is to be written.

    Attributes:
        name: the tensor's name in the file.
        dtype: the logical dtype, which must be storable.
        shape: the logical shape.
        array: returns the array in host memory, or a sharded one. It is called when the array's turn has come, and the
            result is let go after that, so arrays on other devices need not all be on the host at once. Where the file
            cannot be patched it is called twice.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    array: Callable[[], np.ndarray[Any, Any] | Sharded]


def write(
    file: BinaryIO,
    tensors: Sequence[TensorSource],
    manifest: str,
    metadata: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> int:
    """Writes a container, from where the file is positioned.

    Args:
        file: any object with `write` that takes bytes-like objects. Files of the operating system and `io.BytesIO` are
            hashed while they are written; for any other the arrays are read twice.
        tensors: in any order; the file has its own.
        manifest: a text. Past 16 MiB it goes into a tensor of its own.
        metadata: the user's own, text to text. Keys that begin with `sharedtree` are taken.
        progress: called after each write.

    Returns:
        How many bytes were written. The file is left at their end, unflushed if it has a buffer.

    Raises:
        ValueError: if the header would be longer than safetensors allows (100 MB, some 800,000 tensors), a name is
            taken twice or reserved, or an array is not what its source says.

    Cost: one pass over the arrays, two if the file cannot be patched. Contiguous arrays are not copied; of others, a
    few pieces of 4 MiB exist at a time.
    """
    reserved = [t.name for t in tensors if t.name.startswith("sharedtree.")]
    if reserved:
        raise ValueError(
            f"The tensor name `{printable(reserved[0])}` is taken: those that begin with `sharedtree.` are."
        )
    layout = _layout(tensors, manifest, metadata or {}, in_tensor=len(manifest) > MAX_INLINE_MANIFEST)
    if len(layout.header) > MAX_HEADER_BYTES:
        layout = _layout(tensors, manifest, metadata or {}, in_tensor=True)
    if len(layout.header) > MAX_HEADER_BYTES:
        raise ValueError(
            f"The header of {len(tensors)} tensors would have {len(layout.header)} bytes, and no safetensors file may "
            f"have more than {MAX_HEADER_BYTES}. Stack small arrays into larger ones:\n    jax.numpy.stack(arrays)"
        )
    out = _Output(file, layout.data_bytes, progress)
    if _can_be_patched(file):
        _write_and_patch(file, layout, out)
    else:
        seal(layout.header, [digest for source, _ in layout.tensors for digest in _digests(source)])
        out.write_header(layout.header)
        for source, _ in layout.tensors:
            for piece in _pieces_of(source):
                out.write(piece)
        out.finish()
    return len(layout.header) + layout.data_bytes


class _Layout(NamedTuple):
    header: bytearray
    tensors: list[tuple[TensorSource, Tensor]]  # in order of offset
    data_bytes: int


def _layout(sources: Sequence[TensorSource], manifest: str, metadata: Mapping[str, str], *, in_tensor: bool) -> _Layout:
    as_stored = [(source, *stored(source.dtype, source.shape)) for source in sources]
    as_stored.sort(key=lambda entry: _place(entry[0], nbytes_of(entry[1], entry[2])))
    if in_tensor:
        text = np.frombuffer(manifest.encode(), np.uint8)
        as_stored.append((TensorSource(MANIFEST_TENSOR, text.dtype, text.shape, lambda: text), "U8", text.shape))
    tensors = laid_out((source.name, dtype, shape) for source, dtype, shape in as_stored)
    header = blank_header(tensors, "tensor" if in_tensor else manifest, metadata)
    sorted_sources = [source for source, _, _ in as_stored]
    return _Layout(header, list(zip(sorted_sources, tensors, strict=True)), tensors[-1].stop if tensors else 0)


def _place(source: TensorSource, nbytes: int) -> int:
    return -ALIGNMENT if nbytes and nbytes % ALIGNMENT == 0 else -source.dtype.alignment


def _array_of(source: TensorSource) -> np.ndarray[Any, Any] | Sharded:
    array = source.array()
    if array.dtype != source.dtype or array.shape != source.shape:
        raise ValueError(
            f"The array at `{printable(source.name)}` was of dtype {source.dtype} and shape {source.shape} and now "
            f"is of dtype {array.dtype} and shape {array.shape}: something changed it while it was being saved."
        )
    return array


def _pieces_of(source: TensorSource) -> Iterator[memoryview]:
    return pieces(_array_of(source))


def _bytes_of(source: TensorSource) -> bytes:
    """All bytes of a small array: a piece takes longer to make than to copy."""
    array = _array_of(source)
    if is_as_on_disk(array):
        return array.tobytes()
    return b"".join(pieces(array))


def _digests(source: TensorSource) -> list[int]:
    running = RunningDigests()
    for piece in _pieces_of(source):
        running.update(piece)
    return running.result()


def _write_and_patch(file: BinaryIO, layout: _Layout, out: "_Output") -> None:
    start = file.tell()
    out.write_header(layout.header)
    of_tensors: list[Callable[[], list[int]]] = []
    with SecondThread() as thread:
        for source, tensor in layout.tensors:
            if tensor.nbytes < _SMALL:
                data = _bytes_of(source)
                of_tensors.append([zlib.crc32(data)].copy if data else list)
                out.write(data)
                continue
            running = RunningDigests()
            of_tensors.append(running.result)
            on_thread = tensor.nbytes >= _WORTH_A_THREAD
            for piece in _pieces_of(source):
                if on_thread:
                    thread.submit(running.update, piece)
                else:
                    running.update(piece)
                out.write(piece)
        thread.wait()
    out.finish()
    stop = file.tell()
    first, last = seal(layout.header, [digest for digests in of_tensors for digest in digests()])
    file.seek(start + first)
    _write_all(file, memoryview(layout.header)[first:last])
    file.seek(stop)


def _can_be_patched(file: BinaryIO) -> bool:
    """Whether it is safe to go back and write again. Many objects say that they can seek, and cannot do this."""
    if type(file) is io.BytesIO:
        return True
    raw = file.raw if isinstance(file, io.BufferedWriter | io.BufferedRandom) else file
    if not isinstance(raw, io.FileIO) or not raw.seekable():
        return False
    if fcntl is None:
        return "a" not in raw.mode
    return not fcntl.fcntl(raw.fileno(), fcntl.F_GETFL) & os.O_APPEND


class _Output:
    """Writes data, gathering small buffers, and reports progress."""

    def __init__(self, file: BinaryIO, total: int, progress: Progress | None) -> None:
        self._file = file
        self._total = total
        self._progress = progress
        self._done = 0
        self._gathered = bytearray()

    def write_header(self, header: bytearray) -> None:
        _write_all(self._file, memoryview(header))

    def write(self, piece: memoryview | bytes) -> None:
        if len(piece) < _SMALL:
            self._gathered += piece
            if len(self._gathered) >= _SMALL:
                self._write_gathered()
        else:
            self._write_gathered()
            self._write(memoryview(piece))

    def finish(self) -> None:
        self._write_gathered()

    def _write_gathered(self) -> None:
        if self._gathered:
            self._write(memoryview(self._gathered))
            self._gathered = bytearray()  # a new one: the file object may keep a view of the old one

    def _write(self, buffer: memoryview) -> None:
        _write_all(self._file, buffer)
        self._done += len(buffer)
        if self._progress is not None:
            self._progress(self._done, self._total)


def _write_all(file: BinaryIO, buffer: memoryview) -> None:
    while len(buffer):
        written: int | None = file.write(buffer)
        if written is None:  # what raw files that would block return; objects that only resemble files too
            if isinstance(file, io.RawIOBase):
                raise BlockingIOError("The file is in non-blocking mode and takes no more. Make it block:\n"
                                      "    os.set_blocking(file.fileno(), True)")  # fmt: skip
            return
        buffer = buffer[written:]
