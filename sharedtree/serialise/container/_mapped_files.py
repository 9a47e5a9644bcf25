"""Files that are mapped into memory. Before such a file is overwritten in place, its mappings become ordinary memory.

`load(mmap=True)` maps a file. The bytes of its arrays are read from the file when they are used, so the arrays change
if the file does. `save` to a path is no danger: it makes a new file, and the mapping keeps the old one alive. But
`save` to a file object that was opened with `"r+b"` overwrites the bytes from which those arrays are read. Perhaps
the arrays to be saved are among them. So before `save` writes, each mapping of the file is replaced by ordinary
memory at the same address:

    address         before                       after
    0x7f..000   →   page 0 of `model`        →   a copy of page 0
    0x7f..000 + n   page n of `model`            a copy of page n

NumPy and JAX arrays keep their values, and no longer depend on the file. Linux can do this (`mremap`). On other
systems, `save` raises an error before it writes. It also does so if an array to be saved is in a mapping by other code
(`numpy.memmap`). Such mappings are found by Linux's list of mappings. On other systems they are not noticed.
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
"""Device and inode of a file. While the file exists, all its names and descriptors have the same pair."""


class FileMapping(mmap.mmap):
    """A read-only mapping of a file from its beginning. Whoever makes one sets `file_id`."""

    file_id: FileId


class AddressRange(NamedTuple):
    """The addresses from `start` up to `stop`, without `stop`."""

    start: int
    stop: int

    def overlaps(self, other: "AddressRange") -> bool:
        """Returns True if an address is in both ranges."""
        return self.start < other.stop and other.start < self.stop


# All mappings that `load(mmap=True)` made and that are still alive. They are ours, others' are foreign.
_mappings: "weakref.WeakSet[FileMapping]" = weakref.WeakSet()
_lock = Lock()


def map_file(descriptor: int, nbytes: int) -> FileMapping:
    """Maps the first `nbytes` bytes of a regular file. Raises `ValueError` if the file has fewer."""
    mapping = FileMapping(descriptor, nbytes, access=mmap.ACCESS_READ)
    mapping.file_id = _id_of(os.fstat(descriptor))
    with _lock:
        _mappings.add(mapping)
    return mapping


def detach_from(file: Any, names: Sequence[str], arrays: Sequence[Any]) -> None:
    """Makes everything mapped from a file independent of it, before the file is overwritten in place.

    Our mappings of the file become ordinary memory. If this is impossible, or if a mapping by other code holds an array
    to be saved, an error is raised.

    Args:
        file: the file object to be written to. If it is no regular file of the system, nothing is done.
        names: names of the arrays to be saved, for errors.
        arrays: the arrays to be saved, NumPy's and JAX's.

    Raises:
        OSError: with `EBUSY`, if some arrays cannot be made independent and would change, or if the file was cut
            short after arrays to be saved were mapped from it. Nothing was written.

    Cost: if the file is mapped, all of it is read into memory.
    """
    descriptor = _descriptor_of(file)
    if descriptor is None:
        return
    status = os.fstat(descriptor)
    name = str(getattr(file, "name", f"<{type(file).__name__}>"))
    # The name without control characters.
    label = printable(name)
    if _own_mappings(_id_of(status)):
        # A model that nobody uses any more may be alive because of a reference cycle. Without its mapping, there is
        # less to read.
        gc.collect()
    # Our own mappings become memory.
    for mapping in _own_mappings(_id_of(status)):
        if status.st_size < len(mapping):
            # Opening a file with "wb" empties it, so the mapped bytes are lost. Arrays that are not to be saved are
            # lost as well, but that was done by the opening, not by this call.
            _require_no_overlap(list(_numbers_of_overlapping([_range_of(mapping)], arrays)), names, name, _CUT_SHORT)
            continue
        try:
            _turn_into_memory(mapping)
        except OSError as error:
            fact = (
                f"`{label}` cannot be written to: a model's arrays are mapped from it, by `load(mmap=True)`, and would "
                "change. They could not be turned into memory first"
            )
            raise OSError(errno.EBUSY, f"{fact} ({error.strerror}). {_COPY}\nFile", name) from None
    # Mappings by others, such as `numpy.memmap`, cannot be turned into memory. They are an error if they hold an array
    # that is to be saved.
    foreign_ranges = list(_ranges_mapped_from(status))
    _require_no_overlap(list(_numbers_of_overlapping(foreign_ranges, arrays)), names, name, _MAPPED)


# Ends of the errors' messages.
_COPY = (
    "Nothing was written. Copy the model into memory, delete all references to the old one, and save the copy:\n"
    "    model = sharedtree.copy(model)\n"
    "    sharedtree.save(file, model)"
)
_MAPPED = f"is mapped from it, and writing into the file would change the data that must still be written. {_COPY}"
_CUT_SHORT = (
    "was mapped from it, and the file has been cut short since, as opening it with `wb` does. Its values are lost. "
    "Nothing was written. Another time, open the file with `r+b`, or save to its path."
)


def _require_no_overlap(numbers: Sequence[int], names: Sequence[str], file_name: str, why: str) -> None:
    """Raises `OSError` with `EBUSY` unless `numbers` is empty.

    Args:
        numbers: positions in `names` of the arrays because of which a file cannot be written to.
        names: names of all arrays to be saved.
        file_name: name of the file.
        why: the end of the message, with a verb first: `_MAPPED` or `_CUT_SHORT`.
    """
    if numbers:
        more = f" and {len(numbers) - 1:,} more" if len(numbers) > 1 else ""
        label, first = printable(file_name), printable(names[numbers[0]])
        message = f"`{label}` cannot be written to: the array `{first}`{more} {why}"
        # `OSError` appends `: 'name'` to its text, hence "File" at the end.
        raise OSError(errno.EBUSY, f"{message}\nFile", file_name)


def _id_of(status: os.stat_result) -> FileId:
    """Returns the device and inode in a result of `os.stat`."""
    return status.st_dev, status.st_ino


def _descriptor_of(file: Any) -> int | None:
    """Returns the descriptor of the regular file whose bytes change if `file` is written to; None if none change.

    An object that compresses (`gzip.GzipFile`) returns the descriptor of the file it writes to. If a file is open for
    appending, the bytes in it do not change, so this returns None.
    """
    try:
        descriptor = file.fileno()
        if type(descriptor) is not int or not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
    # It is no file of the system, or is closed. In the latter case, writing will raise the error.
    except (AttributeError, OSError, ValueError):
        return None
    with contextlib.suppress(ImportError):
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND:
            return None
    return descriptor


def _own_mappings(file_id: FileId) -> list[FileMapping]:
    """Returns our own open mappings of a file."""
    with _lock:
        return [mapping for mapping in _mappings if mapping.file_id == file_id and not mapping.closed]


def _range_of(mapping: mmap.mmap) -> AddressRange:
    """Returns the addresses of a mapping."""
    start = np.frombuffer(mapping, np.uint8).ctypes.data
    return AddressRange(start, start + len(mapping))


def _numbers_of_overlapping(ranges: Sequence[AddressRange], arrays: Sequence[Any]) -> Iterator[int]:
    """Yields the positions in `arrays` of the arrays with memory in any of the ranges."""
    # Without a range, no array is looked at.
    for number, array in enumerate(arrays if ranges else ()):
        if any(memory.overlaps(address_range) for memory in _memory_of(array) for address_range in ranges):
            yield number


def _memory_of(array: Any) -> Iterator[AddressRange]:
    """Yields the address ranges of an array in the host's memory. Shards of a JAX array on other devices have none."""
    if not array.size:
        return
    if isinstance(array, np.ndarray):
        yield AddressRange(*np.lib.array_utils.byte_bounds(array))
        return
    # JAX raises a `RuntimeError` for a deleted array. Here it counts as an array without memory. The user gets JAX's
    # error when the array is written.
    with contextlib.suppress(RuntimeError):
        for shard in array.addressable_shards:
            if shard.device.platform == "cpu":
                yield AddressRange(*np.lib.array_utils.byte_bounds(np.asarray(shard.data)))


def _ranges_mapped_from(status: os.stat_result) -> Iterator[AddressRange]:
    """Yields the address ranges mapped from a file by this process.

    Linux has a list of all mappings, `/proc/self/maps`. On other systems, nothing is yielded. On some file systems
    (overlayfs, btrfs), the device in the list differs from that of `stat`, on others the inode does. So
    a mapping counts if its inode or its path is that of the file. Another file's mapping may count by mistake, but no
    mapping of this file is missed.

    Args:
        status: result of `os.stat` for the file.
    """
    try:
        with open("/proc/self/maps", "rb") as maps:
            lines = maps.read().splitlines()
    # Only Linux has the list.
    except OSError:
        return
    # Path in the list → True if it leads to the file now.
    leads_to_file: dict[bytes, bool] = {}
    for line in lines:
        # For example b"7f5c1000-7f5c3000 r--s 00000000 08:01 1234    /tmp/model". The path may be missing.
        addresses, _, _, _, inode, *name = line.split(maxsplit=5)
        # Ordinary memory has no inode.
        if inode == b"0":
            continue
        path = name[0] if name else b""
        if path not in leads_to_file:
            leads_to_file[path] = False
            with contextlib.suppress(OSError, ValueError):
                leads_to_file[path] = _id_of(os.stat(path)) == _id_of(status)
        if int(inode) == status.st_ino or leads_to_file[path]:
            start, _, stop = addresses.partition(b"-")
            yield AddressRange(int(start, 16), int(stop, 16))


@functools.cache
def _libc() -> Any:
    """Returns the C library, with the signatures of the functions used below.

    Raises:
        OSError: if the system is not Linux.
    """
    if not sys.platform.startswith("linux"):
        raise OSError(errno.ENOSYS, "no memory can be put in the place of a mapping here")
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = [pointer, size, number, number, number, ctypes.c_long], pointer
    libc.mprotect.argtypes, libc.mprotect.restype = [pointer, size, number], number
    libc.munmap.argtypes, libc.munmap.restype = [pointer, size], number
    libc.mremap.argtypes, libc.mremap.restype = [pointer, size, size, number, pointer], pointer
    return libc


# What `mmap` and `mremap` return after an error.
_FAILED = ctypes.c_void_p(-1).value
# `MREMAP_MAYMOVE | MREMAP_FIXED`: `mremap` moves memory to a certain address, and unmaps whatever was there.
_MAYMOVE_AND_FIXED = 3


def _turn_into_memory(mapping: FileMapping) -> None:
    """Replaces a mapping by a copy in ordinary memory at the same address.

    The system replaces it in one step, so a thread that reads the memory at the same time reads the same bytes.
    When the mapping object is freed, it unmaps the copy, as it would have unmapped the file.

    Raises:
        OSError: if there is no memory, or the system is not Linux.
    """
    libc, (start, stop) = _libc(), _range_of(mapping)
    nbytes = stop - start
    read_and_write = mmap.PROT_READ | mmap.PROT_WRITE
    # The arguments -1 and 0: there is no file, and so no offset in it.
    memory = libc.mmap(None, nbytes, read_and_write, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if memory == _FAILED:
        raise _last_error()
    # The copy becomes read-only like the mapping, and is then moved to its address.
    ctypes.memmove(memory, start, nbytes)
    is_read_only = libc.mprotect(memory, nbytes, mmap.PROT_READ) == 0
    if not is_read_only or libc.mremap(memory, nbytes, nbytes, _MAYMOVE_AND_FIXED, start) == _FAILED:
        error = _last_error()
        libc.munmap(memory, nbytes)
        raise error
    with _lock:
        _mappings.discard(mapping)


def _last_error() -> OSError:
    """Returns the error of the last call of the C library."""
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
