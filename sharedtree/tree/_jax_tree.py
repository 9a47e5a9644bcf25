"""`flatten`, `unflatten`, `map` and their like: `jax.tree`, each shared node once."""

import builtins
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import equinox as eqx
from jax import tree_util as jtu

from ..core._errors import SharingMismatchError
from ..core._hidden_arrays import require_all_seen
from ..core._node_types import PYTHON_NUMBERS, carries_identity, require_registered
from ..core._pack_and_unpack import unpack
from ..core._printing import shown
from ..core._sharing import Mismatch, pairs, with_identity
from ..core._static_values import Static
from ..core._structure import LEAF, FlatDag, Node, Path, Structure
from ..ties._leaf_notes import hand_on, is_noted, recall, remember
from ..ties._list_ties import are_one_value, how_to_tie, is_inexact
from ..ties._policy_and_context import (
    IsLeaf,
    pack_alone,
    pack_exactly,
    pack_here,
    unpack_here,
    walk_alone,
    walk_exactly,
)
from ._stacked_modules import report_stacked_modules

T = TypeVar("T")


class Advice(Protocol):
    """What to do about a tree that lacks ties of another one."""

    def __call__(self, name: str, like: str, *, in_containers: bool) -> str: ...  # noqa: D102


def flatten(tree: Any, is_leaf: IsLeaf = None) -> tuple[list[Any], Structure]:
    """Takes a tree apart into its traced leaves, each once, and its structure.

    Inside a `Context`, objects that an earlier `flatten` saw are not repeated: the structure refers to them.

    Args:
        tree: a module, or any container of modules and arrays.
        is_leaf: nodes for which it is true count as leaves.

    Returns:
        The leaves, aliased, in flatten order; and the structure, which is hashable and the same object for equal
        trees.

    Raises:
        CycleError: if an object contains itself.
        StaticComparisonError: if a static leaf has no usable `==`.
        UnregisteredTypeError: if `tree` is an object that cannot be taken apart.

    Cost: one walk over the nodes.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> leaves, structure = st.tree.flatten({"a": w, "b": w})
        >>> len(leaves), structure
        (1, Structure(2 records, 1 leaves))
    """
    require_registered(tree)
    found, structure = pack_here(tree, is_leaf)
    require_all_seen(structure)
    remember(structure, found)
    return found, structure


def unflatten(structure: Structure, leaves: Any) -> Any:
    """Puts a tree together; the inverse of `flatten`.

    Args:
        structure: from `flatten` or `structure`.
        leaves: one object for each traced leaf; they need not be arrays, and are aliased.

    Returns:
        A tree of new nodes. Mutable static data is copied.

    Raises:
        ValueError: if there are too many leaves or too few.
        ContextMismatchError: if the structure continues trees that were not unflattened in this `Context`.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> leaves, structure = st.tree.flatten({"a": w, "b": w})
        >>> st.tree.unflatten(structure, [7])
        {'a': 7, 'b': 7}

    Limitations: equal structures are one object, so the static values are those of the first tree that had an equal
    one. `map` gives back those of its own argument.
    """
    leaves = builtins.list(leaves)
    tree = unpack_here(structure, leaves)
    recall(structure, leaves)
    return tree


def structure(tree: Any, is_leaf: IsLeaf = None) -> Structure:
    """The structure of a tree by itself; see `flatten`.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> st.tree.structure([jnp.ones(2)]) is st.tree.structure([jnp.zeros(3)])
        True
    """
    require_registered(tree)
    found, structure = pack_alone(tree, is_leaf)
    require_all_seen(structure)
    remember(structure, found)
    return structure


def leaves(tree: Any, is_leaf: IsLeaf = None) -> list[Any]:
    """The traced leaves of a tree by itself, each once, aliased; see `flatten`.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> len(st.tree.leaves([w, w]))
        1
    """
    require_registered(tree)
    found, structure = pack_alone(tree, is_leaf)
    require_all_seen(structure)
    return found


def leaves_with_path(tree: Any, is_leaf: IsLeaf = None, is_leaf_takes_path: bool = False) -> list[tuple[Path, Any]]:
    """The traced leaves, each once, with the key path of its first occurrence as `jax.tree.leaves_with_path` has it.

    Args:
        tree: a module, or any container of modules and arrays.
        is_leaf: nodes for which it is true count as leaves. A shared node is asked about once, at its first path.
        is_leaf_takes_path: whether `is_leaf` takes the key path and the node.

    Example:
        >>> import jax, jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> [jax.tree_util.keystr(path) for path, leaf in st.tree.leaves_with_path({"a": w, "b": w})]
        ["['a']"]
    """
    require_registered(tree)
    walked = walk_exactly(tree, is_leaf, takes_path=is_leaf_takes_path)
    require_all_seen(walked.structure)
    return builtins.list(zip(_leaf_paths(walked), walked.leaves.values(), strict=True))


def map(f: Callable[..., Any], tree: T, *rest: Any, is_leaf: IsLeaf = None) -> T:  # noqa: A001
    """Applies a function to each traced leaf once; the result has the ties of `tree`.

    Args:
        f: takes a leaf of `tree` and what is at its path in each of `rest`.
        tree: a module, or any container of modules and arrays.
        rest: trees of the same shape, which where `tree` has a leaf may hold anything: a subtree, a Python number, or
            `None`, which is handed to `f` as None. What is tied in `tree` must be one object in each of them.
        is_leaf: nodes of `tree` for which it is true count as leaves.

    Returns:
        A tree of new nodes; static leaves are those of `tree`. So it makes no specification for `partition`, in which
        static leaves have booleans, too: `filter(tree, False, replace=False)` does.

    Raises:
        SharingMismatchError: if one of `rest` has another shape, or lacks a tie of `tree`; names the paths.
        UntiedError: under `Policy(on_untie="error")`, where there would be a warning.

    Warns:
        UntiedWarning: if what several trees hold as one module at one path is stacked, so that it becomes several.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> doubled = st.tree.map(lambda x: 2 * x, {"a": w, "b": w})
        >>> doubled["a"] is doubled["b"]
        True

    Limitations: if `f` returns one object for two leaves, the result has that tie too. Numbers carry no identity: where
    `f` returns one of NumPy's for a tied leaf, the result has an array without dimensions.
    """
    return _mapped(f, tree, rest, is_leaf, with_paths=False)


def map_with_path(
    f: Callable[..., Any], tree: T, *rest: Any, is_leaf: IsLeaf = None, is_leaf_takes_path: bool = False
) -> T:
    """As `map`, with the key path of the leaf's first occurrence as the first argument of `f`.

    Args:
        f: takes the path, a leaf of `tree`, and what is there in each of `rest`.
        tree: as for `map`.
        rest: as for `map`.
        is_leaf: as for `map`. A shared node is asked about once, at its first path.
        is_leaf_takes_path: whether `is_leaf` takes the key path and the node.

    Example:
        >>> import jax, jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> st.tree.map_with_path(lambda path, x: jax.tree_util.keystr(path), {"a": w, "b": w})
        {'a': "['a']", 'b': "['a']"}
    """
    return _mapped(f, tree, rest, is_leaf, with_paths=True, takes_path=is_leaf_takes_path)


def _mapped(
    f: Callable[..., Any],
    tree: Any,
    rest: tuple[Any, ...],
    is_leaf: IsLeaf,
    *,
    with_paths: bool,
    takes_path: bool = False,
) -> Any:
    require_registered(tree)
    if with_paths:
        walked = walk_exactly(tree, is_leaf, takes_path=takes_path)
        found, structure = builtins.list(walked.leaves.values()), walked.structure
        before = [_leaf_paths(walked)]
    else:
        found, structure = pack_exactly(tree, is_leaf, takes_path=takes_path)
        before = []
    require_all_seen(structure)
    columns = [
        _aligned(structure, other, _NamesOfTrees(f"rest[{i}]", "tree", "the tree", how_to_tie))
        for i, other in enumerate(rest)
    ]
    new = [f(*args) for args in zip(*before, found, *columns, strict=True)]
    if rest:
        report_stacked_modules((tree, *rest), found, new)
    return _put_together(structure, found, new)


def map_updates(f: Callable[[Any, Any], Any], model: T, updates: Any, how_to_tie: Advice) -> T:
    """As `map` over two trees, with errors that call them by these names and say what its caller advises."""
    require_registered(model)
    found, structure = pack_exactly(model)
    require_all_seen(structure)
    words = _NamesOfTrees("updates", "model", "the model", how_to_tie)
    column = _aligned(structure, updates, words, refuses=_refuse_static)
    return _put_together(structure, found, [f(*both) for both in zip(found, column, strict=True)])


def require_alike(tree: Any, other: Any, name: str, like: str, how_to_tie: Advice) -> None:
    """Raises unless another tree has the nodes of a tree, and its ties.

    Args:
        tree: the first.
        other: the second. It may have `None` in the place of a leaf.
        name: what messages call the second.
        like: what they call the first.
        how_to_tie: what to do if the second lacks ties.

    Raises:
        SharingMismatchError: names the paths.
    """
    _aligned(pack_exactly(tree)[1], other, _NamesOfTrees(name, like, f"the {like}", how_to_tie))


def map_pairs(f: Callable[[Path, Any, Any], Any], new: T, old: Any, how_to_tie: Advice) -> T:
    """As `map_with_path` over two trees, with errors that call them `new` and `old`.

    Where `new` has None, `old` may have anything, and the result has None.
    """
    require_registered(new)
    walked = walk_exactly(new)
    require_all_seen(walked.structure)
    words = _NamesOfTrees("old", "new", "`new`", how_to_tie)
    old_tree, records = _aligned_records(walked.structure, old, words, may_lack=True)
    leaves, paths = builtins.list(walked.leaves.values()), _leaf_paths(walked)
    _refuse_lost_ties(old_tree, records, leaves, paths)
    old_leaves = [old_tree.objects[record] for record in records]
    changed = [f(*pair) for pair in zip(paths, leaves, old_leaves, strict=True)]
    return _put_together(walked.structure, leaves, changed)


def _refuse_lost_ties(old: FlatDag, numbers: Sequence[int], leaves: Sequence[Any], paths: Sequence[Path]) -> None:
    """Raises if two floating-point leaves of `new` are one leaf in `old`, unless `untie` has parted them.

    Args:
        old: the second tree.
        numbers: for each leaf of `new` the record in `old`.
        leaves: those of `new`.
        paths: where they are.
    """
    first: dict[int, int] = {}
    for place, number in enumerate(numbers):
        leaf = old.objects[number]
        if old.records[number][0] is not LEAF or not carries_identity(leaf) or not is_inexact(leaf):
            continue
        other = first.setdefault(number, place)
        if other != place and not (is_noted(leaves[other]) and is_noted(leaves[place])):
            one, two = jtu.keystr(paths[other]), jtu.keystr(paths[place])
            raise SharingMismatchError(
                f"`{one}` and `{two}` are one leaf in `old`, but two objects in `new`.\n"
                "The result would have two leaves, so the tie would be lost. If the two hold one value, because a "
                "function that sees trees, such as `jax.tree.map`, has parted them, put the tie back:\n"
                "    new = sharedtree.retie(new, like=old)\n"
                "If they are meant to be two:\n"
                "    old = sharedtree.untie(old)",
                (one, two),
            )


def _refuse_static(static: Static, update: Any, path: Path) -> None:
    """Raises if there is an update for a static leaf, which would be lost.

    What cannot be added, and equals the static leaf, was copied from the model by a function such as `map`.
    """
    value = static.peek()
    is_copied = type(value) not in PYTHON_NUMBERS and Static(update) == static
    if update is not None and not is_copied:
        text = jtu.keystr(path)
        raise SharingMismatchError(
            f"`updates` has an update for `{text}`, which is static in the model: {shown(value)}. What is static is "
            "part of the structure and is not updated.\n"
            "Make it an array in the model, if it is to be trained, or leave it out of the updates:\n"
            "    updates = sharedtree.tree.filter(updates, eqx.is_inexact_array)",
            (text,),
        )


def _put_together(structure: Structure, found: list[Any], new: list[Any]) -> Any:
    """A tree with new leaves, which inherit what was noted of the old ones."""
    leaves = with_identity(new, structure)
    hand_on(found, leaves)
    return unpack(structure, leaves)


def _leaf_paths(tree: FlatDag) -> list[Path]:
    """The path of the first occurrence of each traced leaf."""
    return [tree.first_paths[number] for number in tree.leaf_numbers]


class _NamesOfTrees(NamedTuple):
    """What messages about two trees say.

    Attributes:
        name: the second tree, in code.
        like: the first tree, in code.
        title: the first tree, in a sentence.
        advice: what to do if the second lacks ties.
    """

    name: str
    like: str
    title: str
    advice: Advice


def _nothing_to_refuse(static: Static, value: Any, path: Path) -> None:
    """Takes whatever the second tree has for a static leaf."""


def _aligned(
    structure: Structure,
    other: Any,
    words: _NamesOfTrees,
    refuses: Callable[[Static, Any, Path], None] = _nothing_to_refuse,
    *,
    may_lack: bool = False,
) -> list[Any]:
    """Returns what a second tree holds where the first has its leaves. Takes the arguments of `_aligned_records`."""
    tree, records = _aligned_records(structure, other, words, refuses, may_lack=may_lack)
    return [tree.objects[record] for record in records]


def _aligned_records(
    structure: Structure,
    other: Any,
    words: _NamesOfTrees,
    refuses: Callable[[Static, Any, Path], None] = _nothing_to_refuse,
    *,
    may_lack: bool = False,
) -> tuple[FlatDag, list[int]]:
    """Flattens a second tree, and finds its record for each leaf of the first.

    Args:
        structure: of the first tree.
        other: the second tree.
        words: of errors.
        refuses: is given each static leaf, what the second has there, and the path, to object to it.
        may_lack: whether the second may have anything where the first has None.

    Raises:
        SharingMismatchError: if the trees differ in shape, or what is tied in the first is not tied in the second.
    """
    walked, model = walk_alone(other), structure.records

    def agree(i: int, _: int) -> bool:
        op = model[i][0]
        return op is LEAF or type(op) is Static or (may_lack and type(op) is Node and op.type.cls is type(None))

    found: dict[int, tuple[int, Path]] = {}
    for pair in pairs(structure, walked, agree, compares_keys=True):
        if isinstance(pair, Mismatch):
            raise pair.error(words.title, f"`{words.name}`")
        op = model[pair.left][0]
        if type(op) is Static:
            refuses(op, walked.objects[pair.right], pair.path)
        if op is not LEAF:
            continue
        number, path = found.setdefault(pair.left, (pair.right, pair.path))
        if number != pair.right and not are_one_value(walked, number, pair.right):
            one, two = jtu.keystr(path), jtu.keystr(pair.path)
            in_containers = pair.left in FlatDag.of(structure).outside
            raise SharingMismatchError(
                f"`{one}` and `{two}` are one leaf in {words.title}, but two objects in `{words.name}`.\n"
                "Which of the two is meant cannot be known.\n"
                f"{words.advice(words.name, words.like, in_containers=in_containers)}",
                (one, two),
            )
    return walked, [found[number][0] for number, (op, _) in enumerate(model) if op is LEAF]


def equal(*trees: Any, typematch: bool = False, rtol: Any = 0.0, atol: Any = 0.0) -> Any:
    """Whether trees are equal in structure, ties, static data and values. `equinox.tree_equal`, with ties compared.

    Args:
        trees: two or more trees.
        typematch: also require each pair of leaves to have the same type.
        rtol: relative tolerance for inexact leaves.
        atol: absolute tolerance for inexact leaves.

    Returns:
        A bool, or a traced boolean scalar under a transform.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> bool(st.tree.equal([w, w], [w, w])), bool(st.tree.equal([w, w], [w, jnp.ones(2)]))
        (True, False)
    """
    packed = [pack_alone(tree) for tree in trees]
    if any(structure is not packed[0][1] for _, structure in packed):
        return False
    return eqx.tree_equal(*[found for found, _ in packed], typematch=typematch, rtol=rtol, atol=atol)
