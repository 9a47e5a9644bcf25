"""The ties that one DAG has and another of its shape has not: which count, which belong together, how to say it.

Two trees are compared leaf by leaf, but a layer that was one object and is two now is one lost tie, not one for each of
its weights. So the leaves are gathered below what was tied around them:

    lost leaf by leaf: .model.a.w and .ema.a.w, .model.b.w and .ema.b.w
    lost as a maximum: .model and .ema
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax import tree_util as jtu

from ..core._comparison import array_text
from ..core._node_types import carries_identity, is_namedtuple
from ..core._sharing import Agree, Mismatch, Rooted, pairs
from ..core._structure import LEAF, Node, Path, Record
from ._leaf_notes import is_noted


class Kind(NamedTuple):
    """The type of a traced leaf, as far as it tells one model from another."""

    shape: tuple[int, ...]
    dtype: Any

    def __str__(self) -> str:
        return self.dtype.__name__ if isinstance(self.dtype, type) else array_text(self)


def kind_of(leaf: Any) -> Kind:
    """The kind of a leaf; of a kind, itself."""
    if isinstance(leaf, Kind):
        return leaf
    return Kind(tuple(leaf.shape), leaf.dtype) if carries_identity(leaf) else Kind((), type(leaf))


class LostLeaf(NamedTuple):
    """A traced leaf that was one object at two paths, because it or what is around it was, and is two objects now.

    Attributes:
        tied: the record that was tied, the leaf or something around it.
        at: the first path of what was tied, and another one.
        paths: those of the leaf, below these two.
        parts: what it is now.
    """

    tied: int
    at: tuple[Path, Path]
    paths: tuple[Path, Path]
    parts: tuple[int, int]


def lost_leaf_ties(left: Rooted, right: Rooted, agree: Agree) -> list[LostLeaf] | None:
    """The ties between traced leaves that `left` has and `right` has not; None if their shapes differ.

    Each way into a record of `left` but the first one is a tie, as `sharedtree.ties` lists them. It is lost if not the
    same leaves are below it in `right` as below the first one.

    Cost: one visit for each pair of records that some path leads to.
    """
    if any(isinstance(pair, Mismatch) for pair in pairs(left, right, agree)):
        return None
    first: dict[int, tuple[int, Path, tuple[int, ...]]] = {}
    lost: list[LostLeaf] = []
    stack: list[tuple[int, int, Path, tuple[int, ...]]] = [(left.root, right.root, (), ())]
    while stack:
        number, other, path, above = stack.pop()
        if number not in first:
            first[number] = other, path, above
            op, children = left.records[number]
            if type(op) is Node and children:
                steps = tuple(zip(op.keys, children, right.records[other][1], strict=True))
                stack.extend((a, b, (*path, key), (*above, number)) for key, a, b in reversed(steps))
        elif first[number][0] != other and _counts(left.records, first[number], (other, path, above)):
            before, start, _ = first[number]
            for below, parts in _parted(left, right, (number, before, other)):
                lost.append(LostLeaf(number, (start, path), ((*start, *below), (*path, *below)), parts))
    return lost


def _parted(left: Rooted, right: Rooted, top: tuple[int, int, int]) -> Iterator[tuple[Path, tuple[int, int]]]:
    """The leaves below a record of `left` that are not the same leaves below two records of `right`."""
    seen: set[tuple[int, int, int]] = set()
    stack: list[tuple[tuple[int, int, int], Path]] = [(top, ())]
    while stack:
        three, path = stack.pop()
        number, one, two = three
        if one == two or three in seen:
            continue
        seen.add(three)
        op, children = left.records[number]
        if op is LEAF and right.records[one][0] is LEAF and right.records[two][0] is LEAF:
            yield path, (one, two)
        elif type(op) is Node and not _is_optax(op.type.cls):
            steps = tuple(zip(op.keys, children, right.records[one][1], right.records[two][1], strict=False))
            stack.extend(((a, b, c), (*path, key)) for key, a, b, c in reversed(steps))


_Way = tuple[int, Path, tuple[int, ...]]


def _counts(records: Sequence[Record], one: _Way, two: _Way) -> bool:
    """Whether a tie is part of a model, not an alias between entries of an optimizer state."""
    (_, first, above), (_, second, above2) = one, two
    common = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
    ops = [records[number][0] for number in {*above[common:], *above2[common:]}]
    return not any(type(op) is Node and _is_optax(op.type.cls) for op in ops)


def _is_optax(cls: type) -> bool:
    return is_namedtuple(cls) and cls.__module__.partition(".")[0] == "optax"


def unsettled(ties: Sequence[LostLeaf], objects: Sequence[Any]) -> list[LostLeaf]:
    """Those that were not undone on purpose, nor reported before.

    Args:
        ties: what was lost.
        objects: the leaves by the numbers of the parts.
    """
    left = [tie for tie in ties if not all(is_noted(objects[part]) for part in tie.parts)]
    # A Python number in a tied module cannot be noted; it went with the arrays beside it.
    only_numbers = not any(carries_identity(objects[part]) for tie in left for part in tie.parts)
    return [] if only_numbers and len(left) < len(ties) else left


class Lost(NamedTuple):
    """A maximal tie that was lost.

    Attributes:
        record: what was tied.
        paths: where it was.
        ties: the leaves in it, or itself.
    """

    record: int
    paths: list[Path]
    ties: list[LostLeaf]


def maximal(ties: Iterable[LostLeaf]) -> list[Lost]:
    """Gathers lost leaves by what was tied."""
    found: dict[int, list[LostLeaf]] = {}
    for tie in ties:
        found.setdefault(tie.tied, []).append(tie)
    return [Lost(n, list(dict.fromkeys(path for tie in own for path in tie.at)), own) for n, own in found.items()]


def named(text: str, paths: Iterable[Path]) -> list[str]:
    """The paths as errors print them, below something that is called `text`."""
    return [text + jtu.keystr(path) for path in paths]


def at(tree: Rooted, number: int, path: Path) -> int:
    """The record at a path below another one."""
    for key in path:
        op, children = tree.records[number]
        assert type(op) is Node
        number = children[op.keys.index(key)]
    return number
