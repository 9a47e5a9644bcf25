"""Arrays as Orbax stores them: under which key, with which dtype and shape, and back again.

Orbax is handed the very arrays of the tree where TensorStore has their dtype. Others (fp4 and fp6, the rarer kinds of
fp8, integers of less than 8 bits, NumPy's dates and long doubles) are handed over as their bytes: uint8, with the size
of an item as one more axis at the end unless it is 1. JAX's own dtypes of that kind all take one byte an element on
the host, so an array of theirs keeps its shape and its sharding. Arrays without elements are not handed over at all,
since Orbax refuses them; the manifest has all there is to know.
"""

from typing import Any
from urllib.parse import quote

import jax
import numpy as np

from ..._errors import FormatError
from ..._printable import printable
from ._arrays import ArrayEntry
from ._dtypes import clear_unused, dtype_named, on_disk, restore, used_bits

_AS_ITSELF = frozenset({
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32",
    "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
})  # fmt: skip

# What of ASCII stays in a key. `/` would make folders where each array has its own files.
_PLAIN = "".join(chr(i) for i in range(32, 127) if chr(i) not in "%/")


def key_of(tensor: str) -> str:
    """The key of an array: the name of its tensor, percent-encoded where that is not plain ASCII."""
    return quote(tensor, safe=_PLAIN, errors="surrogatepass")


def is_stored(entry: ArrayEntry) -> bool:
    """Whether an array has any bytes."""
    return 0 not in entry.shape and dtype_named(entry.dtype).itemsize > 0


def stored_as(entry: ArrayEntry) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """The dtype and the shape that Orbax sees."""
    dtype = dtype_named(entry.dtype)
    if _is_as_itself(entry):
        return dtype.newbyteorder("="), entry.shape
    if dtype.itemsize == 1:
        return np.dtype(np.uint8), entry.shape
    return np.dtype(np.uint8), (*entry.shape, dtype.itemsize)


def require_stored_as(entry: ArrayEntry, dtype: Any, shape: Any) -> None:
    """Raises if an array of the checkpoint does not have the dtype and the shape that the manifest gives it.

    Raises:
        FormatError: if it does not.
    """
    expected = stored_as(entry)
    if (dtype, shape) != expected:
        raise FormatError(
            f"The array `{key_of(entry.tensor)}` of the checkpoint is {dtype}{list(shape or ())}, and to the manifest "
            f"it is {expected[0]}{list(expected[1])}. One of the two belongs to another checkpoint. Restore another "
            "step:\n    sharedtree.orbax.restore(manager, step)"
        )


def to_hand_over(entry: ArrayEntry, array: Any) -> Any:
    """What Orbax is handed for an array.

    Args:
        entry: the array's entry.
        array: the array, which is not empty; of PRNG keys, the raw data.

    Returns:
        The array itself, wherever TensorStore has its dtype and it is not held by this process alone among several.
    """
    if isinstance(array, np.ndarray):
        if _is_as_itself(entry):
            return array.astype(array.dtype.newbyteorder("="), copy=False)
        shape = stored_as(entry)[1]
        is_padded = used_bits(array.dtype) is not None
        little = np.asarray(array.astype(on_disk(array.dtype), copy=is_padded), order="C")
        data = little.reshape(-1).view(np.uint8)
        clear_unused(data, little.dtype)
        return data.reshape(shape)
    if not _is_as_itself(entry):
        array = _reinterpreted(array, np.dtype(np.uint8))
    if jax.process_count() > 1 and array.is_fully_addressable:
        return np.asarray(array)  # Orbax refuses those of JAX, and writes NumPy's from the first process
    return array


def from_stored(entry: ArrayEntry, array: Any) -> Any:
    """The array of an entry, from what Orbax read, NumPy's or JAX's.

    Raises:
        FormatError: if it is not what the manifest says.
    """
    require_stored_as(entry, getattr(array, "dtype", None), getattr(array, "shape", None))
    dtype = dtype_named(entry.dtype)
    if isinstance(array, jax.Array):
        return array if _is_as_itself(entry) else _reinterpreted(array, dtype)
    if _is_as_itself(entry):
        return array.astype(dtype, copy=False)
    return restore(np.asarray(array, order="C").reshape(-1), dtype, entry.shape)


def without_elements(entry: ArrayEntry) -> np.ndarray[Any, Any]:
    """An array that has no bytes.

    Raises:
        FormatError: if its shape is impossible.
    """
    try:
        return np.empty(entry.shape, dtype_named(entry.dtype))
    except ValueError:
        raise FormatError(f"`{printable(entry.tensor)}` has an impossible shape, {list(entry.shape)}.") from None


def _is_as_itself(entry: ArrayEntry) -> bool:
    return entry.dtype.lstrip("<>") in _AS_ITSELF


def _reinterpreted(array: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """The same bytes with another dtype of one byte, shard by shard through the host: XLA cannot do it for all."""
    parts = [
        jax.device_put(np.asarray(shard.data).view(dtype), shard.data.sharding) for shard in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
