"""Arrays in an Orbax checkpoint: their keys, dtypes and shapes; and checks of a checkpoint before its arrays are read.

Orbax gets the very arrays of the tree, if TensorStore has their dtype. It gets the bytes of all others: uint8, with the
size of an item as one more axis at the end unless it is 1. JAX's own dtypes of that kind all take one byte an element
on the host, so such an array keeps its shape and its sharding. Orbax refuses arrays without elements, so it does not
get them; they are in the manifest alone.

A restore reads the manifest first. Orbax and TensorStore allocate what the metadata beside each array says: its shape,
and the chunks it is cut into. A forged checkpoint of some hundred bytes could so ask for terabytes, and
TensorStore ends the process if it does not get them. So before any byte of the arrays is read, manifest and metadata
must agree, and the arrays must be no larger than the files on the disk can become.
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
from ._dtypes import STORED_AS_ITSELF, clear_unused, dtype_named, on_disk, restore, with_sound_bools
from ._placing import ArrayEntry, Placement

# The ASCII characters that stay in a key. `/` would make folders where each array has its own files.
_PLAIN = "".join(chr(i) for i in range(32, 127) if chr(i) not in "%/")


# ---- Saving: what Orbax gets ----


def key_of(entry: ArrayEntry) -> str:
    """Returns the key of an array: the name of its tensor, percent-encoded except for plain ASCII."""
    return quote(entry.tensor, safe=_PLAIN, errors="surrogatepass")


def is_stored(entry: ArrayEntry) -> bool:
    """Returns True if an array has any bytes."""
    return 0 not in entry.shape and dtype_named(entry.dtype).itemsize > 0


def stored_as(entry: ArrayEntry) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Returns the dtype and the shape of an array in the checkpoint."""
    dtype = dtype_named(entry.dtype)
    if _is_as_itself(entry):
        return dtype.newbyteorder("="), entry.shape
    return np.dtype(np.uint8), entry.shape if dtype.itemsize == 1 else (*entry.shape, dtype.itemsize)


def _is_as_itself(entry: ArrayEntry) -> bool:
    name = entry.dtype.lstrip("<>")
    return name in STORED_AS_ITSELF or name in ("complex64", "complex128")


def for_orbax(entry: ArrayEntry, array: Any) -> Any:
    """Returns an array in the form for Orbax. It must not be empty. PRNG keys become their raw data.

    It is the array itself, if TensorStore has its dtype, unless this process alone of several has it.
    """
    # TensorStore writes booleans other than 0 and 1, and does not read them.
    array = with_sound_bools(array)
    if isinstance(array, np.ndarray):
        if _is_as_itself(entry):
            return array.astype(array.dtype.newbyteorder("="), copy=False)
        data = np.array(array, on_disk(array.dtype), order="C").reshape(-1).view(np.uint8)
        clear_unused(data, on_disk(array.dtype))
        return data.reshape(stored_as(entry)[1])
    if not _is_as_itself(entry):
        array = _reinterpreted(array, np.dtype(np.uint8))
    if jax.process_count() > 1 and array.is_fully_addressable:
        # Orbax refuses such arrays of JAX, and writes NumPy's from the first process.
        return np.asarray(array)
    return array


# ---- Restoring: no allocation beyond the size of the files ----


def from_stored(entry: ArrayEntry, array: Any) -> Any:
    """Returns the array of an entry, from Orbax's array.

    Args:
        entry: entry of the array.
        array: of NumPy or JAX; None if it has no bytes.
    """
    dtype = dtype_named(entry.dtype)
    if not is_stored(entry):
        try:
            return np.empty(entry.shape, dtype)
        except ValueError:
            raise FormatError(f"`{printable(entry.tensor)}` has an impossible shape, {list(entry.shape)}.") from None
    _require_stored_as(entry, array)
    if isinstance(array, jax.Array):
        return array if _is_as_itself(entry) else _reinterpreted(array, dtype)
    if _is_as_itself(entry):
        return array.astype(dtype, copy=False)
    return restore(np.asarray(array, order="C").reshape(-1), dtype, entry.shape)


def _reinterpreted(array: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Returns the same bytes with another dtype of one byte.

    Goes shard by shard through the host: XLA has no such cast for some dtypes.
    """
    shards = [shard.data for shard in array.addressable_shards]
    parts = [jax.device_put(np.asarray(shard).view(dtype), shard.sharding) for shard in shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def require_sound(metadata: Any, wanted: Sequence[tuple[ArrayEntry, Placement]], label: str) -> None:
    """Compares Orbax's metadata of a step with its manifest, before any array is read.

    Args:
        metadata: Orbax's metadata.
        wanted: entries of the wanted and stored arrays, and where each goes.
        label: name of the step, for errors.

    Raises:
        FormatError: if they do not agree, or the files are too small for the arrays.
        StructureMismatchError: if the arrays do not fit into memory.
    """

    def disagree(fact: str) -> SharedTreeError:
        return not_restored(f"The arrays of `{label}` are not those of its manifest: {printable(fact)}. ")

    # Shapes, dtypes and chunks agree.
    tree = getattr(metadata, "tree", metadata)
    if not isinstance(tree, Mapping):
        raise disagree("Orbax has no metadata of them")
    for entry, _ in wanted:
        key, shape = key_of(entry), stored_as(entry)[1]
        array_metadata = tree.get(key)
        if array_metadata is None:
            raise disagree(f"there is no `{key}`")
        _require_stored_as(entry, array_metadata)
        chunk_shape = getattr(getattr(array_metadata, "storage", None), "chunk_shape", None)
        if (
            chunk_shape is None
            or len(chunk_shape) != len(shape)
            or any(n > m for n, m in zip(chunk_shape, shape, strict=True))
        ):
            raise disagree(f"`{key}` of shape {list(shape)} is cut into chunks of {list(chunk_shape or ())}")
    # The files are large enough for what they claim to hold.
    total = sum(_nbytes(entry, None) for entry, _ in wanted)
    sizes_on_disk = _sizes(getattr(tree[key_of(wanted[0][0])], "directory", None))
    # Orbax compresses with zstd, which makes no more than 2**15 bytes of one.
    if not any(nbytes > total // 2**16 for nbytes in itertools.accumulate(sizes_on_disk)):
        raise disagree(f"what lies on the disk is too little for their {total:,} bytes")
    # Arrays that stay on the host must fit into its memory together, each of the others alone. The memory is allocated
    # for a moment and not touched, since TensorStore would end the process if it got none.
    sizes = [_nbytes(entry, placement) for entry, placement in wanted]
    is_on_host = jax.default_backend() == "cpu"
    staying = sum(n for n, (entry, _) in zip(sizes, wanted, strict=True) if is_on_host or entry.kind == "numpy")
    needed = max(staying, *sizes)
    try:
        np.empty(needed, np.uint8)
    except (MemoryError, ValueError):
        raise StructureMismatchError(
            f"The arrays of `{label}` take {needed:,} bytes, and this machine does not have the memory. Restore a "
            "part, or on more devices:\n"
            "    sharedtree.orbax.restore(manager, step, select=lambda name: ...)"
        ) from None


def _require_stored_as(entry: ArrayEntry, array: Any) -> None:
    """Raises if an array has not the dtype and shape of the manifest.

    Args:
        entry: entry of the array in the manifest.
        array: the array, or Orbax's metadata of it.
    """
    dtype, shape = getattr(array, "dtype", None), getattr(array, "shape", None)
    expected = stored_as(entry)
    if (dtype, shape) != expected:
        raise not_restored(
            f"The array `{key_of(entry)}` of the checkpoint is {dtype}{list(shape or ())}, and to the manifest it is "
            f"{expected[0]}{list(expected[1])}. One of the two belongs to another checkpoint. "
        )


def _nbytes(entry: ArrayEntry, placement: Placement) -> int:
    """Size of an array in memory; with a sharding, of what the devices of this process have of it."""
    dtype, shape = stored_as(entry)
    total = dtype.itemsize * math.prod(shape)
    if not isinstance(placement, jax.sharding.Sharding) or entry.key is not None:
        return total
    return min(len(placement.addressable_devices) * dtype.itemsize * math.prod(placement.shard_shape(shape)), total)


def _sizes(directory: Any) -> Iterator[int]:
    """Iterates over the sizes of the files below a folder. Looks only at as many files as it is asked for."""
    folders = [] if directory is None else [directory]
    while folders:
        for path in folders.pop().iterdir():
            if path.is_dir():
                folders.append(path)
            else:
                yield path.stat().length


def not_restored(fact: str, cls: type[SharedTreeError] = FormatError) -> SharedTreeError:
    """Returns the error for a damaged step, or for one put together from several."""
    return cls(f"{fact}Nothing was restored. {ANOTHER_STEP}")


ANOTHER_STEP = "Restore another step."
"""Advice of errors that do not know which steps there are. `restore` replaces it by a call with the number of one."""
