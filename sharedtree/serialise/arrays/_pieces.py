"""The bytes of an array in C order and little-endian, piece by piece, without a copy of the whole.

Arrays that are contiguous already are not copied at all. Others (transposed, strided, broadcast, big-endian, with
padding in their elements) are copied a piece at a time, so that writing one takes no more memory than writing another;
so are sharded ones.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any, TypeGuard

import numpy as np

from ..container._digest import CHUNK_BYTES
from ._dtypes import clear_unused, on_disk, used_bits
from ._shards import Sharded


def pieces(array: np.ndarray[Any, Any] | Sharded) -> Iterator[memoryview]:
    """Yields buffers of at most 4 MiB.

    A buffer aliases the array where that is contiguous; otherwise it is fresh memory. Either way the consumer may keep
    it, and must not write to it.

    Args:
        array: of a storable dtype.
    """
    if array.nbytes == 0:
        return
    order = on_disk(array.dtype)
    if is_as_on_disk(array) and array.flags.c_contiguous:
        whole = memoryview(array.reshape(-1).view(np.uint8))
        if len(whole) <= CHUNK_BYTES:
            yield whole
            return
        for start in range(0, len(whole), CHUNK_BYTES):
            yield whole[start : start + CHUNK_BYTES]
        return
    if isinstance(array, np.ndarray):
        array = np.asarray(array).reshape(array.shape or (1,))
    axis, step = _cut(array)
    for outer in itertools.product(*map(range, array.shape[:axis])):
        for start in range(0, array.shape[axis], step):
            part = np.array(array[(*outer, slice(start, start + step))], order, order="C")
            data = part.reshape(-1).view(np.uint8)
            clear_unused(data, order)
            yield memoryview(data)


def is_as_on_disk(array: np.ndarray[Any, Any] | Sharded) -> TypeGuard[np.ndarray[Any, Any]]:
    """Whether the elements of an array are in this process's memory, as they are in a file."""
    order = on_disk(array.dtype)
    return isinstance(array, np.ndarray) and order == array.dtype and used_bits(order) is None


def _cut(array: np.ndarray[Any, Any] | Sharded) -> tuple[int, int]:
    """The outermost axis of which one step fits a piece, and how many steps do."""
    for axis in range(array.ndim):
        step_bytes = math.prod(array.shape[axis + 1 :]) * array.itemsize
        if step_bytes <= CHUNK_BYTES:
            return axis, CHUNK_BYTES // step_bytes
    raise AssertionError("one item is less than a piece")
