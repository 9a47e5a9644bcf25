"""`jax.tree`, sharing-aware: the same names and signatures, each shared node once.

All of the argument counts as inside a module: tied arrays in a plain dict of parameters are one leaf. The leaves are
the *traced* ones; static leaves (activation functions, strings, Python numbers in Equinox modules) ride along in the
structure. `at`, `filter`, `partition`, `combine` and `equal` are Equinox's, with ties kept.
"""

import builtins
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import equinox as eqx
from jax import tree_util as jtu

from ._context import IsLeaf, pack_alone, pack_here, rules_here, unpack_here
from ._errors import InconsistentSharingError, SharingMismatchError
from ._graph import LEAF, Node, Op, Path, Record, Structure, Tags, build, canonical, edges, unpack, walk
from ._marking import ask, stand_ins
from ._node_types import require_registered
from ._prefix import labels
from ._sharing import Mismatch, Shape, pairs
from ._statics import Static

T = TypeVar("T")

_NOT_GIVEN: Any = object()
_Place = tuple[tuple[int, int], ...]


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
    return pack_here(tree, is_leaf)


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
    """
    return unpack_here(structure, builtins.list(leaves))


def structure(tree: Any, is_leaf: IsLeaf = None) -> Structure:
    """The structure of a tree by itself; see `flatten`.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> st.tree.structure([jnp.ones(2)]) is st.tree.structure([jnp.zeros(3)])
        True
    """
    require_registered(tree)
    return pack_alone(tree, is_leaf)[1]


def leaves(tree: Any, is_leaf: IsLeaf = None) -> list[Any]:
    """The traced leaves of a tree by itself, each once, aliased; see `flatten`.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> len(st.tree.leaves([w, w]))
        1
    """
    require_registered(tree)
    return pack_alone(tree, is_leaf)[0]


def leaves_with_path(tree: Any, is_leaf: IsLeaf = None) -> list[tuple[Path, Any]]:
    """The traced leaves, each once, with the key path of its first occurrence as `jax.tree.leaves_with_path` has it.

    Example:
        >>> import jax, jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> [jax.tree_util.keystr(path) for path, leaf in st.tree.leaves_with_path({"a": w, "b": w})]
        ["['a']"]
    """
    require_registered(tree)
    found, structure = pack_alone(tree, is_leaf)
    return builtins.list(zip(_leaf_paths(structure), found, strict=True))


def map(f: Callable[..., Any], tree: T, *rest: Any, is_leaf: IsLeaf = None) -> T:  # noqa: A001
    """Applies a function to each traced leaf once; the result has the ties of `tree`.

    Args:
        f: takes a leaf of `tree` and what is at its path in each of `rest`.
        tree: a module, or any container of modules and arrays.
        rest: trees of the same shape, which where `tree` has a leaf may hold anything: a subtree, a Python number, or
            `None`, which is handed to `f` as None. What is tied in `tree` must be one object in each of them.
        is_leaf: nodes of `tree` for which it is true count as leaves.

    Returns:
        A tree of new nodes; static leaves are those of `tree`.

    Raises:
        SharingMismatchError: if one of `rest` has another shape, or lacks a tie of `tree`; names the paths.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> doubled = st.tree.map(lambda x: 2 * x, {"a": w, "b": w})
        >>> doubled["a"] is doubled["b"]
        True

    Limitations: if `f` returns one object for two leaves, the result has that tie too.
    """
    return map_with_path(lambda _, *args: f(*args), tree, *rest, is_leaf=is_leaf)


def map_with_path(f: Callable[..., Any], tree: T, *rest: Any, is_leaf: IsLeaf = None) -> T:
    """As `map`, with the key path of the leaf's first occurrence as the first argument of `f`.

    Example:
        >>> import jax, jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> st.tree.map_with_path(lambda path, x: jax.tree_util.keystr(path), {"a": w, "b": w})
        {'a': "['a']", 'b': "['a']"}
    """
    require_registered(tree)
    found, structure = pack_alone(tree, is_leaf)
    columns = [_aligned(structure, other, f"rest[{i}]") for i, other in enumerate(rest)]
    paths = _leaf_paths(structure)
    return unpack(structure, [f(*args) for args in zip(paths, found, *columns, strict=True)])


def _leaf_paths(structure: Structure) -> list[Path]:
    first: dict[int, Path] = {}
    for number, path in edges(structure.records, [((), structure.root)]):
        first.setdefault(number, path)
    return [first[number] for number, (op, _) in enumerate(structure.records) if op is LEAF]


def _aligned(structure: Structure, other: Any, name: str) -> list[Any]:
    """What `other` holds where `structure` has its leaves."""
    tags = Tags()
    _, records, root = walk(other, tags, rules_here())
    model = structure.records

    def agree(i: int, _: int) -> bool:
        return model[i][0] is LEAF or type(model[i][0]) is Static

    found: dict[int, tuple[int, Path]] = {}
    for pair in pairs(Shape(model, structure.root), Shape(records, root), agree):
        if isinstance(pair, Mismatch):
            raise pair.error("the tree", f"`{name}`")
        if model[pair.left][0] is not LEAF:
            continue
        number, path = found.setdefault(pair.left, (pair.right, pair.path))
        if number != pair.right and not _are_one_value(records, number, pair.right):
            one, two = jtu.keystr(path), jtu.keystr(pair.path)
            raise SharingMismatchError(
                f"`{one}` and `{two}` are one leaf in the tree, but two objects in `{name}`.\n"
                "Which of the two is meant cannot be known. Tie them there too:\n"
                f"    sharedtree.retie({name}, like=tree)\n"
                "For gradients that would drop one path's share: take them with `sharedtree.grad`, which sums.",
                (one, two),
            )
    return [tags.objects[found[number][0]] for number, (op, _) in enumerate(model) if op is LEAF]


def _are_one_value(records: Sequence[Record], i: int, j: int) -> bool:
    """Whether two records without identity, such as two Nones or two equal numbers, hold one value."""
    (op, below), (other, below2) = records[i], records[j]
    if op is LEAF and other is LEAF:
        return False
    same = op == other and len(below) == len(below2)
    return same and all(a == b or _are_one_value(records, a, b) for a, b in zip(below, below2, strict=True))


def at(
    where: Callable[[T], Any],
    tree: T,
    replace: Any = _NOT_GIVEN,
    replace_fn: Callable[[Any], Any] = _NOT_GIVEN,
    is_leaf: IsLeaf = None,
) -> T:
    """Replaces nodes or leaves; what is tied is replaced at every path. `equinox.tree_at`, with ties kept.

    Args:
        where: takes the tree and returns the node to replace, or a sequence of nodes. It is called on a stand-in
            without values. A `None` can be replaced without further ado.
        tree: the tree; it is not changed.
        replace: the replacement, or a sequence of as many as `where` returned.
        replace_fn: instead of `replace`: takes what is there and returns the replacement.
        is_leaf: nodes for which it is true count as leaves.

    Returns:
        A tree of new nodes; all other arrays are the same objects.

    Raises:
        SharingMismatchError: if `where` returns what is not in the tree.
        ValueError: if not exactly one of `replace` and `replace_fn` is given, or their numbers differ.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones(2)
        >>> new = st.tree.at(lambda m: m["a"], {"a": w, "b": w}, jnp.zeros(2))
        >>> new["a"] is new["b"], new["b"]
        (True, Array([0., 0.], dtype=float32))
    """
    if (replace is _NOT_GIVEN) == (replace_fn is _NOT_GIVEN):
        raise ValueError("Give exactly one of `replace` and `replace_fn`.")
    require_registered(tree)
    tags = Tags()
    _, records, root = walk(tree, tags, rules_here(is_leaf))
    targets, is_single = ask(where, stand_ins(records), root)
    if replace_fn is not _NOT_GIVEN:
        new = [replace_fn(tags.objects[target]) for target in targets]
    else:
        new = [replace] if is_single else builtins.list(replace)
    if len(new) != len(targets):
        raise ValueError(f"`where` returned {len(targets)} nodes, but `replace` has {len(new)}.")
    instead = dict(zip(targets, new, strict=True))

    def expand(number: int) -> tuple[Op, Sequence[int]]:
        return (LEAF, ()) if number in instead else records[number]

    return _rebuilt(root, expand, lambda number: instead[number] if number in instead else tags.objects[number])


def _rebuilt(root: Any, expand: Callable[[Any], tuple[Op, Sequence[Any]]], object_of: Callable[[Any], Any]) -> Any:
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
    for number, label, path in labels(
        filter_spec, records, root, lambda x: isinstance(x, bool) or callable(x), "filter_spec"
    ):
        keep = bool(label(tags.objects[number])) if callable(label) else label
        before, first = selected.setdefault(number, (keep, path))
        if before != keep:
            raise _inconsistent_filter(jtu.keystr(first), jtu.keystr(path), before)

    def half(keep: bool) -> Any:
        def expand(number: int) -> tuple[Op, Sequence[int]]:
            return (LEAF, ()) if number in selected else records[number]

        return _rebuilt(root, expand, lambda number: tags.objects[number] if selected[number][0] is keep else replace)

    return half(True), half(False)


def _inconsistent_filter(first: str, second: str, kept: bool) -> InconsistentSharingError:
    treatments = ("selected", "not selected") if kept else ("not selected", "selected")
    return InconsistentSharingError(
        f"`{first}` and `{second}` are one object, but `filter_spec` has it {treatments[0]} at the first path and "
        f"{treatments[1]} at the second.\n"
        "Select both or neither, which `sharedtree.tree.at` does by itself:\n"
        "    spec = sharedtree.tree.at(where, sharedtree.tree.map(lambda _: False, model), True)\n"
        "or part them first: sharedtree.untie(model, where)",
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
    return _rebuilt(root, expand, lambda place: tags[place[0][0]].objects[place[0][1]])


def _is_none(record: Record) -> bool:
    op, _ = record
    return type(op) is Node and op.type.cls is type(None)


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
