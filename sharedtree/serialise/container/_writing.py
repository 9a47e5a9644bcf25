"""Containers are written here: tensors, a manifest and metadata in one safetensors file.

Tensors whose size is a multiple of 64 bytes come first, so that each begins at such a multiple and can be mapped and
used as it is. The others follow by decreasing alignment, so that each is aligned for its own dtype.

Data is hashed by a second thread while the first writes it and forces it to the disk, and the digests are patched into
the header at the end. Of a file that cannot be patched (a pipe, a compressed stream, one opened for appending) they are
worked out first.
"""

import collections
import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO, Self

from ..._printable import printable
from ._chunks import CHUNK_BYTES, SMALL, Progress, counting, num_chunks
from ._header import ALIGNMENT, MANIFEST_TENSOR, MAX_HEADER_BYTES, Buffer, TensorSource, blank_header, nbytes_of, seal

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

MAX_INLINE_MANIFEST = 16 * 2**20
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
    with _Hasher() as hasher:  # an error ends the second thread
        data = hasher.hashed(sized)
        if start is None:
            for _ in data:
                pass
            seal(header, hasher.finished())
            data = (buffer for source, _ in sized for buffer in source.buffers())
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

    def hashed(self, sized: Iterable[tuple[TensorSource, int]]) -> Iterator[Buffer]:
        """The bytes of all tensors, which are hashed while the caller has them."""
        for source, nbytes in sized:
            first, at = len(self._digests), 0
            self._digests += [0] * num_chunks(nbytes)
            buffers = source.buffers()
            is_copied = not (source.is_here and isinstance(buffers, list))
            for buffer in filter(len, buffers):
                if nbytes < _WORTH_A_THREAD:  # one chunk
                    self._digests[first] = zlib.crc32(buffer, self._digests[first])
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
        digests[first + chunk] = zlib.crc32(part, digests[first + chunk])
        at += len(part)
        buffer = buffer[len(part) :]


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
