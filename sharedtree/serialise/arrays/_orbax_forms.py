"""Arrays in an Orbax checkpoint: their keys, dtypes and shapes; and checks of a checkpoint before its arrays are read.

An array is passed to Orbax *as itself* if TensorStore has its dtype. Of any other array, Orbax gets the bytes: uint8,
with the size of an item as one more axis at the end unless that size is 1. Of JAX's arrays, only dtypes with one byte
for each element are passed in this way, so such an array keeps its shape and its sharding. Orbax refuses arrays
without elements, so these are in the manifest alone.

A restore reads the manifest first. Orbax and TensorStore allocate memory by the metadata beside each array, which has
its shape and the shape of its chunks. So a forged checkpoint of a few hundred bytes could demand terabytes, and
TensorStore ends the process if the system refuses. Therefore, before any byte of the arrays is read, the manifest and
the metadata must agree. And the arrays must be no larger than the files on the disk can be when they are decompressed.

Words: the *form* of an array in a checkpoint is the dtype and the shape with which Orbax gets it.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import jax
import numpy as np

from ...core._errors import FormatError, SharedTreeError, StructureMismatchError
from ...core._printing import printable
from ._dtypes import STORED_AS_ITSELF, array_from_bytes, clear_unused_bits, dtype_named, normalise_bools, on_disk
from ._placing import ArrayEntry, Placement

# The ASCII characters that are not encoded in a key. `/` is: Orbax would make folders of the parts.
_PLAIN = "".join(chr(i) for i in range(32, 127) if chr(i) not in "%/")


# ---- Saving: what Orbax gets ----


def key_of(entry: ArrayEntry) -> str:
    """Returns the key of an array in the checkpoint: its tensor's name, with all but plain ASCII percent-encoded."""
    return quote(entry.tensor, safe=_PLAIN, errors="surrogatepass")


def is_in_checkpoint(entry: ArrayEntry) -> bool:
    """Returns True if an array is in the checkpoint: it has bytes."""
    return 0 not in entry.shape and dtype_named(entry.dtype).itemsize > 0


def orbax_form(entry: ArrayEntry) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Returns the form of an array in the checkpoint: its dtype and its shape there."""
    dtype = dtype_named(entry.dtype)
    if _is_as_itself(entry):
        return dtype.newbyteorder("="), entry.shape
    return np.dtype(np.uint8), entry.shape if dtype.itemsize == 1 else (*entry.shape, dtype.itemsize)


def _is_as_itself(entry: ArrayEntry) -> bool:
    """Returns True if TensorStore has an array's dtype, so that the array is passed as itself."""
    name = entry.dtype.lstrip("<>")
    return name in STORED_AS_ITSELF or name in ("complex64", "complex128")


def to_orbax_form(entry: ArrayEntry, array: Any) -> Any:
    """Returns an array in the form for Orbax.

    It is the same object if nothing about it has to change.

    Args:
        entry: entry of the array.
        array: an array of NumPy or JAX, not empty. For PRNG keys, their raw data.
    """
    # TensorStore writes booleans whose byte is not 0 or 1, but refuses to read them.
    array = normalise_bools(array)
    if isinstance(array, np.ndarray):
        if _is_as_itself(entry):
            return array.astype(array.dtype.newbyteorder("="), copy=False)
        data = np.array(array, on_disk(array.dtype), order="C").reshape(-1).view(np.uint8)
        clear_unused_bits(data, on_disk(array.dtype))
        return data.reshape(orbax_form(entry)[1])
    if not _is_as_itself(entry):
        array = _reinterpreted(array, np.dtype(np.uint8))
    if jax.process_count() > 1 and array.is_fully_addressable:
        # With several processes, Orbax refuses a JAX array that only one of them has. It takes one of NumPy's, which
        # the first process writes.
        return np.asarray(array)
    return array


# ---- Restoring: no allocation beyond the size of the files ----


def from_orbax_form(entry: ArrayEntry, array: Any) -> Any:
    """Returns the array of an entry, from the array restored by Orbax. PRNG keys stay raw data.

    Args:
        entry: entry of the array.
        array: Orbax's array, of NumPy or JAX; None if the checkpoint does not have the array, since it has no bytes.

    Raises:
        FormatError: if the array does not have the form in the entry, or the entry's shape is impossible.
    """
    dtype = dtype_named(entry.dtype)
    if not is_in_checkpoint(entry):
        try:
            return np.empty(entry.shape, dtype)
        except ValueError:
            raise FormatError(f"`{printable(entry.tensor)}` has an impossible shape, {list(entry.shape)}.") from None
    _require_stored_as(entry, array)
    if isinstance(array, jax.Array):
        return array if _is_as_itself(entry) else _reinterpreted(array, dtype)
    if _is_as_itself(entry):
        return array.astype(dtype, copy=False)
    return array_from_bytes(np.asarray(array, order="C").reshape(-1), dtype, entry.shape)


def _reinterpreted(array: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Returns a JAX array with the same bytes and another dtype. Both dtypes have one byte for each element.

    The bytes go through the host, shard by shard, since XLA cannot reinterpret some of these dtypes.
    """
    shards = [shard.data for shard in array.addressable_shards]
    parts = [jax.device_put(np.asarray(shard).view(dtype), shard.sharding) for shard in shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def require_sound(metadata: Any, wanted: Sequence[tuple[ArrayEntry, Placement]], label: str) -> None:
    """Raises unless a step can be read: its metadata fit its manifest, its files are whole, and there is memory for it.

    No array is read.

    Args:
        metadata: Orbax's metadata.
        wanted: pairs of the entry of an array to be read, and where the array goes. It has a pair at least, and only
            arrays that are in the checkpoint.
        label: name of the step, for errors.

    Raises:
        FormatError: if metadata and manifest do not agree, or the files are too small for the arrays.
        StructureMismatchError: if the arrays do not fit into memory.
    """

    def disagreement_error(fact: str) -> SharedTreeError:
        """Returns the error for metadata that contradicts the manifest."""
        return not_restored_error(f"The arrays of `{label}` are not those of its manifest: {printable(fact)}. ")

    # 1. Shapes, dtypes and chunks agree.
    tree = getattr(metadata, "tree", metadata)
    if not isinstance(tree, Mapping):
        raise disagreement_error("Orbax has no metadata of them")
    for entry, _ in wanted:
        key, shape = key_of(entry), orbax_form(entry)[1]
        array_metadata = tree.get(key)
        if array_metadata is None:
            raise disagreement_error(f"there is no `{key}`")
        _require_stored_as(entry, array_metadata)
        chunk_shape = getattr(getattr(array_metadata, "storage", None), "chunk_shape", None)
        if (
            chunk_shape is None
            or len(chunk_shape) != len(shape)
            or any(chunk_size > size for chunk_size, size in zip(chunk_shape, shape, strict=True))
        ):
            raise disagreement_error(f"`{key}` of shape {list(shape)} is cut into chunks of {list(chunk_shape or ())}")
    # 2. The files are large enough for the arrays.
    total = sum(_nbytes(entry, placement=None) for entry, _ in wanted)
    sizes_on_disk = _sizes(getattr(tree[key_of(wanted[0][0])], "directory", None))
    # Orbax compresses with zstd, which decompresses one byte to 2**15 bytes at most. Twice that is allowed here. The
    # sum over the files ends as soon as it is large enough.
    if not any(nbytes > total // 2**16 for nbytes in itertools.accumulate(sizes_on_disk)):
        raise disagreement_error(f"the files are too small for their {total:,} bytes")
    # 3. The host has the memory: for all arrays together that stay on the host, and for each of the others alone. To
    # find out, so much is allocated for a moment, and not touched. TensorStore would end the process instead of
    # raising an error.
    sizes = [_nbytes(entry, placement) for entry, placement in wanted]
    is_on_host = jax.default_backend() == "cpu"
    staying_bytes = 0
    for nbytes, (entry, _) in zip(sizes, wanted, strict=True):
        if is_on_host or entry.kind == "numpy":
            staying_bytes += nbytes
    needed = max(staying_bytes, *sizes)
    try:
        np.empty(needed, np.uint8)
    except (MemoryError, ValueError):
        raise StructureMismatchError(
            f"The arrays of `{label}` take {needed:,} bytes, and this machine does not have the memory. Restore a "
            "part, or on more devices:\n"
            "    sharedtree.orbax.restore(manager, step, select=lambda name: ...)"
        ) from None


def _require_stored_as(entry: ArrayEntry, array: Any) -> None:
    """Raises `FormatError` unless an array has the form in its entry.

    Args:
        entry: entry of the array in the manifest.
        array: the array, or Orbax's metadata of it.
    """
    dtype, shape = getattr(array, "dtype", None), getattr(array, "shape", None)
    expected = orbax_form(entry)
    if (dtype, shape) != expected:
        raise not_restored_error(
            f"The array `{key_of(entry)}` of the checkpoint is {dtype}{list(shape or ())}, but the manifest says "
            f"{expected[0]}{list(expected[1])}. One of the two belongs to another checkpoint. "
        )


def _nbytes(entry: ArrayEntry, placement: Placement) -> int:
    """Returns the size in bytes of an array in memory. With a sharding, only this process's shards count."""
    dtype, shape = orbax_form(entry)
    total = dtype.itemsize * math.prod(shape)
    # The raw data of PRNG keys is read as a whole, since the sharding is that of the keys.
    if not isinstance(placement, jax.sharding.Sharding) or entry.key is not None:
        return total
    return min(len(placement.addressable_devices) * dtype.itemsize * math.prod(placement.shard_shape(shape)), total)


def _sizes(directory: Any) -> Iterator[int]:
    """Yields the sizes of the files below a folder, each looked at only when the caller asks for the next size.

    Args:
        directory: the folder, one of Orbax's path objects; None for no files.
    """
    folders = [] if directory is None else [directory]
    while folders:
        for path in folders.pop().iterdir():
            if path.is_dir():
                folders.append(path)
            else:
                yield path.stat().length


def not_restored_error(fact: str, cls: type[SharedTreeError] = FormatError) -> SharedTreeError:
    """Returns the error for a step of a checkpoint that is damaged, or has parts of several steps.

    Args:
        fact: the problem, as sentences, with a space or a line break at the end.
        cls: class of the error.
    """
    return cls(f"{fact}Nothing was restored. {ANOTHER_STEP}")


ANOTHER_STEP = "Restore another step."
"""Advice in errors raised where the steps are not known. `sharedtree.orbax.restore` puts a call in its place."""
