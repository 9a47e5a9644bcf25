"""Selects leaves of a tree, splits a tree in two, and joins trees, with each shared node visited once."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

from jax import tree_util as jtu

from ..core._errors import InconsistentSharingError, SharingMismatchError
from ..core._hidden_arrays import require_all_seen_in
from ..core._node_types import require_registered
from ..core._pack_and_unpack import build
from ..core._printing import shown
from ..core._structure import LEAF, FlatDag, Node, Op, Record, canonical_records
from ..ties._policy_and_context import IsLeaf, walk_exactly
from ._asking_filters import IN_TREE, Asked, ask, code_that_selects
from ._filters import OF_TREE, AnyFilter, Filter, FilterPrefix, Place, filter_or_prefix, how_to_select, strings_in

T = TypeVar("T")


class _Occurrence(NamedTuple):
    """A record of one of several trees.

    Attributes:
        tree: index of the tree.
        record: number of the record in it.
    """

    tree: int
    record: int


_Column = tuple[_Occurrence, ...]
"""The records of several trees at one path, without those that are None."""


def rebuilt(root: Any, expand: Callable[[Any], tuple[Op, Sequence[Any]]], object_of: Callable[[Any], Any]) -> Any:
    """Builds the tree of new nodes that `expand` describes.

    Args:
        root: key of the root. Keys are hashable, and equal keys become one object.
        expand: key → the operation, and the keys of the children, as for `canonical_records`.
        object_of: key of a leaf → the object in its place.
    """
    records, numbers = canonical_records(root, expand)
    table: list[Any] = []
    build(records, [object_of(key) for key, number in numbers.items() if records[number][0] is LEAF], table)
    return table[-1]


def filter(  # noqa: A001
    tree: T, filter_spec: Any, inverse: bool = False, replace: Any = None, is_leaf: IsLeaf = None
) -> T:
    """Replaces the leaves, traced or static, that a specification does not select. `equinox.filter`, with ties kept.

    With `replace` it also makes specifications: `filter(model, False, replace=False)` is the model with False at every
    leaf, traced or static, of which `at` says where it should be True. `map` does not, for it keeps static leaves.

    Args:
        tree: the tree; it is not changed.
        filter_spec: what to keep, a filter. A function of a leaf says whether to keep it; one of a path and a value,
            a class, a tag, or a list of several of these are as in `sharedtree.grad(f, wrt=...)`. Or a tree prefix of
            filters and booleans; a list or tuple is one where the tree has one of that length. Where the tree has a
            static function, a prefix has a boolean, unless a function is said for a node around it.
        inverse: keep what is not selected instead.
        replace: what comes in place of the others.
        is_leaf: nodes for which it is true count as leaves.

    Returns:
        A tree of new nodes.

    Raises:
        InconsistentSharingError: if a tied leaf is selected at one of its paths and not at another.
        SharingMismatchError: if a prefix has nodes that the tree has not, or at a leaf what is no filter.
        TypeError: if a function takes neither a leaf nor a path and a value.
        ValueError: if nothing has a tag of NNX, which a string is.

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
    spec = filter_or_prefix(filter_spec, OF_TREE)
    of_leaves = ask(walked, spec, asks_static=True, words=IN_TREE).of_leaves
    selected: dict[int, bool] = {}
    for number, questions in of_leaves.items():
        for question in questions:
            if question.answer is not questions[0].answer:
                raise _inconsistent_filter(questions, spec, tree)
        # A record that no path leads to is not asked about.
        if questions:
            selected[number] = questions[0].answer
    if strings_in(filter_spec) and selected and not any(selected.values()):
        _raise_no_tag(walked, filter_spec)

    def half(keep: bool) -> Any:
        def expand(number: int) -> tuple[Op, Sequence[int]]:
            return (LEAF, ()) if number in selected else walked.records[number]

        def leaf(number: int) -> Any:
            return walked.objects[number] if selected[number] is keep else replace

        return rebuilt(walked.root, expand, leaf)

    return half(True), half(False)


def _inconsistent_filter(questions: Sequence[Asked], spec: AnyFilter, tree: Any) -> InconsistentSharingError:
    """Makes the error for a leaf that is selected at one of its paths and not at another.

    Args:
        questions: the questions about the leaf, one for each path, with their answers.
        spec: the filter.
        tree: the tree as the user passed it.
    """
    first = questions[0]
    second = next(question for question in questions if question.answer is not first.answer)
    treatments = ("selected", "not selected") if first.answer else ("not selected", "selected")
    path1, path2 = jtu.keystr(first.keys), jtu.keystr(second.keys)
    unselected_paths = list(dict.fromkeys(question.path for question in questions if not question.answer))
    # If the tree is a list, a list of as many filters would be taken for a tree prefix. A tuple is not.
    fix = code_that_selects(unselected_paths, spec, OF_TREE.name, "()" if isinstance(tree, list) else "[]")
    if isinstance(spec, FilterPrefix):
        fix = (
            "Select it at all of its paths, or at none:\n"
            f"    spec = eqx.tree_at(lambda m: (m{path1}, m{path2}), spec, replace_fn=lambda _: True)\n"
        )
    return InconsistentSharingError(
        f"`{path1}` and `{path2}` are one object, but `filter_spec` has it {treatments[0]} at the first path and "
        f"{treatments[1]} at the second.\n{fix}Or part them first: sharedtree.untie(model, lambda m: m{path2})",
        (path1, path2),
        treatments,
    )


def _raise_no_tag(walked: FlatDag, filter_spec: Any) -> NoReturn:
    """Raises the error for a string as the filter, if nothing in the tree has that tag of Flax NNX."""
    places: list[Place] = []

    def note(place: Place) -> bool:
        places.append(place)
        return True

    ask(walked, Filter(note))
    advice = f" {how_to_select(places, filter_spec, OF_TREE)}" if places else ""
    raise ValueError(f"`filter_spec={shown(filter_spec)}` selects nothing.{advice}")


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

    def record_of(occurrence: _Occurrence) -> Record:
        return walked[occurrence.tree].records[occurrence.record]

    def without_nones(column: _Column) -> _Column:
        """Drops the trees that have None. If all have it, keeps the first."""
        return tuple([occurrence for occurrence in column if not _is_none(record_of(occurrence))]) or column[:1]

    def without_ignored(column: _Column) -> _Column:
        """Keeps the first tree alone if it has a leaf, so that leaves which differ elsewhere do not cut a tie."""
        return column if type(record_of(column[0])[0]) is Node else column[:1]

    def expand(column: _Column) -> tuple[Op, Sequence[_Column]]:
        records = [record_of(occurrence) for occurrence in column]
        op, _ = records[0]
        if type(op) is not Node:
            return LEAF, ()
        if not all(_is_same_node(record, records[0]) for record in records):
            raise SharingMismatchError(
                "The trees to combine differ in shape: where one has a node, each other must have a node of the same "
                f"class or None, but there are {', '.join(repr(tree_op) for tree_op, _ in records)}."
            )
        # For each tree its children, then for each child its column of trees.
        rows: list[list[_Occurrence]] = []
        for occurrence, (_, tree_children) in zip(column, records, strict=True):
            rows.append([_Occurrence(occurrence.tree, child) for child in tree_children])
        return op, [without_ignored(without_nones(child_column)) for child_column in zip(*rows, strict=True)]

    def object_of(column: _Column) -> Any:
        return walked[column[0].tree].objects[column[0].record]

    roots = tuple([_Occurrence(i, tree.root) for i, tree in enumerate(walked)])
    return rebuilt(without_ignored(without_nones(roots)), expand, object_of)


def _is_same_node(record: Record, node_record: Record) -> bool:
    """Returns True if a record is a node of the same class as another one, with as many children."""
    (op, children), (node, node_children) = record, node_record
    assert type(node) is Node
    return type(op) is Node and op.type.cls is node.type.cls and len(children) == len(node_children)


def _is_none(record: Record) -> bool:
    op, _ = record
    return type(op) is Node and op.type.cls is type(None)
