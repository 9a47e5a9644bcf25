"""How far two arrays of one shape differ: how many elements, and by how much.

Both are read a piece at a time, with their digests checked, so that any size can be compared in a few dozen MiB. An
element is the same if its value is; NaN is the same as NaN, and 0.0 is not the same as -0.0.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..serialise.arrays._dtypes import dtype_named, restore
from ..serialise.arrays._placing import ArrayEntry
from ..serialise.container._reading import Container

_PIECE = 2**20  # elements; a piece as float64 takes 8 MiB

Array = np.ndarray[Any, Any]


class Difference(NamedTuple):
    """How two arrays differ.

    Attributes:
        differing: how many elements do.
        size: how many there are.
        max_abs: the largest absolute difference; nan if only one of two elements is NaN, and None where there is no
            such thing.
    """

    differing: int
    size: int
    max_abs: float | int | None


def difference(a: Container, entry_a: ArrayEntry, b: Container, entry_b: ArrayEntry) -> Difference | None:
    """Compares two arrays of one shape in two files.

    Returns:
        How they differ, or None if dates are to be compared with something else.

    Raises:
        CorruptFileError: if one of them is damaged.

    Cost: reads both once, and holds two pieces of a million elements, in their own dtype and as float64.
    """
    dtypes = dtype_named(entry_a.dtype), dtype_named(entry_b.dtype)
    if dtypes[0] != dtypes[1] and any(dtype.kind in "mM" or not dtype.itemsize for dtype in dtypes):
        return None
    if not dtypes[0].itemsize:  # without bytes there is nothing to read, however large the shape
        return Difference(0, math.prod(entry_a.shape), None)
    size, differing, max_abs = 0, 0, None
    for selection, shape in pieces(entry_a.shape):
        x, y = (
            restore(container.read_selection(entry.tensor, selection), dtype, shape).reshape(-1)
            for container, entry, dtype in zip((a, b), (entry_a, entry_b), dtypes, strict=True)
        )
        size += x.size
        if x.dtype == y.dtype and np.array_equal(x.view(np.uint8), y.view(np.uint8)):
            continue
        number, largest = elementwise(x, y)
        if number:
            differing += number
            max_abs = largest if max_abs is None else _larger(max_abs, largest)
    return Difference(differing, size, max_abs)


def elementwise(x: Array, y: Array) -> tuple[int, float | int]:
    """How many elements of two flat arrays of one length differ, and by how much at most.

    Example:
        >>> elementwise(np.array([1.0, np.nan, 2.0]), np.array([1.0, np.nan, 2.5]))
        (1, 0.5)
        >>> elementwise(np.array([-128, 3], np.int8), np.array([127, 3], np.int8))
        (1, 255)
    """
    if x.dtype.kind in "mM":
        x, y = x.view(np.int64), y.view(np.int64)
    if _is_whole(x.dtype) and _is_whole(y.dtype) and (x.dtype == np.uint64) == (y.dtype == np.uint64):
        return _whole(x, y)
    wide = _wide(x.dtype, y.dtype)
    p, q = x.astype(wide), y.astype(wide)
    differ = _differ(np.real(p), np.real(q)) | _differ(np.imag(p), np.imag(q))
    if not differ.any():
        return 0, 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        return int(differ.sum()), float(np.abs(p[differ] - q[differ]).max())


def pieces(shape: tuple[int, ...]) -> Iterator[tuple[tuple[slice, ...], tuple[int, ...]]]:
    """Parts of an array of about a million elements, which lie in one run each, with their shapes; none if it is empty.

    Example:
        >>> [part for _, part in pieces((3, 2**20))]
        [(1, 1048576), (1, 1048576), (1, 1048576)]
    """
    if 0 in shape:
        return
    axis, row = len(shape), 1  # the elements of all axes from `axis` on
    while axis and row * shape[axis - 1] <= _PIECE:
        axis -= 1
        row *= shape[axis]
    if axis == 0:
        yield (), shape
        return
    axis -= 1
    step = _PIECE // row
    for before in itertools.product(*(range(size) for size in shape[:axis])):
        for start in range(0, shape[axis], step):
            stop = min(start + step, shape[axis])
            selection = (*(slice(i, i + 1) for i in before), slice(start, stop))
            yield selection, (*(1 for _ in before), stop - start, *shape[axis + 1 :])


def _is_whole(dtype: np.dtype[Any]) -> bool:
    return bool(jnp.issubdtype(dtype, np.integer) or dtype == np.bool_)


def _whole(x: Array, y: Array) -> tuple[int, int]:
    """Differences of 64-bit integers need not fit into them, but do without a sign."""
    wide = np.uint64 if x.dtype == np.uint64 else np.int64
    p, q = x.astype(wide), y.astype(wide)
    differ = p != q
    if not differ.any():
        return 0, 0
    p, q = p[differ], q[differ]
    distances = np.maximum(p, q).view(np.uint64) - np.minimum(p, q).view(np.uint64)
    return int(differ.sum()), int(distances.max())


def _wide(a: np.dtype[Any], b: np.dtype[Any]) -> type[Any]:
    """A dtype that holds the values of both, as far as there is one."""
    is_long = any(dtype.kind in "fc" and dtype.type in (np.longdouble, np.clongdouble) for dtype in (a, b))
    is_long = is_long or any(dtype in (np.int64, np.uint64) for dtype in (a, b))
    if any(dtype.kind == "c" or "complex" in dtype.name for dtype in (a, b)):
        return np.clongdouble if is_long else np.complex128
    return np.longdouble if is_long else np.float64


def _differ(p: Array, q: Array) -> Array:
    same = (p == q) & (np.signbit(p) == np.signbit(q))
    return ~(same | (np.isnan(p) & np.isnan(q)))


def _larger(a: float | int, b: float | int) -> float | int:
    return a if a != a or a >= b else b
