"""Containers are opened and read here: whole tensors, many of them, parts of them, mapped or checked.

Each tensor goes to a multiple of 64 bytes in memory, so that JAX can use it on a CPU without a copy. A tensor of 4 MiB
or more has memory of its own. Smaller ones share it: fresh memory, which comes in pages of 4 KiB with an interrupt
each, costs more than the bytes that are read into it, and smaller pieces cannot have pages of 2 MiB. What is shared
lives as long as any of the tensors in it, so it is at most 16 MiB, or 1 MiB for tensors below 64 KiB: what people keep
of a model most often, its scalars and biases, never keeps the matrices beside them.

For example, tensors of 1 MiB, 8 bytes, 15 MiB, 100 bytes and 2 MiB take three pieces of memory: 3 MiB for the first and
the last, 192 bytes for the second and the fourth, and 15 MiB.
"""

import contextlib
import functools
import itertools
import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ...core._errors import CorruptFileError
from ...core._printing import printable
from ._byte_sources import (
    CHUNK_BYTES,
    SMALL,
    Bytes,
    Progress,
    Readable,
    ReadInto,
    Source,
    counting,
    crc32,
    num_chunks,
    open_source,
    read_part,
    run_jobs,
)
from ._header import ALIGNMENT, ITEM_SIZES, MANIFEST_TENSOR, Header, Tensor, invalid, read_header

_WORTH_THREADS = 8 * 2**20  # below, starting threads takes longer than they save
_LARGE = 4 * 2**20  # tensors from this on have memory of their own
_SLAB_BYTES = 16 * 2**20  # what those between share, at most
_BLOCK_BYTES = 2**20  # what small tensors share, at most, and what is read at once of them
_HUGE_PAGE = 2 * 2**20

_Memory = Mapping[str, Bytes]
_Check = Callable[[Tensor, int, memoryview], None]


class Damage(NamedTuple):
    """A chunk that does not have the digest saved with it."""

    tensor: str
    chunk: int


def open_container(where: Readable | Source) -> "Container":
    """Opens a container: reads its header, checks all of it, and the manifest. Nothing else is read.

    A source that is open already is left open, also when the container is closed.

    Raises:
        FormatError: if this is not a sharedtree file, or malformed.
        CorruptFileError: if it is one that was cut short, or whose header or manifest has changed.
    """
    if isinstance(where, Source):
        return Container(where, read_header(where), is_owner=False)
    source = open_source(where)
    try:
        return Container(source, read_header(source))
    except BaseException:
        source.close()
        raise


class Container(contextlib.AbstractContextManager["Container"]):
    """An open container. Use it in a `with` statement, or close it; it closes its source if it is the `is_owner`."""

    def __init__(self, source: Source, header: Header, *, is_owner: bool = True) -> None:
        self._source = source
        self._is_owner = is_owner
        self._header = header
        self.label = source.label  # what errors call the file
        self.metadata = header.metadata  # the user's
        # In order of offset, in the end without the manifest's own.
        self.tensors = {tensor.name: tensor for tensor in header.tensors}
        self.manifest = header.manifest or ""
        if header.manifest is None:
            try:
                self.manifest = self.read_many([MANIFEST_TENSOR])[MANIFEST_TENSOR].tobytes().decode()
            except UnicodeDecodeError as error:
                raise invalid(self.label, f"its manifest is not UTF-8 at byte {error.start}") from None
            del self.tensors[MANIFEST_TENSOR]

    def close(self) -> None:
        """Closes the file if it was opened from a path. Arrays that were read or mapped stay valid."""
        if self._is_owner:
            self._source.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def read_many(
        self, names: Iterable[str] | None = None, *, verify: bool = True, progress: Progress | None = None
    ) -> dict[str, Bytes]:
        """Flat, writable arrays of the bytes of some tensors, or of all, in order of offset.

        A chunk that does not have its digest is a `CorruptFileError` if `verify`. The bytes are copied once, from the
        operating system, and hashed meanwhile by the threads that have read them.
        """
        tensors = self._in_order(self.tensors if names is None else names)
        try:
            data = memory_for(tensors)
        except MemoryError:
            nbytes = sum(tensor.nbytes for tensor in tensors)
            raise MemoryError(
                f"The arrays of `{self.label}` take {nbytes:,} bytes, and this machine does not have the memory. Map "
                "the file instead, by `mmap=True`, or load a part of it, by `select`."
            ) from None
        self._read(tensors, data, self._require_digest if verify else None, progress)
        return {tensor.name: data[tensor.name] for tensor in tensors}

    def read_selection(self, name: str, selection: Sequence[slice], *, verify: bool = True) -> Bytes:
        """The bytes of a part of a tensor, in C order: one slice of stored items an axis; what is left out is whole.

        With `verify`, the chunks that it touches are read whole and checked. Otherwise the selected runs are read, each
        by itself, and nothing between them.
        """
        tensor = self.tensors[name]
        shape, item_size = tensor.shape, ITEM_SIZES[tensor.dtype]
        if len(selection) > len(shape) or any(each.step is not None and each.step < 1 for each in selection):
            raise IndexError(
                f"The selection {tuple(selection)} does not fit the tensor `{name}`, whose stored shape is {shape}: "
                "give at most one slice an axis, with a positive step."
            )
        slices = [*selection, *[slice(None)] * (len(shape) - len(selection))]
        wanted = [range(*each.indices(size)) for each, size in zip(slices, shape, strict=True)]
        memory = aligned(math.prod(map(len, wanted)) * item_size)
        read_into = self._by_chunks(tensor) if verify else functools.partial(self._read_at, tensor.start)
        read_part(read_into, shape, item_size, wanted, memory)
        return memory

    def mapped(self) -> Mapping[str, Bytes]:
        """The bytes of all tensors as read-only views of the mapped file, not read before they are looked at.

        If another program cuts the file short, looking at them ends the process (SIGBUS); if it writes into the file,
        they change. Files that `sharedtree` replaces are safe: the old one lives on until nobody uses it.
        """
        everything = self._source.mapped()[self._header.data_start :]
        return {name: everything[tensor.start : tensor.stop] for name, tensor in self.tensors.items()}

    def damage(self, names: Sequence[str] | None = None, *, progress: Progress | None = None) -> list[Damage]:
        """Which chunks of some tensors, or of all and the manifest, do not have their digests. Nothing is kept."""
        tensors = self._header.tensors if names is None else self._in_order(names)
        found: list[tuple[int, Damage]] = []

        def check(tensor: Tensor, chunk: int, data: memoryview) -> None:
            if not self._has_digest(tensor, chunk, data):
                found.append((tensor.start, Damage(tensor.name, chunk)))

        self._read(tensors, None, check, progress)
        return [damage for _, damage in sorted(found)]

    def require_undamaged(self, names: Sequence[str] | None = None, *, progress: Progress | None = None) -> None:
        """Raises `CorruptFileError`, with every tensor that is damaged, unless all chunks have their digests."""
        found = self.damage(names, progress=progress)
        if not found:
            return
        by_tensor = itertools.groupby(found, key=lambda each: each.tensor)
        chunks = {tensor: [each.chunk for each in some] for tensor, some in by_tensor}
        listed = "\n".join(f"    `{printable(tensor)}`: {_numbers(numbers)}" for tensor, numbers in chunks.items())
        raise CorruptFileError(
            f"`{self.label}` is damaged. These tensors have chunks of 4 MiB that do not have their digests:\n{listed}\n"
            f"{_CHANGED}",
            tuple(chunks),
            found[0].chunk,
        )

    def _in_order(self, names: Iterable[str]) -> list[Tensor]:
        tensors = [self.tensors[name] for name in dict.fromkeys(names)]
        return sorted(tensors, key=lambda tensor: (tensor.start, tensor.stop))  # empty ones begin where others do

    def _read(
        self, tensors: Sequence[Tensor], data: _Memory | None, check: _Check | None, progress: Progress | None
    ) -> None:
        """Reads tensors into their memory, or into none that is kept, and calls `check` with each chunk, on threads."""
        total = sum(tensor.nbytes for tensor in tensors)
        report = counting(progress, total)

        def read(together: Sequence[Tensor], start: int, stop: int) -> None:
            first = together[0]
            if data is None or first.nbytes < SMALL:
                buffer = memoryview(np.empty(stop - start, np.uint8))
            else:
                buffer = memoryview(data[first.name])[start - first.start : stop - first.start]
            self._read_at(start, 0, buffer)
            done = 0
            for tensor in together:
                begin = max(start, tensor.start)
                part = buffer[begin - start : tensor.stop - start]
                if check is not None and len(part):
                    check(tensor, (begin - tensor.start) // CHUNK_BYTES, part)
                if data is not None and tensor.nbytes < SMALL:
                    memoryview(data[tensor.name])[:] = part
                done += len(part)
            if done:
                report(done)

        worth_threads = check is not None and total >= _WORTH_THREADS and self._source.is_concurrent
        # In order of offset, which some sources can read in no other.
        jobs = (functools.partial(read, *stretch) for stretch in _stretches(tensors))
        run_jobs(jobs, None if worth_threads else 1)

    def _read_at(self, start: int, offset: int, buffer: memoryview) -> None:
        self._source.read_into(self._header.data_start + start + offset, buffer)

    def _has_digest(self, tensor: Tensor, chunk: int, data: memoryview) -> bool:
        return crc32(data) == self._header.digests[tensor.name][chunk]

    def _require_digest(self, tensor: Tensor, chunk: int, data: memoryview) -> None:
        if self._has_digest(tensor, chunk, data):
            return
        start = chunk * CHUNK_BYTES
        raise CorruptFileError(
            f"The tensor `{printable(tensor.name)}` in `{self.label}` is damaged: chunk {chunk} of "
            f"{num_chunks(tensor.nbytes)}, bytes {start} to {start + len(data)} of the tensor, does not "
            f"have the digest saved with it.\n{_CHANGED}",
            (tensor.name,),
            chunk,
        )

    def _by_chunks(self, tensor: Tensor) -> ReadInto:
        """Reads any part of a tensor by whole chunks, checking each."""

        def load(chunk: int, buffer: memoryview) -> memoryview:
            self._read_at(tensor.start, chunk * CHUNK_BYTES, buffer)
            self._require_digest(tensor, chunk, buffer)
            return buffer

        @functools.lru_cache(1)  # the next part may begin where this one ends
        def loaded(chunk: int, nbytes: int) -> memoryview:
            return load(chunk, memoryview(np.empty(nbytes, np.uint8)))

        def read_into(start: int, buffer: memoryview) -> None:
            while len(buffer):
                chunk, within = divmod(start, CHUNK_BYTES)
                nbytes = min(CHUNK_BYTES, tensor.nbytes - chunk * CHUNK_BYTES)
                part = buffer[: nbytes - within]
                if len(part) == nbytes:
                    load(chunk, part)
                else:
                    part[:] = loaded(chunk, nbytes)[within : within + len(part)]
                buffer = buffer[len(part) :]
                start += len(part)

        return read_into


_CHANGED = (
    "The file was changed after it was written, by a disk, a network or a program. Restore it from a copy, or take "
    "what is there:\n    sharedtree.load(path, verify=False)"
)


def _numbers(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:10]))
    return f"chunk{'s' if len(numbers) > 1 else ''} {shown}{', ...' if len(numbers) > 10 else ''}"


def _stretches(tensors: Sequence[Tensor]) -> Iterator[tuple[Sequence[Tensor], int, int]]:
    """What is read at once, a chunk of one tensor or small ones that lie close together; where it begins and ends."""
    together: list[Tensor] = []
    for tensor in tensors:
        is_far = together and tensor.start - together[-1].stop > SMALL
        if together and (is_far or tensor.nbytes >= SMALL or tensor.stop - together[0].start > _BLOCK_BYTES):
            yield together, together[0].start, together[-1].stop
            together = []
        if tensor.nbytes < SMALL:
            together.append(tensor)
            continue
        for start in range(tensor.start, tensor.stop, CHUNK_BYTES):
            yield [tensor], start, min(start + CHUNK_BYTES, tensor.stop)
    if together:
        yield together, together[0].start, together[-1].stop


def aligned(nbytes: int) -> Bytes:
    """Fresh memory, not filled, that begins at a multiple of 64 bytes."""
    block = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + nbytes]


def memory_for(tensors: Iterable[Tensor]) -> dict[str, Bytes]:
    """Fresh memory, not filled, for each tensor, by name. No more than 63 bytes for each are taken besides."""
    groups: list[list[tuple[str, int]]] = []  # names and sizes of tensors that share a piece of memory
    filling: dict[int, tuple[list[tuple[str, int]], int]] = {}  # by what they may fill: the last group, what it fills
    for tensor in tensors:
        size = tensor.stop - tensor.start
        bound = _BLOCK_BYTES if size < SMALL else _SLAB_BYTES if size < _LARGE else 0
        together, filled = filling.get(bound, ([], bound + 1))
        filled += size + -size % ALIGNMENT
        if filled > bound:
            together, filled = [], size + -size % ALIGNMENT
            groups.append(together)
        together.append((tensor.name, size))
        filling[bound] = together, filled
    memory: dict[str, Bytes] = {}
    for together in groups:
        block = _in_huge_pages(sum([size + -size % ALIGNMENT for _, size in together]))
        at = 0
        for name, size in together:
            memory[name] = block[at : at + size]
            at += size + -size % ALIGNMENT
    return memory


def _in_huge_pages(nbytes: int) -> Bytes:
    """Fresh memory at a multiple of 64 bytes, in pages of 2 MiB as far as it fills them, where there are such pages."""
    if nbytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel may have no huge pages, or no memory, as NumPy will say.
        with contextlib.suppress(OSError):
            # Mapped by itself: `malloc` keeps what lies below a piece that is in use, though it be free. Private, or
            # processes forked later would write to the same memory. Beyond `nbytes` only address space is taken.
            pages = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            block = np.frombuffer(pages, np.uint8)
            start = -block.ctypes.data % _HUGE_PAGE
            pages.madvise(mmap.MADV_HUGEPAGE, start, nbytes)
            return block[start : start + nbytes]
    return aligned(nbytes)
