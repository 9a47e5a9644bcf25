"""Opens and reads containers: whole tensors, many of them, parts of them, mapped or checked.

Each tensor is put at an address that is a multiple of 64, so that JAX can use it on a CPU without a copy. A tensor of
4 MiB or more has memory of its own. Smaller tensors share pieces of memory. The system hands out fresh memory in pages
of 4 KiB with an interrupt for each page, and that costs more than reading the bytes. Large pieces can have pages of 2
MiB instead.

A piece lives as long as any tensor in it, so it has at most 16 MiB. Tensors below 64 KiB share pieces of at most 1 MiB
among themselves: who keeps only the scalars and biases of a model does not keep its matrices alive.

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

# With fewer bytes than this, starting threads takes longer than they save.
_WORTH_THREADS = 8 * 2**20
# Tensors of at least this size have memory of their own.
_LARGE = 4 * 2**20
# Most bytes in a piece of memory that smaller tensors share.
_SLAB_BYTES = 16 * 2**20
# Most bytes in a piece of memory that tensors below 64 KiB share; and most bytes of such tensors that are read at once.
_BLOCK_BYTES = 2**20
_HUGE_PAGE = 2 * 2**20

_Memory = Mapping[str, Bytes]
"""Name of a tensor → the memory into which it is read."""

_Check = Callable[[Tensor, int, memoryview], None]
"""Function called with a tensor, the number of one of its chunks, and the bytes of that chunk."""


class Damage(NamedTuple):
    """A chunk that does not match the digest saved with it: the name of its tensor, and its number in the tensor."""

    tensor: str
    chunk: int


def open_container(location: Readable | Source) -> "Container":
    """Opens a container: reads and checks its header and its manifest, and nothing else.

    A passed `Source` stays open when the container is closed.

    Raises:
        TypeError, OSError: as `open_source`.
        FormatError: if the file is not a sharedtree file, or malformed.
        CorruptFileError: if the file is longer or shorter than its header says, or its header or manifest has changed.
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

    Of a foreign file (`_header.py` explains the word) there are no digests, so it must be read with `verify=False`.

    Args:
        source: the bytes of the file.
        header: its header, already checked.
        is_owner: True if closing the container closes the source.

    Attributes:
        label: name of the file, for errors.
        metadata: the user's texts.
        tensors: name → tensor, in order of offset, without the manifest's tensor.
        manifest: text of the manifest; empty for a foreign file.

    Raises:
        FormatError: if the manifest is in a tensor, and is not UTF-8.
        CorruptFileError, MemoryError: if the manifest is in a tensor: as `read_many`.
    """

    def __init__(self, source: Source, header: Header, *, is_owner: bool = True) -> None:
        self._source = source
        self._is_owner = is_owner
        self._header = header
        self.label = source.label
        self.metadata = header.metadata
        self.tensors = {tensor.name: tensor for tensor in header.tensors}
        self.manifest = header.manifest or ""
        # `header.manifest` is None for a long manifest: it is in a tensor. It is read and checked like any tensor.
        if header.manifest is None:
            try:
                self.manifest = self.read_many([MANIFEST_TENSOR])[MANIFEST_TENSOR].tobytes().decode()
            except UnicodeDecodeError as error:
                raise invalid_file_error(self.label, f"its manifest is not UTF-8 at byte {error.start}") from None
            del self.tensors[MANIFEST_TENSOR]

    def close(self) -> None:
        """Closes the file if it was opened from a path. Arrays already read or mapped stay valid."""
        if self._is_owner:
            self._source.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- Reading: all of a tensor or a part, into aligned memory; or a mapped file ----

    def read_many(
        self, names: Iterable[str] | None = None, *, verify: bool = True, progress: Progress | None = None
    ) -> dict[str, Bytes]:
        """Reads tensors into flat, writable arrays of bytes, in order of offset.

        Tensors of 64 KiB and more are copied once, from the operating system. The threads that read also check the
        digests.

        Args:
            names: names of the tensors; None for all.
            verify: True to check the digests.
            progress: called with the bytes done and the total.

        Returns:
            The bytes of each tensor by name.

        Raises:
            CorruptFileError: if a chunk does not match its digest, or the file ends early.
            MemoryError: if there is no memory for the tensors.
        """
        tensors = self._tensors_in_order(self.tensors if names is None else names)
        try:
            memory = memory_for(tensors)
        except MemoryError:
            nbytes = sum(tensor.nbytes for tensor in tensors)
            raise MemoryError(
                f"The arrays of `{self.label}` take {nbytes:,} bytes, and this machine does not have the memory. Map "
                "the file instead, by `mmap=True`, or load a part of it, by `select`."
            ) from None
        self._read_and_check(tensors, memory, self._require_digest if verify else None, progress)
        return {tensor.name: memory[tensor.name] for tensor in tensors}

    def read_selection(self, name: str, selection: Sequence[slice], *, verify: bool = True) -> Bytes:
        """Reads a part of a tensor. Returns its bytes in C order, as a flat, writable array.

        With `verify`, each chunk (4 MiB of a tensor) with bytes of the part is read whole and checked. Otherwise only
        the bytes of the part are read.

        Args:
            name: name of the tensor.
            selection: slices for the first axes of the stored shape. Further axes are read whole. The stored shape has
                one axis more than the array's if the dtype is stored as bytes.
            verify: True to check digests.

        Raises:
            IndexError: if there are more slices than axes, or a step is not positive.
            CorruptFileError: if a chunk does not match its digest, or the file ends early.
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
        memory = aligned_memory(math.prod(map(len, positions)) * item_size)
        # Function (offset in the tensor, buffer) that fills the buffer.
        read_into = self._reader_by_chunks(tensor) if verify else functools.partial(self._read_at, tensor.start)
        read_part(read_into, shape, item_size, positions, memory)
        return memory

    def map_tensors(self) -> Mapping[str, Bytes]:
        """Returns the bytes of all tensors by name, as read-only views of the mapped file.

        The file is read when the bytes are used. If another program cuts the file short, using them ends the process
        (SIGBUS); if it writes into the file, the bytes change. Replacing the file, as `sharedtree.save` does, is safe:
        the old file exists until its mapping is freed.
        """
        data = self._source.map_bytes()[self._header.data_start :]
        return {name: data[tensor.start : tensor.stop] for name, tensor in self.tensors.items()}

    # ---- Checking the digests of the data ----

    def find_damage(self, names: Sequence[str] | None = None, *, progress: Progress | None = None) -> list[Damage]:
        """Returns the chunks with wrong digests, in the order of the file. Keeps no bytes in memory.

        Args:
            names: names of the tensors. If None, all tensors are checked, and so is that of the manifest if it has one.
            progress: called with the bytes done and the total.
        """
        tensors = self._header.tensors if names is None else self._tensors_in_order(names)
        # Threads find chunks in any order. Each is stored with the offset of its tensor, by which they are sorted.
        damages: list[tuple[int, Damage]] = []

        def check(tensor: Tensor, chunk: int, data: memoryview) -> None:
            if not self._has_digest(tensor, chunk, data):
                damages.append((tensor.start, Damage(tensor.name, chunk)))

        self._read_and_check(tensors, None, check, progress)
        return [damage for _, damage in sorted(damages)]

    def require_undamaged(self, names: Sequence[str] | None = None, *, progress: Progress | None = None) -> None:
        """Raises `CorruptFileError` if any chunk does not match its digest. The error names every damaged tensor.

        Args:
            names: names of the tensors, as for `find_damage`.
            progress: called with the bytes done and the total.
        """
        all_damage = self.find_damage(names, progress=progress)
        if not all_damage:
            return
        by_tensor = itertools.groupby(all_damage, key=lambda damage: damage.tensor)
        chunks = {tensor: [damage.chunk for damage in damages] for tensor, damages in by_tensor}
        lines = "\n".join(f"    `{printable(tensor)}`: {_chunks_text(numbers)}" for tensor, numbers in chunks.items())
        raise CorruptFileError(
            f"`{self.label}` is damaged: the checksums of these chunks (4 MiB each) are wrong:\n{lines}\n{_CHANGED}",
            tuple(chunks),
            all_damage[0].chunk,
        )

    def _tensors_in_order(self, names: Iterable[str]) -> list[Tensor]:
        """Returns the tensors of these names in order of offset, each once."""
        tensors = [self.tensors[name] for name in dict.fromkeys(names)]
        # An empty tensor begins where the next one does. By its `stop` it comes first.
        return sorted(tensors, key=lambda tensor: (tensor.start, tensor.stop))

    def _read_and_check(
        self, tensors: Sequence[Tensor], memory: _Memory | None, check: _Check | None, progress: Progress | None
    ) -> None:
        """Reads tensors and calls `check` with each chunk, perhaps on several threads.

        Args:
            tensors: the tensors in order of offset.
            memory: the memory to read them into; None to keep none of the bytes.
            check: called with each chunk, unless empty; None for no check. Its errors are raised here.
            progress: called with the bytes done and the total.
        """
        total = sum(tensor.nbytes for tensor in tensors)
        report = byte_counter(progress, total)

        def read_stretch(tensors_in_stretch: Sequence[Tensor], start: int, stop: int) -> None:
            """Reads one stretch of the data, from `start` up to `stop`.

            It holds one chunk of a tensor of 64 KiB or more, or the whole of several smaller tensors.
            """
            first_tensor = tensors_in_stretch[0]
            # A chunk is read right into the tensor's memory. Small tensors are read into one buffer, then copied.
            # Without `memory`, everything is read into a buffer that is freed again.
            if memory is None or first_tensor.nbytes < SMALL:
                buffer = memoryview(np.empty(stop - start, np.uint8))
            else:
                buffer = memoryview(memory[first_tensor.name])[start - first_tensor.start : stop - first_tensor.start]
            self._read_at(start, 0, buffer)
            done = 0
            for tensor in tensors_in_stretch:
                # The bytes of this tensor in the stretch. If the stretch is a chunk, the tensor may begin before it and
                # end after it. The slice ends with the buffer then.
                begin = max(start, tensor.start)
                part = buffer[begin - start : tensor.stop - start]
                if check is not None and len(part):
                    check(tensor, (begin - tensor.start) // CHUNK_BYTES, part)
                if memory is not None and tensor.nbytes < SMALL:
                    memoryview(memory[tensor.name])[:] = part
                done += len(part)
            if done:
                report(done)

        # Threads help only to compute digests: reading alone is as fast as the disk or the memory.
        is_worth_threads = check is not None and total >= _WORTH_THREADS and self._source.is_concurrent
        # In order of offset: to go back, a compressed stream would decompress everything again.
        jobs = (functools.partial(read_stretch, *stretch) for stretch in _stretches(tensors))
        run_jobs(jobs, num_threads=None if is_worth_threads else 1)

    def _read_at(self, start: int, offset: int, buffer: memoryview) -> None:
        """Fills a buffer with bytes of a tensor.

        Args:
            start: offset of the tensor in the data.
            offset: offset of the bytes in the tensor.
            buffer: the buffer to fill.
        """
        self._source.read_into(self._header.data_start + start + offset, buffer)

    def _has_digest(self, tensor: Tensor, chunk: int, data: memoryview) -> bool:
        """Returns True if the bytes of a chunk match the digest in the header."""
        return crc32(data) == self._header.digests[tensor.name][chunk]

    def _require_digest(self, tensor: Tensor, chunk: int, data: memoryview) -> None:
        """Raises `CorruptFileError` unless the bytes of a chunk match the digest in the header."""
        if self._has_digest(tensor, chunk, data):
            return
        start = chunk * CHUNK_BYTES
        raise CorruptFileError(
            f"The tensor `{printable(tensor.name)}` in `{self.label}` is damaged: chunk {chunk} of "
            f"{num_chunks(tensor.nbytes)}, bytes {start} to {start + len(data)} of the tensor, has "
            f"another checksum than the one saved with it.\n{_CHANGED}",
            (tensor.name,),
            chunk,
        )

    def _reader_by_chunks(self, tensor: Tensor) -> ReadInto:
        """Returns a function (offset in the tensor, buffer) for filling the buffer.

        It reads whole chunks, and raises `CorruptFileError` if one does not match its digest.
        """

        def read_chunk(chunk: int, buffer: memoryview) -> memoryview:
            """Reads a chunk into a buffer of the chunk's size, checks it, and returns the buffer."""
            self._read_at(tensor.start, chunk * CHUNK_BYTES, buffer)
            self._require_digest(tensor, chunk, buffer)
            return buffer

        # The last chunk is kept in the cache, since the next call often needs bytes of the same chunk.
        @functools.lru_cache(1)
        def recent_chunk(chunk: int, nbytes: int) -> memoryview:
            """Returns the `nbytes` bytes of a chunk."""
            return read_chunk(chunk, memoryview(np.empty(nbytes, np.uint8)))

        def read_into(start: int, buffer: memoryview) -> None:
            """Fills a buffer with the bytes from `start` on, chunk by chunk.

            A chunk needed whole is read right into the buffer, without a copy.
            """
            while len(buffer):
                chunk, offset_in_chunk = divmod(start, CHUNK_BYTES)
                nbytes = min(CHUNK_BYTES, tensor.nbytes - chunk * CHUNK_BYTES)
                part = buffer[: nbytes - offset_in_chunk]
                if len(part) == nbytes:
                    read_chunk(chunk, part)
                else:
                    part[:] = recent_chunk(chunk, nbytes)[offset_in_chunk : offset_in_chunk + len(part)]
                buffer = buffer[len(part) :]
                start += len(part)

        return read_into


_CHANGED = (
    "The file was changed after it was written, by a disk, a network or a program. Restore it from a copy, or take "
    "what is there:\n    sharedtree.load(path, verify=False)"
)


def _chunks_text(numbers: Sequence[int]) -> str:
    """Returns the numbers of chunks as text: "chunks 0, 3, 5", with at most ten numbers."""
    shown = ", ".join(map(str, numbers[:10]))
    return f"chunk{'s' if len(numbers) > 1 else ''} {shown}{', ...' if len(numbers) > 10 else ''}"


def _stretches(tensors: Sequence[Tensor]) -> Iterator[tuple[Sequence[Tensor], int, int]]:
    """Divides the data of tensors into stretches, each to be read at once.

    A stretch is one chunk of a tensor of 64 KiB or more, or smaller tensors close together.

    Args:
        tensors: the tensors in order of offset.

    Yields:
        The tensors of a stretch, and where it begins and ends in the data, in order of offset.
    """
    # The small tensors of the stretch that is being put together.
    neighbours: list[Tensor] = []
    for tensor in tensors:
        # So many bytes between two tensors would be read for nothing.
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


# ---- Memory: no more than the file's size is allocated ----

# It begins at a multiple of 64 bytes, so that `jax.device_put` need not copy it on a CPU.


def aligned_memory(nbytes: int) -> Bytes:
    """Returns fresh memory, not filled, at an address divisible by 64."""
    block = np.empty(nbytes + ALIGNMENT, np.uint8)
    # The distance from the block's address to the next multiple.
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + nbytes]


def memory_for(tensors: Iterable[Tensor]) -> dict[str, Bytes]:
    """Returns fresh memory, not filled, for each tensor, by name. Alignment costs at most 63 bytes for each tensor.

    Tensors share pieces of memory as the head of this file says. Their sizes were compared with the size of the file
    before, so a damaged header cannot demand more memory than the file has bytes.
    """
    # Groups of tensors that share a piece of memory, as pairs of name and size. Tensors below 64 KiB are grouped with
    # each other, and so are those from 64 KiB to 4 MiB. Each larger one is a group by itself.
    groups: list[list[tuple[str, int]]] = []
    # For each kind of group, known by the most bytes it may have: the group that is being filled, and its bytes so far.
    filling: dict[int, tuple[list[tuple[str, int]], int]] = {}
    for tensor in tensors:
        size = tensor.stop - tensor.start
        bound = _BLOCK_BYTES if size < SMALL else _SLAB_BYTES if size < _LARGE else 0
        # A tensor of 4 MiB or more has a bound of 0, so it fits into no group that has begun. If there is no group yet,
        # the default stands for a full one, so that the tensor begins a group.
        group, filled = filling.get(bound, ([], bound + 1))
        # Each size is rounded up to a multiple of `ALIGNMENT`, from which `-size % ALIGNMENT` bytes are missing.
        filled += size + -size % ALIGNMENT
        if filled > bound:
            group, filled = [], size + -size % ALIGNMENT
            groups.append(group)
        group.append((tensor.name, size))
        filling[bound] = group, filled
    memory: dict[str, Bytes] = {}
    for group in groups:
        block = _huge_page_memory(sum([size + -size % ALIGNMENT for _, size in group]))
        offset = 0
        for name, size in group:
            memory[name] = block[offset : offset + size]
            offset += size + -size % ALIGNMENT
    return memory


def _huge_page_memory(nbytes: int) -> Bytes:
    """Returns fresh memory, not filled, at an address divisible by 64.

    It has pages of 2 MiB if it fills one at least and the system offers them.
    """
    if nbytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel may have no huge pages. Or there is no memory: then NumPy raises the error below.
        with contextlib.suppress(OSError):
            # `mmap` and not `malloc`: memory of `malloc` may not return to the system when it is freed, because of
            # other pieces in use above it. The mapping is private, or processes that are forked later would write to
            # the same memory. The extra 2 MiB serve the alignment. They take addresses, and no memory.
            pages = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            block = np.frombuffer(pages, np.uint8)
            start = -block.ctypes.data % _HUGE_PAGE
            pages.madvise(mmap.MADV_HUGEPAGE, start, nbytes)
            return block[start : start + nbytes]
    return aligned_memory(nbytes)
