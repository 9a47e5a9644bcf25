"""Compares the sharing of two DAGs, joins it, and gives computed leaves the identity that the ties of a DAG need.

    left     [w, w, v]     pairs   (list, list)   at [0] (w, a)   at [1] (w, b)   at [2] (v, b)
    right    [a, b, b]     `w` is split into `a` and `b`: a tie of the left one that the right one lacks

    gradients (g, g), one array by accident     `with_repeats_copied`            →  (g, a copy of g)
    np.sum of a tied array, a NumPy number      `with_tied_numbers_as_arrays`    →  an array without dimensions

The *shape* of a DAG is the tree that one gets by unfolding every shared node. Two DAGs of one shape can differ in
sharing: in the paths that lead to one record. Walking both at once from the roots pairs up their records, because each
path leads to one record on either side. Two paths that lead to the same pair are tied on both sides. So the pairs are
the ties that both have.

Merging the two sides of every pair gives the ties that follow from both. Since equal nodes have equal children, their
children are merged, too: this is the congruence closure of Nelson and Oppen (1980).

The tree, which may be exponentially larger than the DAG, is never unfolded.

Eager transforms of JAX return one array for two results where they can: the gradients of `a + b` with respect to both
are one object. As leaves of a DAG that would be a tie that nobody made, so the second one becomes a copy. NumPy returns
a number, which carries no identity, where it computes from arrays without dimensions. Where the leaf is tied, that
would lose the tie, so the number becomes an array.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from ._by_identity import IdentitySet
from ._errors import SharingMismatchError
from ._node_types import carries_identity
from ._printing import MOST_PATHS, listed, shown
from ._static_values import Static
from ._structure import LEAF, FlatDag, Node, Op, Path, Record, Structure, canonical_records, records_with_several_edges


class Rooted(Protocol):
    """Anything with the records of a DAG, numbered from 0, and the number of its root: a `Structure`, for example."""

    @property
    def records(self) -> Sequence[Record]: ...  # noqa: D102

    @property
    def root(self) -> int: ...  # noqa: D102


class RecordPair(NamedTuple):
    """A record of the left DAG and the record of the right one at the same path.

    Attributes:
        left: the number of the record on the left.
        right: the number of the record on the right.
        path: the first path to both.
    """

    left: int
    right: int
    path: Path


class Mismatch(NamedTuple):
    """A path where the shapes of two DAGs differ.

    Attributes:
        path: the path.
        left: the record of the left DAG at this path, in words: "a `Linear` with 2 children".
        right: the record of the right DAG, in words.
    """

    path: Path
    left: str
    right: str

    def error(self, left: str = "the first tree", right: str = "the second") -> SharingMismatchError:
        """Makes the error for two trees that should have one shape. The caller raises it.

        Args:
            left: the name of the left tree in the message.
            right: the name of the right tree.
        """
        path = jtu.keystr(self.path)
        place = f"`{path}`" if path else "the root"
        return SharingMismatchError(
            f"The trees differ in shape at {place}: {left} has {self.left} there, {right} {self.right}.\n"
            "Ties can only be compared or carried over between trees of one shape. Compare the shapes with\n"
            "    jax.tree.structure(a), jax.tree.structure(b)",
            (path,),
        )


class SplitRecord(NamedTuple):
    """A record of the left DAG with two counterparts in the right one: a tie that only the left DAG has.

    Attributes:
        record: the number of the record on the left.
        parts: the numbers of its two counterparts on the right.
        paths: for each counterpart, the first path to it and to the record.
    """

    record: int
    parts: tuple[int, int]
    paths: tuple[Path, Path]


Agree = Callable[[int, int], bool]
"""(number on the left, number on the right) → True if the two records match, so that the shapes do not differ there.

The name is a predicate: "do these two agree?". `pairs` asks it about two records unless both are nodes of one class
with equally many children. With `compares_keys`, it asks about some of these nodes, too.
"""


def pairs(left: Rooted, right: Rooted, agree: Agree, *, compares_keys: bool = False) -> Iterator[RecordPair | Mismatch]:
    """Walks two DAGs at once. Yields each pair of records once, and a mismatch wherever the shapes differ.

    Two nodes of one class with equally many children match, and the walk goes on below them. `compares_keys` makes an
    exception.

    Args:
        left: one DAG.
        right: the other DAG.
        agree: decides whether any other two records match. The walk does not go on below these.
        compares_keys: True if nodes with different keys do not match by themselves, such as two dicts. If two nodes of
            one class differ in their keys and in their auxiliary data, then `agree` decides about them, too, and the
            walk does not go on below them. A mismatch then names the keys that differ.

    Cost: one step for each edge below a pair. If the sharing differs much, there may be as many pairs as the product of
    the two numbers of records.
    """
    visited: set[tuple[int, int]] = set()
    stack: list[RecordPair] = [RecordPair(left.root, right.root, ())]
    while stack:
        pair = stack.pop()
        if (pair.left, pair.right) in visited:
            continue
        visited.add((pair.left, pair.right))
        left_op, left_children = left.records[pair.left]
        right_op, right_children = right.records[pair.right]
        # Two nodes of one class with equally many children.
        if (
            type(left_op) is Node
            and type(right_op) is Node
            and left_op.type.cls is right_op.type.cls
            and len(left_children) == len(right_children)
        ):
            # Different keys alone do not make two shapes different, because a class may take its keys from anywhere.
            # The auxiliary data must differ, too, as it must for JAX.
            if compares_keys and left_op.keys != right_op.keys and left_op.aux != right_op.aux:
                has_matched = agree(pair.left, pair.right)
                yield pair if has_matched else _mismatch(pair.path, left.records[pair.left], right.records[pair.right])
                continue
            yield pair
            # Children are pushed in reverse, so that they come off the stack in flatten order.
            steps = tuple(zip(left_op.keys, left_children, right_children, strict=True))
            stack.extend(RecordPair(i, j, (*pair.path, key)) for key, i, j in reversed(steps))
        elif agree(pair.left, pair.right):
            yield pair
        elif compares_keys:
            yield _mismatch(pair.path, left.records[pair.left], right.records[pair.right])
        else:
            yield Mismatch(pair.path, op_text(left_op, len(left_children)), op_text(right_op, len(right_children)))


def _mismatch(path: Path, left: Record, right: Record) -> Mismatch:
    """Makes the mismatch for two records, with the keys in which they differ."""
    return Mismatch(path, text_with_keys(left, right), text_with_keys(right, left))


def text_with_keys(record: Record, counterpart: Record) -> str:
    """Describes a record in words. If its counterpart is of the same class, says how their keys differ.

    For example: "a `dict` with 2 children (`['b']` in this one only)". If only the order of the keys differs, the text
    ends with the keys in order.
    """
    (op, children), (counterpart_op, _) = record, counterpart
    text = op_text(op, len(children))
    if type(op) is not Node or type(counterpart_op) is not Node:
        return text
    if op.type.cls is not counterpart_op.type.cls or op.keys == counterpart_op.keys:
        return text
    keys = [jtu.keystr((key,)) for key in op.keys]
    counterpart_keys = {jtu.keystr((key,)) for key in counterpart_op.keys}
    own_keys = [f"`{key}`" for key in keys if key not in counterpart_keys]
    if own_keys:
        return f"{text} ({', '.join(own_keys[:MOST_PATHS])} in this one only)"
    return f"{text}, in the order {listed(keys)}" if len(op.keys) == len(counterpart_op.keys) else text


def pairs_of_one_shape(
    left: Rooted, right: Rooted, agree: Agree, *, compares_keys: bool = False
) -> Iterator[RecordPair]:
    """Yields the pairs of records of two DAGs that must have one shape. The arguments are the same as for `pairs`.

    Raises:
        SharingMismatchError: when the iteration comes to a mismatch.
    """
    for pair in pairs(left, right, agree, compares_keys=compares_keys):
        if isinstance(pair, Mismatch):
            raise pair.error()
        yield pair


def lost_ties(
    left: Rooted, right: Rooted, agree: Agree, *, compares_keys: bool = False
) -> list[SplitRecord] | Mismatch:
    """Finds the ties of `left` that `right` lacks. The arguments are the same as for `pairs`.

    Returns:
        A list. For a record in `left`, it has one entry for each counterpart in `right` but the first. So a record with
        three counterparts gives two entries. If the shapes differ, returns the first mismatch in place of the list.
    """
    # Number of a record on the left → the first pair with it.
    first_pairs: dict[int, RecordPair] = {}
    split: list[SplitRecord] = []
    for pair in pairs(left, right, agree, compares_keys=compares_keys):
        if isinstance(pair, Mismatch):
            return pair
        # Each pair comes once. So if a left record comes again, it is paired with another record on the right.
        first = first_pairs.setdefault(pair.left, pair)
        if first.right != pair.right:
            split.append(SplitRecord(pair.left, (first.right, pair.right), (first.path, pair.path)))
    return split


def merge_records(dag: Rooted, groups: Iterable[Sequence[int]]) -> tuple[tuple[Record, ...], dict[int, int]]:
    """Makes one record of each group of records. Groups with a common record count as one group.

    Of each group the record with the lowest number stays, with its operation.

    Args:
        dag: a DAG.
        groups: groups of numbers of records, all leaves or all nodes of one class. If two nodes are in one group, then
            for each `i` their `i`-th children must be in one group, too. Groups from pairs of two DAGs are like this.

    Returns:
        The records of the merged DAG, and old number → new number for each record that stays.
    """
    # Each set of records becomes one record. `canonical_records` makes the records anew from keys, numbered as a walk
    # would number them. The key of a set is its lowest number, which `find` returns.
    sets = UnionFind(len(dag.records))
    for group in groups:
        for number in group:
            sets.unite(group[0], number)

    def expand(number: int) -> tuple[Op, Sequence[int]]:
        """Returns the operation of a set, and the sets of its children. A set is given by its lowest number."""
        op, children = dag.records[number]
        return op, [sets.find(child) for child in children]

    return canonical_records(sets.find(dag.root), expand)


class UnionFind:
    """Disjoint sets of the numbers below `count`, from 0 on (Tarjan 1975). The lowest number of a set represents it.

    At first each number is a set of its own.
    """

    def __init__(self, count: int) -> None:
        # Number → a lower number of its set. The lowest number of a set leads to itself.
        self._lower = list(range(count))

    def find(self, number: int) -> int:
        """Returns the lowest number of the set with this number."""
        lower = self._lower
        while lower[number] != number:
            # Path halving: each step shortens the chain for the next look-up, and nothing recurses.
            lower[number] = lower[lower[number]]
            number = lower[number]
        return number

    def unite(self, left: int, right: int) -> bool:
        """Makes one set of the sets of two numbers. Returns False if both are in one set already."""
        left, right = self.find(left), self.find(right)
        if left < right:
            self._lower[right] = left
        else:
            self._lower[left] = right
        return left != right


def op_text(op: Any, num_children: int | None = None) -> str:
    """Returns an operation in words, for errors: "a `Linear` with 2 children", for example.

    Args:
        op: the operation.
        num_children: the number of children to name, if the operation is a node. None leaves it out.
    """
    if op is LEAF:
        return "a traced leaf"
    if type(op) is Static:
        return f"the static value {shown(op.peek())}"
    if type(op) is not Node:
        return "an object of the caller's"
    # To JAX, None is a node. Nobody expects children of it.
    count = "" if num_children is None or op.type.cls is type(None) else f" with {children_text(num_children)}"
    return f"a `{op.type.cls.__name__}`{count}"


def children_text(count: int) -> str:
    """Returns a number of children in words: "1 child", "2 children"."""
    return "1 child" if count == 1 else f"{count} children"


# --- ties among computed leaves ---------------------------------------------------------------------------------------


def with_repeats_copied(leaves: Sequence[Any]) -> Sequence[Any]:
    """Returns the leaves with a copy in place of each array that occurred before. So no two leaves are one array.

    Leaves without identity, such as numbers, are not copied. If no leaf occurs twice, the result is `leaves`
    itself. Cost: one set of ids, and the copies.
    """
    # The ids are those of different objects, because all of them are alive in `leaves`.
    if len(set(map(id, leaves))) == len(leaves):
        return leaves
    seen = IdentitySet()
    new_leaves: list[Any] = []
    for leaf in leaves:
        is_first = seen.add(leaf)
        new_leaves.append(leaf if is_first or not carries_identity(leaf) else copy_of_leaf(leaf))
    return new_leaves


def with_tied_numbers_as_arrays(leaves: Sequence[Any], tree: FlatDag | Structure) -> Sequence[Any]:
    """Returns the leaves with an array in place of each NumPy number to which several edges of the tree lead.

    All other leaves stay. If no leaf is a NumPy number, the result is `leaves` itself. Cost: a check of each type; if
    there are NumPy numbers, a visit of each edge.

    Args:
        leaves: the new leaves of the tree, in order.
        tree: the tree whose leaves they become. Its records are numbered from 0. (Those of a later tree of a `Context`
            are not.)

    Raises:
        ValueError: if there are NumPy numbers, and not as many leaves as the tree has.
    """
    if not any(isinstance(leaf, np.generic) for leaf in leaves):
        return leaves
    tied = records_with_several_edges(tree.records, tree.root)
    new_leaves: list[Any] = []
    for number, leaf in zip(tree.leaf_numbers, leaves, strict=True):
        would_lose_tie = number in tied and isinstance(leaf, np.generic)
        new_leaves.append(np.asarray(leaf) if would_lose_tie else leaf)
    return new_leaves


def copy_of_leaf(leaf: Any) -> Any:
    """Copies a leaf with identity: an array, a `ShapeDtypeStruct` or a reference.

    The copy of a reference is a new reference with the same value.
    """
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=leaf.sharding,
            weak_type=leaf.weak_type,  # pyright: ignore
        )
    if isinstance(leaf, jax.Ref):
        return jax.new_ref(leaf[...])
    return jnp.copy(leaf)
