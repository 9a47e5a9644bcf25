"""The functions of `jax.tree` on DAGs (`flatten`, `unflatten`, `map` and others): each shared node is visited once.

A function of several trees *aligns* them: for each leaf of the first tree it finds the object at the same path in every
further tree. A leaf that is tied in the first tree must be one object in the further trees as well, since the function
is called once for it.
"""

import builtins
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import equinox as eqx
from jax import tree_util as jtu

from ..core._errors import SharingMismatchError
from ..core._hidden_arrays import refuse_hidden_arrays
from ..core._node_types import PYTHON_NUMBERS, carries_identity, require_registered
from ..core._pack_and_unpack import unpack
from ..core._printing import code_that_unties, shown
from ..core._sharing import Mismatch, RecordPair, pairs, with_tied_numbers_as_arrays
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


class HowToTie(Protocol):
    """A function that makes the advice in an error about a tree that lacks ties of another tree.

    Its arguments are the names of the two trees in code, and True if the tied leaf stands in plain containers.
    """

    def __call__(self, name: str, like: str, *, in_containers: bool) -> str: ...  # noqa: D102


def flatten(tree: Any, is_leaf: IsLeaf = None) -> tuple[list[Any], Structure]:
    """Takes a tree apart into its traced leaves, each once, and its structure.

    Inside a `Context`, objects that an earlier `flatten` saw are not repeated: the structure refers to them.

    Args:
        tree: a module, or any container of modules and arrays.
        is_leaf: a node counts as a leaf if it is true for the node.

    Returns:
        The leaves, aliased, in flatten order; and the structure, which is hashable and the same object for equal
        trees.

    Raises:
        CycleError: if an object contains itself.
        StaticComparisonError: if a static leaf has no usable `==`.
        UnregisteredTypeError: if `tree` cannot be taken apart.

    Cost: one walk over the nodes.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> leaves, structure = st.tree.flatten({"a": w, "b": w})
        >>> len(leaves), structure
        (1, Structure(2 records, 1 leaves))
    """
    require_registered(tree)
    leaves, structure = pack_here(tree, is_leaf)
    # Raises if an object that cannot be taken apart holds arrays.
    refuse_hidden_arrays(structure)
    # Stores with the structure which leaves `tie` made one outside modules, so that `unflatten` notes the new leaves.
    remember(structure, leaves)
    return leaves, structure


def unflatten(structure: Structure, leaves: Any) -> Any:
    """Puts a tree together from its leaves and its structure. It is the inverse of `flatten`.

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

    Limitations: equal structures are one object, so the static values are those of the first tree with an equal
    structure. `map` keeps the static values of its own argument.
    """
    leaves = builtins.list(leaves)
    tree = unpack_here(structure, leaves)
    recall(structure, leaves)
    return tree


def structure(tree: Any, is_leaf: IsLeaf = None) -> Structure:
    """Returns the structure of a tree, without regard to any `Context`. See `flatten`.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> st.tree.structure([jnp.ones(2)]) is st.tree.structure([jnp.zeros(3)])
        True
    """
    require_registered(tree)
    leaves, structure = pack_alone(tree, is_leaf)
    refuse_hidden_arrays(structure)
    remember(structure, leaves)
    return structure


def leaves(tree: Any, is_leaf: IsLeaf = None) -> list[Any]:
    """Lists the traced leaves of a tree, each once, aliased, without regard to any `Context`. See `flatten`.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> len(st.tree.leaves([w, w]))
        1
    """
    require_registered(tree)
    leaves, structure = pack_alone(tree, is_leaf)
    refuse_hidden_arrays(structure)
    return leaves


def leaves_with_path(tree: Any, is_leaf: IsLeaf = None, is_leaf_takes_path: bool = False) -> list[tuple[Path, Any]]:
    """Lists the traced leaves, each once, with the key path of its first occurrence, as `jax.tree.leaves_with_path`.

    Args:
        tree: a module, or any container of modules and arrays.
        is_leaf: a node counts as a leaf if it is true for the node. A shared node is asked about once, at its first
            path.
        is_leaf_takes_path: True if `is_leaf` takes the key path and the node, False if it takes the node only.

    Example:
        >>> import jax, jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> [jax.tree_util.keystr(path) for path, leaf in st.tree.leaves_with_path({"a": w, "b": w})]
        ["['a']"]
    """
    require_registered(tree)
    walked = walk_exactly(tree, is_leaf, takes_path=is_leaf_takes_path)
    refuse_hidden_arrays(walked.structure)
    return builtins.list(zip(_leaf_paths(walked), walked.leaves.values(), strict=True))


def map(f: Callable[..., Any], tree: T, *rest: Any, is_leaf: IsLeaf = None) -> T:  # noqa: A001
    """Applies a function to each traced leaf once. The result has the ties of `tree`.

    Args:
        f: takes a leaf of `tree`, and for each of `rest` the object at the leaf's path.
        tree: a module, or any container of modules and arrays.
        rest: trees of the same shape. In the place of a leaf of `tree` they can have any object: a subtree, a Python
            number, or `None`, with which `f` is called. A leaf that is tied in `tree` must be one object in each of
            these trees.
        is_leaf: a node of `tree` counts as a leaf if it is true for the node.

    Returns:
        A tree of new nodes, with the static leaves of `tree`. To make a specification for `partition`, in which static
        leaves have booleans, too, call `filter(tree, False, replace=False)` instead.

    Raises:
        SharingMismatchError: if one of `rest` has another shape, or lacks a tie of `tree`. The error names the paths.
        UntiedError: under `Policy(on_untie="error")`, in place of the warning.

    Warns:
        UntiedWarning: if several trees hold one module at one path, and `f` stacks its leaves. In the result the module
            is one with larger arrays, and its parts are trained separately.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> doubled = st.tree.map(lambda x: 2 * x, {"a": w, "b": w})
        >>> doubled["a"] is doubled["b"]
        True

    Limitations: if `f` returns one object for two leaves, the result has that tie too. If `f` returns a NumPy number
    for a tied leaf, the result has an array without dimensions, because numbers carry no identity.
    """
    return _mapped(f, tree, rest, is_leaf, with_paths=False)


def map_with_path(
    f: Callable[..., Any], tree: T, *rest: Any, is_leaf: IsLeaf = None, is_leaf_takes_path: bool = False
) -> T:
    """Applies a function to each traced leaf once, with the key path of its first occurrence as the first argument.

    Otherwise it does the same as `map`.

    Args:
        f: takes the path, a leaf of `tree`, and the objects at that path in each of `rest`.
        tree: a module, or any container of modules and arrays.
        rest: trees of the same shape, see `map`.
        is_leaf: a node of `tree` counts as a leaf if it is true for the node. A shared node is asked about once, at its
            first path.
        is_leaf_takes_path: True if `is_leaf` takes the key path and the node, False if it takes the node only.

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
    """Applies a function to each traced leaf once, for `map` and `map_with_path`. For errors see `map`.

    Args:
        f: takes the path if `with_paths`, a leaf of `tree`, and for each of `rest` the object at the leaf's path.
        tree: the tree whose leaves are mapped.
        rest: further trees of the same shape.
        is_leaf: a node counts as a leaf if it is true for the node.
        with_paths: True if `f` takes the path.
        takes_path: True if `is_leaf` takes the path.
    """
    require_registered(tree)

    # Get the arguments of `f`. A column is a list of one argument for all leaves, in their order.
    if with_paths:
        walked = walk_exactly(tree, is_leaf, takes_path=takes_path)
        leaves, structure = builtins.list(walked.leaves.values()), walked.structure
        path_columns = [_leaf_paths(walked)]
    else:
        # Packing is enough, since no paths are needed.
        leaves, structure = pack_exactly(tree, is_leaf, takes_path=takes_path)
        path_columns = []
    refuse_hidden_arrays(structure)
    columns: list[list[Any]] = []
    for i, further_tree in enumerate(rest):
        columns.append(_aligned(structure, further_tree, _names_in_map(i)))

    results = [f(*args) for args in zip(*path_columns, leaves, *columns, strict=True)]
    if rest:
        report_stacked_modules((tree, *rest), leaves, results)
    return _put_together(structure, leaves, results)


def map_updates(f: Callable[[Any, Any], Any], model: T, updates: Any, how_to_tie: HowToTie) -> T:
    """Applies a function to each traced leaf of a model and its update. Errors call the trees `model` and `updates`.

    Args:
        f: takes a leaf and its update.
        model: the model. The result has its ties and its static leaves.
        updates: a tree of the same shape.
        how_to_tie: makes the advice if `updates` lacks ties of the model.

    Raises:
        SharingMismatchError: if `updates` has another shape, lacks a tie, or has an update for a static leaf.
    """
    require_registered(model)
    # Packed exactly: the result has the model's very static values, not equal ones.
    leaves, structure = pack_exactly(model)
    refuse_hidden_arrays(structure)
    names = _NamesOfTrees("updates", "model", "the model", how_to_tie)
    column = _aligned(structure, updates, names, refuses=_refuse_static)
    return _put_together(structure, leaves, [f(leaf, update) for leaf, update in zip(leaves, column, strict=True)])


def require_alike(tree: Any, aligned_tree: Any, name: str, like: str, how_to_tie: HowToTie) -> None:
    """Raises an error unless a second tree has the nodes and the ties of a first one.

    Args:
        tree: the first tree.
        aligned_tree: the second tree. In the place of a leaf of the first it may have any object, for example `None`.
        name: name of the second tree in errors.
        like: name of the first tree in errors.
        how_to_tie: makes the advice if the second tree lacks ties.

    Raises:
        SharingMismatchError: with the paths.
    """
    # Only the errors are of interest, not the list of objects.
    _aligned(pack_exactly(tree)[1], aligned_tree, _NamesOfTrees(name, like, f"the {like}", how_to_tie))


def map_pairs(f: Callable[[Path, Any, Any], Any], new: T, old: Any, how_to_tie: HowToTie) -> T:
    """Applies a function to the path, the new and the old value of each traced leaf. Errors call the trees so, too.

    If `new` has None at a path, `old` may have anything there, and the result has None.

    Args:
        f: takes the path, the leaf of `new` and the object at its path in `old`.
        new: the first tree. The result has its ties and its static leaves.
        old: the second tree.
        how_to_tie: makes the advice if `old` lacks ties of `new`.

    Raises:
        SharingMismatchError: if the trees differ in shape, or one has a tie between floating-point leaves that the
            other lacks.
    """
    require_registered(new)
    walked = walk_exactly(new)
    refuse_hidden_arrays(walked.structure)
    names = _NamesOfTrees("old", "new", "`new`", how_to_tie)
    # For each leaf of `new`, the number of its record in `old`.
    old_tree, records = _aligned_records(walked.structure, old, names, may_lack=True)
    leaves, paths = builtins.list(walked.leaves.values()), _leaf_paths(walked)
    _refuse_lost_ties(old_tree, records, leaves, paths)
    old_leaves = [old_tree.objects[record] for record in records]
    results = [f(*args) for args in zip(paths, leaves, old_leaves, strict=True)]
    return _put_together(walked.structure, leaves, results)


def _refuse_lost_ties(old: FlatDag, numbers: Sequence[int], leaves: Sequence[Any], paths: Sequence[Path]) -> None:
    """Raises an error if two floating-point leaves of `new` are one leaf in `old`, unless `untie` separated them.

    Args:
        old: the second tree.
        numbers: for each leaf of `new`, its record in `old`.
        leaves: the leaves of `new`.
        paths: their paths.
    """
    # Record in `old` → index of the first leaf of `new` that it stands for.
    first_index_of: dict[int, int] = {}
    for index, number in enumerate(numbers):
        leaf = old.objects[number]
        if old.records[number][0] is not LEAF or not carries_identity(leaf) or not is_inexact(leaf):
            continue
        first_index = first_index_of.setdefault(number, index)
        if first_index != index and not (is_noted(leaves[first_index]) and is_noted(leaves[index])):
            path1, path2 = jtu.keystr(paths[first_index]), jtu.keystr(paths[index])
            tied_path1, tied_path2 = _outermost_tied(old, paths[first_index], paths[index])
            node1, node2 = jtu.keystr(tied_path1), jtu.keystr(tied_path2)
            raise SharingMismatchError(
                f"`{path1}` and `{path2}` are one leaf in `old`, but two objects in `new`.\n"
                "The result would have two leaves, so the tie would be lost. If their values are equal, because a "
                "function such as `jax.tree.map` untied them, put the tie back:\n"
                "    new = sharedtree.retie(new, like=old)\n"
                "If they are meant to be separate:\n"
                f"{code_that_unties(f'old{node1}', [f'old{node2}'])}",
                (path1, path2),
            )


def _outermost_tied(tree: FlatDag, path1: Path, path2: Path) -> tuple[Path, Path]:
    """Returns the paths of the outermost nodes that are one object and lead to a tied leaf by the same keys.

    For a tree `[layer, layer]`, the leaf at `[0].weight` and `[1].weight` gives `[0]` and `[1]`. If no node is tied,
    returns the paths of the leaf.
    """
    record_at = {path: record for record, path in tree.edges()}
    num_common = 0
    while num_common < min(len(path1), len(path2)) and path1[-1 - num_common] == path2[-1 - num_common]:
        num_common += 1
    for length in range(num_common, 0, -1):
        node1, node2 = path1[: len(path1) - length], path2[: len(path2) - length]
        if node1 != node2 and node1 in record_at and record_at[node1] == record_at.get(node2):
            return node1, node2
    return path1, path2


def _refuse_static(static: Static, update: Any, path: Path) -> None:
    """Raises an error if there is an update for a static leaf, which would be lost.

    Args:
        static: the static leaf of the model.
        update: the object at its path in the updates. None is no update.
        path: the path.

    Raises:
        SharingMismatchError: with the path.
    """
    value = static.peek()
    # `map` on a gradient keeps static leaves, so the updates often have copies of them. But an equal number may be an
    # update by chance: a model with `scale=1.0` and the update `1.0`.
    is_copied = type(value) not in PYTHON_NUMBERS and Static(update) == static
    if update is not None and not is_copied:
        text = jtu.keystr(path)
        raise SharingMismatchError(
            f"`updates` has an update for `{text}`, which is static in the model: {shown(value)}. Static values are "
            "not updated.\n"
            "If it is to be trained, make it an array in the model. Otherwise leave it out of the updates:\n"
            "    updates = sharedtree.tree.filter(updates, eqx.is_inexact_array)",
            (text,),
        )


def _put_together(structure: Structure, old_leaves: list[Any], new_leaves: list[Any]) -> Any:
    """Builds a tree from new leaves. What is noted of an old leaf (see `_leaf_notes`) is noted of the new one."""
    # A tied leaf must stay tied, so a number of NumPy, which has no identity, becomes an array there.
    leaves = with_tied_numbers_as_arrays(new_leaves, structure)
    hand_on(old_leaves, leaves)
    return unpack(structure, leaves)


def _leaf_paths(tree: FlatDag) -> list[Path]:
    """Returns the first path of each traced leaf, in the order of the leaves."""
    return [tree.first_paths[number] for number in tree.leaf_numbers]


def _names_in_map(index: int) -> "_NamesOfTrees":
    """Returns the names of the first tree given to `map` and of the further tree with this index, in errors."""
    name = {0: "second_tree", 1: "third_tree"}.get(index, f"tree_{index + 2}")
    return _NamesOfTrees(name, "first_tree", "the first tree", how_to_tie)


class _NamesOfTrees(NamedTuple):
    """Names of two trees in errors, and advice.

    Attributes:
        name: name of the second tree in code.
        like: name of the first tree in code.
        title: name of the first tree in a sentence.
        advice: makes the advice if the second tree lacks ties of the first.
    """

    name: str
    like: str
    title: str
    advice: HowToTie


def _nothing_to_refuse(static: Static, value: Any, path: Path) -> None:
    """Accepts any object of the second tree at the path of a static leaf."""


def _aligned(
    structure: Structure,
    aligned_tree: Any,
    names: _NamesOfTrees,
    refuses: Callable[[Static, Any, Path], None] = _nothing_to_refuse,
    *,
    may_lack: bool = False,
) -> list[Any]:
    """Lists the objects of a second tree at the paths of the first tree's leaves, in the order of these leaves.

    The parameters and errors are those of `_aligned_records`.
    """
    tree, records = _aligned_records(structure, aligned_tree, names, refuses, may_lack=may_lack)
    return [tree.objects[record] for record in records]


def _aligned_records(
    structure: Structure,
    aligned_tree: Any,
    names: _NamesOfTrees,
    refuses: Callable[[Static, Any, Path], None] = _nothing_to_refuse,
    *,
    may_lack: bool = False,
) -> tuple[FlatDag, list[int]]:
    """Walks a second tree, and finds its record at the path of each leaf of the first tree.

    Args:
        structure: the structure of the first tree.
        aligned_tree: the second tree.
        names: words for errors.
        refuses: (static leaf of the first tree, object of the second tree at its path, path) → None. It may raise.
        may_lack: True if the first tree may lack parts of the second: where it has None, any object is accepted.

    Returns:
        The walked second tree, and the number of its record for each leaf of the first, in order.

    Raises:
        SharingMismatchError: if the trees differ in shape, or the second lacks a tie between leaves of the first.
    """
    walked, model = walk_alone(aligned_tree), structure.records

    def agree(i: int, _: int) -> bool:
        """Returns True if a record of the first tree accepts any object of the second tree."""
        op = model[i][0]
        return op is LEAF or type(op) is Static or (may_lack and type(op) is Node and op.type.cls is type(None))

    # Leaf of the first tree → the first pair with it.
    first_pairs: dict[int, RecordPair] = {}
    for pair in pairs(structure, walked, agree, compares_keys=True):
        if isinstance(pair, Mismatch):
            raise pair.error(names.title, f"`{names.name}`")
        op = model[pair.left][0]
        if type(op) is Static:
            refuses(op, walked.objects[pair.right], pair.path)
        if op is not LEAF:
            continue
        # A tied leaf: the second tree must have one object at all of its paths, or equal numbers.
        first_pair = first_pairs.setdefault(pair.left, pair)
        if first_pair.right != pair.right and not are_one_value(walked, first_pair.right, pair.right):
            path1, path2 = jtu.keystr(first_pair.path), jtu.keystr(pair.path)
            in_containers = pair.left in FlatDag.of(structure).outside
            raise SharingMismatchError(
                f"`{path1}` and `{path2}` are one leaf in {names.title}, but two objects in `{names.name}`.\n"
                "One leaf can take only one object.\n"
                f"{names.advice(names.name, names.like, in_containers=in_containers)}",
                (path1, path2),
            )
    return walked, [first_pairs[number].right for number, (op, _) in enumerate(model) if op is LEAF]


def equal(*trees: Any, typematch: bool = False, rtol: Any = 0.0, atol: Any = 0.0) -> Any:
    """Returns True if trees have equal structure, ties, static data and values. `equinox.tree_equal`, with ties.

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
    # Pairs of leaves and structure.
    packed = [pack_alone(tree) for tree in trees]
    # Equal structures are one object.
    if any(structure is not packed[0][1] for _, structure in packed):
        return False
    return eqx.tree_equal(*[leaves for leaves, _ in packed], typematch=typematch, rtol=rtol, atol=atol)
