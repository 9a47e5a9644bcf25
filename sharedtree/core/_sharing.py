"""Sharing as a partition of paths: comparing two of them, and what they imply together.

Two structures with the same *shape* (the same tree once every shared node is unfolded) can differ in sharing. Walking
both at once from the roots pairs up their records: each path leads to one record on either side, and two paths that
lead to the same pair have the same fate. So the pairs are the classes of what both have in common, and merging the two
sides of every pair (and, since equal nodes have equal children, their children) gives those that follow from both. The
DAG, whose unfolding may be exponentially larger, is not unfolded. The merging is the congruence closure of Nelson and
Oppen (1980).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from jax import tree_util as jtu

from ._errors import SharingMismatchError
from ._printing import MOST_PATHS, listed, shown
from ._static_values import Static
from ._structure import LEAF, Node, Op, Path, Record, canonical


class Rooted(Protocol):
    """Whatever has the records of a DAG, and the number of its root."""

    @property
    def records(self) -> Sequence[Record]: ...  # noqa: D102

    @property
    def root(self) -> int: ...  # noqa: D102


class RecordPair(NamedTuple):
    """A record of one shape and the record of the other at the same path; `above` are the left ones on the way."""

    left: int
    right: int
    path: Path
    above: tuple[int, ...]


class Mismatch(NamedTuple):
    """Two shapes differ at this path."""

    path: Path
    left: str
    right: str

    def error(self, left: str = "the first tree", right: str = "the second") -> SharingMismatchError:
        """The error for two trees that should have one shape."""
        path = jtu.keystr(self.path)
        where = f"`{path}`" if path else "the root"
        return SharingMismatchError(
            f"The trees differ in shape at {where}: {left} has {self.left} there, {right} {self.right}.\n"
            "Ties can only be compared or carried over between trees of one shape. Compare the shapes with\n"
            "    jax.tree.structure(a), jax.tree.structure(b)",
            (path,),
        )


class SplitRecord(NamedTuple):
    """A record of the left shape that is two records of the right one, its `parts`."""

    record: int
    parts: tuple[int, int]
    paths: tuple[Path, Path]
    above: tuple[tuple[int, ...], tuple[int, ...]]


Agree = Callable[[int, int], bool]


def pairs(left: Rooted, right: Rooted, agree: Agree, *, compares_keys: bool = False) -> Iterator[RecordPair | Mismatch]:
    """Walks two shapes at once, yielding each pair of records when it is first met, or where they mismatch.

    Args:
        left: one shape.
        right: the other.
        agree: whether two records agree that are not nodes of one class with equally many children, which do.
        compares_keys: whether such nodes, too, are asked about where the keys of their children differ, as those of
            two dicts may.
    """
    seen: set[tuple[int, int]] = set()
    stack: list[RecordPair] = [RecordPair(left.root, right.root, (), ())]
    while stack:
        pair = stack.pop()
        if (pair.left, pair.right) in seen:
            continue
        seen.add((pair.left, pair.right))
        (op, children), (other, others) = left.records[pair.left], right.records[pair.right]
        if type(op) is Node and type(other) is Node and op.type.cls is other.type.cls and len(children) == len(others):
            # A class may take its keys from anywhere, so that they differ in one shape. To JAX, static data decides.
            if compares_keys and op.keys != other.keys and op.aux != other.aux:
                names = _described(op, len(children), other), _described(other, len(others), op)
                yield pair if agree(pair.left, pair.right) else Mismatch(pair.path, *names)
                continue
            yield pair
            above = (*pair.above, pair.left)
            steps = tuple(zip(op.keys, children, others, strict=True))
            stack.extend(RecordPair(a, b, (*pair.path, key), above) for key, a, b in reversed(steps))
        elif agree(pair.left, pair.right):
            yield pair
        elif compares_keys:
            yield Mismatch(pair.path, _described(op, len(children), other), _described(other, len(others), op))
        else:
            yield Mismatch(pair.path, name_of(op, len(children)), name_of(other, len(others)))


def _described(op: Op, num_children: int, other: Op) -> str:
    """What a record is, and in which children it differs from another one of its class."""
    name = name_of(op, num_children)
    if type(op) is not Node or type(other) is not Node or op.type.cls is not other.type.cls or op.keys == other.keys:
        return name
    keys = [jtu.keystr((key,)) for key in op.keys]
    others = {jtu.keystr((key,)) for key in other.keys}
    missing = [f"`{key}`" for key in keys if key not in others]
    if missing:
        return f"{name} ({', '.join(missing[:MOST_PATHS])} in this one only)"
    return f"{name}, in the order {listed(keys)}" if len(op.keys) == len(other.keys) else name


def matching(left: Rooted, right: Rooted, agree: Agree, *, compares_keys: bool = False) -> Iterator[RecordPair]:
    """The pairs of two shapes that must match.

    Raises:
        SharingMismatchError: where they do not.
    """
    for pair in pairs(left, right, agree, compares_keys=compares_keys):
        if isinstance(pair, Mismatch):
            raise pair.error()
        yield pair


def lost_ties(left: Rooted, right: Rooted, agree: Agree, *, compares_keys: bool = False) -> list[SplitRecord] | Mismatch:
    """The records of `left` that are more than one record of `right`: ties that `right` lacks."""
    first: dict[int, RecordPair] = {}
    lost: list[SplitRecord] = []
    for pair in pairs(left, right, agree, compares_keys=compares_keys):
        if isinstance(pair, Mismatch):
            return pair
        earlier = first.setdefault(pair.left, pair)
        if earlier.right != pair.right:
            parts = earlier.right, pair.right
            lost.append(SplitRecord(pair.left, parts, (earlier.path, pair.path), (earlier.above, pair.above)))
    return lost


def merged(shape: Rooted, groups: Iterable[Sequence[int]]) -> tuple[tuple[Record, ...], dict[int, int]]:
    """The shape with each group of its records made one, the lowest, which a walk meets first.

    Args:
        shape: a DAG.
        groups: records to make one, which are alike. With two nodes, their children must be in groups together too, as
            they are where the groups come from the pairs of two shapes.

    Returns:
        As `canonical`, the names being the records that were kept.
    """
    classes = Classes(len(shape.records))
    for group in groups:
        for i in group:
            classes.unite(group[0], i)

    def expand(i: int) -> tuple[Op, Sequence[int]]:
        op, children = shape.records[i]
        return op, [classes.of(child) for child in children]

    return canonical(classes.of(shape.root), expand)


class Classes:
    """Numbers from 0 on, each a class of its own until two classes are made one; the lowest number stands for all."""

    def __init__(self, count: int) -> None:
        self._lower = list(range(count))

    def of(self, number: int) -> int:
        """The number that stands for the class of a number."""
        lower = self._lower
        while lower[number] != number:
            lower[number] = lower[lower[number]]
            number = lower[number]
        return number

    def unite(self, one: int, other: int) -> bool:
        """Makes one class of two; whether they were two."""
        one, other = self.of(one), self.of(other)
        if one < other:
            self._lower[other] = one
        else:
            self._lower[one] = other
        return one != other


def name_of(op: Any, num_children: int | None = None) -> str:
    """What a record is, for errors."""
    if op is LEAF:
        return "a traced leaf"
    if type(op) is Static:
        return f"the static value {shown(op.peek())}"
    if type(op) is not Node:
        return "an object of the caller's"
    of_how_many = "" if num_children is None or op.type.cls is type(None) else f" with {num_children} children"
    return f"a `{op.type.cls.__name__}`{of_how_many}"
