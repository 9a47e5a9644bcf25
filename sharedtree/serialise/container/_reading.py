"""Opens and reads containers: whole tensors, many of them, parts of them, mapped or checked.

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
    byte_counter,
    crc32,
    num_chunks,
    open_source,
    read_part,
    run_jobs,
)
from ._header import ALIGNMENT, ITEM_SIZES, MANIFEST_TENSOR, Header, Tensor, invalid_file_error, read_header

# Below this, starting threads takes longer than they save.
_WORTH_THREADS = 8 * 2**20
# Tensors of at least this size have memory of their own.
_LARGE = 4 * 2**20
# How much memory smaller ones share, at most.
_SLAB_BYTES = 16 * 2**20
# How much memory tensors below 64 KiB share, at most; and how much of them is read at once.
_BLOCK_BYTES = 2**20
_HUGE_PAGE = 2 * 2**20

_Memory = Mapping[str, Bytes]
"""Name of a tensor → the memory for its bytes."""

_Check = Callable[[Tensor, int, memoryview], None]
"""Called with a tensor, the number of a chunk of it, and the bytes of that chunk."""


class Damage(NamedTuple):
    """A chunk that does not have the digest saved with it."""

    tensor: str
    chunk: int


def open_container(location: Readable | Source) -> "Container":
    """Opens a container: reads and checks its header and the manifest, and nothing else.

    A source that is open already is left open, also when the container is closed.

    Raises:
        FormatError: if this is not a sharedtree file, or malformed.
        CorruptFileError: if it was cut short, or its header or manifest has changed.
    """
    if isinstance(location, Source):
        return Container(location, read_header(location), is_owner=False)
    source = open_source(location)
    try:
        return Container(source, read_header(source))
    except BaseException:
        source.close()
        raise


class Container(contextlib.AbstractContextManager["Container"]):
    """An open container. Use it in a `with` statement, or close it.

    Args:
        source: the bytes of the file.
        header: its header.
        is_owner: True if closing the container closes the source.

    Attributes:
        label: name of the file, for errors.
        metadata: the user's texts.
        tensors: name → tensor, in order of offset, without that of the manifest.
        manifest: text of the manifest; empty in a foreign file.
    """

    def __init__(self, source: Source, header: Header, *, is_owner: bool = True) -> None:
        self._source = source
        self._is_owner = is_owner
        self._header = header
        self.label = source.label
        self.metadata = header.metadata
        self.tensors = {tensor.name: tensor for tensor in header.tensors}
        self.manifest = header.manifest or ""
        # A long manifest is in a tensor, and is read and checked as one.
        if header.manifest is None:
            try:
                self.manifest = self.read_many([MANIFEST_TENSOR])[MANIFEST_TENSOR].tobytes().decode()
            except UnicodeDecodeError as error:
                raise invalid_file_error(self.label, f"its manifest is not UTF-8 at byte {error.start}") from None
            del self.tensors[MANIFEST_TENSOR]

    def close(self) -> None:
        """Closes the file if it was opened from a path. Arrays that were read or mapped stay valid."""
        if self._is_owner:
            self._source.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- Fast: read into 64-byte-aligned memory, or map the file. Only the selected part where asked ----

    def read_many(
        self, names: Iterable[str] | None = None, *, verify: bool = True, progress: Progress | None = None
    ) -> dict[str, Bytes]:
        """Reads tensors into flat, writable arrays of bytes, in order of offset.

        The bytes are copied once, from the operating system. The threads that read them also check the digests.

        Args:
            names: of the tensors; None for all.
            verify: True to raise `CorruptFileError` for a chunk that does not have its digest.
            progress: called with the bytes done and the bytes in all.
        """
        tensors = self._tensors_in_order(self.tensors if names is None else names)
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
        """Reads a part of a tensor, in C order.

        With `verify`, the chunks the part touches are read whole and checked. Otherwise the runs of bytes in the
        part are read one by one, and nothing between them.

        Args:
            name: of the tensor.
            selection: a slice for each axis of the stored shape. It has one axis more than the array's if the dtype is
                stored as bytes. Axes without a slice are whole.
            verify: True to check digests.
        """
        tensor = self.tensors[name]
        shape, item_size = tensor.shape, ITEM_SIZES[tensor.dtype]
        if len(selection) > len(shape) or any(item.step is not None and item.step < 1 for item in selection):
            raise IndexError(
                f"The selection {tuple(selection)} does not fit the tensor `{name}`, whose stored shape is {shape}: "
                "give at most one slice an axis, with a positive step."
            )
        slices = [*selection, *[slice(None)] * (len(shape) - len(selection))]
        positions = [range(*item.indices(size)) for item, size in zip(slices, shape, strict=True)]
        memory = aligned(math.prod(map(len, positions)) * item_size)
        # A function from (offset in the tensor, buffer), which fills the buffer.
        read_into = self._by_chunks(tensor) if verify else functools.partial(self._read_at, tensor.start)
        read_part(read_into, shape, item_size, positions, memory)
        return memory

    def map_tensors(self) -> Mapping[str, Bytes]:
        """Returns the bytes of all tensors as read-only views of the mapped file. Using them reads them.

        If another program cuts the file short, using them ends the process (SIGBUS); if it writes into the file, they
        change. Files replaced by `sharedtree` are safe: the old one lives on until nobody uses it.
        """
        data = self._source.map_bytes()[self._header.data_start :]
        return {name: data[tensor.start : tensor.stop] for name, tensor in self.tensors.items()}

    # ---- Checked by default: digests over the data ----

    def find_damage(self, names: Sequence[str] | None = None, *, progress: Progress | None = None) -> list[Damage]:
        """Finds the chunks that do not have their digests. Keeps nothing of what it reads.

        Args:
            names: of the tensors; None for all, and the manifest.
            progress: called with the bytes done and the bytes in all.
        """
        tensors = self._header.tensors if names is None else self._tensors_in_order(names)
        # Threads find them in any order, so each has the offset of its tensor, to be sorted by.
        damages: list[tuple[int, Damage]] = []

        def check(tensor: Tensor, chunk: int, data: memoryview) -> None:
            if not self._has_digest(tensor, chunk, data):
                damages.append((tensor.start, Damage(tensor.name, chunk)))

        self._read(tensors, None, check, progress)
        return [damage for _, damage in sorted(damages)]

    def require_undamaged(self, names: Sequence[str] | None = None, *, progress: Progress | None = None) -> None:
        """Raises `CorruptFileError`, with every tensor that is damaged, unless all chunks have their digests."""
        all_damage = self.find_damage(names, progress=progress)
        if not all_damage:
            return
        by_tensor = itertools.groupby(all_damage, key=lambda damage: damage.tensor)
        chunks = {tensor: [damage.chunk for damage in damages] for tensor, damages in by_tensor}
        lines = "\n".join(f"    `{printable(tensor)}`: {_numbers(numbers)}" for tensor, numbers in chunks.items())
        raise CorruptFileError(
            f"`{self.label}` is damaged. These tensors have chunks of 4 MiB that do not have their digests:\n{lines}\n"
            f"{_CHANGED}",
            tuple(chunks),
            all_damage[0].chunk,
        )

    def _tensors_in_order(self, names: Iterable[str]) -> list[Tensor]:
        """Returns tensors by name, in order of offset, each once."""
        tensors = [self.tensors[name] for name in dict.fromkeys(names)]
        # Empty tensors begin where others do, so the start alone is no order.
        return sorted(tensors, key=lambda tensor: (tensor.start, tensor.stop))

    def _read(
        self, tensors: Sequence[Tensor], data: _Memory | None, check: _Check | None, progress: Progress | None
    ) -> None:
        """Reads tensors and calls `check` with each chunk, perhaps on several threads.

        Args:
            tensors: in order of offset.
            data: the memory for each. None to keep nothing.
            check: called with each chunk; None for no check.
            progress: called with the bytes done and the bytes in all.
        """
        total = sum(tensor.nbytes for tensor in tensors)
        report = byte_counter(progress, total)

        def read(neighbours: Sequence[Tensor], start: int, stop: int) -> None:
            """Reads one stretch of the file, which is a chunk of a large tensor or several small tensors."""
            first_tensor = neighbours[0]
            # Large tensors are read into their memory. Small ones are read together, and copied.
            if data is None or first_tensor.nbytes < SMALL:
                buffer = memoryview(np.empty(stop - start, np.uint8))
            else:
                buffer = memoryview(data[first_tensor.name])[start - first_tensor.start : stop - first_tensor.start]
            self._read_at(start, 0, buffer)
            done = 0
            for tensor in neighbours:
                begin = max(start, tensor.start)
                part = buffer[begin - start : tensor.stop - start]
                if check is not None and len(part):
                    check(tensor, (begin - tensor.start) // CHUNK_BYTES, part)
                if data is not None and tensor.nbytes < SMALL:
                    memoryview(data[tensor.name])[:] = part
                done += len(part)
            if done:
                report(done)

        is_worth_threads = check is not None and total >= _WORTH_THREADS and self._source.is_concurrent
        # Jobs go in order of offset: a compressed stream starts from the beginning to go back.
        jobs = (functools.partial(read, *stretch) for stretch in _stretches(tensors))
        run_jobs(jobs, None if is_worth_threads else 1)

    def _read_at(self, start: int, offset: int, buffer: memoryview) -> None:
        """Fills a buffer from an offset in a tensor that starts at `start`."""
        self._source.read_into(self._header.data_start + start + offset, buffer)

    def _has_digest(self, tensor: Tensor, chunk: int, data: memoryview) -> bool:
        return crc32(data) == self._header.digests[tensor.name][chunk]

    def _require_digest(self, tensor: Tensor, chunk: int, data: memoryview) -> None:
        """Raises `CorruptFileError` if a chunk does not have its digest."""
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
        """Returns a function that fills a buffer from an offset in a tensor. It reads whole chunks, and checks each."""

        def load(chunk: int, buffer: memoryview) -> memoryview:
            self._read_at(tensor.start, chunk * CHUNK_BYTES, buffer)
            self._require_digest(tensor, chunk, buffer)
            return buffer

        # The next part may begin in the chunk in which this one ends, so the last chunk is kept.
        @functools.lru_cache(1)
        def loaded(chunk: int, nbytes: int) -> memoryview:
            return load(chunk, memoryview(np.empty(nbytes, np.uint8)))

        def read_into(start: int, buffer: memoryview) -> None:
            """Fills a buffer chunk by chunk. A chunk that is wanted whole is read into the buffer without a copy."""
            while len(buffer):
                chunk, offset_in_chunk = divmod(start, CHUNK_BYTES)
                nbytes = min(CHUNK_BYTES, tensor.nbytes - chunk * CHUNK_BYTES)
                part = buffer[: nbytes - offset_in_chunk]
                if len(part) == nbytes:
                    load(chunk, part)
                else:
                    part[:] = loaded(chunk, nbytes)[offset_in_chunk : offset_in_chunk + len(part)]
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
    """Divides tensors into the stretches of the file that are read at once, in order of offset.

    A stretch is one chunk of a large tensor, or small tensors that lie close together. Yields its tensors, and where it
    begins and ends in the data.
    """
    neighbours: list[Tensor] = []
    for tensor in tensors:
        is_far = neighbours and tensor.start - neighbours[-1].stop > SMALL
        if neighbours and (is_far or tensor.nbytes >= SMALL or tensor.stop - neighbours[0].start > _BLOCK_BYTES):
            yield neighbours, neighbours[0].start, neighbours[-1].stop
            neighbours = []
        if tensor.nbytes < SMALL:
            neighbours.append(tensor)
            continue
        for start in range(tensor.start, tensor.stop, CHUNK_BYTES):
            yield [tensor], start, min(start + CHUNK_BYTES, tensor.stop)
    if neighbours:
        yield neighbours, neighbours[0].start, neighbours[-1].stop


# ---- Fast: 64-byte-aligned memory that `jax.device_put` aliases on a CPU ----


def aligned(nbytes: int) -> Bytes:
    """Returns fresh memory, not filled, that begins at a multiple of 64 bytes."""
    block = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + nbytes]


def memory_for(tensors: Iterable[Tensor]) -> dict[str, Bytes]:
    """Returns fresh memory, not filled, for each tensor, by name. Alignment costs at most 63 bytes a tensor.

    The sizes were checked against the file before, so nothing is allocated beyond the file's size.
    """
    # Groups of tensors that share a piece of memory, as names and sizes. Small tensors are grouped with small
    # ones, middle ones with middle ones, and each large one is a group by itself.
    groups: list[list[tuple[str, int]]] = []
    # Most bytes that a group may have → the group that is being filled, and its bytes so far.
    filling: dict[int, tuple[list[tuple[str, int]], int]] = {}
    for tensor in tensors:
        size = tensor.stop - tensor.start
        bound = _BLOCK_BYTES if size < SMALL else _SLAB_BYTES if size < _LARGE else 0
        # A large tensor has a bound of 0, so it never fits a group that has begun. Without a group yet, a full one is
        # assumed, so that the first tensor begins a group.
        group, filled = filling.get(bound, ([], bound + 1))
        # Each size is rounded up to a multiple of `ALIGNMENT`: `-size % ALIGNMENT` is what is missing.
        filled += size + -size % ALIGNMENT
        if filled > bound:
            group, filled = [], size + -size % ALIGNMENT
            groups.append(group)
        group.append((tensor.name, size))
        filling[bound] = group, filled
    memory: dict[str, Bytes] = {}
    for group in groups:
        block = _in_huge_pages(sum([size + -size % ALIGNMENT for _, size in group]))
        offset = 0
        for name, size in group:
            memory[name] = block[offset : offset + size]
            offset += size + -size % ALIGNMENT
    return memory


def _in_huge_pages(nbytes: int) -> Bytes:
    """Returns fresh memory at a multiple of 64 bytes, in pages of 2 MiB if it fills one and the system has them."""
    if nbytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel may have no huge pages, or no memory, as NumPy will say.
        with contextlib.suppress(OSError):
            # It is mapped by itself, since `malloc` returns no free memory that lies below a piece in use. It is
            # private, or processes forked later would write to the same memory. Beyond `nbytes`, it takes addresses and
            # no memory.
            pages = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            block = np.frombuffer(pages, np.uint8)
            start = -block.ctypes.data % _HUGE_PAGE
            pages.madvise(mmap.MADV_HUGEPAGE, start, nbytes)
            return block[start : start + nbytes]
    return aligned(nbytes)
