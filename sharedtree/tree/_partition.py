"""Editing trees with ties: select, split and join, each shared node once."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from jax import tree_util as jtu

from ..core._errors import InconsistentSharingError, SharingMismatchError
from ..core._hidden_arrays import require_all_seen_in
from ..core._node_types import require_registered
from ..core._pack_and_unpack import build
from ..core._printing import shown
from ..core._structure import LEAF, FlatDag, Node, Op, Record, canonical
from ..ties._policy_and_context import IsLeaf, walk_exactly
from ._asking_filters import IN_TREE, Asked, ask, code_that_selects
from ._filters import OF_TREE, AnyFilter, Filter, FilterPrefix, Place, filter_or_prefix, how_to_select, strings_in

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
    spec = filter_or_prefix(filter_spec, OF_TREE)
    of_leaves = ask(walked, spec, asks_static=True, words=IN_TREE).of_leaves
    selected: dict[int, bool] = {}
    for number, asked in of_leaves.items():
        for each in asked:
            if each.answer is not asked[0].answer:
                raise _inconsistent_filter(asked, spec, tree)
        if asked:  # of what a path leads to
            selected[number] = asked[0].answer
    if strings_in(filter_spec) and selected and not any(selected.values()):
        _raise_no_tag(walked, filter_spec)

    def half(keep: bool) -> Any:
        def expand(number: int) -> tuple[Op, Sequence[int]]:
            return (LEAF, ()) if number in selected else walked.records[number]

        def leaf(number: int) -> Any:
            return walked.objects[number] if selected[number] is keep else replace

        return rebuilt(walked.root, expand, leaf)

    return half(True), half(False)


def _inconsistent_filter(asked: Sequence[Asked], spec: AnyFilter, tree: Any) -> InconsistentSharingError:
    first = asked[0]
    second = next(each for each in asked if each.answer is not first.answer)
    treatments = ("selected", "not selected") if first.answer else ("not selected", "selected")
    one, two = jtu.keystr(first.keys), jtu.keystr(second.keys)
    # A list where the tree is a list of as many would be a tree prefix.
    others = list(dict.fromkeys(each.path for each in asked if not each.answer))
    fix = code_that_selects(others, spec, OF_TREE.name, "()" if isinstance(tree, list) else "[]")
    if isinstance(spec, FilterPrefix):
        fix = (
            "Select it at all of its paths, or at none:\n"
            f"    spec = eqx.tree_at(lambda m: (m{one}, m{two}), spec, replace_fn=lambda _: True)\n"
        )
    return InconsistentSharingError(
        f"`{one}` and `{two}` are one object, but `filter_spec` has it {treatments[0]} at the first path and "
        f"{treatments[1]} at the second.\n{fix}Or part them first: sharedtree.untie(model, lambda m: m{two})",
        (one, two),
        treatments,
    )


def _raise_no_tag(walked: FlatDag, filter_spec: Any) -> NoReturn:
    """Raises because nothing in a tree has a tag, which a string is."""
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
