"""Containers are opened and read here: whole tensors, many of them, parts of them, mapped or checked.

With digests, threads take chunks of 4 MiB in turn, and each hashes what it has read while that is still in its cache.
"""

import functools
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple

from ..._errors import CorruptFileError, FormatError
from ..._printable import printable
from ._digest import CHUNK_BYTES, num_chunks, run_jobs
from ._header import LENGTH_BYTES, MANIFEST_TENSOR, Header, Tensor, header_length, parse_header
from ._memory import SMALL, Bytes, aligned, groups_of, memory_for
from ._selection import Selection, runs
from ._sources import Readable, Source, open_source
from ._writing import Progress

_RECOGNISABLE = 64  # bytes, enough to tell a container that was cut short from other files
_MAX_SHOWN = 10
_WORTH_THREADS = 8 * 2**20  # below, starting threads takes longer than they save


class Damage(NamedTuple):
    """A chunk that does not have the digest saved with it."""

    tensor: str
    chunk: int


class Container:
    """An open container. Use it in a `with` statement, or close it.

    Attributes:
        label: what errors call the file.
        tensors: name → where it is, without the manifest's own tensor, in order of offset.
        metadata: the user's.
        manifest: a text, whose digest was checked.
    """

    def __init__(self, source: Source, header: Header) -> None:
        self._source = source
        self._header = header
        self._number = {tensor.name: number for number, tensor in enumerate(header.tensors)}
        self.label = source.label
        self.metadata = header.metadata
        self.tensors = {tensor.name: tensor for tensor in header.tensors}
        self.manifest = header.manifest if header.manifest is not None else self._spilled_manifest()

    def __enter__(self) -> "Container":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file if it was opened from a path. Arrays that were read or mapped stay valid."""
        self._source.close()

    def read(self, name: str, *, verify: bool = True) -> Bytes:
        """The bytes of one tensor, as `read_many` reads them."""
        return self.read_many([name], verify=verify)[name]

    def read_many(
        self, names: Sequence[str] | None = None, *, verify: bool = True, progress: Progress | None = None
    ) -> dict[str, Bytes]:
        """The bytes of some tensors, in fresh memory.

        Args:
            names: default: all.
            verify: whether to check the digests.
            progress: called after each read.

        Returns:
            Flat, writable arrays of uint8 by name, in order of offset. Each begins at a multiple of 64 bytes. Those of
            less than 4 MiB share memory; an array keeps 16 MiB alive at most, and one of less than 64 KiB 1 MiB.

        Raises:
            CorruptFileError: if a chunk does not have its digest.

        Cost: one pass over the tensors' bytes, which are copied once, from the operating system. Digests are worked
        out meanwhile, on up to four threads.
        """
        tensors = [self.tensors[name] for name in (self.tensors if names is None else dict.fromkeys(names))]
        tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))  # empty ones begin where others do
        total = sum(tensor.nbytes for tensor in tensors)
        report = _reporting(progress, total)
        data = memory_for(tensors)
        jobs: list[Callable[[], None]] = []  # in order of offset, which some sources can read in no other
        for group in groups_of(tensors):
            if group[0].nbytes < SMALL:
                jobs.append(functools.partial(self._read_group, group, data, verify, report))
                continue
            (tensor,) = group
            step = CHUNK_BYTES if verify or progress is not None else tensor.nbytes
            for start in range(0, tensor.nbytes, step):
                part = memoryview(data[tensor.name])[start : start + step]
                jobs.append(functools.partial(self._read_part, tensor, start, part, verify, report))
        run_jobs(jobs, self._num_threads(total if verify else 0))
        return {tensor.name: data[tensor.name] for tensor in tensors}

    def read_selection(self, name: str, selection: Selection, *, verify: bool = True) -> Bytes:
        """The bytes of a part of a tensor, in C order, without those of the rest.

        Args:
            name: of the tensor.
            selection: one slice an axis of the stored shape, with positive steps; axes that are left out are whole.
            verify: whether to check the digests of the chunks that the part touches, which are then read whole.

        Raises:
            CorruptFileError: if a chunk does not have its digest.

        Cost: reads the selected runs, and gaps of up to 16 KiB between them. What is copied besides is at most 4 MiB
        at a time, unless the part is large: then its runs are read where they belong.
        """
        tensor = self.tensors[name]
        reader = _Chunks(self, tensor).read_into if verify else functools.partial(self._read_at, tensor)
        plan = runs(tensor, selection)
        memory = aligned(plan.nbytes)
        plan.read(reader, memory)
        return memory

    def mapped(self) -> Mapping[str, Bytes]:
        """The bytes of all tensors as read-only views of the mapped file.

        Nothing is read before it is looked at, and nothing is checked; `damage` does that. If another program cuts the
        file short, looking at the views ends the process (SIGBUS); if it writes into the file, they change. Files that
        `sharedtree` replaces are safe: the old one lives on until nobody uses it.

        A file object that is none of the operating system's is read into memory.
        """
        everything = self._source.mapped()[self._header.data_start :]
        return {name: everything[tensor.start : tensor.stop] for name, tensor in self.tensors.items()}

    def damage(self, names: Sequence[str] | None = None, *, progress: Progress | None = None) -> list[Damage]:
        """Reads tensors and keeps nothing: which chunks do not have their digests, in order.

        Args:
            names: default: all, and the manifest.
            progress: called after each read.

        Cost: one pass over the bytes, and 4 MiB of memory a thread.
        """
        tensors = self._header.tensors if names is None else [self.tensors[name] for name in dict.fromkeys(names)]
        total = sum(tensor.nbytes for tensor in tensors)
        report = _reporting(progress, total)
        found: list[tuple[int, int]] = []
        scratch = threading.local()

        def check(tensor: Tensor, start: int) -> None:
            if not hasattr(scratch, "memory"):
                scratch.memory = aligned(CHUNK_BYTES)
            part = memoryview(scratch.memory)[: min(CHUNK_BYTES, tensor.nbytes - start)]
            self._read_at(tensor, start, part)
            if not self._has_digest(tensor, start // CHUNK_BYTES, part):
                found.append((self._number[tensor.name], start // CHUNK_BYTES))
            report(len(part))

        jobs = (
            functools.partial(check, tensor, start)
            for tensor in tensors
            for start in range(0, tensor.nbytes, CHUNK_BYTES)
        )
        run_jobs(jobs, self._num_threads(total))
        return [Damage(self._header.tensors[number].name, chunk) for number, chunk in sorted(found)]

    def require_undamaged(self, names: Sequence[str] | None = None, *, progress: Progress | None = None) -> None:
        """Raises `CorruptFileError`, with every tensor that is damaged, unless all chunks have their digests.

        Arguments and cost are those of `damage`.
        """
        found = self.damage(names, progress=progress)
        if not found:
            return
        chunks: dict[str, list[int]] = {}
        for tensor, chunk in found:
            chunks.setdefault(tensor, []).append(chunk)
        listed = [f"    `{printable(tensor)}`: {_numbers(numbers)}" for tensor, numbers in chunks.items()]
        raise CorruptFileError(
            "\n".join(
                [
                    f"`{self.label}` is damaged. These tensors have chunks of 4 MiB that do not have their digests:",
                    *listed,
                    "The file was changed after it was written, by a disk, a network or a program. Restore it from a "
                    "copy, or take what is there:",
                    "    sharedtree.load(path, verify=False)",
                ]
            ),
            tuple(chunks),
            found[0].chunk,
        )

    # --- parts -----------------------------------------------------------------------------------------------------

    def _spilled_manifest(self) -> str:
        tensor = self.tensors.pop(MANIFEST_TENSOR)
        text = aligned(tensor.nbytes)
        for start in range(0, tensor.nbytes, CHUNK_BYTES):
            self._read_part(tensor, start, memoryview(text)[start : start + CHUNK_BYTES], True, lambda _: None)
        try:
            return text.tobytes().decode()
        except UnicodeDecodeError as error:
            raise FormatError(
                f"`{self.label}` is not a valid sharedtree file: its manifest is not UTF-8 at byte {error.start}.\n"
                "Nothing was loaded. Restore the file from a copy, or save the model again."
            ) from None

    def _num_threads(self, nbytes: int) -> int | None:
        """For reading and hashing so many bytes."""
        return None if nbytes >= _WORTH_THREADS and self._source.is_concurrent else 1

    def _read_at(self, tensor: Tensor, start: int, buffer: memoryview) -> None:
        self._source.read_into(self._header.data_start + tensor.start + start, buffer)

    def _read_part(
        self, tensor: Tensor, start: int, buffer: memoryview, verify: bool, report: Callable[[int], None]
    ) -> None:
        self._read_at(tensor, start, buffer)
        if verify:
            self._require_digest(tensor, start // CHUNK_BYTES, buffer)
        report(len(buffer))

    def _read_group(
        self, group: Sequence[Tensor], data: Mapping[str, Bytes], verify: bool, report: Callable[[int], None]
    ) -> None:
        start, stop = group[0].start, group[-1].stop
        run = memoryview(bytearray(stop - start))
        self._source.read_into(self._header.data_start + start, run)
        for tensor in group:
            part = run[tensor.start - start : tensor.stop - start]
            if verify and len(part):
                self._require_digest(tensor, 0, part)
            memoryview(data[tensor.name])[:] = part
        report(sum(tensor.nbytes for tensor in group))

    def _has_digest(self, tensor: Tensor, chunk: int, data: memoryview) -> bool:
        header = self._header
        return zlib.crc32(data) == header.digests[header.first_chunk[self._number[tensor.name]] + chunk]

    def _require_digest(self, tensor: Tensor, chunk: int, data: memoryview) -> None:
        if self._has_digest(tensor, chunk, data):
            return
        start = chunk * CHUNK_BYTES
        raise CorruptFileError(
            f"The tensor `{printable(tensor.name)}` in `{self.label}` is damaged: chunk {chunk} of "
            f"{num_chunks(tensor.nbytes)}, bytes {start} to {start + len(data)} of the tensor, does not "
            "have the digest saved with it.\nThe file was changed after it was written, by a disk, a network or a "
            "program. Restore it from a copy, or take what is there:\n    sharedtree.load(path, verify=False)",
            (tensor.name,),
            chunk,
        )


class _Chunks:
    """Reads any part of a tensor by whole chunks, checking each; keeps the last, where the next part may begin."""

    def __init__(self, container: Container, tensor: Tensor) -> None:
        self._container = container
        self._tensor = tensor
        self._chunk = -1
        self._scratch = aligned(min(CHUNK_BYTES, tensor.nbytes))

    def read_into(self, start: int, buffer: memoryview) -> None:
        while len(buffer):
            chunk, within = divmod(start, CHUNK_BYTES)
            size = min(CHUNK_BYTES, self._tensor.nbytes - chunk * CHUNK_BYTES)
            part = buffer[: size - within]
            if len(part) == size and chunk != self._chunk:
                self._load(chunk, part)
            else:
                if chunk != self._chunk:
                    self._chunk = -1
                    self._load(chunk, memoryview(self._scratch)[:size])
                    self._chunk = chunk
                part[:] = memoryview(self._scratch)[within : within + len(part)]
            buffer = buffer[len(part) :]
            start += len(part)

    def _load(self, chunk: int, buffer: memoryview) -> None:
        self._container._read_part(self._tensor, chunk * CHUNK_BYTES, buffer, True, lambda _: None)


def read_header(where: Readable) -> Container:
    """Opens a container: reads its header, checks all of it, and the manifest.

    Args:
        where: a path, a file object open for reading in binary mode (read from where it is positioned; one that cannot
            seek is read into memory), or the bytes of a container.

    Raises:
        FormatError: if this is not a sharedtree file, or malformed.
        CorruptFileError: if it is one that was cut short, or whose header or manifest has changed.
        OSError: if it cannot be read.

    Cost: in the length of the header. Data is not read. Nothing is allocated that the file does not hold.
    """
    source = open_source(where)
    try:
        length = header_length(bytes(source.read(0, _RECOGNISABLE)), source.size, source.label)
        header = parse_header(bytes(source.read(0, LENGTH_BYTES + length)), source.size, source.label)
        return Container(source, header)
    except BaseException:
        source.close()
        raise


def _reporting(progress: Progress | None, total: int) -> Callable[[int], None]:
    if progress is None:
        return lambda _: None
    lock = threading.Lock()
    done = 0

    def report(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            progress(done, total)

    return report


def _numbers(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MAX_SHOWN]))
    return f"chunk{'s' if len(numbers) > 1 else ''} {shown}{', ...' if len(numbers) > _MAX_SHOWN else ''}"
