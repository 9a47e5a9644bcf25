"""Files that are mapped into memory. Before such a file is written to in place, its mappings become ordinary memory.

`load(mmap=True)` maps a file. Its arrays are read from the file whenever somebody looks at them, so they change if the
file does. `save` to a path is no danger: it makes a new file, and the mapping keeps the old one alive. `save` to a file
object that was opened with `"r+b"` writes into the very bytes the arrays are read from, perhaps those it is
about to write. So before it writes, each mapping of that file becomes ordinary memory, at the address where it is:

    address         before                       after
    0x7f..000   →   page 0 of `model`        →   a copy of page 0
    0x7f..000 + n   page n of `model`            a copy of page n

NumPy and JAX arrays over that memory notice nothing, and are no longer read from the file. Linux can do this
(`mremap`). Elsewhere, and for mappings somebody else made (`numpy.memmap`), `save` refuses before it writes.
"""

import contextlib
import ctypes
import errno
import functools
import gc
import mmap
import os
import stat
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...core._locks import Lock
from ...core._printing import printable

FileId = tuple[int, int]
"""Device and inode of a file. All its names and descriptors have the same, while it exists."""


class FileMapping(mmap.mmap):
    """A file from its beginning, mapped read-only. Set `file_id` right after it is made."""

    file_id: FileId


class AddressRange(NamedTuple):
    """Addresses from `start` up to `stop`."""

    start: int
    stop: int

    def overlaps(self, other: "AddressRange") -> bool:
        """Returns True if an address is in both ranges."""
        return self.start < other.stop and other.start < self.stop


# All mappings that `load(mmap=True)` made and somebody still uses.
_mappings: "weakref.WeakSet[FileMapping]" = weakref.WeakSet()
_lock = Lock()


def map_file(descriptor: int, nbytes: int) -> FileMapping:
    """Maps the first bytes of a regular file. Raises `ValueError` if the file has fewer."""
    mapping = FileMapping(descriptor, nbytes, access=mmap.ACCESS_READ)
    mapping.file_id = _id_of(os.fstat(descriptor))
    with _lock:
        _mappings.add(mapping)
    return mapping


def detach_from(file: Any, names: Sequence[str], arrays: Sequence[Any]) -> None:
    """Makes arrays independent of a file before it is written to in place.

    Args:
        file: the file object. If it has no descriptor of a regular file, nothing is done.
        names: names of the arrays, for errors.
        arrays: these arrays, NumPy's and JAX's.

    Raises:
        OSError: with `EBUSY`, if arrays would change that cannot be made independent, or if the file was cut short
            after arrays to be written were mapped from it. Nothing was written.

    Cost: if the file is mapped, all of it is read into memory.
    """
    descriptor = _descriptor_of(file)
    if descriptor is None:
        return
    status = os.fstat(descriptor)
    name = str(getattr(file, "name", f"<{type(file).__name__}>"))
    label = printable(name)
    if _own_mappings(_id_of(status)):
        # The mapping of a model that nobody uses any more goes away here, and need not be read.
        gc.collect()
    # Our own mappings become memory.
    for mapping in _own_mappings(_id_of(status)):
        if status.st_size < len(mapping):
            # Opening a file with "wb" empties it, so the mapped bytes are lost.
            _require_none(list(_overlapping([_range_of(mapping)], arrays)), names, name, _CUT_SHORT)
            continue
        try:
            _turn_into_memory(mapping)
        except OSError as error:
            fact = (
                f"`{label}` is mapped into memory, by `load(mmap=True)`, and to write into it would change the arrays"
            )
            raise OSError(errno.EBUSY, f"{fact} ({error.strerror}). {_COPY}\nNot written", name) from None
    # Mappings by others, such as `numpy.memmap`, cannot be turned into memory. Their arrays stand in the way.
    foreign_ranges = list(_mappings_of_others(status))
    _require_none(list(_overlapping(foreign_ranges, arrays)), names, name, _MAPPED)


_COPY = (
    "Nothing was written. Copy the model into memory, let go of the old one, and save the copy:\n"
    "    model = sharedtree.copy(model)\n"
    "    sharedtree.save(file, model)"
)
_MAPPED = f"is mapped from it, and writing into the file would change what is yet to be written. {_COPY}"
_CUT_SHORT = (
    "was mapped from it, and the file has been cut short since, as opening it with `wb` does. Its values are lost. "
    "Nothing was written. Another time, open the file with `r+b`, or save to its path."
)


def _require_none(numbers: Sequence[int], names: Sequence[str], file_name: str, why: str) -> None:
    """Raises `OSError` if arrays stand in the way of writing to a file.

    Args:
        numbers: positions of these arrays in `names`.
        names: names of all arrays.
        file_name: name of the file.
        why: the end of the message.
    """
    if numbers:
        more = f" and {len(numbers) - 1:,} more" if len(numbers) > 1 else ""
        label, first = printable(file_name), printable(names[numbers[0]])
        message = f"`{label}` cannot be written to: the array `{first}`{more} {why}"
        raise OSError(errno.EBUSY, f"{message}\nNot written", file_name)


def _id_of(status: os.stat_result) -> FileId:
    return status.st_dev, status.st_ino


def _descriptor_of(file: Any) -> int | None:
    """Returns the descriptor of a regular file whose bytes change if `file` is written to; None if there is none.

    A compressing object has the descriptor of the file it writes to. Appending to a file changes no byte that
    it has, so it needs no care.
    """
    try:
        descriptor = file.fileno()
        if type(descriptor) is not int or not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
    # It is no file of the system, or a closed one. Then `write` raises the error.
    except (AttributeError, OSError, ValueError):
        return None
    with contextlib.suppress(ImportError):
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND:
            return None
    return descriptor


def _own_mappings(file_id: FileId) -> list[FileMapping]:
    with _lock:
        return [mapping for mapping in _mappings if mapping.file_id == file_id and not mapping.closed]


def _range_of(mapping: mmap.mmap) -> AddressRange:
    start = np.frombuffer(mapping, np.uint8).ctypes.data
    return AddressRange(start, start + len(mapping))


def _overlapping(ranges: Sequence[AddressRange], arrays: Sequence[Any]) -> Iterator[int]:
    """Iterates over the numbers of the arrays that have memory in one of some ranges of addresses."""
    for number, array in enumerate(arrays if ranges else ()):
        if any(memory.overlaps(address_range) for memory in _memory_of(array) for address_range in ranges):
            yield number


def _memory_of(array: Any) -> Iterator[AddressRange]:
    """Iterates over an array's ranges of addresses in the host's memory. Shards on other devices have none."""
    if not array.size:
        return
    if isinstance(array, np.ndarray):
        yield AddressRange(*np.lib.array_utils.byte_bounds(array))
        return
    # JAX raises it for a deleted array. Then `write` raises the error.
    with contextlib.suppress(RuntimeError):
        for shard in array.addressable_shards:
            if shard.device.platform == "cpu":
                yield AddressRange(*np.lib.array_utils.byte_bounds(np.asarray(shard.data)))


def _mappings_of_others(status: os.stat_result) -> Iterator[AddressRange]:
    """Iterates over the ranges where this process has mapped a file, as far as the system lists them.

    Some file systems (overlayfs, btrfs) have another device in that list than `stat` says, and some another inode. So a
    mapping counts if it has the inode, or the name, of the file. Too many may count, but not too few.
    """
    try:
        with open("/proc/self/maps", "rb") as maps:
            lines = maps.read().splitlines()
    # Only Linux has the list.
    except OSError:
        return
    same_name: dict[bytes, bool] = {}
    for line in lines:
        addresses, _, _, _, inode, *name = line.split(maxsplit=5)
        # Ordinary memory has no inode.
        if inode == b"0":
            continue
        path = name[0] if name else b""
        if path not in same_name:
            same_name[path] = False
            with contextlib.suppress(OSError, ValueError):
                same_name[path] = _id_of(os.stat(path)) == _id_of(status)
        if int(inode) == status.st_ino or same_name[path]:
            start, _, stop = addresses.partition(b"-")
            yield AddressRange(int(start, 16), int(stop, 16))


@functools.cache
def _libc() -> Any:
    """Returns the C library with the signatures of its functions that move memory. Raises `OSError` if not on Linux."""
    if not sys.platform.startswith("linux"):
        raise OSError(errno.ENOSYS, "no memory can be put in the place of a mapping here")
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = [pointer, size, number, number, number, ctypes.c_long], pointer
    libc.mprotect.argtypes, libc.mprotect.restype = [pointer, size, number], number
    libc.munmap.argtypes, libc.munmap.restype = [pointer, size], number
    libc.mremap.argtypes, libc.mremap.restype = [pointer, size, size, number, pointer], pointer
    return libc


_FAILED = ctypes.c_void_p(-1).value
_MAYMOVE_AND_FIXED = 3


def _turn_into_memory(mapping: FileMapping) -> None:
    """Puts a copy of a mapping in its place, in one step: whoever reads it meanwhile reads the same bytes.

    The mapping object unmaps the copy in the end, as it would have unmapped the file.

    Raises:
        OSError: if there is no memory.
    """
    libc, (start, stop) = _libc(), _range_of(mapping)
    nbytes = stop - start
    read_and_write = mmap.PROT_READ | mmap.PROT_WRITE
    memory = libc.mmap(None, nbytes, read_and_write, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if memory == _FAILED:
        raise _last_error()
    # The copy becomes read-only like the mapping, and is then moved over it.
    ctypes.memmove(memory, start, nbytes)
    is_placed = libc.mprotect(memory, nbytes, mmap.PROT_READ) == 0
    if not is_placed or libc.mremap(memory, nbytes, nbytes, _MAYMOVE_AND_FIXED, start) == _FAILED:
        error = _last_error()
        libc.munmap(memory, nbytes)
        raise error
    with _lock:
        _mappings.discard(mapping)


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
