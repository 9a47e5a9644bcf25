"""The bytes of an array as they go to disk: in C order and little-endian, piece by piece, without a copy of the whole.

An array in this process's memory that is contiguous is not copied at all. Others (transposed, strided, broadcast,
big-endian, with padding in their elements) are copied a piece at a time, so that writing one takes no more memory than
writing another.

So is an array that is sharded: it is never gathered. A piece of it is put together from what each shard has of it, and
no more than that leaves the devices. What is replicated is taken from one of its copies. From another device, an array
that is on one is copied as a whole, and let go with the result: nothing stays cached with the array.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from ..._printable import printable
from ..container._chunks import CHUNK_BYTES, SMALL
from ..container._header import Buffer, TensorSource
from ._dtypes import clear_unused, on_disk, stored, used_bits

Array = np.ndarray[Any, Any]


def tensor_source(name: str, array: Any) -> TensorSource:
    """An array of JAX or NumPy, of a storable dtype, as what is to be a tensor."""
    dtype, shape = array.dtype, array.shape
    stored_dtype, stored_shape = stored(dtype, shape)
    take = functools.partial(_unchanged, name, array, dtype, shape)
    return TensorSource(name, stored_dtype, stored_shape, dtype.alignment, take, _is_here(array))


def _is_here(array: Any) -> bool:
    """Whether NumPy can have an array without a copy."""
    return isinstance(array, np.ndarray) or (array.sharding.num_devices == 1 and _is_cpu(array.sharding))


def _unchanged(name: str, array: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Iterable[Buffer]:
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(
            f"The array at `{printable(name)}` was of dtype {dtype} and shape {shape} and now is of dtype "
            f"{array.dtype} and shape {array.shape}: something changed it while it was being saved."
        )
    return buffers(array)


def buffers(array: Any) -> Iterable[Buffer]:
    """The bytes of an array of JAX or NumPy, at most 4 MiB at a time.

    A buffer aliases the array where that is contiguous; otherwise it is fresh memory. Either way the consumer may keep
    it, and must not write to it.
    """
    if _is_here(array):
        host = np.asarray(array)
    elif array.is_fully_replicated:
        host = np.asarray(array.addressable_data(0))  # a new array, with which the copy on the host goes
    else:
        shards = {tuple(_bounds(shard.index, array.shape)): shard for shard in array.addressable_shards}
        take = functools.partial(_taken, array, list(shards.values()))
        return _copied(array.shape, array.dtype, take)
    if on_disk(host.dtype) == host.dtype and used_bits(host.dtype) is None:
        if host.nbytes < SMALL:  # a view takes longer to make than so much to copy
            return [host.tobytes()]
        if host.flags.c_contiguous:
            whole = memoryview(host.reshape(-1).view(np.uint8))
            return [whole[start : start + CHUNK_BYTES] for start in range(0, len(whole), CHUNK_BYTES)]
    host = host.reshape(host.shape or (1,))
    return _copied(host.shape, host.dtype, host.__getitem__)


def _copied(shape: tuple[int, ...], dtype: np.dtype[Any], take: Callable[[Any], Array]) -> Iterator[Buffer]:
    """The bytes of parts of an array, each copied. `take` is asked for parts: by numbers, and a slice of step 1."""
    if 0 in shape:
        return
    order = on_disk(dtype)
    # The outermost axis of which one step fits a piece, and how many do.
    steps = (CHUNK_BYTES // (math.prod(shape[axis + 1 :]) * dtype.itemsize) for axis in range(len(shape)))
    axis, step = next((axis, step) for axis, step in enumerate(steps) if step)
    for outer in itertools.product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], step):
            data = np.array(take((*outer, slice(start, start + step))), order, order="C").reshape(-1).view(np.uint8)
            clear_unused(data, order)
            yield memoryview(data)


def _taken(array: jax.Array, shards: list[Any], index: tuple[Any, ...]) -> Array:
    """A part of a sharded array, copied. An axis that is given a number stays, with size 1."""
    wanted = _bounds(index, array.shape)
    part = np.empty([stop - start for start, stop in wanted], array.dtype)
    for shard in shards:
        held = _bounds(shard.index, array.shape)
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, held, strict=True)]
        if any(start >= stop for start, stop in both):
            continue
        source = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, held, strict=True))
        target = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, wanted, strict=True))
        data = np.asarray(shard.data) if _is_cpu(array.sharding) else shard.data
        part[target] = np.asarray(data[source])
    return part


@functools.lru_cache
def _is_cpu(sharding: jax.sharding.Sharding) -> bool:
    return all(device.platform == "cpu" for device in sharding.device_set)


def _bounds(index: tuple[Any, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Where a part begins and ends along each axis. What `index` leaves out is whole."""
    index = (*index, *[slice(None)] * (len(shape) - len(index)))
    return [
        each.indices(size)[:2] if isinstance(each, slice) else (each, each + 1)
        for each, size in zip(index, shape, strict=True)
    ]
