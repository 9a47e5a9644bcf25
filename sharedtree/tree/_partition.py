"""Selects leaves of a tree, splits a tree in two, and joins trees, with each shared node visited once."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

from jax import tree_util as jtu

from ..core._errors import InconsistentSharingError, SharingMismatchError
from ..core._hidden_arrays import refuse_hidden_arrays_in_records
from ..core._node_types import node_type_of, require_registered
from ..core._pack_and_unpack import build
from ..core._printing import shown
from ..core._sharing import text_with_keys
from ..core._structure import LEAF, FlatDag, Node, Op, Path, Record, canonical_records
from ..ties._policy_and_context import IsLeaf, walk_exactly
from ._asking_filters import IN_TREE, Asked, ask, code_that_selects
from ._filters import OF_TREE, AnyFilter, Filter, FilterPrefix, LeafPlace, filter_or_prefix, how_to_select, strings_in

T = TypeVar("T")


class _TreeRecord(NamedTuple):
    """A record of one of several trees.

    Attributes:
        tree: index of the tree.
        record: number of the record in the tree.
    """

    tree: int
    record: int


_Column = tuple[_TreeRecord, ...]
"""The records of several trees at one path, in the order of the trees. Trees that have None there are left out."""


def rebuilt(root: Any, expand: Callable[[Any], tuple[Op, Sequence[Any]]], object_of: Callable[[Any], Any]) -> Any:
    """Builds a tree of new nodes from a description of each node.

    Args:
        root: key of the root. Keys are hashable, and equal keys become one object.
        expand: key → the operation of the node or leaf, and the keys of its children.
        object_of: key of a leaf → the object in its place.
    """
    # Visits the keys from the root down. Returns the records, and key → number of its record.
    records, numbers = canonical_records(root, expand)
    table: list[Any] = []
    build(records, [object_of(key) for key, number in numbers.items() if records[number][0] is LEAF], table)
    return table[-1]


def filter(  # noqa: A001
    tree: T, filter_spec: Any, inverse: bool = False, replace: Any = None, is_leaf: IsLeaf = None
) -> T:
    """Replaces the leaves, traced or static, not selected by a specification. `equinox.filter`, with ties kept.

    It also makes specifications: `filter(model, False, replace=False)` is the model with False at every leaf, traced or
    static. Then `at` can set some of them to True. `map` cannot make one, because it keeps static leaves.

    Args:
        tree: the tree; it is not changed.
        filter_spec: selects the leaves to keep. A filter, as in `sharedtree.grad(f, wrt=...)`: a function of a leaf, a
            function of a path and a value, a class, a tag, or a list of these. Or a tree prefix of filters and
            booleans. A list or tuple is a part of a prefix where the tree has a list or tuple of the same length, else
            a list of filters. At a static function of the tree, a prefix has a boolean, or a filter at a node above.
        inverse: True to keep the unselected leaves instead.
        replace: the object in the place of all other leaves.
        is_leaf: a node counts as a leaf if it is true for the node.

    Returns:
        A tree of new nodes.

    Raises:
        InconsistentSharingError: if a tied leaf is selected at one of its paths and not at another.
        SharingMismatchError: if a prefix has nodes that the tree lacks, or an object at a leaf that is no filter.
        TypeError: if a function takes neither a leaf nor a path and a value.
        ValueError: if the filter has a string, which is a tag of NNX, and selects nothing.

    Example:
        >>> import jax.numpy as jnp, equinox as eqx, sharedtree as st
        >>> st.tree.filter({"a": jnp.ones(2), "b": "text"}, eqx.is_array)
        {'a': Array([1., 1.], dtype=float32), 'b': None}
        >>> st.tree.filter({"a": jnp.ones(2), "b": "text"}, lambda path, value: path == ("b",))
        {'a': None, 'b': 'text'}
        >>> st.tree.filter({"a": jnp.ones(2), "b": "text"}, False, replace=False)
        {'a': False, 'b': False}
    """
    selected, unselected = partition(tree, filter_spec, replace, is_leaf)
    return unselected if inverse else selected


def partition(tree: T, filter_spec: Any, replace: Any = None, is_leaf: IsLeaf = None) -> tuple[T, T]:
    """Splits a tree in two: the selected leaves, and all other leaves. `equinox.partition`, with ties kept in both.

    The parameters and errors are those of `filter`.

    Returns:
        Two trees of the shape of `tree`. Each has `replace` where the other one has a leaf. `combine` joins them again.

    Example:
        >>> import jax.numpy as jnp, equinox as eqx, sharedtree as st
        >>> st.tree.partition([jnp.ones(2), 3], eqx.is_array)
        ([Array([1., 1.], dtype=float32), None], [None, 3])
    """
    require_registered(tree)
    walked = walk_exactly(tree, is_leaf)
    # Raises if an object that cannot be taken apart holds arrays.
    refuse_hidden_arrays_in_records(walked.records, walked.root)
    spec = filter_or_prefix(filter_spec, OF_TREE)
    # Number of a leaf → the answers at its paths.
    answers_of_leaves = ask(walked, spec, asks_static=True, words=IN_TREE).of_leaves
    selected: dict[int, bool] = {}
    for number, answers in answers_of_leaves.items():
        for asked in answers:
            if asked.answer is not answers[0].answer:
                raise _inconsistent_filter(answers, spec, tree)
        # A record that no path leads to is not asked about.
        if answers:
            selected[number] = answers[0].answer
    if strings_in(filter_spec) and selected and not any(selected.values()):
        _raise_no_tag(walked, filter_spec)

    def half(answer: bool) -> Any:
        """Builds the tree with the leaves of this answer."""

        def expand(number: int) -> tuple[Op, Sequence[int]]:
            # A static leaf becomes a traced one, since `replace` can be any object.
            return (LEAF, ()) if number in selected else walked.records[number]

        def object_of(number: int) -> Any:
            return walked.objects[number] if selected[number] is answer else replace

        return rebuilt(walked.root, expand, object_of)

    return half(True), half(False)


def _inconsistent_filter(answers: Sequence[Asked], spec: AnyFilter, tree: Any) -> InconsistentSharingError:
    """Makes the error for a leaf that is selected at one of its paths and not at another.

    Args:
        answers: the answers about the leaf, one for each path.
        spec: the filter.
        tree: the tree as the user passed it.
    """
    first = answers[0]
    second = next(asked for asked in answers if asked.answer is not first.answer)
    treatments = ("selected", "not selected") if first.answer else ("not selected", "selected")
    path1, path2 = jtu.keystr(first.keys), jtu.keystr(second.keys)
    unselected_paths = list(dict.fromkeys(asked.path for asked in answers if not asked.answer))
    # If the tree is a list, a list of as many filters would be taken for a tree prefix. A tuple would not.
    fix = code_that_selects(unselected_paths, spec, OF_TREE.name, "()" if isinstance(tree, list) else "[]")
    if isinstance(spec, FilterPrefix):
        fix = "Select it at all of its paths, or at none. "
        # A boolean may stand for a whole node, so that the prefix ends above one of the paths.
        if _has_path(spec.tree, first.keys) and _has_path(spec.tree, second.keys):
            fix = (
                "Select it at all of its paths, or at none:\n"
                f"    spec = eqx.tree_at(lambda m: (m{path1}, m{path2}), spec, replace_fn=lambda _: True)\n"
            )
    return InconsistentSharingError(
        f"`{path1}` and `{path2}` are one object, but for `filter_spec` it is {treatments[0]} at the first path and "
        f"{treatments[1]} at the second.\n"
        f"{fix}Or untie it first: sharedtree.untie(model, lambda m: m{path2})",
        (path1, path2),
        treatments,
    )


def _has_path(tree: Any, keys: Path) -> bool:
    """Returns True if a path leads to an object of a tree."""
    for key in keys:
        node_type = node_type_of(tree)
        if node_type is None:
            return False
        children = dict(zip(node_type.keys_of(tree), node_type.take_apart(tree)[0], strict=True))
        if key not in children:
            return False
        tree = children[key]
    return True


def _raise_no_tag(walked: FlatDag, filter_spec: Any) -> NoReturn:
    """Raises the error for a string as the filter, if nothing in the tree has that tag of Flax NNX."""
    # All places that the user's filter was asked about.
    places: list[LeafPlace] = []

    def collect(place: LeafPlace) -> bool:
        places.append(place)
        return True

    ask(walked, Filter(collect))
    advice = f" {how_to_select(places, filter_spec, OF_TREE)}" if places else ""
    raise ValueError(f"`filter_spec={shown(filter_spec)}` selects nothing.{advice}")


def combine(*trees: Any, is_leaf: IsLeaf = None) -> Any:
    """Joins trees of one shape. Each leaf is that of the first tree that has one. `equinox.combine`, with ties kept.

    Args:
        trees: trees of one shape. A tree may have `None` where another tree has a leaf or a subtree.
        is_leaf: a node counts as a leaf if it is true for the node.

    Returns:
        A tree of new nodes. Static data of nodes are those of the first tree.

    Raises:
        SharingMismatchError: if the trees have nodes of different classes at one path, or with children of different
            names. `None` fits every node.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> both = st.tree.combine({"a": w, "b": w, "c": None}, {"a": None, "b": None, "c": 3})
        >>> both["a"] is both["b"], both["c"]
        (True, 3)
    """
    walked = [walk_exactly(tree, is_leaf) for tree in trees]

    # The keys of the result's nodes are columns. So two paths of the result are one object if each tree has one object
    # at the two paths.

    def record_of(tree_record: _TreeRecord) -> Record:
        return walked[tree_record.tree].records[tree_record.record]

    def without_nones(column: _Column) -> _Column:
        """Drops the trees that have None. If all trees have None, keeps the first."""
        return tuple([tree_record for tree_record in column if not _is_none(record_of(tree_record))]) or column[:1]

    def without_ignored(column: _Column) -> _Column:
        """Keeps the first tree alone if it has a leaf there: `combine` ignores the objects of the others.

        Otherwise a tie of the first tree would get lost if another tree has different objects at the two paths.
        """
        return column if type(record_of(column[0])[0]) is Node else column[:1]

    def expand(column: _Column) -> tuple[Op, Sequence[_Column]]:
        """Returns the operation of a node or leaf of the result, and the columns of its children."""
        records = [record_of(tree_record) for tree_record in column]
        op, _ = records[0]
        if type(op) is not Node:
            return LEAF, ()
        if not all(_is_same_node(record, records[0]) for record in records):
            texts = dict.fromkeys([text_with_keys(records[0], record) for record in records[1:]])
            texts |= dict.fromkeys([text_with_keys(record, records[0]) for record in records[1:]])
            raise SharingMismatchError(
                "The trees to combine differ in shape: where one has a node, each other must have a node of the same "
                f"class and with the same keys, or None, but there are {', '.join(texts)}."
            )
        # A row has the children in one tree, and a column has one child in all trees.
        rows: list[list[_TreeRecord]] = []
        for tree_record, (_, tree_children) in zip(column, records, strict=True):
            rows.append([_TreeRecord(tree_record.tree, child) for child in tree_children])
        return op, [without_ignored(without_nones(child_column)) for child_column in zip(*rows, strict=True)]

    def object_of(column: _Column) -> Any:
        return walked[column[0].tree].objects[column[0].record]

    roots = tuple([_TreeRecord(i, tree.root) for i, tree in enumerate(walked)])
    return rebuilt(without_ignored(without_nones(roots)), expand, object_of)


def _is_same_node(record: Record, node_record: Record) -> bool:
    """Returns True if a record is a node of the same class as another one, with as many children of the same names."""
    (op, children), (node, node_children) = record, node_record
    assert type(node) is Node
    if type(op) is not Node or op.type.cls is not node.type.cls or len(children) != len(node_children):
        return False
    # Different keys alone do not make a difference, because a class may take its keys from anywhere.
    return op.keys == node.keys or op.aux == node.aux


def _is_none(record: Record) -> bool:
    """Returns True for the record of a None, which is a node without children."""
    op, _ = record
    return type(op) is Node and op.type.cls is type(None)
