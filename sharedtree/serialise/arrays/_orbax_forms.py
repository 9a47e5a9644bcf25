"""Arrays as Orbax sees them: under which key, with which dtype and shape; and what a checkpoint must say of them.

Orbax is handed the very arrays of the tree where TensorStore has their dtype. All others are handed over as their
bytes: uint8, with the size of an item as one more axis at the end unless it is 1. JAX's own dtypes of that kind all
take one byte an element on the host, so an array of theirs keeps its shape and its sharding. Arrays without elements
are not handed over at all, since Orbax refuses them; the manifest has all there is to know.

On the way back the manifest is read first. Orbax and TensorStore take memory by the word of the metadata that lies
beside each array: for its shape, and for the chunks that it is cut into. Whoever forges a checkpoint of some hundred
bytes could so have terabytes asked for, and TensorStore ends the process where there are none. So before a byte of the
arrays is read, both must say the same, and the arrays must be no larger than what lies on the disk can become.
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

# What of ASCII stays in a key. `/` would make folders where each array has its own files.
_PLAIN = "".join(chr(i) for i in range(32, 127) if chr(i) not in "%/")


def key_of(entry: ArrayEntry) -> str:
    """The key of an array: the name of its tensor, percent-encoded where that is not plain ASCII."""
    return quote(entry.tensor, safe=_PLAIN, errors="surrogatepass")


def is_stored(entry: ArrayEntry) -> bool:
    """Whether an array has any bytes."""
    return 0 not in entry.shape and dtype_named(entry.dtype).itemsize > 0


def stored_as(entry: ArrayEntry) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """The dtype and the shape that Orbax sees."""
    dtype = dtype_named(entry.dtype)
    if _is_as_itself(entry):
        return dtype.newbyteorder("="), entry.shape
    return np.dtype(np.uint8), entry.shape if dtype.itemsize == 1 else (*entry.shape, dtype.itemsize)


def _is_as_itself(entry: ArrayEntry) -> bool:
    name = entry.dtype.lstrip("<>")
    return name in STORED_AS_ITSELF or name in ("complex64", "complex128")


def to_hand_over(entry: ArrayEntry, array: Any) -> Any:
    """What Orbax is handed for an array that is not empty; of PRNG keys that is the raw data.

    It is the array itself, wherever TensorStore has its dtype and it is not held by this process alone among several.
    """
    array = with_sound_bools(array)  # TensorStore writes others, and does not read them
    if isinstance(array, np.ndarray):
        if _is_as_itself(entry):
            return array.astype(array.dtype.newbyteorder("="), copy=False)
        data = np.array(array, on_disk(array.dtype), order="C").reshape(-1).view(np.uint8)
        clear_unused(data, on_disk(array.dtype))
        return data.reshape(stored_as(entry)[1])
    if not _is_as_itself(entry):
        array = _reinterpreted(array, np.dtype(np.uint8))
    if jax.process_count() > 1 and array.is_fully_addressable:
        return np.asarray(array)  # Orbax refuses those of JAX, and writes NumPy's from the first process
    return array


def from_stored(entry: ArrayEntry, array: Any) -> Any:
    """The array of an entry, from what Orbax read, NumPy's or JAX's; from nothing, if it has no bytes."""
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
    """The same bytes with another dtype of one byte, shard by shard through the host: XLA cannot do it for all."""
    shards = [shard.data for shard in array.addressable_shards]
    parts = [jax.device_put(np.asarray(shard).view(dtype), shard.sharding) for shard in shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def require_sound(found: Any, wanted: Sequence[tuple[ArrayEntry, Placement]], label: str) -> None:
    """Compares Orbax's metadata of a step with its manifest, which says what is wanted and stored, and where it goes.

    It is a FormatError if they do not agree, or there is too little on the disk for the arrays; and a
    StructureMismatchError if they do not fit into memory.
    """

    def disagree(fact: str) -> SharedTreeError:
        return not_restored(f"The arrays of `{label}` are not those of its manifest: {printable(fact)}. ")

    tree = getattr(found, "tree", found)
    if not isinstance(tree, Mapping):
        raise disagree("Orbax has no metadata of them")
    for entry, _ in wanted:
        key, shape = key_of(entry), stored_as(entry)[1]
        about = tree.get(key)
        if about is None:
            raise disagree(f"there is no `{key}`")
        _require_stored_as(entry, about)
        chunk = getattr(getattr(about, "storage", None), "chunk_shape", None)
        if chunk is None or len(chunk) != len(shape) or any(n > m for n, m in zip(chunk, shape, strict=True)):
            raise disagree(f"`{key}` of shape {list(shape)} is cut into chunks of {list(chunk or ())}")
    total = sum(_nbytes(entry, None) for entry, _ in wanted)
    sizes_on_disk = _sizes(getattr(tree[key_of(wanted[0][0])], "directory", None))
    # Orbax compresses with zstd, which makes no more than 2**15 bytes of one.
    if not any(nbytes > total // 2**16 for nbytes in itertools.accumulate(sizes_on_disk)):
        raise disagree(f"what lies on the disk is too little for their {total:,} bytes")
    # What stays on the host must fit into its memory together, of the others each alone. The system is asked for the
    # memory and given it back untouched: TensorStore would end the process if it got none.
    sizes = [_nbytes(*each) for each in wanted]
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


def _require_stored_as(entry: ArrayEntry, about: Any) -> None:
    """Raises if an array of the checkpoint, or what is said of it, is not of the manifest's dtype and shape."""
    dtype, shape = getattr(about, "dtype", None), getattr(about, "shape", None)
    expected = stored_as(entry)
    if (dtype, shape) != expected:
        raise not_restored(
            f"The array `{key_of(entry)}` of the checkpoint is {dtype}{list(shape or ())}, and to the manifest it is "
            f"{expected[0]}{list(expected[1])}. One of the two belongs to another checkpoint. "
        )


def _nbytes(entry: ArrayEntry, placement: Placement) -> int:
    """The size of an array in memory, or of what the devices of this process have of it."""
    dtype, shape = stored_as(entry)
    whole = dtype.itemsize * math.prod(shape)
    if not isinstance(placement, jax.sharding.Sharding) or entry.key is not None:
        return whole
    return min(len(placement.addressable_devices) * dtype.itemsize * math.prod(placement.shard_shape(shape)), whole)


def _sizes(directory: Any) -> Iterator[int]:
    """How many bytes the files below a folder have, one by one: as many are looked at as somebody asks for."""
    folders = [] if directory is None else [directory]
    while folders:
        for path in folders.pop().iterdir():
            if path.is_dir():
                folders.append(path)
            else:
                yield path.stat().length


def not_restored(fact: str, cls: type[SharedTreeError] = FormatError) -> SharedTreeError:
    """The error of a step that is damaged, or that was put together from several."""
    return cls(f"{fact}Nothing was restored. {ANOTHER_STEP}")


ANOTHER_STEP = "Restore another step."
"""What is said where nobody knows which steps there are; `restore` puts a call in its place, with the number of one."""
