"""Editing trees with ties: select, split and join, each shared node once."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jax import tree_util as jtu

from ._context import IsLeaf, rules_here
from ._errors import InconsistentSharingError, SharingMismatchError
from ._graph import Tags, build, walk
from ._node_types import node_type_of, require_registered
from ._prefix import labels
from ._structure import LEAF, Node, Op, Path, Record, canonical

T = TypeVar("T")

_Place = tuple[tuple[int, int], ...]


def rebuilt(root: Any, expand: Callable[[Any], tuple[Op, Sequence[Any]]], object_of: Callable[[Any], Any]) -> Any:
    """The tree of new nodes that `expand` describes, as for `canonical`, with `object_of` naming its leaves."""
    records, numbers = canonical(root, expand)
    table: list[Any] = []
    build(records, [object_of(name) for name, number in numbers.items() if records[number][0] is LEAF], table)
    return table[-1]


def filter(  # noqa: A001
    tree: T, filter_spec: Any, inverse: bool = False, replace: Any = None, is_leaf: IsLeaf = None
) -> T:
    """Replaces the leaves, traced or static, that a specification does not select. `equinox.filter`, with ties kept.

    Args:
        tree: the tree; it is not changed.
        filter_spec: takes a leaf and says whether to keep it; or a tree prefix of such functions and booleans.
        inverse: keep what is not selected instead.
        replace: what comes in place of the others.
        is_leaf: nodes for which it is true count as leaves.

    Returns:
        A tree of new nodes.

    Raises:
        InconsistentSharingError: if a prefix selects a tied leaf at one of its paths and not at another.

    Example:
        >>> import jax.numpy as jnp, equinox as eqx, sharedtree as st
        >>> st.tree.filter({"a": jnp.ones(2), "b": "text"}, eqx.is_array)
        {'a': Array([1., 1.], dtype=float32), 'b': None}
    """
    kept, rest = partition(tree, filter_spec, replace, is_leaf)
    return rest if inverse else kept


def partition(tree: T, filter_spec: Any, replace: Any = None, is_leaf: IsLeaf = None) -> tuple[T, T]:
    """Splits a tree into what a specification selects and the rest. `equinox.partition`, with ties kept in both.

    Args and errors as for `filter`.

    Returns:
        Two trees of the shape of `tree`, each with `replace` where the other has a leaf; `combine` joins them again.

    Example:
        >>> import jax.numpy as jnp, equinox as eqx, sharedtree as st
        >>> st.tree.partition([jnp.ones(2), 3], eqx.is_array)
        ([Array([1., 1.], dtype=float32), None], [None, 3])
    """
    require_registered(tree)
    tags = Tags()
    _, records, root = walk(tree, tags, rules_here(is_leaf))
    selected: dict[int, tuple[bool, Path]] = {}
    for number, label, path in labels(filter_spec, records, root, _is_filter, "filter_spec"):
        if not _is_filter(label):
            raise _not_a_filter(label, jtu.keystr(path))
        keep = bool(label(tags.objects[number])) if callable(label) else label
        before, first = selected.setdefault(number, (keep, path))
        if before != keep:
            raise _inconsistent_filter(jtu.keystr(first), jtu.keystr(path), before)

    def half(keep: bool) -> Any:
        def expand(number: int) -> tuple[Op, Sequence[int]]:
            return (LEAF, ()) if number in selected else records[number]

        return rebuilt(root, expand, lambda number: tags.objects[number] if selected[number][0] is keep else replace)

    return half(True), half(False)


def _is_filter(spec: Any) -> bool:
    """Whether part of a specification says what to select. A node never does, even if it can be called."""
    return isinstance(spec, bool) or (callable(spec) and node_type_of(spec) is None)


def _not_a_filter(spec: Any, path: str) -> SharingMismatchError:
    return SharingMismatchError(
        f"`filter_spec` has a `{type(spec).__name__}` at `{path}`, where the tree has a leaf. It is made of booleans "
        "and functions that take a leaf, in the nodes of the tree. If this is meant to be called, say so:\n"
        "    filter_spec = lambda leaf: spec(leaf)",
        (path,),
    )


def _inconsistent_filter(first: str, second: str, kept: bool) -> InconsistentSharingError:
    treatments = ("selected", "not selected") if kept else ("not selected", "selected")
    return InconsistentSharingError(
        f"`{first}` and `{second}` are one object, but `filter_spec` has it {treatments[0]} at the first path and "
        f"{treatments[1]} at the second.\n"
        "Select it at all of its paths, or at none:\n"
        f"    spec = eqx.tree_at(lambda m: (m{first}, m{second}), spec, replace_fn=lambda _: True)\n"
        f"or part them first: sharedtree.untie(model, lambda m: m{second})",
        (first, second),
        treatments,
    )


def combine(*trees: Any, is_leaf: IsLeaf = None) -> Any:
    """Joins trees of one shape, taking each leaf from the first that has one. `equinox.combine`, with ties kept.

    Args:
        trees: trees of one shape, with `None` where another has a leaf or a subtree.
        is_leaf: nodes for which it is true count as leaves.

    Returns:
        A tree of new nodes; statics that are not leaves are those of the first tree.

    Raises:
        SharingMismatchError: if the trees differ in shape other than by `None`.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> both = st.tree.combine({"a": w, "b": w, "c": None}, {"a": None, "b": None, "c": 3})
        >>> both["a"] is both["b"], both["c"]
        (True, 3)
    """
    tags = [Tags() for _ in trees]
    walked = [walk(tree, seen, rules_here(is_leaf)) for tree, seen in zip(trees, tags, strict=True)]
    records = [each[1] for each in walked]

    # A place is what the trees have at one path: pairs of (tree, record), those with None left out.

    def present(place: _Place) -> _Place:
        return tuple([(i, n) for i, n in place if not _is_none(records[i][n])]) or place[:1]

    def first(place: _Place) -> _Place:
        i, n = place[0]
        return place if type(records[i][n][0]) is Node else place[:1]

    def expand(place: _Place) -> tuple[Op, Sequence[_Place]]:
        found = [records[i][n] for i, n in place]
        op, children = found[0]
        if type(op) is not Node:
            return LEAF, ()
        if any(type(o) is not Node or o.type.cls is not op.type.cls or len(c) != len(children) for o, c in found):
            raise SharingMismatchError(
                "The trees to combine differ in shape: where one has a node, each other must have a node of the same "
                f"class or None, but there are {', '.join(repr(o) for o, _ in found)}."
            )
        below = [[(i, child) for child in records[i][n][1]] for i, n in place]
        return op, [first(present(column)) for column in zip(*below, strict=True)]

    root = first(present(tuple((i, each[2]) for i, each in enumerate(walked))))
    return rebuilt(root, expand, lambda place: tags[place[0][0]].objects[place[0][1]])


def _is_none(record: Record) -> bool:
    op, _ = record
    return type(op) is Node and op.type.cls is type(None)
