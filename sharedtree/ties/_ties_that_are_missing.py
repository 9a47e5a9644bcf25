"""Finds the ties that one DAG has and another DAG of the same shape lacks.

Two trees are compared leaf by leaf. But a layer that was one object and is now two is one lost tie, not one for each of
its weights. So the lost ties of leaves are grouped by the outermost object that was tied, the *maximal* lost tie:

    lost ties of leaves: .model.a.w and .ema.a.w, .model.b.w and .ema.b.w
    maximal lost tie:    .model and .ema

Two records of the two DAGs at one path are *counterparts*.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax import tree_util as jtu

from ..core._comparison import array_text
from ..core._node_types import carries_identity, is_namedtuple
from ..core._sharing import Agree, Mismatch, Rooted, pairs
from ..core._structure import LEAF, Node, Path, Record
from ._leaf_notes import is_noted


class LeafKind(NamedTuple):
    """Shape and dtype of a traced leaf. For a Python number, the dtype is its class."""

    shape: tuple[int, ...]
    dtype: Any

    def __str__(self) -> str:
        return self.dtype.__name__ if isinstance(self.dtype, type) else array_text(self)


def kind_of(leaf: Any) -> LeafKind:
    """Returns the kind of a leaf. A `LeafKind` is returned unchanged."""
    if isinstance(leaf, LeafKind):
        return leaf
    return LeafKind(tuple(leaf.shape), leaf.dtype) if carries_identity(leaf) else LeafKind((), type(leaf))


class LostLeaf(NamedTuple):
    """A traced leaf that was one object at two paths, itself or in a tied node, and is two objects now.

    Attributes:
        tied: number of the tied object in the old tree: the leaf itself, or a node that holds the leaf.
        at: the first path of the tied object, and another path of it.
        paths: the two paths of the leaf. They begin with the paths in `at`.
        parts: numbers of the two leaves in the new tree.
    """

    tied: int
    at: tuple[Path, Path]
    paths: tuple[Path, Path]
    parts: tuple[int, int]


def lost_leaf_ties(left: Rooted, right: Rooted, agree: Agree) -> list[LostLeaf] | None:
    """Finds the ties between traced leaves that `left` has and `right` lacks.

    If several edges lead to a record of `left`, each edge but the first is a tie with the first. It is lost if the
    counterpart of the record at that edge has different leaves than its counterpart at the first edge.

    Args:
        left: the DAG with the ties.
        right: the DAG that may lack some of them.
        agree: (number of a record of `left`, number of one of `right`) → True if the two match although they differ.

    Returns:
        The lost ties, or None if the DAGs differ in shape.

    Cost: one visit for each pair of records that some path leads to.
    """
    # `pairs` yields a `Mismatch` wherever the shapes differ.
    if any(isinstance(pair, Mismatch) for pair in pairs(left, right, agree)):
        return None
    # Record of `left` → its first visit. Each further visit of a record is a tie, and nothing below it is visited.
    first_visits: dict[int, _PairedVisit] = {}
    lost: list[LostLeaf] = []
    stack: list[tuple[int, _PairedVisit]] = [(left.root, _PairedVisit(right.root, (), ()))]
    while stack:
        number, visit = stack.pop()
        if number not in first_visits:
            first_visits[number] = visit
            op, children = left.records[number]
            if type(op) is Node and children:
                # Children are pushed in reverse, so that they come off the stack in flatten order.
                steps = tuple(zip(op.keys, children, right.records[visit.counterpart][1], strict=True))
                ancestors = (*visit.ancestors, number)
                stack.extend((i, _PairedVisit(j, (*visit.path, key), ancestors)) for key, i, j in reversed(steps))
            continue
        # The record is tied in `left`. If it has two counterparts, the tie is lost for the leaves that are two as well.
        first = first_visits[number]
        if first.counterpart != visit.counterpart and _is_tie_of_model(left.records, first, visit):
            for subpath, parts in _separated_leaves(left, right, (number, first.counterpart, visit.counterpart)):
                leaf_paths = (*first.path, *subpath), (*visit.path, *subpath)
                lost.append(LostLeaf(number, (first.path, visit.path), leaf_paths, parts))
    return lost


class _PairedVisit(NamedTuple):
    """One path to a record of the left DAG.

    Attributes:
        counterpart: record of the right DAG at the same path.
        path: the path.
        ancestors: the left records on the path, from the root to the parent.
    """

    counterpart: int
    path: Path
    ancestors: tuple[int, ...]


def _separated_leaves(left: Rooted, right: Rooted, top: tuple[int, int, int]) -> Iterator[tuple[Path, tuple[int, int]]]:
    """Finds the leaves below a tied record of `left` that have two counterparts each in `right`.

    Args:
        left: the DAG in which the record is tied.
        right: the DAG in which it is two records.
        top: number of the record in `left`, and numbers of its two counterparts in `right`.

    Yields:
        The path of a leaf below the record, and the numbers of the two leaves in `right`.
    """
    visited: set[tuple[int, int, int]] = set()
    stack: list[tuple[tuple[int, int, int], Path]] = [(top, ())]
    while stack:
        triple, path = stack.pop()
        number, part1, part2 = triple
        if part1 == part2 or triple in visited:
            continue
        visited.add(triple)
        op, children = left.records[number]
        if op is LEAF and right.records[part1][0] is LEAF and right.records[part2][0] is LEAF:
            yield path, (part1, part2)
        elif type(op) is Node and not _is_optax_state(op.type.cls):
            # Not strict: the caller's `agree` may let a node match a record without children.
            steps = tuple(zip(op.keys, children, right.records[part1][1], right.records[part2][1], strict=False))
            stack.extend(((i, j, k), (*path, key)) for key, i, j, k in reversed(steps))


def _is_tie_of_model(records: Sequence[Record], visit1: _PairedVisit, visit2: _PairedVisit) -> bool:
    """Returns False for a tie between two entries of one state of optax, whose arrays alias only by accident.

    For example, two entries may begin as one array of zeros.

    Args:
        records: the left DAG.
        visit1: the first visit of the tied record.
        visit2: another visit of the record.
    """
    steps = enumerate(zip(visit1.path, visit2.path, strict=False))
    num_common_keys = next((i for i, (key1, key2) in steps if key1 != key2), 0)
    # Ancestors from the node at which the two paths part.
    numbers = {*visit1.ancestors[num_common_keys:], *visit2.ancestors[num_common_keys:]}
    ops = [records[number][0] for number in numbers]
    return not any(type(op) is Node and _is_optax_state(op.type.cls) for op in ops)


def _is_optax_state(cls: type) -> bool:
    """Returns True for a class of optax's states, which are namedtuples."""
    return is_namedtuple(cls) and cls.__module__.partition(".")[0] == "optax"


def unsettled(ties: Sequence[LostLeaf], objects: Sequence[Any]) -> list[LostLeaf]:
    """Selects the lost ties that were neither undone on purpose nor reported before.

    Both leaves of a tie are noted if it was undone or reported.

    Args:
        ties: the lost ties.
        objects: objects of the new tree. A number in `LostLeaf.parts` is an index of a leaf.
    """
    unnoted = [tie for tie in ties if not all(is_noted(objects[part]) for part in tie.parts)]
    # A Python number in a tied module cannot be noted. If only numbers remain, the arrays beside them in the module
    # were noted, so the loss of the whole module is settled.
    has_only_numbers = not any(carries_identity(objects[part]) for tie in unnoted for part in tie.parts)
    return [] if has_only_numbers and len(unnoted) < len(ties) else unnoted


class Lost(NamedTuple):
    """A maximal lost tie.

    Attributes:
        record: number of the tied object in the old tree.
        paths: the paths of the object.
        ties: the lost ties of the leaves in the object. If the object is a leaf, its own lost ties.
    """

    record: int
    paths: list[Path]
    ties: list[LostLeaf]


def maximal(ties: Iterable[LostLeaf]) -> list[Lost]:
    """Groups the lost ties of leaves by the object that was tied. Returns one maximal lost tie for each object."""
    ties_of: dict[int, list[LostLeaf]] = {}
    for tie in ties:
        ties_of.setdefault(tie.tied, []).append(tie)
    lost: list[Lost] = []
    for record, leaf_ties in ties_of.items():
        distinct_paths = dict.fromkeys(path for tie in leaf_ties for path in tie.at)
        lost.append(Lost(record, list(distinct_paths), leaf_ties))
    return lost


def named(text: str, paths: Iterable[Path]) -> list[str]:
    """Prints paths for errors: `model` and the path `.a.w` become "model.a.w".

    Args:
        text: name of the tree.
        paths: paths in the tree.
    """
    return [text + jtu.keystr(path) for path in paths]


def at(tree: Rooted, number: int, path: Path) -> int:
    """Follows a path down from a record. Returns the number of the record at its end."""
    for key in path:
        op, children = tree.records[number]
        assert type(op) is Node
        number = children[op.keys.index(key)]
    return number
