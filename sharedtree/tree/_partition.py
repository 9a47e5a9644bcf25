"""Editing trees with ties: select, split and join, each shared node once."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jax import tree_util as jtu

from ..core._errors import InconsistentSharingError, SharingMismatchError
from ..core._hidden_arrays import require_all_seen_in
from ..core._node_types import node_type_of, require_registered
from ..core._pack_and_unpack import build
from ..core._prefix_trees import Label, label_at, labels
from ..core._printing import listed, name_of_class, shown
from ..core._static_values import Static
from ..core._structure import LEAF, Node, Op, Path, Record, canonical
from ..core._trees_taken_apart import Walked
from ..ties._policy_and_context import IsLeaf, walk_exactly

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

    With `replace` it also makes specifications: `filter(model, False, replace=False)` is the model with False at every
    leaf, traced or static, of which `at` says where it should be True. `map` does not, for it keeps static leaves.

    Args:
        tree: the tree; it is not changed.
        filter_spec: takes a leaf and says whether to keep it; or a tree prefix of such functions and booleans. Where
            the tree has a static function, it has a boolean, unless a function is said for a node around it.
        inverse: keep what is not selected instead.
        replace: what comes in place of the others.
        is_leaf: nodes for which it is true count as leaves.

    Returns:
        A tree of new nodes.

    Raises:
        InconsistentSharingError: if a prefix selects a tied leaf at one of its paths and not at another.
        SharingMismatchError: if a prefix has nodes that the tree has not, or at a leaf what is no filter.

    Example:
        >>> import jax.numpy as jnp, equinox as eqx, sharedtree as st
        >>> st.tree.filter({"a": jnp.ones(2), "b": "text"}, eqx.is_array)
        {'a': Array([1., 1.], dtype=float32), 'b': None}
        >>> st.tree.filter({"a": jnp.ones(2), "b": "text"}, False, replace=False)
        {'a': False, 'b': False}
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
    walked = walk_exactly(tree, is_leaf)
    require_all_seen_in(walked.records, walked.root)
    found = list(labels(filter_spec, walked, _is_filter, "filter_spec"))

    left_over = [each for each in found if _is_left_over(each, filter_spec, walked)]
    if left_over:
        raise _left_over(left_over[0].label, [jtu.keystr(each.path) for each in left_over])
    selected: dict[int, tuple[bool, Path]] = {}
    for number, label, path in found:
        if not _is_filter(label):
            raise _not_a_filter(label, jtu.keystr(path))
        keep = bool(label(walked.objects[number])) if callable(label) else label
        before, first = selected.setdefault(number, (keep, path))
        if before != keep:
            raise _inconsistent_filter(jtu.keystr(first), jtu.keystr(path), before)

    def half(keep: bool) -> Any:
        def expand(number: int) -> tuple[Op, Sequence[int]]:
            return (LEAF, ()) if number in selected else walked.records[number]

        def leaf(number: int) -> Any:
            return walked.objects[number] if selected[number][0] is keep else replace

        return rebuilt(walked.root, expand, leaf)

    return half(True), half(False)


def _is_filter(spec: Any) -> bool:
    """Whether part of a specification says what to select. A node never does, even if it can be called."""
    return isinstance(spec, bool) or (callable(spec) and node_type_of(spec) is None)


def _is_left_over(found: Label, spec: Any, tree: Walked) -> bool:
    """Whether a specification has a static value where the tree has one, which nobody can have meant as a filter."""
    op, label = tree.records[found.record][0], found.label
    if type(op) is not Static or not found.path or isinstance(label, bool) or node_type_of(label) is not None:
        return False
    if not callable(label):
        return True
    # A function may have been said for a node around it, or for what is no function.
    return callable(op.peek()) and not _is_filter(label_at(spec, tree, found.path[:-1], _is_filter))


def _not_a_filter(spec: Any, path: str) -> SharingMismatchError:
    return SharingMismatchError(
        f"`filter_spec` has a `{name_of_class(spec)}` at `{path}`, where the tree has a leaf. It is made of booleans "
        "and functions that take a leaf, in the nodes of the tree. If this is meant to be called, say so:\n"
        "    filter_spec = lambda leaf: spec(leaf)",
        (path,),
    )


def _left_over(value: Any, paths: Sequence[str]) -> SharingMismatchError:
    return SharingMismatchError(
        f"`filter_spec` has {shown(value)} at {listed(paths)}, where the tree has a static value. That is "
        "no boolean, and a function there would be called as a filter.\n"
        "`sharedtree.tree.map` maps the traced leaves, and keeps the static ones. A specification that has a boolean "
        "at every leaf begins as\n"
        "    filter_spec = sharedtree.tree.filter(model, False, replace=False)\n"
        "and one that has booleans at all other leaves is completed by\n"
        "    filter_spec = sharedtree.tree.filter(filter_spec, lambda leaf: isinstance(leaf, bool), replace=False)",
        paths,
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
    walked = [walk_exactly(tree, is_leaf) for tree in trees]

    # A place is what the trees have at one path: pairs of (tree, record), those with None left out.

    def present(place: _Place) -> _Place:
        return tuple([(i, n) for i, n in place if not _is_none(walked[i].records[n])]) or place[:1]

    def first(place: _Place) -> _Place:
        i, n = place[0]
        return place if type(walked[i].records[n][0]) is Node else place[:1]

    def expand(place: _Place) -> tuple[Op, Sequence[_Place]]:
        found = [walked[i].records[n] for i, n in place]
        op, children = found[0]
        if type(op) is not Node:
            return LEAF, ()
        if any(type(o) is not Node or o.type.cls is not op.type.cls or len(c) != len(children) for o, c in found):
            raise SharingMismatchError(
                "The trees to combine differ in shape: where one has a node, each other must have a node of the same "
                f"class or None, but there are {', '.join(repr(o) for o, _ in found)}."
            )
        below = [[(i, child) for child in walked[i].records[n][1]] for i, n in place]
        return op, [first(present(column)) for column in zip(*below, strict=True)]

    root = first(present(tuple((i, each.root) for i, each in enumerate(walked))))
    return rebuilt(root, expand, lambda place: walked[place[0][0]].objects[place[0][1]])


def _is_none(record: Record) -> bool:
    op, _ = record
    return type(op) is Node and op.type.cls is type(None)
