"""What is compared of two files: nodes by labels and children that can be matched, arrays by their elements.

What a node is, apart from its children, is its label. Each child has a key that is the same in both files: the name of
a field, an index, or a number for the key of a dictionary. Keys and members of sets are matched by what they are: equal
ones, of whichever file, have one number.

Two arrays of one shape are read a piece at a time, with their digests checked, so that any size can be compared in a
few dozen MiB. An element is the same if its value is; NaN is the same as NaN, and 0.0 is not the same as -0.0.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..core._comparison import MOST
from ..serialise.arrays._dtypes import dtype_named, restore
from ..serialise.arrays._placing import ArrayEntry
from ..serialise.container._reading import Container
from ..serialise.load import Opened
from ..serialise.values._all_kinds_of_nodes import TYPED, children_of, node_text, operands, steps
from ..serialise.values._atoms import atom_text, short
from ..serialise.values._nodes import Child
from ..serialise.values._paths import carries_identity

DICTIONARIES = frozenset({"dict", "OrderedDict", "defaultdict"})
SETS = frozenset({"set", "frozenset"})
SEQUENCES = frozenset({"list", "tuple", "deque"})
INSTANCES = frozenset({"object", "wrapper"})
_WHOLE = frozenset({"enum", "path", "slice", "range"})  # a value, unless one of its children is a node
_FAMILIES = (DICTIONARIES, SETS, SEQUENCES, INSTANCES)

_PIECE = 2**20  # elements; a piece as float64 takes 8 MiB

Array = np.ndarray[Any, Any]

Numbers = dict[Hashable, int]
"""Numbers for values, the same for both files."""

Place = tuple[str, Child]
"""What leads to a child, and the child."""


class Side:
    """A file of two. `numbers` are shared by both.

    Attributes:
        container: the tensors.
        manifest: the tree.
        label: of a node, what it is, apart from its children. Of an array, only that it is one.
        places: of a node, the children by key, in order; of a dictionary, the values. Not to be changed.
    """

    def __init__(self, opened: Opened, numbers: Numbers) -> None:
        self.container, self.manifest = opened
        self.label: Callable[[int], tuple[Hashable, ...]] = functools.cache(self._label_of)
        self.places: Callable[[int], dict[Hashable, Place]] = functools.cache(self._places_of)
        self._label_text: Callable[[int], str] = functools.cache(self._label_text_of)
        self._of_value = numbers

    def node(self, number: int) -> list[Any]:
        """A node."""
        return self.manifest.nodes[number]

    def array(self, number: int) -> ArrayEntry:
        """The entry of an `array` node."""
        return self.manifest.arrays[self.node(number)[1]]

    def text(self, child: Child) -> str:
        """What a child is, in a few words."""
        return node_text(self.manifest, self.node(child)) if type(child) is int else atom_text(child)

    def long_text(self, child: Child) -> str:
        """What a child is, if another one has the same few words."""
        if type(child) is not int:
            texts = child if type(child) is list else [child]
            # Of a long text no more than the beginning is copied.
            return short(" ".join(text[: MOST + 1] if type(text) is str else repr(text) for text in texts), MOST)
        node = self.node(child)
        if node[0] not in TYPED:
            return self._label_text(child)
        entry = self.manifest.types[node[1]]
        version = f", version {entry.version}" if entry.version else ""
        return f"{entry.name}{version}, a {entry.kind if node[0] != 'wrapper' else 'wrapper of a function'}"

    def is_object(self, child: Child) -> bool:
        """Whether two occurrences of a child are a tie."""
        return type(child) is int and carries_identity(self.manifest, self.node(child))

    def _label_text_of(self, number: int) -> str:
        return short(" ".join(map(str, self.label(number))), MOST)

    def _label_of(self, number: int) -> tuple[Hashable, ...]:
        node = self.node(number)
        if node[0] == "array":
            return ("array",)
        parts: list[Hashable] = [node[0]]
        for operand, value in operands(node):
            if operand.type == "type":
                entry = self.manifest.types[value]
                parts += (entry.name, entry.kind, entry.version)
            elif operand.type not in ("child", "children"):
                parts.append(tuple(value) if isinstance(value, list) else value)
        if _is_whole(node):
            parts.append(repr(list(children_of(node))))
        return tuple(parts)

    def _places_of(self, number: int) -> dict[Hashable, Place]:
        node = self.node(number)
        kind = node[0]
        if _is_whole(node):
            return {}
        below = steps(self.manifest, node)
        if kind in SETS:
            items = [(self._number_of(child), f"{{{self.text(child)}}}", child) for child in node[1]]
        elif kind in DICTIONARIES:
            numbers = [("key", self._number_of(key)) for key in node[-2]]
            values = list(below)[len(numbers) :]  # and what a `defaultdict` has besides
            keys = [*numbers, *(step for _, step in values[len(numbers) :])]
            items = [(key, step, child) for key, (child, step) in zip(keys, values, strict=True)]
        else:
            items = [(step, step, child) for child, step in below]
        found: dict[Hashable, Place] = {}
        times: Counter[Hashable] = Counter()
        for key, step, child in items:  # each key with how many of those before it were the same
            found[key, times[key]] = (step, child)
            times[key] += 1
        return found

    def _number_of(self, child: Child) -> int:
        if type(child) is int:
            return self._numbers[child]
        return self._of_value.setdefault(("atom", repr(child)), len(self._of_value))

    @functools.cached_property
    def _numbers(self) -> list[int]:
        """A number for each node; equal ones have the same."""
        numbers: list[int] = []
        for i in range(len(self.manifest.nodes)):  # children stand before their parents
            node = self.node(i)
            below = [numbers[child] if type(child) is int else self._number_of(child) for child in children_of(node)]
            if node[0] in SETS:
                below.sort()
            about = self.text(i) if node[0] == "array" else self.label(i)
            numbers.append(self._of_value.setdefault((about, tuple(below)), len(self._of_value)))
        return numbers


def are_comparable(kind_a: str, kind_b: str) -> bool:
    """Whether nodes of two kinds have children that can be matched."""
    return kind_a == kind_b or any(kind_a in family and kind_b in family for family in _FAMILIES)


def _is_whole(node: list[Any]) -> bool:
    return node[0] in _WHOLE and not any(type(child) is int for child in children_of(node))


class ArrayDifference(NamedTuple):
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


def array_difference(a: Container, entry_a: ArrayEntry, b: Container, entry_b: ArrayEntry) -> ArrayDifference | None:
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
        return ArrayDifference(0, math.prod(entry_a.shape), None)
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
    return ArrayDifference(differing, size, max_abs)


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
    if _is_integer(x.dtype) and _is_integer(y.dtype) and (x.dtype == np.uint64) == (y.dtype == np.uint64):
        return _between_integers(x, y)
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


def _is_integer(dtype: np.dtype[Any]) -> bool:
    return bool(jnp.issubdtype(dtype, np.integer) or dtype == np.bool_)


def _between_integers(x: Array, y: Array) -> tuple[int, int]:
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
