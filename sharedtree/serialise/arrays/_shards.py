"""Arrays on other devices, seen from the host a piece at a time.

An array that is sharded is never gathered: a piece of it is put together from what each shard has of it, and no more
than that leaves the devices. What is replicated is taken from one of its copies.
"""

import functools
from typing import Any

import jax
import numpy as np


def on_host(array: Any) -> Any:
    """An array in host memory, or what looks like one enough for `pieces`.

    On a CPU nothing is copied. From another device an array that is on one is copied as a whole, and let go with the
    result: nothing stays cached with the array.
    """
    if isinstance(array, np.ndarray) or (array.sharding.num_devices == 1 and _is_cpu(array.sharding)):
        return np.asarray(array)
    if array.is_fully_replicated:
        return np.asarray(array.addressable_data(0))  # a new array, with which the copy on the host goes
    shards = {_start(shard.index, array.shape): shard for shard in array.addressable_shards}
    return Sharded(array, list(shards.values()))


class Sharded:
    """A sharded array of which parts can be had by slices of step 1, one for each of the first axes."""

    def __init__(self, array: jax.Array, shards: list[Any]) -> None:
        self.shape = array.shape
        self.dtype = array.dtype
        self.nbytes = array.nbytes
        self.itemsize = array.dtype.itemsize
        self.ndim = array.ndim
        self._shards = shards
        self._is_on_host = _is_cpu(array.sharding)

    def __getitem__(self, index: tuple[Any, ...]) -> np.ndarray[Any, Any]:
        """A part, copied. An axis that is given a number stays, with size 1."""
        wanted = [_bounds(each, size) for each, size in zip(index, self.shape, strict=False)]
        wanted += [(0, size) for size in self.shape[len(wanted) :]]
        part = np.empty([stop - start for start, stop in wanted], self.dtype)
        for shard in self._shards:
            held = [_bounds(each, size) for each, size in zip(shard.index, self.shape, strict=True)]
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, held, strict=True)]
            if any(start >= stop for start, stop in both):
                continue
            source = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, held, strict=True))
            target = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, wanted, strict=True))
            data = np.asarray(shard.data) if self._is_on_host else shard.data
            part[target] = np.asarray(data[source])
        return part


@functools.lru_cache
def _is_cpu(sharding: jax.sharding.Sharding) -> bool:
    return all(device.platform == "cpu" for device in sharding.device_set)


def _bounds(index: Any, size: int) -> tuple[int, int]:
    if isinstance(index, slice):
        start, stop, _ = index.indices(size)
        return start, stop
    return index, index + 1


def _start(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_bounds(each, size)[0] for each, size in zip(index, shape, strict=True))
